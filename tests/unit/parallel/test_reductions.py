from __future__ import annotations

import math

import pytest
import torch

from megatron_grpo.parallel.reductions import MetricReducer, Reduction, masked_max, masked_mean, masked_min


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_mean_of_parts_is_the_mean_of_the_whole() -> None:
    one = {"x": masked_mean(t(10.0), t(1).bool())}
    nine = {"x": masked_mean(torch.zeros(9), torch.ones(9).bool())}
    assert MetricReducer.merge([one, nine])["x"].value() == 1.0


def test_merge_of_every_kind() -> None:
    a = {"s": Reduction.total(torch.tensor(3)), "lo": masked_min(t(2, -9), t(1, 0).bool()),
         "hi": masked_max(t(2, 99), t(1, 0).bool()), "ess": Reduction.effective_size(t(1, 0)),
         "only a": Reduction.total(torch.tensor(1.0))}  # fmt: skip
    b = {"s": Reduction.total(torch.tensor(4)), "lo": masked_min(t(1), t(1).bool()),
         "hi": masked_max(t(1), t(1).bool()), "ess": Reduction.effective_size(t(3))}  # fmt: skip
    merged = {name: r.value() for name, r in MetricReducer.merge([a, b]).items()}
    assert merged == {"s": 7.0, "lo": 1.0, "hi": 2.0, "ess": pytest.approx(16 / 10), "only a": 1.0}


def test_nothing_has_no_value() -> None:
    none = torch.zeros(3, dtype=torch.bool)
    for reduction in (masked_mean(torch.ones(3), none), masked_min(torch.ones(3), none),
                      masked_max(torch.ones(0), none[:0]), Reduction.effective_size(torch.zeros(2))):  # fmt: skip
        assert reduction.value() is None
    assert Reduction.total(torch.tensor(0)).value() == 0.0


def test_values_under_a_mask_are_not_looked_at() -> None:
    x, mask = t(1.0, math.nan, math.inf), t(1, 0, 0).bool()
    assert masked_mean(x, mask).value() == masked_min(x, mask).value() == masked_max(x, mask).value() == 1.0


def test_different_kinds_under_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="a sum over tokens cannot be merged with a sum over groups"):
        MetricReducer.merge([{"x": Reduction.total(t(1)[0])}, {"x": Reduction.total(t(1)[0], "groups")}])


def test_reductions_hold_no_graph_and_keep_float64() -> None:
    x = torch.ones(3, requires_grad=True)
    reduction = Reduction.mean(x.sum(), torch.tensor(3))
    assert not reduction.numerator.requires_grad
    assert reduction.numerator.dtype == reduction.denominator.dtype == torch.float64
