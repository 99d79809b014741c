"""A device of torch that lies in the host's memory and refuses what a GPU refuses: a test's GPU where there is none.

Its tensors hold a tensor of the CPU and run every operation on it, with the CPU's bits. As on a GPU,

* an operation whose tensors lie on both sides raises `MixedDevicesError`. Exempt are copies, a 0-d tensor of the CPU
  among the operands of a pointwise operation, and index tensors of the CPU in `x[index]`;
* a draw with a generator of the other side raises it, too;
* `numpy()` fails.

Unlike a GPU it lets a gradient of the other side pass: autograd compares no devices of tensors that are subclasses.

`Traffic` counts what makes a GPU's host wait: reads of the device, and copies from the host's memory but those that
are `non_blocking`. `memory` counts the bytes of all tensors that live, and is as large as a test wants it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rlhf_kernels.runtime import eager, registry, triton_support
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE = torch.device("privateuseone", 0)
aten = torch.ops.aten
_COPIES = {aten._to_copy.default, aten.copy_.default}
_INDEXED = {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default}
_INDEXED |= {aten._index_put_impl_.default, aten._unsafe_index_put.default}
_WITH_SCALARS = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.index_fill_.int_Tensor, aten.fill_.Tensor}
_WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount, aten._unique2}
_WAITS |= {aten.unique_consecutive, aten.unique_dim, aten.is_nonzero, aten.allclose}


class MixedDevicesError(RuntimeError):
    """Error of an operation whose tensors, or whose generator, lie on two devices."""


class Traffic:
    """Numbers of reads of the device and of copies to it, by operation."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()


_traffic: list[Traffic] = []


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """A block whose traffic is counted, that of every thread."""
    traffic = Traffic()
    _traffic.append(traffic)
    try:
        yield traffic
    finally:
        _traffic.remove(traffic)


class _DeviceMemory:
    """Bytes of the device's tensors, of which `limit` fit. What an operation takes while it runs is not seen."""

    def __init__(self) -> None:
        self.used, self.peak, self.limit, self.refused = 0, 0, 2**50, 0

    def take(self, storage: torch.UntypedStorage) -> None:
        """Count memory that some tensors share, until the last one is gone."""
        if hasattr(storage, "is_counted"):
            return
        storage.is_counted = True  # type: ignore[attr-defined]  # torch keeps the object as long as the memory
        self.used += storage.nbytes()
        weakref.finalize(storage, self._free, storage.nbytes()).atexit = False
        if self.used > self.limit:
            self.refused += 1
            raise torch.OutOfMemoryError(f"{self.used} bytes, expected at most {self.limit}")
        self.peak = max(self.peak, self.used)

    def _free(self, n: int) -> None:
        self.used -= n


memory = _DeviceMemory()


