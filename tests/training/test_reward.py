"""Reward models: losses by hand, learning, resuming bit for bit, folders that other libraries and RL take, refusals."""

import dataclasses
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import AutoPeftModelForSequenceClassification, PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from rlhf_engine.config import RewardConfig
from rlhf_engine.errors import ConfigError, CorruptCheckpointError, NonFiniteError
from rlhf_engine.hydra import HydraModel, PackedBatch, PairwiseRewardLoss, PointwiseRewardLoss, RoleSpec, SlotConfig
from rlhf_engine.hydra.build import build_policy_model
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.runs.progress import exit_summary
from rlhf_engine.training.reward_model import RewardTrainer, packed_batch, reward_loss, reward_roles
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.sft import SftTrainer
from rlhf_engine.training.supervised import Example
from tests.conftest import tiny_llama
from tests.training.test_data import WORDS, sft_config, train_config, write_model, write_rows
from tests.training.test_every_architecture import write
from tests.training.test_rl import same


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("base"), reward_head=False)


def toy_rows(n: int = 96, *, seed: int = 0) -> list[dict[str, Any]]:
    """Answers of which those that hold the word "sun" are liked; conversations of four rows each."""
    draw = random.Random(seed)
    others = [w for w in WORDS if w != "sun"]
    rows = []
    for i in range(n):
        words = draw.choices(others, k=4)
        liked = draw.random() < 0.4
        if liked:
            words[draw.randrange(4)] = "sun"
        prompt = " ".join(draw.choices(others, k=2))
        rows.append({"prompt": prompt, "completion": " ".join(words), "label": liked, "conversation": i // 4})
    return rows


def toy_pairs(n: int = 48) -> list[dict[str, Any]]:
    rows = toy_rows(4 * n)
    liked, other = [r for r in rows if r["label"]], [r for r in rows if not r["label"]]
    return [
        {"prompt": a["prompt"], "chosen": a["completion"], "rejected": b["completion"], "conversation": i}
        for i, (a, b) in enumerate(zip(liked[:n], other[:n], strict=True))
    ]


def reward_config(model: Path, output: Path, rows: list[dict[str, Any]] | None = None, **changes: Any) -> RewardConfig:
    """A run of a few fast steps on rows beside the output folder."""
    output.parent.mkdir(parents=True, exist_ok=True)
    data = write_rows(output.parent / "rows.jsonl", toy_rows() if rows is None else rows)
    options = {
        "model_name_or_path": str(model), "output_dir": str(output), "dataset_name": str(data), "mode": "lora",
        "max_steps": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "eval_steps": 0, "save_steps": 0,
        "device": "cpu",
    }  # fmt: skip
    lora = {"lora_r": 4, "lora_alpha": 8.0} if changes.get("mode", "lora") == "lora" else {}
    return RewardConfig(**{**options, **lora, **changes})


PAIRS = [
    Example(prompt=(5, 6), answers=((7, 8, 9, 2), (10, 2)), label=None, group="a"),
    Example(prompt=(11,), answers=((12, 2), (13, 14, 15, 2)), label=None, group="b"),
    Example(prompt=(16, 17, 18), answers=((19, 20, 2), (21, 22, 2)), label=None, group="c"),
]
SINGLE = [dataclasses.replace(e, answers=e.answers[:1], label=i != 1) for i, e in enumerate(PAIRS)]


def make(mode: str = "lora", dropout: float = 0.0) -> HydraModel:
    """A model whose reward head and slot are not zero."""
    slots = {"reward": SlotConfig(r=4, alpha=8.0, dropout=dropout)} if mode == "lora" else {}
    model = HydraModel.from_pretrained(tiny_llama(), roles=reward_roles(mode), slots=slots)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in [*model.heads.parameters(), *model.backbone().slots.parameters()]:
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model.train()


def gradients(model: HydraModel) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def rewards_of(model: HydraModel, examples: list[Example]) -> torch.Tensor:
    """[rows, answers], with gradients, one sequence at a time."""
    rows = []
    for e in examples:
        batches = [PackedBatch.from_lists([e.prompt], [answer]) for answer in e.answers]
        rows.append(torch.stack([model(b, (_Rewards(),))[0][0] for b in batches]))
    return torch.stack(rows)


class _Rewards:
    roles = ("reward",)

    def compute(self, states):
        return states.scalar_head("reward")(states.last("reward"))


@pytest.mark.parametrize("weight", [1.0, 3.5])
def test_the_pointwise_loss_and_its_gradients_are_those_of_the_formula(weight):
    model = make()
    loss, stats = reward_loss(model, SINGLE, denom=3.0, dropout_seed=0, pos_weight=weight)
    loss.backward()
    found = gradients(model)
    r, p = rewards_of(model, SINGLE)[:, 0], torch.tensor([1.0, 0.0, 1.0])
    q = 1 / (1 + (-r).exp())
    by_hand = -(weight * p * q.log() + (1 - p) * (1 - q).log()).mean()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-5)
    by_hand.backward()
    expected = gradients(model)
    assert found.keys() == expected.keys()
    assert {"heads.reward.weight", "heads.reward.bias"} <= found.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * scale, msg=name)
    # ∂L/∂b = Σ (σ(r) − p)-like terms / N, in closed form
    slope = torch.where(p == 1, weight * (q - 1), q).mean().item()
    assert found["heads.reward.bias"].item() == pytest.approx(slope, rel=1e-4)
    assert stats["reward_accuracy"].item() == pytest.approx(((r > 0) == (p == 1)).float().mean().item())
    assert stats["reward_margin"].item() == pytest.approx(((2 * p - 1) * r).mean().item(), rel=1e-4)


