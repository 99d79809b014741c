"""The Triton `linear_logprob` on all its paths: tiers against fp64, hostile rows and memory, work left out, bits."""

import itertools

import pytest
import torch
from rlhf_kernels.linear_logprob import HeadLora, linear_logprob
from rlhf_kernels.runtime.registry import BackendUnavailableError
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier3
from rlhf_kernels.runtime.triton_support import INTERPRETED
from rlhf_kernels.vocab import cost
from rlhf_kernels.vocab import triton_sweep as sweep
from rlhf_kernels.vocab.logits import OUTPUTS

from tests.kernels.checks import same_bits
from tests.kernels.cuda_graph import detached, repeated_and_captured
from tests.kernels.dense import DIFFERENTIABLE, dense, double

OPS = torch.ops.rlhf_kernels

OPTIONS = {"temperature": 0.7, "softcap": 3.0, "logit_scale": 1.3}
INPUTS = ("hidden", "weight", "bias", "A", "B")
NAN = float("nan")
# numpy speaks of log 0 and −inf − (−inf) in rows that the interpreter computes and nobody reads
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def force(monkeypatch, path):
    """Make every call take one path: fused; tiled, one tile or some; small tiles with several row chunks."""
    rows = 2**20 if path == "fused" else 0
    monkeypatch.setattr(sweep, "FUSED_ROWS", dict.fromkeys(sweep.FUSED_ROWS, rows))
    if path == "small tiles":
        sizes = {
            "TILE_ROWS": 64,
            "TILE_COLUMNS": 128,
            "MIN_TILE_ROWS": 64,
            "MIN_TILE_COLUMNS": 128,
            "SMALL_TILE": 2**13,
        }
        for name, size in sizes.items():
            monkeypatch.setattr(cost, name, size)
    if path == "fused":
        monkeypatch.setattr(sweep, "FUSED_PROGRAMS", 3)


@pytest.fixture(params=["fused", "tiled", "small tiles"])
def path(request, monkeypatch):
    force(monkeypatch, request.param)
    return request.param


def make(n, h, v, device, *, scale=1.0, dtype=torch.float32, grad=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(n, h, generator=g)).to(device, dtype).requires_grad_(grad)
    weight = torch.randn(v, h, generator=g).to(device, dtype).requires_grad_(grad)
    return hidden, weight, torch.randint(0, v, (n,), generator=g).to(device)


def make_all(n, h, v, device, **options):
    """hidden, weight, bias, A, B and target, all of the head's parts."""
    hidden, weight, target = make(n, h, v, device, **options)
    g = torch.Generator().manual_seed(1)
    bias, A, B = (
        (s * torch.randn(*shape, generator=g)).to(device, hidden.dtype).requires_grad_(hidden.requires_grad)
        for s, shape in ((1.0, (v,)), (1.0, (5, h)), (0.1, (v, 5)))
    )
    return (hidden, weight, bias, A, B), target


def values_and_gradients(function, tensors, target, cotangent, **options):
    """Every output and, of one loss of all of them, the gradients to every tensor."""
    hidden, weight, bias, A, B = tensors
    out = function(hidden, weight, target, bias=bias, lora=HeadLora(A, B, 0.5), **options)
    loss = sum((cotangent[name].to(out[name].dtype) * out[name]).sum() for name in cotangent)
    return out, torch.autograd.grad(loss, tensors)


def ours(*args, **options):
    return linear_logprob(*args, outputs=OUTPUTS, backend="triton", **options)._asdict()


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("per_row", [False, True])
def test_tier1_every_output_input_and_option(device, path, scale, per_row):
    n, v = 70, 517
    tensors, target = make_all(n, 37, v, device, scale=scale)
    target[5], target[6] = -100, v - 1
    options = OPTIONS | ({"temperature": torch.rand(n, device=device) + 0.5} if per_row else {})
    cotangent = {name: torch.randn(n, device=device) for name in DIFFERENTIABLE}
    out, grads = values_and_gradients(ours, tensors, target, cotangent, **options)
    exact, grads64 = values_and_gradients(dense, double(*tensors), target, cotangent, **options)
    plain, grads32 = values_and_gradients(dense, tensors, target, cotangent, **options)
    for name in OUTPUTS:
        assert out[name].dtype == torch.float32
        assert_ok(tier1(out[name], exact[name], plain[name]), name)
    for name, g, g64, g32 in zip(INPUTS, grads, grads64, grads32, strict=True):
        assert_ok(tier1(g, g64, g32), f"d_{name}")


