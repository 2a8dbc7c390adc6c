"""The ledger's bench: its counts against the rule itself, and its tables."""

from __future__ import annotations

from decimal import Decimal

import pytest

import accounting
from accounting.filters import (
    INFINITE,
    Budget,
    Filter,
    FilterState,
    ManySmall,
    admitting,
    charge,
    family,
    family_of,
)
from accounting.mechanisms import Mechanism, mechanism_from_json
from bench import ledger
from bench.mechanisms import sampled

EIGHT = Budget(Decimal(8), Decimal("1e-5"), ManySmall())
RUN, BATCH, MIX = (t.mechanism for t in ledger.SHOWN)


def one_by_one(family_: tuple[Filter, ...], m: Mechanism) -> int:
    """As the ledger would do it."""
    costs = charge(m, family_, epsilon_bound=accounting.epsilon)
    states = [FilterState(f, 0, 0) for f in family_]
    n = 0
    while admitting(states, costs):
        n += 1
        states = [
            FilterState(s.filter, s.epsilon_units, s.delta_units, crossed=True)
            if s.crossed or c.epsilon_units == INFINITE
            else FilterState(
                s.filter, s.epsilon_units + c.epsilon_units, s.delta_units + c.delta_units
            )
            for s, c in zip(states, costs, strict=True)
        ]
    return n


@pytest.mark.parametrize("typical", ledger.TYPICAL, ids=lambda t: t.key)
def test_the_count_is_what_the_rule_admits_one_by_one(typical: ledger.Typical) -> None:
    two = family(Budget(Decimal(2), Decimal("1e-5"), ManySmall()))
    assert ledger.admitted(two, typical.mechanism) == one_by_one(two, typical.mechanism)


@pytest.mark.parametrize("last", [0, 1, 2, 3, 7, 8, 100])
def test_the_search_for_the_most_stops_where_it_must(last: int) -> None:
    assert ledger.most(lambda n: n <= last) == last
    assert ledger.most(lambda n: n <= last, at_most=5) == min(last, 5)


def test_published_counts_at_eight() -> None:
    assert ledger.basic(EIGHT, RUN, 10**13) == 8
    assert [ledger.equal_split(EIGHT, m) for m in (RUN, BATCH)] == [43, 905]
    assert ledger.best_order(EIGHT, RUN)[0] == 49
    assert ledger.along_the_path(EIGHT, RUN) == 56
    assert all(row[-1] == "yes" for row in ledger.target_rows())


def test_a_valid_rule_never_admits_more_than_the_composition_along_the_path() -> None:
    small = mechanism_from_json(sampled(5e-4, 1 / 1.769, 3000))
    for m in (RUN, MIX, small):
        most = ledger.along_the_path(EIGHT, m)
        assert ledger.admitted(family(EIGHT), m) <= ledger.best_order(EIGHT, m)[0] <= most


def test_the_chosen_shares_are_the_familys() -> None:
    assert family_of(EIGHT, ledger.CHOSEN) == family(EIGHT)
    better = ledger.mean_share(ledger.CHOSEN, ("8",))
    worse = ledger.mean_share((80, 10, 10), ("8",))
    assert 0.9 < better <= 1.0
    assert worse < better - 0.05
    with pytest.raises(ValueError, match="at most 100"):
        family_of(EIGHT, (50, 50, 1))


def test_rows_have_the_columns_that_the_page_names() -> None:
    (row,) = ledger.admission_rows(2, ledger.SHOWN[:1])
    assert row[0] == "2"
    assert row[2:4] == ["2", "3"]
    assert row[-1].startswith("*")
    ((what, label, *_, count),) = ledger.few_large_rows([(1, 1)], ledger.SHOWN[1:2])
    assert what == "(1, 1e-05), 1"
    assert "denoising" in label
    assert count == "1"


def test_the_command_line_knows_its_parts() -> None:
    assert ledger.parse([]).part is None
    assert ledger.parse(["--part", "admission"]).part == ["admission"]
    with pytest.raises(SystemExit):
        ledger.parse(["--part", "all"])
