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

Tools, environments and a user's `rollout_func` are GRPOTrainer's, which parses calls and runs its own loop. Every turn
is drawn here, and what a tool gave is never learned from. Hidden answers have environments of their own.

A checkpoint has two files of each process beside transformers' own:

    progress_{rank}.json        micro-batches so far, what a rollout is cut up by, what has been measured since the
                                log's last line
    rollout_{rank}.safetensors  in the middle of a rollout, all of it
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import DistributedType, gather_object
from datasets import Dataset
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch.utils.data import Sampler

from rlhf_engine.algorithms.base import Algorithm, Experience, Measured, MicroBatch, find_algorithm
from rlhf_engine.algorithms.ppo import token_kl
from rlhf_engine.algorithms.sequences import group_sums, sequence_sums
from rlhf_engine.data.tokenize import warn_of_unknown
from rlhf_engine.errors import ConfigError, EngineError, NonFiniteError
from rlhf_engine.hydra import HydraModel, PackedBatch, hydra_roles, peft_io, reward_model
from rlhf_engine.hydra.batch import spans_of
from rlhf_engine.hydra.model import Scores
from rlhf_engine.hydra.optimizer import warn_without_masters
from rlhf_engine.hydra.roles import OFF
from rlhf_engine.hydra.supports import Supports
from rlhf_engine.integrations.trl import rollouts
from rlhf_engine.integrations.trl.config import HydraConfig
from rlhf_engine.integrations.trl.hydra_from_peft import HEADS, has_learned, hydra_on, is_on_same_tensors, require_alone
from rlhf_engine.integrations.trl.patching import require_parameters, require_trl
from rlhf_engine.rollout import Request, RolloutEngine, SamplingConfig, generate_requests

require_trl()
from trl import GRPOTrainer  # noqa: E402
from trl.data_utils import is_conversational  # noqa: E402

