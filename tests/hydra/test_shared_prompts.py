"""A prompt of several sequences goes through the backbone once: the same numbers, forward and backward, for less."""

from types import SimpleNamespace

import pytest
import torch
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.testing import assert_ok, tier1

from rlhf_engine.data import side_by_side
from rlhf_engine.hydra import HydraModel, Logprobs, PackedBatch, SlotConfig, Values, hydra_roles, model as hydra_model
from rlhf_engine.training.update import Schedule, _Minibatch
from tests.conftest import VOCAB, randomise, tiny_llama

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


def batch(seed: int = 0) -> PackedBatch:
    """Prompts of one sequence and of several, out of order; answers of any length, none and equal ones among them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(3, VOCAB, (n,), generator=generator).tolist()

    a, b, c = draw(21), draw(5), draw(1)
    answers = [draw(n) for n in (7, 3, 1, 9, 4, 16)]
    prompts = [a, b, a, c, a, b]
    return PackedBatch.from_lists([*prompts, b], [*answers, answers[1]])


def model(dtype: torch.dtype = torch.float32, **slot) -> HydraModel:
    found = HydraModel.from_pretrained(
        tiny_llama(dtype=dtype, width=2), roles=hydra_roles(), slots={"actor": SlotConfig(r=4, **slot)}
    ).eval()
    randomise(found, "actor")
    return found


def test_rows_of_a_batch_with_each_prompt_once():
    found = batch()
    shared = found.shared
    assert shared is not None
    assert len(shared.rows) == found.n_tokens - 2 * 21 - 2 * 5
    assert torch.equal(found.tokens_T[shared.rows[shared.places_T]], found.tokens_T)
    assert torch.equal(found.positions_T[shared.rows[shared.places_T]], found.positions_T)
    assert shared.lengths == (21, 7, 1, 4, 5, 3, 16, 3, 10)
    assert shared.parents == (-1, 0, 0, 0, -1, 4, 4, 4, -1)
    assert found.select([0, 1, 3]).shared is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_exact_mode_scores_have_the_bits_of_copies(dtype, rows):
    with registry.use_exact():
        made, answers = model(dtype), batch()
        roles = ("actor", "reference", "critic", "reward")
        rows.clear()
        once = made.score(answers, roles)
        assert sum(rows) == 3 * len(answers.shared.rows)  # critic and reward model have lanes of their own
        made.shares_prompts = False
        rows.clear()
        copied = made.score(answers, roles)
        assert sum(rows) == 3 * answers.n_tokens
    for name, values in once.items():
        assert torch.equal(values, getattr(copied, name)), name


def test_budgets_count_a_prompt_once(rows):
    made, answers = model(), batch()
    n = len(answers.shared.rows)
    made.token_budget = 2 * n  # of two lanes with each prompt once, too few for copies
    assert 2 * answers.n_tokens > made.token_budget
    assert made.runs_together(answers, ("actor", "reference"))
    assert not made.runs_together(answers, ("actor", "reference", "critic"))
    rows.clear()
    made.score(answers, ("actor", "reference"))
    assert rows == [2 * n]
    made.shares_prompts = False
    assert not made.runs_together(answers, ("actor", "reference"))
    dropped = model(dropout=0.3)
    dropped.token_budget = 2 * n
    assert dropped.runs_together(answers, ("actor", "reference"))
    assert not dropped.train().runs_together(answers, ("actor", "reference")), "an update has copies of prompts"


def test_parts_that_save_too_little_on_a_gpu_keep_the_budget(rows, monkeypatch):
    made, answers = model(), PackedBatch.from_lists([[5] * 21] * 4 + [[7] * 5] * 2, [[9] * 10] * 4 + [[9] * 40] * 2)
    made.token_budget = 88
    for on_gpu, expected in ((False, [61, 85]), (True, [61, 45, 45])):
        monkeypatch.setattr(hydra_model, "is_gpu", lambda device, on_gpu=on_gpu: on_gpu)
        rows.clear()
        assert len(made.score(answers, ("actor",)).logprobs_M) == answers.n_completion_tokens
        assert rows == expected


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_micro_batches_of_an_update_hold_a_prompt_s_tokens_once(dropout):
    made, answers = model(dropout=dropout), batch()
    places = [place for place in side_by_side(answers.prompts_N) if place != 3]
    most = 21 + 7 + 1 + 4  # three answers to the long prompt
    schedule = Schedule(num_epochs=1, num_mini_batches=1, micro_batch_size=8, max_tokens=most)
    held = SimpleNamespace(answers_per_unit=1), SimpleNamespace(batch=answers)
    parts = _Minibatch(made.train(), *held, schedule, places, 0).divide(places)
    if dropout:  # every answer has a copy of its prompt: 28, 22, 25, 8, 21 and 8 tokens
        assert parts == [[0], [2, 1], [4, 6], [5]]
    else:
        assert parts == [[0, 2, 4], [1, 5, 6]]


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_are_those_of_copies(exact):
    """Of adapters, through the keys that answers share; held to float64."""

    def gradients(made: HydraModel, shares: bool) -> dict[str, torch.Tensor]:
        made.shares_prompts = shares
        made.zero_grad()
        policy, values = made(batch(), (Logprobs(role="actor"), Values(role="critic")))
        weights = torch.linspace(-1, 1, len(values), dtype=values.dtype)
        ((policy.logprob * weights).sum() + (values * weights.flip(0)).square().sum()).backward()
        return {name: p.grad for name, p in made.named_parameters() if p.grad is not None}

    def wide(made: HydraModel) -> HydraModel:
        found = HydraModel.from_pretrained(
            tiny_llama(dtype=torch.float64, width=2), roles=hydra_roles(), dtype=torch.float64,
            slots={"actor": SlotConfig(r=4)}, adapter_dtype=torch.float64,
        ).eval()  # fmt: skip
        found.load_state_dict({name: x.double() for name, x in made.state_dict().items()})
        return found

    with registry.use_exact(exact):
        made = model()
        once, copied = gradients(made, True), gradients(made, False)
    with registry.use_backend("reference"):
        truth = gradients(wide(made), False)
    assert set(once) == set(copied) == set(truth)
    for name, found in once.items():
        assert_ok(tier1(found, truth[name], copied[name]), name)


def test_dropout_is_each_sequence_s_own(rows):
    made = model(dropout=0.3).train()
    outputs = (Logprobs(role="actor"),)
    rows.clear()
    made(batch(), outputs, dropout_seed=3)
    assert rows == [batch().n_tokens]
    made(batch(), outputs)  # no seed, no dropout
    assert rows[1] == len(batch().shared.rows)
