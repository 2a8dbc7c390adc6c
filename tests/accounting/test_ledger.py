"""Every change of state that the ledger allows, and every one that it refuses."""

from __future__ import annotations

import dataclasses
import json
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa

from accounting import ledger
from accounting.canonical import digest
from accounting.errors import (
    BudgetExhausted,
    Conflict,
    IdempotencyMismatch,
    InvalidMechanism,
    LeaseLost,
    LedgerUnavailable,
    NotFound,
)
from accounting.filters import DELTA_UNITS, INFINITE, Budget, Cost, ManySmall
from accounting.mechanisms import DPSGD
from accounting.tables import (
    ChainRow,
    ChargeRow,
    Database,
    EntryRow,
    JobRow,
    ReleaseRow,
)
from tests.books import SECOND, Books, dp


@pytest.fixture
def books(database: Database) -> Books:
    return Books(database).register().set_budget()


def job(books: Books, job_id: str) -> JobRow:
    with books.database.read() as session:
        return session.get_one(JobRow, job_id)


def count(books: Books, table: type) -> int:
    with books.database.read() as session:
        return session.scalar(sa.select(sa.func.count()).select_from(table)) or 0


def kinds(books: Books) -> list[str]:
    with books.database.read() as session:
        return [json.loads(r.body)["kind"] for r in ledger.chain(session, books.dataset_id)]


# --------------------------------------------------------------------------------------------------
# Budget
# --------------------------------------------------------------------------------------------------


def test_a_budget_is_never_raised(books: Books) -> None:
    before = books.filters
    for epsilon, delta in (("9", "1e-5"), ("5", "2e-5"), ("4", "2e-5")):
        with pytest.raises(Conflict) as refused:
            books.set_budget(epsilon, delta)
        assert refused.value.code == "budget_not_raised"
    books.set_budget("5.0", "0.00001")
    with books.database.read() as session:
        found = ledger.budget_of(session, books.dataset_id)
    assert found is not None
    assert (found[0].epsilon, found[1]) == (Decimal(5), before)
    assert kinds(books) == ["budget"]


def test_a_budget_is_tightened(books: Books) -> None:
    books.release(books.must_start(books.reserve("2").job_id))
    before = books.filters
    books.set_budget("3")
    assert [f.order for f in books.filters] == [f.order for f in before]
    assert all(f.cap_units <= b.cap_units for f, b in zip(books.filters, before, strict=True))
    assert [f.delta_units for f in books.filters] == [f.delta_units for f in before]
    with pytest.raises(BudgetExhausted):
        books.reserve("1.5")
    books.reserve("1")
    books.set_budget("3", "5e-6")
    assert sum(f.delta_units for f in books.filters) <= 5e-6 * DELTA_UNITS
    # Below what was spent: nothing more is admitted, and what was admitted stays.
    books.set_budget("1", "5e-6")
    with pytest.raises(BudgetExhausted):
        books.reserve("0.1")
    assert books.spent() == 3.0
    assert kinds(books).count("budget") == 4
    assert books.verify().ok


def test_the_budget_survives_as_the_decimals_that_were_written(database: Database) -> None:
    books = Books(database).register()
    with database.write() as session:
        budget = Budget(Decimal("0.1"), Decimal("1e-7"), ManySmall())
        ledger.set_budget(session, dataset_id=books.dataset_id, budget=budget, now=books.now)
    with database.read() as session:
        found = ledger.budget_of(session, books.dataset_id)
    assert found is not None
    assert found[0] == budget


def test_a_dataset_without_budget_or_snapshot_refuses(database: Database) -> None:
    books = Books(database).register(snapshot=False)
    with database.read() as session:
        assert ledger.budget_of(session, books.dataset_id) is None
        assert ledger.states(session, books.dataset_id) == ()
    with pytest.raises(Conflict) as refused:
        books.reserve()
    assert refused.value.code == "no_budget"
    books.set_budget()
    with pytest.raises(Conflict) as refused:
        books.reserve()
    assert refused.value.code == "no_snapshot"
    assert count(books, EntryRow) == count(books, JobRow) == 0


def test_a_snapshot_of_another_dataset_does_not_count(books: Books) -> None:
    other = Books(books.database, dataset_id="ds_2", snapshot_id="snap_2", now=books.now).register()
    other.set_budget()
    other.snapshot_id = books.snapshot_id
    with pytest.raises(Conflict) as refused:
        other.reserve()
    assert refused.value.code == "no_snapshot"


