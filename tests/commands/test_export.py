"""Exports of trained adapters and reward models: the same function in other libraries, and cards that say what is."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

pytest.importorskip("peft")
from peft import PeftModel

from rlhf_engine.commands.main import main
from rlhf_engine.hydra import HydraModel, PackedBatch, RoleSpec, SlotConfig, load_pretrained, peft_io, save_pretrained
from rlhf_engine.hydra.gate import head_logits
from rlhf_engine.hydra.reward_model import require_reward_head
from rlhf_engine.io import MANIFEST_FILE
from rlhf_engine.tools import card
from tests.conftest import randomise
from tests.training.test_data import PROMPTS, write_model, write_pairs, write_prompts
from tests.training.test_every_architecture import write
from tests.training.test_reward import gpt2_folder

ROOT = Path(__file__).parents[2]
IDS = torch.randint(3, 12, (3, 8), generator=torch.Generator().manual_seed(0))
BATCH = PackedBatch.from_lists([row[:3].tolist() for row in IDS], [row[3:].tolist() for row in IDS])
ACTOR = {"actor": RoleSpec(slot="actor", trainable=True), "reference": RoleSpec()}
SHORT = ("--max_steps", "2", "--lora_r", "4", "--learning_rate", "1e-2", "--device", "cpu")
BOUND = 1e-5
"""Largest difference of logits, merged against unmerged in float32, of models whose logits are around 1."""


def run(*words: object) -> None:
    """A command that has to succeed."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([str(word) for word in words]) == 0


def export(source: object, to: str, out: Path, *more: object) -> Path:
    run("export", source, "--to", to, "--output_dir", out, *more)
    return out


def refused(capsys, source: object, to: str, out: Path, *more: object) -> str:
    """The one line of an export that is not made; nothing is left of it."""
    capsys.readouterr()
    code = main([str(word) for word in ("export", source, "--to", to, "--output_dir", out, *more)])
    lines = capsys.readouterr().err.splitlines()
    assert code in (1, 2)
    assert len(lines) == 1, lines
    assert not out.exists() or not any(out.iterdir())
    assert not list(out.parent.glob(".*.tmp"))
    return lines[0].removeprefix("rlhf-engine export: ")


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits.float()


def our_logits(folder: Path, base: Path, slot: str = "actor") -> torch.Tensor:
    """Logits [3, 8, V] in the lane of a slot of what `save_pretrained` wrote."""
    model = load_pretrained(folder, base=base).eval()
    with torch.no_grad():
        hidden = model.backbone().run_lanes([(BATCH, None, slot)])[0]
    return head_logits(hidden, model.backbone().lm_head_in(slot)).unflatten(0, (3, 8))


def write_actor(base: Path, folder: Path, *, dtype: torch.dtype = torch.float32, **slot: object) -> Path:
    """An actor's adapter that is not zero, without a run."""
    slots = {"actor": SlotConfig(**{"r": 4, "alpha": 8.0, **slot})}
    model = HydraModel.from_pretrained(base, roles=ACTOR, slots=slots, dtype=dtype)
    randomise(model, "actor")
    save_pretrained(model, folder)
    return folder