def test_the_pairwise_loss_with_centering_by_hand():
    model = make()
    loss, stats = reward_loss(model, PAIRS, denom=3.0, dropout_seed=0, center=0.05)
    loss.backward()
    found = gradients(model)
    r = rewards_of(model, PAIRS)
    margin = r[:, 0] - r[:, 1]
    by_hand = ((1 + (-margin).exp()).log() + 0.05 * (r[:, 0] + r[:, 1]) ** 2).mean()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-5)
    by_hand.backward()
    for name, gradient in gradients(model).items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * scale, msg=name)
    assert stats["reward_accuracy"].item() == pytest.approx((margin > 0).float().mean().item())
    with torch.no_grad():
        model.heads["reward"].weight.zero_()
    assert reward_loss(model, PAIRS, denom=3.0, dropout_seed=0)[1]["reward_accuracy"].item() == 0.5  # all tied
    batch, index = packed_batch(SINGLE, torch.device("cpu")), torch.tensor([0])
    output = PairwiseRewardLoss(chosen_P=index, rejected_P=index, denom=1.0)
    assert model(batch, (output,))[0].n_tied == 1
    with pytest.raises(ValueError, match=r"label_N: expected 3 labels, one per sequence, got shape \(1,\)"):
        model(batch, (PointwiseRewardLoss(label_N=torch.tensor([1]), denom=1.0),))


@pytest.mark.parametrize("examples", [PAIRS, SINGLE], ids=["pairs", "single"])
def test_micro_batches_add_up_under_dropout(examples):
    whole, parts = make(dropout=0.3), make(dropout=0.3)
    loss, _ = reward_loss(whole, examples, denom=3.0, dropout_seed=5, pos_weight=2.0)
    loss.backward()
    total = 0.0
    for places in ((0, 2), (1,)):
        some = [examples[i] for i in places]
        part, _ = reward_loss(parts, some, denom=3.0, dropout_seed=5, places=places, pos_weight=2.0)
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), rel=1e-5)
    expected = gradients(whole)
    for name, gradient in gradients(parts).items():
        scale = expected[name].abs().max().item()
        # 1e-7: a pair's margin does not depend on the head's bias, whose gradient is rounding around 0
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5 * scale + 1e-7, msg=name)
    other, _ = reward_loss(whole, examples, denom=3.0, dropout_seed=6, pos_weight=2.0)
    assert other.item() != loss.item()  # dropout is there at all


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory) -> RewardTrainer:
    """A LoRA reward model that has learned the toy task."""
    config = reward_config(
        base, tmp_path_factory.mktemp("trained") / "run", toy_rows(240), max_steps=60, eval_dataset_name=0.3,
        group_column="conversation", eval_steps=20, pos_weight="balanced", lora_dropout=0.05, export="merged",
    )  # fmt: skip
    trainer = RewardTrainer(config)
    trainer.run()
    return trainer


