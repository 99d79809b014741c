"""Check of a rollout against the training forward, and against answers drawn once more alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.rollout.engine import EngineOptions
from rlhf_engine.rollout.generate import generate_requests
from rlhf_engine.rollout.request import Request, Rollout, SamplingConfig

_DRAWN_AGAIN = 16
"""Answers that are drawn once more, each alone."""


@dataclass(frozen=True, kw_only=True)
class RolloutCheck:
    """A rollout beside the training forward at the same weights."""

    tokens: int
    mean: float
    """Mean |log-prob of the rollout − log-prob of the training forward| per token."""
    largest: float
    beyond_one_percent: float
    """Share of tokens whose probability ratio is more than 1 % from 1."""
    drawn_again: int
    """Answers drawn once more, each alone."""
    diverged: int
    """Answers of these that got another token somewhere: rounding depends on what rows are batched with."""


def check_rollout(
    model: HydraModel,
    rollout: Rollout,
    requests: Sequence[Request],
    sampling: SamplingConfig,
    *,
    options: EngineOptions | None = None,
) -> RolloutCheck:
    """Compare a rollout of the actor's role with the training forward, and some of its answers with themselves alone.

    Raises ValueError for a filtered rollout, of which nobody has said what words its tokens were drawn among.
    """
    if rollout.filtered:
        raise ValueError(
            "rollout: expected one with the words that its tokens were drawn among, got log-probs of some words "
            "without them (filtered)"
        )
    scored = model.score(rollout.batch, ("actor",), temperature=sampling.temperature).logprobs_M
    assert scored is not None
    gap = (rollout.logprobs_M - scored).abs()
    again = min(_DRAWN_AGAIN, len(requests))
    alone = replace(options or EngineOptions(), max_rows=1)
    repeated = generate_requests(model, requests[:again], sampling, options=alone)
    diverged = sum(repeated.batch.completion_tokens(i) != rollout.batch.completion_tokens(i) for i in range(again))
    return RolloutCheck(
        tokens=gap.numel(),
        mean=float(gap.mean()),
        largest=float(gap.max()),
        beyond_one_percent=float((gap.expm1().abs() > 0.01).float().mean()),
        drawn_again=again,
        diverged=diverged,
    )


def report_check(check: RolloutCheck) -> str:
    """A check in one line."""
    again = f"{check.diverged} of {check.drawn_again} answers drawn again alone came out different"
    if check.largest == 0:
        return (
            f"log-probs have the bits of the training forward's: largest difference 0.0 over {check.tokens} tokens; "
            f"{again}"
        )
    return (
        f"log-probs differ from the training forward's by {check.mean:.2g} on average and {check.largest:.2g} at most "
        f"over {check.tokens} tokens, {100 * check.beyond_one_percent:.1f} % of ratios by more than 1 %; {again}"
    )
