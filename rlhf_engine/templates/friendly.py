"""Reward of friendly words, to begin with: change it, and look at what the policy learns."""

from itertools import pairwise

FRIENDLY = {
    *("hello", "welcome", "dear", "sorry", "apologise", "thank", "please", "pleasant", "restful", "patience"),
    *("happy", "glad", "kind", "love", "smiled", "laughed", "hug", "hugged", "friend", "friends", "together"),
}


def reward(prompts, completions, **columns):
    """Score every answer: its friendly words, each once and four at most, less what is said twice or too long.

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
        too_long = max(0, len(words) - 60)
        scores.append(min(friendly, 4) - said_twice - 0.1 * too_long)
    return scores
