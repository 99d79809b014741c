"""More seeded bugs for `test_mutations.py`: linears and norms on a GPU. How a record is read: see `mutations`."""

from __future__ import annotations

from .mutations import TRITON, Mutation

_LINEAR = "kernels/rlhf_kernels/linear/triton.py"
_BLOCK = "kernels/rlhf_kernels/llama_ops/triton.py"
_LINEAR_TESTS, _BLOCK_TESTS = "triton/test_linear.py::test_", "triton/test_llama_ops.py::test_"

LINEAR = [
    Mutation(
        "steps of the depth by the number of rows",
        TRITON,
        _LINEAR,
        "chosen = settings(n_columns, a.element_size())",
        'chosen = settings(n_columns, a.element_size()) | ({"BK": 16} if n_rows <= 16 else {})',
        (_LINEAR_TESTS + "bits_of_a_row_depend_on_that_row_alone",),
    ),
    Mutation(
        "a rounding before the bias",
        TRITON,
        _LINEAR,
        "        acc += tl.load(bias_ptr",
        "        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32) + tl.load(bias_ptr",
        (_LINEAR_TESTS + "the_bias_is_added_before_the_only_rounding",),
    ),
    Mutation(
        "padding of the depth counted",
        TRITON,
        _LINEAR,
        "inside[None, :], other=0.0)\n"
        "        b = tl.load(b_columns + (at * b_inner)[:, None], mask=inside[:, None] & within, other=0.0)",
        "inside[None, :], other=1.0)\n"
        "        b = tl.load(b_columns + (at * b_inner)[:, None], mask=inside[:, None] & within, other=1.0)",
        (_LINEAR_TESTS + "tiers",),
    ),
    Mutation(
        "the last, ragged step of the depth lost",
        TRITON,
        _LINEAR,
        "for start in range(0, depth, BK):",
        "for start in range(0, depth // BK * BK, BK):",
        (_LINEAR_TESTS + "a_weight_gradient_adds_rows_in_their_order", _LINEAR_TESTS + "tiers"),
    ),
    Mutation(
        "the last group of row tiles is a whole one",
        TRITON,
        _LINEAR,
        "in_group = tl.minimum(row_tiles - group * GROUPED, GROUPED)",
        "in_group = GROUPED",
        (_LINEAR_TESTS + "tiers",),
    ),
]

LLAMA_OPS = [
    Mutation(
        "a norm's mean over the padded width",
        TRITON,
        _BLOCK,
        "mean = tl.div_rn(tl.sum(squares, 1), tl.full((R,), WIDTH, tl.float32))",
        "mean = tl.div_rn(tl.sum(squares, 1), tl.full((R,), BLOCK, tl.float32))",
        (_BLOCK_TESTS + "a_norm_rounds_where_the_reference_does",),
    ),
    Mutation(
        "a norm by 1 + weight rounded twice",
        TRITON,
        _BLOCK,
        "        if not PLUS_ONE:\n            n = n.to",
        "        if True:\n            n = n.to",
        (_BLOCK_TESTS + "a_norm_rounds_where_the_reference_does",),
    ),
    Mutation(
        "a norm's gradient without the mean of g n",
        TRITON,
        _BLOCK,
        " - n * mean)",
        ")",
        (_BLOCK_TESTS + "gradients_of_a_norm",),
    ),
    Mutation(
        "both halves with the angles of the first",
        TRITON,
        _BLOCK,
        "cos_b = tl.load(cos_ptr + angle + HALF, mask=inside, other=0.0)",
        "cos_b = tl.load(cos_ptr + angle, mask=inside, other=0.0)",
        (_BLOCK_TESTS + "turned_heads_have_the_bits_of_the_reference",),
    ),
    Mutation(
        "turned heads rounded once",
        TRITON,
        _BLOCK,
        "first = (a * cos).to(narrow).to(tl.float32) - (b * sin).to(narrow).to(tl.float32)",
        "first = a * cos - b * sin",
        (_BLOCK_TESTS + "turned_heads_have_the_bits_of_the_reference",),
    ),
    Mutation(
        "silu not rounded before the product",
        TRITON,
        _BLOCK,
        "silu = (gate / (1.0 + tl.exp(-gate))).to(narrow).to(tl.float32)",
        "silu = gate / (1.0 + tl.exp(-gate))",
        (_BLOCK_TESTS + "a_gated_product_rounds_where_torch_does",),
    ),
    Mutation(
        "density lost in the gradient of GELU",
        TRITON,
        _BLOCK,
        "slope = share + v * density",
        "slope = share",
        (_BLOCK_TESTS + "gradients_of_an_activation",),
    ),
]

MUTATIONS = [
    mutation._replace(op=op) for op, found in {"linear": LINEAR, "llama_ops": LLAMA_OPS}.items() for mutation in found
]
