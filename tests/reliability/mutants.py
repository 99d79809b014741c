"""The seeded faults of `test_engine_mutants.py`: what to change where in rlhf_engine, and the tests that see it.

`read` takes them from lines of four kinds: `@ the file`; `= tests, as pytest names them below tests/`, of the mutants
that follow; `the old text ⇒ the new one`; and the same on two lines where one is too short. `¶` stands for a line's
end with the next one's indentation.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Mutant(NamedTuple):
    """One seeded fault."""

    path: str  # below rlhf_engine
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}: {self.old} ⇒ {self.new}"

    def applied(self, source: str) -> str:
        """A source with the fault.

        Args:
            source: text of the file.

        Returns:
            The text in which the new text stands in place of the old one.

        Raises:
            ValueError: the old text does not stand there exactly once.
        """
        found = list(re.finditer(re.escape(self.old).replace("¶", r"(\n *)"), source))
        if len(found) != 1:
            raise ValueError(f"{self}: expected its text once, got it {len(found)} times; quote the code as it is now")
        ends = iter(found[0].groups())
        new = "".join(next(ends, "\n") if part == "¶" else part for part in re.split("(¶)", self.new))
        return source[: found[0].start()] + new + source[found[0].end() :]


def read(text: str) -> list[Mutant]:
    """The mutants of a text."""
    mutants, path, tests = list[Mutant](), "", tuple[str, ...]()
    for line in filter(None, text.replace(" ⇒\n", " ⇒ ").split("\n")):
        if line.startswith("@ "):
            path = line[2:]
        elif line.startswith("= "):
            tests = tuple(f"tests/{test}" for test in line[2:].split())
        else:
            old, _, new = line.partition(" ⇒ ")
            mutants.append(Mutant(path, old, new, tests))
    return mutants


MUTANTS = read(r"""
@ algorithms/base.py
= algorithms/test_turns.py::test_advantages_of_ppo_run_over_drawn_tokens_across_turns
(self.scores_N - sequence_sums(turns_M, self.batch)) ⇒ (self.scores_N)
picked[name] = values_M[rows_M] ⇒ picked[name] = values_M[: len(rows_M)]
= algorithms/test_cispo.py::test_scores_reach_the_loss_of_every_pair
scores_N=self.scores_N[at_N], ⇒ scores_N=self.scores_N[at_N.sort().values],
if self.options.whitens_advantages: ⇒ if not self.options.whitens_advantages:
@ algorithms/ppo.py
= training/test_algorithm_numbers.py::test_values_are_taught_the_returns_of_each_algorithm
rewards = -beta * kl_M ⇒ rewards = beta * kl_M
index_add(0, batch.last_completion_rows_N, scores_N ⇒
index_add(0, (batch.last_completion_rows_N - 1).clamp(min=0), scores_N
= algorithms/test_turns.py::test_advantages_of_ppo_run_over_drawn_tokens_across_turns
mask_NC, gamma=gamma, lam=lam) ⇒ mask_NC, gamma=lam, lam=gamma)
experience.rewards_M - options.beta * experience.kl_M ⇒ experience.rewards_M
= integrations/test_trl_options.py::test_ppo_has_the_policy_loss_of_grpo_trainer[changes1]
clip_low=options.clip_low,¶clip_high=options.clip_high, ⇒ clip_low=options.clip_high,¶clip_high=options.clip_low,
dual_clip=options.delta, ⇒ dual_clip=None,
= algorithms/test_ppo.py::test_the_share_of_the_value_loss_is_that_of_gradients_at_the_hidden_states
Term(value, options.vf_coef) ⇒ Term(value, 1.0)
value / (value + policy) if ⇒ policy / (value + policy) if
@ algorithms/grpo.py
= algorithms/test_algorithms.py::test_grpo_clips_tokens_and_adds_the_kl[dr_grpo-weights1]
ref_logprob_M=micro.ref_logprobs_M, ⇒ ref_logprob_M=micro.old_logprobs_M,
kl_coef=self.options.beta, ⇒ kl_coef=0.0,
self.max_completion_length / micro.n_tokens ⇒ self.max_completion_length / micro.n_answers
1 / max_completion_length, device ⇒ 1 / max(batch.completion_lens), device
@ algorithms/rloo.py
= algorithms/test_algorithms.py::test_rloo_advantages
scores_N - beta * sequence_sums(kl_M, batch) ⇒ scores_N + beta * sequence_sums(kl_M, batch)
(group_sums(returns_N, groups_N) - returns_N) / others_N ⇒ group_sums(returns_N, groups_N) / others_N
= algorithms/test_algorithms.py::test_proximal_rloo_clips_the_ratio_of_the_whole_answer
torch.maximum(plain_N, clipped_N) ⇒ torch.minimum(plain_N, clipped_N)
sequence_sums(logprobs_M - old_logprobs_M, batch).exp() ⇒
(sequence_sums(logprobs_M - old_logprobs_M, batch) / batch.completion_lens_N).exp()
@ algorithms/remax.py
= training/test_algorithm_numbers.py::test_what_is_learned_from_given_numbers
gain_N = scores_N - greedy_scores_N ⇒ gain_N = scores_N - greedy_scores_N.mean()
gain_N.clamp(-clip, clip) ⇒ gain_N.clamp(max=clip)
= algorithms/test_enumeration.py::test_remax_is_unbiased[1]
return gain_M - kl_penalty ⇒ return gain_M + kl_penalty
@ algorithms/reinforce.py
= algorithms/test_enumeration.py::test_perls_optimum_is_the_tilted_anchor[1]
(1 - beta) * scores_N ⇒ scores_N
= training/test_algorithm_numbers.py::test_what_is_learned_from_given_numbers
advantages_M=returns_M - experience.values_M ⇒ advantages_M=returns_M
@ algorithms/best_of_n.py
= algorithms/test_algorithms.py::test_the_best_of_n
scores[i] > scores[chosen[group]] ⇒ scores[i] < scores[chosen[group]]
= training/test_algorithm_numbers.py::test_what_is_learned_from_given_numbers
(logprobs_M * micro.mask_M).sum() / micro.n_tokens ⇒ (logprobs_M * micro.mask_M).sum() / micro.n_answers
@ algorithms/cispo.py
= algorithms/test_cispo.py::test_a_weight_is_the_ratio_up_to_a_bound_and_no_token_loses_its_gradient
(logprobs_M.detach() - micro.old_logprobs_M) ⇒ (logprobs_M - micro.old_logprobs_M)
(ratio_M.clamp(max=bound) * micro ⇒ (ratio_M * micro
@ algorithms/copg.py
= algorithms/test_cispo.py::test_scores_reach_the_loss_of_every_pair
-0.5 * gap_P ⇒ -1.0 * gap_P
(logprobs_M.detach() - ref_logprobs_M, batch) ⇒ (logprobs_M - ref_logprobs_M, batch)
@ algorithms/online_dpo.py
= algorithms/test_algorithms.py::test_best_and_worst_leave_ties_out
scores_N[best] > scores_N[worst] ⇒ scores_N[best] >= scores_N[worst]
= training/test_algorithm_numbers.py::test_what_is_learned_from_given_numbers
n_pairs=micro.n_answers / 2, ⇒ n_pairs=micro.n_answers,
= algorithms/test_algorithms.py::test_dpo_by_hand
h_P - 1 / (2 * beta) ⇒ h_P - 1 / beta
@ algorithms/policy_gradient.py
= training/test_algorithm_numbers.py::test_what_is_learned_from_given_numbers
spread(batch.completion_lens_N - 1, batch) ⇒ spread(batch.completion_lens_N, batch)
loss + self.kl_coef * kl, kl.detach() ⇒ loss - self.kl_coef * kl, kl.detach()
= algorithms/test_enumeration.py::test_remax_is_unbiased[1]
-weighted_M.sum() / n_answers ⇒ -weighted_M.mean()
@ algorithms/sequences.py
= algorithms/test_turns.py::test_grpo_and_rloo_of_conversations_by_loops[turn]
sums_NK.flip(1).cumsum(1).flip(1) ⇒ sums_NK.cumsum(1)
= algorithms/test_ppo.py::test_metrics_by_hand
return log_weight_M.exp().clamp(max=clip_max) ⇒ return log_weight_M.exp()
(len(weights) * weights.square().sum()) ⇒ weights.square().sum()
= algorithms/test_turns.py::test_turn_level_rloo_is_unbiased[2]
group_sums(is_there_NK[:, k].float(), groups_N) > 1 ⇒ group_sums(is_there_NK[:, k].float(), groups_N) > 0
@ scoring/experience.py
= training/test_algorithm_numbers.py::test_prompts_without_enough_rewards_are_left_out
counts[g] >= least and g not in spoiled ⇒ counts[g] > 0 and g not in spoiled
= training/test_algorithm_numbers.py::test_answers_of_an_older_policy_are_weighed_by_the_ratio_to_it
made.weights_M * weights_M ⇒ weights_M
experience.before_logprobs_M - past_logprobs_M ⇒ past_logprobs_M - experience.before_logprobs_M
return replace(made, old_logprobs_M=past_logprobs_M) ⇒ return made
@ scoring/rewards.py
= scoring/test_reward_functions.py::test_weighted_sums_leave_none_out
math.fsum(present) if present else None ⇒ math.fsum(present)
[w * r for w, r in zip(weights, row ⇒ [r for w, r in zip(weights, row
= scoring/test_reward_functions.py::test_settings_of_torch_are_put_back
with settings_kept(f"reward function {name!r}"), time_limit(timeout): ⇒ with time_limit(timeout):
= scoring/test_reward_functions.py::test_conversations_come_as_messages
[dict(message) for message in p] for p in prompts] ⇒ list(p) for p in prompts]
= scoring/test_reward_functions.py::test_a_function_cannot_harm_the_next
"completion_ids": list(completion_ids), ⇒ "completion_ids": completion_ids,
= scoring/test_reward_functions.py::test_two_functions_of_one_name_keep_two_metrics
while name in names: ⇒ if name in names:
@ hydra/gate.py
= hydra/test_gate.py::test_a_new_pair_lies_around_zero_and_no_copy_changes_its_scale
self.alpha / math.sqrt(self.r) if self.use_rslora else self.alpha / self.r ⇒ self.alpha / self.r
(2 * draw - 1) * bound ⇒ draw * bound
self.requires_grad_(trainable) ⇒ pass
if (self.config.r, self.config.scale) != (other.config.r, other.config.scale): ⇒ if self.config.r != other.config.r:
= hydra/test_gate.py::test_two_threads_on_different_slots_at_once
_local = threading.local() ⇒ _local = type("Local", (), {})()
@ hydra/batch.py
= algorithms/test_turns.py::test_given_tokens_are_none_of_the_drawn_ones
torch.arange(at + first - 1, at + end - 1) ⇒ torch.arange(at + first - 1, at + end - 1).flip(0)
turns=None if self.turns is None else tuple(map(self.turns.__getitem__, indices)), ⇒
turns=None if self.turns is None else self.turns[: len(indices)],
= hydra/test_shared_prompts.py::test_rows_of_a_batch_with_each_prompt_once
add(self.cu_seqlens[i] + p, self.cu_seqlens[i + 1], prompt) ⇒
add(self.cu_seqlens[i] + p, self.cu_seqlens[i + 1], -1)
= tuple(map(self.prompts_N.__getitem__, indices)) ⇒ = self.prompts_N[: len(indices)]
@ hydra/optimizer.py
= hydra/test_optimizer.py::test_lr_factor_shapes
return (step + 1) / warmup_steps ⇒ return step / warmup_steps
(1 + math.cos( ⇒ (1 - math.cos(
max(1, total_steps - warmup_steps) ⇒ max(1, total_steps)
= hydra/test_optimizer.py::test_each_role_moves_at_its_own_scaled_rate
self.learning_rates[role] * factor ⇒ self.learning_rates[role]
self._inner.zero_grad(set_to_none=True) ⇒ pass
@ hydra/outputs.py
= training/test_sft.py::test_margins_and_pairs_of_the_same_answer_are_those_of_reward
gap_P - self.margin_P ⇒ gap_P + self.margin_P
= hydra/test_supports.py::test_every_output_and_gradient_is_over_the_support[whole1-targets1-200]
loss = loss - self.entropy_coef ⇒ loss = loss + self.entropy_coef
= policy/test_policies.py::test_targets_and_top_words_are_those_of_the_whole_distribution
top.values - z.logsumexp(-1, keepdim=True) ⇒ top.values - z.amax(-1, keepdim=True)
None if weights is None else -(weights * logprob).sum() ⇒ None if weights is None else -logprob.sum()
@ hydra/model.py
= algorithms/test_ppo.py::test_the_share_of_the_value_loss_is_that_of_gradients_at_the_hidden_states
hidden[name] = states.view_as(states) ⇒ hidden[name] = states
= rollout/test_truncation.py::test_in_exact_mode_scoring_has_the_bits_of_the_rollout[filters4-native-dtype4]
LogprobPair(temperature=temperature) ⇒ LogprobPair()
= hydra/test_shared_prompts.py::test_budgets_count_a_prompt_once
with torch.no_grad():¶for part in self.parts(batch, token_budget): ⇒
with torch.enable_grad():¶for part in self.parts(batch, token_budget):
= hydra/test_build.py::test_a_critic_that_starts_as_the_actor_has_its_adapter[hydra_ppo]
slot.copy_from(backbone.slot(origin)) ⇒ pass
@ hydra/attention.py
= rollout/test_generate.py::test_blocks_go_round
self._holders[block] -= 1¶if self._holders[block] == 0: ⇒ self._holders[block] -= 1¶if True:
= rollout/test_engine.py::test_a_turn_costs_its_own_tokens[native]
layers[layer][: len(old)] = old ⇒ pass
= rollout/test_engine.py::test_a_prompt_that_older_weights_have_read_goes_through_the_model_again[native]
x[list(targets)] = x[list(sources)] ⇒ x[list(sources)] = x[list(targets)]
= rollout/test_generate.py::test_tokens_lie_where_the_table_says
torch.cat(positions) % cache.block ⇒ (torch.cat(positions) + 1) % cache.block
@ hydra/backbone.py
= hydra/test_shared_prompts.py::test_in_exact_mode_scores_have_the_bits_of_copies[torch.bfloat16]
[p if p < 0 else p + before for p in own] ⇒ list(own)
= hydra/test_gate.py::test_checkpointed_gradients_equal_plain_ones[False-0.0]
context_fn": gate.checkpoint_contexts} ⇒ context_fn": torch.utils.checkpoint.noop_context_fn}
@ hydra/modules.py
= hydra/test_architectures.py::test_lora_on_the_head_acts_on_the_head_only[llama]
HeadLora(pair.A, pair.B, slot.config.scale) ⇒ HeadLora(pair.A, pair.B, 1.0)
@ training/update.py
= algorithms/test_ppo.py::test_minibatches_partition
[order[a:b] for a, b in itertools.pairwise(bounds)] ⇒ [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
= training/test_rl.py::test_a_tokenizer_without_a_padding_token_is_fine
if epoch == 0 and number == 0: ⇒ if epoch == 0:
= algorithms/test_ppo.py::test_the_share_of_the_value_loss_is_that_of_gradients_at_the_hidden_states
term.weight * out.loss ⇒ out.loss
@ training/run.py
= training/test_sft.py::test_a_model_that_cannot_be_written_leaves_a_checkpoint
self.optimizer.is_whole = True ⇒ pass
= training/test_sft.py::test_a_loss_that_is_not_finite_stops_and_writes_no_model[True-reward_loss]
stack.enter_context(locked(self.output)) ⇒ pass
@ training/rl.py
= training/test_resume.py::test_other_rewards_have_a_best_evaluation_of_their_own
best = (None, None) ⇒ pass
@ training/sft.py
= training/test_sft.py::test_margins_and_pairs_of_the_same_answer_are_those_of_reward
lm_loss + gamma * reward.loss ⇒ lm_loss + reward.loss
@ training/reward_metrics.py
= training/test_reward_metrics.py::test_auc_is_the_share_of_ordered_pairs
below_RG + zeros_RG / 2 ⇒ below_RG + zeros_RG
= training/test_reward_metrics.py::test_pairwise_metrics_together
right_P = (m_P > 0).double() + 0.5 * (m_P == 0).double() ⇒ right_P = (m_P > 0).double()
center * (r_w + r_l) ⇒ center * (r_w - r_l)
= training/test_reward_metrics.py::test_pointwise_metrics_together[4.0]
r_N - math.log(pos_weight) ⇒ r_N + math.log(pos_weight)
@ runs/checkpoint.py
= runs/test_checkpoint.py::test_a_crash_while_writing_leaves_the_last_checkpoint
checkpoints[-keep:] ⇒ checkpoints[:keep]
= runs/test_checkpoint.py::test_only_the_newest_are_kept_in_order_of_steps
key=lambda p: int(p.name.rpartition("-")[2]) ⇒ key=lambda p: p.name
= runs/test_checkpoint.py::test_a_folder_that_is_no_checkpoint[rlhf_engine.json]
write_manifest(folder) ⇒ pass
= training/test_contract.py::test_every_method_and_algorithm_goes_on_with_the_same_floats[online_dpo]
was_exact = given["exact"] ⇒ pass
@ runs/metrics.py
= runs/test_shown.py::test_a_full_disk_costs_the_picture_alone
os.fsync(file.fileno())¶os.replace(beside, path) ⇒ pass¶os.replace(beside, path)
@ runs/folder.py
= runs/test_page_live.py::test_report_sees_whether_a_run_goes_on_there
_lock(lock.fileno(), fcntl.LOCK_EX, output) ⇒ _lock(lock.fileno(), fcntl.LOCK_SH, output)
@ runs/statistics.py
= runs/test_statistics.py::test_runs_are_few_and_their_interval_is_student_s
t.ppf(0.975, n - 1) ⇒ t.ppf(0.975, n)
= runs/test_statistics.py::test_best_of_n_is_the_mean_over_all_sets
math.log(n) - (n - 1) / n ⇒ math.log(n)
math.comb(i, n - 1) / math.comb(k, n) ⇒ math.comb(i, n - 1) / math.comb(k, n - 1)
@ io.py
= tools/test_evaluate.py::test_an_evaluation_that_was_stopped_goes_on
file.truncate(whole) ⇒ pass
= tools/test_evaluate.py::test_a_changed_line_is_refused
values.pop("digest", None) == json_digest(values, 16) ⇒ values.pop("digest", None) is not None
@ rollout/rows.py
= rollout/test_engine.py::test_weights_that_torch_counts_no_writes_of_leave_no_block_behind[transformers]
if self._read_by.get(slot, now) != now: ⇒ if False:
hashlib.sha256(before + array("q", tokens).tobytes()) ⇒ hashlib.sha256(array("q", tokens).tobytes())
popitem(last=False) ⇒ popitem(last=True)
= rollout/test_engine.py::test_a_prompt_that_older_weights_have_read_goes_through_the_model_again[native]
elif prefix is not None and held > full: ⇒ elif False:
blocks[:held]¶self.pool.share(blocks[:held]) ⇒ blocks[:held]
= rollout/test_truncation.py::test_rows_that_may_end_within_a_burst_have_all_words_from_then_on
< how.min_completion_length - 1 else () ⇒ < how.min_completion_length else ()
filtered[:, group.not_yet] = -torch.inf ⇒ pass
@ rollout/decoding.py
= rollout/test_engine.py::test_turns_that_are_known_beforehand_follow_each_other[native]
torch.arange(prompt.cached, len(prompt.prompt)) ⇒ torch.arange(len(prompt.prompt) - prompt.cached)
= rollout/test_truncation.py::test_rows_that_may_end_within_a_burst_have_all_words_from_then_on
slots += [self._numbers[prompt.slot]] * n ⇒ slots += [-1] * n
@ rollout/engine.py
= rollout/test_engine.py::test_a_fixed_conversation_keeps_its_weights_to_its_end[False]
"length" if len(row.tokens) >= row.sampling.max_completion_length else None ⇒
"length" if len(row.tokens) > row.sampling.max_completion_length - 2 else None
if write is not None and any(row.holds ⇒ if False and any(row.holds
row.versions.append(version) ⇒ row.versions.append(0)
turn.tokens, turn.logprobs, turn.supports, turn.versions = [], [], [], [] ⇒
turn.tokens, turn.logprobs, turn.supports, turn.versions = [], [], [], row.versions
= rollout/test_engine.py::test_weights_that_torch_counts_no_writes_of_leave_no_block_behind[transformers]
self._written[slot] += 1 ⇒ pass
reads != self._reads or any( ⇒ any(
@ rollout/request.py
= rollout/test_generate.py::test_found_where_decoding_everything_finds_it
self._window = max((len(text.encode()) for text in texts), default=0) + _CONTEXT ⇒ self._window = 1
= rollout/test_generate.py::test_cut_and_what_may_still_become_a_stop_text
text[: min(places)] if places ⇒ text[: max(places)] if places
= rollout/test_engine.py::test_a_request_that_contradicts_the_run_is_refused
0 <= min(ids) <= max(ids) < vocabulary ⇒ 0 <= min(ids) <= max(ids) <= vocabulary
@ rollout/conversation.py
= conversations/test_conversation.py::test_turns_are_limited_and_an_unfinished_turn_calls_nothing
self._drawn < self.host.max_turns ⇒ self._drawn <= self.host.max_turns
= conversations/test_conversation.py::test_a_call_that_hangs_is_given_up_and_the_next_one_is_not_made
if self.environment is not None and not self._hung: ⇒ if self.environment is not None:
= conversations/test_conversation.py::test_a_result_that_no_tokenizer_takes_ends_the_conversation
or after[:n] != kept[:n]: ⇒ :
@ policy/pool.py
= policy/test_policies.py::test_what_cannot_be_served_is_refused_and_moves_nobody
or (only_idle and policy.holders): ⇒ :
if done.exception() is None: ⇒ if True:
policy.holders += 1 ⇒ pass
= policy/test_policies.py::test_forks_snapshots_and_what_comes_back_from_disk_go_on_as_if_nothing_had_been
policy.optimizer.load_state_tensors(origin.optimizer.state_tensors()) ⇒ pass
self.evicted[name] = self.save(name) ⇒ self.save(name)
replace(model.roles["actor"], trainable=False) ⇒ replace(model.roles["actor"], trainable=True)
copy.backbone().slot(slot).copy_from(model.backbone().slot(slot)) ⇒ pass
self.paused.discard(name)¶if ⇒ if
policy.waiting = None¶fill ⇒ fill
@ policy/thread.py
= serve/test_endpoints.py::test_other_endpoints_stream_and_repeat_themselves_too[/inference/v1/generate]
[row for _, row in sorted(ticket.rows.items())] ⇒ list(ticket.rows.values())
= policy/test_policies.py::test_a_policy_that_is_removed_in_flight_fails_its_own_requests_alone
if held.name in self.policies.paused: ⇒ if False:
@ generators/work.py
= generators/test_work.py::test_a_snapshot_keeps_what_the_slot_was
parameter.detach().clone() ⇒ parameter.detach()
= generators/test_work.py::test_policies_arrive_whole_or_not_at_all
(received := digest(tensors)) != sent ⇒ not (received := digest(tensors))
= generators/test_work.py::test_the_store_holds_what_it_is_told_to
if version in wanted ⇒ if version >= min(wanted)
self._held[max(self._held)] ⇒ self._held[min(self._held)]
@ generators/scheduler.py
= generators/test_scheduler.py::test_ages_by_the_rule
step - step % self.batches_per_policy - self.max_staleness ⇒
step - step % self.batches_per_policy - self.max_staleness - 1
if steps <= done) ⇒ if steps < done)
= generators/test_scheduler.py::test_a_run_that_is_taken_up_draws_by_the_policies_it_would_have_had
min(done, step) if self.newest else earliest ⇒ done
self._asked.pop(step, None) ⇒ None
@ data/split.py
= data/test_split_groups.py::test_a_larger_share_holds_out_what_a_smaller_one_does
group_fraction(row.group, seed) < share ⇒ group_fraction(row.group, seed) >= share
= data/test_split_groups.py::test_tokens_that_rows_share_count_once
node, length = beside, length - once ⇒ node = beside
room[beside] >= max(1, length - once) ⇒ room[beside] >= 1
if len(batches[node - leaves]) < max_rows ⇒ if len(batches[node - leaves]) <= max_rows
@ data/read.py
= data/test_read_rows.py::test_a_damaged_csv_names_its_line
if n > self.allowed: ⇒ if n >= self.allowed and n:
strict=True)¶names ⇒ strict=False)¶names
= data/test_forms_of_others.py::test_options_for_conversations
prompt[0]["role"] != "system" ⇒ True
**(options.chat_template_kwargs or {}), **row.template} ⇒ **row.template, **(options.chat_template_kwargs or {})}
@ data/tokenize.py
= data/test_tokenize_rows.py::test_an_answer_that_ends_already_gets_no_second_end
return ids[: last + 1] ⇒ return ids[:last]
= data/test_tokenize_rows.py::test_a_prompt_s_own_beginning_and_end
while len(ids) > 1 and added[len(ids) - 1]: ⇒ while False:
ids[n:] if ids[:n] == ids[n : 2 * n] else ids ⇒ ids
= data/test_tokenize_rows.py::test_nothing_is_cut_or_dropped_without_being_counted
if length <= max_length: ⇒ if length < max_length:
@ serve/app.py
= serve/test_protocol.py::test_a_key_is_needed_where_there_is_one_and_compared_in_constant_time
or not any(known): ⇒ or not known:
= serve/test_protocol.py::test_too_long_and_too_large
if len(raw) > self.most_body: ⇒ if len(raw) > 2 * self.most_body:
= serve/test_endpoints.py::test_health_models_metrics_status_and_the_page
200 if self.thread.is_alive else 503 ⇒ 200
@ serve/answers.py
= serve/test_endpoints.py::test_log_probs_are_those_of_transformers[tiny]
start=1) ⇒ start=0)
= serve/test_protocol.py::test_limits_answer_429_and_what_is_removed_404
item.result()  # raises ⇒ pass  # raises
@ serve/protocol.py
= serve/test_endpoints.py::test_stop_texts_end_answers_and_stay_out_of_them[tiny]
secrets.randbits(63) if seed is None else seed ⇒ secrets.randbits(63)
least + 1 if least and ends else 0 ⇒ least
= serve/test_protocol.py::test_what_is_refused_says_so_and_changes_nothing
or value in _ONLY.get(name, ()) ⇒ or name in _ONLY
= serve/test_protocol.py::test_too_long_and_too_large
if most > room or room < least_max: ⇒ if room < least_max:
@ integrations/peft.py
= integrations/test_fuse_lora.py::test_adapters_by_sample_in_evaluation_and_in_training
present.index(name) if name in present else OFF ⇒ present.index(name) if name in present else 0
= integrations/test_fuse_lora.py::test_dropout_drops_as_often_and_is_repeatable
isinstance(drop, nn.Dropout) and drop.training else ⇒ isinstance(drop, nn.Dropout) else
= integrations/test_fuse_lora.py::test_bf16[True]
[self.scaling[name] for name in names] ⇒ [1.0 for name in names]
= integrations/test_fuse_lora.py::test_several_active_adapters_add_up
passes = passes[1:] ⇒ passes = passes[:0]
""")
