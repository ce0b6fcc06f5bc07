"""GRPO: the training loop, once, for every rollout feed.

One step, as in the papers: sample a group of responses per prompt, reward them, score them under the
trainer's own weights, turn rewards into group-relative advantages, take a few clipped policy-gradient steps,
and send the new weights to the engines.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_grpo.algorithms.advantage_estimator import AdvantageEstimator, AdvantageInputs
from megatron_grpo.algorithms.loss.kl import kl_in_reward
from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.parallel.agreement import any_of_ranks, any_rank
from megatron_grpo.parallel.reductions import MetricReducer, Metrics, Reduction
from megatron_grpo.policy.experience import Experience
from megatron_grpo.policy.policy import MegatronPolicy
from megatron_grpo.refit.monitor import LogprobErrorMonitor
from megatron_grpo.training.metrics import batch_metrics

log = logging.getLogger(__name__)


class RolloutFeed(Protocol):
    """Where a step's experience comes from; ``metrics`` says what the last one took, the same on all ranks."""

    metrics: dict[str, float]

    def next(self, step: int) -> Experience:
        """This replica's rows for ``step``. Collective over all ranks."""
        ...


class Run(Protocol):
    """What surrounds the algorithm: engines, logs, checkpoints. Methods are collective over all ranks."""

    def refit(self, version: int, batch: Experience) -> dict[str, float]:
        """Send the policy's weights to the engines as ``version``; both sides then score rows of ``batch``."""
        ...

    def after_step(self, step: int, metrics: dict[str, float], *, last: bool) -> None:
        """``step`` steps are complete: evaluate, log, save. ``last``: the loop ends here."""

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop."""
        ...


@dataclass
class GRPO:
    """The parts of the algorithm on this rank."""

    policy: MegatronPolicy
    feed: RolloutFeed
    loss_fn: ClippedPGLossFn
    estimator: AdvantageEstimator
    monitor: LogprobErrorMonitor
    reducer: MetricReducer
    timer: StepTimer

    def train(self, run: Run, first_step: int, max_num_steps: int) -> int:
        """Steps ``first_step`` to ``max_num_steps - 1``; returns how many are complete."""
        for step in range(first_step, max_num_steps):
            with self.timer("rollout"):
                batch = self.feed.next(step)
            with self.timer("logprob"):
                metrics = self.score(batch)
            with self.timer("train"):
                metrics = self.update(batch, step) | metrics
            if batch.prev_logprobs is None:
                self.monitor.warn(metrics)
            with self.timer("refit"):
                metrics |= run.refit(step + 1, batch)
            metrics |= self.feed.metrics | self.reducer.reduce(batch_metrics(batch))
            last = step + 1 == max_num_steps or any_rank(run.stop_requested)
            run.after_step(step + 1, metrics | self.timer.finish_step(), last=last)
            if last:
                return step + 1
        return max_num_steps

    def score(self, batch: Experience) -> dict[str, float]:
        """Fill in the trainer's log-probs, check them against the engines', and compute advantages.

        With ``force_on_policy_ratio`` the loss has no use for log-probs from before the step; then they are computed
        only for a KL in the reward, or for a monitor that may change the step.
        """
        config = self.loss_fn.config
        metrics: dict[str, float] = {}
        if not config.force_on_policy_ratio or config.use_kl_in_reward or self.monitor.acts:
            batch.prev_logprobs = self.policy.logprobs(batch).cpu()
            batch.sample_mask, metrics = self.monitor.check(
                batch.prev_logprobs, batch.generation_logprobs, batch.token_mask, batch.sample_mask
            )
        if config.reference_policy_kl_penalty > 0:
            batch.reference_policy_logprobs = self.policy.reference_logprobs(batch).cpu()
        advantages, reductions = self.estimator(
            AdvantageInputs(
                rewards=batch.rewards,
                group_ids=batch.group_ids,
                sample_mask=batch.sample_mask,
                token_mask=batch.token_mask,
                components=batch.components,
                kl=self._kl_in_reward(batch),
            )
        )
        batch.advantages = advantages.float()
        return metrics | self.reducer.reduce(reductions)

    def update(self, batch: Experience, version: int) -> dict[str, float]:
        """One optimizer step per mini-batch; ``version`` is that of the weights before the first.

        A mini-batch without a gradient is skipped: its step would only follow Adam's momentum and the weight
        decay. The learning-rate schedule does not advance either.
        """
        parts = list(batch.minibatches())
        moving = any_of_ranks([self._has_gradient(part) for part in parts])
        steps = [
            self.policy.train_step(part, self.loss_fn, version)
            for part, moves in zip(parts, moving, strict=True)
            if moves
        ]
        skipped = len(parts) - len(steps)
        if skipped and self.reducer.layout.rank == 0:
            log.warning(
                "step %d: %d of %d optimizer steps skipped: no valid token has an advantage, because all rewards of "
                "each group are equal, all rows are masked, or log-probs are not finite",
                version + 1, skipped, len(parts),
            )  # fmt: skip
        metrics = self.reducer.reduce(self.reducer.merge([step.metrics for step in steps]))
        metrics["optimizer_steps_skipped"] = float(skipped)
        if skipped:
            left_out = [self._counts(part) for part, moves in zip(parts, moving, strict=True) if not moves]
            for name, count in self.reducer.reduce(self.reducer.merge(left_out)).items():
                metrics[name] = metrics.get(name, 0.0) + count
        if steps:
            metrics["grad_norm"] = sum(step.grad_norm for step in steps) / len(steps)
            metrics["lr"] = steps[-1].lr
        return metrics

    def _has_gradient(self, part: Experience) -> bool:
        """Whether a token of these rows can move a weight: one that counts, with an advantage or a KL term."""
        assert part.advantages is not None
        valid, _ = self._tokens(part)
        return bool((valid if self.loss_fn.needs_reference_policy else valid & (part.advantages != 0)).any())

    def _tokens(self, part: Experience) -> tuple[Tensor, Tensor]:
        """[B, S] the tokens that count in the loss, and those that would if their log-probs were finite."""
        asked = (part.token_mask > 0) & (part.sample_mask > 0)[:, None]
        usable = self.loss_fn.usable(
            part.prev_logprobs, part.generation_logprobs, part.reference_policy_logprobs
        )
        return asked & usable, asked & ~usable

    def _counts(self, part: Experience) -> Metrics:
        """What the loss would have counted of a mini-batch that is skipped."""
        valid, dropped = self._tokens(part)
        counts = {
            "num_valid_tokens": valid.sum(),
            "num_valid_samples": valid.any(1).sum(),
            "num_dropped_tokens": dropped.sum(),
        }
        return {name: Reduction.total(count, "sequences") for name, count in counts.items()}

    def _kl_in_reward(self, batch: Experience) -> Tensor | None:
        config = self.loss_fn.config
        if not config.use_kl_in_reward or batch.reference_policy_logprobs is None:
            return None
        assert batch.prev_logprobs is not None
        return kl_in_reward(config, batch.prev_logprobs, batch.reference_policy_logprobs)
