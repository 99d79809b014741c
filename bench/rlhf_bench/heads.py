"""Parts that the four ops on a language-model head share: sizes, inputs, and other libraries' per-token log-probs.

Data: hidden ~ N(0, 1), weight ~ N(0, 4 / H), so logits have a standard deviation of 2; uniform targets.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_bench.case import NotHereError, Tensors, require

Score = Callable[[Tensor, Tensor, Tensor, tuple[str, ...]], Tensors]
TRL_VOCAB_CHUNK = 32768  # what trl.trainer.utils passes
LIGER_SM90 = "LigerFusedScaledCrossEntropySM90Function"


class HeadSize(NamedTuple):
    """N tokens, H hidden, V vocabulary."""

    N: int
    H: int
    V: int

    def __str__(self) -> str:
        return f"{self.N}x{self.H}x{self.V}"


_CPU = {
    "tiny": [(24, 16, 97)],
    "quick": [(256, 256, 8192)],
    "default": [(1024, 1024, 32768), (512, 896, 151936), (256, 1024, 32768), (256, 896, 151936)],
    "full": [*((n, *hv) for hv in ((1024, 32768), (896, 151936)) for n in (256, 512, 1024)), (512, 512, 8192)],
}
_CUDA_MODELS = ((4096, 128256), (3584, 152064), (2048, 151936), (1024, 151936), (2304, 256000))
_CUDA = {
    "tiny": [(24, 16, 97)],
    "quick": [(2048, 2048, 151936)],
    "default": [(n, *hv) for hv in ((4096, 128256), (2048, 151936)) for n in (512, 2048, 8192)],
    "full": [(n, *hv) for hv in _CUDA_MODELS for n in (64, 128, 512, 2048, 8192, 32768)],
}


def head_sizes(size: str, device_type: str) -> list[HeadSize]:
    """(N, H, V) of the grid, largest first on the CPU."""
    return [HeadSize(*s) for s in (_CUDA if device_type == "cuda" else _CPU)[size]]


def make_head(s: HeadSize, dtype: torch.dtype, device: torch.device) -> tuple[Tensors, torch.Generator]:
    """hidden [N, H], weight [V, H], target [N], and the generator for what else a case draws."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(s.N, s.H, generator=generator, device=device).to(dtype)
    weight = torch.randn(s.V, s.H, generator=generator, device=device).mul_(2 * s.H**-0.5).to(dtype)
    target = torch.randint(s.V, (s.N,), generator=generator, device=device)
    return {"hidden": hidden, "weight": weight, "target": target}, generator


def eager_stats(logits: Tensor, target: Tensor, outputs: tuple[str, ...]) -> Tensors:
    """log_softmax and gather on the whole [N, V], upcast to float32 first."""
    logp = F.log_softmax(logits.float(), -1)
    stats = {"logprob": logp.gather(1, target[:, None])[:, 0]}
    if "entropy" in outputs:
        stats["entropy"] = -(logp.exp() * logp).sum(-1)
    return stats


def eager_score(hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]) -> Tensors:
    """The textbook way: all logits, in the dtype of the head, then `eager_stats`."""
    return eager_stats(hidden @ weight.T, target, outputs)


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Per-token log-probs (and entropy) by somebody else's code."""

    name: str
    load: Callable[[str], Score]  # device type → the function; raises NotHereError
    package: str | None = None
    outputs: tuple[str, ...] = ("logprob",)
    differentiable: tuple[str, ...] = ("logprob",)
    compiles: bool = False
    same: bool = True  # False: its gradient is not the case's
    only: str | None = None  # the device type that it is for; None: any

    def checked(self, device_type: str, outputs: tuple[str, ...], differentiated: tuple[str, ...]) -> Score:
        """`load`, after saying what this code cannot do."""
        if lacking := set(outputs) - set(self.outputs):
            raise NotHereError(f"offers no {', '.join(sorted(lacking))}")
        if lacking := set(differentiated) - set(self.differentiable):
            raise NotHereError(f"offers no gradient of {', '.join(sorted(lacking))}")
        return self.load(device_type)


def _eager(device_type: str) -> Score:
    return eager_score


def _cross_entropy(device_type: str) -> Score:
    return lambda hidden, weight, target, outputs: {
        "logprob": -F.cross_entropy(hidden @ weight.T, target, reduction="none")
    }


def _linear_cross_entropy(device_type: str) -> Score:
    if not hasattr(F, "linear_cross_entropy"):
        raise NotHereError(f"needs torch >= 2.13, this is {torch.__version__}")
    return lambda hidden, weight, target, outputs: {
        "logprob": -F.linear_cross_entropy(hidden, weight, target, reduction="none")
    }


