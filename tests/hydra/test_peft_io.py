"""PEFT folders and PeftModels in and out: the same function on both sides, and refusals of what is not plain LoRA."""

import contextlib
import copy
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from rlhf_kernels.runtime import registry
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config

from rlhf_engine.config.commands import ExportConfig
from rlhf_engine.hydra import (
    HydraModel,
    Logprobs,
    RoleSpec,
    SlotConfig,
    hydra_roles,
    load_pretrained,
    peft_io,
    save_pretrained,
)
from rlhf_engine.hydra.gate import head_logits
from rlhf_engine.hydra.persist import require_savable
from rlhf_engine.tools.export import find_source, merged_model
from tests.conftest import VOCAB, build, random_batch, randomise, tiny_llama
from tests.hydra.architectures import plain_model

ROOT = Path(__file__).parents[2]
BATCH = random_batch(((3, 5), (4, 4), (2, 6)))
ACTOR = {"actor": hydra_roles()["actor"]}


def slot_logits(model: HydraModel, slot: str | None) -> torch.Tensor:
    """Logits [3, 8, V] of the batch's sequences in a slot's lane."""
    with torch.no_grad():
        hidden = model.backbone().run_lanes([(BATCH, None, slot)])[0]
    return head_logits(hidden, model.backbone().lm_head_in(slot)).unflatten(0, (3, 8))


def plain_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(BATCH.tokens_T.view(3, 8), use_cache=False).logits


