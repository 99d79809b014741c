"""The seeded bugs of `test_mutations.py`: what to change where, and the tests of which at least one must then fail.

`read` takes them from texts like those of a patch:

    == the op
    @ the backend, the file, and the C++ files of the extension to compile again, below csrc
    # what the bug is | its tests, as pytest names below tests/kernels; those in triton/ run in the interpreter
    | its tests, where one line is too short for both
    -the old text, which stands exactly once in the file
    +the new text, if any

Op and file hold until the next. Without files to compile, the bug is in Python or Triton, or in CUDA code that its
tests compile. Tests run on every instruction set of the CPU, so a bug in one is enough; all machines have `portable`.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One seeded bug."""

    name: str
    backend: str  # reference, cpu, triton, cuda
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    units: tuple[str, ...] = ()  # below csrc
    op: str = ""

    def __str__(self) -> str:
        return f"{self.op}, {self.backend}: {self.name}"


def read(text: str) -> list[Mutation]:
    """The bugs of a text."""
    bugs: list[Mutation] = []
    op, place = "", [""]
    for line in filter(None, text.split("\n")):
        if line.startswith("== "):
            op = line[3:]
        elif line.startswith("@ "):
            place = line[2:].split()
        elif line.startswith("# "):
            name, _, tests = line[2:].partition(" | ")
            backend, file, *units = place
            bugs.append(Mutation(name, backend, file, "", "", tuple(tests.split()), tuple(units), op))
        elif line.startswith("| "):
            bugs[-1] = bugs[-1]._replace(tests=tuple(line[2:].split()))
        else:
            side = {"-": "old", "+": "new"}[line[0]]
            bugs[-1] = bugs[-1]._replace(**{side: f"{getattr(bugs[-1], side)}\n{line[1:]}"})
    return [bug._replace(old=bug.old[1:], new=bug.new[1:]) for bug in bugs]


