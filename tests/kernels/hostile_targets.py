"""The functions above and in the C++ extension, found in their modules, and how to see their right calls come by.

There are four layers: registered ops, public functions, the native wrappers under them, and the extension itself.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

LAYERS = ("op", "public", "wrapper", "extension")


class Target(NamedTuple):
    """A function by its layer and name."""

    layer: str
    name: str


def targets() -> list[Target]:
    """Every function of every layer."""
    from . import direct_calls

    found = [Target("op", name) for name in direct_calls.OPS]
    found += [Target("public", name) for name in _members(_public())]
    for module in _wrapper_modules():
        short = module.__name__.removeprefix("rlhf_kernels.").removesuffix(".native")
        found += [Target("wrapper", f"{short}.{name}") for name in _members(_own(module))]
    return found + [Target("extension", name) for name in _members(_exported())]


def _members(functions: dict[str, Any]) -> Iterator[str]:
    """Names of functions, of classes, and of what an object of such a class can be asked to do."""
    for name, found in functions.items():
        yield name
        if isinstance(found, type):
            yield from (f"{name}.{method}" for method in _methods(found))


def _methods(owner: type) -> list[str]:
    return [
        name
        for name, found in vars(owner).items()
        if (not name.startswith("_") or name == "__call__") and callable(found) and not isinstance(found, staticmethod)
    ]


def _public() -> dict[str, Any]:
    """What `rlhf_kernels` offers and is no record, no error and no switch."""
    import rlhf_kernels

    offered = {name: getattr(rlhf_kernels, name) for name in rlhf_kernels.__all__}
    return {
        name: found
        for name, found in offered.items()
        if not name.startswith(("use_", "set_")) and (not isinstance(found, type) or "__call__" in vars(found))
    }


def _wrapper_modules() -> list[types.ModuleType]:
    from rlhf_kernels.runtime import registry

    found = {registry._IMPLEMENTATIONS[op].get("cpu") for op in registry.ops()}
    return sorted((module for module in found if module is not None), key=lambda module: module.__name__)


def _own(module: types.ModuleType) -> dict[str, Any]:
    return {
        name: found
        for name, found in vars(module).items()
        if callable(found)
        and getattr(found, "__module__", "") == module.__name__
        and not name.startswith("_")
        and name != "unsupported"
    }


def _exported() -> dict[str, Any]:
    from rlhf_kernels import _native  # type: ignore[attr-defined]

    return {
        name: found
        for name, found in vars(_native).items()
        if callable(found) and not name.startswith("_") and name not in ("isa", "isas")  # these take no arguments
    }


def role_of(name: str) -> str:
    """The entry of `EXTENSION` for an exported name, which may end in a dtype."""
    return re.sub(r"_(float32|float64|bfloat16)$", "", name)


# ---- watching right calls --------------------------------------------------------------------------------------------

Watch = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], None]
"""Called with a function and its right arguments before the function is."""


def watched(found: Any, method: str, watch: Watch) -> Any:
    """A function, or a class with one method ("": the constructor), that shows its calls to `watch` first."""
    if not isinstance(found, type):

        def shown(*args: Any, **named: Any) -> Any:
            watch(found, args, named)
            return found(*args, **named)

        shown.shows = getattr(found, "shows", found)  # type: ignore[attr-defined]
        return shown
    if method == "":

        def construct(self: Any, *args: Any, **named: Any) -> None:
            watch(found, args, named)
            found.__init__(self, *args, **named)  # type: ignore[misc]

        return type(found.__name__, (found,), {"__init__": construct, "shows": getattr(found, "shows", found)})
    original = getattr(found, method)

    def call(self: Any, *args: Any, **named: Any) -> Any:
        watch(lambda *a, **n: original(self, *a, **n), args, named)
        return original(self, *args, **named)

    return type(found.__name__, (found,), {method: call, "shows": getattr(found, "shows", found)})


class _Exported:
    """The extension with one function in place of its own."""

    def __init__(self, extension: Any, name: str, found: Any) -> None:
        self._extension = extension
        setattr(self, name, found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extension, name)


def install(target: Target, watch: Watch) -> None:
    """From now on in this process `watch` sees every right call of the target."""
    from rlhf_kernels.runtime import native

    from . import decode_step_cases, hostile_drivers, native_once

    path, _, method = target.name.partition(".")
    if target.layer == "wrapper":
        module = next(m for m in _wrapper_modules() if m.__name__.split(".")[1] == path)
        name, _, method = method.partition(".")
        setattr(module, name, watched(getattr(module, name), method, watch))
    elif target.layer == "extension":
        native._extension = _Exported(native._extension, path, watched(getattr(native._extension, path), method, watch))
    else:
        found = _public()[path]
        for module in (native_once, decode_step_cases, hostile_drivers):
            for name, value in list(vars(module).items()):
                if value is found or getattr(value, "shows", None) is found:
                    setattr(module, name, watched(value, method, watch))
