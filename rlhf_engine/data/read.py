"""Data sources read into rows of a type; rows that are left out or cut are counted, with their places.

Sources are JSON and CSV files (also as .gz), Parquet, folders of such or of `datasets.save_to_disk`, and data sets of
the Hugging Face Hub; docs/guides/train.md has the table. A local path comes first. A file of another name has an object
per line. Cells of a CSV are texts, an empty one is no value, and a `label` of true, false, 1 or 0 is a truth value.

Only line feeds end a line, as JSON strings may hold U+2028. A line that is no JSON, or an object that names a column
twice, is a bad row; a file that cannot be read to its end is an error, whatever rows came before. JSON and CSV are not
read by `datasets`: it gives a column one type, so that 1 beside 2.5 becomes 1.0, and does not name damaged lines.

    read = used + bad + dropped            truncated, without_prompt ≤ used

A bad row cannot be used; a dropped one is too long where the user asked to drop such rows (`truncation`).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from rlhf_engine.config.run import SUFFIXES, RowOptions
from rlhf_engine.data.types import (
    KINDS,
    TASKMASTER_COLUMNS,
    Kind,
    PromptOnly,
    Row,
    RowError,
    parse_row,
    parse_taskmaster,
    recast,
    recognise,
    shown,
    with_known_columns,
)
from rlhf_engine.errors import ConfigError

R = TypeVar("R", bound=Row)
_HUB = re.compile(r"(?:hub:)?(\w[\w.-]*/\w[\w.-]*)(?:/(\w[\w.-]*))?(?:@([\w./-]+))?(?::([\w.-]+))?")
"""owner/name, subset, revision, split."""
_FIRST = re.compile(r"(.+)\[:([1-9]\d*)\]")  # a source, and how many of its rows are read
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?=[-_.])", re.IGNORECASE)
"""Beginning of the name of a file that holds one part of a data set."""
_BOM = b"\xef\xbb\xbf"
_LABELS = {"true": True, "1": True, "false": False, "0": False}
PLACES_SHOWN = 3  # places kept of every reason why rows are bad


@dataclass(kw_only=True)
class Tally:
    """Counts of the rows of a data source, while they are read and tokenized."""

    source: str  # name of the source
    argument: str = "dataset_name"  # name of the option that names the source, for messages
    max_bad_rows: float = 0.0
    """Bad rows allowed: below 1 a share of the rows read, from 1 on a number of rows; 0 allows none."""
    read: int = 0  # rows read so far
    dropped: int = 0  # rows that were left out as too long
    truncated: int = 0  # rows of which tokens were cut
    without_prompt: int = 0  # rows that are used and have an answer to an empty prompt
    bad: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    """What was expected of bad rows → number of them, and places of the first few."""
    _first: str | None = None
    _hint: str = ""

    def refuse(self, place: str, error: RowError) -> None:
        """Count the bad row at this place of the source, and the reason why it cannot be used."""
        count, places = self.bad.get(error.expected, (0, []))
        self.bad[error.expected] = (count + 1, [*places, place][:PLACES_SHOWN])
        if self._first is None:
            self._first = f"{place}: {error}"
            self._hint = error.hint

    @property
    def n_bad(self) -> int:
        """Bad rows so far."""
        return sum(count for count, _ in self.bad.values())

    @property
    def used(self) -> int:
        """Rows that are neither bad nor dropped."""
        return self.read - self.n_bad - self.dropped

    @property
    def is_plain(self) -> bool:
        """Whether every row was used as it is."""
        return self.used == self.read and not self.truncated and not self.without_prompt

    @property
    def allowed(self) -> int:
        """Bad rows that the rows read so far may hold."""
        return int(self.max_bad_rows * self.read + 1e-9) if self.max_bad_rows < 1 else int(self.max_bad_rows)

    def check(self) -> None:
        """Raise ConfigError where more rows are bad than allowed, or no row is left."""
        n = self.n_bad
        if n > self.allowed:
            on = f"; max_bad_rows={n} goes on without {'it' if n == 1 else 'them'}" if self.used else ""
            on = f"; {self._hint}" if self._hint else on
            if n == 1:
                raise ConfigError(f"{self._first}{on}")
            raise ConfigError(
                f"{self._first}. {n} of {self.read} rows cannot be used, where max_bad_rows is "
                f"{self.max_bad_rows:g}: {self._reasons()}{on}"
            )
        if self.used == 0:
            got = "none" if self.read == 0 else self.text()
            raise ConfigError(f"{self.argument}: expected at least one row in {self.source!r}, got {got}")

    def _by_count(self) -> list[tuple[str, int, list[str]]]:
        """Reasons why rows are bad, the most frequent first."""
        return sorted(((reason, *entry) for reason, entry in self.bad.items()), key=lambda row: -row[1])

    def _reasons(self) -> str:
        rows = (
            f"expected {reason}: {', '.join(places)}" + (f" and {n - len(places)} more" if n > len(places) else "")
            for reason, n, places in self._by_count()
        )
        return "; ".join(rows)

    def text(self) -> str:
        """Describe the counts in one line, without markup."""
        counts = {
            f"bad ({self._reasons()})": self.n_bad,
            "dropped as too long": self.dropped,
            "truncated": self.truncated,
            "with an empty prompt": self.without_prompt,
        }
        parts = [f"{n} {what}" for what, n in counts.items() if n]
        return ", ".join([f"{self.source}: {self.read} rows read", f"{self.used} used", *parts])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a run's record."""
        return {
            "source": self.source,
            "read": self.read,
            "used": self.used,
            "bad": [{"expected": reason, "count": n, "places": places} for reason, n, places in self._by_count()],
            "dropped": self.dropped,
            "truncated": self.truncated,
            "without_prompt": self.without_prompt,
        }


