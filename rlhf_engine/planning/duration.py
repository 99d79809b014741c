"""Seconds of a step of a method on a machine, from a model's config alone.

The traces that the memory plan makes also tell what every op computes and moves. Phases, with B prompts:

    prefill    the prompts up to their first token
    decoding   the step of a token at the mean length of a row, times the tokens of an answer after the first
    capture    on a GPU, of the CUDA graph that decoding replays
    scoring    `HydraModel.score` by all roles, group by group
    update     one epoch: forward and backward by micro-batch, the optimizer once per minibatch

With a base in shares, calls gather its blocks beside their work, the next while one runs: a call takes the longer of
both, and what gathering adds is a part of its own. In decoding a call is a token.

Depth: the number of calls with the same work is a linear function of the number of layers, known from two shallow
models. Where the native decoding step runs, one call does the linears, LoRA and passes of all layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhf_kernels.runtime.cost import ATTENTION, ELEMENTWISE, GEMMS, HEADS, LORA, SAMPLING, Work

from rlhf_engine.hydra.eager import stand_in
from rlhf_engine.planning.fit import NEVER_WHOLE, WHOLE
from rlhf_engine.planning.machines import HOP, How, Machine
from rlhf_engine.planning.phases import FULL_SFT, Setting, layer_period, trace_prefill, trace_token
from rlhf_engine.planning.predict import Planner
from rlhf_engine.planning.report import server_gpus
from rlhf_engine.planning.work import optimizer_work
from rlhf_engine.policy.adamw import gradient_dtype
from rlhf_engine.rollout.steps import native as native_step
from rlhf_engine.rollout.steps.graph import WARM_UP, WORTH

PREFILL, CAPTURE, LAUNCHES, GATHERING = "prefill", "graph capture", "calls and launches", "waiting for the base"
PARTS = (GEMMS, ELEMENTWISE, LORA, CAPTURE, ATTENTION, PREFILL, HEADS, SAMPLING, "optimizer", LAUNCHES, GATHERING)
STEP_PHASES = ("prefill", "decoding", "capture", "scoring", "update")
_GENERATION = ("prefill", "token", "one row")
"""Traces of the actor's lane."""

Amounts = Mapping[Work, float]
"""Number of times that each work is done."""


