"""One answer in every layout: the policy's loss, gradient, metrics and log-probs against one process in float64.

The reference runs each row alone through a one-rank model, takes a plain log-softmax and calls the loss once on the
whole batch: no schedule, no DDP, no fused log-probs, no packing and no micro-batches. ``doctor parallel`` and the
differential test share this module.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from safetensors.torch import save_file
from torch import Tensor

from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn, LossInputs
from megatron_grpo.algorithms.sequence_index import SequenceIndex
from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.config.parallel import ParallelConfig
from megatron_grpo.config.policy import PolicyConfig
from megatron_grpo.models.checkpoint import iter_hf_weights, load_hf_weights
from megatron_grpo.models.hf_directory import HFConfig, HFDirectory
from megatron_grpo.models.registry import describe_model
from megatron_grpo.parallel import platform
from megatron_grpo.parallel.layout import ParallelLayout
from megatron_grpo.parallel.reductions import MetricReducer
from megatron_grpo.policy.experience import Experience
from megatron_grpo.policy.model_builder import build_model_chunks
from megatron_grpo.policy.optimizer import gradient_buffers
from megatron_grpo.policy.policy import MegatronPolicy

VERSION = 2  # of the weights that the batch would be on-policy for
Masks = Literal["all", "single", "holes", "masked", "empty_shard"]


@dataclass(frozen=True)
class BatchSpec:
    """A random batch.

    Attributes:
        rows: of the global batch.
        masks: all: every response token trains. single: every other response is one token long. holes: masked tokens
            inside the responses, with NaN for their recorded log-probs. masked: a row in four must not train, and one
            has no response token. empty_shard: nothing trains in the first half of the rows.
        max_prompt, max_response: lengths are drawn from 1 to these.
    """

    rows: int
    masks: Masks = "all"
    seed: int = 0
    max_prompt: int = 5
    max_response: int = 10


@dataclass(frozen=True)
class Problem:
    """What is computed, whatever the layout. ``policy.parallel`` is not looked at."""

    policy: PolicyConfig
    loss_fn: ClippedPGLossConfig
    temperature: float
    batch: BatchSpec


@dataclass(frozen=True)
class Answer:
    """What is compared.

    Attributes:
        metrics: of the loss, reduced over all ranks; ``loss`` is one of them.
        gradients: full tensors by Hugging Face name; empty but on a replica's leader.
        logprobs: [B, S], zero but at response tokens.
    """

    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    logprobs: Tensor


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of one kind, and what has it."""

    error: float
    name: str

    def __str__(self) -> str:
        return f"{self.error:.1e} {self.name}"


def as_float64(policy: PolicyConfig) -> PolicyConfig:
    """``policy`` with the local layers in float64, which Megatron's distributed optimizer does not know."""
    optimizer = policy.optimizer.model_copy(update={"use_distributed_optimizer": False})
    return policy.model_copy(update={"precision": "fp64", "layer_spec": "local", "optimizer": optimizer})