def changed_run(place: Path, folder: Path, **config: object) -> Path:
    """The run of PPO, as if with other options."""
    shutil.copytree(place / "ppo", folder)
    record = json.loads((folder / "run.json").read_text())
    record["config"] |= config
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def texts_of(folder: Path) -> str:
    return "".join(p.read_text() for p in folder.rglob("*") if p.suffix in (".json", ".md"))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A base, a run of PPO and one of a reward model on it, and the actor alone."""
    place = tmp_path_factory.mktemp("export")
    base = write_model(place / "model")
    prompts, pairs = write_prompts(place), write_pairs(place)
    few = ("--generation_batch_size", 4, "--num_mini_batches", 1, "--num_ppo_epochs", 1)
    ppo = ("--model_name_or_path", base, "--dataset_name", prompts, "--output_dir", place / "ppo", "--save_steps", 1)
    run("train", *ppo, *few, "--max_completion_length", 6, *SHORT)
    rm = ("--model_name_or_path", base, "--dataset_name", pairs, "--output_dir", place / "rm")
    run("reward", "--lora", *rm, *SHORT)
    shutil.copytree(place / "ppo" / "final", place / "actor")  # without the run, whose curve takes a second to draw
    return place


@pytest.fixture(autouse=True)
def quick_curves(monkeypatch) -> None:
    """Pictures of curves take a second each, and have tests of their own."""
    monkeypatch.setattr(card, "plot_curves", lambda metrics, picture: picture.write_bytes(b"\x89PNG"))


def test_a_merged_run_is_the_actor(place, tmp_path):
    before = (place / "model" / "model.safetensors").read_bytes()
    out = export(place / "ppo", "merged", tmp_path / "out")
    assert (place / "model" / "model.safetensors").read_bytes() == before
    theirs = logits(AutoModelForCausalLM.from_pretrained(out))
    ours = our_logits(place / "ppo" / "final", place / "model")
    assert (theirs - ours).abs().max() < BOUND
    base = logits(AutoModelForCausalLM.from_pretrained(place / "model"))
    assert (ours - base).abs().max() > 100 * BOUND
    assert AutoTokenizer.from_pretrained(out).eos_token_id is not None
    assert (out / "generation_config.json").is_file()
    assert not list(out.glob("adapter*"))
    early = export(place / "ppo" / "checkpoint-1", "merged", tmp_path / "early")
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(early)), theirs)


MORE = ("gemma2", "gpt_neox", "deepseek_v3", "mixtral")


@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe", *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_other_architectures_merge(name, tmp_path):
    base = gpt2_folder(tmp_path / "base") if name == "gpt2" else write(name, tmp_path / "base")
    adapter = write_actor(base, tmp_path / "adapter")
    theirs = AutoModelForCausalLM.from_pretrained(export(adapter, "merged", tmp_path / "out"))
    theirs.set_attn_implementation("eager" if name == "gemma2" else "sdpa")  # sdpa leaves Gemma's softcap out
    ours = our_logits(adapter, base)
    assert (logits(theirs) - ours).abs().max() < BOUND * max(1.0, ours.abs().max().item())


def test_a_base_in_bf16_is_rounded_once(tmp_path):
    base = write_model(tmp_path / "base", reward_head=False)
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    adapter = write_actor(base, tmp_path / "adapter")  # in a run whose dtype is float32
    narrow = export(adapter, "merged", tmp_path / "narrow", "--dtype", "float16")
    assert load_file(narrow / "model.safetensors")["lm_head.weight"].dtype == torch.float16
    merged = load_file(export(adapter, "merged", tmp_path / "out") / "model.safetensors")
    exact = load_file(export(adapter, "merged", tmp_path / "exact", "--dtype", "float32") / "model.safetensors")
    weights, pairs = load_file(base / "model.safetensors"), load_file(adapter / peft_io.WEIGHTS_FILE)
    adapted = 0
    for name, w in weights.items():
        key = f"{peft_io.PREFIX}{name.removesuffix('.weight')}.lora_"
        whole = w.double()
        if f"{key}A.weight" in pairs:
            adapted += 1
            whole = whole + 2.0 * pairs[f"{key}B.weight"].double() @ pairs[f"{key}A.weight"].double()
        assert merged[name].dtype == torch.bfloat16
        assert exact[name].dtype == torch.float32
        torch.testing.assert_close(exact[name], whole.float(), rtol=1e-6, atol=1e-7)
        # another order of the sum over r may fall to the other side of the middle between two bf16 numbers
        assert (merged[name] == whole.to(torch.bfloat16)).float().mean() > 0.999
    assert adapted == 14
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "exact"))
    assert (theirs - our_logits(adapter, base)).abs().max() < BOUND


def test_an_adapter_of_a_run_in_bf16_finds_its_base_in_float32(tmp_path):
    """Hashes are of the weights as a run has them, which may be rounded ones of the files."""
    base = write_model(tmp_path / "base", reward_head=False)
    adapter = write_actor(base, tmp_path / "adapter", dtype=torch.bfloat16)
    out = export(adapter, "merged", tmp_path / "out")
    assert load_file(out / "model.safetensors")["lm_head.weight"].dtype == torch.float32


def test_lora_on_the_head_leaves_the_embedding_alone(tmp_path):
    for tied in (True, False):
        base = write_model(tmp_path / f"base{tied}", reward_head=False, tie_word_embeddings=tied)
        adapter = write_actor(base, tmp_path / f"adapter{tied}", target_modules=("q_proj", "lm_head"))
        theirs = AutoModelForCausalLM.from_pretrained(export(adapter, "merged", tmp_path / f"out{tied}"))
        assert (logits(theirs) - our_logits(adapter, base)).abs().max() < BOUND
        plain = AutoModelForCausalLM.from_pretrained(base)
        assert torch.equal(theirs.get_input_embeddings().weight, plain.get_input_embeddings().weight)
        assert not torch.equal(theirs.lm_head.weight, plain.lm_head.weight)


def test_whole_models_are_exported_as_they_are(place, tmp_path, capsys):
    full = ("--model_name_or_path", place / "model", "--dataset_name", place / "pairs.jsonl", "--max_steps", 2)
    run("sft", "--full", *full, "--output_dir", tmp_path / "full", "--learning_rate", "1e-2", "--device", "cpu")
    out = export(tmp_path / "full", "merged", tmp_path / "out")
    assert torch.equal(*(logits(AutoModelForCausalLM.from_pretrained(folder)) for folder in (out, tmp_path / "full")))
    assert "expected an adapter for peft" in refused(capsys, tmp_path / "full", "peft", tmp_path / "no")
    # supervised training moves the head's bias by rounding: it is left out, and said to be
    shifted = export(tmp_path / "full", "sequence_classification", tmp_path / "rm")
    bias = peft_io.read_head(tmp_path / "full", "reward")["bias"].item()
    assert f"lower by {bias:g}" in (shifted / card.CARD).read_text()
    tokens = IDS[:1, :6]
    model = HydraModel.from_pretrained(tmp_path / "full", roles={"reward": RoleSpec(head="reward")}).eval()
    batch = PackedBatch.from_lists([tokens[0, :3].tolist()], [tokens[0, 3:].tolist()])
    ours = model.score(batch, ("reward",)).rewards_N
    with torch.no_grad():
        theirs = AutoModelForSequenceClassification.from_pretrained(shifted)(tokens).logits[0]
    torch.testing.assert_close(theirs + bias, ours, rtol=0, atol=BOUND)


def test_an_adapter_opens_in_peft_and_transformers_wherever_it_lies(place, tmp_path):
    moved = tmp_path / "elsewhere" / "adapter"
    moved.parent.mkdir()
    export(place / "actor", "peft", tmp_path / "first").rename(moved)
    config = json.loads((moved / peft_io.CONFIG_FILE).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("model", None)
    assert str(tmp_path) not in texts_of(moved)
    assert str(place) not in texts_of(moved)
    ours = our_logits(place / "ppo" / "final", place / "model")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place / "model"), moved)
    assert (logits(theirs) - ours).abs().max() < BOUND
    plain = AutoModelForCausalLM.from_pretrained(place / "model")
    plain.load_adapter(str(moved))
    assert (logits(plain) - ours).abs().max() < BOUND
    slot = {"actor": peft_io.read_slot_config(moved)}
    HydraModel.from_pretrained(place / "model", roles=ACTOR, slots=slot)
    with pytest.raises(ValueError, match="got one of another base"):
        HydraModel.from_pretrained(write_model(tmp_path / "other", seed=1), roles=ACTOR, slots=slot)
    (moved / card.CARD).write_text("mine")  # a card may be edited
    peft_io.read_slot_config(moved)


def test_a_role_brings_its_head(place, tmp_path, capsys):
    out = export(place / "actor", "peft", tmp_path / "critic", "--role", "critic")
    assert peft_io.head_names(out) == {"value"}
    critic = place / "ppo" / "final" / "slots" / "critic" / peft_io.WEIGHTS_FILE
    assert (out / peft_io.WEIGHTS_FILE).read_bytes() == critic.read_bytes()
    no = tmp_path / "no"
    assert "is the base" in refused(capsys, place / "actor", "merged", no, "--role", "reference")
    assert "expected one of ['actor', 'critic', 'ref" in refused(capsys, place / "actor", "peft", no, "--role", "judge")
    # a reward adapter is one for `train` again
    out = export(place / "rm", "peft", tmp_path / "rm")
    assert set(require_reward_head(out, "reward_adapter")) == {"weight", "bias"}


# Facts of vLLM's LoRA loader (vllm/lora/peft_helper.py): fields that it needs, values without which it refuses, names.
VLLM_FIELDS = {"r", "lora_alpha", "target_modules"}
VLLM_REFUSES = {"modules_to_save": None, "use_dora": False, "bias": "none"}
VLLM_MODULE = re.compile(r"base_model\.model\.[\w.]+\.lora_[AB]\.weight")


def test_an_adapter_is_what_vllm_reads(place, tmp_path):
    """No server: the rules of its loader, as facts."""
    out = export(place / "actor", "peft", tmp_path / "out")
    config = json.loads((out / peft_io.CONFIG_FILE).read_text())
    assert config.keys() >= VLLM_FIELDS
    assert {name: config[name] for name in VLLM_REFUSES} == VLLM_REFUSES
    tensors = load_file(out / peft_io.WEIGHTS_FILE)
    assert all(VLLM_MODULE.fullmatch(name) for name in tensors)
    targets = {name.removeprefix(peft_io.PREFIX).rpartition(".lora_")[0] for name in tensors}
    assert targets == set(config["target_modules"])
    assert all(t.shape[0 if ".lora_A." in name else 1] == config["r"] for name, t in tensors.items())
    assert f"--max-lora-rank {max(8, config['r'])}`" in (out / card.CARD).read_text()


def our_scores(place: Path, rows: list[list[int]]) -> torch.Tensor:
    """Rewards of the reward run's slot and head, at the last token of each row."""
    final = place / "rm" / "final"
    roles = {"reward": RoleSpec(slot="reward", head="reward"), "reference": RoleSpec()}
    slots = {"reward": peft_io.read_slot_config(final)}
    model = HydraModel.from_pretrained(place / "model", roles=roles, slots=slots).eval()
    peft_io.load_heads(model.heads, final)
    found = model.score(PackedBatch.from_lists([row[:1] for row in rows], [row[1:] for row in rows]), ("reward",))
    assert found.rewards_N is not None
    return found.rewards_N


