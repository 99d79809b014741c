"""An environment for runs of tests: the calculator, with a reward for every turn."""

from examples.environments.calculator import Calculator


class Scored(Calculator):
    """A call costs something, and a right one is worth more."""

    def reset(self, prompt: list[dict], **row) -> str:
        """Begin with a row of the data."""
        super().reset(prompt, **row)
        self.seen = None
        return ""

    def get_turn_reward(self) -> float:
        """The cost of a call in the turn that called."""
        cost = 0.0 if self.result == self.seen else -0.125
        self.seen = self.result
        return cost
