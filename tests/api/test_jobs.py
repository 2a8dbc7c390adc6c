"""Quotes and jobs through HTTP: what is charged, replayed, refused and raced for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from accounting import bounds, filters
from accounting.mechanisms import Mechanism, mechanism_from_json
from accounting.tables import JobRow
from tests.api.world import (
    BUDGET,
    JSON,
    SPEC,
    World,
    assert_problem,
    counts,
    files,
    npz,
    release_of,
)

MANY_SMALL: JSON = {**BUDGET, "use": {"kind": "many_small"}}


def changed(**changes: Any) -> JSON:
    """SPEC with fields replaced; a name with __ stands for a field of the preset."""
    spec: JSON = copy.deepcopy(SPEC)
    for name, value in changes.items():
        where, _, inner = name.partition("__")
        if inner:
            spec[where][inner] = value
        else:
            spec[name] = value
    return spec


def budget_for(world: World, orders: int) -> JSON:
    """A budget that admits exactly this many orders of SPEC, by at least one of its filters."""
    trial = world.dataset(name=f"trial-{orders}")
    quote = world.requester.post(f"/v1/datasets/{trial}/quotes", json=SPEC).json()
    mechanism = mechanism_from_json(quote["mechanism"])
    for factor in range(4 * orders + 3, 0, -1):
        body: JSON = {
            "epsilon": round(factor / 4 * quote["charge"]["epsilon"], 9),
            "delta": 1e-5,
            "use": {"kind": "few_large", "releases": orders},
        }
        if admits(mechanism, filters.family(filters.Budget.from_json(body))) == orders:
            return body
    raise AssertionError("no such budget")


def admits(mechanism: Mechanism, family: Sequence[filters.Filter]) -> int:
    """How many of the mechanism the filters admit, by hand."""
    costs = filters.charge(mechanism, family, epsilon_bound=bounds.epsilon)
    return max(
        min(
            f.cap_units // cost.epsilon_units,
            f.delta_units // cost.delta_units if f.order == "inf" else 10**9,
        )
        for f, cost in zip(family, costs, strict=True)
    )


# --------------------------------------------------------------------------------------------------
# Quotes
# --------------------------------------------------------------------------------------------------


def test_a_job_that_would_outlive_its_attempt_is_refused_before_it_is_charged(
    each_world: World,
) -> None:
    world = each_world
    dataset = world.dataset()
    before = counts(world.database)
    answer = world.order(dataset, "long", changed(outputs={"0": 900_000, "1": 1}))
    assert answer.status_code == 422, answer.text
    assert answer.json()["field"] == "outputs"
    assert "too long" in answer.json()["detail"]
    assert counts(world.database) == before


def test_a_quote_says_what_a_job_would_cost_and_charges_nothing(each_world: World) -> None:
    world = each_world
    dataset = world.dataset()
    before = counts(world.database)
    answer = world.requester.post(f"/v1/datasets/{dataset}/quotes", json=SPEC)
    assert answer.status_code == 200, answer.text
    quote = answer.json()
    assert counts(world.database) == before
    assert quote["mechanism"]["kind"] == "denoising_block"
    assert quote["mechanism"]["clip_norm"] == 1.0
    assert 0 <= quote["certificate_epsilon"]["lower"] <= quote["certificate_epsilon"]["upper"]
    assert quote["certificate_epsilon"]["delta"] == 1e-5
    # The ledger's delta is the family's share for a release, not the certificate's.
    assert 0 < quote["charge"]["delta"] < 1e-5
    assert quote["admitted"] is True
    budget = world.requester.get(f"/v1/datasets/{dataset}/budget").json()
    basic = next(f for f in budget["filters"] if f["order"] == "inf")
    assert quote["charge"]["delta"] == basic["delta_per_release"]
    assert quote["remaining"]["epsilon"] == basic["remaining"]["epsilon"]
    assert quote["remaining_after"]["epsilon"] == pytest.approx(
        quote["remaining"]["epsilon"] - quote["charge"]["epsilon"], abs=1e-9
    )
    assert len(quote["drift_ceiling"]) == SPEC["preset"]["block_steps"]
    assert quote["expected_seconds"] > 0


def test_the_quote_is_what_the_job_charges(world: World) -> None:
    dataset = world.dataset()
    quote = world.requester.post(f"/v1/datasets/{dataset}/quotes", json=SPEC).json()
    job = world.order(dataset, "k").json()
    for name in ("mechanism", "post_processing", "certificate_epsilon", "charge"):
        assert job[name] == quote[name]
    budget = world.requester.get(f"/v1/datasets/{dataset}/budget").json()
    for row in budget["filters"]:
        charged = (
            quote["charge"]["epsilon"]
            if row["order"] == "inf"
            else quote["charge"]["orders"][row["order"]]
        )
        assert row["reserved"]["epsilon"] == charged
        assert row["spent"] == {"epsilon": 0.0, "delta": 0.0}


def test_without_a_budget_or_a_snapshot_there_is_no_job(world: World) -> None:
    bare = world.dataset(budget=None, name="bare")
    assert_problem(world.requester.post(f"/v1/datasets/{bare}/quotes", json=SPEC), 409, "no_budget")
    assert_problem(world.order(bare, "k"), 409, "no_budget")
    empty = world.dataset(snapshot=False, name="empty")
    assert world.requester.post(f"/v1/datasets/{empty}/quotes", json=SPEC).status_code == 200
    assert_problem(world.order(empty, "k"), 409, "no_snapshot")
    assert counts(world.database)["jobs"] == 0


GRID: JSON = {"kind": "edm", "sigma_min": 0.002, "sigma_max": 80.0, "rho": 7.0, "steps": 39}
SPEC_FAULTS: list[tuple[JSON, str]] = [
    (changed(kind="train"), "kind"),
    (changed(kind=None), "kind"),
    (changed(outputs={}), "outputs"),
    (changed(outputs=4), "outputs"),
    (changed(outputs={"0": 0}), "outputs.0"),
    (changed(outputs={"0": -3}), "outputs.0"),
    (changed(outputs={"0": 2.5}), "outputs.0"),
    (changed(outputs={"0": "2"}), "outputs.0"),
    (changed(outputs={"0": True}), "outputs.0"),
    (changed(outputs={"0": 10**9}), "outputs.0"),
    (changed(outputs={"7": 2}), "outputs.7"),
    (changed(outputs={"0": 600_000, "1": 600_000}), "outputs"),
    (changed(preset="best"), "preset"),
    (changed(preset=None), "preset"),
    (changed(preset__weight="heavy"), "preset.weight"),
    (changed(preset__centre="private_mean"), "preset.centre"),
    (changed(preset__block_steps=0), "preset.block_steps"),
    (changed(preset__block_steps=39), "preset.block_steps"),
    (changed(preset__block_steps=2.5), "preset.block_steps"),
    (changed(preset__block_steps=None, preset__block_fraction=0), "preset.block_fraction"),
    (changed(preset__block_steps=None, preset__block_fraction=-0.1), "preset.block_fraction"),
    (changed(preset__block_steps=None, preset__block_fraction=1.01), "preset.block_fraction"),
    (changed(preset__block_fraction=0.5), "preset.block_fraction"),
    (changed(preset__sampling="fixed_size"), "preset.sampling"),
    (changed(preset__sampling="lottery"), "preset.sampling"),
    (changed(preset__subsample_size=0), "preset.subsample_size"),
    (changed(preset__subsample_size=-1), "preset.subsample_size"),
    # q > 1: more than the declared units of a class
    (changed(preset__subsample_size=21), "preset.subsample_size"),
    (changed(preset__clip_norm=0), "preset.clip_norm"),
    (changed(preset__clip_norm=-1.0), "preset.clip_norm"),
    (changed(preset__clip_norm=1e-300), "preset.clip_norm"),
    (changed(preset__clip_norm=1e300), "preset.clip_norm"),
    (changed(preset__clip_norm="1"), "preset.clip_norm"),
    (changed(preset__beta=0), "preset.beta"),
    (changed(preset__beta=-2.0), "preset.beta"),
    (changed(preset__public_model="other"), "preset.public_model"),
    (changed(preset__renoise_steps=-1), "preset.renoise_steps"),
    (changed(preset__renoise_steps=4), "preset.renoise_steps"),
    (changed(preset__refine_steps=0), "preset.refine_steps"),
    (changed(preset__refine_steps=10**6), "preset.refine_steps"),
    (changed(preset__noise=0.0), "preset.noise"),
    (
        changed(preset__schedule={**GRID, "sigma_min": 0.0}),
        "preset.schedule.sigma_min",
    ),
    (
        changed(preset__schedule={**GRID, "sigma_min": 90.0}),
        "preset.schedule.sigma_min",
    ),
    (changed(preset__schedule={**GRID, "steps": 10**6}), "preset.schedule.steps"),
    (changed(preset__schedule={"kind": "other"}), "preset.schedule.kind"),
    (changed(target={"epsilon": 0, "delta": 1e-5}), "target.epsilon"),
    (changed(target={"epsilon": -1, "delta": 1e-5}), "target.epsilon"),
    (changed(target={"epsilon": 1e-9, "delta": 1e-5}), "target.epsilon"),
    (changed(target={"epsilon": 1.0, "delta": 0}), "target.delta"),
    (changed(target={"epsilon": 1.0, "delta": 1}), "target.delta"),
    (changed(target={"epsilon": 1.0, "delta": "nan"}), "target.delta"),
    (changed(target={"delta": 1e-5}), "target.epsilon"),
    (changed(form="raw"), "form"),
    (changed(max_attempts=2), "max_attempts"),
    (changed(seed=4), "seed"),
]


def test_a_wrong_spec_is_refused_by_name_and_leaves_nothing(world: World) -> None:
    dataset = world.dataset()
    rows, kept = counts(world.database), files(world.settings)
    for i, (spec, field) in enumerate(SPEC_FAULTS):
        answer = world.order(dataset, f"k{i}", spec)
        body = assert_problem(answer, 422)
        assert body["code"] in ("invalid_request", "invalid_mechanism")
        assert body["field"] == field, (spec, body)
        quote = world.requester.post(f"/v1/datasets/{dataset}/quotes", json=spec)
        assert quote.json() == body
    for text in ("NaN", "Infinity", "1e999", "-Infinity"):
        raw = f'{{"kind": "denoise", "outputs": {{"0": 1}}, "preset": {{"clip_norm": {text}}}}}'
        answer = world.requester.post(
            f"/v1/datasets/{dataset}/jobs",
            content=raw.encode(),
            headers={"Content-Type": "application/json", "Idempotency-Key": text},
        )
        assert_problem(answer, 422, "invalid_request", "preset.clip_norm")
    assert counts(world.database) == rows
    assert files(world.settings) == kept


def test_a_vacuous_block_is_refused_unless_asked_for(world: World) -> None:
    dataset = world.dataset(shape=[8, 8, 1])
    spec = changed(preset__weight="density", preset__centre=None)
    assert_problem(world.order(dataset, "k", spec), 422, "invalid_request", "preset.weight")
    assert world.order(dataset, "k2", {**spec, "allow_vacuous": True}).status_code == 202


# --------------------------------------------------------------------------------------------------
# Ordering
# --------------------------------------------------------------------------------------------------


def test_a_job_is_reserved_and_its_message_sent(each_world: World) -> None:
    world = each_world
    dataset = world.dataset()
    answer = world.order(dataset, "k")
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert job["state"] == "reserved"
    assert job["spec"] == SPEC
    assert job["progress"] == {"done": 0, "total": 4}
    assert job["release"] is job["problem"] is None
    assert world.requester.get(answer.headers["location"]).json() == job
    assert world.owner.get(answer.headers["location"]).json() == job
    messages = list((world.settings.broker_folder / "messages").iterdir())
    assert len(messages) == 1
    # The broker is given an id and nothing else.
    text = messages[0].read_text()
    assert job["id"] not in text.replace("eyJ", "") or "clip_norm" not in text
    assert "clip_norm" not in text


def test_the_same_key_and_body_is_the_same_job_for_ever(each_world: World) -> None:
    world = each_world
    dataset = world.dataset()
    first = world.order(dataset, "k").json()
    rows = counts(world.database)
    # Order of names and spaces don't make another body.
    again = world.order(dataset, "k", dict(reversed(SPEC.items())))
    assert again.status_code == 202
    assert again.json() == first
    for spec in (changed(outputs={"0": 2, "1": 3}), {**SPEC, "dry_run": False}):
        assert_problem(world.order(dataset, "k", spec), 422, "idempotency_mismatch")
    assert counts(world.database) == rows
    release = release_of(world, first["id"])
    replayed = world.order(dataset, "k").json()
    assert (replayed["id"], replayed["state"]) == (first["id"], "released")
    assert replayed["release"] == release
    # Another organisation's key of the same text is another key.
    other = world.join("other", "other", ["requester"])
    grant = {"organisation": world.organisations["other"], "scopes": ["request"]}
    assert world.owner.post(f"/v1/datasets/{dataset}/grants", json=grant).status_code == 201
    assert world.order(dataset, "k", client=other).json()["id"] != first["id"]


def test_a_replay_needs_neither_budget_nor_accountant(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = world.dataset(budget=budget_for(world, 1))
    first = world.order(dataset, "k").json()
    assert_problem(world.order(dataset, "k2"), 409, "budget_exhausted")

    def never(*_: object, **__: object) -> object:
        raise AssertionError

    monkeypatch.setattr("accounting.quotes.plan_denoise", never)
    assert world.order(dataset, "k").json() == first


@pytest.mark.parametrize("key", [None, "", "x" * 201, "two words"])
def test_a_job_needs_an_idempotency_key(world: World, key: str | None) -> None:
    dataset = world.dataset()
    headers = {} if key is None else {"Idempotency-Key": key}
    answer = world.requester.post(f"/v1/datasets/{dataset}/jobs", json=SPEC, headers=headers)
    assert_problem(answer, 422, "invalid_request", "idempotency-key")
    assert counts(world.database)["jobs"] == 0


def test_a_dry_run_is_a_quote(world: World) -> None:
    dataset = world.dataset()
    quote = world.requester.post(f"/v1/datasets/{dataset}/quotes", json=SPEC).json()
    answer = world.order(dataset, "k", {**SPEC, "dry_run": True})
    assert answer.status_code == 200
    assert answer.json() == quote
    assert counts(world.database)["jobs"] == 0


def test_over_budget_is_409_with_the_figures(each_world: World) -> None:
    world = each_world
    dataset = world.dataset(budget=budget_for(world, 1))
    first = world.order(dataset, "k").json()
    rows, kept = counts(world.database), files(world.settings)
    body = assert_problem(world.order(dataset, "k2"), 409, "budget_exhausted")
    assert counts(world.database) == rows
    assert files(world.settings) == kept
    by_order = {
        name: {row["order"]: row for row in body[name]}
        for name in ("requested", "remaining", "blocking")
    }
    assert by_order["requested"]["inf"]["epsilon"] == first["charge"]["epsilon"]
    assert by_order["remaining"]["inf"]["delta"] == 0.0
    assert "delta" in by_order["blocking"]["inf"]["exceeds"]
    assert set(by_order["blocking"]) == set(by_order["requested"]) == set(by_order["remaining"])
    assert "largest_that_fits" in body
    quote = world.requester.post(f"/v1/datasets/{dataset}/quotes", json=SPEC).json()
    assert quote["admitted"] is False
    assert quote["remaining_after"] is None
    # A job that never started gives its charge back.
    assert world.requester.post(f"/v1/jobs/{first['id']}/cancel").status_code == 200
    assert world.order(dataset, "k3").status_code == 202


def test_the_largest_that_fits_does_fit(world: World) -> None:
    dataset = world.dataset(budget={**MANY_SMALL, "epsilon": 1.0})
    spec = changed(outputs={"0": 2000, "1": 1000}, preset__clip_norm=12.5, preset__block_steps=14)
    body = assert_problem(world.order(dataset, "k", spec), 409, "budget_exhausted")
    found = body["largest_that_fits"]["outputs"]
    assert 1 <= found["1"] <= found["0"] < 2000
    assert world.order(dataset, "k2", {**spec, "outputs": found}).status_code == 202
    assert_problem(world.order(dataset, "k3", spec), 409, "budget_exhausted")


def test_cancel_takes_back_only_what_never_started(each_world: World) -> None:
    world = each_world
    dataset = world.dataset()
    job = world.order(dataset, "k").json()["id"]
    answer = world.requester.post(f"/v1/jobs/{job}/cancel")
    assert answer.status_code == 200
    assert answer.json()["state"] == "cancelled"
    assert_problem(world.requester.post(f"/v1/jobs/{job}/cancel"), 409, "not_cancellable")
    done = world.order(dataset, "k2").json()["id"]
    release_of(world, done)
    rows = counts(world.database)
    assert_problem(world.requester.post(f"/v1/jobs/{done}/cancel"), 409, "not_cancellable")
    assert counts(world.database) == rows
    # The owner can look, but the order is not the owner's.
    both = world.join("both", "hospital", ["owner", "requester"])
    assert both.get(f"/v1/jobs/{done}").status_code == 200
    assert_problem(both.post(f"/v1/jobs/{done}/cancel"), 404)


def test_a_failed_job_shows_one_code_and_no_times(world: World) -> None:
    dataset = world.dataset()
    job = world.order(dataset, "k").json()
    with world.database.write() as session:
        row = session.get_one(JobRow, job["id"])
        row.state = "failed_charged"
        row.problem_code = "canary"
        row.attempts = 3
        row.updated_at += 12345
    seen = world.requester.get(f"/v1/jobs/{job['id']}").json()
    assert seen["state"] == "failed_charged"
    assert seen["problem"]["code"] == "job_failed"
    assert "canary" not in str(seen)
    assert set(seen) == set(job)
    assert not {"attempts", "updated_at", "started_at", "lease_token"} & set(seen)


def test_a_broker_that_is_down_loses_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = world.dataset()
    monkeypatch.setattr("api.deps.send", lambda *_: False)
    assert world.order(dataset, "k").status_code == 202


def test_the_newest_snapshot_is_used(world: World) -> None:
    dataset = world.dataset()
    newest = world.owner.post(f"/v1/datasets/{dataset}/snapshots", content=npz(10)).json()["id"]
    job = world.order(dataset, "k").json()["id"]
    with world.database.read() as session:
        assert session.get_one(JobRow, job).snapshot_id == newest


# --------------------------------------------------------------------------------------------------
# Races
# --------------------------------------------------------------------------------------------------


def race(people: int, call: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(people) as pool:
        return list(pool.map(call, range(people)))


def test_twenty_clients_race_for_a_budget_that_admits_five(each_world: World) -> None:
    world = each_world
    dataset = world.dataset(budget=budget_for(world, 5))
    answers = race(20, lambda i: world.order(dataset, f"k{i}"))
    admitted = [a for a in answers if a.status_code == 202]
    refused = [a for a in answers if a.status_code != 202]
    assert len(admitted) == 5
    for answer in refused:
        assert_problem(answer, 409, "budget_exhausted")
    assert len({a.json()["id"] for a in admitted}) == 5
    after = counts(world.database)
    assert (after["jobs"], after["entries"]) == (5, 5)
    auditor = world.join("auditor", "hospital", ["auditor"])
    check = auditor.get(f"/v1/datasets/{dataset}/ledger/verify").json()
    assert check["ok"], check


def test_twenty_clients_with_one_key_make_one_job(each_world: World) -> None:
    world = each_world
    dataset = world.dataset()
    answers = race(20, lambda _: world.order(dataset, "the-same"))
    assert {a.status_code for a in answers} == {202}
    assert len({a.json()["id"] for a in answers}) == 1
    with world.database.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(JobRow)) == 1


def test_twenty_clients_set_one_budget(each_world: World) -> None:
    world = each_world
    dataset = world.dataset(budget=None, snapshot=False)
    answers = race(
        20,
        lambda i: world.owner.put(
            f"/v1/datasets/{dataset}/budget", json={**BUDGET, "epsilon": 1.0 + i % 4}
        ),
    )
    assert [a.status_code for a in answers].count(201) == 1
    agreed = []
    for answer in answers:
        if answer.status_code in (200, 201):
            agreed.append(answer.json()["epsilon"])
        else:
            assert_problem(answer, 409, "budget_not_raised")
    # Whoever was first fixed it; the others lowered it or were refused.
    shown = world.owner.get(f"/v1/datasets/{dataset}/budget").json()
    assert shown["epsilon"] == min(agreed)
    assert counts(world.database)["budgets"] == 1
