"""HTTP client of one vLLM engine: token ids in, token ids out, and vLLM's pause and weight-transfer routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from megatron_grpo.rollout.auth import OPEN_PATH, auth_header
from megatron_grpo.rollout.errors import EngineError
from megatron_grpo.types import FinishReason

SERVED_MODEL = "policy"
KEEP_ALIVE_S = 2.0
"""Idle connections are given up after this: well before any server does (uvicorn: 5 s), or a request that is sent
just when the server closes its connection fails."""
_NOT_A_LOGPROB = -9999.0  # what vLLM puts in place of NaN and minus infinity

# One line for every request of a rollout drowns all others.
logging.getLogger("httpx").setLevel(logging.WARNING)


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt's group is sampled: from the whole distribution (no top-p, no top-k, no penalties).

    Attributes:
        max_new_tokens: a response ends here unless an end token comes first.
        temperature: logits are divided by it; 0 is greedy.
        stop_token_ids: end tokens; the model's own (``eos_token_id``) always end a response.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One sampled response; every tuple has one entry for each token, the end token included.

    ``logprobs`` are those of the distribution that was sampled from: log_softmax(logits / temperature).
    ``weight_versions`` are the versions given to finish_weight_update; 0 before the first.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason


class EngineClient:
    """One engine. All calls are coroutines, all waits have a deadline, all failures are EngineError with its name.

    A stale engine (``stale`` holds the reason) refuses to generate and score until a refit succeeds.

    Args:
        name: what errors call the engine.
        base_url: ``http://host:port`` of a remote engine; for a unix socket leave it out and give ``uds``.
        key: the run's key, asked for by :class:`megatron_grpo.rollout.auth.KeyMiddleware`.
        request_timeout_s: deadline of one prompt's group, and of every control call.
        check: called when a request fails; raises EngineError with the log tail if the process is dead.
    """

    def __init__(
        self,
        name: str,
        *,
        key: str,
        base_url: str = "http://engine",
        uds: Path | None = None,
        request_timeout_s: float = 600,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.stale: str | None = None
        self.request_timeout_s = request_timeout_s
        self._check = check
        # The engine queues; a limit here would only hide requests from its scheduler.
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEP_ALIVE_S
        )
        transport = httpx.AsyncHTTPTransport(uds=str(uds) if uds else None, limits=limits)
        self._http = httpx.AsyncClient(
            transport=transport, base_url=base_url, headers=auth_header(key), timeout=None, trust_env=False
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        timeout_s = self.request_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._http.request(method, path, json=body)
        except TimeoutError as error:
            await self._explain()
            raise EngineError(
                f"{self.name}: {path} had no answer within its deadline of {timeout_s:g} s"
            ) from error
        except httpx.TransportError as error:
            await self._explain()
            raise EngineError(f"{self.name}: {path} failed: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            if response.status_code >= 500:
                await self._explain()
            raise EngineError(f"{self.name}: {path} answered {response.status_code}: {_message(response)}")
        return response.json() if response.content else None

    async def _explain(self) -> None:
        """Raises the better error, with the end of the log, if the engine's process is dead or dying."""
        if self._check is None:
            return
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            self._check()
            if await self.is_healthy():
                return
            await asyncio.sleep(0.2)

    def _refuse_if_stale(self) -> None:
        if self.stale is not None:
            raise EngineError(f"{self.name} is stale and does not serve until a refit succeeds: {self.stale}")

    async def is_healthy(self, timeout_s: float = 5) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                return (await self._http.get(OPEN_PATH)).status_code == 200
        except (TimeoutError, httpx.TransportError):
            return False

    async def generate(
        self, prompt_token_ids: Sequence[int], n: int, sampling: SamplingParams, seed: int | None = None
    ) -> list[Completion]:
        """Samples ``n`` responses; sample i draws from seed + i, so the same seed gives the same samples."""
        self._refuse_if_stale()
        body = {
            "token_ids": list(prompt_token_ids),
            "sampling_params": {
                "n": n,
                "max_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "seed": seed,
                "stop_token_ids": list(sampling.stop_token_ids),
                "logprobs": 0,
                "detokenize": False,
            },
        }
        answer = await self._request("POST", "/inference/v1/generate", body)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != n:
            raise EngineError(f"{self.name}: asked for {n} responses, got {len(choices)}")
        return [self._completion(choice) for choice in choices]

    def _completion(self, choice: dict[str, Any]) -> Completion:
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise EngineError(
                f"{self.name}: a response ended with {reason!r}; only 'stop' and 'length' can be used"
            )
        token_ids = tuple(choice["token_ids"])
        versions: list[int] = []
        for span in choice["weight_versions"] or ():
            versions += [_version(span["version"])] * (span["end"] - span["start"])
        logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
        if not len(token_ids) == len(logprobs) == len(versions):
            raise EngineError(
                f"{self.name}: {len(token_ids)} tokens came with {len(logprobs)} log-probs and {len(versions)} "
                "weight versions"
            )
        if logprobs and min(logprobs) <= _NOT_A_LOGPROB:
            raise EngineError(
                f"{self.name}: token {logprobs.index(min(logprobs))} of a response has a log-prob of NaN or minus "
                "infinity; its weights or activations are not finite"
            )
        return Completion(token_ids, logprobs, tuple(versions), reason)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of ``token_ids[1:]`` given the tokens before them; len(token_ids) - 1 values."""
        self._refuse_if_stale()
        body = {
            "token_ids": list(token_ids),
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": 0,
                "detokenize": False,
            },
        }
        answer = await self._request("POST", "/inference/v1/generate", body)
        prompt_logprobs = answer["prompt_logprobs"]
        return [entry[str(t)]["logprob"] for t, entry in zip(token_ids[1:], prompt_logprobs[1:], strict=True)]

    async def weight_version(self) -> int:
        """Version of the weights that the engine serves; 0 for those it was started with."""
        answer = await self._request("GET", "/weight_info")
        return _version(answer["weight_version"])

    async def pause(self) -> None:
        """Freezes running requests where they are; new ones queue until :meth:`resume`."""
        await self._request("POST", "/pause?mode=keep")

    async def resume(self) -> None:
        await self._request("POST", "/resume")

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached keys and values; running (paused) requests compute theirs again."""
        answer = await self._request("POST", "/reset_prefix_cache?reset_running_requests=true")
        if not answer["success"]:
            raise EngineError(
                f"{self.name}: vLLM could not reset its prefix cache; cached values of old weights remain"
            )

    async def start_weight_update(self) -> None:
        await self._request("POST", "/start_weight_update")

    async def update_weights(self, bucket: Path) -> None:
        await self._request("POST", "/update_weights", {"update_info": {"path": str(bucket)}})

    async def finish_weight_update(self, version: int) -> None:
        await self._request("POST", "/finish_weight_update", {"weight_version": str(version)})

    async def abandon_weight_update(self) -> None:
        """Clears an update that failed half-way; see :class:`megatron_grpo.refit.vllm_plugin.WorkerExtension`."""
        await self._collective("abandon_weight_update")

    async def received_fingerprints(self) -> list[dict[str, str]]:
        """Per worker: tensor name -> fingerprint of what the latest weight update brought."""
        return await self._collective("received_fingerprints")

    async def _collective(self, method: str) -> list[Any]:
        answer = await self._request("POST", "/collective_rpc", {"method": method})
        return list(answer["results"])


def _version(reported: str) -> int:
    return 0 if reported == "default" else int(reported)


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text[:2000]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]
