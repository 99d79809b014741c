"""Generators of a run's answers: which policy draws the answers of a step, when, and on what.

policy_store  past policies, each a few megabytes of adapter
staleness     which policy may draw the answers of which step: pure functions
work          what is to be drawn for a step
transport     what carries work and policies to generators, and answers back
serialize     policies, work and answers as bytes, for other processes
thread        a generator beside the learner, on the same base
ray           generators in other processes
scheduler     hands work to generators, in time and none too early
sources       what the training loop calls for the answers of a step
"""
