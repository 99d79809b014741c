"""Kernels and exact mode are a base's: two runs or two bases in one process know nothing of each other's."""

import collections
import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from rlhf_kernels.runtime import kernel_table, native, registry
from rlhf_kernels.runtime.kernel_table import Entry

from rlhf_engine.generators.sources import WORKER, Worker
from rlhf_engine.hydra import HydraModel, Logprobs, PackedBatch, RoleSpec, SlotConfig
from rlhf_engine.rollout import SamplingConfig, generate
from rlhf_engine.training.rl import RlTrainer
from tests.conftest import build, random_batch, randomise, tiny_llama
from tests.training.test_data import train_config

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="without it there is one kind of kernels")
KINDS = {"exact": ("auto", True), "auto": ("auto", False), "reference": ("reference", False)}
BATCH = random_batch()


@pytest.fixture(scope="module", autouse=True)
def _table(tmp_path_factory):
    """A table by which `auto` leaves some ops to the reference, so that each kind has other bits."""
    isa, path, ms = native.isa(), tmp_path_factory.mktemp("table") / "table.json", {"a": {"cpu": 2.0, "reference": 1.0}}
    ops = ("lora", "linear_ppo_loss", "linear_logprob")
    entries = [Entry(op, isa, "float32", (8, 8), "reference", ms) for op in ops]
    kernel_table.write(path, entries, {isa: "a CPU"})
    with registry.use_table(path):
        yield


# ---- runs ------------------------------------------------------------------------------------------------------------


def trainer(model: Path, folder: Path, kind: str, *, base: HydraModel | None = None, **options: object) -> RlTrainer:
    backend, exact = KINDS[kind]
    with registry.use_backend(backend):
        return RlTrainer(train_config(model, folder / kind, exact=exact, **{"max_steps": 2, **options}), base=base)


def outcome(made: RlTrainer) -> tuple[list[torch.Tensor], str]:
    """Weights, and the kernels in the checkpoint."""
    kernels = (made.save() / "kernels.json").read_text()
    made.source.close()
    return [p.detach().clone() for group in made.optimizer.groups.values() for p in group.values()], kernels


def whole(made: RlTrainer) -> tuple[list[torch.Tensor], str]:
    for _ in range(made.total_steps):
        made.step()
    return outcome(made)


def same(found: dict[str, tuple[list[torch.Tensor], str]], alone: dict[str, tuple[list[torch.Tensor], str]]) -> None:
    for kind, (weights, kernels) in alone.items():
        assert all(torch.equal(a, b) for a, b in zip(weights, found[kind][0], strict=True)), kind
        assert found[kind][1] == kernels


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """What each kind of run ends with where it is the only one."""
    folder, found = tmp_path_factory.mktemp("alone"), {}
    for kind in KINDS:
        found[kind] = whole(trainer(model, folder, kind))
        registry.begin_run()
    records = [kernels for _, kernels in found.values()]
    assert len(set(records)) == len(KINDS), records
    assert '"exact": true' in records[0]
    assert records[2] == "[]\n"
    for one, other in (("exact", "auto"), ("auto", "reference")):
        pairs = zip(found[one][0], found[other][0], strict=True)
        assert not all(torch.equal(a, b) for a, b in pairs), "the kernels make a difference"
    return found


def take_turns(made: dict[str, RlTrainer], rows: list[int]) -> None:
    """Two steps of each run; exact mode shows in the rows that it does not score again."""
    counts = collections.Counter()
    for _ in range(2):
        for kind, run in made.items():
            rows.clear()
            run.step()
            counts[kind] += sum(rows)
    assert counts["exact"] < counts["auto"]


def test_runs_that_take_turns_in_a_thread_have_the_bits_of_runs_alone(model, alone, tmp_path, rows):
    made = {kind: trainer(model, tmp_path, kind) for kind in KINDS}
    take_turns(made, rows)
    assert (registry.default_backend(), registry.is_exact(), registry.choices()) == ("auto", False, [])
    same({kind: outcome(run) for kind, run in made.items()}, alone)


def test_runs_in_threads_of_their_own_have_them_too(model, alone, tmp_path):
    made = [trainer(model, tmp_path, kind) for kind in KINDS]
    with ThreadPoolExecutor(len(KINDS)) as pool:
        found = dict(zip(KINDS, pool.map(whole, made), strict=True))
    same(found, alone)


def test_runs_on_one_base_have_kernels_of_their_own(model, alone, tmp_path, rows):
    base = HydraModel.from_pretrained(model, roles={"reference": RoleSpec()})
    made = {kind: trainer(model, tmp_path, kind, base=base) for kind in KINDS}
    take_turns(made, rows)
    assert base.backbone().kernels is registry.PROCESS
    same({kind: outcome(run) for kind, run in made.items()}, alone)


