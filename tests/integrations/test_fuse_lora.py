"""`fuse_lora`: PEFT's outputs and gradients from our kernels, for whatever PEFT can do with a model, and undone."""

import copy
import pickle

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import Linear as PeftLinear
from rlhf_kernels.runtime.testing import assert_ok, tier1
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import rlhf_engine
from rlhf_engine import fuse_lora
from rlhf_engine.integrations.peft import _FusedLayer
from tests.conftest import tiny_llama

IDS = torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(0))
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(**changes) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **changes})


def randomised(model: PeftModel, seed: int = 0) -> PeftModel:
    """Adapters that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.add_(0.2 * torch.randn(p.shape, generator=generator).to(p))
    return model


def make(base: nn.Module | None = None, *others: LoraConfig, **changes) -> PeftModel:
    """A PeftModel with the adapters default, other1, …"""
    model = get_peft_model(tiny_llama() if base is None else base, lora(**changes))
    for i, config in enumerate(others):
        model.add_adapter(f"other{i + 1}", config)
    return randomised(model)


def layer_of(model):
    return model.base_model.model.model.layers[0].self_attn.q_proj


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, **NO_DROPOUT))


def run(model, **options) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of a loss that every logit enters."""
    model.zero_grad()
    logits = model(IDS, **options).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    (logits * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach().clone(), **found}


def close(found: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    gap, scale = float((found - expected).abs().max()), float(expected.abs().max())
    assert gap <= 1e-5 * scale, (name, gap, scale)


def compare(found, expected) -> None:
    assert found.keys() == expected.keys()
    assert len(found) > 1
    for name, tensor in expected.items():
        close(found[name], tensor, name)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("base", [tiny_llama, tiny_gpt2])
def test_outputs_and_gradients_are_peft_s(base, train):
    targets = TARGETS if base is tiny_llama else ["c_attn", "c_fc"]
    model = make(base(), target_modules=targets, fan_in_fan_out=base is tiny_gpt2).train(train)
    expected, exact = run(model), run(copy.deepcopy(model).double())
    fusion = fuse_lora(model)
    assert len(fusion.fused) == model.config.num_hidden_layers * len(targets)
    assert fusion.left == {}
    found = run(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_ok(tier1(found[name], exact[name], tensor), name)
    fusion.undo()
    assert not any(type(module).__name__.startswith("Fused") for module in model.modules())
    again = run(model)
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())


def test_it_is_our_op_that_runs(monkeypatch):
    from rlhf_engine.integrations import peft as ours

    calls = []
    original = ours.lora_linear
    monkeypatch.setattr(ours, "lora_linear", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    model = make()
    with fuse_lora(model) as fusion:
        model(IDS)
    assert len(calls) == len(fusion.fused) == sum(isinstance(m, PeftLinear) for m in model.modules())
    model(IDS)
    assert len(calls) == len(fusion.fused)


def test_several_active_adapters_add_up():
    model = make(None, lora(r=2, lora_alpha=16), lora(target_modules=["v_proj", "o_proj"]))
    model.base_model.set_adapter(["default", "other1", "other2"])
    expected = run(model)
    assert any("other2" in name for name in expected)
    fuse_lora(model)
    compare(run(model), expected)
    model.set_adapter("other1")
    found = run(model)
    assert not any("default" in name for name in found)


def test_adapters_by_sample_in_evaluation_and_in_training():
    model = make(None, lora(r=2, target_modules=["q_proj", "o_proj"])).eval()
    names = ["other1", "default", "__base__", "default"]
    with torch.no_grad():
        expected = model(IDS, adapter_names=names).logits
    model.set_requires_grad(["default", "other1"], True)
    with pytest.raises(ValueError, match="training mode"):
        model.train()(IDS, adapter_names=names)
    # what PEFT cannot do in one pass: the gradient of every adapter from its own samples
    alone = {}
    for name in ("default", "other1"):
        model.set_adapter(name)
        model.set_requires_grad(["default", "other1"], True)
        rows = [i for i, other in enumerate(names) if other == name]
        logits = model(IDS[rows]).logits
        weights = torch.randn((4, *logits.shape[1:]), generator=torch.Generator().manual_seed(1))[rows]
        model.zero_grad()
        (logits * weights).sum().backward()
        alone |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and f".{name}." in n}
    fuse_lora(model)
    with torch.no_grad():
        close(model.eval()(IDS, adapter_names=names).logits, expected)
    found = run(model.train(), adapter_names=names)
    assert model.base_model.training
    close(found.pop("logits"), expected)
    compare(found, alone)
    with pytest.raises(ValueError, match="non-existing adapter"):
        model(IDS, adapter_names=["nobody"] * 4)
    with pytest.raises(IndexError):
        model(IDS + 1000, adapter_names=["other1"] * 4)
    assert model.base_model.training
    assert all(not module._forward_pre_hooks for module in model.modules())  # an error leaves nothing behind
    model(IDS)
    # the second forward would take the active adapter for every row, and say nothing
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="adapter_names: expected no gradient checkpointing in training"):
        model(IDS, adapter_names=["default"] * 4)


