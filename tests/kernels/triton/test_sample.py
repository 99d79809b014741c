"""The Triton draw: the reference's words and tokens, tiers against fp64, hostile rows and memory, a row's own bits."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from rlhf_kernels.linear_logprob import linear_logprob
from rlhf_kernels.linear_logprob_pair import linear_logprob_pair
from rlhf_kernels.linear_ppo_loss import linear_ppo_loss
from rlhf_kernels.runtime import philox, philox_triton, registry
from rlhf_kernels.runtime.registry import BackendUnavailableError
from rlhf_kernels.sample import SampleOutputs, sample
from rlhf_kernels.sample import triton as ours
from rlhf_kernels.sample.reference import STREAM
from rlhf_kernels.vocab import cost
from rlhf_kernels.vocab.logits import HeadLora

from tests.kernels import test_sample_native as definition
from tests.kernels.checks import each, same_bits
from tests.kernels.cuda_graph import capture
from tests.kernels.test_sample import check_frequencies
from tests.kernels.test_sample_native import ALL, logits

NAN, INF = float("nan"), float("inf")
STREAM_WORD = tl.constexpr(STREAM)
SHAPES = [(1, 3, 2), (1, 1, 1), (2, 17, 17), (15, 64, 129), (17, 70, 300), (33, 33, 517), (66, 40, 700)]
# numpy speaks of log 0 and −inf − (−inf) in rows that the interpreter computes and nobody reads
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=[132, 3], ids=["a tile per share", "several"])
def programs(request, monkeypatch):
    monkeypatch.setattr(ours, "PROGRAMS", request.param)


def make(device, *sizes, **options):
    return [x.to(device) for x in definition.make(*sizes, **options)]


def check(*tensors, **options):
    return definition.check(*tensors, backend="triton", **options)


def every_option(device, n, h, v):
    options = {"temperature": torch.rand(n) + 0.5, "bias": torch.randn(v)}
    options = {name: x.to(device) for name, x in options.items()} | {"softcap": 30.0, "logit_scale": 1.3}
    lora = HeadLora(torch.randn(4, h, device=device), 0.1 * torch.randn(v, 4, device=device), 0.5)
    return options | {"lora": lora, "greedy": torch.arange(n, device=device) % 3 == 1}


@triton.jit
def _noise_kernel(seed, row, out, n, BN: tl.constexpr, BD: tl.constexpr):
    rows = tl.arange(0, BN)
    seeds = tl.load(seed + rows, mask=rows < n, other=0)[:, None]
    ids = tl.load(row + rows, mask=rows < n, other=0)[:, None]
    for first in tl.static_range(0, 2 * BD, BD):
        words = philox_triton.random_words(seeds, ids, STREAM_WORD, first, BN, BD)
        at = rows[:, None] * 2 * BD + first + tl.arange(0, BD)[None, :]
        tl.store(out + at, words.to(tl.int64), mask=(rows < n)[:, None])


@triton.jit
def _gumbel_kernel(words, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, philox_triton.gumbel(tl.load(words + at, mask=at < n, other=0).to(tl.uint32)), mask=at < n)


def test_words_are_those_of_philox(device):
    seed = torch.tensor([0, 11, -1, 2**62 + 5, -(2**63)], device=device)
    row = torch.tensor([2**32 - 1, 0, 2**32, 2**63 - 1, -3], device=device)
    out = torch.zeros(5, 64, dtype=torch.int64, device=device)
    _noise_kernel[(1,)](seed, row, out, 5, BN=8, BD=32)
    assert torch.equal(out, philox.random_words(seed, row, STREAM, 64))


def test_gumbel_is_that_of_its_word(device, monkeypatch):
    """Both ends, where one logarithm or the other is of a number near 1, and words that fp32 has to round."""
    word = torch.cat(
        [
            torch.arange(2000),
            torch.arange(2**32 - 2000, 2**32),
            torch.arange(2**24 - 1000, 2**24 + 1000),
            torch.randint(0, 2**32, (20_000,)),
        ]
    )
    out = torch.empty(len(word), device=device)
    _gumbel_kernel[(triton.cdiv(len(word), 1024),)](word.to(device), out, len(word), BLOCK=1024)
    monkeypatch.setattr(philox, "random_words", lambda *_: word)
    u = ((word.double() + 0.5) * 2.0**-32).float().clamp_max(1 - 2.0**-24).double()
    exact = -torch.log(-torch.log1p(-u))
    eager = (philox.gumbel(None, None, 0, 0).double() - exact).abs().max()
    assert (out.cpu().double() - exact).abs().max() <= 2 * eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_are_the_references(device, programs, shape, dtype):
    check(*make(device, *shape, dtype=dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_option(device, programs, shape):
    n, h, v = shape
    check(*make(device, *shape), **every_option(device, n, h, v))
    check(*make(device, *shape), temperature=0.3)
    check(*make(device, *shape, scale=1e-3), logit_scale=2.0)


@each(("n", "seed_of_numbers"), [(1, 1), (2, 2), (15, 3), (17, 4), (33, 5), (200, 6)])
def test_another_token_only_where_two_scores_are_nearly_one(device, n, seed_of_numbers):
    torch.manual_seed(seed_of_numbers)
    hidden, weight, seed, position = make(device, n, 40, 1291, dtype=torch.bfloat16)
    got, want = (
        sample(hidden, weight, seed=seed, position=position, backend=backend).token
        for backend in ("triton", "reference")
    )
    score = logits(hidden, weight, torch.float64)[1] + philox.gumbel(seed, position, STREAM, 1291).double()
    apart = (score.gather(1, want[:, None]) - score.gather(1, got[:, None]))[:, 0].abs()
    assert (apart[got != want] <= 1e-5 * score.abs().amax()).all()
    assert (got != want).sum() <= n // 50


@pytest.mark.parametrize("rank", [1, 16, 50])
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
def test_lora_on_a_bf16_head_is_not_rounded_to_bf16(device, adapter, rank):
    hidden, weight, seed, position = make(device, 20, 64, 300, dtype=torch.bfloat16)
    A, B = (torch.randn(*shape, device=device).to(adapter) for shape in ((rank, 64), (300, rank)))
    lora = HeadLora(A.T.contiguous().T, B, 0.5)
    out = sample(hidden, weight, seed=seed, position=position, lora=lora, backend="triton")
    z = logits(hidden, weight, torch.float64, lora=lora)[1]
    want = torch.log_softmax(z, -1).gather(1, out.token[:, None])[:, 0]
    torch.testing.assert_close(out.logprob.double(), want, rtol=1e-4, atol=3e-4)


@each("temperature", [0.5, 2.0])
def test_frequencies_follow_the_softmax(device, temperature):
    n, v = 8000, 11
    hidden, weight, *_ = make(device, 1, 4, v, dtype=torch.bfloat16)
    rows = {"seed": torch.full((n,), 5, device=device), "position": torch.arange(n, device=device)}
    out = sample(hidden.expand(n, 4), weight, temperature=temperature, backend="triton", **rows)
    check_frequencies(out.token.cpu(), (logits(hidden, weight, torch.float64)[1][0] / temperature).softmax(-1).cpu())


def test_tokens_of_a_flat_head(device):
    """Equal logits: the noise alone decides, and its largest values are those of u near 0."""
    n, v = 20, 6001
    seed, position = torch.randint(-(2**63), 2**63 - 1, (n,)), torch.randint(0, 2**40, (n,))
    seed, position = seed.to(device), position.to(device)
    head = torch.zeros(n, 1, device=device).half(), torch.ones(v, 1, device=device).half()
    out = sample(*head, seed=seed, position=position, backend="triton")
    assert torch.equal(out.token, philox.gumbel(seed, position, STREAM, v).argmax(-1))


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_every_column_a_new_best(device, programs, order):
    bias = torch.linspace(-300, 300, 1500, device=device)
    check(*make(device, 5, 8, 1500), bias=bias if order == "rising" else bias.flip(0))


@pytest.mark.parametrize("vocab", [1, 17, 517])
@pytest.mark.parametrize("n", [1, 15, 33])
def test_hostile_rows(device, n, vocab):
    """Peaked, all at −200, and a padded column at −inf, which is never drawn."""
    hidden, weight, seed, position = make(device, n, 6, vocab, scale=30.0)
    out = sample(hidden, weight, seed=seed, position=position, outputs=ALL, backend="triton")
    assert ((out.token >= 0) & (out.token < vocab)).all()
    assert out.logprob.isfinite().all()
    assert out.entropy.isfinite().all()
    bias = torch.full((vocab,), -200.0, device=device)
    if vocab > 1:
        bias[-1] = -INF
    zero = torch.zeros_like(hidden)
    out = sample(zero, weight, bias=bias, seed=seed, position=position, outputs=ALL, backend="triton")
    best = torch.ones(n, dtype=torch.bool, device=device)
    below = sample(hidden, weight, bias=bias - 1e5, seed=seed, position=position, greedy=best, backend="triton")
    assert (below.token < vocab).all()  # beyond the vocabulary a product is 0, which is more
    live = torch.tensor(float(max(vocab - 1, 1)))
    assert (out.token < live).all()
    torch.testing.assert_close(out.logprob.cpu(), (-live.log()).expand(n))
    torch.testing.assert_close(out.entropy.cpu(), live.log().expand(n))


def test_values_that_are_not_finite(device):
    """Rows with NaN, infinite logits, nothing but −inf; tokens and places of NaN as the reference has them."""
    n, v = 20, 700
    hidden, weight, seed, position = make(device, n, 4, v)
    hidden[3, 1] = NAN
    biases = {name: torch.zeros(v, device=device) for name in ("plain", "one", "two", "none", "half")}
    biases["one"][400] = NAN
    biases["two"][500:502] = INF
    biases["none"][:] = -INF
    biases["half"][:650] = -INF
    rows = {"seed": seed, "position": position, "greedy": torch.arange(n, device=device) % 2 == 0}
    for name, bias in biases.items():
        got, want = (
            sample(hidden, weight, bias=bias, outputs=ALL, backend=backend, **rows)
            for backend in ("triton", "reference")
        )
        assert torch.equal(got.token, want.token), name
        for a, b in zip(got[1:], want[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)


def test_first_of_equal_maxima_across_tiles_and_shares(device, programs):
    n, v = 12, 700
    hidden, weight = torch.randn(n, 8, device=device), torch.randn(1, 8, device=device).expand(v, 8).contiguous()
    zero, greedy = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.bool, device=device)
    for i, column in enumerate([0, 63, 64, 128, 512, 699]):
        bias = torch.full((v,), -1.0, device=device)
        bias[column:] = 1.0
        row = {"seed": zero, "position": zero, "greedy": greedy, "bias": bias}
        assert sample(hidden[i : i + 1], weight, backend="triton", **row).token.item() == column


def test_greedy_is_the_argmax_before_the_temperature(device):
    # Two logits one ulp apart that the division by 3 rounds onto each other
    x = torch.arange(1, 2, 2.0**-23)
    pair = int(((x[1:] / 3) == (x[:-1] / 3)).nonzero()[0])
    weight = x[pair : pair + 2, None].to(device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    row = {"seed": one, "position": one, "greedy": one.bool(), "temperature": 3.0, "backend": "triton"}
    assert sample(torch.ones(1, 1, device=device), weight, **row).token == 1
    assert sample(torch.ones(1, 1, device=device), weight * torch.tensor([[0.0], [-0.0]]).to(device), **row).token == 0
    hidden, weight, seed, position = make(device, 40, 33, 1301)
    greedy = torch.arange(40, device=device) % 2 == 0
    out = sample(hidden, weight, seed=seed, position=position, greedy=greedy, temperature=5.0, backend="triton")
    drawn = sample(hidden, weight, seed=seed, position=position, temperature=5.0, backend="triton")
    best = (hidden.double() @ weight.double().T).argmax(-1)
    assert torch.equal(out.token, torch.where(greedy, best, drawn.token))
    assert not torch.equal(drawn.token, best)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", ["none", "all"])
def test_the_rest_of_the_batch_does_not_change_the_bits(device, dtype, options):
    n, h, v = 82, 24, 300
    hidden, weight, seed, position = make(device, n, h, v, dtype=dtype)
    knobs = {} if options == "none" else every_option(device, n, h, v)

    def run(rows):
        own = {k: x[rows] if k in ("temperature", "greedy") else x for k, x in knobs.items()}
        return sample(
            hidden[rows], weight, seed=seed[rows], position=position[rows], outputs=ALL, backend="triton", **own
        )

    whole = run(slice(None))
    for rows in ([81], list(range(60, 75)), list(range(17)), list(range(49, 82))):
        assert all(torch.equal(a, b[rows]) for a, b in zip(run(rows), whole, strict=True)), len(rows)


@each(("options", "dtype"), [("none", torch.float32), ("all", torch.bfloat16)])
def test_exact_mode_scores_a_token_with_the_bits_that_it_was_drawn_with(device, dtype, options):
    """By linear_logprob, the pair and the loss's ratio, whatever the number of rows."""
    n, h, v = 50, 24, 300
    hidden, weight, seed, position = make(device, n, h, v, dtype=dtype)
    knobs = {} if options == "none" else every_option(device, n, h, v)
    drawn = sample(hidden, weight, seed=seed, position=position, outputs=ALL, backend="triton", **knobs)
    knobs.pop("greedy", None)
    with registry.use_exact():
        for rows in (slice(None), [3], list(range(20, 37))):
            own = {k: x[rows] if k == "temperature" else x for k, x in knobs.items()} | {"backend": "triton"}
            token = drawn.token[rows]
            scored = linear_logprob(hidden[rows], weight, token, outputs=("logprob", "entropy"), **own)
            assert torch.equal(scored.logprob, drawn.logprob[rows])
            assert torch.equal(scored.entropy, drawn.entropy[rows])
            pair = linear_logprob_pair(hidden[rows], hidden[rows].flip(0), weight, token, **own)
            assert torch.equal(pair.logprob_a, drawn.logprob[rows])
            loss = linear_ppo_loss(
                hidden[rows],
                weight,
                token,
                drawn.logprob[rows],
                torch.ones(len(token), device=device),
                torch.ones(len(token), dtype=torch.bool, device=device),
                denom=1.0,
                clip_low=0.2,
                clip_high=0.2,
                **own,
            )
            assert torch.equal(loss.logprob, drawn.logprob[rows])
            assert loss.ratio_max == 1


