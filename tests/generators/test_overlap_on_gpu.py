"""Answers drawn beside the updates on one GPU: a stream of its own, graphs captured while the learner allocates."""

import pytest
import torch

from tests.generators.test_async_runs import ages, steps_of, without_timings
from tests.training.test_data import write_model
from tests.training.test_rl import same, trained

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("step", ["transformers", "graph"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_beside_or_one_after_the_other(tmp_path, step, dtype):
    model = write_model(tmp_path / "model")
    options = {"max_steps": 6, "device": "cuda", "dtype": dtype, "decode_step": step, "max_staleness": 2}
    beside, rows = steps_of(model, tmp_path / "beside", async_mode="overlap", **options)
    replay, again = steps_of(model, tmp_path / "replay", async_mode="replay", **options)
    assert ages(rows) == [0, 1, 2, 2, 2, 2]
    assert same(trained(beside), trained(replay))
    assert without_timings(rows) == without_timings(again)


def test_answers_go_on_with_newer_policies_while_graphs_replay(tmp_path):
    model = write_model(tmp_path / "model")
    options = {"max_steps": 8, "device": "cuda", "decode_step": "graph", "max_staleness": 2}
    _, rows = steps_of(model, tmp_path / "run", async_mode="overlap,in_flight", **options)
    assert max(ages(rows)) <= 2
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
