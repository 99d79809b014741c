"""Ops between matmuls: rounding where transformers' modules round, bits of a row alone, gradients.

What is not rounded to the dtype of the tensors is held to float64.
"""

import functools
import itertools
import math

import pytest
import torch
from rlhf_kernels.llama_ops import _rms_norm, activation, reference, rms_norm, rotary, swiglu
from rlhf_kernels.llama_ops.native import KINDS
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.testing import assert_ok, tier1
from rlhf_kernels.runtime.triton_support import INTERPRETED
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from .checks import ISAS, each, in_any_company, same_bits, threads_change_no_bit, tier_of_dtype, with_gradients

DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    # the interpreter cuts fp32 down to bf16 instead of rounding
    "triton": (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.bfloat16, torch.float16),
}
# 5000: in two pieces
WIDTHS = {"cpu": (1, 2, 15, 16, 17, 64, 257, 512), "triton": (1, 2, 17, 64, 257, 5000)}
COUNTS = {"cpu": (1, 15, 16, 17, 33, 4097, 70000), "triton": (1, 17, 2500)}
# (B, heads, kv_heads, T, D): halves below, at and above a vector; decoding, one head, several sequences
HEADS = ((1, 1, 1, 1, 2), (1, 4, 2, 7, 8), (2, 3, 3, 5, 30), (1, 8, 2, 33, 64), (3, 2, 1, 4, 70), (16, 8, 8, 1, 64))
each_kind = each("kind", KINDS)


@pytest.fixture(params=ISAS)
def backend(request):
    """A backend that has kernels, on every instruction set."""
    with native.use_isa(request.param):
        yield "cpu"


def each_dtype(test):
    """Every dtype that the backend serves."""

    @each("dtype", (torch.float32, torch.bfloat16, torch.float16))
    @functools.wraps(test)
    def run(backend, dtype, **rest):
        if dtype not in DTYPES[backend]:
            pytest.skip("another backend's")
        test(backend=backend, dtype=dtype, **rest)

    return run


def heads(batch, n_heads, kv_heads, tokens, dim, dtype=torch.float32):
    """q and k as projections make them, and angles."""
    q = torch.randn(batch, tokens, n_heads, dim, dtype=dtype).transpose(1, 2)
    k = torch.randn(batch, tokens, kv_heads, dim, dtype=dtype).transpose(1, 2)
    return q, k, torch.randn(batch, tokens, dim, dtype=dtype), torch.randn(batch, tokens, dim, dtype=dtype)


# ---- forward: bits ---------------------------------------------------------------------------------------------------


@each_dtype
def test_a_norm_rounds_where_llama_s_does(backend, dtype):
    for width, rows in itertools.product(WIDTHS[backend], ((1,), (3, 5), (1, 40 if INTERPRETED else 200))):
        x = 3 * torch.randn(*rows, width, dtype=dtype)
        norm = LlamaRMSNorm(width, eps=1e-5).to(dtype)
        torch.nn.init.normal_(norm.weight)
        y, rstd = _rms_norm(x, norm.weight, 1e-5, False, backend)
        assert y.dtype == dtype
        assert torch.equal(y, norm.weight * (x.float() * rstd).to(dtype))
        exact = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        assert_ok(tier1(rstd, exact, exact.float()))
        assert torch.equal(rms_norm(x, norm.weight, eps=1e-5, backend="reference"), norm(x))


@each_dtype
def test_a_norm_by_one_plus_its_weight_rounds_once_as_gemma_s(backend, dtype):
    for width in WIDTHS[backend]:
        x = 3 * torch.randn(3, 5, width, dtype=dtype)
        norm = Gemma2RMSNorm(width, eps=1e-5).to(dtype)
        torch.nn.init.normal_(norm.weight)
        y, rstd = _rms_norm(x, norm.weight, 1e-5, True, backend)
        assert torch.equal(y, (x.float() * rstd * (1.0 + norm.weight.float())).to(dtype))
        assert torch.equal(rstd, _rms_norm(x, norm.weight, 1e-5, False, backend)[1])
        assert torch.equal(rms_norm(x, norm.weight, eps=1e-5, plus_one=True, backend="reference"), norm(x))
        assert torch.equal(rms_norm(x[1, 2], norm.weight, eps=1e-5, plus_one=True, backend=backend), y[1, 2])


