"""Statements of a dataset's books, for its owner and auditors: who spent what, when, and what fits.

All of it is read from the books, whose entries are public facts of the requests; none of it reads a
record. The guarantee is what the filters hold (:mod:`accounting.filters`). The bound *as if fixed
in advance* is information only: requests that were chosen after earlier outputs may not be composed
so, and nothing is admitted by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from accounting import ledger
from accounting.chain import FilterTotal
from accounting.filters import INFINITE, INFINITE_ORDER, Cost, Filter
from accounting.mechanisms import MAX_PARTS, Composition, Part, mechanism_from_json
from accounting.tables import (
    CHARGED_STATES,
    HELD_STATES,
    ChargeRow,
    EntryRow,
    OrganisationTotalsRow,
)

MAX_POINTS: Final = 200
_STARTED: Final = tuple(state for state in CHARGED_STATES if state not in HELD_STATES)


@dataclass(frozen=True)
class OrganisationStatement:
    """What one organisation's entries sum to in each filter, and how many count."""

    organisation_id: str
    entries: int
    totals: tuple[FilterTotal, ...]


@dataclass(frozen=True)
class Point:
    """The sums of all entries up to one that started, by filter.

    Attributes:
        sequence: the entry's place in the books.
        at: when it was asked for, in microseconds since 1970 UTC.
    """

    sequence: int
    at: int
    totals: tuple[FilterTotal, ...]


def by_organisation(session: Session, dataset_id: str) -> list[OrganisationStatement]:
    """What each organisation has spent or holds, the greediest by basic composition first."""
    books_id = ledger.books_of(session, dataset_id).id
    counted = session.execute(
        sa.select(EntryRow.organisation_id, sa.func.count())
        .where(EntryRow.books_id == books_id, EntryRow.state.in_(CHARGED_STATES))
        .group_by(EntryRow.organisation_id)
    ).all()
    counts = {organisation_id: int(number) for organisation_id, number in counted}
    sums = {
        row.organisation_id: tuple(FilterTotal(*total) for total in row.totals)
        for row in session.scalars(
            sa.select(OrganisationTotalsRow).where(OrganisationTotalsRow.dataset_id == books_id)
        )
    }
    found = [
        OrganisationStatement(name, counts.get(name, 0), sums.get(name, ()))
        for name in {*counts, *sums}
    ]
    return sorted(
        found,
        key=lambda s: (-max((t.epsilon_units for t in s.totals[:1]), default=0), s.organisation_id),
    )


def over_time(
    session: Session, dataset_id: str, filters: Sequence[Filter], *, points: int = MAX_POINTS
) -> list[Point]:
    """The sums after each charged entry that started, thinned to at most ``points``."""
    books_id = ledger.books_of(session, dataset_id).id
    totals = [FilterTotal() for _ in filters]
    found: list[Point] = []
    rows = session.execute(
        sa.select(
            EntryRow.sequence,
            EntryRow.created_at,
            ChargeRow.position,
            ChargeRow.epsilon_units,
            ChargeRow.delta_units,
        )
        .join(ChargeRow, ChargeRow.entry_id == EntryRow.id)
        .where(EntryRow.books_id == books_id, EntryRow.state.in_(_STARTED))
        .order_by(EntryRow.sequence, ChargeRow.position)
        .execution_options(yield_per=1000)
    )
    for sequence, at, position, epsilon_units, delta_units in rows:
        totals[position].add(Cost(epsilon_units, delta_units))
        if position == len(filters) - 1:
            snapshot = tuple(
                FilterTotal(t.epsilon_units, t.delta_units, t.infinite) for t in totals
            )
            found.append(Point(sequence, at, snapshot))
            if len(found) > 2 * points:
                # Of every two the later stays, so that the last one always does.
                found = found[1::2] if len(found) % 2 == 0 else found[::2]
    step = -(-len(found) // points)
    return found[::-1][::step][::-1] if step > 1 else found


def started_together(session: Session, dataset_id: str) -> Composition | None:
    """Everything that started, as one mechanism fixed in advance.

    None before the first start, and where there are more distinct mechanisms than one can hold.
    """
    books_id = ledger.books_of(session, dataset_id).id
    rows = session.execute(
        sa.select(sa.func.min(EntryRow.id), sa.func.count())
        .where(
            EntryRow.books_id == books_id,
            EntryRow.state.in_(_STARTED),
            EntryRow.mechanism_digest.is_not(None),
        )
        .group_by(EntryRow.mechanism_digest)
        .order_by(EntryRow.mechanism_digest)
    ).all()
    parts: list[Part] = []
    for entry_id, count in rows:
        mechanism = mechanism_from_json(session.get_one(EntryRow, entry_id).mechanism)
        if isinstance(mechanism, Composition):
            parts.extend(Part(p.mechanism, p.count * count) for p in mechanism.parts)
        else:
            parts.append(Part(mechanism, count))
    return Composition(tuple(parts)) if 0 < len(parts) <= MAX_PARTS else None


def used_share(f: Filter, total: FilterTotal) -> float | None:
    """The part of a filter's cap that is used, of epsilon or delta whichever is more.

    None if the filter is crossed; above 1 where another filter admitted what this one could not.
    """
    if total.infinite or INFINITE in (total.epsilon_units, total.delta_units):
        return None
    shares = [total.epsilon_units / f.cap_units if f.cap_units else float(total.epsilon_units > 0)]
    if f.order == INFINITE_ORDER and f.delta_units:
        shares.append(total.delta_units / f.delta_units)
    return max(shares)
