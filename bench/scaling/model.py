"""Seconds of a step on GPUs that nobody here has: data sheets, assumed fractions of them, and the engine's work.

P parameters of the blocks, V d of the LM head, S elements of a slot, L layers, D heads times their size, len tokens:

    forward    2 P len + 2 L D len², 2 V d per completion token where log-probs are asked, 2 S len with a slot
    backward   2 P len + 5 L D len², 2 V d per completion token, 4 S len: no gradients of frozen weights
    decoding   a token of all rows takes max(bytes / HBM, FLOPs / compute),
               bytes = 2 (P + V d) + 4 S + rows · KV · (prompt + completion / 2)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

from pieces import Shape

# ---- data sheets -----------------------------------------------------------------------------------------------------


class Gpu(NamedTuple):
    """A GPU as NVIDIA's data sheet has it."""

    name: str
    flops: float
    """bf16, dense: half of what the sheet gives with sparsity."""
    memory: float
    hbm: float
    """Bytes per second."""


H100 = Gpu("H100 SXM", 989.4e12, 80e9, 3.35e12)
H200 = Gpu("H200 SXM", 989.4e12, 141e9, 4.8e12)
NODE = 8
NVLINK = 450e9
"""Bytes per second out of a GPU, and as many in; the sheet adds both to 900 GB/s."""
LINK = 50e9
"""InfiniBand NDR, 400 Gb/s for each GPU: bytes per second each way."""

# ---- assumed ---------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    low: float
    high: float

    @property
    def middle(self) -> float:
        """Geometric."""
        return math.sqrt(self.low * self.high)

    @classmethod
    def over(cls, values: Iterable[float]) -> Range:
        found = list(values)
        return cls(min(found), max(found))


MFU = Range(0.25, 0.50)
"""Of a GPU's FLOP/s, in forward and backward passes."""
HBM = Range(0.40, 0.75)
"""Of its memory's bandwidth, in decoding."""
WIRE = Range(0.60, 0.95)
"""Of NVLink and InfiniBand."""
RAY = Range(0.5e9, 5e9)
"""Bytes per second that Ray's object store moves out of, or into, one machine."""
HOP = Range(30e-6, 300e-6)
"""Seconds from one rank to the next in a ring over the hosts' network, for small values."""
TENSOR_HOP = Range(10e-6, 30e-6)
"""Seconds until a small all-reduce inside of a node begins to move: two per layer and token in tensor parallelism."""
ROOM = 0.9
"""Of a GPU's memory, for weights, keys and values."""


class At(NamedTuple):
    """A point of what is assumed."""

    mfu: float
    hbm: float
    wire: float
    tensor_hop: float


MIDDLE = At(MFU.middle, HBM.middle, WIRE.middle, TENSOR_HOP.middle)
ENDS = [
    At(mfu, hbm, wire, hop)
    for mfu, hbm, (wire, hop) in itertools.product(MFU, HBM, [(WIRE.low, TENSOR_HOP.high), (WIRE.high, TENSOR_HOP.low)])
]

# ---- what is to be done ----------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """The answers of a step, all as long as allowed."""

    answers: int
    prompt: int
    completion: int

    @property
    def length(self) -> int:
        return self.prompt + self.completion

    @property
    def tokens(self) -> int:
        return self.answers * self.length

    def __str__(self) -> str:
        return f"{self.answers:,} × ({self.prompt} + {self.completion:,})"


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One epoch over a step's answers."""

    name: str
    critic: bool
    generations: int
    """Answers per prompt, which goes through the model once."""
    mini_batches: int

    @property
    def lanes(self) -> int:
        """Number of lanes that are learned."""
        return 1 + self.critic


@dataclasses.dataclass(frozen=True)
class Case:
    shape: Shape
    work: Work
    algorithm: Algorithm
    gpu: Gpu

    @property
    def group(self) -> int:
        """GPUs that hold the base together where answers are drawn: one where it fits with a third to spare."""
        size = 1
        while size * ROOM * self.gpu.memory < 1.5 * self.shape.base_bytes:
            size *= 2
        return size

    @property
    def sharded(self) -> bool:
        """Whether a learner's GPU holds a part of the base only; it then recomputes activations, too."""
        return self.group > 1


