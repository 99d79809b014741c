"""More seeded bugs for `test_mutations.py`: `linear`, and what instruction sets and threads share. See `mutations`.

A bug in code of one set is compiled into that set, and its test is skipped on a CPU that lacks it.
"""

from __future__ import annotations

from .mutations import CPU, Mutation

_SIMD = "csrc/cpu/simd.h"
_LANES = "csrc/cpu/lanes.h"
_TILES = "csrc/cpu/tile_mm.inc.h"
_STRIPS = "csrc/cpu/strip_mm.inc.h"
_ROWS = "csrc/cpu/lane_rows.inc.h"
_SHARE = "csrc/cpu/share.inc.h"
_TEAM = "csrc/cpu/team.cpp"
_HEAD = "csrc/cpu/head_body.inc.h"
_LINEAR = "csrc/cpu/linear_body.inc.h"
_CORES = "kernels/rlhf_kernels/runtime/cores.py"
_PHILOX = "csrc/cpu/philox.h"
_ATTENTION = "csrc/cpu/attention_lanes.inc.h"

_PORTABLE = ("cpu/variants/portable.cpp",)
_AVX2 = ("cpu/variants/avx2.cpp",)
_AVX512 = ("cpu/variants/avx512.cpp",)
_AVX512_BF16 = ("cpu/variants/avx512_bf16.cpp",)

_HEAD_TIER1 = ("test_head_native.py::test_fp32_is_tier1",)
_DECODING_TIERS = ("test_lora_native.py::test_tiers_of_decoding",)
_TOKENS = ("test_sample_native.py::test_tokens_are_the_references",)
_BF16_BITS = ("test_lora_native.py::test_bf16_results_are_rounded_to_even_and_nan_stays",)
_OVERTAKING = ("test_head_native.py::test_no_piece_overtakes_what_it_builds_on",)
_LINEAR_TIERS = ("test_linear.py::test_tiers",)
_STEP_THREADS = ("test_decode_step.py::test_bits_do_not_depend_on_threads",)
_LATE = ("test_native.py::test_a_late_or_slow_thread_holds_up_one_piece",)

