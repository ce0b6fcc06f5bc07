"""The router's auxiliary losses as terms of the training loss: over the same tokens, with the same denominator.

Megatron hands the router a mask of the tokens that do not count, and divides every gradient by the number of tokens
that do (per-token loss). So a term that sums over counted tokens is a mean over them in any layout and any cut into
micro-batches. Megatron's z-loss is one. Its load-balancing losses are not: with the mask they weigh a tensor or
context parallel rank by its own share of the tokens instead of the whole, and they mix the sequences that happen to
share a micro-batch.
"""

from __future__ import annotations

from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class SequenceBalancedRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router with the load-balancing loss of each sequence on its own.

    For a sequence of n counted tokens, of which c_e chose expert e with summed softmax scores p_e, the loss is
    ``coeff * E / (topk * n^2) * sum_e c_e p_e``: ``coeff`` at perfect balance (Switch Transformer, arXiv 2101.03961,
    per sequence as in DeepSeek-V3, arXiv 2412.19437). Sequences are averaged by their counted tokens.
    """

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Attach the loss to ``probs [s * b, experts]``; scores and map are 0 at tokens that do not count."""
        coeff = self.get_aux_loss_coeff("seq_aux_loss")
        if coeff == 0:
            return probs
        shape = (seq_length, bsz, self.num_experts)
        chosen = routing_map.view(shape).sum(0).to(scores_for_aux_loss.dtype)  # [b, experts]
        chosen = reduce_from_tensor_model_parallel_region(chosen, self.tp_cp_group)
        tokens = chosen.sum(1) / self.topk  # [b]
        mine = (chosen * scores_for_aux_loss.view(shape).sum(0)).sum(1)  # [b], of this rank's tokens
        loss = (mine / tokens.clamp(min=1)).sum() * (coeff * self.num_experts / self.topk)
        attached: Tensor = MoEAuxLossAutoScaler.apply(probs, loss)
        return attached
