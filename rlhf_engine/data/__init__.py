"""Data for training: read, recognise, tokenize, split, order; every row that is left out or cut is counted.

A tally goes with a source from its file to its tokens:

    tally = Tally(source="pairs.jsonl.gz", max_bad_rows=0.01)
    rows = load_rows("pairs.jsonl.gz", tally, kinds=("preference", "implicit_preference"))
    train, held_out = split_by_group(rows, share=0.1)
    tokens = tokenize_rows(split.train, tokenizer, tally, max_length=1024, truncation="keep_end")
    for batch in pack([len(t.prompt) for t in tokens], max_rows=64, max_tokens=16_384): …
    print(tally.text())
"""

from rlhf_engine.data.read import Tally, load_rows
from rlhf_engine.data.split import batch_indices, pack, require_room, side_by_side, split_by_group
from rlhf_engine.data.tokenize import (
    PromptSet,
    Tokenized,
    Truncation,
    plain_prompts,
    tokenize_prompts,
    tokenize_row,
    tokenize_rows,
)
from rlhf_engine.data.types import (
    KINDS,
    Kind,
    Preference,
    PromptCompletion,
    PromptOnly,
    Row,
    RowError,
    UnpairedPreference,
)

__all__ = [
    "KINDS", "Kind", "Preference", "PromptCompletion", "PromptOnly", "PromptSet", "Row", "RowError", "Tally",
    "Tokenized", "Truncation", "UnpairedPreference", "batch_indices", "load_rows", "pack",
    "plain_prompts", "require_room", "side_by_side", "split_by_group", "tokenize_prompts", "tokenize_row",
    "tokenize_rows",
]  # fmt: skip
