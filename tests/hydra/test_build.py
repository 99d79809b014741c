"""From options to a model: existing reward models, where the critic starts, and what is refused before weights load."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from rlhf_engine.config import TrainConfig
from rlhf_engine.data.tokenize import require_same_tokens
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import HydraModel, PackedBatch, RoleSpec, hydra_roles, load_pretrained, save_pretrained
from rlhf_engine.hydra.build import build_policy_model, check_sources
from rlhf_engine.training.rl import RlTrainer
from tests.conftest import random_batch
from tests.training.test_data import train_config, write_model

BATCH = random_batch(((3, 5), (4, 2), (1, 7)), seed=1)


def batch_for(folder: Path) -> PackedBatch:
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokens = BATCH.tokens_T % vocabulary
    return PackedBatch(
        tokens_T=tokens, cu_seqlens=BATCH.cu_seqlens, prompt_lens=BATCH.prompt_lens, sample_ids=BATCH.sample_ids
    )


def plain_rewards(classifier: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """A sequence classifier's own logits [N], one sequence at a time."""
    with torch.no_grad():
        return torch.cat(
            [classifier(row[None], use_cache=False).logits[0] for row in batch.tokens_T.split(batch.lengths)]
        )


def classifier_on(base: Path, seed: int = 4) -> torch.nn.Module:
    torch.manual_seed(seed)
    found = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1).eval()
    with torch.no_grad():
        found.score.weight.normal_()
    return found


@pytest.fixture(scope="module")
def lora_reward(model, tmp_path_factory) -> Path:
    """A reward model made with plain PEFT: LoRA on a sequence classifier, whose score goes along."""
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="SEQ_CLS")
    theirs = get_peft_model(classifier_on(model), config)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                p.normal_(std=0.3)
    folder = tmp_path_factory.mktemp("lora_rm")
    theirs.save_pretrained(folder)
    assert json.loads((folder / "adapter_config.json").read_text())["modules_to_save"] is not None
    return folder


