"""Tools beside a run: memory beforehand, a comparison of models on the same prompts, exports with their cards."""
