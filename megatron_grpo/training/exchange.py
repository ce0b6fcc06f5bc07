"""Finished rollouts, from the replica that sampled them to the replica that trains on them.

Every leader (tp = pp = cp = 0) sees all lengths, computes the same assignment, and one all-to-all moves the
rows; a broadcast then gives them to the other ranks of the replica. What a leader holds grows with the
rollouts per replica; only four integers a row (group id, lengths, checksum of the component names) are gathered
over all replicas.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.parallel import platform
from megatron_grpo.parallel.agreement import agree
from megatron_grpo.parallel.collectives import all_gather_rows
from megatron_grpo.parallel.layout import ParallelLayout, broadcast_from_leader
from megatron_grpo.policy.experience import Experience
from megatron_grpo.policy.packing import MicroBatchRule, assign_rows
from megatron_grpo.types import Rollout

_HEADER = 5  # group id, prompt length, response length, truncated, reward


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with its reward, the reward's components (``reward/<name>``) and the environment's metrics
    (``environment/<name>``); the same names for all rollouts of a run."""

    rollout: Rollout
    reward: float
    components: dict[str, float]


def exchange(
    scored: Sequence[ScoredRollout],
    layout: ParallelLayout,
    num_minibatches: int,
    seed: int,
    rule: MicroBatchRule,
    names: Sequence[str] | None = None,
) -> Experience:
    """Collective over all ranks; ``scored`` is read on leaders only. Who sampled which group changes nothing.

    Args:
        scored: whole groups; leaders may bring different numbers of them, together as many rows as
            :func:`assign_rows` can split.
        rule: how micro-batches are made.
        names: component names of all rollouts; None: those of the first of ``scored``.

    Returns:
        This replica's rows, ordered by optimizer step and micro-batch, on every rank of the replica; with packing
        replicas hold different numbers of rows.
    """
    if names is None:
        names = sorted(scored[0].components) if layout.is_replica_leader else []
    flat = torch.empty(0, dtype=torch.float64)
    sizes: list[list[int]] = []
    error: ValueError | None = None
    if layout.is_replica_leader:
        try:
            flat, sizes = _exchange_between_leaders(scored, names, layout, num_minibatches, seed, rule)
        except ValueError as caught:
            error = caught
    agree(error, "the exchange of rollouts")
    flat, (names, sizes) = _broadcast_in_replica(flat, [names, sizes], layout)
    return _to_experience(flat, names, sizes, rule.multiple)


def _exchange_between_leaders(
    scored: Sequence[ScoredRollout],
    names: Sequence[str],
    layout: ParallelLayout,
    num_minibatches: int,
    seed: int,
    rule: MicroBatchRule,
) -> tuple[Tensor, list[list[int]]]:
    """This replica's rows one after the other, and how many form each micro-batch of each optimizer step.

    Raises:
        ValueError: on all leaders: rollouts have components of different names.
    """
    rows = [_pack(item) for item in scored]
    device = platform.device()
    local = torch.tensor(
        [
            [
                s.rollout.group_id, len(s.rollout.prompt.token_ids) + len(s.rollout.token_ids), row.numel(),
                _checksum(s.components),
            ]
            for s, row in zip(scored, rows, strict=True)
        ],
        dtype=torch.int64,
        device=device,
    ).view(-1, 4)  # fmt: skip
    parts = [part.cpu() for part in all_gather_rows(local, layout.dp_group)]
    ids, lengths, sizes, checksums = torch.cat(parts).unbind(1)
    if len(others := ids[checksums != _checksum(names)]):
        raise ValueError(
            f"reward components and metrics of rollout group {others[0]} are not {list(names)}, as the others' are; "
            "an environment must return the same names for every group"
        )
    order = ids.argsort(stable=True)
    plan = assign_rows(lengths[order].numpy(), layout.dp, num_minibatches, seed, rule)
    microbatch_sizes = [[len(microbatch) for microbatch in step] for step in plan[layout.dp_rank]]
    assignment = [
        order[[row for step in steps for microbatch in step for row in microbatch]] for steps in plan
    ]
    nothing = torch.empty(0, dtype=torch.float64)
    if layout.dp == 1:
        return torch.cat([nothing, *(rows[row] for row in assignment[0].tolist())]), microbatch_sizes
    counts = torch.tensor([len(part) for part in parts])
    first = int(counts[: layout.dp_rank].sum())
    owner = torch.arange(layout.dp).repeat_interleave(counts)

    to_send = [row for target in assignment for row in target.tolist() if owner[row] == layout.dp_rank]
    send = torch.cat([nothing, *(rows[row - first] for row in to_send)]).to(device)
    send_sizes = [int(sizes[t[owner[t] == layout.dp_rank]].sum()) for t in assignment]
    mine = assignment[layout.dp_rank]
    receive_sizes = [int(sizes[mine[owner[mine] == source]].sum()) for source in range(layout.dp)]
    received = torch.empty(sum(receive_sizes), dtype=torch.float64, device=device)
    dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=layout.dp_group)

    # rows arrive grouped by the replica that sampled them; put them in the order of the assignment
    arrived = [row for source in range(layout.dp) for row in mine.tolist() if owner[row] == source]
    pieces = dict(
        zip(arrived, torch.split(received.cpu(), [int(sizes[row]) for row in arrived]), strict=True)
    )
    return torch.cat([nothing, *(pieces[row] for row in mine.tolist())]), microbatch_sizes


