"""Approvals, the caps of organisations, and budget groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accounting import ledger
from accounting.canonical import digest
from accounting.errors import BudgetExhausted, Conflict
from accounting.tables import Database, DatasetRow, EntryRow, JobRow
from tests.books import Books


@pytest.fixture
def books(database: Database) -> Books:
    return Books(database).register()


# --------------------------------------------------------------------------------------------------
# Approval
# --------------------------------------------------------------------------------------------------


def test_a_charge_above_the_threshold_waits_and_is_held(books: Books) -> None:
    books.set_budget(approval_above="2")
    assert books.reserve("2").state == "reserved"
    waiting = books.reserve("2.5")
    assert waiting.state == books.state_of(waiting.job_id) == "awaiting_approval"
    assert books.spent() == 4.5
    with pytest.raises(BudgetExhausted):
        books.reserve("1")
    books.wait(20)
    assert waiting.job_id not in books.sweep(), "nobody may start it yet"
    assert books.start(waiting.job_id) is None
    assert books.approve(waiting.job_id) == (waiting.job_id,)
    books.release(books.must_start(waiting.job_id))
    assert books.verify().ok


def test_a_denied_charge_is_taken_back(books: Books) -> None:
    books.set_budget(approval_above="2")
    waiting = books.reserve("2.5")
    books.deny(waiting.job_id)
    assert books.state_of(waiting.job_id) == "denied"
    assert books.spent() == 0.0
    for act in (books.approve, books.deny):
        with pytest.raises(Conflict) as refused:
            act(waiting.job_id)
        assert refused.value.code == "not_awaiting_approval"
    assert books.start(waiting.job_id) is None
    assert books.verify().ok


def test_what_needs_no_approval_can_be_neither_approved_nor_denied(books: Books) -> None:
    books.set_budget()
    reserved = books.reserve("1")
    for act in (books.approve, books.deny):
        with pytest.raises(Conflict):
            act(reserved.job_id)
    assert books.state_of(reserved.job_id) == "reserved"


def test_a_waiting_charge_is_cancelled_or_expires(books: Books) -> None:
    books.set_budget(approval_above="2")
    books.cancel(books.reserve("2.5").job_id)
    late = books.reserve("2.5", ttl_seconds=60)
    books.wait(61)
    books.sweep()
    assert books.state_of(late.job_id) == "expired"
    assert books.spent() == 0.0
    assert books.verify().ok


def test_the_lost_message_of_an_approved_job_is_soon_sent_again(books: Books) -> None:
    """However long the owner took, the job has waited for a worker since the approval only."""
    books.set_budget(approval_above="2")
    waiting = books.reserve("2.5", ttl_seconds=86_400)
    books.wait(3600)
    books.approve(waiting.job_id)
    books.wait(9)
    assert books.sweep(resend=10) == ()
    books.wait(1)
    assert books.sweep(resend=10) == (waiting.job_id,)


def test_an_approval_gives_the_job_its_whole_time(books: Books) -> None:
    books.set_budget(approval_above="2")
    waiting = books.reserve("2.5", ttl_seconds=60)
    books.wait(59)
    books.approve(waiting.job_id)
    books.wait(59)
    books.must_start(waiting.job_id)


def test_the_threshold_may_change_and_old_books_still_verify(books: Books) -> None:
    books.set_budget(approval_above="2")
    waiting = books.reserve("2.5")
    books.set_budget(approval_above="1")
    second = books.reserve("1.5")
    assert second.state == "awaiting_approval"
    books.set_budget()
    assert books.reserve("1").state == "reserved"
    assert books.state_of(waiting.job_id) == "awaiting_approval"
    assert books.verify().ok


def test_an_approval_after_the_time_is_over_is_refused(books: Books) -> None:
    books.set_budget(approval_above="2")
    waiting = books.reserve("2.5", ttl_seconds=60)
    books.wait(60)
    with pytest.raises(Conflict):
        books.approve(waiting.job_id)
    books.sweep()
    assert books.state_of(waiting.job_id) == "expired"


# --------------------------------------------------------------------------------------------------
# Caps of organisations
# --------------------------------------------------------------------------------------------------


def other_organisation(books: Books) -> Books:
    """The same dataset, asked by another organisation."""
    helper = replace(books, organisation_id="org_2", dataset_id="ds_other", snapshot_id="snap_o")
    helper.register()
    return replace(books, organisation_id="org_2")


def test_an_organisation_fills_its_share_and_no_more(books: Books) -> None:
    books.set_budget(caps={"org_1": "2"})
    other = other_organisation(books)
    books.reserve("1.5")
    with pytest.raises(BudgetExhausted) as refused:
        books.reserve("1")
    assert refused.value.extra["scope"] == "organisation"
    kept = books.reserve("0.5")
    # Without a cap of its own, another organisation has what is left of the whole.
    other.reserve("3")
    with pytest.raises(BudgetExhausted) as full:
        other.reserve("0.5")
    assert full.value.extra["scope"] == "dataset"
    books.cancel(kept.job_id)
    books.reserve("0.5")
    assert books.verify().ok


def test_a_cap_counts_what_was_charged_before_it_was_set(books: Books) -> None:
    books.set_budget()
    books.reserve("1.5")
    books.set_budget(caps={"org_1": "2"})
    with pytest.raises(BudgetExhausted):
        books.reserve("1")
    books.set_budget(caps={"org_1": "2.5"})
    books.reserve("1")
    with books.database.read() as session:
        own = ledger.organisation_states(session, books.dataset_id, "org_1")
        assert ledger.organisation_states(session, books.dataset_id, "org_2") is None
    assert own is not None
    assert own[0].epsilon_units == own[0].filter.cap_units == 25 * 10**8
    assert books.verify().ok


def test_caps_stand_below_the_budget(books: Books) -> None:
    books.set_budget("5", caps={"org_1": "5", "org_2": "5"})
    other = other_organisation(books)
    books.reserve("3")
    with pytest.raises(BudgetExhausted) as refused:
        other.reserve("3")
    assert refused.value.extra["scope"] == "dataset"


# --------------------------------------------------------------------------------------------------
# Budget groups
# --------------------------------------------------------------------------------------------------


def member(books: Books, number: int) -> Books:
    """A second dataset of the same books."""
    made = replace(books, dataset_id=f"ds_m{number}", snapshot_id=f"snap_m{number}").register()
    with books.database.write() as session:
        session.get_one(DatasetRow, made.dataset_id).books_id = books.dataset_id
    return made


def test_datasets_of_one_group_share_one_budget_and_one_chain(books: Books) -> None:
    second = member(books, 2)
    second.set_budget()
    first = replace(books, filters=second.filters)
    first.reserve("2")
    started = second.must_start(second.reserve("2").job_id)
    assert started.dataset_id == second.dataset_id
    assert first.spent() == second.spent() == 4.0
    with pytest.raises(BudgetExhausted):
        first.reserve("2")
    with pytest.raises(BudgetExhausted):
        second.reserve("2")
    second.release(started)
    assert first.verify() == second.verify()
    assert first.verify().ok
    with books.database.read() as session:
        entries = ledger.entries(session, first.dataset_id)
        assert entries == ledger.entries(session, second.dataset_id)
        assert [e.dataset_id for e in entries] == [first.dataset_id, second.dataset_id]
        head = session.get_one(DatasetRow, second.dataset_id)
        assert (head.chain_sequence, head.totals) == (0, [])


def test_a_dataset_that_was_moved_to_other_books_shows(books: Books) -> None:
    books.set_budget()
    books.must_start(books.reserve("5").job_id)
    fresh = replace(books, dataset_id="ds_fresh", snapshot_id="snap_f").register().set_budget()
    with books.database.write() as session:
        session.get_one(DatasetRow, books.dataset_id).books_id = fresh.dataset_id
    found = books.verify()
    assert not found.ok
    assert "other books" in str(found.problem)


def test_a_job_on_another_datasets_snapshot_never_starts(books: Books) -> None:
    books.set_budget()
    other = replace(books, dataset_id="ds_2", snapshot_id="snap_2").register()
    job = books.reserve("1")
    with books.database.write() as session:
        session.get_one(JobRow, job.job_id).snapshot_id = other.snapshot_id
    with pytest.raises(Conflict) as refused:
        books.start(job.job_id)
    assert refused.value.code == "ledger_inconsistent"
    assert not books.verify().ok


def test_a_job_with_another_mechanism_than_was_charged_never_starts(books: Books) -> None:
    books.set_budget()
    job = books.reserve("1")
    with books.database.write() as session:
        row = session.get_one(JobRow, job.job_id)
        row.mechanism = {**(row.mechanism or {}), "epsilon": 4.0}
        entry = session.get_one(EntryRow, job.entry_id)
        entry.mechanism_digest = digest(row.mechanism)
    with pytest.raises(Conflict):
        books.start(job.job_id)
    assert not books.verify().ok


def test_a_row_that_somebody_wrote_stops_no_other_books(books: Books) -> None:
    books.set_budget()
    broken = books.reserve("1", ttl_seconds=60)
    other = replace(books, dataset_id="ds_2", snapshot_id="snap_2").register().set_budget()
    fine = other.reserve("1", ttl_seconds=60)
    with books.database.write() as session:
        session.get_one(JobRow, broken.job_id).max_attempts = 1
        started = session.get_one(JobRow, broken.job_id)
        started.state, started.attempts = "started", 1
        started.sealed_seed, started.lease_token = b"x", "t"
        started.lease_expires_at = books.now
    other.wait(61)
    other.sweep()
    assert other.state_of(fine.job_id) == "expired"
    assert books.state_of(broken.job_id) == "started"


def test_a_snapshot_of_another_member_does_not_count(books: Books) -> None:
    second = member(books, 2).set_budget()
    second.snapshot_id = books.snapshot_id
    with pytest.raises(Conflict) as refused:
        second.reserve("1")
    assert refused.value.code == "no_snapshot"
