"""The Triton `linear_logprob_pair` on all its paths: tiers against fp64, both gradients ahead, the bits of one call."""

import pytest
import torch
from rlhf_kernels.linear_logprob import HeadLora, linear_logprob
from rlhf_kernels.linear_logprob_pair import PairOutputs, linear_logprob_pair
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier3

from tests.kernels.checks import same_bits
from tests.kernels.cuda_graph import detached, repeated_and_captured
from tests.kernels.test_linear_logprob_pair import dense
from tests.kernels.triton.test_linear_logprob import eager_gradient, force, nearly_certain, red_zone

OPS = torch.ops.rlhf_kernels

NAN = float("nan")
# numpy speaks of log 0 and −inf − (−inf) in rows that the interpreter computes and nobody reads
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=["fused", "tiled", "small tiles"])
def path(request, monkeypatch):
    force(monkeypatch, request.param)
    return request.param


def make(n, h, v, device, *, scale=1.0, dtype=torch.float32, apart=0.3):
    g = torch.Generator().manual_seed(0)
    hidden_a = scale * torch.randn(n, h, generator=g)
    hidden_r = hidden_a + apart * scale * torch.randn(n, h, generator=g)
    weight, target = torch.randn(v, h, generator=g), torch.randint(0, v, (n,), generator=g)
    a, r, w = (x.to(device, dtype) for x in (hidden_a, hidden_r, weight))
    return a.requires_grad_(), r, w, target.to(device)


def run(function, cotangent, hidden_a, *rest, **options):
    """Outputs and the gradient of the outputs that `cotangent` [k, n] is for: logprob_a, kl, entropy in this order."""
    out = function(hidden_a, *rest, **options)
    wanted = (out[0], out[2], out[3])[: len(cotangent)]
    loss = sum((c.to(x.dtype) * x).sum() for c, x in zip(cotangent, wanted, strict=True))
    return (*out, torch.autograd.grad(loss, hidden_a)[0])


def double(hidden_a, *rest):
    return hidden_a.detach().double().requires_grad_(), *(x.double() if x.is_floating_point() else x for x in rest)


def judge(got, exact, plain):
    for name, x, x64, x32 in zip((*PairOutputs._fields, "d_hidden"), got, exact, plain, strict=True):
        # The KL of nearly equal rows is a difference of numbers near 1: judge it on their scale
        if name == "kl":
            assert (x.double() - x64).abs().max() <= 4 * (x32.double() - x64).abs().max() + 1e-6
        else:
            assert_ok(tier1(x, x64, x32), name)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("ahead", ["", "logprob", "logprob,kl"])
def test_tier1_every_option(device, path, scale, ahead):
    n, v = 70, 517
    inputs = make(n, 37, v, device, scale=scale)
    inputs[3][5], inputs[3][6] = -100, v - 1
    bias, A, B = (torch.randn(s, device=device) for s in ((v,), (4, 37), (v, 4)))
    detach = {"": (), "logprob": ("kl", "entropy"), "logprob,kl": ("entropy",)}[ahead]
    cotangent = torch.randn(3 - len(detach), n, device=device)

    def options(dtype):
        lora = HeadLora(A.to(dtype), 0.1 * B.to(dtype), 0.5)
        return {
            "temperature": torch.linspace(0.5, 1.5, n, device=device),
            "softcap": 5.0,
            "bias": bias.to(dtype),
            "lora": lora,
        }

    got = run(linear_logprob_pair, cotangent, *inputs, **options(torch.float32), detach=detach, backend="triton")
    exact = run(dense, cotangent, *double(*inputs), **options(torch.float64))
    plain = run(dense, cotangent, *inputs, **options(torch.float32))
    judge(got, exact, plain)


