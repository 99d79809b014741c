#!/usr/bin/env python
"""A ToolEnv of verifiers as an environment of `train`: `python examples/environments/verifiers_tools.py [FOLDER]`.

pip install verifiers==0.1.9.post3

The tools are those of the ToolEnv, and its rubric is the reward function. The tiny model has seen how the tools are
called, and calls at half of the questions. It learns to call, as it cannot count letters. Half a minute on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
from pathlib import Path
from typing import Any

try:
    import verifiers
    from datasets import Dataset
except ModuleNotFoundError:
    raise SystemExit("pip install verifiers==0.1.9.post3") from None

WORDS = ("ape", "bear", "camel", "donkey", "leopard", "elephant", "crocodile")


def count(word: str) -> int:
    """Count letters.

    Args:
        word: The word.

    Returns:
        How many letters it has.
    """
    return len(word)


def reverse(word: str) -> str:
    """Write a word backwards.

    Args:
        word: The word.

    Returns:
        Its letters from the last to the first.
    """
    return word[::-1]


def is_right(completion: list, answer: str) -> float:
    """1 where the last turn says the answer."""
    return float(completion[-1]["content"] == answer)


ROWS = [{"question": f"count {word}", "answer": str(len(word))} for word in WORDS]
ROWS += [{"question": f"reverse {word}", "answer": word[::-1]} for word in WORDS]
TOOL_ENV = verifiers.ToolEnv(
    tools=[count, reverse], dataset=Dataset.from_list(ROWS), rubric=verifiers.Rubric(funcs=[is_right])
)


class Tools:
    """The tools of `TOOL_ENV` as methods. What they take and say about themselves stays as it is."""

    def reset(self, **row: Any) -> None:
        """Begin; tools without a state need nothing."""


def as_method(tool: Any) -> Any:
    """A function as a method of the same name, text and arguments; it may be async."""

    @functools.wraps(tool)
    def method(self: Any, **given: Any) -> Any:
        return tool(**given)

    signature, this = inspect.signature(tool), inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(parameters=[this, *signature.parameters.values()])
    return method


for name, tool in TOOL_ENV.tool_map.items():
    setattr(Tools, name, as_method(tool))


async def rubric(prompts: list, completions: list, answer: list, **columns: Any) -> list[float]:
    """The rubric's scores of conversations: a reward function of `train`."""
    scores = []
    for prompt, completion, right in zip(prompts, completions, answer, strict=True):
        state = {"prompt": list(prompt), "completion": completion, "answer": right, "task": "", "trajectory": []}
        state["timing"] = {"scoring_ms": 0.0, "total_ms": 0.0}
        await TOOL_ENV.rubric.score_rollout(state, contextlib.nullcontext())
        scores.append(state["reward"])
    return scores


def demonstration(chance: random.Random) -> list[dict[str, Any]]:
    """A call, its result and the answer, or a guess."""
    from tiny import call

    tool, word = chance.choice([count, reverse]), chance.choice(WORDS)
    asked = {"role": "user", "content": f"{tool.__name__} {word}"}
    if chance.random() < 0.5:
        return [asked, {"role": "assistant", "content": str(chance.randrange(10, 100))}]
    result = str(tool(word))
    talk = [asked, call(tool.__name__, word=word), {"role": "tool", "content": result}]
    return [*talk, {"role": "assistant", "content": result}]


def main(folder: Path, *, steps: int = 500, **options: Any) -> int:
    """Make the model from demonstrations in so many steps, and train it. options: those of `train`."""
    from tiny import make_model, train

    phrases = [*WORDS, *(word[::-1] for word in WORDS)]
    make_model(folder / "model", demonstration, [count, reverse], phrases, steps=steps)
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in TOOL_ENV.get_dataset()]
    here = Path(__file__).resolve()
    return train(folder, f"{here}:Tools", rows * 8, **{"reward_funcs": f"{here}:rubric", **options})


if __name__ == "__main__":
    from tiny import folder_of

    sys.exit(main(folder_of(__file__)))
