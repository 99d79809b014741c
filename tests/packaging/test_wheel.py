"""Source distribution, wheel and images: what they hold, what is refused, and that the wheel works elsewhere.

The default lane builds without the extension and looks into the files. The long lane puts the extension of this
checkout into the wheel and tries it elsewhere; then it builds the files of a release and tries them as a user would.
"""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest
from rlhf_kernels.runtime import native

ROOT = Path(__file__).resolve().parents[2]
RELEASE = ROOT / "bench" / "release"
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
TOOLS = ROOT / ".venv" / "release" / "bin" / "python"

needs_build_requirements = pytest.mark.skipif(
    not (util.find_spec("pybind11") and util.find_spec("setuptools_scm")),
    reason="the build needs pybind11 and setuptools-scm, which pip would fetch",
)


def load(name: str) -> ModuleType:
    """A script of bench/release, as a module."""
    spec = util.spec_from_file_location(f"release_{name}", RELEASE / f"{name}.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build, bare = load("build"), load("bare")


def copied(image: Path) -> list[str]:
    """Paths that an image's build takes from the checkout."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", image.read_text(), re.MULTILINE)
    return [name for line in lines for name in line.split()]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A source distribution of what the images copy, and the wheel from it; without the extension."""
    folder = tmp_path_factory.mktemp("files")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in copied(IMAGES[0]):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(ROOT / name, target, ignore=ignored) if (ROOT / name).is_dir() else shutil.copy(
            ROOT / name, target
        )
    sdist = hook(source, "build_sdist", folder)
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, hook(unpacked, "build_wheel", folder)


def hook(source: Path, name: str, out: Path) -> Path:
    """What a build hook makes, called the way pip does without its download of the build requirements."""
    code = f"from setuptools import build_meta; print(build_meta.{name}({str(out)!r}))"
    environment = {**os.environ, "RLHF_ENGINE_NATIVE": "0", "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_RLHF_ENGINE": "1.2.3"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.strip().splitlines()[-1]


@needs_build_requirements
def test_the_source_distribution_holds_what_a_build_reads(files):
    names = build.sdist_names(files[0])
    wanted = {
        "LICENSE", "README.md", "MANIFEST.in", "setup.py", "pyproject.toml", "csrc/bindings.cpp", "csrc/cpu/simd.h",
    }  # fmt: skip
    assert wanted <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "bench/results/", ".", "build/"))]
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


