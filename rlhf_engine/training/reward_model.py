"""Reward models: a LoRA slot and a scalar head on the frozen base (PERL, arXiv 2403.10704); or all of it.

    pairwise     L = mean[−log σ(r_w − r_l − m) + c (r_w + r_l)²]                  chosen w, rejected l, margin m
    pointwise    L = −mean[w p log σ(r) + (1 − p) log(1 − σ(r))]                   label p ∈ {0, 1}

(`PairwiseRewardLoss` and `PointwiseRewardLoss`). r is w·h at the last token, without a bias: transformers' sequence
classifiers have none, so that a trained one could not leave this package. The head starts from the base's own reward
head where it brings one, else at zero.

Data order and dropout are functions of (seed, step), so a resumed run makes the same floats as one that never stopped.
The best step on held-out rows becomes the final model; its checkpoint is kept until then. The best of several numbers
is too good by chance: where a share of the rows holds out enough groups, half of them report and do not choose.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_engine.config import RewardConfig
from rlhf_engine.data import Kind, Tally, load_rows, split_by_group
from rlhf_engine.devices import share
from rlhf_engine.errors import ConfigError, EngineError, NonFiniteError
from rlhf_engine.hydra import OFF, HydraModel, PairwiseRewardLoss, PointwiseRewardLoss, RoleSpec, peft_io, reward_model
from rlhf_engine.hydra.gate import ScalarHead
from rlhf_engine.hydra.loading import load_model, read_config, require_lm_head
from rlhf_engine.hydra.peft_io import merge_adapter, save_slot
from rlhf_engine.hydra.persist import load_into
from rlhf_engine.runs.checkpoint import check, read_counters, require_same, resolve_resume
from rlhf_engine.runs.folder import FINAL_FOLDER, RECORD_FILE, check_output, write_final
from rlhf_engine.training import reward_metrics
from rlhf_engine.training.supervised import (
    Example,
    SupervisedState,
    SupervisedTrainer,
    digest,
    packed_batch,
    pairwise_loss,
)

REWARD_SLOT = "reward"
CLASSIFIER_FOLDER = "sequence_classification"
EVALUATED_AT_ONCE = 16  # rows of an evaluation that are packed together
_KINDS: dict[str, tuple[Kind, ...]] = {
    "pairwise": ("preference", "implicit_preference"),
    "pointwise": ("unpaired_preference",),
    "auto": ("preference", "unpaired_preference", "implicit_preference"),
}
_POINTWISE = ("completion", "label")
"""Columns of pointwise rows; they are among the others of pairs that could serve as either."""
_GROUPS_TO_REPORT = 200  # held-out groups of a share from which on half of them choose the best step and half report it


@dataclass(frozen=True, kw_only=True)
class RewardState(SupervisedState):
    """Counters of a run, whose `rows` are training and held-out ones."""

    best_step: int | None = None
    """Step of the best evaluation so far; None before the first, and where the metric is undefined."""
    best_metric: float | None = None  # value of `metric_for_best_model` at `best_step`
    metric_for_best_model: str | None = None
    """Name of the metric that `best_step` is the best by; None in checkpoints written before it was recorded."""


def reward_roles(mode: str) -> dict[str, RoleSpec]:
    """The reward role on a slot beside the base, whose hash counts its LM head (`lora`), or on it (`full`)."""
    if mode == "full":
        return {"reward": RoleSpec(head="reward", trainable=True)}
    return {"reference": RoleSpec(slot=OFF), "reward": RoleSpec(slot=REWARD_SLOT, head="reward", trainable=True)}


def reward_loss(
    model: HydraModel,
    examples: Sequence[Example],
    *,
    denom: float,
    dropout_seed: int,
    places: Sequence[int] | None = None,
    pos_weight: float = 1.0,
    center: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The module's loss of some rows, divided by `denom`, and without gradients loss, accuracy and margin."""
    batch = packed_batch(examples, model.device, places=places)
    output: PairwiseRewardLoss | PointwiseRewardLoss
    if examples[0].label is None:
        output = pairwise_loss(examples, model.device, denom=denom, center=center)
    else:
        labels = torch.tensor([bool(e.label) for e in examples], device=model.device)
        output = PointwiseRewardLoss(label_N=labels, denom=denom, pos_weight=pos_weight)
    (result,) = model(batch, (output,), dropout_seed=dropout_seed)
    return result.loss, {
        "reward_loss": result.loss.detach(),
        "reward_accuracy": (result.n_correct + 0.5 * result.n_tied) / denom,
        "reward_margin": result.sum_margin / denom,
    }


