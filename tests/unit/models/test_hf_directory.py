from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_grpo.models.hf_directory import HFDirectory, ModelDirectoryError, read_header

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Tensors a [2, 3] in shard 1 and b [4] (bf16) in shard 2."""
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


def test_reads_names_shapes_and_dtypes_from_headers(sharded: Path) -> None:
    directory = HFDirectory(sharded)
    assert {n: (t.dtype, t.shape, t.file.name) for n, t in directory.tensors.items()} == {
        "a": ("F32", (2, 3), "model-1.safetensors"),
        "b": ("BF16", (4,), "model-2.safetensors"),
    }
    assert directory.config["architectures"] == ["Qwen3ForCausalLM"]


def test_single_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    assert HFDirectory(tmp_path, tokenizer=False).tensors["a"].shape == (2, 3)
    with pytest.raises(ModelDirectoryError, match=r"holds no tokenizer"):
        HFDirectory(tmp_path)


def _truncate(path: Path, drop: int) -> None:
    path.write_bytes(path.read_bytes()[:-drop])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "config.json").unlink(), r"config\.json is missing"),
        (lambda d: (d / "config.json").write_text('{"a": '), r"config\.json is not valid JSON"),
        (lambda d: (d / "tokenizer.json").unlink(), r"no tokenizer.*save_pretrained"),
        (lambda d: (d / "model-2.safetensors").unlink(), r"model-2\.safetensors is missing .*2 shards"),
        (
            lambda d: _truncate(d / "model-1.safetensors", 1),
            r"model-1\.safetensors has \d+ bytes and its header",
        ),
        (lambda d: (d / "model-1.safetensors").write_bytes(b""), r"model-1\.safetensors has 0 bytes"),
        (
            lambda d: (d / "model-1.safetensors").write_bytes(b"\xff" * 64),
            r"model-1\.safetensors .*cut short",
        ),
        (
            lambda d: (d / "model-1.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]"),
            r"model-1\.safetensors has an unreadable safetensors header",
        ),
        (
            lambda d: save_file({"other": torch.ones(2, 3)}, d / "model-1.safetensors"),
            r"places a in model-1\.safetensors, which does not hold it",
        ),
        (lambda d: (d / INDEX).write_text("{}"), r"has no weight_map"),
        (lambda d: (d / INDEX).unlink(), r"holds neither model\.safetensors nor"),
    ],
)
def test_damaged_directory_is_refused_by_name(sharded: Path, damage: object, message: str) -> None:
    damage(sharded)  # type: ignore[operator]
    with pytest.raises(ModelDirectoryError, match=message):
        HFDirectory(sharded)


def test_not_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match="is not a directory"):
        HFDirectory(tmp_path / "absent")


def test_pickled_weights_are_named(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelDirectoryError, match=r"pytorch_model\.bin is there.*not read"):
        HFDirectory(sharded)


def test_shape_that_does_not_fill_its_span(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelDirectoryError, match=r"a is F32 \[3\] but spans 8 bytes"):
        read_header(file)


def test_expect_names_missing_unknown_and_misshapen(sharded: Path) -> None:
    directory = HFDirectory(sharded)
    directory.expect({"a": (2, 3)}, ignore=("b",))
    with pytest.raises(
        ModelDirectoryError, match=r"missing c; unknown b; wrong shape: a is \[2, 3\] .* \[3, 2\]"
    ):
        directory.expect({"a": (3, 2), "c": (1,)})


def test_needs_no_torch() -> None:
    code = "import sys, megatron_grpo.models.hf_directory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
