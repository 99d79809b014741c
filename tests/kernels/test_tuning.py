"""Tuned tables: what is looked up, what is refused, what a run holds on to, and what the compiler makes of neutral."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from rlhf_kernels.runtime import registry, tuning
from rlhf_kernels.runtime.tuning import Entry, Key, Row, TunedTableError

from rlhf_engine.commands.main import main

from .checks import each

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
ATTEND = tuning.sites()["decode_attention", "attend"]
DEFAULT = {"SPLIT": 256, "BS": 64, "num_warps": 4, "num_stages": 3}
KEY = Key("decode_attention", "attend", "float32", (4, 128))
OTHER = Key("sample", "plain", "float32", (64, 1024))
CHOSEN = {"SPLIT": 512, "num_stages": 2}


@pytest.fixture(autouse=True)
def _settled():
    """No test leaves a run's choices behind."""
    yield
    tuning.begin_run()


def entry(key=KEY, settings=CHOSEN):
    return Entry(Row(key, settings), DEFAULT, {"a case": {"default": 2.0, "chosen": 1.0}}, {})


def table(*entries, **changes):
    return replace(tuning.new_table(tuning.INTERPRETER), entries=entries or (entry(),), **changes)


@pytest.fixture
def path(tmp_path):
    tuning.write(tmp_path / "table.json", table())
    return tmp_path / "table.json"


def chosen(device=CPU, dtype=torch.float32, sizes=(4, 128), default=DEFAULT):
    return ATTEND.choose(default, device, (dtype,), sizes)


# ---- lookup ----------------------------------------------------------------------------------------------------------


def test_without_a_table_there_are_the_defaults():
    assert chosen() == DEFAULT


def test_a_class_has_its_entry_and_others_the_default(path):
    with tuning.use_table(path):
        for sizes in ((4, 128), (3, 65), (4, 100)):
            assert chosen(sizes=sizes) == DEFAULT | CHOSEN
        for sizes in ((4, 64), (4, 129), (5, 128), (2, 128)):
            assert chosen(sizes=sizes) == DEFAULT
        assert chosen(dtype=torch.bfloat16) == DEFAULT
    assert chosen() == DEFAULT


@each(("size", "expected"), [(1, 1), (2, 2), (3, 4), (128256, 131072), (131072, 131072)])
def test_size_classes(size, expected):
    assert tuning.size_class(size) == expected


def test_operands_of_two_dtypes_have_a_key_of_their_own(tmp_path):
    shrink = tuning.sites()["lora", "shrink"]
    default = {"BD": 64, "num_warps": 8, "num_stages": 3}
    key = Key("lora", "shrink", "bfloat16,float32", (4096, 16))
    tuning.write(tmp_path / "t.json", table(entry(key, {"BD": 128})))
    with tuning.use_table(tmp_path / "t.json"):
        mixed, alike = (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)
        assert shrink.choose(default, CPU, mixed, (4096, 16)) == default | {"BD": 128}
        assert shrink.choose(default, CPU, alike, (4096, 16)) == default


def test_a_written_table_is_read_as_it_was(path):
    left_out = {"BS=128": "spills 16 bytes per thread, the default 0"}
    made = table(entry(OTHER, {"BV": 64}), entry()._replace(left_out=left_out), entry(KEY._replace(sizes=(1, 64)), {}))
    tuning.write(path, made)
    found = tuning.read(path, device=tuning.INTERPRETER)
    assert sorted(found.entries, key=lambda e: e.row.key) == sorted(made.entries, key=lambda e: e.row.key)
    assert found.of(OTHER) == made.entries[0]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_no_candidate_takes_more_workspace_than_the_planner_counts():
    free = {name: site.candidates for name, site in tuning.sites().items()}
    from rlhf_kernels.decode_attention import cost as attention
    from rlhf_kernels.sample import cost as drawing
    from rlhf_kernels.vocab import cost as sweep

    assert min(free["decode_attention", "attend"]["SPLIT"]) >= attention.SPLIT
    for site in ("plain", "options"):
        assert max(free["sample", site]["PROGRAMS"]) <= drawing.PROGRAMS
    assert max(free["linear_logprob", "tile"]["TILE_ROWS"]) <= sweep.TILE_ROWS
    assert max(free["linear_logprob", "tile"]["TILE_COLUMNS"]) <= sweep.TILE_COLUMNS
    assert "BD" not in free["lora", "columns"]


