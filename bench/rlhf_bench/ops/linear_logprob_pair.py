"""`linear_logprob_pair`: log-probs of policy and reference, exact KL and entropy in one sweep.

Floor: bare products of the same sizes: 2 for a forward (two of logits), 3 with the policy's backward. Gradients
from one random number per token for log-prob, KL and entropy of the policy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from rlhf_kernels import linear_logprob, linear_logprob_pair

from rlhf_bench.case import Baseline, Case, Floors, Tensors, differentiate, leaves_of
from rlhf_bench.floor import gemm_floors, random_normal
from rlhf_bench.heads import TRL_VOCAB_CHUNK, HeadSize, head_sizes, make_head, require_trl

OUTPUTS = ("logprob_a", "logprob_r", "kl", "entropy")


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Forward, and forward with backward to the policy's hidden states."""
    sizes = head_sizes(size, device_type)
    return [_case(s, dtype, backward) for s in sizes for backward in (False, True)]


def _case(s: HeadSize, dtype: torch.dtype, backward: bool) -> Case:
    differentiated = ("logprob_a", "kl") if backward else ()
    looked_at = ("entropy",) if backward else ()

    def make(device: torch.device) -> Tensors:
        inputs, generator = make_head(s, dtype, device)
        hidden_a = inputs.pop("hidden")
        # a policy some steps away from its reference: a KL of about 0.02 nats
        step = 0.1 * torch.randn(s.N, s.H, generator=generator, device=device)
        inputs |= {"hidden_a": hidden_a, "hidden_r": (hidden_a.float() + step).to(dtype)}
        return inputs | {f"grad_{n}": torch.randn(s.N, generator=generator, device=device) for n in differentiated}

    def finish(score: Callable[..., Tensors], inputs: Tensors) -> Tensors:
        leaves = leaves_of(inputs, ("hidden_a",) if backward else ())
        given = inputs | leaves
        outputs = score(*(given[name] for name in ("hidden_a", "hidden_r", "weight", "target")))
        return differentiate(outputs, {name: inputs[f"grad_{name}"] for name in differentiated}, leaves)

    def run(inputs: Tensors, backend: str) -> Tensors:
        def score(*given: torch.Tensor) -> Tensors:
            return linear_logprob_pair(*given, detach=looked_at, backend=backend)._asdict()

        return finish(score, inputs)

    def floor(inputs: Tensors) -> Floors:
        a, r, weight = inputs["hidden_a"], inputs["hidden_r"], inputs["weight"]
        if not backward:
            return gemm_floors((a, weight.T), (r, weight.T))
        logits = random_normal(s.N, s.V, dtype=dtype, device=a.device)
        return gemm_floors((a, weight.T), (r, weight.T), (logits, weight))

    def trl(inputs: Tensors) -> Callable[[], Tensors]:
        score = _trl(inputs["hidden_a"].device.type)
        return lambda: finish(score, inputs)

    def two_calls(inputs: Tensors) -> Tensors:
        """Two calls in place of the pair: no KL, so the entropy takes its place as what needs a second gradient."""
        leaves = leaves_of(inputs, ("hidden_a",) if backward else ())
        hidden_a, weight, target = (inputs | leaves)["hidden_a"], inputs["weight"], inputs["target"]
        policy = linear_logprob(hidden_a, weight, target, outputs=("logprob", "entropy"))
        outputs = {
            "logprob_a": policy.logprob,
            "logprob_r": linear_logprob(inputs["hidden_r"], weight, target).logprob,
            "entropy": policy.entropy,
        }
        upstream = {"logprob_a": inputs["grad_logprob_a"], "entropy": inputs["grad_kl"]} if backward else {}
        return differentiate({name: x for name, x in outputs.items() if x is not None}, upstream, leaves)

    gemms = 3 if backward else 2
    passes = 2 if backward else 1
    return Case(
        op="linear_logprob_pair",
        name=f"{'frozen' if backward else 'forward'}/{s}",
        dtype=dtype,
        kernels=("linear_logprob_pair",),
        shape=(s.V, s.H),
        make=make,
        run=run,
        eager=lambda inputs: finish(_eager, inputs),
        floor=floor,
        baselines=(
            Baseline(name="log_softmax + gather", prepare=lambda inputs: lambda: finish(_eager, inputs)),
            Baseline(name="ChunkedDivergence + 2 ChunkedLogProb", package="trl", prepare=trl),
            Baseline(
                name="2 linear_logprob, entropy for kl", prepare=lambda inputs: lambda: two_calls(inputs), same=False
            ),
        ),
        flops=2.0 * gemms * s.N * s.H * s.V,
        moved_bytes=(passes * (s.V + 2 * s.N) + (passes - 1) * s.N) * s.H * dtype.itemsize,
    )


def _eager(hidden_a: torch.Tensor, hidden_r: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> Tensors:
    logp_a = F.log_softmax((hidden_a @ weight.T).float(), -1)
    with torch.no_grad():
        logp_r = F.log_softmax((hidden_r @ weight.T).float(), -1)
    p = logp_a.exp()
    return {
        "logprob_a": logp_a.gather(1, target[:, None])[:, 0],
        "logprob_r": logp_r.gather(1, target[:, None])[:, 0],
        "kl": (p * (logp_a - logp_r)).sum(-1),
        "entropy": -(p * logp_a).sum(-1).detach(),
    }


def _trl(device_type: str) -> Callable[..., Tensors]:
    """beta=1 is KL(student‖teacher); its entropy carries no gradient, so no case here differentiates the entropy."""
    require_trl(device_type)
    from trl.kernels import ChunkedLogProbFunction
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def score(hidden_a: torch.Tensor, hidden_r: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> Tensors:
        kl, entropy = ChunkedDivergenceFunction.apply(hidden_a, weight, None, hidden_r, weight, None, 1.0)
        a, r = (
            ChunkedLogProbFunction.apply(h, weight, None, target, 1.0, TRL_VOCAB_CHUNK, None, 1.0, ())[0]
            for h in (hidden_a, hidden_r)
        )
        return {"logprob_a": a, "logprob_r": r, "kl": kl, "entropy": entropy}

    return score
