"""The reward examples of Taskmaster-3 (tickets for films), published with PERL (arXiv 2403.10704), as thumbs.

Rows: `conversation_id`; `context`, a JSON string with the list of turns so far; `generation`, a JSON string with the
agent's next turn; `reward` 1 for thumbs up, 0 for thumbs down. A turn has a `role` (user, agent, api) and one of
`text`, `api` (a call) or `response` (what the call gave).

As text, a turn is a line: the role, a colon, a space, then its text, or its call or response as JSON:

    user: What is on at the Roxy?
    agent: {"find_movies": {"name.theater": "Roxy"}}
    api: {"find_movies": {"name.movie": ["Scream"]}}
    agent:

The prompt is the lines of the last turns and a bare `agent:`; the completion is a space and the rest of the agent's
line. White space within a text becomes single spaces, so that a turn is a line. A few published turns have no text;
they stay, with a space as completion. A context without turns is a bare `agent:`.

Each published row has a `conversation_id` of its own. All the same most rows continue others: their context is another
row's context and judged turn, and more. What tells dialogues apart is how they begin, so a row's group is the first two
turns of its dialogue. The 3,667 rows of Taskmaster-3 have 271 such groups.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from rlhf_engine.data.read import read_records, usable_rows
from rlhf_engine.data.tally import RowError, Tally, shown
from rlhf_engine.data.types import UnpairedPreference, require_unicode
from rlhf_engine.errors import ConfigError

COLUMNS = frozenset({"conversation_id", "context", "generation", "reward"})
"""Rows with these columns are Taskmaster's."""
_CONTENT = ("text", "api", "response")


def load_taskmaster(
    source: str | os.PathLike[str], tally: Tally, *, last_turns: int | None = None
) -> list[UnpairedPreference]:
    """Read the rows of Taskmaster-3's reward files (PERL, arXiv 2403.10704), from one of them or their folder.

    A row's group is the first two turns of its dialogue. `last_turns` are those of the context that the prompt keeps;
    None: all.
    """
    if last_turns is not None and last_turns < 1:
        raise ConfigError(f"last_turns: expected at least 1, or none for all, got {last_turns}")
    records = read_records(source, argument=tally.argument)
    return usable_rows(records, tally, lambda value, place: parse_taskmaster(value, place=place, last_turns=last_turns))


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


def parse_taskmaster(value: Any, *, place: str, last_turns: int | None = None) -> UnpairedPreference:
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
    reward = value.get("reward")
    if not isinstance(reward, (bool, int, float)) or reward not in (0, 1):
        raise RowError("1 or 0 in column 'reward'", shown(reward))
    lines, last = [render_turn(turn) for turn in turns], render_turn(answer)
    return UnpairedPreference(
        prompt="\n".join([*lines[-(last_turns or len(lines)) :], "agent:"]),
        completion=last.removeprefix("agent:"),
        label=bool(reward),
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
