"""Generators of a run's answers: which policy draws the answers of a step, when, and on what.

work       policies and what is to be drawn for a step, also as bytes for other processes
scheduler  which policy may draw for which step; hands work to generators, in time and none too early
ray        generators in other processes
sources    what the training loop calls for the answers of a step; what draws, here or in a thread beside the learner
"""
