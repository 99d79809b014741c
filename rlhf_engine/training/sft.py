"""Supervised fine-tuning with a reward head: the starting point of RL (Hydra-SFT, arXiv 2309.00754 §3.1).

    L = −Σ_t log p(y_w,t | x, y_w,<t) / tokens  +  γ · (−log σ(r(x, y_w) − r(x, y_l) − m)) / pairs

m is the pair's `margin`, 0 without one. Cross-entropy on the chosen answer's tokens only; γ = 0 is plain supervised
fine-tuning, and rejected answers are not even run. `full` trains the base and writes a new one with its reward head;
`lora` leaves the base alone and writes a slot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlhf_engine.config import SFTConfig
from rlhf_engine.data import Preference, PromptCompletion, Tally, load_rows
from rlhf_engine.data.types import recast
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import OFF, HydraModel, LmLoss, RoleSpec, peft_io
from rlhf_engine.hydra.peft_io import save_slot
from rlhf_engine.hydra.shares import state_of
from rlhf_engine.io import delete, put_model_in_place, remove_model, write_manifest
from rlhf_engine.runs.checkpoint import resolve_resume
from rlhf_engine.runs.folder import LOCK_FILE, METRICS_FILE, RECORD_FILE, drop_later_checkpoints
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.training.run import OnStep
from rlhf_engine.training.supervised import (
    Example,
    SupervisedState,
    SupervisedTrainer,
    digest,
    packed_batch,
    pairwise_loss,
)

SFT_SLOT = "sft"
CONFIGS = ("config.json", "adapter_config.json")  # files of which a model's or an adapter's folder has one


def sft_roles(mode: str, *, with_reward: bool) -> dict[str, RoleSpec]:
    """Roles of Hydra-SFT (arXiv 2309.00754 §3.1): `sft` and `reward` on the base itself (`full`) or on one slot."""
    slot = OFF if mode == "full" else SFT_SLOT
    roles = {"sft": RoleSpec(slot=slot, trainable=True)}
    if with_reward:
        roles["reward"] = RoleSpec(slot=slot, head="reward", trainable=True)
    return roles


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
    with_pairs = gamma > 0 and len(examples[0].answers) == 2
    if not with_pairs:
        examples = [replace(e, answers=e.answers[:1]) for e in examples]
    batch = packed_batch(examples, model.device, places=places)
    n_chosen = sum(len(e.answers[0]) for e in examples)
    lm = LmLoss(role="sft", denom=tokens, rows_M=torch.arange(n_chosen, device=model.device))
    if not with_pairs:
        (lm_loss,) = model(batch, (lm,), dropout_seed=dropout_seed)
        return lm_loss, {"lm_loss": lm_loss.detach()}
    pairwise = pairwise_loss(examples, model.device, denom=pairs)
    lm_loss, reward = model(batch, (lm, pairwise), dropout_seed=dropout_seed)
    return lm_loss + gamma * reward.loss, {
        "lm_loss": lm_loss.detach(),
        "reward_loss": reward.loss.detach(),
        "reward_accuracy": reward.n_correct / pairs,
        "reward_margin": reward.sum_margin / pairs,
    }


class SftTrainer(SupervisedTrainer[SupervisedState]):
    """Supervised training. Everything that can be wrong with the request is found before the first step."""

    config: SFTConfig
    """Options of the run."""
    title = "sft"

    def load(self) -> HydraModel:
        """Load the data, and the model with the slot `sft` or a trained base. See `SupervisedTrainer.load`."""
        model = super().load()
        if self._result_steps() is not None and self.resume is None and not self.finished():
            raise ConfigError(
                f"output_dir: expected a checkpoint in {self.output} to go on from, got the finished model of "
                f"{self._result_steps()} steps alone; --resume_from_checkpoint restart starts afresh"
            )
        return model

    def load_rows(self) -> SupervisedState:
        """Load rows with answers, of pairs both where γ is above 0; the counters of a run that begins."""
        config = self.config
        tally = Tally(source=config.dataset_name, max_bad_rows=config.max_bad_rows)
        rows = load_rows(
            config.dataset_name, tally, config, kinds=("preference", "implicit_preference", "prompt_completion")
        )
        self.pairs = isinstance(rows[0], Preference) and config.gamma > 0
        if not self.pairs:  # nor does the length of rejected answers matter
            rows = [
                recast(row, PromptCompletion, completion=row.chosen) if isinstance(row, Preference) else row
                for row in rows
            ]
        self.rows = self.tokenize(rows, tally)
        named = (
            (e.prompt, e.answers[0], e.answers[1] if self.pairs else None, *filter(None, [e.margin])) for e in self.rows
        )
        return SupervisedState(
            step=0, seed=config.seed, rows=digest(map(repr, named)), rows_per_step=self.rows_per_step
        )

    def build_model(self) -> HydraModel:
        """Build the model, with a reward head where there are pairs."""
        return self.load_base(sft_roles(self.config.mode, with_reward=self.pairs), SFT_SLOT)

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
            tokens=float(sum(len(e.answers[0]) for e in rows)),
            pairs=float(len(rows)),
            dropout_seed=dropout_seed,
            places=places,
        )
        return loss, {"loss": loss.detach(), **stats}

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

    def find_checkpoint(self) -> Path | None:
        """Find the checkpoint to go on from. Raises ConfigError for a folder with anything else in it."""
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
