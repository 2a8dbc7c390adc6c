"""Datasets: their public facts, private snapshots, grants and budget."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from sqlalchemy import or_, select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from accounting import ledger
from accounting.errors import Conflict, InvalidRequest, NotFound
from accounting.filters import Budget
from accounting.tables import (
    DatasetRow,
    GrantRow,
    OrganisationRow,
    SnapshotRow,
)
from api import reports, schemas, uploads
from api.auth import Principal
from api.bodies import ServiceRoute
from api.deps import (
    MAX_PAGE_SIZE,
    PAGE_SIZE,
    PrincipalDep,
    Service,
    ServiceDep,
    decode_cursor,
    encode_cursor,
    new_id,
    now,
    owned_dataset,
    rfc3339,
    visible_dataset,
)
from worker.snapshots import SnapshotWritten, delete_snapshot, write_snapshot
from worker.uploads import Limits, parse_upload

router = APIRouter(route_class=ServiceRoute, tags=["datasets"])


def _dataset(row: DatasetRow) -> dict[str, object]:
    return {
        **row.facts,
        "id": row.id,
        "name": row.name,
        "organisation": row.organisation_id,
        "created_at": rfc3339(row.created_at),
    }


@router.post(
    "/v1/datasets",
    operation_id="create_dataset",
    status_code=201,
    response_model=schemas.Dataset,
)
def create_dataset(
    body: schemas.DatasetRequest, service: ServiceDep, caller: PrincipalDep
) -> object:
    """Registers a dataset by its public facts. They never change; records come as snapshots."""
    row = DatasetRow(
        id=new_id("ds"),
        organisation_id=caller.organisation_id,
        name=body.name,
        facts=body.model_dump(),
        created_at=now(),
    )
    try:
        with service.database.write() as session:
            if body.budget_group is not None:
                row.books_id = _group(session, caller, body.budget_group).books_id
            session.add(row)
    except IntegrityError:
        raise Conflict("name_taken", "name: the organisation has a dataset of this name") from None
    return _dataset(row)


def _group(session: Session, caller: Principal, dataset_id: str) -> DatasetRow:
    try:
        return owned_dataset(session, caller, dataset_id, "owner")
    except NotFound:
        raise InvalidRequest("budget_group", "is no dataset of this organisation") from None


@router.get("/v1/datasets", operation_id="list_datasets", response_model=schemas.Datasets)
def list_datasets(
    service: ServiceDep,
    caller: PrincipalDep,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE,
) -> object:
    """Lists the organisation's own datasets and, for requesters, those granted to it."""
    after = decode_cursor(cursor, int, str)
    seen = DatasetRow.organisation_id == caller.organisation_id
    if "requester" in caller.scopes:
        granted = select(GrantRow.dataset_id).where(
            GrantRow.organisation_id == caller.organisation_id
        )
        seen = or_(seen, DatasetRow.id.in_(granted))
    query = select(DatasetRow).where(seen).order_by(DatasetRow.created_at, DatasetRow.id)
    if after is not None:
        query = query.where(tuple_(DatasetRow.created_at, DatasetRow.id) > tuple_(*after))
    with service.database.read() as session:
        rows = session.scalars(query.limit(limit + 1)).all()
    page = rows[:limit]
    return {
        "datasets": [_dataset(row) for row in page],
        "next_cursor": encode_cursor(page[-1].created_at, page[-1].id)
        if len(rows) > limit
        else None,
    }


@router.get("/v1/datasets/{dataset_id}", operation_id="get_dataset", response_model=schemas.Dataset)
def get_dataset(dataset_id: str, service: ServiceDep, caller: PrincipalDep) -> object:
    """A dataset's public facts."""
    with service.database.read() as session:
        return _dataset(visible_dataset(session, caller, dataset_id))


# --------------------------------------------------------------------------------------------------
# Snapshots
# --------------------------------------------------------------------------------------------------

_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
_UPLOAD_DOC: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": (
            "npz (arrays `images`, `labels`, `units`), npy, or a zip of PNG or JPEG files in class "
            "folders or with `labels.csv`: as the raw body or as the part `file`. Separate idx or "
            "npy files come as the parts `images`, `labels` and `units`."
        ),
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        name: {"type": "string", "format": "binary"} for name in uploads.PART_NAMES
                    },
                }
            },
            "application/octet-stream": _BINARY,
            "application/zip": _BINARY,
        },
    }
}


@router.post(
    "/v1/datasets/{dataset_id}/snapshots",
    operation_id="create_snapshot",
    status_code=201,
    response_model=schemas.Snapshot,
    openapi_extra=_UPLOAD_DOC,
)
async def create_snapshot(
    dataset_id: str, request: Request, service: ServiceDep, caller: PrincipalDep
) -> object:
    """Uploads an immutable private copy of the dataset's records.

    The answer says nothing about the records; what the owner may know of them is in the owner's
    list of snapshots.
    """

    def facts_of_dataset() -> dict[str, Any]:
        with service.database.read() as session:
            return dict(owned_dataset(session, caller, dataset_id, "owner").facts)

    facts = await run_in_threadpool(facts_of_dataset)
    async with uploads.receive(request, service.settings) as parts, service.uploads:
        row = await run_in_threadpool(_store, service, dataset_id, facts, parts)
    return {"id": row.id, "created_at": rfc3339(row.created_at)}


