"""The table of every causal language model of the installed transformers, made anew."""

import subprocess
import sys
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architectures.md"


@pytest.mark.long
def test_the_table_of_architectures_is_what_the_script_finds():
    if f"transformers {transformers.__version__}," not in PAGE.read_text(encoding="utf-8"):
        pytest.skip(f"the table is of another transformers than {transformers.__version__}, which is installed")
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "tables" / "architectures.py"), "--check"], cwd=ROOT, check=False
    )
    assert done.returncode == 0