def test_it_learns_and_the_best_step_is_the_final_model(trained, base):
    lines = [row for row in read_metrics(trained.output / "metrics.jsonl") if "eval/auc" in row]
    assert [row["step"] for row in lines] == [0, 20, 40, 60]
    assert (lines[0]["eval/auc"], lines[0]["eval/accuracy"]) == (0.5, 0.5)  # an untrained head: all rewards are 0
    assert all(row["eval/auc_low"] <= row["eval/auc"] <= row["eval/auc_high"] for row in lines)
    best = max(lines[1:], key=lambda row: (row["eval/auc"], -row["step"]))  # of equal ones the first
    assert best["eval/auc"] > 0.9
    assert best["eval/balanced_accuracy"] > 0.85
    record = json.loads((trained.output / "run.json").read_text())
    assert record["result"] == {"steps": 60, "final_step": best["step"], "best_metric": best["eval/auc"]}
    assert record["objective"] == "pointwise"
    # what was written, read again by the policy's loader, has the metrics of that step
    ours = HydraModel.from_pretrained(
        base,
        roles={"reward": RoleSpec(slot="reward", head="reward"), "reference": RoleSpec()},
        slots={"reward": SlotConfig(r=4, alpha=8.0, init_from=str(trained.output / "final"))},
    )
    ours.heads["reward"].load_state_dict(
        {k.removeprefix("reward."): t for k, t in load_file(trained.output / "final" / "heads.safetensors").items()}
    )
    again = RewardTrainer(dataclasses.replace(trained.config, output_dir=str(trained.output.parent / "again")))
    again.policy.model = ours
    assert {k: v for k, v in best.items() if k.startswith("eval/")} == again.evaluate()


def test_what_is_trained_on_what_is_recorded(trained, base):
    record = json.loads((trained.output / "run.json").read_text())
    train, held_out = ({e.group for e in rows} for rows in (trained.rows, trained.eval_set))
    assert not train & held_out
    assert len(train | held_out) == 60
    assert 8 <= len(held_out) <= 28
    assert len(trained.rows) + len(trained.eval_set) == 240
    assert (record["rows"]["train"], record["rows"]["eval"]) == (len(trained.rows), len(trained.eval_set))
    positives = record["rows"]["train_true"]
    assert record["pos_weight"] == (len(trained.rows) - positives) / positives
    # rank times sides, and a head
    backbone = trained.model.backbone()
    linears = [x for path, x in backbone.linears.items() if path.startswith(backbone.blocks_prefix)]
    expected = sum(4 * (x.in_features + x.out_features) for x in linears) + backbone.hidden_size
    moved = {id(p): p.numel() for g in trained.optimizer.groups.values() for p in g.values() if p.requires_grad}
    assert trained.trained_parameters == expected == sum(moved.values()) == record["trained_parameters"]
    assert record["trained_share"] == expected / sum(p.numel() for p in backbone.model.parameters())
    # the base stays, and the head's bias, too
    mine = dict(backbone.base_parameters())
    plain = AutoModelForCausalLM.from_pretrained(base).named_parameters()
    assert all(torch.equal(p, mine[n]) for n, p in plain)
    assert trained.model.heads["reward"].weight.any()
    assert not trained.model.heads["reward"].bias.any()


def test_rows_of_one_prompt_stay_together_without_a_group_column(base, tmp_path):
    trainer = RewardTrainer(reward_config(base, tmp_path / "run", eval_dataset_name=0.4))
    prompts = [{tuple(e.prompt) for e in side} for side in (trainer.rows, trainer.eval_set)]
    assert not prompts[0] & prompts[1]


def test_pairs_are_learned_by_full_training(base, tmp_path):
    config = reward_config(
        base, tmp_path / "run", toy_pairs(), mode="full", learning_rate=3e-3, max_steps=25, eval_dataset_name=0.3,
        eval_steps=5, center_rewards_coefficient=0.01,
    )  # fmt: skip
    trainer = RewardTrainer(config)
    result = trainer.run()
    assert trainer.objective == "pairwise"
    assert trainer.best_metric == "accuracy"
    assert result["best_metric"] > 0.85
    assert trainer.trained_parameters == trainer.base_parameters + 24


def test_evaluation_is_deterministic_and_without_dropout(base, tmp_path, monkeypatch):
    trainer = RewardTrainer(reward_config(base, tmp_path / "run", eval_dataset_name=0.4, lora_dropout=0.5))
    trainer.step()
    first = trainer.rewards(trainer.eval_set)
    assert torch.equal(trainer.rewards(trainer.eval_set), first)
    monkeypatch.setattr("rlhf_engine.training.reward_model.EVALUATED_AT_ONCE", 1)
    torch.testing.assert_close(trainer.rewards(trainer.eval_set), first, rtol=1e-4, atol=1e-5)
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    trainer.evaluate()
    assert same(before, dict(trainer.model.named_parameters()))


