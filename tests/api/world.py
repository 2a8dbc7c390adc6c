"""A real app on a real database, with organisations, keys and a small dataset."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import sqlalchemy as sa
import uvicorn
from fastapi import FastAPI

from accounting import certificates, ledger
from accounting.mechanisms import mechanism_from_json
from accounting.tables import Base, Database
from api.app import create_app
from api.cli import first_admin_key
from api.deps import now
from worker.artifacts import ArtifactStore
from worker.custody import load_signing_key
from worker.settings import Settings

JSON = dict[str, Any]

FACTS: JSON = {
    "name": "digits",
    "shape": [8, 8, 1],
    "value_range": [0, 255],
    "classes": ["0", "1"],
    "public_size": 40,
    "public_class_sizes": None,
    "unit": None,
    "max_records_per_unit": 1,
    "budget_group": None,
    "attestation": "units not registered in another budget group",
}
# A block so private that a handful of them fits any budget here; one number of outputs for all
# tests, so that its bound is computed once.
SPEC: JSON = {
    "kind": "denoise",
    "outputs": {"0": 2, "1": 2},
    "preset": {
        "weight": "centred",
        "centre": "public_class_mean",
        "block_steps": 3,
        "sampling": "poisson",
        "subsample_size": 3,
        "clip_norm": 1.0,
        "beta": 1.0,
        "public_model": "public-8",
        "renoise_steps": 0,
        "refine_steps": 4,
    },
    "form": "refined",
}
BUDGET: JSON = {"epsilon": 6.0, "delta": 1e-5, "use": {"kind": "few_large", "releases": 5}}


def npz(records: int = 40, **changes: Any) -> bytes:
    """An upload of random records that fits FACTS."""
    random = np.random.default_rng(1)
    arrays: JSON = {
        "images": random.integers(0, 256, (records, 8, 8), dtype=np.uint8),
        "labels": np.arange(records) % 2,
    }
    arrays |= changes
    buffer = io.BytesIO()
    np.savez(buffer, **{k: v for k, v in arrays.items() if v is not None})
    return buffer.getvalue()


def counts(database: Database) -> dict[str, int]:
    """How many rows each table holds."""
    with database.read() as session:
        return {
            name: session.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for name, table in Base.metadata.tables.items()
            if name != "leases"
        }


def files(settings: Settings) -> set[str]:
    """Every file of the service that an upload or a job could leave behind."""
    return {
        str(path.relative_to(settings.home))
        for folder in (settings.snapshots_folder, settings.uploads_folder, settings.broker_folder)
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "control"
    }


@dataclass
class World:
    """A running service and the people around it, each with a client that holds a key."""

    app: FastAPI
    settings: Settings
    address: str
    open_clients: ExitStack
    clients: dict[str, httpx.Client] = field(default_factory=dict)
    organisations: dict[str, str] = field(default_factory=dict)

    @property
    def database(self) -> Database:
        database: Database = self.app.state.service.database
        return database

    @property
    def admin(self) -> httpx.Client:
        return self.clients["admin"]

    @property
    def nobody(self) -> httpx.Client:
        """No key at all."""
        return self.clients["nobody"]

    @property
    def owner(self) -> httpx.Client:
        return self.clients["owner"]

    @property
    def requester(self) -> httpx.Client:
        return self.clients["requester"]

    @property
    def stranger(self) -> httpx.Client:
        """A key with every scope but admin, of an organisation that has nothing to do with it."""
        return self.clients["stranger"]

    def with_key(self, key: str | None) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # Reading the system's certificates would take longer than most tests do.
        client = httpx.Client(base_url=self.address, headers=headers, timeout=60, verify=False)  # noqa: S501
        return self.open_clients.enter_context(client)

    def join(self, name: str, organisation: str, scopes: list[str]) -> httpx.Client:
        """A new key for an organisation, which is made if need be."""
        if organisation not in self.organisations:
            made = self.admin.post("/v1/organisations", json={"name": organisation})
            assert made.status_code == 201, made.text
            self.organisations[organisation] = made.json()["id"]
        body = {"organisation": self.organisations[organisation], "scopes": scopes}
        key = self.admin.post("/v1/keys", json=body)
        assert key.status_code == 201, key.text
        self.clients[name] = self.with_key(key.json()["key"])
        return self.clients[name]

    def dataset(
        self,
        *,
        budget: JSON | None = BUDGET,
        snapshot: bool = True,
        granted: bool = True,
        **facts: Any,
    ) -> str:
        """A dataset of the owner, by default ready for jobs."""
        made = self.owner.post("/v1/datasets", json={**FACTS, **facts})
        assert made.status_code == 201, made.text
        dataset = str(made.json()["id"])
        where = f"/v1/datasets/{dataset}"
        if budget is not None:
            assert self.owner.put(f"{where}/budget", json=budget).status_code == 201
        if snapshot:
            sent = self.owner.post(f"{where}/snapshots", content=npz())
            assert sent.status_code == 201, sent.text
        if granted:
            body = {
                "organisation": self.organisations["requester"],
                "scopes": ["quote", "request"],
            }
            assert self.owner.post(f"{where}/grants", json=body).status_code == 201
        return dataset

    def order(
        self, dataset: str, key: str, spec: JSON = SPEC, *, client: httpx.Client | None = None
    ) -> httpx.Response:
        return (client or self.requester).post(
            f"/v1/datasets/{dataset}/jobs", json=spec, headers={"Idempotency-Key": key}
        )


def assert_problem(
    answer: httpx.Response, status: int, code: str | None = None, field: str | None = None
) -> JSON:
    """The answer is a problem of this kind; its body."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: JSON = answer.json()
    assert body["status"] == status
    assert {"type", "title", "detail", "code"} <= set(body)
    assert body["type"] == f"/problems/{body['code'].replace('_', '-')}"
    if code is not None:
        assert body["code"] == code
    if field is not None:
        assert body["field"] == field
    return body


