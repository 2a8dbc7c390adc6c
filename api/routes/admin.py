"""Organisations and their keys; for the operator's ``admin`` key alone."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import select, tuple_
from sqlalchemy.exc import IntegrityError

from accounting.errors import Conflict, InvalidRequest
from accounting.tables import KeyRow, OrganisationRow
from api import schemas
from api.auth import key_sha256, new_key
from api.bodies import ServiceRoute
from api.deps import (
    MAX_PAGE_SIZE,
    PAGE_SIZE,
    ServiceDep,
    decode_cursor,
    encode_cursor,
    new_id,
    now,
    rfc3339,
)

router = APIRouter(route_class=ServiceRoute, tags=["administration"])


def _organisation(row: OrganisationRow) -> dict[str, object]:
    return {"id": row.id, "name": row.name, "created_at": rfc3339(row.created_at)}


@router.post(
    "/v1/organisations",
    operation_id="create_organisation",
    status_code=201,
    response_model=schemas.Organisation,
)
def create_organisation(body: schemas.OrganisationRequest, service: ServiceDep) -> object:
    """Creates an organisation, to which keys, datasets and jobs then belong."""
    row = OrganisationRow(id=new_id("org"), name=body.name, created_at=now())
    try:
        with service.database.write() as session:
            session.add(row)
    except IntegrityError:
        raise Conflict("name_taken", "name: an organisation of this name exists") from None
    return _organisation(row)


@router.get(
    "/v1/organisations", operation_id="list_organisations", response_model=schemas.Organisations
)
def list_organisations(
    service: ServiceDep,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE,
) -> object:
    """Lists organisations, oldest first."""
    after = decode_cursor(cursor, int, str)
    query = select(OrganisationRow).order_by(OrganisationRow.created_at, OrganisationRow.id)
    if after is not None:
        query = query.where(tuple_(OrganisationRow.created_at, OrganisationRow.id) > tuple_(*after))
    with service.database.read() as session:
        rows = session.scalars(query.limit(limit + 1)).all()
    page = rows[:limit]
    return {
        "organisations": [_organisation(row) for row in page],
        "next_cursor": encode_cursor(page[-1].created_at, page[-1].id)
        if len(rows) > limit
        else None,
    }


@router.post("/v1/keys", operation_id="create_key", status_code=201, response_model=schemas.NewKey)
def create_key(body: schemas.KeyRequest, service: ServiceDep) -> object:
    """Creates a key for an organisation. The key is in this answer and nowhere else."""
    key = new_key()
    row = KeyRow(
        id=new_id("key"),
        organisation_id=body.organisation,
        sha256=key_sha256(key),
        scopes=sorted(set(body.scopes)),
        created_at=now(),
        revoked_at=None,
    )
    with service.database.write() as session:
        if session.get(OrganisationRow, body.organisation) is None:
            raise InvalidRequest("organisation", "there is no such organisation")
        session.add(row)
    return {
        "id": row.id,
        "organisation": row.organisation_id,
        "scopes": row.scopes,
        "created_at": rfc3339(row.created_at),
        "key": key,
    }
