"""`PerlRewardTrainer`: labels by hand, pairs as in TRL, and a reward model that the policy's base serves."""

import copy

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")

from datasets import Dataset
from peft import AutoPeftModelForSequenceClassification, LoraConfig
from transformers import AutoModelForSequenceClassification, EarlyStoppingCallback
from trl import RewardConfig, RewardTrainer

from rlhf_engine.data.tokenize import load_tokenizer
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import HydraModel, RoleSpec
from rlhf_engine.integrations.trl import HydraPPOTrainer, PerlRewardConfig, PerlRewardTrainer
from rlhf_engine.training.reward_model import reward_loss
from rlhf_engine.training.supervised import Example
from tests.data.test_forms_of_others import TOOLS, WITH_TOOLS
from tests.data.texts import chat_tokenizer, said
from tests.integrations.test_trl_ppo import config
from tests.integrations.trl_runs import LORA, trained, watched
from tests.training.test_data import PROMPTS, write_model

PAIRS = [{"prompt": p, "chosen": f" {p} sings", "rejected": " sea sea"} for p in PROMPTS]
THUMBS = [
    {"prompt": p, "completion": f" {c}", "label": c == "sings"} for p in PROMPTS for c in ("sings", "sea", "moon")
]
SCORES = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="SEQ_CLS", modules_to_save=["score"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), reward_head=False)


def make(
    folder, output, rows, *, trainer_class=PerlRewardTrainer, config_class=PerlRewardConfig, tokenizer=None, **changes
):
    options = {
        "output_dir": str(output), "max_steps": 30, "per_device_train_batch_size": 8, "learning_rate": 1e-2,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    return trainer_class(
        model=str(folder), args=config_class(**{**options, **changes}), train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows), processing_class=tokenizer or load_tokenizer(folder),
        peft_config=copy.deepcopy(SCORES),
    )  # fmt: skip


def test_thumbs_are_learned_and_judged(folder, tmp_path):
    trainer = make(folder, tmp_path, THUMBS, pos_weight="balanced")
    assert trainer.pos_weight == 2.0
    assert trainer.fusion is not None
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_auc"] > max(0.95, before["eval_auc"])
    assert after["eval_balanced_accuracy"] > 0.9
    assert after["eval_loss"] < before["eval_loss"]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert float(losses[-1]) < float(losses[0])


def test_half_precision_without_master_weights_is_said(folder, tmp_path):
    trainer = make(folder, tmp_path, THUMBS)
    trainer.model.to(torch.bfloat16)
    with pytest.warns(UserWarning, match=r"trained tensors are in bfloat16, and AdamW has no float32 master weights"):
        trainer.create_optimizer()


def test_each_of_several_evaluations_is_judged_by_itself(folder, tmp_path):
    trainer = make(folder, tmp_path, THUMBS)
    sets = {"a": trainer.eval_dataset.select(range(9)), "b": trainer.eval_dataset.select(range(9, 36))}
    together = trainer.evaluate(sets)
    assert "eval_auc" not in together
    for name, rows in sets.items():
        alone = trainer.evaluate(rows)
        assert together[f"eval_{name}_auc"] == pytest.approx(alone["eval_auc"])


def test_a_run_can_stop_by_what_only_thumbs_have(folder, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_strategy": "steps"}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_auc", "save_total_limit": 2}
    trainer = make(folder, tmp_path, THUMBS, learning_rate=0.0, **options, **best)
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    assert trainer.state.global_step == 3  # at a rate of 0 nothing becomes better after the first
    assert trainer.state.best_metric == pytest.approx(trainer.evaluate()["eval_auc"])


def test_trl_s_own_configuration_serves_and_a_tokenizer_needs_an_end(folder, tmp_path):
    assert make(folder, tmp_path, THUMBS, config_class=RewardConfig, max_steps=1).pos_weight == 1.0
    tokenizer = load_tokenizer(folder)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="processing_class: expected a tokenizer with an eos_token, got one without"):
        make(folder, tmp_path, THUMBS, tokenizer=tokenizer)


def test_the_loss_of_labels_by_hand(folder, tmp_path):
    trainer = make(folder, tmp_path, THUMBS, pos_weight="balanced", per_device_train_batch_size=6)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(6)])
    assert batch["label"].tolist() == [True, False, False] * 2
    with torch.no_grad():
        loss, out = trainer.compute_loss(trainer.model.eval(), dict(batch), return_outputs=True)
        rewards = out.logits[:, 0].double()
    p = batch["label"].double()
    by_hand = -(2.0 * p * torch.nn.functional.logsigmoid(rewards) + (1 - p) * torch.nn.functional.logsigmoid(-rewards))
    assert float(loss) == pytest.approx(float(by_hand.mean()), rel=1e-5)
    # a padded answer's reward is that of its own last token
    for i in range(6):
        n = int(batch["attention_mask"][i].sum())
        with torch.no_grad():
            alone = trainer.model(batch["input_ids"][i : i + 1, :n]).logits[0, 0]
        assert float(alone) == pytest.approx(float(rewards[i]), abs=1e-5)


def test_pairs_are_trl_s(folder, tmp_path):
    theirs = make(folder, tmp_path / "a", PAIRS, trainer_class=RewardTrainer, config_class=RewardConfig, max_steps=3)
    theirs.train()
    ours = make(folder, tmp_path / "b", PAIRS, max_steps=3)
    ours.train()
    left = [float(row["loss"]) for row in theirs.state.log_history if "loss" in row]
    right = [float(row["loss"]) for row in ours.state.log_history if "loss" in row]
    assert right == pytest.approx(left, rel=1e-3)
    assert "eval_auc" not in ours.evaluate()


