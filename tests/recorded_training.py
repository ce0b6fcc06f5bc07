"""Training from recorded rollouts, without engines: what the layout and resume tests run on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_grpo.config import RunConfig
from megatron_grpo.types import Prompt, Rollout

PROMPTS, GENERATIONS = 4, 4


def run_config(model: Path, run_dir: Path, steps: int, **parallel: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": run_dir,
            "grpo": {
                "max_num_steps": steps,
                "num_prompts_per_step": PROMPTS,
                "num_generations_per_prompt": GENERATIONS,
                "seq_logprob_error_threshold": 1e9,
            },
            "loss_fn": {"reference_policy_kl_penalty": 0.05},
            "policy": {
                "model_path": model,
                "max_total_sequence_length": 64,
                "train_global_batch_size": 8,
                "train_micro_batch_size": 2,
                "precision": "fp32",
                "parallel": parallel,
                # a large epsilon keeps Adam's first steps proportional to the gradient, not to its sign
                "optimizer": {"lr": 1e-2, "adam_eps": 1e-2, "weight_decay": 0.01},
                "scheduler": {"lr_warmup_iters": 2},
                "make_vocab_size_divisible_by": 1,
            },
            "generation": {"max_new_tokens": 16},
            "data": {"train": {"kind": "jsonl", "path": "unused.jsonl"}},
            "env": {"name": "reasoning_gym"},
        }
    )


def recorded_rollouts(step: int, vocab_size: int) -> list[list[Any]]:
    """Groups of rollouts with rewards; lengths vary, so shards and micro-batches are uneven."""
    from megatron_grpo.training.exchange import ScoredRollout

    generator = torch.Generator().manual_seed(100 + step)

    def integers(low: int, high: int, size: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high, (size,), generator=generator).tolist())

    groups = []
    for index in range(PROMPTS):
        prompt = Prompt(f"test:{index}", integers(0, vocab_size, 4 + 3 * index), "", {})
        group = []
        for sample in range(GENERATIONS):
            size = integers(1, 13, 1)[0]
            logprobs = tuple((-5.0 - torch.rand(size, generator=generator)).tolist())
            rollout = Rollout(
                prompt, step * PROMPTS + index, sample, integers(0, vocab_size, size), logprobs, (step,) * size,
                "stop", "",
            )  # fmt: skip
            group.append(ScoredRollout(rollout, float(integers(0, 3, 1)[0]), {}))
        groups.append(group)
    return groups


def train_recorded(rank: int, world: int, config: RunConfig, stop_after: int | None = None) -> dict[str, Any]:
    """Metrics of every step and, on rank 0, the weights after the last.

    With ``stop_after`` the run stops and saves after that many steps; a run continues from the latest
    checkpoint of its run_dir.
    """
    from megatron_grpo.algorithms.advantage_estimator import make_advantage_estimator
    from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn
    from megatron_grpo.observability.timers import StepTimer
    from megatron_grpo.parallel.layout import initialize_layout
    from megatron_grpo.parallel.reductions import MetricReducer
    from megatron_grpo.policy.experience import Experience
    from megatron_grpo.policy.policy import MegatronPolicy, sequence_multiple
    from megatron_grpo.refit.monitor import LogprobErrorMonitor
    from megatron_grpo.training.checkpoint import Checkpointer
    from megatron_grpo.training.exchange import exchange
    from megatron_grpo.training.grpo import GRPO

    layout = initialize_layout(**config.policy.parallel.group_sizes())
    policy = MegatronPolicy(
        config.policy,
        layout,
        temperature=1.0,
        total_optimizer_steps=config.grpo.max_num_steps * 2,
        with_reference=True,
    )

    class RecordedFeed:
        def next(self, step: int) -> Experience:
            groups = recorded_rollouts(step, policy.vocab_size)
            mine = groups[layout.dp_rank * PROMPTS // layout.dp : (layout.dp_rank + 1) * PROMPTS // layout.dp]
            multiple = sequence_multiple(layout, config.policy.parallel.sequence_parallel)
            return exchange([s for g in mine for s in g], layout, 2, 7 + step, multiple)

    checkpoints = Checkpointer(config.run_dir / "checkpoints", 2, layout)
    latest = checkpoints.latest()
    first = checkpoints.load(policy, latest)["step"] if latest is not None else 0

    class Recorder:
        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []

        @property
        def stop_requested(self) -> bool:
            return stop_after is not None and first + len(self.steps) + 1 >= stop_after

        def refit(self, version: int, batch: Experience) -> dict[str, float]:
            return {}

        def after_step(self, step: int, metrics: dict[str, float], *, last: bool) -> None:
            self.steps.append({k: v for k, v in metrics.items() if not k.startswith("time/")})
            if last and stop_after is not None:
                checkpoints.save(policy, step, {})

    recorder = Recorder()
    GRPO(
        policy, RecordedFeed(), ClippedPGLossFn(config.loss_fn),
        make_advantage_estimator(config.grpo, config.loss_fn, layout.dp_group),
        LogprobErrorMonitor(config.grpo, layout), MetricReducer(layout), StepTimer(),
    ).train(recorder, first, config.grpo.max_num_steps)  # fmt: skip
    weights = {name: tensor for name, tensor in policy.weights() if tensor is not None}
    return {"steps": recorder.steps, "weights": weights if rank == 0 else {}}
