"""Everything about a run that can be refused before a process starts. Reads headers and metadata only."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path

from megatron_grpo.config import ConfigError, RunConfig
from megatron_grpo.config.policy import PolicyConfig
from megatron_grpo.models.hf_directory import HFDirectory
from megatron_grpo.models.registry import describe_model


def check_run(config: RunConfig, world_size: int) -> None:
    """Check the configuration against the world size, the model directory, the data and the environment.

    Raises:
        ConfigError, ModelDirectoryError: the key, the value and the mend.
    """
    config.check_world_size(world_size)
    try:
        directory = HFDirectory(config.policy.model_path)
        model = describe_model(directory.config)
        model.check_tensors(directory)
    except ValueError as error:
        raise ConfigError(f"policy.model_path: {error}") from None
    model.check_policy(config.policy)
    check_layer_spec(config.policy)
    context = directory.config.get("max_position_embeddings")
    if context is not None and config.policy.max_total_sequence_length > context:
        raise ConfigError(
            f"policy.max_total_sequence_length {config.policy.max_total_sequence_length} is above the model's "
            f"max_position_embeddings {context} ({config.policy.model_path}/config.json); lower it"
        )
    _check_vllm()
    _check_run_dir(config.run_dir)
    for name in ("train", "validation"):
        source = getattr(config.data, name)
        if source is not None and source.kind == "jsonl" and not source.path.is_file():
            raise ConfigError(f"data.{name}.path {source.path} does not exist; give the path of a JSONL file")


def check_layer_spec(policy: PolicyConfig) -> None:
    """Raises ConfigError when ``policy.layer_spec`` names layers that are not installed."""
    if policy.layer_spec == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "policy.layer_spec is transformer_engine, which is not installed in this environment; run 'make gpu-env', "
            "or set it to local or auto"
        )


def check_port(port: int) -> None:
    """Raises ConfigError when nothing can listen on ``port`` of this host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"--master-port {port} can't be used on this host ({error.strerror}); another run may hold it: "
                "give another --master-port on every node"
            ) from None


def _check_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vllm is not installed in this environment, so there is nothing to sample with; run 'make setup' "
            "(CPU) or 'make gpu-env' (GPU)"
        )


def _check_run_dir(run_dir: Path) -> None:
    existing = run_dir
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(f"run_dir {run_dir} can't be written ({existing} is not a writable directory)")
