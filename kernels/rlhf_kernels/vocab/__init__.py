"""The sweep of the vocabulary that the ops with a head share: checks, tiles, kernels and their costs."""
