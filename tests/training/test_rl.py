"""The PPO loop: stop and go on with the same floats, reward sources, and everything that must stop a run."""

import dataclasses
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_kernels.runtime import native, registry
from safetensors.torch import save_file

from rlhf_engine.errors import ConfigError, MismatchError, NonFiniteError, RewardError
from rlhf_engine.hydra import HydraModel
from rlhf_engine.runs.headline import headlines
from rlhf_engine.runs.metrics import Columns, read_metrics
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.sft import SftTrainer
from tests.training.test_data import PROMPTS, sft_config, train_config, write_model, write_reward, write_rows

TIMINGS = ("seconds/", "tokens_per_second", "samples_per_second", "peak_memory_bytes")


@pytest.fixture(scope="module")
def sft_adapter(model, tmp_path_factory) -> Path:
    """A LoRA slot with its reward head, made by supervised fine-tuning on the same base."""
    output = tmp_path_factory.mktemp("sft") / "out"
    SftTrainer(sft_config(model, output, mode="lora", max_steps=3)).run()
    return output


class Stop(Exception):
    """What ends a run from outside."""


def stop_after(step: int):
    def on_step(done: int, metrics: dict[str, float]) -> None:
        if done == step:
            raise Stop

    return on_step


def trained(trainer: RlTrainer) -> dict[str, torch.Tensor]:
    tensors = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    return {**tensors, **{f"optimizer {k}": t.clone() for k, t in trainer.optimizer.state_tensors().items()}}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def without_timings(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if not k.startswith(TIMINGS)}


def metrics(trainer: RlTrainer) -> list[dict[str, Any]]:
    return [without_timings(row) for row in read_metrics(trainer.output / "metrics.jsonl")]


def saved_run(config, steps: int) -> RlTrainer:
    """A run of some steps with a checkpoint after each, without the curves that take most of a short run's time."""
    trainer = RlTrainer(config)
    for _ in range(steps):
        trainer.step()
        trainer.save()
    return trainer


def test_going_back_drops_the_steps_after(model, tmp_path):
    output = tmp_path / "run"
    saved_run(train_config(model, output, save_total_limit=None), 4)
    (output / "final").mkdir()
    (output / "checkpoint-3" / "old").touch()
    back = train_config(model, output, resume_from_checkpoint=str(output / "checkpoint-2"))
    with pytest.raises(Stop):
        RlTrainer(back).run(stop_after(3))
    # checkpoint-3 and -4 belonged to the steps that are being made again, of which one was done
    assert [p.name for p in sorted(output.glob("checkpoint-*"))] == ["checkpoint-2", "checkpoint-3"]
    assert not (output / "checkpoint-3" / "old").exists()
    assert not (output / "final").exists()
    assert RlTrainer(train_config(model, output, resume_from_checkpoint="auto")).state.step == 3


@pytest.mark.parametrize("options", [{}, {"algorithm": "online_dpo", "num_generations": 4}])
def test_micro_batches_of_so_many_tokens_make_the_same_step(model, tmp_path, options):
    found = []
    for tokens in (None, 40):
        config = train_config(model, tmp_path / str(tokens), max_steps=1, adam_epsilon=1e-3, **options)
        config = dataclasses.replace(config, per_device_train_batch_size=8, max_tokens_per_micro_batch=tokens)
        trainer = RlTrainer(config)
        update = trainer.step()
        assert update["optimizer_steps"] == 2
        found.append((update["loss"], trained(trainer)))
    (loss, whole), (packed_loss, parts) = found
    assert packed_loss == pytest.approx(loss, rel=1e-4)
    for name, p in whole.items():
        torch.testing.assert_close(parts[name], p, rtol=1e-3, atol=1e-5, msg=name)


