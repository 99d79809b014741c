"""A decoder's weights and adapters as `decode_step` takes them, and the checks of their shapes and dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_kernels.runtime.signature import check_window

LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
"""Names of a layer's linears, in their order."""
GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
"""Linears of one input, in the order of `LINEARS`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """Linear layer: x Wᵀ + b."""

    weight: Tensor
    """[out, in], inner stride 1"""
    bias: Tensor | None = None
    """[out]; None: no bias"""


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderLayer:
    """Weights of one layer."""

    input_norm: Tensor
    """[H], weight of the norm before attention"""
    q: Projection
    """queries, [heads · D, H]"""
    k: Projection
    """keys, [Hkv · D, H]"""
    v: Projection
    """values, [Hkv · D, H]"""
    o: Projection
    """attention's output, [H, heads · D]"""
    q_norm: Tensor | None = None
    """[D], norm of every query head before its rotation (Qwen3); None: no norm"""
    k_norm: Tensor | None = None
    """[D], norm of every key head before its rotation; None: no norm"""
    mlp_norm: Tensor
    """[H], weight of the norm before the MLP"""
    gate: Projection
    """[I, H], with I the width of the MLP"""
    up: Projection
    """[I, H]"""
    down: Projection
    """[H, I]"""
    window: int | None = None
    """number of keys that a query sees, its own included, at least 1; None: all"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Decoder:
    """Weights of a model, all except its head's; of one floating dtype and on one device."""

    embedding: Tensor
    """[V, H], inner stride 1"""
    layers: Sequence[DecoderLayer]
    """at least one, in the order of the forward pass"""
    final_norm: Tensor
    """[H], weight of the last norm"""
    eps: float
    """number ≥ 0, added to the mean square in every norm"""
    n_heads: int
    """heads of the queries, a multiple of n_kv_heads"""
    n_kv_heads: int
    """heads of keys and values, Hkv"""
    head_dim: int
    """features of a head, D, an even number"""
    scale: float
    """factor of the attention scores, usually D^−½"""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepAdapter:
    """LoRA pairs of one slot."""

    pairs: Sequence[Mapping[str, tuple[Tensor, Tensor]]]
    """per layer: name of a linear (`LINEARS`) → A [r, in], B [out, r]; a linear that has no entry is not adapted"""
    scale: float
    """factor of every delta"""


def mlp_shape(decoder: Decoder) -> tuple[int, int]:
    """Shape of the first layer's gate, by which a backend is chosen: a layer's largest weight."""
    rows, columns = decoder.layers[0].gate.weight.shape
    return rows, columns


def check_caches(keys: Sequence[Tensor], values: Sequence[Tensor], decoder: Decoder) -> None:
    """One cache per layer, all of one shape, dtype and device."""
    dtype, device, layers = decoder.embedding.dtype, decoder.embedding.device, len(decoder.layers)
    for name, caches in (("keys", keys), ("values", values)):
        if len(caches) != layers:
            raise ValueError(f"{name}: expected {layers} caches, one per layer, got {len(caches)}")
        for i, cache in enumerate(caches):
            if cache.dim() != 4 or cache.shape[2:] != (decoder.n_kv_heads, decoder.head_dim):
                raise ValueError(
                    f"{name}[{i}]: expected shape [blocks, block, {decoder.n_kv_heads}, {decoder.head_dim}], "
                    f"got {tuple(cache.shape)}"
                )
            if cache.shape != keys[0].shape:
                raise ValueError(
                    f"{name}[{i}]: expected the shape of keys[0], {tuple(keys[0].shape)}, got {tuple(cache.shape)}"
                )
            if cache.dtype != dtype or cache.device != device:
                raise TypeError(f"{name}[{i}]: expected {dtype} on {device}, got {cache.dtype} on {cache.device}")
            if cache.stride(3) != 1:
                raise ValueError(f"{name}[{i}]: expected inner stride 1, got strides {cache.stride()}")
    if keys[0].shape[1] == 0:
        raise ValueError(f"keys[0]: expected blocks of at least 1 position, got shape {tuple(keys[0].shape)}")


def tensors_of(decoder: Decoder, adapters: Sequence[StepAdapter]) -> list[Tensor]:
    """All that a step reads besides its arguments."""
    tensors = [decoder.embedding, decoder.final_norm]
    for layer in decoder.layers:
        projections = [getattr(layer, name) for name in LINEARS]
        tensors += [layer.input_norm, layer.mlp_norm, *(p.weight for p in projections)]
        tensors += [t for t in (layer.q_norm, layer.k_norm, *(p.bias for p in projections)) if t is not None]
    for adapter in adapters:
        tensors += [t for pairs in adapter.pairs for pair in pairs.values() for t in pair]
    return tensors


