"""Scores of answers, from reward functions, reward model, actor and reference, and the experience made of them."""
