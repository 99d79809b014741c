"""Versions come from git's tags; a clone without tags, an archive and a folder without git have one all the same."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools_scm", reason="the build needs setuptools-scm, which pip would fetch")
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("pyproject.toml", ".gitattributes", ".git_archival.txt")


def git(folder: Path, *arguments: str) -> None:
    words = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", *arguments]
    subprocess.run(words, cwd=folder, capture_output=True, check=True)


def version(folder: Path) -> str:
    """What a build of this folder calls itself."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SETUPTOOLS_SCM_")}
    words = [sys.executable, "-W", "ignore", "-m", "setuptools_scm"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def plain(tmp_path) -> Path:
    """The files that a version depends on, without git."""
    folder = tmp_path / "plain"
    folder.mkdir()
    for name in NAMES:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def clone(plain, tmp_path) -> Path:
    """The same in git, without a tag."""
    folder = tmp_path / "clone"
    shutil.copytree(plain, folder)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def archived(clone: Path, target: Path) -> Path:
    """An archive as git makes it, unpacked."""
    git(clone, "archive", "--output", str(target.with_suffix(".tar")), "HEAD")
    with tarfile.open(target.with_suffix(".tar")) as archive:
        archive.extractall(target, filter="data")
    return target


def test_without_git_also_inside_of_another_repository(plain, clone):
    assert version(plain) == "0.0+unknown"
    git(clone, "tag", "v9.9.9")
    inner = clone / "vendor" / "engine"
    inner.mkdir(parents=True)
    for name in NAMES:
        shutil.copy(ROOT / name, inner)
    assert version(inner) == "0.0+unknown"


def test_without_tags(clone, tmp_path):
    assert re.fullmatch(r"0\.1\.dev1\+unknown\.g[0-9a-f]{7,}", version(clone))
    assert version(archived(clone, tmp_path / "archive")) == "0.0"


def test_of_a_tag_and_after_it(clone, tmp_path):
    git(clone, "tag", "v1.2.3")
    assert version(clone) == version(archived(clone, tmp_path / "archive")) == "1.2.3"
    (clone / "pyproject.toml").open("a").write("\n")
    assert re.fullmatch(r"1\.2\.4\.dev0\+g[0-9a-f]{7,}\.d\d{8}", version(clone))  # what was changed is no release
    git(clone, "commit", "--all", "--quiet", "--message", "second")
    assert re.fullmatch(r"1\.2\.4\.dev1\+g[0-9a-f]{7,}", version(clone))
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{clone}", "shallow")
    assert re.fullmatch(r"0\.1\.dev1\+unknown\.g[0-9a-f]{7,}", version(tmp_path / "shallow"))
