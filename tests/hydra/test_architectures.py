"""One mechanism for every decoder: OFF is the plain model, a slot is PEFT's LoRA, packed rows are padded rows."""

import copy
import json
from collections.abc import Iterable

import pytest
import torch
from rlhf_kernels.runtime import registry, testing
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DbrxConfig,
    Gemma3nTextConfig,
    GptOssConfig,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    PreTrainedConfig,
)

from rlhf_engine.errors import UnsupportedModelError
from rlhf_engine.hydra import (
    HydraModel,
    Logprobs,
    PackedBatch,
    RoleSpec,
    SlotConfig,
    attention,
    backbone,
    gate,
    loading,
    peft_io,
    save_pretrained,
)
from rlhf_engine.hydra.backbone import give_positions
from rlhf_engine.hydra.gate import head_logits
from rlhf_engine.hydra.modules import GatedHead
from rlhf_engine.hydra.probe import base_model
from rlhf_engine.rollout import SamplingConfig, generate
from tests.conftest import VOCAB, random_batch, randomise
from tests.hydra import architectures
from tests.hydra.architectures import CONFIGS, MORE, REFUSED, WINDOW, plain_model

ACTOR = {"actor": RoleSpec(slot="actor", trainable=True)}
LENGTHS = ((3, 9), (4, 8), (1, 5), (6, 14), (2, 9))  # two of one length, one below the window, the rest beyond it

