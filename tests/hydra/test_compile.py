"""torch.compile of a backbone: one graph per backbone forward, no break in our layers, the numbers of eager.

A plan's lengths are Python numbers that the compiler guards on: other lengths compile again. It pays where a batch's
shape comes back, as in a benchmark or with answers of one length.
"""

import pytest
import torch

from rlhf_engine.devices import stand_in
from rlhf_engine.hydra import HydraModel, Logprobs, RoleSpec, SlotConfig
from tests.conftest import random_batch, randomise
from tests.hydra.architectures import CONFIGS, plain_model

BATCH = random_batch(((3, 9), (4, 8), (1, 5)))
ROLES = {"actor": RoleSpec(slot="actor", trainable=True), "reference": RoleSpec()}


def make(name: str) -> HydraModel:
    model = HydraModel.from_pretrained(plain_model(name), roles=ROLES, slots={"actor": SlotConfig(r=4, dropout=0.2)})
    randomise(model, "actor")
    return model.train()


def run(model: HydraModel) -> list[torch.Tensor]:
    """Log-probs of actor and reference, and the actor's gradients, with LoRA dropout."""
    model.zero_grad(set_to_none=True)
    out, reference = model(BATCH, (Logprobs(), Logprobs(role="reference")), dropout_seed=3)
    out.logprob.sum().backward()
    return [out.logprob.detach(), reference.logprob, *(p.grad for p in model.backbone().slots.parameters())]


def compare(name: str, backend: str, tolerance: float) -> None:
    with stand_in():  # a graph holds the modules' own ops, not the block kernels with their other gradients
        expected = run(make(name))
    model = make(name)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.backbone().base_model.compile(backend=backend, fullgraph=True)  # fullgraph: a break would raise
    for _ in range(2):
        for ours, theirs in zip(run(model), expected, strict=True):
            bound = tolerance * theirs.abs().max().item()
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=bound)
    # one graph with and one without gradients, and none for the second time
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


# no command compiles a backbone: one of every push
@pytest.mark.parametrize(
    ("name", "backend"), [("llama", "eager"), *(pytest.param(x, "aot_eager", marks=pytest.mark.long) for x in CONFIGS)]
)
def test_a_compiled_backbone_is_one_graph_with_eager_s_numbers(name, backend):
    compare(name, backend, 0.0 if name == "llama" else 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_moe"])
def test_compiled_to_machine_code(name):
    compare(name, "inductor", 1e-4)
