"""Rollouts from a server, and every way it may fail, against a protocol stand-in (`stand_in.py`), which is not vLLM."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_kernels.runtime import registry
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_engine.config import TrainConfig
from rlhf_engine.errors import ConfigError, MismatchError, RolloutServerError
from rlhf_engine.hydra import HydraModel, RoleSpec, SlotConfig, hydra_roles, peft_io
from rlhf_engine.rollout import PromptBatch, SamplingConfig, generate
from rlhf_engine.rollout.generate import find_server, make_rollouts
from rlhf_engine.rollout.request import row_seed
from rlhf_engine.rollout.vllm import backend as vllm
from rlhf_engine.rollout.vllm.backend import Canary, VllmRollouts, find_base, require_servable
from rlhf_engine.rollout.vllm.client import RUNTIME_LORA, VLLM, VllmClient
from tests.conftest import VOCAB, build, tiny_llama
from tests.rollout.stand_in import Refusal, StandIn

pytestmark = pytest.mark.usefixtures("short_pauses")

PROMPTS = [[5, 9, 11], [7], [20, 21, 22, 23, 24, 25], [4, 4]]
CANARIES = [[5, 9, 11, 50, 51], [20, 21, 22, 23, 24, 25], [6]]


ENDS = (2, 30, 31, 32, 33, 34)


def sampling(**changes: Any) -> SamplingConfig:
    return SamplingConfig(**{"max_completion_length": 12, "eos_token_ids": ENDS, "seed": 3, **changes})


@pytest.fixture
def server():
    with StandIn(tiny_llama(), name="base", root="models/tiny") as stand_in:
        yield stand_in


@pytest.fixture
def model() -> HydraModel:
    return build()


def connect(model: HydraModel, server: StandIn, folder: Path, **changes: Any) -> VllmRollouts:
    options = {"temperature": 1.0, "max_tokens": 12, "timeout": 20.0, "run": "run", **changes}
    client = VllmClient(server.url, timeout=options.pop("timeout"))
    run, server_folder = options.pop("run"), options.pop("server_folder", None)
    canary = Canary(model, client, CANARIES, **options)
    base = find_base(client, "somewhere/tiny", 20)
    return VllmRollouts(model, client, base, canary, run=run, folder=folder / "adapters", server_folder=server_folder)


def move(model: HydraModel, scale: float) -> None:
    """The actor after an update, so to speak."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for p in model.backbone().slot("actor").parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator))


def ask(rollouts, prompts, how: SamplingConfig, *, role=None, **columns):
    """Answers to prompts; columns: other entries of the batch."""
    batch = PromptBatch.of(range(len(prompts)), prompts, generations=1)
    batch = dataclasses.replace(batch, **{name: tuple(values) for name, values in columns.items()})
    return rollouts.generate(batch, how, role=role)


@pytest.mark.parametrize(("ids", "temperature"), [("both", 0.7), ("token_ids", 1.0), ("names", 0.7)])
def test_answers_are_those_of_the_local_engine(model, server, tmp_path, ids, temperature):
    server.ids = ids
    rollouts = connect(model, server, tmp_path, temperature=temperature)
    measured = rollouts.sync(4)
    assert measured["mismatch/canary_mean"] < 1e-5
    options = sampling(temperature=temperature)
    ours = generate(model, PROMPTS, options, sample_ids=[7, 8, 9, 10])
    theirs = ask(rollouts, PROMPTS, options, sample_ids=[7, 8, 9, 10])
    assert theirs.batch.tokens_T.tolist() == ours.batch.tokens_T.tolist()
    assert theirs.batch.cu_seqlens == ours.batch.cu_seqlens
    assert theirs.batch.sample_ids == ours.batch.sample_ids
    torch.testing.assert_close(theirs.logprobs_M, ours.logprobs_M, rtol=0, atol=1e-5)
    assert theirs.finish_reasons == ours.finish_reasons
    assert set(theirs.finish_reasons) == {"eos", "length"}
    assert (theirs.policy_version, theirs.filtered, theirs.stats.step) == (4, False, "vllm")
    assert theirs.stats.tokens == theirs.batch.n_completion_tokens


