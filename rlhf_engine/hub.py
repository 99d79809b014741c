"""Models, adapters and data of the Hugging Face Hub, by name: `owner/name`, or `owner/name@revision`.

What is pushed goes to the Hub as one commit, under the token of HF_TOKEN or `hf auth login`. No option takes a token.

A folder or a file of that name comes first. What is fetched lies in huggingface_hub's cache, and the next run takes it
from there. Its environment variables hold: HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE. Of a model its config, its
tokenizer and its safetensors are fetched, never code and never a pickle.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from rlhf_engine.errors import ConfigError
from rlhf_engine.io import MANIFEST_FILE, MODEL_FILES

ADAPTER_FILE = "adapter_config.json"  # of a PEFT folder
_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
_SMALL = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = "*.safetensors"
_LEFT_OUT = ("*/*", "consolidated*", MANIFEST_FILE)
"""Folders within, weights in their makers' own format beside those of transformers, and what lists all files."""


def is_hub_name(name: str | os.PathLike[str]) -> bool:
    """Whether a name is one of the Hub, and not of something here."""
    return _NAME.fullmatch(os.fspath(name)) is not None and not Path(name).exists()


def local_folder(name: str | os.PathLike[str], argument: str = "model_name_or_path", *, weights: bool = False) -> Path:
    """Folder of a path, or of `owner/name[@revision]` in the Hub's cache; `weights` fetches safetensors as well."""
    if not is_hub_name(name):
        return Path(name)
    try:
        return _fetched(os.fspath(name), weights)
    except ConfigError as error:
        raise ConfigError(f"{argument}: {error}") from error


def plain_name(name: str | os.PathLike[str]) -> str:
    """The name by which others find a base: without a revision on the Hub, else its whole path."""
    match = _NAME.fullmatch(os.fspath(name))
    return match[1] if match is not None and is_hub_name(name) else str(Path(name).resolve())


def revision_of(name: str | os.PathLike[str]) -> str | None:
    """Revision in a name of the Hub; None where there is none, or for something here."""
    match = _NAME.fullmatch(os.fspath(name))
    return match[2] if match is not None and is_hub_name(name) else None


def require_push(name: str) -> None:
    """Raise ConfigError for an upload that cannot succeed: offline, or without a token."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"push_to_hub: expected a network for {name!r}, got HF_HUB_OFFLINE; unset it")
    if get_token() is None:
        raise ConfigError(f"push_to_hub: expected a token for {name!r}, got none; run `hf auth login` or set HF_TOKEN")


def push_folder(folder: Path, name: str, *, private: bool) -> str:
    """Upload a folder as one commit to a repository, where no other model's files stay; the commit's address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    # its bases are OSError and the error of the HTTP library, which is another one in other versions
    failures: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, ValueError, RuntimeError)
    require_push(name)
    api = HfApi(library_name="rlhf-engine")
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        done = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Model exported by rlhf-engine",
            ignore_patterns=[MANIFEST_FILE],
            delete_patterns=list(MODEL_FILES),
        )
    except failures as error:
        why = " ".join(str(error).split()) or type(error).__name__
        hint = f"`hf upload {name} {folder}` sends it again"
        raise ConfigError(f"push_to_hub: expected to upload to {name!r}, got: {why}; {hint}") from error
    return str(done.commit_url)


@functools.cache
def _fetched(name: str, weights: bool, /) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    match = _NAME.fullmatch(name)
    assert match is not None
    # Weights of the commit whose config was read, if a branch moves meanwhile
    revision = _fetched(name, False).name if weights else match[2]
    patterns = [*_SMALL, _WEIGHTS] if weights else list(_SMALL)
    try:
        folder = snapshot_download(
            match[1], revision=revision, allow_patterns=patterns, ignore_patterns=list(_LEFT_OUT)
        )
    except (OSError, ValueError) as error:
        wanted, hint = "a folder, or a model of the Hub", ""
        if isinstance(error, LocalEntryNotFoundError):
            wanted = "a folder, or a model in the Hub's cache, without a network"
            hint = f"; `hf download {name.replace('@', ' --revision ')}` fetches it"
        why = " ".join(str(error).split())
        raise ConfigError(f"expected {wanted}, got {name!r}: {why}{hint}") from error
    if weights and not any(Path(folder).glob(_WEIGHTS)):
        raise ConfigError(f"expected safetensors of {name!r}, got none")
    return Path(folder)
