"""TRL's dataset types: recognised by columns, checked by column; bad rows counted with their places."""

import json
from collections import Counter

import pytest

from rlhf_engine.data import Preference, PromptCompletion, PromptOnly, RowError, Tally, UnpairedPreference
from rlhf_engine.data.types import parse_row, recognise, split_prompt
from rlhf_engine.errors import ConfigError
from tests.data.texts import load, said, write_lines

ASK, BLUE, GREEN = said("user", "What colour is the sky?"), said("assistant", "Blue."), said("assistant", "Green.")


def counts(*rows: str) -> Counter[frozenset[str]]:
    return Counter(frozenset(row.split()) for row in rows)


def parse(kind, **columns):
    return parse_row(columns, kind, place="here")


def test_types_are_recognised_by_columns():
    for rows, kind in [
        (["prompt"], "prompt_only"),
        (["prompt id score"], "prompt_only"),
        (["prompt completion"], "prompt_completion"),
        (["prompt completion label"], "unpaired_preference"),
        (["prompt chosen rejected"], "preference"),
        (["chosen rejected"], "implicit_preference"),
        (["prompt completion chosen rejected label"], "preference"),
        (["prompt chosen rejected"] * 3 + ["prompt chosen"], "preference"),  # one row is bad, not all of them
        (["prompt completion", "prompt completion chosen rejected"], "prompt_completion"),  # fits every row
        (["chosen rejected"] * 3 + ["prompt chosen rejected"], "preference"),  # never leaves a prompt aside
    ]:
        assert recognise(counts(*rows)) == kind


def test_only_wanted_types_are_recognised():
    assert recognise(counts("prompt completion label"), ("preference", "prompt_completion")) == "prompt_completion"
    with pytest.raises(ConfigError, match=r"^dataset_name: expected the columns \(prompt\), or messages, .*, got \['t"):
        recognise(counts("text"), ("prompt_only",))
    with pytest.raises(ConfigError, match=r"^dataset_name: .*\(prompt, chosen, rejected\) or .*, got \['n', 'text'\]$"):
        recognise(counts("text", "n"))


def test_a_column_without_a_value_is_none(tmp_path):
    # tables give every row every column
    row = {"prompt": "x", "completion": "y", "chosen": None, "rejected": None, "label": None}
    rows, _ = load(write_lines(tmp_path / "a.jsonl", row))
    assert isinstance(rows[0], PromptCompletion)


def test_every_type_standard_and_conversational():
    for prompt, better, worse in (("Sky?", "blue", "green"), ([ASK], [BLUE], [GREEN])):
        as_text = (prompt, better, worse) if isinstance(prompt, str) else ((ASK,), (BLUE,), (GREEN,))
        only = parse("prompt_only", prompt=prompt, place=3)
        assert (type(only), only.prompt, only.columns, only.place) == (PromptOnly, as_text[0], {"place": 3}, "here")
        pair = parse("preference", prompt=prompt, chosen=better, rejected=worse)
        assert (type(pair), pair.prompt, pair.chosen, pair.rejected) == (Preference, *as_text)
        whole = parse("prompt_completion", prompt=prompt, completion=better)
        assert (type(whole), whole.prompt, whole.completion) == (PromptCompletion, *as_text[:2])
        for label in (True, 1, 1.0):
            liked = parse("unpaired_preference", prompt=prompt, completion=better, label=label)
            assert (type(liked), liked.completion, liked.label) == (UnpairedPreference, as_text[1], True)
        for label in (False, 0, 0.0):
            assert parse("unpaired_preference", prompt=prompt, completion=better, label=label).label is False


def test_messages_lose_keys_without_a_value_and_keep_others():
    (message,) = parse("prompt_only", prompt=[{**ASK, "name": "Ann", "tool_calls": None}]).prompt
    assert message == {**ASK, "name": "Ann"}


