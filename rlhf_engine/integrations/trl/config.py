"""Options of our trainers behind TRL: GRPOConfig, with what an algorithm reads beside it.

Every option of GRPOConfig stands in one of the three sets of `options`, or among those that some algorithms read. One
that stands nowhere, as of a newer TRL, has to stay at its default.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

from rlhf_engine.config.algorithm import ALGORITHMS, AlgorithmFacts, AlgorithmOptions
from rlhf_engine.errors import ConfigError
from rlhf_engine.integrations.trl.options import ALSO_DEFAULT, HARMLESS, OF_ALGORITHMS, REFUSED, SERVED
from rlhf_engine.integrations.trl.versions import require_trl

require_trl()
from trl import GRPOConfig  # noqa: E402


@dataclass
class HydraConfig(GRPOConfig):
    """GRPOConfig with the options that all of our trainers read beside it. An option that they do not read is refused.

    The options below are GRPOConfig's own, under the same names.

    Args:
        epsilon: ratios are clipped to at least 1 − this, > 0.
        epsilon_high: ratios are clipped to at most 1 + this, > 0; None: `epsilon`.
        delta: largest ratio of a token with negative advantage, at least the upper clip; None: no such bound.
        entropy_coef: coefficient of the mean entropy per token.
    """

    algorithm: str = field(default="ppo", metadata={"help": f"One of {', '.join(ALGORITHMS)}."})
    loss_type: str | None = field(default=None, metadata={"help": "Kind of loss; none: the algorithm's first."})
    scale_rewards: str | None = field(
        default=None, metadata={"help": "For algorithms with groups: group or none; none of both: group."}
    )
    num_generations: int | None = field(default=None, metadata={"help": "Answers per prompt; none: the algorithm's."})
    beta: float = field(default=0.05, metadata={"help": "Coefficient of the KL to the reference."})
    num_iterations: int = field(default=1, metadata={"help": "Epochs over each rollout."})
    kl_estimator: str = field(default="k1", metadata={"help": "Estimate of the KL per token: k1 or k3."})
    gamma: float = field(default=1.0, metadata={"help": "Discount factor of the return."})
    lam: float = field(default=0.95, metadata={"help": "Lambda of generalised advantage estimation."})
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    cliprange_value: float | None = field(
        default=0.2, metadata={"help": "Values are clipped to the old value plus or minus this; none: no clipping."}
    )
    whiten_advantages: bool = field(default=True, metadata={"help": "Advantages with mean 0 and variance 1."})
    critic_learning_rate: float | None = field(
        default=None, metadata={"help": "Of critic and value head; none: as actor."}
    )
    missing_eos_penalty: float | None = field(default=None, metadata={"help": "Subtracted where an answer never ends."})
    reward_clip_range: tuple[float, float] | None = field(
        default=None, metadata={"help": "Bounds of an answer's weighted rewards, before any penalty."}
    )
    reward_adapter: str | None = field(
        default=None, metadata={"help": "PEFT folder of a LoRA reward model, for the reward function `reward_model`."}
    )

    use_bias_correction_kl: bool = field(default=False, metadata={"help": "Refused where it is True."})

    hidden_answers: ClassVar[int] = 0
    """Further answers to each prompt that TRL is not shown; a greedy one is not counted."""

    @property
    def facts(self) -> AlgorithmFacts:
        """Facts of the algorithm."""
        return ALGORITHMS[self.algorithm]

    def __post_init__(self) -> None:
        self._require({"algorithm": (self.algorithm in ALGORITHMS, f"one of {', '.join(ALGORITHMS)}")})
        self._require({"algorithm": self._fits_class()})
        of_grpo = {option.name for option in dataclasses.fields(GRPOConfig)} - SERVED - HARMLESS - OF_ALGORITHMS.keys()
        of_others = {name for name, ours in OF_ALGORITHMS.items() if ours not in self.facts.reads}
        self._require(self.unread(*sorted(of_grpo | of_others)))
        self._fill_in()
        try:
            super().__post_init__()
        except ValueError as error:  # the last check but those of vLLM, which are not for here
            if self.num_generations != 1 or "at least 2 generations" not in str(error):
                raise
        self._require(self._ranges())
        self._require(self.checks())

    def _fits_class(self) -> tuple[bool, str]:
        """The check of `algorithm` against the class: one that names an algorithm has no other."""
        if any(
            "algorithm" in vars(cls).get("__annotations__", {}) for cls in type(self).__mro__ if cls is not HydraConfig
        ):
            default = next(option.default for option in dataclasses.fields(self) if option.name == "algorithm")
            return self.algorithm == default, f"{default!r} for {type(self).__name__}; HydraConfig takes others"
        single = self.facts.answers_together == 1
        return single, "an algorithm that learns from single answers; online_dpo has a config of its own"

    def _fill_in(self) -> None:
        """Set what depends on the algorithm."""
        facts = self.facts
        if self.loss_type is None:
            self.loss_type = (*facts.loss_types, self.algorithm)[0]
        if self.scale_rewards is None:
            self.scale_rewards = "group" if "scale_rewards" in facts.reads else "none"
        if self.num_generations is None:
            self.num_generations = 1 if facts.with_greedy else facts.generations

    def algorithm_options(self) -> AlgorithmOptions:
        """Options of the algorithm, under the names that `rlhf-engine train` has.

        Returns:
            The options that the algorithm reads; the others are at their defaults.

        Raises:
            ConfigError: an option out of its range.
        """
        fields = {option.name for option in dataclasses.fields(AlgorithmOptions)}
        names = {ours: name for name, ours in OF_ALGORITHMS.items() if ours in fields}
        read = {ours: getattr(self, name) for ours, name in names.items() if ours in self.facts.reads}
        if self.facts.loss_types:
            read["loss_type"] = self.loss_type
        return AlgorithmOptions(algorithm=self.algorithm, entropy_coef=self.entropy_coef, **read)

    def _require(self, checks: dict[str, tuple[bool, str]]) -> None:
        for name, (fine, expected) in checks.items():
            if not fine:
                raise ConfigError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

    def _ranges(self) -> dict[str, tuple[bool, str]]:
        length, bounds, rate = self.max_completion_length, self.reward_clip_range, self.critic_learning_rate
        kinds = self.facts.loss_types or (self.algorithm,)
        upper = 1 + (self.epsilon_high or self.epsilon)
        return {
            "loss_type": (self.loss_type in kinds, " or ".join(map(repr, kinds))),
            "scale_rewards": (self.scale_rewards in ("group", "none"), "'group' or 'none'"),
            "kl_estimator": (self.kl_estimator in ("k1", "k3"), "'k1' or 'k3'"),
            "max_completion_length": (isinstance(length, int) and length > 0, "an integer > 0"),
            "num_iterations": (self.num_iterations >= 1, "an integer > 0"),
            "temperature": (self.temperature > 0, "a number > 0"),
            "top_k": (self.top_k is None or self.top_k >= -1, "None or an integer >= -1; 0 and -1 mean all tokens"),
            "top_p": (0 < self.top_p <= 1, "a number > 0 and <= 1"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "None or a number from 0 to 1"),
            "beta": (self.beta >= 0, "a number >= 0"),
            "gamma": (0 <= self.gamma <= 1, "a number from 0 to 1"),
            "lam": (0 <= self.lam <= 1, "a number from 0 to 1"),
            "epsilon": (self.epsilon > 0, "a number > 0"),
            "epsilon_high": (self.epsilon_high is None or self.epsilon_high > 0, "None or a number > 0"),
            "delta": (self.delta is None or self.delta >= upper, "None or a number >= 1 + epsilon_high"),
            "vf_coef": (self.vf_coef >= 0, "a number >= 0"),
            "cliprange_value": (self.cliprange_value is None or self.cliprange_value > 0, "None or a number > 0"),
            "critic_learning_rate": (rate is None or rate >= 0, "None or a number >= 0"),
            "reward_clip_range": (bounds is None or _is_range(bounds), "None or two numbers, the lower one first"),
            "missing_eos_penalty": (
                self.missing_eos_penalty is None or self.missing_eos_penalty >= 0,
                "None or a number >= 0, which is subtracted",
            ),
        }

    def checks(self) -> dict[str, tuple[bool, str]]:
        """Checks of the options that depend on each other.

        Returns:
            option → (whether it can be served, what is expected).
        """
        own = "the HydraModel recomputes activations in its own way"
        return {
            "torch_compile": (
                not (self.torch_compile and self.gradient_checkpointing),
                "False with gradient_checkpointing=True, whose recomputation torch.compile does not trace",
            ),
            "gradient_checkpointing_kwargs": (
                self.gradient_checkpointing_kwargs in (None, {}, {"use_reentrant": False}),
                f"None or {{'use_reentrant': False}}: {own}",
            ),
            **self._sizes(),
        }

    def _sizes(self) -> dict[str, tuple[bool, str]]:
        """Answers per prompt and updates per rollout, by what the algorithm can learn from."""
        facts, options = self.facts, self.algorithm_options()
        checks: dict[str, tuple[bool, str]] = {}
        if facts.with_greedy:
            checks["num_generations"] = (self.num_generations == 1, "1")
        elif not facts.has_critic and not self.hidden_answers:
            checks["num_generations"] = ((self.num_generations or 0) >= 2, "at least 2")
        if facts.maximises_reward and not options.has_ratio:
            if options.loss_type == "vanilla":
                checks |= self.unread("epsilon", "epsilon_high")
            why = f"one update per rollout: {self.loss_type} has no ratio that would correct the others"
            once = self.steps_per_generation == self.gradient_accumulation_steps
            checks["num_iterations"] = (self.num_iterations == 1, f"1, {why}")
            checks["steps_per_generation"] = (once, f"gradient_accumulation_steps, {why}")
        return checks

    def unread(self, *names: str) -> dict[str, tuple[bool, str]]:
        """Checks of options that are not read. They have to stay at their defaults.

        Args:
            names: names of options; those that this TRL does not have are skipped.

        Returns:
            option → (whether it is at its default, what is expected and why).
        """
        options = {option.name: option for option in dataclasses.fields(self)}  # not every TRL has each
        checks = {}
        for name in names:
            if name in options:
                default, factory = options[name].default, options[name].default_factory
                if factory is not dataclasses.MISSING:
                    default = factory()
                fine = getattr(self, name) in (default, *ALSO_DEFAULT.get(name, ()))
                why = REFUSED.get(name) or f"{self.algorithm} does not read it"
                checks[name] = (fine, f"{default!r}, because {why}")
        return checks


@dataclass
class HydraPPOConfig(HydraConfig):
    """`HydraConfig` of PPO: one answer per prompt, and a critic. `beta` weighs the KL in a token's reward."""

    algorithm: str = field(default="ppo", metadata={"help": "ppo"})


