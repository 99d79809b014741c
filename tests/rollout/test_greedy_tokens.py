"""Greedy answers of every architecture against transformers' own `generate`, and which step serves which of them."""

import pytest
import torch
import transformers
from rlhf_kernels.runtime import native
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_engine.hydra import HydraModel, hydra_roles
from rlhf_engine.rollout import EngineOptions, SamplingConfig, decoding, generate
from tests.conftest import VOCAB
from tests.hydra.architectures import CONFIGS, plain_model

NATIVE = {"llama", "qwen2", "qwen3", "mistral"}
SHORTLY = {*NATIVE, "gemma2", "gpt2", "opt", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text"}
"""One of each mechanism, as in test_architectures, on every push."""
PROMPTS = [[5, 9, 11, 3, 20, 6, 7], [8, 12], [4, 4, 4], list(range(3, 36))]
LENGTH = 16


def hydra(plain: PreTrainedModel) -> HydraModel:
    return HydraModel.from_pretrained(plain, roles=hydra_roles()).eval()


def expected_tokens(plain: PreTrainedModel, prompt: list[int]) -> list[int]:
    out = plain.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
    return out[0, len(prompt) :].tolist()


def greedy_tokens(model: HydraModel, step: str) -> tuple[list[list[int]], str]:
    sampling = SamplingConfig(max_completion_length=LENGTH, eos_token_ids=())
    rollout = generate(
        model, PROMPTS, sampling, role="reference", greedy=[True] * 4, options=EngineOptions(decode_step=step)
    )
    return [rollout.batch.completion_tokens(i) for i in range(4)], rollout.stats.step


@pytest.mark.parametrize(
    ("name", "step"),
    [
        # "auto" is the model's own step for those that no kernel serves
        *(pytest.param(name, "auto", marks=[pytest.mark.long] * (name not in SHORTLY)) for name in CONFIGS),
        ("llama", "transformers"),
        *(pytest.param(name, "transformers", marks=pytest.mark.long) for name in sorted(NATIVE - {"llama"})),
    ],
)
def test_fp32_tokens_are_those_of_generate(name, step):
    plain = plain_model(name)
    expected = [expected_tokens(plain, prompt) for prompt in PROMPTS]
    found, ran = greedy_tokens(hydra(plain), step)
    assert found == expected
    assert ran == ("native" if name in NATIVE and step == "auto" and not native.missing() else "transformers")


@pytest.mark.parametrize(
    "name",
    [n if n in ("llama", "gpt2", "gemma2") else pytest.param(n, marks=pytest.mark.long) for n in CONFIGS],
)
def test_bf16_tokens_are_those_of_generate_up_to_a_near_tie(name):
    plain = plain_model(name).to(torch.bfloat16)
    exact = plain_model(name).to(torch.bfloat16).float()  # the same weights
    expected = [expected_tokens(plain, prompt) for prompt in PROMPTS]
    bf16 = {}
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        with torch.no_grad():
            bf16[tuple(prompt)] = plain(torch.tensor([prompt + tokens])).logits[0]
    found, _ = greedy_tokens(hydra(plain), "auto")
    agreed = 0
    for prompt, ours, theirs in zip(PROMPTS, found, expected, strict=True):
        same = next((i for i in range(LENGTH) if ours[i] != theirs[i]), LENGTH)
        agreed += same
        if same == LENGTH:
            continue
        with torch.no_grad():
            z = exact(torch.tensor([prompt + theirs[:same]])).logits[0, -1]
        rounding = (bf16[tuple(prompt)][len(prompt) + same - 1].float() - z).abs().max()
        assert abs(z[ours[same]] - z[theirs[same]]) <= 4 * rounding, (prompt, same)
    assert agreed >= 2 * LENGTH  # of 4 answers


def test_tokens_of_a_real_pretrained_model(stories):
    plain = AutoModelForCausalLM.from_pretrained(stories)
    prompt = [1, 403, 407, 261, 378, 432]
    expected = plain.generate(torch.tensor([prompt]), max_new_tokens=80, do_sample=False)[0, len(prompt) :].tolist()
    sampling = SamplingConfig(max_completion_length=80, eos_token_ids=())
    model = hydra(plain)
    for step in ("transformers", "auto"):
        rollout = generate(
            model, [prompt, [1]], sampling, role="reference", greedy=[True, False],
            options=EngineOptions(decode_step=step),
        )  # fmt: skip
        assert rollout.batch.completion_tokens(0) == expected


needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@needs_native
def test_other_architectures_are_known_by_their_parts():
    for name in sorted(set(CONFIGS) - NATIVE):
        reason = decoding.native_unsupported(hydra(plain_model(name)).backbone())
        assert reason is not None
        assert any(text in reason for text in ("is made of", "lacks", "its embedding is a", "its steps differ by"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_has_the_sinks(dtype):
    config = transformers.GraniteSWAConfig(**{**SMALL, "sliding_window": 8})
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for layer in plain.model.layers:
            layer.self_attn.sinks.copy_(torch.linspace(-1.0, 3.0, config.num_attention_heads))
    model = hydra(plain)
    rollout = generate(model, [[5, 9, 11], [8]], SamplingConfig(max_completion_length=20, eos_token_ids=()))
    assert rollout.stats.step == "transformers"
    again = model.score(rollout.batch, ("actor",)).logprobs_M
    gap = (rollout.logprobs_M - again).abs().mean()
    with torch.no_grad():
        for layer in model.backbone().model.model.layers:
            layer.self_attn.sinks.fill_(-torch.inf)
    without = (model.score(rollout.batch, ("actor",)).logprobs_M - again).abs().mean()
    assert gap <= (1e-5 if dtype == torch.float32 else 2e-3)
    assert without > 5 * gap, (gap, without)


@needs_native
def test_what_computes_something_else_is_not_served():
    for change, message in [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "of the kind 'dynamic'"),
        ({"hidden_act": "gelu"}, "the activation of layer 0 is a GELUActivation"),
    ]:
        config = CONFIGS["llama"].__class__(**{**CONFIGS["llama"].to_dict(), **change})
        torch.manual_seed(0)
        backbone = hydra(AutoModelForCausalLM.from_config(config)).backbone()
        assert message in (decoding.native_unsupported(backbone) or "")
    plain = plain_model("llama")  # parts that are a Llama's, and a sink per head beside them
    plain.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    said = "layer 1 has parameters beside its linears and norms: ['sinks']"
    assert decoding.native_unsupported(hydra(plain).backbone()) == said
    plain = plain_model("llama")  # names and kinds of modules are a Llama's, the embedding is scaled all the same
    plain.model.embed_tokens.register_forward_hook(lambda module, args, out: 1.5 * out)
    assert "its steps differ by" in (decoding.native_unsupported(hydra(plain).backbone()) or "")


@needs_native
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((f"{name}Config", torch.float32) for name in ("Olmo", "SmolLM3", "Granite")),
        *((f"{name}Config", torch.bfloat16) for name in ("Ernie4_5", "Ministral3", "Granite")),
    ],
)
def test_models_that_look_alike_are_served_right_or_not_at_all(name, dtype):
    """Norms without weights, angles in fp32, layers without angles, queries that grow with positions, scaled sums."""
    kinds = {"Ministral3Config": {"max_position_embeddings": 1024}, "SmolLM3Config": {"no_rope_layers": [1, 0]}}
    config = getattr(transformers, name)(**{**SMALL, **kinds.get(name, {})})
    if name == "Ministral3Config":
        config.rope_parameters = {**config.rope_parameters, "original_max_position_embeddings": 16}
    torch.manual_seed(0)
    model = hydra(AutoModelForCausalLM.from_config(config, dtype=dtype))
    long = [[3 + (7 * i + j) % 50 for j in range(100)] for i in range(3)]
    sampling = SamplingConfig(max_completion_length=20, eos_token_ids=())
    plain, found = (
        generate(model, long, sampling, options=EngineOptions(decode_step=step)) for step in ("transformers", "auto")
    )
    allowed, gap = ((r.logprobs_M - model.score(r.batch, ("actor",)).logprobs_M).abs().mean() for r in (plain, found))
    assert gap <= 3 * allowed + 1e-6, found.stats.step
    served = name == "GraniteConfig"  # in both dtypes, on every instruction set
    assert (found.stats.step == "native") == served, decoding.native_unsupported(model.backbone())


