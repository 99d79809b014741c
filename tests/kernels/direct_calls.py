"""A right call of every registered op, and what becomes of it when one argument is wrong."""

from __future__ import annotations

import copy
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import rlhf_kernels
import torch
from torch import Tensor

N, H, V, R, K, M = 6, 32, 40, 3, 32, 16


def _ops() -> dict[str, Any]:
    for module in pkgutil.iter_modules(rlhf_kernels.__path__):
        if module.ispkg:
            importlib.import_module(f"rlhf_kernels.{module.name}")
    names = [schema.name for schema in torch._C._jit_get_all_schemas()]
    return {
        name.split("::")[1]: getattr(torch.ops.rlhf_kernels, name.split("::")[1]).default
        for name in sorted(names)
        if name.startswith("rlhf_kernels::")
    }


OPS = _ops()
"""Name of every registered op: what `torch.ops` has for it."""


def _x(*shape: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, max(1, torch.Size(shape).numel())).reshape(shape)


# ---- a right argument by its name ------------------------------------------------------------------------------------

_PER_ROW = (
    "lse_a lse_r kl lse entropy logprob logprob_a logprob_r log_sum_sq_prob d_logprob d_kl d_entropy d_lse "
    "d_mean_logit d_log_sum_sq_prob old_logprob new_logprob ref_logprob advantage bootstrap value old_value ret dloss"
)
_SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_PER_ROW.split(), (N,)),
    **dict.fromkeys(("hidden", "hidden_a", "hidden_r", "expected", "expected_kl"), (N, H)),
    **{"weight": (V, H), "bias": (V,), "lora_A": (R, H), "lora_B": (V, R), "logits": (2, 3, V)},
    **dict.fromkeys(("x", "gate", "up", "grad", "dy", "reward", "grad_advantage", "grad_ret"), (N, 5)),
    **{"q": (N, 4, 8), "k": (N, 2, 8), "v": (N, 2, 8), "out": (N, 4, 8), "d_out": (N, 4, 8), "sinks": (4,)},
    **{"k_cache": (9, 4, 2, 8), "v_cache": (9, 4, 2, 8), "cos": (1, 5, 8), "sin": (1, 5, 8)},
}
_MADE: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("target", "seed", "position", "row_ids"), lambda: torch.arange(N)),
    **dict.fromkeys(("mask", "greedy", "forbids"), lambda: torch.ones(N, dtype=torch.bool)),
    "row_temperature": lambda: torch.ones(N),
    "denom": lambda: torch.tensor(3.0),
    "grad_loss": lambda: torch.tensor(1.0),
    "forbidden": lambda: torch.arange(3),
    "A": lambda: [_x(R, K), _x(R + 1, K)],
    "B": lambda: [_x(M, R), _x(M, R + 1)],
    "run_A": lambda: [_x(R + 1, H), _x(1, H)],
    "run_B": lambda: [_x(V, R + 1), _x(V, 1)],
}
_NO_TENSORS = {
    **{"lengths": [4, 2], "need_A": [True, True], "need_B": [True, True], "seed": 1},
    **{"parents": [-1, 0], "scales": [1.0, 2.0], "starts": [0, 3], "ends": [2, 6], "slots": [0, 1], "p": [0.1, 0.0]},
    **{"run_scales": [1.0, 2.0], "run_starts": [1, 3], "run_ends": [2, 6], "run_slots": [0, 1]},
    **{"scale": 1.0, "window": 3, "lora_scale": 0.5, "temperature": 1.0, "logit_scale": 1.0, "eps": 1e-8},
    **{"gamma": 0.9, "lam": 0.9, "clip_low": 0.2, "clip_high": 0.2, "clip": 0.2, "kl_coef": 0.1, "entropy_coef": 0.1},
    **{"kl": "k3", "dual_clip": None, "ignore_index": -100, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "stream": 0},
    **{"outputs": "logprob,entropy", "softcap": 0.0, "inplace_backward": False, "constant_moments": False},
}
"""Other flags are True."""
_LANES = {"weight": (M, K), "bias": (M,), "ddelta": (5, M)}
_WHOLE = {"mask": lambda: torch.ones(N, 5, dtype=torch.bool), "value": (N, 5)}
_LINEAR = {"x": (2, 3, K), "weight": (M, K), "bias": (M,), "dy": (2, 3, M)}
_NORM = {"x": (2, 3, H), "weight": (H,), "dy": (2, 3, H), "rstd": (2, 3, 1)}
_TURNED = {"q": (2, 4, 5, 8), "k": (2, 2, 5, 8), "d_q": (2, 4, 5, 8), "d_k": (2, 2, 5, 8)}
_OTHERWISE: dict[str, dict[str, Any]] = {
    "activation": {"kind": "gelu"},
    "activation_gradient": {"kind": "gelu_tanh"},
    "attention": {"softcap": 2.0},
    "attention_backward": {"softcap": 2.0, "totals": lambda: torch.ones(N, 4, 2)},
    "decode_attention": {
        "lengths": lambda: torch.arange(N) + 1,
        "block_table": lambda: torch.arange(2 * N).reshape(N, 2) % 9,
        **{"window": None, "softcap": None},
    },
    **dict.fromkeys(("gae", "gae_backward", "masked_moments"), _WHOLE),
    **dict.fromkeys(("linear", "linear_backward"), _LINEAR),
    "linear_logprob_backward": {"needs": "hidden,weight,bias,lora_A,lora_B,run_A0,run_B0,run_B1"},
    "linear_logprob_pair": {"ahead": "logprob,kl"},
    "linear_ppo_loss": {"needs": "hidden,weight"},
    **dict.fromkeys(("lora_delta", "lora_delta_backward"), _LANES | {"x": (N, K)}),
    **dict.fromkeys(("lora_linear", "lora_linear_backward"), _LANES | _LINEAR),
    "rms_norm": _NORM | {"eps": 1e-6},
    "rms_norm_gradient": _NORM | {"plus_one": False},
    **dict.fromkeys(("rotary", "rotary_gradient"), _TURNED),
    "whiten": _WHOLE | {"moments": lambda: torch.tensor([30.0, 1.0, 20.0]).double()},
    "whiten_backward": _WHOLE | {"stats": lambda: torch.tensor([30.0, 0.0, 1.0]).double()},
}
"""What an op has in another way than its name says: the shape of a tensor, what makes it, or a number."""


