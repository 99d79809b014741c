"""The Triton `linear`: tiers against float64, bits of a row in any company, layouts, gradients, choice."""

import pytest
import torch
import torch.nn.functional as F
from rlhf_kernels.linear import _resolve, linear, product_for, reference
from rlhf_kernels.linear import triton as ours
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.testing import assert_ok, tier1
from rlhf_kernels.runtime.triton_support import INTERPRETED

from tests.kernels.checks import each, same_bits
from tests.kernels.cuda_graph import repeated_and_captured
from tests.kernels.test_linear import products
from tests.kernels.triton.test_lora import tier3_or_truncated

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# numpy speaks of 0 · inf and inf − inf
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# N, K, M: one row, a ragged depth, several tiles of rows and of columns, a single column, several steps of the depth
SHAPES = [(1, 32, 64), (5, 33, 70), (129, 40, 130), (2, 200, 31), (3, 1, 1)]


def make(n, k, m, dtype, device, scale=1.0):
    g = torch.Generator().manual_seed(n + k)
    draw = lambda *shape: (scale * torch.randn(*shape, generator=g)).to(device, dtype)  # noqa: E731
    return draw(n, k), draw(m, k), draw(m), draw(n, m)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "scale"), [(FP32, 1.0), (FP32, 1e-3), (FP16, 0.1), (BF16, 1.0)], ids=str)
def test_tiers(device, dtype, scale, shape):
    given = make(*shape, dtype, device, scale)
    exact = products(reference, *(t.double() for t in given))
    # in fp16 torch's own products may sum in fp16: theirs are taken from float32, rounded once
    wide = products(reference, *(t.float() for t in given))
    for name, mine, truth, plain in zip(("y", "dx", "dW"), products(ours, *given), exact, wide, strict=True):
        assert mine.dtype == dtype
        assert mine.is_contiguous()
        assert_ok((tier1 if dtype == FP32 else tier3_or_truncated)(mine, truth, plain.to(dtype)), name)


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("k", [31, 150], ids=str)  # one step of the depth, and several
def test_bits_of_a_row_depend_on_that_row_alone(device, dtype, k):
    x, weight, bias, dy = make(300, k, 70, dtype, device)
    y, dx = ours.forward(x, weight, bias), ours.input_gradient(dy, weight)
    for n in (1, 2, 15, 64, 65, 300):
        rows = torch.randperm(300)[:n].to(device)
        assert torch.equal(ours.forward(x[rows], weight, bias), y[rows])
        assert torch.equal(ours.input_gradient(dy[rows], weight), dx[rows])
    some = slice(37, 40)  # from an address that is no multiple of 16 bytes on
    assert torch.equal(ours.forward(x[some], weight, bias), y[some])


def test_a_row_has_the_same_bits_as_one_of_many_equal_ones(device):
    """At every place of a tile, and with every other row changed."""
    x, weight, bias, _ = make(1, 70, 65, FP32, device)
    alone = ours.forward(x, weight, bias)
    many = torch.randn(200, 70, device=device)
    for at in (0, 63, 127, 199):
        many[at] = x[0]
        assert torch.equal(ours.forward(many, weight, bias)[at], alone[0])
        many = torch.randn(200, 70, device=device)


@each("n", [1, 65])
def test_rows_beyond_change_no_weight_gradient(device, n):
    x, _, _, dy = make(300, 40, 70, FP32, device)
    alone = ours.weight_gradient(dy[:n].clone(), x[:n].clone())
    for beyond in (torch.nan, torch.inf):
        dirty_dy, dirty_x = dy.clone(), x.clone()
        dirty_dy[n:], dirty_x[n:] = beyond, beyond
        assert torch.equal(ours.weight_gradient(dirty_dy[:n], dirty_x[:n]), alone)
    dy[n:] = 0.0
    assert torch.equal(ours.weight_gradient(dy, x), alone)  # rows that add nothing


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's sums have an order that torch can repeat")
def test_a_weight_gradient_adds_rows_in_their_order():
    x, _, _, dy = make(130, 20, 18, FP32, "cpu")
    total, step = torch.zeros(18, 20), ours.settings(20, 4)["BK"]
    for block in torch.arange(130).split(step):
        total += (dy[block].double().t() @ x[block].double()).float()
    found = ours.weight_gradient(dy, x)
    assert (found != total).sum() <= 1  # two orders in float64 round alike, or nearly


@each("dtype", [FP32, FP16])
def test_strided_and_surrounded_by_nan(device, dtype):
    """Rows of every matrix with NaN before, between and behind them; every second column; turned matrices."""
    x, weight, bias, dy = make(9, 45, 37, dtype, device)

    def spread(t):
        wide = torch.full((t.shape[0] + 2, t.shape[1] + 5), torch.nan, dtype=dtype, device=device)
        wide[1:-1, 3:-2] = t
        return wide[1:-1, 3:-2]

    def gaps(t):
        wide = torch.full((t.shape[0], 2 * t.shape[1]), torch.nan, dtype=dtype, device=device)
        wide[:, ::2] = t
        return wide[:, ::2]

    def turned(t):
        return t.t().contiguous().t()

    expected = products(ours, x, weight, bias, dy)
    for change in (spread, gaps, turned):
        same_bits(products(ours, change(x), change(weight), bias, change(dy)), expected)
    assert torch.equal(ours.forward(x, weight, gaps(bias[None])[0]), expected[0])


