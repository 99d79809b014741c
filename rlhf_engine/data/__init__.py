"""Data for training: read, recognise, tokenize, split, order; every row that is left out or cut is counted.

A tally goes with a source from its file to its tokens:

    tally = Tally(source="pairs.jsonl.gz", max_bad_rows=0.01)
    rows = load_rows("pairs.jsonl.gz", tally, kinds=("preference", "implicit_preference"))
    split = split_by_group(rows, share=0.1)
    tokens = tokenize_rows(split.train, tokenizer, tally, max_length=1024, truncation="keep_end")
    for batch in pack([len(t.prompt) for t in tokens], max_rows=64, max_tokens=16_384): …
    print(tally.report().text())
"""

from rlhf_engine.data.load import load_rows
from rlhf_engine.data.order import batch_indices, epoch_order, pack, require_room, side_by_side
from rlhf_engine.data.prompts import PromptSet, plain_prompts, tokenize_prompts
from rlhf_engine.data.read import Record, read_records
from rlhf_engine.data.split import Split, group_fraction, split_by_group
from rlhf_engine.data.tally import BadRows, Report, RowError, Tally
from rlhf_engine.data.taskmaster import load_taskmaster, render_turn
from rlhf_engine.data.tokenize import (
    Tokenized,
    Truncation,
    tokenize_row,
    tokenize_rows,
)
from rlhf_engine.data.types import (
    KINDS,
    Kind,
    Message,
    Preference,
    PromptCompletion,
    PromptOnly,
    Row,
    Text,
    UnpairedPreference,
)

__all__ = [
    "KINDS",
    "BadRows",
    "Kind",
    "Message",
    "Preference",
    "PromptCompletion",
    "PromptOnly",
    "PromptSet",
    "Record",
    "Report",
    "Row",
    "RowError",
    "Split",
    "Tally",
    "Text",
    "Tokenized",
    "Truncation",
    "UnpairedPreference",
    "batch_indices",
    "epoch_order",
    "group_fraction",
    "load_rows",
    "load_taskmaster",
    "pack",
    "plain_prompts",
    "read_records",
    "render_turn",
    "require_room",
    "side_by_side",
    "split_by_group",
    "tokenize_prompts",
    "tokenize_row",
    "tokenize_rows",
]
