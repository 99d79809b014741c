"""Options of `rlhf-engine train`: RL by any algorithm and method, Hydra-PPO by default.

Symbols of the objective: β = `beta`, γ = `gamma`, λ = `lam`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rlhf_engine.config.parser import option
from rlhf_engine.config.rollout import AsyncOptions, SamplingOptions
from rlhf_engine.config.run import (
    QUANTIZATION_HELP,
    HeldOutOptions,
    Quantization,
    RewardModelOptions,
    TrainingOptions,
    check_weights,
)
from rlhf_engine.errors import ConfigError

Method = Literal["full_ppo", "lora_ppo", "dynamic_lora_ppo", "j_hydra_ppo", "hydra_ppo"]


class TrainConfig(AsyncOptions, SamplingOptions, RewardModelOptions, HeldOutOptions, TrainingOptions):
    """RL with actor, critic, reference and reward model on one frozen backbone, or on more for comparison."""

    FIRST = ("model_name_or_path", "dataset_name", "reward_funcs", "algorithm", "output_dir")
    EXAMPLE = (
        "rlhf-engine train --model_name_or_path Qwen/Qwen3-0.6B --dataset_name prompts.jsonl "
        "--reward_funcs reward.py:score --output_dir runs/ppo"
    )
    SECTIONS = "algorithm"

    method: Method = option(
        "hydra_ppo",
        "hydra_ppo: critic on an adapter of its own; j_hydra_ppo: on the actor's; dynamic_lora_ppo: on a second "
        "backbone, the reward model's; lora_ppo: four backbones, adapters on two; full_ppo: four, two trained whole",
    )
    actor_adapter: str | None = option(
        None, "PEFT folder the actor starts from, or its name on the Hub; none: a fresh adapter"
    )
    reference_adapter: str | None = option(None, "PEFT folder of the reference; none: the base without an adapter")
    critic_init: Literal["base", "actor", "reward"] = option(
        "base", "start the critic fresh on its backbone, as a copy of the actor's adapter, or as the reward model"
    )
    quantization: Quantization = option("none", QUANTIZATION_HELP)

    reward_funcs: list[str | Callable[..., Any]] = option(
        ["reward_model"],
        "reward sources: reward_model (the learned reward head), environment (its get_reward, always one of them; the "
        "default with an environment), module:function, path/file.py:function, or one that "
        "checks answers: math, code, json_schema, format, length, repetition, with options as in length,most=200",
    )
    reward_weights: list[float] | None = option(None, "one weight per reward source; none: all 1")
    missing_eos_penalty: str | float | None = option(
        None, "subtracted from the score of an answer that never ends; =SCORE, such as =-1: its score, whatever it says"
    )

    environment: str | Callable[..., Any] | None = option(
        None,
        "module:class or path/file.py:class, or a function that makes one: an environment for each answer, with TRL's "
        "reset(**row), public methods as tools, and get_reward(), a further reward source; also get_turn_reward()",
    )
    tools: str | None = option(None, "module or path/file.py whose public functions answers may call")
    max_turns: int = option(8, "turns of an answer with tools; max_completion_length counts their results, too", ge=1)
    tool_timeout: float = option(60.0, "seconds after which a tool's call is given up, and answered as an error", gt=0)

    max_steps: int = option(100, "number of steps (rollout and update)", ge=1)
    num_train_epochs: float | None = option(None, "passes over the prompts, in place of max_steps", gt=0)
    learning_rate: float = option(1e-4, "learning rate of the actor", ge=0)
    critic_learning_rate: float | None = option(None, "learning rate of critic and value head; none: as actor", ge=0)

    dry_run: bool = option(
        False,
        "draw, score and learn from the longest prompts and answers twice, print seconds and peak memory by phase of "
        "the second step, and write nothing",
    )
    eval_steps: int = option(
        0, "evaluate on held-out prompts before the first step and every so many steps; 0: never", ge=0
    )

    @property
    def unfinished(self) -> tuple[float | None, float | None]:
        """Penalty of an answer that never ends, or else its score. ConfigError for what is neither."""
        given = self.missing_eos_penalty
        if given is None:
            return None, None
        try:
            number = float(str(given).removeprefix("="))
        except ValueError:
            number = math.nan
        is_score = str(given).startswith("=")
        if not math.isfinite(number) or (number < 0 and not is_score):
            raise ConfigError(f"missing_eos_penalty: expected a number >= 0, or =SCORE such as =-1, got {given!r}")
        return (None, number) if is_score else (number, None)

    @property
    def largest_grad_norm(self) -> float | None:
        """Norm that a role's gradient is scaled down to; None: never, the default where the loss sums over answers."""
        never = self.max_grad_norm is None and self.facts.sums_per_answer
        return None if never else super().largest_grad_norm

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.environment is not None and self.reward_funcs == ["reward_model"] and self.reward_model_path is None:
            object.__setattr__(self, "reward_funcs", ["environment"])  # unless another is asked for
        check_weights(self.reward_weights, self.reward_funcs)
        self._check_tools()
        if self.unfinished[1] is None:
            object.__setattr__(self, "missing_eos_penalty", self.unfinished[0])
        self.check_prompts_kept()
        why = "false where answers are drawn elsewhere or beside updates (vllm_server_base_url, async)"
        self.require("dry_run", not (self.vllm_servers or self.is_async) or not self.dry_run, why)
        self._check_method()
        self.check_algorithm()
        self._check_server()
        self.check_async()
        if self.num_train_epochs is None:
            self.check_warm_up(self.max_steps)
        is_evaluated = not self.eval_steps or self.eval_dataset_name is not None
        self.require("eval_steps", is_evaluated, "0, or an eval_dataset_name")

    @property
    def converses(self) -> bool:
        """Whether answers are conversations with tools or environments."""
        return self.environment is not None or self.tools is not None

    def _check_tools(self) -> None:
        """Check what conversations with tools need."""
        if not self.converses:
            return self.require_unset(("max_turns", "tool_timeout"), "without environment or tools")
        why = "with environment or tools, between whose turns a server cannot be asked for tokens"
        self.require_unset(["vllm_server_base_url"], why)
        is_named = self.environment is None or isinstance(self.environment, str) or self.async_kind != "ray"
        self.require("environment", is_named, "a name with async ray, whose processes import it themselves")

    def count_steps(self, n_prompts: int) -> int:
        """Count the steps of the whole run.

        Args:
            n_prompts: number of prompts.

        Returns:
            Steps, at least 1.

        Raises:
            ConfigError: a warm-up that is longer.
        """
        if self.num_train_epochs is None:
            return self.max_steps
        steps = max(1, math.ceil(self.num_train_epochs * n_prompts / self.prompts_per_step))
        self.check_warm_up(steps)
        return steps

    def _check_method(self) -> None:
        """Check what a method needs and what it cannot do, before any weights are read."""
        if "reward_model" not in self.reward_funcs:
            self.require_unset(["reward_model_path"], "without 'reward_model' among reward_funcs")
            why = "another than dynamic_lora_ppo, whose second backbone is the reward model's, without 'reward_model'"
            self.require("method", self.method != "dynamic_lora_ppo", f"{why} among reward_funcs")
            self.require(
                "critic_init", self.critic_init != "reward", "another start without 'reward_model' among reward_funcs"
            )
        if self.shard_base:
            self.require_unset(["quantization"], "with shard_base, which cannot share quantised tensors")
        if self.shard_base and self.async_kind == "overlap" and not self.vllm_servers:
            raise ConfigError(
                "async: expected 'off', 'replay' or 'ray' with shard_base, of which drawing and learning gather the "
                "blocks in turn, or a vllm_server_base_url, got 'overlap'"
            )
        if self.method == "full_ppo":
            if self.is_async:
                raise ConfigError(
                    "async: expected an actor on an adapter slot, of which copies are small, got method 'full_ppo'"
                )
            if self.vllm_servers:
                why = "whose actor is a whole backbone, where only adapters are sent elsewhere"
                self.require_unset(["vllm_server_base_url"], f"for full_ppo, {why}")
            names = ("quantization", "actor_adapter", "reference_adapter")
            self.require_unset(names, "for full_ppo, which trains whole backbones from the base on")
        if self.critic_init == "reward":
            self._check_start_as_reward()
        if self.method == "dynamic_lora_ppo":
            why = "'base' or 'reward' for dynamic_lora_ppo, whose critic has another backbone than the actor"
            self.require("critic_init", self.critic_init != "actor", why)

    def _check_server(self) -> None:
        """Whether the algorithm can learn from a server's answers as configured."""
        if not self.vllm_servers:
            return
        why = "whose server does not report the words that a token was drawn among"
        self.require_unset(("top_k", "top_p", "min_p"), f"with vllm_server_base_url, {why}")
        why = "whose server reports the log-probs of greedy tokens at that temperature alone"
        is_one = self.temperature == 1 or not self.facts.with_greedy
        self.require("temperature", is_one, f"1 for {self.algorithm} with vllm_server_base_url, {why}")

    def _check_start_as_reward(self) -> None:
        """Check that the critic's hidden states are the reward model's where the critic has no slot of its own."""
        start = self.actor_adapter or self.reference_adapter  # of the actor's slot, which J-Hydra's critic reads
        adapter = self.reward_adapter
        apart = {
            "full_ppo": adapter is not None,
            "j_hydra_ppo": (start and Path(start).resolve()) != (adapter and Path(adapter).resolve()),
        }
        if apart.get(self.method, False):
            raise ConfigError(
                f"critic_init: expected 'base' for {self.method} here, whose critic has no slot of its own and starts "
                f"on {start or 'the base'!r}, where the reward head reads {adapter or 'the base'!r}; got "
                "'reward'"
            )
