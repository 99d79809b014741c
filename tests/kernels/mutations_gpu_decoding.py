"""More seeded bugs for `test_mutations.py`: what decodes on a GPU. How a record is read: see `mutations`."""

from __future__ import annotations

from .mutations import TRITON, Mutation

_SAMPLE = "kernels/rlhf_kernels/sample/triton.py"
_PHILOX = "kernels/rlhf_kernels/philox_triton.py"
_ATTENTION = "kernels/rlhf_kernels/decode_attention/triton.py"
_SAMPLE_TESTS, _ATTENTION_TESTS = "triton/test_sample.py::test_", "triton/test_decode_attention.py::test_"

SAMPLE = [
    Mutation(
        "padded columns counted",
        TRITON,
        _SAMPLE,
        'z = tl.where(in_range[None, :], c / divisor[:, None], float("-inf"))',
        "z = c / divisor[:, None]",
        (_SAMPLE_TESTS + "tokens_are_the_references",),
    ),
    Mutation(
        "padded columns drawn",
        TRITON,
        _SAMPLE,
        "key = tl.where(in_range[None, :], order_key(score), _LOWEST_KEY)",
        "key = order_key(score)",
        (_SAMPLE_TESTS + "hostile_rows",),
    ),
    Mutation(
        "max from 0",
        TRITON,
        _SAMPLE,
        'm = tl.full((BN,), float("-inf"), tl.float32)',
        "m = tl.zeros((BN,), tl.float32)",
        (_SAMPLE_TESTS + "hostile_rows",),
    ),
    Mutation(
        "greedy after the temperature",
        TRITON,
        _SAMPLE,
        "score = tl.where(greedy[:, None], c, score)",
        "score = tl.where(greedy[:, None], z, score)",
        (_SAMPLE_TESTS + "greedy_is_the_argmax_before_the_temperature",),
    ),
    Mutation(
        "temperature not in the draw",
        TRITON,
        _SAMPLE,
        "score = z + gumbel(words)",
        "score = c + gumbel(words)",
        (_SAMPLE_TESTS + "every_option",),
    ),
    Mutation(
        "double rounding",
        TRITON,
        _SAMPLE,
        "logit_scale, softcap, SOFTCAP)\n        z = ",
        "logit_scale, softcap, SOFTCAP).to(tl.bfloat16).to(tl.float32)\n        z = ",
        (_SAMPLE_TESTS + "lora_on_a_bf16_head_is_not_rounded_to_bf16",),
    ),
    Mutation(
        "noise of the wrong column",
        TRITON,
        _SAMPLE,
        "_STREAM, tile * BV, BN, BV)",
        "_STREAM, tile * BV + 4, BN, BV)",
        (_SAMPLE_TESTS + "tokens_are_the_references",),
    ),
    Mutation(
        "high word of the position lost",
        TRITON,
        _PHILOX,
        "high = ((row >> 32) & 0xFFFFFFFF)",
        "high = ((row >> 32) & 0)",
        (_SAMPLE_TESTS + "tokens_are_the_references", _SAMPLE_TESTS + "words_are_those_of_philox"),
    ),
    Mutation(
        "half a word lost",
        TRITON,
        _PHILOX,
        "((words & 0xFFFF).to(tl.float32) + 0.5)",
        "(words & 0xFFFF).to(tl.float32)",
        (_SAMPLE_TESTS + "gumbel_is_that_of_its_word",),
    ),
    Mutation(
        "logarithm near 1 cancels",
        TRITON,
        _PHILOX,
        "lost = u - (1.0 - rest)",
        "lost = 0.0 * u",
        (_SAMPLE_TESTS + "gumbel_is_that_of_its_word",),
    ),
    Mutation(
        "sums not rescaled with the maximum",
        TRITON,
        _SAMPLE,
        "_, s, w, _ = moved(m, s, w, 0.0 * s, to)",
        "_, s, w, _ = moved(m, s, w, 0.0 * s, m)",
        (_SAMPLE_TESTS + "every_column_a_new_best",),
    ),
    Mutation(
        "last tile wins a tie",
        TRITON,
        _SAMPLE,
        "token = tl.where(best2 > best, token2, token)",
        "token = tl.where(best2 >= best, token2, token)",
        (_SAMPLE_TESTS + "first_of_equal_maxima_across_tiles_and_shares",),
    ),
    Mutation(
        "last share wins a tie",
        TRITON,
        _SAMPLE,
        "tl.min(tl.where(mask & (best2 == best[None, :]), token2, _NAN_KEY), 0)",
        "tl.max(tl.where(mask & (best2 == best[None, :]), token2, -1), 0)",
        (_SAMPLE_TESTS + "first_of_equal_maxima_across_tiles_and_shares",),
    ),
    Mutation(
        "NaN passed over",
        TRITON,
        _SAMPLE,
        "tl.where(x != x, _NAN_KEY, bits",
        "tl.where(x != x, _LOWEST_KEY + 1, bits",
        (_SAMPLE_TESTS + "values_that_are_not_finite",),
    ),
    Mutation(
        "shares by the number of rows",
        TRITON,
        _SAMPLE,
        "per_split = triton.cdiv(n_tiles, PROGRAMS)",
        "per_split = triton.cdiv(n_tiles * n, PROGRAMS)",
        (_SAMPLE_TESTS + "the_rest_of_the_batch_does_not_change_the_bits",),
    ),
    Mutation(
        "first ranks alone",
        TRITON,
        "kernels/rlhf_kernels/linear_logprob/triton_kernels.py",
        "tl.static_range(0, RANKS, BR)",
        "tl.static_range(0, BR, BR)",
        (_SAMPLE_TESTS + "lora_on_a_bf16_head_is_not_rounded_to_bf16",),
    ),
]

