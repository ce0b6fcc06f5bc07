from __future__ import annotations

from megatron_grpo.refit.attestation import attest, shorten

SENT = {"a": "1", "b": "2", "c": "3"}


def test_equal_sets_have_no_fault() -> None:
    assert attest(SENT, dict(SENT)) == []


def test_each_fault_is_named() -> None:
    faults = attest(
        SENT,
        {"b": "other", "c": "3", "d": "4"},
        previous={"a": "0", "b": "2", "c": "3"},
        must_change=("a", "c"),
    )
    assert faults == [
        "1 tensors did not arrive: a",
        "1 tensors arrived but were not sent: d",
        "1 tensors arrived with other bytes: b",
        "1 tensors did not change, as they should have: c",
    ]


def test_unchanged_is_no_fault_at_learning_rate_zero_or_in_the_first_refit() -> None:
    assert attest(SENT, SENT, previous=SENT) == []
    assert attest(SENT, SENT, previous=None, must_change=SENT) == []
    assert attest(SENT, SENT, previous={}, must_change=SENT) == []


def test_long_lists_are_cut() -> None:
    assert shorten([f"t{i}" for i in range(7)]) == "t0, t1, t2, t3, t4 and 2 more"
