"""Rows as others have them: conversations, ShareGPT, Alpaca, texts, tools, prefilled answers, thoughts, long talks."""

import json
import warnings

import pytest

from rlhf_engine.config import TrainConfig, parse_config
from rlhf_engine.data import Tally, tokenize_prompts, tokenize_row, tokenize_rows
from rlhf_engine.errors import ConfigError
from tests.data.texts import CHATML, chat_tokenizer, load, said, write_lines

SFT = ("preference", "implicit_preference", "prompt_completion")
RL = ("prompt_only",)
ASK, BLUE, WHY, LIGHT = (
    said("user", "Sky?"), said("assistant", "blue"), said("user", "Why?"), said("assistant", "light")
)  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
WITH_TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools | map(attribute='function') | map(attribute='name') | join(',') }}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is not none %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def texts(tokenizer, rows):
    """Prompt and answers of each row as the model reads them."""
    found = [tokenize_row(row, tokenizer) for row in rows]
    return [(tokenizer.decode(t.prompt), *map(tokenizer.decode, t.answers)) for t in found]


def chat(*turns: dict[str, str]) -> str:
    return "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in turns)


OPEN, END = "<|im_start|>assistant\n", "<|im_end|>"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK, BLUE, WHY, LIGHT], "num_turns": 2, "source": "Airoboros"},  # as Capybara's
        {"conversations": [ASK, BLUE, WHY, LIGHT]},
        {"conversations": [{"from": {"user": "human", "assistant": "gpt"}[t["role"]], "value": t["content"]}
                           for t in (ASK, BLUE, WHY, LIGHT)], "id": "x"},  # ShareGPT's
    ],
)  # fmt: skip
def test_conversations_are_learned_turn_by_turn_and_answered_at_their_end(tmp_path, row):
    path, tokenizer = write_lines(tmp_path / "a.jsonl", row), chat_tokenizer()
    rows, tally = load(path, kinds=SFT)
    assert texts(tokenizer, rows) == [(chat(ASK) + OPEN, "blue" + END), (chat(ASK, BLUE, WHY) + OPEN, "light" + END)]
    assert tally.read == 2
    (row_of_rl,), _ = load(path, kinds=RL)
    assert texts(tokenizer, [row_of_rl]) == [(chat(ASK, BLUE, WHY) + OPEN,)]
    assert row_of_rl.columns.get("num_turns") == row.get("num_turns")
    evaluated, _ = load(path, kinds=("prompt_completion", "prompt_only"))
    assert texts(tokenizer, evaluated) == [(chat(ASK, BLUE, WHY) + OPEN, "light" + END)]


def test_other_forms(tmp_path):
    tokenizer, system = chat_tokenizer(), said("system", "Short.")
    path = tmp_path / "a.jsonl"
    for row, learned, asked in (
        ({"instruction": "Add.", "input": "1 2", "output": "3"},
         (chat(said("user", "Add.\n\n1 2")) + OPEN, "3" + END), chat(said("user", "Add.\n\n1 2")) + OPEN),
        ({"instruction": "Sky?", "input": "", "output": "blue", "text": "Below is …"},
         (chat(ASK) + OPEN, "blue" + END), chat(ASK) + OPEN),
        ({"system": "Short.", "conversations": [ASK, BLUE]},
         (chat(system, ASK) + OPEN, "blue" + END), chat(system, ASK) + OPEN),
        ({"messages": [BLUE, WHY, LIGHT, ASK]}, (chat(BLUE, WHY) + OPEN, "light" + END),
         chat(BLUE, WHY, LIGHT, ASK) + OPEN),
        ({"prompt": "Sky?", "messages": [ASK, BLUE]}, (chat(ASK) + OPEN, "blue" + END), "Sky?"),
        ({"text": "Once upon", "id": 3}, (tokenizer.eos_token, "Once upon" + END), None),
    ):  # fmt: skip
        write_lines(path, row)
        assert texts(tokenizer, load(path, kinds=SFT)[0]) == [learned]
        if asked is not None:
            assert texts(tokenizer, load(path, kinds=RL)[0]) == [(asked,)]
    with pytest.raises(ConfigError, match=r"expected the columns \(prompt\), or messages, conversations, or .* 'text'"):
        load(path, kinds=RL)
    write_lines(path, {"messages": [ASK, BLUE], "label": True}, {"messages": [ASK, LIGHT], "label": False})
    liked, _ = load(path, kinds=("preference", "unpaired_preference"))
    assert [(row.label, text) for row, text in zip(liked, texts(tokenizer, liked), strict=True)] == [
        (True, (chat(ASK) + OPEN, "blue" + END)),
        (False, (chat(ASK) + OPEN, "light" + END)),
    ]
    write_lines(path, {"messages": [ASK, BLUE]})
    with pytest.raises(ConfigError, match=r"expected the columns \(prompt, chosen, rejected\) or .*, got \['messages'"):
        load(path, kinds=("preference", "unpaired_preference", "implicit_preference"))
    write_lines(path, {"messages": [ASK, BLUE]}, {"messages": "Sky?"})
    with pytest.raises(ConfigError, match=r"a.jsonl:2: expected a list of messages in column 'messages', got 'Sky\?'"):
        load(path, kinds=SFT)