def attention(s: Shape, length: int) -> float:
    """FLOPs of one answer's causal forward pass."""
    return 2 * s.layers * s.attention_width * length**2


def forward(s: Shape, w: Work, *, slot: bool = False, head: bool = False) -> float:
    """FLOPs of one answer in a lane."""
    found = 2 * s.block_parameters * w.length + attention(s, w.length)
    return found + slot * 2 * s.slot_elements * w.length + head * 2 * s.head_parameters * w.completion


def learned(s: Shape, w: Work, *, head: bool, recompute: bool) -> float:
    """FLOPs of one answer, forward and backward in a lane. recompute: the blocks' forward pass once more."""
    backward = 2 * s.block_parameters * w.length + 2.5 * attention(s, w.length) + 4 * s.slot_elements * w.length
    backward += head * 2 * s.head_parameters * w.completion
    return forward(s, w, slot=True, head=head) + recompute * forward(s, w, slot=True) + backward


def frozen_flops(c: Case, *, past: bool) -> float:
    """FLOPs of one answer in the lanes that no update changes. past: the policy that drew it is one of them."""
    return past * forward(c.shape, c.work, slot=True, head=True) + forward(c.shape, c.work, head=True)


def present_flops(c: Case) -> float:
    """FLOPs of one answer in the lanes that learn, before they do."""
    return forward(c.shape, c.work, slot=True, head=True) + c.algorithm.critic * forward(c.shape, c.work, slot=True)


def update_flops(c: Case) -> float:
    """FLOPs of one answer in the update."""
    found = learned(c.shape, c.work, head=True, recompute=c.sharded)
    return found + c.algorithm.critic * learned(c.shape, c.work, head=False, recompute=c.sharded)


# ---- how long it takes -----------------------------------------------------------------------------------------------


def all_reduce(n: int, n_bytes: float, at: At) -> float:
    """A ring's, of n GPUs: each sends 2 (n − 1) / n of the bytes, across nodes through all links of a node at once."""
    return 2 * (n - 1) / n * n_bytes / (_collective(n) * at.wire)


def all_gather(n: int, n_bytes: float, at: At) -> float:
    """Seconds to gather n_bytes in all, of which every GPU lacks (n − 1) / n."""
    return (n - 1) / n * n_bytes / (_collective(n) * at.wire)


def _collective(n: int) -> float:
    return NVLINK if n <= NODE else min(NVLINK, NODE * LINK)


