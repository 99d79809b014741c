"""Module that verl imports through the entry point `verl.plugins`: registers what `verl` has, and does nothing else."""

from rlhf_engine.integrations.verl import register

register()
