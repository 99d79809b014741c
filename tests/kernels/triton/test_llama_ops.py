"""The Triton ops between matmuls: properties of every backend, bits of a row in any company, graphs, choice."""

import pytest
import torch
from rlhf_kernels.llama_ops import activation, rms_norm, rotary, swiglu
from rlhf_kernels.llama_ops.native import KINDS
from rlhf_kernels.runtime import registry

from tests.kernels.checks import detached, repeated_and_captured
from tests.kernels.test_llama_ops import (  # noqa: F401
    heads,
    test_a_gated_product_rounds_where_torch_does,
    test_a_norm_by_one_plus_its_weight_rounds_once_as_gemma_s,
    test_a_norm_rounds_where_llama_s_does,
    test_a_row_has_the_bits_that_it_has_alone,
    test_a_token_has_the_bits_that_it_has_alone,
    test_an_activation_of_what_is_no_number_and_of_what_is_far,
    test_an_activation_rounds_once,
    test_an_element_has_the_bits_that_it_has_alone,
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

pytestmark = pytest.mark.usefixtures("on_triton")


def test_float64_is_the_references():
    x = torch.ones(2, 4).double()
    with pytest.raises(registry.BackendUnavailableError, match=r"not in torch\.float64"):
        swiglu(x, x)


@pytest.mark.gpu
def test_in_a_graph():
    x, weight, up = torch.randn(40, 4096).requires_grad_(), torch.randn(4096), torch.randn(40, 4096)
    q, k, cos, sin = heads(2, 4, 2, 20, 64)
    q.requires_grad_()

    def step():
        ys = [rms_norm(x, weight, eps=1e-6), swiglu(x, up), *(activation(x, kind) for kind in KINDS)]
        ys += rotary(q, k, cos, sin)
        return detached(*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), [x, q]))

    repeated_and_captured(step, step())
