"""The command line: `rlhf-engine demo | sft | reward | train | generate | report | plan | doctor | bench`.

Exit codes: 0 done, 1 the run failed, 2 the request cannot be served (one line on standard error says why), 130 stopped
by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP, 138 by SIGUSR1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlhf_engine import __version__
from rlhf_engine.config import (
    BenchConfig,
    DemoConfig,
    GenerateConfig,
    PlanConfig,
    ReportConfig,
    RewardConfig,
    SFTConfig,
    TrainConfig,
    parse_config,
)
from rlhf_engine.errors import ConfigError, EngineError, RewardError, RunStopped, notes
from rlhf_engine.launch import asked_to_shard, launched, launched_rank

_USAGE = """usage: rlhf-engine COMMAND [--flag value …] [--config file.yaml] [--print_config]

  demo       train and judge a small model from scratch in a minute or two on a CPU
  sft        supervised fine-tuning with a reward head: --full writes a new base, --lora a frozen slot
  reward     a reward model: --lora on a slot of the frozen base, --full for comparison
  train      RL: actor, critic, reference and reward on one frozen backbone
  generate   answers of a model, with or without an adapter
  report     a page of one run or several, for a browser: report RUN… [--out report.html]
  plan       how much memory each method takes, and the largest batch that fits: plan --model llama-7b
  doctor     versions, device, which kernel backend serves which op and why; --measure [PATH] times them here
  bench      time, memory and error of the kernels: bench [OP] [--quick]

rlhf-engine COMMAND --help lists a command's options."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"rlhf-engine {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in _COMMANDS:
        print(f"rlhf-engine: unknown command {name!r}{_nearest(name, list(_COMMANDS))}", file=sys.stderr)
        return 2
    try:
        if name in _ALONE and launched() > 1:
            raise ConfigError(f"{name}: expected one process, got {launched()}; train is what several can share")
        return _COMMANDS[name](rest)
    except KeyboardInterrupt:
        print(
            f"rlhf-engine {name}: stopped; a run that wrote checkpoints goes on with --resume_from_checkpoint auto",
            file=sys.stderr,
        )
        return 130
    except ConfigError as error:
        return _fail(name, error, 2)
    except (EngineError, OSError) as error:  # a disk that is full or fails, a file that cannot be read
        return _fail(name, error, 1)


_THREADS_END_WITHIN = 5.0
"""Seconds that threads of other libraries or of a reward function have, once a command is done."""


def run_and_exit() -> NoReturn:
    """Run the command of this process and end it with the command's exit code.

    A thread that somebody's code has left running does not keep the process: it has a few seconds to end.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    code = 1

    def end() -> None:
        own = (threading.main_thread(), threading.current_thread())
        left = sorted(t.name for t in threading.enumerate() if not t.daemon and t not in own)
        print(f"rlhf-engine: done, but {', '.join(left)} still ran and was left behind", file=sys.stderr)
        sys.stdout.flush()
        os._exit(code)

    last = threading.Timer(_THREADS_END_WITHIN, end)
    last.daemon = True
    try:
        code = main()
    finally:
        last.start()
    sys.exit(code)


def _fail(name: str, error: Exception, code: int) -> int:
    rank = f", rank {launched_rank()}" if launched() > 1 else ""
    text = "; ".join([str(error), *notes(error)])
    print(f"rlhf-engine {name}{rank}: {' '.join(text.split())}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _as_request_errors() -> Any:
    """While a request is checked and its model is built, such an error is about the request."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError, RewardError) as error:
        raise ConfigError(str(error)) from error


def _prepare(kernels: str) -> None:
    """Process-wide settings: kernel backend, threads, memory, quiet libraries."""
    with _as_request_errors():  # the environment may name an instruction set or a table that is not there
        from rlhf_kernels import cores, registry, tuning

        tuning.check_named()
    from transformers.utils import logging

    from rlhf_engine.devices import keep_freed_memory

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    registry.set_default_backend(kernels)
    keep_freed_memory()
    note = cores.limit_threads()
    if note is not None and launched_rank() == 0:
        print(f"note: {note}", file=sys.stderr)