@needs_build_requirements
def test_the_wheel_holds_every_file_of_the_packages_in_git(files):
    """A kind of file that nobody has named in pyproject.toml would be missing from what users install."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("needs a checkout of git")
    names = build.wheel_names(files[1])
    tracked = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    missing = [name for name in tracked if (placed := build.place(name)) is not None and placed not in names]
    assert missing == []
    assert {"rlhf_engine/py.typed", "rlhf_kernels/py.typed", "rlhf_engine/runs/page.css"} <= names


@needs_build_requirements
def test_the_metadata_of_the_wheel(files):
    with zipfile.ZipFile(files[1]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = email.message_from_bytes(archive.read(name))
        assert name.replace("METADATA", "licenses/LICENSE") in archive.namelist()
    assert (found["Name"], found["Version"], found["License-Expression"]) == ("rlhf-engine", "1.2.3", "Apache-2.0")
    assert found["Author"] == "rlhf-engine contributors"
    assert {line.split(",")[0] for line in found.get_all("Project-URL")} == {"Repository", "Issues", "Changelog"}
    assert "Typing :: Typed" in found.get_all("Classifier")
    assert found["Description-Content-Type"] == "text/markdown"
    links = re.findall(r"\]\(([^)\s]+)", found.get_payload())
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []


@needs_build_requirements
def test_a_wheel_without_the_extension_is_refused(files):
    sdist, wheel = build.sdist_names(files[0]), build.wheel_names(files[1])
    with pytest.raises(build.ReleaseError, match=r"expected one rlhf_kernels/_native\.\*\.so, got 0"):
        build.require_same_files(sdist, wheel)
    whole = wheel | {"rlhf_kernels/_native.cpython-311-x86_64-linux-gnu.so"}
    build.require_same_files(sdist, whole)
    with pytest.raises(build.ReleaseError, match=r"lacking \['rlhf_engine/runs/page.css'\], more than these \['x.py'"):
        build.require_same_files(sdist, whole - {"rlhf_engine/runs/page.css"} | {"x.py"})


def test_a_release_is_a_tag_with_a_section_in_the_changelog():
    text = "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2026-11-26\n"
    build.require_release("1.2.3", text)
    with pytest.raises(build.ReleaseError, match=r"expected a section '## \[1.2.4\]', got none"):
        build.require_release("1.2.4", text)
    for version in ("1.2.4.dev3+gabcdef", "0.1.dev1+unknown.gabcdef", "0.0+unknown", "1.2.3+d20261126"):
        with pytest.raises(build.ReleaseError, match="version: expected an unchanged checkout of a tag"):
            build.require_release(version, text)


def test_a_platform_that_is_not_proved_is_refused():
    name = "rlhf_engine-1.2.3-cp311-cp311-manylinux_2_34_x86_64.whl"
    shown = {"sym_tag": "manylinux_2_34_x86_64", "external_libs": {build.OPENMP: "/lib/libgomp.so.1"}}
    build.require_platform(name, shown)
    with pytest.raises(build.ReleaseError, match=r"expected no library of this machine but libgomp.so.1, got libz.so."):
        build.require_platform(name, {**shown, "external_libs": {"libz.so.1": "/lib/libz.so.1"}})
    for tag in ("linux_x86_64", "manylinux_2_36_x86_64"):
        with pytest.raises(build.ReleaseError, match=f"expected symbols of the tag in its name, got those of {tag}"):
            build.require_platform(name, {**shown, "sym_tag": tag})


def test_bad_input_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        bare.main([str(tmp_path / "absent.whl")])
    assert "wheel: expected the path of a .whl file, got" in capsys.readouterr().err
    broken = tmp_path / "broken-1-py3-none-any.whl"
    broken.write_bytes(b"no archive")
    assert bare.main([str(broken), "--packages", str(tmp_path)]) == 1
    assert re.search(
        r"bare: Command .* non-zero exit status 1\.\n.*Wheel 'broken'.* is invalid", capsys.readouterr().err
    )


@pytest.mark.long
@needs_build_requirements
@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.skipif(sys.platform != "linux", reason="the smoke test looks for OpenMP where Linux lists libraries")
def test_the_wheel_works_in_another_environment(files, tmp_path):
    """Everything but the extension as it was built; the packages that it needs come from this environment."""
    extension = Path(native.extension().__file__)
    wheel = Path(shutil.copy(files[1], tmp_path))
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.write(extension, f"rlhf_kernels/{extension.name}")
    printed = bare.try_wheel(wheel, Path(sysconfig.get_path("purelib")))
    assert [line.split(":")[0] for line in printed.splitlines()[:4]] == ["package", "data", "native", "commands"]
    assert "version 1.2.3" in printed


@pytest.mark.long  # compiles the extension
@pytest.mark.skipif(not TOOLS.is_file(), reason="needs the environment of `make wheel`")
def test_the_files_of_a_release_work_in_a_bare_environment(tmp_path):
    """The files as `make wheel` makes them; pip installs the wheel with everything that it needs, in minutes."""
    words = [TOOLS, RELEASE / "build.py", "--untagged", "--out", tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    assert "manylinux" in wheel.name
    assert not [name for name in build.wheel_names(wheel) if ".libs/" in name]
    assert sdist.stat().st_size < wheel.stat().st_size < 4 * 2**20
    here = bare.try_wheel(wheel, Path(sysconfig.get_path("purelib")))
    assert "native: " in here
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path, "packaging"]
    if subprocess.run(fetch, capture_output=True, check=False).returncode != 0:
        pytest.skip("built and tried beside these packages; the bare environment needs a package index")
    assert "native: " in bare.try_wheel(wheel)


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_an_image_is_built_from_what_is_there(image):
    """No image was built: what it copies exists and is not ignored, and its builds do what `files` above does."""
    names = copied(image)
    assert names == copied(IMAGES[0])
    assert all((ROOT / name).exists() for name in names)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name for name in names if not any(Path(name).is_relative_to(k) for k in kept)} == set()
    assert {k for k in kept if not any(Path(name).is_relative_to(k) for name in names)} == set()
    text = image.read_text()
    assert 'SETUPTOOLS_SCM_PRETEND_VERSION_FOR_RLHF_ENGINE="$VERSION" pip wheel --no-deps' in text
    last = text.rpartition("\nFROM ")[2]
    assert last.index("\nUSER engine\n") < last.index("\nENTRYPOINT")
    assert 'RUN rlhf-engine doctor | grep "native C++ extension: available"' in last


def test_the_page_builds_the_images_that_there_are():
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"--file (docker/\S+)", text)) == {str(image.relative_to(ROOT)) for image in IMAGES}
    arguments = set(re.findall(r"--build-arg (\w+)=", text))
    assert arguments
    assert arguments <= set(re.findall(r"^ARG (\w+)=", "\n".join(i.read_text() for i in IMAGES), re.MULTILINE))
