"""Options of how data are read; names as in TRL where TRL has the option."""

# ruff: noqa: RUF009 - `option` and `required` return dataclasses.field(...), which ruff cannot see

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlhf_engine.config.parser import Options, option, required
from rlhf_engine.errors import ConfigError

SUFFIXES = (".json", ".jsonl", ".csv", ".json.gz", ".jsonl.gz", ".csv.gz", ".parquet")
"""Names of files with rows end so."""

SOURCES = (
    "a file or folder of JSON, JSONL, CSV (each also .gz) or Parquet, a folder of save_to_disk, or a dataset of the "
    "Hub: owner/name[/subset][@revision][:split]"
)


@dataclass(frozen=True, kw_only=True)
class RowOptions(Options):
    """Options for rows that are too long or cannot be used."""

    max_bad_rows: float = option(
        0.0, "rows that may be unusable before the run stops: a share below 1, or a whole number of rows", ge=0
    )
    truncation: Literal["error", "drop", "keep_end", "keep_start", "both"] = option(
        "error",
        "rows that are too long: error (a bad row), drop, keep_end (the prompt's oldest tokens go, of conversations "
        "turns), keep_start (the answer's last tokens go) or both (the prompt's down to half of the length, then the "
        "answer's)",
    )
    system_prompt: str | None = option(None, "system turn of conversations that have none", is_text=True)
    chat_template_kwargs: dict[str, Any] | None = option(
        None,
        "arguments of the chat template, as JSON: '{\"enable_thinking\": false}'; a column of that name comes first",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_bad_rows > 1 and not self.max_bad_rows.is_integer():
            raise ConfigError(
                f"max_bad_rows: expected a share below 1 or a whole number of rows, got {self.max_bad_rows:g}"
            )

    def check_prompts_kept(self) -> None:
        """Check that the truncation keeps the last tokens of prompts.

        Raises:
            ConfigError: `truncation` is `keep_start`.
        """
        if self.truncation == "keep_start":
            raise ConfigError(
                "truncation: expected error, drop or keep_end for prompts, whose last tokens are what is to be "
                "answered, got 'keep_start'"
            )


@dataclass(frozen=True, kw_only=True)
class DataOptions(RowOptions):
    """Options of where training rows come from."""

    dataset_name: str = required(f"training data: {SOURCES}")
    dataset_limit: int | None = option(
        None, "use only the first so many rows of the training data; those of the Hub are fetched without a copy", ge=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dataset_name:
            raise ConfigError(f"dataset_name: expected something that is not empty, got {self.dataset_name!r}")
