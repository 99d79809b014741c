"""One decoding step of a decoder of the Llama kind: one new token per row, through all layers, in one call.

For row n with token t at position p and slot s, layers l = 1 … L (Touvron et al. 2023; Qwen2's biases, Qwen3's norms of
q and k, Mistral's window are options):

    x = embedding[t]
    x ← x + o(attention(q, K, V))   q, k = rotary(norm(q(u))), rotary(norm(k(u))), v = v(u), u = norm(x)
    x ← x + down(silu(gate(u)) · up(u))   u = norm(x)
    hidden = norm(x)

with every linear y = x Wᵀ + b, and for an adapted one of a row that has a slot y + scale_s (x A_sᵀ) B_sᵀ. The row's k
and v become entry p % block of block `table[n, p // block]` of the layer's cache. q attends to positions [max(0, p + 1
− window), p] of the row. Rotary angles are row p of cos and sin, whose halves turn the halves of a head.

Symbols: N rows, H hidden, V words, D features of a head, Hkv cache heads; table [N, max_blocks] int64; caches
[blocks, block, Hkv, D] of any strides, the last one 1. What stands in caches and table where no row looks may be
anything, NaN and wild indices included. Rows of one call may have the same table at different positions, such as a
whole prompt: each sees those before it. Adapters of other
slots never touch a row, infinite ones included.

dtypes: weights, norms, biases, angles, caches and hidden have one, float32 or bfloat16 (cpu), float16 too (triton),
any floating one (reference); A and B may differ from it. Sums are fp32 (fp64 for fp64) and rounded where transformers'
modules round: norms, linears (with bias, then with the adapter's part), rotary products, silu and the gated product,
attention, residual sums. Deterministic: on the cpu backend the bits of a row do not depend on the other rows, their
number, order or slots. Nor do they depend on where its blocks lie or on the number of threads. Inference only.

Backends: cpu; triton, asked for by name, never in exact mode, which a CUDA graph can capture; reference.

Weights and adapters are read where they lie at every call, so what an optimizer writes into them is seen. Calls of one
`DecodeStep` from several threads take turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_kernels.decode_step import native, reference
from rlhf_kernels.decode_step.model import (
    LINEARS,
    Decoder,
    DecoderLayer,
    Projection,
    StepAdapter,
    check_adapter,
    check_decoder,
    join,
    mlp_shape,
    tensors_of,
)
from rlhf_kernels.runtime import registry, triton_support

__all__ = ["LINEARS", "DecodeStep", "Decoder", "DecoderLayer", "Projection", "StepAdapter", "join"]

registry.register("decode_step", "reference", reference)
registry.register("decode_step", "cpu", native)


def _triton_unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    if registry.is_exact():
        return "exact mode: its products are torch's, whose bits are not those of a training forward"
    return triton_support.unsupported(device_type, dtype)


registry.register(
    "decode_step", "triton", registry.Lazy("rlhf_kernels.decode_step.triton", _triton_unsupported), by_name=True
)


class DecodeStep:
    """Decoder with its adapter slots, which takes decoding steps by the equations of the module's docstring.

    Tensors are held, not copied. Their shapes and dtypes are checked here once.

    Args:
        decoder: weights of the model.
        adapters: slots; `adapters[s]` is slot s.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Raises:
        TypeError: a dtype does not fit that of the embedding, or an adapter's does not fit the backend.
        ValueError: a shape, stride, device or number does not fit, or backend is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """

    def __init__(self, decoder: Decoder, adapters: Sequence[StepAdapter] = (), *, backend: str = "auto") -> None:
        check_decoder(decoder)
        for s, adapter in enumerate(adapters):
            check_adapter(f"adapters[{s}]", adapter, decoder)
        self.backend = registry.resolve("decode_step", backend, decoder.embedding, mlp_shape(decoder))
        self._decoder = decoder
        self._like = decoder.embedding
        self._weights = tensors_of(decoder, adapters)
        self._step = registry.implementation("decode_step", self.backend).Step(decoder, list(adapters))

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
        """Take one step: hidden states of one new token per row, whose keys and values enter the caches.

        Inference only. All tensors are on the device of the embedding.

        Args:
            tokens: [N] int64 in [0, V).
            positions: [N] int64, position of each token, below the rows of cos and the capacity of the row's table.
            slots: [N] int32 or int64, index into `adapters`; −1: no adapter.
            cos: [P, D], contiguous, of the embedding's dtype; a row of cosines per position.
            sin: sines in the shape of cos.
            keys: per layer [blocks, block, Hkv, D], of the embedding's dtype and inner stride 1; written in place.
            values: per layer a cache of the shape of the keys; written in place.
            table: [N, max_blocks] int64; entry j is the block of the row's positions from j · block on.

        Returns:
            Hidden states [N, H] after the final norm, of the embedding's dtype.

        Raises:
            TypeError: a dtype or device is not the one above.
            ValueError: a shape, stride or number of caches does not fit.
            ValueError: a tensor requires grad while gradients are enabled.
            ValueError: a token, position, slot or block index is out of range; the CPU alone checks it.
        """
        n, dtype, device = tokens.numel(), self._like.dtype, self._like.device
        for name, index, dim in (("tokens", tokens, 1), ("positions", positions, 1), ("table", table, 2)):
            if index.dtype != torch.int64 or index.device != device:
                raise TypeError(f"{name}: expected torch.int64 on {device}, got {index.dtype} on {index.device}")
            if index.dim() != dim or index.shape[0] != n:
                raise ValueError(f"{name}: expected {dim} dims with {n} rows, got shape {tuple(index.shape)}")
        if slots.dtype not in (torch.int64, torch.int32) or slots.device != device:
            raise TypeError(f"slots: expected int32 or int64 on {device}, got {slots.dtype} on {slots.device}")
        if slots.shape != tokens.shape:
            raise ValueError(f"slots: expected shape ({n},), got {tuple(slots.shape)}")
        for name, angles in (("cos", cos), ("sin", sin)):
            if angles.dtype != dtype or angles.device != device:
                raise TypeError(f"{name}: expected {dtype} on {device}, got {angles.dtype} on {angles.device}")
            if angles.dim() != 2 or angles.shape[1] != self._decoder.head_dim or not angles.is_contiguous():
                raise ValueError(
                    f"{name}: expected contiguous [positions, {self._decoder.head_dim}], "
                    f"got {tuple(angles.shape)} with strides {angles.stride()}"
                )
        if sin.shape != cos.shape:
            raise ValueError(f"sin: expected the shape of cos, {tuple(cos.shape)}, got {tuple(sin.shape)}")
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*self._weights, cos, sin, *keys, *values)):
            raise ValueError(
                "requires_grad: expected tensors without it, or torch.no_grad(); this op is inference only"
            )
        hidden: Tensor = self._step(tokens, positions, slots, cos, sin, keys, values, table)
        return hidden