def parameters(trainer: RewardTrainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def test_the_best_checkpoint_outlives_its_time_and_becomes_the_final_model(base, tmp_path, monkeypatch):
    scores = iter([1.0, 0.6, 0.9, None, 0.9, 0.7, 0.8])  # 1.0: of no step; None: undefined
    common = {"eval_dataset_name": 0.4, "eval_steps": 1, "save_steps": 1, "max_steps": 6, "save_total_limit": 1}
    trainer = RewardTrainer(reward_config(base, tmp_path / "run", **common))
    monkeypatch.setattr(trainer, "evaluate", lambda: {"eval/loss": 1.0, "eval/auc": next(scores)})
    at_two: dict[str, torch.Tensor] = {}
    trainer.run(lambda step, metrics: at_two.update(parameters(trainer)) if step == 2 else None)
    assert (trainer.state.step, trainer.state.best_step, trainer.state.best_metric) == (6, 2, 0.9)
    held = sorted(p.name for p in trainer.output.glob("checkpoint-*"))
    assert held == ["checkpoint-2", "checkpoint-6"]
    assert same(parameters(trainer), at_two)
    final = load_file(trainer.output / "final" / "heads.safetensors")
    assert torch.equal(final["reward.weight"], at_two["heads.reward.weight"])


def test_enough_held_out_groups_report_without_choosing(base, tmp_path, monkeypatch):
    """Two halves without a group in common; the numbers of each by the rows of each."""
    monkeypatch.setattr("rlhf_engine.training.reward_model.EVALUATED_AT_ONCE", 500)
    rows = toy_rows(1000)
    options = {"eval_dataset_name": 0.9, "group_column": "conversation", "max_steps": 2, "eval_steps": 1}
    trainer = RewardTrainer(reward_config(base, tmp_path / "run", rows, **options))
    groups = [{e.group for e in part} for part in (trainer.rows, trainer.eval_set, trainer.test_set)]
    assert len(set.union(*groups)) == sum(map(len, groups)) == 250
    assert all(90 <= len(part) <= 135 for part in groups[1:])
    trainer.run()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in lines] == [0, 1, 2]
    for name, part in (("eval", trainer.eval_set), ("test", trainer.test_set)):
        reward, label = trainer.rewards(part)[:, 0].double(), torch.tensor([e.label for e in part])
        higher = (reward[label][:, None] > reward[~label]).double() + 0.5 * (reward[label][:, None] == reward[~label])
        best = trainer.result()["final_step"]
        assert lines[best][f"{name}/auc"] == pytest.approx(float(higher.mean()), abs=1e-4)
    summary = exit_summary(tmp_path / "run" / "metrics.jsonl", {"page": "x"})
    assert f"Accuracy, held out 0.500 → {lines[best]['test/accuracy']:.3f} [" in summary
    assert f"(step 0 → {best}, which was kept" in summary
    # a run that was stopped before its first checkpoint begins again, and its first line is there once
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "eval/auc": 0.4}\n')
    shutil.rmtree(tmp_path / "run" / "final")
    for folder in (tmp_path / "run").glob("checkpoint-*"):
        shutil.rmtree(folder)
    RewardTrainer(dataclasses.replace(trainer.config, resume_from_checkpoint="auto")).run()
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]


def test_margins_are_those_of_the_formula(base, tmp_path):
    rows = [{**row, "margin": (-1) ** i * i / 7} for i, row in enumerate(toy_pairs(24))]
    trainer = RewardTrainer(reward_config(base, tmp_path / "run", rows, eval_dataset_name=0.4, max_steps=2))
    trainer.run()
    rewards = trainer.rewards(trainer.eval_set).double()
    margins = torch.tensor([e.margin for e in trainer.eval_set], dtype=torch.float64)
    by_hand = float((1 + (margins - rewards[:, 0] + rewards[:, 1]).exp()).log().mean())
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["eval/loss"] == pytest.approx(by_hand, rel=1e-5)
    for value in (None, "much", math.inf, True):
        with pytest.raises(ConfigError, match="expected a finite number in column 'margin'"):
            RewardTrainer(reward_config(base, tmp_path / "bad", [*rows, {**rows[0], "margin": value}]))


def test_a_metric_of_which_the_smallest_is_the_best(base, tmp_path):
    common = {"eval_dataset_name": 0.4, "metric_for_best_model": "brier"}
    trainer = RewardTrainer(reward_config(base, tmp_path / "run", **common))
    assert [trainer._note_best(x) for x in (0.3, 0.2, 0.2, 0.25)] == [True, True, False, False]
    assert trainer.state.best_metric == 0.2


