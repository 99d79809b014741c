"""The Triton `gather_logprob`: properties of every backend, few shares of a row and many, exact mode, large sizes."""

import pytest
import torch
from rlhf_kernels.gather_logprob import gather_logprob, triton as ours
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier3
from rlhf_kernels.vocab.logits import OUTPUTS

from tests.kernels.checks import in_any_company, repeated_and_captured
from tests.kernels.test_gather_logprob import (  # noqa: F401
    dense,
    test_half_logits_are_upcast_before_the_temperature_and_gradients_rounded_once,
    test_hostile_values,
    test_layouts_and_both_backwards,
    test_leading_dimensions_that_do_not_collapse,
    test_nan_logits_of_a_counted_row_are_not_hidden,
    test_tier1_hostile_rows,
    test_tier1_sizes_and_scales,
)


@pytest.fixture(params=[1, 10**6], ids=["one share", "many shares"])
def backend(request, monkeypatch, on_triton):
    """Few or many programs per row, each of several blocks where there is more than one share to a row."""
    monkeypatch.setattr(ours, "PROGRAMS", request.param)
    return on_triton


def test_exact_mode_gives_a_row_its_bits_in_any_company(on_triton, monkeypatch):
    monkeypatch.setattr(ours, "PROGRAMS", 40)  # so that the number of rows would decide at once
    logits = 3 * torch.randn(30, 3000)
    target = torch.arange(30)
    with registry.use_exact():
        run = lambda *rows: gather_logprob(*rows, outputs=("logprob", "entropy"))[:2]  # noqa: E731
        in_any_company(run, [logits, target], ([7], [3, 29], list(range(12))))


def test_first_maximum_wins_and_a_row_of_minus_infinity(backend):
    logits, zero = torch.zeros(4, 300), torch.zeros(4, dtype=torch.int64)
    logits[:, [70, 140, 299]] = 2.0
    out = gather_logprob(logits, torch.tensor([0, 70, 140, 299]), outputs=("is_top1",))
    assert out.is_top1.tolist() == [0.0, 1.0, 0.0, 0.0]
    logits.fill_(-torch.inf)
    got, expected = (gather_logprob(logits, zero, outputs=OUTPUTS, backend=on) for on in ("auto", "reference"))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_float64_is_refused(on_triton):
    with pytest.raises(ValueError, match="float64"):
        gather_logprob(torch.zeros(2, 50).double(), torch.zeros(2, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "vocab"), [(1000, 32001), (64, 50264), (2, 129920), (16384, 151936)])
@pytest.mark.parametrize("inplace", [False, True])
def test_big_bits_and_capture_in_bf16(on_triton, n, vocab, inplace):
    base = torch.randn(n, vocab, dtype=torch.bfloat16)  # the last has more than 2³¹ elements
    target = torch.randint(0, vocab, (n,))
    target[0] = vocab - 1
    cotangent = torch.randn(n)
    leaf = base.requires_grad_()

    def step():
        logits = leaf * 1.0
        out = gather_logprob(logits, target, outputs=("logprob", "entropy"), inplace_backward=inplace)
        return (
            out.logprob,
            out.entropy,
            torch.autograd.grad((out.logprob * cotangent).sum() + out.entropy.sum(), logits)[0],
        )

    got = [x.detach().clone() for x in step()]
    rows = torch.tensor([0, n // 2, n - 1])
    few = leaf.detach()[rows]
    out = dense(few.double().requires_grad_(), target[rows])
    plain = dense(few.float(), target[rows])
    for i, name in enumerate(("logprob", "entropy")):
        assert_ok(tier1(got[i][rows], out[name], plain[name]), name)

    def gradient(dtype):
        x = few.to(dtype).requires_grad_()
        out = dense(x, target[rows])
        return torch.autograd.grad((out["logprob"] * cotangent[rows].to(dtype)).sum() + out["entropy"].sum(), x)[0]

    assert_ok(tier3(got[2][rows], gradient(torch.float64), gradient(torch.bfloat16)), "d_logits")
    repeated_and_captured(step, got)
