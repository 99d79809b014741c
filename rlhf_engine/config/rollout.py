"""Options of who draws a run's answers, when, and what is done about the age of answers; names as in TRL."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal, cast

from rlhf_engine.config.algorithm import AlgorithmOptions
from rlhf_engine.config.parser import Options, option, parse_size
from rlhf_engine.errors import ConfigError

AsyncMode = Literal["off", "blocks", "replay", "overlap", "ray"]
_ASYNC = (
    r"off|blocks|replay|overlap(,newest|,in_flight)?|ray(=[1-9]\d{0,5})?(,newest)?",
    "off, blocks, replay, overlap, ray or ray=GENERATORS, the last three also with ,newest and overlap with ,in_flight",
)
Correction = Literal["none", "behaviour", "decoupled", "token_truncate", "turn_truncate", "sequence_truncate"]
_CORRECTION = (
    r"none|(behaviour|decoupled|(token|turn|sequence)_truncate)(=[1-9]\d{0,5}(\.\d+)?)?",
    "behaviour, decoupled, token_truncate, turn_truncate or sequence_truncate, also with =MOST, a number >= 1; or none",
)
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

    async_mode: AsyncMode | str = option(
        "off",
        "overlap: draw the answers of later steps while this one is learned, on the same base; ray, ray=N: by one or N "
        "processes that hold the base as well, with a GPU or an equal part of one, on the cluster of RAY_ADDRESS or "
        "else on this machine. Both by the policy of exactly max_staleness steps before, so that runs can be repeated; "
        "with ,newest by the newest one there is when a batch begins; overlap,in_flight goes on with each newer one "
        "from the next token. replay: the answers of overlap one after the other; blocks: draw the answers of "
        "max_staleness + 1 steps by the policy before the first of them (off-policy study); off: every step draws its "
        "own",
        alias="async",
        form=_ASYNC,
    )
    max_staleness: int = option(
        1, "async: updates that the policy which drew an answer may lack when it is learned from", ge=0
    )
    off_policy_correction: Correction | str | None = option(
        None,
        "for answers of an older policy or of a vLLM server. behaviour: ratios are to the policy that drew them; "
        "decoupled: to the present one, and advantages weighted by present over drawing policy; token_truncate, "
        "turn_truncate, sequence_truncate: the same with weights truncated, as a server's answers always are, at 2 or "
        "at the number in token_truncate=3; none. Default: behaviour where the loss has a ratio, else token_truncate; "
        "copg, online_dpo and best_of_n need none",
        form=_CORRECTION,
    )

    @property
    def is_async(self) -> bool:
        """Whether answers are drawn by a copy of the policy, which may be older than what learns."""
        return self.async_mode != "off"

    @property
    def async_kind(self) -> AsyncMode:
        """`async_mode` without the policy and the number of generators."""
        return cast("AsyncMode", re.split("[=,]", self.async_mode)[0])

    @property
    def async_policy(self) -> Literal["fixed", "newest", "in_flight"]:
        """Policy that draws where answers are drawn beside the updates."""
        policy = self.async_mode.partition(",")[2]
        return "newest" if policy == "newest" else "in_flight" if policy else "fixed"

    @property
    def ray_generators(self) -> int:
        """Generators on Ray of each process of the run."""
        return int(self.async_mode.partition(",")[0].partition("=")[2] or 1)

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """Corrections that the loss can make for answers of an older policy; the first is the default."""
        if not self.facts.maximises_reward:
            return ("none",)
        if self.facts.has_token_ratio:
            return ("behaviour", "decoupled", "token_truncate", "turn_truncate", "sequence_truncate", "none")
        if self.chosen_loss_type == "proximal":  # one ratio per answer, and so one weight
            return ("behaviour", "sequence_truncate", "none")
        return ("token_truncate", "turn_truncate", "sequence_truncate", "none")

    @property
    def correction(self) -> Correction:
        """`off_policy_correction` without its number, or the algorithm's default."""
        name = (self.off_policy_correction or self.corrections[0]).partition("=")[0]
        return cast("Correction", name)

    @property
    def off_policy_clip_max(self) -> float:
        """Largest truncated weight."""
        return float((self.off_policy_correction or "").partition("=")[2] or 2)

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
            self.async_kind in ("off", "blocks") or self.max_staleness > 0,
            f"at least 1 with async {self.async_mode!r}, where a batch is drawn before the updates on the one before "
            "it are done",
        )
        if not self.is_async:
            self.require_unset(["max_staleness"], "without async")
        self._check_correction()
        if self.async_kind == "ray":
            self.require_unset(["vllm_server_base_url"], "with async 'ray', whose generators draw by themselves")
        if self.vllm_servers:
            where = "with vllm_server_base_url, whose answers are of the policy that they were begun with"
            self.require("async_mode", self.async_policy != "in_flight", f"overlap or overlap,newest {where}")

    def _check_correction(self) -> None:
        """Check the correction of answers that an older policy or a server drew."""
        possible, served = self.corrections, bool(self.vllm_servers)
        if not self.is_async:  # of a server's own ratio there are weights alone
            possible = tuple(name for name in possible if served and name not in ("behaviour", "decoupled"))
        chosen = None if self.off_policy_correction is None else self.correction
        if chosen is not None and chosen not in possible:
            kind = f"{self.chosen_loss_type} {self.algorithm}".strip()
            expected = f"one of {', '.join(possible)} for {kind}"
            unset = "it unset where every step draws its own answers (async, vllm_server_base_url)"
            raise ConfigError(f"off_policy_correction: expected {expected if possible else unset}, got {chosen!r}")
        is_truncated = served or self.correction.endswith("truncate") or "=" not in (self.off_policy_correction or "")
        why = "no number but of token_truncate, sequence_truncate or with a server, whose weights are truncated"
        self.require("off_policy_correction", is_truncated, why)
