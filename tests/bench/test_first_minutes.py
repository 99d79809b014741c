"""The ways in of a new user: their commands stand in the documentation, and the shortest of them leads to its curve."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.test_bench import load_script
from tests.test_docs import DOCS, blocks

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT.parent / "shared" / "models" / "stories260K"


def test_every_command_stands_in_the_documentation():
    """Word for word, whatever the model is called there."""
    study = load_script("studies/first_minutes")
    found = {line for page in DOCS for kind in ("bash", "sh") for b in blocks(page, kind) for line in b.splitlines()}
    named = {re.sub(r"(?<=--model_name_or_path )\S+", study.MODEL, line) for line in found}
    commands = [command for way in study.WAYS.values() for command in way.commands]
    assert [command for command in commands if command not in named] == []
    assert len(study.WAYS) == 6
    assert max(1 + len(way.commands) for way in study.WAYS.values()) <= 5


@pytest.mark.long
@pytest.mark.skipif(not STORIES.is_dir(), reason=f"needs {STORIES}")
def test_every_way_leads_to_its_curve(tmp_path):
    command = [sys.executable, str(ROOT / "bench" / "studies" / "first_minutes.py"), "--model", str(STORIES)]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "first_minutes.json").read_text())
    assert all(row["arrived"] for row in record["ways"].values())
    assert len((tmp_path / "first_minutes.md").read_text().splitlines()) == 2 + 6
