#!/usr/bin/env python
"""An environment of OpenEnv, served here: `python examples/environments/openenv_echo.py [FOLDER]`.

pip install openenv==0.10.0

`openenv init` writes an environment that echoes messages, and gives 0.1 for each letter up to ten. uvicorn serves it on
127.0.0.1, in a session for each conversation of a time. The tiny model has seen messages of up to eleven letters. It
learns to write long ones. A minute on a CPU.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

try:
    from openenv.core import GenericEnvClient
except ModuleNotFoundError:
    raise SystemExit("pip install openenv==0.10.0") from None

SESSIONS = 160
"""More than conversations are held at once, which are `generation_batch_size`."""


class Echo:
    """A session of the server at `OPENENV_URL`, whose action is a tool."""

    def __init__(self) -> None:
        self._client, self._reward = GenericEnvClient(base_url=os.environ["OPENENV_URL"]).sync(), 0.0
        self._client.connect()
        atexit.register(self._client.close)  # before the server ends, which was there before

    def reset(self, **row: Any) -> None:
        """Begin anew: conversations follow each other in a session."""
        self._client.reset()
        self._reward = 0.0

    def echo(self, message: str) -> str:
        """Send a message.

        Args:
            message: What to send.

        Returns:
            What comes back.
        """
        result = self._client.step({"message": message})
        self._reward = float(result.reward or 0.0)
        return result.observation["echoed_message"]

    def get_reward(self) -> float:
        """The reward of the last step."""
        return self._reward


def serve(folder: Path) -> str:
    """Serve an environment that `openenv init` writes into a folder, until this process ends; its address."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "echo_env").exists():
        init = [sys.executable, "-m", "openenv.cli", "init", "echo_env", "--output-dir", "."]
        subprocess.run(init, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        app = folder / "echo_env/server/app.py"
        one, many = "max_concurrent_envs=1", f"max_concurrent_envs={SESSIONS}"  # as its comment says
        app.write_text(app.read_text(encoding="utf-8").replace(one, many), encoding="utf-8")
    words = [sys.executable, "-m", "uvicorn", "echo_env.server.app:app", "--host", "127.0.0.1", "--port", "0"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
    atexit.register(server.terminate)
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", (folder / "server.log").read_text())):
        if server.poll() is not None:
            raise SystemExit(f"the server ended: {folder / 'server.log'} says why")
        time.sleep(0.1)
    return found[0]


def demonstration(chance: random.Random) -> list[dict[str, Any]]:
    """A message of some letters."""
    from tiny import call

    message = "".join(chance.choices("abc", k=chance.randrange(1, 12)))
    talk = [{"role": "user", "content": "Say something."}, call("echo", message=message)]
    return [*talk, {"role": "tool", "content": message}, {"role": "assistant", "content": ""}]


def main(folder: Path, *, steps: int = 500, **options: Any) -> int:
    """Make the model from demonstrations in so many steps, and train it. options: those of `train`."""
    from tiny import make_model, train

    make_model(folder / "model", demonstration, [Echo.echo], ["Say something."], steps=steps)
    rows = [{"prompt": [{"role": "user", "content": "Say something."}]}] * 64
    os.environ["OPENENV_URL"] = serve(folder)
    return train(folder, f"{Path(__file__).resolve()}:Echo", rows, **options)


if __name__ == "__main__":
    from tiny import folder_of

    sys.exit(main(folder_of(__file__)))