SETS = [
    Mutation(
        "rest rows of a register tile dropped",
        CPU,
        _TILES,
        "if constexpr (kRest > 0) multiply_rows<kRest>(a + row * KT, b, b1, depth, to + row * 16, accumulate);",
        "",
        _HEAD_TIER1,
        _AVX2,
    ),
    Mutation(
        "second half of a pair of tiles is the first",
        CPU,
        _TILES,
        "const Element* a = half ? a1 : a0;",
        "const Element* a = a0;",
        _HEAD_TIER1,
        _AVX2,
    ),
    Mutation(
        "sums of earlier pieces of the depth lost",
        CPU,
        _TILES,
        "storev(at(r, j), accumulate || t > 0 ? loadv",
        "storev(at(r, j), t > 0 ? loadv",
        _HEAD_TIER1,
        _PORTABLE,
    ),
    Mutation(
        "logits of the last piece of the depth alone",
        CPU,
        _HEAD,
        "logit_row(logits + i * logits_step, v, 0), k > 0);",
        "logit_row(logits + i * logits_step, v, 0), false);",
        _HEAD_TIER1,
        _AVX2,
    ),
    Mutation(
        "rest rows of a strip dropped",
        CPU,
        _STRIPS,
        "            strip_rows<kRest, COLUMNS>(w + v * stride, stride, b, b_stride, depth, logits + v * 16, "
        "accumulate);",
        "",
        _DECODING_TIERS,
        _AVX2,
    ),
    Mutation(
        "rest rows of a strip are its first",
        CPU,
        _STRIPS,
        "strip_rows<kRest, COLUMNS>(w + v * stride, stride,",
        "strip_rows<kRest, COLUMNS>(w, stride,",
        _TOKENS,
        _AVX2,
    ),
    Mutation(
        "halves of a pair of bf16 weights swapped",
        CPU,
        _STRIPS,
        "k % 2 ? spread(w + k - 1) & 0xffff0000u : spread(w + k) << 16",
        "k % 2 ? spread(w + k - 1) << 16 : spread(w + k) & 0xffff0000u",
        _DECODING_TIERS,
        _PORTABLE,
    ),
    Mutation(
        "a bf16 weight keeps its neighbour's bits below its own",
        CPU,
        _STRIPS,
        "spread(w + k - 1) & 0xffff0000u",
        "spread(w + k - 1)",
        _TOKENS,
        _PORTABLE,
    ),
    Mutation(
        "halves of a transposed square swapped",
        CPU,
        _SIMD,
        "_mm256_permute2x128_si256(b[i], b[4 + i], 0x31)",
        "_mm256_permute2x128_si256(b[i], b[4 + i], 0x13)",
        _HEAD_TIER1,
        _AVX2,
    ),
    Mutation(
        "squares of a transposed tile where they lay",
        CPU,
        _SIMD,
        "std::memcpy(out + (v * kLanes + i) * out_stride + w * kLanes,",
        "std::memcpy(out + (w * kLanes + i) * out_stride + v * kLanes,",
        _HEAD_TIER1,
        _PORTABLE,
    ),
    Mutation(
        "sums of eight rows in another order",
        CPU,
        _ATTENTION,
        "high = _mm256_permute2f128_ps(a, b, 0x31);",
        "high = _mm256_permute2f128_ps(a, b, 0x13);",
        ("test_decode_attention.py::test_every_length",),
        _AVX2,
    ),
    Mutation(
        "sums of four rows where another four belong",
        CPU,
        _ATTENTION,
        "_mm256_add_ps(low, high);",
        "_mm256_add_ps(a, b);",
        ("test_decode_attention.py::test_every_length",),
        _AVX2,
    ),
    Mutation(
        "sums of sixteen rows in another order",
        CPU,
        _ATTENTION,
        "halve(halve((__m512)fours[0], (__m512)fours[1]), halve((__m512)fours[2], (__m512)fours[3]))",
        "halve(halve((__m512)fours[0], (__m512)fours[2]), halve((__m512)fours[1], (__m512)fours[3]))",
        ("test_decode_attention.py::test_every_length",),
        _AVX512,
    ),
    Mutation(
        "halves of a pair of probabilities swapped",
        CPU,
        _TILES,
        "return widen(bf16_operand(even)) | (widen(bf16_operand(odd)) << 16);",
        "return widen(bf16_operand(odd)) | (widen(bf16_operand(even)) << 16);",
        ("test_head_native.py::test_bf16_is_tier3_and_its_logprob_is_not_rounded",),
        _AVX512_BF16,
    ),
    Mutation(
        "a NaN rounded to bf16 becomes a number",
        CPU,
        _SIMD,
        "return (u32v)selectv((i32v)(x == x), (f32v)rounded, (f32v)((bits >> 16) | 0x40));",
        "return rounded;",
        _BF16_BITS,
        _PORTABLE,
    ),
    Mutation(
        "bf16 rounded half up",
        CPU,
        _SIMD,
        "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16",
        "(bits + 0x8000) >> 16",
        _BF16_BITS,
        _PORTABLE,
    ),
    Mutation(
        "bf16 in the order of two registers' quarters",
        CPU,
        _SIMD,
        "_mm256_permute4x64_epi64(mixed, 0xd8)",
        "mixed",
        _BF16_BITS,
        _AVX2,
    ),
    Mutation(
        "bf16 of eight lanes twice the first four",
        CPU,
        _LANES,
        "_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)a, (__m256i)b), 0xd8)",
        "_mm256_packus_epi32((__m256i)a, (__m256i)b)",
        ("test_llama_ops.py::test_a_norm_rounds_where_llama_s_does",),
        _AVX2,
    ),
    Mutation(
        "floats of a bf16 model not rounded before products",
        CPU,
        _ROWS,
        "    store16(column + k * 16, rounded(x.even));\n    store16(column + k * 16 + 16, rounded(x.odd));",
        "    store16(column + k * 16, x.even);\n    store16(column + k * 16 + 16, x.odd);",
        ("test_decode_step.py::test_rounds_where_the_reference_does",),
        _PORTABLE,
    ),
    Mutation(
        "halves of a product's words swapped",
        CPU,
        _PHILOX,
        "low.part[i] = (u32v)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);",
        "low.part[i] = (u32v)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0x55);",
        ("test_lora_native.py::test_dropout_draws_the_words_of_philox",),
        _AVX2,
    ),
    Mutation(
        "high words of every other lane",
        CPU,
        _PHILOX,
        "high.part[i] = (u32v)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);",
        "high.part[i] = (u32v)_mm256_srli_epi64(even, 32);",
        _TOKENS,
        _AVX2,
    ),
    Mutation(
        "exponent off by one",
        CPU,
        _SIMD,
        "as_ints(n + 12582912.0f) - int32_t(0x4b400000)",
        "as_ints(n + 12582912.0f) - int32_t(0x4b400001)",
        _HEAD_TIER1,
        _PORTABLE,
    ),
    Mutation(
        "power of two in one factor, which has no room for it",
        CPU,
        _SIMD,
        "const i32x16 half = whole >> 1;",
        "const i32x16 half = whole;",
        ("test_sample_native.py::test_every_column_a_new_best",),
        _AVX2,
    ),
    Mutation(
        "exp of a NaN is a number",
        CPU,
        _SIMD,
        "_mm256_max_ps((__m256)part(a, i), (__m256)part(b, i));",
        "_mm256_max_ps((__m256)part(b, i), (__m256)part(a, i));",
        ("test_head_native.py::test_a_nan_reaches_all_of_its_row_and_no_other",),
        _AVX2,
    ),
    Mutation(
        "only the first eight lanes asked",
        CPU,
        _SIMD,
        "_mm256_movemask_ps((__m256)(mask.part[0] | mask.part[1])) != 0",
        "_mm256_movemask_ps((__m256)mask.part[0]) != 0",
        ("test_head_native.py::test_one_row_with_rising_logits",),
        _AVX2,
    ),
    Mutation(
        "upper lanes never draw",
        CPU,
        _SIMD,
        "uint32_t(_mm256_movemask_ps((__m256)mask.part[1])) << 8;",
        "0xff00u;",
        _TOKENS,
        _AVX2,
    ),
    Mutation(
        "masks the wrong way round",
        CPU,
        _SIMD,
        "_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask)",
        "_mm256_blendv_ps((__m256)a, (__m256)b, (__m256)mask)",
        _HEAD_TIER1,
        _AVX2,
    ),
]

