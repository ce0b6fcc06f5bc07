"""The policy on a GPU: Transformer Engine spec when it is installed, NCCL, fused Adam. Skipped without CUDA.

Run with  torchrun --nproc-per-node 1 -m pytest tests/gpu
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def layout() -> Iterator[Any]:
    import torch.distributed as dist

    from megatron_grpo.parallel.layout import initialize_layout

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    yield initialize_layout()
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-3), ("bf16", 0.05)])
def test_logprobs_equal_transformers_and_a_step_lowers_the_loss(
    layout: Any, tmp_path: Path, precision: str, tolerance: float
) -> None:
    from transformers import AutoModelForCausalLM

    from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn
    from megatron_grpo.policy.experience import Experience
    from megatron_grpo.policy.policy import MegatronPolicy
    from tests.recorded_training import run_config
    from tests.tiny_model import write_tiny_model

    model = write_tiny_model(tmp_path / "model")
    config = run_config(model, tmp_path, 1)
    optimizer = config.policy.optimizer.model_copy(update={"lr": 1e-4})  # more would overshoot in one step
    policy_config = config.policy.model_copy(update={"precision": precision, "optimizer": optimizer})
    policy = MegatronPolicy(
        policy_config, layout, temperature=1.0, total_optimizer_steps=4, with_reference=False
    )
    tokens = torch.randint(0, 320, (4, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(4, 24)
    mask[:, 8:20] = 1
    zeros = torch.zeros(4, 24)
    batch = Experience(
        tokens, mask, torch.ones(4), zeros, zeros.long(), torch.arange(4), zeros[:, 0].double(), zeros[:, 0]
    )
    got = policy.logprobs(batch).cpu()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(tokens).logits
    want = torch.zeros(4, 24)
    want[:, 1:] = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    assert ((got - want) * mask).abs().max() < tolerance

    batch.prev_logprobs = batch.generation_logprobs = got
    batch.advantages = mask.clone()
    loss_fn = ClippedPGLossFn(config.loss_fn.model_copy(update={"reference_policy_kl_penalty": 0.0}))
    assert policy.train_step(batch, loss_fn, version=0).grad_norm > 0
    after = policy.logprobs(batch).cpu()
    assert (after * mask).sum() > (got * mask).sum()  # advantage 1: the sampled tokens became likelier
