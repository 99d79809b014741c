"""What each of two processes of a test does; `python -m tests.distributed.ranks FOLDER` starts both of them.

FOLDER holds `plan.json`, {"timeout", "jobs"}. Each job, {"name", "do", "config", …}, leaves `NAME-RANK.json`, and maybe
tensors beside it. A process that ends leaves `ended-RANK` with its exit status.
Both are forked from one that has imported everything, which takes longer than most jobs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from rlhf_engine.config import RewardConfig, SFTConfig, TrainConfig
from rlhf_engine.distributed.process_group import World
from rlhf_engine.errors import EngineError
from rlhf_engine.hydra import HydraModel, Logprobs
from rlhf_engine.hydra.sharding import ShardedBase
from rlhf_engine.rollout import SamplingConfig, generate
from rlhf_engine.training.reward_model.trainer import RewardTrainer
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.run import Run
from rlhf_engine.training.sft import SftTrainer
from tests.curves import drawn_once
from tests.hydra.architectures import CONFIGS
from tests.hydra.test_architectures import hydra
from tests.training.test_rl import Stop, stop_after, trained, without_timings

KINDS: dict[str, tuple[type, Callable[..., Run]]] = {
    "rl": (TrainConfig, RlTrainer),
    "sft": (SFTConfig, SftTrainer),
    "reward": (RewardConfig, RewardTrainer),
}
"""Options and trainer by what a job may name as its `kind`."""


def recorded_steps(config: TrainConfig, world: World, steps: int) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Gradients that every optimizer step takes, and the metrics of the steps."""
    trainer = RlTrainer(config, world)
    found: dict[str, torch.Tensor] = {}
    apply, names = trainer.optimizer.step, {p: n for n, p in trainer.model.named_parameters()}
    number = iter(range(1000))

    def step() -> dict[str, float]:
        i = next(number)
        found.update({f"{i} {names[p]}": p.grad.clone() for p in trainer.policy.trained() if p.grad is not None})
        return apply()

    trainer.optimizer.step = step  # type: ignore[method-assign]
    return found, [without_timings(trainer.step()) for _ in range(steps)]


def says(model: HydraModel, whole: Callable[[], contextlib.AbstractContextManager[None]]) -> list[torch.Tensor]:
    """Answers and their log-probs, a gradient, and the same answers drawn again."""
    sampling = SamplingConfig(max_completion_length=10, eos_token_ids=(2,), seed=3)
    prompts = [[5, 9, 11, 3, 20, 6, 7], [8, 12], [4, 4, 4]]
    rollouts = []
    for again in (False, True):
        with whole():
            rollouts.append(generate(model.eval(), prompts, sampling))
        if again:
            break
        model.train()
        (out,) = model(rollouts[0].batch, (Logprobs(),))
        out.logprob.sum().backward()
    gradients = [p.grad for p in model.backbone().slot("actor").parameters() if p.grad is not None]
    return [*gradients, *(tensor for rollout in rollouts for tensor in (rollout.batch.tokens_T, rollout.logprobs_M))]


def same_in_shares(name: str, checkpointing: bool) -> bool:
    """Whether sharding an architecture changes a bit of what it says."""
    found = []
    for shares in (False, True):
        model = hydra(name)
        if checkpointing:
            model.backbone().enable_gradient_checkpointing()
        whole = ShardedBase(model, dist.new_group()).whole if shares else contextlib.nullcontext
        found.append(says(model, whole))
    return len(found[0]) == len(found[1]) > 4 and all(map(torch.equal, *found))


def held_by(trainer: Run) -> dict[str, int]:
    """Bytes of backbones and of the optimizer's state that this process holds between two steps."""
    state = trainer.optimizer.state_tensors().values()
    return {"base": sum(base_held_by(trainer)), "state": sum(x.numel() * x.element_size() for x in state)}


def base_held_by(trainer: Run) -> list[int]:
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


def end_process(step: int, metrics: dict[str, Any]) -> None:
    os._exit(3)


def do(job: dict[str, Any], world: World, folder: Path) -> Any:
    if job["do"] == "architectures":
        return {name: [same_in_shares(name, checkpointing) for checkpointing in (False, True)] for name in CONFIGS}
    options, make = KINDS[job.get("kind", "rl")]
    config = options(**{**job["config"], **(job.get("rank_1", {}) if world.rank == 1 else {})})
    if job["do"] == "steps":
        tensors, rows = recorded_steps(config, world, job["steps"])
        save_file(tensors, folder / f"{job['name']}-{world.rank}.safetensors")
        return rows
    if job["do"] == "run":
        trainer = make(config, world)
        try:
            trainer.run(stop_after(job["stop"]) if "stop" in job else None)
        except Stop:
            # as if it had been killed, and had left no checkpoint of that step
            lost = trainer.output / f"checkpoint-{job['stop']}"  # where the base is trained in shares there is none
            world.on_main("lost", lambda: shutil.rmtree(lost, ignore_errors=trainer.optimizer.is_sharded))
            config = dataclasses.replace(config, resume_from_checkpoint="auto")
            trainer = make(config, world)
            assert trainer.state.step == job["stop"] - 1, trainer.state.step  # stopped before its checkpoint
            trainer.run()
        if not trainer.optimizer.is_sharded:
            save_file(trained(trainer), folder / f"{job['name']}-{world.rank}.safetensors")
        return held_by(trainer)
    if job["do"] == "hold":
        trainer = RlTrainer(config, world)
        trainer.step()
        with trainer.whole_base():
            whole = base_held_by(trainer)
        answers = trainer.evaluation.answer(
            trainer.train_set, list(range(1 + world.rank))
        )  # more on one rank than on the other
        return {
            "whole": whole,
            "share": base_held_by(trainer),
            "kl": trainer.evaluation.kl_to_reference(answers.rollout),
        }
    assert job["do"] == "fail"
    began = time.monotonic()
    try:
        trainer = make(config, world)
        if job.get("out_of_memory") == world.rank:  # in the middle of a backbone forward
            trainer.model.backbone().blocks[1].register_forward_pre_hook(run_out_of_memory)
        trainer.run(end_process if job.get("dies") == world.rank else None)
    except (EngineError, torch.OutOfMemoryError) as error:
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
    # "auto", the default, is the CPU where there is no GPU
    world = World.from_environment("cpu" if torch.cuda.is_available() else "auto", timeout=plan["timeout"])
    assert (world.rank, world.size, world.device) == (rank, size, torch.device("cpu"))
    with drawn_once():
        for job in plan["jobs"]:
            (folder / f"{job['name']}-{rank}.json").write_text(json.dumps(do(job, world, folder)))
    world.close()


def fork(rank: int, size: int, folder: Path) -> int:
    """Process id of a new process that is one of the ranks."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "localhost"})
        main(folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # nothing that the parent would do at its end


if __name__ == "__main__":
    place = Path(sys.argv[1])
    ranks = {fork(rank, 2, place): rank for rank in range(2)}
    while ranks:
        child, how = os.wait()
        (place / f"ended-{ranks.pop(child)}").write_text(str(os.waitstatus_to_exitcode(how)))