def test_unknown_dataset_and_job(books: Books) -> None:
    unknown = dataclasses.replace(books, dataset_id="ds_unknown")
    with pytest.raises(NotFound):
        unknown.reserve()
    with pytest.raises(NotFound):
        unknown.set_budget()
    with pytest.raises(NotFound):
        unknown.verify()
    with pytest.raises(NotFound):
        books.start("job_unknown")
    with pytest.raises(NotFound):
        books.cancel("job_unknown")


# --------------------------------------------------------------------------------------------------
# Reserve
# --------------------------------------------------------------------------------------------------


def test_decimals_fill_the_budget_exactly(books: Books) -> None:
    for epsilon in ("1.0", "0.1", "0.9", "2.9", "0.1"):
        books.reserve(epsilon)
    assert books.spent() == 5.0
    with pytest.raises(BudgetExhausted):
        books.reserve("0.000000001")
    assert books.verify().ok


def test_a_refusal_says_what_remains_and_leaves_nothing(books: Books) -> None:
    books.reserve("4.5")
    before = [count(books, t) for t in (EntryRow, ChargeRow, JobRow, ChainRow)]
    with pytest.raises(BudgetExhausted) as refused:
        books.reserve("1.25")
    assert [count(books, t) for t in (EntryRow, ChargeRow, JobRow, ChainRow)] == before
    assert refused.value.status == 409
    assert refused.value.code == "budget_exhausted"
    extra = refused.value.extra
    orders = [f.order for f in books.filters]
    by_order: dict[str, dict[str, dict[str, object]]] = {}
    for name in ("requested", "remaining", "blocking"):
        items = extra[name]
        assert isinstance(items, list)
        assert [item["order"] for item in items] == orders
        by_order[name] = {item["order"]: item for item in items}
    assert by_order["requested"]["inf"]["epsilon"] == 1.25
    assert by_order["requested"]["inf"]["delta"] == 1e-9
    assert by_order["remaining"]["inf"]["epsilon"] == 0.5
    assert by_order["blocking"]["inf"]["epsilon"] == 5.0
    assert by_order["blocking"]["inf"]["exceeds"] == ["epsilon"]
    for order in orders:
        if order != "inf":
            # A mechanism with a delta of its own is infinite at every finite order.
            assert by_order["requested"][order]["epsilon"] == "inf"
            assert by_order["remaining"][order]["epsilon"] == 0.0
            assert by_order["blocking"][order]["exceeds"] == ["epsilon"]
    assert "0.5" in refused.value.detail
    books.reserve("0.5")


def test_delta_runs_out_too(books: Books) -> None:
    share = next(f.delta_units for f in books.filters if f.order == "inf")
    books.reserve(dp("0.1", f"{share}e-18"))
    with pytest.raises(BudgetExhausted) as refused:
        books.reserve(dp("0.1", "1e-18"))
    blocking = refused.value.extra["blocking"]
    assert isinstance(blocking, list)
    assert next(b for b in blocking if b["order"] == "inf")["exceeds"] == ["delta"]


def test_sums_beyond_64_bits_are_exact(books: Books) -> None:
    """One filter may run far past its cap while another one admits."""
    huge = INFINITE - 1
    costs = (Cost(1, 1), *(Cost(huge, 0) for _ in books.filters[1:]))
    made = [books.reserve("1", costs=costs) for _ in range(4)]
    with books.database.read() as session:
        second = ledger.states(session, books.dataset_id)[1]
    assert (second.epsilon_units, second.delta_units) == (4 * huge, 0)
    assert not second.crossed
    books.cancel(made[0].job_id)
    with books.database.read() as session:
        assert ledger.states(session, books.dataset_id)[1].epsilon_units == 3 * huge


def test_a_huge_reservation_that_is_cancelled_leaves_every_filter_as_it_was(books: Books) -> None:
    costs = (Cost(1, 1), *(Cost(INFINITE - 1, 0) for _ in books.filters[1:]))
    books.must_start(books.reserve("0.3").job_id)
    with books.database.read() as session:
        before = ledger.states(session, books.dataset_id)
    for infinite in (costs, (costs[0], *(Cost(INFINITE, 0) for _ in books.filters[1:]))):
        books.cancel(books.reserve("1", costs=infinite).job_id)
        with books.database.read() as session:
            assert ledger.states(session, books.dataset_id) == before


