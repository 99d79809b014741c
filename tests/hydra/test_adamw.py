"""AdamW over half-precision parameters: small steps are kept, in every kind of state, also through a checkpoint."""

import dataclasses
import importlib.util
import sys

import pytest
import torch

from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import HydraModel
from rlhf_engine.hydra.optimizer import HALF, RoleOptimizer, has_masters, require_optim, round_stochastically_
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.sft import SftTrainer, sft_loss, sft_roles
from tests.conftest import build, tiny_llama
from tests.training.test_data import sft_config, train_config, write_model
from tests.training.test_sft import EXAMPLES, N_TOKENS

WITH_8BIT = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
every_optim = pytest.mark.parametrize(
    "optim",
    [
        "adamw", "adamw_stochastic", "adafactor", pytest.param("adamw_8bit", marks=WITH_8BIT),
        pytest.param("adamw_8bit_stochastic", marks=WITH_8BIT),
    ],
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:.*bitsandbytes")


def whole(dtype: torch.dtype, width: int = 1) -> HydraModel:
    """A model that is trained whole, of the same bfloat16 numbers in every dtype, about as small as trained ones."""
    plain = tiny_llama(width=width)
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_((p / 16).to(torch.bfloat16))
    return HydraModel.from_pretrained(plain.to(dtype), roles=sft_roles("full", with_reward=False))


@pytest.fixture(scope="module")
def gradients() -> list[list[torch.Tensor]]:
    """Of 30 steps on a model of 600,000 parameters."""
    generator = torch.Generator().manual_seed(0)
    shapes = [p.shape for p in whole(torch.float32, width=8).parameters()]
    return [[0.5 + torch.randn(shape, generator=generator) for shape in shapes] for _ in range(30)]


def displacement(gradients, dtype: torch.dtype, rate: float, **options) -> torch.Tensor:
    """Of all weights that the optimizer steps, after all steps."""
    model = whole(dtype, width=8)
    optimizer = RoleOptimizer(model, {"sft": rate}, max_grad_norm=None, **options)
    before = torch.cat([w.float().flatten() for w in optimizer.weights("sft")])
    for step in gradients:
        for p, gradient in zip(model.parameters(), step, strict=True):
            p.grad = gradient.to(p.grad_dtype)
        optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    if has_masters(optimizer.adamw.optim):
        for p, w in zip(model.parameters(), optimizer.weights("sft"), strict=True):
            assert torch.equal(p, w.to(dtype))
    return torch.cat([w.float().flatten() for w in optimizer.weights("sft")]) - before


@every_optim
@pytest.mark.parametrize("rate", [1e-5, 5e-7])
def test_small_steps_move_half_precision_as_far_as_float32(gradients, optim, rate):
    """A plain AdamW in bfloat16 moves weights 12 % as far at 1e-5 and 0.6 % as far at 5e-7."""
    full = displacement(gradients, torch.float32, rate, optim="adafactor" if optim == "adafactor" else "adamw")
    half = displacement(gradients, torch.bfloat16, rate, optim=optim)
    along = (half * full.sign()).mean() / full.abs().mean()
    assert along.item() == pytest.approx(1, abs=0.02)
    if has_masters(optim):
        assert (half.norm() / full.norm()).item() == pytest.approx(1, abs=0.02)


def test_adafactor_is_the_paper_s_without_the_size_of_a_parameter(gradients):
    """Three steps of two tensors by hand, in float64: a matrix, and a vector that is not factorised."""
    rate, model = 0.01, whole(torch.float32, width=8)
    optimizer = RoleOptimizer(model, {"sft": rate}, max_grad_norm=None, optim="adafactor")
    tensors = list(model.parameters())
    places = [next(i for i, p in enumerate(tensors) if p.dim() == n) for n in (2, 1)]
    expected = [tensors[i].detach().double() for i in places]
    factors: list = [None, None]
    for t, step in enumerate(gradients[:3], 1):
        keep = 1 - t**-0.8
        for n, i in enumerate(places):
            square = step[i].double().square()
            means = [square.mean(1, keepdim=True), square.mean(0, keepdim=True)] if n == 0 else [square]
            old = factors[n] or [torch.zeros_like(mean) for mean in means]
            factors[n] = [keep * a + (1 - keep) * b for a, b in zip(old, means, strict=True)]
            second = factors[n][0] if n else factors[0][0] @ factors[0][1] / factors[0][0].mean()
            update = step[i].double() / second.sqrt()
            expected[n] -= rate * update / max(1.0, float(update.square().mean().sqrt()))
        for p, gradient in zip(tensors, step, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
    for n, i in enumerate(places):
        torch.testing.assert_close(tensors[i].detach().double(), expected[n], rtol=1e-5, atol=1e-6)


def test_stochastic_rounding_is_right_in_the_mean_and_exact_where_nothing_is_cut_off():
    def rounded(value: float, n: int, seed: int = 0) -> torch.Tensor:
        return round_stochastically_(torch.full((n,), value), torch.Generator().manual_seed(seed))

    for value in (0.0, 1.0, -1.0, 3.140625, -(2.0**-130), 3.3e38):
        x = torch.tensor(value).to(torch.bfloat16).item()
        assert (rounded(x, 1000) == x).all()
    for sign in (1, -1):
        x = rounded(sign * (1 + 2**-9), 100_000)  # a quarter of the way to the next number
        assert set(x.tolist()) == {sign * 1.0, sign * (1 + 2**-7)}
        up = (x.abs() > 1).double().mean().item()
        assert up == pytest.approx(0.25, abs=0.01)
    assert torch.equal(rounded(0.3, 100), rounded(0.3, 100))
    assert not torch.equal(rounded(0.3, 100), rounded(0.3, 100, seed=1))


def test_gradients_of_micro_batches_add_up_in_float32():
    model = whole(torch.bfloat16)
    RoleOptimizer(model, {"sft": 1e-5})
    apart: list[list[torch.Tensor]] = []
    for examples in (EXAMPLES[:1], EXAMPLES[1:]):
        other = whole(torch.bfloat16)
        for m in (other, model):
            sft_loss(m, examples, gamma=0.0, tokens=N_TOKENS, pairs=1.0, dropout_seed=0)[0].backward()
        apart.append([p.grad.float() for p in other.parameters()])
    for p, one, two in zip(model.parameters(), *apart, strict=True):
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad, one + two)


@every_optim
def test_a_resumed_run_makes_the_same_floats(tmp_path, optim):
    base = write_model(tmp_path / "base", reward_head=False, hidden_size=64, intermediate_size=96)
    options = {"dtype": "bfloat16", "optim": optim, "max_steps": 4, "learning_rate": 1e-4, "weight_decay": 0.1}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "seed": 3}
    whole = SftTrainer(sft_config(base, tmp_path / "whole", **options))
    whole.model.train()
    for _ in range(2):
        whole.step()
    resume = str(whole.save())
    torch.manual_seed(99)  # of no consequence
    resumed = SftTrainer(sft_config(base, tmp_path / "parts", resume_from_checkpoint=resume, **options))
    resumed.model.train()
    for run in (whole, resumed, whole, resumed):
        run.step()
    for left, right in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(left, right)
    before, after = whole.optimizer.state_tensors(), resumed.optimizer.state_tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    half = [p for p in whole.model.parameters() if p.dtype in HALF]
    assert sum(k.endswith("|master") for k in before) == (len(half) if has_masters(optim) else 0)
    assert any(k.endswith("|absmax1") for k in before) == ("8bit" in optim)
    assert whole.model.backbone().dtype == torch.bfloat16


