"""Requests to `HydraModel.forward`: log-probs, values, rewards and losses, computed inside it.

FSDP and DDP wrap the forward, so heads and losses that ran outside of it would miss their hooks.

An output names the roles whose hidden states it reads and computes itself from them. Log-probs, entropies, KL and the
policy loss go straight from hidden states to numbers per token; logits never exist as a matrix. In a batch with
supports they are of the truncated distributions, see `truncation`.

Legend: T rows, N sequences, M completion tokens, P pairs, H hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from rlhf_kernels.linear_logprob import LogprobOutputs, linear_logprob
from rlhf_kernels.linear_logprob_pair import PairOutputs
from rlhf_kernels.linear_ppo_loss import LinearPpoLossOutputs, linear_ppo_loss
from rlhf_kernels.ppo_loss import ValueLossOutputs, ppo_loss, value_loss
from rlhf_kernels.vocab.logits import row_chunks
from rlhf_kernels.vocab.runs import HeadLoras
from torch.nn import functional as F

from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.gate import LmHead, ScalarHead
from rlhf_engine.hydra.supports import have_one_head, head_options, logprobs, pair, wide_logits


@dataclass(frozen=True, kw_only=True, eq=False)
class HiddenStates:
    """Hidden states of one forward pass, by role, and the heads that read them."""

    batch: PackedBatch
    """Rows that the states belong to."""
    hidden_T: Mapping[str, torch.Tensor]
    """role → [T, H] in the backbone's dtype, after its final norm."""
    lm_heads: Mapping[str, LmHead]
    """role → LM head, of roles that have one."""
    scalar_heads: Mapping[str, ScalarHead]
    """role → value or reward head, of the other roles."""

    def predicting(self, role: str) -> torch.Tensor:
        """Hidden states that predict the completion tokens.

        Args:
            role: a role of this pass.

        Returns:
            [M, H] in the backbone's dtype, in the order of `PackedBatch.targets_M`.

        Raises:
            KeyError: a role that no output of this pass reads.
        """
        return self.hidden_T[role].index_select(0, self.batch.predict_rows_M)

    def last(self, role: str) -> torch.Tensor:
        """Hidden states at each sequence's last token.

        Args:
            role: a role of this pass.

        Returns:
            [N, H] in the backbone's dtype.

        Raises:
            KeyError: a role that no output of this pass reads.
        """
        return self.hidden_T[role].index_select(0, self.batch.last_rows_N)

    def lm_head(self, role: str) -> LmHead:
        """Return the LM head of a role.

        Args:
            role: a role of this pass with an LM head.

        Returns:
            The head, with the LoRA of the role's slot where the slot adapts it.

        Raises:
            ValueError: a role with a scalar head, or one that no output of this pass reads.
        """
        if role not in self.lm_heads:
            raise ValueError(f"role: expected one with an LM head ({sorted(self.lm_heads)}), got {role!r}")
        return self.lm_heads[role]

    def scalar_head(self, role: str) -> ScalarHead:
        """Return the value or reward head of a role.

        Args:
            role: a role of this pass with a scalar head.

        Returns:
            The head, which maps [*, H] to fp32 [*].

        Raises:
            ValueError: a role with an LM head, or one that no output of this pass reads.
        """
        if role not in self.scalar_heads:
            raise ValueError(f"role: expected one with a scalar head ({sorted(self.scalar_heads)}), got {role!r}")
        return self.scalar_heads[role]

    def reader(self, role: str) -> tuple[torch.Tensor, LmHead]:
        """Hidden states that predict the completion tokens, with the head that reads them.

        Args:
            role: a role of this pass with an LM head.

        Returns:
            Hidden states [M, H] in the backbone's dtype, and the LM head.

        Raises:
            ValueError: a role with a scalar head, or one that no output of this pass reads.
        """
        return self.predicting(role), self.lm_head(role)


class Output(Protocol):
    """A request to `HydraModel.forward`."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles whose hidden states are read."""

    def compute(self, states: HiddenStates) -> Any:
        """Compute the result from hidden states.

        Args:
            states: hidden states of the roles in `roles`, over all rows of the batch.

        Returns:
            The result, which each class of this module documents.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class _OfOneRole:
    """An output that reads one role."""

    role: str
    """Name of the role."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that are read. See `Output.roles`."""
        return (self.role,)