MUTATIONS = read("""
== linear_logprob
@ reference kernels/rlhf_kernels/linear_logprob/reference.py
# max from 0 | test_linear_logprob.py::test_hostile_rows
-m = z.amax(-1).clamp_min(torch.finfo(z.dtype).min)
+m = z.amax(-1).clamp_min(0.0)
# padded columns counted in the entropy | test_linear_logprob.py::test_masked_vocabulary_columns_have_no_nan
-log_total - z.clamp_min_(torch.finfo(z.dtype).min).mul_(e)
+log_total - z.mul_(e)
# double rounding | test_linear_logprob.py::test_half_precision_is_tier3_and_its_logprob_is_not_rounded
-        z = head.tile(h, rows)
-        stats
+        z = head.tile(h, rows).to(hidden.dtype).to(h.dtype)
+        stats
@ reference kernels/rlhf_kernels/vocab/logits.py
# temperature in the gradient only | test_linear_logprob.py::test_gradcheck_every_output_and_input
-return self.capped(h).div_(self.divisor(rows))
+return self.capped(h)
# temperature in the forward only | test_linear_logprob.py::test_gradcheck_every_output_and_input
-        g.div_(divisor)
-        if self.softcap:
+        if self.softcap:
# temperature not in the target's slope | test_linear_logprob.py::test_gradcheck_with_the_gradient_ahead
-u = options.logit_scale / divisor
+u = options.logit_scale
# temperature of the first chunk's rows | test_linear_logprob.py::test_several_row_chunks_with_gradients
-else self.column[rows]
+else self.column[: rows.stop - rows.start]
# dW of a frozen head | test_linear_logprob.py::test_frozen_weight_has_no_dw_and_logits_never_exist
-if name in self.needs and x is not None
+if (name in self.needs or name == 'weight') and x is not None
@ reference kernels/rlhf_kernels/linear_logprob/reference.py
# target counted twice in the gradient ahead | test_linear_logprob.py::test_gradcheck_with_the_gradient_ahead
-            p.scatter_(1, index[rows, None], 0.0)
-
# ignored rows not zero | test_linear_logprob.py::test_any_layout_and_ignored_rows_that_hold_nan
-results[name][rows] = torch.where(keep[rows], value, 0.0)
+results[name][rows] = value
# ignored rows in dW | test_linear_logprob.py::test_any_layout_and_ignored_rows_that_hold_nan
-None if g is None else torch.where(keep, g.to(dtype), 0.0) for g in grads
-    )
-    for
+None if g is None else g.to(dtype) for g in grads
+    )
+    for
# last of equal maxima is top 1 | test_linear_logprob.py::test_top1_first_maximum_wins
-(z.argmax(-1) == index)
+(z.shape[-1] - 1 - z.flip(-1).argmax(-1) == index)
@ cpu csrc/cpu/head_body.inc.h cpu/variants/portable.cpp
# padded columns counted in the sums
| test_linear_logprob.py::test_tier1_of_every_output_input_and_option test_linear_logprob.py::test_ragged_sizes
-if (v >= count) {
-            out = pair_out
+if (v >= round_up(count, 32)) {
+            out = pair_out
# padded columns counted in the maximum
| test_linear_logprob.py::test_half_precision_is_tier3_and_its_logprob_is_not_rounded
-const f32x16 top = block_maximum(logits, count, half);
+const f32x16 top = block_maximum(logits, round_up(count, 32), half);
# max from 0 | test_linear_logprob.py::test_hostile_rows
-return {splat(0.0f), splat(0.0f), splat(kLowest), splat(kLowest)};
+return {splat(0.0f), splat(0.0f), splat(0.0f), splat(kLowest)};
# best logit from 0 | test_linear_logprob.py::test_hostile_rows
-s.best[h] = splat(-__builtin_inff());
+s.best[h] = splat(0.0f);
# last of equal maxima is top 1 | test_linear_logprob.py::test_top1_first_maximum_wins
-const i32x16 better = z > best;
+const i32x16 better = z >= best;
# double rounding | test_linear_logprob.py::test_half_precision_is_tier3_and_its_logprob_is_not_rounded
-load16(logit_row(logits, v, half));
-        f32x16 e
+as_float(as_words(load16(logit_row(logits, v, half))) & 0xffff0000u);
+        f32x16 e
# temperature in the gradient only | test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-by = inverse_temperature.x[half], cap = by * head.softcap;
+by = splat(1.0f) + 0.0f * inverse_temperature.x[half], cap = by * head.softcap;
# temperature not in the recomputed gradient | test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-lanes.slope.x[h] = splat(call.head.scale) / lanes.temperature.x[h];
+lanes.slope.x[h] = splat(call.head.scale);
# temperature not in the gradient ahead | test_linear_logprob.py::test_the_gradient_ahead_is_that_of_the_backward
-const float by = head.scale / (call.batch.temperature[n] * sum);
+const float by = head.scale / sum;
@ cpu kernels/rlhf_kernels/vocab/native.py
# temperature of other rows | test_linear_ppo_loss.py::test_tier1 test_linear_ppo_loss.py::test_ragged_sizes
-self.temperature = o.row_temperature[self.rows].float()
+self.temperature = o.row_temperature[: rows.shape[0]].float()
@ cpu csrc/cpu/head_body.inc.h cpu/variants/portable.cpp
# dW of the last piece of the depth alone | test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-sums + k * 4 * kTileFloats, n > 0);
+sums + k * 4 * kTileFloats, false);
@ cpu kernels/rlhf_kernels/vocab/native.py
# dW of a frozen head | test_linear_logprob.py::test_frozen_weight_has_no_dw_and_logits_never_exist
-weight = torch.empty(n_vocab, H, dtype=weight_dtype) if "weight" in needs else None
+weight = torch.empty(n_vocab, H, dtype=weight_dtype)
@ cpu csrc/cpu/head_body.inc.h cpu/variants/portable.cpp
# target counted twice in the gradient ahead
| test_linear_logprob.py::test_half_precision_is_tier3_and_its_logprob_is_not_rounded
-if (any_target) e = select(target == static_cast<int32_t>(v), splat(0.0f), e);
+static_cast<void>(any_target);
# stale sums ahead after a new maximum
| test_linear_logprob.py::test_half_precision_is_tier3_and_its_logprob_is_not_rounded
-if (ahead && v0 > 0) rescale(sums, sum_tiles, half, factor);
# stale sum after a new maximum | test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-            s.sum[half] *= factor;
-
# stale sum of squares after a new maximum | test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-s.sum_square[half] *= factor * factor;
+s.sum_square[half] *= factor;
# sums depend on the number of threads | test_linear_logprob.py::test_bits_of_a_row_depend_on_that_row_alone
-            add_product_32(p + i * p_step, b, columns.stride, depth_v, v0 == 0,
-                           sums + (panels[i].sums + k * 4) * kTileFloats);
+            const Element* own = p + i * p_step;
+            float* to = sums + (panels[i].sums + k * 4) * kTileFloats;
+            const Element* next = own + depth_v * kTileElements;
+            if (count > 1) multiply_2x2(own, next, b, b + columns.stride, depth_v, to, v0 > 0);
+            if (count == 1) add_product_32(own, b, columns.stride, depth_v, v0 == 0, to);
@ triton kernels/rlhf_kernels/vocab/triton_kernels.py
# padded columns counted in the tiled sweep | triton/test_linear_logprob.py::test_ragged_sizes
-    return tl.where(in_range[None, :], z, float("-inf"))
+    return z
# padded columns counted in the fused sweep | triton/test_linear_logprob.py::test_ragged_sizes
-        z = tl.where(in_range[None, :], z, float("-inf"))
-
@ triton kernels/rlhf_kernels/vocab/triton_sweep.py
# max from 0 in the tiled sweep | triton/test_linear_logprob.py::test_hostile_rows
-state[0, 0] = state[0, 7] = -torch.inf
+state[0, 0] = state[0, 7] = 0.0
@ triton kernels/rlhf_kernels/vocab/triton_kernels.py
# max from 0 in the fused sweep | triton/test_linear_logprob.py::test_hostile_rows
-    m = tl.full((BN,), float("-inf"), tl.float32)
-
+    m = tl.zeros((BN,), tl.float32)
+
@ triton kernels/rlhf_kernels/vocab/triton_logits.py
# double rounding | triton/test_linear_logprob.py::test_half_precision_is_tier3_and_its_logprob_is_not_rounded
-c = (y + bias) * logit_scale
+c = (y.to(tl.bfloat16).to(tl.float32) + bias) * logit_scale
# temperature in the gradient only | triton/test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-return c / divisor[:, None]
+return c + 0.0 * divisor[:, None]
# temperature in the forward only | triton/test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-(logit_scale / divisor)[:, None]
+(logit_scale + 0.0 * divisor)[:, None]
@ triton kernels/rlhf_kernels/vocab/triton_sweep.py
# dW of a frozen head | triton/test_linear_logprob.py::test_a_frozen_head_gets_no_product
-            if name in names:
-                sums[name] = self.empty(
+            if name in names or name == "weight":
+                sums[name] = self.empty(
@ triton kernels/rlhf_kernels/vocab/triton_kernels.py
# target counted in every tile | triton/test_linear_logprob.py::test_ragged_sizes
-tile_state(z, column, in_range, index, True, SUM_SQ, MEAN, TOP)
-    a, a2
+tile_state(z, offset, in_range, index, True, SUM_SQ, MEAN, TOP)
+    a, a2
@ triton kernels/rlhf_kernels/vocab/triton_logits.py
# target counted twice in the gradient | triton/test_linear_logprob.py::test_tier1_of_every_output_input_and_option
-tl.where(is_target, d_logprob[:, None], 0.0)
+tl.where(is_target, 2.0 * d_logprob[:, None], 0.0)
@ triton kernels/rlhf_kernels/vocab/triton_kernels.py
# stale sums ahead after a new maximum | triton/test_linear_logprob.py::test_ragged_sizes
-scale_rows(sum_p_ptr, sum_width, rows, a, inside, R, SCALE_BLOCK)
+scale_rows(sum_p_ptr, sum_width, rows, 0.0 * a + 1.0, inside, R, SCALE_BLOCK)
@ triton kernels/rlhf_kernels/vocab/triton_logits.py
# stale sum after a new maximum | triton/test_linear_logprob.py::test_ragged_sizes
-return a, a * s, a *
+return a, s, a *
# last of equal maxima is top 1, in a tile | triton/test_linear_logprob.py::test_top1_first_maximum_wins
-first = tl.min(tl.where(z == m[:, None], column[None, :], 2147483647), 1)
+first = tl.max(tl.where(z == m[:, None], column[None, :], -1), 1)
# last of equal maxima is top 1, across tiles | triton/test_linear_logprob.py::test_top1_first_maximum_wins
-tl.where(m2 == m, tl.minimum(first, first2), first)
+tl.where(m2 == m, tl.maximum(first, first2), first)
@ triton kernels/rlhf_kernels/vocab/triton_sweep.py
# ignored rows in dW | triton/test_linear_logprob.py::test_any_layout_and_ignored_rows_that_hold_nan
-clean = self.hidden.masked_fill(~self.keep[:, None], 0) if
+clean = self.hidden if

== linear_logprob_pair
@ reference kernels/rlhf_kernels/linear_logprob_pair/reference.py
# KL of the other direction | test_linear_logprob_pair.py::test_tier1_with_every_option
-log_ratio = (z_a - z_r).sub_((lse_a - lse_r)[:, None])
+log_ratio = (z_r - z_a).sub_((lse_r - lse_a)[:, None])
# LoRA on the reference row too | test_linear_logprob_pair.py::test_bits_are_those_of_linear_logprob
-options._replace(lora_A=None, lora_B=None)
+options
@ reference kernels/rlhf_kernels/vocab/logits.py
# KL not subtracted in its gradient | test_linear_logprob_pair.py::test_gradcheck_with_the_gradient_ahead
-gap = (saved.logprob_a - saved.logprob_r) - saved.kl
+gap = saved.logprob_a - saved.logprob_r
@ cpu csrc/cpu/head_body.inc.h cpu/variants/portable.cpp
# temperature on the first row only
| test_linear_logprob_pair.py::test_tier1_with_every_option test_linear_logprob_pair.py::test_hostile_rows
-        if (call.pair) transform(head, v0, count, inverse, pair_logits);
-
# temperature on the first row only, recomputed | test_linear_logprob_pair.py::test_tier1_with_every_option
-        if (g.kl) transform(head, v0, count, inverse, pair_logits);
-
# max of the reference row from 0 | test_linear_logprob_pair.py::test_hostile_rows
-s.reference[h] = s.pair_reference[h] = no_reference();
+s.reference[h] = s.pair_reference[h] = no_reference();
+        s.pair_reference[h].value = splat(0.0f);
# KL sign | test_linear_logprob_pair.py::test_tier1_with_every_option test_linear_logprob_pair.py::test_hostile_rows
-const double kl = ((s.difference[half][lane] / static_cast<double>(sum) + centre) - lse) + pair_lse;
+const double kl = (lse - (s.difference[half][lane] / static_cast<double>(sum) + centre)) - pair_lse;
# stale sum of the reference row after a new maximum
| test_linear_logprob_pair.py::test_tier1_with_every_option test_linear_logprob_pair.py::test_hostile_rows
-s.pair_sum[half] *= s.pair_reference[half].meet(pair_top);
+s.pair_reference[half].meet(pair_top);
# KL not subtracted in the gradient ahead
| test_linear_logprob_pair.py::test_tier1_with_every_option
-other ? x - less * other[k] : x;
+other ? x - 0.0f * less : x;
# stale sums ahead of the KL after a new maximum | test_linear_logprob_pair.py::test_hostile_rows
-if (ahead_kl && v0 > 0) rescale(sums_kl, sum_tiles, half, factor);
@ triton kernels/rlhf_kernels/vocab/triton_kernels.py
# KL sign | triton/test_linear_logprob_pair.py::test_ragged_sizes
-kl = tl.sum(a2 * x2, 0) / s - (lse - lse_r)
+kl = (lse - lse_r) - tl.sum(a2 * x2, 0) / s
@ triton kernels/rlhf_kernels/vocab/triton_sweep.py
# LoRA on the reference row too | triton/test_linear_logprob_pair.py::test_tier1_with_every_option
-and self.down is not None and not reference:
+and self.down is not None:
# max of the reference row from 0 | triton/test_linear_logprob_pair.py::test_hostile_rows
-state[0, 0] = state[0, 7] = -torch.inf
+state[0, 0] = -torch.inf
@ triton kernels/rlhf_kernels/vocab/triton_kernels.py
# stale sums ahead of the KL after a new maximum
| triton/test_linear_logprob_pair.py::test_ragged_sizes triton/test_linear_logprob_pair.py::test_tier1_with_every_option
-scale_rows(sum_q_ptr, sum_width, rows, a, inside, R, SCALE_BLOCK)
+scale_rows(sum_q_ptr, sum_width, rows, 0.0 * a + 1.0, inside, R, SCALE_BLOCK)

== linear_ppo_loss
@ reference kernels/rlhf_kernels/ppo_loss/options.py
# advantages of the first chunk | test_linear_ppo_loss.py::test_per_token_advantages_across_chunks
-self.advantage[rows]
+self.advantage[: rows.stop - rows.start]
@ reference kernels/rlhf_kernels/linear_ppo_loss/reference.py
# ignored rows counted | test_linear_ppo_loss.py::test_tier1 test_linear_ppo_loss.py::test_ragged_sizes
-factor = torch.where(keep, tokens.mask.to(dtype), 0.0)
+factor = tokens.mask.to(dtype)
# rows with an entropy gradient alone left out
| test_linear_ppo_loss.py::test_clipped_rows_and_rows_without_advantage_keep_their_entropy_gradient
-active = ((on_logprob != 0) | (on_entropy[rows] != 0))
+active = (on_logprob != 0)
# dead rows computed | test_linear_ppo_loss.py::test_frozen_head_costs_two_products_and_dead_rows_none
-active = ((on_logprob != 0) | (on_entropy[rows] != 0))
+active = torch.ones_like(on_logprob)
@ reference kernels/rlhf_kernels/vocab/logits.py
# dW of a frozen head | test_linear_ppo_loss.py::test_frozen_head_costs_two_products_and_dead_rows_none
-        if "weight" in sums:
-            sums["weight"].addmm_(g.T, h)
+        d_weight = torch.mm(g.T, h)
+        if "weight" in sums:
+            sums["weight"] += d_weight
@ cpu kernels/rlhf_kernels/linear_ppo_loss/native.py
# coefficients of other rows | test_linear_ppo_loss.py::test_tier1 test_linear_ppo_loss.py::test_ragged_sizes
-named = {name: x[rows].contiguous() for name, x in given.items()}
+named = {name: x[: rows.shape[0]].contiguous() for name, x in given.items()}
# ignored rows counted | test_linear_ppo_loss.py::test_tier1 test_linear_ppo_loss.py::test_ragged_sizes
-factor = torch.where(keep, tokens.mask.float(), 0.0)
+factor = tokens.mask.float()
# rows with an entropy gradient alone left out
| test_linear_ppo_loss.py::test_clipped_rows_and_rows_without_advantage_keep_their_entropy_gradient
-rows = active_rows((on_logprob != 0) | (on_entropy != 0))
+rows = active_rows(on_logprob != 0)
@ triton kernels/rlhf_kernels/linear_ppo_loss/triton.py
# ignored rows counted | triton/test_linear_ppo_loss.py::test_tier1
-factor = torch.where(sweep.keep, tokens.mask.to(torch.float32), 0.0)
+factor = tokens.mask.to(torch.float32)

== gather_logprob
@ reference kernels/rlhf_kernels/gather_logprob/reference.py
# temperature in the forward only | test_gather_logprob.py::test_gradcheck_every_output
-g.div_(divisor).to(d_logits.dtype)
+g.to(d_logits.dtype)
# temperature in the gradient only | test_gather_logprob.py::test_gradcheck_every_output
-return z.div_(divisor)
+return z
# double rounding
| test_gather_logprob.py::test_half_logits_are_upcast_before_the_temperature_and_gradients_rounded_once
-return z.div_(divisor)
+return z.div_(divisor).to(logits.dtype).to(z.dtype)
@ cpu csrc/cpu/gather_logprob.cpp cpu/gather_logprob.cpp
# memory taken by each thread | test_gather_logprob.py::test_memory_that_runs_out_is_an_error
-std::vector<S> scratch((parallel ? threads : 1) * scratch_size);  // here: what is thrown in a region ends the process
-#pragma omp parallel for num_threads(threads) if (parallel) schedule(dynamic, together)
-    for (int64_t row = 0; row < rows; ++row) body(row, scratch.data() + thread_number() * scratch_size);
+#pragma omp parallel num_threads(threads) if (parallel)
+    {
+        std::vector<S> scratch(scratch_size);
+#pragma omp for schedule(dynamic, together)
+        for (int64_t row = 0; row < rows; ++row) body(row, scratch.data());
+    }
@ triton kernels/rlhf_kernels/gather_logprob/triton.py
# padded columns counted | triton/test_gather_logprob.py::test_tier1_sizes_and_scales
-        z = tl.where(in_range[None, :], z, float("-inf"))
-
# max from 0 | triton/test_gather_logprob.py::test_tier1_hostile_rows
-    m = tl.full((R,), float("-inf"), tl.float32)
-
+    m = tl.zeros((R,), tl.float32)
+
# temperature in the forward only
| triton/test_gather_logprob.py::test_layouts_and_both_backwards
-    g = g / divisor[:, None]
-
# double rounding
| triton/test_gather_logprob.py::test_half_logits_are_upcast_before_the_temperature_and_gradients_rounded_once
-        z = tl.where(in_range[None, :], z, float("-inf"))
-
+        z = tl.where(in_range[None, :], z.to(tl.bfloat16).to(tl.float32), float("-inf"))
+
@ cpu csrc/cpu/gather_logprob_kernel.inc.h cpu/variants/portable.cpp
# padded columns counted | test_gather_logprob.py::test_tier1_sizes_and_scales
-add<T>(load_some(tile + i, n - i, T(-infinity)), shift
+add<T>(load_some(tile + i, n - i, T(0)), shift
# max from 0 | test_gather_logprob.py::test_hostile_values test_gather_logprob.py::test_tier1_hostile_rows
-double top = -infinity, before_target
+double top = 0, before_target
# temperature in the gradient only | test_gather_logprob.py::test_layouts_and_both_backwards
-L::splat(T(1.4426950408889634 / temperature))
+L::splat(T(1.4426950408889634))
@ cpu csrc/cpu/lanes.h cpu/variants/portable.cpp
# powers of two a little off | test_gather_logprob.py::test_tier1_sizes_and_scales
-splat(0.24022166430950165f)
+splat(0.2403f)
@ cpu csrc/cpu/gather_logprob_kernel.inc.h cpu/variants/portable.cpp
# temperature not in the target's gradient | test_gather_logprob.py::test_layouts_and_both_backwards
-L::splat(T(slopes.at_target / temperature))
+L::splat(T(slopes.at_target))
# stale sum after a new maximum
| test_gather_logprob.py::test_tier1_sizes_and_scales test_gather_logprob.py::test_tier1_hostile_rows
-                total *= factor;
-
# last of equal maxima is top 1 | test_gather_logprob.py::test_first_arg_max_wins_and_nan_is_the_largest
-at_target > before_target || target == 0
+at_target >= before_target || target == 0

== lora
@ reference kernels/rlhf_kernels/lora/reference.py
# dropout on the base path | test_lora.py::test_dropout_never_touches_the_base_path
-y = F.linear(x, weight, bias).contiguous()
+y = F.linear(F.dropout(x, max(lora_call.p)), weight, bias).contiguous()
# dropout on the base path of dx | test_lora.py::test_dropout_never_touches_the_base_path
-dx_rows = dy_rows @ weight  # [N, K]
+dx_rows = F.dropout(dy_rows @ weight, max(lora_call.p))  # [N, K]
# off rows by another GEMM | test_lora.py::test_off_rows_keep_the_bits_of_the_base
-y = F.linear(x, weight, bias).contiguous()
+y = F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype).contiguous()
# off rows by one GEMM per row | test_lora.py::test_off_rows_keep_the_bits_of_the_base
-y = F.linear(x, weight, bias).contiguous()
+y = torch.stack([F.linear(row, weight, bias) for row in x.reshape(-1, x.shape[-1])])
+        y = y.view(*x.shape[:-1], -1)
@ reference kernels/rlhf_kernels/lora/__init__.py
# a zero delta on off rows | test_lora.py::test_off_rows_keep_minus_zero_and_nan_bits
-        at += end - start
-    return y
-
+        at += end - start
+    return y.add_(0.0)
+
@ reference kernels/rlhf_kernels/lora/reference.py
# dW of a frozen base | test_lora.py::test_nothing_is_computed_for_what_is_frozen
-        if need_weight:
-            grads.append(dy_rows.T @ x_rows)
+        d_weight = dy_rows.T @ x_rows
+        if need_weight:
+            grads.append(d_weight)
# dropout without its scale | test_lora.py::test_linear_equals_the_formula_and_its_gradients
-x * (1 / (1 - p))
+x * 1
# dropout keyed by position | test_lora.py::test_linear_equals_the_formula_and_its_gradients
-rows = row_ids[start:end]
+rows = row_ids[: end - start]
# gradient of a slot's last run alone | test_lora.py::test_linear_equals_the_formula_and_its_gradients
-dB[i] = dB[i] + part if i in dB else part
+dB[i] = part
@ reference kernels/rlhf_kernels/lora/__init__.py
# delta rounded before it is added | test_lora.py::test_delta_is_rounded_once
-rows[start:end].add_(delta[at : at + end - start])
+rows[start:end].add_(delta[at : at + end - start].to(y.dtype))
@ triton kernels/rlhf_kernels/lora/triton.py
# dropout on the base path | triton/test_lora.py::test_tier1
-y = product_for(x, weight).forward(x, weight, bias)
+y = product_for(x, weight).forward(torch.dropout(x, max(lora_call.p), True), weight, bias)
# dropout on the base path of dx | triton/test_lora.py::test_tier1
-dx_rows = base.input_gradient(dy_rows, weight)  # [N, K]
+dx_rows = torch.dropout(base.input_gradient(dy_rows, weight), max(lora_call.p), True)  # [N, K]
# off rows by another GEMM | triton/test_lora.py::test_off_rows_keep_the_bits_of_the_base
-y = product_for(x, weight).forward(x, weight, bias)
+wide = x.double(), weight.double(), None if bias is None else bias.double()
+        y = torch.nn.functional.linear(*wide).to(x.dtype)
@ triton kernels/rlhf_kernels/lora/__init__.py
# a zero delta on off rows | triton/test_lora.py::test_off_rows_keep_minus_zero_and_nan_bits
-        at += end - start
-    return y
-
+        at += end - start
+    return y.add_(0.0)
+
@ triton kernels/rlhf_kernels/lora/triton.py
# dW of a frozen base | triton/test_lora.py::test_nothing_is_computed_that_nobody_needs
-        if need_weight:
-            grads.append(base.weight_gradient(dy_rows, x_rows))
+        d_weight = base.weight_gradient(dy_rows, x_rows)
+        if need_weight:
+            grads.append(d_weight)
# dropout not recomputed in dA | triton/test_lora.py::test_tier1
-column_tile * BD, seed, stream, threshold, BN, BD)
-            v = tl.where(keep, v, tl.zeros_like(v))
+column_tile * BD, seed, stream, threshold, BN, BD)
+            v = tl.where(keep, v, v)
# dropout not recomputed in dx | triton/test_lora.py::test_tier1
-delta = tl.where(keep, delta, 0.0)
+delta = tl.where(keep, delta, delta)
# first split alone | triton/test_lora.py::test_splits_and_chunks
-for _ in range(1, n_splits):
+for _ in range(1, 1):
# last chunk of a slot's rows missing | triton/test_lora.py::test_splits_and_chunks
-for chunk in range(begin, end):
+for chunk in range(begin, tl.maximum(begin + 1, end - 1)):
# padded ranks counted | triton/test_lora.py::test_tier1
-mask=(d[:, None] < n_d) & (r[None, :] < rank), other=0.0)
+mask=(d[:, None] < n_d) & (r[None, :] < rank), other=1.0)
@ cpu kernels/rlhf_kernels/lora/native.py
# dropout on the base path | test_lora.py::test_tier1
-y = product_for(x, weight).forward(x, weight, bias)
+y = product_for(x, weight).forward(torch.dropout(x, max(lora_call.p), True), weight, bias)
# dropout on the base path of dx | test_lora.py::test_tier1
-dx_rows = base.input_gradient(dy_rows, weight)  # [N, K]
+dx_rows = torch.dropout(base.input_gradient(dy_rows, weight), max(lora_call.p), True)  # [N, K]
# off rows by another GEMM | test_lora.py::test_off_rows_keep_the_bits_of_the_base
-y = product_for(x, weight).forward(x, weight, bias)
+wide = x.double(), weight.double(), None if bias is None else bias.double()
+        y = torch.nn.functional.linear(*wide).to(x.dtype)
# dW of a frozen base | test_lora_native.py::test_nothing_is_computed_for_what_is_frozen
-        if need_weight:
-            grads.append(base.weight_gradient(dy_rows, x_rows))
+        d_weight = base.weight_gradient(dy_rows, x_rows)
+        if need_weight:
+            grads.append(d_weight)
@ cpu csrc/cpu/lora_kernels.inc.h cpu/variants/portable.cpp
# dropout not recomputed in dx
| test_lora.py::test_dropout_draws_the_words_of_philox test_lora.py::test_tier1
-                if (keep) {
-                    const uint64_t bits
+                if (false) {
+                    const uint64_t bits
@ cpu csrc/cpu/lora.cpp cpu/lora.cpp
# gradient of a slot's first group alone | test_lora.py::test_tier1
-            if (groups[i].first) continue;
-
+            continue;
+
# sums depend on the number of threads | test_lora_native.py::test_threads_change_no_bit
-groups = split(runs, kGroupRows, slots.size())
+groups = split(runs, kGroupRows / threads, slots.size())

== gae
@ reference kernels/rlhf_kernels/gae/reference.py
# mask ignored in the advantage's carry | test_gae.py::test_hand_computed
-next_advantage = torch.where(keep, a, next_advantage)
+next_advantage = a
# mask ignored in the value's carry | test_gae.py::test_hand_computed
-next_value = torch.where(keep, v, next_value)
+next_value = v
# mask ignored in the gradient's carry | test_gae.py::test_gradcheck
-previous = torch.where(keep, total, previous)
+previous = total
# whiten with n, not n − 1 | test_whiten.py::test_hand_computed
-(squares / (n - 1.0).clamp_min(1.0) + eps)
+(squares / n.clamp_min(1.0) + eps)
# masked elements in whiten's count | test_whiten.py::test_hand_computed
-        n = mask.sum(dtype=torch.float64)
-
+        n = torch.tensor(float(mask.numel()), dtype=torch.float64)
+
# whiten's gradient with n, not n − 1 | test_whiten.py::test_gradcheck
-(g * d).sum() / (n - 1.0).clamp_min(1.0)
+(g * d).sum() / n.clamp_min(1.0)
@ cpu csrc/cpu/gae.cpp cpu/gae.cpp
# mask ignored in the advantage's carry | test_gae.py::test_hand_computed
-next_advantage[i] = keep ? a : next_advantage[i];
+next_advantage[i] = a;
# mask ignored in the value's carry | test_gae.py::test_hand_computed
-next_value[i] = keep ? v : next_value[i];
+next_value[i] = v;
@ cpu csrc/cpu/whiten.cpp cpu/whiten.cpp
# whiten with n, not n − 1 | test_whiten.py::test_hand_computed
-squares / std::max(n - 1.0, 1.0) + eps
+squares / std::max(n, 1.0) + eps
# whiten's sums depend on the number of threads | test_whiten.py::test_threads_do_not_change_the_bits
-    for (const auto& of_block : partial) {
-
+    for (size_t k = 0; k < partial.size(); ++k) {
+        const auto& of_block = partial[(k + threads) % partial.size()];
+
@ triton kernels/rlhf_kernels/gae/triton.py
# mask ignored in the advantage's carry | triton/test_gae.py::test_tier1
-(tl.where(keep, decay, 1.0), delta), 1, _then, reverse=True
+(tl.where(inside, decay, 1.0), delta), 1, _then, reverse=True
# mask ignored in the value's carry | triton/test_gae.py::test_tier1
-tl.where(first, tl.where(keep, v, v_next), 0.0)
+tl.where(first, v, 0.0)
# mask ignored in the gradient's carry | triton/test_gae.py::test_tier1
-tl.where(last, tl.where(keep, here, previous), 0.0)
+tl.where(last, here, 0.0)
# whiten with n, not n − 1 | triton/test_whiten.py::test_one_final_rounding
-tl.maximum(count - 1.0, 1.0) + EPS
+tl.maximum(count, 1.0) + EPS
# padded and masked elements counted | triton/test_whiten.py::test_moments_and_statistics_in_float64
-count += keep.to(tl.int64)
+count += 1
# spread of the ranges' means missing | triton/test_whiten.py::test_moments_and_statistics_in_float64
-own + tl.where(counts > 0.0, counts * apart * apart, 0.0)
+own + tl.where(counts > 0.0, 0.0 * apart, 0.0)
@ cuda csrc/cuda/gae.cu
# mask ignored in the scan | test_cuda_ops.py::test_coefficients test_cuda_ops.py::test_equals_definition_in_fp64
-affine_step(keep.item[i] != 0, decay, delta[i])
+affine_step(true, decay, delta[i])
# masked value handed on | test_cuda_ops.py::test_coefficients test_cuda_ops.py::test_equals_definition_in_fp64
-after = keep.item[i] ? v.item[i] : after;
+after = v.item[i];
@ cuda csrc/cuda/reduce.cuh
# last block's partial sums missing
| test_cuda_ops.py::test_tier1_of_everything test_cuda_ops.py::test_tier1_of_every_option
-for (int block = threadIdx.x; block < blocks; block += kReduceThreads)
+for (int block = threadIdx.x; block < (blocks > 1 ? blocks - 1 : 1); block += kReduceThreads)
@ cpu csrc/cpu/whiten_kernel.inc.h cpu/variants/portable.cpp
# padded and masked elements counted | test_whiten.py::test_ragged_sizes_on_every_instruction_set
-count[side] += L::select(live, L::splat(1), V{});
+count[side] += L::splat(1);

== ppo_loss
@ reference kernels/rlhf_kernels/ppo_loss/reference.py
# clip bounds swapped | test_ppo_loss.py::test_every_clip_case_by_hand
-low, high, dual_clip = 1 - options.clip_low, 1 + options.clip_high
+low, high, dual_clip = 1 - options.clip_high, 1 + options.clip_low
# clipped on the wrong side | test_ppo_loss.py::test_every_clip_case_by_hand
-clipped_high = (advantage > 0) & (ratio > high)
+clipped_high = (advantage < 0) & (ratio > high)
# KL sign | test_ppo_loss.py::test_kl_estimators_by_hand
-d = ref_logprob - new_logprob
+d = new_logprob - ref_logprob
# entropy bonus as a penalty | test_ppo_loss.py::test_gradcheck
-loss = loss - options.entropy_coef * entropy_mean
+loss = loss + options.entropy_coef * entropy_mean
# masked tokens in the largest ratio | test_ppo_loss.py::test_masked_garbage_is_never_seen
-live_ratio = torch.where(live, policy.ratio, zero)
+live_ratio = policy.ratio
# values clipped on one side | test_ppo_loss.py::test_value_loss_by_hand
-(v - old).clamp(-clip, clip)
+(v - old).clamp_max(clip)
@ triton kernels/rlhf_kernels/ppo_loss/triton.py
# clip bounds swapped | triton/test_ppo_loss.py::test_tier1_of_every_option
-1 - options.clip_low, 1 + options.clip_high,
+1 - options.clip_high, 1 + options.clip_low,
# KL sign | triton/test_ppo_loss.py::test_tier1_of_every_option
-d = tl.load(ref_logprob + at, mask=live, other=0.0).to(tl.float32) - new
+d = new - tl.load(ref_logprob + at, mask=live, other=0.0).to(tl.float32)
# padded tokens counted | triton/test_ppo_loss.py::test_tier1_of_everything
-mask=at < n, other=0).to(tl.float32)
-    live = weight != 0.0
-    new =
+mask=at < n, other=1).to(tl.float32)
+    live = weight != 0.0
+    new =
# masked tokens in the largest ratio | triton/test_ppo_loss.py::test_largest_ratio_is_that_of_a_live_token
-ratio_max = tl.max(tl.where(live, ratio, 0.0), 0)
+ratio_max = tl.max(ratio, 0)
# last partial sums missing | triton/test_ppo_loss.py::test_many_partial_sums
-    for start in range(0, n_blocks, FOLD):
-        column = start + tl.arange(0, FOLD)
-        at = index[:, None] * n_blocks + column[None, :]
-        tile =
+    for start in range(0, n_blocks - FOLD, FOLD):
+        column = start + tl.arange(0, FOLD)
+        at = index[:, None] * n_blocks + column[None, :]
+        tile =
@ cuda csrc/common/ppo_terms.h
# clip bounds swapped | test_cuda_ops.py::test_tier1_of_everything test_cuda_ops.py::test_tier1_of_every_option
-ratio < clip.low ? clip.low : (ratio > clip.high ? clip.high : ratio)
+ratio < clip.low ? clip.high : (ratio > clip.high ? clip.low : ratio)
# KL sign | test_cuda_ops.py::test_tier1_of_everything test_cuda_ops.py::test_tier1_of_every_option
-const T d = ref_logprob - new_logprob;
+const T d = new_logprob - ref_logprob;
@ cuda csrc/cuda/ppo_loss.cu
# masked tokens counted | test_cuda_ops.py::test_masked_garbage_is_never_seen
-            const T w = weight.item[i];
-            out.item[i] = T(0);
-            if (w != T(0)) {
+            const T w = weight.item[i];
+            out.item[i] = T(0);
+            if (i < inside) {
@ cpu csrc/cpu/ppo_loss_kernel.inc.h cpu/variants/portable.cpp
# clip bounds swapped | test_ppo_loss.py::test_every_clip_case_by_hand
-L::select(under, low_bound, L::select(over, high_bound, r.exp))
+L::select(under, high_bound, L::select(over, low_bound, r.exp))
# KL sign | test_ppo_loss.py::test_kl_estimators_by_hand
-const V d = L::select(live, L::load(ref_logprob + i), zero) - now;
+const V d = now - L::select(live, L::load(ref_logprob + i), zero);
# padded and masked tokens in the largest ratio | test_ppo_loss.py::test_largest_ratio_is_that_of_a_live_token
-L::max_of_nonnegative(ratio_max, L::select(live, r.exp, zero))
+L::max_of_nonnegative(ratio_max, r.exp)
# padded and masked values counted | test_ppo_loss.py::test_tier1_of_everything
-count_sum += weight;
+count_sum += L::splat(1);

== sample
@ reference kernels/rlhf_kernels/sample/reference.py
# greedy after the temperature | test_sample.py::test_greedy_is_the_first_maximum_before_the_temperature
-best = None if greedy is None else (greedy[rows], c.argmax(-1))
-        z = filter_(c.div_(head.divisor(rows)),
+c.div_(head.divisor(rows))
+        best = None if greedy is None else (greedy[rows], c.argmax(-1))
+        z = filter_(c,
# noise of the first chunk's rows | test_sample.py::test_tokens_of_several_row_chunks
-choose(z, seed[rows], position[rows], best)
+choose(z, seed[: z.shape[0]], position[: z.shape[0]], best)
# min_p a probability, not a share of the largest | test_sample.py::test_min_p
-z.amax(-1, keepdim=True) + math.log(min_p)
+z.logsumexp(-1, keepdim=True) + math.log(min_p)
# min_p before top_p | test_sample.py::test_min_p
-_keep_min_p_(_keep_top_p_(z, top_p), min_p)
+_keep_top_p_(_keep_min_p_(z, min_p), top_p)
@ cpu csrc/cpu/head_sample.inc.h cpu/variants/portable.cpp
# temperature not in the draw | test_sample.py::test_every_option
-z = o.cools ? c * o.inverse : c;
+z = c;
# greedy after the temperature | test_sample.py::test_every_option
-z = greedy ? s.top_z[lane] : s.drawn[lane];
+z = greedy ? s.top[lane] : s.drawn[lane];
# bound on the noise too low | test_sample.py::test_tokens_are_the_references
-splat(159 * ln2 + 1e-3f)
+splat(155 * ln2 + 1e-3f)
# noise of the wrong column | test_sample.py::test_tokens_are_the_references
-call.draws.stream, static_cast<uint32_t>(v / 4));
+call.draws.stream, static_cast<uint32_t>(v / 4 + 1));
@ cpu csrc/cpu/philox.h cpu/variants/portable.cpp
# high word of the position lost | test_sample.py::test_tokens_are_the_references
-id_high[lane] = uint32_t(uint64_t(row_id) >> 32);
+id_high[lane] = 0;
@ cpu csrc/cpu/head_sample.inc.h cpu/variants/portable.cpp
# padded columns counted | test_sample.py::test_tokens_are_the_references
-const int64_t count = end - v0 < kStrip ? end - v0 : kStrip;
+const int64_t count = kStrip;
@ cpu csrc/cpu/head_body.inc.h cpu/variants/portable.cpp
# sums relative to no power of two | test_sample.py::test_a_logprob_has_the_bits_of_linear_logprob
-const f32x16 near = muladd(above, splat(1.44269504088896341f), splat(magic)) - magic;
+const f32x16 near = above;
@ cpu csrc/cpu/head_sample.inc.h cpu/variants/portable.cpp
# a draw's strip added to all chunks at once | test_sample.py::test_a_logprob_has_the_bits_of_linear_logprob
-constexpr int64_t kChunk = kBlock;
+constexpr int64_t kChunk = 2 * kBlock;
# max from 0 | test_sample.py::test_every_column_a_new_best test_sample.py::test_sizes_and_hostile_rows
-s.score = s.drawn = s.top = s.top_z = splat(-__builtin_inff());
+s.score = s.drawn = s.top = s.top_z = splat(0.0f);
# sums not rescaled with the maximum | test_sample.py::test_every_column_a_new_best
-        s.sum *= factor;
-    }
-    const Exponential
+    }
+    const Exponential
# last chunk wins a tie | test_sample.py::test_first_of_equal_maxima_across_strips_and_chunks
-if (token >= 0 && !beats(score, best)) continue;
+if (token >= 0 && !(score >= best)) continue;
# every row forbids | test_sample.py::test_some_rows_never_draw_what_is_forbidden
-z = select(o.forbids, splat(-__builtin_inff()), z);
+z = splat(-__builtin_inff());
# NaN passed over | test_sample.py::test_values_that_are_not_finite
-return x > best || (is_nan(x) && !is_nan(best));
+return x > best;
@ cpu kernels/rlhf_kernels/sample/__init__.py
# filters silently left out | test_sample.py::test_filters_are_the_references
-    return "reference"
-
+    return chosen
+

== head runs
@ reference kernels/rlhf_kernels/vocab/runs.py
# rows of no run have the last slot's LoRA | test_head_runs.py::test_draws_are_the_definitions
-if slot != OFF:
+if self.run_A:
@ cpu kernels/rlhf_kernels/vocab/native.py
# rows of a slot in several runs put back as they come | test_head_runs.py::test_draws_are_the_definitions
-return _put(self.rows, values, n) if self.moved else scatter(self.rows, values, n)
+return scatter(self.rows, values, n)
@ cpu csrc/cpu/head_sample.inc.h cpu/variants/portable.cpp
# a NaN of one run's LoRA in all of sixteen rows | test_head_runs.py::test_a_run_has_the_bits_that_it_has_alone
-store16(logits + v, select(mine, load16(own + v), load16(logits + v)));
+store16(logits + v, load16(own + v));
# a run among sixteen rows without what W alone has made | test_head_runs.py::test_draws_are_the_definitions
-if (!alone) std::memcpy(own, logits, sizeof own);
+if (!alone) std::memset(own, 0, sizeof own);
# the strip of another run stays | test_head_runs.py::test_draws_are_the_definitions
-if (i != there && sizes.tail(run) > 0) {
+if (there < 0 && sizes.tail(run) > 0) {
@ cpu csrc/cpu/head_body.inc.h cpu/variants/portable.cpp
# dB from the first rows | test_head_runs.py::test_tier1_of_every_output_and_gradient
-hidden.first[i] * (kPanel / KT)
+0 * (kPanel / KT)
# what is left of a rounded B dropped | test_head_runs.py::test_a_bf16_head_does_not_round_its_loras
-put_rounded(x - high, count, out + 2 * r);
+put_rounded(high - high, count, out + 2 * r);
# a run's columns overlap the rest of W | test_head_runs.py::test_tier1_of_every_output_and_gradient
-if (run.extra > 0) fetch_own(run, v, out + rest);
+if (run.extra > 0) fetch_own(run, v, out);

== attention
@ reference kernels/rlhf_kernels/attention/reference.py
# window one too long | test_attention.py::test_tier1
-unseen |= key <= position - window
+unseen |= key < position - window
@ cpu csrc/cpu/decode_attention_kernel.inc.h cpu/variants/portable.cpp
# decoding sums a tile's values before it adds them
| test_attention.py::test_every_row_has_the_bits_of_decode_attention
-add_rows<Joining::row_by_row, heads>
+add_rows<Joining::together, heads>
@ cpu csrc/cpu/attention_kernel.inc.h cpu/variants/portable.cpp
# a masked position counted in the maximum | test_attention.py::test_every_row_has_the_bits_of_decode_attention
-seen = between(seen, first - tile, position + 1 - tile, -__builtin_inff());
+seen = between(seen, first - tile, kTile, -__builtin_inff());
# a later position's value added | test_attention.py::test_nan_stays_where_it_belongs
-after = position + 1 - tile;
+after = position + 2 - tile;
@ cpu csrc/cpu/attention.cpp cpu/attention.cpp
# the parent's rows taken from the first sequence | test_attention.py::test_every_row_has_the_bits_of_decode_attention
-s.parent < 0 ? 0 : sequences[s.parent].row
+0
# a child begins at position 0 | test_attention.py::test_every_row_has_the_bits_of_decode_attention
-begin = s.shared, end; begin < s.end()
+begin = 0, end; begin < s.length
@ cpu csrc/cpu/attention_gradient_kernel.inc.h cpu/variants/portable.cpp
# a child's gradient lost | test_attention.py::test_tier1
-if (x != m && m != 0) continue;
+if (x != m) continue;
# softcap's slope left out | test_attention.py::test_tier1
-bend = 1.0f - t * t;
# queries beyond the window keep a slope | test_attention.py::test_tier1
-dz = between(dz, begin, end, 0.0f);
+dz = between(dz, 0, end, 0.0f);
# a child's keys at the parent's positions | test_attention.py::test_tier1
-start = m == 0 ? 0 : shared;
+start = 0;
@ cpu csrc/cpu/attention.cpp cpu/attention.cpp
# sinks' gradient with the wrong sign | test_attention.py::test_tier1
-sum -= double(
+sum += double(

== decode_attention
@ reference kernels/rlhf_kernels/decode_attention/reference.py
# window one too long | test_decode_attention.py::test_tier1
-unused |= position < limit - window
+unused |= position < limit - window - 1
# NaN leaks from unused positions | test_decode_attention.py::test_unused_cache_never_leaks
-return out if bool(out.sum().isfinite()) else None
+return out
@ cpu csrc/cpu/decode_attention.cpp cpu/decode_attention.cpp
# window one too long | test_decode_attention.py::test_tier1
-std::max<int64_t>(0, length - window) : 0; }
+std::max<int64_t>(0, length - window - 1) : 0; }
@ cpu csrc/cpu/attention_lanes.inc.h cpu/variants/portable.cpp
# positions past the length counted | test_decode_attention.py::test_tier1
-if (edge) e = between(e, begin - i, end - i, 0.0f);
@ cpu csrc/cpu/decode_attention_kernel.inc.h cpu/variants/portable.cpp
# every block the first | test_decode_attention.py::test_every_length
-table[page] * pages.block_stride
+table[0] * pages.block_stride
@ cpu csrc/cpu/attention_lanes.inc.h cpu/variants/portable.cpp
# max from 0 | test_decode_attention.py::test_peaked_and_very_negative_scores
-f32x16 top = splat(sink);
+f32x16 top = splat(0.0f);
# scores not scaled | test_decode_attention.py::test_every_length
-load(from + d, left) * scale
+load(from + d, left)
# softcap without its factor | test_decode_attention.py::test_tier1
-softcap != 0.0f ? tanh16(z / softcap) * softcap : z;
+softcap != 0.0f ? tanh16(z / softcap) : z;
@ cpu csrc/cpu/decode_attention_kernel.inc.h cpu/variants/portable.cpp
# the fifth head of a group gets the first one's weights | test_decode_attention.py::test_every_length
-{scores + h * step + at, step, 1}
+{scores + (h < 4 ? h * step : 0) + at, step, 1}
@ cpu csrc/cpu/decode_attention.cpp cpu/decode_attention.cpp
# table not checked | test_decode_attention.py::test_bad_input
-RLHF_CHECK(table[i] >= 0 && table[i] < paging.blocks,
+RLHF_CHECK(table[i] < paging.blocks + 2 && table[i] >= -2,
@ reference kernels/rlhf_kernels/decode_attention/reference.py
# sinks ignored | test_decode_attention.py::test_tier1
-return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
+return scores.softmax(-1)
@ cpu csrc/cpu/attention_lanes.inc.h cpu/variants/portable.cpp
# sink not in the sum | test_decode_attention.py::test_tier1
-return {largest, lane_sum(sum) + start};
+return {largest, lane_sum(sum) + 0.0f * start};
@ cpu csrc/cpu/decode_attention_kernel.inc.h cpu/variants/portable.cpp
# every head its group's first sink | test_decode_attention.py::test_tier1
-group.sinks ? group.sinks[h] :
+group.sinks ? group.sinks[0] :
@ cpu csrc/cpu/decode_attention.cpp cpu/decode_attention.cpp
# every group the first one's sinks | test_decode_attention.py::test_tier1
-options.sinks ? options.sinks + h : nullptr
+options.sinks

== decode_linear
@ cpu csrc/cpu/lane_rows.inc.h cpu/variants/portable.cpp
# another slot's infinity | test_lora_native.py::test_decoding_with_strides_and_nan_beside
-select(carries != 0.0f, sum + deltas[i], sum)
+sum + deltas[i]
@ cpu csrc/cpu/lora_decode_body.inc.h cpu/variants/portable.cpp
# first sixteen rows' h for all | test_lora_native.py::test_tiers_of_decoding
-const float* h = call.h + (half + side) * call.ranks * 16;
+const float* h = call.h;
@ cpu csrc/cpu/lane_rows.inc.h cpu/variants/avx2.cpp
# last ranks lost | test_lora_native.py::test_tiers_of_decoding
-    for (; r < to; ++r) shrink<1>(rows
+    for (; r < from; ++r) shrink<1>(rows
@ cpu csrc/cpu/lora_decode_body.inc.h cpu/variants/portable.cpp
# ranks of the first thread alone | test_lora_native.py::test_a_row_s_bits_do_not_depend_on_its_company_or_on_threads
-            const int64_t part = item % shares;
-
+            if (item % shares != 0) return;
+            const int64_t part = 0;
+
@ cpu csrc/cpu/lane_rows.inc.h cpu/variants/portable.cpp
# bias of the first strip | test_lora_native.py::test_tiers_of_decoding
-wide(add[strip.first + v])
+wide(add[v])
# rounded once | test_lora_native.py::test_decoding_rounds_where_training_does
-store16(sums + v * 16, rounded(sum));
+store16(sums + v * 16, sum);
@ cpu kernels/rlhf_kernels/lora/native.py
# off rows where linear is torch's | test_lora_native.py::test_where_decoding_runs_as_everything_else
-rows == lora_call.n_on or product_for(x, weight) is linear_native
+True
# weights that moved read where they lay | test_lora_native.py::test_decoding_follows_its_tensors
-[t.data_ptr() for t in self._tensors] == self._addresses
+self._addresses
@ cpu kernels/rlhf_kernels/lora/__init__.py
# copies kept | test_lora_native.py::test_decoding_follows_its_tensors
-        if decoder.lasting:
-            self._decoder, self._asked = decoder, asked
+        self._decoder, self._asked = decoder, asked

== decode_step
@ cpu csrc/cpu/decode_step_body.inc.h cpu/variants/portable.cpp
# squares of a step added up in other pairs | test_decode_step.py::test_a_step_has_the_bits_of_the_ops_that_train
-sums[i] += sums[i + step];
+sums[i] += sums[2 * step - 1 - i];
# logistic function of a step by a reciprocal | test_decode_step.py::test_a_step_has_the_bits_of_the_ops_that_train
-rounded(x / (1.0f + exp16(-x)))
+rounded(x * (1.0f / (1.0f + exp16(-x))))
@ cpu csrc/cpu/lane_rows.inc.h cpu/variants/portable.cpp
# product of a step rounded before its bias | test_decode_step.py::test_a_step_has_the_bits_of_the_ops_that_train
-if (add) sum += wide(add[strip.first + v]);
+if (add) sum = rounded(sum) + wide(add[strip.first + v]);
@ cpu csrc/cpu/lora_kernels.inc.h cpu/variants/portable.cpp
# adapters that train summed in other pieces than a step's
| test_decode_step.py::test_a_step_has_the_bits_of_the_ops_that_train
-constexpr int64_t kShrinkColumns = kLoraColumns;
+constexpr int64_t kShrinkColumns = kLoraColumns / 2;
@ cpu csrc/cpu/linear_body.inc.h cpu/variants/portable.cpp
# products that train summed in other pieces than a step's
| test_decode_step.py::test_a_step_has_the_bits_of_the_ops_that_train
-some, sums + c * kStrip * 16, t > 0);
-            }
+some, sums + c * kStrip * 16, false);
+            }
@ reference kernels/rlhf_kernels/decode_step/reference.py
# window forgotten | test_decode_step.py::test_steps_repeat_a_forward_of_transformers
-d.scale, layer.window, None)
+d.scale, None, None)
# heads normed after they turned | test_decode_step.py::test_steps_repeat_a_forward_of_transformers
-q = _norm(q, layer.q_norm, d.eps)
+q = _norm(rotary(q, k, c, s)[0], layer.q_norm, d.eps)
@ cpu csrc/cpu/decode_step_body.inc.h cpu/variants/portable.cpp
# angles of the first sixteen rows | test_decode_step.py::test_tiers
-const float *cos = call.cos + half * D * 16,
+const float *cos = call.cos,
# window one too long | test_decode_step.py::test_tiers
-length > window ? length - window : 0
+length > window ? length - window - 1 : 0
# rows attend before those behind them have entered
| test_decode_step.py::test_a_prompt_in_one_call_is_its_tokens_one_by_one
-    steal(own.member, items, [&](int64_t i) { enter_rows(call, layer, i, own); });
-    steal(own.member, items, [&](int64_t i) { attend_rows(call, layer, i, own); });
-
+    for (int64_t i = items; i-- > 0;) {
+        enter_rows(call, layer, i, own);
+        attend_rows(call, layer, i, own);
+    }
+
# keys not normed | test_decode_step.py::test_tiers
-turn_head(call, half, k, weights.k_norm,
+turn_head(call, half, k, nullptr,
# first sixteen rows' h for all | test_decode_step.py::test_tiers
-const float* h = call.h + (i * call.ranks + part.h) * 16;
+const float* h = call.h + part.h * 16;
# first slot of every sixteen rows alone | test_decode_step.py::test_rows_of_many_slots_have_the_bits_of_each_slot_alone
-i < call.firsts[half + side + 1]; ++i)
+i < call.firsts[half + side + 1] && i < call.firsts[half + side] + 1; ++i)
@ cpu csrc/cpu/lane_rows.inc.h cpu/variants/portable.cpp
# another slot's infinity | test_decode_step.py::test_other_rows_adapters_never_leak
-select(carries != 0.0f, sum + deltas[i], sum)
+sum + carries * deltas[i]
# rest of a depth without adapters | test_decode_step.py::test_tiers
-        if (k < end) {
-            const f32x16 x = load_two(column, k).even;
+        if (k < 0) {
+            const f32x16 x = load_two(column, k).even;
@ cpu csrc/cpu/decode_step_body.inc.h cpu/variants/portable.cpp
# attention not added but put | test_decode_step.py::test_tiers
-rounded(load16(x + v * 16) + load16(sums + v * 16))
+load16(sums + v * 16)
@ cpu csrc/cpu/lane_rows.inc.h cpu/variants/portable.cpp
# linears rounded once | test_decode_step.py::test_rounds_where_the_reference_does
-store16(sums + v * 16, rounded(sum));
+store16(sums + v * 16, sum);
@ cpu csrc/cpu/decode_step_body.inc.h cpu/variants/portable.cpp
# silu not rounded | test_decode_step.py::test_rounds_where_the_reference_does
-silu = rounded(x / (1.0f + exp16(-x)))
+silu = x / (1.0f + exp16(-x))
@ cpu csrc/cpu/decode_step.cpp cpu/decode_step.cpp
# slots below -1 taken for none | test_decode_step.py::test_bad_calls
-check_range(rows.slots, rows.n, -1,
+check_range(rows.slots, rows.n, -9,
@ cpu kernels/rlhf_kernels/decode_step/native.py
# tensors that moved read where they lay | test_decode_step.py::test_updates_and_moves_are_seen
-if places != self._places:
+if not self._places:

== llama_ops
@ cpu csrc/cpu/llama_ops_kernel.inc.h cpu/variants/portable.cpp
# norm rounded once | test_llama_ops.py::test_a_norm_rounds_where_llama_s_does
-load(weight + i, left) * rounded<T>(load(x + i, left) * scale)
+load(weight + i, left) * (load(x + i, left) * scale)
# mean square over a padded width | test_llama_ops.py::test_a_norm_rounds_where_llama_s_does
-lanes[0] / static_cast<float>(width)
+lanes[0] / static_cast<float>((width + 15) / 16 * 16)
# logistic product rounded once | test_llama_ops.py::test_a_gated_product_rounds_where_torch_does
-rounded<T>(gate / (1.0f + L::exp(-gate))) * up
+gate / (1.0f + L::exp(-gate)) * up
# mean of the slope over a padded width | test_llama_ops.py::test_gradients_of_a_norm
-rstd * rstd * rstd / double(width)
+rstd * rstd * rstd / double((width + 15) / 16 * 16)
# norm's slope on the wrong side | test_llama_ops.py::test_gradients_of_a_norm
-float(-dot * rstd
+float(dot * rstd
# first half's angles for both | test_llama_ops.py::test_turned_heads_have_the_bits_of_llama_s
-a_sin = rounded<T>(a * load(sin + half + i, left))
+a_sin = rounded<T>(a * load(sin + i, left))
# gradient turned onwards | test_llama_ops.py::test_gradients_of_turned_heads
--(da * load(sin + i, left))
+da * load(sin + i, left)
@ cpu kernels/rlhf_kernels/llama_ops/native.py
# first sequence's angles for all | test_llama_ops.py::test_turned_heads_have_the_bits_of_llama_s
-tokens * dim if angles[0] == batch else 0
+0
@ cpu csrc/cpu/llama_ops_kernel.inc.h cpu/variants/portable.cpp
# slope of the logistic function alone | test_llama_ops.py::test_gradients_of_a_gated_product
-(s * L::fma(gate, 1.0f - s, L::splat(1.0f)))
+s
# first of two vectors of a gated product twice | test_llama_ops.py::test_gradients_of_a_gated_product
-gated_gradients(L::load(dy + k)
+gated_gradients(L::load(dy + i)
# tail of an activation by other means than a vector
| test_llama_ops.py::test_an_element_has_the_bits_that_it_has_alone
-store(y + i, n - i, f(i, n - i))
+store(y + i, n - i, f(i, n - i) * 1.0000001f)
# tail of gelu from 1 - share | test_llama_ops.py::test_no_digit_cancels_in_the_tail_of_gelu
-L::select(L::lt(v, L::splat(0.0f)), above, 1.0f - above)
+L::select(L::lt(v, L::splat(0.0f)), 1.0f - (1.0f - above), 1.0f - above)
# slope of an activation without its cubic term | test_llama_ops.py::test_gradients_of_an_activation
-L::fma(3.0f * f.b, square, f.a)
+L::fma(f.b, square, f.a)
# gradient of a norm by 1 + weight without the 1 | test_llama_ops.py::test_gradients_of_a_norm
-L::splat(plus_one ? 1.0f : 0.0f)
+L::splat(0.0f)
@ cpu csrc/cpu/llama_ops.cpp cpu/llama_ops.cpp
# quick_gelu's number for gelu_tanh's | test_llama_ops.py::test_an_activation_rounds_once
-return {false, 1.702f, 0.0f};
+return {false, a, 0.0f};
""")
