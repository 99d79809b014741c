"""The native sweeps of the vocabulary on every instruction set of this machine: accuracy, independence, memory."""

import math
import resource
import subprocess
import sys

import pytest
import torch
from rlhf_kernels import sample
from rlhf_kernels.linear_logprob import HeadLora, linear_logprob
from rlhf_kernels.linear_logprob_pair import PairOutputs, linear_logprob_pair
from rlhf_kernels.linear_ppo_loss import linear_ppo_loss
from rlhf_kernels.runtime import native
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier3
from rlhf_kernels.vocab.logits import OUTPUTS

from . import dense as vocabulary
from .checks import each, threads_change_no_bit
from .dense import DIFFERENTIABLE, dense

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


def make(n, h, v, **options):
    hidden, weight, target = vocabulary.make(n, h, v, **options)
    if n > 1:
        target[-1] = v - 1  # in the last, partial block
    return hidden, weight, target


def everything(function, hidden, weight, target, cotangent, **options):
    """Outputs and gradients to hidden and weight of `function(hidden, weight, target) -> named outputs`."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    out = function(hidden, weight, target, **options)
    loss = sum((cotangent[name].to(out[name].dtype) * out[name]).sum() for name in cotangent)
    return {name: x.detach() for name, x in out.items()}, torch.autograd.grad(loss, (hidden, weight))


def ours(hidden, weight, target, **options):
    return linear_logprob(hidden, weight, target, outputs=OUTPUTS, backend="cpu", **options)._asdict()


SHAPES = [(1, 3, 2), (2, 8, 17), (2, 17, 17), (15, 64, 511), (33, 70, 512), (127, 33, 513), (129, 96, 1200)]
SHAPES += [(40, 560, 100), (300, 20, 40)]  # the depth, and the rows of a gradient of weights, in several pieces


@each("scale", [1.0, 1e-3])
@each("shape", SHAPES)
@each("with_options", [False, True])
def test_fp32_is_tier1(isa, shape, scale, with_options):
    n, h, v = shape
    hidden, weight, target = make(*shape, scale=scale)
    options = {}
    if with_options:
        options = {"temperature": torch.rand(n) + 0.5, "softcap": 3.0, "logit_scale": 1.3, "bias": torch.randn(v)}
        options["lora"] = HeadLora(torch.randn(4, h), 0.1 * torch.randn(v, 4), 0.5)
    cotangent = {name: torch.randn(n) for name in DIFFERENTIABLE}
    wide = {k: x.double() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    if with_options:
        wide["lora"] = HeadLora(options["lora"].A.double(), options["lora"].B.double(), 0.5)
    out, grads = everything(ours, hidden, weight, target, cotangent, **options)
    exact, exact_grads = everything(dense, hidden.double(), weight.double(), target, cotangent, **wide)
    plain, plain_grads = everything(dense, hidden, weight, target, cotangent, **options)
    for name in DIFFERENTIABLE:
        assert_ok(tier1(out[name], exact[name], plain[name]), name)
    for name, g, g64, g32 in zip(("hidden", "weight"), grads, exact_grads, plain_grads, strict=True):
        assert_ok(tier1(g, g64, g32), name)


@each("kind", ["random", "peaked", "uniform", "all_equal", "all_minus_200"])
@each("shape", [(2, 32, 17), (33, 64, 700), (64, 96, 4099), (290, 64, 130)])
def test_bf16_is_tier3_and_its_logprob_is_not_rounded(isa, shape, kind):
    n, h, v = shape
    hidden, weight, target = make(*shape, dtype=torch.bfloat16)
    options = {}
    if kind == "peaked":
        hidden *= 30.0 / h**0.5
        target = (hidden.float() @ weight.float().T).argmax(-1)  # p near 1, where rounding p would ruin the gradient
    elif kind == "uniform":
        hidden.zero_()
    elif kind == "all_equal":
        weight[:] = weight[0]
    elif kind == "all_minus_200":
        hidden.zero_()
        options["bias"] = torch.full((v,), -200.0)
    cotangent = {"logprob": torch.randn(n)}
    wide = {k: x.double() for k, x in options.items()}
    out, _ = everything(ours, hidden, weight, target, cotangent, **options)
    exact, exact_grads = everything(dense, hidden.double(), weight.double(), target, cotangent, **wide)
    _plain, plain_grads = everything(dense, hidden, weight, target, cotangent, **options)
    fp32, _ = everything(dense, hidden.float(), weight.float(), target, cotangent, **options)
    for name in ("logprob", "lse", "entropy"):
        assert_ok(tier1(out[name], exact[name], fp32[name]), name)
    for frozen in (True, False):  # the gradient ahead, and the one by recomputing
        h = hidden.clone().requires_grad_()
        w = weight.clone().requires_grad_(not frozen)
        result = linear_logprob(h, w, target, backend="cpu", **options).logprob
        grads = torch.autograd.grad(result, (h,) if frozen else (h, w), cotangent["logprob"])
        for name, g, g64, g16 in zip(("hidden", "weight"), grads, exact_grads, plain_grads, strict=False):
            assert g.dtype == torch.bfloat16
            assert_ok(tier3(g, g64, g16), f"{name}, frozen={frozen}")


@each("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_depend_on_that_row_alone(isa, dtype):
    n = 140  # five panels: one thread takes two of them at a time, two threads one each
    hidden, weight, target = make(n, 48, 1500, dtype=dtype)
    gradient = torch.randn(n)

    def run(rows):
        h = hidden[rows].clone().requires_grad_()
        out = linear_logprob(h, weight, target[rows], outputs=OUTPUTS, detach=OUTPUTS[1:2] + OUTPUTS[3:], backend="cpu")
        out.logprob.backward(gradient[rows])
        return [*(x.detach() for x in out), h.grad]

    whole = run(slice(None))
    order = torch.randperm(n)[:37]
    for a, b in zip(run(order), whole, strict=True):
        assert torch.equal(a, b[order])
    threads_change_no_bit(lambda: run(slice(None)), 1, 2)
    with torch.no_grad():  # scoring and training see the same log-probs
        scored = linear_logprob(hidden, weight, target, backend="cpu").logprob
    assert torch.equal(scored, whole[0])


@each("dtype", [torch.float32, torch.bfloat16])
def test_strides_and_nan_red_zones(isa, dtype):
    n, h, v = 35, 37, 530
    hidden, weight, target = make(n, h, v, dtype=dtype)
    target[4] = -100
    bias = torch.randn(v)

    def run(hidden, weight):
        out = linear_logprob(hidden, weight, target, bias=bias, outputs=OUTPUTS, backend="cpu")
        loss = sum(getattr(out, name).sum() for name in DIFFERENTIABLE)
        return [*(x.detach() for x in out), *torch.autograd.grad(loss, (hidden, weight))]

    plain = run(hidden.clone().requires_grad_(), weight.clone().requires_grad_())
    zone_h, zone_w = (
        torch.full((n + 2, h + 7), torch.nan, dtype=dtype),
        torch.full((v + 2, h + 9), torch.nan, dtype=dtype),
    )
    zone_h[1:-1, 3 : 3 + h], zone_w[1:-1, 2 : 2 + h] = hidden, weight
    inside = zone_h[1:-1, 3 : 3 + h]
    inside[4] = torch.nan  # an ignored row
    strided = run(inside.requires_grad_(), zone_w[1:-1, 2 : 2 + h].requires_grad_())
    transposed = run(hidden.T.contiguous().T.requires_grad_(), weight.T.contiguous().T.requires_grad_())
    for a, b, c in zip(plain, strided, transposed, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@each("dtype", [torch.float32, torch.bfloat16])
def test_head_lora_is_not_rounded(isa, dtype):
    n, h, v, r = 40, 64, 600, 5
    hidden, weight, target = make(n, h, v, dtype=dtype)
    cotangent = torch.randn(n)
    for adapter in (torch.float32, dtype):
        A, B = torch.randn(r, h).to(adapter), torch.randn(v, r).to(adapter)

        def run(backend, wide, A=A, B=B):
            tensors = [x.detach().to(wide or x.dtype).requires_grad_() for x in (hidden, weight, A, B)]
            out = linear_logprob(tensors[0], tensors[1], target, lora=HeadLora(*tensors[2:], 0.5), backend=backend)
            return out.logprob.detach(), torch.autograd.grad(out.logprob, tensors, cotangent.to(wide or torch.float32))

        (logprob, grads), (exact, exact_grads) = run("cpu", None), run("reference", torch.float64)
        error = (logprob - exact).abs().max() / exact.abs().max()
        assert error < 1e-5, error  # 4e-3 with the low-rank activations or B rounded to bf16
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        for name, g, g64 in zip(("hidden", "weight", "A", "B"), grads, exact_grads, strict=True):
            relative = (g.double() - g64).norm() / g64.norm()
            assert relative < tolerance, (name, relative)


def test_pair_is_two_sweeps_and_exact(isa):
    hidden, weight, target = make(45, 48, 1100, dtype=torch.bfloat16)
    other = (hidden.float() + 0.05 * torch.randn(45, 48)).bfloat16()
    pair = linear_logprob_pair(hidden, other, weight, target, temperature=0.7, backend="cpu")
    a = linear_logprob(hidden, weight, target, temperature=0.7, outputs=("logprob", "entropy"), backend="cpu")
    r = linear_logprob(other, weight, target, temperature=0.7, backend="cpu")
    assert torch.equal(pair.logprob_a, a.logprob)
    assert torch.equal(pair.logprob_r, r.logprob)
    assert torch.equal(pair.entropy, a.entropy)
    log_p, log_r = (torch.log_softmax(x.double() @ weight.double().T / 0.7, -1) for x in (hidden, other))
    exact = (log_p.exp() * (log_p - log_r)).sum(-1)
    assert ((pair.kl - exact).abs() <= 1e-5 + 1e-4 * exact).all()
    same = linear_logprob_pair(hidden, hidden, weight, target, backend="cpu")
    assert (same.kl == 0).all()


def test_pair_gradient_ahead_and_recomputed_are_tier3(isa):
    hidden, weight, target = make(45, 48, 1100, dtype=torch.bfloat16)
    hidden *= 0.3
    other = (hidden.float() + 0.05 * torch.randn(45, 48)).bfloat16()
    on_logprob, on_kl = torch.randn(2, 45)

    def run(detach, backend, dtype):
        h = hidden.detach().to(dtype).requires_grad_()
        out = linear_logprob_pair(h, other.to(dtype), weight.to(dtype), target, detach=detach, backend=backend)
        loss = (out.logprob_a * on_logprob.to(out.kl.dtype)).sum() + (out.kl * on_kl.to(out.kl.dtype)).sum()
        return torch.autograd.grad(loss, h)[0]

    def rounded():
        h = hidden.detach().requires_grad_()
        log_p, log_r = torch.log_softmax(h @ weight.T, -1), torch.log_softmax(other @ weight.T, -1)
        kl = (log_p.exp() * (log_p - log_r)).sum(-1)
        loss = (log_p.gather(1, target[:, None])[:, 0] * on_logprob).sum() + (kl * on_kl).sum()
        return torch.autograd.grad(loss, h)[0]

    exact, plain = run((), "reference", torch.float64), rounded()
    for detach in (("entropy",), ()):
        assert_ok(tier3(run(detach, "cpu", torch.bfloat16), exact, plain), str(detach))


def test_rising_logits_rescale_every_sum(isa):
    """Every block of the vocabulary has a higher maximum than the one before."""
    n, h, v = 40, 16, 2000
    hidden, weight, target = make(n, h, v)
    hidden[:, 0], weight[:, 0] = 1.0, torch.linspace(-40, 40, v)
    other = hidden + 0.3 * torch.randn(n, h)
    on_logprob, on_kl = torch.randn(2, n)

    def run(backend, dtype, detach):
        x = hidden.to(dtype).requires_grad_()
        out = linear_logprob_pair(x, other.to(dtype), weight.to(dtype), target, detach=detach, backend=backend)
        loss = (out.logprob_a * on_logprob.to(dtype)).sum() + (out.kl * on_kl.to(dtype)).sum()
        return *(y.detach().double() for y in out), torch.autograd.grad(loss, x)[0].double()

    exact = run("reference", torch.float64, ())
    for detach in (("entropy",), ()):  # the gradient ahead, and the one by recomputing
        for name, got, want in zip(
            (*PairOutputs._fields, "d_hidden"), run("cpu", torch.float32, detach), exact, strict=True
        ):
            assert (got - want).abs().max() <= 1e-5 * want.abs().max(), (name, detach)


@each("row", [0, 7, 8, 15, 23, 31])
def test_one_row_with_rising_logits(isa, row):
    """Of all lanes of a vector one alone needs another reference, without which its exponentials overflow."""
    hidden, weight, target = make(32, 8, 1100, scale=0.1)
    hidden[:, 0], weight[:, 0] = 0.0, torch.linspace(-150, 150, 1100)
    hidden[row, 0] = 1.0
    out = linear_logprob(hidden, weight, target, outputs=OUTPUTS, backend="cpu")
    exact, plain = dense(hidden.double(), weight.double(), target), dense(hidden, weight, target)
    for name in ("logprob", "lse", "entropy"):
        assert_ok(tier1(getattr(out, name), exact[name], plain[name]), name)


def test_a_nan_reaches_all_of_its_row_and_no_other(isa):
    hidden, weight, target = make(20, 16, 600)
    bias = torch.zeros(600)

    def run():
        return linear_logprob(hidden, weight, target, bias=bias, outputs=OUTPUTS, backend="cpu")._asdict()

    clean = run()
    hidden[3, 1] = torch.nan
    hurt = run()
    others = torch.arange(20) != 3
    for name in DIFFERENTIABLE:
        assert hurt[name][3].isnan(), name
        assert torch.equal(hurt[name][others], clean[name][others]), name
    bias[555] = torch.nan
    for name, x in run().items():
        assert x.isnan().all() or name == "is_top1", name


@each("vocab", [20, 5000])
def test_no_piece_overtakes_what_it_builds_on(isa, vocab):
    """One panel or two, so that threads meet at every block. One thread last: its results lie where it has been."""
    for seed in range(5):
        hidden, weight, target = make(20 + 20 * (seed % 2), 512 if vocab == 20 else 32, vocab, seed=seed)

        def run(hidden=hidden, weight=weight, target=target):
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            ahead = linear_logprob(h, weight, target, backend="cpu").logprob
            again = linear_logprob(h, w, target, outputs=("logprob", "entropy"), backend="cpu")
            loss = again.logprob.sum() + again.entropy.sum()
            return [ahead, *again[:2], *torch.autograd.grad(ahead.sum(), h), *torch.autograd.grad(loss, (h, w))]

        threads_change_no_bit(run, 2, 3, 8, 1)


def test_ppo_loss_ratio_is_one_and_gradients_agree(isa):
    hidden, weight, target = make(50, 48, 900, dtype=torch.bfloat16)
    with torch.no_grad():
        old = linear_logprob(hidden, weight, target, backend="cpu").logprob
    mask = (torch.arange(50) % 5 != 0).float()
    advantage = torch.randn(50)

    def run(entropy_coef, dtype, backend):
        h, w = hidden.detach().to(dtype).requires_grad_(), weight.detach().to(dtype)
        out = linear_ppo_loss(
            h, w, target, old, advantage, mask, denom=mask.sum(), entropy_coef=entropy_coef, backend=backend
        )
        return out, torch.autograd.grad(out.loss, h)[0]

    for entropy_coef in (0.0, 0.1):
        out, grad = run(entropy_coef, torch.bfloat16, "cpu")
        assert out.ratio_mean * mask.sum() == mask.sum()
        assert out.ratio_max == 1.0
        exact, exact_grad = run(entropy_coef, torch.float64, "reference")
        assert abs(out.loss - exact.loss) < 1e-4
        assert (grad[mask == 0] == 0).all()
        assert (grad.double() - exact_grad).norm() / exact_grad.norm() < 1e-2


MEMORY = """
import resource, sys, torch
from rlhf_kernels.linear_logprob import linear_logprob
torch.manual_seed(0)
N, H, V = 512, 256, 65536
h = torch.randn(N, H).bfloat16().requires_grad_()
W, t = torch.randn(V, H).bfloat16(), torch.randint(0, V, (N,))
linear_logprob(h[:32], W[:512], t[:32] % 512, backend="cpu").logprob.sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
linear_logprob(h, W, t, backend="cpu").logprob.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, 4 * N * V)
"""


def test_memory_is_an_eighth_of_the_logits():
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    extra, logits = map(int, run.stdout.split())
    assert resource.getpagesize() <= logits  # the figures are bytes
    assert extra <= logits / 8, (extra, logits)


@each("weight_dtype", [torch.float32, torch.float16, torch.bfloat16])
@each("hidden_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mixed_dtypes(isa, hidden_dtype, weight_dtype):
    hidden, weight, target = make(20, 24, 300)
    hidden, weight = hidden.to(hidden_dtype).requires_grad_(), weight.to(weight_dtype).requires_grad_()
    logprob = linear_logprob(hidden, weight, target, backend="cpu").logprob
    exact = dense(hidden.double(), weight.double(), target)["logprob"]
    torch.testing.assert_close(logprob.double(), exact, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(logprob.sum(), (hidden, weight))
    assert [g.dtype for g in grads] == [hidden_dtype, weight_dtype]


def test_pair_does_not_round_the_wider_side(isa):
    hidden, weight, target = make(20, 24, 300, dtype=torch.bfloat16)
    other = hidden.float() + 0.01 * torch.randn(20, 24)  # what bf16 would lose
    pair = linear_logprob_pair(hidden, other, weight, target, backend="cpu")
    exact = dense(other.double(), weight.double(), target)["logprob"]
    torch.testing.assert_close(pair.logprob_r.double(), exact, rtol=1e-5, atol=1e-5)


# ---- what surrounds a call -------------------------------------------------------------------------------------------


def every_head(hidden, weight, target, lora):
    """Outputs of all ops that sweep the vocabulary, and the gradients of two."""
    hidden = hidden.detach().requires_grad_()
    ones = torch.ones(hidden.shape[0], dtype=torch.float32)
    options = {"lora": lora, "backend": "cpu"}
    single = linear_logprob(hidden, weight, target, outputs=("logprob", "entropy"), **options)
    frozen = HeadLora(lora.A.detach(), lora.B.detach(), lora.scale)
    pair = linear_logprob_pair(hidden, hidden.detach() + 1, weight, target, lora=frozen, backend="cpu")
    loss = linear_ppo_loss(hidden, weight, target, -ones, ones, ones, denom=ones.sum(), **options)
    rows = torch.arange(hidden.shape[0])
    wanted = ("token", "logprob", "entropy")
    with torch.no_grad():
        drawn = sample(hidden, weight, seed=rows, position=rows, outputs=wanted, **options)
    gradients = torch.autograd.grad(single.logprob.sum() + pair.kl.sum() + loss.loss, [hidden, lora.A, lora.B])
    found = [single.logprob, single.entropy, pair.logprob_a, pair.kl, loss.logprob, drawn.logprob, drawn.entropy]
    return [x.detach() for x in (*found, loss.loss, drawn.token, *gradients)]


@each("around", ["default dtype", "autocast"])
def test_what_surrounds_a_call_changes_no_bit(isa, around):
    hidden, weight, target = make(9, 40, 100)
    lora = HeadLora(torch.randn(4, 40, requires_grad=True), torch.randn(100, 4, requires_grad=True), 0.5)
    plain = every_head(hidden, weight, target, lora)
    if around == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            found = every_head(hidden, weight, target, lora)
    else:
        torch.set_default_dtype(torch.bfloat16)
        try:
            found = every_head(hidden, weight, target, lora)
        finally:
            torch.set_default_dtype(torch.float32)
    for a, b in zip(plain, found, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@each("dtype", [torch.float32, torch.bfloat16])
def test_without_depth_every_word_is_equally_likely(isa, dtype):
    for _ in range(3):
        torch.full((4, 32), 7.0)  # memory that is not zero
        out = linear_logprob(
            torch.zeros(4, 0, dtype=dtype), torch.zeros(32, 0, dtype=dtype), torch.arange(4), backend="cpu"
        )
        assert torch.allclose(out.logprob, torch.full((4,), -math.log(32)))


def test_outputs_without_gradient_cost_the_loss_no_memory():
    hidden, weight, target = make(4, 64, 4096)
    weight.requires_grad_()
    ones = torch.ones(4)
    loss = linear_ppo_loss(hidden, weight, target, -ones, ones, ones, denom=torch.tensor(4.0), backend="cpu").loss
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as p:
        loss.backward()
    large = [e for e in p.events() if e.self_cpu_memory_usage >= weight.numel() * 4]
    assert len(large) <= 1, large  # the gradient times that of the loss
