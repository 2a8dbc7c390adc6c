"""The kinds of problems, and the errors that carry them: a table, and nothing of the web.

:data:`KINDS` holds what a problem's ``code`` means and what to do about it. The command line prints
the same problems as the service (:mod:`api.problems`), and must not load it for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from accounting.errors import EpsilondError


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
