"""Tools, environments and rollout functions behind TRL: what GRPOTrainer makes of them, and what our algorithms do.

Conversations are those of `trl_tools`: some calls are good, some are of nobody's tool, some are no JSON.
"""

import copy
import json

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")

from datasets import Dataset
from rlhf_kernels.runtime import registry
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import rlhf_engine.integrations.trl as ours
from rlhf_engine.errors import ConfigError
from rlhf_engine.integrations.trl.rollouts import text_only
from rlhf_engine.rollout import generate_requests
from tests.integrations.test_trl_options import assert_equal, beside, drift, loss_and_gradients
from tests.integrations.trl_runs import LORA, QUICK, rows, trained
from tests.integrations.trl_tools import QUESTIONS, Adder, Counter, add, multiply, write_caller

SIZES = {
    **QUICK, "max_completion_length": 80, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "max_steps": 2,
}  # fmt: skip
GROUPS = {**SIZES, "num_generations": 4}
KINDS = {
    "GRPO": ("HydraGRPO", {"num_generations": 4, "beta": 0.1}),
    "PPO": ("HydraPPO", {"beta": 0.1, "gamma": 0.9, "scale_rewards": "none"}),
    "REINFORCE": ("HydraReinforce", {"beta": 0.1, "gamma": 0.9}),
    "ReMax": ("ReMax", {"beta": 0.1}),
    "RLOO": ("HydraRLOO", {"num_generations": 4, "beta": 0.1}),
    "best of N": ("HydraBestOfN", {"num_generations": 4}),
    "online DPO": ("HydraOnlineDPO", {"answers_per_prompt": 3}),
}


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    return write_caller(tmp_path_factory.mktemp("caller"))


def talks(n: int = 16, **columns) -> Dataset:
    prompts = [[{"role": "user", "content": text}] for text in QUESTIONS]
    return Dataset.from_list([
        {"prompt": prompts[i % 4], **{name: values[i % len(values)] for name, values in columns.items()}}
        for i in range(n)
    ])  # fmt: skip


def results(prompts, completions, completion_ids, **columns):
    """How much tools have said, and a little for each token."""
    told = [[m["content"] for m in talk if m["role"] == "tool"] for talk in completions]
    good = [sum(not text.startswith("{") for text in texts) for texts in told]
    return [float(n) + 0.01 * len(ids) for n, ids in zip(good, completion_ids, strict=True)]


def make(method, caller, output, reward_funcs=results, *, dataset=None, changes=None, **options):
    config = getattr(ours, f"{method}Config")(**{**SIZES, "output_dir": str(output), **(changes or {})})
    return getattr(ours, f"{method}Trainer")(
        model=str(caller), reward_funcs=reward_funcs, args=config, train_dataset=dataset or talks(),
        processing_class=AutoTokenizer.from_pretrained(caller), peft_config=copy.deepcopy(LORA), **options,
    )  # fmt: skip


