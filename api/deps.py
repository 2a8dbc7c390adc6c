"""What a route works with: the running service, the caller, and the objects the caller may see.

Whether an object may be seen is decided here, once for each kind of object. An object that does not
exist and one that this key may not know of give the same answer, 404.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Final, Literal, TypeVar

from celery import Celery
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fastapi import Depends, Request
from sqlalchemy.orm import Session

from accounting import bounds, certificates
from accounting.bounds import Bracket
from accounting.chain import PLAN
from accounting.errors import InvalidRequest, NotFound
from accounting.mechanisms import Mechanism
from accounting.tables import Database, DatasetRow, EntryRow, GrantRow, JobRow, ReleaseRow
from api import questions
from api.auth import Principal
from api.kinds import ProblemError
from worker.app import send
from worker.artifacts import ArtifactStore
from worker.custody import Sealer, load_public_keys
from worker.settings import Settings

T = TypeVar("T")

_ID: Final = re.compile(r"[a-z]{2,8}_[0-9a-f]{32}")
PAGE_SIZE: Final = 100
# Calls run in threads: far more than may wait for the accountant, so that a rush of questions
# leaves room for the calls that only read.
THREADS: Final = 96
ACCOUNTANT_QUEUE: Final = 48
UPLOADS_AT_ONCE: Final = 2
MAX_PAGE_SIZE: Final = 1000


# --------------------------------------------------------------------------------------------------
# Time and ids
# --------------------------------------------------------------------------------------------------


def now() -> int:
    """Microseconds since 1970 in UTC."""
    return time.time_ns() // 1000


def rfc3339(microseconds: int) -> str:
    """The time as the API writes it, in UTC."""
    seconds, rest = divmod(microseconds, 1_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:06d}Z"


def new_id(prefix: str) -> str:
    """An id with 128 random bits."""
    return f"{prefix}_{secrets.token_hex(16)}"


# --------------------------------------------------------------------------------------------------
# The accountant
# --------------------------------------------------------------------------------------------------


class Accountant:
    """Bounds for requests: as many at a time as there are places.

    A bound may run for seconds, so it is never asked for while a ledger is locked.

    Args:
        places: how many bounds are computed at a time.
        limits: what one of them may take for a charge or the check of one.
        question_limits: what a caller's own question may take; by default ``limits``.
        peer_limits: what each other library may take in a comparison; by default ``limits``.
        queue: how many requests may wait for a place; each holds a thread meanwhile.
        wait_seconds: how long one waits before it is told to come back.
    """

    def __init__(
        self,
        places: int,
        limits: bounds.Limits,
        *,
        question_limits: bounds.Limits | None = None,
        peer_limits: bounds.Limits | None = None,
        queue: int = ACCOUNTANT_QUEUE,
        wait_seconds: float = 10.0,
    ) -> None:
        self._places = threading.BoundedSemaphore(places)
        self._present = threading.BoundedSemaphore(places + queue)
        self._limits = limits
        self._question_limits = limits if question_limits is None else question_limits
        self._peer_limits = limits if peer_limits is None else peer_limits
        self._wait_seconds = wait_seconds

    def epsilon(self, mechanism: Mechanism, delta: float) -> Bracket:
        """The bracket of epsilon for a charge; see :func:`accounting.bounds.epsilon`."""
        with self._place():
            return bounds.epsilon(mechanism, delta, limits=self._limits)

    def confirming_epsilon(self, mechanism: Mechanism, delta: float) -> Bracket:
        """The bracket that checks a charge; see :func:`accounting.bounds.confirming_epsilon`."""
        with self._place():
            return bounds.confirming_epsilon(mechanism, delta, limits=self._limits)

    def ask(self, question: Callable[[bounds.Limits], T]) -> T:
        """The answer to a caller's question (:mod:`api.questions`), asked under its limits."""
        with self._place():
            return question(self._question_limits)

    def compare(self, mechanism: Mechanism, delta: float) -> dict[str, object]:
        """The comparison of methods, of which each other library has limits of its own."""
        with self._place():
            return questions.ask_compare(mechanism, delta, self._peer_limits)

    def check(
        self,
        certificate: Mapping[str, object],
        public_keys: Mapping[str, Ed25519PublicKey],
        *,
        recompute: bool,
    ) -> certificates.CertificateCheck:
        """The check of a certificate; see :func:`accounting.certificates.verify`."""
        with self._place():
            return certificates.verify(
                certificate, public_keys, recompute=recompute, limits=self._limits
            )

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One of the accountant's places.

        Raises:
            ProblemError: accountant_busy, if too many wait already or none came free in time.
        """
        if not self._present.acquire(blocking=False):
            raise ProblemError("accountant_busy")
        try:
            if not self._places.acquire(timeout=self._wait_seconds):
                raise ProblemError("accountant_busy")
            try:
                yield
            finally:
                self._places.release()
        finally:
            self._present.release()


# --------------------------------------------------------------------------------------------------
# The service
# --------------------------------------------------------------------------------------------------


@dataclass
class Service:
    """Everything a route needs; made when the app starts.

    A request for a job leaves through :meth:`send`, after its commit.
    """

    settings: Settings
    database: Database
    sealer: Sealer
    artifacts: ArtifactStore
    accountant: Accountant
    celery: Celery
    # Reading an upload holds its pixels in memory, so few are read at a time. The others wait on
    # the event loop, where waiting takes no thread.
    uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(UPLOADS_AT_ONCE))

    @property
    def public_keys(self) -> dict[str, Ed25519PublicKey]:
        """Every key that ever signed here by its id, read anew: one may be rotated meanwhile."""
        return load_public_keys(self.settings)

    def send(self, job_id: str) -> bool:
        """Hands a committed job's id to the broker; False leaves it to the sweeper."""
        return send(self.celery, job_id)

    def close(self) -> None:
        """Gives back every connection."""
        self.celery.close()
        self.database.dispose()


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _principal(request: Request) -> Principal:
    principal: Principal | None = request.state.principal
    if principal is None:
        # A route marked public asked for its caller: a mistake in the table, never a way in.
        raise ProblemError("unauthenticated")
    return principal


