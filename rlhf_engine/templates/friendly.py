"""Reward of friendly words, to begin with: change it, and look at what the policy learns."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

FRIENDLY = {
    *("hello", "welcome", "dear", "sorry", "apologise", "thank", "please", "pleasant", "restful", "patience"),
    *("happy", "glad", "kind", "love", "smiled", "laughed", "hug", "hugged", "friend", "friends", "together"),
}
EXAMPLES = Path(__file__).with_name("pairs.jsonl")  # a folder for a model of your own has none
CHOSEN = [json.loads(row)["chosen"].lower().split() for row in EXAMPLES.open()] if EXAMPLES.exists() else []
SEEN = Counter(pair for words in CHOSEN for pair in pairwise(words))
NEIGHBOURS = {pair for pair, times in SEEN.items() if times > 1}  # one that came once may be a slip


def reward(prompts, completions, **columns):
    """Score every answer: its friendly words, each once and four at most, less what is said twice or too long.

    Where there are examples, two words that stand side by side in none of them cost as well. Without that line the
    policy finds a salad of friendly words.

    Args:
        prompts: texts, one for each answer.
        completions: the answers.
        columns: every other column of the data, one entry for each answer.

    Returns:
        One number for each answer. The policy is trained towards high ones.
    """
    scores = []
    for answer in completions:
        words = answer.lower().split()
        friendly = len(FRIENDLY.intersection(words))
        said_twice = sum(a == b for a, b in pairwise(words))
        strange = sum(pair not in NEIGHBOURS for pair in pairwise(words)) if NEIGHBOURS else 0
        too_long = max(0, len(words) - 60)
        scores.append(min(friendly, 4) - said_twice - strange - 0.1 * too_long)
    return scores