@each("options", ["none", "all"])
def test_exact_mode_gives_a_row_the_gradient_of_itself(device, monkeypatch, options):
    """Through linear_logprob, the pair and the loss, alone and among other rows."""
    monkeypatch.setattr(cost, "SMALL_TILE", 2**10)  # so that the number of rows would decide about tiles at once
    monkeypatch.setattr(cost, "MIN_TILE_COLUMNS", 64)
    n, h, v = 40, 24, 300
    hidden, weight, *_ = make(device, n, h, v, dtype=torch.bfloat16)
    target = torch.arange(n, device=device) % v
    knobs = {} if options == "none" else every_option(device, n, h, v)
    knobs.pop("greedy", None)

    def run(rows):
        own = {k: x[rows] if k == "temperature" else x for k, x in knobs.items()} | {"backend": "triton"}
        x, y = hidden[rows].clone().requires_grad_(), target[rows]
        found = []
        scored = linear_logprob(x, weight, y, outputs=("logprob", "entropy"), **own)
        found += torch.autograd.grad(scored.logprob.sum(), x, retain_graph=True)
        found += torch.autograd.grad(scored.entropy.sum(), x)
        pair = linear_logprob_pair(x, hidden[rows].flip(1), weight, y, **own)
        found += torch.autograd.grad((pair.logprob_a + pair.kl).sum(), x)
        ones = torch.ones(len(y), device=device)
        loss = linear_ppo_loss(
            x, weight, y, -4 * ones, ones, ones.bool(), denom=1.0, clip_low=9.0, clip_high=9e9, **own
        )
        return [*found, *torch.autograd.grad(loss.loss, x)]

    with registry.use_exact():
        whole = run(list(range(n)))
        for rows in ([17], [39, 2, 11]):
            for alone, among in zip(run(rows), whole, strict=True):
                assert alone.abs().max() > 0
                assert torch.equal(alone, among[rows])


