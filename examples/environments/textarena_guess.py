#!/usr/bin/env python
"""Guess a number in TextArena, by a tool: `python examples/environments/textarena_guess.py [FOLDER]`.

pip install textarena==0.7.4

The tiny model has seen games in which half of the guesses followed the hints, and a quarter of the turns gave up. It
learns to go on to the end of the game, where TextArena gives 1 for the number, and less the further the last guess was
off. Whether it also follows the hints more is not seen in 20 steps. A minute on a CPU.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

try:
    import textarena
except ModuleNotFoundError:
    raise SystemExit("pip install textarena==0.7.4") from None

GUESSES = 6
OVER = "The game is over."
PHRASES = (
    *(OVER, "The target number is ", "higher.", "lower.", "Play. "),
    "You attempted an invalid move. Reason: Invalid move. Player 0 has already guessed the number. Please resubmit a "
    "valid move and remember to follow the game rules to avoid penalties.",
)
"""What the tiny model reads as one token each; others are read by their letters."""


class GuessTheNumber:
    """A game of TextArena for one player. Answers to the same row have the same number to guess."""

    def __init__(self) -> None:
        # "-raw": observations as they come; by default each one has the whole game in it
        self._game = textarena.make("GuessTheNumber-v0-raw", max_turns=GUESSES)
        self._done = False

    def reset(self, seed: int, **row: Any) -> str:
        """Begin a game; what it says goes behind the prompt."""
        self._game.reset(num_players=1, seed=seed)
        self._done = False
        return self._said()

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess, from 1 to 20.

        Returns:
            What the game says to it.
        """
        if self._done:
            return OVER
        self._done, _ = self._game.step(f"[{number}]")
        return OVER if self._done else self._said()

    def get_reward(self) -> float:
        """Return what the game gave; 0 for one that was left before its end."""
        rewards, _ = self._game.close()
        return float(rewards[0]) if rewards else 0.0

    def _said(self) -> str:
        _, seen = self._game.get_observation()
        return "\n".join(message for sender, message, _ in seen if sender == textarena.GAME_ID)


def demonstration(chance: random.Random) -> list[dict[str, Any]]:
    """A game whose guesses follow the hints half of the time, and that may be given up."""
    from tiny import call

    game, low, high, said = GuessTheNumber(), 1, 20, ""
    talk = [{"role": "user", "content": "Play. " + game.reset(seed=chance.randrange(10**6))}]
    while said != OVER and chance.random() < 0.75:
        number = (low + high) // 2 if chance.random() < 0.5 else chance.randrange(1, 21)
        said = game.guess(number)
        talk += [call("guess", number=number), {"role": "tool", "content": said}]
        low = max(low, number + 1) if said.endswith("higher.") else low
        high = min(high, number - 1) if said.endswith("lower.") else high
    return [*talk, {"role": "assistant", "content": OVER}]


def main(folder: Path, *, steps: int = 500, **options: Any) -> int:
    """Make the model from demonstrations in so many steps, and train it. options: those of `train`."""
    from tiny import make_model, train

    rules = GuessTheNumber().reset(seed=0)
    numbers = [str(number) for number in range(1, 21)]
    make_model(folder / "model", demonstration, [GuessTheNumber.guess], [*PHRASES, rules, *numbers], steps=steps)
    rows = [{"prompt": [{"role": "user", "content": "Play. "}], "seed": seed} for seed in range(400)]
    options = {"max_turns": GUESSES + 2, "max_completion_length": 200, **options}
    return train(folder, f"{Path(__file__).resolve()}:GuessTheNumber", rows, **options)


if __name__ == "__main__":
    from tiny import folder_of

    sys.exit(main(folder_of(__file__)))