THREADS = [
    Mutation(
        "the last piece of a share is done twice",
        CPU,
        _SHARE,
        "size = count * (whose + 1) / me.threads - begin;",
        "size = (count + me.threads - 1) / me.threads;",
        _STEP_THREADS,
        _PORTABLE,
    ),
    Mutation(
        "what does not divide by the threads left out",
        CPU,
        _SHARE,
        "size = count * (whose + 1) / me.threads - begin;",
        "size = count / me.threads;",
        _STEP_THREADS,
        _PORTABLE,
    ),
    Mutation(
        "pieces counted on from an earlier loop",
        CPU,
        _SHARE,
        "    next_loop[me.thread * Team::kLine] = 0;",
        "    static_cast<void>(next_loop);",
        _STEP_THREADS,
        _PORTABLE,
    ),
    Mutation(
        "nobody waits for the team",
        CPU,
        _TEAM,
        "__ATOMIC_ACQ_REL) == threads) {",
        "__ATOMIC_ACQ_REL) >= 1) {",
        _STEP_THREADS,
        ("cpu/team.cpp",),
    ),
    Mutation(
        "panels do not wait for the packing",
        CPU,
        _HEAD,
        "                schedule.wait(of, kPack);\n",
        "",
        _OVERTAKING,
        _PORTABLE,
    ),
    Mutation(
        "packing does not wait for the block before last",
        CPU,
        _HEAD,
        "            if (phase == kPack) schedule.wait(of - 2, schedule.has_after ? kAfter : kPanels);\n",
        "",
        _OVERTAKING,
        _PORTABLE,
    ),
    Mutation(
        "one packed block for two",
        CPU,
        _HEAD,
        "return blocks ? blocks + v0 / kBlock % 2 * block_elements : nullptr;",
        "return blocks;",
        _OVERTAKING,
        _PORTABLE,
    ),
    Mutation(
        "a group of panels in two blocks at once",
        CPU,
        _HEAD,
        "                wait_for_count(schedule.group_blocks + piece, of);\n",
        "",
        _OVERTAKING,
        _PORTABLE,
    ),
    Mutation(
        "gradients of weights do not wait for the panels",
        CPU,
        _HEAD,
        "            if (phase == kAfter) schedule.wait(of, kPanels);\n",
        "",
        _OVERTAKING,
        _PORTABLE,
    ),
    Mutation(
        "nobody takes over what a late thread leaves",
        CPU,
        _SHARE,
        "offset < me.threads; ++offset",
        "offset < 1; ++offset",
        _LATE,
    ),
    Mutation(
        "a thread takes its whole share at once",
        CPU,
        _SHARE,
        "        for (int64_t i; (i = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED)) < size;) body(begin + i);\n",
        "        int64_t i = __atomic_fetch_add(counter, size, __ATOMIC_RELAXED);\n"
        "        for (; i < size; ++i) body(begin + i);\n",
        _LATE,
    ),
    Mutation(
        "quota rounded down",
        CPU,
        _CORES,
        "math.ceil(",
        "math.floor(",
        ("test_cores.py::test_a_quota_is_rounded_up_and_the_mask_is_a_limit",),
    ),
    Mutation(
        "cgroups around the own one not read",
        CPU,
        _CORES,
        "(below, *below.parents)",
        "(below,)",
        ("test_cores.py::test_quotas_of_made_up_cgroups",),
    ),
    Mutation(
        "torch.set_num_threads does not count as chosen",
        CPU,
        _CORES,
        " or found not in _torch_defaults()",
        "",
        ("test_cores.py::test_a_quota_limits_what_nobody_has_chosen",),
    ),
    Mutation(
        "teams of torch's size",
        CPU,
        _CORES,
        "        return found\n    return _usable()\n",
        "        return found\n    return found\n",
        ("test_cores.py::test_a_team_is_no_larger_than_the_quota",),
    ),
]

