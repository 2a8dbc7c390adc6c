"""The hash chain of a dataset's books: how a row is made, and how the whole is checked.

A row's ``body`` is canonical JSON; its ``hash`` is the SHA-256 of that text, and the next body
holds it as ``previous``:

    {"version": 1, "dataset", "sequence", "previous", "kind", "entry", "state", "at", "data"}

``dataset`` is the dataset whose books these are. ``kind`` is ``budget`` (fixed or tightened),
``awaiting_approval`` or ``reserved`` (an entry is added), ``approved``, ``started``, ``attempt`` (a
started job taken over), ``released``, ``failed_charged``, ``cancelled``, ``expired`` or ``denied``;
``state`` is the entry's state after the row; ``at`` is microseconds since 1970 UTC. ``data`` holds
what the row adds, so that the books can be replayed from the bodies alone: the row that adds an
entry has its jobs, its mechanism and its costs, and a row that moves one job names it.

Who can write to the database can rewrite a whole chain. What stands against that is outside: a
certificate holds the hash of its ``started`` row, and so does every copy of an older head.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from accounting.canonical import canonical_json, digest
from accounting.errors import InvalidRequest, NotFound
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
    charge,
    family,
    shared_out,
    tightened,
)
from accounting.mechanisms import NEIGHBORING_RELATION, Mechanism, mechanism_from_json
from accounting.tables import (
    GENESIS_HASH,
    HELD_STATES,
    BudgetRow,
    ChainRow,
    ChargeRow,
    DatasetRow,
    EntryRow,
    FilterRow,
    JobRow,
    JsonObject,
    OrganisationTotalsRow,
    ReleaseRow,
    SnapshotRow,
)

if TYPE_CHECKING:
    from accounting.bounds import Bracket

_Row = tuple[int, str, str, str]
EpsilonBound = Callable[[Mechanism, float], "Bracket"]

PLAN: Final = "plan"
"""The kind of an entry that has several jobs."""

NEXT_STATES: Final[Mapping[str, frozenset[str]]] = {
    "awaiting_approval": frozenset({"reserved", "denied", "cancelled", "expired"}),
    "reserved": frozenset({"started", "cancelled", "expired"}),
    "started": frozenset({"released", "failed_charged"}),
}
"""The changes of state that there are."""

# A cost is recomputed with another build of the same arithmetic, whose last bits may differ.
_RECOMPUTED_RELATIVE: Final = 1e-9
_RECOMPUTED_UNITS: Final = 1


@dataclass(frozen=True)
class Verification:
    """What :func:`verify` found.

    ``rows`` is the number of chain rows before the first that is wrong; ``first_bad`` the sequence
    number of the first row that is wrong or missing; ``problem`` says what is wrong with it;
    ``head`` is the hash of the last of the ``rows``. ``unconfirmed`` counts the distinct charges
    whose cost by basic composition the accountant could not confirm within its limits.
    """

    ok: bool
    rows: int
    first_bad: int | None
    problem: str | None
    head: str
    unconfirmed: int = 0

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass
class FilterTotal:
    """A filter's sums, with infinite costs counted apart: they are never added."""

    epsilon_units: int = 0
    delta_units: int = 0
    infinite: int = 0

    def add(self, cost: Cost, sign: int = 1) -> None:
        if INFINITE in (cost.epsilon_units, cost.delta_units):
            self.infinite += sign
        else:
            self.epsilon_units += sign * cost.epsilon_units
            self.delta_units += sign * cost.delta_units

    def state(self, f: Filter) -> FilterState:
        """The state that the admission rule reads."""
        return FilterState(f, self.epsilon_units, self.delta_units, crossed=self.infinite > 0)


def entry_state(job_states: Sequence[str]) -> str:
    """The state of a started plan by those of its jobs: it ends with the last of them."""
    if any(state in ("reserved", "started") for state in job_states):
        return "started"
    return "released" if "released" in job_states else "failed_charged"


def filters_of(session: Session, dataset_id: str) -> tuple[Filter, ...]:
    """The filters of these books in the family's order; empty before the budget is set."""
    # Columns, not objects: what the session holds already may be older than the caller's lock.
    return tuple(
        Filter(*row)
        for row in session.execute(
            sa.select(
                FilterRow.order,
                FilterRow.delta_units,
                FilterRow.cap_units,
                FilterRow.delta_per_release_units,
            )
            .where(FilterRow.dataset_id == dataset_id)
            .order_by(FilterRow.position)
        )
    )


