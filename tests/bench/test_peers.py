"""Peers of the benchmarks: they compute the case, the path that is meant is the one that runs, and ceilings are fair.

Nothing here needs a GPU. What needs a package that is not installed is skipped with its name.
"""

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from rlhf_bench import OPS, PEERS, candidates, case, floor, heads
from rlhf_bench.case import NotHereError, differentiate, leaves_of
from rlhf_bench.ops import decode_attention, load_cases, lora, sample as sampling
from rlhf_kernels.runtime.testing import assert_ok, tier3
from rlhf_kernels.sample import sample
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_engine.hydra import attention

CPU = torch.device("cpu")
pytestmark = pytest.mark.long  # of comparisons, not of what users run


def cpu_case(op: str, name: str, device_type: str = "cpu", dtype: torch.dtype = torch.float32) -> case.Case:
    """A tiny case by the part of its name before the sizes."""
    return next(c for c in load_cases(op, "tiny", device_type, dtype) if c.name.startswith(f"{name}/"))


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Liger's frontend module: the real one, or one with its two names where it is not installed."""
    name = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
    monkeypatch.delenv("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", raising=False)
    if importlib.util.find_spec("liger_kernel") is not None:
        yield importlib.import_module(name)
        return
    for part in ("liger_kernel", "liger_kernel.ops", name):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    module: Any = sys.modules[name]
    module.plain = type("_FusedLinearPPOFallbackFunction", (), {})
    module._resolve_implementation = lambda device: module.plain
    sys.modules["liger_kernel.ops"].fused_linear_scaled_cross_entropy = module  # type: ignore[attr-defined]
    monkeypatch.setattr(case, "installed", lambda package: "0")
    yield module


