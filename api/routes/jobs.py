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
from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from accounting import bounds, filters, ledger, quotes
from accounting.canonical import digest
from accounting.errors import BudgetExhausted, Conflict, InvalidRequest, NotFound
from accounting.filters import Budget, Cost, Filter, FilterState
from accounting.mechanisms import (
    ClassShare,
    DenoisingBlock,
)
from accounting.tables import DatasetRow, EntryRow, JobRow, SnapshotRow
from api import reports, schemas
from api.auth import Principal
from api.bodies import ServiceRoute
from api.deps import (
    PrincipalDep,
    Service,
    ServiceDep,
    granted_dataset,
    now,
    owned_dataset,
    require_id,
    visible_job,
    visible_plan,
)
from worker.catalogue import list_models

router = APIRouter(route_class=ServiceRoute, tags=["jobs"])

_FIT_STEPS = 10
IdempotencyKey = Annotated[
    str,
    Header(
        min_length=1,
        max_length=200,
        pattern=r"^[\x21-\x7e]+$",
        description="The same key and body answer the same job for ever.",
    ),
]


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
    return _quote(service, _spec(body), dataset, budget, family, caller.organisation_id)


def _quote(
    service: Service,
    spec: Mapping[str, object],
    dataset: DatasetRow,
    budget: Budget,
    family: Sequence[Filter],
    organisation_id: str,
) -> dict[str, object]:
    plan = _plan(service, spec, dataset, budget, family)
    return {
        "mechanism": plan.mechanism.to_json(),
        "post_processing": plan.post_processing,
        "certificate_epsilon": plan.certificate_epsilon.to_json(),
        **_standing(service, dataset, organisation_id, plan.costs),
        "drift_ceiling": reports.finite_or_text(plan.drift_ceiling),
        "expected_seconds": plan.expected_seconds,
        "warnings": list(plan.warnings),
    }


