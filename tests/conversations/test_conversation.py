"""Conversations: what is drawn and what is given, tools that fail, templates, limits, rewards."""

import copy
import sqlite3
import time

import pytest

from rlhf_engine.errors import ConfigError, RewardError
from rlhf_engine.rollout.conversation import LARGEST_RESULT, load_tools
from tests.conversations.talking import THOUGHTS, TOKENIZER, Tools, begin, call, drawn, hold, learned, shown


def test_a_result_is_given_and_ids_are_kept_as_they_were_drawn():
    talk = begin(hold())
    odd = '<tool_call> {"arguments":{"b":4,"a":3},"name":"multiply"}</tool_call>'  # not as the template would write it
    assert drawn(talk, odd)
    assert shown(talk).endswith(f"assistant\n{odd}<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n")
    assert not drawn(talk, "12")
    assert learned(talk) == [f"{odd}<|im_end|>", "12<|im_end|>"]
    end = talk.end()
    assert [m["role"] for m in end.messages] == ["user", "assistant", "tool", "assistant"]
    assert (end.reward, end.turn_rewards, end.calls, end.failures) == (1.0, (0.5, 0.5), 1, 0)
    assert talk.finish_reason == "eos"
    assert "[multiply] 12" in end.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (call("divide", a=1), "Tool divide not found."),
        (call("reset"), "Tool reset not found."),
        (call("multiply", a=1), "missing 1 required positional argument"),
        ('<tool_call>{"name": "multiply", "arguments": </tool_call>', "expected JSON"),
        ('<tool_call>{"name": "multiply", "arguments": [1]}</tool_call>', "an object of arguments"),
        ('<tool_call>["multiply"]</tool_call>', "expected JSON with a name"),
        ("<tool_call>" + "[" * 3000 + "</tool_call>", "RecursionError"),
        (call("raises"), "BadError"),
        (call("leaves"), "3"),
        (call("late"), "no answer from the server"),
    ],
)
def test_a_call_that_fails_is_answered_and_counted(text, said, survived):
    talk = begin(hold(context=9000))
    assert drawn(talk, text, most=9000)
    last = talk.messages[-1]
    assert last["role"] == "tool"
    assert said in last["content"]
    assert (talk.calls, talk.failures) == (1, 1)
    assert drawn(talk, call("multiply", a=3, b=4), most=9000)  # what failed has come back
    assert talk.environment.log == ["multiply"]
    survived("faults", 1)


def test_an_environment_may_score_turns_alone():
    host = hold(make=type("Turns", (Tools,), {"get_reward": None}))
    assert host.has_reward
    talk = begin(host)
    assert drawn(talk, call("multiply", a=3, b=4))
    assert not drawn(talk, "12")
    assert (talk.end().reward, talk.end().turn_rewards) == (None, (0.5, 0.5))


def test_a_call_that_hangs_is_given_up_and_the_next_one_is_not_made(survived):
    talk, began = begin(hold(timeout=0.2)), time.monotonic()
    assert drawn(talk, call("hangs") + call("multiply", a=3, b=4))
    assert time.monotonic() - began < 5
    assert [m["content"] for m in talk.messages[-2:]] == [
        "{'error': 'it took longer than 0.2 seconds'}",
        "{'error': 'an earlier call has not come back'}",
    ]
    assert talk.environment.log == []
    talk.end()
    assert begin(talk.host).environment is not talk.environment  # which nobody knows the state of
    survived("faults", 1)


def test_results_of_any_kind_are_texts_of_bounded_length():
    talk = begin(hold(context=30_000))
    assert drawn(talk, call("huge") + call("nothing") + call("waits", n=4), most=30_000)
    huge, nothing, later = (m["content"] for m in talk.messages[-3:])
    assert len(huge) < LARGEST_RESULT + 50
    assert huge.endswith("characters more)")
    assert (nothing, later, talk.failures) == ("None", "5", 0)


def test_a_result_that_does_not_fit_ends_the_conversation_as_it_is():
    n, behind = len(begin(hold()).prompt), 6 + 9  # tokens of the call with its end, and of the result
    for context, most, fits in ((400, behind, False), (n + behind, 300, False), (n + behind + 1, behind + 1, True)):
        talk = begin(hold(context=context))
        before = shown(talk)
        assert drawn(talk, call("multiply", a=3, b=4), most=most) == fits
        if fits:
            continue
        assert shown(talk) == before + call("multiply", a=3, b=4) + "<|im_end|>"
        assert talk.finish_reason == "length"
        assert talk.messages[-1]["role"] == "assistant"


def test_a_result_that_no_tokenizer_takes_ends_the_conversation():
    talk = begin(hold(make=type("Odd", (Tools,), {"nothing": half_a_character})))
    assert not drawn(talk, call("nothing"))
    assert (talk.finish_reason, talk.messages[-1]["role"]) == ("length", "assistant")


def half_a_character(self) -> str:
    """Return half of a surrogate pair."""
    return "\ud800"


def test_turns_are_limited_and_an_unfinished_turn_calls_nothing():
    talk = begin(hold(max_turns=2))
    assert drawn(talk, call("multiply", a=3, b=4))
    assert not drawn(talk, call("multiply", a=3, b=4))
    assert (talk.environment.log, talk.finish_reason) == (["multiply"], "length")
    talk = begin(hold())
    assert not drawn(talk, call("multiply", a=3, b=4), reason="length")
    assert talk.environment.log == []


