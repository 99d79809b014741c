#!/usr/bin/env python
"""docs/architectures.md: which causal language models of the installed transformers the engine serves.

    python bench/tables/architectures.py [--check] [--only TYPE ...] [--seconds 120]

Every type of transformers' causal-LM map is made with random weights from a tiny config and taken over by a HydraModel.
One that is served also draws answers and computes gradients: the rollout's log-probs have to be those of scoring, train
mode has to give those of eval mode, and every linear that a slot adapts needs a gradient. Each type runs in a child
process with a time limit. --check writes nothing and exits with 1 if the page differs; --only prints the rows of some
types and writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from rlhf_engine.hydra import HydraModel, Logprobs, RoleSpec, SlotConfig
from rlhf_engine.hydra.persist import require_savable
from rlhf_engine.rollout import SamplingConfig, generate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
_WORDS = 64
_MOST_WEIGHTS = 2e8
_NOT_MADE = "not made: "
_AGREE = 1e-4
"""Most that log-probs of two ways through a model in fp32 may differ by, nats."""


def _same(value: float, *names: str) -> dict[str, float]:
    return dict.fromkeys(names, value)


_SIZES: dict[str, Any] = {
    **_same(_WORDS, "vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"),
    **_same(128, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"),
    **_same(128, "model_max_length", "max_target_positions"),
    **_same(32, "hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "embedding_dim", "lru_width"),
    **_same(32, "word_embed_proj_dim", "dim", "attention_hidden_size"),
    **_same(4, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    **_same(4, "encoder_layers", "num_encoder_layers", "encoder_attention_heads", "num_encoder_attention_heads"),
    **_same(4, "num_blocks", "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    **_same(4, "num_decoder_attention_heads", "attention_heads", "swa_num_attention_heads"),
    **_same(2, "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "kv_n_heads"),
    **_same(8, "head_dim", "swa_head_dim", "attention_head_size", "dim_head", "d_head", "attention_head_dim"),
    **_same(8, "kv_channels", "global_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "rotary_dim"),
    **_same(8, "hidden_size_per_layer_input", "mamba_n_heads", "mamba_d_head"),
    **_same(48, "intermediate_size", "ffn_dim", "decoder_ffn_dim", "dff", "dim_ff", "ffn_hidden_size", "d_inner"),
    **_same(48, "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size"),
    **_same(16, "moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"),
    **_same(16, "shared_intermediate_size", "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"),
    **_same(16, "q_lora_rank", "kv_lora_rank", "o_lora_rank", "hc_lowrank", "laurel_rank", "gated_norm_rank"),
    **_same(16, "qk_head_dim", "index_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"),
    **_same(4, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    **_same(4, "index_n_heads", "linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"),
    **_same(2, "num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k"),
    **_same(1, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"),
    **_same(1, "num_expert_group", "zero_expert_num", "first_k_dense_replace", "num_dense_layers"),
    **_same(6, "sliding_window", "sliding_window_size", "local_attention", "window_size", "attention_window_size"),
    **_same(6, "index_topk"),
    **_same(64, "attention_chunk_size"),  # what is served is as long as a chunk
    **_same(4, "floor_scale"),
    **_same(2, "sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval", "layer_group_size"),
    **_same(2, "global_attn_every_n_layers", "attn_layer_period"),
    **_same(0.3, "initializer_range", "init_std"),  # far from uniform outputs, so that differences show
    "v_head_dim": 12,
    "attn_layer_offset": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "is_decoder": True,
}
"""Sizes, of which those that a config has are set; lists, such as kinds of layers, follow from the number of layers."""
_MLA = {"num_key_value_heads": 4}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
_OTHERS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "dots3_note_text": _MLA,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "falcon_h1": {"mamba_d_ssm": 64},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "mamba2": {"num_heads": 8},
    "phimoe": {"sliding_window": None},  # its checkpoints have one as long as the context
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""By type, of configs that the sizes alone do not make."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of trying one model type."""

    kind: str
    served: bool
    text: str


def tiny_config(kind: str) -> PreTrainedConfig:
    """The config of a type with small sizes, in its parts as well."""
    known = CONFIG_MAPPING[kind]
    config = known()
    values: dict[str, Any] = _values(kind, config)
    for name in known.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            values[name] = _values(part.model_type, part)
    return known(**values)


def _values(kind: str, config: PreTrainedConfig) -> dict[str, Any]:
    names = config.to_dict()
    found = {name: value for name, value in _SIZES.items() if name in names and not isinstance(names[name], list)}
    return {**found, **(_MLA if "kv_lora_rank" in found else {}), **_OTHERS.get(kind, {})}


