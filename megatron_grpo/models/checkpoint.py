"""Hugging Face weights in and out of a sharded Megatron model, one parameter at a time.

Every function takes the model chunks of this rank, wrapped (DDP, Float16Module) or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from megatron_grpo.models.hf_directory import HFDirectory
from megatron_grpo.models.registry import describe_model
from megatron_grpo.models.weight_map import ParamMapping, Shape, canonical_name
from megatron_grpo.parallel.layout import ParallelLayout

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class WeightInfo:
    """One exported tensor: its HF name, full shape and dtype."""

    name: str
    shape: Shape
    dtype: torch.dtype


@torch.no_grad()
def load_hf_weights(
    model_chunks: Sequence[nn.Module], directory: HFDirectory, layout: ParallelLayout
) -> None:
    """Fill this rank's parameters from the directory, reading only this rank's rows, columns and experts.

    No communication. Padding rows of the vocabulary become zero.

    Raises:
        ModelDirectoryError: names missing, unknown and wrongly shaped tensors.
        ValueError: the model and the weight map disagree.
    """
    description = describe_model(directory.config)
    description.check_tensors(directory)
    params = _parameters(model_chunks)
    per_rank = (description.num_experts or 0) // layout.ep
    with ExitStack() as stack:
        files: dict[Path, Any] = {}

        def source(name: str) -> Any:
            file = directory.tensors[name].file
            if file not in files:
                files[file] = stack.enter_context(safe_open(file, framework="pt"))
            return files[file].get_slice(name)

        for mapping in _weight_map(model_chunks, directory):
            tp, tp_rank = layout.tp, layout.tp_rank
            if mapping.expert is not None:
                if mapping.expert // per_rank != layout.ep_rank:
                    continue
                tp, tp_rank = layout.etp, layout.etp_rank
            param = params.pop(mapping.local_param(per_rank), None)
            if param is None:
                continue
            shape = mapping.shard_shape(tp)
            if param.shape != shape:
                raise ValueError(
                    f"{mapping.param} is {list(param.shape)} in the model; the weight map of "
                    f"{description.architecture} gives {list(shape)} in {tp} parts"
                )
            mapping.to_megatron([source(t.name) for t in mapping.hf], param.data, tp_rank, tp)
    if params:
        raise ValueError(
            f"the weight map of {description.architecture} lacks the parameters {', '.join(sorted(params))}"
        )


@torch.no_grad()
def iter_hf_weights(
    model_chunks: Sequence[nn.Module], directory: HFDirectory, layout: ParallelLayout
) -> Iterator[tuple[str, Tensor | None]]:
    """All weights as full HF tensors, one Megatron parameter in memory at a time.

    Collective over all ranks: every one must run the iterator to its end (experts lie across replicas).
    Yields ``(HF name, tensor)`` in the order of the family's ``hf_shapes()``. On each replica's leader
    (tp = pp = cp = 0) the tensor is contiguous, on the model's device, and shares no memory with the
    parameters; elsewhere it is None. Tensors of one fused parameter may share memory with each other.

    Raises:
        ValueError: a parameter of the weight map is on no pipeline stage.
    """
    params = _parameters(model_chunks)
    stages = _owning_stages(params, layout)
    dtype, device = _dtype_and_device(model_chunks)
    per_rank = (describe_model(directory.config).num_experts or 0) // layout.ep
    for mapping in _weight_map(model_chunks, directory):
        if mapping.is_copy:
            continue
        name = mapping.local_param(per_rank)
        if name not in stages:
            raise ValueError(f"no pipeline stage holds {mapping.param}")
        shards = None
        if layout.pp_rank == stages[name]:
            if mapping.expert is None:
                shards = _gather_over_tp(mapping, params[name], layout)
            else:
                shards = _broadcast_expert(mapping, params[name], mapping.expert // per_rank, layout)
        if layout.tp_rank == layout.cp_rank == 0:
            shards = _send_to_first_stage(mapping, shards, stages[name], layout, dtype, device)
        else:
            shards = None
        tensors = mapping.to_hf(list(shards)) if shards is not None else (None,) * len(mapping.hf)
        for info, tensor in zip(mapping.hf, tensors, strict=True):
            yield info.name, tensor


def _unwrap(chunk: nn.Module) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def _dtype_and_device(model_chunks: Sequence[nn.Module]) -> tuple[torch.dtype, torch.device]:
    param = next(param for chunk in model_chunks for param in chunk.parameters())
    return _unwrap(model_chunks[0]).config.params_dtype, param.device


def _weight_map(model_chunks: Sequence[nn.Module], directory: HFDirectory) -> tuple[ParamMapping, ...]:
    return describe_model(directory.config).weight_map(_unwrap(model_chunks[0]).vocab_size)


def _parameters(model_chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """This rank's parameters under their canonical names: layers counted over all stages, experts from 0."""
    params = {}
    for chunk in map(_unwrap, model_chunks):
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]  # layer_number counts from 1
        for name, param in chunk.named_parameters():
            if match := _LAYER.match(name):
                name = f"decoder.layers.{numbers[int(match[1])]}.{name[match.end() :]}"
            params[canonical_name(name)] = param
    return params


