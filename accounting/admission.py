"""Admission: the one transaction that checks a request against the books and adds its entry.

It runs under the lock of the books, and every client of a dataset waits for it. So it takes three
statements on PostgreSQL, whatever the number of entries: lock the row with the sums; look at all
that the decision needs; write the entry, its charges, its job, the chain row and the new sums. What
can be computed before the lock is computed before it. SQLite, where a statement is a function call,
takes the same writes one by one.

:mod:`accounting.ledger` is the rest of a job's life, and the face that others use.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session, aliased

from accounting.chain import PLAN, moved_totals, row_after, states_of
from accounting.errors import (
    BudgetExhausted,
    Conflict,
    IdempotencyMismatch,
    NotFound,
)
from accounting.filters import (
    INFINITE,
    INFINITE_ORDER,
    Budget,
    Cost,
    Filter,
    FilterState,
    admitting,
    nats,
    probability,
    shared_out,
)
from accounting.mechanisms import (
    NEIGHBORING_RELATION,
    Composition,
    Mechanism,
    Part,
    mechanism_digest,
    mechanism_to_json,
    require_chargeable,
)
from accounting.tables import (
    Base,
    BudgetRow,
    DatasetRow,
    EntryRow,
    FilterRow,
    JobRow,
    JsonObject,
    OrganisationTotalsRow,
    SnapshotRow,
)

MICROSECONDS: Final = 1_000_000


def microseconds(seconds: float) -> int:
    return round(seconds * MICROSECONDS)


def new_id(prefix: str) -> str:
    """An id with 128 random bits."""
    return f"{prefix}_{secrets.token_hex(16)}"


# --------------------------------------------------------------------------------------------------
# Reserve
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reservation:
    """The job and entry of a request; ``created`` is False where the key was used before.

    ``state`` is that of the job now: only a ``reserved`` one is sent to the workers.
    """

    job_id: str
    entry_id: str
    created: bool
    state: str = "reserved"


@dataclass(frozen=True)
class PlannedJob:
    """One job of a plan, as it will be charged and run; the fields are those of :func:`reserve`."""

    kind: str
    spec: Mapping[str, object]
    mechanism: Mechanism
    post_processing: Mapping[str, object]
    certificate_epsilon: Mapping[str, object]
    progress_total: int


@dataclass(frozen=True)
class PlanReservation:
    """The jobs of a plan in their order, and its entry."""

    job_ids: tuple[str, ...]
    entry_id: str
    created: bool
    state: str


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
    found = session.execute(
        _WITH_KEY, {"organisation": organisation_id, "dataset": dataset_id, "key": idempotency_key}
    ).one_or_none()
    if found is None:
        return None
    _check_body(found.body_hash, body_hash)
    return session.get_one(JobRow, found.id)


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
    request = _Request.of(
        dataset_id=dataset_id,
        organisation_id=organisation_id,
        body_hash=body_hash,
        kind=kind,
        mechanism=mechanism,
        costs=costs,
        snapshot_id=snapshot_id,
        parent_entry_id=parent_entry_id,
        max_attempts=max_attempts,
        ttl_seconds=ttl_seconds,
        now=now,
    )
    job = _job(
        request,
        position=None,
        idempotency_key=idempotency_key,
        kind=kind,
        spec=spec,
        mechanism=request.mechanism,
        post_processing=post_processing,
        certificate_epsilon=certificate_epsilon,
        progress_total=progress_total,
    )
    books = _lock(session, dataset_id, organisation_id, snapshot_id, idempotency_key)
    if books.job is not None:
        job_id, entry_id, known_hash, state = books.job
        _check_body(known_hash, body_hash)
        return Reservation(job_id, entry_id, created=False, state=state)
    state = _admit(session, books, request, [job])
    return Reservation(str(job["id"]), request.entry_id, created=True, state=state)


def plan_mechanism(jobs: Sequence[PlannedJob]) -> Composition:
    """What a plan is charged for: its jobs' mechanisms, in order, fixed in advance together."""
    return Composition(tuple(Part(job.mechanism, 1) for job in jobs))


