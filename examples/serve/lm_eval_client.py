"""lm-eval against `rlhf-engine serve`: log-likelihoods and generated answers of a task in a folder, nothing downloaded.

pip install "lm-eval[api]" transformers && python examples/serve/lm_eval_client.py
"""

import json
import os
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
import lm_eval
from lm_eval.tasks import TaskManager
from tiny_server import serving

ROWS = [{"question": "two plus three is", "choices": ["one", "5", "four"], "answer": 1}] * 8
CHOICES = """
task: sum_choices
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
WRITTEN = """
task: sum_written
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["<eos>", "seven"], max_gen_toks: 4, do_sample: false}
filter_list: [{name: words, filter: [{function: remove_whitespace}, {function: take_first}]}]
metric_list: [{metric: exact_match}]
"""

with serving() as (url, folder), tempfile.TemporaryDirectory() as tasks:
    rows = Path(tasks) / "rows.jsonl"
    rows.write_text("".join(json.dumps({**row, "number": i}) + "\n" for i, row in enumerate(ROWS)))
    for name, text in (("choices", CHOICES), ("written", WRITTEN)):
        (Path(tasks) / f"{name}.yaml").write_text(text.replace("ROWS", str(rows)))
    manager = TaskManager(include_path=tasks, include_defaults=False)
    common = f"model=tiny,tokenizer={folder},num_concurrent=4,max_retries=1"
    for model, path, names in (
        ("local-completions", "completions", ["sum_choices", "sum_written"]),
        ("local-chat-completions", "chat/completions", ["sum_written"]),
    ):
        found = lm_eval.simple_evaluate(
            model=model, model_args=f"{common},base_url={url}/v1/{path}", tasks=names, task_manager=manager,
            apply_chat_template=path != "completions", bootstrap_iters=0, log_samples=False,
        )  # fmt: skip
        scores = {f"{task}/{m}": v for task, result in found["results"].items() for m, v in result.items() if "," in m}
        print(model, scores)
        assert all(value == 1.0 for m, value in scores.items() if "stderr" not in m), "the model knows this sum"
