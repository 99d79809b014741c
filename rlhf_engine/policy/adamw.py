"""AdamW that steps in float32 whatever the dtype of a parameter, with the state that the option `optim` names.

    optim                    weights of a half-precision parameter      moments
    adamw                    float32 masters, rounded to nearest         float32
    adamw_8bit               float32 masters, rounded to nearest         8 bits, in blocks of 256
    adamw_stochastic         no masters, rounded up or down at random    float32
    adamw_8bit_stochastic    no masters, rounded up or down at random    8 bits, in blocks of 256
    adafactor                float32 masters, rounded to nearest         float32, second ones by row and by column

bfloat16 has 8 significant bits, so rounding to nearest loses every step below |w| / 512. Masters keep such steps.
Stochastic rounding keeps them in the mean: with fraction f ∈ [0, 1) of the gap between two bfloat16 numbers it rounds
away from zero with probability f, so E[round(w)] = w. Its random numbers are a function of seed, name and step.

Gradients: `adamw` and `adafactor` accumulate those of half-precision parameters in float32, the others in the
parameter's dtype. Moments in 8 bits are bitsandbytes' (arXiv 2110.02861); parameters of less than 4096 elements keep
float32 ones.

Adafactor (arXiv 1804.04235) is torch's: no first moment, second moments that forget as 1 − t^−0.8, steps whose root
mean square is bounded by 1 before they are scaled by min(learning rate, t^−½). The paper scales by a parameter's root
mean square as well. Here that counts above 1 alone: an adapter's B begins at 0.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlhf_engine.config.run import FLOAT32_GRADIENTS, Optim
from rlhf_engine.devices import is_gpu
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra.loading import require_bitsandbytes

HALF = (torch.bfloat16, torch.float16)
BLOCK = 256
"""Numbers that share a scale in 8-bit moments."""
MIN_8BIT_SIZE = 4096
"""Parameters with fewer elements keep float32 moments."""


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
        """Make the optimizer.

        Raises ConfigError for stochastic rounding of anything else than bfloat16, and where a library is missing.
        """
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
        """Inverse of `state_tensors`, for parameters that already have their values.

        Raises ValueError, before anything changes, for tensors of parameters that are not trained here, for the state
        of another `optim`, and for masters that do not round to the parameters.
        """
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


_TABLES = ("qmap1", "qmap2")
"""Tables of bitsandbytes beside a parameter's state: the same constants for all parameters."""


def round_stochastically_(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round float32 numbers in place to bfloat16 numbers, away from zero with probability of the fraction cut off."""
    bits = x.view(torch.int32)
    bits += torch.empty_like(bits).random_(0, 1 << 16, generator=generator)
    bits &= -(1 << 16)
    return x