def plan_key(idempotency_key: str, position: int) -> str:
    """The key of a plan's job; the space keeps it apart from every key that a client can send."""
    return f"{idempotency_key} {position}"


def reserve_plan(
    session: Session,
    *,
    dataset_id: str,
    organisation_id: str,
    idempotency_key: str,
    body_hash: str,
    jobs: Sequence[PlannedJob],
    costs: tuple[Cost, ...],
    snapshot_id: str,
    max_attempts: int,
    ttl_seconds: float,
    now: int,
) -> PlanReservation:
    """Admits a plan, jobs that are fixed before the first of them starts, as one charge.

    ``costs`` are those of :func:`plan_mechanism`, computed before the transaction: together the
    jobs cost less than one by one. The other arguments and errors are those of :func:`reserve`.
    """
    if not jobs:
        raise ValueError("a plan has jobs")
    request = _Request.of(
        dataset_id=dataset_id,
        organisation_id=organisation_id,
        body_hash=body_hash,
        kind=PLAN,
        mechanism=plan_mechanism(jobs),
        costs=costs,
        snapshot_id=snapshot_id,
        parent_entry_id=None,
        max_attempts=max_attempts,
        ttl_seconds=ttl_seconds,
        now=now,
    )
    rows = [
        _job(
            request,
            position=position,
            idempotency_key=plan_key(idempotency_key, position),
            kind=job.kind,
            spec=job.spec,
            mechanism=mechanism_to_json(job.mechanism),
            post_processing=job.post_processing,
            certificate_epsilon=job.certificate_epsilon,
            progress_total=job.progress_total,
        )
        for position, job in enumerate(jobs)
    ]
    first_key = plan_key(idempotency_key, 0)
    books = _lock(session, dataset_id, organisation_id, snapshot_id, first_key)
    if books.job is not None:
        _, entry_id, known_hash, _ = books.job
        _check_body(known_hash, body_hash)
        known = session.scalars(
            sa.select(JobRow.id).where(JobRow.entry_id == entry_id).order_by(JobRow.plan_position)
        ).all()
        state = session.get_one(EntryRow, entry_id).state
        return PlanReservation(tuple(known), entry_id, created=False, state=state)
    state = _admit(session, books, request, rows)
    job_ids = tuple(str(row["id"]) for row in rows)
    return PlanReservation(job_ids, request.entry_id, created=True, state=state)


@dataclass(frozen=True)
class _Request:
    """What is asked for, with all of it that needs no lock."""

    entry_id: str
    dataset_id: str
    organisation_id: str
    body_hash: str
    kind: str
    mechanism: JsonObject | None
    mechanism_digest: str | None
    costs: tuple[Cost, ...]
    snapshot_id: str | None
    parent_entry_id: str | None
    max_attempts: int
    expires_at: int
    now: int

    @classmethod
    def of(
        cls,
        *,
        mechanism: Mechanism | None,
        costs: tuple[Cost, ...],
        parent_entry_id: str | None,
        max_attempts: int,
        ttl_seconds: float,
        now: int,
        **others: Any,
    ) -> _Request:
        if max_attempts < 1 or ttl_seconds <= 0:
            raise ValueError("max_attempts and ttl_seconds must be positive")
        if mechanism is not None:
            require_chargeable(mechanism)
        return cls(
            entry_id=new_id("ent"),
            mechanism=None if mechanism is None else mechanism_to_json(mechanism),
            mechanism_digest=None if mechanism is None else mechanism_digest(mechanism),
            costs=costs,
            parent_entry_id=parent_entry_id,
            max_attempts=max_attempts,
            expires_at=now + microseconds(ttl_seconds),
            now=now,
            **others,
        )


def _check_body(known: str, asked: str) -> None:
    if known != asked:
        raise IdempotencyMismatch("this Idempotency-Key was used before with another body")


