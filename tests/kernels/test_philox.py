"""Philox words against the published known answers, and what is derived from them."""

import math

import torch
from rlhf_kernels.runtime.philox import gumbel, gumbel_at, keep_mask, philox4x32, random_words

from .checks import each

# Known-answer vectors of the Random123 distribution (philox4x32, 10 rounds): counter, key, result
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@each(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    counter, key = (tuple(torch.tensor([x]) for x in words) for words in (counter, key))
    assert tuple(int(w) for w in philox4x32(counter, key)) == expected


def test_layout_of_counter_and_key():
    seed, row = 0x1234567890ABCDEF, 0x0BADCAFE12345678
    words = random_words(torch.tensor([seed]), torch.tensor([row]), stream=7, n_columns=10)
    for column in range(10):
        counter = (column // 4, 7, row & 0xFFFFFFFF, row >> 32)
        key = (seed & 0xFFFFFFFF, seed >> 32)
        expected = philox4x32(*(tuple(torch.tensor([x]) for x in w) for w in (counter, key)))
        assert words[0, column] == expected[column % 4]


def test_negative_seeds_and_rows_use_all_64_bits():
    seeds = torch.tensor([-1, 2**32 - 1, -(2**63), 0])
    rows = torch.tensor([5, 5, 5, 5])
    words = random_words(seeds, rows, 0, 8)
    assert len({tuple(w) for w in words.tolist()}) == 4
    rows = torch.tensor([-1, 2**32 - 1, 2**32, 0])
    assert len({tuple(w) for w in random_words(torch.tensor(3), rows, 0, 8).tolist()}) == 4


def test_words_do_not_depend_on_the_batch_or_the_width():
    seed, row = torch.tensor([3, 9, 3]), torch.tensor([0, 1, 2])
    whole = random_words(seed, row, 1, 33)
    for i in range(3):
        assert torch.equal(random_words(seed[i : i + 1], row[i : i + 1], 1, 33)[0], whole[i])
    assert torch.equal(random_words(seed, row, 1, 6), whole[:, :6])
    assert not torch.equal(random_words(seed, row, 2, 33), whole)


def test_uniform_bits_and_keep_rate():
    words = random_words(torch.tensor(1), torch.arange(64), 0, 4096)
    n = words.numel()
    assert words.min() >= 0
    assert words.max() < 2**32
    for bit in range(32):  # five standard deviations
        assert abs(((words >> bit) & 1).double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(n)
    for p in (0.0, 0.1, 0.5):
        kept = keep_mask(p, torch.tensor(1), torch.arange(64), 0, 4096).double().mean().item()
        assert abs(kept - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / n)


def test_gumbel_is_finite_and_has_its_moments():
    g = gumbel(torch.tensor(11), torch.arange(256), 1, 4096)
    assert g.dtype == torch.float32
    assert torch.isfinite(g).all()
    n, std = g.numel(), math.pi / math.sqrt(6)
    assert abs(g.double().mean().item() - 0.57721566) < 5 * std / math.sqrt(n)
    assert abs(g.double().std().item() - std) < 0.01
    # The upper tail decides an arg-max: P(g > x) = 1 − exp(−exp(−x))
    expected = n * -math.expm1(-math.exp(-10.0))
    assert abs((g > 10.0).sum().item() - expected) < 5 * math.sqrt(expected)


def test_noise_of_single_words_is_that_of_the_row():
    seed, row_id = torch.tensor([3, -5, 2**40, 3]), torch.tensor([0, 7, 2**33 + 1, 0])
    whole = gumbel(seed, row_id, 2, 1003)
    rows, columns = torch.rand(4, 1003).lt(0.3).nonzero().T
    assert torch.equal(gumbel_at(seed[rows], row_id[rows], 2, columns), whole[rows, columns])