def test_an_infinite_cost_crosses_its_filter_until_it_is_taken_back(books: Books) -> None:
    reserved = books.reserve("1")  # infinite at the finite orders
    with books.database.read() as session:
        crossed = [s.crossed for s in ledger.states(session, books.dataset_id)]
    assert crossed == [f.order != "inf" for f in books.filters]
    books.cancel(reserved.job_id)
    with books.database.read() as session:
        found = ledger.states(session, books.dataset_id)
    assert all((s.epsilon_units, s.delta_units, s.crossed) == (0, 0, False) for s in found)


def test_the_same_key_answers_the_same_job(books: Books) -> None:
    first = books.reserve("1", key="k")
    again = books.reserve("1", key="k")
    assert first.created
    assert not again.created
    assert (again.job_id, again.entry_id) == (first.job_id, first.entry_id)
    assert books.spent() == 1.0
    with pytest.raises(IdempotencyMismatch):
        books.reserve("1", key="k", body="another body")
    books.start(first.job_id)
    books.wait(10_000)
    assert books.reserve("1", key="k").job_id == first.job_id


def test_an_exhausted_budget_still_answers_a_repeated_key(books: Books) -> None:
    first = books.reserve("5", key="k")
    assert books.reserve("5", key="k").job_id == first.job_id


def test_existing_job_reads_what_reserve_made(books: Books) -> None:
    reservation = books.reserve("1", key="k", body="b")
    asked = {
        "organisation_id": books.organisation_id,
        "dataset_id": books.dataset_id,
        "idempotency_key": "k",
    }
    with books.database.read() as session:
        found = ledger.existing_job(session, body_hash=digest("b"), **asked)
        assert found is not None
        assert found.id == reservation.job_id
        with pytest.raises(IdempotencyMismatch):
            ledger.existing_job(session, body_hash=digest("c"), **asked)
        asked["idempotency_key"] = "other"
        assert ledger.existing_job(session, body_hash=digest("b"), **asked) is None


def test_a_mechanism_without_its_running_fields_is_not_charged(books: Books) -> None:
    with pytest.raises(InvalidMechanism) as refused, books.database.write() as session:
        ledger.reserve(
            session,
            **_arguments(books, costs=tuple(Cost(1, 0) for _ in books.filters)),
            mechanism=DPSGD.from_json(
                {
                    "kind": "dp_sgd",
                    "sampling_probability": 0.1,
                    "noise_multiplier": 2.0,
                    "steps": 10,
                }
            ),
        )
    assert refused.value.field
    assert count(books, EntryRow) == 0


def _arguments(books: Books, **other: Any) -> dict[str, Any]:
    return {
        "dataset_id": books.dataset_id,
        "organisation_id": books.organisation_id,
        "idempotency_key": "direct",
        "body_hash": "h",
        "kind": "denoise",
        "spec": {},
        "post_processing": {},
        "certificate_epsilon": None,
        "snapshot_id": books.snapshot_id,
        "progress_total": 1,
        "max_attempts": 3,
        "ttl_seconds": 100,
        "now": books.now,
        **other,
    }


@pytest.mark.parametrize("costs", [(Cost(-1, 0),), (Cost(0, -1),), (Cost(INFINITE + 1, 0),)])
def test_costs_out_of_range_are_refused(books: Books, costs: tuple[Cost, ...]) -> None:
    costs = costs + tuple(Cost(0, 0) for _ in books.filters[1:])
    with pytest.raises(ValueError, match="cost"), books.database.write() as session:
        ledger.reserve(session, **_arguments(books, costs=costs, mechanism=dp("1")))
    with pytest.raises(ValueError, match="costs for"), books.database.write() as session:
        ledger.reserve(session, **_arguments(books, costs=costs * 2, mechanism=dp("1")))
    assert count(books, EntryRow) == 0


def test_another_neighbouring_relation_is_refused(books: Books) -> None:
    arguments = _arguments(books, costs=tuple(Cost(1, 0) for _ in books.filters), mechanism=dp("1"))
    arguments["certificate_epsilon"] = {"neighboring_relation": "replace_one_unit"}
    with pytest.raises(ValueError, match="add_remove_one_unit"), books.database.write() as session:
        ledger.reserve(session, **arguments)


