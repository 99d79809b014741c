"""`rlhf-engine init`: a small folder that runs, with the commands in its README."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_engine.config import InitConfig
from rlhf_engine.errors import ConfigError

TEMPLATES = Path(__file__).parents[1] / "templates"
_SMALL = 512  # hidden size below which a base takes the learning rate of a small one
_SFT = "rlhf-engine sft --config sft.yaml"
_PPO = (
    "rlhf-engine train --config train.yaml",
    "rlhf-engine generate --model_name_or_path {base} --adapter runs/ppo/final --dataset_name heldout.jsonl "
    "--max_completion_length {tokens} --out answers.jsonl",
    "rlhf-engine report runs/ppo",
)


@dataclass(frozen=True, kw_only=True)
class Template:
    """Files of a start and the commands that run it."""

    readme: str  # name of the README's template
    files: Mapping[str, str] = field(default_factory=dict)  # file → its template
    commands: tuple[str, ...]  # commands, in their order. Braces name what `_values` gives.


STARTS = {
    "tutorial": Template(
        readme="tutorial.md",
        files={"sft.yaml": "sft.yaml", "train.yaml": "train.yaml", "reward.py": "friendly.py"},
        commands=(_SFT, *_PPO),
    ),
    "reward-function": Template(
        readme="reward-function.md", files={"train.yaml": "train.yaml", "reward.py": "friendly.py"}, commands=_PPO
    ),
    "reward-model": Template(
        readme="reward-model.md",
        files={"sft.yaml": "sft.yaml", "reward.yaml": "reward.yaml", "train.yaml": "train.yaml"},
        commands=(_SFT, "rlhf-engine reward --config reward.yaml", *_PPO),
    ),
    "trl": Template(
        readme="trl.md",
        files={"sft.py": "sft_trl.py", "ppo.py": "ppo_trl.py", "loop.py": "loop_peft.py", "reward.py": "friendly.py"},
        commands=("python sft.py", "python ppo.py", _PPO[1], "python loop.py"),
    ),
    "recipe:stories260k": Template(
        readme="recipe-stories260k.md",
        files={"train.yaml": "recipe-stories260k.yaml", "reward.py": "happy_endings.py"},
        commands=_PPO,
    ),
}


def run(config: InitConfig) -> int:
    """Write the folder and print what to do there; returns the exit code."""
    folder = Path(config.output_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"output_dir: expected a new or an empty folder, got {config.output_dir!r}")
    template = STARTS[config.start]
    values, files, commands = _values(config), dict(template.files), list(template.commands)
    if config.model_name_or_path is None and commands[0] == _PPO[0]:  # the small model has learned nothing yet
        files["sft.yaml"] = "sft.yaml"
        commands.insert(0, _SFT)
    commands = [command.format_map(values) for command in commands]
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in files.items():
        text = (TEMPLATES / source).read_text(encoding="utf-8")
        is_code = source.endswith(".py")
        (folder / name).write_text(text if is_code else text.format_map(values), encoding="utf-8")
    readme = (TEMPLATES / template.readme).read_text(encoding="utf-8")
    (folder / "README.md").write_text(readme.format_map(values | {"commands": "\n".join(commands)}), encoding="utf-8")
    if config.model_name_or_path is None:
        _make_small_model(config, folder)
    else:
        shutil.copyfile(TEMPLATES / "story_prompts.jsonl", folder / "prompts.jsonl")
        shutil.copyfile(TEMPLATES / "story_prompts_heldout.jsonl", folder / "heldout.jsonl")
    print("\n".join([f"made {folder}; next:", "", f"  cd {config.output_dir}", *(f"  {line}" for line in commands)]))
    return 0


def _values(config: InitConfig) -> dict[str, str]:
    """Texts for the braces of the templates."""
    base = config.model_name_or_path
    small = base is None or _hidden_size(base) < _SMALL
    is_reward_model = config.start == "reward-model"
    if base is not None and not os.path.isabs(base) and Path(base).exists():
        base = os.path.relpath(base, config.output_dir)
    return {
        "base": "runs/sft" if base is None else base,
        "steps": "15" if base is None else "20",
        "tokens": "40" if base is None else "96",
        "eos_penalty": "1.0" if base is None else "none",
        "sft_steps": "120" if is_reward_model else "240",
        # The small model's folder has examples that its reward holds salad against; others have the KL alone.
        "beta": "0.05" if is_reward_model or not small else "0.15" if base is None else "0.30",
        "learning_rate": "2.0e-3" if base is None else "1.0e-3" if small else "1.0e-4",
        "reward": "reward_funcs: [reward_model]\nreward_model_path: runs/reward/final"
        if is_reward_model
        else "reward_funcs: [reward.py:reward]",
    }


def _hidden_size(base: str) -> int:
    """Hidden size of a local model; of one that is not here that of a large one."""
    from rlhf_engine.hydra.loading import read_config

    if not (Path(base) / "config.json").is_file():
        return _SMALL
    return int(read_config(base).get_text_config().hidden_size)


def _make_small_model(config: InitConfig, folder: Path) -> None:
    """The demo's model before any training, and data of its task."""
    from rlhf_engine.commands.common import prepare
    from rlhf_engine.commands.demo import DemoSize, write_data, write_model, write_rows
    from rlhf_engine.commands.demo_task import DemoTask

    prepare("auto")
    task = DemoTask(config.seed)
    size = DemoSize(n_pairs=3000, n_train_prompts=400, n_heldout_prompts=64)
    write_data(task, size, folder)
    (folder / "train.jsonl").rename(folder / "prompts.jsonl")
    write_model(size, folder / "model", config.seed)
    if config.start == "reward-model":
        write_rows(folder / "thumbs.jsonl", task.thumbs(2000))
