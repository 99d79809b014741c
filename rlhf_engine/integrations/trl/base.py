"""Our trainer behind TRL: GRPOTrainer on one base, with our rollouts, scores and algorithms.

    trainer = HydraTrainer(
        model="path/to/model",
        args=HydraConfig(output_dir="run", algorithm="reinforce"),
        reward_funcs=reward,                 # functions, models as in TRL, `reward_model` for one on the same base
        train_dataset=prompts,
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()

What is learned from a rollout, and by which losses, is an `Algorithm` of `rlhf_engine.algorithms`, the same as in our
own loop. TRL's data, sampling order, rewards, logging, callbacks and checkpoints stay TRL's. The actor is PEFT's
adapter `default`, a critic its adapter `critic`. Log-probs of actor and reference, values and learned rewards come from
one backbone forward. A checkpoint's root loads with plain PEFT, and `heads.safetensors` beside it has the value head.

Sizes are GRPO's: an optimizer step takes per_device_train_batch_size · gradient_accumulation_steps answers of each
process, `steps_per_generation` micro-batches share a rollout, and `num_iterations` are epochs.

Rollouts are rows of tensors, which are shuffled, cut up and saved. Supports of answers are columns among them:

    support_lens   int32 [N, C], stored numbers of each token, right-padded like the N answers
    support_words  int32 [N, K], the stored numbers of each answer, right-padded (see `rlhf_engine.hydra.supports`)

A checkpoint has two files of each process beside transformers' own:

    progress_{rank}.json        micro-batches so far, what a rollout is cut up by, what has been measured since the
                                log's last line
    rollout_{rank}.safetensors  in the middle of a rollout, all of it
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import DistributedType, gather_object
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

from rlhf_engine.algorithms.base import Algorithm, Experience, Measured, MicroBatch, find_algorithm
from rlhf_engine.algorithms.ppo import token_kl
from rlhf_engine.algorithms.sequences import group_sums, sequence_sums
from rlhf_engine.data.tokenize import warn_of_unknown
from rlhf_engine.errors import ConfigError, EngineError, NonFiniteError
from rlhf_engine.hydra import HydraModel, PackedBatch, hydra_roles, peft_io, reward_model
from rlhf_engine.hydra.model import Scores
from rlhf_engine.hydra.optimizer import warn_without_masters
from rlhf_engine.hydra.roles import OFF
from rlhf_engine.hydra.supports import Supports
from rlhf_engine.integrations.trl.config import HydraConfig
from rlhf_engine.integrations.trl.hydra_from_peft import HEADS, has_learned, hydra_on, is_on_same_tensors, require_alone
from rlhf_engine.integrations.trl.patching import require_parameters, require_trl
from rlhf_engine.rollout import SamplingConfig, generate

require_trl()
from trl import GRPOTrainer  # noqa: E402
from trl.chat_template_utils import parse_response  # noqa: E402

_REPLICATED = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
REWARD_MODEL = "reward_model"  # the learned reward among `reward_funcs`
ACTOR, CRITIC = "default", "critic"  # PEFT's names of the adapters
_EPS = 1e-4  # constant that RLOOTrainer adds to the deviation of advantages
REFERENCE = "reference"  # slot of the adapter that a run started from, which is nobody's but the HydraModel's
REWARD_ROLE = "reward"  # role that `reward_model` stands for
_OVERRIDDEN = {
    "_generate_and_score_completions": ("inputs",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep"),
    "_get_train_sampler": ("dataset",),
    "_tokenize_prompts": ("prompts",),
    "_save": ("output_dir", "state_dict"),
    "_save_rng_state": ("output_dir",),
    "_push_from_checkpoint": ("checkpoint_folder",),
}


class HydraTrainer(GRPOTrainer):
    """GRPOTrainer on one base: actor, reference, and where the algorithm has one a critic."""

    reward_func_names: list[str]
    """Names of the reward functions, in the order of `reward_funcs`."""
    optimizer: Any
    """Optimizer of all that is trained; None until it is made."""
    lr_scheduler: Any
    """Learning-rate scheduler; None until it is made."""
    config_class: type[HydraConfig] = HydraConfig
    """Class of `args`."""
    algorithm: Algorithm
    """Algorithm that learns from rollouts."""
    _tag_names: Any = ("trl", "rlhf-engine")
    _name = "Hydra"
    _paper: ClassVar[dict[str, str]] = {}
    _evaluated = (-1, 0)

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *,
        peft_config: PeftConfig | None = None,
        **options: Any,
    ) -> None:
        """Make the trainer as GRPOTrainer does.

        Args:
            model: path of a base, a causal LM, or a PeftModel with the adapter `default`.
            reward_funcs: one source of rewards or a list; `reward_model` is the learned reward, and None means that
                one. It is the reward of `reward_adapter`, or of the base's own head. Others are as in GRPOTrainer.
            args: options, of `config_class`; None: the defaults.
            peft_config: LoRA of the actor; None only where `model` is a PeftModel.
            options: further arguments of GRPOTrainer. `optimizers` may hold functions in place of objects. The first
                gets the list of trained parameters, some of which are made here, the second the optimizer.

        Raises:
            ConfigError: a model without LoRA, options that cannot be served, too few prompts, or a TRL that is not
                known.
            ConfigError: a PeftModel that is merged, switched off, rescaled, or has another active adapter.
            ConfigError: an optimizer without some trained parameter, or a reward model without a head.
        """
        require_trl()
        for name, parameters in _OVERRIDDEN.items():
            require_parameters(f"GRPOTrainer.{name}", getattr(GRPOTrainer, name), parameters)
        for name in ("tools", "environment_factory", "rollout_func"):
            if options.get(name):
                raise ConfigError(f"{name}: expected None, which {type(self).__name__} has no place for, got one")
        if args is not None and not isinstance(args, self.config_class):
            raise ConfigError(f"args: expected a {self.config_class.__name__}, got a {type(args).__name__}")
        if isinstance(model, PeftModel):
            if ACTOR not in model.peft_config:
                raise ConfigError(f"model: expected an adapter called {ACTOR!r}, got {sorted(model.peft_config)}")
            require_alone(model, ACTOR)
        elif peft_config is None:
            raise ConfigError("peft_config: expected a LoraConfig: the base stays frozen, what is trained are adapters")
        source = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
        args = args or self.config_class(f"{Path(source).name or 'model'}-{self._name}")
        self._facts = args.facts
        self._tag_names = (*HydraTrainer._tag_names, args.algorithm.replace("_", "-"))
        sizes = {"temperature": args.temperature, "max_completion_length": args.max_completion_length}
        self.algorithm = find_algorithm(args.algorithm)(args.algorithm_options(), **sizes)
        ready, self._makers = _sorted_out(options.pop("optimizers", (None, None)))
        functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs or REWARD_MODEL]
        self._uses_reward_model = REWARD_MODEL in functions
        beta, args.beta = args.beta, 0.0  # the reference is asked here, beside everything else
        try:
            with warnings.catch_warnings():
                # which is this package's choice
                warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
                super().__init__(
                    model=model,
                    reward_funcs=[self._model_rewards if f == REWARD_MODEL else f for f in functions],
                    args=args,
                    peft_config=peft_config,
                    rollout_func=_draw,
                    optimizers=ready,
                    **options,
                )
        finally:
            args.beta = beta
        if self.accelerator.distributed_type not in (DistributedType.NO, *_REPLICATED):
            raise ConfigError(
                "accelerator: expected one process or data-parallel ones with the whole base each, got "
                f"{self.accelerator.distributed_type.value}"
            )
        prompts = args.generation_batch_size // args.num_generations
        if hasattr(self.train_dataset, "__len__") and len(self.train_dataset) < prompts:  # TRL would do nothing
            raise ConfigError(
                f"train_dataset: expected at least the {prompts} prompts of a rollout (generation_batch_size / "
                f"num_generations), got {len(self.train_dataset)}"
            )
        names = zip(functions, self.reward_func_names, strict=True)
        self.reward_func_names = [REWARD_MODEL if f == REWARD_MODEL else name for f, name in names]
        self.hydra = self._build(source, args)
        """Model of all roles, on the tensors of the PeftModel."""
        if self.optimizer is not None:
            self._require_all_trained(self.optimizer)

    @property
    def has_critic(self) -> bool:
        """Whether the algorithm learns values."""
        return self._facts.has_critic

    @property
    def hidden(self) -> tuple[bool, ...]:
        """Further answers to each prompt, which TRL is not shown: for each whether it is greedy."""
        return (True,) if self._facts.with_greedy else ()

    # ---- the model -------------------------------------------------------------------------------------------------

    def _build(self, source: str, args: HydraConfig) -> HydraModel:
        peft_model = self.accelerator.unwrap_model(self.model)
        asked = {name: p for name, p in peft_model.named_parameters() if p.requires_grad and "lora_" not in name}
        adapters = {"actor": ACTOR, **({"critic": CRITIC} if self.has_critic else {})}
        if self.has_critic and CRITIC not in peft_model.peft_config:
            peft_model.add_adapter(CRITIC, peft_model.peft_config[ACTOR])
        # a run that starts from an adapter has that for its reference: off would be the model before it
        reference = REFERENCE if has_learned(peft_model, ACTOR) else OFF
        roles = hydra_roles(reference_slot=reference, reward_slot="reward" if args.reward_adapter else OFF)
        if not self.has_critic:
            del roles["critic"]
        if not self._uses_reward_model:
            del roles["reward"]
        slots = {"reward": peft_io.read_slot_config(args.reward_adapter)} if args.reward_adapter else {}
        copies = {} if reference is OFF else {reference: ACTOR}
        options = {"disable_dropout": args.disable_dropout, "seed": args.seed}
        hydra = hydra_on(peft_model, roles, adapters, copies=copies, slots=slots, **options)
        if self._uses_reward_model:
            head = reward_model.require_reward_head(args.reward_adapter or source, f"reward_funcs: {REWARD_MODEL!r}")
            reward_model.load_reward_head(hydra.heads["reward"], head, f"reward_funcs: {REWARD_MODEL!r}")  # type: ignore[arg-type]
        if args.gradient_checkpointing:
            hydra.backbone().enable_gradient_checkpointing()
        _thaw(peft_model, hydra)
        ours = {id(p) for role in roles for p in hydra.trainable_parameters(role).values()}
        others = [name for name, p in asked.items() if id(p) not in ours and not name.startswith(HEADS)]
        if others:
            raise ConfigError(
                f"peft_config: expected LoRA alone to be trained, got {others[0]} and {len(others) - 1} more"
            )
        return hydra.eval()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the optimizer, and the scheduler that goes with it where `optimizers` has a function for it.

        Critic and value head may have a learning rate of their own.

        Args:
            model: model whose parameters are trained; None: the trainer's.

        Returns:
            The optimizer, which is the trainer's from now on.

        Raises:
            ConfigError: an optimizer without some trained parameter.
            EngineError: adapters of the PeftModel were replaced by others.
        """
        _thaw(self.accelerator.unwrap_model(self.model), self.hydra)
        make, schedule = self._makers
        if self.optimizer is None and make is not None:
            trained = {id(p): p for role in self.hydra.roles for p in self.hydra.trainable_parameters(role).values()}
            self.optimizer = make(list(trained.values()))
        optimizer = super().create_optimizer(*([] if model is None else [model]))
        warn_without_masters(optimizer)
        self._require_all_trained(optimizer)
        rate = getattr(self.args, "critic_learning_rate", None)
        if rate is not None and len(optimizer.state) == 0:
            critic = {id(p) for p in self.hydra.trainable_parameters("critic").values()}
            for group in list(optimizer.param_groups):
                theirs = [p for p in group["params"] if id(p) in critic]
                group["params"] = [p for p in group["params"] if id(p) not in critic]
                if theirs:
                    optimizer.add_param_group({**group, "params": theirs, "lr": rate})
        if self.lr_scheduler is None and schedule is not None:
            self.lr_scheduler = schedule(optimizer)
        return optimizer

    def _require_all_trained(self, optimizer: Any) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for role in self.hydra.roles:
            if any(id(p) not in held for p in self.hydra.trainable_parameters(role).values()):
                raise ConfigError(
                    f"optimizers: expected one that has every trained parameter, got one without {role}'s, which are "
                    "made with the trainer: pass a function of the parameters, as (torch.optim.AdamW, None)"
                )

    # ---- what a checkpoint has beside PEFT's and transformers' files -----------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.has_critic and self.args.should_save:
            peft_io.save_heads(self.hydra.heads, {"value"}, output_dir or self.args.output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.has_critic and self.is_world_process_zero():  # transformers copies an adapter from the root alone
            shutil.copy(Path(checkpoint_folder) / peft_io.HEADS_FILE, self.args.output_dir)
            critic = Path(self.args.output_dir) / CRITIC
            shutil.copytree(Path(checkpoint_folder) / CRITIC, critic, dirs_exist_ok=True)
        super()._push_from_checkpoint(checkpoint_folder)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the position in the rollout beside the state of random numbers, on every process, before a push."""
        super()._save_rng_state(output_dir)
        folder, rank = Path(output_dir), self.accelerator.process_index
        draws_anew = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        rollout = [] if draws_anew else self._buffered_inputs
        metrics = self._metrics["train"]
        plain = {"step": self._step, "sizes": self._sizes(), "metrics": metrics, "parts": len(rollout)}
        (folder / f"progress_{rank}.json").write_text(json.dumps(plain))
        if rollout:
            parts = {f"{i}|{name}": x for i, part in enumerate(rollout) for name, x in part.items()}
            tensors = {name: x.detach().cpu().clone() for name, x in parts.items()}  # parts may share one
            save_file(tensors, folder / f"rollout_{rank}.safetensors")

    def _sizes(self) -> dict[str, int]:
        names = ("per_device_train_batch_size", "steps_per_generation", "num_iterations", "gradient_accumulation_steps")
        sizes = {name: int(getattr(self.args, name)) for name in names}
        return {**sizes, "num_processes": self.accelerator.num_processes}

    def _load_progress(self, folder: Path) -> None:
        """Take up the place within a rollout, and what is left of that rollout."""
        rank = self.accelerator.process_index
        path = folder / f"progress_{rank}.json"
        if not path.is_file():
            raise ConfigError(
                f"resume_from_checkpoint: expected {path.name} in {str(folder)!r}, as in a checkpoint of this trainer "
                "by at least as many processes and without save_only_model; it is not there"
            )
        progress = json.loads(path.read_text())
        self._step = progress["step"]
        self._metrics["train"].update(progress["metrics"])
        if not progress["parts"]:
            return
        for name, value in self._sizes().items():
            before = progress["sizes"][name]
            if before != value:
                raise ConfigError(
                    f"{name}: expected {before}, because {str(folder)!r} is of the middle of a rollout, got {value}"
                )
        parts: list[dict[str, torch.Tensor]] = [{} for _ in range(progress["parts"])]
        for key, x in load_file(folder / f"rollout_{rank}.safetensors").items():
            place, _, name = key.partition("|")
            parts[int(place)][name] = x.to(self.accelerator.device)
        self._buffered_inputs = parts

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *([] if model is None else [model]))
        folder, peft_model = Path(resume_from_checkpoint), self.accelerator.unwrap_model(self.model)
        if self.has_critic and (folder / "adapter_config.json").is_file():
            # transformers 5.17 loads adapters in subfolders, the critic's, and no other
            active = peft_model.active_adapter
            peft_model.load_adapter(str(folder), ACTOR, is_trainable=True)
            peft_model.set_adapter(active)
        if (folder / "trainer_state.json").is_file():  # else it is weights alone
            self._load_progress(folder)
        if self.has_critic and "value" not in peft_io.load_heads_if_present(self.hydra.heads, resume_from_checkpoint):
            raise ConfigError(
                f"resume_from_checkpoint: expected {peft_io.HEADS_FILE} with the value head in "
                f"{resume_from_checkpoint!r}, which has none"
            )
        _thaw(peft_model, self.hydra)

    def _load_best_model(self) -> None:
        """Load the best critic and value head, too: transformers loads the active adapter."""
        super()._load_best_model()
        if self.has_critic:
            best, peft_model = self.state.best_model_checkpoint, self.accelerator.unwrap_model(self.model)
            peft_model.load_adapter(str(Path(best) / CRITIC), CRITIC)
            peft_io.load_heads_if_present(self.hydra.heads, best)
        _thaw(self.accelerator.unwrap_model(self.model), self.hydra)

    def _get_train_sampler(self, dataset: Any = None) -> Sampler[int]:
        return _PromptsOfEpoch(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    # ---- answers and what they are worth ---------------------------------------------------------------------------

    def _model_rewards(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """The learned reward, as a reward function; of the backbone forward that serves the other roles as well."""
        rewards = self._scores.rewards_N
        assert rewards is not None
        return [float(x) for x in rewards]

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        asked = ["actor", "reference", *["critic"] * self.has_critic, *[REWARD_ROLE] * self._uses_reward_model]
        self._hidden_totals = [self._score_hidden(ids, inputs, prompts, completions) for ids in self._hidden_ids]
        supports = None if self._supports is None else self._supports.select(slice(sum(map(len, completion_ids_list))))
        self._answers, self._scores = self._score(completion_ids_list, asked, supports)
        gathered: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._totals, self._scored = self._weigh(gathered, self._answers)
        return gathered

    def _score_hidden(
        self, ids: list[list[int]], inputs: Any, prompts: Any, completions: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Total rewards [N], and whether there is one [N]."""
        shown = self._as_rewarded(ids, talks=not isinstance(completions[0], str))
        answers, self._scores = self._score(ids, [REWARD_ROLE] if self._uses_reward_model else [])
        # what reward functions tell of answers that TRL knows nothing of would stand beside others in its tables
        told = {name: getattr(self, name) for name in ("_pending_extra_logs", "_pending_metrics")}
        self.__dict__.update({name: defaultdict(list) for name in told})
        try:
            gathered = super()._calculate_rewards(inputs, prompts, shown, ids)
        finally:
            self.__dict__.update(told)
        return self._weigh(gathered, answers)

    def _as_rewarded(self, ids: list[list[int]], *, talks: bool) -> list[Any]:
        """Answers as reward functions get them: decoded as TRL decodes those that it knows."""
        if talks and any(getattr(self._tokenizer, name, None) for name in ("response_template", "response_schema")):
            pairs = zip(self._prompt_ids, ids, strict=True)
            return [[parse_response(self._tokenizer, answer, prefix=prompt)] for prompt, answer in pairs]
        texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": text}] for text in texts] if talks else list(texts)

    def _score(
        self, answers: list[list[int]], roles: list[str], supports: Supports | None = None
    ) -> tuple[PackedBatch, Scores]:
        self.hydra.eval()
        batch = PackedBatch.from_lists(self._prompt_ids, answers, device=self.accelerator.device, supports=supports)
        if not roles:
            return batch, Scores()
        with self.accelerator.autocast():  # as the forward that learns: a ratio of the same policy is 1
            return batch, self.hydra.score(batch, roles, temperature=self.temperature)

    def _weigh(self, gathered: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(total [N], whether there is one [N]) of this process's answers, from the rewards of all processes."""
        start = self.accelerator.process_index * batch.n_sequences
        own = gathered[start : start + batch.n_sequences]
        totals = (own * self.reward_weights.to(own.device)).nansum(1)
        if self.args.reward_clip_range is not None:
            totals = totals.clamp(*self.args.reward_clip_range)
        if self.args.missing_eos_penalty is not None:
            ended = [batch.completion_tokens(i)[-1] in self.eos_token_ids for i in range(batch.n_sequences)]
            totals = totals - self.args.missing_eos_penalty * (~torch.tensor(ended, device=totals.device))
        self._require_finite("reward of an answer is not finite; no update was made from it", totals)
        return totals, ~own.isnan().all(1)

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> tuple[None, None, None]:
        """Nothing: TRL asks for these log-probs before it scores answers, and scoring brings them."""
        return None, None, None

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        mode = "train" if self.model.training else "eval"
        batch, scores = self._answers, self._scores
        logprobs_M, ref_logprobs_M = scores.logprobs_M, scores.ref_logprobs_M
        assert logprobs_M is not None
        assert ref_logprobs_M is not None
        kl_M = token_kl(logprobs_M, ref_logprobs_M, self.args.kl_estimator)
        self._require_finite("KL of an answer is not finite; no update was made from it", kl_M)
        together = int(self.num_generations if mode == "train" else self.num_generations_eval)
        groups_N = torch.arange(batch.n_sequences, device=kl_M.device) // together
        greedy_N = self._hidden_totals[0][0] if self._facts.with_greedy else None
        experience = Experience(
            batch=batch,
            groups_N=groups_N,
            scores_N=self._totals,
            greedy_scores_N=greedy_N,
            old_logprobs_M=logprobs_M,
            ref_logprobs_M=ref_logprobs_M,
            kl_M=kl_M,
            values_M=scores.values_M,
        )
        width = output["completion_ids"].shape[1]

        def padded(x_M: torch.Tensor) -> torch.Tensor:
            x = batch.pad(x_M)
            return torch.nn.functional.pad(x, (0, width - x.shape[1]))

        self._note(mode, "kl", kl_M)
        if batch.supports is not None:
            self._note(mode, "support/mean", batch.supports.sizes.to(kl_M.device))
        if greedy_N is not None:
            self._note(mode, "reward/greedy", greedy_N)
        if self.num_generations == 1:
            self._metrics[mode].pop("frac_reward_zero_std", None)  # of groups, which one answer is not
        whole_N = output["completion_mask"].bool().any(1)  # false where mask_truncated_completions leaves one out
        # advantages are to all answers, as in TRL; an answer that is chosen to be learned has to be whole
        scored_N = self._scored if self._facts.maximises_reward else self._scored & whole_N
        columns, mask_M = self._prepare(mode, experience, self._usable(scored_N, groups_N, together))
        learned_N = mask_M[batch.last_completion_rows_N]
        mask_M = mask_M & whole_N[batch.sequence_of_M]
        if "advantages_M" in columns:
            self._log_advantages(columns["advantages_M"], batch)
            columns["advantages_M"] = columns["advantages_M"] * mask_M
        return {
            **output,
            "num_items_in_batch": self.accelerator.reduce(mask_M.sum(), reduction="sum"),
            "num_units_in_batch": self.accelerator.reduce(learned_N.sum(), reduction="sum"),
            **{f"of_{name}": padded(x_M) for name, x_M in columns.items()},
            "answer_mask": padded(torch.ones_like(kl_M)).bool(),
            "loss_mask": padded(mask_M.float()).bool(),
            **to_columns(batch, padded),
        }

    def _usable(self, keep_N: torch.Tensor, groups_N: torch.Tensor, k: int) -> torch.Tensor:
        """Mask of the answers that can be learned from, [N] bool: with a score, a baseline, or k in the group."""
        if self._facts.with_greedy:
            ((_, scored_N),) = self._hidden_totals
            keep_N = keep_N & scored_N
        n = len(keep_N)
        if n % k:
            raise ConfigError(
                f"num_generations: expected all answers to a prompt on one process, got {n} answers in groups of {k}"
            )
        return keep_N & (group_sums(keep_N.float(), groups_N) >= self._facts.least_drawn)

    def _prepare(
        self, mode: str, experience: Experience, keep_N: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Values [M] that the algorithm learns from, by field, and their mask, bool [M], by all processes together."""
        batch, kept = experience.batch, keep_N.nonzero()[:, 0].tolist()
        prepared, metrics = self.algorithm.prepare(experience.select(kept)) if kept else (None, {})
        self._note_all(mode, metrics)
        zeros_M = torch.zeros_like(experience.kl_M)
        columns = {**experience.token_values(), "advantages_M": zeros_M}
        if self.has_critic:
            columns["returns_M"] = zeros_M
        values = {} if prepared is None else prepared.token_values()
        if self._facts.maximises_reward:  # else it has no advantages
            ends_N = zeros_M[:0].long() if prepared is None else prepared.batch.last_completion_rows_N
            values["advantages_M"] = self._normalised(values.get("advantages_M", zeros_M[:0]), ends_N)
        mask_M = torch.zeros_like(experience.kl_M, dtype=torch.bool)
        if prepared is not None:
            rows_M = batch.select_completion_rows(prepared.batch.sample_ids)
            mask_M[rows_M] = True
            for name, x_M in values.items():
                columns[name] = columns[name].index_put((rows_M,), x_M)
        if self.has_critic:
            self._note(mode, "value/mean", columns["values_M"][mask_M])
            self._note(mode, "value/return", columns["returns_M"][mask_M])
        return columns, mask_M

    def _normalised(self, advantages_M: torch.Tensor, ends_N: torch.Tensor) -> torch.Tensor:
        """Advantages with mean 0 and variance 1 over all processes if options say so, by token or answer (ends_N)."""
        if self.algorithm.options.whitens_advantages:
            mean, variance = self._moments(advantages_M)
            return ((advantages_M.double() - mean) / (variance + 1e-8) ** 0.5).to(advantages_M.dtype)
        if getattr(self.args, "normalize_advantages", False):
            mean, variance = self._moments(advantages_M[ends_N])
            return (advantages_M - mean) / (variance**0.5 + _EPS)
        return advantages_M

    def _denominator(self, in_rollout: torch.Tensor, mode: str) -> float:
        """Denominator of a loss: the share of a rollout that an optimizer step takes on each process."""
        share = self.current_gradient_accumulation_steps / self.args.steps_per_generation if mode == "train" else 1.0
        return float(in_rollout.clamp(min=1.0)) / self.accelerator.num_processes * share

    def _require_finite(self, message: str, values: torch.Tensor) -> None:
        """Raise NonFiniteError on all processes together where one has a number that is not finite."""
        bad = (~values.isfinite()).any().float()
        if float(self.accelerator.reduce(bad, reduction="sum")):
            raise NonFiniteError(message)

    def _log_advantages(self, advantages_M: torch.Tensor, batch: PackedBatch) -> None:
        """Put the mean advantage of each answer into the table of `log_completions`, where GRPO's stood."""
        lengths_N = torch.tensor(batch.completion_lens, device=advantages_M.device)
        told = self.accelerator.gather(sequence_sums(advantages_M, batch) / lengths_N).tolist()
        shown = self._logs["advantages"]
        for _ in range(min(len(told), len(shown))):
            shown.pop()
        shown.extend(told)

    def _note(self, mode: str, name: str, values: torch.Tensor) -> None:
        """Record a metric: the mean over the numbers of all processes. Without a number nothing is recorded."""
        values = values.detach().float()
        sums = self.accelerator.reduce(torch.stack([values.sum(), torch.ones_like(values).sum()]), reduction="sum")
        if float(sums[1]):
            self._metrics[mode][name].append(float(sums[0] / sums[1]))

    def _moments(self, values: torch.Tensor) -> tuple[float, float]:
        """Mean and unbiased variance over the numbers of all processes; (0, 1) for fewer than two."""
        values = values.double()
        sums = torch.stack([torch.ones_like(values).sum(), values.sum(), values.square().sum()])
        n, total, squares = self.accelerator.reduce(sums, reduction="sum").tolist()
        if n < 2:
            return 0.0, 1.0
        mean = total / n
        return mean, max(squares / n - mean * mean, 0.0) * n / (n - 1)

    def _note_all(self, mode: str, metrics: dict[str, float]) -> None:
        """Metrics: means over the processes that have them."""
        every = gather_object([metrics])
        for name in dict.fromkeys(name for theirs in every for name in theirs):
            values = [theirs[name] for theirs in every if name in theirs]
            self._metrics[mode][name].append(sum(values) / len(values))

    def _next_evaluated(self) -> int:
        """Count the batches of an evaluation from 0; the count keys its random numbers."""
        step, count = self._evaluated
        self._evaluated = (self.state.global_step, count + 1 if step == self.state.global_step else 0)
        return self._evaluated[1]

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Evaluate as GRPOTrainer does; equal policies give equal answers, whenever they are evaluated.

        Args:
            arguments: arguments of GRPOTrainer.
            options: keyword arguments of GRPOTrainer.

        Returns:
            Metrics by name.
        """
        self._evaluated = (-1, 0)
        metrics: dict[str, float] = super().evaluate(*arguments, **options)
        return metrics

    # ---- learning --------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any], *, counts: float = 1.0) -> torch.Tensor:
        """The loss of a micro-batch, whose metrics are logged. counts: 0 for one that is not to be learned from."""
        mode = "train" if self.model.training else "eval"
        answer = inputs["answer_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        real = torch.cat([inputs["prompt_mask"].bool(), answer], 1)
        batch = PackedBatch.from_padded(ids, real, inputs["prompt_mask"].sum(1).tolist())
        micro = MicroBatch(
            batch=replace(batch, supports=from_columns(inputs, answer, self.hydra.backbone().n_words)),
            mask_M=inputs["loss_mask"][answer],
            n_tokens=self._denominator(inputs["num_items_in_batch"], mode),
            n_answers=self._denominator(inputs["num_units_in_batch"], mode),
            **{name.removeprefix("of_"): x[answer] for name, x in inputs.items() if name.startswith("of_")},
        )
        terms = self.algorithm.terms(micro)
        # until the next rollout checkpointing and dropout are as in training
        self.hydra.train(self.model.training)
        place = self._step * self.accelerator.num_processes + self.accelerator.process_index
        seed = int(self.args.seed * 1_000_003 + place)
        asked = (micro.batch, tuple(term.output for term in terms)), {"dropout_seed": seed}
        results = model(hydra=asked)
        loss = torch.stack([term.weight * result.loss for term, result in zip(terms, results, strict=True)]).sum()
        loss = loss * counts
        self._require_finite("the loss is not finite", loss.detach())
        sums = self.algorithm.measure(micro, results).sums
        # shares of an optimizer step's numbers, of which a logged line is the mean over micro-batches
        parts = counts * (self.current_gradient_accumulation_steps if mode == "train" else 1)
        shares = torch.stack([x.detach().double() for x in sums.values()]) * parts
        means = self.accelerator.reduce(shares, reduction="mean")
        for name, x in self.algorithm.summarise(Measured(sums=dict(zip(sums, means, strict=True)))).items():
            self._metrics[mode][name].append(x)
        return loss


class _PromptsOfEpoch(Sampler[int]):
    """TRL's order of prompts, also in a resumed run: TRL's own sampler then begins with its first epoch again."""

    def __init__(self, sampler: Any, epoch: Callable[[], int]) -> None:
        """sampler: TRL's RepeatSampler. epoch: the one that is about to begin, or to go on."""
        self._sampler, self._epoch = sampler, epoch

    def __iter__(self) -> Iterator[int]:
        if self._sampler.shuffle:
            generator = self._sampler.generator.manual_seed(self._sampler.seed)
            for _ in range(self._epoch()):
                torch.randperm(self._sampler.num_samples, generator=generator)
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


def _sorted_out(optimizers: tuple[Any, Any]) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Separates ready objects from functions that make them: (ready, functions), optimizer first in each."""
    make, schedule = (x if callable(x) else None for x in optimizers)
    ready = (None if make else optimizers[0], None if schedule else optimizers[1])
    if ready[0] is None and ready[1] is not None:
        raise ConfigError("optimizers: expected a scheduler beside its own optimizer, got one alone")
    return ready, (make, schedule)


def _thaw(peft_model: PeftModel, hydra: HydraModel) -> None:
    """Let all that is trained take gradients: setting the active adapter freezes every other one in PEFT."""
    peft_model.set_adapter(ACTOR)
    for role in hydra.roles:
        for p in hydra.trainable_parameters(role).values():
            p.requires_grad_(True)
    if not is_on_same_tensors(hydra, peft_model):
        said = "the adapters of the PeftModel were replaced by others: what is trained would not be what runs"
        raise EngineError(said)


def _draw(prompts: list[Any], trainer: HydraTrainer) -> dict[str, Any]:
    """Answers from the rollout engine; random numbers are a function of seed, step and place."""
    trainer.hydra.eval()
    ids, *_ = trainer._tokenize_prompts(prompts)
    trainer._prompt_ids = [list(x) for x in ids]
    n, training = len(ids), trainer.model.training
    every = trainer.args.steps_per_generation * trainer.num_iterations
    count = trainer._step // every if training else trainer._next_evaluated()
    most = n if training else trainer.args.per_device_eval_batch_size  # the last batch of an evaluation may be smaller
    first = (count * trainer.accelerator.num_processes + trainer.accelerator.process_index) * most
    sampling = SamplingConfig(
        max_completion_length=trainer.max_completion_length,
        eos_token_ids=tuple(trainer.eos_token_ids),
        temperature=trainer.temperature,
        top_k=trainer.args.top_k if (trainer.args.top_k or 0) > 0 else None,
        top_p=trainer.args.top_p,
        min_p=trainer.args.min_p or None,
        seed=2 * trainer.args.seed + (not training),
    )
    times = 1 + len(trainer.hidden)
    rollout = generate(
        trainer.hydra,
        trainer._prompt_ids * times,
        sampling,
        greedy=[flag for flag in (False, *trainer.hidden) for _ in range(n)],
        sample_ids=[(first + i) * times + j for j in range(times) for i in range(n)],
    )
    trainer._supports = rollout.batch.supports
    answers = [list(rollout.batch.completion_tokens(i)) for i in range(n * times)]
    warn_of_unknown(trainer._tokenizer, answers)
    trainer._hidden_ids = [answers[j * n : (j + 1) * n] for j in range(1, times)]
    logprobs = [x.tolist() for x in rollout.logprobs_M.split([len(answer) for answer in answers])]
    return {"prompt_ids": trainer._prompt_ids, "completion_ids": answers[:n], "logprobs": logprobs[:n]}


def to_columns(batch: PackedBatch, padded: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Spread the supports of a batch over rows by `padded`; no columns where tokens were drawn among all words."""
    supports = batch.supports
    if supports is None:
        return {}
    sizes = supports.offsets[torch.tensor(batch.completion_cu)].diff()
    return {
        "support_lens": padded(supports.lengths.int().to(batch.device)),
        "support_words": pad_sequence(supports.words.split(sizes.tolist()), batch_first=True),
    }


def from_columns(columns: Mapping[str, Any], answer_NC: torch.Tensor, vocabulary: int) -> Supports | None:
    """Take the supports of answers (bool, answer_NC) out of columns; None where there are none."""
    if "support_lens" not in columns:
        return None
    lens_NC, words_NK = columns["support_lens"] * answer_NC, columns["support_words"]
    stored_NK = torch.arange(words_NK.shape[1], device=words_NK.device) < lens_NC.sum(1)[:, None]
    return Supports.of_lengths(words_NK[stored_NK], lens_NC[answer_NC], vocabulary)
