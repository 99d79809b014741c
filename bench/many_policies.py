#!/usr/bin/env python
"""Many policies on one base: decoding steps, joint passes, experiments an hour, and what HTTP costs.

    python bench/many_policies.py --decode --out bench/results/avx512_bf16/many_policies
    python bench/many_policies.py --joint --model ../shared/models/stories260K --dtype float32 --tokens 24 --out DIR
    python bench/many_policies.py --decode --joint --quick --out runs/many_policies                      # a tiny model
    python bench/many_policies.py --sweep MODEL --rounds 3 --json FILE         # flags of studies/sweep_speed.py follow
    python bench/many_policies.py --http MODEL --seconds 300 --clients 16 --out FILE       # of studies/serve_http.py

A policy has LoRA r 16 on every linear of the blocks. Everything runs in exact mode. Arms take turns in one process, a
call each a round; a time is the median of the rounds, of the process's CPU seconds and by the wall clock.

--decode, a step of the rollout engine, so many rows (--rows) a policy, each with a context of 32 tokens and more:

    off     rows of the base
    one     the same rows, all of one policy: the engine's own bound
    mixed   rows of all policies
    head    rows of all policies, whose LoRA is on the LM head, too
    apart   a step of each policy's own rows, one policy after another
    floor   bare products with the weights of the base and the LM head, rows together

--joint, log-probs of a sequence a policy (--tokens), and gradients of all policies, by `rlhf_engine.policy.joint.run`:

    joint   one call for all policies
    apart   a call each
    floor   bare products of forward and of the gradients of activations, rows together

Writes decode.json, joint.json and a table of each into --out; `equal` of the latter counts policies whose log-probs and
gradients are the same bits jointly and apart.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rlhf_bench.case import Floors
from rlhf_bench.floor import gemm_floors, random_normal
from rlhf_bench.isa import SETS, is_held, run_held
from rlhf_bench.rollout.models import CONFIGS, RANK
from rlhf_bench.runner import fastest_floor, timed_floors
from rlhf_kernels.runtime import registry
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhf_engine.devices import DTYPES
from rlhf_engine.hydra import HydraModel, PackedBatch, RoleSpec, SlotConfig
from rlhf_engine.hydra.outputs import TargetLogprobs
from rlhf_engine.policy import Pass, Policies
from rlhf_engine.policy.joint import run
from rlhf_engine.policy.pool import BASE, LivePolicy
from rlhf_engine.rollout.engine import EngineOptions, RolloutEngine
from rlhf_engine.rollout.request import Request, SamplingConfig
from rlhf_engine.runs.metrics import run_record, write_json_atomic

PROMPT, WARM = 32, 2  # tokens of a prompt; steps before the first that counts, one of which admits
BLOCKS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STUDIES = {"--sweep": "sweep_speed", "--http": "serve_http"}
QUICK = {"model": "llama-260k", "policies": [2], "rows": 2, "tokens": [5], "rounds": 2}
_CPU = torch.device("cpu")
Found = dict[str, Any]


def make_pool(name: str, dtype: torch.dtype, policies: int, *, head: bool) -> Policies:
    """Policies p0, p1, … on a random Llama or a model folder; h0, h1, … with LoRA on the LM head, too, if `head`."""
    source: Any = name
    if name in CONFIGS:
        torch.manual_seed(0)
        config = LlamaConfig(**CONFIGS[name], max_position_embeddings=2048, tie_word_embeddings=True)
        source = AutoModelForCausalLM.from_config(config, dtype=dtype)
    pool = Policies(HydraModel.from_pretrained(source, roles={BASE: RoleSpec()}, dtype=dtype, device=_CPU), exact=True)
    for kind, targets in {"p": BLOCKS, "h": (*BLOCKS, "lm_head")}.items():
        for i in range(policies if kind == "p" or head else 0):
            pool.add(f"{kind}{i}", slots={"actor": SlotConfig(r=RANK, alpha=2 * RANK, target_modules=targets)})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in pool.host.backbone().slots.parameters():
            p.copy_(0.02 * torch.randn(p.shape, generator=generator))
    return pool


def in_turns(arms: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Found]:
    """Median milliseconds of every arm, of the CPU and by the clock, and the samples of the former."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    gc.collect()
    gc.disable()
    for number in range(rounds + WARM):
        for name, call in arms.items():
            cpu, wall = time.process_time(), time.perf_counter()
            call()
            if number >= WARM:
                samples[name].append((1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall)))
    gc.enable()
    found = {}
    for name, pairs in samples.items():
        cpus, walls = zip(*pairs, strict=True)
        found[name] = {"cpu_ms": statistics.median(cpus), "wall_ms": statistics.median(walls), "samples_cpu_ms": cpus}
    floors = [name for name in found if name.startswith("floor")]
    if not floors:
        return found
    floor, _ = fastest_floor({name: value["cpu_ms"] for name, value in found.items()})
    return {**{name: found[name] for name in found if name not in floors}, "floor": found[f"floor: {floor}"]}


