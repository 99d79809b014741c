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
from rlhf_engine import config as configs
from rlhf_engine.config.launch import launched, launched_rank
from rlhf_engine.config.parser import Options
from rlhf_engine.errors import ConfigError, EngineError, RewardError, as_request_errors, notes

_COMMANDS: dict[str, tuple[type[Options], str]] = {
    "demo": (configs.DemoConfig, "demo:run"),
    "init": (configs.InitConfig, "init:run"),
    "sft": (configs.SFTConfig, "training:sft"),
    "reward": (configs.RewardConfig, "training:reward"),
    "train": (configs.TrainConfig, "training:train"),
    "sweep": (configs.SweepConfig, "sweep:run"),
    "generate": (configs.GenerateConfig, "generate:run"),
    "serve": (configs.ServeConfig, "serve:run"),
    "evaluate": (configs.EvaluateConfig, "results:evaluate"),
    "export": (configs.ExportConfig, "results:export"),
    "report": (configs.ReportConfig, "results:report"),
    "plan": (configs.PlanConfig, "plan:run"),
    "doctor": (configs.DoctorConfig, "kernels:doctor"),
    "bench": (configs.BenchConfig, "kernels:bench"),
}
"""Command → its options, and the function of this package that takes them and returns the exit code."""
_ALONE = ("init", "sweep", "generate", "serve", "evaluate", "export", "demo", "bench")
"""Commands that several processes would only do several times, into the same files."""
_LINES = "\n".join(f"  {name:<10} {(cls.__doc__ or '').splitlines()[0]}" for name, (cls, _) in _COMMANDS.items())
_USAGE = f"""usage: rlhf-engine COMMAND [--flag value …] [--config file.yaml] [--print_config]

first: `rlhf-engine demo` trains, judges and draws a curve here; `rlhf-engine train --help` is for a model of yours

{_LINES}

rlhf-engine COMMAND --help lists the options that are used most, --help_all all of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed: the next file would get its number, and all that is printed
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115 - as long as the process
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
        cls, place = _COMMANDS[name]
        config = configs.parse_config(cls, rest, prog=f"rlhf-engine {name}")
        with as_request_errors():  # the environment may name an instruction set that is not there
            command = pkgutil.resolve_name(f"rlhf_engine.commands.{place}")
        code: int = command(config)
        return code
    except KeyboardInterrupt:
        print(
            f"rlhf-engine {name}: stopped; a run that wrote checkpoints goes on with --resume_from_checkpoint auto",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError as error:
        return _BROKEN_PIPE if _reader_has_gone() else fail(name, error, 1)
    except ConfigError as error:
        return fail(name, error, 2)
    except (EngineError, OSError) as error:  # a disk that is full or fails, a file that cannot be read
        return fail(name, error, 1)


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


def fail(name: str, error: Exception, code: int) -> int:
    """Say in one line on standard error what has ended a command or a run; the code."""
    rank = f", rank {launched_rank()}" if launched() > 1 else ""
    text = "; ".join([str(error), *notes(error)])
    for cause in (error, error.__cause__):
        if isinstance(cause, RewardError) and cause.trace:
            print(cause.trace, file=sys.stderr)
    print(f"rlhf-engine {name}{rank}: {' '.join(text.split())}", file=sys.stderr)
    return code
