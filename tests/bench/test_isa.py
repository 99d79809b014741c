"""`--isa` and the kernel tables that are made of records."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from rlhf_bench import isa, kernel_table as making
from rlhf_kernels.runtime import kernel_table, native, registry

from tests.bench.test_bench import load_script, measure, tiny

needs_native = pytest.mark.skipif(native.missing() is not None, reason="without it there is one set and one backend")


@pytest.fixture
def no_variables(monkeypatch):
    for name in isa.variables("avx2"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def record(backend: str = "cpu", ms: float = 1.0, **changes) -> dict:
    """What `from_records` reads of a record."""
    found = {"op": "gae", "case": "forward/4x8", "dtype": "float32", "backend": backend, "ms": ms, "device": "cpu"}
    found |= {"isa": "avx2", "isa_of_peers": "avx2", "cpu": "a CPU", "threads": 2, "torch": "2", "ok": True, "why": ""}
    return found | {"kernels": ["gae"], "shape": None} | changes


def test_every_set_has_the_variables_of_the_libraries(no_variables):
    assert isa.variables("neon") == {"RLHF_ENGINE_ISA": "neon"}
    assert isa.isa_of_peers("avx512") == "avx512", "nothing holds them"
    for name in [name for name in isa.SETS if not name.startswith("neon")]:
        for variable, value in isa.variables(name).items():
            no_variables.setenv(variable, value)
        assert isa.is_held(name)
        assert not isa.is_held("avx3")
        assert isa.isa_of_peers("avx512") == name
    no_variables.delenv("ONEDNN_MAX_CPU_ISA")
    assert isa.isa_of_peers("avx512") is None, "a mixture"


def test_every_set_of_the_native_code_can_be_named():
    variants = Path(__file__).parents[2] / "csrc/cpu/variants"
    assert {path.stem for path in variants.glob("*.cpp")} == set(isa.SETS)


@needs_native
@pytest.mark.long
def test_a_command_runs_in_a_process_that_is_held(monkeypatch, no_variables, capfd):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    assert isa.run_held("portable", ["doctor", "--json"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found["native_extension"] == "available, instruction set portable"
    assert "RLHF_ENGINE_ISA" not in os.environ
    assert isa.run_held("portable", ["doctr"]) == 2


def test_a_set_that_is_not_here_is_an_error():
    expected = "isa: expected one of portable" if native.missing() is None else "isa: expected it unset without"
    with pytest.raises(ValueError, match=f"{expected}.*got 'avx3'"):
        isa.run_held("avx3", [])


def test_a_table_from_records():
    records = [
        record(ms=5.0),
        record(ms=2.0),  # of several the last one counts
        record("reference", 1.0),
        record("triton", 0.1),
        record(ms=0.5, exact=True),  # where there is nothing to choose
        record(case="backward/4x8", ms=1.0),
        record("reference", 1.5, case="backward/4x8"),
        record(case="forward/1x8", ms=1.0),  # has one candidate
        record(op="lora", kernels=["lora"], shape=[24, 16], ms=3.0),
        record("reference", 2.0, op="lora", kernels=["lora"], shape=[24, 16]),
        record("reference", 2.0, op="ppo_loss", kernels=["ppo_loss", "whiten"]),  # says nothing of either
        record(op="rollout", backend="native", kernels=[]),
        record(op="gae", device="NVIDIA H100", isa=None),
    ]
    made = making.from_records(records)
    gae, lora = made.entries
    assert gae[:5] == ("gae", "avx2", "float32", None, "reference")
    assert gae.ms == {"forward/4x8": {"cpu": 2.0, "reference": 1.0}, "backward/4x8": {"cpu": 1.0, "reference": 1.5}}
    assert lora[:5] == ("lora", "avx2", "float32", (24, 16), "reference")
    assert made.machines == {"avx2": "a CPU, 2 threads, torch 2"}


def test_records_that_no_table_can_be_made_of():
    for changes, message in [
        ({"isa": None}, r"gae forward/4x8 float32: expected one instruction set .*, got None and 'avx2'"),
        ({"isa_of_peers": "avx512"}, "got 'avx2' and 'avx512'"),
        ({"isa_of_peers": None}, "got 'avx2' and None"),
        ({"ok": False, "why": "too far"}, "expected results within their bound, got cpu: too far"),
    ]:
        with pytest.raises(ValueError, match=message):
            making.from_records([record(**changes)])


@needs_native
def test_the_benchmark_s_own_records_make_a_table(monkeypatch):
    """In a process that RLHF_ENGINE_ISA alone holds, the records are written as if its peers were held as well."""
    (case,) = (c for c in tiny("linear_logprob") if c.name.startswith("frozen"))
    result = measure(case)
    for variable, value in isa.variables(native.isa()).items():  # after measuring: libraries may read them late
        monkeypatch.setenv(variable, value)
    if isa.isa_of_peers(native.isas()[-1]) != native.isa():
        pytest.skip(f"nothing holds the peers to {native.isa()}, so its records make no table")
    made = making.from_records(json.loads(json.dumps(result.records())))
    (entry,) = made.entries
    assert entry[:4] == ("linear_logprob", native.isa(), "float32", (97, 16))
    assert set(entry.ms) == {case.name}


@needs_native
@pytest.mark.long
def test_shapes_of_cases_are_those_that_calls_are_decided_by():
    """Otherwise a table would be looked up at another place than where it was written."""
    for op in making.OPS:
        for case in tiny(op):
            registry.begin_run()
            case.run(case.make(torch.device("cpu")), "auto")
            shapes = {c.shape for c in registry.choices() if c.op in case.kernels}
            if op != "ppo_loss" and "lora_decode" not in case.kernels:
                assert shapes == {case.shape}, case.name


@needs_native
def test_what_there_is_no_time_for_is_named(monkeypatch):
    monkeypatch.setattr(making, "OPS", ("gae",))
    made = making.measure(seconds=0.0)
    assert made.entries == []
    assert len(made.left_out) == 2
    assert made.left_out[0].startswith("gae forward/")


def test_the_script_makes_the_sets_of_its_records_anew(tmp_path, capsys):
    script = load_script("tables/kernel_table")
    table, lines = tmp_path / "table.json", tmp_path / "lines.jsonl"

    def write(*records: dict) -> None:
        lines.write_text("".join(json.dumps(r) + "\n" for r in records))

    options = ["--table", str(table), str(lines)]
    write(record(), record("reference", 2.0))
    assert script.main(["--check", *options]) == 1
    assert not table.exists()
    assert script.main(options) == 0
    assert script.main(["--check", *options]) == 0
    write(*(record(b, ms, isa="portable", isa_of_peers="portable") for b, ms in (("cpu", 2.0), ("reference", 1.0))))
    assert script.main(options) == 0
    found = kernel_table.read(table, registry.ops())
    assert [(e.isa, e.backend) for e in found.entries] == [("avx2", "cpu"), ("portable", "reference")]
    assert set(found.machines) == {"avx2", "portable"}
    write(record(isa=None))
    assert script.main(options) == 2
    assert capsys.readouterr().err.startswith("kernel_table: records: gae forward/4x8 float32: expected one")


def test_the_package_s_table_is_that_of_the_committed_records():
    script = load_script("tables/kernel_table")
    assert all(path.is_relative_to(Path(script.RESULTS)) for path in script.recorded())
    assert script.main(["--check"]) == 0
