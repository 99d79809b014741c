"""The Triton PPO and value losses: properties of every backend, many partial sums, equal bits and graphs."""

import pytest
import torch
from rlhf_kernels.ppo_loss import triton as ours

from tests.kernels.checks import repeated_and_captured
from tests.kernels.test_ppo_loss import (  # noqa: F401
    everything,
    hold,
    test_extreme_values_as_in_the_reference,
    test_half_inputs_and_any_mask,
    test_largest_ratio_is_that_of_a_live_token,
    test_masked_garbage_is_never_seen,
    test_nothing_live_and_empty,
    test_one_advantage_for_a_sequence,
    test_tier1_of_every_option,
    test_tier1_of_everything,
    tokens,
)


def test_many_partial_sums(backend, monkeypatch):
    """More blocks than the folding program adds at a time."""
    for name, value in {"ONE_PROGRAM": 64, "BLOCK": 64, "FOLD": 8}.items():
        monkeypatch.setattr(ours, name, value)
    hold(64 * 20 + 3)


@pytest.mark.gpu
def test_same_bits_every_time_and_in_a_graph(backend):
    *case, mask = tokens(200_000, dtype=torch.float32)

    def step():
        return tuple(everything(case, mask, torch.float32).values())

    repeated_and_captured(step, step())
