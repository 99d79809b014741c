"""Supervised fine-tuning with a reward head: the starting point of RL (Hydra-SFT, arXiv 2309.00754 §3.1).

    L = −Σ_t log p(y_w,t | x, y_w,<t) / tokens  +  γ · (−log σ(r(x, y_w) − r(x, y_l) − m)) / pairs

m is the pair's `margin`, 0 without one. Cross-entropy on the chosen answer's tokens only; γ = 0 is plain supervised
fine-tuning, and rejected answers are not even run. `full` trains the base and writes a new one with its reward head;
`lora` leaves the base alone and writes a slot.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_engine.config import SFTConfig
from rlhf_engine.config.run import adapter_dtype
from rlhf_engine.data import Preference, PromptCompletion, Row, Tally, Truncation, load_rows, require_room
from rlhf_engine.data import tokenize_rows as tokenize
from rlhf_engine.data.tokenizer import load_tokenizer, read_eos_token_ids
from rlhf_engine.data.types import recast
from rlhf_engine.devices import DTYPES
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import OFF, HydraModel, LmLoss, PackedBatch, RoleSpec, peft_io
from rlhf_engine.hydra.build import loading_device, slot_config
from rlhf_engine.hydra.loading import read_context_length, read_vocabulary
from rlhf_engine.hydra.optimizer import require_optim
from rlhf_engine.hydra.peft_io import save_slot
from rlhf_engine.hydra.persist import require_savable
from rlhf_engine.hydra.shares import state_of
from rlhf_engine.io import delete, put_model_in_place, remove_model, write_manifest
from rlhf_engine.runs.checkpoint import (
    begin_kernels,
    read_counters,
    require_same,
    require_same_rows_per_step,
    resolve_resume,
)
from rlhf_engine.runs.folder import LOCK_FILE, METRICS_FILE, RECORD_FILE, drop_later_checkpoints, require_unlocked
from rlhf_engine.runs.metrics import read_metrics, require_trackers
from rlhf_engine.training.reward_model.data import drop_same, with_margins
from rlhf_engine.training.reward_model.model import pairwise_loss
from rlhf_engine.training.run import OnStep, SupervisedRun

SFT_SLOT = "sft"
CONFIGS = ("config.json", "adapter_config.json")  # files of which a model's or an adapter's folder has one


@dataclass(frozen=True, kw_only=True)
class Example:
    """One tokenized row."""

    prompt: list[int]  # token ids of the prompt
    chosen: list[int]  # token ids of the answer, of a pair the better one
    rejected: list[int] | None  # token ids of the worse answer; None for rows without a pair
    margin: float = 0.0  # difference of rewards that a pair is to exceed

    @property
    def answers(self) -> list[list[int]]:
        """Token ids of all answers."""
        return [self.chosen] if self.rejected is None else [self.chosen, self.rejected]

    @property
    def tokens(self) -> int:
        """Tokens of all answers, each with its prompt."""
        return sum(len(self.prompt) + len(answer) for answer in self.answers)


def sft_roles(mode: str, *, with_reward: bool) -> dict[str, RoleSpec]:
    """Roles of Hydra-SFT (arXiv 2309.00754 §3.1): `sft` and `reward` on the base itself (`full`) or on one slot."""
    slot = OFF if mode == "full" else SFT_SLOT
    roles = {"sft": RoleSpec(slot=slot, trainable=True)}
    if with_reward:
        roles["reward"] = RoleSpec(slot=slot, head="reward", trainable=True)
    return roles


def tokenize_rows(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    tally: Tally,
    *,
    max_length: int,
    pairs: bool,
    truncation: Truncation = "error",
    end_ids: Sequence[int] | None = None,
    vocabulary: int | None = None,
) -> list[Example]:
    """Tokenize rows with answers, with `pairs` rejected ones too; those that can be used, in their order."""
    if not pairs:  # nor does their length matter
        rows = [
            recast(row, PromptCompletion, completion=row.chosen) if isinstance(row, Preference) else row for row in rows
        ]
    tokenized = tokenize(
        rows, tokenizer, tally, max_length=max_length, truncation=truncation, end_ids=end_ids, vocabulary=vocabulary
    )
    return [
        Example(prompt=t.prompt, chosen=t.answers[0], rejected=t.answers[1] if pairs else None, margin=margin)
        for t, margin in with_margins(tokenized, tally)
    ]


def packed_batch(
    examples: Sequence[Example], device: torch.device, *, pairs: bool, places: Sequence[int] | None = None
) -> PackedBatch:
    """Pack the chosen answers of rows, then with `pairs` the rejected ones; `places` key dropout masks."""
    answers = [e.chosen for e in examples]
    ids = [2 * i for i in (range(len(examples)) if places is None else places)]
    if pairs:
        answers += [e.rejected or [] for e in examples]
        ids += [i + 1 for i in ids]
    prompts = [e.prompt for e in examples] * (2 if pairs else 1)
    return PackedBatch.from_lists(prompts, answers, device=device, sample_ids=ids)


def sft_loss(
    model: HydraModel,
    examples: Sequence[Example],
    *,
    gamma: float,
    tokens: float,
    pairs: float,
    dropout_seed: int,
    places: Sequence[int] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the module's loss of some examples of an optimizer step (Hydra-SFT, arXiv 2309.00754 §3.1).

    Examples are all pairs or none is. `gamma` is γ, the weight of the reward loss. The language-model loss is divided
    by `tokens`, those of the chosen answers of the whole optimizer step, and the reward loss by its `pairs`. `places`
    of the examples in that step (None: 0 to n−1) keep dropout masks the same in any micro-batch. The metrics have no
    gradient: `lm_loss`, and of pairs `reward_loss`, `reward_accuracy` and `reward_margin`.
    """
    with_pairs = gamma > 0 and examples[0].rejected is not None
    batch = packed_batch(examples, model.device, pairs=with_pairs, places=places)
    n_chosen = sum(len(e.chosen) for e in examples)
    lm = LmLoss(role="sft", denom=tokens, rows_M=torch.arange(n_chosen, device=model.device))
    if not with_pairs:
        (lm_loss,) = model(batch, (lm,), dropout_seed=dropout_seed)
        return lm_loss, {"lm_loss": lm_loss.detach()}
    pairwise = pairwise_loss([e.margin for e in examples], model.device, denom=pairs)
    lm_loss, reward = model(batch, (lm, pairwise), dropout_seed=dropout_seed)
    return lm_loss + gamma * reward.loss, {
        "lm_loss": lm_loss.detach(),
        "reward_loss": reward.loss.detach(),
        "reward_accuracy": reward.n_correct / pairs,
        "reward_margin": reward.sum_margin / pairs,
    }