def test_a_nan_or_infinity_stays_in_its_row(device):
    x, weight, bias, _ = make(40, 33, 20, FP32, device)
    clean = ours.forward(x, weight, bias)
    x[2, 5], x[39, 5] = torch.nan, torch.inf
    y = ours.forward(x, weight, bias)
    others = [i for i in range(40) if i not in (2, 39)]
    assert torch.equal(y[others], clean[others])
    assert not y[2].isfinite().any()
    assert not y[39].isfinite().any()


@each("shape", [(0, 5, 7), (5, 0, 7), (5, 7, 0)])
def test_empty(device, shape):
    x, weight, bias, dy = make(*shape, FP32, device)
    for mine, want in zip(
        products(ours, x, weight, bias, dy), (F.linear(x, weight, bias), dy @ weight, dy.t() @ x), strict=True
    ):
        assert torch.equal(mine, want)


@pytest.mark.skipif(not INTERPRETED, reason="what the interpreter adds can be repeated to the bit")
def test_the_bias_is_added_before_the_only_rounding():
    x, weight, bias, _ = make(20, 64, 50, FP16, "cpu")
    exact = x.double() @ weight.double().t() + bias.double()
    wide = (x.double() @ weight.double().t()).float() + bias.float()
    y = ours.forward(x, weight, bias)
    assert torch.equal(y, wide.half())
    assert not torch.equal(wide.half(), (wide - bias).half() + bias)  # a rounding before it would show
    assert ((y.double() - exact).abs() <= exact.abs() * 2.0**-11 * 1.01 + 1e-6).all()


@each("trained", [False, True])
def test_gradients(device, trained):
    x, weight, bias, dy = make(12, 24, 18, FP32, device)
    found = []
    for function, dtype in (
        (lambda *a: linear(*a, backend="triton"), FP32),
        (F.linear, FP32),
        (F.linear, torch.float64),
    ):
        leaves = [t.to(dtype, copy=True) for t in (x.view(3, 4, 24), weight, bias)]
        for leaf, wanted in zip(leaves, (True, trained, trained), strict=True):
            leaf.requires_grad_(wanted)
        function(*leaves).backward(dy.view(3, 4, 18).to(dtype))
        found.append([leaf.grad for leaf in leaves])
    for mine, plain, exact in zip(*found, strict=True):
        assert (mine is None) == (exact is None)
        if mine is not None:
            assert_ok(tier1(mine, exact, plain))
    y = linear(x.requires_grad_(), weight, bias, backend="triton")
    y.sum().backward()  # an expanded dy
    assert_ok(tier1(x.grad, weight.double().sum(0).expand(12, 24), weight.sum(0).expand(12, 24)))


def test_exact_mode_takes_it_and_whoever_names_it(device):
    x, weight, bias, _ = make(6, 8, 4, FP32, device)
    for default in ("triton",) if INTERPRETED else ("auto", "triton"):
        with registry.use_backend(default):
            assert _resolve(x, weight, "auto") == ("triton" if default == "triton" else "reference")
            with registry.use_exact():
                assert _resolve(x, weight, "auto") == "triton"
                assert torch.equal(linear(x, weight, bias), ours.forward(x, weight, bias))
                assert product_for(x, weight) is registry.implementation("linear", "triton")
    with registry.use_backend("reference"), registry.use_exact():
        assert _resolve(x, weight, "auto") == "reference"


@pytest.mark.gpu
def test_in_a_graph():
    x, weight, bias, dy = make(200, 512, 1000, BF16, "cuda")
    repeated_and_captured(lambda: products(ours, x, weight, bias, dy), products(ours, x, weight, bias, dy))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(("k", "m"), [(4096, 4096), (4096, 14336), (2048, 512), (1000, 8200)])
def test_large_bits_on_a_gpu(dtype, k, m):
    """Wide and narrow tiles, few rows and many; more than once."""
    x, weight, bias, dy = make(3000, k, m, dtype, "cuda", 0.1)
    y, dx, dw = products(ours, x, weight, bias, dy)
    for n in (1, 2, 16, 63, 64, 65, 129, 1000):
        rows = torch.randperm(3000)[:n].cuda()
        assert torch.equal(ours.forward(x[rows], weight, bias), y[rows])
        assert torch.equal(ours.input_gradient(dy[rows], weight), dx[rows])
    assert torch.equal(ours.weight_gradient(dy, x), dw)
    few = torch.arange(0, 3000, 300, device="cuda")
    exact = F.linear(x[few].double(), weight.double(), bias.double())
    plain = F.linear(x[few].float(), weight.float(), bias.float()).to(dtype)
    assert_ok((tier1 if dtype == FP32 else tier3_or_truncated)(y[few], exact, plain))
