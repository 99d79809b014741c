"""The command line end to end on a tiny model: results, exit codes, and one line for each thing that is wrong."""

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from rlhf_bench import kernel_table as measuring
from rlhf_kernels.runtime import kernel_table, native, registry
from safetensors import SafetensorError

from rlhf_engine import __version__
from rlhf_engine.commands.common import SHORT_CUTS
from rlhf_engine.commands.main import _COMMANDS, main
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.runs.text import format_value
from tests.training.test_data import PROMPTS, write_model, write_pairs, write_prompts, write_reward, write_rows


@pytest.fixture(autouse=True)
def _same_backend_afterwards():
    """`--kernels` is a setting of the process, which other tests share."""
    yield
    registry.set_default_backend("auto")


def train_flags(model: Path, folder: Path, *more: str) -> list[str]:
    values = {
        "model_name_or_path": model, "dataset_name": write_prompts(folder), "output_dir": folder / "run",
        "device": "cpu", "max_steps": 2, "generation_batch_size": 4, "num_mini_batches": 1, "num_ppo_epochs": 1,
        "max_completion_length": 6, "lora_r": 4,
    }  # fmt: skip
    kept = {name: value for name, value in values.items() if f"--{name}" not in more}  # a flag twice is an error
    return ["train", *[part for name, value in kept.items() for part in (f"--{name}", str(value))], *more]


def run(capsys, *argv: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)"""
    capsys.readouterr()
    code = main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, *argv: str, code: int = 2, trace: Sequence[str] = ()) -> str:
    """The one line on standard error of a request that is not served, after lines of a reward function's own code."""
    found, _, err = run(capsys, *argv)
    # progress of the steps that were made, and what comes before them
    lines = [line for line in err.splitlines() if not line.startswith(("ppo ", "page "))]
    shown, lines = [line.strip(" ^~") for line in lines[:-1]], lines[-1:]
    assert [line for line in shown if line and not line.startswith("File ")] == list(trace), err
    assert found == code, err
    assert len(lines) == 1, err
    assert lines[0].startswith(f"rlhf-engine {argv[0]}: " if len(argv) > 1 else "rlhf-engine")
    assert "Traceback" not in err
    return lines[0]


def test_usage_version_and_unknown_commands(capsys):
    code, out, _ = run(capsys)
    assert code == 2
    assert "\nfirst: `rlhf-engine demo`" in out
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(f"\n  {name} " in out for name in ("demo", "sft", "reward", "train", "generate", "doctor", "bench"))
    assert run(capsys, "--version")[1] == f"rlhf-engine {__version__}\n"
    assert refused(capsys, "trian") == "rlhf-engine: unknown command 'trian'; did you mean 'train'?"
    assert refused(capsys, "zzz").endswith(f"expected one of {list(_COMMANDS)}")


def test_help_of_every_command(capsys):
    for command in _COMMANDS:
        with contextlib.suppress(SystemExit):
            assert main([command, "--help"]) == 0
        assert f"usage: rlhf-engine {command}" in capsys.readouterr().out


