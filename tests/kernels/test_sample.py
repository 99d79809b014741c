"""`sample` on every backend: the distribution it draws from, what a draw depends on, greedy rows, filters, scores."""

import pytest
import torch
from rlhf_kernels.linear_logprob import HeadLora, linear_logprob
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.philox import gumbel
from rlhf_kernels.sample import SampleOutputs, reference, sample

from .checks import ISAS, each


@pytest.fixture(autouse=True, params=["reference", *ISAS])
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
    g = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(n, h, generator=g)).to(dtype)
    weight = torch.randn(v, h, generator=g).to(dtype)
    return hidden, weight, torch.arange(n) % 3, 10 * torch.arange(n)


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
def test_frequencies_follow_the_softmax(temperature):
    out, logits = many_draws(20000, temperature=temperature)
    p = (logits.double() / temperature).softmax(-1)
    check_frequencies(out.token, p)
    torch.testing.assert_close(out.logprob, p.log()[out.token].float(), rtol=1e-5, atol=1e-5)


def test_top_k_and_top_p():
    n = 20000
    logits = many_draws(1)[1].double()
    p, order = logits.softmax(-1).sort(descending=True)

    out, _ = many_draws(n, top_k=3, outputs=("token", "logprob", "entropy"))
    kept = torch.zeros(11, dtype=torch.float64)
    kept[order[:3]] = p[:3] / p[:3].sum()
    check_frequencies(out.token, kept)
    torch.testing.assert_close(out.logprob.double(), kept.log()[out.token], rtol=1e-5, atol=1e-5)
    entropy = torch.distributions.Categorical(probs=kept[order[:3]]).entropy()
    torch.testing.assert_close(out.entropy.double(), entropy.expand(n), rtol=1e-5, atol=1e-5)

    mass = 0.8
    size = int((p.cumsum(-1) < mass).sum()) + 1  # the token that crosses the border belongs to the set
    assert 1 < size < 11
    out, _ = many_draws(n, top_p=mass)
    kept = torch.zeros(11, dtype=torch.float64)
    kept[order[:size]] = p[:size] / p[:size].sum()
    check_frequencies(out.token, kept)

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


def test_min_p():
    """Words of at least so much of the largest probability, after top_k and top_p."""
    n = 20000
    logits = many_draws(1)[1].double()
    p, order = logits.softmax(-1).sort(descending=True)
    size = 4
    share = float((p[size - 1] + p[size]) / 2 / p[0])
    kept = torch.zeros(11, dtype=torch.float64)
    kept[order[:size]] = p[:size] / p[:size].sum()
    out, _ = many_draws(n, min_p=share)
    check_frequencies(out.token, kept)
    torch.testing.assert_close(out.logprob.double(), kept.log()[out.token], rtol=1e-5, atol=1e-5)
    # the word that crosses the border of top_p is the last that min_p keeps; of min_p's words it would be beyond it
    for more in ({"top_k": size + 2}, {"top_p": float(p[: size - 1].sum()) + 1e-4}):
        assert torch.equal(many_draws(n, min_p=share, **more)[0].token, out.token)
    fewer = many_draws(n, min_p=share, top_k=size - 1)[0]
    assert torch.equal(fewer.token, many_draws(n, top_k=size - 1)[0].token)
    assert (many_draws(50, min_p=1.0)[0].token == order[0]).all()


def test_a_draw_depends_on_seed_and_position_only():
    hidden, weight, seed, position = make(12, 8, 301)
    whole = sample(hidden, weight, seed=seed, position=position)
    order = torch.randperm(12)
    shuffled = sample(hidden[order], weight, seed=seed[order], position=position[order])
    assert torch.equal(shuffled.token, whole.token[order])
    for i in range(12):
        row = slice(i, i + 1)
        alone = sample(hidden[row], weight, seed=seed[row], position=position[row])
        assert alone.token == whole.token[i]
        torch.testing.assert_close(alone.logprob, whole.logprob[row])
    assert not torch.equal(sample(hidden, weight, seed=seed + 1, position=position).token, whole.token)
    assert not torch.equal(sample(hidden, weight, seed=seed, position=position + 1).token, whole.token)


def test_token_is_the_argmax_of_logits_plus_gumbel():
    hidden, weight, seed, position = make(15, 8, 101)
    noise = gumbel(seed, position, 1, 101)
    out = sample(hidden, weight, seed=seed, position=position, temperature=0.7)
    assert torch.equal(out.token, (hidden @ weight.T / 0.7 + noise).argmax(-1))


@each("with_options", [False, True])
def test_logprob_and_entropy_are_those_of_linear_logprob(with_options, backend):
    hidden, weight, seed, position = make(140, 8, 32001)
    options = {}
    if with_options:
        options = {
            "temperature": torch.rand(140) + 0.5,
            "softcap": 4.0,
            "logit_scale": 1.5,
            "bias": torch.randn(32001),
            "lora": HeadLora(torch.randn(2, 8), torch.randn(32001, 2), 0.3),
        }
    greedy = torch.arange(140) % 2 == 0
    out = sample(hidden, weight, seed=seed, position=position, greedy=greedy, outputs=SampleOutputs._fields, **options)
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
        drawn = sample(
            hidden, weight, seed=seed, position=position, greedy=torch.arange(n) % 5 == 0, temperature=heat, **options
        )
        scored = linear_logprob(hidden, weight, drawn.token, temperature=heat, **options).logprob
        assert torch.equal(drawn.logprob, scored)
        some = slice(3, 20)  # other neighbours
        heat = heat if isinstance(heat, float) else heat[some]
        assert torch.equal(
            drawn.logprob[some],
            linear_logprob(hidden[some], weight, drawn.token[some], temperature=heat, **options).logprob,
        )


