"""Every route of the app against no key, a wrong key, a wrong scope and a foreign organisation."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from fastapi.routing import APIRoute

from accounting.tables import KeyRow
from api.app import ROUTERS
from api.auth import ACCESS, SCOPES
from tests.api.world import (
    BUDGET,
    FACTS,
    SPEC,
    World,
    assert_problem,
    npz,
    release_of,
    running,
    write_card,
)
from worker.settings import Settings

ROUTES = sorted(
    (method, route.path)
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in route.methods or ()
)
CLOSED = [route for route in ROUTES if not ACCESS[route].public]
# A valid body for each call that has one, so that a refusal is not about the body.
BODIES: dict[tuple[str, str], object] = {
    ("POST", "/v1/organisations"): {"name": "another"},
    ("POST", "/v1/keys"): {"organisation": "org_" + "0" * 32, "scopes": ["owner"]},
    ("POST", "/v1/datasets"): FACTS,
    ("POST", "/v1/datasets/{dataset_id}/grants"): {
        "organisation": "org_" + "0" * 32,
        "scopes": ["quote"],
    },
    ("PUT", "/v1/datasets/{dataset_id}/budget"): BUDGET,
    ("POST", "/v1/datasets/{dataset_id}/quotes"): SPEC,
    ("POST", "/v1/datasets/{dataset_id}/jobs"): SPEC,
    ("POST", "/v1/datasets/{dataset_id}/plans"): {"jobs": [SPEC]},
    ("POST", "/v1/accounting/epsilon"): {
        "mechanism": {"kind": "gaussian", "noise_multiplier": 1.0},
        "delta": 1e-5,
    },
    ("POST", "/v1/accounting/delta"): {
        "mechanism": {"kind": "gaussian", "noise_multiplier": 1.0},
        "epsilon": 1.0,
    },
    ("POST", "/v1/accounting/profile"): {
        "mechanism": {"kind": "gaussian", "noise_multiplier": 1.0},
        "epsilons": [1.0],
    },
    ("POST", "/v1/accounting/tradeoff"): {
        "mechanism": {"kind": "gaussian", "noise_multiplier": 1.0},
        "alphas": [0.1],
    },
    ("POST", "/v1/accounting/compare"): {
        "mechanism": {"kind": "gaussian", "noise_multiplier": 1.0},
        "delta": 1e-5,
    },
    ("POST", "/v1/accounting/calibrate"): {
        "mechanism": {"kind": "gaussian"},
        "free": "noise_multiplier",
        "target": {"epsilon": 1.0, "delta": 1e-5},
    },
    ("POST", "/v1/accounting/allocate"): {
        "stages": [{"mechanism": {"kind": "gaussian"}, "weight": 1.0}],
        "target": {"epsilon": 1.0, "delta": 1e-5},
    },
    ("POST", "/v1/certificates/verify"): {"certificate": {}},
}


def call(
    client: httpx.Client, route: tuple[str, str], key: str | None = None, **ids: str
) -> httpx.Response:
    """The route called with valid ids and a valid body; ids of nothing where none are given."""
    method, path = route
    prefixes = {"dataset_id": "ds", "job_id": "job", "release_id": "rel", "plan_id": "ent"}
    for name, prefix in prefixes.items():
        path = path.replace("{" + name + "}", ids.get(name, f"{prefix}_{'0' * 32}"))
    headers = {"Idempotency-Key": "k"} if path.endswith(("/jobs", "/plans")) else {}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    if path.endswith("/snapshots") and method == "POST":
        return client.request(method, path, content=npz(), headers=headers)
    return client.request(method, path, json=BODIES.get(route), headers=headers)


def test_every_route_has_an_entry_and_every_entry_a_route() -> None:
    assert set(ROUTES) == set(ACCESS)


def test_only_these_routes_are_open() -> None:
    assert {path for method, path in ROUTES if ACCESS[method, path].public} == {
        "/livez",
        "/readyz",
        "/.well-known/epsilond-keys.json",
        "/openapi.json",
        "/",
        "/docs",
        "/problems",
        "/problems/{slug}",
    }


def test_a_body_stands_here_for_every_call_that_takes_one(world: World) -> None:
    document = world.nobody.get("/openapi.json").json()
    with_json = {
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    }
    assert with_json == set(BODIES)


@pytest.fixture(scope="module")
def peopled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, dict[str, str]]]:
    """A service with a released job, a stranger, and a key for each scope alone."""
    folder = tmp_path_factory.mktemp("peopled")
    write_card(folder / "public")
    settings = Settings(home=folder / "home", public_models=folder / "public", sweep_seconds=3600)
    with running(settings) as world:
        for scope in SCOPES:
            world.join(f"only-{scope}", f"only-{scope}", [scope])
        dataset = world.dataset()
        job = world.order(dataset, "k").json()["id"]
        release = release_of(world, job)
        yield world, {"dataset_id": dataset, "job_id": job, "release_id": release}


@pytest.mark.parametrize("route", CLOSED, ids=" ".join)
def test_no_key_and_a_wrong_key_are_401(
    peopled: tuple[World, dict[str, str]], route: tuple[str, str]
) -> None:
    world, ids = peopled
    for key in ("epk_" + "A" * 43, "two words", "x" * 5000, None):
        answer = call(world.nobody, route, key, **ids)
        assert_problem(answer, 401, "unauthenticated")
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("route", CLOSED, ids=" ".join)
def test_a_wrong_scope_is_403(
    peopled: tuple[World, dict[str, str]], route: tuple[str, str]
) -> None:
    world, ids = peopled
    for scope in SCOPES:
        if scope not in ACCESS[route].scopes:
            body = assert_problem(
                call(world.clients[f"only-{scope}"], route, **ids), 403, "forbidden"
            )
            assert body["scopes"] == sorted(ACCESS[route].scopes)


WITH_OBJECT = [route for route in CLOSED if "{" in route[1]]


@pytest.mark.parametrize("route", WITH_OBJECT, ids=" ".join)
def test_an_unknown_object_is_404(
    peopled: tuple[World, dict[str, str]], route: tuple[str, str]
) -> None:
    world, _ = peopled
    for scope in ACCESS[route].scopes:
        assert_problem(call(world.clients[f"only-{scope}"], route), 404, "not_found")


# What a key of another organisation with every scope but admin may do with a dataset, job or
# release that is not its own: nothing. The rest of the table has no object.
@pytest.mark.parametrize("route", WITH_OBJECT, ids=" ".join)
def test_a_foreign_object_is_404_exactly_as_an_unknown_one(
    peopled: tuple[World, dict[str, str]], route: tuple[str, str]
) -> None:
    world, ids = peopled
    foreign = assert_problem(call(world.stranger, route, **ids), 404, "not_found")
    unknown = assert_problem(call(world.stranger, route), 404, "not_found")
    assert foreign == unknown


def test_the_documentation_names_every_route() -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "api.md").read_text()
    for method, path in ROUTES:
        shown = re.sub(r"\{(dataset|job|release|plan)_id\}", "{id}", path)
        assert re.search(rf"`{method} {re.escape(shown)}[`?]", text), (method, path)


def test_a_grant_opens_what_it_names_and_nothing_else(world: World) -> None:
    dataset = world.dataset(granted=False)
    where = f"/v1/datasets/{dataset}"
    assert_problem(world.requester.post(f"{where}/quotes", json=SPEC), 404)
    body = {"organisation": world.organisations["requester"], "scopes": ["quote"]}
    assert world.owner.post(f"{where}/grants", json=body).status_code == 201
    assert world.requester.post(f"{where}/quotes", json=SPEC).status_code == 200
    assert world.requester.get(where).status_code == 200
    assert world.requester.get(f"{where}/budget").status_code == 200
    assert_problem(world.order(dataset, "k"), 404)
    body["scopes"] = ["quote", "request"]
    assert world.owner.post(f"{where}/grants", json=body).status_code == 201
    assert world.order(dataset, "k").status_code == 202
    # A requester's grant shows nothing of the owner's.
    for path in ("snapshots", "grants", "ledger", "ledger/verify", "ledger/export"):
        assert world.requester.get(f"{where}/{path}").status_code == 403
    both = world.join("both", "requester", ["owner", "auditor", "requester"])
    for path in ("snapshots", "grants", "ledger", "ledger/verify", "ledger/export"):
        assert_problem(both.get(f"{where}/{path}"), 404)


def test_a_revoked_key_is_unknown(world: World) -> None:
    assert world.owner.get("/v1/datasets").status_code == 200
    with world.database.write() as session:
        for row in session.scalars(sa.select(KeyRow)):
            if "owner" in row.scopes:
                row.revoked_at = 1
    assert_problem(world.owner.get("/v1/datasets"), 401, "unauthenticated")


def test_keys_are_stored_as_their_digest_alone(world: World) -> None:
    body = {"organisation": world.organisations["hospital"], "scopes": ["owner"]}
    made = world.admin.post("/v1/keys", json=body).json()
    assert len(made["key"]) >= 43  # 256 bits in base64
    with world.database.read() as session:
        row = session.get_one(KeyRow, made["id"])
    assert row.sha256 == hashlib.sha256(made["key"].encode()).hexdigest()
    for path in world.settings.home.rglob("*"):
        if path.is_file():
            assert made["key"].encode() not in path.read_bytes()


def test_a_body_cannot_choose_the_organisation(world: World) -> None:
    answer = world.owner.post(
        "/v1/datasets", json={**FACTS, "organisation": world.organisations["stranger"]}
    )
    assert_problem(answer, 422, "invalid_request", "organisation")
