#!/usr/bin/env python
"""Registers, spills and shared memory of every GPU kernel, compiled ahead of time on a machine without a GPU.

    python bench/gpu/aot_table.py [--output bench/results/aot]

Triton kernels in every configuration for sm_80, sm_90 and sm_100 (`rlhf_kernels.runtime.aot`), CUDA kernels for sm_80
and sm_90a with nvcc where there is one. Writes kernels.jsonl, one object per kernel, configuration and architecture,
and README.md, one row per kernel and architecture with the largest numbers among its configurations.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from rlhf_kernels.runtime import aot, cuda_native

ROOT = Path(__file__).resolve().parents[2]
CUDA_TARGETS = {"80": "arch=compute_80,code=sm_80", "90a": "arch=compute_90a,code=sm_90a"}
TYPES = {"float": "float32", "double": "float64", "rlhf::BFloat16": "bfloat16", "rlhf::Float16": "float16"}
INTRODUCTION = """# GPU kernels, compiled ahead of time

`python bench/gpu/aot_table.py` on a machine without a GPU: {versions}. Largest numbers among a kernel's
configurations; bytes per thread for spills (local memory and stack), bytes per block for shared memory. Every
configuration: `kernels.jsonl`.

Configurations that spill: {spilling}. On sm_90 the tests allow none; elsewhere
the one that spills most is named, and tiles, which were chosen for sm_90, are to be chosen by measurement there.

| kernel | by | arch | configurations | registers | spills | shared | spills most |
|---|---|---|---|---|---|---|---|
"""


def triton_rows() -> list[dict[str, Any]]:
    """Every configuration of every Triton kernel on every architecture."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        aot.main(["--json", str(file)])
        return [{"by": "triton", **json.loads(line)} for line in file.read_text().splitlines()]


def cuda_rows() -> list[dict[str, Any]]:
    """Every CUDA kernel, per template arguments, as ptxas reports it."""
    found = []
    for unit in sorted((ROOT / "csrc" / "cuda").glob("*.cu")):
        for arch, target in CUDA_TARGETS.items():
            for mangled, usage in aot.ptxas_usage(unit, target).items():
                kernel, case = names(mangled)
                row = {"by": "cuda", "op": unit.stem, "kernel": kernel, "case": case, "arch": arch}
                spills = usage["stack"] + usage["spills"]
                found.append(row | {"registers": usage["registers"], "spills": spills, "shared": usage["shared"]})
    return found


def names(mangled: str) -> tuple[str, str]:
    """A kernel's name and its template arguments, as c++filt of binutils spells them."""
    run = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True)
    found = re.search(r"(\w+_kernel)(?:<([^>]*)>)?\(", run.stdout)
    if found is None:
        return mangled, ""
    arguments = (re.sub(r"^\(\w+\)", "", argument.strip()) for argument in (found[2] or "").split(","))
    return found[1], ", ".join(TYPES.get(argument, argument) for argument in arguments)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown rows, kernels in the order in which they first came."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((f"{row['op']}.{row['kernel']}", row["by"], f"sm_{row['arch']}"), []).append(row)
    lines = []
    for (kernel, by, arch), members in groups.items():
        worst = max(members, key=lambda row: row["spills"])
        registers, shared = (max(row[name] for row in members) for name in ("registers", "shared"))
        case = worst["case"] if worst["spills"] else ""
        lines.append(
            f"| `{kernel}` | {by} | {arch} | {len(members)} | {registers} | {worst['spills']} | {shared} | {case} |\n"
        )
    return "".join(lines)


def spilling(rows: list[dict[str, Any]]) -> str:
    """Number of configurations that spill, by architecture."""
    by_arch: dict[str, list[bool]] = {}
    for row in rows:
        by_arch.setdefault(str(row["arch"]), []).append(row["spills"] > 0)
    return ", ".join(f"{sum(found)} of {len(found)} on sm_{arch}" for arch, found in by_arch.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "aot")
    output: Path = parser.parse_args().output
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    rows = triton_rows()
    try:
        nvcc = cuda_native.find_nvcc()
    except cuda_native.BuildError as error:
        versions += f", no CUDA kernels ({error})"
    else:
        release = re.search(r"release [\d.]+", cuda_native.nvcc_version(nvcc))
        versions += f", nvcc {release[0] if release else 'of an unknown release'}"
        rows += cuda_rows()
    output.mkdir(parents=True, exist_ok=True)
    (output / "kernels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (output / "README.md").write_text(INTRODUCTION.format(versions=versions, spilling=spilling(rows)) + table(rows))


if __name__ == "__main__":
    main()