def _store(
    service: Service, dataset_id: str, facts: dict[str, Any], parts: uploads.Parts
) -> SnapshotRow:
    """Reads an upload and keeps it as a snapshot: the file first, then its row."""
    records = parse_upload(parts, facts, Limits.of(service.settings))
    written = write_snapshot(service.settings, service.sealer, facts=facts, records=records)
    del records
    row = _snapshot_row(dataset_id, written)
    try:
        with service.database.write() as session:
            session.add(row)
    except BaseException:
        delete_snapshot(service.settings, written.location)
        raise
    return row


def _snapshot_row(dataset_id: str, written: SnapshotWritten) -> SnapshotRow:
    return SnapshotRow(
        id=written.id,
        dataset_id=dataset_id,
        created_at=now(),
        location=written.location,
        hmac=written.hmac,
        sealed_key=written.sealed_key,
        records=written.records,
        owner_warning=written.owner_warning,
    )


@router.get(
    "/v1/datasets/{dataset_id}/snapshots",
    operation_id="list_snapshots",
    response_model=schemas.OwnerSnapshots,
)
def list_snapshots(dataset_id: str, service: ServiceDep, caller: PrincipalDep) -> object:
    """The owner's view of the snapshots. Its figures are **not private** and uncharged."""
    with service.database.read() as session:
        row = owned_dataset(session, caller, dataset_id, "owner")
        rows = session.scalars(
            select(SnapshotRow)
            .where(SnapshotRow.dataset_id == row.id)
            .order_by(SnapshotRow.created_at, SnapshotRow.id)
        ).all()
    return {
        "snapshots": [
            {
                "id": s.id,
                "created_at": rfc3339(s.created_at),
                "records": s.records,
                "warning": s.owner_warning,
            }
            for s in rows
        ]
    }


# --------------------------------------------------------------------------------------------------
# Grants
# --------------------------------------------------------------------------------------------------


def _grant(row: GrantRow) -> dict[str, object]:
    return {
        "dataset": row.dataset_id,
        "organisation": row.organisation_id,
        "scopes": row.scopes,
        "created_at": rfc3339(row.created_at),
    }


@router.post(
    "/v1/datasets/{dataset_id}/grants",
    operation_id="create_grant",
    status_code=201,
    response_model=schemas.Grant,
)
def create_grant(
    dataset_id: str, body: schemas.GrantRequest, service: ServiceDep, caller: PrincipalDep
) -> object:
    """Lets another organisation ask for quotes or order jobs; a second grant replaces the first."""
    scopes = sorted(set(body.scopes))
    with service.database.write() as session:
        dataset = owned_dataset(session, caller, dataset_id, "owner", lock=True)
        if session.get(OrganisationRow, body.organisation) is None:
            raise InvalidRequest("organisation", "there is no such organisation")
        row = session.get(GrantRow, (dataset.id, body.organisation))
        if row is None:
            row = GrantRow(
                dataset_id=dataset.id,
                organisation_id=body.organisation,
                scopes=scopes,
                created_at=now(),
            )
            session.add(row)
        row.scopes = list(scopes)
    return _grant(row)


@router.get(
    "/v1/datasets/{dataset_id}/grants", operation_id="list_grants", response_model=schemas.Grants
)
def list_grants(dataset_id: str, service: ServiceDep, caller: PrincipalDep) -> object:
    """Who may do what with the dataset."""
    with service.database.read() as session:
        dataset = owned_dataset(session, caller, dataset_id, "owner")
        rows = session.scalars(
            select(GrantRow)
            .where(GrantRow.dataset_id == dataset.id)
            .order_by(GrantRow.created_at, GrantRow.organisation_id)
        ).all()
    return {"grants": [_grant(row) for row in rows]}


# --------------------------------------------------------------------------------------------------
# Budget
# --------------------------------------------------------------------------------------------------


@router.put(
    "/v1/datasets/{dataset_id}/budget",
    operation_id="set_budget",
    status_code=201,
    response_model=schemas.BudgetReport,
    responses={200: {"model": schemas.BudgetReport, "description": "The budget was set before."}},
)
def set_budget(
    dataset_id: str,
    body: schemas.BudgetRequest,
    service: ServiceDep,
    caller: PrincipalDep,
    response: Response,
) -> object:
    """Fixes the dataset's budget. The filters follow from it by a published rule.

    Later, epsilon and delta can only be lowered; the caps of organisations and the threshold for
    approval may change. Datasets of one budget group share one budget.
    """
    budget = Budget.from_json(body.model_dump())
    with service.database.write() as session:
        dataset = owned_dataset(session, caller, dataset_id, "owner")
        for name in budget.organisation_caps:
            if session.get(OrganisationRow, name) is None:
                raise InvalidRequest(f"organisation_caps.{name}", "there is no such organisation")
        # Of several callers at once, one fixes it; the others find it set.
        ledger.lock_books(session, dataset.id)
        if ledger.budget_of(session, dataset.id) is not None:
            response.status_code = 200
        ledger.set_budget(session, dataset_id=dataset.id, budget=budget, now=now())
        return reports.budget_report(
            session, dataset.id, budget, caller.organisation_id, is_owner=True
        )


@router.get(
    "/v1/datasets/{dataset_id}/budget",
    operation_id="get_budget",
    response_model=schemas.BudgetReport,
)
def get_budget(dataset_id: str, service: ServiceDep, caller: PrincipalDep) -> object:
    """The budget's filters: spent (started), reserved, and what remains."""
    with service.database.read() as session:
        dataset = visible_dataset(session, caller, dataset_id)
        budget, _ = reports.require_budget(session, dataset)
        return reports.budget_report(
            session,
            dataset.id,
            budget,
            caller.organisation_id,
            is_owner=dataset.organisation_id == caller.organisation_id,
        )
