"""Lines that a command prints before a run's first step: memory that is certain, and the time of a run that is long.

Memory is counted on what is built. Time comes from a trial: parts of the next step on a few of its rows, with the
built model, none of which changes a weight or a random number. A part's seconds lie on a line:

    seconds = calls · c + units · u        units: tokens, or rows of a decoding step; c, u from one row and from several

Parts of a step of RL, with N answers of T tokens, the longest that are allowed:

    prefill    the prompts                        decoding   T − 1 steps of the rows alive
    scoring    all roles                          update     epochs · lanes trained · forward and backward of the actor
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from rlhf_engine.devices import is_out_of_memory, release_memory
from rlhf_engine.errors import MemoryLimitError
from rlhf_engine.hydra import HydraModel, LmLoss, PackedBatch
from rlhf_engine.hydra.kv_cache import BLOCK
from rlhf_engine.planning.fit import GATHERED_BLOCKS
from rlhf_engine.policy.adamw import gradient_dtype, state_layout
from rlhf_engine.rollout import SamplingConfig
from rlhf_engine.rollout.steps.graph import WORTH
from rlhf_engine.runs.progress import LONG_S, how_long
from rlhf_engine.runs.text import format_duration
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.run import Run, SupervisedRun
from rlhf_engine.training.update import answers_by_minibatch

SOON_S = 20.0
"""Seconds within which two steps, after which a run tells its time anyway, need no prediction."""
_TRIAL_S = 0.5
"""Seconds that a part's trial of several rows may take; one row is tried in any case."""
_CALLS = 5
"""Calls of a part, of which the fastest counts, as far as they fit into these seconds."""
_ROLES = ("actor", "reference", "critic", "reward")


def before_run(trainer: Run[Any]) -> Iterator[str]:
    """Tell what a run will need, line by line as it becomes known.

    Args:
        trainer: a run that has been made ready, on the main rank.

    Yields:
        Memory; a warning where what is to come is more than is free; the time of a long run, after a trial.
    """
    memory = Memory.of(trainer)
    each = f" (each of {trainer.world.size} processes)" if trainer.world.size > 1 else ""
    yield memory.line() + each
    if memory.warning():
        yield memory.warning()
    if isinstance(trainer, RlTrainer) and trainer.config.shard_base == "always" and _draws_here(trainer):
        yield (
            "note: answers are drawn by the model's own forward, for which blocks are gathered as they run (shard_base "
            "always): native decoding steps and CUDA graphs read a base where all of it lies"
        )
    steps = trainer.total_steps - trainer.state.step
    try:
        seconds = predict_step(trainer, steps)
    except (RuntimeError, MemoryError, MemoryLimitError) as error:
        if not is_out_of_memory(error) and not isinstance(error, MemoryLimitError):
            raise
        trainer.model.zero_grad(set_to_none=True)
        release_memory(trainer.model.device)
        yield "warning: a trial of a few rows ran out of memory, so that the run's time is not predicted"
        return
    if seconds is not None and steps * seconds > LONG_S:
        yield f"predicted: {how_long(steps * seconds, steps)}; {format_duration(seconds)} a step{_assumed(trainer)}"


