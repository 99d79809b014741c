"""PPO on answers from a server, in turn or beside the updates: a protocol stand-in, which is not vLLM."""

import dataclasses
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_engine.algorithms.base import Experience
from rlhf_engine.commands.main import main
from rlhf_engine.errors import ConfigError, GeneratorError, MismatchError, RolloutServerError
from rlhf_engine.rollout import PromptBatch
from rlhf_engine.rollout.request import row_seed
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.scoring.experience import Scoring, correct_age, correct_engine, mismatch_bound
from rlhf_engine.training.rl import RlTrainer, make_algorithm
from tests.distributed.test_data_parallel import assert_close, finish, start
from tests.rollout.stand_in import StandIn
from tests.training.test_data import PROMPTS, train_config, write_model, write_reward, write_rows
from tests.training.test_rl import same, trained, without_timings

pytestmark = pytest.mark.usefixtures("short_pauses")

MISMATCH = ("mismatch/rollout_k3", "mismatch/worst_sequence", "mismatch/truncated_ratio")
MISMATCH += ("mismatch/effective_sample_size", "mismatch/importance_weight_mean")
SERVER = ("mismatch/canary_mean", "mismatch/canary_max", "vllm/adapters_left")


@pytest.fixture
def server(model):
    with StandIn(model, name="tiny") as stand_in:
        yield stand_in


def config(model: Path, output: Path, server: StandIn, **changes: Any):
    return train_config(model, output, **{"vllm_server_base_url": server.url, **changes})