def test_evaluation_and_samples(model, tmp_path):
    heldout = write_rows(tmp_path / "heldout.jsonl", [{"prompt": p} for p in PROMPTS[:3]])
    options = {"max_steps": 2, "eval_steps": 2, "eval_dataset_name": str(heldout)}
    trainer = RlTrainer(train_config(model, tmp_path / "run", **options))
    trainer.run()
    before, first, second = metrics(trainer)
    assert set(before) == {"step", "eval/kl", "eval/reward"}
    assert (before["step"], before["eval/kl"]) == (0, 0.0)  # of a policy that is its reference
    assert "eval/reward" not in first
    assert second["eval/kl"] > 0
    assert isinstance(second["eval/reward"], float)
    assert trainer.state.best_step == 2  # no checkpoint has the weights of step 0
    reward = next(h for h in headlines(Columns(metrics(trainer)), {}, "done") if h.label == "Reward, held out")
    assert reward.note == "step 0 → 2"
    longer = RlTrainer(
        train_config(model, tmp_path / "run", **{**options, "max_steps": 3}, resume_from_checkpoint="auto")
    )
    longer.run()
    assert metrics(longer)[:3] == [before, first, second]
    assert [row["step"] for row in metrics(longer)] == [0, 1, 2, 3]
    text = (trainer.output / "samples.md").read_text()
    assert text.count("**Before**") == text.count("**After**") == 3
    assert PROMPTS[0] in text


def test_evaluations_in_which_no_answer_ends_are_said_once(model, tmp_path):
    heldout = write_rows(tmp_path / "heldout.jsonl", [{"prompt": p} for p in PROMPTS[:2]])
    options = {"max_steps": 3, "eval_steps": 1, "eval_dataset_name": str(heldout), "max_completion_length": 1}
    trainer = RlTrainer(train_config(model, tmp_path / "run", **options))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        trainer.run()
    ended = [str(w.message) for w in said if "held-out prompt" in str(w.message)]
    assert ended == ["max_completion_length: no answer to a held-out prompt ended within 1 tokens"]


def test_lane_and_functions_are_weighted(model, tmp_path):
    spec = write_reward(tmp_path, "return [float(len(ids)) for ids in completion_ids]", "length")
    first = {}
    for name, options in {
        "reward_model": {"reward_funcs": ["reward_model"]},
        "length": {"reward_funcs": [spec]},
        "both": {"reward_funcs": ["reward_model", spec], "reward_weights": [2.0, -0.5]},
    }.items():
        trainer = RlTrainer(train_config(model, tmp_path / name, max_steps=1, **options))
        assert ("reward" in trainer.model.roles) == (name != "length")
        first[name] = trainer.step()
    # the same policy and seed, so the same answers
    assert first["length"]["reward"] == first["length"]["completions/mean_length"]
    assert first["both"]["reward"] == pytest.approx(
        2 * first["reward_model"]["reward"] - 0.5 * first["length"]["reward"]
    )
    assert first["both"]["rewards/reward_model"] == pytest.approx(first["reward_model"]["reward"])
    assert first["both"]["rewards/length"] == pytest.approx(first["length"]["reward"])
    assert not [k for k in first["reward_model"] if k.startswith("rewards/")]
    # a function of the lane's name does not replace it
    spec = write_reward(tmp_path, "return [1.0] * len(prompts)", "reward_model")
    both = RlTrainer(train_config(model, tmp_path / "b", reward_funcs=["reward_model", spec])).step()
    assert both["reward"] == pytest.approx(first["reward_model"]["reward"] + 1)
    assert both["rewards/reward_model_function"] == 1.0


def test_none_leaves_rows_out_of_the_update(model, tmp_path):
    spec = write_reward(tmp_path, "return [None if i % 4 == 1 else 1.0 for i in range(len(prompts))]")
    trainer = RlTrainer(train_config(model, tmp_path / "run", reward_funcs=[spec]))
    seen: list[int] = []
    base_model = trainer.model.backbone().base_model
    handle = base_model.register_forward_pre_hook(
        lambda m, a, k: seen.append(k["input_ids"].numel()) if torch.is_grad_enabled() else None, with_kwargs=True
    )
    found = trainer.step()
    handle.remove()
    assert found["completions/skipped"] == 2
    assert found["reward"] == 1.0
    lengths = [len(i) for i in trainer.train_set.ids]
    # 6 sequences in two lanes, each of at least a prompt and a token
    assert 2 * 6 * (min(lengths) + 1) <= sum(seen) <= 2 * 6 * (max(lengths) + 8)
    whole = RlTrainer(train_config(model, tmp_path / "whole"))
    assert whole.step()["completions/skipped"] == 0


