"""``MegatronPolicy``: the trained model - log-probs, one optimizer step, its weights.

The forward step hands Megatron's pipeline schedules ``(loss_sum, num_tokens, metrics)``. The schedules sum
over micro-batches, ``finalize_model_grads`` over DP x CP, and divides once by the summed token count: that
quotient is the loss of ``SEMANTICS``, for every layout and every cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn, LossInputs
from megatron_grpo.algorithms.sequence_index import SequenceIndex
from megatron_grpo.config import PolicyConfig
from megatron_grpo.models.checkpoint import iter_hf_weights, load_hf_weights
from megatron_grpo.models.hf_directory import HFDirectory
from megatron_grpo.parallel import platform
from megatron_grpo.parallel.collectives import gather_from_context_parallel, split_for_context_parallel
from megatron_grpo.parallel.fused_logprobs import TokenTargets, output_layer_logprobs
from megatron_grpo.parallel.layout import ParallelLayout
from megatron_grpo.parallel.reductions import MetricReducer, Metrics
from megatron_grpo.policy.experience import Experience
from megatron_grpo.policy.model_builder import build_model_chunks
from megatron_grpo.policy.optimizer import (
    build_optimizer,
    check_loss_contract,
    require_finite_gradients,
    wrap_ddp,
)
from megatron_grpo.policy.reference import ReferenceWeights


def sequence_multiple(layout: ParallelLayout, sequence_parallel: bool) -> int:
    """[B, S] batches must have S a multiple of this: 2 x CP chunks, and TP equal parts under SP."""
    return (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if sequence_parallel else 1)


@dataclass(frozen=True)
class TrainStep:
    """What one optimizer step gives.

    Attributes:
        metrics: of the loss, this rank's part; empty but on the last pipeline stage.
        grad_norm: of the whole gradient before clipping.
        lr: learning rate of this step.
    """

    metrics: Metrics
    grad_norm: float
    lr: float


class MegatronPolicy:
    """The policy on this rank. Every method is collective over all ranks."""

    def __init__(
        self,
        config: PolicyConfig,
        layout: ParallelLayout,
        *,
        temperature: float,
        total_optimizer_steps: int,
        with_reference: bool,
    ) -> None:
        """Build the model, load its weights from ``config.model_path``, wrap it and build the optimizer.

        Args:
            temperature: sampling temperature; divides the logits of every log-prob.
            with_reference: keep a host copy of the loaded weights as the reference policy.
        """
        self.config, self.layout, self.temperature = config, layout, temperature
        self.directory = HFDirectory(config.model_path)
        self.model = build_model_chunks(config, self.directory, layout)
        load_hf_weights(self.model, self.directory, layout)
        self.transformer_config = self.model[0].config
        self.vocab_size: int = self.directory.config["vocab_size"]
        self.chunks = wrap_ddp(self.model, self.transformer_config, config)
        self.optimizer, self.scheduler = build_optimizer(
            self.chunks, self.transformer_config, config, total_optimizer_steps
        )
        check_loss_contract(self.chunks)
        self._reference = ReferenceWeights(self.model) if with_reference else None

    # ---- log-probs

    @torch.no_grad()
    def logprobs(
        self, batch: Experience, temperature: float | None = None, micro_batch_size: int | None = None
    ) -> Tensor:
        """Log-probs of the response tokens under the current weights: [B, S], zero elsewhere, on every rank.

        Args:
            temperature: instead of the sampling temperature.
            micro_batch_size: instead of the configured one.
        """

        for chunk in self.chunks:
            chunk.eval()
        results = self._run_schedule(
            batch,
            micro_batch_size or self.config.forward_batch_size,
            lambda _, logprobs: logprobs,
            forward_only=True,
            temperature=temperature,
        )
        for chunk in self.chunks:
            chunk.train()
        if self.layout.is_last_stage:
            shifted = gather_from_context_parallel(torch.cat(results), self.layout.cp_group, dim=1)  # [B, S]
        else:
            shifted = torch.empty(batch.tokens.shape, dtype=torch.float32, device=platform.device())
        if self.layout.pp > 1:
            dist.broadcast(shifted, group=self.layout.pp_group, group_src=self.layout.pp - 1)
        logprobs = torch.zeros_like(shifted)
        logprobs[:, 1:] = shifted[:, :-1]
        return logprobs

    def reference_logprobs(self, batch: Experience) -> Tensor:
        """As :meth:`logprobs`, under the weights that the run started from."""
        if self._reference is None:
            raise ValueError("this policy was built without reference weights (with_reference=False)")
        with self._reference.swapped_in():
            return self.logprobs(batch)

    # ---- training

    def train_step(self, minibatch: Experience, loss_fn: ClippedPGLossFn, version: int) -> TrainStep:
        """One optimizer step on ``minibatch`` (this data-parallel rank's rows of it).

        Args:
            version: version of the weights that the step's rollouts would be on-policy for.

        Raises:
            NonFiniteGradientError: on every rank, before any weight changes.
        """

        def loss(microbatch: Experience, logprobs: Tensor) -> tuple[Tensor, Tensor, Metrics]:
            output = loss_fn(logprobs.flatten(), self._loss_inputs(microbatch, version))
            return output.loss_sum, output.num_tokens, output.metrics

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = self._run_schedule(minibatch, self.config.train_micro_batch_size, loss, forward_only=False)
        require_finite_gradients(self.chunks, f"optimizer step {self.scheduler.num_steps}")
        self.scheduler.step(1)  # before the step: the first update of a warm-up already learns
        _, grad_norm, _ = self.optimizer.step()
        return TrainStep(
            MetricReducer.merge(outputs), float(grad_norm), float(self.optimizer.param_groups[0]["lr"])
        )

    def weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Full tensors under their Hugging Face names, one at a time, on each replica's leader; elsewhere None."""
        return iter_hf_weights(self.model, self.directory, self.layout)

    # ---- micro-batches through Megatron's schedules

    def _run_schedule(
        self,
        batch: Experience,
        size: int,
        on_logprobs: Callable[[Experience, Tensor], Any],
        *,
        forward_only: bool,
        temperature: float | None = None,
    ) -> list[Any]:
        """Run micro-batches through the pipeline.

        The last stage turns hidden states into log-probs [b, S / cp] of each column's next token, without ever
        holding the logits, and only where the token mask is set.

        Returns:
            What ``on_logprobs`` gave for each micro-batch, on the last stage.
        """
        microbatches = batch.microbatches(size)

        def forward_step(iterator: Iterator[Experience], model: torch.nn.Module) -> tuple[Tensor, Any]:
            microbatch = next(iterator)
            tokens = self._local(microbatch.tokens)
            positions = torch.arange(batch.tokens.size(1), device=tokens.device).expand_as(microbatch.tokens)
            targets = TokenTargets(
                self._local_targets(microbatch.tokens),
                self._local_targets(microbatch.token_mask),
                self.temperature if temperature is None else temperature,
                self.vocab_size,
            )
            output = model(
                tokens,
                self._local(positions),
                None,
                output_processor=output_layer_logprobs,
                output_processor_context=targets,
            )

            def finish(logprobs: Tensor, non_loss_data: bool = False) -> Any:
                return on_logprobs(microbatch, logprobs)

            return output, finish

        iterators = [iter(microbatches) for _ in self.chunks]
        single = len(self.chunks) == 1
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators[0] if single else iterators,
            model=self.chunks[0] if single else self.chunks,
            num_microbatches=len(microbatches),
            seq_length=batch.tokens.size(1),
            micro_batch_size=len(microbatches[0]),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results

    def _local(self, x: Tensor) -> Tensor:
        """This context-parallel rank's columns of a [b, S] tensor, on the device."""
        x = x.to(platform.device(), non_blocking=True)
        return split_for_context_parallel(x, self.layout.cp_rank, self.layout.cp, dim=1)

    def _local_targets(self, x: Tensor) -> Tensor:
        """Column t moves to column t - 1, where the logits that predict it are; then the context-parallel split.

        Shifting before the split keeps the token at each chunk boundary.
        """
        return self._local(torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1))

    def _loss_inputs(self, mb: Experience, version: int) -> LossInputs:
        if mb.advantages is None:
            raise ValueError("the experience has no advantages; run the advantage estimator first")

        def flat(x: Tensor | None) -> Tensor | None:
            return None if x is None else self._local_targets(x).flatten()

        rows = torch.arange(len(mb))[:, None].expand_as(mb.tokens)
        return LossInputs(
            prev_logprobs=flat(mb.prev_logprobs),
            generation_logprobs=self._local_targets(mb.generation_logprobs).flatten(),
            reference_policy_logprobs=flat(mb.reference_policy_logprobs),
            advantages=self._local_targets(mb.advantages).flatten(),
            token_mask=self._local_targets(mb.token_mask).flatten(),
            staleness=self._local_targets(version - mb.weight_versions).flatten(),
            sequences=SequenceIndex(
                index=self._local(rows).flatten(),
                num_sequences=len(mb),
                sample_mask=mb.sample_mask.to(platform.device()),
                cp_group=self.layout.cp_group if self.layout.cp > 1 else None,
            ),
        )
