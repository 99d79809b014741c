"""Rollouts from a vLLM server that holds the same base: only the actor's adapter goes there, after every update.

A version is written as a PEFT folder that both sides see, and loaded under a name of its own. It is compared with the
training forward on canary prompts, and only then drawn from; the versions before it are unloaded last. Names hold the
version and a digest of weights and scale, because the server keeps keys and values of prompts by adapter name: a run
that goes back to a checkpoint and makes another version 7 must not meet those of the first.

The canary: after every sync the server draws a few tokens after each canary prompt, and `HydraModel.score` gives our
log-probs of them. The mean |difference| is bounded by dtype: beyond, the server holds another base or adapter, or
reports log-probs of another distribution. One update moves log-probs by less than bf16 rounds, so an adapter that is
one version old hides below that bound. It is found by its tokens and log-probs: with the same seeds they are those of
the version before, to the last bit, although ours have moved. vLLM's own `prompt_logprobs` would not do: it computes
them by the adapters of the other requests in its batch, and may end there (its issues 29955 and 51594).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from rlhf_engine.errors import ConfigError, MismatchError, RolloutServerError
from rlhf_engine.hub import plain_name
from rlhf_engine.hydra import SlotConfig, peft_io
from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.hydra.modules import GatedHead
from rlhf_engine.hydra.peft_io import write_adapter
from rlhf_engine.hydra.roles import LM_HEAD, OFF, require_role
from rlhf_engine.io import lock, put_in_place
from rlhf_engine.rollout.request import (
    FinishReason,
    PromptBatch,
    Rollout,
    RolloutStats,
    SamplingConfig,
    check_prompt,
    row_seed,
)
from rlhf_engine.rollout.vllm.client import Completion, RequestGroup, ServedModel, VllmClient, sampling_body

CONNECTIONS = 256  # most requests under way at once; as many as a server decodes together unless it is told otherwise
_HIGHEST_RANK = 512  # the largest --max-lora-rank that vLLM knows
_PAUSE = 1.0  # seconds before a server that has failed is looked for again
_LOOK_SECONDS = 0.2  # seconds between two looks at whether the run has stopped
_PARTING_SECONDS = 10.0  # longest wait for a server at a run's end, where it may be what has ended the run
_DIGEST = 8  # hexadecimal digits of the digests in names
CANARY_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest mean |log-prob difference| per token, by the backbone's dtype. Another engine rounds in other places: on a
real server with the story model the mean was 1.2e-6 in float32 and 0.020 in bf16."""
_CANARY_TOKENS = 16  # most tokens drawn after each canary prompt
_MOVED = 0.02
"""Share of the bound by which our own log-probs must have moved for equal ones of the server to count as stale."""


def find_base(client: VllmClient, model_name_or_path: str, most_tokens: int) -> ServedModel:
    """The base that the server holds, by the last part of its name or path; ConfigError for another one."""
    client.health()
    bases = [model for model in client.models() if model.parent is None]
    ours = Path(plain_name(model_name_or_path)).name
    fitting = [m for m in bases if ours in (PurePosixPath(m.name).name, PurePosixPath(m.root or m.name).name)]
    if len(fitting) != 1:
        listed = [f"{model.name} of {model.root}" if model.root else model.name for model in bases]
        raise ConfigError(
            f"vllm_server_base_url {client.url}: expected it to serve one model called {ours!r} (vllm serve "
            f"--served-model-name), got {listed}"
        )
    limit = fitting[0].max_model_len
    if limit is not None and limit < most_tokens:
        raise ConfigError(
            f"vllm_server_base_url {client.url}: expected a --max-model-len of at least {most_tokens}, the longest "
            f"prompt and max_completion_length, got {limit}"
        )
    return fitting[0]


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


class _ServedAnswer(NamedTuple):
    """Tokens that the server has drawn at one version, and their log-probs [M]."""

    tokens: list[tuple[int, ...]]
    server: torch.Tensor
    ours: torch.Tensor


