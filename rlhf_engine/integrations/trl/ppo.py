"""PPO behind TRL: `HydraPPOTrainer` is TRL's GRPOTrainer with a critic, on one base.

    trainer = HydraPPOTrainer(
        model="path/to/model",
        args=HydraPPOConfig(output_dir="ppo"),
        reward_funcs=reward,                 # functions, models as in TRL, `lane` for a learned reward on the same base
        train_dataset=prompts,
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()

TRL's data, sampling order, rewards, logging, callbacks and checkpoints stay TRL's. What is ours: answers from the
rollout engine; log-probs of actor and reference, values and learned rewards in one traversal; advantages by GAE; and
the clipped losses of actor and critic. The actor is PEFT's adapter `default`, the critic is `critic`; a checkpoint's
root loads with plain PEFT, and `heads.safetensors` beside it has the value head.

Sizes are GRPO's: an optimizer step takes per_device_train_batch_size · gradient_accumulation_steps answers of each
process, `steps_per_generation` micro-batches share a rollout, and `num_iterations` are PPO's epochs.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file, save_file

from rlhf_engine.algorithms.ppo import advantages, token_kl, token_rewards
from rlhf_engine.errors import ConfigError, EngineError, NonFiniteError
from rlhf_engine.hydra import HydraModel, PackedBatch, PolicyLoss, ValueLoss, hydra_roles, peft_io, reward_model
from rlhf_engine.hydra.roles import OFF
from rlhf_engine.integrations.trl.shared import forward_through, hydra_on, is_on_same_tensors
from rlhf_engine.integrations.trl.versions import require_parameters, require_trl
from rlhf_engine.rollout import SamplingConfig, generate

require_trl()
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

LANE = "lane"
"""The learned reward among `reward_funcs`."""
ACTOR, CRITIC = "default", "critic"
"""PEFT's names of the adapters."""
_ROLLOUT_FILE = "rollout_{}.safetensors"
"""What a checkpoint in the middle of a rollout keeps of it, by process."""
_OVERRIDDEN = {
    "_generate_and_score_completions": ("inputs",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("model", "inputs"),
    "_tokenize_prompts": ("prompts",),
}


@dataclass
class HydraPPOConfig(GRPOConfig):
    """GRPOConfig with PPO's defaults, one answer per prompt, and what a critic needs.

    beta: coefficient of the KL to the reference in a token's reward. epsilon, epsilon_high: clipping of ratios.
    """

    num_generations: int | None = field(default=1, metadata={"help": "Answers per prompt."})
    beta: float = field(default=0.05, metadata={"help": "Coefficient of the KL in a token's reward."})
    num_iterations: int = field(default=1, metadata={"help": "Epochs over each rollout."})
    kl_estimator: str = field(default="k1", metadata={"help": "Estimate of the KL per token: k1 or k3."})
    gamma: float = field(default=1.0, metadata={"help": "Discount factor of the return."})
    lam: float = field(default=0.95, metadata={"help": "Lambda of generalised advantage estimation."})
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    cliprange_value: float = field(
        default=0.2, metadata={"help": "Values are clipped to the old value plus or minus this."}
    )
    whiten_advantages: bool = field(default=True, metadata={"help": "Advantages with mean 0 and variance 1."})
    missing_eos_penalty: float | None = field(default=None, metadata={"help": "Subtracted where an answer never ends."})
    critic_learning_rate: float | None = field(
        default=None, metadata={"help": "Of critic and value head; none: as actor."}
    )
    reward_adapter: str | None = field(
        default=None, metadata={"help": "PEFT folder of a LoRA reward model, for the reward function `lane`."}
    )

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:  # the last check but those of vLLM, which are not for here
            if self.num_generations != 1 or "at least 2 generations" not in str(error):
                raise
        checks = {
            "kl_estimator": (self.kl_estimator in ("k1", "k3"), "'k1' or 'k3'"),
            "gamma": (0 <= self.gamma <= 1, "a number from 0 to 1"),
            "lam": (0 <= self.lam <= 1, "a number from 0 to 1"),
            "vf_coef": (self.vf_coef >= 0, "a number >= 0"),
            "cliprange_value": (self.cliprange_value > 0, "a number > 0"),
            "use_vllm": (not self.use_vllm, "False: answers come from the rollout engine"),
            "top_p": (self.top_p == 1.0, "1.0: ratios are to the whole distribution"),
            "top_k": (not self.top_k or self.top_k < 0, "0: ratios are to the whole distribution"),
            "min_p": (self.min_p is None, "None: ratios are to the whole distribution"),
            "importance_sampling_level": (self.importance_sampling_level == "token", "'token'"),
        }
        for name, (fine, expected) in checks.items():
            if not fine:
                raise ConfigError(f"{name}: expected {expected}, got {getattr(self, name)!r}")


class HydraPPOTrainer(GRPOTrainer):
    """GRPOTrainer whose advantages come from a learned value, and whose losses are PPO's."""

    reward_func_names: list[str]
    _tag_names = ("trl", "rlhf-engine", "ppo")
    _name = "Hydra-PPO"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: HydraPPOConfig | None = None,
        *,
        peft_config: PeftConfig | None = None,
        **options: Any,
    ) -> None:
        """As GRPOTrainer. `lane` among reward_funcs is the learned reward: of `reward_adapter`, or the base's own head.

        Raises ConfigError for what cannot be served, among it a model without LoRA.
        """
        for name, parameters in _OVERRIDDEN.items():
            require_parameters(f"GRPOTrainer.{name}", getattr(GRPOTrainer, name), parameters)
        for name in ("tools", "environment_factory", "rollout_func", "quantization_config"):
            if options.get(name):
                raise ConfigError(f"{name}: expected None, which HydraPPOTrainer has no place for, got one")
        if peft_config is None and not isinstance(model, PeftModel):
            raise ConfigError(
                "peft_config: expected a LoraConfig: the base stays frozen, actor and critic are adapters"
            )
        source = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
        args = args or HydraPPOConfig(f"{Path(source).name or 'model'}-PPO")
        functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs or LANE]
        self._uses_lane = LANE in functions
        self.kl_coef = args.beta
        beta, args.beta = args.beta, 0.0  # the reference is asked here, beside everything else
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'")  # which is this package's choice
            super().__init__(
                model=model,
                reward_funcs=[self._lane_rewards if function == LANE else function for function in functions],
                args=args,
                peft_config=peft_config,
                rollout_func=_draw,
                **options,
            )
        args.beta = beta
        self.reward_func_names = [
            LANE if f == LANE else name for f, name in zip(functions, self.reward_func_names, strict=True)
        ]
        self.hydra = self._build(source, args)

    # ---- the model -------------------------------------------------------------------------------------------------

    def _build(self, source: str, args: HydraPPOConfig) -> HydraModel:
        peft_model = self.accelerator.unwrap_model(self.model)
        if CRITIC not in peft_model.peft_config:
            peft_model.add_adapter(CRITIC, peft_model.peft_config[ACTOR])
        roles = hydra_roles(reward_slot="reward" if args.reward_adapter else OFF)
        if not self._uses_lane:
            del roles["reward"]
        slots = {"reward": peft_io.read_slot_config(args.reward_adapter)} if args.reward_adapter else {}
        hydra = hydra_on(peft_model, roles, {"actor": ACTOR, "critic": CRITIC}, slots=slots, seed=args.seed)
        if self._uses_lane:
            head = reward_model.require_reward_head(args.reward_adapter or source, f"reward_funcs: {LANE!r}")
            reward_model.load_reward_head(hydra.heads["reward"], head, f"reward_funcs: {LANE!r}")  # type: ignore[arg-type]
        if args.gradient_checkpointing:
            hydra.backbone().enable_gradient_checkpointing()
        _train_both(peft_model, hydra)
        return hydra.eval()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """With a learning rate of their own for critic and value head, where there is one."""
        _train_both(self.accelerator.unwrap_model(self.model), self.hydra)
        optimizer = super().create_optimizer(*([] if model is None else [model]))
        rate = self.args.critic_learning_rate
        if rate is not None and len(optimizer.state) == 0:
            critic = {id(p) for p in self.hydra.trainable_parameters("critic").values()}
            for group in list(optimizer.param_groups):
                theirs = [p for p in group["params"] if id(p) in critic]
                group["params"] = [p for p in group["params"] if id(p) not in critic]
                if theirs:
                    optimizer.add_param_group(
                        {**{k: v for k, v in group.items() if k != "params"}, "params": theirs, "lr": rate}
                    )
        return optimizer

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        peft_io.save_heads(self.hydra.heads, {"value"}, output_dir or self.args.output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            return  # the next step draws anew
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        tensors = {
            f"{i}|{name}": x.detach().cpu().clone()  # parts may share one
            for i, part in enumerate(self._buffered_inputs)
            for name, x in part.items()
        }
        save_file(tensors, folder / _ROLLOUT_FILE.format(self.accelerator.process_index))

    def _load_rollout(self, folder: Path) -> None:
        """Where the run stood within a rollout, and what is left of that."""
        state = json.loads((folder / "trainer_state.json").read_text())
        self._step = state["global_step"] * self.args.gradient_accumulation_steps
        path = folder / _ROLLOUT_FILE.format(self.accelerator.process_index)
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            return
        if not path.is_file():
            raise ConfigError(
                f"resume_from_checkpoint: expected {path.name} in {str(folder)!r}, written by as many processes, with "
                "as many steps_per_generation and gradient_accumulation_steps; it is not there"
            )
        parts: dict[int, dict[str, torch.Tensor]] = {}
        for key, x in load_file(path, device=str(self.accelerator.device)).items():
            place, _, name = key.partition("|")
            parts.setdefault(int(place), {})[name] = x
        self._buffered_inputs = [parts[i] for i in range(len(parts))]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *([] if model is None else [model]))
        self._load_rollout(Path(resume_from_checkpoint))
        if "value" not in peft_io.load_heads_if_present(self.hydra.heads, resume_from_checkpoint):
            raise ConfigError(
                f"resume_from_checkpoint: expected {peft_io.HEADS_FILE} with the value head in "
                f"{resume_from_checkpoint!r}, which has none"
            )
        _train_both(self.accelerator.unwrap_model(self.model), self.hydra)

    # ---- experience ------------------------------------------------------------------------------------------------

    def _lane_rewards(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """The learned reward, as a reward function; of the traversal that serves the other roles as well."""
        rewards = self._scores.rewards_N
        assert rewards is not None
        return [float(x) for x in rewards]

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        self._answers = PackedBatch.from_lists(self._prompt_ids, completion_ids_list, device=self.accelerator.device)
        asked = ("actor", "reference", "critic", *(("reward",) if self._uses_lane else ()))
        self._scores = self.hydra.score(self._answers, asked, temperature=self.temperature)
        gathered: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        start = self.accelerator.process_index * len(prompts)
        own = gathered[start : start + len(prompts)]
        weights = self.reward_weights.to(own.device)
        self._totals = (own * weights).nansum(1)
        self._scored = ~own.isnan().all(1)
        return gathered

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        args, batch, scores = self.args, self._answers, self._scores
        mode = "train" if self.model.training else "eval"
        logprobs_M, ref_logprobs_M, values_M = scores.logprobs_M, scores.ref_logprobs_M, scores.values_M
        assert logprobs_M is not None
        assert ref_logprobs_M is not None
        assert values_M is not None
        totals = self._totals
        if args.missing_eos_penalty is not None:
            ended = [batch.completion_tokens(i)[-1] in self.eos_token_ids for i in range(batch.n_sequences)]
            totals = totals - args.missing_eos_penalty * (~torch.tensor(ended, device=totals.device))
        kl_M = token_kl(logprobs_M, ref_logprobs_M, args.kl_estimator)
        if not totals.isfinite().all() or not kl_M.isfinite().all():
            culprit = "reward" if not totals.isfinite().all() else "KL"
            raise NonFiniteError(f"{culprit} of an answer is not finite; no update was made from it")
        advantage_M, return_M = advantages(
            token_rewards(kl_M, totals, batch, self.kl_coef),
            values_M,
            batch,
            gamma=args.gamma,
            lam=args.lam,
            whiten_rewards=False,
            whiten_advantages=False,
        )
        keep_N = self._scored & output["completion_mask"].bool().any(1)
        keep_M = keep_N[batch.sequence_of_M]
        if args.whiten_advantages:
            advantage_M = self._whiten(advantage_M, keep_M)
        width = output["completion_ids"].shape[1]

        def padded(x_M: torch.Tensor) -> torch.Tensor:
            x = batch.pad(x_M)
            return torch.nn.functional.pad(x, (0, width - x.shape[1]))

        self._note(mode, kl=kl_M, value=values_M, returns=return_M)
        self._metrics[mode].pop("frac_reward_zero_std", None)  # of groups, which one answer is not
        return {
            **output,
            "advantages": padded(advantage_M),
            "returns": padded(return_M),
            "values": padded(values_M),
            "old_per_token_logps": padded(logprobs_M),
            "answer_mask": padded(torch.ones_like(kl_M)).bool(),
            "loss_mask": padded(keep_M.float()).bool(),
        }

    def _whiten(self, x_M: torch.Tensor, keep_M: torch.Tensor) -> torch.Tensor:
        """Mean 0 and variance 1 over the kept tokens of all processes."""
        kept = x_M[keep_M].double()
        sums = torch.stack([torch.ones_like(kept).sum(), kept.sum(), kept.square().sum()])
        n, total, squares = self.accelerator.reduce(sums, reduction="sum").tolist()
        if n < 2:
            return x_M
        mean = total / n
        variance = max(squares / n - mean * mean, 0.0) * n / (n - 1)
        return ((x_M.double() - mean) / (variance + 1e-8) ** 0.5).to(x_M.dtype)

    def _note(self, mode: str, **values_M: torch.Tensor) -> None:
        """Means over tokens of all processes."""
        names = {"kl": "kl", "value": "value/mean", "returns": "value/return"}
        for name, x in values_M.items():
            sums = self.accelerator.reduce(torch.stack([x.sum(), torch.ones_like(x).sum()]), reduction="sum")
            self._metrics[mode][names[name]].append(float(sums[0] / sums[1]))

    # ---- learning --------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        mode = "train" if self.model.training else "eval"
        answer = inputs["answer_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        real = torch.cat([inputs["prompt_mask"].bool(), answer], 1)
        batch = PackedBatch.from_padded(ids, real, inputs["prompt_mask"].sum(1).tolist())
        mask = inputs["loss_mask"][answer]
        args = self.args
        denom = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if mode == "train":  # the rollout's tokens, as many as an optimizer step takes of them
            denom = denom * self.current_gradient_accumulation_steps / args.steps_per_generation
        policy = PolicyLoss(
            old_logprob_M=inputs["old_per_token_logps"][answer],
            advantage_M=inputs["advantages"][answer],
            mask_M=mask,
            denom=float(denom),
            clip_low=self.epsilon_low,
            clip_high=self.epsilon_high,
            temperature=self.temperature,
        )
        value = ValueLoss(
            old_value_M=inputs["values"][answer],
            return_M=inputs["returns"][answer],
            mask_M=mask,
            denom=float(denom),
            clip=args.cliprange_value,
        )
        seed = args.seed * 1_000_003 + self._step
        found, critic = forward_through(model, (batch, (policy, value)), dropout_seed=seed)
        if not torch.isfinite(found.loss) or not torch.isfinite(critic.loss):
            raise NonFiniteError(f"the loss is {float(found.loss)} (policy), {float(critic.loss)} (value)")
        share = float(denom) / max(1, int(mask.sum()))  # from sums over the window to means over this micro-batch
        metrics = self._metrics[mode]
        for name, x in {
            "policy_loss": found.policy_loss,
            "value/loss": critic.loss,
            "entropy": found.entropy,
            "clip_ratio": found.clip_fraction,
            "approx_kl": found.approx_kl,
            "value/clip_ratio": critic.clip_fraction,
        }.items():
            metrics[name].append(self.accelerator.gather(x.detach().float() * share).mean().item())
        return found.loss + args.vf_coef * critic.loss


def _train_both(peft_model: PeftModel, hydra: HydraModel) -> None:
    """Actor and critic take gradients: PEFT freezes every adapter but the active one, whenever it is told which."""
    peft_model.set_adapter(ACTOR)
    for role in ("actor", "critic"):
        for p in hydra.trainable_parameters(role).values():
            p.requires_grad_(True)
    if not is_on_same_tensors(hydra, peft_model):
        raise EngineError(
            "the adapters of the PeftModel were replaced by others: what is trained would not be what runs"
        )


def _draw(prompts: list[Any], trainer: HydraPPOTrainer) -> dict[str, Any]:
    """Answers from the rollout engine; random numbers are a function of seed, step and place."""
    ids, *_ = trainer._tokenize_prompts(prompts)
    trainer._prompt_ids = [list(x) for x in ids]
    training = trainer.model.training
    every = trainer.args.steps_per_generation * trainer.num_iterations
    count = trainer._step // every if training else trainer.state.global_step
    first = (count * trainer.accelerator.num_processes + trainer.accelerator.process_index) * len(ids)
    sampling = SamplingConfig(
        max_completion_length=trainer.max_completion_length,
        eos_token_ids=tuple(trainer.eos_token_ids),
        temperature=trainer.temperature,
        seed=2 * trainer.args.seed + (not training),
    )
    found = generate(trainer.hydra, trainer._prompt_ids, sampling, sample_ids=range(first, first + len(ids)))
    answers = [list(found.batch.completion_tokens(i)) for i in range(len(ids))]
    logprobs = found.logprobs_M.split([len(answer) for answer in answers])
    return {"prompt_ids": trainer._prompt_ids, "completion_ids": answers, "logprobs": [x.tolist() for x in logprobs]}