def test_greedy_rows_in_a_mixed_batch():
    hidden, weight, seed, position = make(10, 8, 50)
    greedy = torch.arange(10) < 4
    mixed = sample(hidden, weight, seed=seed, position=position, greedy=greedy)
    drawn = sample(hidden, weight, seed=seed, position=position)
    best = (hidden @ weight.T).argmax(-1)
    assert torch.equal(mixed.token[:4], best[:4])
    assert torch.equal(mixed.token[4:], drawn.token[4:])
    assert not torch.equal(mixed.token, drawn.token)
    all_greedy = sample(hidden, weight, seed=seed, position=position, greedy=torch.ones(10, dtype=torch.bool))
    assert torch.equal(all_greedy.token, best)


@each("lanes", [5, 40])
def test_some_rows_never_draw_what_is_forbidden(lanes):
    hidden, weight, seed, position = make(lanes, 8, 600)
    forbids, greedy = torch.arange(lanes) % 3 != 0, torch.arange(lanes) % 2 == 0
    keys = {"seed": seed, "position": position, "greedy": greedy, "outputs": SampleOutputs._fields, "temperature": 0.8}
    free = sample(hidden, weight, **keys)
    forbidden = torch.cat([free.token, torch.tensor([599, 0])])  # what they would draw, and both ends
    out = sample(hidden, weight, forbidden=forbidden, forbids=forbids, **keys)
    for got, want in zip(out, free, strict=True):
        assert torch.equal(got[~forbids], want[~forbids])
    left = torch.ones(600, dtype=torch.bool)
    left[forbidden] = False
    rest = sample(hidden, weight[left], **keys)
    assert torch.equal(out.token[forbids & greedy], left.nonzero()[rest.token][:, 0][forbids & greedy])
    noise = gumbel(seed, position, 1, 600) + hidden @ weight.T / 0.8
    drawn = noise.masked_fill(~left, -torch.inf).argmax(-1)
    assert torch.equal(out.token[forbids & ~greedy], drawn[forbids & ~greedy])
    z = (hidden @ weight.T / 0.8).double().masked_fill(~left, -torch.inf)
    want = z.log_softmax(-1).gather(1, out.token[:, None])[:, 0]
    torch.testing.assert_close(out.logprob[forbids], want[forbids].float(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(out.entropy[forbids], rest.entropy[forbids], rtol=1e-5, atol=2e-5)
    filtered = sample(hidden, weight, forbidden=forbidden, forbids=forbids, top_k=2, **keys)
    assert left[filtered.token[forbids]].all()


def test_forbidding_with_a_softcap_that_bites():
    hidden, weight, seed, position = make(20, 8, 40, scale=5.0)
    forbidden = torch.arange(39)
    out = sample(
        hidden, weight, seed=seed, position=position, softcap=1.0, forbidden=forbidden, forbids=torch.ones(20).bool()
    )
    assert out.token.tolist() == [39] * 20
    torch.testing.assert_close(out.logprob, torch.zeros(20), rtol=0, atol=1e-5)


def test_something_must_be_left_to_draw():
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


def test_greedy_takes_the_first_maximum_before_the_temperature():
    weight = torch.tensor([[1.0], [3.0], [3.0], [2.0]])
    one = torch.zeros(1, dtype=torch.int64)
    greedy = torch.ones(1, dtype=torch.bool)
    out = sample(torch.ones(1, 1), weight, seed=one, position=one, greedy=greedy, temperature=0.5)
    assert out.token == 1
    # Two logits one ulp apart that the division by 3 rounds onto each other
    x = torch.arange(1, 2, 2.0**-23)
    pair = int(((x[1:] / 3) == (x[:-1] / 3)).nonzero()[0])
    out = sample(torch.ones(1, 1), x[pair : pair + 2, None], seed=one, position=one, greedy=greedy, temperature=3.0)
    assert out.token == 1


@each("n", [0, 1, 2, 127])
@each("vocab", [1, 17, 517])
def test_sizes_and_hostile_rows(n, vocab):
    hidden, weight, seed, position = make(n, 6, vocab, scale=30.0)
    out = sample(hidden, weight, seed=seed, position=position, outputs=SampleOutputs._fields)
    assert out.token.shape == out.logprob.shape == out.entropy.shape == (n,)
    assert ((out.token >= 0) & (out.token < vocab)).all()
    assert torch.isfinite(out.logprob).all()
    bias = torch.full((vocab,), -200.0)
    if vocab > 1:
        bias[-1] = -torch.inf  # a padded column is never drawn
    out = sample(torch.zeros(n, 6), weight, bias=bias, seed=seed, position=position, outputs=SampleOutputs._fields)
    live = max(vocab - 1, 1)
    assert (out.token < live).all()
    torch.testing.assert_close(out.logprob, torch.full((n,), -float(torch.tensor(float(live)).log())))
    assert torch.isfinite(out.entropy).all()


def test_bf16_and_float64():
    hidden, weight, seed, position = make(20, 16, 100, dtype=torch.bfloat16)
    low = sample(hidden, weight, seed=seed, position=position)
    high = sample(hidden.double(), weight.double(), seed=seed, position=position)
    assert torch.equal(low.token, high.token)
    assert low.logprob.dtype == torch.float32
    assert high.logprob.dtype == torch.float64
    torch.testing.assert_close(low.logprob.double(), high.logprob, rtol=1e-5, atol=1e-5)


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
