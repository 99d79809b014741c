"""Answers to a batch of prompts, on the very weights that training uses.

Greedy and sampled rows share a batch, and so do rows of several roles of one backbone. Each token's log-prob under the
distribution it was drawn from is kept, and the words that it was drawn among where those are not all.

A training run draws through `Rollouts`, in this process or on a server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import torch

from rlhf_engine.config import TrainConfig
from rlhf_engine.hydra.batch import PackedBatch, Turns
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.hydra.roles import require_role
from rlhf_engine.hydra.supports import Supports
from rlhf_engine.rollout.conversation import Conversation, Conversations
from rlhf_engine.rollout.engine import RolloutEngine, check_options
from rlhf_engine.rollout.request import Decode, EngineOptions, PromptBatch, Request, Rollout, SamplingConfig
from rlhf_engine.rollout.rows import AnswerRow
from rlhf_engine.rollout.vllm.backend import Canary, VllmRollouts, find_base
from rlhf_engine.rollout.vllm.client import ServedModel, VllmClient


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
    return _joined(engine, requests, sorted(answers, key=attrgetter("index")))


def _joined(
    engine: RolloutEngine,
    requests: Sequence[Request],
    answers: Sequence[AnswerRow | Conversation],
    turns: Sequence[Turns] | None = None,
) -> Rollout:
    """The rollout of requests with their answers."""
    device = engine.backbone.device
    logprobs, versions, supports = list[float](), list[int](), list[tuple[Supports | None, int]]()
    for answer in answers:
        n, support = len(answer.logprobs), None
        if any(map(len, answer.supports)):
            support = Supports.of_rows(answer.supports, n, engine.backbone.n_words)
        logprobs += answer.logprobs
        versions += answer.versions
        supports.append((support, n))
    batch = PackedBatch.from_lists(
        [request.prompt for request in requests],
        [answer.tokens for answer in answers],
        device=device,
        sample_ids=[request.sample_id for request in requests],
        supports=Supports.join(supports),
        turns=turns,
    )
    return Rollout(
        batch=batch,
        logprobs_M=torch.tensor(logprobs, dtype=torch.float32, device=device),
        finish_reasons=tuple(answer.finish_reason for answer in answers),
        versions_M=torch.tensor(versions, device=device),
        filtered=False,
        stats=engine.stats,
    )


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


# ---- draws of a training run -----------------------------------------------------------------------------------------


class LocalRollouts:
    """Draws in this process, on the very weights that train."""

    def __init__(
        self,
        model: HydraModel,
        options: EngineOptions | None = None,
        role: str = "actor",
        conversations: Conversations | None = None,
    ) -> None:
        self.model, self.options, self.role, self.conversations = model, options, role, conversations
        self.policy_version = 0
        self.look: Callable[[], tuple[int, Callable[[], object] | None]] = lambda: (self.policy_version, None)
        """Called before every token, or a few times a second while a server draws: the version that draws from here
        on, and what writes it into the role's slot; None: it is there. What it raises ends the drawing."""

    def sync(self, policy_version: int) -> dict[str, float]:
        """Draw from the model's present weights from now on, which are this version; metrics, none for the same."""
        self.policy_version = policy_version
        return {}

    def check(self, policy_version: int) -> dict[str, float]:
        """Metrics of a comparison of what drew by a version with that policy, one for each version: none here."""
        return {}

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, *, role: str | None = None) -> Rollout:
        """One answer per prompt, in the role's lane or in that of another."""
        role = role or self.role
        each = zip(prompts.prompts, prompts.sample_ids, prompts.greedy, strict=True)
        requests = [Request(prompt=prompt, sample_id=i, role=role, greedy=greedy) for prompt, i, greedy in each]
        spec = require_role(self.model.roles, role)
        engine = RolloutEngine.of(self.model, spec.backbone, self.options)
        if self.conversations is not None:
            talks = [self.conversations.begin(*each) for each in zip(prompts.data, prompts.prompts, strict=True)]
            requests = [talk.request(first, sampling) for talk, first in zip(talks, requests, strict=True)]
            self._converse(engine, spec.slot, dict(zip(talks, requests, strict=True)), sampling)
            rollout = _joined(engine, requests, talks, [tuple(talk.turns) for talk in talks])
            return replace(rollout, talks=tuple(talk.end() for talk in talks))
        engine.submit(requests, sampling)
        answers = list[AnswerRow]()
        while not engine.finished:
            engine.renew(spec.slot, *self.look())
            answers += engine.step()
        return collect(engine, requests, answers)

    def _converse(
        self,
        engine: RolloutEngine,
        slot: str | None,
        first: Mapping[Conversation, Request],
        sampling: SamplingConfig,
    ) -> None:
        """Draw the turns of conversations, each as soon as the results of the one before are there."""
        waiting, held, stats = dict(first), dict[int, Conversation](), None
        try:
            while waiting or held:
                if waiting:
                    numbers = engine.submit(list(waiting.values()), sampling)
                    held |= dict(zip(numbers, waiting, strict=True))
                    waiting = {}
                    stats = engine.stats = stats or engine.stats  # it has begun anew where all rows had ended
                engine.renew(slot, *self.look())
                for row in engine.step():
                    talk = held.pop(row.index)
                    if talk.take(row, sampling.max_completion_length):
                        waiting[talk] = talk.request(first[talk], sampling)
                    self.look()  # a tool may have taken long, and who waits for tokens is to know that this is at work
        finally:
            engine.drop_kept()

    def close(self) -> None:
        """Give back what the run has put elsewhere: environments."""
        if self.conversations is not None:
            self.conversations.close()


