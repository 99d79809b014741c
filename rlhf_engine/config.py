"""Every option of every command, as flat frozen dataclasses; names as in TRL where TRL has the option.

    TrainConfig     rlhf-engine train      RL by any algorithm and method, Hydra-PPO by default
    SFTConfig       rlhf-engine sft        joint language-model and reward training
    RewardConfig    rlhf-engine reward     a reward model on an adapter slot and a head, or whole
    GenerateConfig  rlhf-engine generate   answers of a model with or without an adapter
    DemoConfig      rlhf-engine demo       everything on a small built-in task
    BenchConfig     rlhf-engine bench      how fast, how large, how exact the kernels are
    PlanConfig      rlhf-engine plan       how much memory PPO will take, before anything is downloaded

Symbols of the objective: β = `beta`, γ = `gamma`, λ = `lam`.
`parse_config(cls, argv)` reads flags and `--config`.
"""

# ruff: noqa: RUF009 - `option` and `required` return dataclasses.field(...), which ruff cannot see

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhf_engine.config_algorithm import Algorithm, AlgorithmOptions
from rlhf_engine.config_async import AsyncOptions, Correction
from rlhf_engine.config_base import (
    LARGEST_RANK,
    OPTIM_HELP,
    Dtype,
    Kernels,
    ModelOptions,
    Optim,
    RunOptions,
    SupervisedOptions,
    TrainingOptions,
    check_device,
    not_empty,
)
from rlhf_engine.config_data import SOURCES, SUFFIXES, RowOptions
from rlhf_engine.config_parser import Options, option, parse_config, parse_size, required
from rlhf_engine.config_reward import RewardConfig
from rlhf_engine.config_rollout import EngineConfig, RolloutOptions
from rlhf_engine.errors import ConfigError

__all__ = [
    "BenchConfig",
    "DemoConfig",
    "GenerateConfig",
    "Kernels",
    "PlanConfig",
    "RewardConfig",
    "SFTConfig",
    "TrainConfig",
    "parse_config",
    "parse_size",
]

