"""Base and adapters in fp32 or bf16, and autocast: PEFT's numbers within the dtype, finite gradients, equal rows."""

import pytest
import torch

from rlhf_engine.hydra import HydraModel, Logprobs, PackedBatch, RoleSpec, SlotConfig, load_pretrained, save_pretrained
from rlhf_engine.hydra.gate import head_logits
from tests.conftest import random_batch, randomise
from tests.hydra.architectures import plain_model

ROLES = {"actor": RoleSpec(slot="actor", trainable=True), "reference": RoleSpec()}
BATCH = random_batch(((3, 5), (4, 4), (2, 6)))
FAMILIES = ("llama", "gemma2", "gpt2", "qwen3_moe")


def make(name: str, base: torch.dtype, adapters: torch.dtype) -> HydraModel:
    slots = {"actor": SlotConfig(r=4)}
    model = HydraModel.from_pretrained(plain_model(name).to(base), roles=ROLES, slots=slots, adapter_dtype=adapters)
    randomise(model, "actor")
    return model.eval()


def lane_logits(model: HydraModel, slot: str | None) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.backbone().run_lanes([(BATCH, None, slot)])[0]
    return head_logits(hidden, model.backbone().lm_head).unflatten(0, (3, 8))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative error of the typical row: a mixture's routing may flip in single rows for rounding alone."""
    a, b = a.flatten(0, -2).double(), b.flatten(0, -2).double()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median())


def truth_dtype(name: str) -> torch.dtype:
    """torch's grouped products of experts know no float64."""
    return torch.float32 if name == "qwen3_moe" else torch.float64


def peft_logits(name: str, folder, *, base: torch.dtype, run: torch.dtype, autocast: bool = False, **options):
    """Logits [3, 8, V] of plain PEFT on a base rounded to `base` and computed in `run`."""
    from peft import PeftModel

    plain = plain_model(name).to(base).to(run)
    theirs = PeftModel.from_pretrained(plain, folder, **options).eval()
    if run == torch.float64:
        theirs = theirs.double()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return theirs(BATCH.tokens_T.view(3, 8), use_cache=False).logits


@pytest.mark.parametrize(("name", "adapters"), zip(FAMILIES, [torch.float32, torch.bfloat16] * 2, strict=True))
def test_a_bf16_base_is_as_close_to_the_truth_as_peft_is(name, adapters, tmp_path):
    model = make(name, torch.bfloat16, adapters)
    assert {p.dtype for p in model.backbone().slot("actor").parameters()} == {adapters}
    save_pretrained(model, tmp_path)
    truth = peft_logits(name, tmp_path, base=torch.bfloat16, run=truth_dtype(name))
    wide = adapters == torch.float32
    theirs = peft_logits(name, tmp_path, base=torch.bfloat16, run=torch.bfloat16, autocast_adapter_dtype=wide)
    assert distance(lane_logits(model, "actor"), truth) <= 1.5 * distance(theirs, truth) + 1e-3


@pytest.mark.parametrize("name", FAMILIES[:2])
def test_autocast_is_as_close_to_the_truth_as_peft_under_autocast(name, tmp_path):
    model = make(name, torch.float32, torch.float32)
    save_pretrained(model, tmp_path)
    truth = peft_logits(name, tmp_path, base=torch.float32, run=truth_dtype(name))
    theirs = peft_logits(name, tmp_path, base=torch.float32, run=torch.float32, autocast=True)
    plain = lane_logits(model, "actor")
    with torch.autocast("cpu", torch.bfloat16):
        ours = lane_logits(model, "actor")
    assert distance(plain, truth) < 1e-5
    assert 1e-5 < distance(ours, truth) <= 1.5 * distance(theirs, truth) + 1e-3


