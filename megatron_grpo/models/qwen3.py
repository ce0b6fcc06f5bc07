"""Qwen3, dense: grouped-query attention with q/k norm, SwiGLU MLP, RMSNorm, no biases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_grpo.models.family import (
    ModelDescription,
    positive_number,
    refuse_unsupported,
    require_sizes,
    rope_theta,
)
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
)  # fmt: skip
_OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings")

Mappings = tuple[ParamMapping, ...]


def describe(hf_config: HFConfig) -> ModelDescription:
    """The description of a dense Qwen3 model.

    Raises:
        ValueError: a key is missing, or has a value that is not supported.
    """
    return describe_decoder(hf_config, ARCHITECTURE, dense_mlp)


def describe_decoder(
    hf_config: HFConfig, architecture: str, mlp: Callable[[HFConfig, int], Mappings]
) -> ModelDescription:
    """All of a Qwen3 model but what ``mlp(hf_config, layer)`` maps: the parameters after the second layer norm.

    Raises:
        ValueError: a key is missing, or has a value that is not supported.
    """
    refuse_unsupported(hf_config, architecture, _SUPPORTED)
    given = [key for key in _OPTIONAL if hf_config.get(key) is not None]
    require_sizes(hf_config, architecture, [*_REQUIRED, *given])
    heads: int = hf_config["num_attention_heads"]
    hidden: int = hf_config["hidden_size"]
    groups: int = hf_config.get("num_key_value_heads") or heads
    head_dim: int = hf_config.get("head_dim") or 128  # Qwen3Config's default; not hidden / heads
    if heads % groups:
        raise ValueError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
        )
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim is {head_dim}; rotary embeddings need an even one")
    layers: int = hf_config["num_hidden_layers"]
    ffn: int = hf_config["intermediate_size"]
    vocab: int = hf_config["vocab_size"]
    tied = bool(hf_config.get("tie_word_embeddings", False))

    def weight_map(padded_vocab_size: int) -> Mappings:
        embedding = HFTensor("model.embed_tokens.weight", (vocab, hidden))
        output = embedding if tied else HFTensor("lm_head.weight", (vocab, hidden))
        decoder: list[ParamMapping] = []
        for layer in range(layers):
            decoder += _attention(layer, hidden, heads, groups, head_dim)
            decoder += mlp(hf_config, layer)
        return (
            VocabParallel(
                "embedding.word_embeddings.weight", (embedding,), padded_vocab_size=padded_vocab_size
            ),
            *decoder,
            Replicated("decoder.final_layernorm.weight", (HFTensor("model.norm.weight", (hidden,)),)),
            VocabParallel(
                "output_layer.weight", (output,), is_copy=tied, padded_vocab_size=padded_vocab_size
            ),
        )

    return ModelDescription(
        architecture=architecture,
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
            "layernorm_epsilon": positive_number("rms_norm_eps", hf_config.get("rms_norm_eps")),
            "gated_linear_unit": True,
            "activation_func": "silu",
            "add_bias_linear": False,
            "qk_layernorm": True,
        },
        weight_map=weight_map,
    )


def dense_mlp(hf_config: HFConfig, layer: int) -> Mappings:
    """The SwiGLU MLP of one layer."""
    return swiglu(
        f"decoder.layers.{layer}.mlp",
        f"model.layers.{layer}.mlp",
        hf_config["hidden_size"],
        hf_config["intermediate_size"],
    )


def swiglu(megatron: str, hf: str, hidden: int, ffn: int, expert: int | None = None) -> Mappings:
    """Gate, up and down projections of the module ``megatron``, which Hugging Face calls ``hf``."""
    gate, up = (HFTensor(f"{hf}.{name}_proj.weight", (ffn, hidden)) for name in ("gate", "up"))
    down = HFTensor(f"{hf}.down_proj.weight", (hidden, ffn))
    return (
        GatedMLP(f"{megatron}.linear_fc1.weight", (gate, up), expert=expert),
        RowParallel(f"{megatron}.linear_fc2.weight", (down,), expert=expert),
    )


def _attention(index: int, hidden: int, heads: int, groups: int, head_dim: int) -> Sequence[ParamMapping]:
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
    )
