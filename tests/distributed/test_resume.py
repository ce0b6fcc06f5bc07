"""A run that stops and resumes is the run that did not stop, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_pool import RankPool
from tests.recorded_training import run_config, train_recorded
from tests.tiny_model import write_tiny_model

LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", LAYOUTS)
def test_three_and_three_steps_are_six(name: str, ranks: RankPool, tmp_path: Path) -> None:
    world, parallel = LAYOUTS[name]
    model = write_tiny_model(tmp_path / "model")

    def run(folder: str, stop_after: int | None = None) -> dict[str, Any]:
        return ranks.run(
            world, train_recorded, run_config(model, tmp_path / folder, 6, **parallel), stop_after
        )[0]

    whole, first, second = run("whole"), run("halves", 3), run("halves")
    assert [len(r["steps"]) for r in (whole, first, second)] == [6, 3, 3]
    assert first["steps"] + second["steps"] == whole["steps"]
    assert whole["weights"].keys() == second["weights"].keys()
    for key, tensor in whole["weights"].items():
        assert torch.equal(tensor, second["weights"][key]), key
    assert any(not torch.equal(tensor, first["weights"][key]) for key, tensor in whole["weights"].items())


@pytest.mark.timeout(240)
def test_only_the_newest_checkpoints_stay_and_a_killed_save_does_no_harm(
    ranks: RankPool, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "model")
    for stop in (1, 2, 3):
        ranks.run(1, train_recorded, run_config(model, tmp_path, 6), stop)
    checkpoints = tmp_path / "checkpoints"
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["latest", "step_00000002", "step_00000003"]
    # what a save killed half-way leaves behind
    (checkpoints / "step_00000004.tmp").mkdir()
    result = ranks.run(1, train_recorded, run_config(model, tmp_path, 6), 4)[0]
    assert len(result["steps"]) == 1
    assert (checkpoints / "latest").read_text().strip() == "step_00000004"
    assert not (checkpoints / "step_00000004.tmp").exists()
