"""What adapter OFF is: a fresh process without slots, transformers, and a base that nothing ever writes to.

Each statement with the products of a library and with the engine's own.
"""

import os
import subprocess
import sys

import pytest
import torch
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.kernel_table import Entry, write
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier3
from transformers import AutoModelForCausalLM

from rlhf_engine.hydra import HydraModel, SlotConfig, hydra_roles
from rlhf_engine.hydra.attention import plan_packed
from rlhf_engine.hydra.backbone import Backbone, head_logits
from rlhf_engine.hydra.gate import SlotTable
from rlhf_engine.hydra.persist import save_pretrained
from tests.conftest import randomise, tiny_llama
from tests.hydra.test_invariants import random_batch, train_steps

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


def off_logits(backbone: Backbone) -> torch.Tensor:
    b, length = TOKENS.shape
    with torch.no_grad():
        plan = plan_packed([length] * b, TOKENS.device)
        positions = torch.arange(length).repeat(b)
        hidden = backbone.run(TOKENS.flatten(), positions, SlotTable.uniform(None, b * length), plan)
        return head_logits(hidden, backbone.lm_head)


def without_slots(saved, dtype) -> torch.Tensor:
    plain = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype, attn_implementation="sdpa")
    return off_logits(Backbone(plain.eval()))


FRESH = """
import sys, torch
from tests.hydra.test_off import without_slots
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
        assert torch.equal(off_logits(model.backbone()), fresh)
        train_steps(model, random_batch(), steps=2)
    assert torch.equal(off_logits(model.backbone()), fresh)
    assert model.backbone().base_hash(refresh=True) == base_hash


@both
def test_off_is_transformers_to_the_bit_on_the_reference_and_at_the_tiers_elsewhere(table, saved, dtype, product):
    """With the own products, norms and MLPs nothing but orders of summation and the logistic function differ."""
    plain = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype, attn_implementation="sdpa").eval()
    exact = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64, attn_implementation="sdpa").eval()
    with torch.no_grad():
        expected, truth = (m(TOKENS, use_cache=False).logits.flatten(0, 1) for m in (plain, exact))
    backbone = hydra(saved, dtype).backbone()
    logits = off_logits(backbone)
    assert registry.resolve("linear", "auto", expected, (96, 48)) == product
    assert_ok((tier1 if dtype == torch.float32 else tier3)(logits, truth, expected), "logits")
    with registry.use_backend("reference"):
        assert torch.equal(off_logits(backbone), expected)


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
