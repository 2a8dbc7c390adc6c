"""Errors that any part of the product may raise, and the problem each one becomes.

    EpsilondError
    ├── InvalidMechanism      422 invalid_mechanism        a mechanism's field is out of range
    ├── InvalidRequest        422 invalid_request          a request's field is out of range
    ├── UndecidableBound      422 bound_not_available      no accountant answered within its limits
    ├── NotFound              404 not_found                unknown here, or not for this key
    ├── Conflict              409 (its own code)           the object is in another state
    │   └── BudgetExhausted   409 budget_exhausted         no filter of the family admits the charge
    ├── IdempotencyMismatch   422 idempotency_mismatch     the key was used with another body
    ├── LeaseLost             (internal)                   another attempt holds the job
    └── LedgerUnavailable     503 ledger_unavailable       no answer from the database

Errors know their HTTP status and stable code, so one handler serves every route. Their text is
written for the caller and never holds a value from private data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class EpsilondError(Exception):
    """Base of every error that the service explains to its caller."""

    status: ClassVar[int] = 500
    code: str = "internal_error"
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str, *, extra: Mapping[str, object] | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.extra: dict[str, object] = dict(extra or {})


class InvalidRequest(EpsilondError):
    """A request's field is missing, of the wrong type, or out of range."""

    status = 422
    code = "invalid_request"
    title = "Invalid request"

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}" if field else detail, extra={"field": field})
        self.field = field
        self.reason = detail


class InvalidMechanism(InvalidRequest):
    """A mechanism's JSON or parameters are not a mechanism this service knows."""

    code = "invalid_mechanism"
    title = "Invalid mechanism"

    def within(self, prefix: str) -> InvalidMechanism:
        """The same error with its field named from an enclosing object."""
        joint = "" if self.field.startswith("[") or not self.field else "."
        return InvalidMechanism(f"{prefix}{joint}{self.field}", self.reason)


class UndecidableBound(EpsilondError):
    """Every accountant that could answer ran out of its time or memory limit."""

    status = 422
    code = "bound_not_available"
    title = "No bound within the limits"


class NotFound(EpsilondError):
    """The object does not exist, or this key may not know that it does."""

    status = 404
    code = "not_found"
    title = "Not found"

    def __init__(self, detail: str = "no such object") -> None:
        super().__init__(detail)


class Conflict(EpsilondError):
    """The object is in a state that does not allow the call."""

    status = 409
    title = "Conflict"

    def __init__(
        self, code: str, detail: str, *, extra: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(detail, extra=extra)
        self.code = code


class BudgetExhausted(Conflict):
    """No filter of the dataset's family stays within its cap with this charge added."""

    title = "Budget exhausted"

    def __init__(self, detail: str, *, extra: Mapping[str, object]) -> None:
        super().__init__("budget_exhausted", detail, extra=extra)


class IdempotencyMismatch(EpsilondError):
    """The idempotency key was used before with another body."""

    status = 422
    code = "idempotency_mismatch"
    title = "Idempotency key reused with another body"


class LeaseLost(EpsilondError):
    """The job's lease belongs to another attempt, so this attempt may write nothing."""

    status = 409
    code = "lease_lost"
    title = "Lease lost"


class LedgerUnavailable(EpsilondError):
    """The database could not be reached or locked in time; the ledger fails closed."""

    status = 503
    code = "ledger_unavailable"
    title = "Ledger unavailable"
