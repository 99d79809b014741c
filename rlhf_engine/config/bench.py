"""Options of `rlhf-engine bench`: how fast, how large and how exact the kernels are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_engine.config.parser import Options, option
from rlhf_engine.config.training import (
    check_device,
    not_empty,
)
from rlhf_engine.errors import ConfigError


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
    exact: bool = option(False, "with the kernels of exact mode, the default of runs on AVX2 and AVX-512")
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
