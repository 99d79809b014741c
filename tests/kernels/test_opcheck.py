"""`torch.library.opcheck` on every registered op: its schema, its fake tensors, its autograd formula, its traces."""

import pytest
import torch

from .checks import BACKENDS
from .direct_calls import CALLS, WITHOUT_REFERENCE, ops

OPS = ops()
OF_KERNELS = {"attention", "attention_backward"}  # their reference is differentiated by autograd, and no op
INFERENCE = {"sample", "decode_attention", "masked_moments"}
PLAIN = {
    "linear_ppo_loss": {"kl_coef": 0.0, "entropy_coef": 0.0, "needs": ""},
    "linear_backward": {"need_weight": False},
    "lora_delta": {"p": [0.0, 0.0]},
    "lora_linear": {"p": [0.0, 0.0]},
    "lora_delta_backward": {"p": [0.0, 0.0], "need_A": [True, False]},
    "lora_linear_backward": {"p": [0.0, 0.0], "need_x": False, "need_A": [False, True]},
    "linear_logprob": {"outputs": "logprob", "ahead": False},
    "linear_logprob_backward": {"needs": "hidden"},
    "linear_logprob_pair": {"ahead": ""},
    "ppo_loss": {"kl_coef": 0.0, "entropy_coef": 0.0},
    "ppo_loss_backward": {"need_entropy": False},
    "rms_norm": {"plus_one": False},
    "rms_norm_gradient": {"plus_one": True},
    "value_loss": {"clip": None},
}
"""Arguments of a second call, in which all tensors that may be None are."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.long)])
def test_opcheck(backend, plain):
    for name, op in OPS.items():
        schema = {argument.name: str(argument.type) for argument in op._schema.arguments}
        if backend == "reference" and (name in WITHOUT_REFERENCE or name in OF_KERNELS or "backend" not in schema):
            continue
        given = CALLS[name]() | ({"backend": backend} if "backend" in schema else {})
        trained = name not in INFERENCE and not name.rstrip("_").endswith(("_backward", "_gradient"))
        if plain:
            given |= {n: None for n, kind in schema.items() if kind == "Optional[Tensor]"} | PLAIN.get(name, {})
        elif trained:
            for x in [x for value in given.values() for x in (value if isinstance(value, list) else [value])]:
                if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim():
                    x.requires_grad_()
        try:
            torch.library.opcheck(op, (), given)
        except Exception as error:
            error.add_note(f"{name}, {given}")
            raise
