"""Exact mode: what other policies' rows and threads cannot move is the gradient of a policy, to the bit."""

import pytest
import torch
from rlhf_kernels.runtime import native, registry

from rlhf_engine.hydra import HydraModel, Logprobs, PackedBatch, Rewards, Values, hydra_roles
from tests.conftest import VOCAB, randomise, tiny_llama

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _exactly():
    with registry.use_exact():
        yield


def batch(n: int = 9, seed: int = 0) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most, (), generator=generator))
        return torch.randint(3, VOCAB, (length,), generator=generator).tolist()

    prompts = [draw(1, 30) for _ in range(n)]
    prompts[4] = prompts[1]
    return PackedBatch.from_lists(prompts, [draw(1, 25) for _ in range(n)])


def model(dtype: torch.dtype) -> HydraModel:
    made = HydraModel.from_pretrained(tiny_llama(dtype=dtype, width=3), roles=hydra_roles(), dtype=dtype).eval()
    randomise(made, "actor", "critic")
    return made


def gradients(
    made: HydraModel, outputs, answers: PackedBatch, role: str = "actor", **options
) -> dict[str, torch.Tensor]:
    """Of a role's parameters, for a loss of its own that depends on its own rows alone."""
    made.zero_grad()
    found = made(answers, outputs, **options)
    losses = [(out.logprob if hasattr(out, "logprob") else out).double().square().mean() for out in found]
    torch.stack(losses).sum().backward()
    return {name: p.grad.clone() for name, p in made.trainable_parameters(role).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@DTYPES
def test_lanes_beside_a_policy_do_not_move_its_gradient(dtype):
    made, answers = model(dtype), batch()
    actor, critic, reward = Logprobs(role="actor"), Values(role="critic"), Rewards(role="reward")
    alone = gradients(made, (actor,), answers)
    assert any(grad.any() for grad in alone.values())
    assert same(gradients(made, (actor, critic), answers), alone)
    assert same(gradients(made, (critic, reward, actor), answers), alone)
    assert same(gradients(made, (actor, critic), answers, token_budget=1), alone)  # one lane after another
    of_critic = gradients(made, (critic,), answers, "critic")
    assert same(gradients(made, (actor, critic), answers, "critic"), of_critic)


@DTYPES
def test_threads_do_not_move_a_gradient(dtype):
    made, answers = model(dtype), batch(16)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(gradients(made, (Logprobs(role="actor"), Values(role="critic")), answers))
    finally:
        torch.set_num_threads(before)
    assert same(found[0], found[1])


def test_another_policy_on_the_base_does_not_move_a_gradient():
    """Two policies that share a base: one's step, with what the other has done in between."""
    made, answers = model(torch.bfloat16), batch()
    other = HydraModel.beside(made, roles=hydra_roles(), seed=5)
    randomise(other, "actor", seed=11)
    alone = gradients(made, (Logprobs(role="actor"),), answers)
    gradients(other, (Logprobs(role="actor"),), batch(5, seed=3))
    assert same(gradients(made, (Logprobs(role="actor"),), answers), alone)