def test_disabled_and_merged_adapters():
    model, plain = make(), tiny_llama()
    expected = run(model)["logits"]
    fuse_lora(model)
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    before = [p.clone() for p in model.parameters()]
    model.merge_adapter()
    with torch.no_grad():
        close(model(IDS).logits, expected)
    model.unmerge_adapter()
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(before, model.parameters(), strict=True))
    merged = model.merge_and_unload()
    with torch.no_grad():
        close(merged(IDS).logits, expected)


def test_saving_and_loading_are_exact(tmp_path):
    model = make()
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fuse_lora(model)
    assert all(torch.equal(plain[name], tensor) for name, tensor in model.state_dict().items())
    assert model.state_dict().keys() == plain.keys()
    with torch.no_grad():
        expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    fuse_lora(loaded)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, expected)
        assert torch.equal(copy.deepcopy(loaded)(IDS).logits, expected)
    again = pickle.loads(pickle.dumps(model))
    compare(run(again), run(model))
    assert isinstance(layer_of(again), _FusedLayer)
    set_peft_model_state_dict(loaded, {n: torch.zeros_like(p) for n, p in loaded.state_dict().items() if "lora_" in n})


def test_what_hangs_on_a_base_layer_is_still_called():
    """Offloaded weights are there only between its hooks."""
    model = make()
    plain = run(model)
    fuse_lora(model)
    base = layer_of(model).base_layer
    handle = base.register_forward_hook(lambda module, args, output: output * 2)
    doubled = run(model)["logits"]
    assert not torch.allclose(doubled, plain["logits"])
    handle.remove()
    cpu_offload(model.base_model.model, execution_device=torch.device("cpu"))
    assert base.weight.device.type == "meta"
    with torch.no_grad():
        close(model(IDS).logits, plain["logits"])


def test_an_adapter_that_comes_later_is_served_or_refused():
    model = make()
    fuse_lora(model)
    model.add_adapter("late", lora(r=3))
    randomised(model, seed=5).set_adapter("late")
    found = run(model)
    reference = make()
    reference.add_adapter("late", lora(r=3))
    reference.load_state_dict(model.state_dict())
    reference.set_adapter("late")
    compare(found, run(reference))
    model.add_adapter("dora", lora(use_dora=True))
    model.set_adapter("dora")
    with pytest.raises(ValueError, match=r"adapter 'dora' of a fused layer: expected plain LoRA, got Dora"):
        model(IDS)


def test_dropout_drops_as_often_and_is_repeatable():
    model = make(lora_dropout=0.5).train()
    fuse_lora(model)
    torch.manual_seed(3)
    first = run(model)
    torch.manual_seed(3)
    second = run(model)
    third = run(model)
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())
    assert not torch.equal(first["logits"], third["logits"])
    # gradient checkpointing computes the same masks twice
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(3)
    compare(run(model), first)
    with torch.no_grad():
        model.eval()
        assert torch.equal(model(IDS).logits, model(IDS).logits)
    # the mean over masks of one layer is the layer without dropout
    layer = next(module for module in model.modules() if isinstance(module, PeftLinear)).train()
    x = torch.randn(2000, 1, layer.in_features, generator=torch.Generator().manual_seed(0))[:1].expand(4000, 1, -1)
    with torch.no_grad():
        mean = layer(x).mean(0)
        delta = layer.eval()(x[:1])[0] - layer.base_layer(x[:1])[0]
    assert float((mean - layer.base_layer(x[:1])[0] - delta).abs().max()) < 0.15 * float(delta.abs().max())


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16(autocast):
    model = make(tiny_llama().to(torch.bfloat16 if not autocast else torch.float32))

    def go():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return run(model)

    expected = go()
    fuse_lora(model)
    found = go()
    assert found["logits"].dtype == expected["logits"].dtype
    for name, tensor in expected.items():
        gap, scale = (found[name] - tensor).abs().max(), tensor.abs().max()
        assert float(gap) <= 0.05 * float(scale), name


