"""`rlhf-engine completion bash | zsh`: a script that completes commands, options and choices in a shell.

    eval "$(rlhf-engine completion bash)"           # in ~/.bashrc
    eval "$(rlhf-engine completion zsh)"            # in ~/.zshrc

The script holds all names, so a completion starts no Python. Where an option takes a path, files are completed.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Literal

from rlhf_engine.commands.main import _COMMANDS
from rlhf_engine.config import (
    BenchConfig,
    DemoConfig,
    EvaluateConfig,
    GenerateConfig,
    InitConfig,
    PlanConfig,
    ReportConfig,
    RewardConfig,
    SFTConfig,
    TrainConfig,
)
from rlhf_engine.config.export import ExportConfig
from rlhf_engine.config.parser import Options
from rlhf_engine.errors import ConfigError

SHELLS = ("bash", "zsh")
CONFIGS: dict[str, type[Options]] = {
    "bench": BenchConfig,
    "demo": DemoConfig,
    "evaluate": EvaluateConfig,
    "export": ExportConfig,
    "generate": GenerateConfig,
    "init": InitConfig,
    "plan": PlanConfig,
    "report": ReportConfig,
    "reward": RewardConfig,
    "sft": SFTConfig,
    "train": TrainConfig,
}
_ALWAYS = ("config", "print_config", "help", "help_all")
_FUNCTION = """_rlhf_engine() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}} $before" in
{choices}
    esac
    if [ -z "$words" ]; then
        case "$word" in
        --*) case "${{COMP_WORDS[1]}}" in
{options}
            esac ;;
        esac
    fi
    if [ -n "$words" ]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _rlhf_engine rlhf-engine"""


def run(argv: Sequence[str]) -> int:
    """Print the script for a shell; returns the exit code."""
    if list(argv) in (["-h"], ["--help"]):
        print(f"usage: rlhf-engine completion {' | '.join(SHELLS)}\n\n{(__doc__ or '').strip()}")
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise ConfigError(f"completion: expected one of {', '.join(SHELLS)}, got {' '.join(argv) or 'nothing'}")
    before = "autoload -U +X bashcompinit && bashcompinit\n" if argv[0] == "zsh" else ""
    print(before + script())
    return 0


def script() -> str:
    """The function that completes, in bash."""
    choices, options = [], []
    for command, cls in CONFIGS.items():
        hints, names = typing.get_type_hints(cls), []
        for field in dataclasses.fields(cls):
            alias = field.metadata["alias"]
            flags = [f"--{name}" for name in (alias or field.name, *field.metadata["switches"])]
            names += flags
            literals = [kind for kind in (hints[field.name], *typing.get_args(hints[field.name])) if _is_literal(kind)]
            if literals:
                words = " ".join(str(value) for value in typing.get_args(literals[0]))
                choices.append(f'    "{command} {flags[0]}") words="{words}" ;;')
        names += [f"--{name}" for name in _ALWAYS]
        options.append(f'            {command}) words="{" ".join(names)}" ;;')
    options.append('            doctor) words="--json --measure --help" ;;')
    choices.append(f'    "completion completion") words="{" ".join(SHELLS)}" ;;')
    return _FUNCTION.format(commands=" ".join(_COMMANDS), choices="\n".join(choices), options="\n".join(options))


def _is_literal(kind: object) -> bool:
    return typing.get_origin(kind) is Literal
