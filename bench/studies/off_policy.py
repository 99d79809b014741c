#!/usr/bin/env python
"""Cost of older answers: N batches from one policy, then N updates (Asynchronous RLHF, arXiv 2410.18252, §3).

    python bench/studies/off_policy.py --out bench/results/cpu/off_policy
    python bench/studies/off_policy.py --out DIR --seeds 0 --batches 1 16 --losses ppo
    python bench/studies/off_policy.py --out DIR --summary  # only the table and the plot of what is there
    python bench/studies/off_policy.py --out DIR --quick                      # a few steps, to see that everything runs

On the demo's task: every run starts from the supervised model of its seed and draws the same number of answers in
batches of the same size. It makes one update per batch. The true preference, which nothing in training sees, judges it
on held-out prompts. Only the age of the answers differs: of N batches in a row the first is of the present policy, the
last N − 1 updates behind. Each loss has that learning rate of 1e-4, 3e-4, 1e-3 and 3e-3 which did best at N = 1 on a
seed that is in no table.

The paper's win rates are of Pythia-410M on TL;DR summaries, judged by a gold reward model: another task and size, so
what may be compared is which losses bear old answers, and from which N on.

A run that ended has a record OUT/<run>.json and is not repeated. Writes OUT/summary.md and OUT/curves.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_engine.commands.demo import QUICK, DemoSize, heldout_answers, make_start, rl_options, win_rate
from rlhf_engine.config import TrainConfig
from rlhf_engine.devices import keep_freed_memory
from rlhf_engine.runs.metrics import run_record, write_json_atomic
from rlhf_engine.runs.progress import TrainingProgress
from rlhf_engine.training.rl import RlTrainer

BATCHES = (1, 4, 16, 64)
STEPS = 128
LOSSES: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"algorithm": "ppo", "beta": 0.1, "learning_rate": 3e-4, "critic_learning_rate": 2e-3, "lam": 0.95},
    "rloo": {"algorithm": "rloo", "beta": 0.1, "learning_rate": 3e-4, "num_generations": 2},
    "online_dpo": {"algorithm": "online_dpo", "beta": 0.3, "learning_rate": 1e-3, "num_generations": 2},
    "best_of_2": {"algorithm": "best_of_n", "learning_rate": 3e-4, "num_generations": 2},
}
COMMON = {
    "generation_batch_size": 24,
    "num_mini_batches": 1,
    "num_ppo_epochs": 1,
    "per_device_train_batch_size": 24,
    "lr_scheduler_type": "cosine",
    "save_steps": 0,
}
PAPER = {
    "ppo": {1: 0.86, 16: 0.76},
    "rloo": {1: 0.82, 16: 0.77},
    "online_dpo": {1: 0.85, 16: 0.82},
}
"""Gold win rates at 410 M parameters, as far as the text gives them; the paper's N = 1 is on-policy."""
SHOWN = ("win_rate", "reward", "kl", "staleness/k3", "clip_ratio")


def run_name(loss: str, n: int, seed: int) -> str:
    return f"{loss}_n{n}_seed{seed}"


def start_of(work: Path, size: DemoSize, seed: int) -> Path:
    """The supervised model of a seed, made once."""
    folder = work / f"start{seed}"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with TrainingProgress(size.sft_steps, title=f"supervised, seed {seed}") as progress:
            make_start(folder, size, seed=seed, on_step=lambda s, m: progress.update(s, m) if s % 60 == 0 else None)
        (folder / "done").touch()
    return folder


def run_point(loss: str, n: int, seed: int, *, start: Path, work: Path, steps: int, rate: float | None) -> dict:
    """One run and its judgement."""
    options = {**rl_options(start), **COMMON, **LOSSES[loss], "max_steps": steps, "seed": seed}
    options |= {"async_mode": "blocks", "max_staleness": n - 1} if n > 1 else {}
    if rate is not None:
        options["learning_rate"] = rate
    folder = work / run_name(loss, n, seed)
    shutil.rmtree(folder, ignore_errors=True)
    config = TrainConfig(output_dir=str(folder), **options)
    trainer = RlTrainer(config)
    before = heldout_answers(trainer, "reference")
    rows = []
    with TrainingProgress(steps, title=folder.name) as progress:
        while trainer.state.step < steps:
            rows.append(trainer.step())
            if trainer.state.step % 32 == 0 or trainer.state.step == steps:
                progress.update(trainer.state.step, rows[-1])
    after = heldout_answers(trainer, "actor")
    shutil.rmtree(folder, ignore_errors=True)

    def curve(name: str) -> list[float | None]:
        return [row.get(name) for row in rows]

    scores = [score for score in after.scores if score is not None]
    kept = {k: v for k, v in config.to_dict().items() if k not in ("model_name_or_path", "output_dir")}
    record = run_record(config={k: v for k, v in kept.items() if "dataset" not in k}, command=sys.argv, backends={})
    return {
        "loss": loss,
        "batches_per_policy": n,
        "seed": seed,
        "final": {
            "win_rate": win_rate(after, before),
            "reward": statistics.fmean(scores),
            "kl": trainer.evaluation.kl_to_reference(after.rollout),
        },
        "curves": {
            name: curve(name) for name in ("reward", "kl", "staleness/max", "staleness/k3", "clip_ratio", "approx_kl")
        },
        "record": {k: record[k] for k in ("started", "config", "versions", "git_commit", "device_name")},
    }


