"""Options of the commands that train nothing, and of the demo."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from rlhf_engine.config.algorithm import ALGORITHMS, Algorithm
from rlhf_engine.config.parser import Options, option, parse_size, required
from rlhf_engine.config.rollout import AnswerOptions, EngineConfig
from rlhf_engine.config.run import (
    DEVICE,
    LARGEST_RANK,
    OPTIM_HELP,
    QUANTIZATION_HELP,
    REPOSITORY,
    SOURCES,
    SUFFIXES,
    Dtype,
    ModelOptions,
    Optim,
    Quantization,
    RewardModelOptions,
    RowOptions,
    RunOptions,
    check_weights,
)
from rlhf_engine.config.train import Method
from rlhf_engine.errors import ConfigError

BASE, REFERENCES = "base", "references"  # names of the base without an adapter, and of the answers in the data
REWARD = "reward"  # the judge that prefers the answer with the higher reward
CARDS = {"h100": "80GB", "h200": "141GB", "a100": "80GB"}  # cards that `--gpu` knows by name, and their memory
Format = Literal["merged", "peft", "sequence_classification"]
_LICENSE = (r"[A-Za-z0-9][A-Za-z0-9.+-]*", "a name such as apache-2.0")
_NAME_OR_REVISION = (rf"{REPOSITORY[0]}(@[\w./-]+)?", "owner/name or owner/name@revision")

Start = Literal["tutorial", "reward-function", "reward-model", "trl", "recipe:stories260k"]
OWN_MODEL = ("reward-function", "recipe:stories260k")  # starts that run on a model of the user's


class GenerateConfig(AnswerOptions, EngineConfig, RewardModelOptions, RowOptions, ModelOptions):
    """Answers to prompts, by a base model with or without an adapter."""

    FIRST = ("model_name_or_path", "adapter", "prompt", "num_generations", "max_completion_length")
    EXAMPLE = 'rlhf-engine generate --model_name_or_path Qwen/Qwen3-0.6B --adapter runs/ppo/final --prompt "Once upon"'

    adapter: str | None = option(None, "PEFT folder of an adapter, or its name on the Hub; none: the base alone")
    prompt: list[str] | None = option(None, "prompts, each one argument", is_text=True)
    prompt_file: str | None = option(None, "text file with one prompt a line; - reads standard input")
    dataset_name: str | None = option(None, f"prompts, texts or conversations: {SOURCES}")
    num_generations: int = option(1, "answers per prompt; the prompt goes through the model once", ge=1)
    best_of: int | None = option(
        None,
        "draw so many answers per prompt and keep the one with the highest reward, which reads stop texts, too",
        ge=2,
    )
    min_completion_length: int = option(0, "no end-of-sequence token before so many tokens", ge=0)
    verify_rollout: bool = option(
        False, "compare log-probs with those of the training forward, and say how they differ"
    )
    out: str | None = option(None, "JSONL file that every answer is added to as it finishes")
    resume: bool = option(False, "go on with the answers that `out` lacks")
    json: bool = option(False, "print one JSON object per answer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is None:
            self.require_unset(["resume"], "without out, the file to go on with")
        is_less = self.min_completion_length <= self.max_completion_length
        most = f"at most max_completion_length ({self.max_completion_length})"
        self.require("min_completion_length", is_less, most)
        self._check_prompts()
        if self.best_of is None:
            self.require_unset(["reward_model_path"], "without best_of")
        else:
            self.require_unset(("greedy", "num_generations"), "with best_of")
        self.check_greedy(self.num_generations)

    @property
    def prompt_source(self) -> tuple[str, str]:
        """The option that names the prompts, and what messages call them."""
        given = {"prompt_file": self.prompt_file, "dataset_name": self.dataset_name, "prompt": "prompt"}
        return next((name, value) for name, value in given.items() if value is not None)

    def _check_prompts(self) -> None:
        """Require one source of prompts, and no option that it cannot serve."""
        self.check_prompts_kept()
        given = [n for n in ("prompt", "prompt_file", "dataset_name") if getattr(self, n) not in (None, [])]
        if not given:
            raise ConfigError("prompt: expected at least one prompt, a prompt_file or a dataset_name, got none of them")
        if len(given) > 1:
            raise ConfigError(f"{given[1]}: expected one of prompt, prompt_file and dataset_name, got {given}")
        if self.dataset_name is None and (self.system_prompt is not None or self.chat_template_kwargs):
            raise ConfigError(
                "dataset_name: expected conversations for system_prompt and chat_template_kwargs, got none"
            )
        if self.prompt_file is not None and self.prompt_file.endswith(SUFFIXES):
            raise ConfigError(
                f"prompt_file: expected a text file, got {self.prompt_file!r}; dataset_name reads such files"
            )


class ServeConfig(EngineConfig, ModelOptions):
    """An OpenAI endpoint for a base, adapters on it, and the policies of a folder."""

    POSITIONAL = ("model_name_or_path",)
    FIRST = ("model_name_or_path", "adapters", "state", "port", "api_key_file")
    EXAMPLE = "rlhf-engine serve Qwen/Qwen3-0.6B --adapters ppo=runs/ppo/final --port 8000"

    model_name_or_path: str = option(
        dataclasses.MISSING, "folder of the base model, or its owner/name[@revision] on the Hub", alias="model"
    )
    adapters: list[str] = option([], "PEFT folders that are served beside the base, each as NAME=FOLDER")
    served_name: str | None = option(None, "name of the base among the models; none: the last part of its own")
    host: str = option("127.0.0.1", "address to listen on; others than this machine's own need api_key_file")
    port: int = option(8000, "port to listen on; 0: a free one", ge=0, le=65535)
    state: str | None = option(None, "folder of policies, which come back from it when they are asked for; none: none")
    api_key_file: str | None = option(None, "text file with a key a line, one of which each request has to bear")
    max_policies: int | None = option(None, "most policies in memory at once; none: any number", ge=1)
    max_rows: int = option(256, "most answers that are written at once; others wait", ge=1)
    max_waiting_tokens: int = option(
        1_000_000, "most tokens of prompts and answers that wait or are written; beyond, requests get a 429", ge=1
    )
    chat_template_kwargs: dict[str, Any] | None = option(
        None, "arguments of the chat template, as JSON, unless a request has its own"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        here = self.host in ("127.0.0.1", "::1", "localhost")
        self.require(
            "api_key_file", here or self.api_key_file is not None, "a file of keys for a host of other machines"
        )
        names = [place.partition("=")[0] for place in self.adapters if "=" in place]
        fine = len(names) == len(set(names)) == len(self.adapters)
        self.require("adapters", fine, "NAME=FOLDER each, with different names")


class EvaluateConfig(AnswerOptions, EngineConfig, RewardModelOptions, RowOptions, ModelOptions):
    """Models side by side: rewards, win rates, KL, ROUGE, and a page with their answers."""

    FIRST = ("model_name_or_path", "models", "dataset_name", "reward_model_path", "output_dir")
    EXAMPLE = (
        "rlhf-engine evaluate --model_name_or_path BASE --models ppo=runs/ppo/final --dataset_name heldout.jsonl "
        "--reward_model_path RM --output_dir evaluation"
    )

    models: list[str] = option(
        [],
        "what is evaluated, each as [name=]PLACE: a PEFT folder or model folder, either also on the Hub, a JSONL file "
        f"with prompt and completion, {BASE}, or {REFERENCES} for the data's own answers",
    )
    against: str = option(BASE, "name of the model that win rates are against; it is evaluated as well")
    dataset_name: str = required(f"prompts, with or without answers of their own: {SOURCES}")
    output_dir: str = required("folder for answers, verdicts, results and the page")
    resume: bool = option(False, "go on with the answers and verdicts that output_dir lacks")
    max_prompts: int | None = option(None, "the first so many prompts; none: all", ge=1)
    num_generations: int = option(1, "answers per prompt of each model; from 2 on, rewards of best-of-n as well", ge=1)
    reward_funcs: list[str] = option(
        [],
        "what answers are worth, as of train: reward_model, a built-in such as math, package.module:function, or "
        "file.py:function; none: reward_model where a reward model is given",
    )
    reward_weights: list[float] | None = option(None, "one weight per reward source; none: all 1")
    judge: str | None = option(
        None,
        f"who prefers which of two answers: {REWARD}, file.py:function with TRL's judge signature, or the address of "
        f"a server with OpenAI's chat completions; none: {REWARD} where there is one, otherwise nobody",
    )
    judge_model: str | None = option(None, "name that the judging server has for its model")
    judge_template: str | None = option(
        None, "text file with the question to the server, with {prompt}, {first} and {second}; none: a built-in one"
    )
    judge_timeout: float = option(120.0, "seconds within which the server has to have answered", gt=0)
    max_bad_verdicts: float = option(
        0.0, "share of verdicts that may say nothing before the evaluation stops", ge=0, lt=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_prompts_kept()
        self.check_greedy(self.num_generations)
        check_weights(self.reward_weights, self.sources)
        if "reward_model" not in self.sources:
            self.require_unset(["reward_model_path"], "without 'reward_model' among reward_funcs")
        if not self.sources:
            self.require("judge", self.judge != REWARD, "reward_funcs or a reward model for a judge by reward")
        if not self.judge_is_server:
            self.require_unset(("judge_model", "judge_template"), "without the address of a server as judge")
        has_name = not self.judge_is_server or self.judge_model is not None
        self.require("judge_model", has_name, "the name of the server's model")

    @property
    def sources(self) -> tuple[str, ...]:
        """Reward sources: those of `reward_funcs`, or the reward model that is given."""
        return tuple(self.reward_funcs) or (() if self.reward_model_path is None else ("reward_model",))

    @property
    def judged_by(self) -> str | None:
        """The judge; None where nobody judges."""
        return self.judge or (REWARD if self.sources else None)

    @property
    def judge_is_server(self) -> bool:
        """Whether the judge is a server."""
        return self.judge is not None and self.judge.startswith(("http://", "https://"))


class PlanConfig(Options):
    """Memory that each method takes, and the largest batches that fit: plan --model llama-7b."""

    model_name_or_path: str = required(
        "a preset such as llama-7b, a folder with config.json or owner/name of the Hub; weights are not needed",
        alias="model",
    )
    method: Literal["all", "full_ppo", "lora_ppo", "dynamic_lora_ppo", "j_hydra_ppo", "hydra_ppo", "full_sft"] = option(
        "all", "one method of train, or all five side by side; full_sft: sft --full, a step being one minibatch"
    )
    generation_batch_size: int = option(64, "answers per step, of all processes together", ge=1, alias="batch")
    processes: int = option(1, "processes that share a step, a GPU each; the memory is that of one of them", ge=1)
    shard_base: bool = option(False, "hold frozen backbones in shares while learning, as --shard_base of train does")
    num_generations: int = option(
        1, "answers per prompt that are learned from; on a CPU they share its pass (with full_sft, 2: pairs)", ge=1
    )
    gpu: str = option(
        "80GB", f"memory of the device, in GB (10^9 bytes), GiB (2^30), MB or MiB, or a card ({', '.join(CARDS)})"
    )
    device: Literal["cuda", "cpu"] = option("cuda", "whose kernels run; nothing is run there")
    dtype: Dtype = option("float32", "dtype of the base weights and activations")
    optim: Optim = option("adamw", OPTIM_HELP)
    lora_r: int = option(16, "rank of the adapters", ge=1, le=LARGEST_RANK)
    lora_target_modules: str | list[str] = option(
        "all-linear", "all-linear, or the last part of the names of the linears to adapt"
    )
    max_prompt_length: int = option(128, "tokens of every prompt", ge=1)
    max_completion_length: int = option(64, "tokens of every answer", ge=1)
    num_mini_batches: int = option(4, "optimizer steps per epoch over the batch", ge=1)
    per_device_train_batch_size: int = option(16, "sequences per forward and backward", ge=1)
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass to save memory")
    json: bool = option(False, "print one JSON object per method, each on a line of its own")
    quantization: Quantization = option("none", QUANTIZATION_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        n = self.num_generations
        batch = self.generation_batch_size
        self.require("generation_batch_size", batch % n == 0, f"a multiple of num_generations ({n})")
        least = f"at least {self.processes * n} with {self.processes} processes, a prompt of {n} answers for each"
        self.require("generation_batch_size", batch >= self.processes * n, least)
        self.require("gpu", self.budget_bytes > 0, "more than nothing")
        is_known = not self.needs_frozen or self.method not in ("full_ppo", "full_sft")
        self.require("method", is_known, "one with a frozen base, with several processes or quantization")

    @property
    def needs_frozen(self) -> bool:
        """Whether the base has to be frozen: nothing is known of a trained one in shares, and none is quantised."""
        return self.processes > 1 or self.quantization != "none"

    @property
    def share(self) -> int:
        """Most answers of a step that one process draws: those to a prompt stay together."""
        return -(-(self.generation_batch_size // self.num_generations) // self.processes) * self.num_generations

    @property
    def budget_bytes(self) -> int:
        """Bytes that a plan may use: all but 5 %, which driver, libraries and fragmentation take."""
        return parse_size("gpu", CARDS.get(self.gpu, self.gpu)) * 19 // 20


class ExportConfig(Options):
    """A trained adapter or reward model as a folder that other libraries load, with a model card.

    The first argument may be the source: a run's folder, one of its checkpoints, or a folder of an adapter or a model.
    """

    POSITIONAL = ("source",)
    FIRST = ("source", "to", "output_dir", "license", "push_to_hub")
    EXAMPLE = "rlhf-engine export runs/ppo --to merged --output_dir ppo-merged"

    source: str = required("folder of a run (its final model, or else its newest checkpoint), a checkpoint or a model")
    to: Format = required(
        "merged: a whole model for transformers; peft: the adapter; sequence_classification: a whole reward model"
    )
    output_dir: str = required("new or empty folder to write")
    role: str | None = option(
        None, "role to export; none: reward with sequence_classification, else actor or what the source has"
    )
    model_name_or_path: str | None = option(
        None, "folder of the base, or its owner/name[@revision] on the Hub; none: as the source records it"
    )
    base_model: str | None = option(
        None,
        "owner/name[@revision] by which others find the base; none: that of the Hub it came from",
        form=_NAME_OR_REVISION,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "dtype of merged weights; auto: the base's, and float32 with sequence_classification"
    )
    license: str | None = option(
        None, "licence of the result in the card, as the Hub writes it, such as apache-2.0", form=_LICENSE
    )
    push_to_hub: str | None = option(None, "owner/name on the Hub to upload the folder to", form=REPOSITORY)
    private: bool = option(False, "push_to_hub: make a new repository private")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.push_to_hub is None:
            self.require_unset(["private"], "without push_to_hub")
        if self.to == "peft":
            self.require_unset(["dtype"], "with peft, which copies the adapter as it is")


class DemoConfig(RunOptions):
    """Supervised training, then RL, on a small built-in task; needs a CPU and a few minutes."""

    algorithm: Algorithm = option("ppo", ", ".join(ALGORITHMS))
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


class InitConfig(Options):
    """A folder to begin with: data, options, a reward and the commands that run it: init tutorial FOLDER.

    tutorial: PPO on a reward function; reward-function: the same on a model of yours; reward-model: thumbs to a reward
    model to PPO; trl: a TRL script with two more lines; recipe:stories260k: happy endings for a story model.
    """

    POSITIONAL = ("start", "output_dir")
    EXAMPLE = "rlhf-engine init reward-function mine --model_name_or_path Qwen/Qwen3-0.6B"

    start: Start = required("what to begin with; may also be the first argument")
    output_dir: str = required("new folder for it; may also be the second argument")
    model_name_or_path: str | None = option(
        None, "of reward-function and recipes: the base; none: a small model that is made here"
    )
    seed: int = option(0, "of the data and the small model", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start not in OWN_MODEL:
            why = f"with {self.start!r}, which makes a small model; the commands in its README take any"
            self.require_unset(["model_name_or_path"], why)
        is_given = self.model_name_or_path is not None or not self.start.startswith("recipe:")
        self.require("model_name_or_path", is_given, f"the base of {self.start!r}")


class DoctorConfig(Options):
    """Versions, device, which kernel backend serves which op and why; --measure [PATH] times them here."""

    json: bool = option(False, "print the same as one JSON object")
    measure: str | bool = option(
        False, "time the backends of every op here, and write a kernel table to this file, or kernel_table.json"
    )


class BenchConfig(Options):
    """Time, memory and error of every kernel backend that is here, beside other libraries: bench [OP] [--quick]."""

    POSITIONAL = ("op",)

    op: str | None = option(
        None, "one op only, or rollout; may also be the first argument; none: all ops, without rollout"
    )
    model_name_or_path: str | None = option(
        None, "for rollout: folder of a Llama-like model in place of random weights", alias="model"
    )
    case: str | None = option(None, "one case only: its name, or the part before or after the / of several")
    mode: Literal["default", "quick", "full"] = option(
        "default",
        "quick: small sizes, few rounds, nothing that compiles, about a minute on two CPU cores; full: every size of "
        "the grids",
        switches=("quick", "full"),
    )
    rounds: int | None = option(None, "rounds of which the median is taken; none: 20, or 5 with --quick", ge=5)
    device: str = option("auto", DEVICE[1], form=DEVICE)
    isa: str | None = option(
        None, "hold the CPU's kernels, and other libraries, to an instruction set such as avx2; none: the best"
    )
    exact: bool = option(False, "with the kernels of exact mode, the default of runs on AVX2 and AVX-512")
    dtype: Literal["bf16", "fp16", "fp32"] = option(
        "bf16", "of weights and activations; numbers per token stay in fp32"
    )
    json: str | None = option(None, "append one JSON object per case and backend to this file; - is standard output")
    out: str | None = option(None, "folder for results.jsonl and roofline.png")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.op != "rollout":
            self.require_unset(["model_name_or_path"], "without the op rollout")


class ReportConfig(Options):
    """A page of one run or several, for a browser: numbers, a comparison, curves, answers, options."""

    POSITIONAL = ("run",)

    run: list[str] = required("output folders of runs; may also be the first arguments")
    out: str = option("report.html", "the page, which needs nothing but a browser")
    title: str | None = option(None, "its heading; none: the run's name, or how many there are", is_text=True)