def side_by_side(linears: list[tuple[Tensor, Tensor | None]]) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of all linears together, as views, where these lie one after another; else the linears."""
    weights, biases = [weight for weight, _ in linears], [bias for _, bias in linears if bias is not None]
    if not _follow(weights) or len(biases) not in (0, len(linears)) or not _follow(biases):
        return linears
    return [(_over(weights), _over(biases) if biases else None)]


def join(decoder: Decoder) -> None:
    """Lay the weights of q, k and v side by side, and those of gate and up, so that one product serves each group.

    The tensors stay what they are, with their values; their memory is another one, of the same size in all. One group
    is copied at a time. Groups that lie side by side already, or of which not all linears have a bias, are left.

    Args:
        decoder: weights of a model, each a tensor of its own.
    """
    for layer in decoder.layers:
        for names in GROUPS:
            projections: list[Projection] = [getattr(layer, name) for name in names]
            biases = [p.bias for p in projections if p.bias is not None]
            if len(biases) not in (0, len(names)):
                continue
            for tensors in ([p.weight for p in projections], biases):
                if not _follow(tensors):
                    parts = torch.cat([t.detach() for t in tensors]).split([t.shape[0] for t in tensors])
                    for tensor, part in zip(tensors, parts, strict=True):
                        tensor.data = part


def _follow(tensors: list[Tensor]) -> bool:
    """Whether each begins in memory where the one before it ends, rows being equally far apart."""
    return all(
        b.data_ptr() == a.data_ptr() + a.shape[0] * a.stride(0) * a.element_size()
        and a.stride() == b.stride()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        for a, b in itertools.pairwise(tensors)
    )


def _over(tensors: list[Tensor]) -> Tensor:
    """View of tensors that follow each other."""
    first = tensors[0].detach()
    return first.as_strided((sum(t.shape[0] for t in tensors), *first.shape[1:]), first.stride())


def check_decoder(decoder: Decoder) -> None:
    embedding = decoder.embedding
    if not isinstance(embedding, Tensor) or not embedding.is_floating_point():
        got = embedding.dtype if isinstance(embedding, Tensor) else type(embedding).__name__
        raise TypeError(f"embedding: expected a tensor of a floating dtype, got {got}")
    if embedding.dim() != 2 or embedding.shape[1] == 0 or embedding.stride(1) != 1:
        raise ValueError(
            f"embedding: expected [V, H] with inner stride 1, got {tuple(embedding.shape)}, {embedding.stride()}"
        )
    if decoder.n_kv_heads < 1 or decoder.n_heads < 1 or decoder.n_heads % decoder.n_kv_heads:
        raise ValueError(f"n_heads: expected a multiple of n_kv_heads {decoder.n_kv_heads}, got {decoder.n_heads}")
    if decoder.head_dim < 2 or decoder.head_dim % 2:
        raise ValueError(f"head_dim: expected an even number of at least 2, got {decoder.head_dim}")
    if not decoder.layers:
        raise ValueError("layers: expected at least 1, got none")
    if not decoder.eps >= 0.0:
        raise ValueError(f"eps: expected a number of at least 0, got {decoder.eps}")
    H = embedding.shape[1]
    gate = decoder.layers[0].gate.weight
    if gate.dim() != 2:
        raise ValueError(f"layers[0].gate.weight: expected [mlp, {H}], got shape {tuple(gate.shape)}")
    mlp = gate.shape[0]
    _check_vector("final_norm", decoder.final_norm, H, embedding)
    for i, layer in enumerate(decoder.layers):
        name = f"layers[{i}]"
        _check_vector(f"{name}.input_norm", layer.input_norm, H, embedding)
        _check_vector(f"{name}.mlp_norm", layer.mlp_norm, H, embedding)
        for which, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
            if norm is not None:
                _check_vector(f"{name}.{which}", norm, decoder.head_dim, embedding)
        check_window(f"{name}.window", layer.window)
        for which, shape in linear_shapes(decoder, mlp).items():
            projection: Projection = getattr(layer, which)
            _check_matrix(f"{name}.{which}.weight", projection.weight, shape, embedding)
            _check_dtype(f"{name}.{which}.weight", projection.weight, embedding)
            if projection.bias is not None:
                _check_vector(f"{name}.{which}.bias", projection.bias, shape[0], embedding)


def linear_shapes(decoder: Decoder, mlp: int) -> dict[str, tuple[int, int]]:
    """Name of a linear → (out, in)."""
    H = decoder.embedding.shape[1]
    queries, keys = decoder.n_heads * decoder.head_dim, decoder.n_kv_heads * decoder.head_dim
    shapes = ((queries, H), (keys, H), (keys, H), (H, queries), (mlp, H), (mlp, H), (H, mlp))
    return dict(zip(LINEARS, shapes, strict=True))


def check_adapter(name: str, adapter: StepAdapter, decoder: Decoder) -> None:
    if len(adapter.pairs) != len(decoder.layers):
        raise ValueError(f"{name}.pairs: expected {len(decoder.layers)} layers, got {len(adapter.pairs)}")
    shapes = linear_shapes(decoder, decoder.layers[0].gate.weight.shape[0])
    for i, pairs in enumerate(adapter.pairs):
        for which, (A, B) in pairs.items():
            if which not in shapes:
                raise ValueError(f"{name}.pairs[{i}]: expected names among {LINEARS}, got {which!r}")
            out, width = shapes[which]
            rank = A.shape[0] if A.dim() else 0
            _check_matrix(f"{name}.pairs[{i}][{which!r}][0]", A, (max(1, rank), width), decoder.embedding)
            _check_matrix(f"{name}.pairs[{i}][{which!r}][1]", B, (out, rank), decoder.embedding)


def _check_matrix(name: str, x: Tensor, shape: tuple[int, int], like: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected the device of embedding, {like.device}, got {x.device}")
    if x.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{name}: expected inner stride 1, got strides {x.stride()}")


def _check_vector(name: str, x: Tensor, size: int, like: Tensor) -> None:
    _check_dtype(name, x, like)
    if x.shape != (size,) or not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous [{size}], got {tuple(x.shape)} with strides {x.stride()}")


def _check_dtype(name: str, x: Tensor, like: Tensor) -> None:
    if x.dtype != like.dtype:
        raise TypeError(f"{name}: expected the dtype of embedding, {like.dtype}, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected the device of embedding, {like.device}, got {x.device}")
