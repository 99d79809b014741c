"""Options of `rlhf-engine export`: a trained adapter or reward model in the format of another library."""

# ruff: noqa: RUF009 - `option` and `required` return dataclasses.field(...), which ruff cannot see

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rlhf_engine.config.parser import Options, option, required
from rlhf_engine.config.training import REPOSITORY, check_repository, not_empty
from rlhf_engine.errors import ConfigError

Format = Literal["merged", "peft", "sequence_classification"]
GGUF = "llama.cpp's convert_hf_to_gguf.py makes it of a merged folder, see docs/guides/export.md"
_LICENSE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
_NAME_OR_REVISION = re.compile(rf"{REPOSITORY}(@[\w./-]+)?")


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Options):
    """A trained adapter or reward model as a folder that other libraries load, with a model card.

    The first argument may be the source: a run's folder, one of its checkpoints, or a folder of an adapter or a model.
    """

    POSITIONAL = ("source",)
    FIRST = ("source", "to", "output_dir", "license", "push_to_hub")
    EXAMPLE = "rlhf-engine export runs/ppo --to merged --output_dir ppo-merged"

    source: str = required("folder of a run (its final model, or else its newest checkpoint), a checkpoint or a model")
    to: Format = required(
        "merged: a whole model for transformers; peft: the adapter; sequence_classification: a whole reward model"
    )
    output_dir: str = required("new or empty folder to write")
    role: str | None = option(
        None, "role to export; none: reward with sequence_classification, else actor or what the source has"
    )
    model_name_or_path: str | None = option(
        None, "folder of the base, or its owner/name[@revision] on the Hub; none: as the source records it"
    )
    base_model: str | None = option(
        None, "owner/name[@revision] by which others find the base; none: that of the Hub it came from"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "dtype of merged weights; auto: the base's, and float32 with sequence_classification"
    )
    license: str | None = option(None, "licence of the result in the card, as the Hub writes it, such as apache-2.0")
    push_to_hub: str | None = option(None, "owner/name on the Hub to upload the folder to")
    private: bool = option(False, "push_to_hub: make a new repository private")

    def __post_init__(self) -> None:
        if self.to == "gguf":  # type: ignore[comparison-overlap]  # a format of before
            raise ConfigError(f"to: expected merged, peft or sequence_classification, got 'gguf'; {GGUF}")
        super().__post_init__()
        for name in ("source", "output_dir", "role", "model_name_or_path"):
            if getattr(self, name) is not None:
                not_empty(name, getattr(self, name))
        if self.license is not None and _LICENSE.fullmatch(self.license) is None:
            raise ConfigError(f"license: expected a name such as apache-2.0, got {self.license!r}")
        if self.base_model is not None and _NAME_OR_REVISION.fullmatch(self.base_model) is None:
            raise ConfigError(f"base_model: expected owner/name or owner/name@revision, got {self.base_model!r}")
        check_repository(self.push_to_hub)
        if self.private and self.push_to_hub is None:
            raise ConfigError("private: expected it together with push_to_hub, got no push_to_hub")
        if self.to == "peft" and self.dtype != "auto":
            raise ConfigError(f"dtype: expected auto with peft, which copies the adapter as it is, got {self.dtype!r}")
