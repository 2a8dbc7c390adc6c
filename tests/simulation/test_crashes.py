"""Real processes and real SIGKILL: the worker at every step, and clients at any moment."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from accounting import ledger
from accounting.filters import EPSILON_UNITS
from accounting.tables import Database, JobRow, ReleaseRow
from tests.books import Books
from tests.simulation import processes
from tests.simulation.model import CHARGED, ENDED
from tests.simulation.world import EPSILON_STEP, POINTS
from tests.worker.test_jobs import World, model_folder
from worker.artifacts import ArtifactStore
from worker.settings import Settings

__all__ = ["model_folder"]  # a fixture

RANDOM_KILLS = 4
CLIENTS = 3
CLIENT_KILLS = 12
BUDGET = 2500  # steps: some are refused before the last kill

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.simulation.processes"])


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess]:
    started = _forks.Process(target=target, args=arguments, daemon=True)
    started.start()
    try:
        yield started
    finally:
        started.kill()
        started.join()


def kill_after(seconds: float, target: Callable[..., None], *arguments: Any) -> None:
    with process(target, *arguments) as started:
        started.join(seconds)
        started.kill()
        started.join()


# --------------------------------------------------------------------------------------------------
# The worker, killed at every step
# --------------------------------------------------------------------------------------------------


@dataclass
class Left:
    """What a killed worker left behind: the bytes it staged or put in place, and a state."""

    state: str
    batches: list[bytes]


def left_behind(world: World, job_id: str) -> Left:
    root = Path(world.settings.effective_artifacts_url)
    found = [*root.glob(f"staging/{job_id}-*"), *root.glob(f"releases/{job_id}.npz")]
    with world.database.read() as session:
        state = session.get_one(JobRow, job_id).state
    return Left(state, [path.read_bytes() for path in found])


def test_a_worker_killed_at_every_step(
    tmp_path: Path,
    database: Database,
    database_url: str,
    model_folder: Path,
) -> None:
    settings = Settings(
        home=tmp_path / "home",
        database_url=database_url,
        public_models=model_folder,
        lease_seconds=1.0,
        heartbeat_seconds=0.3,
        max_attempts=10,
    )
    kills = len(POINTS) + RANDOM_KILLS
    world = World(settings, database, releases=kills)
    job_ids = [world.job_id, *(world.order(f"k{n}") for n in range(1, kills))]
    draw = random.Random(1)  # noqa: S311 - an example, not a secret
    left: dict[str, Left] = {}
    for job_id, point in zip(job_ids, range(kills), strict=True):
        if point < len(POINTS):
            with process(processes.run_job_until, settings, job_id, point) as worker:
                worker.join(120)
                assert worker.exitcode == -signal.SIGKILL, POINTS[point]
        else:
            kill_after(draw.uniform(0.0, 0.6), processes.run_job_until, settings, job_id, None)
        left[job_id] = left_behind(world, job_id)
    by_point = [left[job_id].state for job_id in job_ids[: len(POINTS)]]
    assert by_point == ["reserved"] * 2 + ["started"] * 6 + ["released"]
    assert [len(left[job_id].batches) for job_id in job_ids[: len(POINTS)]] == [0] * 5 + [1] * 4

    with process(processes.recover, settings, 120.0) as recovery:
        recovery.join(150)
        assert recovery.exitcode == 0

    store = ArtifactStore(settings.effective_artifacts_url)
    with database.read() as session:
        ended = {job.id: job.state for job in session.scalars(sa.select(JobRow))}
        releases = session.scalars(sa.select(ReleaseRow)).all()
        check = ledger.verify(session, "ds_1")
        states = ledger.states(session, "ds_1")
    assert ended == dict.fromkeys(job_ids, "released")
    assert Counter(r.job_id for r in releases) == Counter(job_ids)
    assert check.ok, check
    for state, cost in zip(states, world.plan.costs, strict=True):
        assert state.crossed or state.epsilon_units == kills * cost.epsilon_units
    for release in releases:
        # Whatever the killed worker had drawn is what was released in the end.
        assert set(left[release.job_id].batches) <= {store.read(release.location)}


# --------------------------------------------------------------------------------------------------
# Clients on one hot dataset, killed at any moment
# --------------------------------------------------------------------------------------------------


def test_clients_killed_at_any_moment(tmp_path: Path, database: Database) -> None:
    url = database.url.render_as_string(hide_password=False)
    books = Books(database, now=processes.now())
    books.register().set_budget(str(Decimal(BUDGET * EPSILON_STEP) / EPSILON_UNITS))
    diaries = [tmp_path / f"client {client}" for client in range(CLIENTS)]
    draw = random.Random(2)  # noqa: S311 - an example, not a secret
    running: dict[int, BaseProcess] = {}
    killed = 0
    try:
        while killed < CLIENT_KILLS:
            for client in set(range(CLIENTS)) - set(running):
                running[client] = _forks.Process(
                    target=processes.ask_without_end,
                    args=(url, client, diaries[client], draw.randrange(2**32)),
                    daemon=True,
                )
                running[client].start()
            time.sleep(draw.uniform(0.05, 0.4))
            victim = running.pop(draw.randrange(CLIENTS))
            assert victim.is_alive(), "it asks without end"
            victim.kill()
            victim.join()
            assert victim.exitcode == -signal.SIGKILL
            killed += 1
            check_books(books, diaries)
    finally:
        for left in running.values():
            left.kill()
            left.join()
    check_books(books, diaries)

    # Another process of the same code, when all the leases are over.
    books.now = processes.now()
    for _ in range(20):
        books.wait(31)
        for job_id in books.sweep(resend=1):
            started = books.start(job_id)
            if started is not None:
                books.release(started)
    ended = check_books(books, diaries)
    assert set(ended.values()) <= ENDED
    assert {"released", "cancelled"} <= set(ended.values())


def check_books(books: Books, diaries: list[Path]) -> dict[str, str]:
    """Compares the books with what the clients wrote; by job, its state."""
    with books.database.read() as session:
        rows = session.execute(
            sa.select(JobRow.id, JobRow.idempotency_key, JobRow.state, ReleaseRow.id).outerjoin(
                ReleaseRow, ReleaseRow.job_id == JobRow.id
            )
        ).all()
        (basic,) = (s for s in ledger.states(session, books.dataset_id) if s.filter.order == "inf")
        check = ledger.verify(session, books.dataset_id)
    assert check.ok, check
    by_key = {key: job_id for job_id, key, _, _ in rows}
    assert len(by_key) == len(rows)
    asked: set[str] = set()
    # Read after the books, so that all that the books hold had been asked by then.
    for client, diary in enumerate(diaries):
        for number, words in processes.read_diary(diary).items():
            key = f"{client}-{number}"
            asked.add(key)
            told = {word for word in words if word.startswith("job_")}
            # Of what was told after the books were read, the books say nothing.
            assert key not in by_key or told <= {by_key[key]}, key
    assert set(by_key) <= asked
    charged = [
        int(Decimal(processes.charge_of(int(key.split("-")[1]))) * EPSILON_UNITS)
        for _, key, state, _ in rows
        if state in CHARGED
    ]
    assert basic.epsilon_units == sum(charged) <= basic.filter.cap_units
    assert all((release is not None) == (state == "released") for _, _, state, release in rows)
    return {job_id: state for job_id, _, state, _ in rows}