def test_the_run_is_the_local_one_where_draws_coincide(model, server, tmp_path):
    heldout = write_rows(tmp_path / "heldout.jsonl", [{"prompt": p} for p in PROMPTS[:3]])
    options = {"eval_dataset_name": str(heldout), "eval_steps": 2}
    local = RlTrainer(train_config(model, tmp_path / "local", exact=False, **options))
    remote = RlTrainer(config(model, tmp_path / "remote", server, **options))
    local.run()
    remote.run()
    ours, theirs = (read_metrics(t.output / "metrics.jsonl")[1:] for t in (local, remote))
    for mine, other in zip(ours, theirs, strict=True):
        assert {*MISMATCH, *SERVER} == {k for k in other if k not in mine and not k.startswith("seconds/")}
        for name, value in without_timings(mine).items():
            if not name.startswith("mismatch/"):
                assert other[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
        assert other["mismatch/importance_weight_mean"] == pytest.approx(1, abs=1e-5)
        assert other["mismatch/effective_sample_size"] == pytest.approx(1, abs=1e-5)
        assert other["mismatch/canary_max"] < 1e-4
    # a version goes there once, however often it is drawn from
    loaded = [body["lora_name"].rsplit("-", 2)[1] for body in server.requests("/v1/load_lora_adapter")]
    assert loaded == ["v0", "v1", "v2", "v3", "v4"]
    assert not server.adapters
    assert not (remote.output / "vllm").exists()
    assert local.state == remote.state
    assert (remote.output / "samples.md").read_text() == (local.output / "samples.md").read_text()


@pytest.mark.long
def test_ranks_that_never_hold_the_base_draw_from_one_server(model, server, tmp_path):
    heldout = write_rows(tmp_path / "heldout.jsonl", [{"prompt": p} for p in PROMPTS[:3]])
    options = {"eval_dataset_name": str(heldout), "eval_steps": 1, "max_steps": 2}
    options |= {"generation_batch_size": 12, "adam_epsilon": 1e-3}
    alone = RlTrainer(config(model, tmp_path / "alone", server, **options))
    alone.run()
    expected = trained(alone)
    made = config(model, tmp_path / "served", server, shard_base=True, **options)
    ahead = {**options, "algorithm": "grpo", "async_mode": "overlap", "max_steps": 3, "eval_steps": 3}
    beside = config(model, tmp_path / "ahead", server, shard_base=True, **ahead)
    jobs = [{"name": name, "do": "run", "config": c.to_dict()} for name, c in (("ranks", made), ("ahead", beside))]
    assert finish(start(tmp_path, jobs), tmp_path) == [0, 0]
    for rank in range(2):
        found = load_file(tmp_path / f"ranks-{rank}.safetensors")
        for name, tensor in expected.items():
            assert_close(found[name], tensor)
    rows = [read_metrics(tmp_path / name / "metrics.jsonl")[1:] for name in ("alone", "served")]
    for row, other in zip(*rows, strict=True):
        for name in ("reward", "completions/mean_length", "eval/reward"):
            assert other[name] == pytest.approx(row[name], rel=1e-3), name
    names = [body["lora_name"] for body in server.requests("/v1/load_lora_adapter")]
    loaded = [name.rsplit("-", 2)[1] for name in names if not name.startswith("ahead")]
    # every version goes there once, whichever rank is the first
    assert loaded == ["v0", "v1", "v2"] * 2
    # generators that draw beside the updates are compared by the learners, whose calls are of all ranks
    rows = read_metrics(tmp_path / "ahead" / "metrics.jsonl")[1:]
    assert [row["staleness/max"] for row in rows] == [0.0, 1.0, 1.0]
    assert rows[0]["mismatch/canary_max"] < 1e-4
    one, other = (load_file(tmp_path / f"ahead-{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not server.adapters
    assert not (tmp_path / "served" / "vllm").exists()


def off_by(shift: float):
    """Log-probs of drawn tokens that are this much too high on every other token."""

    def alter(payload: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
        values = payload["choices"][0]["logprobs"]["token_logprobs"]
        values[:] = [x + shift * (i % 2) for i, x in enumerate(values)]
        return payload

    return alter


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_weights_are_on_the_advantages_and_on_nothing_else(model, server, tmp_path, mode):
    made = config(model, tmp_path / "run", server, off_policy_correction=f"{mode}=1.2", rollout_mismatch_bound=1.0)
    server.alter = off_by(-0.3)  # ratios of 1 and e^0.3 = 1.35, truncated to 1.2
    trainer = RlTrainer(made)
    trainer.rollouts.sync(0)
    indices = list(range(8))
    prompts = PromptBatch.of(indices, trainer.train_set.ids, generations=1)
    rollout = trainer.rollouts.generate(prompts, trainer.sampling(0))
    scoring = Scoring(trainer.model, trainer.scorer, trainer.tokenizer, trainer.train_set)

    def experience(chosen):
        scored = scoring.experience(rollout, prompts, chosen, 0)
        return make_algorithm(chosen).learn_from(scored)[0], scored.metrics

    weighted, metrics_of_weighted = experience(made)
    plain, metrics_of_plain = experience(dataclasses.replace(made, off_policy_correction="none"))
    odd = rollout.batch.completion_position_M % 2 == 1
    if mode == "token_truncate":
        expected = torch.where(odd, 1.2, 1.0)
    else:
        several = torch.tensor(rollout.batch.completion_lens)[rollout.batch.sequence_of_M] > 1
        expected = torch.where(several, 1.2, 1.0)  # of an answer of two tokens or more: 1.35 and beyond
    torch.testing.assert_close(weighted.advantages_M, plain.advantages_M * expected, rtol=1e-4, atol=1e-6)
    for name in ("old_logprobs_M", "values_M", "returns_M"):
        assert torch.equal(getattr(weighted, name), getattr(plain, name)), name
    figures = {f"mismatch/{name}" for name in ("truncated_ratio", "effective_sample_size", "importance_weight_mean")}
    both = (metrics_of_weighted, metrics_of_plain)
    assert len({repr(sorted((k, v) for k, v in metrics.items() if k not in figures)) for metrics in both}) == 1
    assert metrics_of_weighted["mismatch/rollout_max"] == pytest.approx(0.3, abs=1e-4)
    assert metrics_of_weighted["mismatch/truncated_ratio"] > 0.3
    assert mismatch_bound(trainer.model, made) < 1.0  # the server's bound is none of the update
    # what stops a local run at once
    local = dataclasses.replace(
        made, vllm_server_base_url=None, rollout_mismatch_bound=None, off_policy_correction=None
    )
    with pytest.raises(MismatchError, match="rollout and training log-probs differ"):
        experience(local)
    filtered = dataclasses.replace(rollout, filtered=True)
    rollout = filtered
    with pytest.raises(ConfigError, match="top_k, top_p, min_p: expected none with answers from another engine"):
        experience(made)


def test_ratios_that_are_not_finite_stop_the_run(model, server, tmp_path):
    """Clamped, an infinite one would be just another truncated one."""

    def alter(payload: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
        if request["stop_token_ids"]:  # none in a canary's
            payload["choices"][0]["logprobs"]["token_logprobs"][0] = -200.0
        return payload

    trainer = RlTrainer(config(model, tmp_path / "run", server))
    trainer.rollouts.sync(0)
    prompts = PromptBatch.of([0, 1], trainer.train_set.ids, generations=1)
    rollout = trainer.rollouts.generate(prompts, trainer.sampling(0))
    log_ratio_M = torch.zeros_like(rollout.logprobs_M)
    correct_engine(experience_of(rollout), log_ratio_M, rollout.filtered, trainer.config)
    for bad in (float("nan"), float("inf"), -float("inf"), 90.0):
        log_ratio_M[1] = bad
        said = rf"expected finite ones, got log ratios of \[{bad}\] for 1 of"
        with pytest.raises(MismatchError, match=said):
            correct_engine(experience_of(rollout), log_ratio_M, rollout.filtered, trainer.config)
        with pytest.raises(MismatchError, match=said):
            correct_age(experience_of(rollout), rollout.logprobs_M - log_ratio_M, trainer.config)
    server.alter = alter
    for correction in (None, "none"):
        made = config(model, tmp_path / "other", server, off_policy_correction=correction)
        with pytest.raises(MismatchError, match=r"finite ones, got log ratios of \[19\d\..* for 8 of \d+ tokens"):
            RlTrainer(made).step()


def test_answers_without_a_reward_take_their_weights_with_them(model, server, tmp_path):
    """Ratios of the even answers are 1 and are left out; what stays is truncated throughout."""
    reward = write_reward(tmp_path, "return [None if i % 2 == 0 else 1.0 for i in range(len(prompts))]")
    seen: list[int] = []

    def alter(payload: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
        if request["stop_token_ids"]:  # none in a canary's
            seen.append(request["seed"])
            if request["seed"] in odd:
                values = payload["choices"][0]["logprobs"]["token_logprobs"]
                values[:] = [x - 1.0 for x in values]
        return payload

    odd = {row_seed(0, i) for i in range(1, 8, 2)}
    server.alter = alter
    found = RlTrainer(config(model, tmp_path / "run", server, reward_funcs=[reward])).step()
    assert len(seen) == 8
    assert odd < set(seen)
    assert found["completions/skipped"] == 4
    assert found["mismatch/truncated_ratio"] == 1.0
    assert found["mismatch/importance_weight_mean"] == 2.0


def test_the_canary_stops_what_the_correction_would_hide(model, server, tmp_path):
    server.alter = off_by(-0.3)
    with pytest.raises(MismatchError, match=r"differ by 0\.1\d*;"):
        RlTrainer(config(model, tmp_path / "run", server)).run()
    assert not server.adapters


def test_a_run_goes_on_after_its_server_has_died(model, server, tmp_path):
    whole = RlTrainer(config(model, tmp_path / "whole", server))
    for _ in range(4):
        whole.step()
    made = config(model, tmp_path / "run", server, save_steps=2)
    trainer = RlTrainer(made)

    def on_step(step: int, found: dict[str, float]) -> None:
        if step == 2:
            server.answers_left = 7  # canaries and three answers of the next step

    with pytest.raises(RolloutServerError, match="expected a vLLM server that answers /v1/completions"):
        trainer.run(on_step)
    assert [row["step"] for row in read_metrics(trainer.output / "metrics.jsonl")] == [1, 2]
    assert [name.split("-")[0] for name in server.adapters] == ["whole"]
    server.close()
    with pytest.raises(RolloutServerError, match=r"vllm_server_base_url .*: expected a vLLM server that answers /heal"):
        RlTrainer(dataclasses.replace(made, resume_from_checkpoint="auto"))
    with StandIn(model, name="tiny") as another:
        again = dataclasses.replace(made, resume_from_checkpoint="auto", vllm_server_base_url=another.url)
        resumed = RlTrainer(again)
        assert resumed.state.step == 2
        resumed.run()
    assert same(trained(whole), trained(resumed))  # the stand-in's draws depend on the request alone


def test_a_resumed_run_replaces_the_version_that_it_made_otherwise(model, server, tmp_path):
    made = config(model, tmp_path / "run", server)
    killed = RlTrainer(made)
    killed.step()
    killed.save()
    killed.step()
    (left,) = server.adapters  # version 1; the checkpoint of step 2 has version 2
    again = RlTrainer(dataclasses.replace(made, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1")))
    again.step()
    assert list(server.adapters) == [left]  # the very same weights
    with torch.no_grad():
        next(iter(again.model.trainable_parameters("actor").values())).add_(0.1)
    again.step()
    (other,) = server.adapters
    assert other.split("-v")[1].startswith("2-")


def test_runs_of_one_name_do_not_take_each_other_s_adapters(model, server, tmp_path):
    for place in ("a", "b"):
        RlTrainer(config(model, tmp_path / place / "run", server)).rollouts.sync(0)
    assert len(server.adapters) == 2  # of the very same weights


def test_what_is_wrong_is_found_before_the_model_is_loaded(model, server, tmp_path):
    broken = write_model(tmp_path / "tiny")
    (broken / "model.safetensors").write_bytes(b"never read")

    def construct(**changes: Any) -> None:
        RlTrainer(config(broken, tmp_path / "run", server, **changes))

    other = write_model(tmp_path / "other")
    message = r"one model called 'other' \(vllm serve --served-model-name\), got \['tiny of tiny'\]"
    with pytest.raises(ConfigError, match=message):
        construct(model_name_or_path=str(other))
    server.max_model_len = 9
    with pytest.raises(ConfigError, match="expected a --max-model-len of at least"):
        construct()
    server.healthy = False
    with pytest.raises(RolloutServerError, match="expected a healthy server, got status 503"):
        construct()
    assert not (tmp_path / "run").exists()


def test_options_that_contradict_each_other(tmp_path):
    for changes, message in (
        ({"method": "full_ppo"}, "vllm_server_base_url: expected it unset for full_ppo"),
        (
            {"vllm_server_base_url": None, "vllm_adapter_dir": "d"},
            "vllm_adapter_dir: expected it unset without vllm_server_base_url, got 'd'",
        ),
        ({"kv_cache_memory": "2GB"}, "kv_cache_memory: expected it unset with vllm_server_base_url, got '2GB'"),
        ({"decode_step": "graph"}, "decode_step: expected it unset with vllm_server_base_url, got 'graph'"),
        ({"exact": True}, "exact: expected it unset with vllm_server_base_url, got True"),
        (
            {"off_policy_correction": "behaviour"},
            "expected one of token_truncate, turn_truncate, sequence_truncate, none for ppo",
        ),
        ({"off_policy_correction": "none=3"}, "off_policy_correction: expected behaviour, .* or none, got 'none=3'"),
    ):
        options = {"vllm_server_base_url": "http://localhost:1", **changes}
        with pytest.raises(ConfigError, match=message):
            train_config(tmp_path / "m", tmp_path / "run", **options)


def test_the_command_says_in_a_line_that_nobody_answers(model, tmp_path, capsys):
    made = train_config(model, tmp_path / "run", vllm_server_base_url="http://127.0.0.1:9")
    (tmp_path / "c.yaml").write_text(made.to_yaml())
    assert main(["train", "--config", str(tmp_path / "c.yaml")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("rlhf-engine train: vllm_server_base_url http://127.0.0.1:9: expected a vLLM server")
    assert error.count("\n") == 1


def beside(model: Path, output: Path, server: StandIn, **changes: Any):
    """Options of a run whose server draws beside the updates."""
    return config(model, output, server, **{"async_mode": "overlap", "max_staleness": 1, **changes})


def generators_names(server: StandIn) -> list[str]:
    names = [body["lora_name"] for body in server.requests("/v1/load_lora_adapter")]
    return [name.rsplit("-", 2)[1] for name in names if "-behaviour-" in name]


def test_the_floats_are_those_of_answers_drawn_here_by_past_policies(model, server, tmp_path):
    local = RlTrainer(train_config(model, tmp_path / "local", exact=False, async_mode="replay", max_staleness=1))
    remote = RlTrainer(beside(model, tmp_path / "remote", server))
    local.run()
    remote.run()
    ours, theirs = (read_metrics(t.output / "metrics.jsonl") for t in (local, remote))
    for mine, other in zip(ours, theirs, strict=True):
        for name, value in without_timings(mine).items():
            if not name.startswith(("mismatch/", "async/", "seconds/")):
                assert other[name] == pytest.approx(value, rel=2e-3, abs=2e-4), name
        assert other["mismatch/importance_weight_mean"] == pytest.approx(1, abs=1e-4)
        assert other["mismatch/rollout_k3"] < 1e-6
    # versions: 0 0 1 2 …: every batch but the first is one update old
    assert [row.get("staleness/mean") for row in theirs] == [row.get("staleness/mean") for row in ours]
    assert generators_names(server) == [f"v{i}" for i in range(len(theirs) - 1)]
    assert not server.adapters
    assert not (remote.output / "vllm").exists()


def test_a_server_that_starts_again_and_a_run_that_is_stopped_lose_nothing(model, server, tmp_path):
    """It breaks off connections, forgets its adapters, and is up again: the item is drawn once more."""
    calm = RlTrainer(beside(model, tmp_path / "calm", server))
    calm.run()
    server.answers_left = 11

    def restart() -> None:
        while server.answers_left > 0:
            if done.wait(0.01):
                return
        server.healthy = False
        done.wait(0.1)
        server.adapters.clear()
        server.answers_left = None
        server.healthy = True

    done = threading.Event()
    thread = threading.Thread(target=restart)
    thread.start()
    try:
        shaken = RlTrainer(beside(model, tmp_path / "shaken", server))
        shaken.run()
    finally:
        done.set()
        thread.join()
    assert same(trained(calm), trained(shaken))
    names = generators_names(server)
    again = [name for name in set(names) if names.count(name) > 2]  # two runs, and once more
    assert len(again) == 1
    cut = RlTrainer(beside(model, tmp_path / "cut", server, save_steps=1))
    steps = iter([False, False, True])
    with pytest.raises(Exception, match="stopped"):
        cut.run(stop=lambda: next(steps, True))
    resumed = RlTrainer(beside(model, tmp_path / "cut", server, save_steps=1, resume_from_checkpoint="auto"))
    resumed.run()
    assert same(trained(calm), trained(resumed))
    assert not server.adapters


def test_a_server_that_does_not_come_back_ends_the_run_and_keeps_the_checkpoint(
    model, server, tmp_path, monkeypatch, survived
):
    for name, seconds in (("SERVER_SECONDS", 0.5), ("SLOWEST", 1e9)):
        monkeypatch.setattr(sys.modules["rlhf_engine.rollout.generate"], name, seconds)  # a function has its name, too
    trainer = RlTrainer(beside(model, tmp_path / "run", server, save_steps=1))
    trainer.step()
    trainer.save()
    server.healthy = False
    server.answers_left = 0
    with pytest.raises(GeneratorError, match="RolloutServerError"):
        list(iter(trainer.step, None))
    trainer.source.close()
    survived("faults", 1)


def test_stopping_does_not_wait_for_answers(model, server, tmp_path):
    trainer = RlTrainer(beside(model, tmp_path / "run", server))
    trainer.step()
    server.delays += [30.0] * 40
    began = time.monotonic()
    trainer.source.close()
    trainer.rollouts.close()
    assert time.monotonic() - began < 15


def experience_of(rollout):
    """An experience with the rollout's answers, of the policy that drew them."""
    n, values_M = rollout.batch.n_sequences, rollout.logprobs_M
    of_tokens = {"logprobs_M": values_M, "old_logprobs_M": values_M, "kl_M": torch.zeros_like(values_M)}
    return Experience(batch=rollout.batch, groups_N=torch.arange(n), scores_N=torch.zeros(n), **of_tokens)


def test_weights_of_both_corrections_multiply(model, server, tmp_path):
    trainer = RlTrainer(config(model, tmp_path / "run", server))
    trainer.rollouts.sync(0)
    rollout = trainer.rollouts.generate(trainer.next_prompts(), trainer.sampling(0))
    scored, past_M = experience_of(rollout), rollout.logprobs_M - 0.1  # of the drawing policy: ratios of e^0.1
    one = torch.linspace(0.5, 2.0, len(past_M))
    options = SimpleNamespace(correction="token_truncate", off_policy_clip_max=2.0)
    alone = correct_age(scored, past_M, options)
    both = correct_age(dataclasses.replace(scored, weights_M=one, metrics={"a": 1.0}), past_M, options)
    assert torch.equal(both.weights_M, one * alone.weights_M)
    assert both.metrics == {"a": 1.0, **alone.metrics}
    assert torch.equal(both.old_logprobs_M, scored.old_logprobs_M)
    behaviour = SimpleNamespace(correction="behaviour", off_policy_clip_max=2.0)
    kept = correct_age(dataclasses.replace(scored, weights_M=one), past_M, behaviour)
    assert torch.equal(kept.weights_M, one)
    assert torch.equal(kept.old_logprobs_M, past_M)


def test_what_does_not_go_together(model, server, tmp_path):
    with pytest.raises(ConfigError, match="vllm_server_base_url: expected it unset with async 'ray'"):
        beside(model, tmp_path, server, async_mode="ray")
    with pytest.raises(ConfigError, match="async_mode: expected overlap or overlap,newest with vllm"):
        beside(model, tmp_path, server, async_mode="overlap,in_flight")


def test_lora_on_the_head_is_refused_before_a_step(model, server, tmp_path):
    with pytest.raises(ConfigError, match="lora_target_modules: expected no LM head for a vLLM server"):
        RlTrainer(config(model, tmp_path / "run", server, lora_target_modules=["q_proj", "lm_head"]))
    assert server.log == []
