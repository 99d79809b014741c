"""Groups of linears in whole models: found by the probe, held for one call, right when blocks are recomputed."""

import threading

import pytest
import torch
import transformers as hf
from rlhf_kernels.lora import group
from rlhf_kernels.runtime import registry

from rlhf_engine.hydra import HydraModel, Logprobs, SlotConfig, gate, hydra_roles
from rlhf_engine.hydra.attention import plan_packed
from rlhf_engine.hydra.modules import GatedLinear
from tests.conftest import random_batch, randomise, tiny_llama
from tests.devices.runs import on_stand_in
from tests.devices.stand_in import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
QKV, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@pytest.fixture(scope="module")
def device(device):
    """A GPU, or what stands in for one."""
    if device == "cuda":
        yield device
        return
    with on_stand_in() as _:
        yield DEVICE


def make(device, dropout: float = 0.0) -> HydraModel:
    """An actor on every linear, and a critic on PEFT's default targets."""
    slots = {
        "actor": SlotConfig(r=4, alpha=8.0, dropout=dropout),
        "critic": SlotConfig(r=3, target_modules=("q_proj", "v_proj"), dropout=dropout),
    }
    plain = tiny_llama()
    del plain.model.layers[1:]  # the interpreter is slow
    plain.config.num_hidden_layers = 1
    model = HydraModel.from_pretrained(plain, roles=hydra_roles(), slots=slots, device=device)
    randomise(model, "actor", "critic")
    return model.train()


def gradients(model: HydraModel, *, grouped: bool, in_thread: bool = False, micro_batches: int = 1):
    """Log-probs of the last micro-batch, and the gradients of both slots over all of them."""
    registered = registry.use_op_backend(group.OP, "triton" if grouped else "reference")
    with registered:
        for i in range(micro_batches):
            batch = random_batch(((3, 5), (1, 4)), seed=i).to(model.device)
            outs = model(batch, (Logprobs(role="actor"), Logprobs(role="reference")), dropout_seed=5 + i)
            loss = (outs[0].logprob * torch.linspace(-1, 1, len(outs[0].logprob)).to(model.device)).sum()
            if in_thread:
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
            else:
                loss.backward()
            assert group.held._results == {}
            assert group.held._for[0] is None
    found = {n: p.grad.cpu() for n, p in model.trainable_parameters("actor").items() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return [out.logprob.detach().cpu() for out in outs], found


def groups(model: HydraModel) -> list[tuple[str, ...]]:
    modules = model.backbone().model.modules()
    linears = [module for module in modules if isinstance(module, GatedLinear)]
    return [
        tuple(x.gated.path.rpartition(".")[2] for x in (linear, *linear.readers))
        for linear in linears
        if linear.readers
    ]


def test_groups_are_what_reads_one_tensor():
    model = HydraModel.from_pretrained(tiny_llama(), roles=hydra_roles())
    assert groups(model) == [QKV, MLP] * 2
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64, "pad_token_id": 0}
    neox = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**sizes, intermediate_size=40, max_position_embeddings=64))
    assert groups(HydraModel.from_pretrained(neox, roles=hydra_roles())) == []


@pytest.mark.parametrize(("dropout", "recompute", "n"), [(0.0, False, 2), (0.25, True, 1)])
def test_a_step_has_the_gradients_of_linears_alone(device, dropout, recompute, n, monkeypatch):
    model = make(device, dropout)
    if recompute:
        model.backbone().enable_gradient_checkpointing()
    alone, expected = gradients(model, grouped=False, micro_batches=n)
    sizes: list[int] = []
    apply = group._Group.apply
    monkeypatch.setattr(group._Group, "apply", lambda *args: sizes.append(len(args[0])) or apply(*args))
    logprobs, found = gradients(model, grouped=True, micro_batches=n)
    assert sizes == [3, 1, 2, 1] * (n * (1 + recompute))
    assert all(torch.equal(a, b) for a, b in zip(logprobs, alone, strict=True)), "the forward's bits"
    assert found.keys() == expected.keys()
    assert len(found) == 7 * 2
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
    if recompute:
        other = gradients(model, grouped=True, in_thread=True, micro_batches=n)[1]
        assert all(torch.equal(gradient, found[name]) for name, gradient in other.items())


def test_slots_beside_each_other_and_another_thread_between_two_linears(device):
    model, batch = make(device), random_batch()
    batch = batch.to(model.device)
    expected, found = lanes(model, batch), []
    key = model.backbone().model.get_submodule("model.layers.0.self_attn.k_proj")

    def meanwhile(module, arguments):
        hook.remove()
        assert len(group.held._results) == 2
        thread = threading.Thread(target=beside, args=(registry.effective(),))
        thread.start()
        thread.join()
        assert len(group.held._results) == 2

    def beside(kernels):
        with kernels.used():
            found.append(lanes(model, batch))

    hook = key.register_forward_pre_hook(meanwhile)
    with registry.use_op_backend(group.OP, "triton"):
        found.append(lanes(model, batch))
    assert len(found) == 2
    for got in found:
        torch.testing.assert_close(got.cpu(), expected.cpu(), rtol=1e-5, atol=1e-5)


def lanes(model: HydraModel, batch) -> torch.Tensor:
    """Hidden states of rows whose slots take turns; the critic leaves keys alone."""
    n = sum(batch.lengths)
    table = gate.SlotTable(starts=(0, 5, 14), ends=(5, 11, n), slots=("actor", "critic", "actor"))
    with torch.no_grad():
        return model.backbone().run(batch.tokens_T, batch.positions_T, table, plan_packed(batch.lengths, model.device))


def test_an_error_leaves_nothing_behind(device):
    model = make(device)
    key = model.backbone().model.get_submodule("model.layers.0.self_attn.k_proj")

    def fail(module, arguments):
        assert group.held._results
        raise KeyError("between two linears of a group")

    hook = key.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        gradients(model, grouped=True)
    assert group.held._for[0] is None
    hook.remove()
    gradients(model, grouped=True)
