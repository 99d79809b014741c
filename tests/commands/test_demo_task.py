"""The demo task: reproducible, held-out prompts held out, a true score that resists gaming, known words only."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlhf_engine.commands.demo_task import (
    FIXES,
    MAX_WORDS,
    DemoTask,
    build_tokenizer,
    complaint,
    prefer,
    score_parts,
    true_score,
    vocabulary_texts,
)

PROMPT = "guest : hello , the shower is cold again . agent :"
BEST = "hello . i am so sorry about the shower . we will heat the shower now . goodbye ."
BEST_SCORE = 4.0
TASK = DemoTask(0)


def test_data_are_a_function_of_the_seed_alone() -> None:
    other = DemoTask(0)
    other.heldout_prompts(3)  # another order of calls
    other.train_prompts(10)
    assert other.sft_pairs(50) == TASK.sft_pairs(50)
    assert TASK.sft_pairs(20) == TASK.sft_pairs(50)[:20]  # more data extend the same data
    assert other.train_prompts(99) == TASK.train_prompts(99)
    assert other.heldout_prompts(50) == TASK.heldout_prompts(50)
    assert DemoTask(1).sft_pairs(50) != TASK.sft_pairs(50)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_heldout_complaints_are_disjoint_but_made_of_known_parts(seed: int) -> None:
    task = DemoTask(seed)
    train = task.train_prompts(1600)
    heldout = task.heldout_prompts(200)
    assert len(set(heldout)) == 200
    assert not {complaint(p) for p in train} & {complaint(p) for p in heldout}
    assert not set(train) & set(heldout)
    assert {t for t, _ in task.heldout_complaints} == {t for t, _ in task.train_complaints}
    assert {p for _, p in task.train_complaints} == set(FIXES)
    assert {complaint(row["prompt"]) for row in task.sft_pairs(500)} <= set(task.train_complaints)


def test_more_heldout_prompts_than_there_are_and_prompts_outside_the_task_are_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt: expected a complaint such as .* got 'the sky is blue'"):
        true_score("the sky is blue", BEST)
    with pytest.raises(ValueError, match=r"n: expected at most \d+ held-out prompts, got 100000"):
        TASK.heldout_prompts(100_000)


def test_the_best_answer_by_hand() -> None:
    parts = {"greeting": 0.25, "apology": 0.5, "topic": 1.0, "fix": 1.5, "closing": 0.5, "finished": 0.25}
    assert score_parts(PROMPT, BEST) == parts
    assert true_score(PROMPT, BEST) == BEST_SCORE
    assert true_score(PROMPT, f"  {BEST}  ") == BEST_SCORE  # white space means nothing


def test_every_fault_costs_what_the_rules_say() -> None:
    for worse, difference in [
        (BEST.replace("shower", "lamp"), -4.0),  # off topic: topic 1 → −0.75 · 2, fix 1.5 → 0
        (BEST.replace("heat", "clean"), -1.0),  # solves another problem
        (BEST.replace("goodbye .", "go away . goodbye ."), -1.5),  # rude
        (BEST.replace("goodbye .", "we have many guests . goodbye ."), -0.4),  # filler
        (BEST.removesuffix(" ."), -1.0),  # does not end: finished 0.25 → −0.75
        (BEST + " goodbye .", -1.0),  # the same sentence again
        (BEST.replace("hello .", "hello . hello shower sorry ."), -0.75),  # words that are no sentence
        (BEST.replace("now", "now the heat the"), -1.5 - 0.75),  # no sentence, so no fix
        ("i am sorry the shower is dirty .", 0.5 + 0.75 + 0.25 - 4.0),  # apologises for the wrong problem
        ("", -8.0),
        (". . .", -8.0),
    ]:
        assert true_score(PROMPT, worse) - BEST_SCORE == pytest.approx(difference)
        assert prefer(PROMPT, BEST, worse) == 1
        assert prefer(PROMPT, worse, BEST) == 0


def test_ways_to_cheat_lose_to_one_honest_sentence() -> None:
    honest = true_score(PROMPT, "we will heat the shower tonight .")
    for cheat in [
        "i am so sorry . " * 8,
        "sorry " * 20,
        "thank you for your patience . please forgive us . i am so sorry . hello . goodbye .",
        "shower shower shower heat heat heat .",
        " . ".join(f"we will heat the {t} now" for t in ("room", "shower", "bed", "lamp", "coffee")) + " .",
        " . ".join(f"we will {v[0]} the shower now" for v in FIXES.values()) + " .",  # every fix there is
        (BEST + " ") * 3,
        " . ".join([BEST.removesuffix(" .")] * 3),
        "that is not my problem .",
    ]:
        assert true_score(PROMPT, cheat) < honest, cheat
        assert true_score(PROMPT, cheat) >= -8


def test_length_is_guarded_and_the_score_bounded() -> None:
    long = "hello . " + "we will heat the shower within the hour . " * 30
    assert len(long.split()) > 3 * MAX_WORDS
    assert true_score(PROMPT, long) == -8.0
    rows = TASK.sft_pairs(300)
    scores = [true_score(r["prompt"], r[k]) for r in rows for k in ("chosen", "rejected")]
    assert max(scores) <= BEST_SCORE
    assert prefer(PROMPT, BEST, BEST) == 0.5


def test_tokenizer_covers_the_task_and_round_trips(tmp_path: Path) -> None:
    built = build_tokenizer(vocabulary_texts())
    built.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = [PROMPT, BEST, *TASK.heldout_prompts(100)]
    texts += [row[key] for row in TASK.sft_pairs(400) for key in ("prompt", "chosen", "rejected")]
    for tokenizer in (built, loaded):
        assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
        assert 100 <= len(tokenizer) <= 300
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            assert ids[0] == tokenizer.bos_token_id
            assert tokenizer.unk_token_id not in ids
            assert len(ids) == len(text.split()) + 1
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
    bare = loaded(BEST, add_special_tokens=False)["input_ids"]
    assert loaded(PROMPT)["input_ids"] + bare == loaded(f"{PROMPT} {BEST}")["input_ids"]
    assert loaded("guest zebra", add_special_tokens=False)["input_ids"][1] == loaded.unk_token_id
