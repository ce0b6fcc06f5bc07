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
from megatron_grpo.parallel.reductions import MetricReducer
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
            with self.timer("refit"):
                metrics |= run.refit(step + 1, batch)
            metrics |= self.feed.metrics | self.reducer.reduce(batch_metrics(batch))
            last = step + 1 == max_num_steps or any_rank(run.stop_requested)
            run.after_step(step + 1, metrics | self.timer.finish_step(), last=last)
            if last:
                return step + 1
        return max_num_steps

    def score(self, batch: Experience) -> dict[str, float]:
        """Fill in the trainer's log-probs, check them against the engines', and compute advantages."""
        config = self.loss_fn.config
        batch.prev_logprobs = self.policy.logprobs(batch).cpu()
        if config.reference_policy_kl_penalty > 0:
            batch.reference_policy_logprobs = self.policy.reference_logprobs(batch).cpu()
        batch.sample_mask, metrics = self.monitor.check(
            batch.prev_logprobs, batch.generation_logprobs, batch.token_mask, batch.sample_mask
        )
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
                "each group are equal or all rows are masked",
                version + 1, skipped, len(parts),
            )  # fmt: skip
        metrics = self.reducer.reduce(self.reducer.merge([step.metrics for step in steps]))
        metrics["optimizer_steps_skipped"] = float(skipped)
        if steps:
            metrics["grad_norm"] = sum(step.grad_norm for step in steps) / len(steps)
            metrics["lr"] = steps[-1].lr
        return metrics

    def _has_gradient(self, part: Experience) -> bool:
        """Whether a token of these rows can move a weight: one that counts, with an advantage or a KL term."""
        assert part.advantages is not None
        counts = (part.token_mask > 0) & (part.sample_mask > 0)[:, None]  # [B, S]
        for logprobs in (part.prev_logprobs, part.generation_logprobs, part.reference_policy_logprobs):
            if logprobs is not None:
                counts &= logprobs.isfinite()  # the loss drops the others
        if not self.loss_fn.needs_reference_policy:
            counts &= part.advantages != 0
        return bool(counts.any())

    def _kl_in_reward(self, batch: Experience) -> Tensor | None:
        config = self.loss_fn.config
        if not config.use_kl_in_reward or batch.reference_policy_logprobs is None:
            return None
        assert batch.prev_logprobs is not None
        return kl_in_reward(config, batch.prev_logprobs, batch.reference_policy_logprobs)
