"""A right call of every registered op, and what becomes of it when one argument is wrong."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import rlhf_kernels
import torch
from torch import Tensor

N, H, V, R, K, M = 6, 32, 40, 3, 32, 16


def ops() -> dict[str, Any]:
    """Name of every registered op: what `torch.ops` has for it."""
    for module in pkgutil.iter_modules(rlhf_kernels.__path__):
        if module.ispkg:
            importlib.import_module(f"rlhf_kernels.{module.name}")
    names = [schema.name for schema in torch._C._jit_get_all_schemas()]
    return {
        name.split("::")[1]: getattr(torch.ops.rlhf_kernels, name.split("::")[1]).default
        for name in sorted(names)
        if name.startswith("rlhf_kernels::")
    }


def _x(*shape: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, max(1, torch.Size(shape).numel())).reshape(shape)


def _keep(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def _rows(n: int = N) -> Tensor:
    return torch.arange(n)


def _head() -> dict[str, Any]:
    return {"bias": _x(V), "lora_A": _x(R, H), "lora_B": _x(V, R), "row_temperature": torch.ones(N)}


_HEAD_NUMBERS = {"lora_scale": 0.5, "temperature": 1.0, "softcap": 0.0, "logit_scale": 1.0}
_NO_HEAD = {"bias": None, "lora_A": None, "lora_B": None, "row_temperature": None}


def _lanes() -> dict[str, Any]:
    return {
        "A": [_x(R, K), _x(R + 1, K)],
        "B": [_x(M, R), _x(M, R + 1)],
        "scales": [1.0, 2.0],
        "starts": [0, 3],
        "ends": [2, 6],
        "slots": [0, 1],
        "p": [0.1, 0.0],
        "seed": 1,
        "row_ids": _rows(),
        "stream": 0,
    }


def _needs() -> dict[str, Any]:
    return {"need_A": [True, True], "need_B": [True, True]}


def _statistics() -> dict[str, Any]:
    return {name: _x(N) for name in ("lse", "entropy", "log_sum_sq_prob")}


def _row_gradients() -> dict[str, Any]:
    return {f"d_{name}": _x(N) for name in ("logprob", "entropy", "lse", "mean_logit", "log_sum_sq_prob")}


def _gathered() -> dict[str, Any]:
    rows = {"target": _rows(), "row_temperature": torch.ones(N), "temperature": 1.0, "ignore_index": -100}
    return {"logits": _x(2, 3, V), **rows}


def _tokens() -> dict[str, Any]:
    return {"target": _rows(), "old_logprob": _x(N), "advantage": _x(N), "mask": _keep(N)}


_KNOBS = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.1}
_PPO = {"new_logprob": (N,), "old_logprob": (N,), "advantage": (N,)}
_ANGLES = {"cos": (1, 5, 8), "sin": (1, 5, 8)}


def _named(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    return {name: _x(*shape) for name, shape in shapes.items()}


_PACKED = {"lengths": [4, 2], "parents": [-1, 0], "scale": 1.0, "window": 3, "softcap": 2.0}
_HEADS = {"q": (N, 4, 8), "k": (N, 2, 8), "v": (N, 2, 8), "sinks": (4,)}

CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "activation": lambda: {"x": _x(N, 5), "kind": "gelu"},
    "activation_gradient": lambda: {**_named({"dy": (N, 5), "x": (N, 5)}), "kind": "gelu_tanh"},
    "attention": lambda: _named(_HEADS) | _PACKED,
    "attention_backward": lambda: {
        **_named({"d_out": (N, 4, 8), **_HEADS, "out": (N, 4, 8)}),
        "totals": torch.ones(N, 4, 2),
        **_PACKED,
    },
    "decode_attention": lambda: {
        **_named({"q": (N, 4, 8), "k_cache": (9, 4, 2, 8), "v_cache": (9, 4, 2, 8)}),
        "lengths": _rows() + 1,
        "block_table": torch.arange(2 * N).reshape(N, 2) % 9,
        **{"scale": 1.0, "window": None, "softcap": None, "sinks": _x(4)},
    },
    "gae": lambda: {
        **_named({"reward": (N, 5), "value": (N, 5)}),
        "mask": _keep(N, 5),
        "bootstrap": _x(N),
        **{"gamma": 0.9, "lam": 0.9},
    },
    "gae_backward": lambda: {
        **_named({"grad_advantage": (N, 5), "grad_ret": (N, 5)}),
        "mask": _keep(N, 5),
        **{"gamma": 0.9, "lam": 0.9},
    },
    "gather_logprob": lambda: {**_gathered(), "outputs": "logprob,entropy", "inplace_backward": False},
    "gather_logprob_backward": lambda: {**_gathered(), **_statistics(), **_row_gradients()},
    "gather_logprob_backward_": lambda: {**_gathered(), **_statistics(), **_row_gradients()},
    "linear": lambda: _named({"x": (2, 3, K), "weight": (M, K), "bias": (M,)}),
    "linear_backward": lambda: {
        **_named({"dy": (2, 3, M), "x": (2, 3, K), "weight": (M, K)}),
        **{"need_x": True, "need_weight": True, "need_bias": True},
    },
    "linear_logprob": lambda: {
        **_named({"hidden": (N, H), "weight": (V, H)}),
        "target": _rows(),
        **_head(),
        **_HEAD_NUMBERS,
        **{"ignore_index": -100, "outputs": "logprob,entropy", "ahead": True},
    },
    "linear_logprob_backward": lambda: {
        **_named({"hidden": (N, H), "weight": (V, H)}),
        "target": _rows(),
        **_head(),
        **_HEAD_NUMBERS,
        "ignore_index": -100,
        "logprob": _x(N),
        **_statistics(),
        "expected": _x(N, H),
        **_row_gradients(),
        "needs": "hidden,weight,bias,lora_A,lora_B",
    },
    "linear_logprob_pair": lambda: {
        **_named({"hidden_a": (N, H), "hidden_r": (N, H), "weight": (V, H)}),
        "target": _rows(),
        **_head(),
        **_HEAD_NUMBERS,
        **{"ignore_index": -100, "ahead": "logprob,kl"},
    },
    "linear_logprob_pair_backward": lambda: {
        **_named({"hidden_a": (N, H), "hidden_r": (N, H), "weight": (V, H)}),
        "target": _rows(),
        **_head(),
        **_HEAD_NUMBERS,
        "ignore_index": -100,
        **{name: _x(N) for name in ("logprob_a", "logprob_r", "lse_a", "lse_r", "kl", "entropy")},
        **_named({"expected": (N, H), "expected_kl": (N, H)}),
        **{name: _x(N) for name in ("d_logprob", "d_kl", "d_entropy")},
    },
    "linear_ppo_loss": lambda: {
        **_named({"hidden": (N, H), "weight": (V, H)}),
        **_tokens(),
        "denom": torch.tensor(3.0),
        "ref_logprob": _x(N),
        **_head(),
        **_HEAD_NUMBERS,
        "ignore_index": -100,
        **_KNOBS,
        "needs": "hidden,weight",
    },
    "lora_delta": lambda: {"x": _x(N, K), **_lanes()},
    "lora_delta_backward": lambda: {**_named({"ddelta": (5, M), "x": (N, K)}), **_lanes(), "need_x": True, **_needs()},
    "lora_linear": lambda: {**_named({"x": (2, 3, K), "weight": (M, K), "bias": (M,)}), **_lanes()},
    "lora_linear_backward": lambda: {
        **_named({"dy": (2, 3, M), "x": (2, 3, K), "weight": (M, K)}),
        **_lanes(),
        **{"need_x": True, "need_weight": True, "need_bias": True},
        **_needs(),
    },
    "masked_moments": lambda: {"x": _x(N, 5), "mask": _keep(N, 5)},
    "ppo_loss": lambda: {
        **_named(_PPO),
        "mask": _keep(N),
        "denom": torch.tensor(3.0),
        "ref_logprob": _x(N),
        "entropy": _x(N),
        **_KNOBS,
    },
    "ppo_loss_backward": lambda: {
        "grad_loss": torch.tensor(1.0),
        "dloss": _x(N),
        "mask": _keep(N),
        "denom": torch.tensor(3.0),
        **{"entropy_coef": 0.1, "need_new_logprob": True, "need_entropy": True},
    },
    "rms_norm": lambda: {**_named({"x": (2, 3, H), "weight": (H,)}), "eps": 1e-6, "plus_one": True},
    "rms_norm_gradient": lambda: {
        **_named({"dy": (2, 3, H), "x": (2, 3, H), "weight": (H,), "rstd": (2, 3, 1)}),
        "plus_one": False,
    },
    "rotary": lambda: _named({"q": (2, 4, 5, 8), "k": (2, 2, 5, 8), **_ANGLES}),
    "rotary_gradient": lambda: _named({"d_q": (2, 4, 5, 8), "d_k": (2, 2, 5, 8), **_ANGLES}),
    "sample": lambda: {
        **_named({"hidden": (N, H), "weight": (V, H)}),
        **{"seed": _rows(), "position": _rows(), "greedy": _keep(N), "forbidden": _rows(3), "forbids": _keep(N)},
        **_head(),
        **_HEAD_NUMBERS,
        **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, "with_entropy": True},
    },
    "swiglu": lambda: _named({"gate": (N, 5), "up": (N, 5)}),
    "swiglu_gradient": lambda: _named({"dy": (N, 5), "gate": (N, 5), "up": (N, 5)}),
    "value_loss": lambda: {
        **_named({"value": (N,), "old_value": (N,), "ret": (N,)}),
        "mask": _keep(N),
        "denom": torch.tensor(3.0),
        "clip": 0.2,
    },
    "value_loss_backward": lambda: {"grad_loss": torch.tensor(1.0), "dloss": _x(N)},
    "whiten": lambda: {
        "x": _x(N, 5),
        "mask": _keep(N, 5),
        "moments": torch.tensor([30.0, 1.0, 20.0]).double(),
        **{"shift_mean": True, "eps": 1e-8},
    },
    "whiten_backward": lambda: {
        **_named({"grad": (N, 5), "x": (N, 5)}),
        "mask": _keep(N, 5),
        "stats": torch.tensor([30.0, 0.0, 1.0]).double(),
        **{"shift_mean": True, "constant_moments": False},
    },
}
"""Name of an op: arguments that are right, by name, but for the backend."""

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