def test_a_run_from_python_shows_its_steps(model, tmp_path, capsys):
    RlTrainer(train_config(model, tmp_path / "run", max_steps=2)).run()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ppo ")]
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
    assert all("reward" in line and "s/step" in line for line in lines)


def test_what_reward_functions_log_of_an_evaluation_has_its_name(model, tmp_path):
    def logs(completion_ids, log_metric, **_):
        log_metric("length", sum(map(len, completion_ids)) / len(completion_ids))
        return [0.0] * len(completion_ids)

    held_out = {"eval_dataset_name": str(tmp_path / "prompts.jsonl"), "eval_steps": 1, "max_steps": 1}
    trainer = RlTrainer(train_config(model, tmp_path / "run", reward_funcs=[logs], **held_out))
    trainer.run(lambda step, row: None)
    _, row = metrics(trainer)
    assert row["length"] == row["completions/mean_length"]
    assert 1 <= row["eval/length"] <= 8


def test_tokens_that_the_tokenizer_lacks_are_said(tmp_path):
    padded = write_model(tmp_path / "padded", vocab_size=400)
    trainer = RlTrainer(train_config(padded, tmp_path / "run", temperature=5.0))
    with pytest.warns(UserWarning, match=rf"token ids of {len(trainer.tokenizer)} and more, which the model has"):
        trainer.step()


def test_answers_that_never_end_pay_the_penalty_or_have_a_score_of_their_own(model, tmp_path):
    options = {"reward_funcs": [write_reward(tmp_path, "return [5.0] * len(prompts)")], "max_completion_length": 2}

    def first(name: str, **changes: Any) -> tuple[float, float]:
        found = RlTrainer(train_config(model, tmp_path / name, **options, **changes)).step()
        return found["reward"], found["completions/unfinished_ratio"]

    reward, unfinished = first("free")
    assert 0 < unfinished <= 1
    assert reward == 5
    assert first("penalty", missing_eos_penalty=3.0) == (pytest.approx(5 - 3 * unfinished), unfinished)
    assert first("score", missing_eos_penalty="=-1") == (pytest.approx(5 - 6 * unfinished), unfinished)


def without_tokenizer(folder: Path) -> Path:
    write_model(folder)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    return folder


