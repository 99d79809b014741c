"""Decoding steps: one token for every live row. The step of transformers, its CUDA graphs, and the native one."""
