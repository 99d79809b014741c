"""State of the installation: versions, device, threads, extension, backend of each op, how to get what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rlhf_kernels.linear import packed
from rlhf_kernels.runtime import cores, kernel_table, native, registry

from rlhf_engine import __version__
from rlhf_engine.hydra import varlen
from rlhf_engine.runs.text import summary_table

_CORE = ("torch", "transformers", "peft", "accelerate", "safetensors", "datasets", "triton")
_OPTIONAL = {
    "flash-attn": "pip install 'rlhf-engine[flash-attn]'",
    "trl": "pip install 'rlhf-engine[trl]'",
    "ray": "pip install 'rlhf-engine[ray]'",
    "bitsandbytes": "pip install 'rlhf-engine[bnb]'",
}


def examine() -> dict[str, Any]:
    """Everything `rlhf-engine doctor` knows, as plain data."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "version": __version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu ({torch.get_num_threads()} threads)",
        "cpu": {**cores.find()._asdict(), "threads": native.threads()},
        "versions": {name: _version(name) for name in _CORE},
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
        "optional": {name: _version(name) for name in _OPTIONAL},
    }


def print_examination(found: dict[str, Any]) -> None:
    """Print an examination for people."""
    console = Console()
    console.print(f"rlhf-engine {found['version']}, Python {found['python']}, {found['device']}", highlight=False)
    console.print(", ".join(f"{n} {v or 'missing'}" for n, v in found["versions"].items()), highlight=False)
    cpu = dict(found["cpu"])
    n_threads = cpu.pop("threads")
    console.print(f"CPU: {cores.Cores(**cpu)}, {n_threads} threads", highlight=False)
    console.print(f"native C++ extension: {found['native_extension']}", highlight=False)
    rows = {op: (row["auto"], found["ops"]["bfloat16"][op]["auto"]) for op, row in found["ops"]["float32"].items()}
    console.print(summary_table("Kernel backend per op (auto)", ("float32", "bfloat16"), rows))
    table = found["kernel_table"]
    measured = f"measured on {table['machine']}" if table["machine"] else "nothing measured for this instruction set"
    console.print(f"kernel table: {table['source']}, {measured}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"packed copies of frozen weights: up to {found['packed_weights_mib']} MiB ({packed.ENVIRONMENT_VARIABLE})",
        highlight=False,
    )
    for dtype, ops in found["ops"].items():
        for why in dict.fromkeys(row["why"] for row in ops.values()):
            names = ", ".join(op for op, row in ops.items() if row["why"] == why)
            console.print(f"  {dtype} {names}: {why}", markup=False, highlight=False, soft_wrap=True)
    attention = dict(found["attention"])
    why = attention.pop("why")
    paths = ", ".join(f"{name}: {path}" for name, path in attention.items())
    console.print(f"packed sequences, {paths} ({why})", markup=False, highlight=False, soft_wrap=True)
    for name, version in found["optional"].items():
        console.print(f"{name}: {version or 'not installed, ' + _OPTIONAL[name]}", markup=False, highlight=False)


def measure_kernels(path: Path) -> None:
    """Time our own backends here for half a minute and write a kernel table, which is used where it is named.

    Raises:
        ValueError: there is no native extension, or no such folder.
    """
    from rlhf_bench.kernel_table import measure

    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"measure: expected the path of a file in a folder that is there, got {str(path)!r}")
    console = Console()
    made = measure()
    kernel_table.write(path, made.entries, made.machines)
    chosen = {b: sum(entry.backend == b for entry in made.entries) for b in kernel_table.CANDIDATES}
    counts = ", ".join(f"{n} times {b}" for b, n in chosen.items())
    console.print(f"{path}: {len(made.entries)} entries for {', '.join(made.machines)}, {counts}", highlight=False)
    for case in made.left_out:
        console.print(f"  no time left for {case}", markup=False, highlight=False)
    console.print(
        f"used with {kernel_table.ENVIRONMENT_VARIABLE}={path}", markup=False, highlight=False, soft_wrap=True
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
