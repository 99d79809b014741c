"""What each of the processes of a test does: `python -m tests.distributed.ranks FOLDER`, as a launcher would.

FOLDER holds `plan.json`, {"timeout", "jobs"}. Each job, {"name", "do", "config", …}, leaves `NAME-RANK.json`, and maybe
tensors beside it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from rlhf_engine.config import TrainConfig
from rlhf_engine.errors import EngineError
from rlhf_engine.training.distributed import World
from rlhf_engine.training.rl import RlTrainer
from tests.training.test_rl import Stop, stop_after, trained, without_timings


def recorded_steps(config: TrainConfig, world: World, steps: int) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Gradients that every optimizer step takes, and the metrics of the steps."""
    trainer = RlTrainer(config, world)
    found: dict[str, torch.Tensor] = {}
    apply, names = trainer.optimizer.step, {p: n for n, p in trainer.model.named_parameters()}
    number = iter(range(1000))

    def step() -> dict[str, float]:
        i = next(number)
        found.update({f"{i} {names[p]}": p.grad.clone() for p in trainer._trained() if p.grad is not None})
        return apply()

    trainer.optimizer.step = step  # type: ignore[method-assign]
    return found, [without_timings(trainer.step()) for _ in range(steps)]


def held_by(trainer: RlTrainer) -> list[int]:
    """Bytes of the backbones that this process holds, by backbone."""
    found = []
    for name in trainer.model.backbones:
        tensors = [p for _, p in trainer.model.backbone(name).base_parameters()]
        local = [p.to_local() if isinstance(p, DTensor) else p for p in tensors]
        found.append(sum(p.untyped_storage().nbytes() for p in local))
    return found


def run_out_of_memory(module: torch.nn.Module, args: object) -> None:
    if torch.is_grad_enabled():
        raise torch.OutOfMemoryError("out of memory, says the test")


def do(job: dict[str, Any], world: World, folder: Path) -> Any:
    config = TrainConfig(**{**job["config"], **(job.get("rank_1", {}) if world.rank == 1 else {})})
    if job["do"] == "steps":
        tensors, rows = recorded_steps(config, world, job["steps"])
        save_file(tensors, folder / f"{job['name']}-{world.rank}.safetensors")
        return rows
    if job["do"] == "run":
        trainer = RlTrainer(config, world)
        try:
            trainer.run(stop_after(job["stop"]) if "stop" in job else None)
        except Stop:
            config = dataclasses.replace(config, resume_from_checkpoint="auto")
            trainer = RlTrainer(config, world)
            assert trainer.state.step == job["stop"] - 1, trainer.state.step  # stopped before its checkpoint
            trainer.run()
        save_file(trained(trainer), folder / f"{job['name']}-{world.rank}.safetensors")
        return trainer.state.step
    if job["do"] == "hold":
        trainer = RlTrainer(config, world)
        trainer.step()
        with trainer._whole_base():
            whole = held_by(trainer)
        return {"whole": whole, "share": held_by(trainer)}
    assert job["do"] == "fail"
    began = time.monotonic()
    try:
        trainer = RlTrainer(config, world)
        if job.get("out_of_memory") == world.rank:  # in the middle of a traversal
            trainer.model.backbone().blocks[1].register_forward_pre_hook(run_out_of_memory)
        trainer.run()
    except EngineError as error:
        return [type(error).__name__, str(error), time.monotonic() - began]
    return None


def main(folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = json.loads((folder / "plan.json").read_text())
    # a file rather than a port, of which another process might take the one that was free
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=plan["timeout"]),
    )
    world = World.from_environment("cpu", timeout=plan["timeout"])
    assert (world.rank, world.size, world.device) == (rank, size, torch.device("cpu"))
    for job in plan["jobs"]:
        (folder / f"{job['name']}-{rank}.json").write_text(json.dumps(do(job, world, folder)))
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