@pytest.fixture(scope="module")
def same_decoder(model, tmp_path_factory) -> Path:
    """A sequence classifier on the very weights of the base."""
    folder = tmp_path_factory.mktemp("head_rm")
    classifier_on(model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def other_decoder(tmp_path_factory) -> Path:
    """A sequence classifier on other weights."""
    folder = tmp_path_factory.mktemp("other_rm")
    classifier_on(write_model(tmp_path_factory.mktemp("other"), seed=9)).save_pretrained(folder)
    return folder


def build(model: Path, tmp_path: Path, **options) -> HydraModel:
    return build_policy_model(train_config(model, tmp_path / "run", **options)).eval()


METHODS = ["full_ppo", "lora_ppo", "dynamic_lora_ppo", "j_hydra_ppo", "hydra_ppo"]


def test_a_lora_reward_model_made_with_peft_becomes_a_slot(model, lora_reward, tmp_path):
    for method in METHODS:
        ours = build(model, tmp_path, reward_model_path=str(lora_reward), method=method)
        theirs = PeftModel.from_pretrained(classifier_on(model), lora_reward).eval()
        batch = batch_for(model)
        assert ours.roles["reward"].slot == "reward"
        torch.testing.assert_close(
            ours.score(batch, ("reward",)).rewards_N, plain_rewards(theirs, batch).flatten(), rtol=1e-4, atol=1e-5
        )
        assert "reward" in ours.trained_heads
        assert not ours.heads["reward"].weight.requires_grad


def test_a_classifier_on_the_base_s_weights_costs_a_head(model, same_decoder, tmp_path):
    for method in METHODS:
        ours = build(model, tmp_path, reward_model_path=str(same_decoder), method=method)
        batch = batch_for(model)
        if method in ("j_hydra_ppo", "hydra_ppo"):
            assert set(ours.backbones) == {"base"}
        theirs = AutoModelForSequenceClassification.from_pretrained(same_decoder).eval()
        rewards = ours.score(batch, ("reward",)).rewards_N
        torch.testing.assert_close(rewards, plain_rewards(theirs, batch).flatten(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "method", [m if m in ("hydra_ppo", "full_ppo") else pytest.param(m, marks=pytest.mark.long) for m in METHODS]
)
def test_a_classifier_on_other_weights_brings_its_backbone(model, other_decoder, tmp_path, method):
    ours = build(model, tmp_path, reward_model_path=str(other_decoder), method=method)
    batch = batch_for(model)
    assert ours.roles["reward"].backbone == "reward"
    assert not ours.backbone("reward").has_lm_head
    theirs = AutoModelForSequenceClassification.from_pretrained(other_decoder).eval()
    rewards = ours.score(batch, ("reward",)).rewards_N
    torch.testing.assert_close(rewards, plain_rewards(theirs, batch).flatten(), rtol=1e-4, atol=1e-5)
    # and the run goes on from disk, each backbone from its own folder
    trainer = RlTrainer(train_config(model, tmp_path / "run", reward_model_path=str(other_decoder), method=method))
    trainer.step()
    save_pretrained(trainer.model, tmp_path / "saved")
    again = load_pretrained(tmp_path / "saved").score(batch)
    before = trainer.model.score(batch)
    assert torch.equal(again.rewards_N, before.rewards_N)
    assert torch.equal(again.logprobs_M, before.logprobs_M)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_in_bfloat16_can_be_saved(model, tmp_path, method):
    ours = build(model, tmp_path, method=method, dtype="bfloat16")
    save_pretrained(ours, tmp_path / "saved")
    again, batch = load_pretrained(tmp_path / "saved", dtype=torch.bfloat16), batch_for(model)
    assert torch.equal(again.score(batch).logprobs_M, ours.score(batch).logprobs_M)


def test_a_loaded_classifier_brings_its_score(model, other_decoder):
    theirs = AutoModelForSequenceClassification.from_pretrained(other_decoder).eval()
    roles = {**hydra_roles(), "reward": RoleSpec(backbone="rm", head="reward")}
    batch = batch_for(model)
    expected = plain_rewards(theirs, batch).flatten()
    for source in (theirs, other_decoder):
        ours = HydraModel.from_pretrained(model, roles=roles, backbones={"rm": source}).eval()
        torch.testing.assert_close(ours.score(batch, ("reward",)).rewards_N, expected, rtol=1e-4, atol=1e-5)


def last_values(ours: HydraModel, batch: PackedBatch) -> torch.Tensor:
    """The critic's value of each whole sequence [N], read where rewards are read."""
    critic = ours.roles["critic"]
    with torch.no_grad():
        hidden = ours.backbone(critic.backbone).run_lanes([(batch, None, critic.slot)])[0]
        return ours.heads["value"](hidden[batch.last_rows_N])


def test_a_critic_that_starts_as_the_reward_model_predicts_its_rewards(model, lora_reward, same_decoder, tmp_path):
    for method in METHODS:
        batch = batch_for(model)
        sources = [{"reward_model_path": str(same_decoder)}]
        if method == "j_hydra_ppo":  # no slot of its own that could start as the reward's, but the actor's can
            sources.append({"reward_model_path": str(lora_reward), "reference_adapter": str(lora_reward)})
        elif method != "full_ppo":
            sources.append({"reward_model_path": str(lora_reward)})
        for source in sources:
            ours = build(model, tmp_path, method=method, critic_init="reward", **source)
            rewards = ours.score(batch, ("reward",)).rewards_N
            torch.testing.assert_close(last_values(ours, batch), rewards, rtol=1e-4, atol=1e-5)
            assert ours.heads["value"].weight.data_ptr() != ours.heads["reward"].weight.data_ptr()


@pytest.fixture
def lora(model, tmp_path) -> Path:
    """A policy's adapter made with plain PEFT."""
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["v_proj"], task_type="CAUSAL_LM")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_B" in name:
                p.normal_()
    theirs.save_pretrained(tmp_path / "lora")
    return tmp_path / "lora"


@pytest.mark.parametrize("method", ["lora_ppo", "hydra_ppo"])
def test_a_critic_that_starts_as_the_actor_has_its_adapter(model, lora, tmp_path, method):
    ours = build(model, tmp_path, method=method, critic_init="actor", actor_adapter=str(lora))
    actor, critic = (dict(ours.role_backbone(r).slot(r).items()) for r in ("actor", "critic"))
    for path, pair in actor.items():
        assert torch.equal(pair.B, critic[path].B)
        assert pair.B.any()
        assert pair.B.data_ptr() != critic[path].B.data_ptr()


def test_the_reference_on_a_slot_is_where_the_actor_starts(model, lora, tmp_path):
    batch = batch_for(model)
    for method in ("lora_ppo", "dynamic_lora_ppo", "j_hydra_ppo", "hydra_ppo"):
        ours = build(model, tmp_path, method=method, reference_adapter=str(lora))
        scores = ours.score(batch, ("actor", "reference"))
        torch.testing.assert_close(scores.logprobs_M, scores.ref_logprobs_M, rtol=1e-5, atol=1e-5)
        plain = ours.backbone().run_lanes([(batch, None, None)])[0]
        assert not torch.allclose(plain, ours.backbone().run_lanes([(batch, None, "actor")])[0])


def test_contradictory_options():
    for options, message in [
        ({"method": "full_ppo", "quantization": "4bit"}, "quantization: expected it unset for full_ppo, .*got '4bit'"),
        ({"method": "full_ppo", "actor_adapter": "a"}, "actor_adapter: expected it unset for full_ppo"),
        ({"method": "full_ppo", "reference_adapter": "a"}, "reference_adapter: expected it unset for full_ppo"),
        (
            {"method": "j_hydra_ppo", "critic_init": "reward", "reward_model_path": "b", "reference_adapter": "a"},
            "critic_init: expected 'base' for j_hydra_ppo here, .* on 'a', where the reward head reads 'the base'",
        ),
        (
            {"method": "dynamic_lora_ppo", "reward_funcs": ["m:f"]},
            "method: expected another than dynamic_lora_ppo, whose second backbone is the reward model's, without",
        ),
        (
            {"critic_init": "reward", "reward_funcs": ["m:f"]},
            "critic_init: expected another start without 'reward_model'",
        ),
        ({"critic_init": "actor", "method": "dynamic_lora_ppo"}, "critic_init: expected 'base' or 'reward' for dynami"),
        (
            {"reward_model_path": "b", "reward_funcs": ["m:f"]},
            "reward_model_path: expected it unset without 'reward_model'",
        ),
        ({"method": "hydra"}, r"method: expected one of .*full_ppo.*hydra_ppo.*got 'hydra'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            TrainConfig(model_name_or_path="m", output_dir="o", dataset_name="d", **options)


def broken(folder: Path, model: Path) -> Path:
    """A copy of a model folder whose weights cannot be read: what is found here is found before they are."""
    shutil.copytree(model, folder)
    (folder / "model.safetensors").write_bytes(b"nothing")
    return folder


def test_found_before_any_weights_are_read(model, lora_reward, tmp_path):
    base = broken(tmp_path / "base", model)
    for kind, architecture, message in (
        ("t5", "T5ForConditionalGeneration", "model, got .* a t5 with an encoder and a decoder"),
        ("bert", "BertForMaskedLM", "language model, got .* of type 'bert'"),
    ):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture]}))
        with pytest.raises(ValueError, match=f"expected a decoder-only {message}"):
            HydraModel.from_pretrained(tmp_path / kind, roles=hydra_roles())
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    for load in (
        lambda: HydraModel.from_pretrained(base, roles=hydra_roles()),
        lambda: check_sources(train_config(base, tmp_path / "run")),
    ):
        with pytest.raises(ValueError, match=r"expected a model with an LM head, got .* which was saved as LlamaModel"):
            load()
    (base / "config.json").write_text(json.dumps(config))
    (base / "heads.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"reward_funcs: 'reward_model': expected a trained reward head .*reward_mod"):
        build(base, tmp_path)
    other = tmp_path / "other_base"
    shutil.copytree(lora_reward, other)
    recorded = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**recorded, "base_model_name_or_path": "x/vicuna"}))
    with pytest.raises(ConfigError, match=r"actor_adapter: expected adapters of one base, got actor_adapter of 'vicun"):
        build(base, tmp_path, actor_adapter=str(other), reward_model_path=str(lora_reward))
    declared = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": declared}))
    with pytest.raises(ConfigError, match=r"model_name_or_path: expected a base that is not quantised for full_ppo"):
        build(base, tmp_path, method="full_ppo")


