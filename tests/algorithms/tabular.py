"""A language model small enough to list all of its answers: the gradient of every estimator is an exact sum."""

import itertools
from collections.abc import Callable, Sequence

import torch

from rlhf_engine.hydra import PackedBatch

EOS = 0


class TabularModel:
    """Logits of their own for every prefix; answers end with EOS or at `longest` tokens. Everything in float64."""

    def __init__(self, vocabulary: int = 3, longest: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        prefixes = [
            p for n in range(longest) for p in itertools.product(range(1, vocabulary), repeat=n)
        ]  # a prefix that goes on holds no EOS
        self.row_of = {prefix: i for i, prefix in enumerate(prefixes)}
        self.answers = [
            (*prefix, token)
            for prefix in prefixes
            for token in range(vocabulary)
            if token == EOS or len(prefix) + 1 == longest
        ]
        shape = (len(prefixes), vocabulary)
        self.logits = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        self.reference = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.values = torch.randn(len(prefixes), generator=generator, dtype=torch.float64)
        self.rewards_N = torch.randn(len(self.answers), generator=generator, dtype=torch.float64)

    def batch(self, places: Sequence[int]) -> PackedBatch:
        """The answers of these places of the list, each to the same prompt."""
        return PackedBatch.from_lists([[1]] * len(places), [self.answers[i] for i in places])

    def _rows_and_tokens(self, places: Sequence[int]) -> tuple[list[int], list[int]]:
        steps = [(self.row_of[a[:t]], a[t]) for a in (self.answers[i] for i in places) for t in range(len(a))]
        return [row for row, _ in steps], [token for _, token in steps]

    def logprobs_M(self, places: Sequence[int], logits: torch.Tensor | None = None) -> torch.Tensor:
        """log π of each token, with a gradient."""
        rows, tokens = self._rows_and_tokens(places)
        return torch.log_softmax(self.logits if logits is None else logits, -1)[rows, tokens]

    def ref_logprobs_M(self, places: Sequence[int]) -> torch.Tensor:
        """log π_ref of each token."""
        return self.logprobs_M(places, self.reference)

    def exact_kl_M(self, places: Sequence[int]) -> torch.Tensor:
        """KL(π ‖ π_ref) of the state before each token."""
        rows, _ = self._rows_and_tokens(places)
        log_p, log_q = torch.log_softmax(self.logits, -1), torch.log_softmax(self.reference, -1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)[rows]

    def values_M(self, places: Sequence[int]) -> torch.Tensor:
        """An arbitrary value of the state before each token."""
        rows, _ = self._rows_and_tokens(places)
        return self.values[rows]

    def probabilities_N(self, logits: torch.Tensor | None = None) -> torch.Tensor:
        """π(a) of every answer, with a gradient."""
        places = range(len(self.answers))
        sums = torch.zeros(len(self.answers), dtype=torch.float64)
        return sums.index_add(0, self.batch(places).sequence_of_M, self.logprobs_M(places, logits)).exp()

    def greedy(self) -> int:
        """Place of the greedy answer."""
        prefix: tuple[int, ...] = ()
        while prefix not in self.answers:
            prefix += (int(self.logits[self.row_of[prefix]].argmax()),)
        return self.answers.index(prefix)

    def objective(self, rewards_N: torch.Tensor, beta: float) -> torch.Tensor:
        """E[r − β Σ_t (log π − log π_ref)], exactly."""
        p = self.probabilities_N()
        return (p * (rewards_N - beta * (p.log() - self.probabilities_N(self.reference).log()))).sum()

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """∇ of a loss by the logits."""
        return torch.autograd.grad(loss, self.logits)[0]

    def expected_gradient(
        self, loss: Callable[[tuple[int, ...]], torch.Tensor], draws: int, logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """E[∇ loss(a_1 … a_k)] over k independent draws from the model, or from `logits`."""
        p = self.probabilities_N(logits).detach()
        total = torch.zeros_like(self.logits)
        for places in itertools.product(range(len(self.answers)), repeat=draws):
            weight = p[list(places)].prod()
            if weight > 0:
                total += weight * self.gradient(loss(places))
        return total
