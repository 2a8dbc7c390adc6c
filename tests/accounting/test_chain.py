"""Whatever is done to the books behind the ledger's back, verification names the first bad row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from accounting import bounds, ledger
from accounting.bounds import Bracket
from accounting.canonical import canonical_json, digest
from accounting.chain import append
from accounting.filters import EPSILON_UNITS, INFINITE, Budget, Filter, family
from accounting.mechanisms import Gaussian, Mechanism
from accounting.tables import (
    GENESIS_HASH,
    BudgetRow,
    ChainRow,
    ChargeRow,
    Database,
    DatasetRow,
    EntryRow,
    FilterRow,
    JobRow,
    OrganisationTotalsRow,
    ReleaseRow,
)
from tests.books import Books
from tests.conftest import DATABASES
from tests.services import NoService

# The rows of ds_1:  1 budget  2 reserved A  3 started A  4 reserved B  5 released A
# 6 cancelled B  7 reserved C  8 started C  9 attempt C  10 failed_charged C  11 reserved D
ROWS = 11


class _Undo(Exception):
    pass


@dataclass
class Filled:
    """Books that hold, inside a transaction that is taken back after the test."""

    session: Session
    filters: tuple[Filter, ...]
    now: int
    dataset_id: str = "ds_1"
    organisation_id: str = "org_1"

    def verify(self, bound: ledger.EpsilonBound | None = None) -> ledger.Verification:
        self.session.flush()
        self.session.expire_all()
        return ledger.verify(self.session, self.dataset_id, epsilon_bound=bound)


@pytest.fixture(scope="module", params=DATABASES)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Books]:
    """One database with all the books of this module: ds_1 as above, an empty ds_2 of another
    organisation, and ds_g with one charge of a Gaussian, whose costs are finite everywhere."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('chain')}/ledger.db"
        server = None
    else:
        server = request.getfixturevalue("postgres_service")
        if isinstance(server, NoService):
            pytest.skip(f"no PostgreSQL: {server}")
        url = server.create(migrated=False)
    database = Database(url)
    database.upgrade()
    books = Books(database).register().set_budget("6")
    a = books.must_start(books.reserve("1", key="A").job_id)
    b = books.reserve("2", key="B")
    books.release(a)
    books.cancel(b.job_id)
    c = books.must_start(books.reserve("0.5", key="C").job_id)
    books.wait(60)
    books.fail(books.must_start(c.job_id))
    books.reserve("1.5", key="D")
    replace(
        books, dataset_id="ds_2", snapshot_id="snap_2", organisation_id="org_2"
    ).register().set_budget("6")
    gaussian = replace(books, dataset_id="ds_g", snapshot_id="snap_g", bound=bounds.epsilon)
    gaussian.register().set_budget("6").reserve(Gaussian(2.0), key="G")
    yield books
    database.dispose()
    if server is not None:
        server.drop(url)


@pytest.fixture
def filled(library: Books) -> Iterator[Filled]:
    with suppress(_Undo), library.database.write() as session:
        books = Filled(session, library.filters, library.now)
        verification = books.verify()
        assert (verification.ok, verification.rows) == (True, ROWS), verification.problem
        assert verification.first_bad is None
        yield books
        raise _Undo


@pytest.fixture
def gaussian(filled: Filled) -> Filled:
    books = replace(filled, dataset_id="ds_g")
    assert any(f.order != "inf" for f in books.filters)
    return books


def spoil(books: Filled, *statements: sa.Executable) -> ledger.Verification:
    for statement in statements:
        books.session.execute(statement)
    found = books.verify()
    assert not found.ok
    assert found.problem
    return found


def entry_id(books: Filled, key: str) -> str:
    return books.session.scalars(
        sa.select(JobRow.entry_id).where(JobRow.idempotency_key == key)
    ).one()


def rows_of(books: Filled) -> list[ChainRow]:
    return ledger.chain(books.session, books.dataset_id)


