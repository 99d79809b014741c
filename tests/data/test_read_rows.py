"""Reading: every format gives the same rows with their places; broken files are errors, broken lines bad rows."""

import gzip
import json
import sys
import types

import pytest

from rlhf_engine.data import PromptOnly, PromptSet
from rlhf_engine.data.read import Record, read_records
from rlhf_engine.errors import ConfigError
from tests.data.texts import load, read, write_lines

ROWS = [{"prompt": "x", "n": 1}, {"prompt": "y ü", "n": 2}]


def values(path) -> list[object]:
    return [record.value for record in read(path)]


def places(path) -> list[str]:
    return [record.place for record in read(path)]


@pytest.fixture
def offline(monkeypatch):
    """No datasets here: whoever tries to import it fails."""
    monkeypatch.setitem(sys.modules, "datasets", None)


def test_json_and_jsonl_plain_and_compressed(tmp_path, offline):
    lines = "\n".join(["", json.dumps(ROWS[0]), "  ", json.dumps(ROWS[1])]).encode()
    whole = json.dumps(ROWS).encode()
    for name, content, found in (
        ("a.jsonl", lines, [":2", ":4"]),
        ("a.txt", lines, [":2", ":4"]),  # any other name is one object per line
        ("a.jsonl.gz", gzip.compress(lines), [":2", ":4"]),
        ("A.JSON", whole, [": row 0", ": row 1"]),
        ("a.json.gz", gzip.compress(whole), [": row 0", ": row 1"]),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        assert values(path) == ROWS, name
        assert places(path) == [f"{path}{place}" for place in found]


def test_a_byte_order_mark_is_no_part_of_the_first_row_and_only_line_feeds_end_a_line(tmp_path):
    for name, text in (("a.jsonl", '{"prompt": "x"}\n'), ("a.json", '[{"prompt": "x"}]')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert values(tmp_path / name) == [{"prompt": "x"}]
    # JSON allows these inside of strings; str.splitlines would cut the row in two
    text = "one\u2028two\u2029three\x85four"
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert values(path) == [{"prompt": text}]


def test_a_bad_line_is_a_bad_row_with_its_place(tmp_path):
    for line, message in (
        (b'{"prompt": \n', r"a\.jsonl:3: expected a JSON object, got Expecting value"),
        (b'{"prompt": "\xff"}', r"a\.jsonl:3: expected JSON in UTF-8, got 'utf-8' codec can't decode"),
        (b'{"prompt": "x", "n": 1, "n": 2}', r"a\.jsonl:3: expected every column once, got 'n' twice"),
        (b'{"prompt": [{"role": "a", "role": "b"}]}', r"a\.jsonl:3: expected every column once, got 'role' twice"),
        (b"[" * 100_000, r"a\.jsonl:3: expected a JSON object, got "),  # deeper than Python's stack
        (b'{"n": ' + b"9" * 5000 + b"}", r"a\.jsonl:3: expected a JSON object, got Exceeds the limit"),
        (b'["y"]', r"a\.jsonl:3: expected a JSON object, got list"),
        (b"null", r"a\.jsonl:3: expected a JSON object, got NoneType"),
        (b"NaN", r"a\.jsonl:3: expected a JSON object, got float"),
    ):
        path = write_lines(tmp_path / "a.jsonl", {"prompt": "x"}, b"", line, {"prompt": "z"})
        with pytest.raises(ConfigError, match=f"^.*{message}"):
            load(path, kinds=("prompt_only",))
        rows, tally = load(path, max_bad_rows=1, kinds=("prompt_only",))
        assert [row.prompt for row in rows] == ["x", "z"]
        assert (tally.read, tally.used, list(tally.bad.values())) == (3, 2, [(1, [f"{path}:3"])])


def test_a_broken_file_is_an_error_whatever_is_allowed(tmp_path):
    for name, content, message in (
        ("a.json", b'{"prompt": "x"}', r"a\.json: expected a list of objects, got dict"),
        ("a.json", b'{"a": 1, "a": 1}', r"a\.json: expected a list of objects, got dict"),
        ("a.json", b"[", r"a\.json: expected JSON in UTF-8"),
        ("a.json", b"", r"a\.json: expected JSON in UTF-8"),
        ("a.json", b'{"prompt": "x"}\n{"prompt": "y"}', r"a\.json: expected JSON .* Extra data.*is called \.jsonl"),
        ("a.json", b'["\xff"]', r"a\.json: expected JSON in UTF-8, got 'utf-8' codec"),
        ("a.jsonl.gz", b'{"prompt": "x"}\n', r"a\.jsonl\.gz: expected whole gzip data, got Not a gzipped file"),
        ("a.json.gz", gzip.compress(json.dumps(ROWS * 99).encode())[:-20], r"a\.json\.gz: expected whole gzip data"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "x"}\n')[:-8], r"a\.jsonl\.gz: expected whole gzip data, got Comp"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "x"}\n')[:-8] + b"\0" * 8, r"expected whole gzip data, got CRC"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            load(path, max_bad_rows=0.99)


def test_no_rows_and_no_source(tmp_path, offline):
    path = write_lines(tmp_path / "a.jsonl", b"", b"  ")
    with pytest.raises(ConfigError, match=r"^dataset_name: expected at least one row in .*a\.jsonl', got none$"):
        load(path)
    with pytest.raises(ConfigError, match=r"^eval_dataset_name: expected a \.json, .*none\.jsonl' which is not a file"):
        read_records(tmp_path / "none.jsonl", argument="eval_dataset_name")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.md").write_text("no data")
    with pytest.raises(ConfigError, match=r"^dataset_name: expected files \.json, .* in .*notes', got none"):
        read_records(tmp_path / "notes")


def test_what_is_a_name_of_the_hub(offline):
    for name in ("hub:", "hub:name", "hub:a/b/c/d", "hub:a/b:c:d", "hub:../b", "hub:a/-b"):
        with pytest.raises(ConfigError, match=r"^dataset_name: expected hub:owner/name, in full hub:.*, got 'hu"):
            read_records(name)
    for name in ("prompts/none.jsonl", "./owner/name", "name", "/owner/name"):
        with pytest.raises(ConfigError, match=rf"{name}' which is not a file$"):
            read_records(name)


def test_files_of_a_folder_follow_their_names(tmp_path):
    write_lines(tmp_path / "b.jsonl", ROWS[1])
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(ROWS[:1]).encode()))
    (tmp_path / ".c.jsonl").write_text("hidden")
    (tmp_path / "README.md").write_text("about")
    assert values(tmp_path) == ROWS
    assert places(tmp_path) == [f"{tmp_path / 'a.json.gz'}: row 0", f"{tmp_path / 'b.jsonl'}:1"]


