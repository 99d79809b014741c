"""Rollouts: sampling with a KV cache in one role's lane, on the very weights that training uses.

Prompts are prefilled packed; then one token per live row and step. A row stops at its own end-of-sequence token and
leaves the batch. Greedy and sampled rows share a batch. Each token's log-prob under the distribution it was drawn
from is kept, logits never exist. A draw depends on (seed, sample id, position) only, not on what it was batched with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rlhf_kernels.sample import sample

from rlhf_engine.hydra.attention import Linears, plan_decode, plan_packed
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.gate import SlotTable
from rlhf_engine.hydra.kv_cache import KVCache, NewTokens
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.hydra.roles import LM_HEAD, require_role

_MASK_64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How answers are drawn."""

    max_completion_length: int
    """Most tokens per answer."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer; the ending token belongs to it."""
    temperature: float = 1.0
    """Logits are divided by it; log-probs are of that distribution."""
    seed: int = 0
    """Seed of every draw."""

    def __post_init__(self) -> None:
        if self.max_completion_length < 1:
            raise ValueError(f"max_completion_length: expected at least 1 token, got {self.max_completion_length}")
        if not self.temperature > 0:
            raise ValueError(f"temperature: expected a positive number (use greedy rows for 0), got {self.temperature}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """Answers and how they came about. M completion tokens of N sequences."""

    batch: PackedBatch
    logprobs_M: torch.Tensor
    """fp32 [M], log-prob of each token under the distribution it was drawn from."""
    finished: tuple[bool, ...]
    """N flags: the answer ended with an end-of-sequence token."""
    policy_version: int
    """Version of the policy that made every token."""


@torch.no_grad()
def generate(
    model: HydraModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    role: str = "actor",
    greedy: Sequence[bool] | None = None,
    sample_ids: Sequence[int] | None = None,
    policy_version: int = 0,
) -> Rollout:
    """Draw one answer per prompt.

    prompts: N token lists. greedy: N flags, True rows take the arg-max. sample_ids: N ids that, with the seed, key the
    random numbers; default 0…N−1. Raises ValueError for an empty batch, an empty prompt, a prompt that does not fit
    the context, or an unknown role.
    """
    spec = require_role(model.roles, role)
    if spec.head != LM_HEAD:
        raise ValueError(f"role: expected one with an LM head, got {role!r} with head {spec.head!r}")
    backbone = model.role_backbone(role)
    check_prompts(prompts, backbone.context_length, sampling.max_completion_length)
    n = len(prompts)
    ids = tuple(sample_ids) if sample_ids is not None else tuple(range(n))
    flags = tuple(greedy) if greedy is not None else (False,) * n
    if len(flags) != n or len(ids) != n:
        raise ValueError(f"greedy, sample_ids: expected {n} entries like prompts, got {len(flags)} and {len(ids)}")
    rows = _LiveRows(backbone, spec.slot, prompts, flags, ids, sampling)
    rows.prefill(prompts)
    while rows.live:
        rows.step()
    batch = PackedBatch.from_lists(prompts, rows.tokens, device=backbone.device, sample_ids=ids)
    logprobs = torch.tensor([x for row in rows.logprobs for x in row], dtype=torch.float32, device=backbone.device)
    eos = set(sampling.eos_token_ids)
    return Rollout(
        batch=batch,
        logprobs_M=logprobs,
        finished=tuple(row[-1] in eos for row in rows.tokens),
        policy_version=policy_version,
    )


def check_prompts(prompts: Sequence[Sequence[int]], context_length: int, max_completion_length: int) -> None:
    """Raise ValueError for an empty batch, an empty prompt, or one that leaves no room for the answer."""
    if len(prompts) == 0:
        raise ValueError("prompts: expected at least one prompt, got a batch of size 0")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompts[{i}]: expected at least one token, got an empty prompt")
        if len(prompt) + max_completion_length > context_length:
            raise ValueError(
                f"prompts[{i}]: expected at most {context_length - max_completion_length} tokens (context "
                f"{context_length} − max_completion_length {max_completion_length}), got {len(prompt)}"
            )


class _LiveRows:
    """The rows still being written, their cache and what they have so far."""

    def __init__(
        self,
        backbone: Backbone,
        slot: str | None,
        prompts: Sequence[Sequence[int]],
        greedy: tuple[bool, ...],
        ids: tuple[int, ...],
        sampling: SamplingConfig,
    ) -> None:
        self.backbone, self.slot, self.sampling = backbone, slot, sampling
        device = backbone.device
        self.lengths = [len(p) for p in prompts]
        self.cache = KVCache(rows=len(prompts), capacity=max(self.lengths) + sampling.max_completion_length)
        self.seeds = torch.tensor([_row_seed(sampling.seed, i) for i in ids], dtype=torch.int64, device=device)
        self.greedy = torch.tensor(greedy, device=device)
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.live = list(range(len(prompts)))
        self.linears: Linears = {}
        self.eos = set(sampling.eos_token_ids)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run all prompts packed, fill the cache, draw each row's first token."""
        batch = PackedBatch.from_lists(prompts, [[]] * len(prompts), device=self.backbone.device)
        rows_T = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(self.lengths)).to(batch.device)
        new = NewTokens(cache=self.cache, rows_T=rows_T, positions_T=batch.positions_T)
        plan = plan_packed(self.lengths, batch.device, new=new)
        table = SlotTable.uniform(self.slot, batch.n_tokens)
        hidden = self.backbone.run(batch.tokens_T, batch.positions_T, table, plan)
        self._draw(hidden.index_select(0, batch.last_rows_N))

    def step(self) -> None:
        """Append the last drawn token of every live row to its cache and draw the next."""
        device = self.backbone.device
        rows = torch.tensor(self.live, device=device)
        tokens = torch.tensor([self.tokens[i][-1] for i in self.live], device=device)
        positions = torch.tensor([self.lengths[i] for i in self.live], device=device)
        for i in self.live:
            self.lengths[i] += 1
        longest = max(self.lengths[i] for i in self.live)
        new = NewTokens(cache=self.cache, rows_T=rows, positions_T=positions)
        plan = plan_decode(new, longest, self.linears)
        table = SlotTable.uniform(self.slot, len(self.live))
        self._draw(self.backbone.run(tokens, positions, table, plan))

    def _draw(self, hidden: torch.Tensor) -> None:
        """Sample the next token of every live row from its hidden state [n, H]; retire the rows that are done."""
        device = self.backbone.device
        index = torch.tensor(self.live, device=device)
        head = self.backbone.lm_head_in(self.slot)
        drawn = sample(
            hidden,
            head.weight,
            temperature=self.sampling.temperature,
            seed=self.seeds[index],
            position=torch.tensor([self.lengths[i] for i in self.live], device=device),
            greedy=self.greedy[index],
            softcap=head.softcap,
            logit_scale=head.logit_scale,
            bias=head.bias,
            lora=head.lora,
        )
        assert drawn.token is not None
        assert drawn.logprob is not None
        still = []
        for i, token, logprob in zip(self.live, drawn.token.tolist(), drawn.logprob.tolist(), strict=True):
            self.tokens[i].append(token)
            self.logprobs[i].append(logprob)
            if token not in self.eos and len(self.tokens[i]) < self.sampling.max_completion_length:
                still.append(i)
        if len(still) < len(self.live):
            self.linears = {}
        self.live = still


def _row_seed(seed: int, sample_id: int) -> int:
    """Seed of one row: SplitMix64's finaliser over (seed, sample id), as a signed 64-bit integer."""
    z = (seed * 0x9E3779B97F4A7C15 + sample_id + 1) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    z ^= z >> 31
    return z - (1 << 64) if z >= 1 << 63 else z
