"""Rewards that are checked without a model: right, wrong and hostile answers of each, options, and a run."""

from __future__ import annotations

import json
import time

import pytest

from rlhf_engine.errors import ConfigError
from rlhf_engine.scoring import verifiable
from rlhf_engine.scoring.reward_functions import load_reward, score_with_functions, unique_names, weighted_total
from rlhf_engine.scoring.verifiable import make


def one(spec: str, answer: str, **columns: object) -> float | None:
    """The reward of one answer."""
    return make(spec)(completions=[answer], **{name: [value] for name, value in columns.items()})[0]


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("so: <think>a</think><answer>4</answer>", 0.0),
        ("<think>a</think>", 0.0),
        ("", 0.0),
    ],
)
def test_format(answer, reward):
    assert one("format", answer) == reward
    assert make("format")(completions=[[{"role": "assistant", "content": answer}]]) == [reward]


def test_a_format_of_ones_own():
    assert one(r"format,pattern=\d+", "123") == 1.0
    assert one(r"format,pattern=\d+", "123 ") == 0.0
    with pytest.raises(ConfigError, match=r"^reward_funcs: format: expected a regular expression, got '\('"):
        make("format,pattern=(")


@pytest.mark.parametrize(("tokens", "reward"), [(0, -1.0), (8, -0.5), (10, 0.0), (20, 0.0), (22, -0.5), (900, -1.0)])
def test_length(tokens, reward):
    length = make("length,least=10,most=20,buffer=4")
    assert length(completions=[""], completion_ids=[list(range(tokens))]) == [reward]


def test_length_is_the_soft_overlong_punishment():
    """DAPO, equation 13: 0 up to L_max − L_cache, then (L_max − L_cache − |y|) / L_cache, −1 beyond L_max."""
    longest, cache = 30, 12
    lengths = [0, 17, 18, 19, 24, 30, 31, 99]
    expected = [0.0 if n <= longest - cache else max((longest - cache - n) / cache, -1.0) for n in lengths]
    made = make(f"length,most={longest - cache},buffer={cache}")
    assert made(completions=[""] * 8, completion_ids=[[1] * n for n in lengths]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("one two three four", 0.0),
        ("a b c a b c", -0.25),  # abc, bca, cab, abc: one of four was there before
        ("no no no no no", -2 / 3),
        ("No no NO no", -0.5),
        ("two words", 0.0),
        ("", 0.0),
    ],
)
def test_repetition(answer, reward):
    assert one("repetition", answer) == pytest.approx(reward)


def test_repetition_of_long_answers_takes_no_time():
    began = time.perf_counter()
    assert one("repetition,n=4", "word " * 200_000) == pytest.approx(-1.0, abs=1e-4)
    assert time.perf_counter() - began < 5


# ---- JSON ------------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"n": 3}', 1.0),
        ('Here it is:\n```json\n{"n": 3}\n```\nDone.', 1.0),
        ('{"n": "3"}', 0.0),
        ('{"n": 3, "m": 4}', 0.0),
        ("{'n': 3}", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),  # deeper than Python goes
        ("1" * 10_000, 0.0),  # more digits than Python reads
    ],
)
def test_json_schema(answer, reward, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    assert one(f"json_schema,schema={file}", answer) == reward
    assert one("json_schema", answer, schema=SCHEMA) == reward
    assert one("json_schema", answer, schema=json.dumps(SCHEMA)) == reward


def test_a_schema_that_refers_elsewhere_fetches_nothing():
    referencing = pytest.importorskip("referencing")
    with pytest.raises(referencing.exceptions.Unresolvable):
        one("json_schema", "{}", schema={"$ref": "http://127.0.0.1:9/schema"})


def test_json_schema_without_a_schema(tmp_path):
    with pytest.raises(ConfigError, match="json_schema: expected a column `schema`, or json_schema,schema=FILE"):
        one("json_schema", "{}")
    with pytest.raises(ConfigError, match="expected a file with a schema, got 'nowhere'"):
        make("json_schema,schema=nowhere")
    with pytest.raises(ConfigError, match="expected a JSON schema, got 'nothing' is not valid"):
        one("json_schema", "{}", schema={"type": "nothing"})


# ---- code ------------------------------------------------------------------------------------------------------------

TESTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0\n"
RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (RIGHT, 1.0),
        (f"Like this:\n```python\n{RIGHT}```\n", 1.0),
        (f"```\nprint('first try')\n```\nbetter:\n```python\n{RIGHT}```", 1.0),
        (RIGHT + "print('x' * 1000)\n", 1.0),
        ("def add(a, b):\n    return a - b\n", 0.0),
        ("def add(a, b:\n", 0.0),
        ("I cannot.", 0.0),
        ("", 0.0),
        (RIGHT + "import sys; sys.exit(0)", 0.0),  # before the tests
        (RIGHT + "import os; os._exit(0)", 0.0),
        ("import os\ndef add(a, b): os._exit(0)", 0.0),
        ("class Same:\n    __eq__ = lambda *_: True\ndef add(a, b): raise SystemExit(0)", 0.0),
        (RIGHT + "x = [0] * 10**9", 0.0),  # memory
        (RIGHT + "open('x', 'wb').write(b'0' * 2**26)", 0.0),  # disk
        (RIGHT + "import os\nos.kill(os.getpid(), 9)", 0.0),
        (RIGHT + "\ud800", 0.0),  # no text that a file could hold
        (RIGHT + "\0", 0.0),
    ],
)
def test_code(answer, reward):
    assert one("code,timeout=20", answer, tests=TESTS) == reward
    assert one("code,timeout=20", answer, tests=TESTS.splitlines()) == reward


