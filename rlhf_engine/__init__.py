"""rlhf-engine: RLHF on one frozen backbone. Actor, critic, reference and reward are adapter slots and heads on it."""

__version__ = "0.1.0"
