"""Options of where a run's answers are drawn; names as in TRL where TRL has the option."""

# ruff: noqa: RUF009 - `option` returns dataclasses.field(...), which ruff cannot see

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from rlhf_engine.config.parser import Options, option, parse_size
from rlhf_engine.errors import ConfigError

StepName = Literal["auto", "native", "graph", "transformers"]
"""Implementations of a decoding step, by name."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Options):
    """Options of the rollout engine in this process. None of them changes answers, except by rounding."""

    max_rows: int | None = option(None, "most answers written at once, others wait; none: all", ge=1)
    kv_cache_memory: str | None = option(None, "most memory for keys and values, such as 2GB; none: what is needed")
    decode_step: StepName = option(
        "auto",
        "what runs a step: native code for Llama-like models on a CPU, CUDA graphs, or the model's own forward, "
        "which serves every model",
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


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Options):
    """Options of how answers are drawn that nobody learns from."""

    temperature: float = option(1.0, "sampling temperature; 0.01 is nearly greedy", gt=0)
    top_k: int | None = option(None, "draw among so many likeliest tokens; none: all", ge=1)
    top_p: float | None = option(None, "draw among the fewest tokens with this much probability; none: all", gt=0, le=1)
    min_p: float | None = option(
        None, "draw among tokens of at least this share of the largest probability; none: all", gt=0, le=1
    )
    greedy: bool = option(False, "take the likeliest token instead of sampling")
    stop: list[str] = option([], "texts that end an answer; it is shown and judged without them", is_text=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(self.stop):
            raise ConfigError(f"stop: expected texts that are not empty, got {self.stop}")


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(EngineConfig):
    """Options of what draws answers, how far that may be from the training forward, and what is done about it."""

    rollout_backend: Literal["local", "vllm"] = option(
        "local", "what draws answers: this process, or a vLLM server that serves the same base"
    )
    rollout_mismatch_bound: float | None = option(
        None,
        "largest mean |log ratio| between rollout and recomputation at equal weights (a single token: 100 times "
        "that); none: by dtype",
        gt=0,
    )
    vllm_server_base_url: str | None = option(
        None,
        "address of the server, such as http://localhost:8000; of several, separated by commas, each process of a run "
        "has its own in turn",
    )
    vllm_server_timeout: float = option(240.0, "seconds within which the whole of an answer has to have come", gt=0)
    vllm_model_name: str | None = option(
        None, "name that the server serves the base by; none: the one that ends like model_name_or_path"
    )
    vllm_adapter_dir: str | None = option(
        None, "folder that adapters are written to and that the server reads; none: vllm/ in output_dir"
    )
    vllm_server_adapter_dir: str | None = option(None, "vllm_adapter_dir as the server sees it; none: by the same path")
    vllm_canary_bound: float | None = option(
        None,
        "largest mean |log-prob difference| between server and training forward on canary prompts; none: by dtype",
        gt=0,
    )
    vllm_importance_sampling_correction: bool = option(
        True, "multiply advantages by the truncated ratio of training to rollout probabilities"
    )
    vllm_importance_sampling_mode: Literal["token_truncate", "sequence_truncate"] = option(
        "token_truncate", "a ratio for each token, or the ratio of the whole answer for all of its tokens"
    )
    vllm_importance_sampling_clip_max: float = option(2.0, "largest ratio; greater ones are truncated to it", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        local = self.rollout_backend == "local"
        engine = {field.name for field in dataclasses.fields(EngineConfig)}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            foreign = field.name.startswith("vllm_") if local else field.name in engine
            if foreign and value != field.default:
                raise ConfigError(
                    f"{field.name}: expected it unset for rollout_backend {self.rollout_backend!r}, got {value!r}"
                )
        if local:
            return
        if self.vllm_server_base_url is None:
            raise ConfigError(
                "vllm_server_base_url: expected the address of a running server (vllm serve) for rollout_backend "
                "'vllm', got None; vLLM is not run inside of this process"
            )
        if not all(self.vllm_servers):
            raise ConfigError(
                "vllm_server_base_url: expected addresses separated by single commas, got "
                f"{self.vllm_server_base_url!r}"
            )
        if self.rollout_mismatch_bound is not None:
            raise ConfigError(
                "rollout_mismatch_bound: expected it unset for rollout_backend 'vllm', whose mismatch is corrected and "
                f"logged (vllm_canary_bound bounds it), got {self.rollout_mismatch_bound}"
            )

    @property
    def vllm_servers(self) -> list[str]:
        """Addresses of the servers; empty without one."""
        return [] if self.vllm_server_base_url is None else [x.strip() for x in self.vllm_server_base_url.split(",")]
