"""What bodies may say: each field is read, known or refused, and a refusal leaves everything else as it was."""

import hmac
import json
import random
import threading
import time
from typing import Any

import httpx2
import pytest

from rlhf_engine.config import ServeConfig
from rlhf_engine.errors import ConfigError
from rlhf_engine.serve import server
from tests.serve import serving
from tests.serve.serving import BODY, CHAT, COMPLETIONS, GENERATE, WAITING, Place, serving as serve, write_base

folder, place = serving.folder, serving.place

TEXT = {"model": "one", "prompt": "red cat", "max_tokens": 4, "seed": 3, "logprobs": 0}
TALK = {"model": "one", "messages": [{"role": "user", "content": "red cat"}], "max_tokens": 4, "seed": 3}
TOKENS = {"model": "one", "token_ids": [1, 5, 6], "sampling_params": {"max_tokens": 4, "seed": 3, "logprobs": 0}}
VALID = {COMPLETIONS: TEXT, CHAT: TALK, GENERATE: TOKENS}


def facts(answer: dict[str, Any]) -> Any:
    """An answer without what is new each time."""
    return [{**choice, "index": 0} for choice in answer["choices"]]


def refused(place: Place, path: str, body: Any, status: int, param: str | None = None, **options: Any) -> str:
    """Check OpenAI's error object; its message."""
    got, answer = place.ask(path, body, **options)
    assert (got, set(answer)) == (status, {"error"}), answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert ": expected" in error["message"] or status in (404, 429), error
    assert error["param"] == param, error
    return error["message"]


NUMBERS = ["max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "logprobs"]
BAD: list[tuple[str, dict[str, Any], str | None]] = [
    *((COMPLETIONS, {name: value}, name) for name in NUMBERS for value in ("2", [1], {}, True, 10**400, -3)
      if (name, value) != ("seed", -3)),
    *((COMPLETIONS, {name: 1.5}, name) for name in ("max_tokens", "n", "top_k", "seed", "top_p", "min_p")),
    *((COMPLETIONS, {name: value}, name) for name, value in (
        ("n", 0), ("n", 129), ("max_tokens", 0), ("top_p", 0), ("logprobs", 21), ("min_tokens", 4), ("seed", 2**63),
        ("temperature", 1e-300), ("temperature", 1e300), ("prompt", []), ("prompt", [[]]),
        ("prompt", None), ("prompt", 5), ("prompt", [1, "a"]), ("prompt", [1.0]), ("prompt", [True]), ("prompt", [-1]),
        ("prompt", [10**30]), ("prompt", [999]), ("echo", 1), ("stop", 0), ("stop", [""]), ("stop", [1]), ("stop", {}),
        ("stop", ["a"] * 17), ("stop_token_ids", [10**30]), ("stop_token_ids", 3), ("ignore_eos", "yes"),
        ("stream", "true"), ("stream_options", []), ("stream_options", "x"), ("model", 7), ("suffix", "x"),
        ("best_of", 3), ("presence_penalty", 0.1), ("repetition_penalty", 2), ("logit_bias", {"3": 1}),
        ("response_format", {"type": "json_object"}), ("skip_special_tokens", False), ("unheard_of", 1),
        ("return_token_ids", 1), ("max_tokenz", 3), ("allowed_token_ids", [1]),
    )),
    (COMPLETIONS, {"prompt": [[5], [999]]}, "prompt[1]"), (COMPLETIONS, {"prompt": ["red", 5]}, "prompt[1]"),
    (COMPLETIONS, {"stream_options": {"x": 1}}, "x"), (COMPLETIONS, {"echo": True, "stream": True}, "echo"),
    *((CHAT, {name: value}, name) for name, value in (
        ("messages", None), ("messages", []), ("messages", "red"), ("messages", {}), ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}), ("tools", {}), ("chat_template_kwargs", []), ("top_logprobs", 2),
        ("chat_template_kwargs", {"chat_template": "x"}), ("parallel_tool_calls", False), ("modalities", ["audio"]),
        ("max_completion_tokens", -1), ("prompt", "red"), ("functions", []),
    )),
    (CHAT, {"messages": [{"role": "user", "content": "red"}], "tools": [1]}, "messages"),
    *((CHAT, {"messages": [message]}, name) for message, name in (
        (5, "messages[0]"), ({}, "messages[0]"), ({"role": 1, "content": "a"}, "messages[0]"),
        ({"role": "user"}, "messages[0].content"), ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [1]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 9000}}]}, "messages[0].tool_calls"),
    )),
    *((GENERATE, {name: value}, name) for name, value in (
        ("token_ids", None), ("token_ids", "red"), ("token_ids", [999]), ("token_ids", [True]), ("sampling_params", []),
        ("sampling_params", 0), ("features", {"a": 1}), ("prompt", "red"), ("stream", 1),
    )),
    (GENERATE, {"sampling_params": {"n": 0}}, "n"), (GENERATE, {"sampling_params": {"bad_words": ["a"]}}, "bad_words"),
]  # fmt: skip


