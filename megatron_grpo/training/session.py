"""``TrainingSession``: the parts of a run on this rank, and what happens around each step."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from megatron_grpo.algorithms.advantage_estimator import make_advantage_estimator
from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn
from megatron_grpo.config import RunConfig, save_config
from megatron_grpo.data.chat import ChatRenderer, load_tokenizer
from megatron_grpo.data.datasets import load_prompts
from megatron_grpo.data.sampler import PromptSampler
from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.models.export import save_hf_directory
from megatron_grpo.observability.report import summarize, write_report
from megatron_grpo.observability.sinks import MetricLogger
from megatron_grpo.observability.telemetry import system_metrics
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.parallel import platform
from megatron_grpo.parallel.agreement import agree
from megatron_grpo.parallel.layout import ParallelLayout, broadcast_from_leader
from megatron_grpo.parallel.reductions import MetricReducer
from megatron_grpo.policy.experience import Experience
from megatron_grpo.policy.policy import MegatronPolicy
from megatron_grpo.refit.monitor import LogprobErrorMonitor
from megatron_grpo.refit.transaction import Refit
from megatron_grpo.rollout.client import EngineClient
from megatron_grpo.rollout.engine_process import EngineProcess
from megatron_grpo.rollout.event_loop import EventLoopThread
from megatron_grpo.rollout.router import EngineRouter
from megatron_grpo.training.checkpoint import Checkpointer
from megatron_grpo.training.evaluation import evaluate
from megatron_grpo.training.grpo import GRPO
from megatron_grpo.training.rollout_feed import RolloutDriver, SyncFeed
from megatron_grpo.training.signals import StopRequest
from megatron_grpo.types import Prompt

log = logging.getLogger(__name__)

_PROBE_ROWS = 2
_RESULTS = {
    "report.html": "curves and configuration, opens without a network",
    "hf": "the policy as a Hugging Face directory",
    "checkpoints": "to resume from",
    "metrics.jsonl": "all metrics of every step",
    "tensorboard": "event files",
    "logs": "one file per rank and engine",
}


class _Leader:
    """What only a replica leader has: its engine, its environment workers and the prompts."""

    def __init__(self, config: RunConfig, layout: ParallelLayout, stack: ExitStack) -> None:
        self._config = config
        generation = config.generation
        # prompts first: one that is too long is refused before anything is started
        tokenizer = load_tokenizer(config.policy.model_path)
        renderer = ChatRenderer(tokenizer, config.data.system_prompt)
        lengths = {
            "max_total_sequence_length": config.policy.max_total_sequence_length,
            "max_new_tokens": generation.max_new_tokens,
        }
        self.sampler = PromptSampler(
            load_prompts(config.data, "train", renderer, **lengths),
            seed=config.grpo.seed,
            shuffle=config.data.shuffle,
        )
        self.validation: list[Prompt] = []
        if config.data.validation is not None:
            self.validation = load_prompts(config.data, "validation", renderer, **lengths)
        self.engine = EngineProcess(
            f"engine{layout.dp_rank}",
            config.policy.model_path.resolve(),
            config.run_dir / "logs",
            generation.vllm.resolved(config.policy.precision),
            max_model_len=config.policy.max_total_sequence_length,
            seed=(config.grpo.seed * 1009 + layout.dp_rank) % 2**32,  # numpy's are of 32 bits
            cuda_device=None if platform.is_cpu() else torch.cuda.current_device(),
        )
        stack.enter_context(self.engine)  # starts; wait() waits
        self.environment = EnvironmentPool(config.env)
        stack.callback(self.environment.close)
        self.loop = stack.enter_context(EventLoopThread())
        self._decode = lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))

    def wait(self) -> None:
        """Until the engine answers and the environment is built."""
        self.environment.wait_until_ready()  # first: it is up, or has failed, long before the engine
        self.engine.wait_ready()
        self.client: EngineClient = self.engine.client()
        deadline = self._config.generation.vllm.request_timeout_s
        self.refit = Refit([self.client], self.loop, self.engine.private_dir)
        router = EngineRouter([self.client], self._decode)
        self.driver = RolloutDriver(router, self.loop, self.environment, self._config.grpo.seed, deadline)

    def score(self, rows: Experience) -> Tensor:
        """The engine's log-probs at temperature 1 of the response tokens of ``rows``: [rows, S], zero elsewhere."""
        lengths = [int(mask.nonzero().max()) + 1 for mask in rows.token_mask]

        async def score_all() -> list[list[float]]:
            sequences = [row[:length].tolist() for row, length in zip(rows.tokens, lengths, strict=True)]
            return await asyncio.gather(*(self.client.score(sequence) for sequence in sequences))

        deadline = self._config.generation.vllm.request_timeout_s
        scores = self.loop.run(score_all(), timeout_s=deadline, what="scoring after a refit")
        logprobs = torch.zeros(rows.tokens.shape)
        for row, values in zip(logprobs, scores, strict=True):
            row[1 : len(values) + 1] = torch.tensor(values)
        return logprobs * rows.token_mask


