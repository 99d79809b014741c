"""The Triton kernels in the interpreter take minutes of one core: a process of its own runs them beside other tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEST = "test_kernels_in_the_interpreter"
_TIMEOUT_S = 1500


class InterpretedTests:
    """`pytest tests/kernels/triton` in Triton's interpreter, under way."""

    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "tests/kernels/triton", "-m", "not long and not gpu"],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            text=True,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def wait(self) -> tuple[int, str]:
        """(exit status, output), once it has ended."""
        status = self._process.wait(_TIMEOUT_S)
        self._output.seek(0)
        return status, self._output.read()

    def end(self) -> None:
        """Stop it, wherever it is."""
        self._process.kill()
        self._process.wait()
        self._output.close()
