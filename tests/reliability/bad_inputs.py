"""One table of bad inputs: rows of a surface, what is given there, and what the one line of the answer has to name.

`option_rows` makes rows of every option of every command from the options' own types and bounds, as flags and as values
of a file. The other tables are written by hand. `{name}` in them is a file or a folder of the test.
"""

from __future__ import annotations

import codecs
import dataclasses
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import rlhf_kernels as kernels
import torch

from rlhf_engine.commands.main import _COMMANDS
from rlhf_engine.hydra import HydraModel, PackedBatch, RoleSpec, SlotConfig, hydra_roles
from rlhf_engine.policy.pool import Policies
from rlhf_engine.policy.thread import PolicyThread
from rlhf_engine.rollout import EngineOptions, Request, RolloutEngine, SamplingConfig


class Bad(NamedTuple):
    """A bad input."""

    surface: str  # "flags": words of a command line; "yaml": command, options and the text of a config file
    given: Any
    named: tuple[str, ...]  # texts that the one line holds


COMPLETE = {  # flags by which nothing that a command requires is missing
    "demo": [],
    "init": ["tutorial", "{out}"],
    "sft": ["--lora", "--model_name_or_path", "{model}", "--dataset_name", "{pairs}", "--output_dir", "{out}"],
    "reward": ["--lora", "--model_name_or_path", "{model}", "--dataset_name", "{pairs}", "--output_dir", "{out}"],
    "train": ["--model_name_or_path", "{model}", "--dataset_name", "{prompts}", "--output_dir", "{out}"],
    "sweep": ["{grid}", "--output_dir", "{out}"],
    "generate": ["--model_name_or_path", "{model}", "--prompt", "red"],
    "serve": ["{model}"],
    "evaluate": ["--model_name_or_path", "{model}", "--dataset_name", "{pairs}", "--output_dir", "{out}"],
    "export": ["{model}", "--to", "merged", "--output_dir", "{none}"],
    "report": ["{run}"],
    "plan": ["--model", "{model}"],
    "doctor": [],
    "bench": ["rollout"],
}