def test_every_sampling_option_means_the_same(model, server, tmp_path):
    rollouts = connect(model, server, tmp_path)
    rollouts.sync(0)
    for changes in (
        {"top_k": 3}, {"top_p": 0.8, "temperature": 1.3}, {"min_p": 0.2}, {"min_completion_length": 5},
        {"min_completion_length": 1}, {"eos_token_ids": (5, 9, 40, 41)}, {"eos_token_ids": ()}, {"stop": ("><1",)},
    ):  # fmt: skip
        prompts, options = PROMPTS * 3, sampling(**changes)
        ours = generate(model, prompts, options, decode=lambda ids: "".join(f"<{i}>" for i in ids))
        theirs = ask(rollouts, prompts, options)
        assert theirs.batch.tokens_T.tolist() == ours.batch.tokens_T.tolist(), changes
        assert theirs.finish_reasons == ours.finish_reasons, changes
        if "stop" in changes:
            assert "stop" in theirs.finish_reasons
        if changes.get("min_completion_length") == 5:  # the fifth token is the first that may end an answer
            assert min(theirs.batch.completion_lens) == 5
        assert theirs.filtered == options.filters == (ours.batch.supports is not None), changes
        assert not ours.filtered
        torch.testing.assert_close(theirs.logprobs_M, ours.logprobs_M, rtol=0, atol=1e-4)


def test_the_base_and_greedy_rows(model, server, tmp_path):
    rollouts = connect(model, server, tmp_path)
    with pytest.raises(ValueError, match="sync: expected one before the actor's answers, got none"):
        ask(rollouts, PROMPTS, sampling())
    rollouts.sync(0)
    for role in ("reference", "actor"):
        ours = generate(model, PROMPTS, sampling(), role=role, greedy=[True, False, True, False])
        theirs = ask(rollouts, PROMPTS, sampling(), role=role, greedy=[True, False, True, False])
        assert theirs.batch.tokens_T.tolist() == ours.batch.tokens_T.tolist()
    asked = [body["model"] for body in server.requests("/v1/completions")]
    assert asked.count("base") == 4
    with pytest.raises(ValueError, match="greedy: expected temperature 1"):
        ask(rollouts, PROMPTS, sampling(temperature=0.5), greedy=[True] * 4)
    with pytest.raises(ValueError, match="role: expected one with an LM head, got 'critic'"):
        ask(rollouts, PROMPTS, sampling(), role="critic")
    with pytest.raises(ValueError, match="min_completion_length: expected none together with stop texts"):
        ask(rollouts, PROMPTS, sampling(stop=("x",), min_completion_length=3))
    with pytest.raises(ValueError, match=r"prompts\[0\]: expected at most 52 tokens"):
        ask(rollouts, [[5] * 60], sampling())


def test_nothing_is_left_to_the_server_s_defaults(model, server, tmp_path):
    rollouts = connect(model, server, tmp_path)
    rollouts.sync(0)
    server.delays = [0.3, 0.2, 0.1, 0.0]  # answers that come in another order keep their places
    theirs = ask(rollouts, PROMPTS, sampling())
    assert theirs.batch.tokens_T.tolist() == generate(model, PROMPTS, sampling()).batch.tokens_T.tolist()
    body = server.requests("/v1/completions")[-1]
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "min_tokens"):
        assert name in body
    seeds = [request["seed"] for request in server.requests("/v1/completions")[-4:]]
    assert sorted(seeds) == sorted(row_seed(3, i) for i in range(4))


def test_an_api_key_goes_along_and_no_proxy_is_asked(model, server, tmp_path, monkeypatch):
    seen: list[str | None] = []
    original = server.answer
    handler = server._http.RequestHandlerClass
    reply = handler._reply
    monkeypatch.setattr(
        handler, "_reply", lambda self, body: seen.append(self.headers["Authorization"]) or reply(self, body)
    )
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv(VLLM.key_variable, "secret")
    connect(model, server, tmp_path)
    assert seen == ["Bearer secret"] * 2
    monkeypatch.setattr(server, "answer", lambda *a: (401, {"error": "Unauthorized"}))
    with pytest.raises(RolloutServerError, match=f"environment variable {VLLM.key_variable}, got 401"):
        VllmClient(server.url, timeout=5).health()
    assert original is not None


