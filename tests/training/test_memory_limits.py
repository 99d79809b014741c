"""Running out of memory: micro-batches and backbone forwards shrink, the gradient and the dropout masks stay."""

import dataclasses
import gc
import subprocess
import sys

import pytest
import torch

from rlhf_engine import devices
from rlhf_engine.algorithms.base import TokenValues
from rlhf_engine.algorithms.ppo import Ppo
from rlhf_engine.config.algorithm import AlgorithmOptions
from rlhf_engine.devices import Budget, is_out_of_memory
from rlhf_engine.errors import ConfigError, MemoryLimitError
from rlhf_engine.hydra import HydraModel, SlotConfig, hydra_roles
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.scoring.experience import score
from rlhf_engine.training import rl
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.update import Schedule, alone, update as learn
from tests.conftest import random_batch, randomise, tiny_llama
from tests.training.test_data import train_config, write_model, write_reward
from tests.training.test_rl import without_timings

LENGTHS = ((3, 9), (4, 8), (1, 5), (6, 14), (2, 9), (5, 5), (3, 3))
TOKENS = sum(p + c for p, c in LENGTHS)
PPO = Ppo(AlgorithmOptions(entropy_coef=0.01))
SCHEDULE = Schedule(num_epochs=1, num_mini_batches=1, micro_batch_size=7)


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Retries collect garbage: of what they have made, not of everything that other tests have imported."""
    gc.freeze()
    yield
    gc.unfreeze()


class LimitedMemory:
    """A device on which a backbone forward of more than `limit` tokens, or the backward pass of one, does not fit."""

    def __init__(self, monkeypatch, limit: int, *, in_backward: bool = False) -> None:
        self.refused = 0
        run = Backbone.run

        def limited(backbone, tokens_T, *args, **options):
            n = len(tokens_T)
            if n <= limit:
                return run(backbone, tokens_T, *args, **options)
            if not in_backward:
                self.refused += 1
                raise torch.OutOfMemoryError(f"forward of {n} tokens")
            hidden = run(backbone, tokens_T, *args, **options)
            if hidden.requires_grad:
                hidden.register_hook(self._refuse)
            return hidden

        monkeypatch.setattr(Backbone, "run", limited)

    def _refuse(self, gradient):
        self.refused += 1
        raise torch.OutOfMemoryError("backward")


def make() -> tuple[HydraModel, TokenValues]:
    slots = {name: SlotConfig(r=4, dropout=0.3) for name in ("actor", "critic")}
    model = HydraModel.from_pretrained(tiny_llama(), roles=hydra_roles(), slots=slots)
    randomise(model, "actor", "critic")
    batch = random_batch(LENGTHS)
    generator = torch.Generator().manual_seed(3)
    scores = model.eval().score(batch, ("actor", "critic"))
    advantages, returns = (torch.randn(batch.n_completion_tokens, generator=generator) for _ in range(2))
    old = {"old_logprobs_M": scores.logprobs_M, "values_M": scores.values_M}
    return model.train(), TokenValues(batch=batch, **old, advantages_M=advantages, returns_M=returns)


def update(model: HydraModel, experience: TokenValues, schedule: Schedule = SCHEDULE):
    """Gradients of one minibatch over all sequences, with LoRA dropout, and the update's statistics."""
    found: dict[str, torch.Tensor] = {}

    def step() -> dict[str, float]:
        found.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)
        return {}

    stats = alone(learn(model, PPO, experience, schedule, step, seed=0))
    return found, stats


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_halved_micro_batch_gives_the_same_gradient_and_masks(monkeypatch, in_backward):
    model, experience = make()
    expected, stats = update(model, experience)
    assert stats["micro_batch_size"] == 7
    memory = LimitedMemory(monkeypatch, limit=TOKENS, in_backward=in_backward)  # two lanes of half the sequences
    found, stats = update(model, experience)
    assert memory.refused >= 1
    assert stats["micro_batch_size"] < 7
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any()
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item(), msg=name)