def test_going_back_and_going_elsewhere(base, tmp_path):
    config = reward_config(base, tmp_path / "run", max_steps=4, eval_dataset_name=0.4, eval_steps=2, save_steps=1)
    trainer = RewardTrainer(dataclasses.replace(config, save_total_limit=None))
    trainer.run()
    expected = parameters(trainer)
    second = tmp_path / "run" / "checkpoint-2"
    back = RewardTrainer(dataclasses.replace(config, resume_from_checkpoint=str(second)))
    assert back.state.best_step == 2
    back.run()
    assert same(parameters(back), expected)
    assert back.state == trainer.state
    third = tmp_path / "elsewhere" / "checkpoint-3"
    shutil.copytree(tmp_path / "run" / "checkpoint-3", third)
    elsewhere = dataclasses.replace(config, output_dir=str(third.parent), resume_from_checkpoint="auto")
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint: expected checkpoint-2 in .*elsewhere, the best"):
        RewardTrainer(elsewhere)
    shutil.copytree(second, third.parent / "checkpoint-2")
    with pytest.raises(ConfigError, match=r"per_device_train_batch_size: expected .* rows per step"):
        RewardTrainer(dataclasses.replace(elsewhere, gradient_accumulation_steps=7))
    heads = third.parent / "checkpoint-2" / "heads.safetensors"
    whole = heads.read_bytes()
    heads.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CorruptCheckpointError, match=r"checkpoint-2.*heads\.safetensors"):
        RewardTrainer(elsewhere)  # at once, not when the best step is to become the result
    heads.write_bytes(whole)
    again = RewardTrainer(elsewhere)
    again.run()
    assert same(parameters(again), expected)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(base, tmp_path):
    config = reward_config(base, tmp_path / "run", save_steps=2, resume_from_checkpoint="auto")
    trainer = RewardTrainer(config)

    def poison(step: int, metrics: dict[str, Any]) -> None:
        if step == 3:
            trainer.model.heads["reward"].weight.data.view(-1)[0] = float("nan")
            with pytest.raises(NonFiniteError, match=r"reward of row 0 is \[nan\] at step 3"):
                trainer.rewards(trainer.rows)

    with pytest.raises(NonFiniteError, match="reward_loss is nan at step 4; nothing of it was applied"):
        trainer.run(poison)
    assert all(p.grad is None for p in trainer.model.parameters())
    assert not (tmp_path / "run" / "final").exists()
    assert RewardTrainer(config).state.step == 2


def some_sequences(trainer: RewardTrainer) -> tuple[list[Example], torch.Tensor]:
    some = trainer.eval_set[:6] or trainer.rows[:6]
    return some, trainer.rewards(some)[:, 0]


def rewards_in(model: HydraModel, examples: list[Example]) -> torch.Tensor:
    """Of a policy's own reward role."""
    batch = PackedBatch.from_lists([e.prompt for e in examples], [e.answers[0] for e in examples])
    return model.score(batch, ("reward",)).rewards_N


def their_scores(model: torch.nn.Module, examples: list[Example]) -> torch.Tensor:
    """A classifier's logits, one sequence at a time."""
    rows = [torch.tensor([[*e.prompt, *e.answers[0]]]) for e in examples]
    with torch.no_grad():
        return torch.cat([model.eval()(row, use_cache=False).logits[0] for row in rows])


def test_the_merged_export_is_a_classifier_with_our_scores(trained):
    folder = trained.output / "final" / "sequence_classification"
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    assert theirs.config.num_labels == 1
    examples, ours = some_sequences(trained)
    torch.testing.assert_close(their_scores(theirs, examples), ours, rtol=0, atol=1e-5)
    assert ours.std() > 0.1
    # and in one padded batch, read at each row's last token
    width = max(e.tokens for e in examples)
    pad = AutoTokenizer.from_pretrained(folder).pad_token_id
    rows = [[*e.prompt, *e.answers[0]] for e in examples]
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        padded = theirs(ids, attention_mask=mask).logits[:, 0]
    torch.testing.assert_close(padded, ours, rtol=0, atol=1e-5)


