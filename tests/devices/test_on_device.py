"""Runs on a device that refuses what a GPU refuses: every algorithm and method, and what else computes on a device."""

import ast
import contextlib
import gc
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_kernels.runtime import native

from rlhf_engine.commands.main import main
from rlhf_engine.config.algorithm import ALGORITHMS
from rlhf_engine.hydra import HydraModel, hydra_roles
from rlhf_engine.rollout import EngineOptions, Request, RolloutEngine, SamplingConfig, generate_requests
from rlhf_engine.rollout.engine import _AHEAD, _BURST, _Burst
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.training.reward_model import RewardTrainer
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.sft import SftTrainer
from tests.devices.faults import FAULTS, Fault, planted
from tests.devices.runs import (
    FACTORS,
    HALVES,
    close,
    compare,
    first_step,
    make_trainer,
    on_stand_in,
    options_of,
    pairwise,
    write_small_model,
)
from tests.devices.stand_in import DEVICE, counted, memory
from tests.training.test_data import MEASURED, PROMPTS, sft_config, write_reward, write_rows
from tests.training.test_reward import reward_config, toy_pairs, toy_rows
from tests.training.test_rl import without_timings

ROOT = Path(__file__).resolve().parents[2]
ROWS = pairwise()
pytestmark = pytest.mark.skipif(native.missing() is not None, reason=f"its kernels are C++: {native.missing()}")


@pytest.fixture(scope="module", autouse=True)
def _device():
    with on_stand_in():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reward(tmp_path_factory) -> str:
    return write_reward(tmp_path_factory.mktemp("reward"), HALVES)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_has_the_numbers_of_the_cpu(algorithm, model, reward, tmp_path):
    """Drawing, scoring and learning; any two options of `FACTORS` together."""
    for i, row in enumerate(row for row in ROWS if row["algorithm"] == algorithm):
        compare(model, tmp_path / str(i), reward, **options_of(row))


def test_every_pair_of_options_is_among_the_runs():
    for (a, left), (b, right) in itertools.combinations(FACTORS.items(), 2):
        together = {(str(row[a]), str(row[b])) for row in ROWS}
        assert together == {(str(x), str(y)) for x in left for y in right}, (a, b)
    halves = [row for row in ROWS if row["numbers"]["dtype"] == "bfloat16" and not row["lora_dropout"]]
    sharing = [row for row in halves if row["num_generations"] or ALGORITHMS[row["algorithm"]].generations > 1]
    assert {row["exact"] for row in sharing} == {True, False}