def test_what_rows_say_to_the_template_reaches_it(tmp_path):
    """`tools` as a list or as JSON, and `chat_template_kwargs`, as TRL passes them; tables give every row every key."""
    tokenizer, path = chat_tokenizer(WITH_TOOLS), tmp_path / "a.jsonl"
    tools, quiet = "<|im_start|>tools\nadd<|im_end|>\n", "<think>\n\n</think>\n\n"
    rows = [
        {"prompt": [ASK], "tools": TOOLS},
        {"prompt": [ASK], "tools": json.dumps(TOOLS)},
        {"prompt": [ASK], "chat_template_kwargs": {"enable_thinking": False, "other": None}},
        {"prompt": [ASK], "tools": [], "chat_template_kwargs": None},
        {"prompt": "plain", "tools": "hammer"},
    ]
    found, _ = load(write_lines(path, *rows), kinds=RL)
    plain = chat(ASK) + OPEN
    assert texts(tokenizer, found) == [(tools + plain,), (tools + plain,), (plain + quiet,), (plain,), ("plain",)]
    prompts = tokenize_prompts(
        found[:1], tokenizer, Tally(source="s", read=1), context_length=99, max_completion_length=9
    )
    assert prompts.prompts == [tools + plain]  # the text that reward functions get
    talk = [ASK, {**said("assistant", ""), "content": None, "tool_calls": CALLS}, said("tool", "3"), BLUE]
    learned, _ = load(write_lines(path, {"messages": talk, "tools": TOOLS}), kinds=SFT)
    assert texts(tokenizer, learned) == [
        (tools + plain, "<call>add</call>" + END),
        (tools + plain + "<call>add</call><|im_end|>\n" + chat(said("tool", "3")) + OPEN, "blue" + END),
    ]
    for row, message in (
        ({"prompt": [ASK], "tools": "hammer"}, "a list or its JSON in column 'tools', got 'hammer'"),
        ({"prompt": [ASK], "chat_template_kwargs": [1]}, r"an object or its JSON in column 'chat_template_kw.* \[1\]"),
        ({"prompt": [{"role": "user", "content": None}]}, "a string as content of every message in column 'prompt', g"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "text as every part of a message in column"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(write_lines(path, row), kinds=RL)


def test_parts_and_prefilled_answers(tmp_path):
    """Text parts are one text; a prompt that ends with the assistant's words is gone on with, as in TRL."""
    tokenizer, path = chat_tokenizer(), tmp_path / "a.jsonl"
    parts = {"role": "user", "content": [{"type": "text", "text": "Sk"}, {"type": "text", "text": "y?"}]}
    row = {"prompt": [parts, said("assistant", "It is")], "completion": [said("assistant", " blue")]}
    write_lines(path, row)
    assert texts(tokenizer, load(path, kinds=RL)[0]) == [(chat(ASK) + OPEN + "It is",)]
    assert texts(tokenizer, load(path, kinds=SFT)[0]) == [(chat(ASK) + OPEN + "It is", " blue" + END)]


def test_templates_that_open_thoughts(tmp_path):
    """Where the template writes them for answers, too, a row is learned as it is; where not, up to where texts part."""
    path = write_lines(tmp_path / "a.jsonl", {"prompt": [ASK], "completion": [BLUE]})
    rows, _ = load(path, kinds=SFT)
    opened = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    written = opened.replace(
        "{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texts(chat_tokenizer(written), rows) == [
            (chat(ASK) + OPEN + "<think>\n", "\n</think>\n\nblue" + END)
        ]  # fmt: skip
    with pytest.warns(UserWarning, match=r"begins answers with '<think>\\n', and writes .* chat_template_kwargs such"):
        assert texts(chat_tokenizer(opened), rows) == [(chat(ASK) + OPEN, "blue" + END)]
    pairs, _ = load(write_lines(path, {"prompt": [ASK], "chosen": [BLUE], "rejected": [LIGHT]}))
    with pytest.warns(UserWarning, match="begins answers with"):
        assert texts(chat_tokenizer(opened), pairs) == [(chat(ASK) + OPEN, "blue" + END, "light" + END)]


def test_conversations_are_cut_by_whole_turns(tmp_path):
    """The system turn stays, what is left begins with a user's turn, and rewards get the prompt that the model saw."""
    tokenizer, system = chat_tokenizer(), said("system", "Short.")
    talk = [system, ASK, BLUE, WHY]
    rows, _ = load(write_lines(tmp_path / "a.jsonl", {"prompt": talk}), kinds=RL)
    long, short = chat(*talk) + OPEN, chat(system, WHY) + OPEN
    most = len(tokenizer(long)["input_ids"])
    shortest = len(tokenizer(short)["input_ids"])
    for room, seen in ((most, long), (most - 1, short), (shortest, short)):
        prompts = tokenize_prompts(
            rows, tokenizer, Tally(source="s", read=1), context_length=room + 9, max_completion_length=9,
            truncation="keep_end",
        )  # fmt: skip
        assert [tokenizer.decode(ids) for ids in prompts.ids] == prompts.prompts == [seen]
    assert prompts.rows[0].prompt == (system, WHY)
    with pytest.raises(ConfigError, match=rf"at most {shortest - 1} .*, got {most}; truncation=drop leaves such rows"):
        tokenize_rows(rows, tokenizer, Tally(source="s", read=1), max_length=shortest - 1, truncation="keep_end")
    answer = said("assistant", "light " * 20)
    rows, _ = load(write_lines(tmp_path / "a.jsonl", {"prompt": talk, "completion": [answer]}), kinds=SFT)
    for truncation, room, answer in (
        ("keep_end", 121, "light " * 20 + END),
        ("both", shortest, ("light " * 20)[:shortest]),
    ):
        tally = Tally(source="s", read=1)
        (cut,) = tokenize_rows(rows, tokenizer, tally, max_length=shortest + room, truncation=truncation)
        assert (tokenizer.decode(cut.prompt), tokenizer.decode(cut.answers[0]), tally.truncated) == (short, answer, 1)
    words, _ = load(write_lines(tmp_path / "a.jsonl", {"prompt": "one two three"}), kinds=RL)
    prompts = tokenize_prompts(
        words, tokenizer, Tally(source="s", read=1), context_length=14, max_completion_length=9, truncation="keep_end"
    )
    assert prompts.prompts == ["three"]


def test_options_for_conversations(tmp_path):
    argv = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"]
    config = parse_config(
        TrainConfig, [*argv, "--system_prompt", "Short.", "--chat_template_kwargs", '{"enable_thinking": false}']
    )
    file = tmp_path / "c.yaml"
    file.write_text(config.to_yaml())
    assert parse_config(TrainConfig, ["--config", str(file)]) == config
    for wrong in ("{", "[1]", "3"):
        with pytest.raises(ConfigError, match=r"^chat_template_kwargs: expected a JSON object or none, got "):
            parse_config(TrainConfig, [*argv, "--chat_template_kwargs", wrong])
    tokenizer, path, quiet = chat_tokenizer(WITH_TOOLS), tmp_path / "a.jsonl", "<think>\n\n</think>\n\n"
    own = [said("system", "Long."), ASK]
    write_lines(path, {"prompt": [ASK]}, {"prompt": own, "chat_template_kwargs": {"enable_thinking": True}})
    rows, _ = load(path, kinds=RL, options=config)
    assert texts(tokenizer, rows) == [(chat(said("system", "Short."), ASK) + OPEN + quiet,), (chat(*own) + OPEN,)]
    with pytest.raises(ConfigError, match="expected messages for system_prompt and chat_template_kwargs, got 'Sky"):
        load(write_lines(path, {"prompt": "Sky?"}), kinds=RL, options=config)