class RewardTrainer(SupervisedTrainer[RewardState]):
    """Training of a reward model. Construction finds what can be wrong with the request; `run` spends the time."""

    config: RewardConfig
    title = "reward"

    def load(self) -> HydraModel:
        """The model as it is before any step, of a base that the result can be of. See `SupervisedTrainer.load`."""
        config = self.config
        base = read_config(config.model_name_or_path)
        if config.mode == "lora":
            require_lm_head(base, config.model_name_or_path)
        if config.mode == "full" or config.export != "none":
            hint = "; --export none leaves it out" if config.mode == "lora" else ""
            try:
                reward_model.require_classifier_class(config.model_name_or_path, "model_name_or_path")
            except ValueError as error:
                raise ConfigError(f"{error}{hint}") from error
        return super().load()

    def find_checkpoint(self) -> Path | None:
        """Find the checkpoint to go on from. Raises ConfigError for a folder with another run."""
        checkpoint = resolve_resume(self.config.resume_from_checkpoint, self.output)
        check_output(self.output, resume=self.config.resume_from_checkpoint, checkpoint=checkpoint)
        return checkpoint

    def load_rows(self) -> RewardState:
        """Load training rows and held-out ones of one kind; the counters of a run that begins."""
        self.rows, self.eval_set, self.test_set = self._load_sets()
        self.objective = "pairwise" if self.rows[0].label is None else "pointwise"
        self.pos_weight = self._check_objective()
        self.best_metric = self._best_metric()
        self.shown = {
            "reward_loss": "loss",
            "reward_accuracy": "accuracy",
            f"eval/{self.best_metric}": f"held-out {self.best_metric}",
            "tokens_per_second": "tokens/s",
        }
        self._note_rows()
        texts = (text for rows in (self.rows, [*self.eval_set, *self.test_set]) for text in (*map(_named, rows), "|"))
        return RewardState(
            step=0,
            seed=self.config.seed,
            metric_for_best_model=self.best_metric,
            rows=digest(texts),
            rows_per_step=self.rows_per_step,
        )

    def require_same_run(self, checkpoint: Path) -> None:
        """Raise ConfigError for a checkpoint of a run that this one cannot go on with."""
        counters = read_counters(checkpoint, RewardState)
        require_same(checkpoint, counters, metric_for_best_model=self.best_metric)
        super().require_same_run(checkpoint)

    def build_model(self) -> HydraModel:
        """The model to train, its head's bias fixed at 0. ConfigError where the head would not see all of the slot."""
        model = self.load_base(reward_roles(self.config.mode), REWARD_SLOT)
        backbone = model.backbone()
        slot = backbone.slot(REWARD_SLOT).items() if self.config.mode == "lora" else ()
        outside = [path for path, _ in slot if not path.startswith(backbone.blocks_prefix)]
        if outside:
            raise ConfigError(
                f"lora_target_modules: expected linears of the blocks, whose hidden states the reward head reads, got "
                f"{outside}"
            )
        bias = model.heads["reward"].bias
        assert isinstance(bias, nn.Parameter)
        with torch.no_grad():
            bias.zero_()
        bias.requires_grad_(False)
        model.trained_heads.add("reward")  # by this run
        return model

    def go_on(self, held: RewardState) -> RewardState:
        """The counters of a checkpoint, with what old ones lack; ConfigError where the best step's is not there."""
        best = held.best_step
        if best is not None and not self._checkpoint(best).is_dir():
            raise ConfigError(
                f"resume_from_checkpoint: expected checkpoint-{best} in {self.output}, the best step so far by "
                f"{self.resume}, which is not there; copy it beside"
            )
        if best is not None:
            check(self._checkpoint(best))  # now, not when it is to become the result
        return replace(super().go_on(held), metric_for_best_model=self.start.metric_for_best_model)

    @property
    def trained_parameters(self) -> int:
        """Σ r (d_in + d_out) over the adapted linears (or the whole base) and the head's weight."""
        own = self.model.trainable_parameters("reward").values()
        return sum(p.numel() for p in own if p.requires_grad)

    @property
    def base_parameters(self) -> int:
        """Parameters of the base, of which `trained_parameters` are a share."""
        return sum(p.numel() for _, p in self.model.backbone().base_parameters())

    def look(self) -> dict[str, float | None]:
        """An evaluation before the first step, after every `eval_steps` steps, and after the last one."""
        step, every = self.state.step, self.config.eval_steps
        if not self.eval_set or not (step == 0 or self._is_last() or (every and step % every == 0)):
            return {}
        metrics = self.evaluate()
        if step:
            self._note_best(metrics[f"eval/{self.best_metric}"])
        return metrics

    def end(self) -> dict[str, Any]:
        """Write the best step's model into final/, and the result into the record; `model` is then that one."""
        self._load_best()
        write_final(self.output, lambda folder: write_reward_model(self.model, self.tokenizer, folder, self.config))
        result = self.result()
        self.write_record(result)
        return result

    def loss(
        self, rows: Sequence[Example], places: Sequence[int], *, dropout_seed: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`reward_loss` of some rows of a step."""
        return reward_loss(
            self.model, [rows[i] for i in places], denom=float(len(rows)), dropout_seed=dropout_seed, places=places,
            pos_weight=self.pos_weight, center=self.config.center_rewards_coefficient or 0.0,
        )  # fmt: skip

    def rewards(self, examples: Sequence[Example]) -> torch.Tensor:
        """Rewards of all answers, fp32 [rows, answers per row], by shares of the ranks, or NonFiniteError."""
        self.model.eval()
        size, world = EVALUATED_AT_ONCE, self.world
        starts = range(0, len(examples), size)
        parts = [torch.empty(0, len(examples[0].answers))]
        with self.whole_base(), world.together("rewards of held-out rows"):
            for i in share(len(starts), world.rank, world.size):
                some = examples[starts[i] : starts[i] + size]
                rewards_N = self.model.score(self.packed(some), ("reward",)).rewards_N
                assert rewards_N is not None
                parts.append(rewards_N.cpu().view(-1, len(some)).T)
        by_rank = [of_rank["rewards"] for of_rank in world.gather_tensors({"rewards": torch.cat(parts)})]
        rewards = torch.cat([of_rank for of_rank in by_rank if of_rank is not None])
        bad = ~rewards.isfinite().all(1)
        if bad.any():
            raise NonFiniteError(
                f"reward of row {int(bad.int().argmax())} is {rewards[bad][0].tolist()} at step {self.state.step}"
            )
        return rewards

    def evaluate(self) -> dict[str, float | None]:
        """Held-out metrics with 95 % intervals: `eval/…` of rows that choose the best step, `test/…` of others."""
        assert self.eval_set
        sets = {"eval": self.eval_set, "test": self.test_set}
        rewards = self.rewards([*self.eval_set, *self.test_set]).split([len(rows) for rows in sets.values()])
        return {
            f"{name}/{metric}": value
            for (name, rows), rewards_NA in zip(sets.items(), rewards, strict=True)
            if rows
            for metric, value in self._judge(rows, rewards_NA).items()
        }

    def _judge(self, rows: Sequence[Example], rewards_NA: torch.Tensor) -> dict[str, float | None]:
        groups = [e.group for e in rows]
        if self.objective == "pointwise":
            labels = torch.tensor([bool(e.label) for e in rows])
            metrics = reward_metrics.pointwise_metrics(rewards_NA[:, 0], labels, pos_weight=self.pos_weight)
            return metrics | reward_metrics.intervals(rewards_NA[:, 0], labels, groups)
        metrics = reward_metrics.pairwise_metrics(
            rewards_NA[:, 0],
            rewards_NA[:, 1],
            center=self.config.center_rewards_coefficient or 0.0,
            margin_P=torch.tensor([e.margin for e in rows], dtype=torch.float64),
        )
        return metrics | reward_metrics.intervals(rewards_NA[:, 0] - rewards_NA[:, 1], None, groups)

    def finished(self) -> bool:
        """Whether every step is done, and the final model and the record's result are written."""
        if not self._is_last() or not (self.output / FINAL_FOLDER).is_dir():
            return False
        record = self.output / RECORD_FILE
        return record.is_file() and "result" in json.loads(record.read_text())

    def result(self) -> dict[str, Any]:
        """Entries of the record in the end: steps done, the step of the final model, and its metric."""
        best = self.state.best_step
        final = best if best is not None else self.state.step
        return {"steps": self.state.step, "final_step": final, "best_metric": self.state.best_metric}

    def _load_sets(self) -> tuple[list[Example], list[Example], list[Example]]:
        """Training rows, held-out rows that choose the best step, and such that only report; of one kind."""
        config = self.config
        train = self._load_examples("dataset_name", config.dataset_name, config.objective)
        if config.eval_share is not None:
            train, held_out = split_by_group(train, share=config.eval_share, seed=config.seed)
            if len({e.group for e in held_out}) < _GROUPS_TO_REPORT:
                return train, held_out, []
            # another seed: by the same one, held-out groups are all on one side
            halves = split_by_group(held_out, share=0.5, seed=config.seed + 1)
            return train, *halves
        if not isinstance(config.eval_dataset_name, str):
            return train, [], []
        objective = "pairwise" if train[0].label is None else "pointwise"
        return train, self._load_examples("eval_dataset_name", config.eval_dataset_name, objective), []

    def _load_examples(self, argument: str, path: str, objective: str) -> list[Example]:
        config = self.config
        tally = Tally(source=path, argument=argument, max_bad_rows=config.max_bad_rows)
        rows = load_rows(path, tally, config, kinds=_KINDS[objective], group_column=config.group_column)
        if objective == "auto" and all(row.columns.get(name) is not None for row in rows for name in _POINTWISE):
            raise ConfigError(
                f"objective: expected 'pairwise' or 'pointwise' for {argument}, whose rows have the columns of both, "
                "got 'auto'"
            )
        return self.tokenize(rows, tally)

    def _check_objective(self) -> float:
        """The weight of label 1; ConfigError for options of the other objective and for one class only."""
        config = self.config
        if self.objective == "pairwise":
            if config.pos_weight != "none":
                raise ConfigError(f"pos_weight: expected 'none' for pairs, got {config.pos_weight!r}")
            return 1.0
        if config.center_rewards_coefficient is not None:
            raise ConfigError(
                "center_rewards_coefficient: expected it unset for pointwise rows, whose labels say where 0 is, got "
                f"{config.center_rewards_coefficient:g}"
            )
        positives, negatives = count_labels(self.rows)
        if positives == 0 or negatives == 0:
            side = " left to train on" if config.eval_share is not None else ""
            raise ConfigError(
                f"dataset_name: expected rows with label true and rows with label false{side}, got {positives} true "
                f"and {negatives} false: nothing tells them apart"
            )
        return negatives / positives if config.pos_weight == "balanced" else 1.0

    def _best_metric(self) -> str:
        pairs = self.objective == "pairwise"
        known = reward_metrics.PAIRWISE_METRICS if pairs else reward_metrics.POINTWISE_METRICS
        asked = self.config.metric_for_best_model
        if asked is not None and asked not in known:
            raise ConfigError(
                f"metric_for_best_model: expected one of {known} for {self.objective} rows, got {asked!r}"
            )
        return asked or ("accuracy" if pairs else "auc")

    def _note_rows(self) -> None:
        """Note what the user should know of the held-out rows."""
        notes = self.notes
        if not self.eval_set:
            notes.append("no held-out rows (eval_dataset_name): the final model is the last step's")
            return
        if self.test_set:
            notes.append(
                f"of the held-out rows, {len(self.eval_set)} choose the best step (eval/…), and {len(self.test_set)} "
                "report without choosing (test/…)"
            )
        if self.objective == "pointwise" and 0 in count_labels(self.eval_set):
            positives, negatives = count_labels(self.eval_set)
            notes.append(
                f"the held-out rows are of one class only ({positives} true, {negatives} false): AUC, balanced "
                "accuracy and margin are undefined"
            )
            if self.best_metric in ("auc", "balanced_accuracy", "margin"):
                notes.append(f"{self.best_metric} is to choose the final model, which will be the last step's instead")
        both = {e.group for e in self.rows} & {e.group for e in self.eval_set}
        if both:
            notes.append(f"prompts that are in dataset_name and in eval_dataset_name: {len(both)}")

    def _note_best(self, value: float | None) -> bool:
        """Keep an evaluation that is better than all before; whether it is. Of equal ones the first stays."""
        if value is None:
            return False
        sign = -1.0 if self.best_metric in reward_metrics.LOWER_IS_BETTER else 1.0
        best = self.state.best_metric
        if best is not None and sign * value <= sign * best:
            return False
        self.state = replace(self.state, best_step=self.state.step, best_metric=value)
        return True

    def _load_best(self) -> None:
        best = self.state.best_step
        if best is None or best == self.state.step:
            return
        folder = self._checkpoint(best)
        if not folder.is_dir():
            raise EngineError(f"output_dir: expected the best step's checkpoint {str(folder)!r}, which is not there")
        check(folder)
        load_into(self.model, folder)

    def _checkpoint(self, step: int) -> Path:
        return self.output / f"checkpoint-{step}"

    def describe(self) -> dict[str, Any]:
        """Objective, rows, notes, and how much is trained."""
        rows: dict[str, Any] = {"train": len(self.rows), "eval": len(self.eval_set), "test": len(self.test_set)}
        if self.objective == "pointwise":
            rows |= {"train_true": count_labels(self.rows)[0], "eval_true": count_labels(self.eval_set)[0]}
        return {
            # a base that is trained has no hash that would mean something later
            "base_hash": self.model.backbone().base_hash() if self.config.mode == "lora" else None,
            "objective": self.objective, "metric_for_best_model": self.best_metric, "pos_weight": self.pos_weight,
            "rows": rows, "notes": self.notes, "trained_parameters": self.trained_parameters,
            "base_parameters": self.base_parameters, "trained_share": self.trained_parameters / self.base_parameters,
        }  # fmt: skip


def count_labels(examples: Sequence[Example]) -> tuple[int, int]:
    """Numbers of rows with label true and with label false."""
    positives = sum(bool(e.label) for e in examples)
    return positives, len(examples) - positives


def _named(example: Example) -> str:
    """Name of a row in the digest of all."""
    answers = tuple(map(tuple, example.answers))
    return repr((tuple(example.prompt), answers, example.label, *filter(None, [example.margin])))


def write_reward_model(
    model: HydraModel, tokenizer: PreTrainedTokenizerBase, folder: Path, config: RewardConfig
) -> None:
    """Write a new folder for `rlhf-engine train`: adapter, heads and `export`, or a sequence classifier."""
    folder.mkdir(parents=True)
    backbone, head = model.backbone(), model.heads["reward"]
    assert isinstance(head, ScalarHead)
    if config.mode == "full":
        reward_model.save_classifier(backbone.model, head, folder, tokenizer=tokenizer)
        return
    name = config.model_name_or_path
    save_slot(backbone, REWARD_SLOT, folder, base_name=name)
    peft_io.save_heads(model.heads, {"reward"}, folder)
    tokenizer.save_pretrained(folder)
    classifier = folder / CLASSIFIER_FOLDER
    if config.export == "adapter":
        reward_model.save_classifier_adapter(backbone, REWARD_SLOT, head, classifier, base_name=name)
    elif config.export == "merged":
        merged = merge_adapter(load_model(name, dtype=torch.float32, device="cpu", lm_head=False), folder)
        reward_model.save_classifier(merged, head, classifier, tokenizer=tokenizer)
