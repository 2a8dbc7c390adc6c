"""Plans, approvals, shares of organisations, budget groups and statements, over HTTP."""

from __future__ import annotations

import httpx
import pytest

from tests.api.world import BUDGET, FACTS, SPEC, World, assert_problem, npz, release_of

JSON = dict[str, object]


def plan(
    world: World,
    dataset: str,
    key: str = "p",
    jobs: list[JSON] | None = None,
    *,
    client: httpx.Client | None = None,
    dry_run: bool = False,
) -> httpx.Response:
    body: JSON = {"jobs": [SPEC, SPEC] if jobs is None else jobs}
    if dry_run:
        body["dry_run"] = True
    return (client or world.requester).post(
        f"/v1/datasets/{dataset}/plans", json=body, headers={"Idempotency-Key": key}
    )


def test_a_plan_is_cheaper_than_its_jobs_one_by_one(each_world: World) -> None:
    world = each_world
    dataset = world.dataset()
    quoted = plan(world, dataset, dry_run=True)
    assert quoted.status_code == 200, quoted.text
    quote = quoted.json()
    assert quote["admitted"] is True
    assert quote["charge"]["epsilon"] < quote["separately"]["epsilon"]
    assert quote["charge"]["delta"] * 2 == pytest.approx(quote["separately"]["delta"])
    made = plan(world, dataset)
    assert made.status_code == 202, made.text
    body = made.json()
    assert made.headers["location"] == f"/v1/plans/{body['id']}"
    assert body["charge"] == quote["charge"]
    assert [job["state"] for job in body["jobs"]] == ["reserved", "reserved"]
    assert {job["plan"] for job in body["jobs"]} == {body["id"]}
    assert plan(world, dataset).json() == body
    assert world.requester.get(f"/v1/plans/{body['id']}").json() == body
    assert world.owner.get(f"/v1/plans/{body['id']}").json() == body
    assert_problem(world.stranger.get(f"/v1/plans/{body['id']}"), 404, "not_found")
    assert_problem(plan(world, dataset, jobs=[SPEC]), 422, "idempotency_mismatch")


def test_a_plan_runs_and_verifies(each_world: World) -> None:
    world = each_world
    dataset = world.dataset()
    body = plan(world, dataset).json()
    first, second = (job["id"] for job in body["jobs"])
    release = release_of(world, first)
    assert world.requester.get(f"/v1/plans/{body['id']}").json()["state"] == "started"
    assert_problem(world.requester.post(f"/v1/jobs/{second}/cancel"), 409, "not_cancellable")
    release_of(world, second)
    assert world.requester.get(f"/v1/plans/{body['id']}").json()["state"] == "released"
    assert world.requester.get(f"/v1/releases/{release}").json()["job"] == first
    books = world.owner.get(f"/v1/datasets/{dataset}/ledger").json()
    assert [(e["kind"], len(e["jobs"]), len(e["releases"])) for e in books["entries"]] == [
        ("plan", 2, 2)
    ]
    assert world.owner.get(f"/v1/datasets/{dataset}/ledger/verify").json()["ok"] is True


def test_a_wrong_job_of_a_plan_is_named(world: World) -> None:
    dataset = world.dataset()
    wrong = {**SPEC, "outputs": {"0": 1, "nine": 1}}
    answer = plan(world, dataset, jobs=[SPEC, wrong])
    assert answer.status_code == 422
    assert answer.json()["field"].startswith("jobs[1].outputs")
    assert_problem(plan(world, dataset, jobs=[]), 422, "invalid_request", "jobs")
    inner = plan(world, dataset, jobs=[SPEC, {**SPEC, "dry_run": True}])
    assert_problem(inner, 422, "invalid_request", "jobs[1].dry_run")


