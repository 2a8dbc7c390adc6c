"""The books of a dataset: the only writer of entries, charges, jobs, releases and the chain.

    awaiting_approval ──approve──▶ reserved ──start──▶ started ──release──▶ released
           │                          │                   └─────fail──────▶ failed_charged
           ├──deny──▶ denied          │
           └──────────┬───────────────┘
                      ├──cancel──▶ cancelled
                      └──expire──▶ expired

**The guarantee.** Whatever is asked, in whatever order, by whomever, and however machines fail, the
entries that ever started satisfy: at the last admission, for at least one filter j of the family
that the budget fixed, the sum over waiting, reserved, started, released and failed entries lay
within cap_j. That makes all that was ever computed (epsilon, delta)-DP (the proof stands in
:mod:`accounting.filters`). It rests on four rules, which this module keeps and :func:`verify`
checks:

1. An admission reads its sums in the transaction that inserts the entry, under the lock of the
   books' dataset row. Two clients cannot both be admitted on the same sums.
2. The start is committed before the first private byte is read or noise is drawn.
3. Only an entry that never started is taken back. ``started`` ends in ``released`` or
   ``failed_charged``, and both count.
4. Every change of state adds a row to the books' hash chain, in the same transaction.

**Books.** A dataset has books of its own, or shares those of another: then both are one budget
group, with one budget, one chain and one lock. Every function takes the id of any of its datasets.

**Plans.** A plan is one entry with several jobs, fixed before the first of them starts. The entry
starts with its first job, and from then on all of it stays charged, whatever becomes of the others.

Every function takes the ``session`` of a transaction that its caller opened with
:meth:`accounting.tables.Database.write` (or ``read``, for those that only read), and ``now`` in
microseconds since 1970 UTC: nothing here looks at a clock. Locks are taken in one order, the rows
of books by id and then job rows.

**Leases.** A started job belongs to whoever holds its lease token, a random fencing token that each
attempt gets anew. Times only decide when another attempt *may* take a job over; whether an attempt
may still write is decided by the token alone, so a clock that is wrong can waste an attempt but
cannot let two attempts release.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from accounting.admission import MICROSECONDS as MICROSECONDS
from accounting.admission import PlannedJob as PlannedJob
from accounting.admission import PlanReservation as PlanReservation
from accounting.admission import Reservation as Reservation
from accounting.admission import existing_job as existing_job
from accounting.admission import microseconds, new_id
from accounting.admission import plan_key as plan_key
from accounting.admission import plan_mechanism as plan_mechanism
from accounting.admission import reserve as reserve
from accounting.admission import reserve_plan as reserve_plan
from accounting.canonical import digest
from accounting.chain import (
    NEXT_STATES,
    PLAN,
    append,
    entry_state,
    filters_of,
    moved_totals,
    states_of,
)
from accounting.chain import EpsilonBound as EpsilonBound
from accounting.chain import Verification as Verification
from accounting.chain import verify as verify
from accounting.errors import (
    Conflict,
    InvalidRequest,
    LeaseLost,
    NotFound,
)
from accounting.filters import (
    Budget,
    Cost,
    Filter,
    FilterState,
    family,
    shared_out,
    tightened,
)
from accounting.tables import (
    HELD_STATES,
    BudgetRow,
    ChainRow,
    ChargeRow,
    DatasetRow,
    EntryRow,
    FilterRow,
    JobRow,
    JsonObject,
    LeaseRow,
    OrganisationTotalsRow,
    ReleaseRow,
    SnapshotRow,
)

_log = logging.getLogger("epsilond.ledger")

FAILURE_CODE: Final = "job_failed"
"""The one failure code that requesters see: why a job failed may depend on private data."""

# A job that waits is sent again after as long as it has waited, and at most this many times the
# shortest interval: with a fixed interval, a long queue would fill with its own reminders.
_LONGEST_RESEND: Final = 32


@dataclass(frozen=True)
class Started:
    """What an attempt needs, fixed at the start. ``sequence`` and ``hash`` are those of the job's
    ``started`` chain row, the same for every attempt."""

    job_id: str
    entry_id: str
    lease_token: str
    attempt: int
    sealed_seed: bytes
    kind: str
    spec: JsonObject
    mechanism: JsonObject | None
    post_processing: JsonObject
    certificate_epsilon: JsonObject | None
    dataset_id: str
    facts: JsonObject
    snapshot_id: str | None
    snapshot_hmac: str | None
    sequence: int
    hash: str


@dataclass(frozen=True)
class Entry:
    """One line of the books, for reading. ``costs`` has one item a filter, or none at all.

    ``job_ids`` are in the plan's order; ``release_ids`` are those that there are, likewise.
    """

    id: str
    dataset_id: str
    sequence: int
    job_ids: tuple[str, ...]
    organisation_id: str
    kind: str
    state: str
    parent_entry_id: str | None
    mechanism: JsonObject | None
    mechanism_digest: str | None
    costs: tuple[Cost, ...]
    release_ids: tuple[str, ...]
    created_at: int
    updated_at: int


# --------------------------------------------------------------------------------------------------
# Budgets and sums
# --------------------------------------------------------------------------------------------------


def set_budget(
    session: Session, *, dataset_id: str, budget: Budget, now: int
) -> tuple[Filter, ...]:
    """Fixes the budget of a dataset's books, and with it the family of filters; or tightens it.

    Epsilon and delta can only be lowered, which lowers the caps of the same filters: what is being
    priced meanwhile, outside any transaction, is priced for the right ones. The caps of
    organisations and the threshold for approval are no part of the guarantee, and may change.

    Raises:
        NotFound: no such dataset.
        Conflict: ``budget_not_raised``.
    """
    books = lock_books(session, dataset_id)
    row = session.get(BudgetRow, books.id, populate_existing=True)
    if row is None:
        filters = family(budget)
        books.totals = [[0, 0, 0] for _ in filters]
        session.add(BudgetRow(dataset_id=books.id, budget=budget.to_json(), created_at=now))
    else:
        known = filters_of(session, books.id)
        old = Budget.from_json(row.budget)
        if budget == old:
            return known
        try:
            filters = tightened(known, old, budget)
        except InvalidRequest as error:
            raise Conflict("budget_not_raised", error.detail) from None
        row.budget = budget.to_json()
        session.execute(sa.delete(FilterRow).where(FilterRow.dataset_id == books.id))
    session.add_all(
        FilterRow(
            dataset_id=books.id,
            position=position,
            order=f.order,
            delta_units=f.delta_units,
            cap_units=f.cap_units,
            delta_per_release_units=f.delta_per_release_units,
        )
        for position, f in enumerate(filters)
    )
    append(
        session,
        books,
        kind="budget",
        entry_id=None,
        state=None,
        now=now,
        data={"budget": budget.to_json(), "filters": [f.to_json() for f in filters]},
    )
    session.flush()
    return filters


def books_of(session: Session, dataset_id: str) -> DatasetRow:
    """The dataset whose books are those of this one; for reading.

    Raises:
        NotFound: no such dataset.
    """
    dataset = session.get(DatasetRow, dataset_id)
    if dataset is None:
        raise NotFound
    return (
        dataset if dataset.books_id == dataset.id else session.get_one(DatasetRow, dataset.books_id)
    )


def budget_of(session: Session, dataset_id: str) -> tuple[Budget, tuple[Filter, ...]] | None:
    """The budget of a dataset's books and its filters, in the family's order; None before that.

    Raises:
        NotFound: no such dataset.
    """
    rows = session.execute(_BUDGET_OF, {"dataset": dataset_id}).all()
    if not rows:
        books_of(session, dataset_id)
        return None
    return Budget.from_json(rows[0].budget), tuple(Filter(*row[1:]) for row in rows)


# Built once: each quote and each order asks this.
_BUDGET_OF: Final = (
    sa.select(
        BudgetRow.budget,
        FilterRow.order,
        FilterRow.delta_units,
        FilterRow.cap_units,
        FilterRow.delta_per_release_units,
    )
    .join(DatasetRow, DatasetRow.books_id == BudgetRow.dataset_id)
    .join(FilterRow, FilterRow.dataset_id == BudgetRow.dataset_id)
    .where(DatasetRow.id == sa.bindparam("dataset"))
    .order_by(FilterRow.position)
)


def states(session: Session, dataset_id: str) -> tuple[FilterState, ...]:
    """What each filter has spent and reserved. Empty before the budget is set.

    Used for admission only under the lock of the books.
    """
    books = books_of(session, dataset_id)
    return states_of(filters_of(session, books.id), books.totals)


def organisation_states(
    session: Session, dataset_id: str, organisation_id: str
) -> tuple[FilterState, ...] | None:
    """What an organisation has used of its cap, as a part of each filter; None without a cap."""
    books = books_of(session, dataset_id)
    row = session.get(BudgetRow, books.id)
    share = None if row is None else Budget.from_json(row.budget).share_of(organisation_id)
    if share is None:
        return None
    filters = [shared_out(f, share) for f in filters_of(session, books.id)]
    own = session.get(OrganisationTotalsRow, (books.id, organisation_id), populate_existing=True)
    return states_of(filters, [[0, 0, 0]] * len(filters) if own is None else own.totals)


def _count(
    session: Session,
    books: DatasetRow,
    organisation_id: str,
    costs: Sequence[Cost],
    sign: int,
) -> None:
    """Adds a charge to the sums of the books and of the organisation, or takes it back."""
    if not costs:
        return
    books.totals = moved_totals(books.totals, costs, sign)
    row = session.get(OrganisationTotalsRow, (books.id, organisation_id), populate_existing=True)
    if row is None:
        row = OrganisationTotalsRow(
            dataset_id=books.id,
            organisation_id=organisation_id,
            totals=[[0, 0, 0] for _ in costs],
        )
        session.add(row)
    row.totals = moved_totals(row.totals, costs, sign)


# --------------------------------------------------------------------------------------------------
# Start, heartbeat, release, fail
# --------------------------------------------------------------------------------------------------


def start(
    session: Session,
    *,
    job_id: str,
    job_digest: str,
    sealed_seed: bytes,
    lease_seconds: float,
    now: int,
) -> Started | None:
    """Takes a job for one attempt. The caller **commits before it reads a private byte**.

    A reserved job starts: its charge is never taken back from here on. A started job whose lease
    ran out is taken over with the seed that it already has, so that the attempt repeats the same
    draws; ``job_digest`` (of everything that the draws depend on) must be the same, or a second
    release would differ from a first that may have been seen.

    Returns:
        None where there is nothing to do: another attempt holds the job, it ended, its reservation
        ran out, its attempts are used up, or its digest differs (the last two make it
        ``failed_charged``). A repeated message ends here.

    Raises:
        NotFound: no such job.
        Conflict: ``ledger_inconsistent``: the job's mechanism is not the one that was charged for.
    """
    books, job = _lock_job(session, job_id)
    token = secrets.token_hex(32)
    lease_expires_at = now + microseconds(lease_seconds)
    snapshot = None if job.snapshot_id is None else session.get(SnapshotRow, job.snapshot_id)
    entry = session.get_one(EntryRow, job.entry_id, populate_existing=True)
    if _charged(entry, job) != job.mechanism or entry.books_id != books.id:
        # Somebody wrote to the tables. Nothing starts; verify names the row.
        raise Conflict("ledger_inconsistent", "the job's mechanism is not the one charged for")
    if (snapshot is None) != (job.snapshot_id is None) or (
        snapshot is not None and snapshot.dataset_id != entry.dataset_id
    ):
        raise Conflict("ledger_inconsistent", "the job's snapshot is of another dataset")

    if job.state == "reserved":
        if entry.state in HELD_STATES and job.expires_at <= now:
            _take_back(session, books, entry, "expired", now=now)
            return None
        job.attempts = 1
        job.sealed_seed = sealed_seed
        job.lease_token = token
        job.lease_expires_at = lease_expires_at
        job.job_digest = job_digest
        row = _move(
            session,
            books,
            job,
            "started",
            now=now,
            data={
                "attempt": 1,
                "job_digest": job_digest,
                "snapshot": None
                if snapshot is None
                else {"id": snapshot.id, "hmac": snapshot.hmac},
                "mechanism_digest": None if job.mechanism is None else digest(job.mechanism),
            },
        )
        job.started_sequence = row.sequence
        session.flush()
    elif job.state == "started" and (job.lease_expires_at or 0) <= now:
        if job.job_digest != job_digest or job.attempts >= job.max_attempts:
            _end_failed(session, books, job, FAILURE_CODE, now=now)
            return None
        job.attempts += 1
        job.lease_token = token
        job.lease_expires_at = lease_expires_at
        job.updated_at = now
        append(
            session,
            books,
            kind="attempt",
            entry_id=job.entry_id,
            state=entry.state,
            now=now,
            data={"job": job.id, "attempt": job.attempts, "job_digest": job_digest},
        )
        session.flush()
    else:
        return None

    if job.sealed_seed is None or job.started_sequence is None:
        raise RuntimeError("a started job has a seed and a chain row")
    started_row = session.get_one(ChainRow, (books.id, job.started_sequence))
    dataset = session.get_one(DatasetRow, job.dataset_id)
    return Started(
        job_id=job.id,
        entry_id=job.entry_id,
        lease_token=token,
        attempt=job.attempts,
        sealed_seed=job.sealed_seed,
        kind=job.kind,
        spec=job.spec,
        mechanism=job.mechanism,
        post_processing=job.post_processing,
        certificate_epsilon=job.certificate_epsilon,
        dataset_id=dataset.id,
        facts=dataset.facts,
        snapshot_id=job.snapshot_id,
        snapshot_hmac=None if snapshot is None else snapshot.hmac,
        sequence=started_row.sequence,
        hash=started_row.hash,
    )


def _charged(entry: EntryRow, job: JobRow) -> JsonObject | None:
    """What was charged for this job: the entry's mechanism, or its part of a plan."""
    if job.plan_position is None or entry.mechanism is None:
        return entry.mechanism
    part: JsonObject = entry.mechanism["parts"][job.plan_position]["mechanism"]
    return part


