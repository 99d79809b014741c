"""A run's kernels: in every checkpoint, kept by the run that goes on, refused where they cannot be had."""

import functools
import json
from pathlib import Path

import pytest
import torch
from rlhf_kernels.runtime import kernel_table, native, registry
from rlhf_kernels.runtime.kernel_table import Entry
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlhf_engine.errors import ConfigError, CorruptCheckpointError
from rlhf_engine.io import write_manifest
from rlhf_engine.runs.checkpoint import begin_kernels
from rlhf_engine.training.rl import RlTrainer
from tests.training.test_data import train_config, write_model

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="without it there is nothing to choose")
ISAS = native.isas() if native.missing() is None else []
of_table = functools.partial(train_config, exact=False)
"""Options of a run whose kernels the table chooses: exact mode goes before it."""


@pytest.fixture
def table(tmp_path) -> Path:
    """A table that prefers the reference wherever it can be told to."""
    ms = {"a": {"cpu": 2.0, "reference": 1.0}}
    shapes = {"decode_step": (8, 8), "lora": (8, 8), "linear_ppo_loss": (8, 8), "linear_logprob": (8, 8)}
    shapes |= {"sample": (8, 8), "gae": None, "ppo_loss": None, "rms_norm": (8,), "swiglu": (8,), "rotary": (8,)}
    shapes |= {"activation": (8,), "attention": (8,)}
    isa = native.isa()
    assert isa is not None
    path = tmp_path / "table.json"
    kernel_table.write(
        path, [Entry(op, isa, "float32", s, "reference", ms) for op, s in shapes.items()], {isa: "a CPU"}
    )
    return path


def run(trainer: RlTrainer, steps: int) -> list[torch.Tensor]:
    """Weights of the actor after more steps, with a checkpoint."""
    for _ in range(steps):
        trainer.step()
    trainer.save()
    trainer.source.close()
    return [p.detach().clone() for group in trainer.optimizer.groups.values() for p in group.values()]


