"""Configurations in which the kernels of the vocabulary sweep are compiled ahead of time: bf16, aligned rows."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_kernels.runtime.triton_support import AotCase
from rlhf_kernels.vocab import triton_by_row as by_row, triton_kernels as kernels
from rlhf_kernels.vocab.triton_sweep import FLAGS, fused_tile, fused_warps

_FLOATS = ("temperature", "logit_scale", "softcap", "scale")
_POINTERS = {
    "z_ptr": "*fp32",
    "z_r_ptr": "*fp32",
    "p_ptr": "*bf16",
    "q_ptr": "*bf16",
    "g_ptr": "*bf16",
    "h_ptr": "*bf16",
    "h_r_ptr": "*bf16",
    "w_ptr": "*bf16",
    "bias_ptr": "*bf16",
    "index_ptr": "*i64",
    "runs_ptr": "*i64",
    "out_ptr": "*fp32",
}
_DIVISIBLE = {
    "z_stride",
    "p_stride",
    "g_stride",
    "h_stride",
    "h_r_stride",
    "w_stride",
    "a_stride",
    "out_stride",
    "hidden_size",
    "sum_width",
    "width",
}


_SUMS_OF_ROWS = ("fold_tile_kernel", "fused_kernel", "finish_kernel", "sample_kernel")
_FP32 = dict.fromkeys(("h_ptr", "h_r_ptr", "w_ptr", "p_ptr", "q_ptr"), "*fp32")


def head_case(
    name: str,
    kernel: Any,
    *,
    absent: tuple[str, ...] = (),
    num_warps: int = 4,
    num_stages: int = 3,
    types: dict[str, str] | None = None,
    runs: bool = False,
    **constexprs: Any,
) -> AotCase:
    """A case with every pointer but the `absent` ones; arguments that are not named constexprs get their usual type.

    runs: several LoRAs, whose ranks are multiples of 16.
    """
    fixed = {**constexprs, **dict.fromkeys(absent)}
    if "runs_ptr" in kernel.arg_names:
        fixed |= ({} if runs else {"runs_ptr": None}) | ({"WIDE": runs} if "WIDE" in kernel.arg_names else {})
    signature = {}
    for argument in kernel.arg_names:
        if argument in fixed:
            continue
        if argument.endswith("_ptr"):
            signature[argument] = _POINTERS.get(argument, "*fp32")
        else:
            signature[argument] = "fp32" if argument in _FLOATS else "i32"
    signature |= {n: t for n, t in (types or {}).items() if n in signature}
    divisible = tuple(n for n in signature if n in _DIVISIBLE or n.endswith("_ptr"))
    return AotCase(
        name=name,
        kernel=kernel,
        signature=signature,
        constexprs=fixed,
        num_warps=num_warps,
        num_stages=num_stages,
        divisible_by_16=divisible,
        **(kernels.SAME_ROUNDING if kernel.__name__ in _SUMS_OF_ROWS else {}),
    )


def _flags(*names: str, softcap: bool = False) -> dict[str, Any]:
    return {n: n in names for n in FLAGS} | {"SOFTCAP": softcap}


def _fused(rows: int, rank: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    columns, depth = fused_tile(rows, dtype, rank)
    tile = {"UPCAST": False, "BN": rows, "BV": columns, "BK": depth, "RANKS": kernels.padded_rank(rank)}
    return tile | {"num_warps": fused_warps(rows, dtype)}


def _exact(item: int = 2, *, plain: bool, rank: int = 0) -> dict[str, Any]:
    """Tiles of exact mode."""
    return {"UPCAST": False, **by_row.tile_sizes(item, plain=plain, rank=rank)}


PLAIN = ("bias_ptr", "temperature_ptr")
_FOLD: dict[str, Any] = {"R": 1, "BLOCK": 8192, "num_warps": 8}
_ROW: dict[str, Any] = {"R": 1, "BLOCK": 1024}
NO_LORA = ("down_ptr", "lora_b_ptr", "rank")
_GRAD: dict[str, Any] = {"R": 1, "BLOCK": 2048}
_ONLY_LOGPROB = (
    "expected_kl_ptr",
    "temperature_ptr",
    "logprob_r_ptr",
    "kl_ptr",
    "d_lse_ptr",
    "d_kl_ptr",
    "on_target_ptr",
)


def linear_logprob_cases() -> list[AotCase]:
    """bf16, large N with the gradient ahead, bare forward, few rows, gradient sweep."""
    alone = ("z_r_ptr", "q_ptr")
    pair_rows = ("z_r_ptr", "lse_r_ptr", "kl_ptr", "d_kl_ptr")
    statistics = ("entropy_ptr", "sum_sq_ptr", "d_entropy_ptr", "d_sum_sq_ptr", "d_mean_ptr", "d_lse_ptr")
    no_pair = ("logprob_r_ptr", "lse_r_ptr", "kl_ptr")
    unasked = ("entropy_ptr", "top_ptr", "mean_ptr", "sum_sq_ptr")
    no_d = ("sum_q_ptr", "lse_r_ptr", "kl_ptr", "centre_ptr")
    fold, fused = kernels.fold_tile_kernel, kernels.fused_kernel
    return [
        head_case("bf16", fold, absent=(*alone, *PLAIN), **_flags(), **_FOLD),
        head_case("fp32", fold, absent=(*alone, *PLAIN), types=_FP32, **_flags(), **_FOLD),
        head_case("bf16, every output and option", fold, absent=alone, **_flags(*FLAGS, softcap=True), **_FOLD),
        head_case("128 rows", fused, absent=("h_r_ptr", *NO_LORA, *PLAIN), **_flags(), **_fused(128)),
        head_case("64 rows", fused, absent=("h_r_ptr", *NO_LORA, *PLAIN), **_flags(), **_fused(64)),
        head_case(
            "16 rows",
            fused,
            absent=("h_r_ptr", *NO_LORA, *PLAIN),
            **_flags(),
            **_fused(16),
        ),
        head_case(
            "128 rows, every output and option",
            fused,
            absent=("h_r_ptr",),
            **_flags(*FLAGS, softcap=True),
            **_fused(128, 16),
        ),
        *(
            head_case(f"128 rows, r{r}", fused, absent=("h_r_ptr", *PLAIN), **_flags(), **_fused(128, r))
            for r in (64, 128)
        ),
        head_case("64 rows, r64", fused, absent=("h_r_ptr", *PLAIN), **_flags(), **_fused(64, 64)),
        head_case(
            "32 rows, fp32",
            fused,
            absent=("h_r_ptr", *NO_LORA, *PLAIN),
            types=_FP32,
            **_flags(),
            **_fused(32, dtype=torch.float32),
        ),
        head_case("exact, bf16", fused, absent=("h_r_ptr", *NO_LORA, *PLAIN), **_flags(), **_exact(plain=True)),
        head_case(
            "exact, bf16, every output and option",
            fused,
            absent=("h_r_ptr",),
            **_flags(*FLAGS, softcap=True),
            **_exact(plain=False, rank=16),
        ),
        head_case(
            "exact, fp32",
            fused,
            absent=("h_r_ptr", *NO_LORA, *PLAIN),
            types=_FP32,
            **_flags(),
            **_exact(4, plain=True),
        ),
        head_case(
            "16 rows, fp32",
            fused,
            absent=("h_r_ptr", *NO_LORA, *PLAIN),
            types=_FP32,
            **_flags(),
            **_fused(16, dtype=torch.float32),
        ),
        *(
            head_case(f"{rows} rows, runs", fused, absent=("h_r_ptr", *PLAIN), runs=True, **_flags(), **_fused(rows))
            for rows in (64, 16)
        ),
        head_case(
            "16 rows, runs, fp32",
            fused,
            absent=("h_r_ptr", *PLAIN),
            types=_FP32,
            runs=True,
            **_flags(),
            **_fused(16, dtype=torch.float32),
        ),
        head_case(
            "exact, bf16, runs, every output and option",
            fused,
            absent=("h_r_ptr",),
            runs=True,
            **_flags(*FLAGS, softcap=True),
            **_exact(plain=False),
        ),
        head_case(
            "exact, fp32, runs",
            fused,
            absent=("h_r_ptr", *PLAIN),
            types=_FP32,
            runs=True,
            **_flags(),
            **_exact(4, plain=False),
        ),
        head_case("one state", kernels.finish_kernel, absent=(*no_pair, *unasked), SPLITS=1, R=128),
        head_case("256 states, every output", kernels.finish_kernel, absent=no_pair, SPLITS=256, R=1),
        head_case("E", kernels.normalise_kernel, absent=no_d, **_ROW),
        head_case(
            "bf16",
            kernels.from_expected_kernel,
            absent=_ONLY_LOGPROB,
            types={"out_ptr": "*bf16"},
            SOFTCAP=False,
            **_ROW,
        ),
        head_case(
            "logprob", kernels.grad_tile_kernel, absent=(*pair_rows, *statistics, *PLAIN), SOFTCAP=False, **_GRAD
        ),
        head_case(
            "every output and option",
            kernels.grad_tile_kernel,
            absent=pair_rows,
            SOFTCAP=True,
            **_GRAD,
        ),
    ]


def pair_cases() -> list[AotCase]:
    """bf16 with a reference's rows: few rows, many rows, both gradients ahead."""
    fold, fused = kernels.fold_tile_kernel, kernels.fused_kernel
    kept = ("mean_ptr", "sum_sq_ptr", "top_ptr")
    grads = ("sum_sq_ptr", "d_sum_sq_ptr", "d_mean_ptr", "d_lse_ptr", "entropy_ptr", "d_entropy_ptr")
    return [
        head_case("128 rows", fused, absent=(*NO_LORA, *PLAIN), **_flags(), **_fused(128)),
        head_case("64 rows", fused, absent=(*NO_LORA, *PLAIN), **_flags(), **_fused(64)),
        head_case(
            "32 rows, fp32",
            fused,
            absent=(*NO_LORA, *PLAIN),
            types=_FP32,
            **_flags(),
            **_fused(32, dtype=torch.float32),
        ),
        *(head_case(f"128 rows, r{r}", fused, absent=PLAIN, **_flags(), **_fused(128, r)) for r in (16, 64, 128)),
        head_case("64 rows, r64", fused, absent=PLAIN, **_flags(), **_fused(64, 64)),
        head_case("16 rows, r64", fused, absent=PLAIN, **_flags(), **_fused(16, 64)),
        head_case(
            "32 rows, r64, fp32",
            fused,
            absent=PLAIN,
            types=_FP32,
            **_flags(),
            **_fused(32, 64, torch.float32),
        ),
        head_case("exact, bf16", fused, absent=(*NO_LORA, *PLAIN), **_flags(), **_exact(plain=True)),
        head_case("exact, bf16, r64", fused, absent=PLAIN, **_flags(), **_exact(plain=False, rank=64)),
        head_case("bf16", fold, absent=PLAIN, **_flags(), **_FOLD),
        head_case("256 states", kernels.finish_kernel, absent=kept, SPLITS=256, R=1),
        head_case("E and D", kernels.normalise_kernel, **_ROW),
        head_case(
            "E and D, bf16",
            kernels.from_expected_kernel,
            absent=("temperature_ptr", "d_lse_ptr", "on_target_ptr"),
            types={"out_ptr": "*bf16"},
            SOFTCAP=False,
            **_ROW,
        ),
        head_case("logprob and kl", kernels.grad_tile_kernel, absent=(*grads, *PLAIN), SOFTCAP=False, **_GRAD),
    ]


def ppo_cases() -> list[AotCase]:
    """bf16 with the gradient in fp32."""
    return [head_case("bf16", kernels.from_expected_kernel, absent=_ONLY_LOGPROB, SOFTCAP=False, **_ROW)]
