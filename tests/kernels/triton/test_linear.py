"""The Triton `linear`: properties of every backend, order of its sums, choice, large sizes."""

import pytest
import torch
import torch.nn.functional as F
from rlhf_kernels.linear import _resolve, linear, product_for, triton as ours
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.testing import assert_ok
from rlhf_kernels.runtime.triton_support import INTERPRETED

from tests.kernels.checks import each, in_any_company, repeated_and_captured, tier_of_dtype
from tests.kernels.test_linear import (  # noqa: F401
    make,
    products,
    test_a_nan_or_infinity_stays_in_its_row,
    test_bits_of_a_row_depend_on_that_row_alone,
    test_empty,
    test_gradients_are_those_of_f_linear,
    test_strided_and_surrounded_by_nan,
    test_tiers,
)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@each("n", [1, 65])
def test_rows_beyond_change_no_weight_gradient(on_triton, n):
    x, _, _, dy = make(300, 40, 70, FP32)
    alone = ours.weight_gradient(dy[:n].clone(), x[:n].clone())
    for beyond in (torch.nan, torch.inf):
        dirty_dy, dirty_x = dy.clone(), x.clone()
        dirty_dy[n:], dirty_x[n:] = beyond, beyond
        assert torch.equal(ours.weight_gradient(dirty_dy[:n], dirty_x[:n]), alone)
    dy[n:] = 0.0
    assert torch.equal(ours.weight_gradient(dy, x), alone)  # rows that add nothing


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's sums have an order that torch can repeat")
def test_a_weight_gradient_adds_rows_in_their_order():
    x, _, _, dy = make(130, 20, 18, FP32)
    total, step = torch.zeros(18, 20), ours.settings(20, 4)["BK"]
    for block in torch.arange(130).split(step):
        total += (dy[block].double().t() @ x[block].double()).float()
    found = ours.weight_gradient(dy, x)
    assert (found != total).sum() <= 1  # two orders in float64 round alike, or nearly


@pytest.mark.skipif(not INTERPRETED, reason="what the interpreter adds can be repeated to the bit")
def test_the_bias_is_added_before_the_only_rounding():
    x, weight, bias, _ = make(20, 64, 50, FP16)
    exact = x.double() @ weight.double().t() + bias.double()
    wide = (x.double() @ weight.double().t()).float() + bias.float()
    y = ours.forward(x, weight, bias)
    assert torch.equal(y, wide.half())
    assert not torch.equal(wide.half(), (wide - bias).half() + bias)  # a rounding before it would show
    assert ((y.double() - exact).abs() <= exact.abs() * 2.0**-11 * 1.01 + 1e-6).all()


def test_exact_mode_takes_it_and_whoever_names_it(on_triton):
    x, weight, bias, _ = make(6, 8, 4, FP32)
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
def test_in_a_graph(on_triton):
    x, weight, bias, dy = make(200, 512, 1000, BF16)
    repeated_and_captured(lambda: products(ours, x, weight, bias, dy), products(ours, x, weight, bias, dy))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(("k", "m"), [(4096, 4096), (4096, 14336), (2048, 512), (1000, 8200)])
def test_large_bits_on_a_gpu(on_triton, dtype, k, m):
    """Wide and narrow tiles, few rows and many; more than once."""
    x, weight, bias, dy = make(3000, k, m, dtype, scale=0.1)
    y, _, dw = products(ours, x, weight, bias, dy)
    companies = [torch.randperm(3000)[:n] for n in (1, 2, 16, 63, 64, 65, 129, 1000)]
    in_any_company(lambda x, dy: (ours.forward(x, weight, bias), ours.input_gradient(dy, weight)), [x, dy], companies)
    assert torch.equal(ours.weight_gradient(dy, x), dw)
    few = torch.arange(0, 3000, 300)
    exact = F.linear(x[few].double(), weight.double(), bias.double())
    plain = F.linear(x[few].float(), weight.float(), bias.float()).to(dtype)
    assert_ok(tier_of_dtype(y[few], exact, plain))
