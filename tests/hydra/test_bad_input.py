"""Requests that cannot be served by a HydraModel: each error names the argument, what was expected, what came."""

import json

import pytest
import torch

from rlhf_engine.data.tokenize import load_tokenizer
from rlhf_engine.hydra import (
    HydraModel,
    LogprobPair,
    Logprobs,
    PackedBatch,
    Rewards,
    RoleSpec,
    SlotConfig,
    Values,
    hydra_roles,
    save_pretrained,
)
from rlhf_engine.hydra.loading import load_model, read_config
from rlhf_engine.hydra.peft_io import read_slot_config
from tests.conftest import VOCAB, build, random_batch, tiny_llama

ACTOR = {"actor": RoleSpec(slot="actor", trainable=True)}


def make(**options) -> HydraModel:
    return HydraModel.from_pretrained(tiny_llama(), **{"roles": hydra_roles(), **options})


def test_slot_configs():
    for options, message in [
        ({"r": 0}, "r: expected a LoRA rank of at least 1, got 0"),
        ({"alpha": 0.0}, "alpha: expected a finite number other than 0, got 0"),
        ({"alpha": float("nan")}, "alpha: expected a finite number other than 0, got nan"),
        ({"dropout": 1.0}, r"dropout: expected a probability in \[0, 1\), got 1"),
        ({"target_modules": ()}, "target_modules: expected at least one name, got none"),
    ]:
        with pytest.raises(ValueError, match=message):
            SlotConfig(**options)
    assert len({SlotConfig(target_modules=names) for names in ("q_proj", ["q_proj"], ("q_proj",))}) == 1


def test_names_that_would_be_paths():
    for field, value in [
        ("slot", ""), ("slot", "sft.v2"), ("slot", "../x"), ("slot", "a b"), ("head", "v.w"), ("backbone", "a/b"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"{field}: expected a name of letters, digits, '_' and '-', got '"):
            RoleSpec(**{field: value})


def test_requests_at_load():
    for options, message in [
        ({"roles": {}}, "roles: expected at least one role, got none"),
        ({"slots": {"teacher": SlotConfig()}}, r"slots: expected names that a role uses \(\['actor', 'critic'\]\)"),
        ({"roles": {"a": RoleSpec(slot="keys")}}, r"roles\['a'\]: expected another name than 'keys', which torch uses"),
        ({"roles": {"a": RoleSpec(head="values")}}, r"roles\['a'\]: expected another name than 'values'"),
        ({"roles": {"actor": RoleSpec(backbone="big")}}, r"backbones: expected a source for \['big'\], got \['base'\]"),
        ({"backbones": {"rm": 7}}, "source: expected a folder, a transformers PreTrainedModel or a PeftModel, got int"),
        ({"token_budget": 0}, "token_budget: expected a positive number of tokens, got 0"),
        (
            {"slots": {"actor": SlotConfig(target_modules=("q_proj", "c_attn"))}},
            r"target_modules: expected name endings among \['down_proj', 'gate_proj', 'k_proj', .*\], got \['c_attn'\]",
        ),
        (
            {"slots": {"actor": SlotConfig(target_modules=("lm_head",), dropout=0.1)}},
            r"dropout: expected 0 for a slot that targets 'lm_head', got 0\.1",
        ),
        (
            {"slots": {"actor": SlotConfig(init_from="critic"), "critic": SlotConfig(init_from="actor")}},
            "init_from: expected an origin outside of the slots .*which start from each other",
        ),
        ({"slots": {"actor": SlotConfig(init_from="actor")}}, "init_from: expected an origin outside of the slots"),
        ({"slots": {"actor": SlotConfig(init_from="sft")}}, r"adapter: expected a folder with adapter_config\.json"),
        (
            {"slots": {"critic": SlotConfig(init_from="actor", target_modules=("q_proj",))}},
            "init_from='actor': expected the same target modules as 'critic', got others",
        ),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            make(**options)


def test_a_source_of_another_kind(tmp_path):
    with pytest.raises(TypeError, match="source: expected a folder, a transformers PreTrainedModel or a PeftModel"):
        HydraModel.from_pretrained(torch.nn.Linear(2, 2), roles=ACTOR)
    with pytest.raises(ValueError, match="model_name_or_path: expected a model folder or owner/name of the Hub, got '"):
        HydraModel.from_pretrained("/nowhere", roles=ACTOR)
    with pytest.raises(ValueError, match=r"model_name_or_path: expected a folder with config\.json, got '.*' which ha"):
        HydraModel.from_pretrained(tmp_path, roles=ACTOR)
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"model_name_or_path: '.*' cannot be loaded: "):
        HydraModel.from_pretrained(tmp_path, roles=ACTOR)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tiny_llama().state_dict(), tmp_path / "pytorch_model.bin")  # pickled weights are not read
    with pytest.raises(ValueError, match=r"model_name_or_path: '.*' cannot be loaded: .*no file named"):
        HydraModel.from_pretrained(tmp_path, roles=ACTOR)