def _check_kernels(kernels: str, device_type: str, dtype: Any) -> None:
    """A backend asked for by name must serve every op; say at once which it does not."""
    from rlhf_kernels import registry

    if kernels == "auto":
        return
    report = {op: row for op, row in registry.report(device_type, dtype).items() if op not in _SHORT_CUTS}
    missing = [op for op, row in report.items() if row[kernels] != "available"]
    if missing:
        raise ConfigError(
            f"kernels: expected a backend that serves every op on {device_type}, {kernels!r} has no {missing}"
        )


_SHORT_CUTS = ("decode_step", "lora_decode_delta")
"""Ops that do at once what others do one by one; where a backend has none, the others run."""


def _until_stopped(name: str, run: Callable[[Callable[[], bool]], Any]) -> int:
    """Run what asks after every step whether to stop; 0, or the exit code where a signal has stopped it."""
    from rlhf_engine.training.stop import StopSignals

    with StopSignals() as signals:
        try:
            run(signals.asked)
        except RunStopped as stopped:
            if launched_rank() == 0:
                print(f"rlhf-engine {name}: {stopped}; --resume_from_checkpoint auto goes on", file=sys.stderr)
            return signals.exit_code
    return 0


def _train(argv: Sequence[str]) -> int:
    config = parse_config(TrainConfig, argv, prog="rlhf-engine train")
    _prepare(config.kernels)
    from rlhf_engine.devices import DTYPES, resolve_device
    from rlhf_engine.report import ASYNC_SHOWN, TrainingProgress
    from rlhf_engine.training.distributed import World
    from rlhf_engine.training.rl import FINAL_FOLDER, SAMPLES_FILE, RlTrainer

    with contextlib.ExitStack() as stack:
        with _as_request_errors():
            _check_kernels(config.kernels, resolve_device(config.device).type, DTYPES[config.dtype])
            if config.async_mode == "ray" and launched() > 1:  # before every rank starts generators of its own
                raise ConfigError(f"async: expected 'off' or 'replay' in a run of {launched()} processes, got 'ray'")
            if asked_to_shard():
                config = dataclasses.replace(config, shard_base=True)
        world = stack.enter_context(
            contextlib.closing(World.from_environment(config.device, timeout=config.ddp_timeout))
        )
        with _as_request_errors():
            connect = None
            if config.async_mode == "ray":
                from rlhf_engine.integrations.ray import generators_on_ray

                connect = stack.enter_context(generators_on_ray(config))
            trainer = RlTrainer(config, world, connect=connect)
        finished = world.gather(trainer.finished())[0]
        if not world.is_main:
            return 0 if finished else _until_stopped("train", lambda asked: trainer.run(stop=asked))
        if finished:
            print(f"nothing to do: {config.output_dir} is at step {trainer.state.step} of {config.max_steps}")
            return 0
        _say_what_was_left_out(trainer.reports.values())
        shown = {**TrainingProgress.SHOWN, **(ASYNC_SHOWN if config.draws_beside else {})}
        title = config.algorithm if world.size == 1 else f"{config.algorithm}, {world.size} processes"
        progress = TrainingProgress(config.max_steps, title=title, step=trainer.state.step, shown=shown)
        with progress:
            code = _until_stopped("train", lambda asked: trainer.run(progress.update, stop=asked))
    if code:
        return code
    output = Path(config.output_dir)
    samples = {"samples": output / SAMPLES_FILE} if config.num_samples else {}
    _say_where_all_is(output, {"model": output / FINAL_FOLDER}, samples)
    return 0


def _sft(argv: Sequence[str]) -> int:
    config = parse_config(SFTConfig, argv, prog="rlhf-engine sft")
    _prepare(config.kernels)
    from rlhf_engine.devices import DTYPES, resolve_device
    from rlhf_engine.report import TrainingProgress
    from rlhf_engine.training.sft import SftTrainer

    with _as_request_errors():
        _check_kernels(config.kernels, resolve_device(config.device).type, DTYPES[config.dtype])
        trainer = SftTrainer(config)
    if trainer.finished():
        print(f"nothing to do: {config.output_dir} is at step {trainer.steps_done()} of {trainer.total_steps}")
        return 0
    _say_what_was_left_out(trainer.reports)
    with TrainingProgress(trainer.total_steps, title="sft", step=trainer.state.step) as progress:
        code = _until_stopped("sft", lambda asked: trainer.run(progress.update, stop=asked))
    if code:
        return code
    _say_where_all_is(Path(config.output_dir), {"base" if config.mode == "full" else "slot": config.output_dir})
    return 0


