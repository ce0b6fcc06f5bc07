"""Export: the sharded Megatron model as a Hugging Face directory, streamed and written atomically."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from megatron_grpo.models.checkpoint import WeightInfo, iter_hf_weights
from megatron_grpo.models.hf_directory import DTYPE_BYTES, HFDirectory
from megatron_grpo.models.registry import describe_model
from megatron_grpo.parallel.agreement import agree
from megatron_grpo.parallel.layout import ParallelLayout

log = logging.getLogger(__name__)

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")


def save_hf_directory(
    model_chunks: Sequence[nn.Module],
    source: HFDirectory,
    destination: Path,
    layout: ParallelLayout,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write the model as a Hugging Face directory; it appears at ``destination`` complete, or not at all.

    Collective over all ranks; the first replica's leader writes, one tensor in memory at a time. A directory
    that is at ``destination`` already is replaced. Configuration and tokenizer files come from ``source``.

    Args:
        dtype: of all tensors; by default each tensor has the dtype it has in ``source``.
        max_shard_bytes: tensors go into several files of about this size.

    Raises:
        OSError: writing failed (on the writing rank; the others raise PeerError).
    """
    destination = Path(destination)
    infos = [
        WeightInfo(name, shape, dtype or _torch_dtype(source, name))
        for name, shape in describe_model(source.config).hf_shapes().items()
    ]
    error: OSError | None = None
    weights = iter_hf_weights(model_chunks, source, layout)
    if layout.is_replica_leader and layout.dp_rank == 0:
        try:
            _write_directory(weights, infos, source, destination, dtype, max_shard_bytes)
        except OSError as caught:
            error = caught
    for _ in weights:  # every rank takes part in every collective, whatever happened
        pass
    agree(error, f"export to {destination}")


def _write_directory(
    weights: Iterator[tuple[str, Tensor | None]],
    infos: Sequence[WeightInfo],
    source: HFDirectory,
    destination: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
    partial.mkdir(parents=True)
    for file in sorted(source.path.iterdir()):
        if file.suffix in _COPIED_SUFFIXES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, partial / file.name)
    if dtype is not None:
        config = {key: value for key, value in source.config.items() if key != "torch_dtype"}
        config["dtype"] = str(dtype).removeprefix("torch.")
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shards = _into_shards(infos, max_shard_bytes)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = (
            "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        )
        files |= dict.fromkeys((info.name for info in shard), name)
        with (partial / name).open("wb") as stream:
            _write_header(stream, shard)
            for info in shard:
                _, tensor = next(weights)  # in the order of infos
                assert tensor is not None  # this is the leader
                stream.write(tensor.to("cpu", info.dtype).view(-1).view(torch.uint8).numpy())
            stream.flush()
            os.fsync(stream.fileno())
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(_num_bytes(i) for i in infos)}, "weight_map": files}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    _replace_directory(partial, destination)
    log.info("exported %d tensors to %s", len(infos), destination)


def _torch_dtype(source: HFDirectory, name: str) -> torch.dtype:
    stored = source.tensors[name].dtype
    if stored not in _TORCH_DTYPES:
        raise ValueError(
            f"{source.path} stores {name} as {stored}, which is not exported; give a dtype, "
            "such as torch.bfloat16"
        )
    return _TORCH_DTYPES[stored]


def _write_header(stream: BinaryIO, infos: Sequence[WeightInfo]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for info in infos:
        end = offset + _num_bytes(info)
        header[info.name] = {
            "dtype": _DTYPES[info.dtype], "shape": list(info.shape), "data_offsets": [offset, end]
        }  # fmt: skip
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8, as safetensors writes it
    stream.write(len(text).to_bytes(8, "little") + text)


def _replace_directory(new: Path, destination: Path) -> None:
    old = destination.with_name(f".{destination.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if destination.exists():
        destination.rename(old)
    new.rename(destination)
    shutil.rmtree(old, ignore_errors=True)


def _into_shards(infos: Sequence[WeightInfo], max_bytes: int) -> list[list[WeightInfo]]:
    shards: list[list[WeightInfo]] = [[]]
    size = 0
    for info in infos:
        if shards[-1] and size + _num_bytes(info) > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(info)
        size += _num_bytes(info)
    return shards


def _num_bytes(info: WeightInfo) -> int:
    return torch.Size(info.shape).numel() * DTYPE_BYTES[_DTYPES[info.dtype]]
