"""Text to token ids and back; rows of plain strings or chat templates, and what becomes of those that are too long.

The tokens of an answer are those that it has after its prompt (`encode_continuation`); those of the prompt are the ones
that generation begins with. An answer ends with its last end token, at which rollouts stop as well (`end_answer`). An
empty prompt of an answer is the beginning-of-sequence token, or else the end-of-sequence token.

Conversations: the prompt is the chat template's text of its messages with the generation prompt, or, where they end
with the assistant's words, up to these. The text of all messages has to begin with it, or the row is bad: a policy
would be trained on answers to a prompt that it is never given. Some templates open thoughts in the generation prompt
and write none in answers. As in TRL, such a prompt ends where the two texts part, with a warning.

`truncation` says what becomes of a row of more than `max_length` tokens; docs/guides/train.md has the table. Of a
preference both answers are measured against the same prompt, and the longer one decides. At least one token of the
prompt stays, and where answers are cut one of each; a row that cannot be made to fit is bad.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_engine.data.read import Tally
from rlhf_engine.data.types import (
    Message,
    Preference,
    PromptCompletion,
    PromptOnly,
    Row,
    RowError,
    Text,
    UnpairedPreference,
    shown,
)
from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import local_folder
from rlhf_engine.hydra.loading import read_config
from rlhf_engine.io import check_model

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_BEGINNINGS = ("", "\n", "x", ".", "a", "0")
"""Texts after which an answer is tokenized as it is in the middle of one; which of them serves depends on both."""
_ELSEWHERE = "a reward model with another tokenizer can be one of the reward_funcs"


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model; ConfigError without one, or without an end-of-sequence token."""
    folder = local_folder(path)
    if not folder.is_dir():
        raise ConfigError(
            f"model_name_or_path: expected a model folder or owner/name of the Hub, got {str(path)!r}, which is neither"
        )
    check_model(folder, weights=False)
    tokenizer = _read_tokenizer(folder, f"model_name_or_path: expected a tokenizer in {str(path)!r}, got")
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "model_name_or_path: expected a tokenizer with an end-of-sequence token, got one without in "
            f"{str(path)!r}; set eos_token in its tokenizer_config.json, or answers could never end"
        )
    return tokenizer


def require_same_tokens(tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike[str], vocabulary: int) -> None:
    """Raise ConfigError unless the reward model reads the policy's ids alike, as far as its folder tells."""
    place = f"reward_model_path: expected {{}} in {str(folder)!r}, got "
    try:
        size = int(read_config(folder).get_text_config().vocab_size)
    except ValueError as error:
        raise ConfigError(str(error).replace("model_name_or_path", "reward_model_path", 1)) from error
    folder = local_folder(folder)
    check_model(folder, weights=False)
    if not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):  # transformers may make one up
        if size != vocabulary:
            raise ConfigError(
                place.format(f"a vocabulary of {vocabulary} tokens, the policy's,") + f"{size}; {_ELSEWHERE}"
            )
        return
    theirs = _read_tokenizer(folder, place.format("a tokenizer").rstrip()).get_vocab()
    differing = sorted((i, token) for token, i in tokenizer.get_vocab().items() if theirs.get(token) != i or i >= size)
    if differing:
        i, token = differing[0]
        raise ConfigError(
            place.format("the policy's tokenizer")
            + f"one in which {len(differing)} of its tokens have another id or none, such as {token!r} (id {i} of the "
            f"policy's, {theirs.get(token)} of {size} here); {_ELSEWHERE}"
        )