def _admit(
    session: Session, books: _Books, request: _Request, jobs: Sequence[dict[str, object]]
) -> str:
    """Checks a request against the locked books and adds it; the state that it is in."""
    if books.budget is None:
        raise Conflict("no_budget", "the dataset has no budget yet")
    costs, parent_id = request.costs, request.parent_entry_id
    charged = request.mechanism is not None
    if bool(costs) != charged or charged == (parent_id is not None):
        raise ValueError("a charge is for a mechanism; post-processing names its parent instead")
    if not books.has_snapshot and (charged or request.snapshot_id is not None):
        raise Conflict("no_snapshot", "the dataset has no such snapshot of private records")
    state = "reserved"
    if charged:
        current = states_of(books.filters, books.totals)
        _check_costs(current, costs)
        if not admitting(current, costs):
            raise _exhausted(current, costs, scope="dataset")
        share = books.budget.share_of(request.organisation_id)
        if share is not None:
            own = books.own or [[0, 0, 0] for _ in costs]
            capped = states_of([shared_out(f, share) for f in books.filters], own)
            if not admitting(capped, costs):
                raise _exhausted(capped, costs, scope="organisation")
        if books.budget.needs_approval(books.filters, costs):
            state = "awaiting_approval"
    else:
        parent = session.get(EntryRow, parent_id)
        if parent is None or parent.dataset_id != request.dataset_id or parent.state != "released":
            raise Conflict("parent_not_released", "the release to be processed does not exist")
    chain_row = row_after(
        books.id,
        books.sequence,
        books.hash,
        kind=state,
        entry_id=request.entry_id,
        state=state,
        now=request.now,
        data={
            "dataset": request.dataset_id,
            "jobs": [job["id"] for job in jobs],
            "organisation": request.organisation_id,
            "entry_kind": request.kind,
            "parent": parent_id,
            "body_hash": request.body_hash,
            "neighboring_relation": NEIGHBORING_RELATION,
            "mechanism": request.mechanism,
            "mechanism_digest": request.mechanism_digest,
            "costs": [[c.epsilon_units, c.delta_units] for c in costs],
        },
    )
    for job in jobs:
        job["state"] = state
    _write(
        session,
        books,
        chain_row=chain_row,
        entry={
            "id": request.entry_id,
            "books_id": books.id,
            "dataset_id": request.dataset_id,
            "organisation_id": request.organisation_id,
            "sequence": chain_row["sequence"],
            "kind": request.kind,
            "state": state,
            "parent_entry_id": parent_id,
            "mechanism": request.mechanism,
            "mechanism_digest": request.mechanism_digest,
            "created_at": request.now,
            "updated_at": request.now,
        },
        costs=costs,
        jobs=jobs,
    )
    return state


def _job(
    request: _Request,
    *,
    position: int | None,
    idempotency_key: str,
    kind: str,
    spec: Mapping[str, object],
    mechanism: JsonObject | None,
    post_processing: Mapping[str, object],
    certificate_epsilon: Mapping[str, object] | None,
    progress_total: int,
) -> dict[str, object]:
    """The row of a job, but for its state, which the admission gives."""
    if progress_total < 0:
        raise ValueError("progress_total must not be negative")
    if certificate_epsilon is not None:
        stated = certificate_epsilon.get("neighboring_relation", NEIGHBORING_RELATION)
        if stated != NEIGHBORING_RELATION:
            raise ValueError(f"the ledger charges for {NEIGHBORING_RELATION} only")
    return {
        "id": new_id("job"),
        "dataset_id": request.dataset_id,
        "organisation_id": request.organisation_id,
        "entry_id": request.entry_id,
        "plan_position": position,
        "snapshot_id": request.snapshot_id,
        "idempotency_key": idempotency_key,
        "body_hash": request.body_hash,
        "kind": kind,
        "spec": dict(spec),
        "mechanism": mechanism,
        "post_processing": dict(post_processing),
        "certificate_epsilon": None if certificate_epsilon is None else dict(certificate_epsilon),
        "created_at": request.now,
        "updated_at": request.now,
        "max_attempts": request.max_attempts,
        "progress_total": progress_total,
        "sent_at": request.now,  # the caller sends right after the commit
        "expires_at": request.expires_at,
    }