def test_a_job_above_the_threshold_waits_for_the_owner(each_world: World) -> None:
    world = each_world
    dataset = world.dataset(budget={**BUDGET, "approval_above": {"epsilon": 1e-3}})
    quote = world.requester.post(f"/v1/datasets/{dataset}/quotes", json=SPEC).json()
    assert (quote["admitted"], quote["needs_approval"]) == (True, True)
    job = world.order(dataset, "k").json()
    assert job["state"] == "awaiting_approval"
    where = f"/v1/jobs/{job['id']}"
    assert_problem(world.requester.post(f"{where}/approve"), 403, "forbidden")
    assert_problem(world.stranger.post(f"{where}/approve"), 404, "not_found")
    approved = world.owner.post(f"{where}/approve")
    assert (approved.status_code, approved.json()["state"]) == (200, "reserved")
    assert_problem(world.owner.post(f"{where}/deny"), 409, "not_awaiting_approval")
    second = world.order(dataset, "k2").json()
    denied = world.owner.post(f"/v1/jobs/{second['id']}/deny")
    assert (denied.status_code, denied.json()["state"]) == (200, "denied")
    assert world.order(dataset, "k2").json()["state"] == "denied"
    assert world.owner.get(f"/v1/datasets/{dataset}/ledger/verify").json()["ok"] is True


def test_an_organisation_has_its_share(each_world: World) -> None:
    world = each_world
    requester = world.organisations["requester"]
    dataset = world.dataset()
    quote = world.requester.post(f"/v1/datasets/{dataset}/quotes", json=SPEC).json()
    # So small a batch is cheapest at a finite order: half as much again as it costs there.
    order, cost = next(iter(quote["charge"]["orders"].items()))
    cap = BUDGET["epsilon"] * 1.5 * cost / quote["remaining"]["orders"][order]
    budget = {**BUDGET, "organisation_caps": {requester: {"epsilon": cap}}}
    shown = world.owner.put(f"/v1/datasets/{dataset}/budget", json=budget)
    assert shown.status_code == 200, shown.text
    assert shown.json()["organisation_caps"] == {requester: {"epsilon": cap}}
    assert world.order(dataset, "1").status_code == 202
    seen = world.requester.get(f"/v1/datasets/{dataset}/budget").json()
    assert seen["organisation_caps"] == {requester: {"epsilon": cap}}
    left = next(s["remaining"]["epsilon"] for s in seen["your_share"] if s["order"] == order)
    assert left == pytest.approx(cost / 2, rel=1e-2)
    refused = assert_problem(world.order(dataset, "2"), 409, "budget_exhausted")
    assert refused["scope"] == "organisation"
    quote = world.requester.post(f"/v1/datasets/{dataset}/quotes", json=SPEC).json()
    assert (quote["admitted"], quote["further"], quote["remaining_after"]) == (False, 0, None)
    assert world.owner.get(f"/v1/datasets/{dataset}/ledger/verify").json()["ok"] is True


def test_a_crossed_filter_has_nothing_left(each_world: World) -> None:
    """Tightened below one release's delta, order infinity admits nothing and says so."""
    world = each_world
    use = {"kind": "few_large", "releases": 1}
    dataset = world.dataset(budget={**BUDGET, "use": use})
    where = f"/v1/datasets/{dataset}/budget"
    tightened = world.owner.put(where, json={**BUDGET, "use": use, "delta": 9.9e-6})
    assert tightened.status_code == 200
    job = world.order(dataset, "k").json()
    assert job["charge"]["epsilon"] == "inf"
    basic = world.owner.get(where).json()["filters"][0]
    assert (basic["spent"]["epsilon"], basic["reserved"]["epsilon"]) == (0.0, "inf")
    assert basic["remaining"] == {"epsilon": 0.0, "delta": 0.0}
    release_of(world, job["id"])
    basic = world.owner.get(where).json()["filters"][0]
    assert (basic["spent"]["epsilon"], basic["reserved"]["epsilon"]) == ("inf", 0.0)
    assert basic["remaining"] == {"epsilon": 0.0, "delta": 0.0}
    quote = world.requester.post(f"/v1/datasets/{dataset}/quotes", json=SPEC).json()
    assert (quote["remaining"]["epsilon"], quote["charge"]["epsilon"]) == (0.0, "inf")


