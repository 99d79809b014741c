"""The Triton ops between matmuls: properties of every backend, bits of a row in any company, graphs, choice."""

import pytest
import torch
from rlhf_kernels.llama_ops import activation, rms_norm, rotary, swiglu
from rlhf_kernels.llama_ops.native import KINDS
from rlhf_kernels.runtime import registry

from tests.kernels.checks import detached, repeated_and_captured
from tests.kernels.test_llama_ops import (  # noqa: F401
    DTYPES,
    heads,
    test_a_gated_product_rounds_where_torch_does,
    test_a_norm_by_one_plus_its_weight_rounds_once_as_gemma_s,
    test_a_norm_rounds_where_llama_s_does,
    test_an_activation_of_what_is_no_number_and_of_what_is_far,
    test_an_activation_rounds_once,
    test_gradients_of_a_gated_product,
    test_gradients_of_a_norm,
    test_gradients_of_an_activation,
    test_gradients_of_turned_heads,
    test_layouts_change_no_bit,
    test_nothing_at_all,
    test_nothing_spreads_beyond_its_row,
    test_silu_is_that_of_a_gated_product,
    test_turned_heads_have_the_bits_of_llama_s,
    test_what_needs_no_gradient_gets_none,
)

COMPANIES = (1, 2, 15, 64, 65, 300)
each_dtype = pytest.mark.parametrize("dtype", DTYPES["triton"], ids=str)
# numpy speaks of 1 / 0 in rows that the interpreter computes and nobody reads, and of e^128
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("on_triton")]


def draw(*shape, dtype=torch.float32, scale=1.0):
    return (scale * torch.randn(*shape)).to(dtype)


def gradient_too(function, leaves, dy):
    """y and the gradients of the leaves."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@each_dtype
@pytest.mark.parametrize("width", [48, 257, *(pytest.param(n, marks=pytest.mark.gpu) for n in (128, 4096, 8192))])
def test_a_row_has_the_bits_that_it_has_alone(dtype, width):
    x, up, dy = (draw(300, width, dtype=dtype) for _ in range(3))
    weight = draw(width, dtype=dtype)
    norm = lambda x: rms_norm(x, weight, eps=1e-6)  # noqa: E731
    gated = lambda x, up: swiglu(x, up)  # noqa: E731
    whole = [*gradient_too(norm, [x], dy), *gradient_too(gated, [x, up], dy)]
    for n in COMPANIES:
        rows = torch.randperm(300)[:n].to(x.device)
        some = [*gradient_too(norm, [x[rows]], dy[rows]), *gradient_too(gated, [x[rows], up[rows]], dy[rows])]
        assert all(torch.equal(part, found[rows]) for part, found in zip(some, whole, strict=True))
    odd = slice(7, 12)  # from an address that is no multiple of 16 bytes on
    assert torch.equal(norm(x[odd]), whole[0][odd])
    assert torch.equal(rms_norm(x[odd], weight.repeat(2)[width:], eps=1e-6), whole[0][odd])


@each_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_an_element_has_the_bits_that_it_has_alone(dtype, kind):
    x, dy = draw(300, 8, dtype=dtype, scale=3.0), draw(300, 8, dtype=dtype)
    activate = lambda x: activation(x, kind)  # noqa: E731
    whole = gradient_too(activate, [x], dy)
    for n in COMPANIES:
        rows = torch.randperm(300)[:n].to(x.device)
        some = gradient_too(activate, [x[rows]], dy[rows])
        assert all(torch.equal(part, found[rows]) for part, found in zip(some, whole, strict=True))
    turned = gradient_too(activate, [x[:, 3:].T], dy[:, 3:].T)
    assert all(torch.equal(part.T, found[:, 3:]) for part, found in zip(turned, whole, strict=True))


@each_dtype
def test_a_token_has_the_bits_that_it_has_alone(dtype):
    q, k, cos, sin = heads(1, 4, 2, 300, 16, dtype)
    d_q, d_k = draw(*q.shape, dtype=dtype), draw(*k.shape, dtype=dtype)

    def run(q, k, cos, sin, *seeds):
        leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
        turned = rotary(*leaves, cos, sin)
        return [*turned, *torch.autograd.grad(turned, leaves, seeds)]

    whole = run(q, k, cos, sin, d_q, d_k)
    for n in COMPANIES:
        at = torch.randperm(300)[:n].to(q.device)
        some = run(q[:, :, at], k[:, :, at], cos[:, at], sin[:, at], d_q[:, :, at], d_k[:, :, at])
        assert all(torch.equal(part, found[:, :, at]) for part, found in zip(some, whole, strict=True))


def test_float64_is_the_references():
    x = draw(2, 4).double()
    with pytest.raises(registry.BackendUnavailableError, match=r"not in torch\.float64"):
        swiglu(x, x)


@pytest.mark.gpu
def test_in_a_graph():
    x, weight, up = draw(40, 4096).requires_grad_(), draw(4096), draw(40, 4096)
    q, k, cos, sin = heads(2, 4, 2, 20, 64)
    q.requires_grad_()

    def step():
        ys = [rms_norm(x, weight, eps=1e-6), swiglu(x, up), *(activation(x, kind) for kind in KINDS)]
        ys += rotary(q, k, cos, sin)
        return detached(*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), [x, q]))

    repeated_and_captured(step, step())


@pytest.mark.gpu
def test_auto_takes_it_in_exact_mode_only():
    x = draw(2, 8)
    for op in ("rms_norm", "rotary", "swiglu", "activation"):
        with registry.use_backend("auto"):
            assert registry.resolve(op, "auto", x, (8,)) == "reference"
            with registry.use_exact():
                assert registry.resolve(op, "auto", x, (8,)) == "triton"
