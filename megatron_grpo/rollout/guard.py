"""Stands between an owner and the server that it started, so that no server outlives its owner.

Run as a script: ``python guard.py GRACE_S DIRECTORY COMMAND...``. Standard input is a pipe whose other end only
the owner holds. The server's whole process tree is ended, and DIRECTORY removed, as soon as the pipe closes (the
owner stopped it, or died by any means), the owner is no longer this process's parent (a forked child of
the owner may keep the pipe open), SIGTERM arrives, or the server itself ends. Exits with the server's status.

Needs only the standard library and psutil: it starts in milliseconds and has nothing to fail on.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import psutil  # type: ignore[import-untyped]

logger = logging.getLogger("guard")

_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _die_with_guard() -> None:
    # Only if the guard itself is killed; this thread is the guard's only one, so the signal cannot come early.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_tree(server: subprocess.Popen[Any], grace_s: float) -> None:
    """SIGTERM to the server, after ``grace_s`` SIGKILL to all that is left of its tree."""
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(grace_s)
        except subprocess.TimeoutExpired:
            logger.warning("the server did not end within %g s of SIGTERM; killing it", grace_s)
            server.kill()
            server.wait()
    # Children of a dead server are ours now (subreaper). Those that end with it by themselves may clean up first:
    # multiprocessing's resource tracker removes the server's semaphores.
    psutil.wait_procs(psutil.Process().children(recursive=True), timeout=1)
    # Repeat: one may have forked meanwhile.
    while left := psutil.Process().children(recursive=True):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=1)


def _watch(server: subprocess.Popen[Any], owner: int, stop_fd: int) -> str:
    """Waits until the server must end, or has ended; says why."""
    while True:
        readable, _, _ = select.select([0, stop_fd], [], [], _POLL_S)
        if stop_fd in readable:
            return "SIGTERM"
        if 0 in readable and not os.read(0, 4096):
            return "the owner closed its pipe"
        if os.getppid() != owner:
            return f"the owner, process {owner}, is gone"
        if server.poll() is not None:
            return f"the server ended with status {server.returncode}"


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    grace_s, directory, command = float(argv[0]), argv[1], argv[2:]
    owner = os.getppid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    stop_fd, wake_fd = os.pipe()
    os.set_blocking(wake_fd, False)
    signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_guard)
    try:
        reason = _watch(server, owner, stop_fd)
        logger.info("%s", reason)
    finally:
        started = time.monotonic()
        _end_tree(server, grace_s)
        shutil.rmtree(directory, ignore_errors=True)
        logger.info("all processes ended after %.1f s", time.monotonic() - started)
    status = server.returncode
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
