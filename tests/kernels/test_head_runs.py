"""LoRA on a head by runs of rows: the definition, and that no run, slot or row sees another one.

A test with `backend` is a property of every one; triton/test_head_runs.py has those of Triton.
"""

import itertools

import pytest
import torch
from rlhf_kernels import HeadLora, HeadLoras, Segments, linear_logprob, linear_logprob_pair, linear_ppo_loss, sample
from rlhf_kernels.runtime.testing import assert_ok, tier1
from rlhf_kernels.vocab.logits import OUTPUTS

from .checks import each, same_bits, threads_change_no_bit
from .dense import DIFFERENTIABLE, dense, double, make, runs_of
from .test_sample import check

RANKS = (4, 5, 8, 16, 32)
# Runs that begin and end within sixteen rows and beyond 32, an empty one, one that is off, rows of none, a slot twice
STARTS, ENDS = (0, 3, 16, 20, 20, 41, 47, 90), (3, 16, 18, 20, 41, 47, 88, 95)
SLOTS = (2, 0, -1, 3, 1, 2, 4, 3)
N = 97
SEGMENTS = Segments(starts=STARTS, ends=ENDS, slots=SLOTS)
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


def several(h, v, *, dtype=torch.float32, ranks=RANKS, grad=False):
    """LoRAs of different ranks and scales."""
    made = []
    for i, r in enumerate(ranks):
        A, B = (0.3 * torch.randn(r, h)).to(dtype), (0.3 * torch.randn(v, r)).to(dtype)
        made.append(HeadLora(A.requires_grad_(grad), B.requires_grad_(grad), 0.5 + 0.25 * i))
    return HeadLoras(SEGMENTS, tuple(made))


def rows_of(lora, slot, n=N):
    """Rows of a slot; −1: of none."""
    rows = {i: [] for i in range(-1, len(lora.loras))}
    at = 0
    for start, end, run in [*runs_of(lora), (n, n, -1)]:
        rows[-1] += range(at, start)
        rows[run] += range(start, end)
        at = end
    return torch.tensor(rows[slot])


def keys(n=N):
    return {"seed": torch.arange(n) - 40, "position": torch.arange(n) * 2**33}


# ---- the definition --------------------------------------------------------------------------------------------------


@each(("h", "v"), [(40, 70), (70, 517), (300, 1100)])
def test_draws_are_the_definitions(backend, h, v):
    hidden, weight, _ = make(N, h, v)
    options = {"bias": torch.randn(v), "softcap": 30.0, "temperature": torch.rand(N) + 0.5}
    check(hidden, weight, *keys().values(), greedy=torch.arange(N) % 3 == 1, lora=several(h, v), **options)


@each(("h", "v"), [(40, 70), (300, 1100)])
def test_tier1_of_every_output_and_gradient(backend, h, v):
    hidden, weight, target = make(N, h, v, grad=True)
    lora, bias = several(h, v, grad=True), torch.randn(v).requires_grad_()
    target[5] = target[46] = -100
    cotangent = {name: torch.randn(N) for name in DIFFERENTIABLE}
    tensors = [hidden, weight, bias, *itertools.chain(*(x[:2] for x in lora.loras))]

    def run(function, tensors):
        rest = iter(tensors[3:])
        loras = tuple(HeadLora(next(rest), next(rest), x.scale) for x in lora.loras)
        given = {"bias": tensors[2], "lora": HeadLoras(SEGMENTS, loras), "softcap": 5.0, "temperature": 0.7}
        out = function(tensors[0], tensors[1], target, **given)
        out = out if isinstance(out, dict) else out._asdict()
        loss = sum((cotangent[name].to(out[name].dtype) * out[name]).sum() for name in cotangent)
        return out, torch.autograd.grad(loss, tensors)

    out, grads = run(lambda *x, **y: linear_logprob(*x, outputs=OUTPUTS, **y), tensors)
    (exact, grads64), (plain, grads32) = run(dense, double(*tensors)), run(dense, tensors)
    for name in OUTPUTS:
        assert_ok(tier1(out[name], exact[name], plain[name]), name)
    for i, (g, g64, g32) in enumerate(zip(grads, grads64, grads32, strict=True)):
        assert_ok(tier1(g, g64, g32), f"gradient {i}")


@each("adapter", [torch.float32, torch.bfloat16])
def test_a_bf16_head_does_not_round_its_loras(backend, adapter):
    hidden, weight, target = make(N, 64, 530, dtype=torch.bfloat16)
    lora = several(64, 530, dtype=adapter)
    out = linear_logprob(hidden, weight, target, lora=lora).logprob
    exact = dense(hidden.double(), weight.double(), target, lora=lora)["logprob"]
    assert (out - exact).abs().max() < 1e-5 * exact.abs().max()
    drawn = sample(hidden, weight, lora=lora, **keys())
    exact = dense(hidden.double(), weight.double(), drawn.token, lora=lora)["logprob"]
    assert (drawn.logprob - exact).abs().max() < 1e-5 * exact.abs().max()


