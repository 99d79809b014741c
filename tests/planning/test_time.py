"""The time planner: FLOPs by hand and by torch's counter, depth on a line, ceilings, the command, and the clock."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from rlhf_kernels.runtime import native
from rlhf_kernels.runtime.cost import ATTENTION, GEMMS, HEADS, LORA, Work
from torch.utils.flop_counter import FlopCounterMode

from rlhf_engine.commands.main import main
from rlhf_engine.config import CARDS, PlanConfig
from rlhf_engine.hydra import LmLoss, PackedBatch
from rlhf_engine.planning import ceilings
from rlhf_engine.planning.duration import GATHERING, LAUNCHES, PARTS, STEP_PHASES, DurationPlanner
from rlhf_engine.planning.fit import NEVER_WHOLE, WAYS, WHOLE
from rlhf_engine.planning.machines import Ceiling, Machine, gpu, interpolate
from rlhf_engine.planning.phases import build_model
from tests.planning.test_plan_command import SHORT, folder, run  # noqa: F401
from tests.planning.test_predict import RANK, of_many_layers, setting

ROOT = Path(__file__).resolve().parents[2]


def planner(name: str = "llama", method: str = "hydra_ppo", **changes) -> DurationPlanner:
    return DurationPlanner(method, setting(name, **changes), gpu("h100"))


def total(work, field: str = "flops", **wanted) -> float:
    """The sum over the work whose fields have these values."""
    chosen = (w for w in work if all(getattr(w, key) == value for key, value in wanted.items()))
    return sum(work[w] * getattr(w, field) for w in chosen)


# ---- work ------------------------------------------------------------------------------------------------------------


def test_products_of_a_trace_are_those_that_torch_counts_on_a_real_run():
    plan = setting("gpt2", batch=4, micro_batch=4, num_mini_batches=1)
    n_layers = plan.config.num_hidden_layers
    model = build_model("full_sft", plan, n_layers).train()
    batch = PackedBatch.from_lists([[3] * plan.prompt_length] * 4, [[4] * plan.completion_length] * 4)
    with FlopCounterMode(display=False) as counter:
        (loss,) = model(batch, (LmLoss(role="sft", denom=1.0),))
        loss.backward()
    traced = planner("gpt2", "full_sft", batch=4, micro_batch=4, num_mini_batches=1)._work("update", 4, False)
    assert total(traced, kind="mm") == counter.get_total_flops() > 0


def test_a_scoring_is_what_it_is_by_hand():
    plan = setting(token_budget=10**6)
    c = plan.config
    work = planner(token_budget=10**6)._work("inference", plan.batch, False)
    tokens, answers = plan.batch * plan.length, plan.batch * plan.completion_length
    d, ff, heads, kv = c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads
    shapes = [(d, d), (d * kv // heads, d), (d * kv // heads, d), (d, d), (ff, d), (ff, d), (d, ff)]
    layers = c.num_hidden_layers
    # actor, critic, and one lane for reference and reward
    assert total(work, kind="linear") == 3 * 2 * tokens * layers * sum(m * k for m, k in shapes)
    assert total(work, part=LORA) == 2 * 2 * tokens * RANK * layers * sum(m + k for m, k in shapes)
    assert total(work, kind="head") == 2 * 2 * answers * d * c.vocab_size
    assert total(work, part=ATTENTION) == 3 * layers * plan.batch * 4 * d * plan.length * (plan.length + 1) / 2


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_a_prompt_that_answers_share_is_computed_once():
    """Products of rows, and queries of every answer over the keys of its prompt."""
    plan = setting(token_budget=10**6)
    p, c, d, n_layers = (
        plan.prompt_length,
        plan.completion_length,
        plan.config.hidden_size,
        plan.config.num_hidden_layers,
    )
    alone, once = (
        planner(token_budget=10**6, num_mini_batches=1, num_generations=k)._work("inference", plan.batch, False)
        for k in (1, 4)
    )
    answers, prompts = plan.batch, plan.batch // 4
    rows = (prompts * p + answers * c) / (answers * (p + c))
    for kind in ("linear", "lora"):
        assert total(once, kind=kind) == pytest.approx(rows * total(alone, kind=kind))
    assert total(once, kind="head") == total(alone, kind="head")
    pairs = prompts * p * (p + 1) // 2 + answers * (c * p + c * (c + 1) // 2)
    assert total(once, part=ATTENTION) == 3 * n_layers * 4 * d * pairs


def test_an_update_runs_the_products_that_its_losses_need():
    """Two lanes forward; dx where a gradient goes on; the loss of a frozen head in two products."""
    plan = setting(token_budget=10**6)
    work = planner(token_budget=10**6)._work("update", 4, False)
    forward, backward = total(work, kind="linear"), total(work, kind="linear_backward")
    d, c = plan.config.hidden_size, plan.config
    keys = d * c.num_key_value_heads // c.num_attention_heads
    assert backward == forward - 2 * 2 * 4 * plan.length * d * (d + 2 * keys)  # q, k, v of the first layer
    assert total(work, kind="head") == 2 * 2 * 4 * plan.completion_length * d * c.vocab_size
    # h and dh again, dA, dB, and dx but for the first layer's q, k, v
    assert 2.4 < total(work, kind="lora_backward") / total(work, kind="lora") <= 2.5


@pytest.mark.parametrize("phase", ["token", "update"])
def test_layers_lie_on_a_line(phase):
    plan = setting()
    plan.config.num_hidden_layers = 7
    deep = DurationPlanner("hydra_ppo", plan, gpu("h100"))
    found, exact = deep._work(phase, 2, False), Counter(deep._work_of(phase, 2, False, 7))
    for field in ("flops", "bytes", "launches", "calls"):
        assert total(found, field) == pytest.approx(total(exact, field), rel=1e-9), field


def test_a_token_attends_to_all_tokens_before_it_or_to_its_window():
    """In blocks; gemma2's layers take turns with a window."""
    plan = setting("gemma2", prompt_length=40, completion_length=16)
    c = plan.config
    assert c.sliding_window < 48
    work = DurationPlanner("hydra_ppo", plan, gpu("h100"))._token_work(plan.batch)
    one_position = 2 * plan.batch * c.num_key_value_heads * c.head_dim * 4
    expected = one_position * c.num_hidden_layers / 2 * (c.sliding_window + 64)
    assert total(work, "bytes", part=ATTENTION) == expected


