from __future__ import annotations

import asyncio

import httpx
import pytest

from megatron_grpo.rollout.auth import KEY_VARIABLE, KeyMiddleware, Receive, Scope, Send, auth_header

KEY = "k" * 32


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def _status(path: str, headers: list[tuple[str, str]], method: str = "POST") -> int:
    async def ask() -> int:
        transport = httpx.ASGITransport(app=KeyMiddleware(_app))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return (await client.request(method, path, headers=headers)).status_code

    return asyncio.run(ask())


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


@pytest.mark.parametrize(
    "path", ["/pause", "/update_weights", "/v1/completions", "/health/x", "/healthz", "/"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_every_route_asks_for_the_key(path: str, method: str) -> None:
    assert _status(path, [], method) == 401
    assert _status(path, [("authorization", "Bearer wrong")], method) == 401
    assert _status(path, [("authorization", KEY)], method) == 401
    assert _status(path, list(auth_header(KEY).items()), method) == 200


def test_two_keys_are_none() -> None:
    assert _status("/pause", [*auth_header(KEY).items(), ("authorization", "Bearer wrong")]) == 401


def test_health_is_open() -> None:
    assert _status("/health", [], "GET") == 200


def test_websocket_without_the_key_is_closed() -> None:
    sent: list[dict[str, object]] = []

    async def send(message: object) -> None:
        sent.append(dict(message))  # type: ignore[call-overload]

    async def receive() -> dict[str, object]:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    asyncio.run(KeyMiddleware(_app)(scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize("key", ["", "short"])
def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(ValueError, match=KEY_VARIABLE):
        KeyMiddleware(_app)
