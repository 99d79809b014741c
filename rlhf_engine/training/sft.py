"""Supervised fine-tuning with a reward head: the starting point of RL (Hydra-SFT, arXiv 2309.00754 §3.1).

    L = −Σ_t log p(y_w,t | x, y_w,<t) / tokens  +  γ · (−log σ(r(x, y_w) − r(x, y_l))) / pairs

Cross-entropy on the chosen answer's tokens only; γ = 0 is plain supervised fine-tuning, and rejected answers are not
even run. `full` trains the base and writes a new one with its reward head; `lora` leaves the base alone and writes a
slot.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_engine.config import SFTConfig
from rlhf_engine.data import (
    Preference,
    PromptCompletion,
    Report,
    Row,
    Tally,
    Truncation,
    batch_indices,
    load_rows,
    pack,
    require_room,
)
from rlhf_engine.data import tokenize_rows as tokenize
from rlhf_engine.devices import DTYPES, resolve_device
from rlhf_engine.errors import ConfigError, NonFiniteError
from rlhf_engine.folders import put_model_in_place
from rlhf_engine.hydra import (
    OFF,
    HydraModel,
    LmLoss,
    PackedBatch,
    PairwiseRewardLoss,
    RoleSpec,
    peft_io,
)
from rlhf_engine.hydra.loading import read_context_length
from rlhf_engine.tokenizing import load_tokenizer, read_eos_token_ids
from rlhf_engine.training.build import slot_config
from rlhf_engine.training.optimizer import RoleOptimizer, lr_factor, require_warm_up

SFT_SLOT = "sft"


@dataclass(frozen=True, kw_only=True)
class Example:
    """One tokenized row."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int] | None
    """None for rows without a pair."""

    @property
    def tokens(self) -> int:
        """Tokens that go through the model, a pair's prompt twice."""
        answers = [self.chosen] if self.rejected is None else [self.chosen, self.rejected]
        return sum(len(self.prompt) + len(answer) for answer in answers)


def sft_roles(mode: str, *, with_reward: bool) -> dict[str, RoleSpec]:
    """Language model and reward head on the base itself (`full`) or on the slot `sft` (`lora`)."""
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
) -> list[Example]:
    """Rows as token ids; without pairs, rejected answers are left aside. Raises ConfigError as `data.tokenize_rows`."""
    if not pairs:  # nor does their length matter
        rows = [_chosen_alone(row) if isinstance(row, Preference) else row for row in rows]
    return [
        Example(prompt=t.prompt, chosen=t.answers[0], rejected=t.answers[1] if pairs else None)
        for t in tokenize(rows, tokenizer, tally, max_length=max_length, truncation=truncation, end_ids=end_ids)
    ]


def _chosen_alone(row: Preference) -> PromptCompletion:
    return PromptCompletion(
        prompt=row.prompt, completion=row.chosen, group=row.group, place=row.place, columns=row.columns
    )


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
    """The module's loss of some examples; tokens and pairs are the denominators of the whole optimizer step.

    places: of the examples in that step, so that no micro-batch changes the dropout masks; default 0…n−1.
    """
    with_pairs = gamma > 0 and examples[0].rejected is not None
    prompts = [e.prompt for e in examples]
    answers = [e.chosen for e in examples]
    ids = [2 * i for i in (range(len(examples)) if places is None else places)]
    if with_pairs:
        prompts = prompts * 2
        answers = answers + [e.rejected or [] for e in examples]
        ids = ids + [i + 1 for i in ids]
    batch = PackedBatch.from_lists(prompts, answers, device=model.device, sample_ids=ids)
    n_chosen = sum(len(e.chosen) for e in examples)
    lm = LmLoss(role="sft", denom=tokens, rows_M=torch.arange(n_chosen, device=model.device))
    if not with_pairs:
        (lm_loss,) = model(batch, (lm,), dropout_seed=dropout_seed)
        return lm_loss, {"lm_loss": lm_loss.detach()}
    n = len(examples)
    index = torch.arange(2 * n, device=model.device)
    pairwise = PairwiseRewardLoss(chosen_P=index[:n], rejected_P=index[n:], denom=pairs)
    lm_loss, reward = model(batch, (lm, pairwise), dropout_seed=dropout_seed)
    return lm_loss + gamma * reward.loss, {
        "lm_loss": lm_loss.detach(),
        "reward_loss": reward.loss.detach(),
        "reward_accuracy": reward.n_correct / pairs,
        "reward_margin": reward.sum_margin / pairs,
    }


