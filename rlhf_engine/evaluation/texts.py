"""Numbers of texts: words said again, words that differ, and overlap with reference answers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from rlhf_engine.scoring.verifiable import Repetition

ROUGE = ("rouge1", "rouge2", "rougeL")
"""Overlaps that are computed: of words, of pairs of words, of the longest common subsequence."""


def repetition(texts: Sequence[str]) -> list[float]:
    """Share of each text's three-word sequences that it has had before; 0 without repetition."""
    return [-value for value in Repetition(n=3)(completions=texts)]


def distinct(texts: Sequence[str], n: int) -> float | None:
    """Different n-word sequences over all of them (distinct-n, Li and others, arXiv 1510.03055); None without any."""
    words = [text.lower().split() for text in texts]
    grams = [gram for w in words for gram in zip(*(w[i:] for i in range(n)), strict=False)]
    return len(set(grams)) / len(grams) if grams else None


def has_rouge() -> bool:
    """Whether the package rouge_score is here."""
    return importlib.util.find_spec("rouge_score") is not None


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """F-measures of ROUGE-1, ROUGE-2 and ROUGE-L with stemming, by the package rouge_score: name → one per text."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    found = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {name: [float(one[name].fmeasure) for one in found] for name in ROUGE}
