"""Runs on the stand-in device and on the CPU, and the combinations of options that have to agree there."""

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_kernels.attention import attention

from rlhf_engine.config import parser
from rlhf_engine.config.algorithm import ALGORITHMS
from rlhf_engine.hydra import model as hydra_model, varlen
from rlhf_engine.rollout.request import Rollout
from rlhf_engine.training.rl import RlTrainer
from tests.devices.stand_in import DEVICE, Traffic, counted, installed
from tests.training.test_data import train_config, write_model
from tests.training.test_rl import trained, without_timings

FACTORS: dict[str, tuple[Any, ...]] = {
    "algorithm": tuple(ALGORITHMS),
    "method": ("full_ppo", "lora_ppo", "dynamic_lora_ppo", "j_hydra_ppo", "hydra_ppo"),
    "numbers": (
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float32", "optim": "adafactor"},
        {"dtype": "bfloat16", "optim": "adamw_stochastic"},
    ),
    "exact": (True, False),
    "num_generations": (None, 3),
    "draws": ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "temperature": 0.7}),
    "lora_dropout": (0.0, 0.2),
    "gradient_checkpointing": (False, True),
}


def pairwise(seed: int = 0) -> list[dict[str, Any]]:
    """Values of the factors in which any two of two factors come together, few in number."""
    draw = random.Random(seed)
    places = {name: range(len(FACTORS[name])) for name in FACTORS}
    waiting = {
        pair for a, b in itertools.combinations(FACTORS, 2) for pair in itertools.product(_places(a), _places(b))
    }
    rows = []
    while waiting:
        best: tuple[int, dict[str, int]] = (-1, {})
        for _ in range(40):
            row = dict(draw.choice(sorted(waiting)))
            for name in draw.sample(list(FACTORS), len(FACTORS)):
                if name not in row:
                    gains = [sum(pair in waiting for pair in _pairs({**row, name: i})) for i in places[name]]
                    row[name] = max(places[name], key=lambda i: (gains[i], draw.random()))
            best = max(best, (sum(pair in waiting for pair in _pairs(row)), row), key=lambda found: found[0])
        rows.append(best[1])
        waiting -= set(_pairs(best[1]))
    return [{name: FACTORS[name][row[name]] for name in FACTORS} for row in rows]


def _places(name: str) -> list[tuple[str, int]]:
    return [(name, i) for i in range(len(FACTORS[name]))]


