"""How fast the ledger is on PostgreSQL: the part *rates* of :mod:`bench.ledger`.

Beside it, in one run: *bare* is the least that any such ledger does, in hand-written SQL: lock a
row, update it, insert one row, commit. *The same rows* is the ledger's own SQL with ready-made
values: lock, update, the rows of entry, charges, job and chain; no rule, no hash, no SQLAlchemy.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import multiprocessing
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import psycopg
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from accounting import chain, ledger
from accounting.canonical import canonical_json
from accounting.filters import INFINITE, Budget, Cost, ManySmall, charge
from accounting.mechanisms import (
    NEIGHBORING_RELATION,
    ApproximateDP,
    mechanism_digest,
    mechanism_to_json,
)
from accounting.tables import (
    Database,
    DatasetRow,
    OrganisationRow,
    OrganisationTotalsRow,
    SnapshotRow,
)
from bench.page import figure, machine, quantile, table, target_row
from tests.services import postgres

PROCESSES: Final = 16
ENTRIES: Final = 1_000_000
VERIFIED: Final = 100_000
SECONDS: Final = 5.0
ROUNDS: Final = 3
_NOW: Final = 1_800_000_000 * ledger.MICROSECONDS
_ORGANISATION: Final = "org_bench"
# What a batch of 500 digits is charged for, in size: a reservation stores and hashes it.
_SPEC: Final = {"kind": "denoise", "outputs": {str(d): 50 for d in range(10)}, "preset": "auto"}
_TINY: Final = ApproximateDP(Decimal("1e-9"), Decimal("1e-18"))
_BUDGET: Final = Budget(Decimal(1000), Decimal("0.1"), ManySmall())


def _plain(url: str) -> str:
    """The URL as psycopg takes it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


# --------------------------------------------------------------------------------------------------
# Books
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Books:
    """A dataset that is ready for reservations, and what each of them costs."""

    url: str
    dataset_id: str
    costs: tuple[Cost, ...]


def _no_bound(*_: object) -> Any:
    raise AssertionError("an approximate_dp charge is as written")


def make_books(database: Database, number: int) -> Books:
    dataset_id = f"ds_{number}"
    with database.write() as session:
        if session.get(OrganisationRow, _ORGANISATION) is None:
            session.add(OrganisationRow(id=_ORGANISATION, name="bench", created_at=_NOW))
            session.flush()
        session.add(
            DatasetRow(
                id=dataset_id,
                organisation_id=_ORGANISATION,
                name=dataset_id,
                facts={"public_size": 5000},
                created_at=_NOW,
            )
        )
        session.flush()
        session.add(
            SnapshotRow(
                id=f"snap_{number}",
                dataset_id=dataset_id,
                created_at=_NOW,
                location="nowhere",
                hmac="ab" * 32,
                sealed_key=b"sealed",
                records=5000,
            )
        )
        filters = ledger.set_budget(session, dataset_id=dataset_id, budget=_BUDGET, now=_NOW)
    costs = charge(_TINY, filters, epsilon_bound=_no_bound)
    return Books(database.url.render_as_string(hide_password=False), dataset_id, costs)


def reserve(database: Database, books: Books) -> None:
    with database.write() as session:
        ledger.reserve(
            session,
            dataset_id=books.dataset_id,
            organisation_id=_ORGANISATION,
            idempotency_key=secrets.token_hex(8),
            body_hash="b" * 64,
            kind="denoise",
            spec=_SPEC,
            mechanism=_TINY,
            post_processing={"kind": "handoff"},
            certificate_epsilon={"lower": 0.9, "upper": 1.0, "delta": 1e-5},
            costs=books.costs,
            snapshot_id=books.dataset_id.replace("ds_", "snap_"),
            progress_total=500,
            max_attempts=3,
            ttl_seconds=3600,
            now=_NOW,
        )


