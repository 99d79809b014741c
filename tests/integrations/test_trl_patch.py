"""`patch`: stock TRL trainers take every log-prob from our kernel, with the losses that they had, and lose it again."""

import sys
import types

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")

import trl
from datasets import Dataset
from rlhf_kernels.runtime.testing import assert_ok, tier1
from transformers import AutoModelForCausalLM
from trl.trainer import utils

from rlhf_engine.data.tokenize import load_tokenizer
from rlhf_engine.errors import ConfigError
from rlhf_engine.integrations.trl import HydraPPOTrainer, PerlRewardTrainer, patch
from tests.training.test_data import PROMPTS, write_model

PAIRS = [{"prompt": p, "chosen": f" {p} sings the sun", "rejected": " sea sea"} for p in PROMPTS]
THUMBS = [
    {"prompt": p, "completion": " sings" if i % 2 else " sea sea", "label": bool(i % 2)} for i, p in enumerate(PROMPTS)
]
TEXTS = [{"prompt": p, "completion": f" {p} sings the sun"} for p in PROMPTS]


def lengths(prompts, completions, **columns):
    return [float(len(set(text.split()))) for text in completions]


KINDS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, TEXTS, {}),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, PAIRS, {}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, THUMBS, {}),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, PAIRS, {"num_generations": 2, "max_completion_length": 8, "beta": 0.04}),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig, PAIRS, {"num_generations": 2, "max_completion_length": 8, "beta": 0.04}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), reward_head=False)


