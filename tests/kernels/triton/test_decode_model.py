"""A whole model's rollout by the decoding step in Triton, which is asked for by name."""

import torch
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.triton_support import INTERPRETED

from rlhf_engine.rollout import EngineOptions, Request, SamplingConfig, decoding, generate_requests
from tests.conftest import build


def test_a_model_s_rows_go_through_it_when_it_is_named(on_triton, device):
    """Rows of the actor beside rows without a slot; on a GPU in one graph."""
    with torch.device("cpu"):
        model = build(device=device)
    requests = [
        Request(prompt=tuple(range(4, 5 + 3 * i)), sample_id=i, role=role)
        for i, role in enumerate(("actor", "reference", "actor"))
    ]
    how = SamplingConfig(max_completion_length=3 if INTERPRETED else 40, eos_token_ids=(), seed=3)
    with registry.use_backend("auto"):
        plain = generate_requests(model, requests, how, options=EngineOptions(decode_step="transformers"))
    assert decoding.native_unsupported(model.backbone()) is None
    own = model.backbone().base_model.layers[0].self_attn
    assert own.q_proj.weight.untyped_storage().data_ptr() == own.v_proj.weight.untyped_storage().data_ptr()
    found = generate_requests(model, requests, how, options=EngineOptions(decode_step="native"))
    assert found.stats.step == ("native" if INTERPRETED else "graph")
    for i in range(3):
        assert found.batch.completion_tokens(i) == plain.batch.completion_tokens(i)
    torch.testing.assert_close(found.logprobs_M, plain.logprobs_M, rtol=1e-3, atol=1e-3)
