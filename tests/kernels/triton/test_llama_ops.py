"""The Triton ops between matmuls: rounding where the reference rounds, bits of a row alone, gradients, layouts, choice.

What is not rounded to the dtype of the tensors is held to float64.
"""

import pytest
import torch
from rlhf_kernels.llama_ops import _rms_norm, activation, reference, rms_norm, rotary, swiglu
from rlhf_kernels.llama_ops.native import KINDS
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier3
from rlhf_kernels.runtime.triton_support import INTERPRETED
from torch.nn import functional as F

from tests.kernels.checks import each, same_bits
from tests.kernels.cuda_graph import detached, repeated_and_captured

ON = {"backend": "triton"}
# the interpreter cuts fp32 down to bf16 instead of rounding
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 2, 17, 64, 257, 5000)  # the last in two pieces
# (B, heads, kv_heads, T, D): decoding, odd halves, several sequences
HEADS = ((1, 1, 1, 1, 2), (2, 3, 3, 5, 30), (1, 8, 2, 33, 64), (16, 8, 8, 1, 64))
COMPANIES = (1, 2, 15, 64, 65, 300)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_kind = pytest.mark.parametrize("kind", KINDS)
# numpy speaks of 1 / 0 in rows that the interpreter computes and nobody reads, and of e^128
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def draw(device):
    """Random tensors where the kernels run."""
    return lambda *shape, dtype=torch.float32, scale=1.0: (scale * torch.randn(*shape)).to(device, dtype)


def heads(draw, batch, n_heads, kv_heads, tokens, dim, dtype=torch.float32):
    """q and k as projections make them, and angles."""
    q, k = (draw(batch, tokens, n, dim, dtype=dtype).transpose(1, 2) for n in (n_heads, kv_heads))
    return q, k, draw(batch, tokens, dim, dtype=dtype), draw(batch, tokens, dim, dtype=dtype)


def held(ours, exact, torchs):
    assert ours.dtype == torchs.dtype
    assert_ok((tier1 if ours.dtype == torch.float32 else tier3)(ours, exact, torchs))


# ---- forward ---------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_rounds_where_the_reference_does(draw, dtype, plus_one, width):
    x, weight = draw(3, 5, width, dtype=dtype, scale=3.0), draw(width, dtype=dtype)
    y, rstd = _rms_norm(x, weight, 1e-5, plus_one, "triton")
    normed = x.float() * rstd
    expected = (normed * (1.0 + weight.float())).to(dtype) if plus_one else weight * normed.to(dtype)
    assert torch.equal(y, expected)
    exact = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert_ok(tier1(rstd, exact, exact.float()))


