"""Model cards: what an export is, its data, method and curve, and code that loads it.

All that a card says was recorded by the run. What is not recorded is said to be not recorded. Names of files are
without their folders, and every text from outside is shown as one line of code, so that it forms no markup.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf_engine.config.data import SUFFIXES
from rlhf_engine.export.peft import vllm_obstacle, vllm_rank
from rlhf_engine.export.source import Source, public_name
from rlhf_engine.hub import is_hub_name
from rlhf_engine.hydra import peft_io
from rlhf_engine.runs.curves import PANELS, plot_curves
from rlhf_engine.runs.folder import CURVES_FILE, METRICS_FILE
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.runs.text import format_score

CARD = "README.md"
_LONGEST = 120
_NOT_RECORDED = "Not recorded."
_OPTIONS = (
    *("method", "algorithm", "mode", "objective", "learning_rate", "critic_learning_rate", "lr_scheduler_type"),
    *("warmup_steps", "optim", "weight_decay", "max_grad_norm", "max_steps", "num_train_epochs"),
    *("generation_batch_size", "num_generations", "num_mini_batches", "num_ppo_epochs", "per_device_train_batch_size"),
    *("beta", "kl_target", "kl_estimator", "loss_type", "gamma", "lam", "cliprange", "vf_coef", "entropy_coef"),
    *("temperature", "top_k", "top_p", "min_p", "max_prompt_length", "max_completion_length", "max_length"),
    *("truncation", "reward_weights"),
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "dtype", "adapter_dtype", "load_in_8bit"),
    *("load_in_4bit", "pos_weight", "center_rewards_coefficient", "metric_for_best_model", "seed"),
)
"""Options of a run that a card shows. None of them holds a path or a secret."""
_DATA = ("dataset_name", "eval_dataset_name")
_PARTS = ("reward_adapter", "reward_model_path", "actor_adapter", "reference_adapter")
_LIBRARY = {"merged": "transformers", "sequence_classification": "transformers", "peft": "peft"}
_TASK = {"merged": "text-generation", "sequence_classification": "text-classification", "peft": "text-generation"}
_SPEAKS = ("actor", "sft")
"""Roles whose adapter answers prompts. Those of others end in a scalar head."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """Facts of a card that the source does not hold."""

    name: str
    """owner/name on the Hub, or the name of the folder."""
    to: str
    """Format of the export."""
    place: str
    """Place to load it from: its name on the Hub, or "." for the folder itself."""
    base: str
    """Name of the base for others."""
    revision: str | None
    """Revision of the base on the Hub."""
    base_on_hub: bool
    """Whether `base` is a name of the Hub."""
    license: str | None
    """Licence that was given."""
    notes: list[str]
    """Facts that whoever uses the export has to know."""


def write_card(card: Card, source: Source, folder: Path) -> None:
    """Write README.md, and the picture of the run's metrics, into an export's folder."""
    sections = {
        "Base": _base(card, source),
        "Data": _data(source),
        "Method": _method(source),
        "Curve": _curve(source, folder),
        "How to load it": _loading(card, source, folder),
        "Limits": _limits(card, source),
    }
    kind = {
        "merged": "A language model whose training is merged into its weights.",
        "peft": "A LoRA adapter for a base that is not part of this folder.",
        "sequence_classification": "A reward model: one score for a prompt and its answer, higher is better.",
    }[card.to]
    made = f"Made with rlhf-engine. Role: {code(source.role)}." if source.role else "Made with rlhf-engine."
    body = "\n\n".join(f"## {title}\n{text}" for title, text in sections.items())
    text = f"---\n{_front_matter(card, source)}---\n\n# {code(card.name)}\n\n{kind} {made}\n\n{body}\n"
    (folder / CARD).write_text(text, encoding="utf-8")


def code(value: object) -> str:
    """A value as code on one line, cut after 120 characters; whatever it holds is shown and forms no markup."""
    line = _one_line(value).replace("`", "'").replace("|", "¦")
    return f"`{line if len(line) <= _LONGEST else line[: _LONGEST - 1] + '…'}`" if line else "`(empty)`"


def _one_line(value: object) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())


def _front_matter(card: Card, source: Source) -> str:
    """YAML that the Hub reads."""
    options = source.run.get("config", {})
    tags = ["rlhf-engine", *(["lora"] if source.adapter is not None else [])]
    tags += ["reward-model"] if card.to == "sequence_classification" or source.role == "reward" else []
    tags += [_one_line(options["algorithm"])] if "algorithm" in options else []
    datasets = [name for name, on_hub in (_data_name(options.get(key)) for key in _DATA) if on_hub]
    found: dict[str, Any] = {"library_name": _LIBRARY[card.to], "tags": tags}
    if card.to != "peft" or source.role in _SPEAKS:
        found["pipeline_tag"] = _TASK[card.to]
    if card.base_on_hub:
        found["base_model"] = card.base
    if datasets:
        found["datasets"] = datasets
    found["license"] = card.license or "unknown"
    # each value on its line, so that none of them ends the header
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=math.inf)


def _base(card: Card, source: Source) -> str:
    where = "a model of the Hub" if card.base_on_hub else "a folder that is not on the Hub under a recorded name"
    lines = [f"{code(card.base)}, {where}."]
    if card.revision:
        lines.append(f"Revision: {code(card.revision)}.")
    if source.base_hash:
        lines.append(f"SHA-256 over its weights when the training began: {code(source.base_hash)}.")
    else:
        lines.append("A hash of its weights is not recorded.")
    return "\n".join(lines)


def _data(source: Source) -> str:
    """Sources and rows of the run, as a table."""
    options, reports = source.run.get("config", {}), source.run.get("data", {})
    rows = []
    for key in _DATA:
        if options.get(key) is None:
            continue
        counts = reports.get(key, {})
        shown = (format_score(counts[n]) if n in counts else "not recorded" for n in ("read", "used", "truncated"))
        rows.append((key, code(_data_name(options[key])[0]), *shown))
    if not rows:
        return _NOT_RECORDED
    return _table(("option", "data", "rows read", "rows used", "rows cut"), rows)


def _data_name(name: object) -> tuple[str, bool]:
    """Name of a data source without folders, and whether it is one of the Hub."""
    text = str(name or "").removeprefix("hub:")
    owner_name = "/".join(text.partition("@")[0].partition(":")[0].split("/")[:2])
    if name and not text.endswith(SUFFIXES) and not Path(text).exists() and is_hub_name(owner_name):
        return owner_name, True
    return Path(text).name, False


def _method(source: Source) -> str:
    """Options of the run, as a table."""
    options = source.run.get("config", {})
    if not options:
        return _NOT_RECORDED
    rows = [(name, code(_shown(options[name]))) for name in _OPTIONS if options.get(name) not in (None, [], False)]
    # a reward function's file, and its options, may lie anywhere
    rewards = [Path(str(spec).partition(",")[0]).name for spec in options.get("reward_funcs") or []]
    rows += [("reward_funcs", ", ".join(code(name) for name in rewards))] if rewards else []
    rows += [(name, code(public_name(str(options[name]))[0])) for name in _PARTS if options.get(name)]
    versions = source.run.get("versions", {})
    rows += [(name, code(versions[name])) for name in ("rlhf-engine", "torch", "transformers") if versions.get(name)]
    rows.append(("steps", format_score(source.step) if source.step is not None else "not recorded"))
    return _table(("option", "value"), rows)


def _shown(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _curve(source: Source, folder: Path) -> str:
    """First and last values of the run's main metrics, and their picture beside the card."""
    metrics = None if source.run_folder is None else source.run_folder / METRICS_FILE
    if metrics is None or not metrics.is_file():
        return _NOT_RECORDED
    try:
        plot_curves(metrics, folder / CURVES_FILE)
    except ValueError:  # no metric that is drawn
        return _NOT_RECORDED
    rows, found = read_metrics(metrics), []
    for panel in PANELS:
        for metric, label in panel.lines:
            values = [row[metric] for row in rows if row.get(metric) is not None]
            if values:
                found.append((panel.title, label, format_score(values[0]), format_score(values[-1])))
    picture = f"![metrics of the run by step]({CURVES_FILE})\n\n" if (folder / CURVES_FILE).is_file() else ""
    return f"{picture}{_table(('metric', 'of', 'first', 'last'), found)}"


