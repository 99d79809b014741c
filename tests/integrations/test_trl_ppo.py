"""`HydraPPOTrainer`: PPO behind TRL on one base; its folders, its resumption, and what it refuses."""

import copy
import math
import shutil
from typing import Any

import pandas
import pytest
import torch

pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")

from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig

from rlhf_engine.errors import ConfigError, NonFiniteError
from rlhf_engine.hydra import HydraModel, SlotConfig, hydra_roles
from rlhf_engine.integrations.trl import HydraPPOConfig, HydraPPOTrainer
from tests.integrations.trl_runs import LORA, QUICK, make_trainer, rows, run_ranks, trained, watched, words
from tests.training.test_data import PROMPTS, write_model


def config(output, **changes) -> HydraPPOConfig:
    return HydraPPOConfig(**{**QUICK, "output_dir": str(output), "steps_per_generation": 4, **changes})


def make(folder, output, reward_funcs=words, *, peft_config=LORA, model=None, **changes):
    given = {name: changes.pop(name) for name in ("callbacks", "optimizers") if name in changes}
    given |= {"peft_config": peft_config, "model": model}
    return make_trainer(HydraPPOTrainer, config(output, **changes), folder, reward_funcs, **given)


@pytest.fixture(scope="module")
def learned(folder, tmp_path_factory):
    """A trainer after four steps, its folder, and its tensors before them."""
    output = tmp_path_factory.mktemp("learned")
    trainer = make(folder, output, ["reward_model", words], save_strategy="steps", save_steps=4)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    return trainer, output, before


def test_it_trains_actor_and_critic_on_one_frozen_base(learned):
    trainer, _, before = learned
    after = trained(trainer)
    assert {n.split(".")[-2] for n in after if "lora_" in n} == {"default", "critic"}
    assert {n for n in after if "lora_" not in n} == {"hydra_heads.value.weight", "hydra_heads.value.bias"}
    assert not any(torch.equal(before[n], after[n]) for n in after if "lora_B" in n or "value" in n)
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if n not in after)
    # one set of tensors
    theirs = {id(p) for p in trainer.model.parameters()}
    assert all(id(p) in theirs for p in trainer.hydra.parameters())
    assert sum(p.numel() for p in trainer.model.parameters()) == sum(trainer.hydra.held_parameters().values())


def test_metrics_say_that_the_start_is_the_reference(learned):
    first, second = ({k: float(x) for k, x in row.items()} for row in rows(learned[0])[:2])
    assert abs(first["kl"]) < 1e-6  # rows of the two lanes stand at other places of one product
    assert first["clip_ratio"] == 0.0
    assert abs(first["approx_kl"]) < 1e-10  # the ratio is 1 where nothing has been learned since
    assert second["approx_kl"] > 1e-6
    assert {"entropy", "value/loss", "value/mean"} <= set(first)
    told = first["rewards/reward_model/mean"] + first["rewards/words/mean"]
    assert first["reward"] == pytest.approx(told, rel=1e-3)
    assert "frac_reward_zero_std" not in first


def test_the_table_of_answers_has_these_advantages(folder, tmp_path):
    trainer = make(folder, tmp_path, max_steps=1, log_completions=True, scale_rewards="none")
    seen = watched(trainer)
    trainer.train()
    (made,) = seen
    advantages, lengths = made.columns["advantages_M"], list(made.experience.batch.completion_lens)
    told = pandas.concat(pandas.read_parquet(path) for path in (tmp_path / "completions").glob("*.parquet"))
    expected = [float(x.mean()) for x in advantages.split(lengths)]
    assert told["advantage"].tolist() == pytest.approx(expected, rel=1e-5)
    assert told["words"].tolist() == words(None, told["completion"].tolist(), None)


def test_under_autocast_a_policy_that_has_not_learned_has_a_ratio_of_one(folder, tmp_path):
    """bf16 is what TRL takes unless it is told otherwise, and so are checkpointed activations."""
    trainer = make(folder, tmp_path, ["reward_model", words], bf16=True, gradient_checkpointing=True)
    trainer.train()
    first, second = rows(trainer)[:2]
    assert float(first["clip_ratio"]) == 0.0
    assert abs(float(first["approx_kl"])) < 1e-10
    assert float(second["approx_kl"]) > 1e-6
    assert abs(float(first["kl"])) < 1e-6