def test_gradcheck():
    hidden, weight, target = make(9, 3, 5, dtype=torch.float64, grad=True)
    target[4] = -100
    pairs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3), (5, 2), (1, 3), (5, 1))]
    segments = Segments(starts=(0, 3, 6), ends=(2, 6, 8), slots=(1, 0, 1))

    def f(hidden, weight, A, B, A2, B2):
        lora = HeadLoras(segments, (HeadLora(A, B, 0.7), HeadLora(A2, B2, 1.3)))
        out = linear_logprob(hidden, weight, target, lora=lora, outputs=("logprob", "entropy"))
        return out.logprob, out.entropy

    assert torch.autograd.gradcheck(f, (hidden, weight, *pairs))


# ---- nobody sees a neighbour -----------------------------------------------------------------------------------------


def scored(hidden, weight, target, lora, cotangent, *, trained):
    """Statistics, and gradients of hidden and of every A and B; the gradient is made ahead where no LoRA is trained."""
    hidden = hidden.clone().requires_grad_()
    outputs = ("logprob", "entropy", "lse") if trained else ("logprob", "lse")
    out = linear_logprob(hidden, weight, target, lora=lora, outputs=outputs)
    loras = [] if lora is None or not trained else lora.loras if isinstance(lora, HeadLoras) else [lora]
    leaves = [hidden, *itertools.chain(*(x[:2] for x in loras))]
    loss = sum((x * cotangent).sum() for x in out if x is not None)
    return [x.detach() for x in out if x is not None], torch.autograd.grad(loss, leaves, allow_unused=True)


def frozen(lora, trained):
    return HeadLora(lora.A.detach().requires_grad_(trained), lora.B.detach().requires_grad_(trained), lora.scale)


@each(("h", "v", "trained"), [(40, 70, True), (300, 600, True), (544, 600, False), (64, 530, False)])
@each(("dtype", "adapter"), DTYPES)
def test_a_run_has_the_bits_that_it_has_alone(backend, h, v, trained, dtype, adapter):
    if backend == "triton" and (h > 40 or dtype == torch.bfloat16):
        pytest.skip("the interpreter is slow")
    hidden, weight, target = make(N, h, v, dtype=dtype)
    lora, cotangent = several(h, v, dtype=adapter), torch.randn(N)
    lora.loras[1].B.fill_(torch.nan)  # what a neighbour holds is nobody's affair
    lora = HeadLoras(SEGMENTS, tuple(frozen(x, trained) for x in lora.loras))
    target[::9] = -100
    drawn = sample(hidden, weight, lora=HeadLoras(SEGMENTS, tuple(frozen(x, False) for x in lora.loras)), **keys())
    out, (d_hidden, *grads) = scored(hidden, weight, target, lora, cotangent, trained=trained)
    for slot in (-1, 0, 2, 3, 4):
        rows, one = rows_of(lora, slot), None if slot < 0 else frozen(lora.loras[slot], trained)
        own = {name: x[rows] for name, x in keys().items()}
        alone = sample(hidden[rows], weight, lora=None if one is None else frozen(one, False), **own)
        same_bits([x[rows] for x in drawn[:2]], alone[:2])
        alone, (dh, *dAB) = scored(hidden[rows], weight, target[rows], one, cotangent[rows], trained=trained)
        same_bits([x[rows] for x in (*out, d_hidden)], [*alone, dh])
        if slot >= 0 and trained:
            same_bits(grads[2 * slot : 2 * slot + 2], dAB)


@each("dtype", [torch.float32, torch.bfloat16])
def test_one_run_over_all_rows_is_the_call_with_one_lora(backend, dtype):
    hidden, weight, target = make(20, 40, 100, dtype=dtype)
    lora = several(40, 100).loras[1]
    whole = HeadLoras(Segments.single(20, 1), (lora, lora))
    same_bits(*(sample(hidden, weight, lora=x, **keys(20))[:2] for x in (whole, lora)))
    nothing = HeadLoras(Segments.single(20, -1), ())
    same_bits(*([linear_logprob(hidden, weight, target, lora=x).logprob] for x in (nothing, None)))


@each("v", [600, 5000])
def test_bits_do_not_depend_on_threads(isa, v):
    hidden, weight, target = make(N, 300, v)
    lora, cotangent = several(300, v, grad=True), torch.randn(N)

    def run():
        out, grads = scored(hidden, weight, target, lora, cotangent, trained=True)
        with torch.no_grad():
            drawn = sample(hidden, weight, lora=lora, **keys())[:2]
        return [*out, *grads[2::2], *drawn]  # other gradients go on through products of torch

    threads_change_no_bit(run)


