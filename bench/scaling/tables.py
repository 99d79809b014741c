"""Tables of docs/scaling.md that need no division of GPUs: what is put in, bytes, links, measured stages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pieces
from model import (
    ENDS,
    H100,
    H200,
    HBM,
    HOP,
    LINK,
    MFU,
    NODE,
    NVLINK,
    RAY,
    ROOM,
    TENSOR_HOP,
    WIRE,
    Algorithm,
    At,
    Case,
    Range,
    Work,
    all_gather,
    all_reduce,
    best_split,
    forward,
    learned,
)
from pieces import Shape, shape

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "cpu"
_TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md"

SMALL, LARGE = Work(512, 200, 300), Work(8192, 512, 2048)
PPO, GRPO = Algorithm("PPO", True, 1, 4), Algorithm("GRPO", False, 4, 1)
SHAPES = ("llama-7b", "llama-8b", "llama-70b")


@cache
def record() -> dict[str, Any]:
    """Seconds of the host's work."""
    found: dict[str, Any] = json.loads((RESULTS / "scaling" / "measured.json").read_text(encoding="utf-8"))
    return found


# ---- numbers as text -------------------------------------------------------------------------------------------------


def digits(x: float, n: int = 2) -> str:
    """A number with so many digits that count, and no exponent."""
    if x == 0:
        return "0"
    places = n - 1 - math.floor(math.log10(abs(x)))
    return f"{round(x, places):,.{max(0, places)}f}"


