"""Log-probs and entropy straight from hidden states: output layer and log-softmax as one operation.

The matrix product runs in tiles of ``token_chunk x vocab_chunk`` logits, and no more than one tile exists at a
time, forward or backward. The forward pass keeps a few numbers per token, merged tile by tile and once over the
tensor-parallel group; the backward pass recomputes each tile.

bf16 matrices are multiplied as bf16 and accumulated in float32: logits are never rounded to bf16, their gradient
is, as in an output layer of its own, and each weight gradient is rounded once, with all tokens in it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

TOKEN_CHUNK = 512
VOCAB_CHUNK = 4096


@dataclass(frozen=True)
class _Plan:
    """What forward and backward share."""

    group: dist.ProcessGroup | None
    reduce_grad_hidden: bool
    temperature: float
    first: int  # global id of this shard's first column
    columns: int  # of this shard, without padding
    token_chunk: int
    vocab_chunk: int

    def tiles(self, tokens: int) -> Iterator[tuple[slice, list[slice]]]:
        """Columns, and the row slices to visit for them: each weight row is read, and its gradient made, once."""
        rows = [slice(t, min(t + self.token_chunk, tokens)) for t in range(0, tokens, self.token_chunk)]
        for begin in range(0, self.columns, self.vocab_chunk):
            yield slice(begin, min(begin + self.vocab_chunk, self.columns)), rows

    def scratch(self, like: Tensor, dtype: torch.dtype, tokens: int) -> Tensor:
        """Room for the largest tile."""
        size = min(self.token_chunk, tokens) * min(self.vocab_chunk, self.columns)
        return torch.empty(size, dtype=dtype, device=like.device)

    def find(self, labels: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Which labels lie in these columns ``[rows]``, and where in them ``[rows, 1]`` (0 for the others)."""
        local = labels - (self.first + columns.start)
        here = (local >= 0) & (local < columns.stop - columns.start)
        return here, torch.where(here, local, 0).unsqueeze(1)


@contextlib.contextmanager
def _bf16_products(inputs: Tensor) -> Iterator[None]:
    """On the CPU, send float32 copies of bf16 matrices to the bf16 units, which accumulate in float32.

    torch has no CPU product of two bf16 matrices with a float32 result. A CPU without such units computes in
    float32 instead.
    """
    if inputs.dtype != torch.bfloat16 or inputs.is_cuda:
        yield
        return
    backend = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = backend.fp32_precision
    backend.fp32_precision = "bf16"
    try:
        yield
    finally:
        backend.fp32_precision = before


def _operand(x: Tensor, accumulator: torch.dtype) -> Tensor:
    """``x`` as :func:`_product` takes it; a copy for bf16 on the CPU only."""
    return x if x.is_cuda else x.to(accumulator)