LINEAR = [
    Mutation(
        "bias of the first columns everywhere",
        CPU,
        _LINEAR,
        "load_words({p.bias, 0, p.c.type}, 0, column, count)",
        "load_words({p.bias, 0, p.c.type}, 0, 0, count)",
        _LINEAR_TIERS,
        _PORTABLE,
    ),
    Mutation(
        "bf16 bias of the first columns everywhere",
        CPU,
        _LINEAR,
        "static_cast<const uint16_t*>(p.bias) + column,",
        "static_cast<const uint16_t*>(p.bias),",
        _LINEAR_TIERS,
        _AVX512_BF16,
    ),
    Mutation(
        "a product rounded before its bias",
        CPU,
        _LINEAR,
        "        sums += as_float(load_words({p.bias",
        "        if (p.c.type == Type::bfloat16) sums = round_bf16(sums);\n        sums += as_float(load_words({p.bias",
        _LINEAR_TIERS,
        _PORTABLE,
    ),
    Mutation(
        "last of the depth left out where an operand is turned",
        CPU,
        _LINEAR,
        "return k + i < depth ? load_words(m, k + i,",
        "return k + i + 1 < depth ? load_words(m, k + i,",
        _LINEAR_TIERS,
        _PORTABLE,
    ),
    Mutation(
        "an odd depth takes the row behind it",
        CPU,
        _LINEAR,
        "k + 2 * i + side < depth",
        "k + 2 * i < depth",
        ("test_linear.py::test_strided_and_surrounded_by_nan",),
        _AVX512_BF16,
    ),
    Mutation(
        "halves of a pair along the depth swapped",
        CPU,
        _LINEAR,
        "return widen(pair[0]) | (widen(pair[1]) << 16);",
        "return widen(pair[1]) | (widen(pair[0]) << 16);",
        _LINEAR_TIERS,
        _AVX512_BF16,
    ),
    Mutation(
        "every block of lanes is the first",
        CPU,
        _LINEAR,
        "tiles + c * depth * kTileElements, (from + c) * 16, count,",
        "tiles, (from + c) * 16, count,",
        _LINEAR_TIERS,
        _PORTABLE,
    ),
    Mutation(
        "sums of earlier pieces of the depth lost",
        CPU,
        _LINEAR,
        "\n                                      some, sums + c * kStrip * 16, t > 0);",
        "\n                                      some, sums + c * kStrip * 16, false);",
        _LINEAR_TIERS,
        _PORTABLE,
    ),
    Mutation(
        "more than sixteen rows sum every piece of the depth by itself",
        CPU,
        _LINEAR,
        "                strip_products<2, Weight>(w, stride, rows, tiles + (c * depth + t) * kTileElements, "
        "depth * kTileElements,\n"
        "                                          some, sums + c * kStrip * 16, t > 0);",
        "                alignas(64) float piece[2 * kStrip * 16];\n"
        "                strip_products<2, Weight>(w, stride, rows, tiles + (c * depth + t) * kTileElements, "
        "depth * kTileElements,\n"
        "                                          some, piece, false);\n"
        "                float* to = sums + c * kStrip * 16;\n"
        "                for (int64_t i = 0; i < 2 * kStrip * 16; ++i) to[i] = t > 0 ? to[i] + piece[i] : piece[i];",
        ("test_linear.py::test_bits_of_a_row_depend_on_that_row_alone",),
        _PORTABLE,
    ),
    Mutation(
        "a ragged depth read where it lies",
        CPU,
        _LINEAR,
        "rows == kStrip && p.depth % KT == 0 &&",
        "rows == kStrip &&",
        ("test_linear.py::test_strided_and_surrounded_by_nan",),
        _PORTABLE,
    ),
    Mutation(
        "every sixteen lanes are the first",
        CPU,
        _LINEAR,
        "load_words16(sums + (c * kStrip + v + i) * 16)",
        "load_words16(sums + (v + i) * 16)",
        _LINEAR_TIERS,
        _PORTABLE,
    ),
    Mutation(
        "every strip that is copied is the first",
        CPU,
        _LINEAR,
        "pack_tile(p.strips, p.strips_turned, first + v,",
        "pack_tile(p.strips, p.strips_turned, v,",
        _LINEAR_TIERS,
        _PORTABLE,
    ),
    Mutation(
        "a team leaves the last strip to nobody",
        CPU,
        _LINEAR,
        "steal(me, strips * ceil_div(some, kColumns), [&]",
        "steal(me, strips * ceil_div(some, kColumns) - (me.threads > 1), [&]",
        ("test_linear.py::test_bits_do_not_depend_on_threads",),
        _PORTABLE,
    ),
    Mutation(
        "no bias without depth",
        CPU,
        "csrc/cpu/linear.cpp",
        "if (product.n_strip_rows == 0 || product.n_lanes == 0) return;",
        "if (product.n_strip_rows == 0 || product.n_lanes == 0 || product.depth == 0) return;",
        ("test_linear.py::test_empty",),
        ("cpu/linear.cpp",),
    ),
    Mutation(
        "a changed weight keeps its packed copy",
        CPU,
        "csrc/cpu/linear.cpp",
        "if (std::memcmp(w, words, count * 4) != 0) return false;",
        "",
        ("test_linear.py::test_a_changed_weight_is_packed_anew",),
        ("cpu/linear.cpp",),
    ),
    Mutation(
        "the end of a row is not compared with its copy",
        CPU,
        "csrc/cpu/linear.cpp",
        "count = std::min<int64_t>(16, K - k);",
        "count = K - k < 16 ? 0 : 16;",
        ("test_linear.py::test_a_changed_weight_is_packed_anew",),
        ("cpu/linear.cpp",),
    ),
    Mutation(
        "every use compares the same pieces",
        CPU,
        "csrc/cpu/linear.cpp",
        "for (int64_t i = turn % step;",
        "for (int64_t i = 0;",
        ("test_linear.py::test_a_single_element_is_seen_within_as_many_uses_as_promised",),
        ("cpu/linear.cpp",),
    ),
    Mutation(
        "pieces in steps of whole rows",
        CPU,
        "csrc/cpu/linear.cpp",
        "while (std::gcd(step, across) > 1) ++step;",
        "",
        ("test_linear.py::test_changes_of_some_columns_are_seen_at_once",),
        ("cpu/linear.cpp",),
    ),
    Mutation(
        "forward without bias",
        CPU,
        "csrc/cpu/linear.cpp",
        "false, true, bias, nullptr, M, N, K, threads});",
        "false, true, nullptr, nullptr, M, N, K, threads});",
        _LINEAR_TIERS,
        ("cpu/linear.cpp",),
    ),
]

MUTATIONS = [
    mutation._replace(op=op)
    for op, mutations in {"instruction sets": SETS, "threads": THREADS, "linear": LINEAR}.items()
    for mutation in mutations
]
