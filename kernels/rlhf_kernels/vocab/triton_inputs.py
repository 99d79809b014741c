"""A head and the rows that meet it, checked and laid out for the Triton kernels that sweep the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.vocab.logits import HeadOptions, accumulation_dtype, temperature_column
from rlhf_kernels.vocab.runs import HeadRuns
from rlhf_kernels.vocab.triton_runs import RunInputs


class HeadInputs:
    """Hidden states (and a reference's) in the dtype of the products, the head as it is, its options in fp32.

    keep [N] bool: rows that count.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        options: HeadOptions,
        keep: Tensor,
        hidden_r: Tensor | None = None,
        runs: HeadRuns | None = None,
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
        self.runs = None if runs is None else RunInputs(runs)
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

    def lora(self, down: Tensor | None, block: int) -> tuple[Tensor | None, Tensor | None, Tensor | None, int, bool]:
        """down_ptr, lora_b_ptr, runs_ptr, rank and WIDE of the kernels that sweep with blocks of so many rows."""
        if down is None or down.shape[1] == 0:
            return None, None, None, 0, False
        if self.runs is None:
            return down, self.lora_B, None, down.shape[1], False
        return down, self.runs.B[0], self.runs.table(self.n_rows, block), down.shape[1], self.runs.wide
