"""One job from its reservation to its release, in this process, on both databases."""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import select

from accounting import bounds, certificates, filters, ledger
from accounting.canonical import digest
from accounting.errors import Conflict, LedgerUnavailable
from accounting.filters import Budget
from accounting.mechanisms import mechanism_from_json
from accounting.quotes import plan_denoise
from accounting.tables import (
    ChainRow,
    Database,
    DatasetRow,
    JobRow,
    OrganisationRow,
    ReleaseRow,
    SnapshotRow,
)
from models.denoisers import (
    EdmDenoiser,
    NetworkConfig,
    PublicModelCard,
    TrainedBy,
    TrainingData,
    save_public_denoiser,
)
from worker import artifacts, jobs
from worker.artifacts import ArtifactStore
from worker.catalogue import list_models
from worker.custody import ensure_keys, load_public_keys, load_sealer
from worker.settings import Settings
from worker.snapshots import Records, write_snapshot

CLASSES = ["cat", "dog"]
FACTS: dict[str, Any] = {
    "shape": [8, 8, 1],
    "value_range": [0, 255],
    "classes": CLASSES,
    "public_size": 40,
    "public_class_sizes": None,
    "unit": None,
    "max_records_per_unit": 1,
}
SPEC: dict[str, Any] = {
    "kind": "denoise",
    "outputs": {"cat": 6, "dog": 5},
    "preset": {
        "weight": "centred",
        "block_steps": 8,
        "subsample_size": 4,
        "clip_norm": 2.0,
        "renoise_steps": 2,
        "refine_steps": 3,
    },
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalogue with one small untrained model, whose classes stand in another order."""
    torch.manual_seed(0)
    config = NetworkConfig(channels=(16, 32), attention_head_dim=8, norm_groups=4)
    network = EdmDenoiser(config, (8, 8, 1), 2, 0.5)
    means = torch.stack([torch.full((1, 8, 8), -0.5), torch.full((1, 8, 8), 0.5)])
    card = PublicModelCard(
        name="pets",
        shape=(8, 8, 1),
        classes=("dog", "cat"),
        value_range=(-1.0, 1.0),
        sigma_data=0.5,
        training_data=TrainingData("nothing: random weights", 0, 0, {}, ()),
        licence="Apache-2.0",
        weights="model.safetensors",
        sha256="",
        parameters=0,
        network=config,
        trained_by=TrainedBy("none", 0, 0, 1, 1.0, 0.5, 0.0, 1.0),
    )
    folder = tmp_path_factory.mktemp("models")
    save_public_denoiser(folder / "pets", card, network, means)
    return folder


class World:
    """An installation with one dataset, and a reserved job; its budget is for ``releases``."""

    def __init__(self, settings: Settings, database: Database, releases: int = 1) -> None:
        self.settings = settings
        self.database = database
        ensure_keys(settings)
        self.records = Records(
            images=np.random.default_rng(1).integers(0, 256, (40, 8, 8, 1)).astype(np.uint8),
            labels=np.arange(40) % 2,
            units=None,
        )
        snapshot = write_snapshot(
            settings, load_sealer(settings), facts=FACTS, records=self.records
        )
        self.snapshot_path = settings.snapshots_folder / snapshot.location
        now = jobs._now()
        budget = Budget.from_json(
            {
                "epsilon": 50.0 * releases,
                "delta": 1e-5,
                "use": {"kind": "few_large", "releases": releases},
            }
        )
        with database.write() as session:
            session.add(OrganisationRow(id="org_1", name="one", created_at=now))
            session.flush()
            session.add(
                DatasetRow(
                    id="ds_1", organisation_id="org_1", name="pets", facts=FACTS, created_at=now
                )
            )
            session.flush()
            session.add(
                SnapshotRow(
                    id=snapshot.id,
                    dataset_id="ds_1",
                    created_at=now,
                    location=snapshot.location,
                    hmac=snapshot.hmac,
                    sealed_key=snapshot.sealed_key,
                    records=snapshot.records,
                    owner_warning=None,
                )
            )
            session.flush()
            family = ledger.set_budget(session, dataset_id="ds_1", budget=budget, now=now)
        self.plan = plan_denoise(
            SPEC, FACTS, budget, family, list_models(settings.public_models), bounds.renyi
        )
        self.snapshot_id = snapshot.id
        self.job_id = self.order("k")

    def order(self, key: str) -> str:
        with self.database.write() as session:
            return ledger.reserve(
                session,
                dataset_id="ds_1",
                organisation_id="org_1",
                idempotency_key=key,
                body_hash=digest(SPEC),
                kind="denoise",
                spec=SPEC,
                mechanism=self.plan.mechanism,
                post_processing=self.plan.post_processing,
                certificate_epsilon=self.plan.certificate_epsilon.to_json(),
                costs=self.plan.costs,
                snapshot_id=self.snapshot_id,
                progress_total=self.plan.progress_total,
                max_attempts=3,
                ttl_seconds=3600,
                now=jobs._now(),
            ).job_id

    def run(self) -> int:
        return jobs.run_job(self.settings, self.job_id)

    def job(self) -> JobRow:
        with self.database.read() as session:
            return session.get_one(JobRow, self.job_id)

    def lease_runs_out(self) -> None:
        with self.database.write() as session:
            session.get_one(JobRow, self.job_id).lease_expires_at = 1

    def batch(self) -> bytes:
        with self.database.read() as session:
            release = session.scalars(select(ReleaseRow)).one()
        return ArtifactStore(self.settings.effective_artifacts_url).read(release.location)


@pytest.fixture
def world(tmp_path: Path, database: Database, database_url: str, model_folder: Path) -> World:
    models = tmp_path / "models"
    shutil.copytree(model_folder, models)
    settings = Settings(home=tmp_path / "home", database_url=database_url, public_models=models)
    return World(settings, database)


def test_a_job_ends_with_a_batch_and_a_certificate_of_it(world: World) -> None:
    assert world.run() == jobs.DONE
    job = world.job()
    assert job.state == "released"
    assert job.progress_done == 11
    with np.load(io.BytesIO(world.batch())) as batch:
        assert batch["images"].shape == (11, 8, 8, 1)
        assert batch["images"].dtype == np.uint8
        assert batch["labels"].tolist() == [0] * 6 + [1] * 5
    with world.database.read() as session:
        certificate = session.scalars(select(ReleaseRow)).one().certificate
        started = session.get_one(ChainRow, ("ds_1", certificate["ledger"]["sequence"]))
        assert started.hash == certificate["ledger"]["hash"]
        assert ledger.verify(session, "ds_1").ok
    # The certificate alone says what ran: its mechanism is the one that was charged.
    assert mechanism_from_json(certificate["mechanism"]) == world.plan.mechanism
    check = certificates.verify(certificate, load_public_keys(world.settings), recompute=False)
    assert check.signature_ok
    assert certificate["post_processing"] == world.plan.post_processing


def test_the_certificate_alone_gives_the_same_bracket(world: World) -> None:
    world.run()
    with world.database.read() as session:
        stated = session.scalars(select(ReleaseRow)).one().certificate
    mechanism = mechanism_from_json(stated["mechanism"])
    again = bounds.renyi(mechanism, stated["epsilon"]["delta"])
    assert again.to_json() == stated["epsilon"]
    # A second accountant agrees that the bound holds.
    assert bounds.epsilon(mechanism, again.delta).lower <= again.upper


def test_the_same_message_twice_draws_nothing_twice(world: World) -> None:
    assert world.run() == jobs.DONE
    first = world.batch()
    assert world.run() == jobs.NOTHING_TO_DO
    assert world.batch() == first


def test_a_retry_repeats_the_same_batch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[bytes] = []
    draw = jobs._draw

    def dies_after_drawing(*arguments: Any) -> bytes:
        batches.append(draw(*arguments))
        raise OSError("the disk is full")

    monkeypatch.setattr(jobs, "_draw", dies_after_drawing)
    assert world.run() == jobs.TRY_AGAIN
    assert world.job().state == "started"
    # The lease is alive: another attempt may not begin.
    assert world.run() == jobs.NOTHING_TO_DO
    monkeypatch.undo()
    world.lease_runs_out()
    assert world.run() == jobs.DONE
    assert batches == [world.batch()]
    assert world.job().attempts == 2


def test_an_attempt_that_lost_its_lease_releases_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = jobs._draw

    def is_overtaken(*arguments: Any) -> bytes:
        monkeypatch.setattr(jobs, "_draw", draw)
        world.lease_runs_out()
        # The other attempt does the whole job meanwhile.
        assert world.run() == jobs.DONE
        return draw(*arguments)

    monkeypatch.setattr(jobs, "_draw", is_overtaken)
    # A heartbeat that finds the lease gone would end this very process.
    monkeypatch.setattr(jobs._Heartbeat, "_run", lambda _self: None)
    assert world.run() == jobs.NOTHING_TO_DO
    with world.database.read() as session:
        assert len(session.scalars(select(ReleaseRow)).all()) == 1


@pytest.mark.parametrize(
    ("error", "status", "state"),
    [
        (OSError(), jobs.TRY_AGAIN, "started"),
        (MemoryError(), jobs.TRY_AGAIN, "started"),
        (LedgerUnavailable("gone"), jobs.TRY_AGAIN, "started"),
        (ValueError("value 0.123 of record 7"), jobs.FAILED, "failed_charged"),
    ],
)
def test_failures(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    status: int,
    state: str,
) -> None:
    def fails(*_arguments: Any) -> bytes:
        raise error

    monkeypatch.setattr(jobs, "_draw", fails)
    with caplog.at_level("INFO"):
        assert world.run() == status
    job = world.job()
    assert job.state == state
    if state == "failed_charged":
        assert job.problem_code == ledger.FAILURE_CODE
        assert job.sealed_seed is None
    assert type(error).__name__ in caplog.text
    assert "0.123" not in caplog.text
    with world.database.read() as session:
        # Charged all the same: what was computed may have been seen.
        spent = [s.epsilon_units for s in ledger.states(session, "ds_1")]
        assert all(spent)


def test_a_full_disk_leaves_the_job_to_another_attempt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_path: Path, _data: bytes) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(artifacts, "write_once", full)
        assert world.run() == jobs.TRY_AGAIN
    assert world.job().state == "started"
    world.lease_runs_out()
    assert world.run() == jobs.DONE


def test_a_snapshot_that_is_away_leaves_the_job_to_another_attempt(world: World) -> None:
    aside = world.snapshot_path.with_suffix(".aside")
    world.snapshot_path.rename(aside)
    assert world.run() == jobs.TRY_AGAIN
    aside.rename(world.snapshot_path)
    world.lease_runs_out()
    assert world.run() == jobs.DONE


def test_a_mechanism_that_was_not_charged_for_never_starts(world: World) -> None:
    with world.database.write() as session:
        job = session.get_one(JobRow, world.job_id)
        job.mechanism = {**(job.mechanism or {}), "clip_norm": 2000.0}
    with pytest.raises(Conflict) as refused:
        world.run()
    assert refused.value.code == "ledger_inconsistent"
    assert world.job().state == "reserved"


def test_a_certificate_tells_times_to_the_minute_only(world: World) -> None:
    world.run()
    with world.database.read() as session:
        issued = session.scalars(select(ReleaseRow)).one().certificate["issued_at"]
    assert issued.endswith(":00.000000Z")


def test_a_changed_snapshot_is_not_drawn_from(world: World) -> None:
    sealed = bytearray(world.snapshot_path.read_bytes())
    sealed[len(sealed) // 2] ^= 1
    world.snapshot_path.write_bytes(bytes(sealed))
    assert world.run() == jobs.FAILED
    assert world.job().state == "failed_charged"


def test_another_model_under_the_same_name_is_refused(world: World) -> None:
    card = world.settings.public_models / "pets" / "card.json"
    weights = world.settings.public_models / "pets" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert world.run() == jobs.FAILED  # the card's digest is not the file's
    assert card.is_file()


@pytest.mark.parametrize(
    "change",
    [
        lambda records: replace(records, images=records.images[:1], labels=records.labels[:1]),
        lambda records: replace(records, labels=np.zeros(40, dtype=np.int64)),
        lambda records: replace(records, images=np.zeros_like(records.images)),
    ],
    ids=["one record", "a class without records", "all alike"],
)
def test_no_job_fails_because_of_what_the_data_holds(
    world: World, change: Callable[[Records], Records]
) -> None:
    written = write_snapshot(
        world.settings,
        load_sealer(world.settings),
        facts=FACTS,
        records=change(world.records),
    )
    with world.database.write() as session:
        row = SnapshotRow(
            id=written.id,
            dataset_id="ds_1",
            created_at=jobs._now(),
            location=written.location,
            hmac=written.hmac,
            sealed_key=written.sealed_key,
            records=written.records,
            owner_warning=written.owner_warning,
        )
        session.add(row)
        session.flush()
        session.get_one(JobRow, world.job_id).snapshot_id = written.id
    assert world.run() == jobs.DONE


def test_the_charge_is_committed_before_a_private_byte_is_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def look(*_arguments: Any, **_named: Any) -> Records:
        # Another connection sees the state that is committed.
        seen.append(world.job().state)
        return world.records

    monkeypatch.setattr(jobs, "read_snapshot", look)
    assert world.run() == jobs.DONE
    assert seen == ["started"]


def test_every_filter_is_charged_what_the_plan_said(world: World) -> None:
    world.run()
    with world.database.read() as session:
        states = ledger.states(session, "ds_1")
    assert [s.epsilon_units for s in states] == [
        filters.INFINITE if c.epsilon_units == filters.INFINITE else c.epsilon_units
        for c in world.plan.costs
    ]
