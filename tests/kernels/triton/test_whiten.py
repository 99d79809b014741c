"""The Triton `whiten`: properties of every backend, statistics in float64."""

import torch
from rlhf_kernels.gae import masked_moments, triton as ours

from tests.kernels.checks import each
from tests.kernels.test_whiten import (  # noqa: F401
    random_case,
    test_all_equal_is_zero,
    test_empty,
    test_large_mean_keeps_its_digits,
    test_masked_inputs_reach_nothing,
    test_one_final_rounding,
    test_strided_and_narrow_inputs,
    test_too_few_elements_for_a_variance,
)


@each("n", [1, 129, 3000])
def test_moments_and_statistics_in_float64(on_triton, monkeypatch, n):
    monkeypatch.setattr(ours, "BLOCK", 128)
    monkeypatch.setattr(ours, "PROGRAMS", 8)  # ranges of several blocks
    x, mask = random_case(n)
    moments = masked_moments(x, mask)
    torch.testing.assert_close(moments, masked_moments(x, mask, backend="reference"), rtol=1e-14, atol=0)
    _, stats = ours.whiten_forward(x, mask, None, True, 1e-8)
    kept = x.double()[mask]
    mean, squares = kept.sum() / max(1, kept.numel()), (kept - kept.sum() / max(1, kept.numel())).square().sum()
    rstd = (squares / max(1, kept.numel() - 1) + 1e-8).rsqrt()
    expected = torch.stack([torch.tensor(kept.numel(), dtype=torch.float64), mean, rstd])
    torch.testing.assert_close(stats, expected, rtol=1e-13, atol=0)
