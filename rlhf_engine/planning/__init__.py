"""Prediction of the memory that PPO will take, from a model's config alone: `rlhf-engine plan`.

presets   shapes of common models by name
tracing   the engine's own code run on tensors without data, and what it allocates
workspace memory that a kernel takes inside one call, which a trace cannot see
fit       peaks and largest batches of a method, from traced numbers
predict   these numbers from traces; rows: for every number of rows from two traces
table     these numbers of presets, looked up without torch
report    table, bar chart, JSON
"""
