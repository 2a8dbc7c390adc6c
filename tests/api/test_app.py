"""The app as a whole: what it imports, describes, logs, starts with and stops."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accounting.tables import Database
from api.app import create_app
from api.problems import MEDIA_TYPE
from tests.api.world import SPEC, World, npz, running, serving
from worker.settings import Settings

ROOT = Path(__file__).parent.parent.parent


def test_the_api_and_its_command_line_run_without_torch() -> None:
    code = (
        "import sys, api.app, api.cli, api.client;"
        "print(sorted(n for n in sys.modules if n.split('.')[0] in "
        "{'torch', 'diffusers', 'models', 'matplotlib'}"
        " or n in {'worker.jobs', 'worker.tasks'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# --------------------------------------------------------------------------------------------------
# OpenAPI
# --------------------------------------------------------------------------------------------------

OPERATIONS = {
    "get_livez",
    "get_readyz",
    "get_signing_keys",
    "create_organisation",
    "list_organisations",
    "create_key",
    "compute_epsilon",
    "compute_delta",
    "compute_profile",
    "compute_tradeoff",
    "compare_methods",
    "calibrate_mechanism",
    "allocate_target",
    "verify_certificate",
    "list_models",
    "create_dataset",
    "list_datasets",
    "get_dataset",
    "create_snapshot",
    "list_snapshots",
    "create_grant",
    "list_grants",
    "set_budget",
    "get_budget",
    "get_ledger",
    "verify_ledger",
    "export_ledger",
    "create_quote",
    "create_job",
    "get_job",
    "cancel_job",
    "approve_job",
    "deny_job",
    "create_plan",
    "get_plan",
    "get_statement",
    "get_release",
    "get_content",
    "get_certificate",
}


def test_the_operation_ids_are_stable(calm: World) -> None:
    document = calm.nobody.get("/openapi.json").json()
    ids = [op["operationId"] for methods in document["paths"].values() for op in methods.values()]
    assert sorted(ids) == sorted(OPERATIONS)


def test_every_body_has_an_example_or_describes_itself(calm: World) -> None:
    document = calm.nobody.get("/openapi.json").json()
    for methods in document["paths"].values():
        for operation in methods.values():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content is None:
                continue
            name = content["schema"]["$ref"].rsplit("/", 1)[-1]
            schema = document["components"]["schemas"][name]
            described = "examples" in schema or all(
                "examples" in field or "description" in field or "$ref" in field
                for field in schema["properties"].values()
            )
            assert described, name
    assert document["components"]["schemas"]["DenoiseSpec"]["examples"]


def test_every_error_is_documented_as_a_problem(calm: World) -> None:
    document = calm.nobody.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert list(operation["responses"]["default"]["content"]) == [MEDIA_TYPE]
            assert operation["description"]
            for status, answer in operation["responses"].items():
                if status.startswith(("4", "5")):
                    assert list(answer["content"]) == [MEDIA_TYPE], path
    references = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
    assert set(references) <= set(document["components"]["schemas"])


def test_the_examples_are_valid(world: World) -> None:
    """Each example of a body is taken by the call that it is shown for."""
    schemas = world.nobody.get("/openapi.json").json()["components"]["schemas"]
    facts = {**schemas["DatasetRequest"]["examples"][0]}
    made = world.owner.post("/v1/datasets", json=facts)
    assert made.status_code == 201, made.text
    where = f"/v1/datasets/{made.json()['id']}"
    budget = world.owner.put(f"{where}/budget", json=schemas["BudgetRequest"]["examples"][0])
    assert budget.status_code == 201, budget.text
    for name in ("epsilon", "delta", "profile"):
        body = schemas[f"{name.capitalize()}Request"]["examples"][0]
        answer = world.stranger.post(f"/v1/accounting/{name}", json=body)
        assert answer.status_code == 200, answer.text


def test_the_pages_load_nothing_from_elsewhere(calm: World) -> None:
    for path in ("/docs", "/problems", "/problems/not-found"):
        page = calm.nobody.get(path)
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert not re.search(r"https?://|<script|src=", page.text)
        assert "default-src 'none'" in page.headers["content-security-policy"]
    text = calm.nobody.get("/docs").text
    for operation in OPERATIONS:
        assert f"id='{operation}'" in text


def test_the_bare_address_leads_to_the_pages(calm: World) -> None:
    answer = calm.nobody.get("/")
    assert answer.status_code == 307
    assert answer.headers["location"] == "/docs"


# --------------------------------------------------------------------------------------------------
# Health
# --------------------------------------------------------------------------------------------------


def test_ready_means_that_a_job_could_be_taken(each_world: World) -> None:
    world = each_world
    answer = world.nobody.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "ready",
        "checks": {"database": True, "migration": True, "broker": True, "keys": True},
    }
    assert world.nobody.get("/livez").json() == {"status": "alive"}
    key = world.settings.keys_folder / "signing.pem"
    key.rename(key.with_suffix(".away"))
    answer = world.nobody.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["checks"]["keys"] is False


def test_a_broker_that_is_away_is_not_ready(settings: Settings) -> None:
    away = settings.model_copy(update={"broker_url": "redis://127.0.0.1:1/0"})
    with running(away) as world:
        answer = world.nobody.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["checks"]["broker"] is False
        # The charge is in the books, and the sweeper will send the message.
        dataset = world.dataset()
        assert world.order(dataset, "k").status_code == 202


def test_ready_over_redis(settings: Settings, redis_url: str) -> None:
    with running(settings.model_copy(update={"broker_url": redis_url})) as world:
        assert world.nobody.get("/readyz").json()["checks"]["broker"] is True
        assert world.order(world.dataset(), "k").status_code == 202


def test_postgresql_without_tables_is_refused_at_the_start(
    settings: Settings, empty_database_url: str
) -> None:
    app = create_app(settings.model_copy(update={"database_url": empty_database_url}))
    if empty_database_url.startswith("sqlite"):
        # The embedded default makes its own.
        with serving(app):
            assert app.state.service.database.revision_ok()
        return

    async def start() -> None:
        async with app.router.lifespan_context(app):
            pass

    import asyncio

    with pytest.raises(RuntimeError, match="epsilond migrate"):
        asyncio.run(start())


def test_the_sweeper_of_a_running_app_sends_what_was_lost(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = settings.model_copy(update={"sweep_seconds": 0.05, "resend_seconds": 0.01})
    with running(quick) as world:
        messages = world.settings.broker_folder / "messages"
        with monkeypatch.context() as patch:
            patch.setattr("api.deps.send", lambda *_: False)
            assert world.order(world.dataset(), "k").status_code == 202
            assert list(messages.iterdir()) == []
        for _ in range(500):
            if list(messages.iterdir()):
                break
            world.nobody.get("/livez")
        assert list(messages.iterdir())


# --------------------------------------------------------------------------------------------------
# Logs
# --------------------------------------------------------------------------------------------------


def test_a_log_line_says_who_asked_what_and_never_holds_a_body(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "canary4711"
    with caplog.at_level(logging.INFO), running(settings) as world:
        dataset = world.dataset()
        world.order(dataset, canary, {**SPEC, canary: canary})
        world.order(dataset, canary)
        world.owner.post("/v1/datasets", json={"name": canary})
        world.owner.get(f"/v1/datasets/{canary}", params={"cursor": canary})
        world.owner.get("/v1/datasets", params={"cursor": canary})
        world.owner.post(f"/v1/datasets/{dataset}/snapshots", content=npz(labels=[canary] * 40))
        key = world.owner.headers["authorization"].split()[1]
    lines = [
        json.loads(record.getMessage())
        for record in caplog.records
        if record.name == "epsilond.access"
    ]
    assert lines
    for line in lines:
        assert set(line) == {
            "request",
            "method",
            "route",
            "status",
            "milliseconds",
            "organisation",
            "key",
        }
    assert {"POST /v1/datasets/{dataset_id}/jobs", "POST /v1/keys"} <= {
        f"{line['method']} {line['route']}" for line in lines
    }
    # The test's own client logs what it asks.
    ours = [r.getMessage() for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]
    assert canary not in str(ours)
    assert key not in str(ours)


def test_the_tables_are_made_once(settings: Settings) -> None:
    for _ in range(2):
        with serving(create_app(settings)):
            pass
    database = Database(settings.effective_database_url)
    assert database.revision_ok()
    database.dispose()