@each_dtype
@each("shape", HEADS)
def test_turned_heads_have_the_bits_of_llama_s(backend, dtype, shape):
    q, k, cos, sin = heads(*shape, dtype)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    for ours, theirs in zip(rotary(q, k, cos, sin, backend=backend), expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.transpose(1, 2).is_contiguous()  # what comes next folds heads without a copy
    one = cos[:1], sin[:1]
    for on in (backend, "reference"):
        same_bits(rotary(q, k, *one, backend=on), apply_rotary_pos_emb(q, k, *one))


@each_dtype
def test_a_gated_product_rounds_where_torch_does(backend, dtype):
    for count in COUNTS[backend]:
        gate, up = 4 * torch.randn(count, dtype=dtype), torch.randn(count, dtype=dtype)
        ours, torchs, exact = swiglu(gate, up, backend=backend), F.silu(gate) * up, F.silu(gate.double()) * up.double()
        assert_ok(tier_of_dtype(ours, exact, torchs))
        silu = swiglu(gate.float(), torch.ones(count), backend=backend).to(dtype)  # rounded before the product
        assert torch.equal(ours, silu * up)
        assert torch.equal(swiglu(gate, up, backend="reference"), torchs)


@each_dtype
def test_an_activation_rounds_once(backend, dtype):
    for kind, scale, count in itertools.product(KINDS, (1.0, 1e-3, 4.0), COUNTS[backend]):
        x = (scale * torch.randn(count)).to(dtype)
        ours, torchs = activation(x, kind, backend=backend), reference.activation(x, kind)
        exact = reference.activation(x.double(), kind)
        assert ours.dtype == dtype
        assert_ok(tier_of_dtype(ours, exact, torchs))
        assert torch.equal(ours, activation(x.float(), kind, backend=backend).to(dtype))


@each_dtype
def test_silu_is_that_of_a_gated_product(backend, dtype):
    x = 4 * torch.randn(1000, dtype=dtype)
    assert torch.equal(activation(x, "silu", backend=backend), swiglu(x, torch.ones_like(x), backend=backend))


def test_no_digit_cancels_in_the_tail_of_gelu(backend):
    x = torch.linspace(-12.5, 0.0, 40_001)[:-1]
    exact = x.double() * torch.special.erfc(-x.double() / math.sqrt(2)) / 2
    ours = activation(x, "gelu", backend=backend)
    assert ((ours - exact) / exact).abs().max() < 8 * 2.0**-23  # ulp


def test_the_reference_is_the_module_of_transformers():
    names = ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu")
    for dtype, (name, kind) in itertools.product(DTYPES["cpu"], zip(names, KINDS, strict=True)):
        x = torch.randn(7, 60, dtype=dtype)
        assert torch.equal(activation(x, kind, backend="reference"), ACT2FN[name](x))


@each_dtype
@each_kind
def test_an_element_has_the_bits_that_it_has_alone(backend, dtype, kind):
    """At each place of a vector and of its end; torch's own elementwise functions do not keep this."""
    n = 2400 if backend == "triton" else 83
    x, dy = 3 * torch.randn(n, dtype=dtype), torch.randn(n, dtype=dtype)
    run = lambda x, dy: with_gradients(lambda x: activation(x, kind, backend=backend), [x], dy)  # noqa: E731
    places = [torch.randperm(n)[:size] for size in (8, 1033)] if backend == "triton" else [[i] for i in range(n)]
    in_any_company(run, [x, dy], [*places, *(slice(begin, None) for begin in (1, 3, 16, 20))])
    square = run(x[:80].view(10, 8).T, dy[:80].view(10, 8).T)
    same_bits([part.T.reshape(80) for part in square], [y[:80] for y in run(x, dy)])


@each_dtype
def test_a_row_has_the_bits_that_it_has_alone(backend, dtype):
    n, widths = (70, (48, 257)) if backend == "triton" else (37, (*WIDTHS["cpu"], 4103))
    for width in widths if INTERPRETED or backend != "triton" else (*widths, 128, 4096, 8192):
        x, up, dy, weight = (torch.randn(n, width, dtype=dtype) for _ in range(4))

        def run(x, up, dy, weight=weight[0]):
            normed = with_gradients(lambda x: rms_norm(x, weight, eps=1e-6, backend=backend), [x], dy)
            return [*normed, *with_gradients(lambda *given: swiglu(*given, backend=backend), [x, up], dy)]

        # also from an address that is no multiple of 16 bytes on
        in_any_company(run, [x, up, dy], [[0], [5, 36], slice(3, 20), torch.randperm(n)])
        moved = weight.flatten()[1 : width + 1]
        odd = rms_norm(x[7:12], moved, eps=1e-6, backend=backend)
        assert torch.equal(odd, rms_norm(x, moved.clone(), eps=1e-6, backend=backend)[7:12])


@each_dtype
def test_a_token_has_the_bits_that_it_has_alone(backend, dtype):
    q, k, *angles = heads(1, 4, 2, 70, 16, dtype)
    tensors = [x.transpose(1, 2)[0] for x in (q, k, torch.randn_like(q), torch.randn_like(k))]

    def run(q, k, d_q, d_k, *angles):
        leaves = [x.transpose(0, 1)[None].requires_grad_() for x in (q, k)]
        turned = rotary(*leaves, *(x[None] for x in angles), backend=backend)
        seeds = [x.transpose(0, 1)[None] for x in (d_q, d_k)]
        return [x[0].transpose(0, 1) for x in (*turned, *torch.autograd.grad(turned, leaves, seeds))]

    companies = [torch.randperm(70)[:n] for n in (1, 2, 15, 64, 65)]
    in_any_company(run, [*tensors, *(x[0] for x in angles)], companies)


def test_layouts_change_no_bit(backend):
    q, k, cos, sin = heads(2, 4, 2, 9, 16)
    expected = rotary(q, k, cos, sin, backend=backend)
    wide = torch.full((2, 4, 9, 40), torch.nan)
    wide[..., 3:19] = q
    spread = torch.full((2, 2, 9, 32), torch.nan)
    spread[..., ::2] = k
    same_bits(rotary(wide[..., 3:19], spread[..., ::2], cos, sin, backend=backend), expected)
    x, weight = torch.randn(40, 6), torch.randn(40)
    dense = rms_norm(x.T.contiguous(), weight, eps=0.0, backend=backend)
    assert torch.equal(rms_norm(x.T, weight, eps=0.0, backend=backend), dense)


@each_dtype
def test_threads_change_no_bit(backend, dtype):
    q, k, cos, sin = heads(1, 8, 8, 300, 64, dtype)
    x, weight, gate, up = (torch.randn(300, 512, dtype=dtype) for _ in range(4))

    def run():
        leaves = [t.clone().requires_grad_() for t in (q, k, x, gate, up)]
        outputs = [*rotary(*leaves[:2], cos, sin), rms_norm(leaves[2], weight[0], eps=1e-6), swiglu(*leaves[3:])]
        outputs += [activation(leaves[3], kind, backend=backend) for kind in KINDS]
        return [*outputs, *torch.autograd.grad(sum(y.float().square().sum() for y in outputs), leaves)]

    threads_change_no_bit(run)


# ---- gradients -------------------------------------------------------------------------------------------------------


def hold(backend, function, leaves, turned=lambda x: x):
    """The gradients of function(backend, *leaves) to float64, by the tier of each dtype."""
    for dtype in DTYPES[backend]:
        rounded = [x.detach().to(dtype) for x in leaves]
        seeds = [turned(torch.randn_like(y)) for y in function("reference", *rounded)]

        def run(on, wide, rounded=rounded, seeds=seeds):
            own = [x.to(wide, copy=True).requires_grad_() for x in rounded]
            return torch.autograd.grad(function(on, *own), own, [seed.to(wide) for seed in seeds])

        for parts in zip(run(backend, dtype), run("reference", torch.float64), run("reference", dtype), strict=True):
            assert parts[0].dtype == dtype
            assert_ok(tier_of_dtype(*parts), "gradient")


@each("plus_one", [False, True])
def test_gradients_of_a_norm(backend, plus_one):
    def function(on, *leaves):
        return [rms_norm(*leaves, eps=1e-3, plus_one=plus_one, backend=on)]

    for width in WIDTHS[backend][2:]:
        hold(backend, function, [torch.randn(9 if INTERPRETED else 40, width), torch.randn(width)])


@each("shape", HEADS[1:])
def test_gradients_of_turned_heads(backend, shape):
    q, k, *angles = heads(*shape)

    def function(on, *leaves):
        return rotary(*leaves, *(x.bfloat16().to(leaves[0].dtype) for x in angles), backend=on)

    hold(backend, function, [q, k])
    hold(backend, function, [q, k], lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))


