"""Exact mode of whole models on Triton's kernels: the log-probs of a rollout are those of the training forward."""

import pytest
import torch
import transformers as hf
from rlhf_kernels.runtime import registry
from transformers import AutoModelForCausalLM

from rlhf_engine.hydra import HydraModel, SlotConfig, hydra_roles
from rlhf_engine.rollout import EngineOptions, Request, SamplingConfig, exactness, generate_requests
from tests.conftest import randomise
from tests.devices.stand_in import installed

VOCABULARY = 150
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 41,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MODELS = {
    "llama": hf.LlamaConfig(**_SIZES, num_key_value_heads=2),
    "gemma2": hf.Gemma2Config(
        **_SIZES,
        num_key_value_heads=2,
        head_dim=10,
        sliding_window=9,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=3.0,
    ),
    "gpt2": hf.GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=1, n_head=4, n_inner=41, n_positions=128),
}
PROMPTS = (1, 9, 3, 9)
OPS = ("linear", "lora", "attention", "decode_attention", "sample", "linear_logprob")


@pytest.fixture(scope="module")
def device(device):
    """A GPU, or what stands in for one: whole models have more than one side."""
    if device == "cuda":
        yield device
        return
    with installed() as stand_in:
        yield stand_in


@pytest.fixture(autouse=True)
def _exactly_in_triton():
    with registry.use_exact(), registry.use_backend("triton"):
        yield


def make(kind, dtype, device):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(MODELS[kind], dtype=dtype).to(device)
    for parameter in plain.parameters():  # logits that differ
        parameter.data.mul_(3.0)
    slots = {"actor": SlotConfig(r=5), "critic": SlotConfig(r=3)}
    model = HydraModel.from_pretrained(plain, roles=hydra_roles(), slots=slots, dtype=dtype, device=device).eval()
    randomise(model, "actor")
    return model


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("llama", torch.bfloat16),
        pytest.param("gemma2", torch.float32, marks=pytest.mark.long),
        pytest.param("gpt2", torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_a_rollout_has_the_log_probs_of_the_training_forward(device, kind, dtype):
    """Prompts of several lengths, one of them shared by two answers; rows of the actor beside rows without a slot."""
    model = make(kind, dtype, device)
    assert exactness.unsupported(model.backbone()) is None
    assert {registry.resolve_for(op, "auto", device, dtype, (8,)) for op in OPS} == {"triton"}
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(9, VOCABULARY, (n,), generator=generator).tolist()) for n in PROMPTS]
    prompts[3] = prompts[1]
    roles = ("actor", "actor", "reference", "actor")
    requests = [
        Request(prompt=prompt, sample_id=i, role=role)
        for i, (prompt, role) in enumerate(zip(prompts, roles, strict=True))
    ]
    sampling = SamplingConfig(max_completion_length=2, eos_token_ids=tuple(range(9)), temperature=0.8)
    rollout = generate_requests(model, requests, sampling, options=EngineOptions(decode_step="transformers"))
    assert rollout.stats.most_rows == len(PROMPTS)
    model.shares_prompts = True  # on a GPU it is no default
    assert model.shared_rows(rollout.batch) is not None
    scored = model.score(rollout.batch, ("actor", "reference"), temperature=0.8)
    ends = rollout.batch.completion_cu
    for i, role in enumerate(roles):
        found = scored.logprobs_M if role == "actor" else scored.ref_logprobs_M
        assert torch.equal(rollout.logprobs_M[ends[i] : ends[i + 1]], found[ends[i] : ends[i + 1]]), i
    with torch.enable_grad():
        assert torch.equal(model.score(rollout.batch, ("actor",), temperature=0.8).logprobs_M, scored.logprobs_M)
    part = rollout.batch.select([3, 0])
    rows = rollout.batch.select_completion_rows([3, 0])
    assert torch.equal(model.score(part, ("actor",), temperature=0.8).logprobs_M, scored.logprobs_M[rows])