def test_state_of_another_kind_and_damaged_masters_are_refused():
    def stepped(optim: str = "adamw") -> RoleOptimizer:
        model = whole(torch.bfloat16)
        optimizer = RoleOptimizer(model, {"sft": 1e-3}, optim=optim)
        for p in model.parameters():
            p.grad = torch.ones_like(p, dtype=p.grad_dtype)
        optimizer.step()
        return optimizer

    target, found = stepped(), stepped().state_tensors()
    kept = target.state_tensors()
    name = next(iter(found)).rpartition("|")[0]
    lost = {k: v for k, v in found.items() if k != f"{name}|master"}
    other = {**found, f"{name}|master": found[f"{name}|master"] * 1.5}
    rounded = {**found, f"{name}|exp_avg": found[f"{name}|exp_avg"].to(torch.bfloat16)}
    cases = [
        (lost, f"optim: expected the state that 'adamw' has of {name} in torch.bfloat16 .*master.*, got exp_avg, exp_"),
        (stepped("adamw_stochastic").state_tensors(), "optim: expected the state that 'adamw' has of"),
        (other, f"expected master weights of {name} that round to it, got others"),
        (rounded, rf"expected {name}\|exp_avg of shape .* and torch.float32, got .* and torch.bfloat16"),
    ]
    for tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            target.load_state_tensors(tensors)
    assert all(torch.equal(v, target.state_tensors()[k]) for k, v in kept.items())
    with pytest.raises(ValueError, match=r"optim: expected the state that 'adamw_stochastic' has of .*, got .*master"):
        stepped("adamw_stochastic").load_state_tensors(found)