def test_versions_come_and_go(model, server, tmp_path):
    rollouts = connect(model, server, tmp_path)
    folder = tmp_path / "adapters"
    rollouts.sync(0)
    (first,) = server.adapters
    assert first.startswith("run-v0-")
    assert sorted(p.name for p in (folder / first).iterdir()) == [peft_io.CONFIG_FILE, peft_io.WEIGHTS_FILE]
    before = len(server.log)
    rollouts.sync(0)
    assert len(server.log) == before  # the same version goes nowhere
    move(model, 0.1)
    rollouts.sync(1)
    (second,) = server.adapters
    assert second.startswith("run-v1-")
    assert [p.name for p in folder.iterdir()] == [second]
    order = [(path, body) for path, body in server.log[before:]]
    paths = [path for path, _ in order]
    # the version before goes only once the new one has answered
    assert paths == ["/v1/load_lora_adapter", *["/v1/completions"] * len(CANARIES), "/v1/unload_lora_adapter"]
    assert order[0][1] == {"lora_name": second, "lora_path": str(folder / second)}
    assert order[-1][1] == {"lora_name": first}


def test_names_are_of_weights_and_scales_and_not_of_the_order_that_peft_writes_sets_in(
    model, server, tmp_path, monkeypatch
):
    """Keys and values of prompts are kept by adapter name."""
    rollouts, save, slot = connect(model, server, tmp_path), vllm.write_adapter, model.backbone().slot("actor")
    names = [rollouts._write(3)]
    move(model, 0.1)
    names.append(rollouts._write(3))
    slot.config = dataclasses.replace(slot.config, alpha=2 * slot.config.alpha)
    names.append(first := rollouts._write(3))
    assert len({name for name in names if name.startswith("run-v3-")}) == 3
    weights = [(tmp_path / "adapters" / name / peft_io.WEIGHTS_FILE).read_bytes() for name in names]
    assert weights[0] != weights[1] == weights[2]

    def reordered(slot, folder, **options):
        save(slot, folder, **options)
        path = folder / peft_io.CONFIG_FILE
        config = json.loads(path.read_text())
        config["target_modules"] = config["target_modules"][::-1]
        path.write_text(json.dumps(config))

    monkeypatch.setattr(vllm, "write_adapter", reordered)
    assert rollouts._write(3) == first


def test_what_a_killed_run_left_is_used_or_removed(model, server, tmp_path):
    killed = connect(model, server, tmp_path)
    killed.sync(1)
    left = killed._write(2)
    killed.client.load_adapter(left, str(tmp_path / "adapters" / left))
    (tmp_path / "adapters" / ".run.tmp").mkdir()
    (tmp_path / "adapters" / "somebody-s").mkdir()
    killed.client.load_adapter("other-v1-00000000", str(tmp_path / "adapters" / left))
    connect(model, server, tmp_path).sync(2)  # the same weights are there already
    assert set(server.adapters) == {left, "other-v1-00000000"}
    assert len(server.requests("/v1/load_lora_adapter")) == 3
    assert {p.name for p in (tmp_path / "adapters").iterdir()} == {left, "somebody-s"}


def test_an_adapter_that_the_server_keeps_is_counted_and_asked_once(model, server, tmp_path):
    rollouts = connect(model, server, tmp_path)
    rollouts.sync(0)
    server.keeps = True
    for version in (1, 2):
        move(model, 0.1)
        left = rollouts.sync(version)["vllm/adapters_left"]
        assert left == version
    assert len(server.requests("/v1/unload_lora_adapter")) == 2


def test_at_the_end_nothing_of_the_run_is_left_and_it_may_go_on(model, server, tmp_path):
    another, rollouts = connect(model, server, tmp_path, run="two"), connect(model, server, tmp_path)
    another.sync(0)
    rollouts.sync(0)
    rollouts.close()
    assert list(server.adapters) == [another.name]
    assert [folder.name for folder in (tmp_path / "adapters").iterdir()] == [another.name]
    rollouts.sync(0)
    assert set(server.adapters) == {another.name, rollouts.name}
    another.close()
    rollouts.close()
    assert not (tmp_path / "adapters").exists()