@pytest.mark.long
@pytest.mark.parametrize("method", FACTORS["method"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_options_together(algorithm, method, model, reward, tmp_path):
    names = [name for name in FACTORS if name not in ("algorithm", "method")]
    for i, values in enumerate(itertools.product(*(FACTORS[name] for name in names))):
        row = {"algorithm": algorithm, "method": method, **dict(zip(names, values, strict=True))}
        compare(model, tmp_path / str(i), reward, **options_of(row))


@pytest.mark.parametrize("mode", ["overlap", pytest.param("replay", marks=pytest.mark.long)])
def test_a_generator_beside_the_learner(mode, model, reward, tmp_path):
    compare(model, tmp_path, reward, async_mode=mode, dtype="bfloat16", exact=True)


SUPERVISED: dict[str, Callable[..., Any]] = {
    "sft": lambda *place, **more: SftTrainer(sft_config(*place, **more)),
    "pairs": lambda *place, **more: RewardTrainer(reward_config(*place, toy_pairs(16), eval_steps=1, **more)),
    "single": lambda *place, **more: RewardTrainer(reward_config(*place, toy_rows(16), **more)),
}


def supervised(name: str, model: Path, folder: Path, device: str, **options: Any) -> dict[str, Any]:
    """Metrics of a first step."""
    trainer = SUPERVISED[name](model, folder / device.partition(":")[0], max_steps=1, device=device, **options)
    trainer.run()
    (row,) = read_metrics(trainer.output / "metrics.jsonl")
    return {key: value for key, value in row.items() if key not in MEASURED}


@pytest.mark.parametrize("name", SUPERVISED)
def test_supervised_training_has_the_numbers_of_the_cpu(name, model, tmp_path):
    pairs = (("lora", "float32"), ("full", "bfloat16"))  # with those of the others, any two options together
    for mode, dtype in pairs if name == "pairs" else (("lora", "bfloat16"), ("full", "float32")):
        found, expected = (
            supervised(name, model, tmp_path / mode / dtype, device, mode=mode, dtype=dtype)
            for device in (str(DEVICE), "cpu")
        )
        close(found, expected, dtype)


def test_answers_and_an_evaluation_are_those_of_the_cpu(model, tmp_path, capsys):
    common = ["--model_name_or_path", str(model), "--max_completion_length", "5", "--exact", "true"]
    draws = ([], ["--dtype", "bfloat16", "--num_generations", "3"], ["--top_k", "4"], ["--greedy"])
    for more in draws:
        answers = []
        for device in (str(DEVICE), "cpu"):
            argv = ["generate", *common, "--device", device, "--json", "--prompt", *PROMPTS[:2], *more]
            assert main(argv) == 0
            answers.append(capsys.readouterr().out)
        assert answers[0] == answers[1]
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": p, "completion": f"{p} sings the sun"} for p in PROMPTS])
    results = []
    for device in (str(DEVICE), "cpu"):
        output = tmp_path / device.partition(":")[0]
        argv = ["evaluate", *common, "--device", device, "--dataset_name", str(data), "--output_dir", str(output)]
        assert main([*argv, "--reward_model_path", str(model)]) == 0
        results.append(json.loads((output / "results.json").read_text())["models"])
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "ppo", "exact": True},
        {"algorithm": "grpo"},
        {"algorithm": "ppo", "lora_dropout": 0.1},
        pytest.param({"algorithm": "ppo"}, marks=pytest.mark.long),
        pytest.param({"algorithm": "grpo", "exact": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_micro_batch_waits_for_nothing(options, model, reward, tmp_path):
    """A read makes the host wait for all that it has queued, as does a copy from memory that is not pinned."""
    traffic = []
    for size in (6, 3):  # 12 answers: two micro-batches, and four
        options = {"dtype": "bfloat16", "per_device_train_batch_size": size, **options}
        trainer = make_trainer(model, tmp_path / str(size), reward, str(DEVICE), **options)
        traffic.append(first_step(trainer).traffic)
    few, many = traffic
    assert many.reads == few.reads
    assert many.uploads == few.uploads


def test_a_burst_is_read_by_one_copy_and_the_next_one_is_queued_before(model, monkeypatch):
    """Where no row may reach its longest within it, and nothing waits."""
    loaded = HydraModel.from_pretrained(str(model), roles=hydra_roles(), device=DEVICE)
    order: list[str] = []
    draw, read = RolloutEngine._draw, _Burst.read

    def drawn(engine, least):
        burst = draw(engine, least)
        order.extend(["draw"] * (burst is not None))
        return burst

    monkeypatch.setattr(RolloutEngine, "_draw", drawn)
    monkeypatch.setattr(_Burst, "read", lambda burst: order.append("read") or read(burst))
    reads, orders = [], []
    for bursts, rows in ((0, _AHEAD), (1, _AHEAD), (4, _AHEAD), (4, _AHEAD - 1), (2, _AHEAD + 1)):
        order.clear()
        requests = [Request(prompt=(5 + i,), sample_id=i) for i in range(rows)]
        with counted() as traffic:
            how = SamplingConfig(max_completion_length=1 + _BURST * bursts, eos_token_ids=())
            generate_requests(loaded, requests, how, options=EngineOptions(max_rows=_AHEAD))
        reads.append(traffic.reads.total())
        orders.append("".join(word[0] for word in order))
    assert orders == ["r", "rdr", "rddrdrdrr", "rdrdrdrdr", "rdrdrrdrdr"]  # the last: first eight rows, then one
    assert [n - reads[0] for n in reads[:4]] == [0, 1, 4, 4]


@contextlib.contextmanager
def room(n: float) -> Iterator[None]:
    """A block in which the device has room for so many bytes beside what it holds."""
    gc.collect()
    memory.limit = memory.used + int(n)
    try:
        yield
    finally:
        memory.limit = 2**50


def test_micro_batches_are_as_large_as_free_memory_allows(model, reward, tmp_path):
    def make(name: str, **options: Any) -> RlTrainer:
        options = {"dtype": "float32", "generation_batch_size": 48, "max_steps": 3, **options}
        return make_trainer(model, tmp_path / name, reward, str(DEVICE), **options)

    def steps(trainer: RlTrainer, n: int) -> list[dict[str, Any]]:
        return [without_timings(trainer.step()) for _ in range(n)]

    rows = {"named": steps(make("named", per_device_train_batch_size=16), 3)}
    for name, n in {"much": 3e6, "some": 1e6, "little": 3e5}.items():
        trainer = make(name, per_device_train_batch_size=None)
        with room(n):
            rows[name] = steps(trainer, 1)
            saved, refused = trainer.save(), memory.refused
            rows[name] += steps(trainer, 2)
            assert memory.refused == refused
        again = make(name, per_device_train_batch_size=None, resume_from_checkpoint=str(saved))
        assert steps(again, 2) == rows[name][1:]  # by the checkpoint's choice, whatever is free now
    assert refused > 0
    sizes = {name: [row["micro_batch_size"] for row in rows[name]] for name in rows}
    assert sizes["named"] == [16, 16, 16]
    assert sizes["much"] == [16, 48, 48]
    assert sizes["some"][0] == 16 < sizes["some"][1] < 48
    assert sizes["little"][0] < sizes["little"][1] < 16
    chosen = ("micro_batch_size", "micro_batch_tokens", "scoring_tokens")
    plain = {name: [{k: v for k, v in row.items() if k not in chosen} for row in rows[name]] for name in rows}
    for name in rows:
        for row, expected in zip(plain[name], plain["named"], strict=True):
            close(row, expected, "float32")


def test_who_scores_frozen_roles_does_not_show_in_the_size_of_their_passes(model, reward, tmp_path, monkeypatch):
    sizes, score = set[tuple[str, int]](), HydraModel.score

    def noted(self: HydraModel, batch: Any, roles: Any, **options: Any) -> Any:
        sizes.update([(roles[0], options["token_budget"])] if "reference" in roles else [])
        return score(self, batch, roles, **options)

    monkeypatch.setattr(HydraModel, "score", noted)
    own = {"per_device_train_batch_size": None, "async_mode": "overlap", "max_steps": 3, "exact": False}
    for hurry in (SimpleNamespace(is_set=lambda asked=asked: asked, set=int, clear=int) for asked in (False, True)):
        trainer = make_trainer(model, tmp_path / str(hurry.is_set()), reward, str(DEVICE), **own)
        trainer.source._worker.hurry = hurry
        with contextlib.closing(trainer.source):
            rows = [trainer.step() for _ in range(3)]
        assert rows[0]["scoring_tokens"] != trainer.model.token_budget
    assert sizes == {(by, trainer.model.token_budget) for by in ("behaviour", "past")}


def runs_with(fault: Fault) -> list[dict[str, Any]]:
    """Steps of the tests above that have a fault's options."""
    assert isinstance(fault.runs, Mapping)
    rows = [options_of(row) for row in ROWS]
    return [row for row in rows if all(row.get(name) == value for name, value in fault.runs.items())]


PER_PUSH = 2


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[pytest.mark.long] * (i >= PER_PUSH), id=f"{i}-{f}") for i, f in enumerate(FAULTS)]
)
def test_a_planted_fault_is_caught(fault, model, reward, tmp_path):
    def run() -> None:
        if isinstance(fault.runs, str):
            supervised(fault.runs, model, tmp_path, str(DEVICE), mode="lora", dtype="float32")
        else:
            compare(model, tmp_path, reward, **runs_with(fault)[0])

    with planted(fault), pytest.raises(Exception, match=r"expected .*(device|privateuseone)"):
        run()


