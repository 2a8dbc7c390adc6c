"""Clients that race, with connections of their own: in threads, and in processes."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.pool import Pool
from threading import Barrier
from typing import TypeVar

import pytest
import sqlalchemy as sa

from accounting import ledger
from accounting.errors import BudgetExhausted, Conflict, LeaseLost
from accounting.tables import Database, EntryRow, JobRow, ReleaseRow
from tests.books import Books

CLIENTS = 20
PROCESSES = 4
T = TypeVar("T")


def race(books: Books, act: Callable[[Books, int], T], clients: int = CLIENTS) -> list[T]:
    """What each client's act answered; all begin at one moment, each on its own connections."""
    barrier = Barrier(clients)

    def client(number: int) -> T:
        own = Database(books.database.url.render_as_string(hide_password=False))
        with own.read():
            pass  # connected before the others are waited for
        try:
            barrier.wait(60)
            return act(replace(books, database=own), number)
        finally:
            own.dispose()

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(client, range(clients)))


def try_to_reserve(books: Books, number: int) -> str:
    try:
        books.reserve("1.0", key=f"client {number}")
    except BudgetExhausted:
        return "refused"
    return "admitted"


def check_five(books: Books, answers: list[str]) -> None:
    assert Counter(answers) == {"admitted": 5, "refused": CLIENTS - 5}
    assert books.spent() == 5.0
    with books.database.read() as session:
        assert len(ledger.entries(session, books.dataset_id)) == 5
    found = books.verify()
    assert (found.ok, found.rows) == (True, 6)


@pytest.fixture
def books(database: Database) -> Books:
    return Books(database).register().set_budget("5.0")


def test_twenty_threads_for_a_budget_that_admits_five(books: Books) -> None:
    check_five(books, race(books, try_to_reserve))


@pytest.fixture(scope="module")
def processes() -> Iterator[Pool]:
    # Spawned, as another machine's would be: nothing of ours is inherited.
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        yield pool
        pool.close()
        pool.join()


def race_in_process(url: str, first: int, clients: int, begin: float) -> list[str]:
    """Runs in another process: some of the clients, in threads, all from one moment on."""
    database = Database(url)
    books = Books(database)
    with database.read() as session:
        found = ledger.budget_of(session, books.dataset_id)
    assert found is not None
    books.filters = found[1]

    def act(own: Books, number: int) -> str:
        time.sleep(max(0.0, begin - time.time()))
        return try_to_reserve(own, first + number)

    answers = race(books, act, clients)
    database.dispose()
    return answers


def test_twenty_clients_in_processes_for_a_budget_that_admits_five(
    books: Books, processes: Pool
) -> None:
    url = books.database.url.render_as_string(hide_password=False)
    each = CLIENTS // PROCESSES
    processes.map(time.sleep, [0.01] * PROCESSES)  # they are all up
    begin = time.time() + 1.0
    parts = processes.starmap(
        race_in_process, [(url, k * each, each, begin) for k in range(PROCESSES)], chunksize=1
    )
    check_five(books, [answer for part in parts for answer in part])


def test_one_key_from_many_clients_makes_one_job(books: Books) -> None:
    made = race(books, lambda own, _: own.reserve("1.0", key="the same"), clients=8)
    assert len({m.job_id for m in made}) == 1
    assert Counter(m.created for m in made) == {True: 1, False: 7}
    assert books.spent() == 1.0


def test_one_start_among_many(books: Books) -> None:
    job_id = books.reserve("1.0").job_id
    started = race(books, lambda own, number: own.start(job_id, seed=bytes([number])), clients=8)
    winners = [s for s in started if s is not None]
    assert len(winners) == 1
    with books.database.read() as session:
        job = session.get_one(JobRow, job_id)
        assert job.sealed_seed == winners[0].sealed_seed
        assert job.attempts == 1
    assert books.verify().ok


def test_one_takeover_of_a_lost_lease(books: Books) -> None:
    first = books.must_start(books.reserve("1.0").job_id)
    books.wait(31)
    started = race(books, lambda own, _: own.start(first.job_id), clients=8)
    assert [s.attempt for s in started if s is not None] == [2]
    assert books.verify().ok


def test_cancel_against_start(books: Books) -> None:
    """Whichever comes first, the charge is there exactly if the job started."""
    for _ in range(4):
        job_id = books.reserve("1.0").job_id

        def act(own: Books, number: int, job_id: str = job_id) -> str:
            if number == 0:
                return "started" if own.start(job_id) is not None else "not started"
            try:
                own.cancel(job_id)
            except Conflict:
                return "not cancelled"
            return "cancelled"

        answers = race(books, act, clients=2)
        assert answers in (["started", "not cancelled"], ["not started", "cancelled"])
        expected = "started" if answers[0] == "started" else "cancelled"
        assert books.state_of(job_id) == expected
    assert books.verify().ok


def test_release_against_takeover(books: Books) -> None:
    """A worker that was given up for lost comes back while another takes its job."""
    first = books.must_start(books.reserve("1.0").job_id)
    books.wait(31)

    def act(own: Books, number: int) -> str:
        if number == 0:
            return "taken" if own.start(first.job_id) is not None else "not taken"
        try:
            own.release(first)
        except LeaseLost:
            return "lost"
        return "released"

    answers = race(books, act, clients=2)
    assert answers in (["taken", "lost"], ["not taken", "released"])
    with books.database.read() as session:
        released = session.scalar(sa.select(sa.func.count()).select_from(ReleaseRow))
    assert released == (1 if answers[1] == "released" else 0)
    assert books.verify().ok


def test_one_budget_and_one_sweeper(database: Database) -> None:
    books = Books(database).register()

    def budget(own: Books, number: int) -> int | None:
        try:
            own.set_budget(str(2 + number))
        except Conflict:
            return None
        return 2 + number

    # Whoever was first fixed it, and the others lowered it or were refused.
    agreed = [number for number in race(books, budget, clients=6) if number is not None]
    with database.read() as session:
        found = ledger.budget_of(session, books.dataset_id)
    assert found is not None
    assert found[0].epsilon == min(agreed)

    def sweeper(own: Books, number: int) -> bool:
        with own.database.write() as session:
            return ledger.take_lease(
                session, name="sweeper", token=str(number), seconds=10, now=own.now
            )

    assert Counter(race(books, sweeper, clients=6)) == {True: 1, False: 5}
    assert books.verify().ok


def test_clients_of_many_datasets_and_a_sweeper_do_not_deadlock(database: Database) -> None:
    several = [
        Books(database, dataset_id=f"ds_{k}", snapshot_id=f"snap_{k}").register().set_budget("5.0")
        for k in range(3)
    ]
    for books in several:
        for _ in range(2):
            books.reserve("1.0", ttl_seconds=60)

    def act(own: Books, number: int) -> int:
        if number < 3:
            mine = replace(several[number], database=own.database)
            mine.wait(60)
            for _ in range(3):
                started = mine.must_start(mine.reserve("1.0").job_id)
                mine.heartbeat(started, 1)
                mine.release(started)
            return 0
        own.wait(60)
        with own.database.write() as session:
            return ledger.expire(session, own.now)

    answers = race(several[0], act, clients=5)
    assert sum(answers) == 6
    with database.read() as session:
        states = Counter(session.scalars(sa.select(EntryRow.state)))
    assert states == {"expired": 6, "released": 9}
    assert all(books.verify().ok for books in several)
