"""Rewards that are checked without a model: right, wrong and hostile answers of each, options, and a run."""

import ctypes
import json
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from rlhf_engine.errors import ConfigError
from rlhf_engine.scoring import verifiable
from rlhf_engine.scoring.rewards import load_reward, score_with_functions, unique_names, weighted_total
from rlhf_engine.scoring.verifiable import make

judge_of = cache(make)
"""Reward by its spec; those of this file share their processes."""


def one(spec: str, answer: str, **columns: object) -> float | None:
    """The reward of one answer."""
    return judge_of(spec)(completions=[answer], **{name: [value] for name, value in columns.items()})[0]


def test_format():
    for answer, reward in [
        ("<think>a\nb</think>\n<answer>4</answer>\n", 1.0),
        (" \n<think>a</think><answer>4</answer>", 1.0),  # as templates and tokenizers begin
        ("<think>if a < b or b > a</think>\n\n<answer><b>4</b></answer>", 1.0),
        ("so: <think>a</think><answer>4</answer>", 0.0),
        ("<think>a</think>", 0.0),
        ("", 0.0),
    ]:
        assert one("format", answer) == reward
        assert make("format")(completions=[[{"role": "assistant", "content": answer}]]) == [reward]


def test_a_format_whose_thoughts_begin_in_the_prompt():
    answers = ["a\n</think>\n<answer>4</answer>", "<think>a</think><answer>4</answer>"]
    for prompt, rewards in {"<|assistant|>\n<think>\n": [1.0, 0.0], "What is <think>?": [0.0, 1.0]}.items():
        assert make("format")(prompts=[prompt] * 2, completions=answers) == rewards
    messages = [{"role": "user", "content": "2 + 2?"}]  # TRL's conversations do not show what the template begins
    assert make("format")(prompts=[messages] * 2, completions=answers) == [1.0, 1.0]


def test_a_format_of_ones_own():
    assert one(r"format,pattern=\d+", "123") == 1.0
    assert one(r"format,pattern=\d+", "123 ") == 0.0
    with pytest.raises(ConfigError, match=r"^reward_funcs: format: expected a regular expression, got '\('"):
        make("format,pattern=(")


def test_length():
    for tokens, reward in [(0, -1.0), (8, -0.5), (10, 0.0), (20, 0.0), (22, -0.5), (900, -1.0)]:
        length = make("length,least=10,most=20,buffer=4")
        assert length(completions=[""], completion_ids=[list(range(tokens))]) == [reward]


def test_length_is_the_soft_overlong_punishment():
    """DAPO, equation 13: 0 up to L_max − L_cache, then (L_max − L_cache − |y|) / L_cache, −1 beyond L_max."""
    longest, cache = 30, 12
    lengths = [0, 17, 18, 19, 24, 30, 31, 99]
    expected = [0.0 if n <= longest - cache else max((longest - cache - n) / cache, -1.0) for n in lengths]
    made = make(f"length,most={longest - cache},buffer={cache}")
    assert made(completions=[""] * 8, completion_ids=[[1] * n for n in lengths]) == pytest.approx(expected)


def test_repetition():
    for answer, reward in [
        ("one two three four", 0.0),
        ("a b c a b c", -0.25),  # abc, bca, cab, abc: one of four was there before
        ("no no no no no", -2 / 3),
        ("No no NO no", -0.5),
        ("two words", 0.0),
        ("", 0.0),
    ]:
        assert one("repetition", answer) == pytest.approx(reward)


def test_repetition_of_long_answers_takes_no_time():
    began = time.perf_counter()
    assert one("repetition,n=4", "word " * 200_000) == pytest.approx(-1.0, abs=1e-4)
    assert time.perf_counter() - began < 5


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def test_json_schema(tmp_path):
    for answer, reward in [
        ('{"n": 3}', 1.0),
        ('Here it is:\n```json\n{"n": 3}\n```\nDone.', 1.0),
        ('{"n": "3"}', 0.0),
        ('{"n": 3, "m": 4}', 0.0),
        ("{'n': 3}", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),  # deeper than Python goes
        ("1" * 10_000, 0.0),  # more digits than Python reads
    ]:
        file = tmp_path / "schema.json"
        file.write_text(json.dumps(SCHEMA))
        assert one(f"json_schema,schema={file}", answer) == reward
        assert one("json_schema", answer, schema=SCHEMA) == reward
        assert one("json_schema", answer, schema=json.dumps(SCHEMA)) == reward


