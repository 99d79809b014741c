"""Conversations go over as JSON and come back the same; those that end or break off leave nothing behind."""

import dataclasses
import gc
import itertools
import json
import threading

import pytest
import torch
from rlhf_kernels.runtime import registry

from rlhf_engine.errors import RewardError
from rlhf_engine.generators.work import join, pack_rollout, put_together, take_apart, unpack_rollout
from rlhf_engine.rollout import Rollout, SamplingConfig
from rlhf_engine.rollout.engine import RolloutEngine
from rlhf_engine.rollout.generate import LocalRollouts
from tests.conftest import randomise
from tests.conversations.chatter import Chatter, asked, look
from tests.conversations.test_exact_talks import HOW, make_policies
from tests.serve.test_kills import resident


class Room:
    """An environment that adds to the prompt, and pays."""

    def reset(self, **row) -> str:
        """Begin."""
        self.turns = 0
        return " Where am I?"

    def look(self, n: int) -> str:
        """Look around.

        Args:
            n: Letters of what is seen.
        """
        return look(n)

    def get_turn_reward(self) -> float:
        """More for each."""
        self.turns += 1
        return self.turns / 3

    def get_reward(self) -> float | None:
        """Some have none."""
        return None if self.turns % 2 else 1.0


def rollout_of(model, host: Chatter, *, seed: int = 0, prompts: int = 2, look=None, **sampling) -> Rollout:
    rollouts = LocalRollouts(model, role="actor", conversations=host)
    rollouts.look = look or rollouts.look
    return rollouts.generate(asked(prompts, 2, seed=seed), SamplingConfig(**{**HOW, "seed": seed, **sampling}))


def same(found: Rollout, expected: Rollout) -> bool:
    """Whether two rollouts are equal in all but their times."""
    a, b = (take_apart(dataclasses.replace(rollout, stats=expected.stats)) for rollout in (found, expected))
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


def test_they_go_over_and_come_back():
    with registry.use_exact():
        model = make_policies(torch.float32)
        for sampling in ({}, {"top_p": 0.9}):
            drawn = rollout_of(model, Chatter(make=Room, tools=()), **sampling)
            assert any(talk.turn_rewards for talk in drawn.talks)
            assert {type(talk.reward) for talk in drawn.talks} == {float, type(None)}
            plain, tensors = take_apart(drawn)
            back = put_together(json.loads(json.dumps(plain)), tensors)
            assert same(back, drawn)
            assert (back.talks, back.batch.turns) == (drawn.talks, drawn.batch.turns)
            assert same(unpack_rollout(json_of(pack_rollout(drawn))), drawn)
            parts = [drawn.select([i]) for i in range(4)]
            assert same(join(parts), drawn)
            turned = drawn.select([3, 1])
            assert same(turned, join([parts[3], parts[1]]))
            assert turned.talks == (drawn.talks[3], drawn.talks[1])
            for i, part in enumerate(parts):
                mine = slice(*drawn.batch.completion_cu[i : i + 2])
                assert torch.equal(part.batch.targets_M, drawn.batch.targets_M[mine])
                assert torch.equal(part.batch.turn_of_M, drawn.batch.turn_of_M[mine])
                spans = [end - first for first, end in part.batch.turns[0]]
                assert len(spans) == len(part.talks[0].turn_rewards)
                assert spans == part.batch.turn_of_M.bincount().tolist()


def json_of(values: dict) -> dict:
    """Values as they come out of JSON; the bytes of tensors go beside it."""
    tensors = values.pop("tensors")
    return {**json.loads(json.dumps(values)), "tensors": tensors}


def test_new_weights_between_two_turns_are_those_that_draw():
    """What older weights have written of the conversation is not gone on from."""
    with registry.use_exact():
        model, written = make_policies(torch.float32), list[int]()
        slot = model.backbone().slot("actor")
        policies = [{name: p.detach().clone() for name, p in slot.named_parameters()}]
        for seed in range(8):
            randomise(model, "actor", seed=seed)
            policies.append({name: p.detach().clone() for name, p in slot.named_parameters()})
        host = Chatter()
        parse, turns = host.parse, itertools.count(1)
        host.parse = lambda *given, **named: (state.update(turn=next(turns)), parse(*given, **named))[1]

        def write() -> None:
            written.append(state["turn"])
            slot.load_state_dict(policies[state["turn"]])

        def newest():
            turn = state["turn"]
            return turn, None if written and written[-1] == turn else write

        longest = 0
        for seed in range(6):
            state, turns = {"turn": 0}, itertools.count(1)
            written.clear()
            rollouts = LocalRollouts(model, role="actor", conversations=host)
            rollouts.look = newest
            one = asked(1, 1, seed=seed)
            drawn = rollouts.generate(one, SamplingConfig(**{**HOW, "seed": seed}))
            assert drawn.versions_M.tolist() == drawn.batch.turn_of_M.tolist()
            for turn in range(len(drawn.batch.turns[0])):
                slot.load_state_dict(policies[turn])
                scored = model.score(drawn.batch, ("actor",), temperature=HOW["temperature"]).logprobs_M
                mine = drawn.batch.turn_of_M == turn
                assert not (scored != drawn.logprobs_M)[mine].any()
            longest = max(longest, turn)
        assert longest >= 3


@pytest.mark.parametrize("rollouts", [4, pytest.param(200, marks=pytest.mark.long)])
def test_nothing_stays(rollouts):
    model, host, threads = make_policies(torch.float32), Chatter(), threading.active_count()
    held = 0
    for i in range(rollouts):
        rollout_of(model, host, seed=i, prompts=1 + i % 3, max_completion_length=100)
        engine = RolloutEngine.of(model)
        assert engine.finished
        assert engine.cache_use()[0] == 0
        assert not engine.cache.keys
        assert not engine._admission.kept
        if i == rollouts // 4:
            gc.collect()
            held = resident()
    gc.collect()
    if rollouts > 100:
        assert resident() - held < 8 << 20
    assert threading.active_count() <= threads + 1


def test_what_breaks_off_leaves_a_model_that_draws():
    class Stops(Exception):
        """What ends a rollout from outside."""

    def interrupted(n: int) -> str:
        """Look.

        Args:
            n: any
        """
        if next(calls) == 5:
            raise KeyboardInterrupt
        return look(n)

    interrupted.__name__ = "look"

    class Broken(Room):
        def reset(self, **row) -> str:
            """Begin, but the third."""
            if next(calls) == 2:
                raise OSError("no room")
            return super().reset(**row)

    def stopping():
        if next(calls) == 20:
            raise Stops
        return 0, None

    with registry.use_exact():
        model = make_policies(torch.float32)
        expected = rollout_of(model, Chatter())
        for error, given in (
            (KeyboardInterrupt, {"host": Chatter(tools=[interrupted])}),
            (RewardError, {"host": Chatter(make=Broken, tools=())}),
            (Stops, {"host": Chatter(), "look": stopping}),
        ):
            calls = itertools.count()
            with pytest.raises(error):
                rollout_of(model, **given)
            assert same(rollout_of(model, Chatter()), expected)
            assert RolloutEngine.of(model).cache_use()[0] == 0
