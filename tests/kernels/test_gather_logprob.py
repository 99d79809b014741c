"""`gather_logprob` against a dense float64 computation: every layout of the logits, both backwards."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from rlhf_kernels import gather_logprob, linear_logprob
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier2, tier3
from rlhf_kernels.runtime.triton_support import INTERPRETED
from rlhf_kernels.vocab.logits import OUTPUTS

from .checks import ISAS, each, largest_allocation, same_bits, threads_change_no_bit
from .dense import DIFFERENTIABLE, heated, statistics


def dense(logits, target, temperature=1.0):
    return statistics(heated(logits, temperature), target)


def make(n, v, *, scale=3.0, dtype=torch.float32):
    """logits, which need a gradient, and target, whose last one is the last column."""
    target = torch.randint(0, v, (n,))
    target[-1:] = v - 1
    return (scale * torch.randn(n, v)).to(dtype).requires_grad_(), target


def ours(logits, target, **options):
    return gather_logprob(logits, target, outputs=OUTPUTS, **options)._asdict()


def run(function, logits, target, cotangent, **options):
    """Every output and the gradient of one loss of all of them."""
    out = function(logits, target, **options)
    loss = sum((cotangent[name].to(out[name].dtype) * out[name]).sum() for name in cotangent)
    return out, torch.autograd.grad(loss, logits)[0]


def run_all(logits, target, cotangent, **options):
    """`run` of the op, of dense float64, and of dense float32."""
    exact, plain = (logits.detach().to(d).requires_grad_() for d in (torch.float64, torch.float32))
    got = run(ours, logits, target, cotangent, **options)
    return got, run(dense, exact, target, cotangent, **options), run(dense, plain, target, cotangent, **options)


def cotangents(*shape):
    return {name: torch.randn(shape) for name in DIFFERENTIABLE}


@each("name", DIFFERENTIABLE)
def test_gradcheck_every_output(name):
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0, -100], [6, 3]])
    temperature = torch.tensor([[0.5, 1.0], [2.0, 0.8]])

    def f(x, backend):
        out = gather_logprob(x[:, :-1], target, temperature=temperature, outputs=(name,), backend=backend)
        return getattr(out, name)

    for backend in ("reference", "auto"):  # auto is the C++
        assert torch.autograd.gradcheck(partial(f, backend=backend), (logits,)), backend


def layouts(x):
    """The same [6, V] values as: packed rows, a wider row stride, a transpose, every second column, 3-d rows."""
    n, v = x.shape
    wide = torch.full((n, v + 3), torch.nan, dtype=x.dtype)
    wide[:, :v] = x
    spread = torch.full((n, 2 * v), torch.nan, dtype=x.dtype)
    spread[:, ::2] = x
    cube = torch.full((3, 4, v + 5), torch.nan, dtype=x.dtype)
    cube[:, 1:3, :v] = x.view(3, 2, v)
    return x.clone(), wide[:, :v], x.T.contiguous().T, spread[:, ::2], cube[:, 1:3, :v]


@each("layout", range(5))
@each("inplace", [False, True])
@each("vocab", [33, 160])
def test_layouts_and_both_backwards(backend, layout, inplace, vocab):
    base = 3 * torch.randn(6, vocab)
    target = torch.tensor([0, vocab - 1, 5, -100, 7, 7])
    strided = layouts(base)[layout]
    shape = strided.shape[:-1]
    cotangent = cotangents(*shape)
    storage = strided.untyped_storage().nbytes() // 4
    flat = torch.as_strided(strided, (storage,), (1,), 0)
    leaf = flat.clone().requires_grad_()
    logits = torch.as_strided(leaf * 1.0, strided.shape, strided.stride(), strided.storage_offset())
    before = torch.as_strided(logits.detach(), (storage,), (1,), 0).clone()
    out = ours(logits, target.view(shape), temperature=0.7, inplace_backward=inplace)
    flat_cotangent = {k: x.reshape(-1) for k, x in cotangent.items()}
    _, (exact, g64), (plain, g32) = run_all(base.requires_grad_(), target, flat_cotangent, temperature=0.7)
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
    unused = torch.ones(storage, dtype=torch.bool)
    torch.as_strided(unused, strided.shape, strided.stride(), strided.storage_offset()).fill_(False)
    assert torch.equal(after[unused].nan_to_num(-7.0), before[unused].nan_to_num(-7.0))  # nothing beside the logits


def test_batched_slice_equals_flat_rows_bit_for_bit(backend):
    logits = torch.randn(3, 5, 50)
    target = torch.randint(0, 50, (3, 4))
    sliced = gather_logprob(logits[:, :-1], target, outputs=OUTPUTS)
    flat = gather_logprob(logits[:, :-1].reshape(-1, 50), target.reshape(-1), outputs=OUTPUTS)
    for a, b in zip(sliced, flat, strict=True):
        assert a.shape == (3, 4)
        assert torch.equal(a.reshape(-1), b)


def test_inplace_backward_guards(backend):
    target = torch.tensor([1, 2])
    leaf = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(ValueError, match="inplace_backward: expected logits that are an intermediate"):
        gather_logprob(leaf, target, inplace_backward=True)
    with torch.no_grad():
        gather_logprob(leaf, target, inplace_backward=True)
    logits = leaf * 2
    also_needs_them = logits.square().sum()  # saved the logits for its own backward
    loss = gather_logprob(logits, target, inplace_backward=True).logprob.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        also_needs_them.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_whole_copy_and_no_gradient_tensor_in_place(backend):
    leaf = torch.randn(4096, 1).bfloat16().requires_grad_()
    target = torch.zeros(4096, dtype=torch.int64)

    def step(inplace):
        logits = leaf.expand(4096, 3000) + torch.zeros(3000, dtype=torch.bfloat16)  # 24 MB in bf16, 49 in fp32

        def run():
            loss = gather_logprob(logits, target, inplace_backward=inplace).logprob.sum()
            torch.autograd.grad(loss, logits)

        return largest_allocation(run)

    size = 4096 * 3000 * 2
    assert step(True) < size
    assert size <= step(False) < 2 * size


SIZES = [(0, 50), (1, 1), (2, 1), (15, 17), (127, 517), (129, 130), (1, 4131), (2, 4131), (15, 4131)]
QUICK_SIZES = [(0, 50), (1, 1), (2, 1), (15, 17), (33, 517), (65, 130), (1, 4131), (15, 1031)]  # blocks of 32 by 128


@each("scale", [1.0, 1e-3, 30.0])
def test_tier1_sizes_and_scales(backend, scale):
    for n, v in QUICK_SIZES if INTERPRETED else SIZES if backend == "triton" else [*SIZES, (129, 1003)]:
        logits, target = make(n, v, scale=scale)
        if n > 2:
            target[1] = -100
        temperature = torch.linspace(0.5, 1.5, n)
        (out, grad), (exact, g64), (plain, g32) = run_all(logits, target, cotangents(n), temperature=temperature)
        for name in OUTPUTS:
            assert_ok(tier1(out[name], exact[name], plain[name]), f"{name} of {n}, {v}")
        if scale > 1:
            continue  # p cancels against 1[v = t]; `test_tier1_hostile_rows` has such gradients
        if v == 1:  # exactly 0 but for mean_logit and lse, of which tiny rounding may remain
            torch.testing.assert_close(grad, g64.float(), rtol=1e-6, atol=1e-5)
        else:
            assert_ok(tier1(grad, g64, g32), f"d_logits of {n}, {v}")


@each("dtype", [torch.float16, torch.bfloat16])
def test_half_logits_are_upcast_before_the_temperature_and_gradients_rounded_once(backend, dtype):
    if dtype == torch.float16 and backend == "cpu":
        pytest.skip("float16 is the reference's")
    logits, target = make(33, 600, dtype=dtype)
    cotangent = {"logprob": torch.randn(33)}
    (out, grad), (exact, g64), (plain, _) = run_all(logits, target, cotangent, temperature=0.7)
    for name in OUTPUTS:
        assert_ok(tier1(out[name], exact[name], plain[name]), name)
    assert grad.dtype == dtype
    assert_ok(tier3(grad, g64, run(dense, logits, target, cotangent, temperature=0.7)[1]), "d_logits")
    if not INTERPRETED or dtype == torch.float16:  # the interpreter truncates when it makes bf16
        normal = g64.abs() > 2**-14  # tier 2 does not know fp16's subnormal numbers
        assert_ok(tier2(torch.where(normal, grad, 0), torch.where(normal, g64, 0)), "d_logits")


def test_hostile_values(backend):
    logits = torch.stack([torch.full((17,), -200.0), torch.full((17,), -1e4), torch.randn(17), torch.randn(17)])
    logits[2, 3:] = -torch.inf  # all but three tokens are forbidden
    logits[3] = torch.nan  # an ignored row
    logits.requires_grad_()
    target = torch.tensor([3, 16, 5, -100])
    out = gather_logprob(logits, target, outputs=("logprob", "entropy"))
    assert out.logprob[:2].tolist() == pytest.approx([-torch.tensor(17.0).log().item()] * 2)
    assert out.logprob[2] == -torch.inf  # a forbidden target is impossible, not NaN
    assert out.logprob[3] == out.entropy[3] == 0
    expected = torch.distributions.Categorical(logits=logits[2, :3].detach()).entropy()
    torch.testing.assert_close(out.entropy[2].detach(), expected)
    grad = torch.autograd.grad(out.logprob[:2].sum() + out.entropy.sum(), logits)[0]
    assert torch.isfinite(grad).all()
    assert (grad[3] == 0).all()


def test_nan_logits_of_a_counted_row_are_not_hidden(backend):
    logits = torch.randn(2, 4)
    logits[1, 2] = torch.nan
    out = gather_logprob(logits, torch.tensor([0, 0]), outputs=("logprob", "entropy", "lse"))
    assert all(torch.isfinite(x[0]) and torch.isnan(x[1]) for x in (out.logprob, out.entropy, out.lse))


def test_agrees_with_linear_logprob(backend):
    hidden, weight = torch.randn(9, 8), torch.randn(40, 8)
    target = torch.randint(0, 40, (9,))
    linear = linear_logprob(hidden, weight, target, temperature=0.6, outputs=OUTPUTS, backend="reference")
    gathered = gather_logprob(hidden @ weight.T, target, temperature=0.6, outputs=OUTPUTS)
    same = torch.equal if backend == "reference" else lambda a, b: torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert all(same(a, b) for a, b in zip(linear, gathered, strict=True))


@each(
    ("change", "error", "message"),
    [
        ({"logits": torch.randn(4)}, ValueError, "logits: expected a tensor"),
        ({"logits": torch.zeros(2, 4, dtype=torch.int64)}, TypeError, "logits: expected a floating"),
        ({"target": torch.tensor([0])}, ValueError, "target: expected shape"),
        ({"target": torch.tensor([0, 4])}, ValueError, "target: expected values in"),
        ({"temperature": torch.tensor([0.0, 1.0])}, ValueError, "temperature: expected values > 0"),
        ({"outputs": ()}, ValueError, "outputs: expected one or more"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    arguments = {"logits": torch.randn(2, 4), "target": torch.tensor([0, 1])} | change
    with pytest.raises(error, match=message):
        gather_logprob(**arguments)


def hostile_rows(v):
    """[8, v]: ordinary, peaked (× 30), uniform, all −200, half −inf, one certain token, a rising and a falling ramp."""
    x = torch.randn(8, v)
    x[1] *= 30
    x[2] = 0.5
    x[3] = -200
    x[4, v // 2 + 1 :] = -torch.inf
    x[5, v // 3] = 80
    x[6] = torch.linspace(-80, 80, v)  # the maximum rises in every tile
    x[7] = torch.linspace(80, -80, v)
    return x


@each("dtype", [torch.float32, torch.bfloat16])
@each("temperature", [1.0, 0.7])
@each("v", [1, 2, 17, 300, 2048, 2049, 32001, 50264])
def test_tier1_hostile_rows(backend, dtype, v, temperature):
    """Values and gradients, with NaN before, between and behind the rows; the last row is ignored and NaN itself."""
    if backend == "triton" and v > 300:
        pytest.skip("the interpreter is slow")
    logits = torch.cat([hostile_rows(v), torch.full((1, v), torch.nan)]).to(dtype)
    target = torch.tensor([0, v - 1, v // 2, v // 2, v // 4, v // 3, v - 1, 0, -100])
    holder = torch.full((11, v + 5), torch.nan, dtype=dtype)
    holder[1:10, 2 : 2 + v] = logits
    guarded = holder[1:10, 2 : 2 + v].requires_grad_()
    out = gather_logprob(guarded, target, temperature=temperature, outputs=OUTPUTS)
    cotangent = {name: torch.rand(9) - 0.5 for name in DIFFERENTIABLE}

    def loss_of(outputs):
        return sum((cotangent[name].to(outputs[name].dtype) * outputs[name]).sum() for name in DIFFERENTIABLE)

    def dense_run(wide):
        x = torch.where((target == -100)[:, None], 0.0, logits.to(wide)).requires_grad_()
        with registry.use_backend("reference"):
            outputs = gather_logprob(x, target, temperature=temperature, outputs=OUTPUTS)._asdict()
        finite = {name: torch.where(torch.isfinite(y), y, 0.0) for name, y in outputs.items()}
        return outputs, torch.autograd.grad(loss_of(finite), x)[0]

    (exact, grad64), (plain, grad32) = dense_run(torch.float64), dense_run(torch.float32)
    for name in OUTPUTS:
        assert_ok(tier1(getattr(out, name), exact[name], plain[name]), name)
    finite = {name: torch.where(torch.isfinite(y), y, 0.0) for name, y in out._asdict().items()}
    (got,) = torch.autograd.grad(loss_of(finite), guarded)
    # bfloat16 adds its own rounding, of the size of the larger of the two
    assert_ok(tier1(got, grad64, grad32 if dtype == torch.float32 else grad32.to(dtype)), "d_logits")


@each("dtype", [torch.float32, torch.bfloat16])
@each("inplace", [False, True])
def test_leading_dimensions_that_do_not_collapse(backend, dtype, inplace):
    """TRL's logits[:, :-1]: rows are dense, but no single stride leads from row to row."""
    base = torch.randn(3, 5, 40).to(dtype)
    target = torch.randint(0, 40, (3, 4))
    results = []
    for leaf in (base[:, :-1].contiguous().requires_grad_(), base.clone().requires_grad_()):
        whole = leaf * 1
        logits = whole if leaf.shape[1] == 4 else whole[:, :-1]
        out = gather_logprob(logits, target, temperature=0.8, outputs=OUTPUTS, inplace_backward=inplace)
        (grad,) = torch.autograd.grad(out.logprob.sum() + out.entropy.sum(), leaf)
        results.append([*(x.detach() for x in out), grad[:, :4]])
    same_bits(*results)