# ---- machines --------------------------------------------------------------------------------------------------------


def test_a_call_takes_the_longer_of_its_work_and_its_traffic():
    like = torch.float32
    slow = Machine(
        name="slow",
        ceilings={("linear", like): Ceiling(((1.0, 10.0), (100.0, 1000.0)), ((1.0, 2.0),))},
        call_seconds=3.0,
        decoding_call_seconds=2.0,
        launch_seconds=0.5,
        overlaps=False,
    )
    assert slow.busy(Work("linear", GEMMS, 200.0, 20.0, rows=10)) == pytest.approx(10.0)  # 20 bytes at 2 a second
    assert slow.busy(Work("linear", GEMMS, 2000.0, 20.0, rows=10)) == pytest.approx(20.0)  # at 100 FLOP/s
    assert slow.waiting(Work("linear", GEMMS, 2000.0, 0.0, 10)) == 3.0
    assert slow.waiting(Work("linear", GEMMS, 2000.0, 0.0, 10), "replay") == 0.5
    assert slow.waiting(Work("linear", GEMMS, 2000.0, 0.0, 10), "decoding") == 2.0
    ahead = dataclasses.replace(slow, overlaps=True)
    assert ahead.waiting(Work("linear", GEMMS, 2000.0, 0.0, 10)) == 0.0
    assert ahead.waiting(Work("linear", GEMMS, 200.0, 0.0, 10)) == pytest.approx(1.0)
    assert interpolate(((1.0, 5.0), (4.0, 20.0)), 0.1) == 5.0
    assert interpolate(((1.0, 5.0), (4.0, 20.0)), 9.0) == 20.0


def test_no_card_is_faster_than_its_data_sheet():
    for name, half, bandwidth in (("h100", 989e12, 3.35e12), ("h200", 989e12, 4.8e12), ("a100", 312e12, 2.04e12)):
        card = gpu(name)
        for ceiling in card.ceilings.values():
            assert ceiling.flops[-1][1] < half
            assert ceiling.bytes[-1][1] < bandwidth
        assert {figure.source for figure in card.figures} == {"datasheet", "assumed"}
    assert {*CARDS} == {"h100", "h200", "a100"}


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_ceilings_of_this_cpu_serve_every_kind_of_a_step(monkeypatch):
    monkeypatch.setattr(ceilings, "_SECONDS", 0.0)
    monkeypatch.setattr(ceilings, "_LEAST", 1)
    machine = ceilings.measure_cpu(torch.float32, torch.float32, RANK)
    assert {figure.source for figure in machine.figures} == {"measured"}
    step = DurationPlanner("hydra_ppo", setting(), machine)
    for phase in ("prefill", "token", "inference", "update"):
        kinds = {w.kind for w in step._work(phase, 2, False)} - {"view"}
        assert kinds <= {kind for kind, _ in machine.ceilings}, phase
    found = step.predict_seconds()
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.phases["capture"] == 0.0 < found.parts[LAUNCHES]


