"""Several models on one base, and roles that come and go while a model lives."""

import gc
import weakref

import pytest
import torch

from rlhf_engine.hydra import (
    HydraModel,
    Logprobs,
    RoleSpec,
    SlotConfig,
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
    with pytest.raises(ValueError, match=r"backbone: expected a frozen base that is whole to share, got one that is t"):
        whole.beside(roles=hydra_roles())
