"""Three training steps from the same weights and recorded rollouts, in every layout, against one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from megatron_grpo.config import RunConfig
from tests.rank_pool import RankPool
from tests.recorded_training import assert_same_training, run_config, train_recorded
from tests.tiny_model import write_tiny_model

STEPS = 3
LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2_sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2": (2, {}),
    "tp2_pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}
PACKED_LAYOUTS = {"one_rank": (1, {}), **LAYOUTS, "dp2_cp2": (4, {"context_parallel_size": 2})}
# two to four sequences a micro-batch; budgets differ, so that log-prob passes have other micro-batches
PACKING = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 80}
CASES = [
    *(pytest.param(tied, name, None, id=f"{tied}-{name}") for tied in ("tied", "untied") for name in LAYOUTS),
    *(pytest.param("tied", name, PACKING, id=f"{name}-packed") for name in PACKED_LAYOUTS),
]


@pytest.fixture(scope="module")
def reference(ranks: RankPool, tmp_path_factory: Any) -> Callable[[str], Any]:
    """Model, folder and the result of one rank, for tied or untied embeddings."""

    @functools.cache
    def train(embeddings: str) -> Any:
        folder = tmp_path_factory.mktemp(embeddings)
        model = write_tiny_model(folder / "model", tied=embeddings == "tied", num_hidden_layers=4)
        return model, folder, ranks.run(1, train_recorded, run_config(model, folder, STEPS))[0]

    return train


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("embeddings", "name", "packing"), CASES)
def test_same_training_in_every_layout(
    embeddings: str, name: str, packing: dict[str, Any] | None, reference: Any, ranks: RankPool
) -> None:
    model, folder, expected = reference(embeddings)
    world, parallel = PACKED_LAYOUTS[name]
    results = ranks.run(world, train_recorded, run_config(model, folder, STEPS, packing, **parallel))
    assert all(len(result["steps"]) == STEPS for result in results)
    assert_same_training(results, expected)


@pytest.mark.parametrize("embeddings", ["tied", "untied"])
def test_training_changes_the_weights(embeddings: str, reference: Any) -> None:
    """Guards the comparison above: equal because trained alike, not because nothing happened."""
    from safetensors.torch import load_file

    model, _, result = reference(embeddings)
    start = load_file(model / "model.safetensors")
    moved = [k for k, v in result["weights"].items() if (v - start[k]).abs().max() > 1e-4]
    assert len(moved) == len(start)
    assert all(step["grad_norm"] > 0 for step in result["steps"])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("packing", [None, PACKING], ids=["padded", "packed"])
def test_whitening_is_over_whole_rows_under_context_parallelism(
    packing: dict[str, Any] | None, reference: Any, ranks: RankPool
) -> None:
    """Reinforce++ with the KL in the reward, where a rank holds no response token of some sequences."""
    model, folder, _ = reference("tied")

    def config(packing: dict[str, Any] | None, **parallel: Any) -> RunConfig:
        values = run_config(model, folder, 2, packing, **parallel).model_dump()
        values["grpo"]["adv_estimator"]["name"] = "reinforce_plus_plus"
        values["loss_fn"]["use_kl_in_reward"] = True
        return RunConfig.model_validate(values)

    (expected,) = ranks.run(1, train_recorded, config(None))
    assert all(step["kl_penalty"] >= 0 for step in expected["steps"])
    assert_same_training(ranks.run(2, train_recorded, config(packing, context_parallel_size=2)), expected)
