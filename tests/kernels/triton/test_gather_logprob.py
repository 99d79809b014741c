"""The Triton `gather_logprob`: tiers against fp64, layouts, both backwards, hostile rows and memory."""

import pytest
import torch
from rlhf_kernels.gather_logprob import gather_logprob
from rlhf_kernels.gather_logprob import triton as backend
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier2, tier3
from rlhf_kernels.runtime.triton_support import INTERPRETED
from rlhf_kernels.vocab.logits import OUTPUTS

from tests.kernels.cuda_graph import repeated_and_captured
from tests.kernels.dense import DIFFERENTIABLE
from tests.kernels.test_gather_logprob import dense

NAN = float("nan")
# numpy speaks of log 0 and −inf − (−inf) in rows that the interpreter computes and nobody reads
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=[1, 10**6], ids=["one share", "many shares"])
def shares(request, monkeypatch):
    """Few or many programs per row, each of several blocks where there is more than one share to a row."""
    monkeypatch.setattr(backend, "PROGRAMS", request.param)
    return request.param


def make(n, v, device, *, scale=3.0, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(n, v, generator=g)).to(device, dtype).requires_grad_()
    return logits, torch.randint(0, v, (n,), generator=g).to(device)


def run(function, logits, target, cotangent, **options):
    """Every output and the gradient of one loss of all of them."""
    out = function(logits, target, **options)
    loss = sum((cotangent[name].to(out[name].dtype) * out[name]).sum() for name in cotangent)
    return out, torch.autograd.grad(loss, logits)[0]


def ours(logits, target, **options):
    return gather_logprob(logits, target, outputs=OUTPUTS, backend="triton", **options)._asdict()


def cotangents(shape, device):
    return {name: torch.randn(shape, device=device) for name in DIFFERENTIABLE}


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize(
    ("n", "vocab"), [(1, 1), (2, 1), (15, 17), (127, 517), (129, 130), (1, 4131), (2, 4131), (15, 4131)]
)
def test_tier1(device, shares, n, vocab, scale):
    logits, target = make(n, vocab, device, scale=scale)
    target[-1] = vocab - 1
    if n > 2:
        target[1] = -100
    cotangent = cotangents(n, device)
    temperature = torch.linspace(0.5, 1.5, n, device=device)
    out, grad = run(ours, logits, target, cotangent, temperature=temperature)
    exact, g64 = run(
        dense, logits.detach().double().requires_grad_(), target, cotangent, temperature=temperature.double()
    )
    plain, g32 = run(dense, logits, target, cotangent, temperature=temperature)
    for name in OUTPUTS:
        assert_ok(tier1(out[name], exact[name], plain[name]), name)
    if vocab == 1:  # exactly 0 but for mean_logit and lse, of which tiny rounding may remain
        torch.testing.assert_close(grad, g64.float(), rtol=1e-6, atol=1e-5)
    else:
        assert_ok(tier1(grad, g64, g32), "d_logits")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, shares, dtype):
    logits, target = make(33, 600, device, dtype=dtype)
    cotangent = {"logprob": torch.randn(33, device=device)}
    out, grad = run(ours, logits, target, cotangent, temperature=0.7)
    exact, g64 = run(dense, logits.detach().double().requires_grad_(), target, cotangent, temperature=0.7)
    plain, _ = run(dense, logits.detach().float().requires_grad_(), target, cotangent, temperature=0.7)
    _, g16 = run(dense, logits, target, cotangent, temperature=0.7)
    for name in OUTPUTS:
        assert_ok(tier1(out[name], exact[name], plain[name]), name)
    assert_ok(tier3(grad, g64, g16), "d_logits")
    if not INTERPRETED or dtype == torch.float16:  # the interpreter truncates when it makes bf16
        normal = g64.abs() > 2**-14  # tier 2 does not know fp16's subnormal numbers
        assert_ok(tier2(torch.where(normal, grad, 0), torch.where(normal, g64, 0)), "d_logits")


def layouts(x):
    """The same [6, V] values as: packed rows, a wider row stride, a transpose, every second column, 3-d rows."""
    n, v = x.shape
    wide = torch.full((n, v + 3), NAN, dtype=x.dtype, device=x.device)
    wide[:, :v] = x
    spread = torch.full((n, 2 * v), NAN, dtype=x.dtype, device=x.device)
    spread[:, ::2] = x
    cube = torch.full((3, 4, v + 5), NAN, dtype=x.dtype, device=x.device)
    cube[:, 1:3, :v] = x.view(3, 2, v)
    return {
        "packed": x.clone(),
        "row_stride": wide[:, :v],
        "transposed": x.T.contiguous().T,
        "column_stride": spread[:, ::2],
        "cube": cube[:, 1:3, :v],
    }


