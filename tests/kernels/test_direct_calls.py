"""Registered ops, native wrappers and the extension, called directly and wrongly: an error with the argument's name."""

import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rlhf_kernels.decode_step import native as step_native
from rlhf_kernels.lora import native as lora_native
from rlhf_kernels.lora.segments import LoraCall
from rlhf_kernels.runtime import native, registry

from . import native_build
from .checks import BACKENDS, each, needs_native
from .decode_step_cases import Sizes, make_call, make_decoder
from .direct_calls import CALLS, FREE, OPS, WITHOUT_REFERENCE, mutated
from .hostile_targets import LAYERS

OF_KERNELS = {"attention", "attention_backward"}
"""Ops whose reference is differentiated by autograd, so that it has no op."""


INFERENCE = {"sample", "decode_attention", "masked_moments"}
PLAIN = {
    "linear_ppo_loss": {"kl_coef": 0.0, "entropy_coef": 0.0, "needs": ""},
    "linear_backward": {"need_weight": False},
    "lora_delta": {"p": [0.0, 0.0]},
    "lora_linear": {"p": [0.0, 0.0]},
    "lora_delta_backward": {"p": [0.0, 0.0], "need_A": [True, False]},
    "lora_linear_backward": {"p": [0.0, 0.0], "need_x": False, "need_A": [False, True]},
    "linear_logprob": {"outputs": "logprob", "ahead": False},
    "linear_logprob_backward": {"needs": "hidden"},
    "linear_logprob_pair": {"ahead": ""},
    "ppo_loss": {"kl_coef": 0.0, "entropy_coef": 0.0},
    "ppo_loss_backward": {"need_entropy": False},
    "rms_norm": {"plus_one": False},
    "rms_norm_gradient": {"plus_one": True},
    "value_loss": {"clip": None},
}
"""Arguments of a second call, in which all tensors that may be None are."""


def call(name, arguments, backend):
    """The registered op itself; `backend` where it has one."""
    named = {argument.name for argument in OPS[name]._schema.arguments}
    if backend == "reference" and name in WITHOUT_REFERENCE:
        pytest.skip("its reference is no registered op")
    if "backend" not in named and native.missing() is not None:
        pytest.skip("the op's only backend is the native one")
    return OPS[name](**arguments, **({"backend": backend} if "backend" in named else {}))


def opcheck(name, backend, plain=False):
    """Schema, fake tensors, autograd formula and traces of an op, where the backend has one."""
    schema = {argument.name: str(argument.type) for argument in OPS[name]._schema.arguments}
    if backend == "reference" and (name in WITHOUT_REFERENCE or name in OF_KERNELS or "backend" not in schema):
        return
    given = CALLS[name]() | ({"backend": backend} if "backend" in schema else {})
    trained = name not in INFERENCE and not name.rstrip("_").endswith(("_backward", "_gradient"))
    if plain:
        given |= {n: None for n, kind in schema.items() if kind == "Optional[Tensor]"} | PLAIN.get(name, {})
    elif trained:
        for x in [x for value in given.values() for x in (value if isinstance(value, list) else [value])]:
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim():
                x.requires_grad_()
    torch.library.opcheck(OPS[name], (), given)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.long)])
@each("name", OPS)
def test_opcheck(backend, plain, name):
    opcheck(name, backend, plain)


@pytest.mark.parametrize("backend", BACKENDS)
@each("name", CALLS)
def test_wrong_tensors_are_refused(name, backend):
    if backend == "reference" and name in OF_KERNELS:
        pytest.skip("plain torch runs outside of this op")
    call(name, CALLS[name](), backend)
    for argument, mutation, arguments in mutated(name):
        if (argument, mutation) in FREE.get(name, ()):
            call(name, arguments, backend)
            continue
        error = None
        try:
            call(name, arguments, backend)
        except (ValueError, TypeError) as refused:
            error = str(refused)
        assert error is not None, f"taken: {argument}, {mutation}"
        assert re.fullmatch(r"[\w.\[\], ]+: expected .+", error)


