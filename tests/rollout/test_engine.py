"""Continuous batching: who is admitted when, what is shared, and that none of it changes an answer."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from rlhf_kernels.runtime import kernel_table, native, registry

from rlhf_engine.errors import MemoryLimitError
from rlhf_engine.hydra import HydraModel, SlotConfig, hydra_roles
from rlhf_engine.hydra.kv_cache import BLOCK, KVCache
from rlhf_engine.rollout import EngineOptions, Request, RolloutEngine, SamplingConfig, generate, generate_requests
from rlhf_engine.rollout.steps import graph as graph_step
from rlhf_engine.rollout.steps import native as native_step
from rlhf_engine.rollout.steps.graph import WARM_UP, CaptureError, CudaCapture, GraphStep
from rlhf_engine.rollout.steps.native import NativeStep
from rlhf_engine.rollout.steps.transformers import TransformersStep
from tests.conftest import VOCAB, build, randomise, tiny_llama
from tests.hydra.architectures import plain_model

STEPS = ["transformers"] + ([] if native.missing() else ["native"])


@pytest.fixture(params=STEPS)
def step(request):
    return request.param


def prompts(n: int, longest: int = 12, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (n,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def sampling(**changes) -> SamplingConfig:
    return SamplingConfig(**{"max_completion_length": 20, "eos_token_ids": (2, 5, 9), "seed": 3, **changes})


def tokens(rollout) -> list[list[int]]:
    return [rollout.batch.completion_tokens(i) for i in range(rollout.batch.n_sequences)]


@pytest.mark.parametrize("max_rows", [1, 5])
def test_answers_do_not_depend_on_how_many_rows_are_alive(step, max_rows):
    model, asked = build(), prompts(16)
    whole = generate(model, asked, sampling(), options=EngineOptions(decode_step=step))
    few = generate(model, asked, sampling(), options=EngineOptions(decode_step=step, max_rows=max_rows))
    assert tokens(few) == tokens(whole)
    assert few.finish_reasons == whole.finish_reasons
    torch.testing.assert_close(few.logprobs_M, whole.logprobs_M, rtol=1e-4, atol=1e-4)
    assert few.stats.most_rows == max_rows
    assert few.stats.tokens == whole.stats.tokens == whole.batch.n_completion_tokens
    assert len(set(whole.batch.completion_lens)) > 3  # some do end early


def test_places_are_taken_over_at_once():
    """With two rows alive, short answers follow each other while a long one goes on."""
    requests = [Request(prompt=(7, 8), sample_id=0, max_completion_length=16)]
    requests += [Request(prompt=(9 + i,), sample_id=1 + i, max_completion_length=4) for i in range(4)]
    engine = RolloutEngine(
        build(), sampling(eos_token_ids=()), requests, options=EngineOptions(max_rows=2, decode_step="transformers")
    )
    order = [(answer.index, len(answer.tokens)) for answer in engine.run()]
    assert order == [(1, 4), (2, 4), (3, 4), (4, 4), (0, 16)]
    assert engine.stats.steps == 15  # those of the long answer alone


def test_requests_wait_for_the_cache(step):
    model, asked = build(), prompts(12)
    whole = generate(model, asked, sampling(), options=EngineOptions(decode_step=step))
    size = 2 * 2 * 2 * 6 * 4 * BLOCK  # keys and values, layers, heads, features, bytes, positions
    for blocks in (1, 3):
        tight = generate(model, asked, sampling(), options=EngineOptions(decode_step=step, cache_bytes=blocks * size))
        assert tokens(tight) == tokens(whole)
        assert tight.stats.most_blocks == tight.stats.most_rows == blocks
    with pytest.raises(ValueError, match=rf"kv_cache_memory: expected at least {size} bytes, .* got {size - 1}"):
        generate(model, asked, sampling(), options=EngineOptions(decode_step=step, cache_bytes=size - 1))


LONG = [3 + i % 50 for i in range(40)]


@pytest.mark.parametrize(  # whole blocks, blocks and a part, a part
    ("prompt", "max_rows"), [(LONG[:BLOCK], 3), (LONG, None), (LONG[:5], 1)]
)
def test_equal_prompts_go_through_the_model_once(step, prompt, max_rows, monkeypatch):
    prefilled = []
    kind = NativeStep if step == "native" else TransformersStep
    run = kind.prefill
    monkeypatch.setattr(kind, "prefill", lambda self, new: prefilled.extend(p.tokens for p in new) or run(self, new))
    model = build()
    other = [5, 6, 7]
    asked = [prompt, other, prompt, prompt, prompt]
    greedy = [True, False, False, False, True]
    options = EngineOptions(decode_step=step, max_rows=max_rows)
    generate(model, [other], sampling(), options=options)  # the native step has tried the model by now
    prefilled.clear()
    shared = generate(model, asked, sampling(), greedy=greedy, options=options)
    assert sorted(prefilled) == sorted([tuple(prompt), tuple(other)])
    assert shared.stats.prompts == 2
    assert shared.stats.prompt_tokens == len(prompt) + len(other)
    for i in range(5):
        alone = generate(model, [asked[i]], sampling(), greedy=[greedy[i]], sample_ids=[i], options=options)
        assert tokens(shared)[i] == tokens(alone)[0]
    assert tokens(shared)[0] == tokens(shared)[4]
    assert len({tuple(tokens(shared)[i]) for i in (2, 3)}) == 2  # but samples differ


def test_shared_blocks_are_held_once():
    model = build()
    model.backbone().model.config.max_position_embeddings = 4096
    prompt = [3 + i % 50 for i in range(8 * BLOCK)]
    k = 6
    together = generate(model, [prompt] * k, sampling(eos_token_ids=()))
    apart = generate(model, [[*prompt[:-1], 3 + i] for i in range(k)], sampling(eos_token_ids=()))
    assert together.stats.most_blocks == 8 + k
    assert apart.stats.most_blocks == 9 * k


def test_every_block_comes_back(step):
    model = build()
    asked = [*prompts(8), LONG, LONG, LONG, [5], [5]]
    requests = [Request(prompt=tuple(p), sample_id=i) for i, p in enumerate(asked)]
    engine = RolloutEngine(model, sampling(), requests, options=EngineOptions(decode_step=step, max_rows=4))
    answers = list(engine.run())
    assert sorted(answer.index for answer in answers) == list(range(len(asked)))
    assert engine._admission.pool.free == engine._admission.pool.size
    assert not engine._admission._prefixes
    assert not engine._admission._sharing


def test_roles_share_a_batch(step):
    model, asked = build(), [*prompts(6), LONG, LONG]
    roles = ["actor", "reference"] * 4
    options = EngineOptions(decode_step=step)
    mixed = generate(model, asked, sampling(), role=roles, options=options)
    for role in ("actor", "reference"):
        alone = generate(model, asked, sampling(), role=role, options=options)
        for i in range(8):
            if roles[i] == role:
                assert tokens(mixed)[i] == tokens(alone)[i]
    assert mixed.stats.prompts == 8  # a prompt's keys differ by slot
    actor, reference = (generate(model, asked, sampling(), role=r, options=options) for r in ("actor", "reference"))
    assert tokens(actor) != tokens(reference)
    few = generate(model, asked, sampling(), role=roles, options=EngineOptions(decode_step=step, max_rows=3))
    assert tokens(few) == tokens(mixed)


def test_roles_with_lora_on_their_heads_share_a_batch():
    slots = {"actor": SlotConfig(r=4, alpha=8.0, target_modules=("q_proj", "lm_head"))}
    model = HydraModel.from_pretrained(tiny_llama(), roles=hydra_roles(), slots=slots).eval()
    randomise(model, "actor", scale=0.5)
    asked, roles = prompts(6), ["reference", "actor", "actor"] * 2
    mixed = generate(model, asked, sampling(), role=roles)
    for role in ("actor", "reference"):
        alone = generate(model, asked, sampling(), role=role)
        assert all(tokens(mixed)[i] == tokens(alone)[i] for i in range(6) if roles[i] == role)
    scores = model.score(mixed.batch, ("actor", "reference"))
    at = torch.tensor([roles[i] == "actor" for i in mixed.batch.sequence_of_M.tolist()])
    expected = torch.where(at, scores.logprobs_M, scores.ref_logprobs_M)
    torch.testing.assert_close(mixed.logprobs_M, expected, rtol=1e-4, atol=1e-4)


def test_options_of_a_request_are_its_own():
    model, asked = build(), prompts(6)
    own = [
        {}, {"temperature": 0.3}, {"top_k": 2}, {"top_p": 0.5, "temperature": 2.0}, {"max_completion_length": 3},
        {"greedy": True},
    ]  # fmt: skip
    requests = [Request(prompt=tuple(p), sample_id=i, **o) for i, (p, o) in enumerate(zip(asked, own, strict=True))]
    mixed = generate_requests(model, requests, sampling())
    assert mixed.batch.supports is not None
    for i, request in enumerate(requests):
        alone = generate_requests(model, [request], sampling())
        assert tokens(alone)[0] == tokens(mixed)[i]
        assert (alone.batch.supports is not None) == (i in (2, 3))
    assert mixed.batch.completion_lens[4] <= 3


def test_running_out_of_memory_names_what_bounds_it(monkeypatch):
    def fails(self, layer, key, value):
        raise torch.OutOfMemoryError("no memory")

    model = build()
    generate(model, [[5]], sampling())  # the native step has tried the model by now
    monkeypatch.setattr(KVCache, "allocate", fails)
    with pytest.raises(MemoryLimitError, match="bound it with kv_cache_memory"):
        generate(model, prompts(3), sampling())


def test_a_prompt_that_older_weights_have_read_goes_through_the_model_again(step):
    """Answers to it that begin later, as those do which a generator draws in flight."""
    model, how = build(), sampling(eos_token_ids=(), max_completion_length=4)
    requests = [Request(prompt=tuple(LONG), sample_id=i) for i in range(3)]
    engine = RolloutEngine(model, how, requests, options=EngineOptions(max_rows=1, decode_step=step))
    first = next(engine.run())
    randomise(model, "actor")
    engine.policy_version = 1
    found = [answer.logprobs for answer in (first, *engine.run())]
    alone = RolloutEngine(model, how, requests, options=EngineOptions(max_rows=1, decode_step=step)).run()
    assert [a == b.logprobs for a, b in zip(found, alone, strict=True)] == [False, True, True]


def spell(ids) -> str:
    return "".join(chr(ord("a") + i % 26) for i in ids)


def test_stop_texts_end_an_answer():
    model, asked = build(), prompts(16)
    free = generate(model, asked, sampling(eos_token_ids=()))
    texts = [spell(row) for row in tokens(free)]
    stop = texts[3][4:6]
    stopped = generate(model, asked, sampling(eos_token_ids=(), stop=(stop, "!!")), decode=spell)
    for text, row, reason in zip(texts, tokens(stopped), stopped.finish_reasons, strict=True):
        place = text.find(stop)
        assert reason == ("length" if place < 0 else "stop")
        assert spell(row) == (text if place < 0 else text[: place + len(stop)])
    assert "stop" in stopped.finish_reasons
    assert "length" in stopped.finish_reasons  # never reached: the answer ends at its longest
    with pytest.raises(ValueError, match="decode: expected a function from tokens to text"):
        generate(model, asked, sampling(stop=("x",)))


def test_answers_come_as_they_finish_and_can_be_watched():
    model, asked = build(), prompts(5)
    requests = [Request(prompt=tuple(p), sample_id=i, max_completion_length=4 * (5 - i)) for i, p in enumerate(asked)]
    engine = RolloutEngine(model, sampling(eos_token_ids=()), requests)
    assert engine.partial(0) == ()
    engine.step()
    assert len(engine.partial(0)) == 2
    order = [answer.index for answer in engine.run()]
    assert order == [4, 3, 2, 1, 0]
    assert engine.partial(0) == ()


def test_in_exact_mode_answers_with_filters_have_the_same_bits_alone(step):
    model, asked = build(), prompts(5)
    how, options = sampling(top_k=4), EngineOptions(decode_step=step)
    with registry.use_exact():
        whole = generate(model, asked, how, options=options)
        alone = [generate(model, [asked[i]], how, sample_ids=[i], options=options) for i in range(5)]
    assert whole.stats.most_rows == 5
    assert torch.equal(torch.cat([part.logprobs_M for part in alone]), whole.logprobs_M)


def test_in_exact_mode_a_model_of_another_kind_draws_one_answer_at_a_time():
    model = HydraModel.from_pretrained(plain_model("qwen3_moe"), roles=hydra_roles()).eval()
    with registry.use_exact():
        whole = generate(model, prompts(5), sampling())
        assert whole.stats.most_rows == 1
        alone = [generate(model, [prompts(5)[i]], sampling(), sample_ids=[i]) for i in range(5)]
    assert torch.equal(torch.cat([part.logprobs_M for part in alone]), whole.logprobs_M)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_prompts_go_through_the_model_and_short_ones_through_the_kernel(dtype, monkeypatch):
    """One admission of both: the answers are those of the model's own forward, and alone they have the same bits."""
    reason = registry.unsupported("decode_step", "cpu", "cpu", dtype)
    if reason is not None:
        pytest.skip(str(reason))
    model = HydraModel.from_pretrained(tiny_llama(positions=512, dtype=dtype, width=4), roles=hydra_roles()).eval()
    randomise(model, "actor")
    assert native_step.unsupported(model.backbone()) is None  # its trial goes through both
    lengths = [330, 7, 321, 320, 33, 300, 400, 150]
    asked = [[3 + (7 * i + j) % 50 for j in range(n)] for i, n in enumerate(lengths)]
    calls = []
    plain, rows = TransformersStep.prefill, NativeStep._prefill_rows
    for kind, name, prefill in ((TransformersStep, "prefill", plain), (NativeStep, "_prefill_rows", rows)):

        def noted(step, prompts, name=name, prefill=prefill):
            calls.append((name, [len(prompt.tokens) for prompt in prompts]))
            return prefill(step, prompts)

        monkeypatch.setattr(kind, name, noted)

    def run(places, **options):
        calls.clear()
        found = generate(
            model, [asked[i] for i in places], sampling(), sample_ids=places, options=EngineOptions(**options)
        )
        assert found.stats.step == options["decode_step"]
        return found

    everything = list(range(8))
    whole = run(everything, decode_step="native")
    short = [("_prefill_rows", [7, 320, 33]), ("_prefill_rows", [300, 150])]
    if dtype == torch.bfloat16:
        assert calls == [("prefill", lengths)]  # many tokens in all
    else:
        assert calls == [*short, ("prefill", [330, 321, 400])]
        theirs = run(everything, decode_step="transformers")
        assert tokens(whole) == tokens(theirs)
        torch.testing.assert_close(whole.logprobs_M, theirs.logprobs_M, rtol=1e-4, atol=1e-4)
    with registry.use_exact():
        together = run(everything, decode_step="native")
        alone = [run([i], decode_step="native") for i in everything]
    assert torch.equal(torch.cat([part.logprobs_M for part in alone]), together.logprobs_M)


