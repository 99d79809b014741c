"""What runs on a GPU unless another way is asked for has run on one: a record in bench/results says so.

No GPU is needed: the registry is asked as if its CUDA and Triton backends were there.
"""

import collections
import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from rlhf_kernels.runtime import registry

from rlhf_engine.hydra import HydraModel, RoleSpec, model as hydra_model, varlen
from rlhf_engine.hydra.varlen import Layer
from rlhf_engine.rollout import engine, exactness
from tests.hydra.architectures import plain_model

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
H100, H200 = RESULTS / "nvidia-h100-80gb-hbm3", RESULTS / "nvidia-h200"
MACHINES = (("cuda", "triton"), ("triton",), ("cuda",))
"""Backends that are there: with the CUDA library or without it, and without Triton."""
Proof = Callable[[str, str], bool]
"""Whether a record shows that an op ran on a GPU by a backend."""


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def profiled(kernel: str) -> Proof:
    """A kernel of the op in a captured decoding step; the same record has the time of an update with it."""

    def holds(op: str, backend: str) -> bool:
        module = registry.implementation(op, backend)._module
        source = Path(str(importlib.util.find_spec(module).origin)).read_text(encoding="utf-8")
        step = read(H200 / "budget-1b.json")["variants"]["both"]
        return f"def {kernel}(" in source and kernel in {name for name, *_ in step["kernels"]} and step["update_ms"] > 0

    return holds


def timed(name: str) -> Proof:
    """Cases of `rlhf-engine bench`, with results within their bounds."""
    return lambda op, backend: any(
        op in r["kernels"] and r["backend"] == backend and r["device"].startswith("NVIDIA") and r["ok"]
        for r in lines(H100 / name)
    )


def passed(file: str) -> Proof:
    """A file of tests of the op that a GPU passed."""

    def holds(op: str, backend: str) -> bool:
        run = read(H100 / "correct-gpu.json")
        named = any(part in run["command"] for part in (file, str(Path(file).parent)))
        text = (ROOT / file).read_text(encoding="utf-8")
        return named and " passed" in run["output"] and f"FAILED {file}" not in run["output"] and op in text

    return holds


OF_CUDA = passed("tests/kernels/test_cuda_ops.py")
RECORDS: dict[tuple[str, str], Proof] = {
    ("decode_attention", "triton"): profiled("join_kernel"),
    ("gae", "cuda"): OF_CUDA,
    ("gae", "triton"): passed("tests/kernels/triton/test_gae.py"),
    ("gather_logprob", "triton"): passed("tests/kernels/triton/test_gather_logprob.py"),
    ("linear_logprob", "triton"): timed("linear_logprob_frozen.jsonl"),
    ("linear_logprob_pair", "triton"): passed("tests/kernels/triton/test_linear_logprob_pair.py"),
    ("linear_ppo_loss", "triton"): timed("linear_ppo_loss_frozen.jsonl"),
    ("lora", "triton"): profiled("_shrink_kernel"),
    ("lora_decode", "triton"): timed("lora_decode_graphs.jsonl"),
    ("ppo_loss", "cuda"): OF_CUDA,
    ("ppo_loss", "triton"): passed("tests/kernels/triton/test_ppo_loss.py"),
    ("rms_norm", "triton"): profiled("norm_kernel"),
    ("rotary", "triton"): profiled("rotate_kernel"),
    ("sample", "triton"): profiled("sample_kernel"),
    ("swiglu", "triton"): profiled("swiglu_kernel"),
    ("whiten", "triton"): passed("tests/kernels/triton/test_gae.py"),
}


def gpu_defaults(monkeypatch, there: tuple[str, ...] = MACHINES[0]) -> dict[str, str]:
    """Op → what `auto` takes on a GPU outside exact mode, where these backends are there."""

    def unsupported(op: str, backend: str, *_: object) -> str | None:
        served = backend in registry._IMPLEMENTATIONS[op] and backend in (*there, "reference")
        return None if served else "it is not there"

    monkeypatch.setattr(registry, "unsupported", unsupported)
    return {op: registry._decide(op, "cuda", torch.bfloat16, None).backend for op in registry.ops()}


def all_defaults(monkeypatch) -> set[tuple[str, str]]:
    """(op, backend) that `auto` takes on some machine with a GPU; torch's own ops need no record."""
    chosen = {pair for there in MACHINES for pair in gpu_defaults(monkeypatch, there).items()}
    return {(op, backend) for op, backend in chosen if backend != "reference"}


def test_every_backend_that_a_gpu_takes_has_run_on_one(monkeypatch):
    assert all_defaults(monkeypatch) == set(RECORDS), "a new default needs a record of a GPU in bench/results"
    assert [pair for pair, holds in RECORDS.items() if not holds(*pair)] == []
    assert not profiled("norm_kernel")("sample", "triton"), "a kernel of another op proves nothing"
    assert not timed("lora_decode_graphs.jsonl")("lora", "triton")
    registry.register("new_op", "reference", SimpleNamespace())
    registry.register("new_op", "triton", SimpleNamespace())
    try:
        assert all_defaults(monkeypatch) - set(RECORDS) == {("new_op", "triton")}
    finally:
        del registry._IMPLEMENTATIONS["new_op"]


