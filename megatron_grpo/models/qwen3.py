"""Qwen3, dense: grouped-query attention with q/k norm, SwiGLU MLP, RMSNorm, no biases."""

from __future__ import annotations

import torch.nn.functional as F

from megatron_grpo.models.family import ModelDescription, refuse_unsupported, rope_theta
from megatron_grpo.models.hf_directory import HFConfig
from megatron_grpo.models.weight_map import (
    QKV,
    GatedMLP,
    HFTensor,
    ParamMapping,
    Replicated,
    RowParallel,
    VocabParallel,
)

ARCHITECTURE = "Qwen3ForCausalLM"
_SUPPORTED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "quantization_config": None,
}
_REQUIRED = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
    "rms_norm_eps",
)  # fmt: skip


def describe(hf_config: HFConfig) -> ModelDescription:
    """The description of a dense Qwen3 model.

    Raises:
        ValueError: a key is missing, or has a value that is not supported.
    """
    refuse_unsupported(hf_config, ARCHITECTURE, _SUPPORTED)
    missing = [key for key in _REQUIRED if key not in hf_config]
    if missing:
        raise ValueError(f"config.json: {', '.join(missing)} missing; {ARCHITECTURE} needs it")
    heads: int = hf_config["num_attention_heads"]
    hidden: int = hf_config["hidden_size"]
    groups: int = hf_config.get("num_key_value_heads") or heads
    head_dim: int = hf_config.get("head_dim") or 128  # Qwen3Config's default; not hidden / heads
    layers: int = hf_config["num_hidden_layers"]
    ffn: int = hf_config["intermediate_size"]
    vocab: int = hf_config["vocab_size"]
    tied = bool(hf_config.get("tie_word_embeddings", False))

    def weight_map(padded_vocab_size: int) -> tuple[ParamMapping, ...]:
        embedding = HFTensor("model.embed_tokens.weight", (vocab, hidden))
        output = embedding if tied else HFTensor("lm_head.weight", (vocab, hidden))
        return (
            VocabParallel(
                "embedding.word_embeddings.weight", (embedding,), padded_vocab_size=padded_vocab_size
            ),
            *(m for i in range(layers) for m in _layer(i, hidden, ffn, heads, groups, head_dim)),
            Replicated("decoder.final_layernorm.weight", (HFTensor("model.norm.weight", (hidden,)),)),
            VocabParallel(
                "output_layer.weight", (output,), is_copy=tied, padded_vocab_size=padded_vocab_size
            ),
        )

    return ModelDescription(
        architecture=ARCHITECTURE,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        vocab_size=vocab,
        tied_embeddings=tied,
        rotary_base=rope_theta(hf_config),
        transformer_config_kwargs={
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": ffn,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": head_dim,
            "normalization": "RMSNorm",
            "layernorm_epsilon": hf_config["rms_norm_eps"],
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "qk_layernorm": True,
        },
        weight_map=weight_map,
    )


def _layer(
    index: int, hidden: int, ffn: int, heads: int, groups: int, head_dim: int
) -> tuple[ParamMapping, ...]:
    megatron, hf = f"decoder.layers.{index}", f"model.layers.{index}"

    def tensor(name: str, *shape: int) -> HFTensor:
        return HFTensor(f"{hf}.{name}.weight", shape)

    return (
        Replicated(f"{megatron}.input_layernorm.weight", (tensor("input_layernorm", hidden),)),
        QKV(
            f"{megatron}.self_attention.linear_qkv.weight",
            (
                tensor("self_attn.q_proj", heads * head_dim, hidden),
                tensor("self_attn.k_proj", groups * head_dim, hidden),
                tensor("self_attn.v_proj", groups * head_dim, hidden),
            ),
            num_query_groups=groups,
            head_dim=head_dim,
        ),
        Replicated(f"{megatron}.self_attention.q_layernorm.weight", (tensor("self_attn.q_norm", head_dim),)),
        Replicated(f"{megatron}.self_attention.k_layernorm.weight", (tensor("self_attn.k_norm", head_dim),)),
        RowParallel(
            f"{megatron}.self_attention.linear_proj.weight",
            (tensor("self_attn.o_proj", hidden, heads * head_dim),),
        ),
        Replicated(f"{megatron}.pre_mlp_layernorm.weight", (tensor("post_attention_layernorm", hidden),)),
        GatedMLP(
            f"{megatron}.mlp.linear_fc1.weight",
            (tensor("mlp.gate_proj", ffn, hidden), tensor("mlp.up_proj", ffn, hidden)),
        ),
        RowParallel(f"{megatron}.mlp.linear_fc2.weight", (tensor("mlp.down_proj", hidden, ffn),)),
    )