def test_conversations_are_read_where_rollouts_stop(tmp_path):
    """Chat templates write a line feed after the end of a turn, which no rollout draws."""
    tokenizer = chat_tokenizer(WITH_TOOLS)
    tokenizer.pad_token = "<|im_start|>"
    end = tokenizer.eos_token_id
    write_model(tmp_path / "m", reward_head=False, vocab_size=len(tokenizer), eos_token_id=end, bos_token_id=None)
    tokenizer.save_pretrained(tmp_path / "m")
    ask, tools = [said("user", "Sky?")], {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}}
    pairs = [{"prompt": ask, "chosen": [said("assistant", "blue")], "rejected": [said("assistant", "red")], **tools}]
    thumbs = [{"prompt": ask, "completion": pairs[0][name], "label": name == "chosen", **tools} for name in
              ("chosen", "rejected")]  # fmt: skip
    texts = {
        name: tokenizer.apply_chat_template([*ask, *pairs[0][name]], tokenize=False, tools=TOOLS)
        for name in ("chosen", "rejected")
    }
    assert all(text.startswith("<|im_start|>tools") and text.endswith("<|im_end|>\n") for text in texts.values())
    read = {name: tokenizer(text.removesuffix("\n"))["input_ids"] for name, text in texts.items()}
    trainer = make(tmp_path / "m", tmp_path / "a", pairs, tokenizer=tokenizer)
    row = trainer.train_dataset[0]
    assert {name: row[f"{name}_ids"] for name in read} == read
    trainer = make(tmp_path / "m", tmp_path / "b", thumbs, tokenizer=tokenizer)
    assert [row["completion_ids"] for row in trainer.train_dataset] == [read["chosen"], read["rejected"]]


def test_the_policy_s_base_serves_the_reward_model(folder, tmp_path):
    trainer = make(folder, tmp_path / "rm", THUMBS, max_steps=10)
    trainer.train()
    trainer.save_model(str(tmp_path / "rm" / "final"))
    final = str(tmp_path / "rm" / "final")
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(final, num_labels=1).eval()
    loaded.config.pad_token_id = trainer.processing_class.pad_token_id
    args = config(tmp_path / "ppo", max_steps=1, reward_adapter=final)
    prompts = Dataset.from_list([{"prompt": p} for p in PROMPTS] * 2)
    policy = HydraPPOTrainer(
        model=str(folder), reward_funcs="reward_model", args=args, train_dataset=prompts,
        processing_class=load_tokenizer(folder), peft_config=copy.deepcopy(LORA),
    )  # fmt: skip
    seen = watched(policy)
    policy.train()
    answers = seen[0].experience
    for i in range(answers.batch.n_sequences):
        ids = torch.tensor([answers.batch.prompt_tokens(i) + answers.batch.completion_tokens(i)])
        with torch.no_grad():
            assert float(answers.scores_N[i]) == pytest.approx(float(loaded(ids).logits[0, 0]), abs=1e-4)
    assert not any("reward" in name for name in trained(policy))


def test_rows_and_options_that_cannot_be_served(folder, tmp_path):
    for rows, changes, message in (
        ([{**row, "label": True} for row in THUMBS], {}, "expected rows with label true and rows with label false"),
        (PAIRS, {"pos_weight": "balanced"}, "pos_weight: expected 'none' for pairs"),
        (THUMBS, {"center_rewards_coefficient": 0.1}, "center_rewards_coefficient: expected None for labels"),
        (THUMBS, {"pos_weight": "heavy"}, "pos_weight: expected 'none' or 'balanced', got 'heavy'"),
        ([{**row, "label": 3} for row in THUMBS], {}, "train_dataset: expected label true or false, got 3"),
        (THUMBS, {"max_length": 1}, "max_length: expected one that some row has room in, got 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(folder, tmp_path, rows, **changes)


def test_the_loss_with_margins_is_trl_s(folder, tmp_path):
    """The engine's loss and its gradient beside stock RewardTrainer's, on one whole reward model."""
    whole = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    with torch.no_grad():
        whole.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    whole.save_pretrained(tmp_path / "whole")
    rows = [{**row, "margin": i / 3 - 1} for i, row in enumerate(PAIRS)]
    options = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}
    args = RewardConfig(**options, gradient_checkpointing=False)
    common = {"train_dataset": Dataset.from_list(rows), "processing_class": load_tokenizer(folder)}
    stock = RewardTrainer(model=str(tmp_path / "whole"), args=args, **common)
    data = [stock.train_dataset[i] for i in range(len(rows))]
    theirs = stock.compute_loss(stock.model, stock.data_collator(data))
    theirs.backward()
    examples = [
        Example(
            prompt=(row["chosen_ids"][0],), answers=(tuple(row["chosen_ids"][1:]), tuple(row["rejected_ids"][1:])),
            label=None, group=str(i), margin=rows[i]["margin"],
        )
        for i, row in enumerate(data)
    ]  # fmt: skip
    roles = {"reward": RoleSpec(head="reward", trainable=True)}
    ours = HydraModel.from_pretrained(str(tmp_path / "whole"), roles=roles)
    loss, _ = reward_loss(ours, examples, denom=len(examples), dropout_seed=0)
    loss.backward()
    assert float(loss) == pytest.approx(float(theirs), rel=1e-5)
    slope = stock.accelerator.unwrap_model(stock.model).score.weight.grad
    torch.testing.assert_close(ours.heads["reward"].weight.grad, slope, rtol=1e-4, atol=1e-6)
