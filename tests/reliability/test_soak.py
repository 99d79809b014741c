"""Thousands of steps of training, and of requests to a server, leave memory, threads and handles as at step 50."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_engine.training.rl import RlTrainer
from tests.reliability.served import cases, load, sample, server, told
from tests.serve import serving
from tests.serve.test_kills import PROCESSES
from tests.training.test_data import PROMPTS, train_config, write_reward, write_rows

folder = serving.folder
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
EVERY, BOUND, STEPS = 50, 1.01, int(os.environ.get("RELIABILITY_STEPS", "2000"))
LEAKS = {
    "memory": "held.append(bytearray(1 << 18))",
    "files": "held.append(open(__file__))",
    "threads": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
}
"""What a reward function keeps at every call, by what it is seen in."""


def beyond(samples: list[dict[str, int]]) -> list[str]:
    """The samples that hold more than that of step 50 does, or other numbers of threads, files or children."""
    first, *later = samples
    found = list[str]()
    for place, now in enumerate(later, 2):
        wrong = [name for name in ("threads", "files", "children") if now[name] != first[name]]
        wrong += ["memory"] * (now["memory"] > BOUND * first["memory"])
        if wrong:
            found.append(f"step {place * EVERY}: {', '.join(f'{x} {first[x]} -> {now[x]}' for x in wrong)}")
    return found


def training(model: Path, folder: Path, steps: int, options: dict[str, Any], told: Path) -> None:
    """A run of so many steps with all that runs do, which writes a sample every 50."""
    torch.set_num_threads(1)
    heldout = write_rows(folder / "heldout.jsonl", [{"prompt": p} for p in PROMPTS[:2]])
    often = {"eval_steps": 25, "eval_dataset_name": str(heldout), "save_steps": 25}
    sizes = {"generation_batch_size": 4, "num_mini_batches": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-4}
    config = train_config(model, folder / "run", max_steps=steps, **often, **sizes, **options)

    def on_step(done: int, _: Any) -> None:
        if done % EVERY == 0:
            with told.open("a") as file:
                file.write(json.dumps(sample()) + "\n")

    RlTrainer(config).run(on_step)


def trained(model: Path, folder: Path, steps: int, **options: Any) -> list[dict[str, int]]:
    """Samples of a run in a process of its own."""
    process = PROCESSES.Process(target=training, args=(model, folder, steps, options, folder / "samples"))
    process.start()
    process.join()
    assert process.exitcode == 0
    samples = [json.loads(line) for line in (folder / "samples").read_text().splitlines()]
    assert len(samples) == steps // EVERY
    return samples


@pytest.mark.long
@pytest.mark.parametrize("mode", ["off", "overlap"])
def test_steps_of_training_leave_what_is_held_as_it_was(model, tmp_path, survived, mode):
    samples = trained(model, tmp_path, STEPS, async_mode=mode)
    print(*samples, sep="\n")
    found = beyond(samples)
    survived("soak", STEPS, len(found))
    assert found == []


@pytest.mark.long
def test_requests_of_32_clients_leave_what_is_held_as_it_was(folder, tmp_path, survived):
    with server(folder, tmp_path) as place, place.client() as client:
        known, samples = [told(client, *case) for case in cases()], []
        for _ in range(STEPS // EVERY):  # a step is 10 requests
            wrong, _ = load(place, known, [i % len(known) for i in range(10 * EVERY)])
            assert wrong == []
            samples.append(place.ask("sample"))
    print(*samples, sep="\n")
    found = beyond(samples)
    survived("soak", STEPS, len(found))
    assert found == []


@pytest.mark.long
@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_is_seen(model, tmp_path, kind):
    """Of the same runs with a reward function that keeps something, and that alone is told."""
    body = f"import threading\nheld = globals().setdefault('held', [])\n{LEAKS[kind]}\nreturn [1.0] * len(prompts)"
    found = beyond(trained(model, tmp_path, 2 * EVERY, reward_funcs=[write_reward(tmp_path, body)]))
    assert len(found) == 1
    assert f"{kind} " in found[0]
