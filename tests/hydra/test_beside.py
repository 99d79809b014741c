"""Several models on one base, and roles that come and go while a model lives."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from rlhf_engine.hydra import (
    HydraModel,
    Logprobs,
    PolicyLoss,
    RoleSpec,
    SlotConfig,
    ValueLoss,
    full_ppo_roles,
    hydra_roles,
    j_hydra_roles,
)
from tests.conftest import random_batch, randomise, tiny_llama

FIRST = {"roles": hydra_roles(), "slots": {"actor": SlotConfig(r=4), "critic": SlotConfig(r=2, dropout=0.3)}, "seed": 1}
SECOND = {
    "roles": j_hydra_roles(),
    "slots": {"actor": SlotConfig(r=8, target_modules=("q_proj", "lm_head"))},
    "seed": 2,
}


def alone(options) -> HydraModel:
    return HydraModel.from_pretrained(tiny_llama(), **options)


def beside(base: HydraModel, options) -> HydraModel:
    return base.beside(**options)


def train(model: HydraModel, steps: int = 2):
    """A generator that trains a step at a time, and yields what came of it."""
    batch = random_batch()
    m = batch.n_completion_tokens
    numbers = torch.randn(3, m, generator=torch.Generator().manual_seed(5))
    mask = torch.ones(m, dtype=torch.bool)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        old = model.eval().score(batch, ("actor", "reference", "critic"))
        policy = PolicyLoss(old_logprob_M=old.logprobs_M, advantage_M=numbers[0], mask_M=mask, denom=float(m))
        value = ValueLoss(old_value_M=old.values_M, return_M=numbers[1], mask_M=mask, denom=float(m))
        found, critic = model.train()(batch, (policy, value), dropout_seed=step)
        (found.loss + 0.1 * critic.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        yield {"logprobs": old.logprobs_M, "ref": old.ref_logprobs_M, "values": old.values_M, **trained}


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_two_models_take_turns_with_the_floats_that_each_has_alone():
    expected = [list(train(alone(options))) for options in (FIRST, SECOND)]
    base = alone(FIRST)
    models = (base, beside(base, SECOND))
    assert models[0].backbone().model is models[1].backbone().model
    found = list(zip(*map(train, models), strict=True))
    for step, pair in enumerate(found):
        for mine, theirs in zip(pair, expected, strict=True):
            assert same(mine, theirs[step]), step
    assert not torch.equal(found[0][0]["logprobs"], found[1][0]["logprobs"])


def test_two_models_run_in_two_threads():
    base = alone(FIRST)
    models = (base, beside(base, SECOND))
    randomise(models[0], "actor")
    randomise(models[1], "actor")
    batch = random_batch()
    expected = [model.eval().score(batch, ("actor", "reference")).logprobs_M for model in models]
    wrong = []

    def look(model, logprobs_M):
        for _ in range(20):
            if not torch.equal(model.score(batch, ("actor", "reference")).logprobs_M, logprobs_M):
                wrong.append(model)

    threads = [threading.Thread(target=look, args=pair) for pair in zip(models, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not torch.equal(*expected)


def test_a_model_that_goes_takes_its_slots_with_it():
    base = alone(FIRST)
    other = beside(base, SECOND)
    slot = weakref.ref(other.backbone().slot("actor"))
    other.score(random_batch(), ("actor",))
    del other
    gc.collect()
    assert slot() is None
    assert set(base.backbone().slots) == {"actor", "critic"}
    base.score(random_batch())


def test_roles_come_and_go():
    model = alone(FIRST)
    randomise(model, "actor")
    batch = random_batch()
    before = model.score(batch)
    guest = RoleSpec(slot="guest")
    model.add_roles({"guest": guest, "judge": RoleSpec(slot="guest", head="judge")}, {"guest": SlotConfig(r=3)})
    randomise(model, "guest")
    (found,) = model(batch, (Logprobs(role="guest"),))
    assert not torch.equal(found.logprob, before.ref_logprobs_M)
    after = model.score(batch)
    assert torch.equal(after.logprobs_M, before.logprobs_M)
    assert set(model.heads) == {"judge", "reward", "value"}
    model.remove_roles(["guest", "judge"])
    assert set(model.backbone().slots) == {"actor", "critic"}
    assert set(model.heads) == {"reward", "value"}
    assert torch.equal(model.score(batch).logprobs_M, before.logprobs_M)
    with pytest.raises(ValueError, match=r"role: expected one of .*, got 'guest'"):
        model(batch, (Logprobs(role="guest"),))


def test_what_cannot_come_or_go(tmp_path):
    model = alone(FIRST)
    with pytest.raises(ValueError, match=r"roles: expected names that are free, got \['actor'\]"):
        model.add_roles({"actor": RoleSpec()})
    with pytest.raises(ValueError, match=r"slots: expected names that are free, got \['critic'\]"):
        model.add_roles({"guest": RoleSpec(slot="critic")}, {"critic": SlotConfig()})
    with pytest.raises(ValueError, match=r"slots: expected names that a role uses"):
        model.add_roles({"guest": RoleSpec()}, {"guest": SlotConfig()})
    with pytest.raises(ValueError, match="adapter"):
        model.add_roles({"guest": RoleSpec(slot="guest")}, {"guest": SlotConfig(init_from=str(tmp_path))})
    assert set(model.roles) == set(hydra_roles())
    assert set(model.backbone().slots) == {"actor", "critic"}
    with pytest.raises(ValueError, match="names: expected a role to be left, got all of"):
        model.remove_roles(list(model.roles))
    with pytest.raises(ValueError, match=r"role: expected one of .*, got 'guest'"):
        model.remove_roles(["guest"])
    with pytest.raises(ValueError, match=r"backbone: expected one of \['base'\], got 'reference'"):
        model.beside(roles=full_ppo_roles())
    whole = HydraModel.from_pretrained(tiny_llama(), roles={"sft": RoleSpec(trainable=True)})
    with pytest.raises(
        ValueError, match=r"backbone: expected a frozen base that is whole to share, got one that is trained"
    ):
        whole.beside(roles=hydra_roles())
