"""Where the Triton kernels run: on a CUDA device if there is one, else in Triton's interpreter.

The interpreter has to be chosen before Triton is imported, for the whole process: `TRITON_INTERPRET=1 pytest
tests/kernels/triton`. `tests/kernels/test_triton.py` starts just that, so an ordinary run covers this folder too.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from rlhf_kernels.triton_support import INTERPRETED

HERE = Path(__file__).parent
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here: everything without device and interpreter, `gpu` tests without a device."""
    cuda = torch.cuda.is_available() and not INTERPRETED
    nowhere = pytest.mark.skip(reason="needs CUDA, or TRITON_INTERPRET=1 (tests/kernels/test_triton.py sets it)")
    no_device = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if HERE not in item.path.parents:
            continue
        if not cuda and not INTERPRETED:
            item.add_marker(nowhere)
        elif not cuda and item.get_closest_marker("gpu"):
            item.add_marker(no_device)


@pytest.fixture(scope="session")
def device() -> str:
    """Where a test puts its tensors."""
    return "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
