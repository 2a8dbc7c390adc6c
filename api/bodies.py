"""Requests on their way in: the key first, then a strictly parsed, size-limited body.

:class:`ServiceRoute` is the class of every route. It authenticates before a byte of the body is
read, and parses JSON strictly (:mod:`api.strict`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth import ACCESS, Principal, bearer_of, principal_of, require_scope
from api.kinds import ProblemError
from api.strict import MAX_JSON_BYTES, strict_json

# A body this short has most likely arrived with its head.
_SHORT_BODY_BYTES: Final = 64 * 1024


async def limited_stream(request: Request, limit: int) -> AsyncIterator[bytes]:
    """The body's chunks, refused as soon as they exceed ``limit`` bytes.

    Raises:
        ProblemError: too_large; or upload_incomplete, if the client went away.
    """
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared[:20]) > limit:
        raise ProblemError("too_large", extra={"limit_bytes": limit})
    seen = 0
    try:
        async for chunk in request.stream():
            seen += len(chunk)
            if seen > limit:
                raise ProblemError("too_large", extra={"limit_bytes": limit})
            if chunk:
                yield chunk
    except ClientDisconnect:
        raise ProblemError("upload_incomplete") from None
    if declared is not None and declared.isdigit() and seen < int(declared[:20]):
        raise ProblemError("upload_incomplete")


class CloseUnread:
    """Closes the connection after an answer that came before a long body was read.

    A server reads on and throws away what is left of a body, so that the connection can be used
    again; a client that never ends would be read for ever.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        unread = _has_long_body(Headers(scope=scope))

        async def watched_receive() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body", False))
            return message

        async def watched_send(message: Message) -> None:
            if unread and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self.app(scope, watched_receive, watched_send)


def _has_long_body(headers: Headers) -> bool:
    declared = headers.get("content-length", "0")
    chunked = "transfer-encoding" in headers
    return chunked or not declared.isdigit() or int(declared[:20]) > _SHORT_BODY_BYTES


class _ParsedRequest(Request):
    """A request whose body was read and parsed already."""

    def __init__(self, request: Request, raw: bytes, value: object) -> None:
        async def nothing_more() -> Message:
            return {"type": "http.disconnect"}

        super().__init__(request.scope, nothing_more)
        self._raw = raw
        self._value = value

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._value


class ServiceRoute(APIRoute):
    """A route that authenticates first and reads its body strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        method, *_ = sorted(self.methods or ("",))
        access = ACCESS[method, self.path]
        takes_json = self.body_field is not None

        async def serve(request: Request) -> Response:
            request.state.principal = None
            if not access.public:
                key = bearer_of(request.headers.get("authorization"))
                principal = await run_in_threadpool(_authenticate, request, key)
                # First, so that the log of a call that is refused says whose it was.
                request.state.principal = principal
                require_scope(principal, access)
            if takes_json:
                _require_json(request.headers)
                raw = b"".join([c async for c in limited_stream(request, MAX_JSON_BYTES)])
                # Routes that bind a body to a key hash it as it was sent.
                request.state.json = strict_json(raw)
                request = _ParsedRequest(request, raw, request.state.json)
            return await handler(request)

        return serve


def _authenticate(request: Request, key: str) -> Principal:
    return principal_of(request.app.state.service.database, key)


def _require_json(headers: Mapping[str, str]) -> None:
    kind = headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise ProblemError("unsupported_media_type", "Send a body of type application/json.")
