"""Scalar heads: one number per hidden state, in fp32 whatever the backbone's dtype."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn import functional as F


class ScalarHead(nn.Module):
    """h ↦ w·h + b. A value head starts at zero, so that a fresh critic predicts 0 everywhere."""

    def __init__(self, hidden_size: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [*, H] in any float dtype → fp32 [*]."""
        return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias).squeeze(-1)


def warn_if_zero(head: nn.Module) -> None:
    """Warn of a reward head that was neither loaded nor trained."""
    if not any(weight.any() for weight in head.parameters()):
        warnings.warn(
            "role 'reward': expected a head that was loaded or trained, got one of zeros, so that every reward is 0.0",
            stacklevel=4,  # whoever has called `score`, past its decorator
        )