def test_a_generator_s_thread_has_those_of_its_run(model, tmp_path, monkeypatch):
    """Each kind of run draws in a thread beside its learner, while the others' do."""
    seen, draw = set(), Worker.__call__

    def noted(self, *given):
        seen.add((threading.current_thread().name, registry.default_backend(), registry.is_exact()))
        return draw(self, *given)

    monkeypatch.setattr(Worker, "__call__", noted)
    options = {"async_mode": "overlap", "max_steps": 1}
    expected = {kind: whole(trainer(model, tmp_path / "alone", kind, **options)) for kind in KINDS}
    made = {kind: trainer(model, tmp_path / "together", kind, **options) for kind in KINDS}
    for run in made.values():
        run.step()
    same({kind: outcome(run) for kind, run in made.items()}, expected)
    assert seen == {(WORKER, *settings) for settings in KINDS.values()}


# ---- bases -----------------------------------------------------------------------------------------------------------


def bases() -> dict[str, HydraModel]:
    """The same weights under each kind of kernels."""
    made = {}
    for kind, settings in KINDS.items():
        with registry.Settings(*settings).used():
            made[kind] = build()
    return made


def numbers(model: HydraModel, batch: PackedBatch) -> list[torch.Tensor]:
    """Log-probs of scoring and of a rollout."""
    drawn = generate(model, [[3, 4, 5], [6, 7]], SamplingConfig(max_completion_length=6, seed=1, eos_token_ids=(2,)))
    return [model.score(batch).logprobs_M, drawn.logprobs_M]


def test_two_bases_are_served_by_two_threads_at_once(survived):
    made = bases()
    expected = {}
    for kind, settings in KINDS.items():
        with registry.Settings(*settings).used():
            expected[kind] = numbers(made[kind], BATCH)
    assert len({tuple(x.tolist()) for x, _ in expected.values()}) == len(KINDS)

    def serve(kind: str) -> bool:
        found = [numbers(made[kind], BATCH) for _ in range(10)]
        return all(torch.equal(a, b) for x in found for a, b in zip(x, expected[kind], strict=True))

    with ThreadPoolExecutor(len(KINDS)) as pool:
        assert list(pool.map(serve, KINDS)) == [True] * len(KINDS)
    survived("two_threads", 10 * len(KINDS))
    # and within the block of another's, as a reward of one run by another model is
    with made["exact"].backbone().kernels.used():
        assert all(serve(kind) for kind in KINDS)
        assert registry.is_exact()
    # what a caller's block names goes before what a base has
    with registry.use_backend("reference"):
        assert torch.equal(made["auto"].score(BATCH).logprobs_M, expected["reference"][0])
    assert serve("auto")


def test_models_beside_a_base_and_copies_have_its_kernels():
    model = bases()["reference"]
    other = model.beside(roles={"reference": model.roles["reference"]})
    assert other.backbone().kernels is model.backbone().kernels
    assert copy.deepcopy(model).backbone().kernels.backend == "reference"
    for copied in (copy.deepcopy(build()), pickle.loads(pickle.dumps(build()))):
        assert copied.backbone().kernels is registry.PROCESS


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_backward_pass_in_another_thread_has_the_kernels_of_its_forward(checkpointing):
    def gradients(kind: str, *, elsewhere: bool) -> list[torch.Tensor]:
        slots = {"actor": SlotConfig(r=4, target_modules=("q_proj",))}  # the rest is torch's to differentiate
        with registry.Settings(*KINDS[kind]).used():
            roles = {"actor": RoleSpec(slot="actor", trainable=True)}
            model = HydraModel.from_pretrained(tiny_llama(), roles=roles, slots=slots)
        randomise(model, "actor")
        if checkpointing:
            model.backbone().enable_gradient_checkpointing()
        model.train()
        with ExitStack() as stack:
            if not elsewhere:
                stack.enter_context(model.backbone().kernels.used())
            (actor,) = model(BATCH, (Logprobs(),))
            backward = threading.Thread(target=actor.logprob.sum().backward)
            if elsewhere:
                backward.start()
                backward.join()
            else:
                backward.run()
        return [p.grad for p in model.trainable_parameters("actor").values() if p.grad is not None]

    for kind in KINDS:
        expected = gradients(kind, elsewhere=False)
        assert expected
        assert all(torch.equal(a, b) for a, b in zip(gradients(kind, elsewhere=True), expected, strict=True)), kind
