"""Rows of a data source, each with its place for messages.

A source is
    a .json file: a list of objects; or the same as .json.gz
    a .jsonl file: an object per line; or the same as .jsonl.gz; a file of any other name is one, too
    a .parquet file
    a folder written by `datasets.save_to_disk`, or one with such files, which are read in the order of their names
    owner/name, a dataset of the Hugging Face Hub; in full owner/name/subset@revision:split, or the same after hub:
    (`train` where no split is named)

A local path comes first. A dataset of the Hub is loaded by `datasets`, which keeps it and, from version 4 on, runs no
code of it. Text is UTF-8, with or without a byte order mark; only line feeds end a line,
as JSON strings may hold U+2028. A line that is no JSON, or an object that names a column twice, is a bad row; a file
that cannot be read to its end is an error, whatever rows came before.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from rlhf_engine.config.run import SUFFIXES
from rlhf_engine.data.tally import RowError, Tally, shown
from rlhf_engine.errors import ConfigError

R = TypeVar("R")
_HUB = re.compile(r"(?:hub:)?(\w[\w.-]*/\w[\w.-]*)(?:/(\w[\w.-]*))?(?:@([\w./-]+))?(?::([\w.-]+))?")
"""owner/name, subset, revision, split."""
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?=[-_.])", re.IGNORECASE)
"""Beginning of the name of a file that holds one part of a data set."""
_INSTALL = "pip install 'rlhf-engine[data]' has it"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row as read."""

    place: str
    """`file:line`, or `file: row i` where rows have no lines."""
    value: Any
    """Row as read, whose columns are not checked."""
    error: RowError | None = None
    """Reason why there is no value; None where there is one."""


def read_records(
    source: str | os.PathLike[str], *, argument: str = "dataset_name", streaming: bool = False
) -> Iterator[Record]:
    """Iterate over the rows of a source, see the module; what cannot be read to its end raises ConfigError.

    `argument` is the option's name, for messages. `streaming` fetches rows of the Hub as they are read, without keeping
    the dataset.
    """
    path = Path(source)
    if path.is_file():
        return _file(path)
    if path.is_dir():
        return _folder(path, argument)
    name = os.fspath(source)
    if name.startswith("hub:") or (_HUB.fullmatch(name) is not None and not name.endswith(SUFFIXES)):
        return _hub(name, argument, streaming)
    raise ConfigError(
        f"{argument}: expected a .json, .jsonl or .parquet file, a folder of such or owner/name of the Hub, got "
        f"{name!r} which is not a file"
    )


def usable_rows(records: Iterable[Record], tally: Tally, parse: Callable[[Any, str], R]) -> list[R]:
    """Rows that `parse(value, place)` makes of records; rows read and bad rows are counted in `tally`.

    Raises ConfigError as `Tally.check` does.
    """
    rows = []
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


def _file(path: Path) -> Iterator[Record]:
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _parquet(path)
    return _json_list(path) if name.endswith((".json", ".json.gz")) else _json_lines(path)


def _folder(path: Path, argument: str) -> Iterator[Record]:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(p.parent.name for p in path.glob("*/state.json"))
        raise ConfigError(f"{argument}: expected the folder of one split, got {str(path)!r} with the splits {splits}")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return _saved_dataset(path)
    files = sorted(p for p in path.iterdir() if p.is_file() and p.name.lower().endswith(SUFFIXES) and p.name[0] != ".")
    if not files:
        raise ConfigError(f"{argument}: expected files {', '.join(SUFFIXES)} in {str(path)!r}, got none")
    splits = sorted({match[0].lower() for file in files if (match := _SPLIT.match(file.name))})
    if len(splits) > 1:
        raise ConfigError(f"{argument}: expected files of one split in {str(path)!r}, got {splits}; name a file")
    return (record for file in files for record in _file(file))


# ---- JSON ------------------------------------------------------------------------------------------------------------


class _Doubled(dict[str, Any]):
    """An object that names a column twice, or holds one that does."""

    column = ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    twice = next((key for key, n in Counter(key for key, _ in pairs).items() if n > 1), None)
    if twice is None:
        parts = (part for value in record.values() for part in (value if isinstance(value, list) else [value]))
        twice = next((part.column for part in parts if isinstance(part, _Doubled)), None)
    if twice is None:
        return record
    doubled = _Doubled(record)
    doubled.column = twice
    return doubled


