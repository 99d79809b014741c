"""Judges: functions as TRL has them, and a server with chat completions on a loopback address."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlhf_engine.config import EvaluateConfig
from rlhf_engine.errors import ConfigError, RewardError, RolloutServerError
from rlhf_engine.tools import judges
from rlhf_engine.tools.judges import TEMPLATE, FunctionJudge, Pair, ServerJudge, _verdict, by_reward, make_judge

Reply = Callable[[dict[str, Any]], "tuple[int, Any]"]


@contextmanager
def serving(reply: Reply) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on a loopback address whose chat completions are what `reply` makes of a request; and the requests."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
            status, found = reply(body)
            raw = json.dumps(found).encode() if not isinstance(found, bytes) else found
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *of: None  # type: ignore[method-assign]  # of clients that went away
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def says(text: str | None) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def likes_longer(body: dict[str, Any]) -> tuple[int, Any]:
    question = body["messages"][0]["content"]
    first = question.split("[Answer A]\n")[1].split("\n\n[Answer B]")[0]
    second = question.split("[Answer B]\n")[1].split("\n\nJudge by")[0]
    return says("I compare the two.\n\n" + ("TIE" if len(first) == len(second) else "AB"[len(second) > len(first)]))


def server_judge(url: str, **options: Any) -> ServerJudge:
    return ServerJudge(url, **{"model": "m", "template": TEMPLATE, "timeout": 20.0, "requests": 3, **options})


PAIRS = [Pair("p", "longer one", "short"), Pair("p", "a", "bb"), Pair("q", "xy", "zw")]


def test_the_last_line_is_the_verdict():
    for reply, preference in (
        ("A", 1.0), ("B", 0.0), ("TIE", 0.5), ("tie.", 0.5), ("[[A]]", 1.0), ("**B**", 0.0), ("C", 0.5),
        ("Answer: B", 0.0), ("Verdict: A", 1.0), ("It is A in some ways.\nB\n\n", 0.0),
        ("Both are fine", None), ("", None), ("A or B", None), ("\n", None),
    ):  # fmt: skip
        assert _verdict(reply).preference == preference, reply


def test_a_server_is_asked_by_openais_protocol(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(likes_longer) as (url, seen):
        found = dict(server_judge(f"{url}/v1").verdicts(PAIRS))
    assert [found[i].preference for i in range(3)] == [1.0, 0.0, 0.5]
    assert {request["path"] for request in seen} == {"/v1/chat/completions"}
    assert {request["key"] for request in seen} == {"Bearer secret"}
    assert all(request["model"] == "m" and request["temperature"] == 0 for request in seen)


def test_an_answer_cannot_write_into_the_question():
    with serving(lambda body: says("A")) as (url, seen):
        list(server_judge(url).verdicts([Pair("{first}", "{second} {prompt}", "plain")]))
    question = seen[0]["messages"][0]["content"]
    assert "[Prompt]\n{first}\n" in question
    assert "[Answer A]\n{second} {prompt}\n" in question


def test_a_busy_server_is_given_time(monkeypatch):
    monkeypatch.setattr(judges, "_FIRST_PAUSE", 0.01)
    left = iter([429, 500, 429])

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        status = next(left, 200)
        return says("B") if status == 200 else (status, {"error": "slow down"})

    with serving(reply) as (url, seen):
        assert [v.preference for _, v in server_judge(url, requests=1).verdicts(PAIRS[:1])] == [0.0]
    assert len(seen) == 4
    with serving(lambda body: says(None)) as (url, _):
        assert [v.preference for _, v in server_judge(url).verdicts(PAIRS[:1])] == [None]


def test_a_server_that_judges_nothing_is_an_error():
    for reply, message in (
        ((400, {"error": "no such model"}), "expected a verdict from /v1/chat/completions, got status 400.*no such"),
        ((401, {}), "expected the server's key in the environment variable OPENAI_API_KEY, got 401"),
        ((200, b"<html>"), r"expected choices\[0\].message.content from /v1/chat/completions, got '<html>'"),
        ((200, {"choices": []}), r"expected choices\[0\].message.content"),
        ((200, {"choices": [{"message": {"content": 3}}]}), "expected text as choices"),
    ):
        with serving(lambda body, reply=reply: reply) as (url, _), pytest.raises(RolloutServerError, match=message):
            list(server_judge(url).verdicts(PAIRS))


def test_a_slow_server_is_an_error_in_time_and_names_the_option():
    released = threading.Event()

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        released.wait(20)
        return says("A")

    with serving(reply) as (url, _):
        began = time.monotonic()
        with pytest.raises(RolloutServerError, match=r"within 0\.3 s \(judge_timeout\)"):
            list(server_judge(url, timeout=0.3).verdicts(PAIRS * 4))
        assert time.monotonic() - began < 8
        released.set()


def test_a_server_that_is_not_there_is_named(short_pauses):
    with pytest.raises(RolloutServerError, match=r"judge http://127\.0\.0\.1:9: expected a server with OpenAI's chat"):
        list(server_judge("http://127.0.0.1:9").verdicts(PAIRS))


def test_template_has_to_show_both_answers():
    with pytest.raises(ConfigError, match=r"judge_template: .*got none of \{second\}"):
        server_judge("http://localhost:1", template="{prompt} {first}")


BY_LENGTH = "[0 if len(a) > len(b) else 1 if len(b) > len(a) else 0.5 for a, b in completions]"


def write(tmp_path, body: str) -> str:
    path = tmp_path / f"judge_{len(list(tmp_path.iterdir()))}.py"  # a file is imported once
    path.write_text(body)
    return f"{path}:judge"


JUDGE = "def judge(prompts, completions):\n    "
OF_TRL = (
    "class judge:\n    def judge(self, prompts, completions, shuffle_order=True):\n        assert not shuffle_order"
)


def test_functions_and_trls_judges(tmp_path):
    for body, expected in (
        (f"{JUDGE}return {BY_LENGTH}\n", [1.0, 0.0, 0.5]),
        (f"{OF_TRL}\n        return {BY_LENGTH}\n", [1.0, 0.0, 0.5]),
        (f"{JUDGE}return [-1, None, 1]\n", [None, None, 0.0]),
    ):
        found = dict(FunctionJudge(write(tmp_path, body)).verdicts(PAIRS))
        assert [found[i].preference for i in range(3)] == expected
    for body, message in (
        ("return [0]\n", "expected a list of 3 results"),
        ("return 'abc'\n", "expected a list of 3 results"),
        ("return [7] * 3\n", "expected 0, 1, 0.5, -1 or None .*, got 7"),
        ("1 / 0\n", "raised ZeroDivisionError"),
    ):
        with pytest.raises(RewardError, match=message):
            list(FunctionJudge(write(tmp_path, JUDGE + body)).verdicts(PAIRS))


def test_a_judge_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="judge: there is no file"):
        FunctionJudge(str(tmp_path / "none.py:judge"))
    options = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o"}
    with pytest.raises(ConfigError, match="judge_model: expected the name of the server's model"):
        EvaluateConfig(**options, judge="http://localhost:1")
    with pytest.raises(ConfigError, match="judge_template: expected a text file"):
        make_judge(
            EvaluateConfig(**options, judge="http://localhost:1", judge_model="m", judge_template=str(tmp_path / "no"))
        )


def test_by_reward():
    assert [by_reward(*pair) for pair in [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0), (None, 1.0), (1.0, None)]] == [
        1.0, 0.0, 0.5, None, None,
    ]  # fmt: skip
