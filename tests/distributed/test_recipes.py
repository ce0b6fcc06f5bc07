"""Each recipe of configs/ trains: three steps of a tiny model on TP 2, from recorded rollouts."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_grpo.config import RunConfig, load_config
from tests.rank_pool import RankPool
from tests.recorded_training import train_recorded
from tests.tiny_model import write_tiny_model

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "quickstart")
SIZES = [
    "grpo.max_num_steps=3",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_period=0",
    "policy.max_total_sequence_length=64",
    "policy.train_global_batch_size=4",
    "policy.train_micro_batch_size=2",
    "policy.parallel.tensor_model_parallel_size=2",
    "policy.optimizer={lr: 1.0e-2}",
    "policy.scheduler={}",
    "generation.max_new_tokens=16",
]


def rewards(group_id: int) -> list[Any]:
    """Correctness and format of four rollouts; a group in three has no signal."""
    if group_id % 3 == 1:
        return [{"correctness": 0.0, "format": 1.0}] * 4
    return [{"correctness": float(i == group_id % 4), "format": float(i < 3)} for i in range(4)]


def train_all(rank: int, world: int, configs: dict[str, RunConfig]) -> dict[str, Any]:
    """One after the other in the same process groups."""
    from megatron_grpo.parallel.layout import initialize_layout

    layout = initialize_layout(tensor_model_parallel_size=world)
    return {
        name: train_recorded(rank, world, config, rewards=rewards, layout=layout)
        for name, config in configs.items()
    }


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: Any) -> dict[str, Any]:
    """Results of all recipes, and of ``plain``: the usual clip, which some of them depart from by one key."""
    folder = tmp_path_factory.mktemp("recipes")
    model = write_tiny_model(folder / "model")

    def small(name: str, *overrides: str) -> RunConfig:
        paths = [f"run_dir={folder / name}", f"policy.model_path={model}"]
        return load_config(CONFIGS / f"{name}.yaml", [*SIZES, *paths, *overrides])

    configs = {name: small(name) for name in RECIPES}
    configs["plain"] = small("dual_clip", "loss_fn.ratio_clip_c=null")
    results = ranks.run(2, train_all, configs, timeout=400)[0]
    return {**results, "start": {"weights": load_file(model / "model.safetensors")}}


def column(result: Any, name: str) -> list[float]:
    return [step[name] for step in result["steps"]]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(trained: dict[str, Any], name: str) -> None:
    steps = trained[name]["steps"]
    assert len(steps) == 3
    for step in steps:
        assert all(math.isfinite(value) for value in step.values())
        assert step["loss"] != 0
        assert step["grad_norm"] > 0
        # a mini-batch of 4 may hold nothing but rows without a signal
        assert step["optimizer_steps_skipped"] < 4
    start = trained["start"]["weights"]
    moved = [
        key for key, weight in trained[name]["weights"].items() if not torch.equal(weight.float(), start[key])
    ]
    assert len(moved) == len(start)


@pytest.mark.timeout(500)
def test_metrics_are_those_of_the_documentation(trained: dict[str, Any]) -> None:
    text = (CONFIGS.parent / "docs" / "metrics.md").read_text()
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall("`(.+?)`", row)}
    steps = [step for name in (*RECIPES, "plain") for step in trained[name]["steps"]]
    emitted = {name for step in steps for name in step}
    assert emitted - documented == {"reward/correctness", "reward/format"}
    missing = {
        name for name in documented - emitted if not name.startswith(("time/", "system/", "validation/"))
    }
    assert missing == {
        "importance_weight_out_of_bounds", "refit/logprob_error_max", "reward/<component>", "environment/<name>",
    }  # fmt: skip


@pytest.mark.timeout(500)
def test_each_recipe_trains_to_its_own_weights(trained: dict[str, Any]) -> None:
    """Same model, rollouts and optimizer: what differs is the algorithm."""
    names = sorted(trained.keys() - {"start"})
    assert len(names) == 9
    for first, second in itertools.combinations(names, 2):
        a, b = trained[first]["weights"], trained[second]["weights"]
        assert any(not torch.equal(a[key], b[key]) for key in a), (first, second)


@pytest.mark.timeout(500)
def test_the_variant_of_each_recipe_is_active(trained: dict[str, Any]) -> None:
    highest = {name: max(column(r, "probs_ratio_clamped_max")) for name, r in trained.items()
               if name not in ("rloo", "start")}  # fmt: skip
    assert highest == pytest.approx(
        {"plain": 1.2, "grpo": 1.2, "dual_clip": 1.2, "reinforce_plus_plus": 1.2, "gdpo": 1.2}
        | {"dapo": 1.28, "gspo": 1.0004, "cispo": 5.0}
    )
    assert min(column(trained["cispo"], "probs_ratio_clamped_min")) < 0.8  # no lower bound
    assert max(column(trained["dual_clip"], "clip_fraction_dual")) > 0
    assert min(column(trained["grpo"], "kl_penalty")) >= 0
    assert all("probs_ratio" not in step for step in trained["rloo"]["steps"])  # REINFORCE
    assert column(trained["rloo"], "num_dropped_kl_tokens") == [0, 0, 0]  # KL in the reward

    assert column(trained["dapo"], "dynamic_sampling/rounds") == [2, 2, 2]
    assert column(trained["dapo"], "num_degenerate_groups") == [0, 0, 0]
    assert all(count > 0 for count in column(trained["grpo"], "num_degenerate_groups"))
    assert column(trained["reinforce_plus_plus"], "advantage_mean") == pytest.approx([0] * 3, abs=1e-6)
    assert column(trained["gdpo"], "advantage_max") != column(trained["grpo"], "advantage_max")
