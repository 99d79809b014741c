"""Answers of a real server: whole and streamed alike, log-probs of the model, tool calls, and clients that leave."""

import math
import runpy
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from rlhf_engine.policy import pool
from rlhf_engine.rollout.request import SamplingConfig
from rlhf_engine.rollout.vllm.client import VllmClient, sampling_body
from rlhf_engine.serve.protocol import tool_calls
from tests.conftest import STORIES
from tests.serve import serving
from tests.serve.serving import CHAT, COMPLETIONS, GENERATE, Place, add, serving as serve
from tests.serve.test_protocol import LONG, TEXT, until

folder, place = serving.folder, serving.place
TALK = [{"role": "user", "content": "red cat"}]


@pytest.fixture(scope="module")
def stories() -> Iterator[Place]:
    """The real model with one policy."""
    if not STORIES.is_dir():
        pytest.skip("the pretrained model stories260K is not beside the checkout")
    with serve(STORIES, "pirate") as served:
        yield served


@pytest.fixture(params=["tiny", "stories"])
def each(request: pytest.FixtureRequest) -> tuple[Place, str, Any]:
    """A server, one of its policies and a text."""
    if request.param == "tiny":
        return request.getfixturevalue("place"), "one", "red cat"
    return request.getfixturevalue("stories"), "pirate", "Once upon a time, there"


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream as those of a whole answer."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "token_ids": [], "logprobs": None})
    for chunk in chunks:
        for choice in chunk["choices"]:
            own = choices[choice["index"]]
            assert "finish_reason" not in own, "nothing comes after the end"
            own["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            own["token_ids"] += choice.get("token_ids", [])
            if calls := choice.get("delta", {}).get("tool_calls"):
                own["calls"] = calls
            for name, part in (choice["logprobs"] or {}).items():
                own["logprobs"] = own["logprobs"] or {}
                own["logprobs"][name] = own["logprobs"].get(name, []) + part
            if choice["finish_reason"]:
                own["finish_reason"], own["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
    return [choices[i] for i in sorted(choices)]


def whole(answer: dict[str, Any]) -> list[dict[str, Any]]:
    names = ("token_ids", "logprobs", "finish_reason", "stop_reason")
    texts = [c["message"]["content"] if "message" in c else c.get("text", "") for c in answer["choices"]]
    return [{"text": t, **{x: c[x] for x in names}} for t, c in zip(texts, answer["choices"], strict=True)]


@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0}], ids=str)
def test_a_stream_is_the_whole_answer_and_a_seed_repeats_it(each, logprobs, options):
    place, name, text = each
    body = {"model": name, "prompt": [text, text + " and"], "n": 3, "seed": 5, "max_tokens": 20, "logprobs": logprobs,
            "return_token_ids": True, **options}  # fmt: skip
    answer = place.good(COMPLETIONS, **body)
    expected = whole(answer)
    assert expected == whole(place.good(COMPLETIONS, **body))
    distinct = len({tuple(choice["token_ids"]) for choice in expected})
    assert distinct == 6 if options.get("temperature") != 0 else distinct <= 2
    chunks = place.stream(COMPLETIONS, **body, stream_options={"include_usage": True})
    assert chunks.pop()["usage"] == answer["usage"]
    assert joined(chunks) == expected
    assert len(chunks) > 30 or logprobs, "tokens come as they are drawn"
    for choice in answer["choices"] if logprobs is not None else ():
        found, shown = choice["logprobs"], choice["text"]
        visible = [(p, at) for p, at in zip(found["tokens"], found["text_offset"], strict=True) if p.strip()[:1] != "<"]
        assert "".join(piece for piece, _ in visible) == shown
        assert all(shown.startswith(piece, at) for piece, at in visible)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_other_endpoints_stream_and_repeat_themselves_too(place, path):
    how = {"max_tokens": 12, "seed": 4, "n": 2}
    if path == CHAT:
        body = {"model": "one", "messages": TALK, **how, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    else:
        body = {"model": "one", "token_ids": [1, 5, 6], "sampling_params": {**how, "logprobs": 2}}
    answer = place.good(path, **body)
    assert whole(answer) == whole(place.good(path, **body)) == joined(place.stream(path, **body))
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == len(answer["choices"][0]["token_ids"]) == 12
    best = [[x["logprob"] for x in entry["top_logprobs"]] for entry in entries]
    assert all(len(values) == 2 and values[0] > values[1] for values in best)
    if path == CHAT:
        named = place.good(path, **{**body, "return_tokens_as_token_ids": True})["choices"][0]["logprobs"]["content"]
        text = answer["choices"][0]["message"]["content"]
        said = bytes(b for entry in entries for b in entry["bytes"]).decode().split()
        assert [word for word in said if not word.startswith("<")] == text.split()
    else:
        named = entries
        text = place.good(COMPLETIONS, model="one", prompt=[1, 5, 6], max_tokens=12, seed=4, n=2, return_token_ids=True)
        assert [c["token_ids"] for c in text["choices"]] == [c["token_ids"] for c in answer["choices"]]
    ids = [f"token_id:{token}" for token in answer["choices"][0]["token_ids"]]
    assert [entry["token"] for entry in named] == ids


def test_stop_texts_end_answers_and_stay_out_of_them(each):
    place, name, text = each
    body = {"model": name, "prompt": text, "seed": 9, "max_tokens": 30, "return_token_ids": True, "ignore_eos": True}
    free = place.good(COMPLETIONS, **body)["choices"][0]
    words = free["text"].split(" ")
    stop = " ".join(words[4:6])  # over a border of tokens
    stopped = place.good(COMPLETIONS, **body, stop=["never", stop])
    (choice,) = whole(stopped)
    assert choice["text"] == free["text"][: free["text"].index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == free["token_ids"][: len(choice["token_ids"])]
    assert joined(place.stream(COMPLETIONS, **body, stop=["never", stop])) == [choice]
    end = free["token_ids"][7]
    (by_id,) = whole(place.good(COMPLETIONS, **body, stop_token_ids=[end]))
    n = free["token_ids"].index(end) + 1
    assert (by_id["token_ids"], by_id["stop_reason"]) == (free["token_ids"][:n], end)
    assert free["text"].startswith(by_id["text"])
    assert joined(place.stream(COMPLETIONS, **body, stop_token_ids=[end])) == [by_id]
    (later,) = whole(place.good(COMPLETIONS, **body, stop_token_ids=[end], min_tokens=n))
    assert end not in later["token_ids"][:n]


def reference(model: Any, ids: list[int]) -> torch.Tensor:
    """transformers' own log-probs [T − 1, V] of the next tokens."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)


@pytest.mark.parametrize("name", ["tiny", "one"])
def test_log_probs_are_those_of_transformers(folder, tmp_path, name):
    """Of the base, and of an adapter that PEFT reads: of answers, prompts and the likeliest words."""
    with serve(folder, "one", state=tmp_path) as place:
        model: Any = LlamaForCausalLM.from_pretrained(folder).eval()
        if name == "one":
            model = PeftModel.from_pretrained(model, place.policies.save("one")).eval()
        body = {"model": name, "prompt": [[1, 5, 6, 9], [1, 12]], "max_tokens": 9, "seed": 2, "return_token_ids": True,
                "ignore_eos": True}  # fmt: skip
        for how in ({}, {"temperature": 0.3, "top_k": 5}):
            answer = place.good(COMPLETIONS, **body, **how, logprobs=4, prompt_logprobs=2)
            echoed = place.good(COMPLETIONS, **body, **how, logprobs=4, echo=True)
            for choice, echo in zip(answer["choices"], echoed["choices"], strict=True):
                prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
                assert echo["token_ids"] == tokens
                expected = reference(model, [*prompt, *tokens])
                own = expected.gather(1, torch.tensor([*prompt[1:], *tokens])[:, None])[:, 0]
                found, all_of_it = choice["logprobs"], echo["logprobs"]
                torch.testing.assert_close(torch.tensor(found["token_logprobs"]), own[-9:], atol=2e-5, rtol=0)
                assert all_of_it["token_logprobs"][0] is None
                torch.testing.assert_close(torch.tensor(all_of_it["token_logprobs"][1:]), own, atol=2e-5, rtol=0)
                for row, top in zip(expected[-9:], found["top_logprobs"], strict=True):
                    best = sorted(top.values(), reverse=True)[:4]
                    torch.testing.assert_close(torch.tensor(best), row.topk(4).values, atol=2e-5, rtol=0)
                assert choice["prompt_logprobs"][0] is None
                for row, token, words in zip(expected, prompt[1:], choice["prompt_logprobs"][1:], strict=False):
                    assert {int(word) for word in words} == {token, *row.topk(2).indices.tolist()}
                    for rank, best in enumerate(row.topk(2).indices.tolist(), 1):
                        assert words[str(best)]["rank"] == rank
                    torch.testing.assert_close(words[str(token)]["logprob"], float(row[token]), atol=2e-5, rtol=0)
                assert echo["text"].endswith(choice["text"])


def test_in_exact_mode_drawn_log_probs_are_those_of_scoring_to_the_bit(each):
    """Also beside other rows, of another policy, and as lm-eval asks: without an answer."""
    place, name, text = each
    body = {"prompt": text, "max_tokens": 24, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: place.good(
            COMPLETIONS, **body, model=name if i % 2 else "tiny", seed=i, n=1 + i % 3), range(16)))  # fmt: skip
    for i, answer in enumerate(answers):
        for choice in answer["choices"]:
            n, ids = len(choice["prompt_token_ids"]), choice["prompt_token_ids"] + choice["token_ids"]
            scored = place.good(COMPLETIONS, model=answer["model"], prompt=ids, max_tokens=0, echo=True, logprobs=1)
            assert scored["choices"][0]["logprobs"]["token_logprobs"][n:] == choice["logprobs"]["token_logprobs"]
            assert scored["usage"]["completion_tokens"] == 0
        assert whole(place.good(COMPLETIONS, **body, model=answer["model"], seed=i, n=1 + i % 3)) == whole(answer)


# ---- tools -----------------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SUM = [{"role": "user", "content": "two plus three"}]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The model of the examples, which says after each word the next one of a script."""
    place = Path(__file__).resolve().parents[2] / "examples" / "serve" / "tiny_server.py"
    folder = tmp_path_factory.mktemp("scripted")
    runpy.run_path(str(place))["write_model"](folder)
    with serve(folder) as served:
        yield served


def test_tools_reach_the_template_and_calls_come_back(scripted):
    body, decode = (
        {"messages": SUM, "tools": TOOLS, "n": 2, "return_token_ids": True},
        scripted.service.reader.tokenizer.decode,
    )
    answer = scripted.good(CHAT, **body)
    assert decode(answer["prompt_token_ids"]) == "two plus three <eos> reply"
    for choice, streamed in zip(answer["choices"], joined(scripted.stream(CHAT, **body)), strict=True):
        message = choice["message"]
        assert (choice["finish_reason"], message["content"]) == ("tool_calls", "calling")
        (call,) = message["tool_calls"]
        assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": '{"a": 2, "b": 3}'})
        assert (streamed["finish_reason"], streamed["text"]) == ("tool_calls", "calling")
        assert streamed["calls"] == [{"index": 0, **call, "id": streamed["calls"][0]["id"]}]
    for options in ({"tools": None}, {"tool_choice": "none"}):
        (choice,) = scripted.good(CHAT, **{**body, "n": 1, **options})["choices"]
        assert (choice["finish_reason"], choice["message"]) == ("stop", {"role": "assistant", "content": "5"})
    said = [*SUM, answer["choices"][0]["message"], {"role": "tool", "tool_call_id": "x", "content": "5"}]
    last = scripted.good(CHAT, **{**body, "messages": said})
    assert decode(last["prompt_token_ids"]) == "two plus three <eos> calling <eos> 5 <eos> result"
    for inner in ("{broken}", "[1]", '{"a": 1}', '{"name": 1}'):
        text = f"<tool_call> {inner} </tool_call>"
        assert tool_calls(text) == (text, []), "what is no call is text"


# ---- who asks, and who leaves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_rows_along(place, stream, survived):
    expected = place.good(COMPLETIONS, **TEXT)["choices"]
    turns = place.thread.turns
    body = {**LONG, "model": "two", "stream": stream, "n": 60}  # 8 rows at once
    with httpx2.Client(base_url=place.url, trust_env=False) as client:
        for _ in range(5):
            if stream:
                with client.stream("POST", COMPLETIONS, json=body):
                    pass
            else:  # no step is made before the client has left
                with place.thread.engine.between_steps(), pytest.raises(httpx2.ReadTimeout):
                    client.post(COMPLETIONS, json=body, timeout=0.3)
            until(lambda: place.thread.owed == 0)
            assert (place.thread.n_live, place.thread.n_waiting) == (0, 0)
            assert all(policy.holders == 0 for policy in place.policies)
    assert place.thread.is_alive
    assert place.thread.turns - turns < 5 * 59 * 4, "or all would have been written to the end"
    assert place.good(COMPLETIONS, **TEXT)["choices"] == expected
    survived("faults", 1)


def test_vllms_client_of_this_repository_draws_here(place):
    client = VllmClient(place.url, timeout=60)
    client.health()
    assert [(m.name, m.parent, m.max_model_len) for m in client.models()] == [
        ("tiny", None, 64), ("one", "tiny", 64), ("two", "tiny", 64),
    ]  # fmt: skip
    vocabulary = place.service.reader.vocabulary
    for sampling, greedy in (
        (SamplingConfig(max_completion_length=12, eos_token_ids=(2,)), False),
        (SamplingConfig(max_completion_length=12, eos_token_ids=(2,)), True),
        (SamplingConfig(max_completion_length=9, eos_token_ids=(2, 9), min_completion_length=4, top_k=7), False),
        (SamplingConfig(max_completion_length=20, eos_token_ids=(), stop=("sun", "cat")), False),
    ):
        for seed in range(8):
            body = sampling_body(sampling, seed=seed, greedy=greedy)
            answer = client.complete("one", [1, 5, 6], body, vocabulary=vocabulary)
            ended = answer.tokens[-1] in sampling.eos_token_ids
            assert len(answer.tokens) <= sampling.max_completion_length
            assert not set(answer.tokens[: max(0, sampling.min_completion_length - 1)]) & set(sampling.eos_token_ids)
            if not sampling.stop:
                assert answer.finish_reason == ("stop" if ended else "length")
            elif answer.finish_reason == "stop":
                assert answer.stop_reason in sampling.stop
            assert answer == client.complete("one", [1, 5, 6], body, vocabulary=vocabulary)
    with pytest.raises(Exception, match="/v1/completions, got status 404: model: expected one of"):
        client.complete("nobody", [5], {}, vocabulary=vocabulary)


def test_health_models_metrics_status_and_the_page(folder, tmp_path, monkeypatch):
    with serve(folder, "one", "two", state=tmp_path) as place:
        get = place.client.get
        assert get("/health").status_code == 200
        one = get("/v1/models/one").json()
        assert (one["id"], one["root"], one["parent"], one["object"]) == ("one", "tiny", "tiny", "model")
        assert one in get("/v1/models").json()["data"]
        assert str(folder) not in get("/v1/models").text, "a folder is nobody's business"
        answer = place.good(COMPLETIONS, **TEXT, return_token_ids=True)
        assert place.ask(COMPLETIONS, {})[0] == 400
        place.policies.evict("two")
        add(place.policies, "three", 2)
        place.policies.pause("three")
        until(lambda: place.service.requests)
        monkeypatch.setattr(pool, "_bytes", None)  # no look at the page counts the bytes of all policies
        facts = get("/status").json()
        assert (facts["model"], facts["exact"], facts["live"], facts["owed_tokens"]) == ("tiny", True, 0, 0)
        assert facts["tokens"] == len(answer["choices"][0]["token_ids"])
        assert {p["name"]: p["state"] for p in facts["policies"]} == {
            "tiny": "frozen", "one": "trained", "three": "paused", "two": "on disk",
        }  # fmt: skip
        weights = sum(p.numel() for p in place.policies.get("one").model.backbone().slots.parameters())
        held = [p["bytes"] for p in facts["policies"]]
        assert (held[0], held[1] // weights) == (0, 4 * 4), "weights, gradients and two moments"
        assert [COMPLETIONS, 200, 1] in facts["requests"]
        assert [COMPLETIONS, 400, 1] in facts["requests"]
        metrics = get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        values = dict(line.rsplit(" ", 1) for line in metrics.text.splitlines() if not line.startswith("#"))
        assert float(values["rlhf_engine_tokens"]) == facts["tokens"]
        assert values[f'rlhf_engine_requests{{path="{COMPLETIONS}",status="400"}}'] == "1"
        assert all(math.isfinite(float(value)) for value in values.values())
        page = get("/")
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert [x for x in facts if f"s.{x}" not in page.text and x not in ("turns", "owed_tokens")] == []
        broken = place.thread.call(lambda: 1 // 0)  # whatever fails, an error object comes, and the server goes on
        with pytest.raises(ZeroDivisionError):
            broken.result(60)
        place.service.history = None
        answer = httpx2.get(f"{place.url}/status", trust_env=False)
        assert answer.json()["error"]["message"] == "GET '/status' failed by a fault of the server (TypeError)"
        assert place.good(COMPLETIONS, **TEXT)
        place.thread.close()
        assert get("/health").status_code == 503
        status, answer = place.ask(COMPLETIONS, TEXT)
        assert (status, answer["error"]["type"]) == (503, "server_error")
