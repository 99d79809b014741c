"""The kernel table: what a file may hold, which entry decides, what `auto` makes of it, and what a run keeps."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rlhf_kernels import Segments, linear_logprob, lora_linear
from rlhf_kernels.runtime import kernel_table, native, registry
from rlhf_kernels.runtime.kernel_table import Entry, KernelTable, KernelTableError

from .checks import each, needs_native, same_bits

ISA = native.isa() or "portable"
QUICK_CPU, QUICK_REFERENCE = {"cpu": 1.0, "reference": 4.0}, {"cpu": 3.0, "reference": 1.0}
X = torch.zeros(2)


def entry(op="gae", *, isa=ISA, dtype="float32", shape=None, ms=None):
    ms = ms or {"a": QUICK_REFERENCE}
    return Entry(op, isa, dtype, shape, kernel_table.fastest(ms), ms)


def written(folder: Path, *entries: Entry) -> Path:
    path = folder / "table.json"
    kernel_table.write(path, entries, {e.isa: "a CPU" for e in entries})
    return path


@pytest.fixture
def op():
    """An op that both candidates serve in float32, known for the length of one test."""
    name = "test_table_op"
    serves = SimpleNamespace(unsupported=lambda device, dtype: None if dtype == torch.float32 else f"not in {dtype}")
    registry.register(name, "reference", SimpleNamespace())
    registry.register(name, "cpu", serves)
    yield name
    del registry._IMPLEMENTATIONS[name]
    registry.begin_run()


# ---- the choice and the shape ----------------------------------------------------------------------------------------


def test_the_fastest_is_a_geometric_mean_in_which_long_cases_count_as_short_ones():
    assert kernel_table.fastest({"a": QUICK_REFERENCE}) == "reference"
    assert kernel_table.fastest({"short": QUICK_CPU, "long": {"cpu": 3000.0, "reference": 1000.0}}) == "cpu"
    assert kernel_table.fastest({"a": {"cpu": 2.0, "reference": 2.0}}) == "cpu", "equals: the first"
    found = entry(ms={"a": QUICK_CPU, "b": {"cpu": 2.0, "reference": 2.0}})
    assert (found.backend, found.ratio) == ("cpu", pytest.approx(2.0))
    assert entry().ratio == pytest.approx(3.0)


def test_the_nearest_shape_decides():
    table = KernelTable(
        source="", entries=(entry(shape=(8192, 256)), entry(shape=(32768, 1024)), entry(shape=(512,)), entry("whiten"))
    )

    def shape(*sizes: int) -> tuple[int, ...] | None:
        found = table.find("gae", ISA, "float32", sizes)
        return None if found is None else found.shape

    assert shape(8192, 256) == shape(1, 1) == shape(9000, 300) == (8192, 256)
    assert shape(32768, 1025) == shape(151936, 896) == (32768, 1024)
    assert shape(16384, 512) == (8192, 256), "equally near: the first"
    assert shape(64) == (512,)
    assert shape(2, 2, 2) is None
    assert table.find("gae", ISA, "float32", None) is None
    assert table.find("whiten", ISA, "float32", None) is not None
    assert table.find("gae", "another", "float32", (1, 1)) is None
    assert table.find("gae", ISA, "bfloat16", (1, 1)) is None


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_comes_back_in_one_order(tmp_path):
    entries = [entry("whiten"), entry(shape=(4,)), entry(shape=(2, 3), dtype="bfloat16"), entry(isa="another")]
    path = written(tmp_path, *entries)
    found = kernel_table.read(path, registry.ops(), isa=ISA)
    assert sorted(map(repr, found.entries)) == sorted(map(repr, entries))
    assert found.machines == {ISA: "a CPU", "another": "a CPU"}
    assert kernel_table.dump(entries[::-1], found.machines) == path.read_text()


DAMAGED = {
    "no JSON": ("{", "expected a JSON file"),
    "no text": (b"\xff\xfe", "expected a JSON file"),
    "a list": ([], "format: expected 1, got None"),
    "another format": ({"format": 2}, "format: expected 1, got 2"),
    "no entries": ({"format": 1, "machines": {}}, "entries: expected a list"),
    "no machines": ({"format": 1, "entries": []}, "machines: expected a name per"),
    "a field missing": ({"op": "gae"}, r"entries\[0\]: expected \['backend',"),
    "op": ({"op": "gaee"}, r"entries\[0\].op: expected one of .*'gae'.*, got 'gaee'"),
    "op of another type": ({"op": ["gae"]}, r"entries\[0\].op: expected one of"),
    "dtype": ({"dtype": "int8"}, r"entries\[0\].dtype: expected one of .*, got 'int8'"),
    "backend": ({"backend": "triton"}, r"entries\[0\].backend: expected one of .*, got 'triton'"),
    "shape": ({"shape": [0]}, r"entries\[0\].shape: expected null or sizes of at least 1, got \[0\]"),
    "isa": ({"isa": 3}, r"entries\[0\]: expected the name of a set"),
    "no times": ({"ms": {}}, r"entries\[0\]: expected the name of a set and times"),
    "one time": ({"ms": {"a": {"cpu": 1.0}}}, r"entries\[0\].ms\['a'\]: expected a time for each of"),
    "a time of nothing": ({"ms": {"a": {"cpu": 0, "reference": 1}}}, r"entries\[0\].ms\['a'\]: expected a time"),
    "a time no float holds": ({"ms": {"a": {"cpu": 10**400, "reference": 1}}}, r"\.ms\['a'\]: expected a time"),
    "nested without end": ("[" * 100_000, "expected a JSON file, got RecursionError"),
    "another set": ({"isa": "another"}, rf"isa: expected entries for {ISA}, got \['another'\]"),
}


@each("name", DAMAGED)
def test_a_damaged_or_foreign_table_is_ignored_in_one_line(name, tmp_path):
    content, message = DAMAGED[name]
    path = tmp_path / "table.json"
    if isinstance(content, dict) and "format" not in content:
        given = {"op": "gae"} if name == "a field missing" else {**entry().to_dict(), **content}
        content = {"format": 1, "machines": {}, "entries": [given]}
    content = json.dumps(content) if isinstance(content, (dict, list)) else content
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(KernelTableError, match=message):
        kernel_table.read(path, registry.ops(), isa=ISA)
    if native.missing() is not None and name == "another set":
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with registry.use_table(path):
            assert registry.table().source == "the package's own"
            registry.resolve("gae", "auto", X)
    (line,) = (str(w.message) for w in caught)
    assert line.startswith(f"path: {path} is ignored: ")
    assert "\n" not in line


def test_what_a_named_table_leaves_out_the_package_s_own_decides(tmp_path):
    own = kernel_table.read(kernel_table.COMMITTED, registry.ops())
    with registry.use_table(written(tmp_path, entry())):
        found = registry.table().entries
    named = [e for e in found if (e.op, e.isa, e.dtype) == ("gae", ISA, "float32")]
    assert named == [entry()]
    assert [e for e in found if e not in named] == [
        e for e in own.entries if (e.op, e.isa, e.dtype) != ("gae", ISA, "float32")
    ]


def test_a_path_that_is_not_there_is_an_error(tmp_path):
    with (
        pytest.raises(ValueError, match=r"path: expected the path of a kernel table, got '.*none', which is no file"),
        registry.use_table(tmp_path / "none"),
    ):
        pass


@pytest.mark.parametrize("named", ["table.json", pytest.param("none.json", marks=pytest.mark.long)])
def test_the_environment_names_a_table(named, tmp_path):
    written(tmp_path, entry())
    code = "from rlhf_kernels.runtime import registry; print(registry.report('cpu')['gae']['auto'])"
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "RLHF_ENGINE_KERNEL_TABLE": str(tmp_path / named)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    if named == "none.json":
        assert done.returncode != 0
        line = done.stderr.strip().splitlines()[-1]
        assert line.startswith("ValueError: RLHF_ENGINE_KERNEL_TABLE: expected the path of a kernel table, got ")
    else:
        assert done.stdout.strip() == "reference", done.stderr


def test_the_package_s_table_can_be_read_and_its_choices_follow_from_its_times():
    found = kernel_table.read(kernel_table.COMMITTED, registry.ops())
    keys = [entry[:4] for entry in found.entries]
    assert len(set(keys)) == len(keys)
    for e in found.entries:
        assert e.backend == kernel_table.fastest(e.ms), e
        assert math.isfinite(e.ratio)
        assert e.isa in found.machines
    assert kernel_table.dump(found.entries, found.machines) == kernel_table.COMMITTED.read_text(encoding="utf-8")


# ---- what `auto` does ------------------------------------------------------------------------------------------------


@needs_native
def test_auto_follows_the_table_by_shape_and_dtype(op, tmp_path):
    table = written(
        tmp_path,
        entry(op, shape=(64, 8)),
        entry(op, shape=(1024, 8), ms={"a": QUICK_CPU}),
        entry(op, dtype="bfloat16", shape=(64, 8), ms={"a": QUICK_CPU}),
    )
    assert registry.resolve(op, "auto", X, (64, 8)) == "cpu", "nothing is measured"
    with registry.use_table(table):
        assert registry.resolve(op, "auto", X, (64, 8)) == "reference"
        assert registry.resolve(op, "auto", X, (900, 8)) == "cpu"
        assert registry.resolve(op, "auto", X) == "cpu", "no shape is listed"
        assert registry.resolve(op, "auto", X.bfloat16(), (64, 8)) == "reference", "the choice does not serve"
        assert registry.resolve(op, "cpu", X, (64, 8)) == "cpu", "asked for by name"
        with registry.use_backend("cpu"):
            assert registry.resolve(op, "auto", X, (64, 8)) == "cpu"
            assert registry.report("cpu")[op]["why"] == "asked for by name"
        row = registry.report("cpu")[op]
        assert row["auto"] == "cpu or reference"
        assert row["why"] == (
            "by the table: reference 3.00 x as fast at 64x8; by the table: cpu 4.00 x as fast at 1024x8"
        )
        assert registry.report("cpu", torch.bfloat16)[op]["why"] == "the only one that serves: not in torch.bfloat16"
    assert registry.resolve(op, "auto", X, (64, 8)) == "cpu"


@needs_native
def test_auto_follows_the_set_in_use(op, tmp_path):
    entries = {"portable": entry(op, isa="portable")}
    entries.setdefault(ISA, entry(op, ms={"a": QUICK_CPU}))
    with registry.use_table(written(tmp_path, *entries.values())):
        for name, expected in entries.items():
            with native.use_isa(name):
                assert registry.resolve(op, "auto", X) == expected.backend


@needs_native
@each("chosen", ["cpu", "reference"])
def test_rows_never_decide_and_the_backward_is_of_the_forward_s_backend(chosen, tmp_path):
    ms = {"a": QUICK_CPU if chosen == "cpu" else QUICK_REFERENCE}
    torch.manual_seed(0)
    weight = torch.randn(300, 40)
    with registry.use_table(written(tmp_path, entry("linear_logprob", shape=(300, 40), ms=ms))):
        registry.begin_run()
        for n in (1, 7, 130):
            made = []
            for backend in ("auto", chosen):
                hidden = torch.randn(n, 40, generator=torch.Generator().manual_seed(n)).requires_grad_()
                logprob = linear_logprob(hidden, weight, torch.arange(n), backend=backend).logprob
                other = "reference" if chosen == "cpu" else "cpu"  # between forward and backward it changes nothing
                with registry.use_backend(other if backend == "auto" else "auto"):
                    made.append([logprob, *torch.autograd.grad(logprob.sum(), hidden)])
            same_bits(*made)
        assert registry.choices() == [registry.Choice("linear_logprob", "float32", (300, 40), chosen)]


@each("dynamic", [None, True])
def test_auto_is_decided_while_a_graph_is_compiled(dynamic):
    x, weight, A, B = torch.randn(6, 8), torch.randn(4, 8), [torch.randn(2, 8)], [torch.randn(4, 2)]

    def call(x):
        return lora_linear(x, weight, None, A, B, (1.0,), Segments.single(6, 0))

    torch.compiler.reset()
    registry.begin_run()
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)(x), call(x))


# ---- what a run keeps ------------------------------------------------------------------------------------------------


@needs_native
def test_a_run_keeps_its_choices_whatever_the_table_or_the_set_says_later(op, tmp_path):
    registry.begin_run()
    with registry.use_table(written(tmp_path, entry(op, shape=(64, 8)))):
        registry.resolve(op, "auto", X, (64, 8))
        registry.resolve(op, "auto", X)
        kept = registry.choices()
    assert kept == [registry.Choice(op, "float32", None, "cpu"), registry.Choice(op, "float32", (64, 8), "reference")]
    registry.begin_run(kept)
    assert registry.resolve(op, "auto", X, (64, 8)) == "reference"
    assert registry.resolve(op, "auto", X, (65, 8)) == "cpu", "what the run did not choose is chosen now"
    assert registry.report("cpu")[op]["why"] == "as in the run's checkpoint"
    with native.use_isa("portable"):
        assert registry.resolve(op, "auto", X, (64, 8)) == "reference"
    assert {c.shape for c in registry.choices()} == {None, (64, 8), (65, 8)}
    registry.begin_run()
    assert registry.choices() == []
    assert registry.resolve(op, "auto", X, (64, 8)) == "cpu"


def test_a_choice_that_cannot_be_served_is_refused(op):
    kept = [registry.Choice("gone", "float32", None, "cpu"), registry.Choice(op, "bfloat16", None, "cpu")]
    message = f"'cpu', the choice of the run's checkpoint, cannot serve {op}: not in torch.bfloat16; available here"
    with pytest.raises(registry.BackendUnavailableError, match=message):
        registry.begin_run(kept)
    assert registry.choices() == []
    with registry.use_backend("reference"):  # asked for by name
        registry.begin_run(kept)
        assert registry.resolve(op, "auto", X.bfloat16()) == "reference"
    assert registry.choices() == kept[1:], "they stay for a checkpoint"


def test_choices_on_other_devices_are_not_kept(op):
    registry.begin_run()
    registry.resolve(op, "auto", X.to("meta"))
    assert registry.choices() == []
