"""What only a GPU shows of the cuda backend: big sizes, equal bits run after run, CUDA graphs, other streams."""

import pytest
import torch
from rlhf_kernels.runtime import registry

from .checks import same_bits
from .cuda_graph import capture
from .test_gae import hold as hold_gae
from .test_gae import random_case, run_gae
from .test_ppo_loss import everything, hold, tokens

pytestmark = pytest.mark.gpu
N = 1_500_001  # more than one pass of the largest grid over the tokens, and a ragged end


@pytest.fixture(autouse=True)
def _on_cuda():
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


def test_same_bits_in_ten_runs(run):
    inputs = make_inputs(run, 0)
    first = run(inputs)
    for _ in range(9):
        torch.cuda.synchronize()
        same_bits(first, run(inputs))


def test_graph_replay_with_other_inputs(run):
    inputs = make_inputs(run, 0)
    graph, outputs = capture(lambda: run(inputs))
    for seed in (1, 2):
        others = make_inputs(run, seed)
        for x, other in zip(inputs, others, strict=True):
            x.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        same_bits(outputs, run(others))


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


def test_tier1_at_size():
    hold(N)
    hold_gae(random_case(500, N // 500, seed=3))