def test_what_a_server_keeps_at_the_end_is_named(model, server, tmp_path):
    rollouts = connect(model, server, tmp_path)
    rollouts.sync(0)
    server.keeps = True
    with pytest.warns(UserWarning, match=rf"has kept these adapters of this run: \['{rollouts.name}'\]"):
        rollouts.close()
    rollouts.sync(1)
    server.close()
    with pytest.warns(UserWarning, match="adapters of this run may still be loaded there: vllm_server_base_url"):
        rollouts.close()
    assert not (tmp_path / "adapters").exists()


def test_the_server_may_see_the_folder_elsewhere(model, server, tmp_path):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "mount").symlink_to(tmp_path / "adapters")
    connect(model, server, tmp_path, server_folder=f"{tmp_path}/mount/").sync(0)
    (request,) = server.requests("/v1/load_lora_adapter")
    assert request["lora_path"] == f"{tmp_path}/mount/{request['lora_name']}"
    rollouts = connect(model, server, tmp_path, server_folder=f"{tmp_path}/nowhere", run="two")
    with pytest.raises(RolloutServerError, match=r"got status 404: No adapter found for .*vllm_adapter_dir HERE:THERE"):
        rollouts.sync(0)


def test_only_a_folder_that_is_given_has_two_names(model, server, tmp_path):
    output = tmp_path / "12:30"
    for given, ours, theirs in (
        (None, output / "vllm", f"{output}/vllm"),
        ("here:/there", Path("here").resolve(), "/there"),
    ):
        config = TrainConfig(
            model_name_or_path="somewhere/tiny", dataset_name="d", reward_funcs=["a:b"], output_dir=str(output),
            vllm_server_base_url=server.url, vllm_adapter_dir=given, max_completion_length=8,
        )  # fmt: skip
        found = find_server(config, CANARIES)
        rollouts = make_rollouts(config, model, found, CANARIES)
        assert (rollouts.folder, rollouts.server_folder) == (ours, theirs)


def test_a_folder_that_cannot_be_written_to(model, server, tmp_path):
    (tmp_path / "adapters").write_text("a file")
    with pytest.raises(ConfigError, match=r"vllm_adapter_dir: expected a folder that can be written to"):
        connect(model, server, tmp_path).sync(0)


def test_what_vllm_cannot_serve_is_refused_up_front():
    head = {"actor": SlotConfig(r=4, target_modules=("q_proj", "lm_head"))}
    plain = GPT2LMHeadModel(GPT2Config(n_embd=24, n_layer=1, n_head=2, vocab_size=61, n_positions=32)).eval()
    for source, roles, slots, message in (
        (tiny_llama(), hydra_roles(), head, r"lora_target_modules: expected no LM head .*got \['lm_head'\]"),
        (tiny_llama(), hydra_roles(), {"actor": SlotConfig(r=600)}, "lora_r: expected at most 512 .*, got 600"),
        (tiny_llama(), {"actor": RoleSpec()}, {}, "method: expected an actor on an adapter for a vLLM server"),
        (plain, {"actor": RoleSpec(slot="actor")}, {}, r"plain linears .* got a GPT2LMHeadModel, whose Conv1D"),
    ):
        with pytest.raises(ConfigError, match=message):
            require_servable(HydraModel.from_pretrained(source, roles=roles, slots=slots))


def test_a_wrong_base_or_a_wrong_adapter_is_caught(model, server, tmp_path):
    other = StandIn(tiny_llama(seed=1), name="base", root="models/tiny")
    with other, pytest.raises(MismatchError, match=r"expected the actor's log-probs from adapter 'a-v0-.* same base"):
        connect(model, other, tmp_path, run="a").sync(0)
    rollouts = connect(model, server, tmp_path, run="b")
    with pytest.MonkeyPatch.context() as patch:
        save = vllm.write_adapter
        patch.setattr(vllm, "write_adapter", lambda slot, *a, **k: save(model.backbone().slot("critic"), *a, **k))
        with pytest.raises(MismatchError, match=r"within 0\.0001 on average"):
            rollouts.sync(0)
    assert rollouts.policy_version is None
    rollouts.sync(0)


