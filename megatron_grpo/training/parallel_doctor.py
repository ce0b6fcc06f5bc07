"""``megatron-grpo doctor parallel``: is a run's loss, gradient and log-prob the same in its layout as in one process?

Parallelism is switched on one factor at a time, so that the first line that disagrees names the factor to look at. Each
factor gets a process group of its own over as many ranks as it needs, and the ranks meet in one key-value store.

This module imports no Megatron: on a CPU the platform goes in first, in each rank.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from megatron_grpo.config import ConfigError, RunConfig
from megatron_grpo.config.parallel import ParallelConfig
from megatron_grpo.parallel import platform
from megatron_grpo.parallel.layout import ParallelLayout, initialize_layout
from megatron_grpo.training.parallel_factors import Examination, Factor, plan_examination

if TYPE_CHECKING:
    from megatron_grpo.training.differential import Difference, Problem

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3}  # fp32: Transformer Engine's kernels, with TF32
COLLECTIVE_TIMEOUT_S = 60.0
_FACTOR_TIMEOUT_S = 300.0
_VERDICT = "verdict"

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Outcome:
    """Of one factor on one rank: the differences by kind, or the traceback of an error and when it came."""

    found: dict[str, Difference]
    error: str | None = None
    when: float = 0.0


def diagnose(run: RunConfig, say: Say) -> int:
    """Examine ``run`` and say the result; the exit status: 0 if all factors agree, else 1.

    Under torchrun or srun (``WORLD_SIZE`` is set) this process is one of the ranks; otherwise the ranks are started
    here, on the CPU.

    Args:
        say: takes each line; called on rank 0 only, so it must survive pickling.

    Raises:
        ConfigError: the run cannot be examined.
    """
    if "WORLD_SIZE" in os.environ:
        rank, world = _launched()
        examination = plan_examination(run, world)
        store, rank, _ = next(rendezvous("env://", rank, world))
        examine(examination, store, rank, say)
        return int(store.get(_VERDICT))

    examination = plan_examination(run)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # a file of this user alone: what is in the store is unpickled
        path = os.path.join(folder, "store")
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _start_rank,
                (examination, path, say, examine),
                examination.ranks,
                daemon=True,
                start_method="spawn",
            )
        except (ProcessExitedException, ProcessRaisedException) as error:
            say(f"rank {error.error_index} of the doctor ended before the result: {str(error).strip()}")
            return 1
        return int(FileStore(path, -1).get(_VERDICT))


def _launched() -> tuple[int, int]:
    """Rank and world size that torchrun or launch/slurm.sbatch set."""
    values = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    numbers = [values[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    if not all(number.isdecimal() for number in numbers) or not values["MASTER_ADDR"]:
        given = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise ConfigError(
            f"WORLD_SIZE is set, so this is a rank of torchrun or srun, but they are not all there: {given}; start the "
            "doctor with launch/torchrun.sh or launch/slurm.sbatch, or unset WORLD_SIZE to let it start its own ranks"
        )
    return int(values["RANK"]), int(values["WORLD_SIZE"])


def _start_rank(rank: int, examination: Examination, path: str, say: Say, entry: Callable[..., None]) -> None:
    # a rank that waits in the store would not see KeyboardInterrupt
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    entry(examination, FileStore(path, -1), rank, say)


def examine(examination: Examination, store: Store, rank: int, say: Say) -> None:
    """What every rank runs: all factors, and on rank 0 the lines and the verdict."""
    logging.captureWarnings(True)
    logging.disable(logging.WARNING)  # Megatron and torch warn about themselves, on every rank
    platform.install()
    from megatron_grpo.training.differential import BatchSpec, Problem, solve, write_random_model

    if platform.is_cpu():
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store.set_timeout(timedelta(seconds=_FACTOR_TIMEOUT_S))
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder), examination.hf_config)
        run, base = examination.run, examination.factors[0].policy
        policy = base.model_copy(update={"model_path": model})
        batch = BatchSpec(examination.rows, "masked")
        problem = Problem(policy, run.loss_fn, run.generation.temperature, batch)
        if rank == 0:
            for line in _introduction(examination):
                say(line)
            with _world(store, "reference", 0, 1, ParallelConfig()) as layout:
                _put(store, "reference", solve(problem, layout))
        solved = _get(store, "reference")
        first: str | None = None
        for factor in examination.factors:
            if rank < factor.ranks:
                _put(store, f"{factor.name}/{rank}", _outcome(factor, problem, solved, store, rank))
            if rank == 0:
                outcomes = [_get(store, f"{factor.name}/{r}") for r in range(factor.ranks)]
                agrees, text, trace = _judged(outcomes, _precision(factor))
                say(f"{factor.name:12} {'ok' if agrees else 'DISAGREES':10} {text}  ({_described(factor)})")
                for line in trace:
                    say(f"    {line}")
                first = first or (None if agrees else factor.name)
                _put(store, f"{factor.name}/failed", bool(trace))
            if _get(store, f"{factor.name}/failed"):
                break  # what ranks that waited for the failed one hold is of no use to the next factor
        if rank == 0:
            say(_conclusion(first))
            store.set(_VERDICT, "0" if first is None else "1")
        store.wait([_VERDICT])


def _outcome(factor: Factor, problem: Problem, solved: Any, store: Store, rank: int) -> _Outcome:
    """The differences of this rank, or what went wrong and when."""
    from megatron_grpo.policy.policy import MegatronPolicy
    from megatron_grpo.training.differential import answer_in_layout, as_float64, differences

    batch, expected = solved
    policy = factor.policy.model_copy(update={"model_path": problem.policy.model_path})
    policy = (
        as_float64(policy)
        if _precision(factor) == "fp64"
        else policy.model_copy(update={"precision": "fp32"})
    )
    try:
        with _world(store, factor.name, rank, factor.ranks, policy.parallel) as layout:
            built = MegatronPolicy(
                policy, layout, temperature=problem.temperature, total_optimizer_steps=1, with_reference=False
            )
            answer = answer_in_layout(built, problem, batch)
        return _Outcome(differences(answer, expected))
    except Exception:  # noqa: BLE001 - whatever it is, it is the finding
        return _Outcome({}, traceback.format_exc(), time.time())


def _judged(outcomes: Sequence[_Outcome], precision: str) -> tuple[bool, str, list[str]]:
    """Whether a factor passes; the worst difference over the ranks, or the first error; and its traceback."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        first = min(failed, key=lambda outcome: outcome.when)  # the others have lost this rank
        *trace, text = (first.error or "").splitlines()
        return False, text, trace
    found = [(d, kind) for outcome in outcomes for kind, d in outcome.found.items()]
    worst, kind = max(found, key=lambda item: item[0].error)
    name = "" if worst.name == kind else f" {worst.name}"
    return worst.error <= TOLERANCE[precision], f"{worst.error:.1e} at most, in {kind}{name}", []


