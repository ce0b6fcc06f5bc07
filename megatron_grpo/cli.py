"""The command line: ``megatron-grpo`` and ``python -m megatron_grpo``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
import yaml

from megatron_grpo.config import ConfigError, RunConfig, load_config

app = typer.Typer(
    help="GRPO post-training on megatron-core policies with vLLM rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

doctor = typer.Typer(help="Checks of an installation, beyond those of plan.", no_args_is_help=True)
app.add_typer(doctor, name="doctor")

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="YAML file, see configs/")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value]...", help="for example grpo.seed=1")
]


def _load(config: Path, overrides: list[str] | None) -> RunConfig:
    return load_config(config, overrides or [])


@app.command()
def plan(
    config: ConfigOption,
    world_size: Annotated[int, typer.Option(min=1, help="ranks of the run")] = 1,
    master_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="check that this host can listen on it")
    ] = None,
    show: Annotated[bool, typer.Option(help="print the resolved configuration")] = False,
    overrides: Overrides = None,
) -> None:
    """Check a run before anything starts: configuration, layout, model directory, data, port."""
    from megatron_grpo.training.preflight import check_port, check_run

    run = _load(config, overrides)
    try:
        check_run(run, world_size)
        if master_port is not None:
            check_port(master_port)
    except ValueError as error:
        _refuse(error)
    parallel = run.policy.parallel
    typer.echo(
        f"plan: {world_size} ranks = TP {parallel.tensor_model_parallel_size} x "
        f"PP {parallel.pipeline_model_parallel_size} x CP {parallel.context_parallel_size} x "
        f"DP {parallel.data_parallel_size(world_size)}; {run.grpo.max_num_steps} steps of "
        f"{run.grpo.num_prompts_per_step} prompts x {run.grpo.num_generations_per_prompt} rollouts, "
        f"{run.optimizer_steps_per_rollout} optimizer steps each; writes to {run.run_dir}"
    )
    if show:
        typer.echo(yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False))


@app.command()
def train(config: ConfigOption, overrides: Overrides = None) -> None:
    """Train. Run by torchrun or srun on every rank (see launch/); alone it is one rank."""
    from megatron_grpo.training.signals import StopRequest, leave_with_launcher

    stop = StopRequest()
    leave_with_launcher()
    run = _load(config, overrides)
    from megatron_grpo.observability.console import setup_logging

    console = setup_logging(run.run_dir, int(os.environ.get("RANK", "0")))  # first: importing Megatron warns
    from megatron_grpo.parallel import platform

    platform.install()
    from megatron_grpo.training.run import run_training

    sys.exit(run_training(run, console, stop))


@doctor.command("parallel")
def doctor_parallel(config: ConfigOption, overrides: Overrides = None) -> None:
    """Compare loss, gradients, metrics and log-probs of this layout with one process, factor by factor.

    Uses a shrunk model with random weights: no GPU, weights or engine is needed. Starts the ranks itself on the
    CPU, at most 8; under torchrun or srun it uses the ranks of the allocation.
    """
    from megatron_grpo.training.parallel_doctor import diagnose

    sys.exit(diagnose(_load(config, overrides), typer.echo))


def main() -> None:
    """Entry point: an error that a user can mend is one message, without a traceback."""
    try:
        app()
    except ConfigError as error:
        _refuse(error)
    except KeyboardInterrupt:
        sys.exit(130)


def _refuse(error: Exception) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"error: {error}", err=True)
    sys.exit(2)
