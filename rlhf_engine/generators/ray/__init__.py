"""Generators in other processes, on this machine or a cluster, through Ray."""
