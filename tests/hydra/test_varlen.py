"""Attention without padding: who is chosen, that a model's numbers stay, and what each package is asked for.

No GPU is needed: stand-ins have the packages' names and signatures, and the CPU takes the GPU's place.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator

import pytest
import torch
from rlhf_kernels.attention import reference
from rlhf_kernels.runtime import native, registry
from torch.nn.attention import flex_attention as flex, varlen as torch_varlen
from transformers import MistralConfig, MistralForCausalLM

from rlhf_engine.hydra import HydraModel, Logprobs, PackedBatch, RoleSpec, SlotConfig, varlen
from rlhf_engine.hydra.attention import packed_attention, plan_packed
from rlhf_engine.hydra.gate import BackboneCall, SlotTable, enter
from rlhf_engine.hydra.varlen import Layer, ScoreRule, Sequences
from tests.conftest import random_batch, randomise
from tests.hydra import flash_stand_ins as stand_ins
from tests.hydra.architectures import _SHAPE, WINDOW, plain_model

LENGTHS = ((3, 6), (4, 4), (1, 7), (6, 14), (5, 15), (1, 1), (2, 30))
ROLES = {"actor": RoleSpec(slot="actor", trainable=True), "reference": RoleSpec()}
MODELS = {  # heads of 8, two of them to a key
    "qwen3": lambda: plain_model("qwen3"),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SHAPE, head_dim=8, sliding_window=WINDOW)).eval(),
    "gemma2": lambda: plain_model("gemma2"),
}
HOPPER, AMPERE = (9, 0), (8, 6)
FLASH = list(stand_ins.PACKAGES)


def forget() -> None:
    varlen._absent.cache_clear()
    varlen._chosen.cache_clear()


@pytest.fixture
def site(monkeypatch, tmp_path) -> Iterator[object]:
    """A folder of packages, with a Hopper GPU's place taken by the CPU."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(varlen, "is_gpu", "cpu".__eq__)
    monkeypatch.setattr(varlen, "capability", lambda device: HOPPER)
    forget()
    stand_ins.CALLS.clear()
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("flash_attn"):
            del sys.modules[name]
    forget()


def layer(**changes: object) -> Layer:
    found = {"dtype": torch.bfloat16, "head_size": 64, "value_size": 64}
    kinds = dict.fromkeys(("windowed", "softcapped", "sinks", "shared"), False)
    return Layer(**{"capability": HOPPER, **found, **kinds, **changes})


def chosen(**changes: object) -> str:
    return varlen._chosen(layer(**changes))[0]


def test_without_flash_attn_torch_serves_all_but_softcaps(site):
    assert chosen() == chosen(windowed=True) == "torch varlen"
    assert chosen(softcapped=True) == chosen(softcapped=True, windowed=True) == "FlexAttention"
    assert chosen(capability=(7, 5)) == chosen(value_size=32) == chosen(head_size=512, value_size=512) == varlen.SDPA
    assert chosen(value_size=32, windowed=True) == "FlexAttention"
    assert chosen(head_size=8, value_size=8, softcapped=True) == varlen.SDPA


@pytest.mark.parametrize("name", FLASH)
def test_what_is_installed_comes_first(site, name):
    stand_ins.install(name, site)
    assert chosen() == chosen(windowed=True) == chosen(softcapped=True) == name
    assert chosen(capability=AMPERE) == ("flash-attn 2" if name == "flash-attn 2" else "torch varlen")
    assert chosen(head_size=60, value_size=60) == varlen.SDPA


def test_all_of_them_installed(site):
    for name in FLASH:
        stand_ins.install(name, site)
    assert chosen() == "flash-attn 3"
    assert chosen(capability=(10, 0)) == "flash-attn 4"
    assert chosen(capability=(10, 0), head_size=192, value_size=192) == "flash-attn 2"
    assert chosen(capability=(10, 0), head_size=256, value_size=256) == "flash-attn 4"
    assert chosen(capability=(10, 0), head_size=256, value_size=256, softcapped=True) == "flash-attn 2"
    assert chosen(capability=AMPERE) == "flash-attn 2"


