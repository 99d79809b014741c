"""Several LoRAs on one head by the way that no GPU has run: bits are those of a sweep for each."""

import pytest
import torch
from rlhf_kernels import HeadLora, HeadLoras, Segments, linear_logprob, sample
from rlhf_kernels.runtime import registry
from rlhf_kernels.vocab import runs as head_runs
from rlhf_kernels.vocab.logits import OUTPUTS

from tests.kernels.checks import each, same_bits
from tests.kernels.dense import make
from tests.kernels.test_head_runs import frozen, keys, rows_of

RANKS = (4, 16, 33, 64, 8)
# Runs that begin and end within a block of rows, one that is off, rows of none before, between and behind, a slot twice
SEGMENTS = Segments(starts=(1, 4, 9, 14, 19, 23), ends=(4, 9, 13, 19, 23, 35), slots=(2, 0, 1, -1, 2, 3))
N, H, V = 38, 24, 130


def several(dtype, ranks=RANKS):
    loras = [
        HeadLora((0.3 * torch.randn(r, H)).to(dtype), (0.3 * torch.randn(V, r)).to(dtype), 0.5 + i)
        for i, r in enumerate(ranks)
    ]
    return HeadLoras(SEGMENTS, tuple(loras))


def outputs(hidden, weight, target, lora, own, cotangent, options, *, trained, ahead=False):
    """Draws, statistics, and gradients of hidden and of every A and B."""
    with torch.no_grad():
        drawn = sample(hidden, weight, lora=lora, outputs=("token", "logprob", "entropy"), **own, **options)
    hidden = hidden.clone().requires_grad_()
    out = linear_logprob(hidden, weight, target, lora=lora, outputs=("logprob", "lse") if ahead else OUTPUTS, **options)
    loras = [] if lora is None or not trained else lora.loras if isinstance(lora, HeadLoras) else [lora]
    leaves = [hidden, *(x for one in loras for x in one[:2])]
    loss = sum((x * cotangent).sum() for x in out if x is not None)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*drawn, *(x.detach() for x in out if x is not None)], grads


@pytest.fixture(params=[False, True], ids=["", "exact"])
def exact(request):
    with registry.use_exact(request.param):
        yield request.param


@each(
    ("dtype", "adapter"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@each("bare", [True, False])
@each("trained", [True, False])
def test_a_row_has_the_bits_that_it_has_alone(on_triton, exact, dtype, adapter, bare, trained):
    hidden, weight, target = make(N, H, V, dtype=dtype)
    lora = several(adapter)
    lora.loras[0].B.fill_(torch.nan)  # what a neighbour holds is nobody's affair
    hidden[20] = torch.nan
    lora = HeadLoras(SEGMENTS, tuple(frozen(x, trained) for x in lora.loras))
    target[::9] = -100
    bias, cotangent = None if bare else torch.randn(V), torch.randn(N)

    def call(rows, lora):
        options = {"bias": bias, "temperature": (torch.arange(N) % 3 + 0.5)[rows], "softcap": None if bare else 20.0}
        own = {name: x[rows] for name, x in keys(N).items()}
        return outputs(
            hidden[rows], weight, target[rows], lora, own, cotangent[rows], options, trained=trained, ahead=not trained
        )

    with head_runs.use_variant(one_sweep=True):
        out, (d_hidden, *grads) = call(torch.arange(N), lora)
    for slot in (-1, 0, 1, 2, 3):
        rows, one = rows_of(lora, slot, N), None if slot < 0 else lora.loras[slot]
        alone, (dh, *dAB) = call(rows, one)
        same_bits(
            *([x.nan_to_num(7.0) for x in found] for found in ([x[rows] for x in (*out, d_hidden)], [*alone, dh]))
        )
        if slot >= 0 and trained:
            same_bits(*([x.nan_to_num(7.0) for x in found] for found in (grads[2 * slot : 2 * slot + 2], dAB)))
