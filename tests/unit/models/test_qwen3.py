from __future__ import annotations

from typing import Any

import pytest

from megatron_grpo.config.parallel import ParallelConfig
from megatron_grpo.models.registry import describe_model

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 61,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def test_description() -> None:
    model = describe_model(CONFIG)
    assert model.transformer_config_kwargs["kv_channels"] == 32
    assert model.rotary_base == 1e6
    shapes = model.hf_shapes()
    assert len(shapes) == 3 + 4 * 11
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (8 * 32, 64)
    assert shapes["lm_head.weight"] == (61, 64)
    assert "lm_head.weight" not in describe_model(CONFIG | {"tie_word_embeddings": True}).hf_shapes()


def test_rope_theta_of_older_configs() -> None:
    old = {key: value for key, value in CONFIG.items() if key != "rope_parameters"}
    assert describe_model(old | {"rope_theta": 5e5, "rope_scaling": None}).rotary_base == 5e5
    with pytest.raises(ValueError, match="rope_theta is missing"):
        describe_model(old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"use_sliding_window": True},
            "use_sliding_window is True; Qwen3ForCausalLM is supported with False",
        ),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "rope_type is 'linear'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'; it must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a positive integer"),
        ({"num_attention_heads": None}, "num_attention_heads is None; it must be a positive integer"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 2},
            "3 is not a multiple of num_key_value_heads 2",
        ),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": 7}, "head_dim is 7; rotary embeddings need an even one"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings is 'x'"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None; it must be a positive number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta is nan"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be an object"),
        ({"architectures": 5}, "architectures is 5; supported are"),
        ({"architectures": ["BertModel"]}, r"\['BertModel'\]; supported are Qwen3ForCausalLM"),
    ],
)
def test_unsupported_settings_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_model(CONFIG | change)


def test_missing_key_is_named() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "vocab_size"}
    with pytest.raises(ValueError, match="vocab_size missing"):
        describe_model(config)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor_model_parallel_size": 8}, r"tensor_model_parallel_size 8 .* 4 query groups .*; use 4$"),
        ({"tensor_model_parallel_size": 3}, r"3 does not divide the model's 8 attention heads; use 2 or 4$"),
        ({"pipeline_model_parallel_size": 3}, r"pipeline_model_parallel_size 3 .* 4 layers; use 2 or 4$"),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
            r"virtual_pipeline_model_parallel_size 4 .* 2 layers per pipeline stage; use 2$",
        ),
        ({"expert_model_parallel_size": 2}, r"expert_model_parallel_size is 2 .*has no experts"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(parallel: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_model(CONFIG).check_layout(ParallelConfig(**parallel))


def test_layout_that_fits() -> None:
    describe_model(CONFIG).check_layout(
        ParallelConfig(
            tensor_model_parallel_size=4,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
        )
    )