def test_a_package_that_does_not_load_is_named_and_left_out(site):
    stand_ins.install("flash-attn 2", site, code="raise ImportError('undefined symbol: _ZN3c10')")
    found = varlen.report()
    assert found["attention"] == found["window"] == "torch varlen"
    assert found["softcap"] == "FlexAttention"
    assert "flash-attn 2: flash-attn does not load: undefined symbol: _ZN3c10" in found["why"]
    assert "flash-attn 3: flash-attn-3 is not installed (built from its sources)" in found["why"]
    assert "torch varlen: it has no softcap" in found["why"]


def test_sdpa_keeps_fp32_and_the_reference_kernels(site):
    rows, rule = torch.zeros(1, 2, 4, 8), ScoreRule(scaling=None, window=None, softcap=None, sinks=None)
    assert varlen.choose(rows, rows, rule) is None
    half = rows.bfloat16()
    assert varlen.choose(half, half, rule) is not None
    with registry.use_backend("reference"):
        assert varlen.choose(half, half, rule) is None
        assert varlen.report()["attention"] == varlen.SDPA


def test_a_cpu_has_none(monkeypatch):
    half = torch.zeros(1, 2, 4, 8).bfloat16()
    assert varlen.choose(half, half, ScoreRule(scaling=None, window=None, softcap=None, sinks=None)) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    served = varlen.SDPA if native.missing() else varlen.IN_CPP
    assert varlen.report() == {"attention": served, "why": "there is no CUDA device"}


def test_sinks_go_through_flex_attention_alone(site):
    for name in FLASH:
        stand_ins.install(name, site)
    assert chosen(sinks=True) == chosen(sinks=True, windowed=True) == "FlexAttention"
    assert chosen(capability=AMPERE, sinks=True, softcapped=True) == "FlexAttention"
    assert varlen.report()["sinks"] == "FlexAttention"


def test_shared_prompts_go_through_flex_attention_alone(site):
    stand_ins.install(FLASH[0], site)
    assert chosen(shared=True) == chosen(shared=True, windowed=True, softcapped=True) == "FlexAttention"
    assert varlen.report()["shared prompts"] == "FlexAttention"
    assert "it gives every sequence keys of its own" in str(varlen._varlen(layer(shared=True)))
    assert varlen.can_share("cpu", torch.bfloat16, 16)
    assert not varlen.can_share("cpu", torch.float32, 16)
    assert not varlen.can_share("cpu", torch.bfloat16, 8), "FlexAttention compiles no such heads"
    assert not varlen.can_share("meta", torch.bfloat16, 16)
    with registry.use_backend("reference"):
        assert not varlen.can_share("cpu", torch.bfloat16, 16)
    with registry.use_exact():
        assert not varlen.can_share("cpu", torch.bfloat16, 16)


def numbers(name: str) -> list[torch.Tensor]:
    """Log-probs of actor and reference and the actor's gradients, of ragged sequences in bf16."""
    torch.manual_seed(0)
    plain = MODELS[name]().to(torch.bfloat16)
    model = HydraModel.from_pretrained(plain, roles=ROLES, slots={"actor": SlotConfig(r=4)})
    randomise(model, "actor")
    stand_ins.CALLS.clear()  # of the load's own checks
    out, reference = model.train()(random_batch(LENGTHS), (Logprobs(), Logprobs(role="reference")))
    out.logprob.sum().backward()
    gradients = [p.grad for p in model.backbone().slot("actor").parameters()]
    return [out.logprob.detach(), reference.logprob, *gradients]


