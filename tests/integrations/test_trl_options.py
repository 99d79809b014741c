"""Options of TRL's configurations: each is served, harmless or refused, and what is served has TRL's numbers."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")

from trl import GRPOConfig, GRPOTrainer, RewardConfig, RLOOConfig, RLOOTrainer, TrlParser

from rlhf_engine.config.algorithm import ALGORITHMS
from rlhf_engine.errors import ConfigError
from rlhf_engine.integrations.trl import (
    HydraBestOfNConfig,
    HydraGRPOConfig,
    HydraGRPOTrainer,
    HydraOnlineDPOConfig,
    HydraPPOConfig,
    HydraPPOTrainer,
    HydraReinforceConfig,
    HydraRLOOConfig,
    HydraRLOOTrainer,
    ReMaxConfig,
)
from rlhf_engine.integrations.trl.config import ALSO_DEFAULT, HARMLESS, OF_ALGORITHMS, REFUSED, SERVED, HydraConfig
from rlhf_engine.integrations.trl.reward import SERVED_FOR_THUMBS
from tests.integrations.trl_runs import LORA, QUICK, make_trainer, words
from tests.training.test_data import PROMPTS

CONFIGS = {
    "PPO": HydraPPOConfig, "REINFORCE": HydraReinforceConfig, "ReMax": ReMaxConfig, "RLOO": HydraRLOOConfig,
    "GRPO": HydraGRPOConfig, "best of N": HydraBestOfNConfig, "online DPO": HydraOnlineDPOConfig,
}  # fmt: skip
KWARGS = '{"use_reentrant": false}'
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "trl.md"
ONE_BATCH = {**QUICK, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 4}


def options(*configs) -> dict[str, dataclasses.Field]:
    return {option.name: option for config in configs for option in dataclasses.fields(config)}


def test_every_option_of_trl_is_served_harmless_or_refused():
    """A new version of TRL or transformers changes these sets, and the tables in docs/guides/trl.md."""
    sets = {"served": set(SERVED), "harmless": set(HARMLESS), "refused": set(REFUSED)}
    assert not sets["served"] & sets["harmless"]
    assert not sets["refused"] & (sets["served"] | sets["harmless"])
    assert not OF_ALGORITHMS.keys() & set().union(*sets.values())
    of_grpo = OF_ALGORITHMS.keys() & set(options(GRPOConfig))
    known = of_grpo.union(*sets.values())
    assert set(options(GRPOConfig)) - known == set()
    assert set(options(RLOOConfig)) - known - set(options(HydraRLOOConfig)) == set()
    # a name that TRL gives up would never be checked; these two are younger than the oldest transformers
    newer = {"activation_checkpointing", "activation_checkpointing_kwargs"}
    assert known - set(options(GRPOConfig)) in (set(), newer)


def other(option: dataclasses.Field):
    """A value that an option does not have by default."""
    default = option.default
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default + 1
    return ["x"] if default is dataclasses.MISSING else f"{default or ''}x"


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_refused_has_to_stay_at_its_default(kind, tmp_path):
    config = CONFIGS[kind]
    facts = config(str(tmp_path), use_cpu=True, bf16=False).facts
    unread = {name for name, ours in OF_ALGORITHMS.items() if ours not in facts.reads}
    for name in REFUSED.keys() | unread:
        value = other(options(config)[name])
        assert value not in ALSO_DEFAULT.get(name, ())
        with pytest.raises(ConfigError, match=f"^{name}: expected .*, because .*, got ") as error:
            config(str(tmp_path), use_cpu=True, bf16=False, **{name: value})
        assert str(error.value).endswith(f"got {value!r}")


def test_other_ways_to_write_a_default(tmp_path):
    for name, values in ALSO_DEFAULT.items():
        for value in values:
            HydraPPOConfig(str(tmp_path), use_cpu=True, bf16=False, **{name: value})


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_command_line_that_names_none_of_them_is_served(kind, tmp_path):
    """Parsers make other defaults of some options."""
    given = {"output_dir": str(tmp_path), "use_cpu": "True", "bf16": "False", "gradient_checkpointing_kwargs": KWARGS}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    (config,) = TrlParser(CONFIGS[kind]).parse_args_and_config(words)
    assert config.gradient_checkpointing_kwargs == {"use_reentrant": False}


def test_an_option_that_no_set_names_has_to_stay_at_its_default(tmp_path, monkeypatch):
    newer = dataclasses.make_dataclass("GRPOConfig", [("novelty", float, 0.5)], bases=(GRPOConfig,))
    monkeypatch.setattr("rlhf_engine.integrations.trl.config.GRPOConfig", newer)
    config = dataclasses.make_dataclass("Newer", [("novelty", float, 0.5)], bases=(HydraPPOConfig,))
    config(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ConfigError, match=r"novelty: expected 0\.5, because ppo does not read it, got 0\.7"):
        config(str(tmp_path), use_cpu=True, bf16=False, novelty=0.7)


def test_the_tables_in_the_guide_are_those_of_the_sets():
    def cell(config, name):
        if name in OF_ALGORITHMS:
            facts = ALGORITHMS[options(config)["algorithm"].default]
            return "yes" if OF_ALGORITHMS[name] in facts.reads else "–"
        read = name in SERVED | HARMLESS or (name not in REFUSED and name in options(config))
        return "yes" if read else "–"

    common = set(options(RewardConfig)) & set(options(GRPOConfig))  # transformers' own and TRL's for all trainers
    names = sorted(set(options(GRPOConfig, RLOOConfig)) - common)
    cells = {name: [cell(config, name) for config in CONFIGS.values()] for name in names}
    rows = [f"| `{name}` | {' | '.join(row)} |" for name, row in cells.items() if len(set(row)) == 2]
    header = [f"| option | {' | '.join(CONFIGS)} |", f"|{'---|' * (len(CONFIGS) + 1)}"]
    text = GUIDE.read_text(encoding="utf-8")
    assert "\n".join([*header, *rows]) + "\n" in text
    because: dict[str, dict[str, None]] = {}
    for name in (name for name, row in cells.items() if "yes" not in row):
        because.setdefault(REFUSED[name], {})["vllm_…" if name.startswith("vllm_") else name] = None
    rows = [f"| {why} | {', '.join(f'`{name}`' for name in because[why])} |" for why in sorted(because)]
    assert "\n".join(["| refused by all, because | options |", "|---|---|", *rows]) + "\n" in text
    refused = ", ".join(f"`{name}`" for name in sorted(common & set(REFUSED)))
    assert refused in text.replace("\n", " ")


def test_every_option_of_a_reward_model_is_read_for_thumbs_or_refused():
    own = set(options(RewardConfig)) - set(options(HydraConfig))
    assert own - set(SERVED_FOR_THUMBS) == {"center_rewards_coefficient"}


def test_values_that_cannot_be_served(tmp_path):
    for changes, message in (
        (
            {"torch_compile": True, "gradient_checkpointing": True},
            "torch_compile: expected False with gradient_checkpointing=True, .* got True",
        ),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "gradient_checkpointing_kwargs: expected None or"),
        ({"delta": 1.1}, r"delta: expected None or a number >= 1 \+ epsilon_high, got 1\.1"),
        ({"reward_clip_range": (1.0, 0.0)}, "reward_clip_range: expected None or two numbers, the lower one first"),
    ):
        with pytest.raises(ConfigError, match=message):
            HydraPPOConfig(str(tmp_path), use_cpu=True, bf16=False, **changes)


def beside(ours, kind, config, folder, reward_funcs=words, *, std=0.3, **options):
    """TRL's own trainer with the weights of one of ours, whose adapters get random ones first."""
    theirs = kind(
        model=str(folder), reward_funcs=reward_funcs, args=config, train_dataset=ours.train_dataset,
        processing_class=ours.processing_class, peft_config=copy.deepcopy(LORA), **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    mine, their = dict(ours.model.named_parameters()), dict(theirs.model.named_parameters())
    with torch.no_grad():
        for name, p in mine.items():
            if "lora_B.default" in name:
                p.normal_(std=std, generator=generator)
            if name in their:
                their[name].copy_(p)
    for trainer in (ours, theirs):
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
    return theirs


def loss_and_gradients(trainer, inputs) -> dict[str, torch.Tensor]:
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None and ".default" in n}
    return {"loss": loss.detach(), **grads}


