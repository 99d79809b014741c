"""Kernels of rlhf-engine: importable alone, they know nothing of models, adapters or trainers.

Every op takes `backend="auto" | "cuda" | "triton" | "cpu" | "reference"`; see `rlhf_kernels.runtime.registry`.
"""

from rlhf_kernels.attention import attention
from rlhf_kernels.decode_attention import decode_attention
from rlhf_kernels.decode_step import Decoder, DecoderLayer, DecodeStep, Projection, StepAdapter
from rlhf_kernels.gae import gae, masked_moments, whiten
from rlhf_kernels.gather_logprob import gather_logprob
from rlhf_kernels.linear import linear
from rlhf_kernels.linear_logprob import HeadLora, HeadLoras, LogprobOutputs, linear_logprob
from rlhf_kernels.linear_logprob_pair import PairOutputs, linear_logprob_pair
from rlhf_kernels.linear_ppo_loss import LinearPpoLossOutputs, linear_ppo_loss
from rlhf_kernels.llama_ops import activation, rms_norm, rotary, swiglu
from rlhf_kernels.lora import DecodeLinear, Dropout, Segments, lora_delta_, lora_linear
from rlhf_kernels.lora.group import lora_linears
from rlhf_kernels.ppo_loss import PpoLossOutputs, ValueLossOutputs, ppo_loss, value_loss
from rlhf_kernels.runtime.registry import BackendUnavailableError, set_default_backend, use_backend
from rlhf_kernels.sample import SampleOutputs, sample

__all__ = [
    "BackendUnavailableError",
    "DecodeLinear",
    "DecodeStep",
    "Decoder",
    "DecoderLayer",
    "Dropout",
    "HeadLora",
    "HeadLoras",
    "LinearPpoLossOutputs",
    "LogprobOutputs",
    "PairOutputs",
    "PpoLossOutputs",
    "Projection",
    "SampleOutputs",
    "Segments",
    "StepAdapter",
    "ValueLossOutputs",
    "activation",
    "attention",
    "decode_attention",
    "gae",
    "gather_logprob",
    "linear",
    "linear_logprob",
    "linear_logprob_pair",
    "linear_ppo_loss",
    "lora_delta_",
    "lora_linear",
    "lora_linears",
    "masked_moments",
    "ppo_loss",
    "rms_norm",
    "rotary",
    "sample",
    "set_default_backend",
    "swiglu",
    "use_backend",
    "value_loss",
    "whiten",
]
