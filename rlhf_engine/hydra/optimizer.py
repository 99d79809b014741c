"""One AdamW over all that is trained: one owner per parameter, stateless schedule, clipping by role."""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlhf_engine.config.run import FLOAT32_GRADIENTS, Optim, TrainingOptions
from rlhf_engine.devices import ALONE, World, is_gpu
from rlhf_engine.errors import ConfigError, NonFiniteError
from rlhf_engine.hydra import HydraModel
from rlhf_engine.hydra.loading import require_bitsandbytes
from rlhf_engine.hydra.shares import cut, join, own_share

HALF = (torch.bfloat16, torch.float16)
BLOCK = 256  # numbers that share a scale in 8-bit moments
MIN_8BIT_SIZE = 4096  # parameters with fewer elements keep float32 moments


def has_8bit_moments(optim: Optim) -> bool:
    return optim.startswith("adamw_8bit")


def has_masters(optim: Optim) -> bool:
    return not optim.endswith("stochastic")


def gradient_dtype(optim: Optim, dtype: torch.dtype) -> torch.dtype:
    """Dtype that gradients of a parameter of `dtype` are accumulated in."""
    return torch.float32 if optim in FLOAT32_GRADIENTS and dtype in HALF else dtype


def state_layout(optim: Optim, shape: torch.Size, dtype: torch.dtype) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor in the state of a parameter."""
    whole = (shape, torch.float32 if dtype in HALF else dtype)
    layout = {"step": (torch.Size(), torch.float32)}
    if dtype in HALF and has_masters(optim):
        layout["master"] = whole
    if optim == "adafactor":
        if len(shape) < 2:
            return {**layout, "variance": whole}
        row, column = torch.Size([*shape[:-1], 1]), torch.Size([*shape[:-2], 1, shape[-1]])
        return {**layout, "row_var": (row, whole[1]), "col_var": (column, whole[1])}
    if not has_8bit_moments(optim):
        return {**layout, "exp_avg": whole, "exp_avg_sq": whole}
    if shape.numel() < MIN_8BIT_SIZE:
        return {**layout, "state1": whole, "state2": whole}
    codes = (shape, torch.uint8)
    scales = (torch.Size([-(-shape.numel() // BLOCK)]), torch.float32)
    return {**layout, "state1": codes, "state2": codes, "absmax1": scales, "absmax2": scales}


def temporary_bytes(optim: Optim, shape: torch.Size, dtype: torch.dtype, device_type: str) -> int:
    """Most bytes that a step allocates for a parameter beside its gradient and state."""
    copies = 0
    if dtype in HALF:
        copies += optim not in FLOAT32_GRADIENTS  # the gradient in float32
        copies += 2 * (not has_masters(optim))  # the weights in float32 and the random numbers
    if has_8bit_moments(optim) and not is_gpu(device_type) and shape.numel() >= MIN_8BIT_SIZE:
        copies += 5  # bitsandbytes has no fused kernel there: both moments, the gradient, the denominator and its root
    copies += optim == "adafactor"  # the step itself, which AdamW's kernel does not hold
    return 4 * copies * shape.numel()


def require_optim(optim: Optim) -> None:
    """Raise ConfigError for an `optim` whose library is not installed."""
    if has_8bit_moments(optim):
        require_bitsandbytes("optim", "'adamw' or 'adamw_stochastic'", optim)


def warn_without_masters(optimizer: torch.optim.Optimizer) -> None:
    """Warn where an optimizer that is not this module's steps half-precision parameters, in which it rounds."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    half = [p for p in held if p.dtype in HALF]
    if half:
        warnings.warn(
            f"{len(half)} of {len(held)} trained tensors are in {str(half[0].dtype).removeprefix('torch.')}, and "
            f"{type(optimizer).__name__} has no float32 master weights: steps of less than 1/512 of a weight round "
            "away; load what is trained in float32 (PEFT: autocast_adapter_dtype=True)",
            stacklevel=3,
        )