def trained_peft(seed: int = 3, base_seed: int = 0, **config) -> PeftModel:
    """A LoRA made with PEFT whose B is not zero."""
    torch.manual_seed(seed)
    options = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(tiny_llama(base_seed), LoraConfig(**{**options, **config}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.2)
    return model.eval()


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def expect_off(model: HydraModel, plain: torch.Tensor) -> None:
    """The plain model's logits with adapters off: their bits on the reference, close to them on `auto`."""
    close(slot_logits(model, None), plain)
    with registry.use_backend("reference"):
        assert torch.equal(slot_logits(model, None), plain)


def test_saved_slots_load_with_plain_peft(tmp_path):
    model = build()
    save_pretrained(model, tmp_path)
    for slot, folder in (("actor", tmp_path), ("critic", tmp_path / "slots" / "critic")):
        theirs = PeftModel.from_pretrained(tiny_llama(), folder).eval()
        ours = slot_logits(model, slot)
        close(ours, plain_logits(theirs))
        assert (ours - slot_logits(model, None)).abs().max() > 1e-2
        with theirs.disable_adapter():
            expect_off(model, plain_logits(theirs))
        weights = {k.removeprefix("base_model.model."): t for k, t in theirs.state_dict().items()}
        for path, pair in model.backbone().slot(slot).items():
            assert torch.equal(pair.A, weights[f"{path}.lora_A.default.weight"])
            assert torch.equal(pair.B, weights[f"{path}.lora_B.default.weight"])


def test_slot_options_survive_the_folder(tmp_path):
    config = SlotConfig(r=5, alpha=3.5, dropout=0.25, target_modules=("k_proj",), use_rslora=True)
    model = HydraModel.from_pretrained(tiny_llama(), roles=ACTOR, slots={"actor": config})
    save_pretrained(model, tmp_path)
    found = peft_io.read_slot_config(tmp_path)
    assert (found.r, found.alpha, found.dropout, found.use_rslora) == (5, 3.5, 0.25, True)
    assert set(found.target_modules) == {f"model.layers.{i}.self_attn.k_proj" for i in range(2)}


def test_lora_that_peft_adds_to_weights_needs_float32_and_no_dropout():
    expected = r"for LoRA on \['down_proj', 'gate_proj', 'up_proj'\], which PEFT takes for parts of this Deepseek"
    for dtype, slot, message in (
        (torch.bfloat16, SlotConfig(), f"lora_target_modules: expected weights in float32 {expected}.*got bfloat16"),
        (torch.float32, SlotConfig(dropout=0.1), f"lora_dropout: expected 0 {expected}.*got 0.1"),
    ):
        model = HydraModel.from_pretrained(plain_model("deepseek_v3").to(dtype), roles=ACTOR, slots={"actor": slot})
        with pytest.raises(ValueError, match=message):
            require_savable(model)
    attention = SlotConfig(dropout=0.1, target_modules=("o_proj",))
    base = plain_model("deepseek_v3").to(torch.bfloat16)
    require_savable(HydraModel.from_pretrained(base, roles=ACTOR, slots={"actor": attention}))


@pytest.mark.parametrize("rslora", [False, True])
def test_lora_that_peft_adds_to_weights_comes_back_from_folder_and_model(tmp_path, rslora):
    slots = {"actor": SlotConfig(r=4, use_rslora=rslora)}
    model = HydraModel.from_pretrained(plain_model("glm4_moe"), roles=ACTOR, slots=slots).eval()
    randomise(model, "actor")
    save_pretrained(model, tmp_path)
    theirs = PeftModel.from_pretrained(plain_model("glm4_moe"), tmp_path).eval()
    expected = plain_logits(theirs)
    close(slot_logits(model, "actor"), expected)
    back = HydraModel.from_pretrained(theirs, roles=ACTOR).eval()
    assert torch.equal(slot_logits(back, "actor"), slot_logits(model, "actor"))
    assert back.backbone().slot("actor").config.use_rslora == rslora


def test_a_slot_that_plain_peft_cannot_load_is_refused_before_training_and_at_save(tmp_path):
    base = tiny_llama()
    narrow = tiny_llama()  # a pruned layer: no model of this class and config has its shape
    narrow.model.layers[1].mlp.down_proj = torch.nn.Linear(20, 24, bias=False)
    narrow.model.layers[1].mlp.gate_proj = torch.nn.Linear(24, 20, bias=False)
    narrow.model.layers[1].mlp.up_proj = torch.nn.Linear(24, 20, bias=False)
    for source, refused in ((base, False), (narrow, True)):
        model = HydraModel.from_pretrained(source, roles=ACTOR)
        for act in (require_savable, lambda model: save_pretrained(model, tmp_path)):
            with (
                pytest.raises(ValueError, match="expected plain PEFT to load slot 'actor' of a LlamaForCausalLM, got")
                if refused
                else contextlib.nullcontext()
            ):
                act(model)


@pytest.mark.parametrize("rslora", [False, True])
def test_a_lora_trained_with_peft_loads_into_a_slot(tmp_path, rslora):
    theirs = trained_peft(use_rslora=rslora)
    theirs.save_pretrained(tmp_path)
    slots = {"actor": peft_io.read_slot_config(tmp_path)}
    model = HydraModel.from_pretrained(tiny_llama(), roles=hydra_roles(), slots=slots).eval()
    ours = slot_logits(model, "actor")
    close(ours, plain_logits(theirs))
    assert (ours - slot_logits(model, None)).abs().max() > 1e-2
    assert torch.equal(slot_logits(model, "critic"), slot_logits(model, None))


def test_a_peft_model_becomes_the_actor_and_its_base_is_plain_again():
    source = trained_peft()
    expected, weights = plain_logits(source), dict(source.peft_config)
    model = HydraModel.from_pretrained(source, roles=hydra_roles()).eval()
    close(slot_logits(model, "actor"), expected)
    base = model.backbone().model
    plain = tiny_llama()
    assert type(base) is type(plain)
    assert [n for n, _ in base.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), plain.parameters(), strict=True))
    plain.set_attn_implementation("sdpa")
    expect_off(model, plain_logits(plain))
    assert (model.backbone().slot("actor").config.r, weights["default"].r) == (3, 3)


