"""Rollouts from a vLLM server that holds the same base: only the actor's adapter goes there, after every update.

A version is written as a PEFT folder that both sides see, and loaded under a name of its own. It is compared with the
training forward on canary prompts, and only then drawn from; the versions before it are unloaded last. Names hold the
version and a digest of weights and scale, because the server keeps keys and values of prompts by adapter name: a run
that goes back to a checkpoint and makes another version 7 must not meet those of the first.

One request per answer, each with its own seed. The server is a process of its own (`vllm serve`); nothing here imports
vllm.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from rlhf_engine.errors import ConfigError, RolloutServerError
from rlhf_engine.http import RequestGroup
from rlhf_engine.hub import plain_name
from rlhf_engine.hydra import peft_io
from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.gated_linear import GatedHead
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.hydra.peft_export import write_adapter
from rlhf_engine.hydra.roles import LM_HEAD, OFF, require_role
from rlhf_engine.io import put_in_place
from rlhf_engine.rollout.request import (
    FinishReason,
    Rollout,
    RolloutStats,
    SamplingConfig,
    check_prompts,
    row_seed,
)
from rlhf_engine.rollout.vllm.canary import Asked, Canary
from rlhf_engine.rollout.vllm.client import Completion, ServedModel, VllmClient, sampling_body

CONNECTIONS = 256
"""Most requests under way at once; as many as a server decodes together unless it is told otherwise."""
_HIGHEST_RANK = 512
"""The largest --max-lora-rank that vLLM knows."""
_LOOK_SECONDS = 0.2
"""Seconds between two looks at whether the run has stopped."""
_PARTING_SECONDS = 10.0
"""Longest wait for a server at a run's end, where it may be what has ended the run."""
_DIGEST = 8
"""Hexadecimal digits of the digests in names."""


def find_base(client: VllmClient, model_name_or_path: str, most_tokens: int) -> ServedModel:
    """The base that the server holds, looked up by the last part of its name or path.

    most_tokens: of the longest prompt with its answer. Raises RolloutServerError where no server answers, ConfigError
    where it serves another base or less context.
    """
    client.health()
    bases = [model for model in client.models() if model.parent is None]
    ours = Path(plain_name(model_name_or_path)).name
    found = [model for model in bases if ours in (_last_part(model.name), _last_part(model.root or model.name))]
    if len(found) != 1:
        listed = [f"{model.name} of {model.root}" if model.root else model.name for model in bases]
        raise ConfigError(
            f"vllm_server_base_url {client.url}: expected it to serve one model called {ours!r} (vllm serve "
            f"--served-model-name), got {listed}"
        )
    limit = found[0].max_model_len
    if limit is not None and limit < most_tokens:
        raise ConfigError(
            f"vllm_server_base_url {client.url}: expected a --max-model-len of at least {most_tokens}, the longest "
            f"prompt and max_completion_length, got {limit}"
        )
    return found[0]


def _last_part(name: str) -> str:
    return PurePosixPath(name).name


def require_servable(model: HydraModel, role: str = "actor") -> None:
    """Raise ConfigError for a policy that vLLM's LoRA cannot serve. role: the policy's."""
    spec = require_role(model.roles, role)
    if spec.slot is OFF:
        raise ConfigError(
            "method: expected an actor on an adapter for a vLLM server, to which only adapters are sent, got "
            "one that trains its whole backbone"
        )
    backbone = model.role_backbone(role)
    slot = backbone.slot(spec.slot)
    heads = [path for path, _ in slot.items() if isinstance(backbone.linears[path], GatedHead)]
    if heads:
        raise ConfigError(
            f"lora_target_modules: expected no LM head for a vLLM server, where LoRA on it is not served, got {heads}"
        )
    if backbone.transposed:
        raise ConfigError(
            "model_name_or_path: expected a model with plain linears for a vLLM server, got a "
            f"{type(backbone.model).__name__}, whose Conv1D it does not serve LoRA on"
        )
    if slot.config.r > _HIGHEST_RANK:
        raise ConfigError(f"lora_r: expected at most {_HIGHEST_RANK} for a vLLM server, got {slot.config.r}")


