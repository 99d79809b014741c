"""The benchmark harness on tiny sizes: complete records, honest numbers, and nobody left out in silence."""

import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rlhf_bench import OPS, candidates, floor, memory, runner, timing
from rlhf_bench.case import Baseline, Case, NotHereError, Tensors
from rlhf_bench.floor import MM, copy_floors, gemm_floors, together, worth_timing
from rlhf_bench.isa import isa_of_peers
from rlhf_bench.ops import load_cases
from rlhf_bench.report import KEYS, write_records
from rlhf_kernels import BackendUnavailableError
from rlhf_kernels.runtime import native, registry

from rlhf_engine.commands.main import main

CPU = torch.device("cpu")


def tiny(op: str, dtype: torch.dtype = torch.float32) -> list[Case]:
    """Cases without the baselines that compile, which would take most of the time."""
    cases = load_cases(op, "tiny", "cpu", dtype)
    return [replace(case, baselines=tuple(b for b in case.baselines if not b.compiles)) for case in cases]


def measure(case: Case, rounds: int = 5) -> runner.CaseResult:
    return runner.run_case(case, size="tiny", device=CPU, rounds=rounds, server=None)


def toy(*baselines: Baseline) -> Case:
    """A case that returns its input, on the reference backend of gae."""
    return Case(
        op="gae",
        name="toy/8",
        dtype=torch.float32,
        kernels=("gae",),
        make=lambda device: {"x": torch.linspace(0.1, 1, 8, device=device)},
        run=lambda inputs, backend: {"y": inputs["x"].clone()},
        eager=lambda inputs: {"y": inputs["x"].clone()},
        floor=lambda inputs: copy_floors(64, inputs["x"].device, torch.float32),
        baselines=baselines,
        flops=8.0,
        moved_bytes=64.0,
    )


WITH_PRODUCTS = ("linear_logprob", "linear_logprob_pair", "gather_logprob", "linear_ppo_loss", "linear")
"""Ops whose cases are also looked at in bfloat16."""


@pytest.mark.parametrize(
    ("op", "dtype", "few"),
    [
        *((op, torch.float32, True) for op in ("gae", "linear_logprob")),
        *(pytest.param(op, torch.float32, False, marks=pytest.mark.long) for op in OPS),
        *(pytest.param(op, torch.bfloat16, False, marks=pytest.mark.long) for op in WITH_PRODUCTS),
    ],
    ids=lambda value: {True: "few", False: "all"}.get(value, str(value)),
)
def test_every_op_has_cases_whose_reference_is_within_its_bound(op, dtype, few):
    """In float32 nothing rounds: there every baseline that claims to compute the same is within the bound as well."""
    cases = tiny(op, dtype)
    best = None if native.missing() else native.isas()[-1]  # which RLHF_ENGINE_ISA alone does not hold the peers to
    assert len({case.name for case in cases}) == len(cases) >= 2
    for case in (cases[0], cases[-1]) if few else cases:
        result = measure(case, rounds=2)  # that there are times, not what they are
        records = {record["backend"]: record for record in result.records()}
        assert tuple(records["reference"])[: len(KEYS)] == KEYS
        assert result.floor_ms > 0
        for record in records.values():
            assert record["ok"], record["why"]
            assert record["error"] <= record["error_bound"]
            assert record["ms"] > 0
            assert (record["floor"], record["floor_ms"]) == (result.floor, result.floor_ms)
            assert (record["isa"], record["isa_of_peers"]) == (native.isa(), isa_of_peers(best))
            assert record["cpu"]
        baselines = [row for row in result.rows if not row.backend and row.same]
        assert baselines
        for row in baselines if dtype == torch.float32 else []:
            assert row.accuracy is not None
            assert row.accuracy.ok, (case.name, row)
        # whoever is not there is named with a reason
        labels = {baseline.label for baseline in case.baselines} | set(registry.BACKENDS)
        assert labels == {row.label for row in result.rows} | (set(result.missing) - {"peak memory"})
        assert all(result.missing.values())
        floors = [name for name in result.order if name.startswith("floor: ")]
        assert result.order == (*floors, *(row.label for row in result.rows))
        assert f"floor: {result.floor}" in floors


