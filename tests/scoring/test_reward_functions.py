"""Reward functions: loading, results that are right, and results that are refused by name."""

import asyncio
import contextlib
import functools
import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch

from rlhf_engine.errors import ConfigError, RewardError
from rlhf_engine.scoring.rewards import (
    AnswerScorer,
    check_reward,
    load_reward,
    score_with_functions,
    weighted_total,
)
from rlhf_engine.user_code import SETTINGS

PROMPTS = ["one", "two", "three"]
COMPLETIONS = ["a", "bb", "ccc"]
IDS = [[1], [1, 1], [1, 1, 1]]


def length(prompts, completions, completion_ids, **columns):
    return [float(len(c)) for c in completions]


def score(*functions, weights=None, columns=None):
    found = score_with_functions(functions, PROMPTS, COMPLETIONS, IDS, columns)
    return SimpleNamespace(totals=weighted_total(list(found.values()), weights), columns=found)


def returning(value):
    def given(**_):
        return value

    return given


def test_weighted_sums_leave_none_out() -> None:
    """As TRL's nansum over the functions; None from all of them is no reward."""
    result = score(length, returning([10, None, 30]), weights=[2.0, 0.5])
    assert result.totals == [2 * 1 + 5, 2 * 2, 2 * 3 + 15]
    assert result.columns["given"] == [10.0, None, 30.0]
    assert score(returning([1, None, None]), returning([1, 2, None])).totals == [2.0, 2.0, None]


def test_functions_get_text_ids_and_columns() -> None:
    def by_column(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra, **columns):
        assert columns == {"split": ["x", "y", "z"]}
        return [len(i) + a for i, a in zip(completion_ids, answer, strict=True)]

    columns = {"answer": [10, 20, 30], "split": ["x", "y", "z"]}
    assert score(by_column, columns=columns).totals == [11.0, 22.0, 33.0]


def test_a_function_cannot_harm_the_next() -> None:
    def vandal(prompts, completions, completion_ids, **columns):
        completions.clear()
        completion_ids.clear()
        return [0.0] * len(prompts)

    assert score(vandal, length).totals == [1.0, 2.0, 3.0]
    assert (COMPLETIONS, IDS) == (["a", "bb", "ccc"], [[1], [1, 1], [1, 1, 1]])


def test_accepted_results() -> None:
    for result in [
        (1, 2, 3),
        [True, 2.0, np.float32(3.0)],
        torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
        [torch.tensor(1), torch.tensor([2.0]), 3],
        np.array([1.0, 2.0, 3.0], dtype=np.float16),
        pandas.Series([1, 2, 3]),
        [np.bool_(True), np.int64(2), np.array([3.0])],
    ]:
        assert score(returning(result)).totals == [1.0, 2.0, 3.0]


def test_two_functions_of_one_name_keep_two_metrics() -> None:
    given = [returning([i, i, i]) for i in range(3)]
    found = score(*given, functools.partial(length, more=1))
    assert list(found.columns) == ["given", "given_2", "given_3", "length"]


def test_conversations_come_as_messages() -> None:
    """With what TRL hands over beside them; the data's own messages are out of a function's reach."""
    prompts = [({"role": "user", "content": "one"},), "two"]
    seen = {}

    def keeps(prompts, completions, trainer_state, log_metric, log_extra, **others):
        seen.update(prompts=list(prompts), completions=list(completions), step=trainer_state.global_step)
        log_metric("mean", 1.0)
        log_extra("notes", ["a", "b"])
        prompts[0][0]["content"] = "gone"
        return [0.0, None]

    for function in (keeps, functools.partial(keeps, more=1)):
        score_with_functions([function, keeps], prompts, ["yes", "no"], [[1], [2]])
        assert seen["completions"] == [[{"role": "assistant", "content": "yes"}], "no"]
        assert prompts[0][0]["content"] == "one"
    check_reward(lambda prompts, completions, **_: [float(p[-1]["role"] == "user") for p in prompts], prompts[:1])
    with pytest.raises(RewardError, match=r"by zero, on the answer 'yes' to 'one'$"):
        score_with_functions([lambda completions, **_: [1 / 0 for c in completions]], prompts[:1], ["yes"], [[1]])
    with pytest.raises(RewardError, match="unexpected keyword argument"):
        check_reward(lambda prompts: [0.0] * len(prompts), prompts)


def test_async_functions_run_beside_each_other() -> None:
    """On one loop for every call, so that a client that a function holds stays usable."""
    both, loops = asyncio.Barrier(2), set()

    async def waits(completions, **_):
        loops.add(asyncio.get_running_loop())
        await asyncio.wait_for(both.wait(), 10)
        return [1.0] * len(completions)

    class Waits:
        async def __call__(self, **columns):
            return await waits(**columns)

    async def fails(completions, **_):
        for text in completions:
            await asyncio.sleep(0)
            raise KeyError(text)

    async def sleeps(**_):
        await asyncio.sleep(60)

    for _ in range(2):
        assert score(functools.partial(waits, more=1), length, Waits()).totals == [3.0, 4.0, 5.0]
    assert len(loops) == 1
    with pytest.raises(RewardError, match=r"'fails' raised KeyError: 'a', on the answer 'a' to 'one'$"):
        score(fails)
    with pytest.raises(RewardError, match=r"'sleeps' took longer than 0\.1 seconds"):
        check_reward(sleeps, ["p"], timeout=0.1)


