"""Modules that run on the block kernels, by architecture: their numbers are the ops' and close to what they were."""

import copy
import functools
import inspect
import pickle
from types import FunctionType

import pytest
import torch
from rlhf_kernels import llama_ops as block
from rlhf_kernels.linear import _resolve
from rlhf_kernels.runtime import kernel_table, native, registry
from rlhf_kernels.runtime.kernel_table import Entry
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier3
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.activations import ACT2FN, GELUActivation
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from rlhf_engine.devices import stand_in
from rlhf_engine.hydra import attention, modules as swaps, varlen
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.modules import fuse_llama_ops
from tests.hydra.architectures import plain_model

# two layers: two norms each and one at the end, Qwen3 norms queries and keys as well; an MLP and an attention a layer,
# or an activation (…GELU…, SiLU…)
FUSED = {
    "llama": {"RMSNorm": 5, "MLP": 2, "Attention": 2},
    "qwen2": {"RMSNorm": 5, "MLP": 2, "Attention": 2},
    "qwen3": {"RMSNorm": 9, "MLP": 2, "Attention": 2},
    "mistral": {"RMSNorm": 5, "MLP": 2, "Attention": 2},
    "gemma2": {"RMSNorm": 9, "Attention": 2, "LU": 2},  # its norms multiply by 1 + weight
    "gpt2": {"LU": 2},
    "gpt_neox": {"Attention": 2, "LU": 2},
    "opt": {},  # ReLU has one result
    "phi": {"Attention": 2, "LU": 2},  # a part of every head is turned
    "qwen3_moe": {"RMSNorm": 9, "Attention": 2, "LU": 2},  # experts hold their weights stacked
    "mixtral": {"RMSNorm": 5, "Attention": 2, "LU": 2},
}
pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


def fused_kinds(model: nn.Module) -> dict[str, int]:
    names = [type(m).__name__ for m in model.modules() if getattr(type(m), "fused_forward", False)]
    found = {kind: sum(kind in name for name in names) for kind in ("RMSNorm", "MLP", "Attention", "LU")}
    assert sum(found.values()) == len(names)
    return {kind: n for kind, n in found.items() if n}