def gpt2_folder(folder: Path) -> Path:
    """A base whose linears are Conv1D, with the tokenizer of the Llama and its end token as padding."""
    write_model(folder, reward_head=False)
    (folder / "model.safetensors").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=24, n_layer=2, n_head=4, initializer_range=0.2,
        eos_token_id=eos, bos_token_id=tokenizer.bos_token_id, pad_token_id=eos,
    )  # fmt: skip
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_adapter_export_loads_with_peft_and_gives_our_scores(base, tmp_path, architecture):
    folder = base if architecture == "llama" else gpt2_folder(tmp_path / "gpt2")
    trainer = RewardTrainer(reward_config(folder, tmp_path / "run", max_steps=5))
    trainer.run()
    export = tmp_path / "run" / "final" / "sequence_classification"
    assert json.loads((export / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    examples, ours = some_sequences(trainer)
    assert ours.std() > 0.01
    # a base whose padding token is its end token would make transformers read the token before
    options = {} if architecture == "llama" else {"pad_token_id": None}
    plain = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **options)
    torch.testing.assert_close(
        their_scores(PeftModel.from_pretrained(plain, export), examples), ours, rtol=0, atol=1e-5
    )
    loaders = [AutoPeftModelForSequenceClassification]
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 18):  # 5.17 leaves an adapter's score out
        loaders.append(AutoModelForSequenceClassification)
    for loader in loaders:
        loaded = loader.from_pretrained(export, num_labels=1)
        if architecture == "llama":
            torch.testing.assert_close(their_scores(loaded, examples), ours, rtol=0, atol=1e-5)
    # the same folder serves as a reward adapter too
    policy = build_policy_model(train_config(folder, tmp_path / "ppo", reward_model_path=str(export))).eval()
    torch.testing.assert_close(rewards_in(policy, examples), ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(x, marks=pytest.mark.long) for x in ("gemma2", "qwen3_moe", "gpt_neox", "opt"))]
)
def test_other_architectures_merge_too(tmp_path, name):
    folder = gpt2_folder(tmp_path / "m") if name == "gpt2" else write(name, tmp_path / "m")
    trainer = RewardTrainer(reward_config(folder, tmp_path / "run", max_steps=2, export="merged"))
    trainer.run()
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "final" / "sequence_classification")
    theirs.set_attn_implementation("eager" if name == "gemma2" else "sdpa")  # sdpa leaves Gemma's softcap out
    if name == "gpt2":
        assert theirs.config.pad_token_id is None  # the only one that is known is the end token
    examples, ours = some_sequences(trainer)
    # two steps move little: the bound has to be small beside what they moved
    torch.testing.assert_close(their_scores(theirs, examples), ours, rtol=0, atol=min(1e-5, 1e-3 * ours.std().item()))


def test_export_none_leaves_only_the_slot(base, tmp_path):
    RewardTrainer(reward_config(base, tmp_path / "run", max_steps=1, export="none")).run()
    final = tmp_path / "run" / "final"
    assert not (final / "sequence_classification").exists()
    assert {"adapter_config.json", "adapter_model.safetensors", "heads.safetensors", "rlhf_engine.json"} <= {
        p.name for p in final.iterdir()
    }
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), final)


def test_full_training_writes_a_reward_model_path(base, tmp_path):
    config = reward_config(base, tmp_path / "rm", mode="full", max_steps=3, learning_rate=1e-3)
    trainer = RewardTrainer(config)
    trainer.run()
    final = tmp_path / "rm" / "final"
    examples, ours = some_sequences(trainer)
    theirs = AutoModelForSequenceClassification.from_pretrained(final)
    torch.testing.assert_close(their_scores(theirs, examples), ours, rtol=0, atol=1e-5)
    policy = RlTrainer(train_config(base, tmp_path / "ppo", reward_model_path=str(final), max_steps=1))
    assert policy.model.roles["reward"].backbone == "reward"
    torch.testing.assert_close(rewards_in(policy.model, examples), ours, rtol=0, atol=1e-5)
    policy.step()
    # a reward model can be trained further
    more = RewardTrainer(dataclasses.replace(config, model_name_or_path=str(final), output_dir=str(tmp_path / "more")))
    torch.testing.assert_close(more.rewards(examples)[:, 0], ours, rtol=0, atol=1e-5)


def test_rl_on_the_trained_slot_holds_one_base_and_three_slots(trained, base, tmp_path):
    config = train_config(
        base, tmp_path / "run", reward_model_path=str(trained.output / "final"), algorithm="reinforce",
        num_mini_batches=None, num_ppo_epochs=None, max_steps=2,
    )  # fmt: skip
    trainer = RlTrainer(config)
    model = trainer.model
    assert set(model.backbones) == {"base"}
    assert set(model.backbone().slots) == {"actor", "critic", "reward"}
    # it is the reward model that was trained, and stays it
    examples, ours = some_sequences(trained)
    torch.testing.assert_close(rewards_in(model, examples), ours, rtol=0, atol=1e-5)
    before = {n: p.clone() for n, p in model.backbone().slot("reward").named_parameters()}
    trainer.step()
    trainer.step()
    assert trainer.state.policy_version == 2
    assert same(before, dict(model.backbone().slot("reward").named_parameters()))
    torch.testing.assert_close(rewards_in(model, examples), ours, rtol=0, atol=1e-5)


