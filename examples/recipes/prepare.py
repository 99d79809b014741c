"""Published data files as rows of TRL's types: one function for each layout.

A function takes the folder with the files and returns file name → rows; `sampled_pairs` also takes a reward model that
labels them. It raises FileNotFoundError for a file that is not there.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Rows = dict[str, list[dict[str, Any]]]
_HELD_OUT = 20
"""One prompt in so many is held out."""
_HELD_OUT_DIALOGUES = 10
_FINAL = re.compile(r"####\s*(.+?)\s*$")
SHOTS = 4
"""Worked examples before a question of GSM8K."""


def _lines(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file, which may be compressed."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            opener = gzip.open if path.suffix == ".gz" else open
            with opener(path, "rt", encoding="utf-8") as file:
                yield from (json.loads(line) for line in file if line.strip())
            return
    raise FileNotFoundError(str(folder / name))


def _split(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on and held-out rows; a prompt is on one side."""
    order = {prompt: i for i, prompt in enumerate(dict.fromkeys(row["prompt"] for row in rows))}
    held_out = [row for row in rows if order[row["prompt"]] % _HELD_OUT == 0]
    return [row for row in rows if order[row["prompt"]] % _HELD_OUT], held_out


def _prompts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"prompt": prompt} for prompt in dict.fromkeys(row["prompt"] for row in rows)]


def _pairs(rows: list[dict[str, Any]]) -> Rows:
    train, held_out = _split(rows)
    return {
        "pairs.jsonl": train,
        "pairs_heldout.jsonl": held_out,
        "prompts.jsonl": _prompts(train),
        "prompts_heldout.jsonl": _prompts(held_out),
    }


def stack_exchange(folder: Path) -> Rows:
    """Pairs of lvwerra/stack-exchange-paired: question, response_j (better), response_k."""
    return _pairs(
        [
            {
                "prompt": f"Question: {row['question']}\n\nAnswer:",
                "chosen": f" {row['response_j']}",
                "rejected": f" {row['response_k']}",
            }
            for row in _lines(folder, "stack_exchange.jsonl")
        ]
    )


def hh(folder: Path) -> Rows:
    """Pairs of Anthropic/hh-rlhf: two transcripts that differ in the assistant's last turn."""
    mark = "\n\nAssistant:"
    rows = []
    for row in _lines(folder, "hh.jsonl"):
        prompt, _, chosen = row["chosen"].rpartition(mark)
        other, _, rejected = row["rejected"].rpartition(mark)
        if prompt == other and chosen.strip() and rejected.strip() and chosen != rejected:
            rows.append({"prompt": prompt + mark, "chosen": chosen, "rejected": rejected})
    return _pairs(rows)


def tldr(folder: Path) -> Rows:
    """Posts with a summary (filtered TL;DR), and comparisons of openai/summarize_from_feedback."""

    def prompt(post: dict[str, Any]) -> str:
        return f"SUBREDDIT: r/{post['subreddit']}\n\nTITLE: {post['title']}\n\nPOST: {post['post']}\n\nTL;DR:"

    written, _ = _split(
        [
            {"prompt": prompt(row), "completion": f" {row['summary'].strip()}"}
            for row in _lines(folder, "tldr.jsonl")
        ]
    )  # fmt: skip
    compared = []
    for row in _lines(folder, "comparisons.jsonl"):
        texts = [f" {summary['text'].strip()}" for summary in row["summaries"]]
        if texts[0] != texts[1]:
            better = int(row["choice"])
            compared.append({"prompt": prompt(row["info"]), "chosen": texts[better], "rejected": texts[1 - better]})
    return {"written.jsonl": written, **_pairs(compared)}


def gsm8k(folder: Path) -> Rows:
    """Questions with a worked answer that ends in `#### number`, after a few worked examples."""
    rows = list(_lines(folder, "train.jsonl"))
    shown = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows[:SHOTS])

    def made(row: dict[str, Any]) -> dict[str, Any]:
        found = _FINAL.search(row["answer"])
        if found is None:
            raise ValueError(f"answer: expected an end of the form '#### number', got {row['answer'][-40:]!r}")
        return {
            "prompt": f"{shown}Question: {row['question']}\nAnswer:",
            "completion": f" {row['answer']}",
            "answer": found[1].replace(",", ""),
        }

    train = [made(row) for row in rows[SHOTS:]]
    held_out = [made(row) for row in _lines(folder, "test.jsonl")]
    as_prompts = [[{"prompt": r["prompt"], "answer": r["answer"]} for r in part] for part in (train, held_out)]
    return {
        "written.jsonl": [{"prompt": r["prompt"], "completion": r["completion"]} for r in train],
        "prompts.jsonl": as_prompts[0],
        "prompts_heldout.jsonl": as_prompts[1],
    }