def _loading(card: Card, source: Source, folder: Path) -> str:
    """Code that loads the export."""
    place, base = json.dumps(card.place), json.dumps(card.base)
    if card.to == "merged":
        return _python(
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"folder = {place}",
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            "model = AutoModelForCausalLM.from_pretrained(folder)",
            'ids = tokenizer("Once upon a time", return_tensors="pt").input_ids',
            "print(tokenizer.decode(model.generate(ids, max_new_tokens=20)[0]))",
        )
    if card.to == "sequence_classification":
        return _python(
            "import torch",
            "from transformers import AutoModelForSequenceClassification, AutoTokenizer",
            "",
            f"folder = {place}",
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            "model = AutoModelForSequenceClassification.from_pretrained(folder)",
            "# a prompt with its answer, which the end-of-sequence token ends",
            'texts = ["Once upon a time there was a dog ." + tokenizer.eos_token, "Once ." + tokenizer.eos_token]',
            "with torch.no_grad():",
            "    for text in texts:",
            '        print(model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits.item())',
        )
    config = peft_io.read_json(folder, peft_io.CONFIG_FILE, "adapter")
    revision = f", revision={json.dumps(card.revision)}" if card.revision else ""
    classifier = config.get("task_type") == "SEQ_CLS"
    loader = "AutoModelForSequenceClassification" if classifier else "AutoModelForCausalLM"
    text = _python(
        "from peft import PeftModel",
        f"from transformers import {loader}",
        "",
        f"folder, base = {place}, {base}",
        f"model = {loader}.from_pretrained(base{revision}{', num_labels=1' if classifier else ''})",
        "model = PeftModel.from_pretrained(model, folder)  # or model.load_adapter(folder)",
    )
    if source.head is not None:
        text += f"\n\n`{peft_io.HEADS_FILE}` has weight and bias of its scalar head {code(source.head_name)}."
    obstacle = vllm_obstacle(config)
    if obstacle is not None:
        return f"{text}\n\nvLLM does not take this adapter: {obstacle}."
    return f"{text}\n\nvLLM takes it with `--enable-lora --max-lora-rank {vllm_rank(config)}` or above."


def _python(*lines: str) -> str:
    return "\n".join(("```python", *lines, "```"))


def _limits(card: Card, source: Source) -> str:
    """Facts that bound what the export can be taken for."""
    options = source.run.get("config", {})
    lines = ["No evaluation for safety, bias or knowledge is recorded."]
    if options.get("eval_dataset_name") or options.get("eval_share"):
        lines.append("Metrics called held out are of rows that were not trained on.")
    else:
        lines.append("No metrics of held-out rows are recorded.")
    if options.get("reward_funcs"):
        lines.append("The training raises its reward; what that reward leaves out was not optimised for.")
    lines += [f"{note[0].upper()}{note[1:]}." for note in card.notes]
    return "\n".join(f"* {line}" for line in lines)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = tuple(head)
    lines = (head, ("---",) * len(head), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
