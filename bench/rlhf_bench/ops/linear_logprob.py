"""`linear_logprob`: forward, frozen head, trained head, entropy as a value, differentiable entropy.

Floor: bare products of the same sizes: 1 for a forward, 2 for forward and backward with a frozen head, 3 with a trained
one. (Ours makes a fourth: its backward makes the logits again.) Gradients come from one random number per token and
output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from rlhf_kernels import linear_logprob
from torch import Tensor

from rlhf_bench.case import Baseline, Case, Floors, NotHereError, Tensors, differentiate, leaves_of, require
from rlhf_bench.floor import gemm_floors, random_normal
from rlhf_bench.heads import HeadSize, Score, Scorer, eager_score, head_sizes, make_head, scorers


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Outputs and gradients that one case computes."""

    name: str
    gradients: tuple[str, ...] = ("hidden",)
    outputs: tuple[str, ...] = ("logprob",)
    differentiated: tuple[str, ...] = ("logprob",)
    gemms: int = 2


MODES = (
    Mode(name="forward", gradients=(), differentiated=(), gemms=1),
    Mode(name="frozen"),
    Mode(name="trained", gradients=("hidden", "weight"), gemms=3),
    Mode(name="entropy", outputs=("logprob", "entropy")),
    Mode(name="entropy_grad", outputs=("logprob", "entropy"), differentiated=("logprob", "entropy")),
)
QUACK_CHUNK = 4096  # its own default
FEW_MODES = MODES[:2]  # at the sizes that are there for their N only


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Every mode at every size; forward and frozen only at the small N of the default CPU grid."""
    return [
        _case(mode, s, device_type, dtype)
        for s in head_sizes(size, device_type)
        for mode in (FEW_MODES if size == "default" and device_type == "cpu" and s.N < 512 else MODES)
    ]


def frozen_case(s: HeadSize, dtype: torch.dtype) -> Case:
    """Forward and backward with a frozen head on a CPU, for a study with sizes of its own."""
    return _case(MODES[1], s, "cpu", dtype)


def _case(mode: Mode, s: HeadSize, device_type: str, dtype: torch.dtype) -> Case:
    def make(device: torch.device) -> Tensors:
        inputs, generator = make_head(s, dtype, device)
        return inputs | {
            f"grad_{name}": torch.randn(s.N, generator=generator, device=device) for name in mode.differentiated
        }

    looked_at = tuple(name for name in mode.outputs if mode.gradients and name not in mode.differentiated)

    def run(inputs: Tensors, backend: str) -> Tensors:
        def score(hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]) -> Tensors:
            made = linear_logprob(hidden, weight, target, outputs=outputs, detach=looked_at, backend=backend)
            return {name: getattr(made, name) for name in outputs}

        return evaluate(score, mode, inputs)

    item = dtype.itemsize
    backward_bytes = s.H * (s.V + 2 * s.N) * item if mode.gradients else 0
    return Case(
        op="linear_logprob",
        name=f"{mode.name}/{s}",
        dtype=dtype,
        kernels=("linear_logprob",),
        shape=(s.V, s.H),
        make=make,
        run=run,
        eager=lambda inputs: evaluate(eager_score, mode, inputs),
        floor=lambda inputs: head_floor(inputs, mode.gemms),
        baselines=(
            *(_baseline(scorer, mode, device_type) for scorer in scorers(device_type) if scorer.same or mode.gradients),
            _chunked_sum(mode) if mode.outputs == ("logprob",) else _without_entropy(mode),
            *([_quack_sum(mode)] if device_type == "cuda" and mode.outputs == ("logprob",) else []),
            *([_in_float32(mode)] if device_type == "cpu" and dtype != torch.float32 else []),
        ),
        flops=2.0 * mode.gemms * s.N * s.H * s.V,
        moved_bytes=s.H * (s.V + s.N) * item + backward_bytes + ("weight" in mode.gradients) * s.H * s.V * item,
    )


def evaluate(score: Score, mode: Mode, inputs: Tensors) -> Tensors:
    """Outputs and gradients of `mode` by `score`, ours or theirs."""
    leaves = leaves_of(inputs, mode.gradients)
    given = inputs | leaves
    outputs = score(given["hidden"], given["weight"], given["target"], mode.outputs)
    return differentiate(outputs, {name: inputs[f"grad_{name}"] for name in mode.differentiated}, leaves)


def head_floor(inputs: Tensors, gemms: int) -> Floors:
    """1: logits. 2: and d_hidden. 3: and d_weight."""
    hidden, weight = inputs["hidden"], inputs["weight"]
    forward = (hidden, weight.T)
    if gemms == 1:
        return gemm_floors(forward)
    logits = random_normal(hidden.shape[0], weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    back, back_weight = (logits, weight), (logits.T, hidden)
    return gemm_floors(forward, back, fresh=[back_weight] * (gemms > 2))


def _baseline(scorer: Scorer, mode: Mode, device_type: str) -> Baseline:
    def prepare(inputs: Tensors) -> Callable[[], Tensors]:
        score = scorer.checked(device_type, mode.outputs, mode.differentiated)
        return lambda: evaluate(score, mode, inputs)

    return Baseline(
        name=scorer.name, package=scorer.package, prepare=prepare, same=scorer.same, compiles=scorer.compiles
    )


def _in_float32(mode: Mode) -> Baseline:
    """Our own op with everything in fp32: what half precision costs a CPU, in the same run."""

    def score(hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]) -> Tensors:
        looked_at = tuple(name for name in outputs if mode.gradients and name not in mode.differentiated)
        made = linear_logprob(hidden, weight, target, outputs=outputs, detach=looked_at)
        return {name: getattr(made, name) for name in outputs}

    def prepare(inputs: Tensors) -> Callable[[], Tensors]:
        wide = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
        return lambda: evaluate(score, mode, wide)

    return Baseline(name="linear_logprob in float32", prepare=prepare, same=False)


def _without_entropy(mode: Mode) -> Baseline:
    """Our own log-probs alone: what the entropy costs, in the same run."""
    alone = replace(mode, outputs=("logprob",), differentiated=("logprob",))

    def score(hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]) -> Tensors:
        logprob = linear_logprob(hidden, weight, target, outputs=outputs).logprob
        assert logprob is not None
        return {"logprob": logprob}

    return Baseline(
        name="linear_logprob without entropy",
        prepare=lambda inputs: lambda: evaluate(score, alone, inputs),
        same=False,
    )


def _chunked_sum(mode: Mode) -> Baseline:
    """torch's chunked path: a sum over tokens only, so every token has the same coefficient."""

    def prepare(inputs: Tensors) -> Callable[[], Tensors]:
        if not hasattr(F, "linear_cross_entropy"):
            raise NotHereError(f"needs torch >= 2.13, this is {torch.__version__}")
        options = torch.nn.LinearCrossEntropyOptions()

        def run() -> Tensors:
            leaves = leaves_of(inputs, mode.gradients)
            given = inputs | leaves
            loss = F.linear_cross_entropy(
                given["hidden"], given["weight"], given["target"], reduction="sum", options=options
            )
            return differentiate({"loss": loss}, {"loss": torch.ones_like(loss)} if leaves else {}, leaves)

        return run

    return Baseline(name="F.linear_cross_entropy(sum)", prepare=prepare, same=False)


def _quack_sum(mode: Mode) -> Baseline:
    """QuACK's fused backward: a sum over tokens only, without logits in memory; no dW for a frozen head."""

    def prepare(inputs: Tensors) -> Callable[[], Tensors]:
        require("quack-kernels")
        from quack.linear_cross_entropy import chunked_linear_cross_entropy, scaled_exp_lce_supported

        if not scaled_exp_lce_supported(inputs["hidden"], inputs["weight"], QUACK_CHUNK, "sum"):
            raise NotHereError("its scaled-exp kernels need compute capability 9.0, bf16 and a vocabulary of 128 n")

        def run() -> Tensors:
            leaves = leaves_of(inputs, mode.gradients)
            given = inputs | leaves
            loss = chunked_linear_cross_entropy(
                given["hidden"],
                given["weight"],
                given["target"],
                chunk_size=QUACK_CHUNK,
                reduction="sum",
                use_scaled_exp=True,
            )
            return differentiate({"loss": loss}, {"loss": torch.ones_like(loss)} if leaves else {}, leaves)

        return run

    return Baseline(
        name="chunked_linear_cross_entropy(sum)", package="quack-kernels", prepare=prepare, same=False, compiles=True
    )