def test_what_is_left_is_named():
    model = make(target_modules=["q_proj", "embed_tokens"])
    expected = run(model)
    with pytest.warns(UserWarning, match=r"1 of \d+ LoRA layers stay as they are, such as .*embed_tokens: expected Lo"):
        fusion = fuse_lora(model)
    assert [name.rpartition(".")[2] for name in fusion.left] == ["embed_tokens"]
    compare(run(model), expected)
    model = make()  # a layer with a forward of its own
    layer = layer_of(model)
    layer.forward = layer.forward
    with pytest.warns(UserWarning, match="1 of 6 LoRA layers stay as they are"):
        fusion = fuse_lora(model)
    (reason,) = fusion.left.values()
    assert reason == "expected the forward of its class, got one of its own, which would not be asked"


def test_models_that_cannot_be_fused():
    model = make(use_dora=True)
    expected = run(model)
    with pytest.warns(UserWarning, match=r"(\d+) of \1 LoRA layers stay .*: expected plain LoRA, got Dora"):
        fusion = fuse_lora(model)
    assert fusion.fused == ()
    assert all("expected plain LoRA" in reason for reason in fusion.left.values())
    compare(run(model), expected)
    fusion.undo()
    with pytest.warns(UserWarning, match=r"expected lora_dropout below 1, got 1\.0 in adapter 'default'"):
        assert fuse_lora(make(lora_dropout=1.0)).fused == ()
    with pytest.raises(TypeError, match="model: expected a PeftModel with LoRA adapters, got LlamaForCausalLM"):
        fuse_lora(tiny_llama())
    with pytest.raises(ValueError, match="got one that is fused already"):
        fuse_lora(fuse_lora(make()).model)
    assert rlhf_engine.fuse_lora is fuse_lora
    with pytest.raises(AttributeError, match="has no attribute 'fuse_loras'"):
        rlhf_engine.fuse_loras  # noqa: B018


class Wrapped(nn.Module):
    """As FSDP wraps a linear: its weight is there while it is called."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weights = nn.Parameter(inner.weight.detach().clone())

    def forward(self, x):
        return nn.functional.linear(x, self.weights)


def test_wrapped_adapters():
    model = make()
    expected = run(model)["logits"]
    fuse_lora(model)
    layer = layer_of(model)
    layer.lora_A["default"] = Wrapped(layer.lora_A["default"])
    layer._cast_input_dtype = lambda x, dtype: x  # PEFT asks the weight for its dtype
    layer.lora_A["default"].weight = torch.zeros(0)  # a share
    close(run(model)["logits"], expected)


def test_calls_of_one_layer():
    """Shapes that only PEFT takes, a scale that is trained, derivatives forwards, half precision, a whole graph."""
    model, x, t = make().eval(), torch.randn(3, 24), torch.randn(3, 24)
    layer, odd = layer_of(model), (torch.randn(24), torch.zeros(0, 24))
    expected, slopes = [layer(x) for x in odd], torch.func.jvp(layer, (x,), (t,))
    fuse_lora(model)
    assert all(torch.equal(layer(x), y) for x, y in zip(odd, expected, strict=True))
    for found, known in zip(torch.func.jvp(layer, (x,), (t,)), slopes, strict=True):
        close(found, known)
    with torch.autocast("cpu", torch.float16):
        y = layer(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), layer(x), atol=1e-2, rtol=1e-2)
    with torch.no_grad():
        close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))
    layer.scaling["default"] = torch.tensor(2.0, requires_grad=True)
    layer(x).sum().backward()
    assert layer.scaling["default"].grad is not None


def test_checkpointing_of_one_s_own_does_not_know_the_names():
    """It sets no flag on the model; the second forward would take the active adapter for every row."""
    model = make(None, lora(r=3)).train()
    fuse_lora(model)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    block = model.base_model.model.model.layers[0].mlp
    plain = block.forward
    block.forward = lambda *args: checkpoint(plain, *args, use_reentrant=False)
    loss = model(IDS, adapter_names=["other1"] * 4).logits.sum()
    with pytest.raises(RuntimeError, match="adapter_names: expected no checkpointed activations in training"):
        loss.backward()
    model(IDS).logits.sum().backward()  # without names it recomputes what it computed


def test_what_else_changes_a_layer_is_not_undone_with_it():
    model = make()
    fusion = fuse_lora(model)
    layer = layer_of(model)
    fused = type(layer)
    layer.__class__ = type("Sharded", (fused,), {})
    with pytest.raises(RuntimeError, match=r"undo: expected .*q_proj as fuse_lora made it, got a Sharded"):
        fusion.undo()
    layer.__class__ = fused
    layer.forward = layer.forward
    with pytest.raises(RuntimeError, match=r"undo: expected .*q_proj as fuse_lora made it"):
        fusion.undo()
    del layer.forward
    fusion.undo()
    assert type(layer) is PeftLinear
