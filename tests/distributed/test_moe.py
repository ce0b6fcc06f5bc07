"""Qwen3-MoE in every expert layout: Hugging Face's logits, export, and training against one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.distributed.test_models import VOCAB, check_layout_job, tokens
from tests.rank_pool import RankPool
from tests.recorded_training import run_config, train_recorded
from tests.tiny_model import write_tiny_model

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # world size, policy.parallel
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "tp2_ep2_etp1": (2, TP2 | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "tp2": (2, TP2),  # expert-TP 2
    "tp2_etp1": (2, TP2 | {"expert_tensor_parallel_size": 1}),
    "etp2": (2, {"expert_tensor_parallel_size": 2}),
    "cp2_ep2": (2, {"context_parallel_size": 2, "expert_model_parallel_size": 2}),
    "tp2_ep2": (4, TP2 | {"expert_model_parallel_size": 2}),
    "ep2_etp2": (4, {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    "pp2_ep2": (4, PP2 | {"expert_model_parallel_size": 2}),
    "pp2_vpp2": (2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, torch.Tensor]]:
    """By norm_topk_prob: a random Qwen3-MoE directory, one layer dense, and transformers' logits."""
    result = {}
    for normalized in (True, False):
        torch.manual_seed(int(normalized))
        config = Qwen3MoeConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, head_dim=32,
            num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=48, norm_topk_prob=normalized, mlp_only_layers=[1], initializer_range=0.1,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )  # fmt: skip
        model = Qwen3MoeForCausalLM(config).eval()
        for name, param in model.named_parameters():
            if "norm" in name:  # norms of one would hide a wrong mapping
                torch.nn.init.uniform_(param, 0.5, 1.5)
        path = tmp_path_factory.mktemp("qwen3_moe") / "model"
        model.save_pretrained(path)
        with torch.no_grad():
            result[normalized] = (path, model(tokens()).logits)
    return result


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["one_rank", "one_rank_normalized", *LAYOUTS])
def test_logits_and_export_equal_hugging_face(
    layout: str, ranks: RankPool, models: dict[bool, tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    world, parallel = LAYOUTS.get(layout, (1, {}))
    path, expected = models[layout != "one_rank"]
    out = tmp_path / "export"
    packed = layout in ("one_rank", "tp2_ep2")
    results = ranks.run(world, check_layout_job, str(path), parallel, expected, packed, str(out), timeout=240)
    errors = [error for error, _ in results if error >= 0]
    assert len(errors) == world // parallel.get("pipeline_model_parallel_size", 1)
    assert max(errors) < 1e-5
    reloaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(reloaded(tokens()).logits, expected, rtol=0, atol=1e-6)


STEPS = 3


@pytest.fixture(scope="module")
def reference(ranks: RankPool, tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("moe")
    model = write_tiny_model(folder / "model", num_hidden_layers=4, num_experts=4)
    return model, folder, ranks.run(1, train_recorded, run_config(model, folder, STEPS))[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_training_in_every_layout(layout: str, reference: Any, ranks: RankPool) -> None:
    model, folder, expected = reference
    world, parallel = LAYOUTS[layout]
    results = ranks.run(world, train_recorded, run_config(model, folder, STEPS, **parallel), timeout=240)
    for rank, result in enumerate(results):
        for step, (got, want) in enumerate(zip(result["steps"], expected["steps"], strict=True)):
            assert got.keys() == want.keys()
            for key, value in want.items():
                assert got[key] == pytest.approx(value, rel=1e-5, abs=1e-6), (rank, step, key)
    got, want = results[0]["weights"], expected["weights"]
    assert got.keys() == want.keys()
    worst = max(((got[k] - want[k]).abs().max() / want[k].abs().max()).item() for k in want)
    assert worst < 1e-5
