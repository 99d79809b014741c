#!/usr/bin/env python
"""The tables of docs/scaling.md: what 8 and 256 GPUs would send, wait for and leave idle, on paper.

    python bench/scaling/page.py [--check]      # --check writes nothing and exits with 1 if the page differs

Bytes come from the engine's own code (`pieces.py`), seconds of the host from a record (`host.py`), GPUs
and links from data sheets; what fraction of those a run reaches is assumed, as a range (`model.py`). A range in
a table lies between the ends of these ranges, a single number at their geometric means.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pieces
from model import (
    ENDS,
    H100,
    H200,
    HOP,
    LINK,
    MIDDLE,
    RAY,
    ROOM,
    WIRE,
    Algorithm,
    Case,
    Range,
    Work,
    all_gather,
    beside_step,
    best_split,
    in_turn,
    period,
    split,
)
from pieces import shape
from tables import (
    GRPO,
    LARGE,
    PPO,
    ROOT,
    SMALL,
    answers,
    digits,
    factor,
    host_seconds,
    inputs,
    learners,
    markdown,
    plain,
    publication,
    record,
    seconds,
    sending,
    size,
    stages,
)

PAGE, GUIDE = ROOT / "docs" / "scaling.md", ROOT / "docs" / "guides" / "asynchronous.md"
NOTE = ROOT / "docs" / "decisions" / "2026-11-22-asynchronous.md"
CASES = [
    (name, work, algorithm, n)
    for name, work, sizes in (
        ("llama-7b", SMALL, (8, 256)),
        ("llama-8b", LARGE, (8, 256)),
        ("llama-70b", SMALL, (8, 256)),
        ("llama-70b", LARGE, (256,)),  # on 8 a step would take hours
    )
    for algorithm in (PPO, GRPO)
    for n in sizes
]

# ---- utilisation -----------------------------------------------------------------------------------------------------


def splits() -> str:
    """Steps of 8 and 256 GPUs: in turn, beside each other, divided, and as the asynchronous run is now."""
    head = (
        "model, answers, algorithm",
        "GPUs",
        "in turn: draw + learn = step, s",
        "share of FLOP/s used while drawing, %",
        "beside: at most ×",
        "divided: draw + learn",
        "g, t, s",
        "idle, %",
        "step, s",
        "×",
        "H200: step, s",
        "one learner: step, s",
    )
    return markdown(head, [_split_line(*case) for case in CASES])


def _split_line(name: str, work: Work, algorithm: Algorithm, n: int) -> list[str]:
    c, other = (Case(shape(name), work, algorithm, gpu) for gpu in (H100, H200))
    best, turns = best_split(c, n), in_turn(c, n, MIDDLE)
    ends = [(at, in_turn(c, n, at), best_split(c, n, at)) for at in ENDS]
    line = [f"`{name}`, {work}, {algorithm.name}", str(n), "refused", "–", "–"]
    wins = "–"
    if turns is not None:
        used = 100 * turns.drawn.computing * MIDDLE.mfu / turns.draw
        beside = Range.over(old.step / beside_step(c, n, at) for at, old, _ in ends if old is not None)
        line[2] = f"{digits(turns.draw)} + {digits(turns.learn)} = {digits(turns.step)}"
        line[3:] = [f"{used:.0f}", factor(beside)]
        wins = factor(Range.over(old.step / new.step for _, old, new in ends if old is not None))
    idle = ", ".join(f"{100 * share:.0f}" for share in best.idle)
    lone = "–" if c.sharded else digits(split(c, n - 1, 1, MIDDLE).step)
    return [
        *line,
        f"{best.generators} + {best.learners}",
        f"{digits(best.g)}, {digits(best.t)}",
        idle,
        plain(Range.over(new.step for *_, new in ends)),
        wins,
        plain(Range.over(best_split(other, n, at).step for at in ENDS)),
        lone,
    ]


def limits() -> str:
    """Seconds per step of what does not shrink with the number of GPUs, or grows with it."""
    cases = [Case(shape(name), work, PPO, H100) for name, work in (("llama-7b", SMALL), ("llama-8b", LARGE))]
    head = ("256 GPUs, PPO", *(f"`{c.shape.name}`, {c.work}" for c in cases))
    gathered = pieces.gathered_bytes(critic=True)

    def exchanges(c: Case) -> list[float]:
        """Seconds of exchanges of small values among all ranks: each goes around twice, sizes first."""
        count = EXCHANGES + EXCHANGES_PER_UPDATE * c.algorithm.mini_batches
        return [count * 2 * 255 * hop for hop in HOP]

    lines: list[tuple[str, Callable[[Case], str]]] = [
        ("step, divided at its best", lambda c: seconds(*(best_split(c, 256, at).step for at in ENDS))),
        (
            "the same with policies and answers by Ray, at a lag of one; of two",
            lambda c: f"{_paced(c, 1)}; {_paced(c, 2)}",
        ),
        ("one learner: learning", lambda c: seconds(*(split(c, 255, 1, at).t for at in ENDS))),
        ("one learner: answers in by Ray, unpacked and joined", lambda c: seconds(*_collected(c))),
        ("one learner: text of all answers, one process", lambda c: seconds(_answer_seconds("decode", c))),
        ("one learner: a policy's file, its way by Ray to 31 machines, its check", lambda c: seconds(*_published(c))),
        (
            "256 ranks: per-token numbers gathered on each",
            lambda c: seconds(*(all_gather(256, gathered.of(*c.work), at) for at in ENDS)),
        ),
        ("the same, bytes on each rank while it is joined", lambda c: size(2 * gathered.of(*c.work))),
        ("256 ranks: small values through the hosts", lambda c: seconds(*exchanges(c))),
    ]
    return markdown(head, [(what, *map(cell, cases)) for what, cell in lines])


def _answer_seconds(what: str, c: Case) -> float:
    """Seconds of the host's work on a step's answers, by their tokens from what was measured."""
    found = record()["answers"]
    tokens = found["answers"] * found["completion"]
    return float(found["seconds"][what]) * c.work.answers * c.work.completion / tokens


def _collected(c: Case) -> Range:
    host = _answer_seconds("unpack", c) + _answer_seconds("join", c)
    n_bytes = pieces.answer_bytes().of(*c.work)
    return Range(host + n_bytes / RAY.high, host + n_bytes / RAY.low)


def _published(c: Case) -> Range:
    """Seconds of a publication: by a tree at best, to one machine after another at worst."""
    host = host_seconds(c.shape, "pack") + host_seconds(c.shape, "unpack")
    n = c.shape.parcel_bytes
    return Range(host + math.ceil(math.log2(32)) * n / RAY.high, host + 31 * n / RAY.low)


def _paced(c: Case, lag: int) -> str:
    write = host_seconds(c.shape, "pack")
    found = [
        period(best_split(c, 256, at), publish=publish, collect=collect, write=write, lag=lag)
        for at in ENDS
        for publish, collect in zip(_published(c), _collected(c), strict=True)
    ]
    return seconds(*found)


EXCHANGES, EXCHANGES_PER_UPDATE = 11, 3
"""`all_gather_object` in a step of a data-parallel run, and more for each optimizer step; counted in a run of two."""


def fits() -> str:
    """Table of the rows that fit beside a 70B base, by its format and by GPU."""
    head = (
        "`llama-70b` base",
        "bytes",
        *(f"rows of 2,560 tokens on {gpu.memory / 1e9:.0f} GB" for gpu in (H100, H200)),
    )
    s = shape("llama-70b")
    rest = s.base_bytes - 2 * s.block_parameters
    lines = []
    for what, n_bytes in {
        "bf16": s.base_bytes,
        "8 bits": s.block_parameters + rest,
        "4 bits": (0.5 + 1 / 64) * s.block_parameters + rest,
        "bf16 on 2 GPUs": s.base_bytes / 2,
        "bf16 on 4 GPUs": s.base_bytes / 4,
    }.items():
        gpus = s.base_bytes / n_bytes if "GPUs" in what else 1
        cells = []
        for gpu in (H100, H200):
            room = gpus * (ROOM * gpu.memory - n_bytes) - 2 * s.slot_bytes
            found = int(room // (s.kv_bytes * LARGE.length))
            cells.append(f"{found}" if found > 0 else "does not fit")
        lines.append((what, size(n_bytes), *cells))
    return markdown(head, lines)


# ---- the page --------------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], str]] = {
    "inputs": inputs,
    "publication": publication,
    "answers": answers,
    "learners": learners,
    "sending": sending,
    "stages": stages,
    "splits": splits,
    "limits": limits,
    "fits": fits,
}


def with_tables(text: str) -> str:
    """The page with what stands between each table's marks replaced. Raises ValueError for a table without marks."""
    for name, table in TABLES.items():
        begin, end = f"<!-- scaling-{name} -->\n", f"<!-- /scaling-{name} -->\n"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{PAGE.name}: expected the marks {begin.strip()} and {end.strip()}")
        text = f"{head}{begin}{table()}{end}{tail}"
    return text


