"""Log-probs and entropy straight from hidden states: output layer and log-softmax as one operation.

The matrix product runs in tiles of ``tokens x vocab_chunk`` logits, and no more than one tile exists at a time,
forward or backward. The forward pass keeps a few numbers per token, merged tile by tile and once over the
tensor-parallel group; the backward pass recomputes each tile.

All tokens are in every tile, so that a row of the weight gradient is one product, accumulated in float32 also for
bf16 matrices and rounded once. bf16 logits and their gradient are rounded to bf16 as an output layer of its own
rounds them, and the gradient of the hidden states accumulates over the tiles in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# logits of a tile: in a CPU's second-level cache; on a GPU enough for large kernels (128 MiB of float32)
TILE_LOGITS = {"cpu": 2**17, "cuda": 2**25}
MIN_VOCAB_CHUNK = 512  # narrower tiles spend their time on adding to the gradient of the hidden states
# columns; rows of a tile that do not begin on a cache line make everything a fifth slower on a CPU
_ALIGNED = 64


@dataclass(frozen=True)
class _Plan:
    """What forward and backward share."""

    group: dist.ProcessGroup | None
    reduce_grad_hidden: bool
    temperature: float
    first: int  # global id of this shard's first column
    columns: int  # of this shard, without padding
    vocab_chunk: int

    def tiles(
        self, hidden: Tensor, weight: Tensor, labels: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
        """One tile after the other, in the same memory.

        Yields:
            The tile's columns; its scaled logits ``[tokens, columns]``, in float32 for bf16 matrices; room for as
            many numbers in the matrices' dtype, the same memory where that is the same dtype; which labels lie in
            the tile ``[tokens]``; and in which column ``[tokens, 1]``, 0 for the others.
        """
        tokens, dtype = hidden.size(0), torch.promote_types(hidden.dtype, torch.float32)
        size = tokens * min(self.vocab_chunk, self.columns)
        wide = torch.empty(size, dtype=dtype, device=hidden.device)
        narrow = wide if hidden.dtype == dtype else torch.empty_like(wide, dtype=hidden.dtype)
        for begin in range(0, self.columns if tokens else 0, self.vocab_chunk):
            columns = slice(begin, min(begin + self.vocab_chunk, self.columns))
            shape = (tokens, columns.stop - columns.start)
            tile, product = (x[: shape[0] * shape[1]].view(shape) for x in (wide, narrow))
            torch.mm(hidden, weight[columns].t(), out=product)
            if narrow is not wide:
                tile.copy_(product)
            if self.temperature != 1.0:
                tile.div_(self.temperature)
            local = labels - (self.first + begin)
            here = (local >= 0) & (local < shape[1])
            yield columns, tile, product, here, torch.where(here, local, 0).unsqueeze(1)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, plan: _Plan, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        statistics = torch.zeros(4, hidden.size(0), dtype=dtype, device=hidden.device)
        # largest logit, the label's logit, sum of exp(logit - peak), and of that times (logit - peak)
        peak, target, total, weighted = statistics.unbind()
        peak.fill_(torch.finfo(dtype).min)  # finite: its product with a total of zero is zero
        target.fill_(-math.inf)

        for _, tile, _, here, index in plan.tiles(hidden, weight, labels):
            target.copy_(torch.where(here, tile.gather(1, index).squeeze(1), target))
            _move_peak(peak, total, weighted, torch.maximum(peak, tile.amax(1)))
            total += tile.sub_(peak.unsqueeze(1)).exp_().sum(1)
            if with_entropy:
                weighted -= torch.special.entr(tile, out=tile).sum(1)

        if plan.group is not None and len(labels):
            peak_and_target = statistics[:2].clone()
            dist.all_reduce(peak_and_target, op=dist.ReduceOp.MAX, group=plan.group)
            _move_peak(peak, total, weighted, peak_and_target[0])
            target.copy_(peak_and_target[1])
            dist.all_reduce(statistics[2:], group=plan.group)
        ctx.save_for_backward(hidden, weight, labels, peak, total)
        ctx.plan = plan
        entropy = total.log() - weighted / total if with_entropy else None
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return target - peak - total.log(), entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, _: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels, peak, total = ctx.saved_tensors
        plan: _Plan = ctx.plan
        grad_hidden = torch.zeros_like(hidden, dtype=peak.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        scale = (-grad / (plan.temperature * total)).unsqueeze(1)
        for columns, tile, grad_logits, here, index in plan.tiles(hidden, weight, labels):
            tile.sub_(peak.unsqueeze(1)).exp_()
            tile.scatter_add_(1, index, torch.where(here, -total, 0).unsqueeze(1))
            tile.mul_(scale)  # now the gradient of the logits
            if grad_logits.dtype != tile.dtype:
                grad_logits.copy_(tile)
            if grad_hidden is not None:
                if grad_logits.dtype == tile.dtype:
                    grad_hidden.addmm_(grad_logits, weight[columns])
                else:
                    grad_hidden += grad_logits @ weight[columns]
            if grad_weight is not None:
                torch.mm(grad_logits.t(), hidden, out=grad_weight[columns])
        if grad_weight is not None:
            grad_weight[plan.columns if len(labels) else 0 :] = 0
        if grad_hidden is not None:
            if plan.group is not None and plan.reduce_grad_hidden and len(labels):
                dist.all_reduce(grad_hidden, group=plan.group)
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None


def _move_peak(peak: Tensor, total: Tensor, weighted: Tensor, new_peak: Tensor) -> None:
    """Restate the running sums relative to ``new_peak``, in place."""
    shift = peak - new_peak
    factor = shift.exp()
    weighted.addcmul_(shift, total).mul_(factor)
    total.mul_(factor)
    peak.copy_(new_peak)


def fused_linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None,
    temperature: float,
    vocab_size: int,
    *,
    with_entropy: bool = False,
    reduce_grad_hidden: bool = True,
    vocab_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``log_softmax(hidden @ weight.T / temperature)`` at ``labels``, and the entropy, without the logits.

    Collective over ``tp_group``: two all-reduces of two numbers per token forward, one of the gradient of
    ``hidden`` backward; none when there are no tokens.

    Args:
        hidden: ``[tokens, hidden]``, the same on all ranks of ``tp_group``.
        weight: ``[vocab / tp, hidden]``, this rank's rows of the (padded) output layer; dtype of ``hidden``.
        labels: ``[tokens]`` int64 global token ids, the same on all ranks of ``tp_group``.
        tp_group: ranks that hold the other rows; None: all rows are here.
        temperature: the sampling temperature, positive.
        vocab_size: rows from here on are padding: in no softmax, and with a gradient of exactly zero.
        with_entropy: also return the entropy of each distribution, in nats, without gradient.
        reduce_grad_hidden: sum the gradient of ``hidden`` over ``tp_group``. False leaves each rank with its
            rows' part, for a caller whose own backward pass sums it: Megatron's gather from the sequence-parallel
            region reduce-scatters.
        vocab_chunk: columns of a tile of logits; by default as many as make ``TILE_LOGITS``.

    Returns:
        Log-probs and entropy, ``[tokens]`` each, in float32 (float64 for float64 inputs), the same on all ranks
        of ``tp_group``; the entropy is None unless asked for. A label outside ``[0, vocab_size)`` has log-prob
        -inf.

    Raises:
        ValueError: temperature or ``vocab_chunk`` not positive, shapes or dtypes that do not fit, or fewer rows than
            ``vocab_size``.
    """
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature {temperature} has no log-probs to train on; use a positive number")
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)} do not "
            "fit: they are [tokens, hidden], [vocab / tp, hidden] and [tokens]"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} but the output weight {weight.dtype}; cast one of them")
    if vocab_chunk is None:
        fitting = TILE_LOGITS[hidden.device.type] // max(1, len(hidden))
        vocab_chunk = max(MIN_VOCAB_CHUNK, fitting // _ALIGNED * _ALIGNED)
    if vocab_chunk < 1:
        raise ValueError(f"vocab_chunk {vocab_chunk} must be at least 1")
    group = tp_group if tp_group is not None and tp_group.size() > 1 else None
    width = weight.size(0)
    padded = width * (group.size() if group else 1)
    if not 0 < vocab_size <= padded:
        raise ValueError(
            f"vocab_size {vocab_size} is not between 1 and the {padded} rows of the output weight"
        )
    first = width * (group.rank() if group else 0)
    columns = min(max(vocab_size - first, 0), width)
    plan = _Plan(group, reduce_grad_hidden, temperature, first, columns, vocab_chunk)
    result: tuple[Tensor, Tensor | None] = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, plan, with_entropy
    )
    return result


