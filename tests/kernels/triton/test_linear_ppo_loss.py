"""The Triton `linear_ppo_loss`: against dense fp64, exact ratios, rows without a gradient, hostile rows."""

import math

import pytest
import torch
from rlhf_kernels.linear_logprob import HeadLora, linear_logprob
from rlhf_kernels.linear_ppo_loss import linear_ppo_loss
from rlhf_kernels.ppo_loss import PpoLossOutputs, ppo_loss
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier3
from rlhf_kernels.vocab import triton_sweep as sweep

from tests.kernels.checks import same_bits
from tests.kernels.cuda_graph import detached, repeated_and_captured
from tests.kernels.dense import dense as dense_logprob
from tests.kernels.test_linear_ppo_loss import LOSS, dense
from tests.kernels.test_linear_ppo_loss import make as make_batch
from tests.kernels.triton.test_linear_logprob import eager_gradient, force, nearly_certain, red_zone

OPS = torch.ops.rlhf_kernels

NAN = float("nan")
# numpy speaks of log 0 and −inf − (−inf) in rows that the interpreter computes and nobody reads
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NO_ENTROPY = LOSS | {"entropy_coef": 0.0}


@pytest.fixture(params=["fused", "tiled", "small tiles"])
def path(request, monkeypatch):
    force(monkeypatch, request.param)
    return request.param


def make(n, h, v, device, **options):
    (hidden, weight, *tokens), ref = make_batch(n, h, v, **options)
    tensors = [x.detach().to(device) for x in (hidden, weight, *tokens, ref)]
    return (tensors[0].requires_grad_(), *tensors[1:-1]), tensors[-1]


def run(function, dtype, batch, ref, trained=False, **options):
    """Outputs and gradients to hidden (and weight) with everything in `dtype`."""
    hidden, weight, target, *tokens = batch
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
    weight.requires_grad_(trained)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    out = function(hidden, weight, target, *(x.to(real) for x in tokens), ref_logprob=ref.to(real), **options)
    return out, torch.autograd.grad(out.loss, (hidden, weight) if trained else (hidden,))


def ours(*args, **options):
    return linear_ppo_loss(*args, backend="triton", **options)


def judge(got, exact, plain, largest=0.0):
    """largest: magnitude of a log-sum-exp. Backward makes p again as e^(z − lse), with an lse that was rounded."""
    for name in ("loss", *PpoLossOutputs.NAMES):
        # Sums over rows in another order: judged on the scale of their terms, hence the absolute slack
        error, other = (abs(getattr(x, name).item() - getattr(exact[0], name).item()) for x in (got[0], plain[0]))
        assert error <= 4 * other + 2e-6 * (1 + abs(getattr(exact[0], name).item())), name
    for name, g, g64, g32 in zip(("hidden", "weight"), got[1], exact[1], plain[1], strict=False):
        rounding = 2**-24 * largest * g64.abs().max().item()
        report = tier1(g, g64, g32)
        assert report.error <= report.bound + rounding, (f"d_{name}", report)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("loss", [LOSS, NO_ENTROPY, NO_ENTROPY | {"kl_coef": 0.0}], ids=["all", "no entropy", "policy"])
def test_tier1(device, path, scale, trained, loss):
    n = 70
    batch, ref = make(n, 37, 517, device, scale=scale)
    batch[4][10:20] = 0.0  # advantages
    options = {"denom": 7.0, "temperature": torch.linspace(0.5, 1.5, n, device=device), "softcap": 6.0, **loss}
    got, exact, plain = (
        run(f, dtype, batch, ref, trained, **options)
        for f, dtype in ((ours, torch.float32), (dense, torch.float64), (dense, torch.float32))
    )
    judge(got, exact, plain, largest=6.0 / 0.5 + math.log(517))
    if not loss["entropy_coef"] and not loss["kl_coef"]:
        assert (got[1][0][10:20] == 0).all()


