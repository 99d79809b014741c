"""The numeric criterion must accept right kernels and refuse wrong ones."""

import pytest
import torch
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier2, tier3


def logprobs(z):
    return torch.log_softmax(z, -1)[:, 0]


@pytest.fixture
def case():
    hidden, weight = torch.randn(64, 128), torch.randn(1000, 128)
    return hidden, weight, logprobs(hidden.double() @ weight.double().T), logprobs(hidden @ weight.T)


def test_tier1_accepts_another_summation_order(case):
    hidden, weight, exact, plain = case
    halves = hidden[:, :64] @ weight[:, :64].T + hidden[:, 64:] @ weight[:, 64:].T
    assert_ok(tier1(logprobs(halves), exact, plain))


def test_tier1_refuses_padded_columns_counted(case):
    hidden, weight, _, _ = case
    # Small logits, so that one column too many shifts every row
    z = 0.1 * (hidden @ weight.T)
    exact, plain = logprobs(0.1 * (hidden.double() @ weight.double().T)), logprobs(z)
    padded = torch.cat([z, torch.zeros(64, 24)], 1)  # 1000 columns filled up to 1024 with zeros
    assert not tier1(logprobs(padded), exact, plain).ok


def test_tier1_refuses_a_maximum_that_starts_at_zero(case):
    hidden, weight, _, _ = case
    z = hidden @ weight.T - 200
    exact, plain = logprobs(hidden.double() @ weight.double().T - 200), logprobs(z)
    m = z.amax(-1).clamp_min(0)
    wrong = z[:, 0] - m - (z - m[:, None]).exp().sum(-1).log()
    assert not tier1(wrong, exact, plain).ok
    assert_ok(tier1(torch.logsumexp(z, -1), torch.logsumexp(z.double(), -1), torch.logsumexp(z, -1)))


def test_tier1_refuses_logits_rounded_to_bf16(case):
    hidden, weight, exact, plain = case
    assert not tier1(logprobs((hidden @ weight.T).bfloat16().float()), exact, plain).ok


def test_tier2_accepts_one_rounding_and_refuses_two():
    exact = torch.randn(10000, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert_ok(tier2(exact.to(dtype), exact))
    # Truncation instead of rounding is an error of up to one ulp
    truncated = (exact.float().view(torch.int32) & -65536).view(torch.float32).bfloat16()
    assert not tier2(truncated, exact).ok
    # A product of two numbers that were rounded first
    a, b = torch.randn(2, 10000, dtype=torch.float64)
    assert not tier2(a.bfloat16() * b.bfloat16(), a * b).ok


def test_tier3_follows_the_eager_error():
    x, w = torch.randn(1024, 256), torch.randn(32, 256)
    exact = x.bfloat16().double() @ w.bfloat16().double().T
    eager = x.bfloat16() @ w.bfloat16().T
    assert_ok(tier3(eager, exact, eager))
    # Rounding the running sum to bf16 eight times
    partial = torch.zeros(1024, 32, dtype=torch.bfloat16)
    for k in range(0, 256, 32):
        partial += x[:, k : k + 32].bfloat16() @ w[:, k : k + 32].bfloat16().T
    assert not tier3(partial, exact, eager).ok
    # One bad row stays under the limits of the whole tensor but not under its own
    bad = eager.double()
    bad[7] = exact[7] + 1.9 * (eager.double() - exact).abs().max()
    assert tier3(bad, exact, eager).why == "worst row's RMS"


def test_nonfinite_positions_come_first():
    exact = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    right = exact.float()
    for check in (lambda a: tier1(a, exact, right), lambda a: tier2(a, exact), lambda a: tier3(a, exact, right)):
        assert check(right.clone()).ok
        for i, name in ((1, "NaN"), (2, "+inf"), (3, "-inf")):
            wrong = right.clone()
            wrong[i] = 0.0
            report = check(wrong)
            assert not report.ok
            assert name in report.why
        wrong = right.clone()
        wrong[0] = torch.nan
        assert not check(wrong).ok
        assert "shape" in check(right[:3]).why


def test_empty_tensors_pass():
    empty = torch.zeros(0, 5)
    assert tier1(empty, empty, empty).ok
    assert tier2(empty, empty).ok
    assert tier3(empty, empty, empty).ok


def test_assert_ok_raises_with_the_figures():
    report = tier1(torch.tensor([1.1]), torch.tensor([1.0]), torch.tensor([1.0]))
    with pytest.raises(AssertionError, match=r"my kernel fails T1 \(max error\): 1\.0"):
        assert_ok(report, "my kernel")
