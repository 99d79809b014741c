"""Generators as Ray actors, on this machine or on a cluster: `rlhf-engine train --async ray`.

    with generators_on_ray(config) as connect:
        RlTrainer(config, connect=connect).run()

Every generator is a process that holds the base. Only adapters go over, each checked on arrival and again by the digest
that comes back with the answers that it drew. One that dies, raises or falls silent is lost: another draws its share,
and a new one takes its place, up to three times in a run.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rlhf_kernels.runtime import registry

from rlhf_engine.config import TrainConfig
from rlhf_engine.devices import is_gpu, resolve_device
from rlhf_engine.distributed.process_group import ALONE, World
from rlhf_engine.errors import ConfigError
from rlhf_engine.generators.build import Connect
from rlhf_engine.generators.ray.transport import RayTransport, Room
from rlhf_engine.generators.scheduler import SILENCE
from rlhf_engine.generators.serialize import fixed_parts
from rlhf_engine.hydra import HydraModel
from rlhf_engine.policy.build import BEHAVIOUR

_PATHS = ("model_name_or_path", "actor_adapter", "reference_adapter", "reward_adapter", "reward_model_path")
RESTARTS = 3
"""Times in a run that a lost generator is replaced."""
_REACH = 10.0
"""Seconds in which a cluster's head has to answer."""
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextlib.contextmanager
def generators_on_ray(config: TrainConfig, world: World = ALONE) -> Iterator[Connect]:
    """Make what `RlTrainer` takes as `connect`; ConfigError where Ray is missing or has no room for the generators.

    Ray is started, or a cluster is joined and left at the end. One that this process has joined already is used as it
    is. Several processes join one cluster, where each has generators of its own.
    """
    ray = _import_ray()
    address = os.environ.get("RAY_ADDRESS")
    if world.size > 1 and address is None:
        raise ConfigError(
            f"RAY_ADDRESS: expected that of a running cluster (ray start --head) in a run of {world.size} processes, "
            "each of which has generators of its own there, got none"
        )
    device = resolve_device(config.device) if world.device is None else world.device
    threads = torch.get_num_threads()
    ours = not ray.is_initialized()
    if ours:
        _join(ray, address, device)
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = room_for(config, device, nodes, learners=world.size)
        if ours and address is None and room.threads is not None:
            # they run on the learner's own cores
            torch.set_num_threads(max(1, threads - config.ray_generators * room.threads))

        def connect(model: HydraModel) -> RayTransport:
            return RayTransport(
                ray,
                replace(_for_generators(config, device), exact=registry.is_exact()).to_dict(),
                fixed_parts(model),
                generators=config.ray_generators,
                room=room,
                restarts=RESTARTS,
                timeout=SILENCE,
                device=model.role_backbone(BEHAVIOUR).device,
            )

        yield connect
    finally:
        torch.set_num_threads(threads)
        if ours:
            ray.shutdown()


def room_for(config: TrainConfig, device: torch.device, nodes: list[Mapping[str, float]], *, learners: int = 1) -> Room:
    """Ray resources of each generator. Raises ConfigError where machines with these resources cannot hold them all."""
    n = config.ray_generators * learners
    cpus_by_node = [int(node.get("CPU", 0)) for node in nodes]
    if not is_gpu(device):
        half = min(max(cpus_by_node, default=1), sum(cpus_by_node) // (2 * n))
        room, sharers = Room(cpus=max(1, half), gpus=0.0, threads=max(1, half)), 0
    else:
        gpus = sum(int(node.get("GPU", 0)) for node in nodes)
        sharers = -(-n // max(1, gpus))  # generators of one GPU: none lies across two
        room = Room(cpus=1, gpus=1 / sharers, threads=None)
    fit = 0
    for node, cpus in zip(nodes, cpus_by_node, strict=True):
        by_cpu = cpus // room.cpus
        fit += min(by_cpu, int(node.get("GPU", 0)) * sharers) if room.gpus else by_cpu
    if fit < n:
        have = f"{sum(cpus_by_node)} CPUs and {sum(node.get('GPU', 0) for node in nodes):g} GPUs"
        each = f"{room.cpus} CPUs and {room.gpus:g} GPUs"
        given = f"{n}" if learners == 1 else f"{config.ray_generators} for each of {learners} processes"
        raise ConfigError(f"ray_generators: expected at most {fit}, of {each} each, where Ray has {have}; got {given}")
    return room


def _import_ray() -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            "async: expected 'off', 'overlap' or 'replay' where Ray is not installed (pip install 'rlhf-engine[ray]'), "
            f"got 'ray': {error}"
        ) from error


def _join(ray: Any, address: str | None, device: torch.device) -> None:
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is not None:
        host, _, port = address.rpartition(":")
        try:
            if host:
                socket.create_connection((host, int(port)), timeout=_REACH).close()  # Ray would try for minutes
            ray.init(address=address, **quiet)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:  # what they raise where nobody answers
            raise ConfigError(
                f"RAY_ADDRESS: expected the address of a running cluster's head, got {address!r}: {error}"
            ) from error
        return
    others = _other_gpus(device)
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if others is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = others
    try:
        ray.init(address="local", include_dashboard=False, **quiet)
    finally:
        if others is not None:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before


def _other_gpus(device: torch.device) -> str | None:
    """CUDA_VISIBLE_DEVICES without the learner's GPU; None where it has no other beside it."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return None
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return ",".join(name for i, name in enumerate(ids) if i != (device.index or 0))


def _for_generators(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Folders by their whole path, because processes may start elsewhere; the GPU is the one that Ray gives."""
    paths = {name: getattr(config, name) for name in _PATHS}
    resolved = {name: str(Path(path).resolve()) for name, path in paths.items() if path and Path(path).exists()}
    return replace(config, **resolved, device=device.type, shard_base=False)  # type: ignore[arg-type]