def write_random_model(directory: Path, hf_config: HFConfig, seed: int = 0) -> Path:
    """A model of this ``config.json`` with random weights, which float32 holds exactly; without a tokenizer."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in describe_model(hf_config).hf_shapes().items():
        noise = torch.randn(shape, generator=generator)
        # norms that are not 1; larger matrices would cost float32 the digits that are compared
        weights[name] = 1 + 0.2 * noise if len(shape) == 1 else 0.7 / math.sqrt(shape[-1]) * noise
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(dict(hf_config)))
    return directory


# ---- the reference


def solve(problem: Problem, layout: ParallelLayout) -> tuple[Experience, Answer]:
    """The batch and its answer, in one process and float64. ``layout`` is of one rank."""
    if layout.world_size != 1:
        raise ValueError(f"the reference runs in a world of one rank, not of {layout.world_size}")
    directory = HFDirectory(problem.policy.model_path, tokenizer=False)
    alone = {"parallel": ParallelConfig(), "recompute_granularity": None}
    model = build_model_chunks(as_float64(problem.policy).model_copy(update=alone), directory, layout)
    load_hf_weights(model, directory, layout)
    vocab = directory.config["vocab_size"]
    batch = _prompts_and_responses(problem.batch, vocab)
    logprobs = _row_by_row(model[0], batch, vocab, problem.temperature)  # [B, S]
    batch = _with_recorded_logprobs(batch, logprobs.detach(), problem.batch)
    output = ClippedPGLossFn(problem.loss_fn)(logprobs.flatten(), _whole_batch(batch))
    if not output.num_tokens:
        raise ValueError(
            f"nothing trains in {problem.batch}: there would be no gradient to compare; use more rows"
        )
    # router losses are attached to the model's graph, as sums over tokens, and divided with the loss
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=platform.device()))
    torch.autograd.backward(output.loss_sum)
    gradients = {}
    with _gradients_as_weights(model, "grad"):
        for name, gradient in iter_hf_weights(model, directory, layout):
            assert gradient is not None  # one rank is its own leader
            gradients[name] = gradient / output.num_tokens
    metrics = {name: metric.value() for name, metric in output.metrics.items()}
    answer = Answer(
        {name: value for name, value in metrics.items() if value is not None},
        gradients,
        torch.where(batch.token_mask > 0, logprobs.detach(), 0.0).cpu(),
    )
    return batch, answer


def _row_by_row(model: GPTModel, batch: Experience, vocab: int, temperature: float) -> Tensor:
    """[B, S] log-prob of each token given those before it; entry 0 is zero."""
    counts = batch.token_mask * batch.sample_mask[:, None]
    padding = (torch.cat([counts[:, 1:], torch.zeros(len(batch), 1)], 1) == 0).to(platform.device())
    with_router_losses = model.config.moe_aux_loss_coeff or model.config.moe_z_loss_coeff
    rows = []
    for row, mask in zip(batch.tokens.to(platform.device()), padding, strict=True):
        positions = torch.arange(len(row), device=row.device)
        extra = {"padding_mask": mask[None]} if with_router_losses else {}
        logits = model(row[None], positions[None], None, **extra)[0, :-1, :vocab]  # [S - 1, vocab]
        logprobs = torch.log_softmax(logits / temperature, -1).gather(1, row[1:, None]).squeeze(1)
        rows.append(torch.cat([logprobs.new_zeros(1), logprobs]))
    return torch.stack(rows)


def _whole_batch(batch: Experience) -> LossInputs:
    def flat(x: Tensor | None) -> Tensor:
        assert x is not None
        return x.to(platform.device()).flatten()

    rows = torch.arange(len(batch))[:, None].expand_as(batch.tokens)
    return LossInputs(
        prev_logprobs=flat(batch.prev_logprobs),
        generation_logprobs=flat(batch.generation_logprobs),
        reference_policy_logprobs=flat(batch.reference_policy_logprobs),
        advantages=flat(batch.advantages),
        token_mask=flat(batch.token_mask),
        staleness=VERSION - flat(batch.weight_versions),
        sequences=SequenceIndex(flat(rows), len(batch), batch.sample_mask.to(platform.device())),
    )


# ---- the batch


def _prompts_and_responses(spec: BatchSpec, vocab: int) -> Experience:
    """Tokens, masks and advantages; no log-probs yet."""
    generator = torch.Generator().manual_seed(spec.seed)
    prompts = torch.randint(1, spec.max_prompt + 1, (spec.rows,), generator=generator)
    responses = torch.randint(1, spec.max_response + 1, (spec.rows,), generator=generator)
    if spec.masks == "single":
        responses[::2] = 1
    if spec.masks == "masked":
        responses[-1] = 0
    shape = (spec.rows, int((prompts + responses).max()))
    column = torch.arange(shape[1])
    mask = (column >= prompts[:, None]) & (column < (prompts + responses)[:, None])
    sample_mask = torch.ones(spec.rows)
    if spec.masks == "holes":
        mask &= torch.rand(shape, generator=generator) > 0.4
    elif spec.masks == "masked":
        sample_mask[::4] = 0
    elif spec.masks == "empty_shard":
        mask[: spec.rows // 4] = False
        sample_mask[spec.rows // 4 : spec.rows // 2] = 0
    mask[-2, prompts[-2]] = True  # something always trains
    return Experience(
        tokens=torch.randint(0, vocab, shape, generator=generator),
        token_mask=mask.float(),
        sample_mask=sample_mask,
        generation_logprobs=torch.zeros(shape),
        weight_versions=torch.randint(0, VERSION + 1, shape, generator=generator),
        group_ids=torch.arange(spec.rows) // 2,
        rewards=torch.zeros(spec.rows, dtype=torch.float64),
        truncated=torch.zeros(spec.rows),
        advantages=_rounded(torch.randn(shape, generator=generator) + 0.2),
    )


def _with_recorded_logprobs(batch: Experience, current: Tensor, spec: BatchSpec) -> Experience:
    """Other policies' log-probs, far enough from the current ones that every bound of the loss bites.

    Not farther: large weights on terms that cancel would cost float32 the digits that are compared.
    """
    generator = torch.Generator().manual_seed(spec.seed + 1)
    current = current.cpu()

    def near(x: Tensor, scale: float) -> Tensor:
        jump = torch.where(torch.rand(x.shape, generator=generator) < 0.1, 1.0, 0.0)
        noise = torch.randn(x.shape, generator=generator)
        return _rounded(x + scale * noise + jump * noise.sign())

    previous = near(current, 0.3)
    garbage = torch.nan if spec.masks == "holes" else 0.0

    def recorded(x: Tensor) -> Tensor:
        return torch.where(batch.token_mask > 0, x, garbage)

    return replace(
        batch,
        prev_logprobs=recorded(previous),
        generation_logprobs=recorded(near(previous, 0.2)),
        reference_policy_logprobs=recorded(near(current, 0.5)),
    )


def _rounded(x: Tensor) -> Tensor:
    """float64 values that float32 holds exactly, so that both precisions get the same batch."""
    return x.float().double()


# ---- the layout under test


def answer_in_layout(
    policy: MegatronPolicy, problem: Problem, batch: Experience, dealt: Sequence[Sequence[int]] | None = None
) -> Answer:
    """The answer of ``policy``'s own train path and log-probs. Collective over all ranks.

    Args:
        batch: the global batch, the same on all ranks.
        dealt: rows of each data-parallel rank; by default equally many to each, in order.
    """
    layout = policy.layout
    per_rank = len(batch) // layout.dp
    rows = torch.tensor(
        dealt[layout.dp_rank]
        if dealt is not None
        else range(layout.dp_rank * per_rank, (layout.dp_rank + 1) * per_rank),
        dtype=torch.int64,
    )
    width = batch.tokens.size(1)
    mine = _padded(_rows(batch, rows), policy.config.parallel.sequence_multiple)
    logprobs = batch.tokens.new_zeros(batch.tokens.shape, dtype=torch.float64)
    logprobs[rows] = policy.logprobs(mine)[:, :width].double().cpu()
    metrics = policy.accumulate_gradients(mine, ClippedPGLossFn(problem.loss_fn), VERSION)
    _gather_distributed_gradients(policy)
    with _gradients_as_weights(policy.model, "main_grad"):
        gradients = {name: g.double() for name, g in policy.weights() if g is not None}
    shared = logprobs.to(platform.device())
    dist.all_reduce(shared, group=layout.dp_group)
    return Answer(MetricReducer(layout).reduce(metrics), gradients, shared.cpu())


def _rows(batch: Experience, rows: Tensor) -> Experience:
    tensors: dict[str, Any] = {name: x[rows] for name, x in vars(batch).items() if torch.is_tensor(x)}
    return replace(batch, **tensors)


def _padded(batch: Experience, multiple: int) -> Experience:
    """With a multiple of ``multiple`` columns."""
    more = -batch.tokens.size(1) % multiple
    wide: dict[str, Any] = {
        name: torch.nn.functional.pad(x, (0, more))
        for name, x in vars(batch).items()
        if torch.is_tensor(x) and x.dim() == 2
    }
    return replace(batch, **wide)


@contextmanager
def _gradients_as_weights(chunks: Sequence[torch.nn.Module], attribute: str) -> Iterator[None]:
    """Inside, the parameters hold their gradients: what exports the weights exports these."""
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    weights = [p.data for p in parameters]
    try:
        for p in parameters:
            gradient = getattr(p, attribute)
            p.data = torch.zeros_like(p) if gradient is None else gradient
        yield
    finally:
        for p, weight in zip(parameters, weights, strict=True):
            p.data = weight


def _gather_distributed_gradients(policy: MegatronPolicy) -> None:
    """The distributed optimizer leaves each data-parallel rank with the sum of its part only."""
    if not policy.config.optimizer.use_distributed_optimizer:
        return
    for buffer in (buffer for chunk in policy.chunks for buffer in gradient_buffers(chunk)):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            part = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, part, group=group)


# ---- the comparison


def differences(answer: Answer, expected: Answer, *, smallest_gradient: float = 0.0) -> dict[str, Difference]:
    """The worst metric, gradient and log-prob of ``answer``; gradients are judged where ``answer`` has them.

    A difference is relative to the largest absolute value of the expected tensor, or to the expected metric (to 0.1 if
    that is smaller: terms of about 1 may cancel). It is infinite for a name that only one side has.

    Args:
        smallest_gradient: of the largest gradient of all, what a difference is relative to in a tensor whose own are
            smaller. What float32 rounds off is relative to the gradients that flow through the model.
    """
    worst = {"metrics": _worst(_scalars(answer.metrics), _scalars(expected.metrics), 0.1)}
    worst["logprobs"] = _worst({"logprobs": answer.logprobs}, {"logprobs": expected.logprobs})
    if answer.gradients:
        largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
        worst["gradients"] = _worst(answer.gradients, expected.gradients, smallest_gradient * largest)
    return worst


def _scalars(metrics: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}


def _worst(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], smallest_scale: float = 0.0
) -> Difference:
    missing = sorted(got.keys() ^ expected.keys())
    if missing:
        return Difference(math.inf, f"{missing[0]} (on one side only)")
    found = (_difference(name, got[name], expected[name], smallest_scale) for name in expected)
    return max(found, key=lambda d: d.error)


def _difference(name: str, got: Tensor, expected: Tensor, smallest_scale: float) -> Difference:
    if got.shape != expected.shape:
        return Difference(math.inf, f"{name} (shape {list(got.shape)}, expected {list(expected.shape)})")
    scale = max(expected.abs().max().item(), smallest_scale, 1e-12)
    error = (got.cpu() - expected.cpu()).abs().max().item() / scale
    return Difference(error if math.isfinite(error) else math.inf, name)
