"""`sample` on every backend: the definition, what a draw depends on, greedy rows, filters, scores, hostile rows."""

import itertools

import pytest
import torch
from rlhf_kernels import HeadLora, SampleOutputs, linear_logprob, sample
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.philox import gumbel
from rlhf_kernels.runtime.testing import assert_ok, tier1
from rlhf_kernels.sample import reference
from rlhf_kernels.sample.reference import STREAM

from . import dense as vocabulary
from .checks import ISAS, alike, each, largest_allocation, needs_native, threads_change_no_bit

ALL = SampleOutputs._fields


@pytest.fixture(params=["reference", *ISAS])
def backend(request):
    """The reference, and `auto` with each instruction set: filters and float64 are then the reference's again."""
    if request.param == "reference":
        with registry.use_backend("reference"):
            yield "reference"
    else:
        with native.use_isa(request.param):
            assert registry.resolve("sample", "auto", torch.zeros(1)) == "cpu"
            yield "cpu"


def make(n, h, v, *, dtype=torch.float32, scale=1.0):
    """hidden, weight, and keys of the noise with bits in all of their words."""
    hidden, weight = (scale * torch.randn(n, h)).to(dtype), torch.randn(v, h).to(dtype)
    return hidden, weight, torch.randint(-(2**63), 2**63 - 1, (n,)), torch.randint(0, 2**40, (n,))


def logits(hidden, weight, dtype, *, temperature=1.0, **head):
    """Logits [N, V] before and after the temperature."""
    z = vocabulary.logits(hidden.to(dtype), weight.to(dtype), **head)
    return z, vocabulary.heated(z, temperature)


def check(hidden, weight, seed, position, *, tolerance=1e-4, greedy=None, **options):
    """Against the definition: float64 logits plus the reference's noise; statistics by tier 1."""
    n, v = hidden.shape[0], weight.shape[0]
    out = sample(hidden, weight, seed=seed, position=position, greedy=greedy, outputs=ALL, **options)
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


def every_option(n, h, v):
    lora = HeadLora(torch.randn(4, h), 0.1 * torch.randn(v, 4), 0.5)
    options = {"temperature": torch.rand(n) + 0.5, "bias": torch.randn(v), "softcap": 30.0, "logit_scale": 1.3}
    return options | {"lora": lora, "greedy": torch.arange(n) % 3 == 1}


# ---- the definition --------------------------------------------------------------------------------------------------


SHAPES = [(1, 3, 2), (1, 1, 1), (2, 17, 17), (15, 64, 511), (16, 32, 512), (17, 70, 513), (33, 33, 1031)]
SHAPES += [(130, 96, 2100)]
TRITON_SHAPES = [(1, 3, 2), (1, 1, 1), (2, 17, 17), (15, 64, 129), (17, 70, 300), (33, 33, 517), (35, 40, 400)]


def test_tokens_are_the_references(backend):
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    taken = itertools.product(SHAPES, dtypes)
    if backend == "triton":
        taken = zip(TRITON_SHAPES, itertools.cycle(dtypes), strict=False)
    for shape, dtype in taken:
        torch.manual_seed(0)
        check(*make(*shape, dtype=dtype))


def test_every_option(backend):
    for shape in TRITON_SHAPES[2::2] if backend == "triton" else SHAPES:
        torch.manual_seed(0)
        options = every_option(*shape)
        check(*make(*shape), **options)
        check(*make(*shape), temperature=0.3)
        check(*make(*shape, scale=1e-3), logit_scale=2.0)


@needs_native
def test_tokens_of_several_row_chunks():
    """More rows than a tile of the reference holds: its chunks and the native sweep must key the noise alike."""
    hidden, weight, seed, position = make(3, 2, 2**21 + 5)
    native_tokens, tokens = (
        sample(hidden, weight, seed=seed, position=position, backend=backend).token for backend in ("cpu", "reference")
    )
    assert torch.equal(native_tokens, tokens)