@pytest.mark.parametrize("scale", [0.05, 0.0005], ids=["far", "within-the-bound"])
def test_a_stale_adapter_is_caught(model, server, tmp_path, scale):
    rollouts = connect(model, server, tmp_path, bound=0.02)
    rollouts.sync(0)
    server.stale = True
    move(model, scale)
    name = rollouts.name
    with pytest.raises(MismatchError, match="those of the version before, bit for bit, where the actor's have moved"):
        rollouts.sync(1)
    # the version before is still what is drawn from, there and on disk
    assert (rollouts.policy_version, rollouts.name) == (0, name)
    assert name in server.adapters
    assert (tmp_path / "adapters" / name).is_dir()
    if scale > 0.01:  # a new run has no version before, and sees it all the same
        with pytest.raises(MismatchError, match="expected the actor's log-probs"):
            connect(model, server, tmp_path, run="new").sync(1)
    else:
        connect(model, server, tmp_path, bound=0.02, run="new").sync(1)


def test_log_probs_of_another_distribution_than_the_one_drawn_from(model, server, tmp_path):
    server.logprobs_mode = "raw_logprobs"
    connect(model, server, tmp_path, run="at-1").sync(0)  # where they are the same
    with pytest.raises(MismatchError, match=r"are of temperature 1, not of 0\.7: .*--logprobs-mode processed_logprobs"):
        connect(model, server, tmp_path, temperature=0.7).sync(0)


def test_the_bound_can_be_set_and_follows_the_dtype(model, server, tmp_path):
    with (
        registry.use_backend("reference"),  # in C++ both sides may agree to the bit
        pytest.raises(MismatchError, match=r"within 1e-12 on average \(rollout_mismatch_bound\)"),
    ):
        connect(model, server, tmp_path, bound=1e-12).sync(0)
    bf16 = HydraModel.from_pretrained(tiny_llama(dtype=torch.bfloat16), roles=hydra_roles())
    client = VllmClient(server.url, timeout=5)
    assert Canary(bf16, client, CANARIES, temperature=1.0, max_tokens=4).bound == 0.1
    assert Canary(model, client, CANARIES, temperature=1.0, max_tokens=4).bound == 1e-4


def test_nan_from_our_own_side_is_no_agreement(model, server, tmp_path):
    rollouts = connect(model, server, tmp_path)
    rollouts.sync(0)
    with torch.no_grad():
        list(model.backbone().slot("actor").parameters())[-1].fill_(float("nan"))
    with pytest.raises(MismatchError, match="differ by nan;"):
        # of the server, which still has the numbers of before
        rollouts.canary.check(rollouts.name, rollouts.canary.ask(rollouts.name, rollouts._complete))


def test_addresses(server):
    for url in ("localhost:8000", "ftp://x", "http://", "http://x:port", "http://u:p@x", "http://x?a=1"):
        with pytest.raises(ConfigError, match="vllm_server_base_url: expected"):
            VllmClient(url, timeout=5)
    VllmClient(server.url + "/v1/", timeout=5).health()


def test_sick_servers_and_strange_lists(server, survived):
    client = VllmClient(server.url, timeout=5)
    server.healthy = False
    with pytest.raises(RolloutServerError, match="expected a healthy server, got status 503"):
        client.health()
    for payload, message in (
        ({"data": [{"name": "x"}]}, "expected a list of models with ids from /v1/models"),
        ([1], "expected a JSON object from /v1/models"),
        (b"<html>", "expected JSON from /v1/models"),
    ):
        server.models = lambda payload=payload: payload  # type: ignore[method-assign]
        with pytest.raises(RolloutServerError, match=message):
            client.models()
    survived("faults", 4)


def test_a_dead_engine_s_stack_trace_is_in_the_server_s_log(server):
    text = "EngineCore encountered an issue. See stack trace (above) for the root cause."

    def dead(body: dict[str, Any]) -> dict[str, Any]:
        raise Refusal(500, text)

    server.complete = dead  # type: ignore[method-assign]
    with pytest.raises(RolloutServerError, match=r"got status 500: .* See stack trace \(in the server's log\) for the"):
        VllmClient(server.url, timeout=5).complete("base", [5], {}, vocabulary=VOCAB)


