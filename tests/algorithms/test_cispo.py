"""CISPO: its loss by hand, and behind TRL against TRL's own."""

from __future__ import annotations

import math
import os

import pytest
import torch

from rlhf_engine.algorithms.base import Experience, MicroBatch
from rlhf_engine.algorithms.cispo import Cispo
from rlhf_engine.config.algorithm import AlgorithmOptions
from tests.conftest import random_batch
from tests.training.test_data import PROMPTS, write_model


def test_a_weight_is_the_ratio_up_to_a_bound_and_no_token_loses_its_gradient():
    batch = random_batch(((2, 2), (1, 2)))
    new = torch.tensor([-1.0, -1.0, -2.0, -0.5], requires_grad=True)
    old = torch.tensor([-1.1, -2.0, -1.0, -0.5])
    micro = MicroBatch(
        batch=batch,
        old_logprobs_M=old,
        ref_logprobs_M=new.detach() + math.log(2),
        advantages_M=torch.tensor([2.0, 2.0, -1.0, -1.0]),
        mask_M=torch.tensor([True, True, True, False]),
        n_tokens=4.0,
        n_answers=2.0,
    )
    algorithm = Cispo(AlgorithmOptions(algorithm="cispo", beta=0.5, cliprange=0.5))
    found = algorithm.loss(new, micro)
    found.loss.backward()
    weights = torch.tensor([math.exp(0.1), 1.5, math.exp(-1.0), 0.0])
    kl = 2 - 1 - math.log(2)
    slope = torch.tensor([1 - 2.0] * 3 + [0.0])  # of k3 where π_ref = 2 π
    torch.testing.assert_close(new.grad, (-weights * micro.advantages_M + 0.5 * slope) / 4)
    policy = float((weights * micro.advantages_M * new.detach()).sum())
    assert float(found.loss) == pytest.approx((0.5 * 3 * kl - policy) / 4)
    told = algorithm.more_sums(micro, found)
    assert {name: float(x) for name, x in told.items()} == pytest.approx({"clip_ratio": 1 / 4, "kl_loss": 3 * kl / 4})


def test_advantages_are_those_of_grpo():
    batch = random_batch(((2, 1), (2, 2)))
    zeros = torch.zeros(3)
    made = Experience(
        batch=batch,
        groups_N=torch.tensor([0, 0]),
        scores_N=torch.tensor([1.0, 3.0]),
        old_logprobs_M=zeros,
        ref_logprobs_M=zeros,
        kl_M=zeros,
    )
    found, metrics = Cispo(AlgorithmOptions(algorithm="cispo", scale_rewards="none")).learn_from(made)
    assert found.advantages_M.tolist() == [-1.0, 1.0, 1.0]
    assert metrics == {"advantage_std": 1.0}


def test_behind_trl_it_has_the_loss_of_trl(tmp_path):
    pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")
    from trl import GRPOConfig, GRPOTrainer
    from trl.kernels import chunked_logprob

    if not hasattr(chunked_logprob, "_use_triton") and "TRITON_INTERPRET" not in os.environ:
        pytest.skip("this TRL has Triton kernels alone, which need TRITON_INTERPRET=1 here")
    from rlhf_engine.integrations.trl import HydraConfig, HydraTrainer
    from tests.integrations.test_trl_options import ONE_BATCH, assert_equal, beside, drift, loss_and_gradients
    from tests.integrations.trl_runs import make_trainer, rows

    folder = write_model(tmp_path / "model")
    given = {**ONE_BATCH, "beta": 0.0, "max_steps": 2}
    ours = make_trainer(HydraTrainer, HydraConfig(str(tmp_path), algorithm="cispo", epsilon_high=0.5, **given), folder)
    config = GRPOConfig(str(tmp_path), loss_type="cispo", epsilon_high=1.5, **given)  # the largest weight itself
    theirs = beside(ours, GRPOTrainer, config, folder)
    prompts = [{"prompt": p} for p in PROMPTS[:2] for _ in range(4)]
    inputs = ours._generate_and_score_completions(prompts)
    old = inputs["of_old_logprobs_M"] + drift(inputs)
    mine = loss_and_gradients(ours, {**inputs, "of_old_logprobs_M": old})
    shown = {"old_per_token_logps": old, "advantages": inputs["of_advantages_M"][:, 0]}
    assert_equal(mine, loss_and_gradients(theirs, {**inputs, **shown}))
    ours.train()
    assert all(float(row["grad_norm"]) > 0 for row in rows(ours))
    assert "cispo" in ours._tag_names