def spoken(trainer, monkeypatch) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Prompts and tokens of every turn that TRL asks for from now on."""
    seen: list[tuple[list[list[int]], list[list[int]]]] = []
    draw = trainer._generate_single_turn

    def noted(prompt_ids, *arguments, **named):
        ids, logprobs = draw(prompt_ids, *arguments, **named)
        seen.append(([list(x) for x in prompt_ids], copy.deepcopy(ids)))
        return ids, logprobs

    monkeypatch.setattr(trainer, "_generate_single_turn", noted)
    return seen


HOW = {
    "tools": ({"tools": [multiply, add]}, {}),
    "an environment": ({"environment_factory": Counter}, {}),
    "environments": (
        {"environment_factory": {"count": Counter, "add": Adder}, "tools": [multiply]},
        {"environment": ["count", "add"]},
    ),
    "few turns": ({"tools": [multiply, add]}, {}),
    "whole ones": ({"tools": [multiply, add]}, {}),
}
CHANGES = {
    "few turns": {"max_tool_calling_iterations": 1, "loss_type": "grpo", "scale_rewards": "none"},
    "whole ones": {"mask_truncated_completions": True, "max_completion_length": 48, "loss_type": "dr_grpo"},
}


@pytest.mark.parametrize("how", HOW)
def test_the_same_script_has_the_masks_advantages_and_losses_of_grpo_trainer(how, caller, tmp_path, monkeypatch):
    """GRPOTrainer is given the tokens that our engine draws, turn by turn, and asks for the same turns."""
    options, columns = HOW[how]
    given = {**GROUPS, "beta": 0.1, **CHANGES.get(how, {})}
    dataset = talks(**columns)
    mine = make("HydraGRPO", caller, tmp_path, changes=given, dataset=dataset, **options)
    config = GRPOConfig(str(tmp_path), **given, use_bias_correction_kl=False)
    theirs = beside(mine, GRPOTrainer, config, caller, results, std=0.05, **options)
    turns, batch = spoken(mine, monkeypatch), [dataset[i] for i in (0, 1) for _ in range(4)]
    inputs = mine._generate_and_score_completions(copy.deepcopy(batch))
    told = iter(turns)

    def replayed(prompt_ids, *arguments, **named):
        prompts, ids = next(told)
        assert prompts == prompt_ids
        return ids, None

    monkeypatch.setattr(theirs, "_generate_single_turn", replayed)
    expected = theirs._generate_and_score_completions(copy.deepcopy(batch))
    assert next(told, None) is None
    assert len(turns) >= 2
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask"):
        assert torch.equal(inputs[name], expected[name]), name
    mask = expected["completion_mask"] * expected["tool_mask"]
    assert torch.equal(inputs["loss_mask"], mask.bool())
    assert bool((expected["tool_mask"] == 0).any())
    whole_N = mask.bool().any(1)
    assert bool(whole_N.all()) == (how != "whole ones")
    advantages = inputs["of_advantages_M"].sum(1) / inputs["answer_mask"].sum(1)
    assert torch.allclose(advantages, expected["advantages"] * whole_N, atol=1e-5)
    assert float(expected["advantages"].abs().max()) > 0.1
    assert mine._logs["completion"] == theirs._logs["completion"]
    asked = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    real = torch.cat([inputs["prompt_mask"], inputs["answer_mask"] | inputs["given_mask"]], 1)
    width = inputs["completion_ids"].shape[1]
    logprobs, *_ = theirs._get_per_token_logps_and_entropies(theirs.model, asked, real, width)
    assert torch.allclose(inputs["of_old_logprobs_M"], logprobs * inputs["answer_mask"], atol=1e-4)
    assert torch.allclose(inputs["sampling_per_token_logps"], logprobs * inputs["answer_mask"], atol=1e-3)
    for name in ("tools/call_frequency", "tools/failure_frequency", "num_tokens", "reward", "completions/mean_length"):
        assert mine._metrics["train"][name] == theirs._metrics["train"][name], name
    assert mine._metrics["train"]["tools/failure_frequency"][0] > 0
    old = inputs["of_old_logprobs_M"] + drift(inputs)
    found = loss_and_gradients(mine, {**inputs, "of_old_logprobs_M": old})
    assert_equal(found, loss_and_gradients(theirs, {**expected, "old_per_token_logps": old}))
    assert float(found["loss"]) != 0.0


# ---- what our algorithms learn ---------------------------------------------------------------------------------------


def by_hand(trainer, ids: list[int], spans, *, reference: bool = False) -> list[torch.Tensor]:
    """Log-probs of the drawn tokens of a conversation, from the plain model's logits, one by one."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    tokens = torch.tensor([ids])
    if reference:
        with model.disable_adapter(), torch.no_grad():
            logits = model(tokens).logits[0]
    else:
        logits = model(tokens).logits[0]
    logits = logits.float().log_softmax(-1)
    return [logits[t - 1, ids[t]] for first, end in spans for t in range(first, end)]


def to_go(rewards: list[float], factor: float) -> list[float]:
    out, total = [], 0.0
    for x in reversed(rewards):
        total = x + factor * total
        out.insert(0, total)
    return out


