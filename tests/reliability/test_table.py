"""The table of faults survived says what its records say."""

from __future__ import annotations

import json

import pytest

from tests.reliability.table import HELD, PAGE, ROWS, counting, folded, rendered

HERE = "tests/reliability/test_table.py::test_page_is_what_the_records_say"
OTHER = f"{HERE}[other]"


def record(test: str, commit: str, date: str, **counted: list[int]) -> dict[str, object]:
    return {"test": test, "commit": commit, "date": date, "counted": counted}


def test_page_is_what_the_records_say() -> None:
    held = json.loads(HELD.read_text())
    assert held.keys() <= ROWS.keys()
    assert PAGE.read_text() == rendered(held)


def test_counts_add_up_and_a_test_that_ran_again_counts_once() -> None:
    both = [record(HERE, "1", "2026-01-01", kills=[60, 0]), record(OTHER, "1", "2026-01-01", kills=[50, 0])]
    held = folded({}, both)
    assert "goes on to the same floats | 110 | 0 | 100 | met | 1 | 2026-01-01 |" in rendered(held)
    again = folded(held, [record(OTHER, "2", "2026-01-02", kills=[30, 0])])
    assert "| 90 | 0 | 100 | owed | 1 |" in rendered(again)
    failed = folded(held, [record(OTHER, "2", "2026-01-02", kills=[50, 1])])
    assert "| 110 | 1 | 100 | owed |" in rendered(failed), "one failure is no promise kept"
    most = folded({}, [record(HERE, "2", "2026-01-02", kernel_mutants=[240, 12])])
    assert "| 240 | 12 | 240, 5% may fail | met |" in rendered(most)
    assert not folded({}, [record("tests/that_has_gone.py::a", "1", "2026-01-01", kills=[60, 0])])["kills"]


def test_a_case_that_fails_fails_its_test_and_is_counted() -> None:
    counted = dict[str, list[int]]()
    survived = counting(counted)
    survived("kills", 2)
    with pytest.raises(AssertionError, match="1 of 3 cases of kills failed"):
        survived("kills", 3, 1)
    assert counted == {"kills": [5, 1]}
    with pytest.raises(AssertionError, match="tries nothing"):
        survived("kills", 0)
