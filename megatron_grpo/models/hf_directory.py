"""A Hugging Face model directory, checked before anything is started from it.

Only headers are read: a directory that a killed process left half-written is refused here, by name, and
not minutes later on some rank. This module needs neither torch nor safetensors.

The safetensors layout: 8 bytes, the little-endian length of the header; the header, a JSON object of
``name -> {dtype, shape, data_offsets}`` with offsets counted from its end; then the data.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HFConfig = Mapping[str, Any]

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_INDEX = "model.safetensors.index.json"


class ModelDirectoryError(ValueError):
    """A model directory that cannot be used: names the file, what is wrong with it and the mend."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header describes it; ``dtype`` is safetensors' name, such as ``BF16``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path


class HFDirectory:
    """A complete directory: ``config.json``, a tokenizer, and every tensor of its safetensors files.

    Attributes:
        path: the directory.
        config: the content of ``config.json``.
        tensors: what the headers say, by tensor name.
    """

    path: Path
    config: HFConfig
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: Path, tokenizer: bool = True) -> None:
        """Read and check the directory; only headers of weights are read.

        Args:
            path: holds ``config.json`` and ``model.safetensors``, or an index and its shards.
            tokenizer: also ask for tokenizer files.

        Raises:
            ModelDirectoryError: something is missing, cut short or inconsistent.
        """
        self.path = path = Path(path)
        self.config = read_hf_config(path)
        if tokenizer and not any((path / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelDirectoryError(
                f"{path} holds no tokenizer ({', '.join(_TOKENIZER_FILES)}); save it there with "
                "tokenizer.save_pretrained"
            )
        self.tensors = _read_tensors(path)

    def expect(self, shapes: Mapping[str, tuple[int, ...]], ignore: Iterable[str] = ()) -> None:
        """Check that the directory holds exactly these tensors.

        Args:
            shapes: the HF names and shapes that the model needs.
            ignore: names that may be there and are not read.

        Raises:
            ModelDirectoryError: names missing, extra and wrongly shaped tensors.
        """
        missing = [name for name in shapes if name not in self.tensors]
        extra = [name for name in self.tensors if name not in shapes and name not in set(ignore)]
        wrong = [
            f"{name} is {list(self.tensors[name].shape)} and should be {list(shape)}"
            for name, shape in shapes.items()
            if name in self.tensors and self.tensors[name].shape != shape
        ]
        problems = [
            f"{what} {_listed(names)}"
            for what, names in (("missing", missing), ("unknown", extra), ("wrong shape:", wrong))
            if names
        ]
        if problems:
            raise ModelDirectoryError(
                f"{self.path}: the tensors do not fit {self.path / 'config.json'}: {'; '.join(problems)}. "
                "Use the config.json that these weights were saved with, or save the model again"
            )


def read_hf_config(path: Path) -> HFConfig:
    """``config.json`` of a model directory.

    Raises:
        ModelDirectoryError: there is no such directory or file, or it is not a JSON object.
    """
    if not path.is_dir():
        raise ModelDirectoryError(
            f"{path} is not a directory; give the local directory of a Hugging Face model (config.json, "
            "tokenizer, safetensors)"
        )
    return _read_json(path / "config.json", "a model directory needs it; download or save the model again")


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes of one safetensors file, whose size must be what its header says.

    Raises:
        ModelDirectoryError: the file is cut short, has bytes too many, or is not a safetensors file.
    """
    mend = "download or save this file again"
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise ModelDirectoryError(f"{file} has {size} bytes, too few for a safetensors header; {mend}")
        (length,) = struct.unpack("<Q", prefix)
        if length > _MAX_HEADER_BYTES or 8 + length > size:
            raise ModelDirectoryError(
                f"{file} has {size} bytes and announces a header of {length}: cut short, or not a "
                f"safetensors file; {mend}"
            )
        try:
            header = json.loads(stream.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            tensors = {
                name: TensorInfo(name, entry["dtype"], tuple(entry["shape"]), file)
                for name, entry in entries.items()
            }
            spans = {name: tuple(entry["data_offsets"]) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelDirectoryError(
                f"{file} has an unreadable safetensors header ({error}); {mend}"
            ) from None
    expected = 8 + length + max((end for _, end in spans.values()), default=0)
    if size != expected:
        raise ModelDirectoryError(f"{file} has {size} bytes and its header says {expected}; {mend}")
    for name, (begin, end) in spans.items():
        info = tensors[name]
        if info.dtype in DTYPE_BYTES and end - begin != math.prod(info.shape) * DTYPE_BYTES[info.dtype]:
            raise ModelDirectoryError(
                f"{file}: {name} is {info.dtype} {list(info.shape)} but spans {end - begin} bytes; {mend}"
            )
    return tensors


def _read_tensors(path: Path) -> dict[str, TensorInfo]:
    single, index = path / "model.safetensors", path / _INDEX
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        pickled = next((p.name for p in sorted(path.glob("pytorch_model*.bin"))), None)
        found = f" ({pickled} is there, but pickled weights are not read)" if pickled else ""
        raise ModelDirectoryError(
            f"{path} holds neither model.safetensors nor {_INDEX}{found}; save the weights as "
            "safetensors with model.save_pretrained"
        )
    weight_map = _read_json(index, "save the model again").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelDirectoryError(f"{index} has no weight_map; save the model again")
    shards: dict[str, dict[str, TensorInfo]] = {}
    for shard in sorted(set(weight_map.values())):
        if not (path / shard).is_file():
            raise ModelDirectoryError(
                f"{path / shard} is missing ({_INDEX} lists {len(set(weight_map.values()))} shards); copy or "
                "download the rest of the directory"
            )
        shards[shard] = read_header(path / shard)
    absent = [name for name, shard in weight_map.items() if name not in shards[shard]]
    if absent:
        raise ModelDirectoryError(
            f"{index} places {_listed(absent)} in {weight_map[absent[0]]}, which does not hold it; the "
            "shards and the index are of different saves: copy the directory again"
        )
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _read_json(file: Path, mend: str) -> dict[str, Any]:
    if not file.is_file():
        raise ModelDirectoryError(f"{file} is missing; {mend}")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelDirectoryError(f"{file} is not valid JSON ({error}); {mend}") from None
    if not isinstance(value, dict):
        raise ModelDirectoryError(f"{file} is not a JSON object; {mend}")
    return value


def _listed(names: list[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
