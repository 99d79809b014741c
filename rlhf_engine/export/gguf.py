"""GGUF files for llama.cpp, made by its own converter from a merged folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from rlhf_engine.errors import ConfigError, EngineError

SCRIPT = "convert_hf_to_gguf.py"
_MAGIC = b"GGUF"
_GET = "git clone --depth 1 https://github.com/ggml-org/llama.cpp"


def find_converter(llama_cpp: str | None) -> Path:
    """llama.cpp's converter in a folder, or on PATH for None. Raises ConfigError where it is not."""
    if llama_cpp is not None:
        if not (Path(llama_cpp) / SCRIPT).is_file():
            raise ConfigError(f"llama_cpp: expected a folder with {SCRIPT}, got {llama_cpp!r}; `{_GET}` makes one")
        return Path(llama_cpp) / SCRIPT
    found = shutil.which(SCRIPT)
    if found is None:
        raise ConfigError(
            f"llama_cpp: expected {SCRIPT} on PATH or the folder of llama.cpp, got neither; `{_GET}`, then --llama_cpp "
            "llama.cpp"
        )
    return Path(found)


def convert(converter: Path, model: Path, file: Path, *, outtype: str) -> None:
    """Convert a merged folder to a GGUF file.

    Args:
        converter: llama.cpp's script, which runs in this interpreter.
        model: transformers folder with weights and tokenizer.
        file: the file to write.
        outtype: type of its weights, as the script names them.

    Raises:
        EngineError: the script fails, or writes no GGUF file.
    """
    command = [sys.executable, str(converter), str(model), "--outfile", str(file), "--outtype", outtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        hint = "; its requirements.txt says what it needs" if lines and "ModuleNotFoundError" in lines[-1] else ""
        raise EngineError(f"{SCRIPT} ended with {done.returncode}: {lines[-1] if lines else 'it says nothing'}{hint}")
    if not file.is_file():
        raise EngineError(f"{SCRIPT}: expected {file.name}, which it has not written")
    with file.open("rb") as written:
        magic = written.read(len(_MAGIC))
    if magic != _MAGIC:
        raise EngineError(f"{SCRIPT}: expected a file that begins with {_MAGIC!r}, got one with {magic!r}")