def test_the_grids_of_every_size_can_be_listed_without_making_inputs():
    for op in OPS:
        for device_type in ("cpu", "cuda"):
            counts = [len(load_cases(op, size, device_type, torch.bfloat16)) for size in ("quick", "default", "full")]
            assert 0 < counts[0] <= counts[1] <= counts[2]
    names = [case.name for case in load_cases("linear_logprob", "default", "cpu", torch.bfloat16)]
    assert {"frozen/1024x1024x32768", "frozen/512x896x151936", "forward/256x896x151936"} <= set(names)


def test_the_fastest_baseline_that_computes_the_same_is_the_record_s():
    def prepared(factor: float, size: int) -> Callable[[Tensors], Callable[[], Tensors]]:
        def prepare(inputs: Tensors) -> Callable[[], Tensors]:
            work = torch.zeros(size)
            return lambda: {"y": inputs["x"] * factor + work.add_(1).mul_(0)[0]}

        return prepare

    slow = Baseline(name="slow", prepare=prepared(1.0, 2_000_000))
    quick = Baseline(name="quick", prepare=prepared(1.0, 100_000))
    other = Baseline(name="other", prepare=prepared(2.0, 1), same=False)
    wrong = Baseline(name="wrong", prepare=prepared(1.5, 1_000_000))
    result = measure(toy(slow, quick, other, wrong))
    assert result.baseline is not None
    assert result.baseline.label == "quick"
    (record,) = (r for r in result.records() if r["backend"] == "reference")
    assert (record["baseline"], record["baseline_ms"]) == ("quick", result.baseline.ms)
    found = {row.label: row.accuracy for row in result.rows}
    assert found["other"] is None
    assert found["wrong"] is not None
    assert not found["wrong"].ok
    assert found["wrong"].error == pytest.approx(0.5)
    file, nan = io.StringIO(), Baseline(name="nan", prepare=prepared(math.nan, 1))
    write_records(measure(toy(nan)).records(), file)
    for line in file.getvalue().splitlines():  # an infinite error is null
        written = json.loads(line)["baselines"]["nan"]
        assert (written["error"], written["ok"]) == (None, False)


def test_what_cannot_run_is_named_with_its_reason():
    def not_here(inputs: Tensors) -> Callable[[], Tensors]:
        raise NotHereError("not installed (pip install thing==1)")

    def broken(inputs: Tensors) -> Callable[[], Tensors]:
        def run() -> Tensors:
            raise RuntimeError("no\ncompiler")

        return run

    triton_errors = pytest.importorskip("triton.errors")

    class CompilationError(triton_errors.TritonError):
        """As Triton has it: of no class that Python names."""

    def uncompiled(inputs: Tensors) -> Callable[[], Tensors]:
        def run() -> Tensors:
            raise CompilationError("at 1:2")

        return run

    compiling = Baseline(name="compiling", prepare=not_here, compiles=True)
    odd = Baseline(name="uncompiled", prepare=uncompiled)
    case = toy(Baseline(name="thing", prepare=not_here), Baseline(name="broken", prepare=broken), odd, compiling)
    missing = measure(case).missing
    assert missing["uncompiled"] == "CompilationError: at 1:2"
    assert missing["thing"] == "not installed (pip install thing==1)"
    assert missing["broken"] == "RuntimeError: no compiler"
    found = candidates.find(case, case.make(CPU), "cpu", compiling=False)
    assert found.missing["compiling"].startswith("left out by --quick")
    assert measure(case).baseline is None


def test_a_baseline_that_takes_too_long_is_not_timed(monkeypatch):
    calls = []

    def slow(inputs: Tensors) -> Callable[[], Tensors]:
        def run() -> Tensors:
            calls.append(time.sleep(0.06))
            return {"y": inputs["x"].clone()}

        return run

    monkeypatch.setattr(runner, "MOST_SECONDS", 0.05)
    result = measure(toy(Baseline(name="slow", prepare=slow), Baseline(name="compiled", prepare=slow, compiles=True)))
    assert result.missing["slow"] == "one call took 0 s; above 0.05 s none is timed"
    assert [row.label for row in result.rows if not row.backend] == ["compiled"]  # its first call is another matter
    assert len(calls) == 1 + 1 + 6


