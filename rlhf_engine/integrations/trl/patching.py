"""`patch`: TRL's log-probs from hidden states on our kernels, in every trainer that uses its fused LM head.

    import rlhf_engine.integrations.trl
    rlhf_engine.integrations.trl.patch()                    # for good, or:

    with rlhf_engine.integrations.trl.patch() as patched:   # while it lasts
        GRPOTrainer(…).train()
    print(patched.calls)

SFT, DPO, KTO, GRPO, RLOO and the reference models beside them ask one autograd function for log-probs, entropies and
their like. It is exchanged for `linear_logprob`; the trainers, their losses and what they save stay TRL's own. Rows
that no label asks for are left out everywhere, as TRL does where it runs Triton.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from packaging.version import Version
from rlhf_kernels.linear_logprob import linear_logprob
from rlhf_kernels.runtime import registry
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from rlhf_engine.errors import ConfigError
from rlhf_engine.integrations import Exchange, as_autocast

OLDEST, TOO_NEW = "1.15", "1.18"  # versions of TRL that this package knows: from the first to before the second
_FUNCTION, _COMPACT = "_ChunkedLogProbFunction", "_use_triton"
_PARAMETERS = (
    *("hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale"),
    "outputs",
)
_OUTPUTS = {
    "log_probs": "logprob",
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_prob",
    "mean_logits": "mean_logit",
    "is_top1": "is_top1",
}
"""TRL's names, in the order in which it gets them, and ours."""


def require_trl() -> None:
    """Raise ConfigError unless a version of TRL is installed that this package knows, and nobody else changes it."""
    if "unsloth" in sys.modules:
        raise ConfigError(
            "unsloth: expected it not imported, because it exchanges the same parts of TRL's trainers, got it imported"
        )
    try:
        import trl
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ConfigError("trl: expected it installed (pip install 'rlhf-engine[trl]'), it is not") from error
    if not Version(OLDEST) <= Version(trl.__version__) < Version(TOO_NEW):
        raise ConfigError(f"trl: expected {OLDEST} <= version < {TOO_NEW}, got {trl.__version__}")


def require_parameters(where: str, function: Callable[..., Any], names: Sequence[str]) -> None:
    """Raise ConfigError unless a function of TRL begins with these parameters. where: its name, for the message."""
    given = [name for name in inspect.signature(function).parameters if name not in ("self", "ctx")]
    if given[: len(names)] != list(names):
        import trl

        raise ConfigError(f"trl {trl.__version__}: expected {where}({', '.join(names)}, …), got ({', '.join(given)})")


class Patch(Exchange):
    """An exchange of TRL's function for ours. A context manager that takes it back."""

    def __init__(self, backend: str) -> None:
        """Exchange the function. backend: of the kernel, or `auto`. `patch` checks the version of TRL before."""
        from trl.trainer import utils

        self.calls = 0
        """Calls that our kernel has served."""
        self._backend = backend
        parts: list[tuple[Any, str, Any]] = [(utils, _FUNCTION, self)]
        if hasattr(utils, _COMPACT):  # TRL 1.15 leaves them out everywhere by itself
            parts.append((utils, _COMPACT, lambda device: True))
        super().__init__(parts)

    def apply(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = tuple(_OUTPUTS)[1:],
    ) -> tuple[torch.Tensor | None, ...]:
        """Serve a call of TRL's autograd function. Only log-probs and entropies carry a gradient, as in TRL.

        Args:
            hidden: [N, H] float, hidden states.
            weight: [V, H] float, weight of the LM head.
            bias: [V] float; None: no bias.
            targets: int64 [N]; rows with −100 have no label.
            temperature: number > 0 that logits are divided by.
            chunk_size: TRL's chunk size, which is not read.
            final_logit_softcapping: softcap of the logits; None: no cap.
            logit_scale: factor of the logits, of any sign.
            outputs: TRL's names among `entropy`, `log_sum_sq_probs`, `mean_logits` and `is_top1`.

        Returns:
            Log-probs, entropies, log Σ p², mean logits, fp32 [N] each, and is-top-1, bool [N]; None for those not in
            `outputs`.

        Raises:
            ConfigError: DeepSpeed's ZeRO stage 3 is on.
            ValueError: tensors of other shapes, or a temperature that is not > 0.
            TypeError: tensors of another dtype.
        """
        if is_deepspeed_zero3_enabled():  # the backward reads the head when it has gone back to its shares
            raise ConfigError("deepspeed: expected a stage below 3 with patch(), got 3")
        self.calls += 1
        hidden, weight, bias = as_autocast(hidden, weight, bias)
        if logit_scale <= 0:  # logits are as odd in the hidden states as in their scale
            sign = -1.0 if logit_scale else 0.0
            hidden, bias, logit_scale = hidden * sign, None if bias is None else bias * sign, -logit_scale or 1.0
        if final_logit_softcapping is not None:  # a cap is even, and TRL takes 0 for 1
            final_logit_softcapping = abs(final_logit_softcapping) or 1.0
        wanted = tuple(ours for theirs, ours in _OUTPUTS.items() if theirs == "log_probs" or theirs in outputs)
        sweep = linear_logprob(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=temperature,
            softcap=final_logit_softcapping,
            logit_scale=logit_scale,
            outputs=wanted,
            detach=tuple(name for name in wanted if name not in ("logprob", "entropy", "is_top1")),
            backend=self._backend,
        )
        results = {name: getattr(sweep, name) for name in _OUTPUTS.values()}
        if results["is_top1"] is not None:
            results["is_top1"] = results["is_top1"].bool()
        return tuple(results.values())


def patch(*, backend: str = "auto") -> Patch:
    """Serve TRL's fused log-probs from `linear_logprob`, from now until `Patch.undo`, or in a `with` block.

    Args:
        backend: `auto`, or a backend of the kernel by name. A named one never falls back.

    Returns:
        The exchange, a context manager that takes it back.

    Raises:
        ConfigError: TRL is missing or of a version that is not known, or its function is not as expected.
        ValueError: an unknown backend.
    """
    if backend not in ("auto", *registry.BACKENDS):
        raise ValueError(f"backend: expected one of {('auto', *registry.BACKENDS)}, got {backend!r}")
    require_trl()
    from trl.trainer import utils

    function = getattr(utils, _FUNCTION, None)
    if function is None:
        raise ConfigError(f"trl: expected {_FUNCTION} in trl.trainer.utils, which has none")
    called = function.apply if isinstance(function, Patch) else function.forward
    require_parameters(f"{_FUNCTION}.apply", called, _PARAMETERS)
    return Patch(backend)
