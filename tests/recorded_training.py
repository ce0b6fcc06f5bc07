"""Training from recorded rollouts, without engines: what the layout and resume tests run on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from megatron_grpo.config import RunConfig
from megatron_grpo.types import Prompt, Rollout

PROMPTS, GENERATIONS = 4, 4


def run_config(
    model: Path, run_dir: Path, steps: int, packing: dict[str, Any] | None = None, **parallel: Any
) -> RunConfig:
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
                "sequence_packing": packing or {},
                "precision": "fp32",
                "parallel": parallel,
                # a large epsilon keeps Adam's first steps proportional to the gradient, not to its sign
                "optimizer": {"lr": 1e-2, "adam_eps": 1e-2, "weight_decay": 0.01},
                "scheduler": {"lr_warmup_iters": 2},
                "make_vocab_size_divisible_by": 1,
            },
            "generation": {"max_new_tokens": 16},
            "data": {"train": {"kind": "jsonl", "path": "unused.jsonl"}},
            "env": {"name": "custom", "class_path": "unused:Environment"},
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


class RecordedDriver:
    """In place of engines and environment: what is sampled for a group depends on its id only.

    ``rewards`` gives the rewards of a group by its id, one number or mapping of components per rollout.
    """

    def __init__(self, vocab_size: int, rewards: Callable[[int], list[Any]]) -> None:
        self._vocab_size, self._rewards = vocab_size, rewards

    def sample(
        self, prompts: Sequence[tuple[int, Prompt]], n: int, sampling: Any, version: int
    ) -> list[list[Any]]:
        return [self._group(group_id, prompt, n, version) for group_id, prompt in prompts]

    def _group(self, group_id: int, prompt: Prompt, n: int, version: int) -> list[Any]:
        from megatron_grpo.training.exchange import ScoredRollout

        generator = torch.Generator().manual_seed(group_id)
        group = []
        for sample, reward in enumerate(self._rewards(group_id)):
            size = int(torch.randint(1, 13, (), generator=generator))
            ids = tuple(torch.randint(0, self._vocab_size, (size,), generator=generator).tolist())
            logprobs = tuple((-5.0 - torch.rand(size, generator=generator)).tolist())
            rollout = Rollout(prompt, group_id, sample, ids, logprobs, (version,) * size, "stop", "")
            components = reward if isinstance(reward, dict) else {}
            total = float(sum(components.values())) if components else float(reward)
            group.append(ScoredRollout(rollout, total, {f"reward/{k}": v for k, v in components.items()}))
        assert len(group) == n
        return group


def train_recorded(
    rank: int,
    world: int,
    config: RunConfig,
    stop_after: int | None = None,
    rewards: Callable[[int], list[Any]] | None = None,
    layout: Any = None,
) -> dict[str, Any]:
    """Metrics of every step, a digest of weights and optimizer state after each, and on rank 0 the last weights.

    With ``stop_after`` the run stops and saves after that many steps; a run continues from the latest
    checkpoint of its run_dir. With ``rewards`` the real feed asks a :class:`RecordedDriver` for rollouts.
    ``layout`` is made here unless it is given.
    """
    from megatron_grpo.algorithms.advantage_estimator import make_advantage_estimator
    from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn
    from megatron_grpo.data.sampler import PromptSampler
    from megatron_grpo.observability.timers import StepTimer
    from megatron_grpo.parallel.layout import initialize_layout
    from megatron_grpo.parallel.reductions import MetricReducer
    from megatron_grpo.policy.experience import Experience
    from megatron_grpo.policy.packing import train_rule
    from megatron_grpo.policy.policy import MegatronPolicy
    from megatron_grpo.refit.monitor import LogprobErrorMonitor
    from megatron_grpo.training.checkpoint import Checkpointer
    from megatron_grpo.training.exchange import exchange
    from megatron_grpo.training.grpo import GRPO
    from megatron_grpo.training.rollout_feed import SyncFeed

    layout = layout or initialize_layout(**config.policy.parallel.group_sizes())
    policy = MegatronPolicy(
        config.policy,
        layout,
        temperature=1.0,
        total_optimizer_steps=config.grpo.max_num_steps * 2,
        with_reference=True,
    )

    class RecordedFeed:
        metrics: ClassVar[dict[str, float]] = {}

        def state_dict(self) -> list[Any]:
            return []

        def next(self, step: int) -> Experience:
            groups = recorded_rollouts(step, policy.vocab_size)
            mine = groups[layout.dp_rank * PROMPTS // layout.dp : (layout.dp_rank + 1) * PROMPTS // layout.dp]
            rule = train_rule(config.policy, layout)
            return exchange([s for g in mine for s in g], layout, 2, 7 + step, rule)

    feed: Any = RecordedFeed()
    prompts = [Prompt(f"test:{i}", tuple(range(1, 4 + 3 * i)), "", {}) for i in range(PROMPTS + 1)]
    sampler = PromptSampler(prompts, seed=0, shuffle=True)
    if rewards is not None:
        driver = RecordedDriver(policy.vocab_size, rewards)
        leads = layout.is_replica_leader
        feed = SyncFeed(config, layout, sampler if leads else None, driver if leads else None)  # type: ignore[arg-type]

    checkpoints = Checkpointer(config.run_dir / "checkpoints", 2, layout)
    latest, first = checkpoints.latest(), 0
    if latest is not None:
        state = checkpoints.load(policy, latest)
        first = state["step"]
        sampler.load_state_dict(state["sampler"])
        if rewards is not None and layout.is_replica_leader:
            feed.load_state_dict(checkpoints.rollouts(latest))

    class Recorder:
        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []
            self.digests = [digest(policy)]

        @property
        def stop_requested(self) -> bool:
            return stop_after is not None and first + len(self.steps) + 1 >= stop_after

        def refit(self, version: int, batch: Experience) -> dict[str, float]:
            return {}

        def after_step(self, step: int, metrics: dict[str, float], *, last: bool) -> None:
            self.steps.append({k: v for k, v in metrics.items() if not k.startswith("time/")})
            self.digests.append(digest(policy))
            if last and stop_after is not None:
                checkpoints.save(policy, step, {"sampler": sampler.state_dict()}, feed.state_dict())

    recorder = Recorder()
    GRPO(
        policy, feed, ClippedPGLossFn(config.loss_fn),
        make_advantage_estimator(config.grpo, config.loss_fn, layout.dp_group),
        LogprobErrorMonitor(config.grpo, layout), MetricReducer(layout), StepTimer(),
    ).train(recorder, first, config.grpo.max_num_steps)  # fmt: skip
    weights = {name: tensor for name, tensor in policy.weights() if tensor is not None}
    return {
        "steps": recorder.steps,
        "digests": recorder.digests,
        "weights": weights if rank == 0 else {},
    }


def digest(policy: Any) -> str:
    """Of the bytes of this rank's weights, gradient steps and optimizer state."""
    tensors = [parameter.detach() for chunk in policy.model for parameter in chunk.parameters()]
    for optimizer in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for state in optimizer.optimizer.state.values():
            tensors += [value for value in state.values() if torch.is_tensor(value)]
    content = hashlib.sha256(str(policy.scheduler.num_steps).encode())
    for tensor in tensors:
        content.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def assert_same_training(results: list[Any], expected: Any) -> None:
    """Metrics of every step on every rank, and the last weights, within 1e-5 of ``expected``."""
    for rank, result in enumerate(results):
        for step, (got, want) in enumerate(zip(result["steps"], expected["steps"], strict=True)):
            assert got.keys() == want.keys()
            for key, value in want.items():
                assert got[key] == pytest.approx(value, rel=1e-5, abs=1e-6), (rank, step, key)
    got, want = results[0]["weights"], expected["weights"]
    assert got.keys() == want.keys()
    worst = max(((got[k] - want[k]).abs().max() / want[k].abs().max()).item() for k in want)
    assert worst < 1e-5
