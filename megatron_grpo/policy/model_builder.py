"""Builds this rank's part of the policy: Megatron GPTModel chunks in a given layout.

Weights are allocated and not initialised: ``models.checkpoint.load_hf_weights`` fills every one of them.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_grpo.config.policy import PolicyConfig
from megatron_grpo.models.family import ModelDescription
from megatron_grpo.models.hf_directory import HFDirectory
from megatron_grpo.models.registry import describe_model
from megatron_grpo.models.weight_map import padded_vocab_size
from megatron_grpo.parallel.layout import ParallelLayout
from megatron_grpo.policy.local_layers import RMSNorm, SDPACoreAttention
from megatron_grpo.policy.moe_router import SequenceBalancedRouter

log = logging.getLogger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def build_model_chunks(
    policy: PolicyConfig, directory: HFDirectory, layout: ParallelLayout
) -> list[GPTModel]:
    """This rank's model chunks: one, or one per virtual pipeline stage.

    ``chunk.config`` is the TransformerConfig. Collective over all ranks (tied embeddings with PP).

    Raises:
        ValueError: the model cannot be cut this way, or the layer spec asked for is not available.
    """
    description = describe_model(directory.config)
    description.check_policy(policy)
    use_te = uses_transformer_engine(policy.layer_spec)
    config = transformer_config(policy, description, use_te)
    # no dropout is used, but Megatron's layers expect their random state to exist
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    vocab = padded_vocab_size(description.vocab_size, policy.make_vocab_size_divisible_by, layout.tp)
    if layout.rank == 0:
        log.info(
            "%s, %d layers, vocabulary %d padded to %d, %s, %s, %s layer spec",
            description.architecture, description.num_layers, description.vocab_size, vocab,
            policy.precision, layout, "Transformer Engine" if use_te else "local",
        )  # fmt: skip
    chunks = []
    for index in range(layout.vpp):
        vp_stage = index if layout.vpp > 1 else None
        chunks.append(
            GPTModel(
                config,
                _block_spec(config, layout, vp_stage, use_te),
                vocab,
                policy.max_total_sequence_length,
                pre_process=layout.pp_rank == 0 and index == 0,
                post_process=layout.is_last_stage and index == layout.vpp - 1,
                share_embeddings_and_output_weights=description.tied_embeddings,
                position_embedding_type="rope",
                rotary_base=description.rotary_base,
                vp_stage=vp_stage,
            )
        )
    return chunks


def transformer_config(
    policy: PolicyConfig, description: ModelDescription, use_te: bool
) -> TransformerConfig:
    """Megatron's configuration of the model in this layout and precision."""
    parallel = policy.parallel
    dtype = _DTYPES[policy.precision]
    kwargs: dict[str, Any] = dict(description.transformer_config_kwargs)
    kwargs["activation_func"] = getattr(torch.nn.functional, kwargs["activation_func"])
    if policy.recompute_granularity == "full":
        kwargs |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if interleaved := (parallel.virtual_pipeline_model_parallel_size or 1) > 1:
        kwargs["virtual_pipeline_model_parallel_size"] = parallel.virtual_pipeline_model_parallel_size
    if policy.sequence_packing.enabled:
        # micro-batches have a length each; Megatron then asks for this dispatcher, with or without experts
        kwargs |= {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    return TransformerConfig(
        **kwargs,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        moe_grouped_gemm=use_te,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=policy.moe_aux_loss_coeff,
        moe_z_loss_coeff=policy.moe_z_loss_coeff or None,
        # with batched p2p the interleaved schedule gave wrong gradients at PP 2, silently
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # the forward step returns (loss sum, token count, metrics); everything else would scale gradients
        # by the number of micro-batches
        calculate_per_token_loss=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        recompute_granularity=policy.recompute_granularity,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=use_te,
        bias_dropout_fusion=use_te,
        apply_rope_fusion=use_te,
    )


def uses_transformer_engine(layer_spec: str) -> bool:
    """Whether ``policy.layer_spec`` means Transformer Engine on this machine.

    Raises:
        ValueError: it is asked for by name, and not there.
    """
    if layer_spec == "local":
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE

    available = bool(HAVE_TE) and torch.cuda.is_available()
    if layer_spec == "transformer_engine" and not available:
        lacks = "Transformer Engine is not installed" if not HAVE_TE else "there is no GPU"
        raise ValueError(
            f"policy.layer_spec is transformer_engine but {lacks}; set it to auto or local, or install "
            "transformer-engine[core_cu13,pytorch] on a GPU machine"
        )
    return available


def _block_spec(
    config: TransformerConfig, layout: ParallelLayout, vp_stage: int | None, use_te: bool
) -> TransformerBlockSubmodules:
    """The layers of one model chunk."""
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=use_te,
        normalization=config.normalization,
        vp_stage=vp_stage,
        pp_rank=layout.pp_rank,
    )
    for spec in block.layer_specs:
        mlp = spec.submodules.mlp.keywords["submodules"]
        if isinstance(mlp, MoESubmodules):
            mlp.router = SequenceBalancedRouter
    if use_te:
        return block
    for spec in block.layer_specs:
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        attention.core_attention = SDPACoreAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    block.layer_norm = RMSNorm
    return block
