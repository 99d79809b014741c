"""Whatever is written survives a stop at each of its file operations, and goes on after kills to the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conversations.conftest import caller
from tests.reliability.jobs import JOBS
from tests.training.test_crashes import faults, pytestmark
from tests.training.test_data import write_model

__all__ = ["caller", "faults", "pytestmark"]
SEED = int(os.environ.get("RELIABILITY_SEED", "0"))
WITH_FILES = [name for name in JOBS if name not in ("grpo", "replay", "overlap", "full_ppo", "two_ranks", "talks")]
"""Jobs of which each writes files of its own kind."""
AT_RANDOM = [name for name in JOBS if not name.startswith(("export", "answers", "best_of", "evaluate"))]
KILLS = 6


def found_by(folder: Path, what: str, library: Path | None = None, **options: object) -> int:
    """How many cases the processes of jobs have survived, all of them."""
    root = Path(__file__).parents[2]
    more = {} if library is None else {"LD_PRELOAD": str(library)}
    environment = {**os.environ, **more, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), *sys.path])
    write_model(folder / "model")
    command = [sys.executable, "-m", "tests.reliability.jobs", what, str(folder), json.dumps(options)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1]).values()
    print({what: options, "seed": SEED, "wrong": [wrong for each in found for wrong in each["wrong"]]})
    assert not any(each["wrong"] for each in found)
    assert all(each["count"] for each in found)
    return sum(each["count"] for each in found)


def test_a_stop_leaves_the_old_or_the_new(tmp_path, faults, survived):
    cases = found_by(tmp_path, "points", faults, jobs=["answers", "sft_lora"], every=67, first=5)
    assert cases >= 4
    survived("crash_points", cases)


@pytest.mark.long
@pytest.mark.parametrize("job", WITH_FILES)
def test_a_stop_at_each_operation_leaves_the_old_or_the_new(tmp_path, faults, survived, job):
    cases = found_by(tmp_path, "points", faults, jobs=[job], every=1, first=0)
    assert cases >= 8
    survived("crash_points", cases)


@pytest.mark.long
@pytest.mark.parametrize("job", AT_RANDOM)
def test_killed_at_any_moment_a_job_goes_on_to_the_same_bits(tmp_path, caller, survived, job):
    if job == "talks":
        (tmp_path / "caller").symlink_to(caller)
    cases = found_by(tmp_path, "kills", jobs=[job], n=KILLS, seed=SEED)
    assert cases >= KILLS
    survived("kills", cases)