def _standing(
    service: Service, dataset: DatasetRow, organisation_id: str, costs: Sequence[Cost]
) -> dict[str, object]:
    """How a charge stands to the books now: what it takes, whether it fits, and what remains."""
    with service.database.read() as session:
        budget, family = reports.require_budget(session, dataset)
        states = ledger.states(session, dataset.id)
        capped = ledger.organisation_states(session, dataset.id, organisation_id)
    both = [states] if capped is None else [states, capped]
    admitted = all(filters.admitting(each, costs) for each in both)
    counts = [n for each in both if (n := filters.further_releases(each, costs)) is not None]
    return {
        "charge": reports.charge_json(family, costs),
        "admitted": admitted,
        "needs_approval": budget.needs_approval(family, costs),
        "further": min(counts, default=None),
        "remaining": reports.charge_json(
            family, reports.remaining_costs(states, [filters.Cost(0, 0)] * len(states))
        ),
        "remaining_after": reports.charge_json(family, reports.remaining_costs(states, costs))
        if admitted
        else None,
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
    idempotency_key: IdempotencyKey,
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
        return _quote(service, spec, dataset, budget, family, caller.organisation_id)
    # Slow: it may run the accountant. The facts are fixed, and a budget is at most tightened, which
    # changes no filter's order nor what a release is charged in it.
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
    except BudgetExhausted as error:
        with service.database.read() as session:
            states = ledger.states(session, dataset_id)
            capped = ledger.organisation_states(session, dataset_id, caller.organisation_id)
        error.extra["largest_that_fits"] = (
            None
            if spec.get("preset", "auto") == "auto"
            else _largest_that_fits(
                plan.mechanism, [states] if capped is None else [states, capped], dataset.facts
            )
        )
        raise
    if made.created and made.state == "reserved":
        # The database is the queue of record: a message that is not taken is sent again.
        service.send(made.job_id)
    # Read after the commit: nobody else waits for the lock meanwhile.
    with service.database.read() as session:
        answer = reports.job_json(session, session.get_one(JobRow, made.job_id))
    return _accepted(response, answer)


def _accepted(response: Response, job: dict[str, object]) -> dict[str, object]:
    response.headers["Location"] = f"/v1/jobs/{job['id']}"
    return job


# Built once: each order asks this.
_NEWEST = (
    select(SnapshotRow.id)
    .where(SnapshotRow.dataset_id == bindparam("dataset"))
    .order_by(SnapshotRow.created_at.desc(), SnapshotRow.id.desc())
    .limit(1)
)


def _newest_snapshot(session: Session, dataset_id: str) -> str:
    snapshot_id = session.scalar(_NEWEST, {"dataset": dataset_id})
    if snapshot_id is None:
        raise Conflict("no_snapshot", "the dataset has no snapshot of private records yet")
    return snapshot_id


def _largest_that_fits(
    mechanism: DenoisingBlock, limits: Sequence[Sequence[FilterState]], facts: Mapping[str, Any]
) -> dict[str, object] | None:
    """Numbers of outputs, in the request's proportions, that would surely be admitted now.

    ``limits`` are the dataset's filters and, where it has a cap, the organisation's part of them.

    The costs come from the Rényi bound alone, which is cheap and never too small, so somewhat more
    may fit than what is found here. None where not even one output of each class does.

    The ``auto`` preset is not asked: with fewer outputs it would choose a longer block, at the same
    cost.
    """
    family = [state.filter for state in limits[0]]

    def fits(scale: float) -> DenoisingBlock | None:
        smaller = _scaled(mechanism, scale)
        costs = filters.charge(smaller, family, epsilon_bound=bounds.renyi)
        fitting = all(filters.admitting(states, costs) for states in limits)
        return smaller if fitting else None

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


@router.post("/v1/jobs/{job_id}/approve", operation_id="approve_job", response_model=schemas.Job)
def approve_job(job_id: str, service: ServiceDep, caller: PrincipalDep) -> object:
    """Lets a job that waits for its owner go ahead; a plan goes ahead whole.

    The decision must rest on public facts, such as those shown here, and never on private data: the
    guarantee assumes it.
    """
    with service.database.write() as session:
        job = _owned_job(session, caller, job_id)
        to_send = ledger.approve(
            session,
            job_id=job.id,
            ttl_seconds=service.settings.reservation_seconds,
            now=now(),
        )
        session.refresh(job)
        answer = reports.job_json(session, job)
    _send_all(service, to_send)
    return answer


def _send_all(service: Service, job_ids: Sequence[str]) -> None:
    for job_id in job_ids:
        if not service.send(job_id):
            # The others would most likely wait as long; the sweeper sends them.
            return


@router.post("/v1/jobs/{job_id}/deny", operation_id="deny_job", response_model=schemas.Job)
def deny_job(job_id: str, service: ServiceDep, caller: PrincipalDep) -> object:
    """Refuses a job that waits for its owner; its charge is taken back."""
    with service.database.write() as session:
        job = _owned_job(session, caller, job_id)
        ledger.deny(session, job_id=job.id, now=now())
        session.refresh(job)
        return reports.job_json(session, job)


def _owned_job(session: Session, caller: Principal, job_id: str) -> JobRow:
    job = session.get(JobRow, require_id(job_id))
    if job is None:
        raise NotFound
    owned_dataset(session, caller, job.dataset_id, "owner")
    return job


# --------------------------------------------------------------------------------------------------
# Plans
# --------------------------------------------------------------------------------------------------


@router.post(
    "/v1/datasets/{dataset_id}/plans",
    operation_id="create_plan",
    status_code=202,
    response_model=schemas.Plan | schemas.PlanQuote,
    responses={
        200: {"model": schemas.PlanQuote, "description": "A dry run: nothing was reserved."},
        409: {
            "model": schemas.BudgetProblem,
            "content": {"application/problem+json": {}},
            "description": "Over budget, or the dataset has no budget or snapshot yet.",
        },
    },
)
def create_plan(
    dataset_id: str,
    body: schemas.PlanRequest,
    request: Request,
    response: Response,
    service: ServiceDep,
    caller: PrincipalDep,
    idempotency_key: IdempotencyKey,
) -> object:
    """Reserves several jobs as one charge, which is less than one by one.

    All are fixed here, before the first starts. With the first start the whole plan is charged for
    good, whatever becomes of its other jobs.
    """
    body_hash = digest(request.state.json)
    with service.database.read() as session:
        dataset = granted_dataset(session, caller, dataset_id, "request")
        job = ledger.existing_job(
            session,
            organisation_id=caller.organisation_id,
            dataset_id=dataset_id,
            idempotency_key=ledger.plan_key(idempotency_key, 0),
            body_hash=body_hash,
        )
        if job is not None:
            return _plan_accepted(session, response, job.entry_id)
        budget, family = reports.require_budget(session, dataset)
        snapshot_id = _newest_snapshot(session, dataset_id)
    plans = []
    for i, spec in enumerate(body.jobs):
        if spec.dry_run:
            raise InvalidRequest(f"jobs[{i}].dry_run", "stands beside the jobs of a plan")
        try:
            plans.append(_plan(service, _spec(spec), dataset, budget, family))
        except InvalidRequest as error:
            raise InvalidRequest(f"jobs[{i}].{error.field}", error.reason) from None
    jobs = [
        ledger.PlannedJob(
            kind=spec.kind,
            spec=_spec(spec),
            mechanism=plan.mechanism,
            post_processing=plan.post_processing,
            certificate_epsilon=plan.certificate_epsilon.to_json(),
            progress_total=plan.progress_total,
        )
        for spec, plan in zip(body.jobs, plans, strict=True)
    ]
    whole = ledger.plan_mechanism(jobs)
    costs = filters.charge(whole, family, epsilon_bound=service.accountant.epsilon)
    if body.dry_run:
        response.status_code = 200
        standing = _standing(service, dataset, caller.organisation_id, costs)
        del standing["further"]
        return {
            "mechanism": whole.to_json(),
            **standing,
            "separately": reports.charge_json(family, _added(plans)),
            "expected_seconds": sum(plan.expected_seconds for plan in plans),
            "warnings": sorted({warning for plan in plans for warning in plan.warnings}),
        }
    with service.database.write() as session:
        granted_dataset(session, caller, dataset_id, "request")
        made = ledger.reserve_plan(
            session,
            dataset_id=dataset_id,
            organisation_id=caller.organisation_id,
            idempotency_key=idempotency_key,
            body_hash=body_hash,
            jobs=jobs,
            costs=costs,
            snapshot_id=snapshot_id,
            max_attempts=service.settings.max_attempts,
            ttl_seconds=service.settings.reservation_seconds,
            now=now(),
        )
    if made.created and made.state == "reserved":
        _send_all(service, made.job_ids)
    with service.database.read() as session:
        return _plan_accepted(session, response, made.entry_id)


def _added(plans: Sequence[quotes.JobPlan]) -> list[Cost]:
    sums = []
    for costs in zip(*(plan.costs for plan in plans), strict=True):
        infinite = any(filters.INFINITE in (c.epsilon_units, c.delta_units) for c in costs)
        sums.append(
            Cost(filters.INFINITE, filters.INFINITE)
            if infinite
            else Cost(sum(c.epsilon_units for c in costs), sum(c.delta_units for c in costs))
        )
    return sums


def _plan_accepted(session: Session, response: Response, entry_id: str) -> dict[str, object]:
    response.headers["Location"] = f"/v1/plans/{entry_id}"
    entry = session.get_one(EntryRow, entry_id)
    return reports.plan_json(session, entry, ledger.jobs_of(session, entry_id))


@router.get("/v1/plans/{plan_id}", operation_id="get_plan", response_model=schemas.Plan)
def get_plan(plan_id: str, service: ServiceDep, caller: PrincipalDep) -> object:
    """A plan with its jobs, in their order."""
    with service.database.read() as session:
        entry = visible_plan(session, caller, plan_id)
        return reports.plan_json(session, entry, ledger.jobs_of(session, entry.id))
