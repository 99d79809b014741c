"""Memory that a run will take, before it is begun: `rlhf-engine plan`, and the lines before a run's first step."""