def rows(c: Case, *, beside: float = 0.0) -> int:
    """Answers that a group of GPUs can decode at a time. beside: bytes that its GPUs hold for other work."""
    s = c.shape
    room = c.group * ROOM * c.gpu.memory - s.base_bytes - 2 * s.slot_bytes - beside
    return int(room // (s.kv_bytes * 32 * math.ceil(c.work.length / 32)))


class Drawn(NamedTuple):
    """Time of drawing a step's answers."""

    seconds: float
    computing: float
    """Seconds that its FLOPs alone would take."""


def share(c: Case, gpus: int) -> int:
    """Most answers that a group draws: those to a prompt stay together."""
    prompts = c.work.answers // c.algorithm.generations
    return math.ceil(prompts / (gpus // c.group)) * c.algorithm.generations


def draw(c: Case, gpus: int, at: At, *, beside: float = 0.0) -> Drawn:
    """Seconds of drawing on groups with a share of the prompts each."""
    s, w, k = c.shape, c.work, c.group
    flops_per_second = k * c.gpu.flops * at.mfu
    answers = share(c, gpus)
    prompts = answers // c.algorithm.generations
    waves = math.ceil(answers / rows(c, beside=beside))
    at_once = answers / waves
    context = w.prompt + w.completion / 2
    n_bytes = 2 * (s.block_parameters + s.head_parameters) + s.slot_bytes + at_once * s.kv_bytes * context
    flops = 2 * (s.block_parameters + s.slot_elements + s.head_parameters) + 4 * s.layers * s.attention_width * context
    computing = at_once * flops / flops_per_second
    token = max(n_bytes / (k * c.gpu.hbm * at.hbm), computing)
    if k > 1:
        token += 2 * s.layers * (at.tensor_hop + all_reduce(k, at_once * s.attention_width * 2, at))
    prefill = prompts * forward(s, Work(1, w.prompt, 0), slot=True) / flops_per_second
    tokens = waves * w.completion
    return Drawn(tokens * token + prefill, tokens * computing + prefill)


def score_own(c: Case, gpus: int, flops: float, at: At) -> float:
    """Seconds of so many FLOPs for every answer, by those who drew it."""
    return share(c, gpus) * flops / (c.group * c.gpu.flops * at.mfu)


def score(c: Case, gpus: int, flops: float, at: At) -> float:
    """The same by others, with a share of the answers each."""
    return math.ceil(c.work.answers / gpus) * flops / (c.gpu.flops * at.mfu)


def update(c: Case, gpus: int, at: At) -> float:
    """Seconds of the optimizer steps, gradients of adapters summed in fp32 after each."""
    batches = c.algorithm.mini_batches
    share = math.ceil(c.work.answers / batches / gpus)
    each = share * update_flops(c) / (c.gpu.flops * at.mfu)
    return batches * (each + all_reduce(gpus, c.algorithm.lanes * c.shape.slot_bytes, at))


class InTurn(NamedTuple):
    """Every GPU draws, then learns."""

    drawn: Drawn
    learn: float

    @property
    def draw(self) -> float:
        return self.drawn.seconds

    @property
    def step(self) -> float:
        return self.draw + self.learn


def in_turn(c: Case, gpus: int, at: At) -> InTurn | None:
    """None where there are more GPUs than prompts, which is refused."""
    if gpus // c.group > c.work.answers // c.algorithm.generations:
        return None
    beside = c.group * c.shape.base_bytes / NODE if c.sharded else 0.0
    learn = score_own(c, gpus, frozen_flops(c, past=False) + present_flops(c), at) + update(c, gpus, at)
    return InTurn(draw(c, gpus, at, beside=beside), learn)


def beside_step(c: Case, gpus: int, at: At) -> float:
    """Least seconds of a step in which every GPU draws beside its updates.

    Decoding waits for memory while the rest computes, but no two FLOPs share a time; the lane of the policy that drew
    the answers is one more.
    """
    turns = in_turn(c, gpus, at)
    if turns is None:
        return math.nan
    past = score_own(c, gpus, forward(c.shape, c.work, slot=True, head=True), at)
    return max(turns.draw, turns.learn + past + turns.drawn.computing)


class Split(NamedTuple):
    """Some GPUs draw and ask frozen lanes, the others learn from the answers before."""

    generators: int
    learners: int
    g: float
    t: float

    @property
    def step(self) -> float:
        return max(self.g, self.t)

    @property
    def idle(self) -> tuple[float, float]:
        """Shares of generators' and learners' time."""
        return 1 - self.g / self.step, 1 - self.t / self.step


def split(c: Case, generators: int, learners: int, at: At) -> Split:
    g = draw(c, generators, at).seconds + score_own(c, generators, frozen_flops(c, past=True), at)
    t = score(c, learners, present_flops(c), at) + update(c, learners, at)
    return Split(generators, learners, g, t)


def best_split(c: Case, gpus: int, at: At = MIDDLE) -> Split:
    """The shortest step, then the fewest generators."""
    found = [split(c, n, gpus - n, at) for n in range(c.group, gpus - c.group + 1, c.group)]
    return min(found, key=lambda s: (s.step, s.generators))


def period(s: Split, *, publish: float, collect: float, write: float = 0.0, lag: int = 1) -> float:
    """Seconds between two steps of divided GPUs, every policy drawing one batch.

    A generator takes its next order when its answers have arrived; batch i + lag + 1 needs the policy after step i. So
    lag + 1 steps cover a policy's way out, its answers and their way back, and the step that learns from them.

    publish: from the learner's step to generators that can draw; collect: their answers back; write: the learner's own
    part of publishing.
    """
    around = s.g + s.t + publish + collect
    return max(s.g + collect, s.t + write, around / (lag + 1))
