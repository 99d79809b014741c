"""Planted faults: places where a tensor, an index, a mask or a generator comes to lie on the wrong side."""

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """A text that stands for another in a function, and the runs in which it has to be seen."""

    module: str
    function: str
    """Name of the function in its module, with that of its class."""
    old: str
    new: str
    runs: Mapping[str, Any] | str = MappingProxyType({})
    """Options of the steps that it is in, or the name of a supervised run."""

    def __str__(self) -> str:
        return f"{self.module}.{self.function}"


_HERE, _THERE = "device=device", 'device="cpu"'
FAULTS = [
    Fault("rlhf_engine.hydra.batch", "PackedBatch.shared", "places_T=queued(places, self.device)", "places_T=places",
          {"exact": True, "algorithm": "grpo", "lora_dropout": 0.0}),
    Fault("rlhf_engine.hydra.batch", "PackedBatch.positions_T", "self.device", 'torch.device("cpu")'),
    Fault("rlhf_engine.hydra.batch", "PackedBatch.predict_rows_M", "self.device", 'torch.device("cpu")'),
    Fault("rlhf_engine.hydra.batch", "PackedBatch.from_lists", _HERE, _THERE),
    Fault("rlhf_engine.hydra.batch", "PackedBatch.sequence_of_M", "self.n_sequences, device=self.device",
          "self.n_sequences", {"algorithm": "grpo"}),
    Fault("rlhf_engine.hydra.batch", "PackedBatch.row_ids_T", "queued(self.sample_ids, self.device)",
          "torch.tensor(self.sample_ids)", {"lora_dropout": 0.2, "method": "hydra_ppo"}),
    Fault("rlhf_engine.hydra.gate", "ScalarHead.__init__", "torch.zeros(1, device=device)", "torch.zeros(1)",
          {"algorithm": "ppo"}),
    Fault("rlhf_engine.hydra.gate", "LoraPair.__init__", "torch.empty(r, in_features, device=device, ",
          "torch.empty(r, in_features, ", {"method": "hydra_ppo"}),
    Fault("rlhf_engine.hydra.attention", "_in_layout", "places.to(device))", "places)",
          {"exact": False, "dtype": "float32"}),
    Fault("rlhf_engine.hydra.supports", "Supports.mask", ", device=words.device", "", {"exact": False, "top_k": 5}),
    Fault("rlhf_engine.rollout.rows", "LiveRows.append",
          "queued(torch.tensor(temperatures, dtype=torch.float32), self._device)",
          "torch.tensor(temperatures, dtype=torch.float32)"),
    Fault("rlhf_engine.rollout.rows", "RowState.idle", f"dtype=torch.bool, {_HERE}", "dtype=torch.bool"),
    Fault("rlhf_engine.rollout.generate", "_joined", f"dtype=torch.float32, {_HERE}", "dtype=torch.float32"),
    Fault("rlhf_engine.scoring.experience", "_make", "dtype=torch.float32)[places].to(device)",
          "dtype=torch.float32)[places]"),
    Fault("rlhf_engine.scoring.experience", "_make",
          f"torch.tensor(greedy_scores, dtype=torch.float32, {_HERE})",
          "torch.tensor(greedy_scores, dtype=torch.float32)", {"algorithm": "remax"}),
    Fault("rlhf_engine.training.update", "_Minibatch._micro", "device=rows_M.device", 'device="cpu"',
          {"algorithm": "ppo"}),
    Fault("rlhf_engine.hydra.optimizer", "AdamW._write_back", "torch.Generator(p.device)", "torch.Generator()",
          {"optim": "adamw_stochastic"}),
    Fault("rlhf_engine.algorithms.grpo", "token_weights", "batch.completion_lens_N.float()",
          "torch.tensor(batch.completion_lens, dtype=torch.float32)", {"algorithm": "grpo"}),
    Fault("rlhf_kernels.ppo_loss.checks", "as_denom", ", device=like.device)", ")", {"algorithm": "ppo"}),
    Fault("rlhf_engine.training.sft", "sft_loss", "n_chosen, device=model.device", "n_chosen", "sft"),
    Fault("rlhf_engine.training.reward_model", "reward_loss",
          "[bool(e.label) for e in examples], device=model.device", "[bool(e.label) for e in examples]", "single"),
]  # fmt: skip
"""One of each kind first: an index, a mask, a generator, a number."""


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """A block in which the function has the fault."""
    owner: Any = importlib.import_module(fault.module)
    source = inspect.getsource(owner)
    names = fault.function.split(".")
    for name in names[:-1]:
        owner = getattr(owner, name)
    function = vars(owner)[names[-1]]
    function = getattr(function, "func", None) or getattr(function, "__func__", None) or inspect.unwrap(function)
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    node: Any = tree
    for name in names:
        node = next(x for x in node.body if getattr(x, "name", None) == name)
    before, own = "".join(lines[: node.lineno - 1]), "".join(lines[node.lineno - 1 : node.end_lineno])
    assert own.count(fault.old) == 1, f"{fault} no longer has the text of a planted fault once: {fault.old}"
    code: CodeType = compile(before + own.replace(fault.old, fault.new), function.__code__.co_filename, "exec")
    for name in names:
        code = next(x for x in code.co_consts if isinstance(x, CodeType) and x.co_name == name)
    right, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = right
