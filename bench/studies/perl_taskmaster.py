#!/usr/bin/env python
"""PERL (arXiv 2403.10704) on real thumbs: LoRA against full tuning of a reward model, then RL against it.

    python bench/studies/perl_taskmaster.py --data DIR --out bench/results/cpu/perl_taskmaster
    python bench/studies/perl_taskmaster.py --data DIR --out runs/perl --quick              # a few steps of everything
    python bench/studies/perl_taskmaster.py --data DIR --out DIR2 --table  # only the table of what is there

DIR holds Taskmaster-3's published reward files. Everything is made from them: a byte-level BPE tokenizer and a small
decoder, trained on dialogues. Conversations are divided into three: rows to train on, rows to choose by (a run's best
step, an arm's best rate), and rows to report. Nothing else, the tokenizer and the decoder included, has seen anything
of the last. Then, each in a process of its own through `rlhf-engine`, with a record per run, so that a study stopped at
any point goes on:

1. reward models, pointwise: LoRA on the attention projections at several ranks, and full tuning; every arm over its
   own learning rates with the first seed, then its best rate with the others. What is reported are the rewards of the
   exported models in plain transformers;
2. RL by REINFORCE with a learned baseline against the best LoRA reward model: four roles on one base;
3. what a reward model costs: a few steps of LoRA and of full tuning on a larger decoder of random weights. With the
   study's own, which is small, peak memory is the process and its activations.

Classes are unbalanced (573 of 3,667 thumbs up), hence AUC and balanced accuracy. What the paper reports for reward
models: accuracy on par with full tuning, 43 to 74 % of its memory, 1.15 to 1.9 times as fast; for RL 74 to 80 % and
1.05 to 1.3 times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForSequenceClassification
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_engine.data import Tally, load_rows, split_by_group, tokenize_rows
from rlhf_engine.runs.metrics import read_metrics, write_json_atomic
from rlhf_engine.training.reward_metrics import pointwise_metrics

WORK = Path("runs/perl_taskmaster")
PENALTY = 1.0
"""Of an answer without an end."""
CURVES = ("step", "reward", "kl", "completions/mean_length", "completions/unfinished_ratio")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Sizes of everything."""

    vocabulary: int = 2048
    hidden: int = 128
    layers: int = 4
    last_turns: int = 6
    """Turns of the context that a prompt keeps."""
    max_length: int = 320
    reported: float = 0.2
    """Share of the conversations to report."""
    chosen_by: float = 0.15
    """Share of the rest to choose by."""
    lm_steps: int = 600
    reward_steps: int = 300
    reward_batch: int = 32
    ranks: tuple[int, ...] = (1, 4, 16)
    lora_rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)
    full_rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3)
    seeds: tuple[int, ...] = (0, 1, 2)
    rl_steps: int = 60
    rl_batch: int = 64
    answer_tokens: int = 32
    cost_hidden: int = 512
    cost_layers: int = 8
    cost_steps: int = 6
    cost_rank: int = 4
    cost_tokens: int = 2048
    """Most tokens of a micro-batch."""


QUICK = Study(
    vocabulary=300,
    hidden=32,
    layers=2,
    lm_steps=3,
    reward_steps=4,
    reward_batch=8,
    ranks=(1,),
    lora_rates=(1e-3, 3e-3),
    full_rates=(3e-4,),
    seeds=(0, 1),
    rl_steps=2,
    rl_batch=8,
    answer_tokens=4,
    cost_hidden=64,
    cost_layers=2,
    cost_steps=2,
    cost_rank=1,
)


