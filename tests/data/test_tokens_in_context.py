"""Tokens of an answer are those that it has after its prompt, for every family of tokenizers."""

import pytest
from tokenizers import processors

from rlhf_engine.data import tokenize_row
from rlhf_engine.data.types import parse_row
from rlhf_engine.tokenizing import encode_prompt, load_tokenizer
from tests.data.texts import FAMILIES, family

BORDERS = [
    ("Once upon a time", "? She said."),
    ("She said:", " Hello world!"),
    ("The sky is blue.\n", "The answer is 42."),
    ("The answer is not", " 123."),
    ("", "Once upon a time"),
]
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
