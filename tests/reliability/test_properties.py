"""Native code against the reference on random calls: as many as a push can pay for, and many more at night.

`RELIABILITY_SEED=n` draws others. A failure shows its choices, made as small as hypothesis can, and the seed.
"""

from __future__ import annotations

import contextlib
import os

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.kernels.checks import ISAS, needs_native
from tests.reliability import properties

SEED = int(os.environ.get("RELIABILITY_SEED", "0"))
SHORT, SHARD, SHARDS = 750, 4_000, 8


@st.composite
def cases(draw):
    return properties.drawn(lambda values: draw(st.sampled_from(values)))


def hold(survived, examples, seed):
    """Every call of so many random problems; the number of calls is what is counted."""
    tried = [0, 0]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(cases())
    def check(case):
        count, found = properties.faults(case)
        tried[0] += count
        tried[1] += len(found)
        assert not found, f"RELIABILITY_SEED={SEED}, seed {seed}: " + "\n".join(found)

    try:
        check()
    except BaseException:
        with contextlib.suppress(AssertionError):
            survived("properties", max(1, tried[0]), max(1, tried[1]))
        raise
    assert tried[0] >= examples * len(ISAS)
    survived("properties", *tried)


@needs_native
def test_random_calls_give_what_the_reference_gives(survived):
    hold(survived, SHORT, SEED)


@needs_native
@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_random_calls_give_what_the_reference_gives(survived, shard):
    hold(survived, SHARD, 1 + shard + SHARDS * SEED)