@pytest.mark.parametrize(("n", "vocab"), [(1, 17), (2, 1), (127, 17), (129, 300), (15, 4131)])
def test_ragged_sizes(device, path, n, vocab):
    batch, ref = make(n, 20, vocab, device)
    options = {"denom": 7.0, **NO_ENTROPY}
    judge(
        *(
            run(f, d, batch, ref, **options)
            for f, d in ((ours, torch.float32), (dense, torch.float64), (dense, torch.float32))
        )
    )


def exact_and_eager(batch, ref, **options):
    """d_hidden in fp64, and by eager ops in the batch's dtype from exact coefficients."""
    hidden, weight, target, old, advantage, mask = batch
    h64 = hidden.detach().double().requires_grad_()
    logprob = dense_logprob(h64, weight.double(), target)["logprob"]
    live = mask * (target != -100)
    loss = ppo_loss(logprob, old, advantage, live, ref_logprob=ref, entropy=logprob.detach(), **options).loss
    coefficient, g64 = torch.autograd.grad(loss, (logprob, h64))
    eager = hidden.detach().requires_grad_()
    rows = dense_logprob(eager, weight, target)["logprob"]
    return g64, torch.autograd.grad(rows, eager, coefficient.to(hidden.dtype))[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tier3_half_precision(device, path, dtype):
    batch, ref = make(65, 48, 300, device, dtype=dtype, scale=0.5)
    options = {"denom": 4.0, **NO_ENTROPY}
    out, (got,) = run(ours, dtype, batch, ref, **options)
    exact, _ = run(dense, torch.float64, batch, ref, **options)
    plain, _ = run(dense, torch.float32, batch, ref, **options)
    for name in ("loss", *PpoLossOutputs.NAMES):
        error, other = (abs(getattr(x, name).item() - getattr(exact, name).item()) for x in (out, plain))
        assert error <= 4 * other + 2e-6 * (1 + abs(getattr(exact, name).item())), name
    assert got.dtype == dtype
    assert_ok(tier3(got, *exact_and_eager(batch, ref, **options)), "d_hidden")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tier3_where_the_target_is_nearly_certain(device, path, dtype):
    n = 65
    hidden, weight, target = nearly_certain(n, 48, 300, device, dtype, 0.7)
    h64, w64 = hidden.detach().double(), weight.double()
    logprob = dense_logprob(h64, w64, target, temperature=0.7)["logprob"].requires_grad_()
    old, ref = (logprob.detach() + 0.1 * torch.randn(n, device=device) for _ in range(2))
    advantage, mask = torch.randn(n, device=device), (torch.rand(n, device=device) < 0.8).float()
    options = {"denom": 4.0, "ref_logprob": ref, **NO_ENTROPY}
    out = ours(hidden, weight, target, old, advantage, mask, temperature=0.7, **options)
    got = torch.autograd.grad(out.loss, hidden)[0]
    loss = ppo_loss(logprob, old, advantage, mask, entropy=logprob.detach(), **options).loss
    coefficient = torch.autograd.grad(loss, logprob)[0][:, None]
    exact = eager_gradient(h64, w64, target, 0.7, coefficient)
    assert_ok(tier3(got, exact, eager_gradient(hidden, weight, target, 0.7, coefficient)), "d_hidden")


def test_every_input_and_option(device, path):
    n, v = 40, 200
    batch, ref = make(n, 20, v, device)
    g = torch.Generator().manual_seed(2)
    bias, A, B = (torch.randn(s, generator=g).to(device) for s in ((v,), (3, 20), (v, 3)))
    temperature = torch.linspace(0.5, 1.5, n, device=device)

    def gradients(backend, dtype, needs):
        x = [y.detach().to(dtype) for y in (batch[0], batch[1], bias, A, 0.3 * B)]
        for i in needs:
            x[i].requires_grad_()
        head = {"bias": x[2], "lora": HeadLora(x[3], x[4], 0.3), "logit_scale": 1.2}
        tokens = (batch[2], *(y.to(dtype) for y in batch[3:]))
        loss = LOSS if len(needs) > 1 else NO_ENTROPY
        out = linear_ppo_loss(
            *x[:2],
            *tokens,
            denom=3.0,
            ref_logprob=ref.to(dtype),
            temperature=temperature.to(dtype),
            softcap=4.0,
            **head,
            **loss,
            backend=backend,
        )
        return torch.autograd.grad(out.loss, [x[i] for i in needs])

    for needs in (range(5), [0]):
        got = gradients("triton", torch.float32, needs)
        exact, plain = gradients("reference", torch.float64, needs), gradients("reference", torch.float32, needs)
        for i, x, x64, x32 in zip(needs, got, exact, plain, strict=True):
            assert_ok(tier1(x, x64, x32), f"input {i}")


@pytest.mark.parametrize("n", [16, 70])
def test_logprob_is_that_of_linear_logprob_and_ratio_is_exactly_one(device, path, n):
    (hidden, weight, target, _, advantage, mask), _ = make(n, 20, 517, device)
    old = linear_logprob(hidden.detach(), weight, target, backend="triton").logprob
    for trained, loss in ((False, {}), (True, {}), (False, {"entropy_coef": 0.1})):
        w = weight.detach().requires_grad_(trained)
        out = ours(hidden, w, target, old, advantage, mask, denom=mask.sum(), **loss)
        assert torch.equal(out.logprob[mask == 1], old[mask == 1])
        assert out.ratio_max == 1
        assert out.clip_fraction == out.approx_kl == 0


def test_both_products_are_the_library_s_and_rows_without_a_gradient_get_none(device, path, monkeypatch):
    products = []
    original = sweep.gemm_

    def recorded(out, a, b, **options):
        products.append((tuple(a.shape), tuple(b.shape)))
        original(out, a, b, **options)

    monkeypatch.setattr(sweep, "gemm_", recorded)
    n, h, v = 32, 20, 100
    hidden, weight, target = (
        torch.randn(n, h, device=device),
        torch.randn(v, h, device=device),
        torch.arange(n, device=device),
    )
    hidden.requires_grad_()
    old = linear_logprob(hidden.detach(), weight, target, backend="triton").logprob
    advantage, mask = torch.ones(n, device=device), torch.ones(n, device=device)
    advantage[:8], mask[8:16] = 0.0, 0.0
    target[16] = -100
    old[17:20] -= 1.0  # ratio e > 1.2 with a positive advantage: clipped

    def gradient(**options):
        products.clear()
        out = ours(hidden, weight, target, old, advantage, mask, denom=8.0, **options)
        return torch.autograd.grad(out.loss, hidden)[0]

    grad = gradient()
    rows = sum(a[0] * (b[1] if a[1] == h else a[1]) for a, b in products)
    assert rows == 2 * n * v, products  # of the logits and of E; every row is in both
    assert (grad[:20] == 0).all()
    assert (grad[20:] != 0).any(1).all()
    moved = gradient(ref_logprob=old, kl_coef=0.1)  # a KL term moves rows without advantage
    assert (moved[8:17] == 0).all()
    assert (moved[17:] != 0).any(1).all()
    mask.zero_()
    assert (gradient() == 0).all()


@pytest.mark.parametrize("loss", [LOSS, NO_ENTROPY], ids=["all", "no entropy"])
def test_masked_rows_hold_anything_between_red_zones(device, path, loss):
    batch, ref = make(70, 20, 301, device)
    hidden, weight, target, old, advantage, mask = batch
    mask = mask.bool()
    mask[:4] = torch.tensor([True, True, False, False])
    clean = ours(hidden, weight, target, old, advantage, mask, denom=4.0, ref_logprob=ref, **loss)
    clean_grad = torch.autograd.grad(clean.loss, hidden)[0]
    with torch.no_grad():
        hidden[2], hidden[3] = NAN, torch.inf
    old[2], advantage[3], ref[3], target[3] = NAN, torch.inf, NAN, 999
    zoned = [red_zone(x) for x in (hidden, weight)]
    out = ours(*zoned, target, old, advantage, mask, denom=4.0, ref_logprob=ref, **loss)
    same_bits(out, clean)
    assert torch.equal(torch.autograd.grad(out.loss, zoned[0])[0], clean_grad)


@pytest.mark.parametrize("rows", ["peaked", "uniform", "all_minus_200"])
def test_hostile_rows(device, path, rows):
    batch, _ = make(15, 20, 300, device)
    hidden, weight = batch[:2]
    with torch.no_grad():
        if rows == "peaked":
            hidden *= 30
        else:
            hidden[:, 1:], hidden[:, 0] = 0.0, 1.0
            weight[:, 0] = {"uniform": 0.0, "all_minus_200": -200.0}[rows]
    old = linear_logprob(hidden.detach(), weight, batch[2], backend="triton").logprob
    batch = (*batch[:3], old - 0.1, *batch[4:])
    options = {"denom": 7.0, **NO_ENTROPY}
    got, exact, plain = (
        run(f, d, batch, old, **options)
        for f, d in ((ours, torch.float32), (dense, torch.float64), (dense, torch.float32))
    )
    error, other = ((x[1][0].double() - exact[1][0]).abs().max() for x in (got, plain))
    assert error <= 4 * other + 1e-6 * weight.abs().max()
    assert abs(got[0].loss.item() - exact[0].loss.item()) <= 4 * abs(plain[0].loss.item() - exact[0].loss.item()) + 2e-6


def test_opcheck(device, path):
    batch, ref = make(4, 3, 5, device)
    tensors = (*batch, torch.tensor(2.0, device=device), ref, None, None, None, None)
    numbers = (0.5, 1.0, 3.0, 1.2, -100, 0.2, 0.2, None, "k3", 0.1, 0.0)
    torch.library.opcheck(OPS.linear_ppo_loss.default, (*tensors, *numbers, "hidden", "triton"))


def test_no_grad_and_empty_batches(device, path):
    batch, _ = make(20, 20, 30, device)
    with torch.no_grad():
        out = ours(*batch, denom=5.0)
    assert torch.equal(out.loss, ours(*batch, denom=5.0).loss.detach())
    batch, _ = make(0, 20, 30, device)
    for trained in (False, True):
        weight = batch[1].detach().requires_grad_(trained)
        out = ours(batch[0], weight, *batch[2:], denom=1.0)
        assert out.loss == 0
        inputs = (batch[0], weight) if trained else (batch[0],)
        assert [g.shape for g in torch.autograd.grad(out.loss, inputs)] == [x.shape for x in inputs]


@pytest.mark.gpu
@pytest.mark.parametrize("n", [100, 2000])
def test_bits_capture_and_values_in_bf16(n):
    batch, ref = make(n, 1024, 50264, "cuda", dtype=torch.bfloat16, scale=0.1)
    options = {"denom": 50.0, **NO_ENTROPY}
    hidden, weight, target, *tokens = batch

    def step():
        out = ours(hidden, weight, target, *tokens, ref_logprob=ref, **options)
        return detached(*out, torch.autograd.grad(out.loss, hidden)[0])

    got = step()
    exact, _ = run(dense, torch.float64, batch, ref, **options)
    plain, _ = run(dense, torch.float32, batch, ref, **options)
    slack = 2e-6 + 5e-7 * n / options["denom"]  # on the scale of a sum's terms, as in `judge`
    assert abs(got[0].item() - exact.loss.item()) <= 4 * abs(plain.loss.item() - exact.loss.item()) + slack
    assert_ok(tier3(got[-1], *exact_and_eager(batch, ref, **options)), "d_hidden")
    repeated_and_captured(step, got)
    old = linear_logprob(hidden.detach(), weight, target, backend="triton").logprob
    first = ours(hidden, weight, target, old, *tokens[1:], **options | {"kl_coef": 0.0})
    assert first.ratio_max == 1
    assert first.approx_kl == 0