@pytest.mark.parametrize("layout", ["packed", "row_stride", "transposed", "column_stride", "cube"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("vocab", [33, 160])
def test_layouts_and_both_backwards(device, layout, inplace, vocab):
    base = 3 * torch.randn(6, vocab, device=device)
    target = torch.tensor([0, vocab - 1, 5, -100, 7, 7], device=device)
    strided = layouts(base)[layout]
    shape = strided.shape[:-1]
    cotangent = cotangents(shape, device)
    storage = strided.untyped_storage().nbytes() // 4
    flat = torch.as_strided(strided, (storage,), (1,), 0)
    leaf = flat.clone().requires_grad_()
    logits = torch.as_strided(leaf * 1.0, strided.shape, strided.stride(), strided.storage_offset())
    before = torch.as_strided(logits.detach(), (storage,), (1,), 0).clone()
    out = ours(logits, target.view(shape), temperature=0.7, inplace_backward=inplace)
    exact, g64 = run(
        dense, base.double().requires_grad_(), target, {k: x.reshape(-1) for k, x in cotangent.items()}, temperature=0.7
    )
    plain, g32 = run(
        dense, base.clone().requires_grad_(), target, {k: x.reshape(-1) for k, x in cotangent.items()}, temperature=0.7
    )
    loss = sum((cotangent[name] * out[name]).sum() for name in DIFFERENTIABLE)
    got = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    for name in OUTPUTS:
        assert_ok(tier1(out[name].reshape(-1), exact[name], plain[name]), name)
    assert_ok(tier1(got.reshape(6, vocab), g64, g32), "d_logits")
    after = torch.as_strided(logits.detach(), (storage,), (1,), 0)
    if not inplace:
        assert torch.equal(after.nan_to_num(-7.0), before.nan_to_num(-7.0))
        return
    assert got.data_ptr() == logits.data_ptr()
    unused = torch.ones(storage, dtype=torch.bool, device=device)
    torch.as_strided(unused, strided.shape, strided.stride(), strided.storage_offset()).fill_(False)
    assert torch.equal(after[unused].nan_to_num(-7.0), before[unused].nan_to_num(-7.0))  # nothing beside the logits


@pytest.mark.parametrize(
    "rows", ["peaked", "uniform", "all_minus_200", "all_equal_plus", "rising", "first_block_masked"]
)
def test_hostile_rows(device, shares, rows):
    logits, target = make(15, 300, device)
    with torch.no_grad():
        if rows == "peaked":
            logits *= 30
        elif rows == "rising":
            logits[:] = torch.linspace(-80, 80, 300, device=device)
        elif rows == "first_block_masked":
            logits[:, :200] = -torch.inf
            target = 200 + target % 100
        else:
            logits[:] = {"uniform": 0.0, "all_minus_200": -200.0, "all_equal_plus": 500.0}[rows]
    names = ("logprob", "lse") if rows == "first_block_masked" else DIFFERENTIABLE  # torch's 0 · −inf gives NaN
    cotangent = {name: x for name, x in cotangents(15, device).items() if name in names}
    out, grad = run(ours, logits, target, cotangent)
    exact, g64 = run(dense, logits.detach().double().requires_grad_(), target, cotangent)
    plain, g32 = run(dense, logits, target, cotangent)
    for name in cotangent:
        assert_ok(tier1(out[name], exact[name], plain[name]), name)
    # p is e^(z − lse) with an lse that was rounded to fp32, which matters at lse = 500
    rounding = 2**-24 * out["lse"].abs().max() * max(x.abs().max() for x in cotangent.values()) * 8
    assert (grad.double() - g64).abs().max() <= 4 * (g32.double() - g64).abs().max() + 1e-6 * g64.abs().max() + rounding


def test_masked_columns_have_a_finite_entropy(device, shares):
    logits, target = make(4, 300, device)
    with torch.no_grad():
        logits[:, 100:] = -torch.inf
    target %= 100
    wanted = ("logprob", "entropy", "log_sum_sq_prob", "is_top1")
    out = gather_logprob(logits, target, outputs=wanted, backend="triton")
    short = gather_logprob(logits[:, :100], target, outputs=wanted, backend="reference")
    for name in wanted:
        torch.testing.assert_close(getattr(out, name), getattr(short, name))
    grad = torch.autograd.grad((out.entropy + out.log_sum_sq_prob).sum(), logits)[0]
    torch.testing.assert_close(grad, torch.autograd.grad((short.entropy + short.log_sum_sq_prob).sum(), logits)[0])


def test_first_maximum_wins_and_a_row_of_minus_infinity(device, shares):
    logits = torch.zeros(4, 300, device=device)
    logits[:, [70, 140, 299]] = 2.0
    out = gather_logprob(logits, torch.tensor([0, 70, 140, 299], device=device), outputs=("is_top1",), backend="triton")
    assert out.is_top1.tolist() == [0.0, 1.0, 0.0, 0.0]
    logits.fill_(-torch.inf)
    zero = torch.zeros(4, dtype=torch.int64, device=device)
    got = gather_logprob(logits, zero, outputs=OUTPUTS, backend="triton")
    expected = gather_logprob(logits, zero, outputs=OUTPUTS, backend="reference")
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_ignored_rows_may_hold_nan(device, shares):
    logits, target = make(6, 300, device)
    target[1], target[4] = -100, -100
    temperature = torch.ones(6, device=device)
    cotangent = cotangents(6, device)
    clean, clean_grad = run(ours, logits, target, cotangent, temperature=temperature)
    with torch.no_grad():
        logits[1], logits[4] = NAN, torch.inf
    temperature[1] = NAN
    cotangent["logprob"][4] = NAN
    out, grad = run(ours, logits, target, cotangent, temperature=temperature)
    assert all(torch.equal(out[name], clean[name]) for name in OUTPUTS)
    assert torch.equal(grad, clean_grad)
    assert (grad[[1, 4]] == 0).all()


def test_exact_mode_gives_a_row_its_bits_in_any_company(device, monkeypatch):
    monkeypatch.setattr(backend, "PROGRAMS", 40)  # so that the number of rows would decide at once
    logits = 3 * torch.randn(30, 3000, device=device)
    target = torch.arange(30, device=device)
    with registry.use_exact():
        whole = gather_logprob(logits, target, outputs=("logprob", "entropy"), backend="triton")
        for rows in ([7], [3, 29], list(range(12))):
            alone = gather_logprob(logits[rows], target[rows], backend="triton")
            assert torch.equal(alone.logprob, whole.logprob[rows])


def test_all_rows_ignored_empty_batches_and_float64(device, shares):
    logits, target = make(3, 50, device)
    out, grad = run(ours, logits, torch.full_like(target, -100), cotangents(3, device))
    assert all((x == 0).all() for x in (*out.values(), grad))
    logits, target = make(0, 50, device)
    out, grad = run(ours, logits, target, cotangents(0, device))
    assert grad.shape == (0, 50)
    with pytest.raises(ValueError, match="float64"):
        gather_logprob(logits.double(), target, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "vocab"), [(1000, 32001), (64, 50264), (2, 129920), (16384, 151936)])
@pytest.mark.parametrize("inplace", [False, True])
def test_big_bits_and_capture_in_bf16(n, vocab, inplace):
    base = torch.randn(n, vocab, device="cuda", dtype=torch.bfloat16)  # the last has more than 2³¹ elements
    target = torch.randint(0, vocab, (n,), device="cuda")
    target[0] = vocab - 1
    cotangent = torch.randn(n, device="cuda")
    leaf = base.requires_grad_()

    def step():
        logits = leaf * 1.0
        out = gather_logprob(logits, target, outputs=("logprob", "entropy"), inplace_backward=inplace, backend="triton")
        return (
            out.logprob,
            out.entropy,
            torch.autograd.grad((out.logprob * cotangent).sum() + out.entropy.sum(), logits)[0],
        )

    got = [x.detach().clone() for x in step()]
    rows = torch.tensor([0, n // 2, n - 1], device="cuda")
    few = leaf.detach()[rows]
    out = dense(few.double().requires_grad_(), target[rows])
    plain = dense(few.float(), target[rows])
    for i, name in enumerate(("logprob", "entropy")):
        assert_ok(tier1(got[i][rows], out[name], plain[name]), name)

    def gradient(dtype):
        x = few.to(dtype).requires_grad_()
        out = dense(x, target[rows])
        return torch.autograd.grad((out["logprob"] * cotangent[rows].to(dtype)).sum() + out["entropy"].sum(), x)[0]

    assert_ok(tier3(got[2][rows], gradient(torch.float64), gradient(torch.bfloat16)), "d_logits")
    repeated_and_captured(step, got)
