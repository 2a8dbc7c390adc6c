"""Every error as ``application/problem+json`` (RFC 9457), and the page that explains each kind.

One table, :data:`api.kinds.KINDS`, holds what a problem's ``code`` means and what to do about it.
The problem's ``type`` is the address of that explanation on the service itself, so it resolves
offline. No text here or in a handler repeats a value of the request or of the data.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from accounting.errors import EpsilondError
from api.kinds import KINDS, Kind, ProblemError, field_path, problem_body

log = logging.getLogger("epsilond.problems")

RETRY_AFTER_SECONDS: Final = 2
MEDIA_TYPE: Final = "application/problem+json"


_OF_STATUS: Final[Mapping[int, str]] = {
    400: "malformed_body",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    415: "unsupported_media_type",
    422: "invalid_request",
    503: "not_ready",
}


def problem(
    code: str,
    *,
    status: int | None = None,
    title: str | None = None,
    detail: str | None = None,
    extra: Mapping[str, object] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """A problem as a response; 503 carries Retry-After and 401 its challenge."""
    body = problem_body(code, status=status, title=title, detail=detail, extra=extra)
    number = body["status"]
    assert isinstance(number, int)  # noqa: S101  (built above)
    all_headers = dict(headers or {})
    if number == HTTPStatus.SERVICE_UNAVAILABLE:
        all_headers.setdefault("Retry-After", str(RETRY_AFTER_SECONDS))
    if number == HTTPStatus.UNAUTHORIZED:
        all_headers.setdefault("WWW-Authenticate", "Bearer")
    return JSONResponse(body, status_code=number, media_type=MEDIA_TYPE, headers=all_headers)


def _located(location: Sequence[str | int], body: object) -> str:
    """The field that a validation error speaks of.

    pydantic's locations hold segments of its own (the branches of a union), which are no part of
    the body and are left out; a field that is missing is named although the body lacks it.
    """
    segments = list(location)
    if not segments or segments[0] != "body":
        return field_path(segments[1:])
    kept: list[str | int] = []
    here = body
    for place, segment in enumerate(segments[1:], start=1):
        if isinstance(here, Mapping) and segment in here:
            here = here[str(segment)]
        elif isinstance(here, list) and isinstance(segment, int) and segment < len(here):
            here = here[segment]
        elif not (isinstance(here, Mapping) and place == len(segments) - 1) or segment == "[key]":
            continue
        kept.append(segment)
    return field_path(kept)


_LIMITS: Final = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "greater than or equal to"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "less than or equal to"),
}


def _expected(item: Mapping[str, Any]) -> str:
    """pydantic's text, but a limit such as 1e-100 is written so, and not with all its digits."""
    name, words = _LIMITS.get(item["type"], ("", ""))
    limit = item.get("ctx", {}).get(name)
    if not isinstance(limit, int | float):
        return str(item["msg"])
    return f"Input should be {words} {limit:.12g}"


def _on_invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101  (registered for it)
    found: list[dict[str, str]] = []
    for item in error.errors():
        # pydantic's text states what was expected; the input itself is left out.
        entry = {"field": _located(item["loc"], error.body), "detail": _expected(item)}
        if entry not in found:
            found.append(entry)
    first = found[0]
    detail = f"{first['field']}: {first['detail']}" if first["field"] else first["detail"]
    return problem(
        "invalid_request", detail=detail, extra={"field": first["field"], "errors": found[:50]}
    )


def _on_epsilond(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, EpsilondError)  # noqa: S101  (registered for it)
    if isinstance(error, ProblemError):
        return problem(error.code, detail=error.detail, extra=error.extra)
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR and error.status != 503:
        report(error)
        return problem("internal_error")
    return problem(
        error.code, status=error.status, title=error.title, detail=error.detail, extra=error.extra
    )


def _on_http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # noqa: S101  (registered for it)
    code = _OF_STATUS.get(error.status_code, "internal_error")
    # The frameworks' own text may quote the request, so the table's text stands instead.
    return problem(code, status=error.status_code, headers=error.headers)


def report(error: BaseException) -> None:
    """Logs an unforeseen error by its type and the lines it passed, never by its text.

    An exception's message may hold the values it was raised over (a driver's message holds the
    statement's parameters), so it is left out.
    """
    frames = traceback.extract_tb(error.__traceback__)
    log.error(
        "unforeseen %s at %s",
        type(error).__name__,
        " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames[-12:])),
    )


class CatchAll:
    """Answers 500 for whatever the handlers below did not, without a traceback's values."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:  # noqa: BLE001  (the last resort of every call)
            report(error)
            if started:
                # The status is gone already; breaking off tells the client that it has a part.
                raise ConnectionError("the answer broke off") from None
            await problem("internal_error")(scope, receive, send)


def install(app: FastAPI) -> None:
    """Registers the handlers that turn every error of the app into a problem."""
    app.add_exception_handler(EpsilondError, _on_epsilond)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)


def page(kinds: Iterable[Kind] = KINDS) -> str:
    """``docs/problems.md``: one anchor for each code. Written by ``python -m api.problems``."""
    lines = [
        "# Problems",
        "",
        "Every error is `application/problem+json` with a stable `code`. Its `type` is",
        "`/problems/CODE` on the service, which shows the same text as this page.",
        "",
    ]
    for kind in kinds:
        lines += [
            f'<a id="{kind.slug}"></a>',
            f"## {kind.slug}",
            "",
            f"`{kind.code}` · {kind.status} · {kind.title}",
            "",
            kind.meaning,
            "",
            kind.remedy,
            "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page())