DECODE_ATTENTION = [
    Mutation(
        "window one too long",
        TRITON,
        _ATTENTION,
        "first = tl.maximum(after - window, 0)",
        "first = tl.maximum(after - window - 1, 0)",
        (_ATTENTION_TESTS + "tier1",),
    ),
    Mutation(
        "positions past the length counted",
        TRITON,
        _ATTENTION,
        '        z = tl.where(used[None, :], z, float("-inf"))\n',
        "",
        (_ATTENTION_TESTS + "tier1",),
    ),
    Mutation(
        "NaN leaks from unused positions",
        TRITON,
        _ATTENTION,
        "mask=used[:, None] & (d < D)[None, :],\n            other=0.0,\n        )\n        z =",
        "mask=(used | True)[:, None] & (d < D)[None, :],\n            other=0.0,\n        )\n        z =",
        (_ATTENTION_TESTS + "unused_cache_is_never_read",),
    ),
    Mutation(
        "every block the first",
        TRITON,
        _ATTENTION,
        "column = (position // block).to(tl.int64) * table_column",
        "column = (position // block).to(tl.int64) * 0",
        (_ATTENTION_TESTS + "tier1",),
    ),
    Mutation(
        "max from 0",
        TRITON,
        _ATTENTION,
        'm = tl.full((BG,), float("-inf"), tl.float32)',
        "m = tl.zeros((BG,), tl.float32)",
        (_ATTENTION_TESTS + "peaked_and_very_negative_scores",),
    ),
    Mutation(
        "scores not scaled",
        TRITON,
        _ATTENTION,
        "tl.float32), UPCAST) * scale",
        "tl.float32), UPCAST)",
        (_ATTENTION_TESTS + "tier1",),
    ),
    Mutation(
        "softcap without its factor",
        TRITON,
        _ATTENTION,
        "z = softcap * tanh(z / softcap)",
        "z = tanh(z / softcap)",
        (_ATTENTION_TESTS + "tier1",),
    ),
    Mutation(
        "weights rounded to the values' dtype",
        TRITON,
        _ATTENTION,
        "total = dot(e, v,",
        "total = dot(e.to(v.dtype), v,",
        (_ATTENTION_TESTS + "half_precision_is_rounded_once",),
    ),
    Mutation(
        "sums not rescaled with the maximum",
        TRITON,
        _ATTENTION,
        "s = s * a + tl.sum(e, 1)",
        "s = s + tl.sum(e, 1)",
        (_ATTENTION_TESTS + "tier1",),
    ),
    Mutation(
        "splits joined as if of one maximum",
        TRITON,
        _ATTENTION,
        "tl.sum(a2[:, None] * part, 0)",
        "tl.sum(part, 0)",
        (_ATTENTION_TESTS + "tier1",),
    ),
    Mutation(
        "splits joined that nobody wrote",
        TRITON,
        _ATTENTION,
        "used = (split >= first // split_size) & (split < end)",
        "used = split < n_splits",
        (_ATTENTION_TESTS + "what_is_joined_was_written",),
    ),
    Mutation(
        "splits by the batch",
        TRITON,
        _ATTENTION,
        "    size = split_size(n_positions)\n",
        "    size = split_size(n_positions) * (1 + n % 2)\n",
        (_ATTENTION_TESTS + "neither_batch_nor_table_change_a_row_s_bits",),
    ),
    Mutation(
        "NaN in empty rows",
        TRITON,
        _ATTENTION,
        "tl.where(after > 0, tl.sum(total / s[:, None], 0), 0.0)",
        "tl.sum(total / s[:, None], 0)",
        (_ATTENTION_TESTS + "empty_rows_batches_and_tables",),
    ),
]

MUTATIONS = [
    mutation._replace(op=op)
    for op, mutations in {"sample": SAMPLE, "decode_attention": DECODE_ATTENTION}.items()
    for mutation in mutations
]
