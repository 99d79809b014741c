"""Where a run's answers come from: which policy draws the answers of a step, when, and on what.

versions     a past policy as a few megabytes of adapter
staleness    which policy may draw the answers of which step: pure
orders       what is to be drawn for a step
transport    what carries orders and policies to generators, and answers back
wire         policies, orders and answers as bytes, for other processes
thread       a generator beside the learner, on the same base
scheduler    hands orders to generators, in time and none too early
sources      what the loop asks for the answers of a step
"""
