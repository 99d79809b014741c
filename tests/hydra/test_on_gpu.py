"""The model on a GPU: architectures against the plain model and against the CPU, and a step of each method."""

import copy

import pytest
import torch
from rlhf_kernels.runtime import registry
from transformers import AutoModelForCausalLM

from rlhf_engine.hydra import METHODS, HydraModel, Logprobs, PackedBatch, RoleSpec, SlotConfig
from rlhf_engine.hydra.gate import head_logits
from rlhf_engine.hydra.probe import base_model
from rlhf_engine.rollout import SamplingConfig, generate
from rlhf_engine.training.rl import RlTrainer
from tests.conftest import VOCAB, random_batch, randomise
from tests.hydra.architectures import CONFIGS, plain_model
from tests.training.test_data import train_config, write_model

pytestmark = pytest.mark.gpu

ROLES = {"actor": RoleSpec(slot="actor", trainable=True), "reference": RoleSpec()}
every = pytest.mark.parametrize("name", CONFIGS)


def make(name: str, device: str, dtype: torch.dtype = torch.float32) -> HydraModel:
    plain = plain_model(name).to(dtype)
    model = HydraModel.from_pretrained(plain, roles=ROLES, slots={"actor": SlotConfig(r=4)}, device=device)
    randomise(model.cpu(), "actor")
    return model.to(device).eval()


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_off_is_the_plain_model_bit_for_bit(name, dtype):
    model, plain = make(name, "cuda", dtype), plain_model(name).to(dtype).to("cuda")
    tokens = torch.randint(3, VOCAB, (3, 12), generator=torch.Generator().manual_seed(0)).cuda()
    batch = PackedBatch.from_lists(tokens[:, :4].tolist(), tokens[:, 4:].tolist(), device="cuda")
    with torch.no_grad(), registry.use_backend("reference"):  # whose attention is the plain model's, in bf16 as well
        ours = model.backbone().run_lanes([(batch, None, None)])[0]
        theirs = base_model(plain)(tokens, use_cache=False).last_hidden_state.flatten(0, 1)
        logits = head_logits(ours, model.backbone().lm_head)
    assert torch.equal(ours, theirs)
    assert torch.equal(logits.view(3, 12, -1), plain(tokens, use_cache=False).logits)


@every
def test_numbers_and_gradients_are_those_of_the_cpu(name):
    found = []
    for device in ("cpu", "cuda"):
        model, batch = make(name, device), random_batch(((3, 9), (4, 8), (1, 5), (6, 14))).to(device)
        out, reference = model(batch, (Logprobs(), Logprobs(role="reference")))
        out.logprob.sum().backward()
        gradients = [p.grad.cpu() for p in model.backbone().slot("actor").parameters()]
        found.append([out.logprob.detach().cpu(), reference.logprob.cpu(), *gradients])
    for cpu, gpu in zip(*found, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=2e-3, atol=2e-3 * cpu.abs().max().item())


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_answers_that_share_a_prompt_are_those_of_copies(name):
    """In bf16, whose attention FlexAttention serves; heads as wide as it takes."""
    config = copy.deepcopy(CONFIGS[name])
    config.head_dim = 16
    found = []
    for shares in (True, False):
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        model = HydraModel.from_pretrained(plain, roles=ROLES, slots={"actor": SlotConfig(r=4)})
        randomise(model, "actor")
        model.to("cuda").shares_prompts = shares
        prompt = list(range(3, 23))
        batch = PackedBatch.from_lists([prompt] * 3 + [[7, 8]], [[3, 4], [5], [6, 7, 8], [9]], device="cuda")
        assert (model.shared_rows(batch) is not None) == shares
        out, reference = model(batch, (Logprobs(), Logprobs(role="reference")))
        out.logprob.sum().backward()
        gradients = [p.grad for p in model.backbone().slot("actor").parameters()]
        found.append([out.logprob.detach(), reference.logprob, *gradients])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 0.07 * theirs.norm()


@every
def test_generation_draws_from_the_distribution_that_training_sees(name):
    model = make(name, "cuda")
    sampling = SamplingConfig(max_completion_length=14, eos_token_ids=(2,), seed=3)
    rollout = generate(model, [[5, 9, 11, 3, 20, 6, 7], [8, 12], [4, 4, 4]], sampling)
    again = model.score(rollout.batch, ("actor",)).logprobs_M
    torch.testing.assert_close(rollout.logprobs_M, again, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_of_each_method(method, dtype, tmp_path):
    model = write_model(tmp_path / "m")
    config = train_config(model, tmp_path / "run", method=method, device="cuda", dtype=dtype, learning_rate=1e-3)
    trainer = RlTrainer(config)
    first, second = trainer.step(), trainer.step()
    assert first["optimizer_steps"] == second["optimizer_steps"] == 2
    trainer.save()
    resumed = RlTrainer(train_config(model, tmp_path / "run", **{**vars(config), "resume_from_checkpoint": "auto"}))
    assert resumed.state.step == 2