@dataclass(frozen=True, kw_only=True, eq=False)
class Logprobs(_OfOneRole):
    """Log-probs [M] of the completion tokens under a role, and the other statistics of `linear_logprob`."""

    role: str = "actor"
    """A role with an LM head."""
    temperature: float = 1.0
    """Number > 0 that logits are divided by."""
    outputs: tuple[str, ...] = ("logprob",)
    """Names among `logprob`, `entropy`, `lse`, `is_top1`, `mean_logit` and `log_sum_sq_prob`."""
    detach: tuple[str, ...] = ()
    """Outputs that need no gradient, see `linear_logprob`."""

    def compute(self, states: HiddenStates) -> LogprobOutputs:
        """Compute the statistics that `outputs` names. See `Output.compute`.

        Args:
            states: hidden states of `role`.

        Returns:
            `LogprobOutputs`: fp32 [M] for each name in `outputs`, None for the others. Entropies are in nats.

        Raises:
            ValueError: a role without an LM head, an unknown name in `outputs` or `detach`, or a temperature that is
                not > 0.
            TypeError: a string instead of a tuple as `outputs` or `detach`.
        """
        hidden, head = states.reader(self.role)
        target_M, supports = states.batch.targets_M, states.batch.supports
        asked: dict[str, Any] = {"temperature": self.temperature, "outputs": self.outputs, "detach": self.detach}
        if supports is not None:
            return logprobs(hidden, head, target_M, supports, **asked)
        return linear_logprob(hidden, head.weight, target_M, **asked, **head_options(head))


class TargetResults(NamedTuple):
    """Log-probs of targets, and the loss of those that are weighted."""

    logprob: torch.Tensor
    """fp32, in the shape of the targets; nats."""
    loss: torch.Tensor | None
    """0-d, − Σ weight · logprob; None without weights."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetLogprobs(_OfOneRole):
    """Log-probs of any targets at any rows of a batch, and the weighted sum of them as a loss."""

    role: str = "actor"
    """A role with an LM head."""
    rows_P: torch.Tensor
    """int64 [P], rows of the batch whose hidden states predict."""
    targets: torch.Tensor
    """int64 [P] or [P, K], token ids; K of them at one row, such as the words that a teacher gives probability."""
    weights: torch.Tensor | None = None
    """Float, in the shape of the targets; None: no loss."""
    temperature: float = 1.0
    """Number > 0 that logits are divided by."""

    def compute(self, states: HiddenStates) -> TargetResults:
        """Compute fp32 log-probs in the shape of the targets, in nats, and the 0-d loss. See `Output.compute`."""
        return compute_targets([(self, states)])[0]

    def rows(self, states: HiddenStates) -> tuple[torch.Tensor, torch.Tensor]:
        """Find hidden states [P · K, H] that predict, and int64 targets [P · K]; ValueError for another shape."""
        shape = self.targets.shape
        if self.rows_P.dim() != 1 or shape[:1] != self.rows_P.shape or len(shape) > 2:
            raise ValueError(f"targets: expected shape [P] or [P, K] for {len(self.rows_P)} rows, got {list(shape)}")
        if self.weights is not None and self.weights.shape != shape:
            raise ValueError(f"weights: expected the targets' shape {list(shape)}, got {list(self.weights.shape)}")
        each = shape[1] if len(shape) == 2 else 1
        return states.hidden_T[self.role].index_select(0, self.rows_P.repeat_interleave(each)), self.targets.flatten()


def compute_targets(asked: Sequence[tuple[TargetLogprobs, HiddenStates]]) -> list[TargetResults]:
    """Compute several outputs of one temperature, whose heads differ in LoRA alone, in one sweep of the vocabulary."""
    hidden, targets = zip(*(output.rows(states) for output, states in asked), strict=True)
    heads, lengths = [states.lm_head(output.role) for output, states in asked], [len(x) for x in targets]
    options, ends = head_options(heads[0]), tuple(itertools.accumulate(lengths))
    if len(asked) > 1:
        loras = [head.lora for head in heads]
        options["lora"] = HeadLoras.of_runs((0, *ends)[:-1], ends, loras) if any(loras) else None
    temperature = asked[0][0].temperature
    found = linear_logprob(
        torch.cat(hidden), heads[0].weight, torch.cat(targets), temperature=temperature, **options
    ).logprob
    assert found is not None
    results = []
    for (output, _), part in zip(asked, found.split(lengths), strict=True):
        logprob, weights = part.view(output.targets.shape), output.weights
        results.append(TargetResults(logprob, None if weights is None else -(weights * logprob).sum()))
    return results


class TopResults(NamedTuple):
    """The likeliest words of each row, in falling order."""

    logprob: torch.Tensor
    """fp32 [P, k], nats."""
    token: torch.Tensor
    """int64 [P, k]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TopLogprobs(_OfOneRole):
    """The k likeliest words at rows of a batch, without a gradient."""

    role: str = "actor"
    """A role with an LM head."""
    rows_P: torch.Tensor
    """int64 [P], rows of the batch whose hidden states predict."""
    k: int
    """Number of words, 1 to V."""

    def compute(self, states: HiddenStates) -> TopResults:
        """Compute fp32 log-probs [P, k] at temperature 1, in nats, and int64 words [P, k]. See `Output.compute`."""
        head, parts = states.lm_head(self.role), []
        if not 1 <= self.k <= len(head.weight):
            raise ValueError(f"k: expected 1 to {len(head.weight)}, got {self.k}")
        with torch.no_grad():
            for rows in row_chunks(len(self.rows_P), len(head.weight)):
                z = wide_logits(states.hidden_T[self.role].index_select(0, self.rows_P[rows]), head)
                top = z.topk(self.k)
                parts.append((top.values - z.logsumexp(-1, keepdim=True), top.indices))
        return TopResults(*(torch.cat(column) for column in zip(*parts, strict=True)))