class VllmRollouts:
    """`Rollouts` from a vLLM server."""

    def __init__(
        self,
        model: HydraModel,
        client: VllmClient,
        base: ServedModel,
        canary: Canary,
        *,
        run: str,
        folder: Path,
        server_folder: str | None = None,
        role: str = "actor",
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make a backend of one run.

        `run` names its adapters, which are written into `folder`. `server_folder` is the same folder as the server sees
        it; None stands for the same path. `role` is the policy that is served. Where that is not the actor, the canary
        is not compared by `sync` but by `check`. `stopped` is asked while answers are waited for; where it is true, the
        requests under way are ended.

        Raises:
            ConfigError: an actor that vLLM cannot serve.
        """
        require_servable(model, role)
        self.role, self.stopped = role, stopped
        self.model, self.client, self.base, self.canary = model, client, base, canary
        self.run = re.sub(r"[^A-Za-z0-9_.-]", "-", run)
        self.folder = folder.resolve()
        self.server_folder = str(self.folder) if server_folder is None else server_folder.rstrip("/")
        self.policy_version: int | None = None
        self.name = ""
        """Adapter that is drawn from."""
        self._unchecked: dict[int, Asked] = {}
        self._stuck: set[str] = set()
        self._metrics: dict[str, float] = {}

    # ---- the adapter goes there ------------------------------------------------------------------------------------

    def sync(self, policy_version: int) -> dict[str, float]:
        """Serve the role's present weights as this version.

        Raises RolloutServerError where the server fails, MismatchError where it then serves something else, ConfigError
        where the folder cannot be written to. Until all is well, the version before stays loaded and on disk.
        """
        if policy_version == self.policy_version:
            return self._metrics
        with self._alone():
            name = self._write(policy_version)
            # a run that was killed may have left the very same weights there, or another rank has just loaded them
            if name not in {model.name for model in self.client.models()}:
                self.client.load_adapter(name, f"{self.server_folder}/{name}")
        asked = self.canary.ask(name, self._complete)
        measured = self.canary.check(asked) if self.role == "actor" else {}
        with self._alone():
            self._forget_others(name, {model.name for model in self.client.models()}, self.client)
        self.policy_version, self.name = policy_version, name
        if self.role != "actor":
            self._unchecked[policy_version] = asked
        self._metrics = {
            **measured,
            "vllm/adapters_left": float(len(self._stuck)),
        }
        return self._metrics

    def check(self, policy_version: int) -> dict[str, float]:
        """Compare what the server has answered by a version, once, with that policy in the canary's role.

        Kept apart from `sync`, which may run beside a learner whose base is in shares. Raises MismatchError where the
        server has drawn by something else; nothing has been learned from it then.
        """
        asked = self._unchecked.pop(policy_version, None)
        return {} if asked is None else self.canary.check(asked)

    def forget(self) -> None:
        """Take nothing for served any more: a server that has started again holds no adapters."""
        self.policy_version, self.name = None, ""

    def wait_for_server(self) -> None:
        """Wait until the server is up, as long as an answer may take.

        Raises RolloutServerError where it does not come, or where the run stops meanwhile.
        """
        until = time.monotonic() + self.client.timeout
        while True:
            try:
                return self.client.health()
            except RolloutServerError:
                if self.stopped() or time.monotonic() >= until:
                    raise
            time.sleep(_LOOK_SECONDS)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A block that one rank of the run is in at a time: all of them serve the same versions from one folder."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            folder = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"vllm_adapter_dir: expected a folder that can be written to, got {error}") from error
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                place = f"vllm_adapter_dir: {self.folder} is on a file system without locks ({error.strerror})"
                warnings.warn(f"{place}; several ranks of a run may disturb each other there", stacklevel=2)
            yield
        finally:
            os.close(folder)

    def _write(self, policy_version: int) -> str:
        """Write the actor's slot as a PEFT folder, whole or not at all; its name."""
        backbone = self.model.role_backbone(self.role)
        slot = self.model.roles[self.role].slot
        assert slot is not OFF
        temporary = self.folder / f".{self.run}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"vllm_adapter_dir: expected a folder that can be written to, got {error}") from error
        write_adapter(backbone.slot(slot), temporary, backbone=backbone, base_name=self.base.name)
        name = f"{self.run}-v{policy_version}-{_digest(temporary)}"
        put_in_place(temporary, self.folder / name)
        return name

    def _forget_others(self, name: str, served: set[str], client: VllmClient) -> None:
        """Unload and remove this run's other versions, those of a run that was killed included."""
        ours = re.compile(rf"{re.escape(self.run)}-v\d+-[0-9a-f]{{{_DIGEST}}}")
        for other in sorted(served - self._stuck):
            if other != name and ours.fullmatch(other) and not client.unload_adapter(other):
                self._stuck.add(other)
        for folder in self.folder.iterdir() if self.folder.is_dir() else ():
            if folder.name != name and ours.fullmatch(folder.name):
                shutil.rmtree(folder)

    def close(self) -> None:
        """Unload and remove this run's adapters. A server that does not answer any more is left as it is.

        A version that the server would not unload is warned of, so that somebody can.
        """
        client = VllmClient(self.client.url, timeout=min(self.client.timeout, _PARTING_SECONDS))
        with self._alone() if self.folder.is_dir() else contextlib.nullcontext():
            try:
                self._forget_others("", {model.name for model in client.models()}, client)
            except RolloutServerError as error:
                warnings.warn(f"adapters of this run may still be loaded there: {error}", stacklevel=2)
                self._forget_others("", set(), client)
            if self._stuck:
                warnings.warn(f"{client.url} has kept these adapters of this run: {sorted(self._stuck)}", stacklevel=2)
            with contextlib.suppress(OSError):  # another run's adapters are in it, or it never was
                self.folder.rmdir()
        self.policy_version, self.name = None, ""

    # ---- answers come back -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        role: str = "actor",
        sample_ids: Sequence[int] | None = None,
        greedy: Sequence[bool] | None = None,
    ) -> Rollout:
        """One answer per prompt from the version of the last `sync`, or from the base for a role without an adapter.

        Raises ValueError as `rollout.generate` does and for what the server cannot draw, RolloutServerError where it
        fails; then no answer of the batch is kept.
        """
        n = len(prompts)
        backbone = self.model.role_backbone(role)
        check_prompts(prompts, backbone.context_length, sampling.max_completion_length, backbone.vocabulary)
        ids = tuple(sample_ids) if sample_ids is not None else tuple(range(n))
        flags = tuple(greedy) if greedy is not None else (False,) * n
        for argument, given in (("greedy", flags), ("sample_ids", ids)):
            if len(given) != n:
                raise ValueError(f"{argument}: expected {n} entries like prompts, got {len(given)}")
        name = self._served_name(role)
        bodies = [
            sampling_body(sampling, seed=row_seed(sampling.seed, i), greedy=flag)
            for i, flag in zip(ids, flags, strict=True)
        ]
        began = time.perf_counter()
        answers = self._complete(name, prompts, bodies, backbone.vocabulary)
        seconds = time.perf_counter() - began
        reasons = tuple(finish_reason(answer, sampling) for answer in answers)
        batch = PackedBatch.from_lists(
            prompts, [answer.tokens for answer in answers], device=self.model.device, sample_ids=ids
        )
        logprobs = [x for answer in answers for x in answer.logprobs]
        stats = RolloutStats(
            prompts=n,
            prompt_tokens=sum(len(prompt) for prompt in prompts),
            tokens=len(logprobs),
            decode_seconds=seconds,
            most_rows=min(n, CONNECTIONS),
            step="vllm",
        )
        return Rollout(
            batch=batch,
            logprobs_M=torch.tensor(logprobs, dtype=torch.float32, device=self.model.device),
            finish_reasons=reasons,
            versions_M=torch.full((len(logprobs),), self.policy_version or 0, device=self.model.device),
            filtered=sampling.filters,
            stats=stats,
        )

    def _complete(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        bodies: Sequence[dict[str, Any]],
        vocabulary: int,
    ) -> list[Completion]:
        """All answers; the first failure, or an interrupt, ends the requests beside it and is not kept waiting."""
        group = RequestGroup()
        # no `with`: that would wait for the requests under way
        pool = ThreadPoolExecutor(min(len(prompts), CONNECTIONS), thread_name_prefix="vllm")
        try:
            futures = [
                pool.submit(self.client.complete, name, prompt, body, vocabulary=vocabulary, group=group)
                for prompt, body in zip(prompts, bodies, strict=True)
            ]
            waiting = set(futures)
            while waiting:
                done, waiting = wait(waiting, timeout=_LOOK_SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                if self.stopped():
                    raise RolloutServerError("the run has stopped; its answers were not waited for")
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            group.end()

    def _served_name(self, role: str) -> str:
        """Name of a role's policy on the server."""
        spec, served = require_role(self.model.roles, role), self.model.roles[self.role]
        if spec.head != LM_HEAD:
            raise ValueError(f"role: expected one with an LM head, got {role!r} with head {spec.head!r}")
        if spec.slot is OFF and self.model.role_backbone(role).frozen:
            return self.base.name
        if (spec.backbone, spec.slot) != (served.backbone, served.slot):
            raise ValueError(
                f"role: expected the adapter of {self.role!r} or none for a vLLM server, got slot {spec.slot!r}"
            )
        if not self.name:
            raise ValueError("sync: expected one before the actor's answers, got none so far")
        return self.name


def _digest(folder: Path) -> str:
    """Digest of a PEFT folder's weights and configuration, which holds their scale."""
    config = json.loads((folder / peft_io.CONFIG_FILE).read_text())
    # PEFT writes sets as lists, in an order that is another one in every process
    config = {key: sorted(value, key=str) if isinstance(value, list) else value for key, value in config.items()}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    digest.update((folder / peft_io.WEIGHTS_FILE).read_bytes())
    return digest.hexdigest()[:_DIGEST]


def finish_reason(answer: Completion, sampling: SamplingConfig) -> FinishReason:
    """Finish reason of an answer, in our words. Raises RolloutServerError for an end that was not in the request."""
    ends = [i for i, token in enumerate(answer.tokens) if token in sampling.eos_token_ids]
    last = len(answer.tokens) - 1
    if last < sampling.max_completion_length and ends in ([], [last]):
        if ends:
            return "eos"  # also as the last token that fits, where servers differ in what they call it
        if (
            answer.finish_reason == "stop"
            and isinstance(answer.stop_reason, str)
            and answer.stop_reason in sampling.stop
        ):
            return "stop"
        if answer.finish_reason == "length" and last + 1 == sampling.max_completion_length:
            return "length"
    raise RolloutServerError(
        f"vllm_server_base_url: expected an answer that ends with one of the tokens {sampling.eos_token_ids}, with a "
        f"text of {sampling.stop}, or at {sampling.max_completion_length} tokens, got one of {last + 1} tokens with "
        f"finish_reason {answer.finish_reason!r}, stop_reason {answer.stop_reason!r} and ending tokens at {ends}; "
        "a server's --max-model-len, or max_new_tokens in its generation config, cuts answers short"
    )