def test_the_update_is_that_of_a_hydra_model(folder, tmp_path):
    """A step's gradient, accumulated over micro-batches, against HydraModel's own on the whole minibatch."""
    trainer = make(folder, tmp_path, "reward_model", max_steps=1, lr_scheduler_type="constant", max_grad_norm=0.0)
    gradients, experience = {}, {}
    compute = trainer._generate_and_score_completions

    def keep(inputs):
        experience.update(compute(inputs))
        return experience

    trainer._generate_and_score_completions = keep

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            gradients.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
            used.extend(trainer._buffered_inputs[:2])

    used: list[dict[str, torch.Tensor]] = []
    trainer.add_callback(Look())
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    # the same answers through a model of our own, in one batch
    from rlhf_engine.hydra import PackedBatch, PolicyLoss, ValueLoss

    slots = dict.fromkeys(("actor", "critic"), SlotConfig(r=4, alpha=8.0))
    model = HydraModel.from_pretrained(folder, roles=hydra_roles(), slots=slots)
    for slot, name in (("actor", "default"), ("critic", "critic")):
        for path, pair in model.backbone().slot(slot).items():
            prefix = f"base_model.model.{path}"
            with torch.no_grad():
                pair.A.copy_(before[f"{prefix}.lora_A.{name}.weight"])
                pair.B.copy_(before[f"{prefix}.lora_B.{name}.weight"])
    lists: dict[str, list] = {"prompt": [], "answer": [], "old": [], "adv": [], "ret": [], "val": []}
    for part in used:
        for i in range(len(part["prompt_ids"])):
            mask = part["answer_mask"][i]
            lists["prompt"].append(part["prompt_ids"][i][part["prompt_mask"][i].bool()].tolist())
            lists["answer"].append(part["completion_ids"][i][mask].tolist())
            for key, name in (("old", "old_logprobs"), ("adv", "advantages"), ("ret", "returns"), ("val", "values")):
                lists[key].append(part[f"of_{name}_M"][i][mask])
    batch = PackedBatch.from_lists(lists["prompt"], lists["answer"])
    old, advantage, returns, values = (torch.cat(lists[key]) for key in ("old", "adv", "ret", "val"))
    mask, denom = torch.ones(len(old), dtype=torch.bool), float(used[0]["num_items_in_batch"]) / 2
    policy = PolicyLoss(old_logprob_M=old, advantage_M=advantage, mask_M=mask, denom=denom)
    value = ValueLoss(old_value_M=values, return_M=returns, mask_M=mask, denom=denom, clip=0.2)
    found, critic = model(batch, (policy, value))
    (found.loss + 0.1 * critic.loss).backward()
    compared = 0
    for slot, name in (("actor", "default"), ("critic", "critic")):
        for path, pair in model.backbone().slot(slot).items():
            for half, p in (("A", pair.A), ("B", pair.B)):
                theirs = gradients[f"base_model.model.{path}.lora_{half}.{name}.weight"]
                scale = max(float(p.grad.abs().max()), 1e-8)
                assert float((theirs - p.grad).abs().max()) < 1e-4 * scale, (path, half)
                compared += 1
    assert compared == 2 * 2 * 14
    head = model.heads["value"].weight.grad
    assert float((gradients["hydra_heads.value.weight"] - head).abs().max()) < 1e-4 * float(head.abs().max())
    # advantages are whitened over the whole rollout
    whole = experience["of_advantages_M"][experience["answer_mask"]]
    assert abs(float(whole.mean())) < 1e-5
    assert float(whole.var()) == pytest.approx(1.0, abs=1e-3)


