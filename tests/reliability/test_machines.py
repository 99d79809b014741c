"""What must hold holds after any calls: packing, schedules, checkpoints, pairs of options, bodies of requests.

Each machine makes random calls from one number, and says what it found wrong. `RELIABILITY_SEED=n` draws others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import random
import re
import tempfile
import types
import typing
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from rlhf_engine.config import TrainConfig
from rlhf_engine.errors import ConfigError
from rlhf_engine.generators.scheduler import StalenessRule, newest_after
from rlhf_engine.hydra import PackedBatch
from rlhf_engine.hydra.optimizer import RoleOptimizer, lr_factor
from rlhf_engine.runs.checkpoint import (
    TrainerState,
    list_checkpoints,
    load_checkpoint,
    resolve_resume,
    save_checkpoint,
)
from rlhf_engine.serve.protocol import BadRequestError, Reader, parse_json
from tests.conftest import build
from tests.serve import test_protocol as http
from tests.serve.serving import CHAT, COMPLETIONS, write_base

SEED = int(os.environ.get("RELIABILITY_SEED", "0"))


def packing(dice, folder):
    """What goes in comes out, after joining, selecting and padding, in one order."""

    def lists(least):
        return [[dice.randrange(99) for _ in range(dice.choice((0, 1, 2, 5, 9)) + least)] for _ in range(n)]

    n = dice.randint(1, 5)
    prompts, answers, ids = lists(1), lists(0), [dice.randrange(2**40) for _ in range(n)]
    cuts = [sorted(dice.sample(range(len(a) + 1), min(len(a) // 2 * 2, 4))) for a in answers]
    spans = [
        tuple((len(p) + i, len(p) + j) for i, j in zip(cut[::2], cut[1::2], strict=True))
        for p, cut in zip(prompts, cuts, strict=True)
    ]
    turns = spans if dice.random() < 0.5 else None
    parts = [
        PackedBatch.from_lists(
            prompts[i:j], answers[i:j], sample_ids=ids[i:j], turns=None if turns is None else turns[i:j]
        )
        for i, j in itertools.pairwise(sorted({0, dice.randint(0, n), n}))
    ]
    order = [dice.randrange(n) for _ in range(dice.randint(1, 4))]
    whole = PackedBatch.concat(parts)
    for batch, places in ((whole, list(range(n))), (whole.select(order), order)):
        known = [
            [
                t
                for k, t in enumerate(answers[i], len(prompts[i]))
                if turns is None or any(a <= k < b for a, b in turns[i])
            ]
            for i in places
        ]
        assert [batch.prompt_tokens(k) for k in range(len(places))] == [prompts[i] for i in places]
        assert [batch.completion_tokens(k) for k in range(len(places))] == [answers[i] for i in places]
        assert batch.cu_seqlens == (0, *itertools.accumulate(len(prompts[i]) + len(answers[i]) for i in places))
        assert batch.sample_ids == tuple(ids[i] for i in places)
        assert batch.targets_M.tolist() == [token for drawn in known for token in drawn]
        assert batch.tokens_T[batch.predict_rows_M + 1].tolist() == [token for drawn in known for token in drawn]
        x = torch.randn(batch.n_completion_tokens)
        assert torch.equal(batch.unpad(batch.pad(x, math.nan)), x)
    rows = whole.select_completion_rows(order)
    assert torch.equal(whole.targets_M[rows], whole.select(order).targets_M)
    return 2 * n


def schedules(dice, folder):
    """Learning rates rise to the one that was asked for and never again; no answer is drawn too early or too old."""
    total, warmup = dice.randint(1, 40), dice.choice((0, 1, 3, 50))
    kind = dice.choice(("constant", "linear", "cosine"))
    options = {"lr_scheduler_type": kind, "warmup_steps": warmup}
    rates = [lr_factor(step, options, total) for step in range(total)]
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert warmup >= total or rates[warmup] == 1
    if dice.random() < 0.5:
        rule = StalenessRule(max_staleness=dice.randint(0, 4), newest=dice.random() < 0.5)
    else:
        rule = StalenessRule(batches_per_policy=dice.randint(1, 5))
    oldest = max(rule.max_staleness, rule.batches_per_policy - 1)
    drawn, known = {}, {0}
    for done in range(total):  # draw ahead at random, then learn from the answers of this step
        for step in range(len(drawn), min(rule.drawable(done), total) if dice.random() < 0.7 else done + 1):
            drawn[step] = newest_after(known, rule.drawn_after(step, done))
        assert done in drawn
        assert 0 <= done - drawn[done] <= oldest
        known.add(done + 1)
    return 2 * total


def checkpoints(dice, folder):
    """Of any saves the newest and the best stay, each gives back what was saved, and `auto` takes up the newest."""
    model, keep = build(), dice.choice((1, 2, 3, None))
    optimizer = RoleOptimizer(model, {"actor": 1e-2, "critic": 1e-2})
    saved, best, count = {}, None, 8
    for _ in range(count):
        step = max(saved, default=0) + dice.randint(0 if saved else 1, 3)
        best = dice.choice((best, best, step))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 if p.requires_grad else 0.0)
        state = TrainerState(step=step, seed=dice.randrange(9), samples=step, policy_version=step, best_step=best)
        save_checkpoint(folder, model, optimizer, state, keep=keep)
        saved[step] = (state, {name: x.clone() for name, x in model.state_dict().items()})
        left = {int(path.name.rpartition("-")[2]) for path in list_checkpoints(folder)}
        newest = sorted(saved)[-keep:] if keep else sorted(saved)
        held = {saved[n][0].best_step for n in newest} - {None}
        assert set(newest) <= left
        assert held <= left, "the best is among them"
        assert keep is None or left <= {*newest, *held}
        saved = {n: saved[n] for n in left}
        assert resolve_resume("auto", folder) == folder / f"checkpoint-{max(saved)}"
        known = dice.choice(sorted(saved))
        other = build()
        found = load_checkpoint(folder / f"checkpoint-{known}", other, RoleOptimizer(other, optimizer.learning_rates))
        assert found == saved[known][0]
        trained = [name for name, p in other.named_parameters() if p.requires_grad]
        assert all(torch.equal(other.state_dict()[name], saved[known][1][name]) for name in trained)
    return count


def _values(hint):
    """Values of a type and some of others."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            yield from typing.get_args(kind)
        elif typing.get_origin(kind) in (list, tuple):
            yield from ([], ["x"], ["accuracy", "format"], [1.0], [0.5, 2])
        else:
            yield from {
                bool: (True, False), int: (0, 1, 2, 7, -1, 10**20), float: (0.0, 0.5, 1.0, 3.0, -1.0, math.nan),
                str: ("x", "", "auto", "m:f", "http://h:1"), dict: ({}, {"a": 1}), type(None): (None,),
            }.get(kind, ("x", None))  # fmt: skip


