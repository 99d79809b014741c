"""Options of the algorithm that trains the policy; names as in TRL where TRL has the option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlhf_engine.config.parser import Options, option
from rlhf_engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AlgorithmFacts:
    """Facts about an algorithm for options and loops. They import no torch."""

    summary: str  # line for --help
    reads: tuple[str, ...]
    """Options that it reads, of those that not every algorithm reads. Set with another one, they are refused."""
    generations: int = 4  # default of `num_generations`, a greedy answer included
    with_greedy: bool = False  # whether one answer to each prompt is greedy: a baseline, and not learned from
    least_drawn: int = 2  # least answers with a reward of a prompt that is learned from; other prompts are left out
    one_unit_per_prompt: bool = False
    """Whether an answer or a pair is chosen for each prompt, so that minibatches are made of prompts."""
    sums_per_answer: bool = False
    """Whether the policy's loss sums over an answer's tokens, so that its gradient grows with the answer's length.

    Clipping such a gradient to a constant norm would bias it.
    """
    maximises_reward: bool = True
    """Whether a sum of the reward and beta times the KL is maximised. Answers can then be weighed by a ratio."""
    has_token_ratio: bool = False  # whether its loss has the ratio of two policies for each token
    whitens: bool = False  # whether `scale_rewards` gives advantages mean 0 and variance 1 over the batch
    answers_together: int = 1  # answers that go through the model together, whatever the micro-batch
    loss_types: tuple[str, ...] = ()  # values of `loss_type`; the first is the default
    repeats: int = 1  # default of `num_mini_batches` and of `num_ppo_epochs`

    @property
    def has_critic(self) -> bool:
        """Whether values are learned."""
        return "vf_coef" in self.reads


_CRITIC = ("vf_coef", "critic_init", "critic_learning_rate")
ALGORITHMS = {
    "best_of_n": AlgorithmFacts(
        summary="best_of_n (learn the best)", reads=(), least_drawn=1, one_unit_per_prompt=True, maximises_reward=False
    ),
    "cispo": AlgorithmFacts(
        summary="cispo (clipped importance weights)",
        reads=("beta", "kl_target", "cliprange", "scale_rewards"),
        has_token_ratio=True,
    ),
    "copg": AlgorithmFacts(
        summary="copg (two answers as each other's baseline, of any policy)",
        reads=("beta",),
        generations=2,
        one_unit_per_prompt=True,
        sums_per_answer=True,
        maximises_reward=False,
        answers_together=2,
    ),
    "grpo": AlgorithmFacts(
        summary="grpo",
        reads=("beta", "kl_target", "cliprange", "delta", "scale_rewards", "loss_type", "advantage_level"),
        has_token_ratio=True,
        loss_types=("grpo", "dapo", "dr_grpo"),
    ),
    "online_dpo": AlgorithmFacts(
        summary="online_dpo (best against worst)",
        reads=("beta", "loss_type"),
        one_unit_per_prompt=True,
        maximises_reward=False,
        answers_together=2,
        loss_types=("sigmoid", "ipo"),
    ),
    "ppo": AlgorithmFacts(
        summary="ppo",
        reads=(
            *("beta", "kl_target", "gamma", "lam", "kl_estimator", "cliprange", "delta", "cliprange_value"),
            *("scale_rewards", *_CRITIC),
        ),
        generations=1,
        least_drawn=1,
        has_token_ratio=True,
        whitens=True,
        repeats=4,
    ),
    "reinforce": AlgorithmFacts(
        summary="reinforce: with a learned value baseline (PERL)",
        reads=("beta", "gamma", "kl_estimator", *_CRITIC),
        generations=1,
        least_drawn=1,
        sums_per_answer=True,
    ),
    "remax": AlgorithmFacts(
        summary="remax (greedy answer as baseline)",
        reads=("beta", "kl_target", "gamma", "kl_estimator", "kl_in", "advantage_clip", "loss_type"),
        loss_types=("sum", "own_length"),
        generations=2,
        with_greedy=True,
        least_drawn=1,
        sums_per_answer=True,
    ),
    "rloo": AlgorithmFacts(
        summary="rloo (the other answers to the prompt)",
        reads=("beta", "kl_target", "kl_estimator", "cliprange", "loss_type", "advantage_level"),
        sums_per_answer=True,
        loss_types=("proximal", "vanilla"),
    ),
}
"""Facts by the name of the algorithm's module, in alphabetical order."""
if TYPE_CHECKING:
    Algorithm = str
else:
    Algorithm = Literal[tuple(ALGORITHMS)]
