"""A fault that is put into a run between two steps is told: the run stops, or the metric that watches leaves its band.

The engine writes norms of gradients and the difference between rollout and training. The rest is computed here from the
trainer between steps: the hash of the base, how far each role has moved, and the exact KL beside the estimate.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_engine.errors import EngineError, MismatchError, NonFiniteError
from rlhf_engine.scoring import experience
from rlhf_engine.training.rl import RlTrainer
from tests.training.test_data import train_config, write_reward

STEPS, FAULT_AT, RATE = 7, 4, 0.02
ROLES = ("actor", "critic")
Row = dict[str, float]


class Watched(RlTrainer):
    """A run that is watched, and harmed from a step on."""

    base = ""  # hash of the base at the start

    def weights(self, role: str) -> torch.Tensor:
        """All that a role trains, in one row."""
        return torch.cat([w.detach().flatten().double() for w in self.optimizer.weights(role)])

    def watch(self, harm: Callable[["Watched", pytest.MonkeyPatch], None] | None) -> list[Row]:
        """Make all steps; what is known after each."""
        rows, seen = list[Row](), dict[str, float]()
        make = self._scoring.experience

        def scored(*args: Any, **options: Any) -> Any:
            made = make(*args, **options)
            exact = self.model.score(made.batch, ["actor", "reference"], exact_kl=True).kl_M
            assert exact is not None
            seen["kl_exact"] = float(exact.sum())
            seen["kl_estimated"] = float(made.kl_M.sum())
            return made

        self._scoring.experience = scored
        with pytest.MonkeyPatch.context() as patch:
            for step in range(STEPS):
                if step == FAULT_AT and harm is not None:
                    harm(self, patch)
                before = {role: self.weights(role) for role in ROLES}
                row = self.step()
                for role in ROLES:
                    row[f"moved/{role}"] = float((self.weights(role) - before[role]).abs().max()) / RATE
                    row[f"norm/{role}"] = float(self.weights(role).norm())
                intact = self.model.backbone().base_hash(refresh=True) == self.base
                rows.append({**row, **seen, "base/intact": float(intact)})
        return rows


def before_apply(change: Callable[[Watched], None]) -> Callable[[Watched, pytest.MonkeyPatch], None]:
    """A fault between the gradients of a step and the optimizer."""

    def harm(run: Watched, patch: pytest.MonkeyPatch) -> None:
        apply = run.policy.apply
        patch.setattr(run.policy, "apply", lambda: (change(run), apply())[1])

    return harm


def gradient(role: str, factor: float) -> Callable[[Watched], None]:
    def change(run: Watched) -> None:
        for p in run.optimizer.groups[role].values():
            if p.grad is not None:
                p.grad *= factor

    return change


def flip_a_bit(run: Watched, _: pytest.MonkeyPatch) -> None:
    _, p = list(run.model.backbone().base_parameters())[3]
    p.data.view(torch.int32).view(-1)[5] ^= 1  # the lowest of a weight


def draw_with_old_weights(run: Watched, patch: pytest.MonkeyPatch) -> None:
    actor, draw = run.model.backbone().slot("actor"), run.source.draw
    old = {name: p.detach().clone() for name, p in actor.named_parameters()}

    def stale(*args: Any) -> Any:
        now = {name: p.detach().clone() for name, p in actor.named_parameters()}
        actor.load_state_dict(old)
        try:
            return draw(*args)
        finally:
            actor.load_state_dict(now)

    patch.setattr(run.source, "draw", stale)


def skip(role: str) -> Callable[[Watched, pytest.MonkeyPatch], None]:
    return lambda run, patch: patch.setitem(run.optimizer.learning_rates, role, 0.0)


def turn_the_estimate(run: Watched, patch: pytest.MonkeyPatch) -> None:
    true = experience.token_kl
    patch.setattr(experience, "token_kl", lambda *args: -true(*args))


def enlarge(run: Watched, _: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        for p in run.optimizer.groups["actor"].values():
            p *= 10


def spoil(run: Watched, _: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        next(iter(run.optimizer.groups["actor"].values())).view(-1)[0] = math.nan


FAULTS: dict[str, tuple[Callable[[Watched, pytest.MonkeyPatch], None], str | type[EngineError]]] = {
    "one bit of the base": (flip_a_bit, "base/intact"),
    "a rollout with old weights": (draw_with_old_weights, MismatchError),
    "an optimizer that skips the actor": (skip("actor"), "moved/actor"),
    "an optimizer that skips the critic": (skip("critic"), "moved/critic"),
    "a gradient ten times as large": (before_apply(gradient("actor", 10.0)), "grad_norm/actor"),
    "a critic's gradient of nothing": (before_apply(gradient("critic", 0.0)), "grad_norm/critic"),
    "a gradient that is no number": (before_apply(gradient("actor", math.nan)), NonFiniteError),
    "an adapter ten times as large": (enlarge, "norm/actor"),
    "a weight that is no number": (spoil, NonFiniteError),
    "an estimate of the KL with the wrong sign": (turn_the_estimate, "kl"),
}
"""What is done to a run, and the metric or the error that tells it."""


def left(rows: list[Row], sound: list[Row]) -> set[str]:
    """Metrics that leave their bands, which the sound run of the same seeds gives for norms."""
    found = set[str]()
    for row, other in zip(rows, sound, strict=True):
        found |= {"base/intact"} if not row["base/intact"] else set()
        for role in ROLES:  # Adam moves some weight by about its rate
            found |= set() if 0.1 < row[f"moved/{role}"] < 3 else {f"moved/{role}"}
            for name in (f"grad_norm/{role}", f"norm/{role}"):
                found |= set() if 1 / 3 < row[name] / other[name] < 3 else {name}
        found |= {"mismatch"} if row["mismatch/rollout_max"] or row["mismatch/update_max"] else set()
    if not 0.5 < sum(row["kl_estimated"] for row in rows[FAULT_AT:]) / sum(x["kl_exact"] for x in rows[FAULT_AT:]) < 2:
        found.add("kl")
    return found


def test_each_fault_is_told_by_what_watches_it(model: Path, tmp_path: Path, survived) -> None:
    reward = write_reward(tmp_path, "return [float(len(set(ids))) for ids in completion_ids]")
    options = {
        "max_steps": STEPS, "num_mini_batches": 1, "learning_rate": RATE, "kl_estimator": "k3",
        "reward_funcs": [reward], "generation_batch_size": 32, "per_device_train_batch_size": 32,
    }  # fmt: skip

    def run(name: str, harm: Callable[[Watched, pytest.MonkeyPatch], None] | None) -> list[Row]:
        trainer = Watched(train_config(model, tmp_path / name.replace(" ", "-"), **options))
        trainer.base = trainer.model.backbone().base_hash(refresh=True)
        return trainer.watch(harm)

    sound, failures = run("sound", None), list[str]()
    assert left(sound, sound) == set()
    for name, (harm, told) in FAULTS.items():
        found: Any
        try:
            found = left(run(name, harm), sound)
        except EngineError as error:
            found = {type(error)}
        if told not in found:
            failures.append(f"{name}: expected {told}, got {found}")
    survived("canaries", len(FAULTS), len(failures))
    assert failures == []
