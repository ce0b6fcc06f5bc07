"""Random batches for tests of the loss, whole or cut into micro-batches and context parallel shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn, LossInputs, LossOutput
from megatron_grpo.algorithms.sequence_index import SequenceIndex
from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.policy.packing import local_tokens

Batch = dict[str, Tensor]

VARIANTS: dict[str, dict[str, object]] = {
    "grpo": {"reference_policy_kl_penalty": 0.1},
    "dual clip": {"ratio_clip_c": 1.3},
    "sequence mean": {"token_level_loss": False, "reference_policy_kl_type": "k2"},
    "gspo tis": {
        "token_level_loss": False, "sequence_level_importance_ratios": True, "ratio_clip_min": 0.05,
        "use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.05,
    },
    "seq-mask-tis": {
        "token_level_loss": False, "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_ratio_min": 0.9,
    },
    "cispo icepop async": {
        "use_cispo": True, "use_importance_sampling_correction": True, "use_on_policy_kl_approximation": True,
        "truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 1.3,
        "truncated_importance_sampling_ratio_min": 0.7,
    },
    "on policy gspo": {
        "force_on_policy_ratio": True, "token_level_loss": False, "sequence_level_importance_ratios": True,
    },
    "reinforce": {"disable_ppo_ratio": True},
}  # fmt: skip


def random_batch(rows: int = 8, width: int = 16, seed: int = 0) -> Batch:
    """``[rows, width]`` float64 tensors with responses of different lengths; row 1 has one token, row 2 none."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    generation = -normal(rows, width).abs() - 0.05
    prev = generation + 0.1 * normal(rows, width)
    mask = torch.zeros(rows, width, dtype=torch.float64)
    for row in range(rows):
        mask[row, 2 : 3 + int(torch.randint(1, width - 3, (1,), generator=generator))] = 1
    mask[1:3] = 0
    mask[1, 3] = 1
    sample_mask = torch.ones(rows, dtype=torch.float64)
    sample_mask[rows - 1] = 0
    return {
        "curr": prev + 0.3 * normal(rows, width),
        "prev": prev,
        "generation": generation,
        "reference": prev + 0.5 * normal(rows, width),
        "advantages": normal(rows, 1).expand(rows, width).clone(),
        "staleness": torch.randint(0, 4, (rows, width), generator=generator).double(),
        "token_mask": mask,
        "sample_mask": sample_mask,
    }


def micro_batch_loss(
    config: ClippedPGLossConfig,
    batch: Batch,
    rows: Sequence[int] | None = None,
    cp_group: ProcessGroup | None = None,
) -> LossOutput:
    """The loss of some rows (default: all) of ``batch``, on this rank's context parallel shard of them."""
    chosen = list(range(len(batch["curr"]))) if rows is None else list(rows)
    cp_rank, cp_size = (cp_group.rank(), cp_group.size()) if cp_group else (0, 1)

    def shard(name: str) -> Tensor:
        whole = batch[name][chosen]
        return whole[:, local_tokens([whole.size(1)], cp_rank, cp_size)[1]]

    width = shard("curr").size(1)
    sequences = SequenceIndex(
        torch.arange(len(chosen)).repeat_interleave(width),
        len(chosen),
        batch["sample_mask"][chosen],
        cp_group,
    )
    inputs = LossInputs(
        prev_logprobs=shard("prev").flatten(),
        generation_logprobs=shard("generation").flatten(),
        reference_policy_logprobs=shard("reference").flatten(),
        advantages=shard("advantages").flatten(),
        token_mask=shard("token_mask").flatten(),
        staleness=shard("staleness").flatten(),
        sequences=sequences,
    )
    return ClippedPGLossFn(config)(shard("curr").flatten(), inputs)


def loss_and_gradient(
    config: ClippedPGLossConfig, batch: Batch, cuts: Sequence[Sequence[int]] | None = None
) -> tuple[Tensor, Tensor, list[LossOutput]]:
    """Loss, gradient ``[rows, width]`` and outputs of ``batch`` cut into micro-batches, as Megatron sums them."""
    curr = batch["curr"].detach().clone().requires_grad_()
    outputs = [micro_batch_loss(config, {**batch, "curr": curr}, rows) for rows in (cuts or [None])]
    loss = sum(o.loss_sum for o in outputs) / sum(o.num_tokens for o in outputs)
    (gradient,) = torch.autograd.grad(loss, curr)
    return loss.detach(), gradient, outputs