@dataclass(frozen=True, kw_only=True, eq=False)
class LogprobPair:
    """Log-probs of two roles and the exact KL(role ‖ reference) [M]; with one LM head in one sweep over V."""

    role: str = "actor"
    """A role with an LM head."""
    reference: str = "reference"
    """Another role with an LM head. Its hidden states have no gradient."""
    temperature: float = 1.0
    """Number > 0 that logits are divided by."""
    detach: tuple[str, ...] = ()
    """Outputs that need no gradient, see `linear_logprob_pair`."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that are read. See `Output.roles`."""
        return (self.role, self.reference)

    def compute(self, states: HiddenStates) -> PairOutputs:
        """Compute both log-probs, the KL and the entropy of `role`. See `Output.compute`.

        Args:
            states: hidden states of `role` and `reference`.

        Returns:
            `PairOutputs`: `logprob_a` of `role`, `logprob_r` of `reference`, `kl` and `entropy`, fp32 [M] in nats each.

        Raises:
            ValueError: a role without an LM head, an unknown name in `detach`, or a temperature that is not > 0.
            ValueError: a gradient is needed of the reference or the head, or of any state where the roles have two LM
                heads.
            TypeError: a string instead of a tuple as `detach`.
        """
        (hidden, head), (other, other_head) = states.reader(self.role), states.reader(self.reference)
        needs_gradient = hidden.requires_grad or other.requires_grad
        if torch.is_grad_enabled() and needs_gradient and not have_one_head(head, other_head):
            raise ValueError(
                f"reference: expected a role with the LM head of {self.role!r} (the same backbone) where gradients are "
                f"needed, got {self.reference!r}; ask for their log-probs one by one"
            )
        return pair(
            hidden,
            head,
            other,
            other_head,
            states.batch.targets_M,
            states.batch.supports,
            temperature=self.temperature,
            detach=self.detach,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Values(_OfOneRole):
    """Values [M] of the states before each completion token."""

    role: str = "critic"
    """A role with a value head."""

    def compute(self, states: HiddenStates) -> torch.Tensor:
        """Compute the values. See `Output.compute`.

        Args:
            states: hidden states of `role`.

        Returns:
            fp32 [M].

        Raises:
            ValueError: a role without a scalar head.
        """
        values: torch.Tensor = states.scalar_head(self.role)(states.predicting(self.role))
        return values


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewards(_OfOneRole):
    """Rewards [N], read at each sequence's last token."""

    role: str = "reward"
    """A role with a reward head."""

    def compute(self, states: HiddenStates) -> torch.Tensor:
        """Compute the rewards. See `Output.compute`.

        Args:
            states: hidden states of `role`.

        Returns:
            fp32 [N].

        Raises:
            ValueError: a role without a scalar head.
        """
        rewards: torch.Tensor = states.scalar_head(self.role)(states.last(self.role))
        return rewards


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyLoss(_OfOneRole):
    """Clipped PPO loss (arXiv 1707.06347) with optional KL and entropy terms, see `rlhf_kernels.linear_ppo_loss`."""

    role: str = "actor"
    """A role with an LM head."""
    old_logprob_M: torch.Tensor
    """[M], float; log-probs that the ratio is to."""
    advantage_M: torch.Tensor
    """[M], float; advantages."""
    mask_M: torch.Tensor
    """[M], bool, or float weights; 0 leaves a token out."""
    denom: float | torch.Tensor
    """Number > 0 or 0-d, the sum of the mask over a whole optimizer step."""
    clip_low: float = 0.2
    """Number ≥ 0; ratios are clipped to at least 1 − this."""
    clip_high: float = 0.2
    """Number ≥ 0; ratios are clipped to at most 1 + this."""
    dual_clip: float | None = None
    """Number > 1, the largest ratio of a token with negative advantage (arXiv 1912.09729); None: no such bound."""
    ref_logprob_M: torch.Tensor | None = None
    """[M], float; log-probs of the reference; None without a KL term."""
    kl: str = "k3"
    """Estimator of the KL term: `k1`, `k2` or `k3`."""
    kl_coef: float = 0.0
    """Finite coefficient of the KL term; 0 leaves it out."""
    entropy_coef: float = 0.0
    """Finite coefficient of the entropy bonus; 0 leaves it out."""
    temperature: float = 1.0
    """Number > 0 that logits are divided by."""

    def compute(self, states: HiddenStates) -> Any:
        """Compute the loss and its statistics. See `Output.compute`.

        Args:
            states: hidden states of `role`.

        Returns:
            `LinearPpoLossOutputs`: 0-d `loss` with a gradient; without one fp32 `logprob` [M], 0 in masked rows, and
            statistics by name.

        Raises:
            ValueError: a role without an LM head, or a tensor of another shape or device.
            ValueError: a number out of its range, or a `kl_coef` other than 0 without `ref_logprob_M`.
            TypeError: a tensor of another dtype.
        """
        (hidden, head), batch = states.reader(self.role), states.batch
        tokens = (self.old_logprob_M, self.advantage_M, self.mask_M)
        options: dict[str, Any] = {
            "denom": self.denom,
            "clip_low": self.clip_low,
            "clip_high": self.clip_high,
            "dual_clip": self.dual_clip,
            "ref_logprob": self.ref_logprob_M,
            "kl": self.kl,
            "kl_coef": self.kl_coef,
            "entropy_coef": self.entropy_coef,
        }
        if batch.supports is None:
            options |= {"temperature": self.temperature, **head_options(head)}
            return linear_ppo_loss(hidden, head.weight, batch.targets_M, *tokens, **options)
        out = logprobs(
            hidden,
            head,
            batch.targets_M,
            batch.supports,
            temperature=self.temperature,
            outputs=("logprob", "entropy"),
            detach=() if self.entropy_coef else ("entropy",),
        )
        assert out.logprob is not None
        made = ppo_loss(out.logprob, *tokens, entropy=out.entropy, **options)
        return LinearPpoLossOutputs(made.loss, made.statistics, out.logprob.detach() * (self.mask_M != 0))


class LogprobLossOutputs(NamedTuple):
    """A loss of log-probs, and what it was made of."""

    loss: torch.Tensor  # 0-d, the loss less the entropy bonus
    logprob: torch.Tensor  # fp32 [M], without a gradient
    entropy: torch.Tensor  # fp32 [M], nats, without a gradient
    result: Any  # result of the loss function


@dataclass(frozen=True, kw_only=True, eq=False)
class LogprobLoss(_OfOneRole):
    """Any loss of the log-probs of tokens in mask_M [M], less entropy_coef · Σ entropy / denom."""

    role: str = "actor"
    """A role with an LM head."""
    loss: Callable[[torch.Tensor], Any]
    """Log-probs [M] to something with a 0-d `loss`."""
    temperature: float = 1.0
    """Number > 0 that logits are divided by."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus; 0 leaves it out, and entropies have no gradient."""
    denom: float = 1.0
    """Denominator of the entropy bonus, for a whole optimizer step."""
    mask_M: torch.Tensor | None = None
    """[M], bool or float, tokens of the entropy bonus; None: all of them."""

    def compute(self, states: HiddenStates) -> LogprobLossOutputs:
        """Compute the loss. See `Output.compute`.

        Args:
            states: hidden states of `role`.

        Returns:
            The loss with a gradient; log-probs and entropies without one; and the result of the loss function.

        Raises:
            ValueError: a role without an LM head, or a temperature that is not > 0.
        """
        out = logprobs(
            *states.reader(self.role),
            states.batch.targets_M,
            states.batch.supports,
            temperature=self.temperature,
            outputs=("logprob", "entropy"),
            detach=() if self.entropy_coef else ("entropy",),
        )
        assert out.logprob is not None
        assert out.entropy is not None
        result = self.loss(out.logprob)
        loss = result.loss
        if self.entropy_coef:
            entropy = out.entropy if self.mask_M is None else out.entropy * self.mask_M
            loss = loss - self.entropy_coef * entropy.sum() / self.denom
        return LogprobLossOutputs(loss=loss, logprob=out.logprob.detach(), entropy=out.entropy.detach(), result=result)


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueLoss(_OfOneRole):
    """Clipped value loss, see `rlhf_kernels.ppo_loss.value_loss`."""

    role: str = "critic"
    """A role with a value head."""
    old_value_M: torch.Tensor
    """[M], float; values before the update."""
    return_M: torch.Tensor
    """[M], float; the values' targets."""
    mask_M: torch.Tensor
    """[M], bool or real; 0 leaves a token out."""
    denom: float | torch.Tensor
    """Number > 0 or 0-d, the sum of the mask over a whole optimizer step."""
    clip: float | None = None
    """Number > 0, the largest distance from the old value; None: no clipping."""

    def compute(self, states: HiddenStates) -> ValueLossOutputs:
        """Compute the loss and its statistics. See `Output.compute`.

        Args:
            states: hidden states of `role`.

        Returns:
            `ValueLossOutputs`: 0-d `loss` with a gradient, and statistics without one, by name.

        Raises:
            ValueError: a role without a scalar head, a tensor of another shape or device, or a number out of its range.
            TypeError: a tensor of another dtype.
        """
        value_M = states.scalar_head(self.role)(states.predicting(self.role))
        return value_loss(value_M, self.old_value_M, self.return_M, self.mask_M, denom=self.denom, clip=self.clip)


@dataclass(frozen=True, kw_only=True, eq=False)
class LmLoss(_OfOneRole):
    """Cross-entropy −Σ log p / denom over completion tokens, or over `rows_M` of them."""

    role: str
    """A role with an LM head."""
    denom: float | torch.Tensor
    """Denominator for a whole optimizer step, a number or 0-d; usually its completion tokens."""
    rows_M: torch.Tensor | None = None
    """int64 indices into the M completion tokens, None for all."""

    def compute(self, states: HiddenStates) -> torch.Tensor:
        """Compute the loss. See `Output.compute`.

        Args:
            states: hidden states of `role`.

        Returns:
            0-d fp32 with a gradient.

        Raises:
            ValueError: a role without an LM head.
        """
        (hidden, head), target, supports = states.reader(self.role), states.batch.targets_M, states.batch.supports
        if self.rows_M is not None:
            hidden = hidden.index_select(0, self.rows_M)
            target = target[self.rows_M]
            supports = None if supports is None else supports.select(self.rows_M.cpu())
        out = logprobs(hidden, head, target, supports, temperature=1.0)
        assert out.logprob is not None
        return -out.logprob.sum() / self.denom


class PairwiseOutputs(NamedTuple):
    """Bradley-Terry loss and how well it ranks."""

    loss: torch.Tensor  # 0-d: (−Σ log σ(r_w − r_l − m) + center · Σ (r_w + r_l)²) / denom
    n_correct: torch.Tensor  # 0-d: pairs with r_w > r_l
    sum_margin: torch.Tensor  # 0-d: Σ (r_w − r_l)
    n_tied: torch.Tensor  # 0-d: pairs with r_w = r_l


@dataclass(frozen=True, kw_only=True, eq=False)
class PairwiseRewardLoss(_OfOneRole):
    """(−Σ log σ(r_w − r_l − m) + center · Σ (r_w + r_l)²) / denom over P pairs (chosen w, rejected l) of the batch.

    m is a margin that each pair may have, as in Llama 2 (arXiv 2307.09288, equation 2) and TRL. The first term is
    Hydra-SFT's (arXiv 2309.00754) and PERL's (arXiv 2403.10704). It leaves a constant added to all rewards free; the
    second, TRL's `center_rewards_coefficient` (arXiv 2312.09244), keeps them around 0.
    """

    role: str = "reward"
    """A role with a reward head."""
    chosen_P: torch.Tensor
    """int64 [P], sequence indices."""
    rejected_P: torch.Tensor
    """int64 [P], sequence indices."""
    denom: float | torch.Tensor
    """Denominator for a whole optimizer step, a number or 0-d; usually its pairs."""
    center: float = 0.0
    """Coefficient of the second term; 0 leaves it out."""
    margin_P: torch.Tensor | None = None
    """m, float32 [P]; None: 0 for all."""

    def compute(self, states: HiddenStates) -> PairwiseOutputs:
        """Compute the loss and how well the rewards rank. See `Output.compute`.

        Args:
            states: hidden states of `role`.

        Returns:
            The loss with a gradient, and counts over the pairs without one.

        Raises:
            ValueError: a role without a scalar head.
        """
        reward_N = states.scalar_head(self.role)(states.last(self.role))
        chosen_P, rejected_P = reward_N[self.chosen_P], reward_N[self.rejected_P]
        gap_P = chosen_P - rejected_P
        total = -F.logsigmoid(gap_P if self.margin_P is None else gap_P - self.margin_P).sum()
        if self.center:
            total = total + self.center * (chosen_P + rejected_P).square().sum()
        return PairwiseOutputs(
            loss=total / self.denom,
            n_correct=(gap_P > 0).sum(),
            sum_margin=gap_P.detach().sum(),
            n_tied=(gap_P == 0).sum(),
        )


class PointwiseOutputs(NamedTuple):
    """Cross-entropy of single answers' labels, and how well the sign of the reward tells them apart."""

    loss: torch.Tensor  # 0-d: −Σ [w p log σ(r) + (1 − p) log(1 − σ(r))] / denom
    n_correct: torch.Tensor  # 0-d: answers with r > 0 and label 1, or r < 0 and label 0
    sum_margin: torch.Tensor  # 0-d: Σ (2 p − 1) r, the reward in the direction of the label
    n_tied: torch.Tensor  # 0-d: answers with r = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class PointwiseRewardLoss(_OfOneRole):
    """−Σ [w p log σ(r) + (1 − p) log(1 − σ(r))] / denom over the N sequences of the batch, p their labels.

    PERL's loss for single answers that were liked or not (arXiv 2403.10704 §3). The paper prints σ(1 − r) in the second
    term. That is not the probability of the other label, σ(r) + σ(1 − r) ≠ 1, so its minimum would not be at the data's
    log-odds; the likelihood has 1 − σ(r) = σ(−r), which is what runs here. w = `pos_weight` weighs label 1 as torch's
    BCEWithLogitsLoss does; the minimum is then at the log-odds plus log w.
    """

    role: str = "reward"
    """A role with a reward head."""
    label_N: torch.Tensor
    """[N], 0 and 1 of any dtype, one per sequence of the batch."""
    denom: float | torch.Tensor
    """Denominator for a whole optimizer step, a number or 0-d; usually its answers."""
    pos_weight: float = 1.0
    """w, the weight of answers with label 1."""

    def compute(self, states: HiddenStates) -> PointwiseOutputs:
        """Compute the loss and how well the rewards' signs fit the labels. See `Output.compute`.

        Args:
            states: hidden states of `role`.

        Returns:
            The loss with a gradient, and counts over the answers without one.

        Raises:
            ValueError: a role without a scalar head, or another number of labels than sequences.
        """
        reward_N = states.scalar_head(self.role)(states.last(self.role))
        if self.label_N.shape != reward_N.shape:
            raise ValueError(
                f"label_N: expected {len(reward_N)} labels, one per sequence, got shape {tuple(self.label_N.shape)}"
            )
        p_N = self.label_N.to(reward_N.dtype)
        loss_N = -(self.pos_weight * p_N * F.logsigmoid(reward_N) + (1 - p_N) * F.logsigmoid(-reward_N))
        toward_N = (2 * p_N - 1) * reward_N.detach()
        return PointwiseOutputs(
            loss=loss_N.sum() / self.denom,
            n_correct=(toward_N > 0).sum(),
            sum_margin=toward_N.sum(),
            n_tied=(toward_N == 0).sum(),
        )
