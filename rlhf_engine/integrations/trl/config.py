"""Configuration that all of our trainers behind TRL share: GRPOConfig, where what is not read is refused.

Every option of GRPOConfig stands in one of the three sets of `options`. One that stands in none, as of a newer TRL, has
to stay at its default.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

from rlhf_engine.errors import ConfigError
from rlhf_engine.integrations.trl.options import ALSO_DEFAULT, HARMLESS, REFUSED, SERVED
from rlhf_engine.integrations.trl.versions import require_trl

require_trl()
from trl import GRPOConfig  # noqa: E402


@dataclass
class HydraConfig(GRPOConfig):
    """GRPOConfig with what all of our trainers read beside it. What they do not read is refused, not ignored."""

    scale_rewards: str = field(default="none", metadata={"help": "none: advantages are not those of groups."})
    num_generations: int | None = field(default=1, metadata={"help": "Answers per prompt."})
    beta: float = field(default=0.05, metadata={"help": "Coefficient of the KL to the reference."})
    num_iterations: int = field(default=1, metadata={"help": "Epochs over each rollout."})
    kl_estimator: str = field(default="k1", metadata={"help": "Estimate of the KL per token: k1 or k3."})
    missing_eos_penalty: float | None = field(default=None, metadata={"help": "Subtracted where an answer never ends."})
    reward_clip_range: tuple[float, float] | None = field(
        default=None, metadata={"help": "Bounds of an answer's weighted rewards, before any penalty."}
    )
    reward_adapter: str | None = field(
        default=None, metadata={"help": "PEFT folder of a LoRA reward model, for the reward function `reward_model`."}
    )

    reads: ClassVar[tuple[str, ...]] = ()
    """Options of REFUSED that this class does read."""

    def __post_init__(self) -> None:
        listed = {option.name for option in dataclasses.fields(GRPOConfig)} - SERVED - HARMLESS - set(self.reads)
        self._require(self.unread(*sorted(listed)))
        try:
            super().__post_init__()
        except ValueError as error:  # the last check but those of vLLM, which are not for here
            if self.num_generations != 1 or "at least 2 generations" not in str(error):
                raise
        self._require({**self._ranges(), **self.checks()})

    def _require(self, checks: dict[str, tuple[bool, str]]) -> None:
        for name, (fine, expected) in checks.items():
            if not fine:
                raise ConfigError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

    def _ranges(self) -> dict[str, tuple[bool, str]]:
        length, bounds = self.max_completion_length, self.reward_clip_range
        return {
            "max_completion_length": (isinstance(length, int) and length > 0, "an integer > 0"),
            "num_iterations": (self.num_iterations >= 1, "an integer > 0"),
            "temperature": (self.temperature > 0, "a number > 0"),
            "beta": (self.beta >= 0, "a number >= 0"),
            "epsilon": (self.epsilon > 0, "a number > 0"),
            "epsilon_high": (self.epsilon_high is None or self.epsilon_high > 0, "None or a number > 0"),
            "reward_clip_range": (bounds is None or _is_range(bounds), "None or two numbers, the lower one first"),
            "missing_eos_penalty": (
                self.missing_eos_penalty is None or self.missing_eos_penalty >= 0,
                "None or a number >= 0, which is subtracted",
            ),
        }

    def checks(self) -> dict[str, tuple[bool, str]]:
        """option → (whether it can be served, what is expected)"""
        own = "the HydraModel recomputes activations in its own way"
        return {
            "kl_estimator": (self.kl_estimator in ("k1", "k3"), "'k1' or 'k3'"),
            "torch_compile": (
                not (self.torch_compile and self.gradient_checkpointing),
                "False with gradient_checkpointing=True, whose recomputation torch.compile does not trace",
            ),
            "gradient_checkpointing_kwargs": (
                self.gradient_checkpointing_kwargs in (None, {}, {"use_reentrant": False}),
                f"None or {{'use_reentrant': False}}: {own}",
            ),
        }

    def unread(self, *names: str) -> dict[str, tuple[bool, str]]:
        """`checks` of options that are not read, which have to stay at their defaults."""
        options = {option.name: option for option in dataclasses.fields(self)}  # not every TRL has each
        found = {}
        for name in names:
            if name in options:
                default, factory = options[name].default, options[name].default_factory
                if factory is not dataclasses.MISSING:
                    default = factory()
                fine = getattr(self, name) in (default, *ALSO_DEFAULT.get(name, ()))
                why = REFUSED.get(name) or f"{type(self).__name__} does not read it"
                found[name] = (fine, f"{default!r}, because {why}")
        return found


def _is_range(bounds: object) -> bool:
    return isinstance(bounds, (tuple, list)) and len(bounds) == 2 and bounds[0] < bounds[1]
