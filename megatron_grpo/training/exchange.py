"""Finished rollouts, from the replica that sampled them to the replica that trains on them.

Every leader (tp = pp = cp = 0) sees all lengths, computes the same assignment, and one all-to-all moves the
rows; a broadcast then gives them to the other ranks of the replica. What a leader holds grows with the
rollouts per replica; only the lengths (two integers a row) are gathered over all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.parallel import platform
from megatron_grpo.parallel.layout import ParallelLayout, broadcast_from_leader
from megatron_grpo.policy.experience import Experience
from megatron_grpo.types import Rollout

_HEADER = 5  # group id, prompt length, response length, truncated, reward


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with its reward, the reward's components (``reward/<name>``) and the environment's metrics
    (``environment/<name>``); the same names for all rollouts of a run."""

    rollout: Rollout
    reward: float
    components: dict[str, float]


def assign_rows(lengths: Tensor, dp: int, num_minibatches: int, seed: int) -> Tensor:
    """Which replica trains on which row, in which optimizer step.

    Mini-batches are drawn from all rows by ``seed`` and do not depend on ``dp``; inside one, rows are dealt to
    the replicas in order of length, back and forth, so that their token counts are close.

    Args:
        lengths: [R] tokens of each row; R must be a multiple of ``dp * num_minibatches``.

    Returns:
        [dp, num_minibatches, R / (dp * num_minibatches)] int64 row numbers, each row once.
    """
    rows = lengths.numel()
    if rows % (dp * num_minibatches):
        raise ValueError(
            f"{rows} rollouts do not split into {num_minibatches} mini-batches on {dp} replicas; "
            "use a multiple of their product"
        )
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    minibatches = order.view(num_minibatches, -1)
    by_length = minibatches.gather(1, lengths[minibatches].argsort(dim=1, descending=True, stable=True))
    dealt = by_length.view(num_minibatches, -1, dp).clone()
    dealt[:, 1::2] = dealt[:, 1::2].flip(-1)
    return dealt.permute(2, 0, 1).contiguous()


def exchange(
    scored: Sequence[ScoredRollout], layout: ParallelLayout, num_minibatches: int, seed: int, multiple: int
) -> Experience:
    """Collective over all ranks; ``scored`` is read on leaders only, and each must bring equally many rows.

    Args:
        multiple: the sequence length of the result is a multiple of this.

    Returns:
        This replica's rows, ordered by mini-batch, on every rank of the replica.
    """
    names = sorted(scored[0].components) if layout.is_replica_leader else []
    flat = torch.empty(0, dtype=torch.float64)
    if layout.is_replica_leader:
        flat = _exchange_between_leaders(scored, names, layout, num_minibatches, seed)
    flat, names = _broadcast_in_replica(flat, names, layout)
    return _to_experience(flat, names, num_minibatches, multiple)


def _exchange_between_leaders(
    scored: Sequence[ScoredRollout], names: list[str], layout: ParallelLayout, num_minibatches: int, seed: int
) -> Tensor:
    rows = [_pack(item, names) for item in scored]
    if layout.dp == 1:
        lengths = torch.tensor([len(s.rollout.prompt.token_ids) + len(s.rollout.token_ids) for s in scored])
        return torch.cat([rows[i] for i in assign_rows(lengths, 1, num_minibatches, seed).flatten().tolist()])
    device = platform.device()
    local = torch.tensor(
        [
            [len(s.rollout.prompt.token_ids) + len(s.rollout.token_ids), row.numel()]
            for s, row in zip(scored, rows, strict=True)
        ],
        device=device,
    )  # [rows / dp, 2]
    gathered = torch.empty(layout.dp * local.size(0), 2, dtype=local.dtype, device=device)
    dist.all_gather_into_tensor(gathered, local, group=layout.dp_group)
    lengths, sizes = gathered.cpu().unbind(1)
    assignment = assign_rows(lengths, layout.dp, num_minibatches, seed).flatten(1)  # [dp, rows / dp]
    first = layout.dp_rank * len(rows)
    owner = torch.arange(lengths.numel()) // len(rows)

    to_send = [row for target in assignment for row in target.tolist() if owner[row] == layout.dp_rank]
    send = torch.cat([rows[row - first] for row in to_send]).to(device)
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
    return torch.cat([pieces[row] for row in mine.tolist()])


def _broadcast_in_replica(
    flat: Tensor, names: Sequence[str], layout: ParallelLayout
) -> tuple[Tensor, list[str]]:
    """The leader's rows and component names, on every rank of the replica."""
    device = platform.device()
    text = torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8)
    sizes = torch.tensor([flat.numel(), text.numel()], device=device)
    broadcast_from_leader(sizes, layout)
    num_values, num_bytes = sizes.tolist()
    if not layout.is_replica_leader:
        flat, text = torch.empty(num_values, dtype=flat.dtype), torch.empty(num_bytes, dtype=text.dtype)
    flat, text = flat.to(device), text.to(device)
    broadcast_from_leader(flat, layout)
    broadcast_from_leader(text, layout)
    return flat.cpu(), bytes(text.tolist()).decode().split("\n") if num_bytes else []


def _pack(item: ScoredRollout, names: Sequence[str]) -> Tensor:
    """One row as float64: exact for token ids, versions and group ids below 2^53 and for float32 log-probs."""
    rollout = item.rollout
    if sorted(item.components) != list(names):
        raise ValueError(
            f"prompt {rollout.prompt.prompt_id}: reward components and metrics {sorted(item.components)} differ from "
            f"the others' {list(names)}; an environment must return the same names for every group"
        )
    header = [
        rollout.group_id, len(rollout.prompt.token_ids), len(rollout.token_ids),
        float(rollout.finish_reason == "length"), item.reward,
    ]  # fmt: skip
    values = [item.components[name] for name in names]
    tokens = [*rollout.prompt.token_ids, *rollout.token_ids]
    row = [*header, *values, *tokens, *rollout.logprobs, *rollout.weight_versions]
    return torch.tensor(row, dtype=torch.float64)


def _to_experience(flat: Tensor, names: Sequence[str], num_minibatches: int, multiple: int) -> Experience:
    rows: list[Tensor] = []
    while flat.numel():
        prompt, response = int(flat[1]), int(flat[2])
        size = _HEADER + len(names) + prompt + 3 * response
        rows.append(flat[:size])
        flat = flat[size:]
    longest = max(int(row[1] + row[2]) for row in rows)
    shape = (len(rows), -(-longest // multiple) * multiple)
    heads = torch.stack([row[: _HEADER + len(names)] for row in rows])
    tokens = torch.zeros(shape, dtype=torch.int64)
    mask, logprobs = torch.zeros(shape), torch.zeros(shape)
    versions = torch.zeros(shape, dtype=torch.int64)
    for index, row in enumerate(rows):
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
        num_minibatches=num_minibatches,
    )