# ---- what comes out --------------------------------------------------------------------------------------------------


def summarise(records: Sequence[Mapping[str, Any]], out: Path) -> str:
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["loss"], record["batches_per_policy"]), []).append(record)
    lines = [
        "| loss | N | true win rate | learned reward | KL | k3 of a step's policy to the drawing one | seeds | paper |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (loss, n), found in sorted(groups.items(), key=lambda item: (list(LOSSES).index(item[0][0]), item[0][1])):
        drift = [x for record in found for x in record["curves"]["staleness/k3"] if x is not None]
        paper = PAPER.get(loss, {}).get(n)
        lines.append(
            f"| {loss} | {n} | {_spread(found, 'win_rate')} | {_spread(found, 'reward')} | {_spread(found, 'kl')} | "
            f"{statistics.fmean(drift) if drift else 0:.3g} | {len(found)} | {'' if paper is None else paper} |"
        )
    text = "\n".join(lines) + "\n"
    (out / "summary.md").write_text(text)
    plot(groups, out / "curves.png")
    return text


def _spread(records: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [record["final"][name] for record in records]
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0:.3f}"


def plot(groups: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Win rate and KL over N, a line per loss, every seed a point; the paper's win rates hollow beside them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        ("win_rate", "true win rate against the start"),
        ("kl", "KL to the reference, nats per answer"),
        ("reward", "learned reward"),
    )
    for column, (name, label) in enumerate(panels):
        axes = figure.add_subplot(1, 3, column + 1)
        for colour, loss in enumerate(LOSSES):
            points = sorted(n for which, n in groups if which == loss)
            if not points:
                continue
            means = [statistics.fmean(r["final"][name] for r in groups[loss, n]) for n in points]
            axes.plot(points, means, color=f"C{colour}", label=loss, linewidth=1.8)
            for n in points:
                values = [record["final"][name] for record in groups[loss, n]]
                axes.plot([n] * len(values), values, ".", color=f"C{colour}", markersize=5, alpha=0.7)
            if name == "win_rate" and loss in PAPER:
                axes.plot(
                    list(PAPER[loss]), list(PAPER[loss].values()), "o--", color=f"C{colour}", mfc="none", alpha=0.6
                )
        axes.set_xscale("log", base=4)
        axes.set_xticks(BATCHES, [str(n) for n in BATCHES])
        axes.set_xlabel("N, batches from one policy")
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
        if column == 0:
            axes.legend(fontsize=8, frameon=False, title="hollow: paper, 410 M on TL;DR", title_fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/off_policy"), help="models and checkpoints")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--learning_rate", type=float, help="in place of the losses' own")
    parser.add_argument("--quick", action="store_true", help="a few steps only")
    parser.add_argument("--summary", action="store_true", help="table and plot of the records that are there")
    arguments = parser.parse_args()
    keep_freed_memory()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    size, steps = (dataclasses.replace(QUICK, sft_steps=3), 4) if arguments.quick else (DemoSize(), STEPS)
    points = [(seed, n, loss) for seed in arguments.seeds for n in arguments.batches for loss in arguments.losses]
    for seed, n, loss in [] if arguments.summary else points:
        path = out / f"{run_name(loss, n, seed)}.json"
        if path.exists():
            continue
        start = start_of(arguments.work, size, seed)
        rate = arguments.learning_rate
        record = run_point(loss, n, seed, start=start, work=arguments.work, steps=steps, rate=rate)
        write_json_atomic(path, record)
    records = [json.loads(path.read_text()) for path in sorted(out.glob("*_n*_seed*.json"))]
    if not records:
        parser.error(f"--out: expected a folder with records, got {out}, which has none")
    print(summarise(records, out))


if __name__ == "__main__":
    main()
