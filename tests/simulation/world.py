"""One dataset, its clients, workers, broker and clock, driven one step at a time.

All that this simulation knows of the ledger's and the worker's calls stands here. What runs is the
product: the ledger on a real database, the sweeper, the artefact store on a real folder, the
custody of seeds, and the worker's own life from its start to its release. Only this is replaced:

* the clock, which is a number that the list moves;
* the private draw, which is some keyed noise, so that a thousand jobs take no time;
* the heartbeat's thread, whose beats are the list's to give;
* the broker, which is a list of job ids.

A worker runs in a thread of its own, but one thread runs at a time: it is let go and waited for,
from one of its numbered points (:data:`POINTS`) to the next. To kill it, the thread is unwound from
that point by an exception that no handler of the product catches. Inside a transaction's commit it
can be killed but not paused, as the database's locks would make the others wait.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NoReturn

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from accounting import ledger
from accounting.canonical import digest
from accounting.errors import (
    BudgetExhausted,
    Conflict,
    IdempotencyMismatch,
    LeaseLost,
    LedgerUnavailable,
    NotFound,
)
from accounting.filters import DELTA_UNITS, EPSILON_UNITS, INFINITE, Budget, Cost, FewLarge, charge
from accounting.mechanisms import ApproximateDP, Gaussian, Mechanism, mechanism_from_json
from accounting.tables import (
    Database,
    DatasetRow,
    JobRow,
    LeaseRow,
    OrganisationRow,
    ReleaseRow,
    SnapshotRow,
)
from api.sweeper import Sweeper
from models.noise import KeyedNoise
from tests.books import no_bound
from tests.simulation.model import ENDED, HELD, Cap, Costs, Job, Model, Sum
from worker import artifacts, custody, jobs
from worker.artifacts import ArtifactStore, Staged
from worker.custody import ensure_keys
from worker.settings import Settings

SECOND: Final = ledger.MICROSECONDS
EPOCH: Final = 1_800_000_000 * SECOND
LEASE_SECONDS: Final = 30.0
RESERVATION_SECONDS: Final = 600.0
RESEND_SECONDS: Final = 10.0
MOST_ATTEMPTS: Final = 3
WORKERS: Final = 3
SWEEPERS: Final = 2
# A budget of n times this many units of epsilon, and charges of 2^0 to 2^5 times it.
EPSILON_STEP: Final = 2**25
EXPONENTS: Final = range(6)
# Each basic charge has a delta of 2^key units, so that the sum alone names the jobs it holds.
MOST_KEYS: Final = 40
KINDS: Final = ("basic", "renyi", "both")

POINTS: Final = (
    "taken",  # the message is read, nothing was asked of the ledger
    "start not committed",
    "start committed",  # but the worker has not learnt it
    "reading",  # the private records
    "drawn",
    "staged",
    "in place",
    "end not committed",  # of the release, or of the failure
    "end committed",  # but the message is not acknowledged
)
_PAUSES: Final = frozenset({0, 3, 4, 5, 6})
TAKEN, READING, DRAWN, STAGED, IN_PLACE = 0, 3, 4, 5, 6

FATES: Final = (
    "",
    "reply lost",  # committed and sent on; the caller does not learn it
    "dies before commit",
    "dies after commit",  # nothing is sent either
    "database lost before commit",
    "database lost after commit",
)


class Violation(Exception):
    """The product did what it promises never to do."""


class Killed(BaseException):
    """The process ends here; nothing that would tidy up after it may run."""


# --------------------------------------------------------------------------------------------------
# The database, with commits that go wrong
# --------------------------------------------------------------------------------------------------


class SimulatedDatabase(Database):
    """The real database; around each commit of a writer it asks what is to go wrong there."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.before_commit: Callable[[], str] = lambda: ""
        self.after_commit: Callable[[str], None] = lambda _fate: None
        # A real worker's heartbeat writes from another thread.
        self._local = threading.local()
        dialect = self._writer.dialect
        self._real_commit = dialect.do_commit
        dialect.do_commit = self._commit  # type: ignore[assignment,method-assign]
        self._admin: psycopg.Connection[Any] | None = None
        if not self.is_sqlite:
            libpq = self.url.set(drivername="postgresql").render_as_string(hide_password=False)
            self._admin = psycopg.connect(libpq, autocommit=True)

    @contextmanager
    def write(self) -> Iterator[Session]:
        with super().write() as session:
            self._local.writing = True
            try:
                yield session
            except BaseException:
                self._local.writing = False
                raise

    def dispose(self) -> None:
        super().dispose()
        if self._admin is not None:
            self._admin.close()

    def _commit(self, connection: Any) -> None:
        if not getattr(self._local, "writing", False):
            self._real_commit(connection)
            return
        self._local.writing = False
        connection = connection.dbapi_connection  # without the pool's cover
        fate = self.before_commit()
        if fate == "database lost before commit":
            self._lose(connection)
        connection.commit()
        self.after_commit(fate)
        if fate == "database lost after commit":
            self._lose(connection)

    def _lose(self, connection: Any) -> NoReturn:
        """What a client sees whose server was restarted."""
        if self._admin is None:
            raise sqlite3.OperationalError("disk I/O error")
        pid = connection.info.backend_pid
        self._admin.execute("SELECT pg_terminate_backend(%s)", [pid])
        while True:  # until the server has seen the signal
            connection.execute("SELECT 1")