class Canary:
    """Compares a served adapter with the policy that it was made from."""

    def __init__(
        self,
        model: HydraModel,
        client: VllmClient,
        prompts: Sequence[Sequence[int]],
        *,
        temperature: float,
        max_tokens: int,
        bound: float | None = None,
        seed: int = 0,
        role: str = "actor",
    ) -> None:
        """Take prompts with room for `max_tokens` more, the mean's bound (None: by dtype) and the role compared."""
        if len(prompts) == 0:
            raise ValueError("prompts: expected at least one canary prompt, got none")
        self.role = role
        base = model.role_backbone(role)
        self.bound = CANARY_BOUND[torch.bfloat16 if base.quantized else base.dtype] if bound is None else bound
        self.model, self.client, self.seed = model, client, seed
        self.prompts = [list(prompt) for prompt in prompts]
        self.sampling = SamplingConfig(
            max_completion_length=min(_CANARY_TOKENS, max_tokens), eos_token_ids=(), temperature=temperature
        )
        self._last: _ServedAnswer | None = None

    def ask(
        self,
        name: str,
        complete: Callable[[str, Sequence[Sequence[int]], Sequence[dict[str, Any]], int], list[Completion]],
    ) -> list[Completion]:
        """Have the adapter served under a name answer the canary prompts, without a pass of the model."""
        vocabulary = self.model.role_backbone(self.role).vocabulary
        bodies = [sampling_body(self.sampling, seed=row_seed(self.seed, i)) for i in range(len(self.prompts))]
        # one at a time: what is drawn beside an answer may move its last digits, by which a stale adapter is found
        pairs = zip(self.prompts, bodies, strict=True)
        return [answer for prompt, body in pairs for answer in complete(name, [prompt], [body], vocabulary)]

    def check(self, name: str, answers: list[Completion]) -> dict[str, float]:
        """Compare answers of an adapter with the policy in the role's slot now; mean and largest |difference|."""
        tokens = [answer.tokens for answer in answers]
        drawn = _ServedAnswer(
            tokens=tokens,
            server=torch.tensor([x for answer in answers for x in answer.logprobs]),
            ours=self._score(tokens, self.sampling.temperature),
        )
        self._require_new(name, drawn)
        gap = (drawn.server - drawn.ours).abs()
        if not float(gap.mean()) <= self.bound:  # also catches NaN
            raise MismatchError(self._message(name, drawn))
        self._last = drawn
        return {"mismatch/canary_mean": float(gap.mean()), "mismatch/canary_max": float(gap.max())}

    def _score(self, completions: Sequence[Sequence[int]], temperature: float) -> torch.Tensor:
        batch = PackedBatch.from_lists(self.prompts, completions, device=self.model.device)
        scored = self.model.score(batch, (self.role,), temperature=temperature)
        logprobs_M = scored.logprobs_M if self.role == "actor" else scored.past_logprobs_M
        assert logprobs_M is not None
        return logprobs_M.float().cpu()

    def _require_new(self, name: str, drawn: _ServedAnswer) -> None:
        """The server's answers must not be those of the version before where our log-probs of them are not."""
        last = self._last
        if last is None or drawn.tokens != last.tokens or not torch.equal(drawn.server, last.server):
            return
        moved = float((drawn.ours - last.ours).abs().mean())
        if moved > _MOVED * self.bound:
            raise MismatchError(
                f"vllm_server_base_url {self.client.url}: expected new log-probs from adapter {name!r}, got those of "
                f"the version before, bit for bit, where the actor's have moved by {moved:.3g} on average: the server "
                "still serves the old adapter, or none"
            )

    def _message(self, name: str, drawn: _ServedAnswer) -> str:
        text = (
            f"vllm_server_base_url {self.client.url}: expected the actor's log-probs from adapter {name!r}, within "
            f"{self.bound:g} on average (rollout_mismatch_bound), got ones that differ by "
            f"{float((drawn.server - drawn.ours).abs().mean()):.3g}"
        )
        temperature = self.sampling.temperature
        if temperature != 1 and float((drawn.server - self._score(drawn.tokens, 1.0)).abs().mean()) <= self.bound:
            return (
                f"{text}; they are of temperature 1, not of {temperature:g}: start the server with "
                "--logprobs-mode processed_logprobs"
            )
        return f"{text}; does it serve the same base, in the same dtype?"


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
    ) -> None:
        """Make a backend of a run, whose adapters lie in `folder`, for the server `server_folder`."""
        require_servable(model, role)
        self.role = role
        self.look: Callable[[], object] = lambda: None
        self.model, self.client, self.base, self.canary = model, client, base, canary
        self.run = re.sub(r"[^A-Za-z0-9_.-]", "-", run)
        self.folder = folder.resolve()
        self.server_folder = str(self.folder) if server_folder is None else server_folder.rstrip("/")
        self.policy_version: int | None = None
        self.name = ""  # adapter that is drawn from
        self._unchecked: dict[int, tuple[str, list[Completion]]] = {}
        """Name and answers to the canary prompts, by version, of what is compared later."""
        self._stuck: set[str] = set()
        self._metrics: dict[str, float] = {}

    # ---- the adapter goes there ------------------------------------------------------------------------------------

    def sync(self, policy_version: int) -> dict[str, float]:
        """Serve the role's present weights as this version; until all is well, the one before stays loaded."""
        if policy_version == self.policy_version:
            return self._metrics
        with self._alone():
            name = self._write(policy_version)
            # a run that was killed may have left the very same weights there, or another rank has just loaded them
            if name not in {model.name for model in self.client.models()}:
                self.client.load_adapter(name, f"{self.server_folder}/{name}")
        answers = self.canary.ask(name, self._complete)
        measured = self.canary.check(name, answers) if self.role == "actor" else {}
        with self._alone():
            self._forget_others(name, {model.name for model in self.client.models()}, self.client)
        self.policy_version, self.name = policy_version, name
        if self.role != "actor":
            self._unchecked[policy_version] = (name, answers)
        self._metrics = {**measured, "vllm/adapters_left": float(len(self._stuck))}
        return self._metrics

    def check(self, policy_version: int) -> dict[str, float]:
        """Compare what the server answered by a version with that policy in the canary's role, or MismatchError."""
        asked = self._unchecked.pop(policy_version, None)
        return {} if asked is None else self.canary.check(*asked)

    def wait_for_server(self) -> None:
        """Wait for a server that has failed as long as an answer may take; what it held may have gone with it."""
        self.policy_version, self.name = None, ""
        until = time.monotonic() + self.client.timeout
        time.sleep(_PAUSE)
        while True:
            try:
                return self.client.health()
            except RolloutServerError:
                self.look()
                if time.monotonic() >= until:
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
            without = "several ranks of a run may disturb each other there"
            lock(folder, fcntl.LOCK_EX, f"vllm_adapter_dir: {self.folder}", without)
            yield
        finally:
            os.close(folder)

    def _write(self, policy_version: int) -> str:
        """Write the actor's slot as a PEFT folder, whole or not at all; its name."""
        backbone = self.model.role_backbone(self.role)
        name = self.model.roles[self.role].slot
        assert name is not OFF
        slot = backbone.slot(name)
        temporary = self.folder / f".{self.run}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"vllm_adapter_dir: expected a folder that can be written to, got {error}") from error
        write_adapter(slot, temporary, backbone=backbone, base_name=self.base.name)
        served = f"{self.run}-v{policy_version}-{_digest(temporary / peft_io.WEIGHTS_FILE, slot.config)}"
        put_in_place(temporary, self.folder / served)
        return served

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
        """Unload and remove this run's adapters, with a warning for one that stays; a silent server is left alone."""
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

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, *, role: str | None = None) -> Rollout:
        """One answer per prompt from the version of the last `sync`, or from the base for a role without an adapter."""
        n, role = len(prompts), role or self.role
        backbone, texts = self.model.role_backbone(role), prompts.prompts
        for i, prompt in enumerate(texts):
            check_prompt(
                f"prompts[{i}]", prompt, backbone.context_length, sampling.max_completion_length, backbone.vocabulary
            )
        name = self._served_name(role)
        bodies = [
            sampling_body(sampling, seed=row_seed(sampling.seed, i), greedy=greedy)
            for i, greedy in zip(prompts.sample_ids, prompts.greedy, strict=True)
        ]
        began = time.perf_counter()
        answers = self._complete(name, texts, bodies, backbone.vocabulary)
        seconds = time.perf_counter() - began
        reasons = tuple(finish_reason(answer, sampling) for answer in answers)
        tokens = [answer.tokens for answer in answers]
        batch = PackedBatch.from_lists(texts, tokens, device=self.model.device, sample_ids=prompts.sample_ids)
        logprobs = [x for answer in answers for x in answer.logprobs]
        stats = RolloutStats(
            prompts=n,
            prompt_tokens=sum(len(prompt) for prompt in texts),
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
        self, name: str, prompts: Sequence[Sequence[int]], bodies: Sequence[dict[str, Any]], vocabulary: int
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
                self.look()
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


def _digest(weights: Path, config: SlotConfig) -> str:
    """Digest of an adapter's weights and of what scales them."""
    digest = hashlib.sha256(repr((config.r, config.alpha, config.use_rslora)).encode())
    digest.update(weights.read_bytes())
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