def test_print_config(capsys, model, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(train_flags(model, tmp_path, "--beta", "0.3", "--print_config"))
    assert stop.value.code == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert (found["beta"], found["max_steps"], found["model_name_or_path"]) == (0.3, 2, str(model))
    assert not (tmp_path / "run").exists()


def test_doctor(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert __version__ in out
    assert "linear_logprob" in out
    code, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["version"] == __version__
    assert set(found["ops"]) == {"float32", "bfloat16"}
    assert found["ops"]["float32"]["lora"]["reference"] == "available"
    assert {"source", "machine"} == set(found["kernel_table"])
    assert found["cpu"]["threads"] >= 1
    assert all(row["why"] for ops in found["ops"].values() for row in ops.values())
    assert refused(capsys, "doctor", "--jsn").endswith("unknown option --jsn; did you mean --json?")
    assert refused(capsys, "doctor", "--json", "x").endswith("json: expected true or false, got 'x'")


def test_doctor_shows_the_choice_and_its_reason(capsys, tmp_path):
    table = tmp_path / "table.json"
    isa = native.isa() or "portable"
    entry = kernel_table.Entry("gae", isa, "float32", None, "reference", {"a": {"cpu": 3.0, "reference": 1.0}})
    kernel_table.write(table, [entry], {isa: "a CPU, 1 threads, torch 2"})
    with registry.use_table(table):
        _, out, _ = run(capsys, "doctor")
    if native.missing() is None:
        assert f"kernel table: {table}, measured on a CPU, 1 threads, torch 2" in out
        assert "float32 gae: by the table: reference 3.00 x as fast" in out
        assert f": the first that serves; the table has nothing for {isa}" in out
    assert "lora_group: the only one that serves: lora_group has no cpu implementation" in out


@pytest.mark.skipif(native.missing() is not None, reason="without the native extension there is nothing to choose")
@pytest.mark.parametrize(
    ("names", "ops"),
    [
        (("gae",), {"gae"}),
        pytest.param(
            ("gae", "llama_ops"), {"activation", "gae", "rms_norm", "rotary", "swiglu"}, marks=pytest.mark.long
        ),
    ],
    ids=["one", "several"],
)
def test_doctor_measures_a_table_that_is_used_where_it_is_named(capsys, monkeypatch, tmp_path, names, ops):
    monkeypatch.setattr(measuring, "OPS", names)
    path = tmp_path / "table.json"
    code, out, _ = run(capsys, "doctor", "--measure", str(path))
    assert code == 0
    assert f"used with RLHF_ENGINE_KERNEL_TABLE={path}" in out
    found = kernel_table.read(path, registry.ops(), isa=native.isa())
    assert {entry.op for entry in found.entries} == ops
    assert "by the table" not in run(capsys, "doctor")[1], "it was not named"
    with registry.use_table(path):
        assert "by the table" in run(capsys, "doctor")[1]
    line = refused(capsys, "doctor", "--measure", str(tmp_path / "none" / "table.json"))
    assert "measure: expected the path of a file in a folder that is there" in line


def test_the_module_runs_as_a_program(tmp_path):
    command = [sys.executable, "-m", "rlhf_engine"]
    done = subprocess.run([*command, "train", "--max_stepz", "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "rlhf-engine train: unknown option --max_stepz; did you mean --max_steps?\n"


def lying(out):
    """What a command said of where things are: name → path or command."""
    found = dict(
        re.match(r"(\w+(?: \w+)?) +(.*)", line).groups() for line in out.splitlines()[1:] if ", held out" not in line
    )
    assert "page" in found
    return found


def test_sft_full_then_train_then_generate(capsys, tmp_path):
    base = write_model(tmp_path / "base", reward_head=False)
    common = ["--seed", "3"]
    pairs = str(write_pairs(tmp_path))
    sft = ["sft", "--full", "--model_name_or_path", str(base), "--dataset_name", pairs, "--max_steps", "2", *common]
    code, out, _ = run(capsys, *sft, "--device", "cpu", "--output_dir", str(tmp_path / "sft"))
    assert code == 0
    assert lying(out)["base"] == str(tmp_path / "sft")
    assert out.startswith("2 steps; cross-entropy ")
    code, out, err = run(capsys, *train_flags(tmp_path / "sft", tmp_path, *common))
    assert code == 0
    where = lying(out)
    assert where["model"] == str(tmp_path / "run" / "final")
    assert all(Path(where[name]).exists() for name in ("model", "curves", "metrics"))
    assert Path(where["page"]).is_file()
    assert run(capsys, "report", str(Path(where["page"]).parent), "--out", str(tmp_path / "page.html"))[0] == 0
    first, last = (format_value(row["reward"]) for row in read_metrics(Path(where["metrics"])))
    assert out.startswith(f"2 steps; reward {first} → {last}; KL, nats per answer ")
    assert "ppo 2/2" in err
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert (tmp_path / "run" / "curves.png").is_file()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["seed"] == 3
    generate = ["generate", "--model_name_or_path", str(tmp_path / "sft"), "--adapter", str(tmp_path / "run" / "final")]
    code, out, _ = run(capsys, *generate, "--prompt", PROMPTS[0], "--json", "--max_completion_length", "5", *common)
    assert code == 0
    assert json.loads(out)["prompt"] == PROMPTS[0]
    again = train_flags(tmp_path / "sft", tmp_path, *common)
    assert "output_dir: expected one without a run" in refused(capsys, *again)
    code, out, _ = run(capsys, *again, "--resume_from_checkpoint", "auto")
    assert (code, out) == (0, f"nothing to do: {tmp_path / 'run'} is at step 2 of 2\n")
    longer = train_flags(tmp_path / "sft", tmp_path, *common, "--max_steps", "3")
    code, _, err = run(capsys, *longer, "--resume_from_checkpoint", "auto")
    assert code == 0
    assert "ppo 3/3" in err
    assert "ppo 1/" not in err


def test_reward_then_train_on_it(capsys, model, tmp_path):
    rows = [{"prompt": p, "completion": "the sun", "label": i % 2} for i, p in enumerate(PROMPTS)]
    reward = ["reward", "--lora", "--model_name_or_path", str(model), "--device", "cpu", "--lora_r", "4"]
    reward += ["--dataset_name", str(write_rows(tmp_path / "rows.jsonl", rows)), "--output_dir", str(tmp_path / "rm")]
    reward += [
        "--max_steps", "2", "--eval_dataset_name", "0.4", "--eval_steps", "1", "--per_device_train_batch_size", "4",
    ]  # fmt: skip
    code, out, err = run(capsys, *reward)
    assert code == 0, err
    final = tmp_path / "rm" / "final"
    assert lying(out)["reward model"].startswith(f"{final}  (step ")
    assert "held-out auc " in lying(out)["reward model"]
    assert re.search(
        r"^Area under the ROC curve, held out 0\.500 → .* \[.*\] \(step 0 → [12], which was kept", out, re.M
    )
    record = json.loads((tmp_path / "rm" / "run.json").read_text())
    share = f"{record['trained_parameters']:,} parameters, {100 * record['trained_share']:.3g} % of the base's"
    assert f"pointwise, {record['rows']['train']} rows and {record['rows']['eval']} held out; training {share}" in err
    assert "reward 2/2  loss " in err
    assert (tmp_path / "rm" / "curves.png").is_file()
    assert "output_dir: expected one without a run" in refused(capsys, *reward)
    assert run(capsys, *reward, "--resume_from_checkpoint", "auto")[1].startswith("nothing to do: ")
    flags = train_flags(model, tmp_path, "--reward_model_path", str(final), "--algorithm", "reinforce")
    flags = [f for pair in zip(flags[1::2], flags[2::2], strict=True) if pair[0] not in _PPO_ONLY for f in pair]
    code, out, err = run(capsys, "train", *flags)
    assert code == 0, err
    assert lying(out)["model"] == str(tmp_path / "run" / "final")


def test_a_full_disk_is_one_line(capsys, model, tmp_path, monkeypatch, survived):
    def write(*arguments):
        raise OSError(28, "No space left on device")

    for writer, file in [
        ("rlhf_engine.training.run.write_json_atomic", "run.json"),
        ("rlhf_engine.training.run.MetricsWriter.sync", "metrics.jsonl"),
        ("rlhf_engine.training.run.MetricsWriter.write", "metrics.jsonl"),
        ("rlhf_engine.training.evaluation.SampleLog.write", "samples.jsonl"),
    ]:
        folder = tmp_path / writer
        folder.mkdir()
        flags = train_flags(model, folder)
        with monkeypatch.context() as patched:
            patched.setattr(writer, write)
            code, _, err = run(capsys, *flags)
        assert code == 1
        path = str(folder / "run" / file)
        assert err.splitlines()[-1].startswith(
            f"rlhf-engine train: output_dir: expected to write {path!r}, got: [Errno 28] No space left on device"
        )
    survived("faults", 4)


def test_a_temporary_folder_that_is_full(capsys, model, tmp_path, monkeypatch):
    def write(*arguments, **options):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("rlhf_engine.hydra.peft_io.save_file", write)
    monkeypatch.setattr("rlhf_engine.hydra.peft_io._loaded_back", {})  # other tests have tried such slots
    line = refused(capsys, *train_flags(model, tmp_path))
    assert "TMPDIR: expected a folder that can be written, got " in line


_PPO_ONLY = ("--num_mini_batches", "--num_ppo_epochs")


def test_reward_says_what_is_wrong(capsys, model, tmp_path):
    rows = [{"prompt": p, "completion": "the sun", "label": True} for p in PROMPTS]
    reward = ["reward", "--lora", "--model_name_or_path", str(model), "--output_dir", str(tmp_path / "rm")]
    reward += ["--dataset_name", str(write_rows(tmp_path / "rows.jsonl", rows)), "--device", "cpu"]
    line = refused(capsys, *reward)
    assert "dataset_name: expected rows with label true and rows with label false, got 12 true and 0 false" in line
    assert "missing required option: --mode or --full or --lora" in refused(capsys, "reward", *reward[2:])
    assert "unknown option --group_colum; did you mean --group_column?" in refused(
        capsys, *reward, "--group_colum", "c"
    )
    assert not (tmp_path / "rm").exists()
    held = write_rows(tmp_path / "held.jsonl", rows)
    mixed = write_rows(tmp_path / "mixed.jsonl", [{**row, "label": i % 2} for i, row in enumerate(rows)])
    reward[reward.index("--dataset_name") + 1] = str(mixed)
    code, out, err = run(capsys, *reward, "--eval_dataset_name", str(held), "--max_steps", "1")
    assert code == 0
    assert "note: the held-out rows are of one class only (12 true, 0 false): AUC" in err
    assert "held-out auc –" in out


def test_rows_that_are_left_out_are_said_on_standard_error(capsys, model, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "red cat", "completion": "sings"}\n{"prompt": "red"\n')
    sft = ["sft", "--lora", "--model_name_or_path", str(model), "--dataset_name", str(data), "--device", "cpu"]
    more = ["--output_dir", str(tmp_path / "sft"), "--lora_r", "4"]
    assert "rows.jsonl:2: expected a JSON object, got " in refused(capsys, *sft, *more)
    code, out, err = run(capsys, *sft, *more, "--max_bad_rows", "0.5")
    assert code == 0
    assert f"{data}: 2 rows read, 1 used, 1 bad (expected a JSON object: {data}:2)\n" in err
    assert "bad" not in out


def test_generate(capsys, model, tmp_path):
    common = ["generate", "--model_name_or_path", str(model), "--device", "cpu", "--max_completion_length", "5"]
    greedy = [*common, "--greedy", "--json", "--prompt", "red cat", "the dog runs"]
    code, out, _ = run(capsys, *greedy)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["prompt"] for row in rows] == ["red cat", "the dog runs"]
    names = {"index", "prompt", "completion", "completion_ids", "tokens", "finish_reason", "mean_logprob"}
    assert all(set(row) == names for row in rows)
    assert [row["index"] for row in rows] == [0, 1]
    assert all(1 <= row["tokens"] <= 5 and row["mean_logprob"] < 0 for row in rows)
    assert run(capsys, *greedy, "--seed", "9")[1] == out  # greedy answers depend on no seed
    sampled = [*common, "--json", "--prompt", "red cat", "--num_generations", "6"]
    answers = [json.loads(line)["completion"] for line in run(capsys, *sampled)[1].splitlines()]
    assert len(answers) == 6
    assert len(set(answers)) > 1
    assert [json.loads(line)["completion"] for line in run(capsys, *sampled)[1].splitlines()] == answers
    assert [json.loads(line)["completion"] for line in run(capsys, *sampled, "--seed", "1")[1].splitlines()] != answers
    plain = run(capsys, *common, "--greedy", "--prompt", "red cat")[1]
    assert plain == f"red cat\n  → {rows[0]['completion']}\n"


def test_generate_streams_stops_and_reads_standard_input(capsys, model, monkeypatch):
    common = ["generate", "--model_name_or_path", str(model), "--device", "cpu", "--max_completion_length", "12"]
    common += ["--min_completion_length", "12", "--seed", "4"]
    _, out, err = run(capsys, *common, "--prompt", "red cat")
    whole = out.removeprefix("red cat\n  → ").removesuffix("\n")
    assert len(whole) > 8
    assert "12 tokens, " in err
    assert " tokens/s (" in err
    stop = whole[4:7]
    _, out, _ = run(capsys, *common, "--prompt", "red cat", "--stop", stop, "@@")
    assert out == f"red cat\n  → {whole[: whole.find(stop)]}\n"
    row = json.loads(run(capsys, *common, "--prompt", "red cat", "--stop", stop, "--json")[1])
    assert row["finish_reason"] == "stop"
    assert row["completion"] == whole[: whole.find(stop)]
    monkeypatch.setattr("sys.stdin", io.StringIO("red cat\n\nblue dog\n"))
    code, out, _ = run(capsys, *common, "--prompt_file", "-")
    assert code == 0
    assert out.startswith(f"red cat\n  → {whole}\nblue dog\n  → ")


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_kernels_by_name_serve_a_whole_command(capsys, model):
    common = ["generate", "--model_name_or_path", str(model), "--device", "cpu", "--max_completion_length", "5"]
    code, out, _ = run(capsys, *common, "--prompt", "red cat", "--greedy", "--kernels", "cpu")
    assert (code, out[:7]) == (0, "red cat")


def test_options_of_the_engine_are_checked_before_a_run(capsys, model, tmp_path):
    for name, value, message in (
        ("decode_step", "graph", "expected one that serves the backbone, got 'graph': graphs are CUDA's"),
        ("kv_cache_memory", "1KB", "expected at least"),
        ("kv_cache_memory", "much", "expected a size such as"),
    ):
        assert f"{name}: {message}" in refused(capsys, *train_flags(model, tmp_path, f"--{name}", value))


def test_what_was_finished_is_kept_and_gone_on_with(capsys, model, tmp_path, monkeypatch):
    from rlhf_engine.rollout.engine import RolloutEngine

    out = tmp_path / "answers.jsonl"
    common = ["generate", "--model_name_or_path", str(model), "--device", "cpu", "--max_completion_length", "6"]
    common += [
        "--prompt", "red cat", "blue dog", "the", "--num_generations", "3", "--kv_cache_memory", "40kB", "--json",
    ]  # fmt: skip
    expected = run(capsys, *common)[1].splitlines()
    assert len(expected) == 9
    step = RolloutEngine.step
    answers = []

    def interrupted(self):
        if len(answers) >= 4:
            raise KeyboardInterrupt
        found = step(self)
        answers.extend(found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(RolloutEngine, "step", interrupted)
        code, _, err = run(capsys, *common, "--out", str(out))
    assert code == 130
    kept = out.read_text().splitlines()
    assert 4 <= len(kept) < 9
    assert f"stopped with {len(kept)} of 9 answers in {out}; --resume goes on" in err
    with out.open("a") as file:
        file.write('{"index": 8, "prom')  # as a kill leaves it
    assert "out: expected a file that does not exist" in refused(capsys, *common, "--out", str(out))
    line = refused(capsys, *common, "--seed", "7", "--out", str(out), "--resume")
    assert "1: expected an answer of this model with these options, got one of others" in line
    other = [*common[:-1], "--out", str(out), "--resume"]
    other[other.index("red cat")] = "red dog"
    assert "1: expected an answer to one of these prompts" in refused(capsys, *other)
    text = out.read_text()
    for change in (('"completion": "', '"completion": "and '), ('"completion_ids": [', '"completion_ids": [1, ')):
        out.write_text(text.replace(*change, 1))
        assert "answers.jsonl:1: expected a line as it was written" in refused(
            capsys, *common, "--out", str(out), "--resume"
        )
    out.write_text(text)
    code, printed, err = run(capsys, *common, "--out", str(out), "--resume")
    assert code == 0
    assert f"{len(kept)} of 9 answers are in {out} already" in err
    rows = {json.loads(line)["index"]: json.loads(line) for line in out.read_text().splitlines()}
    whole = [json.loads(line) for line in expected]
    for row in whole:
        assert rows[row["index"]]["completion"] == row["completion"]
    assert [json.loads(line)["index"] for line in printed.splitlines()] == [
        i for i in range(9) if i not in {json.loads(line)["index"] for line in kept}
    ]
    assert run(capsys, *common, "--out", str(out), "--resume")[:2] == (0, "")


def test_a_rollout_can_be_verified(capsys, model):
    common = ["generate", "--model_name_or_path", str(model), "--device", "cpu", "--max_completion_length", "6"]
    _, _, err = run(capsys, *common, "--prompt", "red cat", "blue", "--num_generations", "4", "--verify_rollout")
    found = re.search(
        r"differ from the training forward's by (\S+) on average and (\S+) at most over (\d+) tokens", err
    )
    if found is None:  # so small a model may agree to the bit
        assert "largest difference 0.0 over" in err
    else:
        assert float(found[1]) <= float(found[2]) < 1e-3
    assert "of 8 answers drawn again alone came out different" in err
    _, _, err = run(capsys, *common, "--prompt", "red cat", "blue", "--verify_rollout", "--exact")
    if native.missing() is None:
        assert "largest difference 0.0 over" in err
        assert "0 of 2 answers drawn again alone came out different" in err
        filters = ("--top_k", "9", "--top_p", "0.9", "--min_p", "0.01", "--min_completion_length", "3")
        _, _, err = run(capsys, *common, "--prompt", "red cat", "blue", "--verify_rollout", "--exact", *filters)
        assert "largest difference 0.0 over" in err
        assert "0 of 2 answers drawn again alone came out different" in err


def test_prompt_files(capsys, model, tmp_path):
    common = ["generate", "--model_name_or_path", str(model), "--device", "cpu"]
    common += ["--max_completion_length", "5", "--json", "--prompt_file"]
    text = tmp_path / "prompts.txt"
    text.write_bytes(b"red cat\r\n\nblue dog\n")
    code, out, _ = run(capsys, *common, str(text))
    assert (code, [json.loads(line)["prompt"] for line in out.splitlines()]) == (0, ["red cat", "blue dog"])
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "red cat"}\n')
    line = refused(capsys, *common, str(lines))
    assert "prompt_file: expected a text file, got" in line
    assert "dataset_name reads such files" in line
    text.write_text("red cat\n\n\nthe dog runs and the cat runs\n")
    line = refused(capsys, *common, str(text), "--max_prompt_length", "4")
    assert f"{text}:4: expected at most 4 tokens (max_prompt_length), got" in line
    text.write_text("\n \n")
    assert "prompt_file: expected at least one prompt in" in refused(capsys, *common, str(text))
    assert "prompt_file: expected a text file, got" in refused(capsys, *common, str(tmp_path / "none"))
    assert "prompt: expected text, got an empty prompt at place 0" in refused(capsys, *common[:-1], "--prompt", " ")


def test_prompts_from_data(capsys, model, tmp_path):
    common = ["generate", "--model_name_or_path", str(model), "--device", "cpu"]
    common += ["--max_completion_length", "5", "--json", "--dataset_name"]
    lines = tmp_path / "prompts.jsonl.gz"
    with gzip.open(lines, "wt", encoding="utf-8") as file:
        file.write('{"prompt": "red cat"}\n\n{"prompt": "blue\u2028dog"}\n')
    answers = run(capsys, *common, str(lines))[1].strip().split("\n")
    assert [json.loads(line)["prompt"] for line in answers] == ["red cat", "blue\u2028dog"]
    lines = tmp_path / "prompts.jsonl"
    rows = ['{"prompt": "red cat"}', '{"prompt": ', '{"prompt": "the dog runs and the cat runs"}', '{"prompt": ""}']
    lines.write_text("\n".join(rows))
    assert "prompts.jsonl:2: expected a JSON object" in refused(capsys, *common, str(lines))
    options = ["--max_bad_rows", "2", "--max_prompt_length", "3", "--truncation", "drop"]
    code, out, err = run(capsys, *common, str(lines), *options)
    assert (code, [json.loads(line)["prompt"] for line in out.splitlines()]) == (0, ["red cat"])
    assert "4 rows read, 1 used, 2 bad" in err
    assert "1 dropped as too long" in err
    cut = run(capsys, *common, str(lines), *options[:-1], "keep_end")[1].splitlines()
    whole = [*common[:-1], "--prompt", "red cat", "and the cat runs"]
    alone = [json.loads(line) for line in run(capsys, *whole)[1].splitlines()]
    assert json.loads(cut[1])["prompt"] == "the dog runs and the cat runs"  # shown whole
    assert len(cut) == len(alone) == 2
    assert "truncation: expected error, drop or keep_end" in refused(
        capsys, *common, str(lines), "--truncation", "keep_start"
    )


def test_conversations_are_answered_through_the_chat_template(capsys, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "chat")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}the{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    talk = tmp_path / "talk.jsonl"
    messages = [{"role": "user", "content": "red cat"}]
    talk.write_text(json.dumps({"prompt": messages}) + "\n")
    common = ["generate", "--model_name_or_path", str(folder), "--device", "cpu", "--max_completion_length", "5"]
    (row,) = [json.loads(line) for line in run(capsys, *common, "--json", "--dataset_name", str(talk))[1].splitlines()]
    assert row["prompt"] == "red cat the"
    plain = ["generate", "--model_name_or_path", str(model), *common[3:]]
    assert "expected a tokenizer with a chat template" in refused(capsys, *plain, "--dataset_name", str(talk))


def test_train_refuses_in_one_line(capsys, model, tmp_path):
    for more, message in (
        (["--dataset_name", "nowhere.jsonl"], "a folder of such or owner/name of the Hub, got 'nowhere.jsonl' which i"),
        (["--bata", "0.1"], "unknown option --bata; did you mean --beta?"),
        (["--beta", "much"], "beta: expected a number, got 'much'"),
        (["--reward_funcs", "good"], "reward_funcs: expected reward_model, code, format, json_schema, length, math, "),
        (["--resume_from_checkpoint", "nowhere"], "resume_from_checkpoint: expected 'auto', 'restart' or a checkpoint"),
        (["--device", "cuda:77"], "device: expected one that is present (cpu"),
    ):
        assert message in refused(capsys, *train_flags(model, tmp_path, *more))
        assert not (tmp_path / "run").exists()


def test_a_broken_reward_function_is_a_request_that_cannot_be_served(capsys, model, tmp_path):
    """Also one that breaks during the run, which has its checkpoint. Bad values have tests of their own."""
    for i, (body, message) in enumerate((
        ("return [1.0]", ": expected 2 rewards, got 1"),
        ("raise ValueError('one\\ntwo')", " raised ValueError: one two"),
        # calls: the dry run, step 1, step 2
        ("return [1.0] * len(prompts) if len(calls) < 4 else ['good'] * 4", ": expected numbers or None, got 'good' a"),
        ("return [1.0] * len(prompts) if len(calls) < 4 else 1 / 0", " raised ZeroDivisionError: division by zero"),
    )):  # fmt: skip
        folder, late = tmp_path / str(i), i > 1
        folder.mkdir()
        spec, trace = write_reward(folder, body, f"reward_{i}"), [body] if "raised" in message else []
        flags = train_flags(model, folder, "--reward_funcs", spec, "--save_steps", "1")
        line = refused(capsys, *flags, code=1 if late else 2, trace=trace)
        assert f"reward function 'reward_{i}'{message}" in line
        assert (folder / "run" / "checkpoint-1").is_dir() == (folder / "run").exists() == late


def test_threads_that_wait_give_their_core_away_soon():
    """Beside other busy processes a thread that spins keeps the core from the one that it waits for."""
    program = (
        "import os; from rlhf_engine.commands import main as m; "
        "m.main = lambda: print(os.environ.get('GOMP_SPINCOUNT')) or 0; m.run_and_exit()"
    )
    unset = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    for given, spins in ({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None"):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=unset | given, capture_output=True, text=True, check=True)
        assert done.stdout == f"{spins}\n"


def test_control_c(capsys, model, tmp_path):
    body = "if len(calls) == 4:\n    raise KeyboardInterrupt\nreturn [1.0] * len(prompts)"
    flags = train_flags(model, tmp_path, "--reward_funcs", write_reward(tmp_path, body), "--save_steps", "1")
    line = refused(capsys, *flags, code=130)
    assert line.endswith("stopped; a run that wrote checkpoints goes on with --resume_from_checkpoint auto")
    code, _, err = run(capsys, *flags, "--resume_from_checkpoint", "auto")
    assert code == 0
    assert "ppo 2/2" in err


def test_kernels_by_name(capsys, model, tmp_path):
    code, _, _ = run(capsys, *train_flags(model, tmp_path, "--kernels", "reference", "--max_steps", "1"))
    assert code == 0
    assert registry.default_backend() == "reference"
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["kernels"] == "reference"


def test_kernels_that_do_not_serve_every_op_are_refused_with_the_list(capsys, model, tmp_path):
    import torch

    ops = registry.report("cpu", torch.float32)
    missing = [op for op, row in ops.items() if row["triton"] != "available" and op not in SHORT_CUTS]
    assert {"lora", "linear_logprob"} <= set(missing)  # Triton has nothing to offer for tensors on a CPU
    base, output = ["--model_name_or_path", str(model), "--device", "cpu"], ["--output_dir", str(tmp_path / "run")]
    flags = {
        "train": train_flags(model, tmp_path)[1:],
        "sft": ["--full", "--dataset_name", str(write_pairs(tmp_path)), *base, *output],
        "reward": ["--lora", "--dataset_name", str(write_pairs(tmp_path)), *base, *output],
        "generate": ["--prompt", "red", *base],
        **({} if torch.cuda.is_available() else {"demo": output}),  # it would run there, where Triton may serve
    }
    for command, words in flags.items():
        line = refused(capsys, command, *words, "--kernels", "triton")
        assert f"kernels: expected a backend that serves every op on cpu, 'triton' has no {missing}" in line
        assert not (tmp_path / "run").exists()
