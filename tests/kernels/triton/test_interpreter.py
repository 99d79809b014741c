"""The interpreter's `tl.dot`, as the tests of this folder have it: right, and of the same bits at every place."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from rlhf_kernels.runtime.triton_support import INTERPRETED

from tests.conftest import PER_PUSH
from tests.kernels.checks import each
from tests.kernels.triton.conftest import ordered_product
from tests.test_measures import CEILINGS

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="it is the interpreter's product that is looked at")


@triton.jit
def _dot_kernel(a, b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, inner, columns = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    x = tl.load(a + rows * K + inner[None, :])
    y = tl.load(b + inner[:, None] * N + columns)
    at = rows * N + columns
    tl.store(out + at, tl.dot(x, y, tl.load(c + at), input_precision="ieee"))


def dot(a, b, c):
    out = torch.empty_like(c)
    (m, k), n = a.shape, b.shape[1]
    _dot_kernel[(1,)](a.contiguous(), b.contiguous(), c.contiguous(), out, M=m, N=n, K=k)
    return out


@each("dtype", [torch.float32, torch.float16])
def test_one_rounding_of_the_product_and_one_of_the_sum(dtype):
    torch.manual_seed(0)
    a, b, c = torch.randn(32, 64).to(dtype), torch.randn(64, 16).to(dtype), torch.randn(32, 16)
    product = (a.double() @ b.double()).float()
    assert (dot(a, b, c) != product + c).sum() <= 1  # two orders in float64 round alike, or nearly


@each("k", [16, 64])
def test_an_element_has_its_bits_at_every_place_of_every_size(k):
    torch.manual_seed(0)
    row, column = torch.randn(k), torch.randn(k)
    found = {
        value
        for m, n in ((16, 16), (16, 64), (64, 16), (64, 128))
        for value in dot(row.expand(m, k), column[:, None].expand(k, n), torch.zeros(m, n)).flatten().tolist()
    }
    assert len(found) == 1
    a, b, zero = torch.randn(64, k), torch.randn(k, 128), torch.zeros(64, 128)
    whole, rows, columns = dot(a, b, zero), torch.randperm(64), torch.randperm(128)
    assert torch.equal(dot(a[rows], b[:, columns], zero), whole[rows][:, columns])
    assert torch.equal(dot(a[48:], b[:, 16:32], zero[:16, :16]), whole[48:, 16:32])


def test_bf16_that_nobody_upcast_is_refused():
    """The interpreter keeps bf16 as integers, and would multiply those."""
    x = torch.zeros(2, 2).to(torch.bfloat16).view(torch.uint16).numpy()
    with pytest.raises(TypeError, match="expected floating point operands, got uint16"):
        ordered_product(x, x)


def test_items_of_this_lane_are_below_their_ceiling(request):
    if request.config.args != [str(Path(__file__).parent.relative_to(request.config.rootpath))]:
        pytest.skip("counts the items of the whole folder, and this is a part")
    assert request.config.stash[PER_PUSH] <= CEILINGS["tests: items in the interpreter"]