def test_code_that_does_not_end_ends_with_what_it_started(tmp_path):
    mark = tmp_path / "mark"
    sleeps = f"import time; time.sleep(4); open({str(mark)!r}, 'w')"
    late = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {sleeps!r}])\n"
    began = time.perf_counter()
    answers = [RIGHT + "while True: pass", RIGHT + late + "import time; time.sleep(60)", RIGHT + "input()", RIGHT]
    assert make("code,timeout=2,jobs=4")(completions=answers, tests=[TESTS] * 4) == [0.0, 0.0, 0.0, 1.0]
    assert time.perf_counter() - began < 20
    time.sleep(4)
    assert not mark.exists()


def test_code_sees_an_empty_folder_and_no_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    probe = "import os, sys\nassert os.listdir() == []\nassert 'HF_TOKEN' not in os.environ\nimport json\n"
    assert one("code,timeout=20", RIGHT + probe, tests=TESTS) == 1.0
    with pytest.raises(ConfigError, match="code: expected a column `tests` with Python code, got none"):
        one("code", RIGHT)


# ---- math ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judge():
    pytest.importorskip("math_verify")
    made = make("math,timeout=20")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("gold", "answer", "reward"),
    [
        ("72", "48 + 24 = 72, so the answer is 72.", 1.0),
        ("Natalia sold 48/2 = 24 clips.\n#### 72", "#### 72", 1.0),
        (r"\frac{1}{2}", r"$\boxed{0.5}$", 1.0),
        (r"$\frac{1}{2}$", r"\boxed{\frac{2}{4}}", 1.0),
        ("x + 1", r"$\boxed{1 + x}$", 1.0),
        ("x + 1", "1", 0.0),
        ("1,234.50", "It costs $1234.5 in all", 1.0),
        ("-3", "so x = -3", 1.0),
        (r"\dfrac{3}{4}", "3/4", 1.0),
        ("72", "The answer is 71.", 0.0),
        ("72", "", 0.0),
        ("72", "I do not know", 0.0),
        ("72", r"\boxed{\frac{1}{0}}", 0.0),
        ("72", "\\boxed{" * 500, 0.0),
        ("", "72", None),  # nothing to compare with: the row is left out
    ],
)
def test_math(judge, gold, answer, reward):
    assert judge(completions=[answer], answer=[gold]) == [reward]


def test_an_answer_that_takes_too_long_is_wrong_and_the_next_is_judged():
    pytest.importorskip("math_verify")
    judge = make("math,timeout=2,column=solution")
    tower = r"$\boxed{" + "^{".join(["9"] * 12) + "}" * 11 + "}$"
    began = time.perf_counter()
    assert judge(completions=[tower, "7"], solution=["7", "7"])[1] == 1.0
    assert time.perf_counter() - began < 60
    judge.close()
    assert judge(completions=["7"], solution=["7"]) == [1.0]  # it starts again
    judge.close()
    with pytest.MonkeyPatch.context() as patch:  # a process that ends at once is no wrong answer
        patch.setattr(verifiable.sys, "executable", "/bin/false")
        with pytest.raises(RuntimeError, match="the process that compares answers did not start"):
            judge(completions=["7"], solution=["7"])
    with pytest.raises(ConfigError, match=r"math: expected a column 'solution', got \['answer'\]"):
        judge(completions=["7"], answer=["7"])


# ---- by name ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lenght", "expected reward_model, code, format, json_schema, length, math, repetition, module:function or"),
        ("length,most", "length: expected options least, most, buffer as key=value, got 'most'"),
        ("length,longest=3", "length: expected options least, most, buffer as key=value, got 'longest=3'"),
        ("length,most=x", "length: expected a whole number for most, got 'x'"),
        ("length,least=5,most=4", "length: expected most of at least 5, got 4"),
        ("length,buffer=0", "length: expected a buffer of at least 1 token, got 0"),
        ("repetition,n=0", "repetition: expected n of at least 1, got 0"),
        ("code,timeout=fast", "code: expected a number for timeout, got 'fast'"),
        ("code,timeout=0", "code: expected a timeout above 0 and memory of 64 at least, got 0 and 512"),
        ("math,timeout=0", "math: expected a timeout above 0, got 0"),
    ],
)
def test_names_and_options_that_do_not_fit(spec, message):
    with pytest.raises(ConfigError) as caught:
        load_reward(spec)
    assert str(caught.value).startswith(f"reward_funcs: {message}")


@pytest.mark.parametrize(("package", "spec"), [("math_verify", "math"), ("jsonschema", "json_schema")])
def test_without_its_package_one_line_says_what_has_it(monkeypatch, package, spec):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ConfigError, match=rf"{spec}: expected the package .*, got none; pip install .*\[rewards\]"):
        load_reward(spec)


def test_several_are_summed_by_weights():
    functions = [load_reward(spec) for spec in ("format,pattern=yes", "length,most=2", "length,most=9")]
    assert unique_names(functions) == ["format", "length", "length_2"]
    found = score_with_functions(functions, ["p", "p"], ["yes", "no"], [[1, 2, 3], [1]])
    assert weighted_total(list(found.values()), [1.0, 0.5, 2.0]) == [0.5, 0.0]
    assert found == {"format": [1.0, 0.0], "length": [-1.0, 0.0], "length_2": [0.0, 0.0]}
    assert set(verifiable.BUILT_IN) == {"code", "format", "json_schema", "length", "math", "repetition"}