def _check_costs(current: Sequence[FilterState], costs: Sequence[Cost]) -> None:
    if len(costs) != len(current):
        raise ValueError(f"{len(costs)} costs for {len(current)} filters")
    for cost in costs:
        for units in (cost.epsilon_units, cost.delta_units):
            if not isinstance(units, int) or not 0 <= units <= INFINITE:
                raise ValueError("a cost is a non-negative integer")


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------


def costs_json(filters: Sequence[Filter], costs: Sequence[Cost]) -> list[dict[str, object]]:
    """A charge as ``{"order", "epsilon", "delta"}`` by filter, in nats; infinite is "inf"."""
    return [
        {"order": f.order, "epsilon": nats(c.epsilon_units), "delta": probability(c.delta_units)}
        for f, c in zip(filters, costs, strict=True)
    ]


def remaining_json(current: Sequence[FilterState]) -> list[dict[str, object]]:
    """What each filter still admits, in the form of :func:`costs_json`.

    A crossed filter admits nothing, and delta is spent at order inf alone.
    """
    return [
        {
            "order": s.filter.order,
            "epsilon": 0.0 if s.crossed else nats(max(0, s.filter.cap_units - s.epsilon_units)),
            "delta": 0.0
            if s.crossed or s.filter.order != INFINITE_ORDER
            else probability(max(0, s.filter.delta_units - s.delta_units)),
        }
        for s in current
    ]


def _exhausted(
    current: Sequence[FilterState], costs: Sequence[Cost], *, scope: str
) -> BudgetExhausted:
    """The refusal; ``scope`` is ``dataset`` or, for an organisation's cap, ``organisation``."""
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
                "epsilon": nats(f.cap_units),
                "delta": probability(f.delta_units) if basic else 0.0,
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
    whose = "the budget" if scope == "dataset" else "your organisation's share of the budget"
    return BudgetExhausted(
        f"No filter of {whose} admits this charge. What remains: {'; '.join(parts)}.",
        extra={
            "scope": scope,
            "requested": costs_json([s.filter for s in current], costs),
            "remaining": remaining,
            "blocking": blocking,
        },
    )


# --------------------------------------------------------------------------------------------------
# Statements
# --------------------------------------------------------------------------------------------------

# Built once: each order asks these.
_WITH_KEY: Final = sa.select(JobRow.id, JobRow.body_hash).where(
    JobRow.organisation_id == sa.bindparam("organisation"),
    JobRow.dataset_id == sa.bindparam("dataset"),
    JobRow.idempotency_key == sa.bindparam("key"),
)
_Asked = aliased(DatasetRow)
_LOCK: Final = (
    sa.select(DatasetRow.id, DatasetRow.chain_sequence, DatasetRow.chain_hash, DatasetRow.totals)
    .where(
        DatasetRow.id
        == sa.select(_Asked.books_id).where(_Asked.id == sa.bindparam("dataset")).scalar_subquery()
    )
    .with_for_update()
)
# A statement of its own: one that waits for a lock sees the other rows as they were before.
_LOOK: Final = (
    sa.select(
        FilterRow.order,
        FilterRow.delta_units,
        FilterRow.cap_units,
        FilterRow.delta_per_release_units,
        BudgetRow.budget,
        SnapshotRow.id.label("snapshot"),
        OrganisationTotalsRow.totals.label("own"),
        JobRow.id.label("job"),
        JobRow.entry_id,
        JobRow.body_hash,
        JobRow.state,
    )
    .select_from(BudgetRow)
    .join(FilterRow, FilterRow.dataset_id == BudgetRow.dataset_id)
    .outerjoin(
        SnapshotRow,
        sa.and_(
            SnapshotRow.id == sa.bindparam("snapshot"),
            SnapshotRow.dataset_id == sa.bindparam("dataset"),
        ),
    )
    .outerjoin(
        OrganisationTotalsRow,
        sa.and_(
            OrganisationTotalsRow.dataset_id == BudgetRow.dataset_id,
            OrganisationTotalsRow.organisation_id == sa.bindparam("organisation"),
        ),
    )
    .outerjoin(
        JobRow,
        sa.and_(
            JobRow.organisation_id == sa.bindparam("organisation"),
            JobRow.dataset_id == sa.bindparam("dataset"),
            JobRow.idempotency_key == sa.bindparam("key"),
        ),
    )
    .where(BudgetRow.dataset_id == sa.bindparam("books"))
    .order_by(FilterRow.position)
)

