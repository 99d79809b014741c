"""The memory planner: counts equal real models, traces equal what the real code keeps alive, batches that fit fit."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rlhf_kernels.linear import packed
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.kernel_table import Entry, KernelTable
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import METHODS, HydraModel, PackedBatch, PolicyLoss, SlotConfig, ValueLoss
from rlhf_engine.hydra.model import split_by_tokens
from rlhf_engine.planning import fit
from rlhf_engine.planning.fit import IN_SHARES, NEVER_WHOLE, WHOLE, largest_fitting
from rlhf_engine.planning.phases import Planned, Setting, build_model, layer_period, shallow
from rlhf_engine.planning.predict import PHASES, Planner
from rlhf_engine.planning.presets import PRESETS, find_config
from rlhf_engine.planning.tracing import Tracker, extrapolated_peak
from rlhf_engine.policy.optimizer import RoleOptimizer
from tests.hydra.architectures import CONFIGS
from tests.policy.test_adamw import every_optim

ROOT = Path(__file__).resolve().parents[2]
RANK = 4
TRACED = ("llama", "gpt2", "gpt_neox", "qwen3", "gemma2")


def setting(name: str = "llama", **changes) -> Setting:
    plan = Setting(
        config=copy.deepcopy(CONFIGS[name]),
        dtype=torch.float32,
        adapter_dtype=torch.float32,
        device_type="cpu",
        slot=SlotConfig(r=RANK),
        prompt_length=9,
        completion_length=7,
        batch=8,
        num_mini_batches=2,
        micro_batch=4,
        token_budget=16384,
        gradient_checkpointing=False,
    )
    return dataclasses.replace(plan, **changes)


def of_many_layers(**changes) -> Setting:
    """Few tokens and a model whose weights count beside them, most of them in blocks."""
    few = {"prompt_length": 2, "completion_length": 2, "batch": 4, "micro_batch": 4, "num_mini_batches": 1}
    plan = setting(**few, **changes)
    plan.config.num_hidden_layers, plan.config.hidden_size, plan.config.intermediate_size = 16, 64, 256
    plan.config.head_dim = 64 // plan.config.num_attention_heads
    return plan


every_method = pytest.mark.parametrize("method", METHODS)
# every method on one architecture, every architecture with the extremes among the methods
CASES = [("llama", m) for m in METHODS] + [(n, m) for n in TRACED[1:] for m in ("full_ppo", "hydra_ppo")]
every_case = pytest.mark.parametrize(("name", "method"), CASES)


def test_a_batch_may_have_more_prompts_than_the_vocabulary_has_words():
    planner = Planner("hydra_ppo", setting(batch=100))
    assert planner.setting.config.vocab_size < 64 < 100  # rows are traced up to 64
    assert planner.peak("generation") > Planner("hydra_ppo", setting(batch=50)).peak("generation")


@pytest.fixture(autouse=True)
def _seed():
    """Models of random weights are the same whatever ran before."""
    torch.manual_seed(0)


# ---- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_number_of_parameters(name):
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(find_config(name))
        assert sum(p.numel() for p in model.parameters()) == PRESETS[name].parameters


@every_case
def test_state_equals_a_real_model_and_its_optimizer(name, method):
    plan = setting(name)
    model = build_model(method, plan, plan.config.get_text_config().num_hidden_layers)
    found = Planner(method, plan).state_bytes
    held = model.held_parameters()
    assert found["frozen_weights"] + found["trained_weights"] == 4 * held["backbones"]
    assert found["adapters"] == 4 * held["slots"]
    assert found["heads"] == 4 * held["heads"]
    optimizer = RoleOptimizer(model, {"actor": 1e-4, "critic": 1e-4})
    trained = [p for group in optimizer.groups.values() for p in group.values()]
    for p in trained:
        p.grad = torch.zeros_like(p)
    assert found["gradients"] == sum(p.grad.nbytes for p in trained)
    optimizer.step()
    assert found["optimizer"] == sum(t.nbytes for t in optimizer.state_tensors().values())


@pytest.mark.parametrize("method", ["full_sft", "hydra_ppo"])
@every_optim
def test_state_in_half_precision_equals_a_real_optimizer(method, optim):
    plan = setting(dtype=torch.bfloat16, adapter_dtype=torch.bfloat16, optim=optim)
    plan.config.vocab_size = 256  # some tensors with 8-bit moments
    model = build_model(method, plan, plan.config.num_hidden_layers)
    planner = Planner(method, plan)
    roles = [name for name, role in model.roles.items() if role.trainable]
    optimizer = RoleOptimizer(model, dict.fromkeys(roles, 1e-4), optim=optim)
    trained = [p for group in optimizer.groups.values() for p in group.values()]
    for p in trained:
        p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
    found = planner.state_bytes
    assert found["gradients"] == sum(p.grad.nbytes for p in trained)
    optimizer.step()
    state = optimizer.state_tensors()
    assert found["optimizer"] == sum(t.nbytes for t in state.values())
    assert any(key.endswith("absmax1") for key in state) == ("8bit" in optim and method != "hydra_ppo")


def test_a_full_sft_is_an_update_alone():
    plan = setting(dtype=torch.bfloat16)
    planner = Planner("full_sft", plan)
    found = planner.predict(planner.peak("update", 5))
    assert set(found.peak_bytes) == set(found.max_batch) == {"update"}
    assert found.kv_cache_bytes == found.state_bytes["frozen_weights"] == found.state_bytes["heads"] == 0
    weights = found.state_bytes["trained_weights"]
    # bfloat16 weights; gradients, masters and two moments in float32
    assert found.state_bytes["gradients"] == 2 * weights
    assert found.state_bytes["optimizer"] == pytest.approx(6 * weights, rel=0.01)
    assert found.peak > 9 * weights
    assert found.largest_batch == found.max_batch["update"] >= 5
    trained = Planner("full_sft", dataclasses.replace(plan, optim="adamw_stochastic"))
    largest = max(size.numel() for size, _ in trained._trained_tensors)
    step = trained.resident + trained.state_bytes["gradients"] + 12 * largest
    assert trained.peak("update", 1) >= step


def test_several_processes_hold_the_base_in_the_first_way_that_fits(monkeypatch):
    monkeypatch.setattr(fit, "TRACED_ROWS", 4)
    plan = of_many_layers(processes=4)
    planner = Planner("hydra_ppo", plan)
    ways = planner.ways(0)
    model = build_model("hydra_ppo", plan, 16)
    whole = sum(p.nbytes for _, p in model.backbone().base_parameters())
    blocks = [sum(p.nbytes for p in block.parameters()) for block in model.backbone().blocks]
    assert planner.drawing_bytes == whole
    gathered = whole - sum(blocks) + 3 * max(blocks)
    share = -(-whole // 4)
    assert share + gathered < whole
    held = {
        WHOLE: dict.fromkeys(PHASES, whole),
        IN_SHARES: {"generation": share + whole, "inference": share + whole, "update": share + gathered},
        NEVER_WHOLE: dict.fromkeys(PHASES, share + gathered),
    }
    for way, found in ways.items():
        assert found.base_bytes == held[way]
        for phase in PHASES:  # nothing else depends on the way
            assert found.peak_bytes[phase] - held[way][phase] == ways[WHOLE].peak_bytes[phase] - whole
    assert ways[WHOLE].peak > ways[IN_SHARES].peak > ways[NEVER_WHOLE].peak  # an update needs most
    for way, found in ways.items():
        planner.choose_way(found.peak)
        assert planner.way == way
        assert planner.max_batch(found.peak)["generation"] >= 4
        planner.choose_way(found.peak - 1)
        assert planner.way != way or way == NEVER_WHOLE


@every_method
def test_state_follows_the_table_of_the_paper(method):
    """(frozen backbones, trained backbones, slots) as in arXiv 2309.00754, table 1."""
    frozen, trained, slots = {
        "full_ppo": (2, 2, 0),
        "lora_ppo": (4, 0, 2),
        "dynamic_lora_ppo": (2, 0, 2),
        "j_hydra_ppo": (1, 0, 1),
        "hydra_ppo": (1, 0, 2),
    }[method]
    plan = setting(dtype=torch.bfloat16)
    c = plan.config
    plain = AutoModelForCausalLM.from_config(c)
    whole, head = (sum(p.numel() for p in m.parameters()) for m in (plain, plain.lm_head))
    linears = [m for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    slot = sum(RANK * (m.in_features + m.out_features) for m in linears)
    found = Planner(method, plan).state_bytes
    # of several backbones, those that only carry a scalar head come without an LM head
    headed = {"full_ppo": 2, "lora_ppo": 2}.get(method, 1)
    assert found["frozen_weights"] + found["trained_weights"] == 2 * (
        (frozen + trained) * (whole - head) + headed * head
    )
    assert found["trained_weights"] == (2 * (2 * whole - head) if trained else 0)
    assert found["adapters"] == 4 * slots * slot
    assert found["heads"] == 4 * 2 * (c.hidden_size + 1)
    # those of bfloat16 weights are in float32
    assert found["gradients"] == 2 * found["trained_weights"] + found["adapters"] + found["heads"] // 2


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize("head_too", [False, True])
def test_packed_weights_are_the_copies_that_updates_keep(monkeypatch, head_too):
    """All but those of q, k and v of the first layer, through which no gradient goes on."""
    ms = {"made up": {"cpu": 1.0, "reference": 8.0}}
    entry = Entry("linear", native.isa(), "float32", (64, 64), "cpu", ms)
    registry.begin_run()
    monkeypatch.setattr(registry, "_table", KernelTable(source="test", entries=(entry,)))
    packed.set_budget(2**26)
    plan = setting()
    if head_too:  # of whole tiles
        plan.config.hidden_size, plan.config.vocab_size = 32, 96
    model = build_model("hydra_ppo", plan, plan.config.num_hidden_layers)
    batch = PackedBatch.from_lists([[3] * plan.prompt_length] * 4, [[4] * plan.completion_length] * 4)
    try:
        for _ in range(2):
            losses(model, batch).backward()
        first = next(m for m in model.modules() if type(m).__name__ == "LlamaAttention")
        unmet = sum(
            packed.size(torch.float32, m.in_features, m.out_features)
            for m in (first.q_proj, first.k_proj, first.v_proj)
        )
        planner = Planner("hydra_ppo", plan)
        assert planner.state_bytes["packed_weights"] == packed.held() + unmet > unmet
        linears = planner._shape(True).linears
        head = packed.size(torch.float32, 32, 96) if head_too else 0
        assert packed.held() + unmet == head + sum(packed.size(torch.float32, k, m) for m, k in linears)
        packed.set_budget(unmet)
        assert 0 < Planner("hydra_ppo", plan).state_bytes["packed_weights"] <= unmet
    finally:
        packed.set_budget(None)


# ---- traces ----------------------------------------------------------------------------------------------------------


def losses(model: HydraModel, batch: PackedBatch) -> torch.Tensor:
    n = batch.n_completion_tokens
    per_token, mask = torch.full((n,), 0.1), torch.ones(n, dtype=torch.bool)
    policy = PolicyLoss(old_logprob_M=-per_token, advantage_M=per_token, mask_M=mask, denom=float(n))
    value = ValueLoss(old_value_M=per_token, return_M=-per_token, mask_M=mask, denom=float(n), clip=0.2)
    first, second = model(batch, (policy, value))
    return first.loss + second.loss


def saved_bytes(model: HydraModel, plan: Setting) -> int:
    """Unique storages that autograd saves in one update's forward pass and that are no parameters."""
    mine = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in mine:
            kept[storage._cdata] = storage
        return tensor

    batch = PackedBatch.from_lists([[3] * plan.prompt_length] * 4, [[4] * plan.completion_length] * 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses(model.train(), batch)
    return sum(storage.nbytes() for storage in kept.values())


@every_case
def test_what_a_trace_keeps_for_the_backward_pass_is_what_autograd_saves(name, method):
    """2 % for what is alive without being saved: token rows, results, what goes into the losses."""
    for dtype in (torch.float32, torch.bfloat16) if name == "llama" else (torch.float32,):
        plan = setting(name, dtype=dtype, prompt_length=30, completion_length=10)
        n_layers = plan.config.get_text_config().num_hidden_layers
        real = saved_bytes(build_model(method, plan, n_layers), plan)
        with FakeTensorMode():
            with Tracker():
                model = build_model(method, plan, n_layers).train()
            batch = PackedBatch.from_lists([[0] * plan.prompt_length] * 4, [[0] * plan.completion_length] * 4)
            known = [*model.parameters(), *model.buffers(), batch.tokens_T]
            with Tracker(known, device_type="cpu") as tracker:
                loss = losses(model, batch)
                alive = tracker.live
            del loss
        assert alive == pytest.approx(real, rel=0.02), (dtype, alive, real)


shared = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
FOUR = {"num_generations": 4, "num_mini_batches": 1, "micro_batch": 8, "prompt_length": 50, "completion_length": 6}
"""Four answers to each of two long prompts."""


@shared
@pytest.mark.parametrize(("name", "method"), [("llama", "hydra_ppo"), ("gpt2", "full_ppo")])
def test_a_trace_of_answers_that_share_their_prompt_keeps_what_autograd_saves(name, method):
    plan = setting(name, **FOUR)
    n_layers = plan.config.get_text_config().num_hidden_layers
    model = build_model(method, plan, n_layers)
    real = saved_bytes(model, plan)
    model.shares_prompts = False
    assert real < 0.6 * saved_bytes(model, plan)
    with FakeTensorMode():
        with Tracker():
            model = build_model(method, plan, n_layers, Planned).train()
        model.alike = 4
        batch = PackedBatch.from_lists([[0] * plan.prompt_length] * 4, [[0] * plan.completion_length] * 4)
        known = [*model.parameters(), *model.buffers(), batch.tokens_T]
        with Tracker(known, device_type="cpu") as tracker:
            loss = losses(model, batch)
            alive = tracker.live
        del loss
    assert alive == pytest.approx(real, rel=0.02)


@shared
def test_answers_that_share_their_prompt_need_less():
    def peak(phase: str, **changes) -> int:
        return Planner("hydra_ppo", setting(**{**FOUR, **changes})).peak(phase)

    resident = Planner("hydra_ppo", setting(**FOUR)).resident
    for phase in PHASES:
        assert peak(phase) - resident < 0.6 * (peak(phase, num_generations=1) - resident), phase
    for apart in ({"slot": SlotConfig(r=RANK, dropout=0.1)}, {"num_mini_batches": 2}, {"device_type": "cuda"}):
        assert peak("update", **apart) == peak("update", **apart, num_generations=1), apart
    pairs = Planner("full_sft", setting(**{**FOUR, "num_generations": 2, "num_mini_batches": 2}))
    assert pairs.shared_phases == ("update",)
    dropped = Planner("hydra_ppo", setting(**FOUR, slot=SlotConfig(r=RANK, dropout=0.1)))
    assert dropped.shared_phases == ("inference",), "an update has copies of prompts"


@shared
@pytest.mark.parametrize("budget", [40, 57, 80, 81, 200])
def test_tokens_are_counted_as_the_model_counts_them(budget):
    plan = setting(**FOUR, batch=16, token_budget=budget)
    planner = Planner("hydra_ppo", plan)
    model = build_model("hydra_ppo", plan, 1)
    for n in (1, 3, 4, 6, 16):
        prompts = [[3 + i // 4] * plan.prompt_length for i in range(n)]
        batch = PackedBatch.from_lists(prompts, [[5] * plan.completion_length] * n)
        assert planner._tokens("inference", n) == model.count_rows(batch)
    groups = split_by_tokens(batch.lengths, budget, (batch.prompts_N, batch.prompt_lens))
    assert planner._scored_together(16) == (len(groups[0]), 2 if len(groups) > 1 else 1)


@pytest.mark.parametrize(
    ("name", "method", "checkpointing"),
    [
        ("llama", "hydra_ppo", False),
        ("gpt2", "j_hydra_ppo", False),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("llama", "hydra_ppo", True),
                ("llama", "full_ppo", False),
                ("gemma2", "hydra_ppo", False),
            )
        ),
    ],
)
def test_layers_are_extrapolated_exactly(name, method, checkpointing):
    """From 2 and 3 periods of layers to 4 or more, in every phase, against a trace of all of them."""
    plan = setting(name, gradient_checkpointing=checkpointing, micro_batch=2)
    n_layers = 8 if getattr(plan.config, "layer_types", None) else 5
    plan.config.get_text_config().num_hidden_layers = n_layers
    if getattr(plan.config, "layer_types", None):
        plan.config.layer_types = plan.config.layer_types * 4
    period = layer_period(plan.config)
    assert period == (2 if name == "gemma2" else 1)
    planner = Planner(method, plan)
    for phase in PHASES:
        short, long, deep = (planner._timeline(phase, 2, 2, n) for n in (2 * period, 3 * period, n_layers))
        assert extrapolated_peak(short, long, (2 * period, 3 * period), n_layers) == deep.peak, phase


def test_layers_that_differ_are_not_extrapolated():
    planner = Planner("hydra_ppo", setting())
    few, many = planner._timeline("inference", 2, 1, 2), planner._timeline("update", 2, 1, 2)
    assert extrapolated_peak(few, many, (2, 3), 8) is None


@pytest.mark.parametrize("generations", [1, pytest.param(3, marks=[shared, pytest.mark.long])])
def test_rows_beyond_those_traced_lie_on_a_line(monkeypatch, generations):
    plan = setting(num_generations=generations, num_mini_batches=1)
    # so many rows that no peak lies where a kernel's tiles, whose size rows do not change, are most of it
    monkeypatch.setattr(fit, "TRACED_ROWS", 144)
    exact = {phase: Planner("hydra_ppo", plan).peak(phase, 144) for phase in PHASES}
    monkeypatch.setattr(fit, "TRACED_ROWS", 96)
    for phase in PHASES:
        assert Planner("hydra_ppo", plan).peak(phase, 144) == pytest.approx(exact[phase], rel=0.005), phase


@pytest.mark.parametrize("phase", ["inference", pytest.param("update", marks=pytest.mark.long)])
def test_a_line_s_points_run_their_lanes_as_the_rows_they_stand_for(phase, monkeypatch):
    """With 24 rows all lanes would share a backbone forward, with 48 and 72 they go one after another."""
    plan = setting(token_budget=30 * 16 * (3 if phase == "inference" else 2))
    assert Planner("hydra_ppo", plan)._rows_together(phase) == 30
    exact = Planner("hydra_ppo", plan).peak(phase, 72)
    monkeypatch.setattr(fit, "TRACED_ROWS", 48)
    assert Planner("hydra_ppo", plan).peak(phase, 72) == pytest.approx(exact, rel=0.005)


@pytest.mark.parametrize("method", [pytest.param("full_ppo", marks=pytest.mark.long), "hydra_ppo"])
def test_gradient_checkpointing_and_small_micro_batches_need_less(method):
    plan = setting("llama", batch=16, micro_batch=8, prompt_length=24, completion_length=24)
    plan.config.num_hidden_layers = 4  # more than are traced where layers are extrapolated
    peak = Planner(method, plan).peak("update")
    assert Planner(method, dataclasses.replace(plan, gradient_checkpointing=True)).peak("update") < peak
    assert Planner(method, dataclasses.replace(plan, micro_batch=2)).peak("update") < peak


@pytest.mark.long
@shared
@pytest.mark.parametrize("generations", [1, 4])
def test_peaks_of_real_processes_are_those_that_are_predicted(tmp_path, generations):
    """Resident memory of an update of gpt2, whose planned packed copies are all made; state is a third of it."""
    command = [sys.executable, str(ROOT / "bench" / "studies" / "plan_check.py"), "--shape", "gpt2"]
    command += ["--method", "hydra_ppo", "--num_generations", str(generations), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    rows = {row["phase"]: row for row in json.loads((tmp_path / "cpu.json").read_text())["rows"]}
    assert abs(rows["update"]["error"]) < 0.05
    assert abs(rows["inference"]["error"]) < 0.08
    assert rows["update"]["measured_bytes"] < (1.2e9 if generations == 1 else 0.5e9)


# ---- what fits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        pytest.param("lora_ppo", {}, marks=pytest.mark.long),
        ("hydra_ppo", {}),
        pytest.param("hydra_ppo", FOUR, marks=[shared, pytest.mark.long]),
    ],
)
def test_the_largest_batch_fits_and_one_more_does_not(method, changes, monkeypatch):
    plan = setting(token_budget=200, **changes)  # lanes of Hydra share a backbone forward up to 6 sequences only
    monkeypatch.setattr(fit, "TRACED_ROWS", 8)
    planner = Planner(method, plan)
    for extra in (300_000, 5_000_000):
        budget = planner.resident + extra
        found = planner.max_batch(budget)
        n = found["generation"]
        assert n == 0 or max(planner.peak(phase, n) for phase in ("generation", "inference")) <= budget
        assert max(planner.peak(phase, n + 1) for phase in ("generation", "inference")) > budget
        m = found["update"]
        assert m == 0 or planner.peak("update", m) <= budget
        assert planner.peak("update", m + 1) > budget


