"""Past policies: whole, unchanged, and only those that are held."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from rlhf_engine.errors import EngineError
from rlhf_engine.generators.work import VersionStore, digest, put, take
from rlhf_engine.hydra import SlotConfig
from rlhf_engine.hydra.adapters import AdapterSlot, LoraPair


def make_slot(seed: int = 0, r: int = 4) -> AdapterSlot:
    generator = torch.Generator().manual_seed(seed)
    pairs = {f"layer.{i}": LoraPair(r, 8, 6, torch.device("cpu"), torch.float32) for i in range(3)}
    for pair in pairs.values():
        pair.reset(generator)
        torch.nn.init.normal_(pair.B, generator=generator)
    return AdapterSlot(f"slot{seed}", SlotConfig(r=r), pairs, trainable=True)


def digest_of(slot: AdapterSlot) -> str:
    return digest(dict(slot.named_parameters()))


def test_a_snapshot_keeps_what_the_slot_was():
    slot, other = make_slot(0), make_slot(1)
    before = digest_of(slot)
    snapshot = take(slot, 3)
    with torch.no_grad():
        for parameter in slot.parameters():
            parameter.add_(1.0)
    assert snapshot.version == 3
    assert digest(snapshot.tensors) == before != digest_of(slot)
    put(snapshot, other)
    assert digest_of(other) == before
    assert snapshot.n_bytes == 4 * 3 * (4 * 8 + 6 * 4)
    assert not any(tensor.requires_grad for tensor in snapshot.tensors.values())


def test_digests_tell_names_from_values():
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert digest({"x": a, "y": b}) == digest({"y": b, "x": a}) != digest({"x": b, "y": a})


def test_a_policy_of_another_shape_is_refused():
    with pytest.raises(EngineError, match="policy version 1: its tensors are not those of the slot 'slot1'"):
        put(take(make_slot(0), 1), make_slot(1, r=2))


def test_the_store_holds_what_it_is_told_to():
    store = VersionStore()
    with pytest.raises(EngineError, match="got none"):
        store.newest()
    for version in (1, 2, 3):
        store.add(take(make_slot(version), version))
    assert sorted(store._held) == [1, 2, 3]
    assert store.newest().version == 3
    store.keep([3, 1])
    with pytest.raises(EngineError, match=r"policy version 2: expected one of \[1, 3\]"):
        store.get(2)


def test_no_reader_sees_half_a_policy(monkeypatch):
    """While one thread publishes, slowly, another loads what is published and compares bytes with the version's."""
    slot, reader_slot = make_slot(0), make_slot(1)
    store, wanted, torn, seen = VersionStore(), {}, [], set()
    done = threading.Event()
    clone = torch.Tensor.clone

    def slow(tensor, *args, **kwargs):
        time.sleep(0.002)  # in the middle of a policy, six times
        return clone(tensor, *args, **kwargs)

    wanted[0] = digest_of(slot)
    store.add(take(slot, 0))
    monkeypatch.setattr(torch.Tensor, "clone", slow)

    def read() -> None:
        while not done.is_set():
            newest = store.newest()
            put(newest, reader_slot)
            seen.add(newest.version)
            if digest_of(reader_slot) != wanted[newest.version]:
                torn.append(newest.version)

    thread = threading.Thread(target=read)
    thread.start()
    for version in range(1, 30):
        with torch.no_grad():
            for parameter in slot.parameters():
                parameter.add_(0.01)
        wanted[version] = digest_of(slot)
        store.add(take(slot, version))
    done.set()
    thread.join()
    assert not torn
    assert len(seen) > 10