def test_a_reward_model_gives_the_same_scores_in_padded_batches(place, tmp_path):
    for padding in ("own", "end of sequence", "none"):
        source = tmp_path / padding / "rm"
        shutil.copytree(place / "rm" / "final", source)
        (source / MANIFEST_FILE).unlink()  # changed on purpose
        tokenizer = AutoTokenizer.from_pretrained(source)
        if padding != "own":
            tokenizer.pad_token = tokenizer.eos_token if padding == "end of sequence" else None
            tokenizer.save_pretrained(source)
        out = export(source, "sequence_classification", tmp_path / padding / "out")
        theirs = AutoModelForSequenceClassification.from_pretrained(out).eval()
        reader = AutoTokenizer.from_pretrained(out)
        assert theirs.config.num_labels == 1
        assert theirs.config.pad_token_id == reader.pad_token_id != reader.eos_token_id
        texts = [f"{prompt} the sun{reader.eos_token}" for prompt in PROMPTS[:5]] + [f"sea{reader.eos_token}"]
        batch = reader(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        assert (batch["attention_mask"] == 0).any()
        with torch.no_grad():
            scores = theirs(**batch).logits[:, 0]
        ours = our_scores(place, [reader(text)["input_ids"] for text in texts])
        torch.testing.assert_close(scores, ours, rtol=0, atol=BOUND)
        assert ours.std() > 0.1


@pytest.mark.long
def test_a_whole_reward_model_and_the_one_of_a_run_are_exported_too(place, tmp_path, capsys):
    pairs = ("--dataset_name", place / "pairs.jsonl", "--output_dir", tmp_path / "full", "--learning_rate", "1e-2")
    run("reward", "--full", "--model_name_or_path", place / "model", *pairs, "--max_steps", 2, "--device", "cpu")
    final = tmp_path / "full" / "final"
    out = export(final, "sequence_classification", tmp_path / "out")
    found = [AutoModelForSequenceClassification.from_pretrained(folder)(IDS[:1]).logits for folder in (final, out)]
    assert torch.equal(*found)
    assert "expected an adapter for peft" in refused(capsys, final, "peft", tmp_path / "no")
    # a run of PPO has the reward model that it learned from
    prompts = ("--dataset_name", place / "prompts.jsonl", "--output_dir", tmp_path / "ppo", "--algorithm", "reinforce")
    few = ("--generation_batch_size", 4, "--num_mini_batches", 1, "--max_completion_length", 4)
    reward = ("--reward_model_path", place / "rm" / "final")
    run("train", "--model_name_or_path", place / "model", *reward, *prompts, *few, *SHORT)
    theirs = AutoModelForSequenceClassification.from_pretrained(
        export(tmp_path / "ppo", "sequence_classification", tmp_path / "of-run")
    )
    with torch.no_grad():
        scores = theirs(IDS).logits[:, 0]
    torch.testing.assert_close(scores, our_scores(place, IDS.tolist()), rtol=0, atol=BOUND)


def test_a_source_that_gives_no_scores_is_refused(place, tmp_path, capsys):
    base = write("dots1", tmp_path / "dots1")
    line = refused(capsys, base, "sequence_classification", tmp_path / "out")
    assert "to: expected an architecture of which transformers has a sequence classifier, got 'dots1'" in line
    base = write_model(tmp_path / "base", reward_head=False)
    assert "expected a model with a reward head" in refused(capsys, base, "sequence_classification", tmp_path / "out")


def front_matter(text: str) -> dict[str, object]:
    empty, header, _ = text.split("---\n", 2)
    assert empty == ""
    return yaml.safe_load(header)


CARDS = (("ppo", "merged", "transformers"), ("ppo", "peft", "peft"), ("rm", "sequence_classification", "transformers"))


def test_a_card_says_what_was_recorded_and_its_code_runs(place, tmp_path, monkeypatch, capsys):
    for run_name, to, library in CARDS:
        out = export(place / run_name, to, tmp_path / to, "--license", "apache-2.0", "--base_model", "owner/base@v1")
        text = (out / card.CARD).read_text()
        header = front_matter(text)
        facts = (header["library_name"], header["license"], header["base_model"])
        assert facts == (library, "apache-2.0", "owner/base")
        assert "datasets" not in header
        data = "prompts.jsonl" if run_name == "ppo" else "pairs.jsonl"
        assert f"| dataset_name | `{data}` | 12 | 12 | 0 |" in text
        assert "| learning_rate | `0.01` |" in text
        assert "| steps | 2 |" in text
        assert re.search(r"\| Steps \|  \| 2 of 2 \|", text)
        record = json.loads((place / run_name / "run.json").read_text())
        assert f"`{record['base_hash']}`" in text
        assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert str(place) not in texts_of(out)
        assert str(tmp_path) not in texts_of(out)
        (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        monkeypatch.chdir(out)
        block = block.replace('"owner/base"', repr(str(place / "model"))).replace(', revision="v1"', "")
        capsys.readouterr()
        exec(compile(block, "card", "exec"), {"__name__": "card"})
        assert capsys.readouterr().out or to == "peft"


def test_cards_of_adapters_that_do_not_answer(place, tmp_path, monkeypatch):
    classifier = export(place / "rm" / "final" / "sequence_classification", "peft", tmp_path / "classifier")
    critic = export(place / "actor", "peft", tmp_path / "critic", "--role", "critic")
    for out, head in ((classifier, "reward"), (critic, "value")):
        text = (out / card.CARD).read_text()
        assert "pipeline_tag" not in front_matter(text)
        assert f"`heads.safetensors` has weight and bias of its scalar head `{head}`." in text
        (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        monkeypatch.chdir(out)
        loaded: dict[str, object] = {}
        exec(compile(block.replace('"model"', repr(str(place / "model"))), "card", "exec"), loaded)
        assert ("Sequence" in type(loaded["model"]).__name__) == (out == classifier)


def test_a_card_of_a_folder_without_a_run_invents_nothing(tmp_path):
    base = write_model(tmp_path / "base", reward_head=False)
    out = export(write_actor(base, tmp_path / "adapter"), "merged", tmp_path / "out")
    text = (out / card.CARD).read_text()
    assert front_matter(text)["license"] == "unknown"
    for title in ("Data", "Method", "Curve"):
        assert f"## {title}\nNot recorded.\n" in text
    assert not (out / "curves.png").exists()


def test_hostile_names_form_no_markup(place, tmp_path):
    names = {
        "dataset_name": "x\n---\nlicense: mit\n# Ti`tle |<script>alert(1)</script>\u202e",
        "reward_funcs": ["/home/somebody/secret/reward.py:f", "json_schema,schema=/home/somebody/schema.json"],
        "algorithm": "ppo\n---\nlicense: mit", "lora_target_modules": ["`", "|"],
        "reward_adapter": "/home/somebody/reward", "hub_token": "hf_secret",
    }  # fmt: skip
    text = (export(changed_run(place, tmp_path / "run", **names), "merged", tmp_path / "out") / card.CARD).read_text()
    header = front_matter(text)
    assert header["license"] == "unknown"
    assert header["tags"] == ["rlhf-engine", "lora", "ppo --- license: mit"]
    body = text.split("---\n")[-1]
    assert "\nlicense" not in body
    assert "\u202e" not in text
    for line in body.splitlines():  # all of it stays within code
        assert "<script>" not in re.sub(r"`[^`]*`", "", line)
    assert all(line.count("|") == 6 for line in body.splitlines() if line.startswith("| dataset_name"))
    assert "/home/" not in text
    assert "hf_secret" not in text
    assert "`reward.py:f`, `json_schema`" in text


def test_datasets_of_the_hub_are_named_in_the_header(place, tmp_path):
    names = {"dataset_name": "openai/gsm8k/main:train", "eval_dataset_name": "rows/held.jsonl"}
    text = (export(changed_run(place, tmp_path / "run", **names), "peft", tmp_path / "out") / card.CARD).read_text()
    assert front_matter(text)["datasets"] == ["openai/gsm8k"]
    assert "`held.jsonl` | not recorded |" in text


def test_a_source_that_is_none_and_a_folder_that_is_taken(place, tmp_path, capsys):
    out = tmp_path / "out"
    assert "source: expected the folder of a run" in refused(capsys, tmp_path / "nowhere", "peft", out)
    (tmp_path / "empty").mkdir()
    assert "source: expected a folder with final/, checkpoints" in refused(capsys, tmp_path / "empty", "peft", out)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    assert main(["export", str(place / "ppo"), "--to", "peft", "--output_dir", str(taken)]) == 2
    assert "output_dir: expected a new or empty folder" in capsys.readouterr().err
    assert (taken / "file").read_text() == "mine"
    with contextlib.suppress(SystemExit):
        main(["export", "--help"])
    assert "usage: rlhf-engine export" in capsys.readouterr().out


def test_a_base_that_is_gone_or_another_one_is_refused(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = Path("out")
    base = write_model(Path("bases") / "small", reward_head=False)
    adapter = write_actor(base, Path("adapter"))
    (tmp_path / "bases").rename(tmp_path / "moved")
    line = refused(capsys, adapter, "peft", out)  # the path looks like a name of the Hub now
    assert line.startswith("model_name_or_path: expected")
    assert "'bases/small'" in line
    moved = export(adapter, "peft", Path("right"), "--model_name_or_path", tmp_path / "moved" / "small")
    assert json.loads((moved / peft_io.CONFIG_FILE).read_text())["base_model_name_or_path"] == "small"
    other = write_model(tmp_path / "other", seed=1)
    for to in ("peft", "merged"):
        line = refused(capsys, adapter, to, out, "--model_name_or_path", other)
        assert line.startswith("model_name_or_path: expected the base with hash ")


def test_what_is_quantised_is_not_merged(place, tmp_path, capsys):
    run_folder = changed_run(place, tmp_path / "run", load_in_4bit=True)
    line = refused(capsys, run_folder, "merged", tmp_path / "out")
    assert "got one of a run with load_in_4bit" in line
    export(run_folder, "peft", tmp_path / "peft")
    base = tmp_path / "base"
    shutil.copytree(place / "model", base)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (base / "config.json").write_text(json.dumps(config))
    line = refused(capsys, place / "ppo", "merged", tmp_path / "out", "--model_name_or_path", base)
    assert "expected weights that are not quantised to merge into" in line
    assert "in gptq" in line


def test_a_damaged_source_is_refused(place, tmp_path, capsys):
    shutil.copytree(place / "ppo", tmp_path / "run")
    path = tmp_path / "run" / "final" / peft_io.WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "expected the file as it was written" in refused(capsys, tmp_path / "run", "peft", tmp_path / "out")


def test_options_that_do_not_fit_are_refused(place, tmp_path, capsys):
    for options, message in (
        (["--to", "peft", "--dtype", "float16"], "dtype: expected it unset with peft"),
        (["--to", "gguf"], "'peft', 'sequence_classification', got 'gguf'; llama.cpp's convert_hf"),
        (["--to", "merged", "--outtype", "f16"], "unknown option --outtype; llama.cpp's convert_hf"),
        (["--to", "peft", "--private"], "private: expected it unset without push_to_hub"),
        (["--to", "peft", "--push_to_hub", "name"], "push_to_hub: expected owner/name, got 'name'"),
        (["--to", "peft", "--base_model", "name"], "base_model: expected owner/name or owner/name@revision"),
        (["--to", "peft", "--license", "mit\nx"], "license: expected a name such as apache-2.0"),
    ):
        assert main(["export", str(place / "ppo"), "--output_dir", str(tmp_path / "out"), *options]) == 2
        assert message in capsys.readouterr().err