def assert_same_function(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Roundings of bf16 apart."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 0.07 * theirs.norm()


@pytest.mark.parametrize(("name", "model"), [(FLASH[0], "gemma2"), (FLASH[1], "mistral"), (FLASH[2], "qwen3")])
def test_flash_attn_gives_the_model_s_numbers_without_padding(site, monkeypatch, name, model):
    monkeypatch.setattr(varlen, "is_gpu", lambda device: False)
    expected = numbers(model)
    assert not stand_ins.CALLS
    monkeypatch.setattr(varlen, "is_gpu", "cpu".__eq__)
    stand_ins.install(name, site)
    assert_same_function(numbers(model), expected)
    rows = random_batch(LENGTHS).n_tokens
    assert stand_ins.CALLS
    assert {call["rows"] for call in stand_ins.CALLS} <= {rows, 2 * rows}  # a lane or two, no padding
    assert any(call["left"] is not None for call in stand_ins.CALLS) == (model != "qwen3")
    assert any(call["softcap"] for call in stand_ins.CALLS) == (model == "gemma2")


@pytest.mark.parametrize(
    ("function", "model"), [(stand_ins.varlen_of_torch_211, "qwen3"), (stand_ins.varlen_of_torch_213, "mistral")]
)
def test_torch_s_varlen_gives_the_model_s_numbers(site, monkeypatch, function, model):
    monkeypatch.setattr(varlen, "is_gpu", lambda device: False)
    expected = numbers(model)
    monkeypatch.setattr(varlen, "is_gpu", "cpu".__eq__)
    monkeypatch.setattr(torch_varlen, "varlen_attn", function)
    assert_same_function(numbers(model), expected)
    assert stand_ins.CALLS
    assert any(call["left"] is not None for call in stand_ins.CALLS) == (model == "mistral")


@pytest.mark.parametrize(("window", "softcap", "kv_heads"), [(None, 1.5, 4), (7, 1.5, 2), (1, None, 4)])
def test_flex_attention_is_the_definition(monkeypatch, window, softcap, kv_heads):
    monkeypatch.setattr(varlen, "_flex_compiled", lambda: (flex.flex_attention, flex.create_block_mask))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(40, h, 16, generator=generator) for h in (4, kv_heads, kv_heads))
    sequences = plan_packed([9, 1, 25, 5], torch.device("cpu")).sequences
    rule = ScoreRule(scaling=0.3, window=window, softcap=softcap, sinks=None)
    left = None if window is None else window - 1
    expected = stand_ins.attention(query, key, value, sequences.starts, sequences.longest, 0.3, left, softcap)
    for _ in range(2):  # the second layer has the first one's mask
        out = varlen._attend_flex(query, key, value, sequences, rule)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert list(sequences.masks) == [window]


@pytest.mark.long
def test_flex_attention_is_compiled_for_all_lengths_at_once_and_never_runs_eagerly(monkeypatch):
    graphs, compile_ = [], torch.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compiled(function, **options):
        assert options["fullgraph"], function
        # the maker of masks takes ten seconds to trace, and has the same values without
        return function if function is flex.create_block_mask else compile_(function, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", compiled)
    compiled_anew = varlen._flex_compiled.__wrapped__
    pair = compiled_anew()
    monkeypatch.setattr(varlen, "_flex_compiled", lambda: pair)
    generator = torch.Generator().manual_seed(0)

    def attend(lengths: list[int], softcap: float | None, dtype=torch.float32, kv_heads=2) -> None:
        heads = (4, kv_heads, kv_heads)
        rows = [torch.randn(sum(lengths), h, 16, generator=generator).to(dtype) for h in heads]
        sequences = plan_packed(lengths, torch.device("cpu")).sequences
        rule = ScoreRule(scaling=0.3, window=None, softcap=softcap, sinks=None)
        expected = stand_ins.attention(*rows, sequences.starts, sequences.longest, 0.3, None, softcap)
        near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
        torch.testing.assert_close(varlen._attend_flex(*rows, sequences, rule), expected, **near)

    torch._dynamo.reset()
    try:
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):  # torch's own limit is 8
            for lengths in ([130, 5], [9, 1], [128], [300, 7, 40], [17] * 20):
                attend(lengths, None)
            assert len(graphs) == 1
            for kind in ((1.5, torch.float32), (None, torch.bfloat16), (None, torch.float32, 4)):
                attend([9, 1], *kind)
            assert len(graphs) == 4
            torch._dynamo.reset()
            monkeypatch.setattr(varlen, "_VARIANTS", 1)
            pair = compiled_anew()
            attend([9, 1], None)
            with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
                attend([9, 1], 1.5)
    finally:
        torch._dynamo.reset()


