"""Constants and numbers of the policy loss, as one value each."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_kernels.ppo_loss.checks import check_kl


class PpoTokens(NamedTuple):
    """Constants of the loss, in the order of the ops' arguments."""

    old_logprob: Tensor
    """[N] log-probs under the policy that the answers were drawn from."""
    advantage: Tensor
    """[N]."""
    mask: Tensor
    """[N] bool, or weights."""
    denom: Tensor | float
    """0-d or a number: the sum of the mask over a whole optimizer step."""
    ref_logprob: Tensor | None
    """[N] log-probs of the reference; None without a KL term."""

    def rows(self, rows: slice) -> PpoTokens:
        """The constants of some rows."""
        ref = None if self.ref_logprob is None else self.ref_logprob[rows]
        return PpoTokens(self.old_logprob[rows], self.advantage[rows], self.mask[rows], self.denom, ref)

    def denom_tensor(self, dtype: torch.dtype) -> Tensor:
        """denom as a 0-d tensor of `dtype`, on its own device."""
        return torch.as_tensor(self.denom).to(dtype)


class PpoOptions(NamedTuple):
    """Numbers of the loss, in the order of the ops' arguments; equations stand in `rlhf_kernels.ppo_loss`."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl: str
    kl_coef: float
    entropy_coef: float

    @classmethod
    def checked(
        cls,
        clip_low: float,
        clip_high: float,
        dual_clip: float | None,
        kl: str,
        kl_coef: float,
        entropy_coef: float,
        **sources: Tensor | None,
    ) -> PpoOptions:
        """The options as floats.

        Args:
            clip_low: at least 0.
            clip_high: at least 0.
            dual_clip: None or above 1.
            kl: one of `KL_ESTIMATORS`.
            kl_coef: finite.
            entropy_coef: finite.
            sources: `ref_logprob`, and `entropy` where it is an argument: a coefficient that is not 0 needs its own.

        Raises:
            ValueError: a number out of its range, or a coefficient without its tensor.
        """
        for name, clip in (("clip_low", clip_low), ("clip_high", clip_high)):
            if not clip >= 0:
                raise ValueError(f"{name}: expected a number >= 0, got {clip!r}")
        if dual_clip is not None and not dual_clip > 1:
            raise ValueError(f"dual_clip: expected None or a number > 1, got {dual_clip!r}")
        check_kl(kl)
        for name, coef, source in (("kl_coef", kl_coef, "ref_logprob"), ("entropy_coef", entropy_coef, "entropy")):
            if not math.isfinite(coef):
                raise ValueError(f"{name}: expected a finite number, got {coef!r}")
            if coef != 0 and source in sources and sources[source] is None:
                raise ValueError(f"{name}: {coef!r} needs {source}, got {source}=None")
        dual = None if dual_clip is None else float(dual_clip)
        return cls(float(clip_low), float(clip_high), dual, kl, float(kl_coef), float(entropy_coef))