def rehash(books: Filled, change: Callable[[int, dict[str, Any]], dict[str, Any] | None]) -> None:
    """Rewrites the whole chain, and its head, around a change: what an insider could do."""
    previous = GENESIS_HASH
    made: list[ChainRow] = []
    for row in rows_of(books):
        body = change(row.sequence, json.loads(row.body))
        if body is None:
            continue
        body |= {"sequence": len(made) + 1, "previous": previous}
        text = canonical_json(body)
        made.append(
            ChainRow(
                dataset_id=books.dataset_id,
                sequence=len(made) + 1,
                previous_hash=previous,
                hash=hashlib.sha256(text).hexdigest(),
                body=text.decode(),
            )
        )
        previous = made[-1].hash
    books.session.execute(sa.delete(ChainRow))
    books.session.add_all(made)
    books.session.execute(
        sa.update(DatasetRow).values(chain_sequence=len(made), chain_hash=previous)
    )


def test_a_dataset_without_books_verifies(database: Database) -> None:
    found = Books(database).register().verify()
    assert (found.ok, found.rows, found.head) == (True, 0, GENESIS_HASH)


def test_rows_hold_what_they_say(filled: Filled) -> None:
    rows = rows_of(filled)
    bodies = [json.loads(r.body) for r in rows]
    assert [b["kind"] for b in bodies] == [
        "budget", "reserved", "started", "reserved", "released", "cancelled",
        "reserved", "started", "attempt", "failed_charged", "reserved",
    ]  # fmt: skip
    assert [b["previous"] for b in bodies] == [GENESIS_HASH, *(r.hash for r in rows[:-1])]
    assert all(hashlib.sha256(r.body.encode()).hexdigest() == r.hash for r in rows)
    assert bodies[4]["data"]["artefact"] == {"sha256": "a" * 64, "bytes": 7}
    assert bodies[8]["data"]["attempt"] == 2
    page = ledger.chain(filled.session, filled.dataset_id, after_sequence=3, limit=2)
    assert [r.sequence for r in page] == [4, 5]


@pytest.mark.parametrize("sequence", [1, 5, ROWS])
def test_a_changed_row(filled: Filled, sequence: int) -> None:
    row = rows_of(filled)[sequence - 1]
    changed = row.body.replace('"at":18', '"at":17')
    assert changed != row.body
    this = sa.update(ChainRow).where(ChainRow.sequence == sequence)
    assert spoil(filled, this.values(body=changed)).first_bad == sequence
    # With its own hash put right, the row after it no longer follows; of the last row, the head.
    right = hashlib.sha256(changed.encode()).hexdigest()
    found = spoil(filled, this.values(hash=right))
    assert found.first_bad == min(sequence + 1, ROWS)


@pytest.mark.parametrize("sequence", [1, 5, ROWS])
def test_a_removed_row(filled: Filled, sequence: int) -> None:
    found = spoil(filled, sa.delete(ChainRow).where(ChainRow.sequence == sequence))
    assert found.first_bad == sequence
    assert found.rows == sequence - 1


def test_a_truncated_tail(filled: Filled) -> None:
    found = spoil(filled, sa.delete(ChainRow).where(ChainRow.sequence > 8))
    assert found.first_bad == 9
    # With the head moved back as well, the entries' states no longer come from the chain.
    last = rows_of(filled)[-1]
    found = spoil(filled, sa.update(DatasetRow).values(chain_sequence=8, chain_hash=last.hash))
    assert found.first_bad == 8
    assert "failed_charged" in str(found.problem)


def test_swapped_rows(filled: Filled) -> None:
    fourth, fifth = rows_of(filled)[3:5]

    def put(sequence: int, row: ChainRow) -> sa.Executable:
        return (
            sa.update(ChainRow)
            .where(ChainRow.sequence == sequence)
            .values(body=row.body, hash=row.hash, previous_hash=row.previous_hash)
        )

    assert spoil(filled, put(4, fifth), put(5, fourth)).first_bad == 4


def test_an_inserted_row(filled: Filled) -> None:
    last = rows_of(filled)[-1]
    body = json.loads(last.body) | {"sequence": ROWS + 1, "previous": last.hash}
    text = canonical_json(body)
    found = spoil(
        filled,
        sa.insert(ChainRow).values(
            dataset_id=filled.dataset_id,
            sequence=ROWS + 1,
            previous_hash=last.hash,
            hash=hashlib.sha256(text).hexdigest(),
            body=text.decode(),
        ),
    )
    assert found.first_bad == ROWS + 1


