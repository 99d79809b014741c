"""Tuned settings under the interpreter: neutral ones change no bit, chosen ones arrive, and a sweep runs to its end."""

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rlhf_bench import tuning as sweeping
from rlhf_kernels.gather_logprob import gather_logprob
from rlhf_kernels.linear_logprob import linear_logprob
from rlhf_kernels.linear_ppo_loss import linear_ppo_loss
from rlhf_kernels.lora import Segments, lora_linear
from rlhf_kernels.ppo_loss import ppo_loss, value_loss
from rlhf_kernels.runtime import registry, tuning
from rlhf_kernels.runtime.triton_support import INTERPRETED
from rlhf_kernels.runtime.tuning import Entry, Key, Row, Site

from tests.kernels.checks import each, same_bits

ROOT = Path(__file__).resolve().parents[3]
_spec = importlib.util.spec_from_file_location("tune", ROOT / "bench" / "gpu" / "tune.py")
assert _spec is not None
assert _spec.loader is not None
tune = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tune)
ON = {"backend": "triton"}
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="tables of a GPU have its name, versions and figures"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of rows that nobody reads
]


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).requires_grad_()


# ---- neutral settings ------------------------------------------------------------------------------------------------


def head():
    n, h, v = 150, 24, 300
    hidden, weight, target = leaf(n, h), leaf(v, h), torch.arange(n)
    out = linear_logprob(hidden, weight, target, outputs=("logprob", "entropy"), **ON)
    trained = torch.autograd.grad(out.logprob.sum() + out.entropy.square().sum(), (hidden, weight))
    frozen = linear_logprob(hidden, weight.detach(), target, **ON).logprob
    return [out.logprob, out.entropy, *trained, frozen, *torch.autograd.grad(frozen.square().sum(), hidden)]


def gathered():
    logits = leaf(40, 300)
    out = gather_logprob(logits, torch.arange(40), outputs=("logprob", "entropy"), **ON)
    return [out.logprob, *torch.autograd.grad(out.logprob.square().sum() + out.entropy.sum(), logits)]


def adapters():
    x, A, B = leaf(40, 32), [leaf(4, 32), leaf(8, 32)], [leaf(48, 4), leaf(48, 8)]
    segments = Segments(starts=(0, 20), ends=(15, 40), slots=(1, 0))
    y = lora_linear(x, torch.randn(48, 32), None, A, B, [1.0, 2.0], segments, **ON)
    return [y, *torch.autograd.grad(y.square().sum(), (x, *A, *B))]


def losses():
    n, made = 3000, []
    new, old, advantage, mask = leaf(n), torch.randn(n), torch.randn(n), torch.arange(n) % 4 > 0
    loss = ppo_loss(new, old, advantage, mask, denom=30.0, **ON).loss
    made += [loss, *torch.autograd.grad(3 * loss, new)]
    loss = value_loss(new, old, advantage, mask, denom=30.0, **ON)[0]
    return [*made, loss, *torch.autograd.grad(3 * loss, new)]


@each("call", [head, gathered, adapters, losses])
def test_neutral_settings_change_no_bit(call):
    with tuning.watched() as found, tuning.trial({}):
        expected = call()
    changed = 0
    for key in found:
        site = tuning.sites()[key.op, key.site]
        tried = {name: (min(values), max(values)) for name, values in site.candidates.items() if name in site.neutral}
        for values in itertools.product(*tried.values()) if tried else ():
            torch.manual_seed(0)
            with tuning.trial({key: dict(zip(tried, values, strict=True))}):
                got = call()
            same_bits(expected, got)
            changed += 1
    assert changed >= 2


# ---- settings that change bits arrive, and in every op alike --------------------------------------------------------


def head_table(path):
    """Other tiles for a head of 16 features and 5000 columns, which has several tiles then."""
    key = Key("linear_logprob", "tile", "float32", (16, 8192))
    chosen = Entry(Row(key, {"TILE_COLUMNS": 4096}), {}, {}, {})
    made = tuning.new_table(tuning.INTERPRETER)
    tuning.write(path, tuning.TunedTable(**{**vars(made), "entries": (chosen,)}))
    return path


