"""An error on one rank is an error on all, at an agreed point."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_grpo.parallel import platform

_TEXT_LIMIT = 8192


class PeerError(RuntimeError):
    """Another rank failed; the message names it and carries its error."""


def agree(error: BaseException | None, what: str) -> None:
    """Raise on every rank when any rank brings an error. Collective over all ranks.

    The lowest failing rank raises its own error; all others raise :class:`PeerError` with its text, from their own
    error if they have one: a fault of many ranks is told once. One all-reduce when all is well.

    Args:
        error: this rank's error, or None.
        what: the phase, for the message.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    first = torch.tensor([float(rank if error is not None else world)], device=platform.device())
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    failed = int(first.item())
    if failed == world:
        return
    text = torch.zeros(_TEXT_LIMIT, dtype=torch.uint8, device=platform.device())
    if rank == failed:
        data = f"{type(error).__name__}: {error}".encode()[:_TEXT_LIMIT]
        text[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device=text.device)
    dist.broadcast(text, src=failed)
    if error is not None and rank == failed:
        raise error
    message = bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
    raise PeerError(f"{what}: rank {failed} failed: {message}") from error


def sum_over_ranks(count: int) -> int:
    """Sum of ``count`` over all ranks. Collective over all ranks."""
    value = torch.tensor([count], device=platform.device())
    dist.all_reduce(value)
    return int(value.item())


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on at least one rank. Collective over all ranks."""
    return any_of_ranks([flag])[0]


def any_of_ranks(flags: Sequence[bool]) -> list[bool]:
    """As :func:`any_rank`, for each of several flags with one collective."""
    values = torch.tensor(flags, dtype=torch.float32, device=platform.device())
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return [value > 0 for value in values.tolist()]