Method = Literal["full_ppo", "lora_ppo", "dynamic_lora_ppo", "j_hydra_ppo", "hydra_ppo"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(AlgorithmOptions, AsyncOptions, RolloutOptions, TrainingOptions):
    """RL with actor, critic, reference and reward model on one frozen backbone, or on more for comparison."""

    method: Method = option(
        "hydra_ppo",
        "hydra_ppo: critic on an adapter of its own; j_hydra_ppo: on the actor's; dynamic_lora_ppo: on a second "
        "backbone, the reward model's; lora_ppo: four backbones, adapters on two; full_ppo: four, two trained whole",
    )
    actor_adapter: str | None = option(None, "PEFT folder the actor starts from; none: a fresh adapter")
    reference_adapter: str | None = option(None, "PEFT folder of the reference; none: the base without an adapter")
    reward_adapter: str | None = option(None, "PEFT folder of a LoRA reward model; none: the base's own reward head")
    reward_model_path: str | None = option(
        None,
        "folder of a whole reward model (AutoModelForSequenceClassification); on the base's weights it costs a head",
    )
    critic_init: Literal["base", "actor", "reward"] = option(
        "base", "start the critic fresh on its backbone, as a copy of the actor's adapter, or as the reward model"
    )
    load_in_8bit: bool = option(False, "frozen backbones in 8 bits through bitsandbytes")
    load_in_4bit: bool = option(False, "frozen backbones in 4 bits (nf4) through bitsandbytes")

    eval_dataset_name: str | None = option(None, "held-out prompts, from what dataset_name may be")
    dataset_limit: int | None = option(None, "use only the first so many rows of the training data", ge=1)
    max_prompt_length: int | None = option(None, "longest prompt in tokens, for truncation; none: any", ge=1)
    max_completion_length: int = option(64, "most tokens generated per prompt", ge=1)
    temperature: float = option(1.0, "sampling temperature, in rollouts and in log-probs alike", gt=0)

    reward_funcs: list[str] = option(
        ["lane"], "reward sources: lane (the learned reward head), module:function or path/file.py:function"
    )
    reward_weights: list[float] | None = option(None, "one weight per reward source; none: all 1")
    reward_timeout: float | None = option(
        1800.0, "seconds after which a call of a reward function is given up; none: never", gt=0
    )
    missing_eos_penalty: float | None = option(None, "subtracted from the score of an answer that never ends", ge=0)
    missing_eos_score: float | None = option(None, "the score of an answer that never ends, in place of its own")

    max_steps: int = option(100, "number of steps (rollout and update)", ge=1)
    learning_rate: float = option(1e-4, "learning rate of the actor", ge=0)
    critic_learning_rate: float | None = option(None, "learning rate of critic and value head; none: as actor", ge=0)
    critic_warmup_steps: int = option(0, "first steps in which only critic and value head train", ge=0)
    max_grad_norm: float | None = option(
        None,
        "a role's gradient is scaled down to this norm where it is greater; 0: never; none: 1, but never for remax, "
        "rloo and reinforce, whose gradients are sums per answer, unbiased as they are",
        ge=0,
    )
    token_budget: int | None = option(
        None, "most tokens of all lanes together in one traversal of the trunk; none: by device and model", ge=1
    )

    eval_steps: int = option(0, "evaluate on held-out prompts every so many steps; 0: never", ge=0)
    num_samples: int = option(4, "prompts whose answers go into the report", ge=0)
    ddp_timeout: float = option(
        1800.0, "several processes: seconds that one waits for the others before it gives the run up", gt=0
    )

    shard_base: bool = option(
        False, "several processes: each holds a share of every frozen backbone (FSDP2), and all of it to draw and score"
    )

    @property
    def largest_grad_norm(self) -> float | None:
        never = self.max_grad_norm is None and self.sums_per_answer
        return None if never else super().largest_grad_norm

    def __post_init__(self) -> None:
        super().__post_init__()
        not_empty("reward_funcs", self.reward_funcs)
        for source in self.reward_funcs:
            if source != "lane" and not all(source.rpartition(":")[::2]):
                expected = "lane, module:function or path/file.py:function"
                raise ConfigError(f"reward_funcs: expected {expected}, got {source!r}")
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise ConfigError(
                f"reward_weights: expected {len(self.reward_funcs)} numbers, one per entry of reward_funcs, "
                f"got {len(self.reward_weights)}"
            )
        if self.missing_eos_score is not None and self.missing_eos_penalty is not None:
            raise ConfigError(
                f"missing_eos_score: expected it unset with missing_eos_penalty, got {self.missing_eos_score}"
            )
        self.check_prompts_kept()
        self._check_method()
        self.check_algorithm()
        self._check_correction()
        self.check_async(
            algorithm=self.algorithm,
            loss_type=self.chosen_loss_type,
            method=self.method,
            rollout_backend=self.rollout_backend,
        )
        if self.warmup_steps > self.max_steps:
            raise ConfigError(f"warmup_steps: expected at most max_steps ({self.max_steps}), got {self.warmup_steps}")
        if self.critic_warmup_steps >= self.max_steps:
            raise ConfigError(
                f"critic_warmup_steps: expected less than max_steps ({self.max_steps}), got {self.critic_warmup_steps}"
            )
        if self.eval_steps and self.eval_dataset_name is None:
            raise ConfigError(f"eval_steps: expected 0 or an eval_dataset_name, got {self.eval_steps} without one")

    @property
    def correction(self) -> Correction:
        """`off_policy_correction`, or the algorithm's default."""
        return self.off_policy_correction or self.corrections(self.algorithm, self.chosen_loss_type)[0]

    def _check_method(self) -> None:
        """What a method needs and what it cannot do, before any weights are read."""
        for name in ("reward_adapter", "reward_model_path"):
            if getattr(self, name) is not None and "lane" not in self.reward_funcs:
                raise ConfigError(f"{name}: expected 'lane' among reward_funcs, got {self.reward_funcs}")
        if self.reward_adapter is not None and self.reward_model_path is not None:
            raise ConfigError("reward_model_path: expected either reward_adapter or reward_model_path, got both")
        if "lane" not in self.reward_funcs and self.method == "dynamic_lora_ppo":
            raise ConfigError(
                "method: expected 'lane' among reward_funcs for dynamic_lora_ppo, whose second backbone is the reward "
                f"model's, got {self.reward_funcs}"
            )
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigError("load_in_4bit: expected either load_in_8bit or load_in_4bit, got both")
        for name in ("load_in_8bit", "load_in_4bit"):
            if self.shard_base and getattr(self, name):
                raise ConfigError(
                    f"{name}: expected false with shard_base, which cannot share quantised tensors, got true"
                )
        if self.method == "full_ppo":
            if self.rollout_backend != "local":
                raise ConfigError(
                    "rollout_backend: expected 'local' for full_ppo, whose actor is a whole backbone, where only "
                    f"adapters are sent elsewhere, got {self.rollout_backend!r}"
                )
            for name in ("load_in_8bit", "load_in_4bit", "actor_adapter", "reference_adapter"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name}: expected it unset for full_ppo, which trains whole backbones from the base on, "
                        f"got {getattr(self, name)!r}"
                    )
        if self.critic_init == "reward":
            self._check_start_as_reward()
        if self.critic_init == "actor" and self.method == "dynamic_lora_ppo":
            raise ConfigError(
                "critic_init: expected 'base' or 'reward' for dynamic_lora_ppo, whose critic has another backbone than "
                "the actor, got 'actor'"
            )

    def _check_correction(self) -> None:
        """Whether the algorithm can learn from the answers of another engine as configured."""
        if self.rollout_backend != "local" and self.algorithm == "remax" and self.temperature != 1:
            raise ConfigError(
                "temperature: expected 1 for remax with rollout_backend 'vllm', which reports the log-probs of greedy "
                f"tokens at that temperature alone, got {self.temperature:g}"
            )
        if self.rollout_backend == "local" or not self.vllm_importance_sampling_correction:
            return
        if self.algorithm in ("online_dpo", "best_of_n"):
            raise ConfigError(
                f"vllm_importance_sampling_correction: expected false for {self.algorithm}, whose loss has no place "
                "for a ratio of two engines, got true"
            )
        mode = self.vllm_importance_sampling_mode
        if self.chosen_loss_type == "proximal" and mode != "sequence_truncate":
            raise ConfigError(
                "vllm_importance_sampling_mode: expected 'sequence_truncate' for proximal rloo, whose loss weighs "
                f"whole answers, got {mode!r}"
            )

    def _check_start_as_reward(self) -> None:
        """Where the critic has no slot of its own, its hidden states have to be the reward model's all the same."""
        if "lane" not in self.reward_funcs:
            raise ConfigError(
                f"critic_init: expected 'lane' among reward_funcs to start as the reward model, got {self.reward_funcs}"
            )
        start = self.actor_adapter or self.reference_adapter  # of the actor's slot, which J-Hydra's critic reads
        apart = {
            "full_ppo": self.reward_adapter is not None,
            "j_hydra_ppo": (start and Path(start).resolve())
            != (self.reward_adapter and Path(self.reward_adapter).resolve()),
        }
        if apart.get(self.method, False):
            raise ConfigError(
                f"critic_init: expected 'base' for {self.method} here, whose critic has no slot of its own and starts "
                f"on {start or 'the base'!r}, where the reward head reads {self.reward_adapter or 'the base'!r}; got "
                "'reward'"
            )


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedOptions):
    """Supervised training of language model and reward head together.

    Rows hold `prompt` and either `completion`, or `chosen` and `rejected`, whose common beginning may be the prompt.
    """

    mode: Literal["full", "lora"] = required(
        "full writes a new base, lora writes a frozen adapter", switches=("full", "lora")
    )
    gamma: float = option(0.1, "weight of the pairwise reward objective, which needs chosen and rejected", ge=0)
    save_steps: int = option(50, "a checkpoint every so many steps, to go on from; 0: none", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "full":
            self.check_no_adapter()


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(EngineConfig, RowOptions, ModelOptions):
    """Answers to prompts, by a base model with or without an adapter."""

    adapter: str | None = option(None, "PEFT folder of an adapter; none: the base alone")
    prompt: list[str] | None = option(None, "prompts, each one argument")
    prompt_file: str | None = option(None, "text file with one prompt a line; - reads standard input")
    dataset_name: str | None = option(None, f"prompts, texts or conversations: {SOURCES}")
    max_prompt_length: int | None = option(None, "longest prompt in tokens, for truncation; none: any", ge=1)
    num_generations: int = option(1, "answers per prompt; the prompt goes through the model once", ge=1)
    best_of: int | None = option(
        None,
        "draw so many answers per prompt and keep the one with the highest reward, which reads stop texts, too",
        ge=2,
    )
    reward_adapter: str | None = option(None, "best_of: PEFT folder of a LoRA reward model")
    reward_model_path: str | None = option(
        None, "best_of: folder of a whole reward model; without either, the base's own reward head"
    )
    max_completion_length: int = option(64, "most tokens generated per prompt", ge=1)
    min_completion_length: int = option(0, "no end-of-sequence token before so many tokens", ge=0)
    temperature: float = option(1.0, "sampling temperature", gt=0)
    top_k: int | None = option(None, "draw among so many likeliest tokens; none: all", ge=1)
    top_p: float | None = option(None, "draw among the fewest tokens with this much probability; none: all", gt=0, le=1)
    stop: list[str] = option([], "texts that end an answer; it is printed without them")
    ignore_eos: bool = option(False, "do not end answers at end-of-sequence tokens")
    greedy: bool = option(False, "take the likeliest token instead of sampling")
    verify_rollout: bool = option(
        False, "compare log-probs with those of the training forward, and say how they differ"
    )
    out: str | None = option(None, "JSONL file that every answer is added to as it finishes")
    resume: bool = option(False, "go on with the answers that `out` lacks")
    json: bool = option(False, "print one JSON object per answer")

    def __post_init__(self) -> None:
        super().__post_init__()
        filters = {
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_completion_length": self.min_completion_length or None,
        }
        given = {name: value for name, value in filters.items() if value is not None}
        if self.verify_rollout and given:
            raise ConfigError(
                "verify_rollout: expected no top_k, top_p and min_completion_length, whose log-probs are of the tokens "
                f"they keep, got {given}"
            )
        if self.resume and self.out is None:
            raise ConfigError("resume: expected it together with out, the file to go on with, got no out")
        if self.min_completion_length > self.max_completion_length:
            raise ConfigError(
                f"min_completion_length: expected at most max_completion_length ({self.max_completion_length}), got "
                f"{self.min_completion_length}"
            )
        if self.out is not None:
            not_empty("out", self.out)
        if not all(self.stop):
            raise ConfigError(f"stop: expected texts that are not empty, got {self.stop}")
        self._check_prompts()
        for name in ("reward_adapter", "reward_model_path"):
            if getattr(self, name) is not None and self.best_of is None:
                raise ConfigError(f"{name}: expected it together with best_of, got no best_of")
        if self.reward_adapter is not None and self.reward_model_path is not None:
            raise ConfigError("reward_model_path: expected either reward_adapter or reward_model_path, got both")
        if self.best_of is not None and (self.greedy or self.num_generations > 1):
            other = "greedy" if self.greedy else f"num_generations {self.num_generations}"
            raise ConfigError(f"best_of: expected it without greedy and num_generations, got {other}")
        if self.greedy and self.num_generations > 1:
            raise ConfigError(
                f"num_generations: expected 1 with greedy, where all answers are the same, got {self.num_generations}"
            )

    @property
    def prompt_source(self) -> tuple[str, str]:
        """(the option that names the prompts, what messages call them)"""
        given = {"prompt_file": self.prompt_file, "dataset_name": self.dataset_name, "prompt": "prompt"}
        return next((name, value) for name, value in given.items() if value is not None)

    def _check_prompts(self) -> None:
        """One source of prompts, and nothing asked of it that prompts do not bear."""
        self.check_prompts_kept()
        given = [n for n in ("prompt", "prompt_file", "dataset_name") if getattr(self, n) not in (None, [])]
        if not given:
            raise ConfigError("prompt: expected at least one prompt, a prompt_file or a dataset_name, got none of them")
        if len(given) > 1:
            raise ConfigError(f"{given[1]}: expected one of prompt, prompt_file and dataset_name, got {given}")
        for name in ("prompt_file", "dataset_name"):
            if getattr(self, name) is not None:
                not_empty(name, getattr(self, name))
        if self.prompt_file is not None and self.prompt_file.endswith(SUFFIXES):
            raise ConfigError(
                f"prompt_file: expected a text file, got {self.prompt_file!r}; dataset_name reads such files"
            )


@dataclass(frozen=True, kw_only=True)
class DemoConfig(RunOptions):
    """Supervised training, then RL, on a small built-in task; needs a CPU and a few minutes."""

    algorithm: Algorithm = option("ppo", "ppo, remax, rloo, reinforce, grpo, online_dpo or best_of_n")
    output_dir: str = option("runs/demo", "folder for the models, metrics, samples and curves")
    method: Method = option("hydra_ppo", "critic on an adapter of its own, or (j_hydra_ppo) on the actor's")
    async_mode: Literal["off", "replay", "overlap"] = option(
        "off",
        "overlap: draw the answers of the next step while this one is learned; replay: the same in turn",
        alias="async",
    )
    start: str | None = option(
        None, "folder of an earlier demo, whose supervised model and prompts are taken in place of new ones"
    )
    quick: bool = option(False, "a few steps only, to see that everything runs")
    json: bool = option(False, "print the summary as one JSON object")

    def __post_init__(self) -> None:
        super().__post_init__()
        not_empty("output_dir", self.output_dir)
        if self.start is not None:
            not_empty("start", self.start)


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Options):
    """Time, memory and error of every kernel backend that is here, beside other libraries and a bare-GEMM floor."""

    op: str | None = option(
        None, "one op only, or rollout; may also be the first argument; none: all ops, without rollout"
    )
    model: str | None = option(None, "for rollout: folder of a Llama-like model in place of random weights")
    case: str | None = option(None, "one case only: its name, or the part before or after the / of several")
    quick: bool = option(False, "small sizes, few rounds, nothing that compiles: about a minute on two CPU cores")
    full: bool = option(False, "every size of the grids")
    rounds: int | None = option(None, "rounds of which the median is taken; none: 20, or 5 with --quick", ge=5)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    isa: str | None = option(
        None, "hold the CPU's kernels, and other libraries, to an instruction set such as avx2; none: the best"
    )
    dtype: Literal["bf16", "fp16", "fp32"] = option(
        "bf16", "of weights and activations; numbers per token stay in fp32"
    )
    json: str | None = option(None, "append one JSON object per case and backend to this file; - is standard output")
    out: str | None = option(None, "folder for results.jsonl and roofline.png")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)
        for name in ("op", "model", "case", "isa", "json", "out"):
            if getattr(self, name) is not None:
                not_empty(name, getattr(self, name))
        if self.model is not None and self.op != "rollout":
            raise ConfigError(f"model: expected it with the op rollout, got op {self.op!r}")
        if self.quick and self.full:
            raise ConfigError("full: expected either quick or full, got both")


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Options):
    """A page of one run or several: curves, reward against KL and time, answers over time, options and versions."""

    run: list[str] = option([], "output folders of runs; may also be the first arguments")
    out: str = option("report.html", "the page, which needs nothing but a browser")
    title: str | None = option(None, "its heading; none: the run's name, or how many there are")

    def __post_init__(self) -> None:
        super().__post_init__()
        not_empty("run", self.run)
        not_empty("out", self.out)