def test_only_what_failed_and_what_is_as_large_is_halved(monkeypatch):
    model, experience = make()
    expected, _ = update(model, experience)
    LimitedMemory(monkeypatch, limit=45)  # two lanes of the longest sequence are 40 tokens
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, args: sizes.append(args[0].n_sequences))
    found, stats = update(model, experience, dataclasses.replace(SCHEDULE, max_tokens=30))
    # micro-batches of 12 + 12 + 6, 20 + 10 and 11 + 6 tokens: the first two are halved, and 12 + 12 once more
    assert sizes == [3, 2, 1, 1, 1, 1, 1, 2]
    assert stats["micro_batch_size"] == 2
    for name, gradient in expected.items():
        ulps = 8 * torch.finfo(torch.float32).eps * gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=ulps, msg=name)


def test_lanes_that_run_apart_give_the_same_gradient_with_one_graph_at_a_time(monkeypatch):
    model, experience = make()
    expected, _ = update(model, experience)
    calls: list[tuple[str, ...]] = []
    forward = HydraModel.forward

    def counted(self, batch, outputs, **options):
        calls.append(tuple(role for output in outputs for role in output.roles))
        return forward(self, batch, outputs, **options)

    monkeypatch.setattr(HydraModel, "forward", counted)
    model.token_budget = TOKENS  # room for one lane
    found, _ = update(model, experience)
    assert calls == [("actor",), ("critic",)]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item(), msg=name)


def test_the_masks_matter_to_that_gradient():
    model, experience = make()
    with_dropout, _ = update(model, experience)
    without, _ = update(model.eval(), experience)
    name = next(n for n in with_dropout if n.endswith(".A"))
    assert not torch.allclose(with_dropout[name], without[name], rtol=1e-2)


def test_a_sequence_that_does_not_fit_ends_the_update(monkeypatch):
    model, experience = make()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    LimitedMemory(monkeypatch, limit=30)  # two lanes of the longest sequence are 40 tokens
    with pytest.raises(MemoryLimitError, match="the update of a single sequence does not fit into memory; shorten"):
        update(model, experience)
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())


@pytest.mark.parametrize("lanes", [2, 3])
def test_an_answer_is_scored_lane_by_lane_where_its_lanes_do_not_fit_together(monkeypatch, lanes):
    model, experience = make()
    batch, budget = experience.batch.select([3]), Budget(model.device)
    roles = ("reference", "reward", "actor", "critic")[: lanes + 1]  # the first two have one lane
    model.eval().trained_heads.add("reward")
    expected = model.score(batch, roles, token_budget=1)
    budget.tokens = (lanes + 1) * batch.n_tokens - 1  # for all lanes, but not for all roles
    memory = LimitedMemory(monkeypatch, limit=batch.n_tokens)
    found = score(model, batch, roles, budget, temperature=1.0)
    assert memory.refused == 1
    assert all(torch.equal(x, dict(expected.items())[name]) for name, x in found.items())


def test_one_step_that_runs_out_of_memory_leaves_the_run_as_it_was(tmp_path, monkeypatch, survived):
    made = write_model(tmp_path / "m")
    free, limited = (RlTrainer(train_config(made, tmp_path / name)) for name in ("free", "limited"))
    rows = [free.step() for _ in range(2)]
    with monkeypatch.context() as patched:
        memory = LimitedMemory(patched, limit=36)
        first = limited.step()
    assert memory.refused >= 2  # the scoring pass and a micro-batch
    assert first["micro_batch_size"] < 3
    assert limited.state.budget_failures == {"micro_batch_tokens": 1, "scoring_tokens": 1}
    second = limited.step()
    assert limited.state.budgets == {}
    assert set(limited.state.budget_failures.values()) == {0}
    assert second["micro_batch_size"] == 3
    assert_alike([first, second], rows)
    survived("faults", 1)


def assert_alike(rows, expected) -> None:
    for row, other in zip(rows, expected, strict=True):
        for name in ("reward", "kl", "policy/loss", "value/loss", "grad_norm/actor", "grad_norm/critic"):
            assert row[name] == pytest.approx(other[name], rel=2e-3, abs=1e-4), name


