"""Conversations of several turns: masks, advantages, rewards and weights, by enumeration and by plain loops."""

import itertools
import math

import pytest
import torch

from rlhf_engine.algorithms import grpo, ppo, rloo
from rlhf_engine.algorithms.base import Experience
from rlhf_engine.algorithms.policy_gradient import policy_gradient_loss
from rlhf_engine.algorithms.sequences import importance_weights, of_turns, turn_advantages, turn_sums, weight_metrics
from rlhf_engine.config.algorithm import AlgorithmOptions
from rlhf_engine.hydra import PackedBatch
from tests.algorithms.tabular import TabularModel

CALL, GIVEN, EXACT = 1, [7, 8], 1e-12


def conversation(answer):
    """Tokens behind the prompt, and turns: after each CALL that is not the last token a result is given."""
    tokens, turns, first = [], [], 1
    for i, token in enumerate(answer):
        tokens.append(token)
        if i + 1 == len(answer) or token == CALL:
            turns.append((first, 1 + len(tokens)))
            if i + 1 < len(answer):
                tokens += GIVEN
                first = 1 + len(tokens)
    return tokens, tuple(turns)


def talk_batch(model, places):
    parts = [conversation(model.answers[i]) for i in places]
    return PackedBatch.from_lists([[1]] * len(parts), [t for t, _ in parts], turns=[spans for _, spans in parts])


def earned(model, places, batch):
    """A reward of its own for each turn, at its last token, by what was drawn so far."""
    rewards_M, at = torch.zeros(batch.n_completion_tokens, dtype=torch.float64), 0
    for place, spans in zip(places, batch.turns, strict=True):
        n = 0
        for first, end in spans:
            n += end - first
            rewards_M[at + n - 1] = sum(math.sin(3 * token + i) for i, token in enumerate(model.answers[place][:n]))
        at += n
    return rewards_M


def test_given_tokens_are_none_of_the_drawn_ones():
    model = TabularModel()
    places = list(range(len(model.answers)))
    batch, plain = talk_batch(model, places), model.batch(places)
    assert batch.n_tokens > plain.n_tokens
    assert batch.targets_M.tolist() == plain.targets_M.tolist()
    assert batch.completion_lens == plain.completion_lens
    assert all(
        batch.tokens_T[row + 1] == token for row, token in zip(batch.predict_rows_M, batch.targets_M, strict=True)
    )
    several = [i for i in places if len(batch.turns[i]) > 1]
    assert several
    assert max(batch.turn_of_M).item() == max(map(len, batch.turns)) - 1
    part = batch.select([several[0], 0])
    assert part.turns == (batch.turns[several[0]], batch.turns[0])
    assert PackedBatch.concat([part, plain.select([1])]).turns[2] == ((1, 1 + plain.completion_lens[1]),)
    padded = torch.nn.utils.rnn.pad_sequence(
        batch.tokens_T.split(list(batch.lengths)), batch_first=True, padding_value=-1
    )
    drawn = torch.zeros_like(padded, dtype=torch.bool)
    for i, spans in enumerate(batch.turns):
        for first, end in spans:
            drawn[i, first:end] = True
    again = PackedBatch.from_padded(padded, padded >= 0, batch.prompt_lens, drawn=drawn)
    for i, spans in enumerate(again.turns):  # turns without anything between them are one
        assert set(itertools.chain(*(range(*s) for s in spans))) == set(
            itertools.chain(*(range(*s) for s in batch.turns[i]))
        )
    assert again.targets_M.tolist() == batch.targets_M.tolist()


@pytest.mark.parametrize("turns", [((0, 2),), ((2, 2),), ((1, 9),), ((3, 4), (1, 2))])
def test_turns_outside_of_the_answer_are_refused(turns):
    with pytest.raises(ValueError, match=r"turns\[0\]: expected spans of positions 1 to 4 in order"):
        PackedBatch.from_lists([[1]], [[2, 3, 4]], turns=[turns])


@pytest.mark.parametrize("draws", [2, 3])
def test_turn_level_rloo_is_unbiased(draws):
    """Also where an answer is alone with a turn."""
    model = TabularModel()

    def loss(places):
        batch = talk_batch(model, places)
        groups_N = torch.zeros(len(places), dtype=torch.int64)
        gains_M = turn_advantages(earned(model, places, batch), groups_N, batch, rloo.leave_one_out)
        return policy_gradient_loss(model.logprobs_M(places), gains_M, batch, n_answers=len(places))

    every = list(range(len(model.answers)))
    totals_NK, _ = turn_sums(earned(model, every, talk_batch(model, every)), talk_batch(model, every))
    exact = -model.gradient(model.objective(totals_NK.sum(1), 0.0))
    found = model.expected_gradient(loss, draws=draws)
    assert float((found - exact).abs().max() / exact.abs().max()) < EXACT


def loops(model, places, groups, rewards_M, batch, advantage):
    """Advantages of turns by plain loops."""
    rewards, cu = rewards_M.tolist(), batch.completion_cu
    to_go = []
    for i, spans in enumerate(batch.turns):
        ends = list(itertools.accumulate((end - first for first, end in spans), initial=cu[i]))
        to_go.append([math.fsum(rewards[at : cu[i + 1]]) for at in ends[:-1]])
    found = []
    for i, spans in enumerate(batch.turns):
        for k, (first, end) in enumerate(spans):
            others = [j for j in range(len(places)) if groups[j] == groups[i] and len(to_go[j]) > k]
            own = k if len(others) > 1 else 0
            among = others if len(others) > 1 else [j for j in range(len(places)) if groups[j] == groups[i]]
            found += [advantage(to_go[i][own], [to_go[j][own] for j in among if j != i])] * (end - first)
    return found


