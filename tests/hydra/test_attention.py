"""Our attention against transformers' own: packed rows, padded buckets, gradients, and what it refuses."""

import itertools

import pytest
import torch
from rlhf_kernels.runtime import registry
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from rlhf_engine.hydra import HydraModel, PackedBatch, hydra_roles
from rlhf_engine.hydra.attention import ATTENTION_NAME, packed_attention, plan_packed
from rlhf_engine.hydra.gate import BackboneCall, SlotTable, enter, head_logits
from tests.conftest import VOCAB, build, random_batch, tiny_llama

LENGTHS = ((3, 6), (4, 4), (1, 7), (6, 14), (5, 15), (1, 1), (2, 30))  # buckets of 9, 20, 2 and 32 rows, two padded


def off_logits(model: HydraModel, batch: PackedBatch) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.backbone().run_lanes([(batch, None, None)])[0]
    return head_logits(hidden, model.backbone().lm_head)


def test_the_lengths_make_padded_and_plain_buckets():
    buckets, grid = plan_packed(random_batch(LENGTHS).lengths, torch.device("cpu")).layout
    assert buckets == ((32, 1), (20, 2), (9, 3), (2, 1))
    assert grid is not None
    rows, places = grid
    assert rows[places].tolist() == list(range(len(places)))  # every row has a place
    assert len(rows) == 32 + 2 * 20 + 3 * 9 + 2
    buckets, grid = plan_packed([5, 5, 5], torch.device("cpu")).layout
    assert grid is None
    assert buckets == ((5, 3),)


def test_no_sequence_sees_another():
    model, batch = build(), random_batch(LENGTHS)
    whole = off_logits(model, batch)
    changed = batch.tokens_T.clone()
    changed[batch.cu_seqlens[3] : batch.cu_seqlens[4]] = 7
    other = PackedBatch(
        tokens_T=changed, cu_seqlens=batch.cu_seqlens, prompt_lens=batch.prompt_lens, sample_ids=batch.sample_ids
    )
    differs = (off_logits(model, other) != whole).any(-1)
    inside = torch.zeros(batch.n_tokens, dtype=torch.bool)
    inside[batch.cu_seqlens[3] : batch.cu_seqlens[4]] = True
    assert differs[inside].all()
    assert not differs[~inside].any()


def attend(max_length: int = 4, **options):
    """Our attention function on its own, in a backbone call of one sequence; its inputs' gradients with it."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, max_length, 8, generator=generator).requires_grad_() for _ in range(3))
    plan = plan_packed([max_length], torch.device("cpu"))
    module = torch.nn.Module()
    with enter(BackboneCall(table=SlotTable.uniform(None, max_length), attention=plan)):
        out, weights = packed_attention(module, query, key, value, None, scaling=0.3, **options)
    assert weights is None
    out.square().sum().backward()
    return out.detach(), query.grad, key.grad, value.grad


def expected_attention(max_length: int, window: int, softcap: float | None, sinks: torch.Tensor | None = None):
    """The definition, in float64 on the whole score matrix."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, max_length, 8, generator=generator).double().requires_grad_() for _ in range(3)
    )
    score = 0.3 * query @ key.transpose(2, 3)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    distance = torch.arange(max_length)[:, None] - torch.arange(max_length)[None, :]
    score = score.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    if sinks is not None:
        score = torch.cat([score, sinks.view(1, -1, 1, 1).expand(*score.shape[:3], 1)], -1)
    out = (score.softmax(-1)[..., :max_length] @ value).transpose(1, 2)
    out.square().sum().backward()
    return out.detach(), query.grad, key.grad, value.grad


