"""`linear_ppo_loss` against `ppo_loss` on dense float64 log-probs, and the work it must leave out."""

import pytest
import torch
from rlhf_kernels.linear_logprob import HeadLora, linear_logprob
from rlhf_kernels.linear_ppo_loss import LinearPpoLossOutputs, linear_ppo_loss
from rlhf_kernels.ppo_loss import PpoLossOutputs, ppo_loss
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.testing import assert_ok, tier1

from .checks import REFERENCE, each, same_bits
from .dense import dense as dense_logprob

pytestmark = pytest.mark.usefixtures("backend")


LOSS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 2.0, "kl_coef": 0.1, "entropy_coef": 0.05}


def dense(hidden, weight, target, old_logprob, advantage, mask, *, temperature=1.0, softcap=None, **loss_options):
    """The same from materialised logits; only the clipped-loss maths is shared with the op under test."""
    rows = dense_logprob(hidden, weight, target, temperature=temperature, softcap=softcap)
    live = mask * (target != -100)
    return ppo_loss(rows["logprob"], old_logprob, advantage, live, entropy=rows["entropy"], **loss_options)


def make(n, h, v, *, dtype=torch.float32, scale=1.0, seed=0):
    """A batch in which ratios fall on both sides of the clip range, with masked and ignored rows."""
    g = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(n, h, generator=g)).to(dtype)
    weight = torch.randn(v, h, generator=g).to(dtype)
    target = torch.randint(0, v, (n,), generator=g)
    logprob = linear_logprob(hidden, weight, target).logprob
    old = (logprob + 0.5 * torch.randn(n, generator=g).to(logprob.dtype)).detach()
    ref = (logprob + 0.5 * torch.randn(n, generator=g).to(logprob.dtype)).detach()
    advantage = torch.randn(n, generator=g).to(logprob.dtype)
    mask = (torch.rand(n, generator=g) < 0.8).to(logprob.dtype)
    if n > 1:
        target[n // 2] = -100
    return (hidden.requires_grad_(), weight.requires_grad_(), target, old, advantage, mask), ref


@REFERENCE
@each("kl", ["k1", "k2", "k3"])
def test_gradcheck_every_input(kl):
    batch, ref = make(6, 3, 7, dtype=torch.float64)
    hidden, weight, *tokens = batch
    bias, A, B = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((7,), (2, 3), (7, 2)))
    temperature = torch.rand(6) + 0.5

    def f(hidden, weight, bias, A, B):
        head = {
            "bias": bias,
            "lora": HeadLora(A, B, 0.3),
            "temperature": temperature,
            "softcap": 4.0,
            "logit_scale": 1.2,
        }
        return linear_ppo_loss(hidden, weight, *tokens, denom=3.0, ref_logprob=ref, kl=kl, **head, **LOSS).loss

    assert torch.autograd.gradcheck(f, (hidden, weight, bias, A, B))


@each("scale", [1.0, 1e-3])
@each(("n", "vocab"), [(1, 17), (2, 1), (15, 32001), (127, 517), (129, 33)])
def test_tier1_against_dense_logits(n, vocab, scale):
    batch, ref = make(n, 20, vocab, scale=scale)
    options = {"denom": 7.0, "temperature": torch.rand(n) + 0.5, "softcap": 6.0, **LOSS}

    def run(function, dtype):
        hidden, weight, target, *tokens = batch
        hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        out = function(hidden, weight, target, *(x.to(dtype) for x in tokens), ref_logprob=ref.to(dtype), **options)
        return out, torch.autograd.grad(out.loss, (hidden, weight))

    (ours, grads), (exact, grads64) = run(linear_ppo_loss, torch.float32), run(dense, torch.float64)
    plain, grads32 = run(dense, torch.float32)
    for name in ("loss", *PpoLossOutputs.NAMES):
        # Sums over rows in another order: judged on the scale of their terms, hence the absolute slack
        error, other = (abs(getattr(x, name).item() - getattr(exact, name).item()) for x in (ours, plain))
        assert error <= 4 * other + 2e-6 * (1 + abs(getattr(exact, name).item())), name
    for name, g, g64, g32 in zip(("hidden", "weight"), grads, grads64, grads32, strict=True):
        report = tier1(g, g64, g32)
        if name == "hidden" and registry.default_backend() == "reference":
            # A sum over the vocabulary in the order of a BLAS, which may be another one for another layout or number of
            # threads: seen 13 times as far off with two threads as with one. Our own kernels have no such excuse.
            assert report.error <= max(report.bound, 2**-24 * vocab**0.5 * float(g64.abs().max())), report
        else:
            assert_ok(report, name)


