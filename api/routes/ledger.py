"""A dataset's books: entries, the check of the chain, and the export. For owner and auditor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from accounting import chain, ledger
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
        "head": {"sequence": dataset.chain_sequence, "hash": dataset.chain_hash},
        "entries": [reports.entry_json(family, entry) for entry in page],
        "next_cursor": encode_cursor(page[-1].sequence) if len(entries) > limit else None,
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
        head = owned_dataset(session, caller, dataset_id, "owner", "auditor").chain_sequence

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
