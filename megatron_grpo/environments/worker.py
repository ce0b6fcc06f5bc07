"""The program of one environment worker process; :mod:`megatron_grpo.environments.pool` starts it.

The owner sends the ``EnvConfig`` and then one group at a time; each answer is a pair ``(ok, payload)``.
Rewards travel as lists: tensors would go through torch's shared-memory files.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch

from megatron_grpo.environments.base import Environment, RewardError, split_rewards
from megatron_grpo.environments.loading import load_environment
from megatron_grpo.types import RolloutGroup


def main(conn_fd: int, owner_pid: int) -> None:
    """Serve until the owner closes the connection or dies."""
    # The owner decides when a worker ends. Ctrl-C and a scheduler's preemption signals reach every process of
    # a job step; they must not turn the owner's orderly stop into a failed reward. (Handlers, not SIG_IGN,
    # which programs started by an environment would inherit.)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, _ignore)
    faulthandler.enable()
    # Beside the end of the connection, which a worker stuck in a reward does not see.
    threading.Thread(target=_exit_with_owner, args=(owner_pid,), daemon=True).start()
    torch.set_num_threads(1)
    with Connection(conn_fd) as conn:
        try:
            environment = load_environment(conn.recv())
        except BaseException as error:  # noqa: BLE001 - reported to the owner, which raises it
            conn.send((False, _explain(error)))
            return
        conn.send((True, None))
        while True:
            try:
                group = conn.recv()
            except EOFError:
                return
            conn.send(_score(environment, group))


def _score(environment: Environment, group: RolloutGroup) -> tuple[bool, Any]:
    try:
        result = environment.step(group)
        total, components = split_rewards(group, result)
        rewards = {name.removeprefix("reward/"): values.tolist() for name, values in components.items()}
        metrics = {name: float(value) for name, value in result.metrics.items()}
        return True, (rewards or total.tolist(), metrics)
    except BaseException as error:  # noqa: BLE001 - reported to the owner, which raises it with the prompt's id
        return False, _explain(error)


def _explain(error: BaseException) -> str:
    if isinstance(error, RewardError):
        return str(error)
    own_frame = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, own_frame and own_frame.tb_next))


def _exit_with_owner(owner_pid: int) -> None:
    while os.getppid() == owner_pid:
        time.sleep(1)
    os._exit(1)


def _ignore(number: int, frame: FrameType | None) -> None:
    return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
