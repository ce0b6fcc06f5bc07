"""The key that every route of an engine asks for. Runs inside the vLLM server (``--middleware``).

vLLM's own ``--api-key`` guards only ``/v1`` and ``/inference``; the weight, pause and cache routes would be open.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "MEGATRON_GRPO_ENGINE_KEY"
"""Environment variable that carries the key from the owner to the server (never on a command line)."""

OPEN_PATH = "/health"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def auth_header(key: str) -> dict[str, str]:
    """The request header that carries ``key``."""
    return {"authorization": f"Bearer {key}"}


class KeyMiddleware:
    """ASGI middleware: 401 for every request without the key, but for ``GET /health``."""

    def __init__(self, app: App) -> None:
        key = os.environ.get(KEY_VARIABLE, "")
        if len(key) < 16:
            raise ValueError(
                f"{KEY_VARIABLE} holds {len(key)} characters; the owner of an engine must set it to a random key "
                "of 16 or more"
            )
        self.app = app
        self.expected = auth_header(key)["authorization"].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == OPEN_PATH or self._has_key(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send(
                {
                    "type": "http.response.body",
                    "body": b'{"error": "this engine asks for the key of its run"}',
                }
            )

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self.expected)
