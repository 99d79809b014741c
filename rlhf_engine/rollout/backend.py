"""Backends of a training run's rollouts: the calls that it makes, and the backend that draws them here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_engine.config import TrainConfig
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.hydra.roles import require_role
from rlhf_engine.rollout.engine import EngineOptions, RolloutEngine, check_options
from rlhf_engine.rollout.generate import collect
from rlhf_engine.rollout.request import PromptBatch, Request, Rollout, SamplingConfig
from rlhf_engine.rollout.rows import AnswerRow
from rlhf_engine.rollout.vllm.backend import Canary, VllmRollouts, find_base
from rlhf_engine.rollout.vllm.client import ServedModel, VllmClient


class LocalRollouts:
    """Draws in this process, on the very weights that train."""

    def __init__(self, model: HydraModel, options: EngineOptions | None = None, role: str = "actor") -> None:
        self.model, self.options, self.role = model, options, role
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
        engine.submit(requests, sampling)
        answers = list[AnswerRow]()
        while not engine.finished:
            engine.renew(spec.slot, *self.look())
            answers += engine.step()
        return collect(engine, requests, answers)

    def close(self) -> None:
        """Give back what the run has put elsewhere: nothing."""


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
) -> Rollouts:
    """Backend that draws a rank's answers of a role; a few of the data's prompts compare a server with `compared`."""
    if server is None:
        options = EngineOptions.of(config)
        most = max(len(prompt) for prompt in prompts) + config.max_completion_length
        check_options(options, model.role_backbone(role), most)
        return LocalRollouts(model, options, role)
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
