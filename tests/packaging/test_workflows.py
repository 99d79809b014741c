"""Workflows, issue forms and community files parse, and name what exists here."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = PROJECT["project"]["urls"]["Repository"]


def steps(path: Path) -> list[dict]:
    """Steps of every job of a workflow."""
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def targets() -> set[str]:
    """Targets of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_there_are_three():
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "wheels"]


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
    for path in FORMS:
        form = yaml.safe_load(path.read_text())
        assert form["name"]
        assert form["description"]
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert all(field["type"] in ("textarea", "input", "dropdown", "checkboxes") for field in fields)
        assert all(field["attributes"]["label"] for field in fields)
        names = [field["id"] for field in fields]
        assert len(names) == len(set(names)) > 0
        assert any(field.get("validations", {}).get("required") for field in fields)


def test_a_bug_report_has_version_and_machine():
    text = (GITHUB / "ISSUE_TEMPLATE/bug.yml").read_text()
    assert "`rlhf-engine --version`" in text
    assert "`rlhf-engine doctor`" in text


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