def fill(database: Database, books: Books, entries: int) -> None:
    """Adds reserved entries in bulk, as :func:`accounting.ledger.reserve` would one by one."""
    with database.read() as session:
        row = session.get_one(DatasetRow, books.dataset_id)
        sequence, head, totals = row.chain_sequence, row.chain_hash, row.totals
    mechanism, hashed = mechanism_to_json(_TINY), mechanism_digest(_TINY)
    mechanism_text = json.dumps(mechanism)
    costs = [[c.epsilon_units, c.delta_units] for c in books.costs]
    snapshot = books.dataset_id.replace("ds_", "snap_")
    copies = {
        "chain": "dataset_id, sequence, previous_hash, hash, body",
        "entries": "id, books_id, dataset_id, organisation_id, sequence, kind, state, mechanism, "
        "mechanism_digest, created_at, updated_at",
        "charges": "entry_id, position, epsilon_units, delta_units",
        "jobs": "id, dataset_id, organisation_id, entry_id, snapshot_id, idempotency_key, "
        "body_hash, kind, spec, mechanism, post_processing, state, created_at, updated_at, "
        "attempts, max_attempts, progress_done, progress_total, expires_at",
    }
    common = (books.dataset_id, _ORGANISATION)
    with psycopg.connect(_plain(books.url)) as connection, connection.cursor() as cursor:
        for first in range(0, entries, 20_000):
            rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in copies}
            for _ in range(min(20_000, entries - first)):
                sequence += 1
                entry, job = (
                    f"ent_{books.dataset_id}_{sequence}",
                    f"job_{books.dataset_id}_{sequence}",
                )
                body = canonical_json(
                    {
                        "version": 1,
                        "dataset": books.dataset_id,
                        "sequence": sequence,
                        "previous": head,
                        "kind": "reserved",
                        "entry": entry,
                        "state": "reserved",
                        "at": _NOW,
                        "data": {
                            "dataset": books.dataset_id,
                            "jobs": [job],
                            "organisation": _ORGANISATION,
                            "entry_kind": "denoise",
                            "parent": None,
                            "body_hash": "b" * 64,
                            "neighboring_relation": NEIGHBORING_RELATION,
                            "mechanism": mechanism,
                            "mechanism_digest": hashed,
                            "costs": costs,
                        },
                    }
                )
                previous, head = head, hashlib.sha256(body).hexdigest()
                rows["chain"].append((books.dataset_id, sequence, previous, head, body.decode()))
                rows["entries"].append(
                    (entry, books.dataset_id, *common, sequence, "denoise", "reserved",
                     mechanism_text, hashed, _NOW, _NOW)
                )  # fmt: skip
                rows["charges"] += [(entry, i, *cost) for i, cost in enumerate(costs)]
                rows["jobs"].append(
                    (job, *common, entry, snapshot, entry, "b" * 64, "denoise", "{}",
                     mechanism_text, "{}", "reserved", _NOW, _NOW, 0, 3, 0, 500, 2 * _NOW)
                )  # fmt: skip
            for name, columns in copies.items():
                with cursor.copy(f"COPY {name} ({columns}) FROM STDIN") as copy:
                    for each in rows[name]:
                        copy.write_row(each)
        connection.commit()
        cursor.execute("ANALYZE")
        connection.commit()
    sums = [
        [epsilon + entries * c.epsilon_units, delta + entries * c.delta_units, infinite]
        if INFINITE not in (c.epsilon_units, c.delta_units)
        else [epsilon, delta, infinite + entries]
        for (epsilon, delta, infinite), c in zip(totals, books.costs, strict=True)
    ]
    with database.write() as session:
        row = session.get_one(DatasetRow, books.dataset_id)
        row.chain_sequence, row.chain_hash, row.totals = sequence, head, sums
        session.add(
            OrganisationTotalsRow(
                dataset_id=books.dataset_id, organisation_id=_ORGANISATION, totals=sums
            )
        )


# --------------------------------------------------------------------------------------------------
# Rates of many processes
# --------------------------------------------------------------------------------------------------


def _reserving(books: Sequence[Books], barrier: Barrier, seconds: float, place: int) -> int:
    database = Database(books[0].url)
    for each in books[place % len(books) :][:1]:
        reserve(database, each)  # connects, and compiles the statements
    barrier.wait()
    end, done = time.monotonic() + seconds, 0
    for turn in itertools.count(place):
        if time.monotonic() > end:
            break
        reserve(database, books[turn % len(books)])
        done += 1
    database.dispose()
    return done


