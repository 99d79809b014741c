"""Which backend runs: preference of `auto`, named backends, the process-wide default, the report."""

import threading
from types import SimpleNamespace

import pytest
import torch
from rlhf_kernels.runtime import native, registry
from torch._subclasses.fake_tensor import FakeTensorMode

from .checks import each, needs_native

X = torch.zeros(2)


def only(device_type, *dtypes):
    """An implementation that serves these dtypes on this device."""

    def unsupported(d, dtype):
        return None if d == device_type and dtype in dtypes else f"it serves {device_type} only, not {d} {dtype}"

    return SimpleNamespace(unsupported=unsupported)


@pytest.fixture
def op():
    """Name of an op that the process-wide registry knows for the length of one test."""
    name = "test_registry_op"
    registry.register(name, "reference", SimpleNamespace())
    yield name
    del registry._IMPLEMENTATIONS[name]
    registry.begin_run()


def test_auto_prefers_native_and_decides_per_dtype(op):
    assert registry.resolve(op, "auto", X) == "reference"
    registry.register(op, "cpu", only("cpu", torch.float32))  # a later registration is seen: no stale choice
    assert registry.resolve(op, "auto", X) == "cpu"
    assert registry.resolve(op, "auto", X.double()) == "reference"
    assert registry.resolve(op, "auto", X.to("meta")) == "reference"


def test_auto_on_cuda_prefers_cuda_then_triton(op):
    registry.register(op, "triton", only("cuda", torch.float32, torch.bfloat16))
    registry.register(op, "cuda", only("cuda", torch.bfloat16))
    assert registry.report("cuda", torch.bfloat16)[op]["auto"] == "cuda"
    assert registry.report("cuda", torch.float32)[op]["auto"] == "triton"
    assert registry.report("cuda", torch.float64)[op]["auto"] == "reference"
    assert registry.report("cpu", torch.bfloat16)[op]["auto"] == "reference"


def test_auto_takes_what_waits_for_a_measurement_in_exact_mode_only(op):
    """On a GPU, too, where there is no table of measurements."""
    registry.register(op, "triton", only("cuda", torch.float32), when_measured=True)
    registry.register(op, "cpu", only("cpu", torch.float32), when_measured=True)
    try:
        for device, backend in (("cuda", "triton"), ("cpu", "cpu")):
            assert registry.resolve_for(op, "auto", device, torch.float32) == "reference"
            assert registry.resolve_for(op, backend, device, torch.float32) == backend
            with registry.use_exact():
                assert registry.resolve_for(op, "auto", device, torch.float32) == backend
                assert registry.resolve_for(op, "auto", device, torch.float64) == "reference"
            assert registry.resolve_for(op, "auto", device, torch.float32) == "reference"
        assert registry.report("cuda")[op]["why"] == "triton is for exact mode"
        with registry.use_exact():
            assert registry.report("cuda")[op]["why"] == "exact mode: its rows depend on nothing else"
    finally:
        registry._WHEN_MEASURED -= {(op, "triton"), (op, "cpu")}


def test_auto_never_takes_what_is_served_by_name(op):
    registry.register(op, "triton", only("cuda", torch.float32))
    registry.register(op, "cuda", only("cuda", torch.float32), by_name=True)
    try:
        for exact in (False, True):
            with registry.use_exact(exact):
                assert registry.resolve_for(op, "auto", "cuda", torch.float32) == "triton"
                assert registry.resolve_for(op, "cuda", "cuda", torch.float32) == "cuda"
        assert registry.report("cuda")[op]["cuda"] == "available"
        del registry._IMPLEMENTATIONS[op]["triton"]
        registry.begin_run()
        assert registry.resolve_for(op, "auto", "cuda", torch.float32) == "reference"
    finally:
        registry._BY_NAME.remove((op, "cuda"))