def test_a_base_in_shares_is_waited_for():
    plan = of_many_layers(device_type="cuda", processes=4)
    card = gpu("h100", 4)
    assert card.link == 0.75 * 450e9
    assert gpu("h100", 16).link == 0.75 * 8 * 50e9  # across machines
    slow = dataclasses.replace(card, link=1e3)
    planner = DurationPlanner("hydra_ppo", plan, slow)
    budgets = {}
    for planner.way in WAYS:
        budgets[planner.way] = max(map(planner.peak, planner.phases))
    found = {way: planner.predict_seconds(budgets[way]) for way in (WHOLE, NEVER_WHOLE)}
    once = planner.received_bytes / slow.link
    assert {way: d.way for way, d in found.items()} == {way: way for way in found}
    assert found[WHOLE].parts[GATHERING] == found[WHOLE].received_bytes == 0
    always = found[NEVER_WHOLE]
    assert always.phases["decoding"] == pytest.approx((plan.completion_length - 1) * once)
    assert always.phases["prefill"] == always.phases["scoring"] == pytest.approx(once)
    assert always.phases["update"] == pytest.approx(2 * once)  # there and back
    assert always.phases["capture"] == 0 < found[WHOLE].phases["prefill"] < once
    assert always.seconds == pytest.approx(sum(always.parts.values()))
    assert always.dominant == GATHERING
    # a link without end leaves calls of the model's own forward
    free = DurationPlanner("hydra_ppo", plan, dataclasses.replace(card, link=1e30)).predict_seconds(
        budgets[NEVER_WHOLE]
    )
    assert free.parts[GATHERING] == 0
    assert always.served_seconds < free.phases["decoding"] + free.phases["prefill"]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_table_names_what_dominates_and_what_is_assumed(capsys, folder):  # noqa: F811
    code, out, err = run(capsys, "--model", str(folder), *SHORT, "--method", "hydra_ppo", "--time", "--gpu", "h100")
    assert (code, err) == (0, "")
    for row in (*STEP_PHASES, *PARTS):
        assert row in out
    assert f"hydra_ppo: {LAUNCHES} dominate" in out  # of a model of no size
    assert "ASSUMED: efficiencies, of peak / of bandwidth" in out
    assert "From the data-sheet: memory bandwidth: 3.35 TB/s." in out


def test_one_json_object_with_shares_and_figures(capsys, folder):  # noqa: F811
    options = ("--method", "hydra_ppo", "--time", "--gpu", "a100", "--json", "--max_completion_length", "40")
    code, out, _ = run(capsys, "--model", str(folder), "--max_prompt_length", "8", "--batch", "4", *options)
    assert code == 0
    row = json.loads(out)
    assert row["seconds"] == pytest.approx(sum(row["phase_seconds"].values()))
    assert row["phase_seconds"]["generation"] == pytest.approx(sum(row["generation_seconds"].values()))
    assert row["generation_seconds"]["capture"] > 0
    assert sum(row["part_shares"].values()) == pytest.approx(1.0)
    assert row["dominant"] == max(row["part_seconds"], key=row["part_seconds"].get)
    assert "capture" in row["assumed"]
    assert row["part_seconds"][HEADS] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--time"], "gpu: expected one of h100, h200, a100, cpu with time, got '80GB'"),
        (["--time", "--gpu", "b200"], "gpu: expected one of h100, h200, a100, cpu with time, got 'b200'"),
        (["--gpu", "cpu"], "gpu: expected a size such as 80GB or 24GiB, got 'cpu'"),
        (["--time", "--gpu", "h100", "--device", "cpu"], "device: expected cuda with gpu 'h100' and time, got 'cpu'"),
        (["--time", "--gpu", "cpu", "--processes", "2"], "gpu: expected a card with 2 processes and time, whose links"),
        (["--time", "--gpu", "h100", "--out", "a.png"], "out: expected none with time, of which there is no chart"),
    ],
)
def test_requests_that_cannot_be_timed(capsys, argv, message):
    code = main(["plan", "--model", "llama-7b", *argv])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_card_is_also_a_size():
    assert PlanConfig(model="llama-7b", gpu="h200").budget_bytes == 140 * 10**9


# ---- against the clock -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_takes_what_is_predicted(tmp_path, dtype):
    """CPU seconds of one thread, which other processes disturb least; the best of three, within a quarter."""
    command = [sys.executable, str(ROOT / "bench" / "studies" / "plan_time.py"), "--shape", "llama", "--dtype", dtype]
    command += ["--clock", "process", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    errors = []
    for _ in range(3):
        subprocess.run(command, check=True, env=environment, capture_output=True, timeout=900)
        (row,) = json.loads((tmp_path / "cpu.json").read_text())["rows"]
        errors.append(row["error"])
        if abs(row["error"]) < 0.25:
            break
    assert min(map(abs, errors)) < 0.25, errors