def _owning_stages(params: dict[str, nn.Parameter], layout: ParallelLayout) -> dict[str, int]:
    """Pipeline stage of every parameter. Collective over the PP group."""
    names: list[list[str]] = [list(params)]
    if layout.pp > 1:
        names = [[] for _ in range(layout.pp)]
        dist.all_gather_object(names, list(params), group=layout.pp_group)
    return {name: stage for stage, held in enumerate(names) for name in held}


def _gather_over_tp(mapping: ParamMapping, param: Tensor, layout: ParallelLayout) -> Tensor | None:
    """Copies of the parts of all TP ranks, ``[parts, *shard]``, on tp = cp = 0; None elsewhere."""
    if layout.cp_rank != 0:
        return None
    if not mapping.sharded or layout.tp == 1:
        return param.detach().clone()[None] if layout.tp_rank == 0 else None
    if layout.tp_rank != 0:
        dist.gather(param.detach().contiguous(), None, group=layout.tp_group, group_dst=0)
        return None
    parts = param.new_empty((layout.tp, *param.shape), requires_grad=False)
    dist.gather(param.detach().contiguous(), list(parts.unbind(0)), group=layout.tp_group, group_dst=0)
    return parts


def _broadcast_expert(mapping: ParamMapping, param: Tensor, ep_rank: int, layout: ParallelLayout) -> Tensor:
    """Copies of the parts of one expert, which rank ``ep_rank`` of EP holds, ``[expert-TP, *shard]``, everywhere.

    ``param`` is this rank's own expert in the same place. All ranks of a stage take part: leaders of different
    replicas share one expert group, or lie in different ones.
    """
    parts = param.new_empty((layout.etp, *param.shape), requires_grad=False)
    for etp_rank, part in enumerate(parts):
        if (layout.ep_rank, layout.etp_rank) == (ep_rank, etp_rank):
            part.copy_(param)
        dist.broadcast(part, group=layout.etp_ep_group, group_src=ep_rank * layout.etp + etp_rank)
    return parts


def _send_to_first_stage(
    mapping: ParamMapping,
    parts: Tensor | None,
    stage: int,
    layout: ParallelLayout,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """``parts`` of ``stage`` on the first stage; None on all other stages. For ranks with tp = cp = 0."""
    if stage == 0 or layout.pp_rank not in (0, stage):
        return parts if layout.pp_rank == 0 else None
    if parts is not None:
        dist.send(parts, group=layout.pp_group, group_dst=0)
        return None
    tp = layout.tp if mapping.expert is None else layout.etp
    parts = torch.empty((tp if mapping.sharded else 1, *mapping.shard_shape(tp)), dtype=dtype, device=device)
    dist.recv(parts, group=layout.pp_group, group_src=stage)
    return parts
