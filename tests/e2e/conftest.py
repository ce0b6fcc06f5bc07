"""Real vLLM servers for the end-to-end tests. A start takes half a minute, so they are shared."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from megatron_grpo.config.generation import VLLMConfig
from megatron_grpo.refit.transaction import Refit
from megatron_grpo.rollout.client import EngineClient
from megatron_grpo.rollout.engine_process import EngineProcess
from megatron_grpo.rollout.event_loop import EventLoopThread
from tests.tiny_model import write_tiny_model

T = TypeVar("T")

VLLM = VLLMConfig(dtype="float32", max_num_seqs=64, startup_timeout_s=280, request_timeout_s=60)


@dataclass
class Served:
    """A running engine, the weights on its disk and ways to call it from synchronous tests."""

    process: EngineProcess
    client: EngineClient
    refit: Refit
    loop: EventLoopThread
    weights: dict[str, torch.Tensor]
    model_dir: Path

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(coroutine, timeout_s=120, what="the test's request")

    def reference_distribution(
        self, weights: dict[str, torch.Tensor], token_ids: list[int], temperature: float = 1.0
    ) -> torch.Tensor:
        """Hugging Face's float32 forward: log-probs of every token at each position, [len, vocab]."""
        model = Qwen3ForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()
        model.load_state_dict(weights, strict=not model.config.tie_word_embeddings)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([token_ids])).logits[0]
        return (logits.double() / temperature).log_softmax(-1)

    def reference_logprobs(
        self, weights: dict[str, torch.Tensor], token_ids: list[int], temperature: float = 1.0
    ) -> torch.Tensor:
        """Of each token but the first given those before it, [len - 1]."""
        distribution = self.reference_distribution(weights, token_ids, temperature)[:-1]
        return distribution.gather(-1, torch.tensor(token_ids)[1:, None])[:, 0].float()


Serve = Callable[[bool], Served]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """``serve(tied)`` returns the session's engine for the untied or tied tiny model; starts it on first use."""
    running: dict[bool, Served] = {}
    loop = EventLoopThread()

    def start(tied: bool) -> Served:
        if tied not in running:
            name = "tied" if tied else "untied"
            directory = tmp_path_factory.mktemp(name)
            model_dir = write_tiny_model(directory / "model", tied=tied)
            process = EngineProcess(name, model_dir, directory, VLLM, max_model_len=256, seed=1)
            process.start()
            try:
                process.wait_ready()
            except BaseException:
                process.stop()
                raise
            client = process.client()
            refit = Refit([client], loop, process.private_dir, bucket_bytes=256 * 1024)
            weights = load_file(model_dir / "model.safetensors")
            running[tied] = Served(process, client, refit, loop, weights, model_dir)
        return running[tied]

    yield start
    for served in running.values():
        served.run(served.client.close())
        served.process.stop()
    loop.close()
