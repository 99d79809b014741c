"""RoleOptimizer: who owns a parameter, schedule, clipping, state, and gradients that must not be applied."""

import pytest
import torch

from rlhf_engine.errors import NonFiniteError
from rlhf_engine.hydra.optimizer import RoleOptimizer, lr_factor
from tests.conftest import build


def with_gradients(model, seed: int = 0, scale: float = 1.0):
    """Random gradients on everything that is trained."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = scale * torch.randn(p.shape, generator=generator)
    return model


def copies(model) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def group_norm(group, tensors) -> float:
    return torch.stack([tensors(n, p).double().norm() for n, p in group.items()]).norm().item()


def test_lr_factor_shapes():
    def factors(**options):
        return [lr_factor(s, {"lr_scheduler_type": "constant", "warmup_steps": 0, **options}, 8) for s in range(9)]

    assert factors() == [1.0] * 9
    assert factors(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0] + [1.0] * 5
    cosine = factors(lr_scheduler_type="cosine")
    assert cosine[0] == 1.0
    assert cosine[4] == pytest.approx(0.5)
    assert cosine[8] == pytest.approx(0.0, abs=1e-15)
    assert cosine == sorted(cosine, reverse=True)
    assert min(cosine[:8]) > 0  # no step of the run is wasted on a rate of 0
    assert factors(lr_scheduler_type="linear") == [1 - i / 8 for i in range(9)]
    assert factors(lr_scheduler_type="linear", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    both = factors(lr_scheduler_type="cosine", warmup_steps=4)
    assert both[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert both[6] == pytest.approx(0.5)
    assert lr_factor(3, {"lr_scheduler_type": "cosine", "warmup_steps": 3}, 3) == 1.0
    with pytest.raises(ValueError, match="lr_scheduler_type: expected 'constant', 'linear' or 'cosine', got 'step'"):
        factors(lr_scheduler_type="step")


def test_a_shared_parameter_has_one_owner():
    joint = build("j_hydra")
    optimizer = RoleOptimizer(joint, {"actor": 1e-3, "critic": 1e-2})
    owned = [id(p) for group in optimizer.groups.values() for p in group.values()]
    assert len(owned) == len(set(owned))
    assert set(owned) == {id(p) for p in joint.parameters() if p.requires_grad}
    assert set(optimizer.groups["critic"]) == {"heads.value.weight", "heads.value.bias"}
    first = RoleOptimizer(joint, {"critic": 1e-2, "actor": 1e-3})  # the first role named owns what is shared
    assert set(first.groups) == {"critic"}
    both = RoleOptimizer(build(), {"actor": 1e-3, "critic": 1e-2})
    assert not set(both.groups["actor"]) & set(both.groups["critic"])


def test_every_trained_parameter_needs_a_role():
    with pytest.raises(ValueError, match=r"learning_rates: expected a role for every trained parameter, got none for"):
        RoleOptimizer(build(), {"actor": 1e-3})
    with pytest.raises(ValueError, match=r"role: expected one of .*got 'teacher'"):
        RoleOptimizer(build(), {"teacher": 1e-3})


def test_each_role_moves_at_its_own_scaled_rate():
    model = with_gradients(build())
    optimizer = RoleOptimizer(model, {"actor": 1e-2, "critic": 1e-3}, max_grad_norm=None)
    optimizer.set_lr_factor(0.5)
    before = copies(model)
    optimizer.step()
    after = dict(model.named_parameters())
    slots = model.backbone().slots
    for role, rate in (("actor", 5e-3), ("critic", 5e-4)):
        # AdamW's first step is the learning rate times the sign of the gradient
        for name, p in slots[role].named_parameters():
            moved = (p.detach() - before[f"backbones.base.slots.{role}.{name}"]).abs()
            torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-3, atol=1e-7)
    assert all(p.grad is None for p in after.values())


def test_clipping_is_per_role():
    model = with_gradients(build())
    for p in model.trainable_parameters("critic").values():
        p.grad *= 1e-4
    optimizer = RoleOptimizer(model, {"actor": 1e-3, "critic": 1e-3}, betas=(0.0, 0.999), max_grad_norm=0.5)
    wanted = {role: group_norm(group, lambda n, p: p.grad) for role, group in optimizer.groups.items()}
    before = {n: p.grad.clone() for n, p in model.trainable_parameters("critic").items()}
    norms = optimizer.step()
    assert wanted["critic"] < 0.5 < wanted["actor"]
    assert norms == {
        **{f"grad_norm/{role}": pytest.approx(norm, rel=1e-5) for role, norm in wanted.items()},
        "grad_clipped/actor": 1.0,
        "grad_clipped/critic": 0.0,
    }
    # with β₁ = 0 the first moment is the gradient that was applied
    state = optimizer.state_tensors()
    applied = group_norm(optimizer.groups["actor"], lambda n, p: state[f"{n}|exp_avg"])
    assert applied == pytest.approx(0.5, rel=1e-4)
    assert all(torch.equal(state[f"{n}|exp_avg"], g) for n, g in before.items())


def test_state_of_another_model_is_refused():
    joint = RoleOptimizer(with_gradients(build("j_hydra")), {"actor": 1e-3, "critic": 1e-3})
    both = RoleOptimizer(with_gradients(build()), {"actor": 1e-3, "critic": 1e-3})
    both.step()
    with pytest.raises(ValueError, match=r"optimizer state: expected parameters of this model, got \['base\.critic"):
        joint.load_state_tensors(both.state_tensors())


def test_a_gradient_that_is_not_finite_is_named_and_nothing_is_applied(survived):
    for value in [float("nan"), float("inf")]:
        model = with_gradients(build())
        culprit, p = list(model.trainable_parameters("critic").items())[5]
        p.grad.view(-1)[3] = value
        before = copies(model)
        optimizer = RoleOptimizer(model, {"actor": 1e-3, "critic": 1e-3})
        with pytest.raises(NonFiniteError, match=f"gradient of critic is not finite, first in {culprit}; nothing was"):
            optimizer.step()
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        assert optimizer.state_tensors() == {}
        assert all(p.grad is None for p in model.parameters())
    survived("faults", 1)


def test_finite_gradients_whose_norm_overflows_are_refused():
    model = with_gradients(build(), scale=3e37)
    before = copies(model)
    optimizer = RoleOptimizer(model, {"actor": 1e-3, "critic": 1e-3})
    with pytest.raises(NonFiniteError, match="gradient of actor is not finite, its norm overflows"):
        optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_state_round_trip_goes_on_with_the_same_floats():
    one, two = build(), build()
    rates = {"actor": 1e-2, "critic": 3e-3}
    first, second = RoleOptimizer(one, rates, weight_decay=0.1), RoleOptimizer(two, rates, weight_decay=0.1)
    for seed in range(3):
        with_gradients(one, seed)
        first.step()
    two.load_state_dict(one.state_dict())
    second.load_state_tensors(first.state_tensors())
    for model, optimizer in ((one, first), (two, second)):
        with_gradients(model, 9)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    left, right = first.state_tensors(), second.state_tensors()
    assert left.keys() == right.keys()
    assert len(left) == 3 * sum(len(g) for g in first.groups.values())
    assert all(torch.equal(left[k], right[k]) for k in left)