def test_a_run_whose_steps_run_out_of_memory_has_smaller_ones_from_then_on(tmp_path, monkeypatch):
    config = train_config(
        write_model(tmp_path / "m"), tmp_path / "run", per_device_train_batch_size=4, save_total_limit=None
    )
    roomy = RlTrainer(dataclasses.replace(config, output_dir=str(tmp_path / "roomy")))
    memory = LimitedMemory(monkeypatch, limit=36)
    trainer, rows, refused, saved = RlTrainer(config), [], [], []
    for _ in range(4):
        rows.append(without_timings(trainer.step()))
        refused.append(memory.refused)
        saved.append(str(trainer.save()))
    assert refused[0] < refused[1] == refused[2] == refused[3]  # learnt in two steps
    assert max(rows[1]["micro_batch_tokens"], rows[1]["scoring_tokens"]) <= 36
    for done in (1, 2):  # a failure is remembered, as is what came of two
        again = RlTrainer(dataclasses.replace(config, resume_from_checkpoint=saved[done - 1]))
        assert [without_timings(again.step()) for _ in rows[done:]] == rows[done:]
    monkeypatch.undo()
    assert_alike(rows, [roomy.step() for _ in rows])
    longer = RlTrainer(dataclasses.replace(config, resume_from_checkpoint=saved[1], max_completion_length=40))
    longer.step()  # whose answers are longer than the budget that the checkpoint holds


def test_free_memory_that_is_too_small_for_the_longest_answers_is_told(tmp_path, monkeypatch):
    config = train_config(write_model(tmp_path / "m"), tmp_path / "run", per_device_train_batch_size=None)

    def give(free: int) -> None:
        memory = devices.Memory(used=0, peak=10**6, free=free)  # whatever runs takes a million bytes
        for module in (devices, rl):
            monkeypatch.setattr(module, "read_memory", lambda *_, **options: memory)

    give(1000)
    with pytest.raises(ConfigError, match="max_completion_length: expected prompt and answer of at most 5 tokens, for"):
        RlTrainer(config)
    give(10**5)
    trainer = RlTrainer(config)
    with pytest.warns(UserWarning, match=r"max_completion_length: expected prompts and answers of at most \d tokens"):
        trainer.step()
    named = [
        RlTrainer(dataclasses.replace(config, output_dir=str(tmp_path / name), **{name: 30})).step()
        for name in ("per_device_train_batch_size", "max_tokens_per_micro_batch")
    ]
    assert all("micro_batch_tokens" not in row and row["scoring_tokens"] for row in named)


_REAL = """
import dataclasses, resource, sys
import torch
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.config import parse_config, TrainConfig

torch.set_num_threads(1)
trainer = RlTrainer(parse_config(TrainConfig, sys.argv[2:], prog="t"))
trainer.step()  # sequence by sequence; threads, libraries and arenas are there
trainer.config = dataclasses.replace(trainer.config, per_device_train_batch_size=64)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + int(sys.argv[1]) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print("micro_batch_size", trainer.step()["micro_batch_size"])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space through Linux's setrlimit")
@pytest.mark.long
def test_a_real_allocation_failure_is_survived(tmp_path):
    model = write_model(tmp_path / "m", hidden_size=192, intermediate_size=1536, num_hidden_layers=4)
    config = train_config(model, tmp_path / "run")
    reward = write_reward(tmp_path, "return [float(len(c)) for c in completions]")
    flags = ["--model_name_or_path", config.model_name_or_path, "--output_dir", config.output_dir]
    flags += ["--dataset_name", config.dataset_name, "--reward_funcs", reward, "--generation_batch_size", "64"]
    flags += ["--num_mini_batches", "1", "--num_ppo_epochs", "1", "--max_completion_length", "40", "--device", "cpu"]
    flags += ["--per_device_train_batch_size", "1"]
    done = subprocess.run(
        [sys.executable, "-c", _REAL, "60", *flags], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    size = float(done.stdout.split()[-1])
    assert 1 <= size < 64


def test_what_counts_as_out_of_memory():
    for error in (
        MemoryError(),  # what native code throws
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
    ):
        assert is_out_of_memory(error), error
    others = ("CUDA error: an illegal memory access", "expected scalar type Float but found Half")
    for error in (*map(RuntimeError, others), ValueError("CUDA error: out of memory")):
        assert not is_out_of_memory(error), error
