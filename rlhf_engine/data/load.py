"""Turns a data source into rows of a type: reads, recognises, checks and counts them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeVar

from huggingface_hub.constants import HF_HUB_OFFLINE

from rlhf_engine.config.run import RowOptions
from rlhf_engine.data.read import Record, read_records, usable_rows
from rlhf_engine.data.tally import RowError, Tally, shown
from rlhf_engine.data.taskmaster import COLUMNS, parse_taskmaster
from rlhf_engine.data.types import KINDS, Kind, PromptOnly, Row, parse_row, recast, recognise, with_known_columns

R = TypeVar("R", bound=Row)


def load_rows(
    source: str | os.PathLike[str],
    tally: Tally,
    options: RowOptions | None = None,
    *,
    kinds: Sequence[Kind] = KINDS,
    limit: int | None = None,
    group_column: str | None = None,
) -> list[Row]:
    """Read the usable rows of a source, all of the one of `kinds` that its columns show.

    A source is a file, folder, or `hub:owner/name`, see `data.read`; of `kinds` the first are preferred. A row's group
    is its value of `group_column`; None: its prompt. Taskmaster's published rewards (see `data.taskmaster`) are
    unpaired preferences whose group is their dialogue, or the prompts of these. A source without usable rows raises
    ConfigError, with the tally's `argument` as its name.
    """
    streaming = limit is not None and not HF_HUB_OFFLINE  # a whole copy would be fetched for a few rows
    read = islice(read_records(source, argument=tally.argument, streaming=streaming), limit)
    records = [part for record in read for part in _known_parts(record, kinds)]
    objects = (record.value for record in records if isinstance(record.value, Mapping))
    # tables give every row every column, so that one without a value is no column of its row
    columns = Counter(frozenset(name for name, value in row.items() if value is not None) for row in objects)
    is_taskmaster = _is_taskmaster(columns, kinds, group_column)
    kind: Kind = "unpaired_preference" if is_taskmaster else recognise(columns, kinds, argument=tally.argument)
    parse = parse_taskmaster if is_taskmaster else partial(parse_row, kind=kind, group_column=group_column)
    rows = usable_rows(records, tally, lambda value, place: with_options(parse(value, place=place), options))
    if kind not in kinds:
        return [recast(row, PromptOnly) for row in rows]
    return join_groups(rows) if kind == "implicit_preference" and group_column is None else rows


def _known_parts(record: Record, kinds: Sequence[Kind]) -> list[Record]:
    """The record with TRL's columns, in several where it is a conversation of several answers."""
    try:
        return [replace(record, value=value) for value in with_known_columns(record.value, kinds)]
    except RowError as error:
        return [replace(record, value=None, error=error)]


def with_options(row: R, options: RowOptions | None) -> R:
    """Give a conversation the system prompt, unless it has one, and template arguments beside its own.

    Raises RowError for a row of strings, which no chat template writes.
    """
    if options is None or (options.system_prompt is None and not options.chat_template_kwargs):
        return row
    if isinstance(row.prompt, str):
        raise RowError("messages for system_prompt and chat_template_kwargs", shown(row.prompt))
    prompt = row.prompt
    if options.system_prompt is not None and prompt[0]["role"] != "system":
        prompt = ({"role": "system", "content": options.system_prompt}, *prompt)
    return replace(row, prompt=prompt, template={**(options.chat_template_kwargs or {}), **row.template})


def _is_taskmaster(columns: Counter[frozenset[str]], kinds: Sequence[Kind], group_column: str | None) -> bool:
    """Whether most rows have the columns of the published rewards, and one of `kinds` can be made of them."""
    published = sum(n for names, n in columns.items() if names >= COLUMNS)
    wanted = "unpaired_preference" in kinds or "prompt_only" in kinds
    return 2 * published > columns.total() and wanted and group_column in (None, "conversation_id")


def join_groups(rows: Sequence[Row]) -> list[Row]:
    """Rows of implicit prompts, those that may answer the same question in one group.

    Such a prompt is what two answers begin with in common, which with other answers to the same question is more of
    them or less. So the group is the prompt's whole lines, as answers mostly begin in the middle of one, and rows whose
    group begins with that of others join them.
    """
    lines = {row.group: row.group.rpartition("\n")[0] for row in rows if isinstance(row.prompt, str)}
    groups = {group: whole if whole.strip() else group for group, whole in lines.items()}
    first: dict[str, str] = {}
    root: str | None = None
    for group in sorted(set(groups.values())):  # what begins with another comes after it, with only such in between
        if root is None or not group.startswith(root):
            root = group
        first[group] = root
    return [replace(row, group=first[groups[row.group]]) if row.group in groups else row for row in rows]
