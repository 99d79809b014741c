"""Training: SFT with a reward objective, the RL loop, rewards, metrics and checkpoints."""