def _bare(books: Sequence[Books], barrier: Barrier, seconds: float, place: int) -> int:
    payload = json.dumps({"spec": _SPEC, "mechanism": mechanism_to_json(_TINY)})
    with psycopg.connect(_plain(books[0].url)) as connection:
        barrier.wait()
        end, done = time.monotonic() + seconds, 0
        for turn in itertools.count(place):
            if time.monotonic() > end:
                break
            row = (turn % len(books),)
            with connection.transaction():
                connection.execute("SELECT spent FROM bare WHERE id = %s FOR UPDATE", row)
                connection.execute("UPDATE bare SET spent = spent + 1 WHERE id = %s", row)
                connection.execute(
                    "INSERT INTO bare_rows (id, bare_id, body) VALUES (%s, %s, %s)",
                    (secrets.token_hex(16), *row, payload),
                )
            done += 1
    return done


def _captured(books: Books) -> tuple[str, str, dict[str, Any]]:
    """(the SQL that locks, the SQL that writes, its parameters) of one real reservation."""
    seen: list[tuple[str, Any]] = []

    def keep(_c: Any, _k: Any, statement: str, parameters: Any, *_: Any) -> None:
        seen.append((statement, parameters))

    database = Database(books.url)
    sa.event.listen(sa.Engine, "before_cursor_execute", keep)
    try:
        reserve(database, books)
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", keep)
        database.dispose()
    lock = next(statement for statement, _ in seen if "FOR UPDATE" in statement)
    write, parameters = next((s, p) for s, p in seen if s.startswith("WITH"))
    return lock, write, dict(parameters)


def _same_rows(books: Sequence[Books], barrier: Barrier, seconds: float, place: int) -> int:
    lock, write, made = _captured(books[place % len(books)])
    # The names of all parameters that hold a value of the captured reservation.
    held = {value: [n for n, v in made.items() if v == value] for value in map(str, made.values())}
    entry, job = (next(v for v in held if v.startswith(p)) for p in ("ent_", "job_"))
    dataset, snapshot = (next(v for v in held if v.startswith(p)) for p in ("ds_", "snap_"))
    numbered = [n for n, v in made.items() if v == made["new_sequence"] and n != "positions"]
    with psycopg.connect(_plain(books[0].url)) as connection:
        barrier.wait()
        end, done = time.monotonic() + seconds, 0
        for turn in itertools.count(place):
            if time.monotonic() > end:
                break
            dataset_id = books[turn % len(books)].dataset_id
            fresh = {
                dataset: dataset_id,
                snapshot: dataset_id.replace("ds_", "snap_"),
                entry: f"ent_{secrets.token_hex(16)}",
                job: f"job_{secrets.token_hex(16)}",
            }
            values = made | {name: new for old, new in fresh.items() for name in held[old]}
            values["j6"] = secrets.token_hex(8)
            with connection.transaction():
                row = connection.execute(lock, {"dataset": dataset_id}).fetchone()
                sequence = (row[1] if row else 0) + 1
                connection.execute(write, values | dict.fromkeys(numbered, sequence))
            done += 1
    return done


Worker = Callable[[Sequence[Books], Barrier, float, int], int]


def _work(
    work: Worker, books: Sequence[Books], barrier: Barrier, seconds: float, place: int, out: Any
) -> None:
    out.put(work(books, barrier, seconds, place))


def rate(work: Worker, books: Sequence[Books], *, processes: int, seconds: float) -> float:
    """Transactions a second of so many processes together."""
    context = multiprocessing.get_context("fork")
    barrier, out = context.Barrier(processes), context.SimpleQueue()
    workers = [
        context.Process(target=_work, args=(work, books, barrier, seconds, place, out))
        for place in range(processes)
    ]
    for worker in workers:
        worker.start()
    total = float(sum(out.get() for _ in workers))
    for worker in workers:
        worker.join()
    return total / seconds


