"""One AdamW over all that is trained: one owner per parameter, stateless schedule, clipping by role."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from rlhf_engine.config.training import Optim, TrainingOptions
from rlhf_engine.errors import ConfigError, NonFiniteError
from rlhf_engine.hydra import HydraModel
from rlhf_engine.policy.adamw import HALF, AdamW


def require_warm_up(warmup_steps: int, total_steps: int) -> None:
    """Raise ConfigError for a warm-up that is longer than the run."""
    if warmup_steps > total_steps:
        raise ConfigError(f"warmup_steps: expected at most the run's {total_steps} steps, got {warmup_steps}")


def lr_factor(step: int, *, kind: str, warmup_steps: int, total_steps: int) -> float:
    """Multiple of the learning rate at `step` (from 0): linear warm-up, then constant, or to 0 by a line or a cosine.

    A function of the step alone: there is no schedule state to save or to lose.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if kind == "linear":
        return 1.0 - progress
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    raise ValueError(f"lr_scheduler_type: expected 'constant', 'linear' or 'cosine', got {kind!r}")


class RoleOptimizer:
    """One AdamW with a parameter group per role. A parameter that two roles share belongs to the first."""

    def __init__(
        self,
        model: HydraModel,
        learning_rates: Mapping[str, float],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 1.0,
        optim: Optim = "adamw",
        seed: int = 0,
    ) -> None:
        """optim: what the state is made of, see `training.adamw`. seed: of stochastic rounding."""
        self.model = model
        self.learning_rates = dict(learning_rates)
        self.max_grad_norm = max_grad_norm
        self.is_whole = True
        """Whether no weight has changed since the last whole step of the run, at whose end the trainer sets it."""
        self.groups: dict[str, dict[str, nn.Parameter]] = {}
        taken: set[int] = set()
        for role in learning_rates:
            own = {n: p for n, p in model.trainable_parameters(role).items() if id(p) not in taken}
            taken |= {id(p) for p in own.values()}
            if own:
                self.groups[role] = own
        left = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in taken]
        if left:
            raise ValueError(f"learning_rates: expected a role for every trained parameter, got none for {left[:3]}")
        self.adamw = AdamW(
            list(self.groups.values()), optim=optim, seed=seed, betas=betas, eps=eps, weight_decay=weight_decay
        )
        self.set_lr_factor(1.0)

    @classmethod
    def configured(
        cls, model: HydraModel, learning_rates: Mapping[str, float], config: TrainingOptions
    ) -> RoleOptimizer:
        """The optimizer that a command's options describe."""
        return cls(
            model,
            learning_rates,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            max_grad_norm=config.largest_grad_norm,
            optim=config.optim,
            seed=config.seed,
        )

    def set_lr_factor(self, factor: float) -> None:
        """Scale every role's learning rate."""
        self.adamw.set_lr([self.learning_rates[role] * factor for role in self.groups])

    def step(self) -> dict[str, float]:
        """Clip each role's gradient, apply, clear; by role the norm before clipping, and 1 or 0: was it clipped?

        Raises NonFiniteError, before anything is applied, naming the role whose gradient is not finite.
        """
        norms = {}
        for role, group in self.groups.items():
            gradients = [p.grad for p in group.values() if p.grad is not None]
            if not gradients:
                continue
            # each on its own where a norm in the gradient's dtype would have 8 bits
            norm = torch.nn.utils.get_total_norm(
                [torch.linalg.vector_norm(g, dtype=torch.float32) if g.dtype in HALF else g for g in gradients]
            )
            if not math.isfinite(float(norm)):
                # finite gradients can have a norm that overflows
                bad = [n for n, p in group.items() if p.grad is not None and not p.grad.isfinite().all()]
                place = f"first in {bad[0]}" if bad else "its norm overflows"
                self.adamw.zero_grad()
                raise NonFiniteError(f"gradient of {role} is not finite, {place}; nothing was applied")
            norms[f"grad_norm/{role}"] = float(norm)
        clipped = {}
        for role, group in self.groups.items():
            if f"grad_norm/{role}" not in norms:
                continue
            total = norms[f"grad_norm/{role}"]
            clipped[f"grad_clipped/{role}"] = float(self.max_grad_norm is not None and total > self.max_grad_norm)
            if self.max_grad_norm is not None:
                with_gradient = [p for p in group.values() if p.grad is not None]
                torch.nn.utils.clip_grads_with_norm_(with_gradient, self.max_grad_norm, torch.tensor(total))
        self.is_whole = False
        self.adamw.step()
        return norms | clipped

    def has_stepped(self, role: str) -> bool:
        """Whether a step has been applied to some parameter of a role, before a run was taken up again included."""
        return any(self.adamw.has_stepped(name) for name in self.groups[role])

    def weights(self, role: str) -> Iterator[torch.Tensor]:
        """Tensors of a role that steps change, one by one; masters where the parameters are rounded copies."""
        return (self.adamw.weights(name) for name in self.groups[role])

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Masters, moments and step counts as flat named tensors, for safetensors."""
        return self.adamw.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `state_tensors`. Raises ValueError for the state of other parameters or of another `optim`."""
        self.adamw.load_state_tensors(tensors)