def test_what_is_recognised():
    for name in FUSED:
        assert fused_kinds(Backbone(plain_model(name)).model) == FUSED[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_the_model_gives_what_it_gave(name, dtype):
    """To the bit on the reference, and where only rotary embeddings are exchanged; elsewhere at the tiers."""
    model = plain_model(name).to(dtype)
    tokens = torch.randint(3, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wide = copy.deepcopy(model)
        wide.config._experts_implementation = "eager"  # the grouped products have no float64
        exact = wide.double()(tokens).logits
        before = model(tokens).logits
        names = [n for n, _ in model.named_parameters()]
        fuse_llama_ops(model)
        after = model(tokens).logits
        with registry.use_backend("reference"):
            assert torch.equal(model(tokens).logits, before)
    assert_ok((tier1 if dtype == torch.float32 else tier3)(after, exact, before), name)
    if not {"RMSNorm", "MLP", "LU"} & set(FUSED[name]):
        assert torch.equal(after, before)
    assert [n for n, _ in model.named_parameters()] == names
    assert fuse_llama_ops(model) == 0  # a second time finds nothing


def test_gradients_are_close_and_reach_every_weight():
    def gradients(fuse: bool) -> list[torch.Tensor]:
        model = plain_model("llama")
        if fuse:
            assert fuse_llama_ops(model) == 9
        model(torch.arange(3, 15)[None]).logits.square().mean().backward()
        return [p.grad for p in model.parameters()]

    for ours, theirs in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


class ShiftedRMSNorm(LlamaRMSNorm):
    """Looks like the norm that is known, and computes something else."""

    def forward(self, hidden_states):
        return LlamaRMSNorm.forward(self, hidden_states) + 1e-6


class SquashedMLP(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-1, 1))


class DemandingRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return LlamaRMSNorm.forward(self, hidden_states) * self.scale


class ShiftedGELU(GELUActivation):
    """Looks like the activation that is known, and computes something else."""

    def forward(self, input):
        return GELUActivation.forward(self, input) + 1e-4


class LearnedSwish(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(1))

    def forward(self, input):
        return input * torch.sigmoid(self.beta * input)


def attention_that_turns(turn):
    """A class like Llama's attention whose file has another function of the known name."""
    plain = inspect.unwrap(LlamaAttention.forward)
    forward = FunctionType(plain.__code__, {**plain.__globals__, "apply_rotary_pos_emb": turn})
    return type("OtherAttention", (LlamaAttention,), {"forward": forward})


OTHERS = {
    "shifted norm": ("input_layernorm", ShiftedRMSNorm),
    "norm with a scale": ("input_layernorm", DemandingRMSNorm),
    "clamped MLP": ("mlp", SquashedMLP),
    "sine first": ("self_attn", attention_that_turns(lambda q, k, sin, cos: apply_rotary_pos_emb(q, k, cos, sin))),
    "backwards": ("self_attn", attention_that_turns(lambda q, k, cos, sin: apply_rotary_pos_emb(q, k, cos, -sin))),
    "three results": ("self_attn", attention_that_turns(lambda *a: (*apply_rotary_pos_emb(*a), None))),
}


def test_a_class_that_computes_something_else_is_left_alone():
    for leaf, cls in OTHERS.values():
        model = plain_model("llama")
        module = getattr(model.model.layers[0], leaf)
        module.__class__ = cls
        assert fuse_llama_ops(model) == (9 if leaf == "mlp" else 8)  # the MLP's activation is what it was
        assert type(module) is cls


def renamed(function):
    """A decorator as transformers puts around a forward whose arguments have new names."""

    @functools.wraps(function)
    def inner(*arguments, **named):
        if "past_key_values" in named and "past_key_values" not in inspect.signature(function).parameters:
            named["cache"] = named.pop("past_key_values")
        return function(*arguments, **named)

    return inner


def counted(function):
    """A decorator whose function holds what it decorates in an attribute."""

    @functools.wraps(function)
    def inner(*arguments, **named):
        return inner.__wrapped__(*arguments, **named)

    return inner


@pytest.mark.parametrize(("decorator", "fused"), [(renamed, 1), (lambda f: renamed(renamed(f)), 1), (counted, 0)])
def test_a_decorated_attention_is_exchanged_beneath_its_decorators(decorator, fused, monkeypatch):
    """Nothing else of the model is, so that the bits stay: turned heads have those of Llama's."""
    calls = []
    monkeypatch.setattr("rlhf_engine.hydra.modules.rotary", lambda *a, **k: calls.append(1) or block.rotary(*a, **k))
    model, tokens = plain_model("llama"), torch.arange(3, 15)[None]
    before = model(tokens).logits
    attention = model.model.layers[0].self_attn
    attention.__class__ = type("OtherAttention", (LlamaAttention,), {"forward": decorator(LlamaAttention.forward)})
    assert fuse_llama_ops(attention) == fused
    assert torch.equal(model(tokens).logits, before)
    assert len(calls) == fused


KINDS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh", "quick_gelu": "quick_gelu", "silu": "silu",
    "swish": "silu",
}  # fmt: skip
ACTIVATIONS = {name: (lambda name=name: ACT2FN[name], kind) for name, kind in KINDS.items()} | {
    "torch's GELU": (nn.GELU, "gelu"),
    "torch's GELU by tanh": (lambda: nn.GELU(approximate="tanh"), "gelu_tanh"),
    "clipped": (lambda: ACT2FN["gelu_10"], None),
    "of another form": (nn.Hardswish, None),
    "shifted": (ShiftedGELU, None),
    "with a parameter": (LearnedSwish, None),
    "in place": (lambda: nn.SiLU(inplace=True), None),
}


def test_what_an_activation_computes_is_found_by_its_values():
    for make, kind in ACTIVATIONS.values():
        module, other = make(), make()
        assert module is not other, "shared by models"
        cls = type(module)
        assert fuse_llama_ops(nn.Sequential(module)) == (kind is not None)
        assert type(other) is cls
        if kind is None:
            assert type(module) is cls
            continue
        for dtype in (torch.float32, torch.bfloat16):
            x = 3 * torch.randn(5, 83, generator=torch.Generator().manual_seed(0)).to(dtype)
            expected = block.activation(x, kind, backend="cpu")
            for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
                assert torch.equal(one(x), expected)
                with registry.use_backend("reference"):
                    assert torch.equal(one(x), other(x))


