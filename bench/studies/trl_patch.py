#!/usr/bin/env python
"""Stock trainers of TRL as they are, and with `patch()`: losses, seconds per step, peak memory.

    python bench/studies/trl_patch.py --out bench/results/cpu/trl_patch
    python bench/studies/trl_patch.py --quick --out runs/trl_patch                                   # a tiny model
    python bench/studies/trl_patch.py --kinds dpo --vocab 128256 --hidden 1024 --out DIR

A random Llama with LoRA on every linear, random prompts, the same seed in both arms, which alternate, each in a process
of its own. Of each: the median over all steps but the first, and the most memory the process had (ru_maxrss).

    calls    log-prob calls that our kernel served; all that the trainer made, as tests/integrations shows
    loss     largest difference between the losses that the two arms log
    norm     largest difference between their gradients' norms, as a share of the norm
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from arms import in_turn, make_parser, measure, setting_of, write_results
from rlhf_bench.workload import Setting

ARMS = ("stock", "patched")
KINDS = ("grpo", "rloo", "dpo")
COMPARED = ("loss", "grad_norm")


def prepare(setting: Setting, folder: Path) -> None:
    """A random Llama and a tokenizer of words, whose last two tokens are padding and end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(setting.seed)
    heads, pad, end = setting.hidden // 64, setting.vocab - 2, setting.vocab - 1
    config = LlamaConfig(
        hidden_size=setting.hidden,
        intermediate_size=setting.intermediate,
        num_hidden_layers=setting.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=setting.vocab,
        max_position_embeddings=2 * setting.length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"t{i}": i for i in range(pad)} | {"<pad>": pad, "<eos>": end}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def work(request: dict[str, Any]) -> dict[str, Any]:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import contextlib

    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, TrainerCallback

    from rlhf_engine.data.tokenize import load_tokenizer
    from rlhf_engine.integrations.trl import patch

    setting, folder, kind = Setting(**request["setting"]), request["folder"], request["kind"]
    torch.set_num_threads(setting.threads)
    tokenizer = load_tokenizer(folder)
    generator = torch.Generator().manual_seed(setting.seed)

    def text(n: int) -> str:
        return " ".join(f"t{i}" for i in torch.randint(setting.vocab - 2, (n,), generator=generator).tolist())

    prompts = [text(setting.prompt_tokens) for _ in range(setting.batch * setting.steps)]
    rows = [{"prompt": p} for p in prompts]
    if kind == "dpo":
        rows = [{**row, "chosen": text(setting.answer_tokens), "rejected": text(setting.answer_tokens)} for row in rows]
    drawn = {"num_generations": 2, "max_completion_length": setting.answer_tokens, "beta": 0.04}
    config = getattr(trl, f"{kind.upper()}Config")(
        output_dir=request["scratch"],
        max_steps=setting.steps,
        per_device_train_batch_size=setting.batch,
        learning_rate=1e-3,  # far enough that losses of the later steps say something
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=request["device"] == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=setting.seed,
        **({} if kind == "dpo" else drawn),
    )
    seconds: list[float] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            seconds.append(-time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            seconds[-1] += time.perf_counter()

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, request["dtype"]))
    extra = (
        {} if kind == "dpo" else {"reward_funcs": lambda completions, **columns: [float(len(c)) for c in completions]}
    )
    lora = LoraConfig(
        r=setting.lora_r, lora_alpha=setting.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with patch() if request["arm"] == "patched" else contextlib.nullcontext() as patched:
        trainer = getattr(trl, f"{kind.upper()}Trainer")(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[Watch()],
            **extra,
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer.train()
    return {
        "seconds": statistics.median(seconds[1:]),
        "losses": [float(row[name]) for row in trainer.state.log_history if "loss" in row for name in COMPARED],
        "bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "bytes_before": 1024 * before,
        "calls": 0 if patched is None else patched.calls,
    }


def summarise(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    stock, patched = ({k: statistics.median(r[k] for r in rounds[arm]) for k in ("seconds", "bytes")} for arm in ARMS)
    pairs = list(zip(rounds["stock"][0]["losses"], rounds["patched"][0]["losses"], strict=True))
    return {
        "stock": stock,
        "patched": patched,
        "calls": rounds["patched"][0]["calls"],
        "loss": max(abs(a - b) for a, b in pairs[::2]),
        "norm": max(abs(a - b) / a for a, b in pairs[1::2]),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| | stock, s per step | patched | × faster | stock, peak MB | patched | calls "
        "| loss differs by | norm differs by |",
        "|---" * 9 + "|",
    ]
    for kind, row in found.items():
        a, b = row["stock"], row["patched"]
        lines.append(
            f"| {kind} | {a['seconds']:.3f} | {b['seconds']:.3f} | {a['seconds'] / b['seconds']:.2f} | "
            f"{a['bytes'] / 1e6:.0f} | {b['bytes'] / 1e6:.0f} | {row['calls']} | {row['loss']:.1e} | "
            f"{100 * row['norm']:.5f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    arguments = parser.parse_args()
    if arguments.request:
        print(json.dumps(work(arguments.request)))
        return
    if arguments.out is None:
        parser.error("--out: expected a folder for trl_patch.json and trl_patch.md")
    setting = setting_of(arguments, batch=8, steps=4)
    options = {name: getattr(arguments, name) for name in ("device", "dtype")}
    found, rounds = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(setting, Path(folder))
        for kind in arguments.kinds:
            rounds[kind] = in_turn(
                ARMS,
                arguments.rounds,
                lambda arm, kind=kind: measure(__file__, setting, Path(folder), arm=arm, kind=kind, **options),
            )
            found[kind] = summarise(rounds[kind])
    text = f"# Stock trainers of TRL, with and without patch()\n\n{table(found)}\n"
    write_results("trl_patch", arguments, setting, {**options, "medians": found, "rounds": rounds}, text)
    print(text)


if __name__ == "__main__":
    main()
