"""Training of reward models from preferences and thumbs."""
