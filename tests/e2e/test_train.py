"""A whole run with a real engine: what it leaves behind, and that stopping and resuming changes nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM

from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]


def write_config(folder: Path, model: Path) -> Path:
    task = {"kind": "reasoning_gym", "task": "chain_sum", "size": 200}
    config: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "grpo": {
            "max_num_steps": 4,
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 8,
            "val_at_end": True,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.01},
        "policy": {
            "model_path": str(model),
            "max_total_sequence_length": 128,
            "train_global_batch_size": 16,
            "train_micro_batch_size": 8,
            "precision": "fp32",
            "parallel": {"tensor_model_parallel_size": 2},
            "optimizer": {"lr": 1.0e-3},
        },
        "generation": {"max_new_tokens": 8, "temperature": 0.8, "vllm": {"enforce_eager": True}},
        "data": {"train": task | {"split": "train"}, "validation": task | {"split": "validation"}},
        "env": {"name": "custom", "class_path": "lengths:Lengths"},
    }
    (folder / "lengths.py").write_text(
        "import torch\n"
        "from megatron_grpo.environments.base import EnvironmentReturn\n"
        "class Lengths:\n"
        "    def step(self, group):\n"
        "        size = torch.tensor([float(len(r.token_ids)) for r in group.rollouts])\n"
        "        last = torch.tensor([r.token_ids[-1] % 7 / 7 for r in group.rollouts])\n"
        "        return EnvironmentReturn({'length': size, 'last': last})\n"
    )
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def train(config: Path, *overrides: str) -> None:
    command = [ROOT / "launch" / "torchrun.sh", "--config", config, "--nproc-per-node", "2", *overrides]
    done = subprocess.run(command, cwd=config.parent, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr


def metrics_of(run: Path) -> list[dict[str, float]]:
    """All metrics but times and the load of the machine."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "system/"))} for line in lines]


@pytest.mark.timeout(900)
def test_two_and_two_steps_are_four_and_the_results_are_whole(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", tied=True)
    config = write_config(tmp_path, model)
    whole, halves = tmp_path / "run", tmp_path / "halves"
    train(config)
    train(config, f"run_dir={halves}", "grpo.max_num_steps=2", "grpo.val_at_end=false")
    train(config, f"run_dir={halves}")

    steps = metrics_of(whole)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert steps == metrics_of(halves)
    for line in steps:
        assert 1.0 <= line["seq_logprob_error_max"] < 1.0001  # float32 on both sides, tied embeddings
        assert 1.0 <= line["refit/logprob_error_max"] < 1.0001
        assert line["grad_norm"] > 0
        assert line["reward/mean"] == pytest.approx(line["reward/length"] + line["reward/last"], rel=1e-6)

    trained, start = load_file(whole / "hf" / "model.safetensors"), load_file(model / "model.safetensors")
    resumed = load_file(halves / "hf" / "model.safetensors")
    assert trained.keys() == resumed.keys() == start.keys()
    assert all(torch.equal(trained[name], resumed[name]) for name in trained)
    assert sum(not torch.equal(trained[name], start[name]) for name in trained) == len(trained)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = AutoModelForCausalLM.from_pretrained(whole / "hf")
    assert torch.equal(exported.model.embed_tokens.weight, trained["model.embed_tokens.weight"])
    assert exported(torch.tensor([[1, 5, 9]])).logits.isfinite().all()
    assert AutoTokenizer.from_pretrained(whole / "hf").eos_token == "<|im_end|>"

    report = (whole / "report.html").read_text()
    assert "http://" not in report
    assert "https://" not in report
    assert "Validation accuracy" in report
    assert list((whole / "tensorboard").glob("events.out.tfevents.*"))
    assert yaml.safe_load((whole / "config.yaml").read_text())["grpo"]["max_num_steps"] == 4
    assert (whole / "checkpoints" / "latest").read_text().strip() == "step_00000004"


@pytest.mark.timeout(500)
def test_packed_experts_train_with_a_real_engine(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", num_experts=4)
    train(
        write_config(tmp_path, model),
        "grpo.max_num_steps=2",
        "grpo.val_at_end=false",
        "policy.parallel.sequence_parallel=true",
        "policy.parallel.expert_model_parallel_size=2",
        "policy.parallel.expert_tensor_parallel_size=1",
        "policy.sequence_packing.enabled=true",
        "policy.sequence_packing.train_mb_tokens=256",
        "policy.sequence_packing.logprob_mb_tokens=256",
    )
    # the engine computes with the experts that it was sent, at every version
    for line in metrics_of(tmp_path / "run"):
        assert line["seq_logprob_error_max"] < 1.0001
        assert line["refit/logprob_error_max"] < 1.0001
        assert line["optimizer_steps_skipped"] == 0
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "run" / "hf"))
    assert before.keys() == after.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    Qwen3MoeForCausalLM.from_pretrained(tmp_path / "run" / "hf")