def thumbs(folder: Path) -> Rows:
    """Thumbs of a chat: prompt (messages), completion (messages), label."""
    rows = list(_lines(folder, "thumbs.jsonl"))
    seen: dict[str, dict[str, Any]] = {}
    for row in rows:
        seen.setdefault(json.dumps(row["prompt"]), {"prompt": row["prompt"]})
    prompts = list(seen.values())
    held_out = prompts[::_HELD_OUT]
    return {
        "thumbs.jsonl": rows,
        "liked.jsonl": [{"prompt": r["prompt"], "completion": r["completion"]} for r in rows if r["label"]],
        "prompts.jsonl": [p for p in prompts if p not in held_out],
        "prompts_heldout.jsonl": held_out,
    }


def taskmaster(folder: Path) -> Rows:
    """Thumbs of Taskmaster: one dialogue in ten is held out, with all its turns; turns without text are left out."""
    from rlhf_engine.data import Tally, load_rows

    read = load_rows(folder, Tally(source=str(folder), argument="--data"), kinds=("unpaired_preference",))
    found = [row for row in read if isinstance(row.completion, str) and row.completion.strip()]
    order = {group: i for i, group in enumerate(dict.fromkeys(row.group for row in found))}
    parts: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for row in found:
        parts[order[row.group] % _HELD_OUT_DIALOGUES == 0].append(
            {"prompt": row.prompt, "completion": row.completion, "label": row.label, "dialogue": row.group}
        )
    random.Random(0).shuffle(parts[True])  # the first so many are of many dialogues
    return {
        "thumbs.jsonl": parts[False],
        "thumbs_heldout.jsonl": parts[True],
        "written.jsonl": [{"prompt": r["prompt"], "completion": r["completion"]} for r in parts[False]],
        "prompts.jsonl": _prompts(parts[False]),
        "prompts_heldout.jsonl": _prompts(parts[True]),
    }


def sampled_pairs(folder: Path, gold: Path, device: str) -> Rows:
    """Pairs of two answers that a model has drawn to a prompt, labelled by a gold reward model.

    Gold takes the place of people (Gao and others, arXiv 2210.10760): it is known, so that what a policy gains by a
    proxy of it can be compared with what it gains by gold.
    """
    answers: dict[str, list[str]] = {}
    for row in _lines(folder, "answers.jsonl"):
        answers.setdefault(row["prompt"], []).append(row["completion"])
    pairs = [
        {"prompt": prompt, "chosen": texts[0], "rejected": texts[1]}
        for prompt, texts in sorted(answers.items())
        if texts[0] != texts[1]
    ]
    train, held_out = (_label(rows, gold, device) for rows in _split(pairs))
    return {"labelled.jsonl": train, "labelled_heldout.jsonl": held_out}


def _label(pairs: list[dict[str, Any]], gold: Path, device: str) -> list[dict[str, Any]]:
    """Put the answer first that a whole reward model prefers; pairs of equal rewards are left out."""
    from rlhf_engine.data import Preference, tokenize_row
    from rlhf_engine.data.tokenize import fit_to_length, load_tokenizer, read_eos_token_ids
    from rlhf_engine.devices import resolve_device
    from rlhf_engine.hydra import OFF, HydraModel, PackedBatch, RoleSpec
    from rlhf_engine.hydra.loading import read_context_length

    tokenizer, roles = load_tokenizer(gold), {"reward": RoleSpec(slot=OFF, head="reward")}
    model = HydraModel.from_pretrained(gold, roles=roles, device=resolve_device(device))
    ends, context = read_eos_token_ids(tokenizer, gold), read_context_length(gold)
    rows = [tokenize_row(Preference(**pair, group="", place="samples"), tokenizer, ends) for pair in pairs]
    tokenized = [fit_to_length(row, context, "keep_end", "", tokenizer=tokenizer, end_ids=ends) for row in rows]
    prompts = [row.prompt for row in tokenized for _ in row.answers]
    answers = [answer for row in tokenized for answer in row.answers]
    rewards_N = model.score(PackedBatch.from_lists(prompts, answers, device=model.device), ("reward",)).rewards_N
    if not rewards_N.isfinite().all():
        raise ValueError(f"{gold}: expected finite rewards, got others")
    labelled = [
        pair if first > second else {**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]}
        for pair, (first, second) in zip(pairs, rewards_N.view(-1, 2).tolist(), strict=True)
        if first != second
    ]
    print(f"{len(labelled)} pairs labelled by {gold}, {len(pairs) - len(labelled)} ties left out", flush=True)
    return labelled


LAYOUTS = {
    function.__name__: function for function in (stack_exchange, hh, tldr, gsm8k, thumbs, taskmaster, sampled_pairs)
}