def loss_by_hand(kind, trainer, inputs) -> torch.Tensor:
    """The first loss of a rollout by the formulas of the algorithms, over lists of drawn tokens."""
    args, answers, scores = trainer.args, trainer._answers, trainer._totals.tolist()
    n, hidden = answers.n_sequences, trainer._hidden

    def row(batch, i):
        return batch.prompt_tokens(i) + batch.completion_tokens(i), batch.turns[i]

    if kind == "online DPO":
        batches, totals = zip((answers, trainer._totals), *((b, s) for b, s, _ in hidden), strict=True)
        totals_KN, losses = torch.stack(totals), []
        for i in range(n):
            best, worst = int(totals_KN[:, i].argmax()), int(totals_KN[:, i].argmin())
            if totals_KN[best, i] > totals_KN[worst, i]:
                h = [
                    sum(by_hand(trainer, *row(batches[k], i)))
                    - sum(by_hand(trainer, *row(batches[k], i), reference=True))
                    for k in (best, worst)
                ]
                losses.append(-torch.nn.functional.logsigmoid(args.beta * (h[0] - h[1])))
        return torch.stack(losses).mean()
    new = [by_hand(trainer, *row(answers, i)) for i in range(n)]
    kl = [[float(a) - float(b) for a, b in zip(new[i], by_hand(trainer, *row(answers, i), reference=True), strict=True)]
          for i in range(n)]  # fmt: skip
    if kind == "best of N":
        chosen = [max(range(k, k + 4), key=scores.__getitem__) for k in range(0, n, 4)]
        return -sum(sum(new[i]) for i in chosen) / sum(len(new[i]) for i in chosen)
    if kind == "ReMax":
        greedy = hidden[0][1].tolist()
        kept = [[scores[i] - greedy[i] - args.beta * x for x in to_go(kl[i], 1.0)] for i in range(n)]
        return -sum(a * x for i in range(n) for a, x in zip(kept[i], new[i], strict=True)) / n
    if kind == "RLOO":
        totals = [scores[i] - args.beta * sum(kl[i]) for i in range(n)]
        others = [(sum(totals[i // 4 * 4 : i // 4 * 4 + 4]) - totals[i]) / 3 for i in range(n)]
        ratios = [torch.exp(sum(x) - sum(x).detach()) for x in new]
        return -sum((totals[i] - others[i]) * ratios[i] for i in range(n)) / n
    values = [inputs["of_values_M"][i][inputs["answer_mask"][i]].tolist() for i in range(n)]
    share = args.beta if kind == "REINFORCE" else 0.0
    rewards = [
        [-args.beta * x for x in kl[i][:-1]] + [(1 - share) * scores[i] - args.beta * kl[i][-1]] for i in range(n)
    ]
    if kind == "REINFORCE":
        returns = [to_go(rewards[i], args.gamma) for i in range(n)]
        advantages = [[g - v for g, v in zip(returns[i], values[i], strict=True)] for i in range(n)]
        denominator = n
    else:
        deltas = [
            [r + args.gamma * w - v for r, v, w in zip(rewards[i], values[i], [*values[i][1:], 0.0], strict=True)]
            for i in range(n)
        ]  # fmt: skip
        advantages = [to_go(deltas[i], args.gamma * args.lam) for i in range(n)]
        returns = [[a + v for a, v in zip(advantages[i], values[i], strict=True)] for i in range(n)]
        new = [[torch.exp(x - x.detach()) for x in row] for row in new]
        denominator = sum(map(len, new))
    policy = -sum(a * x for i in range(n) for a, x in zip(advantages[i], new[i], strict=True))
    value = sum((v - g) ** 2 / 2 for i in range(n) for v, g in zip(values[i], returns[i], strict=True))
    return (policy + args.vf_coef * value) / denominator


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "GRPO"])
def test_an_algorithm_learns_drawn_tokens_alone(kind, caller, tmp_path):
    method, changes = KINDS[kind]
    trainer = make(method, caller, tmp_path, [results, "reward_model"], changes=changes, tools=[multiply, add])
    generator = torch.Generator().manual_seed(0)
    for name, p in trainer.model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.05, generator=generator)
    if trainer.has_critic:
        trainer.hydra.heads["value"].weight.data.normal_(generator=generator)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    batch = [
        row for row in talks(2 if "num_generations" in changes else 8) for _ in range(changes.get("num_generations", 1))
    ]
    inputs = trainer._generate_and_score_completions(batch)
    found = loss_and_gradients(trainer, inputs)
    assert any(len(turns) > 1 for turns in trainer._answers.turns)
    trainer.model.zero_grad()
    expected = loss_by_hand(kind, trainer, inputs)
    expected.backward()
    assert float(found["loss"]) == pytest.approx(float(expected.detach()), abs=1e-4, rel=1e-4)
    plain = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None and ".default" in n}
    assert_equal({name: found[name] for name in plain}, plain)
    assert max(float(x.abs().max()) for x in plain.values()) > 1e-4


