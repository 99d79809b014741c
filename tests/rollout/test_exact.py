"""Exact mode: log-probs of rollout, scoring and training forward have the same bits, in any company."""

import itertools
import re

import pytest
import torch
import transformers as hf
from rlhf_kernels.linear_logprob import linear_logprob
from rlhf_kernels.runtime import native, registry
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from rlhf_engine.hydra import HydraModel, PackedBatch, SlotConfig, hydra_roles
from rlhf_engine.rollout import EngineOptions, Request, Rollout, SamplingConfig, exactness, generate_requests
from tests.conftest import randomise
from tests.hydra.architectures import plain_model

ISAS = [] if native.missing() else native.isas()
DTYPES = (torch.float32, torch.bfloat16)
VOCABULARY = 1203
"""Blocks of the head, and a rest."""

_SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 512}
MODELS: dict[str, PreTrainedConfig] = {
    # widths that are no multiple of a vector, in the MLP and in heads
    "llama": LlamaConfig(hidden_size=60, intermediate_size=83, num_attention_heads=6, num_key_value_heads=6, **_SIZES),
    "llama grouped": LlamaConfig(
        hidden_size=64, intermediate_size=176, num_attention_heads=8, num_key_value_heads=2, attention_bias=True,
        **_SIZES,
    ),
    "qwen2": Qwen2Config(hidden_size=48, intermediate_size=100, num_attention_heads=6, num_key_value_heads=3, **_SIZES),
    "qwen3": Qwen3Config(
        hidden_size=40, intermediate_size=72, num_attention_heads=4, num_key_value_heads=2, head_dim=22, **_SIZES
    ),
    "mistral": MistralConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, sliding_window=19, **_SIZES
    ),
}  # fmt: skip

_WIDE = {**_SIZES, "hidden_size": 60, "intermediate_size": 83, "num_attention_heads": 6, "pad_token_id": 0}
_GROUPED = {**_WIDE, "num_key_value_heads": 2}
OTHERS: dict[str, PreTrainedConfig] = {
    "gpt2": hf.GPT2Config(vocab_size=VOCABULARY, n_embd=60, n_layer=2, n_head=6, n_inner=83, n_positions=512),
    "gemma": hf.GemmaConfig(**_GROUPED, head_dim=10),
    "gemma2": hf.Gemma2Config(
        **_GROUPED, head_dim=10, sliding_window=19, query_pre_attn_scalar=8, attn_logit_softcapping=4.0,
        final_logit_softcapping=3.0,
    ),
    "gpt_neox": hf.GPTNeoXConfig(**_WIDE),
    "opt": hf.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=60, ffn_dim=83, num_hidden_layers=2, num_attention_heads=6,
        max_position_embeddings=512, word_embed_proj_dim=60,
    ),
    "phi3": hf.Phi3Config(**_GROUPED),
    "starcoder2": hf.Starcoder2Config(**_GROUPED, sliding_window=None),
    "olmo2": hf.Olmo2Config(**_GROUPED),
    "cohere": hf.CohereConfig(**_GROUPED),
}  # fmt: skip
"""Models whose decoding steps are transformers' own."""

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@pytest.fixture(autouse=True)
def _exactly():
    with registry.use_exact():
        yield


def make(config: PreTrainedConfig, dtype: torch.dtype = torch.float32, **slots) -> HydraModel:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in plain.parameters():  # logits that differ
        parameter.data.mul_(3.0)
    model = HydraModel.from_pretrained(plain, roles=hydra_roles(), slots=slots or None, dtype=dtype).eval()
    randomise(model, "actor")
    return model


def ask(lengths: tuple[int, ...], *, roles: tuple[str, ...] = ("actor",)) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    return [
        Request(
            prompt=tuple(torch.randint(60, VOCABULARY, (n,), generator=generator).tolist()),
            sample_id=i,
            role=roles[i % len(roles)],
        )
        for i, n in enumerate(lengths)
    ]


def draw(
    model: HydraModel, requests: list[Request], *, tokens: int = 24, temperature: float = 1.0, **options
) -> Rollout:
    sampling = SamplingConfig(max_completion_length=tokens, eos_token_ids=tuple(range(60)), temperature=temperature)
    return generate_requests(model, requests, sampling, options=EngineOptions(**options))


def score(model: HydraModel, batch: PackedBatch, role: str = "actor", **options) -> torch.Tensor:
    found = dict(model.score(batch, (role,), **options).items())
    return found["logprobs_M" if role == "actor" else "ref_logprobs_M"]


RAGGED = (1, 2, 15, 16, 17, 33, 3, 8, 70, 5)


def halves(models: dict[str, PreTrainedConfig]) -> pytest.MarkDecorator:
    """Every model in both dtypes, per push in one of them."""
    pairs = itertools.product(enumerate(models), enumerate(DTYPES))
    cases = [pytest.param(k, dtype, marks=[pytest.mark.long] * ((i + j) % 2)) for (i, k), (j, dtype) in pairs]
    return pytest.mark.parametrize(("kind", "dtype"), cases)


@halves(MODELS)
@pytest.mark.parametrize("isa", ISAS)
def test_a_rollout_has_the_log_probs_of_the_training_forward(isa, kind, dtype):
    with native.use_isa(isa):
        model = make(MODELS[kind], dtype)
        rollout = draw(model, ask(RAGGED), temperature=0.8)
        assert rollout.stats.step == "native"
        assert torch.equal(rollout.logprobs_M, score(model, rollout.batch, temperature=0.8))
        assert rollout.logprobs_M.numel() > 60
        assert len(set(rollout.batch.completion_lens)) > 1