def test_what_is_wrong_is_said_by_column():
    for kind, columns, message in [
        ("prompt_only", {}, "expected a string or a list of messages in column 'prompt', got None"),
        ("prompt_only", {"prompt": 7}, "a list of messages in column 'prompt', got 7"),
        ("prompt_only", {"prompt": ASK}, r"a list of messages in column 'prompt', got \{'"),
        ("prompt_only", {"prompt": " \n"}, "expected text in column 'prompt', got an empty prompt"),
        ("prompt_only", {"prompt": []}, "expected text in column 'prompt', got an empty prompt"),
        ("prompt_only", {"prompt": [said("user", " ")]}, "expected text in column 'prompt', got an empty prompt"),
        ("prompt_only", {"prompt": ["hi"]}, r"expected messages \{role, content\} in column 'prompt', got 'hi'"),
        ("prompt_only", {"prompt": [[ASK]]}, r"expected messages \{role, content\} in column 'prompt', got \["),
        ("prompt_only", {"prompt": [{"role": "user"}]}, "a string as content of every message .* got None"),
        ("prompt_only", {"prompt": [{"role": 1, "content": ""}]}, "a string as role of every message .* got 1"),
        ("prompt_only", {"prompt": [said("", "x")]}, "expected a role for every message"),
        ("prompt_only", {"prompt": [{**ASK, "content": [{"type": "text"}]}]}, "text as every part .* got \\["),
        ("prompt_only", {"prompt": "a\ud800b"}, "Unicode text in column 'prompt', got half a surrogate pair at place"),
        ("prompt_only", {"prompt": [said("user", "\udfff")]}, "Unicode text in column 'prompt'"),
        ("prompt_only", {"prompt": [ASK, said("assistant", " ")]}, "words to go on from where a prompt ends"),
        ("prompt_completion", {"prompt": "x", "completion": ""}, "text in column 'completion', got an empty completio"),
        ("prompt_completion", {"prompt": "x", "completion": [BLUE]}, "a string in column 'completion', like the promp"),
        ("prompt_completion", {"prompt": [ASK], "completion": "x"}, "messages in column 'completion', like the prompt"),
        ("prompt_completion", {"prompt": [ASK], "completion": [ASK]}, "messages of the assistant alone in column 'com"),
        ("preference", {"prompt": [ASK], "chosen": [ASK, BLUE], "rejected": [GREEN]}, "assistant alone in column 'cho"),
        ("preference", {"prompt": "x", "chosen": "y"}, "a string or a list of messages in column 'rejected', got None"),
        *(
            ("unpaired_preference", {"prompt": "x", "completion": "y", "label": label}, "true, false, 1 or 0 in column")
            for label in (None, float("nan"), 2, -1, 0.5, "true", [1])
        ),
    ]:
        with pytest.raises(RowError, match=message):
            parse(kind, **columns)


def test_the_implicit_prompt_of_strings():
    for chosen, rejected, prompt in [
        ("The sky is blue.", "The sky is green.", "The sky is"),  # as TRL's extract_prompt
        ("Q: sky?\nA: blue", "Q: sky?\nA: black", "Q: sky?\nA:"),  # TRL would end the prompt with "bl"
        ("\n\nHuman: Hi\n\nAssistant: Hm", "\n\nHuman: Hi\n\nAssistant: Ho", "\n\nHuman: Hi\n\nAssistant:"),
        ("Name it:\n\nRed", "Name it:\n\nOak", "Name it:\n\n"),  # as TRL: only a space goes to the answers
        ("The sky is blue", "The sky is", "The sky"),  # both keep something to say
        ("Say yes  now", "Say yes no", "Say yes"),
        ("Yes. Blue", "Yes.\nGreen", "Yes."),
    ]:
        found = split_prompt(chosen, rejected)
        assert found == (prompt, chosen[len(prompt) :], rejected[len(prompt) :])
        assert all(part.strip() for part in found)


def test_the_implicit_prompt_of_conversations():
    system = said("system", "Be brief.")
    row = parse("implicit_preference", chosen=[system, ASK, BLUE], rejected=[system, ASK, GREEN])
    assert (row.prompt, row.chosen, row.rejected) == ((system, ASK), (BLUE,), (GREEN,))