def test_post_processing_is_free_and_names_a_released_parent(books: Books) -> None:
    parent = books.reserve("5")
    free = {"costs": (), "mechanism": None, "snapshot_id": None, "kind": "generate"}
    asked = _arguments(books, **free, parent_entry_id=parent.entry_id)
    with pytest.raises(Conflict) as refused, books.database.write() as session:
        ledger.reserve(session, **asked)
    assert refused.value.code == "parent_not_released"

    books.release(books.must_start(parent.job_id))
    with books.database.write() as session:
        child = ledger.reserve(session, **asked)
    assert books.spent() == 5.0
    started = books.must_start(child.job_id)
    assert started.snapshot_id is None
    assert started.mechanism is None
    books.release(started, sha256="c" * 64)
    assert books.verify().ok
    with books.database.read() as session:
        listed = ledger.entries(session, books.dataset_id)
    assert [e.parent_entry_id for e in listed] == [None, parent.entry_id]
    assert [len(e.costs) for e in listed] == [len(books.filters), 0]

    with pytest.raises(ValueError, match="parent"), books.database.write() as session:
        ledger.reserve(session, **_arguments(books, **free) | {"idempotency_key": "orphan"})


# --------------------------------------------------------------------------------------------------
# Start
# --------------------------------------------------------------------------------------------------


def test_start_hands_over_what_was_fixed_at_the_reservation(books: Books) -> None:
    reserved = books.reserve("1")
    started = books.must_start(reserved.job_id, seed=b"sealed seed", job_digest="d")
    assert started.sealed_seed == b"sealed seed"
    assert started.attempt == 1
    assert started.mechanism == dp("1").to_json()
    assert started.post_processing == {"public_model": "glyphs-28"}
    assert started.spec["beta"] == 0.1
    assert started.facts == {"public_size": 5000}
    assert (started.snapshot_id, started.snapshot_hmac) == (books.snapshot_id, "ab" * 32)
    with books.database.read() as session:
        row = ledger.chain(session, books.dataset_id)[-1]
    assert (row.sequence, row.hash) == (started.sequence, started.hash)
    assert '"job_digest":"d"' in row.body
    assert "ab" * 32 in row.body


def test_a_second_start_of_a_live_job_does_nothing(books: Books) -> None:
    reserved = books.reserve("1")
    first = books.must_start(reserved.job_id)
    assert books.start(reserved.job_id, seed=b"seed 2") is None
    assert job(books, reserved.job_id).lease_token == first.lease_token
    assert kinds(books) == ["budget", "reserved", "started"]
    assert books.spent() == 1.0


def test_an_expired_lease_is_taken_over_with_the_same_seed(books: Books) -> None:
    reserved = books.reserve("1")
    first = books.must_start(reserved.job_id, seed=b"seed 1", lease=30)
    books.wait(29.9)
    assert books.start(reserved.job_id) is None
    books.wait(0.1)
    second = books.must_start(reserved.job_id, seed=b"seed 2")
    assert second.sealed_seed == b"seed 1"
    assert second.attempt == 2
    assert second.lease_token != first.lease_token
    assert (second.sequence, second.hash) == (first.sequence, first.hash)
    assert kinds(books) == ["budget", "reserved", "started", "attempt"]
    assert books.spent() == 1.0
    assert books.verify().ok


def test_another_digest_ends_the_job_with_its_charge(books: Books) -> None:
    reserved = books.reserve("1")
    books.start(reserved.job_id, job_digest="code 1")
    assert books.start(reserved.job_id, job_digest="code 2") is None
    assert books.state_of(reserved.job_id) == "started", "a live lease is not disturbed"
    books.wait(31)
    assert books.start(reserved.job_id, job_digest="code 2") is None
    ended = job(books, reserved.job_id)
    assert ended.state == "failed_charged"
    assert ended.problem_code == ledger.FAILURE_CODE
    assert ended.sealed_seed is None
    assert books.spent() == 1.0
    assert books.verify().ok


def test_attempts_are_capped(books: Books) -> None:
    reserved = books.reserve("1", max_attempts=2)
    for _ in range(2):
        assert books.start(reserved.job_id) is not None
        books.wait(31)
    assert books.start(reserved.job_id) is None
    assert books.state_of(reserved.job_id) == "failed_charged"
    assert books.spent() == 1.0