def test_first_arg_max_wins_and_nan_is_the_largest(backend):
    logits = torch.tensor([[3.0, 3.0, 1.0], [3.0, 3.0, 1.0], [1.0, torch.nan, torch.nan], [1.0, torch.nan, 5.0]])
    logits = torch.cat([logits, torch.full((4, 2100), -5.0)], dim=1)  # ties across tiles too
    logits = torch.cat([logits, logits[:2]])
    logits[4:, 2090] = 9.0
    logits[4:, 2091] = 9.0
    out = gather_logprob(logits, torch.tensor([0, 1, 1, 2, 2090, 2091]), outputs=("is_top1",))
    assert out.is_top1.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


def test_threads_do_not_change_the_bits(backend):
    logits, target = torch.randn(65, 9001, requires_grad=True), torch.randint(0, 9001, (65,))

    def run():
        out = gather_logprob(logits, target, outputs=OUTPUTS)
        return [*out, *torch.autograd.grad(out.entropy.sum(), logits)]

    if backend == "cpu":
        threads_change_no_bit(run)


_LITTLE_MEMORY = """
import resource
import torch
from rlhf_kernels import gather_logprob
from rlhf_kernels.runtime import registry

torch.set_num_threads(2)
logits, target = torch.zeros(2**23, 4).t(), torch.zeros(4, dtype=torch.int64)  # a thread copies a row: 32 MiB
with registry.use_backend("cpu"):
    gather_logprob(logits[:, : 2**17], target)  # threads and libraries are there
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 48 * 2**20,) * 2)
    try:
        gather_logprob(logits, target)
    except MemoryError:
        print("refused")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space through Linux's setrlimit")
def test_memory_that_runs_out_is_an_error(backend):
    """An exception within a parallel region would end the process."""
    if backend == "reference" or native.isa() != ISAS[-1]:
        pytest.skip("the same code for every instruction set")
    done = subprocess.run([sys.executable, "-c", _LITTLE_MEMORY], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr[-2000:]
