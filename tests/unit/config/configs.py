"""A complete, minimal configuration for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def values(**sections: dict[str, Any]) -> dict[str, Any]:
    """8 prompts x 4 rollouts = 32 per step, two optimizer steps; ``sections`` change keys of a section."""
    base: dict[str, Any] = {
        "run_dir": "results/test",
        "grpo": {"max_num_steps": 3, "num_prompts_per_step": 8, "num_generations_per_prompt": 4},
        "loss_fn": {},
        "policy": {
            "model_path": "model",
            "max_total_sequence_length": 64,
            "train_global_batch_size": 16,
            "optimizer": {"lr": 1e-4},
        },
        "generation": {"max_new_tokens": 8},
        "data": {"train": {"kind": "jsonl", "path": "prompts.jsonl"}},
        "env": {"name": "reasoning_gym"},
    }
    for name, changes in sections.items():
        base[name] |= changes
    return base


def write(path: Path, content: dict[str, Any]) -> Path:
    """``content`` as a YAML file."""
    path.write_text(yaml.safe_dump(content))
    return path
