"""Parameters of which each process holds a share (FSDP2's DTensors): shares of whole tensors, and the way back.

A share is a run of rows, those of rank 0 first. FSDP and `torch.chunk` cut alike, so that late ranks may have none.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def own_share(p: nn.Parameter) -> nn.Parameter:
    """A parameter to optimize here: the parameter itself, or its share, whose gradients add up in float32."""
    if not isinstance(p, DTensor):
        return p
    if p.requires_grad and p.dtype.itemsize < torch.float32.itemsize:
        p.grad_dtype = None  # any
        p.register_post_accumulate_grad_hook(_widen_gradient)
    return nn.Parameter(p.to_local().detach(), requires_grad=p.requires_grad)


def _widen_gradient(p: torch.Tensor) -> None:
    if p.grad is not None and p.grad.dtype != torch.float32:  # FSDP adds further ones to it as it is
        p.grad = p.grad.float()


def cut(whole: torch.Tensor, p: DTensor) -> torch.Tensor:
    """This process's rows of a tensor that is shared out as a parameter is."""
    mesh = p.device_mesh
    size = -(-len(whole) // mesh.size())
    return whole[size * mesh.get_local_rank() :][:size]


def join(share: torch.Tensor, p: DTensor) -> torch.Tensor:
    """The whole tensor of which each process has its rows, as of a parameter. All processes call it together."""
    sharded = DTensor.from_local(share, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
    return sharded.full_tensor()


@torch.no_grad()
def copy_whole(p: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter, or its rows into the share of it that is held here."""
    if isinstance(p, DTensor):
        p.to_local().copy_(cut(whole, p))
    else:
        p.copy_(whole)


def state_of(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Tensors of a model that is whole for the moment, by name; None where `state_dict` gives them (not FSDP)."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return None
    buffers = {
        f"{path}.{name}".removeprefix("."): buffer
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    return {**{name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}, **buffers}
