"""The Triton kernels on a machine without a GPU: their numbers in the interpreter, their machine code ahead of time.

A process either interprets kernels or compiles them, so each of these tests starts a process of its own.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rlhf_kernels.runtime import aot

ROOT = Path(__file__).resolve().parents[2]
HEADS = ("linear_logprob", "linear_logprob_pair", "linear_ppo_loss")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton comes with Linux only")


def python(*arguments: str, timeout: float) -> str:
    """Output of `python <arguments>` in a fresh process that compiles kernels; fails the test if that fails."""
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    return run.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a device tests/kernels/triton runs on it")
def test_kernels_in_the_interpreter(interpreted):
    status, output = interpreted.wait()
    assert status == 0, output[-6000:]
    assert " passed" in output
    assert "skipped" not in output, output[-3000:]  # a skipped folder proves nothing


def compiled(path: Path, *options: str) -> list[dict]:
    """What `python -m rlhf_kernels.runtime.aot` measured."""
    python("-m", "rlhf_kernels.runtime.aot", "--json", str(path), *options, timeout=1800)
    return [json.loads(line) for line in path.read_text().splitlines()]


def most_spills() -> int:
    """Bytes per thread that a kernel may spill; why is in decisions/2026-11-25-spills-under-triton-3-9.md."""
    major, minor = map(int, importlib.metadata.version("triton").split(".")[:2])
    return 0 if (major, minor) < (3, 8) else 136


def assert_no_spills(found: list[dict]) -> None:
    spills = {f"{r['op']}.{r['kernel']} ({r['case']})": r["spills"] for r in found if r["arch"] == 90}
    assert not {name: n for name, n in spills.items() if n > most_spills()}


def expected(first: bool) -> int:
    return sum(len(list(aot.first_cases(op) if first else aot.cases(op))) for op in aot.OPS)


def test_every_kernel_compiles_for_sm_90(tmp_path):
    found = compiled(tmp_path / "first.json", "--arch", "90", "--first")
    assert len(found) == expected(first=True) > 0
    assert_no_spills(found)


@pytest.fixture(scope="module")
def every_case(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("aot") / "all.json")


@pytest.mark.long
def test_every_case_compiles_for_every_architecture(every_case):
    assert len(every_case) == expected(first=False) * len(aot.ARCHITECTURES) > 0
    assert_no_spills(every_case)


@pytest.mark.long
def test_a_linear_has_one_instruction_for_every_number_of_rows_and_every_layout(every_case):
    """Other instructions may add in another order: on Hopper mma.sync in place of wgmma."""
    tiles: dict[tuple[int, str, str], set[str]] = {}
    for r in every_case:
        if r["op"] == "linear" and r["arch"] != 100:  # tensor memory there, which `products` does not see
            assert len(r["products"]) == 1, r
            dtype = r["case"].rpartition(", ")[2]
            tile, _, layout = r["products"][0].partition(" ")
            tiles.setdefault((r["arch"], dtype, tile), set()).add(layout)
            assert r["arch"] != 90 or "versionMajor = 3" in layout, r
    assert len(tiles) == 2 * (3 + 3 + 2)  # architectures; widths in bf16, fp16 and fp32
    assert not {key: sorted(found) for key, found in tiles.items() if len(found) > 1}


def test_a_row_of_logits_is_summed_in_one_order_and_its_state_read_before_it_is_written(tmp_path):
    """Ratio 1 at equal weights needs log-probs whose bits no other output, pair or adapter changes."""
    found = compiled(tmp_path / "heads.json", "--arch", "90", *(f"--op={op}" for op in (*HEADS, "sample")))
    # Every warp reads a row's old state, one writes the new: none may be late
    assert all(r["waits"] for r in found if r["kernel"] == "fold_tile_kernel")
    layouts: dict[tuple[str, str, bool, int], set[str]] = {}
    for r in found:
        if r["kernel"] in ("fold_tile_kernel", "fused_kernel"):
            assert r["sums"], r
            for tile in r["sums"]:
                shape, _, layout = tile.partition(" ")
                layouts.setdefault((r["kernel"], shape, "fp32" in r["case"], r["num_warps"]), set()).add(layout)
    # fold: bf16 and fp32; fused: 128, 64 and 16 rows in bf16, 32 and 16 in fp32; exact: 64 rows and 64 columns, 16 in
    # fp32. Several LoRAs in one launch are summed as one is
    assert len(layouts) == 9
    assert sum("runs" in r["case"] for r in found) == 11
    assert not {key: sorted(found) for key, found in layouts.items() if len(found) > 1}
    # Exact mode scores a token with the bits that it was drawn with
    exact = [r for r in found if r["kernel"] == "fused_kernel" and r["case"].startswith("exact")]
    drawn = [r for r in found if r["kernel"] == "sample_kernel"]
    assert {r["op"] for r in exact} == {"linear_logprob", "linear_logprob_pair"}
    for what in ("sums", "products", "num_warps"):
        assert {str(r[what]) for r in exact} <= {str(r[what]) for r in drawn}, what


@pytest.mark.long
def test_attention_of_packed_rows_is_summed_as_in_decoding(tmp_path):
    """A row's bits are those of its decoding step: in every pair of variants, tiles are multiplied and added alike."""
    found = compiled(tmp_path / "attention.json", "--op=attention")
    variants: dict[tuple[str, int], list[dict]] = {}
    for r in found:
        if r["kernel"] == "attend_kernel":
            variants.setdefault((r["case"].rpartition(", ")[0], r["arch"]), []).append(r)
    assert variants
    for packed, paged in variants.values():
        assert packed["sums"] == paged["sums"] != [], packed["case"]
        assert packed["products"] == paged["products"], packed["case"]
        # a product of capability 10 leaves its result in a memory of its own, which has no layout of this kind
        assert packed["products"] or packed["arch"] == 100


def test_one_kernel_attends_as_the_one_whose_splits_are_joined(tmp_path):
    found = [r for r in compiled(tmp_path / "decode.json", "--op=decode_attention", "--arch=90") if r["sums"]]
    attend = {r["case"]: (r["sums"], r["products"]) for r in found if r["kernel"] == "attend_kernel"}
    whole = {case: layouts for case, layouts in attend.items() if case.endswith(", whole")}
    assert len(whole) == len(attend) / 2
    assert all(attend[case.removesuffix(", whole")] == layouts for case, layouts in whole.items())