def test_the_native_step_is_taken_where_it_serves():
    if native.missing():
        pytest.skip(str(native.missing()))
    model = build()
    assert generate(model, [[5]], sampling()).stats.step == "native"
    with registry.use_backend("reference"):
        assert generate(model, [[5]], sampling()).stats.step == "transformers"
        with pytest.raises(ValueError, match=r"step: expected one that serves the backbone, got .native.: .*'referenc"):
            generate(model, [[5]], sampling(), options=EngineOptions(decode_step="native"))


def test_the_native_step_is_not_taken_where_the_table_prefers_the_reference(tmp_path):
    isa = native.isa()
    if isa is None:
        pytest.skip(str(native.missing()))
    times = {"a": {"cpu": 2.0, "reference": 1.0}}
    entry = kernel_table.Entry("decode_step", isa, "float32", (40, 24), "reference", times)
    kernel_table.write(tmp_path / "table.json", [entry], {isa: "a CPU"})
    model = build()
    with registry.use_table(tmp_path / "table.json"):
        assert generate(model, [[5]], sampling()).stats.step == "transformers"
        options = EngineOptions(decode_step="native")
        assert generate(model, [[5]], sampling(), options=options).stats.step == "native"
        with registry.use_exact():
            assert generate(model, [[5]], sampling()).stats.step == "native"


