"""The Triton `linear_logprob_pair` on all its paths: properties of every backend, certain targets, large sizes."""

import pytest
import torch
from rlhf_kernels import linear_logprob, linear_logprob_pair
from rlhf_kernels.runtime.testing import assert_ok, tier3

from tests.kernels.checks import detached, repeated_and_captured, same_bits
from tests.kernels.dense import double
from tests.kernels.test_linear_logprob_pair import (  # noqa: F401
    dense,
    judge,
    make,
    run,
    test_bits_are_those_of_linear_logprob,
    test_empty_batch,
    test_equal_rows_have_no_kl_and_masked_columns_no_nan,
    test_half_precision_is_tier3,
    test_hostile_rows,
    test_ignored_rows_hold_nan_between_red_zones,
    test_ragged_sizes,
    test_the_wider_side_is_not_rounded,
    test_tier1_with_every_option,
)
from tests.kernels.triton.test_linear_logprob import eager_gradient, force, nearly_certain

OPS = torch.ops.rlhf_kernels


@pytest.fixture(params=["fused", "tiled", "small tiles"])
def backend(request, monkeypatch, on_triton):
    force(monkeypatch, request.param)
    return on_triton


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tier3_where_the_target_is_nearly_certain(backend, dtype):
    n, temperature = 65, 0.7
    hidden_a, weight, target = nearly_certain(n, 48, 300, dtype, temperature)
    hidden_r = (0.7 * hidden_a.detach() + 0.03 * torch.randn(n, 48)).to(dtype)
    on_logprob, on_kl = torch.randn(2, n, 1)
    inputs = (hidden_a, hidden_r, weight, target)

    for on in ((on_logprob,), (0 * on_logprob, on_kl), (on_logprob, on_kl)):
        options = {"temperature": temperature, "detach": ("kl", "entropy")[len(on) - 1 :]}
        got = run(linear_logprob_pair, [c[:, 0] for c in on], *inputs, **options)[4]
        scales = {"on_logprob": on[0], "on_kl": on_kl if len(on) == 2 else 0 * on_kl}
        wide = {name: x.double() for name, x in scales.items()}
        a64, r64, w64, _ = double(*inputs)
        exact = eager_gradient(a64, w64, target, temperature, hidden_r=r64, **wide)
        eager = eager_gradient(hidden_a, weight, target, temperature, hidden_r=hidden_r, **scales)
        assert_ok(tier3(got, exact, eager), f"d_hidden, {options['detach']} detached")


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "vocab"), [(2048, 32001), (128, 129920), (1024, 151936)])
def test_ragged_vocabularies_bits_and_capture_in_bf16(on_triton, n, vocab):
    inputs = make(n, 1024, vocab, scale=0.1, dtype=torch.bfloat16)
    floats = [x.detach().float() if x.is_floating_point() else x for x in inputs]
    floats[0].requires_grad_()
    cotangent = torch.randn(2, n)

    def step():
        return detached(*run(linear_logprob_pair, cotangent, *inputs, detach=("entropy",)))

    got, exact, plain = step(), run(dense, cotangent, *double(*inputs)), run(dense, cotangent, *floats)
    judge((*got[:4], plain[4]), exact, plain)
    assert_ok(tier3(got[4], exact[4], run(dense, cotangent, *inputs)[4]), "d_hidden")
    del exact, plain
    one = linear_logprob(inputs[0].detach(), *inputs[2:], outputs=("logprob", "entropy"))
    same_bits((one.logprob, one.entropy), (got[0], got[3]))
    repeated_and_captured(step, got)
