#!/usr/bin/env python
"""A tiny model learns to call a calculator: `python examples/environments/calculator.py [FOLDER]`, in half a minute.

It makes a model of 150,000 weights that has seen how a call is written, and calls at half of the questions. Then it
trains the model by GRPO with an environment, whose reward is 1 for the right product. The model cannot multiply, so the
reward climbs as it learns to call. Files and curves are in FOLDER, by default runs/calculator.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any


class Calculator:
    """An environment in TRL's protocol: one question, one tool, a reward of 1 for the right answer."""

    def __init__(self) -> None:
        self.asked, self.result = "", None

    def reset(self, prompt: list[dict], **row) -> None:
        """Begin with a row of the data."""
        self.asked, self.result = prompt[-1]["content"], None

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            Their product.
        """
        self.result = a * b
        return self.result

    def get_reward(self) -> float:
        """1 where the product of the question was computed."""
        a, b = self.asked.split("*")
        return float(self.result == int(a) * int(b))


def demonstration(chance: random.Random) -> list[dict[str, Any]]:
    """A conversation: a call and its result, or a guess."""
    from tiny import call

    a, b = chance.randrange(2, 10), chance.randrange(2, 10)
    asked = {"role": "user", "content": f"{a}*{b}"}
    if chance.random() < 0.5:
        return [asked, {"role": "assistant", "content": str(chance.randrange(100, 1000))}]
    result = {"role": "tool", "name": "multiply", "content": str(a * b)}
    return [asked, call("multiply", a=a, b=b), result, {"role": "assistant", "content": str(a * b)}]


def questions(n: int = 64) -> list[dict[str, Any]]:
    """Rows of data, with a question each."""
    chance = random.Random(1)
    asked = [f"{chance.randrange(2, 10)}*{chance.randrange(2, 10)}" for _ in range(n)]
    return [{"prompt": [{"role": "user", "content": question}]} for question in asked]


def main(folder: Path, *, steps: int = 500, **options: Any) -> int:
    """Make the model from demonstrations in so many steps, and train it. options: those of `train`."""
    from tiny import make_model, train

    make_model(folder / "model", demonstration, [Calculator.multiply], steps=steps)
    return train(folder, f"{Path(__file__).resolve()}:Calculator", questions(), **{"max_steps": 30, **options})


if __name__ == "__main__":
    from tiny import folder_of

    sys.exit(main(folder_of(__file__)))
