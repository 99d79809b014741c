#!/usr/bin/env python
"""Smoke test of a wheel in an environment of its own, from another folder than the checkout.

    python bench/release/bare.py dist/rlhf_engine-….whl [--packages SITE]

Without `--packages` the pip of this environment installs the wheel with everything that it needs from the index,
gigabytes and minutes. With it the wheel alone is installed, and what it needs comes from another environment's
site-packages. Installations in development mode are not taken along from there. The environment is removed afterwards.

Exit code: 0; 1 where a step fails, with its output; 2 for bad input.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SMOKE = Path(__file__).with_name("smoke.py")


def try_wheel(wheel: Path, packages: Path | None = None) -> str:
    """Install a wheel into a new environment and run `smoke.py` there.

    Args:
        wheel: path of the wheel.
        packages: site-packages of another environment with everything that the wheel needs; the index if None.

    Returns:
        What the smoke test printed, and the seconds of both steps.

    Raises:
        subprocess.CalledProcessError: a step failed; its `stdout` has the output.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run([sys.executable, "-m", "venv", "--without-pip", place / "bare"], place)
        python = place / "bare" / "bin" / "python"
        begin = time.monotonic()
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        run([*install, *["--no-deps"] * (packages is not None), wheel], place)
        if packages is not None:  # a line of a .pth file is added to sys.path; .pth files in there are not read
            (site,) = (place / "bare" / "lib").glob("python*/site-packages")
            (site / "others.pth").write_text(f"{packages}\n")
        installed = time.monotonic()
        output = run([python, "-I", SMOKE], place)
        return f"{output}installed in {installed - begin:.0f} s, tried in {time.monotonic() - installed:.0f} s"


def run(command: Sequence[str | Path], folder: Path) -> str:
    """Run a step outside the checkout.

    Args:
        command: its words.
        folder: where.

    Returns:
        Its output.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = list(map(str, command))
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True, check=False
    )
    done.check_returncode()
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Try the wheel that the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(description="Smoke test of a wheel in an environment of its own.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--packages", type=Path, help="site-packages with what the wheel needs")
    options = parser.parse_args(argv)
    if not (options.wheel.is_file() and options.wheel.suffix == ".whl"):
        parser.error(f"wheel: expected the path of a .whl file, got {str(options.wheel)!r}")
    if options.packages is not None and not options.packages.is_dir():
        parser.error(f"--packages: expected a folder, got {str(options.packages)!r}")
    try:
        print(try_wheel(options.wheel.resolve(), options.packages and options.packages.resolve()))
    except subprocess.CalledProcessError as error:
        print(f"bare: {error}\n{error.stdout}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