def test_adapters_in_bfloat16_have_masters_and_heads_need_none():
    model = build(adapter_dtype=torch.bfloat16)
    optimizer = RoleOptimizer(model, {"actor": 1e-3, "critic": 1e-3})
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p, dtype=p.grad_dtype)
    optimizer.step()
    state = optimizer.state_tensors()
    masters = {k.rpartition("|")[0] for k in state if k.endswith("|master")}
    trained = {name: p for group in optimizer.groups.values() for name, p in group.items()}
    assert masters == {name for name, p in trained.items() if p.dtype == torch.bfloat16}
    assert set(trained) - masters == {"heads.value.weight", "heads.value.bias"}
    assert {t.dtype for t in state.values()} == {torch.float32}


def test_what_cannot_be_served_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"optim: expected 'adamw' where nothing is trained in bfloat16, .*float32$"):
        RoleOptimizer(whole(torch.float32), {"sft": 1e-3}, optim="adamw_stochastic")
    with pytest.raises(ConfigError, match=r"optim: expected 'adamw' where nothing .* for parameters in float16"):
        RoleOptimizer(whole(torch.float16), {"sft": 1e-3}, optim="adamw_stochastic")
    with pytest.raises(ConfigError, match=r"adam_epsilon: expected it unset with optim adafactor, .* got 0\.8"):
        sft_config(tmp_path / "not_read", tmp_path / "out", optim="adafactor", adam_epsilon=0.8)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    require_optim("adamw_stochastic")
    with pytest.raises(ConfigError, match=r"bitsandbytes is not installed .*rlhf-engine\[bnb\].*, got 'adamw_8bit'"):
        SftTrainer(sft_config(tmp_path / "not_read", tmp_path / "out", dtype="bfloat16", optim="adamw_8bit"))


def test_a_first_step_too_small_for_bfloat16_has_moved_the_masters(tmp_path):
    base = write_model(tmp_path / "base")
    options = {"method": "full_ppo", "dtype": "bfloat16", "learning_rate": 1e-9}
    trainer = RlTrainer(train_config(base, tmp_path / "out", **options))
    before = [p.clone() for p in trainer.model.backbone().parameters()]
    metrics = trainer.step()
    assert metrics["grad_norm/actor"] > 0
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.backbone().parameters(), before, strict=True))
    assert dataclasses.asdict(trainer.state)["policy_version"] == 1
