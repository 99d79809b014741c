"""A program that makes random calls of every op in two Python threads at once: what a sanitizer watches.

`python -m tests.reliability.sanitized_calls EXTENSION SET SEED CALLS` makes sure that this build of the extension is in
use, holds it to an instruction set, and prints how many calls each op has had. With CALLS 0 it reads one element beyond
a tensor, which has to end it.
"""

from __future__ import annotations

import collections
import json
import os
import random
import sys
import threading

import torch
from rlhf_kernels.runtime import native

from tests.reliability.properties import answers, drawn


def main(path: str, isa: str, seed: int, n: int) -> None:
    """n calls between two threads; of what they give nothing is held to anything here."""
    if native.missing() is not None or not os.path.samefile(native.extension().__file__, path):
        raise SystemExit(f"expected the extension {path}, got {native.missing() or native.extension().__file__}")
    if n == 0:
        x, mask, out = torch.zeros(4096), torch.ones(4097, dtype=torch.bool), torch.zeros(3, dtype=torch.float64)
        native.function("masked_moments", torch.float32)(x.data_ptr(), mask.data_ptr(), 4097, 1, out.data_ptr())
        return
    counts = [collections.Counter[str]() for _ in range(2)]
    faults = list[str]()

    def work(me: int) -> None:
        chance = random.Random(2 * seed + me)
        try:
            for _ in range(n // 2):
                case = drawn(chance.choice)
                torch.set_num_threads(case.said["threads"])  # this thread's own
                answers(case, "cpu", hostile=True)
                counts[me][case.said["op"]] += 1
        except BaseException as error:
            faults.append(f"{case}: {error!r}")

    with native.use_isa(isa):
        threads = [threading.Thread(target=work, args=(me,)) for me in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(json.dumps({"counts": counts[0] + counts[1], "faults": faults}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
