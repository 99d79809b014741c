"""`linear_ppo_loss`: clipped PPO loss straight from hidden states, forward and backward, frozen and trained head.

Floor: bare products of the same sizes: 2 with a frozen head, 3 with a trained one (its gradient comes in the forward).
About one token in twenty is clipped and has no gradient. The statistics that the loss comes with are part of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from rlhf_kernels import linear_logprob, linear_ppo_loss
from torch import Tensor

from rlhf_bench.case import Baseline, Case, Tensors, differentiate, leaves_of, require
from rlhf_bench.formulas import CLIP, log_ratios, ppo_policy
from rlhf_bench.heads import HeadSize, Score, Scorer, eager_score, head_sizes, make_head, scorers
from rlhf_bench.ops.linear_logprob import head_floor


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Frozen and trained head at every size; frozen only at the small N of the default CPU grid."""
    return [
        _case(s, device_type, dtype, trained)
        for s in head_sizes(size, device_type)
        for trained in ((False,) if size == "default" and device_type == "cpu" and s.N < 512 else (False, True))
    ]


def _case(s: HeadSize, device_type: str, dtype: torch.dtype, trained: bool) -> Case:
    gradients = ("hidden", "weight") if trained else ("hidden",)

    def make(device: torch.device) -> Tensors:
        inputs, generator = make_head(s, dtype, device)
        new = linear_logprob(inputs["hidden"], inputs["weight"], inputs["target"], backend="reference").logprob
        assert new is not None
        return inputs | {
            "old_logprob": new - log_ratios((s.N,), generator, device),
            "advantage": torch.randn(s.N, generator=generator, device=device),
            "mask": torch.ones(s.N, dtype=torch.bool, device=device),
        }

    def run(inputs: Tensors, backend: str) -> Tensors:
        leaves = leaves_of(inputs, gradients)
        given = inputs | leaves
        names = ("hidden", "weight", "target", "old_logprob", "advantage", "mask")
        out = linear_ppo_loss(
            *(given[n] for n in names), denom=float(s.N), clip_low=CLIP, clip_high=CLIP, backend=backend
        )
        return _finish(out.loss, {"logprob": out.logprob}, leaves)

    def composed(score: Score, inputs: Tensors) -> Tensors:
        leaves = leaves_of(inputs, gradients)
        given = inputs | leaves
        logprob = score(given["hidden"], given["weight"], given["target"], ("logprob",))["logprob"]
        loss, _ = ppo_policy(logprob.float(), inputs["old_logprob"], inputs["advantage"], inputs["mask"], float(s.N))
        return _finish(loss, {"logprob": logprob}, leaves)

    def baseline(scorer: Scorer) -> Baseline:
        def prepare(inputs: Tensors) -> Callable[[], Tensors]:
            score = scorer.checked(device_type, ("logprob",), ("logprob",))
            return lambda: composed(score, inputs)

        return Baseline(
            name=f"{scorer.name} + formula",
            package=scorer.package,
            prepare=prepare,
            same=scorer.same,
            compiles=scorer.compiles,
        )

    def liger(inputs: Tensors) -> Callable[[], Tensors]:
        loss_of = _liger(device_type, s.N)

        def run_liger() -> Tensors:
            leaves = leaves_of(inputs, gradients)
            return _finish(loss_of(inputs | leaves), {}, leaves)

        return run_liger

    gemms = 3 if trained else 2
    return Case(
        op="linear_ppo_loss",
        name=f"{'trained' if trained else 'frozen'}/{s}",
        dtype=dtype,
        kernels=("linear_ppo_loss",),
        shape=(s.V, s.H),
        make=make,
        run=run,
        eager=lambda inputs: composed(eager_score, inputs),
        floor=lambda inputs: head_floor(inputs, gemms),
        baselines=(
            *(baseline(scorer) for scorer in scorers(device_type)),
            Baseline(
                name="LigerFusedLinearGRPOLoss", package="liger-kernel", prepare=liger, compiles=device_type == "cuda"
            ),
        ),
        flops=2.0 * gemms * s.N * s.H * s.V,
        moved_bytes=(2 * s.N + (2 if trained else 1) * s.V) * s.H * dtype.itemsize,
    )


def _finish(loss: Tensor, outputs: Tensors, leaves: Tensors) -> Tensors:
    """Log-probs and gradients of the loss. The loss itself is one number, too few for the statistics of tier T3."""
    made = differentiate({"loss": loss}, {"loss": torch.ones_like(loss)}, leaves)
    del made["loss"]
    return made | {name: x.detach() for name, x in outputs.items()}


def _liger(device_type: str, n_tokens: int) -> Callable[[Tensors], Tensor]:
    """Every token is a sequence of its own and all are one chunk: the way in which per-token advantages are right."""
    require("liger-kernel")
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=device_type == "cuda",  # what it compiles does not run on a CPU
        use_ref_model=False,
        chunk_size=n_tokens,
        epsilon_low=CLIP,
        epsilon_high=CLIP,
        loss_type="dapo",
    )

    def loss_of(given: Tensors) -> Tensor:
        made, _ = loss(
            given["hidden"][:, None],
            given["weight"],
            given["target"][:, None],
            given["mask"][:, None],
            given["advantage"],
            old_per_token_logps=given["old_logprob"][:, None],
            num_items_in_batch=n_tokens,
        )
        return made

    return loss_of