def test_a_backend_of_ours_may_refuse_but_not_fail():
    def run(error: Exception) -> Callable[[Tensors, str], Tensors]:
        def run(inputs: Tensors, backend: str) -> Tensors:
            if backend == "cpu":
                raise error
            return {"y": inputs["x"].clone()}

        return run

    here, _ = candidates.backends_here(toy(), "cpu")
    if "cpu" not in here:
        pytest.skip("the native extension was not built, so gae has one backend only")
    refused = measure(replace(toy(), run=run(BackendUnavailableError("no entropy here"))))
    assert refused.missing["cpu"] == "BackendUnavailableError: no entropy here"
    assert [row.label for row in refused.rows] == ["reference"]
    with pytest.raises(RuntimeError, match="a bug"):
        measure(replace(toy(), run=run(RuntimeError("a bug"))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_way_to_the_floor_makes_the_product(dtype):
    x, weight = torch.randn(6, 64).to(dtype), torch.randn(32, 64).to(dtype)
    for label, way in floor._ways(dtype).items():
        try:
            y = way.linear(x, weight)()
        except (AttributeError, RuntimeError):  # such a floor is left out
            assert label not in gemm_floors((x, weight.T))
            continue
        torch.testing.assert_close(y.to(dtype), x @ weight.T, rtol=0.02, atol=0.2)


def test_floors_pack_weights_only_and_may_be_put_together():
    x, weight, g = torch.randn(6, 64), torch.randn(32, 64), torch.randn(6, 32)
    floors = gemm_floors((x, weight.T), (g, weight), fresh=[(g.T, x)])
    assert next(iter(floors)) == MM
    assert list(gemm_floors(fresh=[(g.T, x)])) == [MM], "there is nothing to pack"
    both = together([floors, gemm_floors((x, weight.T), times=3)])
    assert list(both) == list(floors)
    for run in both.values():
        run()
    calls: list[str] = []
    counted = together(
        [{"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, {"b": lambda: calls.append("c")}]
    )
    counted["b"]()
    assert (list(counted), calls) == (["b"], ["b", "c"])


def test_a_way_that_is_far_from_the_fastest_is_not_timed(monkeypatch):
    """Only the ways move the clock here, so a busy machine changes nothing."""
    now = 0.0

    def takes(seconds: float) -> Callable[[], None]:
        def run() -> None:
            nonlocal now
            now += seconds

        return run

    monkeypatch.setattr(floor, "time", SimpleNamespace(perf_counter=lambda: now))
    slow = {"slow": takes(0.03), "quick": takes(0.0), "same": takes(0.001)}
    assert list(worth_timing(slow)) == ["quick", "same"]


def test_rounds_are_interleaved_and_the_first_is_not_counted():
    calls: list[str] = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}
    samples = timing.interleaved(functions, 6, CPU)
    assert "".join(calls) == "abc" * 7
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys("abc", 6)
    assert timing.medians({"a": [3.0, 1.0, 100.0]}) == {"a": 3.0}


@pytest.mark.long
@pytest.mark.skipif(memory.unsupported() is not None, reason="resident memory can be reset on Linux only")
def test_memory_of_one_call_counts_torch_and_malloc(tmp_path):
    """In a process of its own, as everywhere: memory that this one holds free already would not show."""
    script = tmp_path / "script.py"
    script.write_text(
        "import ctypes, torch\n"
        "from rlhf_bench.memory import peak_of_process, set_up_malloc\n"
        "set_up_malloc()\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "def native():\n"
        "    block = libc.malloc(ctypes.c_size_t(40 << 20))\n"
        "    ctypes.memset(block, 1, 40 << 20)\n"
        "    libc.free(ctypes.c_void_p(block))\n"
        "def torch_twice():\n"
        "    torch.ones(10 << 18)\n"  # freed before the second: the peak is one of them
        "    return torch.ones(20 << 18)\n"
        "for function in (native, torch_twice, lambda: None):\n"
        "    function()\n"
        "    print(peak_of_process(function) / 2**20)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env=environment)
    native, twice, nothing = map(float, done.stdout.split())
    assert native == pytest.approx(40, abs=1)
    assert twice == pytest.approx(20, abs=1)
    assert nothing < 1


@pytest.mark.long
@pytest.mark.skipif(memory.unsupported() is not None, reason="resident memory can be reset on Linux only")
def test_the_memory_server_measures_cases_and_reports_errors():
    with memory.MemoryServer() as server:
        request = {"op": "gather_logprob", "size": "quick", "dtype": torch.bfloat16}
        peak = server.peak(**request, case="backward/256x8192", candidate="log_softmax + gather")
        assert isinstance(peak, int), peak
        # logits in fp32 (8 MiB), their log_softmax (8), then two gradients (8 + 4), of which not all live at once
        assert 16 <= peak / 2**20 <= 32
        assert server.peak(**request, case="backward/256x8192", candidate="nobody") == "KeyError: 'nobody'"
        late = server.peak(**request, case="backward/256x8192", candidate="log_softmax + gather", ms=100_000.0)
        assert late == "left out: two calls would take 200 s, more than 60 s"


@pytest.fixture
def tiny_sizes(monkeypatch):
    """--quick means the tests' sizes."""
    real = runner.load_cases
    monkeypatch.setattr(runner, "load_cases", lambda op, size, *rest: real(op, "tiny", *rest))
    monkeypatch.setattr(memory.MemoryServer, "peak", lambda self, **request: 1024)
    monkeypatch.setattr(memory.MemoryServer, "__enter__", lambda self: self)
    monkeypatch.setattr(memory.MemoryServer, "__exit__", lambda self, *error: None)


def test_the_command_writes_records_a_plot_and_a_table(tiny_sizes, tmp_path, capsys):
    lines, out = tmp_path / "lines.jsonl", tmp_path / "out"
    argv = ["bench", "lora", "--quick", "--device", "cpu", "--dtype", "fp32", "--json", str(lines), "--out", str(out)]
    argv += ["--case", "32x16x24_r4"]
    assert main(argv) == 0
    captured = capsys.readouterr()
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert lines.read_text() == (out / "results.jsonl").read_text()
    shown = {"mixed/32x16x24_r4", "single/32x16x24_r4"}
    assert {record["case"] for record in records} == shown
    for record in records:
        assert tuple(record)[: len(KEYS)] == KEYS
        assert (record["op"], record["dtype"], record["rounds"], record["peak_bytes"]) == ("lora", "float32", 5, 1024)
        assert record["order"][0].startswith("floor: ")
        assert (record["kernels"], record["shape"]) == (["lora"], [24, 16])
    assert (out / "roofline.png").read_bytes().startswith(b"\x89PNG")
    assert "error / bound" in captured.out
    assert "single/32x16x24_r4:" in captured.out, "eighty columns are enough for every name"
    assert re.search(r"│ reference +│", captured.out)
    assert "not measured: torch.compile(eager per lane): left out by --quick" in captured.out
    assert "bench 2/2" in captured.err
    argv = argv[: argv.index("--out")]
    assert main([*argv, "--case", "decode_mixed", "--exact"]) == 0
    again = [json.loads(line)["case"] for line in lines.read_text().splitlines()[len(records) :]]
    assert set(again) == {"decode_mixed/4x16x24_r16"}, "appended, one case only"
    exact = [json.loads(line)["exact"] for line in lines.read_text().splitlines()]
    assert exact[0] is False
    assert exact[-1] is True
    assert not registry.is_exact()


def test_json_on_standard_output_is_json_only(tiny_sizes, capsys):
    assert main(["bench", "gae", "--quick", "--device", "cpu", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert {json.loads(line)["op"] for line in out.splitlines()} == {"gae"}
    assert "error / bound" in err


def test_wrong_requests_are_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for argv, message in (
        (["gea"], "op: expected one of attention, .*, got 'gea'; did you mean 'gae'"),
        (["gae", "--case", "sideways"], "case: expected one of forward/.*, got 'sideways'"),
        (["gae", "--device", "cpu", "--isa", "avx3"], "isa: expected .*, got 'avx3'"),
        (["gae", "--dtype", "fp8"], "dtype: expected one of 'bf16', 'fp16', 'fp32', got 'fp8'"),
        (["gae", "--device", "tpu"], "device: expected auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["gae", "--device", "cuda:77"], r"device: expected one that is present \(cpu.*, got 'cuda:77'"),
        (["gae", "--rounds", "4"], "rounds: expected .* >= 5, got 4"),
        (["gae", "--quick", "--full"], "mode: given twice, as 'quick' and as 'full'"),
        (["gae", "--out", f"{tmp_path}/file/below"], "expected paths that can be written"),
        (["gae", "--quik"], "unknown option --quik; did you mean --quick"),
    ):
        assert main(["bench", *argv]) == 2
        err = capsys.readouterr().err
        assert err.startswith("rlhf-engine bench: ")
        assert len(err.splitlines()) == 1
        assert re.search(message, err), err


def load_script(name: str) -> ModuleType:
    """A script of bench/, such as "studies/busy", as a module."""
    path = Path(__file__).parents[2] / "bench" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def test_the_pages_have_the_recorded_measurements(tmp_path: Path) -> None:
    script = load_script("tables/doc_tables")
    assert script.main(["--check"]) == 0
    records = [json.loads(line) for line in script.RESULTS.read_text(encoding="utf-8").splitlines()]
    changed = next(record for record in records if record["backend"] == "cpu")
    faster = tmp_path / "faster.jsonl"
    faster.write_text(
        "\n".join(json.dumps(r) for r in [*records, changed | {"ms": changed["ms"] / 2}]), encoding="utf-8"
    )
    assert script.main(["--check", str(faster)]) == 1  # of two records of a case the last one counts


def test_the_pages_quote_the_tables_of_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("tables/doc_tables")
    assert sum(len(script.QUOTED.findall(page.read_text(encoding="utf-8"))) for page in script.QUOTING) >= 4
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "a.md").write_text("# A\n\n| x |\n|---|\n| 1 |\n\ntext\n\n| y |\n", encoding="utf-8")
    old = "b\n<!-- table: a.md -->\n| 0 |\n<!-- /table -->\nc"
    assert script.with_quoted(old) == "b\n<!-- table: a.md -->\n| x |\n|---|\n| 1 |\n<!-- /table -->\nc"
    (tmp_path / "a.md").write_text("none", encoding="utf-8")
    with pytest.raises(ValueError, match="expected a table"):
        script.with_quoted(old)
    marked = "a\n<!-- bench-table -->\n{}\n<!-- /bench-table -->\nb"
    assert script.with_table(marked.format("old"), "new\n") == marked.format("new")
    with pytest.raises(ValueError, match="expected the marks"):
        script.with_table("a\n<!-- bench-table -->\nb", "new\n")


@pytest.mark.long
def test_every_script_starts(tmp_path: Path) -> None:
    """Each imports what it needs, under the names that these have today, and describes itself."""
    bench = Path(__file__).parents[2] / "bench"
    scripts = [path for folder in ("", "gpu", "studies", "tables") for path in (bench / folder).glob("*.py")]
    assert len(scripts) > 25
    code = """
import contextlib, io, os, runpy, sys
for script in sys.argv[1:]:
    sys.argv, sys.path[0] = [script, "--help"], os.path.dirname(script)
    shown, began = io.StringIO(), set(sys.modules)
    try:
        with contextlib.redirect_stdout(shown):
            runpy.run_path(script, run_name="__main__" if "ArgumentParser" in open(script).read() else "imported")
    except SystemExit as end:
        assert not end.code and "usage:" in shown.getvalue(), script
    for name in set(sys.modules) - began:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(sys.path[0]):
            del sys.modules[name]  # the folders have modules of the same name
"""
    command = [sys.executable, "-c", code, *map(str, sorted(scripts))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
