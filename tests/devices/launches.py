"""Launches of a training micro-batch on the stand-in device: what the host of a GPU would queue, for each layer.

A launch is one dispatched operation that is no view and no allocation, or one launch of Triton's interpreter.
Attention, for which a GPU has a library, counts as one forward and one backward. One layer is the difference between a
model of two layers and one of one.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from rlhf_kernels.attention import attention
from triton.runtime.interpreter import InterpretedFunction

from rlhf_engine.hydra import HydraModel, PackedBatch, SlotConfig, gate, hydra_roles, varlen
from rlhf_engine.hydra.attention import plan_packed
from tests.devices import stand_in

_ALLOCATE = ("empty", "new_empty", "_unsafe_view", "detach", "lift_fresh", "alias")
_into: list[Counter[str]] = []
"""What counts now; one at most."""


class Launches(NamedTuple):
    """Launches of one micro-batch, by name."""

    forward: Counter[str]
    backward: Counter[str]
    reads: int
    """Copies from the device to the host."""


def _note(name: str) -> None:
    if _into:
        _into[0][name] += 1


@contextlib.contextmanager
def _counting(counter: Counter[str] | None) -> Iterator[None]:
    """A block whose launches are added to a counter, or to none."""
    before, _into[:] = [*_into], [] if counter is None else [counter]
    try:
        yield
    finally:
        _into[:] = before


class _Attention(torch.autograd.Function):
    """Attention as one launch forward and one backward."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., torch.Tensor], *qkv: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(*qkv)
        _note("attention")
        with _counting(None):
            return call(*qkv)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        _note("attention backward")
        with _counting(None), torch.enable_grad():
            qkv = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return None, *torch.autograd.grad(ctx.call(*qkv), qkv, dout)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: varlen.Sequences, rule: varlen.ScoreRule
) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5 if rule.scaling is None else rule.scaling

    def call(*qkv: torch.Tensor) -> torch.Tensor:
        return attention(*qkv, sequences.lengths, scale=scale, backend="reference")

    return _Attention.apply(call, query, key, value)  # type: ignore[no-any-return,no-untyped-call]


@contextlib.contextmanager
def counted_device() -> Iterator[torch.device]:
    """A block in which the stand-in is there and notes what is launched on it. Needs Triton's interpreter."""
    path = varlen.Path(name="stand-in", unsupported=lambda layer: None, load=lambda: _attend)
    dispatched = stand_in._run

    def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = function._schema.name.partition("::")[2]
        if function.namespace != "rlhf_kernels" and not function.is_view and not name.startswith(_ALLOCATE):
            _note(name)
        return dispatched(function, args, kwargs)

    with stand_in.installed() as device, pytest.MonkeyPatch.context() as patch:
        launch = InterpretedFunction.run

        def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            _note(kernel.fn.__name__)
            return launch(kernel, *args, **kwargs)

        patch.setattr(stand_in, "_run", run)
        patch.setattr(InterpretedFunction, "run", launched)
        patch.setattr(varlen, "PATHS", (path, *varlen.PATHS))
        varlen._chosen.cache_clear()
        yield device
    varlen._chosen.cache_clear()


def micro_batch(n_layers: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Launches:
    """Launches of a Llama's decoder with LoRA on every linear: the second micro-batch, when all tables are there."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(
        **sizes, num_hidden_layers=n_layers, vocab_size=96, max_position_embeddings=64, pad_token_id=0
    )
    with _counting(None):
        plain = hf.LlamaForCausalLM(config).to(dtype)
        slots = {"actor": SlotConfig(r=8), "critic": SlotConfig(r=8)}
        model = HydraModel.from_pretrained(plain, roles=hydra_roles(), slots=slots, dtype=dtype, device=device).train()
        batch = PackedBatch.from_lists([[5, 6, 7], [8, 9]], [[10, 11, 12], [13, 14, 15, 16]]).to(model.device)
        positions, table = batch.positions_T, gate.SlotTable.uniform("actor", sum(batch.lengths))
    for _ in range(2):
        counters = (Counter[str](), Counter[str]())
        with stand_in.counted() as traffic:
            with _counting(counters[0]):
                plan = plan_packed(batch.lengths, model.device)
                hidden = model.backbone().run(batch.tokens_T, positions, table, plan)
            with _counting(counters[1]):
                hidden.backward(hidden.detach())
    return Launches(*counters, traffic.reads.total())


def of_a_layer(device: torch.device) -> Launches:
    """Launches that a second layer adds, and the reads of the micro-batch."""
    one, two = (micro_batch(n, device) for n in (1, 2))
    return Launches(two.forward - one.forward, two.backward - one.backward, two.reads)
