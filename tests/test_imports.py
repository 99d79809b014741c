"""The rooms of `rlhf_engine` import downwards only: what is low in the house does not depend on what is above it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "rlhf_engine"
# From the ground floor up. A room is a package, or a module beside the packages.
ROOMS = (
    "errors",
    "devices",
    "io",
    "manifest",
    "config",
    "distributed",
    "hydra",
    "tokenizing",
    "data",
    "rollout",
    "algorithms",
    "policy",
    "scoring",
    "generators",
    "runs",
    "training",
    "planning",
    "integrations",
    "commands",
    "__main__",
)
LEVEL = {room: level for level, room in enumerate(ROOMS)}


def imported_rooms(source: str) -> set[str]:
    """Rooms that a module imports, anywhere in it: at its top, in a function, or for types alone."""
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from rlhf_engine import devices` names a room, `from rlhf_engine import __version__` none
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in names]
        rooms |= {p[1] for p in parts if p[0] == "rlhf_engine" and len(p) > 1 and p[1] in LEVEL}
    return rooms


MODULES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_room_has_a_level():
    rooms = {Path(name).parts[0].removesuffix(".py") for name in MODULES}
    assert rooms - {"__init__"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_nothing_above_it(room):
    above = {
        name: found
        for name, path in MODULES.items()
        if Path(name).parts[0].removesuffix(".py") == room
        and (found := {other for other in imported_rooms(path.read_text()) if LEVEL[other] > LEVEL[room]})
    }
    assert not above


def test_an_import_is_found_wherever_it_stands():
    source = "def f():\n    from rlhf_engine.training import rl\n    import rlhf_engine.commands.bench\n"
    assert imported_rooms(source + "from rlhf_engine import io") == {"training", "commands", "io"}
    assert imported_rooms("from rlhf_engine import __version__\nimport rlhf_kernels.io") == set()