def _pairs(row: dict[str, int]) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Pairs of places, in the order of the factors."""
    return list(itertools.combinations([(name, row[name]) for name in FACTORS if name in row], 2))


def options_of(row: dict[str, Any]) -> dict[str, Any]:
    """Options of a run with such values."""
    plain = {name: value for name, value in row.items() if not isinstance(value, dict)}
    return {
        **plain,
        **{name: value for values in row.values() if isinstance(values, dict) for name, value in values.items()},
    }


HALVES = "return [float(sum(7 + 2 * i == t % 50 for i, t in enumerate(r))) + 0.002 * sum(r) for r in completion_ids]"
"""A reward that hardly any two answers share."""


def write_small_model(folder: Path) -> Path:
    """One layer, with heads wide enough for every path of attention."""
    sizes = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    return write_model(folder, **sizes)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: varlen.Sequences, rule: varlen.ScoreRule
) -> torch.Tensor:
    """Attention of packed rows where a GPU has a library for it: the definition."""
    bounds = (sequences.starts, sequences.before)
    assert {x.device for x in (query, *bounds)} == {DEVICE}
    scale = query.shape[-1] ** -0.5 if rule.scaling is None else rule.scaling
    rest = {"window": rule.window, "softcap": rule.softcap, "sinks": rule.sinks, "parents": sequences.parents}
    return attention(query, key, value, sequences.lengths, scale=scale, backend="reference", **rest)


@contextmanager
def on_stand_in() -> Iterator[None]:
    """A block in which runs may name the device, whose attention has a path as that of other GPUs."""
    path = varlen.Path(name="stand-in", unsupported=lambda layer: None, load=lambda: _attend)
    varlen._chosen.cache_clear()
    with installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(parser, "_require_form", lambda *of: None)
        patch.setattr(varlen, "PATHS", (path, *varlen.PATHS))
        patch.setattr(hydra_model, "SHARING", (*hydra_model.SHARING, DEVICE.type))  # whatever a GPU does by default
        yield
    varlen._chosen.cache_clear()


def make_trainer(model: Path, output: Path, reward: str, device: str, **changes: Any) -> RlTrainer:
    """A trainer whose steps are short."""
    some = {"num_mini_batches": 1, "num_ppo_epochs": 1, "generation_batch_size": 12, "max_completion_length": 4}
    rewards = [reward, "reward_model"]
    return RlTrainer(train_config(model, output, device=device, reward_funcs=rewards, **{**some, **changes}))


@dataclasses.dataclass
class Step:
    """A first step: its metrics, what was trained, what was drawn, and the traffic with the device."""

    metrics: dict[str, Any]
    trained: dict[str, torch.Tensor]
    rollout: Rollout
    traffic: Traffic


def first_step(trainer: RlTrainer, drawn: Rollout | None = None) -> Step:
    """drawn: a rollout that takes the place of the step's own; None: there is none."""
    own, kept = trainer.source.draw, []

    def draw(*args: Any) -> Any:
        rollout, found = own(*args)
        kept.append(rollout if drawn is None else drawn)
        return kept[-1], found

    trainer.source.draw = draw  # type: ignore[method-assign]
    with contextlib.closing(trainer.source), counted() as traffic:  # a generator's threads end with the step
        metrics = trainer.step()
    tensors = {name: tensor.cpu() for name, tensor in trained(trainer).items()}
    return Step(without_timings(metrics), tensors, kept[0], traffic)


def on_host(rollout: Rollout) -> Rollout:
    """A rollout of the device, in the host's memory."""
    batch = rollout.batch
    supports = None if batch.supports is None else batch.supports.to("cpu")
    batch = dataclasses.replace(batch, tokens_T=batch.tokens_T.cpu(), supports=supports)
    return dataclasses.replace(
        rollout, batch=batch, logprobs_M=rollout.logprobs_M.cpu(), versions_M=rollout.versions_M.cpu()
    )


def compare(model: Path, folder: Path, reward: str, **changes: Any) -> Step:
    """The step on the stand-in, after a comparison with that of the CPU.

    In exact mode both have the same bits. Elsewhere the CPU learns from the stand-in's answers, up to rounding.
    """
    device = make_trainer(model, folder / "device", reward, str(DEVICE), **changes)
    assert device.model.device == DEVICE
    found = first_step(device)
    host = make_trainer(model, folder / "host", reward, "cpu", **changes)
    expected = first_step(host, None if changes["exact"] else on_host(found.rollout))
    alone = ("async/", "scoring_tokens")  # how long a generator takes, and what a GPU alone chooses
    left, right = ({k: v for k, v in x.metrics.items() if not k.startswith(alone)} for x in (found, expected))
    if changes["exact"]:
        assert left == right
        assert left.keys() == right.keys()
        assert all(torch.equal(tensor, expected.trained[name]) for name, tensor in found.trained.items())
        return found
    # who shares prompts is decided by the device
    close(*({k: v for k, v in row.items() if k != "shared_prompt_ratio"} for row in (left, right)), changes["dtype"])
    return found


def close(found: dict[str, Any], expected: dict[str, Any], dtype: str) -> None:
    """Metrics of a first step are the same up to the roundings of a dtype."""
    rtol, atol = (2e-3, 1e-4) if dtype == "float32" else (8e-2, 3e-2)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=rtol, abs=atol), name