class SftTrainer:
    """Everything that can be wrong with the request is found before the first step."""

    def __init__(self, config: SFTConfig) -> None:
        self.config = config
        output = Path(config.output_dir)
        if output.exists() and not output.is_dir():
            raise ConfigError(f"output_dir: expected a folder, got the file {str(output)!r}")
        if output.exists() and any(output.iterdir()) and not config.overwrite_output_dir:
            raise ConfigError(f"output_dir: expected an empty or new folder (or --overwrite_output_dir), got {output}")
        tally = Tally(source=config.dataset_name, max_bad_rows=config.max_bad_rows)
        rows = load_rows(config.dataset_name, tally, kinds=("preference", "implicit_preference", "prompt_completion"))
        self.pairs = isinstance(rows[0], Preference) and config.gamma > 0
        self.tokenizer = load_tokenizer(config.model_name_or_path)
        context = read_context_length(config.model_name_or_path)
        self.examples = tokenize_rows(
            rows,
            self.tokenizer,
            tally,
            max_length=min(config.max_length or context, context),
            pairs=self.pairs,
            truncation=config.truncation,
            end_ids=read_eos_token_ids(self.tokenizer, config.model_name_or_path),
        )
        self.reports: tuple[Report, ...] = (tally.report(),)
        require_room(max(example.tokens for example in self.examples), config.max_tokens_per_micro_batch)
        self.model = HydraModel.from_pretrained(
            config.model_name_or_path,
            roles=sft_roles(config.mode, with_reward=self.pairs),
            slots={SFT_SLOT: slot_config(config)} if config.mode == "lora" else {},
            dtype=DTYPES[config.dtype],
            device=resolve_device(config.device),
            adapter_dtype=DTYPES[config.adapter_dtype],
            seed=config.seed,
        )
        if config.gradient_checkpointing:
            self.model.backbone().enable_gradient_checkpointing()
        self.rows_per_step = config.per_device_train_batch_size * config.gradient_accumulation_steps
        epochs = math.ceil(config.num_train_epochs * len(self.examples) / self.rows_per_step)
        self.total_steps = config.max_steps if config.max_steps is not None else max(1, epochs)
        require_warm_up(config.warmup_steps, self.total_steps)
        self.optimizer = RoleOptimizer(
            self.model,
            dict.fromkeys(self.model.roles, config.learning_rate),
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )

    def run(self, on_step: Callable[[int, dict[str, float]], None] | None = None) -> dict[str, float]:
        """Train and write the result; returns the last step's metrics. on_step(step, metrics) after each."""
        self.model.train()
        metrics: dict[str, float] = {}
        for step in range(self.total_steps):
            metrics = self.step(step)
            if on_step is not None:
                on_step(step + 1, metrics)
        self.model.eval()
        self.save()
        return metrics

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step with exact denominators over its micro-batches."""
        config = self.config
        began = time.perf_counter()
        indices = batch_indices(len(self.examples), self.rows_per_step, step, config.seed)
        chosen = [self.examples[i] for i in indices]
        tokens = float(sum(len(e.chosen) for e in chosen))
        totals: dict[str, torch.Tensor] = {}
        parts = pack(
            [example.tokens for example in chosen],
            max_rows=config.per_device_train_batch_size,
            max_tokens=config.max_tokens_per_micro_batch,
        )
        for part in parts:
            loss, stats = sft_loss(
                self.model,
                [chosen[i] for i in part],
                gamma=config.gamma,
                tokens=tokens,
                pairs=float(len(chosen)),
                dropout_seed=config.seed * 1_000_003 + step,
                places=part,
            )
            loss.backward()
            for name, value in {"loss": loss.detach(), **stats}.items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value
        metrics = {name: float(value) for name, value in totals.items()}
        for name in ("lm_loss", "reward_loss"):
            if name in metrics and not math.isfinite(metrics[name]):
                self.model.zero_grad(set_to_none=True)
                raise NonFiniteError(f"{name} is {metrics[name]} at step {step + 1}; nothing of it was applied")
        self.optimizer.set_lr_factor(
            lr_factor(
                step,
                kind=config.lr_scheduler_type,
                warmup_steps=config.warmup_steps,
                total_steps=self.total_steps,
            )
        )
        metrics |= self.optimizer.step()
        metrics["tokens_per_second"] = tokens / (time.perf_counter() - began)
        return metrics

    def save(self) -> None:
        """Write a new base with its heads (`full`) or the slot `sft` in PEFT format (`lora`)."""
        output = Path(self.config.output_dir)
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = output.with_name(f".{output.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        backbone = self.model.backbone()
        if self.config.mode == "full":
            backbone.model.save_pretrained(temporary)
        else:
            name = str(Path(self.config.model_name_or_path).resolve())
            peft_io.save_slot(
                backbone.slot(SFT_SLOT),
                temporary,
                base_name=name,
                base_hash=backbone.base_hash(),
                trunk_hash=backbone.trunk_hash(),
                transposed=backbone.transposed,
            )
        self.tokenizer.save_pretrained(temporary)
        peft_io.save_heads(self.model.heads, set(self.model.heads), temporary)
        put_model_in_place(temporary, output)
