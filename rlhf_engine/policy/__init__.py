"""Policies: from a configuration to roles, slots and heads on one backbone."""
