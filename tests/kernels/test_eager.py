"""Eager calls skip `torch.library`, everything else does not, and both give the same bits."""

import threading

import pytest
import torch
from rlhf_kernels.runtime import eager, registry
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from .checks import each, same_bits


@eager.custom_op("rlhf_kernels_test::weighted_sum", "x: D[N, K], ws: D[K, K], bias: D[K]")
def weighted_sum(x: torch.Tensor, ws: list[torch.Tensor], bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    y = x * scale
    for w in ws:
        y = y + torch.sin(x) @ w
    return y.clone() if bias is None else y + bias


@weighted_sum.register_fake
def _(x, ws, bias, scale):
    return torch.empty_like(x)


def _setup(ctx, inputs, output):
    x, ws, _, ctx.scale = inputs
    ctx.save_for_backward(x, *ws)


def _backward(ctx, grad):
    x, *ws = ctx.saved_tensors
    need_x, need_ws, need_bias, need_scale = ctx.needs_input_grad
    assert isinstance(need_ws, list)
    assert not need_scale
    dx = grad * ctx.scale + sum(torch.cos(x) * (grad @ w.T) for w in ws) if need_x else None
    dws = [torch.sin(x).T @ grad if need else None for need in need_ws]
    return dx, dws, grad.sum(0) if need_bias else None, None


weighted_sum.register_autograd(_backward, setup_context=_setup)


@eager.custom_op("rlhf_kernels_test::no_formula", "x: float[...]")
def no_formula(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@no_formula.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.fixture
def path(monkeypatch):
    """Which way calls of `weighted_sum` go, one entry per call."""
    taken = []
    overload, function = weighted_sum._registered, weighted_sum._function

    def through_library(*args):
        taken.append("registered")
        return overload(*args)

    def direct(*args):
        taken.append("direct")
        return function(*args)

    monkeypatch.setattr(weighted_sum, "_registered", through_library)
    monkeypatch.setattr(weighted_sum, "_function", direct)
    return taken


def inputs(grad=False):
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=g).requires_grad_(grad)  # noqa: E731
    return make(4, 5), [make(5, 5), make(5, 5)], make(5), 0.5


def test_plain_calls_are_direct(path):
    x, ws, bias, scale = inputs()
    direct = weighted_sum(x, ws, bias, scale)
    weighted_sum(torch.nn.Parameter(x), [], None, scale)
    with torch.no_grad():
        weighted_sum(*inputs(grad=True))
    assert path == ["direct"] * 3
    assert torch.equal(direct, weighted_sum._registered(x, ws, bias, scale))


@each("frozen", [(), ("x",), ("w",), ("bias",), ("x", "w")])
def test_gradients_have_the_bits_of_the_registered_op(frozen, path):
    results = []
    for op in (weighted_sum, weighted_sum._registered):
        x, ws, bias, scale = inputs(grad=True)
        for name, t in (("x", x), ("w", ws[0]), ("bias", bias)):
            t.requires_grad_(name not in frozen)
        y = op(x, ws, bias, scale)
        y.square().sum().backward()
        results.append([y, *(t.grad for t in (x, *ws, bias))])
    assert path[0] == "direct"
    for direct, library in zip(*results, strict=True):
        assert (direct is None) == (library is None)
        assert direct is None or torch.equal(direct, library)


def test_whoever_watches_gets_the_registered_op(path):
    x, ws, bias, scale = inputs()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    class Function(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    want = weighted_sum(x, ws, bias, scale)
    path.clear()
    with Watch():
        assert torch.equal(weighted_sum(x, ws, bias, scale), want)
    with Function():
        assert torch.equal(weighted_sum(x, ws, bias, scale), want)
    graph = make_fx(lambda x: weighted_sum(x, ws, bias, scale))(x)
    assert "rlhf_kernels_test.weighted_sum" in graph.code
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert weighted_sum(torch.empty(4, 5), ws, bias, scale).shape == (4, 5)
    assert weighted_sum(x.to("meta"), [w.to("meta") for w in ws], None, scale).is_meta
    weighted_sum(x.as_subclass(Subclass), ws, bias, scale)
    weighted_sum(x, [ws[0], ws[1].as_subclass(Subclass)], bias, scale)  # within a list, too
    negated = torch.complex(x, -x).conj().imag
    assert negated.is_neg()
    assert torch.equal(weighted_sum(negated, ws, bias, scale), want)
    assert torch.equal(torch.func.functionalize(lambda x: weighted_sum(x, ws, bias, scale))(x), want)
    with forward_ad.dual_level():
        weighted_sum(x, ws, bias, scale)
    assert path == ["registered"] * 10


def test_func_transforms_are_refused_as_by_torch_library():
    x, ws, bias, scale = inputs()
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.func.vmap(lambda row: weighted_sum(row, ws, bias, scale))(x[None])


@each("grad", [False, True])
def test_compile_and_opcheck(grad):
    x, ws, bias, scale = inputs(grad)
    torch.library.opcheck(torch.ops.rlhf_kernels_test.weighted_sum.default, (x, ws, bias, scale))
    compiled = torch.compile(
        lambda x, ws, bias: weighted_sum(x, ws, bias, scale) * 2, backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(x, ws, bias), weighted_sum(x, ws, bias, scale) * 2)


def test_second_derivatives_are_refused():
    """A `backward` of differentiable operations would give them without what it takes for constants."""
    for op in (weighted_sum, weighted_sum._registered):
        x, ws, bias, scale = inputs(grad=True)
        first = torch.autograd.grad(op(x, ws, bias, scale).square().sum(), [x, *ws], create_graph=True)
        plain = torch.autograd.grad(op(x, ws, bias, scale).square().sum(), [x, *ws])
        same_bits(first, plain)
        for gradient in first:
            with pytest.raises(RuntimeError, match="weighted_sum has no second derivative"):
                gradient.sum().backward(retain_graph=True)


@each("registered", [False, True])
def test_backward_runs_by_the_settings_of_its_forward(registered, monkeypatch):
    seen, op = [], weighted_sum._registered if registered else weighted_sum
    cos = torch.cos  # of the backward alone
    monkeypatch.setattr(torch, "cos", lambda x: seen.append(registry.is_exact()) or cos(x))
    x, ws, bias, scale = inputs(grad=True)
    with registry.Settings(exact=True).used():
        y = op(x, ws, bias, scale).sum()
    assert not seen
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    assert seen == [True, True]
    assert not registry.is_exact()


def test_an_op_without_formula_says_so():
    y = no_formula(torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="no autograd formula"):
        y.sum().backward()


def test_saved_tensors_see_later_writes():
    x, ws, bias, scale = inputs(grad=True)
    y = weighted_sum(x, ws, bias, scale)
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
