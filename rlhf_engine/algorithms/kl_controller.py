"""A KL coefficient that follows the KL: larger where the policy strays further than wanted, else smaller.

Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences" (arXiv:1909.08593), section 2.2:

    e = clip(KL / target − 1, −0.2, 0.2)        β ← β (1 + e · answers / horizon)
"""

from __future__ import annotations

_LARGEST_ERROR = 0.2
_HORIZON = 10_000
"""Answers over which an error of 1 would double the coefficient; a step of more doubles it at once."""


def next_beta(beta: float, kl: float, *, target: float, n_answers: int) -> float:
    """The coefficient after a step of `n_answers` answers whose mean KL to the reference was `kl` nats.

    target: KL wanted, nats per answer.
    """
    error = min(max(kl / target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
    return beta * (1 + error * n_answers / max(_HORIZON, n_answers))
