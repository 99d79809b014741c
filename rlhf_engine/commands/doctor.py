"""`rlhf-engine doctor`: versions, device, and which kernel backend serves which op."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlhf_engine.commands.common import as_request_errors, prepare
from rlhf_engine.errors import ConfigError

_USAGE = """usage: rlhf-engine doctor [--json | --measure [PATH]]

Versions, device, and which kernel backend serves which op and why.

  --json            the same as one JSON object
  --measure [PATH]  time the backends of every op here, and write a kernel table (default: kernel_table.json)"""


def run(argv: Sequence[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(_USAGE)
        return 0
    option, *values = argv or [""]
    if option not in ("", "--json", "--measure") or len(values) > (option == "--measure"):
        raise ConfigError(f"doctor: expected no options, --json or --measure [PATH], got {list(argv)}")
    prepare("auto")
    from rlhf_engine.commands.examine import examine, measure_kernels, print_examination

    if option == "--measure":
        with as_request_errors():
            measure_kernels(Path(values[0] if values else "kernel_table.json"))
        return 0
    found = examine()
    if option == "--json":
        print(json.dumps(found))
    else:
        print_examination(found)
    return 0
