"""What all of our trainers behind TRL can be configured by: GRPOConfig, less what they do not read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from rlhf_engine.errors import ConfigError
from rlhf_engine.integrations.trl.versions import require_trl

require_trl()
from trl import GRPOConfig  # noqa: E402

_NOT_READ = (
    "cache_implementation",
    "cast_lm_head_to_fp32",
    "delta",
    "entropy_coef",
    "generation_kwargs",
    "label_smoothing_factor",
    "multi_objective_aggregation",
    "neftune_noise_alpha",
    "off_policy_mask_threshold",
    "repetition_penalty",
    "router_aux_loss_coef",
    "scale_rewards",
    "sync_ref_model",
    "top_entropy_quantile",
    "use_adaptive_entropy",
    "use_bias_correction_kl",
    "use_liger_kernel",
    "use_transformers_continuous_batching",
)
"""Options of GRPOConfig that none of our trainers reads."""


@dataclass
class HydraConfig(GRPOConfig):
    """GRPOConfig with what all of our trainers read beside it. What they do not read is refused, not ignored."""

    scale_rewards: str = field(default="none", metadata={"help": "none: advantages are not those of groups."})
    num_generations: int | None = field(default=1, metadata={"help": "Answers per prompt."})
    beta: float = field(default=0.05, metadata={"help": "Coefficient of the KL to the reference."})
    num_iterations: int = field(default=1, metadata={"help": "Epochs over each rollout."})
    kl_estimator: str = field(default="k1", metadata={"help": "Estimate of the KL per token: k1 or k3."})
    missing_eos_penalty: float | None = field(default=None, metadata={"help": "Subtracted where an answer never ends."})
    reward_adapter: str | None = field(
        default=None, metadata={"help": "PEFT folder of a LoRA reward model, for the reward function `lane`."}
    )

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:  # the last check but those of vLLM, which are not for here
            if self.num_generations != 1 or "at least 2 generations" not in str(error):
                raise
        for name, (fine, expected) in {**self._ranges(), **self.checks()}.items():
            if not fine:
                raise ConfigError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

    def _ranges(self) -> dict[str, tuple[bool, str]]:
        length = self.max_completion_length
        return {
            "max_completion_length": (isinstance(length, int) and length > 0, "an integer > 0"),
            "num_iterations": (self.num_iterations >= 1, "an integer > 0"),
            "temperature": (self.temperature > 0, "a number > 0"),
            "beta": (self.beta >= 0, "a number >= 0"),
            "epsilon": (self.epsilon > 0, "a number > 0"),
            "epsilon_high": (self.epsilon_high is None or self.epsilon_high > 0, "None or a number > 0"),
            "missing_eos_penalty": (
                self.missing_eos_penalty is None or self.missing_eos_penalty >= 0,
                "None or a number >= 0, which is subtracted",
            ),
        }

    def checks(self) -> dict[str, tuple[bool, str]]:
        """option → (whether it can be served, what is expected)"""
        whole = "ratios are to the whole distribution"
        return {
            "kl_estimator": (self.kl_estimator in ("k1", "k3"), "'k1' or 'k3'"),
            "use_vllm": (not self.use_vllm, "False: answers come from the rollout engine"),
            "top_p": (self.top_p == 1.0, f"1.0: {whole}"),
            "top_k": (not self.top_k or self.top_k < 0, f"0: {whole}"),
            "min_p": (self.min_p is None, f"None: {whole}"),
            "importance_sampling_level": (self.importance_sampling_level == "token", "'token'"),
            **self.unread(*_NOT_READ),
        }

    def unread(self, *names: str) -> dict[str, tuple[bool, str]]:
        """`checks` of options that are not read, which have to stay at their defaults."""
        default = {option.name: option.default for option in dataclasses.fields(self)}  # not every TRL has each
        return {
            name: (
                getattr(self, name) == default[name],
                f"{default[name]!r}, because {type(self).__name__} does not read it",
            )
            for name in names
            if name in default
        }
