"""The sequence log-prob error: do trainer and engine agree on what was sampled?

A broken refit, a wrong temperature or a tokenizer mismatch shows here first. Healthy means of |p - g|: 1e-6
with float32 on both sides, 0.010 to 0.018 for dense bf16 models, 0.02 to 0.05 for bf16 MoE.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from megatron_grpo.algorithms.loss.importance_sampling import sequence_logprob_error
from megatron_grpo.config import GRPOConfig
from megatron_grpo.parallel.layout import ParallelLayout
from megatron_grpo.parallel.reductions import MetricReducer, Reduction

log = logging.getLogger(__name__)


class LogprobMismatchError(RuntimeError):
    """Trainer and engine disagree on too many sequences."""


class LogprobErrorMonitor:
    """Checks every batch, before it trains if it can (``grpo.seq_logprob_error_*``)."""

    def __init__(self, config: GRPOConfig, layout: ParallelLayout) -> None:
        self._config = config
        self._reducer = MetricReducer(layout)

    @property
    def acts(self) -> bool:
        """Whether it can change or end a step, for which :meth:`check` must come before the training."""
        return self._config.seq_logprob_error_action != "flag"

    def warn(self, metrics: dict[str, float]) -> None:
        """In place of :meth:`check` where no log-probs were computed before the step: of what the loss reports."""
        largest = metrics.get("seq_logprob_error_max", 1.0)
        if not largest <= self._config.seq_logprob_error_threshold:
            log.warning(
                "a sequence has the log-prob error %.4g, over the threshold %.3g",
                largest, self._config.seq_logprob_error_threshold,
            )  # fmt: skip

    def check(
        self, prev_logprobs: Tensor, generation_logprobs: Tensor, token_mask: Tensor, sample_mask: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Flag sequences over the threshold. Collective over all ranks.

        Args:
            prev_logprobs, generation_logprobs, token_mask: [B, S], this data-parallel rank's rows.
            sample_mask: [B].

        Returns:
            The sample mask [B], flagged rows 0 when the action is mask; and the metrics over the global batch.

        Raises:
            LogprobMismatchError: action stop, and the flagged fraction exceeds the allowed one.
        """
        config = self._config
        error = sequence_logprob_error(prev_logprobs, generation_logprobs, token_mask)  # [B]
        valid = (sample_mask > 0) & (token_mask.sum(1) > 0)
        flagged = valid & ~(error <= config.seq_logprob_error_threshold)  # NaN is flagged
        values = torch.where(valid, error, torch.zeros_like(error)).double()
        largest = torch.cat([values, values.new_zeros(1)]).max()  # a rank may hold no row
        count = valid.sum()
        metrics = self._reducer.reduce(
            {
                "seq_logprob_error_mean": Reduction.mean(values.sum(), count, "sequences"),
                "seq_logprob_error_max": Reduction.maximum(largest, "sequences"),
                "seq_logprob_error_flagged_fraction": Reduction.mean(flagged.sum(), count, "sequences"),
            }
        )
        fraction = metrics.get("seq_logprob_error_flagged_fraction", 0.0)
        if config.seq_logprob_error_action == "stop" and fraction > config.seq_logprob_error_max_fraction:
            raise LogprobMismatchError(
                f"{fraction:.1%} of the sequences have a log-prob error over "
                f"grpo.seq_logprob_error_threshold {config.seq_logprob_error_threshold} (mean "
                f"{metrics['seq_logprob_error_mean']:.4f}, max {metrics['seq_logprob_error_max']:.4f}): the trainer "
                "and the engine compute different distributions. Look at the refit's attestation, "
                "generation.temperature, the tokenizer, and the precision of both sides"
            )
        if fraction > 0 and config.seq_logprob_error_action == "flag":
            log.warning(
                "%.1f%% of the sequences exceed the log-prob error threshold %.3g (max %.4g)",
                100 * fraction, config.seq_logprob_error_threshold, metrics["seq_logprob_error_max"],
            )  # fmt: skip
        if config.seq_logprob_error_action == "mask":
            sample_mask = torch.where(flagged, torch.zeros_like(sample_mask), sample_mask)
        return sample_mask, metrics
