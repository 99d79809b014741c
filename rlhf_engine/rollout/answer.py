"""Answers to prompts for people: what `rlhf-engine generate` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rlhf_engine.config import GenerateConfig
from rlhf_engine.devices import DTYPES, resolve_device
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import OFF, HydraModel, RoleSpec, peft_io
from rlhf_engine.rollout import SamplingConfig, generate
from rlhf_engine.tokenizing import encode_prompt, eos_token_ids, load_tokenizer


def answer_prompts(config: GenerateConfig) -> list[dict[str, Any]]:
    """One row per answer: prompt, completion, number of tokens, whether it ended, mean log-prob per token."""
    prompts = read_prompts(config)
    tokenizer = load_tokenizer(config.model_name_or_path)
    slots = {"actor": peft_io.read_slot_config(config.adapter)} if config.adapter else {}
    model = HydraModel.from_pretrained(
        config.model_name_or_path,
        roles={"actor": RoleSpec(slot="actor" if config.adapter else OFF)},
        slots=slots,
        dtype=DTYPES[config.dtype],
        device=resolve_device(config.device),
    )
    texts = [p for p in prompts for _ in range(config.num_generations)]
    sampling = SamplingConfig(
        max_completion_length=config.max_completion_length,
        eos_token_ids=eos_token_ids(tokenizer, model.backbone().model),
        temperature=config.temperature,
        seed=config.seed,
    )
    rollout = generate(
        model, [encode_prompt(tokenizer, t) for t in texts], sampling, greedy=[config.greedy] * len(texts)
    )
    sums = torch.zeros(len(texts), device=model.device).index_add_(0, rollout.batch.sequence_of_M, rollout.logprobs_M)
    return [
        {
            "prompt": text,
            "completion": str(tokenizer.decode(rollout.batch.completion_tokens(i), skip_special_tokens=True)),
            "tokens": rollout.batch.completion_lens[i],
            "finished": rollout.finished[i],
            "mean_logprob": float(sums[i]) / rollout.batch.completion_lens[i],
        }
        for i, text in enumerate(texts)
    ]


def read_prompts(config: GenerateConfig) -> list[str]:
    """Prompts of the command line or of the prompt file. Raises ConfigError for none, or an empty one."""
    if config.prompt_file is None:
        prompts = list(config.prompt or ())
    else:
        path = Path(config.prompt_file)
        if not path.is_file():
            raise ConfigError(f"prompt_file: expected a file, got {str(path)!r} which is not one")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"prompt_file: expected text in UTF-8 in {str(path)!r}, got {error}") from error
        lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
        as_json = path.suffix == ".jsonl"
        prompts = [_prompt_of(path, i, line) if as_json else line.rstrip("\r") for i, line in lines]
    for i, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ConfigError(f"prompt: expected text, got an empty prompt at place {i}")
    if not prompts:
        raise ConfigError(f"prompt_file: expected at least one prompt in {config.prompt_file!r}, got none")
    return prompts


def _prompt_of(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{number}: expected a JSON object, got {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ConfigError(f"{path}:{number}: expected an object with a string 'prompt', got {line[:60]!r}")
    return str(row["prompt"])