@each(
    ("name", "changes", "message"),
    [
        ("gae", {"backend": "auto"}, "backend: expected one of .*, got 'auto'"),
        ("attention", {"backend": "reference"}, "backend: expected one that has kernels, got 'reference'"),
        ("swiglu", {"backend": "reference"}, "backend: expected one that has kernels, got 'reference'"),
        ("ppo_loss", {"kl": "k4"}, "kl: expected one of"),
        ("linear_ppo_loss", {"kl": ""}, "kl: expected one of"),
        ("sample", {"forbids": None}, "forbids: expected it together with forbidden"),
        ("linear_logprob", {"target": torch.tensor([0, 1, 2, 3, 4, 40])}, "target: expected values in"),
        ("gather_logprob", {"target": torch.full((6,), -1)}, "target: expected values in"),
        ("gather_logprob_backward", {"entropy": torch.empty(0)}, "entropy: expected shape .* with d_entropy"),
        ("linear_logprob_backward", {"entropy": torch.empty(0)}, "entropy: expected shape .* with d_entropy"),
        ("decode_attention", {"lengths": torch.full((6,), 9)}, "lengths: expected"),
        ("decode_attention", {"lengths": torch.full((6,), -1)}, "lengths: expected"),
        ("decode_attention", {"block_table": torch.full((6, 2), 9)}, "block_table: expected"),
        ("lora_delta", {"ends": [2, 7]}, r"starts, ends: expected ascending runs within \[2, 6\), got \[3, 7\)"),
        ("lora_delta", {"starts": [-1, 3]}, "starts, ends: expected ascending runs"),
        ("lora_delta", {"starts": [0, 1]}, "starts, ends: expected ascending runs"),
        ("lora_linear", {"ends": [2, 2**62]}, "starts, ends: expected ascending runs"),
        ("lora_linear", {"slots": [0, 2]}, r"slots: expected runs of every slot in \[0, 2\), got \[0, 2\]"),
        ("lora_linear", {"slots": [0]}, "starts, ends, slots: expected the same number of entries"),
        ("lora_linear", {"scales": []}, "A, B, scales, p: expected the same number of entries"),
        ("lora_linear", {"p": [1.0, 0.0]}, "p: expected probabilities"),
        ("lora_delta", {"row_ids": None}, "row_ids: expected them with dropout"),
        ("lora_delta_backward", {"ddelta": torch.zeros(4, 16)}, "ddelta: expected 5 rows"),
        ("lora_delta_backward", {"need_A": [True]}, "need_A: expected 2 entries"),
        ("lora_linear_backward", {"need_B": [True]}, "need_B: expected 2 entries"),
        ("linear_logprob", {"lora_B": None}, "lora_B: expected a tensor with the other"),
        ("linear_logprob", {"run_ends": [4, 6]}, r"run_ends: expected ascending runs within \[4, 6\), got \[3, 6\)"),
        ("linear_logprob_backward", {"run_slots": [0, 0]}, r"run_slots: expected runs of every slot in \[0, 2\)"),
        ("sample", {"run_scales": [1.0]}, "run_A, run_B, run_scales: expected the same number of entries"),
        ("sample", {"run_ends": [2]}, "run_starts, run_ends, run_slots: expected the same number of entries"),
        ("sample", {"run_ends": [2, 7]}, r"run_ends: expected ascending runs within \[2, 6\), got \[3, 7\)"),
        ("sample", {"forbidden": torch.tensor([0, 40])}, r"forbidden: expected tokens in \[0, 40\), got 40"),
        ("sample", {"forbidden": torch.tensor([-1, 0])}, r"forbidden: expected tokens in \[0, 40\), got -1"),
        ("sample", {"forbidden": torch.arange(40)}, "forbidden: expected fewer than the 40 tokens of the vocabulary"),
    ],
)
@needs_native
def test_wrong_values_are_refused(name, changes, message):
    changes = {"backend": "cpu", **changes}
    with pytest.raises(ValueError, match=message):
        OPS[name](**CALLS[name]() | changes)