def test_a_resumed_run_goes_on_in_its_epoch_and_its_line_of_the_log(folder, tmp_path):
    """An epoch is three rollouts, a line of the log one; the stop lies in the second epoch's first rollout."""
    options = {"max_steps": 10, "save_strategy": "steps", "save_steps": 1, "logging_steps": 2, "num_iterations": 1}
    whole = make(folder, tmp_path / "whole", ["reward_model", words], **options)
    asked = prompts_of(whole)
    whole.train()
    resumed = make(folder, tmp_path / "parts", ["reward_model", words], **options)
    again = prompts_of(resumed)
    with torch.no_grad():
        for p in resumed.hydra.heads["value"].parameters():
            p.fill_(7.0)  # a head of its own would be noticed
    checkpoints = [tmp_path / "whole" / f"checkpoint-{step}" for step in (6, 7)]
    assert [(folder / "rollout_0.safetensors").is_file() for folder in checkpoints] == [False, True]
    resumed.train(resume_from_checkpoint=str(checkpoints[1]))
    assert len(asked) == 5
    assert asked[0] != asked[3]  # each epoch has an order of its own
    assert again == asked[4:]
    left, right = trained(whole), trained(resumed)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[n], right[n]) for n in left)

    def told(trainer):  # the mean loss since the last line is transformers', which begins anew
        return [{k: v for k, v in row.items() if "time" not in k and k != "loss"} for row in rows(trainer)]

    assert len(told(whole)) == 5
    assert told(whole) == told(resumed)
    assert "reward" in told(resumed)[3]


def prompts_of(trainer) -> list[list[str]]:
    """The prompts of each rollout, to be."""
    found: list[list[str]] = []
    compute = trainer._generate_and_score_completions

    def look(inputs):
        found.append([row["prompt"] for row in inputs])
        return compute(inputs)

    trainer._generate_and_score_completions = look
    return found


def test_a_checkpoint_is_peft_s_with_heads_beside_it(folder, learned, tmp_path):
    trainer, output, _ = learned
    root = shutil.copytree(output / "checkpoint-4", tmp_path / "checkpoint-4")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    loaded = PeftModel.from_pretrained(plain, root)
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trainer.model.eval()(ids).logits)
    assert sorted(load_file(root / "heads.safetensors")) == ["value.bias", "value.weight"]
    assert (root / "critic" / "adapter_model.safetensors").is_file()
    assert "rlhf-engine" in (root / "README.md").read_text()
    (root / "heads.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint: expected heads\.safetensors with the value head"):
        make(folder, tmp_path / "b", ["reward_model", words]).train(resume_from_checkpoint=str(root))


def test_a_peft_model_of_one_s_own_and_its_options(folder, tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)
    rates = {"critic_learning_rate": 0.3, "learning_rate": 0.0}
    trainer = make(folder, tmp_path, model=model, peft_config=None, max_steps=2, **rates)
    before = trained(trainer)
    trainer.train()
    after = trained(trainer)
    for name in before:
        moves = "critic" in name or "value" in name
        if "lora_A" not in name:  # A has no gradient while B is 0
            assert torch.equal(before[name], after[name]) != moves, name