def test_any_strides_mixed_dtypes_and_red_zones(device):
    hidden, weight, seed, position = make(device, 20, 64, 300, dtype=torch.bfloat16)
    greedy = torch.arange(20, device=device) % 3 == 0
    want = sample(hidden, weight, seed=seed, position=position, greedy=greedy, backend="triton")
    wide = torch.full((21, 70), NAN, dtype=torch.bfloat16, device=device)
    wide[:20, 3:67] = hidden
    tall = torch.full((602, 65), NAN, dtype=torch.bfloat16, device=device)
    tall[:600:2, :64] = weight
    keys, flags = torch.stack([seed, position], 1), torch.stack([greedy, ~greedy], 1)
    got = sample(
        wide[:20, 3:67], tall[:600:2, :64], seed=keys[:, 0], position=keys[:, 1], greedy=flags[:, 0], backend="triton"
    )
    assert torch.equal(got.token, want.token)
    assert torch.equal(got.logprob, want.logprob)
    rows = {"seed": seed, "position": position, "greedy": greedy, "backend": "triton"}
    turned = sample(hidden.T.contiguous().T, weight.T.contiguous().T, **rows)
    assert torch.equal(turned.logprob, want.logprob)
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    for one, other in itertools.product(kinds, kinds):
        mixed = sample(hidden.to(one), weight.to(other), **rows)
        assert torch.equal(mixed.token, want.token)
        torch.testing.assert_close(mixed.logprob, want.logprob, rtol=1e-4, atol=1e-4)


