"""Docstrings begin with what a thing is or does, so that they read without the name above them.

Those of public functions and methods of API modules document every parameter and what comes back.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
ROOMS = ("rlhf_engine", "kernels/rlhf_kernels", "bench")
FRAGMENTS = (
    *("After", "Also", "As", "At", "Because", "Before", "Beside", "Between", "By", "Except", "For", "From", "Here"),
    *("How", "If", "In", "Into", "It", "Its", "Likewise", "Maybe", "Of", "On", "Per", "Raises", "Returns", "Since"),
    *("That", "There", "Through", "To", "Under", "Until", "Up", "What", "When", "Where", "Which", "Who", "Whoever"),
    *("Whom", "Whose", "Why", "With", "Within", "Without"),
)
"""Words that a first sentence does not begin with: it would be the second half of one."""
PUBLIC = (
    *("rlhf_kernels", "rlhf_kernels.runtime.registry"),
    *("rlhf_engine.config", "rlhf_engine.hydra", "rlhf_engine.rollout", "rlhf_engine.algorithms.base"),
    *("rlhf_engine.integrations.peft", "rlhf_engine.integrations.trl", "rlhf_engine.integrations.verl"),
)
"""API modules: their public functions and methods have full docstrings; elsewhere one or two sentences do."""
PROJECT = tuple(Path(room).name for room in ROOMS)
"""Top-level packages whose functions count; others, such as those of a base class from elsewhere, do not."""


def docstrings(source: str) -> list[tuple[str, str]]:
    """(name, docstring) of a module and everything in it."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    found = [(getattr(node, "name", "module"), ast.get_docstring(node)) for node in nodes]
    return [(name, text) for name, text in found if text]


def test_a_docstring_begins_with_a_whole_sentence():
    for room in ROOMS:
        fragments = [
            f"{path.relative_to(ROOT)}: {name}: {text.splitlines()[0]}"
            for path in sorted((ROOT / room).rglob("*.py"))
            for name, text in docstrings(path.read_text(encoding="utf-8"))
            if text.split()[0].rstrip(":,.") in FRAGMENTS
        ]
        assert fragments == []


def long_sentences(text: str) -> list[str]:
    """Sentences of more than 30 words in a docstring's prose; tables, code, equations and columns are left out."""
    prose = [line for line in inspect.cleandoc(text).splitlines() if not re.search(r"\S {2,}\S|\||→|^    | = ", line)]
    paragraphs = re.split(r"\n\s*\n|\n(?= *[*\d])", "\n".join(prose))
    sentences = (s for p in paragraphs for s in re.split(r"(?<=[.:;!?])\s+", " ".join(p.split())))
    return [s for s in sentences if len(s.split()) > 30]


def test_sentences_are_short():
    """At most 30 words; a colon or a semicolon ends one, too."""
    for room in ROOMS:
        found = [
            f"{path.relative_to(ROOT)}: {name}: {sentence}"
            for path in sorted((ROOT / room).rglob("*.py"))
            for name, text in docstrings(path.read_text(encoding="utf-8"))
            for sentence in long_sentences(text)
        ]
        assert found == []


def in_project(thing: Any) -> bool:
    """Whether a function or class is defined in one of the project's packages."""
    return getattr(thing, "__module__", "").split(".")[0] in PROJECT


def public_names(module: ModuleType) -> list[str]:
    """Names in a module's `__all__`, or without one the public names of what is defined in it."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = [name for name, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
    return [name for name in own if not name.startswith("_")]


def public_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Name → function of a module's public functions and of the methods that its public classes define."""
    found: dict[str, Any] = {}
    for name in public_names(module):
        thing = getattr(module, name)
        found[name] = thing
        if inspect.isclass(thing) and in_project(thing):
            methods = {key: getattr(x, "__func__", x) for key, x in vars(thing).items()}  # of class and static methods
            found |= {f"{name}.{key}": x for key, x in methods.items()}
    return {
        name: thing
        for name, thing in found.items()
        if inspect.isfunction(thing) and in_project(thing) and not name.rpartition(".")[2].startswith("_")
    }


def entries(docstring: str, section: str) -> set[str]:
    """Names that have an entry in a section of a docstring; `a, b: text` is an entry of both."""
    found = re.search(rf"^{section}:\n((?:    .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    heads = re.findall(r"^    ([*\w]+(?:, [*\w]+)*): *\S", found[1] if found else "", re.MULTILINE)
    return {name.lstrip("*") for head in heads for name in head.split(", ")}


def gaps(function: Callable[..., Any]) -> list[str]:
    """Parameters that have no entry in `Args:`, and "Returns:" where it is missing."""
    docstring, signature = inspect.getdoc(function) or "", inspect.signature(function)
    parameters = [name for name in signature.parameters if name not in ("self", "cls")]
    found = [name for name in parameters if name not in entries(docstring, "Args")]
    returns_nothing = signature.return_annotation in (None, "None", inspect.Signature.empty)
    has_returns = docstring.startswith("Whether") or re.search(r"^Returns:\n    \S", docstring, re.MULTILINE)
    return found + ["Returns:"] * bool(parameters and not returns_nothing and not has_returns)


def test_public_functions_document_what_they_take_and_return():
    for name in PUBLIC:
        functions = public_functions(importlib.import_module(name))
        assert functions
        lacking = {name: gaps(function) for name, function in functions.items()}
        assert {name: found for name, found in lacking.items() if found} == {}


def test_functions_are_found_in_classes_and_not_elsewhere():
    module = ModuleType("rlhf_kernels.made_up")
    source = """
from inspect import getdoc
class Thing(dict):
    size = property(lambda self: 0)
    def method(self, x) -> int: ...
    @classmethod
    def made(cls, x) -> None: ...
    @staticmethod
    def plain(x) -> None: ...
    def _private(self, x) -> int: ...
class _Hidden:
    def method(self, x) -> int: ...
def function(x) -> None: ...
def _hidden(x) -> None: ...
"""
    exec(source, vars(module))
    expected = {"Thing.method", "Thing.made", "Thing.plain", "function"}
    assert set(public_functions(module)) == expected
    module.__all__ = ["Thing", "getdoc"]
    assert set(public_functions(module)) == expected - {"function"}
    assert gaps(public_functions(module)["Thing.method"]) == ["x", "Returns:"]