def test_what_is_refused_says_so_and_changes_nothing(place, survived):
    before, slots = facts(place.good(COMPLETIONS, **{**TEXT, "model": "two"})), place.slots()
    for path, change, param in BAD:
        refused(place, path, {**VALID[path], **change}, 400, param)
        assert facts(place.good(COMPLETIONS, **{**TEXT, "model": "two"})) == before, change
    assert place.slots() == slots
    assert (place.thread.owed, place.thread.n_live, place.thread.n_waiting) == (0, 0, 0)
    assert all(policy.holders == 0 for policy in place.policies)
    survived("bad_inputs", len(BAD))


def test_known_fields_change_no_answer(place):
    same = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "presence_penalty": 0.0, "frequency_penalty": 0,
        "repetition_penalty": 1.0, "logit_bias": {}, "best_of": 1, "suffix": None, "top_k": -1, "top_p": 1, "min_p": 0,
        "n": 1, "stop": [], "stop_token_ids": [], "ignore_eos": False, "stream_options": None, "min_tokens": 0,
        "response_format": {"type": "text"}, "skip_special_tokens": True, "temperature": 1, "echo": None,
    }  # fmt: skip
    expected = facts(place.good(COMPLETIONS, **TEXT))
    for name, value in same.items():
        assert facts(place.good(COMPLETIONS, **TEXT, **{name: value})) == expected, name
    talk = facts(place.good(CHAT, **TALK))
    for change in ({"tools": []}, {"tool_choice": "auto"}, {"modalities": ["text"]}, {"parallel_tool_calls": True}):
        assert facts(place.good(CHAT, **TALK, **change)) == talk
    parts = [{"type": "text", "text": "red "}, {"type": "text", "text": "cat"}]
    assert facts(place.good(CHAT, **{**TALK, "messages": [{"role": "user", "content": parts}]})) == talk
    assert facts(place.good(CHAT, **TALK, chat_template_kwargs={"loud": True})) != talk


@pytest.mark.parametrize(
    ("raw", "got"),
    [
        (b"", "Expecting value"), (b"{", "Expecting"), (b"[]", "object"), (b'"a"', "object"), (b"\xff", "utf-8"),
        (b'{"prompt": "red", "temperature": NaN}', "the number NaN"), (b'{"n": -Infinity}', "the number -Infinity"),
        (b'{"prompt": "\\ud800"}', "surrogates"), (b"[" * 100_000, "recursion"), (b'{"prompt": 1}{}', "Extra data"),
        (b'{"n": ' + b"9" * 5000 + b"}", "4300 digits"),
    ],
)  # fmt: skip
def test_what_is_no_json(place, raw, got):
    assert got in refused(place, COMPLETIONS, raw, 400, "body")