def test_windows_and_softcaps_are_what_they_say():
    for length, window, softcap in (
        (4, 4, None),  # a window that does not bite
        (30, 7, None),
        (30, 1, None),
        (2100, 100, None),  # blocks of queries
        (2049, 2048, None),
        (30, 30, 1.5),
        (30, 7, 1.5),
        (1030, 90, 1.5),
    ):
        ours = attend(length, sliding_window=window, softcap=softcap)
        for name, found, expected in zip("oqkv", ours, expected_attention(length, window, softcap), strict=True):
            said = f"{name} of {length}, {window}, {softcap}"
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-5, msg=said)


def test_sinks_join_the_denominator_and_have_a_gradient():
    """Through SDPA's kernel, and where softcaps or the reference kernels rule it out in plain torch."""
    lengths = [(1, 1, None), (30, 30, None), (30, 7, None), (2100, 100, None), (30, 7, 1.5), (1030, 90, 1.5)]
    cases = [(shape, (0.5, -2.0)) for shape in lengths]
    cases += [((30, 7, None), (30.0, -30.0)), ((30, 30, None), (-torch.inf, 1.0))]
    for backend, ((length, window, softcap), values) in itertools.product(("auto", "reference"), cases):
        sinks = torch.tensor(values).requires_grad_()
        with registry.use_backend(backend):
            ours = attend(length, sliding_window=window, softcap=softcap, s_aux=sinks)
        exact = torch.tensor(values, dtype=torch.float64).requires_grad_()
        truth = (*expected_attention(length, window, softcap, exact), exact.grad)
        for name, found, expected in zip("oqkvs", (*ours, sinks.grad), truth, strict=True):
            said = f"{name} of {length}, {window}, {softcap}, {values} on {backend}"
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-5, msg=said)
    frozen = torch.tensor([0.5, -2.0])
    assert all(x.any() for x in attend(12, s_aux=frozen))
    assert frozen.grad is None


@pytest.mark.parametrize(  # the backward pass of 40 is in fp32, that of 300 in bf16
    ("window", "length", "dtype"), [(None, 40, torch.bfloat16), (7, 300, torch.bfloat16), (7, 40, torch.float32)]
)
def test_sinks_in_bf16_are_as_close_as_in_plain_torch(window, length, dtype):
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(1, h, 2 * length, 16, generator=generator).bfloat16() for h in (4, 2, 2)]
    weight = torch.randn(1, 2 * length, 4, 16, generator=generator)
    values = torch.tensor([0.5, -2.0, 3.0, 1.0])
    module = torch.nn.Module()
    plan = plan_packed([length, length], torch.device("cpu"))

    def run(of: torch.dtype, sinks_of: torch.dtype, backend: str) -> list[torch.Tensor]:
        inputs = [x.to(of).detach().requires_grad_() for x in wide]
        sinks = values.to(sinks_of).clone().requires_grad_()
        with registry.use_backend(backend), enter(BackboneCall(table=SlotTable.uniform(None, 600), attention=plan)):
            out, _ = packed_attention(module, *inputs, None, scaling=0.3, sliding_window=window, s_aux=sinks)
        assert out.dtype == of
        (out.to(torch.promote_types(of, torch.float32)) * weight).sum().backward()
        return [out.detach(), *(x.grad for x in inputs), sinks.grad]

    truth = run(torch.float64, torch.float64, "reference")
    ours, plain = (run(torch.bfloat16, dtype, backend) for backend in ("auto", "reference"))
    for found, eager, exact in zip(ours, plain, truth, strict=True):
        error = (found.double() - exact).norm() / exact.norm()
        allowed = (eager.double() - exact).norm() / exact.norm()
        assert error <= 1.1 * allowed + 2.0**-8 < 0.03