_REPLICATED = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
REWARD_MODEL = "reward_model"  # the learned reward among `reward_funcs`
ACTOR, CRITIC = "default", "critic"  # PEFT's names of the adapters
_EPS = 1e-4  # constant that RLOOTrainer adds to the deviation of advantages
REFERENCE = "reference"  # slot of the adapter that a run started from, which is nobody's but the HydraModel's
REWARD_ROLE = "reward"  # role that `reward_model` stands for
_OVERRIDDEN = {
    "_generate_and_score_completions": ("inputs",),
    "_generate": ("prompts",),
    "_generate_single_turn": ("prompt_ids",),
    "_get_tool_suffix_ids": ("tool_messages",),
    "_tool_call_loop": ("prompts", "prompt_ids", "completion_ids"),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep"),
    "_get_train_sampler": ("dataset",),
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
    _draw = 0
    """Which answer to each prompt is asked for now: 0 for the one that TRL is shown, or one of `hidden` from 1 on."""
    _turns: list[tuple[list[int], list[float]]] | None
    """Tokens and log-probs of all first turns of a rollout, one draw behind the other; None before they are drawn."""
    _prompt_ids: list[list[int]]
    _pools: list[dict[Any, list[Any]]]
    """Instances of environments by name, of each draw."""

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
                one, or with an `environment_factory` none beside the environment's own. It is the reward of
                `reward_adapter`, or of the base's own head. Others are as in GRPOTrainer.
            args: options, of `config_class`; None: the defaults.
            peft_config: LoRA of the actor; None only where `model` is a PeftModel.
            options: further arguments of GRPOTrainer, `tools`, `environment_factory` and `rollout_func` among them.
                `optimizers` may hold functions in place of objects. The first gets the list of trained parameters,
                some of which are made here, the second the optimizer.

        Raises:
            ConfigError: a model without LoRA, options that cannot be served, too few prompts, or a TRL that is not
                known.
            ConfigError: a PeftModel that is merged, switched off, rescaled, or has another active adapter.
            ConfigError: an optimizer without some trained parameter, or a reward model without a head.
            ConfigError: tools for prompts that are no conversations, an unknown environment, or a `rollout_func` for an
                algorithm with greedy answers.
            ValueError: what GRPOTrainer refuses, such as tools that the chat template has no place for.
        """
        require_trl()
        for name, parameters in _OVERRIDDEN.items():
            require_parameters(f"GRPOTrainer.{name}", getattr(GRPOTrainer, name), parameters)
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
        roll_out = options.pop("rollout_func", None)
        if roll_out is not None and self._facts.with_greedy:
            why = f"{args.algorithm} compares answers with greedy ones, which no function can be asked for"
            raise ConfigError(f"rollout_func: expected None, because {why}, got one")
        if reward_funcs is None:
            reward_funcs = [] if options.get("environment_factory") else REWARD_MODEL
        functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        self._uses_reward_model = REWARD_MODEL in functions
        beta, args.beta = args.beta, 0.0  # the reference is asked here, beside everything else
        try:
            super().__init__(
                model=model,
                reward_funcs=[self._model_rewards if f == REWARD_MODEL else f for f in functions],
                args=args,
                peft_config=peft_config,
                rollout_func=roll_out and functools.partial(rollouts.rolled_out, roll_out),
                optimizers=ready,
                **options,
            )
        finally:
            args.beta = beta
        self._require_served()
        for i, f in enumerate(functions):  # environments' own rewards stand behind them
            self.reward_func_names[i] = REWARD_MODEL if f == REWARD_MODEL else self.reward_func_names[i]
        self._talks = bool(self.tools or self.rollout_func)
        shown = getattr(self, "_environment_pool", {})
        self._pools = [shown, *({name: [] for name in shown} for _ in self.hidden)]
        self.hydra = self._build(source, args)
        """Model of all roles, on the tensors of the PeftModel."""
        if self.optimizer is not None:
            self._require_all_trained(self.optimizer)

    def _require_served(self) -> None:
        """Raise ConfigError for processes or rows that nothing can be made of, of those that can be looked at."""
        if self.accelerator.distributed_type not in (DistributedType.NO, *_REPLICATED):
            raise ConfigError(
                "accelerator: expected one process or data-parallel ones with the whole base each, got "
                f"{self.accelerator.distributed_type.value}"
            )
        prompts = self.args.generation_batch_size // self.args.num_generations
        if hasattr(self.train_dataset, "__len__") and len(self.train_dataset) < prompts:  # TRL would do nothing
            raise ConfigError(
                f"train_dataset: expected at least the {prompts} prompts of a rollout (generation_batch_size / "
                f"num_generations), got {len(self.train_dataset)}"
            )
        for name, rows in (("train_dataset", self.train_dataset), ("eval_dataset", self.eval_dataset)):
            if not isinstance(rows, Dataset) or not len(rows):
                continue
            if self.tools and "prompt" in rows.column_names and not is_conversational(rows[0]):
                raise ConfigError(f"{name}: expected conversations as prompts, which tools are called in, got texts")
            if self._multi_environment:
                asked = set(rows["environment"]) if "environment" in rows.column_names else {None}
                known = sorted(self.environment_factories)
                others = sorted(map(str, asked - set(known)))
                if others:
                    raise ConfigError(f"{name}: expected environments of {known} in `environment`, got {others[:5]}")

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

    def _generate(self, prompts: list[Any]) -> Any:
        told = super()._generate(prompts)
        ids, self._masks = [list(x) for x in told[0]], told[2]
        if self._hidden and ids != self._prompt_ids:
            why = f"as {self.args.algorithm} compares them"
            raise ConfigError(
                f"environment_factory: expected one prompt for every answer to a row, {why}, got different ones"
            )
        self._prompt_ids = ids
        return told

    def _generate_single_turn(self, prompt_ids: list[Any], *arguments: Any, **options: Any) -> Any:
        """Answers from the rollout engine; random numbers are a function of seed, step, place and position."""
        n = len(prompt_ids)
        if isinstance(prompt_ids[0], rollouts.OpenAnswer):
            turns = self._draw_turns(prompt_ids, [(self._draw, ids.place) for ids in prompt_ids])
        elif self.rollout_func is not None:  # which may ask for as many as it likes, each with its own random numbers
            self._asked += 1
            turns = self._draw_turns(prompt_ids, [(self._draw, (self._asked << 32) + i) for i in range(n)])
        else:
            if self._turns is None:  # the first turns of hidden answers are drawn beside those that TRL is shown
                rows = [(k, i) for k in range(1 + len(self.hidden)) for i in range(n)]
                self._turns = self._draw_turns(prompt_ids * (1 + len(self.hidden)), rows)
            turns = self._turns[self._draw * n : (self._draw + 1) * n]
        return [ids for ids, _ in turns], [logprobs for _, logprobs in turns]

    def _draw_turns(
        self, prompts: Sequence[list[int]], rows: Sequence[tuple[int, int]]
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probs of one turn of some answers, each by number of its draw and place of its prompt."""
        self.hydra.eval()
        flags, times = (False, *self.hidden), 1 + len(self.hidden)
        most, context = self.max_completion_length, self.hydra.backbone().context_length
        ends = [x.start + most if isinstance(x, rollouts.OpenAnswer) else None for x in prompts]
        requests = {
            row: Request(
                prompt=tuple(ids),
                sample_id=(self._first_id + row[1]) * times + row[0],
                greedy=flags[row[0]],
                keep=self._talks,  # the next turn goes on from there
                max_completion_length=None if end is None else min(end, context) - len(ids),
            )
            for ids, row, end in zip(prompts, rows, ends, strict=True)
            if end != len(ids)
        }
        if not requests:
            return [([], [])] * len(rows)
        sampling = SamplingConfig(
            max_completion_length=most,
            eos_token_ids=tuple(self.eos_token_ids),
            temperature=self.temperature,
            top_k=self.args.top_k if (self.args.top_k or 0) > 0 else None,
            top_p=self.args.top_p,
            min_p=self.args.min_p or None,
            seed=2 * self.args.seed + (not self.model.training),
        )
        rollout = generate_requests(self.hydra, list(requests.values()), sampling)
        batch, drawn = rollout.batch, dict.fromkeys(rows, (list[int](), list[float]()))
        for i, row in enumerate(requests):
            own = slice(*batch.completion_cu[i : i + 2])
            drawn[row] = batch.completion_tokens(i), rollout.logprobs_M[own].tolist()
            support = None if batch.supports is None else batch.supports.select(own)
            self._supports[row].append((support, batch.completion_lens[i]))
        warn_of_unknown(self._tokenizer, [ids for ids, _ in drawn.values()])
        return list(drawn.values())

    def _tool_call_loop(self, prompts: Any, prompt_ids: Any, completion_ids: Any, *arguments: Any) -> Any:
        for i, ids in enumerate(completion_ids):  # of a `rollout_func`: among all words
            self._supports.setdefault((self._draw, i), [(None, len(ids))])
        most = self.max_completion_length * max(map(len, self._tokenizer.get_vocab()))  # characters that find room
        for tools in (*self._sync_tool_dicts, *self._async_tool_dicts):
            tools.update({name: rollouts.text_only(tool, most) for name, tool in tools.items()})
        rows = [rollouts.OpenAnswer(ids, place=i, start=len(ids)) for i, ids in enumerate(prompt_ids)]
        return super()._tool_call_loop(prompts, rows, completion_ids, *arguments)

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> Any:
        texts = [{name: rollouts.whole_characters(text) for name, text in message.items()} for message in tool_messages]
        return super()._get_tool_suffix_ids(texts)

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        asked = [] if self._draw else ["actor", "reference", *["critic"] * self.has_critic]
        asked += [REWARD_ROLE] * self._uses_reward_model
        self._answers = self._packed(completion_ids_list)
        self.hydra.eval()
        with self.accelerator.autocast():  # as the forward that learns: a ratio of the same policy is 1
            self._scores = self.hydra.score(self._answers, asked, temperature=self.temperature) if asked else Scores()
        gathered: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._totals, self._scored = self._weigh(gathered, self._answers)
        return gathered

    def _packed(self, answers: list[list[int]]) -> PackedBatch:
        """Prompts and answers of the present draw, with what drew them."""
        parts = [part for i in range(len(answers)) for part in self._supports.get((self._draw, i), ())]
        turns = None
        if self._masks is not None:
            pairs = zip(self._prompt_ids, self._masks, strict=True)
            turns = [tuple((len(p) + a, len(p) + b) for a, b in spans_of(mask)) for p, mask in pairs]
        return PackedBatch.from_lists(
            self._prompt_ids, answers, device=self.accelerator.device, supports=Supports.join(parts), turns=turns
        )

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

    @contextlib.contextmanager
    def _untold(self) -> Iterator[None]:
        """A block whose answers stand in none of TRL's tables, which knows nothing of them."""
        names = ("_metrics", "_logs", "_pending_extra_logs", "_pending_metrics")
        told, seen = {name: getattr(self, name) for name in names}, self.state.num_input_tokens_seen
        self.__dict__.update(copy.deepcopy(told))
        try:
            yield
        finally:
            self.__dict__.update(told)
            self.state.num_input_tokens_seen = seen

    def _begin_rollout(self, n: int) -> None:
        """Settle what keys the random numbers of n answers, and forget what the last rollout has left."""
        training = self.model.training
        every = self.args.steps_per_generation * self.num_iterations
        count = self._step // every if training else self._next_evaluated()
        most = n if training else self.args.per_device_eval_batch_size  # the last batch of an evaluation may be smaller
        self._first_id = (count * self.accelerator.num_processes + self.accelerator.process_index) * most
        self._turns, self._asked = None, 0
        self._supports: dict[tuple[int, int], list[tuple[Supports | None, int]]] = defaultdict(list)
        self._hidden = list[tuple[PackedBatch, torch.Tensor, torch.Tensor]]()
        if self._talks:  # else a prompt might begin from what an evaluation kept, which a resumed run does not have
            engine, slot = RolloutEngine.of(self.hydra), self.hydra.roles["actor"].slot
            engine.renew(slot, engine.versions[slot] + 1)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._begin_rollout(len(inputs))
        for draw in range(1, 1 + len(self.hidden)):
            self._draw, self._environment_pool = draw, self._pools[draw]
            with self._untold():
                super()._generate_and_score_completions(inputs)
            self._hidden.append((self._answers, self._totals, self._scored))
        self._draw, self._environment_pool = 0, self._pools[0]
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
        greedy_N = self._hidden[0][1] if self._facts.with_greedy else None
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
        padded = functools.partial(rollouts.in_rows, batch, width=output["completion_ids"].shape[1])
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
            "loss_mask": padded(mask_M),
            **rollouts.to_columns(batch, padded),
        }

    def _usable(self, keep_N: torch.Tensor, groups_N: torch.Tensor, k: int) -> torch.Tensor:
        """Mask of the answers that can be learned from, [N] bool: with a score, a baseline, or k in the group."""
        if self._facts.with_greedy:
            keep_N = keep_N & self._hidden[0][2]
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
        micro = MicroBatch(
            batch=rollouts.from_columns(inputs, self.hydra.backbone().n_words),
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
