"""The sweeper: lost messages, lost leases, and one sweeper at a time."""

from __future__ import annotations

import time

import pytest
import sqlalchemy as sa

from accounting import ledger
from accounting.errors import LedgerUnavailable
from accounting.tables import Database, JobRow, LeaseRow
from api.deps import now
from api.sweeper import Sweeper
from tests.api.world import World


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = now()

    def __call__(self) -> int:
        return self.now

    def turn(self, seconds: float) -> None:
        self.now += int(seconds * 1_000_000)


class Broker:
    """A broker that notes what it is sent, and may be down."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.up = True

    def __call__(self, job_id: str) -> bool:
        if self.up:
            self.sent.append(job_id)
        return self.up


def sweeper(database: Database, broker: Broker, clock: Clock) -> Sweeper:
    return Sweeper(database, broker, sweep_seconds=2, resend_seconds=10, clock=clock)


def test_a_lost_message_is_sent_again(each_world: World) -> None:
    world = each_world
    job = world.order(world.dataset(), "k").json()["id"]
    clock, broker = Clock(), Broker()
    sweeps = sweeper(world.database, broker, clock)
    assert sweeps.sweep() == ()  # it was sent just now
    clock.turn(11)
    assert sweeps.sweep() == (job,)
    assert broker.sent == [job]
    assert sweeps.sweep() == ()


def test_a_broker_that_is_down_is_asked_again_later(world: World) -> None:
    job = world.order(world.dataset(), "k").json()["id"]
    clock, broker = Clock(), Broker()
    sweeps = sweeper(world.database, broker, clock)
    broker.up = False
    clock.turn(11)
    assert sweeps.sweep() == ()
    broker.up = True
    clock.turn(400)
    assert sweeps.sweep() == (job,)


def test_a_lost_lease_sends_the_job_again_and_a_reservation_expires(each_world: World) -> None:
    world = each_world
    dataset = world.dataset()
    started = world.order(dataset, "k1").json()["id"]
    forgotten = world.order(dataset, "k2").json()["id"]
    clock, broker = Clock(), Broker()
    sweeps = sweeper(world.database, broker, clock)
    with world.database.write() as session:
        ledger.start(
            session,
            job_id=started,
            job_digest="d" * 64,
            sealed_seed=b"sealed",
            lease_seconds=30,
            now=clock(),
        )
    clock.turn(25)
    assert started not in sweeps.sweep()
    clock.turn(10)
    assert started in sweeps.sweep()
    clock.turn(86_400)
    sweeps.sweep()
    seen = {
        job: world.requester.get(f"/v1/jobs/{job}").json()["state"] for job in (started, forgotten)
    }
    assert seen == {started: "started", forgotten: "expired"}


def test_one_sweeper_works_at_a_time(each_world: World) -> None:
    world = each_world
    job = world.order(world.dataset(), "k").json()["id"]
    clock, broker = Clock(), Broker()
    first, second = (sweeper(world.database, broker, clock) for _ in range(2))
    assert first.sweep() == second.sweep() == ()
    clock.turn(9)
    first.sweep()
    clock.turn(9)
    assert second.sweep() == ()  # the lease was renewed meanwhile
    assert first.sweep() == (job,)
    clock.turn(60)  # the first has died
    assert second.sweep() == (job,)
    with world.database.read() as session:
        assert len(session.scalars(sa.select(LeaseRow)).all()) == 1


def test_the_loop_outlives_a_database_that_is_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = world.order(world.dataset(), "k").json()["id"]
    with world.database.write() as session:
        session.get_one(JobRow, job).sent_at = None
    broker = Broker()
    loop = Sweeper(world.database, broker, sweep_seconds=0.01, resend_seconds=10, clock=now)
    real, failures = loop.sweep, [LedgerUnavailable("away"), ZeroDivisionError("canary")]

    def flaky() -> tuple[str, ...]:
        if failures:
            raise failures.pop()
        return real()

    monkeypatch.setattr(loop, "sweep", flaky)
    loop.start()
    deadline = time.monotonic() + 10
    while not broker.sent:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    loop.stop()
    assert broker.sent == [job]
    loop.stop()
