"""Layer modules for machines without Transformer Engine: RMSNorm and SDPA core attention.

They go into Megatron's local layer spec and follow Megatron's layouts for sequence parallelism, packing
and context parallelism, so that a CPU run exercises the same data paths. The attention gathers keys and
values over the CP group and, with CP or packing, builds a dense mask: meant for small models, not a
replacement of Transformer Engine's ring attention.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_grpo.parallel import platform


class RMSNorm(torch.nn.Module):
    """RMSNorm in float32, scaled in the input's dtype, as Hugging Face and vLLM compute it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=platform.device())
        )
        # with sequence parallelism a TP rank sees a part of the tokens; Megatron sums such gradients over TP
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x [..., hidden]``."""
        return self.weight * F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class SDPACoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal grouped-query attention on ``scaled_dot_product_attention``.

    Without CP and packing the mask is implicit: sequences are padded on the right, so that no real token
    attends to padding.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = (
            pg_collection.cp
            if pg_collection is not None and hasattr(pg_collection, "cp")
            else parallel_state.get_context_parallel_group()
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend.

        Args:
            query: this CP rank's tokens, ``[s, b, heads, head_dim]``; ``[t, heads, head_dim]`` when packed.
            key, value: the same with the query groups in place of the heads.
            attention_mask: ignored, attention is causal.
            packed_seq_params: sequence boundaries of a packed micro-batch.

        Returns:
            ``[s, b, heads * head_dim]``.
        """
        if packed_seq_params is not None:
            query, key, value = (x.unsqueeze(1) if x.dim() == 3 else x for x in (query, key, value))
        mask = None
        if packed_seq_params is not None or self.cp_group.size() > 1:
            mask = self._mask(query, packed_seq_params)
        if self.cp_group.size() > 1:
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)
                for x in (key, value)
            )
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, head_dim]
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _mask(self, query: Tensor, packed: PackedSeqParams | None) -> Tensor:
        """``[local tokens, tokens of all CP ranks]``: same sequence, and not in the future."""
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        if packed is None:
            boundaries = [0, query.size(0) * cp]
        else:
            padded = packed.cu_seqlens_q_padded
            boundaries = (packed.cu_seqlens_q if padded is None else padded).tolist()
        parts = [_sequence_and_position(boundaries, cp, r, query.device) for r in range(cp)]
        keys = torch.cat(parts, dim=1)
        (query_sequence, query_position), (key_sequence, key_position) = parts[rank], keys
        mask: Tensor = (query_sequence[:, None] == key_sequence) & (query_position[:, None] >= key_position)
        return mask


def _sequence_and_position(boundaries: list[int], cp: int, rank: int, device: torch.device) -> Tensor:
    """``[2, local tokens]``: sequence index and position in it of each token that CP rank ``rank`` holds.

    Every sequence is cut into 2 x cp chunks, and rank r holds chunks r and 2 x cp - 1 - r.
    """
    parts = []
    for index, (begin, end) in enumerate(itertools.pairwise(boundaries)):
        positions = torch.arange(end - begin, device=device)
        if cp > 1:
            chunks = positions.chunk(2 * cp)
            positions = torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])
        parts.append(torch.stack([torch.full_like(positions, index), positions]))
    return torch.cat(parts, dim=1)
