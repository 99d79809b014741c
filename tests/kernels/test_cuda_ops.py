"""The cuda backend of `gae`, `ppo_loss` and `value_loss`: on a GPU, and its kernels as fibers on the CPU.

Where `device` puts tensors: see conftest.py. Properties of every backend are in test_gae.py and test_ppo_loss.py.
"""

import contextlib

import pytest
import torch
from rlhf_kernels import gae, ppo_loss, value_loss
from rlhf_kernels.runtime import cuda_native, cuda_support, registry

from .checks import capture, each, same_bits
from .test_direct_calls import opcheck
from .test_gae import (  # noqa: F401
    hold,
    random_case,
    run_gae,
    test_coefficients,
    test_empty,
    test_equals_definition_in_fp64,
    test_gradcheck as test_gradcheck_of_gae,
    test_layouts,
    test_masked_inputs_reach_nothing,
    test_tier1,
)
from .test_ppo_loss import (  # noqa: F401
    everything,
    hold as hold_losses,
    test_extreme_values_as_in_the_reference,
    test_gradcheck,
    test_half_inputs_and_any_mask,
    test_masked_garbage_is_never_seen,
    test_nothing_live_and_empty,
    test_tier1_of_every_option,
    test_tier1_of_everything,
    tokens,
)


@pytest.fixture
def backend(device):
    with registry.use_backend("cuda"), torch.device(device) if device == "cuda" else contextlib.nullcontext():
        yield "cuda"


@each("special", [torch.nan, torch.inf, -torch.inf])
@each("lam", [0.0, 0.1, 0.95])
def test_gae_keeps_what_is_not_finite_where_it_is(backend, special, lam):
    """γλ = 0.05 to the hundredth is 0 in fp32, and 0 · ∞ would be NaN where the recurrence has ∞."""
    reward, value, mask, bootstrap = random_case(4, 600)
    mask[0, 550] = mask[1, 300] = True
    reward[0, 550], value[1, 300], reward[2][~mask[2]] = special, special, special
    inputs, knobs = (reward, value, mask, bootstrap), {"gamma": 0.5, "lam": lam}
    hold(inputs, ("advantage", "ret"), **knobs)
    advantage = run_gae(inputs, **knobs)["advantage"]
    assert not torch.isfinite(advantage[0, :551][mask[0, :551]]).any()
    assert torch.isfinite(advantage[2:]).all()


@each("name", ["gae", "gae_backward", "ppo_loss", "ppo_loss_backward", "value_loss", "value_loss_backward"])
@each("plain", [False, True])
def test_opcheck(backend, plain, name):
    opcheck(name, backend, plain)


def test_reductions_have_the_same_bits_for_unaligned_memory(device):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 4004, generator=generator).to(device)
    mask = (torch.rand(4004, generator=generator) > 0.3).to(device)
    results = []
    for start in (0, 1):
        # Slices that start one element later hold the same numbers at addresses that no vector load may use.
        memory = torch.cat([wide[:, :start], wide[:, :4001]], dim=1)
        new, old, advantage, ref, entropy = (row[start : start + 4001] for row in memory)
        keep = torch.cat([mask[:start], mask[:4001]])[start:]
        new = new.detach().requires_grad_()
        on = {"denom": 9, "backend": "cuda"}
        out = ppo_loss(new, old, advantage, keep, ref_logprob=ref, kl_coef=0.1, entropy=entropy, **on)
        value = value_loss(new, old, advantage, keep, clip=0.2, **on)
        (out.loss + value.loss).backward()
        results.append([*out, *value, new.grad])
    same_bits(*results)


# --- errors ---------------------------------------------------------------------------------------------------------


def test_errors_reach_python(device):
    x = torch.zeros(4, device=device)
    p = x.data_ptr()
    ppo = (p, p, p, p, False, p, 0, 0, 4, 0.8, 1.2, 0.0, 3, 0.0, 0.0, p, p, p, p)
    for name, arguments in (
        ("gae_forward", (p, 4, 1, p, 4, 1, p, 4, 1, 0, -1, 4, 1.0, 1.0, 0, 0)),
        ("gae_backward", (0, 4, 1, p, 4, 1, p, 4, 1, 1, 4, 1.0, 1.0, 0, 0, p)),
        ("ppo_loss_forward", (*ppo[:8], -1, *ppo[9:])),
        ("ppo_loss_forward", (*ppo[:12], 4, *ppo[13:])),  # no such KL estimator
        ("ppo_loss_forward", (0, *ppo[1:])),
    ):
        with pytest.raises(RuntimeError, match=f"{name}: CUDA error 1: invalid argument"):
            cuda_support.call(name, torch.float32, x.device, *arguments)


