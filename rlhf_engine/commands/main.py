"""The command line, `rlhf-engine COMMAND`: see `_USAGE`.

Exit codes:
    0     done
    1     the run failed
    2     the request cannot be served; one line on standard error says why
    130   stopped by Ctrl-C; 143 by SIGTERM, 129 by SIGHUP, 138 by SIGUSR1
    141   nobody reads the output any more
"""

from __future__ import annotations

import difflib
import os
import pkgutil
import select
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

import rlhf_engine
from rlhf_engine.config.launch import launched, launched_rank
from rlhf_engine.errors import ConfigError, EngineError, RewardError, notes

_COMMANDS = {
    "demo": ("demo:run", "train and judge a small model from scratch in a minute or two on a CPU"),
    "init": ("init:run", "a folder to begin with, with data, options and a reward: init tutorial FOLDER"),
    "sft": ("training:sft", "supervised fine-tuning with a reward head: --full writes a new base, --lora a slot"),
    "reward": ("training:reward", "a reward model: --lora on a slot of the frozen base, --full for comparison"),
    "train": ("training:train", "RL: actor, critic, reference and reward on one frozen backbone"),
    "generate": ("generate:run", "answers of a model, with or without an adapter"),
    "evaluate": (
        "results:evaluate",
        "several models on the same prompts: rewards, win rates, KL, texts, and a page to compare and rate",
    ),
    "export": (
        "results:export",
        "a trained adapter or reward model for other libraries: export RUN --to merged --output_dir OUT",
    ),
    "report": ("results:report", "a page of one run or several, for a browser: report RUN… [--out report.html]"),
    "plan": ("plan:run", "how much memory each method takes, and the largest batch that fits: plan --model llama-7b"),
    "doctor": (
        "kernels:doctor",
        "versions, device, which kernel backend serves which op and why; --measure [PATH] times them here",
    ),
    "bench": ("kernels:bench", "time, memory and error of the kernels: bench [OP] [--quick]"),
}
"""Command → function of this package, which takes the arguments and returns the exit code, and its line of help."""
_ALONE = ("init", "generate", "evaluate", "export", "demo", "bench")
"""Commands that several processes would only do several times, into the same files."""
_LINES = "\n".join(f"  {name:<10} {line}" for name, (_, line) in _COMMANDS.items())
_USAGE = f"""usage: rlhf-engine COMMAND [--flag value …] [--config file.yaml] [--print_config]

first: `rlhf-engine demo` trains, judges and draws a curve here; `rlhf-engine train --help` is for a model of yours

{_LINES}

rlhf-engine COMMAND --help lists the options that are used most, --help_all all of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"rlhf-engine {rlhf_engine.__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in _COMMANDS:
        close = difflib.get_close_matches(name, _COMMANDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"expected one of {list(_COMMANDS)}"
        print(f"rlhf-engine: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    try:
        if name in _ALONE and launched() > 1:
            raise ConfigError(f"{name}: expected one process, got {launched()}; several share sft, reward and train")
        code: int = pkgutil.resolve_name(f"rlhf_engine.commands.{_COMMANDS[name][0]}")(rest)
        return code
    except KeyboardInterrupt:
        print(
            f"rlhf-engine {name}: stopped; a run that wrote checkpoints goes on with --resume_from_checkpoint auto",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError as error:
        return _BROKEN_PIPE if _reader_has_gone() else _fail(name, error, 1)
    except ConfigError as error:
        return _fail(name, error, 2)
    except (EngineError, OSError) as error:  # a disk that is full or fails, a file that cannot be read
        return _fail(name, error, 1)


_SPINS = "10000"
"""Turns in which a thread waits for the others before it sleeps: its share of a core belongs to who has work to do."""
_BROKEN_PIPE = 141  # exit code of a program that SIGPIPE ends
_THREADS_END_WITHIN = 5.0
"""Seconds that threads of other libraries or of a reward function have, once a command is done."""


def run_and_exit() -> NoReturn:
    """Run this process's command and end it with its exit code, whatever threads of others still run."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "OMP_WAIT_POLICY" not in os.environ:  # before torch loads OpenMP's library, which reads it once
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    code = 1

    def end() -> None:
        own = (threading.main_thread(), threading.current_thread())
        left = sorted(t.name for t in threading.enumerate() if not t.daemon and t not in own)
        still = ", ".join(left) or "what the libraries do at the end"
        print(f"rlhf-engine: done, but {still} still ran and was left behind", file=sys.stderr)
        sys.stdout.flush()
        os._exit(code)

    last = threading.Timer(_THREADS_END_WITHIN, end)
    last.daemon = True
    try:
        code = main()
    finally:
        last.start()
    sys.exit(code)


def _reader_has_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as after `| head`; it is then written nowhere."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush would fail as well
    return gone


def _fail(name: str, error: Exception, code: int) -> int:
    rank = f", rank {launched_rank()}" if launched() > 1 else ""
    text = "; ".join([str(error), *notes(error)])
    for cause in (error, error.__cause__):
        if isinstance(cause, RewardError) and cause.trace:
            print(cause.trace, file=sys.stderr)
    print(f"rlhf-engine {name}{rank}: {' '.join(text.split())}", file=sys.stderr)
    return code