@each("rank", [1, 16, 50])
@each("adapter", [torch.float32, torch.bfloat16])
def test_lora_on_a_bf16_head_is_not_rounded_to_bf16(backend, adapter, rank):
    hidden, weight, seed, position = make(20, 64, 300 if backend == "triton" else 700, dtype=torch.bfloat16)
    A, B = (torch.randn(*shape).to(adapter) for shape in ((rank, 64), (len(weight), rank)))
    lora = HeadLora(A.T.contiguous().T, B, 0.5)
    out = sample(hidden, weight, seed=seed, position=position, lora=lora)
    z = logits(hidden, weight, torch.float64, lora=lora)[1]
    want = torch.log_softmax(z, -1).gather(1, out.token[:, None])[:, 0]
    torch.testing.assert_close(out.logprob.double(), want, rtol=1e-4, atol=3e-4)


@each("order", ["rising", "falling"])
def test_every_column_a_new_best(backend, order):
    """Logits that rise with the column, so that the best one changes all the time; and its mirror image."""
    v = 600 if backend == "triton" else 3000
    bias = torch.linspace(-300, 300, v)
    check(*make(5, 8, v), bias=bias if order == "rising" else bias.flip(0))


def test_tokens_of_a_flat_head(backend):
    """Equal logits: the noise alone decides, and among 50 000 words its largest values are those of u near 0."""
    for n, v in [(20, 2501)] if backend == "triton" else [(40, 50_001)] * 3:
        seed, position = torch.randint(-(2**63), 2**63 - 1, (n,)), torch.randint(0, 2**40, (n,))
        out = sample(torch.zeros(n, 1), torch.ones(v, 1), seed=seed, position=position)
        assert torch.equal(out.token, gumbel(seed, position, STREAM, v).argmax(-1))


def many_draws(n, **options):
    """n draws from one row of logits at n positions, and the probabilities before any filter."""
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(1, 4, generator=g), torch.randn(11, 4, generator=g)
    out = sample(hidden.expand(n, 4), weight, seed=torch.full((n,), 5), position=torch.arange(n), **options)
    return out, (hidden @ weight.T)[0]


def check_frequencies(token, p):
    counts = torch.bincount(token, minlength=p.shape[0]).double()
    assert counts[p == 0].sum() == 0
    live = p > 0
    expected = (p[live] / p[live].sum() * token.shape[0]).double()
    statistic = ((counts[live] - expected).square() / expected).sum()
    freedom = (live.sum().double() - 1) / 2
    assert torch.special.gammaincc(freedom, statistic / 2) > 1e-3  # p-value of the chi-square test


@each("temperature", [1.0, 0.5, 2.0])
def test_frequencies_follow_the_softmax(backend, temperature):
    out, logits = many_draws(20000, temperature=temperature)
    p = (logits.double() / temperature).softmax(-1)
    check_frequencies(out.token, p)
    torch.testing.assert_close(out.logprob, p.log()[out.token].float(), rtol=1e-5, atol=1e-5)


# ---- filters ---------------------------------------------------------------------------------------------------------


def likeliest(p, order, size):
    """Probabilities of the first of the sorted words alone."""
    return torch.zeros_like(p).index_put_((order[:size],), p[:size] / p[:size].sum())


def test_top_k_and_top_p(backend):
    n = 20000
    logits = many_draws(1)[1].double()
    p, order = logits.softmax(-1).sort(descending=True)

    out, _ = many_draws(n, top_k=3, outputs=("token", "logprob", "entropy"))
    kept = likeliest(p, order, 3)
    check_frequencies(out.token, kept)
    torch.testing.assert_close(out.logprob.double(), kept.log()[out.token], rtol=1e-5, atol=1e-5)
    entropy = torch.distributions.Categorical(probs=kept[order[:3]]).entropy()
    torch.testing.assert_close(out.entropy.double(), entropy.expand(n), rtol=1e-5, atol=1e-5)

    mass = 0.8
    size = int((p.cumsum(-1) < mass).sum()) + 1  # the token that crosses the border belongs to the set
    assert 1 < size < 11
    check_frequencies(many_draws(n, top_p=mass)[0].token, likeliest(p, order, size))
    assert (many_draws(50, top_k=1)[0].token == order[0]).all()
    assert (many_draws(50, top_p=1e-6)[0].token == order[0]).all()
    everything = many_draws(50)[0]
    for options in ({"top_k": 11}, {"top_k": 500}, {"top_p": 1.0}):
        assert torch.equal(many_draws(50, **options)[0].token, everything.token)