_READERS = {
    option_name: tuple(name for name, facts in ALGORITHMS.items() if option_name in facts.reads)
    for option_name in dict.fromkeys(name for facts in ALGORITHMS.values() for name in facts.reads)
}
"""Algorithms that read an option, of those that not every algorithm reads."""


class AlgorithmOptions(Options):
    """Options of the algorithm: the answers that the policy learns from, and the objective."""

    algorithm: Algorithm = option(
        "ppo",
        "; ".join(facts.summary for facts in ALGORITHMS.values() if facts.has_critic)
        + "; without a critic: "
        + ", ".join(facts.summary for facts in ALGORITHMS.values() if not facts.has_critic),
    )
    num_generations: int | None = option(
        None,
        "answers per prompt; none: 1 for ppo and reinforce, 2 for remax (the greedy one counts), 4 for others",
        ge=1,
    )
    beta: float = option(
        0.05,
        "KL coefficient: of -beta * KL in a token's reward, for grpo (and kl_in loss) of a term of the loss; "
        "reinforce: the reward counts 1-beta; online_dpo: temperature of its loss",
        ge=0,
    )
    kl_target: float | None = option(
        None, "KL to the reference, nats per answer, that beta is adapted to after each step; none: beta stays", gt=0
    )
    kl_estimator: Literal["k1", "k3", "exact"] = option(
        "k1", "estimate of the KL in the reward, per token; k3 and exact are biased there, and the KL ends higher"
    )
    gamma: float = option(1.0, "discount factor of the return", ge=0, le=1)
    lam: float = option(0.95, "lambda of generalised advantage estimation", ge=0, le=1)
    cliprange: list[float] = option(
        [0.2], "the policy ratio is clipped to 1 ± this; of two numbers to 1 - the first and 1 + the second"
    )
    delta: float | None = option(
        None, "largest ratio that a token of negative advantage counts with; none: any (dual clip)", gt=1
    )
    cliprange_value: float | None = option(
        0.2, "values are clipped to old value ± cliprange_value; none: no clipping", gt=0
    )
    vf_coef: float = option(0.1, "weight of the value loss", ge=0)
    entropy_coef: float = option(
        0.0,
        "weight of the entropy bonus, a mean per token, for grpo weighed as its loss; the loss of remax, rloo and "
        "reinforce is a sum per answer",
        ge=0,
    )
    loss_type: str | None = option(
        None,
        "; ".join(f"{name}: {', '.join(facts.loss_types)}" for name, facts in ALGORITHMS.items() if facts.loss_types)
        + "; none: the first of them",
    )
    scale_rewards: Literal["group", "none"] = option(
        "group",
        "group: grpo and cispo divide advantages by the standard deviation of the prompt's scores; ppo gives them mean "
        "0 and variance 1 over the batch",
    )
    kl_in: Literal["to_go", "local", "loss"] = option(
        "to_go", "remax: a token answers for its KL and that of all after it, or its own alone, or the loss has a term"
    )
    advantage_clip: float | None = option(
        None, "remax: largest difference, up or down, to the greedy answer's score; none: any", gt=0
    )

    advantage_level: Literal["trajectory", "turn"] = option(
        "trajectory",
        "of conversations: all tokens have the advantage of the whole score, or those of a turn that of what is earned "
        "from it on (grpo, vanilla rloo)",
    )
    generation_batch_size: int = option(64, "answers per step, of all prompts", ge=1)
    num_mini_batches: int | None = option(
        None,
        "optimizer steps per epoch over the batch; none: 4 for ppo, 1 for the others: remax, reinforce and vanilla "
        "rloo have no ratio that would correct the steps after the first",
        ge=1,
    )
    num_ppo_epochs: int | None = option(
        None, "epochs over each batch; none: 4 for ppo, 1 for the others, for the same reason", ge=1
    )
    per_device_train_batch_size: int | None = option(
        None,
        "sequences per forward and backward; gradients add up; none: 16, or where max_tokens_per_micro_batch is none, "
        "too, on a GPU from the second step on as many as free memory allows",
        ge=1,
    )

    @property
    def facts(self) -> AlgorithmFacts:
        """Facts about the algorithm for options and loops."""
        return ALGORITHMS[self.algorithm]

    @property
    def has_critic(self) -> bool:
        """Whether values are learned."""
        return self.facts.has_critic

    @property
    def generations(self) -> int:
        """Answers per prompt, a greedy one included."""
        return self.num_generations or self.facts.generations

    @property
    def drawn(self) -> int:
        """Drawn answers per prompt, those that may be learned from."""
        return self.generations - self.facts.with_greedy

    @property
    def clip_low(self) -> float:
        """The ratio is clipped to at least 1 - this."""
        return self.cliprange[0]

    @property
    def clip_high(self) -> float:
        """The ratio is clipped to at most 1 + this."""
        return self.cliprange[-1]

    @property
    def whitens_advantages(self) -> bool:
        """Whether advantages get mean 0 and variance 1 over the tokens of a rollout."""
        return self.scale_rewards == "group" and self.facts.whitens

    @property
    def has_ratio(self) -> bool:
        """Whether the loss has the ratio to the policy that drew, by which answers serve more than one update."""
        return self.facts.has_token_ratio or self.chosen_loss_type == "proximal"

    @property
    def reward_weight(self) -> float | None:
        """Weight of the score in the sum with beta times the KL; None where no such sum is maximised."""
        if not self.facts.maximises_reward:
            return None
        return 1 - self.beta if self.algorithm == "reinforce" else 1.0

    @property
    def prompts_per_step(self) -> int:
        """Prompts of a step."""
        return self.generation_batch_size // self.generations

    @property
    def units_per_step(self) -> int:
        """Number of units for minibatches: drawn answers, or prompts where an answer or a pair is chosen for each."""
        return self.prompts_per_step * (1 if self.facts.one_unit_per_prompt else self.drawn)

    @property
    def mini_batches(self) -> int:
        """Optimizer steps per epoch."""
        return self.num_mini_batches or self.facts.repeats

    @property
    def epochs(self) -> int:
        """Epochs over each batch."""
        return self.num_ppo_epochs or self.facts.repeats

    @property
    def chosen_loss_type(self) -> str:
        """`loss_type`, or the algorithm's first; empty where it has none."""
        return self.loss_type or (*self.facts.loss_types, "")[0]

    def check_algorithm(self) -> None:
        """Raise ConfigError for options that contradict the algorithm, or that are set and not read."""
        name = self.algorithm
        least = min(2, self.facts.generations)
        self.require("num_generations", self.generations >= least, f"at least {least} for {name}")
        is_multiple = self.generation_batch_size % self.generations == 0
        self.require("generation_batch_size", is_multiple, f"a multiple of num_generations ({self.generations})")
        if self.units_per_step % self.mini_batches:
            of = "" if self.units_per_step == self.generation_batch_size else f", {self.units_per_step} to learn from"
            raise ConfigError(
                f"generation_batch_size: expected a multiple of num_mini_batches ({self.mini_batches}), "
                f"got {self.generation_batch_size}{of}"
            )
        known = self.facts.loss_types
        is_known = self.loss_type is None or not known or self.loss_type in known
        self.require("loss_type", is_known, f"one of {', '.join(known)} for {name}")
        why = "at most 1 for reinforce, which maximises (1-beta) reward - beta KL"
        self.require("beta", name != "reinforce" or self.beta <= 1, why)
        why = "more than 0 for online_dpo, which divides or multiplies by it"
        self.require("beta", name != "online_dpo" or self.beta > 0, why)
        why = "more than 0 with kl_target, by whose error it is multiplied"
        self.require("beta", self.kl_target is None or self.beta > 0, why)
        is_range = 1 <= len(self.cliprange) <= 2 and min(self.cliprange) > 0
        self.require("cliprange", is_range, "one or two numbers > 0")
        self.require("cliprange", name != "cispo" or len(self.cliprange) == 1, "one number for cispo, its upper clip")
        is_above = self.delta is None or self.delta >= 1 + self.clip_high
        self.require("delta", is_above, f"at least 1 + {self.clip_high:g}, the upper clip")
        is_plain = self.advantage_level == "trajectory" or self.chosen_loss_type != "proximal"
        self.require("advantage_level", is_plain, "trajectory for proximal rloo, whose ratio is of the whole answer")
        readers = {option_name: (name in known, known) for option_name, known in _READERS.items()}
        if self.chosen_loss_type == "vanilla":
            readers["cliprange"] = (False, tuple(x if x != name else "proximal rloo" for x in _READERS["cliprange"]))
        if self.kl_in == "loss":
            readers["kl_estimator"] = (False, ("ppo", "remax with another kl_in", "rloo", "reinforce"))
        for option_name, (is_read, algorithms) in readers.items():
            if not is_read:
                theirs = f"{', '.join(algorithms)}; a file may have it in a section of theirs"
                self.require_unset([option_name], f"for {name}, which does not read it ({theirs})")
