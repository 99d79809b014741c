"""The commands of the command line `rlhf-engine`, one module each."""