@pytest.mark.long
def test_a_softcap_is_compiled():
    """With a mask of its own: inductor's code for ours does not compile on a CPU."""
    compiled, mask = torch.compile(flex.flex_attention, dynamic=True), lambda b, h, i, j: j <= i
    generator = torch.Generator().manual_seed(0)
    for length in (128, 300):
        rows = [torch.randn(length, h, 16, generator=generator) for h in (4, 2, 2)]
        query, key, value = (x.transpose(0, 1)[None] for x in rows)
        blocks = flex.create_block_mask(mask, None, None, length, length, device="cpu")
        capped = varlen._capped(1.5, torch.device("cpu"))
        with torch.no_grad():
            out = compiled(query, key, value, score_mod=capped, block_mask=blocks, scale=0.3, enable_gqa=True)
        starts = torch.tensor([0, length], dtype=torch.int32)
        exact = stand_ins.attention(*rows, starts, length, 0.3, None, 1.5)
        torch.testing.assert_close(out[0].transpose(0, 1), exact, rtol=1e-4, atol=1e-5)


def test_a_sequence_lies_in_flex_attention_s_blocks_as_it_lies_alone():
    sequences = plan_packed([130, 1, 128, 5], torch.device("cpu")).sequences
    assert sequences.blocks.tolist() == [0, 256, 384, 512, 640]
    places = [range(130), [256], range(384, 512), range(512, 517)]
    assert sequences.places.tolist() == [place for each in places for place in each]


def flex_with_gradient(starts: torch.Tensor, window: int | None, softcap: float | None):
    """FlexAttention's result and log-sum-exp for `starts`, by definition: torch's own has no backward pass on a CPU."""

    def attend(query, key, value, *, score_mod, block_mask, scale, enable_gqa, return_aux):
        assert return_aux.lse
        none = torch.full((query.shape[1],), -torch.inf, dtype=query.dtype)
        rows = [x[0].transpose(0, 1) for x in (query, key, value)]
        out = stand_ins.with_sinks(*rows, none, starts, scale, window, softcap)
        # with values of one, a sink of 0 leaves σ(lse): its logit is the log-sum-exp
        ones = torch.ones_like(rows[2])
        share = stand_ins.with_sinks(*rows[:2], ones, torch.zeros_like(none), starts, scale, window, softcap)
        return out.transpose(0, 1)[None], flex.AuxOutput(lse=torch.logit(share[..., 0]).T[None])

    return attend


@pytest.mark.parametrize(("window", "softcap", "backward"), [(None, None, True), (7, None, False), (7, 1.5, True)])
def test_flex_attention_with_sinks_is_the_definition(monkeypatch, window, softcap, backward):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(40, h, 16, generator=generator) for h in (4, 2, 2)]
    sinks, weight = torch.tensor([0.5, -2.0, 3.0, -torch.inf]), torch.randn(40, 4, 16, generator=generator)
    sequences = plan_packed([9, 1, 25, 5], torch.device("cpu")).sequences
    function = flex_with_gradient(sequences.blocks, window, softcap) if backward else flex.flex_attention
    monkeypatch.setattr(varlen, "_flex_compiled", lambda: (function, flex.create_block_mask))

    def run(dtype: torch.dtype, attend) -> list[torch.Tensor]:
        leaves = [x.to(dtype).detach().requires_grad_(backward) for x in (*rows, sinks)]
        out = attend(*leaves)
        return [out, *(torch.autograd.grad(out, leaves, weight.to(dtype)) if backward else ())]

    def ours(query, key, value, sinks):
        rule = ScoreRule(scaling=0.3, window=window, softcap=softcap, sinks=sinks)
        return varlen._attend_flex(query, key, value, sequences, rule)

    def definition(query, key, value, sinks):
        return stand_ins.with_sinks(query, key, value, sinks, sequences.starts, 0.3, window, softcap)

    for found, expected in zip(run(torch.float32, ours), run(torch.float64, definition), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


FAMILIES = {"lengths": [130, 9, 1, 40, 64, 3], "parents": [-1, 0, 0, -1, 3, 0]}
"""A prompt longer than a block, with three answers, and one of 40 tokens with one."""
SINKS = torch.tensor([0.5, -2.0, 3.0, -torch.inf])


@pytest.mark.parametrize(("window", "softcap", "sinks"), [(None, None, None), (133, 1.5, SINKS)])
def test_flex_attention_with_shared_prompts_is_the_definition(monkeypatch, window, softcap, sinks):
    monkeypatch.setattr(varlen, "_flex_compiled", lambda: (flex.flex_attention, flex.create_block_mask))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(sum(FAMILIES["lengths"]), h, 16, generator=generator) for h in (4, 2, 2)]
    sequences = plan_packed(**FAMILIES, device=torch.device("cpu")).sequences
    out = varlen._attend_flex(*rows, sequences, ScoreRule(scaling=0.3, window=window, softcap=softcap, sinks=sinks))
    wide = [x.double() for x in rows]
    exact = reference.attention(*wide, FAMILIES["lengths"], FAMILIES["parents"], 0.3, window, softcap, sinks)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


