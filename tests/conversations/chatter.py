"""Conversations of models that know nothing: whether a turn calls a tool depends on its tokens, not on their text."""

import random
import zlib
from array import array
from collections.abc import Sequence

from examples.environments.calculator import Calculator
from examples.environments.tiny import make_tokenizer
from rlhf_engine.rollout import PromptBatch
from rlhf_engine.rollout.conversation import Conversations
from rlhf_engine.rollout.request import Message

TOKENIZER = make_tokenizer([Calculator.multiply])
CONTEXT = 512


def look(n: int) -> str:
    """Look around.

    Args:
        n: Letters of what is seen.
    """
    return "seen, " * (n // 6) + "." * (n % 6)


class Chatter(Conversations):
    """Most turns call `look` once or twice, for results of 0 to 39 letters."""

    def __init__(self, **options) -> None:
        super().__init__(TOKENIZER, CONTEXT, **{"tools": [look], **options})

    def parse(self, ids: Sequence[int], prefix: Sequence[int], *, ended: bool) -> tuple[Message, list]:
        dice = random.Random(zlib.crc32(array("q", [*prefix, *ids]).tobytes()))
        calls = [
            {"type": "function", "function": {"name": "look", "arguments": {"n": dice.randrange(40)}}}
            for _ in range(dice.choice([0, 1, 1, 1, 1, 1, 2]))
        ]
        return {"role": "assistant", "content": "I look", "tool_calls": calls}, calls


def asked(prompts: int, generations: int, *, seed: int = 0, with_greedy: bool = False) -> PromptBatch:
    """So many answers each to prompts of 1 to 50 tokens."""
    dice = random.Random(seed)
    ids = [[dice.randrange(3, len(TOKENIZER)) for _ in range(dice.randrange(1, 50))] for _ in range(prompts)]
    rows = [{"prompt": [{"role": "user", "content": "?"}]}] * prompts
    return PromptBatch.of(
        range(prompts), ids, generations=generations, with_greedy=with_greedy, first_id=1000 * seed, data=rows
    )
