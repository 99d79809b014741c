"""docs/scaling.md says what bench/scaling/page.py computes, in tables and in words, and that computes what it says."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = " ".join((ROOT / "docs" / "scaling.md").read_text(encoding="utf-8").split())


class Bench(NamedTuple):
    page: object
    tables: object
    model: object
    pieces: object


@pytest.fixture(scope="module")
def bench() -> Bench:
    """The scripts as modules, as they import each other."""
    sys.path.insert(0, str(ROOT / "bench" / "scaling"))
    try:
        names = ("page", "tables", "model", "pieces")
        return Bench(*(importlib.import_module(name) for name in names))
    finally:
        sys.path.remove(str(ROOT / "bench" / "scaling"))


@pytest.mark.long
def test_the_page_is_what_the_script_makes(bench, capsys):
    assert bench.page.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "said"),
    [("PAGE", "46 to 48"), ("PAGE", "1.5 GB/s"), ("GUIDE", "13.5 GB"), ("NOTE", "160 MB")],
    ids=["in-a-table", "between-tables", "in-the-guide", "in-the-note"],
)
def test_another_number_is_found(bench, monkeypatch, tmp_path, name, said):
    text = getattr(bench.page, name).read_text(encoding="utf-8")
    assert said in text
    path = tmp_path / "text.md"
    path.write_text(text.replace(said, "9.9 GB"), encoding="utf-8")
    monkeypatch.setattr(bench.page, name, path)
    monkeypatch.setattr(bench.page, "ROOT", tmp_path)
    assert bench.page.main(["--check"]) == 1


# ---- pieces ----------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_formats(bench):
    """int64 ids and versions, fp32 log-probs: what the notes on data-parallel and on asynchronous training say."""
    pieces = bench.pieces
    answers = pieces.answer_bytes()
    assert answers.prompt == pytest.approx(8, abs=0.01)
    assert answers.completion == pytest.approx(8 + 4 + 8 + 4 + 4, abs=0.01)  # log-probs: drawn, again, reference
    gathered = pieces.gathered_bytes(critic=True)
    assert gathered.prompt == pytest.approx(8, abs=0.01)
    assert gathered.completion == pytest.approx(8 + 28, abs=0.01)


def test_a_policy_has_the_bytes_of_the_one_that_was_written_whole(bench):
    found = bench.tables.record()["publication"]
    shape = bench.pieces.shape(found["preset"])
    assert shape.slot_elements == found["elements"]
    assert shape.parcel_bytes == pytest.approx(found["bytes"], rel=1e-4)  # a header's digits are no line in the layers
    assert shape.slot_bytes < shape.parcel_bytes < 1.001 * shape.slot_bytes


# ---- the model of seconds --------------------------------------------------------------------------------------------


def plain(bench, **changes):
    """Round numbers: 10 parameters in blocks, 2 in the head, nothing for attention and adapters."""
    values = {field.name: 0 for field in dataclasses.fields(bench.pieces.Shape)}
    return bench.pieces.Shape(**{**values, "block_parameters": 10, "head_parameters": 2, "kv_bytes": 1, **changes})


def test_flops(bench):
    model, work = bench.model, bench.model.Work(1, 3, 2)
    shape = plain(bench)
    assert model.forward(shape, work) == 2 * 10 * 5
    assert model.forward(shape, work, head=True) == 2 * 10 * 5 + 2 * 2 * 2
    assert model.learned(shape, work, head=True, recompute=False) == 2 * model.forward(shape, work, head=True)
    assert model.learned(shape, work, head=False, recompute=True) == 3 * model.forward(shape, work)
    slot = plain(bench, slot_elements=1)
    assert model.forward(slot, work, slot=True) == 2 * (10 + 1) * 5
    assert model.learned(slot, work, head=False, recompute=False) == (4 * 10 + 6) * 5
    # causal attention: two products of 2 · width · position each, for every token of a layer
    wide = plain(bench, layers=3, attention_width=7, block_parameters=0)
    long = model.Work(1, 500, 500)
    assert model.forward(wide, long) == pytest.approx(sum(3 * 2 * 2 * 7 * i for i in range(1, 1001)), rel=2e-3)


def test_exchanges_among_gpus(bench):
    model, at = bench.model, bench.model.At(1, 1, 1, 0)
    assert model.all_gather(8, 450e9, at) == 7 / 8
    assert model.all_reduce(8, 450e9, at) == 2 * 7 / 8
    assert model.all_reduce(16, 400e9, at) == 2 * 15 / 16  # eight links of 50 GB/s are less than NVLink


def test_decoding_is_bound_by_memory_or_by_flops(bench):
    model, at = bench.model, bench.model.At(1, 1, 1, 0)
    shape, algorithm = plain(bench), model.Algorithm("x", False, 2, 1)
    work = model.Work(8, 32, 32)
    for gpu, token in (
        (model.Gpu("slow memory", 1e9, 1e4, 100), (2 * 12 + 4 * (32 + 16)) / 100),
        (model.Gpu("slow products", 100, 1e4, 1e9), 4 * 2 * 12 / 100),
    ):
        case = model.Case(shape, work, algorithm, gpu)
        drawn = model.draw(case, 2, at)  # four answers each, to two prompts
        prefill = 2 * 2 * 10 * 32 / gpu.flops
        assert drawn.seconds == pytest.approx(32 * token + prefill)
        assert drawn.computing == pytest.approx(32 * 4 * 2 * 12 / gpu.flops + prefill)
    # room for one row of 64 tokens beside 10 % that stay free: four waves
    small = model.Case(shape, work, algorithm, model.Gpu("small", 1e9, 100 / 0.9, 100))
    assert model.rows(small) == 1
    assert model.draw(small, 2, at).seconds == pytest.approx(4 * 32 * (2 * 12 + 48) / 100, rel=1e-4)


def test_no_other_division_is_shorter(bench):
    case = bench.model.Case(bench.pieces.shape("llama-7b"), bench.tables.SMALL, bench.tables.PPO, bench.model.H100)
    best = bench.model.best_split(case, 8)
    for n in range(1, 8):
        assert bench.model.split(case, n, 8 - n, bench.model.MIDDLE).step >= best.step
    assert min(best.idle) == 0
    assert best.generators + best.learners == 8


@pytest.mark.parametrize(
    ("g", "t", "publish", "collect", "lag", "expected"),
    [
        (3.0, 2.0, 0.5, 0.0, 1, 3.0),  # hidden: the learner waits anyway
        (2.0, 2.0, 1.0, 0.0, 1, 2.5),  # half of it
        (2.0, 2.0, 1.0, 0.0, 2, 2.0),
        (2.0, 2.0, 0.0, 1.0, 2, 3.0),  # a generator waits until its answers have arrived
        (1.0, 2.0, 4.0, 0.0, 1, 3.5),
    ],
)
def test_the_pace_of_a_run(bench, g, t, publish, collect, lag, expected):
    """Against what a run does, event by event: `StalenessRule.drawable` and the scheduler, without threads."""
    split = bench.model.Split(1, 1, g, t)
    assert bench.model.period(split, publish=publish, collect=collect, lag=lag) == expected
    learned, handed_over = [0.0] * 200, 0.0  # ends of steps; when the last answers arrived
    arrived = []
    for i in range(200):
        policy = 0.0 if i < lag + 1 else learned[i - lag - 1] + publish
        handed_over = max(policy, handed_over) + g + collect
        arrived.append(handed_over)
        learned[i] = max(learned[i - 1] if i else 0.0, arrived[i]) + t
    assert (learned[199] - learned[99]) / 100 == pytest.approx(expected)


# ---- what the page concludes from its tables -------------------------------------------------------------------------


def cases(bench):
    for name, work, algorithm, n in bench.page.CASES:
        yield bench.model.Case(bench.pieces.shape(name), work, algorithm, bench.model.H100), n


def test_dividing_loses_on_8_gpus_and_wins_less_than_sharing(bench):
    assert "On 8 GPUs, a coarse grain, it loses." in TEXT
    assert "At the middle of what is assumed, this bound is above what dividing wins in every row." in TEXT
    model = bench.model
    for case, n in cases(bench):
        if model.in_turn(case, n, model.MIDDLE) is not None:
            assert model.beside_step(case, n, model.MIDDLE) < model.best_split(case, n).step
        if n == 8:
            for at in model.ENDS:
                assert model.best_split(case, n, at).step > model.in_turn(case, n, at).step


def test_who_waits(bench):
    assert (
        "Nobody waits more than 5 %, except in one row with 13 %, where twelve prompts for each generator are a grain."
        in TEXT
    )
    assert "On 8 GPUs the grain leaves up to a fifth idle, with a 70B model more." in TEXT
    more = []
    for case, n in cases(bench):
        best = bench.model.best_split(case, n)
        if n == 8:
            assert (max(best.idle) < 0.2) != (case.shape.name == "llama-70b")
        elif case.work == bench.tables.LARGE and max(best.idle) > 0.055:
            more.append(
                (round(max(best.idle), 2), bench.model.share(case, best.generators) / case.algorithm.generations)
            )
    assert more == [(0.13, 12)]


def test_one_learner(bench):
    assert "three to five times as long as that of eight ranks in turn" in TEXT
    for case, n in cases(bench):
        if n == 8 and not case.sharded:
            turns = bench.model.in_turn(case, n, bench.model.MIDDLE)
            assert 3 < bench.model.split(case, 7, 1, bench.model.MIDDLE).step / turns.step < 5


def test_other_words(bench):
    assert "updates take up to 1.2 times what they count" in TEXT
    ratios = [stage.update / stage.score / stage.flops for stage in bench.tables.stage_records()]
    assert min(ratios) > 1.0
    assert 1.1 < max(ratios) < 1.25
    assert "A 70B model with long answers is left out on 8 GPUs, where a step would take hours." in TEXT
    case = bench.model.Case(bench.pieces.shape("llama-70b"), bench.tables.LARGE, bench.tables.GRPO, bench.model.H100)
    assert bench.model.in_turn(case, 8, bench.model.MIDDLE).step > 2 * 3600
    assert "`llama-7b` has 2,048 positions" in TEXT
    assert bench.pieces.shape("llama-7b").context == 2048
    assert "1.5 times their floor" in TEXT
    assert bench.tables.LARGE.length > 2048
