"""The native draw on every instruction set of this machine: the reference's tokens, accuracy, independence, memory."""

import pytest
import torch
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.philox import gumbel
from rlhf_kernels.runtime.testing import assert_ok, tier1
from rlhf_kernels.sample import SampleOutputs, sample
from rlhf_kernels.sample.reference import STREAM
from rlhf_kernels.vocab.logits import HeadLora

from . import dense as vocabulary
from .checks import each, largest_allocation, same_bits, threads_change_no_bit

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
ALL = SampleOutputs._fields


def make(n, h, v, *, dtype=torch.float32, scale=1.0):
    """hidden, weight, and keys of the noise with bits in all of their words."""
    hidden = (scale * torch.randn(n, h)).to(dtype)
    weight = torch.randn(v, h).to(dtype)
    return hidden, weight, torch.randint(-(2**63), 2**63 - 1, (n,)), torch.randint(0, 2**40, (n,))


def logits(hidden, weight, dtype, *, temperature=1.0, **head):
    """Logits [N, V] before and after the temperature."""
    z = vocabulary.logits(hidden.to(dtype), weight.to(dtype), **head)
    return z, vocabulary.heated(z, temperature)


def check(hidden, weight, seed, position, *, tolerance=1e-4, greedy=None, backend="cpu", **options):
    """Against the definition: float64 logits plus the reference's noise; statistics by tier 1."""
    n, v = hidden.shape[0], weight.shape[0]
    out = sample(hidden, weight, seed=seed, position=position, greedy=greedy, outputs=ALL, backend=backend, **options)
    c, z = logits(hidden, weight, torch.float64, **options)
    score = z + gumbel(seed, position, STREAM, v).double()
    if greedy is not None:
        score = torch.where(greedy[:, None], c, score)
    best = score.topk(min(2, v)).values
    clear = (best[:, 0] - best[:, -1] > tolerance * z.abs().amax(-1).clamp_min(1)) | torch.tensor(v == 1)
    assert clear.sum() >= 0.95 * n - 1
    assert torch.equal(out.token[clear], score.argmax(-1)[clear])

    plain = logits(hidden, weight, torch.float32, **options)[1]
    exact, plain = (vocabulary.statistics(rows, out.token) for rows in (z, plain))
    for name in ALL[1:]:
        assert_ok(tier1(getattr(out, name), exact[name], plain[name]), name)
    return out


SHAPES = [
    (1, 3, 2),
    (1, 1, 1),
    (2, 17, 17),
    (15, 64, 511),
    (16, 32, 512),
    (17, 70, 513),
    (33, 33, 1031),
    (130, 96, 2100),
]


@each("dtype", [torch.float32, torch.bfloat16])
@each("shape", SHAPES)
def test_tokens_are_the_references(isa, shape, dtype):
    check(*make(*shape, dtype=dtype))


@each("shape", SHAPES)
def test_every_option(isa, shape):
    n, h, v = shape
    options = {"temperature": torch.rand(n) + 0.5, "softcap": 30.0, "logit_scale": 1.3, "bias": torch.randn(v)}
    options["lora"] = HeadLora(torch.randn(4, h), 0.1 * torch.randn(v, 4), 0.5)
    check(*make(*shape), greedy=torch.arange(n) % 3 == 1, **options)
    check(*make(*shape), temperature=0.3)
    check(*make(*shape, scale=1e-3), logit_scale=2.0)


def test_tokens_of_several_row_chunks():
    """More rows than a tile of the reference holds: its chunks and the native sweep must key the noise alike."""
    hidden, weight, seed, position = make(3, 2, 2**21 + 5)
    native_tokens, tokens = (
        sample(hidden, weight, seed=seed, position=position, backend=backend).token for backend in ("cpu", "reference")
    )
    assert torch.equal(native_tokens, tokens)


@each("adapter", [torch.float32, torch.bfloat16])
def test_lora_on_a_bf16_head_is_not_rounded_to_bf16(isa, adapter):
    hidden, weight, seed, position = make(20, 64, 700, dtype=torch.bfloat16)
    lora = HeadLora(torch.randn(4, 64).to(adapter), torch.randn(700, 4).to(adapter), 0.5)
    out = sample(hidden, weight, seed=seed, position=position, lora=lora, backend="cpu")
    z = logits(hidden, weight, torch.float64, lora=lora)[1]
    want = torch.log_softmax(z, -1).gather(1, out.token[:, None])[:, 0]
    torch.testing.assert_close(out.logprob.double(), want, rtol=1e-4, atol=3e-4)