@each_dtype
@each("shape", HEADS)
def test_turned_heads_have_the_bits_of_the_reference(draw, dtype, shape):
    q, k, cos, sin = heads(draw, *shape, dtype)
    for angles in ((cos, sin), (cos[:1], sin[:1])):
        for ours, theirs in zip(rotary(q, k, *angles, **ON), reference.rotary(q, k, *angles), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.transpose(1, 2).is_contiguous()


@each_dtype
@each("count", [1, 17, 2500])
def test_a_gated_product_rounds_where_torch_does(draw, dtype, count):
    gate, up = draw(count, dtype=dtype, scale=4.0), draw(count, dtype=dtype)
    ours = swiglu(gate, up, **ON)
    held(ours, F.silu(gate.double()) * up.double(), F.silu(gate) * up)
    wide = swiglu(gate.float(), torch.ones_like(gate.float()), **ON).to(dtype)  # silu alone, rounded before the product
    assert torch.equal(ours, wide * up)
    assert torch.equal(wide, activation(gate, "silu", **ON))


@each_dtype
@each_kind
@each("scale", [1e-3, 1.0, 4.0])
def test_an_activation_rounds_once(draw, dtype, kind, scale):
    x = draw(2500, dtype=dtype, scale=scale)
    ours = activation(x, kind, **ON)
    held(ours, reference.activation(x.double(), kind), reference.activation(x, kind))
    assert torch.equal(ours, activation(x.float(), kind, **ON).to(dtype))


# ---- bits of a row alone ---------------------------------------------------------------------------------------------


def gradient_too(function, leaves, dy):
    """y and the gradients of the leaves."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@each_dtype
@pytest.mark.parametrize("width", [48, 257, *(pytest.param(n, marks=pytest.mark.gpu) for n in (128, 4096, 8192))])
def test_a_row_has_the_bits_that_it_has_alone(draw, dtype, width):
    x, up, dy = (draw(300, width, dtype=dtype) for _ in range(3))
    weight = draw(width, dtype=dtype)
    norm = lambda x: rms_norm(x, weight, eps=1e-6, **ON)  # noqa: E731
    gated = lambda x, up: swiglu(x, up, **ON)  # noqa: E731
    whole = [*gradient_too(norm, [x], dy), *gradient_too(gated, [x, up], dy)]
    for n in COMPANIES:
        rows = torch.randperm(300)[:n].to(x.device)
        some = [*gradient_too(norm, [x[rows]], dy[rows]), *gradient_too(gated, [x[rows], up[rows]], dy[rows])]
        assert all(torch.equal(part, found[rows]) for part, found in zip(some, whole, strict=True))
    odd = slice(7, 12)  # from an address that is no multiple of 16 bytes on
    assert torch.equal(norm(x[odd]), whole[0][odd])
    assert torch.equal(rms_norm(x[odd], weight.repeat(2)[width:], eps=1e-6, **ON), whole[0][odd])


@each_dtype
@each_kind
def test_an_element_has_the_bits_that_it_has_alone(draw, dtype, kind):
    x, dy = draw(300, 8, dtype=dtype, scale=3.0), draw(300, 8, dtype=dtype)
    activate = lambda x: activation(x, kind, **ON)  # noqa: E731
    whole = gradient_too(activate, [x], dy)
    for n in COMPANIES:
        rows = torch.randperm(300)[:n].to(x.device)
        some = gradient_too(activate, [x[rows]], dy[rows])
        assert all(torch.equal(part, found[rows]) for part, found in zip(some, whole, strict=True))
    turned = gradient_too(activate, [x[:, 3:].T], dy[:, 3:].T)
    assert all(torch.equal(part.T, found[:, 3:]) for part, found in zip(turned, whole, strict=True))


@each_dtype
def test_a_token_has_the_bits_that_it_has_alone(draw, dtype):
    q, k, cos, sin = heads(draw, 1, 4, 2, 300, 16, dtype)
    d_q, d_k = draw(*q.shape, dtype=dtype), draw(*k.shape, dtype=dtype)

    def run(q, k, cos, sin, *seeds):
        leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
        turned = rotary(*leaves, cos, sin, **ON)
        return [*turned, *torch.autograd.grad(turned, leaves, seeds)]

    whole = run(q, k, cos, sin, d_q, d_k)
    for n in COMPANIES:
        at = torch.randperm(300)[:n].to(q.device)
        some = run(q[:, :, at], k[:, :, at], cos[:, at], sin[:, at], d_q[:, :, at], d_k[:, :, at])
        assert all(torch.equal(part, found[:, :, at]) for part, found in zip(some, whole, strict=True))


def test_layouts_change_no_bit(draw):
    q, k, cos, sin = heads(draw, 2, 4, 2, 9, 16)
    expected = rotary(q, k, cos, sin, **ON)
    wide = torch.full((2, 4, 9, 40), torch.nan, device=q.device)
    wide[..., 3:19] = q
    spread = torch.full((2, 2, 9, 32), torch.nan, device=q.device)
    spread[..., ::2] = k
    turned = cos.transpose(0, 1).contiguous().transpose(0, 1)
    same_bits(rotary(wide[..., 3:19], spread[..., ::2], turned, sin, **ON), expected)
    x, weight = draw(40, 6), draw(80)
    assert torch.equal(
        rms_norm(x.T, weight[::2], eps=0.0, **ON), rms_norm(x.T.contiguous(), weight[::2].contiguous(), eps=0.0, **ON)
    )
    assert torch.equal(swiglu(x.T, x.T, **ON), swiglu(x, x, **ON).T)


# ---- gradients -------------------------------------------------------------------------------------------------------


def hold(function, leaves, seeds):
    """The gradients of a function to float64, by the tier of each dtype."""
    for dtype in DTYPES:
        rounded = [x.to(dtype) for x in leaves], [x.to(dtype) for x in seeds]
        found = []
        for wide, backend in ((dtype, "triton"), (torch.float64, "reference"), (dtype, "reference")):
            given = [x.to(wide, copy=True).requires_grad_() for x in rounded[0]]
            found.append(torch.autograd.grad(function(given, backend), given, [seed.to(wide) for seed in rounded[1]]))
        for mine, exact, plain in zip(*found, strict=True):
            held(mine, exact, plain)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("width", WIDTHS[2:])
def test_gradients_of_a_norm(draw, width, plus_one):
    def function(leaves, backend):
        return [rms_norm(*leaves, eps=1e-3, plus_one=plus_one, backend=backend)]

    hold(function, [draw(20, width), draw(width)], [draw(20, width)])


@each("shape", HEADS[1:3])
def test_gradients_of_turned_heads(draw, shape):
    q, k, cos, sin = heads(draw, *shape)
    cos, sin = cos.half(), sin.half()

    def function(leaves, backend):
        return rotary(*leaves, cos.to(leaves[0].dtype), sin.to(leaves[0].dtype), backend=backend)

    hold(function, [q, k], [draw(*q.shape), draw(*k.shape)])


def test_gradients_of_a_gated_product(draw):
    def function(leaves, backend):
        return [swiglu(*leaves, backend=backend)]

    far = torch.tensor([-60.0, -20.0, 0.0, 20.0, 60.0])
    gate = torch.cat((4 * torch.randn(3000), far)).to(draw(1).device)
    hold(function, [gate, draw(3005)], [draw(3005)])


@each_kind
def test_gradients_of_an_activation(draw, kind):
    def function(leaves, backend):
        return [activation(*leaves, kind, backend=backend)]

    far = torch.tensor([-60.0, -20.0, -0.0, 0.0, 20.0, 60.0])
    for scale in (4.0, 1e-3):
        x = torch.cat((scale * torch.randn(3000), far)).to(draw(1).device)
        hold(function, [x], [draw(3006)])


def test_what_needs_no_gradient_gets_none(draw):
    x, weight = draw(4, 8).requires_grad_(), draw(8).requires_grad_()
    rms_norm(x.detach(), weight, eps=0.0, **ON).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    q, k, cos, sin = heads(draw, 1, 2, 2, 3, 4)
    turned, _ = rotary(q.requires_grad_(), k, cos, sin, **ON)
    turned.sum().backward()  # nothing flows back through k
    assert q.grad is not None
    assert k.grad is None


# ---- hostile input, and the choice -----------------------------------------------------------------------------------


@each_dtype
def test_nothing_spreads_beyond_its_row(draw, dtype):
    x, weight = draw(4, 33, dtype=dtype), draw(33, dtype=dtype)
    clean = rms_norm(x, weight, eps=1e-6, **ON)
    for poison in (torch.nan, torch.inf, -torch.inf):
        hurt = x.clone()
        hurt[1, 32] = poison
        y = rms_norm(hurt, weight, eps=1e-6, **ON)
        assert torch.equal(y[[0, 2, 3]], clean[[0, 2, 3]])
        assert torch.equal(y[1].isnan(), reference.rms_norm(hurt, weight, 1e-6)[1].isnan())
    q, k, cos, sin = heads(draw, 1, 2, 1, 4, 6, dtype)
    q[0, 1, 2, 0] = torch.nan
    for ours, theirs in zip(rotary(q, k, cos, sin, **ON), reference.rotary(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@each_kind
def test_an_activation_of_what_is_no_number_and_of_what_is_far(device, kind):
    far = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e20, -1e20, 3e38, -3e38, 0.0, -0.0], device=device)
    exact = reference.activation(far.double(), kind).float()
    exact[1] = torch.inf  # torch.erf's own is NaN for some dtypes
    torch.testing.assert_close(activation(far, kind, **ON), exact, rtol=0, atol=0, equal_nan=True)
    finite = far[3:].clone().requires_grad_()
    activation(finite, kind, **ON).sum().backward()
    assert finite.grad.isfinite().all()
    assert (finite.grad[0:4:2] == 1.0).all()
    assert (finite.grad[1:4:2].abs() < 1e-30).all()
    nothing = far[:1].clone().requires_grad_()
    activation(nothing, kind, **ON).sum().backward()
    assert nothing.grad.isnan().all()


def test_nothing_at_all(draw):
    assert rms_norm(draw(0, 8), draw(8), eps=1e-6, **ON).shape == (0, 8)
    empty = draw(0, 8).requires_grad_()
    rms_norm(empty, draw(8), eps=1e-6, **ON).sum().backward()
    assert empty.grad.shape == (0, 8)
    q, k, cos, sin = heads(draw, 1, 2, 2, 0, 4)
    assert [x.shape for x in rotary(q, k, cos, sin, **ON)] == [(1, 2, 0, 4)] * 2
    assert swiglu(draw(0, 3), draw(0, 3), **ON).shape == (0, 3)
    empty = draw(2, 0).requires_grad_()
    y = activation(empty, "gelu", **ON)
    assert y.shape == torch.autograd.grad(y.sum(), empty)[0].shape == (2, 0)
    assert activation(draw(1)[0], "silu", **ON).shape == ()


def test_float64_is_the_references(draw):
    x = draw(2, 4).double()
    with pytest.raises(registry.BackendUnavailableError, match=r"not in torch\.float64"):
        swiglu(x, x, **ON)


@pytest.mark.gpu
def test_in_a_graph(draw):
    x, weight, up = draw(40, 4096).requires_grad_(), draw(4096), draw(40, 4096)
    q, k, cos, sin = heads(draw, 2, 4, 2, 20, 64)
    q.requires_grad_()

    def step():
        ys = [rms_norm(x, weight, eps=1e-6, **ON), swiglu(x, up, **ON), *(activation(x, kind, **ON) for kind in KINDS)]
        ys += rotary(q, k, cos, sin, **ON)
        return detached(*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), [x, q]))

    repeated_and_captured(step, step())


@pytest.mark.gpu
def test_auto_takes_it_in_exact_mode_only(draw):
    x = draw(2, 8)
    for op in ("rms_norm", "rotary", "swiglu", "activation"):
        assert registry.resolve(op, "auto", x, (8,)) == "reference"
        with registry.use_exact():
            assert registry.resolve(op, "auto", x, (8,)) == "triton"