@each("scale", [0.1, 1.0, 5.0])
def test_top_p_by_the_likeliest_words_and_by_all(scale, monkeypatch):
    """With ties, which bf16 logits have many of; a row keeps the same words alone."""
    torch.manual_seed(0)
    for z in (torch.randn(9, 300) * scale, torch.zeros(2, 300), torch.randn(9, 300).bfloat16().float() * scale):
        for mass in (1e-6, 0.3, 0.95):
            expected = reference._beyond_top_p(z, mass)
            for most in (1, 60, 1024):
                monkeypatch.setattr(reference, "_LIKELIEST", most)
                dropped = reference.filter_(z.clone(), 0, mass, 0.0) == -torch.inf
                assert int((dropped != expected).sum()) <= 1  # a word whose mass is at the border, by rounding
                alone = torch.cat([reference.filter_(row[None].clone(), 0, mass, 0.0) for row in z]) == -torch.inf
                assert torch.equal(alone, dropped)


def test_noise_is_made_for_kept_words_alone_where_they_are_few():
    torch.manual_seed(0)
    z, seed, position = torch.randn(30, 400), torch.arange(30), torch.arange(30) * 5
    kept = torch.rand(30, 400) < torch.tensor([0.01, 0.1, 0.5]).repeat(10)[:, None]
    kept[:, 3] = True
    z = z.masked_fill(~kept, -1e30)
    greedy = (torch.arange(30) % 7 == 0, z.argmax(-1))
    for rows in (slice(None), slice(4, 5), slice(0, 1)):
        own = (greedy[0][rows], greedy[1][rows])
        whole = reference.choose(z[rows], seed[rows], position[rows], own)
        assert torch.equal(reference.choose(z[rows], seed[rows], position[rows], own, kept[rows]), whole)


def test_min_p(backend):
    """Words of at least so much of the largest probability, after top_k and top_p."""
    n = 20000
    logits = many_draws(1)[1].double()
    p, order = logits.softmax(-1).sort(descending=True)
    size = 4
    share = float((p[size - 1] + p[size]) / 2 / p[0])
    kept = likeliest(p, order, size)
    out, _ = many_draws(n, min_p=share)
    check_frequencies(out.token, kept)
    torch.testing.assert_close(out.logprob.double(), kept.log()[out.token], rtol=1e-5, atol=1e-5)
    # the word that crosses the border of top_p is the last that min_p keeps; of min_p's words it would be beyond it
    for more in ({"top_k": size + 2}, {"top_p": float(p[: size - 1].sum()) + 1e-4}):
        assert torch.equal(many_draws(n, min_p=share, **more)[0].token, out.token)
    fewer = many_draws(n, min_p=share, top_k=size - 1)[0]
    assert torch.equal(fewer.token, many_draws(n, top_k=size - 1)[0].token)
    assert (many_draws(50, min_p=1.0)[0].token == order[0]).all()


@needs_native
def test_filters_are_the_references():
    hidden, weight, seed, position = make(12, 8, 301)
    for options in ({"top_k": 5}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.1}):
        auto, reference = (
            sample(hidden, weight, seed=seed, position=position, backend=backend, **options)
            for backend in ("auto", "reference")
        )
        assert torch.equal(auto.token, reference.token)
        assert torch.equal(auto.logprob, reference.logprob)
        message = "'cpu' cannot serve sample: top_k, top_p and min_p need all"
        with pytest.raises(registry.BackendUnavailableError, match=message):
            sample(hidden, weight, seed=seed, position=position, backend="cpu", **options)
        for asked in (registry.use_backend("cpu"), registry.use_op_backend("sample", "cpu")):
            with asked, pytest.raises(registry.BackendUnavailableError, match="cannot serve sample"):
                sample(hidden, weight, seed=seed, position=position, **options)
    plain = sample(hidden, weight, seed=seed, position=position, backend="cpu")
    for options in ({"top_k": 301}, {"top_k": 999, "top_p": 1.0}):  # they keep everything
        kept = sample(hidden, weight, seed=seed, position=position, backend="cpu", **options)
        assert torch.equal(kept.logprob, plain.logprob)


