"""Three training steps from the same weights and recorded rollouts, in every layout, against one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.config import RunConfig
from megatron_grpo.types import Prompt, Rollout
from tests.rank_pool import RankPool
from tests.tiny_model import write_tiny_model

STEPS, PROMPTS, GENERATIONS = 3, 4, 4
LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2_sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2": (2, {}),
    "tp2_pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


def run_config(model: Path, run_dir: Path, **parallel: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": run_dir,
            "grpo": {
                "max_num_steps": STEPS,
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


def train_recorded(rank: int, world: int, config: RunConfig) -> dict[str, Any]:
    """Metrics of every step and, on rank 0, the weights after the last."""
    from megatron_grpo.algorithms.advantage_estimator import make_advantage_estimator
    from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn
    from megatron_grpo.observability.timers import StepTimer
    from megatron_grpo.parallel.layout import initialize_layout
    from megatron_grpo.parallel.reductions import MetricReducer
    from megatron_grpo.policy.experience import Experience
    from megatron_grpo.policy.policy import MegatronPolicy, sequence_multiple
    from megatron_grpo.refit.monitor import LogprobErrorMonitor
    from megatron_grpo.training.exchange import exchange
    from megatron_grpo.training.grpo import GRPO

    layout = initialize_layout(**config.policy.parallel.group_sizes())
    policy = MegatronPolicy(
        config.policy, layout, temperature=1.0, total_optimizer_steps=STEPS * 2, with_reference=True
    )

    class RecordedFeed:
        def next(self, step: int) -> Experience:
            groups = recorded_rollouts(step, policy.vocab_size)
            mine = groups[layout.dp_rank * PROMPTS // layout.dp : (layout.dp_rank + 1) * PROMPTS // layout.dp]
            multiple = sequence_multiple(layout, config.policy.parallel.sequence_parallel)
            return exchange([s for g in mine for s in g], layout, 2, 7 + step, multiple)

    class Recorder:
        stop_requested = False

        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []

        def refit(self, version: int) -> None: ...

        def after_step(self, step: int, metrics: dict[str, float], *, last: bool) -> None:
            self.steps.append({k: v for k, v in metrics.items() if not k.startswith("time/")})

    recorder = Recorder()
    GRPO(
        policy, RecordedFeed(), ClippedPGLossFn(config.loss_fn),
        make_advantage_estimator(config.grpo, config.loss_fn, layout.dp_group),
        LogprobErrorMonitor(config.grpo, layout), MetricReducer(layout), StepTimer(),
    ).train(recorder, 0, STEPS)  # fmt: skip
    weights = {name: tensor for name, tensor in policy.weights() if tensor is not None}
    return {"steps": recorder.steps, "weights": weights if rank == 0 else {}}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def reference(request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("layouts")
    model = write_tiny_model(folder / "model", tied=request.param, num_hidden_layers=4)
    return model, folder, ranks.run(1, train_recorded, run_config(model, folder))[0]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", LAYOUTS)
def test_same_training_in_every_layout(name: str, reference: Any, ranks: RankPool) -> None:
    model, folder, expected = reference
    world, parallel = LAYOUTS[name]
    results = ranks.run(world, train_recorded, run_config(model, folder, **parallel))
    for rank, result in enumerate(results):
        assert len(result["steps"]) == STEPS
        for step, (got, want) in enumerate(zip(result["steps"], expected["steps"], strict=True)):
            assert got.keys() == want.keys()
            for key, value in want.items():
                assert got[key] == pytest.approx(value, rel=1e-5, abs=1e-6), (rank, step, key)
    got, want = results[0]["weights"], expected["weights"]
    assert got.keys() == want.keys()
    worst = max(((got[k] - want[k]).abs().max() / want[k].abs().max()).item() for k in want)
    assert worst < 1e-5


def test_training_changes_the_weights(reference: Any, ranks: RankPool) -> None:
    """Guards the comparison above: equal because trained alike, not because nothing happened."""
    from safetensors.torch import load_file

    model, _, result = reference
    start = load_file(model / "model.safetensors")
    moved = [k for k, v in result["weights"].items() if (v - start[k]).abs().max() > 1e-4]
    assert len(moved) == len(start)
    assert all(step["grad_norm"] > 0 for step in result["steps"])
