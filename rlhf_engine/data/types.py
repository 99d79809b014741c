"""TRL's dataset types, recognised by their columns.

| type                | columns                            | class              |
|---------------------|------------------------------------|--------------------|
| preference          | prompt, chosen, rejected           | Preference         |
| implicit preference | chosen, rejected                   | Preference         |
| unpaired preference | prompt, completion, label          | UnpairedPreference |
| prompt-completion   | prompt, completion                 | PromptCompletion   |
| prompt-only         | prompt                             | PromptOnly         |

A text is a string (standard) or a list of messages {role, content} (conversational). A completion in messages is the
assistant's alone; where the prompt ends with the assistant's words, it continues them. Other columns are kept. An empty
prompt of an answer is a group of its own: two answers to nothing do not answer the same.

Rows of other forms get these columns (`with_known_columns`; docs/guides/train.md has the table). `tools` and
`chat_template_kwargs` of conversations go to the chat template.

An implicit prompt is what chosen and rejected begin with in common: whole messages of a conversation; of strings the
longest beginning that splits no word and leaves both something to say, as TRL's `extract_prompt` finds it.

Rows of Taskmaster-3's reward files (published with PERL, arXiv 2403.10704) are thumbs: `reward` is 1 or 0, `context` a
JSON string with the turns so far, `generation` one with the agent's next turn. As text a turn is a line: role, colon,
space, and its text, call or response. Most rows continue others, although each has a `conversation_id` of its own, so a
row's group is the first two turns of its dialogue: 271 groups in 3,667 rows.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from rlhf_engine.errors import ConfigError

R = TypeVar("R", bound="Row")
Message: TypeAlias = Mapping[str, Any]
Text: TypeAlias = "str | tuple[Message, ...]"
Kind = Literal["preference", "implicit_preference", "unpaired_preference", "prompt_completion", "prompt_only"]

_COLUMNS: dict[Kind, tuple[str, ...]] = {
    "preference": ("prompt", "chosen", "rejected"),
    "implicit_preference": ("chosen", "rejected"),
    "unpaired_preference": ("prompt", "completion", "label"),
    "prompt_completion": ("prompt", "completion"),
    "prompt_only": ("prompt",),
}
KINDS: tuple[Kind, ...] = get_args(Kind)
_OTHER_FORMS = ", or messages, conversations, or instruction and output"
_ROLES = {"human": "user", "gpt": "assistant"}
TASKMASTER_COLUMNS = frozenset({"conversation_id", "context", "generation", "reward"})
"""Rows with these columns are Taskmaster's."""
_CONTENT = ("text", "api", "response")

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


class RowError(ValueError):
    """A row that cannot be used. Rows are counted by what was expected of them."""

    def __init__(self, expected: str, got: str, hint: str = "") -> None:
        """Make the message `expected …, got …`; `hint` names an option that would serve such rows."""
        super().__init__(f"expected {expected}, got {got}")
        self.hint = hint
        self.expected = expected
        self.got = got