CODE = """
open({ran!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM
class MineConfig(LlamaConfig):
    model_type = {kind!r}
class Mine(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.mark.parametrize("kind", ["mine", "llama"])
def test_code_in_a_model_folder_never_runs(tmp_path, monkeypatch, kind):
    """transformers asks on the terminal whether it may, and takes a piped y for an answer."""
    ran, folder = tmp_path / "ran", tmp_path / "model"
    tiny_llama().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": kind, "auto_map": names}))
    (folder / "mine.py").write_text(CODE.format(ran=str(ran), kind=kind))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["mine.Mine", None]}}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    said = []
    for read in (read_config, lambda at: load_model(at, dtype=torch.float32, device="cpu"), load_tokenizer):
        try:
            read(str(folder))
        except ValueError as error:
            said.append(str(error))
    assert not ran.exists()
    if kind == "mine":
        assert any("expected an architecture of transformers, got one whose code lies in" in text for text in said)


def test_a_config_that_lies_about_its_weights(tmp_path):
    for lie in [
        {"vocab_size": 10**12}, {"hidden_size": "x"}, {"hidden_size": -4}, {"num_attention_heads": 0},
        {"num_hidden_layers": -1}, {"intermediate_size": 50}, {"max_position_embeddings": "x"},
        {"num_key_value_heads": 3}, {"dtype": "float7"},
    ]:  # fmt: skip
        tiny_llama().save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **lie}))
        with pytest.raises(ValueError, match=r"(model_name_or_path|LlamaForCausalLM): .*") as raised:
            HydraModel.from_pretrained(tmp_path, roles=hydra_roles())
        assert "\n" not in str(raised.value)


def test_ids_outside_the_vocabulary_are_named():
    model = make()
    for wrong in (VOCAB, -1):
        batch = random_batch(((3, 5),))
        batch.tokens_T[2] = wrong
        with pytest.raises(ValueError, match=f"^batch: expected token ids from 0 to {VOCAB - 1}, got {wrong}$"):
            model.score(batch, ("actor",))


def test_a_config_without_its_sizes_is_named(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    for name in ("num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size", "num_hidden_layers"):
        for config in ({**whole, name: 0}, {**whole, "text_config": {name: 0}}):
            path.write_text(json.dumps(config))
            said = f"^model_name_or_path: expected {name} of at least 1 in '{path}', got 0$"
            with pytest.raises(ValueError, match=said):
                read_config(tmp_path)
    for text in ("[]", "3", "null", "{"):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"^{path}: expected "):
            read_config(tmp_path)


def test_an_adapter_that_lies_about_its_rank(tmp_path):
    save_pretrained(make(), tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "r": 99_999_999}))
    with pytest.raises(ValueError, match=r"expected A of .* as \[r=99999999, in\], got \("):
        read_slot_config(tmp_path)


def test_one_backbone_cannot_belong_to_two_models():
    plain = tiny_llama()
    HydraModel.from_pretrained(plain, roles=ACTOR)
    with pytest.raises(ValueError, match="source: expected a plain LlamaForCausalLM, got the backbone of another Hydr"):
        HydraModel.from_pretrained(plain, roles=ACTOR)


def test_heads_of_another_size_are_refused(tmp_path):
    from safetensors.torch import save_file

    tiny_llama().save_pretrained(tmp_path)
    save_file({"reward.weight": torch.ones(1, 7), "reward.bias": torch.ones(1)}, tmp_path / "heads.safetensors")
    with pytest.raises(ValueError, match=r"heads\.safetensors: expected head 'reward' with .*\(1, 24\).*got .*\(1, 7"):
        HydraModel.from_pretrained(tmp_path, roles=hydra_roles())


def test_batches():
    for prompts, completions, message in [
        ([], [], "prompts: expected at least one sequence, got a batch of size 0"),
        ([[3], []], [[4], [5]], r"prompts\[1\]: expected at least one token, got an empty prompt"),
        ([[3]], [[4], [5]], "completions: expected 1 like prompts, got 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            PackedBatch.from_lists(prompts, completions)
    with pytest.raises(ValueError, match="indices: expected at least one sequence, got a batch of size 0"):
        random_batch().select([])
    with pytest.raises(ValueError, match=r"prompt_lens, sample_ids: expected 1 entries .*got 1 and 2"):
        PackedBatch.from_lists([[3]], [[4]], sample_ids=[1, 2])


def test_scores():
    for roles, options, message in [
        (("teacher",), {}, r"roles: expected names among \['actor', 'critic', 'reference', 'reward'\], got 'teacher'"),
        ((), {}, "roles: expected at least one role, got none"),
        (("actor",), {"exact_kl": True}, r"exact_kl: expected roles to hold 'actor' and 'reference', got \('actor',\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            build().score(random_batch(), roles, **options)
    with pytest.raises(ValueError, match=r"role: expected one of \['actor'\], got 'reward'"):
        HydraModel.from_pretrained(tiny_llama(), roles=ACTOR).score(random_batch(), ("actor", "reward"))


def test_a_sequence_longer_than_the_context():
    model, batch = build(), random_batch(((2, 3), (40, 25)))
    with pytest.raises(ValueError, match=r"batch: expected sequences of at most 64 tokens .*'base'\), got one of 65"):
        model.score(batch)
    model.score(random_batch(((40, 24),)))


def test_outputs_of_the_wrong_head():
    for output, message in [
        (Logprobs(role="teacher"), "role: expected one of .*, got 'teacher'"),
        (Logprobs(role="critic"), "role: expected one with an LM head .*, got 'critic'"),
        (LogprobPair(reference="reward"), "role: expected one with an LM head .*, got 'reward'"),
        (Values(role="actor"), "role: expected one with a scalar head .*, got 'actor'"),
        (Rewards(role="reference"), "role: expected one with a scalar head .*, got 'reference'"),
    ]:
        with pytest.raises(ValueError, match=message):
            build()(random_batch(), (output,))


def test_a_pair_of_two_lm_heads_has_no_gradient():
    roles = {**ACTOR, "reference": RoleSpec(backbone="ref")}
    model = HydraModel.from_pretrained(tiny_llama(), roles=roles, backbones={"ref": tiny_llama(1)})
    with pytest.raises(ValueError, match=r"reference: expected a role with the LM head of 'actor' .* where gradients"):
        model(random_batch(), (LogprobPair(),))


def test_parts_by_name():
    model = build()
    with pytest.raises(ValueError, match=r"slot: expected one of \['actor', 'critic'\], got 'sft'"):
        model.backbone().slot("sft")
    with pytest.raises(ValueError, match=r"backbone: expected one of \['base'\], got 'rm'"):
        model.backbone("rm")
    with pytest.raises(ValueError, match=r"role: expected one of .*got 'teacher'"):
        model.trainable_parameters("teacher")
