"""Clients that abuse a server while 32 others ask it: what the others get is what a quiet server says."""

import os
import random
import threading
from collections import Counter

import pytest

from tests.reliability.served import KEY, KINDS, Abuser, cases, load, server, told
from tests.serve import serving
from tests.serve.test_protocol import until

folder = serving.folder
ABUSERS = 4
SEED = int(os.environ.get("RELIABILITY_SEED", "0"))


@pytest.fixture(scope="module")
def quiet(folder, tmp_path_factory) -> list[object]:
    """What a server says to every case, one after another."""
    with server(folder, tmp_path_factory.mktemp("quiet")) as place, place.client() as client:
        said = [told(client, *case) for case in cases()]
    assert all("failed" not in answer for answer in said), said
    assert len({str(answer) for answer in said}) == len(said)
    return said


@pytest.mark.parametrize(
    ("shard", "n"), [(0, 160), *(pytest.param(i, 2500, marks=pytest.mark.long) for i in range(1, 5))]
)
def test_abuse_loses_nothing_of_others_answers(folder, quiet, tmp_path, survived, shard, n):
    seed = SEED * 1000 + shard
    rng = random.Random(seed)
    places = [rng.randrange(len(quiet)) for _ in range(n)]
    over = threading.Event()
    with server(folder, tmp_path, KEY) as place:
        before, at_rest = place.ask("sample"), place.ask("rest")
        abusers = [Abuser(place, seed * ABUSERS + i) for i in range(ABUSERS)]
        threads = [threading.Thread(target=abuser.work, args=(over,)) for abuser in abusers]
        for thread in threads:
            thread.start()
        try:
            wrong, seconds = load(place, quiet, places)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        tried = sum((abuser.tried for abuser in abusers), Counter())
        faults = [fault for abuser in abusers for fault in abuser.wrong]
        assert place.ask("rest") == at_rest, "policies, rows and holders are as they were"
        until(lambda: place.ask("sample")["files"] <= before["files"])
    seconds.sort()
    p50, p99 = (seconds[int(n * share)] for share in (0.5, 0.99))
    print(f"seed {seed}: {n} answers, p50 {p50:.3f} s, p99 {p99:.3f} s, beside {dict(tried)}")
    print(*wrong[:3], *faults[:10], sep="\n")
    survived("load", n, len(wrong))
    assert len(seconds) == n
    assert set(tried) == set(KINDS)
    assert faults == []