@dataclass
class HydraReinforceConfig(HydraConfig):
    """`HydraConfig` of REINFORCE with a learned value baseline (PERL).

    `beta`, at most 1, weighs the KL, and 1 − `beta` the reward (arXiv 2403.10704).
    """

    algorithm: str = field(default="reinforce", metadata={"help": "reinforce"})

    def checks(self) -> dict[str, tuple[bool, str]]:
        """Checks of `HydraConfig`, and that `beta` is at most 1. See `HydraConfig.checks`."""
        return {**super().checks(), "beta": (0 <= self.beta <= 1, "a number from 0 to 1")}


@dataclass
class ReMaxConfig(HydraConfig):
    """`HydraConfig` of ReMax: one drawn answer per prompt; the greedy one comes on top and is not counted."""

    algorithm: str = field(default="remax", metadata={"help": "remax"})


@dataclass
class HydraRLOOConfig(HydraConfig):
    """`HydraConfig` of RLOO: several answers per prompt, each the baseline of the others.

    Its `loss_type` is `proximal`, which clips the ratio of a whole answer, or `vanilla`, which does not.
    """

    algorithm: str = field(default="rloo", metadata={"help": "rloo"})
    normalize_advantages: bool = field(
        default=False, metadata={"help": "Advantages of a rollout with mean 0 and deviation 1."}
    )


