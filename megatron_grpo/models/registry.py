"""The model families, by Hugging Face architecture name."""

from __future__ import annotations

from collections.abc import Callable

from megatron_grpo.models import qwen3, qwen3_moe
from megatron_grpo.models.family import ModelDescription
from megatron_grpo.models.hf_directory import HFConfig

FAMILIES: dict[str, Callable[[HFConfig], ModelDescription]] = {
    qwen3.ARCHITECTURE: qwen3.describe,
    qwen3_moe.ARCHITECTURE: qwen3_moe.describe,
}


def describe_model(hf_config: HFConfig) -> ModelDescription:
    """The description of the model that a ``config.json`` names.

    Raises:
        ValueError: an architecture that is not registered, or a setting that its family does not support.
    """
    architectures = hf_config.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else []:
        if name in FAMILIES:
            return FAMILIES[name](hf_config)
    raise ValueError(
        f"config.json: architectures is {architectures}; supported are {', '.join(sorted(FAMILIES))}. "
        "CONTRIBUTING.md says how to add a model family"
    )
