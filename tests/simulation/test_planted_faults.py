"""The simulation can fail: faults planted in the ledger and the worker are found, and shrunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from accounting import admission, chain, ledger
from accounting.chain import NEXT_STATES
from accounting.tables import EntryRow, JobRow
from tests.simulation.operations import Script, search, violation_of
from tests.simulation.world import Installation, installation
from worker import jobs

MOST_LISTS = 150
Plant = Callable[[pytest.MonkeyPatch], None]


def _also_from_started(patched: pytest.MonkeyPatch, state: str) -> None:
    """So that neither the ledger's own check nor the chain's finds what was planted."""
    allowed = {**NEXT_STATES, "started": NEXT_STATES["started"] | {state}}
    patched.setattr(ledger, "NEXT_STATES", allowed)
    patched.setattr(chain, "NEXT_STATES", allowed)


def _give_back(session: Session, job_id: str, state: str, now: int) -> None:
    books, job = ledger._lock_job(session, job_id)
    entry = session.get_one(EntryRow, job.entry_id)
    costs = ledger._costs_of(session, [entry.id]).get(entry.id, ())
    ledger._count(session, books, entry.organisation_id, costs, -1)
    ledger._move(session, books, job, state, now=now, data={})


def cancel_gives_a_started_charge_back(patched: pytest.MonkeyPatch) -> None:
    real = ledger.cancel

    def cancel(session: Session, *, job_id: str, now: int) -> None:
        if session.get_one(JobRow, job_id).state == "started":
            _give_back(session, job_id, "cancelled", now)
        else:
            real(session, job_id=job_id, now=now)

    _also_from_started(patched, "cancelled")
    patched.setattr(ledger, "cancel", cancel)


def a_lost_lease_gives_the_charge_back(patched: pytest.MonkeyPatch) -> None:
    real = ledger.sweep

    def sweep(session: Session, *, now: int, **how: Any) -> tuple[str, ...]:
        lost = sa.and_(JobRow.state == "started", JobRow.lease_expires_at <= now)
        for job_id in session.scalars(sa.select(JobRow.id).where(lost)).all():
            _give_back(session, job_id, "expired", now)
        return real(session, now=now, **how)

    _also_from_started(patched, "expired")
    patched.setattr(ledger, "sweep", sweep)


def a_release_ignores_the_lease(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(
        ledger, "_lock_attempt", lambda session, job_id, _token: ledger._lock_job(session, job_id)
    )


def a_retry_draws_from_a_new_seed(patched: pytest.MonkeyPatch) -> None:
    real = ledger.start

    def start(session: Session, *, sealed_seed: bytes, **how: Any) -> ledger.Started | None:
        started = real(session, sealed_seed=sealed_seed, **how)
        return None if started is None else replace(started, sealed_seed=sealed_seed)

    patched.setattr(ledger, "start", start)


def a_retry_may_run_other_code(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(jobs, "digest", lambda _what: "the same")


def a_start_is_not_committed(patched: pytest.MonkeyPatch) -> None:
    real = ledger.start

    def start(session: Session, **how: Any) -> ledger.Started | None:
        nested = session.begin_nested()
        started = real(session, **how)
        nested.rollback()
        return started

    patched.setattr(ledger, "start", start)


def every_request_is_admitted(patched: pytest.MonkeyPatch) -> None:
    for module in (admission, chain):
        patched.setattr(module, "admitting", lambda _states, _costs: (0,))


def a_charge_is_not_counted(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(admission, "moved_totals", lambda totals, _costs, _sign: totals)


def a_key_is_not_remembered(patched: pytest.MonkeyPatch) -> None:
    real = ledger.reserve

    def reserve(session: Session, *, idempotency_key: str, **how: Any) -> ledger.Reservation:
        return real(session, idempotency_key=f"{idempotency_key} at {how['now']}", **how)

    patched.setattr(ledger, "reserve", reserve)


def the_sweeper_sends_nothing_again(patched: pytest.MonkeyPatch) -> None:
    real = ledger.sweep

    def sweep(session: Session, **how: Any) -> tuple[str, ...]:
        real(session, **how)
        return ()

    patched.setattr(ledger, "sweep", sweep)


@dataclass(frozen=True)
class Fault:
    """A fault, how few operations show it, and a word of what is told of it."""

    plant: Plant
    operations: int
    told: str


FAULTS = [
    Fault(cancel_gives_a_started_charge_back, 3, "cancelled while it was started"),
    Fault(a_lost_lease_gives_the_charge_back, 3, "had to be"),
    Fault(a_release_ignores_the_lease, 5, "went on without its lease"),
    Fault(a_retry_draws_from_a_new_seed, 2, "drew something else"),
    Fault(a_retry_may_run_other_code, 5, "had to be failed_charged"),
    Fault(a_start_is_not_committed, 2, "were read while the job was reserved"),
    Fault(every_request_is_admitted, 4, "had to be exhausted"),
    Fault(a_charge_is_not_counted, 1, "had to hold"),
    Fault(a_key_is_not_remembered, 1, "the jobs are"),
    Fault(the_sweeper_sends_nothing_again, 2, "in limbo"),
]


@pytest.fixture
def installed(sqlite_url: str, tmp_path: Path) -> Iterator[Installation]:
    with installation(sqlite_url, tmp_path / "home") as made:
        yield made


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.plant.__name__)
def test_a_planted_fault_is_found_and_shrunk(
    fault: Fault, installed: Installation, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        fault.plant(patched)
        _, problem, kept = next(
            search(installed, range(MOST_LISTS), keep=tmp_path, tally=Counter())
        )
    assert fault.told in problem
    small = Script.load(kept)
    assert len(small.operations) <= fault.operations, small
    assert problem in small.note
    # It is the fault that fails the list, not the list.
    assert violation_of(installed, small) is None
