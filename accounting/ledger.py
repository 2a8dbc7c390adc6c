"""The books of a dataset: the only writer of entries, charges, jobs, releases and the chain.

    reserve ──▶ reserved ──start──▶ started ──release──▶ released
                   │                   └─────fail──────▶ failed_charged
                   ├──cancel──▶ cancelled
                   └──expire──▶ expired

**The guarantee.** Whatever is asked, in whatever order, by whomever, and however machines fail, the
entries that ever started satisfy: at the last admission, for at least one filter j of the family
that the budget fixed, the sum over reserved, started, released and failed entries lay within cap_j.
That makes all that was ever computed (epsilon, delta)-DP (the proof stands in
:mod:`accounting.filters`). It rests on four rules, which this module keeps and :func:`verify`
checks:

1. An admission reads its sums in the transaction that inserts the entry, under the lock of the
   dataset row. Two clients cannot both be admitted on the same sums.
2. The start is committed before the first private byte is read or noise is drawn.
3. Only an entry that never started is taken back. ``started`` ends in ``released`` or
   ``failed_charged``, and both count.
4. Every change of state adds a row to the dataset's hash chain, in the same transaction.

Every function takes the ``session`` of a transaction that its caller opened with
:meth:`accounting.tables.Database.write` (or ``read``, for those that only read), and ``now`` in
microseconds since 1970 UTC: nothing here looks at a clock. Locks are taken in one order, dataset
rows by id and then job rows.

**Leases.** A started job belongs to whoever holds its lease token, a random fencing token that each
attempt gets anew. Times only decide when another attempt *may* take a job over; whether an attempt
may still write is decided by the token alone, so a clock that is wrong can waste an attempt but
cannot let two attempts release.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from accounting.canonical import digest
from accounting.chain import (
    NEXT_STATES,
    FilterTotal,
    append,
    filters_of,
)
from accounting.chain import EpsilonBound as EpsilonBound
from accounting.chain import Verification as Verification
from accounting.chain import verify as verify
from accounting.errors import (
    BudgetExhausted,
    Conflict,
    IdempotencyMismatch,
    LeaseLost,
    NotFound,
)
from accounting.filters import (
    DELTA_UNITS,
    EPSILON_UNITS,
    INFINITE,
    INFINITE_ORDER,
    Budget,
    Cost,
    Filter,
    FilterState,
    admitting,
    family,
)
from accounting.mechanisms import (
    NEIGHBORING_RELATION,
    Mechanism,
    mechanism_digest,
    mechanism_to_json,
    require_chargeable,
)
from accounting.tables import (
    CHARGED_STATES,
    BudgetRow,
    ChainRow,
    ChargeRow,
    DatasetRow,
    EntryRow,
    FilterRow,
    JobRow,
    JsonObject,
    LeaseRow,
    ReleaseRow,
    SnapshotRow,
)

FAILURE_CODE: Final = "job_failed"
"""The one failure code that requesters see: why a job failed may depend on private data."""

MICROSECONDS: Final = 1_000_000

# A job that waits is sent again after as long as it has waited, and at most this many times the
# shortest interval: with a fixed interval, a long queue would fill with its own reminders.
_LONGEST_RESEND: Final = 32


@dataclass(frozen=True)
class Reservation:
    """The job and entry of a request; ``created`` is False where the key was used before."""

    job_id: str
    entry_id: str
    created: bool


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
    """One line of the books, for reading. ``costs`` has one item a filter, or none at all."""

    id: str
    sequence: int
    job_id: str
    organisation_id: str
    kind: str
    state: str
    parent_entry_id: str | None
    mechanism: JsonObject | None
    mechanism_digest: str | None
    costs: tuple[Cost, ...]
    release_id: str | None
    created_at: int
    updated_at: int


# --------------------------------------------------------------------------------------------------
# Budgets and sums
# --------------------------------------------------------------------------------------------------


def set_budget(
    session: Session, *, dataset_id: str, budget: Budget, now: int
) -> tuple[Filter, ...]:
    """Fixes a dataset's budget, and with it the family of filters, for ever.

    Raises:
        NotFound: no such dataset.
        Conflict: ``budget_already_set``.
    """
    dataset = _lock_dataset(session, dataset_id)
    if session.get(BudgetRow, dataset_id) is not None:
        raise Conflict("budget_already_set", "the dataset's budget is fixed already")
    filters = family(budget)
    session.add(BudgetRow(dataset_id=dataset_id, budget=budget.to_json(), created_at=now))
    for position, f in enumerate(filters):
        session.add(
            FilterRow(
                dataset_id=dataset_id,
                position=position,
                order=f.order,
                delta_units=f.delta_units,
                cap_units=f.cap_units,
                delta_per_release_units=f.delta_per_release_units,
            )
        )
    append(
        session,
        dataset,
        kind="budget",
        entry_id=None,
        state=None,
        now=now,
        data={"budget": budget.to_json(), "filters": [f.to_json() for f in filters]},
    )
    session.flush()
    return filters


def budget_of(session: Session, dataset_id: str) -> tuple[Budget, tuple[Filter, ...]] | None:
    """The dataset's budget and its filters, in the family's order; None before it is set."""
    row = session.get(BudgetRow, dataset_id)
    if row is None:
        return None
    return Budget.from_json(row.budget), filters_of(session, dataset_id)


def states(session: Session, dataset_id: str) -> tuple[FilterState, ...]:
    """What each filter has spent and reserved, recomputed from the entries.

    Empty before the budget is set. Used for admission only under the dataset row's lock.
    """
    filters = filters_of(session, dataset_id)
    # Halves of 32 bits: a sum of 64-bit integers may leave 64 bits, which SQLite refuses to add.
    epsilon, delta = ChargeRow.epsilon_units, ChargeRow.delta_units
    finite = sa.and_(epsilon != INFINITE, delta != INFINITE)
    halves = [
        sa.func.sum(sa.case((finite, half), else_=0))
        for column in (epsilon, delta)
        for half in (column // 2**32, column % 2**32)
    ]
    rows = session.execute(
        sa.select(ChargeRow.position, *halves, sa.func.sum(sa.case((finite, 0), else_=1)))
        .join(EntryRow, EntryRow.id == ChargeRow.entry_id)
        .where(EntryRow.dataset_id == dataset_id, EntryRow.state.in_(CHARGED_STATES))
        .group_by(ChargeRow.position)
    ).all()
    totals = [FilterTotal() for _ in filters]
    for position, epsilon_high, epsilon_low, delta_high, delta_low, infinite in rows:
        totals[position] = FilterTotal(
            (int(epsilon_high) << 32) + int(epsilon_low),
            (int(delta_high) << 32) + int(delta_low),
            int(infinite),
        )
    return tuple(t.state(f) for t, f in zip(totals, filters, strict=True))


def costs_json(filters: Sequence[Filter], costs: Sequence[Cost]) -> list[dict[str, object]]:
    """A charge as ``{"order", "epsilon", "delta"}`` by filter, in nats; infinite is "inf"."""
    return [
        {"order": f.order, "epsilon": _nats(c.epsilon_units), "delta": _delta(c.delta_units)}
        for f, c in zip(filters, costs, strict=True)
    ]


def remaining_json(current: Sequence[FilterState]) -> list[dict[str, object]]:
    """What each filter still admits, in the form of :func:`costs_json`.

    A crossed filter admits nothing, and delta is spent at order inf alone.
    """
    return [
        {
            "order": s.filter.order,
            "epsilon": 0.0 if s.crossed else _nats(max(0, s.filter.cap_units - s.epsilon_units)),
            "delta": 0.0
            if s.crossed or s.filter.order != INFINITE_ORDER
            else _delta(max(0, s.filter.delta_units - s.delta_units)),
        }
        for s in current
    ]


def _exhausted(current: Sequence[FilterState], costs: Sequence[Cost]) -> BudgetExhausted:
    blocking: list[dict[str, object]] = []
    for s, c in zip(current, costs, strict=True):
        f = s.filter
        basic = f.order == INFINITE_ORDER
        infinite = s.crossed or INFINITE in (c.epsilon_units, c.delta_units)
        exceeds = []
        if infinite or s.epsilon_units + c.epsilon_units > f.cap_units:
            exceeds.append("epsilon")
        if basic and (infinite or s.delta_units + c.delta_units > f.delta_units):
            exceeds.append("delta")
        blocking.append(
            {
                "order": f.order,
                "epsilon": _nats(f.cap_units),
                "delta": _delta(f.delta_units) if basic else 0.0,
                "exceeds": exceeds,
            }
        )
    remaining = remaining_json(current)
    parts = [
        f"epsilon {r['epsilon']:g} and delta {r['delta']:g} by basic composition"
        if r["order"] == INFINITE_ORDER
        else f"epsilon {r['epsilon']:g} at Renyi order {r['order']}"
        for r in remaining
    ]
    return BudgetExhausted(
        f"No filter of the budget admits this charge. What remains: {'; '.join(parts)}.",
        extra={
            "requested": costs_json([s.filter for s in current], costs),
            "remaining": remaining,
            "blocking": blocking,
        },
    )


# --------------------------------------------------------------------------------------------------
# Reserve
# --------------------------------------------------------------------------------------------------


def existing_job(
    session: Session,
    *,
    organisation_id: str,
    dataset_id: str,
    idempotency_key: str,
    body_hash: str,
) -> JobRow | None:
    """The job that this key already made, so that a repeated request is answered without work.

    Raises:
        IdempotencyMismatch: the key was used with another body.
    """
    job = session.execute(
        sa.select(JobRow).where(
            JobRow.organisation_id == organisation_id,
            JobRow.dataset_id == dataset_id,
            JobRow.idempotency_key == idempotency_key,
        )
    ).scalar_one_or_none()
    if job is not None and job.body_hash != body_hash:
        raise IdempotencyMismatch("this Idempotency-Key was used before with another body")
    return job


def reserve(
    session: Session,
    *,
    dataset_id: str,
    organisation_id: str,
    idempotency_key: str,
    body_hash: str,
    kind: str,
    spec: Mapping[str, object],
    mechanism: Mechanism | None,
    post_processing: Mapping[str, object],
    certificate_epsilon: Mapping[str, object] | None,
    costs: tuple[Cost, ...],
    snapshot_id: str | None,
    progress_total: int,
    max_attempts: int,
    ttl_seconds: float,
    now: int,
    parent_entry_id: str | None = None,
) -> Reservation:
    """Admits a charge and queues its job, or refuses and leaves nothing behind.

    ``costs`` were computed before the transaction, one for each filter of the dataset. They are
    empty for post-processing alone, which names the released entry it reads in
    ``parent_entry_id`` and has no mechanism.

    The caller sends the job's message after the commit; if it dies between, the sweeper sends it.

    Raises:
        NotFound: no such dataset.
        IdempotencyMismatch: the key was used with another body.
        Conflict: ``no_budget``; ``no_snapshot``; ``parent_not_released``.
        BudgetExhausted: no filter admits the charge; ``extra`` has requested, remaining, blocking.
        InvalidMechanism: the mechanism may not be charged for.
        ValueError: the arguments contradict each other (a caller's mistake, not a client's).
    """
    dataset = _lock_dataset(session, dataset_id)
    existing = existing_job(
        session,
        organisation_id=organisation_id,
        dataset_id=dataset_id,
        idempotency_key=idempotency_key,
        body_hash=body_hash,
    )
    if existing is not None:
        return Reservation(existing.id, existing.entry_id, created=False)

    if progress_total < 0 or max_attempts < 1 or ttl_seconds <= 0:
        raise ValueError("progress_total, max_attempts and ttl_seconds must be positive")
    if session.get(BudgetRow, dataset_id) is None:
        raise Conflict("no_budget", "the dataset has no budget yet")
    snapshot = None if snapshot_id is None else session.get(SnapshotRow, snapshot_id)
    if snapshot is not None and snapshot.dataset_id != dataset_id:
        snapshot = None
    if snapshot is None and (costs or snapshot_id is not None):
        raise Conflict("no_snapshot", "the dataset has no such snapshot of private records")
    if costs:
        if mechanism is None or parent_entry_id is not None:
            raise ValueError("a charge is for a mechanism, and has no parent")
        require_chargeable(mechanism)
        if certificate_epsilon is not None:
            stated = certificate_epsilon.get("neighboring_relation", NEIGHBORING_RELATION)
            if stated != NEIGHBORING_RELATION:
                raise ValueError(f"the ledger charges for {NEIGHBORING_RELATION} only")
        current = states(session, dataset_id)
        _check_costs(current, costs)
        if not admitting(current, costs):
            raise _exhausted(current, costs)
    else:
        if mechanism is not None or parent_entry_id is None:
            raise ValueError("an entry without a charge is post-processing and names its parent")
        parent = session.get(EntryRow, parent_entry_id)
        if parent is None or parent.dataset_id != dataset_id or parent.state != "released":
            raise Conflict("parent_not_released", "the release to be processed does not exist")

    entry_id, job_id = _new_id("ent"), _new_id("job")
    mechanism_json = None if mechanism is None else mechanism_to_json(mechanism)
    mechanism_hash = None if mechanism is None else mechanism_digest(mechanism)
    row = append(
        session,
        dataset,
        kind="reserved",
        entry_id=entry_id,
        state="reserved",
        now=now,
        data={
            "job": job_id,
            "organisation": organisation_id,
            "entry_kind": kind,
            "parent": parent_entry_id,
            "body_hash": body_hash,
            "neighboring_relation": NEIGHBORING_RELATION,
            "mechanism": mechanism_json,
            "mechanism_digest": mechanism_hash,
            "costs": [[c.epsilon_units, c.delta_units] for c in costs],
        },
    )
    session.add(
        EntryRow(
            id=entry_id,
            dataset_id=dataset_id,
            organisation_id=organisation_id,
            sequence=row.sequence,
            kind=kind,
            state="reserved",
            parent_entry_id=parent_entry_id,
            mechanism=mechanism_json,
            mechanism_digest=mechanism_hash,
            created_at=now,
            updated_at=now,
        )
    )
    session.flush()
    for position, cost in enumerate(costs):
        session.add(
            ChargeRow(
                entry_id=entry_id,
                position=position,
                epsilon_units=cost.epsilon_units,
                delta_units=cost.delta_units,
            )
        )
    session.add(
        JobRow(
            id=job_id,
            dataset_id=dataset_id,
            organisation_id=organisation_id,
            entry_id=entry_id,
            snapshot_id=snapshot_id,
            idempotency_key=idempotency_key,
            body_hash=body_hash,
            kind=kind,
            spec=dict(spec),
            mechanism=mechanism_json,
            post_processing=dict(post_processing),
            certificate_epsilon=None if certificate_epsilon is None else dict(certificate_epsilon),
            state="reserved",
            created_at=now,
            updated_at=now,
            attempts=0,
            max_attempts=max_attempts,
            progress_done=0,
            progress_total=progress_total,
            sent_at=now,  # the caller sends right after the commit
            expires_at=now + _microseconds(ttl_seconds),
        )
    )
    session.flush()
    return Reservation(job_id, entry_id, created=True)


def _check_costs(current: Sequence[FilterState], costs: Sequence[Cost]) -> None:
    if len(costs) != len(current):
        raise ValueError(f"{len(costs)} costs for {len(current)} filters")
    for cost in costs:
        for units in (cost.epsilon_units, cost.delta_units):
            if not isinstance(units, int) or not 0 <= units <= INFINITE:
                raise ValueError("a cost is a non-negative integer")


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
    dataset, job = _lock_job(session, job_id)
    token = secrets.token_hex(32)
    lease_expires_at = now + _microseconds(lease_seconds)
    snapshot = None if job.snapshot_id is None else session.get(SnapshotRow, job.snapshot_id)
    charged = session.get_one(EntryRow, job.entry_id).mechanism_digest
    if charged != (None if job.mechanism is None else digest(job.mechanism)):
        # Somebody wrote to the tables. Nothing starts; verify names the row.
        raise Conflict("ledger_inconsistent", "the job's mechanism is not the one charged for")

    if job.state == "reserved":
        if job.expires_at <= now:
            _move(session, dataset, job, "expired", now=now, data={})
            return None
        job.attempts = 1
        job.sealed_seed = sealed_seed
        job.lease_token = token
        job.lease_expires_at = lease_expires_at
        job.job_digest = job_digest
        row = _move(
            session,
            dataset,
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
            _end_failed(session, dataset, job, FAILURE_CODE, now=now)
            return None
        job.attempts += 1
        job.lease_token = token
        job.lease_expires_at = lease_expires_at
        job.updated_at = now
        append(
            session,
            dataset,
            kind="attempt",
            entry_id=job.entry_id,
            state="started",
            now=now,
            data={"attempt": job.attempts, "job_digest": job_digest},
        )
        session.flush()
    else:
        return None

    if job.sealed_seed is None or job.started_sequence is None:
        raise RuntimeError("a started job has a seed and a chain row")
    started_row = session.get_one(ChainRow, (dataset.id, job.started_sequence))
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
            lease_expires_at=now + _microseconds(lease_seconds), progress_done=done, updated_at=now
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
    dataset, job = _lock_attempt(session, job_id, lease_token)
    started_row = session.get_one(ChainRow, (dataset.id, job.started_sequence))
    if certificate.get("artefact") != {"sha256": sha256, "bytes": size}:
        raise ValueError("the certificate is of another artefact")
    if certificate.get("ledger") != {"sequence": started_row.sequence, "hash": started_row.hash}:
        raise ValueError("the certificate names another row of the ledger")
    release_id = _new_id("rel")
    session.add(
        ReleaseRow(
            id=release_id,
            dataset_id=dataset.id,
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
        dataset,
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
    dataset, job = _lock_attempt(session, job_id, lease_token)
    _end_failed(session, dataset, job, code, now=now)


def cancel(session: Session, *, job_id: str, now: int) -> None:
    """Takes a reservation back.

    Raises:
        NotFound: no such job.
        Conflict: ``not_cancellable``: the job started or ended.
    """
    dataset, job = _lock_job(session, job_id)
    if job.state != "reserved":
        raise Conflict("not_cancellable", f"the job is {job.state}")
    _move(session, dataset, job, "cancelled", now=now, data={})


# --------------------------------------------------------------------------------------------------
# The sweeper
# --------------------------------------------------------------------------------------------------


def expire(session: Session, now: int) -> int:
    """Takes back the reservations whose time is over, and says how many."""
    return _end_overdue(session, now, sa.and_(JobRow.state == "reserved", JobRow.expires_at <= now))


def sweep(
    session: Session, *, now: int, resend_after_seconds: float, limit: int = 1000
) -> tuple[str, ...]:
    """Ends what is overdue, and says which jobs to send (again) after the commit.

    * A reservation whose time is over expires.
    * A started job whose lease ran out fails if its attempts are used up, else it is sent.
    * A reserved job is sent if it was not sent lately.

    A job is sent again after it has waited as long again, at first ``resend_after_seconds`` and at
    most 32 times that. A message is a hint: one too many ends at :func:`start`.
    """
    lease_over = sa.and_(JobRow.state == "started", JobRow.lease_expires_at <= now)
    _end_overdue(
        session,
        now,
        sa.or_(
            sa.and_(JobRow.state == "reserved", JobRow.expires_at <= now),
            sa.and_(lease_over, JobRow.attempts >= JobRow.max_attempts),
        ),
    )
    shortest = _microseconds(resend_after_seconds)
    waits_since = sa.case(
        (JobRow.state == "reserved", JobRow.created_at), else_=JobRow.lease_expires_at
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
    expires_at = now + _microseconds(seconds)
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
        sa.select(JobRow.id).where(overdue).order_by(JobRow.dataset_id, JobRow.id)
    ).scalars()
    ended = 0
    for job_id in found.all():
        dataset, job = _lock_job(session, job_id)
        # Read again under the lock: it may have started, or been renewed, since.
        if job.state == "reserved" and job.expires_at <= now:
            _move(session, dataset, job, "expired", now=now, data={})
            ended += 1
        elif (
            job.state == "started"
            and (job.lease_expires_at or 0) <= now
            and job.attempts >= job.max_attempts
        ):
            _end_failed(session, dataset, job, FAILURE_CODE, now=now)
            ended += 1
    return ended


# --------------------------------------------------------------------------------------------------
# Reading the books
# --------------------------------------------------------------------------------------------------


def entries(
    session: Session, dataset_id: str, *, after_sequence: int = 0, limit: int | None = None
) -> list[Entry]:
    """The dataset's entries in the order of their reservation; ``sequence`` is the cursor."""
    rows = session.execute(
        sa.select(EntryRow, JobRow.id, ReleaseRow.id)
        .join(JobRow, JobRow.entry_id == EntryRow.id)
        .outerjoin(ReleaseRow, ReleaseRow.entry_id == EntryRow.id)
        .where(EntryRow.dataset_id == dataset_id, EntryRow.sequence > after_sequence)
        .order_by(EntryRow.sequence)
        .limit(limit)
    ).all()
    costs = _costs_of(session, [row[0].id for row in rows])
    return [
        Entry(
            id=entry.id,
            sequence=entry.sequence,
            job_id=job_id,
            organisation_id=entry.organisation_id,
            kind=entry.kind,
            state=entry.state,
            parent_entry_id=entry.parent_entry_id,
            mechanism=entry.mechanism,
            mechanism_digest=entry.mechanism_digest,
            costs=costs.get(entry.id, ()),
            release_id=release_id,
            created_at=entry.created_at,
            updated_at=entry.updated_at,
        )
        for entry, job_id, release_id in rows
    ]


