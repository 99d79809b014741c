"""The published Taskmaster reward files: counts, groups, text; and rows that are not like them."""

import json

import pytest

from rlhf_engine.data import PromptOnly, RowError, Tally, load_rows, split_by_group
from rlhf_engine.data.types import render_turn
from rlhf_engine.errors import ConfigError
from tests.conftest import SHARED
from tests.data.texts import write_lines

FOLDER = SHARED / "data" / "taskmaster-ticketing"
TURNS = [
    {"role": "agent", "text": "Hi  there.\nFilms?"},
    {"role": "user", "text": "What is on at the Café?"},
    {"role": "agent", "api": {"find_movies": {"name.theater": "Café"}}},
    {"role": "api", "response": {"find_movies": {"name.movie": ["Scream"]}}},
]


def published(**changes):
    """A row as published."""
    row = {
        "conversation_id": "dlg-1",
        "context": json.dumps(TURNS),
        "generation": json.dumps({"role": "agent", "text": "Scream."}),
        "reward": 1.0,
    }
    return {**row, **changes}


def load(path, max_bad_rows=0.0):
    tally = Tally(source=str(path), max_bad_rows=max_bad_rows)
    return load_rows(path, tally, kinds=("unpaired_preference",)), tally


def test_a_context_is_lines_with_speakers(tmp_path):
    call = json.dumps({"role": "agent", "api": {"book": {"n": 2}}})
    path = write_lines(tmp_path / "a.jsonl", published(), published(generation=call, reward=0))
    rows, tally = load(path)
    assert rows[0].prompt == (
        "agent: Hi there. Films?\n"
        "user: What is on at the Café?\n"
        'agent: {"find_movies": {"name.theater": "Café"}}\n'
        'api: {"find_movies": {"name.movie": ["Scream"]}}\n'
        "agent:"
    )
    assert [(row.completion, row.label) for row in rows] == [(" Scream.", True), (' {"book": {"n": 2}}', False)]
    begins = "agent: Hi there. Films?\nuser: What is on at the Café?"
    assert (rows[0].group, rows[1].place) == (begins, f"{path}:2")
    assert tally.is_plain


