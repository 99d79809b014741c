"""More seeded bugs for `test_mutations.py`: `linear`, and what instruction sets and threads share. See `mutations`.

A bug in code of one set is compiled into that set, and its test is skipped on a CPU that lacks it.
"""

from __future__ import annotations

from .mutations import read

MUTATIONS = read("""
== instruction sets
@ cpu csrc/cpu/tile_mm.inc.h cpu/variants/avx2.cpp
# rest rows of a register tile dropped | test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-if constexpr (kRest > 0) multiply_rows<kRest>(a + row * KT, b, b1, depth, to + row * 16, accumulate);
# second half of a pair of tiles is the first | test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-const Element* a = half ? a1 : a0;
+const Element* a = a0;
@ cpu csrc/cpu/tile_mm.inc.h cpu/variants/portable.cpp
# sums of earlier pieces of the depth lost | test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-storev(at(r, j), accumulate || t > 0 ? loadv
+storev(at(r, j), t > 0 ? loadv
@ cpu csrc/cpu/head_body.inc.h cpu/variants/avx2.cpp
# logits of the last piece of the depth alone | test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-logit_row(logits + i * logits_step, v, 0), k > 0);
+logit_row(logits + i * logits_step, v, 0), false);
@ cpu csrc/cpu/strip_mm.inc.h cpu/variants/avx2.cpp
# rest rows of a strip dropped | test_lora_native.py::test_tiers_of_decoding
-            strip_rows<kRest, COLUMNS>(w + v * stride, stride, b, b_stride, depth, logits + v * 16, accumulate);
# rest rows of a strip are its first | test_sample.py::test_tokens_are_the_references
-strip_rows<kRest, COLUMNS>(w + v * stride, stride,
+strip_rows<kRest, COLUMNS>(w, stride,
@ cpu csrc/cpu/strip_mm.inc.h cpu/variants/portable.cpp
# halves of a pair of bf16 weights swapped | test_lora_native.py::test_tiers_of_decoding
-k % 2 ? spread(w + k - 1) & 0xffff0000u : spread(w + k) << 16
+k % 2 ? spread(w + k - 1) << 16 : spread(w + k) & 0xffff0000u
# a bf16 weight keeps its neighbour's bits below its own | test_sample.py::test_tokens_are_the_references
-spread(w + k - 1) & 0xffff0000u
+spread(w + k - 1)
@ cpu csrc/cpu/simd.h cpu/variants/avx2.cpp
# halves of a transposed square swapped | test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-_mm256_permute2x128_si256(b[i], b[4 + i], 0x31)
+_mm256_permute2x128_si256(b[i], b[4 + i], 0x13)
@ cpu csrc/cpu/simd.h cpu/variants/portable.cpp
# squares of a transposed tile where they lay | test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-std::memcpy(out + (v * kLanes + i) * out_stride + w * kLanes,
+std::memcpy(out + (w * kLanes + i) * out_stride + v * kLanes,
@ cpu csrc/cpu/attention_lanes.inc.h cpu/variants/avx2.cpp
# sums of eight rows in another order | test_decode_attention.py::test_every_length
-high = _mm256_permute2f128_ps(a, b, 0x31);
+high = _mm256_permute2f128_ps(a, b, 0x13);
# sums of four rows where another four belong | test_decode_attention.py::test_every_length
-_mm256_add_ps(low, high);
+_mm256_add_ps(a, b);
@ cpu csrc/cpu/attention_lanes.inc.h cpu/variants/avx512.cpp
# sums of sixteen rows in another order | test_decode_attention.py::test_every_length
-halve(halve((__m512)fours[0], (__m512)fours[1]), halve((__m512)fours[2], (__m512)fours[3]))
+halve(halve((__m512)fours[0], (__m512)fours[2]), halve((__m512)fours[1], (__m512)fours[3]))
@ cpu csrc/cpu/tile_mm.inc.h cpu/variants/avx512_bf16.cpp
# halves of a pair of probabilities swapped
| test_linear_logprob.py::test_half_precision_is_tier3_and_its_logprob_is_not_rounded
-return widen(bf16_operand(even)) | (widen(bf16_operand(odd)) << 16);
+return widen(bf16_operand(odd)) | (widen(bf16_operand(even)) << 16);
@ cpu csrc/cpu/simd.h cpu/variants/portable.cpp
# a NaN rounded to bf16 becomes a number | test_lora_native.py::test_bf16_results_are_rounded_to_even_and_nan_stays
-return (u32v)selectv((i32v)(x == x), (f32v)rounded, (f32v)((bits >> 16) | 0x40));
+return rounded;
# bf16 rounded half up | test_lora_native.py::test_bf16_results_are_rounded_to_even_and_nan_stays
-(bits + 0x7fff + ((bits >> 16) & 1)) >> 16
+(bits + 0x8000) >> 16
@ cpu csrc/cpu/simd.h cpu/variants/avx2.cpp
# bf16 in the order of two registers' quarters
| test_lora_native.py::test_bf16_results_are_rounded_to_even_and_nan_stays
-_mm256_permute4x64_epi64(mixed, 0xd8)
+mixed
@ cpu csrc/cpu/lanes.h cpu/variants/avx2.cpp
# bf16 of eight lanes twice the first four | test_llama_ops.py::test_a_norm_rounds_where_llama_s_does
-_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)a, (__m256i)b), 0xd8)
+_mm256_packus_epi32((__m256i)a, (__m256i)b)
@ cpu csrc/cpu/lane_rows.inc.h cpu/variants/portable.cpp
# floats of a bf16 model not rounded before products | test_decode_step.py::test_rounds_where_the_reference_does
-    store16(column + k * 16, rounded(x.even));
-    store16(column + k * 16 + 16, rounded(x.odd));
+    store16(column + k * 16, x.even);
+    store16(column + k * 16 + 16, x.odd);
@ cpu csrc/cpu/philox.h cpu/variants/avx2.cpp
# halves of a product's words swapped | test_lora.py::test_dropout_draws_the_words_of_philox
-low.part[i] = (u32v)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
+low.part[i] = (u32v)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0x55);
# high words of every other lane | test_sample.py::test_tokens_are_the_references
-high.part[i] = (u32v)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
+high.part[i] = (u32v)_mm256_srli_epi64(even, 32);
@ cpu csrc/cpu/simd.h cpu/variants/portable.cpp
# exponent off by one | test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-as_ints(n + 12582912.0f) - int32_t(0x4b400000)
+as_ints(n + 12582912.0f) - int32_t(0x4b400001)
@ cpu csrc/cpu/simd.h cpu/variants/avx2.cpp
# power of two in one factor, which has no room for it | test_sample.py::test_every_column_a_new_best
-const i32x16 half = whole >> 1;
+const i32x16 half = whole;
# exp of a NaN is a number | test_linear_logprob.py::test_a_nan_reaches_all_of_its_row_and_no_other
-_mm256_max_ps((__m256)part(a, i), (__m256)part(b, i));
+_mm256_max_ps((__m256)part(b, i), (__m256)part(a, i));
# only the first eight lanes asked | test_linear_logprob.py::test_one_row_with_rising_logits
-_mm256_movemask_ps((__m256)(mask.part[0] | mask.part[1])) != 0
+_mm256_movemask_ps((__m256)mask.part[0]) != 0
# upper lanes never draw | test_sample.py::test_tokens_are_the_references
-uint32_t(_mm256_movemask_ps((__m256)mask.part[1])) << 8;
+0xff00u;
# masks the wrong way round | test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask)
+_mm256_blendv_ps((__m256)a, (__m256)b, (__m256)mask)

== threads
@ cpu csrc/cpu/share.inc.h cpu/variants/portable.cpp
# the last piece of a share is done twice | test_decode_step.py::test_bits_do_not_depend_on_threads
-size = count * (whose + 1) / me.threads - begin;
+size = (count + me.threads - 1) / me.threads;
# what does not divide by the threads left out | test_decode_step.py::test_bits_do_not_depend_on_threads
-size = count * (whose + 1) / me.threads - begin;
+size = count / me.threads;
# pieces counted on from an earlier loop | test_decode_step.py::test_bits_do_not_depend_on_threads
-    next_loop[me.thread * Team::kLine] = 0;
+    static_cast<void>(next_loop);
@ cpu csrc/cpu/team.cpp cpu/team.cpp
# nobody waits for the team | test_decode_step.py::test_bits_do_not_depend_on_threads
-__ATOMIC_ACQ_REL) == threads) {
+__ATOMIC_ACQ_REL) >= 1) {
@ cpu csrc/cpu/head_body.inc.h cpu/variants/portable.cpp
# panels do not wait for the packing | test_linear_logprob.py::test_no_piece_overtakes_what_it_builds_on
-                schedule.wait(of, kPack);
-
# packing does not wait for the block before last | test_linear_logprob.py::test_no_piece_overtakes_what_it_builds_on
-            if (phase == kPack) schedule.wait(of - 2, schedule.has_after ? kAfter : kPanels);
-
# one packed block for two | test_linear_logprob.py::test_no_piece_overtakes_what_it_builds_on
-return blocks ? blocks + v0 / kBlock % 2 * block_elements : nullptr;
+return blocks;
# a group of panels in two blocks at once | test_linear_logprob.py::test_no_piece_overtakes_what_it_builds_on
-                wait_for_count(schedule.group_blocks + piece, of);
-
# gradients of weights do not wait for the panels | test_linear_logprob.py::test_no_piece_overtakes_what_it_builds_on
-            if (phase == kAfter) schedule.wait(of, kPanels);
-
@ cpu csrc/cpu/share.inc.h
# nobody takes over what a late thread leaves | test_native.py::test_a_late_or_slow_thread_holds_up_one_piece
-offset < me.threads; ++offset
+offset < 1; ++offset
# a thread takes its whole share at once | test_native.py::test_a_late_or_slow_thread_holds_up_one_piece
-        for (int64_t i; (i = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED)) < size;) body(begin + i);
-
+        int64_t i = __atomic_fetch_add(counter, size, __ATOMIC_RELAXED);
+        for (; i < size; ++i) body(begin + i);
+
@ cpu kernels/rlhf_kernels/runtime/cores.py
# quota rounded down | test_cores.py::test_a_quota_is_rounded_up_and_the_mask_is_a_limit
-math.ceil(
+math.floor(
# cgroups around the own one not read | test_cores.py::test_quotas_of_made_up_cgroups
-(below, *below.parents)
+(below,)
# torch.set_num_threads does not count as chosen | test_cores.py::test_a_quota_limits_what_nobody_has_chosen
- or threads not in _torch_defaults()
# teams of torch's size | test_cores.py::test_a_team_is_no_larger_than_the_quota
-        return threads
-    return _usable()
-
+        return threads
+    return threads
+

== linear
@ cpu csrc/cpu/linear_body.inc.h cpu/variants/portable.cpp
# bias of the first columns everywhere | test_linear.py::test_tiers
-load_words({p.bias, 0, p.c.type}, 0, column, count)
+load_words({p.bias, 0, p.c.type}, 0, 0, count)
@ cpu csrc/cpu/linear_body.inc.h cpu/variants/avx512_bf16.cpp
# bf16 bias of the first columns everywhere | test_linear.py::test_tiers
-static_cast<const uint16_t*>(p.bias) + column,
+static_cast<const uint16_t*>(p.bias),
@ cpu csrc/cpu/linear_body.inc.h cpu/variants/portable.cpp
# a product rounded before its bias | test_linear.py::test_tiers
-        sums += as_float(load_words({p.bias
+        if (p.c.type == Type::bfloat16) sums = round_bf16(sums);
+        sums += as_float(load_words({p.bias
# last of the depth left out where an operand is turned | test_linear.py::test_tiers
-return k + i < depth ? load_words(m, k + i,
+return k + i + 1 < depth ? load_words(m, k + i,
@ cpu csrc/cpu/linear_body.inc.h cpu/variants/avx512_bf16.cpp
# an odd depth takes the row behind it | test_linear.py::test_strided_and_surrounded_by_nan
-k + 2 * i + side < depth
+k + 2 * i < depth
# halves of a pair along the depth swapped | test_linear.py::test_tiers
-return widen(pair[0]) | (widen(pair[1]) << 16);
+return widen(pair[1]) | (widen(pair[0]) << 16);
@ cpu csrc/cpu/linear_body.inc.h cpu/variants/portable.cpp
# every block of lanes is the first | test_linear.py::test_tiers
-tiles + c * depth * kTileElements, (from + c) * 16, count,
+tiles, (from + c) * 16, count,
# sums of earlier pieces of the depth lost | test_linear.py::test_tiers
-
-                                      some, sums + c * kStrip * 16, t > 0);
+
+                                      some, sums + c * kStrip * 16, false);
# more than sixteen rows sum every piece of the depth by itself
| test_linear.py::test_bits_of_a_row_depend_on_that_row_alone
-strip_products<2, Weight>(w, stride, rows, tiles + (c * depth + t) * kTileElements, depth * kTileElements,
-                                          some, sums + c * kStrip * 16, t > 0);
+alignas(64) float piece[2 * kStrip * 16];
+            strip_products<2, Weight>(w, stride, rows, tiles + (c * depth + t) * kTileElements, depth * kTileElements,
+                                          some, piece, false);
+                float* to = sums + c * kStrip * 16;
+                for (int64_t i = 0; i < 2 * kStrip * 16; ++i) to[i] = t > 0 ? to[i] + piece[i] : piece[i];
# a ragged depth read where it lies | test_linear.py::test_strided_and_surrounded_by_nan
-rows == kStrip && p.depth % KT == 0;
+rows == kStrip;
# every sixteen lanes are the first | test_linear.py::test_tiers
-load_words16(sums + (c * kStrip + v + i) * 16)
+load_words16(sums + (v + i) * 16)
# the last rows of a strip of bf16 are not widened | test_linear.py::test_tiers
-for (int64_t v = 0; v < kStrip; ++v) {
-        for (int64_t k = 0; k < count
+for (int64_t v = 0; v < kStrip - 1; ++v) {
+        for (int64_t k = 0; k < count
# every strip that is copied is the first | test_linear.py::test_tiers
-pack_tile(p.strips, p.strips_turned, first + v,
+pack_tile(p.strips, p.strips_turned, v,
# a team leaves the last strip to nobody | test_linear.py::test_bits_do_not_depend_on_threads
-steal(me, strips * ceil_div(some, kColumns), [&]
+steal(me, strips * ceil_div(some, kColumns) - (me.threads > 1), [&]
@ cpu csrc/cpu/linear.cpp cpu/linear.cpp
# no bias without depth | test_linear.py::test_empty
-if (product.n_strip_rows == 0 || product.n_lanes == 0) return;
+if (product.n_strip_rows == 0 || product.n_lanes == 0 || product.depth == 0) return;
# a changed weight keeps its packed copy | test_linear.py::test_a_changed_weight_is_packed_anew
-if (std::memcmp(w, words, count * 4) != 0) return false;
# the end of a row is not compared with its copy | test_linear.py::test_a_changed_weight_is_packed_anew
-count = std::min<int64_t>(16, K - k);
+count = K - k < 16 ? 0 : 16;
# every use compares the same pieces | test_linear.py::test_a_single_element_is_seen_within_as_many_uses_as_promised
-for (int64_t i = turn % step;
+for (int64_t i = 0;
# pieces in steps of whole rows | test_linear.py::test_changes_of_some_columns_are_seen_at_once
-while (std::gcd(step, across) > 1) ++step;
# forward without bias | test_linear.py::test_tiers
-false, true, bias, nullptr, M, N, K, threads});
+false, true, nullptr, nullptr, M, N, K, threads});
""")
