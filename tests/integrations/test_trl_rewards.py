"""Rewards beside stock TRL: what functions are called with, and the advantages of what they give."""

import copy
import json

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")

from datasets import Dataset
from transformers import TrainerState
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import parse_response

from rlhf_engine.data.tokenize import load_tokenizer
from rlhf_engine.hydra import PackedBatch
from rlhf_engine.integrations.trl import HydraGRPOConfig, HydraGRPOTrainer
from rlhf_engine.rollout.request import Rollout, RolloutStats
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.scoring.experience import as_replies
from rlhf_engine.scoring.rewards import score_with_functions
from rlhf_engine.training.rl import RlTrainer
from tests.integrations.trl_runs import LORA, QUICK
from tests.training.test_data import PROMPTS, train_config, write_model, write_rows

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
ROWS = [
    {
        "prompt": [{"role": "system", "content": "sun"}, {"role": "user", "content": text}],
        "tools": [{"name": "look", "at": text}],
        "level": i,
    }
    for i, text in enumerate(PROMPTS[:2])
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"))
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def of_trl(kind, config, folder, output, functions, rows=ROWS, **options):
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 4}
    return kind(
        model=str(folder),
        reward_funcs=functions,
        args=config(**{**QUICK, **sizes, "output_dir": str(output), "max_steps": 1, "beta": 0.0, **options}),
        train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(folder),
        peft_config=copy.deepcopy(LORA),
    )


def test_the_call_on_conversations_is_trl_s(folder, tmp_path):
    """From GRPOTrainer, from our trainer behind TRL, and from `train`, where functions may be given as they are."""
    calls, tokenizer = [], load_tokenizer(folder)

    def watching(prompts, completions, **others):
        calls.append({"prompts": prompts, "completions": completions, **others})
        others["log_metric"]("mean", 0.5)
        others["log_extra"]("level", others["level"])
        return [float(len(ids)) for ids in others["completion_ids"]]

    async def waiting(**columns):
        calls.append(columns)
        return [0.0] * len(columns["prompts"])

    functions = [watching, waiting]
    of_trl(GRPOTrainer, GRPOConfig, folder, tmp_path / "stock", functions).train()
    of_trl(HydraGRPOTrainer, HydraGRPOConfig, folder, tmp_path / "ours", functions).train()
    made = train_config(folder, tmp_path / "run", algorithm="grpo", reward_funcs=functions, max_steps=1)
    write_rows(tmp_path / "prompts.jsonl", ROWS)
    trainer = RlTrainer(made)
    del calls[4:]  # the dry run
    trainer.run(lambda step, metrics: None)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["mean"] == 0.5
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["reward_funcs"] == [
        f"{__name__}:{f.__qualname__}" for f in functions
    ]
    stock, *others = [call for call in calls if len(call["prompts"]) == 8][:6]  # fewer: samples for the page
    assert len(others) == 5
    for call in others:
        assert call.keys() == stock.keys()
        in_order = sorted(range(8), key=lambda i, call=call: call["level"][i])
        for name in ("prompts", "tools", "level"):
            assert [call[name][i] for i in in_order] == sorted(stock[name], key=str), name
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in call["completion_ids"]]
        assert call["completions"] == [[{"role": "assistant", "content": text}] for text in texts]
        assert isinstance(call["trainer_state"], TrainerState)
        assert call["trainer_state"].max_steps == stock["trainer_state"].max_steps == 1


@pytest.mark.parametrize("masks", [False, True])
def test_advantages_where_rewards_are_none_are_trl_s(masks, folder, tmp_path):
    """None of one function, of both, of all but one answer to a prompt, of everything; cut answers beside them."""
    first, second = [], []
    functions = [lambda **_: first, lambda **_: second]
    trainers = [
        of_trl(kind, config, folder, tmp_path, functions, mask_truncated_completions=masks)
        for kind, config in ((HydraGRPOTrainer, HydraGRPOConfig), (GRPOTrainer, GRPOConfig))
    ]
    ours, theirs = trainers
    for trainer in trainers:
        trainer.model.train()
    rows = [ROWS[i // 4] for i in range(8)]
    none = None
    for first[:], second[:] in (
        ([1, 2, 3, 4, 5, 6, 7, 8], [none] * 4 + [0, 1, 0, 1]),
        ([1, none, 3, none, 5, none, 7, 8], [none, none, 2, 1, none, none, 0, 0]),
        ([none, 2, none, none, 1, 2, none, 3], [none] * 8),
        ([none] * 8, [none] * 8),
    ):
        inputs = ours._generate_and_score_completions([dict(row) for row in rows])
        answers = [list(ours._answers.completion_tokens(i)) for i in range(8)]
        theirs._generate_single_turn = lambda *_, answers=answers, **__: (answers, None)
        expected = theirs._generate_and_score_completions([dict(row) for row in rows])["advantages"]
        shown = torch.tensor(list(ours._logs["advantages"])[-8:])
        assert torch.allclose(shown, expected, atol=1e-5)
        whole_N = inputs["completion_mask"].any(1)
        assert whole_N.all() != masks
        assert torch.allclose(inputs["of_advantages_M"][:, 0], expected * whole_N, atol=1e-5)


class Reads:
    """A tokenizer with a template for replies; the last two answers do not fit it."""

    response_template, eos_token = "a template", "</s>"

    def parse_response(self, ids, prefix, tools=None):
        if ids == [4]:
            raise ValueError("no message")
        parts = {1: {"content": "hi</s>", "thinking": str(len(prefix))}, 2: {"content": None}}
        return {"role": "assistant", **parts[ids[0]]} if ids[0] in parts else None

    def decode(self, ids, skip_special_tokens):
        return f"text of {ids[0]}"


def test_replies_have_the_parts_that_trl_reads():
    tokenizer, answers, prompt = Reads(), [[1], [2], [3], [4]], ({"role": "user", "content": "?"},)
    rollout = Rollout(
        batch=PackedBatch.from_lists([[5, 6]] * 4, answers), logprobs_M=torch.zeros(4), versions_M=torch.zeros(4),
        finish_reasons=("eos",) * 4, filtered=False, stats=RolloutStats(),
    )  # fmt: skip
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    seen = {}
    function = lambda completions, **_: [0.0 for _ in seen.setdefault("all", completions)]  # noqa: E731
    _, replies = as_replies(tokenizer, rollout, [prompt] * 4, texts)
    score_with_functions([function], [prompt] * 4, replies, answers)
    assert seen["all"] == [[parse_response(tokenizer, ids, prefix=[5, 6])] for ids in answers]
    assert as_replies(tokenizer, rollout, ["?"] * 4, texts) == (["?"] * 4, texts)