SERVED = {
    **dict.fromkeys(("linear_logprob", "linear_logprob_pair", "linear_ppo_loss", "sample"), "float32 bfloat16 float16"),
    **dict.fromkeys(("attention", "decode_attention", "lora"), "float32 bfloat16"),
    **dict.fromkeys(("gae", "whiten", "ppo_loss"), "float32 bfloat16 float16 float64"),
    "gather_logprob": "float32 bfloat16 float64",
}
"""Dtypes that the native code of an op reads."""


@needs_native
@each("name, served", SERVED.items())
def test_auto_takes_the_native_code_where_it_serves(name, served):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = torch.zeros(1, dtype=dtype)
        if str(dtype).removeprefix("torch.") in served.split():
            assert registry.resolve(name, "auto", x) == registry.report("cpu", dtype)[name]["auto"] == "cpu"
            continue
        assert registry.resolve(name, "auto", x) == "reference"
        with pytest.raises(registry.BackendUnavailableError, match=str(dtype)):
            registry.resolve(name, "cpu", x)


@each("name", ["linear", "attention", "activation"])
def test_torch_keeps_its_own_ops_on_a_gpu_outside_exact_mode(name):
    if registry.unsupported(name, "triton", "cuda", torch.bfloat16) is not None:
        pytest.skip("triton is not installed")
    assert registry.report("cuda", torch.bfloat16)[name]["auto"] == "reference"
    with registry.use_exact():
        assert registry.report("cuda", torch.bfloat16)[name]["auto"] == "triton"
        assert registry.report("cuda", torch.float64)[name]["auto"] == "reference"


def test_which_defaults_leave_linears_and_norms_to_torch():
    found = {}
    for backend in ("auto", *registry.BACKENDS):
        with registry.use_backend(backend):
            outside = registry.leaves_to_torch("linear")
            with registry.use_exact(), registry.use_op_backend("rms_norm", "cpu"):
                found[backend] = (outside, registry.leaves_to_torch("linear"))
                assert not registry.leaves_to_torch("rms_norm")
    assert found == {
        "auto": (False, False),
        "cuda": (True, True),
        "triton": (False, False),
        "cpu": (False, False),
        "reference": (True, True),
    }


def test_named_backend_is_served_or_refused(op):
    registry.register(op, "cpu", only("cpu", torch.float32))
    assert registry.resolve(op, "cpu", X) == "cpu"
    assert registry.resolve(op, "reference", X) == "reference"
    expected = r"backend='cpu' cannot serve test_registry_op: it serves cpu only.*available here: \['reference'\]"
    with pytest.raises(registry.BackendUnavailableError, match=expected):
        registry.resolve(op, "cpu", X.double())
    with pytest.raises(registry.BackendUnavailableError, match="test_registry_op has no cuda implementation"):
        registry.resolve(op, "cuda", X)
    assert issubclass(registry.BackendUnavailableError, ValueError)


def test_default_backend_is_what_auto_means(op):
    registry.register(op, "cpu", only("cpu", torch.float32))
    with registry.use_backend("reference"):
        assert registry.default_backend() == "reference"
        assert registry.resolve(op, "auto", X) == "reference"
        assert registry.resolve(op, "cpu", X) == "cpu"
    assert registry.default_backend() == "auto"
    assert registry.resolve(op, "auto", X) == "cpu"


def test_default_backend_never_falls_back_either(op):
    with registry.use_backend("triton"), pytest.raises(registry.BackendUnavailableError, match="backend='triton'"):
        registry.resolve(op, "auto", X)


def test_use_backend_restores_after_an_error(op):
    with pytest.raises(KeyError), registry.use_backend("reference"):
        raise KeyError
    assert registry.default_backend() == "auto"


