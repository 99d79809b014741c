#!/usr/bin/env python
"""Hydra-PPO beside TRL's PPO: the same work on the same random Llama, on a CPU; seconds per sample and peak memory.

    python bench/studies/vs_trl_ppo.py --trl-python /tmp/trl-env/bin/python  # full comparison, bench/results/trl_ppo/
    python bench/studies/vs_trl_ppo.py --trl-python … --arms trl-bf16 ours-bf16 --rounds 1 --steps 2 --output DIR
        # on a CPU without products of bf16, where a step of TRL's in bf16 takes minutes
    python bench/studies/vs_trl_ppo.py --quick --skip-trl  # a tiny model, without TRL, runs/vs_trl_ppo/

TRL 1.12.0, the last release with PPO, excludes what this project tests against. So it lives in an environment of its
own with the same torch, transformers and peft, which is checked before anything is measured:

    python -m venv /tmp/trl-env
    grep -v ^trl constraints.txt > /tmp/trl-constraints.txt
    /tmp/trl-env/bin/pip install -c /tmp/trl-constraints.txt torch transformers peft accelerate trl==1.12.0

(torch's wheel for CPUs only: add --extra-index-url https://download.pytorch.org/whl/cpu.)

One PPO step: sample an answer per prompt, score it (log-probs of actor and reference, values, learned reward), update
actor and critic with LoRA. Every arm runs in a process of its own, so that its peak memory is its own, and reads the
same saved weights, reward head, tokenizer and prompts; arms alternate over the rounds. Prompts have exactly
`--prompt-tokens` tokens, answers exactly `--answer-tokens`: the ids of <eos> and <pad> lie above the model's
vocabulary, so neither side can draw one.

    s/sample            headline: the batches after the first one, which warms up; time between two ends of a batch,
                        nothing left out, models loaded before. `with_first`: the first batch counted as well
    peak RSS            most memory the process ever held (VmHWM; ru_maxrss starts at the size of the parent process)
    before training     the same after imports and loading of all models, and what was held then
    tokens/s            answer tokens over the whole step's time
    others' cores       how many cores other processes, or the machine's host, kept busy meanwhile: small, or the times
                        say little (two threads that wait for each other lose far more than their share)
    gemm-*              floor: torch.mm on the shapes of this step on one frozen backbone (see `run_gemm`), and
                        nothing else: no attention, no LoRA, no vocabulary softmax, no sampling, no optimizer
    packed-*            the same with weights that MKL has packed beforehand
    *-inexact           without exact mode; *-all-scored: with it, the actor's lane scoring every answer all the same
    gemm-*-exact        the products of the passes that exact mode leaves

What is not the same on both sides stands in DIFFERENCES and in results.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlhf_bench.isa import VARIABLE, variables
from rlhf_bench.workload import PHASES, Setting
from trl_ppo_arms import Arm

# torch and transformers are imported by the worker processes: this one stays small
WORKER = Path(__file__).resolve().with_name("trl_ppo_arms.py")
ROOT = Path(__file__).resolve().parents[2]
OUTPUT, QUICK_OUTPUT = ROOT / "bench" / "results" / "trl_ppo", ROOT / "runs" / "vs_trl_ppo"
TRL_VERSION = "1.12.0"
SAME_PACKAGES = ("torch", "transformers", "peft")
PACKAGES = (*SAME_PACKAGES, "accelerate", "trl", "numpy")
DIFFERENCES = (
    "Critic and reward model: TRL takes two further models and trains the critic's whole backbone (peft_config reaches "
    "the policy only); ours are a LoRA slot and heads on the policy's backbone. Arms trl-*-lora-critic give TRL's "
    "critic the same LoRA.",
    "Old log-probs: TRL takes them from the logits of generation; ours recomputes them in the scoring pass, in exact "
    "mode for one answer in eight, which must agree to the bit.",
    "Memory allocator: ours keeps what it frees, as `rlhf-engine train` does (mallopt); TRL runs on malloc's defaults.",
    "With --trl-rollout-batch, TRL generates and scores in groups; ours always takes the whole batch at once.",
    "Gradient norm: TRL's PPO does not clip, ours computes and clips it for each role.",
    "With --mini-batches above 1, TRL still applies its gradients once per epoch only.",
)
QUICK = {
    "hidden": 64,
    "layers": 2,
    "vocab": 512,
    "lora_r": 4,
    "lora_alpha": 8,
    "batch": 4,
    "prompt_tokens": 8,
    "answer_tokens": 8,
    "micro_batch": 2,
    "steps": 2,
}
ARMS = {
    "trl-fp32": Arm(engine="trl"),
    "ours-fp32": Arm(engine="ours"),
    "ours-fp32-all-scored": Arm(engine="ours", exact=True, checks_all=True),
    "ours-fp32-inexact": Arm(engine="ours", exact=False),
    "ours-bf16": Arm(engine="ours", dtype="bfloat16"),
    "ours-bf16-all-scored": Arm(engine="ours", dtype="bfloat16", exact=True, checks_all=True),
    "ours-bf16-inexact": Arm(engine="ours", dtype="bfloat16", exact=False),
    "gemm-fp32": Arm(engine="gemm"),
    "gemm-fp32-exact": Arm(engine="gemm", exact=True),
    "gemm-bf16": Arm(engine="gemm", dtype="bfloat16"),
    "gemm-bf16-exact": Arm(engine="gemm", dtype="bfloat16", exact=True),
    "packed-fp32": Arm(engine="gemm", packed=True),
    "packed-fp32-exact": Arm(engine="gemm", packed=True, exact=True),
    "trl-fp32-lora-critic": Arm(engine="trl", lora_critic=True),
    "trl-bf16": Arm(engine="trl", dtype="bfloat16"),
    "trl-bf16-lora-critic": Arm(engine="trl", dtype="bfloat16", lora_critic=True),
}


# ---- the process that starts them --------------------------------------------------------------------------------


def versions(python: str) -> dict[str, str]:
    """Versions of `PACKAGES` and Python in the environment of an interpreter, those that are there."""
    code = (
        "import importlib.metadata, json, platform; "
        "found = {d.name.lower(): d.version for d in importlib.metadata.distributions() if d.name}; "
        "print(json.dumps({'python': platform.python_version(), **found}))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment(python, 1))
    except OSError as error:
        raise ValueError(f"trl-python: expected a Python interpreter, got {python!r}: {error}") from error
    if done.returncode != 0:
        raise ValueError(f"trl-python: expected a Python interpreter, got {python!r}: {done.stderr.strip()[-200:]}")
    found = json.loads(done.stdout)
    return {name: found[name] for name in ("python", *PACKAGES) if name in found}


def check_versions(ours: dict[str, str], trl: dict[str, str], python: str) -> None:
    """Raise ValueError unless TRL's environment holds the right TRL on this project's torch, transformers and peft."""
    if trl.get("trl") != TRL_VERSION:
        raise ValueError(
            f"trl-python: expected trl=={TRL_VERSION} in the environment of {python}, got {trl.get('trl')}"
        )
    for name in SAME_PACKAGES:
        # what follows + names the build, CPU or CUDA
        wanted, got = (v.get(name, "none").partition("+")[0] for v in (ours, trl))
        if wanted != got:
            raise ValueError(f"trl-python: expected {name}=={wanted} as in this environment, got {got}")


def environment(python: str, threads: int) -> dict[str, str]:
    """Environment variables of a worker: no network, no telemetry, so many threads."""
    changed = {"CI": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
    changed |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    found = {**os.environ, **changed}
    # the other environment must not see the engine; bench/ has the work alone, which imports nothing of it
    paths = [ROOT, ROOT / "kernels"] if python == sys.executable else []
    found["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "bench", *paths)))
    return found


def call(python: str, setting: Setting, arm: Arm | None, folder: Path) -> dict[str, Any]:
    """Run a worker in a fresh process; what it answered. Raises RuntimeError with its last words if it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        answer, request = Path(scratch) / "answer.json", Path(scratch) / "request.json"
        content = {
            "setting": dataclasses.asdict(setting),
            "arm": None if arm is None else dataclasses.asdict(arm),
            "folder": str(folder),
            "scratch": str(Path(scratch) / "run"),
            "answer": str(answer),
        }
        request.write_text(json.dumps(content))
        done = subprocess.run(
            [python, str(WORKER), str(request)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(python, setting.threads),
        )
        if done.returncode != 0:
            raise RuntimeError(f"{arm or 'prepare'} ended with status {done.returncode}:\n{done.stdout[-3000:]}")
        return {} if arm is None else json.loads(answer.read_text())


def busy_seconds() -> float | None:
    """CPU time that everybody on this machine used since it started, and what other machines on its host took."""
    file = Path("/proc/stat")
    if not file.is_file():
        return None
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, file.read_text().split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


class Others:
    """Number of cores that others kept busy while a worker ran: above a few tenths, its time is not its own."""

    def __init__(self) -> None:
        self.start = self._now()

    def cores(self) -> float | None:
        """Mean since this object was made; None where the system does not tell."""
        (wall_0, mine_0, all_0), (wall, mine, total) = self.start, self._now()
        if total is None or all_0 is None:
            return None
        return max(0.0, (total - all_0 - (mine - mine_0)) / (wall - wall_0))

    @staticmethod
    def _now() -> tuple[float, float, float | None]:
        mine = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.perf_counter(), sum(u.ru_utime + u.ru_stime for u in mine), busy_seconds()


def derive(setting: Setting, found: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one run from what its worker answered."""
    seconds = [b - a for a, b in zip(found["ends"], found["ends"][1:], strict=False)]
    if len(seconds) != setting.steps:
        raise RuntimeError(f"expected {setting.steps} batches, got {len(seconds)}")
    counted = setting.batch * (setting.steps - 1)
    per_sample = sum(seconds[1:]) / counted
    row = {
        "seconds_per_sample": per_sample,
        "seconds_per_sample_with_first": sum(seconds) / (setting.batch * setting.steps),
        "tokens_per_second": setting.answer_tokens / per_sample,
        "peak_rss_bytes": found["after"]["peak_rss"],
        "peak_rss_before_training_bytes": found["before"]["peak_rss"],
        "rss_before_training_bytes": found["before"]["rss"],
        "seconds_of_batches": seconds,
    }
    for phase in PHASES if "phases" in found else ():
        row[f"{phase}_seconds_per_sample"] = sum(times[phase] for times in found["phases"][1:]) / counted
    if "flops" in found:
        row["gflop_per_sample"] = found["flops"] / setting.batch / 1e9
    return row | {k: found[k] for k in ("reward", "trained_parameters", "threads") if k in found}


def medians(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians by arm: times of its median round, so that phases add up; medians of what is in bytes.

    Of two rounds it is the faster one.
    """
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_arm.setdefault(run["arm"], []).append(run)
    found = {}
    for arm, rows in by_arm.items():
        middle = sorted(rows, key=lambda row: row["seconds_per_sample"])[(len(rows) - 1) // 2]
        numbers = [k for k, v in middle.items() if isinstance(v, (int, float)) and k not in ("round", "threads")]
        found[arm] = {
            k: statistics.median(row[k] for row in rows) if k.endswith("_bytes") else middle[k] for k in numbers
        }
    return found


def targets(setting: Setting, found: dict[str, dict[str, float]], *, bf16_products: bool) -> list[dict[str, Any]]:
    """Targets of this comparison, and the results; none for other work or arms that were not measured.

    Args:
        setting: the work that was measured.
        found: arm → metric → value.
        bf16_products: whether the CPU multiplies bf16; elsewhere bf16 is there to save memory at the speed of fp32.
    """
    if dataclasses.replace(setting, steps=Setting.steps, seed=Setting.seed) != Setting():
        return []
    wanted = [
        ("ours-fp32", "trl-fp32", "seconds_per_sample", 1 / 1.7),
        ("ours-fp32", "trl-fp32", "peak_rss_bytes", 0.5),
        ("ours-fp32", "gemm-fp32", "seconds_per_sample", 1.35),
        ("ours-fp32", "gemm-fp32-exact", "seconds_per_sample", 1.27 if bf16_products else 1.3),
    ]
    for dtype in ("fp32", "bf16"):
        cost = 1.1 if bf16_products else 1.05
        wanted.append((f"ours-{dtype}-all-scored", f"ours-{dtype}-inexact", "seconds_per_sample", cost))
        wanted.append((f"ours-{dtype}", f"ours-{dtype}-inexact", "seconds_per_sample", 1.0))
    if bf16_products:
        wanted.append(("ours-bf16", "trl-bf16", "seconds_per_sample", 1 / 3.0))
    else:
        wanted.append(("ours-bf16", "ours-fp32", "seconds_per_sample", 1.0))
        wanted.append(("ours-bf16", "ours-fp32", "peak_rss_bytes", 0.65))
    rows = []
    for arm, other, key, limit in wanted:
        if arm not in found or other not in found:
            continue
        ratio, faster = found[arm][key] / found[other][key], limit < 1 and key == "seconds_per_sample"
        what = f"times faster than {other}" if faster else f"{key} over {other}'s"
        sign, bound, got = (">=", 1 / limit, 1 / ratio) if faster else ("<=", limit, ratio)
        rows.append({"target": f"{arm} {what}", "wanted": f"{sign} {bound:g}", "got": got, "met": ratio <= limit})
    return rows


def hold(isa: str) -> None:
    """Hold the processes to come to an instruction set. Raises ValueError for one that is not here."""
    os.environ.update(variables(isa))
    instruction_set()


def instruction_set() -> str:
    """The one that our arms will use; empty without native code. Raises ValueError if that is not here."""
    command = [sys.executable, "-c", "from rlhf_kernels.runtime import native; print(native.isa() or '')"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(sys.executable, 1))
    if done.returncode != 0:
        raise ValueError(done.stderr.strip().splitlines()[-1].rpartition(f"{VARIABLE}: ")[2])
    return done.stdout.strip()


def measure(setting: Setting, arms: list[str], rounds: int, trl_python: str | None) -> dict[str, Any]:
    """All rounds of all arms; the content of results.json."""
    pythons = {"ours": sys.executable, "gemm": sys.executable, "trl": trl_python or ""}
    found_versions = {"ours": versions(sys.executable)}
    if any(ARMS[arm].engine == "trl" for arm in arms):
        if trl_python is None:
            raise ValueError("trl_python: expected the python of an environment with TRL for its arms, got None")
        found_versions["trl"] = versions(trl_python)
        check_versions(found_versions["ours"], found_versions["trl"], trl_python)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    runs: list[dict[str, Any]] = []
    facts: dict[str, Any] = {"git_commit": None, "kernel_backends": {}}
    with tempfile.TemporaryDirectory() as folder:
        call(sys.executable, setting, None, Path(folder))
        for number in range(rounds):
            for name in arms:
                others = Others()
                found = call(pythons[ARMS[name].engine], setting, ARMS[name], Path(folder))
                row = derive(setting, found)
                runs.append({"round": number, "arm": name, "others_cores": others.cores(), **row})
                _say(runs[-1], rounds)
                if "kernel_backends" in found:
                    facts["git_commit"] = found["git_commit"]
                    facts["kernel_backends"][ARMS[name].dtype] = found["kernel_backends"]
    summary, isa = medians(runs), instruction_set()
    return {
        "started": started,
        "command": ["python", "bench/studies/vs_trl_ppo.py", *sys.argv[1:]],
        **facts,
        "versions": found_versions,
        "isa": isa,
        "setting": dataclasses.asdict(setting),
        "rounds": rounds,
        "order": arms,
        "headline": "seconds_per_sample: the batches after the first of each process; the median round",
        "differences": list(DIFFERENCES),
        "medians": summary,
        "targets": targets(setting, summary, bf16_products="bf16" in isa),
        "runs": runs,
    }


def _say(run: dict[str, Any], rounds: int) -> None:
    others = "" if run["others_cores"] is None else f", others kept {run['others_cores']:.2f} cores busy"
    text = f"{run['seconds_per_sample']:.4f} s/sample, peak {run['peak_rss_bytes'] / 1e9:.2f} GB{others}"
    print(f"round {run['round'] + 1}/{rounds}  {run['arm']}: {text}", file=sys.stderr, flush=True)


# ---- report ------------------------------------------------------------------------------------------------------


def print_tables(result: dict[str, Any]) -> None:
    """Medians by arm, then the targets."""
    from rich.console import Console

    from rlhf_engine.runs.text import summary_table

    times, sizes = {}, {}
    for name, m in result["medians"].items():
        base = result["medians"].get("trl-bf16" if ARMS[name].dtype == "bfloat16" else "trl-fp32")
        faster = None if base is None else base["seconds_per_sample"] / m["seconds_per_sample"]
        phases = [m.get(f"{phase}_seconds_per_sample") for phase in PHASES]
        times[name] = [m["seconds_per_sample"], faster, *phases, m["seconds_per_sample_with_first"]]
        share = None if base is None else m["peak_rss_bytes"] / base["peak_rss_bytes"]
        before = m["peak_rss_before_training_bytes"] / 1e9
        sizes[name] = [m["peak_rss_bytes"] / 1e9, share, before, m["tokens_per_second"], m.get("others_cores")]
    rounds = f"median of {result['rounds']} round(s)"
    console = Console()
    columns = ["s/sample", "× TRL, same dtype", *PHASES, "with first"]
    console.print(summary_table(f"seconds per sample, {rounds}", columns, times))
    columns = ["peak GB", "of TRL's, same dtype", "before", "tokens/s", "others' cores"]
    console.print(summary_table(f"memory and throughput, {rounds}", columns, sizes))
    for row in result["targets"]:
        verdict = "met" if row["met"] else "MISSED"
        console.print(f"{verdict}: {row['target']}: wanted {row['wanted']}, got {row['got']:.2f}", highlight=False)


def plot(result: dict[str, Any], png_path: Path) -> None:
    """Bars of seconds per sample, by phase where they are known, and of peak memory; a dot for each round."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = result["medians"]
    names, timed = [n for n in found if ARMS[n].engine != "gemm"], list(found)
    figure = Figure(figsize=(11, 1.6 + 0.45 * len(timed)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    colours = dict(zip(PHASES, ("C0", "C2", "C1"), strict=True))
    for name in timed:
        m, start = found[name], 0.0
        if "generate_seconds_per_sample" not in m:
            left.barh(name, m["seconds_per_sample"], color="0.6")
            continue
        for phase in PHASES:
            value, label = m[f"{phase}_seconds_per_sample"], None if phase in _labels(left) else phase
            pale = 0.45 if ARMS[name].engine == "gemm" else 1.0
            left.barh(name, value, left=start, color=colours[phase], alpha=pale, label=label if pale == 1 else None)
            start += value
    for name in names:
        m = found[name]
        right.barh(name, m["peak_rss_bytes"] / 1e9, color="C4", alpha=0.5, label=None if _labels(right) else "peak")
        before = m["peak_rss_before_training_bytes"] / 1e9
        right.barh(name, before, color="C4", label=None if len(_labels(right)) > 1 else "before training")
    for run in result["runs"]:
        left.plot(run["seconds_per_sample"], run["arm"], "k.", markersize=4)
        if run["arm"] in names:
            right.plot(run["peak_rss_bytes"] / 1e9, run["arm"], "k.", markersize=4)
    for axes, title in ((left, "seconds per sample"), (right, "peak RSS, GB")):
        axes.invert_yaxis()
        axes.set_title(title, fontsize=11)
        axes.grid(axis="x", alpha=0.25)
        axes.tick_params(labelsize=9)
        if _labels(axes):
            axes.legend(fontsize=8, frameon=False)
    s = result["setting"]
    figure.suptitle(
        f"PPO, Llama {s['hidden']}×{s['layers']}, vocabulary {s['vocab']:,}, LoRA r {s['lora_r']}, batch {s['batch']}, "
        f"{s['prompt_tokens']} + {s['answer_tokens']} tokens, {s['threads']} CPU threads",
        fontsize=10,
    )
    figure.savefig(png_path, dpi=120)


def _labels(axes: Any) -> list[str]:
    return axes.get_legend_handles_labels()[1]


# ---- the command -------------------------------------------------------------------------------------------------


def read_arguments(argv: list[str] | None) -> tuple[Setting, argparse.Namespace]:
    """Setting and the other options; ends with a message for those that do not fit together."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    fields = dataclasses.fields(Setting)
    for f in fields:
        help_text = f"{f.metadata['help']} (default {f.default}, with --quick {QUICK.get(f.name, f.default)})"
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=int, help=help_text, metavar="N")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds over all arms (default 3, with --quick 1)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="what to measure")
    parser.add_argument("--trl-python", metavar="PATH", help=f"python of an environment with trl=={TRL_VERSION}")
    parser.add_argument("--isa", help="hold the kernels and libraries of every arm to an instruction set, e.g. avx2")
    parser.add_argument("--skip-trl", action="store_true", help="measure without TRL")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that everything runs")
    parser.add_argument("--output", type=Path, help=f"folder for results.json and comparison.png (default {OUTPUT})")
    arguments = parser.parse_args(argv)
    arms = [a for a in dict.fromkeys(arguments.arms) if not (arguments.skip_trl and ARMS[a].engine == "trl")]
    if not arms:
        parser.error("--arms: expected one that is not left out by --skip-trl, got none")
    if arguments.trl_python is None and any(ARMS[a].engine == "trl" for a in arms):
        parser.error("--trl-python: expected the python of an environment with TRL, or --skip-trl, got neither")
    arguments.arms = arms
    arguments.rounds = arguments.rounds if arguments.rounds is not None else 1 if arguments.quick else 3
    if arguments.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {arguments.rounds}")
    arguments.output = arguments.output or (QUICK_OUTPUT if arguments.quick else OUTPUT)
    if arguments.output.exists() and not arguments.output.is_dir():
        parser.error(f"--output: expected a folder, got the file {str(arguments.output)!r}")
    given = {f.name: getattr(arguments, f.name) for f in fields if getattr(arguments, f.name) is not None}
    try:
        setting = Setting(**{**(QUICK if arguments.quick else {}), **given})
    except ValueError as error:
        parser.error(str(error))
    return setting, arguments


def main(argv: list[str] | None = None) -> int:
    setting, arguments = read_arguments(argv)
    try:
        if arguments.isa is not None:
            hold(arguments.isa)
        result = measure(setting, arguments.arms, arguments.rounds, arguments.trl_python)
    except ValueError as error:
        print(f"vs_trl_ppo: {error}", file=sys.stderr)
        return 2
    from rlhf_engine.runs.metrics import run_record, write_json_atomic

    record = run_record(config={}, command=(), backends={})
    machine = {k: record[k] for k in ("platform", "device_name", "cpu_cores")}
    result = {**result, "machine": machine}
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_json_atomic(arguments.output / "results.json", result)
    plot(result, arguments.output / "comparison.png")
    print_tables(result)
    print(f"\n{arguments.output / 'results.json'}, {arguments.output / 'comparison.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