# --------------------------------------------------------------------------------------------------
# Workers
# --------------------------------------------------------------------------------------------------


class Worker(threading.Thread):
    """One process that took one message: the product's own attempt at a job, in small steps."""

    def __init__(self, world: World, job_id: str) -> None:
        super().__init__(daemon=True)
        self.job_id = job_id
        self.code = world.code
        self.at = TAKEN
        self._over = threading.Event()
        self.status: int | None = None
        self.error: BaseException | None = None
        self.heartbeat: SimulatedHeartbeat | None = None
        self.fate = ""
        self.write_fails: int | None = None
        self.draw_raises = False
        self._world = world
        self._kill_at: int | None = None
        self._runs_on = False
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)

    def is_over(self) -> bool:
        return self._over.is_set()

    def step(self) -> None:
        """On to the next point where it can be paused, or to its end."""
        self._let_go(runs_on=False)

    def finish(self) -> None:
        self._let_go(runs_on=True)

    def kill(self, at: int) -> None:
        """It runs on to this point, if it gets there, and dies; or at once, if it is past it."""
        self._kill_at = at
        self._let_go(runs_on=True)

    def reach(self, point: int) -> None:
        """Called in the worker's thread, wherever it gets to one of :data:`POINTS`."""
        self.at = point
        if self._dies():
            raise Killed
        if point in _PAUSES and not self._runs_on:
            self._stopped.release()
            self._go.acquire()
            if self._dies():
                raise Killed

    def run(self) -> None:
        self._go.acquire()
        try:
            if self._dies():
                raise Killed
            self.status = jobs._attempt(self._world.settings, self._world.database, self.job_id)
        except Killed:
            self._world.tally[f"killed: {POINTS[self.at]}"] += 1
        except (Conflict, NotFound, LedgerUnavailable) as error:
            # What the process's main turns into an exit status.
            self.error = error
            self.status = jobs.TRY_AGAIN
        except BaseException as error:  # noqa: BLE001 - told to the thread that waits
            self.error = error
            self._world.complain(f"the worker ended with {error!r}")
        finally:
            self._over.set()
            self._stopped.release()

    def _dies(self) -> bool:
        return self._kill_at is not None and self.at >= self._kill_at

    def _let_go(self, *, runs_on: bool) -> None:
        if self.is_over():
            return
        self._runs_on = runs_on
        if self.ident is None:
            self.start()
        self._go.release()
        if not self._stopped.acquire(timeout=120):
            raise RuntimeError(f"the worker hangs after {POINTS[self.at]!r}")
        if self.is_over():
            self.join()


def _me() -> Worker | None:
    thread = threading.current_thread()
    return thread if isinstance(thread, Worker) else None


def _this_worker() -> Worker:
    worker = _me()
    if worker is None:
        raise AssertionError("called outside of a worker")
    return worker


class SimulatedHeartbeat(jobs._Heartbeat):
    """The real heartbeat without its thread: :meth:`beat` is one turn of its loop."""

    def __enter__(self) -> SimulatedHeartbeat:
        _this_worker().heartbeat = self
        return self

    def __exit__(self, *_: object) -> None:
        _this_worker().heartbeat = None

    def beat(self) -> None:
        self._stop = _OneTurn()
        self._run()


