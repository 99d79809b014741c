"""A head and the rows that meet it, checked and laid out for the Triton kernels that sweep the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.vocab.logits import HeadOptions, accumulation_dtype, temperature_column


class HeadInputs:
    """Hidden states (and a reference's) in the dtype of the products, the head as it is, its options in fp32.

    keep [N] bool: rows that count.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, options: HeadOptions, keep: Tensor, hidden_r: Tensor | None = None
    ) -> None:
        o = options
        if accumulation_dtype(hidden, weight, *([] if hidden_r is None else [hidden_r])) == torch.float64:
            raise TypeError("weight: the Triton backend computes in float32, expected no float64; use 'reference'")
        self.n_rows, self.hidden_size = hidden.shape
        self.n_vocab = weight.shape[0]
        if self.n_vocab > 2**24:
            raise ValueError(f"weight: the Triton backend expects at most 2^24 rows, got {self.n_vocab}")
        self.options = options
        self.keep = keep
        column = temperature_column(o.row_temperature, keep, torch.float32)
        self.temperature = None if column is None else column.view(-1)
        self.dtype = torch.promote_types(hidden.dtype, weight.dtype)
        if hidden_r is not None:
            self.dtype = torch.promote_types(self.dtype, hidden_r.dtype)
        self.hidden = hidden.to(self.dtype).contiguous()
        self.hidden_r = None if hidden_r is None else hidden_r.to(self.dtype).contiguous()
        self.weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self.bias = None if o.bias is None else o.bias.contiguous()
        self.lora_A = None if o.lora_A is None else o.lora_A.float()
        self.lora_B = None if o.lora_B is None else o.lora_B.float().contiguous()

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory on the device of the rows."""
        return torch.empty(shape, dtype=dtype, device=self.hidden.device)

    def transform(self) -> dict[str, float | bool]:
        """The numbers of the transform, as every kernel takes them."""
        o = self.options
        return {
            "temperature": o.temperature,
            "logit_scale": o.logit_scale,
            "softcap": o.softcap,
            "SOFTCAP": bool(o.softcap),
        }
