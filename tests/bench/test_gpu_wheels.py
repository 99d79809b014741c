"""Wheels for a GPU machine: cut, joined and unpacked beside its own packages, or refused in one line."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.tags import sys_tags
from rlhf_bench import PEERS

from tests.bench.test_bench import load_script

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("gpu/wheels")


def make_wheel(folder: Path, name: str, tag: str = "py3-none-any", files: dict[str, str] | None = None) -> Path:
    """A wheel that pip installs, of one module with its name or of other files."""
    info = f"{name}-1.0.dist-info"
    contents = dict(files or {f"{name}.py": f"NAME = {name!r}\n" + "# filling\n" * 200})
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    contents[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
    contents[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*contents, f"{info}/RECORD"))
    path = folder / f"{name}-1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in contents.items():
            archive.writestr(member, text)
    return path


def refused(capsys: pytest.CaptureFixture[str], script: ModuleType, *arguments: object) -> str:
    """The one line of a call that is refused."""
    assert script.main(list(map(str, arguments))) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith("gpu_wheels: ")
    return err


def test_the_list_has_every_peer_with_its_version(script, capsys) -> None:
    assert script.main(["list"]) == 0
    listed = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
    assert listed.items() >= {name: version for name, version in PEERS.items() if name != "flash-attn"}.items()
    assert not set(listed) & {"torch", "triton", "flash-attn"}


@pytest.mark.long
def test_wheels_are_cut_joined_and_installed_beside_the_machine_s_own(script, tmp_path, capsys) -> None:
    more = {
        "outer/inside/deep_module.py": "DEEP = 1\n",
        "outer/__init__.py": "",
        "outer.pth": "import sys, os, outer; sys.path.insert(0, os.path.join(outer.__path__[0], 'inside'))\n",
    }
    own = str(next(sys_tags()))
    made = [make_wheel(tmp_path, "aside", own), make_wheel(tmp_path, "outer", files=more)]
    pieces, target = tmp_path / "pieces", tmp_path / "deep" / "target"
    paths = script.cut(made, pieces, python=VERSION, piece=1000)
    assert len(paths) > 3
    assert all(path.stat().st_size <= 1000 for path in paths)
    assert sorted(pieces.iterdir()) == sorted([*paths, pieces / "wheels.json"])
    joined = tmp_path / "joined"
    joined.mkdir()
    assert [p.read_bytes() for p in script.join(pieces, joined)] == [p.read_bytes() for p in made]
    for _ in range(2):  # a second time in place of the first
        assert script.main(["install", "--pieces", str(pieces), "--target", str(target)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == f"export PYTHONPATH={target}:{target}/outer/inside${{PYTHONPATH:+:$PYTHONPATH}}"
    program = 'eval "$1" && "$2" -c "import aside, deep_module; print(aside.NAME, deep_module.DEEP)"'
    done = subprocess.run(
        ["bash", "-c", program, "-", line, sys.executable], capture_output=True, text=True, check=True
    )
    assert done.stdout == "aside 1\n"
    assert [path.name for path in target.parent.iterdir()] == ["target"], "nothing else is left there"
    again = script.cut(made[:1], pieces, python=VERSION)
    assert sorted(pieces.iterdir()) == sorted([*again, pieces / "wheels.json"]), "earlier pieces are gone"


def test_a_wheel_for_another_python_and_one_that_hides_the_machine_s_torch_are_refused(script, tmp_path, capsys):
    other = make_wheel(tmp_path, "aside", "cp299-cp299-manylinux_2_28_x86_64")
    script.cut([make_wheel(tmp_path, "outer"), other], tmp_path / "pieces", python="2.99")
    target = tmp_path / "elsewhere" / "target"
    error = refused(capsys, script, "install", "--pieces", tmp_path / "pieces", "--target", target)
    assert f"expected ones for Python {VERSION}" in error
    assert other.name in error
    assert not target.exists()
    assert not any(target.parent.iterdir()), "nothing half-written"
    script.cut([make_wheel(tmp_path, "torch")], tmp_path / "pieces", python=VERSION)
    error = refused(capsys, script, "install", "--pieces", tmp_path / "pieces", "--target", target)
    assert "expected none of torch and triton, got torch-1.0" in error


def test_missing_and_damaged_pieces_are_refused(script, tmp_path, capsys) -> None:
    pieces, target = tmp_path / "pieces", tmp_path / "target"
    arguments = ("install", "--pieces", pieces, "--target", target)
    assert "expected a folder that `fetch` made" in refused(capsys, script, *arguments)
    paths = script.cut([make_wheel(tmp_path, "aside")], pieces, python=VERSION, piece=1000)
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "expected wheels.tar.01 as it was cut" in refused(capsys, script, *arguments)
    paths[1].unlink()
    assert "got none called wheels.tar.01" in refused(capsys, script, *arguments)
    for wrong in ("{", "[]", json.dumps({"python": VERSION, "wheels": ["../x.whl"], "pieces": []})):
        (pieces / "wheels.json").write_text(wrong)
        assert "as `fetch` wrote it" in refused(capsys, script, *arguments)
    assert not target.exists()


def test_folders_of_others_are_left_alone(script, tmp_path, capsys) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    script.cut([make_wheel(tmp_path, "aside")], tmp_path / "pieces", python=VERSION)
    arguments = ("install", "--pieces", tmp_path / "pieces", "--target", mine)
    assert "expected a new folder" in refused(capsys, script, *arguments)
    with pytest.raises(ValueError, match="expected a new folder"):
        script.cut([tmp_path / "aside-1.0-py3-none-any.whl"], mine, python=VERSION)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "below"
    refused(capsys, script, "install", "--pieces", tmp_path / "pieces", "--target", below)