def test_a_row_of_another_dataset(filled: Filled) -> None:
    other = replace(filled, dataset_id="ds_2")
    foreign = rows_of(other)[0]
    found = spoil(
        filled,
        sa.update(ChainRow)
        .where(ChainRow.dataset_id == filled.dataset_id, ChainRow.sequence == 1)
        .values(body=foreign.body, hash=foreign.hash),
    )
    assert found.first_bad == 1
    assert other.verify().ok, "each dataset has its own chain"


def test_a_changed_head(filled: Filled) -> None:
    assert spoil(filled, sa.update(DatasetRow).values(chain_hash="0" * 64)).first_bad == ROWS


def test_a_row_that_is_not_canonical(filled: Filled) -> None:
    text = rows_of(filled)[-1].body.replace(":", ": ", 1)
    found = spoil(
        filled,
        sa.update(ChainRow)
        .where(ChainRow.sequence == ROWS)
        .values(body=text, hash=hashlib.sha256(text.encode()).hexdigest()),
    )
    assert found.first_bad == ROWS


# --------------------------------------------------------------------------------------------------
# The tables against the chain
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["epsilon_units", "delta_units"])
def test_a_changed_cost(filled: Filled, column: str) -> None:
    found = spoil(
        filled,
        sa.update(ChargeRow)
        .where(ChargeRow.entry_id == entry_id(filled, "C"), ChargeRow.position == 0)
        .values({column: 1}),
    )
    assert found.first_bad == 7
    assert "costs" in str(found.problem)


def test_a_removed_charge_and_entry(filled: Filled) -> None:
    this = entry_id(filled, "D")
    gone = sa.delete(ChargeRow).where(ChargeRow.entry_id == this)
    assert spoil(filled, gone).first_bad == ROWS
    found = spoil(
        filled,
        sa.delete(JobRow).where(JobRow.entry_id == this),
        sa.delete(EntryRow).where(EntryRow.id == this),
    )
    assert found.first_bad == ROWS
    assert "alone" in str(found.problem)


@pytest.mark.parametrize(("key", "bad"), [("A", 5), ("B", 6), ("C", 10), ("D", 11)])
def test_a_changed_state(filled: Filled, key: str, bad: int) -> None:
    """Also the one that would give budget back: a charged entry made 'expired'."""
    this = EntryRow.id == entry_id(filled, key)
    found = spoil(filled, sa.update(EntryRow).where(this).values(state="expired"))
    assert found.first_bad == bad
    assert "expired" in str(found.problem)


def test_a_job_in_another_state_than_its_entry(filled: Filled) -> None:
    this = JobRow.entry_id == entry_id(filled, "C")
    assert spoil(filled, sa.update(JobRow).where(this).values(state="cancelled")).first_bad == 10


def test_a_changed_mechanism(filled: Filled) -> None:
    cheap = Gaussian(1e6).to_json()
    this = EntryRow.id == entry_id(filled, "A")
    assert spoil(filled, sa.update(EntryRow).where(this).values(mechanism=cheap)).first_bad == 2


def test_a_job_that_would_run_another_mechanism_than_was_charged(filled: Filled) -> None:
    loud = Gaussian(0.01).to_json()
    this = JobRow.entry_id == entry_id(filled, "D")
    assert spoil(filled, sa.update(JobRow).where(this).values(mechanism=loud)).first_bad == ROWS


def test_an_entry_given_to_another_organisation(filled: Filled) -> None:
    this = EntryRow.id == entry_id(filled, "A")
    change = sa.update(EntryRow).where(this).values(organisation_id="org_2")
    assert spoil(filled, change).first_bad == 2


def test_an_entry_that_is_not_in_the_chain(filled: Filled) -> None:
    found = spoil(
        filled,
        sa.insert(EntryRow).values(
            id="ent_smuggled",
            books_id=filled.dataset_id,
            dataset_id=filled.dataset_id,
            organisation_id=filled.organisation_id,
            sequence=99,
            kind="denoise",
            state="released",
            created_at=1,
            updated_at=1,
        ),
    )
    assert found.first_bad == ROWS + 1
    assert "ent_smuggled" in str(found.problem)


def test_a_changed_release(filled: Filled) -> None:
    assert spoil(filled, sa.update(ReleaseRow).values(sha256="b" * 64)).first_bad == 5