ROW = {"prompt": "red", "completion": "cat", "label": True}
OTHER = {"prompt": "blue", "completion": "dog", "label": 0}
PAIR = {"prompt": "red", "chosen": "cat", "rejected": "dog"}


COLUMNS = r"dataset_name: expected the columns \(prompt, chosen, rejected\) or .* got "
FOUR = [{**PAIR, "prompt": prompt} for prompt in ("red", "a", "the", "sea")]
BAD_ROWS = [
    ([ROW, OTHER, PAIR], {}, "rows.jsonl:3: expected a string .* in column 'completion', got None"),
    ([PAIR, ROW], {}, "rows.jsonl:2: expected a string or a list of messages in column 'chosen', got None"),
    ([ROW, OTHER], {"objective": "pairwise"}, COLUMNS + r"\['completion', 'label'"),
    ([{"prompt": "red"}], {}, COLUMNS + r"\['p"),
    ([{**ROW, **PAIR}, {"prompt": "red"}], {}, "rows.jsonl:2: expected .* in column 'chosen', got None"),
    ([{**ROW, **PAIR}], {}, "objective: expected 'pairwise' or 'pointwise' for dataset_name, whose rows have the"),
    *(
        ([ROW, {**OTHER, "label": x}], {}, f"rows.jsonl:2: expected true, false, 1 or 0 in column 'label', got {x!r}")
        for x in ("no", 2, 0.5, None)
    ),
    ([ROW, ROW], {}, "dataset_name: expected rows with label true and .* false, got 2 true and 0 false"),
    ([ROW, {**OTHER, "completion": 3}], {}, "rows.jsonl:2: expected .* in column 'completion', got 3"),
    ([ROW, OTHER], {"max_length": 3}, "rows.jsonl:1: expected at most 3 tokens of prompt and answer, got 4"),
    ([ROW, {**OTHER, "prompt": "red " * 70}], {}, "rows.jsonl:2: expected at most 64 tokens .* got 73"),
    (None, {"eval_dataset_name": 0.3, "group_column": "thread"}, "expected a string .* in column 'thread'"),
    ([{**ROW, "c": 1.5}, OTHER], {"eval_dataset_name": 0.3, "group_column": "c"}, "integer in column 'c', got 1.5"),
    ([ROW, {**OTHER, "prompt": "red"}], {"eval_dataset_name": 0.5}, "expected a share that leaves groups on"),
    ([PAIR], {"pos_weight": "balanced"}, "pos_weight: expected 'none' for pairs, got 'balanced'"),
    (None, {"center_rewards_coefficient": 0.1}, "center_rewards_coefficient: expected it unset for pointwise rows"),
    (FOUR, {"metric_for_best_model": "auc", "eval_dataset_name": 0.5}, "expected one of .*got 'auc'"),
    (None, {"truncation": "keep_start"}, "truncation: expected error, drop or keep_end for reward models"),
]


def test_rows_that_cannot_be_served_are_found_before_the_model_is_loaded(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"never read")
    for rows, options, message in BAD_ROWS:
        with pytest.raises(ConfigError, match=message):
            RewardTrainer(reward_config(folder, tmp_path / "out", rows, **options))
    assert not (tmp_path / "out").exists()


def test_contradictory_options(tmp_path):
    for options, message in [
        ({"eval_dataset_name": 1.0}, "eval_dataset_name: expected a source or a share between 0 and 1, got 1.0"),
        ({"group_column": "c"}, "group_column: expected it unset without a share as eval_dataset_name, .* got 'c'"),
        ({"metric_for_best_model": "auc"}, "metric_for_best_model: expected it unset without eval_dataset_name"),
        ({"mode": "full", "export": "merged"}, "export: expected it unset for --full"),
        ({"mode": "full", "lora_r": 4}, "lora_r: expected it unset for --full"),
        ({"warmup_steps": 5}, r"warmup_steps: expected at most the run's 4 steps, got 5"),
    ]:
        with pytest.raises(ConfigError, match=message):
            reward_config(tmp_path / "m", tmp_path / "out", **options)