_BOOKS: Final = (
    sa.update(DatasetRow)
    .where(DatasetRow.id == sa.bindparam("books"))
    .values(
        chain_sequence=sa.bindparam("new_sequence"),
        chain_hash=sa.bindparam("new_hash"),
        totals=sa.bindparam("new_totals", type_=DatasetRow.__table__.c.totals.type),
    )
)


def _insert(table: sa.Table, **fixed: sa.ColumnElement[Any]) -> sa.Insert:
    """Adds one row: what is fixed, and a parameter for each other column.

    Parameters are short and unlike those of any other table here. psycopg reads a statement anew
    each time if it has 4,096 characters or 50 parameters, which takes longer than sending it.
    """
    return sa.insert(table).values(_values(table, fixed) | fixed)


def _values(table: sa.Table, without: Mapping[str, object]) -> dict[str, sa.ColumnElement[Any]]:
    return {
        c.name: sa.bindparam(_name(table, i), type_=c.type)
        for i, c in enumerate(table.c)
        if c.name not in without
    }


def _name(table: sa.Table, column: int) -> str:
    return f"{table.name[0]}{column}"


def _parameters(table: sa.Table, row: Mapping[str, object]) -> dict[str, object]:
    return {_name(table, i): row[c.name] for i, c in enumerate(table.c) if c.name in row}


_CHAIN, _ENTRIES, _CHARGES, _JOBS, _TOTALS = (
    Base.metadata.tables[name]
    for name in ("chain", "entries", "charges", "jobs", "organisation_totals")
)
_ROW: Final = _insert(_CHAIN)
_ENTRY: Final = _insert(_ENTRIES)
_NULL: Final = sa.null()
_ZERO: Final[sa.ColumnElement[Any]] = sa.literal_column("0")
_JOB: Final = _insert(
    _JOBS,
    attempts=_ZERO,
    progress_done=_ZERO,
    lease_token=_NULL,
    lease_expires_at=_NULL,
    sealed_seed=_NULL,
    job_digest=_NULL,
    started_sequence=_NULL,
    problem_code=_NULL,
)


def _own(insert: postgresql.Insert | sqlite.Insert) -> sa.Insert:
    adding = insert.values(_values(_TOTALS, {}))
    return adding.on_conflict_do_update(
        index_elements=[_TOTALS.c.dataset_id, _TOTALS.c.organisation_id],
        set_={"totals": adding.excluded.totals},
    )


_OWN: Final = {
    "postgresql": _own(postgresql.insert(_TOTALS)),
    "sqlite": _own(sqlite.insert(_TOTALS)),
}
_ARRAY: Final = postgresql.ARRAY(sa.BigInteger())
_CHARGES_AT_ONCE: Final = sa.insert(_CHARGES).from_select(
    ["entry_id", "position", "epsilon_units", "delta_units"],
    sa.select(
        sa.bindparam("entry", type_=_CHARGES.c.entry_id.type),
        *(
            sa.func.unnest(sa.bindparam(name, type_=_ARRAY))
            for name in ("positions", "epsilons", "deltas")
        ),
    ),
)
_ALL_AT_ONCE: Final = sa.select(sa.literal(1)).add_cte(
    *(
        statement.cte(name)
        for name, statement in (
            ("a", _BOOKS),
            ("b", _ROW),
            ("c", _OWN["postgresql"]),
            ("d", _ENTRY),
            ("e", _CHARGES_AT_ONCE),
            ("f", _JOB),
        )
    )
)