def test_some_rows_never_draw_what_is_forbidden(device, programs):
    hidden, weight, seed, position = make(device, 21, 24, 700)
    forbids, greedy = (torch.arange(21, device=device) % 3 != 0), (torch.arange(21, device=device) % 2 == 0)
    rows = {"seed": seed, "position": position, "greedy": greedy, "outputs": ALL, "temperature": 0.8}
    free = sample(hidden, weight, backend="triton", **rows)
    forbidden = torch.cat([free.token, torch.tensor([699, 0], device=device)])
    out, want = (
        sample(hidden, weight, forbidden=forbidden, forbids=forbids, backend=backend, **rows)
        for backend in ("triton", "reference")
    )
    for got, theirs, before in zip(out, want, free, strict=True):
        assert torch.equal(got[~forbids], before[~forbids])
        torch.testing.assert_close(got, theirs, rtol=1e-5, atol=2e-5)
    assert not torch.isin(out.token[forbids], forbidden).any()


def test_nothing_as_large_as_the_logits(device, monkeypatch):
    shapes = []
    empty = ours.HeadInputs.empty
    monkeypatch.setattr(
        ours.HeadInputs, "empty", lambda self, *shape, **kw: shapes.append(shape) or empty(self, *shape, **kw)
    )
    hidden, weight, seed, position = make(device, 16, 8, 3000, dtype=torch.bfloat16)
    sample(hidden, weight, seed=seed, position=position, outputs=ALL, backend="triton")
    assert max(torch.Size(shape).numel() for shape in shapes) <= 4 * 16 * 24  # shares of 128 columns