def _broadcast_in_replica(flat: Tensor, plain: Any, layout: ParallelLayout) -> tuple[Tensor, Any]:
    """The leader's rows and ``plain`` JSON values, on every rank of the replica."""
    device = platform.device()
    text = torch.tensor(list(json.dumps(plain).encode()), dtype=torch.uint8)
    sizes = torch.tensor([flat.numel(), text.numel()], device=device)
    broadcast_from_leader(sizes, layout)
    num_values, num_bytes = sizes.tolist()
    if not layout.is_replica_leader:
        flat, text = torch.empty(num_values, dtype=flat.dtype), torch.empty(num_bytes, dtype=text.dtype)
    flat, text = flat.to(device), text.to(device)
    broadcast_from_leader(flat, layout)
    broadcast_from_leader(text, layout)
    return flat.cpu(), json.loads(bytes(text.tolist()))


def _checksum(names: Iterable[str]) -> int:
    return zlib.crc32("\n".join(sorted(names)).encode())


def _pack(item: ScoredRollout) -> Tensor:
    """One row as float64: exact for token ids, versions and group ids below 2^53 and for float32 log-probs."""
    rollout = item.rollout
    header = [
        rollout.group_id, len(rollout.prompt.token_ids), len(rollout.token_ids),
        float(rollout.finish_reason == "length"), item.reward,
    ]  # fmt: skip
    values = [item.components[name] for name in sorted(item.components)]
    tokens = [*rollout.prompt.token_ids, *rollout.token_ids]
    row = [*header, *values, *tokens, *rollout.logprobs, *rollout.weight_versions]
    return torch.tensor(row, dtype=torch.float64)


def _to_experience(
    flat: Tensor, names: Sequence[str], microbatch_sizes: Sequence[Sequence[int]], multiple: int
) -> Experience:
    rows: list[Tensor] = []
    while flat.numel():
        prompt, response = int(flat[1]), int(flat[2])
        size = _HEADER + len(names) + prompt + 3 * response
        rows.append(flat[:size])
        flat = flat[size:]
    longest = max((int(row[1] + row[2]) for row in rows), default=1)
    shape = (len(rows), -(-longest // multiple) * multiple)
    heads = torch.empty(len(rows), _HEADER + len(names), dtype=flat.dtype)
    tokens = torch.zeros(shape, dtype=torch.int64)
    mask, logprobs = torch.zeros(shape), torch.zeros(shape)
    versions = torch.zeros(shape, dtype=torch.int64)
    for index, row in enumerate(rows):
        heads[index] = row[: heads.size(1)]
        prompt, response = int(row[1]), int(row[2])
        ids, g, v = torch.split(row[_HEADER + len(names) :], [prompt + response, response, response])
        where = slice(prompt, prompt + response)
        tokens[index, : prompt + response] = ids.long()
        mask[index, where] = 1.0
        logprobs[index, where] = g.float()
        versions[index, where] = v.long()
    return Experience(
        tokens=tokens,
        token_mask=mask,
        sample_mask=torch.ones(len(rows)),
        generation_logprobs=logprobs,
        weight_versions=versions,
        group_ids=heads[:, 0].long(),
        rewards=heads[:, 4],
        truncated=heads[:, 3].float(),
        components={name: heads[:, _HEADER + i] for i, name in enumerate(names)},
        microbatch_sizes=tuple(tuple(sizes) for sizes in microbatch_sizes),
    )
