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
    """Fill this rank's parameters from the directory, reading only this rank's rows and columns.

    No communication. Padding rows of the vocabulary become zero.

    Raises:
        ModelDirectoryError: names missing, unknown and wrongly shaped tensors.
        ValueError: the model and the weight map disagree.
    """
    description = describe_model(directory.config)
    description.check_tensors(directory)
    params = _global_parameters(model_chunks)
    with ExitStack() as stack:
        files: dict[Path, Any] = {}

        def source(name: str) -> Any:
            file = directory.tensors[name].file
            if file not in files:
                files[file] = stack.enter_context(safe_open(file, framework="pt"))
            return files[file].get_slice(name)

        for mapping in _weight_map(model_chunks, directory):
            param = params.pop(mapping.param, None)
            if param is None:
                continue
            shape = mapping.shard_shape(layout.tp)
            if param.shape != shape:
                raise ValueError(
                    f"{mapping.param} is {list(param.shape)} in the model; the weight map of "
                    f"{description.architecture} gives {list(shape)} at TP {layout.tp}"
                )
            mapping.to_megatron([source(t.name) for t in mapping.hf], param.data, layout.tp_rank, layout.tp)
    if params:
        raise ValueError(
            f"the weight map of {description.architecture} lacks the parameters {', '.join(sorted(params))}"
        )


@torch.no_grad()
def iter_hf_weights(
    model_chunks: Sequence[nn.Module], directory: HFDirectory, layout: ParallelLayout
) -> Iterator[tuple[str, Tensor | None]]:
    """All weights as full HF tensors, one Megatron parameter in memory at a time.

    Collective inside each data-parallel replica: every rank of it must run the iterator to its end.
    Yields ``(HF name, tensor)`` in the order of the family's ``hf_shapes()``. On the replica's leader
    (tp = pp = cp = 0) the tensor is contiguous, on the model's device, and shares no memory with the
    parameters; elsewhere it is None. Tensors of one fused parameter may share memory with each other.

    Raises:
        ValueError: a parameter of the weight map is on no pipeline stage.
    """
    params = _global_parameters(model_chunks)
    owners = _owning_stages(params, layout)
    dtype, device = _dtype_and_device(model_chunks)
    for mapping in _weight_map(model_chunks, directory):
        if mapping.is_copy:
            continue
        if mapping.param not in owners:
            raise ValueError(f"no pipeline stage holds {mapping.param}")
        shards = None
        if layout.cp_rank == 0:
            shards = _shards_on_leader(
                mapping, params.get(mapping.param), owners[mapping.param], layout, dtype, device
            )
        tensors = mapping.to_hf(shards) if shards is not None else (None,) * len(mapping.hf)
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


def _global_parameters(model_chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """This rank's parameters under their canonical names, layers counted over all stages."""
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


def _shards_on_leader(
    mapping: ParamMapping,
    param: Tensor | None,
    stage: int,
    layout: ParallelLayout,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor] | None:
    """Fresh copies of all TP parts on (tp 0, pp 0), None elsewhere: gathered over TP, then sent over PP."""
    parts = layout.tp if mapping.sharded else 1
    mine = layout.pp_rank == stage
    leader = layout.tp_rank == 0
    buffer = None
    if leader and (mine or layout.pp_rank == 0):
        buffer = torch.empty((parts, *mapping.shard_shape(layout.tp)), dtype=dtype, device=device)
    if mine:
        assert param is not None
        if parts > 1:
            gathered = list(buffer.unbind(0)) if buffer is not None else None
            dist.gather(param.detach().contiguous(), gathered, group=layout.tp_group, group_dst=0)
        elif buffer is not None:
            buffer[0].copy_(param)
    if stage != 0 and buffer is not None:
        if mine:
            dist.send(buffer, group=layout.pp_group, group_dst=0)
        elif layout.pp_rank == 0:
            dist.recv(buffer, group=layout.pp_group, group_src=stage)
    return list(buffer.unbind(0)) if buffer is not None and layout.pp_rank == 0 else None
