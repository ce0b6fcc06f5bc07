"""Layer modules for machines without Transformer Engine: RMSNorm and SDPA core attention.

They go into Megatron's local layer spec and follow Megatron's layouts for sequence parallelism, packing
and context parallelism, so that a CPU run exercises the same data paths. The attention takes one packed sequence
after the other, gathers keys and values over the CP group and, with CP, builds a dense mask for each sequence: meant
for small models, not a replacement of Transformer Engine's ring attention.
"""

from __future__ import annotations

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
from megatron_grpo.policy.packing import local_tokens


class RMSNorm(torch.nn.Module):
    """RMSNorm in float32 (float64 in a float64 model), scaled in the input's dtype, like Hugging Face and vLLM."""

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
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * F.rms_norm(wide, x.shape[-1:], eps=self.eps).to(x.dtype)


class SDPACoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal grouped-query attention on ``scaled_dot_product_attention``.

    Without CP the mask is implicit: sequences are padded on the right, so that no real token attends to padding.
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
        cp = self.cp_group.size()
        lengths = [query.size(0) * cp]
        if packed_seq_params is not None:
            query, key, value = (x.unsqueeze(1) if x.dim() == 3 else x for x in (query, key, value))
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        if cp > 1:
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)
                for x in (key, value)
            )
        key, value = (
            x.view(cp, -1, *x.shape[1:]) for x in (key, value)
        )  # [cp, s, b, query groups, head_dim]
        out, begin = [], 0
        for length in lengths:
            own = slice(begin, begin + length // cp)
            out.append(self._attend(query[own], key[:, own].flatten(0, 1), value[:, own].flatten(0, 1)))
            begin = own.stop
        return torch.cat(out)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One sequence: ``[s / cp, b, heads, head_dim]`` and ``[s, b, groups, head_dim]``, rank after rank."""
        mask = None
        if (cp := self.cp_group.size()) > 1:
            positions = [torch.from_numpy(local_tokens([key.size(0)], rank, cp)[1]) for rank in range(cp)]
            mask = positions[self.cp_group.rank()][:, None] >= torch.cat(positions)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, head_dim]
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None else mask.to(q.device),
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.permute(2, 0, 1, 3).flatten(2)