@dataclass(frozen=True)
class _Books:
    """The locked books, with all that an admission looks at."""

    id: str
    sequence: int
    hash: str
    totals: list[list[int]]
    budget: Budget | None
    filters: tuple[Filter, ...]
    own: list[list[int]] | None
    has_snapshot: bool
    job: tuple[str, str, str, str] | None  # id, entry, hash of the body, state


def _lock(
    session: Session, dataset_id: str, organisation_id: str, snapshot_id: str | None, key: str
) -> _Books:
    """Locks the books to the transaction's end and reads them under the lock.

    Raises:
        NotFound: no such dataset.
    """
    connection = session.connection()
    row = connection.execute(_LOCK, {"dataset": dataset_id}).one_or_none()
    if row is None:
        raise NotFound
    seen = connection.execute(
        _LOOK,
        {
            "dataset": dataset_id,
            "books": row.id,
            "organisation": organisation_id,
            "snapshot": snapshot_id,
            "key": key,
        },
    ).all()
    first = seen[0] if seen else None
    return _Books(
        id=row.id,
        sequence=row.chain_sequence,
        hash=row.chain_hash,
        totals=row.totals,
        budget=None if first is None else Budget.from_json(first.budget),
        filters=tuple(Filter(*f[:4]) for f in seen),
        own=None if first is None else first.own,
        has_snapshot=first is not None and first.snapshot is not None,
        job=None
        if first is None or first.job is None
        else (first.job, first.entry_id, first.body_hash, first.state),
    )


def _write(
    session: Session,
    books: _Books,
    *,
    chain_row: Mapping[str, object],
    entry: Mapping[str, object],
    costs: Sequence[Cost],
    jobs: Sequence[Mapping[str, object]],
) -> None:
    connection = session.connection()
    totals = moved_totals(books.totals, costs, 1) if costs else books.totals
    whole = {
        "books": books.id,
        "new_sequence": chain_row["sequence"],
        "new_hash": chain_row["hash"],
        "new_totals": totals,
    }
    nothing = [[0, 0, 0] for _ in costs]
    own = {
        "dataset_id": books.id,
        "organisation_id": entry["organisation_id"],
        "totals": moved_totals(books.own or nothing, costs, 1) if costs else nothing,
    }
    row, added = _parameters(_CHAIN, chain_row), _parameters(_ENTRIES, entry)
    if connection.dialect.name == "postgresql" and costs and len(jobs) == 1:
        charges = {
            "entry": entry["id"],
            "positions": list(range(len(costs))),
            "epsilons": [c.epsilon_units for c in costs],
            "deltas": [c.delta_units for c in costs],
        }
        job = _parameters(_JOBS, jobs[0])
        connection.execute(
            _ALL_AT_ONCE, {**whole, **row, **_parameters(_TOTALS, own), **added, **charges, **job}
        )
    else:
        connection.execute(_BOOKS, whole)
        connection.execute(_ROW, row)
        connection.execute(_ENTRY, added)
        if costs:
            connection.execute(_OWN[connection.dialect.name], _parameters(_TOTALS, own))
            connection.execute(
                sa.insert(_CHARGES),
                [
                    {
                        "entry_id": entry["id"],
                        "position": position,
                        "epsilon_units": cost.epsilon_units,
                        "delta_units": cost.delta_units,
                    }
                    for position, cost in enumerate(costs)
                ],
            )
        connection.execute(_JOB, [_parameters(_JOBS, job) for job in jobs])
    # What the session may have read of these rows is out of date.
    for known in list(session.identity_map.values()):
        if isinstance(known, DatasetRow | OrganisationTotalsRow):
            session.expire(known)