def states_of(
    filters: Sequence[Filter], totals: Sequence[Sequence[int]]
) -> tuple[FilterState, ...]:
    """The states of filters by their sums ``[epsilon_units, delta_units, entries of infinite]``."""
    return tuple(FilterTotal(*sums).state(f) for f, sums in zip(filters, totals, strict=True))


def moved_totals(
    totals: Sequence[Sequence[int]], costs: Sequence[Cost], sign: int
) -> list[list[int]]:
    """The sums with a charge added (``sign`` 1) or taken back (-1)."""
    moved = []
    for sums, cost in zip(totals, costs, strict=True):
        total = FilterTotal(*sums)
        total.add(cost, sign)
        moved.append([total.epsilon_units, total.delta_units, total.infinite])
    return moved


def row_after(
    books_id: str,
    sequence: int,
    previous: str,
    *,
    kind: str,
    entry_id: str | None,
    state: str | None,
    now: int,
    data: Mapping[str, object],
) -> dict[str, Any]:
    """The columns of the row that follows row ``sequence``, whose hash is ``previous``."""
    body = canonical_json(
        {
            "version": 1,
            "dataset": books_id,
            "sequence": sequence + 1,
            "previous": previous,
            "kind": kind,
            "entry": entry_id,
            "state": state,
            "at": now,
            "data": dict(data),
        }
    )
    return {
        "dataset_id": books_id,
        "sequence": sequence + 1,
        "previous_hash": previous,
        "hash": hashlib.sha256(body).hexdigest(),
        "body": body.decode(),
    }


def append(
    session: Session,
    books: DatasetRow,
    *,
    kind: str,
    entry_id: str | None,
    state: str | None,
    now: int,
    data: Mapping[str, object],
) -> ChainRow:
    """Adds a row to the chain of books whose row the caller has locked."""
    row = ChainRow(
        **row_after(
            books.id,
            books.chain_sequence,
            books.chain_hash,
            kind=kind,
            entry_id=entry_id,
            state=state,
            now=now,
            data=data,
        )
    )
    session.add(row)
    books.chain_sequence = row.sequence
    books.chain_hash = row.hash
    return row


# --------------------------------------------------------------------------------------------------
# Verification
# --------------------------------------------------------------------------------------------------


