"""Model cards: what an export is, its data, method and curve, and code that loads it (`card.md.jinja`).

All that a card says was recorded by the run. What is not recorded is said to be not recorded. Names of files are
without their folders, and every text from outside is shown as one line of code, so that it forms no markup.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from huggingface_hub import ModelCard, ModelCardData

from rlhf_engine.config.commands import ExportConfig
from rlhf_engine.config.run import SUFFIXES
from rlhf_engine.hub import is_hub_name, plain_name, revision_of
from rlhf_engine.hydra import peft_io
from rlhf_engine.io import read_json
from rlhf_engine.runs.curves import plot_curves
from rlhf_engine.runs.folder import CURVES_FILE, METRICS_FILE
from rlhf_engine.runs.headline import headlines
from rlhf_engine.runs.metrics import read_columns
from rlhf_engine.runs.text import format_score

if TYPE_CHECKING:
    from rlhf_engine.tools.export import Source

CARD = "README.md"
STATE_FILE = "trainer_state.json"
_LONGEST = 120
_OPTIONS = (
    "method algorithm mode objective learning_rate critic_learning_rate lr_scheduler_type warmup_steps optim "
    "weight_decay max_grad_norm max_steps num_train_epochs generation_batch_size num_generations num_mini_batches "
    "num_ppo_epochs per_device_train_batch_size beta kl_target kl_estimator loss_type gamma lam cliprange vf_coef "
    "entropy_coef temperature top_k top_p min_p max_prompt_length max_completion_length max_length truncation "
    "reward_weights lora_r lora_alpha lora_dropout lora_target_modules dtype adapter_dtype load_in_8bit load_in_4bit "
    "quantization pos_weight center_rewards_coefficient metric_for_best_model seed"
)
"""Options of a run that a card shows. None of them holds a path or a secret."""
_DATA = ("dataset_name", "eval_dataset_name")


def write_card(config: ExportConfig, source: Source, folder: Path, notes: list[str]) -> None:
    """Write README.md, and the picture of the run's metrics, into an export's folder."""
    options = source.options
    named = config.base_model or source.base
    if config.base_model is None and source.adapter is None:  # a whole model: its base is what the run began with
        named = options.get("model_name_or_path") or "not recorded"
    on_hub = config.base_model is not None or is_hub_name(named)
    base, revision = public_name(named)
    scores = config.to == "sequence_classification"
    tags = {"rlhf-engine": True, "lora": source.adapter is not None, "reward-model": scores or source.role == "reward"}
    tags[_one_line(options.get("algorithm"))] = "algorithm" in options
    # adapters of other roles end in a scalar head
    task = "text-generation" if config.to != "peft" or source.role in ("actor", "sft") else None
    data = ModelCardData(
        library_name="peft" if config.to == "peft" else "transformers",
        tags=[name for name, is_so in tags.items() if is_so],
        pipeline_tag="text-classification" if scores else task,
        base_model=base if on_hub else None,
        datasets=[name for name, known in (_data_name(options.get(key)) for key in _DATA) if known] or None,
        license=config.license or "unknown",
    )
    markdown = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")  # texts from outside pass `code`
    template = jinja2.Template(markdown, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    metrics = (source.run_folder or folder) / METRICS_FILE
    columns = read_columns(metrics)
    if columns.steps:
        with contextlib.suppress(ValueError):  # no metric that is drawn
            plot_curves(metrics, folder / CURVES_FILE)
    text = template.render(
        card_data=data.to_yaml(), code=code, config=config, source=source,
        adapter=read_optional(folder, peft_io.CONFIG_FILE), base=base, revision=revision, on_hub=on_hub,
        data=_data(source), method=_method(source, columns.steps[-1] if columns.steps else None),
        curve=headlines(columns, source.run, None) if columns.steps else [],
        picture=CURVES_FILE if (folder / CURVES_FILE).is_file() else None, notes=notes,
    )  # fmt: skip
    ModelCard(text).save(folder / CARD)


def read_optional(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    return read_json(folder, name, "source") if (folder / name).is_file() else {}


def public_name(name: str) -> tuple[str, str | None]:
    """Name of a base for others, and its revision: that of the Hub, or else its folder's name without the path."""
    return (plain_name(name), revision_of(name)) if is_hub_name(name) else (Path(name).resolve().name, None)


def code(value: object) -> str:
    """A value as code on one line, cut after 120 characters; whatever it holds is shown and forms no markup."""
    line = _one_line(value).replace("`", "'").replace("|", "¦")
    return f"`{line if len(line) <= _LONGEST else line[: _LONGEST - 1] + '…'}`" if line else "`(empty)`"


def _one_line(value: object) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())


def _data(source: Source) -> list[tuple[str, ...]]:
    """Sources of the run with their counts of rows."""
    rows = []
    for key in _DATA:
        counts = source.run.get("data", {}).get(key, {})
        shown = (format_score(counts[n]) if n in counts else "not recorded" for n in ("read", "used", "truncated"))
        rows += [(key, code(_data_name(source.options[key])[0]), *shown)] if source.options.get(key) else []
    return rows


def _data_name(name: object) -> tuple[str, bool]:
    """Name of a data source without folders, and whether it is one of the Hub."""
    text = re.sub(r"\[:\d+\]$", "", str(name or "").removeprefix("hub:"))
    owner_name = "/".join(text.partition("@")[0].partition(":")[0].split("/")[:2])
    if name and not text.endswith(SUFFIXES) and not Path(text).exists() and is_hub_name(owner_name):
        return owner_name, True
    return Path(text).name, False


def _method(source: Source, last_step: int | None) -> list[tuple[str, str]]:
    options, versions = source.options, source.run.get("versions", {})
    if not options:
        return []
    shown = {name: options[name] for name in _OPTIONS.split() if options.get(name) not in (None, [], False)}
    rows = [(k, code(", ".join(map(str, v)) if isinstance(v, list) else v)) for k, v in shown.items()]
    # a reward function's file, and its options, may lie anywhere
    rewards = [Path(str(spec).partition(",")[0]).name for spec in options.get("reward_funcs") or []]
    rows += [("reward_funcs", ", ".join(code(name) for name in rewards))] if rewards else []
    parts = ("reward_adapter", "reward_model_path", "actor_adapter", "reference_adapter")
    rows += [(name, code(public_name(str(options[name]))[0])) for name in parts if options.get(name)]
    rows += [(name, code(versions[name])) for name in ("rlhf-engine", "torch", "transformers") if versions.get(name)]
    result = source.run.get("result", {})
    steps = read_optional(source.root, STATE_FILE).get("step", result.get("final_step", result.get("steps", last_step)))
    return [*rows, ("steps", format_score(steps) if isinstance(steps, int) else "not recorded")]