def test_a_schema_that_refers_elsewhere_fetches_nothing():
    with pytest.raises(ConfigError, match=r"expected a JSON schema that refers to itself alone, got .*9/schema"):
        one("json_schema", "{}", schema={"$ref": "http://127.0.0.1:9/schema"})


def test_json_schema_without_a_schema(tmp_path):
    with pytest.raises(ConfigError, match="json_schema: expected a column `schema`, or json_schema,schema=FILE"):
        one("json_schema", "{}")
    with pytest.raises(ConfigError, match="expected a file with a schema, got 'nowhere'"):
        make("json_schema,schema=nowhere")
    with pytest.raises(ConfigError, match="expected a JSON schema, got 'nothing' is not valid"):
        one("json_schema", "{}", schema={"type": "nothing"})


TESTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0\n"
RIGHT = "def add(a, b):\n    return a + b\n"


def test_code():
    for answer, reward in [
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
    ]:
        assert one("code,timeout=20", answer, tests=TESTS) == reward
        assert one("code,timeout=20", answer, tests=TESTS.splitlines()) == reward


def test_code_that_does_not_end_ends_with_what_it_started(tmp_path):
    mark = tmp_path / "mark"
    sleeps = f"import time; time.sleep(3); open({str(mark)!r}, 'w')"
    late = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {sleeps!r}])\n"
    began = time.perf_counter()
    answers = [RIGHT + "while True: pass", RIGHT + late + "import time; time.sleep(60)", RIGHT + "input()", RIGHT]
    assert make("code,timeout=1.5,jobs=4")(completions=answers, tests=[TESTS] * 4) == [0.0, 0.0, 0.0, 1.0]
    assert time.perf_counter() - began < 20
    time.sleep(2)
    assert not mark.exists()


def test_code_sees_an_empty_folder_and_no_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    probe = "import os, sys\nassert os.listdir() == []\nassert 'HF_TOKEN' not in os.environ\nimport json\n"
    assert one("code,timeout=20", RIGHT + probe, tests=TESTS) == 1.0
    with pytest.raises(ConfigError, match="code: expected a column `tests` with Python code, got none"):
        one("code", RIGHT)


@pytest.fixture(scope="module")
def judge():
    pytest.importorskip("math_verify")
    made = make("math,timeout=20")
    yield made
    made.close()


def test_math(judge):
    for gold, answer, reward in [
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
    ]:
        assert judge(completions=[answer], answer=[gold]) == [reward]


def test_an_answer_that_takes_too_long_is_wrong_and_the_next_is_judged():
    pytest.importorskip("math_verify")
    judge = make("math,timeout=1,column=solution")
    tower = r"$\boxed{" + "^{".join(["9"] * 12) + "}" * 11 + "}$"
    began = time.perf_counter()
    assert judge(completions=[tower, "7"], solution=["7", "7"])[1] == 1.0
    assert time.perf_counter() - began < 60
    judge.close()
    assert judge(completions=["7"], solution=["7"]) == [1.0]  # it starts again
    judge.close()
    with pytest.MonkeyPatch.context() as patch:  # a process that ends at once is no wrong answer
        patch.setattr(verifiable.sys, "executable", "/bin/false")
        with pytest.raises(RuntimeError, match="the process that judges answers did not start"):
            judge(completions=["7"], solution=["7"])
    with pytest.raises(ConfigError, match=r"math: expected a column 'solution', got \['answer'\]"):
        judge(completions=["7"], answer=["7"])