def test_where_no_prompt_can_be_told_the_row_is_bad():
    for chosen, rejected in [
        ("red", "blue"), ("same old", "same old"), ("re", "red"), (" a", " b"), ([BLUE], [GREEN]),
        ([ASK, BLUE], [ASK, BLUE]), ([ASK], [ASK, BLUE]),
    ]:  # fmt: skip
        with pytest.raises(RowError, match="expected chosen and rejected with one prompt and two answers"):
            parse("implicit_preference", chosen=chosen, rejected=rejected)
    with pytest.raises(RowError, match="of one form"):
        parse("implicit_preference", chosen="x", rejected=[ASK, BLUE])


def test_groups_are_a_column_s_values_or_prompts(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "x", "who": 7}, {"prompt": "x", "who": "b"})
    assert [row.group for row in load(path)[0]] == ["x", "x"]
    assert [row.group for row in load(path, group_column="who")[0]] == ["7", "b"]
    talks = [parse("prompt_only", prompt=[{"role": "user", "content": "x"}]) for _ in range(2)]
    assert talks[0].group == talks[1].group == json.dumps([said("user", "x")], sort_keys=True).replace("'", '"')
    for value in (None, "", True, 1.5, ["a"]):
        with pytest.raises(RowError, match="a string or an integer in column 'who'"):
            parse_row({"prompt": "x", "who": value}, "prompt_only", place="p", group_column="who")


def seven(tmp_path):
    """Seven rows, of which three are bad, for two reasons."""
    rows = [{"prompt": "a"}, {"prompt": 1}, {"prompt": "b"}, b"{", {"prompt": "c"}, {"prompt": 2}, {"prompt": "d"}]
    return write_lines(tmp_path / "a.jsonl", *rows)


def test_one_bad_row_stops_by_default_and_says_how_many_there_are(tmp_path):
    path = seven(tmp_path)
    with pytest.raises(ConfigError) as error:
        load(path, kinds=("prompt_only",))
    assert str(error.value) == (
        f"{path}:2: expected a string or a list of messages in column 'prompt', got 1. 3 of 7 rows cannot be used, "
        f"where max_bad_rows is 0: expected a string or a list of messages in column 'prompt': {path}:2, {path}:6; "
        f"expected a JSON object: {path}:4; max_bad_rows=3 goes on without them"
    )


def test_the_threshold_is_a_share_or_a_number(tmp_path):
    path = seven(tmp_path)
    for allowed in (2, 0.4):
        with pytest.raises(ConfigError, match=f"3 of 7 rows cannot be used, where max_bad_rows is {allowed}"):
            load(path, max_bad_rows=allowed, kinds=("prompt_only",))
    for allowed in (3, 0.43, 100):
        rows, tally = load(path, max_bad_rows=allowed, kinds=("prompt_only",))
        assert [row.prompt for row in rows] == ["a", "b", "c", "d"]
        assert tally.text() == (
            f"{path}: 7 rows read, 4 used, 3 bad (expected a string or a list of messages in column 'prompt': "
            f"{path}:2, {path}:6; expected a JSON object: {path}:4)"
        )
        assert json.loads(json.dumps(tally.to_dict()))["bad"][0]["count"] == 2
    tally = Tally(source="s", max_bad_rows=0.29, read=100)  # 0.29 · 100 is 28.999… in floating point
    assert tally.allowed == 29


def test_places_are_kept_of_the_first_few_alone(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a"}, *[{"prompt": i} for i in range(50)])
    _, tally = load(path, max_bad_rows=50, kinds=("prompt_only",))
    assert list(tally.bad.values()) == [(50, [f"{path}:2", f"{path}:3", f"{path}:4"])]
    assert "and 47 more" in tally.text()


def test_nothing_left_is_an_error_whatever_is_allowed(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": 1}, {"prompt": 2})
    with pytest.raises(ConfigError, match=r"^dataset_name: expected at least one row .*2 rows read, 0 used, 2 bad"):
        load(path, max_bad_rows=100, kinds=("prompt_only",))