def _kinds(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Union or "|" in str(hint) else (hint,)


def _wrong(field: dataclasses.Field[Any], hint: Any) -> Iterator[tuple[str | None, Any]]:
    """Values of a wrong type or out of bounds: as the text of a flag, and as a file has them; `...` where none."""
    kinds = [typing.get_origin(kind) or kind for kind in _kinds(hint)]
    bounds = field.metadata["bounds"]
    texts, numbers = str in kinds, {int, float} & {*kinds}
    if numbers and not texts:
        yield "much", "much"
        yield "1_0", True
        yield "nan", float("nan")
        yield "1e999", [1]
        if float not in kinds:
            yield "1.5", 1.5
            yield str(2**70), 2**70
        for bound, limit in bounds.items():
            below = bound in ("ge", "gt")
            beside = limit if bound in ("gt", "lt") else limit - 1 if below else limit + 1
            yield str(beside), beside
    elif Literal in kinds:
        yield "no_such_choice", "no_such_choice"
        yield "", 7
        yield None, ["a"]
    elif bool in kinds and not texts:
        yield "perhaps", "perhaps"
        yield "2", 2
        if type(None) not in kinds:
            yield "", None
    elif dict in kinds:
        yield "{{", "x"
        yield "[1]", [1]
        yield "1", {1: 2}
    elif list in kinds and not texts:
        yield None, [{}]
        yield None, {"a": 1}
    elif texts:
        yield None, {}
        if bool not in kinds:
            yield None, True
        if field.metadata["form"]:
            yield "!?", "!?"
        elif not field.metadata["is_text"]:
            yield "", ""
            yield "a" * 5000, "a\0b"


def option_rows() -> Iterator[Bad]:
    """Each option of each command with what it cannot be."""
    for command, (cls, _) in _COMMANDS.items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name == "reward_funcs":
                continue
            for text, value in _wrong(field, hints[field.name]):
                if text is not None:
                    yield Bad("flags", (command, f"--{field.name}={text}"), (f"{field.name}:", "expected", "got"))
                yield Bad("yaml", (command, field.name, value), (f"{field.name}:", "expected", "got"))
            yield Bad("flags", (command, f"--{field.name}zz=1"), (f"unknown option --{field.name}zz",))


def rows_of(table: str) -> Iterator[tuple[bytes, tuple[str, ...]]]:
    """Rows of a text, `given => text | text` between double semicolons or line ends: what is given, texts to name."""
    for row in table.strip("\n").replace("\n", " ;; ").split(" ;; "):
        given, named = row.rsplit(" => ", 1)
        yield codecs.escape_decode(given.encode())[0], tuple(named.split(" | "))


FLAGS = r"""
sft --lora_dropout 1.0 => lora_dropout: ;; sft --full => mode: given twice ;; sft --beta 1 => unknown option --beta
sft loose => output_dir: expected | loose ;; reward --truncation both => truncation:
reward --group_column a => group_column: ;; reward --metric_for_best_model auc => metric_for_best_model:
generate --resume => resume: ;; generate --min_completion_length 99 => min_completion_length:
generate --prompt_file a => prompt_file: ;; generate --greedy --num_generations 2 => num_generations:
generate --reward_model_path a => reward_model_path: ;; generate --best_of 2 --greedy => greedy:
serve --host 0.0.0.0 => api_key_file: ;; serve --adapters a=b a=c => adapters: ;; serve --adapters a => adapters:
evaluate --judge reward => judge: ;; evaluate --judge http://a => judge_model:
evaluate --judge_model a => judge_model: ;; evaluate --reward_model_path a --reward_funcs math => reward_model_path:
plan --gpu big => gpu: ;; plan --gpu 0GB => gpu: ;; plan --batch 7 --num_generations 2 => generation_batch_size:
plan --processes 4 --batch 2 => generation_batch_size: ;; plan --processes 2 --method full_ppo => method:
export --private => private: ;; init --model_name_or_path a => model_name_or_path: ;; bench --rounds 4 => rounds:
demo --seed -1 => seed: expected ;; doctor --json maybe => json: expected ;; train --beta 0 --kl_target 3 => beta:
train --algorithm grpo --gamma 0.5 => gamma: ;; train --cliprange 1 2 3 => cliprange:
train --generation_batch_size 7 --num_mini_batches 2 => generation_batch_size: ;; train --async sideways => async_mode:
train --algorithm reinforce --beta 2 => beta: ;; train --algorithm online_dpo --beta 0 => beta:
train --algorithm grpo --loss_type ipo => loss_type: ;; train --algorithm cispo --cliprange 0.1 0.2 => cliprange:
train --delta 1.1 => delta: ;; train --advantage_level turn => advantage_level:
train --warmup_steps 200 => warmup_steps: ;; train --reward_weights 1 2 => reward_weights:
train --missing_eos_penalty -1 => missing_eos_penalty: ;; train --missing_eos_penalty =nan => missing_eos_penalty:
train --max_turns 3 => max_turns: ;; train --truncation keep_start => truncation:
train --eval_steps 3 => eval_steps: ;; train --kv_cache_memory much => kv_cache_memory:
train --eval_dataset_name 1.5 => eval_dataset_name: ;; train --max_bad_rows 2.5 => max_bad_rows:
train --report_to paper => report_to: ;; train --max_staleness 2 => max_staleness:
train --off_policy_correction behaviour => off_policy_correction:
train --method dynamic_lora_ppo --reward_funcs math => method:
train --method full_ppo --quantization 4bit => quantization: ;; train --vllm_adapter_dir a => vllm_adapter_dir:
train --vllm_server_base_url http://a,,http://b => vllm_server_base_url:
train --optim adafactor --adam_epsilon 0.1 => adam_epsilon:
train --algorithm grpo --critic_learning_rate 0.1 => critic_learning_rate: ;; train --push_to_hub a/b/c => push_to_hub:
train --method dynamic_lora_ppo --critic_init actor => critic_init: ;; train --dry_run --async replay => dry_run:
train --max_steps => max_steps: needs a value ;; train --max_steps 3 --max_steps 4 => max_steps: given twice
train --no_dry_run 1 => no_dry_run: expected no value ;; train --config => config: needs a value
train --config {none} => config: expected | {none} ;; train --config {folder} => config: expected | {folder}
train --config a b => config: expected ;; train -- => unknown option ;; train --=3 => unknown option
train -x => output_dir: expected | -x
"""  # command and its options; those that the complete command has are replaced
YAML = r"""
beta: 0.1\nbeta: 0.2 => each key once | 'beta' | lines 1 and 2 ;; beta: [ => is not valid YAML
- a\n- b => expected `name: value` lines, got a list ;; just text => got a str ;; 7 => got a int
a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nmax_steps: *c => unknown key in | a
max_steps: *nobody => is not valid YAML | nobody ;; seed: &a [*a] => seed: expected an integer
max_steps: !!python/object/apply:os.system [ls] => is not valid YAML | python
max_steps: !!python/name:os.system => is not valid YAML | python ;; seed: !!binary aGk= => seed: expected an integer
seed: 2001-01-01 => seed: expected an integer ;; seed: 1e3 => seed: expected an integer
beta: .nan => beta: expected | nan ;; beta: .inf => beta: expected | inf
beta: much => beta: expected a number, got 'much' ;; beta: '1_0' => beta: expected a number
max_steps: 9999999999999999999999 => max_steps: expected ;; max_steps: 99999999999 => max_steps: expected an integer <=
? [a, b]\n: 1 => is not valid YAML ;; 1: 2 => unknown key in | 1 ;; ~: 2 => unknown key in | None
<<: 3 => is not valid YAML ;; bata: 1 => unknown key in | did you mean beta?
async-mode: off\nasync: off => async_mode: given twice ;; dry_run: 'yes' => dry_run: expected true or false, got 'yes'
dry_run: 1 => dry_run: expected true or false, got 1 ;; grpo: 3 => section 'grpo' | got 3
grpo: {algorithm: ppo} => expected algorithm outside of section ;; grpo: {bata: 1} => section 'grpo' | beta
chat_template_kwargs: [1] => chat_template_kwargs: expected a JSON object
chat_template_kwargs: {1: 2} => chat_template_kwargs: expected
reward_funcs: [] => reward_funcs: expected something that is not empty ;; reward_funcs: [7] => reward_funcs: expected
reward_funcs: [''] => reward_funcs: expected something that is not empty ;; device: tpu => device: expected auto, cpu
system_prompt: [a] => system_prompt: expected a string ;; config: other.yaml => unknown key | config
help: true => unknown key ;; beta: 0.1\n\x09gamma: 1 => is not valid YAML ;; beta: 1\n---\nbeta: 2 => is not valid YAML
%YAML 9.9\n---\nbeta: 1 => is not valid YAML ;; beta: \xff => is not valid YAML | utf-8
\x00\x01 => is not valid YAML ;; \xff\xfeb\x00 => is not valid YAML ;; beta: \x07 => is not valid YAML
lr: 1e-3 => unknown key in | learning_rate ;; output_dir: '' => output_dir: expected something
output_dir: "a\\0b" => output_dir: expected ;; learning_rate: 1e400 => learning_rate: expected
cliprange: [0.1, x] => cliprange: expected ;; cliprange: [-0.1] => cliprange: expected
"""  # a config file of train
GRIDS = r"""
 => missing required option | grid ;; grid: {} => grid: expected an axis ;; grid: 3 => grid: expected a JSON object
grid: {seed: 3} => grid.seed: expected a list of values, got 3 ;; grid: {seed: []} => grid.seed: expected a list
grid: {sead: [1]} => sead | seed ;; grid: {seed: [x]} => seed: expected an integer
grid: {seed: [1, 1]} => name of its own ;; grid: {seed: [1]}\nflags: 3 => flags: expected
grid: {seed: [1]}\nflags: {bata: 1} => bata | beta
grid: {seed: [1]}\nflags: {output_dir: a} => output_dir: expected it unset
grid: {seed: [1]}\nwith: {seed: {2: {beta: 1}}} => with.seed: expected values of the grid
grid: {seed: [1]}\nruns_at_once: 0 => runs_at_once: expected an integer or none >= 1
grid: {seed: [1]}\nhalving: {at: [3, 2], by: reward} => at: expected steps above 0 that increase
grid: {seed: [1]}\nhalving: {at: [1]} => by ;; grid: {seed: [1]}\nhalving: {at: [1], by: a, keep: 1} => keep: expected
grid: {seed: [true]} => seed: expected an integer | True
grid: {dtype: [float32, bfloat16]} => dtype: expected one value
grid: {seed: [1]}\ngrid: {seed: [2]} => each key once ;; [ => is not valid YAML ;; a => got a str
grid: {seed: [1]}\nmore: 1 => unknown key | more ;; grid: {async: [ray]} => async_mode: expected a run in this process
grid: {report_to: [wandb]} => report_to: expected tensorboard ;; grid: {dry_run: [true]} => dry_run: expected it unset
grid: {vllm_server_base_url: ['http://a']} => vllm_server_base_url: expected it unset
grid: {output_dir: [a]} => output_dir: expected it unset ;; grid: {[1]: 2} => not valid YAML
grid: {beta: [.nan]} => beta: expected | nan ;; grid: {config: [nowhere.yaml]} => config
"""
ROW, REST = b'{"prompt": "red cat", "chosen": ', b', "rejected": "sea"}'  # `<` and `>` in these
DATA = r"""
rows.jsonl {"text": 5} => expected
reward rows.jsonl {"prompt": "a", "completion": "b", "label": "maybe"} => expected
rows.json { => rows.json: expected JSON in UTF-8 ;; rows.json {} => expected a list of objects, got dict
rows.json <"sun">\n<"sun"> => called .jsonl ;; rows.json [1] => row 0: expected a JSON object
rows.json [] => at least one row ;; rows.csv  => at least one row
rows.csv prompt,prompt\na,b\n => a column name twice ;; rows.csv prompt,completion\n"a => expected CSV in UTF-8
rows.csv prompt,completion\na\n => :2: expected the 2 columns ;; rows.csv \xff => expected CSV in UTF-8
rows.jsonl.gz <"sun"> => expected whole gzip data ;; rows.jsonl.gz \x1f\x8b\x08 => expected whole gzip data
rows.parquet PAR1 => expected a Parquet file ;; rows.parquet  => expected a Parquet file
rows.txt red cat\n => :1: expected a JSON object ;; rows.py import os => :1: expected
rows.pkl \x80\x04K\x01. => expected ;; pairs  => at least one row | got none ;; pairs \n \n => at least one row
pairs \xff\xfe{ => :1: expected JSON in UTF-8 ;; pairs <"sun", "rejected": "se => :1: expected a JSON object
pairs <"sun"><"sun"> => :1: expected a JSON object | Extra data
pairs \xef\xbb\xbf\xef\xbb\xbf<"sun"> => :1: expected a JSON object ;; pairs <"sun">\n[1] => :2: expected a JSON object
pairs 7 => expected ;; pairs {"prompt": "a"} => expected the columns | prompt
pairs {"a": 1} => expected the columns | 'a' ;; pairs {} => expected the columns
pairs <7> => :1: expected a string | 'chosen' ;; pairs <null> => chosen
pairs <""> => :1: expected text in column 'chosen' ;; pairs <NaN> => :1: expected | nan
pairs <1e999> => :1: expected | inf ;; pairs <["a"]> => :1: expected messages
pairs <"\\ud800"> => :1: expected Unicode text in column 'chosen' | surrogate
pairs {"prompt": "b", "prompt": "red cat", "chosen": "sun"> => :1: expected every column once | 'prompt' twice
pairs <[{"role": 1, "content": "a"}]> => :1: expected ;; pairs <[{"role": "user", "content": "a"}]> => :1: expected
pairs {"prompt": [{"role": "user"}], "chosen": "a", "rejected": "b"} => :1: expected a string as content
pairs {"chosen": "abc", "rejected": "xyz"} => :1: expected chosen and rejected with one prompt
pairs {"prompt": "a", "completion": {}} => expected
pairs <"sun", "rejected": "sea", "margin": "x"} => :1: expected | margin
pairs <"sun", "rejected": "sea", "margin": NaN} => :1: expected | margin ;; pairs {"messages": []} => expected
pairs {"messages": [{"role": "assistant", "content": null}]} => expected ;; pairs {"messages": "red"} => expected
pairs {"conversations": [1]} => expected ;; prompts  => at least one row
prompts {"prompt": ""} => :1: expected text in column 'prompt' ;; prompts {"prompt": 3} => :1: expected a string
prompts {"question": "a"} => expected the columns
prompts {"prompt": [{"role": "user", "content": "a"}]} => chat template
prompts {"prompt": "\\udc00"} => :1: expected Unicode text
prompts {"prompt": "a", "prompt": "b"} => every column once
prompts {"prompt": "a"}\n{"prompt" => :2: expected a JSON object ;; prompts {"prompt": []} => :1: expected text
prompts null => expected
"""  # pairs and prompts are rows.jsonl of sft and reward, and of train
RED = b'{"prompt": "' + b"red " * 99
LONG = [
    ("pairs", b"\x00" * 300, ":1: expected a JSON object"), ("pairs", b"[" * 50_000, ":1: expected a JSON object"),
    ("pairs", ROW + b"9" * 5000 + REST, ":1: expected"),
    ("pairs", RED + b'", "chosen": "sun"' + REST, "expected at most"),
    ("prompts", RED + b'"}', "expected at most"), ("rows.json", b"[" * 99_999, "expected JSON in UTF-8"),
]  # fmt: skip


def data_rows() -> Iterator[tuple[str, str, bytes, tuple[str, ...]]]:
    """Command, name of its data file, the bytes in it, and what is named."""
    short = [(*given.partition(b" ")[::2], named) for given, named in rows_of(DATA)]
    for head, content, named in [*short, *((head.encode(), content, (named,)) for head, content, named in LONG)]:
        commands = {"pairs": ("sft", "reward"), "prompts": ("train",)}.get(head.decode(), ("sft",))
        name = head.decode() if b"." in head else "rows.jsonl"
        for command in commands:
            yield command, name, content.replace(b"<", ROW).replace(b">", REST), named


PLACES = ("a_fifo", "a_folder", "a_link", "a_socket", "/dev/zero", "empty", "binary")
NAMERS = """
sft dataset_name, sweep grid, generate prompt_file, generate model_name_or_path, generate adapter, export source,
evaluate judge_template, evaluate models, serve api_key_file, report run, demo start, plan model_name_or_path,
train config, train reward_funcs, train environment, train tools, train reward_model_path, train actor_adapter,
train resume_from_checkpoint, init output_dir, sft output_dir
"""  # commands, and an option of theirs that names a file or folder
FINE = {"config": ("empty",), "output_dir": ("a_folder", "a_link")}  # places that would be right


class World(NamedTuple):
    """What calls are made on: the roles of Hydra, a batch, policies with one named `one`, an engine, files."""

    model: HydraModel
    batch: PackedBatch
    pool: Policies
    engine: RolloutEngine
    places: dict[str, Any]


NAN, INF = float("nan"), float("inf")
X = torch.ones(3, 4)


def _how(**options: Any) -> SamplingConfig:
    return SamplingConfig(**{"max_completion_length": 8, "eos_token_ids": (2,), **options})


def _draw(how: dict[str, Any], **request: Any) -> Callable[[World], Any]:
    return lambda w: w.engine.submit([Request(**{"prompt": (5,), "sample_id": 0, **request})], _how(**how))


PYTHON: list[tuple[Callable[[World], Any], str]] = [  # a call, and the argument that its error names
    *((lambda w, o=o: SlotConfig(**o), next(iter(o))) for o in (
        {"r": 0}, {"r": -1}, {"r": 1.5}, {"r": True}, {"alpha": 0.0}, {"alpha": NAN}, {"alpha": INF},
        {"dropout": 1.0}, {"dropout": -0.1}, {"dropout": NAN}, {"target_modules": ()},
    )), *((lambda w, o=o: RoleSpec(**o), next(iter(o))) for o in (
        {"slot": ""}, {"slot": "../x"}, {"slot": "a b"}, {"slot": 7}, {"head": "v.w"}, {"head": "/"},
        {"backbone": "a/b"}, {"backbone": ""},
    )), *((lambda w, o=o: _how(**o), next(iter(o))) for o in (
        {"max_completion_length": 0}, {"max_completion_length": 1.5}, {"min_completion_length": -1},
        {"temperature": 0.0}, {"temperature": NAN},
        {"temperature": INF}, {"top_k": 0}, {"top_k": 1.5}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": NAN},
        {"min_p": 0.0}, {"min_p": 2.0}, {"stop": ("",)}, {"seed": 1.5},
    )), *((lambda w, p=p, c=c: PackedBatch.from_lists(p, c), named) for p, c, named in (
        ([[3], []], [[4], [5]], "prompts[1]"), ([[3]], [[4], [5]], "completions"), ([[3.5]], [[4]], "prompts"),
    )), *((lambda w, i=i: w.batch.select(i), "indices") for i in ([],)),
    *((lambda w, r=r: w.model.score(w.batch, r), "role") for r in (("teacher",), (), (7,))),
    (lambda w: w.model.score(w.batch, ("actor",), exact_kl=True), "exact_kl"), (lambda w: w.model.score(random_ids(61),
    ("actor",)), "batch"), (lambda w: w.model.score(random_ids(-1), ("actor",)), "batch"),
    (lambda w: w.model.trainable_parameters("teacher"), "role"), (lambda w: w.model.backbone("rm"), "backbone"),
    (lambda w: w.model.backbone().slot("sft"), "slot"),
    *((lambda w, s=s: HydraModel.from_pretrained(s, roles=hydra_roles()), named) for s, named in (
        (7, "source"), (None, "source"), (torch.nn.Linear(2, 2), "source"), ("/nowhere", "model_name_or_path"),
        ("", "model_name_or_path"), ("a\0b", "model_name_or_path"),
    )), (lambda w: HydraModel.from_pretrained(w.places["model"], roles={}), "roles"),
    (lambda w: HydraModel.from_pretrained(w.places["model"], roles=hydra_roles(), token_budget=0), "token_budget"),
    (lambda w: HydraModel.from_pretrained(w.places["model"], roles=hydra_roles(), slots={"x": SlotConfig()}), "slots"),
    (lambda w: hydra_roles("ppo2"), "method"),
    *((_draw(o), next(iter(o))) for o in ({"eos_token_ids": (61,)}, {"eos_token_ids": (-1,)},
    {"stop": ("a",), "eos_token_ids": ()}, {"max_completion_length": 999})),
    (lambda w: w.engine.submit([], _how()), "prompts"), (_draw({}, prompt=()), "prompt"),
    *((_draw({}, **o), next(iter(o))) for o in (
        {"role": "critic"}, {"role": "teacher"}, {"weights": "old"}, {"prompt": (61,)}, {"prompt": (-1,)},
        {"max_completion_length": 0}, {"temperature": NAN}, {"top_k": 0},
    )), (lambda w: w.engine.cancel(99), "number"),
    *((lambda w, o=o: EngineOptions(**o), next(iter(o))) for o in ({"max_rows": 0}, {"cache_bytes": -1})),
    *((lambda w, n=n: w.pool.add(n, slots={"actor": SlotConfig()}), "name")
      for n in ("", "../x", "a/b", "one", "x" * 101, ".a")),
    *((lambda w, f=f: getattr(w.pool, f)("nobody"), "policy")
      for f in ("get", "hold", "remove", "save", "evict", "restore", "snapshot")),
    (lambda w: w.pool.remove("base"), "policy"),
    (lambda w: w.pool.fork("one", "one"), "name"), (lambda w: w.pool.step("base", learning_rate=0.1), "policy"),
    (lambda w: w.pool.step("one", learning_rate=NAN), "learning_rate"),
    (lambda w: w.pool.step("one", learning_rate=-1.0), "learning_rate"),
    (lambda w: w.pool.step("one", learning_rate=0.1, betas=(1.0, 0.9)), "betas"), (lambda w: Policies(w.model), "host"),
    (lambda w: PolicyThread(w.pool, max_rows=0), "max_rows"),
    *((lambda w, a=a: kernels.gather_logprob(*a), named) for a, named in (
        ((X[0], torch.zeros(3, dtype=torch.int64)), "logits"), ((X, torch.zeros(2, dtype=torch.int64)), "target"),
        ((X, X), "target"),
    )), *((lambda w, a=a: kernels.linear(*a), named) for a, named in (((X, torch.ones(2, 5)), "weight"),
    ((X, torch.ones(2, 4, dtype=torch.bfloat16)), "weight"), ((X.int(), X), "x"))),
    *((lambda w, a=a: kernels.rms_norm(*a, eps=1e-6), named) for a, named in (((X, torch.ones(5)), "weight"),
    ((X.int(), torch.ones(4)), "x"))),
    *((lambda w, a=a: kernels.gae(*a, gamma=1.0, lam=1.0), named) for a, named in (((X, X[:2], X.bool()), "value"),)),
    (lambda w: kernels.use_backend("fast").__enter__(), "backend"), (lambda w: kernels.swiglu(X, X[:2]), "up"),
    (lambda w: kernels.activation(X, "tanhh"), "kind"),
]  # fmt: skip


def random_ids(token: int) -> PackedBatch:
    """A batch with an id that no word of the tiny model has."""
    return PackedBatch.from_lists([[3, token]], [[4]])
