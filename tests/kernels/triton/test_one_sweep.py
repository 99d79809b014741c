"""Several LoRAs on one head by the way that no GPU has run: bits are those of a sweep for each, launches are fewer."""

import pytest
import torch
from rlhf_kernels import HeadLora, HeadLoras, Segments, linear_logprob, sample
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.triton_support import INTERPRETED
from rlhf_kernels.vocab import triton_sweep
from rlhf_kernels.vocab.logits import OUTPUTS
from rlhf_kernels.vocab.runs import use_variant

from tests.kernels.checks import each, same_bits
from tests.kernels.dense import make
from tests.kernels.test_head_runs import frozen, keys, rows_of

RANKS = (4, 16, 33, 64, 8)
# Runs that begin and end within a block of rows, one that is off, rows of none before, between and behind, a slot twice
SEGMENTS = Segments(starts=(1, 4, 9, 14, 19, 23), ends=(4, 9, 13, 19, 23, 35), slots=(2, 0, 1, -1, 2, 3))
N, H, V = 38, 24, 130
SMALL = Segments(starts=(0, 3, 6), ends=(3, 6, 10), slots=(1, 0, 2))


def several(n_vocab=V, dtype=torch.float32, segments=SEGMENTS, ranks=RANKS):
    """LoRAs of different ranks and scales."""
    pairs = [((0.3 * torch.randn(r, H)).to(dtype), (0.3 * torch.randn(n_vocab, r)).to(dtype)) for r in ranks]
    return HeadLoras(segments, tuple(HeadLora(A, B, 0.5 + i) for i, (A, B) in enumerate(pairs)))


def everything(hidden, weight, target, lora, cotangent, own, *, trained, **options):
    """Draws, statistics, and gradients of hidden and of every A and B; where none is trained, made ahead."""
    with torch.no_grad():
        drawn = sample(hidden, weight, lora=lora, outputs=("token", "logprob", "entropy"), **own, **options)
    hidden = hidden.clone().requires_grad_()
    names = OUTPUTS if trained else ("logprob", "lse")
    out = [x for x in linear_logprob(hidden, weight, target, lora=lora, outputs=names, **options) if x is not None]
    loras = [] if lora is None or not trained else lora.loras if isinstance(lora, HeadLoras) else [lora]
    leaves = [hidden, *(x for one in loras for x in one[:2])]
    grads = torch.autograd.grad(sum((x * cotangent).sum() for x in out), leaves, allow_unused=True)
    return [*drawn, *(x.detach() for x in out)], grads


def same_or_nan(a, b):
    """Bit for bit, but for the bits of a NaN."""
    same_bits(*([torch.where(x.isnan(), 7, x) for x in found] for found in (a, b)))


@each("exact", [False, True])
@each(
    ("dtype", "adapter", "bare", "trained"),
    [
        (torch.float32, torch.float32, True, True),
        (torch.float32, torch.bfloat16, False, False),
        (torch.bfloat16, torch.float32, True, False),
        (torch.bfloat16, torch.bfloat16, False, True),
    ],
)
def test_a_row_has_the_bits_that_it_has_alone(on_triton, dtype, adapter, bare, trained, exact):
    hidden, weight, target = make(N, H, V, dtype=dtype)
    lora = several(dtype=adapter)
    lora.loras[0].B.fill_(torch.nan)  # what a neighbour holds is nobody's affair
    hidden[20] = torch.nan
    lora = HeadLoras(SEGMENTS, tuple(frozen(x, trained) for x in lora.loras))
    target[::9] = -100
    bias, cotangent = None if bare else torch.randn(V), torch.randn(N)

    def call(rows, lora):
        more = {"bias": bias, "temperature": (torch.arange(N) % 3 + 0.5)[rows], "softcap": None if bare else 20.0}
        own = {name: x[rows] for name, x in keys(N).items()}
        return everything(hidden[rows], weight, target[rows], lora, cotangent[rows], own, trained=trained, **more)

    with registry.use_exact(exact):
        with use_variant(one_sweep=True):
            out, (d_hidden, *grads) = call(torch.arange(N), lora)
        for slot in (-1, 0, 1, 2, 3):
            rows, one = rows_of(lora, slot, N), None if slot < 0 else lora.loras[slot]
            alone, (dh, *dAB) = call(rows, one)
            same_or_nan([x[rows] for x in (*out, d_hidden)], [*alone, dh])
            if trained and slot >= 0:
                same_or_nan(grads[2 * slot : 2 * slot + 2], dAB)


def launches(monkeypatch, run):
    """Names of the kernels that a call launches, in order."""
    from triton.runtime.interpreter import InterpretedFunction

    names, launch = [], InterpretedFunction.run

    def watched(kernel, *args, **options):
        names.append(kernel.fn.__name__)
        return launch(kernel, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", watched)
        run()
    return names


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's launches cannot be watched from here")
def test_slots_share_a_launch_by_name_alone(on_triton, monkeypatch):
    hidden, weight, target = make(10, H, 20)
    lora = several(20, segments=SMALL, ranks=(4, 16, 8))

    def both():
        sample(hidden, weight, lora=lora, **keys(10))
        linear_logprob(hidden, weight, target, lora=lora)

    sweeps = ("sample_kernel", "fused_kernel")
    assert [launches(monkeypatch, both).count(name) for name in sweeps] == [3, 3]
    with use_variant(one_sweep=True):
        found = launches(monkeypatch, both)
        assert [found.count(name) for name in (*sweeps, "down_runs_kernel")] == [1, 1, 1]
        lora = lora.loras[0]
        assert "down_runs_kernel" not in launches(monkeypatch, both)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's launches cannot be watched from here")
def test_slots_read_a_part_of_the_vocabulary_together(on_triton, monkeypatch):
    """Gradients of all slots take one tile of W after another, though their tiles differ in size."""
    monkeypatch.setattr(triton_sweep.cost, "tile_shape", lambda n_rows, n_vocab: (16, 16 if n_rows == 3 else 32))
    hidden, weight, target = make(10, H, 60)
    lora = several(60, segments=SMALL, ranks=(4, 16, 8))
    lora = HeadLoras(SMALL, tuple(frozen(x, True) for x in lora.loras))
    first = []
    whole = triton_sweep.Sweep.weight_tile
    monkeypatch.setattr(
        triton_sweep.Sweep, "weight_tile", lambda self, at: (first.append(at.start), whole(self, at))[1]
    )

    def gradients():
        loss = linear_logprob(hidden, weight, target, lora=lora).logprob.sum()
        first.clear()
        return torch.autograd.grad(loss, [x for one in lora.loras for x in one[:2]])

    alone = gradients()
    assert first == [0, 16, 32, 48] * 2 + [0, 32]
    with use_variant(one_sweep=True):
        same_bits(gradients(), alone)
    assert first == sorted(first) == sorted([0, 16, 32, 48] * 2 + [0, 32])