def test_too_long_and_too_large(place):
    context = place.service.reader.context
    for path, body in (
        (COMPLETIONS, {"prompt": [5] * context}), (COMPLETIONS, {"prompt": [5] * 9, "max_tokens": context - 8}),
        (CHAT, {"messages": [{"role": "user", "content": "red " * context}]}), (GENERATE, {"token_ids": [5] * context}),
    ):  # fmt: skip
        status, answer = place.ask(path, {**VALID[path], **body})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert str(context) in answer["error"]["message"]
    assert len(place.good(COMPLETIONS, prompt=[5] * 9, max_tokens=context - 9, ignore_eos=True)["choices"]) == 1
    large = json.dumps({**TEXT, "user": "x" * BODY}).encode()
    refused(place, COMPLETIONS, large, 413, "body")
    chunks = (large[i : i + 10_000] for i in range(0, len(large), 10_000))  # without a length before
    assert place.client.post(COMPLETIONS, content=chunks).status_code == 413
    refused(place, COMPLETIONS, {**TEXT, "model": "nobody"}, 404, "model")
    assert place.client.get("/v1/models/nobody").status_code == 404
    for method, path, status in (("GET", COMPLETIONS, 405), ("POST", "/v1/nothing", 404), ("GET", "/../etc", 404)):
        reply = place.client.request(method, path)
        assert (reply.status_code, set(reply.json()["error"])) == (status, {"message", "type", "param", "code"})


def test_a_key_is_needed_where_there_is_one_and_compared_in_constant_time(folder, monkeypatch):
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: (compared.append((a, b)), compare(a, b))[1])
    with serve(folder, keys=["first", "zweiter-schlüssel"]) as place:
        for given in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "first"},
            {"Authorization": "Basic first"},
        ):
            refused(place, COMPLETIONS, {"prompt": "red"}, 401, "authorization", headers=given)
            assert place.client.get("/v1/models", headers=given).status_code == 401
            assert place.client.get("/status", headers=given).status_code == 401
        assert len(compared) == 4 * 3 * 2, "every key is compared every time"
        for key in ("first", "zweiter-schlüssel"):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert place.ask(COMPLETIONS, {"prompt": "red", "max_tokens": 2}, headers=headers)[0] == 200
        assert place.client.get("/health").status_code == place.client.get("/").status_code == 200
        assert "first" not in place.client.get("/").text


def until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


LONG = {"prompt": [5] * 4, "max_tokens": 59, "ignore_eos": True, "n": 12, "seed": 1}


def test_limits_answer_429_and_what_is_removed_404(folder, tmp_path):
    with serve(folder, "one", "two", "three", state=tmp_path, max_policies=3) as place:
        expected = facts(place.good(COMPLETIONS, **{**TEXT, "model": "two"}))

        def same() -> bool:
            return facts(place.good(COMPLETIONS, **{**TEXT, "model": "two"})) == expected

        place.policies.pause("one")
        assert "paused" in refused(place, COMPLETIONS, TEXT, 429, "policy")
        place.policies.pause("one", False)
        assert place.good(COMPLETIONS, **TEXT)
        for body in ({"n": 128, "prompt": ["red"] * 9}, {"prompt": [[5]] * 30_000, "n": 128}):
            assert str(WAITING) in refused(place, COMPLETIONS, {**TEXT, **body}, 429)
        assert same()
        assert place.thread.owed == 0
        # a policy that is evicted comes back, unless all others are in use
        place.policies.evict("one")
        add = serving.add
        add(place.policies, "four", 9)
        held = [place.policies.hold(name) for name in ("two", "three", "four")]
        assert "max_policies 3" in refused(place, COMPLETIONS, TEXT, 429, "policy")
        assert "one" in place.policies.evicted
        for policy in held:
            place.policies.release(policy)
        assert place.good(COMPLETIONS, **TEXT)
        assert same()
        # in flight, whole and as a stream, whatever is being written
        for stream in (False, True):
            got: list[Any] = []
            body = {**LONG, "model": "one", "stream": stream, "logprobs": 1}

            def ask(body: dict[str, Any] = body, got: list[Any] = got) -> None:
                with httpx2.Client(base_url=place.url, trust_env=False, timeout=60) as client:
                    reply = client.post(COMPLETIONS, json=body)
                    got.append((reply.status_code, reply.text))

            asking = threading.Thread(target=ask)
            asking.start()
            until(lambda: place.thread.n_live)
            assert place.policies.get("one").holders == 1
            place.policies.remove("one")
            asking.join()
            status, text = got[0]
            assert status == (200 if stream else 404)
            assert "policy 'one' was removed" in text
            assert same()
            refused(place, COMPLETIONS, TEXT, 404, "model")
            add(place.policies, "one", 0)
        assert (place.thread.owed, place.thread.n_live) == (0, 0)


