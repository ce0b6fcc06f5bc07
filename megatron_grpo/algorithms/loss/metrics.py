"""What a run watches beside the loss: clipping, importance weights, the distance between the engines.

``mask`` is ``[tokens]`` bool throughout; values where it is false do not count and are finite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_grpo.algorithms.loss.importance_sampling import LOG_RATIO_LIMIT, ImportanceWeights, bounded_exp
from megatron_grpo.algorithms.loss.kl import kl_estimate
from megatron_grpo.algorithms.sequence_index import SequenceIndex
from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.parallel.reductions import Metrics, Reduction, masked_max, masked_mean, masked_min


def ratio_metrics(ratio: Tensor, clipped: Tensor, mask: Tensor) -> Metrics:
    """The ratio of current to previous policy, before and after the clip."""
    return {
        "probs_ratio": masked_mean(ratio, mask),
        "probs_ratio_min": masked_min(ratio, mask),
        "probs_ratio_max": masked_max(ratio, mask),
        "probs_ratio_clamped": masked_mean(clipped, mask),
        "probs_ratio_clamped_min": masked_min(clipped, mask),
        "probs_ratio_clamped_max": masked_max(clipped, mask),
    }


def clip_metrics(config: ClippedPGLossConfig, ratio: Tensor, advantages: Tensor, mask: Tensor) -> Metrics:
    """Fractions of valid tokens on which a clip bound decides the surrogate.

    For the pessimistic max that is below the range with a negative advantage, and above it with a positive
    one. CISPO clips its weight whatever the sign.
    """
    low = ratio < 1 - config.ratio_clip_min
    high = ratio > 1 + config.ratio_clip_max
    if not config.use_cispo:
        low, high = low & (advantages < 0), high & (advantages > 0)
    metrics = {"clip_fraction_low": masked_mean(low, mask), "clip_fraction_high": masked_mean(high, mask)}
    if config.ratio_clip_c is not None:
        dual = (ratio > config.ratio_clip_c) & (advantages < 0)
        metrics["clip_fraction_dual"] = masked_mean(dual, mask)
    return metrics


def importance_weight_metrics(weights: ImportanceWeights, mask: Tensor, lengths: Tensor) -> Metrics:
    """The weight exp(p - g), reported whether or not the loss uses it.

    Mean and effective size (in tokens, to compare with num_valid_tokens) are of the weights in use, after
    truncation; minimum and maximum are of the raw ones, which is where the tail shows.
    """
    metrics = {
        "sampling_importance_ratio": masked_mean(weights.truncated, mask),
        "importance_weight_min": masked_min(weights.raw, mask),
        "importance_weight_max": masked_max(weights.raw, mask),
        "importance_weight_ess": Reduction.effective_size(torch.where(mask, weights.truncated, 0.0)),
    }
    outside = weights.out_of_bounds
    if outside is not None:
        metrics["importance_weight_out_of_bounds"] = (
            masked_mean(outside, lengths > 0, "sequences")
            if weights.per_sequence
            else masked_mean(outside, mask)
        )
    return metrics


def engine_mismatch_metrics(
    config: ClippedPGLossConfig, p: Tensor, g: Tensor, mask: Tensor, sequences: SequenceIndex, lengths: Tensor
) -> Metrics:
    """How far the training engine's log-probs are from those of the engine that generated the tokens.

    Healthy values are near 1 for the two multiplicative errors and near 0 for the others; anything else means
    a broken refit, temperature or tokenizer.
    """
    d = (p - g).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # log of either engine's probability over that of the mixture (e^p + e^g) / 2
    p_to_mixture = math.log(2) - torch.nn.functional.softplus(-d)
    g_to_mixture = math.log(2) - torch.nn.functional.softplus(d)
    jensen_shannon = (kl_estimate(p_to_mixture, "k3") + kl_estimate(g_to_mixture, "k3")) / 2
    error = bounded_exp(d.abs())
    sequence_error = sequences.mean(torch.where(mask, error, 0.0), lengths)
    kind = config.reference_policy_kl_type
    return {
        "token_mult_prob_error": masked_mean(error, mask),
        "gen_kl_error": masked_mean(kl_estimate(d, kind), mask),
        "policy_kl_error": masked_mean(kl_estimate(-d, kind), mask),
        "js_divergence_error": masked_mean(jensen_shannon, mask),
        "seq_logprob_error_mean": masked_mean(sequence_error, lengths > 0, "sequences"),
        "seq_logprob_error_max": masked_max(sequence_error, lengths > 0, "sequences"),
    }


def staleness_metrics(staleness: Tensor | None, mask: Tensor) -> Metrics:
    """Weight versions between sampling and training, if known."""
    if staleness is None:
        return {}
    return {
        "staleness_mean": masked_mean(staleness, mask),
        "staleness_max": masked_max(staleness, mask),
    }
