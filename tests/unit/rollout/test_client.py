from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron_grpo.rollout.client import KEEP_ALIVE_S, EngineClient, SamplingParams
from megatron_grpo.rollout.errors import EngineError

Handler = Callable[[httpx.Request], Any]


def _client(handler: Handler, **kwargs: Any) -> EngineClient:
    client = EngineClient("engine3", key="k" * 32, **kwargs)
    client._http = httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://engine")
    return client


def _choice(index: int, tokens: list[int], **changes: Any) -> dict[str, Any]:
    content = [{"token_id": t, "logprob": -0.5 * t} for t in tokens]
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": len(tokens)}]
    choice = {
        "index": index,
        "token_ids": tokens,
        "logprobs": {"content": content},
        "weight_versions": spans,
        "finish_reason": "stop",
    }
    return choice | changes


def _generate(*choices: dict[str, Any], n: int = 1) -> list[Any]:
    client = _client(lambda request: httpx.Response(200, json={"choices": choices}))
    return asyncio.run(client.generate([1, 2], n, SamplingParams(5)))


def test_generate_returns_samples_in_order_with_versions_per_token() -> None:
    first, second = _generate(_choice(1, [7, 8, 2]), _choice(0, [9, 2], finish_reason="length"), n=2)
    assert (first.token_ids, first.finish_reason, first.weight_versions) == ((9, 2), "length", (0, 4))
    assert second.token_ids == (7, 8, 2)
    assert second.logprobs == (-3.5, -4.0, -1.0)
    assert second.weight_versions == (0, 4, 4)


def test_request_asks_for_the_untruncated_distribution_by_token_ids() -> None:
    bodies: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"choices": [_choice(0, [2, 2])]})

    sampling = SamplingParams(5, temperature=0.7, stop_token_ids=(2,))
    asyncio.run(_client(handler).generate([1, 2], 1, sampling, seed=11))
    assert bodies == [
        {
            "token_ids": [1, 2],
            "sampling_params": {
                "n": 1,
                "max_tokens": 5,
                "temperature": 0.7,
                "seed": 11,
                "stop_token_ids": [2],
                "logprobs": 0,
                "detokenize": False,
            },
        }
    ]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"finish_reason": "abort"}, "engine3: a response ended with 'abort'"),
        ({"weight_versions": None}, "engine3: 2 tokens came with 2 log-probs and 0 weight versions"),
        ({"logprobs": {"content": [{"logprob": -1.0}, {"logprob": -9999.0}]}}, "engine3: token 1 .* NaN"),
    ],
)
def test_unusable_answers_are_errors(change: dict[str, Any], match: str) -> None:
    with pytest.raises(EngineError, match=match):
        _generate(_choice(0, [7, 2]) | change)


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(EngineError, match="engine3: asked for 2 responses, got 1"):
        _generate(_choice(0, [7, 2]), n=2)


def test_deadline_names_engine_route_and_seconds() -> None:
    async def late(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(5)
        return httpx.Response(200)

    with pytest.raises(EngineError, match=r"engine3: /pause\?mode=keep had no answer .* deadline of 0.05 s"):
        asyncio.run(_client(late, request_timeout_s=0.05).pause())


def test_error_answer_carries_the_servers_message() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": "prompt too long", "code": 400}})

    with pytest.raises(EngineError, match="engine3: /inference/v1/generate answered 400: prompt too long"):
        asyncio.run(_client(refuse).generate([1], 1, SamplingParams(5)))


def test_dead_process_is_named_instead_of_the_broken_connection() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    def check() -> None:
        raise EngineError("engine3 ended with status 9; the end of its log")

    with pytest.raises(EngineError, match="ended with status 9"):
        asyncio.run(_client(broken, check=check).weight_version())


def test_stale_engine_serves_nothing() -> None:
    client = _client(lambda request: httpx.Response(200))
    client.stale = "refit 4 failed"
    with pytest.raises(EngineError, match=r"engine3 is stale .* refit 4 failed"):
        asyncio.run(client.generate([1], 1, SamplingParams(5)))
    with pytest.raises(EngineError, match="engine3 is stale"):
        asyncio.run(client.score([1, 2]))


def test_prefix_cache_that_was_not_reset_is_an_error() -> None:
    client = _client(lambda request: httpx.Response(200, json={"success": False}))
    with pytest.raises(EngineError, match=r"engine3: .*prefix cache"):
        asyncio.run(client.reset_prefix_cache())


def test_a_connection_that_the_server_gives_up_is_not_used_again(tmp_path: Path) -> None:
    """A training step between two rollouts may last as long as the server keeps an idle connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                if loop.time() - last > KEEP_ALIVE_S:
                    break  # closed in the middle of the request: no response
                body = b'{"weight_version": "3"}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
                last = loop.time()
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()

    async def run() -> list[int]:
        socket = tmp_path / "s"
        async with await asyncio.start_unix_server(serve, socket):
            client = EngineClient("engine3", key="k" * 32, uds=socket)
            versions = [await client.weight_version()]
            await asyncio.sleep(KEEP_ALIVE_S + 0.3)
            versions.append(await client.weight_version())
            await client.close()
        return versions

    assert asyncio.run(run()) == [3, 3]