def shown(value: Any) -> str:
    """repr, cut short: a value may be a whole book."""
    return _REPR.repr(value)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of data, whatever its type. Texts are strings or messages."""

    prompt: Text  # prompt, a string or messages
    group: str  # rows of one group are never on both sides of a split; the prompt itself where no column was named
    place: str  # place in the source, for messages
    columns: Mapping[str, Any] = field(default_factory=dict)  # the row's other columns
    template: Mapping[str, Any] = field(default_factory=dict)  # arguments of the chat template beside the messages


@dataclass(frozen=True, kw_only=True)
class PromptOnly(Row):
    """A prompt to answer."""


@dataclass(frozen=True, kw_only=True)
class PromptCompletion(Row):
    """A prompt with its answer."""

    completion: Text  # answer, in the form of the prompt


@dataclass(frozen=True, kw_only=True)
class Preference(Row):
    """A prompt with a better and a worse answer."""

    chosen: Text  # better answer, in the form of the prompt
    rejected: Text  # worse answer, in the form of the prompt


@dataclass(frozen=True, kw_only=True)
class UnpairedPreference(Row):
    """A prompt with an answer and whether it was liked."""

    completion: Text  # answer, in the form of the prompt
    label: bool  # whether the answer was liked


def recast(row: Row, kind: type[R], **texts: Any) -> R:
    """Make a row of another type of the same prompt, with its group, place, columns and template arguments."""
    return kind(**{f.name: getattr(row, f.name) for f in dataclasses.fields(Row)}, **texts)


def with_known_columns(value: Any, wanted: Sequence[Kind] = KINDS) -> list[Any]:
    """Give a record of another form TRL's columns, for each answer wanted; RowError for what is no conversation."""
    learned = "prompt_completion" in wanted and "prompt_only" not in wanted
    if not isinstance(value, Mapping) or any(value.get(name) is not None for name in ("chosen", "completion")):
        return [value]
    is_pair = value.get("label") is None and {"prompt_completion", "prompt_only"}.isdisjoint(wanted)
    name = next((name for name in ("messages", "conversations") if value.get(name) is not None), "instruction")
    turns, system, has_prompt = value.get(name), value.get("system"), value.get("prompt") is not None
    if is_pair or (has_prompt and (name == "instruction" or not learned)):
        return [value]
    if name == "instruction":
        if not isinstance(turns, str) or value.get("output") is None:
            is_text = learned and value.get("text") is not None
            return [{**value, "prompt": "", "completion": value["text"]}] if is_text else [value]
        asked = "\n\n".join(part for part in (turns, value.get("input")) if part)
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": value["output"]}]
    if not isinstance(turns, (list, tuple)) or not all(isinstance(turn, Mapping) for turn in turns):
        raise RowError(f"a list of messages in column {name!r}", shown(turns))
    first = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    turns = [*first, *map(_known_keys, turns)]
    runs = [list(run) for _, run in groupby(turns, lambda turn: turn.get("role") == "assistant")]
    parts: list[dict[str, Any]] = [
        {"prompt": [turn for earlier in runs[:k] for turn in earlier], "completion": run}
        for k, run in enumerate(runs)
        if k and run[0].get("role") == "assistant" and (learned or k == len(runs) - 1)
    ]
    return [{**value, **part} for part in parts or [{"prompt": turns}]]


def recognise(
    columns: Mapping[frozenset[str], int], wanted: Sequence[Kind] = KINDS, *, argument: str = "dataset_name"
) -> Kind:
    """Find a source's type by its sets of columns: the first of `wanted` that every row fits, or most rows."""

    def fit(kind: Kind) -> tuple[int, float]:
        needed = set(_COLUMNS[kind])
        whole = sum(n for names, n in columns.items() if needed <= names)
        return whole, sum(n * len(needed & names) for names, n in columns.items()) / len(needed)

    left_out = {"implicit_preference"} if any("prompt" in names for names in columns) else set()
    if any(fit(kind)[0] for kind in wanted if kind != "prompt_only"):
        left_out.add("prompt_only")
    candidates = [kind for kind in wanted if kind not in left_out] or list(wanted)
    best = max(candidates, key=fit)  # the first of equals
    if columns and fit(best)[0] == 0:
        types = " or ".join("(" + ", ".join(_COLUMNS[kind]) + ")" for kind in wanted)
        more = "" if {"prompt_completion", "prompt_only"}.isdisjoint(wanted) else _OTHER_FORMS
        raise ConfigError(f"{argument}: expected the columns {types}{more}, got {sorted(set().union(*columns))}")
    return best


