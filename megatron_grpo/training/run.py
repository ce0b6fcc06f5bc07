"""The process around a training run: logging, process group, errors, exit status.

Import it after ``parallel.platform.install()``, which must precede Megatron.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console

from megatron_grpo.config import RunConfig
from megatron_grpo.environments.base import RewardError
from megatron_grpo.parallel import platform
from megatron_grpo.parallel.agreement import PeerError
from megatron_grpo.parallel.layout import initialize_layout
from megatron_grpo.policy.optimizer import NonFiniteGradientError
from megatron_grpo.refit.attestation import RefitError
from megatron_grpo.refit.monitor import LogprobMismatchError
from megatron_grpo.rollout.errors import EngineError
from megatron_grpo.training.checkpoint import CheckpointError
from megatron_grpo.training.preflight import check_run
from megatron_grpo.training.session import TrainingSession
from megatron_grpo.training.signals import StopRequest

log = logging.getLogger(__name__)

# Errors that say all there is to say: shown without a traceback (which goes to the rank's log file).
_EXPLAINED = (
    ValueError, CheckpointError, EngineError, LogprobMismatchError, NonFiniteGradientError, RefitError, RewardError,
)  # fmt: skip


def run_training(config: RunConfig, console: Console, stop: StopRequest) -> int:
    """Train ``config`` on this rank; the exit status. Called on every rank."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with ExitStack() as stack:
        try:
            if rank == 0:
                check_run(config, world_size)
            _initialize_distributed(config, rank, world_size)
            stack.callback(dist.destroy_process_group)
            layout = initialize_layout(
                **config.policy.parallel.group_sizes(), timeout_s=config.distributed_timeout_s
            )
            session = TrainingSession(config, layout, console, stop, stack)
            session.train()
            dist.barrier()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - reported, and the exit status says it
            # before anything is taken down: the first cause is the first thing that is said
            status = _report(error, rank, console, config, stop)
            stop.ignore()  # torchrun's SIGTERM, once another rank has left, must not cut the taking down short
            return status
    return 0


def _report(error: BaseException, rank: int, console: Console, config: RunConfig, stop: StopRequest) -> int:
    # after a second Ctrl-C a rank that is inside a collective only sees the others leave
    if isinstance(error, KeyboardInterrupt) or (stop.name == "SIGINT" and _lost_a_rank(error)):
        if rank == 0 and not stop.rank_failed:
            log.error(
                "ended by %s; the last checkpoint, if any, is whole: the same command continues from it",
                stop.name,
            )
        return stop.exit_status
    if isinstance(error, PeerError):
        log.debug("another rank failed and says why", exc_info=error)
        return 1
    if _lost_a_rank(error):
        log.debug("the error was raised here", exc_info=error)
        log.error(
            "rank %d lost another rank, which ended or gave no answer within distributed_timeout_s %g; it or the "
            "launcher says why, here or in %s (%s)",
            rank, config.distributed_timeout_s, config.run_dir / "logs", _first_line(error),
        )  # fmt: skip
        return 1
    if isinstance(error, _EXPLAINED):
        log.debug("the error was raised here", exc_info=error)
        log.error("%s", error)
    else:
        log.error("unexpected error on rank %d", rank, exc_info=error)
    if rank != 0:  # whose log goes to a file only
        text = f"rank {rank}: {type(error).__name__}: {error}\ntraceback in {config.run_dir}/logs/rank_{rank}.log"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 1


def _lost_a_rank(error: BaseException) -> bool:
    """Whether a collective failed: NCCL and the store raise DistError, gloo a RuntimeError that names its file."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/" in str(error))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]


def _initialize_distributed(config: RunConfig, rank: int, world_size: int) -> None:
    if not platform.is_cpu():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=config.distributed_timeout_s)
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(platform.distributed_backend(), timeout=timeout)
    else:  # a single rank without torchrun
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group(
            platform.distributed_backend(), store=store, rank=rank, world_size=world_size, timeout=timeout
        )