@needs_native
def test_float64_on_either_side_is_the_references():
    hidden, weight, seed, position = make(3, 8, 40)
    for h, w in ((hidden.double(), weight), (hidden, weight.double())):
        assert sample(h, w, seed=seed, position=position).logprob.dtype == torch.float64
        with pytest.raises(registry.BackendUnavailableError, match=r"not in torch\.float64"):
            sample(h, w, seed=seed, position=position, backend="cpu")


# ---- what a draw depends on, and its scores --------------------------------------------------------------------------


@each("dtype", [torch.float32, torch.bfloat16])
@each("options", ["none", "all"])
def test_the_rest_of_the_batch_does_not_change_the_bits(backend, dtype, options):
    n, h, v = (82, 24, 200) if backend == "triton" else (82, 96, 5003)
    hidden, weight, seed, position = make(n, h, v, dtype=dtype)
    knobs = {} if options == "none" else every_option(n, h, v)

    if backend == "reference":
        knobs.pop("lora", None)  # torch multiplies with it, and may do so in another order

    def run(rows, later=0):
        own = {k: x[rows] if k in ("temperature", "greedy") else x for k, x in knobs.items()}
        return sample(hidden[rows], weight, seed=seed[rows], position=position[rows] + later, outputs=ALL, **own)

    whole = run(slice(None))
    first = list(range(17))
    for rows in ([81], [36, 1, 8], list(range(49, 82)), *([] if backend == "triton" else (list(range(60, 75)), first))):
        some = run(rows)
        assert torch.equal(some.token, whole.token[rows])
        alike(backend, some[1:], [x[rows] for x in whole[1:]])
    assert not torch.equal(run(first, later=1).token, whole.token[first])
    seed += 1
    assert not torch.equal(run(first).token, whole.token[first])
    if backend == "cpu":
        threads_change_no_bit(lambda: run(slice(None)), 1, 2, 3, 2)


