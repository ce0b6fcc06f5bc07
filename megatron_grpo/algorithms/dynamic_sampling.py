"""Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476): which of the sampled groups train in a step.

A group whose rollouts all have the same raw reward has advantage 0: it costs sampling and gives no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Selection:
    """Of G sampled groups; a group in neither mask is discarded.

    Attributes:
        train: ``[G]`` bool, the groups of this step; as many as were asked for.
        keep: ``[G]`` bool, groups with a signal that are left over for the next step.
    """

    train: Tensor
    keep: Tensor


def has_signal(rewards: Tensor) -> Tensor:
    """``[G]`` bool: the rollouts of the group have more than one distinct reward.

    Args:
        rewards: ``[G, N, K]`` raw rewards (before any shaping) of G groups of N rollouts. K is 1, or the number
            of reward components for GDPO: one that is not constant is enough.
    """
    return (rewards.amax(1) != rewards.amin(1)).any(1)


def select_groups(group_ids: Tensor, signal: Tensor, num_groups: int) -> Selection:
    """The ``num_groups`` oldest groups with a signal; too few of them are filled up with the oldest without.

    The choice depends on ids and signals only, and not on the order of the groups.

    Args:
        group_ids: ``[G]`` int64, distinct; lower is older.
        signal: ``[G]`` bool, see :func:`has_signal`.

    Raises:
        ValueError: fewer than ``num_groups`` groups.
    """
    if len(group_ids) < num_groups:
        raise ValueError(
            f"{len(group_ids)} groups were sampled, {num_groups} are to be selected; sample more"
        )
    by_age = group_ids.argsort()
    order = by_age[(~signal[by_age]).to(torch.uint8).argsort(stable=True)]
    train = torch.zeros_like(signal)
    train[order[:num_groups]] = True
    return Selection(train, signal & ~train)
