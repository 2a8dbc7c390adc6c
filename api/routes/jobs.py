"""Quotes and jobs: what a batch would cost, ordering it, and watching it.

The order of work in :func:`create_job` is what the guarantee needs: the cost is computed before the
transaction, the charge is reserved in one transaction under the dataset row's lock, and the message
leaves only after the commit. A message that can't be sent is left to the sweeper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from sqlalchemy import select
from sqlalchemy.orm import Session

from accounting import bounds, filters, ledger, quotes
from accounting.canonical import digest
from accounting.errors import BudgetExhausted, Conflict, InvalidRequest, NotFound
from accounting.filters import Budget, Filter, FilterState
from accounting.mechanisms import (
    ClassShare,
    DenoisingBlock,
)
from accounting.tables import DatasetRow, JobRow, SnapshotRow
from api import reports, schemas
from api.bodies import ServiceRoute
from api.deps import (
    PrincipalDep,
    Service,
    ServiceDep,
    granted_dataset,
    now,
    require_id,
    visible_job,
)
from worker.catalogue import list_models

router = APIRouter(route_class=ServiceRoute, tags=["jobs"])

_FIT_STEPS = 10


def _plan(
    service: Service, spec: Mapping[str, object], dataset: DatasetRow, budget: Budget,
    family: Sequence[Filter],
) -> quotes.JobPlan:  # fmt: skip
    plan = quotes.plan_denoise(
        spec,
        dataset.facts,
        budget,
        family,
        list_models(service.settings.public_models),
        service.accountant.epsilon,
    )
    # A public limit on a public number: a job that would outlive its attempts is never charged.
    if plan.expected_seconds > service.settings.job_seconds / 2:
        raise InvalidRequest(
            "outputs",
            f"the job would take about {plan.expected_seconds:.0f} s, too long for one attempt "
            "here; order fewer at a time",
        )
    return plan


def _spec(body: schemas.DenoiseSpec) -> dict[str, Any]:
    """The spec as the client wrote it: defaults are the plan's to choose."""
    spec: dict[str, Any] = body.model_dump(exclude_unset=True)
    return spec


# --------------------------------------------------------------------------------------------------
# Quotes
# --------------------------------------------------------------------------------------------------


@router.post(
    "/v1/datasets/{dataset_id}/quotes", operation_id="create_quote", response_model=schemas.Quote
)
def create_quote(
    dataset_id: str, body: schemas.DenoiseSpec, service: ServiceDep, caller: PrincipalDep
) -> object:
    """What a job would cost and what would remain. Charges nothing.

    ``charge`` is what the ledger would add, at the delta that the budget's family fixes for a
    release; ``certificate_epsilon`` is what the certificate would state, at the delta that its
    reader wants. They are different numbers.
    """
    with service.database.read() as session:
        dataset = granted_dataset(session, caller, dataset_id, "quote")
        budget, family = reports.require_budget(session, dataset)
    return _quote(service, _spec(body), dataset, budget, family)


def _quote(
    service: Service,
    spec: Mapping[str, object],
    dataset: DatasetRow,
    budget: Budget,
    family: Sequence[Filter],
) -> dict[str, object]:
    plan = _plan(service, spec, dataset, budget, family)
    with service.database.read() as session:
        states = ledger.states(session, dataset.id)
    admitted = bool(filters.admitting(states, plan.costs))
    return {
        "mechanism": plan.mechanism.to_json(),
        "post_processing": plan.post_processing,
        "certificate_epsilon": plan.certificate_epsilon.to_json(),
        "charge": reports.charge_json(family, plan.costs),
        "admitted": admitted,
        "remaining": reports.charge_json(
            family, reports.remaining_costs(states, [filters.Cost(0, 0)] * len(states))
        ),
        "remaining_after": reports.charge_json(family, reports.remaining_costs(states, plan.costs))
        if admitted
        else None,
        "drift_ceiling": reports.finite_or_text(plan.drift_ceiling),
        "expected_seconds": plan.expected_seconds,
        "warnings": list(plan.warnings),
    }


# --------------------------------------------------------------------------------------------------
# Jobs
# --------------------------------------------------------------------------------------------------