class DeviceTensor(torch.Tensor):
    """A tensor of the device."""

    host: torch.Tensor
    """Its elements."""

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.host = host
        memory.take(host.untyped_storage())
        return made

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.host})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        made = self.detach().clone()
        wanted, kind = self.requires_grad, torch.nn.Parameter
        memo[id(self)] = kind(made, wanted) if isinstance(self, kind) else made.requires_grad_(wanted)
        return memo[id(self)]  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other: DeviceTensor) -> None:
        if not isinstance(other, DeviceTensor):
            raise MixedDevicesError(f"data: expected a tensor of {DEVICE}, got one on {other.device}")
        torch.Tensor.data.__set__(self, other)
        self.host = other.host

    def data_ptr(self) -> int:
        """Address, for tables that kernels read."""
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Memory, for those who look for tensors that share it."""
        return self.host.untyped_storage()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(function, args, kwargs or {})


@functools.cache
def _results(function: Any) -> list[int | str | None]:
    """For each result: the argument that it is, by place or name; None where it is a tensor of its own."""
    found: list[int | str | None] = []
    arguments = function._schema.arguments
    for result in function._schema.returns:
        same: int | str | None = None
        if result.alias_info is not None and result.alias_info.is_write:
            for place, argument in enumerate(arguments):
                if argument.alias_info is not None and argument.alias_info.before_set == result.alias_info.before_set:
                    same = argument.name if argument.kwarg_only else place
        found.append(same)
    return found


@functools.cache
def _takes_scalars(function: Any) -> bool:
    """Whether a 0-d tensor of the CPU may stand among the operands."""
    name = function._schema.name
    return torch.Tag.pointwise in function.tags or name.startswith("aten::_foreach") or function in _WITH_SCALARS


def _host(x: Any, seen: list[Any]) -> Any:
    """The argument as the CPU takes it; tensors are added to `seen`."""
    if isinstance(x, DeviceTensor):
        seen.append(x)
        return x.host
    if isinstance(x, torch.Tensor):
        seen.append(x)
        return x
    if isinstance(x, (list, tuple)):
        return [_host(y, seen) for y in x]
    if isinstance(x, torch.device) and x.type == DEVICE.type:
        return torch.device("cpu")
    return x


def _device(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x if isinstance(x, DeviceTensor) else DeviceTensor(x)
    return type(x)(map(_device, x)) if isinstance(x, (list, tuple)) else x


def _run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if function.namespace == "rlhf_kernels":  # an op of ours that something watches: its own code, on the device
        return torch._library.custom_ops.OPDEFS[f"rlhf_kernels::{function._opname}"]._init_fn(*args, **kwargs)
    seen: list[torch.Tensor] = []
    host_args = [_host(x, seen) for x in args]
    host_kwargs = {name: _host(x, seen) for name, x in kwargs.items() if name != "pin_memory"}
    _check(function, args, kwargs, seen)
    if _traffic:
        _count(function, args, kwargs)
    out = function(*host_args, **host_kwargs)
    if function is aten.copy_.default and not isinstance(args[0], DeviceTensor):
        return args[0]
    if kwargs.get("device", DEVICE) is not None and kwargs.get("device", DEVICE).type == "cpu":
        return out
    same = _results(function)
    if not any(place is not None for place in same):
        return _device(out)
    results = out if isinstance(out, (list, tuple)) else (out,)
    given = [
        _device(result) if place is None else kwargs[place] if isinstance(place, str) else args[place]
        for result, place in zip(results, same, strict=True)
    ]
    for result, tensor in zip(results, given, strict=True):
        if isinstance(tensor, DeviceTensor) and result.shape != tensor.shape:
            raise NotImplementedError(f"{function}: the stand-in changes no shapes in place")
    return given[0] if len(given) == 1 else tuple(given)


def _check(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seen: list[torch.Tensor]) -> None:
    generator = kwargs.get("generator")
    if generator is not None and not any(generator._cdata == own._cdata for own in _generators):
        raise MixedDevicesError(f"{function}: expected a generator of {DEVICE}, got one of {generator.device}")
    outside = [x for x in seen if not isinstance(x, DeviceTensor)]
    if not outside or function in _COPIES:
        return
    if len(outside) < len(seen) or kwargs.get("device") is None:
        if function in _INDEXED:
            index = [x for x in args[1] if x is not None]
            outside = [x for x in outside if not any(x is y for y in index) and not (x.dim() == 0 and x is not args[0])]
        elif _takes_scalars(function):
            written = [args[place] for place in _results(function) if isinstance(place, int)]
            outside = [x for x in outside if x.dim() > 0 or any(x is y for y in written)]
        if function in (aten.masked_fill.Tensor, aten.masked_fill_.Tensor) and not isinstance(args[1], DeviceTensor):
            outside.append(args[1])
    if outside:
        raise MixedDevicesError(
            f"{function}: expected all tensors on one device, got {DEVICE} and a tensor {tuple(outside[0].shape)} on "
            f"{outside[0].device}"
        )


def _grows(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation has to read how long its result is."""
    return function is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None


