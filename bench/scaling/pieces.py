"""Sizes from the engine's own code, for docs/scaling.md.

Bytes are functions of shapes: they come from the planner, from safetensors files and from exchanges that really are
made, for a few layers or answers, and lie on a line beyond.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlhf_engine.distributed.process_group import World
from rlhf_engine.generators import serialize
from rlhf_engine.generators.policy_store import Snapshot
from rlhf_engine.generators.work import WorkItem, gather_rollout
from rlhf_engine.hydra import PackedBatch, Scores, SlotConfig
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.planning.phases import Setting, plain_model, shallow
from rlhf_engine.planning.predict import Planner
from rlhf_engine.planning.presets import PRESETS, find_config
from rlhf_engine.planning.tracing import Tracker
from rlhf_engine.rollout import PromptBatch, Rollout, RolloutStats, SamplingConfig
from rlhf_engine.scoring.gather import gather_scores

T = TypeVar("T")
OUT = Path(__file__).resolve().parents[1] / "results" / "cpu" / "scaling"
RECORD = "measured.json"
SLOT = SlotConfig(r=16)
"""On every linear of the blocks."""
_LAYERS = (2, 3)
"""Depths that are counted and encoded; every size is a line in the number of layers."""


def _line(values: tuple[int, int], n: int) -> int:
    """Value at `n` on the line through two depths."""
    return values[0] + (values[1] - values[0]) * (n - _LAYERS[0]) // (_LAYERS[1] - _LAYERS[0])


# ---- bytes of a model ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A preset of `rlhf-engine plan` with one adapter slot, r = 16 on every linear of the blocks."""

    name: str
    parameters: int
    block_parameters: int
    """Of all blocks together: what every token is multiplied by."""
    head_parameters: int
    """Of the LM head."""
    layers: int
    attention_width: int
    """Heads times their size."""
    context: int
    base_bytes: int
    """bf16."""
    slot_elements: int
    slot_tensors: int
    parcel_bytes: int
    """A policy on its way, fp32: a safetensors file."""
    kv_bytes: int
    """Of one position in all layers, bf16."""

    @property
    def slot_bytes(self) -> int:
        """fp32."""
        return 4 * self.slot_elements