def test_liger_is_left_out_where_it_would_run_plain_torch(liger, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(NotHereError, match=r"expected LigerFused\w+SM90Function .*, but it takes _Fused\w+Fallback"):
        heads._liger_sm90("cuda")
    found = cpu_case("linear_logprob", "frozen", "cuda", torch.bfloat16)
    label = next(b.label for b in found.baselines if b.name == heads.LIGER_SM90)
    missing = candidates.find(found, found.make(CPU), "cuda", compiling=True, only=label).missing
    assert "Fallback" in missing[label]
    assert "\n" not in missing[label]


def test_trl_is_left_out_where_it_would_run_plain_torch(monkeypatch) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    import trl.kernels.chunked_logprob as kernels

    if not hasattr(kernels, "_use_triton"):
        with pytest.raises(NotHereError, match=r"expected trl 1\.16 or later"):
            heads.require_trl("cpu")
        return
    heads.require_trl("cpu")
    monkeypatch.setattr(kernels, "_use_triton", lambda device: False)
    with pytest.raises(NotHereError, match="expected its Triton kernels"):
        heads.require_trl("cuda")


def test_peers_of_a_gpu_are_named_with_a_reason_where_there_is_none() -> None:
    """Everything up to the first call: no error but those that leave a peer out, one line each."""
    for op in OPS:
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
        for found in load_cases(op, "tiny", "cuda", torch.bfloat16)[:3]:
            inputs = found.make(CPU)
            here = candidates.find(found, inputs, "cuda", compiling=True)
            labels = {baseline.label for baseline in found.baselines}
            assert labels == set(here.baselines) | (set(here.missing) & labels)
            assert all(why and "\n" not in why for why in here.missing.values())
            for name in ("FlexDecoding", "F.grouped_mm", heads.LIGER_SM90, "chunked_linear_cross_entropy(sum)"):
                assert not any(label.endswith(name) for label in here.baselines)


def test_every_package_that_is_compared_has_a_version() -> None:
    packages = {
        baseline.package
        for op in OPS
        for device in ("cpu", "cuda")
        for found in load_cases(op, "tiny", device, torch.bfloat16)
        for baseline in found.baselines
    }
    assert packages - {None, "transformers"} == set(PEERS)


@pytest.mark.parametrize("name", ["full", "ragged", "paged"])
def test_flex_attention_computes_decode_attention(name: str) -> None:
    """The masks and the paged layout, by torch's own formula: its decoding kernel exists for CUDA alone."""
    from torch.nn.attention.flex_attention import flex_attention

    found = cpu_case("decode_attention", name)
    inputs = found.make(CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow when it is not compiled
        out = decode_attention.flex_run(inputs, flex_attention, None)()["out"]
    torch.testing.assert_close(out, found.run(inputs, "reference")["out"], rtol=1e-5, atol=1e-5)


def test_a_paged_case_has_the_cache_of_a_rollout() -> None:
    assert decode_attention.PAGE == attention.BLOCK
    inputs = cpu_case("decode_attention", "paged").make(CPU)
    n, pages = inputs["block_table"].shape
    blocks, block, n_heads, size = inputs["k_cache"].shape
    assert (pages, block, blocks) == (2, attention.BLOCK, n * pages)
    assert sorted(inputs["block_table"].flatten().tolist()) == list(range(blocks))
    assert inputs["block_table"].flatten().tolist() != list(range(blocks))
    cache = attention.KVCache(blocks=blocks)
    token = torch.zeros(1, n_heads, size)
    cache.allocate(0, token, token)
    assert cache.read(0)[0].stride() == inputs["k_cache"].stride()


@pytest.mark.parametrize("backward", [True, False], ids=["training", "decode"])
def test_grouped_products_compute_mixed_slots(backward: bool) -> None:
    lane = lora.LoraShape(N=64, K=128, M=256, r=16, slots=3, mixed=True, backward=backward)
    found = lora._case(lane, torch.bfloat16)
    inputs = found.make(CPU)
    adapters = [f"{n}{i}" for n in "AB" for i in range(lane.slots)] if backward else []
    leaves = leaves_of(inputs, ("x", *adapters) if backward else ())
    y = lora.grouped_linear(lane, lora.ALPHA / lane.r, inputs)(inputs | leaves)
    got = differentiate({"y": y}, {"y": inputs["grad_y"]}, leaves)
    exact = found.run({name: x.double() for name, x in inputs.items()}, "reference")
    eager = found.eager(inputs)
    for name in ("y", "d_x") if backward else ("y",):
        assert_ok(tier3(got[name], exact[name], eager[name]), name)
    for name in adapters:  # in bf16, which the case's bound for these does not allow
        error = (got[f"d_{name}"] - exact[f"d_{name}"]).norm() / exact[f"d_{name}"].norm()
        assert 1e-4 < error < 0.01, name
    assert [b.same for b in found.baselines if b.name == "F.grouped_mm"] == [not backward]


def test_a_race_of_exponentials_draws_the_tokens_of_the_same_noise() -> None:
    """With e = exp(−g) the largest p / e is the largest log p + g, so both ways draw the same tokens."""
    size = heads.HeadSize(64, 32, 2000)
    for kind in ("drawn", "filtered"):
        inputs = sampling._case(size, torch.float32, kind).make(CPU)
        filters = {"top_k": sampling.TOP_K, "top_p": sampling.TOP_P} if kind == "filtered" else {}
        ours = sample(
            inputs["hidden"], inputs["weight"], seed=inputs["seed"], position=inputs["position"],
            temperature=sampling.TEMPERATURE, backend="reference", **filters,
        )  # fmt: skip
        z = sampling._logits(inputs, bool(filters))
        assert torch.equal(sampling.race(z, (-inputs["noise"]).exp()), ours.token)


class _Operands(TorchDispatchMode):
    """Collects what products multiply and copies read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.out, torch.ops.aten.mm.default):
            self.seen += args[:2]
        elif func is torch.ops.aten.copy_.default:
            self.seen.append(args[1])
        return func(*args, **(kwargs or {}))


def test_floors_are_made_from_random_numbers_of_the_case_s_dtype() -> None:
    for op in OPS:
        for found in load_cases(op, "tiny", "cpu", torch.bfloat16):
            floors = found.floor(found.make(CPU))
            run = floors[floor.MM] if floor.MM in floors else floors["copy"]
            with _Operands() as operands:
                run()
            assert operands.seen, found.name
            for x in operands.seen:
                assert x.dtype == found.dtype, found.name
                if x.numel() > 1:
                    assert x.float().std() > 1e-3, found.name
