"""Docstrings begin with what a thing is or does, so that they read without the name above them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("rlhf_engine", "kernels/rlhf_kernels", "bench")
FRAGMENTS = (
    *("After", "As", "At", "Because", "Before", "Beside", "Between", "By", "Except", "For", "From", "If", "In", "Into"),
    *("Likewise", "Maybe", "Of", "On", "Raises", "Returns", "Since", "That", "Through", "To", "Under", "Until", "Up"),
    *("When", "Where", "Who", "Whose", "Whom", "With", "Within", "Without"),
)
"""Words that a first sentence does not begin with: it would be the second half of one."""


def docstrings(source: str) -> list[tuple[str, str]]:
    """(name, docstring) of a module and everything in it."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    found = [(getattr(node, "name", "module"), ast.get_docstring(node)) for node in nodes]
    return [(name, text) for name, text in found if text]


@pytest.mark.parametrize("room", ROOMS)
def test_a_docstring_begins_with_a_whole_sentence(room):
    fragments = [
        f"{path.relative_to(ROOT)}: {name}: {text.splitlines()[0]}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for name, text in docstrings(path.read_text(encoding="utf-8"))
        if text.split()[0].rstrip(":,.") in FRAGMENTS
    ]
    assert fragments == []


def test_fragments_are_found():
    source = '"""For people."""\nclass A:\n    """An A."""\n    def f(self):\n        """By name."""\n'
    assert [(name, text) for name, text in docstrings(source) if text.split()[0] in FRAGMENTS] == [
        ("module", "For people."),
        ("f", "By name."),
    ]