def size(n_bytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{digits(n_bytes / scale, 3)} {unit}"
    return f"{n_bytes:.0f} B"


def seconds(*values: float) -> str:
    """One, or the range of several."""
    low, high = min(values), max(values)
    unit, scale = ("s", 1.0) if high >= 1 else ("ms", 1e-3) if high >= 1e-3 else ("µs", 1e-6)
    texts = list(dict.fromkeys(digits(x / scale) for x in (low, high)))
    return f"{'–'.join(texts)} {unit}"


def plain(found: Range) -> str:
    """A range without a unit."""
    return "–".join(dict.fromkeys(digits(x) for x in found))


def factor(found: Range) -> str:
    return "–".join(dict.fromkeys(f"{x:.2f}" for x in found))


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    rule = "|---" * len(head) + "|\n"
    return f"| {' | '.join(head)} |\n{rule}" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ---- what is put in --------------------------------------------------------------------------------------------------


def inputs() -> str:
    """Table of the inputs that are not measured, and of their sources."""
    sheets = "data sheets of [H100](https://www.nvidia.com/en-us/data-center/h100/) and "
    sheets += "[H200](https://www.nvidia.com/en-us/data-center/h200/)"
    cards = (
        f"{gpu.name}: {gpu.flops / 1e12:.0f} TFLOP/s, {gpu.memory / 1e9:.0f} GB, {gpu.hbm / 1e12:.2f} TB/s"
        for gpu in (H100, H200)
    )
    lines = [
        ("bf16 without sparsity, memory, its bandwidth", "; ".join(cards), sheets),
        (
            f"each way: NVLink of a GPU; InfiniBand NDR, one link for each of a node's {NODE} GPUs",
            f"{NVLINK / 1e9:.0f} GB/s; {LINK / 1e9:.0f} GB/s",
            "the same (900 GB/s both ways); 400 Gb/s",
        ),
        (
            "share of the FLOP/s in forward and backward passes",
            plain(MFU),
            f"**assumed**; full training of one model on long rows has reached [0.51 to 0.58]({_TORCHTITAN}) on A100",
        ),
        ("share of the memory's bandwidth in decoding", plain(HBM), "**assumed**"),
        (
            "share of a link",
            plain(WIRE),
            "**assumed**; NCCL's authors [expect](https://github.com/NVIDIA/nccl-tests/issues/290) 46 to 48 of 50 GB/s",
        ),
        (
            "Ray's store, out of or into one machine",
            f"{plain(Range(RAY.low / 1e9, RAY.high / 1e9))} GB/s",
            "**assumed**; [a report](https://github.com/ray-project/ray/issues/42632) has 0.2 to 0.3 into each of ten "
            "machines, 2 to 5.6 out of one",
        ),
        (
            "small values, from a rank to the next",
            f"{seconds(*HOP)}",
            "**assumed**; gloo, rings over the hosts' network",
        ),
        ("small all-reduce of tensor parallelism, start", f"{seconds(*TENSOR_HOP)}", "**assumed**"),
        ("share of a GPU's memory for weights and cache", f"{ROOM}", "**assumed**"),
    ]
    return markdown(("", "", "from"), lines)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def publication() -> str:
    """Bytes of a policy against those of all weights."""
    head = ("", "parameters", "base, bf16", "S", "policy, fp32", "as bf16", "full sync / policy", "cache per token")
    lines = []
    for name in SHAPES:
        s = shape(name)
        ratios = f"{s.base_bytes / s.parcel_bytes:.0f}; {2 * s.base_bytes / s.slot_bytes:.0f} as bf16"
        parameters, elements = f"{s.parameters / 1e9:.2f} billion", f"{s.slot_elements / 1e6:.1f} million"
        policy = (size(s.parcel_bytes), size(s.slot_bytes / 2), ratios, size(s.kv_bytes))
        lines.append((f"`{name}`", parameters, size(s.base_bytes), elements, *policy))
    return markdown(head, lines)


def answers() -> str:
    """Bytes of a step's answers."""
    head = ("per step", "bytes per answer + prompt token + answer token", str(SMALL), str(LARGE))
    kinds = {
        "prompts to generators": pieces.item_bytes(),
        "answers with log-probs and rewards of frozen lanes, to the learner": pieces.answer_bytes(),
        "gathered on every rank of a data-parallel run, PPO (GRPO: 4 less)": pieces.gathered_bytes(critic=True),
    }
    lines = []
    for what, per in kinds.items():
        parts = f"{per.answer:.0f} + {per.prompt:.0f} + {per.completion:.0f}"
        lines.append((what, parts, size(per.of(*SMALL)), size(per.of(*LARGE))))
    return markdown(head, lines)


def learners() -> str:
    """Table of what learners exchange: bytes, and seconds on 8 and 256 GPUs."""
    head = ("", "`llama-7b`", "8 GPUs", "256 GPUs", "`llama-70b`", "8 GPUs", "256 GPUs")
    kinds: dict[str, tuple[Callable[[Shape], float], Callable[[int, float, At], float]]] = {
        "all-reduce per optimizer step, PPO: two slots, fp32 (GRPO: half)": (lambda s: 2 * s.slot_bytes, all_reduce),
        "full fine-tuning: all gradients, bf16": (lambda s: s.base_bytes, all_reduce),
        "sharded base, two all-gathers per lane and micro-batch": (lambda s: 2 * s.base_bytes, all_gather),
    }
    lines = []
    for what, (count, exchange) in kinds.items():
        line = [what]
        for name in ("llama-7b", "llama-70b"):
            n_bytes = count(shape(name))
            line.append(size(n_bytes))
            line += [seconds(*(exchange(n, n_bytes, at) for at in ENDS)) for n in (8, 256)]
        lines.append(line)
    hidden = ["tokens of a micro-batch whose forward pass hides its all-gather"]
    for name in ("llama-7b", "llama-70b"):
        hidden += ["", *(_hiding(shape(name), n) for n in (8, 256))]
    return markdown(head, [*lines, hidden])


def _hiding(s: Shape, n: int) -> str:
    per_token = 2 * s.block_parameters
    return plain(Range.over(all_gather(n, s.base_bytes, at) * H100.flops * at.mfu / per_token for at in ENDS))


# ---- a policy's way --------------------------------------------------------------------------------------------------


def host_seconds(s: Shape, what: str) -> float:
    """Seconds of a policy's file (`pack`) or its check (`unpack`), by bytes from what was measured."""
    found = record()["publication"]
    return float(found["seconds"][what]) * s.parcel_bytes / found["bytes"]


def sending() -> str:
    """Seconds until 255 generators on 32 machines have a policy."""
    head = (
        "policy, 255 generators on 32 machines",
        "file + check on the host",
        "400 Gb/s: one generator after another",
        "one machine after another",
        "tree of machines",
        "Ray: one machine after another",
        "tree",
        "5 % of g",
    )
    rounds = math.ceil(math.log2(32))
    lines = []
    for name in ("llama-7b", "llama-70b"):
        s = shape(name)
        n = s.parcel_bytes
        case = Case(s, SMALL, PPO, H100)
        cells = [f"{digits(host_seconds(s, 'pack'))} + {digits(host_seconds(s, 'unpack'))} s"]
        cells += [seconds(*(times * n / (LINK * x) for x in WIRE)) for times in (255, 31, rounds)]
        cells += [seconds(*(times * n / x for x in RAY)) for times in (31, rounds)]
        lines.append((f"`{name}`, {size(n)}", *cells, seconds(0.05 * best_split(case, 256).g)))
    return markdown(head, lines)


# ---- measured stages -------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """Seconds of one step's stages, from a record."""

    name: str
    draw: float
    score: float
    update: float
    record: str
    flops: float
    """Update over score, by FLOPs; times the epochs."""


def stage_records() -> list[Stage]:
    """Stages of every record that has them."""
    shares = {"remax": 1 / 2, "online_dpo": 1 / 2, "best_of_n": 1 / 4}
    stages = record()["stages"]
    work = stages["work"]
    lengths = Work(1, work["prompt_tokens"], work["answer_tokens"])
    tiny = Lanes.of(_llama(work["hidden"], work["hidden"] * 8 // 3 // 64 * 64, work["layers"], work["vocab"]), lengths)
    found = []
    for name, row in stages["seconds"].items():
        ratio = tiny.ratio(
            critic=name in ("ppo", "reinforce"), drawn=0.5 if name == "remax" else 1, of=shares.get(name, 1)
        )
        found.append(Stage(name, row["generate"], row["score"], row["update"], "scaling", ratio))
    medians = _json("ppo_vs_remax/ppo_vs_remax.json")["medians"]
    middle = Lanes.of(_llama(512, 1344, 8, 32000), Work(1, 64, 64))
    for name, ratio in (("ppo", middle.ratio(critic=True)), ("remax", middle.ratio(drawn=0.5, of=0.5))):
        row = medians[name]["phases"]
        found.append(Stage(f"{name}, 41 M", row["generate"], row["score"], row["update"], "ppo_vs_remax", ratio))
    methods = _json("hydra_table/hydra_table.json")["methods"]
    small = Lanes.of(_llama(512, 1344, 8, 8192), Work(1, 64, 64))
    for name, ratio in (("hydra_ppo", small.ratio(critic=True)), ("j_hydra_ppo", small.ratio())):
        rows, row = methods[name]["rows"], methods[name]["equal_memory"]["seconds_per_sample"]
        times = [rows * row[x] for x in ("generation", "inference", "update")]
        found.append(Stage(f"{name}, four epochs", *times, "hydra_table", 4 * ratio))
    return found


def stages() -> str:
    """Seconds of a step's stages on two CPU cores, what overlapping them could win, and FLOPs beside the clock."""
    head = ("", "draw", "score", "update", "(draw + learn) / max", "update / score", "by FLOPs", "record")
    lines = []
    for s in stage_records():
        learn = s.score + s.update
        bound = (s.draw + learn) / max(s.draw, learn)
        link = f"[{s.record}](../bench/results/cpu/{s.record})"
        times = [f"{x:.2f}" for x in (s.draw, s.score, s.update)]
        lines.append((s.name, *times, f"{bound:.2f}", f"{s.update / s.score:.2f}", f"{s.flops:.2f}", link))
    return markdown(head, lines)


class Lanes(NamedTuple):
    """FLOPs of one answer: in the frozen lane, with log-probs and without; actor, critic; learning in those two."""

    off: float
    off_headless: float
    actor: float
    critic: float
    learn_actor: float
    learn_critic: float

    @classmethod
    def of(cls, s: Shape, w: Work) -> Lanes:
        return cls(
            forward(s, w, head=True),
            forward(s, w),
            forward(s, w, slot=True, head=True),
            forward(s, w, slot=True),
            learned(s, w, head=True, recompute=False),
            learned(s, w, head=False, recompute=False),
        )

    def ratio(self, *, critic: bool = False, drawn: float = 1, of: float = 1) -> float:
        """Update over score. drawn: share of the answers that are not greedy ones; of: share that is learned."""
        score = drawn * (self.off + self.actor + critic * self.critic) + (1 - drawn) * self.off_headless
        return of * (self.learn_actor + critic * self.learn_critic) / score


def _json(path: str) -> Any:
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def _llama(hidden: int, ff: int, layers: int, vocabulary: int) -> Shape:
    """Shape that FLOPs are counted of, for the models of the records."""
    return Shape(
        name="",
        parameters=0,
        block_parameters=layers * (4 * hidden**2 + 3 * hidden * ff),
        head_parameters=vocabulary * hidden,
        layers=layers,
        attention_width=hidden,
        context=0,
        base_bytes=0,
        slot_elements=layers * 16 * (8 * hidden + 3 * (hidden + ff)),
        slot_tensors=0,
        parcel_bytes=0,
        kv_bytes=0,
    )
