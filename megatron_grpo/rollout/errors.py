"""The one exception of the rollout layer."""

from __future__ import annotations


class EngineError(RuntimeError):
    """An engine is dead, late, stale or answered with an error; the message names it and says why.

    Never turned into a reward: a failure of the infrastructure says nothing about a response.
    """
