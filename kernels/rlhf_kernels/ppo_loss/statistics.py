"""Names of the losses' statistics. These stay one tensor: one copy to the host, one sum over micro-batches or ranks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LossAndStatistics(NamedTuple):
    """Loss and statistics, the fields that both losses return."""

    loss: Tensor
    """[], which alone carries a gradient"""
    statistics: Tensor
    """[9] in the order of `PolicyStatistics`, or [6] in that of `ValueStatistics`"""


def _at(index: int, doc: str) -> property:
    return property(lambda self: self.statistics[index], doc=doc)


class PolicyStatistics:
    """Views of `statistics` [9], 0-d. All but `ratio_max` are Σ m · (…) / denom."""

    statistics: Tensor
    policy_loss = _at(0, "Clipped policy term of the loss.")
    kl = _at(1, "Mean KL estimate; 0 without ref_logprob.")
    entropy = _at(2, "Mean entropy; 0 without entropy.")
    clip_fraction = _at(3, "Share of tokens whose policy gradient a bound cut: low + high.")
    clip_fraction_low = _at(4, "Share of tokens that the lower bound cut.")
    clip_fraction_high = _at(5, "Share of tokens that the upper bound or the dual clip cut.")
    approx_kl = _at(6, "Mean of r − 1 − log r.")
    ratio_mean = _at(7, "Mean ratio.")
    ratio_max = _at(8, "Largest ratio of an unmasked token; 0 if there is none.")
    NAMES = tuple(name for name, x in vars().items() if isinstance(x, property))


class ValueStatistics:
    """Views of `statistics` [6], 0-d. `clip_fraction` is divided by denom; the sums are not, see `value`."""

    statistics: Tensor
    clip_fraction = _at(0, "Share of tokens whose gradient the clip cut.")
    count = _at(1, "Σ m.")
    sum_error = _at(2, "Σ m (R − v).")
    sum_error_sq = _at(3, "Σ m (R − v)².")
    sum_ret = _at(4, "Σ m R.")
    sum_ret_sq = _at(5, "Σ m R².")
    NAMES = tuple(name for name, x in vars().items() if isinstance(x, property))
