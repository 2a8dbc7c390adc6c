"""The service itself: is it alive, is it ready, its keys, its own description."""

from __future__ import annotations

import html
import json
import logging
import os
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse

from accounting.errors import NotFound
from api import schemas
from api.auth import ACCESS
from api.bodies import ServiceRoute
from api.deps import Service, ServiceDep
from api.kinds import KINDS, ProblemError
from worker.app import BROKER_SECONDS
from worker.custody import load_sealer, load_signing_key, public_keys

log = logging.getLogger("epsilond.service")
router = APIRouter(route_class=ServiceRoute, tags=["service"])


@router.get("/livez", operation_id="get_livez", response_model=schemas.Live)
async def get_livez() -> object:
    """Whether the process answers at all. It reads nothing."""
    return {"status": "alive"}


@router.get(
    "/readyz",
    operation_id="get_readyz",
    response_model=schemas.Ready,
    responses={
        503: {
            "model": schemas.Problem,
            "content": {"application/problem+json": {}},
            "description": "`checks` names the part that does not answer.",
        }
    },
)
def get_readyz(service: ServiceDep) -> object:
    """Whether a job could be taken now: database, its migration, broker and keys."""
    checks: dict[str, Callable[[Service], bool]] = {
        "database": _database_answers,
        "migration": lambda s: s.database.revision_ok(),
        "broker": _broker_answers,
        "keys": _keys_present,
    }
    found = {name: _holds(name, check, service) for name, check in checks.items()}
    if not all(found.values()):
        raise ProblemError("not_ready", extra={"checks": found})
    return {"status": "ready", "checks": found}


def _holds(name: str, check: Callable[[Service], bool], service: Service) -> bool:
    try:
        return check(service)
    except Exception as error:  # noqa: BLE001  (whatever it raises, the part does not answer)
        log.warning("not ready: %s: %s", name, type(error).__name__)
        return False


def _database_answers(service: Service) -> bool:
    with service.database.read():
        return True


def _broker_answers(service: Service) -> bool:
    if not service.settings.broker_url:
        # The embedded broker is a folder that was made with the app.
        return os.access(service.settings.broker_folder, os.R_OK | os.W_OK | os.X_OK)
    with service.celery.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, timeout=int(BROKER_SECONDS))
    return True


def _keys_present(service: Service) -> bool:
    load_sealer(service.settings)
    load_signing_key(service.settings)
    return True


@router.get(
    "/.well-known/epsilond-keys.json",
    operation_id="get_signing_keys",
    response_model=schemas.SigningKeys,
)
def get_signing_keys(service: ServiceDep) -> object:
    """Every key that ever signed a certificate here, so that old ones stay checkable."""
    return public_keys(service.settings)


# --------------------------------------------------------------------------------------------------
# Pages: plain HTML, no script, nothing loaded from elsewhere
# --------------------------------------------------------------------------------------------------

_STYLE = """
:root{color-scheme:light dark}
body{font:1rem/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code,pre{font-family:ui-monospace,monospace;font-size:.9em}
pre{overflow:auto;padding:.75rem;border:1px solid;border-radius:.25rem}
summary{cursor:pointer}
"""


def _page(title: str, body: str) -> HTMLResponse:
    return HTMLResponse(
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{html.escape(title)}</h1>{body}</body></html>",
        headers={
            "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
            "X-Content-Type-Options": "nosniff",
        },
    )


@router.get("/openapi.json", operation_id="get_openapi", include_in_schema=False)
def get_openapi(request: Request) -> JSONResponse:
    """The description of this API, for machines."""
    document: dict[str, Any] = request.app.openapi()
    return JSONResponse(document)


@router.get("/", operation_id="get_root", include_in_schema=False)
def get_root() -> RedirectResponse:
    """Where somebody who opens the address in a browser finds out what this is."""
    return RedirectResponse("/docs")


@router.get("/docs", operation_id="get_docs", include_in_schema=False)
def get_docs(request: Request) -> HTMLResponse:
    """The description of this API, for people."""
    document: dict[str, Any] = request.app.openapi()
    parts = [
        "<p>Machines read <a href='/openapi.json'>/openapi.json</a>. Errors are explained at "
        "<a href='/problems'>/problems</a>.</p>"
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(method.upper(), path, operation, document))
    return _page(f"{document['info']['title']} {document['info']['version']}", "".join(parts))


def _operation(method: str, path: str, operation: dict[str, Any], document: dict[str, Any]) -> str:
    access = ACCESS[method, path]
    who = "no key needed" if access.public else "a key with " + " or ".join(sorted(access.scopes))
    answers = "".join(
        f"<li><code>{html.escape(status)}</code> {html.escape(str(answer['description']))}</li>"
        for status, answer in operation["responses"].items()
    )
    return (
        f"<section id='{html.escape(operation['operationId'])}'>"
        f"<h2><code>{method} {html.escape(path)}</code></h2>"
        f"<p>{html.escape(operation.get('description', ''))}</p>"
        f"<p>Needs: {html.escape(who)}.</p>{_example(operation, document)}"
        f"<details><summary>Answers</summary><ul>{answers}</ul></details></section>"
    )


def _example(operation: dict[str, Any], document: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return ""
    schema = content["schema"]
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
    shown = schema.get("examples", [schema])[0]
    return f"<pre>{html.escape(_pretty(shown))}</pre>"


def _pretty(value: object) -> str:
    return json.dumps(value, indent=2)


@router.get("/problems", operation_id="get_problems", include_in_schema=False)
def get_problems() -> HTMLResponse:
    """Every kind of problem."""
    return _page(
        "Problems",
        "<ul>"
        + "".join(
            f"<li><a href='/problems/{kind.slug}'>{kind.slug}</a> ({kind.status}): "
            f"{html.escape(kind.title)}</li>"
            for kind in KINDS
        )
        + "</ul>",
    )


@router.get("/problems/{slug}", operation_id="get_problem", include_in_schema=False)
def get_problem(slug: str) -> HTMLResponse:
    """What one kind of problem means, and what to do about it."""
    for kind in KINDS:
        if kind.slug == slug:
            return _page(
                kind.title,
                f"<p><code>{kind.code}</code>, status {kind.status}</p>"
                f"<p>{html.escape(kind.meaning)}</p><p>{html.escape(kind.remedy)}</p>",
            )
    raise NotFound