CARDS = {"h100": "80GB", "h200": "141GB", "a100": "80GB"}
"""Cards whose data-sheet `plan` has, and their memory."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Options):
    """How much memory each method takes, and the largest batches that fit, from a model's config alone.

    With --time: how many seconds a step takes, and what they are spent on.
    """

    model: str = required("a preset such as llama-7b, or a folder with config.json; weights are not needed")
    method: Literal["all", "full_ppo", "lora_ppo", "dynamic_lora_ppo", "j_hydra_ppo", "hydra_ppo", "full_sft"] = option(
        "all", "one method of train, or all five side by side; full_sft: sft --full, a step being one minibatch"
    )
    batch: int = option(64, "prompts per step (generation_batch_size of train)", ge=1)
    gpu: str = option(
        "80GB",
        f"memory of the device, in GB (10^9 bytes), GiB (2^30), MB or MiB, or a card ({', '.join(CARDS)}); with --time "
        "a card, or cpu for this machine",
    )
    time: bool = option(
        False, "seconds of a step by phase and part in place of memory; the ceilings of a cpu are measured first"
    )
    reserve: str = option("1GB", "of it, left to the driver, libraries and fragmentation")
    device: Literal["cuda", "cpu"] = option("cuda", "whose kernels run; nothing is run there")
    dtype: Dtype = option("float32", "dtype of the base weights and activations")
    adapter_dtype: Dtype = option("float32", "dtype of the adapters")
    optim: Optim = option("adamw", OPTIM_HELP)
    lora_r: int = option(16, "rank of the adapters", ge=1, le=LARGEST_RANK)
    lora_target_modules: str | list[str] = option(
        "all-linear", "all-linear, or the last part of the names of the linears to adapt"
    )
    max_prompt_length: int = option(128, "tokens of every prompt", ge=1)
    max_completion_length: int = option(64, "tokens of every answer", ge=1)
    num_mini_batches: int = option(4, "optimizer steps per epoch over the batch", ge=1)
    per_device_train_batch_size: int = option(16, "sequences per forward and backward", ge=1)
    max_grad_norm: float | None = option(
        None,
        "a role's gradient is scaled down to this norm where it is greater; 0: never; none: 1, but never for remax, "
        "rloo and reinforce, whose gradients are sums per answer, unbiased as they are",
        ge=0,
    )
    token_budget: int | None = option(
        None, "most tokens of all lanes together in one traversal of the trunk; none: by device and model", ge=1
    )
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass to save memory")
    json: bool = option(False, "print one JSON object per method, each on a line of its own")
    out: str | None = option(None, "path of a bar chart to write, .png")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model", "lora_target_modules", "out"):
            if getattr(self, name) is not None:
                not_empty(name, getattr(self, name))
        if self.out is not None and not self.out.endswith(".png"):
            raise ConfigError(f"out: expected the path of a .png file, got {self.out!r}")
        if self.time:
            self._check_time()
        elif self.budget_bytes <= 0:
            raise ConfigError(f"reserve: expected less than gpu ({self.gpu}), got {self.reserve!r}")

    def _check_time(self) -> None:
        if self.gpu not in (*CARDS, "cpu"):
            raise ConfigError(f"gpu: expected one of {', '.join(CARDS)}, cpu with time, got {self.gpu!r}")
        if self.gpu != "cpu" and self.device != "cuda":
            raise ConfigError(f"device: expected cuda with gpu {self.gpu!r} and time, got {self.device!r}")
        if self.out is not None:
            raise ConfigError(f"out: expected none with time, of which there is no chart, got {self.out!r}")

    @property
    def device_type(self) -> str:
        """Whose kernels run."""
        return "cpu" if self.gpu == "cpu" else self.device

    @property
    def memory_bytes(self) -> int:
        """Memory of the device."""
        return parse_size("gpu", CARDS.get(self.gpu, self.gpu))

    @property
    def budget_bytes(self) -> int:
        """Bytes that a plan may use."""
        return self.memory_bytes - parse_size("reserve", self.reserve)
