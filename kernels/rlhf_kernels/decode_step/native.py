"""`decode_step` in C++ (csrc/cpu/decode_step.cpp): addresses, bound once and again whenever a tensor has moved.

A call costs Python one look at every tensor's address and version. Memory beyond weights and caches stays with the
step for the next call: panels of the residual stream, of q, k and v and of the MLP's width, and per thread a copy of
what enters a product.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_kernels.decode_step.model import (
    LINEARS,
    Decoder,
    DecoderLayer,
    Projection,
    StepAdapter,
    check_adapter,
    check_caches,
    check_decoder,
    tensors_of,
)
from rlhf_kernels.runtime import native

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_VERSION = operator.attrgetter("_version")
_ABSENT = ((0, 0, 0), (0, 0, 0), 0)


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why the native code cannot serve such tensors, or None."""
    reason = native.unsupported(device_type, torch.float32)
    if reason is not None:
        return reason
    if dtype not in _TYPES:
        return f"it computes in {' or '.join(map(str, _TYPES))}, not in {dtype}"
    return None


class Step:
    """A decoder and its slots in native code."""

    def __init__(self, decoder: Decoder, adapters: Sequence[StepAdapter]) -> None:
        for s, adapter in enumerate(adapters):
            for i, pairs in enumerate(adapter.pairs):
                for name, pair in pairs.items():
                    for x in pair:
                        if x.dtype not in _TYPES:
                            raise TypeError(
                                f"adapters[{s}].pairs[{i}][{name!r}]: expected {' or '.join(map(str, _TYPES))}, "
                                f"got {x.dtype}"
                            )
        self._decoder, self._adapters = decoder, adapters
        self._dtype = decoder.embedding.dtype
        self._tensors = tensors_of(decoder, adapters)
        self._places: list[Any] = []
        self._caches: list[weakref.ref[Tensor]] = []
        self._cache_places: list[Any] = []
        self._turn = threading.Lock()
        """Of binding and running together: a step runs on what was bound last."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        table: Tensor,
    ) -> Tensor:
        """See `DecodeStep.__call__`."""
        tokens, positions, table = tokens.contiguous(), positions.contiguous(), table.contiguous()
        slots = slots.to(torch.int64).contiguous()
        n, angles = tokens.numel(), (cos.shape[0], self._decoder.head_dim)
        rows = [
            native.dense(name, x, torch.int64, shape)
            for name, x, shape in (
                ("tokens", tokens, (n,)),
                ("positions", positions, (n,)),
                ("slots", slots, (n,)),
                ("table", table, (n, table.shape[-1])),
            )
        ]
        cos_address = native.dense("cos", cos, self._dtype, angles)
        sin_address = native.dense("sin", sin, self._dtype, angles)
        with self._turn:
            self._bind_what_moved(keys, values)
            hidden = torch.empty((n, self._decoder.embedding.shape[1]), dtype=self._dtype)
            self._run(
                n,
                *rows,
                table.shape[1],
                cos_address,
                sin_address,
                angles[0],
                hidden.data_ptr(),
                native.threads(),
            )
        return hidden

    def _bind_what_moved(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        places = _places(self._tensors)
        if places != self._places:
            self._bind(places)
        caches = [*keys, *values]
        places = _places(caches)
        if (
            places != self._cache_places
            or len(keys) != len(values)
            or not all(known() is t for known, t in zip(self._caches, caches, strict=True))
        ):
            self._bind_caches(keys, values, places)

    def _bind(self, places: list[Any]) -> None:
        d = self._decoder
        check_decoder(d)
        for s, adapter in enumerate(self._adapters):
            check_adapter(f"adapters[{s}]", adapter, d)
        self._run = native.extension().DecodeStep(
            _TYPES[self._dtype],
            (*d.embedding.shape, d.n_heads, d.n_kv_heads, d.head_dim),
            native.address("embedding", d.embedding, self._dtype),
            d.embedding.stride(0),
            d.final_norm.data_ptr(),
            d.eps,
            d.scale,
            [_layer(layer) for layer in d.layers],
            [
                (a.scale, [_pair(pairs[name]) if name in pairs else _ABSENT for pairs in a.pairs for name in LINEARS])
                for a in self._adapters
            ],
        )
        self._places, self._cache_places = places, []

    def _bind_caches(self, keys: Sequence[Tensor], values: Sequence[Tensor], places: list[Any]) -> None:
        check_caches(keys, values, self._decoder)
        blocks, block = keys[0].shape[:2]
        self._run.bind(blocks, block, *([(t.data_ptr(), *t.stride()[:3]) for t in caches] for caches in (keys, values)))
        self._caches = [weakref.ref(t) for t in (*keys, *values)]
        self._cache_places = places


def _places(tensors: Sequence[Tensor]) -> list[Any]:
    """Address and version of each tensor. An in-place `resize_` raises the version, which inference mode leaves out."""
    addresses = [*map(Tensor.data_ptr, tensors)]
    try:
        return [*addresses, *map(_VERSION, tensors)]  # loops in C: this runs at every step, for every weight
    except RuntimeError:  # of a tensor that was made in inference mode
        return [*addresses, *(t.shape if t.is_inference() else t._version for t in tensors)]


def _layer(layer: DecoderLayer) -> tuple[Any, ...]:
    norms = (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
    linears = [_linear(getattr(layer, name)) for name in LINEARS]
    return (*(0 if t is None else t.data_ptr() for t in norms), linears, layer.window or 0)


def _linear(projection: Projection) -> tuple[int, int, int, int, int]:
    weight, bias = projection.weight, projection.bias
    return weight.data_ptr(), weight.stride(0), 0 if bias is None else bias.data_ptr(), *weight.shape


def _pair(pair: tuple[Tensor, Tensor]) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
    A, B = pair
    return _matrix(A), _matrix(B), A.shape[0]


def _matrix(x: Tensor) -> tuple[int, int, int]:
    return x.data_ptr(), x.stride(0), _TYPES[x.dtype]