def test_bad_options():
    for make, options, message in (
        (EngineOptions, {"max_rows": 0}, "max_rows: expected None or at least 1, got 0"),
        (EngineOptions, {"cache_bytes": -4}, "cache_bytes: expected None or at least 1, got -4"),
        (sampling, {"min_completion_length": 21}, r"expected 0 to max_completion_length \(20\), got 21"),
        (sampling, {"top_k": 0}, "top_k: expected None or at least 1, got 0"),
        (sampling, {"top_p": 1.5}, r"top_p: expected None or a number in \(0, 1\], got 1.5"),
        (sampling, {"min_p": 0.0}, r"min_p: expected None or a number in \(0, 1\], got 0.0"),
        (sampling, {"stop": ("a", "")}, "stop: expected texts that are not empty"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)


def test_a_request_that_contradicts_the_run_is_refused():
    request = Request(prompt=(5,), sample_id=0, max_completion_length=2)
    for prompt in ([5, 61], [-1]):
        with pytest.raises(ValueError, match=rf"prompts\[0\]: expected token ids of 0 to 60, got {prompt[-1]}"):
            generate(build(), [prompt], sampling())
    with pytest.raises(ValueError, match="eos_token_ids: expected token ids of 0 to 60, got 61"):
        generate(build(), [[5]], sampling(eos_token_ids=(2, 61)))
    with pytest.raises(ValueError, match="min_completion_length: expected 0 to max_completion_length"):
        generate_requests(build(), [request], sampling(min_completion_length=3))


def again(step):
    """A capture as CUDA's, replayed on the CPU: results go where those of the captured run are."""
    step()
    held = step()

    def replay() -> None:
        drawn = step()
        assert drawn.bits is None
        for name in ("tokens", "logprobs"):
            getattr(held, name).copy_(getattr(drawn, name))

    return held, replay


def cannot(step):
    raise CaptureError("decode_step: expected a model whose step can be captured for 'graph', got: a wait")


def run_graphs(model, asked, how, **options) -> tuple[list[list[int]], list, list[int]]:
    """Answers through graphs that are replayed on the CPU, their reasons, and the rows of every graph."""
    requests = [Request(prompt=tuple(p), sample_id=i) for i, p in enumerate(asked)]
    engine = RolloutEngine(
        model, how, requests, options=EngineOptions(decode_step="transformers", **options),
        decode=spell if how.stop else None,
    )  # fmt: skip
    engine._burst = 5
    idle = engine._admission.pool.size
    engine.cache = KVCache(blocks=idle + 1)
    columns = max(row.blocks_needed for row in engine._admission._waiting)
    engine._step = GraphStep(engine.backbone, engine.cache, columns, idle, again, required=True)
    answers = sorted(engine.run(), key=lambda answer: answer.index)
    sizes = [key[0] for key in engine._step._graphs]
    return [list(a.tokens) for a in answers], [a.finish_reason for a in answers], sizes


@pytest.mark.parametrize("max_rows", [None, 3])
def test_graphs_draw_the_same_answers(max_rows, monkeypatch):
    """Idle places of a graph, several tokens between two looks, and rows that end in between change nothing."""
    model, asked = build(), prompts(9)
    how = sampling(eos_token_ids=(2, 5, 9), stop=("zz",))
    monkeypatch.setattr(graph_step, "WORTH", 3)
    plain = generate(model, asked, how, options=EngineOptions(decode_step="transformers"), decode=spell)
    found, reasons, sizes = run_graphs(model, asked, how, max_rows=max_rows)
    assert found == tokens(plain)
    assert tuple(reasons) == plain.finish_reasons
    assert set(sizes) <= {1, 2, 4, 8, 16}
    assert len(sizes) == len(set(sizes)) >= 1  # captured once each


def test_few_tokens_are_not_worth_a_capture():
    how = sampling(max_completion_length=30)
    assert run_graphs(build(), prompts(4), how)[2] == []
    long = sampling(max_completion_length=40, eos_token_ids=())
    assert run_graphs(build(), prompts(5), long)[2] == [8]


def test_a_step_that_cannot_be_captured():
    model, asked = build(), prompts(3)
    how = sampling(max_completion_length=40)
    requests = [Request(prompt=tuple(p), sample_id=i) for i, p in enumerate(asked)]
    for required in (True, False):
        engine = RolloutEngine(model, how, requests, options=EngineOptions(decode_step="transformers"))
        engine._step = GraphStep(engine.backbone, engine.cache, 3, 0, cannot, required=required)
        if required:
            with pytest.raises(CaptureError, match="decode_step: expected a model whose step can be captured"):
                list(engine.run())
            continue
        with pytest.warns(UserWarning, match="decoding without CUDA graphs: .*a wait"):
            answers = sorted(engine.run(), key=lambda answer: answer.index)
        assert engine.stats.step == "transformers"
        plain = generate(model, asked, how, options=EngineOptions(decode_step="transformers"))
        assert [list(answer.tokens) for answer in answers] == tokens(plain)


class EndsBadly:
    """A CUDA graph whose capture was ended from outside."""

    def capture_begin(self, **options: object) -> None:
        pass

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize(  # torch 2.11; the allocator has left; without the calls. Its end fails, or its step
    ("left", "breaks"), [(False, True), (True, False), (None, True)]
)
def test_after_a_failed_capture_the_allocator_leaves_it_once(left, breaks, monkeypatch):
    """Else no memory would be given back from then on. The next rollout tries a capture again."""
    calls: list[tuple[object, ...]] = []

    def end(*which):
        calls.append(("end", *which))
        if left:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {
        "CUDAGraph": EndsBadly, "graph_pool_handle": lambda: (0, 7), "Stream": lambda *_, **__: stream,
        "current_stream": lambda device: stream, "current_device": lambda: 1, "device": contextlib.nullcontext,
        "stream": contextlib.nullcontext,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    if left is not None:
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
        monkeypatch.setattr(
            torch._C, "_cuda_releasePool", lambda *which: calls.append(("release", *which)), raising=False
        )
    model, asked = build(), prompts(3)
    how = sampling(max_completion_length=40)
    requests = [Request(prompt=tuple(p), sample_id=i) for i, p in enumerate(asked)]
    one = {False: [("end", 1, (0, 7)), ("release", 1, (0, 7))], True: [("end", 1, (0, 7))], None: []}[left]
    for rollout in (1, 2):
        engine = RolloutEngine(model, how, requests, options=EngineOptions(decode_step="transformers"))
        capture = CudaCapture(torch.device("cpu"))
        engine._step = GraphStep(engine.backbone, engine.cache, 3, 0, capture, required=False)
        if breaks:
            decode, calls_so_far = engine._step.decode, itertools.count()

            def waits(*args, decode=decode, calls_so_far=calls_so_far):
                if next(calls_so_far) == WARM_UP:
                    raise RuntimeError("a wait")
                return decode(*args)

            engine._step.decode = waits
        with pytest.warns(
            UserWarning, match=f"decoding without CUDA graphs: .*{'a wait' if breaks else 'previous error'}"
        ):
            assert len(list(engine.run())) == 3
        assert calls == one * rollout


def test_rows_that_one_graph_does_not_serve_go_through_the_forward(monkeypatch):
    model, asked = build(), prompts(5)
    monkeypatch.setattr(graph_step, "WORTH", 3)
    for how, captured in ((sampling(top_k=3), False), (sampling(min_completion_length=4), True)):
        found, _, sizes = run_graphs(model, asked, how)
        assert bool(sizes) == captured  # once they may end
        assert found == tokens(generate(model, asked, how, options=EngineOptions(decode_step="transformers")))