def test_an_error_shows_the_sizes_that_are_known():
    with pytest.raises(ValueError, match=re.escape("value: expected shape [6, 5], got [6, 4]")):
        call("gae", CALLS["gae"]() | {"value": torch.zeros(6, 4)}, "reference")
    with pytest.raises(ValueError, match=re.escape("lora_B: expected shape [40, 3], got [40, 2]")):
        call("sample", CALLS["sample"]() | {"lora_B": torch.zeros(40, 2)}, "reference")
    with pytest.raises(TypeError, match=re.escape("value: expected torch.float32, got torch.float64")):
        call("gae", CALLS["gae"]() | {"value": torch.zeros(6, 5).double()}, "reference")


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match=r"backend: expected one of \['reference', 'cpu'.*\], got 'cuda2'"):
        registry.implementation("gae", "cuda2")


X, BOOL = torch.zeros, torch.bool


def decode_step(**changes):
    """The native step itself, called with three rows of which something is wrong."""
    step = step_native.Step(make_decoder(Sizes(), torch.float32), [])
    return step(**make_call(Sizes(), 3, torch.float32, 0)._asdict() | changes)


LANES = LoraCall([X(2, 32)], [X(16, 2)], [1.0], [0], [4], [0], [0.0], 0, None, 0)


@needs_native
@each(
    ("run", "message"),
    [
        (lambda: lora_native.Decoder(X(4, 32), X(16, 32), X(15), LANES), "bias: expected shape"),
        (lambda: lora_native.Decoder(X(4, 32), X(15, 32), None, LANES), r"B\[0\]: expected shape"),
        (lambda: lora_native.Decoder(X(4, 32), X(16, 32), None, LANES)(X(3, 32)), "x: expected torch.float32 of shape"),
        (lambda: lora_native.Decoder(X(4, 32), X(16, 32), None, LANES)(X(4, 32).half()), "x: expected torch.float32"),
        (lambda: decode_step(positions=X(2).long()), "positions: expected shape"),
        (lambda: decode_step(slots=X(4).long()), "slots: expected shape"),
        (lambda: decode_step(table=X(2, 6).long()), "table: expected shape"),
        (lambda: decode_step(tokens=X(3)), "tokens: expected dtype"),
        (lambda: decode_step(cos=X(21, 7)), "cos: expected shape"),
        (lambda: decode_step(sin=X(20, 8)), "sin: expected shape"),
    ],
)
def test_decoders_refuse_wrong_shapes(run, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        run()


def test_what_is_no_strided_tensor_is_refused():
    for wrong in (None, torch.zeros(6, 5).to_sparse()):
        with pytest.raises(TypeError, match=r"value: expected a (strided )?tensor, got (None|torch.sparse_coo)"):
            call("gae", CALLS["gae"]() | {"value": wrong}, "reference")
    call("gae", CALLS["gae"]() | {"bootstrap": None}, "reference")


HUGE = 2**31


@needs_native
@each(("name", "arguments", "message"), [
        ("gae_forward_float32", (0, 0, 0, 0, 0, 0, 0, HUGE, 2 * HUGE, 1.0, 1.0, 1, 0, 0), "rows, columns"),
        ("gae_backward_float64", (0, 0, 0, 0, 0, 0, HUGE, 2 * HUGE, 1.0, 1.0, 1, 0, 0, 0), "rows, columns"),
        ("swiglu_apply_bfloat16", (8, 8, 2**62, 1, 8), "count"),
        ("swiglu_gradient_float32", (8, 8, 8, 2**62, 1, 8, 8), "count"),
        ("activation_apply_float32", (8, 0, 2**62, 1, 8), "count"),
        ("activation_gradient_bfloat16", (8, 8, 4, 1, 1, 8), "kind"),
        ("head_forward", ((0,) * 8, (0,) * 7, [], (0,) * 6, None, 0, 0, 1), "head"),
        ("head_forward", ((0,) * 9, (0,) * 7, [(0,) * 11], (0,) * 6, None, 0, 0, 1), "run"),
        ("masked_moments_float32", (0, 8, 4, 1, 8), "x"),
        ("masked_moments_float32", (8, 8, -1, 1, 8), "count"),
        ("masked_moments_float32", (8, 8, 4, 0, 8), "threads"),
        ("gae_forward_float32", (0, 0, 0, 0, 0, 0, 0, -1, 1, 1.0, 1.0, 1, 0, 0), "rows"),
        ("gae_forward_float32", (0, 0, 0, 0, 0, 0, 0, 1, 1, 1.0, 1.0, HUGE - 1, 0, 0), "threads"),
        ("gae_forward_float32", (0, 0, 0, 0, 0, 0, 0, 1, 1, 1.0, 1.0, 1, 0, 0), "reward.data"),
        ("linear_forward", (0, 0, 0, 0, 0, 0, 0, 0, HUGE, 2 * HUGE, 1, 1), "N, K"),
        ("linear_weight_gradient", (0, 0, 0, 0, 0, 0, 0, HUGE, 1, 2 * HUGE, 1), "N, M"),
        ("linear_packed_bytes", (0, HUGE, HUGE), "K, M, 16"),
        ("linear_is_packed", (0, 0, 0, 0, -1, 1, 0), "K"),
        ("rms_norm_apply_float32", (8, 8, False, 1.0, HUGE, 2 * HUGE, 1, 8, 8), "rows, width"),
        ("rotary_apply_float32", (0, 0, 0, 0, 0, 0, 0, HUGE, 2, HUGE, 2, 1, 0), "batch, tokens, heads, dim"),
        (
            "gather_logprob_forward_float32",
            (0, 0, 0, 1, 0, 0, 1.0, -1, HUGE, 2 * HUGE, 1, 0, 0, 0, 0, 0, 0),
            "rows, vocab",
        ),
        (
            "lora_forward",
            ((0, 0, 0), (0, 0, 0), False, HUGE, 1, [((0, 0, 0), (0, 0, 0), HUGE, 1.0, 0.0, 0, 0)], [], (0, 0, 0), 1),
            "slot.rank, K",
        ),
        (
            "lora_forward",
            ((0, 0, 0), (0, 0, 0), False, 0, 0, [((0, 0, 0), (0, 0, 0), 0, 1.0, 0.0, 0, 0)], [(0, 0, 2**62, 0)] * 2,
             (0, 0, 0), 1),
            "runs",
        ),
        (
            "decode_attention",
            (False, (0, 2, 1, 2), 0, (0, 0, 0), 0, (0, 0, 0, 0), 0, (0, 0, 0, 0), 0, 0, (HUGE, 1, HUGE), 1.0, 0, 0.0,
             0, 0, 1),
            "paging.table_blocks, paging.block",
        ),
    ])  # fmt: skip
def test_the_extension_refuses_sizes_that_overflow(name, arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}: expected "):
        getattr(native.extension(), name)(*arguments)


@pytest.mark.long
def test_hostile_calls_under_address_sanitizer(sanitized, tmp_path):
    """Whatever is wrong about one argument, C++ stays within its tensors and the call ends in an error or a result."""
    names = ("libasan.so", "libstdc++.so")
    # libstdc++ must be there when libasan looks for what it wraps, and Python itself does not bring it
    libraries = [native_build.run(["g++", f"-print-file-name={name}"]).strip() for name in names]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip(f"needs {' and '.join(names)} of g++")
    ignored = shutil.ignore_patterns("_native*", "__pycache__")
    package = shutil.copytree(native_build.ROOT / "kernels/rlhf_kernels", tmp_path / "rlhf_kernels", ignore=ignored)
    extension = shutil.move(sanitized.extension(), package / "_native.so")

    def of_layer(layer):
        output = native_build.run(
            [sys.executable, "-m", "tests.kernels.hostile_calls", extension, layer],
            cwd=native_build.ROOT,
            PYTHONPATH=os.pathsep.join(map(str, (tmp_path, native_build.ROOT))),
            LD_PRELOAD=" ".join(libraries),
            ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096",
            OMP_NUM_THREADS="1",
        )
        return [json.loads(line) for line in output.splitlines()]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        layers = list(pool.map(of_layer, LAYERS))
    assert all(layers)
    reports = [report for layer in layers for report in layer]
    faults = [f"{report['layer']} {fault}" for report in reports for fault in report["faults"]]
    assert not faults, "\n".join(faults)
    assert not [f"{report['layer']} {report['name']}" for report in reports if report["calls"] == 0]
    print(sum(report["calls"] for report in reports), "wrong calls of", len(reports), "functions")