def test_a_slot_starts_from_another_slot(tmp_path, monkeypatch):
    trained_peft().save_pretrained(tmp_path / "sft")
    monkeypatch.chdir(tmp_path)  # where a relative folder is named like its slot
    roles = hydra_roles(reference_slot="sft")
    sft = peft_io.read_slot_config("sft")
    shape = {"r": sft.r, "alpha": sft.alpha, "target_modules": sft.target_modules}
    chained = {
        "actor": SlotConfig(**shape, init_from="sft"),
        "critic": SlotConfig(**shape, init_from="actor"),
        "sft": sft,
    }
    model = HydraModel.from_pretrained(tiny_llama(), roles=roles, slots=chained).eval()
    for slot in ("actor", "critic"):
        assert torch.equal(slot_logits(model, slot), slot_logits(model, "sft"))
    assert not torch.equal(slot_logits(model, "sft"), slot_logits(model, None))
    assert not any(p.requires_grad for p in model.backbone().slot("sft").parameters())


@pytest.mark.parametrize(
    ("name", "targets"), [("qwen3_moe", ["q_proj", "o_proj"]), ("llama", ["lm_head"]), ("qwen2", ["lm_head", "k_proj"])]
)
def test_attention_of_a_mixture_and_the_lm_head_come_from_peft(tmp_path, name, targets):
    """qwen2's LM head is tied to its embedding."""
    torch.manual_seed(3)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    theirs = get_peft_model(plain_model(name), config).eval()
    with torch.no_grad():
        expected = theirs(BATCH.tokens_T.view(3, 8), use_cache=False).logits
    theirs.save_pretrained(tmp_path)
    for source, slots in ((plain_model(name), {"actor": peft_io.read_slot_config(tmp_path)}), (theirs, {})):
        model = HydraModel.from_pretrained(source, roles=ACTOR, slots=slots).eval()
        close(slot_logits(model, "actor"), expected)
        assert (slot_logits(model, "actor") - slot_logits(model, None)).abs().max() > 1e-2


def test_a_vision_tower_as_deep_as_the_decoder_has_no_adapters():
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 64}
    vision = {"image_size": 28, "patch_size": 14, "vision_use_head": False}
    config = Gemma3Config(text_config={**shape, **text}, vision_config={**shape, **vision})
    for targets in ("all-linear", ("q_proj",)):
        torch.manual_seed(0)
        source = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
        slots = {"actor": SlotConfig(r=4, target_modules=targets)}
        model = HydraModel.from_pretrained(source, roles=ACTOR, slots=slots)
        assert {path.split(".layers.")[0] for path, _ in model.backbone().slot("actor").items()} == {
            "model.language_model"
        }
        (out,) = model(BATCH, (Logprobs(),))
        out.logprob.sum().backward()
        assert all(pair.B.grad.any() for _, pair in model.backbone().slot("actor").items())
    towers = SlotConfig(target_modules=("model.vision_tower.encoder.layers.0.self_attn.q_proj",))
    with pytest.raises(ValueError, match=r"target_modules: expected name endings among .* which match nothing"):
        HydraModel.from_pretrained(
            AutoModelForCausalLM.from_config(copy.deepcopy(config)), roles=ACTOR, slots={"actor": towers}
        )


NOT_PLAIN = [
    ({"use_dora": True}, "expected use_dora=False, got True, which is not served"),
    ({"bias": "lora_only"}, "expected bias='none', got 'lora_only'"),
    ({"modules_to_save": ["lm_head"]}, r"expected modules_to_save=None, or .* of a reward model, got \['lm_head'\]"),
    ({"rank_pattern": {"q_proj": 2}}, r"expected rank_pattern=\{\}, got \{'q_proj': 2\}"),
    ({"alpha_pattern": {"q_proj": 2}}, r"expected alpha_pattern=\{\}, got"),
    ({"trainable_token_indices": [4]}, r"expected trainable_token_indices=None, got"),
    ({"init_lora_weights": "pissa"}, "expected init_lora_weights that leaves the base alone, got 'pissa'"),
]