HINTS = typing.get_type_hints(TrainConfig)
PAIRS = list(itertools.combinations([field.name for field in dataclasses.fields(TrainConfig)], 2))


def options(dice, folder):
    """Some pairs of options: each is taken or refused in one line that names an option."""
    for pair in dice.sample(PAIRS, 25):
        given = {"model_name_or_path": "m", "dataset_name": "d.jsonl", "output_dir": "o"}
        given |= {name: dice.choice([*_values(HINTS[name]), "red", 3, None]) for name in pair}
        config, refused = None, ""
        try:
            config = TrainConfig(**given)
        except ConfigError as error:
            refused = str(error)
        if config is None:
            assert re.match(r"\w+", refused)[0] in HINTS, (given, refused)
            assert re.fullmatch(r".+: .+", refused), (given, refused)  # in one line
        else:
            assert TrainConfig(**config.to_dict()) == config, given
            assert config.count_steps(1000) > 0, given
    return 25


@functools.cache
def _tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        return AutoTokenizer.from_pretrained(write_base(Path(folder) / "base"))


def bodies(dice, folder):
    """Any bytes are read, or refused by an error whose object is JSON."""
    reader = Reader(tokenizer=_tokenizer(), ends=(2,), context=64, vocabulary=61)
    for path, raw in itertools.islice(http.bodies(dice.randrange(2**32)), 50):
        read = {COMPLETIONS: reader.completion, CHAT: reader.chat}.get(path, reader.tokens)
        try:
            asked = read(parse_json(raw))
        except BadRequestError as error:
            asked = error
        if isinstance(asked, BadRequestError):
            assert 400 <= asked.status < 500, raw
            json.dumps(asked.body())
        else:
            assert all(0 <= token < 61 for prompt in asked.prompts for token in prompt), raw
            assert 0 < asked.n_tokens <= 64 * asked.n * len(asked.prompts), raw
    return 50


MACHINES = {packing: 300, schedules: 60, checkpoints: 4, options: 40, bodies: 40}
"""Lives of each machine on a push."""


def hold(survived, folder, times, first):
    steps, found = 0, []
    for machine, lives in MACHINES.items():
        for life in range(first, first + lives * times):
            place = folder / f"{machine.__name__}{life}"
            try:
                steps += machine(random.Random(f"{SEED} {life}"), place)
            except Exception as error:  # what it is stands below; other lives are to be seen, too
                found.append(
                    f"RELIABILITY_SEED={SEED}, {machine.__name__}, life {life}: {type(error).__name__} {error}"
                )
    assert steps + len(found) >= 3000
    try:
        survived("machines", steps + len(found), len(found))
    except AssertionError:
        raise AssertionError("\n".join(found)) from None


def test_what_must_hold_holds_after_any_calls(survived, tmp_path):
    hold(survived, tmp_path, 1, 0)


@pytest.mark.long
def test_what_must_hold_holds_after_many_more_calls(survived, tmp_path):
    hold(survived, tmp_path, 12, 1000)
