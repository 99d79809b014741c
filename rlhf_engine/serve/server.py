"""A server for the policies of one base: `rlhf-engine serve`, or beside a training loop in the same process.

with PolicyThread(policies) as thread, running(Service(thread, tokenizer, name="base"), port=8000) as url:
    train(thread)
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from transformers import PreTrainedTokenizerBase

from rlhf_engine.config import ServeConfig
from rlhf_engine.data.read import read_text
from rlhf_engine.data.tokenize import load_tokenizer
from rlhf_engine.devices import DTYPES, resolve_device
from rlhf_engine.errors import ConfigError, EngineError
from rlhf_engine.hydra import HydraModel, RoleSpec
from rlhf_engine.policy.pool import BASE, Policies
from rlhf_engine.policy.thread import PolicyThread
from rlhf_engine.rollout.request import EngineOptions
from rlhf_engine.serve.app import Service

_END_WITHIN = 10  # seconds that answers have once the server is to end


@contextlib.contextmanager
def running(service: Service, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """A block in which a server answers in a thread of its own; the server's address."""
    with _listening(host, port) as place:
        server = _server(service)
        thread = threading.Thread(target=server.run, args=([place],), name="serve", daemon=True)
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise EngineError("the server ended as it began")
            time.sleep(0.005)
        try:
            yield _address(place)
        finally:
            server.should_exit = True
            thread.join()


def build(config: ServeConfig) -> tuple[Policies, PreTrainedTokenizerBase, list[str], str]:
    """The policies that a command serves, the tokenizer, the keys of clients, and the base's name."""
    keys = []
    if config.api_key_file is not None:
        text = read_text(config.api_key_file, "api_key_file")
        keys = [line.strip() for line in text.splitlines() if line.strip()]
        config.require("api_key_file", bool(keys), "a file with at least one key")
    tokenizer = load_tokenizer(config.model_name_or_path)
    dtype, device = DTYPES[config.dtype], resolve_device(config.device)
    host = HydraModel.from_pretrained(config.model_name_or_path, roles={BASE: RoleSpec()}, dtype=dtype, device=device)
    state = None if config.state is None else Path(config.state)
    if state is not None:
        state.mkdir(parents=True, exist_ok=True)
    policies = Policies(
        host, state=state, max_policies=config.max_policies, options=EngineOptions.of(config), exact=config.exact,
    )  # fmt: skip
    name = config.served_name or Path(config.model_name_or_path.partition("@")[0].rstrip("/")).name
    for place in config.adapters:
        adapter, _, folder = place.partition("=")
        config.require("adapters", adapter != name, f"other names than the base's, {name!r}")
        try:
            policies.load(adapter, Path(folder))
        except ValueError as error:
            raise ConfigError(f"adapters: {place!r}: {error}") from error
    return policies, tokenizer, keys, name


def serve(config: ServeConfig) -> Iterator[str]:
    """Serve until the process is told to end; the address, once it answers."""
    policies, tokenizer, keys, name = build(config)
    with (
        PolicyThread(policies, max_rows=config.max_rows, max_waiting_tokens=config.max_waiting_tokens) as thread,
        _listening(config.host, config.port) as place,
    ):
        service = Service(thread, tokenizer, name=name, keys=keys, template_kwargs=config.chat_template_kwargs)
        yield _address(place)
        _server(service).run(sockets=[place])


def _server(service: Service) -> uvicorn.Server:
    # the log has no line for each request: /metrics counts them. No proxy is believed: addresses decide nothing here
    config = uvicorn.Config(
        service.app(), log_level="warning", access_log=False, lifespan="on", proxy_headers=False,
        timeout_graceful_shutdown=_END_WITHIN,
    )  # fmt: skip
    return uvicorn.Server(config)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small answers at once only where the protocol is named
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind((host, port))
        except OSError as error:
            raise ConfigError(f"port: expected one that is free on {host}, got {port}: {error.strerror}") from error
        place.listen(2048)
        yield place


def _address(place: socket.socket) -> str:
    host, port = place.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
