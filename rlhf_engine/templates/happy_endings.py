"""A reward function for tiny stories: happy, not repetitive, not cut short. TRL's signature; plain Python.

    r(y) = 1.2 ln(1 + h + e) − 4 g3 − 4 (0.45 − d)⁺ / 0.45 − 3 (1 − n/25)⁺        clamped to [−3, 3]

    h  = number of different happy words; the logarithm lets each further one earn less
    e  = 1 if a happy word stands in the last fifth of the story (a happy ending)
    g3 = share of trigrams that were said before
    d  = share of distinct words, in the worst window of 50 words
    n  = number of words

Why each guard is there, that is, what a policy does without it:
* distinct words count once and sub-linearly: otherwise "happy happy happy …" is the best story there is;
* repeated trigrams cost: otherwise one happy sentence is said again until the length runs out;
* a low share of distinct words costs: otherwise the trigram guard is avoided by shuffling a handful of words;
* short answers cost: otherwise the best answer is "They laughed and hugged." and the story is gone;
* the range is bounded, so that no single answer decides the batch's advantages.
A list of happy words without repeats would still be scored too high; what keeps the language itself is the KL to
the reference model.

    rlhf-engine init recipe:stories260k stories --model_name_or_path MODEL
"""

from __future__ import annotations

import math
import re
from typing import Any

HAPPY_WORDS = frozenset(
    word
    for line in (
        "happy happily happiness smile smiled smiles smiling hug hugged hugs laugh laughed laughing giggled",
        "friend friends love loved loves fun proud together joy joyful kind kindly glad cheer cheered thankful",
        "excited share shared helped safe warm play played playing enjoyed wonderful best",
    )
    for word in line.split()
)
SHORTEST = 25  # words below which a story counts as cut short
DISTINCT = 0.45  # share of distinct words below which a text counts as repetitive; plain stories have 0.5 to 0.7
LIMIT = 3.0


def reward(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]] | None = None, **columns: Any
) -> list[float]:
    """One score in [−3, 3] per completion; the prompt's own words earn nothing."""
    return [story_reward(completion) for completion in completions]


def story_reward(story: str) -> float:
    """r(y) of one story."""
    words = re.findall(r"[a-z']+", story.lower())
    n = len(words)
    if n == 0:
        return -LIMIT
    happy = len(HAPPY_WORDS & set(words))
    ending = any(word in HAPPY_WORDS for word in words[-max(5, n // 5) :])
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    said_before = 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0
    # windows, because any long text repeats words; a last window under 25 words would say little
    windows = [words[i : i + 50] for i in range(0, max(1, n - 24), 50)]
    distinct = min(len(set(window)) / len(window) for window in windows)
    score = (
        1.2 * math.log1p(happy + ending)
        - 4.0 * said_before
        - 4.0 * max(0.0, DISTINCT - distinct) / DISTINCT
        - 3.0 * max(0.0, 1 - n / SHORTEST)
    )
    return max(-LIMIT, min(LIMIT, score))
