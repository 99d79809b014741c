"""The gate is ambient per thread, immutable, and outlives its `with` block where checkpointing recomputes."""

import threading

import pytest
import torch

from rlhf_engine.hydra import HydraModel, Logprobs, SlotConfig, gate, hydra_roles
from rlhf_engine.hydra.attention import plan_packed
from tests.conftest import build, random_batch, randomise, tiny_llama


def lane_logprobs(model: HydraModel, role: str, batch) -> torch.Tensor:
    with torch.no_grad():
        (out,) = model(batch, (Logprobs(role=role),))
    return out.logprob


def test_nesting_restores_the_outer_call_also_after_an_error():
    plan = plan_packed([2], torch.device("cpu"))
    outer = gate.BackboneCall(table=gate.SlotTable.uniform("a", 2), attention=plan)
    inner = gate.BackboneCall(table=gate.SlotTable.uniform("b", 2), attention=plan)
    assert gate.current() is None

    def fail_inside():
        with gate.enter(inner):
            assert gate.current() is inner
            raise KeyError

    with gate.enter(outer):
        with pytest.raises(KeyError):
            fail_inside()
        assert gate.current() is outer
    assert gate.current() is None


def test_two_threads_on_different_slots_at_once(survived):
    model, batch = build(), random_batch()
    expected = {role: lane_logprobs(model, role, batch) for role in ("actor", "reference")}
    assert not torch.allclose(expected["actor"], expected["reference"])
    inside = threading.Barrier(2)
    wrong: list[str] = []
    waited: list[bool] = []
    first = model.backbone().model.get_submodule(next(iter(model.backbone().linears)))

    def wait_inside(module, args):
        # both threads stand inside their backbone call, under their own slot, at the same moment
        inside.wait(timeout=30)
        waited.append(True)

    handle = first.register_forward_pre_hook(wait_inside)

    def work(role: str) -> None:
        for _ in range(20):
            if not torch.equal(lane_logprobs(model, role, batch), expected[role]):
                wrong.append(role)

    threads = [threading.Thread(target=work, args=(role,)) for role in expected]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    handle.remove()
    assert len(waited) == 40
    survived("two_threads", 40, len(wrong))
    assert wrong == []


def gradients(model: HydraModel, batch, *, other_thread: bool) -> dict[str, torch.Tensor]:
    out, ref = model(batch, (Logprobs(role="actor"), Logprobs(role="reference")), dropout_seed=5)
    loss = (out.logprob * torch.linspace(-1, 1, len(out.logprob))).sum() + ref.logprob.sum().detach()
    if other_thread:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    else:
        loss.backward()
    found = {n: p.grad.clone() for n, p in model.trainable_parameters("actor").items()}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(("other_thread", "dropout"), [(False, 0.0), (True, 0.3)])
def test_checkpointed_gradients_equal_plain_ones(other_thread, dropout):
    slots = {"actor": SlotConfig(r=4, dropout=dropout), "critic": SlotConfig(r=4)}
    model = HydraModel.from_pretrained(tiny_llama(), roles=hydra_roles(), slots=slots)
    randomise(model, "actor", "critic")
    batch = random_batch()
    model.train()
    plain = gradients(model, batch, other_thread=False)
    model.backbone().enable_gradient_checkpointing()
    recomputed: list[object] = []
    layer = model.backbone().model.model.layers[0].mlp
    handle = layer.register_forward_pre_hook(lambda m, a: recomputed.append(gate.current()))
    again = gradients(model, batch, other_thread=other_thread)
    handle.remove()
    # one forward per lane group (actor with gradient, reference without) and one recompute, each under its own call
    assert len(recomputed) == 3
    assert all(call is not None for call in recomputed)
    assert all(torch.equal(plain[n], again[n]) for n in plain)
    (out,) = model(batch, (Logprobs(),), dropout_seed=1)
    for _ in range(2):  # a graph that is kept is gone through, and recomputed, again
        model.zero_grad()
        out.logprob.sum().backward(retain_graph=True)
        recomputed.append([p.grad.clone() for p in model.trainable_parameters("actor").values()])
    assert all(map(torch.equal, *recomputed[-2:]))


def test_dropout_masks_do_not_depend_on_the_batch():
    slots = {"actor": SlotConfig(r=4, dropout=0.5)}
    model = HydraModel.from_pretrained(tiny_llama(), roles={"actor": hydra_roles()["actor"]}, slots=slots)
    randomise(model, "actor")
    model.train()
    batch = random_batch()
    (whole,) = model(batch, (Logprobs(),), dropout_seed=1)
    (part,) = model(batch.select([2, 0]), (Logprobs(),), dropout_seed=1)
    rows = batch.select_completion_rows([2, 0])
    torch.testing.assert_close(part.logprob, whole.logprob[rows], rtol=1e-5, atol=1e-5)
    (other,) = model(batch, (Logprobs(),), dropout_seed=2)
    assert (other.logprob - whole.logprob).abs().max() > 1e-3


def test_a_new_pair_lies_around_zero_and_no_copy_changes_its_scale():
    pairs = [gate.LoraPair(8, 16, 4, torch.device("cpu"), torch.float32) for _ in range(2)]
    for pair in pairs:
        pair.reset(torch.Generator().manual_seed(0))
        assert -0.25 <= pair.A.min().item() < -0.2 < 0.2 < pair.A.max().item() <= 0.25
    configs = SlotConfig(r=8, alpha=8.0), SlotConfig(r=8, alpha=8.0, use_rslora=True)
    assert [config.scale for config in configs] == [1.0, 8 / 8**0.5]
    one, other = (gate.AdapterSlot("s", c, {"x": p}, False) for c, p in zip(configs, pairs, strict=True))
    assert not any(p.requires_grad for p in one.parameters())
    with pytest.raises(ValueError, match=r"expected r=8, scale 1.0 like 's', got r=8 and scale 2.8"):
        one.copy_from(other)