ServiceDep = Annotated[Service, Depends(_service)]
PrincipalDep = Annotated[Principal, Depends(_principal)]


# --------------------------------------------------------------------------------------------------
# Objects
# --------------------------------------------------------------------------------------------------


def require_id(text: str) -> str:
    """The id, if it has the form of one; anything else exists nowhere (404)."""
    if not _ID.fullmatch(text):
        raise NotFound
    return text


def owned_dataset(
    session: Session, caller: Principal, dataset_id: str, *scopes: str, lock: bool = False
) -> DatasetRow:
    """A dataset of the caller's own organisation, for a key with one of the scopes.

    With ``lock`` the row is held to the end of the transaction, so that writers take turns.

    Raises:
        NotFound: no such dataset, or not for this key.
    """
    row = session.get(DatasetRow, require_id(dataset_id), with_for_update=lock)
    if row is None or row.organisation_id != caller.organisation_id:
        raise NotFound
    if not caller.scopes & set(scopes):
        raise NotFound
    return row


def granted_dataset(
    session: Session, caller: Principal, dataset_id: str, right: Literal["quote", "request"]
) -> DatasetRow:
    """A dataset on which the caller's organisation may quote or order.

    An organisation needs no grant on a dataset of its own.

    Raises:
        NotFound: no such dataset, or no such grant.
    """
    row = session.get(DatasetRow, require_id(dataset_id))
    if row is None or "requester" not in caller.scopes:
        raise NotFound
    if row.organisation_id != caller.organisation_id:
        grant = session.get(GrantRow, (row.id, caller.organisation_id))
        if grant is None or right not in grant.scopes:
            raise NotFound
    return row


def visible_dataset(session: Session, caller: Principal, dataset_id: str) -> DatasetRow:
    """A dataset whose public facts and budget the caller may see: its own or a granted one.

    Raises:
        NotFound: no such dataset, or not for this key.
    """
    row = session.get(DatasetRow, require_id(dataset_id))
    if row is None:
        raise NotFound
    if row.organisation_id == caller.organisation_id:
        return row
    grant = session.get(GrantRow, (row.id, caller.organisation_id))
    if grant is None or "requester" not in caller.scopes:
        raise NotFound
    return row


def visible_job(session: Session, caller: Principal, job_id: str) -> JobRow:
    """A job of the caller's organisation, or one on a dataset it owns.

    Raises:
        NotFound: no such job, or not for this key.
    """
    row = session.get(JobRow, require_id(job_id))
    if row is None:
        raise NotFound
    if row.organisation_id == caller.organisation_id and "requester" in caller.scopes:
        return row
    owned_dataset(session, caller, row.dataset_id, "owner")
    return row


def visible_plan(session: Session, caller: Principal, plan_id: str) -> EntryRow:
    """A plan of the caller's organisation, or one on a dataset it owns.

    Raises:
        NotFound: no such plan, or not for this key.
    """
    row = session.get(EntryRow, require_id(plan_id))
    if row is None or row.kind != PLAN:
        raise NotFound
    if row.organisation_id == caller.organisation_id and "requester" in caller.scopes:
        return row
    owned_dataset(session, caller, row.dataset_id, "owner")
    return row


def visible_release(
    session: Session, caller: Principal, release_id: str, *owner_scopes: str
) -> ReleaseRow:
    """A release that the caller's organisation ordered, or one of a dataset it owns.

    Raises:
        NotFound: no such release, or not for this key.
    """
    row = session.get(ReleaseRow, require_id(release_id))
    if row is None:
        raise NotFound
    job = session.get(JobRow, row.job_id)
    if (
        job is not None
        and job.organisation_id == caller.organisation_id
        and "requester" in caller.scopes
    ):
        return row
    owned_dataset(session, caller, row.dataset_id, *owner_scopes)
    return row


# --------------------------------------------------------------------------------------------------
# Pages
# --------------------------------------------------------------------------------------------------


def encode_cursor(*position: int | str) -> str:
    """An opaque cursor for a place in a list."""
    return base64.urlsafe_b64encode(json.dumps(position).encode()).rstrip(b"=").decode()


def decode_cursor(text: str | None, *kinds: type) -> tuple[int | str, ...] | None:
    """The place that a cursor stands for; None for the list's beginning.

    Raises:
        InvalidRequest: it is no cursor of this list.
    """
    if text is None:
        return None
    try:
        value = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        value = None
    if (
        not isinstance(value, list)
        or len(value) != len(kinds)
        or any(type(v) is not k for v, k in zip(value, kinds, strict=True))
        or any(isinstance(v, int) and abs(v) >= 2**63 for v in value)
        or any(isinstance(v, str) and not _ID.fullmatch(v) for v in value)
    ):
        raise InvalidRequest("cursor", "is not a cursor of this list")
    return tuple(value)