@pytest.mark.parametrize("end", ["cancelled", "expired", "released", "failed_charged"])
def test_a_job_that_ended_never_starts_again(books: Books, end: str) -> None:
    reserved = books.reserve("1")
    _bring_to(books, reserved.job_id, end)
    chain_before = kinds(books)
    books.wait(10_000)
    assert books.start(reserved.job_id) is None
    assert books.sweep() == ()
    assert books.state_of(reserved.job_id) == end
    assert kinds(books) == chain_before
    with pytest.raises(Conflict):
        books.cancel(reserved.job_id)


def _bring_to(books: Books, job_id: str, state: str) -> ledger.Started | None:
    if state == "cancelled":
        books.cancel(job_id)
    elif state == "expired":
        books.wait(1000)
        with books.database.write() as session:
            assert ledger.expire(session, books.now) == 1
    elif state != "reserved":
        started = books.must_start(job_id)
        if state == "released":
            books.release(started)
        elif state == "failed_charged":
            books.fail(started)
        return started
    return None


@pytest.mark.parametrize(
    ("state", "counts"),
    [
        ("reserved", 1.0),
        ("started", 1.0),
        ("released", 1.0),
        ("failed_charged", 1.0),
        ("cancelled", 0.0),
        ("expired", 0.0),
    ],
)
def test_only_what_never_started_is_taken_back(books: Books, state: str, counts: float) -> None:
    reserved = books.reserve("1")
    _bring_to(books, reserved.job_id, state)
    assert books.state_of(reserved.job_id) == state
    assert books.spent() == counts
    verification = books.verify()
    assert verification.ok, verification.problem


def test_start_of_an_overdue_reservation_expires_it(books: Books) -> None:
    reserved = books.reserve("1", ttl_seconds=60)
    books.wait(60)
    assert books.start(reserved.job_id) is None
    assert books.state_of(reserved.job_id) == "expired"
    assert books.spent() == 0.0


# --------------------------------------------------------------------------------------------------
# Leases
# --------------------------------------------------------------------------------------------------


def test_heartbeats_keep_a_lease_and_report_progress(books: Books) -> None:
    started = books.must_start(books.reserve("1", progress_total=10).job_id)
    for done in (3, 5):
        books.wait(25)
        books.heartbeat(started, done)
        assert books.start(started.job_id) is None
    assert job(books, started.job_id).progress_done == 5
    books.heartbeat(started, 2)
    assert job(books, started.job_id).progress_done == 5, "progress never goes back"
    books.heartbeat(started, 99)
    assert job(books, started.job_id).progress_done == 10


def test_a_late_heartbeat_keeps_the_job_if_nobody_took_it(books: Books) -> None:
    started = books.must_start(books.reserve("1").job_id)
    books.wait(500)
    books.heartbeat(started)
    assert books.start(started.job_id) is None
    books.release(started)
    assert books.state_of(started.job_id) == "released"


def test_a_stale_token_writes_nothing(books: Books) -> None:
    first = books.must_start(books.reserve("1").job_id)
    books.wait(31)
    second = books.must_start(first.job_id)
    before = (kinds(books), job(books, first.job_id).lease_expires_at)
    with pytest.raises(LeaseLost):
        books.heartbeat(first, 7)
    with pytest.raises(LeaseLost):
        books.release(first)
    with pytest.raises(LeaseLost):
        books.fail(first)
    assert (kinds(books), job(books, first.job_id).lease_expires_at) == before
    assert job(books, first.job_id).progress_done == 0
    assert count(books, ReleaseRow) == 0
    books.release(second)
    with pytest.raises(LeaseLost):
        books.release(second)
    with pytest.raises(LeaseLost):
        books.heartbeat(second)
    assert count(books, ReleaseRow) == 1
    assert books.verify().ok


def test_release_and_heartbeat_of_an_unknown_job(books: Books) -> None:
    started = books.must_start(books.reserve("1").job_id)
    unknown = dataclasses.replace(started, job_id="job_unknown")
    with pytest.raises(LeaseLost):
        books.release(unknown)
    with pytest.raises(LeaseLost):
        books.heartbeat(unknown)


