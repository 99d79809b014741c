"""`rlhf-engine bench rollout`: whole rollouts beside transformers' `generate`, and what batching and sharing give.

models    the same weights three times: in a HydraModel, plain, and as a PeftModel
cases     who is timed, on which prompts, against which floor
runner    cases → the records of the kernel benchmarks
"""

OP = "rollout"
