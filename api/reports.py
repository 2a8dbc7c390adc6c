"""The ledger's integers as the JSON that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

from sqlalchemy import and_, bindparam, select
from sqlalchemy.orm import Session

from accounting import ledger
from accounting.chain import FilterTotal
from accounting.errors import Conflict
from accounting.filters import (
    INFINITE,
    INFINITE_ORDER,
    Budget,
    Cost,
    Filter,
    FilterState,
    nats,
    probability,
)
from accounting.statements import OrganisationStatement
from accounting.tables import (
    HELD_STATES,
    ChargeRow,
    DatasetRow,
    EntryRow,
    FilterRow,
    JobRow,
    ReleaseRow,
)
from api.deps import rfc3339
from api.kinds import problem_body


def require_budget(session: Session, dataset: DatasetRow) -> tuple[Budget, tuple[Filter, ...]]:
    """The dataset's budget and its filters.

    Raises:
        Conflict: no_budget.
    """
    known = ledger.budget_of(session, dataset.id)
    if known is None:
        raise Conflict("no_budget", "the dataset has no budget yet")
    return known


def charge_json(filters: Sequence[Filter], costs: Sequence[Cost]) -> dict[str, object]:
    """``{"epsilon", "delta", "orders"}`` of one cost a filter."""
    return _charge_json([(f.order, c) for f, c in zip(filters, costs, strict=True)])


def _charge_json(by_order: Sequence[tuple[str, Cost]]) -> dict[str, object]:
    basic = next((cost for order, cost in by_order if order == INFINITE_ORDER), None)
    return {
        "epsilon": None if basic is None else nats(basic.epsilon_units),
        "delta": None if basic is None else probability(basic.delta_units),
        "orders": {
            order: nats(cost.epsilon_units) for order, cost in by_order if order != INFINITE_ORDER
        },
    }


def remaining_costs(states: Sequence[FilterState], charge: Sequence[Cost]) -> tuple[Cost, ...]:
    """What each filter would admit after the charge; 0 where it is crossed."""
    left = []
    for state, cost in zip(states, charge, strict=True):
        crossed = state.crossed or INFINITE in (cost.epsilon_units, cost.delta_units)
        left.append(
            Cost(
                0
                if crossed
                else max(0, state.filter.cap_units - state.epsilon_units - cost.epsilon_units),
                0
                if crossed or state.filter.order != INFINITE_ORDER
                else max(0, state.filter.delta_units - state.delta_units - cost.delta_units),
            )
        )
    return tuple(left)


def budget_report(
    session: Session, dataset_id: str, budget: Budget, caller: str, *, is_owner: bool
) -> dict[str, object]:
    """A budget with what each of its filters has spent and reserved.

    The owner sees the caps of all organisations; another organisation sees its own alone, with what
    remains of it.
    """
    books = ledger.books_of(session, dataset_id)
    states = ledger.states(session, dataset_id)
    held = _held(session, books.id, len(states))
    started = [
        FilterTotal(epsilon - h.epsilon_units, delta - h.delta_units, infinite - h.infinite)
        for (epsilon, delta, infinite), h in zip(books.totals, held, strict=True)
    ]
    report = budget.to_json()
    caps = cast(dict[str, object], report.setdefault("organisation_caps", {}))
    if not is_owner:
        report["organisation_caps"] = {name: cap for name, cap in caps.items() if name == caller}
    report.setdefault("approval_above", None)
    capped = ledger.organisation_states(session, dataset_id, caller)
    return {
        **report,
        "filters": [
            _filter_report(*each) for each in zip(states, started, held, _left(states), strict=True)
        ],
        "your_share": None
        if capped is None
        else [
            {"order": state.filter.order, "remaining": _amount(left)}
            for state, left in zip(capped, _left(capped), strict=True)
        ],
    }


def _left(states: Sequence[FilterState]) -> tuple[Cost, ...]:
    return remaining_costs(states, [Cost(0, 0)] * len(states))


def _filter_report(
    state: FilterState, started: FilterTotal, held: FilterTotal, left: Cost
) -> dict[str, object]:
    f = state.filter
    return {
        "order": f.order,
        "cap": {
            "epsilon": nats(f.cap_units),
            "delta": probability(f.delta_units if f.order == INFINITE_ORDER else 0),
        },
        "delta_share": probability(f.delta_units),
        "delta_per_release": probability(f.delta_per_release_units),
        "spent": _amount(_summed(started)),
        "reserved": _amount(_summed(held)),
        "remaining": _amount(left),
    }


def _amount(cost: Cost) -> dict[str, object]:
    return {"epsilon": nats(cost.epsilon_units), "delta": probability(cost.delta_units)}


def _summed(total: FilterTotal) -> Cost:
    """The sum as an amount: infinite where an infinite cost is among what it sums."""
    if total.infinite:
        return Cost(INFINITE, total.delta_units)
    return Cost(total.epsilon_units, total.delta_units)


def _held(session: Session, books_id: str, filters: int) -> list[FilterTotal]:
    """What the entries that never started sum to, by filter; they are few at any time."""
    totals = [FilterTotal() for _ in range(filters)]
    rows = session.execute(
        select(ChargeRow.position, ChargeRow.epsilon_units, ChargeRow.delta_units)
        .join(EntryRow, EntryRow.id == ChargeRow.entry_id)
        .where(EntryRow.books_id == books_id, EntryRow.state.in_(HELD_STATES))
    )
    for position, epsilon_units, delta_units in rows:
        totals[position].add(Cost(epsilon_units, delta_units))
    return totals


# Every answer about a job asks this; built once.
_CHARGE_OF: Final = (
    select(FilterRow.order, ChargeRow.epsilon_units, ChargeRow.delta_units)
    .join(EntryRow, EntryRow.id == ChargeRow.entry_id)
    .join(
        FilterRow,
        and_(FilterRow.dataset_id == EntryRow.books_id, FilterRow.position == ChargeRow.position),
    )
    .where(ChargeRow.entry_id == bindparam("entry"))
    .order_by(ChargeRow.position)
)


def charge_of_entry(session: Session, entry_id: str) -> dict[str, object]:
    """The charge of one entry as JSON; empty for post-processing."""
    rows = session.execute(_CHARGE_OF, {"entry": entry_id}).all()
    return _charge_json([(row[0], Cost(row[1], row[2])) for row in rows])


def job_json(session: Session, job: JobRow) -> dict[str, object]:
    """A job as its requester sees it.

    Attempts, leases, the times of changes and the cause of a failure are left out: they may tell of
    the private data.
    """
    release = None
    if job.state == "released":
        release = session.scalar(select(ReleaseRow.id).where(ReleaseRow.job_id == job.id))
    return {
        "id": job.id,
        "dataset": job.dataset_id,
        "plan": None if job.plan_position is None else job.entry_id,
        "state": job.state,
        "created_at": rfc3339(job.created_at),
        "spec": job.spec,
        "mechanism": job.mechanism,
        "post_processing": job.post_processing,
        "certificate_epsilon": job.certificate_epsilon,
        "charge": charge_of_entry(session, job.entry_id),
        "progress": {"done": job.progress_done, "total": job.progress_total},
        "release": release,
        "problem": problem_body("job_failed") if job.state == "failed_charged" else None,
    }


def organisation_json(
    filters: Sequence[Filter], budget: Budget, statement: OrganisationStatement
) -> dict[str, object]:
    """What an organisation spent or holds, in the filters that it did not cross."""
    cap = budget.organisation_caps.get(statement.organisation_id)
    costs = [_summed(total) for total in statement.totals]
    return {
        "organisation": statement.organisation_id,
        "entries": statement.entries,
        "cap": None if cap is None else {"epsilon": float(cap)},
        "charge": charge_json(filters if costs else (), costs),
    }


def plan_json(session: Session, entry: EntryRow, jobs: Sequence[JobRow]) -> dict[str, object]:
    """A plan with its jobs, as its requester sees it."""
    return {
        "id": entry.id,
        "dataset": entry.dataset_id,
        "state": entry.state,
        "created_at": rfc3339(entry.created_at),
        "charge": charge_of_entry(session, entry.id),
        "jobs": [job_json(session, job) for job in jobs],
    }


def entry_json(filters: Sequence[Filter], entry: ledger.Entry) -> dict[str, object]:
    """A line of the books for the dataset's owner or auditor."""
    return {
        "id": entry.id,
        "sequence": entry.sequence,
        "kind": entry.kind,
        "state": entry.state,
        "dataset": entry.dataset_id,
        "jobs": list(entry.job_ids),
        "organisation": entry.organisation_id,
        "parent_entry": entry.parent_entry_id,
        "releases": list(entry.release_ids),
        "mechanism": entry.mechanism,
        "mechanism_digest": entry.mechanism_digest,
        "charge": charge_json(filters if entry.costs else (), entry.costs),
        "created_at": rfc3339(entry.created_at),
    }


def finite_or_text(value: object) -> object:
    """The value with every infinite float as the text ``"inf"``, for JSON."""
    if isinstance(value, float) and value == float("inf"):
        return "inf"
    if isinstance(value, Mapping):
        return {k: finite_or_text(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_text(v) for v in value]
    return value