@dataclass(frozen=True, kw_only=True)
class SftState:
    """Counters of a run."""

    step: int  # optimizer steps done
    seed: int  # seed that every random number of the run is a function of
    rows: str  # A digest of the rows
    rows_per_step: int | None = None
    """Rows of a step, by which the place in the data is found again; None in older checkpoints."""


class SftTrainer(SupervisedRun[SftState]):
    """Supervised training. Everything that can be wrong with the request is found before the first step."""

    config: SFTConfig
    """Options of the run."""
    rows: list[Example]
    """Tokenized rows that are trained on."""
    title = "sft"

    def load(self) -> HydraModel:
        """Load the data, and the model as it is before any step, with the slot `sft` or a trained base."""
        config = self.config
        require_unlocked(self.output)
        self.resume = resume = self._check_output()
        require_trackers(config.report_to)
        require_optim(config.optim)
        tally = Tally(source=config.dataset_name, max_bad_rows=config.max_bad_rows)
        rows = load_rows(
            config.dataset_name, tally, config, kinds=("preference", "implicit_preference", "prompt_completion")
        )
        self.pairs = isinstance(rows[0], Preference) and config.gamma > 0
        self.tokenizer = load_tokenizer(config.model_name_or_path)
        context = read_context_length(config.model_name_or_path)
        self.rows = tokenize_rows(
            rows,
            self.tokenizer,
            tally,
            max_length=min(config.max_length or context, context),
            pairs=self.pairs,
            truncation=config.truncation,
            end_ids=read_eos_token_ids(self.tokenizer, config.model_name_or_path),
            vocabulary=read_vocabulary(config.model_name_or_path),
        )
        self.rows, self.notes = drop_same("dataset_name", self.rows)
        self.reports = {"dataset_name": tally}
        require_room(max(example.tokens for example in self.rows), config.max_tokens_per_micro_batch)
        self.start = start = SftState(
            step=0, seed=config.seed, rows=_digest(self.rows), rows_per_step=self.rows_per_step
        )
        if resume is not None:
            held = read_counters(resume, SftState)
            require_same(resume, held, seed=config.seed)
            if held.rows != start.rows:
                raise ConfigError(f"dataset_name: expected the rows of the run of {resume}, got others")
            require_same_rows_per_step(resume, held.rows_per_step, self.rows_per_step)
        begin_kernels(resume)
        model = HydraModel.from_pretrained(
            config.model_name_or_path,
            roles=sft_roles(config.mode, with_reward=self.pairs),
            slots={SFT_SLOT: slot_config(config)} if config.mode == "lora" else {},
            dtype=DTYPES[config.dtype],
            device=loading_device(config),
            adapter_dtype=DTYPES[adapter_dtype(config.optim)],
            seed=config.seed,
        )
        require_savable(model)
        if config.gradient_checkpointing:
            model.backbone().enable_gradient_checkpointing()
        self.total_steps = self.count_steps()
        if self._result_steps() is not None and resume is None and not self.finished():
            raise ConfigError(
                f"output_dir: expected a checkpoint in {self.output} to go on from, got the finished model of "
                f"{self._result_steps()} steps alone; --resume_from_checkpoint restart starts afresh"
            )
        return model

    def go_on(self, held: SftState) -> SftState:
        """Take up the counters of a checkpoint, with the rows per step, which old checkpoints lack."""
        return replace(held, rows_per_step=self.rows_per_step)

    def run(self, on_step: OnStep | None = None, *, stop: Callable[[], bool] | None = None) -> dict[str, Any]:
        """Make all remaining steps and write the model; metrics of the last step, also of a finished run."""
        if self.finished():
            return read_metrics(self.output / METRICS_FILE)[-1]
        metrics: dict[str, Any] = super().run(on_step, stop=stop)
        return metrics

    def begin(self) -> None:
        """Make the output folder ready."""
        drop_later_checkpoints(self.output, self.state.step)
        if self.state.step == 0 and self.output.resolve() != Path(self.config.model_name_or_path).resolve():
            remove_model(self.output)  # of a run that is overwritten: it is not this one's result
        self.write_record()

    def saves_now(self) -> bool:
        """Whether a checkpoint is due: every `save_steps` steps; the last step leaves the model itself."""
        return self._is_regular()

    def end(self) -> dict[str, Any]:
        """Write the model, and the result into the record; the metrics of the last step."""
        metrics = read_metrics(self.output / METRICS_FILE)[-1]
        self.plot()
        self.model.eval()
        self.write_model()
        self.write_record({"steps": self.state.step, **metrics})
        return metrics

    def finished(self) -> bool:
        """Whether the run in the output folder, where this is to go on with it, has done every step and its model."""
        steps = self._result_steps()
        return steps is not None and steps >= self.total_steps

    def steps_done(self) -> int:
        """Steps of the model that is there, or of the checkpoint to go on from."""
        return max(self.state.step, self._result_steps() or 0)

    def _result_steps(self) -> int | None:
        """Steps of the finished run in the output folder, where this is to go on with it; None without one."""
        record = self.output / RECORD_FILE
        if self.config.resume_from_checkpoint != "auto" or not record.is_file():
            return None
        steps: int | None = json.loads(record.read_text()).get("result", {}).get("steps")
        return steps

    def loss(
        self, rows: Sequence[Example], places: Sequence[int], *, dropout_seed: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute `sft_loss` of some rows of a step. See `SupervisedRun.loss`."""
        loss, stats = sft_loss(
            self.model,
            [rows[i] for i in places],
            gamma=self.config.gamma,
            tokens=float(sum(len(e.chosen) for e in rows)),
            pairs=float(len(rows)),
            dropout_seed=dropout_seed,
            places=places,
        )
        return loss, {"loss": loss.detach(), **stats}

    def packed(self, rows: Sequence[Example]) -> PackedBatch:
        """Pack the answers of some rows that are trained on. See `SupervisedRun.packed`."""
        return packed_batch(rows, self.model.device, pairs=self.pairs)

    def write_model(self) -> None:
        """Write a new base with its heads (`full`) or the slot `sft` in PEFT format (`lora`)."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.output.with_name(f".{self.output.name}.tmp")
        delete(temporary)
        temporary.mkdir()
        backbone = self.model.backbone()
        if self.config.mode == "full":
            backbone.model.save_pretrained(temporary, state_dict=state_of(backbone.model))
        else:
            save_slot(backbone, SFT_SLOT, temporary, base_name=self.config.model_name_or_path)
        self.tokenizer.save_pretrained(temporary)
        peft_io.save_heads(self.model.heads, set(self.model.heads), temporary)
        write_manifest(temporary)
        put_model_in_place(temporary, self.output)

    def _check_output(self) -> Path | None:
        """The checkpoint to go on from. Raises ConfigError for a folder with anything else in it."""
        config, output = self.config, self.output
        if output.exists() and not output.is_dir():
            raise ConfigError(f"output_dir: expected a folder, got the file {str(output)!r}")
        resume = resolve_resume(config.resume_from_checkpoint, output)
        goes_on = resume is not None and resume.resolve().parent == output.resolve()
        # a run that was stopped before its first checkpoint has left nothing but its record and lines of metrics
        begun = config.resume_from_checkpoint == "auto" and not any((output / name).exists() for name in CONFIGS)
        own = goes_on or begun or config.restarts or self._result_steps() is not None
        if output.exists() and any(path.name != LOCK_FILE for path in output.iterdir()) and not own:
            raise ConfigError(
                f"output_dir: expected an empty or new folder, got {output}; --resume_from_checkpoint auto goes on "
                "with a run that was stopped, restart begins afresh"
            )
        return resume


def _digest(examples: Sequence[Example]) -> str:
    """Names the rows, in their order."""
    blake = hashlib.blake2b(digest_size=8)
    for example in examples:
        named = (example.prompt, example.chosen, example.rejected, *filter(None, [example.margin]))
        blake.update(repr(named).encode())
    return blake.hexdigest()
