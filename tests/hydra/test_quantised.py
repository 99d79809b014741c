"""A base in 4 or 8 bits through bitsandbytes: off is the quantised model, LoRA and its gradients go on top."""

import pytest
import torch
from rlhf_kernels.runtime import registry
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from rlhf_engine.hydra import (
    HydraModel,
    Logprobs,
    PackedBatch,
    SlotConfig,
    hydra_roles,
    load_pretrained,
    save_pretrained,
)
from rlhf_engine.hydra.loading import load_model
from rlhf_engine.rollout import SamplingConfig, generate
from rlhf_engine.training.rl import RlTrainer
from tests.conftest import VOCAB, randomise, tiny_llama
from tests.hydra.test_dtypes import BATCH, lane_logits
from tests.training.test_data import train_config, write_model, write_reward

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")  # bitsandbytes warns of every cast that it makes

both = pytest.mark.parametrize("bits", ["4bit", "8bit"])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = LlamaConfig(  # bitsandbytes packs 64 weights at a time
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make(base, bits: str, **options) -> HydraModel:
    model = HydraModel.from_pretrained(
        base, roles=hydra_roles(), slots={"actor": SlotConfig(r=4)}, quantization=bits, **options
    )
    randomise(model, "actor", "critic")
    return model.eval()


def plain_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(BATCH.tokens_T.view(3, 8), use_cache=False).logits


@pytest.mark.parametrize("evaluated", ["before", "after"])
def test_a_gradient_stays_where_a_model_was_evaluated(base, evaluated):
    """With bf16 products bitsandbytes turns weights into a layout without a gradient, in eval mode and for good."""
    plain = LlamaForCausalLM.from_pretrained(
        base, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    ).eval()
    layers = [module for module in plain.modules() if type(module).__name__ == "Linear4bit"]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = True  # whatever this CPU has
    if evaluated == "before":
        if not bitsandbytes.functional.has_avx512bf16():
            pytest.skip("needs a CPU with bf16 products, for which bitsandbytes has the other layout")
        plain_logits(plain)
        assert all(layer.weight.quant_state.packing_format_for_cpu for layer in layers)
    model = HydraModel.from_pretrained(plain, roles=hydra_roles(), slots={"actor": SlotConfig(r=4)})
    randomise(model, "actor", "critic")
    if evaluated == "after":
        model.eval().score(BATCH)
    dense = LlamaForCausalLM.from_pretrained(base)
    for name, layer in plain.named_modules():
        if type(layer).__name__ == "Linear4bit":
            weight = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            dense.get_submodule(name).weight.data.copy_(weight)
    expected = HydraModel.from_pretrained(dense, roles=hydra_roles(), slots={"actor": SlotConfig(r=4)})
    randomise(expected, "actor", "critic")
    for name, gradient in gradients(expected).items():
        torch.testing.assert_close(gradients(model)[name], gradient, rtol=1e-3, atol=1e-5)


def gradients(model: HydraModel) -> dict[str, torch.Tensor]:
    """Of the actor's slot, by a sum of log-probs."""
    model.zero_grad()
    (out,) = model.train()(BATCH, (Logprobs(),))
    out.logprob.sum().backward()
    return {name: p.grad.clone() for name, p in model.trainable_parameters("actor").items() if p.grad is not None}


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_off_is_the_quantised_model(base, bits, dtype):
    """Its bits on the reference, and on `auto` what rounding leaves of them."""
    plain = load_model(base, dtype=dtype, device="cpu", quantization=bits).eval()
    plain.set_attn_implementation("sdpa")
    expected = plain_logits(plain)
    model = make(base, bits, dtype=dtype)
    # seen: 5e-7, and 0.02 where activations are rounded, to 8 bits or to bf16
    near = 0.04 if dtype == torch.bfloat16 or bits == "8bit" or rounds_activations(plain) else 1e-5
    assert (lane_logits(model, None) - expected).norm() < near * expected.norm()
    with registry.use_backend("reference"):
        assert torch.equal(lane_logits(model, None), expected)


@torch.no_grad()
def rounds_activations(plain: torch.nn.Module) -> bool:
    """Whether 4-bit products round what they multiply to bf16, as bitsandbytes does on CPUs that multiply such numbers.

    Rounded, inputs that differ in their sixth digit give products that are equal or a step apart.
    """
    linear = plain.get_submodule("model.layers.0.self_attn.q_proj")
    x = torch.randn(24, linear.in_features, generator=torch.Generator().manual_seed(0))
    return bool((linear(x * (1 + 1e-5)) - linear(x)).abs().max() > 1e-3)


@both
def test_a_slot_is_what_peft_makes_of_it(base, bits, tmp_path):
    from peft import PeftModel

    model = make(base, bits)
    save_pretrained(model, tmp_path)
    plain = load_model(base, dtype=torch.float32, device="cpu", quantization=bits)
    theirs = PeftModel.from_pretrained(plain, tmp_path, is_trainable=True).eval()
    coarse = bits == "8bit" or rounds_activations(plain)
    near = 0.02 if bits == "4bit" and coarse else 1e-3
    torch.testing.assert_close(lane_logits(model, "actor"), plain_logits(theirs), rtol=near, atol=near)

    (out,) = model(BATCH, (Logprobs(),))
    out.logprob.sum().backward()
    logprobs = theirs(BATCH.tokens_T.view(3, 8), use_cache=False).logits.flatten(0, 1).log_softmax(-1)
    logprobs[BATCH.predict_rows_M].gather(1, BATCH.targets_M[:, None]).sum().backward()
    modules = dict(theirs.base_model.model.named_modules())
    for path, pair in model.backbone().slot("actor").items():
        for ours, half in ((pair.A, "lora_A"), (pair.B, "lora_B")):
            gradient = getattr(modules[path], half)["default"].weight.grad
            relative = (ours.grad - gradient).norm() / gradient.norm()
            # where products quantise or round the activations too, the last bit of one can move a whole step
            assert relative < (0.05 if coarse else 1e-4), f"{path}.{half} {relative}"


@both
def test_the_base_stays_while_adapters_train(base, bits):
    model = make(base, bits).train()
    before, off = model.backbone().base_hash(), lane_logits(model, None)
    optimizer = torch.optim.AdamW(model.trainable_parameters("actor").values(), lr=1e-2)
    for _ in range(2):
        (out,) = model(BATCH, (Logprobs(),))
        out.logprob.sum().backward()
        optimizer.step()
    assert model.backbone().base_hash(refresh=True) == before
    assert torch.equal(lane_logits(model, None), off)
    weights = [p for n, p in model.backbone().base_parameters() if n.endswith("q_proj.weight")]
    assert all(p.dtype in (torch.uint8, torch.int8) and not p.requires_grad for p in weights)


def test_it_generates_from_the_distribution_that_it_trains_on(base):
    model = make(base, "4bit")
    rollout = generate(model, [[5, 9, 11], [8, 12]], SamplingConfig(max_completion_length=9, eos_token_ids=(2,)))
    again = model.score(rollout.batch, ("actor",)).logprobs_M
    # 4-bit linears round to bfloat16 inside: where sums are taken in another order, a rounding may fall the other way
    torch.testing.assert_close(rollout.logprobs_M, again, rtol=0, atol=5e-3)
    off = model.score(rollout.batch, ("reference",)).ref_logprobs_M
    assert (rollout.logprobs_M - off).abs().max() > 5e-2


def test_a_saved_quantised_model_loads_quantised(base, tmp_path):
    model = make(base, "4bit")
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(tmp_path, quantization="4bit").eval()
    assert torch.equal(lane_logits(loaded, "actor"), lane_logits(model, "actor"))
    with pytest.raises(ValueError, match=r"expected an adapter of this base|expected the backbone with hash"):
        load_pretrained(tmp_path)


def test_a_quantised_base_is_not_trained(base):
    with pytest.raises(ValueError, match=r"quantization: expected 'none' where backbones are trained .*got '4bit'"):
        HydraModel.from_pretrained(
            base,
            roles=hydra_roles("full_ppo"),
            backbones=dict.fromkeys(("reference", "critic", "reward"), base),
            quantization="4bit",
        )
    plain = load_model(base, dtype=torch.float32, device="cpu", quantization="8bit")
    with pytest.raises(ValueError, match="source: expected weights that can be trained for full fine-tuning, got quan"):
        HydraModel.from_pretrained(
            plain,
            roles=hydra_roles("full_ppo"),
            backbones={name: tiny_llama() for name in ("reference", "critic", "reward")},
        )


@pytest.mark.parametrize(("bits", "method"), [("4bit", "hydra_ppo"), ("8bit", "lora_ppo")])
def test_a_run_trains_adapters_on_a_quantised_base(tmp_path, bits, method):
    base = write_model(tmp_path / "m", reward_head=False, hidden_size=64, intermediate_size=128)
    reward = write_reward(tmp_path, "return [float(len(c)) for c in completions]")
    quantised = {"quantization": bits, "method": method, "reward_funcs": [reward], "max_steps": 2}
    trainer = RlTrainer(
        train_config(base, tmp_path / "run", **quantised, gradient_checkpointing=True, lora_dropout=0.1)
    )
    assert all(backbone.quantized for backbone in trainer.model.backbones.values())
    before = {name: p.clone() for name, p in trainer.model.backbone().base_parameters()}
    adapters = [p.clone() for p in trainer.model.backbone().slot("actor").parameters()]
    trainer.run()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.backbone().base_parameters())
    moved = zip(trainer.model.backbone().slot("actor").parameters(), adapters, strict=True)
    assert all(not torch.equal(p, old) for p, old in moved)
    again = load_pretrained(tmp_path / "run" / "final", quantization=bits)
    batch = PackedBatch.from_lists([[5, 6, 7], [8, 9]], [[4, 5], [6, 7, 8]])
    expected = trainer.model.eval().score(batch, ("actor", "reference"))
    found = again.eval().score(batch, ("actor", "reference"))
    assert torch.equal(found.logprobs_M, expected.logprobs_M)
    assert torch.equal(found.ref_logprobs_M, expected.ref_logprobs_M)


