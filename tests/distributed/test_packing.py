"""Gradients and metrics of packed micro-batches against the same rows in one padded micro-batch on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from megatron_grpo.config import RunConfig
from megatron_grpo.config.loss import ClippedPGLossConfig
from tests.rank_pool import RankPool
from tests.recorded_training import recorded_rollouts, run_config
from tests.tiny_model import write_tiny_model

PROMPT, RESPONSES = 5, [1, 9, 4, 12, 2, 7, 3]
TOKEN_MEAN = ClippedPGLossConfig(reference_policy_kl_penalty=0.05)
SEQUENCE_MEAN = ClippedPGLossConfig(reference_policy_kl_penalty=0.05, token_level_loss=False)
GSPO = ClippedPGLossConfig(
    reference_policy_kl_penalty=0.05, token_level_loss=False, sequence_level_importance_ratios=True
)


@dataclass(frozen=True)
class Case:
    """``plan``: rows of each micro-batch of each data-parallel rank; None: the policy packs all rows itself."""

    loss: ClippedPGLossConfig
    plan: tuple[tuple[tuple[int, ...], ...], ...] | None
    masked: tuple[int, ...] = ()


def recorded_experience(rows: list[int], masked: tuple[int, ...]) -> Any:
    """Rows of a fixed batch; ``masked`` ones hold NaN and do not count."""
    from megatron_grpo.policy.experience import Experience

    generator = torch.Generator().manual_seed(5)
    columns = 20
    lengths = torch.tensor([PROMPT + n for n in RESPONSES])[:, None]
    position = torch.arange(columns)
    mask = ((position >= PROMPT) & (position < lengths)).float()
    tokens = torch.randint(0, 320, mask.shape, generator=generator) * (position < lengths)

    def logprobs() -> torch.Tensor:
        return (-5 - torch.rand(mask.shape, generator=generator)) * mask

    batch = Experience(
        tokens, mask, torch.ones(len(mask)), logprobs(), torch.zeros_like(tokens), torch.arange(len(mask)),
        torch.zeros(len(mask), dtype=torch.float64), torch.zeros(len(mask)),
        prev_logprobs=logprobs(), reference_policy_logprobs=logprobs(),
        advantages=torch.randn(len(mask), 1, generator=generator) * mask,
    )  # fmt: skip
    for row in masked:
        batch.sample_mask[row] = 0
        batch.advantages[row] = torch.nan
        batch.prev_logprobs[row] = torch.nan
    for name, value in vars(batch).items():
        if torch.is_tensor(value):
            setattr(batch, name, value[rows])
    return batch


def gradients(rank: int, world: int, config: Any, cases: list[Case]) -> list[tuple[torch.Tensor, dict]]:
    """Gradient of all parameters, reduced over the ranks, and the metrics, for each case."""
    from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn
    from megatron_grpo.parallel.layout import initialize_layout
    from megatron_grpo.parallel.reductions import MetricReducer
    from megatron_grpo.policy.policy import MegatronPolicy

    layout = initialize_layout(**config.parallel.group_sizes())
    policy = MegatronPolicy(config, layout, temperature=1.0, total_optimizer_steps=4, with_reference=False)
    results = []
    for case in cases:
        every = tuple(range(len(RESPONSES)))
        microbatches = (every,) if case.plan is None else case.plan[layout.dp_rank]
        batch = recorded_experience([row for rows in microbatches for row in rows], case.masked)
        if case.plan is not None:
            batch.microbatch_sizes = (tuple(len(rows) for rows in microbatches),)
        metrics = policy.accumulate_gradients(batch, ClippedPGLossFn(case.loss), version=0)
        gradient = torch.cat([p.main_grad.flatten() for chunk in policy.model for p in chunk.parameters()])
        results.append((gradient.clone(), MetricReducer(layout).reduce(metrics)))
    return results


def policy_config(model: Path, packed: bool, **parallel: int) -> Any:
    packing = {"enabled": True, "train_mb_tokens": 64} if packed else None
    config = run_config(model, model.parent, 1, packing, **parallel).policy
    optimizer = config.optimizer.model_copy(update={"use_distributed_optimizer": False})
    return config.model_copy(update={"optimizer": optimizer, "train_micro_batch_size": len(RESPONSES)})


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("packing") / "model")


def same(got: tuple[torch.Tensor, dict], want: tuple[torch.Tensor, dict]) -> None:
    assert want[0].abs().max() > 1e-3
    assert (got[0] - want[0]).abs().max() < 1e-5 * want[0].abs().max()
    assert got[1].keys() == want[1].keys()
    for name, value in want[1].items():
        assert got[1][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


ONE = ((0, 1, 2, 3, 4, 5, 6),)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("loss", [TOKEN_MEAN, SEQUENCE_MEAN, GSPO], ids=["token", "sequence", "gspo"])
def test_any_cut_into_micro_batches_gives_the_same(
    loss: ClippedPGLossConfig, model: Path, ranks: RankPool
) -> None:
    ((want,),) = ranks.run(1, gradients, policy_config(model, False), [Case(loss, (ONE,))])
    plans = [(((0,), (1,), (2, 3), (4, 5, 6)),), (((6, 0, 3), (1, 2, 4, 5)),), (((), ONE[0], ()),), None]
    (got,) = ranks.run(1, gradients, policy_config(model, True), [Case(loss, plan) for plan in plans])
    for result in got:
        same(result, want)
    assert want[1]["num_valid_samples"] == len(RESPONSES)
    assert want[1]["num_valid_tokens"] == sum(RESPONSES)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("loss", [TOKEN_MEAN, SEQUENCE_MEAN, GSPO], ids=["token", "sequence", "gspo"])
def test_replicas_with_few_rows_and_none(loss: ClippedPGLossConfig, model: Path, ranks: RankPool) -> None:
    ((want,),) = ranks.run(1, gradients, policy_config(model, False), [Case(loss, (ONE,))])
    plans = [
        (((0, 1), (2,)), ((3,), (4,)), ((), (5,)), ((6,), ())),
        (((), ()), ((3, 0, 1), (4,)), ((), ()), ((2, 6), (5,))),
    ]
    for got in ranks.run(4, gradients, policy_config(model, True), [Case(loss, plan) for plan in plans]):
        for result in got:
            same(result, want)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("loss", [TOKEN_MEAN, SEQUENCE_MEAN, GSPO], ids=["token", "sequence", "gspo"])
def test_context_parallel_ranks_without_a_token_of_some_sequences(
    loss: ClippedPGLossConfig, model: Path, ranks: RankPool
) -> None:
    """Sequences of one response token lie on one of the two ranks; chunk boundaries lose none."""
    ((want,),) = ranks.run(1, gradients, policy_config(model, False), [Case(loss, (ONE,))])
    plans = [(((0, 4), (1, 2), (3, 5, 6)),), (((0,), (), (1, 2, 3), (4, 5, 6)),)]
    config = policy_config(model, True, context_parallel_size=2)
    for got in ranks.run(2, gradients, config, [Case(loss, plan) for plan in plans]):
        for result in got:
            same(result, want)


@pytest.mark.timeout(240)
def test_masked_sequences_count_nowhere(model: Path, ranks: RankPool) -> None:
    """Half of the sequences masked, NaN included: the gradient of the other half alone."""
    half = Case(TOKEN_MEAN, (((0, 2, 4, 6),),))
    ((want,),) = ranks.run(1, gradients, policy_config(model, False), [half])
    case = Case(TOKEN_MEAN, (((0, 1, 2), (5,), (3, 4, 6)),), masked=(1, 3, 5))
    ((got,),) = ranks.run(1, gradients, policy_config(model, True), [case])
    same(got, want)


def optimizer_steps(rank: int, world: int, config: Any) -> dict[str, Any]:
    """Two optimizer steps on 7 sequences in two packed micro-batches; log-probs of a pass that fails and one that
    does not."""
    from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn
    from megatron_grpo.parallel.layout import initialize_layout
    from megatron_grpo.policy.policy import MegatronPolicy

    policy = MegatronPolicy(config, initialize_layout(), temperature=1.0, total_optimizer_steps=8,
                            with_reference=False)  # fmt: skip
    batch = recorded_experience(list(range(len(RESPONSES))), ())
    before = policy.logprobs(batch)
    alone = torch.cat([policy.logprobs(batch.rows(row, row + 1)) for row in range(len(batch))])
    none = policy.logprobs(batch.rows(0, 0))
    batch.microbatch_sizes = ((3, 4),)
    steps = [policy.train_step(batch, ClippedPGLossFn(TOKEN_MEAN), version=0) for _ in range(2)]
    broken = batch.rows(0, 2)
    broken.tokens = broken.tokens + 10**6
    with pytest.raises(IndexError):
        policy.logprobs(broken)
    return {
        "logprobs": before,
        "alone": alone,
        "none": none.shape,
        "lr": [step.lr for step in steps],
        "samples": [float(step.metrics["num_valid_samples"].numerator) for step in steps],
        "scheduler": policy.scheduler.num_steps,
        "training": all(chunk.training for chunk in policy.chunks),
    }


@pytest.mark.timeout(240)
def test_the_schedule_counts_optimizer_steps_and_log_probs_do_not_see_neighbours(
    model: Path, ranks: RankPool
) -> None:
    config = policy_config(model, True)
    (result,) = ranks.run(1, optimizer_steps, config)
    # warm-up over two optimizer steps to 1e-2, whatever the micro-batches
    assert result["lr"] == pytest.approx([5e-3, 1e-2])
    assert result["scheduler"] == 2
    assert result["samples"] == [7, 7]
    mask = recorded_experience(list(range(len(RESPONSES))), ()).token_mask
    assert (result["logprobs"] * mask).abs().sum() > 0
    torch.testing.assert_close(result["logprobs"], result["alone"], rtol=1e-5, atol=1e-5)
    assert result["none"] == (0, 20)
    assert result["training"]


def steps_of_one_row(rank: int, world: int, config: RunConfig) -> dict[str, Any]:
    """A whole step on one group of four rollouts, each an optimizer step of its own: other replicas hold no row."""
    from megatron_grpo.algorithms.advantage_estimator import make_advantage_estimator
    from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn
    from megatron_grpo.observability.timers import StepTimer
    from megatron_grpo.parallel.layout import broadcast_from_leader, initialize_layout
    from megatron_grpo.parallel.reductions import MetricReducer
    from megatron_grpo.policy.experience import Experience
    from megatron_grpo.policy.packing import train_rule
    from megatron_grpo.policy.policy import MegatronPolicy
    from megatron_grpo.refit.monitor import LogprobErrorMonitor
    from megatron_grpo.training.exchange import exchange
    from megatron_grpo.training.grpo import GRPO

    layout = initialize_layout(**config.policy.parallel.group_sizes())
    policy = MegatronPolicy(
        config.policy, layout, temperature=1.0, total_optimizer_steps=4, with_reference=True
    )
    monitor, reported = LogprobErrorMonitor(config.grpo, layout), {}

    class Feed:
        metrics: ClassVar[dict[str, float]] = {}

        def next(self, step: int) -> Experience:
            group = recorded_rollouts(0, policy.vocab_size)[3] if layout.dp_rank == 0 else []
            batch = exchange(group, layout, 4, 7, train_rule(config.policy, layout), names=[])
            reported["rows"] = len(batch)
            return batch

    class Run:
        stop_requested = False

        def refit(self, version: int, batch: Experience) -> dict[str, float]:
            rows = batch.rows(0, 2)
            trainer = policy.logprobs(rows, temperature=1.0, micro_batch_size=1)
            engine = trainer.clone()
            broadcast_from_leader(engine, layout)
            return monitor.check(trainer, engine, rows.token_mask, rows.sample_mask)[1]

        def after_step(self, step: int, metrics: dict[str, float], *, last: bool) -> None:
            reported["metrics"] = {k: v for k, v in metrics.items() if not k.startswith("time/")}

    GRPO(
        policy, Feed(), ClippedPGLossFn(config.loss_fn),
        make_advantage_estimator(config.grpo, config.loss_fn, layout.dp_group), monitor, MetricReducer(layout),
        StepTimer(),
    ).train(Run(), 0, 1)  # fmt: skip
    return reported


@pytest.mark.timeout(240)
def test_a_replica_without_any_row_takes_part_in_the_whole_step(model: Path, ranks: RankPool) -> None:
    packing = {"enabled": True, "train_mb_tokens": 64}
    (want,) = ranks.run(1, steps_of_one_row, run_config(model, model.parent, 1))
    results = ranks.run(
        4, steps_of_one_row, run_config(model, model.parent, 1, packing, context_parallel_size=2)
    )
    assert sorted(result["rows"] for result in results) == [0, 0, 4, 4]
    for got in results:
        assert got["metrics"].keys() == want["metrics"].keys()
        for name, value in want["metrics"].items():
            assert got["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
