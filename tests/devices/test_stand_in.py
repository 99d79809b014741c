"""The stand-in device refuses what CUDA refuses, allows what CUDA allows, and counts what makes the host wait."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.devices.stand_in import DEVICE, DeviceTensor, MixedDevicesError, counted, installed


@pytest.fixture(scope="module", autouse=True)
def _device():
    with installed():
        yield


def there(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


X, I, MASK = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2]), torch.tensor([True, False, True])
ONE = torch.tensor(1.0)
REFUSED = {
    "a sum": lambda: there(1, 2, 3) + X,
    "a sum in place": lambda: there(1, 2, 3).add_(X),
    "a sum into the host's memory": lambda: X.clone().add_(there(1, 2, 3)),
    "a number of the host that is written": lambda: ONE.clone().add_(there(1)[0]),
    "a product": lambda: there(1, 2, 3)[None] @ X[:, None],
    "a bias": lambda: F.linear(there(1, 2, 3), there(1, 2, 3)[None], torch.ones(1)),
    "index_select": lambda: there(1, 2, 3).index_select(0, I),
    "gather": lambda: there(1, 2, 3).gather(0, I),
    "scatter": lambda: there(1, 2, 3).scatter(0, I, 1.0),
    "an embedding": lambda: F.embedding(I, there(1, 2, 3)[:, None]),
    "index_copy": lambda: there(1, 2, 3).index_copy(0, I, there(7, 8)),
    "an index of the device into the host's memory": lambda: X[there(0, dtype=torch.int64)],
    "values of the host by an index": lambda: there(1, 2, 3).index_put((I,), torch.ones(2)),
    "a mask": lambda: there(1, 2, 3).masked_fill(MASK, 0.0),
    "a condition": lambda: torch.where(MASK, there(1, 2, 3), 0.0),
    "cat": lambda: torch.cat([there(1), X]),
    "stack with a number": lambda: torch.stack([there(1)[0], ONE]),
    "repeat_interleave": lambda: torch.arange(3).repeat_interleave(there(1, 2, 1, dtype=torch.int64), output_size=4),
    "isin": lambda: torch.isin(there(0, 1, dtype=torch.int64), I),
    "a generator": lambda: torch.rand(2, device=DEVICE, generator=torch.Generator()),
}


def test_tensors_of_two_devices_are_refused():
    for name, call in REFUSED.items():
        with pytest.raises(MixedDevicesError, match=r"expected .*device|expected a generator"):
            pytest.fail(f"{name} gave {call()}")


def test_what_cuda_allows_has_the_numbers_of_the_cpu():
    x = there(1, 2, 3)
    here, over_there = (torch.Generator(device).manual_seed(3) for device in ("cpu", DEVICE))
    allowed = {
        "a number of the host": (x + ONE, X + ONE),
        "a number of the host first": (ONE / x, ONE / X),
        "a condition with a number": (torch.where(MASK.to(DEVICE), x, ONE), torch.where(MASK, X, ONE)),
        "a value of the host in a mask": (x.masked_fill(MASK.to(DEVICE), ONE), X.masked_fill(MASK, ONE)),
        "an index of the host": (x[I], X[I]),
        "a mask of the host as an index": (x[MASK], X[MASK]),
        "a number of the host by an index": (x.index_put((I,), ONE), X.index_put((I,), ONE)),
        "a copy into the host's memory": (torch.zeros(3).copy_(x), X),
        "a copy to the device": (torch.zeros(3, device=DEVICE).copy_(X), X),
        "a draw": (torch.rand(2, device=DEVICE, generator=over_there), torch.rand(2, generator=here)),
        "views": (x.clone()[1:].add_(1.0), X[1:] + 1.0),
        "a copy of a copy": (copy.deepcopy(x), X),
    }
    for name, (found, expected) in allowed.items():
        assert found.tolist() == expected.tolist(), name
    assert isinstance(x[I], DeviceTensor)
    with pytest.raises((TypeError, RuntimeError), match="numpy"):
        x.numpy()


def test_gradients_and_optimizers_have_the_numbers_of_the_cpu():
    torch.manual_seed(0)
    here = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
    over_there = copy.deepcopy(here).to(DEVICE)
    for model, x in ((here, X), (over_there, X.to(DEVICE))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model.zero_grad()
            model(x[None]).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    for found, expected in zip(over_there.parameters(), here.parameters(), strict=True):
        assert isinstance(found, torch.nn.Parameter)
        assert found.device == DEVICE
        assert torch.equal(found.cpu(), expected)


def test_reads_and_uploads_are_counted():
    x, index, mask = there(1, 2, 3), I.to(DEVICE), MASK.to(DEVICE)
    kinds = [
        (lambda: x.cpu(), 1, 0),
        (lambda: x.tolist(), 1, 0),
        (lambda: x[0].item(), 1, 0),
        (lambda: float(x[0]), 1, 0),
        (lambda: bool(mask.any()), 1, 0),
        (lambda: mask.nonzero(), 1, 0),
        (lambda: x[mask], 1, 0),
        (lambda: torch.equal(x, x), 1, 0),
        (lambda: index.repeat_interleave(index), 1, 0),
        (lambda: torch.zeros(3).copy_(x), 1, 0),
        (lambda: index.repeat_interleave(index, output_size=2), 0, 0),
        (lambda: x[index], 0, 0),
        (lambda: x[I], 0, 1),
        (lambda: X.to(DEVICE), 0, 1),
        (lambda: torch.tensor([1, 2], device=DEVICE), 0, 1),
        (lambda: x.bfloat16(), 0, 0),
        (lambda: torch.arange(5, device=DEVICE), 0, 0),
    ]
    for place, (call, reads, uploads) in enumerate(kinds):
        with counted() as traffic:
            call()
        assert (traffic.reads.total(), traffic.uploads.total()) == (reads, uploads), (place, traffic.reads)
