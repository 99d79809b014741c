"""What must always hold: OFF is the plain model, ratios are exactly 1, roles do not touch each other.

OFF is a fresh process without slots, too, and a base that nothing ever writes to; with the products of a library and
with the engine's own.

(That a run which was saved and loaded goes on with the same floats is in tests/training/test_rl.py; the errors of
unserved requests are in tests/hydra/test_bad_input.py.)
"""

import copy
import os
import subprocess
import sys
import warnings

import pytest
import torch
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.kernel_table import Entry, write
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier3
from transformers import AutoModelForCausalLM

from rlhf_engine.hydra import HydraModel, Logprobs, PolicyLoss, SlotConfig, ValueLoss, Values, hydra_roles
from rlhf_engine.hydra.attention import plan_packed
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.gate import SlotTable, head_logits
from rlhf_engine.hydra.optimizer import RoleOptimizer
from rlhf_engine.hydra.persist import save_pretrained
from tests.conftest import build, random_batch, randomise, tiny_llama


def off_logits(backbone: Backbone, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B·L, V] of equally long sequences [B, L] with every adapter off."""
    b, length = tokens.shape
    positions = torch.arange(length).repeat(b)
    plan = plan_packed([length] * b, tokens.device)
    with torch.no_grad():
        hidden = backbone.run(tokens.flatten(), positions, SlotTable.uniform(None, b * length), plan)
        return head_logits(hidden, backbone.lm_head)


def losses(model: HydraModel, batch, **policy):
    """Policy and value loss on made-up experience whose old log-probs are the model's own, recomputed."""
    m = batch.n_completion_tokens
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        old, value = model(batch, (Logprobs(), Values()))
    mask = torch.ones(m, dtype=torch.bool)
    return (
        PolicyLoss(
            old_logprob_M=old.logprob, advantage_M=torch.randn(m, generator=generator), mask_M=mask, denom=float(m),
            **policy,
        ),
        ValueLoss(
            old_value_M=value, return_M=torch.randn(m, generator=generator), mask_M=mask, denom=float(m), clip=0.2
        ),
    )  # fmt: skip


def train_steps(model: HydraModel, batch, steps: int = 3) -> RoleOptimizer:
    optimizer = RoleOptimizer(model, {"actor": 1e-2, "critic": 1e-2})
    for _ in range(steps):
        policy, value = model(batch, losses(model, batch))
        (policy.loss + value.loss).backward()
        optimizer.step()
    return optimizer


