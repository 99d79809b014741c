"""Does the server compute what we compute at the same weights? A few answers, scored on both sides after every sync.

The server draws a few tokens after each canary prompt, at the run's temperature. Our log-probs of the same tokens come
from `HydraModel.score`. Where they differ, the server holds another base or adapter, or it reports log-probs of another
distribution than it draws from.

The mean |difference| is bounded by dtype. One update moves log-probs by less than bf16 rounds, so an adapter that is
one version old hides below that bound. It is found in another way: with the same seeds the server draws the tokens and
the log-probs of the version before, to the last bit, although ours of these tokens have moved.

Log-probs of given tokens (`prompt_logprobs`) would be one pass without drawing. With an adapter, vLLM computes them by
the adapters of the other requests in its batch, and may end there (its issues 29955 and 51594).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_engine.errors import MismatchError
from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.rollout.request import SamplingConfig, row_seed
from rlhf_engine.rollout.vllm.client import Completion, VllmClient, sampling_body

CANARY_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest mean |log-prob difference| per token, by the backbone's dtype. Another engine rounds in other places: on a
real server with the story model the mean was 1.2e-6 in float32 and 0.020 in bf16."""

_DRAWN = 16
"""Most tokens drawn after each prompt."""
_MOVED = 0.02
"""Share of the bound by which our own log-probs must have moved for equal ones of the server to count as stale."""


Complete = Callable[[str, Sequence[Sequence[int]], Sequence[dict[str, Any]], int], list[Completion]]
"""(name, prompts, bodies, size of the vocabulary) → answers with log-probs of drawn tokens."""


@dataclass(frozen=True, eq=False)
class _Drawn:
    """Tokens that the server has drawn at one version, and their log-probs [M]."""

    tokens: list[tuple[int, ...]]
    server: torch.Tensor
    ours: torch.Tensor


@dataclass(frozen=True, eq=False)
class Asked:
    """Answers of a served adapter to the canary prompts, which are compared later."""

    name: str
    """Name of the adapter."""
    answers: list[Completion]


class Canary:
    """Compares a served adapter with the policy that it was made from."""

    def __init__(
        self,
        model: HydraModel,
        client: VllmClient,
        prompts: Sequence[Sequence[int]],
        *,
        temperature: float,
        max_tokens: int,
        bound: float | None = None,
        seed: int = 0,
        role: str = "actor",
    ) -> None:
        """prompts: token lists that leave room for `max_tokens` more. bound: of the mean; None: by dtype.

        role: the role that answers are compared with: `actor`, or `past` where past policies draw.
        """
        if len(prompts) == 0:
            raise ValueError("prompts: expected at least one canary prompt, got none")
        self.role = role
        base = model.role_backbone(role)
        self.bound = CANARY_BOUND[torch.bfloat16 if base.quantized else base.dtype] if bound is None else bound
        self.model, self.client, self.seed = model, client, seed
        self.prompts = [list(prompt) for prompt in prompts]
        self.sampling = SamplingConfig(
            max_completion_length=min(_DRAWN, max_tokens), eos_token_ids=(), temperature=temperature
        )
        self._last: _Drawn | None = None

    def ask(self, name: str, complete: Complete) -> Asked:
        """Have the adapter served under a name answer the canary prompts. No pass of the model is made.

        complete: draws the answers.
        Raises RolloutServerError if the server does not answer.
        """
        vocabulary = self.model.role_backbone(self.role).vocabulary
        bodies = [sampling_body(self.sampling, seed=row_seed(self.seed, i)) for i in range(len(self.prompts))]
        found: list[Completion] = []
        # one at a time: what is drawn beside an answer may move its last digits, by which a stale adapter is found
        for prompt, body in zip(self.prompts, bodies, strict=True):
            found += complete(name, [prompt], [body], vocabulary)
        return Asked(name, found)

    def check(self, asked: Asked) -> dict[str, float]:
        """Compare answers with the policy that is in the role's slot now; mean and largest |difference|.

        Raises MismatchError where the server has drawn by something else.
        """
        name, tokens = asked.name, [answer.tokens for answer in asked.answers]
        drawn = _Drawn(
            tokens=tokens,
            server=torch.tensor([x for answer in asked.answers for x in answer.logprobs]),
            ours=self._score(tokens, self.sampling.temperature),
        )
        self._require_new(name, drawn)
        gap = (drawn.server - drawn.ours).abs()
        if not float(gap.mean()) <= self.bound:  # also catches NaN
            raise MismatchError(self._message(name, drawn))
        self._last = drawn
        return {"mismatch/canary_mean": float(gap.mean()), "mismatch/canary_max": float(gap.max())}

    def _score(self, completions: Sequence[Sequence[int]], temperature: float) -> torch.Tensor:
        batch = PackedBatch.from_lists(self.prompts, completions, device=self.model.device)
        scored = self.model.score(batch, (self.role,), temperature=temperature)
        logprobs_M = scored.logprobs_M if self.role == "actor" else scored.past_logprobs_M
        assert logprobs_M is not None
        return logprobs_M.float().cpu()

    def _require_new(self, name: str, drawn: _Drawn) -> None:
        """The server's answers must not be those of the version before where our log-probs of them are not."""
        last = self._last
        if last is None or drawn.tokens != last.tokens or not torch.equal(drawn.server, last.server):
            return
        moved = float((drawn.ours - last.ours).abs().mean())
        if moved > _MOVED * self.bound:
            raise MismatchError(
                f"vllm_server_base_url {self.client.url}: expected new log-probs from adapter {name!r}, got those of "
                f"the version before, bit for bit, where the actor's have moved by {moved:.3g} on average: the server "
                "still serves the old adapter, or none"
            )

    def _message(self, name: str, drawn: _Drawn) -> str:
        text = (
            f"vllm_server_base_url {self.client.url}: expected the actor's log-probs from adapter {name!r}, within "
            f"{self.bound:g} on average (rollout_mismatch_bound), got ones that differ by "
            f"{float((drawn.server - drawn.ours).abs().mean()):.3g}"
        )
        temperature = self.sampling.temperature
        if temperature != 1 and float((drawn.server - self._score(drawn.tokens, 1.0)).abs().mean()) <= self.bound:
            return (
                f"{text}; they are of temperature 1, not of {temperature:g}: start the server with "
                "--logprobs-mode processed_logprobs"
            )
        return f"{text}; does it serve the same base, in the same dtype?"
