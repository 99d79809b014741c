"""What only a GPU shows of the cuda backend: big sizes, equal bits run after run, CUDA graphs, other streams."""

import pytest
import torch
from rlhf_kernels.gae import gae
from rlhf_kernels.ppo_loss import ppo_loss, value_loss
from rlhf_kernels.runtime.testing import assert_ok, tier1

from .checks import same_bits

pytestmark = pytest.mark.gpu
N = 1_500_001  # more than one pass of the largest grid over the tokens, and a ragged end


def run_gae(inputs, backend="cuda"):
    reward, value = (x.reshape(500, -1).detach().requires_grad_() for x in inputs[:2])
    mask, bootstrap = inputs[5].reshape(500, -1), inputs[2][:500].detach().requires_grad_()
    out = gae(reward, value, mask, gamma=0.99, lam=0.95, bootstrap=bootstrap, backend=backend)
    grads = torch.autograd.grad(out.advantage.square().sum() + out.ret.sum(), (reward, value, bootstrap))
    return [x.detach() for x in (*out, *grads)]


def run_losses(inputs, backend="cuda"):
    new, old, advantage, ref, entropy, mask = inputs
    new, entropy, value = (x.detach().requires_grad_() for x in (new, entropy, new))
    # A tensor, as the trainer has it: nothing is read back.
    denom = torch.full((), 1e6, dtype=torch.float32, device=new.device)
    options = {"dual_clip": 2.0, "ref_logprob": ref, "kl_coef": 0.1, "entropy": entropy, "entropy_coef": 0.01}
    policy = ppo_loss(new, old, advantage, mask, denom=denom, backend=backend, **options)
    critic = value_loss(value, old, advantage, mask, denom=denom, clip=0.2, backend=backend)
    grads = torch.autograd.grad(policy.loss + critic.loss, (new, entropy, value))
    return [x.detach() for x in (*policy, *critic, *grads)]


RUNS = {"gae": run_gae, "losses": run_losses}


def make_inputs(run, seed):
    generator = torch.Generator().manual_seed(seed)
    n = N // 500 * 500 if run is run_gae else N
    floats = [0.4 * torch.randn(n, generator=generator) for _ in range(5)]
    return [x.cuda() for x in (*floats, torch.rand(n, generator=generator) > 0.3)]


@pytest.fixture(params=RUNS)
def run(request):
    return RUNS[request.param]


def test_same_bits_in_ten_runs(run):
    inputs = make_inputs(run, 0)
    first = run(inputs)
    for _ in range(9):
        torch.cuda.synchronize()
        again = run(inputs)
        same_bits(first, again)


def test_graph_replay_with_other_inputs(run):
    inputs = make_inputs(run, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(inputs)
    for seed in (1, 2):
        others = make_inputs(run, seed)
        for x, other in zip(inputs, others, strict=True):
            x.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        eager = run(others)
        same_bits(outputs, eager)


def test_runs_on_the_current_stream(run):
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


def test_losses_tier1_at_size():
    inputs = make_inputs(run_losses, 3)
    exact = run_losses([x.double() if x.is_floating_point() else x for x in inputs], "reference")
    plain, actual = run_losses(inputs, "reference"), run_losses(inputs)
    for index, (a, e, p) in enumerate(zip(actual, exact, plain, strict=True)):
        assert_ok(tier1(a, e, p), f"result {index}")


def test_gae_tier1_at_size():
    inputs = make_inputs(run_gae, 3)
    exact = run_gae([x.double() if x.is_floating_point() else x for x in inputs], "reference")
    plain, actual = run_gae(inputs, "reference"), run_gae(inputs)
    for index, (a, e, p) in enumerate(zip(actual, exact, plain, strict=True)):
        assert_ok(tier1(a, e, p), f"result {index}")