def floors_of(model: HydraModel, rows: int, *, gradients: bool) -> Floors:
    """Products of so many rows with every linear and the LM head, and of their gradients with the transposes."""
    backbone = model.backbone()
    linears = [backbone.model.get_submodule(path).weight for path in backbone.linears if path != "lm_head"]
    weights = [w.detach() for w in (*linears, backbone.lm_head.weight)]
    inputs = {
        width: random_normal(rows, width, dtype=backbone.dtype, device=_CPU)
        for width in {size for w in weights for size in w.shape}
    }
    products = [(inputs[w.shape[1]], w.T) for w in weights]
    return timed_floors(gemm_floors(*products, *((inputs[w.shape[0]], w) for w in weights if gradients)))


# ---- decoding --------------------------------------------------------------------------------------------------------


def engine_of(pool: Policies, names: list[str], rows: int, steps: int) -> RolloutEngine:
    """An engine with so many rows of each policy, none of which ends before so many steps."""
    engine, roles = RolloutEngine(pool.host, options=EngineOptions()), [pool.get(name).role for name in names]
    prompts = torch.randint(3, pool.host.backbone().vocabulary, (len(roles) * rows, PROMPT)).tolist()
    requests = [
        Request(prompt=tuple(prompt), sample_id=i, role=roles[i // rows], temperature=1.0)
        for i, prompt in enumerate(prompts)
    ]
    engine.submit(requests, SamplingConfig(max_completion_length=steps + 2, eos_token_ids=()))
    return engine


def measure_decoding(given: argparse.Namespace, policies: int) -> Found:
    """Milliseconds of a step of every arm."""
    pool = make_pool(given.model, DTYPES[given.dtype], policies, head=True)
    steps, names = given.rounds + WARM, [f"p{i}" for i in range(policies)]
    drawn = {
        "off": [BASE] * policies, "one": ["p0"] * policies, "mixed": names,
        "head": [f"h{i}" for i in range(policies)],
    }  # fmt: skip
    engines = {arm: engine_of(pool, own, given.rows, steps) for arm, own in drawn.items()}
    alone = [engine_of(pool, [name], given.rows, steps) for name in names]
    arms: dict[str, Callable[[], Any]] = {name: engine.step for name, engine in engines.items()}
    arms["apart"] = lambda: [engine.step() for engine in alone]
    found = in_turns(arms | floors_of(pool.host, policies * given.rows, gradients=False), given.rounds)
    off = found["off"]["cpu_ms"]
    ratios = {name: value["cpu_ms"] / off for name, value in found.items()}
    kinds = {name: engine.stats.step for name, engine in engines.items()}
    about = {"policies": policies, "rows": policies * given.rows, "rows_of_each": given.rows}
    return {**about, "arms": found, "of_off": ratios, "step": kinds}


# ---- a joint pass ----------------------------------------------------------------------------------------------------


def pass_of(policy: LivePolicy, tokens: list[int]) -> Pass:
    """Log-probs of all tokens but the first, and gradients of their sum."""
    batch = PackedBatch.from_lists([tokens[:1]], [tokens[1:]])
    targets = batch.targets_M
    outputs = (TargetLogprobs(rows_P=batch.predict_rows_M, targets=targets, weights=torch.ones(targets.shape)),)
    return Pass(policy=policy, batch=batch, outputs=outputs, loss=lambda results: results[0].loss)


def learn(pool: Policies, *groups: list[Pass]) -> list[torch.Tensor]:
    """Run passes, those of a group together, for gradients from nothing; the log-probs of each."""
    for p in pool.host.backbone().slots.parameters():
        p.grad = None
    return [results[0].logprob for group in groups for results in run(pool.host, group)]


def measure_joint(given: argparse.Namespace, policies: int, length: int) -> Found:
    """Milliseconds of a pass of all policies, jointly and apart, and how many have the same bits in both."""
    pool = make_pool(given.model, DTYPES[given.dtype], policies, head=False)
    tokens = torch.randint(3, pool.host.backbone().vocabulary, (policies, length)).tolist()
    passes = [pass_of(pool.get(f"p{i}"), row) for i, row in enumerate(tokens)]
    arms = {"joint": [passes], "apart": [[each] for each in passes]}
    results = []
    for groups in arms.values():
        logprobs = learn(pool, *groups)
        slots = [each.policy.model.backbone().slots for each in passes]
        results.append([[x, *(p.grad for p in own.parameters())] for x, own in zip(logprobs, slots, strict=True)])
    same = [all(map(torch.equal, mine, other)) for mine, other in zip(*results, strict=True)]
    calls = {name: functools.partial(learn, pool, *groups) for name, groups in arms.items()}
    found = in_turns(calls | floors_of(pool.host, policies * length, gradients=True), given.rounds)
    ratio = found["apart"]["cpu_ms"] / found["joint"]["cpu_ms"]
    return {"policies": policies, "tokens_of_each": length, "arms": found, "times_faster": ratio, "equal": sum(same)}


# ---- records ---------------------------------------------------------------------------------------------------------


def decoding_table(rows: list[Found]) -> str:
    arms = list(rows[0]["arms"])
    lines = [f"| policies | rows | {' | '.join(arms)} |", "|---" * (len(arms) + 2) + "|"]
    for row in rows:
        cells = (f"{row['arms'][arm]['cpu_ms']:.1f} ({row['of_off'][arm]:.2f} ×)" for arm in arms)
        lines.append(f"| {row['policies']} | {row['rows']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def joint_table(rows: list[Found]) -> str:
    lines = [
        "| policies | tokens of each | jointly | apart | × faster | floor | equal |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        joint, apart, floor = (f"{row['arms'][arm]['cpu_ms']:.1f}" for arm in ("joint", "apart", "floor"))
        lines.append(
            f"| {row['policies']} | {row['tokens_of_each']} | {joint} | {apart} | {row['times_faster']:.2f} | {floor} "
            f"| {row['equal']} of {row['policies']} |"
        )
    return "\n".join(lines) + "\n"


def write(given: argparse.Namespace, what: str, rows: list[Found], table: str) -> None:
    """WHAT.json and WHAT.md in --out."""
    name = "-".join((what, Path(given.model).name, given.dtype))
    command = ["python", "bench/many_policies.py", *sys.argv[1:]]
    setting = {key: value for key, value in vars(given).items() if key != "out"}
    backends = registry.report("cpu", DTYPES[given.dtype])
    given.out.mkdir(parents=True, exist_ok=True)
    record = run_record(config=setting, command=command, backends=backends)
    write_json_atomic(given.out / f"{name}.json", {**record, "exact": True, "rows": rows})
    about = f"CPU milliseconds, {given.threads} thread, {record['cpu_instruction_set']}: `{shlex.join(command)}`"
    (given.out / f"{name}.md").write_text(f"# {name}\n\n{about}\n\n{table}", encoding="utf-8")
    print(table)


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in STUDIES:  # the rest is the study's own
        studies, name = Path(__file__).parent / "studies", STUDIES[sys.argv[1]]
        sys.path.insert(0, str(studies))
        sys.argv = [str(studies / f"{name}.py"), *sys.argv[2:]]
        return importlib.import_module(name).main()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--decode", action="store_true", help="measure decoding steps")
    parser.add_argument("--joint", action="store_true", help="measure forward and backward passes")
    for flag, study in STUDIES.items():
        parser.add_argument(flag, action="store_true", help=f"the first flag, before those of studies/{study}.py")
    parser.add_argument("--model", default="llama-41m", help=f"a model folder, or one of {', '.join(CONFIGS)}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--policies", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rows", type=int, default=16, help="rows of each policy that decode")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[20], help="tokens of each policy that learn, at least 2"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", choices=SETS, help="instruction set; default: the best of this CPU")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if not (given.decode or given.joint):
        parser.error("expected --decode, --joint or both, or one of --sweep and --http first of all flags")
    if given.isa and not is_held(given.isa):
        sys.exit(run_held(given.isa, sys.argv[1:], program=[__file__]))
    for name, value in QUICK.items() if given.quick else ():
        setattr(given, name, value)
    torch.set_num_threads(given.threads)
    with registry.use_exact():
        if given.decode:
            rows = [measure_decoding(given, policies) for policies in given.policies]
            write(given, "decode", rows, decoding_table(rows))
        if given.joint:
            rows = [measure_joint(given, n, length) for n in given.policies for length in given.tokens]
            write(given, "joint", rows, joint_table(rows))


if __name__ == "__main__":
    main()
