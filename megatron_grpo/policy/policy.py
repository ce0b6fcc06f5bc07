"""``MegatronPolicy``: the trained model - log-probs, one optimizer step, its weights.

The forward step hands Megatron's pipeline schedules ``(loss_sum, num_tokens, metrics)``. The schedules sum
over micro-batches, ``finalize_model_grads`` over DP x CP, and divides once by the summed token count: that
quotient is the loss of ``SEMANTICS``, for every layout and every cut into micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn, LossInputs
from megatron_grpo.algorithms.sequence_index import SequenceIndex
from megatron_grpo.config import PolicyConfig
from megatron_grpo.models.checkpoint import iter_hf_weights, load_hf_weights
from megatron_grpo.models.hf_directory import HFDirectory
from megatron_grpo.parallel import platform
from megatron_grpo.parallel.fused_logprobs import TokenTargets, output_layer_logprobs
from megatron_grpo.parallel.layout import ParallelLayout
from megatron_grpo.parallel.reductions import MetricReducer, Metrics
from megatron_grpo.policy.experience import Experience, MicroBatch
from megatron_grpo.policy.model_builder import build_model_chunks
from megatron_grpo.policy.optimizer import (
    build_optimizer,
    check_loss_contract,
    require_finite_gradients,
    wrap_ddp,
)
from megatron_grpo.policy.packing import MicroBatchRule, logprob_rule, pack, train_rule
from megatron_grpo.policy.reference import ReferenceWeights


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
        self.directory = HFDirectory(config.model_path, tokenizer=False)
        self.model = build_model_chunks(config, self.directory, layout)
        load_hf_weights(self.model, self.directory, layout)
        self.transformer_config = self.model[0].config
        self.vocab_size: int = self.directory.config["vocab_size"]
        self.chunks = wrap_ddp(self.model, self.transformer_config, config)
        self.optimizer, self.scheduler = build_optimizer(
            self.chunks, self.transformer_config, config, total_optimizer_steps
        )
        check_loss_contract(self.chunks)
        self._train_rule, self._logprob_rule = train_rule(config, layout), logprob_rule(config, layout)
        self._reference = ReferenceWeights(self.model) if with_reference else None

    # ---- log-probs

    @torch.no_grad()
    def logprobs(
        self, batch: Experience, temperature: float | None = None, micro_batch_size: int | None = None
    ) -> Tensor:
        """Log-probs of the response tokens under the current weights: [B, S], zero elsewhere, on every rank.

        Args:
            temperature: instead of the sampling temperature.
            micro_batch_size: rows of a padded micro-batch, instead of the configured number.
        """
        rule = replace(self._logprob_rule, rows=micro_batch_size or self._logprob_rule.rows)
        microbatches = self._cut(batch, rule)
        for chunk in self.chunks:
            chunk.eval()
        try:
            results = self._run_schedule(
                microbatches, lambda _, logprobs: logprobs, forward_only=True, temperature=temperature
            )
        finally:
            for chunk in self.chunks:
                chunk.train()
        dtype = torch.promote_types(self.transformer_config.params_dtype, torch.float32)
        shifted = torch.zeros(batch.tokens.shape, dtype=dtype, device=platform.device())
        if self.layout.is_last_stage:
            for microbatch, result in zip(microbatches, results, strict=True):
                microbatch.put(result, shifted)
            if self.layout.cp > 1:
                dist.all_reduce(shifted, group=self.layout.cp_group)
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
        metrics = self.accumulate_gradients(minibatch, loss_fn, version)
        require_finite_gradients(self.chunks, f"optimizer step {self.scheduler.num_steps}")
        self.scheduler.step(1)  # before the step: the first update of a warm-up already learns
        _, grad_norm, _ = self.optimizer.step()
        return TrainStep(metrics, float(grad_norm), float(self.optimizer.param_groups[0]["lr"]))

    def accumulate_gradients(self, minibatch: Experience, loss_fn: ClippedPGLossFn, version: int) -> Metrics:
        """The gradient of the loss of ``minibatch`` in Megatron's buffers: all of :meth:`train_step` but the step.

        Returns:
            The metrics of the loss, this rank's part; empty but on the last pipeline stage.
        """

        def loss(microbatch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, Tensor, Metrics]:
            output = loss_fn(logprobs.flatten(), self._loss_inputs(microbatch, version))
            return output.loss_sum, output.num_tokens, output.metrics

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        microbatches = self._cut(minibatch, self._train_rule, minibatch.microbatch_sizes)
        outputs = self._run_schedule(microbatches, loss, forward_only=False)
        return MetricReducer.merge(outputs)

    def weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Full tensors under their Hugging Face names, one at a time, on each replica's leader; elsewhere None."""
        return iter_hf_weights(self.model, self.directory, self.layout)

    # ---- micro-batches through Megatron's schedules

    def _cut(
        self, batch: Experience, rule: MicroBatchRule, planned: Sequence[Sequence[int]] | None = None
    ) -> list[MicroBatch]:
        """The micro-batches of one pass: of the sizes ``planned`` for its one step, otherwise as the rule says.

        Collective over data parallelism when it packs: all ranks run equally many.
        """
        bins: list[Sequence[int]]
        if planned is not None:
            (sizes,) = planned
            ends = itertools.accumulate(sizes)
            bins = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        elif rule.tokens is None:
            rows = range(len(batch))
            bins = [rows[start : start + rule.rows] for start in range(0, len(batch), rule.rows)]
        else:
            bins = [*pack(rule.padded(batch.lengths.numpy()), rule)]
            count = torch.tensor(len(bins), device=platform.device())
            dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.layout.dp_group)
            bins += [()] * (int(count) - len(bins))
        return [MicroBatch.of(batch, rows, rule, self.layout.cp_rank, self.layout.cp) for rows in bins]

    def _run_schedule(
        self,
        microbatches: Sequence[MicroBatch],
        on_logprobs: Callable[[MicroBatch, Tensor], Any],
        *,
        forward_only: bool,
        temperature: float | None = None,
    ) -> list[Any]:
        """Run micro-batches through the pipeline.

        The last stage turns hidden states into log-probs [b, s] of each column's next token, without ever holding
        the logits, and only where the token mask is set.

        Returns:
            What ``on_logprobs`` gave for each micro-batch, on the last stage.
        """

        def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
            microbatch = next(iterator)
            batch = microbatch.experience
            targets = TokenTargets(
                _on_device(microbatch.take_next(batch.tokens)),
                _on_device(microbatch.take_next(batch.token_mask)),
                self.temperature if temperature is None else temperature,
                self.vocab_size,
            )
            output = model(
                _on_device(microbatch.take(batch.tokens)),
                _on_device(microbatch.position),
                None,
                packed_seq_params=_packed_seq_params(microbatch),
                padding_mask=None if forward_only else self._router_padding_mask(microbatch, model),
                output_processor=output_layer_logprobs,
                output_processor_context=targets,
            )

            def finish(logprobs: Tensor, non_loss_data: bool = False) -> Any:
                return on_logprobs(microbatch, logprobs)

            return output, finish

        iterators = [iter(microbatches) for _ in self.chunks]
        single = len(self.chunks) == 1
        columns = microbatches[0].position  # all padded ones have this shape; packed ones tell theirs
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators[0] if single else iterators,
            model=self.chunks[0] if single else self.chunks,
            num_microbatches=len(microbatches),
            seq_length=columns.size(1) * self.layout.cp,
            micro_batch_size=columns.size(0),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results

    def _router_padding_mask(self, microbatch: MicroBatch, chunk: torch.nn.Module) -> Tensor | None:
        """[b, s] bool, true on tokens without a loss: the router's auxiliary losses are means over the others."""
        if not (self.config.moe_aux_loss_coeff or self.config.moe_z_loss_coeff):
            return None
        batch = microbatch.experience
        mask = _on_device(microbatch.take_next(batch.token_mask * batch.sample_mask[:, None])) == 0
        if self.config.parallel.sequence_parallel and not get_attr_wrapped_model(chunk, "pre_process"):
            # Megatron cuts it on the first stage only
            mask = mask.chunk(self.layout.tp, dim=1)[self.layout.tp_rank]
        return mask

    def _loss_inputs(self, mb: MicroBatch, version: int) -> LossInputs:
        batch = mb.experience
        if batch.advantages is None:
            raise ValueError("the experience has no advantages; run the advantage estimator first")

        def flat(x: Tensor) -> Tensor:
            return _on_device(mb.take_next(x)).flatten()

        prev, reference = batch.prev_logprobs, batch.reference_policy_logprobs
        return LossInputs(
            prev_logprobs=None if prev is None else flat(prev),
            generation_logprobs=flat(batch.generation_logprobs),
            reference_policy_logprobs=None if reference is None else flat(reference),
            advantages=flat(batch.advantages),
            token_mask=flat(batch.token_mask),
            staleness=version - flat(batch.weight_versions),
            sequences=SequenceIndex(
                index=_on_device(mb.sequence).flatten(),
                num_sequences=len(mb.lengths),
                sample_mask=_on_device(mb.sample_mask),
                cp_group=self.layout.cp_group if self.layout.cp > 1 else None,
            ),
        )


def _on_device(x: Tensor) -> Tensor:
    return x.to(platform.device(), non_blocking=True)


def _packed_seq_params(microbatch: MicroBatch) -> PackedSeqParams | None:
    """Where sequences begin, for attention and rotary positions; None for a padded micro-batch.

    A sequence's padding counts as its last tokens, to which no other attends. Transformer Engine takes the same
    parameters; that path has not been run.
    """
    if not microbatch.packed:
        return None
    ends = microbatch.lengths.cumsum(0)
    begins = _on_device(torch.cat([torch.zeros(1), ends]).to(torch.int32))  # [n + 1]
    longest = int(microbatch.lengths.max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=begins,
        cu_seqlens_kv=begins,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
