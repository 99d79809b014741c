"""Pairs of `sft` and `reward` share their prompt's pass: micro-batches count it once, and numbers stay the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.testing import assert_ok, tier1

from rlhf_engine.hydra import HydraModel, SlotConfig
from rlhf_engine.training.reward_model import REWARD_SLOT, RewardTrainer, reward_loss, reward_roles
from rlhf_engine.training.run import SupervisedRun
from rlhf_engine.training.sft import SFT_SLOT, SftTrainer, sft_loss, sft_roles
from rlhf_engine.training.supervised import Example
from tests.conftest import randomise, tiny_llama
from tests.training.test_data import WORDS, sft_config, write_model, write_rows
from tests.training.test_reward import reward_config

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

PROMPT = 12
"""Words of every prompt."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("base"))


def pairs(n_prompts: int, each: int) -> list[dict[str, str]]:
    """Long prompts with `each` pairs of short answers."""
    return [
        {"prompt": " ".join([WORDS[i % 4], WORDS[i // 4]] * (PROMPT // 2)), "chosen": WORDS[j], "rejected": WORDS[-1]}
        for i in range(n_prompts)
        for j in range(each)
    ]


def make(kind: str, base: Path, output: Path, data: list[dict[str, str]], dropout: float, tokens: int) -> SupervisedRun:
    options: dict[str, Any] = {"mode": "lora", "lora_dropout": dropout, "max_tokens_per_micro_batch": tokens}
    options["per_device_train_batch_size"] = len(data)
    if kind == "reward":
        return RewardTrainer(reward_config(base, output, data, **options))
    output.parent.mkdir(parents=True, exist_ok=True)
    dataset = write_rows(output.parent / "long.jsonl", data)
    return SftTrainer(sft_config(base, output, dataset_name=str(dataset), **options))


def lengths(trainer: SupervisedRun) -> tuple[int, int]:
    """Tokens of a pair with its prompt once, and with two copies; all pairs are alike in that."""
    batch = trainer.packed(trainer.rows[:1])
    return batch.n_tokens - batch.prompt_lens[0], batch.n_tokens


@pytest.mark.parametrize("kind", ["reward", "sft"])
def test_a_micro_batch_holds_as_many_pairs_as_share_its_tokens(base, tmp_path, rows, kind):
    def rows_of_a_step(data: list[dict[str, str]], dropout: float, tokens: int, shares: bool = True) -> list[int]:
        trainer = make(kind, base, tmp_path / "run", data, dropout, tokens)
        trainer.model.shares_prompts = shares
        trainer.model.train()
        rows.clear()
        trainer.step()
        return list(rows)

    once, twice = lengths(make(kind, base, tmp_path / "any", pairs(8, 1), 0.0, 1000))
    assert once < twice < 2 * once
    assert rows_of_a_step(pairs(8, 1), 0.0, 2 * once) == [2 * once] * 4
    assert rows_of_a_step(pairs(8, 1), 0.0, 2 * once, shares=False) == [twice] * 8
    assert rows_of_a_step(pairs(8, 1), 0.1, 2 * once) == [twice] * 8  # with dropout every answer has a copy
    all_six = once + 5 * (2 * once - twice)  # a prompt, and two answers six times
    assert rows_of_a_step(pairs(3, 6), 0.0, all_six) == [all_six] * 3


ANSWERS = [((7, 8, 9, 2), (10, 2)), ((12, 2), (13, 14, 15, 2)), ((19, 20, 2), (21, 22, 2))]
PROMPTS = [tuple(range(3, 24)), (11,), tuple(range(3, 24))]
"""Two pairs are of one prompt."""
Loss = Callable[[HydraModel], torch.Tensor]


def reward(model: HydraModel) -> torch.Tensor:
    examples = [
        Example(prompt=prompt, answers=answers, label=None, group="")
        for prompt, answers in zip(PROMPTS, ANSWERS, strict=True)
    ]
    return reward_loss(model, examples, denom=3.0, dropout_seed=0, center=0.1)[0]


def sft(model: HydraModel) -> torch.Tensor:
    examples = [
        Example(prompt=list(prompt), answers=(list(chosen), list(rejected)))
        for prompt, (chosen, rejected) in zip(PROMPTS, ANSWERS, strict=True)
    ]
    return sft_loss(model, examples, gamma=0.7, tokens=9.0, pairs=3.0, dropout_seed=0)[0]


KINDS: dict[str, tuple[Loss, dict[str, Any], str]] = {
    "reward": (reward, reward_roles("lora"), REWARD_SLOT),
    "sft": (sft, sft_roles("lora", with_reward=True), SFT_SLOT),
}


def build(kind: str, dtype: torch.dtype) -> HydraModel:
    _, roles, slot = KINDS[kind]
    model = HydraModel.from_pretrained(
        tiny_llama(dtype=dtype, width=2), roles=roles, dtype=dtype, slots={slot: SlotConfig(r=4)}, adapter_dtype=dtype
    ).train()
    randomise(model, slot)
    with torch.no_grad():
        model.heads["reward"].weight.copy_(torch.linspace(-1, 1, model.heads["reward"].weight.numel()).view(1, -1))
    return model


def found(kind: str, model: HydraModel, shares: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, and gradients by parameter."""
    model.shares_prompts = shares
    model.zero_grad()
    loss = KINDS[kind][0](model)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [False, True])
def test_gradients_are_those_of_copies(kind, exact):
    """Held to float64; in exact mode the loss has the bits of copies."""
    with registry.use_exact(exact):
        model = build(kind, torch.float32)
        (loss, once), (loss_of_copies, copied) = found(kind, model, True), found(kind, model, False)
    if exact:
        assert torch.equal(loss, loss_of_copies)
    wide = build(kind, torch.float64)
    wide.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    with registry.use_backend("reference"):
        _, truth = found(kind, wide, False)
    assert set(once) == set(copied) == set(truth)
    for name, gradient in once.items():
        assert_ok(tier1(gradient, truth[name], copied[name]), name)
