"""The formula of `rlhf-engine plan`: against a GPU's and a CPU's measured peaks, real models, published sizes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rlhf_kernels.runtime import native, registry

from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import METHODS, HydraModel, SlotConfig, hydra_roles
from rlhf_engine.tools.memory import FULL_SFT, PRESETS, Formula, Setting, find_config, roles_of
from tests.hydra.architectures import CONFIGS, plain_model

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "bench" / "results" / "avx512_bf16" / "plan" / "cpu.json"
PARAMETERS = {
    "gpt2": 124_439_808, "pythia-410m": 405_334_016, "pythia-1b": 1_011_781_632, "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016, "llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192, "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248, "llama-70b": 70_553_706_496, "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-7b": 7_615_616_512, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096, "gemma-2-2b": 2_614_341_888,
}  # fmt: skip
"""As published, tied weights once."""


def setting(model: str = "llama-3.2-1b", **changes) -> Setting:
    options = {
        "config": find_config(model), "dtype": torch.bfloat16, "adapter_dtype": torch.float32, "device_type": "cuda",
        "slot": SlotConfig(r=16), "prompt_length": 512, "completion_length": 512, "batch": 64, "num_mini_batches": 1,
        "micro_batch": 8, "token_budget": 16384, "gradient_checkpointing": False,
    }  # fmt: skip
    return Setting(**{**options, **changes})


GPU = {  # GiB by torch's allocator in whole steps of a Llama 1B: NVIDIA H200, torch 2.11, Triton 3.6
    "ppo": ({}, False, 23.43),
    "ppo, micro-batches of 32": ({"micro_batch": 32}, False, 43.87),
    "ppo in exact mode": ({}, True, 21.87),
    "grpo": ({}, False, 12.90),
    "ppo, norms and gates not fused": ({}, False, 29.46),
}


@pytest.mark.parametrize("case", GPU)
def test_peaks_of_a_gpu_within_10_percent(case, monkeypatch):
    """64 answers of 512 + 512 tokens by Llama 3.2 1B in bfloat16, r = 16, 16,384 tokens per forward."""
    changes, exact, measured = GPU[case]
    roles = {n: r for n, r in hydra_roles("hydra_ppo").items() if "ppo" in case or n in ("actor", "reference")}
    if "not fused" in case:
        monkeypatch.setattr(Formula, "_backend", lambda _, op, *__: "reference" if op in UNFUSED else "triton")
    with registry.use_exact(exact):
        formula = Formula(roles, setting(**changes))
        kept = {phase: 0 if phase == "generation" else formula.cache_bytes for phase in formula.phases}
        # what was measured gave the cache back after a rollout
        peak = max(formula.peak(phase) - kept[phase] for phase in formula.phases) / 2**30
    assert peak == pytest.approx(measured, rel=0.10)


UNFUSED = ("rms_norm", "swiglu", "attention")


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_peaks_of_a_cpu_within_10_percent(monkeypatch):
    """Every method on three families, as bench/studies/plan_check.py measured them on one machine."""
    record = json.loads(RECORD.read_text())
    if native.isa() != record["isa"]:
        pytest.skip(f"measured with {record['isa']}, which decides what is fused and packed")
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "studies"))
    import plan_check

    rows = record["rows"]
    cases = {(row["shape"], row["method"]) for row in rows}
    assert cases == {(shape, method) for shape in plan_check.CONFIGS for method in (*METHODS, FULL_SFT)}
    predicted = {case: plan_check.predict(case[1], case[0], "cpu", {}) for case in cases}
    errors = {
        (row["shape"], row["method"], row["phase"]): predicted[row["shape"], row["method"]][row["phase"]]
        / row["measured_bytes"]
        - 1
        for row in rows
    }
    assert {case: round(error, 3) for case, error in errors.items() if abs(error) > 0.10} == {}


@pytest.mark.long
def test_a_new_measurement_agrees():
    command = [sys.executable, str(ROOT / "bench" / "studies" / "plan_check.py"), "--shape", "gpt2"]
    shown = subprocess.run([*command, "--method", "j_hydra_ppo"], capture_output=True, text=True, check=True).stdout
    errors = [float(line.split("|")[-2].strip(" %")) for line in shown.splitlines() if line.startswith("| gpt2")]
    assert errors
    assert max(map(abs, errors)) <= 10


@pytest.mark.long
def test_weights_of_presets_are_the_published_ones():
    assert set(PARAMETERS) == set(PRESETS)
    for name, n in PARAMETERS.items():
        planned = Formula(roles_of("j_hydra_ppo"), setting(name, prompt_length=64, completion_length=64))
        assert planned.state["frozen_weights"] == 2 * n, name


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma2", "opt"])
def test_state_is_that_of_a_real_model(name):
    slots = dict.fromkeys(("actor", "critic"), SlotConfig(r=4))
    model = HydraModel.from_pretrained(plain_model(name), roles=roles_of("hydra_ppo"), slots=slots)
    backbone = model.backbone()
    held = model.held_parameters()
    plan = setting(
        config=backbone.model.config, dtype=torch.float32, slot=SlotConfig(r=4), prompt_length=8, completion_length=40
    )
    for given in (None, backbone.model):  # without data, and taken over
        planned = Formula(model.roles, plan, given)
        assert planned.state["frozen_weights"] == 4 * held["backbones"]
        assert planned.state["adapters"] == 4 * held["slots"]
        assert planned.state["heads"] == 4 * held["heads"]
        assert planned.cache_bytes == 64 * 64 * backbone.cache_bytes_per_position  # 47 positions in blocks of 32


def test_what_a_run_takes_less():
    """Each way of saving memory saves what it should."""

    def update(**changes) -> int:
        return Formula(roles_of("hydra_ppo"), setting(**changes)).peak("update")

    assert update(gradient_checkpointing=True) < 0.4 * update()
    assert update(micro_batch=4) < 0.6 * update()
    assert update(token_budget=8192) < 0.6 * update()  # lanes one after another
    cpu = {"device_type": "cpu", "dtype": torch.float32, "num_generations": 4}
    assert update(**cpu) < 0.7 * update(**{**cpu, "num_generations": 1})  # prompts pass once
    assert update(**cpu) < update(**cpu, num_mini_batches=2, micro_batch=8)
    eight, four = (Formula(roles_of("hydra_ppo"), setting("llama-8b", quantization=q)) for q in ("8bit", "4bit"))
    assert four.state["frozen_weights"] < 0.72 * eight.state["frozen_weights"] < 10e9


def test_shares_of_a_base():
    whole = Formula(roles_of("hydra_ppo"), setting("llama-8b", processes=8))
    shares = Formula(roles_of("hydra_ppo"), setting("llama-8b", processes=8, shard_base=True))
    base = whole.state["frozen_weights"]
    assert whole.base_bytes("update") == base
    assert shares.base_bytes("inference") == base + base / 8
    assert base / 8 < shares.base_bytes("update") < base / 2


def test_the_largest_that_fits_is_the_largest():
    formula = Formula(roles_of("hydra_ppo"), setting())
    budget = 24 * 10**9
    batch, micro = formula.largest(budget)

    def peak(phase: str, **changes: int) -> int:
        return Formula(formula.roles, dataclasses.replace(formula.setting, **changes), formula.model).peak(phase)

    assert max(peak("generation", batch=batch), peak("inference", batch=batch)) <= budget
    assert max(peak("generation", batch=batch + 1), peak("inference", batch=batch + 1)) > budget
    assert peak("update", micro_batch=micro) <= budget < peak("update", micro_batch=micro + 1)
    assert formula.largest(10**9) == (0, 0)


def test_a_mixture_of_experts_is_refused():
    with pytest.raises(ConfigError, match="whose memory follows from shapes, got 'mixtral', a mixture of experts"):
        Formula(roles_of("hydra_ppo"), setting(config=CONFIGS["mixtral"]))
