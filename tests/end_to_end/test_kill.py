"""A worker killed in the middle of a job: one release, one charge, a chain that verifies."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import func, select

from accounting.tables import (
    ChainRow,
    ChargeRow,
    Database,
    EntryRow,
    FilterRow,
    JobRow,
    ReleaseRow,
)
from tests.end_to_end.service import Service, installation, processes_with, wait_until

# The demo's job: 500 digits of a dataset of 4,000.
PUBLIC_SIZE = 4000
OUTPUTS = {str(digit): 50 for digit in range(10)}


def digits_npz() -> bytes:
    """4,000 private records of ten classes: blurred bars, one slant for each class."""
    rng = np.random.default_rng(0)
    labels = np.arange(PUBLIC_SIZE) % 10
    rows, columns = np.mgrid[0:28, 0:28] - 13.5
    angle = labels * np.pi / 10 + rng.normal(0, 0.1, PUBLIC_SIZE)
    distance = np.abs(rows * np.cos(angle)[:, None, None] - columns * np.sin(angle)[:, None, None])
    images = np.clip(255 * np.exp(-((distance / 3) ** 2)), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, images=images, labels=labels.astype(np.int64))
    return buffer.getvalue()


def answer(response: httpx.Response) -> dict[str, Any]:
    assert response.is_success, response.text
    found: dict[str, Any] = response.json()
    return found


class Parties:
    """An owner with a dataset of one release, and an organisation that may order from it."""

    def __init__(self, service: Service) -> None:
        with service.admin() as admin:
            clients = []
            for name, scopes in (("hospital", ["owner"]), ("university", ["requester"])):
                made = answer(admin.post("/v1/organisations", json={"name": name}))
                key = answer(
                    admin.post("/v1/keys", json={"organisation": made["id"], "scopes": scopes})
                )
                clients.append((made["id"], service.client(key["key"])))
        (_, self.owner), (requester_id, self.requester) = clients
        facts = {
            "name": "digits",
            "shape": [28, 28, 1],
            "value_range": [0, 255],
            "classes": list(OUTPUTS),
            "public_size": PUBLIC_SIZE,
            "attestation": "units not registered in another budget group",
        }
        self.dataset = answer(self.owner.post("/v1/datasets", json=facts))["id"]
        answer(
            self.owner.post(
                f"/v1/datasets/{self.dataset}/snapshots",
                content=digits_npz(),
                headers={"Content-Type": "application/octet-stream"},
            )
        )
        budget = {"epsilon": 6.0, "delta": 1e-5, "use": {"kind": "few_large", "releases": 1}}
        answer(self.owner.put(f"/v1/datasets/{self.dataset}/budget", json=budget))
        grant = {"organisation": requester_id, "scopes": ["quote", "request"]}
        answer(self.owner.post(f"/v1/datasets/{self.dataset}/grants", json=grant))

    def order(self) -> str:
        job = answer(
            self.requester.post(
                f"/v1/datasets/{self.dataset}/jobs",
                json={"kind": "denoise", "outputs": OUTPUTS, "preset": "auto"},
                headers={"Idempotency-Key": "the-batch"},
            )
        )
        return str(job["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        return answer(self.requester.get(f"/v1/jobs/{job_id}"))

    def close(self) -> None:
        self.owner.close()
        self.requester.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    """The embedded default on SQLite, and the production topology on PostgreSQL and Redis."""
    home = tmp_path / "home"
    if request.param == "sqlite":
        with installation(home, database_url="", broker_url="") as made:
            made.start("serve", "serve")
            made.wait_ready()
            yield made
    else:
        database_url = request.getfixturevalue("postgres_url")
        broker_url = request.getfixturevalue("redis_url")
        with installation(home, database_url=database_url, broker_url=broker_url) as made:
            made.start("api", "serve", "--without-worker")
            made.start("worker", "worker")
            made.wait_ready()
            yield made


def _kill_worker(service: Service, job_id: str) -> None:
    """SIGKILL to the Celery worker and to the process that runs the job, as a power cut would."""
    victims = processes_with("worker.jobs", job_id)
    assert victims, "the job runs in a process of its own"
    if "worker" in service.processes:
        process = service.processes["worker"]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    else:
        home = f"EPSILOND_HOME={service.home}".encode()
        victims += [
            pid
            for pid in processes_with("celery", "worker.tasks")
            if home in Path(f"/proc/{pid}/environ").read_bytes()
        ]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    wait_until(
        "the killed processes to be gone", lambda: not processes_with("worker.jobs", job_id), 10
    )


def test_a_worker_killed_in_the_middle_of_a_job(service: Service) -> None:
    parties = Parties(service)
    try:
        job_id = parties.order()

        def in_the_middle() -> bool:
            job = parties.job(job_id)
            assert job["state"] in {"reserved", "started"}, job
            return bool(job["state"] == "started" and job["progress"]["done"] > 0)

        wait_until("the job to be in its middle", in_the_middle, 300)
        _kill_worker(service, job_id)
        assert parties.job(job_id)["state"] == "started"
        if "worker" in service.processes:
            service.start("worker", "worker")

        wait_until(
            "the job to be released",
            lambda: parties.job(job_id)["state"] not in {"reserved", "started"},
            400,
        )
        job = parties.job(job_id)
        assert job["state"] == "released", job

        books = answer(parties.owner.get(f"/v1/datasets/{parties.dataset}/ledger"))
        assert [entry["state"] for entry in books["entries"]] == ["released"]
        assert books["entries"][0]["releases"] == [job["release"]]
        assert books["entries"][0]["charge"] == job["charge"]
        check = answer(parties.owner.get(f"/v1/datasets/{parties.dataset}/ledger/verify"))
        assert check["ok"], check

        content = parties.requester.get(f"/v1/releases/{job['release']}/content")
        assert content.status_code == 200
        with np.load(io.BytesIO(content.content)) as batch:
            assert batch["images"].shape == (500, 28, 28, 1)
            assert np.array_equal(np.bincount(batch["labels"]), [50] * 10)

        _check_the_database(service, job_id)
    finally:
        parties.close()


def _check_the_database(service: Service, job_id: str) -> None:
    """Two attempts, one entry, one release, one charge for each filter, no seed left."""
    url = service.database_url or f"sqlite:///{service.home}/epsilond.db"
    database = Database(url)
    try:
        with database.read() as session:
            job = session.get_one(JobRow, job_id)
            assert job.attempts == 2
            assert job.sealed_seed is None
            counts = [
                session.scalar(select(func.count()).select_from(table))
                for table in (EntryRow, ReleaseRow)
            ]
            assert counts == [1, 1]
            charges = session.scalar(select(func.count()).select_from(ChargeRow))
            assert charges == session.scalar(select(func.count()).select_from(FilterRow))
            states = [
                '"state":"started"' in row.body and '"kind":"attempt"' not in row.body
                for row in session.scalars(select(ChainRow).order_by(ChainRow.sequence))
            ]
            assert states.count(True) == 1
    finally:
        database.dispose()
