"""Names importable from `rlhf_engine`, all there and typed; and the repository's workflows, forms and citation."""

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import rlhf_engine

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlhf_engine"
# Pages that tell a reader to import, and rooms whose names they are; algorithms and integrations keep theirs.
PAGES = (ROOT / "docs" / "guides" / "python.md", ROOT / "README.md")
LENT = ("hydra", "rollout", "tokenizing")


def test_every_name_resolves_to_what_its_module_has():
    assert len(rlhf_engine.__all__) == len(set(rlhf_engine.__all__)) > 20
    assert set(rlhf_engine.__all__) == set(dir(rlhf_engine))
    for name, module in rlhf_engine._MODULES.items():
        assert getattr(rlhf_engine, name) is getattr(importlib.import_module(module), name)


def test_names_that_pages_import_from_the_rooms_are_here():
    for page in PAGES:
        found = re.findall(r"^from rlhf_engine\.(\w+) import (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        names = {name.strip() for module, line in found if module in LENT for name in line.split(",")}
        assert names <= set(rlhf_engine.__all__)
        assert names or page.name == "README.md"


def test_no_name_hides_a_module():
    rooms = {path.stem for path in PACKAGE.iterdir()}
    assert not rooms & set(rlhf_engine.__all__)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match=r"has no attribute 'HydraModle'; did you mean 'HydraModel'\?"):
        _ = rlhf_engine.HydraModle
    with pytest.raises(AttributeError, match=r"has no attribute 'xyzzy'$"):
        _ = rlhf_engine.xyzzy


def test_rooms_do_not_import_by_way_of_the_names():
    """A room that did could import what is above it, and tests/test_imports.py would not see it."""
    names = "|".join(name for name in rlhf_engine.__all__ if name != "__version__")
    wrong = [
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "templates"  # users' own scripts
        and re.search(rf"^\s*from rlhf_engine import .*\b({names})\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert wrong == []


def test_torch_is_imported_by_neither_the_package_nor_its_version_and_help():
    code = "import sys\nfrom rlhf_engine.commands.main import main\n"
    code += "assert main(['--version']) == main(['--help']) == 0\n"
    code += "assert not {'torch', 'transformers', 'rlhf_kernels'} & set(sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_checkout_that_is_not_installed_says_so(tmp_path):
    shutil.copytree(
        PACKAGE, tmp_path / "rlhf_engine", ignore=lambda folder, names: {*names} - {"__init__.py", "__init__.pyi"}
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rlhf_engine; print(rlhf_engine.__version__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert done.stdout.strip() == project["tool"]["setuptools_scm"]["fallback_version"] == "0.0+unknown"


GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = PROJECT["project"]["urls"]["Repository"]


def steps(path: Path) -> list[dict]:
    """Steps of every job of a workflow."""
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def targets() -> set[str]:
    """Targets of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_a_workflow_is_bounded():
    """It starts on something, may only read, and every job ends by itself and needs jobs that exist."""
    for path in WORKFLOWS:
        found = yaml.safe_load(path.read_text())
        assert found[True]  # `on` is a truth value to YAML 1.1
        assert found["permissions"] == {"contents": "read"}
        for job in found["jobs"].values():
            assert 0 < job["timeout-minutes"] <= 120
            needs = job.get("needs", [])
            assert {needs} if isinstance(needs, str) else set(needs) <= set(found["jobs"])
            assert set(job.get("permissions", {})) <= {"id-token", "pages"}


def test_actions_are_pinned_to_a_major_version():
    for path in WORKFLOWS:
        uses = [step["uses"] for step in steps(path) if "uses" in step]
        assert uses
        assert [use for use in uses if not re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", use)] == []


def test_commands_exist():
    for path in WORKFLOWS:
        commands = [step["run"] for step in steps(path) if "run" in step]
        for command in commands:
            first, *words = command.split()
            if first == "make":
                assert words[0] in targets(), command
            else:
                assert command.startswith("python -m "), command
        assert commands or path.stem == "docs"


def test_what_cibuildwheel_runs_exists():
    options = PROJECT["tool"]["cibuildwheel"]
    (script,) = re.findall(r"\{project\}/(\S+)", options["test-command"])
    assert (ROOT / script).is_file()
    versions = {build.partition("-")[0] for build in options["build"]}
    classified = [c.rpartition(":: ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert versions == {f"cp{version.replace('.', '')}" for version in classified}
    matrix = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == classified


def test_the_wheel_leaves_out_the_same_library_everywhere():
    (name,) = re.findall(r'^OPENMP = "(\S+)"$', (ROOT / "bench/release/build.py").read_text(), re.MULTILINE)
    assert f"--exclude {name} " in PROJECT["tool"]["cibuildwheel"]["repair-wheel-command"]


def test_an_issue_form_has_what_a_form_needs():
    for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        fields = [field for field in form.get("body", []) if field["type"] != "markdown"]
        assert path.name == "config.yml" or (form["name"] and form["description"] and fields)
        assert all(field["attributes"]["label"] for field in fields)
        assert len({field["id"] for field in fields}) == len(fields)
    for command in ("rlhf-engine --version", "rlhf-engine doctor"):
        assert f"`{command}`" in (GITHUB / "ISSUE_TEMPLATE/bug.yml").read_text()


def test_the_citation_is_complete():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(found)
    assert found["authors"] == PROJECT["project"]["authors"]
    assert found["license"] == PROJECT["project"]["license"]
    assert found["repository-code"] == REPOSITORY


def test_there_is_one_address_of_the_repository():
    owner = REPOSITORY.rpartition("/")[0]
    pages = [path for path in GITHUB.rglob("*") if path.is_file()]
    pages += [ROOT / name for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", "README.md", "CONTRIBUTING.md")]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docker").iterdir()]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    addresses = re.findall(r"https://github\.com/rlhf-engine[\w/.-]*", text)
    assert addresses
    assert [a for a in addresses if a != owner and not f"{a}/".startswith(f"{REPOSITORY}/")] == []
    for name in re.findall(rf"{re.escape(REPOSITORY)}/blob/main/([\w./-]+)", text):
        assert (ROOT / name).is_file(), name