@needs_native
def test_what_is_served_is_served_at_small_weights_too():
    """As pretrained models have them: layers add little to the embedding."""
    for i, name in enumerate(sorted(NATIVE)):
        config = type(CONFIGS[name])(**SMALL)
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(config, dtype=(torch.float32, torch.bfloat16)[i % 2])
        assert decoding.native_unsupported(hydra(plain).backbone()) is None, name


SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "vocab_size": VOCAB, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@needs_native
def test_angles_are_the_models_own():
    for kind in ["linear", "llama3", "yarn"]:
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
        if kind == "llama3":
            rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        config = CONFIGS["llama"].__class__(**{**CONFIGS["llama"].to_dict(), "rope_parameters": rope})
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(config).eval()
        expected = [expected_tokens(plain, prompt) for prompt in PROMPTS]
        assert greedy_tokens(hydra(plain), "native") == (expected, "native")


@needs_native
def test_another_dtype_is_tried_again():
    model = hydra(plain_model("llama"))
    assert greedy_tokens(model, "auto")[1] == "native"
    model.backbone().model.to(torch.float64)
    assert greedy_tokens(model, "auto")[1] == "transformers"
    model.backbone().model.to(torch.float32)
    found, ran = greedy_tokens(model, "auto")
    assert ran == "native"
    assert found == [expected_tokens(plain_model("llama"), prompt) for prompt in PROMPTS]


@needs_native
def test_trained_adapters_are_seen_at_once():
    model = hydra(plain_model("qwen3"))
    asked = [[3 + i % (VOCAB - 3) for i in range(n)] for n in (4, 9, 17)]
    sampling = SamplingConfig(max_completion_length=20, eos_token_ids=(), seed=1)
    before = generate(model, asked, sampling)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.backbone().slot("actor").parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    after = generate(model, asked, sampling)
    assert after.stats.step == "native"
    assert not torch.equal(before.batch.tokens_T, after.batch.tokens_T)
    torch.testing.assert_close(model.score(after.batch, ("actor",)).logprobs_M, after.logprobs_M, rtol=1e-4, atol=1e-4)