EQUALS_ALL = "class Same({}):\n    __eq__ = __ge__ = __le__ = __contains__ = __bool__ = lambda *_: True\n"
FOR_ALL = "import os, sys, json\nfor fd in range(64):\n    try: os.write(fd, {})\n    except OSError: pass\n"
ESCAPED = Path(__file__).with_name("escaped")
HOSTILE_CODE = [
    "import os, sys\nword = sys.stdin.buffer.read()[-16:]\nos.write(1, word)\nos._exit(0)",
    EQUALS_ALL.format("") + "def add(a, b): return Same()",
    EQUALS_ALL.format("int") + "    __hash__ = None\ndef add(a, b): return Same()",
    FOR_ALL.format("b'[1.0]\\n1.0\\n'") + "os._exit(0)",
    FOR_ALL.format("json.dumps({'is': None, 'changed': [], 'said': ''}).encode() + b'\\n'"),
    "import __main__, builtins, json\nbuiltins.AssertionError = json.loads = __main__.judge_code = int\nadd = max",
    "import gc\nseen = [x for x in gc.get_objects() if 'assert add' in str(x)]\ndef add(a, b): return seen[0]",
    "import sys\nsys.settrace(lambda f, *_: sys.settrace)\ndef add(a, b): raise StopIteration",
    "def add(a, b): return 'x' * 10**9", "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "def add(a, b): return add(b, a)",
    RIGHT + "import os\nfor _ in range(5): os.fork()\nwhile True: os.setsid() if os.fork() == 0 else None; input()",
    "def add(a, b):\n    while True: pass",
    "import os\nif os.fork() == 0:\n    os.setsid()\n    os.execv('/bin/sleep', ['sleep', '313'])",
    "from signal import *\nsignal(SIGALRM, SIG_IGN)\nsetitimer(ITIMER_REAL, 0)\nwhile True: pass",
    f"import os\nopen({str(ESCAPED)!r}, 'w').write('x')\ndef add(a, b): return 0",
    "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "class Five(int):\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\ndef add(a, b): return Five(0)",
    "class Any(str):\n    __eq__ = lambda *_: True\ndef add(a, b): return Any('')",
    "import builtins\nbuiltins.__import__ = None\nbuiltins.AssertionError = ValueError",
    "import sys\nsys.modules['json'] = None\ndef add(a, b): return 5 if a == 2 else 1",
    "import threading\nfor _ in range(10**4): threading.Thread(target=input, daemon=False).start()",
    *(f"def add(a, b): {line}" for line in (
        "raise KeyboardInterrupt", "raise SystemExit(0)", "return float('nan')", "return 10 ** 10 ** 10", "yield 5",
        "return type('A', (), {'__eq__': lambda *_: True})()", "return [5]", "return '5'", "return Ellipsis",
    )),
    "exec('x' * 10**8)", "(" * 10**5, "import ctypes\nctypes.string_at(0)", "```python\n```",
    "```python\nassert True\n```",
]  # fmt: skip
HOSTILE_MATH = [
    "<think>6 * 7 = 42</think><answer>41</answer>", "<think>It is \\boxed{42}.</think>The answer is 41.",
    "<think>6 * 7 = 42", "\\boxed{41}\\boxed{42}\\boxed{43}", "\\boxed{41, 42, 43}", "<answer>41, 42, 43</answer>",
    "<answer>41</answer> It may also be \\boxed{42}.", "<answer>42</answer><answer>41</answer>", "<answer></answer> 42",
    "The final answer is $42$. I hope it is correct. No, the final answer is $41$.", "</think>42</think> 41",
    "$\\boxed{" + "^{".join(["9"] * 12) + "}" * 11 + "}$", *(f"\\boxed{{{inside}}}" for inside in (
        "__import__('os').system('sleep 313')", "x", "42 or 43", r"\{41, 42\}", r"(-\infty, \infty)",
        r"41 \text{ or } 42",
        r"\int_0^{10^{99}} x^{x^x} dx", "1/0", "nan", "(" * 5000 + "42" + ")" * 4000, "4.2e", "100000!", "x = y = 41",
    )), "\\boxed{42} no, \\boxed{41}", "\\frac" * 20_000, "4" * 100_000,
]  # fmt: skip
HOSTILE_FORMAT = [
    "<think></think><answer></answer>", "<think> \n</think><answer> 4 </answer>", "<think>a</think><answer>\n</answer>",
    "<think>a</think><answer>4</answer><answer>5</answer>", "<think>a</think><answer>4</answer></answer>",
    "<think>a</think></think><answer>4</answer>", "<think>a<think>b</think><answer>4</answer>",
    "<think>a <answer>4</answer></think><answer>4</answer>", "a</think><answer>4</answer>",
    "<answer>4</answer><think>a</think>", "<think>a</think><answer>" + "<think>" * 20_000,
]  # fmt: skip
HOSTILE_PATTERN = ["a" * n for n in range(30, 38)] + ["a" * 40 + "c", "b", "aab\n", " aab"]
SLOW = {"type": "string", "pattern": "^(a+)+$"}
HOSTILE_JSON = [
    (json.dumps("a" * 40 + "!"), SLOW),
    (json.dumps(["a" * 40 + "!"]), {"items": SLOW}),
    (json.dumps({"a" * 40 + "!": 1}), {"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}),
    (json.dumps([{"n": i} for i in range(5000)] + [{"n": 0}]), {"uniqueItems": True}),
    ("NaN", {"type": "number"}),
    ("[-Infinity]", {"items": {"type": "number"}}),
    ('{"n": true}', SCHEMA),
    ('{"n": 3} {"n": 3}', SCHEMA),
    ('```json\n{"n": 3}\n```\n```json\n{"n": "3"}\n```', SCHEMA),
    ("[" * 100_000 + "]" * 100_000, {}),
    ("1" * 3_000_000, {"type": "integer"}),
    ("", {}),
]


def test_hostile_answers_are_not_paid_and_end_in_time(survived):
    """A right answer beside them is, and no answer makes the run end or wait, or leaves a process or a file."""
    pytest.importorskip("math_verify")
    tables = [  # reward, seconds of an answer, a right answer, columns of hostile answers and of the right one
        ("code,jobs=4", 2.0, RIGHT, HOSTILE_CODE, {"tests": [TESTS] * (len(HOSTILE_CODE) + 1)}),
        ("math", 0.5, "42", HOSTILE_MATH, {"answer": ["42"] * (len(HOSTILE_MATH) + 1)}),
        ("format", 0.5, "<think>a</think><answer>4</answer>", HOSTILE_FORMAT, {}),
        ("format,pattern=(a+)+b", 0.2, "aab", HOSTILE_PATTERN, {}),
        ("json_schema", 0.2, '"aaa"', [a for a, _ in HOSTILE_JSON], {"schema": [s for _, s in HOSTILE_JSON] + [SLOW]}),
    ]
    for spec, seconds, right, hostile, columns in tables:
        assert len(hostile) >= 10
        judge = make(f"{spec},timeout={seconds}")
        judge(completions=[right], **{name: values[-1:] for name, values in columns.items()})  # it has begun
        began = time.perf_counter()
        rewards = judge(completions=[*hostile, right], **columns)
        took = time.perf_counter() - began
        judge.close()
        paid = [h[:90] for h, r in zip(hostile, rewards, strict=False) if r]
        print(spec, paid)
        survived("hostile_answers", len(hostile), len(paid))
        assert rewards == [0.0] * len(hostile) + [1.0], [h for h, r in zip(hostile, rewards, strict=False) if r]
        assert took < (seconds + 1) * len(rewards), spec
    left = [
        path for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists() and b"\x00313\x00" in path.read_bytes()
    ]
    assert left == []
    escaped = ESCAPED.exists()
    ESCAPED.unlink(missing_ok=True)
    assert not (escaped and sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) >= 1)


def test_answers_without_an_end_of_the_thoughts_that_the_prompt_began(judge):
    answers = ["6 * 7 = 42", "6 * 7 = 41?</think>42"]
    prompts = ["What is 6 * 7?<think>\n"] * 2
    assert judge(prompts=prompts, completions=answers, answer=["42"] * 2) == [0.0, 1.0]


def test_math_reads_the_answer(judge):
    for gold, answer in [
        ("42", "<answer>42</answer>"),
        ("42", "<think>41? No.</think>\n\n<answer>\n42\n</answer>"),
        ("42", "<think>41? No.</think>It is \\boxed{42}."),
        ("42", "41? No.</think> 42"),
        ("42", "<answer>\\boxed{42}</answer>"),
        ("42", "<answer>The answer is 42.</answer>"),
        ("42", "<answer>42 dollars</answer>"),
        ("42", "<answer>42.</answer>"),
        ("42", "The answer is $42$, which is 6 times 7."),
        ("x + 1", "<answer>x + 1</answer>"),
        (r"\frac{1}{2}", r"<answer>\frac12</answer>"),
        (r"\{1, 2\}", r"\boxed{1, 2}"),
    ]:
        assert judge(completions=[answer], answer=[gold]) == [1.0]


RIGHT_CODE = {  # what tests may do with an answer: its code, and the tests
    "a function that is handed on": (RIGHT, "def check(candidate):\n    assert candidate(2, b=3) == 5\ncheck(add)"),
    "a method": ("class Solution:\n    def two(self, x): return x[:2]", "assert Solution().two(x=[1, 2, 3]) == [1, 2]"),
    "an object": (
        "class Empty(ValueError): pass\nclass Stack:\n    def __init__(self): self.items = []\n"
        "    def push(self, x):\n        self.items.append(x)\n        return self\n"
        "    def pop(self):\n        if not self.items: raise Empty('none')\n        return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n    def __iter__(self): return iter(self.items)\n"
        "    def __eq__(self, other): return self.items == other.items",
        "s = Stack()\ns.push(3).push((1, 'x'))\nassert len(s) == 2 and list(s) == s.items == [3, (1, 'x')] and 3 in s\n"
        "assert s == Stack().push(3).push((1, 'x')) != Stack() and s != [3, (1, 'x')]\n"
        "assert s.pop() == (1, 'x') and s.pop() == 3\n"
        "for kind in (Empty, ValueError):\n    try: s.pop()\n    except kind as error: assert str(error) == 'none'\n"
        "    else: raise AssertionError",
    ),
    "an object of the tests": (
        "def flip(n):\n    if n: n.left, n.right = flip(n.right), flip(n.left)\n    return n",
        "class Node:\n    def __init__(self, v, left=None, right=None):\n"
        "        self.v, self.left, self.right = v, left, right\n"
        "t = Node(1, Node(2, Node(4)), Node(3))\nassert flip(t) is t and t.right.right.v == 4 and t.left.v == 3",
    ),
    "changed in place": (
        "def turn(m): m[:] = [list(r) for r in zip(*m)]",
        "m = [[1, 2]]\nturn(m)\nassert m == [[1], [2]]",
    ),
    "printed": (
        "def greet(n): print('hi', n)",
        "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out): greet('you')\n"
        "assert out.getvalue() == 'hi you\\n'",
    ),
    "a generator": ("def upto(n): yield from range(n)", "assert list(upto(3)) == [0, 1, 2] and next(upto(1)) == 0"),
    "types of its own": (
        "from collections import *\nimport enum\nP = namedtuple('P', 'x y')\ndef point(): return P(1, 2)\n"
        "def count(s): return Counter(s)\nclass Hue(enum.Enum): RED = 1",
        "assert point() == (1, 2) and point().y == 2 and count('aab') == {'a': 2, 'b': 1}\n"
        "assert count('aab').most_common(1) == [('a', 2)] and Hue.RED is Hue.RED and Hue.RED.value == 1",
    ),
    "plain data": (
        "def data(x): return [x, {1: (2, {3}), 'a': [None, True, 1.5, float('inf'), b'x', 2j, range(3), 10**5000]}]",
        "assert data(()) == [(), {1: (2, {3}), 'a': [None, True, 1.5, float('inf'), b'x', 2j, range(3), 10**5000]}]",
    ),
    "arrays": (
        "import numpy as np\ndef twice(x): return np.asarray(x) * 2\ndef mean(x): return np.mean(x)",
        "import numpy as np\nassert np.allclose(twice(np.array([1, 2])), [2, 4]) and mean([1, 2]) == 1.5",
    ),
    "a function of the tests": (
        "def order(x, key): return sorted(x, key=key)",
        "assert order([3, -1], lambda x: -x) == [3, -1]",
    ),
    "a name of Python's": ("def sum(a, b): return a + b + 1", "assert sum(10, 15) == 26"),
    "a module that the tests did not import": (
        "def pi(): return 3.14159265",
        "assert math.isclose(pi(), math.pi, rel_tol=1e-6)",
    ),
    "a file": ("def save(): open('f', 'w').write('x')", "save()\nassert open('f').read() == 'x'"),
    "operators": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, other): return V(self.x + other.x)\n"
        "    def __eq__(self, other): return self.x == other.x\n    def __repr__(self): return f'V({self.x})'",
        "a = V(1) + V(2)\nassert a == V(3) and repr(a) == 'V(3)'\na.x = 7\nassert a == V(7)",
    ),
    "unittest": (
        RIGHT,
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(add(1, 2), 3)\n"
        "        with self.assertRaises(TypeError): add()\n"
        "found = unittest.defaultTestLoader.loadTestsFromTestCase(T).run(unittest.TestResult())\n"
        "assert found.testsRun == 1 and found.wasSuccessful()",
    ),
}