def _read_tokenizer(folder: Path, expected: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder. Raises ConfigError, which begins with what was expected, where none can be read."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:  # of a config that lies, too
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{expected}: {reason}") from error
    return tokenizer


def eos_token_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> tuple[int, ...]:
    """Every token that ends an answer by tokenizer or generation config; ConfigError for one the model lacks."""
    return _ends(tokenizer, model.generation_config, int(model.config.get_text_config().vocab_size))


def read_eos_token_ids(tokenizer: PreTrainedTokenizerBase, path: str | os.PathLike[str]) -> tuple[int, ...]:
    """`eos_token_ids` of a model folder, without loading the model."""
    config = read_config(path)
    ends, path = GenerationConfig.from_model_config(config), local_folder(path)
    if (Path(path) / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return _ends(tokenizer, ends, int(config.get_text_config().vocab_size))


def _ends(tokenizer: PreTrainedTokenizerBase, config: GenerationConfig | None, vocabulary: int) -> tuple[int, ...]:
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    configured = config.eos_token_id if config is not None else None
    ends += configured if isinstance(configured, list) else [] if configured is None else [configured]
    wrong = [token for token in ends if type(token) is not int or not 0 <= token < vocabulary]
    if wrong:
        raise ConfigError(
            f"model_name_or_path: expected end-of-sequence tokens among the model's ids of 0 to {vocabulary - 1}, got "
            f"{wrong[0]!r} from its tokenizer or its generation config (eos_token_id)"
        )
    return tuple(sorted(set(ends)))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text alone, to which the tokenizer adds none of its special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a prompt with the tokenizer's beginning, not doubled, and without the end that it adds."""
    encoded = tokenizer(prompt, return_special_tokens_mask=True)
    ids, added = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
    while len(ids) > 1 and added[len(ids) - 1]:
        ids.pop()
    n = next((i for i, special in enumerate(added) if not special), 0)
    return ids[n:] if ids[:n] == ids[n : 2 * n] else ids


def encode_continuation(
    tokenizer: PreTrainedTokenizerBase, prompt: str, prompt_ids: list[int], whole: str, whole_ids: list[int]
) -> list[int]:
    """Token ids of an answer where it stands: those of prompt and answer together, without the prompt's.

    A token of both together may reach across the border. Generation begins with the prompt's own ids, so these stay,
    and the answer gets ids with which both decode to the same text: those that it has after some other beginning. A
    tokenizer that does not keep white space may have none such; the answer then has the ids that it has alone.
    """
    if whole_ids[: len(prompt_ids)] == prompt_ids:
        return whole_ids[len(prompt_ids) :]
    answer, decode = whole[len(prompt) :], partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    text = decode(whole_ids)
    for beginning in _BEGINNINGS:
        first, ids = encode(tokenizer, beginning), encode(tokenizer, beginning + answer)
        rest = ids[len(first) :]
        if [*first, *rest] == ids and decode([*prompt_ids, *rest]) == text:
            return rest
    return encode(tokenizer, answer)


def end_answer(tokenizer: PreTrainedTokenizerBase, ids: list[int], end_ids: Sequence[int] | None = None) -> list[int]:
    """Token ids up to the last of `end_ids` (None: end-of-sequence), where reward models read; added if missing."""
    assert tokenizer.eos_token_id is not None
    ends = end_ids or (int(tokenizer.eos_token_id),)
    last = next((i for i in reversed(range(len(ids))) if ids[i] in ends), None)
    if last is not None and not str(tokenizer.decode(ids[last + 1 :])).strip():
        return ids[: last + 1]
    return [*ids, int(tokenizer.eos_token_id)]


def text_of(completion: Any) -> str:
    """Text of an answer: a string, or of TRL's conversations the last message's content."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"] or "")


def warn_of_unknown(tokenizer: PreTrainedTokenizerBase, answers: Sequence[Sequence[int]]) -> None:
    """Warn where answers have ids beyond the tokenizer's, which a model with a padded vocabulary can draw."""
    n = len(tokenizer)
    if any(max(ids, default=0) >= n for ids in answers):
        warnings.warn(
            f"answers have token ids of {n} and more, which the model has and its tokenizer lacks; no text has them",
            stacklevel=2,
        )


# ---- rows ------------------------------------------------------------------------------------------------------------


Truncation = Literal["error", "drop", "keep_end", "keep_start", "both"]
_TAKEN = ("prompts", "completion", "completions", "completion_ids")
"""Columns that reward functions do not get, as in TRL: arguments of theirs, and the data's own answer."""


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """A row with its token ids."""

    row: Row  # row that the tokens are of; where turns of a conversation were cut, without these
    prompt: list[int]  # token ids of the prompt, at least one
    answers: tuple[list[int], ...]
    """Token ids of the answers: none of a prompt alone, one completion, or chosen and rejected."""
    text: str = ""  # prompt as the model reads it; without the beginning that the tokenizer adds
    truncated: bool = False  # whether tokens were cut


def tokenize_rows(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    tally: Tally,
    *,
    max_length: int,
    truncation: Truncation = "error",
    limit_name: str = "tokens of prompt and answer",
    end_ids: Sequence[int] | None = None,
    vocabulary: int | None = None,
) -> list[Tokenized]:
    """Tokenize rows of at most max_length tokens, longer ones as `truncation` says; those that can be used."""
    tokenized = []
    for row in rows:
        try:
            tokens = tokenize_row(row, tokenizer, end_ids)
            if vocabulary is not None:
                _require_known(tokens, vocabulary, tokenizer)
            one = fit_to_length(tokens, max_length, truncation, limit_name, tokenizer=tokenizer, end_ids=end_ids)
        except RowError as error:
            tally.refuse(row.place, error)
            continue
        if one is None:
            tally.dropped += 1
        else:
            tally.truncated += one.truncated
            tally.without_prompt += not row.prompt
            tokenized.append(one)
    tally.check()
    return tokenized


def tokenize_row(row: Row, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int] | None = None) -> Tokenized:
    """Tokenize a row of any length, whose answers end with one of `end_ids`; RowError where it cannot be used."""
    answers: tuple[Text, ...] = ()
    if isinstance(row, Preference):
        answers = (row.chosen, row.rejected)
    elif isinstance(row, (PromptCompletion, UnpairedPreference)):
        answers = (row.completion,)
    encoded: Callable[..., list[int]] = encode_prompt if isinstance(row.prompt, str) else encode
    if isinstance(row.prompt, str):
        text = row.prompt
        wholes = [f"{text}{answer}" for answer in answers]
    else:
        text = _template(tokenizer, row, row.prompt, opens_answer=True)
        wholes = [_template(tokenizer, row, _joined(row.prompt, answer)) for answer in answers]
    prompt, ids = encoded(tokenizer, text), [encoded(tokenizer, whole) for whole in wholes]
    if not all(whole.startswith(text) for whole in wholes):
        prompt = _shared_beginning(tokenizer, row, prompt, wholes, ids)
        ends = [one[len(prompt) :] for one in ids]
    else:
        ends = [encode_continuation(tokenizer, text, prompt, *both) for both in zip(wholes, ids, strict=True)]
    if not prompt and not row.prompt and answers:
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        prompt = [int(first)]  # type: ignore[arg-type]
    if not prompt:
        raise RowError("a prompt of at least one token", shown(row.prompt))
    return Tokenized(
        row=row, prompt=prompt, answers=tuple(end_answer(tokenizer, end, end_ids) for end in ends), text=text
    )


def _require_known(tokens: Tokenized, vocabulary: int, tokenizer: PreTrainedTokenizerBase) -> None:
    highest = max(max(ids, default=0) for ids in (tokens.prompt, *tokens.answers))
    if highest >= vocabulary:
        raise RowError(
            f"tokens that the model has, with ids of 0 to {vocabulary - 1}",
            f"id {highest}, {shown(tokenizer.decode([highest]))}",
        )


def fit_to_length(
    tokens: Tokenized,
    max_length: int,
    truncation: Truncation,
    limit_name: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    end_ids: Sequence[int] | None = None,
) -> Tokenized | None:
    """Cut a row to max_length tokens; None if it is dropped, RowError where `truncation` cannot make it fit."""
    longest = max(map(len, tokens.answers), default=0)
    length = len(tokens.prompt) + longest
    if length <= max_length:
        return tokens
    if truncation == "drop":
        return None
    room = max_length - len(tokens.prompt)
    most = min(longest, {"keep_start": room, "both": max(room, max_length // 2)}.get(truncation, longest))
    shorter: Tokenized | None = None
    if truncation != "error" and (most > 0 or not tokens.answers):
        shorter = tokens if room >= most else _with_shorter_prompt(tokens, max_length - most, tokenizer, end_ids)
    if shorter is not None and (truncation != "keep_start" or tokens.answers):
        most = max_length - len(shorter.prompt)
        return dataclasses.replace(shorter, answers=tuple(a[:most] for a in shorter.answers), truncated=True)
    hint = "truncation=drop leaves such rows out" + ", keep_end cuts their prompts" * (truncation == "error")
    raise RowError(f"at most {max_length} {limit_name}", str(length), hint)


def _with_shorter_prompt(
    tokens: Tokenized, room: int, tokenizer: PreTrainedTokenizerBase | None, end_ids: Sequence[int] | None
) -> Tokenized | None:
    """The row without its prompt's oldest tokens or turns, of which `room` tokens stay at most; None: none can."""
    prompt = tokens.row.prompt
    if isinstance(prompt, str):
        first = int(tokenizer is not None and tokens.prompt[0] == tokenizer.bos_token_id)
        kept = tokens.prompt[max(first, len(tokens.prompt) - room + first) :]
        text = tokens.text if tokenizer is None else str(tokenizer.decode(kept))
        whole = dataclasses.replace(tokens, prompt=[*tokens.prompt[:first], *kept], text=text)
        return whole if room > first else None
    n = next((i for i, message in enumerate(prompt) if message["role"] not in ("system", "developer")), len(prompt))
    for i in range(n + 1, len(prompt)):
        if prompt[i]["role"] == "user" and tokenizer is not None:
            row = dataclasses.replace(tokens.row, prompt=(*prompt[:n], *prompt[i:]))
            shorter = tokenize_row(row, tokenizer, end_ids)
            if len(shorter.prompt) <= room:
                return shorter
    return None


def _template(
    tokenizer: PreTrainedTokenizerBase, row: Row, messages: Sequence[Message], *, opens_answer: bool = False
) -> str:
    """The chat template's text of messages. opens_answer: with what an answer goes on from."""
    if not tokenizer.chat_template:
        raise ConfigError(
            "model_name_or_path: expected a tokenizer with a chat template for rows of messages, got one without; set "
            "chat_template in its tokenizer_config.json, or give strings"
        )
    goes_on = opens_answer and messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=opens_answer and not goes_on,
            continue_final_message=goes_on,
            **row.template,
        )
    except (TemplateError, TypeError, ValueError) as error:  # what templates raise for messages they do not know
        reason = str(error).strip().partition("\n")[0]
        raise RowError("messages that the chat template takes", reason) from error
    assert isinstance(text, str)
    return text


def _joined(prompt: Sequence[Message], answer: Text) -> list[Message]:
    """Messages of prompt and answer; an answer that goes on with the assistant's words is in one message with them."""
    assert not isinstance(answer, str)
    if prompt[-1]["role"] != "assistant":
        return [*prompt, *answer]
    words = f"{prompt[-1]['content'] or ''}{answer[0]['content'] or ''}"
    return [*prompt[:-1], {**prompt[-1], **answer[0], "content": words}, *answer[1:]]


def _shared_beginning(
    tokenizer: PreTrainedTokenizerBase, row: Row, prompt: list[int], wholes: list[str], ids: list[list[int]]
) -> list[int]:
    """The prompt's tokens with which prompt and answers begin, where no answer goes on from the generation prompt."""
    assert not isinstance(row.prompt, str)
    places = enumerate(zip(prompt, *ids, strict=False))
    n = next((i for i, tokens in places if len(set(tokens)) > 1), min(map(len, (prompt, *ids))))
    history = _template(tokenizer, row, row.prompt)
    if not all(whole.startswith(history) for whole in wholes):
        raise RowError(
            "a chat template whose text of prompt and answer begins with that of the prompt",
            f"other tokens from token {n} on",
        )
    warnings.warn(
        f"the chat template begins answers with {tokenizer.decode(prompt[n:])!r}, and writes the answers of the data "
        "without it: they are learned without it, too. chat_template_kwargs such as '{\"enable_thinking\": false}' may "
        "ask for the beginning that they have",
        stacklevel=4,
    )
    return prompt[:n]


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts, tokenized."""

    rows: list[Row]  # rows that the prompts come from
    prompts: list[str]  # text that the model reads, without what was cut; messages as the chat template writes them
    ids: list[list[int]]  # token ids of the prompts

    def columns(self, indices: list[int]) -> dict[str, list[Any]]:
        """Other columns of the rows at some places, for reward functions; None where a row lacks the column."""
        return {name: [self.rows[i].columns.get(name) for i in indices] for name in self._names}

    @cached_property
    def _names(self) -> dict[str, None]:
        return dict.fromkeys(name for row in self.rows for name in row.columns if name not in _TAKEN)

    def conversations(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Rows at some places for environments: messages, other columns, and arguments of the chat template."""
        rows = [self.rows[i] for i in indices]
        templates = [{k: v for k, v in row.template.items() if k != "tools"} for row in rows]
        return [
            {**row.columns, "prompt": list(row.prompt)} | ({"chat_template_kwargs": given} if given else {})
            for row, given in zip(rows, templates, strict=True)
        ]

    def written(self, indices: list[int]) -> list[Text]:
        """Prompts of the rows at some places as the data have them, strings or messages, for reward functions."""
        return [self.prompts[i] if isinstance(self.rows[i].prompt, str) else self.rows[i].prompt for i in indices]


def plain_prompts(texts: Mapping[int, str], source: str) -> list[Row]:
    """Make rows of prompts that are there as strings, by number in the source. Each is a group of its own."""
    return [PromptOnly(prompt=text, group=text, place=f"{source}:{i}") for i, text in texts.items()]


def tokenize_prompts(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    tally: Tally,
    *,
    context_length: int,
    max_completion_length: int,
    max_prompt_length: int | None = None,
    truncation: Truncation = "error",
    vocabulary: int | None = None,
) -> PromptSet:
    """Tokenize rows as prompts that leave room for an answer; `vocabulary` None: ids are not checked."""
    longest = context_length - max_completion_length
    limit_name = f"tokens (context {context_length} − max_completion_length {max_completion_length})"
    if max_prompt_length is not None and max_prompt_length <= longest:
        longest, limit_name = max_prompt_length, "tokens (max_prompt_length)"
    tokenized = tokenize_rows(
        rows, tokenizer, tally, max_length=longest, truncation=truncation, limit_name=limit_name, vocabulary=vocabulary
    )
    return PromptSet(
        rows=[tokens.row for tokens in tokenized],
        prompts=[tokens.text for tokens in tokenized],
        ids=[tokens.prompt for tokens in tokenized],
    )
