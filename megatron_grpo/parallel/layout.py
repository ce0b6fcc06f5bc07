"""``ParallelLayout``: which ranks reduce what. One value object, built once, handed down to every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes, ranks and process groups of this rank. Functions that reduce take a group from here.

    ``tp``, ``pp``, ``cp``, ``dp`` are group sizes and ``*_rank`` the position in the group.
    ``dp_cp_group`` spans data and context parallel ranks: sums over tokens reduce over it.
    ``vpp`` is the number of model chunks per pipeline stage (1 without interleaving).

    Experts are laid out on their own: the ranks of a pipeline stage are ETP x EP x expert-DP. An
    ``etp_ep_group`` holds every expert of its stage once; its rank ``r`` has ``etp_rank`` r mod ETP and
    ``ep_rank`` r div ETP. It may lie across data-parallel replicas.
    """

    world_size: int
    rank: int
    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    etp: int
    vpp: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    ep_rank: int
    etp_rank: int
    tp_group: Group
    pp_group: Group
    cp_group: Group
    dp_group: Group
    dp_cp_group: Group
    tp_cp_group: Group
    etp_ep_group: Group

    @property
    def is_replica_leader(self) -> bool:
        """The rank that drives the rollouts of its data-parallel replica: tp = pp = cp = 0."""
        return self.tp_rank == self.pp_rank == self.cp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer (its last model chunk with interleaving)."""
        return self.pp_rank == self.pp - 1

    def __str__(self) -> str:
        vpp = f" x VPP {self.vpp}" if self.vpp > 1 else ""
        return f"TP {self.tp} x PP {self.pp}{vpp} x CP {self.cp} x EP {self.ep} x DP {self.dp}"


def initialize_layout(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    timeout_s: float = 1800,
) -> ParallelLayout:
    """Build Megatron's process groups over the default group, which must exist, and describe this rank.

    ``timeout_s`` is the deadline of every collective in these groups. Collective over all ranks.
    """
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        distributed_timeout_minutes=timeout_s / 60,
    )
    return ParallelLayout(
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        tp=ps.get_tensor_model_parallel_world_size(),
        pp=ps.get_pipeline_model_parallel_world_size(),
        cp=ps.get_context_parallel_world_size(),
        dp=ps.get_data_parallel_world_size(),
        ep=ps.get_expert_model_parallel_world_size(),
        etp=ps.get_expert_tensor_parallel_world_size(),
        vpp=virtual_pipeline_model_parallel_size or 1,
        tp_rank=ps.get_tensor_model_parallel_rank(),
        pp_rank=ps.get_pipeline_model_parallel_rank(),
        cp_rank=ps.get_context_parallel_rank(),
        dp_rank=ps.get_data_parallel_rank(),
        ep_rank=ps.get_expert_model_parallel_rank(),
        etp_rank=ps.get_expert_tensor_parallel_rank(),
        tp_group=ps.get_tensor_model_parallel_group(),
        pp_group=ps.get_pipeline_model_parallel_group(),
        cp_group=ps.get_context_parallel_group(),
        dp_group=ps.get_data_parallel_group(),
        dp_cp_group=ps.get_data_parallel_group(with_context_parallel=True),
        tp_cp_group=ps.get_tensor_and_context_parallel_group(),
        etp_ep_group=ps.get_expert_tensor_and_model_parallel_group(),
    )


def broadcast_from_leader(tensor: Tensor, layout: ParallelLayout) -> None:
    """Fill ``tensor``, on every rank of a replica, with the leader's. Same shape and dtype on all, on the device.

    Down the leader's pipeline, then over TP x CP in every stage.
    """
    if layout.pp > 1 and layout.tp_rank == layout.cp_rank == 0:
        dist.broadcast(tensor, group=layout.pp_group, group_src=0)
    if layout.tp * layout.cp > 1:
        dist.broadcast(tensor, group=layout.tp_cp_group, group_src=0)