def masked_linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor,
    tp_group: dist.ProcessGroup | None,
    temperature: float,
    vocab_size: int,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """:func:`fused_linear_logprobs` where ``mask`` is not zero, and zero elsewhere, at no cost there.

    Args:
        hidden: ``[..., hidden]``.
        labels: ``[...]``.
        mask: ``[...]``, the same on all ranks of ``tp_group``.
        options: the keyword arguments of :func:`fused_linear_logprobs`.

    Returns:
        Log-probs and entropy, ``[...]`` each. Zero in every position still has a gradient, of zero: backward runs
        on all ranks alike.
    """
    if labels.shape != hidden.shape[:-1] or mask.shape != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} and mask {tuple(mask.shape)} do not fit hidden {tuple(hidden.shape)}: "
            "each position needs one of both"
        )
    positions = mask.flatten().nonzero().squeeze(1)
    selected = fused_linear_logprobs(
        hidden.reshape(-1, hidden.size(-1)).index_select(0, positions),
        weight,
        labels.flatten().index_select(0, positions),
        tp_group,
        temperature,
        vocab_size,
        **options,
    )

    def scatter(values: Tensor) -> Tensor:
        return values.new_zeros(labels.numel()).index_copy(0, positions, values).view(labels.shape)

    logprobs, entropy = selected
    return scatter(logprobs), None if entropy is None else scatter(entropy)


