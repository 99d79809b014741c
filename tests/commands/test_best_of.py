"""`rlhf-engine generate --best_of`: the answers that are drawn one by one, of which the reward's favourite is kept."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from rlhf_engine.commands.main import main
from rlhf_engine.data.tokenize import encode_prompt, eos_token_ids, load_tokenizer
from rlhf_engine.hydra import OFF, HydraModel, RoleSpec
from rlhf_engine.rollout import SamplingConfig, generate
from tests.hydra.test_build import classifier_on
from tests.training.test_data import write_model

PROMPTS = ["red cat", "the dog runs"]
N = 6


@pytest.fixture(scope="module")
def drawn(model):
    """(prompt, N answers) of each prompt, by the Python API."""
    tokenizer = load_tokenizer(str(model))
    policy = HydraModel.from_pretrained(str(model), roles={"actor": RoleSpec(slot=OFF)})
    ends = eos_token_ids(tokenizer, policy.backbone().model)
    sampling = SamplingConfig(max_completion_length=5, eos_token_ids=ends)
    prompts = [encode_prompt(tokenizer, text) for text in PROMPTS for _ in range(N)]
    batch = generate(policy, prompts, sampling).batch
    found = [[batch.completion_tokens(i * N + j) for j in range(N)] for i in range(2)]
    assert all(len({tuple(row) for row in rows}) > 1 for rows in found)
    return [(prompts[i * N], found[i]) for i in range(2)], tokenizer


def lora_reward(model, folder):
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="SEQ_CLS")
    theirs = get_peft_model(classifier_on(model), config)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                p.normal_(std=0.3)
    theirs.save_pretrained(folder)
    return PeftModel.from_pretrained(classifier_on(model), folder).eval()


@pytest.mark.parametrize("source", ["adapter", "head", "other"])
def test_the_favourite_of_several_answers_is_kept(source, model, drawn, tmp_path, capsys):
    """By a LoRA reward model, one that is the base with a head, and one of other weights; scored by plain libraries."""
    folder = tmp_path / "rm"
    if source == "adapter":
        judge = lora_reward(model, folder)
    else:
        judge = classifier_on(model if source == "head" else write_model(tmp_path / "other", seed=9))
        judge.save_pretrained(folder)
        if source == "other":
            drawn[1].save_pretrained(folder)
    judge.config.pad_token_id = None  # or it would read before a drawn padding token
    argv = ["generate", "--model_name_or_path", str(model), "--device", "cpu", "--max_completion_length", "5"]
    argv += ["--json", "--prompt", *PROMPTS, "--best-of", str(N), "--reward_model_path", str(folder)]
    out = tmp_path / "answers.jsonl"
    assert main([*argv, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS
    candidates, tokenizer = drawn
    for row, (prompt, answers) in zip(rows, candidates, strict=True):
        with torch.no_grad():
            scores = [float(judge(torch.tensor([prompt + answer]), use_cache=False).logits) for answer in answers]
        assert row["score"] == pytest.approx(max(scores), abs=1e-4)
        assert row["mean_score"] == pytest.approx(sum(scores) / N, abs=1e-4)
        assert row["completion"] == tokenizer.decode(answers[scores.index(max(scores))], skip_special_tokens=True)
    text = out.read_text()
    out.write_text(text.splitlines(keepends=True)[0] + '{"index": 1, "pro')  # stopped while it wrote the second
    assert main([*argv, "--out", str(out), "--resume"]) == 0
    for before, after in zip(text.splitlines(), out.read_text().splitlines(), strict=True):
        before, after = json.loads(before), json.loads(after)
        numbers = ("mean_logprob", "score", "mean_score")  # a batch of one prompt rounds as it rounds
        assert [after.pop(k) for k in numbers] == pytest.approx([before.pop(k) for k in numbers], abs=1e-5)
        assert {**before, "digest": None} == {**after, "digest": None}


def test_what_cannot_be_chosen_from(model, tmp_path, capsys):
    plain = write_model(tmp_path / "plain", reward_head=False)
    for flags, message in [
        (["--reward_model_path", "x"], "reward_model_path: expected it unset without best_of"),
        (["--best_of", "4", "--greedy"], "greedy: expected it unset with best_of"),
        (["--best_of", "4", "--num_generations", "2"], "num_generations: expected it unset with best_of, got 2"),
        (["--best_of", "1"], "best_of: expected an integer or none >= 2, got 1"),
        (
            ["--best_of", "4", "--reward_model_path", "x"],
            "reward_model_path: expected a model folder or owner/name of the Hub, got 'x'",
        ),
        (["--best_of", "3"], "best_of: expected a trained reward head"),
    ]:
        base = plain if flags[-1] == "3" else model
        common = ["--model_name_or_path", str(base), "--prompt", "red", "--max_completion_length", "4"]
        assert main(["generate", *common, *flags]) == 2
        assert message in capsys.readouterr().err


def test_a_reward_that_is_not_finite_chooses_nothing(model, tmp_path, capsys):
    lora_reward(model, tmp_path / "rm")
    tensors = load_file(tmp_path / "rm" / "adapter_model.safetensors")
    name = next(name for name in tensors if "score" in name)
    tensors[name] = tensors[name].fill_(float("nan"))
    save_file(tensors, tmp_path / "rm" / "adapter_model.safetensors", metadata={"format": "pt"})
    flags = ["--model_name_or_path", str(model), "--device", "cpu", "--max_completion_length", "3", "--best_of", "2"]
    assert main(["generate", *flags, "--reward_model_path", str(tmp_path / "rm"), "--prompt", "red cat"]) == 1
    captured = capsys.readouterr()
    assert "reward of an answer to prompt 0 is nan" in captured.err
    assert captured.out == ""


def test_prompts_are_as_long_as_the_reward_model_can_read(model, tmp_path, capsys):
    other = classifier_on(model)
    other.config.max_position_embeddings = 6
    other.save_pretrained(tmp_path / "rm")
    flags = ["--model_name_or_path", str(model), "--device", "cpu", "--max_completion_length", "4", "--best_of", "2"]
    flags += ["--reward_model_path", str(tmp_path / "rm"), "--prompt", "the dog runs"]
    assert main(["generate", *flags]) == 2
    assert "prompt:1: expected at most 2 tokens (context 6" in capsys.readouterr().err
