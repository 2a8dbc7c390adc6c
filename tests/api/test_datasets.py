"""Datasets, grants and budgets through HTTP; every refusal leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.world import BUDGET, FACTS, World, assert_problem, counts, files

DATASET_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name"),
    ({"name": "  "}, "name"),
    ({"name": "a\nb"}, "name"),
    ({"name": "x" * 201}, "name"),
    ({"name": 5}, "name"),
    ({"shape": [8, 8]}, "shape"),
    ({"shape": [8, 8, 2]}, "shape"),
    ({"shape": [0, 8, 1]}, "shape[0]"),
    ({"shape": [8, -8, 1]}, "shape[1]"),
    ({"shape": [8, 8.5, 1]}, "shape[1]"),
    ({"shape": [8, 100_000, 1]}, "shape[1]"),
    ({"value_range": [0, 1]}, "value_range"),
    ({"classes": ["0", "0"]}, "classes"),
    ({"classes": []}, "classes"),
    ({"classes": ["a/b"]}, "classes[0]"),
    ({"classes": [".."]}, "classes"),
    ({"classes": [0, 1]}, "classes[0]"),
    ({"public_size": 0}, "public_size"),
    ({"public_size": -5}, "public_size"),
    ({"public_size": 2.5}, "public_size"),
    ({"public_size": "40"}, "public_size"),
    ({"public_size": True}, "public_size"),
    ({"public_size": 10**12}, "public_size"),
    ({"public_class_sizes": {"0": 20}}, "public_class_sizes"),
    ({"public_class_sizes": {"0": 20, "1": 0}}, "public_class_sizes.1"),
    ({"unit": ""}, "unit"),
    ({"max_records_per_unit": 0}, "max_records_per_unit"),
    ({"max_records_per_unit": 2}, "max_records_per_unit"),
    ({"budget_group": "other"}, "budget_group"),
    ({"attestation": ""}, "attestation"),
    ({"unknown": 1}, "unknown"),
]


@pytest.mark.parametrize(("change", "field"), DATASET_FAULTS, ids=str)
def test_a_wrong_fact_is_refused_by_name(calm: World, change: dict[str, Any], field: str) -> None:
    answer = calm.owner.post("/v1/datasets", json={**FACTS, **change})
    assert_problem(answer, 422, "invalid_request", field)


@pytest.mark.parametrize("field", ["name", "shape", "public_size", "attestation"])
def test_a_missing_fact_is_refused_by_name(calm: World, field: str) -> None:
    body = {k: v for k, v in FACTS.items() if k != field}
    assert_problem(calm.owner.post("/v1/datasets", json=body), 422, "invalid_request", field)


def test_a_dataset_keeps_its_facts(world: World) -> None:
    made = world.owner.post("/v1/datasets", json=FACTS)
    assert made.status_code == 201
    body = made.json()
    assert body["id"].startswith("ds_")
    assert {k: body[k] for k in FACTS} == FACTS
    assert body["organisation"] == world.organisations["hospital"]
    assert world.owner.get(f"/v1/datasets/{body['id']}").json() == body


def test_a_name_is_taken_once_in_an_organisation(world: World) -> None:
    assert world.owner.post("/v1/datasets", json=FACTS).status_code == 201
    assert_problem(world.owner.post("/v1/datasets", json=FACTS), 409, "name_taken")
    assert world.stranger.post("/v1/datasets", json=FACTS).status_code == 201
    again = world.admin.post("/v1/organisations", json={"name": "hospital"})
    assert_problem(again, 409, "name_taken")


def test_a_key_needs_an_organisation(world: World) -> None:
    for organisation in ("org_" + "0" * 32, "nothing"):
        answer = world.admin.post(
            "/v1/keys", json={"organisation": organisation, "scopes": ["owner"]}
        )
        assert_problem(answer, 422, "invalid_request", "organisation")
    answer = world.admin.post(
        "/v1/keys", json={"organisation": world.organisations["hospital"], "scopes": ["god"]}
    )
    assert_problem(answer, 422, "invalid_request", "scopes[0]")


def test_lists_turn_pages(each_world: World) -> None:
    world = each_world
    ids = [world.dataset(name=f"d{i}", snapshot=False, granted=i % 2 == 0) for i in range(5)]
    for client, expected in ((world.owner, ids), (world.requester, ids[::2]), (world.stranger, [])):
        seen: list[str] = []
        cursor = None
        while True:
            params = {"limit": "2"} | ({} if cursor is None else {"cursor": cursor})
            page = client.get("/v1/datasets", params=params).json()
            assert len(page["datasets"]) <= 2
            seen += [d["id"] for d in page["datasets"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert seen == expected
    names = [
        o["name"]
        for o in world.admin.get("/v1/organisations", params={"limit": 1000}).json()[
            "organisations"
        ]
    ]
    assert names == ["operator", "hospital", "requester", "stranger"]
    first = world.admin.get("/v1/organisations", params={"limit": 1}).json()
    second = world.admin.get(
        "/v1/organisations", params={"limit": 1, "cursor": first["next_cursor"]}
    ).json()
    assert second["organisations"][0]["name"] == "hospital"


@pytest.mark.parametrize("cursor", ["x", "W10", "bnVsbA", "WzEsMl0", "é", "WyJhIiwiYiJd", "%00"])
def test_a_made_up_cursor_is_refused(calm: World, cursor: str) -> None:
    answer = calm.owner.get("/v1/datasets", params={"cursor": cursor})
    assert_problem(answer, 422, "invalid_request", "cursor")


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "1e3"])
def test_a_page_has_a_size(calm: World, limit: str) -> None:
    answer = calm.owner.get("/v1/datasets", params={"limit": limit})
    assert_problem(answer, 422, "invalid_request", "limit")


# --------------------------------------------------------------------------------------------------
# Grants
# --------------------------------------------------------------------------------------------------


def test_a_second_grant_replaces_the_first(each_world: World) -> None:
    world = each_world
    dataset = world.dataset(snapshot=False)
    where = f"/v1/datasets/{dataset}/grants"
    organisation = world.organisations["requester"]
    body = {"organisation": organisation, "scopes": ["quote"]}
    assert world.owner.post(where, json=body).json()["scopes"] == ["quote"]
    (grant,) = world.owner.get(where).json()["grants"]
    assert (grant["organisation"], grant["scopes"]) == (organisation, ["quote"])


GRANT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"organisation": "org_" + "0" * 32}, "organisation"),
    ({"organisation": ""}, "organisation"),
    ({"organisation": 3}, "organisation"),
    ({"scopes": []}, "scopes"),
    ({"scopes": ["owner"]}, "scopes[0]"),
    ({"until": "tomorrow"}, "until"),
]


def test_a_wrong_grant_is_refused_by_name(world: World) -> None:
    dataset = world.dataset(snapshot=False, granted=False)
    for change, field in GRANT_FAULTS:
        body = {"organisation": world.organisations["requester"], "scopes": ["quote"], **change}
        answer = world.owner.post(f"/v1/datasets/{dataset}/grants", json=body)
        assert_problem(answer, 422, "invalid_request", field)
    assert world.owner.get(f"/v1/datasets/{dataset}/grants").json() == {"grants": []}


# --------------------------------------------------------------------------------------------------
# Budget
# --------------------------------------------------------------------------------------------------


BUDGET_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"epsilon": 0}, "epsilon"),
    ({"epsilon": -1.0}, "epsilon"),
    ({"epsilon": 1e300}, "epsilon"),
    ({"epsilon": 1e-300}, "epsilon"),
    ({"epsilon": "nan"}, "epsilon"),
    ({"epsilon": "inf"}, "epsilon"),
    ({"epsilon": "six"}, "epsilon"),
    ({"epsilon": [6]}, "epsilon"),
    ({"epsilon": True}, "epsilon"),
    ({"epsilon": None}, "epsilon"),
    ({"delta": 0}, "delta"),
    ({"delta": 1}, "delta"),
    ({"delta": 2.0}, "delta"),
    ({"delta": -1e-5}, "delta"),
    ({"delta": 1e-30}, "delta"),
    ({"use": {"kind": "few_large", "releases": 0}}, "use.releases"),
    ({"use": {"kind": "few_large", "releases": 1.5}}, "use.releases"),
    ({"use": {"kind": "few_large"}}, "use.releases"),
    ({"use": {"kind": "many_small", "releases": 3}}, "use.releases"),
    ({"use": {"kind": "other"}}, "use"),
    ({"use": "few_large"}, "use"),
    ({"organisation_caps": []}, "organisation_caps"),
    (
        {"organisation_caps": {"org_" + "0" * 32: {"epsilon": 1.0}}},
        "organisation_caps.org_" + "0" * 32,
    ),
    ({"organisation_caps": {"org_x": {"epsilon": 7.0}}}, "organisation_caps.org_x.epsilon"),
    ({"organisation_caps": {"org_x": {"epsilon": 0}}}, "organisation_caps.org_x.epsilon"),
    ({"organisation_caps": {"org_x": {}}}, "organisation_caps.org_x.epsilon"),
    ({"organisation_caps": {"org_x": 1.0}}, "organisation_caps.org_x"),
    ({"approval_above": {"epsilon": 6.1}}, "approval_above.epsilon"),
    ({"approval_above": {"epsilon": "nan"}}, "approval_above.epsilon"),
    ({"approval_above": 3.0}, "approval_above"),
]


def test_a_wrong_budget_is_refused_by_name(each_world: World) -> None:
    world = each_world
    dataset = world.dataset(budget=None, snapshot=False, granted=False)
    before = counts(world.database)
    for change, field in BUDGET_FAULTS:
        answer = world.owner.put(f"/v1/datasets/{dataset}/budget", json={**BUDGET, **change})
        assert_problem(answer, 422, "invalid_request", field)
    assert counts(world.database) == before
    assert_problem(world.owner.get(f"/v1/datasets/{dataset}/budget"), 409, "no_budget")


def test_a_budget_is_set_once_and_never_raised(each_world: World) -> None:
    world = each_world
    dataset = world.dataset(budget=None, snapshot=False)
    where = f"/v1/datasets/{dataset}/budget"
    first = world.owner.put(where, json=BUDGET)
    assert first.status_code == 201
    before = counts(world.database)
    # The very same again is the answer to a lost reply, however the number is written.
    same = world.owner.put(where, json={**BUDGET, "epsilon": "6.00"})
    assert same.status_code == 200
    assert same.json() == first.json()
    assert counts(world.database) == before
    assert world.owner.get(where).json() == first.json()
    assert world.requester.get(where).json() == first.json()
    for change in ({"epsilon": 7.0}, {"delta": 2e-5}, {"use": {"kind": "many_small"}}):
        answer = world.owner.put(where, json={**BUDGET, **change})
        assert_problem(answer, 409, "budget_not_raised")
    assert counts(world.database) == before
    tightened = world.owner.put(where, json={**BUDGET, "epsilon": 5.0})
    assert (tightened.status_code, tightened.json()["epsilon"]) == (200, 5.0)
    assert tightened.json()["filters"][0]["cap"]["epsilon"] == 5.0


def test_a_budget_shows_its_filters(world: World) -> None:
    dataset = world.dataset(snapshot=False)
    body = world.owner.get(f"/v1/datasets/{dataset}/budget").json()
    assert (body["epsilon"], body["delta"], body["use"]) == (6.0, 1e-5, BUDGET["use"])
    basic = next(f for f in body["filters"] if f["order"] == "inf")
    assert basic["cap"] == {"epsilon": 6.0, "delta": basic["delta_share"]}
    assert basic["remaining"] == basic["cap"]
    assert basic["spent"] == basic["reserved"] == {"epsilon": 0.0, "delta": 0.0}
    assert basic["delta_per_release"] * 5 <= basic["delta_share"]
    assert sum(f["delta_share"] for f in body["filters"]) <= 1e-5 * (1 + 1e-12)


def test_nothing_private_is_made_before_an_upload(world: World) -> None:
    world.dataset(snapshot=False)
    assert files(world.settings) == set()