# ---- what is refused -------------------------------------------------------------------------------------------------


def change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def changed_entry(**changes):
    return {"entries": [entry().to_dict() | changes]}


WRONG = [
    ({"format": 2}, "format: expected 1, got 2"),
    ({"format": True}, "format: expected 1, got True"),
    ({"triton": "2.0.0"}, "triton: expected "),
    ({"sources": "0123456789abcdef"}, "sources: expected "),
    ({"device": "NVIDIA H100 80GB HBM3"}, "device: expected \"Triton's interpreter\", got 'NVIDIA H100 80GB HBM3'"),
    ({"rehearsed": True}, "rehearsed: expected False, got True"),
    ({"rehearsed": 0}, "rehearsed: expected bool, got 0"),
    ({"entries": {}}, "entries: expected a list, got dict"),
    ({"entries": [entry().to_dict()] * 2}, "entries: expected one of each key"),
    (changed_entry(rows=64), "entries\\[0\\]: expected \\['default'"),
    (changed_entry(site="attent"), "expected a site of the kernels, got decode_attention.attent"),
    (changed_entry(settings={"SPLIT": 511}), "got SPLIT = 511"),
    (changed_entry(settings={"BQ": 64}), "got BQ = 64"),
    (changed_entry(settings={"BS": True}), "settings: expected a number for each setting"),
    (changed_entry(sizes=[4, 100]), "sizes: expected powers of two, got \\[4, 100\\]"),
    (changed_entry(ms=[1]), "ms: expected times by case"),
]


@each(("changes", "message"), WRONG)
def test_a_table_of_another_version_or_a_damaged_one_is_refused(path, changes, message):
    tuning.write(path, table())
    change(path, **changes)
    with pytest.raises(TunedTableError, match=message) as refused:
        tuning.read(path, device=tuning.INTERPRETER)
    assert "\n" not in str(refused.value)
    with tuning.use_table(path), pytest.raises(ValueError, match=f"{tuning.ENVIRONMENT_VARIABLE}: .*cannot be used"):
        chosen()


@each("content", ["", "{", "[1]", '{"format": 1}', "\ud800"])
def test_what_is_no_table_is_refused(path, content):
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(TunedTableError):
        tuning.read(path, device=None)
    with pytest.raises(TunedTableError):
        tuning.read(path.parent / "absent.json", device=None)


def test_a_command_refuses_a_named_table_in_one_line(path, capsys):
    change(path, triton="2.0.0")
    with tuning.use_table(path):
        code = main(["doctor"])
    out, line = capsys.readouterr()
    assert (code, out) == (2, "")
    expected = f"rlhf-engine doctor: {tuning.ENVIRONMENT_VARIABLE}: {path} cannot be used: triton: expected "
    assert line.startswith(expected)
    assert line.count("\n") == 1


