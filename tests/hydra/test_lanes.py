"""Lanes: how roles fold into backbone forwards, one call or many; roles come and go, and models share a base."""

import gc
import weakref

import pytest
import torch

from rlhf_engine.hydra import HydraModel, Logprobs, RoleSpec, SlotConfig, hydra_roles
from rlhf_engine.hydra.batch import split_by_tokens
from rlhf_engine.hydra.roles import fold_lanes
from tests.conftest import build, random_batch, randomise, tiny_llama

ROLES = ("actor", "reference", "critic", "reward")


def test_roles_fold_into_lanes():
    hydra = [(slot, tuple(roles)) for (_, slot), roles in fold_lanes(hydra_roles(), ROLES).items()]
    assert hydra == [("actor", ("actor",)), (None, ("reference", "reward")), ("critic", ("critic",))]
    joint = [(slot, tuple(roles)) for (_, slot), roles in fold_lanes(hydra_roles("j_hydra_ppo"), ROLES).items()]
    assert joint == [("actor", ("actor", "critic")), (None, ("reference", "reward"))]


@pytest.mark.parametrize(("method", "lanes"), [("hydra", 3), ("j_hydra", 2)])
def test_scoring_runs_all_lanes_in_one_backbone_call(method, lanes):
    model, batch = build(method), random_batch()
    calls: list[int] = []
    base_model = model.backbone().base_model
    handle = base_model.register_forward_pre_hook(
        lambda m, a, k: calls.append(k["input_ids"].numel()), with_kwargs=True
    )
    model.score(batch)
    assert calls == [lanes * batch.n_tokens]
    calls.clear()
    model.token_budget = batch.n_tokens  # room for one lane of the whole batch only
    model.score(batch)
    handle.remove()
    assert sum(calls) == lanes * batch.n_tokens
    assert max(calls) <= batch.n_tokens


def test_every_budget_gives_the_same_scores():
    for method, budget in (("hydra", 1), ("hydra", 40), ("j_hydra", 20)):
        model, batch = build(method), random_batch()
        whole = model.score(batch, exact_kl=True)
        model.token_budget = budget
        parts = model.score(batch, exact_kl=True)
        for name in ("logprobs_M", "entropies_M", "ref_logprobs_M", "kl_M", "values_M", "rewards_N"):
            said = f"{name} of {method} within {budget}"
            torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-5, atol=2e-6, msg=said)


def test_two_heads_on_one_traversal_equal_two_traversals():
    model, batch = build("j_hydra"), random_batch()
    both = model.score(batch, ("actor", "critic"))
    assert torch.equal(both.logprobs_M, model.score(batch, ("actor",)).logprobs_M)
    alone = model.score(batch, ("critic",))
    assert torch.equal(both.values_M, alone.values_M)
    assert alone.logprobs_M is None


def test_split_by_tokens():
    assert split_by_tokens((3, 4, 5), 7) == [[0, 1], [2]]
    assert split_by_tokens((9, 1, 1), 2) == [[0], [1, 2]]
    assert split_by_tokens((5,), 0) == [[0]]
    # four tokens of each are a prompt: of one prompt, of two, of another
    once = ([7, 7, 8, 7, 7], [4, 4, 4, 4, 4])
    assert split_by_tokens((5, 5, 5, 6, 6), 6, once) == [[0, 1], [2], [3], [4]]
    assert split_by_tokens((5, 5, 5, 6, 6), 12, once) == [[0, 1, 2], [3, 4]]
    assert split_by_tokens((5, 5, 5, 6, 6), 12) == [[0, 1], [2, 3], [4]]


def test_off_lanes_never_enter_a_gradient_call():
    from rlhf_engine.hydra import Logprobs, Rewards, Values

    model, batch = build(), random_batch()
    seen: list[tuple[int, bool]] = []
    base_model = model.backbone().base_model
    handle = base_model.register_forward_pre_hook(
        lambda m, a, k: seen.append((k["input_ids"].numel(), torch.is_grad_enabled())), with_kwargs=True
    )
    model(batch, (Logprobs(), Logprobs(role="reference"), Values(), Rewards()))
    handle.remove()
    assert sorted(seen) == [(batch.n_tokens, False), (2 * batch.n_tokens, True)]


FIRST = {"roles": hydra_roles(), "slots": {"actor": SlotConfig(r=4), "critic": SlotConfig(r=2, dropout=0.3)}, "seed": 1}
SECOND = {
    "roles": hydra_roles("j_hydra_ppo"),
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
        model.beside(roles=hydra_roles("full_ppo"))
    whole = HydraModel.from_pretrained(tiny_llama(), roles={"sft": RoleSpec(trainable=True)})
    with pytest.raises(ValueError, match=r"backbone: expected a frozen base that is whole to share, got one that is t"):
        whole.beside(roles=hydra_roles())
