"""`rlhf-engine serve`: an OpenAI endpoint for a base, adapters on it, and the policies of a folder."""

from __future__ import annotations

import sys

from rich.console import Console

from rlhf_engine.commands.common import begin_drawing, prepare
from rlhf_engine.config import ServeConfig
from rlhf_engine.errors import ConfigError, as_request_errors


def run(config: ServeConfig) -> int:
    """Serve until Ctrl-C or SIGTERM ends the process."""
    try:
        from rlhf_engine.serve import server
    except ImportError as error:
        raise ConfigError(
            f"serve: expected the web server's packages, got {error.name} missing; pip install 'rlhf-engine[serve]'"
        ) from error
    prepare(config.kernels)
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    with as_request_errors():
        begin_drawing(config)
        serving = server.serve(config)
        address = next(serving)
    text = f"{address}/v1 serves {config.model_name_or_path}; status at {address}/ ; Ctrl-C ends it"
    console.print(text, markup=False)
    for _ in serving:
        pass
    return 0
