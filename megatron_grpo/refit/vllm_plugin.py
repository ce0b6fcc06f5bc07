"""What runs inside the vLLM server: the ``shm`` weight-transfer backend and the worker extension.

vLLM loads :func:`register` in all its processes (entry point group ``vllm.general_plugins``). This module imports
no vLLM: the backend itself is in :mod:`megatron_grpo.refit.shm_backend`, which only a worker imports.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Makes ``--weight-transfer-config '{"backend": "shm"}'`` known to vLLM."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    # vLLM may load plugins more than once in a process.
    if "shm" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "shm", "megatron_grpo.refit.shm_backend", "ShmWeightTransferEngine"
        )


class WorkerExtension:
    """Methods added to vLLM's worker (``--worker-extension-cls``), called through ``/collective_rpc``."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def received_fingerprints(self) -> dict[str, str]:
        """Name -> fingerprint of every tensor received in the latest weight update."""
        return dict(self.weight_transfer_engine.received)

    def abandon_weight_update(self) -> None:
        """Ends an unfinished update, so that the next one starts clean. The weights are then undefined."""
        if self._weight_update_active:
            self._weight_update_active = False
            self.weight_transfer_engine.reset_weight_update_target()
        self.weight_transfer_engine.abandon()
