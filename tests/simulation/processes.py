"""What the processes run that the crash tests kill: the product's own job, and a busy client.

They are forked from a server process that has imported the worker once, as importing it would take
longer than all they do.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from accounting import ledger
from accounting.errors import BudgetExhausted, Conflict
from accounting.filters import EPSILON_UNITS
from accounting.tables import Database, JobRow
from api.sweeper import Sweeper
from tests.books import Books
from tests.simulation.model import ENDED
from tests.simulation.world import EPSILON_STEP, POINTS, SimulatedDatabase
from worker import jobs
from worker.artifacts import ArtifactStore
from worker.settings import Settings
from worker.snapshots import read_snapshot

EXPONENTS = 6


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def now() -> int:
    return time.time_ns() // 1_000


def run_job_until(settings: Settings, job_id: str, point: int | None) -> None:
    """One attempt at a job by the product's own code, which gets no further than this point."""

    def reach(place: int) -> None:
        if place == point:
            die()

    def after(real: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            answer = real(*given, **named)
            reach(place)
            return answer

        return call

    reach(POINTS.index("taken"))
    patched = pytest.MonkeyPatch()  # for the rest of this process
    patched.setattr(jobs, "read_snapshot", after(read_snapshot, POINTS.index("reading")))
    patched.setattr(jobs, "_draw", after(jobs._draw, POINTS.index("drawn")))
    for name, point_name in {"stage": "staged", "publish": "in place"}.items():
        real = getattr(ArtifactStore, name)
        patched.setattr(ArtifactStore, name, after(real, POINTS.index(point_name)))
    database = SimulatedDatabase(settings.effective_database_url)
    commits = iter(("start", "end"))
    current = ""

    def before_commit() -> str:
        nonlocal current
        # A heartbeat's commits, from its thread, are no points.
        if threading.current_thread() is threading.main_thread():
            current = next(commits)
            reach(POINTS.index(f"{current} not committed"))
        return ""

    def after_commit(_fate: str) -> None:
        if threading.current_thread() is threading.main_thread():
            reach(POINTS.index(f"{current} committed"))

    database.before_commit, database.after_commit = before_commit, after_commit
    jobs._attempt(settings, database, job_id)
    database.dispose()


def recover(settings: Settings, seconds: float) -> None:
    """The product's sweeper and worker, until every job has ended or the time is up."""
    database = Database(settings.effective_database_url)
    queue: list[str] = []

    def send(job_id: str) -> bool:
        queue.append(job_id)
        return True

    sweeper = Sweeper(database, send, sweep_seconds=0.1, resend_seconds=0.1, clock=now)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and _unended(database):
        sweeper.sweep()
        while queue:
            jobs.run_job(settings, queue.pop(0))
        time.sleep(0.05)
    database.dispose()


def _unended(database: Database) -> int:
    with database.read() as session:
        return len(session.scalars(sa.select(JobRow.id).where(JobRow.state.not_in(ENDED))).all())


def charge_of(number: int) -> str:
    """What a client's request of this number costs: a power of two, in nats."""
    return str(Decimal(EPSILON_STEP << (number % EXPONENTS)) / EPSILON_UNITS)


def ask_without_end(url: str, client: int, diary: Path, seed: int) -> None:
    """A client that reserves, starts, cancels and releases on one dataset until it is killed.

    Before each request it writes into its diary what it asks, and after it what it was told. It
    begins with its last request, whose answer it may never have had.
    """
    draw = random.Random(seed)  # noqa: S311 - an example, not a secret
    database = Database(url)
    books = Books(database)
    with database.read() as session:
        found = ledger.budget_of(session, books.dataset_id)
    if found is None:
        raise RuntimeError("the dataset has no budget")
    books.filters = found[1]
    told = read_diary(diary)
    number = max(told, default=0)
    # Unbuffered, so that what a killed process wrote is there.
    with diary.open("ab", buffering=0) as pages:
        while True:
            books.now = now()
            pages.write(f"{number} asked\n".encode())
            try:
                made = books.reserve(charge_of(number), key=f"{client}-{number}", ttl_seconds=3600)
            except BudgetExhausted:
                pages.write(f"{number} refused\n".encode())
            else:
                pages.write(f"{number} {made.job_id}\n".encode())
                if draw.random() < 0.3:
                    _try_to_cancel(books, made.job_id)
                started = books.start(made.job_id)
                if started is not None and draw.random() < 0.8:
                    books.heartbeat(started, 1)
                    books.release(started)
            number += 1


def _try_to_cancel(books: Books, job_id: str) -> None:
    try:
        books.cancel(job_id)
    except Conflict:
        return


def read_diary(diary: Path) -> dict[int, list[str]]:
    """By request, what the client wrote of it; a line that was cut short is left out."""
    found: dict[int, list[str]] = {}
    if diary.exists():
        for line in diary.read_text().split("\n")[:-1]:
            number, word = line.split(" ")
            found.setdefault(int(number), []).append(word)
    return found