def chosen(folder: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for choice in json.loads((folder / "kernels.json").read_text()):
        found.setdefault(choice["op"], set()).add(choice["backend"])
    return found


def test_a_resumed_run_keeps_its_kernels_though_the_table_is_another(model, table, tmp_path):
    with registry.use_table(table):
        whole = run(RlTrainer(of_table(model, tmp_path / "whole")), 4)
        run(RlTrainer(of_table(model, tmp_path / "parts")), 2)
    backends = chosen(tmp_path / "parts" / "checkpoint-2")
    assert backends["linear_ppo_loss"] == backends["decode_step"] == backends["gae"] == {"reference"}
    other = run(RlTrainer(of_table(model, tmp_path / "other")), 4)
    assert not all(torch.equal(a, b) for a, b in zip(whole, other, strict=True)), "the table makes a difference"
    config = of_table(model, tmp_path / "parts", resume_from_checkpoint="auto")
    with native.use_isa("portable"):  # which the reference does not mind
        parts = run(RlTrainer(config), 2)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert chosen(tmp_path / "parts" / "checkpoint-4") == chosen(tmp_path / "whole" / "checkpoint-4")


@pytest.mark.skipif("avx2" not in ISAS, reason="of no other set has the package's table every op")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_a_run_by_the_package_s_table_goes_on_to_the_same_floats(model, tmp_path, dtype):
    """A user of a CPU with AVX2 gets these kernels from `auto`; the rest of the suite empties the table."""

    def steps(name: str, n: int, **changes: str) -> list[torch.Tensor]:
        return run(RlTrainer(of_table(model, tmp_path / name, dtype=dtype, **changes)), n)

    with native.use_isa("avx2"), registry.use_table(kernel_table.COMMITTED):
        whole = steps("whole", 4)
        steps("parts", 2)
        parts = steps("parts", 2, resume_from_checkpoint="auto")
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    table = kernel_table.read(kernel_table.COMMITTED, registry.ops())
    content = (tmp_path / "parts" / "checkpoint-2" / "kernels.json").read_text()
    kept = json.loads(content)
    assert {"linear", "lora", "decode_step", "linear_ppo_loss", "gae"} <= {choice["op"] for choice in kept}
    for choice in kept:
        entry = table.find(choice["op"], "avx2", choice["dtype"], choice["shape"])
        assert entry is not None, choice
        assert choice["backend"] == entry.backend, choice
    for later in ("parts", "whole"):
        assert (tmp_path / later / "checkpoint-4" / "kernels.json").read_text() == content


def folder_with(tmp_path: Path, **choice: object) -> Path:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir(parents=True)
    (folder / "kernels.json").write_text(json.dumps([{"op": "gae", "dtype": "float32", "shape": None, **choice}]))
    write_manifest(folder)
    return folder


def test_a_kernel_that_cannot_serve_here_is_refused_in_one_line(tmp_path):
    folder = folder_with(tmp_path, backend="cuda")
    with pytest.raises(ConfigError) as refused:
        begin_kernels(folder)
    line = str(refused.value)
    assert line.startswith("resume_from_checkpoint: 'cuda', the choice of the run's checkpoint, cannot serve gae: ")
    assert line.endswith("available here: ['reference', 'cpu']; --kernels NAME goes on with another")
    with registry.use_backend("reference"):
        begin_kernels(folder)
    # and one with tuned tiles is refused
    folder = folder_with(tmp_path / "tuned", backend="cpu")
    tuned = {"op": "decode_attention", "site": "attend", "dtype": "bfloat16", "sizes": [4, 128], "settings": {"BS": 32}}
    rows = [*json.loads((folder / "kernels.json").read_text()), tuned]
    (folder / "kernels.json").write_text(json.dumps(rows))
    write_manifest(folder)
    with pytest.raises(ConfigError, match=r"kernels.json\[1\]: expected default tiles, got tuned"):
        begin_kernels(folder)


def test_a_changed_choice_is_not_read(tmp_path):
    folder = folder_with(tmp_path, backend="cpu")
    begin_kernels(folder)
    (folder / "kernels.json").write_text("[]")
    with pytest.raises(CorruptCheckpointError):
        begin_kernels(folder)
    # a checkpoint of before there were choices has nothing to keep
    registry.begin_run([registry.Choice("gae", "float32", None, "reference")])
    begin_kernels(tmp_path)
    assert registry.choices() == []


@pytest.mark.skipif("avx2" not in ISAS, reason="exact mode is no default on other sets")
def test_exact_mode_is_the_default_where_it_serves_and_a_resumed_run_keeps_it(model, tmp_path):
    def trainer(isa: str, **options: object) -> RlTrainer:
        with native.use_isa(isa):
            return RlTrainer(train_config(model, tmp_path / "run", **options))

    made = trainer("avx2")
    assert made.kernels.exact
    with native.use_isa("avx2"):
        run(made, 1)
    assert json.loads((tmp_path / "run" / "checkpoint-1" / "kernels.json").read_text())[-1] == {"exact": True}
    assert trainer("portable", resume_from_checkpoint="auto").kernels.exact  # where no new run would be exact
    assert not trainer("avx2", resume_from_checkpoint="auto", exact=False).kernels.exact
    assert not trainer("portable", output_dir=str(tmp_path / "other")).kernels.exact
    assert not registry.is_exact()


@pytest.mark.skipif("avx2" not in ISAS, reason="exact mode is no default on other sets")
def test_a_model_that_exact_mode_does_not_serve_runs_without_it(tmp_path):
    folder = write_model(tmp_path / "model")
    sizes = AutoConfig.from_pretrained(folder).to_dict()
    shape = {name: sizes[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size", "eos_token_id")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **heads, **experts)).save_pretrained(folder)
    with native.use_isa("avx2"):
        trainer = RlTrainer(train_config(folder, tmp_path / "run"))
        assert not trainer.kernels.exact
        trainer.step()
        with pytest.raises(ValueError, match=r"exact: expected .*mlp\.experts is a Qwen3MoeExperts, whose stacked"):
            RlTrainer(train_config(folder, tmp_path / "other", exact=True))
