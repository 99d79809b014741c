"""Options of our trainers behind TRL: GRPOConfig, with what an algorithm reads beside it.

Every option of GRPOConfig is served, harmless, refused, or one that some algorithms read. These four sets name every
option of the versions of TRL and transformers that this package knows. One that stands nowhere, as of a newer TRL, has
to stay at its default.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlhf_engine.config.algorithm import ALGORITHMS, AlgorithmFacts, AlgorithmOptions
from rlhf_engine.errors import ConfigError
from rlhf_engine.integrations.trl.patching import require_trl

require_trl()
from trl import GRPOConfig  # noqa: E402

_SERVED = (
    "accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon "
    "bf16 chat_template_kwargs dataloader_drop_last ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb "
    "ddp_find_unused_parameters ddp_static_graph ddp_timeout disable_dropout enable_jit_checkpoint entropy_coef "
    "eval_delay eval_on_start eval_steps eval_strategy fp16 full_determinism generation_batch_size "
    "gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs greater_is_better "
    "ignore_data_skip learning_rate load_best_model_at_end loss_type lr_scheduler_kwargs lr_scheduler_type "
    "mask_truncated_completions max_completion_length max_grad_norm max_steps max_tool_calling_iterations "
    "metric_for_best_model min_p model_init_kwargs num_generations num_generations_eval num_iterations "
    "num_train_epochs optim optim_args "
    "optim_target_modules output_dir per_device_eval_batch_size per_device_train_batch_size remove_unused_columns "
    "restore_callback_states_from_checkpoint reward_weights save_on_each_node save_only_model save_steps save_strategy "
    "save_total_limit seed shuffle_dataset steps_per_generation temperature tf32 top_k top_p torch_compile "
    "torch_compile_backend torch_compile_mode trust_remote_code use_cpu warmup_steps weight_decay"
)
SERVED = frozenset(_SERVED.split())
"""Options of GRPOConfig that are read by all of our trainers, or for them by TRL, transformers and accelerate."""

_HARMLESS = (
    "dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers "
    "dataloader_pin_memory dataloader_prefetch_factor debug disable_tqdm do_eval do_predict do_train "
    "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object hub_always_push hub_model_id "
    "hub_private_repo hub_revision hub_strategy hub_token local_rank log_completions log_completions_hub_repo "
    "log_level log_level_replica log_multimodal log_on_each_node log_unique_prompts logging_first_step "
    "logging_nan_inf_filter logging_steps logging_strategy num_completions_to_print pad_to_multiple_of "
    "prediction_loss_only project push_to_hub report_to resume_from_checkpoint run_name skip_memory_metrics "
    "torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id"
)
HARMLESS = frozenset(_HARMLESS.split())
"""Options that no number of a run depends on: logging, the hub, how rows are loaded, how padding is sized."""

_REFUSED = {
    "`entropy_coef` is a constant": (
        "entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target use_adaptive_entropy"
    ),
    "`num_tokens` counts them": "include_num_input_tokens_seen",
    "a rollout is cut up by fixed sizes": "auto_find_batch_size",
    "answers come from this package's rollout engine": (
        "cache_implementation generation_kwargs transformers_continuous_batching_config "
        "use_transformers_continuous_batching use_transformers_paged use_vllm vllm_enable_sleep_mode "
        "vllm_gpu_memory_utilization vllm_group_port vllm_importance_sampling_cap vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port "
        "vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size"
    ),
    "answers have no labels": "label_smoothing_factor",
    "evaluation and training share the base, which would stay rounded": "bf16_full_eval fp16_full_eval",
    "evaluation makes no predictions": "batch_eval_metrics include_for_metrics label_names",
    "every process holds the whole base": "deepspeed ds3_gather_for_generation fsdp fsdp_config parallelism_config",
    "log-probs are in fp32 from the base's own head": "cast_lm_head_to_fp32",
    "no KL is weighed by the ratio": "use_bias_correction_kl",
    "only the rollout engine has a cache": "use_cache",
    "prompts are drawn in TRL's order for groups": "length_column_name train_sampling_strategy",
    "prompts are shuffled by `seed`": "data_seed",
    "ratios are to the policy without it": "repetition_penalty",
    "ratios would be to a policy without the noise": "neftune_noise_alpha",
    "rewards are summed": "multi_objective_aggregation",
    "the base runs on this package's kernels": "liger_kernel_config use_liger_kernel",
    "the loss is not GRPO's": (
        "importance_sampling_level off_policy_mask_threshold sapo_temperature_neg sapo_temperature_pos "
        "top_entropy_quantile vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos"
    ),
    "the reference stays the policy that the run started from": (
        "ref_model_mixup_alpha ref_model_sync_steps sync_ref_model"
    ),
    "the router is frozen with the base": "router_aux_loss_coef",
    "tokens are always counted over all processes": "average_tokens_across_devices",
}
REFUSED = {name: why for why, names in _REFUSED.items() for name in names.split()}
"""Options that have to stay at their defaults, and why."""

_AS_OURS = "beta critic_learning_rate cliprange_value delta gamma kl_estimator lam scale_rewards vf_coef"
OF_ALGORITHMS = {name: name for name in _AS_OURS.split()} | {"epsilon": "cliprange", "epsilon_high": "cliprange"}
"""Options that not every algorithm reads, and their names in `rlhf_engine.config.algorithm`."""

ALSO_DEFAULT = {"include_num_input_tokens_seen": (False,), "scale_rewards": (False, "none")}
"""Other ways to write a default."""
Checks = dict[str, tuple[bool, str]]  # option → (whether it can be served, what is expected)


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class HydraConfig(GRPOConfig):
    """GRPOConfig with the options that all of our trainers read beside it. An option that they do not read is refused.

    The options below are GRPOConfig's own, under the same names.

    Args:
        epsilon: ratios are clipped to at least 1 − this, > 0.
        epsilon_high: ratios are clipped to at most 1 + this, > 0; None: `epsilon`.
        delta: largest ratio of a token with negative advantage, at least the upper clip; None: no such bound.
        entropy_coef: coefficient of the mean entropy per token.
    """

    algorithm: str = _option("ppo", f"One of {', '.join(ALGORITHMS)}.")
    loss_type: str | None = _option(None, "Kind of loss; none: the algorithm's first.")
    scale_rewards: str | None = _option(
        None, "group or none; of PPO group gives advantages mean 0 and variance 1. None: group where it is read."
    )
    num_generations: int | None = _option(None, "Answers per prompt; none: the algorithm's.")
    beta: float = _option(0.05, "Coefficient of the KL to the reference.")
    num_iterations: int = _option(1, "Epochs over each rollout.")
    kl_estimator: str = _option("k1", "Estimate of the KL per token: k1 or k3.")
    gamma: float = _option(1.0, "Discount factor of the return.")
    lam: float = _option(0.95, "Lambda of generalised advantage estimation.")
    vf_coef: float = _option(0.1, "Weight of the value loss.")
    cliprange_value: float | None = _option(
        0.2, "Values are clipped to the old value plus or minus this; none: no clipping."
    )
    critic_learning_rate: float | None = _option(None, "Of critic and value head; none: as actor.")
    missing_eos_penalty: float | None = _option(None, "Subtracted where an answer never ends.")
    reward_clip_range: tuple[float, float] | None = _option(
        None, "Bounds of an answer's weighted rewards, before any penalty."
    )
    reward_adapter: str | None = _option(
        None, "PEFT folder of a LoRA reward model, for the reward function `reward_model`."
    )

    use_bias_correction_kl: bool = _option(False, "Refused where it is True.")

    hidden_answers: ClassVar[int] = 0
    """Further answers to each prompt that TRL is not shown; a greedy one is not counted."""

    @property
    def facts(self) -> AlgorithmFacts:
        """Facts of the algorithm."""
        return ALGORITHMS[self.algorithm]

    def __post_init__(self) -> None:
        self._require({"algorithm": (self.algorithm in ALGORITHMS, f"one of {', '.join(ALGORITHMS)}")})
        self._require({"algorithm": self._fits_class()})
        of_grpo = {option.name for option in dataclasses.fields(GRPOConfig)} - SERVED - HARMLESS - OF_ALGORITHMS.keys()
        of_others = {name for name, ours in OF_ALGORITHMS.items() if ours not in self.facts.reads}
        self._require(self._unread(*sorted(of_grpo | of_others)))
        self._fill_in()
        try:
            super().__post_init__()
        except ValueError as error:  # the last check but those of vLLM, which are not for here
            if self.num_generations != 1 or "at least 2 generations" not in str(error):
                raise
        self._require(self._ranges())
        self._require(self._checks())

    def _fits_class(self) -> tuple[bool, str]:
        """The check of `algorithm` against the class: one that names an algorithm has no other."""
        classes = [cls for cls in type(self).__mro__ if cls is not HydraConfig]
        if any("algorithm" in vars(cls).get("__annotations__", {}) for cls in classes):
            default = next(option.default for option in dataclasses.fields(self) if option.name == "algorithm")
            return self.algorithm == default, f"{default!r} for {type(self).__name__}; HydraConfig takes others"
        single = self.facts.answers_together == 1
        return single, "an algorithm that learns from single answers; online_dpo has a config of its own"

    def _fill_in(self) -> None:
        facts = self.facts
        if self.loss_type is None:
            self.loss_type = (*facts.loss_types, self.algorithm)[0]
        if self.scale_rewards is None:
            self.scale_rewards = "group" if "scale_rewards" in facts.reads else "none"
        if self.num_generations is None:
            self.num_generations = 1 if facts.with_greedy else facts.generations

    def algorithm_options(self) -> AlgorithmOptions:
        """Options of the algorithm, under the names that `rlhf-engine train` has.

        Returns:
            The options that the algorithm reads; the others are at their defaults.

        Raises:
            ConfigError: an option out of its range.
        """
        fields = {option.name for option in dataclasses.fields(AlgorithmOptions)}
        names = {ours: name for name, ours in OF_ALGORITHMS.items() if ours in fields and ours in self.facts.reads}
        read = {ours: getattr(self, name) for ours, name in names.items()}
        if "cliprange" in read:
            read["cliprange"] = [self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high]
        if self.facts.loss_types:
            read["loss_type"] = self.loss_type
        return AlgorithmOptions(algorithm=self.algorithm, entropy_coef=self.entropy_coef, **read)

    def _require(self, checks: Checks) -> None:
        for name, (fine, expected) in checks.items():
            if not fine:
                raise ConfigError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

    def _ranges(self) -> Checks:
        """Checks of single options, but for those of `AlgorithmOptions`, which checks its own."""
        length, bounds, rate = self.max_completion_length, self.reward_clip_range, self.critic_learning_rate
        kinds = self.facts.loss_types or (self.algorithm,)
        upper = 1 + (self.epsilon_high or self.epsilon)
        is_range = bounds is None or (isinstance(bounds, (tuple, list)) and len(bounds) == 2 and bounds[0] < bounds[1])
        return {
            "loss_type": (self.loss_type in kinds, " or ".join(map(repr, kinds))),
            "kl_estimator": (self.kl_estimator in ("k1", "k3"), "'k1' or 'k3'"),
            "max_completion_length": (isinstance(length, int) and length > 0, "an integer > 0"),
            "max_tool_calling_iterations": (
                self.max_tool_calling_iterations is None or self.max_tool_calling_iterations >= 0,
                "None or an integer >= 0",
            ),
            "num_iterations": (self.num_iterations >= 1, "an integer > 0"),
            "temperature": (self.temperature > 0, "a number > 0"),
            "top_k": (self.top_k is None or self.top_k >= -1, "None or an integer >= -1; 0 and -1 mean all tokens"),
            "top_p": (0 < self.top_p <= 1, "a number > 0 and <= 1"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "None or a number from 0 to 1"),
            "epsilon": (self.epsilon > 0, "a number > 0"),
            "epsilon_high": (self.epsilon_high is None or self.epsilon_high > 0, "None or a number > 0"),
            "delta": (self.delta is None or self.delta >= upper, "None or a number >= 1 + epsilon_high"),
            "critic_learning_rate": (rate is None or rate >= 0, "None or a number >= 0"),
            "reward_clip_range": (is_range, "None or two numbers, the lower one first"),
            "missing_eos_penalty": (
                self.missing_eos_penalty is None or self.missing_eos_penalty >= 0,
                "None or a number >= 0, which is subtracted",
            ),
        }

    def _checks(self) -> Checks:
        own = "the HydraModel recomputes activations in its own way"
        return {
            "torch_compile": (
                not (self.torch_compile and self.gradient_checkpointing),
                "False with gradient_checkpointing=True, whose recomputation torch.compile does not trace",
            ),
            "gradient_checkpointing_kwargs": (
                self.gradient_checkpointing_kwargs in (None, {}, {"use_reentrant": False}),
                f"None or {{'use_reentrant': False}}: {own}",
            ),
            **self._sizes(),
        }

    def _sizes(self) -> Checks:
        """Answers per prompt and updates per rollout, by what the algorithm can learn from."""
        facts, options = self.facts, self.algorithm_options()
        checks: Checks = {}
        if facts.with_greedy:
            checks["num_generations"] = (self.num_generations == 1, "1")
        elif facts.generations > 1 and not self.hidden_answers:
            checks["num_generations"] = ((self.num_generations or 0) >= 2, "at least 2")
        if facts.maximises_reward and not options.has_ratio:
            if options.loss_type == "vanilla":
                checks |= self._unread("epsilon", "epsilon_high")
            of = "" if self.loss_type == self.algorithm else f" of {self.algorithm}"
            why = f"one update per rollout: {self.loss_type}{of} has no ratio that would correct the others"
            once = self.steps_per_generation == self.gradient_accumulation_steps
            checks["num_iterations"] = (self.num_iterations == 1, f"1, {why}")
            checks["steps_per_generation"] = (once, f"gradient_accumulation_steps, {why}")
        return checks

    def _unread(self, *names: str) -> Checks:
        """Checks of options that are not read: they have to stay at their defaults."""
        options = {option.name: option for option in dataclasses.fields(self)}  # not every TRL has each
        checks = {}
        for name in names:
            if name in options:
                default, factory = options[name].default, options[name].default_factory
                if factory is not dataclasses.MISSING:
                    default = factory()
                fine = getattr(self, name) in (default, *ALSO_DEFAULT.get(name, ()))
                why = REFUSED.get(name) or f"{self.algorithm} does not read it"
                checks[name] = (fine, f"{default!r}, because {why}")
        return checks


@dataclass
class HydraPPOConfig(HydraConfig):
    """`HydraConfig` of PPO: one answer per prompt, and a critic. `beta` weighs the KL in a token's reward."""

    algorithm: str = _option("ppo", "ppo")