def test_answers_share_a_prompt_where_flex_attention_serves(site, monkeypatch):
    monkeypatch.setattr(varlen, "_flex_compiled", lambda: (flex.flex_attention, flex.create_block_mask))
    monkeypatch.setattr(torch_varlen, "varlen_attn", stand_ins.varlen_of_torch_213)
    torch.manual_seed(0)
    config = MistralConfig(**_SHAPE, head_dim=16, sliding_window=5)
    model = HydraModel.from_pretrained(
        MistralForCausalLM(config).to(torch.bfloat16).eval(), roles=ROLES, slots={"actor": SlotConfig(r=4)}
    ).eval()
    randomise(model, "actor")
    prompts = random_batch(((20, 1), (20, 1))).tokens_T.tolist()
    batch = PackedBatch.from_lists([prompts[:20]] * 3 + [prompts[21:41]], [[3, 4], [5], [6, 7, 8], [9]])
    assert len(model.shared_rows(batch).rows) == batch.n_tokens - 40
    once = dict(model.score(batch, tuple(ROLES)).items())
    model.shares_prompts = False
    copied = dict(model.score(batch, tuple(ROLES)).items())
    assert_same_function([once[name] for name in copied], list(copied.values()))


def test_neighbours_do_not_change_a_sequence(site):
    """Rows of a packed call are cut by `starts` alone: a sequence alone and among others is the same call's row."""
    stand_ins.install("flash-attn 2", site)
    rows = [torch.randn(1, 2, 12, 8).bfloat16() for _ in "qkv"]

    def run(lengths: list[int], first: int, last: int) -> torch.Tensor:
        plan = plan_packed(lengths, torch.device("cpu"))
        with enter(BackboneCall(table=SlotTable.uniform(None, last - first), attention=plan)):
            return packed_attention(torch.nn.Module(), *(x[:, :, first:last] for x in rows), None)[0]

    assert torch.equal(run([4, 5, 3], 0, 12)[:, 4:9], run([5], 4, 9))