# ---- slots -----------------------------------------------------------------------------------------------------------


def test_a_slot_without_rows_has_no_gradient(backend):
    hidden, weight, target = make(6, 8, 20)
    loras = several(8, 20, grad=True).loras
    lora = HeadLoras(Segments(starts=(0, 2, 4), ends=(2, 2, 6), slots=(1, 3, 4)), loras)
    linear_logprob(hidden, weight, target, lora=lora).logprob.sum().backward()
    assert [x.A.grad is not None for x in loras] == [x.B.grad is not None for x in loras]
    assert [x.A.grad is not None for x in loras] == [False, True, False, False, True]


def test_gradients_where_torch_watches_the_call():
    """A function mode is on, so torch's own autograd of the op runs: it expects lists of runs back as they were."""
    hidden, weight, target = make(6, 8, 20)
    loras = several(8, 20, grad=True).loras
    for lora in (loras[0], HeadLoras(Segments(starts=(0, 3), ends=(3, 6), slots=(0, 1)), loras)):
        plain = torch.autograd.grad(linear_logprob(hidden, weight, target, lora=lora).logprob.sum(), loras[0][:2])
        with torch.device("cpu"):
            watched = torch.autograd.grad(linear_logprob(hidden, weight, target, lora=lora).logprob.sum(), loras[0][:2])
        same_bits(watched, plain)


def test_a_frozen_slot_costs_no_gradient_beside_a_trained_one(backend):
    hidden, weight, target = make(6, 8, 20)
    trained, other = several(8, 20, grad=True).loras[:2]
    lora = HeadLoras(Segments(starts=(0, 3), ends=(3, 6), slots=(0, 1)), (trained, frozen(other, False)))
    linear_logprob(hidden, weight, target, lora=lora).logprob.sum().backward()
    assert trained.A.grad.abs().sum() > 0
    target[:3] = -100  # its rows do not count: the gradient is there, of zeros
    grads = torch.autograd.grad(linear_logprob(hidden, weight, target, lora=lora).logprob.sum(), trained[:2])
    assert not any(g.any() for g in grads)


@each(
    ("change", "error", "message"),
    [
        ({"ends": (2, 8)}, ValueError, r"lora.segments: expected runs within the 6 rows of hidden, got end 8"),
        ({"slots": (0, 2)}, ValueError, r"lora.segments: expected slots below 2 \(the number of lora.loras\), got 2"),
        ({"starts": (0, 1)}, ValueError, "Segments: expected sorted runs that do not overlap"),
        ({"starts": (4, 0), "ends": (6, 2)}, ValueError, "Segments: expected sorted runs that do not overlap"),
        ({"A": torch.zeros(2, 7)}, ValueError, r"lora.loras\[1\].A: expected shape \[\*, 8\], got \[2, 7\]"),
        ({"B": torch.zeros(20, 3)}, ValueError, r"lora.loras\[1\].B: expected shape \[20, 2\], got \[20, 3\]"),
        ({"B": torch.zeros(20, 2).int()}, TypeError, r"lora.loras\[1\].B: expected a floating point dtype"),
        ({"segments": None}, TypeError, "lora.segments: expected Segments, got NoneType"),
    ],
)
def test_runs_that_do_not_fit_are_refused(change, error, message):
    hidden, weight, target = make(6, 8, 20)
    part = {"A": torch.zeros(2, 8), "B": torch.zeros(20, 2), "starts": (0, 2), "ends": (2, 5), "slots": (0, 1)} | change

    def runs():
        segments = Segments(**{name: part[name] for name in ("starts", "ends", "slots")})
        return HeadLoras(
            change.get("segments", segments), (several(8, 20).loras[0], HeadLora(part["A"], part["B"], 1.0))
        )

    for op in (
        lambda: linear_logprob(hidden, weight, target, lora=runs()),
        lambda: sample(hidden, weight, lora=runs(), **keys(6)),
    ):
        with pytest.raises(error, match=message):
            op()


def test_ops_of_one_lora_refuse_several():
    hidden, weight, target = make(6, 8, 20)
    lora, row = HeadLoras(Segments.single(6, 0), several(8, 20).loras), torch.zeros(6)
    for op in (
        lambda: linear_logprob_pair(hidden, hidden, weight, target, lora=lora),
        lambda: linear_ppo_loss(hidden, weight, target, row, row, row + 1, denom=6.0, lora=lora),
    ):
        with pytest.raises(TypeError, match="lora: expected one HeadLora for all rows, or None, got HeadLoras"):
            op()