def heartbeat(
    session: Session,
    *,
    job_id: str,
    lease_token: str,
    progress_done: int,
    lease_seconds: float,
    now: int,
) -> None:
    """Renews an attempt's lease and reports its progress, which never goes back.

    A lease that ran out while nobody took the job over is renewed: the token decides.

    Raises:
        LeaseLost: the job belongs to another attempt, or ended.
    """
    done = sa.case(
        (JobRow.progress_total < progress_done, JobRow.progress_total),
        (JobRow.progress_done < progress_done, progress_done),
        else_=JobRow.progress_done,
    )
    renewed = session.execute(
        sa.update(JobRow)
        .where(JobRow.id == job_id, JobRow.state == "started", JobRow.lease_token == lease_token)
        .values(
            lease_expires_at=now + microseconds(lease_seconds), progress_done=done, updated_at=now
        )
        .returning(JobRow.id)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    if renewed is None:
        raise LeaseLost("another attempt holds the job, or it has ended")


def release(
    session: Session,
    *,
    job_id: str,
    lease_token: str,
    location: str,
    sha256: str,
    size: int,
    certificate: Mapping[str, object],
    now: int,
) -> str:
    """Makes the staged artefact the job's one release, destroys the seed, and returns its id.

    Raises:
        LeaseLost: the job belongs to another attempt, or ended; nothing is written.
        ValueError: the certificate speaks of another artefact or another started row.
    """
    books, job = _lock_attempt(session, job_id, lease_token)
    started_row = session.get_one(ChainRow, (books.id, job.started_sequence))
    if certificate.get("artefact") != {"sha256": sha256, "bytes": size}:
        raise ValueError("the certificate is of another artefact")
    if certificate.get("ledger") != {"sequence": started_row.sequence, "hash": started_row.hash}:
        raise ValueError("the certificate names another row of the ledger")
    release_id = new_id("rel")
    session.add(
        ReleaseRow(
            id=release_id,
            dataset_id=job.dataset_id,
            job_id=job.id,
            entry_id=job.entry_id,
            location=location,
            sha256=sha256,
            bytes=size,
            certificate=dict(certificate),
            created_at=now,
        )
    )
    job.progress_done = job.progress_total
    _move(
        session,
        books,
        job,
        "released",
        now=now,
        data={
            "release": release_id,
            "artefact": {"sha256": sha256, "bytes": size},
            "certificate_digest": digest(dict(certificate)),
        },
    )
    return release_id


def fail(session: Session, *, job_id: str, lease_token: str, code: str, now: int) -> None:
    """Ends an attempt's job without a release. The charge stays; the seed is destroyed.

    ``code`` is what the requester will see, so it says nothing of the data; see ``FAILURE_CODE``.

    Raises:
        LeaseLost: the job belongs to another attempt, or ended; nothing is written.
    """
    books, job = _lock_attempt(session, job_id, lease_token)
    _end_failed(session, books, job, code, now=now)


def cancel(session: Session, *, job_id: str, now: int) -> None:
    """Takes a charge back before it starts. A plan is cancelled whole, by any of its jobs.

    Raises:
        NotFound: no such job.
        Conflict: ``not_cancellable``: the entry started or ended.
    """
    books, job = _lock_job(session, job_id)
    entry = session.get_one(EntryRow, job.entry_id, populate_existing=True)
    if entry.state not in HELD_STATES:
        what = "the job" if job.plan_position is None else "its plan"
        raise Conflict("not_cancellable", f"{what} is {entry.state}")
    _take_back(session, books, entry, "cancelled", now=now)


# --------------------------------------------------------------------------------------------------
# Approval
# --------------------------------------------------------------------------------------------------


def approve(session: Session, *, job_id: str, ttl_seconds: float, now: int) -> tuple[str, ...]:
    """Lets a waiting entry go ahead, and says which jobs to send after the commit.

    It was admitted when it was asked for and has been charged since, so nothing is checked again.

    Raises:
        NotFound: no such job.
        Conflict: ``not_awaiting_approval``.
    """
    books, job = _lock_job(session, job_id)
    entry = _awaiting(session, job)
    if job.expires_at <= now:
        raise Conflict("not_awaiting_approval", "its time is over")
    jobs = jobs_of(session, entry.id)
    entry.state, entry.updated_at = "reserved", now
    for each in jobs:
        each.state, each.updated_at = "reserved", now
        each.sent_at, each.expires_at = now, now + microseconds(ttl_seconds)
    append(
        session,
        books,
        kind="approved",
        entry_id=entry.id,
        state="reserved",
        now=now,
        data={},
    )
    session.flush()
    return tuple(each.id for each in jobs)


def deny(session: Session, *, job_id: str, now: int) -> None:
    """Refuses a waiting entry; its charge is taken back.

    Raises:
        NotFound: no such job.
        Conflict: ``not_awaiting_approval``.
    """
    books, job = _lock_job(session, job_id)
    _take_back(session, books, _awaiting(session, job), "denied", now=now)


def _awaiting(session: Session, job: JobRow) -> EntryRow:
    entry = session.get_one(EntryRow, job.entry_id, populate_existing=True)
    if entry.state != "awaiting_approval":
        raise Conflict("not_awaiting_approval", f"the job is {job.state}")
    return entry


# --------------------------------------------------------------------------------------------------
# The sweeper
# --------------------------------------------------------------------------------------------------


def expire(session: Session, now: int) -> int:
    """Takes back the reservations whose time is over, and says how many."""
    return _end_overdue(session, now, _overdue(now))


def _overdue(now: int) -> sa.ColumnElement[bool]:
    return sa.and_(EntryRow.state.in_(HELD_STATES), JobRow.expires_at <= now)


def sweep(
    session: Session, *, now: int, resend_after_seconds: float, limit: int = 1000
) -> tuple[str, ...]:
    """Ends what is overdue, and says which jobs to send (again) after the commit.

    * A reservation whose time is over expires; a plan whole. Once a plan has started, its charge
      stays, and its other jobs are sent until somebody takes them.
    * A started job whose lease ran out fails if its attempts are used up, else it is sent.
    * A reserved job is sent if it was not sent lately.

    A job is sent again after it has waited as long again, at first ``resend_after_seconds`` and at
    most 32 times that. A message is a hint: one too many ends at :func:`start`.
    """
    lease_over = sa.and_(JobRow.state == "started", JobRow.lease_expires_at <= now)
    _end_overdue(
        session,
        now,
        sa.or_(_overdue(now), sa.and_(lease_over, JobRow.attempts >= JobRow.max_attempts)),
    )
    shortest = microseconds(resend_after_seconds)
    # A reserved job changed last when it was reserved or, if it waited for the owner, approved.
    waits_since = sa.case(
        (JobRow.state == "reserved", JobRow.updated_at), else_=JobRow.lease_expires_at
    )
    waited = JobRow.sent_at - waits_since
    interval = sa.case(
        (waited < shortest, shortest),
        (waited > _LONGEST_RESEND * shortest, _LONGEST_RESEND * shortest),
        else_=waited,
    )
    # A message sent before the wait began (for a lease, before it ran out) was another attempt's.
    due = sa.or_(
        JobRow.sent_at.is_(None),
        sa.and_(JobRow.state == "started", JobRow.sent_at < JobRow.lease_expires_at),
        JobRow.sent_at + interval <= now,
    )
    job_ids = tuple(
        session.scalars(
            sa.select(JobRow.id)
            .where(sa.or_(JobRow.state == "reserved", lease_over), due)
            .order_by(JobRow.created_at, JobRow.id)
            .limit(limit)
        )
    )
    for job_id in sorted(job_ids):
        session.execute(
            sa.update(JobRow)
            .where(JobRow.id == job_id)
            .values(sent_at=now)
            .execution_options(synchronize_session=False)
        )
    return job_ids


def take_lease(session: Session, *, name: str, token: str, seconds: float, now: int) -> bool:
    """Takes or renews a named lease; False while another token holds it."""
    expires_at = now + microseconds(seconds)
    taken = session.execute(
        sa.update(LeaseRow)
        .where(LeaseRow.name == name, sa.or_(LeaseRow.token == token, LeaseRow.expires_at <= now))
        .values(token=token, expires_at=expires_at)
        .returning(LeaseRow.name)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    if taken is not None:
        return True
    if session.get(LeaseRow, name) is not None:
        return False
    try:
        with session.begin_nested():
            session.execute(
                sa.insert(LeaseRow).values(name=name, token=token, expires_at=expires_at)
            )
    except IntegrityError:
        return False  # another process made the lease between our two statements
    return True


def _end_overdue(session: Session, now: int, overdue: sa.ColumnElement[bool]) -> int:
    found = session.execute(
        sa.select(JobRow.id)
        .join(EntryRow, EntryRow.id == JobRow.entry_id)
        .where(overdue)
        .order_by(EntryRow.books_id, JobRow.id)
    ).scalars()
    ended = 0
    for job_id in found.all():
        try:
            with session.begin_nested():
                ended += _end_if_overdue(session, job_id, now)
        except RuntimeError:
            # Somebody wrote to the tables. The other books must not wait for these.
            _log.exception("a job can't be ended: job=%s", job_id)
    return ended


def _end_if_overdue(session: Session, job_id: str, now: int) -> bool:
    """Ends a job, read again under its lock: it may have started, or been renewed, since."""
    books, job = _lock_job(session, job_id)
    entry = session.get_one(EntryRow, job.entry_id, populate_existing=True)
    if entry.state in HELD_STATES and job.expires_at <= now:
        _take_back(session, books, entry, "expired", now=now)
        return True
    lost = job.state == "started" and (job.lease_expires_at or 0) <= now
    if lost and job.attempts >= job.max_attempts:
        _end_failed(session, books, job, FAILURE_CODE, now=now)
        return True
    return False


# --------------------------------------------------------------------------------------------------
# Reading the books
# --------------------------------------------------------------------------------------------------


def entries(
    session: Session, dataset_id: str, *, after_sequence: int = 0, limit: int | None = None
) -> list[Entry]:
    """The entries of a dataset's books in the order of their reservation.

    ``sequence`` is the cursor.
    """
    rows = session.scalars(
        sa.select(EntryRow)
        .where(
            EntryRow.books_id == books_of(session, dataset_id).id,
            EntryRow.sequence > after_sequence,
        )
        .order_by(EntryRow.sequence)
        .limit(limit)
    ).all()
    costs = _costs_of(session, [row.id for row in rows])
    jobs = _by_entry(session, [row.id for row in rows])
    return [
        Entry(
            id=entry.id,
            dataset_id=entry.dataset_id,
            sequence=entry.sequence,
            job_ids=tuple(job for job, _ in jobs.get(entry.id, ())),
            organisation_id=entry.organisation_id,
            kind=entry.kind,
            state=entry.state,
            parent_entry_id=entry.parent_entry_id,
            mechanism=entry.mechanism,
            mechanism_digest=entry.mechanism_digest,
            costs=costs.get(entry.id, ()),
            release_ids=tuple(r for _, r in jobs.get(entry.id, ()) if r is not None),
            created_at=entry.created_at,
            updated_at=entry.updated_at,
        )
        for entry in rows
    ]


def _by_entry(
    session: Session, entry_ids: Sequence[str]
) -> dict[str, list[tuple[str, str | None]]]:
    """(job, its release or None) by entry, in the plan's order."""
    found: dict[str, list[tuple[str, str | None]]] = {}
    for first in range(0, len(entry_ids), 500):  # databases limit the values in one statement
        for entry_id, job_id, release_id in session.execute(
            sa.select(JobRow.entry_id, JobRow.id, ReleaseRow.id)
            .outerjoin(ReleaseRow, ReleaseRow.job_id == JobRow.id)
            .where(JobRow.entry_id.in_(entry_ids[first : first + 500]))
            .order_by(JobRow.entry_id, JobRow.plan_position)
        ):
            found.setdefault(entry_id, []).append((job_id, release_id))
    return found


def jobs_of(session: Session, entry_id: str) -> list[JobRow]:
    """The jobs of an entry in the plan's order, as the database has them now."""
    return list(
        session.scalars(
            sa.select(JobRow)
            .where(JobRow.entry_id == entry_id)
            .order_by(JobRow.plan_position)
            .execution_options(populate_existing=True)
        )
    )


def chain(
    session: Session, dataset_id: str, *, after_sequence: int = 0, limit: int | None = None
) -> list[ChainRow]:
    """The chain rows of a dataset's books; each ``body`` is the text that ``hash`` is of."""
    books_id = books_of(session, dataset_id).id
    return list(
        session.scalars(
            sa.select(ChainRow)
            .where(ChainRow.dataset_id == books_id, ChainRow.sequence > after_sequence)
            .order_by(ChainRow.sequence)
            .limit(limit)
        )
    )


def _costs_of(session: Session, entry_ids: Sequence[str]) -> dict[str, tuple[Cost, ...]]:
    found: dict[str, tuple[Cost, ...]] = {}
    for first in range(0, len(entry_ids), 500):  # databases limit the values in one statement
        for row in session.scalars(
            sa.select(ChargeRow)
            .where(ChargeRow.entry_id.in_(entry_ids[first : first + 500]))
            .order_by(ChargeRow.entry_id, ChargeRow.position)
        ):
            cost = Cost(row.epsilon_units, row.delta_units)
            found[row.entry_id] = (*found.get(row.entry_id, ()), cost)
    return found


# --------------------------------------------------------------------------------------------------
# Helpers
# --------------------------------------------------------------------------------------------------


def lock_books(session: Session, dataset_id: str) -> DatasetRow:
    """The row of the dataset's books, locked to the transaction's end and read under the lock.

    Raises:
        NotFound: no such dataset.
    """
    books_id = sa.select(DatasetRow.books_id).where(DatasetRow.id == dataset_id).scalar_subquery()
    books = session.scalar(
        sa.select(DatasetRow)
        .where(DatasetRow.id == books_id)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    if books is None:
        raise NotFound
    return books


def _lock_job(session: Session, job_id: str) -> tuple[DatasetRow, JobRow]:
    """The job and its books, both locked, the books first."""
    dataset_id = session.scalar(sa.select(JobRow.dataset_id).where(JobRow.id == job_id))
    if dataset_id is None:
        raise NotFound
    books = lock_books(session, dataset_id)
    # Heartbeats and the sweeper change jobs' rows without the lock of the books, so these need
    # locks of their own: all of a plan's at once, in the order in which the sweeper takes them.
    of_entry = sa.select(JobRow.entry_id).where(JobRow.id == job_id).scalar_subquery()
    jobs = session.scalars(
        sa.select(JobRow)
        .where(JobRow.entry_id == of_entry)
        .order_by(JobRow.id)
        .with_for_update()
        .execution_options(populate_existing=True)
    ).all()
    return books, next(job for job in jobs if job.id == job_id)


def _lock_attempt(session: Session, job_id: str, lease_token: str) -> tuple[DatasetRow, JobRow]:
    try:
        books, job = _lock_job(session, job_id)
    except NotFound:
        raise LeaseLost("there is no such job") from None
    held = job.lease_token if job.state == "started" else None
    if held is None or not secrets.compare_digest(held, lease_token):
        raise LeaseLost("another attempt holds the job, or it has ended")
    return books, job


def _move(
    session: Session,
    books: DatasetRow,
    job: JobRow,
    state: str,
    *,
    now: int,
    data: Mapping[str, object],
) -> ChainRow:
    """Changes the state of a job and its entry, and adds the chain row."""
    with session.no_autoflush:  # the job's new fields are right only together with its new state
        entry = session.get_one(EntryRow, job.entry_id, populate_existing=True)
        alike = entry.kind == PLAN or entry.state == job.state
        if not alike or state not in NEXT_STATES.get(job.state, frozenset()):
            raise RuntimeError(f"no job goes from {job.state} (entry {entry.state}) to {state}")
        if entry.kind == PLAN:
            others = session.execute(
                sa.select(JobRow.state).where(JobRow.entry_id == entry.id, JobRow.id != job.id)
            ).scalars()
            entry.state = entry_state([state, *others])
        else:
            entry.state = state
    job.state = state
    job.updated_at = entry.updated_at = now
    if state != "started":
        job.sealed_seed = job.lease_token = job.lease_expires_at = None
    row = append(
        session,
        books,
        kind=state,
        entry_id=entry.id,
        state=entry.state,
        now=now,
        data={"job": job.id, **data},
    )
    session.flush()
    return row


def _take_back(
    session: Session, books: DatasetRow, entry: EntryRow, state: str, *, now: int
) -> None:
    """Ends an entry that never started, with all of its jobs: its charge no longer counts."""
    if entry.state not in HELD_STATES or state not in NEXT_STATES[entry.state]:
        raise RuntimeError(f"no entry goes from {entry.state} to {state}")
    jobs = jobs_of(session, entry.id)
    if any(job.state != entry.state for job in jobs):
        raise RuntimeError(f"entry {entry.id} is {entry.state}, and a job of it is not")
    entry.state, entry.updated_at = state, now
    for job in jobs:
        job.state, job.updated_at = state, now
    costs = _costs_of(session, [entry.id]).get(entry.id, ())
    _count(session, books, entry.organisation_id, costs, -1)
    append(session, books, kind=state, entry_id=entry.id, state=state, now=now, data={})
    session.flush()


def _end_failed(session: Session, books: DatasetRow, job: JobRow, code: str, *, now: int) -> None:
    job.problem_code = code
    _move(session, books, job, "failed_charged", now=now, data={})