class _Bad(Exception):
    def __init__(self, problem: str, sequence: int | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.sequence = sequence


@dataclass
class _Entry:
    """An entry as the chain tells it; ``jobs`` has the state of each, in the plan's order."""

    first: int
    last: int
    kind: str
    state: str
    dataset: object
    jobs: dict[str, str]
    parent: object
    organisation: str
    mechanism: JsonObject | None
    mechanism_digest: str | None
    costs: tuple[Cost, ...]
    body_hash: object = None
    started: dict[str, int] = field(default_factory=dict)
    attempts: dict[str, tuple[int, object]] = field(default_factory=dict)  # last, job digest
    snapshots: dict[str, object] = field(default_factory=dict)
    released: dict[str, JsonObject] = field(default_factory=dict)

    def mechanism_of(self, job: str) -> JsonObject | None:
        """What was charged for this job: the entry's mechanism, or its part of a plan."""
        if self.kind != PLAN or self.mechanism is None:
            return self.mechanism
        part: JsonObject = self.mechanism["parts"][list(self.jobs).index(job)]["mechanism"]
        return part


@dataclass
class _Replay:
    """The books, rebuilt from the bodies of the chain."""

    epsilon_bound: EpsilonBound | None
    rigorous_seconds: float | None = None
    budget_json: JsonObject | None = None
    budget_sequence: int = 0
    budget: Budget | None = None
    filters: tuple[Filter, ...] = ()
    totals: list[FilterTotal] = field(default_factory=list)
    organisations: dict[str, list[FilterTotal]] = field(default_factory=dict)
    entries: dict[str, _Entry] = field(default_factory=dict)
    mechanisms: dict[str, JsonObject] = field(default_factory=dict)  # by digest, once checked
    costs_checked: dict[tuple[str, tuple[Cost, ...]], str | None] = field(default_factory=dict)
    unconfirmed: int = 0

    def apply(self, body: JsonObject) -> None:
        """Plays one row.

        Raises:
            _Bad: the row could not follow from the rows before it.
        """
        kind, data = body["kind"], body["data"]
        if kind == "budget":
            self._budget(body["sequence"], data)
        elif kind in HELD_STATES:
            if body["state"] != kind:
                raise _Bad("the row's kind and state differ")
            self._added(body["sequence"], body["entry"], kind, data)
        else:
            self._moved(body["sequence"], body["entry"], kind, body["state"], data)

    def _budget(self, sequence: int, data: JsonObject) -> None:
        budget = Budget.from_json(data["budget"])
        stored = tuple(
            Filter(f["order"], f["delta_units"], f["cap_units"], f["delta_per_release_units"])
            for f in data["filters"]
        )
        if self.budget is None:
            published = family(budget)
            self.totals = [FilterTotal() for _ in stored]
        else:
            try:
                published = tightened(self.filters, self.budget, budget)
            except InvalidRequest as error:
                raise _Bad(f"the budget was raised: {error.detail}") from None
        if len(published) != len(stored) or not all(map(_same_filter, stored, published)):
            raise _Bad("the filters are not those that the budget stands for")
        self.budget, self.budget_json = budget, data["budget"]
        self.filters, self.budget_sequence = stored, sequence

    def _added(self, sequence: int, entry_id: str, state: str, data: JsonObject) -> None:
        if entry_id in self.entries:
            raise _Bad("the entry was reserved before")
        mechanism, organisation = data["mechanism"], str(data["organisation"])
        costs = tuple(Cost(epsilon, delta) for epsilon, delta in data["costs"])
        if data["neighboring_relation"] != NEIGHBORING_RELATION:
            raise _Bad("another neighbouring relation")
        if costs:
            if self.budget is None or len(costs) != len(self.filters) or mechanism is None:
                raise _Bad("the charge has no mechanism, or not one cost a filter")
            if any(not 0 <= u <= INFINITE for c in costs for u in (c.epsilon_units, c.delta_units)):
                raise _Bad("a cost is out of range")
            known = self.mechanisms.get(data["mechanism_digest"])
            if known is None or known != mechanism:
                if data["mechanism_digest"] != digest(mechanism):
                    raise _Bad("the mechanism's digest differs")
                self.mechanisms[data["mechanism_digest"]] = mechanism
            if not admitting(states_of(self.filters, _sums(self.totals)), costs):
                raise _Bad("no filter admitted this charge")
            share = self.budget.share_of(organisation)
            if share is not None:
                own = self.organisations.get(organisation, [FilterTotal()] * len(self.filters))
                capped = states_of([shared_out(f, share) for f in self.filters], _sums(own))
                if not admitting(capped, costs):
                    raise _Bad("the organisation's cap did not admit this charge")
            waits = self.budget.needs_approval(self.filters, costs)
            if waits != (state == "awaiting_approval"):
                raise _Bad("the charge did not wait for approval as the budget says")
            problem = self._recompute(data["mechanism_digest"], mechanism, costs)
            if problem is not None:
                raise _Bad(problem)
            self._count(organisation, costs, 1)
        else:
            parent = self.entries.get(str(data["parent"]))
            if parent is None or parent.state != "released" or mechanism is not None:
                raise _Bad("an entry without a charge must process a released one")
        jobs = data["jobs"]
        if data["entry_kind"] != PLAN:
            if len(jobs) != 1:
                raise _Bad("an entry that is no plan has one job")
        elif mechanism is None or [p["count"] for p in mechanism["parts"]] != [1] * len(jobs):
            raise _Bad("a plan is charged for each of its jobs once")
        self.entries[entry_id] = _Entry(
            first=sequence,
            last=sequence,
            kind=data["entry_kind"],
            state=state,
            dataset=data["dataset"],
            jobs={str(job): state for job in jobs},
            parent=data["parent"],
            organisation=organisation,
            mechanism=mechanism,
            mechanism_digest=data["mechanism_digest"] if costs else None,
            costs=costs,
            body_hash=data["body_hash"],
        )

    def _moved(self, sequence: int, entry_id: str, kind: str, state: str, data: JsonObject) -> None:
        entry = self.entries.get(entry_id)
        if entry is None:
            raise _Bad("the entry was never reserved")
        if kind in ("started", "attempt", "released", "failed_charged"):
            self._job_moved(sequence, entry, kind, data)
        else:
            to = "reserved" if kind == "approved" else kind
            before = entry.state
            if to not in NEXT_STATES.get(before, ()) or before not in HELD_STATES:
                raise _Bad(f"no entry goes from {before} to {to}")
            entry.state = to
            entry.jobs = dict.fromkeys(entry.jobs, to)
            if to != "reserved":
                self._count(entry.organisation, entry.costs, -1)
        if state != entry.state:
            raise _Bad("the row's state is not the one that it leads to")
        entry.last = sequence

    def _job_moved(self, sequence: int, entry: _Entry, kind: str, data: JsonObject) -> None:
        job = data["job"]
        before = entry.jobs.get(job)
        if before is None:
            raise _Bad("the entry has no such job")
        if kind == "attempt":
            if before != "started":
                raise _Bad("an attempt at a job that is not started")
            number, job_digest = entry.attempts[job]
            if (data["attempt"], data["job_digest"]) != (number + 1, job_digest):
                raise _Bad("an attempt that does not repeat the one before it")
            entry.attempts[job] = (number + 1, job_digest)
            return
        if kind not in NEXT_STATES.get(before, ()):
            raise _Bad(f"no job goes from {before} to {kind}")
        entry.jobs[job] = kind
        entry.state = entry_state(list(entry.jobs.values()))
        if kind == "started":
            charged = entry.mechanism_digest
            if entry.kind == PLAN:
                charged = digest(entry.mechanism_of(job))
            if data["mechanism_digest"] != charged:
                raise _Bad("the job was started with another mechanism than was charged")
            entry.started[job] = sequence
            entry.attempts[job] = (data["attempt"], data["job_digest"])
            entry.snapshots[job] = data["snapshot"]
        elif kind == "released":
            if set(data) != {"job", "release", "artefact", "certificate_digest"}:
                raise _Bad("the row does not tell its release")
            entry.released[job] = {name: value for name, value in data.items() if name != "job"}

    def _count(self, organisation: str, costs: Sequence[Cost], sign: int) -> None:
        if not costs:
            return
        own = self.organisations.setdefault(organisation, [FilterTotal() for _ in costs])
        for totals in (self.totals, own):
            for total, cost in zip(totals, costs, strict=True):
                total.add(cost, sign)

    def _recompute(
        self, key: str, mechanism_json: JsonObject, costs: tuple[Cost, ...]
    ) -> str | None:
        """What is wrong with a charge as the price of its mechanism; None if nothing is."""
        if (key, costs) not in self.costs_checked:
            self.costs_checked[key, costs] = self._compare(mechanism_json, costs)
        return self.costs_checked[key, costs]

    def _compare(self, mechanism_json: JsonObject, costs: tuple[Cost, ...]) -> str | None:
        mechanism = mechanism_from_json(mechanism_json)
        finite = [
            (f, c) for f, c in zip(self.filters, costs, strict=True) if f.order != INFINITE_ORDER
        ]
        fresh = charge(mechanism, tuple(f for f, _ in finite), epsilon_bound=_not_asked)
        for (f, recorded), now in zip(finite, fresh, strict=True):
            if _below(recorded.epsilon_units, now.epsilon_units):
                return f"the cost at order {f.order} is below that of its mechanism"
        for f, recorded in zip(self.filters, costs, strict=True):
            if f.order != INFINITE_ORDER or INFINITE in (
                recorded.epsilon_units,
                recorded.delta_units,
            ):
                continue
            verdicts = (self._bounded(mechanism, recorded), self._proven(mechanism, recorded))
            if False in verdicts:
                return "the cost by basic composition is below that of its mechanism"
            self.unconfirmed += None in verdicts
        return None

    def _bounded(self, mechanism: Mechanism, recorded: Cost) -> bool | None:
        """Whether the accountant confirms a cost by basic composition; None if it is cut short."""
        if self.epsilon_bound is None:
            return True
        # Delta is rounded to a double upwards, where the true epsilon is no larger.
        delta = math.nextafter(recorded.delta_units / DELTA_UNITS, math.inf)
        bracket = self.epsilon_bound(mechanism, delta)
        if _covers(recorded, bracket.upper):
            return True
        # Cut short by its limits, the accountant may answer looser than when it charged.
        return None if bracket.reason and _covers(recorded, bracket.lower) else False

    def _proven(self, mechanism: Mechanism, recorded: Cost) -> bool | None:
        """Whether ball arithmetic confirms it; None if its time is not enough."""
        if self.rigorous_seconds is None:
            return True
        from accounting import rigorous  # Arb is loaded by those who ask for it

        found = rigorous.confirm(
            mechanism,
            math.nextafter(recorded.epsilon_units / EPSILON_UNITS, math.inf),
            math.nextafter(recorded.delta_units / DELTA_UNITS, math.inf),
            seconds=self.rigorous_seconds,
        )
        return found.confirmed


def _not_asked(_mechanism: Mechanism, _delta: float) -> Bracket:
    raise AssertionError("a finite order needs no bound of epsilon")


def _covers(recorded: Cost, epsilon: float) -> bool:
    return math.isfinite(epsilon) and not _below(
        recorded.epsilon_units, math.floor(epsilon * EPSILON_UNITS)
    )


def _same_filter(stored: Filter, published: Filter) -> bool:
    """Equal, but for the last bits of a cap, which another build may round otherwise."""
    near = abs(stored.cap_units - published.cap_units)
    return (
        (stored.order, stored.delta_units, stored.delta_per_release_units)
        == (published.order, published.delta_units, published.delta_per_release_units)
    ) and near <= published.cap_units * _RECOMPUTED_RELATIVE + _RECOMPUTED_UNITS


def _below(recorded: int, recomputed: int) -> bool:
    if recomputed == INFINITE or recorded == INFINITE:
        return recorded < recomputed
    return recorded < recomputed * (1 - _RECOMPUTED_RELATIVE) - _RECOMPUTED_UNITS


def verify(
    session: Session,
    dataset_id: str,
    *,
    epsilon_bound: EpsilonBound | None = None,
    rigorous_seconds: float | None = None,
) -> Verification:
    """Checks the books of a dataset: the chain, the rule along it, its costs, and the tables.

    In order: every body is the text of its hash, holds the hash before it and its own place; the
    head in the dataset row is the last row; each row may follow the rows before it; each charge was
    admitted by a filter when it was reserved and is no cheaper than its mechanism (Rényi orders
    always; basic composition where ``epsilon_bound`` is given, such as
    :func:`accounting.bounds.confirming_epsilon`; in ball arithmetic too, where
    ``rigorous_seconds`` allows each distinct charge some time); and the budget, entries, charges,
    jobs and releases in the tables are those of the chain.

    Read through :meth:`accounting.tables.Database.read`, whose snapshot is consistent.

    Raises:
        NotFound: no such dataset.
    """
    dataset = session.get(DatasetRow, dataset_id)
    if dataset is None:
        raise NotFound
    books = session.get_one(DatasetRow, dataset.books_id, populate_existing=True)
    replay = _Replay(epsilon_bound, rigorous_seconds)

    def compare(good: int, head: str) -> None:
        if books.chain_sequence > good:
            raise _Bad("rows are missing at the end", good + 1)
        if books.chain_sequence < good:
            raise _Bad("there are rows after the head", books.chain_sequence + 1)
        if books.chain_hash != head:
            raise _Bad("the head is not the hash of the last row", max(good, 1))
        _compare_tables(session, books, replay, good)

    with session.execute(
        sa.select(ChainRow.sequence, ChainRow.previous_hash, ChainRow.hash, ChainRow.body)
        .where(ChainRow.dataset_id == books.id)
        .order_by(ChainRow.sequence)
        .execution_options(yield_per=1000)
    ) as rows:
        plain = ((row.sequence, row.previous_hash, row.hash, row.body) for row in rows)
        return _verified(books.id, plain, replay, compare)


@dataclass(frozen=True)
class ExportCheck:
    """What :func:`verify_export` found; ``dataset`` is whose books the export says it is."""

    dataset: str | None
    verification: Verification
    certificates: int = 0

    @property
    def ok(self) -> bool:
        return self.verification.ok

    def to_json(self) -> dict[str, object]:
        return {
            "dataset": self.dataset,
            **self.verification.to_json(),
            "certificates": self.certificates,
        }


def verify_export(
    lines: Iterable[str],
    *,
    certificates: Sequence[Mapping[str, object]] = (),
    head: str | None = None,
    epsilon_bound: EpsilonBound | None = None,
    rigorous_seconds: float | None = None,
) -> ExportCheck:
    """Checks an exported chain without a database.

    The chain and the rule along it are checked as by :func:`verify`; an export has no tables to
    compare. Rows that are missing at its end show only against what lies outside it.

    Args:
        lines: JSON lines with ``dataset``, ``sequence``, ``previous_hash``, ``hash`` and ``body``.
        certificates: each must name its job's ``started`` row and its digest stand in the
            ``released`` row. Their signatures are checked by
            :func:`accounting.certificates.verify`.
        head: a hash noted down earlier, which some row must have.
    """
    replay = _Replay(epsilon_bound, rigorous_seconds)
    hashes: dict[int, str] = {}

    def compare(good: int, _head: str) -> None:
        if head is not None and head not in hashes.values():
            raise _Bad("no row has the expected hash: rows are missing at the end", good + 1)
        for certificate in certificates:
            _compare_certificate(certificate, hashes, replay, good)

    def rows(parsed: Iterable[tuple[str, _Row]]) -> Iterator[_Row]:
        for dataset_id, row in parsed:
            if dataset_id != first[0]:
                raise _Bad("the row belongs to another dataset")
            hashes[row[0]] = row[2]
            yield row

    parsed = _read_lines(lines)
    try:
        first = next(parsed)
    except StopIteration:
        nothing = Verification(False, 0, 1, "the export has no rows", GENESIS_HASH)
        return ExportCheck(None, nothing)
    except _Bad as bad:
        return ExportCheck(None, Verification(False, 0, 1, bad.problem, GENESIS_HASH))
    found = _verified(first[0], rows(itertools.chain([first], parsed)), replay, compare)
    return ExportCheck(first[0], found, len(certificates) if found.ok else 0)


_LINE: Final = (
    ("dataset", str),
    ("sequence", int),
    ("previous_hash", str),
    ("hash", str),
    ("body", str),
)


def _read_lines(lines: Iterable[str]) -> Iterator[tuple[str, _Row]]:
    for line in lines:
        if not line.strip():
            continue
        try:
            value: Any = json.loads(line)
            fields = [value[name] for name, _ in _LINE]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _Bad("the line is no row of a ledger") from None
        if any(type(f) is not kind for f, (_, kind) in zip(fields, _LINE, strict=True)):
            raise _Bad("the line is no row of a ledger")
        dataset_id, *row = fields
        yield dataset_id, (row[0], row[1], row[2], row[3])


def _compare_certificate(
    certificate: Mapping[str, object], hashes: Mapping[int, str], replay: _Replay, rows: int
) -> None:
    """Raises _Bad unless the chain has the certificate's start and, after it, its digest."""
    place = certificate.get("ledger")
    sequence = place.get("sequence") if isinstance(place, Mapping) else None
    if not isinstance(place, Mapping) or not isinstance(sequence, int):
        raise _Bad("the certificate names no row of a ledger", rows + 1)
    if sequence > rows:
        raise _Bad("the certificate's row is missing at the end", rows + 1)
    if hashes.get(sequence) != place.get("hash"):
        raise _Bad("the certificate's row has another hash", sequence)
    for entry in replay.entries.values():
        for job, started in entry.started.items():
            if started == sequence:
                released = entry.released.get(job)
                if released is None:
                    raise _Bad("the certificate's job was not released", rows + 1)
                if released["certificate_digest"] != digest(dict(certificate)):
                    raise _Bad("the ledger holds another certificate of this job", sequence)
                if certificate.get("mechanism") != entry.mechanism_of(job):
                    raise _Bad("the certificate's mechanism is not the one charged", sequence)
                if certificate.get("dataset") != entry.dataset:
                    raise _Bad("the certificate is of another dataset", sequence)
                return
    raise _Bad("the certificate's row starts no job", sequence)


def _verified(
    dataset_id: str,
    rows: Iterable[_Row],
    replay: _Replay,
    compare: Callable[[int, str], None],
) -> Verification:
    """The check of a chain's rows, and then of what ``compare`` finds beside them."""
    good, head = 0, GENESIS_HASH
    try:
        for row in rows:
            with _named():
                body = _read_body(dataset_id, row, expected=good + 1, previous=head)
                replay.apply(body)
            good, head = row[0], row[2]
        with _named():
            compare(good, head)
    except _Bad as bad:
        return Verification(
            ok=False,
            rows=good,
            first_bad=good + 1 if bad.sequence is None else bad.sequence,
            problem=bad.problem,
            head=head,
            unconfirmed=replay.unconfirmed,
        )
    return Verification(
        ok=True,
        rows=good,
        first_bad=None,
        problem=None,
        head=head,
        unconfirmed=replay.unconfirmed,
    )


def _read_body(dataset_id: str, row: _Row, *, expected: int, previous: str) -> JsonObject:
    """The row's body, if the row is the ``expected`` one and follows ``previous``."""
    sequence, previous_hash, row_hash, text = row
    if sequence != expected:
        raise _Bad("the row is missing")
    if hashlib.sha256(text.encode()).hexdigest() != row_hash:
        raise _Bad("the row was changed: its hash differs")
    try:
        body: Any = json.loads(text)
    except ValueError:
        raise _Bad("the row is not JSON") from None
    if not isinstance(body, dict) or canonical_json(body).decode() != text:
        raise _Bad("the row is not canonical JSON")
    if body.get("dataset") != dataset_id or body.get("sequence") != sequence:
        raise _Bad("the row belongs to another place")
    if body.get("previous") != previous or previous_hash != previous:
        raise _Bad("the row does not follow the row before it")
    if body.get("version") != 1:
        raise _Bad("the row is of another version")
    return body


@contextmanager
def _named() -> Iterator[None]:
    """Makes of every way in which a row can't be read a row that is named."""
    try:
        yield
    except InvalidRequest as error:
        raise _Bad(f"the mechanism cannot be read: {error.detail}") from error
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        # Only a row that this code never wrote lacks a field or has one of another type.
        raise _Bad(f"the row cannot be read: {type(error).__name__}") from error


def _compare_tables(session: Session, books: DatasetRow, replay: _Replay, rows: int) -> None:
    """Raises _Bad, with the sequence of the first row that the tables contradict."""
    problems: list[tuple[int, str]] = []
    budget = session.get(BudgetRow, books.id)
    if (None if budget is None else budget.budget) != replay.budget_json or (
        filters_of(session, books.id) != replay.filters
    ):
        problems.append((replay.budget_sequence or rows + 1, "the budget differs from the chain's"))
    if books.totals != _sums(replay.totals):
        problems.append((max(rows, 1), "the sums of the filters differ from the chain's"))
    stored_sums = {
        row.organisation_id: row.totals
        for row in session.scalars(
            sa.select(OrganisationTotalsRow).where(OrganisationTotalsRow.dataset_id == books.id)
        )
    }
    elsewhere = session.scalar(
        sa.select(EntryRow.id)
        .join(DatasetRow, DatasetRow.id == EntryRow.dataset_id)
        .where(
            sa.or_(EntryRow.books_id == books.id, DatasetRow.books_id == books.id),
            EntryRow.books_id != DatasetRow.books_id,
        )
        .limit(1)
    )
    if elsewhere is not None:
        problems.append((max(rows, 1), f"the dataset of entry {elsewhere} has other books now"))
    if stored_sums != {name: _sums(totals) for name, totals in replay.organisations.items()}:
        problems.append((max(rows, 1), "the sums of an organisation differ from the chain's"))

    charges: dict[str, dict[int, Cost]] = {}
    for charged in session.execute(
        sa.select(
            ChargeRow.entry_id, ChargeRow.position, ChargeRow.epsilon_units, ChargeRow.delta_units
        )
        .join(EntryRow, EntryRow.id == ChargeRow.entry_id)
        .where(EntryRow.books_id == books.id)
        .execution_options(yield_per=1000)
    ):
        charges.setdefault(charged.entry_id, {})[charged.position] = Cost(
            charged.epsilon_units, charged.delta_units
        )
    seen: set[str] = set()
    # Columns, not objects: what the session holds already must not stand in for what is stored.
    for row in session.execute(
        sa.select(*EntryRow.__table__.c)
        .where(EntryRow.books_id == books.id)
        .execution_options(yield_per=1000)
    ):
        seen.add(row.id)
        told = replay.entries.get(row.id)
        if told is None:
            problems.append((rows + 1, f"entry {row.id} has no row in the chain"))
            continue
        if row.state != told.state:
            problems.append(
                (told.last, f"entry {row.id} is {row.state}, and {told.state} in the chain")
            )
        if charges.get(row.id, {}) != dict(enumerate(told.costs)):
            problems.append((told.first, f"the costs of entry {row.id} differ from the chain's"))
        if (
            row.sequence,
            row.kind,
            row.dataset_id,
            row.organisation_id,
            row.parent_entry_id,
            row.mechanism,
            row.mechanism_digest,
        ) != (
            told.first,
            told.kind,
            told.dataset,
            told.organisation,
            told.parent,
            told.mechanism,
            told.mechanism_digest,
        ):
            problems.append((told.first, f"entry {row.id} differs from the chain's"))
    problems.extend(
        (told.first, f"entry {entry_id} is in the chain alone")
        for entry_id, told in replay.entries.items()
        if entry_id not in seen
    )
    problems.extend(_compare_jobs(session, books, replay, rows))
    if problems:
        sequence, problem = min(problems)
        raise _Bad(problem, sequence)


def _sums(totals: Sequence[FilterTotal]) -> list[list[int]]:
    return [[t.epsilon_units, t.delta_units, t.infinite] for t in totals]


def _compare_jobs(
    session: Session, books: DatasetRow, replay: _Replay, rows: int
) -> list[tuple[int, str]]:
    """What the tables of jobs and releases say otherwise than the chain."""
    problems: list[tuple[int, str]] = []
    missing = {(entry_id, job) for entry_id, told in replay.entries.items() for job in told.jobs}
    for row in session.execute(
        sa.select(
            JobRow.id,
            JobRow.entry_id,
            JobRow.dataset_id,
            JobRow.organisation_id,
            JobRow.body_hash,
            JobRow.plan_position,
            JobRow.state,
            JobRow.mechanism,
            JobRow.started_sequence,
            JobRow.job_digest,
            JobRow.attempts,
            SnapshotRow.id.label("snapshot_id"),
            SnapshotRow.hmac.label("snapshot_hmac"),
            SnapshotRow.dataset_id.label("snapshot_dataset"),
            ReleaseRow.id.label("release_id"),
            ReleaseRow.dataset_id.label("release_dataset"),
            ReleaseRow.entry_id.label("release_entry"),
            ReleaseRow.sha256,
            ReleaseRow.bytes,
            ReleaseRow.certificate,
        )
        .join(EntryRow, EntryRow.id == JobRow.entry_id)
        .outerjoin(SnapshotRow, SnapshotRow.id == JobRow.snapshot_id)
        .outerjoin(ReleaseRow, ReleaseRow.job_id == JobRow.id)
        .where(EntryRow.books_id == books.id)
        .execution_options(yield_per=1000)
    ):
        told = replay.entries.get(row.entry_id)
        if told is None or row.id not in told.jobs:
            problems.append((rows + 1, f"job {row.id} has no row in the chain"))
            continue
        missing.remove((row.entry_id, row.id))
        if row.state != told.jobs[row.id]:
            problems.append(
                (told.last, f"job {row.id} is {row.state}, and {told.jobs[row.id]} in the chain")
            )
        position = list(told.jobs).index(row.id)
        if row.mechanism != told.mechanism_of(row.id) or row.plan_position != (
            position if told.kind == PLAN else None
        ):
            problems.append((told.first, f"job {row.id} differs from the chain's"))
        if (row.dataset_id, row.organisation_id, row.body_hash) != (
            told.dataset,
            told.organisation,
            told.body_hash,
        ) or row.snapshot_dataset not in (None, told.dataset):
            problems.append((told.first, f"job {row.id} is of another request than the chain's"))
        if row.id in told.started:
            snapshot = (
                None
                if row.snapshot_id is None
                else {"id": row.snapshot_id, "hmac": row.snapshot_hmac}
            )
            made = (row.attempts, row.job_digest)
            if made != told.attempts[row.id] or snapshot != told.snapshots[row.id]:
                problems.append((told.last, f"job {row.id} ran otherwise than the chain tells"))
        if row.started_sequence != told.started.get(row.id):
            problems.append((told.last, f"job {row.id} names another row as its start"))
        stored = (
            None
            if row.release_id is None
            else {
                "release": row.release_id,
                "artefact": {"sha256": row.sha256, "bytes": row.bytes},
                "certificate_digest": digest(row.certificate),
            }
        )
        if stored != told.released.get(row.id):
            problems.append((told.last, f"the release of job {row.id} differs from the chain's"))
        elif stored is not None and (
            (row.release_dataset, row.release_entry) != (told.dataset, row.entry_id)
            or row.certificate.get("mechanism") != told.mechanism_of(row.id)
        ):
            problems.append((told.last, f"the release of job {row.id} is not of its charge"))
    problems.extend(
        (replay.entries[entry_id].first, f"job {job} is in the chain alone")
        for entry_id, job in missing
    )
    return problems