def test_clipped_rows_and_rows_without_advantage_keep_their_entropy_gradient():
    (hidden, weight, target, old, advantage, mask), _ = make(40, 20, 517)
    advantage[::3] = 0.0
    options = {"denom": 7.0, **LOSS, "kl_coef": 0.0}

    def gradients(function, dtype):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        tokens = (x.to(dtype) for x in (old, advantage, mask))
        return torch.autograd.grad(function(h, w, target, *tokens, **options).loss, (h, w))

    exact, plain = gradients(dense, torch.float64), gradients(dense, torch.float32)
    for name, g, g64, g32 in zip(
        ("hidden", "weight"), gradients(linear_ppo_loss, torch.float32), exact, plain, strict=True
    ):
        assert_ok(tier1(g, g64, g32), name)


def test_logprob_is_that_of_linear_logprob_and_ratio_is_exactly_one():
    batch, _ = make(129, 8, 32001)
    hidden, weight, target, _, advantage, mask = batch
    old = linear_logprob(hidden.detach(), weight.detach(), target).logprob
    out = linear_ppo_loss(hidden, weight, target, old, advantage, mask, denom=mask.sum())
    assert torch.equal(out.logprob[mask == 1], old[mask == 1])
    assert out.ratio_max == 1
    assert out.clip_fraction == out.approx_kl == 0


def test_per_token_advantages_across_chunks():
    # Three row chunks; only the last row has an advantage, so only it may get a gradient
    n, vocab = 75, 129920
    hidden, weight = torch.randn(n, 4, requires_grad=True), torch.randn(vocab, 4)
    target = torch.randint(0, vocab, (n,))
    old = linear_logprob(hidden.detach(), weight, target).logprob
    advantage = torch.zeros(n)
    advantage[-1] = -3.0
    out = linear_ppo_loss(hidden, weight, target, old, advantage, torch.ones(n), denom=1.0)
    grad = torch.autograd.grad(out.loss, hidden)[0]
    assert (grad[:-1] == 0).all()

    def expected(dtype):
        last = hidden.detach()[-1:].to(dtype).requires_grad_()
        logprob = torch.log_softmax(last @ weight.to(dtype).T, -1)[0, target[-1]]
        return torch.autograd.grad(3.0 * logprob, last)[0]

    assert_ok(tier1(grad[-1:], expected(torch.float64), expected(torch.float32)))


def test_masked_rows_may_hold_anything():
    batch, ref = make(8, 5, 11)
    hidden, weight, target, old, advantage, mask = batch
    mask = mask.bool()
    mask[:2], mask[2:4] = True, False
    clean = linear_ppo_loss(hidden, weight, target, old, advantage, mask, denom=4.0, ref_logprob=ref, **LOSS)
    clean_grads = torch.autograd.grad(clean.loss, (hidden, weight))
    with torch.no_grad():
        hidden[2] = torch.nan
    old[2], advantage[3], ref[3], target[3] = torch.nan, torch.inf, torch.nan, 999
    out = linear_ppo_loss(hidden, weight, target, old, advantage, mask, denom=4.0, ref_logprob=ref, **LOSS)
    same_bits(out, clean)
    grads = torch.autograd.grad(out.loss, (hidden, weight))
    same_bits(grads, clean_grads)


def test_micro_batches_add_up():
    batch, ref = make(40, 6, 50)
    options = {"denom": batch[5].sum(), **LOSS}
    whole = linear_ppo_loss(*batch, ref_logprob=ref, **options)
    halves = [
        linear_ppo_loss(batch[0][rows], batch[1], *(x[rows] for x in batch[2:]), ref_logprob=ref[rows], **options)
        for rows in (slice(0, 13), slice(13, 40))
    ]
    torch.testing.assert_close(halves[0].loss + halves[1].loss, whole.loss)
    torch.testing.assert_close(halves[0].clip_fraction + halves[1].clip_fraction, whole.clip_fraction)
    split = torch.autograd.grad(halves[0].loss + halves[1].loss, batch[1])[0]
    torch.testing.assert_close(split, torch.autograd.grad(whole.loss, batch[1])[0], rtol=1e-4, atol=1e-6)


