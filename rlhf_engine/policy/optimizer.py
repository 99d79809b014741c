"""One AdamW over all that is trained: one owner per parameter, stateless schedule, clipping by role."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlhf_engine.config.run import Optim, TrainingOptions
from rlhf_engine.distributed.process_group import ALONE, World
from rlhf_engine.errors import ConfigError, NonFiniteError
from rlhf_engine.hydra import HydraModel
from rlhf_engine.hydra.shares import cut, join, own_share
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
    """One AdamW with a parameter group per role. A parameter that two roles share belongs to the first.

    Of a base in shares, each rank steps its own. They stand in the groups, and get the gradients that FSDP has summed.
    """

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
        world: World = ALONE,
    ) -> None:
        """optim: what the state is made of, see `training.adamw`. seed: of stochastic rounding. world: who learns."""
        self.model, self._world = model, world
        self.learning_rates = dict(learning_rates)
        self.max_grad_norm = max_grad_norm
        self.is_whole = True
        """Whether no weight has changed since the last whole step of the run, at whose end the trainer sets it."""
        self.groups: dict[str, dict[str, nn.Parameter]] = {}
        self._shared: dict[str, tuple[nn.Parameter, DTensor]] = {}
        """Shares that this rank steps, and the parameters of which they are."""
        self._gathered: dict[str, torch.Tensor] | None = None
        """Tensors that `state_tensors` returns within `whole`."""
        taken: set[int] = set()
        for role in learning_rates:
            own = {n: p for n, p in model.trainable_parameters(role).items() if id(p) not in taken}
            taken |= {id(p) for p in own.values()}
            if own:
                self.groups[role] = {n: own_share(p) for n, p in own.items()}
                self._shared |= {n: (self.groups[role][n], p) for n, p in own.items() if isinstance(p, DTensor)}
        left = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in taken]
        if left:
            raise ValueError(f"learning_rates: expected a role for every trained parameter, got none for {left[:3]}")
        self.adamw = AdamW(
            list(self.groups.values()), optim=optim, seed=seed, betas=betas, eps=eps, weight_decay=weight_decay
        )
        self.set_lr_factor(1.0)

    @classmethod
    def configured(
        cls, model: HydraModel, learning_rates: Mapping[str, float], config: TrainingOptions, world: World = ALONE
    ) -> RoleOptimizer:
        """The optimizer that a command's options describe."""
        return cls(
            model,
            learning_rates,
            betas=(0.9, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            max_grad_norm=config.largest_grad_norm,
            optim=config.optim,
            seed=config.seed,
            world=world,
        )

    @property
    def is_sharded(self) -> bool:
        """Whether ranks step shares."""
        return bool(self._shared)

    def replicated(self) -> list[nn.Parameter]:
        """Parameters that every rank steps alike."""
        return [p for group in self.groups.values() for name, p in group.items() if name not in self._shared]

    def set_lr_factor(self, factor: float) -> None:
        """Scale every role's learning rate."""
        self.adamw.set_lr([self.learning_rates[role] * factor for role in self.groups])

    def step(self) -> dict[str, float]:
        """Clip each role's gradient, apply, clear; by role the norm before clipping, and 1 or 0: was it clipped?

        Raises NonFiniteError, before anything is applied, naming the role whose gradient is not finite.
        """
        for share, p in self._shared.values():
            assert p.grad is None or isinstance(p.grad, DTensor)
            share.grad, p.grad = None if p.grad is None else p.grad.to_local(), None
        norms = {}
        for role, group in self.groups.items():
            if all(p.grad is None for p in group.values()):
                continue
            norm = self._norm(group)
            if not math.isfinite(norm):
                # finite gradients can have a norm that overflows
                own = [n for n, p in group.items() if p.grad is not None and not p.grad.isfinite().all()]
                bad = [name for names in self._world.gather(own) for name in names]
                place = f"first in {bad[0]}" if bad else "its norm overflows"
                self.adamw.zero_grad()
                raise NonFiniteError(f"gradient of {role} is not finite, {place}; nothing was applied")
            norms[f"grad_norm/{role}"] = norm
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

    def _norm(self, group: Mapping[str, nn.Parameter]) -> float:
        """Norm of the gradient of a group, of all ranks together."""
        replicated = _total_norm([p.grad for n, p in group.items() if p.grad is not None and n not in self._shared])
        if not self._shared.keys() & group.keys():
            return float(replicated)
        own = _total_norm([p.grad for n, p in group.items() if p.grad is not None and n in self._shared])
        squares = own.double().square()
        self._world.sum([squares])
        return math.sqrt(float(squares) + float(replicated) ** 2)

    def has_stepped(self, role: str) -> bool:
        """Whether a step has been applied to some parameter of a role, before a run was taken up again included."""
        return any(self.adamw.has_stepped(name) for name in self.groups[role])

    def weights(self, role: str) -> Iterator[torch.Tensor]:
        """Tensors of a role that steps change, one by one; masters where the parameters are rounded copies."""
        return (self.adamw.weights(name) for name in self.groups[role])

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """A block in which `state_tensors` has the state of all ranks, on the main one; all ranks enter it together."""
        gathered = {}
        for key, tensor in self.adamw.state_tensors().items():
            p = self._shared_parameter(key)
            whole = tensor if p is None or tensor.dim() == 0 else join(tensor.to(p.device), p)
            if self._world.is_main:
                gathered[key] = whole.cpu()
        self._gathered = gathered
        try:
            yield
        finally:
            self._gathered = None

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Masters, moments and step counts as flat named tensors, for safetensors; of shares, where not in `whole`."""
        return self.adamw.state_tensors() if self._gathered is None else self._gathered

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `state_tensors` of all ranks.

        Raises ValueError for the state of other parameters or of another `optim`.
        """
        self.adamw.load_state_tensors({key: self._own(key, tensor) for key, tensor in tensors.items()})

    def _own(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the state that is this rank's."""
        p = self._shared_parameter(key)
        return cut(tensor, p) if p is not None and tensor.shape == p.shape else tensor

    def _shared_parameter(self, key: str) -> DTensor | None:
        """The parameter in shares that a tensor of the state belongs to; None for other parameters."""
        entry = self._shared.get(key.rpartition("|")[0])
        return None if entry is None else entry[1]


def _total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    # each on its own where a norm in the gradient's dtype would have 8 bits
    return torch.nn.utils.get_total_norm(
        [torch.linalg.vector_norm(g, dtype=torch.float32) if g.dtype in HALF else g for g in gradients]
    )
