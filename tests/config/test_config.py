"""Options: types, bounds, flags, YAML, and errors that name the option."""

import dataclasses
import itertools
import shlex
import typing
from pathlib import Path

import pytest
import yaml
from rlhf_kernels.runtime import registry

from rlhf_engine.config import (
    DemoConfig,
    EvaluateConfig,
    GenerateConfig,
    Kernels,
    RewardConfig,
    SFTConfig,
    TrainConfig,
    parse_config,
    parser,
)
from rlhf_engine.config.algorithm import ALGORITHMS
from rlhf_engine.errors import ConfigError
from rlhf_engine.rollout.answer import _settings
from rlhf_engine.scoring.verifiable import Format

REQUIRED = {"model_name_or_path": "m", "dataset_name": "d.jsonl", "output_dir": "o"}
ARGV = [part for name, value in REQUIRED.items() for part in (f"--{name}", value)]


def parse(*argv: str) -> TrainConfig:
    return parse_config(TrainConfig, [*ARGV, *argv])


TRAIN = """
method algorithm num_generations loss_type scale_rewards kl_in advantage_clip max_bad_rows truncation
system_prompt chat_template_kwargs dry_run dtype lora_r lora_alpha push_to_hub lora_dropout
lora_target_modules actor_adapter reference_adapter critic_init quantization reward_model_path
eval_dataset_name max_prompt_length max_completion_length temperature top_k top_p min_p
reward_funcs reward_weights missing_eos_penalty beta kl_target kl_estimator gamma lam
cliprange delta cliprange_value vf_coef entropy_coef generation_batch_size
num_mini_batches num_ppo_epochs per_device_train_batch_size max_steps num_train_epochs learning_rate
critic_learning_rate lr_scheduler_type warmup_steps weight_decay adam_epsilon optim max_grad_norm
gradient_checkpointing kernels rollout_mismatch_bound max_tokens_per_micro_batch
kv_cache_memory exact decode_step save_steps save_total_limit eval_steps seed resume_from_checkpoint
device report_to vllm_server_base_url vllm_adapter_dir async_mode max_staleness off_policy_correction shard_base
environment tools max_turns tool_timeout advantage_level
"""
REWARD = """
mode objective pos_weight center_rewards_coefficient eval_dataset_name group_column
eval_steps metric_for_best_model save_steps save_total_limit resume_from_checkpoint export max_length
learning_rate num_train_epochs max_steps per_device_train_batch_size max_bad_rows truncation system_prompt
chat_template_kwargs gradient_accumulation_steps lora_r lora_alpha push_to_hub
lora_dropout lora_target_modules lr_scheduler_type warmup_steps weight_decay adam_epsilon optim
max_grad_norm gradient_checkpointing max_tokens_per_micro_batch dtype device kernels seed report_to shard_base
"""


def test_flag_names() -> None:
    """A promise to users: a renamed or lost option must be a decision, not an accident."""
    assert set(parse().to_dict()) == {*REQUIRED, *TRAIN.split()}
    assert set(parse_config(RewardConfig, [*ARGV, "--lora"]).to_dict()) == {*REQUIRED, *REWARD.split()}


def test_async_has_the_policy_and_the_number_of_generators():
    modes = {"ray=4,newest": ("ray", "newest", 4), "ray": ("ray", "fixed", 1)}
    for text, expected in {**modes, "overlap,in_flight": ("overlap", "in_flight", 1)}.items():
        found = parse("--async", text)
        assert (found.async_kind, found.async_policy, found.ray_generators) == expected
    truncated = parse("--async", "replay", "--off_policy_correction", "sequence_truncate=1.5")
    assert (truncated.correction, truncated.off_policy_clip_max) == ("sequence_truncate", 1.5)