def test_what_is_not_plain_lora_is_refused_as_folder_and_as_model(tmp_path):
    for i, (config, message) in enumerate(NOT_PLAIN):
        source, folder = trained_peft(**config), tmp_path / str(i)
        source.save_pretrained(folder)
        with pytest.raises(ValueError, match=f"adapter '.*': {message}"):
            peft_io.read_slot_config(folder)
        # also where only weights are taken from the folder
        slots = {"actor": SlotConfig(r=3, alpha=7, target_modules=("q_proj", "down_proj"), init_from=str(folder))}
        with pytest.raises(ValueError, match=message):
            HydraModel.from_pretrained(tiny_llama(), roles=ACTOR, slots=slots)
        before = plain_logits(source)
        with pytest.raises(ValueError, match=f"the PeftModel's adapter 'default': {message}"):
            HydraModel.from_pretrained(source, roles=ACTOR)
        assert torch.equal(plain_logits(source), before)  # a refused model is handed back in one piece


def _scale(model: PeftModel) -> None:
    model.base_model.model.model.layers[1].mlp.down_proj.set_scale("default", 2.0)


def _add_another(model: PeftModel) -> None:
    model.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))


def _activate_two(model: PeftModel) -> None:
    _add_another(model)
    model.base_model.set_adapter(["default", "other"])


def test_a_peft_model_that_is_not_its_base_and_one_adapter_is_refused_as_it_was():
    for change, message in (
        (lambda model: model.merge_adapter(), r"expected no weights with adapters merged .*\['default'\] in model\."),
        (_activate_two, r"expected no other active adapter, got \['default', 'other'\] at"),
        (lambda model: model.base_model.disable_adapter_layers(), "expected it to be on, got adapters disabled at"),
        (_scale, r"expected the scale 2\.33333 of its config, got 4\.66667 at model\.layers\.1\.mlp\.down_proj"),
    ):
        source = trained_peft()
        change(source)
        before = plain_logits(source)
        with pytest.raises(ValueError, match=f"the PeftModel's adapter 'default': {message}"):
            HydraModel.from_pretrained(source, roles=ACTOR)
        assert torch.equal(plain_logits(source), before)
    source = trained_peft()  # one that is off beside the active one changes nothing
    expected = plain_logits(source)
    _add_another(source)
    close(slot_logits(HydraModel.from_pretrained(source, roles=ACTOR).eval(), "actor"), expected)


def test_another_lm_head_beside_its_adapter_is_refused(tmp_path):
    trained_peft(target_modules=["lm_head"]).save_pretrained(tmp_path)
    load(tmp_path)
    edit_weights(tmp_path, lambda t: {k: v + 1 if "base_layer" in k else v for k, v in t.items()})
    with pytest.raises(ValueError, match="expected lm_head's own weight beside its LoRA, got another one"):
        load(tmp_path)


def test_another_peft_method_is_refused(tmp_path):
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), config)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"expected peft_type LORA, got .*IA3"):
        peft_io.read_slot_config(tmp_path)
    with pytest.raises(ValueError, match=r"expected peft_type LORA, got .*IA3"):
        HydraModel.from_pretrained(model, roles=ACTOR)


def load(folder: Path, base_seed: int = 0, **sizes) -> HydraModel:
    slots = {"actor": peft_io.read_slot_config(folder)}
    return HydraModel.from_pretrained(tiny_llama(base_seed), roles=ACTOR, slots=slots)


def test_an_adapter_of_another_base_is_refused_by_hash(tmp_path):
    save_pretrained(build(), tmp_path)
    with pytest.raises(ValueError, match=r"init_from='.*': expected an adapter of this base \(hash [0-9a-f]{12}…\)"):
        load(tmp_path, base_seed=1)
    load(tmp_path, base_seed=0)


