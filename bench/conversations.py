#!/usr/bin/env python
"""Measure what a conversation costs.

It has 8 turns of 32 drawn tokens with 16 given ones between them, behind a prompt of 512.

    python bench/conversations.py --out bench/results/avx512_bf16/conversations
    python bench/conversations.py --quick --out runs/conversations                                       # a tiny model

Conversations are held as in a training run, with a tool and a chat template. Everything runs in exact mode. Arms take
turns in one process, a rollout each a round; a time is the median of the rounds, of the process's CPU seconds and by
the wall clock.

    kept     a turn goes on from the keys and values of those before it
    anew     every turn's whole prompt goes through the model
    answer   one answer of as many tokens as all turns have, behind the same prompt
    given    a prompt of as many tokens as were given, and one token behind it

Writes conversations-MODEL-DTYPE.json and a table into --out; `ratio` is kept / (answer + given).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from many_policies import in_turns, make_pool
from rlhf_bench.rollout.models import CONFIGS
from rlhf_kernels.runtime import registry

from rlhf_engine.devices import DTYPES
from rlhf_engine.policy import Policies
from rlhf_engine.rollout import conversation
from rlhf_engine.rollout.generate import LocalRollouts
from rlhf_engine.rollout.request import Message, PromptBatch, Request, SamplingConfig
from rlhf_engine.rollout.rows import AnswerRow
from rlhf_engine.runs.metrics import run_record, write_json_atomic

sys.path.append(str(Path(__file__).resolve().parents[1]))
from examples.environments.calculator import Calculator
from examples.environments.tiny import make_tokenizer

PROMPT, TURNS, DRAWN, GIVEN = 512, 8, 32, 16
AROUND = 8  # of the given tokens are around a tool's result: the end of the turn before, and the template's
QUICK = {"model": "llama-260k", "dtype": "float32", "rows": [2], "rounds": 2}


class Conversation(conversation.Conversation):
    """Turns of one length, whatever is drawn."""

    def request(self, first: Request, sampling: SamplingConfig) -> Request:
        asked = super().request(first, sampling)
        return replace(asked, keep=first.keep, max_completion_length=DRAWN)

    def take(self, row: AnswerRow, most: int) -> bool:
        row.finish_reason = "stop"
        return super().take(row, most)


class Conversations(conversation.Conversations):
    """A call in every turn, whose result has so many tokens that as many are given as asked for."""

    kept = True

    def begin(self, row: Any, ids: Any) -> Conversation:
        talk = Conversation(self, [dict(m) for m in row["prompt"]], tuple(ids), None, {})
        talk.request = lambda first, sampling: Conversation.request(talk, replace(first, keep=self.kept), sampling)
        return talk

    def parse(self, ids: Any, prefix: Any, *, ended: bool) -> tuple[Message, list[Any]]:
        calls = [{"type": "function", "function": CALL}]
        return self._call("multiply", "") | {"tool_calls": calls}, calls


CALL = {"name": "multiply", "arguments": {"a": 10 ** (GIVEN - AROUND - 1), "b": 1}}


def arms_of(pool: Policies, rows: int) -> dict[str, Callable[[], Any]]:
    """A rollout of each arm."""
    model, role = pool.host, pool.get("p0").role
    host = Conversations(make_tokenizer([Calculator.multiply]), 2048, tools=[Calculator().multiply], max_turns=TURNS)
    vocabulary = model.backbone().vocabulary
    prompts = torch.randint(3, vocabulary, (rows, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    asked = [{"prompt": [{"role": "user", "content": "?"}]}] * rows
    batch = PromptBatch.of(range(rows), prompts, generations=1, data=asked)
    short = replace(batch, prompts=tuple(prompt[: (TURNS - 1) * GIVEN] for prompt in batch.prompts))

    def talked(kept: bool) -> None:
        host.kept = kept
        most = TURNS * DRAWN + (TURNS - 1) * GIVEN
        how = SamplingConfig(max_completion_length=most, eos_token_ids=())
        found = LocalRollouts(model, role=role, conversations=host).generate(batch, how).batch
        assert found.turns is not None
        assert found.completion_lens == (TURNS * DRAWN,) * rows
        assert {length - PROMPT for length in found.lengths} == {most}

    def answered(prompts: PromptBatch, most: int) -> None:
        how = SamplingConfig(max_completion_length=most, eos_token_ids=())
        LocalRollouts(model, role=role).generate(prompts, how)

    return {
        "kept": lambda: talked(True),
        "anew": lambda: talked(False),
        "answer": lambda: answered(batch, TURNS * DRAWN),
        "given": lambda: answered(short, 1),
    }


def table_of(found: list[dict[str, Any]]) -> str:
    """Seconds of every arm."""
    names = list(found[0]["arms"])
    lines = [f"| conversations | {' | '.join(names)} | ratio | by the clock |", "|---" * (len(names) + 3) + "|"]
    for row in found:
        cells = (f"{row['arms'][name]['cpu_ms'] / 1e3:.3f}" for name in names)
        lines.append(f"| {row['rows']} | {' | '.join(cells)} | {row['ratio']:.2f} | {row['wall_ratio']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama-41m", help=f"one of {', '.join(CONFIGS)}, or a folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16], help="conversations at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    for name, value in QUICK.items() if given.quick else ():
        setattr(given, name, value)
    torch.set_num_threads(given.threads)
    pool, found = make_pool(given.model, DTYPES[given.dtype], 1, head=False), []
    with registry.use_exact():
        for rows in given.rows:
            arms = in_turns(arms_of(pool, rows), given.rounds)
            ratios = [arms["kept"][t] / (arms["answer"][t] + arms["given"][t]) for t in ("cpu_ms", "wall_ms")]
            found.append({"rows": rows, "arms": arms, "ratio": ratios[0], "wall_ratio": ratios[1]})
    table, command = table_of(found), ["python", "bench/conversations.py", *sys.argv[1:]]
    name = f"conversations-{Path(given.model).name}-{given.dtype}"
    setting = {key: value for key, value in vars(given).items() if key != "out"}
    record = run_record(config=setting, command=command, backends=registry.report("cpu", DTYPES[given.dtype]))
    given.out.mkdir(parents=True, exist_ok=True)
    write_json_atomic(given.out / f"{name}.json", {**record, "exact": True, "rows": found})
    about = f"CPU seconds, {given.threads} thread, {record['cpu_instruction_set']}: `{shlex.join(command)}`"
    (given.out / f"{name}.md").write_text(f"# {name}\n\n{about}\n\n{table}", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
