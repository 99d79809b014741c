"""Text to tokens and back: where prompts begin, where answers end."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra.loading import read_config

_ELSEWHERE = "a reward model with another tokenizer can be one of the reward_funcs"


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model. Raises ConfigError if there is none, or if it has no end-of-sequence token.

    A padding token is not needed: rows are packed, nothing is ever padded with tokens.
    """
    if not Path(path).is_dir():
        raise ConfigError(f"model_name_or_path: expected a local model folder, got {str(path)!r} which is not one")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model_name_or_path: expected a tokenizer in {str(path)!r}, got: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "model_name_or_path: expected a tokenizer with an end-of-sequence token, got one without in "
            f"{str(path)!r}; set eos_token in its tokenizer_config.json, or answers could never end"
        )
    return tokenizer


def require_same_tokens(tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike[str], vocabulary: int) -> None:
    """Raise ConfigError unless the reward model in `folder` reads the policy's token ids as the policy does.

    Tokens that were added to either tokenizer are not compared: reward models often bring a padding token. Where the
    folder has no tokenizer, its vocabulary has to be as large as the policy's, which `vocabulary` says.
    """
    if not Path(folder).is_dir():
        raise ConfigError(f"reward_model_path: expected a local model folder, got {str(folder)!r} which is not one")
    theirs = int(read_config(folder).get_text_config().vocab_size)
    try:
        other = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        if theirs != vocabulary:
            raise ConfigError(
                f"reward_model_path: expected a vocabulary of {vocabulary} tokens, the policy's, in {str(folder)!r}, "
                f"got {theirs}; {_ELSEWHERE}"
            ) from None
        return
    ours, found, added = tokenizer.get_vocab(), other.get_vocab(), tokenizer.get_added_vocab()
    differing = sorted((i, token) for token, i in ours.items() if token not in added and found.get(token) != i)
    if differing:
        i, token = differing[0]
        raise ConfigError(
            f"reward_model_path: expected the policy's tokenizer in {str(folder)!r}, got one in which {len(differing)} "
            f"of its tokens have another id, such as {token!r} (id {i} of the policy's, {found.get(token)} here); "
            + _ELSEWHERE
        )


def eos_token_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> tuple[int, ...]:
    """Every token that ends an answer: the tokenizer's, and those that the model's generation config names."""
    found = {int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set()
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    if isinstance(configured, int):
        found.add(configured)
    elif configured is not None:
        found |= {int(token) for token in configured}
    return tuple(sorted(found))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a prompt with the tokenizer's own beginning, but never an end-of-sequence token at its end."""
    ids = list(tokenizer(prompt)["input_ids"])
    while len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return ids


def encode_completion(tokenizer: PreTrainedTokenizerBase, completion: str) -> list[int]:
    """Token ids of a whole answer, ended by the end-of-sequence token."""
    ids = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    assert tokenizer.eos_token_id is not None
    return [*ids, int(tokenizer.eos_token_id)]