def _reward(argv: Sequence[str]) -> int:
    config = parse_config(RewardConfig, argv, prog="rlhf-engine reward")
    _prepare(config.kernels)
    from rlhf_engine.devices import DTYPES, resolve_device
    from rlhf_engine.report import TrainingProgress, format_value
    from rlhf_engine.training.reward import RewardTrainer
    from rlhf_engine.training.run_folder import FINAL_FOLDER

    with _as_request_errors():
        _check_kernels(config.kernels, resolve_device(config.device).type, DTYPES[config.dtype])
        trainer = RewardTrainer(config)
    if trainer.finished():
        print(f"nothing to do: {config.output_dir} is at step {trainer.state.step} of {trainer.total_steps}")
        return 0
    _say_what_was_left_out(trainer.reports.values())
    share = trainer.trained_parameters / trainer.base_parameters
    print(
        f"{trainer.objective}, {len(trainer.train_set):,} rows and {len(trainer.eval_set):,} held out; training "
        f"{trainer.trained_parameters:,} parameters, {100 * share:.3g} % of the base's {trainer.base_parameters:,}",
        file=sys.stderr,
    )
    for note in trainer.notes:
        print(f"note: {note}", file=sys.stderr)
    name = trainer.best_metric
    shown = {"reward_loss": "loss", "reward_accuracy": "accuracy", f"eval/{name}": f"held-out {name}"}
    with TrainingProgress(
        trainer.total_steps, title="reward", step=trainer.state.step, shown={**shown, "tokens_per_second": "tokens/s"}
    ) as progress:
        code = _until_stopped("reward", lambda asked: trainer.run(progress.update, stop=asked))
    if code:
        return code
    result = trainer.result()
    output = Path(config.output_dir)
    kept = (
        f"{output / FINAL_FOLDER}  (step {result['final_step']}, held-out {name} {format_value(result['best_metric'])})"
    )
    _say_where_all_is(output, {"reward model": kept})
    return 0


