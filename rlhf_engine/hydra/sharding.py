"""A base in shares: each of several processes holds a part of every tensor of it (FSDP2, `fully_shard`).

    base = ShardedBase(model, group)
    model(batch, outputs)     # each block is gathered when it runs and given back after it: all processes together
    with base.whole():        # all of the base on every process
        generate(model, ...)  # each at its own pace
    with base.in_step(world): # of the blocks only those that run: each as many calls as it needs, for as long as
        generate(model, ...)  # any of them needs one

Slots and heads are replicated. A frozen base has no gradients, so gathering its blocks, once per forward and once more
on the way back, is all the traffic that sharding makes. Gradients of a trained one are summed over the processes in
float32, and each process keeps those of its share.

While processes are in step, one exchange of a number comes before each call of a backbone: 0 by a process that has none
to make, because it waits for the others. All run the backbone of the largest number, with a token of no account where
it is not their own. So no process has to know how many calls another one will make, or of what.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlhf_engine.devices import World, is_out_of_memory
from rlhf_engine.errors import MemoryLimitError, RankError
from rlhf_engine.hydra.attention import plan_packed
from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.gate import SlotTable
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.hydra.outputs import Logprobs, Output, Rewards, Values
from rlhf_engine.hydra.roles import LM_HEAD


class ShardedBase:
    """Makes the backbones of a model sharded ones, in place."""

    def __init__(self, model: HydraModel, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        """Share equal models out in all processes together, onto `device`; RuntimeError where hidden states change."""
        backbones = [model.backbone(name) for name in model.backbones]
        for name, backbone in zip(model.backbones, backbones, strict=True):
            if backbone.quantized:
                raise ValueError(f"model: expected backbones in full precision, got {name!r}, which is quantised")
        moves = device is not None and device != model.device
        before = None if moves else _probe(model)
        mesh = DeviceMesh.from_group(group, (device or model.device).type)
        self._group, self._backbones = group, backbones
        self._is_whole = self._is_in_step = False
        self._failed: BaseException | None = None  # what has ended a call that the other processes are in the middle of
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        shard: Callable[..., FSDPModule] = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
        self._blocks: list[FSDPModule] = []
        first: list[FSDPModule] = []
        for backbone in backbones:
            if backbone.frozen:  # asked for by checkpoints, when no process has all of the base
                backbone.base_hash()
                backbone.decoder_hash()
            backbone.sharded = True
            blocks = [shard(block, reshard_after_forward=True) for block in backbone.blocks]
            for earlier, block in itertools.pairwise(blocks):
                earlier.set_modules_to_forward_prefetch([block])
                block.set_modules_to_backward_prefetch([earlier])
            first.append(blocks[0])
            self._blocks += blocks
        replicated = [model.heads, *(backbone.slots for backbone in backbones)]
        for module in replicated:
            module.to(device)
        # embeddings, norms and LM heads: gathered as the model's forward begins, because heads and losses are in it
        self._rest = shard(model, ignored_params={p for module in replicated for p in module.parameters()})
        for part in (self._rest, *self._blocks):  # denominators are those of all processes: sums, no means
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        for block in first:  # nothing is left to gather; without a word FSDP would take what ran before it
            block.set_modules_to_backward_prefetch([self._rest])
        after = _probe(model)  # its first forward also tells FSDP which module is the outermost
        self._rest.reshard()  # which FSDP leaves to a backward
        if before is not None and not all(map(torch.equal, before, after)):
            raise RuntimeError("model: expected the same hidden states of the sharded base, got others")

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """All of the base on every process. All enter together, and none waits for another within."""
        if self._is_whole:
            yield
            return
        modules = [self._rest, *self._blocks]
        for module in modules:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            for module in self._blocks:
                module.set_reshard_after_forward(True, recurse=False)
            for module in modules:
                module.reshard()

    @contextlib.contextmanager
    def in_step(self, world: World) -> Iterator[None]:
        """A block in which each process calls backbones as often as it has to, without gradients.

        All processes enter together. One that waits in an exchange of `world`, or at the end of the block, makes calls
        beside those of the others. To enter again within changes nothing and concerns nobody else.

        world: whose exchanges the processes make within the block.
        """
        if self._is_in_step:
            yield
            return
        self._rest.unshard()
        for number, backbone in enumerate(self._backbones, start=1):
            backbone.in_turn = partial(self._in_turn, number)
        self._is_in_step = True
        try:
            with world.while_waiting(self._accompany):
                yield
            self._accompany()
        finally:
            self._is_in_step = False
            for backbone in self._backbones:
                backbone.in_turn = None
            self._rest.reshard()

    def _in_turn(self, number: int, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Make a call of a backbone, once all processes are at one of it."""
        while (chosen := self._largest(number)) != number:
            self._run_beside(chosen)
        return self._run(call)

    def _accompany(self) -> None:
        """Make calls beside those of other processes, until none has any to make."""
        while chosen := self._largest(0):
            self._run_beside(chosen)

    def _largest(self, number: int) -> int:
        """The largest number that a process has given, on all of them."""
        if self._failed is not None:
            raise RankError("a call that the other ranks are in the middle of has failed") from self._failed
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return int(largest)

    @torch.no_grad()
    def _run_beside(self, number: int) -> None:
        """One token through a backbone, for the shares of its blocks that other processes lack."""
        backbone = self._backbones[number - 1]
        in_turn, backbone.in_turn = backbone.in_turn, None
        try:
            token = torch.zeros(1, dtype=torch.int64, device=backbone.device)
            table, plan = SlotTable.uniform(None, 1), plan_packed((1,), backbone.device)
            self._run(lambda: backbone.run(token, token, table, plan))
        finally:
            backbone.in_turn = in_turn

    def _run(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            return call()
        except BaseException as error:
            self._failed = error
            if is_out_of_memory(error):
                raise MemoryLimitError(
                    "a forward of a sharded base does not fit into memory, and the other ranks are in the middle of "
                    "it; lower kv_cache_memory or max_completion_length"
                ) from error
            raise


@torch.no_grad()
def _probe(model: HydraModel) -> Sequence[torch.Tensor]:
    """Scores of a few tokens by the model: log-probs, values or rewards of every role there is."""
    batch = PackedBatch.from_lists(prompts=[[0, 1, 2]], completions=[[1, 0]], device=model.device)
    readers: dict[str, Callable[..., Output]] = {LM_HEAD: Logprobs, "value": Values}
    results = model(batch, [readers.get(role.head, Rewards)(role=name) for name, role in model.roles.items()])
    return [getattr(numbers, "logprob", numbers) for numbers in results]
