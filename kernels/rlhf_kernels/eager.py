"""May a call go straight to an implementation, or does it need the registered op?

A call through `torch.library` costs tens of microseconds and buys what transformations need: a fake for tracing, a
node in a graph, an error under `torch.func`. In plain eager execution nobody asks for these, and a public function may
call the implementation directly, with a `torch.autograd.Function` of its own where a gradient is wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch.nn import Parameter

_PLAIN_TYPES = (Tensor, Parameter)


def eager(*tensors: Tensor | None) -> bool:
    """True if all tensors are plain ones and nothing watches or transforms the calls made now.

    False while compiling or tracing, in an active torch dispatch or torch function mode, under `torch.func`, and for
    tensor subclasses and lazily negated or zero tensors. None stands for an argument that was not given.
    """
    if (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
    ):
        return False
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN_TYPES or x.is_neg() or x._is_zerotensor()):
            return False
    return True
