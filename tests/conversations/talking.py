"""What tests of conversations share: the example's tokenizer, tools of every kind, and turns as they are drawn."""

import sys
import time
from typing import Any

from examples.environments.calculator import Calculator
from examples.environments.tiny import TEMPLATE, make_tokenizer
from rlhf_engine.rollout.conversation import Conversation, Conversations
from rlhf_engine.rollout.request import SamplingConfig
from rlhf_engine.rollout.rows import AnswerRow

TOKENIZER = make_tokenizer([Calculator.multiply])
ASKED = [{"role": "user", "content": "3*4"}]
THOUGHTS = TEMPLATE.replace(
    "{{ m.content or '' }}",
    "{% if loop.last or m.role != 'assistant' %}{{ m.content or '' }}"
    "{% else %}{{ (m.content or '').split('</think>')[-1] }}{% endif %}",
)
"""A template that leaves the thoughts of earlier turns out."""


def call(name: str, **arguments: Any) -> str:
    """A turn that calls a tool, as the template writes it."""
    import json

    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


class Tools:
    """An environment with tools that do what they should not."""

    made = 0

    def __init__(self) -> None:
        Tools.made += 1
        self.log: list[str] = []

    def reset(self, **row: Any) -> str | None:
        """Begin with a row."""
        self.row = row
        return row.get("hint")

    def multiply(self, a: int, b: int) -> int:
        """Multiply.

        Args:
            a: first
            b: second
        """
        self.log.append("multiply")
        return a * b

    def huge(self) -> str:
        """Return ten megabytes."""
        return "9" * 10_000_000

    def nothing(self) -> None:
        """Return no value."""

    def raises(self) -> None:
        """Raise an error whose text cannot be had."""

        class BadError(Exception):
            def __str__(self) -> str:
                raise ValueError

        raise BadError

    def leaves(self) -> None:
        """Leave the process."""
        sys.exit(3)

    def late(self) -> None:
        """Raise what a client raises whose server is late."""
        raise TimeoutError("no answer from the server")

    def hangs(self) -> None:
        """Never come back."""
        while True:
            time.sleep(0.01)

    async def waits(self, n: int) -> int:
        """Come back later.

        Args:
            n: what comes back
        """
        return n + 1

    def get_turn_reward(self) -> float:
        """0.5 for each call of multiply so far."""
        return 0.5 * len(self.log)

    def get_reward(self) -> float:
        """1 where it was called."""
        return float(bool(self.log))


def hold(tokenizer: Any = TOKENIZER, **options: Any) -> Conversations:
    """The conversations of a run with these tools."""
    options = {"make": Tools, "timeout": 2.0, **options}
    return Conversations(tokenizer, options.pop("context", 400), **options)


def begin(host: Conversations, **row: Any) -> Conversation:
    """A conversation about the product."""
    ids = TOKENIZER.encode(host.text(ASKED), add_special_tokens=False)
    return host.begin({"prompt": ASKED, **row}, ids)


def drawn(talk: Conversation, text: str, *, reason: str = "eos", most: int = 300) -> bool:
    """Let a turn be drawn; whether another follows."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False) + [TOKENIZER.eos_token_id] * (reason == "eos")
    row = AnswerRow(
        index=0, prompt=(*talk.prompt, *talk.tokens), slot="actor", greedy=False, fixed=False, seed=0, keep=True,
        sampling=SamplingConfig(max_completion_length=most, eos_token_ids=(TOKENIZER.eos_token_id,)),
        tokens=tokens, logprobs=[-1.0] * len(tokens), versions=[7] * len(tokens), finish_reason=reason,
    )  # fmt: skip
    return talk.take(row, most)


def shown(talk: Conversation) -> str:
    """The whole conversation as the model reads it."""
    return TOKENIZER.decode([*talk.prompt, *talk.tokens])


def learned(talk: Conversation) -> list[str]:
    """The turns that count as drawn."""
    ids = [*talk.prompt, *talk.tokens]
    return [TOKENIZER.decode(ids[first:end]) for first, end in talk.turns]
