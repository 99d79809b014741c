"""Peak memory of a run by phase, in bytes: a closed formula of a model's shape and the run's options.

    generation   held + KV cache + one block's forward over the prompts that go through together
    inference    held + the larger of one block's forward over the lanes of a group of answers, and a head's sweep
    update       held + gradients + what all blocks save + the larger of a head's sweep and one block's backward

Held are the weights of every backbone, adapters, scalar heads, the optimizer's state, and on a CPU the packed copies of
frozen weights. With `shard_base`, a process holds its share of frozen weights and what is gathered.

Elements that a token saves in a block, with d the width of hidden states, q and k those of queries and keys, I of the
MLP:

    d per norm, the inputs of linears that are adapted or trained, and attention's inputs (q + 2 k) and output (q);
    q + k more where they are normed, or turned by an embedding after a joint product;
    the outputs of the MLP's first linears, and I more where a gate's product is not fused
"""

from __future__ import annotations

import bisect
import copy
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rlhf_kernels.linear import packed
from rlhf_kernels.runtime import registry
from rlhf_kernels.vocab.cost import sweep_bytes
from rlhf_kernels.vocab.native import has_whole_tiles
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_engine.config.run import Optim
from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import is_hub_name
from rlhf_engine.hydra import RoleSpec, SlotConfig, hydra_roles
from rlhf_engine.hydra.attention import BLOCK
from rlhf_engine.hydra.loading import Quantization, can_be_headless, read_config
from rlhf_engine.hydra.modules import match_targets
from rlhf_engine.hydra.optimizer import gradient_dtype, state_layout, temporary_bytes
from rlhf_engine.hydra.roles import LM_HEAD, base_is_trained, fold_lanes, needs_lm_head
from rlhf_engine.rollout import decoding
from rlhf_engine.rollout.rows import PREFILL_TOKENS

PHASES = ("generation", "inference", "update")
FULL_SFT = "full_sft"  # `sft --full` without a reward head, beside the methods of RL
_ROLES = ("actor", "reference", "critic", "reward")
_GATHERED_BLOCKS = 3  # blocks beside a share: the one that runs, the buffer that it came in, and the next one's
_NATIVE = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""Linears of the blocks that a CPU's decoding step serves."""
_QUANTISED = {"8bit": 1.0, "4bit": 0.516}
"""Bytes of an element; NF4 has a byte of scale per 64, and a second scale per 256 of those."""
_COMPOSED = {"gelu_new", "gelu_fast"}  # activations that transformers composes, of 3 I more that are saved