def test_empty_batch_and_what_it_leaves_to_the_reference(device):
    hidden, weight, seed, position = make(device, 0, 8, 40)
    out = sample(hidden, weight, seed=seed, position=position, outputs=ALL, backend="triton")
    assert out.token.shape == out.logprob.shape == out.entropy.shape == (0,)
    hidden, weight, seed, position = make(device, 3, 8, 40)
    rows = {"seed": seed, "position": position, "backend": "triton"}
    for filters in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
        with pytest.raises(BackendUnavailableError, match="'triton' cannot serve sample: top_k, top_p and min_p"):
            sample(hidden, weight, **filters, **rows)
    assert sample(hidden, weight, top_k=40, top_p=1.0, **rows).token.shape == (3,)
    with pytest.raises(BackendUnavailableError, match=r"not in torch\.float64"):
        sample(hidden.double(), weight, **rows)


def test_opcheck(device):
    hidden, weight, seed, position = make(device, 4, 3, 7)
    tensors = [torch.randn(*shape, device=device) for shape in ((7,), (2, 3), (7, 2))]
    greedy = torch.tensor([True, False] * 2, device=device)
    tensors = (greedy, torch.tensor([1, 5], device=device), ~greedy, *tensors, torch.rand(4, device=device) + 0.5)
    op = torch.ops.rlhf_kernels.sample.default
    torch.library.opcheck(
        op, (hidden, weight, seed, position, *tensors, 0.5, 1.0, 2.0, 1.5, 0, 1.0, 0.0, True, "triton")
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4096, 128256), (64, 2048, 151936), (200, 896, 50264)])
def test_at_size(shape):
    check(*make("cuda", *shape, dtype=torch.bfloat16, scale=shape[1] ** -0.5))


@pytest.mark.gpu
def test_bits_at_size_whatever_the_batch_in_ten_runs():
    hidden, weight, seed, position = make("cuda", 300, 2048, 32001, dtype=torch.bfloat16, scale=0.02)

    def run(n):
        return sample(hidden[:n], weight, seed=seed[:n], position=position[:n], outputs=ALL, backend="triton")

    whole = run(300)
    for n in (1, 2, 15, 16, 17, 64, 65, 128, *[300] * 10):
        assert all(torch.equal(a, b[:n]) for a, b in zip(run(n), whole, strict=True)), n


@pytest.mark.gpu
def test_graph_replay_with_other_rows():
    hidden, weight, seed, position = make("cuda", 32, 1024, 32001, dtype=torch.bfloat16, scale=0.03)
    greedy = torch.arange(32, device="cuda") % 4 == 0
    temperature = torch.rand(32, device="cuda") + 0.5

    def step():
        rows = {"seed": seed, "position": position, "greedy": greedy, "temperature": temperature}
        return sample(hidden, weight, outputs=SampleOutputs._fields, backend="triton", **rows)

    graph, captured = capture(step)
    for _ in range(2):
        hidden.copy_(torch.randn_like(hidden))
        position.add_(1)
        graph.replay()
        torch.cuda.synchronize()
        same_bits(captured, step())
