"""LoRA of linears that read one tensor: against each linear by itself, in bits and in float64."""

import dataclasses

import pytest
import torch
from rlhf_kernels import Dropout, Segments, linear, lora_linear, lora_linears
from rlhf_kernels.lora import tables, triton as single, triton_group as ours
from rlhf_kernels.lora.group import OP, Held, Reader
from rlhf_kernels.runtime import registry

N, K = 70, 264
WIDTHS = (96, 48, 48, 32)
EVERYWHERE = Segments(starts=(0, 20, 30), ends=(20, 26, 70), slots=(1, 0, 1))
"""Runs of slot 1, slot 0, off rows, and slot 1 again."""
SECOND = Segments(starts=(0, 30), ends=(20, 70), slots=(0, 0))
"""The same rows where slot 0 has no adapters."""
NOWHERE = Segments(starts=(), ends=(), slots=())


@dataclasses.dataclass
class Case:
    """Queries, keys and values of two slots, of which the first may leave the keys alone, as PEFT's targets do."""

    dtype: torch.dtype = torch.float32
    adapter: torch.dtype = torch.float32
    drop: bool = False
    ranks: tuple[int, int] = (5, 8)
    keys: bool = True
    n_linears: int = 3
    bare: int | None = None
    """A linear without adapters."""
    bias: bool = True
    seeds: int = 0
    """How far apart the linears' seeds are."""
    device: str = "cpu"

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(0)

        def make(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return (torch.randn(*shape, generator=draw, dtype=torch.float64) / shape[-1] ** 0.5).to(self.device, dtype)

        self.x, self.dys = make(1, N, K), [make(1, N, m) for m in WIDTHS[: self.n_linears]]
        self.weights = [make(m, K) for m in WIDTHS[: self.n_linears]]
        self.biases = [make(m) if self.bias and i else None for i, m in enumerate(WIDTHS[: self.n_linears])]
        self.A, self.B, self.segments = [], [], []
        for i, m in enumerate(WIDTHS[: self.n_linears]):
            there = () if i == self.bare else self.ranks if self.keys or i != 1 else self.ranks[1:]
            self.A.append([make(r, K, dtype=self.adapter) for r in there])
            self.B.append([make(m, r, dtype=self.adapter) for r in there])
            self.segments.append((NOWHERE, SECOND, EVERYWHERE)[len(there)])

    def leaves(self) -> list[torch.Tensor]:
        return [self.x, *(w for ws in (*self.A, *self.B) for w in ws)]

    def run(self, backend: str, *, alone: bool = False, wide: bool = False) -> list[torch.Tensor]:
        """The results, then dx, dA and dB of every linear."""
        to = torch.float64 if wide else None
        x, *adapters = (w.detach().to(to or w.dtype).requires_grad_() for w in self.leaves())
        rest = iter(adapters)
        A, B = ([[next(rest) for _ in ws] for ws in side] for side in (self.A, self.B))
        ids = torch.arange(N, device=self.device) * 3 + 5
        readers = []
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            scales, p = [0.5, 2.0][2 - len(A[i]) :], (0.5, 0.25)[2 - len(A[i]) :]
            dropout = Dropout(p=p, seed=11 + i * self.seeds, row_ids=ids, stream=4 + i) if self.drop else None
            frozen = (weight.to(to or weight.dtype), None if bias is None else bias.to(to or bias.dtype))
            readers.append(Reader(*frozen, A[i], B[i], scales, self.segments[i], dropout))
        if alone:
            ys = [lora_linear(x, *r[:-1], dropout=r.dropout, backend=backend) for r in readers]
        else:
            ys = list(lora_linears(x, readers, backend=backend))
        grads = torch.autograd.grad(ys, [x, *adapters], [dy.to(y.dtype) for dy, y in zip(self.dys, ys, strict=True)])
        return [y.detach() for y in ys] + list(grads)

    def names(self) -> list[str]:
        own = [
            [f"{n}{i}{j}" for i, ws in enumerate(side) for j in range(len(ws))]
            for n, side in (("A", self.A), ("B", self.B))
        ]
        return [*(f"y{i}" for i in range(self.n_linears)), "dx", *own[0], *own[1]]


CASES = {
    "plain": Case(),
    "dropout": Case(drop=True),
    "bf16": Case(dtype=torch.bfloat16),
    "bf16 throughout, dropout": Case(dtype=torch.bfloat16, adapter=torch.bfloat16, drop=True),
    "some linears": Case(keys=False, drop=True),
    "some linears, bf16": Case(dtype=torch.bfloat16, keys=False),
    "ranks beyond one read": Case(ranks=(40, 33)),
    "four linears": Case(n_linears=4, ranks=(3, 4)),
    "one without adapters": Case(bare=0, drop=True, dtype=torch.bfloat16),
    "one linear": Case(n_linears=1, drop=True),
    "seeds of their own": Case(n_linears=2, drop=True, seeds=1),
    "gate and up": Case(n_linears=2, dtype=torch.bfloat16, adapter=torch.bfloat16),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Several splits and chunks at these sizes, and tiles that do not depend on a linear's width."""

    def config(n: int, rank: int, x: torch.dtype, weight: torch.dtype, kernel: str) -> dict[str, int]:
        return {"BD": 32, "num_warps": 4}

    monkeypatch.setattr(single, "_config", config)
    for module in (single, tables, ours):
        monkeypatch.setattr(module, "TARGET_PROGRAMS", 30)
    tables.BATCHES.clear()
    yield
    tables.BATCHES.clear()


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


LONG = ("dropout", "some linears, bf16", "bf16", "ranks beyond one read")
"""Cases whose parts others have, too; the interpreter is slow."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=[pytest.mark.long] * (name in LONG)) for name, case in CASES.items()]
)
def test_a_group_has_the_bits_of_each_linear_alone(case, device):
    """Where all have the same rows on; else other splits round differently. dx is added up in another order."""
    case = dataclasses.replace(case, device=device)
    found, alone, exact = case.run("triton"), case.run("triton", alone=True), case.run("reference", wide=True)
    for name, got, want, wide in zip(case.names(), found, alone, exact, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        if case.keys and (name != "dx" or case.n_linears == 1):
            assert torch.equal(got, want), name
        assert error(got, wide) <= 1.05 * error(want, wide) + 1e-7, name


@pytest.mark.parametrize("keys", [True, False])
def test_off_rows_have_the_bits_of_the_base(keys, device):
    case = Case(dtype=torch.bfloat16, keys=keys, device=device)
    for i, y in enumerate(case.run("triton")[:3]):
        off = slice(26, 30) if case.segments[i] is EVERYWHERE else slice(20, 30)
        base = linear(case.x, case.weights[i], case.biases[i])
        assert torch.equal(y[:, off], base[:, off])
        assert not torch.equal(y[:, :20], base[:, :20])


def test_exact_mode_gives_a_group_the_bits_of_each_linear_alone(device):
    case = Case(dtype=torch.bfloat16, device=device)
    with registry.use_exact(), registry.use_backend("triton"):
        found, alone = case.run("triton"), case.run("triton", alone=True)
    for name, got, want in zip(case.names(), found, alone, strict=True):
        assert name == "dx" or torch.equal(got, want), name


def launches(monkeypatch) -> list[str]:
    """Names of the kernels from now on."""
    seen: list[str] = []
    for module in (single, ours):
        for name in vars(module):
            if name.endswith("_kernel") and (module is ours) == name.startswith("_group"):
                kernel = getattr(module, name)

                class Spy:
                    def __init__(self, kernel=kernel, name=name):
                        self.kernel, self.name = kernel, name

                    def __getitem__(self, grid):
                        seen.append(self.name)
                        return self.kernel[grid]

                monkeypatch.setattr(module, name, Spy())
    return seen


def test_launches_of_a_group(device, monkeypatch):
    seen, case = launches(monkeypatch), Case(device=device)
    case.run("triton")
    forward, backward = ["shrink", "expand_y"], ["columns", "fold_rows", "columns", "expand_x", "fold_columns"]
    assert seen == [f"_group_{name}_kernel" for name in (*forward, *backward)]
    seen.clear()
    case.run("triton", alone=True)
    assert len(seen) == 3 * 9


def test_what_needs_no_gradient_gets_none(device, monkeypatch):
    case = Case(device=device)
    exact = dict(zip(case.names(), case.run("reference", wide=True), strict=True))
    seen = launches(monkeypatch)
    A = [[w.clone().requires_grad_() for w in ws] for ws in case.A]
    readers = [
        Reader(w, b, A[i], case.B[i], [0.5, 2.0], case.segments[i])
        for i, (w, b) in enumerate(zip(case.weights, case.biases, strict=True))
    ]
    ys = lora_linears(case.x, readers, backend="triton")
    ((ys[0] * case.dys[0]).sum() + (ys[2] * case.dys[2]).sum()).backward()
    assert [w.grad is None for w in A[1]] == [True, True], "no gradient reaches the second linear"
    for i in (0, 2):
        for j, w in enumerate(A[i]):
            assert error(w.grad, exact[f"A{i}{j}"]) < 1e-5
    assert "_group_expand_x_kernel" not in seen
    weight = case.weights[0].clone().requires_grad_()
    y, *_ = lora_linears(case.x, [readers[0]._replace(weight=weight), *readers[1:]], backend="triton")
    y.sum().backward()
    assert weight.grad is not None, "each linear by itself"


def test_it_is_asked_for_by_name(device, monkeypatch):
    seen, case = launches(monkeypatch), Case(device=device)
    with registry.use_backend("auto"):
        case.run("auto")
        assert not any(name.startswith("_group") for name in seen)
        with registry.use_op_backend(OP, "triton"):
            case.run("auto")
        assert any(name.startswith("_group") for name in seen)
        assert registry.asked(OP) == "auto"
    with pytest.raises(ValueError, match="backend: expected one of"), registry.use_op_backend(OP, "cuda"):
        pass


def test_runs_that_overlap_are_refused(device):
    case = Case(device=device)
    case.segments[1] = Segments(starts=(0, 10), ends=(10, 70), slots=(0, 1))
    with pytest.raises(ValueError, match="segments: expected the same runs in every linear of a group"):
        case.run("triton")


def test_what_is_held_is_for_one_tensor_as_it_was():
    held, x, owner = Held(), torch.zeros(2, 3), object()
    results = {id(owner): torch.ones(2)}
    held.put(x, dict(results))
    assert held.take(x, owner) is results[id(owner)]
    assert held.take(x, owner) is None
    for change in ("tensor", "values", "mode", "clear"):
        held.put(x, dict(results))
        asked = x.clone() if change == "tensor" else x
        if change == "values":
            x.add_(1)
        if change == "clear":
            held.clear()
        with torch.set_grad_enabled(change != "mode"):
            assert held.take(asked, owner) is None, change
        assert held._for[0] is None, "dropped"