def test_off_is_the_plain_model_on_a_real_pretrained_model(stories):
    model = HydraModel.from_pretrained(stories, roles=hydra_roles())
    plain = AutoModelForCausalLM.from_pretrained(stories, attn_implementation="sdpa").eval()
    tokens = torch.randint(3, 512, (4, 33), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = plain(tokens, use_cache=False).logits.flatten(0, 1)
        exact = plain.double()(tokens, use_cache=False).logits.flatten(0, 1)
    assert_ok(tier1(off_logits(model.backbone(), tokens), exact, expected))
    with registry.use_backend("reference"):
        assert torch.equal(off_logits(model.backbone(), tokens), expected)


def test_off_rows_are_untouched_by_adapters_in_the_same_call():
    model, batch = build(), random_batch()
    lanes = [None, "actor", "critic"]
    with torch.no_grad():
        mixed = torch.cat(model.backbone().run_lanes([(batch, None, slot) for slot in lanes]))
        for slot in ("actor", "critic"):
            for p in model.backbone().slot(slot).parameters():
                p.mul_(-3)
        again = torch.cat(model.backbone().run_lanes([(batch, None, slot) for slot in lanes]))
    t = batch.n_tokens
    assert torch.equal(mixed[:t], again[:t])
    assert not torch.equal(mixed[t : 2 * t], again[t : 2 * t])


@pytest.mark.parametrize("method", ["hydra", "j_hydra"])
def test_ratio_is_exactly_one_on_recomputed_log_probs(method):
    model, batch = build(method), random_batch()
    # the same lanes in one call, as in the update: recomputed under no_grad, then in the gradient call
    policy, value = losses(model, batch)
    out, _ = model(batch, (policy, value))
    assert out.ratio_mean.item() == 1.0
    assert out.ratio_max.item() == 1.0
    assert out.clip_fraction.item() == 0.0
    assert out.approx_kl.item() == 0.0
    assert torch.equal(out.logprob, policy.old_logprob_M)


def test_a_wrong_temperature_on_one_side_is_not_ratio_one():
    model, batch = build(), random_batch()
    policy, value = losses(model, batch, temperature=0.7)
    out, _ = model(batch, (policy, value))
    assert out.ratio_max.item() != 1.0


def test_a_role_s_loss_leaves_other_slots_without_gradient_and_without_change():
    model, batch = build(), random_batch()
    optimizer = train_steps(model, batch)  # so that the critic has optimizer state that weight decay could use
    before = {n: p.detach().clone() for n, p in model.trainable_parameters("critic").items()}
    state = copy.deepcopy(optimizer.state_tensors())
    policy, _ = losses(model, batch)
    (out,) = model(batch, (policy,))
    out.loss.backward()
    assert all(p.grad is None for p in model.trainable_parameters("critic").values())
    assert all(p.grad is not None for p in model.trainable_parameters("actor").values())
    optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in model.trainable_parameters("critic").items())
    after = optimizer.state_tensors()
    critic = [k for k in state if k.split("|")[0] in before]
    assert critic
    assert all(torch.equal(after[k], state[k]) for k in critic)


def test_which_slots_a_loss_reaches():
    """Exact zeros for the critic in one call with it, none for the actor of the values' loss; J-Hydra shares a slot."""
    model, batch = build(), random_batch()
    policy, _ = model(batch, losses(model, batch))
    policy.loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.trainable_parameters("critic").values())
    for method, is_shared in (("hydra", False), ("j_hydra", True)):
        model = build(method)
        (out,) = model(batch, losses(model, batch)[1:])
        out.loss.backward()
        assert (
            any(p.grad is not None and p.grad.any() for p in model.backbone().slot("actor").parameters()) == is_shared
        )


def test_the_reward_head_is_frozen_while_the_value_head_moves():
    model, batch = build(), random_batch()
    reward = {n: t.clone() for n, t in model.heads["reward"].state_dict().items()}
    value = {n: t.clone() for n, t in model.heads["value"].state_dict().items()}
    assert model.heads["reward"].weight.data_ptr() != model.heads["value"].weight.data_ptr()
    train_steps(model, batch)
    assert all(torch.equal(t, reward[n]) for n, t in model.heads["reward"].state_dict().items())
    assert not all(torch.equal(t, value[n]) for n, t in model.heads["value"].state_dict().items())


def test_an_untrained_reward_head_is_said_once():
    model, batch = HydraModel.from_pretrained(tiny_llama(), roles=hydra_roles()), random_batch()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            assert not model.score(batch, ("reward",)).rewards_N.any()
        model.score(batch, ("actor", "critic"))
        with torch.no_grad():
            model.heads["reward"].weight.normal_()
        model.score(batch, ("reward",))
    assert ["got one of zeros, so that every reward is 0.0" in str(w.message) for w in said] == [True]
    assert said[0].filename == __file__


