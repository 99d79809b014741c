"""Every launch goes to the device of its tensors, a stand-in for a second GPU in the interpreter; registered ops."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from rlhf_kernels.attention import attention as attention_in_order
from rlhf_kernels.decode_attention import decode_attention
from rlhf_kernels.decode_attention.triton import use_variant
from rlhf_kernels.gae import gae, masked_moments, whiten
from rlhf_kernels.gather_logprob import gather_logprob
from rlhf_kernels.linear import linear
from rlhf_kernels.linear_logprob import linear_logprob
from rlhf_kernels.linear_logprob_pair import linear_logprob_pair
from rlhf_kernels.linear_ppo_loss import linear_ppo_loss
from rlhf_kernels.llama_ops import activation, rms_norm, rotary, swiglu
from rlhf_kernels.lora import Segments, lora_linear
from rlhf_kernels.lora.group import Reader, lora_linears
from rlhf_kernels.ppo_loss import ppo_loss, value_loss
from rlhf_kernels.runtime import aot, registry
from rlhf_kernels.runtime.triton_support import INTERPRETED
from rlhf_kernels.sample import sample
from rlhf_kernels.vocab.logits import HeadLora
from rlhf_kernels.vocab.runs import HeadLoras, use_variant as one_sweep

from tests.kernels.checks import each
from tests.kernels.decode_step_cases import SIZES, make_adapters, make_call, make_decoder
from tests.kernels.test_direct_calls import opcheck

ON = {"backend": "triton"}
HEADS = ("linear_logprob", "linear_logprob_pair", "linear_ppo_loss")


def leaf(*shape):
    return torch.randn(*shape).requires_grad_()


def heads():
    V, H = 96, 32
    weight, target = leaf(V, H), torch.randint(0, V, (200,))
    lora = HeadLora(A=torch.randn(4, H), B=torch.randn(V, 4), scale=1.0)
    for n in (8, 200):  # one kernel for the sweep, and a product and a kernel per tile
        hidden = leaf(n, H)
        outputs = linear_logprob(hidden, weight, target[:n], outputs=("logprob", "entropy"), **ON)
        (outputs.logprob.sum() + outputs.entropy.sum()).backward()
        frozen = linear_logprob(hidden, weight.detach(), target[:n], outputs=("logprob", "entropy"), **ON)
        (frozen.logprob.sum() + frozen.entropy.sum()).backward()
        linear_logprob(hidden, weight.detach(), target[:n], **ON).logprob.sum().backward()
        pair = linear_logprob_pair(hidden, torch.randn(n, H), weight.detach(), target[:n], **ON)
        (pair.logprob_a.sum() + pair.kl.sum()).backward()
    old, advantage, mask = torch.randn(200), torch.randn(200), torch.arange(200) % 3 > 0
    for trained in (weight, weight.detach()):
        loss = linear_ppo_loss(hidden, trained, target, old, advantage, mask, denom=100.0, **ON)
        loss.loss.backward()
    at = torch.arange(4)
    sample(torch.randn(4, H), weight.detach(), seed=at, position=at, lora=lora, **ON)
    several = HeadLoras(Segments(starts=(0, 2), ends=(2, 4), slots=(0, 1)), (lora, lora))
    with one_sweep(one_sweep=True):
        sample(torch.randn(4, H), weight.detach(), seed=at, position=at, lora=several, **ON)
        linear_logprob(leaf(4, H), weight.detach(), target[:4], lora=several, **ON).logprob.sum().backward()
    gather_logprob(leaf(20, V), target[:20], **ON).logprob.sum().backward()


def blocks():
    linear(leaf(5, 16), leaf(8, 16), leaf(8), **ON).sum().backward()
    q, angles = leaf(1, 2, 3, 4), torch.randn(1, 3, 4)
    ys = [*rotary(q, q, angles, angles, **ON), rms_norm(q, leaf(4), eps=1e-6, **ON), swiglu(q, q, **ON)]
    sum(y.sum() for y in (*ys, activation(q, "gelu", **ON))).backward()


def adapters():
    A, B = [leaf(4, 32), leaf(8, 32)], [leaf(48, 4), leaf(48, 8)]
    segments = Segments(starts=(0, 40), ends=(30, 90), slots=(1, 0))
    lora_linear(leaf(100, 32), torch.randn(48, 32), None, A, B, [1.0, 2.0], segments, **ON).sum().backward()
    readers = [Reader(torch.randn(48, 32), None, A, B, [1.0, 2.0], segments) for _ in range(2)]
    sum(y.sum() for y in lora_linears(leaf(100, 32), readers, **ON)).backward()


def step():
    sizes = SIZES[0]
    slots = make_adapters(sizes)
    make_call(sizes, 5, torch.float32, len(slots)).take(make_decoder(sizes, torch.float32), slots, "triton")


def losses():
    for n in (50, 9000):  # one program, and partial sums of several
        old, advantage, mask = torch.randn(n), torch.randn(n), torch.arange(n) % 4 > 0
        (2 * ppo_loss(leaf(n), old, advantage, mask, denom=30.0, **ON).loss).backward()
        (2 * value_loss(leaf(n), old, advantage, mask, denom=30.0, **ON)[0]).backward()


def advantages():
    reward, mask = leaf(3, 20), torch.ones(3, 20, dtype=torch.bool)
    found = gae(reward, torch.randn(3, 20), mask, gamma=0.9, lam=0.9, **ON)
    found.advantage.sum().backward()
    whiten(leaf(3, 20), mask, **ON).square().sum().backward()
    masked_moments(torch.randn(3, 20), mask, **ON)


def attention():
    cache = torch.randn(20, 16, 2, 16)
    lengths = torch.tensor([150, 90])
    table = torch.arange(20).view(2, 10)
    for way in ({}, {"rounded": True, "whole": True}):
        with use_variant(**way):
            decode_attention(
                torch.randn(2, 4, 16), cache, cache, lengths, table, scale=0.25, sinks=torch.zeros(4), **ON
            )
    q = leaf(6, 2, 16)
    attention_in_order(q, q, q, [2, 4], parents=[-1, 0], scale=0.25, **ON).sum().backward()


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's launches cannot be watched from here")
def test_every_launch_has_its_tensors_device(monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    current, launched = [0], {}
    launch = InterpretedFunction.run

    def watched(kernel, *args, **options):
        launched.setdefault(kernel.fn.__name__, set()).add(current[-1])
        return launch(kernel, *args, **options)

    @contextlib.contextmanager
    def made_current(device):
        current.append(device.index)
        yield
        current.pop()

    second = SimpleNamespace(index=1)
    monkeypatch.setattr(InterpretedFunction, "run", watched)
    monkeypatch.setattr(registry, "cuda_device", lambda args: second)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", made_current)
    for calls in (heads, blocks, adapters, step, losses, advantages, attention):
        calls()
    assert set(launched) == {case.kernel.__name__ for op in aot.OPS for case in aot.cases(op)}
    assert {name for name, devices in launched.items() if devices != {1}} == set()
    assert current == [0]


@each("name", ["attention", "attention_backward", "decode_attention", "sample", *HEADS])
@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.long)])
def test_opcheck(on_triton, plain, name):
    opcheck(name, on_triton, plain)