def _product(out: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1.0, accumulate: bool = False) -> None:
    """``out = alpha * a @ b``, or ``out += alpha * a @ b``, accumulated in the dtype of ``out``."""
    if b.dtype == out.dtype:
        out.addmm_(a, b, beta=int(accumulate), alpha=alpha)
        return
    product = torch.mm(a.to(b.dtype), b, out_dtype=out.dtype)
    if accumulate:
        out.add_(product, alpha=alpha)
    else:
        torch.mul(product, alpha, out=out)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, plan: _Plan, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        tokens, dtype = hidden.size(0), torch.promote_types(hidden.dtype, torch.float32)
        statistics = torch.zeros(4, tokens, dtype=dtype, device=hidden.device)
        # largest logit, the label's logit, sum of exp(logit - peak), and of that times (logit - peak)
        peak, target, total, weighted = statistics.unbind()
        peak.fill_(torch.finfo(dtype).min)  # finite: its product with a total of zero is zero
        target.fill_(-math.inf)

        scratch, x = plan.scratch(hidden, dtype, tokens), _operand(hidden, dtype)
        with _bf16_products(hidden):
            for columns, row_slices in plan.tiles(tokens):
                w = _operand(weight[columns], dtype)
                for rows in row_slices:
                    tile = scratch[: (rows.stop - rows.start) * w.size(0)].view(-1, w.size(0))
                    _product(tile, x[rows], w.t(), alpha=1.0 / plan.temperature)
                    here, index = plan.find(labels[rows], columns)
                    target[rows] = torch.where(here, tile.gather(1, index).squeeze(1), target[rows])
                    new_peak = torch.maximum(peak[rows], tile.amax(1))
                    _move_peak(peak[rows], total[rows], weighted[rows], new_peak)
                    total[rows] += tile.sub_(new_peak.unsqueeze(1)).exp_().sum(1)
                    if with_entropy:
                        weighted[rows] -= torch.special.entr(tile, out=tile).sum(1)

        if plan.group is not None and tokens:
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
        tokens, dtype = hidden.size(0), peak.dtype
        # float32 inputs accumulate in the result itself; bf16 ones in a float32 buffer, of one tile for the weight
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        scale = (-grad / (plan.temperature * total)).unsqueeze(1)

        scratch, x = plan.scratch(hidden, dtype, tokens), _operand(hidden, dtype)
        with _bf16_products(hidden):
            for columns, row_slices in plan.tiles(tokens):
                w = _operand(weight[columns], dtype)
                grad_w = None
                if grad_weight is not None:
                    grad_w = (
                        grad_weight[columns] if weight.dtype == dtype else torch.empty_like(w, dtype=dtype)
                    )
                for rows in row_slices:
                    tile = scratch[: (rows.stop - rows.start) * w.size(0)].view(-1, w.size(0))
                    _product(tile, x[rows], w.t(), alpha=1.0 / plan.temperature)
                    tile.sub_(peak[rows].unsqueeze(1)).exp_()
                    here, index = plan.find(labels[rows], columns)
                    tile.scatter_add_(1, index, torch.where(here, -total[rows], 0).unsqueeze(1))
                    tile.mul_(scale[rows])  # now the gradient of the logits
                    if grad_hidden is not None:
                        _product(grad_hidden[rows], tile, w, accumulate=True)
                    if grad_w is not None:
                        _product(grad_w, tile.t(), x[rows], accumulate=rows.start > 0)
                if grad_weight is not None and grad_w is not None and weight.dtype != dtype:
                    grad_weight[columns] = grad_w
        if grad_weight is not None:
            grad_weight[plan.columns if tokens else 0 :] = 0
        if grad_hidden is not None:
            if plan.group is not None and plan.reduce_grad_hidden and tokens:
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
    token_chunk: int = TOKEN_CHUNK,
    vocab_chunk: int = VOCAB_CHUNK,
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
        token_chunk, vocab_chunk: largest tile of logits.

    Returns:
        Log-probs and entropy, ``[tokens]`` each, in float32 (float64 for float64 inputs), the same on all ranks
        of ``tp_group``; the entropy is None unless asked for. A label outside ``[0, vocab_size)`` has log-prob
        -inf.

    Raises:
        ValueError: temperature or a chunk not positive, shapes or dtypes that do not fit, or fewer rows than
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
    if token_chunk < 1 or vocab_chunk < 1:
        raise ValueError(f"token_chunk {token_chunk} and vocab_chunk {vocab_chunk} must be at least 1")
    group = tp_group if tp_group is not None and tp_group.size() > 1 else None
    width = weight.size(0)
    padded = width * (group.size() if group else 1)
    if not 0 < vocab_size <= padded:
        raise ValueError(
            f"vocab_size {vocab_size} is not between 1 and the {padded} rows of the output weight"
        )
    first = width * (group.rank() if group else 0)
    columns = min(max(vocab_size - first, 0), width)
    plan = _Plan(group, reduce_grad_hidden, temperature, first, columns, token_chunk, vocab_chunk)
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
