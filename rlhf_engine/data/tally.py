"""Tally of the rows of a data source: counts, places of bad ones, and the threshold that stops a run.

    read = used + bad + dropped            truncated, without_prompt ≤ used

A bad row cannot be used; a dropped one is too long where the user asked to drop such rows (`truncation`). Rows are
never left out or cut without being counted here.
"""

from __future__ import annotations

import dataclasses
import reprlib
from dataclasses import dataclass, field
from typing import Any

from rlhf_engine.errors import ConfigError

PLACES_SHOWN = 3
"""Places kept of every reason why rows are bad."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


class RowError(ValueError):
    """A row that cannot be used. Rows are counted by what was expected of them."""

    def __init__(self, expected: str, got: str, hint: str = "") -> None:
        """Make the message `expected …, got …`; all rows of one reason have the same `expected`.

        `hint` names an option that would serve such rows.
        """
        super().__init__(f"expected {expected}, got {got}")
        self.hint = hint
        self.expected = expected
        self.got = got


def shown(value: Any) -> str:
    """repr, cut short: a value may be a whole book."""
    return _REPR.repr(value)


@dataclass(frozen=True, kw_only=True)
class BadRows:
    """Rows that are bad for one reason."""

    expected: str
    """Description of what the rows should have had."""
    count: int
    """Number of such rows."""
    places: tuple[str, ...]
    """Places of the first few."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report on the rows of one source."""

    source: str
    """Name of the source."""
    read: int
    """Rows read."""
    used: int
    """Rows that are neither bad nor dropped."""
    bad: tuple[BadRows, ...]
    """One entry per reason, the most frequent first."""
    dropped: int
    """Rows that were too long, left out because `truncation` says so."""
    truncated: int
    """Rows of which tokens were cut, because `truncation` says so."""
    without_prompt: int = 0
    """Rows with an answer to an empty prompt."""

    @property
    def n_bad(self) -> int:
        """Bad rows of all reasons."""
        return sum(kind.count for kind in self.bad)

    @property
    def is_plain(self) -> bool:
        """Whether every row was used as it is."""
        return self.used == self.read and not self.truncated and not self.without_prompt

    def text(self) -> str:
        """Describe the counts in one line, without markup."""
        parts = [f"{self.read} rows read", f"{self.used} used"]
        if self.bad:
            reasons = "; ".join(f"expected {kind.expected}: {_places(kind.places, kind.count)}" for kind in self.bad)
            parts.append(f"{self.n_bad} bad ({reasons})")
        if self.dropped:
            parts.append(f"{self.dropped} dropped as too long")
        if self.truncated:
            parts.append(f"{self.truncated} truncated")
        if self.without_prompt:
            parts.append(f"{self.without_prompt} with an empty prompt")
        return f"{self.source}: {', '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name, for a run's record."""
        return {**dataclasses.asdict(self), "bad": [dataclasses.asdict(kind) for kind in self.bad]}


@dataclass(kw_only=True)
class Tally:
    """Counts while rows are read and tokenized; `report()` makes a `Report` of it."""

    source: str
    """Name of the source."""
    argument: str = "dataset_name"
    """Name of the option that names the source, for messages."""
    max_bad_rows: float = 0.0
    """Bad rows allowed: below 1 a share of the rows read, from 1 on a number of rows; 0 allows none."""
    read: int = 0
    """Rows read so far."""
    dropped: int = 0
    """Rows that were left out as too long."""
    truncated: int = 0
    """Rows of which tokens were cut."""
    without_prompt: int = 0
    """Rows that are used and have an answer to an empty prompt."""
    _bad: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    _first: str | None = None
    _hint: str = ""

    def __post_init__(self) -> None:
        value = self.max_bad_rows
        if not (0 <= value < 1 or (value >= 1 and float(value).is_integer())):
            raise ConfigError(f"max_bad_rows: expected a share below 1 or a whole number of rows, got {value:g}")

    def bad(self, place: str, error: RowError) -> None:
        """Count the bad row at this place of the source, and the reason why it cannot be used."""
        count, places = self._bad.get(error.expected, (0, []))
        if len(places) < PLACES_SHOWN:
            places.append(place)
        self._bad[error.expected] = (count + 1, places)
        if self._first is None:
            self._first = f"{place}: {error}"
            self._hint = error.hint

    @property
    def n_bad(self) -> int:
        """Bad rows so far."""
        return sum(count for count, _ in self._bad.values())

    @property
    def allowed(self) -> int:
        """Bad rows that the rows read so far may hold."""
        return int(self.max_bad_rows * self.read + 1e-9) if self.max_bad_rows < 1 else int(self.max_bad_rows)

    def check(self) -> None:
        """Raise ConfigError where more rows are bad than allowed, or no row is left."""
        n, left = self.n_bad, self.read - self.n_bad - self.dropped
        if n > self.allowed:
            on = f"; max_bad_rows={n} goes on without {'it' if n == 1 else 'them'}" if left else ""
            on = f"; {self._hint}" if self._hint else on
            if n == 1:
                raise ConfigError(f"{self._first}{on}")
            others = "; ".join(f"expected {e}: {_places(p, c)}" for e, (c, p) in self._bad.items())
            raise ConfigError(
                f"{self._first}. {n} of {self.read} rows cannot be used, where max_bad_rows is "
                f"{self.max_bad_rows:g}: {others}{on}"
            )
        if left == 0:
            got = "none" if self.read == 0 else self.report().text()
            raise ConfigError(f"{self.argument}: expected at least one row in {self.source!r}, got {got}")

    def report(self) -> Report:
        """Report the counts as they are now, with the most frequent reasons first."""
        bad = [BadRows(expected=e, count=c, places=tuple(p)) for e, (c, p) in self._bad.items()]
        return Report(
            source=self.source,
            read=self.read,
            used=self.read - self.n_bad - self.dropped,
            bad=tuple(sorted(bad, key=lambda kind: -kind.count)),
            dropped=self.dropped,
            truncated=self.truncated,
            without_prompt=self.without_prompt,
        )


def _places(places: tuple[str, ...] | list[str], count: int) -> str:
    more = f" and {count - len(places)} more" if count > len(places) else ""
    return ", ".join(places) + more
