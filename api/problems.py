"""Every error as ``application/problem+json`` (RFC 9457), and the page that explains each kind.

One table, :data:`KINDS`, holds what a problem's ``code`` means and what to do about it. The
problem's ``type`` is the address of that explanation on the service itself, so it resolves offline.
No text here or in a handler repeats a value of the request or of the data.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from accounting.errors import EpsilondError

log = logging.getLogger("epsilond.problems")

RETRY_AFTER_SECONDS: Final = 2
MEDIA_TYPE: Final = "application/problem+json"


@dataclass(frozen=True)
class Kind:
    """What a problem code means: its usual status, a title, and what the caller can do."""

    code: str
    status: int
    title: str
    meaning: str
    remedy: str

    @property
    def slug(self) -> str:
        return self.code.replace("_", "-")


KINDS: Final[tuple[Kind, ...]] = (
    Kind(
        "malformed_json",
        400,
        "Malformed JSON",
        "The body is not JSON text in UTF-8, or is nested too deeply.",
        "Send one JSON value; numbers must be finite (RFC 8259 has no NaN or Infinity).",
    ),
    Kind(
        "malformed_body",
        400,
        "Malformed body",
        "The body of an upload could not be read: a multipart part is missing, repeated or broken.",
        "Send the file as the raw body or as the part `file`, or separate files as the parts "
        "`images`, `labels` and `units`.",
    ),
    Kind(
        "upload_incomplete",
        400,
        "Upload incomplete",
        "The body ended before its declared length. Nothing was kept.",
        "Send the upload again.",
    ),
    Kind(
        "unauthenticated",
        401,
        "A key is needed",
        "No key was sent, or the key is unknown or revoked.",
        "Send `Authorization: Bearer KEY`.",
    ),
    Kind(
        "forbidden",
        403,
        "The key lacks the scope",
        "The key is valid, but none of its scopes allows this call.",
        "Use a key with one of the scopes named in `scopes`.",
    ),
    Kind(
        "not_found",
        404,
        "Not found",
        "There is no such object, or this key may not know that there is.",
        "Check the id and the key's organisation. The two cases are told apart for nobody.",
    ),
    Kind(
        "method_not_allowed",
        405,
        "Method not allowed",
        "The address exists, but not with this method.",
        "See the `Allow` header.",
    ),
    Kind(
        "name_taken",
        409,
        "Name taken",
        "The organisation already has an object of this name.",
        "Choose another name.",
    ),
    Kind(
        "budget_not_raised",
        409,
        "Budget not raised",
        "A budget is fixed once: it is never raised, and its declared use stays.",
        "Lower epsilon or delta, or change only the caps of organisations and the threshold for "
        "approval.",
    ),
    Kind(
        "no_budget",
        409,
        "No budget",
        "The dataset has no budget yet, so nothing can be quoted or charged.",
        "The owner sets it with `PUT /v1/datasets/{id}/budget`.",
    ),
    Kind(
        "budget_exhausted",
        409,
        "Budget exhausted",
        "No filter of the dataset's family stays within its cap with this charge added. Nothing "
        "was charged.",
        "`scope` says whether the `dataset`'s budget or your `organisation`'s share of it refused; "
        "`requested`, `remaining` and `blocking` show each filter; `largest_that_fits`, where it "
        "is not null, is a number of outputs that would be admitted now.",
    ),
    Kind(
        "no_snapshot",
        409,
        "No snapshot",
        "The dataset has no snapshot, so a job would have nothing to run on.",
        "The owner uploads one with `POST /v1/datasets/{id}/snapshots`.",
    ),
    Kind(
        "ledger_inconsistent",
        409,
        "Ledger inconsistent",
        "The tables say something else than the books: a job's mechanism is not the one charged.",
        "The operator runs `epsilond verify-ledger` on the dataset; nothing starts meanwhile.",
    ),
    Kind(
        "parent_not_released",
        409,
        "Parent not released",
        "The release that the job would process does not exist.",
        "Name a release of this dataset.",
    ),
    Kind(
        "not_cancellable",
        409,
        "Not cancellable",
        "Only a job that never started can be cancelled; a started job's charge is never taken "
        "back, nor is any part of a plan that started.",
        "Wait for the job to end.",
    ),
    Kind(
        "not_awaiting_approval",
        409,
        "Not awaiting approval",
        "The job needs no approval, or its owner decided already, or it ended.",
        "See the job's `state`.",
    ),
    Kind(
        "lease_lost",
        409,
        "Lease lost",
        "Another attempt holds the job.",
        "Nothing: workers see this among themselves.",
    ),
    Kind(
        "too_large",
        413,
        "Too large",
        "The body is larger than the service's limit. Nothing was kept.",
        "See `limit_bytes`.",
    ),
    Kind(
        "unsupported_media_type",
        415,
        "Unsupported media type",
        "The body's content type is not one that the call reads.",
        "Send `application/json`, or for an upload `multipart/form-data` or a raw body.",
    ),
    Kind(
        "invalid_request",
        422,
        "Invalid request",
        "A field is missing, unknown, of the wrong type or out of range.",
        "`field` names it; `errors` lists every field at fault.",
    ),
    Kind(
        "invalid_mechanism",
        422,
        "Invalid mechanism",
        "A mechanism's field is missing, unknown or out of range, or the mechanism can't be "
        "charged.",
        "`field` names it.",
    ),
    Kind(
        "bound_not_available",
        422,
        "No bound within the limits",
        "No bound was found in double precision within the time of a question. It is never "
        "answered by a guess.",
        "Ask about a smaller mechanism or a larger delta.",
    ),
    Kind(
        "idempotency_mismatch",
        422,
        "Idempotency key reused with another body",
        "The key was used before for another body. The first job stands; nothing new was charged.",
        "Send the first body again, or a new key.",
    ),
    Kind(
        "job_failed",
        500,
        "The job failed",
        "The job ended without a release. Its charge stands, because it had started.",
        "Requesters see this one code whatever the cause.",
    ),
    Kind(
        "internal_error",
        500,
        "Internal error",
        "The service failed in a way it did not foresee. The text of the failure is in its log "
        "only.",
        "Send the call again; a charging call with the same idempotency key is safe to repeat.",
    ),
    Kind(
        "ledger_unavailable",
        503,
        "Ledger unavailable",
        "The database could not be reached or locked in time. Nothing was granted.",
        "Repeat the call after `Retry-After` seconds; a charging call with the same key is safe.",
    ),
    Kind(
        "accountant_busy",
        503,
        "Accountant busy",
        "All places of the accountant are taken.",
        "Repeat the call after `Retry-After` seconds.",
    ),
    Kind(
        "not_ready",
        503,
        "Not ready",
        "A part that the service needs does not answer; `checks` names it.",
        "Repeat the call after `Retry-After` seconds.",
    ),
)

BY_CODE: Final[Mapping[str, Kind]] = {kind.code: kind for kind in KINDS}
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


def problem_type(code: str) -> str:
    """The address, relative to the service, of the page that explains a problem code."""
    return f"/problems/{code.replace('_', '-')}"


def problem_body(
    code: str,
    *,
    status: int | None = None,
    title: str | None = None,
    detail: str | None = None,
    extra: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The JSON of a problem; members of ``extra`` never replace those of the RFC."""
    kind = BY_CODE.get(code)
    number = status if status is not None else (kind.status if kind else 500)
    body: dict[str, object] = {
        "type": problem_type(code),
        "title": title or (kind.title if kind else HTTPStatus(number).phrase),
        "status": number,
        "code": code,
        "detail": detail or (kind.meaning if kind else HTTPStatus(number).phrase),
    }
    for name, value in (extra or {}).items():
        body.setdefault(name, value)
    return body


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


class ProblemError(EpsilondError):
    """A problem of the HTTP layer itself (a missing key, a body too large)."""

    def __init__(
        self, code: str, detail: str | None = None, *, extra: Mapping[str, object] | None = None
    ) -> None:
        kind = BY_CODE[code]
        super().__init__(detail or kind.meaning, extra=extra)
        self.code = code
        self.kind = kind


def field_path(segments: Iterable[str | int]) -> str:
    """``preset.beta[3]`` for the segments ("preset", "beta", 3)."""
    path = ""
    for segment in segments:
        if isinstance(segment, int):
            path += f"[{segment}]"
        else:
            path += f".{segment}" if path else segment
    return path


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