def test_names_that_no_file_could_have(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    options = (*REQUIRED, "resume_from_checkpoint", "actor_adapter", "reward_funcs", "config")
    names = (("x" * 5000, "File name too long"), ("a\0b", "null byte"), (str(loop), "symbolic links"))
    for option, (name, why) in itertools.product(options, names):
        others = [part for key, value in REQUIRED.items() if key != option for part in (f"--{key}", value)]
        with pytest.raises(ConfigError, match=rf"^{option}: expected .{{1,150}}: .*{why}"):
            parse_config(TrainConfig, [*others, f"--{option}", name])


def test_texts_may_be_longer_than_names_of_files() -> None:
    argv = ["--model_name_or_path", "m", "--prompt", "x" * 5000, "--stop", "y" * 300, "--max_completion_length", "1"]
    assert parse_config(GenerateConfig, argv).prompt == ["x" * 5000]


@pytest.mark.skipif(not Path("/proc/self/mem").is_file(), reason="there is no file here whose reading fails")
def test_a_file_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match=r"^config: expected a file that can be read, got '/proc/self/mem': Input/"):
        parse("--config", "/proc/self/mem")


def test_an_option_with_a_name_that_python_keeps(tmp_path: Path) -> None:
    assert parse("--async", "overlap") == parse("--async_mode=overlap") == parse("--async=overlap")
    path = tmp_path / "config.yaml"
    path.write_text("async: overlap\nmax_staleness: 2\n")
    found = parse("--config", str(path))
    assert (found.async_mode, found.max_staleness) == ("overlap", 2)
    path.write_text("async: overlap\nasync_mode: replay\n")
    with pytest.raises(ConfigError, match="async_mode: given twice in"):
        parse("--config", str(path))
    with pytest.raises(ConfigError, match="did you mean --async"):
        parse("--asinc", "overlap")


def test_kernel_names_are_those_of_the_registry() -> None:
    assert typing.get_args(Kernels) == ("auto", *registry.BACKENDS)


def test_every_option_is_documented_and_configs_are_frozen() -> None:
    for cls in (TrainConfig, SFTConfig, RewardConfig, GenerateConfig, DemoConfig):
        assert all(len(f.metadata["help"]) > 8 for f in dataclasses.fields(cls))
    demo = DemoConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        demo.seed = 3  # type: ignore[misc]


def test_forms_of_flags() -> None:
    config = parse(
        "--beta=0.1", "--max-steps", "7", "--dry_run", "--no_shard_base",
        "--gradient-checkpointing=true",
        "--reward_funcs", "reward_model", "a/b.py:f", "--reward_weights", "1", "-1e-3", "--max_grad_norm", "0",
        "--lora_target_modules", "q_proj,v_proj", "--learning_rate", "3e-5",
    )  # fmt: skip
    assert (config.beta, config.max_steps, config.dry_run, config.shard_base) == (0.1, 7, True, False)
    assert config.gradient_checkpointing is True
    assert config.reward_funcs == ["reward_model", "a/b.py:f"]
    assert config.reward_weights == [1.0, -1e-3]
    assert config.max_grad_norm == 0
    assert config.largest_grad_norm is None
    assert config.lora_target_modules == ["q_proj", "v_proj"]
    assert config.learning_rate == 3e-5
    assert parse("--lora_target_modules", "a", "b").lora_target_modules == ["a", "b"]
    assert parse("--gradient_checkpointing", "false").gradient_checkpointing is False


def test_prompts_that_look_like_options_or_lists() -> None:
    config = parse_config(GenerateConfig, ["--model_name_or_path", "m", "--prompt", "- one, two", "three"])
    assert config.prompt == ["- one, two", "three"]


def test_sft_switches() -> None:
    assert parse_config(SFTConfig, [*ARGV, "--full"]).mode == "full"
    assert parse_config(SFTConfig, [*ARGV, "--mode", "lora"]).mode == "lora"
    with pytest.raises(ConfigError, match=r"mode: given twice, as 'full' and as 'lora'"):
        parse_config(SFTConfig, [*ARGV, "--full", "--lora"])
    with pytest.raises(ConfigError, match=r"missing required option: --mode or --full or --lora"):
        parse_config(SFTConfig, ARGV)