def test_a_changed_certificate(filled: Filled) -> None:
    assert spoil(filled, sa.update(ReleaseRow).values(certificate={"epsilon": 0})).first_bad == 5


def test_a_removed_release(filled: Filled) -> None:
    assert spoil(filled, sa.delete(ReleaseRow)).first_bad == 5


def test_changed_sums(filled: Filled) -> None:
    """Sums that are too small would admit what no filter has room for."""
    totals = [[0, 0, 0] for _ in filled.filters]
    found = spoil(filled, sa.update(DatasetRow).values(totals=totals))
    assert "sums of the filters" in str(found.problem)


def test_changed_sums_of_an_organisation(filled: Filled) -> None:
    found = spoil(filled, sa.delete(OrganisationTotalsRow))
    assert "sums of an organisation" in str(found.problem)


def test_a_raised_cap(filled: Filled) -> None:
    raised = sa.update(FilterRow).values(cap_units=FilterRow.cap_units + 1)
    assert spoil(filled, raised).first_bad == 1


def test_a_raised_budget(filled: Filled) -> None:
    budget = filled.session.get_one(BudgetRow, filled.dataset_id).budget
    raised = sa.update(BudgetRow).values(budget={**budget, "epsilon": 60.0})
    assert spoil(filled, raised).first_bad == 1


# --------------------------------------------------------------------------------------------------
# A chain rewritten from end to end: every hash is right, and the rules are not
# --------------------------------------------------------------------------------------------------


def first_bad(books: Filled) -> int | None:
    found = books.verify()
    assert not found.ok
    return found.first_bad


def test_a_refund_of_what_started(filled: Filled) -> None:
    def refund(_: int, body: dict[str, Any]) -> dict[str, Any]:
        if body["kind"] == "failed_charged":
            body |= {"kind": "expired", "state": "expired"}
        return body

    rehash(filled, refund)
    this = entry_id(filled, "C")
    for table, column in ((EntryRow, EntryRow.id), (JobRow, JobRow.entry_id)):
        filled.session.execute(sa.update(table).where(column == this).values(state="expired"))
    assert first_bad(filled) == 10


def test_a_start_that_was_never_written(filled: Filled) -> None:
    rehash(filled, lambda sequence, body: None if sequence == 3 else body)
    assert first_bad(filled) == 4  # "released", straight from "reserved"


def test_a_raised_budget_in_the_chain(filled: Filled) -> None:
    body = json.loads(rows_of(filled)[0].body)
    budget = Budget.from_json({**body["data"]["budget"], "epsilon": 7.0})
    body["data"] = {
        "budget": budget.to_json(),
        "filters": [f.to_json() for f in family(budget)],
    }
    rehash(filled, lambda sequence, other: dict(body) if sequence == 6 else other)
    found = filled.verify()
    assert found.first_bad == 6
    assert "epsilon" in str(found.problem)


def test_an_admission_beyond_every_cap(filled: Filled) -> None:
    """Both the chain and the charges say so, and no rule could have admitted it."""

    def dear(sequence: int, body: dict[str, Any]) -> dict[str, Any]:
        if sequence == ROWS:
            body["data"]["costs"] = [[6 * 10**9, 10**9]] + [
                [INFINITE, 0] for _ in filled.filters[1:]
            ]
        return body

    rehash(filled, dear)
    filled.session.execute(
        sa.update(ChargeRow)
        .where(ChargeRow.entry_id == entry_id(filled, "D"), ChargeRow.position == 0)
        .values(epsilon_units=6 * 10**9)
    )
    found = filled.verify()
    assert found.first_bad == ROWS
    assert "admitted" in str(found.problem)


def test_a_row_without_its_fields(filled: Filled) -> None:
    def strip(sequence: int, body: dict[str, Any]) -> dict[str, Any]:
        if sequence == 4:
            del body["data"]["costs"]
        return body

    rehash(filled, strip)
    assert first_bad(filled) == 4