@each("with_options", [False, True])
def test_logprob_and_entropy_are_those_of_linear_logprob(with_options, backend):
    hidden, weight, seed, position = make(140, 8, 32001)
    options = {}
    if with_options:
        options = every_option(140, 8, 32001)
        options.pop("greedy")
    greedy = torch.arange(140) % 2 == 0
    out = sample(hidden, weight, seed=seed, position=position, greedy=greedy, outputs=ALL, **options)
    scored = linear_logprob(hidden, weight, out.token, outputs=("logprob", "entropy"), backend="reference", **options)
    if backend == "reference":
        assert torch.equal(out.logprob, scored.logprob)
        assert torch.equal(out.entropy, scored.entropy)
    torch.testing.assert_close(out.logprob, scored.logprob, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(out.entropy, scored.entropy, rtol=1e-5, atol=2e-5)
    assert out.logprob.dtype == torch.float32


@each("dtype", [torch.float32, torch.bfloat16])
@each("options", [{}, {"softcap": 7.0, "logit_scale": 0.3}, {"bias": True}])
@each("scale", [0.1, 1.0, 30.0])
def test_a_logprob_has_the_bits_of_linear_logprob(dtype, options, scale, backend):
    """Rows with temperatures and greedy rows, several blocks of the vocabulary, scores of many logits and of one."""
    if backend == "reference":
        pytest.skip("torch promises no bits")
    n, vocabulary = 37, 1203
    hidden, weight, seed, position = make(n, 40, vocabulary, dtype=dtype, scale=scale)
    options = {**options, **({"bias": torch.randn(vocabulary)} if "bias" in options else {})}
    temperature = torch.tensor([1.0, 0.7, 1.3]).repeat(n)[:n]
    for heat in (1.0, temperature):
        keys = {"seed": seed, "position": position, "greedy": torch.arange(n) % 5 == 0, "temperature": heat}
        drawn = sample(hidden, weight, **keys, **options)
        for some in (slice(None), slice(3, 20)):  # other neighbours
            own = heat if isinstance(heat, float) else heat[some]
            scored = linear_logprob(hidden[some], weight, drawn.token[some], temperature=own, **options).logprob
            assert torch.equal(drawn.logprob[some], scored)


# ---- greedy rows, forbidden tokens -----------------------------------------------------------------------------------


def test_greedy_is_the_first_maximum_before_the_temperature(backend):
    one = torch.ones(1, dtype=torch.int64)
    row = {"seed": one, "position": one, "greedy": one.bool(), "temperature": 3.0}
    weight = torch.tensor([[1.0], [3.0], [3.0], [2.0]])
    assert sample(torch.ones(1, 1), weight, **row).token == 1
    # Two logits one ulp apart that the division by 3 rounds onto each other
    x = torch.arange(1, 2, 2.0**-23)
    pair = int(((x[1:] / 3) == (x[:-1] / 3)).nonzero()[0])
    weight = x[pair : pair + 2, None]
    assert sample(torch.ones(1, 1), weight, **row).token == 1
    assert sample(torch.ones(1, 1), weight * torch.tensor([[0.0], [-0.0]]), **row).token == 0
    hidden, weight, seed, position = make(40, 33, 300 if backend == "triton" else 1301)
    greedy = torch.arange(40) % 2 == 0
    keys = {"seed": seed, "position": position, "temperature": 5.0}
    drawn, mixed = sample(hidden, weight, **keys), sample(hidden, weight, greedy=greedy, **keys)
    best = (hidden.double() @ weight.double().T).argmax(-1)
    assert torch.equal(mixed.token, torch.where(greedy, best, drawn.token))
    assert not torch.equal(drawn.token, best)
    assert torch.equal(sample(hidden, weight, greedy=torch.ones(40).bool(), **keys).token, best)


def test_first_of_equal_maxima_across_strips_and_chunks(backend):
    columns, v = [0, 63, 64, 128, 512, 699], 700
    if backend != "triton":
        columns, v = [0, 3, 5, 31, 32, 64, 100, 511, 512, 513, 544, 700, 1000, 1023, 1024, 1500, 1698, 1699], 1700
    hidden, weight = torch.randn(len(columns), 8), torch.randn(1, 8).expand(v, 8).contiguous()
    zero = torch.zeros(1, dtype=torch.int64)
    for i, column in enumerate(columns):
        bias = torch.full((v,), -1.0)
        bias[column:] = 1.0
        row = {"seed": zero, "position": zero, "greedy": zero == 0, "bias": bias}
        assert sample(hidden[i : i + 1], weight, **row).token.item() == column


@each("lanes", [5, 40])
def test_some_rows_never_draw_what_is_forbidden(backend, lanes):
    v = 300 if backend == "triton" else 600
    hidden, weight, seed, position = make(lanes, 8, v)
    forbids, greedy = torch.arange(lanes) % 3 != 0, torch.arange(lanes) % 2 == 0
    keys = {"seed": seed, "position": position, "greedy": greedy, "outputs": ALL, "temperature": 0.8}
    free = sample(hidden, weight, **keys)
    forbidden = torch.cat([free.token, torch.tensor([v - 1, 0])])  # what they would draw, and both ends
    out = sample(hidden, weight, forbidden=forbidden, forbids=forbids, **keys)
    for got, want in zip(out, free, strict=True):
        assert torch.equal(got[~forbids], want[~forbids])
    left = torch.ones(v, dtype=torch.bool)
    left[forbidden] = False
    rest = sample(hidden, weight[left], **keys)
    assert torch.equal(out.token[forbids & greedy], left.nonzero()[rest.token][:, 0][forbids & greedy])
    noise = gumbel(seed, position, 1, v) + hidden @ weight.T / 0.8
    drawn = noise.masked_fill(~left, -torch.inf).argmax(-1)
    assert torch.equal(out.token[forbids & ~greedy], drawn[forbids & ~greedy])
    z = (hidden @ weight.T / 0.8).double().masked_fill(~left, -torch.inf)
    want = z.log_softmax(-1).gather(1, out.token[:, None])[:, 0]
    torch.testing.assert_close(out.logprob[forbids], want[forbids].float(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(out.entropy[forbids], rest.entropy[forbids], rtol=1e-5, atol=2e-5)
    if backend != "triton":
        filtered = sample(hidden, weight, forbidden=forbidden, forbids=forbids, top_k=2, **keys)
        assert left[filtered.token[forbids]].all()


def test_forbidding_with_a_softcap_that_bites(backend):
    hidden, weight, seed, position = make(20, 8, 40, scale=5.0)
    forbidden = torch.arange(39)
    out = sample(
        hidden, weight, seed=seed, position=position, softcap=1.0, forbidden=forbidden, forbids=torch.ones(20).bool()
    )
    assert out.token.tolist() == [39] * 20
    torch.testing.assert_close(out.logprob, torch.zeros(20), rtol=0, atol=1e-5)


def test_something_must_be_left_to_draw(backend):
    hidden, weight = torch.randn(2, 8), torch.randn(5, 8)
    keys = {"seed": torch.zeros(2, dtype=torch.int64), "position": torch.zeros(2, dtype=torch.int64)}
    everything, some = torch.arange(5), torch.tensor([False, True])
    with pytest.raises(ValueError, match="forbidden: expected fewer than the 5 tokens of the vocabulary, got all"):
        sample(hidden, weight, forbidden=everything, forbids=some, **keys)
    for forbidden, forbids in ((everything, some & False), (everything.clamp(max=3), some), (everything[:4], some)):
        drawn = sample(hidden, weight, forbidden=forbidden, forbids=forbids, **keys)
        assert not forbids[1] or drawn.token[1] == 4


def test_forbidding_needs_both_arguments():
    hidden, weight, seed, position = make(2, 3, 5)
    with pytest.raises(ValueError, match="forbids: expected it together with forbidden"):
        sample(hidden, weight, seed=seed, position=position, forbidden=torch.tensor([1]))
    with pytest.raises(TypeError, match="forbids"):
        sample(hidden, weight, seed=seed, position=position, forbidden=torch.tensor([1]), forbids=torch.zeros(2))


# ---- hostile rows and memory -----------------------------------------------------------------------------------------


@each("vocab", [1, 17, 517])
def test_sizes_and_hostile_rows(backend, vocab):
    """Peaked, all at −200, and a padded column at −inf, which is never drawn."""
    vocab = min(vocab, 200) if backend == "triton" else vocab
    for n in (0, 1, 33) if backend == "triton" else (0, 1, 2, 127):
        hidden, weight, seed, position = make(n, 6, vocab, scale=30.0)
        keys = {"seed": seed, "position": position, "outputs": ALL}
        out = sample(hidden, weight, **keys)
        assert out.token.shape == out.logprob.shape == out.entropy.shape == (n,)
        assert ((out.token >= 0) & (out.token < vocab)).all()
        assert out.logprob.isfinite().all()
        assert out.entropy.isfinite().all()
        bias = torch.full((vocab,), -200.0)
        if vocab > 1:
            bias[-1] = -torch.inf
        below = sample(hidden, weight, bias=bias - 1e5, greedy=torch.ones(n).bool(), **keys)
        assert (below.token < vocab).all()  # beyond the vocabulary a product is 0, which is more
        out, live = sample(torch.zeros_like(hidden), weight, bias=bias, **keys), torch.tensor(float(max(vocab - 1, 1)))
        assert (out.token < live).all()
        torch.testing.assert_close(out.logprob, (-live.log()).expand(n))
        torch.testing.assert_close(out.entropy, live.log().expand(n))


def test_values_that_are_not_finite(backend):
    """Rows with NaN, infinite logits, nothing but −inf; tokens and places of NaN as the reference has them."""
    n, v = 20, 300 if backend == "triton" else 700
    hidden, weight, seed, position = make(n, 4, v)
    hidden[3, 1], hidden[4] = torch.nan, torch.inf
    biases = {name: torch.zeros(v) for name in ("plain", "one", "two", "none", "half")}
    biases["one"][v - 100] = torch.nan
    biases["two"][v - 150 : v - 148] = torch.inf
    biases["none"][:] = -torch.inf
    biases["half"][: v - 50] = -torch.inf
    # inf - inf among the products of row 4 is NaN in one order of additions and may be an infinity in another
    kept = torch.arange(n) != 4
    rows = {"seed": seed, "position": position, "greedy": torch.arange(n) % 2 == 0}
    for name, bias in biases.items():
        got, want = (sample(hidden, weight, bias=bias, outputs=ALL, backend=on, **rows) for on in ("auto", "reference"))
        assert torch.equal(got.token[kept], want.token[kept]), name
        for a, b in zip(got[1:], want[1:], strict=True):
            torch.testing.assert_close(a[kept], b[kept], rtol=1e-5, atol=1e-5, equal_nan=True)
    one = sample(hidden, weight, bias=biases["one"], **rows).token
    assert (one[kept & (torch.arange(n) != 3)] == v - 100).all()
    assert one[3] == 0


def test_any_strides_mixed_dtypes_and_red_zones(backend):
    hidden, weight, seed, position = make(20, 64, 300, dtype=torch.bfloat16)
    greedy = torch.arange(20) % 3 == 0
    want = sample(hidden, weight, seed=seed, position=position, greedy=greedy)
    wide, tall = (torch.full(shape, torch.nan, dtype=torch.bfloat16) for shape in ((21, 70), (602, 65)))
    wide[:20, 3:67], tall[:600:2, :64] = hidden, weight
    keys, flags = torch.stack([seed, position], 1), torch.stack([greedy, ~greedy], 1)
    got = sample(wide[:20, 3:67], tall[:600:2, :64], seed=keys[:, 0], position=keys[:, 1], greedy=flags[:, 0])
    rows = {"seed": seed, "position": position, "greedy": greedy}
    over = sample(hidden.T.contiguous().T, weight.T.contiguous().T, **rows)
    for other in (got, over):
        assert torch.equal(other.token, want.token)
        alike(backend, [other.logprob], [want.logprob])
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    for one, other in itertools.product(kinds, kinds):
        mixed = sample(hidden.to(one), weight.to(other), **rows)
        assert torch.equal(mixed.token, want.token)
        torch.testing.assert_close(mixed.logprob, want.logprob, rtol=1e-4, atol=1e-4)


@needs_native
def test_the_head_is_neither_copied_nor_multiplied_out():
    hidden, weight, seed, position = make(16, 64, 30_000, dtype=torch.bfloat16)
    assert largest_allocation(lambda: sample(hidden, weight, seed=seed, position=position, backend="cpu")) < 10_000


def test_asking_for_gradients_raises():
    hidden, weight, seed, position = make(4, 3, 7)
    weight.requires_grad_()
    with pytest.raises(ValueError, match=r"weight: expected one that needs no gradient .* linear_logprob"):
        sample(hidden, weight, seed=seed, position=position)
    with torch.no_grad():
        assert sample(hidden, weight, seed=seed, position=position).token.shape == (4,)


@each(
    ("change", "error", "message"),
    [
        ({"seed": torch.zeros(2)}, TypeError, "seed: expected int64"),
        ({"position": torch.zeros(3, dtype=torch.int64)}, ValueError, "position: expected shape"),
        ({"greedy": torch.zeros(2)}, TypeError, "greedy: expected bool"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"temperature": torch.zeros(2)}, ValueError, "temperature: expected values > 0"),
        ({"top_k": 0}, ValueError, "top_k"),
        ({"top_p": 0.0}, ValueError, "top_p"),
        ({"top_p": 1.5}, ValueError, "top_p"),
        ({"min_p": 0.0}, ValueError, r"min_p: expected None or a number in \(0, 1\], got 0.0"),
        ({"min_p": 1.1}, ValueError, "min_p"),
        ({"outputs": ("tokens",)}, ValueError, "outputs"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    zeros = torch.zeros(2, dtype=torch.int64)
    arguments = {"hidden": torch.randn(2, 3), "weight": torch.randn(5, 3), "seed": zeros, "position": zeros}
    with pytest.raises(error, match=message):
        sample(**(arguments | change))
