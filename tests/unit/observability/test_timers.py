from __future__ import annotations

import pytest

from megatron_grpo.observability.timers import StepTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


def fail_after(clock: Clock, seconds: float) -> None:
    clock.pass_seconds(seconds)
    raise RuntimeError


def test_every_second_is_counted_once() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    with timer("rollout"):
        clock.pass_seconds(3)
        with timer("refit"):
            clock.pass_seconds(1)
        clock.pass_seconds(2)
    clock.pass_seconds(0.5)
    with timer("train"):
        clock.pass_seconds(4)
    assert timer.finish_step() == {
        "time/rollout_s": 5.0,
        "time/logprob_s": 0.0,
        "time/train_s": 4.0,
        "time/refit_s": 1.0,
        "time/other_s": 0.5,
        "time/step_s": 10.5,
    }


def test_finish_step_starts_the_next_one() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    with timer("train"):
        clock.pass_seconds(4)
    timer.finish_step()
    for _ in range(2):
        with timer("train"):
            clock.pass_seconds(1.5)
    metrics = timer.finish_step()
    assert metrics["time/train_s"] == 3.0
    assert metrics["time/step_s"] == 3.0


def test_a_phase_that_raises_is_charged_and_left() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    with pytest.raises(RuntimeError), timer("logprob"):
        fail_after(clock, 2)
    clock.pass_seconds(1)
    metrics = timer.finish_step()
    assert (metrics["time/logprob_s"], metrics["time/other_s"]) == (2.0, 1.0)


def test_an_unknown_phase_is_named() -> None:
    with (
        pytest.raises(ValueError, match=r"'rolout'.*rollout, logprob, train, refit, other"),
        StepTimer()("rolout"),
    ):
        pass