def _assumed(trainer: Run[Any]) -> str:
    """Name the assumptions of a prediction."""
    if not isinstance(trainer, RlTrainer):
        return ""
    length = trainer.config.max_completion_length
    return f" if every answer has {length} tokens; reward functions and evaluations come on top"


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a run on one device that are certain before its first step."""

    held: dict[str, int]
    """By part, in memory already."""
    to_come: dict[str, int]
    """By part, allocated in the first step."""
    free: int | None
    """Free bytes of the device, or of the machine for a CPU; None where the system does not say."""
    device_type: str

    @classmethod
    def of(cls, trainer: Run[Any]) -> Memory:
        """Count what a run holds and will hold, apart from activations.

        Args:
            trainer: a run that has been made ready.

        Returns:
            The bytes of this process.
        """
        model, adamw = trainer.model, trainer.optimizer.adamw
        backbones = [model.backbone(name) for name in model.backbones]
        base = [p for b in backbones for _, p in b.base_parameters()]
        frozen, trained_base = ([p for p in base if p.requires_grad == flag] for flag in (False, True))
        slots = [p for b in backbones for p in b.slots.parameters()]
        held = {
            "frozen weights": _bytes(frozen),
            "trained weights": _bytes(trained_base),
            "adapters and heads": _bytes([*slots, *model.heads.parameters()]),
        }
        optim = trainer.config.optim
        trained = {name: p for name, p in adamw.parameters.items() if p.requires_grad}  # a head's bias may stay
        layouts = {name: state_layout(optim, p.shape, p.dtype) for name, p in trained.items()}
        state = {name: sum(s.numel() * d.itemsize for s, d in fields.values()) for name, fields in layouts.items()}
        to_come = {
            "gradients": sum(p.numel() * gradient_dtype(optim, p.dtype).itemsize for p in trained.values()),
            "optimizer state": sum(n for name, n in state.items() if not adamw.has_stepped(name)),
            "KV cache": _cache_bytes(trainer) if isinstance(trainer, RlTrainer) else 0,
            "gathered weights": _gathered_bytes(trainer) if isinstance(trainer, RlTrainer) else 0,
        }
        held["optimizer state"] = sum(state.values()) - to_come["optimizer state"]
        return cls(held=held, to_come=to_come, free=_free_bytes(model.device), device_type=model.device.type)

    def line(self) -> str:
        """Write all parts into one line.

        Returns:
            The line.
        """
        held, to_come = (
            ", ".join(f"{_size(n)} {part}" for part, n in parts.items() if n) for parts in (self.held, self.to_come)
        )
        free = "" if self.free is None else f"; {_size(self.free)} free"
        packed = " and packed weights" if self.device_type == "cpu" else ""
        return f"memory: {held}; the first step adds {to_come}, activations{packed}{free}"

    def warning(self) -> str:
        """Name the option to lower where the first step needs more than is free.

        Returns:
            The line; empty where nothing is certain.
        """
        needed = sum(self.to_come.values())
        if self.free is None or needed <= self.free:
            return ""
        largest = max(self.to_come, key=self.to_come.__getitem__)
        advice = {
            "gradients": "train adapters, or lower --lora_r",
            "optimizer state": "train adapters, lower --lora_r, or choose another --optim",
            "gathered weights": "gather few at a time by --shard_base always",
            "KV cache": "bound it by --kv_cache_memory, or lower --generation_batch_size or --max_completion_length",
        }
        return (
            f"warning: the first step needs {_size(needed)} beside activations, {_size(self.free)} are free; most is "
            f"{largest}: {advice[largest]}"
        )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that this process holds of some tensors, each memory once."""
    held = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum(x.numel() * x.element_size() for x in {x.data_ptr(): x for x in held}.values())


def _size(n: int) -> str:
    unit, name = (1e9, "GB") if n >= 1e8 else (1e6, "MB") if n >= 1e5 else (1e3, "kB")
    return f"{n / unit:.3g} {name}"


