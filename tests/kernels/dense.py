"""What ops over the vocabulary have to equal: matrices of logits, in torch's own ops and the dtype of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from rlhf_kernels.vocab.logits import OUTPUTS, HeadLora
from rlhf_kernels.vocab.runs import HeadLoras
from torch import Tensor

DIFFERENTIABLE = tuple(name for name in OUTPUTS if name != "is_top1")


def heated(z: Tensor, temperature: Any) -> Tensor:
    """Logits [..., V] over a temperature, or one for each row."""
    return z / (temperature[..., None].to(z.dtype) if isinstance(temperature, Tensor) else temperature)


def runs_of(lora: HeadLoras) -> list[tuple[int, int, int]]:
    """(start, end, slot) of the runs that have a LoRA."""
    runs = zip(lora.segments.starts, lora.segments.ends, lora.segments.slots, strict=True)
    return [run for run in runs if run[2] >= 0]


def logits(
    hidden: Tensor, weight: Tensor, *, bias: Any = None, softcap: Any = None, logit_scale: Any = None, lora: Any = None
) -> Tensor:
    """Logits [N, V] before the temperature."""
    z = hidden @ weight.T
    if isinstance(lora, HeadLoras):
        for start, end, slot in runs_of(lora):
            among = torch.zeros(len(z), 1, dtype=z.dtype).index_fill_(0, torch.arange(start, end), 1.0)
            z = z + among * logits(hidden, torch.zeros_like(weight), lora=lora.loras[slot])
    elif lora is not None:
        z = z + lora.scale * (hidden @ lora.A.to(z.dtype).T) @ lora.B.to(z.dtype).T
    if bias is not None:
        z = z + bias.to(z.dtype)
    if logit_scale is not None:
        z = logit_scale * z
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def statistics(z: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Every output of rows of logits [..., V]; zeros where the target is to be ignored."""
    log_p = torch.log_softmax(z, -1)
    finite = log_p.clamp_min(torch.finfo(z.dtype).min)  # 0 · −∞ is nothing
    outputs = {
        "logprob": log_p.gather(-1, target.clamp_min(0)[..., None])[..., 0],
        "entropy": -(log_p.exp() * finite).sum(-1),
        "lse": torch.logsumexp(z, -1),
        "is_top1": (z.argmax(-1) == target).to(z.dtype),
        "mean_logit": z.mean(-1),
        "log_sum_sq_prob": torch.logsumexp(2 * log_p, -1),
    }
    return {name: torch.where(target != -100, x, 0.0) for name, x in outputs.items()}


def dense(hidden: Tensor, weight: Tensor, target: Tensor, *, temperature: Any = 1.0, **head: Any) -> dict[str, Tensor]:
    """Every output of `linear_logprob`."""
    return statistics(heated(logits(hidden, weight, **head), temperature), target)


def make(
    n: int, h: int, v: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight and target, whose last one is the last column."""
    g, where = torch.Generator().manual_seed(seed), torch.get_default_device()
    hidden = (scale * torch.randn(n, h, generator=g, device="cpu")).to(where, dtype).requires_grad_(grad)
    weight = torch.randn(v, h, generator=g, device="cpu").to(where, dtype).requires_grad_(grad)
    target = torch.randint(0, v, (n,), generator=g, device="cpu").to(where)
    target[-1:] = v - 1  # in the last, partial block of columns
    return hidden, weight, target


def make_all(n: int, h: int, v: int, **options: Any) -> tuple[tuple[Tensor, ...], Tensor]:
    """(hidden, weight, bias, A, B) and target."""
    hidden, weight, target = make(n, h, v, **options)
    g = torch.Generator().manual_seed(1)
    rest = (
        (s * torch.randn(shape, generator=g, device="cpu")).to(hidden).requires_grad_(hidden.requires_grad)
        for s, shape in ((1.0, (v,)), (1.0, (5, h)), (0.1, (v, 5)))
    )
    return (hidden, weight, *rest), target


def double(*tensors: Any) -> tuple[Any, ...]:
    """In float64, what is floating point; leaves of their own."""
    return tuple(
        x.detach().double().requires_grad_(x.requires_grad) if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in tensors
    )


def every_gradient(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    target: Tensor,
    cotangent: dict[str, Tensor],
    **options: Any,
) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Every output of `function`, and the gradients of one loss of all in `cotangent` to what needs one.

    tensors: hidden and weight, or these with bias, A and B.
    """
    if len(tensors) > 2:
        options |= {"bias": tensors[2], "lora": HeadLora(tensors[3], tensors[4], 0.5)}
    out = function(tensors[0], tensors[1], target, **options)
    out = out if isinstance(out, dict) else out._asdict()
    loss = sum((cotangent[name].to(out[name].dtype) * out[name]).sum() for name in cotangent)
    return out, torch.autograd.grad(loss, [x for x in tensors if x.requires_grad])


def red_zone(x: Tensor) -> Tensor:
    """The same values inside a buffer of NaN, rows still adjacent."""
    buffer = torch.full((x.shape[0] + 6, *x.shape[1:]), torch.nan, dtype=x.dtype, device=x.device)
    buffer[3:-3] = x.detach()
    return buffer[3:-3].requires_grad_(x.requires_grad)


def surrounded(x: Tensor, fill: float = torch.nan) -> Tensor:
    """The same values as a view into a larger buffer: rows above and below, columns left and right."""
    buffer = torch.full((x.shape[0] + 4, x.shape[1] + 7), fill, dtype=x.dtype, device=x.device)
    buffer[2:-2, 3:-4] = x.detach()
    return buffer[2:-2, 3:-4].requires_grad_(x.requires_grad)


def turned(x: Tensor) -> Tensor:
    """The same values, columns outermost."""
    return x.detach().T.contiguous().T.requires_grad_(x.requires_grad)