def rates(books: Sequence[Books], *, processes: int, seconds: float, rounds: int) -> list[float]:
    """Median rates of the ledger, of its rows by hand, and of the bare transaction, in turns."""
    with psycopg.connect(_plain(books[0].url), autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS bare_rows; DROP TABLE IF EXISTS bare")
        connection.execute("CREATE TABLE bare (id int PRIMARY KEY, spent bigint NOT NULL)")
        connection.execute(
            "CREATE TABLE bare_rows (id text PRIMARY KEY, bare_id int NOT NULL REFERENCES bare, "
            "body json NOT NULL)"
        )
        connection.execute(
            "INSERT INTO bare SELECT i, 0 FROM generate_series(0, %s) i", (len(books) - 1,)
        )
    found: dict[Worker, list[float]] = {_reserving: [], _same_rows: [], _bare: []}
    for _ in range(rounds):
        for work, seen in found.items():
            seen.append(rate(work, books, processes=processes, seconds=seconds))
    return [statistics.median(seen) for seen in found.values()]


def reserve_ms(database: Database, several: Sequence[Books], *, rounds: int) -> list[float]:
    """Median milliseconds of one reservation of each, taking turns."""
    times: list[list[float]] = [[] for _ in several]
    for turn in range(rounds + 20):
        for books, seen in zip(several, times, strict=True):
            start = time.perf_counter()
            reserve(database, books)
            if turn >= 20:
                seen.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(seen) for seen in times]


# --------------------------------------------------------------------------------------------------
# Through HTTP
# --------------------------------------------------------------------------------------------------


