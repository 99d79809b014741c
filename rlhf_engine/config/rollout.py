"""Options of who draws a run's answers, when, and what is done about the age of answers; names as in TRL."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rlhf_engine.config.algorithm import AlgorithmOptions
from rlhf_engine.config.parser import Options, option, parse_size
from rlhf_engine.errors import ConfigError

AsyncMode = Literal["off", "blocks", "replay", "overlap", "ray"]
Correction = Literal["none", "behaviour", "decoupled", "token_truncate", "sequence_truncate"]
StepName = Literal["auto", "native", "graph", "transformers"]  # implementations of a decoding step, by name


class EngineConfig(Options):
    """Options of the rollout engine in this process. None of them changes answers, except by rounding."""

    kv_cache_memory: str | None = option(
        None, "most memory for keys and values, such as 2GB: other answers wait; none: what is needed"
    )
    decode_step: StepName = option(
        "auto",
        "what runs a step: own code for Llama-like models (native; on a GPU by name), CUDA graphs, or the model's "
        "forward, which serves every model",
    )
    exact: bool | None = option(
        None,
        "same bits in rollout, scoring and training, whatever an answer is batched with, by every op of this package "
        "on a CPU; generate draws from a model that is not served one answer at a time; none: where it is served and "
        "costs nothing",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_cache_memory is not None:
            parse_size("kv_cache_memory", self.kv_cache_memory)

    @property
    def cache_bytes(self) -> int | None:
        """`kv_cache_memory` in bytes."""
        return None if self.kv_cache_memory is None else parse_size("kv_cache_memory", self.kv_cache_memory)


class SamplingOptions(Options):
    """Options of how answers are drawn, and of what log-probs, ratios and the KL of a run are then over."""

    max_prompt_length: int | None = option(None, "longest prompt in tokens, for truncation; none: any", ge=1)
    max_completion_length: int = option(64, "most tokens generated per prompt", ge=1)
    temperature: float = option(1.0, "sampling temperature, in log-probs alike; 0.01 is nearly greedy", gt=0)
    top_k: int | None = option(None, "draw among so many likeliest tokens; none: all", ge=1)
    top_p: float | None = option(None, "draw among the fewest tokens with this much probability; none: all", gt=0, le=1)
    min_p: float | None = option(
        None, "draw among tokens of at least this share of the largest probability; none: all", gt=0, le=1
    )


class AnswerOptions(SamplingOptions):
    """Options of how answers are drawn that nobody learns from."""

    greedy: bool = option(False, "take the likeliest token instead of sampling")
    stop: list[str] = option([], "texts that end an answer; it is shown and judged without them", is_text=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("stop", all(self.stop), "texts that are not empty")

    def check_greedy(self, n: int) -> None:
        """Raise ConfigError for several greedy answers to a prompt."""
        self.require("num_generations", not self.greedy or n == 1, "1 with greedy, where all answers are the same")


class RolloutOptions(EngineConfig):
    """Options of what draws answers, how far that may be from the training forward, and what is done about it."""

    rollout_mismatch_bound: float | None = option(
        None,
        "largest mean |log ratio| between rollout, or a vLLM server's on canary prompts, and recomputation at equal "
        "weights (a single token here: 100 times that); none: by dtype",
        gt=0,
    )
    vllm_server_base_url: str | None = option(
        None,
        "address of a running vLLM server (vllm serve) of the same base that draws the answers, such as "
        "http://localhost:8000; of several, separated by commas, each process of a run has its own in turn; none: this "
        "process draws them",
    )
    vllm_adapter_dir: str | None = option(
        None,
        "folder that adapters are written to and that the server reads, or HERE:THERE where it sees the folder by "
        "another path; none: vllm/ in output_dir",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vllm_servers:
            self.require_unset([f.name for f in dataclasses.fields(EngineConfig)], "with vllm_server_base_url")
        else:
            self.require_unset(["vllm_adapter_dir"], "without vllm_server_base_url")
        self.require("vllm_server_base_url", all(self.vllm_servers), "addresses separated by single commas")

    @property
    def vllm_servers(self) -> list[str]:
        """Addresses of the servers; empty where this process draws the answers."""
        return [] if self.vllm_server_base_url is None else [x.strip() for x in self.vllm_server_base_url.split(",")]


class AsyncOptions(AlgorithmOptions, RolloutOptions):
    """Options of asynchronous rollouts: where answers are drawn, and how far they may be behind the policy."""

    async_mode: AsyncMode = option(
        "off",
        "overlap: draw the answers of later steps while this one is learned, on the same base; ray: by processes "
        "that hold the base as well, on Ray; replay: the same answers one after the other; blocks: draw the answers of "
        "max_staleness + 1 steps by the policy before the first of them (off-policy study); off: every step draws its "
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
    ray_generators: int = option(
        1,
        "ray: generators, each a process that holds the base, with a GPU or an equal part of one, on the cluster of "
        "RAY_ADDRESS or else on this machine",
        ge=1,
    )
    off_policy_correction: Correction | None = option(
        None,
        "for answers of an older policy or of a vLLM server. behaviour: ratios are to the policy that drew them; "
        "decoupled: to the present one, and advantages weighted by present over drawing policy; token_truncate, "
        "sequence_truncate: the same with weights truncated, as a server's answers always are; none. Default: "
        "behaviour where the loss has a ratio, else token_truncate; copg, online_dpo and best_of_n need none",
    )
    off_policy_clip_max: float = option(2.0, "largest truncated weight", ge=1)

    @property
    def is_async(self) -> bool:
        """Whether answers are drawn by a copy of the policy, which may be older than what learns."""
        return self.async_mode != "off"

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """Corrections that the loss can make for answers of an older policy; the first is the default."""
        if not self.facts.maximises_reward:
            return ("none",)
        if self.facts.has_token_ratio:
            return ("behaviour", "decoupled", "token_truncate", "sequence_truncate", "none")
        if self.chosen_loss_type == "proximal":  # one ratio per answer, and so one weight
            return ("behaviour", "sequence_truncate", "none")
        return ("token_truncate", "sequence_truncate", "none")

    @property
    def correction(self) -> Correction:
        """`off_policy_correction`, or the algorithm's default."""
        return self.off_policy_correction or self.corrections[0]

    @property
    def server_correction(self) -> Literal["token_truncate", "sequence_truncate", "none"]:
        """Weights of a server's answers by the ratio of training to rollout probabilities."""
        if self.correction == "none":
            return "none"
        whole_answers = self.correction == "sequence_truncate" or self.chosen_loss_type == "proximal"
        return "sequence_truncate" if whole_answers else "token_truncate"

    def check_async(self) -> None:
        """Raise ConfigError for options that contradict each other, or that are set and not read."""
        self.require(
            "max_staleness",
            self.async_mode in ("off", "blocks") or self.max_staleness > 0,
            f"at least 1 with async {self.async_mode!r}, where a batch is drawn before the updates on the one before "
            "it are done",
        )
        readers = {"async_policy": ("overlap", "ray"), "max_staleness": ("blocks", "replay", "overlap", "ray")}
        for name, modes in {**readers, "ray_generators": ("ray",)}.items():
            if self.async_mode not in modes:
                self.require_unset([name], f"without async {' or '.join(modes)}")
        self._check_correction()
        if self.async_mode == "ray":
            self.require_unset(["vllm_server_base_url"], "with async 'ray', whose generators draw by themselves")
        if self.async_mode == "ray" or self.vllm_servers:
            why = "whose answers are of the policy that they were begun with"
            where = f"with async 'ray' or vllm_server_base_url, {why}"
            self.require("async_policy", self.async_policy != "in_flight", f"'fixed' or 'newest' {where}")

    def _check_correction(self) -> None:
        """Check the correction of answers that an older policy or a server drew."""
        possible, served = self.corrections, bool(self.vllm_servers)
        if not self.is_async:  # of a server's own ratio there are weights alone
            possible = tuple(name for name in possible if served and name not in ("behaviour", "decoupled"))
        chosen, weighed = self.off_policy_correction, served and possible != ("none",)
        if chosen is not None and chosen not in possible:
            kind = f"{self.chosen_loss_type} {self.algorithm}".strip()
            expected = f"one of {', '.join(possible)} for {kind}"
            unset = "it unset where every step draws its own answers (async, vllm_server_base_url)"
            raise ConfigError(f"off_policy_correction: expected {expected if possible else unset}, got {chosen!r}")
        if not (chosen or (*possible, "none")[0]).endswith("truncate") and not (weighed and chosen != "none"):
            why = "without off_policy_correction token_truncate or sequence_truncate"
            self.require_unset(["off_policy_clip_max"], why)