@pytest.mark.parametrize("method", ["ReMax", "HydraOnlineDPO"])
def test_hidden_answers_have_tools_and_environments_of_their_own(method, caller, tmp_path):
    seen = []

    def noted(prompts, completions, completion_ids, environments, **columns):
        seen.append((list(map(id, environments)), [env.calls for env in environments], completions, prompts))
        return [float(env.calls) for env in environments]

    trainer = make(method, caller, tmp_path, noted, changes={"max_steps": 1}, environment_factory=Counter)
    trainer.train()
    (hidden, hidden_calls, hidden_talks, asked), (shown, calls, talked, prompts) = seen
    assert len({*hidden, *shown}) == 16
    assert asked == prompts
    for counts, talk in ((hidden_calls, hidden_talks), (calls, talked)):
        for n, messages in zip(counts, talk, strict=True):
            said = [m["content"] for m in messages if m["role"] == "tool" and m["name"] == "multiply"]
            assert [text.partition(" of ")[2] for text in said] == [str(i + 1) for i in range(len(said))]
            assert n == len(said) or "tool_calls" in messages[-1]  # whose results found no room
    assert sum(calls)
    assert len(trainer._logs["prompt"]) == 8


def test_pairs_are_of_one_question(caller, tmp_path):
    class Moody(Counter):
        moods = 0

        def reset(self, **row):
            super().reset(**row)
            Moody.moods += 1
            return f" Mood {Moody.moods}."

    with pytest.raises(ConfigError, match="expected one prompt for every answer to a row, as online_dpo compares"):
        make("HydraOnlineDPO", caller, tmp_path, None, environment_factory=Moody).train()


# ---- what TRL's own tests ask ----------------------------------------------------------------------------------------


async def divide(a: int, b: int) -> float:
    """
    Divides two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The quotient.
    """
    return a / b


@pytest.mark.parametrize("tools", [[multiply], [multiply, add, divide]], ids=len)
def test_tools_are_called_and_the_policy_learns(tools, caller, tmp_path):
    trainer = make("HydraGRPO", caller, tmp_path, changes=GROUPS, tools=tools)
    before = trained(trainer)
    trainer.train()
    after = trained(trainer)
    assert not any(torch.equal(before[name], after[name]) for name in before if "lora_B" in name)
    for row in rows(trainer):
        assert row["tools/call_frequency"] > 0
        assert (row["tools/failure_frequency"] > 0) or len(tools) == 3
    said = {m["name"] for talk in trainer._logs["completion"] for m in talk if m["role"] == "tool"}
    assert {tool.__name__ for tool in tools} & said


def test_calls_that_are_no_json_are_answers(caller, tmp_path):
    trainer = make("HydraGRPO", caller, tmp_path, changes={**GROUPS, "max_steps": 1}, tools=[multiply])
    trainer.train()
    broken = [m for talk in trainer._logs["completion"] for m in talk if "[oops" in str(m["content"])]
    assert broken
    assert not any("tool_calls" in message for message in broken)


def test_environments_give_tools_prompts_and_rewards(caller, tmp_path):
    """One, beside a reward function or alone; several by name; one that has the data."""
    both = make("HydraGRPO", caller, tmp_path, changes=GROUPS, environment_factory=Counter)
    both.train()
    assert {"rewards/results/mean", "rewards/Counter/mean"} <= rows(both)[0].keys()
    assert all(prompt[-1]["content"].endswith(" Use the counter.") for prompt in both._logs["prompt"])
    alone = make("HydraGRPO", caller, tmp_path, None, changes=GROUPS, environment_factory=Counter)
    assert alone.reward_func_names == ["Counter"]
    alone.train()
    assert rows(alone)[0]["reward"] == rows(alone)[0]["rewards/Counter/mean"] > 0
    several = make(
        "HydraGRPO", caller, tmp_path, changes={**GROUPS, "shuffle_dataset": False},
        environment_factory={"count": Counter, "add": Adder}, dataset=talks(environment=["count", "add"]),
    )  # fmt: skip
    several.train()
    assert len(several._environment_pool["count"]) == len(several._environment_pool["add"]) == 4
    prompts = [p[-1]["content"].endswith(" Use the counter.") for p in several._logs["prompt"]]
    assert prompts == [True] * 4 + [False] * 4

    class Asking(Counter):
        def reset(self, **row):
            super().reset(**row)
            return "What is 3 times 11?"

    config = ours.HydraGRPOConfig(**{**GROUPS, "output_dir": str(tmp_path)})
    owned = ours.HydraGRPOTrainer(
        model=str(caller), args=config, processing_class=AutoTokenizer.from_pretrained(caller),
        peft_config=copy.deepcopy(LORA), environment_factory=Asking,
    )  # fmt: skip
    owned.train()
    assert owned.state.global_step == 2
    assert all(prompt[-1]["content"] == "What is 3 times 11?" for prompt in owned._logs["prompt"])