@contextmanager
def _service(url: str, home: Path) -> Iterator[tuple[str, str]]:
    """(address, the admin's key) of the API alone, as a process, on this database."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EPSILOND_")}
    environment |= {
        "EPSILOND_HOME": str(home),
        "EPSILOND_PORT": str(port),
        "EPSILOND_DATABASE_URL": _plain(url),
        "EPSILOND_LOG_LEVEL": "WARNING",
    }
    epsilond = [sys.executable, "-m", "api.cli"]
    first = subprocess.run(
        [*epsilond, "init"], env=environment, capture_output=True, text=True, check=True
    )
    process = subprocess.Popen(
        [*epsilond, "serve", "--without-worker"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{address}/livez", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield address, str(json.loads(first.stdout)["admin_key"])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _npz() -> bytes:
    buffer = io.BytesIO()
    images = np.zeros((40, 28, 28, 1), dtype=np.uint8)
    np.savez_compressed(buffer, images=images, labels=np.arange(40) % 10)
    return buffer.getvalue()


def over_http(
    url: str, *, clients: int, seconds: float
) -> tuple[float, list[float], dict[int, int]]:
    """(reservations a second, milliseconds of each, how often each status) of so many clients."""
    with (
        tempfile.TemporaryDirectory(prefix="epsilond-bench-") as home,
        _service(url, Path(home)) as (address, admin),
    ):
        with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {admin}"}) as http:
            organisation = http.post("/v1/organisations", json={"name": "http"}).json()["id"]
            scopes = {"organisation": organisation, "scopes": ["owner", "requester"]}
            key = http.post("/v1/keys", json=scopes).json()["key"]
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=address, headers=headers, timeout=60) as http:
            facts = {
                "name": "digits", "shape": [28, 28, 1], "value_range": [0, 255],
                "classes": [str(d) for d in range(10)], "public_size": 4000,
                "attestation": "the units of a bench",
            }  # fmt: skip
            dataset = http.post("/v1/datasets", json=facts).json()["id"]
            where = f"/v1/datasets/{dataset}"
            http.post(f"{where}/snapshots", content=_npz()).raise_for_status()
            budget = {"epsilon": 1000, "delta": 0.1, "use": {"kind": "many_small"}}
            http.put(f"{where}/budget", json=budget).raise_for_status()
        spec = {
            "kind": "denoise",
            "outputs": {str(d): 1 for d in range(10)},
            "preset": "auto",
            "target": {"epsilon": 0.05, "delta": 1e-5},
        }
        times: list[float] = []
        statuses: dict[int, int] = {}
        lock = threading.Lock()
        barrier = threading.Barrier(clients)

        def order() -> None:
            with httpx.Client(base_url=address, headers=headers, timeout=60) as http:
                http.post(f"{where}/quotes", json=spec)
                barrier.wait()
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    start = time.perf_counter()
                    answer = http.post(
                        f"{where}/jobs",
                        json=spec,
                        headers={"Idempotency-Key": secrets.token_hex(8)},
                    )
                    with lock:
                        times.append(1e3 * (time.perf_counter() - start))
                        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1

        threads = [threading.Thread(target=order) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return len(times) / seconds, times, statuses


# --------------------------------------------------------------------------------------------------
# The part
# --------------------------------------------------------------------------------------------------


def rate_tables(
    *,
    processes: int = PROCESSES,
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
    entries: int = ENTRIES,
    verified: int = VERIFIED,
) -> str:
    """The part *rates*: its tables, as Markdown."""
    with postgres() as server:
        url = server.create()
        database = Database(url)
        with psycopg.connect(_plain(url)) as connection:
            version, fsync = connection.execute(
                "SELECT current_setting('server_version'), current_setting('fsync')"
            ).fetchone() or ("", "")
        hot = [make_books(database, 0)]
        many = [make_books(database, 1 + i) for i in range(64)]
        load = {"processes": processes, "seconds": seconds, "rounds": rounds}
        on_one = rates(hot, **load)  # type: ignore[arg-type]
        on_many = rates(many, **load)  # type: ignore[arg-type]
        http_rate, times, statuses = over_http(url, clients=processes, seconds=seconds)
        few, full, checked = (make_books(database, 100 + i) for i in range(3))
        fill(database, few, 10)
        fill(database, full, entries)
        fill(database, checked, verified)
        few_ms, full_ms = reserve_ms(database, [few, full], rounds=200)
        start = time.perf_counter()
        with database.read() as session:
            found = chain.verify(session, checked.dataset_id)
        verify_seconds = time.perf_counter() - start
        if not found.ok:
            raise RuntimeError(f"the books do not verify: {found.problem}")
        database.dispose()
    refused = sum(count for status, count in statuses.items() if status not in (202, 409))
    targets = [
        target_row(f"reserve on {where}, over {what}", found[0] / found[i], 0.6, "", most=False)
        for where, found in (("one dataset", on_one), ("64 datasets", on_many))
        for i, what in ((2, "bare"), (1, "the same rows"))
    ]
    targets += [
        target_row("reservations through HTTP", http_rate, 100, "a second", most=False),
        target_row("errors but 409 through HTTP", refused, 0, ""),
        target_row(f"reserve at {entries:,} entries over 10", full_ms / few_ms, 1.2, "times"),
        target_row(f"verifying {verified:,} rows", verify_seconds, 10, "s"),
    ]
    return "\n\n".join([
        "## How fast the ledger is",
        f"One run of `python -m bench.ledger --part rates` on {machine()}; PostgreSQL {version} "
        f"on the same cores, fsync {fsync}; {processes} processes, or HTTP clients of one API "
        f"process, for {seconds:g} s each; medians of {rounds} rounds that take turns. *Bare* is a "
        "hand-written transaction: lock a row, update it, insert one row. *The same rows* is the "
        "ledger's own SQL with ready-made values: no rule, no hash, no SQLAlchemy.",
        table(["what", "figure", "target", "met"], targets),
        table(
            ["reservations a second", "the ledger", "the same rows", "bare"],
            [
                [where, *(figure(each) for each in found)]
                for where, found in (("one hot dataset", on_one), ("64 datasets", on_many))
            ],
        ),
        table(
            ["through HTTP, one dataset", "median, ms", "99 %", "statuses"],
            [[
                f"{http_rate:.0f} a second",
                figure(quantile(times, 0.5)),
                figure(quantile(times, 0.99)),
                ", ".join(f"{status}: {count:,}" for status, count in sorted(statuses.items())),
            ]],
        ),
        table(
            ["one reservation, one client", "median, ms"],
            [["at 10 entries", figure(few_ms)], [f"at {entries:,} entries", figure(full_ms)]],
        ),
    ])  # fmt: skip
