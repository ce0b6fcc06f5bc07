"""Qwen3-MoE: Qwen3 with routed experts in place of the MLP, in all layers or in some.

The router takes the softmax over all experts in float32 and keeps the ``num_experts_per_tok`` largest
weights: as they are (``norm_topk_prob`` false), or divided by their sum. The quotient is the softmax over the
chosen experts, Megatron's ``moe_router_pre_softmax=False``. The router's logits have the model's dtype, as in
Hugging Face and vLLM, so that trainer and engine choose alike. No token is dropped.

``router_aux_loss_coef`` and ``output_router_logits`` are not carried over: they add a load-balancing loss to
Hugging Face's own training loss. ``policy.moe_aux_loss_coeff`` does that here.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_grpo.models.family import ModelDescription, require_sizes
from megatron_grpo.models.hf_directory import HFConfig
from megatron_grpo.models.qwen3 import Mappings, dense_mlp, describe_decoder, swiglu
from megatron_grpo.models.weight_map import HFTensor, Replicated

ARCHITECTURE = "Qwen3MoeForCausalLM"
_REQUIRED = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def describe(hf_config: HFConfig) -> ModelDescription:
    """The description of a Qwen3-MoE model.

    Raises:
        ValueError: a key is missing, or has a value that is not supported.
    """
    if "num_local_experts" in hf_config:  # what transformers 5 writes for num_experts
        hf_config = {"num_experts": hf_config["num_local_experts"], **hf_config}
    given = ["decoder_sparse_step"] if "decoder_sparse_step" in hf_config else []
    require_sizes(hf_config, ARCHITECTURE, [*_REQUIRED, "num_hidden_layers", *given])
    if not isinstance(only_mlp := hf_config.get("mlp_only_layers") or [], list):
        raise ValueError(f"config.json: mlp_only_layers is {only_mlp!r}; it must be a list of layers")
    experts: int = hf_config["num_experts"]
    topk: int = hf_config["num_experts_per_tok"]
    normalized = bool(hf_config.get("norm_topk_prob", False))
    if not 1 <= topk <= experts:
        raise ValueError(
            f"config.json: num_experts_per_tok is {topk} and num_experts is {experts}; {ARCHITECTURE} needs at "
            "least one expert per token and no more than there are (a dense model is Qwen3ForCausalLM)"
        )
    if normalized and topk == 1:
        raise ValueError(
            "config.json: norm_topk_prob is true and num_experts_per_tok is 1: every routing weight would be 1, "
            "and the router would get no gradient; set norm_topk_prob to false"
        )
    routed = [_has_experts(hf_config, layer) for layer in range(hf_config["num_hidden_layers"])]
    description = describe_decoder(hf_config, ARCHITECTURE, _mlp)
    if not any(routed):
        raise ValueError(
            f"config.json: no layer has experts with decoder_sparse_step {hf_config.get('decoder_sparse_step')} "
            f"and mlp_only_layers {hf_config.get('mlp_only_layers')}; a dense model is Qwen3ForCausalLM"
        )
    ffn: int = hf_config["moe_intermediate_size"]
    return replace(
        description,
        num_experts=experts,
        moe_ffn_hidden_size=ffn,
        transformer_config_kwargs={
            **description.transformer_config_kwargs,
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": ffn,
            "moe_layer_freq": [int(layer) for layer in routed],
            "moe_router_topk": topk,
            "moe_token_dispatcher_type": "alltoall",  # takes ranks with different numbers of tokens
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not normalized,
        },
    )


def _has_experts(hf_config: HFConfig, layer: int) -> bool:
    every: int = hf_config.get("decoder_sparse_step", 1)
    return layer not in (hf_config.get("mlp_only_layers") or ()) and (layer + 1) % every == 0


def _mlp(hf_config: HFConfig, layer: int) -> Mappings:
    if not _has_experts(hf_config, layer):
        return dense_mlp(hf_config, layer)
    hidden, ffn, experts = (hf_config[k] for k in ("hidden_size", "moe_intermediate_size", "num_experts"))
    megatron, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    router = Replicated(f"{megatron}.router.weight", (HFTensor(f"{hf}.gate.weight", (experts, hidden)),))
    return (
        router,
        *(
            mapping
            for expert in range(experts)
            for mapping in swiglu(
                f"{megatron}.experts.local_experts.{expert}", f"{hf}.experts.{expert}", hidden, ffn, expert
            )
        ),
    )
