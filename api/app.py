"""The HTTP application: routes, problems, access log, and what runs beside them.

Importing this module imports no torch and opens nothing; :func:`create_app` makes an app, whose
start makes keys and tables where they are missing and begins to sweep.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from accounting.bounds import Limits
from accounting.errors import LedgerUnavailable
from accounting.tables import Database
from api import deps, problems
from api.auth import ACCESS, admin_key_exists
from api.bodies import CloseUnread
from api.routes import accounting, admin, datasets, jobs, ledger, releases, service
from api.schemas import Problem
from api.sweeper import Sweeper
from worker.app import make_celery
from worker.artifacts import ArtifactStore
from worker.custody import ensure_keys, load_sealer
from worker.settings import Settings, get_settings, service_version
from worker.uploads import clear_stale_uploads

log = logging.getLogger("epsilond.api")
access_log = logging.getLogger("epsilond.access")

SWITCH_SECONDS: Final = 5e-4
ROUTERS: Final = (
    # First: routers are tried in turn, and questions are asked the most and answered the fastest.
    accounting.router,
    service.router,
    admin.router,
    datasets.router,
    jobs.router,
    releases.router,
    ledger.router,
)


def create_app(settings: Settings | None = None) -> FastAPI:
    """The app of one service.

    Args:
        settings: where everything lies; by default the environment's.
    """
    chosen = settings if settings is not None else get_settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        current_default_thread_limiter().total_tokens = deps.THREADS
        # A question holds the interpreter between array operations. At the default of 5 ms, those
        # beside it wait for turns longer than their own answers take.
        sys.setswitchinterval(SWITCH_SECONDS)
        running = await run_in_threadpool(_open, chosen)
        app.state.service = running
        sweeper = Sweeper(
            running.database,
            running.send,
            sweep_seconds=chosen.sweep_seconds,
            resend_seconds=chosen.resend_seconds,
            clock=deps.now,
        )
        sweeper.start()
        try:
            yield
        finally:
            await run_in_threadpool(sweeper.stop)
            running.close()

    app = FastAPI(
        title="epsilond",
        version=service_version(),
        description="Privacy accounting, and synthetic batches charged to a ledger.",
        # Served by routes of our own: these would be open without an entry in the access table,
        # and the stock page loads its scripts from elsewhere.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    for router in ROUTERS:
        app.include_router(router)
    problems.install(app)
    app.add_middleware(problems.CatchAll)
    app.add_middleware(CloseUnread)
    app.add_middleware(AccessLog)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]  # FastAPI's own recipe
    return app


def _open(settings: Settings) -> deps.Service:
    """Everything a service needs, made where it is missing."""
    ensure_keys(settings)
    clear_stale_uploads(settings)
    limits = Limits(seconds=settings.accountant_seconds, megabytes=settings.accountant_megabytes)
    service = deps.Service(
        settings=settings,
        database=Database(settings.effective_database_url),
        sealer=load_sealer(settings),
        artifacts=ArtifactStore(settings.effective_artifacts_url),
        accountant=deps.Accountant(
            os.cpu_count() or 1,
            limits,
            question_limits=replace(limits, seconds=settings.question_seconds),
            peer_limits=replace(limits, seconds=settings.peer_seconds),
            wait_seconds=settings.wait_seconds,
        ),
        celery=make_celery(settings),
    )
    try:
        bring_tables(service.database)
    except LedgerUnavailable:
        # /readyz says so until it answers; meanwhile every call is refused with 503.
        log.warning("the database does not answer yet")
    except BaseException:
        service.close()
        raise
    return service


def bring_tables(database: Database) -> None:
    """Brings SQLite to this version; refuses another database that is not there yet.

    Raises:
        RuntimeError: PostgreSQL is at another revision.
        LedgerUnavailable: the database does not answer.
    """
    if database.is_sqlite:
        database.upgrade()
    elif not database.revision_ok():
        # Several processes share it, so an operator says when it changes.
        raise RuntimeError("the database is not at this version: run `epsilond migrate`")
    with database.read() as session:
        if not admin_key_exists(session):
            log.warning("nobody can call this service yet: `epsilond init` makes the first key")


# --------------------------------------------------------------------------------------------------
# OpenAPI
# --------------------------------------------------------------------------------------------------


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document: each call's key, and problem+json for whatever goes wrong."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    components = document.setdefault("components", {})
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas.setdefault("Problem", _problem_schema())
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            # FastAPI documents its own error form, which is never sent here.
            answers.pop("422", None)
            answers["default"] = {
                "description": "A problem (RFC 9457).",
                "content": {
                    problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}
                },
            }
            for answer in answers.values():
                content = answer.get("content", {})
                # FastAPI files every extra answer's model under application/json.
                if problems.MEDIA_TYPE in content and "application/json" in content:
                    content[problems.MEDIA_TYPE] = content.pop("application/json")
            access = ACCESS[method.upper(), path]
            operation["security"] = [] if access.public else [{"key": []}]
            if not access.public:
                operation["x-scopes"] = sorted(access.scopes)
    app.openapi_schema = document
    return document


def _problem_schema() -> dict[str, Any]:
    return Problem.model_json_schema(ref_template="#/components/schemas/{model}")


# --------------------------------------------------------------------------------------------------
# Access log
# --------------------------------------------------------------------------------------------------


class AccessLog:
    """One JSON line a call: what was asked, by whom, how it ended. Never a body, query or key."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        request_id = secrets.token_hex(8)
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            route = scope.get("route")
            principal = scope.get("state", {}).get("principal")
            access_log.info(
                json.dumps(
                    {
                        "request": request_id,
                        "method": scope["method"],
                        # The template, so that no line holds what a client put into the address.
                        "route": getattr(route, "path", None),
                        "status": status,
                        "milliseconds": round(1000 * (time.perf_counter() - began), 1),
                        "organisation": getattr(principal, "organisation_id", None),
                        "key": getattr(principal, "key_id", None),
                    }
                )
            )