def tiny_model(kind: str) -> PreTrainedModel:
    """A model of the type with random weights. Raises ValueError if it would not be tiny."""
    config = tiny_config(kind)
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if weights > _MOST_WEIGHTS:
        raise ValueError(f"expected a tiny model, got one of {weights} weights")
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide mistakes
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def try_type(kind: str) -> Row:
    """Make, take over, and where that is served draw and differentiate."""
    try:
        plain = tiny_model(kind)
    except Exception as error:  # whatever transformers' own code raises
        return Row(kind=kind, served=False, text=_NOT_MADE + _line(error))
    roles = {"actor": RoleSpec(slot="actor", trainable=True)}
    try:
        model = HydraModel.from_pretrained(plain, roles=roles, slots={"actor": SlotConfig(r=2)})
    except ValueError as error:
        return Row(kind=kind, served=False, text=" ".join(str(error).split()))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for pair in model.backbone().slot("actor").parameters():
            pair.add_(0.1 * torch.randn(pair.shape, generator=generator))
    rollout = generate(
        model.eval(), [[5, 9, 11, 3, 20, 6, 7], [8, 12]], SamplingConfig(max_completion_length=9, eos_token_ids=())
    )
    scored = model.score(rollout.batch, ("actor",)).logprobs_M
    (trained,) = model.train()(rollout.batch, (Logprobs(),))
    trained.logprob.sum().backward()
    assert scored is not None
    for what, found in (("rollout", rollout.logprobs_M), ("train mode", trained.logprob)):
        if not (gap := float((found - scored).abs().max())) <= _AGREE:
            return Row(kind=kind, served=False, text=f"WRONG: {what} differs from scoring by {gap:.2g} nats")
    idle = [name for name, p in model.backbone().slot("actor").named_parameters() if p.grad is None or not p.grad.any()]
    if idle:
        return Row(kind=kind, served=True, text=f"no gradient for {len(idle)} of its adapters, such as {idle[0]}")
    try:
        require_savable(model)
    except ValueError:
        return Row(kind=kind, served=True, text="a run on all its linears is refused: PEFT would load another function")
    return Row(kind=kind, served=True, text="")


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _child(kind: str, results: Connection) -> None:
    with contextlib.redirect_stderr(None):
        try:
            results.send(try_type(kind))
        except BaseException:
            where = traceback.format_exc().strip().splitlines()
            results.send(Row(kind=kind, served=False, text=f"CRASHED: {where[-1]}"))


def try_types(kinds: list[str], seconds: float) -> list[Row]:
    """A row for each type, each from a child process; says how it goes."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try_type("mixtral")  # what is imported here the children need not import
    context = multiprocessing.get_context("fork")
    rows = []
    for i, kind in enumerate(kinds):
        began = time.monotonic()
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(kind, theirs))
        child.start()
        theirs.close()
        try:
            row = ours.recv() if ours.poll(seconds) else Row(kind=kind, served=False, text="CRASHED: out of time")
        except EOFError:
            row = Row(kind=kind, served=False, text="CRASHED: the process ended")
        child.kill()
        child.join()
        rows.append(row)
        state = "served" if row.served else "refused"
        taken = time.monotonic() - began
        print(f"[{i + 1}/{len(kinds)}] {kind}: {state} {row.text[:160]} ({taken:.1f} s)", flush=True)
    return rows


_HEADER = """# Architectures

Every type of causal language model of transformers {version}, tried by `python bench/tables/architectures.py`
with random weights from a tiny config: served, or refused when it is loaded and why. A model that is served
draws answers with the log-probs of scoring (within {agree:g} nats in fp32). It computes in train mode what it
computes in eval mode, and has a gradient in every adapter. How loading decides, and what to do about a
refusal: [add a model](guides/add-a-model.md).

Limits of what is served: with longrope a sequence may be as long as the original context, because beyond it
the angles of all rows of a call depend on the longest one. With chunked attention it may be as long as one
chunk (`attention_chunk_size`), within which that is full attention. Encoders are tried as decoders
(`is_decoder=True`). Of a model of several modalities the text is served.

{served} of {all} types are served.

"""


def page(rows: list[Row]) -> str:
    """docs/architectures.md."""
    served = [row for row in rows if row.served]
    made = [row for row in rows if not row.served and not row.text.startswith(_NOT_MADE)]
    others = [row for row in rows if row.text.startswith(_NOT_MADE)]
    text = _HEADER.format(version=transformers.__version__, agree=_AGREE, served=len(served), all=len(rows))
    text += f"## Served\n\n{_names(row.kind for row in served)}.\n\n"
    text += _by_reason("remark", [row for row in served if row.text])
    text += "## Refused\n\n" + _by_reason("why", made)
    text += "## Not tried: transformers makes no model of the tiny config\n\n" + _by_reason("its error", others)
    return text.rstrip() + "\n"


def _names(kinds: Iterable[str]) -> str:
    """Types as Markdown, in lines of at most 110 characters."""
    words = ", ".join(f"`{kind}`" for kind in kinds)
    return textwrap.fill(words, 110, break_on_hyphens=False, break_long_words=False)


def _by_reason(column: str, rows: list[Row]) -> str:
    """A table with a row for each reason and all types that have it, the most frequent first."""
    kinds: dict[str, list[str]] = {}
    for row in rows:
        kinds.setdefault(_cell(row.text), []).append(f"`{row.kind}`")
    of_reason = sorted(kinds.items(), key=lambda item: -len(item[1]))
    return (
        f"| {column} | types |\n|---|---|\n"
        + "".join(f"| {reason} | {', '.join(names)} |\n" for reason, names in of_reason)
        + "\n"
    )


def _cell(text: str) -> str:
    """A reason without the numbers and names that differ between machines, short enough for a row."""
    text = re.sub(r"ones that differ by \S+ of their norm in (.*), where rounding explains \S+", r"others in \1", text)
    text = re.sub(r"(ValueError: )\w+Config:", r"\1…Config:", text)
    text = re.sub(r"'\w+Config'", "'…Config'", text)
    text = re.sub(r"^(not made|\w+): |\(model type '[^']*'\)", "", text).strip()
    return _shortened(text.replace("|", "\\|"), 80)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 2].rsplit(" ", 1)[0] + " …"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="TYPE")
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args(arguments)
    rows = try_types(options.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), options.seconds)
    if options.only:
        return 0
    text = page(rows)
    if options.check:
        return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # some errors of transformers name whatever comes first in a set
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main())
