from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_grpo.config.parallel import ParallelConfig
from megatron_grpo.config.policy import PolicyConfig
from megatron_grpo.models.registry import describe_model
from megatron_grpo.models.weight_map import canonical_name, padded_vocab_size
from tests.unit.models.test_qwen3 import CONFIG as DENSE
from tests.unit.models.test_weight_map import shards_of

CONFIG: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def test_description() -> None:
    model = describe_model(CONFIG | {"mlp_only_layers": [2]})
    kwargs = model.transformer_config_kwargs
    assert kwargs["moe_layer_freq"] == [1, 1, 0, 1]
    assert (kwargs["num_moe_experts"], kwargs["moe_router_topk"]) == (6, 2)
    assert kwargs["moe_router_pre_softmax"] is False
    assert describe_model(CONFIG | {"norm_topk_prob": False}).transformer_config_kwargs[
        "moe_router_pre_softmax"
    ]
    shapes = model.hf_shapes()
    assert len(shapes) == 3 + 4 * 8 + 3 + 3 * (1 + 6 * 3)
    assert shapes["model.layers.0.mlp.gate.weight"] == (6, 64)
    assert shapes["model.layers.3.mlp.experts.5.down_proj.weight"] == (64, 32)
    assert shapes["model.layers.2.mlp.down_proj.weight"] == (64, 96)


def test_every_second_layer_and_the_key_of_transformers_5() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "num_experts"}
    model = describe_model(config | {"num_local_experts": 8, "decoder_sparse_step": 2})
    assert model.num_experts == 8
    assert model.transformer_config_kwargs["moe_layer_freq"] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7 and num_experts is 6"),
        ({"num_experts": 0}, "num_experts is 0; it must be a positive integer"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob is true and num_experts_per_tok is 1"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, r"no layer has experts .* mlp_only_layers \[0, 1, 2, 3\]"),
        ({"attention_bias": True}, "attention_bias is True; Qwen3MoeForCausalLM"),
        ({"num_experts": "4"}, "num_experts is '4'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be a positive integer"),
        ({"mlp_only_layers": 5}, "mlp_only_layers is 5; it must be a list"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
    ],
)
def test_unsupported_settings_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_model(CONFIG | change)


def test_missing_keys_are_named() -> None:
    with pytest.raises(ValueError, match="num_experts, num_experts_per_tok, moe_intermediate_size missing"):
        describe_model(DENSE | {"architectures": ["Qwen3MoeForCausalLM"]})


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"expert_model_parallel_size": 4}, "expert_model_parallel_size 4 .* 6 experts; use 3 or 6"),
        (
            {"expert_tensor_parallel_size": 3},
            r"expert_tensor_parallel_size 3 .* 32 expert MLP features \(moe_intermediate_size\); use 2 or 4",
        ),
        (
            {"tensor_model_parallel_size": 2},
            "tensor_model_parallel_size is 2 and sequence_parallel is false; .*set .*sequence_parallel to true",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_refused(parallel: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_model(CONFIG).check_layout(ParallelConfig(**parallel))


def test_layout_that_fits() -> None:
    describe_model(CONFIG).check_layout(
        ParallelConfig(
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            expert_model_parallel_size=3,
            expert_tensor_parallel_size=1,
        )
    )


@pytest.mark.parametrize("key", ["moe_aux_loss_coeff", "moe_z_loss_coeff"])
def test_router_losses_need_experts(key: str) -> None:
    policy = PolicyConfig.model_validate(
        {
            "model_path": "model", "max_total_sequence_length": 8, "train_global_batch_size": 1,
            "optimizer": {"lr": 1e-3}, key: 0.01,
        }
    )  # fmt: skip
    describe_model(CONFIG).check_policy(policy)
    with pytest.raises(ValueError, match=f"policy.{key} is 0.01 but Qwen3ForCausalLM has no experts"):
        describe_model(DENSE).check_policy(policy)


@pytest.mark.parametrize("etp", [1, 2])
def test_round_trip_of_every_parameter(etp: int) -> None:
    model = describe_model(CONFIG)
    generator = torch.Generator().manual_seed(0)
    exported = []
    for mapping in model.weight_map(padded_vocab_size(61, 16, etp)):
        sources = [torch.randn(t.shape, generator=generator) for t in mapping.hf]
        results = mapping.to_hf(shards_of(mapping, sources, etp))
        assert all(torch.equal(a, b) for a, b in zip(sources, results, strict=True))
        exported += [t.name for t in mapping.hf]
    assert exported == list(model.hf_shapes())


def test_every_expert_parallel_rank_counts_its_experts_from_0() -> None:
    mappings = describe_model(CONFIG).weight_map(64)
    held = [(m.expert, m.local_param(3)) for m in mappings if m.param.startswith("decoder.layers.1.mlp")]
    fc1 = "decoder.layers.1.mlp.experts.local_experts.{}.linear_fc1.weight"
    assert held[0] == (None, "decoder.layers.1.mlp.router.weight")
    assert held[1::2] == [(expert, fc1.format(expert % 3)) for expert in range(6)]


def test_grouped_experts_of_transformer_engine() -> None:
    spelled = "decoder.layers.3.mlp.experts.linear_fc2.weight11"
    assert canonical_name(spelled) == "decoder.layers.3.mlp.experts.local_experts.11.linear_fc2.weight"
