"""Compile GPU kernels for a GPU that is not there, and read what the machine code needs.

`compile_case` makes a cubin with Triton's own ptxas; registers, spills and shared memory are read from it with the
cuobjdump that Triton ships. Not under `TRITON_INTERPRET=1`, where there is no compiler to call. `ptxas_usage` asks nvcc
about a CUDA file.

    python -m rlhf_kernels.runtime.aot [--arch 90] [--op gae] [--first] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_kernels.runtime import cuda_native
from rlhf_kernels.runtime.triton_support import INTERPRETED, AotCase

ARCHITECTURES = (80, 90, 100)
OPS = tuple(sorted(path.parent.name for path in Path(__file__).parents[1].glob("*/triton.py")))
"""Folders of ops with Triton kernels."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of one kernel on one architecture. Bytes per thread, except `shared`, which is per program."""

    op: str
    kernel: str
    case: str
    arch: int
    registers: int
    spills: int  # bytes of local memory: what does not fit into registers
    shared: int
    num_warps: int
    sums: tuple[str, ...]  # how the tiles lie that are reduced: sums of equal layouts add in the same order
    products: tuple[str, ...]  # how the results of tile products lie, by which the instruction goes
    waits: bool  # all warps meet between the loads that precede the first store and that store


def cases(op: str) -> list[AotCase]:
    """The configurations of an op's Triton kernels; empty where it has none."""
    name = f"rlhf_kernels.{op}.triton"
    if importlib.util.find_spec(name) is None:
        return []
    return importlib.import_module(name).aot_cases()


def first_cases(op: str) -> Iterator[AotCase]:
    """One configuration per kernel."""
    seen = set()
    for case in cases(op):
        if case.kernel.__name__ not in seen:
            seen.add(case.kernel.__name__)
            yield case


def compile_case(op: str, case: AotCase, arch: int) -> Resources:
    """Compile for sm_<arch>; a kernel that does not compile raises what Triton raises."""
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET=1: the interpreter compiles nothing; unset it to compile ahead of time")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    unknown = [n for n in (*case.signature, *case.constexprs, *case.divisible_by_16) if n not in names]
    missing = [n for n in names if n not in case.signature and n not in case.constexprs]
    if unknown or missing:
        raise ValueError(f"{case.name}: arguments of {case.kernel.__name__}: unknown {unknown}, missing {missing}")
    signature = {n: case.signature.get(n, "constexpr") for n in names}
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in case.divisible_by_16}
    source = ASTSource(case.kernel, signature, {(names.index(n),): v for n, v in case.constexprs.items()}, attributes)
    options = {n: getattr(case, n) for n in ("num_warps", "num_stages", "enable_fp_fusion")}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage = _resource_usage(compiled.asm["cubin"])
    return Resources(
        op=op,
        kernel=case.kernel.__name__,
        case=case.name,
        arch=arch,
        registers=usage["REG"],
        spills=usage["LOCAL"] + usage["STACK"],
        shared=compiled.metadata.shared,
        num_warps=case.num_warps,
        sums=_reduced_layouts(compiled.asm["ttgir"]),
        products=_product_layouts(compiled.asm["ttgir"]),
        waits=_waits(compiled.asm["ptx"]),
    )


def _reduced_layouts(ttgir: str) -> tuple[str, ...]:
    """Shape and layout of every fp32 operand of a reduction, each once, sorted."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    pairs = set()
    for operands in re.findall(r'"tt\.reduce".*?\}\) : \((.*?)\) -> ', ttgir, re.DOTALL):
        pairs |= {f"{shape} {layouts[name]}" for shape, name in re.findall(r"tensor<(\w+xf32), (#\w+)>", operands)}
    return tuple(sorted(pairs))


def _product_layouts(ttgir: str) -> tuple[str, ...]:
    """Shape and layout of every result of a tile product, each once, sorted."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    results = re.findall(r"= (?:tt\.dot|ttng\.warp_group_dot) .*-> tensor<(\w+), (#\w+)>", ttgir)
    return tuple(sorted({f"{shape} {layouts[name]}" for shape, name in results}))


def _waits(ptx: str) -> bool:
    """Whether a barrier of the whole program follows the last global load before the first global store."""
    before, _, _ = ptx.partition("st.global")
    return "bar.sync" in before.rpartition("ld.global")[2]


def _resource_usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", run.stdout))
    if not {"REG", "STACK", "LOCAL"} <= usage.keys():
        raise RuntimeError(f"cuobjdump -res-usage printed no resource usage: {run.stdout!r} {run.stderr!r}")
    return {name: int(value) for name, value in usage.items()}


_PTXAS = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers(?:, used \d+ barriers)?(?:, (\d+) bytes smem)?",
    re.DOTALL,
)


def ptxas_usage(unit: Path, target: str) -> dict[str, dict[str, int]]:
    """{mangled kernel: registers, stack, spills, shared} of a .cu file of csrc, for a `-gencode` target.

    Raises cuda_native.BuildError without nvcc, and for every error or warning.
    """
    flags = [*cuda_native.FLAGS, "-gencode", target, "-Xptxas", "-v", "-Werror", "all-warnings"]
    with tempfile.TemporaryDirectory() as folder:
        paths = ["-I", str(unit.parents[1]), "-c", str(unit), "-o", str(Path(folder) / "unit.o")]
        run = subprocess.run([cuda_native.find_nvcc(), *flags, *paths], capture_output=True, text=True)
    if run.returncode != 0:
        raise cuda_native.BuildError(f"{unit.name} for {target}: {run.stderr}")
    entries = _PTXAS.findall(run.stderr)
    if len(entries) != run.stderr.count("Compiling entry function"):
        raise RuntimeError(f"{unit.name} for {target}: expected the usage of every kernel from ptxas, got {run.stderr}")
    return {
        name: {
            "registers": int(registers),
            "stack": int(stack),
            "spills": int(stores) + int(loads),
            "shared": int(shared or 0),
        }
        for name, stack, stores, loads, registers, shared in entries
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_kernels.runtime.aot", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--arch", type=int, action="append", help="80, 90, 100 (default: all three)")
    parser.add_argument("--op", action="append", choices=OPS, help="default: all")
    parser.add_argument("--first", action="store_true", help="one configuration per kernel")
    parser.add_argument("--json", type=Path, help="append one object per line to this file")
    options = parser.parse_args(arguments)
    print(f"{'kernel':44}{'case':34}{'arch':>6}{'registers':>11}{'spills':>8}{'shared':>9}{'warps':>7}")
    for op in options.op or OPS:
        for case in first_cases(op) if options.first else cases(op):
            for arch in options.arch or ARCHITECTURES:
                r = compile_case(op, case, arch)
                kernel = f"{op}.{r.kernel}"
                print(f"{kernel:44}{r.case:34}{arch:6}{r.registers:11}{r.spills:8}{r.shared:9}{r.num_warps:7}")
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(asdict(r)) + "\n")


if __name__ == "__main__":
    main()