@pytest.mark.parametrize(("n", "vocab"), [(1, 1), (2, 17), (127, 1), (129, 300), (5, 4131)])
def test_ragged_sizes(device, path, n, vocab):
    inputs = make(n, 20, vocab, device)
    inputs[3][-1] = vocab - 1
    for detach in ((), ("entropy",)):
        cotangent = torch.randn(3 - len(detach), n, device=device)
        *got, d_hidden = run(linear_logprob_pair, cotangent, *inputs, detach=detach, backend="triton")
        exact, plain = run(dense, cotangent, *double(*inputs)), run(dense, cotangent, *inputs)
        if vocab == 1:  # p = 1 and no gradient; products that are made again in another order give 1 ± their rounding
            assert d_hidden.abs().max() <= 1e-5 * cotangent.abs().max() * inputs[2].abs().max()
            d_hidden = plain[4]
        judge((*got, d_hidden), exact, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tier3_half_precision(device, path, dtype):
    n, v = 65, 600
    inputs = make(n, 48, v, device, dtype=dtype, scale=0.3)
    floats = [x.detach().float() if x.is_floating_point() else x for x in inputs]
    floats[0].requires_grad_()
    for detach in ((), ("entropy",), ("kl", "entropy")):
        cotangent = torch.randn(3 - len(detach), n, device=device)
        got = run(linear_logprob_pair, cotangent, *inputs, detach=detach, backend="triton")
        exact, plain = run(dense, cotangent, *double(*inputs)), run(dense, cotangent, *floats)
        judge((*got[:4], plain[4]), exact, plain)
        assert got[4].dtype == dtype
        assert_ok(tier3(got[4], exact[4], run(dense, cotangent, *inputs)[4]), f"d_hidden, {detach} detached")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tier3_where_the_target_is_nearly_certain(device, path, dtype):
    n, temperature = 65, 0.7
    hidden_a, weight, target = nearly_certain(n, 48, 600, device, dtype, temperature)
    hidden_r = (0.7 * hidden_a.detach() + 0.03 * torch.randn(n, 48, device=device)).to(dtype)
    on_logprob, on_kl = torch.randn(2, n, 1, device=device)
    inputs = (hidden_a, hidden_r, weight, target)

    for on in ((on_logprob,), (0 * on_logprob, on_kl), (on_logprob, on_kl)):
        options = {"temperature": temperature, "detach": ("kl", "entropy")[len(on) - 1 :], "backend": "triton"}
        got = run(linear_logprob_pair, [c[:, 0] for c in on], *inputs, **options)[4]
        scales = {"on_logprob": on[0], "on_kl": on_kl if len(on) == 2 else 0 * on_kl}
        wide = {name: x.double() for name, x in scales.items()}
        a64, r64, w64, _ = double(*inputs)
        exact = eager_gradient(a64, w64, target, temperature, hidden_r=r64, **wide)
        eager = eager_gradient(hidden_a, weight, target, temperature, hidden_r=hidden_r, **scales)
        assert_ok(tier3(got, exact, eager), f"d_hidden, {options['detach']} detached")


@pytest.mark.parametrize("rows", ["peaked", "uniform", "all_minus_200", "rising", "shifted"])
def test_hostile_rows(device, path, rows):
    hidden_a, hidden_r, weight, target = make(15, 20, 300, device)
    with torch.no_grad():
        if rows == "peaked":
            hidden_a *= 30
        elif rows == "shifted":  # every logit of r is 50 higher: nothing but the centre keeps D's digits
            hidden_r, weight[:, 0] = hidden_a.detach() + 0.1 * torch.randn_like(hidden_a), 1.0
            hidden_r[:, 0] += 50.0
        else:
            hidden_a[:, 1:], hidden_r[:, 1:] = 0.0, 0.0
            hidden_a[:, 0], hidden_r[:, 0] = (1.0, -1.0) if rows == "rising" else (1.0, 2.0)
            first = {"uniform": 0.0, "all_minus_200": -200.0, "rising": torch.linspace(-60, 60, 300, device=device)}
            weight[:, 0] = first[rows]
    inputs = (hidden_a, hidden_r, weight, target)
    cotangent = torch.randn(2, 15, device=device)
    for detach in (("entropy",), ()):
        got = run(linear_logprob_pair, cotangent, *inputs, detach=detach, backend="triton")
        exact, plain = run(dense, cotangent, *double(*inputs)), run(dense, cotangent, *inputs)
        for name, x, x64, x32 in zip((*PairOutputs._fields, "d_hidden"), got, exact, plain, strict=True):
            # Sums of terms that cancel, judged on the scale of the terms: logits, and for d_hidden logits · W
            slack = 1e-6 * (
                1.0 + x64.abs().max() + (max(exact[2].max(), 60.0) * weight.abs().max() if name == "d_hidden" else 60.0)
            )
            allowed = 4 * (x32.double() - x64).abs().max() + slack
            if name == "d_hidden":
                # Products made again in another order round otherwise than those of lse: p is off by that, relative to
                # itself, and d_hidden by that times W. Their rounding is the error that fp32 makes in logprob
                rounding = (plain[0].double() - exact[0]).abs().max()
                allowed += 4 * rounding * cotangent.abs().max() * weight.abs().max()
            assert (x.double() - x64).abs().max() <= allowed, (name, detach)


def test_equal_rows_have_no_kl_and_masked_columns_no_nan(device, path):
    hidden_a, hidden_r, weight, target = make(20, 20, 300, device)
    same = linear_logprob_pair(hidden_a, hidden_a.detach(), weight, target, backend="triton")
    assert (same.kl == 0).all()
    assert torch.equal(same.logprob_a, same.logprob_r)
    bias = torch.zeros(300, device=device)
    bias[:130], bias[290:] = -torch.inf, -torch.inf
    target = 130 + target % 160
    for detach in ((), ("entropy",)):
        out = linear_logprob_pair(hidden_a, hidden_r, weight, target, bias=bias, detach=detach, backend="triton")
        short = dense(hidden_a, hidden_r, weight[130:290], target - 130)
        for x, y in zip(out, short, strict=True):
            torch.testing.assert_close(x, y)
        got = torch.autograd.grad((out.logprob_a + out.kl).sum(), hidden_a)[0]
        torch.testing.assert_close(got, torch.autograd.grad((short.logprob_a + short.kl).sum(), hidden_a)[0])


@pytest.mark.parametrize("n", [16, 70])
def test_bits_are_those_of_linear_logprob(device, path, n):
    hidden_a, hidden_r, weight, target = make(n, 20, 517, device)
    lora = HeadLora(torch.randn(3, 20, device=device), torch.randn(517, 3, device=device), 0.5)
    options = {"temperature": 0.8, "softcap": 4.0, "backend": "triton"}
    a = linear_logprob(hidden_a.detach(), weight, target, outputs=("logprob", "entropy"), lora=lora, **options)
    r = linear_logprob(hidden_r, weight, target, **options)
    for detach in ((), ("entropy",)):
        pair = linear_logprob_pair(hidden_a, hidden_r, weight, target, lora=lora, detach=detach, **options)
        assert torch.equal(pair.logprob_a, a.logprob)
        assert torch.equal(pair.entropy, a.entropy)
        assert torch.equal(pair.logprob_r, r.logprob)


def test_ignored_rows_hold_nan_between_red_zones(device, path):
    hidden_a, hidden_r, weight, target = make(70, 20, 301, device)
    ignored = torch.tensor([1, 4, 69], device=device)
    target[ignored] = -100
    for detach in ((), ("entropy",)):
        cotangent = torch.randn(3 - len(detach), 70, device=device)
        clean = run(linear_logprob_pair, cotangent, hidden_a, hidden_r, weight, target, detach=detach, backend="triton")
        dirty_a, dirty_r = hidden_a.detach().clone(), hidden_r.clone()
        dirty_a[1], dirty_a[4], dirty_r[4], dirty_r[69] = NAN, torch.inf, NAN, -torch.inf
        zoned = [red_zone(x) for x in (dirty_a.requires_grad_(), dirty_r, weight)]
        got = run(linear_logprob_pair, cotangent, *zoned, target, detach=detach, backend="triton")
        same_bits(got, clean)
        assert all((x[ignored] == 0).all() for x in got)


def test_opcheck(device, path):
    inputs = make(4, 3, 5, device)
    for ahead in ("", "logprob,kl"):
        arguments = (*inputs, None, None, None, None, 0.5, 1.0, 2.0, 1.5, -100, ahead, "triton")
        torch.library.opcheck(OPS.linear_logprob_pair.default, arguments)


def test_empty_batch(device, path):
    inputs = make(0, 20, 30, device)
    for detach in ((), ("entropy",)):
        got = run(linear_logprob_pair, torch.zeros(2, 0, device=device), *inputs, detach=detach, backend="triton")
        assert [x.shape for x in got] == [(0,)] * 4 + [(0, 20)]


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "vocab"), [(2048, 32001), (128, 129920), (1024, 151936)])
def test_ragged_vocabularies_bits_and_capture_in_bf16(n, vocab):
    inputs = make(n, 1024, vocab, "cuda", scale=0.1, dtype=torch.bfloat16)
    floats = [x.detach().float() if x.is_floating_point() else x for x in inputs]
    floats[0].requires_grad_()
    cotangent = torch.randn(2, n, device="cuda")

    def step():
        return detached(*run(linear_logprob_pair, cotangent, *inputs, detach=("entropy",), backend="triton"))

    got, exact, plain = step(), run(dense, cotangent, *double(*inputs)), run(dense, cotangent, *floats)
    judge((*got[:4], plain[4]), exact, plain)
    assert_ok(tier3(got[4], exact[4], run(dense, cotangent, *inputs)[4]), "d_hidden")
    del exact, plain
    one = linear_logprob(inputs[0].detach(), *inputs[2:], outputs=("logprob", "entropy"), backend="triton")
    assert torch.equal(one.logprob, got[0])
    assert torch.equal(one.entropy, got[3])
    repeated_and_captured(step, got)