def test_trainers_behind_trl_take_a_quantization_config(tmp_path):
    pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")
    from transformers import BitsAndBytesConfig

    from rlhf_engine.integrations import trl
    from tests.integrations.trl_runs import QUICK, make_trainer

    folder = write_model(tmp_path / "model", reward_head=False, hidden_size=64, intermediate_size=128)
    config = trl.HydraPPOConfig(str(tmp_path / "out"), **{**QUICK, "max_steps": 2})
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    trainer = make_trainer(trl.HydraPPOTrainer, config, folder, quantization_config=quantised)
    trainer.train()
    model, hydra = trainer.model.eval(), trainer.hydra.eval()
    assert any(type(module).__name__ == "Linear4bit" for module in model.modules())
    prompt, answer = [3, 4, 5, 6], [7, 8, 9]
    with torch.no_grad():
        found = hydra.score(PackedBatch.from_lists([prompt], [answer]), ("actor", "reference"))
        expected = torch.log_softmax(model(torch.tensor([prompt + answer])).logits[0, 3:6].float(), -1)
    expected = expected.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    assert float((found.logprobs_M - expected).abs().max()) < 2e-3  # TRL keeps these adapters in bf16
    assert float((found.logprobs_M - found.ref_logprobs_M).abs().max()) > 1e-2
