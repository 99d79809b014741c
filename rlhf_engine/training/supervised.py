"""Common parts of SFT and reward models: tokenized rows, their packing, and a run that checks its request.

A row may have a number in its column `margin`, by which the better answer of a pair is to be ahead in reward.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from rlhf_engine.config.run import adapter_dtype
from rlhf_engine.data import Row, RowError, Tally, Tokenized, UnpairedPreference, require_room, tokenize_rows
from rlhf_engine.data.tokenize import load_tokenizer, read_eos_token_ids
from rlhf_engine.data.types import shown
from rlhf_engine.devices import DTYPES
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import HydraModel, PackedBatch, PairwiseRewardLoss, RoleSpec
from rlhf_engine.hydra.build import loading_device, slot_config
from rlhf_engine.hydra.loading import read_context_length, read_vocabulary
from rlhf_engine.hydra.optimizer import require_optim
from rlhf_engine.hydra.persist import require_savable
from rlhf_engine.runs.checkpoint import begin_kernels, read_counters, require_same, require_same_rows_per_step
from rlhf_engine.runs.folder import require_unlocked
from rlhf_engine.runs.metrics import require_trackers
from rlhf_engine.training.run import SupervisedRun


@dataclass(frozen=True, kw_only=True)
class Example:
    """One tokenized row."""

    prompt: Sequence[int]  # token ids of the prompt
    answers: Sequence[Sequence[int]]  # token ids of one answer, or of the better and the worse one of a pair
    label: bool | None = None  # whether a single answer was liked; None without a label
    group: str = ""  # rows of one group stay on one side of a split
    margin: float = 0.0  # difference of rewards that a pair is to exceed

    @property
    def tokens(self) -> int:
        """Tokens of all answers, each with its prompt."""
        return sum(len(self.prompt) + len(answer) for answer in self.answers)


@dataclass(frozen=True, kw_only=True)
class SupervisedState:
    """Counters of a run. Checkpoints of older versions lack some, which are then None."""

    step: int  # optimizer steps done
    seed: int  # seed that every random number of the run is a function of
    rows: str | None = None  # digest of the rows
    rows_per_step: int | None = None  # rows of a step, by which the place in the data is found again


S = TypeVar("S", bound=SupervisedState)


def digest(texts: Iterable[str]) -> str:
    """Name rows, which are given as texts, in their order."""
    blake = hashlib.blake2b(digest_size=8)
    for text in texts:
        blake.update(text.encode())
    return blake.hexdigest()


def packed_batch(
    examples: Sequence[Example], device: torch.device, *, places: Sequence[int] | None = None
) -> PackedBatch:
    """Pack first answers of rows, then second ones; `places` in the step (None: 0 to n−1) key dropout masks."""
    n_answers = len(examples[0].answers)
    ids = range(len(examples)) if places is None else places
    return PackedBatch.from_lists(
        [e.prompt for _ in range(n_answers) for e in examples],
        [e.answers[a] for a in range(n_answers) for e in examples],
        device=device,
        sample_ids=[2 * i + a for a in range(n_answers) for i in ids],
    )


def pairwise_loss(
    examples: Sequence[Example], device: torch.device, *, denom: float, center: float = 0.0
) -> PairwiseRewardLoss:
    """Make the reward loss of a packed batch of pairs, by the margin of each."""
    margins = [e.margin for e in examples]
    chosen_P, rejected_P = torch.arange(2 * len(margins), device=device).chunk(2)
    margin_P = torch.tensor(margins, device=device) if any(margins) else None
    return PairwiseRewardLoss(chosen_P=chosen_P, rejected_P=rejected_P, denom=denom, center=center, margin_P=margin_P)


class SupervisedTrainer(SupervisedRun[S]):
    """A run over tokenized rows. Everything that can be wrong with the request is found before the first step."""

    rows: list[Example]  # tokenized rows that are trained on
    notes: list[str]  # notes for the user before the run starts, one sentence each

    def load(self) -> HydraModel:
        """Load the data, and the model as it is before any step, once options and output folder are checked."""
        config = self.config
        require_trackers(config.report_to)
        require_optim(config.optim)
        require_unlocked(self.output)
        self.resume = self.find_checkpoint()
        self.tokenizer = load_tokenizer(config.model_name_or_path)
        self.reports, self.notes = {}, []
        self.start = self.load_rows()
        require_room(max(example.tokens for example in self.rows), config.max_tokens_per_micro_batch)
        if self.resume is not None:
            self.require_same_run(self.resume)
        begin_kernels(self.resume)
        model = self.build_model()
        self.total_steps = self.count_steps()
        return model

    @abstractmethod
    def find_checkpoint(self) -> Path | None:
        """Find the checkpoint to go on from. Raises ConfigError for a folder that this run may not use."""

    @abstractmethod
    def load_rows(self) -> S:
        """Load the rows; the counters of a run that begins."""

    @abstractmethod
    def build_model(self) -> HydraModel:
        """Build the model as it is before any step."""

    def tokenize(self, rows: Sequence[Row], tally: Tally) -> list[Example]:
        """Tokenize rows. What cannot be used is counted, and pairs of the same answer twice are left out."""
        config, path = self.config, self.config.model_name_or_path
        context = read_context_length(path)
        tokenized = tokenize_rows(
            rows, self.tokenizer, tally, max_length=min(config.max_length or context, context),
            truncation=config.truncation, end_ids=read_eos_token_ids(self.tokenizer, path),
            vocabulary=read_vocabulary(path),
        )  # fmt: skip
        self.reports[tally.argument] = tally
        examples = _with_margins(tokenized, tally)
        different = [e for e in examples if len(e.answers) == 1 or e.answers[0] != e.answers[1]]
        if not different:
            raise ConfigError(
                f"{tally.argument}: expected pairs of different answers, got the same answer twice in all"
            )
        if n := len(examples) - len(different):
            self.notes.append(f"{tally.argument}: {n} pairs left out, whose two answers are the same")
        return different

    def require_same_run(self, checkpoint: Path) -> None:
        """Raise ConfigError for a checkpoint of a run that this one cannot go on with."""
        held = read_counters(checkpoint, type(self.start))
        require_same(checkpoint, held, seed=self.start.seed)
        if held.rows not in (None, self.start.rows):
            raise ConfigError(f"dataset_name: expected the rows of the run of {checkpoint}, got others")
        require_same_rows_per_step(checkpoint, held.rows_per_step, self.rows_per_step)

    def go_on(self, held: S) -> S:
        """Take up the counters of a checkpoint, with what old ones lack."""
        return replace(held, rows=self.start.rows, rows_per_step=self.start.rows_per_step)

    def load_base(self, roles: Mapping[str, RoleSpec], slot: str) -> HydraModel:
        """Load the base with roles on it (`full`), or on a new slot (`lora`)."""
        config = self.config
        model = HydraModel.from_pretrained(
            config.model_name_or_path, roles=roles,
            slots={slot: slot_config(config)} if config.mode == "lora" else {}, dtype=DTYPES[config.dtype],
            device=loading_device(config), adapter_dtype=DTYPES[adapter_dtype(config.optim)], seed=config.seed,
        )  # fmt: skip
        require_savable(model)
        if config.gradient_checkpointing:
            model.backbone().enable_gradient_checkpointing()
        return model

    def packed(self, rows: Sequence[Example]) -> PackedBatch:
        """Pack the answers of some rows that are trained on. See `SupervisedRun.packed`."""
        return packed_batch(rows, self.model.device)


def _with_margins(rows: Sequence[Tokenized], tally: Tally) -> list[Example]:
    """Rows, each with the number in its column `margin`, 0 without one; ConfigError for too many bad rows."""
    has_column = any(row.row.columns.get("margin") is not None for row in rows)
    usable = []
    for tokens in rows:
        row = tokens.row
        margin = row.columns.get("margin") if has_column and len(tokens.answers) == 2 else 0.0
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not math.isfinite(margin):
            tally.refuse(row.place, RowError("a finite number in column 'margin'", shown(margin)))
            continue
        answers, label = tokens.answers, row.label if isinstance(row, UnpairedPreference) else None
        usable.append(
            Example(prompt=tokens.prompt, answers=answers, label=label, group=row.group, margin=float(margin))
        )
    tally.check()
    return usable
