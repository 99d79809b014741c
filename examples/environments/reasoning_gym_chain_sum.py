#!/usr/bin/env python
"""Sums of reasoning-gym, answered by a tool: `python examples/environments/reasoning_gym_chain_sum.py [FOLDER]`.

pip install reasoning-gym==0.1.25

The tiny model has seen sums of two digits; it answered half of them, and said "?" to the others. It learns to answer
them all, and to be surer of what it knows. The score is reasoning-gym's own. Less than a minute on a CPU.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

try:
    import reasoning_gym
except ModuleNotFoundError:
    raise SystemExit("pip install reasoning-gym==0.1.25") from None

SUMS = reasoning_gym.create_dataset("chain_sum", seed=1, size=64, max_terms=2, max_digits=1)
PHRASES = ("State the final answer to the following arithmetic problem: ", "Thank you.")


class ChainSum:
    """One question of a dataset of reasoning-gym, which `answer` ends."""

    def __init__(self) -> None:
        self.entry, self.answered = SUMS[0], ""

    def reset(self, index: int, **row: Any) -> None:
        """Begin with the question of a row, which is its prompt."""
        self.entry, self.answered = SUMS[index], ""

    def answer(self, number: int) -> str:
        """Give the final answer.

        Args:
            number: The answer.
        """
        self.answered = self.answered or str(number)  # the first one counts
        return "Thank you."

    def get_reward(self) -> float:
        """The dataset's score of the answer."""
        return float(SUMS.score_answer(self.answered, self.entry))


def demonstration(chance: random.Random) -> list[dict[str, Any]]:
    """A question, and the right answer or none."""
    from tiny import call

    entry = SUMS[chance.randrange(len(SUMS))]
    asked = {"role": "user", "content": entry["question"]}
    if chance.random() < 0.5:
        return [asked, {"role": "assistant", "content": "?"}]
    thanks = {"role": "tool", "content": "Thank you."}
    return [asked, call("answer", number=int(entry["answer"])), thanks, {"role": "assistant", "content": ""}]


def main(folder: Path, *, steps: int = 500, **options: Any) -> int:
    """Make the model from demonstrations in so many steps, and train it. options: those of `train`."""
    from tiny import make_model, train

    make_model(folder / "model", demonstration, [ChainSum.answer], PHRASES, steps=steps)
    rows = [{"prompt": [{"role": "user", "content": SUMS[i]["question"]}], "index": i} for i in range(len(SUMS))]
    return train(folder, f"{Path(__file__).resolve()}:ChainSum", rows, **options)


if __name__ == "__main__":
    from tiny import folder_of

    sys.exit(main(folder_of(__file__)))
