"""Memory and times that a benchmark measures on a GPU."""

import pytest
import torch
from rlhf_bench import memory, runner, timing
from rlhf_bench.ops import load_cases

pytestmark = pytest.mark.gpu


def test_memory_counts_what_the_call_allocates():
    case = next(c for c in load_cases("gae", "tiny", "cuda", torch.float32))
    peak = memory.peak_on_cuda(lambda: torch.ones(2**22, device="cuda"))
    assert peak == 2**24
    result = runner.run_case(case, size="tiny", device=torch.device("cuda"), rounds=5, server=None)
    assert all(row.peak_bytes for row in result.rows)


def test_a_replay_computes_again_and_a_call_that_waits_cannot_be_captured():
    x = torch.ones(8, device="cuda")
    replay = timing.replay_of(lambda: x * 2)
    x.fill_(3)
    assert replay().tolist() == [6.0] * 8
    with pytest.raises(RuntimeError):
        timing.replay_of(lambda: x.sum().item())


@pytest.mark.parametrize("op", ["decode_attention", "sample", "lora"])
def test_decoding_ops_are_captured(op):
    for case in load_cases(op, "tiny", "cuda", torch.bfloat16):
        if case.replayed:
            result = runner.run_case(case, size="tiny", device=torch.device("cuda"), rounds=5, server=None)
            assert any(row.backend for row in result.rows), case.name
