"""Blocks of the cache: who holds them, where tokens go."""

import pytest
import torch

from rlhf_engine.hydra.kv_cache import BlockPool, KVCache, NewTokens


def test_blocks_go_round():
    pool = BlockPool(4)
    first = pool.take(3)
    assert pool.free == 1
    pool.share(first[:1])
    pool.give_back(first)
    assert pool.free == 3  # one is still held
    second = pool.take(3)
    assert first[0] not in second
    assert pool.most_used == 4
    pool.give_back(first[:1])
    assert pool.take(1) == first[:1]


def test_misuse_of_a_pool_is_refused():
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="n: expected at most 2 blocks, which are free, got 3"):
        pool.take(3)
    with pytest.raises(ValueError, match="blocks: expected blocks in use, got 0"):
        pool.give_back([0])
    with pytest.raises(ValueError, match="blocks: expected blocks in use, got 1"):
        pool.share([1])
    with pytest.raises(ValueError, match="blocks: expected at least 1, got 0"):
        BlockPool(0)


def test_tokens_lie_where_the_table_says():
    cache = KVCache(blocks=5, block=4)
    tables, lengths = [[3, 1], [4]], [6, 2]
    key, value = torch.arange(8.0)[:, None, None].expand(8, 2, 3).clone(), -torch.arange(24.0).view(8, 1, 3)
    key[:, 1] += 100
    NewTokens.of_prompts(cache, tables, lengths, torch.device("cpu")).write(0, key, value)
    k, v = cache.read(0)
    assert k.shape == (5, 4, 2, 3)
    assert v.shape == (5, 4, 1, 3)
    assert torch.equal(torch.cat([k[3], k[1, :2]]), key[:6])
    assert torch.equal(v[4, :2], value[6:])
    table = torch.tensor([[3, 1], [4, 0]])
    NewTokens.of_rows(cache, table, torch.tensor([6, 2])).write(0, key[:2] + 50, value[:2] + 50)
    assert torch.equal(k[1, 2], key[0] + 50)
    assert torch.equal(v[4, 2], value[1] + 50)


def test_copies_take_every_layer():
    cache = KVCache(blocks=3, block=2)
    for layer in range(2):
        cache.allocate(layer, torch.empty(1, 2, 4), torch.empty(1, 2, 4))
        cache.keys[layer].normal_()
        cache.values[layer].normal_()
    cache.copy([0], [2])
    for layers in (cache.keys, cache.values):
        assert all(torch.equal(x[0], x[2]) for x in layers.values())