def test_gradients_of_a_gated_product(backend):
    gate = torch.cat((4 * torch.randn(5000), torch.tensor([-90.0, -60.0, -20.0, 0.0, 20.0, 60.0, 90.0])))
    hold(backend, lambda on, *leaves: [swiglu(*leaves, backend=on)], [gate, torch.randn_like(gate)])


@each_kind
def test_gradients_of_an_activation(backend, kind):
    far = torch.tensor([-90.0, -60.0, -20.0, -0.0, 0.0, 20.0, 60.0, 90.0])
    for scale in (4.0, 1.0, 1e-3):
        x = torch.cat((scale * torch.randn(3003 if backend == "triton" else 5003), far))
        hold(backend, lambda on, x: [activation(x, kind, backend=on)], [x])


@each_kind
def test_gradcheck_of_an_activation_s_reference(kind):
    x = torch.randn(11, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: activation(x, kind, backend="reference"), x)


def test_what_needs_no_gradient_gets_none(backend):
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    rms_norm(x.detach(), weight, eps=0.0, backend=backend).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    q, k, cos, sin = heads(1, 2, 2, 3, 4)
    turned, _ = rotary(q.requires_grad_(), k, cos, sin, backend=backend)
    turned.sum().backward()  # nothing flows back through k
    assert q.grad is not None
    assert k.grad is None