def parse_row(value: Any, kind: Kind, *, place: str, group_column: str | None = None) -> Row:
    """Make a row of a type, in the group of `group_column` or its prompt; RowError for a missing or wrong column."""
    if not isinstance(value, Mapping):
        raise RowError("a JSON object", type(value).__name__)
    names = _COLUMNS[kind]
    may_be_empty = {"prompt"} if kind != "prompt_only" else set()
    may_be_empty |= {"completion"} if value.get("completion_ids") else set()  # an end alone has no text
    texts = {name: _text(value.get(name), name, name in may_be_empty) for name in names if name != "label"}
    if kind == "implicit_preference":
        parts = split_prompt(texts["chosen"], texts["rejected"])
        texts = dict(zip(("prompt", "chosen", "rejected"), parts, strict=True))
    for name, text in texts.items():
        if isinstance(texts["prompt"], str) != isinstance(text, str):
            form = "a string" if isinstance(texts["prompt"], str) else "messages"
            raise RowError(f"{form} in column {name!r}, like the prompt", shown(text))
        _check_speaker(text, name)
    fields: dict[str, Any] = {
        **texts,
        "place": place,
        "group": _group(value, group_column, texts["prompt"] or place),
        "columns": {name: v for name, v in value.items() if name not in names},
        "template": {} if isinstance(texts["prompt"], str) else template_arguments(value),
    }
    if kind == "unpaired_preference":
        return UnpairedPreference(label=_label(value.get("label")), **fields)
    classes = {"prompt_completion": PromptCompletion, "prompt_only": PromptOnly}
    return classes.get(kind, Preference)(**fields)


def split_prompt(chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """Prompt, better and worse answer of two texts that begin alike; RowError where they do not."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowError("chosen and rejected of one form, strings or messages", "one of each")
    n = 0
    while n < min(len(chosen), len(rejected)) and chosen[n] == rejected[n]:
        n += 1
    if isinstance(chosen, str) and isinstance(rejected, str):
        inside = n > 0 and not chosen[n - 1].isspace()  # of a word, unless white space follows in both
        if inside and not all(text[n : n + 1].isspace() for text in (chosen, rejected)):
            while n > 0 and not chosen[n - 1].isspace():
                n -= 1
        if n > 0 and chosen[n - 1] == " ":
            n -= 1
        left = bool(chosen[n:].strip() and rejected[n:].strip() and chosen[:n].strip())
    else:
        left = n > 0 and n < min(len(chosen), len(rejected))
    if not left or chosen == rejected:
        raise RowError("chosen and rejected with one prompt and two answers", f"{shown(chosen)} and {shown(rejected)}")
    return chosen[:n], chosen[n:], rejected[n:]


def _text(value: Any, name: str, may_be_empty: bool) -> Text:
    if isinstance(value, str):
        if not value.strip():
            if may_be_empty:
                return ""
            raise RowError(f"text in column {name!r}", f"an empty {name}")
        return require_unicode(value, name)
    if not isinstance(value, (list, tuple)):
        raise RowError(f"a string or a list of messages in column {name!r}", shown(value))
    if not value:
        raise RowError(f"text in column {name!r}", f"an empty {name}")
    return tuple(_message(message, name) for message in value)


def _known_keys(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message's keys that have a value, ShareGPT's `from` and `value` by the names that templates read."""
    known = {key: v for key, v in message.items() if v is not None}  # tables give every row every key
    if isinstance(known.get("from"), str) and "role" not in known:
        role, content = known.pop("from"), known.pop("value", None)
        known = {"role": _ROLES.get(role, role), "content": content, **known}
    return known


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, Mapping):
        raise RowError(f"messages {{role, content}} in column {name!r}", shown(value))
    message = _known_keys(value)
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise RowError(f"text as every part of a message in column {name!r}", shown(content))
        content = "".join(texts)
    if not isinstance(message.get("role"), str):
        raise RowError(f"a string as role of every message in column {name!r}", shown(message.get("role")))
    if not message["role"]:
        raise RowError(f"a role for every message in column {name!r}", "an empty one")
    if content is not None or not message.get("tool_calls"):  # null is how OpenAI's format writes calls without words
        if not isinstance(content, str):
            raise RowError(f"a string as content of every message in column {name!r}", shown(content))
        require_unicode(content, name)
    return {**message, "content": content}