@pytest.mark.parametrize(
    ("n", "vocab"), [(1, 1), (129, 1), (2, 17), (127, 17), (15, 517), (129, 517), (1, 4131), (15, 4131)]
)
def test_ragged_sizes(device, path, n, vocab):
    hidden, weight, target = make(n, 20, vocab, device)
    target[-1] = vocab - 1  # the last, partial tile
    frozen = weight.detach()
    cotangent = torch.randn(n, device=device)

    def run(function, hidden, weight, **options):
        out = function(hidden, weight, target, **options)
        out = out if isinstance(out, dict) else out._asdict()
        loss = (out["logprob"] * cotangent.to(out["logprob"].dtype)).sum() + out["lse"].sum()
        return [out[name] for name in ("logprob", "entropy", "lse")] + [*torch.autograd.grad(loss, hidden)]

    wanted = {"outputs": ("logprob", "entropy", "lse"), "detach": ("entropy",), "backend": "triton"}
    got = run(linear_logprob, hidden, frozen, **wanted)  # the gradient is made in the forward
    exact, plain = run(dense, *double(hidden, frozen)), run(dense, hidden, frozen)
    for name, x, x64, x32 in zip(("logprob", "entropy", "lse", "d_hidden"), got, exact, plain, strict=True):
        assert_ok(tier1(x, x64, x32), name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ahead", [False, True])
def test_tier3_half_precision(device, path, dtype, ahead):
    n, v = 65, 600
    (hidden, weight, *_), target = make_all(n, 48, v, device, dtype=dtype)
    weight = weight.detach().requires_grad_(not ahead)
    inputs = (hidden,) if ahead else (hidden, weight)
    out = linear_logprob(hidden, weight, target, softcap=20.0, backend="triton").logprob
    h64, w64 = double(hidden, weight)
    exact = dense(h64, w64, target, softcap=20.0)["logprob"]
    assert_ok(tier1(out, exact, dense(hidden.float(), weight.float(), target, softcap=20.0)["logprob"]), "logprob")
    eager = dense(hidden, weight, target, softcap=20.0)["logprob"]
    cotangent = torch.randn(n, device=device)
    got = torch.autograd.grad(out, inputs, cotangent)
    g64 = torch.autograd.grad(exact, (h64,) if ahead else (h64, w64), cotangent.double())
    g16 = torch.autograd.grad(eager, inputs, cotangent.to(dtype))
    for name, g, true, theirs in zip(INPUTS, got, g64, g16, strict=False):
        assert g.dtype == dtype
        assert_ok(tier3(g, true, theirs), f"d_{name}")


def nearly_certain(n, h, v, device, dtype, temperature):
    """hidden, weight and the arg-max as target, of rows in which it has a probability from 0.999 to 0.9999."""
    weight = make(n, h, v, device, grad=False)[1].to(dtype)
    rows = weight[torch.arange(n, device=device) % v].double() + 0.1 * torch.randn(n, h, device=device).double()
    z = rows @ weight.double().T / temperature
    low, high = torch.zeros(n, 1, device=device, dtype=torch.float64), torch.ones(n, 1, device=device).double()
    certainty = torch.linspace(0.9992, 0.9999, n, device=device)
    for _ in range(50):
        middle = (low + high) / 2
        enough = (torch.softmax(middle * z, -1).amax(-1) > certainty)[:, None]
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    hidden = (high * rows).to(dtype)
    p, target = torch.softmax(hidden.double() @ weight.double().T / temperature, -1).max(-1)
    assert p.min() > 0.999
    return hidden.requires_grad_(), weight, target


def eager_gradient(hidden, weight, target, temperature, on_logprob, on_lse=0.0, on_kl=0.0, hidden_r=None):
    """d_hidden by its equation: products in the inputs' dtype, softmax between them in fp32 (fp64 if they are)."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, r = (
        torch.log_softmax((h @ weight.T).to(wide) / temperature, -1)
        for h in (hidden, hidden if hidden_r is None else hidden_r)
    )
    p, apart = a.exp(), a - r
    is_target = torch.nn.functional.one_hot(target, weight.shape[0])
    g = on_logprob * (is_target - p) + on_lse * p + on_kl * p * (apart - (p * apart).sum(-1, keepdim=True))
    return (g / temperature).to(weight.dtype) @ weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tier3_where_the_target_is_nearly_certain(device, path, dtype):
    """Its own column, rounded in a tile of probabilities, would be an error far above the gradient's size."""
    n = 65
    hidden, weight, target = nearly_certain(n, 48, 600, device, dtype, 0.7)
    cotangents = torch.randn(2, n, 1, device=device)
    # With the gradient of lse d_hidden is as large as W and its last rounding decides; the interpreter truncates bf16
    for count in (1,) if INTERPRETED and dtype == torch.bfloat16 else (1, 2):
        out = linear_logprob(hidden, weight, target, temperature=0.7, outputs=("logprob", "lse"), backend="triton")
        loss = sum((c[:, 0] * x).sum() for c, x in zip(cotangents[:count], (out.logprob, out.lse), strict=False))
        got = torch.autograd.grad(loss, hidden)[0]
        on = (cotangents[0], cotangents[1] * (count - 1))
        exact = eager_gradient(*double(hidden, weight), target, 0.7, *(c.double() for c in on))
        assert_ok(tier3(got, exact, eager_gradient(hidden, weight, target, 0.7, *on)), f"d_hidden of {count}")


def test_mixed_dtypes(device, path):
    hidden, weight, target = make(9, 20, 70, device, dtype=torch.float16)
    weight = weight.detach().float().requires_grad_()
    out = linear_logprob(hidden, weight, target, backend="triton").logprob
    assert_ok(
        tier1(out, dense(*double(hidden, weight), target)["logprob"], dense(hidden.float(), weight, target)["logprob"])
    )
    grads = torch.autograd.grad(out.sum(), (hidden, weight))
    assert [g.dtype for g in grads] == [torch.float16, torch.float32]


def test_float64_is_refused(device):
    hidden, weight, target = make(2, 20, 7, device)
    with pytest.raises(BackendUnavailableError, match=r"not in torch\.float64"):
        linear_logprob(hidden, weight.double(), target, backend="triton")


@pytest.mark.parametrize("rows", ["peaked", "uniform", "all_minus_200", "all_equal_plus", "rising"])
def test_hostile_rows(device, path, rows):
    hidden, weight, target = make(15, 20, 300, device)
    with torch.no_grad():
        if rows == "peaked":
            hidden *= 30
        elif rows == "rising":  # every tile moves the maximum
            hidden.zero_()
            hidden[:, 0] = 1.0
            weight[:, 0] = torch.linspace(-60, 100, 300)
        else:
            hidden.zero_()
            hidden[:, 0] = {"uniform": 0.0, "all_minus_200": -200.0, "all_equal_plus": 500.0}[rows]
            weight[:, 0] = 1.0
    for ahead in (False, True):  # the gradient made again, and made in the forward
        frozen = weight.detach().requires_grad_(not ahead)
        out = linear_logprob(hidden, frozen, target, outputs=OUTPUTS, detach=DIFFERENTIABLE[1:], backend="triton")
        exact64 = double(hidden, frozen)
        exact, plain = dense(*exact64, target), dense(hidden, frozen, target)
        for name in OUTPUTS:
            assert_ok(tier1(getattr(out, name), exact[name], plain[name]), name)
        g64 = torch.autograd.grad(exact["logprob"].sum(), exact64[0])[0]
        g32 = torch.autograd.grad(plain["logprob"].sum(), hidden)[0]
        # p cancels against 1[v = t] where a row is peaked: judged on the scale of a row of W. Made again, p is
        # e^(z − lse) with a z and an lse that were rounded to fp32, which matters at lse = 500
        rounding = 0.0 if ahead else 2 * 2**-24 * out.lse.abs().max().item()
        got = torch.autograd.grad(out.logprob.sum(), hidden)[0]
        error, other = (got.double() - g64).abs().max().item(), (g32.double() - g64).abs().max().item()
        assert error <= 4 * other + (1e-6 + rounding) * weight.abs().max().item()


def test_first_maximum_wins_across_tiles(device, path):
    weight = torch.zeros(300, 16, device=device)
    weight[[70, 140, 299], 0] = 2.0
    target = torch.tensor([0, 70, 140, 299], device=device)
    hidden = torch.ones(4, 16, device=device)
    out = linear_logprob(hidden, weight, target, outputs=("is_top1",), backend="triton")
    assert out.is_top1.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_masked_vocabulary_columns(device, path):
    hidden, weight, target = make(6, 20, 300, device)
    bias = torch.zeros(300, device=device)
    bias[:130], bias[290:] = -torch.inf, -torch.inf  # the first tile has no finite column
    target = 130 + target % 160
    for frozen in (weight, weight.detach()):
        out = linear_logprob(
            hidden, frozen, target, bias=bias, outputs=("logprob", "entropy"), detach=("entropy",), backend="triton"
        )
        short = dense(*double(hidden, weight[130:290]), target - 130)
        plain = dense(hidden, weight[130:290], target - 130)
        for name in ("logprob", "entropy"):
            assert_ok(tier1(getattr(out, name), short[name], plain[name]), name)
        grad = torch.autograd.grad(out.logprob.sum(), hidden)[0]
        torch.testing.assert_close(grad, torch.autograd.grad(plain["logprob"].sum(), hidden)[0])


def red_zone(x, pad=3):
    """The same values inside a buffer of NaN, rows still adjacent."""
    buffer = torch.full((x.shape[0] + 2 * pad, *x.shape[1:]), NAN, dtype=x.dtype, device=x.device)
    buffer[pad:-pad] = x.detach()
    return buffer[pad:-pad].requires_grad_(x.requires_grad)


def test_ignored_rows_hold_nan_between_red_zones(device, path):
    n, v = 70, 301
    tensors, target = make_all(n, 20, v, device)
    ignored = torch.tensor([1, 4, 69], device=device)
    target[ignored] = -100
    temperature = torch.ones(n, device=device)
    cotangent = {name: torch.randn(n, device=device) for name in DIFFERENTIABLE}
    clean_out, clean = values_and_gradients(ours, tensors, target, cotangent, temperature=temperature)
    with torch.no_grad():
        tensors[0][1], tensors[0][4] = NAN, torch.inf
    temperature[1] = NAN
    for name in DIFFERENTIABLE:
        cotangent[name][1] = NAN
    zoned = tuple(red_zone(x) for x in tensors)
    got_out, got = values_and_gradients(
        ours, zoned, target, {n: x for n, x in cotangent.items()}, temperature=temperature
    )
    for name in OUTPUTS:
        assert (got_out[name][ignored] == 0).all()
        assert torch.equal(got_out[name], clean_out[name]), name
    assert (got[0][ignored] == 0).all()
    for name, a, b in zip(INPUTS, got, clean, strict=True):
        assert torch.equal(a, b), name
    frozen = [x.detach() for x in zoned]
    frozen[0].requires_grad_()
    lora = HeadLora(*frozen[3:], 0.5)
    out = linear_logprob(*frozen[:2], target, bias=frozen[2], lora=lora, temperature=temperature, backend="triton")
    grad = torch.autograd.grad(out.logprob, frozen[0], cotangent["logprob"])[0]
    assert torch.isfinite(grad).all()
    assert (grad[ignored] == 0).all()


def test_strides(device, path):
    (hidden, weight, *_), target = make_all(30, 40, 99, device, grad=False)
    wide_target = torch.stack([target, target], 1)
    views = (hidden.T.contiguous().T[::2, ::2], weight.T.contiguous().T[::3, ::2])
    small = wide_target[::2, 0] % 33
    strided = linear_logprob(*views, small, outputs=OUTPUTS, backend="triton")
    packed = linear_logprob(*(x.contiguous() for x in views), small.contiguous(), outputs=OUTPUTS, backend="triton")
    same_bits(strided, packed)


def test_all_rows_ignored_and_empty_batches(device, path):
    tensors, target = make_all(3, 20, 50, device)
    cotangent = {name: torch.ones(3, device=device) for name in DIFFERENTIABLE}
    out, grads = values_and_gradients(ours, tensors, torch.full_like(target, -100), cotangent)
    assert all((x == 0).all() for x in out.values())
    assert all((g == 0).all() for g in grads)
    tensors, target = make_all(0, 20, 50, device)
    out, grads = values_and_gradients(ours, tensors, target, {"logprob": torch.ones(0, device=device)})
    assert [g.shape for g in grads] == [x.shape for x in tensors]
    assert all((g == 0).all() for g in grads)
    hidden = tensors[0].detach().requires_grad_()
    assert linear_logprob(hidden, tensors[1].detach(), target, backend="triton").logprob.shape == (0,)


def test_the_gradient_ahead_and_outputs_do_not_change_a_bit(device, path):
    hidden, weight, target = make(129, 20, 517, device)
    frozen = weight.detach()
    plain = linear_logprob(hidden.detach(), frozen, target, backend="triton")
    ahead = linear_logprob(hidden, frozen, target, backend="triton")
    every = linear_logprob(hidden, weight, target, outputs=OUTPUTS, backend="triton")
    assert torch.equal(plain.logprob, ahead.logprob)
    assert torch.equal(plain.logprob, every.logprob)


def test_a_frozen_head_gets_no_product(device, path, monkeypatch):
    shapes = []
    original = sweep.gemm_

    def recorded(out, a, b, **options):
        shapes.append((*a.shape, b.shape[1]))
        original(out, a, b, **options)

    monkeypatch.setattr(sweep, "gemm_", recorded)
    n, h, v = 40, 20, 100
    hidden, weight, target = make(n, h, v, device)
    linear_logprob(hidden, weight.detach(), target, backend="triton").logprob.sum().backward()
    assert shapes == [(n, h, v), (n, v, h)]
    shapes.clear()
    linear_logprob(hidden.detach(), weight, target, backend="triton").logprob.sum().backward()
    forward = [] if path == "fused" else [(n, h, v)]
    assert shapes == [*forward, (n, h, v), (v, n, h)]
    shapes.clear()
    made = []
    gradients = sweep.Sweep.gradients

    def watched(*args, **options):
        made.append(gradients(*args, **options))
        return made[-1]

    monkeypatch.setattr(sweep.Sweep, "gradients", watched)
    linear_logprob(hidden, weight.detach(), target, outputs=("entropy",), backend="triton").entropy.sum().backward()
    assert shapes == [*forward, (n, h, v), (n, v, h)]
    assert [set(x) for x in made] == [{"hidden"}]


def test_opcheck(device, path):
    (hidden, weight, bias, A, B), target = make_all(4, 3, 5, device)
    tensors = (hidden, weight, target, bias, A, B, torch.rand(4, device=device) + 0.5)
    numbers = (0.5, 1.0, 2.0, 1.5, -100)
    torch.library.opcheck(OPS.linear_logprob.default, (*tensors, *numbers, ",".join(OUTPUTS), False, "triton"))
    plain = (hidden, weight.detach(), target, None, None, None, None)
    torch.library.opcheck(OPS.linear_logprob.default, (*plain, *numbers, "logprob", True, "triton"))


def test_temporaries_are_an_eighth_of_the_logits():
    for n, v in itertools.product((129, 512, 1000, 8192, 32768), (32001, 50264, 129920, 151936)):
        rows, columns = cost.tile_shape(n, v)
        assert rows * columns * 16 <= max(n * v * 4 / 8, 16 * cost.SMALL_TILE), (n, v)


BIG = [(2048, 32001), (1024, 50264), (64, 129920), (1024, 151936)]


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "vocab"), BIG)
def test_ragged_vocabularies_in_bf16(n, vocab):
    hidden, weight, target = make(n, 1024, vocab, "cuda", scale=0.1, dtype=torch.bfloat16, grad=False)
    target[0] = vocab - 1
    hidden.requires_grad_()
    cotangent = torch.randn(n, device="cuda")

    def run(function, hidden, weight):
        out = function(hidden, weight, target)
        out = out["logprob"] if isinstance(out, dict) else out.logprob
        return out, torch.autograd.grad(out, hidden, cotangent.to(out.dtype))[0]

    got, g = run(lambda *a: linear_logprob(*a, backend="triton"), hidden, weight)
    exact, g64 = run(dense, *double(hidden, weight))
    plain, _ = run(dense, hidden.detach().float().requires_grad_(), weight.float())
    _, g16 = run(dense, hidden, weight)
    assert_ok(tier1(got, exact, plain), "logprob")
    assert_ok(tier3(g, g64, g16), "d_hidden")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [100, 2000])