def test_planted_faults_fit_the_sources():
    assert len(FAULTS) >= 20
    assert len({(f.module, f.function, f.old) for f in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert isinstance(fault.runs, str) or runs_with(fault), fault
        with planted(fault):
            pass


def looks_at_the_type(node: ast.AST) -> bool:
    """Whether a line compares a device's type with a name, or asks whether a tensor is CUDA's."""
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda"
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    named = any(isinstance(side, ast.Constant) and side.value in ("cuda", "cpu") for side in sides)
    typed = (isinstance(side, ast.Attribute) and side.attr == "type" for side in sides)
    return named and (any(typed) or any(isinstance(side, ast.Name) and side.id == "device_type" for side in sides))


def test_only_what_is_cudas_own_looks_for_cuda():
    """A place that looks at a device's type calls torch.cuda, or says who serves; the others ask `is_gpu`."""
    says_who_serves = {"unsupported", "is_gpu", "_no_graphs"}
    cudas = {"queued", "cuda_device", "device_name"}  # pinned memory, the device of a launch, a name
    wrong = []
    for folder in (ROOT / "rlhf_engine", ROOT / "kernels" / "rlhf_kernels"):
        for path in sorted(folder.rglob("*.py")):
            if "planning" in path.parts:  # plans are made for devices that are not there
                continue
            source = path.read_text()
            if not re.search(r"""is_cuda|["'](cuda|cpu)["']""", source):
                continue
            for function in ast.walk(ast.parse(source)):
                if not isinstance(function, ast.FunctionDef) or function.name in says_who_serves | cudas:
                    continue
                text = ast.unparse(function)
                if any(map(looks_at_the_type, ast.walk(function))) and "torch.cuda" not in text:
                    wrong.append(f"{path.relative_to(ROOT)}: {function.name}")
    assert wrong == []