@each("order", ["rising", "falling"])
def test_every_column_a_new_best(isa, order):
    """Logits that rise with the column, so that the best one changes all the time; and its mirror image."""
    hidden, weight, seed, position = make(5, 8, 3000)
    bias = torch.linspace(-300, 300, 3000)
    check(hidden, weight, seed, position, bias=bias if order == "rising" else bias.flip(0))


@each("seed_of_numbers", range(3))
def test_tokens_of_a_flat_head(isa, seed_of_numbers):
    """Equal logits: the noise alone decides, and among 50 000 words its largest values are those of u near 0."""
    torch.manual_seed(seed_of_numbers)
    seed, position = torch.randint(-(2**63), 2**63 - 1, (40,)), torch.randint(0, 2**40, (40,))
    out = sample(torch.zeros(40, 1), torch.ones(50_001, 1), seed=seed, position=position, backend="cpu")
    noise = gumbel(seed, position, STREAM, 50_001)
    assert torch.equal(out.token, noise.argmax(-1))


def test_frequencies_at_a_ragged_vocabulary(isa):
    n, v = 20_000, 1003
    hidden, weight, *_ = make(1, 4, v)
    out = sample(hidden.expand(n, 4), weight, seed=torch.full((n,), 5), position=torch.arange(n), backend="cpu")
    p = logits(hidden, weight, torch.float64)[1][0].softmax(-1)
    rare = p * n < 5  # pooled
    counts = torch.bincount(out.token, minlength=v).double()
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = n * torch.cat([p[~rare], p[rare].sum()[None]])
    statistic = ((observed - expected).square() / expected).sum()
    assert torch.special.gammaincc((torch.tensor(len(expected)).double() - 1) / 2, statistic / 2) > 1e-3


def test_first_of_equal_maxima_across_strips_and_chunks(isa):
    n, v = 18, 1700
    hidden, weight = torch.randn(n, 8), torch.randn(1, 8).expand(v, 8).contiguous()
    zeros, greedy = torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool)
    first = torch.tensor([0, 5, 31, 32, 511, 512, 700, 1023, 1024, 1699, 3, 64, 100, 513, 544, 1000, 1500, 1698])
    for i, column in enumerate(first.tolist()):
        bias = torch.full((v,), -1.0)
        bias[column:] = 1.0
        out = sample(
            hidden[i : i + 1], weight, bias=bias, seed=zeros[:1], position=zeros[:1], greedy=greedy[:1], backend="cpu"
        )
        assert out.token.item() == column


def test_values_that_are_not_finite(isa):
    """Rows with NaN, infinite logits, nothing but -inf; tokens and places of NaN as the reference has them."""
    n, h, v = 20, 4, 1100
    hidden, weight, seed, position = make(n, h, v)
    hidden[3, 1] = torch.nan
    hidden[4] = torch.inf
    greedy = torch.arange(n) % 2 == 0
    cases = {
        "plain": torch.zeros(v),
        "one": torch.zeros(v),
        "two": torch.zeros(v),
        "none": torch.full((v,), -torch.inf),
    }
    cases["one"][700] = torch.nan
    cases["two"][900] = torch.inf
    cases["two"][901] = torch.inf
    cases["half"] = torch.where(torch.arange(v) < 1050, -torch.inf, 0.0)
    for name, bias in cases.items():
        rows = {"hidden": hidden, "weight": weight, "seed": seed, "position": position, "greedy": greedy, "bias": bias}
        got, want = (sample(**rows, outputs=ALL, backend=backend) for backend in ("cpu", "reference"))
        # inf - inf among the products of row 4 is NaN in one order of additions and may be an infinity in another
        kept = torch.arange(n) != 4
        assert torch.equal(got.token[kept], want.token[kept]), name
        torch.testing.assert_close(
            got.logprob[kept],
            want.logprob[kept],
            rtol=1e-5,
            atol=1e-5,
            equal_nan=True,
            msg=lambda m, name=name: name + m,
        )
        torch.testing.assert_close(got.entropy[kept], want.entropy[kept], rtol=1e-5, atol=1e-5, equal_nan=True)
    rows["bias"] = cases["one"]
    assert (sample(**rows, backend="cpu").token[kept & (torch.arange(n) != 3)] == 700).all()
    assert sample(**rows, backend="cpu").token[3] == 0