def _record(place: str, value: Any) -> Record:
    if isinstance(value, _Doubled):
        return Record(place=place, value=None, error=RowError("every column once", f"{value.column!r} twice"))
    return Record(place=place, value=value)


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _unreadable(path: Path, error: Exception) -> ConfigError:
    expected = "whole gzip data" if path.name.lower().endswith(".gz") else "a file that can be read"
    return ConfigError(f"{path}: expected {expected}, got {error}")


def _json_list(path: Path) -> Iterator[Record]:
    try:
        with _open(path) as stream:
            text = stream.read().removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected JSON in UTF-8, got {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    try:
        whole = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # ValueError: also integers of more digits than Python takes
        hint = "; a file with an object per line is called .jsonl" if "Extra data" in str(error) else ""
        raise ConfigError(f"{path}: expected JSON in UTF-8, got {error}{hint}") from error
    if not isinstance(whole, list):
        came = "dict" if isinstance(whole, dict) else type(whole).__name__
        raise ConfigError(f"{path}: expected a list of objects, got {came}")
    for i, row in enumerate(whole):
        yield _record(f"{path}: row {i}", row)


def _json_lines(path: Path) -> Iterator[Record]:
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, start=1):
                line = line.removeprefix(_BOM) if number == 1 else line
                if line.strip():
                    yield _line(f"{path}:{number}", line)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _line(place: str, line: bytes) -> Record:
    try:
        return _record(place, json.loads(line.decode("utf-8"), object_pairs_hook=_object))
    except UnicodeDecodeError as error:
        return Record(place=place, value=None, error=RowError("JSON in UTF-8", str(error)))
    except (ValueError, RecursionError) as error:
        return Record(place=place, value=None, error=RowError("a JSON object", str(error)))


# ---- Parquet and datasets --------------------------------------------------------------------------------------------


def _parquet(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{path}: expected the package pyarrow to read Parquet, got none; {_INSTALL}") from error
    try:
        file = parquet.ParquetFile(path)
        twice = [name for name, n in Counter(file.schema_arrow.names).items() if n > 1]
        if twice:
            raise ConfigError(f"{path}: expected every column once, got {shown(twice[0])} twice")
        start = 0
        for batch in file.iter_batches(batch_size=1024):
            for i, row in enumerate(batch.to_pylist()):
                yield Record(place=f"{path}: row {start + i}", value=row)
            start += batch.num_rows
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        raise ConfigError(f"{path}: expected a Parquet file, got {_first_line(error)}") from error


def _datasets(place: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{place}: expected the package datasets to read it, got none; {_INSTALL}") from error
    return datasets


def _saved_dataset(path: Path) -> Iterator[Record]:
    try:
        rows = _datasets(str(path)).load_from_disk(str(path))
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: expected a folder of save_to_disk, got {_first_line(error)}") from error
    for i, row in enumerate(rows):
        yield Record(place=f"{path}: row {i}", value=row)


def _hub(name: str, argument: str, streaming: bool) -> Iterator[Record]:
    match = _HUB.fullmatch(name)
    if match is None:
        full = "hub:owner/name/subset@revision:split"
        raise ConfigError(f"{argument}: expected hub:owner/name, in full {full}, got {name!r}")
    datasets = _datasets(f"{argument}: {name}")
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise ConfigError(
            f"{argument}: expected datasets of version 4 or later, which runs no code of a dataset, got "
            f"{datasets.__version__}"
        )
    try:
        rows = datasets.load_dataset(
            match[1], match[2], revision=match[3], split=match[4] or "train", streaming=streaming
        )
    except (OSError, ValueError, RuntimeError) as error:  # not found, offline; no such split; a script
        neither = "" if name.startswith("hub:") else ", which is no file or folder here"
        raise ConfigError(f"{argument}: expected to load {name!r}{neither}, got {_first_line(error)}") from error
    return (Record(place=f"{name}: row {i}", value=row) for i, row in enumerate(rows))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