def test_scoring_and_loss_have_one_choice_whatever_the_rows(tmp_path, monkeypatch):
    from rlhf_kernels.vocab import triton_kernels, triton_sweep

    monkeypatch.setattr(triton_sweep, "FUSED_ROWS", dict.fromkeys(triton_sweep.FUSED_ROWS, 0))
    widths = []

    class Watched:
        def __getitem__(self, grid):
            return lambda *args, **options: (widths.append(options["BLOCK"]), launch[grid](*args, **options))

    launch = triton_kernels.fold_tile_kernel
    monkeypatch.setattr(triton_kernels, "fold_tile_kernel", Watched())
    hidden, weight, target = torch.randn(33, 16), torch.randn(5000, 16), torch.arange(33) * 150

    def scores(n):
        score = linear_logprob(hidden[:n], weight, target[:n], **ON).logprob
        ones = torch.ones(n)
        loss = linear_ppo_loss(
            hidden[:n].clone().requires_grad_(), weight, target[:n], score, ones, ones > 0, denom=float(n), **ON
        )
        assert torch.equal(loss.logprob, score)
        assert loss.ratio_max == 1.0
        return score

    scores(33)
    assert set(widths) == {8192}
    widths.clear()
    with tuning.use_table(head_table(tmp_path / "t.json")):
        whole = scores(33)
        assert set(widths) == {4096}
        assert torch.equal(scores(33), whole)
        assert torch.equal(scores(5), whole[:5])
        widths.clear()
        with registry.use_exact():
            scores(5)
        assert set(widths) == {8192}


# ---- a sweep ---------------------------------------------------------------------------------------------------------


def sweep(path, *ops, timer=sweeping.rehearsal_timer, rehearsed=True, **options):
    table = sweeping.begun(path, CPU, commit="a commit", rehearsed=rehearsed)
    made = sweeping.Sweep(device=CPU, out=path, table=table, timer=timer, **{"say": lambda line: None} | options)
    return made, made.run(ops, "tiny", [torch.float32])


def test_a_sweep_keeps_the_default_unless_something_is_faster(tmp_path):
    path = tmp_path / "t.json"
    done, left = sweep(path, "gae", "ppo_loss")
    assert left == []
    entries = tuning.read(path, device=tuning.INTERPRETER, rehearsed=True).entries
    by_name = {f"{e.row.key.op}.{e.row.key.site}": e for e in entries}
    assert set(by_name) == {"gae.scan", "gae.whiten", "ppo_loss.backward"}
    assert all(e.row.settings in ({"BLOCK": 512}, {"BLOCK_T": 512}) for e in entries)
    assert all(times["default"] > times["chosen"] for e in entries for times in e.ms.values())
    even, _ = sweep(tmp_path / "even.json", "gae", timer=lambda runs, settings: dict.fromkeys(runs, 1.0))
    assert {tuple(e.row.settings) for e in even.table.entries} == {()}
    assert done.table.commit == "a commit"


def test_a_gain_below_two_per_cent_is_none(tmp_path):
    def timer(runs, settings):
        return {name: 1.0 - 0.001 * (settings[name].get("BLOCK_T", 0) == 512) * gain for name in runs}

    gain = 19
    made, _ = sweep(tmp_path / "a.json", "gae", timer=timer)
    assert [e.row.settings for e in made.table.entries] == [{}]
    gain = 21
    made, _ = sweep(tmp_path / "b.json", "gae", timer=timer)
    assert [e.row.settings for e in made.table.entries] == [{"BLOCK_T": 512}]


@pytest.fixture
def only_columns():
    """`sample` with a tile's columns as its only setting, which the test may call neutral."""
    key = ("sample", "plain")
    before = tuning.sites()[key]

    def declare(*neutral):
        Site(op="sample", name="plain", candidates={"BV": (64, 128)}, neutral=neutral)

    yield declare
    tuning._SITES[key] = before


def columns_entry(made):
    return next(e for e in made.table.entries if e.row.key.site == "plain")


def test_a_false_claim_of_bits_is_left_out(tmp_path, only_columns):
    only_columns("BV")
    made, _ = sweep(tmp_path / "t.json", "sample", timer=lambda runs, settings: dict.fromkeys(runs, 1.0))
    assert "has other bits, though BV is to change none" in columns_entry(made).left_out["BV=128"]
    assert columns_entry(made).row.settings == {}