KINDS = ("llama", "gemma2", "gpt2", "opt", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text")
"""One of each mechanism; what holds for the others is in the long lane."""


def each(*per_push: str, of: Iterable[str] = CONFIGS) -> pytest.MarkDecorator:
    """All architectures, of which `make test` has these."""
    names = [name if name in per_push else pytest.param(name, marks=pytest.mark.long) for name in of]
    return pytest.mark.parametrize("name", names)


every = pytest.mark.parametrize("name", CONFIGS)


def hydra(name: str, **slot: object) -> HydraModel:
    model = HydraModel.from_pretrained(plain_model(name), roles=ACTOR, slots={"actor": SlotConfig(r=4, **slot)})
    randomise(model, "actor")
    return model.eval()


def logits(model: HydraModel, batch: PackedBatch, slot: str | None) -> torch.Tensor:
    """[T, V] in a slot's lane."""
    with torch.no_grad():
        hidden = model.backbone().run_lanes([(batch, None, slot)])[0]
    return head_logits(hidden, model.backbone().lm_head_in(slot))


def padded(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [N, longest] padded on the right, and their mask."""
    tokens = torch.nn.utils.rnn.pad_sequence(list(batch.tokens_T.split(batch.lengths)), batch_first=True)
    lengths = torch.tensor(batch.lengths)[:, None]
    return tokens, torch.arange(tokens.shape[1]).expand_as(tokens) < lengths


def rows_of(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """The plain model's logits [T, V] of a batch, padded and masked."""
    tokens, mask = padded(batch)
    return model(tokens, attention_mask=mask.long(), use_cache=False).logits[mask]


def in_double(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """The plain model's logits [T, V] in float64, each sequence by itself: Gemma 2's masks for padding break there."""
    model.config._experts_implementation = "eager"  # the grouped products have no float64
    rows = batch.tokens_T.split(batch.lengths)
    return torch.cat([model.double()(row[None], use_cache=False).logits[0] for row in rows])


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5 * max(1.0, theirs.abs().max().item()))


@every
def test_off_is_the_plain_model_bit_for_bit_on_the_reference_and_at_the_tiers_elsewhere(name):
    """Also where rows are packed, beside the plain model's padded ones."""
    model, plain = hydra(name), plain_model(name)
    tokens = torch.randint(3, VOCAB, (3, 12), generator=torch.Generator().manual_seed(0))
    batch, ragged = PackedBatch.from_lists(tokens[:, :4].tolist(), tokens[:, 4:].tolist()), random_batch(LENGTHS)
    with torch.no_grad():
        close(logits(model, ragged, None), rows_of(plain, ragged))
        expected = plain(tokens, use_cache=False).logits
        theirs = base_model(plain)(tokens, use_cache=False).last_hidden_state
        with registry.use_backend("reference"):
            ours = model.backbone().run_lanes([(batch, None, None)])[0]
            found = head_logits(ours, model.backbone().lm_head)
        exact = in_double(plain, batch)
    assert torch.equal(ours, theirs.flatten(0, 1))
    assert torch.equal(found.view_as(expected), expected)
    testing.assert_ok(testing.tier1(logits(model, batch, None), exact, found), name)
    assert (logits(model, batch, "actor") - found).abs().max() > 1e-2


@each(*KINDS[:3], *KINDS[4:7], of=[*CONFIGS, *MORE])  # OPT and Llama 4 in the tests above and below
def test_a_slot_is_what_plain_peft_makes_of_its_folder(name, tmp_path):
    """Its logits in the slot's lane, the gradients of its matrices, and the slot that comes back from it."""
    from peft import PeftModel

    model, batch = hydra(name), random_batch(LENGTHS)
    save_pretrained(model, tmp_path)
    slots = {"actor": peft_io.read_slot_config(tmp_path)}
    back = HydraModel.from_pretrained(plain_model(name), roles=ACTOR, slots=slots).eval()
    assert torch.equal(logits(back, batch, "actor"), logits(model, batch, "actor"))
    theirs = PeftModel.from_pretrained(plain_model(name), tmp_path, is_trainable=True).eval()
    with torch.no_grad():
        single, double = rows_of(theirs, batch), in_double(copy.deepcopy(theirs), batch)
    testing.assert_ok(testing.tier1(logits(model, batch, "actor"), double, single), name)
    if name in MORE:
        return
    exactly, *moved = (copy.deepcopy(theirs) for _ in range(4))
    for period, other in enumerate(moved, start=2):  # by one unit in the last place: what rounding may do to gradients
        with torch.no_grad():
            embeddings = other.get_input_embeddings().weight
            up = torch.arange(embeddings.numel()).view_as(embeddings) % period == 0
            embeddings *= 1 + 2.0**-23 * torch.where(up, 1, -1)
    weights = torch.randn(batch.n_completion_tokens, generator=torch.Generator().manual_seed(2))

    (out,) = model(batch, (Logprobs(),))
    (out.logprob * weights).sum().backward()
    found = []
    for forward, peft_model in ((rows_of, theirs), (in_double, exactly), *((rows_of, other) for other in moved)):
        logprobs = forward(peft_model, batch)[batch.predict_rows_M].log_softmax(-1)
        found.append(logprobs.gather(1, batch.targets_M[:, None])[:, 0])
        (found[-1] * weights).sum().backward()
    testing.assert_ok(testing.tier1(out.logprob.detach(), found[1].detach(), found[0].detach()), "logprob")
    modules = [dict(m.base_model.model.named_modules()) for m in (exactly, theirs, *moved)]
    gradients = []
    for path, pair in model.backbone().slot("actor").items():
        for ours, half in ((pair.A, "lora_A"), (pair.B, "lora_B")):
            double, *single = (getattr(m[path], half)["default"].weight.grad for m in modules)
            assert double.any(), path
            # in units of the largest, and all together: PEFT's own error in one small matrix may be near 0 by chance
            gradients.append([g.flatten().double() / double.abs().max() for g in (ours.grad, double, *single)])
    ours, exact, *single = map(torch.cat, zip(*gradients, strict=True))
    testing.assert_ok(testing.tier1(ours, exact, max(single, key=lambda g: (g - exact).abs().max())), "gradients")


@each("llama", "opt", "qwen3_moe", "gpt_oss")
def test_gradient_checkpointing_changes_no_gradient(name):
    batch = random_batch(LENGTHS)
    found = []
    for checkpointing in (False, True):
        model = hydra(name).train()
        if checkpointing:
            model.backbone().enable_gradient_checkpointing()
        (out,) = model(batch, (Logprobs(),))
        out.logprob.sum().backward()
        found.append([p.grad for p in model.backbone().slot("actor").parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@each(*KINDS)
def test_generation_draws_from_the_distribution_that_training_sees(name):
    model = hydra(name)
    prompts = [[5, 9, 11, 3, 20, 6, 7], [8, 12], [4, 4, 4]]
    rollout = generate(model, prompts, SamplingConfig(max_completion_length=14, eos_token_ids=(2,), seed=3))
    assert max(rollout.batch.completion_lens) > WINDOW
    again = model.score(rollout.batch, ("actor",)).logprobs_M
    torch.testing.assert_close(rollout.logprobs_M, again, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_lora_on_the_head_acts_on_the_head_only(name, tmp_path):
    """Also where its weight is the embedding's (GPT-2)."""
    from peft import LoraConfig, PeftModel, get_peft_model

    targets = ("lm_head", "c_attn" if name == "gpt2" else "q_proj")
    model, batch = hydra(name, target_modules=targets), random_batch(LENGTHS)
    assert isinstance(model.backbone().linears["lm_head"], GatedHead)
    embedding = model.backbone().model.get_input_embeddings().weight.clone()

    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=32, target_modules=list(targets), task_type="CAUSAL_LM")
    theirs = get_peft_model(plain_model(name), config).eval()
    modules = dict(theirs.base_model.model.named_modules())
    with torch.no_grad():
        for path, pair in model.backbone().slot("actor").items():
            modules[path].lora_A["default"].weight.copy_(pair.A)
            modules[path].lora_B["default"].weight.copy_(pair.B)
    expected = rows_of(theirs, batch)[batch.predict_rows_M].log_softmax(-1)
    (out,) = model(batch, (Logprobs(outputs=("logprob", "entropy")),))
    close(out.logprob, expected.gather(1, batch.targets_M[:, None])[:, 0])
    out.logprob.sum().backward()
    expected.gather(1, batch.targets_M[:, None]).sum().backward()
    for path, pair in model.backbone().slot("actor").items():
        gradient = modules[path].lora_B["default"].weight.grad
        torch.testing.assert_close(pair.B.grad, gradient, rtol=1e-3, atol=2e-5 * gradient.abs().max().item(), msg=path)
    assert torch.equal(model.backbone().model.get_input_embeddings().weight, embedding)

    rollout = generate(model, [[5, 9, 11], [8, 12]], SamplingConfig(max_completion_length=9, eos_token_ids=(2,)))
    again = model.score(rollout.batch, ("actor",)).logprobs_M
    torch.testing.assert_close(rollout.logprobs_M, again, rtol=0, atol=1e-4)

    save_pretrained(model, tmp_path)
    loaded = PeftModel.from_pretrained(plain_model(name), tmp_path).eval()
    with torch.no_grad():
        close(logits(model, batch, "actor"), rows_of(loaded, batch))


def test_training_of_the_base_itself_has_a_gradient_in_its_sinks():
    plain, batch = plain_model("gpt_oss"), random_batch(LENGTHS)
    model = HydraModel.from_pretrained(plain_model("gpt_oss"), roles={"sft": RoleSpec(trainable=True)})
    (out,) = model.train()(batch, (Logprobs(role="sft"),))
    out.logprob.sum().backward()
    logprobs = rows_of(plain, batch)[batch.predict_rows_M].log_softmax(-1)
    logprobs.gather(1, batch.targets_M[:, None]).sum().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in model.backbone().model.named_parameters():
        if "self_attn" in name:
            assert parameter.grad.any(), name
            scale = theirs[name].grad.abs().max().item()
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=2e-5 * scale, msg=name)


def test_experts_of_gpt_oss_have_no_adapters():
    """They are stacked, as other mixtures' are: attention has adapters, and the experts' names are no linears."""
    model = hydra("gpt_oss")
    names = {path.rpartition(".")[2] for path, _ in model.backbone().slot("actor").items()}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ValueError, match=r"target_modules: expected name endings among .* got .*gate_up_proj"):
        hydra("gpt_oss", target_modules=("q_proj", "gate_up_proj"))


def test_experts_in_mxfp4_are_loaded_dequantised(tmp_path, monkeypatch):
    """As gpt-oss is published: four-bit blocks with a scale each, which transformers would run without a gradient."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_local_experts": 4}
    config = GptOssConfig(**{**architectures._SHAPE, **sizes}, num_experts_per_tok=2, sliding_window=WINDOW)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        for name, (rows, columns) in {"gate_up_proj": (64, 64), "down_proj": (64, 32)}.items():
            path, blocks = f"model.layers.{layer}.mlp.experts.{name}", (4, rows, columns // 32)
            del weights[path]
            for part, low, high, shape in (("blocks", 0, 256, (*blocks, 16)), ("scales", 122, 126, blocks)):
                numbers = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
                weights[f"{path}_{part}"] = numbers
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((tmp_path / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(written))

    given, load = {}, AutoModelForCausalLM.from_pretrained
    noted = lambda *paths, **options: given.update(options) or load(*paths, **options)  # noqa: E731
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    model = HydraModel.from_pretrained(tmp_path, roles=ACTOR).eval()
    assert given["quantization_config"].dequantize
    experts = model.backbone().model.model.layers[0].mlp.experts
    assert type(experts).__name__ == "GptOssExperts"
    assert experts.gate_up_proj.is_floating_point()
    assert not model.backbone().quantized
    model.score(random_batch(LENGTHS), ("actor",))
    with pytest.raises(ValueError, match="quantization: expected 'none' for weights in MXFP4") as refused:
        HydraModel.from_pretrained(tmp_path, roles=ACTOR, quantization="4bit")
    assert "\n" not in str(refused.value)


def state_of(model: torch.nn.Module) -> list[object]:
    """What a refusal must not change: classes, modes, hooks, noise and configs of every module."""
    return [
        (name, type(module), module.training, len(module._forward_hooks), getattr(module, "p", None), config, attention)
        for name, module in model.named_modules()
        for config in [id(getattr(module, "config", None))]
        for attention in [getattr(getattr(module, "config", None), "_attn_implementation", None)]
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_in_one_line_and_left_as_it_was(name):
    config, why = REFUSED[name]
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config)).train()
    before, generator = state_of(plain), torch.get_rng_state()
    with pytest.raises(UnsupportedModelError, match=why) as refused:
        HydraModel.from_pretrained(plain, roles=ACTOR)
    assert f"(model type {config.model_type!r})" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert state_of(plain) == before
    assert torch.equal(torch.get_rng_state(), generator)
    plain.eval()(torch.tensor([[5, 9, 11]]), use_cache=False)


def test_a_request_that_fails_leaves_the_model_as_it_was():
    plain = plain_model("mixtral").train()
    before = state_of(plain)
    with pytest.raises(ValueError, match="target_modules: expected name endings among"):
        HydraModel.from_pretrained(plain, roles=ACTOR, slots={"actor": SlotConfig(target_modules=("c_attn",))})
    assert state_of(plain) == before
    assert all(p.requires_grad for p in plain.parameters())
    plain(torch.tensor([[5, 9, 11]])).logits.sum().backward()

    # nor is a config that a model was built from changed
    config = copy.deepcopy(CONFIGS["mixtral"])
    plain = AutoModelForCausalLM.from_config(config)
    before = config.to_dict(), config._attn_implementation
    HydraModel.from_pretrained(plain, roles=ACTOR)
    assert (config.to_dict(), config._attn_implementation) == before
    AutoModelForCausalLM.from_config(config)(torch.tensor([[5, 9, 11]]))


def test_a_logit_scale_that_the_model_does_not_use_is_refused():
    for dtype in (torch.float32, torch.bfloat16):
        plain = plain_model("llama").to(dtype)
        plain.config.logit_scale = 1.01
        with pytest.raises(UnsupportedModelError, match=r"logits are not head\(hidden\)"):
            HydraModel.from_pretrained(plain, roles=ACTOR)


class Noisy(torch.nn.Module):
    """Noise under a name that nothing knows of, in a module that has to be in train mode to checkpoint gradients."""

    gradient_checkpointing = False

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * (1 + 0.01 * torch.randn_like(x)) if self.training else x)


def test_noise_of_train_mode_is_off_or_refused():
    plain = plain_model("llama")
    plain.model.layers[1].mlp = Noisy(plain.model.layers[1].mlp)
    with pytest.raises(UnsupportedModelError, match="expected train mode to compute what eval mode does"):
        HydraModel.from_pretrained(plain, roles=ACTOR)
    model, batch = hydra("mixtral").train(), random_batch(LENGTHS)  # router_jitter_noise
    assert torch.equal(logits(model, batch, "actor"), logits(model.eval(), batch, "actor"))


def train_mode_alone(kind: str) -> tuple[PreTrainedConfig, str]:
    """A config whose model does more in train mode than in eval mode, and the field that says so."""
    if kind == "gemma3n_text":  # AltUp clips its coefficients, past the linears that have adapters
        sizes = {"laurel_rank": 4, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 4}
        shape = {**architectures._SHAPE, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 2}
        return Gemma3nTextConfig(**shape, **sizes, head_dim=8, activation_sparsity_pattern=[0.0] * 2), "altup_coef_clip"
    config = DbrxConfig(
        d_model=24, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=VOCAB, resid_pdrop=0.3,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.1},
    )  # fmt: skip
    config.attn_config.rope_theta = 1e4
    return config, "resid_pdrop"


@pytest.mark.parametrize("kind", ["dbrx", "gemma3n_text"])
def test_what_an_architecture_does_in_train_mode_alone_is_off(kind):
    config, field = train_mode_alone(kind)
    assert getattr(config, field)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() == 1:  # AltUp's scales start at 0
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model = HydraModel.from_pretrained(plain, roles=ACTOR)
    randomise(model, "actor")
    batch = random_batch(LENGTHS)
    old = model.eval().score(batch, ("actor",)).logprobs_M
    (now,) = model.train()(batch, (Logprobs(),))
    assert torch.equal(now.logprob, old)
    now.logprob.sum().backward()
    assert all(pair.B.grad.any() for _, pair in model.backbone().slot("actor").items())


def test_longrope_serves_its_original_context():
    """Beyond it, angles of every row of a call depend on the longest one."""
    factors = {"short_factor": [1.0] * 3, "long_factor": [4.0] * 3, "rope_type": "longrope", "rope_theta": 1e4}
    config = copy.deepcopy(CONFIGS["llama"])
    config.rope_parameters = {**factors, "original_max_position_embeddings": 16}
    torch.manual_seed(0)
    model = HydraModel.from_pretrained(AutoModelForCausalLM.from_config(config), roles=ACTOR).eval()
    mixed = random_batch(((3, 5), (6, 10)))
    alone = model.score(mixed.select([0]), ("actor",)).logprobs_M
    torch.testing.assert_close(model.score(mixed, ("actor",)).logprobs_M[:5], alone)
    with pytest.raises(ValueError, match=r"batch: expected sequences of at most 16 tokens .*got one of 17"):
        model.score(random_batch(((3, 5), (6, 11))), ("actor",))


def one_chunk(limit: int) -> Llama4TextConfig:
    """A Llama 4 whose chunks are shorter than its context."""
    config = copy.deepcopy(CONFIGS["llama4_text"])
    config.attention_chunk_size = limit
    return config


def test_chunked_attention_serves_one_chunk():
    """Beyond it, a query no longer sees the tokens before its chunk."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(one_chunk(16), attn_implementation="eager").eval()
    batch = random_batch(((3, 5), (6, 10), (1, 15)))
    with torch.no_grad():
        expected = rows_of(plain, batch)
    model = HydraModel.from_pretrained(plain, roles=ACTOR).eval()
    assert model.backbone().context_length == 16
    torch.testing.assert_close(logits(model, batch, None), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"batch: expected sequences of at most 16 tokens .*got one of 17"):
        model.score(random_batch(((3, 5), (6, 11))), ("actor",))
    full = one_chunk(16)
    full.layer_types = ["full_attention"] * 2
    assert loading.context_length(full) == full.max_position_embeddings


def test_chunks_that_no_sequence_fits_are_refused_in_one_line():
    for size in (None, 6):
        plain = AutoModelForCausalLM.from_config(one_chunk(size))
        with pytest.raises(UnsupportedModelError, match=r"^.*\(model type 'llama4_text'\)$"):
            HydraModel.from_pretrained(plain, roles=ACTOR)


@pytest.mark.parametrize(("steps", "refused"), [(4, True), (16, False)])
def test_attention_that_counts_positions_is_given_them(steps, refused, monkeypatch):
    """A packed row is longer than its sequences; steps of the scale that the probe's tokens do not reach stay right."""
    config = copy.deepcopy(CONFIGS["llama4_text"])
    config.floor_scale = steps
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    batch = random_batch(((3, 9), (4, 8), (6, 26), (2, 9)))
    with torch.no_grad():
        expected = rows_of(plain, batch)
    model = HydraModel.from_pretrained(copy.deepcopy(plain), roles=ACTOR).eval()
    torch.testing.assert_close(logits(model, batch, None), expected, rtol=0, atol=1e-5)
    sampling = SamplingConfig(max_completion_length=30, eos_token_ids=())
    drawn = generate(model, [[5, 9, 11, 3, 20, 6, 7], [8, 12]], sampling)
    torch.testing.assert_close(drawn.logprobs_M, model.score(drawn.batch, ("actor",)).logprobs_M, rtol=0, atol=1e-5)

    monkeypatch.setattr(backbone, "give_positions", lambda blocks: None)
    if refused:
        with pytest.raises(UnsupportedModelError, match="expected the hidden states of its own attention"):
            HydraModel.from_pretrained(plain, roles=ACTOR)
    else:
        assert not torch.allclose(logits(HydraModel.from_pretrained(plain, roles=ACTOR), batch, None), expected)


def test_positions_reach_attention_whatever_its_cache_is_called():
    """`past_key_values` up to transformers 5.23, `cache` from 5.24 on; a row's count is its position less its place."""

    class Past(torch.nn.Module):
        def forward(self, x, past_key_values=None):
            return past_key_values.get_seq_length(0) + past_key_values.update(x, x, 0)[0]

    class Cache(torch.nn.Module):
        def forward(self, x, cache=None):
            return cache.get_seq_length(0) + cache.update(x, x, 0, kwargs={})[0]

    positions = torch.tensor([0, 1, 2, 0, 1])
    plan = attention.plan_packed((3, 2), torch.device("cpu"))
    call = gate.BackboneCall(table=gate.SlotTable.uniform(None, 5), attention=plan, positions_T=positions)
    for module in (Past(), Cache()):
        assert give_positions([module]) == 1
        with gate.enter(call):
            assert module(torch.zeros(5)).tolist() == [0, 0, 0, -3, -3]


def test_of_a_conditional_generation_class_the_text_is_served(tmp_path, monkeypatch):
    """Llama 4's, which keeps a causal model of text where others keep a decoder, as a model and as a folder.

    In transformers 5.24 its own forward fails where there are no images. What it does with text alone stands in.
    """
    from peft import PeftModel

    of_text = lambda self, input_ids, **more: self.language_model(input_ids, **more)  # noqa: E731
    monkeypatch.setattr(Llama4ForConditionalGeneration, "forward", of_text)

    tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    tower |= {"vision_output_dim": 16, "image_size": 28, "patch_size": 14}
    tower |= {"projector_input_dim": 16, "projector_output_dim": 16}
    config = Llama4Config(text_config=copy.deepcopy(CONFIGS["llama4_text"]), vision_config=tower)
    torch.manual_seed(0)
    plain = Llama4ForConditionalGeneration(config).eval()
    plain.set_attn_implementation("eager")
    plain.save_pretrained(tmp_path / "base")
    batch = random_batch(LENGTHS)
    with torch.no_grad():
        expected = rows_of(plain, batch)
    for source in (copy.deepcopy(plain), str(tmp_path / "base")):
        model = HydraModel.from_pretrained(source, roles=ACTOR, slots={"actor": SlotConfig(r=4)}).eval()
        torch.testing.assert_close(logits(model, batch, None), expected, rtol=0, atol=1e-5)
        randomise(model, "actor")
        paths = model.backbone().slot("actor").by_path
        prefix = "" if isinstance(source, str) else "language_model."
        assert {path.split("layers.")[0] for path in paths} == {f"{prefix}model."}
        assert len(paths) == 2 * (4 + 3)  # attention, and an MLP or a shared expert; the router has none
        old = model.score(batch, ("actor",)).logprobs_M
        (now,) = model.train()(batch, (Logprobs(),))
        assert torch.equal(now.logprob, old)  # a ratio of exactly 1
        now.logprob.sum().backward()
        assert all(pair.A.grad.any() and pair.B.grad.any() for _, pair in model.backbone().slot("actor").items())
        save_pretrained(model, tmp_path / "adapter")
        base = copy.deepcopy(plain) if prefix else AutoModelForCausalLM.from_pretrained(source)
        theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        with torch.no_grad():
            close(logits(model.eval(), batch, "actor"), rows_of(theirs, batch))
