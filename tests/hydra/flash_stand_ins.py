"""What stands in for packages that need a GPU: their names, signatures and results, computed in plain torch.

`install` writes a package with its metadata into a folder; a test puts that on `sys.path`. Signatures are those of
flash-attn 2.8.3, flash-attn 3 (its Hopper folder), flash-attn-4 4.0.0b36 and torch 2.11 and 2.13.
"""

import importlib
import itertools
from pathlib import Path

import torch

CALLS: list[dict[str, object]] = []
"""Of every call: rows, sequences, longest, window, softcap."""


def attention(q, k, v, starts, longest, scale, left, softcap):
    """Causal attention of each sequence by its definition, in fp32. left: keys before the query, None for all."""
    bounds = starts.tolist()
    assert starts.dtype == torch.int32
    assert bounds[-1] == len(q) == len(k) == len(v)
    assert longest == max(b - a for a, b in itertools.pairwise(bounds))
    CALLS.append({"rows": len(q), "sequences": len(bounds) - 1, "left": left, "softcap": softcap})
    groups = q.shape[1] // k.shape[1]
    out = []
    for a, b in itertools.pairwise(bounds):
        query, key, value = (x[a:b].float().transpose(0, 1) for x in (q, k, v))
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        score = query @ key.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        distance = torch.arange(b - a)[:, None] - torch.arange(b - a)[None, :]
        hidden = distance < 0 if left is None else (distance < 0) | (distance > left)
        out.append((score.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(0, 1))
    return torch.cat(out).to(q.dtype)


def with_sinks(q, k, v, sinks, starts, scale, window, softcap):
    """The same with a column of scores more, sinks [H], which has no value; in the inputs' own dtype."""
    groups = q.shape[1] // k.shape[1]
    out = []
    for a, b in itertools.pairwise(starts.tolist()):
        query, key, value = (x[a:b].transpose(0, 1) for x in (q, k, v))
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        score = query @ key.transpose(1, 2) * scale
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        distance = torch.arange(b - a)[:, None] - torch.arange(b - a)[None, :]
        score = score.masked_fill((distance < 0) | (distance >= (window or b - a)), -torch.inf)
        score = torch.cat([score, sinks[:, None, None].expand(-1, b - a, 1)], -1)
        out.append((score.softmax(-1)[..., :-1] @ value).transpose(0, 1))
    return torch.cat(out)


def _left(window_size):
    left, right = window_size
    assert right in (-1, None, 0)
    return None if left in (-1, None) else left


FLASH_2 = """
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None):
    assert causal and deterministic and dropout_p == 0.0
    return attention(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, _left(window_size), softcap)
"""
FLASH_3 = """
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
                           seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                           v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                           pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):
    assert causal and deterministic and num_splits == 1
    return attention(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, _left(window_size), softcap)
"""
FLASH_4 = """
def flash_attn_varlen_func(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                           max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None,
                           gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
                           window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
                           deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
                           block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False):
    assert causal and deterministic and num_splits == 1
    return attention(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, _left(window_size), softcap), None
"""
PACKAGES = {  # distribution, version, module's file, code
    "flash-attn 2": ("flash_attn", "2.8.3", "flash_attn/flash_attn_interface.py", FLASH_2),
    "flash-attn 3": ("flash_attn_3", "3.0.0", "flash_attn_interface.py", FLASH_3),
    "flash-attn 4": ("flash_attn_4", "4.0.0b36", "flash_attn/cute/__init__.py", FLASH_4),
}


def install(name: str, site: Path, code: str | None = None) -> None:
    """Write one of `PACKAGES`; code: of a package that is broken."""
    distribution, version, file, sound = PACKAGES[name]
    path = site / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("from tests.hydra.flash_stand_ins import _left, attention\n" + sound if code is None else code)
    metadata = site / f"{distribution}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    importlib.invalidate_caches()


def varlen_of_torch_211(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert query.shape[1] == key.shape[1]  # it shares no keys
    assert window_size[1] == 0  # causal
    return attention(query, key, value, cu_seq_q, max_q, scale, _left(window_size), None)


def varlen_of_torch_213(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert num_splits == 1
    assert window_size[1] == 0
    return attention(query, key, value, cu_seq_q, max_q, scale, _left(window_size), None)
