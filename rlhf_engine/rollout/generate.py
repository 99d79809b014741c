"""Answers to a batch of prompts, on the very weights that training uses.

Greedy and sampled rows share a batch, and so do rows of several roles of one backbone. Each token's log-prob under the
distribution it was drawn from is kept, and the words that it was drawn among where those are not all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.hydra.supports import Supports
from rlhf_engine.rollout.engine import EngineOptions, RolloutEngine
from rlhf_engine.rollout.request import Answer, Request, Rollout, RolloutStats, SamplingConfig
from rlhf_engine.rollout.stopping import Decode


def generate(
    model: HydraModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    role: str | Sequence[str] = "actor",
    greedy: Sequence[bool] | None = None,
    sample_ids: Sequence[int] | None = None,
    policy_version: int = 0,
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
        policy_version: noted with every token.
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
    return generate_requests(model, requests, sampling, policy_version=policy_version, options=options, decode=decode)


def generate_requests(
    model: HydraModel,
    requests: Sequence[Request],
    sampling: SamplingConfig,
    *,
    policy_version: int = 0,
    options: EngineOptions | None = None,
    decode: Decode | None = None,
) -> Rollout:
    """Draw the answers of requests.

    Args:
        model: a model with the requests' roles.
        requests: N requests, of roles with an LM head on one backbone.
        sampling: options of every answer, except where a request has its own.
        policy_version: noted with every token.
        options: how rows are run; None: the defaults.
        decode: token ids to text, which stop texts need; None without them.

    Returns:
        N answers, in the order of the requests.

    Raises:
        ValueError: anything that `RolloutEngine` refuses.
        MemoryLimitError: the rows do not fit into memory.
    """
    engine = RolloutEngine(model, sampling, requests, options=options, decode=decode, policy_version=policy_version)
    answers = list(engine.run())
    return collect(requests, answers, engine.backbone.device, stats=engine.stats)


def collect(
    requests: Sequence[Request],
    answers: Sequence[Answer],
    device: torch.device,
    *,
    stats: RolloutStats,
) -> Rollout:
    """The rollout of requests whose answers, one each, have finished in any order."""
    ordered = sorted(answers, key=lambda answer: answer.index)
    batch = PackedBatch.from_lists(
        [request.prompt for request in requests],
        [answer.tokens for answer in ordered],
        device=device,
        sample_ids=[request.sample_id for request in requests],
        supports=Supports.join([(answer.supports, len(answer.tokens)) for answer in ordered]),
    )
    logprobs = [x for answer in ordered for x in answer.logprobs]
    return Rollout(
        batch=batch,
        logprobs_M=torch.tensor(logprobs, dtype=torch.float32, device=device),
        finish_reasons=tuple(answer.finish_reason for answer in ordered),
        versions_M=torch.tensor([x for answer in ordered for x in answer.versions], device=device),
        filtered=False,
        stats=stats,
    )
