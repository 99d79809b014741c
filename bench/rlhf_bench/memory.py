"""Peak memory of one call above its inputs; results count, inputs do not.

CUDA: `max_memory_allocated` of torch's allocator during the call, minus what was allocated before it.

CPU: the resident memory of a process, so that memory which native code gets from malloc counts as well. A server
process that has imported torch but never computed forks for every measurement. The child makes the inputs and calls the
candidate once, so that compiled code, thread stacks and workspaces that stay are there already. It gives free memory
back to the system, resets its high-water mark (`/proc/self/clear_refs`, "5") and calls again:

    peak = VmHWM after − VmRSS before

Error: the kernel counts pages per thread and adds them up late, and small blocks of the malloc arenas may be reused:
about 0.3 MiB either way, so a case on small tensors reads as noise around 0 (never negative). Memory that is reserved
and never touched does not count; neither does what a candidate kept from its first call. Blocks from 64 KiB on are
mapped and unmapped one by one (mallopt) and huge pages are off, so a block counts as what it is. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rlhf_kernels.runtime import registry

from rlhf_bench import OPS
from rlhf_bench.candidates import find
from rlhf_bench.case import Run
from rlhf_bench.ops import load_cases
from rlhf_engine.devices import CLEAR_REFS, reset_peak_memory
from rlhf_engine.runs.metrics import is_rehearsal

_M_MMAP_THRESHOLD, _PR_SET_THP_DISABLE = -3, 41
TIMEOUT_S = 60
"""Seconds that a measurement may take, which calls a candidate twice; a slower one has none."""


def peak_on_cuda(function: Run) -> int:
    """Bytes above what is allocated now; `function` has run before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def unsupported() -> str | None:
    """Reason why CPU memory cannot be measured here, or None if it can."""
    if is_rehearsal():
        return "a rehearsal measures no memory"
    if sys.platform != "linux" or not os.access(CLEAR_REFS, os.W_OK):
        return "peak memory on the CPU needs Linux and a writable /proc/self/clear_refs"
    return None


def set_up_malloc() -> None:
    """Large blocks straight from and back to the system, in pages of 4 KiB. For a process that only measures."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; musl maps large blocks anyway
        libc.mallopt(_M_MMAP_THRESHOLD, 65536)
    libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)


def peak_of_process(function: Run) -> int:
    """Growth of this process's resident memory during a call, at its highest."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    reset_peak_memory("cpu")
    before = _status("VmRSS")
    result = function()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def _status(name: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")


class MemoryServer:
    """The process that forks for measurements. A context manager."""

    def __enter__(self) -> MemoryServer:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OPENBLAS_NUM_THREADS": "1",  # numpy's pool, the only threads that importing would start
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compilers in a child that is measured
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill() if kind else self._stdin.close()
        self._process.wait()

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    def peak(self, *, op: str, size: str, dtype: torch.dtype, case: str, candidate: str, ms: float = 0.0) -> int | str:
        """Bytes, or what went wrong. ms: what a call takes; the candidate is not asked where two take too long."""
        if 2e-3 * ms > TIMEOUT_S:
            return f"left out: two calls would take {2e-3 * ms:.0f} s, more than {TIMEOUT_S} s"
        request = {
            "op": op,
            "size": size,
            "dtype": str(dtype).removeprefix("torch."),
            "case": case,
            "candidate": candidate,
            "threads": torch.get_num_threads(),
            "exact": registry.is_exact(),
        }
        self._stdin.write(json.dumps(request) + "\n")
        self._stdin.flush()
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            return "the measuring process ended"
        found = json.loads(answer)
        return found["peak_bytes"] if "peak_bytes" in found else found["error"]


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    # what the children would import one by one, seconds each
    for module in ("torch._dynamo", *(f"rlhf_bench.ops.{op}" for op in OPS)):
        importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "lora":
            importlib.import_module("peft")
        answers.write(json.dumps(_in_child(request)) + "\n")
        answers.flush()


def _in_child(request: dict[str, Any]) -> dict[str, Any]:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        try:
            answer: dict[str, Any] = {"peak_bytes": _measure(request)}
        except Exception as error:  # whatever it is, the other process has to hear of it
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        os.write(write_end, json.dumps(answer).encode())
        os._exit(0)
    os.close(write_end)
    ready, _, _ = select.select([read_end], [], [], TIMEOUT_S)
    if not ready:
        os.kill(child, signal.SIGKILL)
    text = os.read(read_end, 65536)
    os.close(read_end)
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)
    return {"error": f"no answer within {TIMEOUT_S} s" if not ready else f"the process ended with status {status}"}


def _measure(request: dict[str, Any]) -> int:
    set_up_malloc()
    torch.set_num_threads(request["threads"])
    dtype = getattr(torch, request["dtype"])
    case = next(c for c in load_cases(request["op"], request["size"], "cpu", dtype) if c.name == request["case"])
    inputs = case.make(torch.device("cpu"))
    found = find(case, inputs, "cpu", compiling=True, only=request["candidate"])
    function = (found.backends | found.baselines)[request["candidate"]]
    with registry.use_exact(request["exact"]):
        function()
        return peak_of_process(function)


if __name__ == "__main__":
    _serve()