@halves(OTHERS)
def test_other_models_have_them_too(kind, dtype):
    """Ranks and widths that are no multiple of a vector, several rows at once and one alone."""
    model = make(OTHERS[kind], dtype, actor=SlotConfig(r=5))
    assert exactness.unsupported(model.backbone()) is None
    rollout = draw(model, ask(RAGGED), temperature=0.8)
    assert (rollout.stats.step, rollout.stats.most_rows) == ("transformers", len(RAGGED))
    assert torch.equal(rollout.logprobs_M, score(model, rollout.batch, temperature=0.8))
    alone = draw(model, ask(RAGGED)[3:4], temperature=0.8)
    assert alone.batch.completion_tokens(0) == rollout.batch.completion_tokens(3)
    a, b = rollout.batch.completion_cu[3:5]
    assert torch.equal(alone.logprobs_M, rollout.logprobs_M[a:b])


def test_what_is_not_served_is_named():
    for name, reason in [
        ("qwen3_moe", r"layers.0.mlp.experts is a Qwen3MoeExperts, whose stacked experts share products"),
        ("glm4_moe", r"experts is a Glm4MoeExperts, whose stacked experts share products"),
    ]:
        model = HydraModel.from_pretrained(plain_model(name), roles=hydra_roles())
        assert re.search(reason, str(exactness.unsupported(model.backbone())))


def _sigmoid(x):
    return x * torch.sigmoid(x)


class _Gate(torch.nn.Module):
    def forward(self, x):
        return _sigmoid(x)


class _NormOfRows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(60))

    def forward(self, x):
        return self.weight * (x - 1e-3 * x.mean(-2, keepdim=True))


def test_a_module_that_is_not_by_rows_is_named():
    """By what its code calls, and by a trial where the code looks harmless."""
    model = make(OTHERS["gpt2"])
    model.backbone().base_model.h[1].mlp.act = _Gate()
    reason = "h.1.mlp.act is a _Gate, whose code calls torch's sigmoid: bits depend on an element's place"
    assert reason in str(exactness.unsupported(model.backbone()))
    model = make(OTHERS["gpt2"])
    model.backbone().base_model.h[1].ln_2 = _NormOfRows()
    assert "a row's bits depend on the rows beside it" in str(exactness.unsupported(model.backbone()))
    doubled = make(MODELS["llama"], torch.float64)
    assert "float64" in str(exactness.unsupported(doubled.backbone()))


def test_torch_s_functions_that_modules_may_call_are_by_element():
    """Rotary angles and some activations: an element has its bits at any place and in any company."""
    for name, dtype in itertools.product(("cos", "sin", "tanh", "relu", "square"), DTYPES):
        function, x = getattr(torch, name), (30 * torch.randn(5003)).to(dtype)
        whole = function(x)
        for start, n in itertools.product((0, 1, 7, 100, 4001), (1, 3, 8, 29, 1000)):
            assert torch.equal(function(x[start : start + n].clone()), whole[start : start + n]), (name, dtype)


@pytest.mark.parametrize(("step", "dtype"), [("native", torch.bfloat16), ("transformers", torch.float32)])
def test_nothing_beside_an_answer_changes_its_bits(step, dtype):
    """Rows at once, order, neighbours and their slots, how prompts were batched, threads."""
    model = make(MODELS["llama grouped"], dtype, actor=SlotConfig(r=5))
    requests = ask((*RAGGED, 330, 7), roles=("actor", "actor", "reference"))  # a prompt beyond what one call takes
    requests[3] = Request(prompt=requests[8].prompt, sample_id=3)  # a prompt that two answers share
    whole = draw(model, requests, decode_step=step)
    parts = list(itertools.pairwise(whole.batch.completion_cu))
    before = torch.get_num_threads()
    try:
        for places, max_rows, threads in (
            (range(12), 5, 2),
            (range(11, -1, -1), 12, 1),
            (range(4, 12), 3, 2),
            ((10,), 1, 1),
            ((8, 3), 2, 2),
        ):
            torch.set_num_threads(threads)
            again = draw(model, [requests[i] for i in places], max_rows=max_rows, decode_step=step)
            for j, i in enumerate(places):
                assert again.batch.completion_tokens(j) == whole.batch.completion_tokens(i)
                a, b = parts[i]
                c, d = again.batch.completion_cu[j : j + 2]
                assert torch.equal(again.logprobs_M[c:d], whole.logprobs_M[a:b])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_kinds_of_step_draw_the_same(dtype):
    model = make(MODELS["qwen3"], dtype)
    ours, theirs = (draw(model, ask(RAGGED), decode_step=step) for step in ("native", "transformers"))
    assert torch.equal(ours.batch.tokens_T, theirs.batch.tokens_T)
    assert torch.equal(ours.logprobs_M, theirs.logprobs_M)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_depend_on_neither_company_nor_budget(dtype):
    model = make(MODELS["llama"], dtype)
    rollout = draw(model, ask(RAGGED))
    batch, whole = rollout.batch, score(model, rollout.batch)
    every = model.score(batch, ("actor", "reference", "critic", "reward"))
    assert torch.equal(every.logprobs_M, whole)
    for budget in (1, 64, 10**6):
        assert torch.equal(score(model, batch, token_budget=budget), whole)
    chosen = [7, 2, 5]
    assert torch.equal(score(model, batch.select(chosen)), whole[batch.select_completion_rows(chosen)])
    with torch.enable_grad():
        assert torch.equal(model.score(batch, ("actor",)).logprobs_M, whole)


def test_exact_mode_ends_with_its_block():
    assert registry.is_exact()
    with registry.use_exact(False):
        assert not registry.is_exact()
        x = torch.randn(3, 8)
        assert linear_logprob(x, torch.randn(5, 8), torch.tensor([1, 2, 3])).logprob.shape == (3,)
    assert registry.is_exact()
