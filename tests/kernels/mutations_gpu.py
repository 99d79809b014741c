"""More seeded bugs for `test_mutations.py`: what decodes on a GPU, its linears and its norms. See `mutations`."""

from __future__ import annotations

from .mutations import read

MUTATIONS = read("""
== sample
@ triton kernels/rlhf_kernels/sample/triton.py
# padded columns counted | triton/test_sample.py::test_tokens_are_the_references
-z = tl.where(in_range[None, :], c / divisor[:, None], float("-inf"))
+z = c / divisor[:, None]
# padded columns drawn | triton/test_sample.py::test_sizes_and_hostile_rows
-key = tl.where(in_range[None, :], order_key(score), _LOWEST_KEY)
+key = order_key(score)
# max from 0 | triton/test_sample.py::test_sizes_and_hostile_rows
-m = tl.full((BN,), float("-inf"), tl.float32)
+m = tl.zeros((BN,), tl.float32)
# greedy after the temperature | triton/test_sample.py::test_greedy_is_the_first_maximum_before_the_temperature
-score = tl.where(greedy[:, None], c, score)
+score = tl.where(greedy[:, None], z, score)
# temperature not in the draw | triton/test_sample.py::test_every_option
-score = z + gumbel(words)
+score = c + gumbel(words)
# double rounding | triton/test_sample.py::test_lora_on_a_bf16_head_is_not_rounded_to_bf16
-logit_scale, softcap, SOFTCAP)
-        if forbidden_ptr
+logit_scale, softcap, SOFTCAP).to(tl.bfloat16).to(tl.float32)
+        if forbidden_ptr
# every row forbids | triton/test_sample.py::test_some_rows_never_draw_what_is_forbidden
-c = tl.where(forbids[:, None] & banned[None, :]
+c = tl.where(inside[:, None] & banned[None, :]
# noise of the wrong column | triton/test_sample.py::test_tokens_are_the_references
-_STREAM, tile * BV, BN, BV)
+_STREAM, tile * BV + 4, BN, BV)
@ triton kernels/rlhf_kernels/runtime/philox_triton.py
# high word of the position lost
| triton/test_sample.py::test_tokens_are_the_references triton/test_sample.py::test_words_are_those_of_philox
-high = ((row >> 32) & 0xFFFFFFFF)
+high = ((row >> 32) & 0)
# half a word lost | triton/test_sample.py::test_gumbel_is_that_of_its_word
-((words & 0xFFFF).to(tl.float32) + 0.5)
+(words & 0xFFFF).to(tl.float32)
# logarithm near 1 cancels | triton/test_sample.py::test_gumbel_is_that_of_its_word
-lost = u - (1.0 - rest)
+lost = 0.0 * u
@ triton kernels/rlhf_kernels/sample/triton.py
# sums not rescaled with the maximum | triton/test_sample.py::test_every_column_a_new_best
-joined(m, s, w, none, none, none, none, m2, s2,
+joined(m2, s, w, none, none, none, none, m2, s2,
# last tile wins a tie | triton/test_sample.py::test_first_of_equal_maxima_across_strips_and_chunks
-token = tl.where(best2 > best, token2, token)
+token = tl.where(best2 >= best, token2, token)
# last share wins a tie | triton/test_sample.py::test_first_of_equal_maxima_across_strips_and_chunks
-tl.min(tl.where(mask & (best2 == best[None, :]), token2, _NAN_KEY), 0)
+tl.max(tl.where(mask & (best2 == best[None, :]), token2, -1), 0)
# NaN passed over | triton/test_sample.py::test_values_that_are_not_finite
-tl.where(x != x, _NAN_KEY, bits
+tl.where(x != x, _LOWEST_KEY + 1, bits
# shares by the number of rows | triton/test_sample.py::test_the_rest_of_the_batch_does_not_change_the_bits
-per_split = triton.cdiv(n_tiles, sizes.pop("PROGRAMS"))
+per_split = triton.cdiv(n_tiles * n, sizes.pop("PROGRAMS"))
@ triton kernels/rlhf_kernels/vocab/triton_kernels.py
# first ranks alone | triton/test_sample.py::test_lora_on_a_bf16_head_is_not_rounded_to_bf16
-tl.range(0, RANKS, RANK_TILE, num_stages=1)
+tl.static_range(0, RANK_TILE, RANK_TILE)

== one sweep
@ triton kernels/rlhf_kernels/vocab/triton_kernels.py
# what another run's B holds in all rows of a block
| triton/test_one_sweep.py::test_a_row_has_the_bits_that_it_has_alone
-y = tl.where(own[:, None], made, y)  #
+y = made  #
# a block's first run alone | triton/test_one_sweep.py::test_a_row_has_the_bits_that_it_has_alone
-tl.load(block + 1).to(tl.int32)):
+tl.load(block).to(tl.int32) + 1):
# a run has a row more | triton/test_one_sweep.py::test_a_row_has_the_bits_that_it_has_alone
-(rows < tl.load(line + 1)
+(rows <= tl.load(line + 1)
# first ranks of a run alone | triton/test_one_sweep.py::test_a_row_has_the_bits_that_it_has_alone
-tl.range(0, rank, RANK_TILE, num_stages=1)
+tl.range(0, 16, RANK_TILE, num_stages=1)
@ triton kernels/rlhf_kernels/vocab/triton_by_row.py
# scales of runs lost | triton/test_one_sweep.py::test_a_row_has_the_bits_that_it_has_alone
-made * scale, down)
+made, down)
@ triton kernels/rlhf_kernels/vocab/triton_runs.py
# a run forgotten in its second block | triton/test_one_sweep.py::test_a_row_has_the_bits_that_it_has_alone
-if start < row + block and end > row]
+if row <= start < row + block]
@ triton kernels/rlhf_kernels/vocab/triton_sweep.py
# slots of other tiles share a launch | triton/test_one_sweep.py::test_a_row_has_the_bits_that_it_has_alone
-return tuple(n for name, n in tiles.items() if name != "RANKS")
+return 0
# one slot's sweep after another | triton/test_one_sweep.py::test_slots_read_a_part_of_the_vocabulary_together
-    yield from heapq.merge(*(kept(i, sweep) for i, sweep in enumerate(sweeps)))
+    for i, sweep in enumerate(sweeps):
+        yield from kept(i, sweep)

== decode_attention
@ triton kernels/rlhf_kernels/decode_attention/triton.py
# window one too long | triton/test_decode_attention.py::test_tier1
-first = tl.maximum(after - window, 0)
+first = tl.maximum(after - window - 1, 0)
# positions past the length counted | triton/test_decode_attention.py::test_tier1
-        z = tl.where(used[None, :], z, float("-inf"))
-
# NaN leaks from unused positions | triton/test_decode_attention.py::test_unused_cache_never_leaks
-mask=used[:, None] & (d < D)[None, :],
-            other=0.0,
-        )
-        z =
+mask=(used | True)[:, None] & (d < D)[None, :],
+            other=0.0,
+        )
+        z =
# every block the first | triton/test_decode_attention.py::test_tier1
-column = (position // block).to(tl.int64) * table_column
+column = (position // block).to(tl.int64) * 0
# max from 0 | triton/test_decode_attention.py::test_peaked_and_very_negative_scores
-m = tl.full((BG,), float("-inf"), tl.float32)
+m = tl.zeros((BG,), tl.float32)
# scores not scaled | triton/test_decode_attention.py::test_tier1
-tl.float32), UPCAST) * scale
+tl.float32), UPCAST)
# softcap without its factor | triton/test_decode_attention.py::test_tier1
-z = softcap * tanh(z / softcap)
+z = tanh(z / softcap)
# weights rounded to the values' dtype | triton/test_decode_attention.py::test_half_precision_is_rounded_once
-total = dot(e, v,
+total = dot(e.to(v.dtype), v,
# sums not rescaled with the maximum | triton/test_decode_attention.py::test_tier1
-s = s * a + tl.sum(e.to(tl.float32), 1)
+s = s + tl.sum(e.to(tl.float32), 1)
# splits joined as if of one maximum | triton/test_decode_attention.py::test_tier1
-tl.sum(a2[:, None] * part, 0)
+tl.sum(part, 0)
# splits joined that nobody wrote | triton/test_decode_attention.py::test_what_is_joined_was_written
-used = (split >= first // split_size) & (split < end)
+used = split < n_splits
# splits by the batch | triton/test_decode_attention.py::test_neither_batch_nor_table_change_a_row_s_bits
-    size = split_size(n_positions)
-
+    size = split_size(n_positions) * (1 + n % 2)
+
# NaN in empty rows | triton/test_decode_attention.py::test_empty_rows_batches_and_tables
-tl.where(after > 0, tl.sum(total / s[:, None], 0), 0.0)
+tl.sum(total / s[:, None], 0)
# sink not in the sum | triton/test_decode_attention.py::test_tier1
-s += 1.0  #
+s += 0.0  #
# every head the first one's sink | triton/test_decode_attention.py::test_tier1
-tl.load(sink_ptr + head * sink_stride)
+tl.load(sink_ptr)
# sinks read as if dense | triton/test_decode_attention.py::test_sinks_of_either_dtype_and_any_stride
-tl.load(sink_ptr + head * sink_stride)
+tl.load(sink_ptr + head)

== attention
@ triton kernels/rlhf_kernels/attention/triton.py
# a query sees the key after it | triton/test_attention.py::test_tier1
-seen = position[None, :] <= of_query[:, None]
+seen = position[None, :] <= of_query[:, None] + 1
# blocks begin where a tile's window does | triton/test_attention.py::test_rows_have_the_bits_of_decode_attention
-for start in range(begin // BS * BS, after, BS):
-        position = start + tl.arange(0, BS)
-        used = (position >= begin) & (position < after)
-        if PAGED:
+for start in range(begin, after, BS):
+        position = start + tl.arange(0, BS)
+        used = (position >= begin) & (position < after)
+        if PAGED:
# a window is one key short at a tile's first query | triton/test_attention.py::test_tier1
-begin = tl.maximum(lowest + 1 - window, 0)
+begin = tl.maximum(lowest + 2 - window, 0)
# the sum of exponentials keeps an old maximum | triton/test_attention.py::test_tier1
-s = tl.fma(s, a, tl.sum(e, 1))
+s = s + tl.sum(e, 1)
# keys of a parent have no gradient from its children | triton/test_attention.py::test_tier1
-for j in (i, *children[i]) if lengths[j]
+for j in (i,) if lengths[j]
# queries at the end of a key's window are left out | triton/test_attention.py::test_tier1
-end = tl.minimum(end, highest + window - its_base)
+end = tl.minimum(end, lowest + window - its_base)
# the softcap has no slope | triton/test_attention.py::test_tier1
-dz *= 1.0 - part * part
+dz *= 1.0

== exact mode
@ triton kernels/rlhf_kernels/vocab/triton_sweep.py
# exact log-probs with tiles for the number of rows
| triton/test_sample.py::test_exact_mode_scores_a_token_with_the_bits_that_it_was_drawn_with
-    if registry.is_exact():
-        return by_row.tile_sizes
+    if False:
+        return by_row.tile_sizes
@ triton kernels/rlhf_kernels/vocab/cost.py
# exact gradients with tiles for the number of rows
| triton/test_sample.py::test_exact_mode_gives_a_row_the_gradient_of_itself
-while not registry.is_exact() and rows
+while rows
@ triton kernels/rlhf_kernels/lora/triton.py
# exact LoRA with splits for the number of rows
| triton/test_lora.py::test_exact_mode_gives_a_slot_the_bits_of_its_own_rows
-(EXACT_SPLITS, EXACT_SPLITS) if self.exact else
+(EXACT_SPLITS, EXACT_SPLITS) if False else
# exact LoRA whose dh depends on the ranks beside it
| triton/test_lora.py::test_exact_mode_gives_a_slot_the_bits_of_its_own_rows
-self.rank <= ONE_READ_RANK and not self.exact
+self.rank <= ONE_READ_RANK
@ triton kernels/rlhf_kernels/lora/tables.py
# exact LoRA with chunks for the number of rows
| triton/test_lora.py::test_exact_mode_gives_a_slot_the_bits_of_its_own_rows
-step = EXACT_CHUNK if exact else
+step = EXACT_CHUNK if False else

== half
@ cuda csrc/common/half.h
# a tie away from zero | test_cuda_build.py::test_common_code_under_sanitizers
-0x7fffu + (bits >> 16 & 1u)
+0x8000u

== decode_step
@ triton kernels/rlhf_kernels/decode_step/triton.py
# other rows written | triton/test_decode_step.py::test_other_rows_adapters_never_leak
-used = mine[:, None] & inside[None, :]
+used = (rows < n_rows)[:, None] & inside[None, :]
# double rounding | triton/test_decode_step.py::test_rounds_where_the_reference_does
-other=0.0).to(tl.float32) + delta
+other=0.0).to(tl.float32) + delta.to(y_ptr.dtype.element_ty).to(tl.float32)
# first split alone | triton/test_decode_step.py::test_ranks_of_several_tiles_splits_and_dtypes
-for split in range(n_splits):
+for split in range(1):
# first ranks alone | triton/test_decode_step.py::test_ranks_of_several_tiles_splits_and_dtypes
-for first in range(0, rank, BR):
+for first in range(0, BR, BR):
# scale lost | triton/test_decode_step.py::test_tiers
-tl.store(h_ptr + at, h * scale,
+tl.store(h_ptr + at, h,
# a sum that its norm sees unrounded | triton/test_decode_step.py::test_rounds_where_the_reference_does
-x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
+x = x + 0.0
# rotary products unrounded | triton/test_decode_step.py::test_rounds_where_the_reference_does
-first = (a * cos).to(narrow).to(tl.float32) - (b * sin).to(narrow).to(tl.float32)
+first = a * cos - b * sin
# values normed as keys | triton/test_decode_step.py::test_tiers
-if (head >= n_heads) & (head < n_heads + n_kv):
+if head >= n_heads:
# one place of a block | triton/test_decode_step.py::test_tiers
-inner = position % block
+inner = position % block * 0
# addresses looked at once | triton/test_decode_step.py::test_updates_and_moves_are_seen_and_only_new_entries_written
-if addresses != self._addresses:
+if not self._addresses:
@ triton kernels/rlhf_kernels/decode_step/model.py
# joined in another order | triton/test_decode_step.py::test_groups_that_lie_side_by_side_are_one_product
-zip(tensors, parts, strict=True)
+zip(tensors[::-1], parts, strict=True)

== linear
@ triton kernels/rlhf_kernels/linear/triton.py
# steps of the depth by the number of rows | triton/test_linear.py::test_bits_of_a_row_depend_on_that_row_alone
-chosen = settings(n_columns, a.element_size())
+chosen = settings(n_columns, a.element_size()) | ({"BK": 16} if n_rows <= 16 else {})
# a rounding before the bias | triton/test_linear.py::test_the_bias_is_added_before_the_only_rounding
-        acc += tl.load(bias_ptr
+        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32) + tl.load(bias_ptr
# padding of the depth counted | triton/test_linear.py::test_tiers
-inside[None, :], other=0.0)
-        b = tl.load(b_columns + (at * b_inner)[:, None], mask=inside[:, None] & within, other=0.0)
+inside[None, :], other=1.0)
+        b = tl.load(b_columns + (at * b_inner)[:, None], mask=inside[:, None] & within, other=1.0)
# the last, ragged step of the depth lost
| triton/test_linear.py::test_a_weight_gradient_adds_rows_in_their_order triton/test_linear.py::test_tiers
-for start in range(0, depth, BK):
+for start in range(0, depth // BK * BK, BK):
# the last group of row tiles is a whole one | triton/test_linear.py::test_tiers
-in_group = tl.minimum(row_tiles - group * GROUPED, GROUPED)
+in_group = GROUPED

== llama_ops
@ triton kernels/rlhf_kernels/llama_ops/triton.py
# a norm's mean over the padded width
| triton/test_llama_ops.py::test_a_norm_rounds_where_llama_s_does
-mean = tl.div_rn(tl.sum(squares, 1), tl.full((R,), WIDTH, tl.float32))
+mean = tl.div_rn(tl.sum(squares, 1), tl.full((R,), BLOCK, tl.float32))
# a norm by 1 + weight rounded twice
| triton/test_llama_ops.py::test_a_norm_by_one_plus_its_weight_rounds_once_as_gemma_s
-        if not PLUS_ONE:
-            n = n.to
+        if True:
+            n = n.to
# a norm's gradient without the mean of g n | triton/test_llama_ops.py::test_gradients_of_a_norm
- - n * mean)
+)
# both halves with the angles of the first
| triton/test_llama_ops.py::test_turned_heads_have_the_bits_of_llama_s
-cos_b = tl.load(cos_ptr + angle + HALF, mask=inside, other=0.0)
+cos_b = tl.load(cos_ptr + angle, mask=inside, other=0.0)
# turned heads rounded once | triton/test_llama_ops.py::test_turned_heads_have_the_bits_of_llama_s
-first = (a * cos).to(narrow).to(tl.float32) - (b * sin).to(narrow).to(tl.float32)
+first = a * cos - b * sin
# silu not rounded before the product | triton/test_llama_ops.py::test_a_gated_product_rounds_where_torch_does
-silu = (gate / (1.0 + tl.exp(-gate))).to(narrow).to(tl.float32)
+silu = gate / (1.0 + tl.exp(-gate))
# density lost in the gradient of GELU | triton/test_llama_ops.py::test_gradients_of_an_activation
-slope = share + v * density
+slope = share
""")