def roles_of(method: str) -> dict[str, RoleSpec]:
    """The role table of a method of RL, or of `full_sft`."""
    return {"sft": RoleSpec(trainable=True)} if method == FULL_SFT else hydra_roles(method)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Setting of a plan; names as in TrainConfig. Every prompt and every answer has the same length."""

    config: PreTrainedConfig
    dtype: torch.dtype
    adapter_dtype: torch.dtype
    device_type: str  # `cuda` or `cpu`: which kernels run
    slot: SlotConfig
    prompt_length: int
    completion_length: int
    batch: int  # answers per step of one process
    num_generations: int = 1
    num_mini_batches: int
    micro_batch: int  # sequences per forward and backward
    token_budget: int
    gradient_checkpointing: bool
    optim: Optim = "adamw"
    quantization: Quantization = "none"
    processes: int = 1
    shard_base: bool = False


def _out_in(linear: nn.Module) -> tuple[int, int]:
    return (linear.nf, linear.nx) if isinstance(linear, Conv1D) else (linear.out_features, linear.in_features)  # type: ignore[return-value]


class _Block(NamedTuple):
    """Bytes of a token in one decoder block."""

    saved: int  # for the backward pass, with a slot
    saved_whole: int  # the same where the block itself is trained
    forward: int  # most that are alive without gradients
    backward: int  # most that its backward pass adds
    parameters: int


class Formula:
    """Memory of one method in one process."""

    def __init__(self, roles: Mapping[str, RoleSpec], setting: Setting, model: PreTrainedModel | None = None) -> None:
        """Count the model's modules. None: one without data is made. Raises ConfigError for a mixture of experts."""
        self.roles, self.setting = roles, setting
        self.phases = PHASES if "actor" in roles else ("update",)
        text = setting.config.get_text_config()
        if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
            raise ConfigError(
                "model_name_or_path: expected an architecture whose memory follows from shapes, got "
                f"{setting.config.model_type!r}, a mixture of experts, where it depends on the routing"
            )
        if model is None:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(setting.config, dtype=setting.dtype)
        self.model = model
        output = model.get_output_embeddings()
        embedding: Any = model.get_input_embeddings().weight
        head: Any = embedding if output is None else output.weight
        self._head, self._own_head = head.shape, head is not embedding
        self.hidden, self._read = text.hidden_size, head.shape[1]  # heads of OPT read narrower states
        self._parameters = [p.shape for p in model.parameters() if p is embedding or p is not head]
        heads = text.num_attention_heads
        size = getattr(text, "head_dim", None) or self.hidden // heads
        self._queries, self._keys = heads * size, (getattr(text, "num_key_value_heads", None) or heads) * size
        linears = {path: _out_in(m) for path, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
        prefix, layers = next(
            (f"{path}.", module)
            for path, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers
        )
        self.linears = {path: size for path, size in linears.items() if path.startswith(prefix)}
        """(out, in) of the linears in blocks, by path."""
        try:
            self._adapted = match_targets(linears, prefix, setting.slot.target_modules)  # type: ignore[type-var, arg-type]
        except ValueError as error:
            raise ConfigError(f"lora_{error}") from error
        self._pairs = [
            torch.Size(pair)
            for m, k in (linears[path] for path in self._adapted)
            for pair in ((setting.slot.r, k), (m, setting.slot.r))
        ]
        self.blocks = [self._block(layer, f"{prefix}{i}.") for i, layer in enumerate(layers)]
        self._backbones = list(dict.fromkeys(role.backbone for role in roles.values()))
        self._trains_base = {name: base_is_trained(roles, name) for name in self._backbones}
        self.state = self._state()

    def _block(self, layer: nn.Module, prefix: str) -> _Block:
        """Count a block. Linears of attention or of the MLP read one tensor, all but the last, which reads another."""
        config, s, d, q, k = self.setting.config.get_text_config(), self.setting, self.hidden, self._queries, self._keys
        turns = getattr(config, "rope_parameters", None) is not None
        norms = [name for name, module in layer.named_modules() if type(module).__name__.endswith("Norm")]
        inner = [name for name in norms if name.rpartition(".")[2].startswith(("q_", "k_", "query_", "key_"))]
        parents: dict[str, list[str]] = {}
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear | Conv1D):
                parents.setdefault(name.rpartition(".")[0], []).append(name)
        saved = whole = forward = width = 0
        for parent, (*first, last) in parents.items():
            sizes = [self.linears[prefix + name] for name in first]
            makes, reads = sum(m for m, _ in sizes), max((n for _, n in sizes), default=0)
            ends = self.linears[prefix + last][1]
            if "attn" in parent or "attention" in parent:
                # other attention than ours on a GPU copies keys and values for every query head
                wide = q if s.device_type != "cpu" and self._backend("attention") == "reference" else k
                kept = ends + q + 2 * wide + (q + k) * (bool(inner) or (len(first) == 1 and turns))
                forward, last_kept = max(forward, 4 * d + 2 * makes + ends), 0
            else:
                gated, act = makes > ends, getattr(config, "hidden_act", getattr(config, "activation_function", None))
                unfused = ends if gated and self._backend("swiglu", (ends,)) == "reference" else 0
                composed = not gated and act in _COMPOSED and self._backend("activation", (ends,)) == "reference"
                kept = makes + unfused + 3 * ends * composed
                forward, last_kept, width = max(forward, 5 * d + makes + ends + unfused), ends, max(width, ends)
            whole += kept + reads + last_kept
            saved += kept + reads * any(prefix + name in self._adapted for name in first)
            saved += last_kept * (prefix + last in self._adapted)
        e = s.dtype.itemsize
        # RMS norms that are not fused keep their input in float32
        normed = (len(norms) - len(inner)) * d * (4 if turns and self._backend("rms_norm", (d,)) == "reference" else e)
        parameters = sum(p.numel() for p in layer.parameters())
        return _Block(saved * e + normed, whole * e + normed, forward * e, 2 * width * e, parameters)

    # ---- state -----------------------------------------------------------------------------------------------------

    def _weights(self, backbone: str) -> list[torch.Size]:
        """Parameters of a backbone, without the LM head where no role reads it."""
        keeps = needs_lm_head(self.roles, backbone) or not can_be_headless(self.setting.config)
        return [*self._parameters, *([self._head] if keeps and self._own_head else [])]

    def _weight_bytes(self, backbone: str) -> int:
        s, elements = self.setting, sum(size.numel() for size in self._weights(backbone))
        if s.quantization == "none" or self._trains_base[backbone]:
            return elements * s.dtype.itemsize
        quantised = sum(m * k for m, k in self.linears.values())
        return (elements - quantised) * s.dtype.itemsize + int(quantised * _QUANTISED[s.quantization])

    def _state(self) -> dict[str, int]:
        """Bytes by part; of frozen weights all, whatever share of them a process holds."""
        s, names = self.setting, self._backbones
        slots = {(r.backbone, r.slot): r.trainable for r in self.roles.values() if r.slot is not None}
        heads = {r.head: r.trainable for r in self.roles.values() if r.head != LM_HEAD}
        scalar = [torch.Size((1, self._read)), torch.Size((1,))]
        trained = [(size, s.dtype) for name in names if self._trains_base[name] for size in self._weights(name)]
        trained += [(size, s.adapter_dtype) for size in self._pairs] * sum(slots.values())
        trained += [(size, torch.float32) for size in scalar] * sum(heads.values())
        layouts = [state_layout(s.optim, size, dtype) for size, dtype in trained]
        return {
            "frozen_weights": sum(self._weight_bytes(name) for name in names if not self._trains_base[name]),
            "trained_weights": sum(self._weight_bytes(name) for name in names if self._trains_base[name]),
            "adapters": sum(size.numel() for size in self._pairs) * s.adapter_dtype.itemsize * len(slots),
            "heads": 4 * (self._read + 1) * len(heads),
            "packed_weights": self._packed(),
            "gradients": sum(size.numel() * gradient_dtype(s.optim, dtype).itemsize for size, dtype in trained),
            "optimizer": sum(size.numel() * kind.itemsize for fields in layouts for size, kind in fields.values()),
            "optimizer_step": max(temporary_bytes(s.optim, size, dtype, s.device_type) for size, dtype in trained),
        }

    def _packed(self) -> int:
        """Bytes of copies that a CPU's products keep of weights that gradients pass, or of a frozen head."""
        s = self.setting
        if s.device_type != "cpu":
            return 0
        passed = {r.backbone for r in self.roles.values() if r.trainable and not self._trains_base[r.backbone]}
        across = passed
        if any(isinstance(module, Conv1D) for module in self.model.modules()):
            across = {name for name in self._backbones if registry.is_exact() and not self._trains_base[name]}
        linears = [size for size in self.linears.values() if self._backend("linear", size) == "cpu"]
        own = [] if s.quantization != "none" else linears * len(across)
        head = tuple(self._head)
        drawing = {r.backbone for r in self.roles.values() if r.trainable and r.head == LM_HEAD}
        if drawing & passed and has_whole_tiles(head) and self._backend("linear_ppo_loss", head) == "cpu":
            own.append(head)
        return packed.planned((s.dtype, k, m) for m, k in reversed(own))

    def held(self, phase: str) -> int:
        """Bytes that one process holds through a phase, its share of frozen weights among them."""
        held = sum(n for part, n in self.state.items() if part not in ("frozen_weights", "gradients", "optimizer_step"))
        return held + self.base_bytes(phase)

    def base_bytes(self, phase: str) -> int:
        """Bytes of frozen backbones in one process: all, or its share and what is gathered."""
        frozen = self.state["frozen_weights"]
        if not self.setting.shard_base:
            return frozen
        share = -(-frozen // self.setting.processes)
        if phase != "update":
            return share + frozen
        names = [name for name in self._backbones if not self._trains_base[name]]
        blocks = sum(block.parameters for block in self.blocks)
        few = _GATHERED_BLOCKS * max(block.parameters for block in self.blocks)
        rest = sum(sum(size.numel() for size in self._weights(name)) - blocks for name in names)
        return share + min(frozen, (rest + few) * self.setting.dtype.itemsize)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of a step's answers of full length; those to one prompt share its full blocks."""
        s = self.setting
        blocks = s.batch * -(-(s.prompt_length + s.completion_length - 1) // BLOCK)  # the last token is never read
        blocks -= (s.batch - -(-s.batch // s.num_generations)) * (s.prompt_length // BLOCK)
        return blocks * BLOCK * 2 * self._keys * len(self.blocks) * s.dtype.itemsize

    # ---- activations -----------------------------------------------------------------------------------------------

    @property
    def _forward(self) -> int:
        return max(block.forward for block in self.blocks)

    def _backend(self, op: str, shape: tuple[int, ...] | None = None) -> str:
        return registry.resolve_for(op, "auto", self.setting.device_type, self.setting.dtype, shape)

    def _sweep(self, rows: int, *, needs: str = "", ahead: bool = False) -> int:
        """Bytes of a sweep of the vocabulary over the hidden states of so many tokens."""
        hidden = torch.empty(rows, self._read, dtype=self.setting.dtype, device="meta")
        weight = torch.empty(self._head, dtype=self.setting.dtype, device="meta")
        backend = self._backend("linear_ppo_loss" if needs else "linear_logprob", tuple(self._head))
        inside = sweep_bytes(hidden, weight, backend, needs=needs, ahead=ahead, keeps_sums=ahead)
        return inside + 2 * rows * self.hidden * self.setting.dtype.itemsize

    def _alike(self, phase: str) -> int:
        """Answers that share a prompt's pass: on a CPU, where neither dropout nor dealing to minibatches parts them."""
        s, is_update = self.setting, phase == "update"
        dealt = is_update and "actor" in self.roles and s.num_mini_batches > 1
        shares = s.device_type == "cpu" and phase != "generation" and not (is_update and s.slot.dropout)
        return s.num_generations if shares and not dealt else 1

    def _tokens(self, phase: str, rows: int) -> int:
        """Tokens of so many sequences that go through a backbone."""
        return -(-rows // self._alike(phase)) * self.setting.prompt_length + rows * self.setting.completion_length

    def _generation(self) -> int:
        s = self.setting
        prompts = min(-(-s.batch // s.num_generations), max(1, PREFILL_TOKENS // s.prompt_length))
        tokens = prompts * s.prompt_length
        leaves = {path.rpartition(".")[2] for path in self.linears}
        if s.device_type == "cpu" and leaves == _NATIVE and s.quantization == "none":
            tokens = decoding.tokens_together(s.dtype, s.prompt_length, prompts)
        rows = max(tokens, s.batch)  # a decoding step has one token of every answer
        return self.cache_bytes + rows * self._forward

    def _inference(self) -> int:
        s, most = self.setting, 0
        per_answer = self._tokens("inference", s.num_generations) / s.num_generations
        rows = max(1, min(s.batch, int(s.token_budget / per_answer)))
        tokens, kept = self._tokens("inference", rows), 0
        state = self.hidden * s.dtype.itemsize
        for name in self._backbones:
            lanes = [lane for lane in fold_lanes(self.roles, self.roles) if lane[0] == name]
            together = tokens * (len(lanes) if len(lanes) * tokens <= s.token_budget else 1)
            most = max(most, kept + together * self._forward)
            kept += len(lanes) * tokens * state
        return max(most, kept + self._sweep(rows * s.completion_length))

    def _update(self) -> int:
        """Gradients and activations. Lanes of one backbone go together within the budget, others one by one."""
        s, state = self.setting, self.state
        minibatch = -(-s.batch // s.num_mini_batches)
        rows = min(s.micro_batch, minibatch)
        tokens = self._tokens("update", rows)
        lanes = fold_lanes(self.roles, [name for name, role in self.roles.items() if role.trainable])
        together = len({backbone for backbone, _ in lanes}) == 1 and len(lanes) * tokens <= s.token_budget
        done, most = 0, state["gradients"] + state["optimizer_step"]
        for (name, _), roles in list(lanes.items())[: 1 if together else None]:
            n = tokens * (len(lanes) if together else 1)
            trained = self._trains_base[name]
            fresh = sum(size.numel() for size in self._weights(name)) if trained else 0
            gradients = fresh * gradient_dtype(s.optim, s.dtype).itemsize
            saved = [n * (block.saved_whole if trained else block.saved) for block in self.blocks]
            inputs, back = n * self.hidden * s.dtype.itemsize, n * max(block.backward for block in self.blocks)
            if s.gradient_checkpointing:
                back += max(saved)
                saved = [inputs] * len(saved)
            head = 3 * inputs
            if any(self.roles[role].head == LM_HEAD for role in roles):
                needs = "hidden,weight" if trained else "hidden"
                head += self._sweep(rows * s.completion_length, needs=needs, ahead=not trained)
                if trained:
                    head += self._head.numel() * s.dtype.itemsize
            before = state["gradients"] if minibatch > rows or not trained else done
            embedding = self._head.numel() * 4 if trained else 0
            most = max(most, before + sum(saved) + max(head, back), before + gradients + embedding + back)
            done += gradients
        return most

    def peak(self, phase: str) -> int:
        """Most bytes of a phase."""
        allocated: Callable[[], int] = getattr(self, f"_{phase}")
        # a GPU's graphs read the cache where it lies: it stays when a rollout ends
        stays = self.setting.device_type != "cpu" and phase != "generation" and "generation" in self.phases
        return self.held(phase) + allocated() + stays * self.cache_bytes

    def largest(self, budget: int) -> tuple[int, int]:
        """Answers per step whose rollout and scoring fit, and sequences of a micro-batch; 0 where not even one does."""
        s = self.setting

        def peaks(phases: tuple[str, ...], **changes: Any) -> int:
            other = copy.copy(self)
            other.setting = replace(s, **changes)
            return max(other.peak(phase) for phase in phases if phase in self.phases)

        def micro(n: int) -> int:
            return peaks(("update",), micro_batch=n, batch=max(s.batch, n * s.num_mini_batches))

        # beyond the token budget lanes part, and more rows may fit where fewer do not
        starts = (1, *(s.token_budget // (lanes * (s.prompt_length + s.completion_length)) + 1 for lanes in (2, 3)))
        most = _largest(lambda n: micro(n) <= budget, starts)
        if "generation" not in self.phases or not most:
            return most, most
        drawn = _largest(lambda n: peaks(("generation", "inference"), batch=n * s.num_generations) <= budget, starts)
        return drawn * s.num_generations, most


def _largest(fits: Callable[[int], bool], starts: Sequence[int]) -> int:
    """Largest n that fits, by doubling from each start and bisection after it; 0 where none does."""
    low = max((n for start in starts for n in (start * 2**i for i in range(21)) if fits(n)), default=0)
    return low + bisect.bisect(range(low + 1, 2 * low), False, key=lambda n: not fits(n))


# ---- shapes ----------------------------------------------------------------------------------------------------------

_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)
_TIED: dict[str, Any] = {"tie_word_embeddings": True}

PRESETS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "gpt2": ("gpt2", (), {}),
    "pythia-410m": ("gpt_neox", (1024, 4096, 24, 16, 16, 50304, 2048), {}),
    "pythia-1b": ("gpt_neox", (2048, 8192, 16, 8, 8, 50304, 2048), {}),
    "pythia-2.8b": ("gpt_neox", (2560, 10240, 32, 32, 32, 50304, 2048), {}),
    "pythia-6.9b": ("gpt_neox", (4096, 16384, 32, 32, 32, 50432, 2048), {}),
    "llama-7b": ("llama", (4096, 11008, 32, 32, 32, 32000, 2048), {}),
    "llama-13b": ("llama", (5120, 13824, 40, 40, 40, 32000, 2048), {}),
    "llama-2-70b": ("llama", (8192, 28672, 80, 64, 8, 32000, 4096), {}),
    "llama-3.2-1b": ("llama", (2048, 8192, 16, 32, 8, 128256, 131072), {"head_dim": 64, **_TIED}),
    "llama-3.2-3b": ("llama", (3072, 8192, 28, 24, 8, 128256, 131072), {"head_dim": 128, **_TIED}),
    "llama-8b": ("llama", (4096, 14336, 32, 32, 8, 128256, 8192), {}),
    "llama-70b": ("llama", (8192, 28672, 80, 64, 8, 128256, 8192), {}),
    "qwen2.5-0.5b": ("qwen2", (896, 4864, 24, 14, 2, 151936, 32768), _TIED),
    "qwen2.5-1.5b": ("qwen2", (1536, 8960, 28, 12, 2, 151936, 32768), _TIED),
    "qwen2.5-7b": ("qwen2", (3584, 18944, 28, 28, 4, 152064, 32768), {}),
    "qwen3-0.6b": ("qwen3", (1024, 3072, 28, 16, 8, 151936, 40960), {"head_dim": 128, **_TIED}),
    "qwen3-8b": ("qwen3", (4096, 12288, 36, 32, 8, 151936, 40960), {"head_dim": 128}),
    "mistral-7b": ("mistral", (4096, 14336, 32, 32, 8, 32000, 32768), {"sliding_window": 4096}),
    "gemma-2-2b": ("gemma2", (2304, 9216, 26, 8, 4, 256000, 8192), {"head_dim": 256, **_TIED}),
}
"""Type, `_SIZES` and more by name. Llama 7B and 13B are those of Llama 1 and 2, `llama-8b` and `llama-70b` of 3."""


def find_config(model: str) -> PreTrainedConfig:
    """The config of a preset, a folder or a model of the Hub. Raises ValueError otherwise, with the nearest preset."""
    if model in PRESETS:
        kind, sizes, more = PRESETS[model]
        shape = dict(zip(_SIZES, sizes, strict=False))
        untied = {"tie_word_embeddings": False} if sizes else {}
        config: PreTrainedConfig = AutoConfig.for_model(kind, **{**untied, **shape, **more})
        return config
    if Path(model).is_dir() or is_hub_name(model):
        return read_config(model)
    close = difflib.get_close_matches(model.lower(), PRESETS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"presets: {', '.join(PRESETS)}"
    raise ConfigError(
        "model_name_or_path: expected a preset, a folder with config.json or owner/name of the Hub, "
        f"got {model!r}; {hint}"
    )
