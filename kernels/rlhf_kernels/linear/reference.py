"""Products of a linear layer in plain torch: what `F.linear` and its derivative call."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [.., M] = x [.., K] Wᵀ + b, in x's own shape, dense."""
    return F.linear(x, weight, bias).contiguous()


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dx [.., K] = dy [.., M] W."""
    return dy @ weight


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dW [M, K] = dyᵀ x over all rows."""
    dy, x = (t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in (dy, x))
    return dy.t() @ x