def _cache_bytes(trainer: RlTrainer) -> int:
    """Keys and values of the next step's answers; 0 where other processes draw them."""
    config = trainer.config
    if not _draws_here(trainer):
        return 0
    prompts = trainer.next_prompts().prompts
    rows = sorted((-(-(len(p) + config.max_completion_length - 1) // BLOCK) for p in prompts), reverse=True)
    shared = sum(len(prompt) // BLOCK * (n - 1) for prompt, n in Counter(prompts).items())
    blocks = min(sum(rows) - shared, sum(rows[: _rows_alive(trainer, len(rows))]))
    needed: int = blocks * BLOCK * trainer.model.role_backbone("actor").cache_bytes_per_position
    return needed if config.cache_bytes is None else min(needed, config.cache_bytes)


def _gathered_bytes(trainer: RlTrainer) -> int:
    """Most bytes of a base in shares that are gathered at a time; 0 where each process has all of it anyway."""
    if not trainer.config.shard_base:
        return 0
    backbones = [trainer.model.backbone(name) for name in trainer.model.backbones]
    whole = _bytes(p for backbone in backbones for _, p in backbone.base_parameters())
    blocks = [_bytes(block.parameters()) for backbone in backbones for block in backbone.blocks]
    few = min(whole, whole - sum(blocks) + GATHERED_BLOCKS * max(blocks))
    return few if trainer.config.shard_base == "always" else whole


def _draws_here(trainer: RlTrainer) -> bool:
    """Whether this process draws all of its answers between updates."""
    return trainer.config.rollout_backend == "local" and not trainer.config.is_async


def _rows_alive(trainer: RlTrainer, n: int) -> int:
    return min(n, trainer.config.max_rows or n)


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = []
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    most, used = group / "memory.max", group / "memory.current"
    if most.is_file() and used.is_file() and most.read_text().strip() != "max":
        found.append(max(0, int(most.read_text()) - int(used.read_text())))
    return min(found, default=None)


# ---- time ------------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """Seconds of a part of a step as a function of its size."""

    call: float
    """Seconds of a call of any size."""
    unit: float
    """Seconds of a unit more."""

    def seconds(self, calls: float, units: float) -> float:
        """Compute the seconds of some calls.

        Args:
            calls: number of calls.
            units: units of all calls together.

        Returns:
            Seconds.
        """
        return calls * self.call + units * self.unit

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> Line:
        """Draw the line through two measurements.

        Args:
            small: units and seconds of a small call.
            large: the same of a larger one.

        Returns:
            The line, flat where the larger call was faster; through the origin for two calls of one size.
        """
        (u, s), (v, t) = small, large
        if u == v:
            return cls(0.0, min(s, t) / u)
        unit = max(0.0, t - s) / (v - u)
        return cls(max(0.0, min(s, t) - unit * u), unit)


def predict_step(trainer: Run[Any], steps: int) -> float | None:
    """Predict the seconds of a step by a trial.

    Args:
        trainer: a run that has been made ready.
        steps: number of steps that are left.

    Returns:
        Seconds of a step; None for steps so short, or so few, that one row foretells less than is worth a prediction,
        and where other processes draw the answers or hold a part of the base.
    """
    if trainer.config.shard_base:
        return None
    if isinstance(trainer, SupervisedRun):
        return _SupervisedTrial(trainer).seconds(steps)
    if isinstance(trainer, RlTrainer) and _draws_here(trainer):
        return _RlTrial(trainer).seconds(steps)
    return None


def _is_worth(seconds: float, steps: int) -> bool:
    """Whether steps of about so many seconds are worth a prediction."""
    return 2 * seconds > SOON_S and steps * seconds > LONG_S


class _SupervisedTrial:
    """Loss and gradient of some rows of the next step."""

    def __init__(self, trainer: SupervisedRun[Any]) -> None:
        self.trainer, self.model = trainer, trainer.model
        self.rows = trainer.next_rows()
        with _training(self.model):
            self.parts = trainer.micro_batches(self.rows)

    def seconds(self, steps: int) -> float | None:
        one = _fastest(lambda: self._learn(1), self.model.device)
        if not _is_worth(one * len(self.rows), steps):
            return None
        n = _affordable(one, max(map(len, self.parts)))
        several = _fastest(lambda: self._learn(n), self.model.device)
        line = Line.through((self._tokens(range(1)), one), (self._tokens(range(n)), several))
        return line.seconds(len(self.parts), sum(map(self._tokens, self.parts)))

    def _tokens(self, places: Iterable[int]) -> int:
        """Tokens that go through the model for some rows in one micro-batch."""
        with _training(self.model):
            return self.model.count_rows(self.trainer.packed([self.rows[i] for i in places]))

    def _learn(self, n: int) -> None:
        with _training(self.model):
            self.trainer.loss(self.rows, range(n), dropout_seed=0)[0].backward()
        self.model.zero_grad(set_to_none=True)


class _RlTrial:
    """Parts of the next step with answers of the longest length, whose tokens are all 0."""

    def __init__(self, trainer: RlTrainer) -> None:
        self.trainer, self.model, self.config = trainer, trainer.model, trainer.config
        self.prompts = [list(prompt) for prompt in trainer.next_prompts().prompts]
        self.length = trainer.config.max_completion_length
        self.roles = [role for role in _ROLES if role in self.model.roles]
        self.trained = [role for role in self.roles if self.model.roles[role].trainable]

    def seconds(self, steps: int) -> float | None:
        n, config = len(self.prompts), self.config
        one = _fastest(lambda: self._score(1), self.model.device)
        if not _is_worth(4 * n * one, steps):  # an update takes about two scorings, drawing one
            return None
        scoring = self._line(self._score, one, n)
        tokens = self.model.count_rows(self._batch(n))
        calls = math.ceil(tokens * self._lanes(self.roles) / self.model.token_budget)
        found = scoring.seconds(calls, tokens)
        parts = self._micro_batches()
        one = _fastest(lambda: self._learn(1), self.model.device)
        with _training(self.model):
            learning = self._line(self._learn, one, min(n, max(part.n_sequences for part in parts)))
            tokens = sum(map(self.model.count_rows, parts))
        updates = config.epochs * self._lanes(self.trained)
        return found + updates * learning.seconds(len(parts), tokens) + self._drawing()

    def _line(self, run: Callable[[int], object], one: float, most: int) -> Line:
        """The line of a part, with one row's seconds known."""
        n = _affordable(one, most)
        several = _fastest(lambda: run(n), self.model.device)
        return Line.through(*((self.model.count_rows(self._batch(m)), s) for m, s in ((1, one), (n, several))))

    def _micro_batches(self) -> list[PackedBatch]:
        """Micro-batches of an epoch, as far as rows bound them."""
        config, found = self.config, []
        k = config.facts.answers_together
        learned = k if config.facts.one_unit_per_prompt else config.drawn
        answers = self._batch(len(self.prompts))
        answers = answers.select([i for i in range(answers.n_sequences) if i % config.generations < learned])
        for minibatch in answers_by_minibatch(answers, k, config.mini_batches, torch.Generator().manual_seed(0)):
            size = max(k, config.per_device_train_batch_size // k * k)
            found += [answers.select(minibatch[i : i + size]) for i in range(0, len(minibatch), size)]
        return found

    def _lanes(self, roles: Iterable[str]) -> int:
        return len({(self.model.roles[role].backbone, self.model.roles[role].slot) for role in roles})

    def _batch(self, n: int) -> PackedBatch:
        return PackedBatch.from_lists(self.prompts[:n], [[0] * self.length] * n, device=self.model.device)

    def _score(self, n: int) -> None:
        self.model.score(self._batch(n), self.roles, temperature=self.config.temperature)

    def _learn(self, n: int) -> None:
        with _training(self.model):
            self.model(self._batch(n), (LmLoss(role="actor", denom=1.0),), dropout_seed=0)[0].backward()
        self.model.zero_grad(set_to_none=True)

    def _drawing(self) -> float:
        """Seconds of prompts and answers."""
        n, alive = len(self.prompts), _rows_alive(self.trainer, len(self.prompts))
        one = self._fastest_draw(1)
        m = max(_affordable(one.prefill, alive), min(4, alive))  # a line through one row says nothing of others
        several = self._fastest_draw(m)
        prefill = Line.through((one.prompt_tokens, one.prefill), (several.prompt_tokens, several.prefill))
        token = Line.through((1, one.token), (m, several.token))
        different = sum(map(len, dict.fromkeys(map(tuple, self.prompts))))
        rounds = math.ceil(n / alive)
        return prefill.seconds(rounds, different) + rounds * (self.length - 1) * token.seconds(1, alive)

    def _fastest_draw(self, n: int) -> _Drawn:
        found = []
        _fastest(lambda: found.append(self._draw(n)), self.model.device)
        return _Drawn(
            found[0].prompt_tokens, min(drawn.prefill for drawn in found), min(drawn.token for drawn in found)
        )

    def _draw(self, n: int) -> _Drawn:
        """Draw answers of few tokens to `n` prompts that reach into the middle of an answer.

        Of two lengths, because a first decoding step prepares others; on a GPU beyond the length that makes graphs.
        """
        few, many = (2 * WORTH, 4 * WORTH) if self.model.device.type == "cuda" else (2, 8)
        short, long = few if self.length > few else 1, min(many, self.length)
        middle = [0] * min(self.length // 2, self.length - long)
        prompts = [prompt + middle for prompt in self.prompts[:n]]
        temperature, seed = self.config.temperature, self.config.seed
        first, second = (
            self.trainer.rollouts.generate(
                prompts,
                SamplingConfig(max_completion_length=k, eos_token_ids=(), temperature=temperature, seed=seed),
            ).stats
            for k in (short, long)
        )
        token = (second.decode_seconds - first.decode_seconds) / max(1, long - short)
        return _Drawn(first.prompt_tokens, min(first.prefill_seconds, second.prefill_seconds), max(0.0, token))


class _Drawn(NamedTuple):
    """Seconds of the first tokens of some answers."""

    prompt_tokens: int
    prefill: float
    token: float
    """A decoding step."""


@contextmanager
def _training(model: HydraModel) -> Iterator[None]:
    """A block in which the model is in the mode of an update, where dropout may keep prompts apart."""
    was = model.training
    model.train()
    try:
        yield
    finally:
        model.train(was)


def _affordable(one: float, most: int) -> int:
    """Rows of a trial, of which one takes `one` seconds."""
    return max(1, min(most, int(_TRIAL_S / one)))


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few calls: first ones pack and compile, and other processes disturb the rest."""
    found: list[float] = []
    least = 1 if device.type == "cpu" else 2
    while len(found) < _CALLS and (len(found) < least or sum(found) < _TRIAL_S):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)
