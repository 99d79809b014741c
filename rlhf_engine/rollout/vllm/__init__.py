"""Rollouts on a vLLM server: its protocol, the adapters that it loads, and the check that it serves this policy."""