@dataclass(frozen=True)
class TokenTargets:
    """What :func:`output_layer_logprobs` scores: this rank's tokens of one micro-batch.

    ``labels`` and ``mask`` are ``[b, s]``, already shifted to the columns that predict them, and the same on all
    tensor-parallel ranks (``s`` is the whole sequence under sequence parallelism, this rank's part under context
    parallelism). With ``with_entropy`` the model's output is ``[2, b, s]``: log-probs and entropies.
    """

    labels: Tensor
    mask: Tensor
    temperature: float
    vocab_size: int
    with_entropy: bool = False


def output_layer_logprobs(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: TokenTargets,
    **_: Any,
) -> Tensor:
    """``output_processor`` of Megatron's ``GPTModel.forward``: log-probs in place of logits.

        model(tokens, positions, None, output_processor=output_layer_logprobs, output_processor_context=targets)

    Stages without an output layer ignore both arguments.

    Args:
        hidden_states: ``[s, b, hidden]`` after the final norm; ``[s / tp, b, hidden]`` with sequence parallelism,
            where the gather's backward pass does the one sum of their gradient over tensor-parallel ranks.
        output_layer: Megatron's ``ColumnParallelLinear``.
        output_weight: the embedding, when it is tied.
        context: targets of the micro-batch.

    Returns:
        Log-probs ``[b, s]``, zero where the mask is; with entropies ``[2, b, s]``.
    """
    weight: Tensor = output_layer.weight if output_weight is None else output_weight
    group: dist.ProcessGroup = output_layer.tp_group
    if output_layer.sequence_parallel:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
    logprobs, entropy = masked_linear_logprobs(
        hidden_states,
        weight,
        context.labels.t(),
        context.mask.t(),
        group,
        context.temperature,
        context.vocab_size,
        with_entropy=context.with_entropy,
        reduce_grad_hidden=not output_layer.sequence_parallel,
    )
    output = logprobs if entropy is None else torch.stack([logprobs, entropy])
    return output.transpose(-1, -2).contiguous()