@router.post(
    "/v1/datasets/{dataset_id}/jobs",
    operation_id="create_job",
    status_code=202,
    response_model=schemas.Job | schemas.Quote,
    responses={
        200: {"model": schemas.Quote, "description": "A dry run: the quote; nothing was reserved."},
        409: {
            "model": schemas.BudgetProblem,
            "content": {"application/problem+json": {}},
            "description": "Over budget, or the dataset has no budget or snapshot yet.",
        },
    },
)
def create_job(
    dataset_id: str,
    body: schemas.DenoiseSpec,
    request: Request,
    response: Response,
    service: ServiceDep,
    caller: PrincipalDep,
    idempotency_key: Annotated[
        str,
        Header(
            min_length=1,
            max_length=200,
            pattern=r"^[\x21-\x7e]+$",
            description="The same key and body answer the same job for ever.",
        ),
    ],
) -> object:
    """Reserves the charge and queues the job."""
    spec = _spec(body)
    body_hash = digest(request.state.json)

    def existing(session: Session) -> dict[str, object] | None:
        job = ledger.existing_job(
            session,
            organisation_id=caller.organisation_id,
            dataset_id=dataset_id,
            idempotency_key=idempotency_key,
            body_hash=body_hash,
        )
        return None if job is None else reports.job_json(session, job)

    with service.database.read() as session:
        dataset = granted_dataset(session, caller, dataset_id, "request")
        answer = existing(session)
        if answer is not None:
            return _accepted(response, answer)
        budget, family = reports.require_budget(session, dataset)
        snapshot_id = _newest_snapshot(session, dataset_id)
    if body.dry_run:
        response.status_code = 200
        return _quote(service, spec, dataset, budget, family)
    # Slow: it may run the accountant. The budget and the facts are fixed, so nothing it reads can
    # change before the transaction below.
    plan = _plan(service, spec, dataset, budget, family)
    try:
        with service.database.write() as session:
            # A grant may have been taken back meanwhile.
            granted_dataset(session, caller, dataset_id, "request")
            made = ledger.reserve(
                session,
                dataset_id=dataset_id,
                organisation_id=caller.organisation_id,
                idempotency_key=idempotency_key,
                body_hash=body_hash,
                kind=body.kind,
                spec=spec,
                mechanism=plan.mechanism,
                post_processing=plan.post_processing,
                certificate_epsilon=plan.certificate_epsilon.to_json(),
                costs=plan.costs,
                snapshot_id=snapshot_id,
                progress_total=plan.progress_total,
                max_attempts=service.settings.max_attempts,
                ttl_seconds=service.settings.reservation_seconds,
                now=now(),
            )
            answer = reports.job_json(session, session.get_one(JobRow, made.job_id))
    except BudgetExhausted as error:
        with service.database.read() as session:
            states = ledger.states(session, dataset_id)
        error.extra["largest_that_fits"] = (
            None
            if spec.get("preset", "auto") == "auto"
            else _largest_that_fits(plan.mechanism, states, dataset.facts)
        )
        raise
    if made.created:
        # The database is the queue of record: a message that is not taken is sent again.
        service.send(made.job_id)
    return _accepted(response, answer)


def _accepted(response: Response, job: dict[str, object]) -> dict[str, object]:
    response.headers["Location"] = f"/v1/jobs/{job['id']}"
    return job


def _newest_snapshot(session: Session, dataset_id: str) -> str:
    snapshot_id = session.scalar(
        select(SnapshotRow.id)
        .where(SnapshotRow.dataset_id == dataset_id)
        .order_by(SnapshotRow.created_at.desc(), SnapshotRow.id.desc())
        .limit(1)
    )
    if snapshot_id is None:
        raise Conflict("no_snapshot", "the dataset has no snapshot of private records yet")
    return snapshot_id


def _largest_that_fits(
    mechanism: DenoisingBlock, states: Sequence[FilterState], facts: Mapping[str, Any]
) -> dict[str, object] | None:
    """Numbers of outputs, in the request's proportions, that would surely be admitted now.

    The costs come from the Rényi bound alone, which is cheap and never too small, so somewhat more
    may fit than what is found here. None where not even one output of each class does.

    The ``auto`` preset is not asked: with fewer outputs it would choose a longer block, at the same
    cost.
    """
    family = [state.filter for state in states]

    def fits(scale: float) -> DenoisingBlock | None:
        smaller = _scaled(mechanism, scale)
        costs = filters.charge(smaller, family, epsilon_bound=bounds.renyi)
        return smaller if filters.admitting(states, costs) else None

    best = fits(0.0)
    if best is None:
        return None
    low, high = 0.0, 1.0
    for _ in range(_FIT_STEPS):
        middle = (low + high) / 2
        found = fits(middle)
        if found is None:
            high = middle
        else:
            low, best = middle, found
    if best.classes is None:
        return {"outputs": best.outputs}
    names = facts["classes"]
    return {"outputs": {names[share.label]: share.outputs for share in best.classes}}


def _scaled(mechanism: DenoisingBlock, scale: float) -> DenoisingBlock:
    """The block with at least one, and at most ``scale`` of its outputs of each class."""
    if mechanism.classes is None:
        return replace(mechanism, outputs=max(1, int((mechanism.outputs or 1) * scale)))
    return replace(
        mechanism,
        classes=tuple(
            ClassShare(c.label, max(1, int(c.outputs * scale)), c.sampling_probability)
            for c in mechanism.classes
        ),
    )


@router.get("/v1/jobs/{job_id}", operation_id="get_job", response_model=schemas.Job)
def get_job(job_id: str, service: ServiceDep, caller: PrincipalDep) -> object:
    """A job's state and progress, which counts outputs of the public total."""
    with service.database.read() as session:
        return reports.job_json(session, visible_job(session, caller, job_id))


@router.post("/v1/jobs/{job_id}/cancel", operation_id="cancel_job", response_model=schemas.Job)
def cancel_job(job_id: str, service: ServiceDep, caller: PrincipalDep) -> object:
    """Takes a reservation back. A job that has started can't be cancelled: its charge stands."""
    with service.database.write() as session:
        job = session.get(JobRow, require_id(job_id))
        if job is None or job.organisation_id != caller.organisation_id:
            raise NotFound
        ledger.cancel(session, job_id=job.id, now=now())
        session.refresh(job)
        return reports.job_json(session, job)