def test_the_hash_of_a_base_says_more_than_its_name(model, lora_reward, tmp_path):
    def adapter(name: str, base: str, digest: str | None) -> str:
        folder = tmp_path / name
        shutil.copytree(lora_reward, folder)
        recorded = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**recorded, "base_model_name_or_path": base}))
        if digest is not None:
            (folder / "rlhf_engine.json").write_text(json.dumps({"base_hash": digest}))
        return str(folder)

    def check(actor: str, reward: str) -> None:
        check_sources(train_config(model, tmp_path / "run", actor_adapter=actor, reward_model_path=reward))

    of_hub, of_snapshot = adapter("a", "org/tiny", "1" * 64), adapter("b", "/cache/0f3e", "1" * 64)
    check(of_hub, of_snapshot)
    third = adapter("e", "elsewhere/0f3e", None)
    check_sources(
        train_config(
            model, tmp_path / "run", actor_adapter=of_hub, reference_adapter=of_snapshot, reward_model_path=third
        )
    )
    with pytest.raises(ConfigError, match=r"actor_adapter: expected adapters of one base, got actor_adapter of hash 1"):
        check(of_hub, adapter("c", "org/tiny", "2" * 64))
    with pytest.raises(ConfigError, match=r"actor_adapter of 'tiny', reward_model_path of '0f3e'; if these are one"):
        check(of_hub, adapter("d", "/cache/0f3e", None))