def test_the_first_rows_alone_are_read(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "y"}, b"no JSON")
    rows, tally = load(path, limit=2)
    assert [row.prompt for row in rows] == ["x", "y"]
    assert tally.read == 2


def test_values_of_json_and_csv_stay_as_they_are_written(tmp_path, offline):
    """What `datasets` would give one type: 1 beside 2.5, dates, a key that a row lacks, a zero in front."""
    rows = [{"n": 1, "m": [{"a": 1}]}, {"n": 2.5, "d": "2020-01-01"}, {"n": "x", "m": [{"b": None}], "k": 2**70}]
    assert values(write_lines(tmp_path / "a.jsonl", *rows)) == rows
    lines = b'prompt,completion,label,id\r\n"one\ntwo",NA,1,007\n\nx,,true,\n'
    for name, content in (("a.csv", b"\xef\xbb\xbf" + lines), ("A.csv.gz", gzip.compress(lines))):
        (tmp_path / name).write_bytes(content)
        assert values(tmp_path / name) == [
            {"prompt": "one\ntwo", "completion": "NA", "label": True, "id": "007"},
            {"prompt": "x", "completion": None, "label": True, "id": None},
        ]
        assert places(tmp_path / name) == [f"{tmp_path / name}:2", f"{tmp_path / name}:5"]
    (tmp_path / "b.csv").write_bytes(b"prompt,label\nx,1\ny,2\n")  # a reference of rewards, no thumb
    assert [row["label"] for row in values(tmp_path / "b.csv")] == ["1", "2"]


