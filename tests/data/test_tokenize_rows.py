"""Rows as tokens: strings as before, conversations by the chat template, and every way of being too long."""

import dataclasses
from types import SimpleNamespace

import pytest
from tokenizers import processors
from transformers import GenerationConfig, LlamaConfig

from rlhf_engine.commands.demo_task import build_tokenizer
from rlhf_engine.data import PromptOnly, RowError, Tally, tokenize_row, tokenize_rows
from rlhf_engine.data.tokenize import (
    encode,
    encode_prompt,
    end_answer,
    fit_to_length,
    load_tokenizer,
    read_eos_token_ids,
)
from rlhf_engine.data.types import parse_row
from rlhf_engine.errors import ConfigError
from tests.data.texts import CHATML, FAMILIES, chat_tokenizer, family, said

WORDS = build_tokenizer(["one two three four five six seven eight"])
CHAT = chat_tokenizer()
ASK, BLUE, GREEN = said("user", "Sky?"), said("assistant", "blue"), said("assistant", "green\n")


def row(kind="preference", **columns):
    return parse_row(columns, kind, place="a.jsonl:1")


PAIR = row(prompt="one two three", chosen="four five", rejected="six")  # 4 tokens with <bos>; 3 and 2 with <eos>


def test_strings_are_tokens_as_ever():
    found = tokenize_row(PAIR, WORDS)
    assert found.prompt == encode_prompt(WORDS, "one two three")
    # words alone: a tokenizer that splits at white space and drops it joins with spaces
    assert found.answers == tuple([*encode(WORDS, text), WORDS.eos_token_id] for text in ("four five", "six"))
    assert tokenize_row(row("prompt_only", prompt="one"), WORDS).answers == ()
    liked = row("unpaired_preference", prompt="one", completion="two", label=1)
    assert tokenize_row(liked, WORDS).answers == ([*encode(WORDS, "two"), WORDS.eos_token_id],)


def test_conversations_are_the_template_s_text():
    found = tokenize_row(row(prompt=[ASK], chosen=[BLUE], rejected=[GREEN]), CHAT)
    assert CHAT.decode(found.prompt) == "<|im_start|>user\nSky?<|im_end|>\n<|im_start|>assistant\n"
    # up to the end token, without the line feed after it; a rollout stops there, too
    assert [CHAT.decode(a) for a in found.answers] == ["blue<|im_end|>", "green\n<|im_end|>"]
    assert found.answers[0].count(CHAT.eos_token_id) == 1
    assert found.text == CHAT.decode(found.prompt)
    assert tokenize_row(row("prompt_only", prompt="as it is"), CHAT).text == "as it is"