def _trl(device_type: str) -> Score:
    require_trl(device_type)
    from trl.kernels import ChunkedLogProbFunction

    def score(hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]) -> Tensors:
        extra = tuple(name for name in outputs if name != "logprob")
        logprob, entropy, *_ = ChunkedLogProbFunction.apply(
            hidden, weight, None, target, 1.0, TRL_VOCAB_CHUNK, None, 1.0, extra
        )
        return {"logprob": logprob} if entropy is None else {"logprob": logprob, "entropy": entropy}

    return score


def require_trl(device_type: str) -> None:
    """Import all that TRL's kernels need. Raises NotHereError where they are missing, or plain torch on a GPU."""
    require("trl")
    import trl.trainer.utils  # noqa: F401  the backward imports it
    from trl.kernels import chunked_logprob

    uses_triton = getattr(chunked_logprob, "_use_triton", None)
    if uses_triton is None:
        raise NotHereError("expected trl 1.16 or later, which says whether its kernels are Triton's or plain torch")
    if device_type == "cuda" and not uses_triton(torch.device(device_type)):
        raise NotHereError("expected its Triton kernels, but it takes plain torch here")


def _liger(device_type: str) -> Score:
    """Liger on a CPU: plain torch in chunks, nothing compiled."""
    require("liger-kernel")
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    return liger_score(LigerFusedLinearScaledCrossEntropyFunction)


def _liger_sm90(device_type: str) -> Score:
    """The kernels for Hopper. Their class is called by itself, so that no dispatch can take plain torch instead."""
    require("liger-kernel")
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as frontend

    function = frontend._resolve_implementation(torch.device(device_type))
    if function.__name__ != LIGER_SM90:
        raise NotHereError(f"expected {LIGER_SM90} (compute capability 9.0), but it takes {function.__name__} here")
    # it would wait for the device to look at the targets, which no other candidate does
    os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] = "0"
    return liger_score(function)


def liger_score(function: Any) -> Score:
    """Per-token log-probs (and entropy) by an autograd function with the signature of Liger's scaled cross-entropy."""

    def score(hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]) -> Tensors:
        with_entropy = "entropy" in outputs
        made = function.apply(hidden, weight, target, 1.0, -100, 1, with_entropy)
        return {"logprob": -made[0], "entropy": made[1]} if with_entropy else {"logprob": -made}

    return score


def _cut_cross_entropy(device_type: str, filter_eps: str | None = None) -> Score:
    """`impl` is named, so nothing else can run. Without a filter nothing of the gradient is thrown away."""
    require("cut-cross-entropy")
    from cut_cross_entropy import linear_cross_entropy

    impl = "cce" if device_type == "cuda" else "torch_compile"

    def score(hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]) -> Tensors:
        nll = linear_cross_entropy(hidden, weight, target, reduction="none", filter_eps=filter_eps, impl=impl)
        return {"logprob": -nll}

    return score


def _filtered_cut_cross_entropy(device_type: str) -> Score:
    """Cut cross-entropy as its users run it.

    Blocks whose gradients are all below eps / 32 are left out of the backward.
    """
    return _cut_cross_entropy(device_type, "high")


def _quack(device_type: str) -> Score:
    """F.linear, then its cross-entropy on the whole [N, V]; what it fuses has one coefficient for all tokens."""
    require("quack-kernels")
    from quack.linear_cross_entropy import linear_cross_entropy_func

    return lambda hidden, weight, target, outputs: {
        "logprob": -linear_cross_entropy_func(hidden, weight, None, target, reduction="none")
    }


_BOTH = ("logprob", "entropy")
SCORERS = (
    Scorer(name="log_softmax + gather", load=_eager, outputs=_BOTH, differentiable=_BOTH),
    Scorer(name="F.cross_entropy", load=_cross_entropy),
    Scorer(name="F.linear_cross_entropy(none)", load=_linear_cross_entropy),
    Scorer(
        name="ChunkedLogProbFunction",
        package="trl",
        load=_trl,
        outputs=_BOTH,
        differentiable=_BOTH,
    ),
    Scorer(
        name="FusedLinearScaledCrossEntropy",
        package="liger-kernel",
        load=_liger,
        outputs=_BOTH,
        differentiable=_BOTH,
        only="cpu",
    ),
    Scorer(
        name=LIGER_SM90,
        package="liger-kernel",
        load=_liger_sm90,
        outputs=_BOTH,
        differentiable=_BOTH,
        compiles=True,
        only="cuda",
    ),
    Scorer(name="linear_cross_entropy", package="cut-cross-entropy", load=_cut_cross_entropy, compiles=True),
    Scorer(
        name="linear_cross_entropy, small gradients dropped",
        package="cut-cross-entropy",
        load=_filtered_cut_cross_entropy,
        compiles=True,
        same=False,
        only="cuda",
    ),
    Scorer(name="linear_cross_entropy", package="quack-kernels", load=_quack, compiles=True, only="cuda"),
)


def scorers(device_type: str) -> list[Scorer]:
    """Scorers for a device type."""
    return [scorer for scorer in SCORERS if scorer.only in (None, device_type)]
