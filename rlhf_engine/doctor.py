"""What is here: versions, device, native extension, which backend serves which op, and how to get what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from typing import Any

import torch
from rich.console import Console
from rlhf_kernels import native, registry

from rlhf_engine import __version__
from rlhf_engine.report import summary_table

_CORE = ("torch", "transformers", "peft", "accelerate", "safetensors", "triton")
_OPTIONAL = {
    "flash-attn": "pip install 'rlhf-engine[flash-attn]'",
    "trl": "pip install 'rlhf-engine[trl]'",
    "vllm": "pip install 'rlhf-engine[vllm]'",
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
        "versions": {name: _version(name) for name in _CORE},
        "native_extension": native.missing() or f"available, instruction set {native.isa()}",
        "ops": {
            str(dtype).removeprefix("torch."): registry.report(device, dtype)
            for dtype in (torch.float32, torch.bfloat16)
        },
        "optional": {name: _version(name) for name in _OPTIONAL},
    }


def print_examination(found: dict[str, Any]) -> None:
    """For people."""
    console = Console()
    console.print(f"rlhf-engine {found['version']}, Python {found['python']}, {found['device']}", highlight=False)
    console.print(", ".join(f"{n} {v or 'missing'}" for n, v in found["versions"].items()), highlight=False)
    console.print(f"native C++ extension: {found['native_extension']}", highlight=False)
    rows = {op: (row["auto"], found["ops"]["bfloat16"][op]["auto"]) for op, row in found["ops"]["float32"].items()}
    console.print(summary_table("Kernel backend per op (auto)", ("float32", "bfloat16"), rows))
    for name, version in found["optional"].items():
        console.print(f"{name}: {version or 'not installed, ' + _OPTIONAL[name]}", markup=False, highlight=False)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