@functools.cache
def shape(name: str) -> Shape:
    """The shape of a preset."""
    config = find_config(name)
    state = [_planned(name, layers) for layers in _LAYERS]
    slots = [slot_tensors(name, layers) for layers in _LAYERS]
    base = _line((state[0]["frozen_weights"], state[1]["frozen_weights"]), config.num_hidden_layers)
    if base != 2 * PRESETS[name].parameters:
        raise ValueError(f"{name}: expected {2 * PRESETS[name].parameters} bytes of base, the planner has {base}")
    adapters = _line((state[0]["adapters"], state[1]["adapters"]), config.num_hidden_layers)
    parcels = [len(serialize.pack_policy(_zeros(tensors)).data) for tensors in slots]
    heads = config.num_attention_heads
    return Shape(
        name=name,
        parameters=base // 2,
        block_parameters=(state[1]["frozen_weights"] - state[0]["frozen_weights"]) // 2 * config.num_hidden_layers,
        head_parameters=config.vocab_size * config.hidden_size,
        layers=config.num_hidden_layers,
        attention_width=heads * (getattr(config, "head_dim", None) or config.hidden_size // heads),
        context=config.max_position_embeddings,
        base_bytes=base,
        slot_elements=adapters // 4,
        slot_tensors=_line((len(slots[0]), len(slots[1])), config.num_hidden_layers),
        parcel_bytes=_line((parcels[0], parcels[1]), config.num_hidden_layers),
        kv_bytes=cache_bytes(name),
    )


def _planned(name: str, layers: int) -> dict[str, int]:
    setting = Setting(
        config=shallow(find_config(name), layers),
        dtype=torch.bfloat16,
        adapter_dtype=torch.float32,
        device_type="cuda",
        slot=SLOT,
        prompt_length=200,
        completion_length=300,
        batch=512,
        num_mini_batches=1,
        micro_batch=1,
        token_budget=16384,
        gradient_checkpointing=False,
    )
    return Planner("j_hydra_ppo", setting).state_bytes  # one slot


def cache_bytes(name: str) -> int:
    """Bytes of the keys and values of one token in all layers."""
    with FakeTensorMode(), Tracker():
        return Backbone(plain_model(find_config(name), torch.bfloat16, lm_head=True)).cache_bytes_per_position


def slot_tensors(name: str, layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a slot's parameters, by name."""
    with FakeTensorMode(), Tracker():
        backbone = Backbone(plain_model(shallow(find_config(name), layers), torch.bfloat16, lm_head=True))
        generator = torch.Generator().manual_seed(0)
        slot = backbone.add_slot("actor", SLOT, trainable=False, dtype=torch.float32, generator=generator)
        return {key: tuple(p.shape) for key, p in slot.named_parameters()}


def _zeros(tensors: Mapping[str, tuple[int, ...]]) -> Snapshot:
    return Snapshot(version=1, tensors={key: torch.zeros(size) for key, size in tensors.items()})


# ---- bytes of answers ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerAnswer:
    """Bytes are `answer + prompt · prompt tokens + completion · completion tokens`."""

    answer: float
    prompt: float
    completion: float

    def of(self, answers: int, prompt: int, completion: int) -> float:
        """Bytes of so many answers of these lengths."""
        return answers * (self.answer + self.prompt * prompt + self.completion * completion)


_ANSWERS, _BASE = 256, 1 << 20
"""Answers that are packed; the first sample id, of a run's middle."""
_LENGTHS = ((64, 64), (128, 64), (64, 128))


def _fit(size: Callable[[int, int, int], int]) -> PerAnswer:
    """Fit bytes by (answers, prompt tokens, completion tokens), without what there is once per message."""
    few, many = _ANSWERS // 2, _ANSWERS
    per_answer = [(size(many, p, c) - size(few, p, c)) / (many - few) for p, c in _LENGTHS]
    (p0, c0), (p1, _), (_, c1) = _LENGTHS
    prompt, completion = (per_answer[1] - per_answer[0]) / (p1 - p0), (per_answer[2] - per_answer[0]) / (c1 - c0)
    return PerAnswer(answer=per_answer[0] - prompt * p0 - completion * c0, prompt=prompt, completion=completion)


def made_up(answers: int, prompt: int, completion: int, *, vocabulary: int = 32000) -> Rollout:
    """Rollout of zeros, as a generator sends it that also computes the frozen lanes."""
    length, tokens = prompt + completion, answers * completion
    batch = PackedBatch(
        tokens_T=torch.randint(vocabulary, (answers * length,), generator=torch.Generator().manual_seed(0)),
        cu_seqlens=tuple(range(0, answers * length + 1, length)),
        prompt_lens=(prompt,) * answers,
        sample_ids=tuple(range(_BASE, _BASE + answers)),
    )
    return Rollout(
        batch=batch,
        logprobs_M=torch.zeros(tokens),
        versions_M=torch.zeros(tokens, dtype=torch.int64),
        finish_reasons=("eos",) * answers,
        filtered=False,
        stats=RolloutStats(tokens=tokens),
        frozen=Scores(
            past_logprobs_M=torch.zeros(tokens), ref_logprobs_M=torch.zeros(tokens), rewards_N=torch.zeros(answers)
        ),
    )


def answer_bytes() -> PerAnswer:
    """Bytes of answers from a generator to the learner; plain values as pickle has them."""
    return _fit(lambda *sizes: len(pickle.dumps(serialize.pack_rollout(made_up(*sizes)))))


def item_bytes() -> PerAnswer:
    """Bytes of work items from the learner to a generator: each answer's prompt."""

    def size(answers: int, prompt: int, completion: int) -> int:
        batch = made_up(answers, prompt, completion).batch
        ids = [batch.tokens_T[i * (prompt + completion) :][:prompt].tolist() for i in range(answers)]
        item = WorkItem(
            step=100,
            share=0,
            n_shares=1,
            version=100,
            prompts=PromptBatch.of(range(answers), ids, generations=1, first_id=_BASE),
            sampling=SamplingConfig(max_completion_length=completion, eos_token_ids=(2,)),
        )
        return len(pickle.dumps(serialize.pack_item(item)))

    return _fit(size)


@dataclasses.dataclass(frozen=True)
class Ledger(World):
    """A world of two ranks in one process that alike ones talk to; writes down what they say."""

    size: int = 2
    said: list[int] = dataclasses.field(default_factory=list)
    """Bytes of each exchange that this rank adds."""

    def gather(self, value: T) -> list[T]:
        self.said.append(len(pickle.dumps(value)))
        return [value] * self.size

    def gather_tensors(self, tensors: Mapping[str, torch.Tensor | None]) -> list[dict[str, torch.Tensor | None]]:
        self.said.append(sum(x.numel() * x.element_size() for x in tensors.values() if x is not None))
        return [dict(tensors)] * self.size


def gathered_bytes(*, critic: bool) -> PerAnswer:
    """Bytes of a step's answers that every rank of a data-parallel run gets; with a learned reward."""

    def size(answers: int, prompt: int, completion: int) -> int:
        ledger, tokens = Ledger(), torch.zeros(answers * completion)
        gather_rollout(ledger, made_up(answers, prompt, completion))
        scores = Scores(
            logprobs_M=tokens,
            entropies_M=tokens,
            ref_logprobs_M=tokens,
            values_M=tokens if critic else None,
            rewards_N=torch.zeros(answers),
        )
        gather_scores(ledger, scores)
        return sum(ledger.said)

    return _fit(size)