def test_the_search_finds_the_largest_also_where_the_peak_drops():
    def peak(n: int) -> int:
        return 10 * n + 5 if n <= 10 else 6 * n

    assert largest_fitting(peak, 120, above=10) == 20
    assert largest_fitting(peak, 61, above=10) == 5
    assert largest_fitting(peak, 66, above=10) == 11
    assert largest_fitting(peak, 14, above=10) == 0
    calls = []
    assert largest_fitting(lambda n: calls.append(n) or n * n, 1_000_000) == 1000
    assert len(calls) < 200
    assert largest_fitting(lambda n: 3, 10) >= 2**20


def test_nothing_fits_where_the_state_does_not():
    planner = Planner("full_ppo", setting())
    assert planner.max_batch(planner.resident) == {"generation": 0, "update": 0}


def test_prompt_and_answer_beyond_the_context_are_refused():
    with pytest.raises(ConfigError, match="context of 64 tokens, got 60 \\+ 5"):
        Planner("hydra_ppo", setting(prompt_length=60, completion_length=5))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_mixture_of_experts_is_refused(name):
    with pytest.raises(ConfigError, match="a mixture of experts, where it depends on the routing"):
        Planner("hydra_ppo", setting(name))


def test_shallow_configs_keep_the_kinds_of_their_layers():
    config = CONFIGS["gemma2"]
    assert shallow(config, 2).layer_types == config.layer_types[:2]
    assert shallow(config, 1).num_hidden_layers == 1
