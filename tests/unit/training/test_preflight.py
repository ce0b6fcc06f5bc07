"""What is refused before a process starts: model directory, layout, context, vLLM, port."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megatron_grpo.config import ConfigError, RunConfig, load_config
from megatron_grpo.training.preflight import check_port, check_run
from tests.tiny_model import write_tiny_model

CONFIGS = Path(__file__).parents[3] / "configs"


def run_config(folder: Path, *, model: str = "model", tp: int = 1, **policy: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": folder / "run",
            "grpo": {"max_num_steps": 1, "num_prompts_per_step": 4, "num_generations_per_prompt": 4},
            "policy": {
                "model_path": folder / model,
                "max_total_sequence_length": 64,
                "train_global_batch_size": 8,
                "parallel": {"tensor_model_parallel_size": tp},
                "optimizer": {"lr": 1e-4},
                **policy,
            },
            "generation": {"max_new_tokens": 8},
            "data": {"train": {"kind": "reasoning_gym", "task": "chain_sum", "size": 8}},
            "env": {"name": "reasoning_gym"},
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize(("vocab_size", "tp"), [(320, 2), (317, 2), (301, 1)])
def test_any_vocabulary_size_is_accepted_because_it_is_padded(
    tmp_path: Path, vocab_size: int, tp: int
) -> None:
    write_tiny_model(tmp_path / "model", vocab_size=vocab_size)
    check_run(run_config(tmp_path, tp=tp), world_size=tp)


@pytest.mark.parametrize("recipe", sorted(p.stem for p in CONFIGS.glob("*.yaml") if p.stem != "quickstart"))
def test_recipes_are_accepted_with_a_model(tmp_path: Path, recipe: str) -> None:
    write_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    overrides = [f"policy.model_path={tmp_path / 'model'}", f"run_dir={tmp_path / 'run'}"]
    config = load_config(CONFIGS / f"{recipe}.yaml", overrides)
    for world_size in (1, 8):
        check_run(config, world_size)


def refused(config: RunConfig, message: str, world_size: int = 1) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(config, world_size)


def test_a_missing_directory(folder: Path) -> None:
    refused(
        run_config(folder, model="other"), r"policy\.model_path: \S*other is not a directory; give the local"
    )


def test_a_truncated_safetensors_file(folder: Path) -> None:
    weights = folder / "model/model.safetensors"
    size = weights.stat().st_size
    with weights.open("rb+") as stream:
        stream.truncate(size - 1000)
    refused(
        run_config(folder),
        rf"policy\.model_path: \S*model\.safetensors has {size - 1000} bytes and its header says {size}; download",
    )
    with weights.open("rb+") as stream:
        stream.truncate(100)
    refused(run_config(folder), r"model\.safetensors has 100 bytes and announces a header of \d+: cut short")
    weights.write_bytes(b"")
    refused(run_config(folder), r"model\.safetensors has 0 bytes, too few for a safetensors header")


def test_a_header_that_is_not_json(folder: Path) -> None:
    (folder / "model/model.safetensors").write_bytes(struct.pack("<Q", 8) + b"not json")
    refused(run_config(folder), r"model\.safetensors has an unreadable safetensors header")


def test_a_missing_shard(folder: Path) -> None:
    weights = load_file(folder / "model/model.safetensors")
    (folder / "model/model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / "model" / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model/model.safetensors.index.json").write_text(json.dumps(index))
    check_run(run_config(folder), 1)

    (folder / "model/model-00002-of-00002.safetensors").unlink()
    refused(
        run_config(folder), r"model-00002-of-00002\.safetensors is missing \(\S* lists 2 shards\); copy or"
    )


def test_a_missing_tensor(folder: Path) -> None:
    weights = load_file(folder / "model/model.safetensors")
    del weights["model.layers.1.self_attn.k_norm.weight"]
    save_file(weights, folder / "model/model.safetensors")
    refused(
        run_config(folder),
        r"policy\.model_path: .* do not fit .*missing model\.layers\.1\.self_attn\.k_norm\.weight",
    )


def test_a_missing_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "vocab.json", "tokenizer.model"):
        (folder / "model" / name).unlink(missing_ok=True)
    refused(run_config(folder), r"policy\.model_path: \S* holds no tokenizer")


def test_a_tensor_parallel_size_that_does_not_divide_the_heads(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"tensor_model_parallel_size 3 does not divide .* 4 attention heads"
    ):
        check_run(run_config(folder, tp=3), 3)
    # four heads and two query groups: grouped-query attention limits TP to 2
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size 4 .* 2 query groups .*; use 2"):
        check_run(run_config(folder, tp=4), 4)


def test_a_sequence_length_above_the_models_context(folder: Path) -> None:
    check_run(run_config(folder, max_total_sequence_length=512), 1)
    refused(
        run_config(folder, max_total_sequence_length=513),
        r"max_total_sequence_length 513 is above the model's max_position_embeddings 512",
    )


def test_vllm_that_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "vllm" else find_spec(name, *args)
    )
    refused(run_config(folder), "vllm is not installed in this environment, .*; run 'make setup'")


def test_layers_that_are_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformer_engine" else found(name)
    )
    with pytest.raises(
        ConfigError, match=r"policy\.layer_spec is transformer_engine, which is not installed"
    ):
        check_run(run_config(folder, layer_spec="transformer_engine"), world_size=1)


def test_a_port_that_another_process_holds() -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--master-port {port} can't be used .*{re.escape('in use')}"):
            check_port(port)
    check_port(port)
