"""`gather_logprob`: log-probs from logits that exist already, forward and with the gradient of the logits.

Floor: a bare copy of the bytes that must move: the logits once for a forward; twice, and
their gradient, for both passes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from rlhf_kernels import gather_logprob
from torch import Tensor

from rlhf_bench.case import Baseline, Case, NotHereError, Tensors, differentiate, leaves_of, require
from rlhf_bench.floor import copy_floors
from rlhf_bench.heads import eager_stats

Score = Callable[[Tensor, Tensor], Tensor]
_CPU = {
    "tiny": [(24, 97)],
    "quick": [(256, 8192)],
    "default": [(1024, 32768), (512, 151936)],
    "full": [(n, v) for v in (32768, 151936) for n in (256, 512, 1024)],
}
_CUDA = {
    "tiny": [(24, 97)],
    "quick": [(2048, 151936)],
    "default": [(2048, 128256), (8192, 151936)],
    "full": [(n, v) for v in (128256, 152064, 256000) for n in (64, 512, 2048, 8192)],
}


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Forward and forward with backward at every N × V."""
    sizes = (_CUDA if device_type == "cuda" else _CPU)[size]
    return [_case(N, V, device_type, dtype, backward) for N, V in sizes for backward in (False, True)]


def _case(N: int, V: int, device_type: str, dtype: torch.dtype, backward: bool) -> Case:
    def make(device: torch.device) -> Tensors:
        generator = torch.Generator(device).manual_seed(0)
        return {
            "logits": torch.randn(N, V, generator=generator, device=device).mul_(2).to(dtype),
            "target": torch.randint(V, (N,), generator=generator, device=device),
            "grad_logprob": torch.randn(N, generator=generator, device=device),
        }

    def finish(score: Score, inputs: Tensors) -> Tensors:
        leaves = leaves_of(inputs, ("logits",) if backward else ())
        logprob = score((inputs | leaves)["logits"], inputs["target"])
        return differentiate({"logprob": logprob}, {"logprob": inputs["grad_logprob"]}, leaves)

    def run(inputs: Tensors, backend: str) -> Tensors:
        def score(logits: Tensor, target: Tensor) -> Tensor:
            logprob = gather_logprob(logits, target, backend=backend).logprob
            assert logprob is not None
            return logprob

        return finish(score, inputs)

    def baseline(
        name: str, load: Callable[[str], Score], package: str | None = None, compiles: bool = False
    ) -> Baseline:
        def prepare(inputs: Tensors) -> Callable[[], Tensors]:
            score = load(device_type)
            return lambda: finish(score, inputs)

        return Baseline(name=name, package=package, prepare=prepare, compiles=compiles)

    moved = (3 if backward else 1) * N * V * dtype.itemsize
    return Case(
        op="gather_logprob",
        name=f"{'backward' if backward else 'forward'}/{N}x{V}",
        dtype=dtype,
        kernels=("gather_logprob",),
        shape=(V,),
        make=make,
        run=run,
        eager=lambda inputs: finish(_eager, inputs),
        floor=lambda inputs: copy_floors(moved, inputs["logits"].device, dtype),
        baselines=(
            baseline("log_softmax + gather", lambda _: _eager),
            baseline("F.cross_entropy", lambda _: _cross_entropy),
            baseline("torch.compile(log_softmax + gather)", _compiled, compiles=True),
            baseline("selective_log_softmax_and_entropy", _trl, "trl"),
            baseline("LigerCrossEntropyFunction", lambda device: _liger(device, backward), "liger-kernel"),
            baseline("cross_entropy", _quack, "quack-kernels"),
        ),
        flops=(6.0 if backward else 4.0) * N * V,
        moved_bytes=moved,
        # the logits are given, so nothing but the last step rounds
        tiers={"logprob": "T1", "d_logits": "T1" if dtype == torch.float32 else "T2"},
    )


def _eager(logits: Tensor, target: Tensor) -> Tensor:
    return eager_stats(logits, target, ("logprob",))["logprob"]


def _compiled(device_type: str) -> Score:
    return torch.compile(_eager, dynamic=False)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return -F.cross_entropy(logits, target, reduction="none")


def _only_cuda(device_type: str, package: str) -> None:
    if device_type != "cuda":
        raise NotHereError("needs a CUDA device")
    require(package)


def _trl(device_type: str) -> Score:
    _only_cuda(device_type, "trl")
    from trl.kernels import selective_log_softmax_and_entropy

    return lambda logits, target: selective_log_softmax_and_entropy(logits, target)[0]


def _liger(device_type: str, backward: bool) -> Score:
    _only_cuda(device_type, "liger-kernel")
    if backward:
        raise NotHereError("writes its gradient over the logits, which the other candidates share")
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    def score(logits: Tensor, target: Tensor) -> Tensor:
        return -LigerCrossEntropyFunction.apply(logits, target, None, -100, 0.0, 0.0, "none")[0]

    return score


def _quack(device_type: str) -> Score:
    _only_cuda(device_type, "quack-kernels")
    from quack.cross_entropy import cross_entropy

    return lambda logits, target: -cross_entropy(logits, target, reduction="none")