def test_what_would_be_ignored_is_refused():
    attend(sliding_window=4, softcap=None, dropout=0.0, is_causal=True, output_attentions=False, position_bias=None)
    for options, message in (
        ({"position_bias": torch.ones(1)}, "keyword position_bias=.* is not served"),
        *(({"s_aux": sinks}, "keyword s_aux=") for sinks in (1.0, torch.zeros(3), torch.zeros(2, 1))),  # of two heads
        ({"is_causal": False}, "keyword is_causal=False"),
        ({"something_new": 3}, "keyword something_new=3"),  # what nobody knows yet
        ({"output_attentions": True}, "keyword output_attentions=True"),
        ({"dropout": 0.1}, r"dropout: expected 0 .*got 0\.1"),
    ):
        with pytest.raises(ValueError, match=f"attention {message}"):
            attend(**options)
    plan = plan_packed([4], torch.device("cpu"))
    heads = torch.ones(1, 2, 4, 8)
    with (
        enter(BackboneCall(table=SlotTable.uniform(None, 4), attention=plan)),
        pytest.raises(ValueError, match=r"attention_mask: expected None, .*got a mask \(1, 1, 4, 4\)"),
    ):
        packed_attention(torch.nn.Module(), heads, heads, heads, torch.ones(1, 1, 4, 4))


def test_base_dropout_is_off_in_train_mode():
    plain = tiny_llama()
    plain.config.attention_dropout = 0.5
    for layer in plain.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model, batch = HydraModel.from_pretrained(plain, roles=hydra_roles()).train(), random_batch()
    assert torch.equal(off_logits(model, batch), off_logits(build(), batch))


def test_the_plain_model_cannot_run_outside_of_a_backbone_call():
    model = build()
    assert model.backbone().model.config._attn_implementation == ATTENTION_NAME
    with pytest.raises(RuntimeError, match="attention ran outside a backbone call: this backbone belongs to a HydraMo"):
        model.backbone().model(torch.tensor([[5, 6]]))


def test_attention_that_computes_something_unserved_is_refused():
    plain = tiny_llama()

    def twice_unless_ours(module, arguments, out):
        return out if plain.config._attn_implementation == ATTENTION_NAME else (2 * out[0], out[1])

    for layer in plain.model.layers:
        layer.self_attn.register_forward_hook(twice_unless_ours)
    with pytest.raises(ValueError, match="expected the hidden states of its own attention, got ones that differ by"):
        HydraModel.from_pretrained(plain, roles=hydra_roles())


def test_somebody_elses_change_of_attention_is_noticed():
    model = build()
    model.backbone().model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="expected the attention 'rlhf_engine' that it was given, got 'sdpa'"):
        model.score(random_batch())


_SMALL = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip


def test_a_window_that_attention_is_not_told_is_refused():
    """Qwen2-MoE puts its window into a mask, which packed rows never get."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sliding = {"use_sliding_window": True, "max_window_layers": 1}
    make = lambda window: Qwen2MoeForCausalLM(Qwen2MoeConfig(**_SMALL, **experts, **sliding, sliding_window=window))  # noqa: E731
    with pytest.raises(ValueError, match=r"expected layer 0 to ask for sliding attention over 4 keys, .* full attenti"):
        HydraModel.from_pretrained(make(4), roles=hydra_roles())
    HydraModel.from_pretrained(make(64), roles=hydra_roles())  # as long as the context: it never bites


def test_what_a_config_merely_carries_along_is_no_window():
    """A Llama with a leftover of Mistral's, and Mistral with a flag of Qwen's."""
    HydraModel.from_pretrained(LlamaForCausalLM(LlamaConfig(**_SMALL, sliding_window=4)), roles=hydra_roles())
    mistral = MistralConfig(**_SMALL, sliding_window=4, use_sliding_window=False)
    HydraModel.from_pretrained(MistralForCausalLM(mistral), roles=hydra_roles())
    # nor are hidden states of zero a difference: padding is the probe's first token here, and OLMo 3 adds nothing to it
    plain = Olmo3ForCausalLM(Olmo3Config(**_SMALL, sliding_window=4))
    with torch.no_grad():
        assert not plain.base_model(torch.ones(1, 1, dtype=torch.int64)).last_hidden_state.any()
    HydraModel.from_pretrained(plain, roles=hydra_roles())