def test_published_rows_are_known_by_their_columns(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", published(), published(reward=0), {"prompt": "x"})
    expected, _ = load(path, max_bad_rows=1)
    kinds = ("preference", "unpaired_preference", "implicit_preference")
    tally = Tally(source=str(path), max_bad_rows=1)
    assert load_rows(path, tally, kinds=kinds) == expected
    assert [places for _, places in tally.bad.values()] == [[f"{path}:3"]]
    prompts = load_rows(path, Tally(source=str(path), max_bad_rows=1), kinds=("prompt_only",))
    assert {type(row) for row in prompts} == {PromptOnly}
    assert [(row.prompt, row.group) for row in prompts] == [(row.prompt, row.group) for row in expected]
    alone = write_lines(tmp_path / "b.jsonl", published())
    with pytest.raises(ConfigError, match=r"expected the columns \(prompt, chosen, rejected\) or"):
        load_rows(alone, Tally(source=str(alone)), kinds=("preference", "prompt_completion"))
    mixed = write_lines(tmp_path / "c.jsonl", published(), {"prompt": "x"}, {"prompt": "y"})
    with pytest.raises(ConfigError, match=f"{mixed}:1: expected a string or a list of messages in column 'prompt'"):
        load_rows(mixed, Tally(source=str(mixed)))


def test_rows_of_another_kind_are_bad(tmp_path):
    for row, message in (
        (["x"], "expected a JSON object, got list"),
        (published(conversation_id=None), "a string in column 'conversation_id', got None"),
        (published(context=TURNS), r"a JSON string in column 'context', got \["),
        (published(context="["), "a JSON string in column 'context', got Expecting value"),
        (published(context='{"role": "user"}'), "a list of turns in column 'context', got"),
        (published(context='["hi"]'), "turns {role, text or api or response}, got 'hi'"),
        (published(context='[{"role": "user"}]'), r"one of text, api and response in a turn, got \['role'\]"),
        (published(context='[{"role": "user", "text": 1}]'), "a string as text of a turn, got 1"),
        (published(generation='{"role": "user", "text": "x"}'), "a turn of the agent in column 'generation'"),
        (published(generation='{"role": "agent", "text": "\\ud800"}'), "Unicode text in column 'text'"),
        (published(reward=float("nan")), "true, false, 1 or 0 in column 'reward', got nan"),
        (published(reward=0.5), "true, false, 1 or 0 in column 'reward', got 0.5"),
        (published(reward="1"), "true, false, 1 or 0 in column 'reward', got '1'"),
    ):
        path = write_lines(tmp_path / "a.jsonl", row, published(), published())
        with pytest.raises(ConfigError, match=message):
            load(path)
        rows, tally = load(path, max_bad_rows=0.5)
        assert (len(rows), tally.n_bad) == (2, 1)


def test_turns_with_two_contents_are_none():
    with pytest.raises(RowError, match="one of text, api and response"):
        render_turn({"role": "agent", "text": "x", "api": {}})


@pytest.fixture(scope="module")
def real():
    if not FOLDER.is_dir():
        pytest.skip("the reward files of Taskmaster-3 are not beside the checkout (shared/data/taskmaster-ticketing)")
    return load(FOLDER)


def test_the_published_files_are_read_whole(real):
    rows, tally = real
    assert (len(rows), sum(row.label for row in rows), tally.read, tally.n_bad) == (3667, 573, 3667, 0)
    assert len({row.group for row in rows}) == 271
    assert rows[0].place == f"{FOLDER / 'reward_00.json.gz'}: row 0"
    assert rows[-1].place == f"{FOLDER / 'reward_07.json.gz'}: row 166"
    assert sum(row.completion.startswith(' {"') for row in rows) == 1972 + 26  # calls, and calls published as text
    assert sum(row.completion == " " for row in rows) == 4  # published without text
    assert {line.split(":")[0] for row in rows for line in row.prompt.split("\n")} == {"agent", "user", "api"}
    assert all(row.prompt.endswith("\nagent:") and row.completion.startswith(" ") for row in rows)


def test_no_published_dialogue_is_on_both_sides(real):
    """Each row's id is its own, although most rows hold the turns of another row."""
    rows, _ = real
    train, held_out = split_by_group(rows, share=0.1, seed=0)
    assert len(train) + len(held_out) == 3667
    assert 0.05 < len(held_out) / 3667 < 0.2  # a coin for each of 271 dialogues of 1 to 55 rows
    learned = {row.prompt + row.completion for row in train}

    def beginnings(row):
        lines = row.prompt.removesuffix("\nagent:").split("\n")
        return {"\n".join(lines[:i]) for i in range(2, len(lines) + 1)}

    judged = {row.prompt + row.completion for row in rows}
    assert sum(bool(beginnings(row) & judged) for row in rows) > 2900
    assert not any(beginnings(row) & learned for row in held_out)
    answered = {row.prompt + row.completion for row in held_out}
    assert not any(beginnings(row) & answered for row in train)


def test_a_dialogue_of_one_turn_begins_with_its_answer(tmp_path):
    first = published(context=json.dumps(TURNS[:1]), generation=json.dumps(TURNS[2]))
    later = published(context=json.dumps([TURNS[0], TURNS[2], TURNS[3]]), conversation_id="dlg-2")
    rows, _ = load(write_lines(tmp_path / "a.jsonl", first, later))
    assert rows[0].group == rows[1].group
    (alone,) = load(write_lines(tmp_path / "b.jsonl", published(context="[]")))[0]
    assert (alone.prompt, alone.group) == ("agent:", "agent: Scream.")
