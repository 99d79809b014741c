"""Answers to a batch of prompts, on the very weights that training uses.

Greedy and sampled rows share a batch, and so do rows of several roles of one backbone. Each token's log-prob under the
distribution it was drawn from is kept, and the words that it was drawn among where those are not all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.hydra.supports import Supports
from rlhf_engine.rollout.engine import EngineOptions, RolloutEngine
from rlhf_engine.rollout.request import Decode, Request, Rollout, SamplingConfig
from rlhf_engine.rollout.rows import AnswerRow


def generate(
    model: HydraModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    role: str | Sequence[str] = "actor",
    greedy: Sequence[bool] | None = None,
    sample_ids: Sequence[int] | None = None,
    options: EngineOptions | None = None,
    decode: Decode | None = None,
) -> Rollout:
    """Draw one answer per prompt. Prompts that are equal go through the model once.

    Args:
        model: a model with the role.
        prompts: N lists of token ids, of at least one token each.
        sampling: how answers are drawn.
        role: one role with an LM head, or N of them on one backbone.
        greedy: N flags; True takes the arg-max instead of a draw. None: all are drawn.
        sample_ids: N ids that, with the seed, key the random numbers; None: 0 to N−1.
        options: how rows are run; None: the defaults.
        decode: token ids to text, which stop texts need; None without them.

    Returns:
        N answers, in the order of the prompts.

    Raises:
        ValueError: no prompts, an empty one, one that does not fit the context or the cache, or an unknown role.
        ValueError: flags, ids or roles of another number than prompts, or anything else that `RolloutEngine` refuses.
        MemoryLimitError: the rows do not fit into memory.
    """
    n = len(prompts)
    ids = tuple(sample_ids) if sample_ids is not None else tuple(range(n))
    flags = tuple(greedy) if greedy is not None else (False,) * n
    roles = (role,) * n if isinstance(role, str) else tuple(role)
    for name, given in (("greedy", flags), ("sample_ids", ids), ("role", roles)):
        if len(given) != n:
            raise ValueError(f"{name}: expected {n} entries like prompts, got {len(given)}")
    requests = [
        Request(prompt=tuple(prompt), sample_id=i, role=r, greedy=flag)
        for prompt, i, r, flag in zip(prompts, ids, roles, flags, strict=True)
    ]
    return generate_requests(model, requests, sampling, options=options, decode=decode)


def generate_requests(
    model: HydraModel,
    requests: Sequence[Request],
    sampling: SamplingConfig,
    *,
    options: EngineOptions | None = None,
    decode: Decode | None = None,
) -> Rollout:
    """Draw the answers of requests.

    Args:
        model: a model with the requests' roles.
        requests: N requests, of roles with an LM head on one backbone.
        sampling: options of every answer, except where a request has its own.
        options: how rows are run; None: the defaults.
        decode: token ids to text, which stop texts need; None without them.

    Returns:
        N answers, in the order of the requests.

    Raises:
        ValueError: anything that `RolloutEngine` refuses.
        MemoryLimitError: the rows do not fit into memory.
    """
    backbone = next((model.roles[request.role].backbone for request in requests if request.role in model.roles), "base")
    engine = RolloutEngine.of(model, backbone, options)
    engine.submit(requests, sampling, decode=decode)
    return collect(engine, requests, list(engine.run()))


def collect(engine: RolloutEngine, requests: Sequence[Request], answers: Sequence[AnswerRow]) -> Rollout:
    """The rollout of requests whose answers, one each, an engine has finished in any order."""
    ordered, device = sorted(answers, key=lambda answer: answer.index), engine.backbone.device
    n_words = engine.backbone.n_words
    batch = PackedBatch.from_lists(
        [request.prompt for request in requests],
        [answer.tokens for answer in ordered],
        device=device,
        sample_ids=[request.sample_id for request in requests],
        supports=Supports.join([(_support(answer, n_words), len(answer.tokens)) for answer in ordered]),
    )
    logprobs = [x for answer in ordered for x in answer.logprobs]
    return Rollout(
        batch=batch,
        logprobs_M=torch.tensor(logprobs, dtype=torch.float32, device=device),
        finish_reasons=tuple(answer.finish_reason for answer in ordered),
        versions_M=torch.tensor([x for answer in ordered for x in answer.versions], device=device),
        filtered=False,
        stats=engine.stats,
    )


def _support(answer: AnswerRow, vocabulary: int) -> Supports | None:
    has_any = any(len(support) for support in answer.supports)
    return Supports.of_rows(answer.supports, len(answer.tokens), vocabulary) if has_any else None


_DRAWN_AGAIN = 16  # answers that are drawn once more, each alone


@dataclass(frozen=True, kw_only=True)
class RolloutCheck:
    """A rollout beside the training forward at the same weights."""

    tokens: int
    mean: float  # mean |log-prob of the rollout − log-prob of the training forward| per token
    largest: float
    beyond_one_percent: float  # share of tokens whose probability ratio is more than 1 % from 1
    drawn_again: int  # answers drawn once more, each alone
    diverged: int  # answers of these that got another token somewhere: rounding depends on what rows are batched with


def check_rollout(
    model: HydraModel,
    rollout: Rollout,
    requests: Sequence[Request],
    sampling: SamplingConfig,
    *,
    options: EngineOptions | None = None,
) -> RolloutCheck:
    """Compare a rollout of the actor's role with the training forward, and some answers with themselves alone."""
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