def cheapen(books: Filled, position: int, units: int) -> None:
    def cheap(sequence: int, body: dict[str, Any]) -> dict[str, Any]:
        if body["kind"] == "reserved":
            body["data"]["costs"][position][0] = units
        return body

    rehash(books, cheap)
    books.session.execute(
        sa.update(ChargeRow).where(ChargeRow.position == position).values(epsilon_units=units)
    )
    dataset = books.session.get_one(DatasetRow, books.dataset_id, populate_existing=True)
    totals = [list(sums) for sums in dataset.totals]
    totals[position][0] = units
    dataset.totals = totals
    own = books.session.get_one(
        OrganisationTotalsRow, (books.dataset_id, books.organisation_id), populate_existing=True
    )
    own.totals = totals
    books.session.flush()


def recorded(books: Filled, position: int) -> int:
    return ledger.entries(books.session, books.dataset_id)[0].costs[position].epsilon_units


def test_a_renyi_cost_below_that_of_its_mechanism(gaussian: Filled) -> None:
    position = next(i for i, f in enumerate(gaussian.filters) if f.order != "inf")
    true = recorded(gaussian, position)
    cheapen(gaussian, position, true + 1000)
    assert gaussian.verify().ok, "dearer than need be is allowed"
    cheapen(gaussian, position, true - 1000)
    found = gaussian.verify()
    assert found.first_bad == 2
    assert "order" in str(found.problem)


def test_a_basic_cost_below_that_of_its_mechanism(gaussian: Filled) -> None:
    position = [f.order for f in gaussian.filters].index("inf")

    assert gaussian.verify(bounds.epsilon).ok
    cheapen(gaussian, position, recorded(gaussian, position) - 10**6)
    assert gaussian.verify(None).ok, "only asked for with a bound"
    found = gaussian.verify(bounds.epsilon)
    assert found.first_bad == 2
    assert "basic composition" in str(found.problem)


def test_approximate_dp_costs_hold_against_the_bound(filled: Filled) -> None:
    assert filled.verify(bounds.epsilon).ok


def test_append_is_what_verify_reads(filled: Filled) -> None:
    """A row appended outside the ledger, by whoever holds the code, still breaks a rule."""
    dataset = filled.session.get_one(DatasetRow, filled.dataset_id)
    append(
        filled.session,
        dataset,
        kind="cancelled",
        entry_id=entry_id(filled, "A"),
        state="cancelled",
        now=filled.now,
        data={},
    )
    assert first_bad(filled) == ROWS + 1


def test_filters_that_the_budget_does_not_stand_for(filled: Filled) -> None:
    """A rewritten family would admit anything, and the chain alone would not show it."""
    position = [f.order for f in filled.filters].index("inf")
    wide = 10**15

    def widen(_: int, body: dict[str, Any]) -> dict[str, Any]:
        if body["kind"] == "budget":
            body["data"]["filters"][position]["cap_units"] = wide
        return body

    rehash(filled, widen)
    filled.session.execute(
        sa.update(FilterRow).where(FilterRow.position == position).values(cap_units=wide)
    )
    found = filled.verify()
    assert found.first_bad == 1
    assert "filters" in str(found.problem)


def test_a_cost_that_is_not_refuted_is_not_confirmed_either(gaussian: Filled) -> None:
    """Between the accountant's two ends a charge counts as too small, unless it gave up early."""
    position = [f.order for f in gaussian.filters].index("inf")
    true = recorded(gaussian, position) / EPSILON_UNITS

    def loose(_m: Mechanism, delta: float, reason: str = "") -> Bracket:
        return Bracket(true / 2, true * 2, delta, "both", "renyi", reason=reason)

    found = gaussian.verify(loose)
    assert found.first_bad == 2
    cut_short = gaussian.verify(lambda m, delta: loose(m, delta, "out of time"))
    assert cut_short.ok
    assert cut_short.unconfirmed == 1


def test_a_plan_with_a_job_that_was_not_charged(filled: Filled) -> None:
    """In the chain as in the tables, and yet the charge is for fewer jobs."""

    def smuggle(sequence: int, body: dict[str, Any]) -> dict[str, Any]:
        if sequence == ROWS:
            data = body["data"]
            data["entry_kind"] = "plan"
            data["jobs"].append("job_smuggled")
            data["mechanism"] = {
                "kind": "composition",
                "parts": [{"mechanism": data["mechanism"], "count": 1}],
            }
            data["mechanism_digest"] = digest(data["mechanism"])
        return body

    rehash(filled, smuggle)
    found = filled.verify()
    assert found.first_bad == ROWS
    assert "plan" in str(found.problem)