def test_what_is_no_list_of_rewards_is_refused() -> None:
    for result, error, message in (
        ([1.0, 2.0], ValueError, "expected 3 rewards, got 2"),
        *((x, TypeError, "expected a list, tuple or tensor") for x in (1.0, None, {"a": 1}, "abc", iter([1, 2, 3]))),
        ([1.0, "x", 2.0], TypeError, r"expected numbers or None, got 'x' at row 1 \(prompt 'two'\)"),
        (torch.zeros(3, 1), ValueError, r"expected a tensor of one dimension, got \(3, 1\)"),
    ):
        with pytest.raises(error, match=f"'given': {message}"):
            score(returning(result))


def test_nonfinite_rewards_name_function_row_and_prompt() -> None:
    for bad, kind in itertools.product((math.nan, math.inf, -math.inf), (list, torch.tensor)):
        said = rf"'given': expected finite numbers of float32, got {bad} at row 2 \(prompt 'three'\)"
        with pytest.raises(ValueError, match=said):
            score(returning(kind([0.0, 1.0, bad])))


def test_long_prompts_are_cut_in_messages() -> None:
    with pytest.raises(ValueError, match=r"prompt 'x{59}…'"):
        score_with_functions([returning([math.nan])], ["x" * 500], ["a"], [[1]])


def test_a_function_that_exits_ends_no_run_in_silence(tmp_path) -> None:
    def leaves(**_):
        sys.exit(0)

    with pytest.raises(RewardError, match="reward function 'leaves' raised SystemExit: 0"):
        score(leaves)
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    with pytest.raises(RewardError, match=r"importing .* raised SystemExit: 0"):
        load_reward(f"{tmp_path / 'leaves.py'}:f")


def test_whatever_a_function_raises_is_named() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError("text")

    def raising(error):
        def function(**_):
            raise error

        return function

    for error, said in (
        (GeneratorExit("gone"), "GeneratorExit: gone"),
        (asyncio.CancelledError("late"), "CancelledError: late"),
        (Mute(), "Mute: its text cannot be had, for KeyError"),
    ):
        with pytest.raises(RewardError, match=f"reward function 'function' raised {said}"):
            score(raising(error))


def test_what_a_function_raises_is_kept_as_the_cause() -> None:
    def broken(**_):
        raise KeyError("answer")

    with pytest.raises(RewardError, match=r"reward function 'broken' raised KeyError: 'answer'") as caught:
        score(broken)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.trace.splitlines()[-1].strip(" ^~") == 'raise KeyError("answer")'