@dataclass
class HydraReinforceConfig(HydraConfig):
    """`HydraConfig` of REINFORCE with a learned value baseline (PERL).

    `beta`, at most 1, weighs the KL, and 1 − `beta` the reward (arXiv 2403.10704).
    """

    algorithm: str = _option("reinforce", "reinforce")

    def _checks(self) -> Checks:
        return {**super()._checks(), "beta": (0 <= self.beta <= 1, "a number from 0 to 1")}


@dataclass
class ReMaxConfig(HydraConfig):
    """`HydraConfig` of ReMax: one drawn answer per prompt; the greedy one comes on top and is not counted."""

    algorithm: str = _option("remax", "remax")


@dataclass
class HydraRLOOConfig(HydraConfig):
    """`HydraConfig` of RLOO: several answers per prompt, each the baseline of the others.

    Its `loss_type` is `proximal`, which clips the ratio of a whole answer, or `vanilla`, which does not.
    """

    algorithm: str = _option("rloo", "rloo")
    normalize_advantages: bool = _option(False, "Advantages of a rollout with mean 0 and deviation 1.")


@dataclass
class HydraGRPOConfig(HydraConfig):
    """`HydraConfig` of GRPO, with GRPOConfig's defaults. `beta` weighs the KL as a term of the loss."""

    algorithm: str = _option("grpo", "grpo")
    loss_type: str | None = _option("dapo", "grpo, dapo or dr_grpo.")
    num_generations: int | None = _option(8, "Answers per prompt.")
    beta: float = _option(0.0, "Coefficient of the KL to the reference.")


@dataclass
class HydraBestOfNConfig(HydraConfig):
    """`HydraConfig` of best-of-N: of `num_generations` answers to a prompt, the best one is learned."""

    algorithm: str = _option("best_of_n", "best_of_n")


@dataclass
class HydraOnlineDPOConfig(HydraConfig):
    """`HydraConfig` of online DPO, whose rows are pairs. `beta` is the temperature of the loss."""

    algorithm: str = _option("online_dpo", "online_dpo")
    beta: float = _option(0.1, "Temperature of the loss.")
    num_generations: int | None = _option(1, "1: see answers_per_prompt.")
    answers_per_prompt: int = _option(2, "Answers of which the best and the worst are taken.")

    hidden_answers = 1

    def _checks(self) -> Checks:
        return {
            **super()._checks(),
            "beta": (self.beta > 0, "a number > 0"),
            "num_generations": (self.num_generations == 1, "1: answers_per_prompt says how many are drawn"),
            "answers_per_prompt": (self.answers_per_prompt >= 2, "at least 2"),
        }