def scaled(own, others):
    mean = (own + sum(others)) / (len(others) + 1)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in [own, *others]) / len(others))
    return (own - mean) / (deviation + 1e-4)


def experience_of(model, places, groups):
    batch = talk_batch(model, places)
    turn_rewards_M = earned(model, places, batch)
    scores_N = turn_sums(turn_rewards_M, batch)[0].sum(1) + model.rewards_N[places]
    logprobs_M = model.logprobs_M(places).detach()
    return Experience(
        batch=batch, old_logprobs_M=logprobs_M, ref_logprobs_M=model.ref_logprobs_M(places),
        values_M=model.values_M(places), groups_N=torch.tensor(groups), scores_N=scores_N,
        kl_M=logprobs_M - model.ref_logprobs_M(places), turn_rewards_M=turn_rewards_M,
    )  # fmt: skip


def by_hand(experience, model, places, beta):
    """Rewards of tokens: of turns at their ends, of the answer at the last token, less the KL."""
    rewards_M = experience.turn_rewards_M - beta * experience.kl_M
    for i, place in enumerate(places):
        rewards_M[experience.batch.completion_cu[i + 1] - 1] += model.rewards_N[place]
    return rewards_M


PLACES, IN_GROUPS = [0, 3, 5, 8, 10, 2, 9, 12], [0, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("level", ["trajectory", "turn"])
def test_grpo_and_rloo_of_conversations_by_loops(level):
    model = TabularModel()
    experience = experience_of(model, PLACES, IN_GROUPS)
    batch = experience.batch
    options = {"num_generations": 4, "advantage_level": level, "beta": 0.3}
    found = grpo.Grpo(AlgorithmOptions(algorithm="grpo", **options)).prepare(experience)[0].advantages_M
    rewards_M = by_hand(experience, model, PLACES, 0.0)
    expected = loops(model, PLACES, IN_GROUPS, rewards_M, batch, scaled)
    whole = [expected[cu] for cu in batch.completion_cu[:-1]]
    if level == "trajectory":
        expected = [whole[i] for i in batch.sequence_of_M]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=EXACT, atol=EXACT)
    assert level == "trajectory" or expected != [whole[i] for i in batch.sequence_of_M]
    plain = rloo.Rloo(AlgorithmOptions(algorithm="rloo", loss_type="vanilla", **options))
    found = plain.prepare(experience)[0].advantages_M
    rewards_M = by_hand(experience, model, PLACES, 0.3)
    expected = loops(model, PLACES, IN_GROUPS, rewards_M, batch, lambda own, others: own - sum(others) / len(others))
    if level == "trajectory":
        whole = [expected[cu] for cu in batch.completion_cu[:-1]]
        expected = [whole[i] for i in batch.sequence_of_M]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=EXACT, atol=EXACT)


def test_advantages_of_ppo_run_over_drawn_tokens_across_turns():
    model, beta, gamma, lam = TabularModel(), 0.3, 0.9, 0.8
    experience = experience_of(model, PLACES, IN_GROUPS)
    options = AlgorithmOptions(algorithm="ppo", beta=beta, gamma=gamma, lam=lam)
    prepared, _ = ppo.Ppo(options).prepare(experience)
    rewards, values = by_hand(experience, model, PLACES, beta).tolist(), experience.values_M.tolist()
    expected = [0.0] * len(rewards)
    for begin, end in itertools.pairwise(experience.batch.completion_cu):
        after = 0.0
        for t in reversed(range(begin, end)):
            delta = rewards[t] + gamma * (values[t + 1] if t + 1 < end else 0.0) - values[t]
            expected[t] = after = delta + gamma * lam * after
    exact = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(prepared.advantages_M, exact, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(prepared.returns_M, exact + experience.values_M, rtol=EXACT, atol=EXACT)
    some = [4, 1]
    rows_M = experience.batch.select_completion_rows(some)
    assert experience.select(some).turn_rewards_M.equal(experience.turn_rewards_M[rows_M])


def test_weights_of_turns_are_products_over_each():
    model = TabularModel()
    batch = talk_batch(model, PLACES)
    ratio_M = 0.3 * torch.randn(
        batch.n_completion_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    found = importance_weights(ratio_M, batch, mode="turn_truncate", clip_max=1.1)
    logs, expected, at = ratio_M.tolist(), [], 0
    turns = []
    for spans in batch.turns:
        for first, end in spans:
            n = end - first
            turns.append(min(1.1, math.exp(math.fsum(logs[at : at + n]))))
            expected += [turns[-1]] * n
            at += n
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=EXACT, atol=EXACT)
    sums_NK, there_NK = turn_sums(ratio_M, batch)
    assert of_turns(sums_NK, batch).shape == ratio_M.shape
    assert int(there_NK.sum()) == len(turns)
    metrics = weight_metrics(ratio_M, batch, mode="turn_truncate", clip_max=1.1)
    assert metrics["importance_weight_mean"] == pytest.approx(sum(turns) / len(turns), abs=EXACT)
    whole = PackedBatch.from_lists([[1]] * 2, [[2, 3], [4]])  # without turns each answer is one
    x_M = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)
    both = [importance_weights(x_M, whole, mode=mode, clip_max=9.0) for mode in ("turn_truncate", "sequence_truncate")]
    assert both[0].equal(both[1])
