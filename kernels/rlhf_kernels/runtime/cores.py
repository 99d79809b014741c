"""Cores that this process may use, and how many threads it starts on them.

torch starts a thread for every core of the affinity mask. It overlooks the CPU quota of a cgroup, which is what
`docker run --cpus` and the limits of Kubernetes set. Threads beyond the quota stop each other for most of every period,
so the quota, rounded up, is a limit here. A number that the user has chosen goes before it.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

ROOT = Path("/")
"""Where /proc and /sys are."""
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Cores(NamedTuple):
    """Cores that the system leaves to this process."""

    affinity: int
    """Cores that its threads may run on."""
    quota: float | None
    """Cores' worth of time that its cgroups allow it; None without a limit."""

    @property
    def usable(self) -> int:
        """Threads that are worth starting, at least one."""
        return self.affinity if self.quota is None else min(self.affinity, math.ceil(self.quota))

    def __str__(self) -> str:
        quota = "no quota" if self.quota is None else f"a quota of {self.quota:.4g}"
        return f"{self.affinity} {'core' if self.affinity == 1 else 'cores'}, {quota}"


def find(root: Path | None = None) -> Cores:
    """Read the affinity mask and the quotas of this process's cgroups and of all that these lie in.

    Args:
        root: where /proc and /sys are; `ROOT` unless given.
    """
    return Cores(len(_mask()), min(_quotas(ROOT if root is None else root), default=None))


def threads() -> int:
    """Return how many threads native code may use: torch's number, or fewer where that is more than a quota allows.

    A number that OMP_NUM_THREADS, MKL_NUM_THREADS or `torch.set_num_threads` has chosen stays. The last of these cannot
    be seen where it chose what torch takes unasked.
    """
    threads = torch.get_num_threads()
    if threads <= _usable() or any(map(os.environ.get, _VARIABLES)) or threads not in _torch_defaults():
        return threads
    return _usable()


def limit_threads() -> str | None:
    """Let torch use no more threads than native code may.

    Returns:
        One line that says so; None where nothing had to change.
    """
    before, after = torch.get_num_threads(), threads()
    if before == after:
        return None
    torch.set_num_threads(after)
    return f"{after} CPU threads instead of {before}: {find()}; OMP_NUM_THREADS chooses another number"


@functools.cache
def _usable() -> int:
    return find().usable


@functools.cache
def _torch_defaults() -> frozenset[int]:
    """Numbers of threads that torch takes unasked: MKL counts cores, other builds what runs on them at a time."""
    online = range(os.cpu_count() or 1)
    return frozenset(n for cpus in (_mask(), online) for n in (len(cpus), _physical(cpus)))


def _mask() -> Collection[int]:
    """CPUs that threads of this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _physical(cpus: Collection[int]) -> int:
    """Number of cores that these CPUs belong to."""
    folder = ROOT / "sys/devices/system/cpu"
    return len({_read(folder / f"cpu{cpu}/topology/thread_siblings_list") or cpu for cpu in cpus})


# ---- cgroups ---------------------------------------------------------------------------------------------------------


def _quotas(root: Path) -> Iterator[float]:
    """Cores' worth of time by every cgroup that limits it."""
    mounts = _read(root / "proc/self/mountinfo").splitlines()
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            for folder in _folders(root, mounts, path, "cgroup2"):
                yield from _quota(*(_read(folder / "cpu.max").split() or [""]))
        elif "cpu" in controllers.split(","):
            for folder in _folders(root, mounts, path, "cgroup"):
                yield from _quota(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _folders(root: Path, mounts: list[str], path: str, kind: str) -> Iterator[Path]:
    """Folders of a cgroup and of all that it lies in, as far as they are mounted.

    Args:
        root: folder that stands for / of the file system.
        mounts: lines of mountinfo: id, parent, device, root, mount point, options …, "-", type, source, options.
        path: the cgroup, as /proc/self/cgroup names it.
        kind: "cgroup2", or "cgroup" for the hierarchy of version 1 with the controller of CPUs.
    """
    for line in mounts:
        left, _, right = line.partition(" - ")
        place, system = left.split(), right.split()
        if len(place) < 5 or len(system) < 3 or system[0] != kind:
            continue
        if kind == "cgroup" and "cpu" not in system[2].split(","):
            continue
        top, point = (PurePosixPath(_unescaped(word)) for word in place[3:5])
        if not PurePosixPath(path).is_relative_to(top) or ".." in path.split("/"):
            continue
        below = PurePosixPath(path).relative_to(top)
        folder = root / str(point).lstrip("/")
        yield from (folder / part for part in (below, *below.parents))


def _quota(quota: str = "", period: str = "", *_: str) -> Iterator[float]:
    """The quota in cores, if there is one: "max", -1 and what is no number are none."""
    try:
        cores = int(quota) / int(period)
    except (ValueError, ArithmeticError):
        return
    if cores > 0 and int(period) > 0:
        yield cores


def _unescaped(word: str) -> str:
    r"""Mountinfo writes blanks of a path as \040, say."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), word)


def _read(path: Path) -> str:
    """Text of a file; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""