def test_report_gives_every_backend_a_reason(op):
    registry.register(op, "cpu", only("cpu", torch.float32))
    row = registry.report("cpu")[op]
    assert row == {
        "auto": "cpu",
        "why": f"the first that serves; the table has nothing for {native.isa()}",
        "cuda": f"{op} has no cuda implementation",
        "triton": f"{op} has no triton implementation",
        "cpu": "available",
        "reference": "available",
    }
    with registry.use_op_backend(op, "reference"):
        assert registry.report("cpu")[op] == row | {"auto": "reference", "why": "asked for by name"}


@each(
    "call",
    [
        lambda op: registry.register(op, "auto", SimpleNamespace()),
        lambda op: registry.resolve(op, "Cpu", X),
        lambda op: registry.set_default_backend("gpu"),
    ],
)
def test_unknown_names(op, call):
    with pytest.raises(ValueError, match="backend: expected"):
        call(op)
    assert registry.default_backend() == "auto"


def test_a_call_s_device_is_that_of_its_first_tensor():
    with FakeTensorMode():
        here, there = torch.empty(2), torch.empty(2, device="cuda:1")
    assert registry.cuda_device((1, None, there, here)) == torch.device("cuda", 1)
    assert registry.cuda_device(([there], here)) == torch.device("cuda", 1)
    assert registry.cuda_device(([1, 2], here, there)) is None
    assert registry.cuda_device((0.5, "auto", [])) is None


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_exact_mode_goes_before_the_choices_of_a_checkpoint():
    """A run that began without it may go on in it: no op of before is left over."""
    held = [registry.Choice("rms_norm", "float32", (8,), "reference")]
    registry.begin_run(held)
    assert registry.resolve("rms_norm", "auto", torch.zeros(1), (8,)) == "reference"
    registry.begin_run(held, exact=True)
    assert registry.resolve("rms_norm", "auto", torch.zeros(1), (8,)) == "cpu"


def test_settings_are_a_thread_s_and_come_back(op):
    registry.register(op, "cpu", only("cpu", torch.float32))
    mine, found = registry.Settings("reference", exact=True), []

    def seen() -> tuple[str, bool, str]:
        return registry.default_backend(), registry.is_exact(), registry.resolve(op, "auto", X)

    with mine.used(), registry.use_exact(False):
        assert seen() == ("reference", False, "reference")
        assert registry.current() is mine
        kernels = registry.effective()
        with registry.Settings().used():  # what the block around changes, it changes here, too
            assert seen() == ("auto", False, "cpu")
            registry.begin_run(exact=True)
            assert registry.current().exact
        thread = threading.Thread(target=lambda: found.append(seen()))
        thread.start()
        thread.join()
        assert seen() == ("reference", False, "reference")
    assert found == [seen()] == [("auto", False, "cpu")]
    with kernels.used():
        assert seen() == ("reference", False, "reference")
    with registry.use_exact():  # what is set within stays set when blocks end
        with registry.use_op_backend(op, "cpu"), mine.used():
            registry.set_default_backend("reference")
        found = [registry.default_backend()]
        registry.set_default_backend("auto")
    assert found == ["reference"]
    with registry.use_op_backend("linear", "cpu"), registry.Settings(of_op={op: "reference"}).used():
        assert (registry.asked(op), registry.asked("linear")) == ("reference", "cpu")
    assert mine.exact
    assert mine.decided == {}
    assert registry.PROCESS.decided == {(op, "float32", None): "cpu"}
    with pytest.raises(ValueError, match="backend: expected 'auto' or one of"):
        registry.Settings("gpu")


def test_what_process_and_run_choose_is_apart(op):
    registry.register(op, "cpu", only("cpu", torch.float32))
    run = registry.effective().anew()
    with run.used():
        registry.begin_run([registry.Choice(op, "float32", None, "reference")])
        assert registry.resolve(op, "auto", X) == "reference"
        registry.take_over([registry.Choice(op, "float32", (3,), "cpu")])
        assert [c.backend for c in registry.choices()] == ["reference", "cpu"]
    assert registry.resolve(op, "auto", X) == "cpu"
    assert [c.backend for c in registry.choices()] == ["cpu"]