def test_a_reward_model_reads_the_policy_s_tokens(model, same_decoder, tmp_path):
    def trainer(folder: Path, policy: Path = model) -> RlTrainer:
        return RlTrainer(train_config(policy, tmp_path / "run", reward_model_path=str(folder)))

    trainer(same_decoder)  # no tokenizer, a vocabulary of one size
    larger = tmp_path / "larger"
    other = classifier_on(model)
    other.resize_token_embeddings(other.config.vocab_size + 1)
    other.save_pretrained(larger)
    with pytest.raises(ConfigError, match=r"reward_model_path: expected a vocabulary of \d+ tokens, the policy's"):
        trainer(larger)

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "[padding]"})
    tokenizer.save_pretrained(larger)  # reward models often bring one
    trainer(larger)
    more = tmp_path / "more"
    shutil.copytree(model, more)
    tokenizer.save_pretrained(more)
    AutoTokenizer.from_pretrained(model).save_pretrained(larger)
    with pytest.raises(ConfigError, match=r"1 of its tokens have another id or none, such as '\[padding\]'"):
        trainer(larger, more)  # a token that the policy has been given and the reward model has not

    stored = json.loads((larger / "tokenizer.json").read_text())
    vocabulary = stored["model"]["vocab"]
    a, b = [token for token in vocabulary if token not in tokenizer.all_special_tokens][-2:]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (larger / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"reward_model_path: expected the policy's tokenizer in .* 2 of its tokens"):
        trainer(larger)

    with pytest.raises(ConfigError, match=r"reward_model_path: expected a model folder or owner/name of the Hub"):
        trainer(Path("none"))
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    with pytest.raises(ConfigError, match=r"^reward_model_path: expected a decoder-only language model"):
        trainer(bert)


def test_a_folder_without_a_tokenizer_has_none_whatever_transformers_makes_up(model, tmp_path):
    """Qwen2's tokenizer class comes with a vocabulary of one token where there are no files."""
    small = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_labels": 1, "pad_token_id": 0,
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    Qwen2ForSequenceClassification(Qwen2Config(**small, vocab_size=len(tokenizer))).save_pretrained(tmp_path / "rm")
    require_same_tokens(tokenizer, tmp_path / "rm", len(tokenizer))
    with pytest.raises(ConfigError, match="expected a vocabulary of 7 tokens, the policy's"):
        require_same_tokens(tokenizer, tmp_path / "rm", 7)


def test_a_folder_that_lacks_its_lm_head_is_refused(model, tmp_path):
    lacking = tmp_path / "m"
    shutil.copytree(model, lacking)
    tensors = load_file(lacking / "model.safetensors")
    save_file(
        {k: t for k, t in tensors.items() if k != "lm_head.weight"}, lacking / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ValueError, match=r"expected all weights in .*got none for \['lm_head.weight'\]"):
        build(lacking, tmp_path)


def test_reward_models_that_do_not_fit(model, other_decoder, tmp_path):
    with pytest.raises(ConfigError, match=r"critic_init: expected 'base' or 'actor' for hydra_ppo, .*other weights"):
        build(model, tmp_path, reward_model_path=str(other_decoder), critic_init="reward")
    with pytest.raises(
        ConfigError,
        match="reward_funcs: 'reward_model': expected the folder of a reward model or owner/name of the Hub, got 'no",
    ):
        build(model, tmp_path, reward_model_path="none")
    three = tmp_path / "three"
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=3).save_pretrained(three)
    with pytest.raises(ValueError, match=r"expected a reward model with one output .*got a score of shape \(3, 24\)"):
        build(model, tmp_path, reward_model_path=str(three))
    with pytest.raises(ValueError, match=r"expected a reward model with one output .*got 3"):
        HydraModel.from_pretrained(
            model, roles={"judge": RoleSpec(backbone="rm", head="reward")}, backbones={"rm": three}
        )


def test_a_library_that_is_missing_is_named_with_the_option(monkeypatch, model, tmp_path):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    said = r"^quantization: expected none where bitsandbytes is not installed \(pip install 'rlhf-engine\[bnb\]'\), got"
    with pytest.raises(ConfigError, match=said):
        check_sources(train_config(model, tmp_path, quantization="4bit"))
