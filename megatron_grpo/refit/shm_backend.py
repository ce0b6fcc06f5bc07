"""vLLM weight-transfer backend ``shm``: tensors in Hugging Face names, from safetensors files in shared memory.

Imported in vLLM's worker only. One update: ``start``, any number of ``receive_weights`` (one file each),
``finish``. The tensors go through vLLM's layerwise reload, as with vLLM's own backends: on the CPU build linear
weights are prepacked and their parameters empty, so nothing else can load them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform

from megatron_grpo.refit.fingerprint import fingerprint


@dataclass
class ShmInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The backend needs no rendezvous."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One bucket: ``path`` of a safetensors file on this host."""

    path: str


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the safetensors files of a Hugging Face directory."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):  # type: ignore[misc]
    """Loads whole weight sets only: a part of one is refused by name, because vLLM fuses q, k and v (gate and up)
    into one weight and would fill what did not arrive with garbage, without an error."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.received: dict[str, str] = {}
        self.expected = checkpoint_shapes(Path(self.model_config.model))
        if not self.expected:
            raise ValueError(
                f"no *.safetensors in {self.model_config.model}; refits need their names and shapes"
            )
        if self.model_config.hf_text_config.tie_word_embeddings:
            self.expected.pop("lm_head.weight", None)

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        self.received = {}
        if current_platform.is_cpu():
            self._forget_expert_kernels()
        layerwise.initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        with safe_open(update_info.path, "pt") as tensors:
            bucket = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        problems = [self._problem(name, tensor) for name, tensor in bucket.items()]
        if found := [p for p in problems if p]:
            raise ValueError(f"refit refused, nothing of this bucket was loaded: {'; '.join(found[:5])}")
        self.model.load_weights(self._to_device(bucket))
        self.received |= {name: fingerprint(tensor) for name, tensor in bucket.items()}

    def _problem(self, name: str, tensor: torch.Tensor) -> str | None:
        shape = self.expected.get(name)
        if shape is None:
            return f"{name} is not a weight of this model"
        if name in self.received:
            return f"{name} came twice in one update"
        if shape != tuple(tensor.shape):
            return f"{name} has shape {tuple(tensor.shape)}, the model's has {shape}"
        return None

    def _to_device(self, bucket: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in bucket.items():
            yield name, tensor.to(self.device)

    def finish_weight_update(self) -> None:
        missing = [name for name in self.expected if name not in self.received]
        if missing:
            raise ValueError(
                f"refit refused: {len(missing)} of {len(self.expected)} tensors did not arrive: "
                f"{', '.join(missing[:5])}; send all weights in every update (vLLM fuses some of them)"
            )
        layerwise.finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            self._repack_tied_lm_head()

    def _forget_expert_kernels(self) -> None:
        # The CPU build packs experts only when it builds their kernel. A reload into an existing one would leave
        # them unpacked, and the kernel would compute with permuted weights, silently.
        for module in self.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                method.moe_kernel = None

    def _repack_tied_lm_head(self) -> None:
        # The CPU build packs a tied lm_head once at start and the layerwise reload, which sees the weight
        # as the embedding's, never packs it again: the output layer would keep the old weights, silently.
        for module in self.model.modules():
            if (
                hasattr(module, "cpu_linear")
                and type(module).__name__ == "ParallelLMHead"
                and module.weight.numel()
            ):
                module.quant_method.process_weights_after_loading(module)

    def abandon(self) -> None:
        """Puts the layers that wait for tensors back to what they were; others may hold new weights."""
        self.received = {}
        for module in self.model.modules():
            info = layerwise.get_layerwise_info(module)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(module, info)
                info.reset()
        layerwise.LOADING_LAYERS.clear()

    def shutdown(self) -> None:
        """Nothing is held between updates."""