def write_card(catalogue: Path) -> None:
    """A public model's card; the API reads no weights, so there are none."""
    folder = catalogue / "public-8"
    folder.mkdir(parents=True)
    card = {
        "name": "public-8",
        "shape": [8, 8, 1],
        "classes": ["0", "1"],
        "value_range": [-1, 1],
        "sha256": "a" * 64,
        "licence": "Apache-2.0",
        "training_data": {"what": "rendered glyphs"},
        "weights": "weights.safetensors",
    }
    (folder / "card.json").write_text(json.dumps(card))


def release_of(world: World, job_id: str) -> str:
    """What the worker does to a job, with a batch of noise: starts it and releases it."""
    settings, database = world.settings, world.database
    random = np.random.default_rng(2)
    with database.write() as session:
        started = ledger.start(
            session,
            job_id=job_id,
            job_digest="d" * 64,
            sealed_seed=b"sealed",
            lease_seconds=60,
            now=now(),
        )
    assert started is not None
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        images=random.integers(0, 256, (4, 8, 8, 1), dtype=np.uint8),
        labels=np.array([0, 0, 1, 1], dtype=np.int64),
    )
    signing_key = load_signing_key(settings)
    store = ArtifactStore(settings.effective_artifacts_url)
    staged = store.stage(job_id, started.attempt, buffer.getvalue())
    certificate = certificates.sign(
        certificates.build(
            service_version="0",
            signing_key_id=certificates.key_id(signing_key.public_key()),
            dataset_id=started.dataset_id,
            snapshot_id=str(started.snapshot_id),
            snapshot_hmac=str(started.snapshot_hmac),
            mechanism=mechanism_from_json(started.mechanism),
            post_processing=started.post_processing,
            epsilon=started.certificate_epsilon or {},
            artefact_sha256=staged.sha256,
            artefact_bytes=staged.size,
            ledger_sequence=started.sequence,
            ledger_hash=started.hash,
            issued_at=now(),
        ),
        signing_key,
    )
    with database.write() as session:
        return ledger.release(
            session,
            job_id=job_id,
            lease_token=started.lease_token,
            location=store.publish(staged, staged.sha256),
            sha256=staged.sha256,
            size=staged.size,
            certificate=certificate,
            now=now(),
        )


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The app on a real server in a thread of its own; its address."""
    # With the protocol named, asyncio turns off Nagle's algorithm, which would cost 40 ms a call.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the app did not start"
            time.sleep(0.002)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
    assert not thread.is_alive(), "the app did not stop"


@contextmanager
def running(settings: Settings) -> Iterator[World]:
    """A started service with an owner, a requester and a stranger."""
    app = create_app(settings)
    with serving(app) as address, ExitStack() as stack:
        key = first_admin_key(app.state.service.database)
        assert key is not None
        world = World(app, settings, address, stack)
        world.clients["admin"] = world.with_key(key)
        world.clients["nobody"] = world.with_key(None)
        world.join("owner", "hospital", ["owner"])
        world.join("requester", "requester", ["requester"])
        world.join("stranger", "stranger", ["owner", "requester", "auditor"])
        yield world