def test_the_package_s_table_serves_its_device_unasked(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.write(tmp_path / f"{tuning.slug(tuning.INTERPRETER)}.json", table())
    monkeypatch.setattr(tuning, "_tables", {})
    monkeypatch.setattr(tuning, "_overlays", {})
    assert chosen() == DEFAULT | CHOSEN


def test_the_package_s_table_of_another_version_is_named_once_and_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.write(tmp_path / f"{tuning.slug(tuning.INTERPRETER)}.json", table(sources="0123456789abcdef"))
    monkeypatch.setattr(tuning, "_tables", {})
    monkeypatch.setattr(tuning, "_overlays", {})
    with pytest.warns(UserWarning, match=r"tuned table: .* is not used: sources: expected ") as warned:
        assert [chosen(), chosen(sizes=(1, 64))] == [DEFAULT, DEFAULT]
    assert len(warned) == 1


def test_tables_of_the_package_are_of_this_version():
    for path in tuning.FOLDER.glob("*.json"):
        assert path.stem == tuning.slug(tuning.read(path, device=None).device)


# ---- exact mode, and what a run holds on to --------------------------------------------------------------------------


def test_exact_mode_has_the_defaults_of_all_that_changes_bits(path):
    neutral = entry(KEY._replace(sizes=(1, 64)), {"num_stages": 4})
    tuning.write(path, table(entry(), neutral))
    with tuning.use_table(path), registry.use_exact():
        assert chosen() == DEFAULT  # its stages were measured with another split, and go with it
        assert chosen(sizes=(1, 64)) == DEFAULT | {"num_stages": 4}
        assert tuning.choices() == []


def test_a_resumed_run_keeps_what_changes_bits(path):
    held = [Row(KEY, {"BS": 32})]
    with tuning.use_table(path):
        tuning.begin_run(held)
        assert chosen() == DEFAULT | {"BS": 32}
        assert tuning.choices() == held
        tuning.begin_run([])  # begun on the defaults
        assert chosen() == DEFAULT
        tuning.begin_run([Row(KEY, {"SPLIT": 512})])  # as in the table, whose stages go with it
        assert chosen() == DEFAULT | CHOSEN
    tuning.begin_run(held)
    assert chosen() == DEFAULT | {"BS": 32}
    tuning.begin_run()
    assert chosen() == DEFAULT


def test_a_checkpoint_gets_the_settings_that_change_bits(path, monkeypatch):
    monkeypatch.setattr(tuning, "INTERPRETED", True)
    grad = Key("linear_logprob", "grad", "float32", (64, 1024))
    tuning.write(path, table(entry(), entry(grad, {"GRAD_BLOCK": 4096}), entry(OTHER, {})))
    with tuning.use_table(path):
        assert tuning.choices() == [Row(KEY, {"SPLIT": 512})]
        assert [tuning.row_of("row", json.loads(json.dumps(r.to_dict()))) for r in tuning.choices()] == tuning.choices()


def test_a_table_that_cannot_be_used_changes_no_run(path):
    tuning.begin_run([Row(KEY, {"BS": 32})])
    with tuning.use_table(path):
        change(path, triton="2.0.0")
        with pytest.raises(TunedTableError):
            tuning.begin_run([])
    assert chosen() == DEFAULT | {"BS": 32}


# ---- what the compiler makes of settings that are called neutral ----------------------------------------------------

COMPILED = """
import json, re, sys
from dataclasses import replace
from rlhf_kernels.runtime import aot, tuning
KERNELS = {
    ("decode_attention", "attend"): ("attend_kernel", {}),
    ("linear_logprob", "fused"): ("fused_kernel", {}),
    ("linear_logprob", "row"): ("from_expected_kernel", {"ROW_BLOCK": "BLOCK"}),
    ("linear_logprob", "grad"): ("grad_tile_kernel", {"GRAD_BLOCK": "BLOCK"}),
    ("gather_logprob", "grad"): ("gather_grad_kernel", {"GRAD_BLOCK": "BLOCK"}),
    ("sample", "plain"): ("sample_kernel", {}),
    ("lora", "shrink"): ("_shrink_kernel", {}),
    ("lora", "fold"): ("_fold_columns_kernel", {}),
    ("ppo_loss", "backward"): ("_ppo_backward_kernel", {}),
}
found = {}
for (op, name), (kernel, spelt) in KERNELS.items():
    site = tuning.sites()[op, name]
    case = next(c for c in aot.cases(op) if c.kernel.__name__ == kernel)
    for setting in site.neutral:
        for value in site.candidates[setting]:
            if setting in ("num_stages", "num_warps"):
                changed = replace(case, **{setting: value})
            else:
                changed = replace(case, constexprs={**case.constexprs, spelt.get(setting, setting): value})
            made = aot.compile_case(op, changed, 90)
            sums = [s for s in made.sums if not s.startswith("1x1xf32")]  # of one element
            found.setdefault(f"{op}.{name} {setting}", []).append([sums, made.products])
print(json.dumps(found))
"""


def test_what_is_called_neutral_leaves_sums_and_products_as_they_lie():
    run = subprocess.run(
        [sys.executable, "-c", COMPILED],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        text=True,
        capture_output=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout)
    assert len(found) >= 12
    different = {name: made for name, made in found.items() if any(m != made[0] for m in made)}
    assert not different
    for name, made in found.items():
        has_products = name.split()[0] in (
            "decode_attention.attend",
            "linear_logprob.fused",
            "sample.plain",
            "lora.shrink",
        )
        assert bool(made[0][1]) == has_products, name
