"""The loop in examples/ runs as it stands, and what it saves is a model."""

import runpy
import sys
from pathlib import Path

from rlhf_engine.hydra import load_pretrained
from tests.training.test_data import write_model

README = Path(__file__).parents[1] / "README.md"
LOOP = README.with_name("examples") / "plain_loop.py"


def test_it_is_short_and_needs_no_deep_import():
    text = LOOP.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    assert "rlhf_engine." not in text
    assert text.partition('"""\n\n')[2] in README.read_text(encoding="utf-8")


def test_it_trains_and_saves(tmp_path, monkeypatch, capsys):
    model, saved = write_model(tmp_path / "model", reward_head=False), tmp_path / "saved"
    monkeypatch.setattr(sys, "argv", [str(LOOP), str(model), "2", str(saved)])
    runpy.run_path(str(LOOP), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1/2", "2/2"]
    assert "KL 0.000 nats" in lines[0].replace("-0.000", "0.000")
    actor = load_pretrained(saved).backbone().slot("actor")
    assert all(pair.B.any() for _, pair in actor.items())