@dataclass(frozen=True, kw_only=True)
class RewardRun:
    """One reward model."""

    arm: str
    """full, or lora_rN"""
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Name of its record."""
        return f"{self.arm}_rate-{self.rate:g}_seed-{self.seed}"


# ---- what everything starts from -------------------------------------------------------------------------------------


def prepare(study: Study, data: Path, folder: Path) -> None:
    """Rows of both sides, the tokenizer, and the decoder before and after its training on dialogues."""
    tally = Tally(source=str(data), argument="--data")
    turns = -(study.last_turns + 1)  # a prompt ends with a bare `agent:`
    rows = load_rows(str(data), tally, kinds=("unpaired_preference",))
    rows = [replace(row, prompt="\n".join(row.prompt.split("\n")[turns:])) for row in rows]
    rest, reported = split_by_group(rows, share=study.reported, seed=0)
    train, chosen_by = split_by_group(rest, share=study.chosen_by, seed=1)
    folder.mkdir(parents=True, exist_ok=True)
    for name, side in (("train", train), ("choose", chosen_by), ("report", reported)):
        _write(
            folder / f"thumbs_{name}.jsonl",
            [{"prompt": r.prompt, "completion": r.completion, "label": r.label, "conversation": r.group} for r in side],
        )
        _write(folder / f"prompts_{name}.jsonl", [{"prompt": r.prompt} for r in side])
    texts = [f"{row.prompt}{row.completion}" for row in rest]
    tokenizer = _train_tokenizer(study, texts)
    # dialogues to learn from: the first line is given, the rest follows
    _write(
        folder / "dialogues.jsonl",
        [dict(zip(("prompt", "completion"), text.split("\n", 1), strict=True)) for text in texts if "\n" in text],
    )
    _save_decoder(folder / "init", tokenizer, hidden=study.hidden, layers=study.layers)
    _save_decoder(folder / "large", tokenizer, hidden=study.cost_hidden, layers=study.cost_layers)
    engine(
        "sft",
        {
            "full": None,
            "model_name_or_path": folder / "init",
            "dataset_name": folder / "dialogues.jsonl",
            "output_dir": folder / "lm",
            "resume_from_checkpoint": "restart",
            "gamma": 0,
            "max_length": study.max_length,
            "truncation": "keep_start",
            "max_bad_rows": 0.02,
            "max_steps": study.lm_steps,
            "per_device_train_batch_size": 16,
            "learning_rate": 2e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": study.lm_steps // 20,
        },
    )


def _save_decoder(folder: Path, tokenizer: PreTrainedTokenizerFast, *, hidden: int, layers: int) -> None:
    """A Llama of random weights with its tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _train_tokenizer(study: Study, texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=study.vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def engine(command: str, flags: dict[str, Any]) -> str:
    """Run a command of rlhf-engine to its end; what was run."""
    argv = [command]
    for name, value in flags.items():
        argv += (
            [f"--{name}"] if value is None else [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
        )
    done = subprocess.run([sys.executable, "-m", "rlhf_engine", *argv], stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"rlhf-engine {shlex.join(argv)}: ended with exit code {done.returncode}; run this again to go on"
        )
    return shlex.join(["rlhf-engine", *argv])


# ---- reward models ---------------------------------------------------------------------------------------------------


def arms(study: Study) -> dict[str, tuple[float, ...]]:
    """Arm → the learning rates it is tried with."""
    return {**{f"lora_r{r}": study.lora_rates for r in study.ranks}, "full": study.full_rates}


def cost_arms(study: Study) -> tuple[str, ...]:
    """Arms whose cost is measured on the larger decoder."""
    return (f"lora_r{study.cost_rank}", "full")


def reward_runs(study: Study, out: Path) -> Iterator[RewardRun]:
    """Every arm's rates with the first seed, then its best rate with the others."""
    for arm, rates in arms(study).items():
        yield from (RewardRun(arm=arm, rate=rate, seed=study.seeds[0]) for rate in rates)
    for arm in arms(study):
        best = best_rate(study, out, arm)
        yield from (RewardRun(arm=arm, rate=best, seed=seed) for seed in study.seeds[1:])


def best_rate(study: Study, out: Path, arm: str) -> float:
    """The learning rate of the best AUC on the rows to choose by, with the first seed."""
    first = [RewardRun(arm=arm, rate=rate, seed=study.seeds[0]) for rate in arms(study)[arm]]
    return max(first, key=lambda run: read(out, run)["choose/auc"]).rate


def read(out: Path, run: RewardRun) -> dict[str, Any]:
    """A run's record."""
    found: dict[str, Any] = json.loads((out / "reward" / f"{run.name}.json").read_text())
    return found


def train_reward(study: Study, run: RewardRun, folder: Path, out: Path) -> None:
    """One reward model and its record."""
    output = folder / "reward" / run.name
    flags = _reward_flags(study, run.arm, folder) | {
        "model_name_or_path": folder / "lm",
        "eval_dataset_name": folder / "thumbs_choose.jsonl",
        "output_dir": output,
        "max_steps": study.reward_steps,
        "eval_steps": max(1, study.reward_steps // 5),
        "learning_rate": run.rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": study.reward_steps // 20,
        "seed": run.seed,
        "resume_from_checkpoint": "auto",
    }
    began = time.perf_counter()
    command = engine("reward", flags)
    seconds = time.perf_counter() - began
    final_step = json.loads((output / "run.json").read_text())["result"]["final_step"]
    chosen = next(row for row in read_metrics(output / "metrics.jsonl") if row["step"] == final_step)
    write_json_atomic(
        out / "reward" / f"{run.name}.json",
        {
            **{f"choose/{name[5:]}": value for name, value in chosen.items() if name.startswith("eval/")},
            **{f"report/{name}": value for name, value in reported(study, run, folder, output / "final").items()},
            "best_step": chosen["step"],
            "seconds": seconds,
            **_cost(study, output, command.replace(str(folder), "DIR")),
        },
    )
    if run.arm == "full":  # a whole model each; of the adapters one is used below
        shutil.rmtree(output)


def reported(study: Study, run: RewardRun, folder: Path, final: Path) -> dict[str, float | None]:
    """Metrics of the rows to report, by the exported model in plain transformers, one row at a time."""
    tally = Tally(source=str(folder / "thumbs_report.jsonl"), max_bad_rows=0.02)
    rows = load_rows(tally.source, tally, kinds=("unpaired_preference",))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "init")
    tokens = tokenize_rows(rows, tokenizer, tally, max_length=study.max_length, truncation="keep_end")
    if run.arm == "full":
        model = AutoModelForSequenceClassification.from_pretrained(final, num_labels=1)
    else:
        model = AutoPeftModelForSequenceClassification.from_pretrained(final / "sequence_classification", num_labels=1)
    with torch.no_grad():
        rewards = [float(model.eval()(torch.tensor([t.prompt + t.answers[0]])).logits) for t in tokens]
    labels = torch.tensor([t.row.label for t in tokens])
    record = json.loads((final.parent / "run.json").read_text())
    return pointwise_metrics(torch.tensor(rewards), labels, pos_weight=record["pos_weight"])


def measure_cost(study: Study, arm: str, folder: Path, out: Path) -> None:
    """A few steps of an arm on the larger decoder, and the record of what they took."""
    output = folder / "cost" / arm
    flags = _reward_flags(study, arm, folder) | {
        "model_name_or_path": folder / "large",
        "output_dir": output,
        "resume_from_checkpoint": "restart",
        "max_steps": study.cost_steps,
        "max_tokens_per_micro_batch": study.cost_tokens,
    }
    command = engine("reward", flags)
    write_json_atomic(out / "cost" / f"{arm}.json", _cost(study, output, command.replace(str(folder), "DIR")))
    shutil.rmtree(output)


def _reward_flags(study: Study, arm: str, folder: Path) -> dict[str, Any]:
    """Flags of the training of an arm's reward model."""
    flags: dict[str, Any] = {
        "full" if arm == "full" else "lora": None,
        "dataset_name": folder / "thumbs_train.jsonl",
        "max_length": study.max_length,
        "truncation": "keep_end",
        "max_bad_rows": 0.02,
        "save_steps": 0,
        "per_device_train_batch_size": study.reward_batch,
        "pos_weight": "balanced",
    }
    if arm == "full":
        return flags
    rank = int(arm.removeprefix("lora_r"))
    return flags | {"lora_r": rank, "lora_alpha": 2 * rank, "lora_target_modules": ATTENTION}


def _cost(study: Study, output: Path, command: str) -> dict[str, Any]:
    """Cost of a run's steps, with the sizes, versions and command of the run."""
    record = json.loads((output / "run.json").read_text())
    # without the evaluation before the first step
    rows = [row for row in read_metrics(output / "metrics.jsonl") if "peak_memory_bytes" in row]
    return {
        "peak_memory_bytes": max(row["peak_memory_bytes"] for row in rows),
        "seconds_per_step": statistics.median(study.reward_batch / row["samples_per_second"] for row in rows),
        "trained_parameters": record["trained_parameters"],
        "base_parameters": record["base_parameters"],
        "git_commit": record["git_commit"],
        "versions": record["versions"],
        "device": record["device_name"],
        "command": command,
    }


# ---- RL --------------------------------------------------------------------------------------------------------------


def train_policy(study: Study, folder: Path, out: Path, seed: int) -> None:
    """REINFORCE with the best LoRA reward model of the first seed, and its record."""
    lora = [
        RewardRun(arm=f"lora_r{r}", rate=best_rate(study, out, f"lora_r{r}"), seed=study.seeds[0]) for r in study.ranks
    ]
    best = max(lora, key=lambda run: read(out, run)["choose/auc"])
    output = folder / "rl" / f"seed-{seed}"
    command = engine(
        "train",
        {
            "algorithm": "reinforce",
            "model_name_or_path": folder / "lm",
            "reward_model_path": folder / "reward" / best.name / "final",
            "dataset_name": folder / "prompts_train.jsonl",
            "eval_dataset_name": folder / "prompts_report.jsonl",
            "output_dir": output,
            "lora_r": 4,
            "lora_alpha": 8,
            "lora_target_modules": ATTENTION,
            "max_prompt_length": study.max_length - study.answer_tokens,
            "truncation": "keep_end",
            "max_bad_rows": 0.02,
            "max_completion_length": study.answer_tokens,
            "temperature": 0.7,
            "beta": 0.05,
            "missing_eos_penalty": PENALTY,
            "generation_batch_size": study.rl_batch,
            "max_steps": study.rl_steps,
            "eval_steps": study.rl_steps,
            "learning_rate": 2e-3,
            "lr_scheduler_type": "cosine",
            "save_steps": 20,
            "seed": seed,
            "resume_from_checkpoint": "auto",
        },
    )
    record = json.loads((output / "run.json").read_text())
    # without the evaluation before the first step
    rows = [row for row in read_metrics(output / "metrics.jsonl") if "peak_memory_bytes" in row]
    write_json_atomic(
        out / "rl" / f"seed-{seed}.json",
        {
            "reward_model": best.name,
            "curves": {name: [row.get(name) for row in rows] for name in CURVES},
            "final": {name: rows[-1][name] for name in ("eval/reward", "eval/kl", "peak_memory_bytes")},
            "git_commit": record["git_commit"],
            "versions": record["versions"],
            "command": command.replace(str(folder), "DIR"),
        },
    )


# ---- all of it -------------------------------------------------------------------------------------------------------


def table(study: Study, out: Path) -> str:
    """Markdown of the records that are there."""
    lines = [
        "| arm | best rate | AUC | balanced accuracy | Brier score | trained, % of the base | peak, MiB | s per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in arms(study):
        rate = best_rate(study, out, arm)
        paths = [out / "reward" / f"{RewardRun(arm=arm, rate=rate, seed=seed).name}.json" for seed in study.seeds]
        found = [json.loads(path.read_text()) for path in paths if path.is_file()]
        cells = [_spread([row[f"report/{name}"] for row in found]) for name in ("auc", "balanced_accuracy", "brier")]
        share = 100 * found[0]["trained_parameters"] / found[0]["base_parameters"]
        memory = statistics.median(row["peak_memory_bytes"] for row in found) / 2**20
        seconds = statistics.median(row["seconds_per_step"] for row in found)
        lines.append(f"| {arm} | {rate:g} | {' | '.join(cells)} | {share:.3g} | {memory:.0f} | {seconds:.3f} |")
    rates = "; ".join(_rates(study, out, arm) for arm in arms(study))
    lines += ["", f"AUC by rate on the rows to choose by, first seed: {rates}."]
    costs = {arm: out / "cost" / f"{arm}.json" for arm in cost_arms(study)}
    if all(path.is_file() for path in costs.values()):
        lines += ["", *_cost_table({arm: json.loads(path.read_text()) for arm, path in costs.items()})]
    policies = [json.loads(path.read_text()) for path in sorted((out / "rl").glob("*.json"))]
    if policies:
        # with the penalty for answers without an end taken out again, as in evaluation
        before, after = (
            [p["curves"]["reward"][i] + PENALTY * p["curves"]["completions/unfinished_ratio"][i] for p in policies]
            for i in (0, -1)
        )
        kl = [p["final"]["eval/kl"] for p in policies]
        lines += [
            "",
            f"RL against {policies[0]['reward_model']}: reward in training {_spread(before)} → {_spread(after)}, on "
            f"reported prompts {_spread([p['final']['eval/reward'] for p in policies])} at a KL of {_spread(kl)} nats "
            "per answer.",
        ]
    return "\n".join(lines)


def plot(study: Study, out: Path) -> None:
    """AUC by learning rate of the reward models, and reward against KL of the policies trained against one of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    policies = [json.loads(path.read_text()) for path in sorted((out / "rl").glob("*.json"))]
    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    rates, learning = figure.subplots(1, 2)
    for arm in arms(study):
        runs = [RewardRun(arm=arm, rate=rate, seed=study.seeds[0]) for rate in arms(study)[arm]]
        rates.plot([run.rate for run in runs], [read(out, run)["choose/auc"] for run in runs], "o-", label=arm)
    rates.set(xscale="log", xlabel="learning rate", ylabel="AUC, rows to choose by, first seed")
    for policy, seed in zip(policies, study.seeds, strict=False):
        curves = policy["curves"]
        ended = [r + PENALTY * u for r, u in zip(curves["reward"], curves["completions/unfinished_ratio"], strict=True)]
        learning.plot(curves["kl"], ended, alpha=0.8, label=f"seed {seed}")
    learning.set(xlabel="KL to the reference, nats per answer", ylabel="learned reward")
    for axes in (rates, learning):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(out / "curves.png", dpi=130)


def _cost_table(found: dict[str, dict[str, Any]]) -> list[str]:
    millions = found["full"]["base_parameters"] / 1e6
    lines = [
        f"| {millions:.1f} M parameters, random weights | trained, % of the base | peak memory, MiB | s per step |",
        "|---|---|---|---|",
    ]
    for arm, row in found.items():
        share = 100 * row["trained_parameters"] / row["base_parameters"]
        lines.append(
            f"| {arm} | {share:.3g} | {row['peak_memory_bytes'] / 2**20:.0f} | {row['seconds_per_step']:.2f} |"
        )
    return lines


def _rates(study: Study, out: Path, arm: str) -> str:
    runs = [RewardRun(arm=arm, rate=rate, seed=study.seeds[0]) for rate in arms(study)[arm]]
    return f"{arm} " + ", ".join(f"{run.rate:g}: {read(out, run)['choose/auc']:.3f}" for run in runs)


def _spread(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{deviation}"


def _same_study(study: Study, out: Path) -> None:
    """Records of other settings are not taken for these."""
    path, settings = out / "study.json", json.loads(json.dumps(dataclasses.asdict(study)))
    if not path.is_file():
        out.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, settings)
    elif json.loads(path.read_text()) != settings:
        raise SystemExit(f"--out: expected records of the same study, got those of other settings in {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the published reward files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of models and data while the study lasts")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    parser.add_argument("--table", action="store_true", help="start no runs")
    arguments = parser.parse_args()
    study, out = QUICK if arguments.quick else Study(), arguments.out
    folder = arguments.work / ("quick" if arguments.quick else "full")
    if not arguments.table:
        _same_study(study, out)
        for name in ("reward", "rl", "cost"):
            (out / name).mkdir(parents=True, exist_ok=True)
        if not (folder / "lm" / "config.json").is_file():
            prepare(study, arguments.data, folder)
        for run in reward_runs(study, out):
            if not (out / "reward" / f"{run.name}.json").is_file():
                print(f"reward model {run.name}", file=sys.stderr)
                train_reward(study, run, folder, out)
        for arm in cost_arms(study):
            if not (out / "cost" / f"{arm}.json").is_file():
                print(f"cost of {arm}", file=sys.stderr)
                measure_cost(study, arm, folder, out)
        for seed in study.seeds:
            if not (out / "rl" / f"seed-{seed}.json").is_file():
                print(f"policy, seed {seed}", file=sys.stderr)
                train_policy(study, folder, out, seed)
    text = table(study, out)
    (out / "table.md").write_text(f"# PERL on Taskmaster-3's thumbs\n\n{text}\n")
    plot(study, out)
    print(text)


if __name__ == "__main__":
    main()
