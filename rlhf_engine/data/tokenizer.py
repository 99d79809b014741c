"""Text to tokens and back: where prompts begin, where answers end."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import local_folder
from rlhf_engine.hydra.loading import read_config
from rlhf_engine.io import check_model

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_BEGINNINGS = ("", "\n", "x", ".", "a", "0")
"""Texts after which an answer is tokenized as it is in the middle of one; which of them serves depends on both."""
_ELSEWHERE = "a reward model with another tokenizer can be one of the reward_funcs"


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model; ConfigError without one, or without an end-of-sequence token."""
    folder = local_folder(path)
    if not folder.is_dir():
        raise ConfigError(
            f"model_name_or_path: expected a model folder or owner/name of the Hub, got {str(path)!r}, which is neither"
        )
    check_model(folder, weights=False)
    tokenizer = _read_tokenizer(folder, f"model_name_or_path: expected a tokenizer in {str(path)!r}, got")
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "model_name_or_path: expected a tokenizer with an end-of-sequence token, got one without in "
            f"{str(path)!r}; set eos_token in its tokenizer_config.json, or answers could never end"
        )
    return tokenizer


def require_same_tokens(tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike[str], vocabulary: int) -> None:
    """Raise ConfigError unless the reward model reads the policy's ids alike, as far as its folder tells."""
    place = f"reward_model_path: expected {{}} in {str(folder)!r}, got "
    try:
        size = int(read_config(folder).get_text_config().vocab_size)
    except ValueError as error:
        raise ConfigError(str(error).replace("model_name_or_path", "reward_model_path", 1)) from error
    folder = local_folder(folder)
    check_model(folder, weights=False)
    if not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):  # transformers may make one up
        if size != vocabulary:
            raise ConfigError(
                place.format(f"a vocabulary of {vocabulary} tokens, the policy's,") + f"{size}; {_ELSEWHERE}"
            )
        return
    theirs = _read_tokenizer(folder, place.format("a tokenizer").rstrip()).get_vocab()
    differing = sorted((i, token) for token, i in tokenizer.get_vocab().items() if theirs.get(token) != i or i >= size)
    if differing:
        i, token = differing[0]
        raise ConfigError(
            place.format("the policy's tokenizer")
            + f"one in which {len(differing)} of its tokens have another id or none, such as {token!r} (id {i} of the "
            f"policy's, {theirs.get(token)} of {size} here); {_ELSEWHERE}"
        )


def _read_tokenizer(folder: Path, expected: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder. Raises ConfigError, which begins with what was expected, where none can be read."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{expected}: {reason}") from error
    return tokenizer


def eos_token_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> tuple[int, ...]:
    """Every token that ends an answer by tokenizer or generation config; ConfigError for one the model lacks."""
    return _ends(tokenizer, model.generation_config, int(model.config.get_text_config().vocab_size))


def read_eos_token_ids(tokenizer: PreTrainedTokenizerBase, path: str | os.PathLike[str]) -> tuple[int, ...]:
    """`eos_token_ids` of a model folder, without loading the model."""
    config = read_config(path)
    ends, path = GenerationConfig.from_model_config(config), local_folder(path)
    if (Path(path) / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return _ends(tokenizer, ends, int(config.get_text_config().vocab_size))


def _ends(tokenizer: PreTrainedTokenizerBase, config: GenerationConfig | None, vocabulary: int) -> tuple[int, ...]:
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    configured = config.eos_token_id if config is not None else None
    ends += configured if isinstance(configured, list) else [] if configured is None else [configured]
    wrong = [token for token in ends if type(token) is not int or not 0 <= token < vocabulary]
    if wrong:
        raise ConfigError(
            f"model_name_or_path: expected end-of-sequence tokens among the model's ids of 0 to {vocabulary - 1}, got "
            f"{wrong[0]!r} from its tokenizer or its generation config (eos_token_id)"
        )
    return tuple(sorted(set(ends)))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text alone, to which the tokenizer adds none of its special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a prompt with the tokenizer's beginning, not doubled, and without the end that it adds."""
    encoded = tokenizer(prompt, return_special_tokens_mask=True)
    ids, added = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
    while len(ids) > 1 and added[len(ids) - 1]:
        ids.pop()
    n = next((i for i, special in enumerate(added) if not special), 0)
    return ids[n:] if ids[:n] == ids[n : 2 * n] else ids


def encode_continuation(
    tokenizer: PreTrainedTokenizerBase, prompt: str, prompt_ids: list[int], whole: str, whole_ids: list[int]
) -> list[int]:
    """Token ids of an answer where it stands: those of prompt and answer together, without the prompt's.

    A token of both together may reach across the border. Generation begins with the prompt's own ids, so these stay,
    and the answer gets ids with which both decode to the same text: those that it has after some other beginning. A
    tokenizer that does not keep white space may have none such; the answer then has the ids that it has alone.
    """
    if whole_ids[: len(prompt_ids)] == prompt_ids:
        return whole_ids[len(prompt_ids) :]
    answer, decode = whole[len(prompt) :], partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    text = decode(whole_ids)
    for beginning in _BEGINNINGS:
        first, ids = encode(tokenizer, beginning), encode(tokenizer, beginning + answer)
        rest = ids[len(first) :]
        if [*first, *rest] == ids and decode([*prompt_ids, *rest]) == text:
            return rest
    return encode(tokenizer, answer)


def end_answer(tokenizer: PreTrainedTokenizerBase, ids: list[int], end_ids: Sequence[int] | None = None) -> list[int]:
    """Token ids up to the last of `end_ids` (None: end-of-sequence), where reward models read; added if missing."""
    assert tokenizer.eos_token_id is not None
    ends = end_ids or (int(tokenizer.eos_token_id),)
    last = next((i for i in reversed(range(len(ids))) if ids[i] in ends), None)
    if last is not None and not str(tokenizer.decode(ids[last + 1 :])).strip():
        return ids[: last + 1]
    return [*ids, int(tokenizer.eos_token_id)]


def warn_of_unknown(tokenizer: PreTrainedTokenizerBase, answers: Sequence[Sequence[int]]) -> None:
    """Warn where answers have ids beyond the tokenizer's, which a model with a padded vocabulary can draw."""
    n = len(tokenizer)
    if any(max(ids, default=0) >= n for ids in answers):
        warnings.warn(
            f"answers have token ids of {n} and more, which the model has and its tokenizer lacks; no text has them",
            stacklevel=2,
        )
