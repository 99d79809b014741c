"""Options of when answers are drawn beside the updates, by which policy, and what is done about its age."""

# ruff: noqa: RUF009 - `option` returns dataclasses.field(...), which ruff cannot see

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal

from rlhf_engine.config.algorithm import ALGORITHMS
from rlhf_engine.config.parser import Options, option
from rlhf_engine.errors import ConfigError

AsyncMode = Literal["off", "replay", "overlap", "ray"]
Correction = Literal["none", "behaviour", "decoupled", "token_truncate", "sequence_truncate"]


@dataclass(frozen=True, kw_only=True)
class AsyncOptions(Options):
    """Options of asynchronous rollouts: where answers are drawn, and how far they may be behind the policy."""

    async_mode: AsyncMode = option(
        "off",
        "overlap: draw the answers of later steps while this one is learned, on the same base; ray: by processes "
        "that hold the base as well, on Ray; replay: the same answers one after the other; off: every step draws its "
        "own",
        alias="async",
    )
    max_staleness: int = option(
        1, "async: updates that the policy which drew an answer may lack when it is learned from", ge=0
    )
    async_policy: Literal["fixed", "newest", "in_flight"] = option(
        "fixed",
        "overlap, ray: answers are drawn by the policy of exactly max_staleness steps before, so that runs can be "
        "repeated; by the newest one there is when a batch begins; or (overlap) go on with each newer one from the "
        "next token",
    )
    async_timeout: float = option(
        600.0, "overlap, ray: seconds without a token after which a generator is given up", gt=0
    )
    generator_threads: int | None = option(
        None,
        "overlap, ray on a CPU: threads of each generator, on one machine the learner has the others; none: half of "
        "them for all generators together",
        ge=1,
    )
    ray_generators: int = option(1, "ray: generators, each a process that holds the base", ge=1)
    ray_address: str | None = option(None, "ray: address of the cluster's head, host:port; none: start Ray here")
    ray_gpus_per_generator: float | None = option(
        None, "ray: GPUs of each generator, or the part of one that it may use; none: 1, or 0 where device is cpu", gt=0
    )
    ray_restarts: int = option(3, "ray: times in a run that a lost generator is replaced", ge=0)
    batches_per_policy: int = option(
        1, "draw the answers of so many steps by the policy before the first of them (off-policy study)", ge=1
    )
    off_policy_correction: Correction | None = option(
        None,
        "for answers of an older policy. behaviour: ratios are to the policy that drew them; decoupled: to the present "
        "one, and advantages weighted by present over drawing policy; token_truncate, sequence_truncate: the same with "
        "weights truncated; none. Default: behaviour where the loss has a ratio, else token_truncate; copg, "
        "online_dpo and best_of_n need none",
    )
    off_policy_clip_max: float = option(2.0, "largest weight with token_truncate and sequence_truncate", ge=1)

    @property
    def is_async(self) -> bool:
        """Whether answers are drawn by a copy of the policy, which may be older than what learns."""
        return self.async_mode != "off" or self.batches_per_policy > 1

    def corrections(self, algorithm: str, loss_type: str) -> tuple[Correction, ...]:
        """Corrections that an algorithm's loss can make for answers of an older policy.

        Args:
            algorithm: name of the algorithm.
            loss_type: its kind of loss; empty where it has none.

        Returns:
            Values of `off_policy_correction`; the first is the default.

        Raises:
            KeyError: an unknown algorithm.
        """
        facts = ALGORITHMS[algorithm]
        if not facts.maximises_reward:
            return ("none",)
        if facts.has_token_ratio:
            return ("behaviour", "decoupled", "token_truncate", "sequence_truncate", "none")
        if loss_type == "proximal":  # one ratio per answer, and so one weight
            return ("behaviour", "sequence_truncate", "none")
        return ("token_truncate", "sequence_truncate", "none")

    def check_async(self, *, algorithm: str, loss_type: str, method: str, rollout_backend: str) -> None:
        """Check that the options fit each other and the rest of the request.

        Args:
            algorithm: name of the algorithm.
            loss_type: its kind of loss; empty where it has none.
            method: name of the method.
            rollout_backend: `local` or `vllm`.

        Raises:
            ConfigError: options that contradict each other, or that are set and not read.
        """
        if self.async_mode != "off":
            if self.max_staleness == 0:
                raise ConfigError(
                    f"max_staleness: expected at least 1 with async {self.async_mode!r}, where a batch is drawn "
                    "before the updates on the one before it are done, got 0"
                )
            if self.batches_per_policy > 1:
                raise ConfigError(
                    f"batches_per_policy: expected 1 with async {self.async_mode!r}, got {self.batches_per_policy}"
                )
        unread: dict[str, tuple[str, ...]] = {name: ("overlap", "ray") for name in ("async_policy", "async_timeout")}
        unread |= dict.fromkeys(("max_staleness", "generator_threads"), ("overlap", "replay", "ray"))
        unread |= dict.fromkeys(("ray_generators", "ray_address", "ray_gpus_per_generator", "ray_restarts"), ("ray",))
        for name, modes in unread.items():
            value, default = getattr(self, name), _DEFAULTS[name]
            if self.async_mode not in modes and value != default:
                raise ConfigError(f"{name}: expected it unset without async {' or '.join(modes)}, got {value!r}")
        if self.async_mode == "ray":
            self._check_ray()
        if not self.is_async:
            for name in ("off_policy_correction", "off_policy_clip_max"):
                if getattr(self, name) != _DEFAULTS[name]:
                    raise ConfigError(
                        f"{name}: expected it unset where every step draws its own answers (async, "
                        f"batches_per_policy), got {getattr(self, name)!r}"
                    )
            return
        needed = "async" if self.async_mode != "off" else "batches_per_policy"
        if method == "full_ppo":
            raise ConfigError(
                f"{needed}: expected an actor on an adapter slot, of which copies are small, got method 'full_ppo'"
            )
        if rollout_backend != "local" and self.async_mode == "ray":
            raise ConfigError(
                f"rollout_backend: expected 'local' with async 'ray', whose generators draw by themselves, got "
                f"{rollout_backend!r}"
            )
        if rollout_backend != "local" and self.async_policy == "in_flight":
            raise ConfigError(
                "async_policy: expected 'fixed' or 'newest' with rollout_backend 'vllm', whose answers are of the "
                "policy that they were begun with, got 'in_flight'"
            )
        served = self.corrections(algorithm, loss_type)
        if self.off_policy_correction is not None and self.off_policy_correction not in served:
            raise ConfigError(
                f"off_policy_correction: expected one of {', '.join(served)} for {loss_type and loss_type + ' '}"
                f"{algorithm}, got {self.off_policy_correction!r}"
            )
        chosen = self.off_policy_correction or served[0]
        if not chosen.endswith("truncate") and self.off_policy_clip_max != _DEFAULTS["off_policy_clip_max"]:
            raise ConfigError(
                "off_policy_clip_max: expected it unset without off_policy_correction token_truncate or "
                f"sequence_truncate, got {self.off_policy_clip_max}"
            )

    def _check_ray(self) -> None:
        if self.async_policy == "in_flight":
            raise ConfigError(
                "async_policy: expected 'fixed' or 'newest' with async 'ray', where a policy goes to generators before "
                "they begin, got 'in_flight'"
            )
        gpus = self.ray_gpus_per_generator
        if gpus is not None and gpus > 1 and gpus != int(gpus):
            raise ConfigError(f"ray_gpus_per_generator: expected a part of one GPU or whole ones, got {gpus}")
        if self.ray_address is not None and re.fullmatch(r"[^/\s]+:\d+", self.ray_address) is None:
            raise ConfigError(f"ray_address: expected host:port, got {self.ray_address!r}")


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(AsyncOptions)}