def test_a_damaged_csv_names_its_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt,n\nx,1\ny\nz,1,2\n")
    rows, tally = load(path, max_bad_rows=2)
    assert ([row.prompt for row in rows], list(tally.bad.values())) == (["x"], [(2, [f"{path}:3", f"{path}:4"])])
    for content, message in (
        (b'prompt\nx\n"y', r"a\.csv:3: expected CSV in UTF-8, got unexpected end of data"),
        (b"prompt\n\xff\n", r"a\.csv:0: expected CSV in UTF-8, got 'utf-8' codec can't decode"),
        (b"prompt,prompt\nx,y\n", r"a\.csv:1: expected CSV in UTF-8, got a column name twice in \['prompt', 'prompt'"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read(path)


def stand_in(monkeypatch, error: Exception | None = None) -> list[object]:
    """A module `datasets` that records its calls; nothing leaves this process."""
    calls: list[object] = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        if error is not None:
            raise error
        return ROWS

    config = types.SimpleNamespace(HF_HUB_OFFLINE=False)
    module = types.SimpleNamespace(load_dataset=load_dataset, config=config)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_what_is_asked_of_the_hub(monkeypatch):
    calls = stand_in(monkeypatch)
    assert read("hub:owner/my.name")[1] == Record(place="hub:owner/my.name: row 1", value=ROWS[1])
    assert len(read("hub:owner/name:test_2")) == 2
    assert len(load("owner/name/main@v1:test[:9]")[0]) == 2
    assert len(load("owner/name", limit=9)[0]) == 2  # a copy may be there
    sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    assert len(load("owner/name[:9]")[0]) == 2
    assert calls == [
        (("owner/my.name", None), {"revision": None, "split": "train", "streaming": False}),
        (("owner/name", None), {"revision": None, "split": "test_2", "streaming": False}),
        (("owner/name", "main"), {"revision": "v1", "split": "test", "streaming": True}),
        (("owner/name", None), {"revision": None, "split": "train", "streaming": False}),
        (("owner/name", None), {"revision": None, "split": "train", "streaming": False}),
    ]


def test_a_local_path_comes_before_the_hub(tmp_path, monkeypatch):
    calls = stand_in(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub:owner").mkdir()
    write_lines(tmp_path / "hub:owner" / "name", ROWS[0])
    assert values("hub:owner/name") == ROWS[:1]
    assert calls == []


def test_the_hub_may_fail(monkeypatch):
    stand_in(monkeypatch, error=ConnectionError("offline mode is enabled\nmore"))
    with pytest.raises(ConfigError, match=r"^dataset_name: expected to load 'hub:a/b', got offline mode is enabled$"):
        read("hub:a/b")
    with pytest.raises(ConfigError, match=r"expected to load 'a/b', which is no file or folder here, got offline"):
        read("a/b")
    stand_in(monkeypatch, error=RuntimeError("Dataset scripts are no longer supported"))
    with pytest.raises(ConfigError, match="got Dataset scripts"):
        read("hub:a/b")


def test_the_real_datasets_is_offline_here(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"expected to load 'hub:nobody-here/nothing', got .*"):
        read("hub:nobody-here/nothing")


def test_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [{"prompt": [{"role": "user", "content": f"hello {i}"}], "n": i} for i in range(2500)]  # several batches
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert values(path) == rows
    assert places(path)[2100] == f"{path}: row 2100"
    loaded, _ = load(path)
    assert loaded[7].prompt == ({"role": "user", "content": "hello 7"},)

    twice = pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 2, names=["prompt", "prompt"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(ConfigError, match=r"twice\.parquet: expected a Parquet file, got the column 'prompt' twice"):
        read(tmp_path / "twice.parquet")

    for name, content in (("cut", path.read_bytes()[:-9]), ("empty", b""), ("text", b'{"prompt": "x"}\n')):
        (tmp_path / f"{name}.parquet").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{name}\.parquet: expected a Parquet file, got "):
            read(tmp_path / f"{name}.parquet")


def test_folders_of_save_to_disk(tmp_path):
    import datasets

    rows = [{"prompt": [{"role": "user", "content": "hello"}], "completion": None}, {"prompt": None, "completion": "x"}]
    both = datasets.DatasetDict(train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list(rows[:1]))
    both.save_to_disk(str(tmp_path / "both"))
    assert values(tmp_path / "both" / "train") == rows
    assert places(tmp_path / "both" / "test") == [f"{tmp_path / 'both' / 'test'}: row 0"]
    with pytest.raises(ConfigError, match=r"expected the folder of one split, got .*splits \['test', 'train'\]"):
        read_records(tmp_path / "both")
    next((tmp_path / "both" / "test").glob("*.arrow")).write_bytes(b"gone")
    with pytest.raises(ConfigError, match="test: expected a folder of save_to_disk, got "):
        read(tmp_path / "both" / "test")


def test_a_folder_of_several_splits_is_refused(tmp_path):
    write_lines(tmp_path / "train-00000.jsonl", {"prompt": "a"})
    write_lines(tmp_path / "trainable.jsonl", {"prompt": "b"})
    assert len(list(read_records(tmp_path))) == 2
    write_lines(tmp_path / "Test.jsonl", {"prompt": "c"})
    with pytest.raises(ConfigError, match=r"dataset_name: expected files of one split in .*, got \['test', 'train'\]"):
        list(read_records(tmp_path))


def test_columns_that_the_first_row_lacks_reach_reward_functions():
    rows = [
        PromptOnly(prompt="a", group="a", place="p:1", columns={"topic": "x"}),
        PromptOnly(prompt="b", group="b", place="p:2", columns={"answer": 4, "completions": 1}),
    ]
    found = PromptSet(rows=rows, prompts=["a", "b"], ids=[[1], [2]])
    assert found.columns([1, 0]) == {"topic": [None, "x"], "answer": [4, None]}