Rollouts = LocalRollouts | VllmRollouts  # draw answers of a role's policy as it was at the last `sync`
ADAPTER_FOLDER = "vllm"  # sub-folder of output_dir that adapters are written to unless another folder is asked for
SERVER_SECONDS, SLOWEST = 240.0, 10.0
"""Seconds within which the whole of an answer has to have come, and tokens for each of which there is one more."""
_CANARIES = 4  # prompts that are scored on both sides after every sync


@dataclass(frozen=True, kw_only=True)
class RolloutServer:
    """A server that is there and holds the base."""

    client: VllmClient
    base: ServedModel


def find_server(config: TrainConfig, prompts: Sequence[Sequence[int]], *, rank: int = 0) -> RolloutServer | None:
    """The configured server of a rank, before any weights are read; None for local rollouts."""
    if not (urls := config.vllm_servers):
        return None
    client = VllmClient(urls[rank % len(urls)], timeout=SERVER_SECONDS + config.max_completion_length / SLOWEST)
    most = max(len(prompt) for prompt in prompts) + config.max_completion_length
    return RolloutServer(client=client, base=find_base(client, config.model_name_or_path, most))


def make_rollouts(
    config: TrainConfig,
    model: HydraModel,
    server: RolloutServer | None,
    prompts: Sequence[Sequence[int]],
    *,
    role: str = "actor",
    compared: str | None = None,
    rank: int = 0,
    conversations: Conversations | None = None,
) -> Rollouts:
    """Backend that draws a rank's answers of a role; a few of the data's prompts compare a server with `compared`."""
    if server is None:
        options = EngineOptions.of(config)
        most = max(len(prompt) for prompt in prompts) + config.max_completion_length
        check_options(options, model.role_backbone(role), most)
        return LocalRollouts(model, options, role, conversations)
    different = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    canary = Canary(
        model,
        server.client,
        different[:_CANARIES],
        temperature=config.temperature,
        max_tokens=config.max_completion_length,
        bound=config.rollout_mismatch_bound,
        seed=config.seed,
        role=compared or role,
    )
    output = Path(config.output_dir).resolve()
    # folders of the same name are different runs
    run = f"{output.name}-{hashlib.sha256(str(output).encode()).hexdigest()[:6]}"
    if role != "actor":  # ranks may draw by different versions at a time
        run = f"{run}-{role}-{rank}"
    # the run's own folder may have the sign in its name
    here, _, there = (config.vllm_adapter_dir or "").partition(":")
    return VllmRollouts(
        model,
        server.client,
        server.base,
        canary,
        run=run,
        folder=Path(here) if here else output / ADAPTER_FOLDER,
        server_folder=there or None,
        role=role,
    )
