"""Tiny random models of every architecture family that the engine claims, from their configs."""

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
_LATENT = {  # keys and values from a low-rank projection, a part of each key without rotation
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,  # keys of 12 numbers a head, values of 8
}
_BESIDE = {  # one dense layer, then one with a shared expert
    "n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1, "num_dense_layers": 1, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}

CONFIGS = {
    "llama": hf.LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "qwen2": hf.Qwen2Config(**_SHAPE),
    "qwen3": hf.Qwen3Config(**_SHAPE, head_dim=8),
    "mistral": hf.MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "gemma2": hf.Gemma2Config(  # every other layer slides; caps low enough to bend scores and logits
        **_SHAPE, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=4.0,
        final_logit_softcapping=3.0,
    ),
    "gpt2": hf.GPT2Config(**_TOKENS, n_embd=24, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3),
    "gpt_neox": hf.GPTNeoXConfig(**_PLAIN_HEADS),
    "opt": hf.OPTConfig(  # the last hidden state is narrower than the backbone, as in opt-350m
        **_TOKENS, hidden_size=24, ffn_dim=40, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
        word_embed_proj_dim=16, init_std=0.3, layerdrop=0.5,
    ),
    "phi": hf.PhiConfig(**{**_PLAIN_HEADS, "num_attention_heads": 3}),
    "qwen3_moe": hf.Qwen3MoeConfig(**_SHAPE, **_EXPERTS, head_dim=8),
    "mixtral": hf.MixtralConfig(
        **_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, router_jitter_noise=0.1
    ),
    "deepseek_v3": hf.DeepseekV3Config(**{**_SHAPE, **_BESIDE, **_LATENT}),
    "minicpm3": hf.MiniCPM3Config(**{**_SHAPE, **_LATENT}, scale_emb=2, dim_model_base=12),
    "glm4_moe": hf.Glm4MoeConfig(**_SHAPE, **_BESIDE, head_dim=8),
    "gpt_oss": hf.GptOssConfig(  # sinks; every other layer slides
        **_SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "smollm3": hf.SmolLM3Config(**_SHAPE, no_rope_layer_interval=2),  # the second layer has no positions
    "llama4_text": hf.Llama4TextConfig(  # a dense layer, then routed experts without positions but with scaled queries
        **_SHAPE, head_dim=8, intermediate_size_mlp=40, num_local_experts=4, interleave_moe_layer_step=2,
        no_rope_layer_interval=2, attention_chunk_size=60, floor_scale=4, attn_scale=0.5,
    ),
}  # fmt: skip

MORE = {
    "afmoe": hf.AfmoeConfig(**_SHAPE, **_BESIDE, head_dim=8),
    "cohere2_moe": hf.Cohere2MoeConfig(**_SHAPE, **_BESIDE, head_dim=8),
    "deepseek_v2": hf.DeepseekV2Config(**{**_SHAPE, **_BESIDE, **_LATENT}),
    "dots1": hf.Dots1Config(**_SHAPE, **_BESIDE, head_dim=8),
    "ernie4_5_moe": hf.Ernie4_5_MoeConfig(
        **_SHAPE, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=1,
        moe_intermediate_size=16,
    ),
    "exaone_moe": hf.ExaoneMoeConfig(
        **_SHAPE, **_BESIDE, head_dim=8, is_moe_layer=[False, True], mlp_layer_types=["dense", "sparse"]
    ),
    "glm4_moe_lite": hf.Glm4MoeLiteConfig(**{**_SHAPE, **_BESIDE, **_LATENT}),
    "hunyuan_v1_moe": hf.HunYuanMoEV1Config(**_SHAPE, num_experts=4, moe_topk=2, num_shared_expert=1, head_dim=8),
    "phimoe": hf.PhimoeConfig(  # its jitter also bounds which experts share a token, in eval mode
        **_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, router_jitter_noise=0.3
    ),
    "qwen3_next": hf.Qwen3NextConfig(
        **_SHAPE, **_EXPERTS, shared_expert_intermediate_size=16, layer_types=["full_attention"] * 2, head_dim=8
    ),
    "solar_open": hf.SolarOpenConfig(**_SHAPE, **_BESIDE, head_dim=8),
}  # fmt: skip
"""Architectures that few tests need: latent keys and values, dense layers or shared experts beside stacked ones."""
_MAMBA = {"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
REFUSED = {
    "falcon_h1": (hf.FalconH1Config(**_SHAPE, **_MAMBA), "a sequence packed beside another"),
    "bart": (
        hf.BartConfig(
            **_TOKENS, d_model=24, decoder_layers=2, encoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=40,
            max_position_embeddings=64, init_std=0.3, is_decoder=True, is_encoder_decoder=False,
        ),
        "a sequence packed beside another",
    ),
    "inkling_text": (hf.InklingTextConfig(**{**_SHAPE, **_BESIDE}, head_dim=8), "keyword position_bias="),
    "qwen3_next": (hf.Qwen3NextConfig(**_SHAPE, **_EXPERTS, head_dim=8), "run in each of its 2 layers, it ran"),
    "bloom": (
        hf.BloomConfig(**_TOKENS, hidden_size=24, n_layer=2, n_head=4),
        "run in each of its 2 layers, it ran 0 times",
    ),
    "deepseek_v32": (hf.DeepseekV32Config(**{**_SHAPE, **_BESIDE, **_LATENT}), "on packed rows fails: TypeError"),
}  # fmt: skip
"""Models that would be silently wrong, or whose code needs what packed rows do not have, and what is said of them."""


EAGER = {"gemma2", "gpt_oss"}
"""Those whose softcap or sinks SDPA cannot express."""


def plain_model(name: str, seed: int = 0) -> PreTrainedModel:
    """The architecture as transformers runs it, under the attention that serves all of its keywords."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(copy.deepcopy((CONFIGS | MORE)[name])).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide mistakes
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.set_attn_implementation("eager" if name in EAGER else "sdpa")
    return model