def test_instances_of_one_class_may_be_of_different_kinds():
    modules = nn.ModuleList([nn.GELU(), nn.GELU(approximate="tanh")])
    assert fuse_llama_ops(modules) == 2
    x = torch.linspace(-3, 3, 83)
    assert torch.equal(modules[0](x), block.activation(x, "gelu", backend="cpu"))
    assert torch.equal(modules[1](x), block.activation(x, "gelu_tanh", backend="cpu"))


def test_exact_mode_goes_before_the_table(tmp_path):
    """There an activation's bits depend on nothing else, whatever was measured."""
    module, x = nn.Sequential(nn.GELU()), torch.linspace(-3, 3, 83)
    fuse_llama_ops(module)
    isa, path = native.isa(), tmp_path / "table.json"
    ms = {"a": {"cpu": 2.0, "reference": 1.0}}
    kernel_table.write(path, [Entry("activation", isa, "float32", (83,), "reference", ms)], {isa: "a CPU"})
    with registry.use_table(path):
        assert torch.equal(module(x), nn.functional.gelu(x))
        with registry.use_exact():
            assert torch.equal(module(x), block.activation(x, "gelu", backend="cpu"))


OPS = ("rms_norm", "rotary", "swiglu", "activation")


@pytest.mark.parametrize(("default", "outside"), [("auto", ["triton"] * 3 + [None]), ("triton", ["triton"] * 4)])
def test_on_a_gpu_exact_mode_takes_all_kernels_and_auto_those_that_were_measured(default, outside):
    if registry.unsupported("rms_norm", "triton", "cuda", torch.bfloat16) is not None:
        pytest.skip("triton is not installed")
    with FakeTensorMode():
        x = torch.empty(2, 4, device="cuda", dtype=torch.bfloat16)
    with registry.use_backend(default):
        assert [swaps._backend(op, x) for op in OPS] == outside
        by_name = default == "triton"  # named, it stands for all that it has: products and attention as well
        assert _resolve(x, x, "auto") == ("triton" if by_name else "reference")
        assert attention._kernel("cuda", torch.bfloat16) == ("triton" if by_name else None)
        assert varlen._may_serve("cuda", torch.bfloat16) == (not by_name)
        with registry.use_exact():
            assert [swaps._backend(op, x) for op in OPS] == ["triton"] * 4
            assert swaps._backend("swiglu", x, x.float()) is None
            assert swaps._backend("rms_norm", x.double()) is None
            with torch.autocast("cpu"):
                assert swaps._backend("rms_norm", x.cpu()) is None
            with stand_in():
                assert swaps._backend("rms_norm", x) is None
    for other in ("reference", "cuda"):
        with registry.use_backend(other), registry.use_exact():
            assert [swaps._backend(op, x) for op in OPS] == [None] * 4


def test_copies_and_pickles_of_a_fused_model():
    for duplicate in [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]:
        model, tokens = plain_model("llama"), torch.arange(3, 15)[None]
        fuse_llama_ops(model)
        other = duplicate(model)
        assert fused_kinds(other) == FUSED["llama"]
        with torch.no_grad():
            assert torch.equal(other(tokens).logits, model(tokens).logits)


def test_where_the_kernels_do_not_run(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "rlhf_engine.hydra.modules.rms_norm", lambda *a, **k: calls.append(1) or block.rms_norm(*a, **k)
    )
    model = plain_model("llama")
    fuse_llama_ops(model)
    norm, x = model.model.norm, torch.randn(2, 24)
    norm(x)
    assert len(calls) == 1
    with registry.use_backend("reference"):
        norm(x)
    with stand_in():
        norm(x)
    with torch.autocast("cpu", torch.bfloat16):
        norm(x)
    norm(x.bfloat16())  # a float32 weight: promoted, as the module does
    norm.double()(x.double())
    assert len(calls) == 1
