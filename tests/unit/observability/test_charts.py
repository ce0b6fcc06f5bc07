from __future__ import annotations

import math
import re

import pytest

from megatron_grpo.observability.charts import (
    MAX_BINS,
    Axis,
    Series,
    _Scale,
    _tick_label,
    line_chart,
    stacked_chart,
)


def series(points: dict[int, float]) -> Series:
    result = Series()
    for step, value in points.items():
        result.append(step, value)
    return result


def test_bins_are_single_steps_while_they_fit() -> None:
    axis = Axis(1, MAX_BINS)
    assert axis.width == 1
    assert axis.edges(0) == (1, 1)
    assert axis.edges(MAX_BINS - 1) == (MAX_BINS, MAX_BINS)


def test_a_long_run_is_binned_with_mean_and_range() -> None:
    axis = Axis(1, 100_000)
    assert axis.width == 500
    bins = axis.bins(series({step: math.nan if step <= 501 else float(step) for step in range(1, 2001)}))
    assert sorted(bins) == [0, 1, 2, 3]
    assert math.isnan(bins[0].mean)
    assert bins[1] == (751.0, 502.0, 1000.0)  # 502 ... 1000; the NaN of 501 is left out
    assert bins[3] == (1750.5, 1501.0, 2000.0)


def test_a_nan_is_a_gap_and_a_missing_step_is_not() -> None:
    axis = Axis(1, 9)
    gap = line_chart("t", axis, [("a", series({1: 1.0, 2: 2.0, 3: math.nan, 4: 4.0, 5: 5.0}))])
    sparse = line_chart("t", axis, [("a", series({1: 1.0, 2: 2.0, 4: 4.0, 5: 5.0}))])

    def moves(figure: str) -> int:
        path = re.search(r'class="curve"[^>]* d="([^"]*)"', figure)
        assert path is not None
        return path.group(1).count("M")

    assert (moves(gap), moves(sparse)) == (2, 1)


def test_curve_runs_through_the_plot_area() -> None:
    figure = line_chart("t", Axis(0, 1), [("a", series({0: 0.0, 1: 1.0}))])
    # 2 steps share 480 - 58 - 10 = 412 units: centres at 58 + 103 and 58 + 309; 0 is the bottom, 1 the top.
    assert 'd="M161.0 210.0L367.0 12.0"' in figure


def test_stack_adds_up() -> None:
    parts = [("rollout", series({1: 30.0})), ("train", series({1: 10.0}))]
    figure = stacked_chart("t", Axis(1, 1), parts)
    assert 'fill="var(--c0)" d="M58.0 210.0V61.5H470.0V210.0Z"' in figure  # 30 of 40 on 198 units
    assert 'fill="var(--c1)" d="M58.0 61.5V12.0H470.0V61.5Z"' in figure


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, (0.0, 0.5, 1.0)),
        (3.0, 21.0, (0.0, 5.0, 10.0, 15.0, 20.0, 25.0)),
        (-0.2, 0.2, (-0.2, -0.1, 0.0, 0.1, 0.2)),
        (5.0, 5.0, (4.5, 5.0, 5.5)),
        (0.0, 0.0, (0.0, 0.5, 1.0)),
    ],
)
def test_scale_holds_the_values_between_round_ticks(
    low: float, high: float, ticks: tuple[float, ...]
) -> None:
    scale = _Scale.around(low, high)
    assert scale.ticks == pytest.approx(ticks)
    assert scale.low <= low
    assert scale.high >= high


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [
        (0.0, 0.2, "0"),
        (0.30000000000000004, 0.1, "0.3"),
        (0.0045, 0.0005, "0.0045"),
        (2e-7, 1e-7, "2e-7"),
        (1.0005, 0.0005, "1.0005"),
        (15000.0, 5000.0, "15k"),
        (150.0, 50.0, "150"),
        (-0.02, 0.01, "-0.02"),
        (3e6, 1e6, "3e6"),
    ],
)
def test_tick_labels(value: float, step: float, text: str) -> None:
    assert _tick_label(value, step) == text


def test_labels_are_escaped() -> None:
    figure = line_chart("a < b", Axis(1, 2), [("<i>", series({1: 1.0})), ("&", series({1: 2.0}))])
    assert "<i>" not in figure
    assert "<h3>a &lt; b</h3>" in figure
    assert "&lt;i&gt; 1" in figure