def test_an_adapter_that_names_another_base_is_said(tmp_path):
    """PEFT records the base's name alone: the same sizes under another name may be another model."""
    for name in ("first/small", "moved/small", "second/other"):
        tiny_llama().save_pretrained(tmp_path / name)
    adapter = tmp_path / "adapter"
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "first" / "small")
    get_peft_model(base, LoraConfig(r=3, target_modules=["q_proj"])).save_pretrained(adapter)

    def load_on(folder: Path) -> list[str]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            slots = {"actor": peft_io.read_slot_config(adapter)}
            HydraModel.from_pretrained(str(folder), roles=ACTOR, slots=slots)
            export = ExportConfig(source=str(adapter), to="merged", output_dir="o", model_name_or_path=str(folder))
            merged_model(find_source(export), dtype=None)
        return [str(warning.message) for warning in said if "base_model_name_or_path" in str(warning.message)]

    assert load_on(tmp_path / "first" / "small") == load_on(tmp_path / "moved" / "small") == []
    on_load, on_merge = load_on(tmp_path / "second" / "other")
    for line, start in ((on_load, "init_from="), (on_merge, "model_name_or_path: ")):
        assert line.startswith(start)
        assert re.search("is '.*first/small', the base given is '.*second/other'", line)


def edit_weights(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def test_an_adapter_of_another_base_is_refused_by_names_and_shapes(tmp_path):
    trained_peft().save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda t: {k.replace("layers.1.", "layers.7."): v for k, v in t.items()})
    with pytest.raises(ValueError, match=r"target_modules: expected name endings among \['down_proj', .*layers\.7"):
        load(tmp_path)
    slots = {"actor": SlotConfig(r=3, alpha=7, target_modules=("q_proj", "down_proj"), init_from=str(tmp_path))}
    with pytest.raises(ValueError, match=r"missing \['model\.layers\.1.*not in this model \['model\.layers\.7"):
        HydraModel.from_pretrained(tiny_llama(), roles=ACTOR, slots=slots)
    trained_peft().save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda t: {k: v[:, :20].contiguous() if "_A" in k else v for k, v in t.items()})
    with pytest.raises(ValueError, match=r"expected model\.layers\.0\.\S+ A \(3, 24\) and B \(24, 3\), got \(3, 20\)"):
        load(tmp_path)


def test_a_slot_of_another_shape_or_scale_than_the_folder_is_refused(tmp_path):
    trained_peft().save_pretrained(tmp_path)
    targets = ("q_proj", "down_proj")
    for config in (SlotConfig(r=4, alpha=7, target_modules=targets), SlotConfig(r=3, alpha=8, target_modules=targets)):
        slots = {"actor": SlotConfig(**{**vars(config), "init_from": str(tmp_path)})}
        with pytest.raises(ValueError, match=r"expected r=., scale .* like slot 'actor', got r=3 and scale 2\.333"):
            HydraModel.from_pretrained(tiny_llama(), roles=ACTOR, slots=slots)
    slots = {"actor": SlotConfig(r=4, alpha=8), "critic": SlotConfig(r=2, alpha=8, init_from="actor")}
    with pytest.raises(ValueError, match="init_from='actor': expected r=2, scale 4"):
        HydraModel.from_pretrained(tiny_llama(), roles=hydra_roles(), slots=slots)


def test_broken_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"adapter: expected a folder with adapter_config\.json, got '.*/none'"):
        peft_io.read_slot_config(tmp_path / "none")
    trained_peft().save_pretrained(tmp_path)
    config = tmp_path / "adapter_config.json"
    good = json.loads(config.read_text())
    for change, message in (
        ({"r": 0}, "r: expected a LoRA rank of at least 1, got 0"),
        ({"r": None}, "expected a number as r, got None"),
        ({"lora_alpha": 0}, "alpha: expected a finite number other than 0, got 0"),
    ):
        config.write_text(json.dumps({**good, **change}))
        with pytest.raises(ValueError, match=message):
            peft_io.read_slot_config(tmp_path)
    config.write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json: expected JSON, got"):
        peft_io.read_slot_config(tmp_path)
    config.write_text("[]")
    with pytest.raises(ValueError, match=r"adapter_config\.json: expected a JSON object, got list"):
        peft_io.read_slot_config(tmp_path)
    config.write_text(json.dumps(good))
    weights = tmp_path / "adapter_model.safetensors"
    edit_weights(tmp_path, lambda t: {k: v / 0 for k, v in t.items()})
    with pytest.raises(ValueError, match=r"expected finite numbers in A and B of model\.layers\.\S+, got others"):
        peft_io.read_slot_config(tmp_path)
    edit_weights(tmp_path, lambda t: {k: v for i, (k, v) in enumerate(t.items()) if i > 0})
    with pytest.raises(ValueError, match="expected A and B of model"):
        peft_io.read_slot_config(tmp_path)
    edit_weights(tmp_path, lambda t: {})
    with pytest.raises(ValueError, match="expected LoRA weights, got none"):
        peft_io.read_slot_config(tmp_path)
    weights.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: expected a safetensors file, got"):
        peft_io.read_slot_config(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match=r"adapter: expected adapter_model\.safetensors in .*not there"):
        peft_io.read_slot_config(tmp_path)


