"""Exact mode: tokens that conversations draw have the log-probs of scoring, in any company."""

import pytest
import torch
from rlhf_kernels.runtime import native, registry
from transformers import LlamaConfig

from rlhf_engine.hydra import RoleSpec, SlotConfig
from rlhf_engine.rollout import EngineOptions, Rollout, SamplingConfig
from rlhf_engine.rollout.generate import LocalRollouts
from tests.conftest import randomise
from tests.conversations.chatter import CONTEXT, TOKENIZER, Chatter, asked
from tests.rollout.test_exact import make

WORDS = len(TOKENIZER) + 31  # more than the tokenizer knows, and no multiple of anything
SIZES = {"hidden_size": 64, "intermediate_size": 83, "num_attention_heads": 8, "num_key_value_heads": 2}
LLAMA = LlamaConfig(**SIZES, vocab_size=WORDS, num_hidden_layers=2, max_position_embeddings=CONTEXT)
HOW = {"max_completion_length": 400, "eos_token_ids": tuple(range(20)), "temperature": 0.8}
WAYS = [
    {},
    {"max_rows": 5},
    {"cache_bytes": 70},  # blocks: two of the longest conversations, so that what is kept goes
    {"decode_step": "transformers"},
]
OTHERS = ({}, {"top_p": 0.9}, {"top_k": 9, "min_completion_length": 3}, {"min_p": 0.02})

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


def make_policies(dtype: torch.dtype):
    model = make(LLAMA, dtype, actor=SlotConfig(r=4, alpha=8.0), critic=SlotConfig(r=4, alpha=8.0))
    more = {"other": SlotConfig(r=2, alpha=4.0, target_modules=("q_proj", "down_proj"))}
    model.add_roles({"behaviour": RoleSpec(slot="other")}, slots=more)
    return model.eval()


def talk(model, number: int, *, role: str = "actor", prompts: int = 2, generations: int = 2, **sampling) -> Rollout:
    """Conversations about prompts that several of them share, in one of the ways that rows are run."""
    options = dict(WAYS[number % len(WAYS)])
    if blocks := options.pop("cache_bytes", 0):
        options["cache_bytes"] = blocks * 16 * model.backbone().cache_bytes_per_position
    how = SamplingConfig(**{**HOW, "seed": number, **sampling})
    rollouts = LocalRollouts(model, EngineOptions(**options), role, Chatter(max_turns=8))
    return rollouts.generate(asked(prompts, generations, seed=number), how)


@pytest.mark.parametrize(
    ("dtype", "least"),
    [
        (torch.float32, 1000),
        (torch.bfloat16, 1000),
        *(pytest.param(dtype, 100_000, marks=pytest.mark.long) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_drawn_tokens_have_the_log_probs_of_scoring(dtype, least):
    with registry.use_exact():
        model, drawn, number, turns = make_policies(dtype), 0, 0, set[int]()
        while drawn < least or number < 2 * len(WAYS):
            role, other = ("actor", "behaviour", "reference")[number % 3], OTHERS[number // 2 % len(OTHERS)]
            sizes = {"prompts": 16, "generations": 8} if least > 1000 else {"prompts": 2, "generations": 3}
            rollout = talk(model, number, role=role, **other, **sizes)
            batch = rollout.batch
            found = dict(model.score(batch, (role,), temperature=HOW["temperature"]).items())
            (scored,) = (x for name, x in found.items() if name.endswith("logprobs_M"))
            assert not (rollout.logprobs_M != scored).any(), (number, role, other)
            assert (batch.supports is not None) == bool(other)
            if WAYS[number % len(WAYS)].keys() <= {"decode_step"}:  # there was room to keep all that was written
                assert rollout.stats.prompt_tokens < batch.n_tokens
            assert rollout.stats.tokens == batch.n_completion_tokens == len(rollout.logprobs_M)
            drawn += batch.n_completion_tokens
            turns |= {len(spans) for spans in batch.turns}
            randomise(model, "actor", "other", seed=number, scale=0.05)
            number += 1
        assert turns >= ({1, 2, 8} if least == 1000 else set(range(1, 9)))
