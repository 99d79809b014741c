"""Policies, work items and answers arrive as what was sent, or not at all."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlhf_engine.errors import ConfigError, EngineError
from rlhf_engine.generators import serialize
from rlhf_engine.generators.policy_store import Snapshot
from rlhf_engine.generators.work import WorkItem
from rlhf_engine.hydra import PackedBatch, Scores
from rlhf_engine.hydra.supports import Supports, pack_bits
from rlhf_engine.rollout import PromptBatch, Rollout, RolloutStats, SamplingConfig

POLICY = Snapshot(version=3, tensors={"b": torch.randn(5, 3), "a": torch.randn(7).to(torch.bfloat16)})
ITEM = WorkItem(
    step=2,
    share=1,
    n_shares=3,
    version=1,
    prompts=PromptBatch(rows=(7, 8), prompts=((1, 2), (3,)), groups=(0, 1), greedy=(False, True), sample_ids=(10, 11)),
    sampling=SamplingConfig(max_completion_length=4, eos_token_ids=(2, 5), temperature=0.7, seed=9),
)
FROZEN = Scores(past_logprobs_M=torch.randn(3), rewards_N=torch.randn(2))


def answers(frozen: Scores | None, supports: Supports | None = None) -> Rollout:
    return Rollout(
        batch=PackedBatch.from_lists(
            ITEM.prompts.prompts, [[4], [6, 2]], sample_ids=ITEM.prompts.sample_ids, supports=supports
        ),
        logprobs_M=torch.randn(3),
        versions_M=torch.tensor([1, 1, 1]),
        finish_reasons=("length", "eos"),
        filtered=False,
        stats=RolloutStats(tokens=3, decode_seconds=0.5, step="eager"),
        frozen=frozen,
    )


def test_policies():
    parcel = serialize.pack_policy(POLICY)
    assert parcel.digest == POLICY.digest()
    found = serialize.unpack_policy(parcel)
    assert found.version == 3
    assert found.digest() == POLICY.digest()
    assert found.tensors["a"].dtype == torch.bfloat16


@pytest.mark.parametrize("place", [0, 20, -1], ids=["length", "header", "tensor"])
def test_a_damaged_policy_is_refused(place):
    parcel = serialize.pack_policy(POLICY)
    data = bytearray(parcel.data)
    data[place] ^= 1
    with pytest.raises(EngineError, match="policy version 3 arrived damaged"):
        serialize.unpack_policy(parcel._replace(data=bytes(data)))


def test_a_policy_cut_short_or_of_another_version_is_refused():
    parcel = serialize.pack_policy(POLICY)
    with pytest.raises(EngineError, match="arrived damaged"):
        serialize.unpack_policy(parcel._replace(data=parcel.data[:-4]))
    other = serialize.pack_policy(dataclasses.replace(POLICY, tensors={"a": torch.zeros(7)}))
    with pytest.raises(EngineError, match=r"expected tensors of digest \w+…, got"):
        serialize.unpack_policy(parcel._replace(data=other.data))


def test_work_items():
    assert serialize.unpack_item(serialize.pack_item(ITEM)) == ITEM


@pytest.mark.parametrize("frozen", [None, FROZEN], ids=["plain", "scored"])
def test_answers(frozen):
    sent = answers(frozen)
    found = serialize.unpack_rollout(serialize.pack_rollout(sent))
    for name in ("cu_seqlens", "prompt_lens", "sample_ids"):
        assert getattr(found.batch, name) == getattr(sent.batch, name)
    assert torch.equal(found.batch.tokens_T, sent.batch.tokens_T)
    assert torch.equal(found.logprobs_M, sent.logprobs_M)
    assert torch.equal(found.versions_M, sent.versions_M)
    assert found.finish_reasons == ("length", "eos")
    assert found.stats == sent.stats
    if frozen is None:
        assert found.frozen is None
    else:
        assert torch.equal(found.frozen.past_logprobs_M, frozen.past_logprobs_M)
        assert found.frozen.ref_logprobs_M is None
        assert torch.equal(found.frozen.rewards_N, frozen.rewards_N)


def test_answers_bring_the_words_that_their_tokens_were_drawn_among():
    """A few ids, bits, and nothing for all words."""
    mask = torch.zeros(3, 100, dtype=torch.bool)
    mask[0, [4, 99]] = mask[1, 2:60] = True
    sent = answers(FROZEN, Supports.from_bits(pack_bits(mask), 100))
    assert sent.batch.supports.lengths.tolist() == [2, 4, 0]
    found = serialize.unpack_rollout(serialize.pack_rollout(sent)).batch.supports
    assert found.vocabulary == 100
    assert torch.equal(found.mask(), sent.batch.supports.mask())
    assert serialize.unpack_rollout(serialize.pack_rollout(answers(None))).batch.supports is None
    values = serialize.pack_rollout(sent)
    with pytest.raises(EngineError, match="answers arrived damaged"):
        serialize.unpack_rollout({**values, "vocabulary": 101})


def test_answers_that_were_changed_on_their_way_are_refused():
    values = serialize.pack_rollout(answers(FROZEN))
    tensors = bytearray(values["tensors"])
    tensors[-1] ^= 1
    for change in (
        {"tensors": bytes(tensors)},
        {"finish_reasons": ("eos", "eos")},
        {"has_frozen": False},
        {"digest": None},
    ):
        with pytest.raises(EngineError, match=r"answers arrived damaged: expected ones of digest .*…, got \w{12}…"):
            serialize.unpack_rollout({**values, **change})


def test_other_frozen_weights_are_refused():
    serialize.require_same_parts({"backbone base": "a"}, {"backbone base": "a", "head reward": "b"})
    with pytest.raises(ConfigError, match="got a head reward of hash c…, not b…"):
        serialize.require_same_parts(
            {"backbone base": "a", "head reward": "c"}, {"backbone base": "a", "head reward": "b"}
        )


def test_other_versions_of_packages_are_refused():
    with pytest.raises(ConfigError, match=r"async ray: expected torch 1\.0, the learner's, on .* machine, got 2\.0"):
        serialize.require_same_parts({"package torch": "2.0"}, {"package torch": "1.0", "backbone base": "a"})
