"""Save and resume: Megatron distributed checkpoints under ``<run_dir>/checkpoints``.

``step_00000010/`` holds the model and optimizer shards (torch_dist format), ``trainer.json`` (step, data
position, schedule), each rank's random state and the rollouts that are kept for the next step. It is written as
``step_00000010.tmp`` and renamed when complete; the file ``latest`` names it last. A killed save leaves the
previous checkpoint untouched.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_grpo.parallel.layout import ParallelLayout
from megatron_grpo.policy.optimizer import ensure_state
from megatron_grpo.policy.policy import MegatronPolicy

log = logging.getLogger(__name__)

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


# Saves are synchronous, so their results stay in this process. Megatron would start a server process per rank to
# queue them, which costs seconds and outlives a rank that is killed.
filesystem_async._results_queue = queue.Queue()


class CheckpointError(RuntimeError):
    """A checkpoint can't be written or read; the message says which and what to do."""


class Checkpointer:
    """Writes, finds, reads and prunes the checkpoints of one run. Methods are collective over all ranks."""

    def __init__(self, folder: Path, keep_latest_k: int, layout: ParallelLayout) -> None:
        self.folder, self.keep, self.layout = folder, keep_latest_k, layout

    def latest(self) -> Path | None:
        """The checkpoint that ``latest`` names.

        Raises:
            CheckpointError: it names a directory that is not there.
        """
        pointer = self.folder / "latest"
        if not pointer.is_file():
            return None
        path = self.folder / pointer.read_text().strip()
        if not (path / "trainer.json").is_file():
            raise CheckpointError(
                f"{pointer} names {path.name}, which is missing or incomplete; write the name of a complete "
                f"step_* directory into {pointer}, or set checkpointing.resume=never and use a new run_dir"
            )
        return path

    def save(
        self, policy: MegatronPolicy, step: int, trainer_state: dict[str, Any], rollouts: Sequence[Any] = ()
    ) -> Path:
        """Write the state after ``step`` completed steps and make it the latest.

        Args:
            trainer_state: of rank 0, as plain JSON values.
            rollouts: of each replica's leader, as plain JSON values; see :meth:`rollouts`.
        """
        final = self.folder / f"step_{step:08d}"
        temporary = final.with_suffix(".tmp")
        if self.layout.rank == 0:
            for unfinished in self.folder.glob("step_*.tmp"):  # of saves that were killed
                shutil.rmtree(unfinished)
            temporary.mkdir(parents=True)
            (temporary / "model").mkdir()
        dist.barrier()
        ensure_state(policy.optimizer)
        dist_checkpointing.save(
            _sharded_state(policy, self.layout, loading=False),
            str(temporary / "model"),
            content_metadata=_METADATA,
        )
        save_file(_random_state(), temporary / f"rng_{self.layout.rank:05d}.safetensors")
        if rollouts and self.layout.is_replica_leader:
            (temporary / f"rollouts_{self.layout.dp_rank:05d}.json").write_text(json.dumps(rollouts))
        dist.barrier()
        if self.layout.rank == 0:
            state = {"step": step, "world_size": self.layout.world_size, "experts_apart": _experts_apart(policy),
                     "scheduler": policy.scheduler.state_dict(), **trainer_state}  # fmt: skip
            (temporary / "trainer.json").write_text(json.dumps(state, indent=1))
            _sync_tree(temporary)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            pointer = self.folder / "latest.tmp"
            pointer.write_text(final.name + "\n")
            pointer.rename(self.folder / "latest")
            self._prune(final)
        dist.barrier()
        return final

    def load(self, policy: MegatronPolicy, path: Path) -> dict[str, Any]:
        """Restore model, optimizer, schedule and random state; returns what ``save`` was given, plus ``step``.

        Raises:
            CheckpointError: its experts had process groups of their own and this layout's have not, or the reverse.
        """
        trainer: dict[str, Any] = json.loads((path / "trainer.json").read_text())
        apart = _experts_apart(policy)
        if trainer.get("experts_apart", False) != apart:
            raise CheckpointError(
                f"{path} was written with policy.parallel.expert_model_parallel_size "
                f"{'1 and' if apart else 'above 1, or'} expert_tensor_parallel_size "
                f"{'equal to' if apart else 'other than'} tensor_model_parallel_size, which Megatron's optimizer "
                "state depends on; resume in such a layout, or start a new run from an export"
            )
        for optimizer in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
            if hasattr(optimizer, "_init_optimizer_states_with_dummy_values"):
                optimizer._init_optimizer_states_with_dummy_values()
        state = dist_checkpointing.load(
            _sharded_state(policy, self.layout, loading=True), str(path / "model")
        )
        for name, chunk in _named_chunks(policy):
            chunk.load_state_dict(state[name])
        policy.optimizer.load_state_dict(state["optimizer"])
        policy.scheduler.load_state_dict(trainer["scheduler"])
        if trainer["world_size"] == self.layout.world_size:
            _restore_random_state(load_file(path / f"rng_{self.layout.rank:05d}.safetensors"))
        elif self.layout.rank == 0:
            log.warning(
                "the checkpoint was written by %d ranks and is read by %d: random state starts from the seed",
                trainer["world_size"], self.layout.world_size,
            )  # fmt: skip
        return trainer

    def rollouts(self, path: Path) -> list[Any]:
        """This leader's part of what the leaders gave ``save``; any number of replicas share it out."""
        files = sorted(path.glob("rollouts_*.json"))[self.layout.dp_rank :: self.layout.dp]
        return [rollout for file in files for rollout in json.loads(file.read_text())]

    def _prune(self, newest: Path) -> None:
        complete = sorted(p for p in self.folder.glob("step_*") if p.is_dir() and p.suffix != ".tmp")
        for path in [p for p in complete if p != newest][: max(0, len(complete) - self.keep)]:
            shutil.rmtree(path)


def _experts_apart(policy: MegatronPolicy) -> bool:
    """Whether expert parameters are reduced over process groups, and stepped by an optimizer, of their own."""
    return len(getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])) > 1


def _named_chunks(policy: MegatronPolicy) -> list[tuple[str, GPTModel]]:
    if len(policy.model) == 1:
        return [("model", policy.model[0])]
    return [(f"model{index}", chunk) for index, chunk in enumerate(policy.model)]


def _sharded_state(policy: MegatronPolicy, layout: ParallelLayout, *, loading: bool) -> dict[str, Any]:
    metadata = {**_METADATA, "dp_cp_group": layout.dp_cp_group}
    state: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named_chunks(policy)
    }
    model_state = dict(state) if len(state) > 1 else state["model"]
    state["optimizer"] = policy.optimizer.sharded_state_dict(model_state, loading, metadata=metadata)
    return state


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    tracker = get_cuda_rng_tracker().get_states()
    return {**state, **{f"tracker/{name}": value.cpu() for name, value in tracker.items()}}


def _restore_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    prefix = "tracker/"
    get_cuda_rng_tracker().set_states(
        {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    )


def _sync_tree(folder: Path) -> None:
    """The bytes are on the disk before the rename makes them visible."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