def train(kind: str, folder, output) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of three steps of a stock trainer, and the weights after them."""
    trainer_class, config_class, rows, options = KINDS[kind]
    config = config_class(
        output_dir=str(output), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
        disable_tqdm=True, seed=0, **options,
    )  # fmt: skip
    extra = {"reward_funcs": lengths} if kind in ("grpo", "rloo") else {}
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = trainer_class(
        model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=load_tokenizer(folder),
        **extra,
    )  # fmt: skip
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row], dict(trainer.model.named_parameters())


@pytest.mark.parametrize(
    "kind", ["sft", "dpo", "grpo", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("kto", "rloo"))]
)
def test_losses_are_trl_s_and_every_call_is_ours(kind, folder, tmp_path, monkeypatch):
    calls = []
    original = utils._ChunkedLogProbFunction

    class Counted:
        forward = original.forward

        @staticmethod
        def apply(*arguments):
            calls.append(1)
            return original.apply(*arguments)

    with monkeypatch.context() as counting:
        counting.setattr(utils, "_ChunkedLogProbFunction", Counted)
        expected, weights = train(kind, folder, tmp_path / "theirs")
    with patch() as patched:
        found, ours = train(kind, folder, tmp_path / "ours")
    assert patched.calls == len(calls) > 0
    assert utils._ChunkedLogProbFunction is original
    assert len(found) == len(expected) == 3
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "kl", "rewards/margins"):
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), (step, name)
    for name, weight in weights.items():
        assert float((ours[name] - weight).abs().max()) < 2e-4, name  # Adam's first steps are a sign's size


def inputs(n=13, hidden=8, vocab=50, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, hidden, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_()
    b = torch.randn(vocab, generator=generator).to(dtype).requires_grad_()
    return x, w, b, torch.randint(0, vocab, (n,), generator=generator)


ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.parametrize(
    "options",
    [(1.0, None, 1.0), (0.7, None, 0.5), (0.7, 5.0, -0.5), (1.0, None, 0.0), (1.3, 0.0, 2.0), (1.3, -5.0, 2.0)],
    ids=str,
)
def test_each_result_and_gradient_is_trl_s(options):
    temperature, softcap, scale = options

    def go(function, dtype=torch.float32):
        x, w, b, targets = inputs(dtype=dtype)
        out = function.apply(x, w, b, targets, temperature, 16, softcap, scale, ALL)
        (out[0].sin().sum() + (out[1] * out[1]).sum()).backward()
        return [*(t.detach() for t in out), x.grad, w.grad, b.grad]

    theirs = go(utils._ChunkedLogProbFunction)
    with patch() as patched:
        mine = go(utils._ChunkedLogProbFunction)
        exact = go(utils._ChunkedLogProbFunction, torch.float64)
    assert patched.calls == 2
    assert mine[4].dtype == theirs[4].dtype == torch.bool
    assert torch.equal(mine[4], theirs[4])
    for name, a, b, c in zip((*ALL, "hidden", "weight", "bias"), mine, exact, theirs, strict=True):
        if name != "is_top1":
            assert a.dtype == c.dtype
            assert_ok(tier1(a, b, c), name)


def test_what_is_not_asked_for_is_none_and_what_is_logged_has_no_gradient():
    x, w, b, targets = inputs()
    with patch():
        out = utils._ChunkedLogProbFunction.apply(x, w, None, targets, 1.0, 16, None, 1.0, ("log_probs", "mean_logits"))
        assert [t is None for t in out] == [False, True, True, False, True]
        assert out[0].requires_grad
        assert not out[3].requires_grad
        ones = utils._ChunkedLogProbFunction.apply(x, w, b, targets, 1.0, 16)
        assert all(t is not None for t in ones)


def test_under_autocast_products_are_in_its_dtype():
    x, w, b, targets = inputs(hidden=64)
    arguments = (x, w, b, targets, 1.0, 16, None, 1.0, ("log_probs",))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = utils._ChunkedLogProbFunction.apply(*arguments)[0]
        with patch():
            mine = utils._ChunkedLogProbFunction.apply(*arguments)[0]
    exact = torch.log_softmax((x @ w.T + b).double(), -1).gather(-1, targets[:, None])[:, 0]
    assert mine.dtype == torch.float32
    assert float((mine - exact).abs().max()) <= 1.5 * float((theirs - exact).abs().max())
    mine.sum().backward()
    assert x.grad.dtype == torch.float32


def test_undo_and_order():
    original = utils._ChunkedLogProbFunction
    first = patch()
    second = patch(backend="reference")
    assert utils._ChunkedLogProbFunction is second
    first.undo()  # which lies below another one
    first.undo()
    assert utils._ChunkedLogProbFunction is second
    second.undo()
    assert utils._ChunkedLogProbFunction is original
    with patch():
        patch()  # for good, by somebody else
    assert isinstance(utils._ChunkedLogProbFunction, type(first))
    utils._ChunkedLogProbFunction.undo()
    assert utils._ChunkedLogProbFunction is original
    third = patch()
    utils._ChunkedLogProbFunction = original
    with pytest.raises(RuntimeError, match=r"undo: expected _ChunkedLogProbFunction of trl\.trainer\.utils as this"):
        third.undo()
    with pytest.raises(ValueError, match="inside"), patch():
        raise ValueError("inside")
    assert utils._ChunkedLogProbFunction is original


def test_a_head_in_shares_is_refused(monkeypatch):
    monkeypatch.setattr("rlhf_engine.integrations.trl.patching.is_deepspeed_zero3_enabled", lambda: True)
    said = r"deepspeed: expected a stage below 3 with patch\(\), got 3"
    with patch() as patched, pytest.raises(ConfigError, match=said):
        patched.apply(torch.randn(2, 4), torch.randn(8, 4), None, torch.tensor([1, 2]), 1.0, 16)


def test_unsloth_exchanges_the_same_functions(monkeypatch):
    monkeypatch.setitem(sys.modules, "unsloth", types.ModuleType("unsloth"))
    for exchange in (patch, lambda: HydraPPOTrainer(model="base"), lambda: PerlRewardTrainer(model="base")):
        with pytest.raises(ConfigError, match=r"unsloth: expected it not imported, because .*, got it imported"):
            exchange()


def test_a_trl_that_is_not_known(monkeypatch):
    class Other:
        @staticmethod
        def forward(ctx, hidden, weight, targets):
            return hidden

    for owner, name, value, message in (
        (trl, "__version__", "1.18.0", r"trl: expected 1\.15 <= version < 1\.18, got 1\.18\.0"),
        (trl, "__version__", "1.14.2", r"got 1\.14\.2"),
        (utils, "_ChunkedLogProbFunction", None, r"expected _ChunkedLogProbFunction in trl\.trainer\.utils"),
        (utils, "_ChunkedLogProbFunction", Other, r"expected .*apply\(hidden, weight, bias, .* got \(hidden, weight,"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            with pytest.raises(ConfigError, match=message):
                patch()
    with pytest.raises(ValueError, match="backend: expected one of"):
        patch(backend="gpu")