def read_text(name: str, argument: str) -> str:
    """The text of a file that an option names; ConfigError for what is no file, or no UTF-8."""
    if not Path(name).is_file():
        raise ConfigError(f"{argument}: expected a text file, got {name!r}, which is not one")
    try:
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{argument}: expected text in UTF-8 in {name!r}, got {error}") from error


# ---- rows of a type --------------------------------------------------------------------------------------------------


def load_rows(
    source: str | os.PathLike[str],
    tally: Tally,
    options: RowOptions | None = None,
    *,
    kinds: Sequence[Kind] = KINDS,
    limit: int | None = None,
    group_column: str | None = None,
) -> list[Row]:
    """Read the usable rows of a source, of the one of `kinds` that its columns show; ConfigError without any."""
    named = None if Path(source).exists() else _FIRST.fullmatch(os.fspath(source))
    if named is not None:
        source, limit = named[1], min(int(named[2]), limit or int(named[2]))
    records: list[Record] = []
    for place, value in islice(read_records(source, argument=tally.argument, streaming=named is not None), limit):
        try:  # a conversation of several answers is several records
            records += [Record(place, part) for part in with_known_columns(value, kinds)]
        except RowError as error:
            records.append(Record(place, error))
    objects = (record.value for record in records if isinstance(record.value, Mapping))
    # tables give every row every column, so that one without a value is no column of its row
    columns = Counter(frozenset(name for name, value in row.items() if value is not None) for row in objects)
    is_taskmaster = _is_taskmaster(columns, kinds, group_column)
    kind: Kind = "unpaired_preference" if is_taskmaster else recognise(columns, kinds, argument=tally.argument)
    parse = parse_taskmaster if is_taskmaster else partial(parse_row, kind=kind, group_column=group_column)
    rows: list[Row] = []
    for record in records:
        tally.read += 1
        try:
            if isinstance(record.value, RowError):
                raise record.value
            rows.append(with_options(parse(record.value, place=record.place), options))
        except RowError as error:
            tally.refuse(record.place, error)
    tally.check()
    if kind not in kinds:
        return [recast(row, PromptOnly) for row in rows]
    return join_groups(rows) if kind == "implicit_preference" and group_column is None else rows


def with_options(row: R, options: RowOptions | None) -> R:
    """Give a conversation the system prompt, unless it has one, and template arguments; RowError for strings."""
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
    published = sum(n for names, n in columns.items() if names >= TASKMASTER_COLUMNS)
    is_wanted = "unpaired_preference" in kinds or "prompt_only" in kinds
    return 2 * published > columns.total() and is_wanted and group_column in (None, "conversation_id")


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


# ---- records ---------------------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """One row as read."""

    place: str  # `file:line`, or `file: row i` where rows have no lines
    value: Any  # row as read, whose columns are not checked; the RowError of one that cannot be read


def read_records(
    source: str | os.PathLike[str], *, argument: str = "dataset_name", streaming: bool = False
) -> Iterator[Record]:
    """Iterate over the rows of a source; `streaming` fetches those of the Hub as they are read and keeps no copy."""
    path = Path(source)
    if path.is_file():
        return _file(path)
    if path.is_dir():
        return _folder(path, argument)
    name = os.fspath(source)
    if name.startswith("hub:") or (_HUB.fullmatch(name) is not None and not name.endswith(SUFFIXES)):
        return _hub(name, argument, streaming)
    raise ConfigError(
        f"{argument}: expected a .json, .jsonl, .csv or .parquet file, a folder of such or owner/name of the Hub, got "
        f"{name!r} which is not a file"
    )


def _file(path: Path) -> Iterator[Record]:
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".parquet"):
        return _table(str(path), f"{path}: expected a Parquet file", lambda: _parquet(path))
    return (_json_list if name.endswith(".json") else _csv if name.endswith(".csv") else _json_lines)(path)