class AdamW:
    """AdamW over groups of named parameters; state as flat named tensors."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, nn.Parameter]],
        *,
        optim: Optim = "adamw",
        seed: int = 0,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """Make the optimizer; ConfigError for stochastic rounding of anything but bfloat16, or a missing library."""
        require_optim(optim)
        self.optim, self.seed = optim, seed
        self.parameters = {name: p for group in groups for name, p in group.items()}
        half = {name: p for name, p in self.parameters.items() if p.dtype in HALF}
        if not has_masters(optim) and {p.dtype for p in half.values()} != {torch.bfloat16}:
            dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in self.parameters.values()})
            raise ConfigError(
                f"optim: expected {optim.removesuffix('_stochastic')!r} where nothing is trained in bfloat16, which "
                f"alone is rounded stochastically, got {optim!r} for parameters in {', '.join(dtypes)}"
            )
        # empty until a step gives them the float32 weights, and again after it where there are no masters
        self._float32 = {name: nn.Parameter(p.new_empty(0, dtype=torch.float32)) for name, p in half.items()}
        self._steps = dict.fromkeys(half, 0)
        for p in half.values():
            p.grad_dtype = gradient_dtype(optim, p.dtype)
        self._stepped = {name: self._float32.get(name, p) for name, p in self.parameters.items()}
        """Parameters, or their float32 weights, that the inner optimizer steps, by name."""
        own = [{"params": [self._stepped[name] for name in group]} for group in groups]
        options: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._inner: torch.optim.Optimizer
        if has_8bit_moments(optim):
            from bitsandbytes.optim import AdamW8bit

            self._inner = AdamW8bit(own, min_8bit_size=MIN_8BIT_SIZE, **options)
        elif optim == "adafactor":
            # one parameter at a time: all together would hold the steps of all
            self._inner = torch.optim.Adafactor(own, lr=0.0, eps=(None, 1.0), weight_decay=weight_decay, foreach=False)
        else:
            self._inner = torch.optim.AdamW(own, fused=True, **options)

    def set_lr(self, rates: Sequence[float]) -> None:
        """Set the learning rate of every group."""
        for group, rate in zip(self._inner.param_groups, rates, strict=True):
            group["lr"] = rate

    def set_options(self, **options: Any) -> None:
        """Set betas, eps or weight decay of every group; Adafactor has none but its weight decay."""
        known = ("weight_decay",) if self.optim == "adafactor" else tuple(options)
        for group in self._inner.param_groups:
            group.update({name: options[name] for name in known})

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients of all parameters and clear them."""
        half = [name for name in self._float32 if self.parameters[name].grad is not None]
        # some hold float32 masters and gradients anyway; the others make temporary ones, of one parameter at a time
        calls = [half] if self.optim in FLOAT32_GRADIENTS else [[], *([name] for name in half)]
        for names in calls:  # the first also steps the parameters in full precision
            for name in names:
                self._hand_over_gradient(name)
            self._inner.step()
            self._inner.zero_grad(set_to_none=True)
            for name in names:
                self._write_back(name)

    def _hand_over_gradient(self, name: str) -> None:
        p, weights = self.parameters[name], self._float32[name]
        if weights.numel() == 0:
            weights.data = p.detach().float()
        assert p.grad is not None
        weights.grad, p.grad = p.grad.float(), None

    def _write_back(self, name: str) -> None:
        p, weights = self.parameters[name], self._float32[name]
        self._steps[name] += 1
        if has_masters(self.optim):
            p.copy_(weights)
            return
        key = hashlib.blake2b(f"{self.seed} {name} {self._steps[name]}".encode(), digest_size=8).digest()
        generator = torch.Generator(p.device).manual_seed(int.from_bytes(key, "little") >> 1)
        p.copy_(round_stochastically_(weights.data, generator))
        weights.data = weights.data.new_empty(0)

    def zero_grad(self) -> None:
        """Clear the gradients of all parameters."""
        for p in self.parameters.values():
            p.grad = None

    def has_stepped(self, name: str) -> bool:
        """Whether a step has been applied to a parameter."""
        return bool(self._inner.state.get(self._stepped[name]))

    def weights(self, name: str) -> torch.Tensor:
        """Tensor that a step changes: the float32 master where there is or will be one, else the parameter."""
        p = self.parameters[name]
        if name not in self._float32 or not has_masters(self.optim):
            return p.detach()
        return self._float32[name].detach() if self.has_stepped(name) else p.detach().float()

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Masters, moments and step counts of what has been stepped, on the CPU."""
        tensors = {}
        for name, stepped in self._stepped.items():
            if not self.has_stepped(name):
                continue
            fields = {k: v for k, v in self._inner.state[stepped].items() if k not in _TABLES}
            fields["step"] = torch.as_tensor(fields["step"], dtype=torch.float32)
            if name in self._float32 and has_masters(self.optim):
                fields["master"] = stepped
            for key, value in fields.items():
                tensors[f"{name}|{key}"] = value.detach().cpu().contiguous()
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `state_tensors`; ValueError, before anything changes, for other parameters or another `optim`."""
        by_name: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, field = key.rpartition("|")
            by_name.setdefault(name, {})[field] = tensor
        unknown = sorted(set(by_name) - set(self.parameters))
        if unknown:
            raise ValueError(f"optimizer state: expected parameters of this model, got {unknown[:3]}")
        for name, fields in by_name.items():
            self._check(name, fields)
        for name, fields in by_name.items():
            self._load(name, fields)

    def _check(self, name: str, fields: Mapping[str, torch.Tensor]) -> None:
        p = self.parameters[name].detach()
        expected = state_layout(self.optim, p.shape, p.dtype)
        if fields.keys() != expected.keys():
            raise ValueError(
                f"optim: expected the state that {self.optim!r} has of {name} in {p.dtype} "
                f"({', '.join(sorted(expected))}), got {', '.join(sorted(fields))}"
            )
        for key, (shape, dtype) in expected.items():
            tensor = fields[key]
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"optimizer state: expected {name}|{key} of shape {list(shape)} and {dtype}, got "
                    f"{list(tensor.shape)} and {tensor.dtype}"
                )
        if "master" in fields and not torch.equal(fields["master"].to(p.device).to(p.dtype), p):
            raise ValueError(f"optimizer state: expected master weights of {name} that round to it, got others")

    def _load(self, name: str, fields: Mapping[str, torch.Tensor]) -> None:
        p, stepped = self.parameters[name], self._stepped[name]
        # copies: steps change state in place, which must not reach the tensors that were handed in
        state: dict[str, Any] = {k: v.to(p.device, copy=True) for k, v in fields.items() if k != "master"}
        if has_8bit_moments(self.optim):
            state["step"] = int(fields["step"])
            tables = self._inner.name2qmap  # type: ignore[attr-defined]  # of bitsandbytes
            if "absmax1" in fields:
                state |= {"qmap1": tables["dynamic"].to(p.device), "qmap2": tables["udynamic"].to(p.device)}
        self._inner.state[stepped] = state
        if name in self._float32:
            self._steps[name] = int(fields["step"])
        if "master" in fields:
            stepped.data = fields["master"].to(p.device, copy=True)


