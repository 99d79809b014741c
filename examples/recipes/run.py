#!/usr/bin/env python
"""Run a recipe: a paper's settings from its published data to a trained policy and its evaluation.

    python examples/recipes/run.py NAME --data FOLDER --output_dir OUT [--base MODEL] [--set [STAGE.]OPTION=VALUE …]
    python examples/recipes/run.py NAME --data FOLDER --output_dir OUT2 --from STAGE --start OUT [--set …]
    python examples/recipes/run.py NAME --tiny --output_dir OUT

A recipe is a YAML file beside this one. Its stages are commands of rlhf-engine, run one after another in OUT; a stage
that is done is not run again, and one that was stopped goes on. --set changes an option of a stage, or of all that are
run. With --start, the stages before --from are those of another run. --tiny runs every stage for a few steps on a small
random model and a few rows of the same layout, on a CPU, in under a minute.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from prepare import LAYOUTS  # noqa: E402 - beside this file

TINY = HERE / "tiny"
_SMALL_RUN = {
    "sft": {"max_steps": 2, "per_device_train_batch_size": 4, "save_steps": 0},
    "reward": {"max_steps": 2, "per_device_train_batch_size": 4, "save_steps": 0, "eval_steps": 0},
    "train": {
        "max_steps": 2,
        "generation_batch_size": 8,
        "per_device_train_batch_size": 8,
        "max_completion_length": 8,
        "save_steps": 0,
        "eval_steps": 0,
        "num_mini_batches": 1,
    },
    "evaluate": {"max_prompts": 4, "max_completion_length": 8},
    "generate": {"max_completion_length": 8},
}
_SMALL_ALWAYS = {"dtype": "float32", "device": "cpu", "truncation": "keep_end"}
_SMALL_ADAPTER = {"lora_r": 2}
_RESUMES = {"sft", "reward", "train"}
_LENGTH = {
    "train": "max_prompt_length",
    "sft": "max_length",
    "reward": "max_length",
    "evaluate": "max_prompt_length",
    "generate": "max_prompt_length",
}
_GOES_ON = ("resume_from_checkpoint", "resume")
_SMALL_LENGTH = 96


class RecipeError(Exception):
    """A request that a recipe cannot serve."""


def names() -> list[str]:
    """Names of the recipes."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def load(name: str) -> dict[str, Any]:
    """Read a recipe."""
    if name not in names():
        raise RecipeError(f"recipe: expected one of {', '.join(names())}, got {name!r}")
    found = yaml.safe_load((HERE / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def prepare(recipe: Mapping[str, Any], data: Path, out: Path) -> Path:
    """Folder that the stages read: the published files as they are, or rows made of them in OUT/data."""
    missing = [pattern for pattern in recipe["needs"] if not any(data.glob(f"{pattern}*"))]
    if missing:
        wanted = "; ".join(f"{pattern}: {recipe['needs'][pattern]}" for pattern in missing)
        raise RecipeError(f"data: expected files in {str(data)!r}, got none of {', '.join(missing)}. Fetch {wanted}")
    if recipe["layout"] is None:
        return data
    folder = out / "data"
    mark = folder / "done"
    if not mark.is_file():
        write_rows(recipe["layout"], data, folder)
        mark.touch()
    return folder


def write_rows(layout: str, source: Path, folder: Path, *given: Any) -> None:
    """Write the rows that a layout makes of the files in a folder and of what else it is given."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in LAYOUTS[layout](source, *given).items():
        if not rows:
            raise RecipeError(f"data: expected rows for {name} in {str(source)!r}, got none")
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / name).write_text("".join(lines), encoding="utf-8")
        print(f"{name}: {len(rows)} rows", flush=True)


def settings(given: list[str], stages: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Options given by --set, for each stage."""
    found: dict[str, dict[str, Any]] = {stage: {} for stage in stages}
    for text in given:
        name, is_set, value = text.partition("=")
        stage, _, option = name.rpartition(".")
        if not is_set or not option or (stage and stage not in stages):
            raise RecipeError(
                f"set: expected OPTION=VALUE or STAGE.OPTION=VALUE with a stage of {', '.join(stages)}, got {text!r}"
            )
        for of in [stage] if stage else stages:
            found[of][option] = yaml.safe_load(value)
    return found


def check_same(stage: str, config: Path, options: Mapping[str, Any]) -> None:
    """Raise RecipeError for a stage that was done with other options."""
    was = yaml.safe_load(config.read_text(encoding="utf-8"))
    for name in sorted((was.keys() | options.keys()) - set(_GOES_ON)):
        if was.get(name) != options.get(name):
            raise RecipeError(
                f"stage {stage}: expected {name} {was.get(name)!r}, with which it was done, got {options.get(name)!r}; "
                "give another --output_dir"
            )


def small_base(out: Path, data: Path) -> Path:
    """A random Llama of two layers with a byte-level tokenizer that knows the words of the rows."""
    folder = out / "base"
    if (folder / "config.json").is_file():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(data.glob("*.json*")) if path.suffix != ".gz"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}{{ '<s>' if loop.first }}{{ m['role'] }}:\n{{ m['content'] }}"
        "{{ '</s>' if m['role'] == 'assistant' }}\n{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def options_of(
    stage: Mapping[str, Any], places: Mapping[str, str], elsewhere: Mapping[str, Path], tiny: bool
) -> dict[str, Any]:
    """Options of a stage with its places filled in; `elsewhere` has the folders of stages of another run."""

    def filled(value: Any) -> Any:
        if isinstance(value, str):
            value = re.sub(r"\{out\}/(\w+)", lambda m: str(elsewhere.get(m[1], m[0])), value)
            for name, place in places.items():
                value = value.replace(f"{{{name}}}", place)
            return value
        return [filled(part) for part in value] if isinstance(value, list) else value

    command = stage["command"]
    options = {name: filled(value) for name, value in stage["options"].items()}
    if tiny:
        options |= {**_SMALL_RUN[command], **_SMALL_ALWAYS}
        if options.get("num_generations", 2) > 2 and command == "train":
            options["num_generations"] = 2
        if "lora_r" in options:
            options |= _SMALL_ADAPTER
        options.pop("num_train_epochs", None)
        options.pop("warmup_steps", None)
        options[_LENGTH[command]] = _SMALL_LENGTH
        options |= stage.get("tiny", {})
    return options


