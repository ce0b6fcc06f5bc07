from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.parallel.layout import initialize_layout
from megatron_grpo.parallel.reductions import MetricReducer, Reduction
from tests.rank_pool import RankPool
from tests.unit.algorithms.batches import VARIANTS, loss_and_gradient, micro_batch_loss, random_batch

TOLERANCE = 1e-10

# Rows of each data parallel rank, cut into micro-batches; row 1 has one response token, row 2 none, row 7 is
# masked. The last rank of the second cut has nothing that counts.
CUTS = {
    1: ([[[0, 1, 2], [3], [], [4, 5, 6, 7]]],),
    2: ([[[0], [1, 2]], [[3, 4, 5], [6], [7]]], [[[0, 1, 3, 4, 5, 6]], [[2], [7]]]),
    4: ([[[0]], [[1], [2]], [[3, 4]], [[7, 5], [6]]],),
}


def _sharded(rank: int, world: int, cp: int, cuts: list[list[list[int]]]) -> dict[str, dict[str, Any]]:
    layout = initialize_layout(context_parallel_size=cp)
    reducer = MetricReducer(layout)
    results = {}
    for name, keys in VARIANTS.items():
        batch = random_batch()
        batch["curr"].requires_grad_()
        config = ClippedPGLossConfig(**keys)
        loss_sum, num_tokens, parts = (
            torch.zeros((), dtype=torch.float64),
            torch.zeros((), dtype=torch.int),
            [],
        )
        for rows in cuts[layout.dp_rank]:
            output = micro_batch_loss(config, batch, rows, layout.cp_group)
            output.loss_sum.backward()
            loss_sum += output.loss_sum.detach()
            num_tokens += output.num_tokens
            parts.append(output.metrics)
        for total in (loss_sum, num_tokens, batch["curr"].grad):
            dist.all_reduce(total, group=layout.dp_cp_group)
        results[name] = {
            "loss": (loss_sum / num_tokens).item(),
            "gradient": (batch["curr"].grad / num_tokens).tolist(),
            "metrics": reducer.reduce(reducer.merge(parts)),
        }
    return results


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "cp"), [(2, 2), (2, 1), (4, 2), (4, 4), (4, 1)])
def test_shards_and_micro_batches_equal_one_process(ranks: RankPool, world: int, cp: int) -> None:
    for cuts in CUTS[world // cp]:
        answers = ranks.run(world, _sharded, cp, cuts)
        for name, keys in VARIANTS.items():
            loss, gradient, (output,) = loss_and_gradient(ClippedPGLossConfig(**keys), random_batch())
            metrics = {key: m.value() for key, m in output.metrics.items()}
            for answer in answers:
                got = answer[name]
                assert got["loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
                torch.testing.assert_close(
                    torch.tensor(got["gradient"], dtype=torch.float64), gradient, rtol=0, atol=TOLERANCE
                )
                assert got["metrics"] == pytest.approx(metrics, rel=TOLERANCE), name
                assert got["metrics"] == answers[0][name]["metrics"]


def _constant_one(rank: int, world: int, sizes: dict[str, int]) -> dict[str, float]:
    layout = initialize_layout(**sizes)
    if not layout.is_last_stage:
        return MetricReducer(layout).reduce({})
    tokens = torch.tensor(3.0 + layout.dp_rank + 2 * layout.cp_rank)  # shards of different sizes
    rows = torch.tensor(1.0 + layout.dp_rank)
    return MetricReducer(layout).reduce(
        {
            "token mean": Reduction.mean(tokens, tokens),
            "row mean": Reduction.mean(rows, rows, "sequences"),
            "rows": Reduction.total(rows, "sequences"),
            "tokens": Reduction.total(tokens),
            "lowest": Reduction.minimum(tokens),
            "highest": Reduction.maximum(rows, "sequences"),
            "empty": Reduction.mean(torch.tensor(0.0), torch.tensor(0)),
            "none": Reduction.minimum(torch.tensor(torch.inf)),
        }
    )


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("sizes", "rows", "tokens"),
    [
        ({"context_parallel_size": 2}, 3, 3 + 4 + 5 + 6),
        ({"tensor_model_parallel_size": 2}, 3, 3 + 4),
        ({"pipeline_model_parallel_size": 2, "context_parallel_size": 2}, 1, 3 + 5),
        ({"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}, 1, 3),
        ({"pipeline_model_parallel_size": 2}, 3, 3 + 4),
        ({}, 10, 3 + 4 + 5 + 6),
    ],
)
def test_constant_one_in_every_layout(ranks: RankPool, sizes: dict[str, int], rows: int, tokens: int) -> None:
    data_parallel = {1: 1, 3: 2, 10: 4}[rows]
    for values in ranks.run(4, _constant_one, sizes):
        assert values == {
            "token mean": 1.0, "row mean": 1.0, "rows": rows, "tokens": tokens, "lowest": 3.0,
            "highest": data_parallel,
        }  # fmt: skip


def _different_names(rank: int, world: int) -> str:
    layout = initialize_layout()
    try:
        MetricReducer(layout).reduce({f"metric {rank}": Reduction.total(torch.tensor(1.0))})
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.timeout(120)
def test_ranks_with_different_metrics_all_raise(ranks: RankPool) -> None:
    for rank, message in enumerate(ranks.run(2, _different_names)):
        assert f"rank {rank} holds metric {rank}:sum:tokens" in message


def _different_kinds(rank: int, world: int) -> str:
    layout = initialize_layout()
    one = torch.tensor(1.0)
    part = Reduction.total(one) if rank == 0 else Reduction.mean(one, one)
    try:
        MetricReducer(layout).reduce({"x": part})
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.timeout(120)
def test_ranks_with_different_kinds_of_a_metric_all_raise(ranks: RankPool) -> None:
    for message, kind in zip(ranks.run(2, _different_kinds), ("sum", "mean"), strict=True):
        assert f"holds x:{kind}:tokens" in message
