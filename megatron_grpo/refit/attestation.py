"""Proof that the weights in an engine are those that were sent: fingerprints of both sides, compared by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping

_NAMES_SHOWN = 5


class RefitError(RuntimeError):
    """Weights did not arrive as they were sent. The engines concerned are stale and do not serve."""


def attest(
    sent: Mapping[str, str],
    received: Mapping[str, str],
    *,
    previous: Mapping[str, str] | None = None,
    must_change: Collection[str] = (),
) -> list[str]:
    """Compares fingerprints (tensor name -> hex digits); the empty list means that all is well.

    Args:
        sent: the trainer's side of this refit.
        received: one worker's side of it.
        previous: what was sent in the refit before; None after a start.
        must_change: names that must differ from ``previous``. Empty where equality is right (learning rate 0).

    Returns:
        One sentence for each kind of fault, naming the tensors: missing, extra, different, unchanged.
    """
    faults = {
        "did not arrive": sent.keys() - received.keys(),
        "arrived but were not sent": received.keys() - sent.keys(),
        "arrived with other bytes": {n for n in sent.keys() & received.keys() if sent[n] != received[n]},
        "did not change, as they should have": {
            name for name in must_change if previous and name in sent and previous.get(name) == sent[name]
        },
    }
    return [f"{len(names)} tensors {fault}: {shorten(names)}" for fault, names in faults.items() if names]


def shorten(names: Collection[str]) -> str:
    """The first names in order, and how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(sorted(names)[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