class _OneTurn(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self._turns = 0

    def wait(self, _timeout: float | None = None) -> bool:
        self._turns += 1
        return self._turns > 1


class SteppedStore(ArtifactStore):
    """The real store; a worker can be stopped after each of its two steps."""

    def stage(self, job_id: str, attempt: int, data: bytes) -> Staged:
        staged = super().stage(job_id, attempt, data)
        _this_worker().reach(STAGED)
        return staged

    def publish(self, staged: Staged, sha256: str) -> str:
        location = super().publish(staged, sha256)
        _this_worker().reach(IN_PLACE)
        return location


# --------------------------------------------------------------------------------------------------
# The world
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """What a client asks for, and what it costs by the client's own arithmetic."""

    mechanism: Mechanism | None
    charged: tuple[Cost, ...]
    costs: Costs
    parent: int | None
    body: str


@dataclass
class Installation:
    """A database and a folder, which many lists use one after the other."""

    settings: Settings
    database: SimulatedDatabase
    worlds: int = 0

    def world(self, budget: int, approval_above: int | None) -> World:
        """A fresh dataset; both numbers are steps of epsilon."""
        self.worlds += 1
        return World(self, f"{self.worlds}", budget, approval_above)


@dataclass
class World:
    """Everything that one list of operations acts on."""

    installation: Installation
    name: str
    budget: int
    approval_above: int | None
    now: int = EPOCH
    latest: int = EPOCH
    code: str = "code 1"
    broker_up: bool = True
    queue: list[str] = field(default_factory=list)
    workers: dict[int, Worker] = field(default_factory=dict)
    answers: dict[int, str] = field(default_factory=dict)
    seen: dict[int, bytes] = field(default_factory=dict)
    draws: dict[tuple[int, str], bytes] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    tally: Counter[str] = field(default_factory=Counter)
    _fate: str = ""
    _unchecked: bool = True
    _pending: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = self.installation.settings
        self.database = self.installation.database
        self.database.before_commit = self._before_commit
        self.database.after_commit = self._after_commit
        self.store = ArtifactStore(self.settings.effective_artifacts_url)
        self.dataset_id = f"ds_{self.name}"
        self.snapshot_id = f"snap_{self.name}"
        self._register()
        self.model = Model(
            tuple(
                Cap(f.cap_units, f.delta_units if f.order == "inf" else None) for f in self.filters
            ),
            None if self.approval_above is None else self.approval_above * EPSILON_STEP,
        )
        self.sweepers = [
            Sweeper(
                self.database,
                self._send,
                sweep_seconds=2,
                resend_seconds=RESEND_SECONDS,
                clock=lambda: self.now,
            )
            for _ in range(SWEEPERS)
        ]

    def _register(self) -> None:
        with self.database.write() as session:
            # An earlier list's sweeper is no part of this one.
            session.execute(sa.delete(LeaseRow))
            if session.get(OrganisationRow, "org_1") is None:
                session.add(OrganisationRow(id="org_1", name="one", created_at=self.now))
                session.flush()
            session.add(
                DatasetRow(
                    id=self.dataset_id,
                    organisation_id="org_1",
                    name=self.dataset_id,
                    facts={"public_size": 5000},
                    created_at=self.now,
                )
            )
            session.flush()
            session.add(
                SnapshotRow(
                    id=self.snapshot_id,
                    dataset_id=self.dataset_id,
                    created_at=self.now,
                    location="snapshots/1",
                    hmac="ab" * 32,
                    sealed_key=b"sealed",
                    records=5000,
                )
            )
            session.flush()
            self.filters = ledger.set_budget(
                session,
                dataset_id=self.dataset_id,
                budget=Budget(
                    _nats(self.budget),
                    Decimal("1e-5"),
                    FewLarge(8),
                    approval_above=None
                    if self.approval_above is None
                    else _nats(self.approval_above),
                ),
                now=self.now,
            )

    # Clients -----------------------------------------------------------------------------------

    def offer(self, key: int, kind: str, exponent: int) -> Offer:
        """A charge of 2^exponent steps: ``basic`` counts in the basic filter alone, ``renyi`` in
        the others alone, and ``both`` in all."""
        epsilon, delta = EPSILON_STEP << exponent, 1 << key
        body = f"{kind} {exponent}"
        if kind == "basic":
            # The decimals as written are the charge; delta crosses the finite orders.
            made: Mechanism = ApproximateDP(
                Decimal(epsilon) / EPSILON_UNITS, Decimal(delta) / DELTA_UNITS
            )
            charged = charge(made, self.filters, epsilon_bound=no_bound)
            costs: Costs = tuple(
                (epsilon, delta) if f.order == "inf" else None for f in self.filters
            )
            return Offer(made, charged, costs, None, body)
        # So little is lost that any power of two is an honest upper bound of its cost.
        made = Gaussian(1000.0)
        costs = tuple(
            (None if kind == "renyi" else (epsilon, delta))
            if f.order == "inf"
            else (1 << (f.cap_units.bit_length() - 6 + exponent), 0)
            for f in self.filters
        )
        charged = tuple(Cost(INFINITE, INFINITE) if cost is None else Cost(*cost) for cost in costs)
        return Offer(made, charged, costs, None, body)

    def submit(self, key: int, kind: str, exponent: int, fate: str) -> None:
        """Asks for a job, as the endpoint does: a look, the transaction, and then the message."""
        self._ask(key, self.offer(key, kind, exponent), fate)

    def process(self, key: int, parent: int, fate: str) -> None:
        """Asks for post-processing of another key's release, which costs nothing."""
        self._ask(key, Offer(None, (), (), parent, f"process {parent}"), fate)

    def _ask(self, key: int, offer: Offer, fate: str) -> None:
        above = None if offer.parent is None else self.model.jobs.get(offer.parent)
        expected = self.model.reserve(key, offer.body, offer.costs, offer.parent)
        try:
            with self.database.read() as session:
                found = self._existing(session, key, offer.body)
            if found is not None:
                got, job_id, sent = "existing", found.id, False
            else:
                with self._write(fate) as session:
                    made = ledger.reserve(
                        session,
                        dataset_id=self.dataset_id,
                        organisation_id="org_1",
                        idempotency_key=f"key-{key}",
                        body_hash=digest(offer.body),
                        kind="denoise",
                        spec={"kind": "denoise"},
                        mechanism=offer.mechanism,
                        post_processing={"public_model": "glyphs-28"},
                        certificate_epsilon={"lower": 0.9, "upper": 1.0, "delta": 1e-5},
                        costs=offer.charged,
                        snapshot_id=None if offer.mechanism is None else self.snapshot_id,
                        progress_total=10,
                        max_attempts=1 + key % MOST_ATTEMPTS,
                        ttl_seconds=RESERVATION_SECONDS,
                        now=self.now,
                        # An entry of nobody stands for a parent that was never granted.
                        parent_entry_id=None
                        if offer.parent is None
                        else self._entry_of(session, above),
                    )
                    got, job_id = "created" if made.created else "existing", made.job_id
                    sent = made.created and made.state == "reserved"
                    if expected == got == "created":
                        job = Job(
                            key=key,
                            job_id=made.job_id,
                            body=offer.body,
                            costs=offer.costs,
                            max_attempts=1 + key % MOST_ATTEMPTS,
                            expires_at=self.now + round(RESERVATION_SECONDS * SECOND),
                            state="awaiting_approval"
                            if self.model.awaits_approval(offer.costs)
                            else "reserved",
                        )
                        self._pending.append(lambda: self.model.add(job))
        except (Killed, LedgerUnavailable) as error:
            self._must_be_due_to(fate, error)
            return
        except IdempotencyMismatch:
            got, job_id, sent = "mismatch", "", False
        except BudgetExhausted:
            got, job_id, sent = "exhausted", "", False
            self.tally["refused"] += 1
        except Conflict as error:
            got, job_id, sent = error.code, "", False
        if got != expected:
            raise Violation(f"key {key} for {offer.body!r} was {got}, and had to be {expected}")
        if sent:
            self._send(job_id)
        if job_id and fate != "reply lost" and self.answers.setdefault(key, job_id) != job_id:
            raise Violation(f"key {key} answers another job than before")

    def _existing(self, session: Session, key: int, body: str) -> JobRow | None:
        return ledger.existing_job(
            session,
            organisation_id="org_1",
            dataset_id=self.dataset_id,
            idempotency_key=f"key-{key}",
            body_hash=digest(body),
        )

    def _entry_of(self, session: Session, job: Job | None) -> str:
        return "ent_none" if job is None else session.get_one(JobRow, job.job_id).entry_id

    def cancel(self, key: int, fate: str) -> None:
        job = self.model.jobs.get(key)
        if job is None:
            return
        try:
            with self._write(fate) as session:
                ledger.cancel(session, job_id=job.job_id, now=self.now)
        except (Killed, LedgerUnavailable) as error:
            self._must_be_due_to(fate, error)
        except Conflict as error:
            if error.code != "not_cancellable":
                raise

    def approve(self, key: int, fate: str) -> None:
        self._decide(key, fate, approved=True)

    def deny(self, key: int, fate: str) -> None:
        self._decide(key, fate, approved=False)

    def _decide(self, key: int, fate: str, *, approved: bool) -> None:
        job = self.model.jobs.get(key)
        if job is None:
            return
        expires_at = self.now + round(RESERVATION_SECONDS * SECOND)
        sent: tuple[str, ...] = ()
        # A denial may be late; an approval would give a reservation back its time.
        in_time = not approved or self.now < job.expires_at
        expected = job.state == "awaiting_approval" and in_time
        try:
            with self._write(fate) as session:
                if approved:
                    sent = ledger.approve(
                        session,
                        job_id=job.job_id,
                        ttl_seconds=RESERVATION_SECONDS,
                        now=self.now,
                    )
                    self._pending.append(lambda: self.model.approve(job, expires_at))
                else:
                    ledger.deny(session, job_id=job.job_id, now=self.now)
                    self._pending.append(lambda: self.model.end(job, "denied"))
        except (Killed, LedgerUnavailable) as error:
            self._must_be_due_to(fate, error)
            return
        except Conflict as error:
            if expected or error.code != "not_awaiting_approval":
                raise
            return
        if not expected:
            raise Violation(f"the owner decided on key {key}, which was {job.state}")
        for job_id in sent:
            self._send(job_id)

    def download(self, key: int) -> None:
        """Fetches what anyone may have, and compares it with what was fetched before."""
        job = self.model.jobs.get(key)
        if job is not None:
            with self.database.read() as session:
                self._fetch(session, job)

    def _fetch(self, session: Session, job: Job) -> None:
        location = session.scalar(
            sa.select(ReleaseRow.location)
            .join(JobRow, JobRow.id == ReleaseRow.job_id)
            .where(JobRow.id == job.job_id, JobRow.state == "released")
        )
        if location is None:
            return
        content = self.store.read(location)
        if self.seen.setdefault(job.key, content) != content:
            raise Violation(f"the artefact of key {job.key} changed after it was seen")
        if self.draws.get((job.key, job.code or "")) != content:
            raise Violation(f"what was released for key {job.key} is not what was drawn for it")

    # The broker --------------------------------------------------------------------------------

    def _send(self, job_id: str) -> bool:
        if self.broker_up and self.model.by_id(job_id) is not None:
            self.queue.append(job_id)
        return self.broker_up

    def deliver_again(self, key: int) -> None:
        job = self.model.jobs.get(key)
        if job is not None:
            self.queue.append(job.job_id)

    def lose_message(self, place: int) -> None:
        if self.queue:
            self.queue.pop(place % len(self.queue))

    # Workers -----------------------------------------------------------------------------------

    def worker(self, number: int, *, takes: bool) -> Worker | None:
        """The worker under this number if it is at work; an idle one may take a message."""
        worker = self.workers.get(number)
        if worker is None or worker.is_over():
            if not takes or not self.queue:
                return None
            worker = self.workers[number] = Worker(self, self.queue.pop(0))
        return worker

    def beat(self, number: int, fate: str) -> None:
        worker = self.worker(number, takes=False)
        if worker is None or worker.heartbeat is None:
            return

        def leave(_status: int) -> NoReturn:
            raise Killed

        self._fate = fate
        try:
            with pytest.MonkeyPatch.context() as patched:
                # A heartbeat that finds its lease gone ends the process.
                patched.setattr(os, "_exit", leave)
                worker.heartbeat.beat()
        except Killed:
            worker.kill(worker.at)
        finally:
            self._fate = ""

    def draw(self, started: ledger.Started, seed: bytes) -> bytes:
        """Stands for the private draw: what it answers depends on the seed and on the code."""
        worker = _this_worker()
        worker.reach(READING)
        job = self._job_of(started.job_id)
        with self.database.read() as session:
            state = session.get_one(JobRow, job.job_id).state
        if state not in {"started", "released", "failed_charged"}:
            self.complain(f"private records were read while the job was {state}")
        if worker.draw_raises or started.mechanism is None:
            raise ValueError("a value of record 7")
        mechanism_from_json(started.mechanism)
        drawn = KeyedNoise(seed).normals("simulated", 0, (8,)).tobytes() + worker.code.encode()
        if self.draws.setdefault((job.key, worker.code), drawn) != drawn:
            self.complain(f"a retry of key {job.key} drew something else")
        worker.reach(DRAWN)
        return drawn

    def write_file(self, real: Callable[[Path, bytes], bool], path: Path, data: bytes) -> bool:
        worker = _me()
        if worker is not None and worker.write_fails is not None:
            worker.write_fails -= 1
            if worker.write_fails < 0:
                worker.write_fails = None
                self.tally["disk full"] += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, data)

    # The sweeper and the clock -----------------------------------------------------------------

    def sweep(self, number: int, fate: str) -> None:
        self._fate = fate
        try:
            self.sweepers[number].sweep()
        except (Killed, LedgerUnavailable) as error:
            self._must_be_due_to(fate, error)
        finally:
            self._fate = ""

    def expire(self, fate: str) -> None:
        try:
            with self._write(fate) as session:
                ledger.expire(session, self.now)
        except (Killed, LedgerUnavailable) as error:
            self._must_be_due_to(fate, error)

    def jump(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)
        self.latest = max(self.latest, self.now)

    # Commits -----------------------------------------------------------------------------------

    @contextmanager
    def _write(self, fate: str) -> Iterator[Session]:
        self._fate = fate
        self._unchecked = True
        try:
            with self.database.write() as session:
                yield session
        finally:
            self._fate = ""

    def _before_commit(self) -> str:
        worker = _me()
        if worker is None:
            fate = self._fate
            if fate == "dies before commit":
                self._pending.clear()
                self.tally[f"caller: {fate}"] += 1
                raise Killed
        else:
            fate, worker.fate = worker.fate, ""
            try:
                worker.reach(1 if worker.at < 2 else 7)
            except Killed:
                self._pending.clear()
                raise
        if fate == "database lost before commit":
            self._pending.clear()
        if fate:
            self.tally[f"{'caller' if worker is None else 'worker'}: {fate}"] += 1
        return fate

    def _after_commit(self, fate: str) -> None:
        for effect in self._pending:
            effect()
        self._pending.clear()
        worker = _me()
        if worker is not None:
            worker.reach(2 if worker.at == 1 else 8)
        elif fate == "dies after commit":
            raise Killed

    def _must_be_due_to(self, fate: str, error: BaseException) -> None:
        due = "dies" if isinstance(error, Killed) else "database lost"
        if not fate.startswith(due):
            raise Violation(f"{error!r} without a reason")

    # What the product calls, watched -----------------------------------------------------------

    def watched_start(self, real: Callable[..., Any], session: Session, **how: Any) -> Any:
        job, worker = self._job_of(how["job_id"]), _this_worker()
        expected = self.model.start(job, worker.code, how["now"])
        started = real(session, **how)
        self.tally[f"start: {expected}"] += 1
        begins = expected in {"started", "attempt"}
        if (started is not None) != begins:
            self.complain(f"a start of key {job.key} had to be {expected}")
        elif started is not None:
            lease_until = how["now"] + round(how["lease_seconds"] * SECOND)
            self._pending.append(
                lambda: self.model.begin(
                    job, token=started.lease_token, code=worker.code, lease_until=lease_until
                )
            )
        elif expected != "nothing":
            self._pending.append(lambda: self.model.end(job, expected))
        return started

    def watched_attempt(self, real: Callable[..., Any], session: Session, **how: Any) -> Any:
        """A heartbeat, a release or a failure: each is for the holder of the lease alone."""
        job = self._job_of(how["job_id"])
        expected = self.model.holds_lease(job, how["lease_token"])
        refused = False
        try:
            answer = real(session, **how)
        except LeaseLost:
            refused = True
            self.tally["lease lost"] += 1
            raise
        finally:
            if expected and refused:
                self.complain(f"key {job.key} was taken from the holder of its lease")
            if not expected and not refused:
                self.complain(f"an attempt at key {job.key} went on without its lease")

        def happens() -> None:
            if "progress_done" in how:
                job.lease_until = how["now"] + round(how["lease_seconds"] * SECOND)
            elif "certificate" in how:
                self.model.end(job, "released")
                job.release = (answer, how["sha256"])
            else:
                self.model.end(job, "failed_charged")

        self._pending.append(happens)
        return answer

    def watched_cancel(self, real: Callable[..., Any], session: Session, **how: Any) -> None:
        job = self._job_of(how["job_id"])
        try:
            real(session, **how)
        except Conflict:
            if job.state in HELD:
                self.complain(f"the reservation of key {job.key} could not be cancelled")
            raise
        if job.state not in HELD:
            self.complain(f"key {job.key} was cancelled while it was {job.state}")
        self._pending.append(lambda: self.model.end(job, "cancelled"))

    def watched_sweep(self, real: Callable[..., Any], session: Session, **how: Any) -> Any:
        ended = self.model.overdue(how["now"], reservations_only=False)
        answer = real(session, **how)
        for job_id in answer:
            job = self.model.by_id(job_id)
            if job is not None and (job.key in ended or job.state not in {"reserved", "started"}):
                self.complain(f"the sweeper sent key {job.key}, which has ended")
        self._pending.append(lambda: self._end(ended))
        return answer

    def watched_expire(self, real: Callable[..., Any], session: Session, now: int) -> Any:
        ended = self.model.overdue(now, reservations_only=True)
        answer = real(session, now)
        self._pending.append(lambda: self._end(ended))
        return answer

    def _end(self, ended: dict[int, str]) -> None:
        for key, state in ended.items():
            self._unchecked = True
            self.model.end(self.model.jobs[key], state)

    def _job_of(self, job_id: str) -> Job:
        self._unchecked = True
        job = self.model.by_id(job_id)
        if job is None:
            raise AssertionError("a job of another list")
        return job

    def complain(self, problem: str) -> None:
        """For what is found where an exception would be taken for the job's own."""
        self.problems.append(problem)

    # What must hold ----------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold after every operation.

        Raises:
            Violation: it does not.
        """
        if self.problems:
            raise Violation("; ".join(self.problems))
        if not self._unchecked:
            return  # nobody asked the ledger to change anything since
        self._unchecked = False
        with self.database.read() as session:
            rows = session.execute(
                sa.select(
                    JobRow.id,
                    JobRow.idempotency_key,
                    JobRow.state,
                    JobRow.attempts,
                    ReleaseRow.id.label("release_id"),
                    ReleaseRow.sha256,
                )
                .outerjoin(ReleaseRow, ReleaseRow.job_id == JobRow.id)
                .where(JobRow.dataset_id == self.dataset_id)
            ).all()
            states = ledger.states(session, self.dataset_id)
        told = {
            (
                job.job_id,
                f"key-{job.key}",
                job.state,
                job.attempts,
                *(job.release or (None, None)),
            )
            for job in self.model.jobs.values()
        }
        found = {tuple(row) for row in rows}
        if found != told or len(rows) != len(told):
            raise Violation(f"the jobs are {sorted(found - told)}, and had to be {told - found}")
        sums = tuple(Sum(s.epsilon_units, s.delta_units, s.crossed) for s in states)
        if sums != self.model.charged():
            raise Violation(f"the filters hold {sums}, and had to hold {self.model.charged()}")
        if not self.model.holds(sums):
            raise Violation(f"every filter is beyond its cap: {sums}")
        if not self.model.holds(self.model.started()):
            raise Violation("what started is beyond every cap")
        for held, shown in zip(sums, self.model.released(), strict=True):
            if shown.epsilon > held.epsilon or shown.delta > held.delta:
                raise Violation("more is released than is charged")

    def drain(self) -> None:
        """Sweeper and workers without faults until nothing is left; then the check of the whole.

        Workers that the list left standing come back at the very end, after others took their jobs.

        Raises:
            Violation: a job is in limbo, or something else does not hold.
        """
        self.broker_up = True
        left = [worker for worker in self.workers.values() if not worker.is_over()]
        for worker in left:
            worker.fate, worker.write_fails, worker.draw_raises = "", None, False
        # First as the sweeper's own rounds come; a clock that jumped back is waited for after that.
        waits = [RESEND_SECONDS + 1] * 2 + [LEASE_SECONDS + 1] * 2
        self._rounds(waits)
        self.now = self.latest
        self._rounds([RESERVATION_SECONDS + 1] * (2 * MOST_ATTEMPTS + 4))
        self._unchecked = True
        self.check()
        waiting = [job.key for job in self.model.jobs.values() if job.state not in ENDED]
        if waiting:
            raise Violation(f"keys {waiting} are in limbo")
        for worker in left:
            worker.finish()
        self._unchecked = True
        self.check()
        with self.database.read() as session:
            for key, job in self.model.jobs.items():
                self._fetch(session, job)
                if (job.release is not None) != (key in self.seen):
                    raise Violation(f"key {key} is {job.state}, and its artefact cannot be had")
                again = self._existing(session, key, job.body)
                if again is None or again.id != job.job_id:
                    raise Violation(f"key {key} answers another job than it made")
                self.tally[f"ended: {job.state}"] += 1
            verification = ledger.verify(session, self.dataset_id)
        if not verification.ok:
            raise Violation(f"the chain does not verify: {verification.problem}")

    def _rounds(self, waits: list[float]) -> None:
        for seconds in waits:
            if all(job.state in ENDED for job in self.model.jobs.values()):
                break
            self.jump(seconds)
            self.sweep(0, "")
            while self.queue:
                worker = Worker(self, self.queue.pop(0))
                worker.finish()
            self.check()

    def close(self) -> None:
        """Ends the threads of workers that stand somewhere."""
        for worker in self.workers.values():
            worker.kill(TAKEN)


def _nats(steps: int) -> Decimal:
    return Decimal(steps * EPSILON_STEP) / EPSILON_UNITS


# --------------------------------------------------------------------------------------------------
# Putting the pieces in their places
# --------------------------------------------------------------------------------------------------


@contextmanager
def installation(url: str, home: Path) -> Iterator[Installation]:
    """A database with its folder, and the product's modules as a simulation needs them."""
    settings = Settings(home=home, database_url=url, lease_seconds=LEASE_SECONDS)
    ensure_keys(settings)
    database = SimulatedDatabase(url)
    made = Installation(settings, database)
    try:
        yield made
    finally:
        database.dispose()


