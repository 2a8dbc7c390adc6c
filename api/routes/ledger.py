"""A dataset's books: entries, the check of the chain, and the export. For owner and auditor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from accounting import chain, ledger, statements
from accounting.errors import UndecidableBound
from api import reports, schemas
from api.bodies import ServiceRoute
from api.deps import (
    MAX_PAGE_SIZE,
    PAGE_SIZE,
    PrincipalDep,
    ServiceDep,
    decode_cursor,
    encode_cursor,
    owned_dataset,
    rfc3339,
)

router = APIRouter(route_class=ServiceRoute, tags=["ledger"])

_EXPORT_BATCH = 500


@router.get(
    "/v1/datasets/{dataset_id}/ledger", operation_id="get_ledger", response_model=schemas.Ledger
)
def get_ledger(
    dataset_id: str,
    service: ServiceDep,
    caller: PrincipalDep,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE,
) -> object:
    """The entries in the order of their reservation, with what each charges by filter."""
    after = decode_cursor(cursor, int)
    with service.database.read() as session:
        dataset = owned_dataset(session, caller, dataset_id, "owner", "auditor")
        books = ledger.books_of(session, dataset.id)
        known = ledger.budget_of(session, dataset.id)
        entries = ledger.entries(
            session,
            dataset.id,
            after_sequence=int(after[0]) if after else 0,
            limit=limit + 1,
        )
    page = entries[:limit]
    family = () if known is None else known[1]
    return {
        "dataset": dataset.id,
        "head": {"sequence": books.chain_sequence, "hash": books.chain_hash},
        "entries": [reports.entry_json(family, entry) for entry in page],
        "next_cursor": encode_cursor(page[-1].sequence) if len(entries) > limit else None,
    }


@router.get(
    "/v1/datasets/{dataset_id}/statement",
    operation_id="get_statement",
    response_model=schemas.Statement,
)
def get_statement(dataset_id: str, service: ServiceDep, caller: PrincipalDep) -> object:
    """The books summed up: what the filters hold, who spent it, when, and a bound beside it."""
    with service.database.read() as session:
        dataset = owned_dataset(session, caller, dataset_id, "owner", "auditor")
        budget, family = reports.require_budget(session, dataset)
        report = reports.budget_report(
            session, dataset.id, budget, caller.organisation_id, is_owner=True
        )
        organisations = statements.by_organisation(session, dataset.id)
        points = statements.over_time(session, dataset.id, family)
        together = statements.started_together(session, dataset.id)
    fixed = None
    if together is not None:
        # A bound that no accountant finds in its limits is left out: nothing rests on it.
        with suppress(UndecidableBound):
            fixed = service.accountant.epsilon(together, float(budget.delta))
    return {
        "dataset": dataset.id,
        "guarantee": report,
        "as_if_fixed_in_advance": None if fixed is None else fixed.to_json(),
        "organisations": [reports.organisation_json(family, budget, o) for o in organisations],
        "over_time": [
            {
                "sequence": point.sequence,
                "at": rfc3339(point.at),
                "used": {
                    f.order: statements.used_share(f, total)
                    for f, total in zip(family, point.totals, strict=True)
                },
            }
            for point in points
        ],
    }


@router.get(
    "/v1/datasets/{dataset_id}/ledger/verify",
    operation_id="verify_ledger",
    response_model=schemas.LedgerCheck,
)
def verify_ledger(
    dataset_id: str,
    service: ServiceDep,
    caller: PrincipalDep,
    costs: Annotated[
        Literal["all", "renyi"],
        Query(description="`renyi` leaves out the costs by basic composition."),
    ] = "all",
) -> object:
    """Recomputes the chain, every cost and every admission, and compares."""
    bound = service.accountant.confirming_epsilon if costs == "all" else None
    with service.database.read() as session:
        dataset = owned_dataset(session, caller, dataset_id, "owner", "auditor")
        found = chain.verify(session, dataset.id, epsilon_bound=bound)
    return {"dataset": dataset.id, **found.to_json()}


@router.get(
    "/v1/datasets/{dataset_id}/ledger/export",
    operation_id="export_ledger",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"application/jsonl": {}},
            "description": "One chain row a line: sequence, previous_hash, hash, and body, the "
            "very text that the hash is of.",
        }
    },
)
def export_ledger(dataset_id: str, service: ServiceDep, caller: PrincipalDep) -> StreamingResponse:
    """The dataset's hash chain as JSON lines, to keep elsewhere and check without the service."""
    with service.database.read() as session:
        dataset = owned_dataset(session, caller, dataset_id, "owner", "auditor")
        head = ledger.books_of(session, dataset.id).chain_sequence

    def lines() -> Iterator[bytes]:
        # Rows are never changed, so batches in transactions of their own make one consistent
        # export up to the head read above, and no transaction waits for a slow client.
        sequence = 0
        while sequence < head:
            with service.database.read() as session:
                rows = ledger.chain(
                    session,
                    dataset_id,
                    after_sequence=sequence,
                    limit=min(_EXPORT_BATCH, head - sequence),
                )
            if not rows:
                return
            for row in rows:
                yield (
                    json.dumps(
                        {
                            "dataset": row.dataset_id,
                            "sequence": row.sequence,
                            "previous_hash": row.previous_hash,
                            "hash": row.hash,
                            "body": row.body,
                        }
                    ).encode()
                    + b"\n"
                )
            sequence = rows[-1].sequence

    return StreamingResponse(
        lines(),
        media_type="application/jsonl",
        headers={"Content-Disposition": f'attachment; filename="{dataset_id}.jsonl"'},
    )