def graph_times() -> Iterator[tuple[str, dict[str, float]]]:
    """(op, milliseconds by backend) of cases that were timed in graphs by more than one backend."""
    cases: dict[tuple[str, str, str], dict[str, float]] = collections.defaultdict(dict)
    for path in H100.glob("*_graphs.jsonl"):
        for r in lines(path):
            cases[r["kernels"][0], r["case"], r["dtype"]][r["backend"]] = r["ms"]
    yield from ((op, ms) for (op, *_), ms in cases.items() if len(ms) > 1)


def test_what_was_measured_to_be_faster_is_taken(monkeypatch):
    chosen = gpu_defaults(monkeypatch)
    factors: dict[str, list[float]] = collections.defaultdict(list)
    for op, ms in graph_times():
        factors[op] += [math.log(ms[chosen[op]] / other) for backend, other in ms.items() if backend != chosen[op]]
    assert {op: max(logs) <= 0 for op, logs in factors.items()} == {"lora_decode": True}
    for shape in ("1b", "1b-16", "8b"):
        steps = read(H200 / f"budget-{shape}.json")["variants"]
        with_lora = {name: step["replay_ms"] for name, step in steps.items() if name != "off"}
        assert min(with_lora, key=with_lora.get) == "both", "LoRA, norms, rotary embeddings and gated MLPs by Triton"
    assert {chosen[op] for op in ("lora_decode", "rms_norm", "rotary", "swiglu")} == {"triton"}
    whole = {name: step["runs"] for name, step in read(H200 / "ws-ppo.json")["variants"].items()}
    seconds = {name: max(sum(phases.values()) for phases in runs) for name, runs in whole.items()}
    assert seconds["both8"] < 0.8 * seconds["as is"], "and the second product of a frozen head by cuBLAS"


def test_exact_mode_and_what_was_never_measured_are_asked_for_by_name(monkeypatch):
    chosen = gpu_defaults(monkeypatch)
    assert {chosen[op] for op in ("activation", "attention", "linear")} == {"reference"}
    assert not exactness.by_default("cuda")


def test_a_whole_step_in_triton_is_asked_for_by_name(monkeypatch):
    assert gpu_defaults(monkeypatch, ("triton",))["decode_step"] == "reference"
    backbone = SimpleNamespace(device=torch.device("cuda"), quantized=False, sharded=False, base_model=None)
    monkeypatch.setattr(engine.decoding, "native_unsupported", lambda backbone: None)
    chosen = [engine._choose_step(engine.EngineOptions(decode_step=name), backbone) for name in ("auto", "native")]
    assert chosen == ["graph", "native"]


def test_prompts_are_copied_on_a_gpu_unless_a_model_is_told(monkeypatch):
    """`can_share` says yes, as it does on a GPU in half precision and in exact mode."""
    monkeypatch.setattr(hydra_model, "can_share", lambda *_: True)
    model = HydraModel.from_pretrained(plain_model("llama"), roles={"actor": RoleSpec()})
    rows = SimpleNamespace(rows=range(85))
    shared = {}
    for device in ("cuda", "cpu"):
        batch = SimpleNamespace(device=torch.device(device), tokens_T=None, shared=rows, n_tokens=100)
        for wanted in (None, True, False):
            model.shares_prompts = wanted
            shared[device, wanted] = model.shared_rows(batch) is rows
        model.shares_prompts, batch.n_tokens = True, 99  # one row less is saved: not worth it on a GPU
        assert model.shared_rows(batch) is (None if device == "cuda" else rows)
    assert shared == {
        ("cuda", None): False, ("cuda", True): True, ("cuda", False): False, ("cpu", None): True, ("cpu", True): True,
        ("cpu", False): False,
    }  # fmt: skip
    assert HydraModel.from_pretrained(plain_model("llama"), roles={"actor": RoleSpec()}).shares_prompts is None


def test_attention_without_padding_is_what_an_h100_ran(monkeypatch):
    """A package such as flash-attn is asked for by its installation; what is left are torch's own paths."""
    monkeypatch.setattr(varlen, "_absent", lambda *_: "it is not installed")
    kinds = dict.fromkeys(("windowed", "softcapped", "sinks", "shared"), False)
    layer = partial(Layer, capability=(9, 0), dtype=torch.bfloat16, head_size=64, value_size=64)
    paths = {"attention": {}, "window": {"windowed": True}, "sinks": {"sinks": True}, "softcap": {"softcapped": True}}
    found = {name: varlen._chosen.__wrapped__(layer(**kinds | changes))[0] for name, changes in paths.items()}
    recorded = read(H100 / "environment.json")["attention"]
    assert found == {name: recorded[name] for name in paths}
    assert passed("tests/hydra/test_varlen.py")("varlen", "")


def test_decoding_steps_are_captured_as_on_an_h200():
    backbone = SimpleNamespace(device=torch.device("cuda"), quantized=False, sharded=False, base_model=None)
    assert engine._no_graphs(backbone) is None
    for step in read(H200 / "budget-1b.json")["variants"].values():
        assert min(step["capture_s"], step["replay_ms"]) > 0