def test_torch_s_varlen_has_the_arguments_that_it_is_given():
    takes = inspect.signature(torch_varlen.varlen_attn).parameters
    assert list(takes)[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size"} <= set(takes)
    assert set(takes) <= set(inspect.signature(stand_ins.varlen_of_torch_213).parameters)  # the newest that is known


INSTALLED = {"flash-attn": "flash_attn.flash_attn_interface", "flash-attn-3": "flash_attn_interface"}


@pytest.mark.parametrize(("distribution", "module"), [*INSTALLED.items(), ("flash-attn-4", "flash_attn.cute")])
def test_installed_flash_attn_has_the_arguments_that_it_is_given(module, distribution):
    reason = varlen._absent(distribution, module, "")
    if reason:
        pytest.skip(reason)
    takes = inspect.signature(importlib.import_module(module).flash_attn_varlen_func).parameters
    given = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal"}
    assert given | {"deterministic", "window_size", "softcap"} <= set(takes)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_flex_attention_with_sinks_is_the_definition(dtype, window):
    sequences = plan_packed([700, 1, 1029, 64], torch.device("cuda")).sequences
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1794, h, 64, generator=generator).to("cuda", dtype) for h in (8, 2, 2)]
    leaves = [x.requires_grad_() for x in (*rows, torch.linspace(-3.0, 3.0, 8, device="cuda"))]
    weight = torch.randn(1794, 8, 64, generator=generator).to("cuda", dtype)
    rule = ScoreRule(scaling=0.1, window=window, softcap=None, sinks=leaves[3])
    out = varlen._attend_flex(*leaves[:3], sequences, rule)
    found = [out, *torch.autograd.grad(out, leaves, weight)]
    host = [x.detach().cpu().double().requires_grad_() for x in leaves]
    exact = stand_ins.with_sinks(*host, sequences.starts.cpu(), 0.1, window, None)
    expected = [exact, *torch.autograd.grad(exact, host, weight.cpu().double())]
    for ours, truth in zip(found, expected, strict=True):
        assert (ours.cpu().double() - truth).norm() <= 0.02 * truth.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (300, None), (None, 20.0), (300, 20.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", varlen.PATHS, ids=lambda path: path.name)
def test_on_a_gpu_each_path_is_the_definition_and_keeps_a_sequence_s_bits(path, dtype, window, softcap):
    at = varlen.capability(torch.device("cuda"))
    reason = path.unsupported(
        layer(capability=at, dtype=dtype, windowed=window is not None, softcapped=softcap is not None)
    )
    if reason:
        pytest.skip(reason)
    lengths, attend = [700, 1, 1029, 64, 513], path.load()
    rule = ScoreRule(scaling=0.1, window=window, softcap=softcap, sinks=None)
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    rows = [torch.randn(total, h, 64, generator=generator).to("cuda", dtype).requires_grad_() for h in (8, 2, 2)]
    weight = torch.randn(total, 8, 64, generator=generator).to("cuda", dtype)
    sequences = plan_packed(lengths, torch.device("cuda")).sequences
    out = attend(*rows, sequences, rule)
    gradients = torch.autograd.grad(out, rows, weight)
    host = [x.detach().cpu().double().requires_grad_() for x in rows]
    left = None if window is None else window - 1
    exact = stand_ins.attention(*host, sequences.starts.cpu(), sequences.longest, 0.1, left, softcap)
    expected = [exact, *torch.autograd.grad(exact, host, weight.cpu().double())]
    for found, truth in zip([out, *gradients], expected, strict=True):
        assert (found.cpu().double() - truth).norm() <= 0.02 * truth.norm()
    again = attend(*rows, sequences, rule)
    assert torch.equal(again, out)
    if path.name != "torch varlen":  # torch's backward pass has a fixed order only where the process asks for it
        for one, other in zip(torch.autograd.grad(again, rows, weight), gradients, strict=True):
            assert torch.equal(one, other)
    starts = sequences.starts.tolist()
    alone = [x.detach()[starts[2] : starts[3]] for x in rows]
    only = Sequences(lengths=(lengths[2],), device=torch.device("cuda"))
    assert torch.equal(attend(*alone, only, rule), out[starts[2] : starts[3]])


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (300, None), (None, 20.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_shared_prompts_are_the_definition(dtype, window, softcap):
    lengths, parents = [700, 64, 1, 130, 300, 513], [-1, 0, 0, -1, 3, 0]
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    rows = [torch.randn(total, h, 64, generator=generator).to("cuda", dtype).requires_grad_() for h in (8, 2, 2)]
    weight = torch.randn(total, 8, 64, generator=generator).to("cuda", dtype)
    sequences = plan_packed(lengths, torch.device("cuda"), parents=parents).sequences
    rule = ScoreRule(scaling=0.1, window=window, softcap=softcap, sinks=None)
    out = varlen._attend_flex(*rows, sequences, rule)
    gradients = torch.autograd.grad(out, rows, weight)
    host = [x.detach().cpu().double().requires_grad_() for x in rows]
    exact = reference.attention(*host, lengths, parents, 0.1, window, softcap, None)
    expected = [exact, *torch.autograd.grad(exact, host, weight.cpu().double())]
    for found, truth in zip([out, *gradients], expected, strict=True):
        assert (found.cpu().double() - truth).norm() <= 0.02 * truth.norm()