def assert_equal(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert float((mine[name] - expected).abs().max()) <= 1e-5 + 1e-4 * float(expected.abs().max()), name


def drift(inputs) -> torch.Tensor:
    """What log-probs have moved by since, enough for ratios beyond every clip."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(inputs["completion_ids"].shape, generator=generator) * inputs["answer_mask"]


@pytest.mark.parametrize("changes", [{}, {"epsilon_high": 0.4, "delta": 1.4, "entropy_coef": 0.3}])
def test_ppo_has_the_policy_loss_of_grpo_trainer(changes, folder, tmp_path):
    """GRPOTrainer takes advantages of tokens, too; its loss `dapo` is a mean over tokens."""
    ours = make_trainer(
        HydraPPOTrainer, HydraPPOConfig(str(tmp_path), **{**ONE_BATCH, "vf_coef": 0.0, **changes}), folder
    )
    theirs = beside(
        ours, GRPOTrainer, GRPOConfig(str(tmp_path), **ONE_BATCH, beta=0.0, loss_type="dapo", **changes), folder
    )
    inputs = ours._generate_and_score_completions([{"prompt": p} for p in PROMPTS[:2] for _ in range(4)])
    old = inputs["of_old_logprobs_M"] + drift(inputs)
    mine = loss_and_gradients(ours, {**inputs, "of_old_logprobs_M": old})
    shown = {"old_per_token_logps": old, "advantages": inputs["of_advantages_M"]}
    expected = loss_and_gradients(theirs, {**inputs, **shown})
    assert_equal(mine, expected)
    assert float(mine["loss"]) != 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask_truncated_completions": True, "loss_type": "grpo", "scale_rewards": "none", "beta": 0.1},
        {"mask_truncated_completions": True, "loss_type": "dr_grpo", "epsilon_high": 0.4},
        {"mask_truncated_completions": True, "loss_type": "dapo", "delta": 1.5, "beta": 0.1},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "defaults",
)
def test_grpo_has_the_advantages_and_the_loss_of_grpo_trainer(changes, folder, tmp_path):
    given = {**ONE_BATCH, **changes}
    ours = make_trainer(HydraGRPOTrainer, HydraGRPOConfig(str(tmp_path), **given), folder)
    plain = {"use_bias_correction_kl": False} if "use_bias_correction_kl" in options(GRPOConfig) else {}
    theirs = beside(ours, GRPOTrainer, GRPOConfig(str(tmp_path), **given, **plain), folder)
    rows = [{"prompt": p} for p in PROMPTS[:2] for _ in range(4)]
    inputs = ours._generate_and_score_completions(rows)
    answers = [list(ours._answers.completion_tokens(i)) for i in range(8)]
    theirs._generate_single_turn = lambda *arguments, **options: (answers, None)
    expected = theirs._generate_and_score_completions(rows)
    whole_N = inputs["completion_mask"].any(1)
    assert 0 < int(whole_N.sum()) < 8 or not ours.mask_truncated_completions
    assert torch.allclose(inputs["of_advantages_M"][:, 0], expected["advantages"] * whole_N, atol=1e-5)
    assert torch.allclose(torch.tensor(ours._logs["advantages"]), expected["advantages"], atol=1e-5)
    assert float(expected["advantages"].abs().max()) > 0.1
    old = inputs["of_old_logprobs_M"] + drift(inputs)
    mine = loss_and_gradients(ours, {**inputs, "of_old_logprobs_M": old})
    assert_equal(mine, loss_and_gradients(theirs, {**expected, "old_per_token_logps": old}))
    assert float(mine["loss"]) != 0.0


@pytest.mark.parametrize(
    "changes", [{}, {"normalize_advantages": True, "reward_clip_range": (2.0, 4.0), "epsilon_high": 0.4}], ids=str
)
def test_rloo_has_the_advantages_and_the_loss_of_rloo_trainer(changes, folder, tmp_path):
    given = {**ONE_BATCH, "beta": 0.1, **changes}
    ours = make_trainer(HydraRLOOTrainer, HydraRLOOConfig(str(tmp_path), **given), folder)
    theirs = beside(ours, RLOOTrainer, RLOOConfig(str(tmp_path), **given), folder)
    rows = [{"prompt": p} for p in PROMPTS[:2] for _ in range(4)]
    inputs = ours._generate_and_score_completions(rows)
    answers = [list(ours._answers.completion_tokens(i)) for i in range(8)]
    theirs._generate_single_turn = lambda prompt_ids, images, fields: answers
    expected = theirs._generate_and_score_completions(rows)
    assert torch.allclose(inputs["of_advantages_M"][:, 0], expected["advantages"], atol=1e-5)
    assert float(expected["advantages"].abs().max()) > 0.1
    moved = drift(inputs)
    mine = loss_and_gradients(ours, {**inputs, "of_old_logprobs_M": inputs["of_old_logprobs_M"] + moved})
    assert_equal(mine, loss_and_gradients(theirs, {**expected, "old_logps": expected["old_logps"] + moved.sum(1)}))


def test_the_entropy_bonus_of_rloo_is_a_mean_over_kept_tokens(folder, tmp_path):
    trainer = make_trainer(HydraRLOOTrainer, HydraRLOOConfig(str(tmp_path), **ONE_BATCH, beta=0.0), folder)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": p} for p in PROMPTS[:2] for _ in range(4)])
    inputs["loss_mask"][0] = False
    inputs["num_items_in_batch"] = inputs["loss_mask"].sum()
    plain = trainer._compute_loss(trainer.model, inputs).detach()
    entropy = trainer._metrics["train"]["entropy"][-1]
    trainer.algorithm.options = dataclasses.replace(trainer.algorithm.options, entropy_coef=0.5)
    assert float(trainer._compute_loss(trainer.model, inputs).detach() - plain) == pytest.approx(
        -0.5 * entropy, rel=1e-4
    )
