"""Supervised fine-tuning: the loss by hand, exact accumulation, and folders that plain libraries and PPO take."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_engine.errors import ConfigError, NonFiniteError, RunStopped
from rlhf_engine.hydra import HydraModel, PackedBatch, Rewards, RoleSpec, SlotConfig
from rlhf_engine.hydra.attention import ATTENTION_NAME
from rlhf_engine.runs.checkpoint import list_checkpoints
from rlhf_engine.runs.folder import LOCK_FILE
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.training.sft import SftTrainer, sft_loss, sft_roles
from rlhf_engine.training.supervised import Example
from tests.conftest import tiny_llama
from tests.data.texts import EACH_FAMILY, family, loss_of_text
from tests.training.test_data import PROMPTS, sft_config, write_model, write_rows

EXAMPLES = [
    Example(prompt=[5, 6], answers=([7, 8, 9, 2], [10, 2])),
    Example(prompt=[11], answers=([12, 2], [13, 14, 15, 2])),
    Example(prompt=[16, 17, 18], answers=([19, 20, 2], [21, 22, 2])),
]
N_TOKENS = 9.0


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("base"), reward_head=False)


def make(mode: str = "full", *, with_reward: bool = True) -> HydraModel:
    """A model whose reward head and slot are not zero."""
    slots = {"sft": SlotConfig(r=4, alpha=8.0)} if mode == "lora" else {}
    model = HydraModel.from_pretrained(tiny_llama(), roles=sft_roles(mode, with_reward=with_reward), slots=slots)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in [*model.heads.parameters(), *model.backbone().slots.parameters()]:
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model.train()


def gradients(model: HydraModel, examples, **options) -> dict[str, torch.Tensor]:
    loss, _ = sft_loss(model, examples, **{"tokens": N_TOKENS, "pairs": 3.0, "dropout_seed": 0, **options})
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found


BORDERS = [
    {"prompt": "Once upon a time", "completion": "? She said."},
    {"prompt": "The sky is blue.\n", "completion": "The answer is 42."},
]


def base_of_family(folder: Path, name: str) -> tuple[Any, Any]:
    """A tokenizer of a family and a model beside it, which lie in the folder."""
    write_model(folder, reward_head=False, vocab_size=512, bos_token_id=1, eos_token_id=2)
    tokenizer = family(name)
    tokenizer.save_pretrained(folder)
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_the_loss_is_transformers_on_the_text(name, tmp_path):
    """Rows of strings from a file, whatever the tokenizer does at a border, beside transformers on the whole texts."""
    tokenizer, plain = base_of_family(tmp_path / "base", name)
    rows = [
        *BORDERS,
        {"prompt": "", "completion": "Hello world!"},
        {"prompt": "She said:", "completion": " Hello world!"},
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    trainer = SftTrainer(sft_config(tmp_path / "base", tmp_path / "out", dataset_name=str(data), learning_rate=0.0))
    losses, sizes = zip(*(loss_of_text(plain, tokenizer, row) for row in rows), strict=True)
    trainer.model.train()
    assert trainer.step()["lm_loss"] == pytest.approx(sum(losses) / sum(sizes), rel=1e-5)


def test_margins_and_pairs_of_the_same_answer_are_those_of_reward(base, tmp_path):
    pairs = [
        {"prompt": p, "chosen": f"yes {i}", "rejected": "no", "margin": i - 1.5} for i, p in enumerate(PROMPTS[:4])
    ]
    same = {"prompt": PROMPTS[0], "chosen": "no", "rejected": "no", "margin": 1.0}

    def trainer(rows: list[dict], **options) -> SftTrainer:
        data = str(write_rows(tmp_path / "rows.jsonl", rows))
        return SftTrainer(sft_config(base, tmp_path / "out", dataset_name=data, gamma=0.7, **options))

    found = trainer([same, *pairs])
    torch.nn.init.normal_(found.model.heads["reward"].weight)
    assert found.notes == ["dataset_name: 1 pairs left out, whose two answers are the same"]
    assert [e.margin for e in found.rows] == [-1.5, -0.5, 0.5, 1.5]
    loss, stats = found.loss(found.rows, range(4), dropout_seed=0)

    def reward(e: Example, answer: list[int]) -> float:
        (rewards,) = found.model(PackedBatch.from_lists([e.prompt], [answer]), (Rewards(),))
        return rewards.item()

    margins = [reward(e, e.answers[0]) - reward(e, e.answers[1]) for e in found.rows]
    by_hand = [math.log1p(math.exp(e.margin - m)) for e, m in zip(found.rows, margins, strict=True)]
    assert stats["reward_margin"].item() == pytest.approx(sum(margins) / 4, rel=1e-4)
    assert stats["reward_accuracy"].item() == pytest.approx(sum(m > 0 for m in margins) / 4)
    assert stats["reward_loss"].item() == pytest.approx(sum(by_hand) / 4, rel=1e-4)
    assert loss.item() == pytest.approx(stats["lm_loss"].item() + 0.7 * sum(by_hand) / 4, rel=1e-5)
    for value in (None, "much", math.inf, True):
        with pytest.raises(ConfigError, match="expected a finite number in column 'margin'"):
            trainer([*pairs, {**pairs[0], "margin": value}])
    with pytest.raises(ConfigError, match="expected pairs of different answers, got the same answer twice in all"):
        trainer([same])
    plain = SftTrainer(dataclasses.replace(found.config, gamma=0.0))  # cross-entropy alone reads no pair
    assert (len(plain.rows), plain.notes) == (1, [])


def test_gamma_0_gives_exactly_the_gradients_of_plain_sft_and_runs_no_rejected_answer():
    model, plain = make(), make(with_reward=False)
    rows: list[int] = []
    model.backbone().base_model.register_forward_pre_hook(
        lambda m, a, k: rows.append(k["input_ids"].numel()), with_kwargs=True
    )
    zero = gradients(model, EXAMPLES, gamma=0.0)
    assert rows == [sum(len(e.prompt) + len(e.answers[0]) for e in EXAMPLES)]
    chosen_only = [Example(prompt=e.prompt, answers=e.answers[:1]) for e in EXAMPLES]
    reference = gradients(plain, chosen_only, gamma=0.5)  # rows without pairs have no second term
    assert zero.keys() == reference.keys()
    assert all(torch.equal(zero[n], reference[n]) for n in zero)
    # and of transformers' own loss
    theirs = tiny_llama()
    total = torch.zeros(())
    for e in EXAMPLES:
        logits = theirs(torch.tensor([e.prompt + e.answers[0]])).logits[0, len(e.prompt) - 1 : -1]
        total = total + F.cross_entropy(logits, torch.tensor(e.answers[0]), reduction="sum") / N_TOKENS
    total.backward()
    for name, p in theirs.named_parameters():
        scale = p.grad.abs().max().item()
        mine = zero[f"backbones.base.model.{name}"]
        torch.testing.assert_close(mine, p.grad, rtol=1e-3, atol=1e-5 * scale, msg=name)


def test_a_step_of_small_batches_is_a_step_of_a_large_one(base, tmp_path):
    found = {}
    for name, size, count, tokens in (("large", 8, 1, None), ("small", 2, 4, None), ("packed", 8, 1, 50)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": count, "adam_epsilon": 1e-3}
        options |= {"mode": "lora", "lora_dropout": 0.3, "max_tokens_per_micro_batch": tokens}
        trainer = SftTrainer(sft_config(base, tmp_path / name, **options))
        trainer.model.train()
        metrics = trainer.step()
        found[name] = (metrics, dict(trainer.model.named_parameters()))
    for other in ("small", "packed"):
        assert found["large"][0]["lm_loss"] == pytest.approx(found[other][0]["lm_loss"], rel=1e-5)
        assert found["large"][0]["reward_loss"] == pytest.approx(found[other][0]["reward_loss"], rel=1e-5)
        for name, p in found["large"][1].items():
            torch.testing.assert_close(found[other][1][name], p, rtol=1e-3, atol=1e-4, msg=name)


def test_full_writes_a_base_that_plain_transformers_loads(base, tmp_path):
    trainer = SftTrainer(sft_config(base, tmp_path / "out", max_steps=3))
    start = trainer.model.backbone().base_hash()
    metrics = trainer.run()
    assert trainer.model.backbone().base_hash() != start
    assert {"lm_loss", "reward_loss", "reward_accuracy", "grad_norm/sft"} <= set(metrics)
    out = tmp_path / "out"
    assert ATTENTION_NAME not in (out / "config.json").read_text()
    plain = AutoModelForCausalLM.from_pretrained(out)
    assert plain.config._attn_implementation == "sdpa"
    mine = dict(trainer.model.backbone().base_parameters())
    assert mine.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(p, mine[n]) for n, p in plain.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer(PROMPTS[0])["input_ids"] == trainer.tokenizer(PROMPTS[0])["input_ids"]
    plain.generate(**tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False), max_new_tokens=2)
    # others read the files that the index names, and not the heads
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors"}
    assert index["weight_map"].keys() == load_file(out / "model.safetensors").keys()
    # its reward head comes back as a trained one
    again = HydraModel.from_pretrained(out, roles={"reward": RoleSpec(head="reward")})
    assert again.trained_heads == {"reward"}
    assert again.heads["reward"].weight.any()
    assert torch.equal(again.heads["reward"].weight, trainer.model.heads["reward"].weight)


def test_lora_leaves_the_base_alone_and_writes_a_peft_folder(base, tmp_path):
    trainer = SftTrainer(sft_config(base, tmp_path / "out", mode="lora", max_steps=3, lora_dropout=0.1))
    start = trainer.model.backbone().base_hash(refresh=True)
    trainer.run()
    assert trainer.model.backbone().base_hash(refresh=True) == start
    out = tmp_path / "out"
    assert not (out / "config.json").exists()
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out).eval()
    tokens = torch.tensor([[1, 5, 6, 7, 8]])
    batch = PackedBatch.from_lists([[1, 5]], [[6, 7, 8]])
    scores = HydraModel.score(_as_actor(trainer.model), batch, ("actor",))
    with torch.no_grad():
        expected = theirs(tokens, use_cache=False).logits[0].log_softmax(-1)
    wanted = torch.stack([expected[1, 6], expected[2, 7], expected[3, 8]])
    torch.testing.assert_close(scores.logprobs_M, wanted, rtol=1e-4, atol=1e-5)
    assert set(load_file(out / "heads.safetensors")) == {"reward.weight", "reward.bias"}
    assert json.loads((out / "rlhf_engine.json").read_text())["base_hash"] == start


def _as_actor(model: HydraModel) -> HydraModel:
    """The slot `sft` read by the role that scoring calls actor."""
    model.roles["actor"] = RoleSpec(slot="sft")
    return model.eval()


def test_rows_with_completions_train_without_a_reward_head(base, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "red cat", "completion": "runs"} for _ in range(4)])
    trainer = SftTrainer(sft_config(base, tmp_path / "out", dataset_name=str(data)))
    assert set(trainer.model.roles) == {"sft"}
    assert "reward_loss" not in trainer.run()
    assert not (tmp_path / "out" / "heads.safetensors").exists()


def test_the_column_that_was_checked_is_the_one_that_is_learned(base, tmp_path):
    rows = [{"prompt": "red", "completion": "cat", "chosen": 7}, {"prompt": "red", "completion": "dog"}]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    trainer = SftTrainer(sft_config(base, tmp_path / "out", dataset_name=str(data)))
    words = [trainer.tokenizer.decode(e.answers[0], skip_special_tokens=True) for e in trainer.rows]
    assert words == ["cat", "dog"]


COLUMNS = r"dataset_name: expected the columns \(prompt, chosen, rejected\) or .*, got "
CHOSEN = {"prompt": "red", "chosen": "a"}
BAD_ROWS = [
    ([CHOSEN], COLUMNS + r"\['chosen', 'prompt'\]"),
    ([{"completion": "a"}], COLUMNS + r"\['completion'\]"),
    ([{**CHOSEN, "rejected": x} for x in ("b", None)], r"rows\.jsonl:2: expected a string or .* in column 'rejected',"),
    ([{**CHOSEN, "rejected": "b " * 30}], r"rows\.jsonl:1: expected at most 20 tokens of prompt and answer, got 33"),
    ([{"prompt": "red " * 64, "completion": "a"}], r"rows\.jsonl:1: expected at most 20 tokens of prompt and answer"),
]


def test_rows_that_cannot_be_served_are_found_before_the_model_is_loaded(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"never read")
    for rows, message in BAD_ROWS:
        data = write_rows(tmp_path / "rows.jsonl", rows)
        with pytest.raises(ConfigError, match=message):
            SftTrainer(sft_config(folder, tmp_path / "out", dataset_name=str(data), max_length=20))
    assert not (tmp_path / "out").exists()


def test_output_folders(base, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "note.txt").write_text("mine")
    with pytest.raises(ConfigError, match="output_dir: expected an empty or new folder"):
        SftTrainer(sft_config(base, tmp_path / "out"))
    SftTrainer(sft_config(base, tmp_path / "out", resume_from_checkpoint="restart"))


@pytest.mark.parametrize(("head", "culprit"), [(True, "reward_loss"), (False, "lm_loss")])
def test_a_loss_that_is_not_finite_stops_and_writes_no_model(base, tmp_path, head, culprit):
    trainer = SftTrainer(sft_config(base, tmp_path / "out"))

    def poison(step: int, metrics: dict[str, float]) -> None:
        model = trainer.model
        p = model.heads["reward"].weight if head else model.backbone().model.model.norm.weight
        with torch.no_grad():
            p.view(-1)[0] = float("nan")

    with pytest.raises(NonFiniteError, match=f"{culprit} is nan at step 2; nothing of it was applied"):
        trainer.run(poison)
    left = [LOCK_FILE, "metrics.jsonl", "page.html", "run.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == left
    assert not list(tmp_path.glob(".*"))
    assert all(p.grad is None for p in trainer.model.parameters())


def test_epochs_become_steps(base, tmp_path):
    def steps(**options) -> int:
        return SftTrainer(sft_config(base, tmp_path / "out", max_steps=None, **options)).total_steps

    assert steps() == 3  # 12 rows in batches of 4
    assert steps(num_train_epochs=2.5) == 8
    assert steps(gradient_accumulation_steps=2) == 2
    assert steps(num_train_epochs=0.01) == 1


def test_nothing_of_the_model_before_stays(base, tmp_path):
    """A head of an earlier run beside a base it was not trained with would be taken for its own."""
    SftTrainer(sft_config(base, tmp_path / "out")).run()
    assert (tmp_path / "out" / "heads.safetensors").is_file()
    (tmp_path / "out" / "note.txt").write_text("mine")
    SftTrainer(sft_config(base, tmp_path / "out", gamma=0.0, resume_from_checkpoint="restart")).run()
    assert not (tmp_path / "out" / "heads.safetensors").exists()
    SftTrainer(sft_config(base, tmp_path / "out", mode="lora", resume_from_checkpoint="restart")).run()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "note.txt"} <= names
    assert not {"model.safetensors", "config.json", "generation_config.json"} & names
    assert not (tmp_path / ".out.tmp").exists()


def test_options_that_would_do_nothing(base, tmp_path):
    for options, message in (
        ({"lora_r": 4}, "lora_r: expected it unset for --full, which has no adapter, got 4"),
        ({"warmup_steps": 3}, r"warmup_steps: expected at most the run's 2 steps, got 3"),
        ({"max_steps": None, "warmup_steps": 30}, "warmup_steps: expected at most the run's .* steps, got 30"),
        ({"max_tokens_per_micro_batch": 3}, r"max_tokens_per_micro_batch: expected at least \d+, the tokens of the lo"),
    ):
        with pytest.raises(ConfigError, match=message):
            SftTrainer(sft_config(base, tmp_path / "out", **options))


def test_adapters_have_the_dtype_of_their_optimizer(base, tmp_path):
    trainer = SftTrainer(sft_config(base, tmp_path / "out", mode="lora", optim="adamw_stochastic"))
    assert {p.dtype for p in trainer.model.backbone().slots.parameters()} == {torch.bfloat16}


def test_a_model_that_cannot_be_written_leaves_a_checkpoint(base, tmp_path, monkeypatch):
    trainer = SftTrainer(sft_config(base, tmp_path / "run", max_steps=2, save_steps=0, mode="lora", gamma=0.0))

    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.tokenizer, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.run()
    assert [folder.name for folder in list_checkpoints(tmp_path / "run")] == ["checkpoint-2"]


def test_other_rows_are_another_run(base, tmp_path):
    config = sft_config(base, tmp_path / "out", max_steps=4, per_device_train_batch_size=2)
    with pytest.raises(RunStopped):
        SftTrainer(config).run(stop=lambda: True)
    config = dataclasses.replace(config, resume_from_checkpoint="auto")
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": "red", "chosen": "cat", "rejected": "sea"}] * 4)
    with pytest.raises(ConfigError, match="dataset_name: expected the rows of the run of"):
        SftTrainer(dataclasses.replace(config, dataset_name=str(other)))
    with pytest.raises(ConfigError, match="per_device_train_batch_size: expected 2 rows per step"):
        SftTrainer(dataclasses.replace(config, per_device_train_batch_size=3))
    halves = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    assert SftTrainer(dataclasses.replace(config, **halves)).state.step == 1


def test_a_finished_run_of_more_steps_has_nothing_to_do_and_is_not_begun_again(base, tmp_path):
    config = sft_config(base, tmp_path / "out")
    SftTrainer(config).run()
    auto = dataclasses.replace(config, resume_from_checkpoint="auto")
    again = SftTrainer(dataclasses.replace(auto, max_steps=1))
    assert again.finished()
    assert again.steps_done() == 2
    assert again.run()["lm_loss"] == read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]["lm_loss"]
    with pytest.raises(ConfigError, match=r"expected a checkpoint in .* to go on from, got the finished"):
        SftTrainer(dataclasses.replace(auto, max_steps=3))
