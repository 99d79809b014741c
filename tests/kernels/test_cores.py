"""Cores that a process may use: made-up cgroups, the affinity mask, and who chooses the number of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rlhf_kernels.runtime import cores, native

from .checks import each

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
CPUSET = "32 23 0:28 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"
SLICE = "a.slice/b.scope"


def made_up(root: Path, membership: str, mounts: str, files: dict[str, str]) -> Path:
    """A root folder whose /proc names cgroups and whose other files are `files`, by path."""
    for name, content in {"proc/self/cgroup": membership, "proc/self/mountinfo": mounts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    return root


def host_with_quota(root: Path) -> Path:
    """A container that may use a core and a half of 32, each of which runs two threads."""
    files = {
        f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 32},{i % 32 + 32}" for i in range(64)
    }
    return made_up(root, "0::/", V2, {"sys/fs/cgroup/cpu.max": "150000 100000", **files})


def v1(folder: str, quota: int, period: int = 100000) -> dict[str, str]:
    """The files of a cgroup of the first version."""
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": str(period)}


NESTED, BOTH = "0::/a.slice/b.scope", f"{V1}\n{V2.replace('/sys/fs/cgroup', '/sys/fs/cgroup/unified')}"
QUOTAS = {
    "v2": ("0::/", V2, {"cpu.max": "150000 100000"}, 1.5),
    "v2-max": ("0::/", V2, {"cpu.max": "max 100000"}, None),
    "v2-top-has-no-file": ("0::/", V2, {}, None),
    "v2-nested": (NESTED, V2, {f"{SLICE}/cpu.max": "50000 100000"}, 0.5),
    "v2-parent": (NESTED, V2, {f"{SLICE}/cpu.max": "max 100000", "a.slice/cpu.max": "300000 100000"}, 3.0),
    "v2-parent-allows-less": (NESTED, V2, {f"{SLICE}/cpu.max": "4 1", "a.slice/cpu.max": "250000 100000"}, 2.5),
    "v2-child-of-it": ("0::/a.slice", V2, {f"{SLICE}/cpu.max": "50000 100000"}, None),
    "v2-own-mount": ("0::/docker/1", V2.replace(" / ", " /docker/1 "), {"cpu.max": "200000 100000"}, 2.0),
    "v2-another-s-mount": ("0::/docker/1", V2.replace(" / ", " /docker/2 "), {"cpu.max": "200000 100000"}, None),
    "v2-outside-the-mount": ("0::/../b", V2, {"cpu.max": "200000 100000"}, None),
    "blank": ("0::/", V2.replace("/sys/fs/cgroup", r"/mnt/c\040g"), {"../../../mnt/c g/cpu.max": "100000 100000"}, 1.0),
    "v1": (
        "4:cpuset:/\n3:cpu,cpuacct:/j",
        f"{CPUSET}\n{V1}",
        v1("cpu,cpuacct/j", 120000, 50000) | v1("cpuset/j", 1, 1),
        2.4,
    ),
    "v1-parent": ("3:cpu,cpuacct:/j", V1, v1("cpu,cpuacct/j", -1) | v1("cpu,cpuacct", 700000), 7.0),
    "both": ("3:cpu,cpuacct:/\n0::/", BOTH, v1("cpu,cpuacct", 300000) | {"unified/cgroup.procs": "1"}, 3.0),
}


@each("name", QUOTAS)
def test_quotas_of_made_up_cgroups(tmp_path, name):
    membership, mounts, files, quota = QUOTAS[name]
    root = made_up(tmp_path / name, membership, mounts, {f"sys/fs/cgroup/{path}": text for path, text in files.items()})
    assert cores.find(root).quota == quota


@each(
    "content",
    [
        "",
        "max",
        "150000",
        "many 100000",
        "150000 0",
        "-5 100000",
        "-5 -5",
        "1" + "0" * 400 + " 1",
        "9" * 5000 + " 1",
        "\0",
    ],
)
def test_damaged_numbers_are_no_quota(tmp_path, content):
    root = made_up(tmp_path, "0::/a", V2, {"sys/fs/cgroup/cpu.max": "500000 100000"})
    assert cores.find(root).quota == 5.0
    made_up(root, "0::/a", V2, {"sys/fs/cgroup/a/cpu.max": content})
    assert cores.find(root).quota == 5.0, "what can be read still counts"


def test_damaged_and_unreadable_files(tmp_path):
    assert cores.find(tmp_path).quota is None, "no /proc"
    made_up(tmp_path, "0\n0:\nx\n:::\n\n0::/\n", f"\n30 23\n - \n30 23 0:26 / /x - cgroup2\n{V2}", {})
    (tmp_path / "sys/fs/cgroup/cpu.max").mkdir(parents=True)
    assert cores.find(tmp_path).quota is None, "a folder in place of the file"
    (tmp_path / "sys/fs/cgroup/cpu.max").rmdir()
    (tmp_path / "sys/fs/cgroup/cpu.max").write_bytes(b"\xff\xfe 100000\n")
    assert cores.find(tmp_path).quota is None
    (tmp_path / "sys/fs/cgroup/cpu.max").write_bytes(b"200000 100000\n")
    assert cores.find(tmp_path).quota == 2.0, "the lines around were damaged, not this one"


@each(("affinity", "quota", "usable"), [(64, 1.5, 2), (64, 2.0, 2), (64, 0.1, 1), (2, 8.0, 2), (3, None, 3)])
def test_a_quota_is_rounded_up_and_the_mask_is_a_limit(affinity, quota, usable):
    assert cores.Cores(affinity, quota).usable == usable


def test_what_the_system_says_here():
    found = cores.find()
    assert found.affinity == (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    assert f"{found.affinity} core" in str(found)
    assert str(cores.Cores(64, 1.5)) == "64 cores, a quota of 1.5"


# ---- in processes of their own, as the number is torch's and process-wide --------------------------------------------

HOST = """
import json, os, sys
from pathlib import Path
import torch
from rlhf_kernels.runtime import cores, native
root, threads = Path(sys.argv[1]), int(sys.argv[2])
os.sched_getaffinity = lambda process: set(range(64))
os.cpu_count = lambda: 64
cores.ROOT = root
torch.set_num_threads(threads)  # 64: what torch takes unasked on such a host
"""


def on_host(code: str, *arguments: object) -> Any:
    """What `code` prints as the last line, in JSON, without the variables that name a number of threads."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**inherited, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_quota_limits_what_nobody_has_chosen(tmp_path):
    cases = {
        "unasked": (64, {}),
        "unasked, by MKL": (32, {}),  # a thread per core
        "below": (1, {}),
        "set_num_threads": (7, {}),
        "OMP_NUM_THREADS": (64, {"OMP_NUM_THREADS": "64"}),
        "MKL_NUM_THREADS": (64, {"MKL_NUM_THREADS": "64"}),
        "empty": (64, {"OMP_NUM_THREADS": ""}),
    }
    code = HOST + (
        "found = {}\n"
        "for name, (threads, variables) in json.loads(sys.argv[3]).items():\n"
        "    os.environ.update(variables)\n"
        "    torch.set_num_threads(threads)\n"
        "    found[name] = [native.threads(), cores.limit_threads(), torch.get_num_threads(), cores.limit_threads()]\n"
        "    for variable in variables:\n"
        "        del os.environ[variable]\n"
        "print(json.dumps(found))"
    )
    note = "2 CPU threads instead of 64: 64 cores, a quota of 1.5; OMP_NUM_THREADS chooses another number"
    assert on_host(code, host_with_quota(tmp_path), 64, json.dumps(cases)) == {
        "unasked": [2, note, 2, None],
        "unasked, by MKL": [2, note.replace("of 64: 64", "of 32: 64"), 2, None],
        "below": [1, None, 1, None],
        "set_num_threads": [7, None, 7, None],
        "OMP_NUM_THREADS": [64, None, 64, None],
        "MKL_NUM_THREADS": [64, None, 64, None],
        "empty": [2, note, 2, None],
    }


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
@pytest.mark.parametrize(("threads", "started"), [(64, 1), pytest.param(7, 6, marks=pytest.mark.long)])
def test_a_team_is_no_larger_than_the_quota(threads, started, tmp_path):
    """torch keeps its 64 here, but sizes are too small for it to start them: it is the op that starts threads."""
    code = HOST + (
        "from rlhf_kernels import linear_logprob\n"
        "hidden, weight, target = torch.ones(40, 32), torch.ones(1000, 32), torch.arange(40)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "linear_logprob(hidden, weight, target, backend='cpu')\n"
        "print(json.dumps([len(os.listdir('/proc/self/task')) - before, torch.get_num_threads()]))"
    )
    assert on_host(code, host_with_quota(tmp_path), threads) == [started, threads]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity masks")
@pytest.mark.parametrize(
    ("first", "torch_is_known"),
    [
        ("import torch\nknown = torch.get_num_threads() in cores._torch_defaults()", True),
        pytest.param("known = None", None, marks=pytest.mark.long),
    ],
    ids=["after", "before"],
)
def test_the_mask_is_a_limit_before_and_after_torch_is_loaded(first, torch_is_known):
    """And what torch takes unasked, without a mask, is known."""
    later = "from rlhf_kernels.runtime import cores, native\n"
    code = (
        f"import json, os\n{later if torch_is_known else ''}{first}\n"
        f"os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})\n{later}"
        "print(json.dumps([cores.find().affinity, native.threads(), known]))"
    )
    assert on_host(code) == [1, 1, torch_is_known]