def test_ten_runs_have_the_same_bits(n):
    hidden, weight, target = make(n, 1024, 50264, "cuda", scale=0.1, dtype=torch.bfloat16)
    runs = []
    for _ in range(10):
        out = linear_logprob(hidden, weight, target, outputs=OUTPUTS, backend="triton")
        loss = sum(getattr(out, name).sum() for name in DIFFERENTIABLE)
        ahead = linear_logprob(hidden, weight.detach(), target, backend="triton").logprob
        runs.append(
            (*out, *torch.autograd.grad(loss, (hidden, weight)), *torch.autograd.grad(ahead.sum(), hidden), ahead)
        )
    assert torch.equal(runs[0][0], runs[0][-1])
    for run in runs[1:]:
        same_bits(run, runs[0])


@pytest.mark.gpu
@pytest.mark.parametrize("n", [100, 2000])
def test_cuda_graph(n):
    hidden, weight, target = make(n, 512, 32001, "cuda", scale=0.1, dtype=torch.bfloat16)

    def step():
        out = linear_logprob(hidden, weight, target, outputs=("logprob", "entropy"), backend="triton")
        ahead = linear_logprob(hidden, weight.detach(), target, backend="triton").logprob
        grads = torch.autograd.grad(out.logprob.sum() + out.entropy.sum(), (hidden, weight))
        return detached(*out[:2], *grads, *torch.autograd.grad(ahead.sum(), hidden))

    expected = step()
    repeated_and_captured(step, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32001, 151936])
@pytest.mark.parametrize("trained", [False, True])
def test_memory_is_an_eighth_of_the_logits(vocab, trained):
    n, h = 8192, 1024
    hidden, weight, target = make(n, h, vocab, "cuda", scale=0.1, dtype=torch.bfloat16)
    weight = weight if trained else weight.detach()

    def run():
        linear_logprob(hidden, weight, target, backend="triton").logprob.sum().backward()

    run()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    # beside the gradients themselves and an fp32 sum of d_hidden's size
    results = n * h * 6 + (vocab * h * 2 if trained else 0)
    assert torch.cuda.max_memory_allocated() - before - results <= n * vocab * 4 / 8 + 2**22