@each_dtype
def test_nothing_spreads_beyond_its_row(backend, dtype):
    x, weight = torch.randn(4, 33, dtype=dtype), torch.randn(33, dtype=dtype)
    clean = rms_norm(x, weight, eps=1e-6, backend=backend)
    for poison in (torch.nan, torch.inf, -torch.inf):
        hurt = x.clone()
        hurt[1, 32] = poison
        y = rms_norm(hurt, weight, eps=1e-6, backend=backend)
        expected = reference.rms_norm(hurt, weight, 1e-6)
        assert torch.equal(y[[0, 2, 3]], clean[[0, 2, 3]])
        torch.testing.assert_close(y[1], expected[1], rtol=0, atol=0, equal_nan=True)
    q, k, cos, sin = heads(1, 2, 1, 4, 6, dtype)
    q[0, 1, 2, 0] = torch.nan
    turned = rotary(q, k, cos, sin, backend=backend)
    for ours, theirs in zip(turned, reference.rotary(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@each_dtype
@each_kind
def test_an_activation_of_what_is_no_number_and_of_what_is_far(backend, dtype, kind):
    if dtype == torch.float16:
        pytest.skip("its numbers end at 65504")
    x = torch.randn(37, dtype=dtype)
    clean = activation(x, kind, backend=backend)
    far = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e20, -1e20, 3e38, -3e38, 0.0, -0.0, 1e-39], dtype=dtype)
    hurt = torch.cat((x[:20], far, x[30:]))
    y = activation(hurt, kind, backend=backend)
    assert torch.equal(y[:20], clean[:20])
    assert torch.equal(y[30:], clean[30:])
    exact = reference.activation(far.double(), kind).to(dtype)
    exact[1] = torch.inf  # torch.erf's own is NaN for some dtypes
    torch.testing.assert_close(y[20:30], exact, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(y[20:30].signbit()[3:], exact.signbit()[3:])
    finite = hurt.clone()
    finite[20:23] = 0.0
    _, slope = torch.autograd.functional.vjp(lambda x: activation(x, kind, backend=backend).sum(), finite)
    assert slope.isfinite().all()
    assert (slope[23:27:2] == 1.0).all()
    assert (slope[24:27:2].abs() < 1e-30).all()


@each_dtype
def test_subnormal_numbers_stay(backend, dtype):
    x = torch.full((2, 16), 1e-39, dtype=dtype)
    ones = torch.ones(16, dtype=dtype)
    assert torch.equal(rms_norm(x, ones, eps=1.0, backend=backend), reference.rms_norm(x, ones, 1.0))
    q = torch.full((1, 1, 1, 32), 1e-39, dtype=dtype)
    angles = torch.full((1, 1, 32), 0.75, dtype=dtype)
    expected = reference.rotary(q, q, angles, angles)
    assert expected[0].count_nonzero() > 0
    same_bits(rotary(q, q, angles, angles, backend=backend), expected)


def test_nothing_at_all(backend):
    assert rms_norm(torch.empty(0, 8), torch.ones(8), eps=1e-6, backend=backend).shape == (0, 8)
    q, k, cos, sin = heads(1, 2, 2, 0, 4)
    assert [x.shape for x in rotary(q, k, cos, sin, backend=backend)] == [(1, 2, 0, 4)] * 2
    assert swiglu(torch.empty(0, 3), torch.empty(0, 3), backend=backend).shape == (0, 3)
    empty = torch.empty(2, 0, requires_grad=True)
    y = activation(empty, "gelu", backend=backend)
    assert y.shape == torch.autograd.grad(y.sum(), empty)[0].shape == (2, 0)
    assert activation(torch.tensor(1.0), "silu", backend=backend).shape == ()


ONES = torch.ones(2, 4)
Q, ANGLES, LEARNED = torch.ones(1, 2, 3, 4), torch.ones(1, 3, 4), torch.ones(1, 3, 4, requires_grad=True)
HALF, DOUBLE = ONES.half(), ONES.double()


@each(
    ("call", "error", "message"),
    [
        (lambda: rms_norm([1.0], ONES[0], eps=0), TypeError, "x: expected a tensor, got list"),
        (lambda: swiglu(ONES.long(), ONES), TypeError, "gate: expected a floating point dtype"),
        (
            lambda: activation(ONES, "relu"),
            ValueError,
            r"kind: expected .* \('silu', .*, 'quick_gelu'\), got 'relu'",
        ),
        (lambda: activation(ONES.long(), "gelu"), TypeError, "x: expected a floating point"),
        (lambda: activation(HALF, "gelu", backend="cpu"), registry.BackendUnavailableError, "float32 and"),
        (lambda: swiglu(ONES, DOUBLE), ValueError, "up: expected torch.float32"),
        (lambda: swiglu(ONES, ONES[0]), ValueError, r"up: expected shape \(2, 4\), got \(4,\)"),
        (lambda: rms_norm(ONES, ONES[:, 0], eps=0), ValueError, r"weight: expected shape \(4,\)"),
        (lambda: rms_norm(ONES[:, :0], ONES[0, :0], eps=0), ValueError, "x: expected a last dimension"),
        (lambda: rms_norm(ONES, ONES[0], eps=math.nan), ValueError, "eps: expected a number of at least 0, got nan"),
        (lambda: rotary(Q[..., :3], Q[..., :3], ANGLES, ANGLES), ValueError, "q: expected shape .* even D"),
        (lambda: rotary(Q, Q[:, :, :2], ANGLES, ANGLES), ValueError, "k: expected the B, T, D of q"),
        (lambda: rotary(Q, Q, ANGLES[:, :2], ANGLES), ValueError, "cos: expected shape"),
        (lambda: rotary(Q, Q, ANGLES, LEARNED), ValueError, "sin: expected angles without"),
        (lambda: swiglu(ONES, ONES, backend="cuda"), registry.BackendUnavailableError, "has no cuda"),
        (lambda: swiglu(DOUBLE, DOUBLE, backend="cpu"), registry.BackendUnavailableError, "float32 and bfloat16"),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
