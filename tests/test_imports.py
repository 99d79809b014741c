"""The rooms of both packages import downwards only: what is low in a house does not depend on what is above it."""

import ast
import graphlib
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"rlhf_engine": ROOT / "rlhf_engine", "rlhf_kernels": ROOT / "kernels" / "rlhf_kernels"}
# From the ground floor up. A room is a package, or a module beside the packages.
ENGINE = (
    *(
        "errors",
        "io",
        "hub",
        "config",
        "devices",
        "hydra",
        "data",
        "user_code",
        "rollout",
        "algorithms",
        "scoring",
        "generators",
    ),
    *("runs", "policy", "training", "integrations", "serve", "tools", "commands", "__main__", "templates"),
)
KERNELS = (
    *("runtime", "linear", "llama_ops", "lora", "vocab", "linear_logprob", "linear_logprob_pair", "gather_logprob"),
    *("sample", "ppo_loss", "linear_ppo_loss", "gae", "attention", "decode_attention", "decode_step"),
)
HOUSES = {"rlhf_engine": ENGINE, "rlhf_kernels": KERNELS}


def imported_rooms(source: str, package: str) -> set[str]:
    """Rooms of a package that a module imports, anywhere in it: at its top, in a function, or for types alone."""
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
        rooms |= {p[1] for p in parts if p[0] == package and len(p) > 1 and p[1] in HOUSES[package]}
    return rooms


def modules(package: str) -> dict[str, Path]:
    """Every module of a package, by its path in there."""
    return {str(path.relative_to(FOLDERS[package])): path for path in sorted(FOLDERS[package].rglob("*.py"))}


def room_of(name: str) -> str:
    """The room of a module."""
    return Path(name).parts[0].removesuffix(".py")


def test_every_room_has_a_level():
    for package in HOUSES:
        assert {room_of(name) for name in modules(package)} - {"__init__"} == set(HOUSES[package])


def test_a_room_imports_nothing_above_it():
    for package, room in [(house, room) for house in HOUSES for room in HOUSES[house]]:
        level = HOUSES[package].index
        above = {
            name: found
            for name, path in modules(package).items()
            if room_of(name) == room
            and (found := {other for other in imported_rooms(path.read_text(), package) if level(other) > level(room)})
        }
        assert not above


def test_no_file_imports_one_that_imports_it():
    for package in HOUSES:
        names = {
            name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path
            for name, path in modules(package).items()
        }
        files = {
            f"{package}.{name}": path for name, path in names.items() if name != "__init__"
        }  # which lends names alone
        graphlib.TopologicalSorter(
            {name: imported_files(path, files) - {name} for name, path in files.items()}
        ).prepare()


def imported_files(path: Path, files: Collection[str]) -> set[str]:
    """Names of the files that one imports when it runs, at its top or in a function."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named = [(node.module, f"{node.module}.{alias.name}") for node in imports for alias in node.names]
    return {name if name in files else str(module) for module, name in named} & set(files)


def test_the_map_names_the_rooms_from_the_ground_up():
    table = (ROOT / "docs" / "concepts" / "architecture.md").read_text().partition("## Rooms")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == [
        room for room in ENGINE if room != "__main__"
    ]
    assert "docs/concepts/architecture.md#rooms" in (ROOT / "CONTRIBUTING.md").read_text()


def test_a_class_name_of_the_engine_has_one_meaning():
    """A leading underscore makes no other name."""
    trees = [ast.parse(path.read_text()) for path in modules("rlhf_engine").values()]
    names = Counter(n.name.lstrip("_") for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    assert {name: count for name, count in names.items() if count > 1} == {}