def without_eos(folder: Path) -> Path:
    write_model(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if path.is_file():
            found = json.loads(path.read_text())
            found.pop("eos_token", None)
            path.write_text(json.dumps(found))
    return folder


def broken_model(folder: Path) -> Path:
    """A model folder whose weights cannot be read: whoever reports something else found it earlier."""
    write_model(folder)
    (folder / "model.safetensors").write_bytes(b"never read")
    return folder


def rewards(body: str):
    return lambda path: {"reward_funcs": [write_reward(path, body)]}


def data(*rows: Any):
    return lambda path: {"dataset_name": str(write_rows(path / "rows.jsonl", list(rows)))}


MODEL = "model_name_or_path"


def other_model(make, *args, **options):
    return lambda path: {MODEL: str(make(path / "m", *args, **options))}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (data({"prompt": ""}), r"rows\.jsonl:1: expected text in column 'prompt', got an empty prompt"),
        (data({"text": "red"}), r"dataset_name: expected the columns \(prompt\), or messages, .*, got \['text'\]"),
        (data({"prompt": "red"}, {"prompt": "cat " * 60}), r"rows\.jsonl:2: expected at most 56 tokens .* got 61"),
        (lambda p: {"max_prompt_length": 2}, r"jsonl:1: expected at most 2 tokens \(max_prompt_length\), got 3"),
        (lambda p: {"max_completion_length": 64}, r"prompts\.jsonl:1: expected at most 0 tokens"),
        (lambda p: {"dataset_name": str(p / "none.jsonl")}, "^dataset_name: expected .* which is not a file"),
        (lambda p: {"eval_dataset_name": str(p / "no.jsonl")}, "^eval_dataset_name: expected .* which is not a file"),
        (rewards("return [1.0]"), "reward function 'reward': expected 2 rewards, got 1"),
        (lambda p: {"reward_funcs": ["reward_model"] * 2}, "reward_funcs: expected 'reward_model' at most once"),
        (lambda p: {"reward_funcs": [f"{p}/none.py:f"]}, "reward_funcs: there is no file"),
        (lambda p: {"resume_from_checkpoint": str(p / "none")}, "resume_from_checkpoint: expected 'auto', 'restart' o"),
        (lambda p: {"resume_from_checkpoint": str(p)}, r"resume_from_checkpoint: expected trainer_state\.json in"),
        (lambda p: {"actor_adapter": str(p / "none")}, r"adapter: expected a folder with adapter_config\.json"),
        (lambda p: {MODEL: str(p / "no")}, "model_name_or_path: expected a model folder or owner/name"),
        (lambda p: {MODEL: str(p)}, "model_name_or_path: expected a folder with config.json"),
        (other_model(without_tokenizer), "model_name_or_path: expected a tokenizer in"),
        (other_model(without_eos), "expected a tokenizer with an end-of-sequence token, got one without"),
        (other_model(write_model, reward_head=False), r"reward_funcs: 'reward_model': expected a trained reward head"),
    ],
)
def test_found_before_the_model_is_loaded(tmp_path, options, message):
    (tmp_path / "given").mkdir()
    config = train_config(broken_model(tmp_path / "base"), tmp_path / "run", **options(tmp_path / "given"))
    with pytest.raises((ConfigError, ValueError, TypeError, RewardError), match=message):
        RlTrainer(config)
    assert not (tmp_path / "run").exists()


def test_micro_batches_hold_the_longest_answer_or_two_of_them(model, tmp_path):
    rows = write_rows(tmp_path / "p.jsonl", [{"prompt": "red cat"}, {"prompt": "the dog runs and the"}])
    for options, least in (({}, 14), ({"algorithm": "online_dpo", "num_generations": 4}, 28)):
        options["dataset_name"] = str(rows)
        with pytest.raises(ConfigError, match=f"max_tokens_per_micro_batch: expected at least {least}, the tokens of"):
            RlTrainer(train_config(model, tmp_path / "a", max_tokens_per_micro_batch=least - 1, **options))
        RlTrainer(train_config(model, tmp_path / "b", max_tokens_per_micro_batch=least, **options))