def test_release_destroys_the_seed_and_stores_the_certificate(books: Books) -> None:
    started = books.must_start(books.reserve("1").job_id)
    release_id = books.release(started)
    ended = job(books, started.job_id)
    assert (ended.sealed_seed, ended.lease_token, ended.lease_expires_at) == (None, None, None)
    assert ended.progress_done == ended.progress_total
    with books.database.read() as session:
        row = session.get_one(ReleaseRow, release_id)
        assert (row.sha256, row.bytes, row.entry_id) == ("a" * 64, 7, started.entry_id)
        assert ledger.entries(session, books.dataset_id)[0].release_ids == (release_id,)


def test_a_certificate_of_something_else_is_not_released(books: Books) -> None:
    started = books.must_start(books.reserve("1").job_id)
    with pytest.raises(ValueError, match="another row"):
        books.release(dataclasses.replace(started, sequence=1))
    with pytest.raises(ValueError, match="another artefact"), books.database.write() as session:
        ledger.release(
            session,
            job_id=started.job_id,
            lease_token=started.lease_token,
            location="x",
            sha256="b" * 64,
            size=7,
            certificate={"artefact": {"sha256": "a" * 64, "bytes": 7}},
            now=books.now,
        )
    assert books.state_of(started.job_id) == "started"


def test_cancel_only_before_the_start(books: Books) -> None:
    reserved = books.reserve("1")
    books.start(reserved.job_id)
    with pytest.raises(Conflict) as refused:
        books.cancel(reserved.job_id)
    assert refused.value.code == "not_cancellable"
    assert books.spent() == 1.0


# --------------------------------------------------------------------------------------------------
# The sweeper
# --------------------------------------------------------------------------------------------------


def test_a_lost_message_is_sent_again_after_as_long_as_the_job_has_waited(books: Books) -> None:
    reserved = books.reserve("1", ttl_seconds=10_000)
    sent_after = []
    for second in range(5, 1200, 5):
        books.wait(5)
        if books.sweep(resend=10) == (reserved.job_id,):
            sent_after.append(second)
    assert sent_after == [10, 20, 40, 80, 160, 320, 640, 960]


def test_the_sweeper_leaves_a_live_job_alone_and_sends_one_that_lost_its_lease(
    books: Books,
) -> None:
    started = books.must_start(books.reserve("1").job_id, lease=30)
    books.wait(29)
    assert books.sweep() == ()
    books.wait(1)
    assert books.sweep() == (started.job_id,)
    assert books.sweep() == ()
    books.wait(10)
    assert books.sweep() == (started.job_id,)
    second = books.must_start(started.job_id, lease=30)
    books.wait(20)
    assert books.sweep() == ()
    books.heartbeat(second)
    books.wait(20)
    assert books.sweep() == ()


def test_a_poison_job_ends_charged(books: Books) -> None:
    """A job that kills every worker that takes it."""
    reserved = books.reserve("1", max_attempts=3)
    attempts = 0
    for _ in range(50):
        for job_id in (reserved.job_id, *books.sweep()):
            if books.start(job_id) is not None:
                attempts += 1  # and the worker dies
        books.wait(7)
    assert attempts == 3
    ended = job(books, reserved.job_id)
    assert (ended.state, ended.problem_code) == ("failed_charged", ledger.FAILURE_CODE)
    assert books.spent() == 1.0
    assert books.sweep() == ()
    assert books.verify().ok


def test_the_sweeper_ends_a_job_whose_last_attempt_died(books: Books) -> None:
    started = books.must_start(books.reserve("1", max_attempts=1).job_id)
    books.wait(31)
    assert books.sweep() == ()
    assert books.state_of(started.job_id) == "failed_charged"
    with pytest.raises(LeaseLost):
        books.release(started)


def test_the_sweeper_expires_reservations(books: Books) -> None:
    short = books.reserve("1", ttl_seconds=60)
    long = books.reserve("1", ttl_seconds=600)
    books.wait(60)
    assert books.sweep() == (long.job_id,)
    assert books.state_of(short.job_id) == "expired"
    assert books.spent() == 1.0


def test_one_sweeper_at_a_time(books: Books) -> None:
    def take(token: str) -> bool:
        with books.database.write() as session:
            return ledger.take_lease(
                session, name="sweeper", token=token, seconds=10, now=books.now
            )

    assert take("a")
    assert not take("b")
    books.wait(9)
    assert take("a"), "the holder renews"
    books.wait(9)
    assert not take("b")
    books.wait(1)
    assert take("b")
    assert not take("a")