def test_a_refused_launch_reaches_python(host_library, monkeypatch):
    monkeypatch.setattr(cuda_native, "library", lambda: (host_library, None))
    monkeypatch.setattr(cuda_support, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(cuda_support, "stream_of", lambda device: contextlib.nullcontext(0))
    x = torch.ones(2, 3)
    for function in (
        lambda: gae(x, x, x, gamma=1.0, lam=1.0, backend="cuda"),
        lambda: ppo_loss(x, x, x, x, denom=1.0, backend="cuda"),
        lambda: value_loss(x, x, x, x, denom=1.0, backend="cuda"),
    ):
        host_library.on_host_fail_next_launch(9)
        with pytest.raises(RuntimeError, match="CUDA error 9: refused"):
            function()
        function()


def test_addresses_refused(device):
    x = torch.zeros(3, 4, device=device)
    with pytest.raises(ValueError, match="x: expected a contiguous tensor"):
        cuda_support.address("x", x.t(), x.dtype)
    with pytest.raises(TypeError, match=r"x: expected dtype torch.float64, got torch.float32"):
        cuda_support.address("x", x, torch.float64)
    with pytest.raises(ValueError, match="x: expected a CUDA tensor, got one on meta"):
        cuda_support.matrix("x", x.to("meta"), x.dtype)
    with pytest.raises(ValueError, match=r"x: expected 2 dimensions, got shape \(4,\)"):
        cuda_support.matrix("x", x[0], x.dtype)
    assert cuda_support.address("x", None, x.dtype) == 0
    assert cuda_support.matrix("x", x.t(), x.dtype) == (x.data_ptr(), 1, 4)


def test_backend_is_there_and_chosen_on_cuda_tensors(device):
    x = torch.zeros(2, device=device)
    for op in ("gae", "ppo_loss"):
        assert registry.unsupported(op, "cuda", device, torch.float32) is None
        assert registry.resolve(op, "cuda", x) == "cuda"
        assert "not torch.int64" in registry.unsupported(op, "cuda", device, torch.int64)


# --- what only a GPU shows: big sizes, equal bits run after run, CUDA graphs, streams ------------------------------

N = 1_500_001  # more than one pass of the largest grid over the tokens, and a ragged end


@pytest.fixture
def on_cuda():
    with registry.use_backend("cuda"), torch.device("cuda"):
        yield


def advantages(inputs):
    return list(run_gae(inputs).values())


def losses(inputs):
    *case, mask = inputs
    return list(everything(case, mask, torch.float32).values())


def make_inputs(run, seed):
    return tokens(N, seed, torch.float32) if run is losses else random_case(500, N // 500, seed=seed)


@pytest.fixture(params=[advantages, losses])
def run(request):
    return request.param


@pytest.mark.gpu
def test_same_bits_in_ten_runs(on_cuda, run):
    inputs = make_inputs(run, 0)
    first = run(inputs)
    for _ in range(9):
        torch.cuda.synchronize()
        same_bits(first, run(inputs))


@pytest.mark.gpu
def test_graph_replay_with_other_inputs(on_cuda, run):
    inputs = make_inputs(run, 0)
    graph, outputs = capture(lambda: run(inputs))
    for seed in (1, 2):
        others = make_inputs(run, seed)
        for x, other in zip(inputs, others, strict=True):
            x.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        same_bits(outputs, run(others))


@pytest.mark.gpu
def test_runs_on_the_current_stream(on_cuda, run):
    inputs = make_inputs(run, 0)
    expected = run(inputs)
    torch.cuda.synchronize()
    late = [torch.zeros_like(x) for x in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds: work on another stream would read zeros
        for x, real in zip(late, inputs, strict=True):
            x.copy_(real)
        outputs = run(late)
    stream.synchronize()
    same_bits(outputs, expected)


@pytest.mark.gpu
def test_tier1_at_size(on_cuda):
    hold_losses(N)
    hold(random_case(500, N // 500, seed=3))
