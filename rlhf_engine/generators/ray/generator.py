"""A generator in a process of its own: what Ray runs as an actor. Plain values come in and go out.

It holds the base, a slot for the policy that draws, and the frozen lanes; policies come as adapters. Two threads call
it: one for `beat`, one for all else, in the order in which the learner asks.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rlhf_kernels.runtime import registry
from transformers.utils import logging

from rlhf_engine.config import TrainConfig
from rlhf_engine.devices import keep_freed_memory
from rlhf_engine.errors import EngineError
from rlhf_engine.generators import serialize
from rlhf_engine.generators.policy_store import VersionStore
from rlhf_engine.generators.worker import Worker
from rlhf_engine.policy.build import BEHAVIOUR, build_generator_model
from rlhf_engine.rollout import EngineOptions
from rlhf_engine.scoring.score import FrozenRoles


class Generator:
    """Draws work items by policies that it was sent."""

    def __init__(self) -> None:
        self._store = VersionStore()
        self._digests: dict[int, str] = {}
        self._worker: Worker | None = None
        self._threads: int | None = None

    def build(
        self,
        config: Mapping[str, Any],
        frozen: Mapping[str, str],
        threads: int | None,
        kernels: Sequence[tuple[Any, ...]],
    ) -> tuple[int, str]:
        """Load the model of a TrainConfig's values; returns process id and host.

        frozen: the learner's `fixed_parts`. threads: of the CPU. kernels: values of the run's `Choice`s so far.
        Raises ConfigError where weights differ, BackendUnavailableError where a chosen kernel cannot serve here.
        """
        options = TrainConfig(**config)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        registry.set_default_backend(options.kernels)
        registry.begin_run((registry.Choice(*values) for values in kernels), exact=bool(options.exact))
        keep_freed_memory()
        self._threads = threads
        self._use_threads()
        model = build_generator_model(options).eval()
        serialize.require_same_parts(serialize.fixed_parts(model), frozen)
        self._device = model.role_backbone(BEHAVIOUR).device

        score = FrozenRoles(model, options, past=BEHAVIOUR, reward="reward" in model.roles)
        self._worker = Worker(model, self._store, EngineOptions.of(options), score=score)
        return os.getpid(), socket.gethostname()

    def hold(self, version: int, digest: str, data: bytes) -> str:
        """Hold a policy, which work items may name from here on; returns the digest of what arrived.

        Raises EngineError for a damaged one.
        """
        self._store.add(serialize.unpack_policy(serialize.Parcel(version, digest, data), self._device))
        self._digests[version] = digest
        return digest

    def draw(self, item: Mapping[str, Any], keep: Sequence[int]) -> dict[str, Any]:
        """Answers, the digest of the policy that drew them, and the kernels chosen so far.

        keep: versions that are still needed. Raises EngineError for a policy that never arrived.
        """
        if self._worker is None:
            raise EngineError("generator: expected `build` before `draw`")
        self._use_threads()
        self._store.keep(keep)
        self._digests = {version: digest for version, digest in self._digests.items() if version in keep}
        work = serialize.unpack_item(item)
        rollout = serialize.pack_rollout(self._worker(work))
        kernels = [tuple(choice) for choice in registry.choices()]
        return {"rollout": rollout, "digest": self._digests[work.version], "kernels": kernels}

    def beat(self) -> float:
        """Seconds since it was last seen at work."""
        return time.monotonic() - self._worker.beat if self._worker is not None else 0.0

    def _use_threads(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # this thread's own
