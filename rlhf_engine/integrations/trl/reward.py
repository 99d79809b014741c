"""`PerlRewardTrainer`: TRL's RewardTrainer, for single answers that were liked or not as well as for pairs.

    pairs     {"prompt", "chosen", "rejected"}       −log σ(r_w − r_l), as in RewardTrainer
    thumbs    {"prompt", "completion", "label"}      −mean[w p log σ(r) + (1 − p) log σ(−r)], label true or false

w is 1, or with pos_weight "balanced" (number of false) / (number of true). Source: PERL (arXiv 2403.10704), whose
reward models are LoRA on a frozen base; a PeftModel's layers run on our kernels. The folder that is saved is one
for `AutoPeftModelForSequenceClassification`, and for the trainers and `rlhf-engine train`: the
policy then runs on the same base. r is read at the token that ends the answer, where rollouts stop; RewardTrainer reads
it behind the white space that many chat templates write there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch.nn.utils.rnn import pad_sequence

from rlhf_engine.data.tokenize import encode_prompt, end_answer, read_eos_token_ids
from rlhf_engine.data.types import template_arguments
from rlhf_engine.errors import ConfigError, NonFiniteError
from rlhf_engine.hydra.optimizer import warn_without_masters
from rlhf_engine.integrations.peft import fuse_lora
from rlhf_engine.integrations.trl.patching import require_parameters, require_trl
from rlhf_engine.integrations.trl.trainers import PERL
from rlhf_engine.training.reward_metrics import pointwise_metrics

require_trl()
from trl import GRPOConfig, RewardConfig, RewardTrainer  # noqa: E402

SERVED_FOR_THUMBS = frozenset(
    ("activation_offloading", "chat_template_path", "dataset_num_proc", "eos_token", "max_length", "pad_token")
)
"""Options that RewardConfig adds to those of all trainers and that thumbs read; its others are refused there."""
_COLUMNS = ("completion_ids", "label")
_PAIRS = {"chosen_ids", "rejected_ids", "chosen_input_ids", "rejected_input_ids"}
_OVERRIDDEN = {
    "_prepare_dataset": ("dataset", "processing_class", "args", "dataset_name"),
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "evaluation_loop": ("dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"),
}


@dataclass
class PerlRewardConfig(RewardConfig):
    """RewardConfig with the weight of liked answers."""

    pos_weight: str = field(
        default="none", metadata={"help": "balanced: liked answers count (number of false) / (number of true) times."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pos_weight not in ("none", "balanced"):
            raise ConfigError(f"pos_weight: expected 'none' or 'balanced', got {self.pos_weight!r}")


class PerlRewardTrainer(RewardTrainer):
    """RewardTrainer for pairs and for thumbs (PERL, arXiv 2403.10704 §3)."""

    _tag_names = ("trl", "rlhf-engine", "reward-trainer")
    _name = "PERL"
    _paper = PERL

    def __init__(
        self,
        model: Any,
        args: PerlRewardConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        **options: Any,
    ) -> None:
        """Make the trainer as RewardTrainer does; the columns of train_dataset say which kind of rows it has.

        Args:
            model: path, sequence classifier with one label, or PeftModel, as in RewardTrainer.
            args: options; None: the defaults with output folder `reward-model`.
            data_collator: makes batches of rows; None: RewardTrainer's, or ours for thumbs.
            train_dataset: rows with prompt, chosen and rejected, or with prompt, completion and label.
            options: further arguments of RewardTrainer.

        Raises:
            ConfigError: no rows, thumbs of one class only or with other labels, an option that is not read for this
                kind of rows, a max_length that no row has room in, or a TRL that is not known.
        """
        require_trl()
        for name, parameters in _OVERRIDDEN.items():
            require_parameters(f"RewardTrainer.{name}", getattr(RewardTrainer, name), parameters)
        if train_dataset is None:
            raise ConfigError("train_dataset: expected rows, got None")
        columns = set(next(iter(train_dataset)))
        self._base_name = model if isinstance(model, str) else str(model.config._name_or_path)
        self.thumbs = {"completion", "label"} <= columns or set(_COLUMNS) <= columns
        args = args or PerlRewardConfig("reward-model")
        if not self.thumbs and getattr(args, "pos_weight", "none") != "none":
            raise ConfigError(f"pos_weight: expected 'none' for pairs, got {args.pos_weight!r}")
        if self.thumbs:
            _require_read(args)
        self.pos_weight = 1.0
        self._judged: list[tuple[torch.Tensor, torch.Tensor]] = []
        data_collator = data_collator or (self._collate if self.thumbs else None)
        super().__init__(model=model, args=args, data_collator=data_collator, train_dataset=train_dataset, **options)
        unwrapped = self.accelerator.unwrap_model(self.model)
        self.fusion = fuse_lora(unwrapped) if isinstance(unwrapped, PeftModel) else None
        """Fused layers of a PeftModel; None where everything is trained."""
        if self.thumbs:
            self.pos_weight = self._balance()

    def _balance(self) -> float:
        labels = [bool(label) for label in self.train_dataset["label"]]
        liked = sum(labels)
        if liked in (0, len(labels)):
            raise ConfigError(
                f"train_dataset: expected rows with label true and rows with label false, got {liked} true and "
                f"{len(labels) - liked} false: nothing tells them apart"
            )
        balanced = getattr(self.args, "pos_weight", "none") == "balanced"  # TRL's own RewardConfig has none
        return (len(labels) - liked) / liked if balanced else 1.0

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make RewardTrainer's optimizer, with a warning where steps would round away.

        Args:
            model: model whose parameters are trained; None: the trainer's.

        Returns:
            The optimizer, which is the trainer's from now on.
        """
        optimizer = super().create_optimizer(*([] if model is None else [model]))
        warn_without_masters(optimizer)
        return optimizer

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        columns = set(next(iter(dataset)))
        processes = {"num_proc": args.dataset_num_proc} if isinstance(dataset, Dataset) else {}
        ends = read_eos_token_ids(processing_class, self._base_name) if self._base_name else None
        if not self.thumbs:
            pairs = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
            names = sorted(set(next(iter(pairs))) & _PAIRS - columns)  # given as tokens they stay as they are
            return pairs.map(
                lambda row: {name: end_answer(processing_class, row[name], ends) for name in names}, **processes
            )
        if set(_COLUMNS) <= columns:
            return dataset
        if not {"completion", "label"} <= columns:
            raise ConfigError(f"{dataset_name}_dataset: expected columns completion and label, got {sorted(columns)}")

        def tokenize(row: dict[str, Any]) -> dict[str, Any]:
            if not isinstance(row["label"], (bool, int)) or row["label"] not in (0, 1):
                raise ConfigError(f"{dataset_name}_dataset: expected label true or false, got {row['label']!r}")
            tokens = end_answer(processing_class, _tokens(row, processing_class), ends)
            return {"completion_ids": tokens, "label": bool(row["label"])}

        rows = dataset.map(tokenize, remove_columns=sorted(columns - {"label"}), **processes)
        if args.max_length is not None:
            short = rows.filter(lambda row: len(row["completion_ids"]) <= args.max_length, **processes)
            if hasattr(rows, "__len__") and len(rows) and not len(short):
                raise ConfigError(f"max_length: expected one that some row has room in, got {args.max_length}")
            rows = short
        return rows

    def _set_signature_columns_if_needed(self) -> None:
        if self.thumbs:
            self._signature_columns = list(_COLUMNS)
        else:
            super()._set_signature_columns_if_needed()

    def _collate(self, rows: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [torch.tensor(row["completion_ids"]) for row in rows]
        pad = self.processing_class.pad_token_id
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
            "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
            "label": torch.tensor([bool(row["label"]) for row in rows]),
        }

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of pairs as RewardTrainer does, and of thumbs as the module's formula.

        Args:
            model: the model, perhaps wrapped.
            inputs: a batch of the collator; of thumbs `input_ids` and `attention_mask` [N, L], and `label` bool [N].
            return_outputs: whether to return the model's outputs as well.
            num_items_in_batch: for RewardTrainer; thumbs do not read it.

        Returns:
            The loss, 0-d; with `return_outputs` a pair of it and the model's outputs.

        Raises:
            NonFiniteError: the loss of thumbs is NaN or infinite.
        """
        if not self.thumbs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        mode = "train" if self.model.training else "eval"
        inputs = dict(inputs)
        label = inputs.pop("label")
        outputs = model(**inputs, use_cache=False)
        reward = outputs.logits.squeeze(-1).float()
        weight = torch.tensor(self.pos_weight, device=reward.device)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(reward, label.float(), pos_weight=weight)
        if not torch.isfinite(loss):
            raise NonFiniteError(f"the reward model's loss is {float(loss)}")
        gathered, labels = self.accelerator.gather_for_metrics((reward.detach(), label))
        if mode == "eval":
            self._judged.append((gathered.cpu(), labels.cpu()))
        else:
            self._total_train_tokens += int(self.accelerator.gather(inputs["attention_mask"].sum()).sum())
        metrics = self._metrics[mode]
        metrics["num_tokens"] = [self._total_train_tokens]
        metrics["mean_reward"].append(gathered.mean().item())
        metrics["accuracy"].append(((gathered > 0) == labels).float().mean().item())
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, *arguments: Any, metric_key_prefix: str = "eval", **options: Any) -> Any:
        """Evaluate; for thumbs with AUC, balanced accuracy, margin and calibration over all rows.

        Args:
            arguments: as of RewardTrainer: data loader, description and further ones.
            metric_key_prefix: prefix of the metrics' names.
            options: further keyword arguments of RewardTrainer.

        Returns:
            RewardTrainer's output, to whose metrics those of thumbs are added.
        """
        self._judged = []
        output = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **options)
        if self._judged:
            reward_N, label_N = (torch.cat(parts) for parts in zip(*self._judged, strict=True))
            whole = pointwise_metrics(reward_N, label_N, pos_weight=self.pos_weight)
            known = {name: x for name, x in whole.items() if x is not None and name != "loss"}
            output.metrics.update({f"{metric_key_prefix}_{name}": x for name, x in known.items()})
        return output


def _require_read(args: RewardConfig) -> None:
    """Raise ConfigError for an option of a reward model's configuration that is not read where rows are thumbs."""
    common = {option.name for option in dataclasses.fields(GRPOConfig)}
    for option in dataclasses.fields(RewardConfig):
        value = getattr(args, option.name)
        if option.name not in {*common, *SERVED_FOR_THUMBS} and value != option.default:
            expected = f"{option.default!r} for labels, which say where 0 is"
            raise ConfigError(f"{option.name}: expected {expected}, got {value!r}")


def _tokens(row: Mapping[str, Any], processing_class: Any) -> list[int]:
    """Prompt and answer, as RewardTrainer has a pair's."""
    answer, prompt = row["completion"], row.get("prompt")
    if processing_class.eos_token is None:
        raise ConfigError("processing_class: expected a tokenizer with an eos_token, got one without")
    if isinstance(answer, str):
        return encode_prompt(processing_class, (prompt or "") + answer)
    talk = [*(prompt or []), *answer]
    encoded = processing_class.apply_chat_template(talk, tokenize=True, return_dict=True, **template_arguments(row))
    return list(encoded["input_ids"])
