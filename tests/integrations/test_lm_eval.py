"""lm-evaluation-harness on our models, beside the harness's own class for transformers models."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lm-eval")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_engine.integrations.lm_eval import HydraLM
from tests.evaluation.test_evaluate import write_adapter
from tests.training.test_data import PROMPTS, write_model

TASKS = {
    "choose": {
        "task": "choose", "output_type": "multiple_choice", "doc_to_text": "{{prompt}}",
        "doc_to_choice": ["sings the sun", "sea sea", "red cat"], "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    },
    "say": {
        "task": "say", "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["sun"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm_eval")
    write_model(folder / "base")
    write_adapter(folder / "base", folder / "adapter", seed=3)
    rows = [{"prompt": p, "label": i % 3, "answer": "the"} for i, p in enumerate(PROMPTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
        (tasks / f"{name}.yaml").write_text(json.dumps({**task, **data, "test_split": "test"}))
    return folder


def ours(place, adapter):
    return HydraLM.from_pretrained(place / "base", adapter=place / "adapter" if adapter else None)


def theirs(place, adapter):
    model = AutoModelForCausalLM.from_pretrained(place / "base").eval()
    if adapter:
        model = PeftModel.from_pretrained(model, place / "adapter").eval()
    return HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(place / "base"), max_length=64, batch_size=4)


def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


@pytest.mark.parametrize("adapter", [False, True])
def test_requests_have_the_answers_of_the_harness_own_class(place, adapter):
    a, b = ours(place, adapter), theirs(place, adapter)
    pairs = [(p, f" {word}") for p in PROMPTS for word in ("sun", "red cat", "the sea")] + [("", "the dog runs")]
    for mine, other in zip(
        a.loglikelihood(instances("loglikelihood", pairs)),
        b.loglikelihood(instances("loglikelihood", pairs)),
        strict=True,
    ):
        assert mine[0] == pytest.approx(other[0], abs=1e-4)
        assert mine[1] == other[1]
    texts = [(" ".join(PROMPTS),), ("the sun",)]
    rolled = a.loglikelihood_rolling(instances("loglikelihood_rolling", texts))
    assert rolled == pytest.approx(b.loglikelihood_rolling(instances("loglikelihood_rolling", texts)), abs=1e-3)
    asked = [(p, {"until": [stop], "max_gen_toks": most}) for p in PROMPTS for stop, most in (("sea", 9), ("zzz", 5))]
    assert a.generate_until(instances("generate_until", asked)) == b.generate_until(instances("generate_until", asked))


def test_a_text_longer_than_the_context_is_scored_in_windows(place):
    lm = ours(place, False)
    words = " ".join(PROMPTS * 4)
    ids = lm.tok_encode(words)
    assert len(ids) > 2 * lm.max_length
    (total,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(words,)]))
    model = AutoModelForCausalLM.from_pretrained(place / "base").double().eval()
    window, expected, start = lm.max_length - 1, 0.0, 0
    while start < len(ids):
        part = ids[start : start + window]
        if start == 0 or len(part) == window:
            inputs = [lm.prefix_token_id if start == 0 else ids[start - 1], *part]
        else:  # the last window keeps its full context
            inputs = ids[-window - 1 :]
        with torch.no_grad():
            logp = model(torch.tensor([inputs])).logits[0].log_softmax(-1)
        expected += sum(float(logp[len(inputs) - len(part) - 1 + j, token]) for j, token in enumerate(part))
        start += window
    assert total == pytest.approx(expected, rel=1e-5)


def test_two_tasks_of_the_harness(place):
    manager = TaskManager(include_path=str(place / "tasks"), include_defaults=False)

    def results(lm):
        found = lm_eval.simple_evaluate(model=lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
        return found["results"]["choose"]["acc,none"], found["results"]["say"]["exact_match,none"]

    assert results(ours(place, True)) == results(theirs(place, True))
    assert 0 < results(ours(place, True))[0] < 1


def test_what_is_not_served_is_refused(place):
    lm = ours(place, False)
    with pytest.raises(ValueError, match="max_gen_toks: expected fewer than the model's context of 64 tokens, got 64"):
        lm.generate_until(instances("generate_until", [("the", {"max_gen_toks": 64})]))
    with pytest.raises(ValueError, match=r"generation_kwargs: expected .*got \{'num_beams': 2\}"):
        lm.generate_until(instances("generate_until", [("the", {"num_beams": 2})]))
    with pytest.raises(ValueError, match="role"):
        HydraLM(lm.model, lm.tokenizer, role="none")


def test_sampling_draws_by_the_tasks_options(place):
    lm = ours(place, False)
    options = {"max_gen_toks": 8, "do_sample": True, "temperature": 1.5, "until": []}
    drawn = lm.generate_until(instances("generate_until", [(PROMPTS[0], options)] * 8))
    assert len(set(drawn)) > 1
    greedy = lm.generate_until(instances("generate_until", [(PROMPTS[0], {**options, "temperature": 0})] * 3))
    assert len(set(greedy)) == 1
