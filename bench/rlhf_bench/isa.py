"""`--isa`: a benchmark in a process that is held to one instruction set, and its peers with it.

The native code reads RLHF_ENGINE_ISA when it is loaded. torch, oneDNN and MKL read variables of their own, once, when
torch is loaded. So the command starts again in a process where all of them are set: a machine with AVX-512 then
measures what one without it would, as far as the libraries keep to it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

VARIABLE = "RLHF_ENGINE_ISA"
_PEERS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_CAPS = {
    "portable": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512_E3"),
    "amx_bf16": ("avx512", "AVX512_CORE_AMX", "AVX512_E4"),
}
"""Names of a set in torch, oneDNN and MKL; on aarch64 there is nothing to hold them to."""
SETS = (*_CAPS, "neon", "neon_bf16")


def variables(isa: str) -> dict[str, str]:
    """Environment variables that hold a process to a set: the native code, and its peers where they can be held."""
    return {VARIABLE: isa, **dict(zip(_PEERS, _CAPS.get(isa, ()), strict=False))}


def isa_of_peers(best: str | None) -> str | None:
    """The set that this process's peers keep to: `best`, the machine's, unless they are held; None: to a mixture."""
    given = tuple(os.environ.get(name) for name in _PEERS)
    if not any(given):
        return best
    return next((isa for isa, caps in _CAPS.items() if caps == given), None)


def is_held(isa: str) -> bool:
    """Whether this process was started with the variables of a set."""
    return all(os.environ.get(name) == value for name, value in variables(isa).items())


def run_held(isa: str, argv: Sequence[str], *, program: Sequence[str] = ("-m", "rlhf_engine")) -> int:
    """Run a command of `rlhf-engine` in a process held to a set; its exit code.

    Args:
        isa: name of the set.
        argv: the command's arguments.
        program: what the interpreter runs instead, a script of bench/, say.

    Raises:
        ValueError: the native code has no such set on this machine.
    """
    from rlhf_kernels.runtime import native  # with torch, which the other process has to load anew

    if native.missing() is not None:
        raise ValueError(f"isa: expected it unset without the native extension, got {isa!r}: {native.missing()}")
    if isa not in native.isas():
        raise ValueError(f"isa: expected one of {', '.join(native.isas())}, which this machine has, got {isa!r}")
    command = [sys.executable, *program, *argv]
    return subprocess.run(command, env={**os.environ, **variables(isa)}, check=False).returncode
