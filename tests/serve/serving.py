"""A real server on a free port for the tests of this room, and what asks it."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from rlhf_kernels.runtime.registry import Settings

from rlhf_engine.data.tokenize import load_tokenizer
from rlhf_engine.hydra import HydraModel, RoleSpec, SlotConfig
from rlhf_engine.policy.pool import BASE, Policies
from rlhf_engine.policy.thread import PolicyThread
from rlhf_engine.serve.app import Service
from rlhf_engine.serve.server import running
from tests.training.test_data import write_model

TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }} {% endif %}{% for m in messages %}{{ m.content }} <eos> {% endfor %}"
    "{% if loud %}star {% endif %}{% if add_generation_prompt %}and {% endif %}"
)
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
WAITING, BODY = 4000, 200_000
"""Most tokens that may wait, and most bytes of a body."""


@dataclass(kw_only=True)
class Place:
    """A server, and the policies that it serves."""

    url: str
    client: httpx2.Client
    service: Service
    thread: PolicyThread
    policies: Policies

    def ask(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """Status and JSON of an answer; a body of bytes is sent as it is."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = self.client.post(path, content=content, **options)
        return reply.status_code, reply.json()

    def good(self, path: str, **body: Any) -> dict[str, Any]:
        """An answer that has to come."""
        status, answer = self.ask(path, body)
        assert status == 200, answer
        return answer

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def slots(self) -> str:
        """Digest of everything that the policies have."""
        digest = hashlib.sha256()
        for policy in self.policies:
            for name, x in sorted(policy.model.backbone().slots.state_dict().items()):
                digest.update(name.encode() + x.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


@contextlib.contextmanager
def serving(
    folder: Path, *names: str, keys: Sequence[str] = (), waiting: int = WAITING, **options: Any
) -> Iterator[Place]:
    """Serve the base of a folder as `tiny`, with policies whose LoRA is not zero. options: of the pool."""
    with Settings(exact=True).used():
        host = HydraModel.from_pretrained(str(folder), roles={BASE: RoleSpec()})
    policies = Policies(host, **options)
    for i, name in enumerate(names):
        add(policies, name, i)
    with PolicyThread(policies, max_rows=8, max_waiting_tokens=waiting) as thread:
        service = Service(thread, load_tokenizer(folder), name="tiny", keys=keys)
        service.most_body = BODY
        with running(service) as url, httpx2.Client(base_url=url, trust_env=False, timeout=60) as client:
            yield Place(url=url, client=client, service=service, thread=thread, policies=policies)


def add(policies: Policies, name: str, i: int) -> None:
    """A policy that differs from the base and from others."""
    policy = policies.add(name, slots={"actor": SlotConfig(r=4 + i, alpha=8.0)}, seed=i)
    generator = torch.Generator().manual_seed(100 + i)
    with torch.no_grad():
        for p in policy.model.backbone().slots.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))


def write_base(folder: Path, **options: Any) -> Path:
    """A tiny random model whose tokenizer has a chat template."""
    write_model(folder, reward_head=False, **options)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def place(folder: Path) -> Iterator[Place]:
    with serving(folder, "one", "two") as served:
        yield served