def test_right_code_is_paid_whatever_the_tests_do_with_it():
    answers, tests = zip(*RIGHT_CODE.values(), strict=True)
    rewards = judge_of("code,timeout=20")(completions=answers, tests=tests)
    assert dict(zip(RIGHT_CODE, rewards, strict=True)) == dict.fromkeys(RIGHT_CODE, 1.0)


@pytest.mark.skipif(
    sys.platform != "linux" or ctypes.CDLL(None).syscall(444, None, 0, 1) < 6, reason="needs Landlock with signals"
)
def test_an_answers_process_reaches_its_folder_and_python_alone(tmp_path):
    (tmp_path / "tests").write_text("the tests")
    reaches = [
        "open(f'/proc/{os.getppid()}/mem', 'r+b')",  # where the tests are
        "open(f'/proc/{os.getppid()}/environ')",
        "open(__main__.__file__, 'a')",  # the judge of the next answer
        f"open({str(tmp_path / 'tests')!r})",
        f"open({str(tmp_path / 'more')!r}, 'w')",
        "os.kill(os.getppid(), 9)",
        "socket.create_connection(('127.0.0.1', 9))",
        "os.setuid(1)",
        "os.nice(-5)",
    ]
    answer = "import __main__, os, socket\ndef reach(what):\n    try: eval(what)\n"
    answer += "    except OSError as error: return error.errno\n"
    answer += "import numpy, subprocess, sys\nsubprocess.run([sys.executable, '-c', ''], check=True)\n"
    answer += "with open('f', 'w') as file: file.write('x')\nos.rename('f', 'g')\nos.kill(-1, 9)\n"
    tests = "".join(f"assert reach({reach!r}) in (1, 3, 13), {reach!r}\n" for reach in reaches)
    assert one("code,timeout=20", answer, tests=tests) == 1.0


def test_names_and_options_that_do_not_fit():
    for spec, message in [
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
    ]:
        with pytest.raises(ConfigError) as caught:
            load_reward(spec)
        assert str(caught.value).startswith(f"reward_funcs: {message}")


def test_without_its_package_one_line_says_what_has_it(monkeypatch):
    for package, spec in [("math_verify", "math"), ("jsonschema", "json_schema")]:
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
