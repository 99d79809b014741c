"""From a data source to rows of a type: reading, recognising, checking, counting."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from rlhf_engine.data import taskmaster
from rlhf_engine.data.read import read_records
from rlhf_engine.data.report import RowError, Tally
from rlhf_engine.data.types import KINDS, Kind, Row, parse_row, recognise


def load_rows(
    source: str | os.PathLike[str],
    tally: Tally,
    *,
    kinds: Sequence[Kind] = KINDS,
    limit: int | None = None,
    group_column: str | None = None,
) -> list[Row]:
    """The usable rows of a source, all of the one of `kinds` that its columns show.

    Taskmaster's published rewards (see `data.taskmaster`) are unpaired preferences whose group is their conversation,
    or the prompts of these.

    limit: read only the first so many rows. group_column: whose values are the rows' groups. What is read and what is
    bad is counted in `tally`, by whose argument messages call the source. Raises ConfigError as `read_records`,
    `recognise` and `Tally.check` do.
    """
    records = list(islice(read_records(source, argument=tally.argument), limit))
    objects = (record.value for record in records if isinstance(record.value, Mapping))
    # tables give every row every column, so that one without a value is no column of its row
    columns = Counter(frozenset(name for name, value in row.items() if value is not None) for row in objects)
    parse = _parser(columns, kinds, group_column, tally.argument)
    rows: list[Row] = []
    for record in records:
        tally.read += 1
        try:
            if record.error is not None:
                raise record.error
            rows.append(parse(record.value, record.place))
        except RowError as error:
            tally.bad(record.place, error)
    tally.check()
    return rows


def _parser(
    columns: Counter[frozenset[str]], kinds: Sequence[Kind], group_column: str | None, argument: str
) -> Callable[[Any, str], Row]:
    """What makes a row of a value and its place, by the columns that the values have."""
    published = sum(n for names, n in columns.items() if names >= taskmaster.COLUMNS)
    if 2 * published > columns.total() and group_column in (None, "conversation_id"):
        if "unpaired_preference" in kinds:
            return lambda value, place: taskmaster.parse_taskmaster(value, place=place)
        if "prompt_only" in kinds:
            return lambda value, place: taskmaster.prompt_of(taskmaster.parse_taskmaster(value, place=place))
    kind = recognise(columns, kinds, argument=argument)
    return lambda value, place: parse_row(value, kind, place=place, group_column=group_column)
