#!/usr/bin/env python
"""HydraPPOTrainer behind TRL beside `rlhf-engine train`: the same run on a pretrained story model, several seeds.

    python bench/studies/behind_trl.py --model MODEL_FOLDER --out bench/results/cpu/behind_trl
    python bench/studies/behind_trl.py --model MODEL_FOLDER --quick --out runs/behind_trl                # a few steps

Both arms have the settings of examples/stories260k.yaml; each run is a process of its own, arms take turns. What they
do not share is what makes them two: TRL draws prompts and answers from random numbers of its own, and its learning rate
falls within a rollout. Its gradients are clipped for all adapters together. A minibatch is divided by the rollout's
mean tokens rather than its own. The run behind TRL of the first seed is made once more, stopped in the middle of a
rollout and resumed by another process: its logged numbers and its final weights are compared with those of the first,
bit by bit. Writes OUT/behind_trl.json, .md and curves.png.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlhf_engine.config import TrainConfig, parse_config
from rlhf_engine.runs.curves import smooth
from rlhf_engine.runs.metrics import read_metrics, run_record, write_json_atomic

CONFIG = "examples/stories260k.yaml"
ARMS = ("rlhf-engine train", "HydraPPOTrainer")
CURVES = ("reward", "kl", "length", "value_loss")
LAST = 5
"""Steps whose mean is compared."""
ROUNDING = {"seconds", "step_time", "train_runtime", "num_tokens"}


def config_of(request: dict[str, Any]) -> TrainConfig:
    argv = ["--config", CONFIG, "--model_name_or_path", request["model"], "--output_dir", request["folder"]]
    argv += ["--max_steps", str(request["steps"]), "--seed", str(request["seed"])]
    return parse_config(TrainConfig, argv)


def run_own(request: dict[str, Any]) -> dict[str, Any]:
    from rlhf_engine.runs.folder import METRICS_FILE
    from rlhf_engine.training.rl import RlTrainer

    trainer = RlTrainer(config_of(request))
    began = time.perf_counter()
    trainer.run()
    seconds = time.perf_counter() - began
    rows = read_metrics(Path(request["folder"]) / METRICS_FILE)
    names = {"reward": "reward", "kl": "kl", "length": "completions/mean_length", "value_loss": "value/loss"}
    return {"seconds": seconds, **{name: [row[key] for row in rows] for name, key in names.items()}}


def run_behind_trl(request: dict[str, Any]) -> dict[str, Any]:
    """`stop`: optimizer step after which the run ends with a checkpoint. `resume`: from that checkpoint."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback

    from rlhf_engine.integrations.trl import HydraPPOConfig, HydraPPOTrainer

    config = config_of(request)
    sys.path.insert(0, "rlhf_engine/templates")
    reward = importlib.import_module("happy_endings").reward
    prompts = [json.loads(line) for line in Path(str(config.dataset_name)).read_text().splitlines()]
    updates = config.num_mini_batches * config.num_ppo_epochs  # of a rollout

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            if state.global_step == request.get("stop"):
                control.should_save = control.should_training_stop = True

    trainer = HydraPPOTrainer(
        model=request["model"],
        reward_funcs=reward,
        args=HydraPPOConfig(
            output_dir=request["folder"],
            max_steps=updates * config.max_steps,
            per_device_train_batch_size=config.generation_batch_size // config.num_mini_batches,
            gradient_accumulation_steps=1,
            steps_per_generation=config.num_mini_batches,
            num_iterations=config.num_ppo_epochs,
            max_completion_length=config.max_completion_length,
            learning_rate=config.learning_rate,
            lr_scheduler_type=config.lr_scheduler_type,
            beta=config.beta,
            kl_estimator=config.kl_estimator,
            vf_coef=config.vf_coef,
            gamma=config.gamma,
            lam=config.lam,
            logging_steps=updates,
            save_strategy="no",
            report_to="none",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            disable_tqdm=True,
            seed=config.seed,
        ),
        train_dataset=Dataset.from_list(prompts),
        peft_config=LoraConfig(
            r=config.lora_r, lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[Stop()],
    )
    began = time.perf_counter()
    trainer.train(resume_from_checkpoint=request.get("resume"))
    seconds = time.perf_counter() - began
    rows = [row for row in trainer.state.log_history if "reward" in row]
    lengths = [row["completions/mean_length"] for row in rows]
    digest = hashlib.sha256()
    for name, p in sorted(trainer.hydra.named_parameters()):
        if p.requires_grad:
            digest.update(name.encode() + p.detach().numpy().tobytes())
    return {
        "seconds": seconds,
        "reward": [row["reward"] for row in rows],
        "kl": [row["kl"] * n for row, n in zip(rows, lengths, strict=True)],  # nats per answer, as in the other arm
        "length": lengths,
        "value_loss": [row["value/loss"] for row in rows],
        "logged": [{k: v for k, v in row.items() if k not in ROUNDING} for row in rows],
        "weights": digest.hexdigest(),
    }


def ask(**request: Any) -> dict[str, Any]:
    """A run in a process of its own."""
    command = [sys.executable, __file__, "--request", json.dumps(request)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(rows: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    """Differences between the logs of two runs: metrics, each with the step."""
    if len(rows) != len(other):
        return [f"{len(rows)} rows and {len(other)}"]
    return [
        f"{name} at {a['step']}"
        for a, b in zip(rows, other, strict=True)
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["| | reward, first step | reward | KL, nats per answer | tokens per answer | seconds |", "|---" * 6 + "|"]
    for arm, members in runs.items():
        cells = [
            spread([run["reward"][0] for run in members]),
            *(spread([statistics.fmean(run[name][-LAST:]) for run in members]) for name in ("reward", "kl", "length")),
            spread([run["seconds"] for run in members]),
        ]
        lines.append(f"| `{arm}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    beside = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{beside}"


def plot(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Smoothed means within the span of the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(CURVES), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for i, name in enumerate(CURVES):
        axes = figure.add_subplot(1, len(CURVES), i + 1)
        for arm, members in runs.items():
            columns = list(zip(*(smooth(run[name]) for run in members), strict=True))
            steps = range(1, 1 + len(columns))
            (drawn,) = axes.plot(steps, [statistics.fmean(column) for column in columns], label=arm)
            axes.fill_between(
                steps, [min(c) for c in columns], [max(c) for c in columns], color=drawn.get_color(), alpha=0.2
            )
        axes.set_title(name.replace("_", " "), fontsize=11)
        axes.set_xlabel("rollout")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--request", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--model", help="folder of the pretrained model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40, help="rollouts")
    parser.add_argument("--quick", action="store_true", help="3 rollouts of one seed")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.request:
        run = run_own if given.request["arm"] == ARMS[0] else run_behind_trl
        print(json.dumps(run(given.request)))
        return
    if given.model is None or given.out is None:
        parser.error("expected --model and --out")
    if given.quick:
        given.seeds, given.steps = [0], 3
    given.out.mkdir(parents=True, exist_ok=True)
    config = config_of({"model": given.model, "folder": "-", "steps": given.steps, "seed": 0})
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        for seed in given.seeds:
            for i, arm in enumerate(ARMS):
                where = str(Path(folder) / f"{i}_{seed}")
                runs[arm].append(ask(arm=arm, seed=seed, steps=given.steps, model=given.model, folder=where))
                print(f"seed {seed} {arm} {runs[arm][-1]['seconds']:.0f} s", file=sys.stderr)
        updates = config.num_mini_batches * config.num_ppo_epochs
        stop = updates * given.steps // 2 + 1
        again = {"arm": ARMS[1], "seed": given.seeds[0], "steps": given.steps, "model": given.model}
        again["folder"] = str(Path(folder) / "stopped")
        ask(**again, stop=stop)
        resumed = ask(**again, resume=str(Path(again["folder"]) / f"checkpoint-{stop}"))
    first = runs[ARMS[1]][0]
    differing = compare(first["logged"], resumed["logged"])
    same = first["weights"] == resumed["weights"]
    told = (
        f"Stopped after optimizer step {stop} of {updates * given.steps}, in the middle of a rollout, and resumed: the "
        f"final weights are {'the same floats' if same else 'other floats'}, and so are the logged numbers"
        + (f", but for {', '.join(differing)}." if differing else ".")
    )
    record = run_record(
        config={name: value for name, value in vars(given).items() if name not in ("model", "out", "request")},
        command=["python", "bench/studies/behind_trl.py", "--model", "MODEL", "--out", str(given.out)],
        backends={},
        device="cpu",
    )
    for run in runs[ARMS[1]]:
        del run["logged"]
    write_json_atomic(
        given.out / "behind_trl.json",
        {**record, "runs": runs, "resumed": {"stop": stop, "same": same, "differing": differing}},
    )
    text = f"# PPO behind TRL and in our own loop\n\n{table(runs)}\n\nMeans over the last {LAST} rollouts. {told}\n"
    (given.out / "behind_trl.md").write_text(text)
    plot(runs, given.out / "curves.png")
    print(text)


if __name__ == "__main__":
    main()