def _count(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = function._schema.name.removeprefix("aten::")
    if function in _COPIES:
        into = kwargs.get("device") if function is aten._to_copy.default else args[0].device
        source = args[0] if function is aten._to_copy.default else args[1]
        into = source.device if into is None else into
        if into.type == source.device.type:
            return
        if into.type != "cpu" and kwargs.get("non_blocking"):
            return
        kind = "reads" if into.type == "cpu" else "uploads"
    elif function.overloadpacket in _WAITS or _grows(function, kwargs):
        kind = "reads"
    elif function in _INDEXED:
        index = [x for x in args[1] if x is not None]
        waits = any(x.dtype in (torch.bool, torch.uint8) for x in index)
        kind = "reads" if waits else "uploads"
        if not waits and all(isinstance(x, DeviceTensor) for x in index):
            return
    else:
        return
    for traffic in _traffic:
        getattr(traffic, kind)[name] += 1


_library, _of_torch = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_library.fallback(lambda function, *args, **kwargs: _run(function, args, kwargs), "PrivateUse1")


def _as_a_whole(function: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(function, args, kwargs)


for _made in (
    *(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.randperm.default, aten.randperm.generator),
    *(aten.eye.default, aten.eye.m, aten.linspace.default, aten.copy_.default, aten._to_copy.default),
):  # the first grow a result without elements; torch copies numbers beneath what dispatches to a subclass
    _of_torch.impl(_made, _as_a_whole(_made), "PrivateUse1")


_present = False
"""Whether the device is there: torch forgets no device, and what else a process does shall not find it."""


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return _present

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Module:
    """What torch looks up as `torch.privateuseone`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return _present

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return int(_present)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def memory_allocated(self, device: Any = None) -> int:
        return memory.used

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return memory.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        memory.peak = memory.used

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return memory.limit - memory.used, memory.limit

    def empty_cache(self) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend(rename=DEVICE.type, backend_module=_Module(), hook=_Hooks())


class _Kernels:
    """The C++ kernels of an op in the place of Triton's: they take tensors of the device, and no others."""

    def __init__(self, op: str) -> None:
        self._op, self._native = op, registry.implementation(op, "cpu")
        self._else = registry.implementation(op, "triton").unsupported

    def unsupported(self, device_type: str, dtype: torch.dtype) -> str | None:
        return self._native.unsupported("cpu", dtype) if device_type == DEVICE.type else self._else(device_type, dtype)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._native, name)
        if not callable(function):
            raise AttributeError(name)  # what an implementation says of itself
        return lambda *args, **kwargs: _on_device(_run_kernel(function, args, kwargs))


def _run_kernel(kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of what runs on the memory of its tensors, which all have to be the device's."""

    def host(x: Any) -> Any:
        if isinstance(x, DeviceTensor):
            return x.host
        if isinstance(x, torch.Tensor):
            raise MixedDevicesError(f"{kernel}: expected tensors of {DEVICE}, got {tuple(x.shape)} on {x.device}")
        if isinstance(x, (list, tuple)):
            return type(x)(*map(host, x)) if hasattr(x, "_fields") else type(x)(map(host, x))
        return x

    return kernel(*map(host, args), **{name: host(x) for name, x in kwargs.items()})


def _on_device(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        parts = map(_on_device, x)
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return _device(x)


_generators: list[torch.Generator] = []
"""Those of the device; torch hands others of the same state to an operation, which are compared by it."""


def _generator(device: Any = "cpu", make: Callable[..., torch.Generator] = torch.Generator) -> torch.Generator:
    if torch.device(device).type != DEVICE.type:
        return make(device)
    _generators.append(make())
    return _generators[-1]


@contextlib.contextmanager
def installed() -> Iterator[torch.device]:
    """A block in which the engine takes the device for a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "_present", True)
        patch.setattr(torch, "Generator", _generator)
        patch.setattr(eager, "_PLAIN", (*eager._PLAIN, DeviceTensor))
        patch.setitem(registry._PREFERENCE, DEVICE.type, ("triton", "reference"))
        if triton_support.INTERPRETED:
            from triton.runtime.interpreter import InterpretedFunction

            run = InterpretedFunction.run
            patch.setattr(
                InterpretedFunction,
                "run",
                lambda kernel, *args, **kwargs: _run_kernel(functools.partial(run, kernel), args, kwargs),
            )
        for op, offered in registry._IMPLEMENTATIONS.items():
            if {"cpu", "triton"} <= offered.keys() and not triton_support.INTERPRETED:
                patch.setitem(offered, "triton", _Kernels(op))
        registry.begin_run()  # and forget what was chosen
        yield DEVICE
    _generators.clear()
    registry.begin_run()