# --------------------------------------------------------------------------------------------------
# Entries, and the database itself
# --------------------------------------------------------------------------------------------------


def test_entries_are_listed_in_order_and_by_page(books: Books) -> None:
    made = [books.reserve("0.5").entry_id for _ in range(5)]
    with books.database.read() as session:
        listed = ledger.entries(session, books.dataset_id)
        assert [e.id for e in listed] == made
        page = ledger.entries(session, books.dataset_id, after_sequence=listed[1].sequence, limit=2)
    assert [e.id for e in page] == made[2:4]
    basic = [f.order for f in books.filters].index("inf")
    assert listed[0].costs[basic] == Cost(500_000_000, 1_000_000_000)
    assert listed[0].mechanism == dp("0.5").to_json()


def test_constraints_stand_behind_the_code(books: Books) -> None:
    reserved = books.reserve("1")
    with pytest.raises(sa.exc.IntegrityError), books.database.write() as session:
        session.execute(sa.update(ChargeRow).values(epsilon_units=-1))
    with pytest.raises(sa.exc.IntegrityError), books.database.write() as session:
        session.execute(sa.update(EntryRow).values(state="refunded"))
    with pytest.raises(sa.exc.IntegrityError), books.database.write() as session:
        session.execute(sa.update(JobRow).values(sealed_seed=b"seed of a job not started"))
    with pytest.raises(sa.exc.IntegrityError), books.database.write() as session:
        session.execute(sa.update(JobRow).values(entry_id="ent_unknown"))
    other = books.reserve("1")
    key = job(books, reserved.job_id).idempotency_key
    with pytest.raises(sa.exc.IntegrityError), books.database.write() as session:
        session.execute(
            sa.update(JobRow).where(JobRow.id == other.job_id).values(idempotency_key=key)
        )
    assert books.verify().ok


def test_a_failed_transaction_leaves_nothing(books: Books) -> None:
    arguments = _arguments(books, costs=tuple(Cost(1, 0) for _ in books.filters), mechanism=dp("1"))

    def reserve_and_stumble() -> None:
        with books.database.write() as session:
            ledger.reserve(session, **arguments)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        reserve_and_stumble()
    assert count(books, EntryRow) == count(books, JobRow) == 0
    assert kinds(books) == ["budget"]


def test_a_reader_cannot_write(books: Books) -> None:
    with pytest.raises((LedgerUnavailable, sa.exc.DBAPIError)), books.database.read() as session:
        session.execute(sa.update(EntryRow).values(state="cancelled"))


def test_a_lock_that_is_not_had_in_time_grants_nothing(books: Books) -> None:
    impatient = Database(
        books.database.url.render_as_string(hide_password=False), lock_timeout_seconds=0.2
    )
    waiting = dataclasses.replace(books, database=impatient)
    with books.database.write() as session:
        ledger.lock_books(session, books.dataset_id)
        with pytest.raises(LedgerUnavailable):
            waiting.reserve("1")
    assert count(books, EntryRow) == 0
    waiting.reserve("1")
    impatient.dispose()


def test_a_database_that_is_not_there_is_unavailable(tmp_path: object) -> None:
    for url in ("postgresql://nobody@127.0.0.1:1/none", f"sqlite:///{tmp_path}/none/ledger.db"):
        database = Database(url)
        with pytest.raises(LedgerUnavailable), database.write():
            raise AssertionError("no transaction began")
        database.dispose()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://root@localhost/x"])
def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"SQLite"):
        Database(url)


def test_an_error_does_not_print_what_was_being_stored(books: Books) -> None:
    reserved = books.reserve("1")
    with pytest.raises(sa.exc.IntegrityError) as refused, books.database.write() as session:
        session.execute(
            sa.update(JobRow)
            .where(JobRow.id == reserved.job_id)
            .values(sealed_seed=b"very secret", max_attempts=0)
        )
    assert "very secret" not in str(refused.value)


def test_times_are_microseconds(books: Books) -> None:
    reserved = books.reserve("1", ttl_seconds=2.5)
    assert job(books, reserved.job_id).expires_at == books.now + 5 * SECOND // 2
