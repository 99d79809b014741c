"""`rlhf-engine export`: a trained adapter or reward model in the format of another library."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_engine.commands.common import as_request_errors, prepare
from rlhf_engine.config import parse_config
from rlhf_engine.config.commands import ExportConfig


def run(argv: Sequence[str]) -> int:
    config = parse_config(ExportConfig, argv, prog="rlhf-engine export")
    prepare("auto")
    from rlhf_engine.tools.export import export

    with as_request_errors():
        url, notes = export(config)
    for note in notes:
        print(f"note: {note}")
    print(f"{config.to:<8} {config.output_dir}")
    if url is not None:
        print(f"pushed   {url}")
    return 0
