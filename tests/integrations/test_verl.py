"""verl's plug points: signatures as published, numbers as verl's own, importable where verl is not."""

import importlib
import importlib.metadata
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rlhf_kernels.runtime.testing import assert_ok, tier1

from rlhf_engine.errors import ConfigError
from rlhf_engine.integrations import verl as ours

# as verl 0.9.1 publishes and calls them
PUBLISHED = {
    ours.ppo_policy_loss: "old_log_prob log_prob advantages response_mask loss_agg_mode config rollout_is_weights",
    ours.gae_advantage_return: "token_level_rewards values response_mask gamma lam",
    ours.rloo_advantage: "token_level_rewards response_mask index config unused",
    ours.FusedLogProb.apply: "hidden_states vocab_weights input_ids temperature chunk_size",
}
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


class Config(SimpleNamespace):
    """What the loss reads of verl's actor config."""

    def get(self, name, default=None):
        return getattr(self, name, default)


def config(**changes) -> Config:
    plain = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "global_batch_info": {}}
    return Config(**{**plain, **changes})


def batch(seed=0, b=6, t=9):
    """Masks with holes, as where an environment speaks in between; one row has no answer at all."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(b, t, generator=generator) > 0.3).float()
    mask[-1] = 0

    def draw(scale=1.0):
        return scale * torch.randn(b, t, generator=generator)

    return draw, mask


def test_signatures_are_those_that_verl_calls_and_the_entry_point_is_declared():
    for function, names in PUBLISHED.items():
        assert list(inspect.signature(function).parameters) == names.split()
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."verl.plugins"]\nrlhf_engine = "rlhf_engine.integrations.verl_plugin"\n' in text


def test_it_imports_where_verl_is_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", None)
    name = "rlhf_engine.integrations.verl"
    monkeypatch.setattr("rlhf_engine.integrations.verl", None, raising=False)  # put back by the end
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert importlib.import_module(name).FusedLogProb


def by_formula(old, new, advantages, mask, *, low, high, dual):
    ratio = (new - old).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)


def aggregated(loss, mask, mode, dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None):
    lengths, kept = mask.sum(-1), mask.sum(-1) > 0
    n = global_batch_size or kept.sum()
    if mode == "token-mean":
        return (loss * mask).sum() / (batch_num_tokens or mask.sum()) * dp_size
    if mode == "token-sum":
        return (loss * mask).sum() * dp_size
    if mode == "seq-mean-token-mean":
        return ((loss * mask).sum(-1)[kept] / lengths[kept]).sum() / n * dp_size
    norm = 1 if mode == "seq-mean-token-sum" else (loss_scale_factor or mask.shape[-1])
    return (loss * mask).sum() / n * dp_size / norm


@pytest.mark.parametrize("weighted", [False, True])
def test_the_policy_loss_by_formula(weighted):
    for mode in MODES:
        for info in ({}, {"dp_size": 2, "batch_num_tokens": 70, "global_batch_size": 16}):
            check_policy_loss(mode, info, weighted)


def check_policy_loss(mode, info, weighted):
    draw, mask = batch()
    old, new, advantages = draw(), draw().requires_grad_(), draw(3.0)
    weights = draw().abs() if weighted else None
    options = config(clip_ratio_high=0.3, clip_ratio_c=2.0, global_batch_info=info)
    loss, metrics = ours.ppo_policy_loss(old, new, advantages, mask, mode, options, weights)
    loss.backward()

    def plain(dtype, sign=lambda x: x):
        """(loss of the formula, its gradient)"""
        point = new.detach().to(dtype).requires_grad_()
        terms = by_formula(old.to(dtype), point, advantages.to(dtype), mask, low=0.2, high=0.3, dual=2.0)
        whole = aggregated(sign(terms) * (weights if weighted else 1.0), mask, mode, **info)
        whole.backward()
        return float(whole.detach()), point.grad

    (expected, exact), (_, single), (terms, _) = plain(torch.float64), plain(torch.float32), plain(torch.float64, abs)
    assert abs(float(loss.detach()) - expected) <= 1e-6 * terms  # a sum that cancels: as exact as its terms
    assert_ok(tier1(new.grad, exact, single), "gradient")
    assert set(metrics) == {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"}
    kl = float(((old - new.detach()) * mask).sum() / mask.sum())
    assert metrics["actor/ppo_kl"] == pytest.approx(kl, rel=1e-5)


def test_extreme_ratios_and_what_stands_where_nothing_was_answered():
    """verl clamps log-ratios to 20 and looks away from what is masked."""
    old, new = torch.zeros(1, 4), torch.tensor([[100.0, -30.0, 0.5, float("nan")]]).requires_grad_()
    advantages, mask = torch.tensor([[0.0, 1.0, 2.0, float("nan")]]).nan_to_num(), torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    weights = torch.tensor([[1.0, 1.0, 1.0, float("nan")]])
    loss, metrics = ours.ppo_policy_loss(old, new, advantages, mask, "token-mean", config(), weights)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-(2.0 * 1.2) / 3)  # 1 + clip_ratio, and e^-20 of the second
    assert new.grad.tolist() == [[0.0, 0.0, 0.0, 0.0]]
    assert metrics["actor/ppo_kl"] == pytest.approx(-(20.0 - 20.0 + 0.5) / 3)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(1 / 3)


def test_a_batch_without_an_answer_is_worth_nothing():
    for mode in MODES:
        new = torch.zeros(2, 3, requires_grad=True)
        loss, _ = ours.ppo_policy_loss(torch.zeros(2, 3), new, torch.ones(2, 3), torch.zeros(2, 3), mode, config())
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert not new.grad.any()


def test_requests_that_cannot_be_served():
    draw, mask = batch()
    arguments = (draw(), draw(), draw(), mask)
    with pytest.raises(ValueError, match="config: expected verl's actor config"):
        ours.ppo_policy_loss(*arguments)
    with pytest.raises(ValueError, match="loss_agg_mode: expected one of verl's modes, got 'mean'"):
        ours.ppo_policy_loss(*arguments, "mean", config())
    for mode, name in (("token-mean", "batch_num_tokens"), ("seq-mean-token-sum", "global_batch_size")):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            ours.ppo_policy_loss(*arguments, mode, config(global_batch_info={"dp_size": 2}))
    with pytest.raises(ValueError, match="expected at least two answers per prompt, got one"):
        ours.rloo_advantage(draw(), mask, list("aabbcd"))


def test_advantages_by_hand():
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [0.0, 5.0, 9.0], [0.0, 0.0, 1.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    found, _ = ours.rloo_advantage(rewards, mask, ["x", "y", "x", "y"])
    assert found.tolist() == [[-4.0, -4.0, 0.0], [2.0, 2.0, 2.0], [4.0, 4.0, 0.0], [-2.0, -2.0, -2.0]]


def test_a_temperature_may_be_a_tensor_of_one_number():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (6, 30))
    ids = torch.randint(0, 30, (6,), generator=generator)
    plain = ours.FusedLogProb.apply(hidden, weight, ids, 0.7)
    for shape in ((), (1,), (1, 1)):
        found = ours.FusedLogProb.apply(hidden, weight, ids, torch.full(shape, 0.7))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, plain, strict=True))


def test_an_exchange_is_made_and_taken_back_in_any_order(monkeypatch):
    """Modules that stand for verl, of which few machines have one."""
    names = (ours._CORE, ours._FUSED, ours._KERNEL)
    core, fused, kernel = (ModuleType(name) for name in names)
    for name, module in zip(names, (core, fused, kernel), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ConfigError, match=r"verl: expected verl\.trainer\.ppo\.core_algos\.compute_gae_advantage_retu"):
        ours.patch()
    theirs = core.compute_gae_advantage_return = lambda *_: "theirs"
    fused.FusedLinearForPPOFunction, kernel.linear_cross_entropy = object(), lambda: "triton"
    core.ADV_ESTIMATOR_REGISTRY = {"gae": theirs, "other": theirs}
    before = dict(core.ADV_ESTIMATOR_REGISTRY)
    first, second = ours.patch(), ours.patch()
    assert core.ADV_ESTIMATOR_REGISTRY["gae"].__wrapped__ is ours.gae_advantage_return
    first.undo()
    first.undo()
    core.compute_gae_advantage_return(*(torch.ones(1, 2) for _ in range(3)), 1.0, 1.0)
    assert (first.calls["gae"], second.calls["gae"]) == (0, 1)
    with pytest.raises(ConfigError, match=r"fused_kernel_options\.impl_backend: expected 'torch' with patch"):
        kernel.linear_cross_entropy()
    second.undo()
    assert (core.compute_gae_advantage_return, core.ADV_ESTIMATOR_REGISTRY) == (theirs, before)
    assert kernel.linear_cross_entropy() == "triton"


@pytest.fixture(scope="module")
def core():
    pytest.importorskip("verl", reason="needs verl and what it imports")
    import verl.trainer.ppo.core_algos

    if not importlib.metadata.entry_points(group="verl.plugins"):  # a checkout that is not installed
        importlib.import_module("rlhf_engine.integrations.verl_plugin")
    return verl.trainer.ppo.core_algos


def test_verl_finds_the_plugin(core):
    assert core.get_policy_loss_fn("rlhf_engine_ppo") is ours.ppo_policy_loss
    assert core.get_adv_estimator_fn("rlhf_engine_rloo") is ours.rloo_advantage
    ours.register()


def test_numbers_are_verl_s(core):
    draw, mask = batch()
    old, advantages, weights = draw(), draw(3.0), draw().abs()
    options = config(clip_ratio_low=0.1)
    for mode in MODES:
        left, right = draw().requires_grad_(), None
        right = left.detach().clone().requires_grad_()
        a, told = ours.ppo_policy_loss(old, left, advantages, mask, mode, options, weights)
        b, theirs = core.get_policy_loss_fn("vanilla")(old, right, advantages, mask, mode, options, weights)
        (a + 0).backward()
        b.backward()
        assert float(a.detach()) == pytest.approx(float(b.detach()), rel=1e-5)
        assert torch.allclose(left.grad, right.grad, atol=1e-6)
        assert told == pytest.approx(theirs, abs=1e-6)
    rewards, values = draw(), draw()
    mine = ours.gae_advantage_return(rewards, values, mask, 0.9, 0.8)
    verls = core.compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8)
    for a, b in zip(mine, verls, strict=True):
        assert torch.allclose(a * mask, b * mask, atol=1e-5)
    index = list("aabbaa")
    assert torch.allclose(
        ours.rloo_advantage(rewards * mask, mask, index)[0],
        core.get_adv_estimator_fn("rloo")(rewards * mask, mask, index)[0],
        atol=1e-5,
    )


def test_verl_s_fused_log_probs_come_from_our_kernel_while_patched(core):
    from verl.utils.experimental import torch_functional as fused

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=generator)
    weight = torch.randn(30, 8, generator=generator)
    ids = torch.randint(0, 30, (2, 5), generator=generator)
    original = fused.FusedLinearForPPOFunction

    def go():
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprob, entropy = fused.FusedLinearForPPO()(x, w, ids, temperature=0.7)
        (logprob.sum() + 0.3 * entropy.sum()).backward()
        return logprob.detach(), entropy.detach(), x.grad, w.grad

    theirs = go()
    with ours.patch() as first:
        ours.patch().undo()
        assert core.compute_gae_advantage_return.__wrapped__ is ours.gae_advantage_return
        assert core.get_adv_estimator_fn("gae") is core.compute_gae_advantage_return
        mine = go()
        draw, mask = batch()
        core.get_adv_estimator_fn("gae")(draw(), draw(), mask, 0.9, 0.8)
    assert first.calls == {"gae": 1, "log_prob": 1}
    assert core.get_adv_estimator_fn("gae") is core.compute_gae_advantage_return
    assert not hasattr(core.compute_gae_advantage_return, "__wrapped__")
    assert fused.FusedLinearForPPOFunction is original
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.allclose(a, b, atol=1e-5)


def test_backends_of_verl_s_that_go_past_the_patch_are_refused(core, monkeypatch):
    from verl.utils.experimental import torch_functional as fused
    from verl.utils.kernel import linear_cross_entropy as kernel

    class Liger:  # stands for a package that may not be installed
        apply = staticmethod(lambda hidden, weight, target, *options: (target.float(), target.float()))

    monkeypatch.setattr(fused, "_LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY", Liger)
    hidden, weight, ids = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
    liger, theirs = fused.FusedLinearForPPO(impl_backend="liger"), kernel.linear_cross_entropy
    megatron = ModuleType("verl.models.mcore.model_forward_fused")  # stands for one that needs Megatron
    megatron.linear_cross_entropy = theirs
    monkeypatch.setitem(sys.modules, megatron.__name__, megatron)
    said = "fused_kernel_options.impl_backend: expected 'torch' with patch\\(\\), which serves no other, got "
    with ours.patch() as patched:
        kept = kernel.linear_cross_entropy
        with pytest.raises(ConfigError, match=f"{said}'liger'"):
            liger(hidden, weight, ids)
        for function in (kept, megatron.linear_cross_entropy):
            with pytest.raises(ConfigError, match=f"{said}'triton'"):
                function(hidden, weight, ids, 1.0, "none")
        fused.FusedLinearForPPO()(hidden, weight, ids)
    assert patched.calls["log_prob"] == 1
    assert kernel.linear_cross_entropy is megatron.linear_cross_entropy is theirs
    assert liger(hidden, weight, ids)[1].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(AssertionError, match="temperature must be a float"):  # verl's own
        kept(hidden, weight, ids, 1, "none")


def test_under_autocast_the_products_are_those_of_verl(core):
    from verl.utils.experimental.torch_functional import FusedLinearForPPOFunction as Theirs

    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).requires_grad_() for n in (13, 50))
    ids = torch.randint(0, 50, (13,), generator=generator)
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(-1, ids[:, None])[:, 0].detach()
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = Theirs.apply(hidden, weight, ids)
        found, entropy = ours.FusedLogProb.apply(hidden, weight, ids)
    assert found.dtype == entropy.dtype == torch.float32
    gap, theirs = (float((x.detach() - exact).abs().max()) for x in (found, expected))
    assert 1e-3 < gap <= 1.5 * theirs
    found.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