def _folder(path: Path, argument: str) -> Iterator[Record]:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(p.parent.name for p in path.glob("*/state.json"))
        raise ConfigError(f"{argument}: expected the folder of one split, got {str(path)!r} with the splits {splits}")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        import datasets  # takes seconds, which files need not wait for

        load = partial(datasets.load_from_disk, str(path))
        return _table(str(path), f"{path}: expected a folder of save_to_disk", load)
    files = sorted(p for p in path.iterdir() if p.is_file() and p.name.lower().endswith(SUFFIXES) and p.name[0] != ".")
    if not files:
        raise ConfigError(f"{argument}: expected files {', '.join(SUFFIXES)} in {str(path)!r}, got none")
    splits = sorted({match[0].lower() for file in files if (match := _SPLIT.match(file.name))})
    if len(splits) > 1:
        raise ConfigError(f"{argument}: expected files of one split in {str(path)!r}, got {splits}; name a file")
    return (record for file in files for record in _file(file))


# ---- JSON and CSV ----------------------------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | RowError:
    """A JSON object; the RowError of one that names a column twice, or holds such a one."""
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        return RowError("every column once", f"{twice!r} twice")
    return next(filter(None, map(_error_in, record.values())), record)


def _error_in(value: Any) -> RowError | None:
    if isinstance(value, list):
        return next(filter(None, map(_error_in, value)), None)
    return value if isinstance(value, RowError) else None


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, perhaps a compressed one. Raises ConfigError where the block cannot read it to its end."""
    is_gzip = path.name.lower().endswith(".gz")
    try:
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as stream:
            yield stream  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        expected = "whole gzip data" if is_gzip else "a file that can be read"
        raise ConfigError(f"{path}: expected {expected}, got {error}") from error


def _json_list(path: Path) -> Iterator[Record]:
    with _open(path) as stream:
        text = stream.read().removeprefix(_BOM)
    try:
        whole = json.loads(text.decode("utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or integers of more digits than Python takes
        hint = "; a file with an object per line is called .jsonl" if "Extra data" in str(error) else ""
        raise ConfigError(f"{path}: expected JSON in UTF-8, got {error}{hint}") from error
    if not isinstance(whole, list):
        came = "dict" if isinstance(whole, RowError) else type(whole).__name__
        raise ConfigError(f"{path}: expected a list of objects, got {came}")
    for i, row in enumerate(whole):
        yield Record(f"{path}: row {i}", row)


def _json_lines(path: Path) -> Iterator[Record]:
    with _open(path) as stream:
        for number, line in enumerate(stream, start=1):
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                yield Record(f"{path}:{number}", _line(line))


def _line(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        return RowError("JSON in UTF-8", str(error))
    except (ValueError, RecursionError) as error:
        return RowError("a JSON object", str(error))


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # a cell may hold a whole book
    rows: Any = None
    try:
        with _open(path) as stream:
            rows = csv.reader(io.TextIOWrapper(stream, "utf-8-sig", newline=""), strict=True)
            names: list[str] = next(rows, [])
            number = rows.line_num
            if len(set(names)) < len(names):
                raise csv.Error(f"a column name twice in {names}")
            for cells in rows:
                place, number = f"{path}:{number + 1}", rows.line_num
                if len(cells) == len(names):
                    row: dict[str, Any] = {name: cell or None for name, cell in zip(names, cells, strict=True)}
                    label = str(row.get("label")).lower()
                    if "completion" in row and label in _LABELS:  # a thumb; elsewhere it is a column like others
                        row["label"] = _LABELS[label]
                    yield Record(place, row)
                elif cells:
                    yield Record(place, RowError(f"the {len(names)} columns {names}", f"{len(cells)} cells"))
    except (csv.Error, UnicodeDecodeError) as failure:
        raise ConfigError(f"{path}:{rows.line_num}: expected CSV in UTF-8, got {failure}") from failure


# ---- Parquet and datasets --------------------------------------------------------------------------------------------


def _table(place: str, expected: str, load: Callable[[], Iterable[Any]]) -> Iterator[Record]:
    """Rows of a table by their number. What cannot be loaded or read raises ConfigError."""
    try:
        for i, row in enumerate(load()):
            yield Record(f"{place}: row {i}", row)
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # of pyarrow and datasets; offline, no such split
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{expected}, got {first_line}") from error


def _parquet(path: Path) -> Iterator[Any]:
    from pyarrow import parquet  # by which datasets reads them, and which takes a tenth of its time to import

    file = parquet.ParquetFile(path)
    twice = [name for name, n in Counter(file.schema_arrow.names).items() if n > 1]
    if twice:
        raise ValueError(f"the column {shown(twice[0])} twice")
    for batch in file.iter_batches(batch_size=1024):
        yield from batch.to_pylist()


def _hub(name: str, argument: str, streaming: bool) -> Iterator[Record]:
    match = _HUB.fullmatch(name)
    if match is None:
        full = "hub:owner/name/subset@revision:split"
        raise ConfigError(f"{argument}: expected hub:owner/name, in full {full}, got {name!r}")
    import datasets

    streaming = streaming and not datasets.config.HF_HUB_OFFLINE  # what is cached has to do
    load = partial(
        datasets.load_dataset, match[1], match[2], revision=match[3], split=match[4] or "train", streaming=streaming
    )
    neither = "" if name.startswith("hub:") else ", which is no file or folder here"
    return _table(name, f"{argument}: expected to load {name!r}{neither}", load)
