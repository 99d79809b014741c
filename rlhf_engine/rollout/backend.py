"""Backends of a training run's rollouts: the two calls that it makes, and the backend that draws them here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlhf_engine.config import TrainConfig
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.rollout.engine import EngineOptions, check_options
from rlhf_engine.rollout.generate import generate
from rlhf_engine.rollout.request import Rollout, SamplingConfig
from rlhf_engine.rollout.vllm.backend import Canary, VllmRollouts, find_base
from rlhf_engine.rollout.vllm.client import ServedModel, VllmClient


class Rollouts(Protocol):
    """Draws answers of the policy as it was at the last `sync`."""

    def sync(self, policy_version: int) -> dict[str, float]:
        """Draw from the model's present weights from now on, which are this version; metrics, none for the same."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        role: str = "actor",
        sample_ids: Sequence[int] | None = None,
        greedy: Sequence[bool] | None = None,
    ) -> Rollout:
        """One answer per prompt, as `rollout.generate` draws them."""

    def close(self) -> None:
        """Give back what the run has put elsewhere; a later `sync` puts it there again."""


class LocalRollouts:
    """Draws in this process, on the very weights that train."""

    def __init__(self, model: HydraModel, options: EngineOptions | None = None) -> None:
        self.model, self.options = model, options
        self.policy_version = 0

    def sync(self, policy_version: int) -> dict[str, float]:
        """Nothing to send: only the version's number is new."""
        self.policy_version = policy_version
        return {}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        role: str = "actor",
        sample_ids: Sequence[int] | None = None,
        greedy: Sequence[bool] | None = None,
    ) -> Rollout:
        """`rollout.generate`."""
        return generate(
            self.model,
            prompts,
            sampling,
            role=role,
            sample_ids=sample_ids,
            greedy=greedy,
            policy_version=self.policy_version,
            options=self.options,
        )

    def close(self) -> None:
        """Nothing has gone elsewhere."""


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
    rank: int = 0,
) -> Rollouts:
    """Backend that draws a rank's answers of the actor. prompts: of the data; a few of them become canaries."""
    if server is None:
        options = EngineOptions.of(config)
        most = max(len(prompt) for prompt in prompts) + config.max_completion_length
        check_options(options, model.role_backbone("actor"), most)
        return LocalRollouts(model, options)
    return serve(config, model, server, prompts, rank=rank)


def serve(
    config: TrainConfig,
    model: HydraModel,
    server: RolloutServer,
    prompts: Sequence[Sequence[int]],
    *,
    role: str = "actor",
    compared: str | None = None,
    rank: int = 0,
    stopped: Callable[[], bool] = lambda: False,
) -> VllmRollouts:
    """Backend by which a server draws the answers of a role, compared with another; `stopped` as of VllmRollouts."""
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
        stopped=stopped,
    )
