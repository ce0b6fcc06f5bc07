"""Importance weights between the training and the generating engine, and their truncation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_grpo.algorithms.sequence_index import SequenceIndex
from megatron_grpo.config.loss import ClippedPGLossConfig

LOG_RATIO_LIMIT = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` of ``log_ratio`` clamped to [-20, 20]: value and gradient are always finite."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights of the actor term; no gradient.

    Attributes:
        raw: ``[tokens]`` exp(p - g), or for sequence-level ratios exp of its token mean over the sequence.
        truncated: ``[tokens]`` what the actor term is multiplied by.
        out_of_bounds: bool, where the truncation took effect: ``[num_sequences]`` if ``per_sequence``, else
            ``[tokens]``; None without a truncation.
    """

    raw: Tensor
    truncated: Tensor
    out_of_bounds: Tensor | None
    per_sequence: bool


def importance_weights(
    config: ClippedPGLossConfig, log_weight: Tensor, sequences: SequenceIndex, lengths: Tensor
) -> ImportanceWeights:
    """The weights that ``config`` asks for.

    tis clamps a weight to [min or 0, max]; icepop drops what is outside [min, max]; seq-mask-tis drops the
    sequences whose geometric-mean weight is outside and leaves the weights of the others as they are.

    Args:
        log_weight: ``[tokens]`` p - g, 0 at tokens that are excluded.
        lengths: ``[num_sequences]`` valid tokens.
    """
    kind = config.truncated_importance_sampling_type
    per_sequence = config.sequence_level_importance_ratios or kind == "seq-mask-tis"
    log_weight = log_weight.detach()
    raw = bounded_exp(log_weight)
    judged = raw
    if per_sequence:
        # a geometric mean: the product of a sequence's weights under- or overflows with its length
        judged = bounded_exp(sequences.mean(log_weight, lengths))
    if config.sequence_level_importance_ratios:
        raw = sequences.expand(judged)
    high = config.truncated_importance_sampling_ratio
    if kind is None or high is None:
        return ImportanceWeights(raw, raw, None, per_sequence)

    low = config.truncated_importance_sampling_ratio_min or 0.0
    outside = (judged < low) | (judged > high)
    if kind == "tis":
        truncated = raw.clamp(low, high)
    else:
        truncated = torch.where(sequences.expand(outside) if per_sequence else outside, 0.0, raw)
    return ImportanceWeights(raw, truncated, outside, per_sequence)


def sequence_logprob_error(prev_logprobs: Tensor, generation_logprobs: Tensor, token_mask: Tensor) -> Tensor:
    """Mean of exp|p - g| per sequence: how far the training engine's log-probs are from the generator's.

    1 is perfect agreement, and the value of a sequence without response tokens. A difference that is not
    finite counts as the largest one, exp(20): broken log-probs must not look healthy.

    Args:
        prev_logprobs, generation_logprobs, token_mask: ``[B, S]``, whole sequences.

    Returns:
        ``[B]``.
    """
    mask = token_mask.bool()
    difference = torch.where(mask, prev_logprobs - generation_logprobs, 0.0).abs()
    error = bounded_exp(difference.nan_to_num(nan=LOG_RATIO_LIMIT))
    length = mask.sum(-1)
    mean = torch.where(mask, error, 0.0).sum(-1) / length.clamp(min=1)
    return torch.where(length > 0, mean, 1.0)