def template_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template in the columns of a conversation, as TRL reads them."""
    arguments: dict[str, Any] = {}
    for name, kind, form in (("tools", list, "a list"), ("chat_template_kwargs", dict, "an object")):
        value = row.get(name)
        with suppress(ValueError, RecursionError):  # what is no JSON stays a string, which is neither
            value = json.loads(value) if isinstance(value, str) else value
        if value is not None and not isinstance(value, kind):
            raise RowError(f"{form} or its JSON in column {name!r}", shown(value))
        arguments[name] = value or None
    options = {key: v for key, v in (arguments["chat_template_kwargs"] or {}).items() if v is not None}
    return options if arguments["tools"] is None else {"tools": arguments["tools"], **options}


def require_unicode(text: str, name: str) -> str:
    """The text. Raises RowError for half of a surrogate pair, which JSON can spell and tokenizers cannot read."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"half a surrogate pair at place {error.start}"
            raise RowError(f"Unicode text in column {name!r}", half) from error
    return text


def _check_speaker(text: Text, name: str) -> None:
    """Raise RowError for messages of a column whose speaker has no turn there, or that are empty."""
    if isinstance(text, str):
        return
    if not any((message["content"] or "").strip() or message.get("tool_calls") for message in text):
        raise RowError(f"text in column {name!r}", f"an empty {name}")
    roles = [message["role"] for message in text]
    if name == "prompt" and roles[-1] == "assistant" and not (text[-1]["content"] or "").strip():
        raise RowError("words to go on from where a prompt ends with the assistant's turn", shown(text[-1]))
    if name != "prompt" and set(roles) != {"assistant"}:
        raise RowError(f"messages of the assistant alone in column {name!r}", f"messages of {shown(roles)}")


def _label(value: Any, name: str = "label") -> bool:
    if isinstance(value, (bool, int, float)) and value in (0, 1):  # NaN equals neither
        return bool(value)
    raise RowError(f"true, false, 1 or 0 in column {name!r}", shown(value))


def _group(row: Mapping[str, Any], column: str | None, prompt: Text) -> str:
    if column is None:
        return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise RowError(f"a string or an integer in column {column!r}", shown(value))
    return str(value)


def render_turn(turn: Any) -> str:
    """Write a turn, a mapping with `role` and one of `text`, `api` and `response`, as its line without a line feed."""
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        raise RowError("turns {role, text or api or response}", shown(turn))
    held = [name for name in _CONTENT if name in turn]
    if len(held) != 1:
        raise RowError("one of text, api and response in a turn", shown(sorted(turn)))
    content = turn[held[0]]
    if held[0] == "text":
        if not isinstance(content, str):
            raise RowError("a string as text of a turn", shown(content))
    else:
        content = json.dumps(content, ensure_ascii=False)
    return require_unicode(f"{turn['role']}: {' '.join(content.split())}", "text")


def parse_taskmaster(value: Any, *, place: str) -> UnpairedPreference:
    """One published row. Raises RowError, which says column, what was expected and what came."""
    if not isinstance(value, Mapping):
        raise RowError("a JSON object", type(value).__name__)
    name = value.get("conversation_id")
    if not isinstance(name, str) or not name:
        raise RowError("a string in column 'conversation_id'", shown(name))
    turns, answer = (_parsed(value.get(name), name) for name in ("context", "generation"))
    if not isinstance(turns, list):
        raise RowError("a list of turns in column 'context'", shown(turns))
    if not isinstance(answer, Mapping) or answer.get("role") != "agent":
        raise RowError("a turn of the agent in column 'generation'", shown(answer))
    label = _label(value.get("reward"), "reward")
    lines, last = [render_turn(turn) for turn in turns], render_turn(answer)
    return UnpairedPreference(
        prompt="\n".join([*lines, "agent:"]),
        completion=last.removeprefix("agent:"),
        label=label,
        group="\n".join([*lines, last][:2]),
        place=place,
    )


def _parsed(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        raise RowError(f"a JSON string in column {name!r}", shown(value))
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"a JSON string in column {name!r}", str(error)) from error