def test_a_server_of_another_base_or_of_less_context(server):
    client = VllmClient(server.url, timeout=5)
    assert find_base(client, "elsewhere/tiny", 64).name == "base"
    assert find_base(client, "elsewhere/base", 64).name == "base"
    with pytest.raises(ConfigError, match=r"serve one model called 'llama' .* got \['base of models/tiny'\]"):
        find_base(client, "models/llama", 64)
    with pytest.raises(ConfigError, match=r"expected a --max-model-len of at least 65, .* got 64"):
        find_base(client, "models/tiny", 65)
    server.max_model_len = None  # servers that do not say
    find_base(client, "models/tiny", 65)


def test_runtime_lora_is_off(model, server, tmp_path):
    server.runtime_lora = False
    with pytest.raises(RolloutServerError, match=f"started with {RUNTIME_LORA}=1 and --enable-lora, got status 404"):
        connect(model, server, tmp_path).sync(0)


def changed(**fields: Any):
    """The first choice with other fields; None: without them."""

    def alter(payload: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
        (choice,) = payload["choices"]
        kept = {k: v for k, v in {**choice, **fields}.items() if v is not None}
        return {**payload, "choices": [kept]}

    return alter


def tokens(ids: list[Any], logprobs: list[Any] | None = None, **more: Any):
    """The first choice with these tokens and their log-probs."""
    values = [-1.0] * len(ids) if logprobs is None else logprobs
    return changed(logprobs={"token_logprobs": values}, token_ids=ids, **more)


def named(name: str):
    return changed(logprobs={"tokens": [name], "token_logprobs": [-1.0]}, token_ids=None)


BAD_ANSWERS = [
    (lambda p, r: json.dumps(p).encode(), "RemoteProtocolError: peer closed"),
    (lambda p, r: {"choices": []}, "expected one choice"),
    (lambda p, r: {**p, "choices": p["choices"] * 2}, "expected one choice"),
    (lambda p, r: {**p, "model": "base"}, "expected an answer of that model, got one of 'base'"),
    (changed(index=1), "expected the choice of index 0, got 1"),
    (changed(prompt_token_ids=[1, 2]), r"expected an answer to the prompt .*, got one to \[1, 2\]"),
    (changed(logprobs=None), r"expected log-probs of the drawn tokens \(logprobs.token_logprobs\), got None"),
    (changed(logprobs={"tokens": [], "token_logprobs": []}, token_ids=[]), "at least one token, got none"),
    (changed(token_ids=[5]), "the same tokens in token_ids and logprobs.tokens, got"),
    (changed(token_ids=["5"]), "a list of integers as token_ids"),
    (tokens([True]), "a list of integers as token_ids, got"),
    (tokens([-1]), "expected token ids of 0 to 60, got -1"),
    (tokens([61]), "expected token ids of 0 to 60, got 61"),
    (named("token_id:61"), "expected token ids of 0 to 60, got 61"),
    (named("a"), r"expected token ids, in token_ids \(vLLM 0\.10\.2 and later\) or as names .*got \['a'\]"),
    (tokens([5, 6], [-1.0]), "as many log-probs as tokens, got 1 for 2"),
    (tokens([5], [float("nan")]), "expected finite log-probs, got nan"),
    (tokens([5], [None]), "expected finite log-probs, got None"),
    (tokens([5], [-9999.0]), "expected finite log-probs, got -9999.0"),
    (changed(finish_reason="abort"), "expected finish_reason 'stop' or 'length', got 'abort'"),
    (tokens([5], finish_reason="length"), r"ends with one of the tokens \(2, 30.* got one of 1 tokens .*max-model-len"),
    (tokens([2, 5], finish_reason="stop", stop_reason=5), r"stop_reason 5 and ending tokens at \[0\]"),
    (tokens([5] * 13, finish_reason="length"), "got one of 13 tokens with finish_reason 'length'"),
]


def test_answers_that_rollouts_cannot_be_made_of(model, server, tmp_path):
    rollouts = connect(model, server, tmp_path)
    rollouts.sync(0)
    for alter, message in BAD_ANSWERS:
        server.alter = alter
        with pytest.raises(RolloutServerError, match=message):
            ask(rollouts, [[5, 9, 11]], sampling())
    # an end that is also the last token that fits: what servers call it differs
    server.alter = tokens([5] * 11 + [2], finish_reason="length")
    assert ask(rollouts, [[5, 9, 11]], sampling()).finish_reasons == ("eos",)