def right_call(name: str) -> dict[str, Any]:
    """Arguments of an op that are right, by name, but for the backend."""
    given, own = {}, _OTHERWISE.get(name, {})
    for argument, kind in ((a.name, str(a.type)) for a in OPS[name]._schema.arguments if a.name != "backend"):
        by_name = _SHAPES | _MADE if "Tensor" in kind else _NO_TENSORS
        value = True if kind == "bool" and argument not in own | by_name else (by_name | own)[argument]
        if callable(value):
            given[argument] = value()
        else:
            given[argument] = _x(*value) if "Tensor" in kind else copy.copy(value)
    return given


CALLS: dict[str, Callable[[], dict[str, Any]]] = {name: functools.partial(right_call, name) for name in OPS}
"""Name of an op: what makes the arguments of a right call."""

WITHOUT_REFERENCE = {
    f"{op}{direction}" for op in ("rms_norm", "rotary", "swiglu", "activation") for direction in ("", "_gradient")
}
"""Ops whose reference is plain torch, which no registered op runs."""

_ANY_ROWS = {("x", "fewer"), ("x", "one"), ("x", "empty"), ("x", "another dimension")}
_WEIGHTS = {("mask", "another kind")}  # of a bool mask that makes floats
FREE: dict[str, set[tuple[str, str]]] = {
    "activation": {*_ANY_ROWS, ("x", "narrower")},
    "gather_logprob": {("logits", "narrower"), ("logits", "another dimension")},
    "gather_logprob_backward": {("logits", "narrower"), ("logits", "another dimension")},
    "gather_logprob_backward_": {("logits", "narrower"), ("logits", "another dimension")},
    "linear": _ANY_ROWS,
    "linear_ppo_loss": _WEIGHTS,
    "lora_linear": {("x", "another dimension")},
    "ppo_loss": _WEIGHTS,
    "ppo_loss_backward": _WEIGHTS,
    "rms_norm": _ANY_ROWS,
    "sample": {("forbidden", "fewer"), ("forbidden", "one"), ("forbidden", "empty")},
    "value_loss": _WEIGHTS,
    "value_loss_backward": {("dloss", "fewer"), ("dloss", "one"), ("dloss", "empty")},
}
"""Changes that leave a call right."""

MUTATIONS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "fewer": lambda x: x[:-1].clone() if x.dim() else None,
    "narrower": lambda x: x[..., :-1].clone() if x.dim() > 1 else None,
    "one": lambda x: x[:1].clone() if x.dim() and x.shape[0] > 1 else None,
    "empty": lambda x: x[:0].clone() if x.dim() else None,
    "another dimension": lambda x: x[None].clone(),
    "complex": lambda x: x.to(torch.complex64),
    "another kind": lambda x: x.to(torch.int16) if x.dtype in (torch.float32, torch.float64) else x.float(),
}


def mutated(name: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(argument, mutation, arguments) of the op's call, each tensor wrong in every way."""
    for argument, value in CALLS[name]().items():
        tensors = value if isinstance(value, list) else [value]
        for i, x in enumerate(tensors):
            if not isinstance(x, Tensor):
                continue
            for mutation, change in MUTATIONS.items():
                wrong = change(x)
                if wrong is None:
                    continue
                arguments = CALLS[name]()
                where = argument
                if isinstance(value, list):
                    arguments[argument][i], where = wrong, f"{argument}[{i}]"
                else:
                    arguments[argument] = wrong
                yield where, mutation, arguments