def test_another_organisation_does_not_see_the_caps_of_others(world: World) -> None:
    budget = {
        **BUDGET,
        "organisation_caps": {world.organisations["stranger"]: {"epsilon": 1.0}},
    }
    dataset = world.dataset(budget=budget)
    seen = world.requester.get(f"/v1/datasets/{dataset}/budget").json()
    assert (seen["organisation_caps"], seen["your_share"]) == ({}, None)


def test_datasets_of_a_group_share_their_books(each_world: World) -> None:
    world = each_world
    first = world.dataset()
    made = world.owner.post("/v1/datasets", json={**FACTS, "name": "second", "budget_group": first})
    assert made.status_code == 201, made.text
    second = made.json()["id"]
    where = f"/v1/datasets/{second}"
    assert made.json()["budget_group"] == first
    assert world.owner.post(f"{where}/snapshots", content=npz()).status_code == 201
    grant = {"organisation": world.organisations["requester"], "scopes": ["quote", "request"]}
    assert world.owner.post(f"{where}/grants", json=grant).status_code == 201
    jobs = [world.order(dataset, "k").json()["id"] for dataset in (first, second)]
    for job in jobs:
        release_of(world, job)
    books = [world.owner.get(f"/v1/datasets/{d}/ledger").json() for d in (first, second)]
    assert books[0]["entries"] == books[1]["entries"]
    assert [e["dataset"] for e in books[0]["entries"]] == [first, second]
    assert books[0]["head"] == books[1]["head"]
    exports = [world.owner.get(f"/v1/datasets/{d}/ledger/export").text for d in (first, second)]
    assert exports[0] == exports[1]
    budgets = [world.owner.get(f"/v1/datasets/{d}/budget").json() for d in (first, second)]
    assert budgets[0] == budgets[1]
    assert world.owner.get(f"{where}/ledger/verify").json()["ok"] is True


@pytest.mark.parametrize("group", ["ds_" + "0" * 32, "no_such"])
def test_a_group_is_a_dataset_of_the_same_organisation(world: World, group: str) -> None:
    body = {**FACTS, "name": "second", "budget_group": group}
    assert_problem(
        world.owner.post("/v1/datasets", json=body), 422, "invalid_request", "budget_group"
    )
    others = world.dataset()
    body = {**FACTS, "name": "second", "budget_group": others}
    assert_problem(
        world.stranger.post("/v1/datasets", json=body), 422, "invalid_request", "budget_group"
    )


def test_a_statement_tells_who_spent_what_and_when(each_world: World) -> None:
    world = each_world
    dataset = world.dataset()
    where = f"/v1/datasets/{dataset}/statement"
    empty = world.owner.get(where)
    assert empty.status_code == 200, empty.text
    assert empty.json()["as_if_fixed_in_advance"] is None
    assert empty.json()["organisations"] == empty.json()["over_time"] == []
    jobs = [world.order(dataset, f"k{i}").json() for i in range(3)]
    for job in jobs[:2]:
        release_of(world, job["id"])
    body = world.owner.get(where).json()
    (own,) = body["organisations"]
    assert (own["organisation"], own["entries"]) == (world.organisations["requester"], 3)
    assert own["charge"]["epsilon"] == pytest.approx(3 * jobs[0]["charge"]["epsilon"])
    used = [point["used"]["inf"] for point in body["over_time"]]
    assert len(used) == 2
    assert used[1] == pytest.approx(2 * used[0])
    # Two alike, composed: dearer than one, cheaper than both one by one at the same delta.
    fixed = body["as_if_fixed_in_advance"]
    assert fixed["delta"] == body["guarantee"]["delta"]
    assert 0 < fixed["lower"] <= fixed["upper"] < 2 * jobs[0]["charge"]["epsilon"]
    assert body["guarantee"] == world.owner.get(f"/v1/datasets/{dataset}/budget").json()
    assert_problem(world.requester.get(where), 403, "forbidden")
    assert_problem(world.stranger.get(where), 404, "not_found")
