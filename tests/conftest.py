"""Shared fixtures: a tiny random Llama, and the real pretrained model beside the checkout where there is one.

What takes seconds to import is imported where it is used: tests of the kernels need none of it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.kernel_table import KernelTable

from tests.curves import drawn_once
from tests.reliability.table import survived

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from rlhf_engine.hydra import HydraModel, PackedBatch

__all__ = ["survived"]  # a fixture of every test
VOCAB = 61
SHARED = Path(__file__).resolve().parents[2] / "shared"
STORIES = SHARED / "models" / "stories260K"


def tiny_llama(
    seed: int = 0, dtype: torch.dtype = torch.float32, width: int = 1, positions: int = 64
) -> LlamaForCausalLM:
    """Two layers, grouped-query attention, sizes that are not powers of two; `width` times as wide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=24 * width, intermediate_size=40 * width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=positions,
        initializer_range=0.3,  # far from uniform outputs, so that differences show
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def randomise(model: HydraModel, *names: str, seed: int = 7, scale: float = 0.1) -> None:
    """Give slots a B that is not zero and heads weights that are not, so that they differ from OFF."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in names:
            for p in model.backbone().slot(name).parameters():
                p.add_(scale * torch.randn(p.shape, generator=generator).to(p.device))
        for head in model.heads.values():
            for p in head.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=generator).to(p.device))


def build(method: str = "hydra", *, seed: int = 0, **options: object) -> HydraModel:
    """A HydraModel on the tiny Llama with slots and heads that are not zero."""
    from rlhf_engine.hydra import HydraModel, SlotConfig, hydra_roles

    roles = hydra_roles() if method == "hydra" else hydra_roles("j_hydra_ppo")
    used = sorted({r.slot for r in roles.values() if r.slot is not None})
    slots = {name: SlotConfig(r=4, alpha=8.0) for name in used}
    model = HydraModel.from_pretrained(tiny_llama(seed), roles=roles, slots=slots, seed=seed, **options)
    randomise(model, *used)
    return model.eval()


def random_batch(lengths: tuple[tuple[int, int], ...] = ((3, 5), (4, 2), (1, 7), (6, 4)), seed: int = 0) -> PackedBatch:
    """Random prompts and completions of the given (prompt, completion) lengths."""
    from rlhf_engine.hydra import PackedBatch

    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(3, VOCAB, (n,), generator=generator).tolist()

    return PackedBatch.from_lists([draw(p) for p, _ in lengths], [draw(c) for _, c in lengths])


NOT_UNIT = ("long", "gpu", "alone")
UNIT_ROOMS = ("algorithms", "config", "data", "hydra", "kernels", "policy", "rollout", "runs", "scoring")
OTHER_PROCESSES = re.compile(r"subprocess|multiprocessing|native_build|torch\.compile")


@functools.cache
def is_unit(path: Path) -> bool:
    """Whether a file of tests runs in this process alone, without compilers, and in a room that trains nothing."""
    room = path.relative_to(Path(__file__).parent).parts[0]
    return room in UNIT_ROOMS and not OTHER_PROCESSES.search(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="session", autouse=True)
def _native_where_it_serves() -> Iterator[None]:
    """`auto` takes the native code where it serves, whatever was measured; also in what a module's tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_table", KernelTable(source="none", entries=()))
        yield


@pytest.fixture(autouse=True)
def _no_gpu_memory_kept() -> Iterator[None]:
    """A test gives its GPU memory back: several processes test on one GPU."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def package_table() -> Iterator[None]:
    """`auto` decides as in the processes that a module's tests start, which have the package's kernel table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_table", None)  # read anew
        registry.begin_run()
        yield
    registry.begin_run()


@pytest.fixture(autouse=True)
def _choices_of_no_run() -> Iterator[None]:
    """Nothing is kept of what another test's run has chosen."""
    yield
    registry.begin_run()


@pytest.fixture(scope="module", autouse=True)
def curves_drawn_once() -> Iterator[None]:
    """Of the runs of a module the first one draws its curves; see `tests.curves`."""
    with drawn_once():
        yield


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each backbone call."""
    from rlhf_engine.hydra.backbone import Backbone

    seen: list[int] = []
    run = Backbone.run

    def counted(self: Backbone, tokens: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        seen.append(len(tokens))
        return run(self, tokens, *args, **named)

    monkeypatch.setattr(Backbone, "run", counted)
    return seen


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama; no test writes into it."""
    folder = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to a vLLM server are sent again at once."""
    from rlhf_engine.rollout.vllm import client as http

    monkeypatch.setattr(http, "PAUSES", (0.01, 0.01))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count skips by reason, and name the instruction sets that ran. (`-q` hides the header.)"""
    skipped = terminalreporter.getreports("skipped")
    reasons = collections.Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count:4}: {reason}")
    reason = native.missing()
    sets = f"{', '.join(native.isas())}; elsewhere {native.isa()}" if reason is None else reason
    terminalreporter.write_line(f"native code, where tests ask for every instruction set: {sets}")


@contextlib.contextmanager
def _without_peft() -> Iterator[None]:
    """What needs PEFT is skipped where it is not installed, and says so."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        pytest.skip("peft is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with _without_peft():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with _without_peft():
        return (yield)


def _words(callspec: Any) -> Iterator[str]:
    """The strings among a test's parameters, also those in tuples."""
    for value in [] if callspec is None else callspec.params.values():
        yield from (word for word in (value if isinstance(value, tuple) else (value,)) if isinstance(word, str))


PER_PUSH = pytest.StashKey[int]()
"""Number of collected tests that neither take minutes nor need a GPU."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of `make unit` and `make test-long`; skip what needs a GPU on a machine without one, saying so."""
    skip = pytest.mark.skip(reason="needs a CUDA device")
    between = set(native.isas()[1:-1]) if native.missing() is None else set()
    for item in items:
        # `portable` and the best set here run on every push; the best one elsewhere is another
        if between & set(_words(getattr(item, "callspec", None))):
            item.add_marker(pytest.mark.long)
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(skip)
        # the fixture `device` compiles CUDA sources for the host
        slow = "device" in getattr(item, "fixturenames", ()) or any(map(item.get_closest_marker, NOT_UNIT))
        if is_unit(item.path) and not slow:
            item.add_marker(pytest.mark.unit)
    config.stash[PER_PUSH] = sum(not any(map(item.get_closest_marker, ("long", "gpu"))) for item in items)


def pytest_collection_finish() -> None:
    """Spare every later `gc.collect()`, which each of TRL's trainers calls, all that collection has made."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a tokenizer and a reward head that counts as trained."""
    from tests.training.test_data import write_model

    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def stories() -> Path:
    """Folder of the real pretrained 260 K-parameter story model."""
    if not STORIES.is_dir():
        pytest.skip(
            f"the pretrained model stories260K is not beside the checkout (looked for {STORIES.name} in shared/)"
        )
    return STORIES