def _products(function) -> list[list[list[int]]]:
    """Input shapes of every matrix product that `function` runs, inside ops too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as p:
        function()
    return [e.input_shapes for e in p.events() if e.name in ("aten::mm", "aten::addmm", "aten::addmm_")]


@REFERENCE
def test_frozen_head_costs_two_products_and_dead_rows_none():
    n, h, v = 32, 6, 40
    hidden, weight = torch.randn(n, h, requires_grad=True), torch.randn(v, h)
    target = torch.randint(0, v, (n,))
    old = linear_logprob(hidden.detach(), weight, target).logprob
    advantage, mask = torch.ones(n), torch.ones(n)
    advantage[:8] = 0.0
    mask[8:16] = 0.0
    old[16:24] -= 1.0  # ratio e > 1.2 with a positive advantage: clipped

    def run(weight, **options):
        options |= {"denom": 8.0, "backend": "reference"}
        linear_ppo_loss(hidden, weight, target, old, advantage, mask, **options).loss.backward()

    assert [s[:2] for s in _products(lambda: run(weight))] == [[[n, h], [h, v]], [[8, v], [v, h]]]
    trained = _products(lambda: run(weight.clone().requires_grad_()))
    assert [[v, h], [v, 8], [8, h]] in [s[:3] for s in trained]
    with_entropy = _products(lambda: run(weight, entropy_coef=0.1))
    assert with_entropy[1][0] == [24, v]  # only the masked rows have no entropy gradient

    def no_grad():
        with torch.no_grad():
            linear_ppo_loss(hidden, weight, target, old, advantage, mask, denom=8.0, backend="reference")

    assert len(_products(no_grad)) == 1
    mask.zero_()
    assert len(_products(lambda: run(weight))) == 1


def test_gradient_scales_and_can_run_twice():
    batch, _ = make(10, 4, 9)
    out = linear_ppo_loss(*batch, denom=5.0)
    once = torch.autograd.grad(out.loss, batch[0], retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(4.0 * out.loss, batch[0])[0], 4.0 * once)
    assert not any(x.requires_grad for x in (out.statistics, out.logprob))


def test_bf16_and_empty_batches():
    batch, _ = make(20, 32, 100, dtype=torch.bfloat16)
    out = linear_ppo_loss(*batch, denom=10.0)
    exact = dense(*(x.detach().double() if x.is_floating_point() else x for x in batch), denom=10.0)
    torch.testing.assert_close(out.loss.double(), exact.loss, rtol=1e-5, atol=1e-5)
    assert torch.autograd.grad(out.loss, batch[0])[0].dtype == torch.bfloat16
    batch, _ = make(0, 4, 9)
    out = linear_ppo_loss(*batch, denom=1.0)
    assert out.loss == 0
    assert torch.autograd.grad(out.loss, batch[0])[0].shape == (0, 4)
    assert isinstance(out, LinearPpoLossOutputs)


@each(
    ("change", "error", "message"),
    [
        ({"advantage": torch.ones(3, 1)}, ValueError, "advantage: expected shape"),
        ({"mask": torch.ones(3, dtype=torch.int64)}, TypeError, "mask: expected bool or a floating"),
        ({"denom": 0.0}, ValueError, "denom"),
        ({"denom": torch.tensor(0.0)}, ValueError, "denom: expected a finite number > 0, got 0.0"),
        ({"clip_low": -0.1}, ValueError, "clip_low"),
        ({"dual_clip": 1.0}, ValueError, "dual_clip"),
        ({"kl": "k4"}, ValueError, "kl: expected one of"),
        ({"kl_coef": 0.1}, ValueError, "kl_coef: 0.1 needs ref_logprob"),
        ({"entropy_coef": float("inf")}, ValueError, "entropy_coef"),
        ({"target": torch.tensor([0, 1, 9])}, ValueError, "target: expected values in"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    arguments = {"hidden": torch.randn(3, 2), "weight": torch.randn(5, 2), "target": torch.tensor([0, 1, 2])}
    arguments |= {
        "old_logprob": torch.zeros(3),
        "advantage": torch.ones(3),
        "mask": torch.ones(3),
        "denom": 1.0,
    } | change
    with pytest.raises(error, match=message):
        linear_ppo_loss(**arguments)