OWN = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
both = pytest.mark.parametrize(
    ("dtype", "product"), [(torch.float32, "reference"), pytest.param(torch.bfloat16, "cpu", marks=OWN)]
)
TOKENS = torch.randint(3, 61, (5, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def table(product, tmp_path):
    """A kernel table by which every linear goes through one backend."""
    slower = {"cpu": "reference", "reference": "cpu"}[product]
    ms = {"made up": {product: 1.0, slower: 2.0}}
    names = [str(dtype).removeprefix("torch.") for dtype in (torch.float32, torch.bfloat16)]
    path = tmp_path / "table.json"
    write(path, [Entry("linear", native.isa() or "none", name, (64, 64), product, ms) for name in names], {})
    registry.begin_run()
    with registry.use_table(path):
        yield path


@pytest.fixture
def saved(dtype, tmp_path):
    """A checkpoint of the tiny Llama."""
    tiny_llama(dtype=dtype, width=2).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def hydra(saved, dtype) -> HydraModel:
    slots = {name: SlotConfig(r=4, alpha=8.0) for name in ("actor", "critic")}
    model = HydraModel.from_pretrained(str(saved), roles=hydra_roles(), slots=slots, dtype=dtype)
    randomise(model, "actor", "critic")
    return model.eval()


def without_slots(saved, dtype) -> torch.Tensor:
    plain = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype, attn_implementation="sdpa")
    return off_logits(Backbone(plain.eval()), TOKENS)


FRESH = """
import sys, torch
from tests.hydra.test_invariants import without_slots
torch.save(without_slots(sys.argv[1], getattr(torch, sys.argv[2])), sys.argv[3])
"""


def without_slots_in_a_fresh_process(table, saved, dtype, folder) -> torch.Tensor:
    out = folder / "fresh.pt"
    subprocess.run(
        [sys.executable, "-c", FRESH, str(saved), str(dtype).removeprefix("torch."), str(out)],
        env={**os.environ, "RLHF_ENGINE_KERNEL_TABLE": str(table), "RLHF_ENGINE_ISA": native.isa() or ""},
        check=True,
    )
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("process", ["this", pytest.param("fresh", marks=pytest.mark.long)])
@both
def test_off_is_the_same_checkpoint_without_slots(process, table, saved, dtype, product, tmp_path):
    """Bit for bit, before, between and after steps of training; every step packs, scores and goes back."""
    if process == "fresh":
        fresh = without_slots_in_a_fresh_process(table, saved, dtype, tmp_path)
    else:
        fresh = without_slots(saved, dtype)
    model = hydra(saved, dtype)
    base_hash = model.backbone().base_hash()
    for _ in range(3):
        assert torch.equal(off_logits(model.backbone(), TOKENS), fresh)
        train_steps(model, random_batch(), steps=2)
    assert torch.equal(off_logits(model.backbone(), TOKENS), fresh)
    assert model.backbone().base_hash(refresh=True) == base_hash


@both
def test_off_is_transformers_to_the_bit_on_the_reference_and_at_the_tiers_elsewhere(table, saved, dtype, product):
    """With the own products, norms and MLPs nothing but orders of summation and the logistic function differ."""
    plain = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype, attn_implementation="sdpa").eval()
    exact = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64, attn_implementation="sdpa").eval()
    with torch.no_grad():
        expected, truth = (m(TOKENS, use_cache=False).logits.flatten(0, 1) for m in (plain, exact))
    backbone = hydra(saved, dtype).backbone()
    logits = off_logits(backbone, TOKENS)
    assert registry.resolve("linear", "auto", expected, (96, 48)) == product
    assert_ok((tier1 if dtype == torch.float32 else tier3)(logits, truth, expected), "logits")
    with registry.use_backend("reference"):
        assert torch.equal(off_logits(backbone, TOKENS), expected)


@both
def test_nothing_is_ever_written_to_the_base(table, saved, dtype, product, tmp_path):
    """torch counts every write to a tensor: merging and unmerging would be two of them."""
    model = hydra(saved, dtype)
    base = dict(model.backbone().base_parameters())
    before = {name: (p._version, p.data_ptr()) for name, p in base.items()}
    train_steps(model, random_batch(), steps=2)
    model.score(random_batch(), ("actor", "critic", "reference", "reward"))
    save_pretrained(model, tmp_path / "slots")
    assert {name: (p._version, p.data_ptr()) for name, p in base.items()} == before