@dataclass
class HydraGRPOConfig(HydraConfig):
    """`HydraConfig` of GRPO, with GRPOConfig's defaults. `beta` weighs the KL as a term of the loss."""

    algorithm: str = field(default="grpo", metadata={"help": "grpo"})
    loss_type: str | None = field(default="dapo", metadata={"help": "grpo, dapo or dr_grpo."})
    num_generations: int | None = field(default=8, metadata={"help": "Answers per prompt."})
    beta: float = field(default=0.0, metadata={"help": "Coefficient of the KL to the reference."})


@dataclass
class HydraBestOfNConfig(HydraConfig):
    """`HydraConfig` of best-of-N: of `num_generations` answers to a prompt, the best one is learned."""

    algorithm: str = field(default="best_of_n", metadata={"help": "best_of_n"})


@dataclass
class HydraOnlineDPOConfig(HydraConfig):
    """`HydraConfig` of online DPO, whose rows are pairs. `beta` is the temperature of the loss."""

    algorithm: str = field(default="online_dpo", metadata={"help": "online_dpo"})
    beta: float = field(default=0.1, metadata={"help": "Temperature of the loss."})
    num_generations: int | None = field(default=1, metadata={"help": "1: see answers_per_prompt."})
    answers_per_prompt: int = field(default=2, metadata={"help": "Answers of which the best and the worst are taken."})

    hidden_answers = 1

    def checks(self) -> dict[str, tuple[bool, str]]:
        """Checks of `HydraConfig`, and of how many answers are drawn. See `HydraConfig.checks`."""
        return {
            **super().checks(),
            "beta": (self.beta > 0, "a number > 0"),
            "num_generations": (self.num_generations == 1, "1: answers_per_prompt says how many are drawn"),
            "answers_per_prompt": (self.answers_per_prompt >= 2, "at least 2"),
        }


def _is_range(bounds: object) -> bool:
    return isinstance(bounds, (tuple, list)) and len(bounds) == 2 and bounds[0] < bounds[1]