class TrainingSession:
    """Builds everything; what must be taken down goes on ``stack``."""

    def __init__(
        self, config: RunConfig, layout: ParallelLayout, console: Console, stop: StopRequest, stack: ExitStack
    ) -> None:
        self.config, self.layout, self._console, self._stop, self._stack = (
            config,
            layout,
            console,
            stop,
            stack,
        )
        self._leader: _Leader | None = None
        self._metrics: MetricLogger | None = None
        self._kept_rollouts: list[dict[str, Any]] = []
        self._build()

    def _build(self) -> None:
        config, layout = self.config, self.layout
        error: Exception | None = None
        if layout.is_replica_leader:
            try:
                self._leader = _Leader(config, layout, self._stack)
            except Exception as caught:  # noqa: BLE001 - agreed with all ranks, and raised again there
                error = caught
        agree(error, "start of the engines, environment and data")
        agree(self._data_mismatch(), "comparison of the replicas' prompts")

        loss = config.loss_fn
        self.policy = MegatronPolicy(
            config.policy,
            layout,
            temperature=config.generation.temperature,
            total_optimizer_steps=config.grpo.max_num_steps * config.optimizer_steps_per_rollout,
            with_reference=loss.reference_policy_kl_penalty > 0,
        )
        self._checkpoints = Checkpointer(
            config.run_dir / "checkpoints", config.checkpointing.keep_latest_k, layout
        )
        self.first_step = self._resume()
        if layout.rank == 0:
            save_config(config, config.run_dir / "config.yaml")
            self._metrics = self._stack.enter_context(
                MetricLogger.open(
                    config.logger,
                    config.run_dir,
                    self._console,
                    resume_step=self.first_step + 1 if self.first_step else 0,
                    max_num_steps=config.grpo.max_num_steps,
                )
            )
        if self._leader is not None:
            try:
                self._leader.wait()
            except Exception as caught:  # noqa: BLE001 - agreed with all ranks, and raised again there
                error = caught
        agree(error, "start of the engines and environment")
        self._feed = SyncFeed(config, layout, None, None)
        if self._leader is not None:
            self._feed = SyncFeed(config, layout, self._leader.sampler, self._leader.driver)
            self._feed.load_state_dict(self._kept_rollouts)
        self._grpo = GRPO(
            policy=self.policy,
            feed=self._feed,
            loss_fn=ClippedPGLossFn(loss),
            estimator=make_advantage_estimator(config.grpo, loss, layout.dp_group),
            monitor=LogprobErrorMonitor(config.grpo, layout),
            reducer=MetricReducer(layout),
            timer=StepTimer(),
        )

    def _data_mismatch(self) -> ValueError | None:
        """Replicas draw the same prompts by drawing from equal lists; a task may differ from process to process."""
        if self._leader is None or self.layout.dp == 1:
            return None
        fingerprint = int(self._leader.sampler.state_dict()["fingerprint"][:12], 16)
        extremes = torch.tensor([fingerprint, -fingerprint], device=platform.device())
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.layout.dp_group)
        if extremes[0] == -extremes[1]:
            return None
        return ValueError(
            "data.train gives different prompts on different replicas; give all nodes the same files, and set "
            "PYTHONHASHSEED=0 if the task depends on it"
        )

    def _resume(self) -> int:
        if self.config.checkpointing.resume == "never":
            return 0
        latest = self._checkpoints.latest()
        if latest is None:
            return 0
        state = self._checkpoints.load(self.policy, latest)
        if self._leader is not None:
            self._leader.sampler.load_state_dict(state["sampler"])
            self._kept_rollouts = self._checkpoints.rollouts(latest)
        if self.layout.rank == 0:
            log.info("resuming from %s after step %d", latest, state["step"])
        return int(state["step"])

    # ---- the run

    def train(self) -> None:
        """All remaining steps, evaluations, the last checkpoint, the export and the report."""
        grpo = self.config.grpo
        started = time.monotonic()
        self._stop.defer()
        self._push(self.first_step)
        if grpo.val_at_start and self.first_step == 0:
            accuracy = self._evaluate(0)
            if self._metrics is not None:
                self._metrics.log(0, accuracy)
        self._grpo.timer.finish_step()
        steps = self._grpo.train(self, self.first_step, grpo.max_num_steps)
        if steps == grpo.max_num_steps:
            self._finish(time.monotonic() - started)
        elif self.layout.rank == 0:
            log.warning(
                "stopped by %s after step %d, saved; the same command continues", self._stop.name, steps
            )

    @property
    def stop_requested(self) -> bool:
        return self._stop.requested

    def refit(self, version: int, batch: Experience) -> dict[str, float]:
        """Send the weights as ``version``; trainer and engine then score the first rows of ``batch``.

        The attestation proves that the bytes arrived, the scores that the engine computes with them.
        Collective over all ranks.
        """
        self._push(version)
        # interleaved pipelines take micro-batches PP at a time
        rows = batch.rows(0, self.layout.pp * (1 + _PROBE_ROWS // self.layout.pp))
        trainer = self.policy.logprobs(rows, temperature=1.0, micro_batch_size=1).cpu()  # [rows, S]
        engine = torch.zeros_like(trainer)
        error: Exception | None = None
        if self._leader is not None:
            try:
                engine = self._leader.score(rows)
            except Exception as caught:  # noqa: BLE001 - agreed with all ranks, and raised again there
                error = caught
        agree(error, f"scoring after the refit to version {version}")
        engine = engine.to(platform.device())
        broadcast_from_leader(engine, self.layout)
        _, metrics = self._grpo.monitor.check(trainer, engine.cpu(), rows.token_mask, rows.sample_mask)
        return {"refit/logprob_error_max": metrics["seq_logprob_error_max"]}

    def _push(self, version: int) -> None:
        weights = self.policy.weights()
        error: Exception | None = None
        if self._leader is not None:
            try:
                full = ((name, tensor) for name, tensor in weights if tensor is not None)
                self._leader.refit.push(full, version)
            except Exception as caught:  # noqa: BLE001 - agreed with all ranks, and raised again there
                error = caught
        for _ in weights:  # every rank takes part in every gather, also after a failure on the leader
            pass
        agree(error, f"refit to version {version}")

    def after_step(self, step: int, metrics: dict[str, float], *, last: bool) -> None:
        """Evaluate, log and save after ``step`` completed steps."""
        grpo, saving = self.config.grpo, self.config.checkpointing
        finished = step == grpo.max_num_steps
        if (grpo.val_period and step % grpo.val_period == 0) or (finished and grpo.val_at_end):
            metrics = metrics | self._evaluate(step)
        if self._metrics is not None:
            self._metrics.log(step, metrics | system_metrics())
        if last or (saving.save_period and step % saving.save_period == 0):
            sampler = self._leader.sampler.state_dict() if self._leader is not None else {}
            path = self._checkpoints.save(self.policy, step, {"sampler": sampler}, self._feed.state_dict())
            if self.layout.rank == 0:
                log.info("saved %s", path)

    def _evaluate(self, version: int) -> dict[str, float]:
        leader = self._leader
        return evaluate(
            leader.validation if leader else [],
            leader.driver if leader else None,
            self.layout,
            self.config.generation.max_new_tokens,
            version,
        )

    def _finish(self, seconds: float) -> None:
        run_dir = self.config.run_dir
        if self.config.checkpointing.export_hf:
            save_hf_directory(self.policy.model, self.policy.directory, run_dir / "hf", self.layout)
        if self._metrics is None:
            return
        self._metrics.close()
        if self.config.logger.report:
            write_report(run_dir / "metrics.jsonl", run_dir / "config.yaml", run_dir / "report.html")
        for label, value, note in summarize(run_dir / "metrics.jsonl"):
            log.info("%-20s %-18s %s", label, value, note)
        log.info("done after %.0f s; everything is in %s:", seconds, run_dir)
        for name, content in _RESULTS.items():
            if (run_dir / name).exists():
                log.info("  %-14s %s", name, content)