def test_the_template_writes_special_tokens_itself():
    """A tokenizer that begins texts with <bos> must not write a second one before the template's."""
    tokenizer = build_tokenizer(["one two user assistant"])
    tokenizer.chat_template = (
        "{{ bos_token }} {% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    talk = row("prompt_completion", prompt=[said("user", "one")], completion=[said("assistant", "two")])
    found = tokenize_row(talk, tokenizer)
    assert tokenizer.convert_ids_to_tokens(found.prompt) == ["<bos>", "user", "one", "assistant"]
    assert tokenizer.convert_ids_to_tokens(found.answers[0]) == ["two", "<eos>"]  # added, as the template has none


def test_where_an_answer_ends():
    decode = lambda ids: "".join({9: "\n", 1: "a"}.get(i, "?") for i in ids)  # noqa: E731 - 7 is the end token
    tokenizer = SimpleNamespace(decode=decode, eos_token_id=7)
    assert end_answer(tokenizer, [1, 7, 9]) == [1, 7]
    assert end_answer(tokenizer, [1, 7]) == [1, 7]
    assert end_answer(tokenizer, [1, 9]) == [1, 9, 7]  # no end token of its own
    assert end_answer(tokenizer, [1, 7, 1, 7, 9, 9]) == [1, 7, 1, 7]
    assert end_answer(tokenizer, [7, 1]) == [7, 1, 7]  # an end token inside ends nothing
    assert end_answer(tokenizer, []) == [7]
    assert end_answer(tokenizer, [1, 6, 9], (6, 7)) == [1, 6]  # an end of turn that is not the tokenizer's own


def test_answers_end_where_rollouts_stop(tmp_path):
    """The generation config names the template's end of turn, which the tokenizer's end-of-sequence token is not."""
    tokenizer = chat_tokenizer()
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token = "<|im_start|>"  # any other
    assert tokenizer.eos_token_id != turn
    LlamaConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(tmp_path)
    assert read_eos_token_ids(tokenizer, tmp_path) == (tokenizer.eos_token_id,)
    GenerationConfig(eos_token_id=[turn]).save_pretrained(tmp_path)
    ends = read_eos_token_ids(tokenizer, tmp_path)
    assert ends == tuple(sorted((turn, tokenizer.eos_token_id)))
    talk = row("prompt_completion", prompt=[ASK], completion=[BLUE])
    assert tokenizer.decode(tokenize_row(talk, tokenizer, ends).answers[0]) == "blue<|im_end|>"
    assert tokenizer.decode(tokenize_row(talk, tokenizer).answers[0]) == "blue<|im_end|>\n<|im_start|>"
    plain = row("prompt_completion", prompt="Sky?", completion="blue<|im_end|>")
    assert tokenizer.decode(tokenize_row(plain, tokenizer, ends).answers[0]) == "blue<|im_end|>"


def test_an_answer_that_ends_already_gets_no_second_end():
    rows = [row("prompt_completion", prompt="two", completion=text) for text in (" one<eos>", " one")]
    assert tokenize_row(rows[0], WORDS).answers == tokenize_row(rows[1], WORDS).answers


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(ConfigError, match=r"^model_name_or_path: expected a tokenizer with a chat template"):
        tokenize_rows(
            [row("prompt_only", prompt=[ASK])], WORDS, Tally(source="s", read=1, max_bad_rows=1), max_length=9
        )


def test_rows_that_a_template_does_not_fit_are_bad():
    for template, message in [
        ("{{ messages | length }}" + CHATML, "begins with that of the prompt, got other tokens from token 0 on"),
        ("{{ raise_exception('no system here') }}", "messages that the chat template takes, got no system here"),
        ("{{ messages[5]['role'] }}", "messages that the chat template takes, got "),
        ("{{ 'x' + messages[0] }}", "messages that the chat template takes, got "),
    ]:
        tally = Tally(source="s", read=2, max_bad_rows=1)
        talk = row("prompt_completion", prompt=[ASK], completion=[BLUE])
        kept = tokenize_rows(
            [talk, row("prompt_completion", prompt="a", completion="b")], chat_tokenizer(template), tally, max_length=99
        )
        assert len(kept) == 1
        assert tally.n_bad == 1
        with pytest.raises(RowError, match=message):
            tokenize_row(talk, chat_tokenizer(template))


def test_a_prompt_without_tokens_is_bad():
    with pytest.raises(RowError, match="a prompt of at least one token, got"):
        tokenize_row(PromptOnly(prompt="", group="", place="p"), CHAT)
    with pytest.raises(RowError, match="a prompt of at least one token, got"):
        tokenize_row(row("prompt_only", prompt=[ASK]), chat_tokenizer("{# nothing #}"))


@pytest.mark.parametrize(("tokenizer", "first"), [(WORDS, "<bos>"), (CHAT, CHAT.eos_token)])
def test_an_answer_may_have_an_empty_prompt(tokenizer, first):
    """It begins with the tokenizer's first token, or where there is none with the one that ends texts."""
    rows = [
        parse_row({"prompt": prompt, "completion": "two", "label": True}, "unpaired_preference", place=f"a:{i}")
        for i, prompt in enumerate(("", " ", "one"))
    ]
    assert [r.group for r in rows] == ["a:0", "a:1", "one"]  # two answers to nothing do not answer the same
    tally = Tally(source="a", read=3)
    found = tokenize_rows(rows, tokenizer, tally, max_length=9)
    assert [tokenizer.convert_ids_to_tokens(t.prompt) for t in found[:2]] == [[first], [first]]
    assert found[0].answers == found[2].answers
    assert tally.text() == "a: 3 rows read, 3 used, 2 with an empty prompt"
    assert not tally.is_plain


WHOLE = tokenize_row(PAIR, WORDS)


def cut(max_length, truncation, tokens=WHOLE):
    return fit_to_length(tokens, max_length, truncation, "tokens of prompt and answer")


def test_what_fits_is_left_alone_and_what_does_not_is_an_error_or_dropped():
    for truncation in ("error", "drop", "keep_end", "keep_start", "both"):
        assert cut(7, truncation) is WHOLE  # the prompt and the longer answer
    with pytest.raises(RowError, match=r"^expected at most 6 tokens of prompt and answer, got 7$"):
        cut(6, "error")
    assert cut(6, "drop") is None


def test_keep_end_takes_the_oldest_tokens_of_the_prompt():
    for length in (6, 5, 4):
        found = cut(length, "keep_end")
        assert (found.prompt, found.answers, found.truncated) == (WHOLE.prompt[7 - length :], WHOLE.answers, True)
    with pytest.raises(RowError, match="expected at most 3 tokens"):
        cut(3, "keep_end")  # the answer alone would fill it


def test_keep_end_keeps_the_beginning_of_sequence_token():
    tally = Tally(source="s", read=1)
    (found,) = tokenize_rows([PAIR], WORDS, tally, max_length=6, truncation="keep_end")
    assert WORDS.convert_ids_to_tokens(found.prompt) == ["<bos>", "two", "three"]
    assert (found.answers, tally.truncated) == (WHOLE.answers, 1)
    with pytest.raises(ConfigError, match="expected at most 4 tokens"):  # nothing of the prompt's own would be left
        tokenize_rows([PAIR], WORDS, Tally(source="s", read=1), max_length=4, truncation="keep_end")


def test_keep_start_takes_the_last_tokens_of_the_answers():
    found = cut(6, "keep_start")
    assert (found.prompt, found.answers) == (WHOLE.prompt, (WHOLE.answers[0][:2], WHOLE.answers[1]))
    assert found.answers[0][-1] != WORDS.eos_token_id  # a cut answer does not claim to have ended
    assert cut(5, "keep_start").answers == (WHOLE.answers[0][:1], WHOLE.answers[1][:1])
    with pytest.raises(RowError, match="expected at most 4 tokens"):
        cut(4, "keep_start")  # the prompt alone would fill it


def test_both_leaves_half_of_the_length_to_each():
    for prompt, answer, length, left in [
        (10, 60, 50, (10, 40)),  # a short prompt stays whole
        (100, 20, 50, (30, 20)),  # and so does a short answer
        (100, 60, 50, (25, 25)),
        (100, 60, 51, (26, 25)),
        (30, 21, 50, (29, 21)),
        (9, 9, 2, (1, 1)),
    ]:
        whole = dataclasses.replace(WHOLE, prompt=list(range(prompt)), answers=(list(range(answer)), [7]))
        found = cut(length, "both", whole)
        assert (found.prompt, found.answers) == (whole.prompt[prompt - left[0] :], (whole.answers[0][: left[1]], [7]))
        assert found.truncated
        with pytest.raises(RowError, match="expected at most 1 tokens"):
            cut(1, "both", whole)  # one token of each stays


def test_prompts_alone():
    prompt = tokenize_row(row("prompt_only", prompt="one two three"), WORDS)
    assert cut(2, "keep_end", prompt).prompt == cut(2, "both", prompt).prompt == prompt.prompt[-2:]
    for length, truncation in ((0, "keep_end"), (-3, "keep_end"), (2, "keep_start"), (2, "error")):
        with pytest.raises(RowError):
            cut(length, truncation, prompt)


def test_nothing_is_cut_or_dropped_without_being_counted():
    rows = [row("prompt_completion", prompt="one two", completion=answer) for answer in ("three", "four five six")]
    for truncation, n, dropped, truncated, text in (
        ("drop", 1, 1, 0, "s: 2 rows read, 1 used, 1 dropped as too long"),
        ("keep_end", 2, 0, 1, "s: 2 rows read, 2 used, 1 truncated"),
        ("keep_start", 2, 0, 1, "s: 2 rows read, 2 used, 1 truncated"),
    ):
        tally = Tally(source="s", read=2)
        found = tokenize_rows(rows, WORDS, tally, max_length=6, truncation=truncation)
        assert (len(found), tally.used, tally.dropped, tally.truncated) == (n, n, dropped, truncated)
        assert tally.text() == text
        assert not tally.is_plain
        assert max(len(t.prompt) + len(t.answers[0]) for t in found) <= 6
    message = r"^a\.jsonl:1: expected at most 5 tokens of prompt and answer, got 7; truncation=drop leaves"
    with pytest.raises(ConfigError, match=message):
        tokenize_rows(rows, WORDS, Tally(source="s", read=2), max_length=5)
    with pytest.raises(ConfigError, match=r"expected at least one row in 's', got .*0 used, 2 dropped as too long"):
        tokenize_rows(rows, WORDS, Tally(source="s", read=2), max_length=3, truncation="drop")


BORDERS = [
    ("Once upon a time", "? She said."), ("She said:", " Hello world!"), ("The sky is blue.\n", "The answer is 42."),
    ("The answer is not", " 123."), ("", "Once upon a time"),
]  # fmt: skip
"""Prompts and answers between which no token reaches across."""
ACROSS = [("Hello wor", "ld!"), ("She said: ", "Hello"), ("The answer: 1", "23."), ("a cat and a d", "og were old.")]


def pair(prompt: str, answer: str):
    return parse_row({"prompt": prompt, "completion": answer}, "prompt_completion", place="p")


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_has_the_tokens_that_it_has_in_the_text(name):
    tokenizer = family(name)
    for prompt, answer in BORDERS:
        whole = tokenizer(prompt + answer)["input_ids"]  # transformers' own, with its <s>
        n = len(tokenizer(prompt)["input_ids"])
        found = tokenize_row(pair(prompt, answer), tokenizer)
        assert (found.prompt, *found.answers) == (whole[:n], [*whole[n:], tokenizer.eos_token_id]), (prompt, answer)


@pytest.mark.parametrize("name", FAMILIES)
def test_where_a_token_reaches_across_the_text_is_kept_and_so_is_the_prompt(name):
    """The prompt is what generation begins with; `world` is never drawn after `wor`, but `ld` is."""
    tokenizer = family(name)
    crossed = 0
    for prompt, answer in ACROSS:
        whole, alone = tokenizer(prompt + answer)["input_ids"], tokenizer(prompt)["input_ids"]
        crossed += whole[: len(alone)] != alone
        found = tokenize_row(pair(prompt, answer), tokenizer)
        assert found.prompt == alone
        (ids,) = found.answers
        assert ids[-1] == tokenizer.eos_token_id
        both = tokenizer.decode([*found.prompt, *ids[:-1]], clean_up_tokenization_spaces=False)
        assert both == tokenizer.decode(whole, clean_up_tokenization_spaces=False), (prompt, answer)
    assert crossed >= 1


def test_the_pretrained_story_model_s_answers_begin_without_a_space(stories):
    tokenizer = load_tokenizer(stories)
    found = tokenize_row(pair("Once upon a time", ", there was a girl."), tokenizer)
    assert tokenizer.convert_ids_to_tokens(found.answers[0])[0] == ","
    assert [*found.prompt, *found.answers[0][:-1]] == tokenizer("Once upon a time, there was a girl.")["input_ids"]


def test_a_prompt_s_own_beginning_and_end():
    """What the tokenizer adds is there once at the beginning and never at the end; what the text says stays."""
    tokenizer = family("bpe")
    once = tokenizer("Once upon", add_special_tokens=False)["input_ids"]
    for single in ("<s> $A", "<s> $A </s>", "$A </s>", "$A"):
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        begin = [1] if single.startswith("<s>") else []
        assert encode_prompt(tokenizer, "Once upon") == [*begin, *once]
        assert encode_prompt(tokenizer, "Once upon</s>") == [*begin, *once, 2]
        assert encode_prompt(tokenizer, "<s>Once upon")[:2] == [1, once[0]]
        (answer,) = tokenize_row(pair("Once upon", " a time"), tokenizer).answers
        assert answer == [*tokenizer("Once upon a time", add_special_tokens=False)["input_ids"][len(once) :], 2]
