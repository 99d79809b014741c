"""The five methods of the Hydra paper are five role tables: what each holds, trains and shares, and that they agree."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_engine.hydra import (
    METHODS,
    HydraModel,
    Logprobs,
    PolicyLoss,
    RoleSpec,
    SlotConfig,
    ValueLoss,
    Values,
    hydra_roles,
    load_pretrained,
    save_pretrained,
)
from rlhf_engine.hydra.optimizer import RoleOptimizer
from rlhf_engine.hydra.roles import fold_lanes
from tests.conftest import random_batch, tiny_llama

ROLES = ("actor", "reference", "critic", "reward")
# (frozen backbones, trained backbones, LoRA sets, backbone forwards per scoring pass)
TABLE = {
    "full_ppo": (2, 2, 0, 4), "lora_ppo": (4, 0, 2, 4), "dynamic_lora_ppo": (2, 0, 2, 4), "j_hydra_ppo": (1, 0, 1, 2),
    "hydra_ppo": (1, 0, 2, 3),
}  # fmt: skip
RANK = 4

every = pytest.mark.parametrize("method", METHODS)


def make(method: str, base, **options) -> HydraModel:
    roles = hydra_roles(method)
    slots = {role.slot: SlotConfig(r=RANK) for role in roles.values() if role.slot is not None}
    others = {role.backbone: base for role in roles.values() if role.backbone != "base"}
    return HydraModel.from_pretrained(base, roles=roles, slots=slots, backbones=others, **options)


def heads_that_differ(model: HydraModel) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in sorted(model.heads):
            for p in model.heads[name].parameters():
                p.copy_(torch.randn(p.shape, generator=generator))


@every
def test_storages_and_trainables_equal_the_paper_s_table(method, base):
    frozen, trained, n_slots, forwards = TABLE[method]
    assert len(fold_lanes(hydra_roles(method), ROLES)) == forwards
    plain = tiny_llama()
    lm_head = plain.lm_head.weight.numel()
    whole = sum(p.numel() for p in plain.parameters())
    hidden = plain.config.hidden_size
    linears = [m for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    one_slot = sum(RANK * (m.in_features + m.out_features) for m in linears)

    model = make(method, base)
    # a backbone that no role reads with an LM head is held without one
    with_head = {role.backbone for role in model.roles.values() if role.head == "lm"}
    n_backbones = frozen + trained
    expected = n_backbones * (whole - lm_head) + len(with_head) * lm_head
    assert model.held_parameters() == {"backbones": expected, "slots": n_slots * one_slot, "heads": 2 * (hidden + 1)}
    moved = {id(p): p.numel() for role in ROLES for p in model.trainable_parameters(role).values()}
    trained_whole = trained * (whole - lm_head) + (lm_head if trained else 0)
    assert sum(moved.values()) == trained_whole + n_slots * one_slot + (hidden + 1)
    assert len([b for b in model.backbones if model.backbone(b).frozen]) == frozen


def update(model: HydraModel, batch, optimizer: RoleOptimizer) -> None:
    m = batch.n_completion_tokens
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        old, value = model(batch, (Logprobs(), Values()))
    mask = torch.ones(m, dtype=torch.bool)
    policy = PolicyLoss(
        old_logprob_M=old.logprob, advantage_M=torch.randn(m, generator=generator), mask_M=mask, denom=float(m)
    )
    critic = ValueLoss(old_value_M=value, return_M=torch.randn(m, generator=generator), mask_M=mask, denom=float(m))
    policy_out, value_out = model(batch, (policy, critic))
    (policy_out.loss + value_out.loss).backward()
    optimizer.step()


@every
def test_an_update_moves_actor_and_critic_alone_and_a_saved_model_gives_equal_scores(method, base, tmp_path):
    model, batch = make(method, base), random_batch()
    heads_that_differ(model)
    before, with_kl = model.eval().score(batch), model.score(batch, exact_kl=True)
    hydra = make("hydra_ppo", base).eval()
    heads_that_differ(hydra)
    for name, tensor in vars(hydra.score(batch, exact_kl=True)).items():  # before training every method says the same
        torch.testing.assert_close(getattr(with_kl, name), tensor, rtol=1e-4, atol=1e-5, msg=name)
    frozen = {name: model.backbone(name).base_hash() for name in model.backbones if model.backbone(name).frozen}
    optimizer = RoleOptimizer(model, {"actor": 1e-2, "critic": 1e-2})
    for _ in range(2):
        update(model, batch, optimizer)
    after = model.score(batch)
    assert not torch.equal(before.logprobs_M, after.logprobs_M)
    assert not torch.equal(before.values_M, after.values_M)
    assert torch.equal(before.ref_logprobs_M, after.ref_logprobs_M)
    assert torch.equal(before.rewards_N, after.rewards_N)
    for name, digest in frozen.items():
        assert model.backbone(name).base_hash(refresh=True) == digest
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(tmp_path).eval()
    assert loaded.roles == model.roles
    found = loaded.score(batch)
    for name, tensor in vars(after).items():
        if tensor is not None:
            assert torch.equal(tensor, getattr(found, name)), name
    if method == "full_ppo":  # the root is the actor as a plain causal LM
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)
        ours = dict(model.backbone().base_parameters())
        assert all(torch.equal(p, ours[n]) for n, p in plain.named_parameters())


def test_lora_ppo_without_sharing_makes_the_numbers_that_hydra_makes(base):
    """Sharing a frozen backbone changes where weights lie, not what is computed."""
    batch = random_batch()
    found = {}
    for method in ("lora_ppo", "hydra_ppo"):
        model = make(method, base, seed=5)
        optimizer = RoleOptimizer(model, {"actor": 1e-2, "critic": 1e-2})
        for name in ("actor", "critic"):  # equal starts: the order in which slots draw may differ
            slot = model.role_backbone(name).slot(name)
            slot.pairs.apply(lambda m: m.reset(torch.Generator().manual_seed(9)) if hasattr(m, "reset") else None)
        for _ in range(3):
            update(model, batch, optimizer)
        found[method] = model.eval().score(batch)
    for name in ("logprobs_M", "values_M"):
        ours, theirs = (getattr(scores, name) for scores in found.values())
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


def test_exact_kl_of_two_lm_heads(base):
    model, batch = make("full_ppo", base).eval(), random_batch()
    with torch.no_grad():
        model.backbone().model.lm_head.weight.mul_(1.5)
    scores = model.score(batch, ("actor", "reference"), exact_kl=True, temperature=0.7)
    log_p, log_q = (
        model(batch, (Logprobs(role=role, outputs=("logprob", "entropy"), temperature=0.7),))[0]
        for role in ("actor", "reference")
    )
    torch.testing.assert_close(scores.logprobs_M, log_p.logprob, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.ref_logprobs_M, log_q.logprob, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.entropies_M, log_p.entropy, rtol=1e-4, atol=1e-5)
    rows = batch.predict_rows_M
    with torch.no_grad():
        logits = [
            torch.nn.functional.linear(
                model.backbone(name).run_lanes([(batch, None, None)])[0][rows],
                model.backbone(name).lm_head.weight,
            )
            for name in ("base", "reference")
        ]
    p, q = ((z.double() / 0.7).log_softmax(-1) for z in logits)
    torch.testing.assert_close(scores.kl_M.double(), (p.exp() * (p - q)).sum(-1), rtol=1e-4, atol=1e-5)


def test_slots_and_heads_belong_to_one_backbone(base):
    actor, critic = (RoleSpec(slot="actor", trainable=True), RoleSpec(slot="critic", head="value", trainable=True))
    shared = RoleSpec(backbone="rm", slot="actor", head="value", trainable=True)
    judge = RoleSpec(backbone="rm", head="value")
    for roles, message in (
        ({"actor": actor, "critic": shared}, r"'actor'\]\.slot: expected 'actor' on one backbone, got it on 'base'"),
        (
            {"critic": critic, "judge": judge},
            r"'critic'\]\.head: expected 'value' on one",
        ),
    ):
        with pytest.raises(ValueError, match=rf"roles\[{message}"):
            HydraModel.from_pretrained(base, roles=roles, backbones={"rm": base})


def test_a_backbone_without_lm_head_serves_no_policy(tmp_path):
    config = tiny_llama().config
    config.num_labels = 1
    classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"expected a model with an LM head, got .* saved as LlamaForSequenceClass"):
        HydraModel.from_pretrained(tmp_path, roles=hydra_roles("hydra_ppo"))
    with pytest.raises(ValueError, match=r"roles\['actor'\]: expected a backbone with an LM head, got 'base'"):
        HydraModel.from_pretrained(classifier, roles=hydra_roles("hydra_ppo"))
