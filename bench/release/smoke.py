#!/usr/bin/env python
"""Smoke test of an installed rlhf-engine: `python -I smoke.py`, from any folder but a checkout.

It runs in the environment under test and needs nothing that is not installed with the package. Every check raises
AssertionError or prints one line.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
import subprocess
import sys
from pathlib import Path


def command(*arguments: str) -> str:
    """Output of `rlhf-engine`, as the installation put it beside this interpreter."""
    program = Path(sys.executable).parent / "rlhf-engine"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"rlhf-engine {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def check_package() -> str:
    """The package is that of this environment; its public names are there, and none of them before it is used."""
    import rlhf_engine

    assert "torch" not in sys.modules
    for name in ("rlhf_engine", "rlhf_kernels", "rlhf_bench"):
        found = importlib.util.find_spec(name).origin
        assert Path(found).is_relative_to(sys.prefix), f"{name} comes from {found}, not from {sys.prefix}"
    missing = [name for name in rlhf_engine.__all__ if getattr(rlhf_engine, name) is None]
    assert not missing, missing
    assert rlhf_engine.__version__ == importlib.metadata.version("rlhf-engine")
    from rlhf_engine import HydraModel, generate  # noqa: F401

    return f"{len(rlhf_engine.__all__)} names, version {rlhf_engine.__version__}"


def check_data() -> str:
    """Files that are no Python are in the packages."""
    engine, kernels = importlib.resources.files("rlhf_engine"), importlib.resources.files("rlhf_kernels")
    wanted = [
        engine / "py.typed",
        engine / "serve/page.html",
        engine / "runs/page.css",
        engine / "runs/page.html.jinja",
        kernels / "py.typed",
    ]
    wanted += [kernels / "runtime/kernel_table.json", kernels / "csrc/cuda/gae.cu", kernels / "csrc/common/check.h"]
    if (engine / "commands/init.py").is_file():
        wanted.append(engine / "templates")
    absent = [str(path) for path in wanted if not (path.is_file() or (path.is_dir() and any(path.iterdir())))]
    assert not absent, absent
    return f"{len(wanted)} files and folders"


def check_native() -> str:
    """Native code is there, uses one OpenMP runtime with torch, and is right with one thread and with several."""
    import torch
    from rlhf_kernels import linear_logprob
    from rlhf_kernels.runtime import native

    assert native.missing() is None, native.missing()
    runtimes = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(runtimes) == 1, f"expected one OpenMP runtime, got {sorted(runtimes)}"
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator) for n in (300, 2000))
    target = torch.randint(0, 2000, (300,), generator=generator)
    exact = linear_logprob(hidden.double(), weight.double(), target, backend="reference").logprob
    reference = linear_logprob(hidden, weight, target, backend="reference").logprob
    assert (reference - exact).abs().max() < 1e-4
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        assert 1 <= native.threads() <= n_threads  # a quota of the CPU may leave fewer
        error = (linear_logprob(hidden, weight, target, backend="cpu").logprob - exact).abs().max().item()
        assert error < 1e-4, f"linear_logprob with {n_threads} threads is {error} off"
    return f"{native.isa()}, one of {len(native.isas())} instruction sets; linear_logprob at most {error:.1e} off"


def check_commands() -> str:
    """The commands answer."""
    assert command("--version") == f"rlhf-engine {importlib.metadata.version('rlhf-engine')}\n"
    assert "native C++ extension: available" in command("doctor")
    assert "--quick" in command("demo", "--help")
    return "rlhf-engine --version, doctor, demo --help"


def main() -> None:
    """Run every check."""
    for check in (check_package, check_data, check_native, check_commands):
        print(f"{check.__name__.removeprefix('check_')}: {check()}", flush=True)


if __name__ == "__main__":
    main()
