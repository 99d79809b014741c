"""Work that several studies measure: a random Llama with a reward head, and prompts whose answers never end early.

Importing it needs the standard library alone, so that a process of another engine holds nothing of ours.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PHASES = ("generate", "score", "update")
HEADS_FILE, PROMPTS_FILE = "heads.safetensors", "prompts.jsonl"


def option(default: Any, text: str) -> Any:
    """A field of `Setting` with its flag's help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The work, the same for every arm; each field is a flag."""

    hidden: int = option(512, "hidden size of the Llama, a multiple of 64, the size of a head")
    layers: int = option(8, "decoder blocks")
    vocab: int = option(32000, "tokens in the vocabulary")
    lora_r: int = option(16, "rank of the adapters, which are on all linears of the blocks")
    lora_alpha: int = option(32, "adapters are scaled by lora-alpha / lora-r")
    batch: int = option(16, "prompts per step")
    prompt_tokens: int = option(64, "tokens per prompt")
    answer_tokens: int = option(64, "tokens per answer")
    epochs: int = option(1, "PPO epochs per step")
    mini_batches: int = option(1, "mini-batches per epoch")
    micro_batch: int = option(8, "sequences per forward and backward")
    trl_rollout_batch: int = option(0, "sequences TRL generates and scores at once, 0: the batch")
    steps: int = option(4, "steps per arm and round; the first one warms up")
    threads: int = option(2, "CPU threads")
    seed: int = option(0, "seed of weights, prompts and sampling")

    def __post_init__(self) -> None:
        least = {"steps": 2, "vocab": 8, "seed": 0, "answer_tokens": 2, "trl_rollout_batch": 0}
        for name, value in dataclasses.asdict(self).items():
            if value < least.get(name, 1):
                raise ValueError(f"{name}: expected at least {least.get(name, 1)}, got {value}")
        if self.hidden % 64:
            raise ValueError(f"hidden: expected a multiple of 64, got {self.hidden}")
        for name in ("mini_batches", "trl_rollout_batch"):
            parts = getattr(self, name)
            if parts and self.batch % parts:
                raise ValueError(f"{name}: expected a divisor of batch ({self.batch}), got {parts}")
        if (self.batch // self.mini_batches) % self.micro_batch:
            raise ValueError(
                f"micro_batch: expected a divisor of batch / mini_batches ({self.batch // self.mini_batches}), "
                f"got {self.micro_batch}"
            )

    @property
    def intermediate(self) -> int:
        """Width of the MLP."""
        return self.hidden * 8 // 3 // 64 * 64

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return self.prompt_tokens + self.answer_tokens


def prepare(setting: Setting, folder: Path) -> None:
    """Write what all arms read: a model folder with reward head and tokenizer, and the prompts."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(setting.seed)
    heads = setting.hidden // 64
    config = LlamaConfig(
        hidden_size=setting.hidden,
        intermediate_size=setting.intermediate,
        num_hidden_layers=setting.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=setting.vocab,
        max_position_embeddings=setting.length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model, end = LlamaForCausalLM(config), setting.vocab - 1
    with torch.no_grad():  # the hidden states' first channel is above 0 whatever the tokens: no answer draws its end
        model.model.embed_tokens.weight[:, 0] = 0.1
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[end] = 0.0
        model.lm_head.weight[end, 0] = -100.0
    model.save_pretrained(folder)
    reward = {"reward.weight": torch.randn(1, setting.hidden) / setting.hidden**0.5, "reward.bias": torch.zeros(1)}
    save_file(reward, folder / HEADS_FILE)
    words = {f"t{i}": i for i in range(end)} | {"<eos>": end, "<pad>": setting.vocab}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)
    # one batch more than is used: in the last batch of its data, TRL steps its optimizer at every micro-batch
    rows = torch.randint(end, (setting.batch * (setting.steps + 1), setting.prompt_tokens)).tolist()
    lines = (json.dumps({"prompt": " ".join(f"t{i}" for i in row)}) + "\n" for row in rows)
    (folder / PROMPTS_FILE).write_text("".join(lines))