def test_a_model_with_an_adapter_inside_is_refused(tmp_path):
    trained_peft().save_pretrained(tmp_path)
    holder = tiny_llama()
    holder.load_adapter(str(tmp_path))
    with pytest.raises(ValueError, match="source: expected a plain LlamaForCausalLM, got one with an adapter loaded"):
        HydraModel.from_pretrained(holder, roles=ACTOR)
    with pytest.raises(ValueError, match=r"model_name_or_path: expected a model folder, got .* which holds an adapter"):
        HydraModel.from_pretrained(tmp_path, roles=ACTOR)


def test_a_peft_model_needs_a_role_on_the_slot_actor_and_brings_its_shape():
    source = trained_peft()
    with pytest.raises(ValueError, match=r"source: expected a role on slot 'actor' and no entry .*\['policy'\]"):
        HydraModel.from_pretrained(source, roles={"policy": RoleSpec(slot="policy", trainable=True)})
    with pytest.raises(ValueError, match=r"source: expected a role on slot 'actor' .*slots \['actor'\]"):
        HydraModel.from_pretrained(source, roles=ACTOR, slots={"actor": SlotConfig(r=3, alpha=99.0)})
    HydraModel.from_pretrained(source, roles=ACTOR)


def test_a_loaded_model_saves_again(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    model = HydraModel.from_pretrained(tmp_path / "base", roles=hydra_roles())
    randomise(model, "actor", "critic")
    save_pretrained(model, tmp_path / "one")
    save_pretrained(load_pretrained(tmp_path / "one"), tmp_path / "two")
    for name in ("adapter_model.safetensors", "heads.safetensors", "slots/critic/adapter_model.safetensors"):
        one, two = load_file(tmp_path / "one" / name), load_file(tmp_path / "two" / name)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[k], two[k]) for k in one)


def test_peft_is_imported_where_it_is_used():
    """By functions alone, but for what is made of it: integrations, and templates of a user's own loop."""
    for path in sorted((ROOT / "rlhf_engine").rglob("*.py")):
        if not {"integrations", "templates"} & set(path.parts):
            assert not re.search(r"^(?:import|from) peft\b", path.read_text(encoding="utf-8"), re.MULTILINE), path


@pytest.mark.long
def test_an_engine_needs_no_peft():
    """All of it is imported, and a model learns, where PEFT is not installed."""
    code = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
hidden = lambda cls, name, *more: None if name.partition(".")[0] == "peft" else find(name, *more)
PathFinder.find_spec = classmethod(hidden)
import rlhf_engine.commands.main, rlhf_engine.rollout.engine, rlhf_engine.training.rl, rlhf_engine.training.sft
import rlhf_engine.training.reward_model
from rlhf_engine.hydra import Logprobs
from tests.conftest import build, random_batch
model = build()
model(random_batch(((3, 5), (4, 4))), (Logprobs(role="actor"),), dropout_seed=0)[0].logprob.sum().backward()
assert any(p.grad is not None for p in model.parameters())
assert "peft" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