def test_a_wrong_result_is_left_out(tmp_path, only_columns, monkeypatch):
    only_columns()
    call = sweeping.Sweep._call

    def broken(case, inputs):
        made, wide = call(case, inputs), any(s.get("BV") == 128 for s in (tuning._trial or {}).values())
        return {name: x + 1 if wide else x for name, x in made.items()}

    def prefers_wide(runs, settings):
        return {name: 1.0 / settings[name].get("BV", 1) for name in runs}

    made, _ = sweep(tmp_path / "right.json", "sample", timer=prefers_wide)
    assert columns_entry(made).row.settings == {"BV": 128}
    monkeypatch.setattr(sweeping.Sweep, "_call", staticmethod(broken))
    made, _ = sweep(tmp_path / "wrong.json", "sample", timer=prefers_wide)
    assert columns_entry(made).row.settings == {}
    assert " fails T" in columns_entry(made).left_out["BV=128"]


def test_nothing_is_swept_twice_and_what_there_is_no_time_for_is_named(tmp_path):
    path = tmp_path / "t.json"
    seconds = itertools.count()
    _, left = sweep(path, "gae", "ppo_loss", end=8.0, clock=lambda: next(seconds))
    assert left
    assert not path.exists() or tuning.read(path, device=tuning.INTERPRETER, rehearsed=True)
    _, left = sweep(path, "gae")
    assert left == []
    before, said = path.read_text(), []
    _, left = sweep(path, "gae", say=said.append)
    assert (said, left, path.read_text()) == ([], [], before)


def test_a_rehearsed_table_is_never_used(tmp_path):
    path = tmp_path / "t.json"
    sweep(path, "gae")
    scan = tuning.sites()["gae", "scan"]
    with tuning.use_table(path), pytest.raises(ValueError, match="rehearsed: expected False, got True"):
        scan.choose({"BLOCK_T": 1024}, CPU, (torch.float32,), ())
    with pytest.raises(ValueError, match=r"--out: .* to go on with.*rehearsed: expected False"):
        sweeping.begun(path, CPU, commit="", rehearsed=False)


# ---- the command -----------------------------------------------------------------------------------------------------


def command(*options):
    return [sys.executable, str(ROOT / "bench" / "gpu" / "tune.py"), *options]


@pytest.mark.long
def test_a_killed_sweep_goes_on(tmp_path):
    options = ("--device", "cpu", "--rehearse", "--op", "gae", "ppo_loss", "--out")
    path = tmp_path / "killed.json"
    process = subprocess.Popen(command(*options, str(path)), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert first.startswith(("rehearsed gae.", "rehearsed ppo_loss."))
    begun = tuning.read(path, device=tuning.INTERPRETER, rehearsed=True).entries
    assert len(begun) in (1, 2)
    again = subprocess.run(command(*options, str(path)), capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (0, "")
    key = first.removeprefix("rehearsed ").partition(":")[0]
    assert key not in again.stdout
    whole, _ = sweep(tmp_path / "whole.json", "ppo_loss", "gae")
    found = tuning.read(path, device=tuning.INTERPRETER, rehearsed=True).entries
    assert sorted(e.row for e in found) == sorted(e.row for e in whole.table.entries)


@each(
    ("options", "message"),
    [
        (("--device", "cpu"), "--device: expected cuda, or --rehearse"),
        (("--device", "cuda"), "--device: expected "),
        (("--rehearse",), "--rehearse: expected it with --device cpu, got cuda"),
        (("--device", "cpu", "--rehearse", "--op", "gea"), "--op: expected some of linear_logprob"),
        (("--device", "cpu", "--rehearse", "--budget", "0"), "--budget: expected seconds above 0, got 0"),
    ],
)
def test_what_cannot_be_served_is_one_line(tmp_path, capsys, options, message):
    path = tmp_path / "t.json"
    code = tune.main([*options, "--out", str(path)])
    out, line = capsys.readouterr()
    assert (code, out) == (2, "")
    assert line.startswith(f"tune: {message}")
    assert line.count("\n") == 1
    assert not path.exists()


def test_a_table_of_another_version_is_not_gone_on_with(tmp_path, capsys):
    path = tmp_path / "t.json"
    tuning.write(path, tuning.new_table(tuning.INTERPRETER, rehearsed=True))
    content = json.loads(path.read_text()) | {"triton": "2.0.0"}
    path.write_text(json.dumps(content))
    before = path.read_bytes()
    assert tune.main(["--device", "cpu", "--rehearse", "--out", str(path)]) == 2
    line = capsys.readouterr().err
    assert "triton: expected " in line
    assert line.count("\n") == 1
    assert path.read_bytes() == before