def test_a_file_without_its_function_is_asked_for_one(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def _help(): ...\n\ndef score(completions, **_): ...\n")
    with pytest.raises(ConfigError, match=r"got '.*mine\.py'; did you mean '.*mine\.py:score'\?$"):
        load_reward(f"{tmp_path}/mine.py")


def test_the_answer_that_a_function_had_in_hand_is_named() -> None:
    """Of nested functions the innermost variable that is an answer counts, whatever else was made of it."""

    def words(text):
        copy = text.split()
        return len(copy) / (len(copy) - 3)

    with pytest.raises(RewardError, match=r"division by zero, on the answer 'one two three' to 'second'$") as caught:
        score_with_functions(
            [lambda completions, **_: [words(c) for c in completions]],
            ["first", "second"],
            ["one two", "one two three"],
            [[1], [1]],
        )
    first, *_, last = (line for line in caught.value.trace.splitlines() if line.lstrip().startswith("File"))
    assert __file__ in first
    assert last.endswith("in words")


def test_the_line_of_a_file_with_a_syntax_error_is_shown(tmp_path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(RewardError, match="raised SyntaxError: invalid syntax") as caught:
        load_reward(f"{tmp_path}/bad.py:f")
    assert "line 2" in caught.value.trace
    assert "def f(:" in caught.value.trace


def test_wrong_arguments_of_the_call_are_refused() -> None:
    for call, message in (
        (lambda: score(length, weights=[1.0, 2.0]), r"weights: expected 1 numbers, .* got 2"),
        (lambda: weighted_total([[1.0]], [math.nan]), "weights: expected finite numbers, got nan"),
        (lambda: score(length, columns={"answer": [1]}), "answer: expected 3 entries, one per prompt, got 1"),
        (lambda: score(length, columns={"prompts": PROMPTS}), "columns: 'prompts' is taken"),
        (score, "functions: expected at least one"),
        (lambda: score_with_functions([length], PROMPTS, COMPLETIONS, IDS[:2]), "completion_ids: expected 3 entries"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_dry_run_finds_functions_that_fail_on_an_empty_answer() -> None:
    def mean_word_length(completions, **_):
        return [len(c) / len(c.split()) for c in completions]

    with pytest.raises(RewardError, match=r"'mean_word_length' raised ZeroDivisionError"):
        check_reward(mean_word_length, ["p"])
    check_reward(length, ["p"])
    check_reward(lambda answer, **_: answer, ["p", "q", "r"], {"answer": [1.0, 2.0, 3.0]})
    with pytest.raises(RewardError, match=r"missing 1 required .* 'answer'"):
        check_reward(lambda answer, **_: answer, ["p"])
    with pytest.raises(ValueError, match=r"prompts: expected at least one example"):
        check_reward(length, [])


def test_load_from_file_and_module(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    method = "class G:\n    @staticmethod\n    def h(**_):\n        return [3.0]\n"
    (tmp_path / "a" / "r.py").write_text("def f(**_):\n    return [1.0]\n\n" + method)
    (tmp_path / "r.py").write_text("def f(**_):\n    return [2.0]\n")
    assert load_reward(f"{tmp_path}/a/r.py:f")() == [1.0]
    assert load_reward(f"{tmp_path}/r.py:f")() == [2.0]  # the same file name in another folder is another module
    assert load_reward(f"{tmp_path}/a/r.py:G.h")() == [3.0]
    assert load_reward("math:sqrt") is math.sqrt


def test_load_errors_name_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(**_):\n    return [1.0]\n\nnumber = 3\n")
    (tmp_path / "broken.py").write_text("import no_such_module_here\n")
    for spec, message in [
        ("no_colon", r"expected reward_model, code, .*, module:function or path/file.py:function, got 'no_colon'"),
        (":f", r"expected reward_model, code"),
        (f"{tmp_path}/none.py:f", r"there is no file"),
        (f"{tmp_path}/r.py:g", r"has no 'g'; it has \['f'\]"),
        (f"{tmp_path}/r.py:number", r"expected a function at .*, got a int"),
        ("no_such_module_here:f", r"no module named 'no_such_module_here'.*for a file write its path"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_reward(spec)
    for _ in range(2):  # a failed import is not remembered as an empty module
        with pytest.raises(RewardError, match=r"broken.py' raised ModuleNotFoundError: .*no_such_module_here"):
            load_reward(f"{tmp_path}/broken.py:f")


def test_rewards_that_float32_cannot_hold() -> None:
    for huge in [10**400, -(10**400), 1e300, 4e38]:
        said = r"^reward function 'given': expected finite numbers of float32, got .* at row 1"
        with pytest.raises(ValueError, match=said):
            score(returning([0.0, huge, 0.0]))
        with pytest.raises(ValueError, match="weights: expected sums of rewards that are finite in float32, got 6e"):
            weighted_total([[3e38], [3e38]], None)


def test_weights_that_make_rewards_too_large_are_named(tmp_path) -> None:
    (tmp_path / "r.py").write_text("def f(prompts, **_):\n    return [1e30] * len(prompts)\n")
    scorer = AnswerScorer([f"{tmp_path}/r.py:f"], [1e30])
    with pytest.raises(RewardError, match=r"^reward_weights: expected sums of rewards that are finite in float32, got"):
        scorer(["a"], ["b"], [[1]], {}, [True], None)


CHANGES = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "autocast on the CPU": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast on the GPU": lambda: torch.set_autocast_enabled("cuda", True),
    "gradient mode": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "precision of float32 products": lambda: torch.set_float32_matmul_precision("medium"),
}


def test_settings_of_torch_are_put_back() -> None:
    for setting, fails in itertools.product(CHANGES, (False, True)):

        def careless(setting=setting, fails=fails, **_):
            CHANGES[setting]()
            return [1.0 / (0.0 if fails else 1.0)] * 3

        before = {name: get() for name, (get, _) in SETTINGS.items()}
        with contextlib.suppress(RewardError), pytest.warns(UserWarning, match=f"'careless' changed torch's {setting}"):
            score(careless)
        assert {name: get() for name, (get, _) in SETTINGS.items()} == before


def test_a_file_that_sets_torch_s_defaults_is_no_setting_of_the_run(tmp_path) -> None:
    text = "import torch\ntorch.set_default_dtype(torch.float64)\ndef f(**_):\n    return [1.0]\n"
    (tmp_path / "r.py").write_text(text)
    with pytest.warns(UserWarning, match=r"importing .*r\.py' changed torch's default dtype from torch\.float32"):
        load_reward(f"{tmp_path}/r.py:f")
    assert torch.get_default_dtype() == torch.float32


def test_random_numbers_of_a_function_go_on() -> None:
    totals = [score(lambda **_: torch.rand(3)).totals for _ in range(2)]
    assert totals[0] != totals[1]