def test_a_run_that_starts_from_an_adapter_has_it_for_its_reference(folder, tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), copy.deepcopy(LORA))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    trainer = make(folder, tmp_path, model=model, peft_config=None)
    before = {name: p.clone() for name, p in trainer.hydra.backbone().slot("reference").named_parameters()}
    assert all(p.any() for p in before.values())
    trainer.train()
    found = [float(row["kl"]) for row in rows(trainer) if "kl" in row]
    assert abs(found[0]) < 1e-6  # the KL to the base is not 0
    assert found[1] != 0.0
    after = dict(trainer.hydra.backbone().slot("reference").named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sum("reference" in name for name, _ in trainer.model.named_parameters()) == 0


def test_ends_and_answers_without_a_reward(folder, tmp_path):
    def some(prompts, completions, completion_ids, **columns):
        return [None if i % 2 else 1.0 for i in range(len(prompts))]

    trainer = make(folder, tmp_path, some, missing_eos_penalty=5.0)
    seen = []
    compute = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: seen.append(compute(inputs)) or seen[-1]
    trainer.train()
    out = seen[0]
    assert out["loss_mask"].any(1).tolist() == [True, False] * 8
    ends = set(trainer.eos_token_ids)
    for i in range(0, 16, 2):
        answer = out["completion_ids"][i][out["answer_mask"][i]].tolist()
        ended = answer[-1] in ends
        # undiscounted, a first token's return is its advantage before whitening plus its value: lam < 1 leaves the last
        last = len(answer) - 1
        assert float(out["of_returns_M"][i][last]) == pytest.approx(1.0 if ended else -4.0, abs=1e-4)


def test_evaluation_uses_the_same_path(folder, tmp_path):
    trainer = make(folder, tmp_path, max_steps=1)
    found = trainer.evaluate(Dataset.from_list([{"prompt": p} for p in PROMPTS[:8]]))
    assert math.isfinite(found["eval_loss"])
    assert found["eval_reward"] > 0
    made = watched(trainer)
    for _ in range(2):  # two batches of the same prompt
        trainer.evaluate(Dataset.from_list([{"prompt": PROMPTS[0]}] * 16))
    seen = [x.experience.batch.tokens_T.tolist() for x in made]
    assert len(seen) == 4
    assert seen[0] != seen[1]
    assert seen[:2] == seen[2:]
    again = trainer.evaluate(Dataset.from_list([{"prompt": p} for p in PROMPTS[:8]]))
    assert again["eval_reward"] == found["eval_reward"]


def test_options_that_cannot_be_served(tmp_path):
    for changes, message in (
        ({"use_vllm": True}, "use_vllm: expected False"),
        ({"top_p": 1.1}, r"top_p: expected a number > 0 and <= 1, got 1\.1"),
        ({"top_k": -2}, "top_k: expected None or an integer >= -1; 0 and -1 mean all tokens, got -2"),
        ({"min_p": -0.1}, r"min_p: expected None or a number from 0 to 1, got -0\.1"),
        ({"repetition_penalty": 1.1}, r"repetition_penalty: expected 1\.0, because ratios are to the policy"),
        ({"kl_estimator": "k2"}, "kl_estimator: expected 'k1' or 'k3', got 'k2'"),
        ({"cliprange_value": 0.0}, "cliprange_value: expected a number or none > 0"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level: expected 'token'"),
        ({"loss_type": "dr_grpo"}, "loss_type: expected 'ppo', got 'dr_grpo'"),
        ({"epsilon": -0.1}, r"epsilon: expected a number > 0, got -0\.1"),
        ({"max_completion_length": None}, "max_completion_length: expected an integer > 0, got None"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(tmp_path, **changes)


def test_dropout_drops_in_training_unless_it_is_turned_off(folder, tmp_path):
    def weights(dropout, **changes):
        dropping = LoraConfig(r=2, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        trainer = make(folder, tmp_path, peft_config=dropping, max_steps=2, **changes)
        trainer.train()
        return trained(trainer)

    plain, dropped, off = weights(0.0), weights(0.5), weights(0.5, disable_dropout=True)
    assert all(torch.equal(plain[name], off[name]) for name in plain)
    assert all(not torch.equal(plain[name], dropped[name]) for name in plain if "lora_B" in name)


def test_models_and_arguments_that_cannot_be_served(folder, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(folder)

    def adapted(lora=LORA, **names):
        return get_peft_model(copy.deepcopy(base), copy.deepcopy(lora), **names)

    embedded = LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM")
    dora = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    unfrozen, merged = adapted(), adapted()
    merged.merge_adapter()
    unfrozen.get_base_model().model.norm.weight.requires_grad_(True)
    own = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    no_lora: dict[str, Any] = {"peft_config": None}
    for given, message in (
        (no_lora, "peft_config: expected a LoraConfig"),
        ({**no_lora, "model": adapted(adapter_name="mine")}, r"model: expected an adapter called 'default', got \['mi"),
        ({**no_lora, "model": adapted(embedded)}, "peft_config: expected LoRA on linears alone, got .*embed_tokens"),
        ({**no_lora, "model": unfrozen}, "peft_config: expected LoRA alone to be trained, got .*norm.weight and 0 mor"),
        ({"peft_config": dora}, "the adapter 'default': expected use_dora=False"),
        ({**no_lora, "model": merged}, "^model: the adapter 'default': expected no weights with adapters merged"),
        ({"steps_per_generation": 256}, "train_dataset: expected at least the 1024 prompts of a rollout .* got 48"),
        ({"optimizers": (own, None)}, "optimizers: expected one that has every trained parameter, got one without act"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(folder, tmp_path, **given)
    with pytest.raises(ConfigError, match="args: expected a HydraPPOConfig, got a GRPOConfig"):
        make_trainer(HydraPPOTrainer, GRPOConfig(str(tmp_path), use_cpu=True, bf16=False), folder)
    with pytest.raises(ValueError, match="reward_model"):
        make(write_model(tmp_path / "headless", reward_head=False), tmp_path / "x", "reward_model")


def test_adapters_in_half_precision_without_master_weights_are_said(folder, tmp_path):
    trainer = make(folder, tmp_path)
    for p in trainer.hydra.trainable_parameters("actor").values():
        p.data = p.data.bfloat16()
    with pytest.warns(UserWarning, match=r"trained tensors are in bfloat16, and AdamW has no float32 master weights"):
        trainer.create_optimizer()


def test_an_optimizer_is_made_by_a_function_of_what_is_trained(folder, tmp_path):
    made = []

    def optimizer(parameters):
        made.append(torch.optim.SGD(parameters, lr=0.5))
        return made[-1]

    def schedule(of):
        made.append(torch.optim.lr_scheduler.LambdaLR(of, lambda step: 0.5**step))
        return made[-1]

    trainer = make(folder, tmp_path, optimizers=(optimizer, schedule), max_steps=2)
    before = trained(trainer)
    trainer.train()
    after = trained(trainer)
    assert not any(torch.equal(before[name], after[name]) for name in before if "lora_B" in name or "value" in name)
    assert [row["learning_rate"] for row in rows(trainer)] == [0.5, 0.25]
    held = {id(p) for p in made[0].param_groups[0]["params"]}
    assert held == {id(p) for p in trainer.model.parameters() if p.requires_grad}
    # a class is a function, too, and an own rate of the critic goes with it
    trainer = make(folder, tmp_path, optimizers=(torch.optim.AdamW, None), max_steps=1, critic_learning_rate=0.3)
    trainer.train()
    assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [1e-3, 0.3]
    with pytest.raises(ConfigError, match="optimizers: expected a scheduler beside its own optimizer, got one alone"):
        make(folder, tmp_path, optimizers=(None, made[1]))


def test_a_reward_that_is_not_finite_stops_the_run(folder, tmp_path):
    def bad(prompts, completions, completion_ids, **columns):
        return [float("inf")] * len(prompts)

    with pytest.raises(NonFiniteError, match="reward of an answer is not finite"):
        make(folder, tmp_path, bad).train()


def test_a_trl_with_other_methods_is_refused(folder, tmp_path, monkeypatch):
    from trl import GRPOTrainer

    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda self, inputs, prompts: None)
    with pytest.raises(ConfigError, match=r"expected GRPOTrainer\._calculate_rewards\(inputs, prompts, completions, "):
        make(folder, tmp_path)


def test_several_epochs_and_checkpointed_activations(folder, tmp_path):
    """Checkpointed ones are computed twice, and change nothing."""
    weights, counts = [], []
    for checkpointed in (False, True):
        trainer = make(folder, tmp_path, num_iterations=2, gradient_checkpointing=checkpointed)
        seen = []  # the second time a forward stops before the MLP's end
        layer = trainer.hydra.backbone().model.model.layers[0].self_attn
        layer.register_forward_hook(lambda *_, seen=seen: seen.append(torch.is_grad_enabled()))
        trainer.train()
        weights.append(trained(trainer))
        counts.append(sum(seen))
        assert max(float(row["approx_kl"]) for row in rows(trainer)) > 1e-5
    assert all(torch.allclose(weights[0][n], weights[1][n], atol=1e-5) for n in weights[0])
    assert counts == [8, 16]  # two micro-batches in each of four steps, forward and again in backward


@pytest.mark.long
def test_two_processes_have_the_gradients_of_one(folder, tmp_path):
    run_ranks(folder, tmp_path, 4)
    run_ranks(folder, tmp_path, 2, processes=2)
    alone, *ranks = (load_file(tmp_path / f"{name}.safetensors") for name in ("alone", "0", "1"))
    assert alone.keys() == ranks[0].keys() == ranks[1].keys()
    assert {name.partition("|")[0] for name in alone} == {"0", "1"}
    for name, expected in alone.items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        gap, scale = float((ranks[0][name] - expected).abs().max()), max(float(expected.abs().max()), 1e-9)
        assert gap <= 1e-5 * scale, name