def phrases() -> dict[Path, list[str]]:
    """Phrases with numbers in the texts between tables, by file."""
    small, large = shape("llama-7b"), shape("llama-70b")
    measured, texts = record()["publication"], record()["answers"]
    rate = measured["elements"] * 4 / measured["seconds"]["digest"]
    per_second = texts["answers"] * texts["completion"] / texts["seconds"]["decode"]
    one_by_one = [0.05 * best_split(Case(small, SMALL, PPO, H100), 256).g * LINK * x / small.parcel_bytes for x in WIRE]
    per_token = 2 * pieces.gathered_bytes(critic=True).of(*LARGE) / LARGE.tokens
    return {
        PAGE: [
            f"{digits(rate / 1e9)} GB/s",
            f"{seconds(small.base_bytes / rate)} and {seconds(large.base_bytes / rate)}",
            f"{digits(per_second / 1e6)} million tokens a second",
            f"{digits(1e3 * record()['exchange']['seconds'])} ms between two processes",
            f"{seconds(*(all_gather(8, large.base_bytes, at) for at in ENDS))} per token",
            f"{plain(Range(*one_by_one))} generators",
            f"{digits(8e9 / per_token / 1e6)} million tokens",
        ],
        GUIDE: [f"{size(small.parcel_bytes)} where the base has {size(small.base_bytes)}"],
        NOTE: [f"{size(small.parcel_bytes)} per policy and generator against {size(small.base_bytes)}"],
    }


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or 1 if a text lacks a number, or --check finds a table that differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    before = PAGE.read_text(encoding="utf-8")
    after = with_tables(before)
    if not options.check:
        PAGE.write_text(after, encoding="utf-8")
    code = int(options.check and before != after)
    for path, wanted in phrases().items():
        text = " ".join(path.read_text(encoding="utf-8").split())
        for phrase in wanted:
            if phrase not in text:
                print(f"{path.relative_to(ROOT)}: expected {phrase!r} in the text", file=sys.stderr)
                code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
