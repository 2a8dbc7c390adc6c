"""Plans: several jobs, fixed in advance and charged as one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from accounting import ledger
from accounting.errors import BudgetExhausted, Conflict, IdempotencyMismatch
from accounting.tables import Database
from tests.books import SECOND, Books


@pytest.fixture
def books(database: Database) -> Books:
    return Books(database).register().set_budget()


def entry_of(books: Books, entry_id: str) -> ledger.Entry:
    with books.database.read() as session:
        return next(e for e in ledger.entries(session, books.dataset_id) if e.id == entry_id)


def test_a_plan_is_one_entry_with_one_charge(books: Books) -> None:
    plan = books.reserve_plan(["1", "2", "1"])
    assert plan.created
    assert len(set(plan.job_ids)) == 3
    entry = entry_of(books, plan.entry_id)
    assert (entry.kind, entry.state, entry.job_ids) == ("plan", "reserved", plan.job_ids)
    assert books.spent() == 4.0
    with pytest.raises(BudgetExhausted):
        books.reserve("2")
    assert books.verify().ok


def test_a_plan_beyond_the_budget_leaves_nothing_behind(books: Books) -> None:
    with pytest.raises(BudgetExhausted):
        books.reserve_plan(["3", "3"])
    assert books.spent() == 0.0
    with books.database.read() as session:
        assert ledger.entries(session, books.dataset_id) == []


def test_the_same_key_answers_the_same_plan(books: Books) -> None:
    first = books.reserve_plan(["1", "2"], key="k")
    again = books.reserve_plan(["1", "2"], key="k")
    assert (again.job_ids, again.entry_id, again.created) == (first.job_ids, first.entry_id, False)
    with pytest.raises(IdempotencyMismatch):
        books.reserve_plan(["1", "1"], key="k")
    assert books.spent() == 3.0


def test_a_plan_starts_with_its_first_job_and_ends_with_its_last(books: Books) -> None:
    plan = books.reserve_plan(["1", "2"])
    second = books.must_start(plan.job_ids[1])
    assert second.mechanism is not None
    assert second.mechanism["epsilon"] == 2.0
    assert entry_of(books, plan.entry_id).state == "started"
    assert books.state_of(plan.job_ids[0]) == "reserved"
    books.release(second)
    assert entry_of(books, plan.entry_id).state == "started"
    first = books.must_start(plan.job_ids[0])
    assert first.sequence != second.sequence
    books.fail(first)
    entry = entry_of(books, plan.entry_id)
    assert entry.state == "released"
    assert len(entry.release_ids) == 1
    assert books.spent() == 3.0
    assert books.verify().ok


def test_a_plan_of_which_nothing_came_is_failed_and_charged(books: Books) -> None:
    plan = books.reserve_plan(["1", "2"])
    for job_id in plan.job_ids:
        books.fail(books.must_start(job_id))
    assert entry_of(books, plan.entry_id).state == "failed_charged"
    assert books.spent() == 3.0


def test_a_plan_is_cancelled_whole_or_not_at_all(books: Books) -> None:
    plan = books.reserve_plan(["1", "2"])
    books.cancel(plan.job_ids[1])
    assert {books.state_of(job) for job in plan.job_ids} == {"cancelled"}
    assert books.spent() == 0.0
    started = books.reserve_plan(["1", "2"])
    books.must_start(started.job_ids[0])
    with pytest.raises(Conflict) as refused:
        books.cancel(started.job_ids[1])
    assert refused.value.code == "not_cancellable"
    assert books.spent() == 3.0
    assert books.verify().ok


def test_an_unstarted_plan_expires_whole(books: Books) -> None:
    plan = books.reserve_plan(["1", "2"], ttl_seconds=60)
    books.wait(61)
    assert books.sweep() == ()
    assert {books.state_of(job) for job in plan.job_ids} == {"expired"}
    assert books.spent() == 0.0
    assert books.verify().ok


def test_a_started_plan_never_expires(books: Books) -> None:
    """Its charge is spent, so its other jobs wait until somebody takes them."""
    plan = books.reserve_plan(["1", "2"], ttl_seconds=60)
    books.release(books.must_start(plan.job_ids[0]))
    books.wait(3600)
    assert books.sweep() == (plan.job_ids[1],)
    assert books.spent() == 3.0
    books.release(books.must_start(plan.job_ids[1]), sha256="b" * 64)
    assert entry_of(books, plan.entry_id).state == "released"
    assert books.verify().ok


def test_a_plan_is_cancelled_while_the_sweeper_sends_its_jobs(books: Books) -> None:
    """Both take the rows of its jobs, and neither waits for the other for ever."""
    plan = books.reserve_plan(["0.5"] * 8, ttl_seconds=10_000)
    last = max(plan.job_ids)
    waiting = threading.Barrier(2)

    def sweep() -> None:
        with books.database.write() as session:
            waiting.wait()
            ledger.sweep(session, now=books.now + 3600 * SECOND, resend_after_seconds=1)

    def cancel() -> None:
        waiting.wait()
        books.cancel(last)

    with ThreadPoolExecutor(2) as pool:
        if books.database.is_sqlite:
            # One writer at a time: whoever is first holds the whole database.
            waiting = threading.Barrier(1)
        for done in [pool.submit(sweep), pool.submit(cancel)]:
            done.result(timeout=60)
    assert books.verify().ok


def test_each_job_of_a_plan_has_a_lease_of_its_own(books: Books) -> None:
    plan = books.reserve_plan(["1", "2"])
    first, second = (books.must_start(job) for job in plan.job_ids)
    books.wait(31)
    again = books.must_start(first.job_id)
    assert again.attempt == 2
    assert (again.sequence, again.hash) == (first.sequence, first.hash)
    books.release(again, sha256="b" * 64)
    books.release(second)
    assert len(entry_of(books, plan.entry_id).release_ids) == 2
    assert books.verify().ok


def test_the_sweeper_sends_every_job_of_a_plan(books: Books) -> None:
    plan = books.reserve_plan(["1", "2"])
    books.wait(20)
    assert set(books.sweep()) == set(plan.job_ids)


def test_a_plan_above_the_threshold_waits_whole(database: Database) -> None:
    books = Books(database).register().set_budget(approval_above="2.5")
    plan = books.reserve_plan(["1", "2"])
    assert plan.state == "awaiting_approval"
    assert books.start(plan.job_ids[0]) is None
    assert set(books.approve(plan.job_ids[1])) == set(plan.job_ids)
    books.must_start(plan.job_ids[0])
    assert books.verify().ok
