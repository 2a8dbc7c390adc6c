"""The Python client against a real service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.client import BudgetExhausted, Client, JobFailed, ServiceError
from tests.api.test_jobs import budget_for
from tests.api.world import BUDGET, FACTS, SPEC, World, npz, release_of


def client_of(world: World, name: str) -> Client:
    key = world.clients[name].headers["authorization"].split()[1]
    return Client(world.address, key)


@pytest.fixture
def owner(world: World) -> Iterator[Client]:
    with client_of(world, "owner") as client:
        yield client


@pytest.fixture
def requester(world: World) -> Iterator[Client]:
    with client_of(world, "requester") as client:
        yield client


def test_the_way_of_a_batch(world: World, owner: Client, requester: Client, tmp_path: Path) -> None:
    dataset = owner.create_dataset(FACTS)["id"]
    upload = tmp_path / "records.npz"
    upload.write_bytes(npz())
    assert owner.upload_snapshot(dataset, upload)["id"].startswith("snap_")
    assert owner.upload_snapshot(dataset, npz())["id"].startswith("snap_")
    assert [s["records"] for s in owner.snapshots(dataset)] == [40, 40]
    assert owner.set_budget(dataset, 6.0, 1e-5, BUDGET["use"])["epsilon"] == 6.0
    owner.grant(dataset, world.organisations["requester"], ["quote", "request"])
    assert [d["id"] for d in requester.datasets()] == [dataset]
    assert requester.quote(dataset, SPEC)["admitted"] is True

    job = requester.create_job(dataset, SPEC)
    assert (job.state, job.done, job.total) == ("reserved", 0, 4)
    # The same order is the same job; another order is another.
    assert requester.create_job(dataset, SPEC).id == job.id
    assert requester.create_job(dataset, SPEC, order="2").cancel().state == "cancelled"
    release = release_of(world, job.id)
    seen: list[tuple[int, int]] = []
    assert job.wait(lambda done, total: seen.append((done, total))) == release
    assert seen[-1] == (4, 4)
    assert requester.release(release)["job"] == job.id
    for kind in ("npz", "zip"):
        assert requester.download(release, tmp_path / f"batch.{kind}", kind=kind).stat().st_size
    certificate = requester.certificate(release)
    assert requester.verify_certificate(certificate)["ok"] is True
    assert owner.verify_ledger(dataset)["ok"] is True
    assert len(owner.export_ledger(dataset).splitlines()) >= 4
    assert owner.ledger(dataset)["entries"][0]["releases"] == [release]
    assert owner.budget(dataset)["filters"]
    assert [m["name"] for m in requester.models()] == ["public-8"]
    mechanism = certificate["mechanism"]
    upper = requester.epsilon(mechanism, 1e-5)["upper"]
    assert upper == pytest.approx(certificate["epsilon"]["upper"], rel=1e-9)
    assert requester.delta(mechanism, upper)["upper"] <= 1.1e-5
    assert len(requester.profile(mechanism, [0.0, upper])) == 2
    assert requester.ready() is True


def test_a_plan_and_an_approval(world: World, owner: Client, requester: Client) -> None:
    dataset = owner.create_dataset({**FACTS, "name": "planned"})["id"]
    owner.upload_snapshot(dataset, npz())
    own = world.organisations["requester"]
    use = BUDGET["use"]
    owner.set_budget(dataset, 6.0, 1e-5, use, approval_above=1e-3, organisation_caps={own: 5.0})
    owner.grant(dataset, own, ["quote", "request"])
    plan = requester.create_plan(dataset, [SPEC, SPEC])
    assert (plan.state, len(plan.jobs)) == ("awaiting_approval", 2)
    assert requester.create_plan(dataset, [SPEC, SPEC]).id == plan.id
    assert owner.approve(plan.jobs[0].id).state == "reserved"
    assert requester.get_plan(plan.id).state == "reserved"
    waiting = requester.create_job(dataset, SPEC)
    assert owner.deny(waiting.id).state == "denied"
    with pytest.raises(JobFailed):
        waiting.wait()
    release_of(world, plan.jobs[1].id)
    statement = owner.statement(dataset)
    assert [o["organisation"] for o in statement["organisations"]] == [own]
    assert len(statement["over_time"]) == 1


def test_questions_to_the_accountant(requester: Client) -> None:
    gaussian = {"kind": "gaussian", "noise_multiplier": 2.0}
    bracket = requester.epsilon(gaussian, 1e-5, tolerance=1e-6)
    assert bracket["upper"] - bracket["lower"] <= 1e-6
    assert requester.delta(gaussian, bracket["upper"])["upper"] == pytest.approx(1e-5, rel=1e-4)
    assert len(requester.profile(gaussian)) == 101
    assert requester.tradeoff(gaussian, [0.5])[0]["alpha"] == 0.5
    assert len(requester.tradeoff(gaussian)) > 100
    assert "gaussian_exact" in {row["method"] for row in requester.compare(gaussian, 1e-5)}
    found = requester.calibrate({"kind": "gaussian"}, "noise_multiplier", epsilon=1.0, delta=1e-6)
    assert found["parameter"] == pytest.approx(4.22468, rel=1e-5)
    assert requester.calibrate(gaussian, "delta", epsilon=1.0)["free"] == "delta"
    shared = requester.allocate([({"kind": "gaussian"}, 1.0)] * 4, epsilon=1.0, delta=1e-6)
    assert [s["share"] for s in shared["shares"]] == pytest.approx([0.25] * 4)
    with pytest.raises(ServiceError) as caught:
        requester.calibrate(gaussian, "nothing", epsilon=1.0, delta=1e-5)
    assert (caught.value.status, caught.value.field) == (422, "free")


def test_errors_have_types(world: World, owner: Client, requester: Client) -> None:
    with pytest.raises(ServiceError) as caught:
        owner.create_dataset({**FACTS, "public_size": 0})
    assert (caught.value.status, caught.value.code) == (422, "invalid_request")
    assert caught.value.field == "public_size"
    dataset = world.dataset(budget=budget_for(world, 1))
    job = requester.create_job(dataset, SPEC)
    with pytest.raises(BudgetExhausted) as refused:
        requester.create_job(dataset, SPEC, order="2")
    assert {row["order"] for row in refused.value.remaining} >= {"inf"}
    assert refused.value.requested
    assert refused.value.blocking
    fits = refused.value.largest_that_fits
    assert fits is not None
    # One output of each class is left of the finite orders, and it is admitted indeed.
    assert requester.create_job(dataset, {**SPEC, **fits}).cancel().state == "cancelled"
    job.cancel()
    with pytest.raises(JobFailed, match="cancelled"):
        job.wait()
    with pytest.raises(ServiceError) as missing:
        requester.download("rel_" + "0" * 32, Path("unused"))
    assert missing.value.status == 404


def test_waiting_has_an_end(world: World, requester: Client) -> None:
    job = requester.create_job(world.dataset(), SPEC)
    with pytest.raises(TimeoutError):
        job.wait(timeout_seconds=0.0, poll_seconds=0.01)


def test_what_is_safe_to_repeat_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.client.time.sleep", lambda _: None)
    calls: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append((request.method, request.headers.get("idempotency-key")))
        if len(calls) == 1:
            raise httpx.ReadError("the reply was lost", request=request)
        if len(calls) == 2:
            return httpx.Response(503, json={"code": "x"}, headers={"Retry-After": "1"})
        return httpx.Response(202, json={"id": "job_1"})

    client = Client("http://service", "key", transport=httpx.MockTransport(answer))
    assert client.create_job("ds_1", SPEC).id == "job_1"
    assert len(calls) == 3
    assert len(set(calls)) == 1  # one and the same order each time
    assert calls[0][1]

    calls.clear()
    with pytest.raises(httpx.ReadError):
        client.create_dataset(FACTS)  # would make two
    assert len(calls) == 1
    client.close()
