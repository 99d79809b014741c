"""What each of a few processes of a test does; `python -m tests.distributed.ranks FOLDER` starts all of them.

FOLDER holds `plan.json`, {"processes", "timeout", "jobs"}. Each job, {"name", "do", "config", …}, leaves
`NAME-RANK.json`, and maybe tensors beside it. A process that ends leaves `ended-RANK` with its exit status.
They are forked from one that has imported everything, which takes longer than most jobs.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_engine.config import RewardConfig, SFTConfig, TrainConfig
from rlhf_engine.devices import Memory, World
from rlhf_engine.errors import EngineError
from rlhf_engine.hydra import HydraModel, Logprobs, hydra_roles
from rlhf_engine.hydra.sharding import ShardedBase
from rlhf_engine.rollout import EngineOptions, SamplingConfig, generate
from rlhf_engine.training.reward_model import RewardTrainer
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.run import Run
from rlhf_engine.training.sft import SftTrainer
from tests.hydra.test_architectures import hydra
from tests.training.test_rl import Stop, stop_after, trained, without_timings

MODEL_STEP = EngineOptions(decode_step="transformers")
"""The decoding step that serves a base in shares as well."""
KINDS: dict[str, tuple[type, Callable[..., Run]]] = {
    "rl": (TrainConfig, RlTrainer),
    "sft": (SFTConfig, SftTrainer),
    "reward": (RewardConfig, RewardTrainer),
}
"""Options and trainer by what a job may name as its `kind`."""


def recorded_steps(config: TrainConfig, world: World, steps: int) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Gradients that every optimizer step takes, and the metrics of the steps."""
    with by_memory(config, world):
        trainer = in_few_lanes(RlTrainer(config, world))
    found: dict[str, torch.Tensor] = {}
    apply, names = trainer.optimizer.step, {p: n for n, p in trainer.model.named_parameters()}
    number = iter(range(1000))

    def step() -> dict[str, float]:
        i = next(number)
        found.update({f"{i} {names[p]}": p.grad.clone() for p in trainer.policy.trained() if p.grad is not None})
        return apply()

    trainer.optimizer.step = step  # type: ignore[method-assign]
    with by_memory(config, world):
        return found, [without_timings(trainer.step()) for _ in range(steps)]


def by_memory(config: TrainConfig, world: World) -> contextlib.AbstractContextManager[object]:
    """In the runs of that name, a GPU's memory: a pass takes 10⁶ bytes, and ranks have room for ten and for two."""
    if "by-memory" not in config.output_dir:
        return contextlib.nullcontext()
    memory = Memory(used=0, peak=10**6, free=[10**7, 2 * 10**6][world.rank])
    return mock.patch("rlhf_engine.devices.read_memory", return_value=memory)


def says(model: HydraModel, whole: Callable[[], contextlib.AbstractContextManager[None]]) -> list[torch.Tensor]:
    """Answers and their log-probs, a gradient, and the same answers drawn again."""
    sampling = SamplingConfig(max_completion_length=10, eos_token_ids=(2,), seed=3)
    prompts = [[5, 9, 11, 3, 20, 6, 7], [8, 12], [4, 4, 4]]
    rollouts = []
    for again in (False, True):
        with whole():
            rollouts.append(generate(model.eval(), prompts, sampling, options=MODEL_STEP))
        if again:
            break
        model.train()
        (out,) = model(rollouts[0].batch, (Logprobs(),))
        out.logprob.sum().backward()
    gradients = [p.grad for p in model.backbone().slot("actor").parameters() if p.grad is not None]
    return [*gradients, *(tensor for rollout in rollouts for tensor in (rollout.batch.tokens_T, rollout.logprobs_M))]


def same_in_shares(name: str, checkpointing: bool, world: World) -> bool:
    """Whether sharding an architecture changes a bit of what it says."""
    found = []
    for shares in ("none", "whole", "in step"):
        model = hydra(name)
        if checkpointing:
            model.backbone().enable_gradient_checkpointing()
        block: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if shares != "none":
            base = ShardedBase(model, dist.new_group())
            block = base.whole if shares == "whole" else functools.partial(base.in_step, world)
        found.append(says(model, block))
    return len(found[0]) > 4 and all(
        len(other) == len(found[0]) and all(map(torch.equal, found[0], other)) for other in found[1:]
    )