def run(
    name: str,
    *,
    data: Path | None,
    out: Path,
    base: str | None,
    first: str | None,
    start: Path | None,
    changes: list[str],
    tiny: bool,
) -> None:
    """Run the stages of a recipe that are not done."""
    recipe = load(name)
    source = TINY / recipe["tiny_data"] if tiny else data
    if source is None:
        needs = "; ".join(f"{pattern}: {place}" for pattern, place in recipe["needs"].items())
        raise RecipeError(f"data: expected a folder with {needs}; or --tiny")
    stages = recipe["stages"]
    if first is not None and first not in stages:
        raise RecipeError(f"from: expected one of {', '.join(stages)}, got {first!r}")
    if start is not None and first is None:
        raise RecipeError("start: expected it with --from, got no --from")
    changed, earlier = settings(changes, stages), list(stages)[: list(stages).index(first) if first else 0]
    begun_in = start or out
    lacking = [stage for stage in earlier if not (begun_in / f"{stage}.done").is_file()]
    if lacking:
        raise RecipeError(f"from: expected the stages before {first} done in {str(begun_in)!r}, got no {lacking[0]}")
    out.mkdir(parents=True, exist_ok=True)
    folder = prepare(recipe, source, begun_in)
    model = str(small_base(begun_in, source)) if tiny else base or recipe["base"]
    places = {"data": str(folder), "out": str(out), "base": model}
    elsewhere = {stage: begun_in / stage for stage in earlier}
    for stage_name in list(stages)[len(earlier) :]:
        stage = stages[stage_name]
        mark, config = out / f"{stage_name}.done", out / f"{stage_name}.yaml"
        options = options_of(stage, places, elsewhere, tiny) | changed[stage_name]
        if mark.is_file():
            check_same(stage_name, config, options)
            continue
        command = stage["command"]
        if command in _RESUMES and (Path(options["output_dir"]) / "metrics.jsonl").is_file():
            options["resume_from_checkpoint"] = "auto"
        elif command == "evaluate" and (Path(options["output_dir"]) / "answers.jsonl").is_file():
            options["resume"] = True
        elif command == "generate":
            Path(options["out"]).parent.mkdir(parents=True, exist_ok=True)
            options["resume"] = Path(options["out"]).is_file()
        config.write_text(yaml.safe_dump(options, sort_keys=False, allow_unicode=True), encoding="utf-8")
        print(f"== {name}: {stage_name} (rlhf-engine {command} --config {config})", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "rlhf_engine", command, "--config", str(config)],
            stdout=subprocess.DEVNULL if command == "generate" else None,  # thousands of answers, which are in its file
        )
        if done.returncode:
            raise RecipeError(f"stage {stage_name}: rlhf-engine {command} ended with {done.returncode}")
        if "rows" in stage:
            gold = elsewhere.get(stage["labelled_by"], out / stage["labelled_by"]) / "final"
            write_rows(stage["rows"], out / stage_name, out / stage_name, gold, options.get("device", "auto"))
        mark.touch()
    print(f"{name}: done, see {out}")


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0; 2 for a request that cannot be served, or a stage that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help=", ".join(names()))
    parser.add_argument("--data", type=Path, help="folder with the published files")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--base", help="another base than the recipe's")
    parser.add_argument("--from", dest="first", help="first stage to run; those before it have to be done")
    parser.add_argument("--start", type=Path, help="output folder of another run, whose stages before --from are taken")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="[STAGE.]OPTION=VALUE",
        help="another value of an option, of a stage or of all that are run; may be given several times",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="a few steps on a small random model")
    given = parser.parse_args(argv)
    try:
        run(
            given.name, data=given.data, out=given.output_dir, base=given.base, first=given.first, start=given.start,
            changes=given.changes, tiny=given.tiny,
        )  # fmt: skip
    except RecipeError as error:
        print(f"recipe: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