@each("dtype", [torch.float32, torch.bfloat16])
def test_threads_batch_and_repetition_do_not_change_the_bits(isa, dtype):
    hidden, weight, seed, position = make(37, 96, 5003, dtype=dtype)
    greedy = torch.arange(37) % 4 == 0
    temperature = torch.rand(37) + 0.5

    def run(rows):
        return sample(
            hidden[rows], weight, seed=seed[rows], position=position[rows], greedy=greedy[rows],
            temperature=temperature[rows], outputs=ALL, backend="cpu",
        )  # fmt: skip

    threads_change_no_bit(lambda: run(slice(None)), 1, 2, 3, 2)
    whole = run(slice(None))
    for rows in ([5], [36, 1, 8], list(range(20, 37))):
        same_bits(run(rows), [x[rows] for x in whole])


def test_any_strides_and_mixed_dtypes(isa):
    hidden, weight, seed, position = make(20, 64, 700, dtype=torch.bfloat16)
    greedy = torch.arange(20) % 3 == 0
    want = sample(hidden, weight, seed=seed, position=position, greedy=greedy, backend="cpu")
    wide = torch.full((20, 70), torch.nan, dtype=torch.bfloat16)
    wide[:, 3:67] = hidden
    tall = torch.full((1400, 65), torch.nan, dtype=torch.bfloat16)
    tall[::2, :64] = weight
    spread = torch.stack([seed, position], 1)
    got = sample(
        wide[:, 3:67], tall[::2, :64], seed=spread[:, 0], position=spread[:, 1],
        greedy=torch.stack([greedy, ~greedy], 1)[:, 0], backend="cpu",
    )  # fmt: skip
    assert torch.equal(got.token, want.token)
    assert torch.equal(got.logprob, want.logprob)
    turned = sample(
        hidden.T.contiguous().T, weight.T.contiguous().T, seed=seed, position=position, greedy=greedy, backend="cpu"
    )
    assert torch.equal(turned.logprob, want.logprob)
    for kinds in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)):
        mixed = sample(
            hidden.to(kinds[0]), weight.to(kinds[1]), seed=seed, position=position, greedy=greedy, backend="cpu"
        )
        assert torch.equal(mixed.token, want.token)
        torch.testing.assert_close(mixed.logprob, want.logprob, rtol=1e-4, atol=1e-4)


def test_empty_batch(isa):
    hidden, weight, seed, position = make(0, 8, 40)
    out = sample(hidden, weight, seed=seed, position=position, outputs=ALL, backend="cpu")
    assert out.token.shape == out.logprob.shape == out.entropy.shape == (0,)


def test_the_head_is_neither_copied_nor_multiplied_out():
    hidden, weight, seed, position = make(16, 64, 30_000, dtype=torch.bfloat16)
    assert largest_allocation(lambda: sample(hidden, weight, seed=seed, position=position, backend="cpu")) < 10_000


def test_filters_are_the_references():
    hidden, weight, seed, position = make(12, 8, 301)
    for options in ({"top_k": 5}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.1}):
        auto, reference = (
            sample(hidden, weight, seed=seed, position=position, backend=backend, **options)
            for backend in ("auto", "reference")
        )
        assert torch.equal(auto.token, reference.token)
        assert torch.equal(auto.logprob, reference.logprob)
        with pytest.raises(
            registry.BackendUnavailableError, match="'cpu' cannot serve sample: top_k, top_p and min_p need all"
        ):
            sample(hidden, weight, seed=seed, position=position, backend="cpu", **options)
        with registry.use_backend("cpu"), pytest.raises(registry.BackendUnavailableError, match="cannot serve sample"):
            sample(hidden, weight, seed=seed, position=position, **options)
    plain = sample(hidden, weight, seed=seed, position=position, backend="cpu")
    for options in ({"top_k": 301}, {"top_k": 999, "top_p": 1.0}):  # they keep everything
        kept = sample(hidden, weight, seed=seed, position=position, backend="cpu", **options)
        assert torch.equal(kept.logprob, plain.logprob)


def test_float64_on_either_side_is_the_references():
    hidden, weight, seed, position = make(3, 8, 40)
    for h, w in ((hidden.double(), weight), (hidden, weight.double())):
        assert sample(h, w, seed=seed, position=position).logprob.dtype == torch.float64
        with pytest.raises(registry.BackendUnavailableError, match=r"not in torch\.float64"):
            sample(h, w, seed=seed, position=position, backend="cpu")