def test_every_combination_trains():
    """Gradients are finite, in the adapters' dtype, and point where those of float32 point."""
    for name, base, adapters, autocast in [
        ("llama", torch.float32, torch.float32, True),
        ("gemma2", torch.float32, torch.bfloat16, False),
        ("gpt2", torch.bfloat16, torch.float32, True),
        ("qwen3_moe", torch.bfloat16, torch.bfloat16, False),
        ("llama", torch.bfloat16, torch.bfloat16, True),
        ("qwen3_moe", torch.bfloat16, torch.float32, True),
    ]:
        directions = []
        for combination in ((base, adapters), (torch.float32, torch.float32)):
            model = make(name, *combination).train()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out, reference = model(BATCH, (Logprobs(), Logprobs(role="reference")))
            assert out.logprob.dtype == reference.logprob.dtype == torch.float32
            out.logprob.sum().backward()
            gradients = [p.grad for p in model.backbone().slot("actor").parameters()]
            assert {g.dtype for g in gradients} == {combination[1]}
            directions.append(torch.cat([g.flatten().double() for g in gradients]))
            assert directions[-1].isfinite().all()
        assert torch.cosine_similarity(*directions, dim=0) > 0.9


@pytest.mark.parametrize("lengths", [((3, 5), (3, 6), (4, 5)), ((3, 5), (9, 12), (4, 5))], ids=["padded", "groups"])
def test_sequences_of_other_lengths_under_autocast(lengths):
    """Each as alone, within what rounding to bfloat16 allows, whichever way attention groups them."""
    model = make("llama", torch.float32, torch.float32)
    batch = random_batch(lengths)
    with torch.autocast("cpu", torch.bfloat16):
        together = model.score(batch, ["actor"]).logprobs_M
        alone = [model.score(random_batch_part(batch, i), ["actor"]).logprobs_M for i in range(len(lengths))]
    assert torch.allclose(together, torch.cat(alone), atol=0.05)


def random_batch_part(batch: PackedBatch, i: int) -> PackedBatch:
    return PackedBatch.from_lists([batch.prompt_tokens(i)], [batch.completion_tokens(i)])


def test_adapters_keep_their_dtype_on_disk(tmp_path):
    model = make("llama", torch.bfloat16, torch.bfloat16)
    save_pretrained(model, tmp_path / "saved")
    plain_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    loaded = load_pretrained(tmp_path / "saved", base=tmp_path / "base", dtype=torch.bfloat16).eval()
    for ours, theirs in zip(loaded.backbone().slots.parameters(), model.backbone().slots.parameters(), strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, theirs)


def test_a_padded_batch_is_packed():
    ragged = random_batch(((3, 5), (1, 4), (2, 9)))
    width = max(ragged.lengths)
    for side in ("left", "right"):
        tokens, mask = torch.zeros(3, width, dtype=torch.int64), torch.zeros(3, width, dtype=torch.bool)
        for i, row in enumerate(ragged.tokens_T.split(ragged.lengths)):
            place = slice(width - len(row), None) if side == "left" else slice(0, len(row))
            tokens[i, place], mask[i, place] = row, True
        packed = PackedBatch.from_padded(tokens, mask.long(), ragged.prompt_lens)
        assert torch.equal(packed.tokens_T, ragged.tokens_T), side
        assert (packed.cu_seqlens, packed.prompt_lens) == (ragged.cu_seqlens, ragged.prompt_lens), side
        assert packed.sample_ids == (0, 1, 2), side
    for mask, prompt_lens, message in (
        ([[1, 1, 0]], [1, 1], r"prompt_lens: expected 1 like the rows of input_ids, got 2"),
        ([[1, 0, 1]], [1], r"attention_mask\[0\]: expected real tokens without a gap"),
        ([[0, 0, 0]], [1], r"prompt_lens\[0\]: expected 1 to 0, the real tokens of its row, got 1"),
        ([[1, 1, 0]], [3], r"prompt_lens\[0\]: expected 1 to 2, the real tokens of its row, got 3"),
        ([[1, 1, 0, 0]], [1], r"attention_mask: expected the shape \[N, L\] of input_ids, got \(1, 4\) and \(1, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedBatch.from_padded(torch.full((1, 3), 5), torch.tensor(mask), prompt_lens)
