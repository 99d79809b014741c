"""Past policies are whole and unchanged; they, prompts and answers arrive as what was sent, or not at all."""

import dataclasses

import pytest
import torch

from rlhf_engine.errors import ConfigError, EngineError
from rlhf_engine.generators import work
from rlhf_engine.generators.work import Snapshot, VersionStore, digest, put, take
from rlhf_engine.hydra import PackedBatch, Scores, SlotConfig
from rlhf_engine.hydra.gate import AdapterSlot, LoraPair
from rlhf_engine.hydra.supports import Supports, pack_bits
from rlhf_engine.rollout import PromptBatch, Rollout, RolloutStats

POLICY = Snapshot(version=3, tensors={"b": torch.randn(5, 3), "a": torch.randn(7).to(torch.bfloat16)})
PROMPTS = PromptBatch(rows=(7, 8), prompts=((1, 2), (3,)), groups=(0, 1), greedy=(False, True), sample_ids=(10, 11))
FROZEN = Scores(past_logprobs_M=torch.randn(3), rewards_N=torch.randn(2))


def make_slot(seed: int = 0, r: int = 4) -> AdapterSlot:
    generator = torch.Generator().manual_seed(seed)
    pairs = {f"layer.{i}": LoraPair(r, 8, 6, torch.device("cpu"), torch.float32) for i in range(3)}
    for pair in pairs.values():
        pair.reset(generator)
        torch.nn.init.normal_(pair.B, generator=generator)
    return AdapterSlot(f"slot{seed}", SlotConfig(r=r), pairs, trainable=True)


def digest_of(slot: AdapterSlot) -> str:
    return digest(dict(slot.named_parameters()))


def move(slot: AdapterSlot, by: float) -> None:
    with torch.no_grad():
        for parameter in slot.parameters():
            parameter.add_(by)


def test_a_snapshot_keeps_what_the_slot_was():
    slot, other = make_slot(0), make_slot(1)
    before = digest_of(slot)
    snapshot = take(slot, 3)
    move(slot, 1.0)
    assert snapshot.version == 3
    assert digest(snapshot.tensors) == before != digest_of(slot)
    put(snapshot, other)
    assert digest_of(other) == before
    assert snapshot.n_bytes == 4 * 3 * (4 * 8 + 6 * 4)
    assert not any(tensor.requires_grad for tensor in snapshot.tensors.values())
    with pytest.raises(EngineError, match="policy version 1: its tensors are not those of the slot 'slot1'"):
        put(take(make_slot(0), 1), make_slot(1, r=2))
    a, b = torch.tensor([1.0]), torch.tensor([2.0])  # a digest tells names from values
    assert digest({"x": a, "y": b}) == digest({"y": b, "x": a}) != digest({"x": b, "y": a})


def test_the_store_holds_what_it_is_told_to():
    store = VersionStore()
    with pytest.raises(EngineError, match="got none"):
        store.newest()
    for version in (1, 2, 3):
        store.add(take(make_slot(version), version))
    assert store.newest().version == 3
    store.keep([3, 1])
    with pytest.raises(EngineError, match=r"policy version 2: expected one of \[1, 3\]"):
        store.get(2)


def test_policies_arrive_whole_or_not_at_all():
    sent, whole = work.pack_policy(POLICY)
    found = work.unpack_policy(3, sent, whole)
    assert found.version == 3
    assert digest(found.tensors) == digest(POLICY.tensors) == sent
    assert found.tensors["a"].dtype == torch.bfloat16
    other = work.pack_policy(dataclasses.replace(POLICY, tensors={"a": torch.zeros(7)}))[1]
    flipped = [bytearray(whole) for _ in range(3)]
    for data, place in zip(flipped, (0, 20, -1), strict=True):  # length, header, a tensor
        data[place] ^= 1
    for data in (*map(bytes, flipped), whole[:-4], other):
        with pytest.raises(EngineError, match="policy version 3 arrived damaged"):
            work.unpack_policy(3, sent, data)
    with pytest.raises(EngineError, match=r"expected tensors of digest \w+…, got"):
        work.unpack_policy(3, sent, other)


def answers(frozen: Scores | None, supports: Supports | None = None) -> Rollout:
    ids = PROMPTS.sample_ids
    return Rollout(
        batch=PackedBatch.from_lists(PROMPTS.prompts, [[4], [6, 2]], sample_ids=ids, supports=supports),
        logprobs_M=torch.randn(3), versions_M=torch.tensor([1, 1, 1]), finish_reasons=("length", "eos"),
        filtered=False, stats=RolloutStats(tokens=3, decode_seconds=0.5, step="eager"), frozen=frozen,
    )  # fmt: skip


def test_prompts_and_answers():
    assert PromptBatch(**dataclasses.asdict(PROMPTS)) == PROMPTS
    for frozen in (None, FROZEN):
        sent = answers(frozen)
        found = work.unpack_rollout(work.pack_rollout(sent))
        for name in ("cu_seqlens", "prompt_lens", "sample_ids", "supports"):
            assert getattr(found.batch, name) == getattr(sent.batch, name)
        assert torch.equal(found.batch.tokens_T, sent.batch.tokens_T)
        assert torch.equal(found.logprobs_M, sent.logprobs_M)
        assert torch.equal(found.versions_M, sent.versions_M)
        assert (found.finish_reasons, found.stats) == (("length", "eos"), sent.stats)
        assert (found.frozen is None) == (frozen is None)
    assert torch.equal(found.frozen.past_logprobs_M, FROZEN.past_logprobs_M)
    assert found.frozen.ref_logprobs_M is None
    assert torch.equal(found.frozen.rewards_N, FROZEN.rewards_N)


def test_answers_bring_the_words_that_their_tokens_were_drawn_among():
    """A few ids, bits, and nothing for all words."""
    mask = torch.zeros(3, 100, dtype=torch.bool)
    mask[0, [4, 99]] = mask[1, 2:60] = True
    sent = answers(FROZEN, Supports.from_bits(pack_bits(mask), 100))
    assert sent.batch.supports.lengths.tolist() == [2, 4, 0]
    values = work.pack_rollout(sent)
    found = work.unpack_rollout(values).batch.supports
    assert found.vocabulary == 100
    assert torch.equal(found.mask(), sent.batch.supports.mask())
    tensors = bytearray(values["tensors"])
    tensors[-1] ^= 1
    for change in (
        {"vocabulary": 101}, {"tensors": bytes(tensors)}, {"finish_reasons": ("eos", "eos")}, {"has_frozen": False},
        {"digest": None},
    ):  # fmt: skip
        with pytest.raises(EngineError, match=r"answers arrived damaged: expected ones of digest .*…, got \w{12}…"):
            work.unpack_rollout({**values, **change})


def test_other_frozen_weights_and_packages_are_refused():
    ours = {"backbone base": "a", "head reward": "b"}
    work.require_same_parts({"backbone base": "a"}, ours)
    with pytest.raises(ConfigError, match="got a head reward of hash c…, not b…"):
        work.require_same_parts({**ours, "head reward": "c"}, ours)
    with pytest.raises(ConfigError, match=r"async ray: expected torch 1\.0, the learner's, on .* machine, got 2\.0"):
        work.require_same_parts({"package torch": "2.0"}, {"package torch": "1.0", **ours})