@contextmanager
def watched(world: World) -> Iterator[World]:
    """The world, with the product's calls led through it while the block lasts."""
    write_once = custody.write_once
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jobs, "_now", lambda: world.now)
        patched.setattr(
            jobs,
            "_draw",
            lambda _settings, _database, _sealer, started, seed, *_: world.draw(started, seed),
        )
        patched.setattr(jobs, "_Heartbeat", SimulatedHeartbeat)
        patched.setattr(jobs, "ArtifactStore", SteppedStore)
        patched.setattr(jobs, "code_digest", lambda: _this_worker().code)
        patched.setattr(jobs, "version", _version)
        patched.setattr(
            artifacts, "write_once", lambda path, data: world.write_file(write_once, path, data)
        )
        watches: dict[str, Callable[..., Any]] = {
            "start": world.watched_start,
            "heartbeat": world.watched_attempt,
            "release": world.watched_attempt,
            "fail": world.watched_attempt,
            "cancel": world.watched_cancel,
            "sweep": world.watched_sweep,
            "expire": world.watched_expire,
        }
        for name, watch in watches.items():
            patched.setattr(ledger, name, _through(watch, getattr(ledger, name)))
        try:
            yield world
        finally:
            world.close()


def _through(watch: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **named: watch(real, *given, **named)


# Reading the libraries' metadata would be most of what an attempt costs here.
_version = cache(metadata.version)
