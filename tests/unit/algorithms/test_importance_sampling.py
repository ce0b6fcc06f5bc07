from __future__ import annotations

import math

import pytest
import torch

from megatron_grpo.algorithms.loss.importance_sampling import importance_weights, sequence_logprob_error
from megatron_grpo.algorithms.sequence_index import SequenceIndex
from megatron_grpo.config.loss import ClippedPGLossConfig

# two sequences of two tokens: raw weights 2, 0.4 and 1.2, 0.9; geometric means 0.894 and 1.039
WEIGHTS = torch.tensor([2.0, 0.4, 1.2, 0.9], dtype=torch.float64)
SEQUENCES = SequenceIndex(torch.tensor([0, 0, 1, 1]), 2, torch.ones(2))


@pytest.mark.parametrize(
    ("keys", "expected", "outside"),
    [
        ({}, [2.0, 0.4, 1.2, 0.9], None),
        ({"type": "tis", "ratio": 1.5}, [1.5, 0.4, 1.2, 0.9], [True, False, False, False]),
        ({"type": "tis", "ratio": 1.5, "ratio_min": 0.5}, [1.5, 0.5, 1.2, 0.9], [True, True, False, False]),
        ({"type": "icepop", "ratio": 1.5, "ratio_min": 0.5}, [0, 0, 1.2, 0.9], [True, True, False, False]),
        ({"type": "seq-mask-tis", "ratio": 1.1, "ratio_min": 0.9}, [0, 0, 1.2, 0.9], [True, False]),
    ],
)
def test_truncation(keys: dict[str, object], expected: list[float], outside: list[bool] | None) -> None:
    config = ClippedPGLossConfig(
        use_importance_sampling_correction=True,
        **{f"truncated_importance_sampling_{key}": value for key, value in keys.items()},
    )
    weights = importance_weights(config, WEIGHTS.log(), SEQUENCES, torch.tensor([2, 2]))
    torch.testing.assert_close(weights.raw, WEIGHTS)
    torch.testing.assert_close(weights.truncated, torch.tensor(expected, dtype=torch.float64))
    assert (None if weights.out_of_bounds is None else weights.out_of_bounds.tolist()) == outside


def test_sequence_level_weight_is_the_geometric_mean() -> None:
    config = ClippedPGLossConfig(
        token_level_loss=False,
        sequence_level_importance_ratios=True,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="icepop",
        truncated_importance_sampling_ratio=1.1,
        truncated_importance_sampling_ratio_min=0.9,
    )
    weights = importance_weights(config, WEIGHTS.log(), SEQUENCES, torch.tensor([2, 2]))
    first, second = math.sqrt(0.8), math.sqrt(1.08)
    assert weights.raw.tolist() == pytest.approx([first, first, second, second])
    assert weights.truncated.tolist() == pytest.approx([0, 0, second, second])
    assert weights.out_of_bounds.tolist() == [True, False]


def test_sequence_logprob_error() -> None:
    prev = torch.tensor(
        [[-1.0, -1.0, math.nan], [-1.0, -900.0, -1.0], [-1.0, -1.0, -1.0], [math.nan, -1.0, -1.0]]
    )
    generation = torch.full((4, 3), -1.1)
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 1, 0]])
    error = sequence_logprob_error(prev, generation, mask)
    limit = math.exp(20)
    assert error.tolist() == pytest.approx([math.exp(0.1), limit, 1.0, (limit + math.exp(0.1)) / 2], rel=1e-5)
