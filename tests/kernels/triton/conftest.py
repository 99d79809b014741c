"""Where the Triton kernels run: on a CUDA device if there is one, else in Triton's interpreter.

The interpreter has to be chosen before Triton is imported, for the whole process: `TRITON_INTERPRET=1 pytest
tests/kernels/triton`. `tests/kernels/test_triton.py` starts just that, so an ordinary run covers this folder too.

A GPU's `tl.dot` gives an element the same bits wherever its row and its column stand. The interpreter multiplies with
numpy, whose BLAS does not do so on every CPU. `ordered_product` replaces it in this folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.triton_support import INTERPRETED

HERE = Path(__file__).parent
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what cannot run here: everything without device and interpreter, `gpu` tests without a device.

    `gpu` tests, whose shapes are large, form a group: processes that share a GPU run one of them at a time.
    In the interpreter, which is slow, every value of a test's parameters is met per push; together in the long lane.
    """
    met: defaultdict[str, set[Any]] = defaultdict(set)
    cuda = torch.cuda.is_available() and not INTERPRETED
    nowhere = pytest.mark.skip(reason="needs CUDA, or TRITON_INTERPRET=1 (tests/kernels/test_triton.py sets it)")
    no_device = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if HERE not in item.path.parents:
            continue
        # numpy speaks of 0 · inf and inf − inf in places that the interpreter computes and nobody reads
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
        if item.get_closest_marker("gpu") and config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group("large"))
        if not cuda and not INTERPRETED:
            item.add_marker(nowhere)
        if not cuda and item.get_closest_marker("gpu"):
            item.add_marker(no_device)
        elif not cuda and hasattr(item, "callspec"):
            values = {(name, repr(value)) for name, value in item.callspec.params.items()}
            of_test = met[item.nodeid.split("[")[0]]
            if values <= of_test:
                item.add_marker(pytest.mark.long)
            of_test |= values


@pytest.fixture(scope="session")
def device() -> str:
    """Where a test puts its tensors."""
    return "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@pytest.fixture
def on_triton(device: str) -> Iterator[str]:
    """The Triton kernels are in use, and a test's tensors are made where they run."""
    with registry.use_backend("triton"), torch.device(device) if device == "cuda" else contextlib.nullcontext():
        yield "triton"


@pytest.fixture
def rounds_to_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds to bf16, as GPUs do, where it would cut off."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (str(source), str(target)) == ("fp32", "bf16"):
            bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)).astype(np.uint32).view(np.float32)
            x = np.where(np.isfinite(x), bits, x)
        return convert(x, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.fixture
def backend(on_triton: str) -> str:
    """What the properties in an op's own file ask for; a module here may add the paths that its kernels have."""
    return on_triton


def ordered_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a [.., M, K] @ b [.., K, N] in float64, every element summed over k = 0, 1, …

    An element depends on its row and its column alone, on no other size and on no library.
    """
    if not (np.issubdtype(a.dtype, np.floating) and np.issubdtype(b.dtype, np.floating)):
        raise TypeError(f"expected floating point operands, got {a.dtype} and {b.dtype}; bf16 has to be upcast here")
    a, b = a.astype(np.float64), b.astype(np.float64)
    total = np.zeros((*a.shape[:-1], b.shape[-1]))
    term = np.empty_like(total)
    for k in range(a.shape[-1]):
        np.multiply(a[..., :, k, None], b[..., k, None, :], out=term)
        total += term
    return total


@pytest.fixture(scope="session", autouse=True)
def interpreter_for_tests() -> Iterator[None]:
    """The interpreter with the ordered product, and `triton.language` patched once a launch."""
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        """d + a @ b, the product rounded once to the accumulator's dtype."""
        product = ordered_product(a.data, b.data).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    launch, patch_lang = interpreter.InterpretedFunction.run, interpreter._patch_lang
    patched: set[int] = set()

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        patched.clear()  # a launch undoes its patches when it ends
        return launch(kernel, *args, **options)

    def patch_lang_once(function: Any) -> Any:
        """Triton's own, once a launch for each module: at every call of a device function it is half of all time."""
        module = id(function.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        patched.add(module)
        return patch_lang(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        patch.setattr(interpreter.InterpretedFunction, "run", run)
        patch.setattr(interpreter, "_patch_lang", patch_lang_once)
        yield