_TABLES = ("qmap1", "qmap2")  # tables of bitsandbytes beside a parameter's state: the same constants for all parameters


def round_stochastically_(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round float32 numbers in place to bfloat16 numbers, away from zero with probability of the fraction cut off."""
    bits = x.view(torch.int32)
    bits += torch.empty_like(bits).random_(0, 1 << 16, generator=generator)
    bits &= -(1 << 16)
    return x


def lr_factor(step: int, options: Mapping[str, Any], total_steps: int) -> float:
    """Multiple of the learning rate at `step` (from 0), by a run's options alone: warm-up, then the schedule."""
    kind, warmup_steps = options["lr_scheduler_type"], options["warmup_steps"]
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
    """One AdamW with a parameter group per role, the first of those that share one; ranks step their shares."""

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
        self._gathered: dict[str, torch.Tensor] | None = None  # tensors that `state_tensors` returns within `whole`
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
            model, learning_rates, betas=(0.9, 0.999), eps=config.adam_epsilon, weight_decay=config.weight_decay,
            max_grad_norm=config.largest_grad_norm, optim=config.optim, seed=config.seed, world=world,
        )  # fmt: skip

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

    def set_options(self, *, max_grad_norm: float | None, **options: Any) -> None:
        """Set options of the next steps: the largest norm of a role's gradient, and those of `AdamW.set_options`."""
        self.max_grad_norm = max_grad_norm
        self.adamw.set_options(**options)

    def step(self) -> dict[str, float]:
        """Clip each role's gradient, apply, clear; norms, and 1 where clipped. NonFiniteError applies nothing."""
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
        """Inverse of `state_tensors` of all ranks; ValueError for the state of other parameters or another `optim`."""
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