def test_an_adapter_of_another_base_is_refused_at_the_start(folder, tmp_path):
    other = write_base(tmp_path / "other", hidden_size=48)
    with serve(other, "strange", state=tmp_path / "state") as place:
        adapter = place.policies.save("strange")
    for options, message in (
        ({"adapters": [f"a={adapter}"]}, "adapters: .*a="), ({"adapters": ["a=/nowhere"]}, "adapters"),
        ({"adapters": [f"tiny={adapter}"]}, "adapters.*'tiny'"), ({"adapters": ["x"]}, "NAME=FOLDER"),
        ({"host": "0.0.0.0"}, "api_key_file"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            server.build(ServeConfig(model_name_or_path=str(folder), device="cpu", **options))
    (tmp_path / "keys").write_text("\n \n")
    with pytest.raises(ConfigError, match="at least one key"):
        server.build(ServeConfig(model_name_or_path=str(folder), device="cpu", api_key_file=str(tmp_path / "keys")))


# ---- random bodies ---------------------------------------------------------------------------------------------------

JUNK = [None, True, False, 0, -1, 1, 2.5, 1e308, -1e308, 10**30, "", "red", "\u0000", "\U0001f600", [], [[]], [None],
        {}, {"a": 1}, "x" * 500, [1] * 70, ["red"] * 3, {"type": "text"}, [{"role": "user"}], "NaN"]  # fmt: skip
FIELDS = [
    *TEXT, *TALK, *TOKENS, *TOKENS["sampling_params"], *NUMBERS, "stop", "stop_token_ids", "echo", "stream_options",
    "tools", "tool_choice", "chat_template_kwargs", "top_logprobs", "prompt_logprobs", "return_token_ids", "ignore_eos",
    "x",
]  # fmt: skip


def mutated(rng: random.Random, value: Any) -> Any:
    """A value with one thing in it changed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        value = dict(value)
        name = rng.choice([*value])
        match rng.randrange(4):
            case 0:
                del value[name]
            case 1:
                value[rng.choice(FIELDS)] = rng.choice(JUNK)
            case _:
                value[name] = mutated(rng, value[name])
        return value
    if isinstance(value, list) and value and rng.random() < 0.6:
        place = rng.randrange(len(value))
        return [*value[:place], mutated(rng, value[place]), *value[place + rng.randrange(2) :]]
    return rng.choice(JUNK)


def bodies(seed: int) -> Any:
    """Paths and bodies, most of them malformed."""
    rng = random.Random(seed)
    while True:
        path = rng.choice([*VALID])
        body: Any = {**VALID[path], **({} if path == GENERATE else {"max_tokens": 1})}
        for _ in range(rng.randint(1, 3)):
            body = mutated(rng, body)
        raw = json.dumps(body).encode()
        if rng.random() < 0.1:  # bytes
            place = rng.randrange(len(raw) + 1)
            raw = raw[:place] + rng.randbytes(rng.randrange(3)) + raw[place + rng.randrange(3) :]
        yield path, raw


@pytest.mark.parametrize(("seed", "n"), [(0, 500), pytest.param(1, 10_000, marks=pytest.mark.long)])
def test_malformed_bodies_answer_4xx_and_touch_no_slot(place, survived, seed, n):
    slots, before = place.slots(), facts(place.good(COMPLETIONS, **{**TEXT, "model": "two"}))
    refusals = others = 0
    for path, raw in bodies(seed):
        try:
            reply = place.client.post(path, content=raw)
        except httpx2.HTTPError as error:
            pytest.fail(f"{path} {raw!r}: {error!r}")
        assert reply.status_code == 200 or 400 <= reply.status_code < 500, (path, raw, reply.text)
        refusals, others = refusals + (reply.status_code != 200), others + (reply.status_code == 200)
        if refusals == n:
            break
    assert others < refusals, "or these bodies would not be malformed"
    assert place.slots() == slots
    assert facts(place.good(COMPLETIONS, **{**TEXT, "model": "two"})) == before
    assert place.thread.owed == 0
    survived("bodies", refusals)