@dataclass(frozen=True, kw_only=True)
class Duration:
    """One method's step, seconds."""

    method: str
    phases: dict[str, float]
    """By phase, see the module's docstring."""
    parts: dict[str, float]
    """The same seconds by what they are spent on; all of the prefill is one part."""
    flops: float
    """Of the whole step."""
    shared_phases: tuple[str, ...] = ()
    """Phases of the plan of memory in which answers to one prompt share its pass through a backbone."""
    way: str = WHOLE
    """Way of holding the frozen backbones, see `planning.fit`."""
    received_bytes: int = 0
    """Bytes that each process receives for every token of decoding."""
    served_seconds: float = 0.0
    """Least seconds in which a server with tensor parallelism draws the step's answers; 0 for one process."""
    server_gpus: int = 0
    """Cards of such a server, fewest that hold the base with a third to spare."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.phases.values())

    @property
    def dominant(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=self.parts.__getitem__)


class DurationPlanner(Planner):
    """Predicts the seconds of one method's step."""

    def __init__(self, method: str, setting: Setting, machine: Machine, shared: dict[Any, Any] | None = None) -> None:
        super().__init__(method, setting, shared)
        self.machine = machine

    def predict_seconds(self, budget: int = 0) -> Duration:
        """Every phase and part. budget: bytes that one of several processes may use, which decide on the way."""
        if self.setting.processes > 1:
            self.choose_way(budget)
        phases = dict.fromkeys(STEP_PHASES, 0.0)
        parts = dict.fromkeys(PARTS, 0.0)
        flops = 0.0

        def add(phase: str, amounts: Amounts, times: float, how: How = "forward") -> None:
            nonlocal flops
            for work, n in amounts.items():
                busy, waiting = self.machine.busy(work), self.machine.waiting(work, how)
                phases[phase] += times * n * (busy + waiting)
                parts[PREFILL if phase == "prefill" else work.part] += times * n * busy
                parts[PREFILL if phase == "prefill" else LAUNCHES] += times * n * waiting
                flops += times * n * work.flops

        s = self.setting
        if self.method != FULL_SFT:
            self._add_generation(add, phases, parts)
            together = self._scored_together(s.batch)[0]
            apart = s.batch > self._rows_together("inference")
            add("scoring", self._work("inference", together, apart), s.batch / together)
        rows = s.update_rows
        add("update", self._work("update", rows, rows > self._rows_together("update")), s.batch / rows)
        add("update", self._optimizer(), min(s.num_mini_batches, s.batch))
        self._add_gathering(phases, parts)
        gpus = server_gpus(self.drawing_bytes[0], budget) if s.processes > 1 else 0
        return Duration(
            method=self.method,
            phases=phases,
            parts=parts,
            flops=flops,
            shared_phases=self.shared_phases,
            way=self.way,
            received_bytes=self.received_bytes if self.way == NEVER_WHOLE else 0,
            served_seconds=self._served_seconds(gpus) if gpus else 0.0,
            server_gpus=gpus,
        )

    # ---- a base in shares ------------------------------------------------------------------------------------------

    def _add_gathering(self, phases: dict[str, float], parts: dict[str, float]) -> None:
        """Add what calls wait for blocks that are gathered beside them."""
        s = self.setting
        if self.way == WHOLE:
            return
        once = self.machine.receiving(self.received_bytes)
        scored, updated = (self._most_lanes(phase) for phase in ("inference", "update"))
        groups = -(-s.batch // self._scored_together(s.batch)[0])
        together = s.update_rows <= self._rows_together("update")
        calls = {"update": 2.0 * -(-s.batch // s.update_rows) * (1 if together else updated)}  # and on the way back
        if self.way == NEVER_WHOLE:
            admitted = self._admitted(s.prompts(s.batch))
            calls["prefill"] = -(-s.prompts(s.batch) // admitted)
            calls["decoding"] = s.completion_length - 1
            calls["scoring"] = groups * (1 if s.batch <= self._rows_together("inference") else scored)
        else:
            phases["prefill"] += once  # the base is made whole once, with nothing beside it
            parts[GATHERING] += once
        for phase, n in calls.items():
            waits = max(0.0, n * once - phases[phase])
            phases[phase] += waits
            parts[GATHERING] += waits

    def _served_seconds(self, gpus: int) -> float:
        """Least seconds in which so many cards draw the answers of all processes, each with a slice of every product.

        Calls are taken as hidden, and two small all-reduces per layer and token are not.
        """
        s, tokens = self.setting, self.setting.completion_length - 1
        prefill = self._work("prefill", s.prompts(s.batch), False)
        busy = s.processes * sum(n * self.machine.busy(work) for work, n in prefill.items())
        if tokens:
            token = self._token_work(s.processes * s.batch)
            busy += tokens * sum(n * self.machine.busy(work) for work, n in token.items())
        return busy / gpus + tokens * 2 * s.config.get_text_config().num_hidden_layers * HOP

    def _add_generation(self, add: Callable[..., None], phases: dict[str, float], parts: dict[str, float]) -> None:
        s, by_blocks = self.setting, self.way == NEVER_WHOLE  # then the model's own forward serves alone
        native = self._shape(True).native_step and not by_blocks
        prompts = s.prompts(s.batch)
        prefill, admitted = self._work("prefill", prompts, False), self._admitted(prompts)
        if native and native_step.takes_prompts(s.dtype, s.prompt_length, admitted):
            prefill = _in_native_step(prefill, native_step.tokens_together(s.dtype, s.prompt_length, admitted))
        add("prefill", prefill, 1)
        tokens = s.completion_length - 1
        if tokens == 0:
            return
        token = self._token_work(s.batch)
        if native:
            token = _in_native_step(token, s.batch)
        replayed = s.device_type == "cuda" and tokens >= WORTH and not by_blocks
        add("decoding", token, tokens, "replay" if replayed else "decoding")
        if native or s.device_type == "cuda":
            phases["decoding"] += tokens * self.machine.token_seconds
            parts[LAUNCHES] += tokens * self.machine.token_seconds
        if replayed:
            eager = sum(n * (self.machine.busy(w) + self.machine.waiting(w, "decoding")) for w, n in token.items())
            kernels = sum(n * w.launches for w, n in token.items())
            seconds = (WARM_UP + 1) * eager + kernels * self.machine.instantiate_seconds
            phases["capture"] += seconds
            parts[CAPTURE] += seconds

    @property
    def _mean_length(self) -> int:
        """Tokens of a row in the middle of decoding, the new one included."""
        return max(2, self.setting.prompt_length + (self.setting.completion_length + 1) // 2)

    def _token_work(self, rows: int) -> Amounts:
        """A decoding step of so many rows, at their mean length.

        Many long prompts are not admitted together, so that a trace of them has rows that wait. All rows are traced
        with two tokens each, and attention, which alone depends on the length and is linear in the rows, with one row.
        """
        found = {work: n for work, n in self._work("token", rows, False).items() if not _attends(work)}
        for work, n in self._work("one row", 1, False).items():
            if _attends(work):
                found[replace(work, flops=rows * work.flops, bytes=rows * work.bytes)] = n
        if ("few", self.setting.dtype) in self.machine.ceilings:  # product and LoRA are one kernel there
            of_few = ("linear", "lora")
            found = {replace(w, kind="few", bytes=0.0) if w.kind in of_few else w: n for w, n in found.items()}
        return found

    def _optimizer(self) -> Amounts:
        tensors = [(shape.numel(), dtype) for shape, dtype in self._trained_tensors]
        state = self.state_bytes["optimizer"]
        weights = sum(n * dtype.itemsize for n, dtype in tensors)
        gradients = sum(n * gradient_dtype(self.setting.optim, dtype).itemsize for n, dtype in tensors)
        return Counter(optimizer_work([n for n, _ in tensors], state, gradients, weights))

    # ---- work of a phase -------------------------------------------------------------------------------------------

    def _work(self, phase: str, rows: int, apart: bool) -> Amounts:
        """The work of a phase with so many rows in one group, on the whole depth."""
        lanes = self._lanes("generation" if phase in _GENERATION else phase)
        key = ("work", phase, rows, apart, lanes)
        if key not in self._shared:
            self._shared[key] = self._counted_work(phase, rows, apart)
        found: Amounts = self._shared[key]
        return found

    def _counted_work(self, phase: str, rows: int, apart: bool) -> Amounts:
        n_layers, period = self.setting.config.get_text_config().num_hidden_layers, layer_period(self.setting.config)
        if period is None or 3 * period >= n_layers:
            return Counter(self._work_of(phase, rows, apart, n_layers))
        short, long = (Counter(self._work_of(phase, rows, apart, n * period)) for n in (2, 3))
        more = (n_layers - 3 * period) / period
        return {work: long[work] + (long[work] - short[work]) * more for work in short | long}

    def _work_of(self, phase: str, rows: int, apart: bool, n_layers: int) -> Iterable[Work]:
        if phase not in _GENERATION:
            return self._timeline(phase, rows, 1, n_layers, apart).work
        model, s = self._model(n_layers), self.setting
        with self._modes[n_layers], stand_in(s.device_type != "cpu"):
            if phase == "prefill":
                return trace_prefill(model, s, rows).work
            return trace_token(model, s, rows, 2 if phase == "token" else self._mean_length).work


def _attends(work: Work) -> bool:
    return work.kind == "decode_attention"


def _in_native_step(amounts: Amounts, rows: int) -> Amounts:
    """The same work where one call of the native step does everything before the head. rows: of a call."""
    found: dict[Work, float] = {}
    for work, n in amounts.items():
        inside = replace(work, calls=0)
        if work.part in (GEMMS, LORA):
            inside = replace(inside, kind="step", bytes=0.0, rows=rows)
        if work.part != ELEMENTWISE:
            found[inside] = found.get(inside, 0.0) + n
    return found
