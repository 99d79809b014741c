"""A KL coefficient that follows the KL: larger where the policy strays further than wanted, else smaller.

Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences" (arXiv:1909.08593), section 2.2:

    e = clip(KL / target − 1, −0.2, 0.2)        β ← β (1 + e · answers / horizon)
"""

from __future__ import annotations

_LARGEST_ERROR = 0.2


def next_beta(beta: float, kl: float, *, target: float, horizon: int, n_answers: int) -> float:
    """The coefficient after a step of `n_answers` answers whose mean KL to the reference was `kl` nats.

    target: KL wanted, nats per answer; horizon: answers over which an error of 1 would double the coefficient. Raises
    ValueError where a step of so many answers could take the coefficient to 0 or below.
    """
    if _LARGEST_ERROR * n_answers >= horizon:
        raise ValueError(f"horizon: expected more than {_LARGEST_ERROR} · {n_answers} answers of a step, got {horizon}")
    error = min(max(kl / target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
    return beta * (1 + error * n_answers / horizon)