def test_tokens_and_ends_that_the_model_does_not_have(tmp_path):
    small = write_model(tmp_path / "small", reward_head=False, vocab_size=12)
    base = write_model(tmp_path / "base")
    generation = base / "generation_config.json"
    for trainer, config in ((RlTrainer, train_config), (SftTrainer, sft_config), (RewardTrainer, reward_config)):
        with pytest.raises(ConfigError, match=r"expected tokens that the model has, with ids of 0 to 11, got id \d\d"):
            trainer(config(small, tmp_path / "run"))
        for end in (999, -1, [2, 999], "x") if trainer is not RewardTrainer else ():
            generation.write_text(json.dumps({**json.loads(generation.read_text()), "eos_token_id": end}))
            with pytest.raises(ConfigError, match=r"expected end-of-sequence tokens among the model's ids of 0 to .*,"):
                trainer(config(base, tmp_path / "run"))


def test_held_out_rows_of_the_other_kind_or_of_one_class(base, tmp_path):
    held = write_rows(tmp_path / "held.jsonl", [ROW, ROW])
    with pytest.raises(ConfigError, match=r"eval_dataset_name: expected the columns \(prompt, chosen, rejected\) or"):
        RewardTrainer(reward_config(base, tmp_path / "a", [PAIR], eval_dataset_name=str(held)))
    trainer = RewardTrainer(reward_config(base, tmp_path / "b", max_steps=2, eval_dataset_name=str(held)))
    assert trainer.notes[0].startswith("the held-out rows are of one class only (2 true, 0 false): AUC")
    assert "auc is to choose the final model, which will be the last step's instead" in trainer.notes
    result = trainer.run()
    assert result == {"steps": 2, "final_step": 2, "best_metric": None}
    line = read_metrics(tmp_path / "b" / "metrics.jsonl")[-1]
    assert line["eval/auc"] is None
    assert line["eval/accuracy"] is not None
    assert "nonfinite" not in line
    assert json.loads((tmp_path / "b" / "run.json").read_text())["notes"] == trainer.notes
    write_rows(held, [ROW, {**OTHER, "prompt": "sea sea sea"}])
    trainer = RewardTrainer(reward_config(base, tmp_path / "c", [ROW, OTHER], eval_dataset_name=str(held)))
    assert trainer.notes == ["prompts that are in dataset_name and in eval_dataset_name: 1"]


def test_an_adapter_on_the_lm_head_is_refused(base, tmp_path):
    with pytest.raises(ConfigError, match=r"lora_target_modules: expected linears of the blocks, .*\['lm_head'\]"):
        RewardTrainer(reward_config(base, tmp_path / "a", lora_target_modules=["q_proj", "lm_head"]))


def test_micro_batches_of_so_many_tokens_are_the_same_step(base, tmp_path):
    def steps(tokens: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        config = reward_config(base, tmp_path / str(tokens) / "run", toy_rows(16), lora_dropout=0.2, max_steps=2)
        trainer = RewardTrainer(dataclasses.replace(config, max_tokens_per_micro_batch=tokens, adam_epsilon=1e-3))
        losses = [trainer.step()["reward_loss"] for _ in range(2)]
        return losses, trainer.model.trainable_parameters("reward")

    whole, parts = steps(None), steps(30)
    assert parts[0] == pytest.approx(whole[0], rel=1e-5)
    for name, p in whole[1].items():
        torch.testing.assert_close(parts[1][name], p, rtol=1e-3, atol=1e-5, msg=name)


def test_a_run_does_not_go_on_by_another_metric_or_with_other_rows(base, tmp_path):
    held = write_rows(tmp_path / "held.jsonl", toy_rows(16, seed=9))
    config = reward_config(
        base, tmp_path / "run", max_steps=2, save_steps=1, eval_steps=1, eval_dataset_name=str(held),
        metric_for_best_model="loss",
    )  # fmt: skip
    RewardTrainer(config).run()
    again = dataclasses.replace(config, max_steps=3, resume_from_checkpoint="auto")
    with pytest.raises(ConfigError, match=r"metric_for_best_model: expected 'loss' as in .*checkpoint-2, got 'margin'"):
        RewardTrainer(dataclasses.replace(again, metric_for_best_model="margin"))
    for name in ("dataset_name", "eval_dataset_name"):
        other = write_rows(tmp_path / f"{name}.jsonl", toy_rows(24, seed=3))
        with pytest.raises(ConfigError, match="dataset_name: expected the rows of the run of"):
            RewardTrainer(dataclasses.replace(again, **{name: str(other)}))
    assert RewardTrainer(again).state.step == 2