def test_numbers_without_a_dot_and_names_that_look_like_numbers(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("cliprange: [1e-1, 0.3]\neval_dataset_name: 1e-1\nlearning_rate: 1e-4\n")
    config = parse("--config", str(file))
    assert (config.cliprange, config.eval_share, config.learning_rate) == ([0.1, 0.3], 0.1, 1e-4)
    file.write_text("cliprange: 1e-1\n")
    assert parse("--config", str(file)).cliprange == [0.1]
    for folder in (".", "..", "1.2.3"):
        assert parse("--eval_dataset_name", folder).eval_dataset_name == folder


def test_yaml_supplies_values_that_flags_override(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model_name_or_path: m\ndataset_name: d\noutput_dir: o\nlearning_rate: 1e-5\nbeta: 1\nmax-steps: 9\n"
    )
    config = parse_config(TrainConfig, ["--config", str(file), "--beta", "0.2"])
    assert (config.learning_rate, config.beta, config.max_steps) == (1e-5, 0.2, 9)


def test_one_entry_of_a_list_may_stand_alone(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("reward_funcs: rew.py:reward\nreward_weights: 2\nreport_to: wandb\nlora_target_modules: q_proj\n")
    config = parse("--config", str(file))
    assert (config.reward_funcs, config.reward_weights) == (["rew.py:reward"], [2.0])
    assert (config.report_to, config.lora_target_modules) == (["wandb"], "q_proj")
    with pytest.raises(ConfigError, match=r"reward_weights: expected a list of numbers or none, got 'two'"):
        TrainConfig(**REQUIRED, reward_weights="two")  # type: ignore[arg-type]


def test_functions_are_options_in_python() -> None:
    """What a file can hold of them is where they come from."""
    config = TrainConfig(**REQUIRED, reward_funcs=[parse, "reward_model", Format()])
    assert config.reward_funcs[:2] == [parse, "reward_model"]
    names = [f"{__name__}:parse", "reward_model", "rlhf_engine.scoring.verifiable:Format"]
    assert config.to_dict()["reward_funcs"] == names
    assert yaml.safe_load(config.to_yaml())["reward_funcs"] == names
    with pytest.raises(ConfigError, match=r"reward_funcs: expected a list of strings, got \[1\]"):
        TrainConfig(**REQUIRED, reward_funcs=[1])  # type: ignore[list-item]


def test_printed_config_reads_back_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = shlex.split("--learning_rate 1e-5 --reward_funcs reward_model x:y --reward_weights 1 2 --kl_target 0.1")
    with pytest.raises(SystemExit) as stop:
        parse(*argv, "--print-config")
    assert stop.value.code == 0
    file = tmp_path / "c.yaml"
    file.write_text(capsys.readouterr().out)
    assert parse_config(TrainConfig, ["--config", str(file)]) == parse(*argv)


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_config(SFTConfig, ["--help-all"], prog="rlhf-engine sft")
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(text.count(f"\n  --{f.name} ") == 1 for f in dataclasses.fields(SFTConfig))
    assert "\nPasses over rows of prompts and answers:\n" in text  # the section's own sentence
    assert "--full" in text


@pytest.mark.parametrize("cls", [TrainConfig, SFTConfig, RewardConfig, GenerateConfig, EvaluateConfig])
def test_help_shows_what_is_used_most_with_an_example(capsys, cls):
    with pytest.raises(SystemExit) as stop:
        parse_config(cls, ["--help"], prog="x")
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert {line.split()[0] for line in text.splitlines() if line.startswith("  --")} == {
        *(f"--{name}" for name in cls.FIRST),
        *("--config", "--print_config", "--help_all"),
    }
    assert len(cls.FIRST) == 5
    assert f"the other {len(dataclasses.fields(cls)) - 5} options" in " ".join(text.split())
    words = shlex.split(cls.EXAMPLE)
    assert words[0] == "rlhf-engine"
    parse_config(cls, words[2:])  # the example can be run


def test_errors_name_the_option() -> None:
    for argv, message in [
        (["--lerning_rate", "1"], r"unknown option --lerning_rate; did you mean --learning_rate\?"),
        (["--epochs", "3"], r"unknown option --epochs; did you mean --num_train_epochs\?"),
        (["--bf16"], r"unknown option --bf16; did you mean --dtype bfloat16\?"),
        (["--max-new-tokens", "9"], r"max_new_tokens; did you mean --max_completion_length\?"),
        (["--use_vllm"], r"unknown option --use_vllm; did you mean --vllm_server_base_url\?"),
        (["--use_liger_kernel"], r"unknown option --use_liger_kernel; losses never hold the logits; kernels says whos"),
        (["stray"], r"output_dir: expected a string, got 'o stray'"),
        (["--shard_base", "maybe"], r"shard_base: expected true or false, got 'maybe'"),
        (["--cliprange", "0.1", "0.2", "0.3"], r"cliprange: expected one or two numbers > 0, got \[0.1, 0.2, 0.3\]"),
        (["--missing_eos_penalty", "-1"], r"missing_eos_penalty: expected a number >= 0, or =SCORE such as =-1, got"),
        (["--missing_eos_penalty==x"], r"missing_eos_penalty: expected a number >= 0, or =SCORE .*, got '=x'"),
        (["--max_steps", "1_0"], r"max_steps: expected an integer, got '1_0'"),
        (["--max_steps", "2.5"], r"max_steps: expected an integer, got '2\.5'"),
        (["--max_steps"], r"max_steps: needs a value"),
        (["--max_steps", "0"], r"max_steps: expected an integer >= 1, got 0"),
        (["--lora_dropout", "1"], r"lora_dropout: expected a number < 1, got 1\.0"),
        (["--beta", "nan"], r"beta: expected a number, got nan"),
        (["--kl_estimator", "k2"], r"kl_estimator: expected one of 'k1', 'k3', 'exact', got 'k2'"),
        (["--device", "tpu"], r"device: expected auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["--reward_weights", "1", "2"], r"reward_weights: expected 1 numbers, .* got 2"),
        (
            ["--reward_model_path", "x", "--reward_funcs", "a:b"],
            r"reward_model_path: expected it unset without 'reward_model'",
        ),
        (["--generation_batch_size", "63"], r"expected a multiple of num_mini_batches \(4\), got 63"),
        (["--warmup_steps", "101"], r"warmup_steps: expected at most the run's 100 steps, got 101"),
        (["--report_to", "mlflow"], r"report_to: expected names among tensorboard, trackio, wandb, got \['mlflow'\]"),
        (["--kl_target", "5", "--beta", "0"], r"beta: expected more than 0 with kl_target, .* got 0"),
        (["--kl_target", "5", "--algorithm", "online_dpo"], r"kl_target: expected it unset for online_dpo"),
        (["--max_bad_rows", "1.5"], r"max_bad_rows: expected a share below 1 or a whole number of rows, got 1.5"),
        (["--eval_steps", "5"], r"eval_steps: expected 0, or an eval_dataset_name, got 5"),
        (["--eval_dataset_name", "1.5"], r"eval_dataset_name: expected a source or a share between 0 and 1, got '1.5'"),
        (["--algorithm", "cispo", "--cliprange", "7", "0.3"], r"cliprange: expected one number for cispo, .*got \[7.0"),
        (["--no_whiten_advantages"], r"unknown option --no_whiten_advantages; scale_rewards none"),
        (["--out", "x"], r"unknown option --out$|--out; did you mean"),
        (["--critic_warmup_steps", "3"], r"unknown option --critic_warmup_steps; actor and critic learn from the"),
        (["--overwrite_output_dir"], r"unknown option --overwrite_output_dir; resume_from_checkpoint"),
        (["--seed", str(2**70)], r"^seed: expected an integer .*4294967295, got 1180591620717411303424"),
        (["--lora_r", "99999999"], r"^lora_r: expected an integer .*16384, got 99999999"),
        (["--learning_rate", "1" + "0" * 400], "^learning_rate: expected a number"),
        (["--generation_batch_size", str(2**70)], r"expected an integer .*2147483647, got 118"),
        (["--beta", "1", "--beta", "2"], r"beta: given twice, as 1\.0 and as 2\.0"),
        (["--config", "no/such.yaml"], r"config: expected the path of a YAML file, but there is no file"),
        (["--dtype", "bf16"], r"dtype: expected one of 'float32', 'bfloat16', got 'bf16'; did you mean 'bfloat16'\?$"),
        (["--algorithm", "dpo"], r"'rloo', got 'dpo'; did you mean 'online_dpo'\?$"),
        (["--algorithm", "zzz"], "'rloo', got 'zzz'$"),
    ]:
        with pytest.raises(ConfigError, match=message):
            parse(*argv)

    with pytest.raises(ConfigError, match=r"missing required options: .*--output_dir"):
        parse_config(TrainConfig, ["--model_name_or_path", "m", "--seed", "1"])
    with pytest.raises(ConfigError, match=r"unexpected argument 'word'"):
        parse_config(DemoConfig, ["word"])


SECTIONED = """
model_name_or_path: m
dataset_name: d
output_dir: o
learning_rate: 1e-3
ppo:
  vf_coef: 0.3
  learning_rate: 2e-3
rloo: {num_generations: 8}
grpo:
"""


def test_one_file_serves_several_algorithms(tmp_path, capsys) -> None:
    file, again = tmp_path / "c.yaml", tmp_path / "again.yaml"
    file.write_text(SECTIONED.replace("grpo:", "grpo: {}"))
    of_ppo, of_rloo = "ppo (vf_coef, learning_rate)", "rloo (num_generations)"
    for flags, algorithm, generations, rate, left in (
        ((), "ppo", None, 2e-3, of_rloo),
        (("--algorithm", "rloo"), "rloo", 8, 1e-3, of_ppo),
        (("--algorithm", "grpo", "--learning_rate", "5e-4"), "grpo", None, 5e-4, f"{of_ppo}; {of_rloo}"),
    ):
        config = parse_config(TrainConfig, ["--config", str(file), *flags])
        assert (config.algorithm, config.num_generations, config.learning_rate) == (algorithm, generations, rate)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"note: algorithm {algorithm!r} leaves out of {file} the sections {left}")
        again.write_text(config.to_yaml())
        assert parse_config(TrainConfig, ["--config", str(again)]) == config


def test_sections_are_checked_whether_they_are_read_or_not(tmp_path) -> None:
    file = tmp_path / "c.yaml"
    for old, new, message in (
        ("vf_coef", "vf_coeff", r"unknown key in section 'ppo' of .*c\.yaml: vf_coeff; did you mean vf_coef\?"),
        ("rloo:", "rlooo:", r"unknown key in .*c\.yaml: rlooo; did you mean rloo\?"),
        ("num_generations: 8", "algorithm: grpo", "expected algorithm outside of section 'rloo'"),
        ("grpo:", "grpo: 3", "expected `name: value` lines in section 'grpo', got 3"),
        ("learning_rate: 1e-3", "advantage_clip: 3.0", "advantage_clip: expected it unset for ppo, .* in a section of"),
    ):
        file.write_text(SECTIONED.replace("grpo:", "grpo: {}").replace(old, new).replace("grpo: 3 {}", "grpo: 3"))
        with pytest.raises(ConfigError, match=message):
            parse_config(TrainConfig, ["--config", str(file)])
    file.write_text("ppo: {seed: 1}\n")  # commands without an algorithm have no sections
    with pytest.raises(ConfigError, match="unknown key"):
        parse_config(GenerateConfig, ["--config", str(file), "--model_name_or_path", "m"])


TWICE = (
    *("seed: 1\nbeta: 0.1\nseed: 2\n", "seed: 1\n'seed': 1\n"),
    *("{seed: 1,\n beta: 0.1, seed: 2}", "{seed: 1, seed: 2}"),
)


def test_yaml_errors(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    for text, message in (
        ("bf16: true", r"unknown key in .*: bf16; did you mean dtype: bfloat16\?"),
        ("load_in_4bit: true", r"unknown key in .*: load_in_4bit; quantization 4bit"),
        ("packing: true", r"unknown key in .*: packing; rows are always packed, without padding$"),
        ("lerning_rate: 1", r"unknown key in .*: lerning_rate; did you mean learning_rate\?"),
        ("max_steps: '3'", r"max_steps: expected an integer, got '3'"),
        ("max_steps: true", r"max_steps: expected an integer, got True"),
        ("beta: high", r"beta: expected a number, got 'high'"),
        ("seed: [1", r"is not valid YAML"),
        ("- a\n- b", r"expected `name: value` lines, got a list"),
        *((text, r"config: .*yaml is not valid YAML: expected each key once, got 'seed' in l") for text in TWICE),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            parse("--config", str(file))


def test_names_of_other_libraries_lead_to_options_that_there_are() -> None:
    options = {field.name for cls in (TrainConfig, SFTConfig, RewardConfig) for field in dataclasses.fields(cls)}
    pairs = [pair.split("=") for pair in parser._OURS.split()]
    assert {ours.partition(":")[0] for _, ours in pairs} <= options
    names = [name for name, _ in pairs] + " ".join(parser._WITHOUT).split()
    assert len(names) == len(set(names))
    assert not set(names) & {field.name for field in dataclasses.fields(TrainConfig)}


def test_none_is_a_choice_where_there_is_one(tmp_path: Path) -> None:
    served = ("--vllm_server_base_url", "http://x:1", "--off_policy_correction")
    assert parse(*served, "none").off_policy_correction == "none"
    assert parse(*served, "null").off_policy_correction is None
    (tmp_path / "c.yaml").write_text("off_policy_correction: none\n")
    assert parse(*served[:2], "--config", str(tmp_path / "c.yaml")).off_policy_correction == "none"


def test_none_is_an_empty_list(tmp_path: Path) -> None:
    assert parse("--report_to", "none").report_to == []
    file = tmp_path / "c.yaml"
    for value in ("none", '"none"', "[]"):
        file.write_text(f"report_to: {value}\nreward_weights: none\n")
        config = parse("--config", str(file))
        assert (config.report_to, config.reward_weights) == ([], None)


def test_python_construction_is_held_to_the_same_rules() -> None:
    for options, message in (
        ({"lora_r": 0}, "lora_r: expected an integer >= 1, got 0"),
        ({"lora_r": 1.5}, r"lora_r: expected an integer, got 1\.5"),
        ({"output_dir": ""}, "output_dir: expected something that is not empty"),
        ({"lora_rank": 1}, "lora_rank"),
    ):
        with pytest.raises(TypeError if "lora_rank" in options else ConfigError, match=message):
            TrainConfig(**{**REQUIRED, **options})
    for options, message in (  # exactly one source of prompts
        ({}, "prompt: expected at least one prompt"),
        ({"prompt": ["a"], "prompt_file": "b"}, "prompt_file: expected one of prompt, prompt_file and dataset_name"),
        ({"prompt": ["a"], "greedy": True, "num_generations": 2}, "num_generations: expected 1 with greedy"),
    ):
        with pytest.raises(ConfigError, match=message):
            GenerateConfig(model_name_or_path="m", **options)


def test_configs_do_not_share_lists() -> None:
    config = parse()
    config.to_dict()["reward_funcs"].append("x:y")
    assert config.reward_funcs == ["reward_model"]
    assert parse().reward_funcs is not config.reward_funcs


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_that_are_sums_per_answer_are_not_scaled_down_unless_wanted(algorithm: str) -> None:
    is_sum = algorithm in ("copg", "remax", "rloo", "reinforce")
    assert parse("--algorithm", algorithm).largest_grad_norm == (None if is_sum else 1.0)
    assert parse("--algorithm", algorithm, "--max_grad_norm", "0.5").largest_grad_norm == 0.5
    assert parse("--algorithm", algorithm, "--max_grad_norm", "0").largest_grad_norm is None
    assert parse_config(SFTConfig, [*ARGV, "--full"]).largest_grad_norm == 1.0


def test_files_of_answers_of_before_go_on() -> None:
    config = GenerateConfig(model_name_or_path="m", prompt=["x"], num_generations=2, temperature=0.5)
    assert _settings(config) == "52a5be4e3426"  # in what `generate --out` wrote when reward_adapter was an option
