"""No server outlives its owner, however the owner ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_grpo.rollout import guard

pytestmark = pytest.mark.timeout(60)

# A server with a child in a session of its own, like vLLM's engine core; both ignore SIGTERM.
SERVER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"], start_new_session=True)
time.sleep(0.3)
open(sys.argv[1] + ".part", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(300)
"""

# Argument 1 is the guard's command line; with "fork", a child keeps the guard's pipe open.
OWNER = """
import json, os, subprocess, sys, time
process = subprocess.Popen(json.loads(sys.argv[1]), stdin=subprocess.PIPE, start_new_session=True)
if sys.argv[2] == "fork" and os.fork() == 0:
    open(sys.argv[3], "w").write(str(os.getpid()))
    time.sleep(60)
time.sleep(300)
"""


def _until(condition: Callable[[], bool], what: str, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.05)


def _gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids)


def _guarded(tmp_path: Path, grace_s: float = 0.5) -> list[str]:
    (tmp_path / "private").mkdir()
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    server = [sys.executable, str(script), str(tmp_path / "pids")]
    return [sys.executable, "-P", guard.__file__, str(grace_s), str(tmp_path / "private"), *server]


def _pids(tmp_path: Path) -> list[int]:
    _until((tmp_path / "pids").exists, "the server wrote its process ids")
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


@pytest.mark.parametrize("mode", ["plain", "fork"])
def test_server_tree_ends_after_its_owner_is_killed(tmp_path: Path, mode: str) -> None:
    forked = tmp_path / "forked"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, json.dumps(_guarded(tmp_path)), mode, str(forked)],
    )
    try:
        pids = _pids(tmp_path)
        if mode == "fork":
            _until(lambda: forked.exists() and forked.read_text() != "", "the owner forked")
        owner.kill()
        owner.wait()
        _until(lambda: _gone(pids), "all processes of the server ended")
        _until(lambda: not (tmp_path / "private").exists(), "the private directory was removed")
    finally:
        owner.kill()
        owner.wait()
        if forked.exists():
            os.kill(int(forked.read_text()), signal.SIGKILL)


def test_closing_the_pipe_ends_the_tree(tmp_path: Path) -> None:
    process = subprocess.Popen(_guarded(tmp_path), stdin=subprocess.PIPE, start_new_session=True)
    pids = _pids(tmp_path)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) == 128 + signal.SIGKILL  # SIGTERM was ignored for the whole grace period
    assert _gone(pids)


def test_sigterm_ends_the_tree(tmp_path: Path) -> None:
    process = subprocess.Popen(_guarded(tmp_path), stdin=subprocess.PIPE, start_new_session=True)
    pids = _pids(tmp_path)
    process.terminate()
    process.wait(20)
    assert _gone(pids)


def test_server_dies_with_a_killed_guard(tmp_path: Path) -> None:
    process = subprocess.Popen(_guarded(tmp_path), stdin=subprocess.PIPE, start_new_session=True)
    server, child = _pids(tmp_path)
    try:
        process.kill()
        process.wait()
        _until(lambda: _gone([server]), "the server ended")
    finally:
        os.kill(child, signal.SIGKILL)


def test_status_and_children_of_a_server_that_ends_by_itself(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    server = "import subprocess, sys; print(subprocess.Popen(['sleep', '300']).pid, flush=True); sys.exit(7)"
    process = subprocess.Popen(
        [sys.executable, "-P", guard.__file__, "1", str(tmp_path / "private"), sys.executable, "-c", server],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert process.wait(20) == 7
    assert _gone([child])
    assert not (tmp_path / "private").exists()
