"""Pairs labelled by a gold reward model, on which a proxy then learns (Gao and others, arXiv 2210.10760).

The gold model takes the place of people: it is known, so that what a policy gains by the proxy can be compared with
what it gains by gold. Pairs whose answers it gives the same reward are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhf_engine.config import RewardConfig
from rlhf_engine.devices import DTYPES, resolve_device
from rlhf_engine.errors import ConfigError
from rlhf_engine.evaluation import measure
from rlhf_engine.hydra import OFF, HydraModel, RoleSpec, peft_io, reward_model
from rlhf_engine.hydra.heads import ScalarHead
from rlhf_engine.hydra.loading import read_vocabulary
from rlhf_engine.tokenizing import load_tokenizer, require_same_tokens
from rlhf_engine.training.reward_model.data import RewardExample


@dataclass(frozen=True, kw_only=True)
class GoldLabels:
    """Pairs as a gold reward model sees them."""

    examples: list[RewardExample]
    """Pairs with the better answer first."""
    turned: int
    """Pairs whose data said otherwise."""
    ties: int
    """Pairs that were left out."""

    def text(self, argument: str) -> str:
        """Describe the counts in one line; `argument` is the option that names the pairs."""
        n = len(self.examples)
        share = f" ({self.turned / n:.1%})" if n else ""
        return (
            f"{argument}: {n} pairs labelled by gold, {self.turned}{share} against the data, {self.ties} ties left out"
        )


def load_gold(config: RewardConfig) -> HydraModel:
    """Load the gold reward model, with the role `reward`."""
    dtype, device = DTYPES[config.dtype], resolve_device(config.device)
    roles, slots = {"reward": RoleSpec(slot=OFF, head="reward")}, {}
    if config.gold_adapter is not None:
        option, source, base = "gold_adapter", config.gold_adapter, config.model_name_or_path
        roles = {"reward": RoleSpec(slot="reward", head="reward")}
        slots = {"reward": peft_io.read_slot_config(source)}
    else:
        assert config.gold_model_path is not None
        option, source, base = "gold_model_path", config.gold_model_path, config.gold_model_path
        try:
            require_same_tokens(
                load_tokenizer(config.model_name_or_path), source, read_vocabulary(config.model_name_or_path)
            )
        except ConfigError as error:
            raise ConfigError(str(error).replace("reward_model_path", option)) from error
    head = reward_model.require_reward_head(source, option)
    model = HydraModel.from_pretrained(base, roles=roles, slots=slots, dtype=dtype, device=device)
    scalar_head = model.heads["reward"]
    assert isinstance(scalar_head, ScalarHead)
    reward_model.load_reward_head(scalar_head, head, option)
    return model


def label_pairs(model: HydraModel, examples: Sequence[RewardExample]) -> GoldLabels:
    """Put the better answer of each pair first, by the gold model; the pairs keep their order."""
    if any(example.label is not None for example in examples):
        raise ConfigError("gold_model_path, gold_adapter: expected pairs (chosen and rejected), got single answers")
    if any(example.margin for example in examples):
        raise ConfigError(
            "gold_model_path, gold_adapter: expected pairs without a margin, which the data say, got some"
        )
    prompts = [example.prompt for example in examples for _ in example.answers]
    answers = [answer for example in examples for answer in example.answers]
    rewards = measure.rewards(model, prompts, answers).view(-1, 2).tolist()
    labelled, turned = [], 0
    for example, (chosen, rejected) in zip(examples, rewards, strict=True):
        if chosen == rejected or example.answers[0] == example.answers[1]:  # the same answer twice may round apart
            continue
        turned += chosen < rejected
        labelled.append(example if chosen > rejected else replace(example, answers=example.answers[::-1]))
    return GoldLabels(examples=labelled, turned=turned, ties=len(examples) - len(labelled))
