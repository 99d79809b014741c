"""Names of tests: the same in every process and at every time, and short enough to be read."""

import re

import pytest

CHANGING = re.compile(
    r"0x[0-9a-f]{6,}"  # an address
    r"|\\x1f\\x8b"  # what gzip makes begins so, and goes on with the time of day
)
LONGEST = 230


def test_names_hold_no_address_no_time_and_no_data(request: pytest.FixtureRequest) -> None:
    """Only those that this session has collected: a whole run looks at all of them."""
    names = [item.nodeid for item in request.session.items]
    assert names
    assert not [name for name in names if CHANGING.search(name)]
    assert not [name[:300] for name in names if len(name) > LONGEST]