def test_every_answer_has_an_environment_of_its_own_and_reset_adds_to_the_prompt():
    host = hold()
    made = Tools.made  # one, which has told its tools
    talks = [begin(host, hint=" now", seed=i) for i in range(3)]
    assert Tools.made == made + 2
    assert [talk.environment.row["seed"] for talk in talks] == [0, 1, 2]
    assert shown(talks[0]).endswith("user\n3*4 now<|im_end|>\n<|im_start|>assistant\n")
    assert talks[0].messages[0]["content"] == "3*4 now"
    assert not drawn(talks[1], "12")
    talks[1].end()
    assert begin(host).environment is talks[1].environment  # reset, and used again
    assert not {id(talk.environment) for talk in talks} & {id(begin(host).environment)}


def test_a_template_that_writes_turns_anew_is_found_and_what_differs_is_given():
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = THOUGHTS
    with pytest.warns(UserWarning, match="writes earlier turns anew"):
        host = hold(tokenizer)
    talk = begin(host)
    assert drawn(talk, "<think>well</think>" + call("multiply", a=3, b=4))
    assert "well" not in shown(talk)
    assert learned(talk) == []  # from its first token on it was written anew
    assert drawn(talk, call("multiply", a=5, b=4))
    assert not drawn(talk, "20")
    assert learned(talk) == [call("multiply", a=5, b=4) + "<|im_end|>", "20<|im_end|>"]
    odd = begin(host)
    assert drawn(odd, '<tool_call>{"name": 3}</tool_call>')  # which no template could write as a call
    assert odd.messages[-2] == {"role": "assistant", "content": '<tool_call>{"name": 3}</tool_call>'}
    end = talk.end()
    assert end.turn_rewards == (1.5, 1.0)  # the first turn's 0.5 goes to the next that is there
    assert len(talk.logprobs) == len(talk.versions) == sum(end - first for first, end in talk.turns)


def test_what_cannot_be_served_is_refused_before_the_first_step(tmp_path):
    bare = copy.deepcopy(TOKENIZER)
    bare.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ConfigError, match="shows tools"):
        hold(bare)
    bare.chat_template = "{{ tools }}{% for m in messages %}{{ m.content }} {{ m.tool_calls }}<|im_end|>{% endfor %}"
    with pytest.raises(ConfigError, match="response_template"):
        hold(bare)
    bare.chat_template = "{{ raise_exception('no tools') }}"
    with pytest.raises(ConfigError, match="no tools"):
        hold(bare)
    with pytest.raises(ConfigError, match="at least one function"):
        hold(make=None)
    with pytest.raises(ConfigError, match="reset"):
        hold(make=type("Bare", (), {"act": lambda self: None}))
    with pytest.raises(ConfigError, match="docstring"):
        hold(make=type("Bare", (), {"act": lambda self, x: None, "reset": lambda self: None}))
    with pytest.raises(RewardError, match="environment raised ZeroDivisionError"):
        hold(make=lambda: 1 / 0)
    path = tmp_path / "empty.py"
    path.write_text("import json\n")
    with pytest.raises(ConfigError, match="expected functions"):
        load_tools(str(path))


@pytest.mark.parametrize("value", ["much", float("nan"), 1e39, [1.0]])
def test_a_reward_that_is_no_number_stops_the_run_by_its_name(value, survived):
    host = hold(make=type("Odd", (Tools,), {"get_reward": lambda self: value}))
    talk = begin(host)
    assert not drawn(talk, "12")
    with pytest.raises(RewardError, match="expected a finite number or None"):
        talk.end()
    survived("faults", 1)


def test_a_reset_that_fails_or_hangs_stops_the_run_by_its_name(survived):
    def fails(self, **row):
        raise KeyError("row")

    with pytest.raises(RewardError, match="raised KeyError"):
        begin(hold(make=type("Odd", (Tools,), {"reset": fails})))
    with pytest.raises(RewardError, match=r"took longer than 0\.2 seconds"):
        begin(hold(make=type("Odd", (Tools,), {"reset": lambda self, **row: time.sleep(30)}), timeout=0.2))
    survived("faults", 2)


def test_the_public_functions_of_a_file_are_tools(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        'from json import dumps\n\ndef add(a: int) -> int:\n    """Add one.\n\n    Args:\n        a: number\n    """\n'
        "    return a + 1\n\ndef _hidden(): ...\n"
    )
    host = hold(make=None, tools=load_tools(str(path)))
    talk = begin(host)
    assert drawn(talk, call("add", a=3))
    assert talk.messages[-1] == {"role": "tool", "name": "add", "content": "4"}
    assert not drawn(talk, "4")
    assert talk.end().reward is None


class Opened(Tools):
    """One that opens what belongs to the thread that opened it, with a tool that needs no instance."""

    closed = 0

    def __init__(self) -> None:
        super().__init__()
        self.table = sqlite3.connect(":memory:")

    def reset(self, **row: object) -> None:
        """Begin."""
        self.table.execute("create table if not exists asked (a)")

    @staticmethod
    def negate(a: int) -> int:
        """Negate.

        Args:
            a: number
        """
        return -a

    def close(self) -> None:
        """Close the table."""
        self.table.close()
        Opened.closed += 1


def test_all_calls_of_environments_are_made_in_one_thread_and_they_are_closed():
    host = hold(make=Opened)
    talks = [begin(host) for _ in range(2)]
    assert drawn(talks[0], call("negate", a=3))
    assert talks[0].messages[-1]["content"] == "-3"
    assert drawn(talks[1], call("close"))
    assert "Tool close not found" in talks[1].messages[-1]["content"]
    for talk in talks:
        assert not drawn(talk, "3")
        talk.end()
    host.close()
    assert Opened.closed == 2
