"""`rlhf-engine doctor` and `bench`: which kernel backend serves which op here, and how fast each is."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rlhf_kernels.linear import packed
from rlhf_kernels.runtime import cores, kernel_table, native, registry

from rlhf_engine import __version__
from rlhf_engine.commands.common import prepare
from rlhf_engine.config import BenchConfig, DoctorConfig
from rlhf_engine.config.launch import version_of
from rlhf_engine.errors import as_request_errors
from rlhf_engine.hydra import varlen
from rlhf_engine.runs.text import summary_table

_CORE = ("torch", "transformers", "peft", "accelerate", "safetensors", "datasets", "triton")
_OPTIONAL = {
    "flash-attn": "pip install 'rlhf-engine[flash-attn]'",
    "trl": "pip install 'rlhf-engine[trl]'",
    "ray": "pip install 'rlhf-engine[ray]'",
    "bitsandbytes": "pip install 'rlhf-engine[bnb]'",
}


def doctor(config: DoctorConfig) -> int:
    """Show versions, the device and the backend of each op, or time the backends."""
    prepare("auto")
    if config.measure:
        with as_request_errors():
            measure_kernels(Path("kernel_table.json" if config.measure is True else config.measure))
    elif config.json:
        print(json.dumps(examine()))
    else:
        print_examination(examine())
    return 0


def examine() -> dict[str, Any]:
    """Versions, device, threads, extension and the backend of each op, as plain data."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "version": __version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu ({torch.get_num_threads()} threads)",
        "cpu": {**cores.find()._asdict(), "threads": native.threads()},
        "versions": {name: version_of(name) for name in _CORE},
        "native_extension": native.missing() or f"available, instruction set {native.isa()}",
        "kernel_table": {
            "source": registry.table().source,
            "machine": registry.table().machines.get(native.isa() or ""),
        },
        "packed_weights_mib": packed.budget() // 2**20,
        "ops": {
            str(dtype).removeprefix("torch."): registry.report(device, dtype)
            for dtype in (torch.float32, torch.bfloat16)
        },
        "attention": varlen.report(),
        "optional": {name: version_of(name) for name in _OPTIONAL},
    }


def print_examination(state: dict[str, Any]) -> None:
    """Print an examination for people, with how to get what is missing."""
    print(f"rlhf-engine {state['version']}, Python {state['python']}, {state['device']}")
    print(", ".join(f"{n} {v or 'missing'}" for n, v in state["versions"].items()))
    cpu = dict(state["cpu"])
    n_threads = cpu.pop("threads")
    print(f"CPU: {cores.Cores(**cpu)}, {n_threads} threads")
    print(f"native C++ extension: {state['native_extension']}")
    rows = {op: (row["auto"], state["ops"]["bfloat16"][op]["auto"]) for op, row in state["ops"]["float32"].items()}
    Console().print(summary_table("Kernel backend per op (auto)", ("float32", "bfloat16"), rows))
    table = state["kernel_table"]
    measured = f"measured on {table['machine']}" if table["machine"] else "nothing measured for this instruction set"
    print(f"kernel table: {table['source']}, {measured}")
    packed_mib = f"{state['packed_weights_mib']} MiB ({packed.ENVIRONMENT_VARIABLE})"
    print(f"packed copies of frozen weights: up to {packed_mib}")
    for dtype, ops in state["ops"].items():
        for why in dict.fromkeys(row["why"] for row in ops.values()):
            names = ", ".join(op for op, row in ops.items() if row["why"] == why)
            print(f"  {dtype} {names}: {why}")
    attention = dict(state["attention"])
    why = attention.pop("why")
    paths = ", ".join(f"{name}: {path}" for name, path in attention.items())
    print(f"packed sequences, {paths} ({why})")
    for name, version in state["optional"].items():
        print(f"{name}: {version or 'not installed, ' + _OPTIONAL[name]}")


def measure_kernels(path: Path) -> None:
    """Time our own backends here for half a minute and write a kernel table, which is used where it is named."""
    from rlhf_bench.kernel_table import measure

    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"measure: expected the path of a file in a folder that is there, got {str(path)!r}")
    made = measure()
    kernel_table.write(path, made.entries, made.machines)
    chosen = {b: sum(entry.backend == b for entry in made.entries) for b in kernel_table.CANDIDATES}
    counts = ", ".join(f"{n} times {b}" for b, n in chosen.items())
    print(f"{path}: {len(made.entries)} entries for {', '.join(made.machines)}, {counts}")
    for case in made.left_out:
        print(f"  no time left for {case}")
    print(f"used with {kernel_table.ENVIRONMENT_VARIABLE}={path}")


def bench(config: BenchConfig) -> int:
    """Measure time, memory and error of the kernels."""
    if config.isa is not None:
        from rlhf_bench.isa import is_held, run_held

        if not is_held(config.isa):
            with as_request_errors():
                return run_held(config.isa, sys.argv[1:])
    prepare("auto")
    from rlhf_bench.command import run_bench

    run_bench(config)
    return 0