def test_what_is_refused_before_the_first_step(caller, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(caller)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    named = {"environment_factory": {"count": Counter, "add": Adder}}
    for message, options in (
        (r"train_dataset: expected environments of \['add', 'count'\] in `environment`, got \['chess'\]",
         {**named, "dataset": talks(environment=["count", "chess"])}),
        ("expected environments of .* got .'None'", {**named, "dataset": talks()}),
        ("train_dataset: expected conversations as prompts, which tools are called in, got texts",
         {"tools": [multiply], "dataset": Dataset.from_list([{"prompt": text} for text in QUESTIONS * 2])}),
        ("rollout_func: expected None, because remax compares answers with greedy ones",
         {"method": "ReMax", "rollout_func": lambda prompts, trainer: {}}),
        ("max_tool_calling_iterations: expected None or an integer >= 0, got -1",
         {"tools": [multiply], "changes": {"max_tool_calling_iterations": -1}}),
    ):  # fmt: skip
        options = {"method": "HydraGRPO", "caller": caller, "output": tmp_path, **options}
        with pytest.raises(ConfigError, match=message):
            make(**options)
    config = ours.HydraGRPOConfig(**{**GROUPS, "output_dir": str(tmp_path)})
    plain = {"model": str(caller), "args": config, "peft_config": copy.deepcopy(LORA)}
    for message, options in (  # GRPOTrainer's own
        (
            "does not support tool calling",
            {"processing_class": tokenizer, "tools": [multiply], "train_dataset": talks()},
        ),
        ("No reward source provided", {"environment_factory": Adder, "train_dataset": talks()}),
        ("`train_dataset` is required", {"reward_funcs": results}),
        ("requires a `train_dataset` with an `environment` column", named),
        ("must define a callable `reset`", {"environment_factory": object, "train_dataset": talks()}),
    ):
        with pytest.raises(ValueError, match=message):
            ours.HydraGRPOTrainer(**{"processing_class": AutoTokenizer.from_pretrained(caller), **plain, **options})
    config.max_steps = -1
    with pytest.raises(ValueError, match="`max_steps` must be set"):
        ours.HydraGRPOTrainer(
            **plain, processing_class=AutoTokenizer.from_pretrained(caller), environment_factory=Counter
        )


class Mute:
    def __str__(self):
        raise RuntimeError("no text")


BAD = {
    "expected a result of at most": "ab" * 5_000_000, "no text": Mute(), "got a list of int": [1, 2],
    "got a list of image": [{"type": "image", "image": b"x"}],
}  # fmt: skip


def test_results_that_are_no_text_or_find_no_room_are_failures(caller, tmp_path):
    said, kinds = [], iter(list(BAD.values()) * 100)

    def heard(prompts, completions, completion_ids, **columns):
        said.extend(m["content"] for talk in completions for m in talk if m["role"] == "tool" and m["name"] == "say")
        return [float(len(ids)) for ids in completion_ids]

    def say(a: int, b: int) -> str:
        """
        Says something.

        Args:
            a: The first integer.
            b: The second integer.

        Returns:
            What it says.
        """
        return next(kinds)

    say.__name__ = "multiply"
    changes = {**GROUPS, "max_completion_length": 120, "max_steps": 3}
    trainer = make("HydraGRPO", caller, tmp_path, heard, changes=changes, tools=[say])
    trainer.train()
    assert {row["tools/failure_frequency"] for row in rows(trainer)} == {1.0}
    told = [m["content"] for talk in trainer._logs["completion"] for m in talk if m["role"] == "tool"]
    assert told
    assert all(text.startswith("{'error': ") for text in told)


def test_half_a_character_is_none(caller, tmp_path):
    """A model may ask for a tool of such a name, and a tool may say it."""
    trainer = make("HydraGRPO", caller, tmp_path, changes=GROUPS, tools=[multiply])
    ids = trainer._get_tool_suffix_ids([{"role": "tool", "name": "\ud800", "content": "Tool \ud800 not found."}])
    assert "Tool ? not found." in trainer.processing_class.decode(ids)
    assert text_only(lambda: "\udfff!", 2)() == "?!"

    def fails():
        raise ValueError("\ud800" * 3)

    for most, message in ((3, r"^\?\?\?$"), (2, "expected a result of at most 2 characters, got 3")):
        with pytest.raises((RuntimeError, ValueError), match=message):
            text_only(fails, most)()


def test_a_result_without_room_ends_the_conversation(caller, tmp_path):
    """GRPOTrainer drops it; the answer is as long as it may be, or shorter."""
    changes = {**GROUPS, "max_completion_length": 20}
    trainer = make("HydraGRPO", caller, tmp_path, changes=changes, tools=[multiply, add])
    trainer.train()
    assert max(trainer._answers.lengths[i] - trainer._answers.prompt_lens[i] for i in range(8)) <= 20
    assert not any(m["role"] == "tool" for talk in trainer._logs["completion"] for m in talk)
    assert rows(trainer)[0]["tools/call_frequency"] > 0


# ---- draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [{}, {"top_k": 40, "top_p": 0.95}], ids=["all words", "some words"])
def test_in_exact_mode_log_probs_of_every_turn_are_those_of_scoring_to_the_bit(filters, caller, tmp_path):
    with registry.use_exact():
        changes = {**GROUPS, **filters}
        trainer = make("HydraGRPO", caller, tmp_path, changes=changes, tools=[multiply, add])
        inputs = trainer._generate_and_score_completions([row for row in talks(2) for _ in range(4)])
        assert max(len(turns) for turns in trainer._answers.turns) >= 3
        drawn = inputs["answer_mask"]
        assert torch.equal(inputs["sampling_per_token_logps"][drawn], inputs["of_old_logprobs_M"][drawn])
        trainer.current_gradient_accumulation_steps = 1
        trainer._compute_loss(trainer.model.train(), inputs)
    assert trainer._metrics["train"]["approx_kl"] == [0.0]
    assert ("support/mean" in trainer._metrics["train"]) == bool(filters)


def test_a_turn_costs_its_own_tokens(caller, tmp_path, monkeypatch):
    """Of one rollout: what an evaluation before it left in the cache is no part of it, nor of a resumed run's."""
    read = []

    def noted(model, requests, sampling):
        rollout = generate_requests(model, requests, sampling)
        read.append((rollout.stats.prompt_tokens, [request.prompt for request in requests]))
        return rollout

    monkeypatch.setattr("rlhf_engine.integrations.trl.base.generate_requests", noted)
    trainer = make("HydraGRPO", caller, tmp_path, changes=GROUPS, tools=[multiply, add])
    trainer.evaluate(talks(4))
    read.clear()
    trainer.model.train()
    trainer._generate_and_score_completions([row for row in talks(2) for _ in range(4)])
    (first, prompts), *later = read
    assert first == sum(map(len, set(prompts)))
    assert len(later) >= 2
    for tokens, prompts in later:
        assert tokens <= 64 * len(prompts) < sum(map(len, prompts)) / 2


@pytest.mark.parametrize(
    "kind", ["GRPO", "online DPO", *(pytest.param(k, marks=pytest.mark.long) for k in ("PPO", "RLOO"))]
)
def test_a_run_stopped_in_the_middle_of_a_rollout_goes_on_to_the_same_floats(kind, caller, tmp_path):
    method, changes = KINDS[kind]
    steps = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    changes = {**changes, **steps, "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "top_p": 0.9}
    options = {"environment_factory": Counter, "tools": [add], "changes": changes}
    whole = make(method, caller, tmp_path / "whole", **options)
    whole.train()
    expected = trained(whole)
    for step in (2, 3):
        resumed = make(method, caller, tmp_path / f"parts-{step}", **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        found = trained(resumed)
        assert all(torch.equal(expected[name], found[name]) for name in expected), step
    assert json.loads((tmp_path / "whole" / "checkpoint-3" / "progress_0.json").read_text())["parts"] == 4


@pytest.mark.parametrize("method", ["HydraGRPO", "HydraOnlineDPO"])
def test_a_rollout_function_may_draw_from_the_engine_and_leave_the_tools_to_trl(method, caller, tmp_path):
    """GRPOTrainer calls the tools that its answers ask for."""
    drawn = []

    def roll_out(prompts, trainer):
        ids, *_ = trainer._tokenize_prompts(prompts)
        first, logprobs = trainer._generate_single_turn(ids, None, {}, 4)
        second, _ = trainer._generate_single_turn(ids, None, {}, 4)
        drawn.append((first, second))
        return {"prompt_ids": ids, "completion_ids": copy.deepcopy(first), "logprobs": logprobs}

    changes = {**(GROUPS if method == "HydraGRPO" else SIZES), "top_p": 0.99, "max_steps": 1}
    with registry.use_exact():
        trainer = make(method, caller, tmp_path, changes=changes, tools=[multiply, add], rollout_func=roll_out)
        trainer.train()
    texts = {str(ids) for pair in drawn for each in pair for ids in each}
    assert len(texts) > 8
    assert all(first != second for first, second in drawn)
    answers = [trainer._answers.completion_tokens(i) for i in range(8)]
    assert [ids[: len(own)] for ids, own in zip(answers, drawn[-1][0], strict=True)] == drawn[-1][0]
    assert any(len(turns) > 1 for turns in trainer._answers.turns)
    sizes, turns = trainer._answers.supports.sizes, trainer._answers.turn_of_M
    assert bool((sizes[turns == 0] == len(trainer.processing_class)).all())  # of which TRL is told no words
    assert bool((sizes[turns > 0] < len(trainer.processing_class)).any())
    assert float(rows(trainer)[0]["approx_kl"]) == 0.0


@pytest.mark.parametrize("method", ["HydraGRPO", "HydraPPO", "HydraOnlineDPO"])
def test_a_rollout_function_brings_answers_masks_and_columns(method, caller, tmp_path):
    seen = []

    def roll_out(prompts, trainer):
        ids = trainer.processing_class.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)
        n, end = len(prompts), trainer.processing_class.eos_token_id
        answers = [[5 + i, 6, 7, 8, end] for i in range(n)]
        return {
            "prompt_ids": ids["input_ids"], "completion_ids": answers, "logprobs": [[-1.0] * 5] * n,
            "env_mask": [[1, 1, 0, 0, 1]] * n, "luck": [float(i) for i in range(n)],
        }  # fmt: skip

    def lucky(prompts, completions, completion_ids, luck, **columns):
        seen.append(completion_ids)
        return [x + len(seen) for x in luck]

    changes = GROUPS if method == "HydraGRPO" else SIZES
    trainer = make(method, caller, tmp_path, lucky, changes=changes, rollout_func=roll_out)
    before = trained(trainer)
    trainer.train()
    assert all(len(ids) == 5 for ids in seen[0])
    assert trainer._answers.turns[0] == tuple((trainer._answers.prompt_lens[0] + a, trainer._answers.prompt_lens[0] + b)
                                              for a, b in ((0, 2), (4, 5)))  # fmt: skip
    assert rows(trainer)[0]["completions/mean_length"] == 3
    assert any(not torch.equal(before[name], x) for name, x in trained(trainer).items())


def test_a_rollout_function_that_brings_something_else_is_told(caller, tmp_path):
    fine = {"prompt_ids": [[5]] * 8, "completion_ids": [[6, 7]] * 8, "logprobs": [[-1.0] * 2] * 8}
    for changes, message in (
        ({"completion_ids": [[6]] * 7}, "rollout_func: expected 8 answers, got 7 to 8 prompts"),
        ({"env_mask": [[1, 1]] * 7}, "rollout_func: expected 8 answers, got 8 to 8 prompts with 7 masks"),
        ({"prompt_ids": [[]] * 8}, r"rollout_func: prompt_ids\[0\]: expected at least one token"),
        ({"prompt_ids": [[5] * 1023] * 8}, r"rollout_func: prompt_ids\[0\]: expected at most 1022 tokens"),
        ({"completion_ids": [[6, 99999]] * 8}, r"rollout_func: completion_ids\[0\]: expected token ids of 0 to"),
        ({"env_mask": [[0, 0]] * 8}, r"rollout_func: expected an env_mask\[0\] of 0 and 1"),
        ({"env_mask": [[1]] * 8}, r"rollout_func: expected an env_mask\[0\] of 0 and 1"),
        ({"completion_ids": [[]] * 8}, r"rollout_func: expected an env_mask\[0\] of 0 and 1"),
    ):
        trainer = make(
            "HydraGRPO", caller, tmp_path, changes=GROUPS,
            rollout_func=lambda prompts, trainer, changes=changes: {**fine, **changes},
        )  # fmt: skip
        with pytest.raises(ValueError, match=message):
            trainer.train()