def test_found_while_the_model_is_loaded(model, tmp_path, sft_adapter):
    def construct(**options):
        RlTrainer(train_config(model, tmp_path / "run", **options))

    with pytest.raises(ValueError, match=r"target_modules: expected name endings among \['down_proj'.*got \['c_attn'"):
        construct(lora_target_modules=["c_attn"])
    other = write_model(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"expected an adapter of this base .* got one of another base"):
        RlTrainer(train_config(other, tmp_path / "run", reference_adapter=str(sft_adapter)))
    with pytest.raises(ValueError, match=r"model_name_or_path: .* cannot be loaded"):
        RlTrainer(train_config(broken_model(tmp_path / "broken"), tmp_path / "run"))
    with pytest.raises(ValueError, match=r"model_name_or_path: expected a model folder, got .* which holds an adapter"):
        RlTrainer(train_config(sft_adapter, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_elsewhere_is_not_gone_on_with_in_a_folder_with_a_run(model, tmp_path):
    first = saved_run(train_config(model, tmp_path / "run"), 1)
    saved_run(train_config(model, tmp_path / "other"), 1)
    other = {"resume_from_checkpoint": str(tmp_path / "other" / "checkpoint-1")}
    with pytest.raises(ConfigError, match=r"output_dir: expected one without a run, got .* \['checkpoint-1'\]; use"):
        RlTrainer(train_config(model, tmp_path / "run", **other))
    assert same(
        trained(first), trained(RlTrainer(train_config(model, tmp_path / "run", resume_from_checkpoint="auto")))
    )


def test_a_tokenizer_without_a_padding_token_is_fine(tmp_path):
    folder = write_model(tmp_path / "m")
    path = folder / "tokenizer_config.json"
    found = json.loads(path.read_text())
    found.pop("pad_token")
    path.write_text(json.dumps(found))
    trainer = RlTrainer(train_config(folder, tmp_path / "run"))
    assert trainer.tokenizer.pad_token is None
    assert trainer.step()["optimizer_steps"] == 2


def test_a_reward_adapter_brings_its_own_head(model, tmp_path, sft_adapter):
    trainer = RlTrainer(train_config(model, tmp_path / "run", reward_model_path=str(sft_adapter)))
    assert trainer.model.roles["reward"].slot == "reward"
    trainer.step()
    bare = tmp_path / "bare"
    shutil.copytree(sft_adapter, bare)
    (bare / "heads.safetensors").unlink()
    (bare / "manifest.json").unlink()
    # the base has a reward head, but that was not trained on this adapter's hidden states
    with pytest.raises(
        ConfigError,
        match=r"'reward_model': expected a trained reward head in heads\.safetensors of '.*bare' .*got none",
    ):
        RlTrainer(train_config(model, tmp_path / "run2", reward_model_path=str(bare)))
    save_file({"value.weight": torch.ones(1, 24), "value.bias": torch.ones(1)}, bare / "heads.safetensors")
    with pytest.raises(ConfigError, match="expected a trained reward head"):
        RlTrainer(train_config(model, tmp_path / "run2", reward_model_path=str(bare)))


def assert_stops(config, error, message) -> None:
    """The run stops after two steps with the error, and goes on from its checkpoint of step 2."""
    trainer = RlTrainer(config)
    at_two: dict[str, torch.Tensor] = {}

    def on_step(step: int, found: dict[str, float]) -> None:
        if step == 2:
            trainer.save()
            at_two.update(trained(trainer))

    with pytest.raises(error, match=message):
        trainer.run(on_step)
    assert [row["step"] for row in metrics(trainer)] == [1, 2]
    assert all(p.grad is None for p in trainer.model.parameters())
    resumed = RlTrainer(dataclasses.replace(config, resume_from_checkpoint="auto", reward_funcs=["reward_model"]))
    assert resumed.state.step == 2
    mine = trained(resumed)
    assert all(torch.equal(mine[name], tensor) for name, tensor in at_two.items())
    assert resumed.step()["optimizer_steps"] == 2


@pytest.mark.parametrize(
    ("late", "error", "message"),
    [
        ("[1e38] * len(prompts)", NonFiniteError, r"(policy/loss|value/loss) is (nan|inf) at epoch 0, minibatch 0"),
        ("[1e300] * len(prompts)", RewardError, "reward function 'reward': expected finite numbers of float32, got 1e"),
    ],
)
def test_rewards_that_turn_bad_stop_the_run(model, tmp_path, late, error, message):
    # the first calls are the dry run's and the samples', so the fifth belongs to step 3
    body = f"good = [float(len(c)) for c in completions]\nreturn good if len(calls) < 5 else {late}"
    config = train_config(model, tmp_path / "run", reward_funcs=["reward_model", write_reward(tmp_path, body)])
    assert_stops(config, error, message)


POISONED = [
    (lambda m: list(m.backbone().slot("actor").parameters())[-1], "log-probs of the rollout are not finite"),
    # in attention scores, torch's kernels may turn NaN into a number again
    (lambda m: next(m.backbone().slot("actor").parameters()), "log-probs of the (rollout|actor) are not finite"),
    (lambda m: list(m.backbone().slot("critic").parameters())[-1], "values of the critic are not finite"),
    (lambda m: next(m.backbone().slot("critic").parameters()), "values of the critic are|gradient of critic is"),
    (lambda m: m.backbone().model.model.norm.weight, "log-probs of the rollout are not finite"),
    (lambda m: m.heads["reward"].bias, "scores of the reward role are not finite"),
    (lambda m: m.heads["value"].weight, "values of the critic are not finite"),
]


def test_a_poisoned_weight_stops_the_run_and_names_the_role(model, tmp_path, survived):
    trainer = RlTrainer(train_config(model, tmp_path / "run"))
    trainer.step()
    before = trained(trainer)
    for weight, message in POISONED:
        poisoned = weight(trainer.model).data.view(-1)
        kept = poisoned[0].clone()
        poisoned[0] = float("nan")
        with pytest.raises(NonFiniteError, match=message):
            trainer.step()
        poisoned[0] = kept
        assert same(trained(trainer), before), message
        assert all(p.grad is None for p in trainer.model.parameters())
    survived("faults", len(POISONED))


def test_later_steps_draw_other_answers_to_the_same_prompt(model, tmp_path):
    data = write_rows(tmp_path / "one.jsonl", [{"prompt": "red cat"}])
    options = {"dataset_name": str(data), "learning_rate": 0.0}
    trainer = RlTrainer(train_config(model, tmp_path / "run", **options))
    assert trainer.step()["reward"] != trainer.step()["reward"]


def test_rollout_and_training_must_agree(model, tmp_path):
    message = r"rollout and training log-probs differ by .* 1e-12 and 1e-10 in torch"
    with registry.use_backend("reference"):  # in C++ they may agree to the bit
        trainer = RlTrainer(train_config(model, tmp_path / "run", rollout_mismatch_bound=1e-12))
        with pytest.raises(MismatchError, match=message):
            trainer.step()


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize(("algorithm", "dtype"), [("ppo", "bfloat16"), ("grpo", "float32")])
def test_in_exact_mode_rollout_and_update_have_the_same_log_probs(model, tmp_path, algorithm, dtype):
    """The ratio of the first update is 1, to the bit, also after weights have moved."""
    options = {"exact": True, "dtype": dtype, "algorithm": algorithm, "temperature": 0.9}
    trainer = RlTrainer(train_config(model, tmp_path / "run", max_tokens_per_micro_batch=40, **options))
    for _ in range(3):
        found = trainer.step()
        assert found["mismatch/rollout_max"] == found["mismatch/update_max"] == 0.0
    assert found["grad_norm/actor"] > 0


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize("options", [{"async_mode": "overlap"}, {"async_mode": "blocks", "max_staleness": 1}])
def test_in_exact_mode_older_policies_have_the_log_probs_of_their_rollouts(model, tmp_path, options, monkeypatch):
    """The lane of the policy that drew runs for one answer in eight, and agrees to the bit."""
    scored: list[tuple[str, int]] = []
    score = HydraModel.score

    def counted(self, batch, roles, **named):
        scored.extend((role, batch.n_sequences) for role in roles)
        return score(self, batch, roles, **named)

    monkeypatch.setattr(HydraModel, "score", counted)
    trainer = RlTrainer(train_config(model, tmp_path / "run", exact=True, temperature=0.9, **options))
    try:
        for _ in range(4):
            assert trainer.step()["mismatch/rollout_max"] == 0.0
    finally:
        trainer.source.close()
    by_drawing_policy = [n for role, n in scored if role in ("past", "behaviour")]
    assert by_drawing_policy
    assert set(by_drawing_policy) == {1}, "of eight answers"


def test_exact_mode_names_what_it_cannot_serve(model, tmp_path):
    config = train_config(model, tmp_path / "run", exact=True, kernels="reference")
    message = r"exact: expected a backbone whose rows .* the kernels of 'reference' were asked"
    with registry.use_backend("reference"), pytest.raises(ValueError, match=message):
        RlTrainer(config)


def test_a_reference_that_is_not_where_the_actor_came_from_is_noticed(model, tmp_path, sft_adapter):
    # said to start as the reference (no actor_adapter), but moved away from it before the first step
    trainer = RlTrainer(train_config(model, tmp_path / "run", reference_adapter=str(sft_adapter)))
    with torch.no_grad():
        for p in trainer.model.backbone().slot("sft").parameters():
            p.zero_()
    with pytest.raises(MismatchError, match=r"the actor started as the reference, but before any update .*reference_a"):
        trainer.step()
    # an actor that brings weights of its own may differ
    own = RlTrainer(train_config(model, tmp_path / "own", actor_adapter=str(sft_adapter)))
    assert own.step()["kl"] != 0