def chain(
    session: Session, dataset_id: str, *, after_sequence: int = 0, limit: int | None = None
) -> list[ChainRow]:
    """The dataset's chain rows in order; each ``body`` is the text that ``hash`` is of."""
    return list(
        session.scalars(
            sa.select(ChainRow)
            .where(ChainRow.dataset_id == dataset_id, ChainRow.sequence > after_sequence)
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


def _lock_dataset(session: Session, dataset_id: str) -> DatasetRow:
    """The dataset row, locked until the transaction ends and read after the lock was had."""
    dataset = session.get(DatasetRow, dataset_id, with_for_update=True, populate_existing=True)
    if dataset is None:
        raise NotFound
    return dataset


def _lock_job(session: Session, job_id: str) -> tuple[DatasetRow, JobRow]:
    """The job and its dataset, both locked, the dataset first."""
    dataset_id = session.scalar(sa.select(JobRow.dataset_id).where(JobRow.id == job_id))
    if dataset_id is None:
        raise NotFound
    dataset = _lock_dataset(session, dataset_id)
    # Heartbeats change the job's row without the dataset's lock, so it needs one of its own.
    job = session.get_one(JobRow, job_id, with_for_update=True, populate_existing=True)
    return dataset, job


def _lock_attempt(session: Session, job_id: str, lease_token: str) -> tuple[DatasetRow, JobRow]:
    try:
        dataset, job = _lock_job(session, job_id)
    except NotFound:
        raise LeaseLost("there is no such job") from None
    held = job.lease_token if job.state == "started" else None
    if held is None or not secrets.compare_digest(held, lease_token):
        raise LeaseLost("another attempt holds the job, or it has ended")
    return dataset, job


def _move(
    session: Session,
    dataset: DatasetRow,
    job: JobRow,
    state: str,
    *,
    now: int,
    data: Mapping[str, object],
) -> ChainRow:
    """Changes the state of a job and its entry, and adds the chain row."""
    with session.no_autoflush:  # the job's new fields are right only together with its new state
        entry = session.get_one(EntryRow, job.entry_id, populate_existing=True)
    if entry.state != job.state or state not in NEXT_STATES.get(job.state, frozenset()):
        raise RuntimeError(f"no job goes from {job.state} (entry {entry.state}) to {state}")
    job.state = entry.state = state
    job.updated_at = entry.updated_at = now
    if state != "started":
        job.sealed_seed = job.lease_token = job.lease_expires_at = None
    row = append(session, dataset, kind=state, entry_id=entry.id, state=state, now=now, data=data)
    session.flush()
    return row


def _end_failed(session: Session, dataset: DatasetRow, job: JobRow, code: str, *, now: int) -> None:
    job.problem_code = code
    _move(session, dataset, job, "failed_charged", now=now, data={})


def _microseconds(seconds: float) -> int:
    return round(seconds * MICROSECONDS)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _nats(units: int) -> float | str:
    return "inf" if units == INFINITE else units / EPSILON_UNITS


def _delta(units: int) -> float | str:
    return "inf" if units == INFINITE else units / DELTA_UNITS