def _precision(factor: Factor) -> str:
    """float64 with the local layers, or float32 where the run would use Transformer Engine and it can."""
    from megatron_grpo.policy.model_builder import uses_transformer_engine

    # Transformer Engine has no float32 attention for packed sequences or context parallelism
    plain = not factor.policy.sequence_packing.enabled and factor.policy.parallel.context_parallel_size == 1
    return "fp32" if plain and uses_transformer_engine(factor.policy.layer_spec) else "fp64"


@contextmanager
def _world(
    store: Store, name: str, rank: int, size: int, parallel: ParallelConfig
) -> Iterator[ParallelLayout]:
    """A default process group and Megatron's groups of ``size`` ranks."""
    from megatron.core import parallel_state

    dist.init_process_group(
        platform.distributed_backend(),
        store=PrefixStore(f"world/{name}", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    try:
        yield initialize_layout(**parallel.group_sizes(), timeout_s=COLLECTIVE_TIMEOUT_S)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _put(store: Store, key: str, value: Any) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    store.set(key, buffer.getvalue())  # type: ignore[arg-type]


def _get(store: Store, key: str) -> Any:
    """Tensors and these types only: whoever reaches the store's port can write to it."""
    from megatron_grpo.policy.experience import Experience
    from megatron_grpo.training.differential import Answer, Difference

    with torch.serialization.safe_globals([_Outcome, Answer, Difference, Experience]):
        return torch.load(io.BytesIO(store.get(key)), weights_only=True)


# ---- what is said


def _introduction(examination: Examination) -> Iterator[str]:
    factors = examination.factors
    yield (
        f"doctor parallel: {len(factors)} comparisons with one process in float64, on up to {examination.ranks} "
        f"ranks; {examination.rows} rows, a shrunk model with random weights"
    )
    for line in examination.reduced:
        yield f"  {line}"


def _described(factor: Factor) -> str:
    parallel, packing = factor.policy.parallel, factor.policy.sequence_packing
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "VPP": parallel.virtual_pipeline_model_parallel_size or 1,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_model_parallel_size,
        "ETP": parallel.expert_tensor_parallel_size or 1,
        "DP": factor.ranks // parallel.model_parallel_size,
    }
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    sp = " with SP" if parallel.sequence_parallel else ""
    cut = (
        f"packed to {packing.train_mb_tokens} tokens"
        if packing.enabled
        else (f"micro-batches of {factor.policy.train_micro_batch_size}")
    )
    return f"{layout}{sp}, {cut}, {_precision(factor)}"


def _conclusion(first: str | None) -> str:
    if first is None:
        return "all agree: loss, metrics, log-probs and gradients do not depend on the layout"
    return (
        f"the first that disagrees is {first}: what it adds to the lines before it gives other numbers than one "
        "process; do not train in this layout"
    )
