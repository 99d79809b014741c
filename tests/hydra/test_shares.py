"""A trained base in the shares of a group of one process: gradients, steps and files are those of the plain model."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from rlhf_engine.hydra import HydraModel, LmLoss, PackedBatch, load_pretrained, peft_io, save_pretrained
from rlhf_engine.hydra.optimizer import RoleOptimizer
from rlhf_engine.hydra.persist import load_into
from rlhf_engine.hydra.sharding import ShardedBase
from rlhf_engine.training.sft import sft_roles
from tests.conftest import tiny_llama

DEVICES = [pytest.param("cpu", "gloo", id="cpu"), pytest.param("cuda", "nccl", id="cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def group(request, tmp_path) -> Iterator[dist.ProcessGroup]:
    """A group of this process alone, by the backend that the test has been given."""
    dist.init_process_group(request.param, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def make(device: str, dtype: torch.dtype) -> HydraModel:
    return HydraModel.from_pretrained(tiny_llama(dtype=dtype), roles=sft_roles("full", with_reward=True), device=device)


def learn(model: HydraModel) -> None:
    """Gradients of two micro-batches."""
    model.train()
    for words in ([5, 6, 7], [9, 3]):
        batch = PackedBatch.from_lists([[4, 8], [11]], [words, words[::-1]], device=model.device)
        rows = torch.arange(2 * len(words), device=model.device)
        (loss,) = model(batch, (LmLoss(role="sft", denom=3.0, rows_M=rows),))
        loss.backward()


def local(p: torch.Tensor) -> torch.Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("device", "group"), DEVICES, indirect=["group"])
def test_shares_learn_the_bits_of_the_plain_model(device, group, dtype, tmp_path):
    plain, shared = make(device, dtype), make("cpu", dtype)
    base = ShardedBase(shared, group, torch.device(device))
    assert all(isinstance(p, DTensor) for _, p in shared.backbone().base_parameters())
    optimizers = [RoleOptimizer(model, {"sft": 1e-2, "reward": 1e-2}) for model in (plain, shared)]
    for _ in range(2):
        for model in (plain, shared):
            learn(model)
        for (name, p), (_, q) in zip(
            plain.backbone().base_parameters(), shared.backbone().base_parameters(), strict=True
        ):
            assert local(q.grad).dtype == torch.float32
            assert torch.equal(local(q.grad), p.grad), name  # added up in float32
        assert optimizers[0].step() == pytest.approx(optimizers[1].step(), rel=1e-6)
    with base.whole(), optimizers[1].whole():
        save_pretrained(shared, tmp_path / "saved")
        state = optimizers[1].state_tensors()
    found = load_pretrained(tmp_path / "saved", dtype=dtype)
    assert all(torch.equal(p.cpu(), q) for p, q in zip(plain.parameters(), found.parameters(), strict=True))
    expected = optimizers[0].state_tensors()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in expected.items())
    other = make("cpu", dtype)
    ShardedBase(other, group, torch.device(device))
    record = tmp_path / "saved" / peft_io.ENGINE_FILE
    # where no slot has it, it says nothing: an option of before
    record.write_text(record.read_text().replace('"adapter_dtype": "float32"', '"adapter_dtype": "bfloat16"'))
    load_into(other, tmp_path / "saved")
    optimizer = RoleOptimizer(other, {"sft": 1e-2, "reward": 1e-2})
    optimizer.load_state_tensors(state)
    for model in (shared, other):
        learn(model)
    assert optimizer.step() == optimizers[1].step()
    assert all(torch.equal(local(p), local(q)) for p, q in zip(shared.parameters(), other.parameters(), strict=True))
