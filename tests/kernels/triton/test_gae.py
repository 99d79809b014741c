"""The Triton `gae`: properties of every backend, blocks of T with a carry; with `whiten` at large sizes."""

import pytest
from rlhf_kernels.gae import gae, masked_moments, triton as ours, whiten

from tests.kernels.checks import repeated_and_captured
from tests.kernels.test_gae import (  # noqa: F401
    hold,
    random_case as gae_case,
    test_coefficients,
    test_empty,
    test_layouts,
    test_masked_inputs_reach_nothing,
    test_narrow_inputs_accumulate_and_come_out_in_fp32,
    test_tier1,
)


@pytest.fixture(params=[32, ours.BLOCK_T], ids=["blocks of 32", "one block"])
def backend(request, monkeypatch, on_triton):
    monkeypatch.setattr(ours, "BLOCK_T", request.param)
    return on_triton


def test_gae_several_rows_per_program(on_triton, monkeypatch):
    monkeypatch.setattr(ours, "_rows", lambda x: (2, 4, 16, 1))
    hold(gae_case(7, 40))


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "T"), [(64, 512), (4096, 50), (3, 5000)])
def test_large_same_bits_every_time_and_in_a_graph(on_triton, B, T):
    inputs = gae_case(B, T)
    hold(inputs)
    reward, value, mask, bootstrap = inputs

    def step():
        out = gae(reward, value, mask, gamma=0.99, lam=0.95, bootstrap=bootstrap)
        white = whiten(out.advantage, mask)
        moments = masked_moments(out.advantage, mask)
        return *out, white, whiten(out.ret, mask, moments=moments)

    repeated_and_captured(step, step())
