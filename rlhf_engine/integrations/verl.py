"""Policy losses, advantage estimators and the fused log-prob for verl, on our kernels.

verl loads `verl_plugin` by itself (entry point `verl.plugins`), which registers

    actor.policy_loss.loss_mode=rlhf_engine_ppo       clipped PPO with dual clip, verl's `vanilla`, in one op
    algorithm.adv_estimator=rlhf_engine_rloo          the score less the mean of the prompt's other answers

`patch()` goes further: it exchanges what verl knows by names of its own, GAE and the log-prob of its fused kernels
(`fused_kernel_options.impl_backend=torch`). The other backends of these have log-probs of their own and are refused
while the patch lasts. Nothing else here imports verl; its signatures are those of 0.9.

Shapes: all tensors [B, T]; `index` has B names of prompts.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from rlhf_kernels.gae import gae, whiten
from rlhf_kernels.linear_logprob import linear_logprob
from rlhf_kernels.ppo_loss import ppo_loss

from rlhf_engine.algorithms.rloo import leave_one_out
from rlhf_engine.errors import ConfigError
from rlhf_engine.integrations import Exchange, as_autocast

_CORE, _FUSED = "verl.trainer.ppo.core_algos", "verl.utils.experimental.torch_functional"
_LIGER = "_LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY"
_KERNEL, _TRITON = "verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"
_MEGATRON = "verl.models.mcore."  # modules that hold the function _TRITON from when they were imported
_ESTIMATORS = "ADV_ESTIMATOR_REGISTRY"
_MAX_LOG_RATIO = 20.0  # bound at which verl clamps log-ratios; it has gradients up to there


def ppo_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Policy loss that verl calls `vanilla`: PPO (arXiv 1707.06347) with dual clip (arXiv 1912.09729), in one op.

    Args:
        old_log_prob: [B, T] float, log-probs that ratios are to.
        log_prob: [B, T] float, present log-probs; the loss is differentiable in them.
        advantages: [B, T] float.
        response_mask: [B, T] bool or real, 1 for a token of the answer.
        loss_agg_mode: `token-mean`, `token-sum`, `seq-mean-token-sum`, `seq-mean-token-sum-norm` or
            `seq-mean-token-mean`.
        config: verl's actor config, with its clip ratios and global batch sizes. None is refused.
        rollout_is_weights: [B, T] float importance weights of the tokens; None: all 1.

    Returns:
        The loss, 0-d; and `actor/pg_clipfrac`, `actor/ppo_kl` and `actor/pg_clipfrac_lower` as floats.

    Raises:
        ValueError: no config, an unknown mode, or a global batch size that is missing with `dp_size` > 1.
        ValueError: tensors of different shapes, or a clip ratio out of its range.
        TypeError: log-probs or advantages that are not floating point.
    """
    if config is None:
        raise ValueError("config: expected verl's actor config, got None")
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    mask = response_mask.to(torch.float32)
    weight, denom = _aggregation(mask, loss_agg_mode, **config.global_batch_info)
    if rollout_is_weights is not None:
        weight = torch.where(mask > 0, weight * rollout_is_weights, 0.0)
    # what stands where nothing was answered may be anything
    log_ratio = torch.where(mask > 0, log_prob - old_log_prob, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    dual, zeros = config.get("clip_ratio_c", 3.0), torch.zeros_like(log_ratio)
    clips = {"clip_low": low, "clip_high": high, "dual_clip": dual}
    result = ppo_loss(log_ratio, zeros, advantages, weight, denom=denom, **clips)
    with torch.no_grad():
        n = mask.sum().clamp(min=1.0)
        ratio = log_ratio.exp()
        beyond = (advantages < 0) & (ratio > dual)
        outside = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
        told = torch.stack([(outside * mask).sum(), -(log_ratio * mask).sum(), (beyond * mask).sum()]) / n
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    return result.loss, dict(zip(names, told.tolist(), strict=True))


def _aggregation(
    mask: torch.Tensor,
    mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> tuple[torch.Tensor, float]:
    """(weight of each token [B, T], denominator) of verl's `agg_loss`."""
    if mode == "token-sum":
        return mask, 1.0 / dp_size
    if mode == "token-mean":
        if batch_num_tokens is None and dp_size > 1:
            raise ValueError("batch_num_tokens: expected that of the global batch with dp_size > 1, got None")
        return mask, float(mask.sum().clamp(min=1.0) if batch_num_tokens is None else batch_num_tokens) / dp_size
    if mode not in ("seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"):
        raise ValueError(f"loss_agg_mode: expected one of verl's modes, got {mode!r}")
    if global_batch_size is None and dp_size > 1:
        raise ValueError("global_batch_size: expected it with dp_size > 1, got None")
    lengths = mask.sum(-1)
    n = float((lengths > 0).sum().clamp(min=1) if global_batch_size is None else global_batch_size) / dp_size
    if mode == "seq-mean-token-mean":
        return mask / (lengths[:, None] + 1e-8), n
    norm = 1 if mode == "seq-mean-token-sum" else (loss_scale_factor or mask.shape[-1])
    return mask, n * norm


def gae_advantage_return(
    token_level_rewards: torch.Tensor, values: torch.Tensor, response_mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438), with whitened advantages.

    Args:
        token_level_rewards: [B, T] float.
        values: [B, T] float.
        response_mask: [B, T] bool or real, 1 for a token of the answer.
        gamma: discount factor, in [0, 1].
        lam: λ, in [0, 1].

    Returns:
        Advantages with mean 0 and variance 1 over the mask, and returns, fp32 [B, T] each, 0 outside of the mask.

    Raises:
        ValueError: tensors of different shapes, or a number out of [0, 1].
        TypeError: rewards or values that are not floating point.
    """
    with torch.no_grad():
        advantages, returns = gae(token_level_rewards, values, response_mask, gamma=float(gamma), lam=float(lam))
        return whiten(advantages, response_mask), returns


def rloo_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Any],
    config: Any = None,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RLOO's advantage (arXiv 2402.14740): an answer's score less the mean score of the prompt's other answers.

    Args:
        token_level_rewards: [B, T] float.
        response_mask: [B, T] bool or real, 1 for a token of the answer.
        index: B names of prompts; answers to one prompt have the same.
        config: verl's algorithm config, which is not read.
        unused: other arguments of verl's, which are not read.

    Returns:
        The advantages [B, T], twice, without a gradient and 0 outside of the mask.

    Raises:
        ValueError: a prompt with one answer, for which verl goes without a baseline.
    """
    with torch.no_grad():
        scores = (token_level_rewards * response_mask).sum(-1)
        places = {name: i for i, name in enumerate(dict.fromkeys(index))}
        groups = torch.tensor([places[name] for name in index], device=scores.device)
        advantages = leave_one_out(scores, groups)[:, None] * response_mask
        return advantages, advantages


class FusedLogProb:
    """Stand-in for verl's `FusedLinearForPPOFunction`."""

    @staticmethod
    def apply(
        hidden_states: torch.Tensor,
        vocab_weights: torch.Tensor,
        input_ids: torch.Tensor,
        temperature: float | torch.Tensor = 1.0,
        chunk_size: int = 512,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies straight from hidden states. Under autocast the products are in its dtype, as verl's.

        Args:
            hidden_states: [..., H] float.
            vocab_weights: [V, H] float, weight of the LM head.
            input_ids: int64 [...], tokens in the shape of the hidden states' rows.
            temperature: number > 0 that logits are divided by; or a tensor with one, or [n] for n tokens.
            chunk_size: verl's chunk size, which is not read.

        Returns:
            Log-probs in fp32 and entropies in the dtype of `hidden_states`, in the shape of `input_ids`; both
            differentiable.

        Raises:
            ValueError: tensors of other shapes, a token outside the vocabulary (on a CPU), or a temperature that is not
                > 0.
            TypeError: tensors of another dtype.
        """
        hidden, weight = as_autocast(hidden_states.reshape(-1, hidden_states.shape[-1]), vocab_weights)
        if isinstance(temperature, torch.Tensor) and temperature.numel() == 1:
            temperature = temperature.detach().reshape(1).repeat(len(hidden))
        outputs = ("logprob", "entropy")
        swept = linear_logprob(hidden, weight, input_ids.reshape(-1), temperature=temperature, outputs=outputs)
        assert swept.logprob is not None
        assert swept.entropy is not None
        return swept.logprob.view(input_ids.shape), swept.entropy.to(hidden_states.dtype).view(input_ids.shape)


def register() -> None:
    """Make the losses and estimators known to verl by their names. May be called again.

    Raises:
        ImportError: verl is not installed.
    """
    core = importlib.import_module(_CORE)
    core.register_policy_loss("rlhf_engine_ppo")(ppo_policy_loss)
    core.register_adv_est("rlhf_engine_rloo")(rloo_advantage)


class VerlPatch(Exchange):
    """An exchange of verl's functions for ours. A context manager that takes it back."""

    def __init__(self) -> None:
        """Exchange the functions; see `patch` for what is raised."""
        core, fused, kernel = (importlib.import_module(name) for name in (_CORE, _FUSED, _KERNEL))
        self.calls = {"gae": 0, "log_prob": 0}
        """Calls that our functions have served, by what verl asked for."""
        gae_ = self._counted("gae", gae_advantage_return)
        parts: list[tuple[Any, str, Any]] = [
            (core, "compute_gae_advantage_return", gae_),
            (fused, "FusedLinearForPPOFunction", SimpleNamespace(apply=self._counted("log_prob", FusedLogProb.apply))),
        ]
        triton = getattr(kernel, _TRITON, None)
        holders = [m for name, m in sys.modules.items() if name.startswith(_MEGATRON) and hasattr(m, _TRITON)]
        parts += [(module, _TRITON, self._refusal("triton", triton)) for module in (kernel, *holders)]
        if (liger := getattr(fused, _LIGER, None)) is not None:  # without it verl calls FusedLinearForPPOFunction
            parts.append((fused, _LIGER, SimpleNamespace(apply=self._refusal("liger", liger.apply))))
        registry = getattr(core, _ESTIMATORS, {})
        missing = [f"{module.__name__}.{name}" for module, name, _ in parts if not hasattr(module, name)]
        missing += [] if "gae" in registry else [f"{_CORE}.{_ESTIMATORS}['gae']"]
        if missing:
            raise ConfigError(f"verl: expected {', '.join(missing)}, which this version does not have")
        super().__init__([*parts, (registry, "gae", gae_)])

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def count(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments, **options)

        return count

    def _refusal(self, backend: str, theirs: Any) -> Callable[..., Any]:
        """Replacement for the log-prob function of another backend, which would go past ours."""

        def refuse(*arguments: Any, **options: Any) -> Any:
            if not self.is_in_place:  # somebody has kept it
                return theirs(*arguments, **options)
            expected = "expected 'torch' with patch(), which serves no other"
            raise ConfigError(f"fused_kernel_options.impl_backend: {expected}, got {backend!r}")

        return refuse


def patch() -> VerlPatch:
    """Serve verl's GAE and fused log-probs, from now until `VerlPatch.undo`.

    Returns:
        The exchange, a context manager that takes it back.

    Raises:
        ConfigError: a verl without one of the functions.
        ImportError: verl is not installed.
    """
    return VerlPatch()
