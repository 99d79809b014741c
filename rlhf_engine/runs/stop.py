"""Signals that end a run: it ends its step and writes a checkpoint. A second one of a kind ends it at once.

They are Ctrl-C, SIGTERM, SIGHUP (the terminal is gone) and SIGUSR1 (what Slurm is often told to send before a job's
time is over). Where SIGHUP is ignored, as under nohup, it stays so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))  # Windows has two of them
_SHOW_CURSOR = b"\x1b[?25h"


class StopSignals:
    """While entered, the first signal of a kind is a request, which `asked` tells of, and the second ends the process.

    Of the main thread alone, as Python's signal handlers are.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first one, if any came."""
        self._seen: set[int] = set()
        self._before: dict[signal.Signals, Any] = {}

    def asked(self) -> bool:
        """Whether the run is to stop."""
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as a shell has it; 143, SIGTERM's, where another rank was asked."""
        return 128 + (self.received or signal.SIGTERM)

    def __enter__(self) -> StopSignals:
        handled = [s for s in _SIGNALS if s.name != "SIGHUP" or signal.getsignal(s) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._seen:
            if sys.stderr.isatty():
                _tell(_SHOW_CURSOR)  # a progress bar hides it
            os._exit(128 + number)
        self._seen.add(number)
        self.received = self.received or signal.Signals(number)
        _tell(b"\nstopping after this step, with a checkpoint; once more to stop at once\n")


def _tell(text: bytes) -> None:
    """Write to standard error, if anybody reads it: Ctrl-C ends a `| tee` as well.

    It does not print, because a signal may interrupt a print.
    """
    with contextlib.suppress(OSError):
        os.write(2, text)