def drawn_in_step(world: World) -> dict[str, Any]:
    """Answers of unequal shares, by a base that is whole and by one that never is; what a process holds meanwhile."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 8}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=40, max_position_embeddings=64, **shape))
    model = HydraModel.from_pretrained(llama, roles=hydra_roles())
    base = ShardedBase(model, dist.new_group())
    # rank 0 has more rows than its engine admits at once; rank 1 a single short one, then none
    shares = [[[[3 + i, 5, 7 + i] for i in range(5)], [[9] * 20]], [[[8, 12, 4, 6]], []]][world.rank]
    sampling = SamplingConfig(max_completion_length=(8, 3)[world.rank], eos_token_ids=(2,), seed=3)
    options = dataclasses.replace(MODEL_STEP, max_rows=2)
    held = held_meanwhile(model)
    found, samples, sums = [], [], []
    for block in (base.whole, functools.partial(base.in_step, world)):
        rollouts = []
        with block():
            for prompts in shares:
                if prompts:
                    rollouts.append(generate(model, prompts, sampling, options=options))
            # one rank draws, the other waits for it in an exchange; then each scores what it has
            with world.together("samples"):
                drawn = generate(model, [[4, 4]], sampling, options=options) if world.is_main else None
            samples.append([] if drawn is None else drawn.batch.tokens_T.tolist())
            scores = model.score(rollouts[0].batch, ("actor", "reference"))
            sums.append(world.gather(len(rollouts)))
        found.append([*(t for r in rollouts for t in (r.batch.tokens_T, r.logprobs_M)), scores.logprobs_M])
    return {
        "same": len(found[0]) == len(found[1]) and all(map(torch.equal, *found)),
        "tokens": sum(len(t) for t in found[0][0::2]),
        "samples": samples,
        "gathered": sums,
        "held": held(),
    }


def held_meanwhile(model: HydraModel) -> Callable[[], dict[str, int]]:
    """Bytes of all tensors that are alive within a few calls of a block in the middle, at most; and of parts."""
    backbone = model.backbone()
    peaks: dict[bool, list[int]] = {True: [], False: []}

    def look(module: torch.nn.Module, args: object) -> None:
        seen = peaks[backbone.in_turn is None]
        if len(seen) < 4:
            seen.append(alive())

    before = alive()
    backbone.blocks[4].register_forward_pre_hook(look)
    return lambda: {
        "before": before,
        "block": sum(p.numel() * p.element_size() for p in backbone.blocks[4].parameters()),
        "blocks": len(backbone.blocks),
        "base": sum(p.numel() * p.element_size() for _, p in backbone.base_parameters()),
        "whole": max(peaks[True]),
        "in step": max(peaks[False]),
    }


def alive() -> int:
    """Bytes of all tensors that Python knows and that are not garbage."""
    gc.collect()  # what earlier jobs have left in cycles goes at any moment
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@contextlib.contextmanager
def trainer_of(make: Callable[..., Run], config: Any, world: World) -> Iterator[Run]:
    """A trainer, with generators of its own on Ray where the configuration has them there."""
    if getattr(config, "async_mode", "off") != "ray":
        yield in_few_lanes(make(config, world))
        return
    from rlhf_engine.generators.ray import generators_on_ray  # not before the processes are forked

    with generators_on_ray(config, world) as connect:
        yield make(config, world, connect=connect)


def in_few_lanes(trainer: Run) -> Run:
    """The trainer; in the runs of that name some minibatches alone have room for all of their lanes together."""
    if "some-lanes-together" in str(trainer.output):
        trainer.model.token_budget = 30
    return trainer


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


def run_out_of_memory(learning: bool, module: torch.nn.Module, args: object) -> None:
    if torch.is_grad_enabled() == learning:
        raise torch.OutOfMemoryError("out of memory, says the test")


def end_process(step: int, metrics: dict[str, Any]) -> None:
    os._exit(3)


def do(job: dict[str, Any], world: World, folder: Path) -> Any:
    if job["do"] == "architectures":
        return {
            name: [same_in_shares(name, checkpointing, world) for checkpointing in (False, True)] for name in job["of"]
        }
    if job["do"] == "in step":
        return drawn_in_step(world)
    options, make = KINDS[job.get("kind", "rl")]
    config = options(**{**job["config"], **(job.get("rank_1", {}) if world.rank == 1 else {})})
    if job["do"] == "steps":
        tensors, rows = recorded_steps(config, world, job["steps"])
        save_file(tensors, folder / f"{job['name']}-{world.rank}.safetensors")
        return rows
    if job["do"] == "run":
        with trainer_of(make, config, world) as trainer:
            try:
                trainer.run(stop_after(job["stop"]) if "stop" in job else None)
                stopped = False
            except Stop:
                stopped = True
                # as if it had been killed, and had left no checkpoint of that step
                lost = trainer.output / f"checkpoint-{job['stop']}"  # where the base is trained in shares there is none
                with world.together("lost"):
                    if world.is_main:
                        shutil.rmtree(lost, ignore_errors=trainer.optimizer.is_sharded)
        if stopped:
            config = dataclasses.replace(config, resume_from_checkpoint="auto")
            with trainer_of(make, config, world) as trainer:
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
        with trainer_of(make, config, world) as trainer:
            if job.get("out_of_memory") == world.rank:  # in the middle of a backbone forward
                trainer.model.backbone().blocks[1].register_forward_pre_hook(
                    functools.partial(run_out_of_memory, job.get("learning", True))
                )
            trainer.run(end_process if job.get("dies") == world.rank else None)
    except (EngineError, torch.OutOfMemoryError) as error:
        return [type(error).__name__, str(error), time.monotonic() - began]
    return None


def main(folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = json.loads((folder / "plan.json").read_text())
    # a file rather than a port, of which another process might take the one that was free
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size,
        timeout=timedelta(seconds=plan["timeout"]),
    )  # fmt: skip
    # "auto", the default, is the CPU where there is no GPU
    world = World.from_environment("cpu" if torch.cuda.is_available() else "auto", timeout=plan["timeout"])
    assert (world.rank, world.size, world.device) == (rank, size, torch.device("cpu"))
    with mock.patch("rlhf_engine.training.run.plot_curves", lambda metrics, picture: Path(picture).touch()):
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
    size = json.loads((place / "plan.json").read_text())["processes"]
    gc.collect()
    gc.freeze()  # looking for live tensors takes as long as there are objects
    ranks = {fork(rank, size, place): rank for rank in range(size)}
    while ranks:
        child, how = os.wait()
        (place / f"ended-{ranks.pop(child)}").write_text(str(os.waitstatus_to_exitcode(how)))
