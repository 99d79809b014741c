"""Tiny random models of every architecture family that the engine claims, from their configs."""

from __future__ import annotations

import copy

import torch
import transformers as hf
from transformers import PreTrainedModel

from tests.conftest import VOCAB

WINDOW = 5
_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SHAPE = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # far from uniform outputs, so that differences show
    **_TOKENS,
}
_PLAIN_HEADS = {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}

CONFIGS = {
    "llama": hf.LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "qwen2": hf.Qwen2Config(**_SHAPE),
    "qwen3": hf.Qwen3Config(**_SHAPE, head_dim=8),
    "mistral": hf.MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "gemma2": hf.Gemma2Config(  # every other layer slides; caps low enough to bend scores and logits
        **_SHAPE,
        head_dim=8,
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=3.0,
    ),
    "gpt2": hf.GPT2Config(**_TOKENS, n_embd=24, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3),
    "gpt_neox": hf.GPTNeoXConfig(**_PLAIN_HEADS),
    "opt": hf.OPTConfig(  # the last hidden state is narrower than the trunk, as in opt-350m
        **_TOKENS,
        hidden_size=24,
        ffn_dim=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        init_std=0.3,
        layerdrop=0.5,
    ),
    "phi": hf.PhiConfig(**{**_PLAIN_HEADS, "num_attention_heads": 3}),
    "qwen3_moe": hf.Qwen3MoeConfig(**_SHAPE, **_EXPERTS, head_dim=8),
    "mixtral": hf.MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
}


def plain_model(name: str, seed: int = 0) -> PreTrainedModel:
    """The architecture as transformers runs it, under the attention that serves all of its keywords."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide mistakes
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.set_attn_implementation("eager" if name == "gemma2" else "sdpa")
    return model
