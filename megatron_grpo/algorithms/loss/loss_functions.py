"""``ClippedPGLossFn``: PPO, GRPO, RLOO, DAPO, GSPO, CISPO, REINFORCE and dual clip as one loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_grpo.algorithms.loss.importance_sampling import bounded_exp, importance_weights
from megatron_grpo.algorithms.loss.kl import kl_penalty
from megatron_grpo.algorithms.loss.metrics import (
    clip_metrics,
    engine_mismatch_metrics,
    importance_weight_metrics,
    ratio_metrics,
    staleness_metrics,
)
from megatron_grpo.algorithms.sequence_index import SequenceIndex
from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.parallel.reductions import Metrics, Reduction, masked_mean


@dataclass(frozen=True)
class LossInputs:
    """What a micro-batch knows beside the current log-probs; flat ``[tokens]`` tensors of this rank's shard.

    Entry t belongs to input token t: its log-prob is that of token t given the tokens before it. Values at
    masked tokens are never looked at.

    Attributes:
        prev_logprobs: under the training engine before the step; None only with ``force_on_policy_ratio``.
        generation_logprobs: under the generating engine.
        reference_policy_logprobs: None if the loss has no KL term.
        advantages: one value per token.
        token_mask: nonzero at the response tokens that train.
        sequences: which sequence each token belongs to, and which sequences count.
        staleness: trainer's weight version less the version that sampled the token, or None.
    """

    prev_logprobs: Tensor | None
    generation_logprobs: Tensor
    reference_policy_logprobs: Tensor | None
    advantages: Tensor
    token_mask: Tensor
    sequences: SequenceIndex
    staleness: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """Megatron's per-token contract, kept for every aggregation.

    The sum of ``loss_sum`` over all micro-batches and all data and context parallel ranks, divided by the sum
    of ``num_tokens`` over them, is the loss. For a mean over sequences, tokens come divided by the length of
    their sequence and ``num_tokens`` is the number of sequences, counted on one context parallel rank.
    """

    loss_sum: Tensor
    num_tokens: Tensor  # int32, as Megatron's schedules sum it
    metrics: Metrics


class _Tokens(NamedTuple):
    """Inputs with 0 at all tokens that do not count, so that no garbage enters any arithmetic."""

    c: Tensor
    p: Tensor
    g: Tensor
    r: Tensor | None  # None without a KL term
    advantages: Tensor
    mask: Tensor  # valid tokens
    dropped: Tensor  # tokens that would be valid if their log-probs were finite


class ClippedPGLossFn:
    """The loss of GRPO and its relatives; see the ``loss_fn`` configuration for the variants."""

    def __init__(self, config: ClippedPGLossConfig) -> None:
        self.config = config

    @property
    def needs_reference_policy(self) -> bool:
        """Whether the loss has a KL term."""
        return self.config.reference_policy_kl_penalty > 0 and not self.config.use_kl_in_reward

    def usable(self, prev: Tensor | None, generation: Tensor, reference: Tensor | None) -> Tensor:
        """Where the log-probs that the loss looks at are finite, the current ones aside; it drops other tokens."""
        usable = generation.isfinite()
        if prev is not None and not self.config.force_on_policy_ratio:
            usable = usable & prev.isfinite()
        if reference is not None and self.needs_reference_policy:
            usable = usable & reference.isfinite()
        return usable

    def __call__(self, curr_logprobs: Tensor, inputs: LossInputs) -> LossOutput:
        """The loss of one micro-batch.

        Args:
            curr_logprobs: ``[tokens]``, float32 or wider, differentiable.
            inputs: the rest of the micro-batch.

        Raises:
            ValueError: log-probs that this configuration needs are missing, or tensors of different shapes.
        """
        config, sequences = self.config, inputs.sequences
        for name, values in vars(inputs).items():
            if isinstance(values, Tensor) and values.shape != curr_logprobs.shape:
                raise ValueError(
                    f"{name} has the shape {list(values.shape)} and curr_logprobs {list(curr_logprobs.shape)}; all "
                    "tensors of a micro-batch must be [tokens]"
                )
        c, p, g, r, advantages, mask, dropped = self._replace_excluded(curr_logprobs, inputs)
        lengths = sequences.lengths(mask)  # [num_sequences], over all CP shards

        log_ratio = c - p
        if config.sequence_level_importance_ratios:
            log_ratio = sequences.expand(sequences.mean(log_ratio, lengths))
        ratio = bounded_exp(log_ratio)
        clipped = ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
        weights = importance_weights(config, p - g, sequences, lengths)

        actor = self._surrogate(c, ratio, clipped, advantages)
        if config.use_importance_sampling_correction:
            actor = weights.truncated * actor
        loss = actor
        if r is not None:
            kl = kl_penalty(config, c, r, g)
            loss = actor + config.reference_policy_kl_penalty * kl

        if config.token_level_loss:
            share = mask.to(c.dtype)
            count = mask.sum()
        else:
            share = mask / sequences.expand(lengths.clamp(min=1)).to(c.dtype)
            count = (lengths > 0).sum() * sequences.counts_sequences
        loss_sum = (share * loss).sum()

        metrics: Metrics = {
            "loss": Reduction.mean(loss_sum, count),
            "actor_loss": Reduction.mean((share * actor).sum(), count),
            "num_valid_tokens": Reduction.total(mask.sum()),
            "num_valid_samples": Reduction.total((lengths > 0).sum(), over="sequences"),
            "num_dropped_tokens": Reduction.total(dropped.sum()),
            "approx_entropy": masked_mean(-bounded_exp(c - g) * c, mask),
            **engine_mismatch_metrics(config, p, g, mask, sequences, lengths),
            **importance_weight_metrics(weights, mask, lengths),
            **staleness_metrics(inputs.staleness, mask),
        }
        if not config.disable_ppo_ratio:
            metrics |= ratio_metrics(ratio, clipped, mask) | clip_metrics(config, ratio, advantages, mask)
        if r is not None:
            metrics["kl_penalty"] = Reduction.mean((share * kl).sum(), count)
        return LossOutput(loss_sum, count.to(torch.int32), metrics)

    def _surrogate(self, c: Tensor, ratio: Tensor, clipped: Tensor, advantages: Tensor) -> Tensor:
        """The actor term per token, to be minimised."""
        config = self.config
        if config.disable_ppo_ratio:  # REINFORCE
            return -advantages * c
        if config.use_cispo:  # https://arxiv.org/abs/2506.13585: every token keeps its gradient
            return -advantages * clipped.detach() * c
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        if config.ratio_clip_c is not None:  # dual clip, https://arxiv.org/abs/1912.09729
            bound = -advantages * config.ratio_clip_c
            # not torch.minimum, which halves the gradient where both are equal
            loss = torch.where((advantages < 0) & (loss > bound), bound, loss)
        return loss

    def _replace_excluded(self, curr_logprobs: Tensor, inputs: LossInputs) -> _Tokens:
        config = self.config
        p, g, r = inputs.prev_logprobs, inputs.generation_logprobs, inputs.reference_policy_logprobs
        if config.force_on_policy_ratio:
            p = curr_logprobs.detach()
        if p is None:
            raise ValueError(
                "prev_logprobs is missing and loss_fn.force_on_policy_ratio is false; compute the log-probs "
                "before the step, or set it to true"
            )
        if not self.needs_reference_policy:
            r = None
        elif r is None:
            raise ValueError(
                f"loss_fn.reference_policy_kl_penalty is {config.reference_policy_kl_penalty} but "
                "reference_policy_logprobs is missing; compute them, or set the penalty to 0"
            )
        asked = inputs.sequences.token_mask(inputs.token_mask)
        finite = curr_logprobs.detach().isfinite() & self.usable(p, g, r)
        mask = asked & finite

        def clean(x: Tensor) -> Tensor:
            return torch.where(mask, x.to(curr_logprobs.dtype), 0.0)

        return _Tokens(
            c=clean(curr_logprobs),
            p=clean(p),
            g=clean(g),
            r=None if r is None else clean(r),
            advantages=clean(inputs.advantages),
            mask=mask,
            dropped=asked & ~finite,
        )
