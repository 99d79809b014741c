"""The script of `rlhf-engine completion`, in a real bash."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys

import pytest

from rlhf_engine.commands.completion import CONFIGS, SHELLS, script
from rlhf_engine.commands.main import _COMMANDS, main
from rlhf_engine.config.algorithm import ALGORITHMS

bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def completed(*words: str, cwd=None) -> list[str]:
    """What bash would offer for the last of these words."""
    line = " ".join(f"'{word}'" for word in ("rlhf-engine", *words))
    program = (
        f'{script()}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _rlhf_engine; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-uc", program], capture_output=True, text=True, cwd=cwd, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_a_reader_that_has_enough_is_no_failure():
    """The script is written in one go; a pipe that is closed before takes none of it."""
    program = "import time; from rlhf_engine.commands.main import run_and_exit; time.sleep(0.3); run_and_exit()"
    command = [sys.executable, "-c", program, "completion", "bash"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@bash
def test_commands_options_and_choices():
    assert completed("") == list(_COMMANDS)
    assert completed("re") == ["reward", "report"]
    assert completed("train", "--model_n") == ["--model_name_or_path"]
    assert {"--lora", "--lora_r", "--lora_target_modules"} <= set(completed("sft", "--lora"))
    assert completed("train", "--algorithm", "") == sorted(ALGORITHMS)
    assert completed("train", "--seed", "3", "--algorithm", "r") == ["reinforce", "remax", "rloo"]
    assert completed("train", "--async", "o") == ["off", "overlap"]
    assert completed("doctor", "--m") == ["--measure"]
    assert completed("completion", "") == list(SHELLS)


@bash
def test_every_option_is_offered_and_paths_are_files(tmp_path):
    assert {*CONFIGS, "doctor", "completion"} == set(_COMMANDS)
    for command, cls in CONFIGS.items():
        names = {f"--{field.metadata['alias'] or field.name}" for field in dataclasses.fields(cls)}
        assert names < set(completed(command, "--"))
    (tmp_path / "rows.jsonl").touch()
    assert completed("train", "--dataset_name", "ro", cwd=tmp_path) == ["rows.jsonl"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_it(capsys, shell):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text.endswith("complete -o filenames -F _rlhf_engine rlhf-engine\n")
    assert text.startswith("autoload") == (shell == "zsh")


def test_another_shell_is_one_line(capsys):
    for words, got in ((["fish"], "fish"), ([], "nothing"), (["bash", "zsh"], "bash zsh")):
        assert main(["completion", *words]) == 2
        assert capsys.readouterr().err == f"rlhf-engine completion: completion: expected one of bash, zsh, got {got}\n"