def _say_where_all_is(output: Path, result: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> None:
    """Standard output of a run that is over."""
    from rlhf_engine.report import exit_summary
    from rlhf_engine.training.run_folder import CURVES_FILE, METRICS_FILE

    metrics = output / METRICS_FILE
    files = {"curves": output / CURVES_FILE, **(more or {}), "metrics": metrics}
    print(exit_summary(metrics, {**result, **files, "page": f"rlhf-engine report {shlex.quote(str(output))}"}))


def _say_what_was_left_out(reports: Iterable[Any]) -> None:
    """A line for each source of data of which not every row is used as it is."""
    for report in reports:
        if not report.is_plain:
            print(report.text(), file=sys.stderr)


def _generate(argv: Sequence[str]) -> int:
    config = parse_config(GenerateConfig, argv, prog="rlhf-engine generate")
    _prepare(config.kernels)
    from rlhf_kernels import tuning

    from rlhf_engine.devices import DTYPES, resolve_device
    from rlhf_engine.rollout.answer import AnswerSession
    from rlhf_engine.rollout.terminal import show_answers

    with _as_request_errors():
        _check_kernels(config.kernels, resolve_device(config.device).type, DTYPES[config.dtype])
        tuning.begin_run(exact=config.batch_invariant)
        session = AnswerSession(config)
    _say_what_was_left_out([session.report])
    return show_answers(session)


def _demo(argv: Sequence[str]) -> int:
    config = parse_config(DemoConfig, argv, prog="rlhf-engine demo")
    _prepare(config.kernels)
    import torch
    from rich.console import Console

    from rlhf_engine.demo import run_demo
    from rlhf_engine.devices import resolve_device
    from rlhf_engine.report import ASYNC_SHOWN, TrainingProgress

    _check_kernels(config.kernels, resolve_device("auto").type, torch.float32)
    # standard output belongs to the result
    console = Console(file=sys.stderr)
    with contextlib.ExitStack() as stack:
        bars: dict[str, TrainingProgress] = {}
        titles = {"sft": "supervised + reward", "rl": config.algorithm}
        shown = {**TrainingProgress.SHOWN, **(ASYNC_SHOWN if config.async_mode != "off" else {})}

        def on_step(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
            if phase not in bars:
                stack.close()  # the earlier phase's bar is done
                bars[phase] = stack.enter_context(
                    TrainingProgress(total, title=titles[phase], console=console, shown=shown)
                )
            if not bars[phase].plain or step % 10 == 0 or step == total:
                bars[phase].update(step, metrics)

        result, before, after = run_demo(config, on_step)
    _print_demo(result, before, after, config.algorithm, config.json)
    return 0


def _print_demo(result: Any, before: Any, after: Any, algorithm: str, as_json: bool) -> None:
    from rich.console import Console

    from rlhf_engine.report import summary_table

    console = Console()
    rows = {
        "learned reward": (result.reward_before, result.reward_after),
        "true score": (result.true_score_before, result.true_score_after),
        "KL to SFT, nats per answer": (0.0, result.kl),
        "wins by true preference": (None, f"{100 * result.win_rate:.1f} %"),
    }
    console.print(summary_table("Held-out prompts", ("SFT", algorithm.upper()), rows))
    memory = {
        "parameters held": (f"{result.parameters_held:,}", f"{result.parameters_four_models:,}"),
        "of these trained": (f"{result.trainable_parameters:,}", f"{result.parameters_four_models // 2:,}"),
    }
    console.print(summary_table("Memory", ("this method", "PPO with four models"), memory))
    for i in range(min(3, len(before.prompts))):
        console.print(f"\n{before.prompts[i]}", markup=False, style="bold")
        console.print(f"  SFT  {before.completions[i]}", markup=False)
        console.print(f"  RL   {after.completions[i]}", markup=False)
    console.print(
        f"\n{result.seconds:.0f} s ({result.seconds_sft:.0f} supervised, {result.seconds_rl:.0f} RL), peak memory "
        f"{result.peak_memory_bytes / 2**20:.0f} MiB; curves {result.output_dir}/rl/curves.png, "
        f"samples {result.output_dir}/rl/samples.md",
        markup=False,
        highlight=False,
    )
    if as_json:
        print(json.dumps(vars(result)))


def _doctor(argv: Sequence[str]) -> int:
    option, *values = argv or [""]
    if option not in ("", "--json", "--measure") or len(values) > (option == "--measure"):
        raise ConfigError(f"doctor: expected no options, --json or --measure [PATH], got {list(argv)}")
    _prepare("auto")
    from rlhf_engine.doctor import examine, measure_kernels, print_examination

    if option == "--measure":
        with _as_request_errors():
            measure_kernels(Path(values[0] if values else "kernel_table.json"))
        return 0
    found = examine()
    if option == "--json":
        print(json.dumps(found))
    else:
        print_examination(found)
    return 0


def _bench(argv: Sequence[str]) -> int:
    # the op may stand first, without its flag
    argv = ["--op", *argv] if argv and not argv[0].startswith("-") else argv
    config = parse_config(BenchConfig, argv, prog="rlhf-engine bench")
    if config.isa is not None:
        from rlhf_engine.bench.isa import is_held, run_held

        if not is_held(config.isa):
            with _as_request_errors():
                return run_held(config.isa, ["bench", *argv])
    _prepare("auto")
    from rlhf_engine.bench.command import run_bench

    run_bench(config)
    return 0


def _report(argv: Sequence[str]) -> int:
    # runs may stand first, without their flag
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    config = parse_config(
        ReportConfig, [*(["--run", *words] if words else []), *argv[len(words) :]], prog="rlhf-engine report"
    )
    from rlhf_engine.report.page import write_page

    print(f"page {write_page(config.run, config.out, title=config.title)}")
    return 0


def _plan(argv: Sequence[str]) -> int:
    config = parse_config(PlanConfig, argv, prog="rlhf-engine plan")
    _prepare("auto")
    from rlhf_engine.planning.report import run_plan
    from rlhf_engine.planning.time_report import run_time_plan

    with _as_request_errors():
        if config.time:
            run_time_plan(config)
        else:
            run_plan(config)
    return 0


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": _demo,
    "sft": _sft,
    "reward": _reward,
    "train": _train,
    "generate": _generate,
    "report": _report,
    "plan": _plan,
    "doctor": _doctor,
    "bench": _bench,
}


_ALONE = ("sft", "reward", "generate", "demo", "bench")
"""Commands that several processes would only do several times, into the same files."""


def _nearest(name: str, names: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; expected one of {list(names)}"


if __name__ == "__main__":
    run_and_exit()
