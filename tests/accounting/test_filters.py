"""The budget rule: families, costs in integers, admission."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import accounting
from accounting import cumulants, filters, mechanism_from_json
from accounting.bounds import Bracket
from accounting.errors import InvalidRequest
from accounting.filters import (
    DELTA_UNITS,
    EPSILON_UNITS,
    INFINITE,
    Budget,
    Cost,
    FewLarge,
    Filter,
    FilterState,
    ManySmall,
    admitting,
    charge,
    family,
)
from accounting.mechanisms import Mechanism


def budget(epsilon: object, delta: object, use: object = None) -> Budget:
    return Budget.from_json(
        {"epsilon": epsilon, "delta": delta, "use": use or {"kind": "many_small"}}
    )


def few(epsilon: object, delta: object, releases: int = 1) -> Budget:
    return budget(epsilon, delta, {"kind": "few_large", "releases": releases})


def subsampled(q: float, noise_multiplier: float, count: int) -> Mechanism:
    return mechanism_from_json(
        {
            "kind": "subsampled_gaussian",
            "sampling_probability": q,
            "noise_multiplier": noise_multiplier,
            "count": count,
        }
    )


def declared(epsilon: object, delta: object = 0, count: int = 1) -> Mechanism:
    return mechanism_from_json(
        {"kind": "approximate_dp", "epsilon": epsilon, "delta": delta, "count": count}
    )


def never(m: Mechanism, delta: float) -> Bracket:
    raise AssertionError("what a client declared is charged as written")


def answered(upper: float) -> Any:
    def bound(_: Mechanism, delta: float) -> Bracket:
        return Bracket(0.0, upper, delta, "both", "renyi")

    return bound


def opened(family_: tuple[Filter, ...]) -> tuple[FilterState, ...]:
    return tuple(FilterState(f, 0, 0) for f in family_)


def added(states: tuple[FilterState, ...], costs: tuple[Cost, ...]) -> tuple[FilterState, ...]:
    return tuple(
        FilterState(s.filter, s.epsilon_units, s.delta_units, crossed=True)
        if INFINITE in (c.epsilon_units, c.delta_units)
        else FilterState(
            s.filter, s.epsilon_units + c.epsilon_units, s.delta_units + c.delta_units, s.crossed
        )
        for s, c in zip(states, costs, strict=True)
    )


def admitted_in_a_row(b: Budget, m: Mechanism, epsilon_bound: Any, most: int = 5000) -> int:
    states = opened(family(b))
    costs = charge(m, family(b), epsilon_bound=epsilon_bound)
    for n in range(most):
        if not admitting(states, costs):
            return n
        states = added(states, costs)
    return most


# -- the budget ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "obj",
    [
        {"epsilon": 6.0, "delta": 1e-5, "use": {"kind": "few_large", "releases": 1}},
        {"epsilon": 1000, "delta": 0.5, "use": {"kind": "many_small"}},
        {"epsilon": "0.10000000000000000001", "delta": "1e-9", "use": {"kind": "many_small"}},
    ],
)
def test_budget_round_trip(obj: dict[str, Any]) -> None:
    b = Budget.from_json(obj)
    assert Budget.from_json(json.loads(json.dumps(b.to_json()))) == b
    assert Decimal(str(b.to_json()["epsilon"])) == Decimal(str(obj["epsilon"]))
    assert b.to_json()["use"] == obj["use"]


GOOD: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "use": {"kind": "many_small"}}


@pytest.mark.parametrize(
    ("obj", "field"),
    [
        (None, ""),
        ([], ""),
        ({}, "epsilon"),
        *(
            (GOOD | {"epsilon": v}, "epsilon")
            for v in (0, -1, 1000.1, math.nan, math.inf, "x", True, None, 1e-10)
        ),
        *(
            (GOOD | {"delta": v}, "delta")
            for v in (0, -1e-5, 1, 1.5, math.nan, math.inf, "x", True, None, 1e-19)
        ),
        (GOOD | {"use": None}, "use"),
        (GOOD | {"use": "many_small"}, "use"),
        (GOOD | {"use": {}}, "use.kind"),
        (GOOD | {"use": {"kind": "all"}}, "use.kind"),
        (GOOD | {"use": {"kind": "many_small", "releases": 2}}, "use.releases"),
        (GOOD | {"use": {"kind": "few_large"}}, "use.releases"),
        *(
            (GOOD | {"use": {"kind": "few_large", "releases": v}}, "use.releases")
            for v in (0, -1, 1.5, "1", True, 10**7)
        ),
        (GOOD | {"budget": 1}, "budget"),
        # 900 units to share among a thousand releases
        (GOOD | {"delta": 1e-15, "use": {"kind": "few_large", "releases": 1000}}, "delta"),
    ],
)
def test_bad_budgets_name_their_field(obj: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Budget.from_json(obj)
    assert caught.value.field == field
    assert caught.value.code == "invalid_request"


def test_python_construction_is_checked_too() -> None:
    with pytest.raises(InvalidRequest):
        FewLarge(0)
    with pytest.raises(InvalidRequest):
        Budget(Decimal("NaN"), Decimal("1e-5"), ManySmall())


# -- the family ------------------------------------------------------------------------------------

budgets = st.builds(
    budget,
    st.decimals("1e-6", 1000, places=6).filter(lambda d: d > 0).map(str),
    st.integers(-12, -1).map(lambda k: f"1e{k}"),
    st.one_of(
        st.just({"kind": "many_small"}),
        st.integers(1, 1000).map(lambda k: {"kind": "few_large", "releases": k}),
    ),
)


@given(budgets)
@settings(max_examples=200, deadline=None)
def test_shares_stay_within_delta_and_caps_are_positive(b: Budget) -> None:
    found = family(b)
    assert found == family(b)
    infinite, *finite = found
    assert infinite.order == "inf"
    assert infinite.cap_units == int(b.epsilon * EPSILON_UNITS)
    assert sum(f.delta_units for f in found) <= b.delta * DELTA_UNITS
    releases = b.use.releases if isinstance(b.use, FewLarge) else max(1, int(b.epsilon))
    assert infinite.delta_per_release_units * releases <= infinite.delta_units
    assert infinite.delta_per_release_units >= 1
    assert len(finite) <= 2
    assert len({f.order for f in found}) == len(found)
    for f in finite:
        assert f.cap_units > 0
        assert f.delta_units > 0
        assert f.delta_per_release_units == 0
        # the cap, in decimal arithmetic: never too large
        order = Decimal(f.order)
        share = Decimal(f.delta_units) / DELTA_UNITS
        price = (1 - 1 / order).ln() - (share.ln() + order.ln()) / (order - 1)
        exact = (b.epsilon - price) * EPSILON_UNITS
        assert 0 <= exact - f.cap_units <= 2


def test_few_large_gives_most_of_delta_to_order_inf() -> None:
    found = family(few(6, 1e-5, 3))
    assert found[0] == Filter("inf", 9 * 10**12, 6 * 10**9, 3 * 10**12)
    assert [f.order for f in found[1:]] == ["6", "4"]
    assert [f.delta_units for f in found[1:]] == [2 * 10**11, 8 * 10**11]


def test_many_small_gives_most_of_delta_to_finite_orders() -> None:
    found = family(budget(8, 1e-5))
    assert [f.order for f in found] == ["inf", "4", "3.5"]
    assert [f.delta_units for f in found] == [25 * 10**11, 10**12, 65 * 10**11]
    # order inf is prepared for a release a nat
    assert found[0].delta_per_release_units == 25 * 10**11 // 8


def test_an_order_that_nothing_needs_leaves_its_share_to_another() -> None:
    # at small epsilons no order has room for denoising batches
    infinite, gaussian = family(budget(2, 1e-5))
    assert (infinite.delta_units, gaussian.delta_units) == (25 * 10**11, 75 * 10**11)
    assert infinite.delta_per_release_units == 25 * 10**11 // 2
    # at large ones the same order is best for all releases
    infinite, both = family(budget(30, 1e-5))
    assert (both.order, both.delta_units) == ("2", 75 * 10**11)
    # in between, the lower order is there for the batches
    orders = [f.order for f in family(budget(4, 1e-5))]
    assert orders == ["inf", "8", "4"]


def test_small_budgets_use_larger_orders() -> None:
    best = [float(family(budget(e, 1e-5))[1].order) for e in (16, 8, 4, 2, 1, 0.5, 0.1)]
    assert best == sorted(best)
    assert best[-1] >= 100
    # where no order has a positive cap, order inf has all of delta
    (alone,) = family(budget(1e-6, 1e-12))
    assert alone.delta_units == alone.delta_per_release_units == 10**6


def test_filters_are_written_as_integers() -> None:
    written = family(budget(8, 1e-5))[1].to_json()
    assert written == json.loads(json.dumps(written))
    assert written["order"] == "4"
    # 8 - conversion(4, 1e-6), whose logarithms may differ by a unit between machines
    assert abs(int(str(written["cap_units"])) - 4_144_610_006) <= 2


# -- how many are admitted -------------------------------------------------------------------------


def renyi_bound(m: Mechanism, delta: float) -> Bracket:
    """A valid, if loose, bound that needs no subprocess."""
    return Bracket(0.0, cumulants.renyi_epsilon(m, delta), delta, "both", "renyi")


RUN = subsampled(1 / 14, 14.78, 2100)  # DP-SGD
BATCH = subsampled(5e-4, 1 / 1.769, 300)  # denoising, 300 outputs a class


@pytest.mark.parametrize(
    ("epsilon", "m", "least"),
    [
        (8, RUN, 45),
        (8, BATCH, 1000),
        (4, RUN, 12),
        (4, BATCH, 150),
        (2, RUN, 4),
        (1, RUN, 1),
    ],
)
def test_many_small_releases(epsilon: int, m: Mechanism, least: int) -> None:
    assert admitted_in_a_row(budget(epsilon, 1e-5), m, renyi_bound) >= least


@pytest.mark.parametrize("epsilon", ["0.1", "0.5", "1", "2", "4", "8", "16", "30"])
def test_small_releases_get_most_of_what_the_best_order_admits(epsilon: str) -> None:
    """At every budget, not only at those that the shares were chosen at."""
    b = budget(epsilon, 1e-5)
    small = mechanism_from_json({"kind": "gaussian", "noise_multiplier": 500})
    best = max(
        int(
            filters.cap_of(b, order, 10**13)
            // charge(small, [f], epsilon_bound=never)[0].epsilon_units
        )
        for order in filters.ORDERS
        for f in [Filter(order, 10**13, 0, 0)]
    )
    (_, *finite) = family(b)
    costs = charge(small, finite, epsilon_bound=never)
    ours = max(f.cap_units // c.epsilon_units for f, c in zip(finite, costs, strict=True))
    assert 0.8 * best <= ours <= best


def test_one_large_release_fits_its_budget() -> None:
    # epsilon is 0.81 at 1e-5: one of them fits (1, 1e-5), two don't
    assert accounting.epsilon(RUN, 1e-5).upper < 0.9
    assert admitted_in_a_row(few(1, 1e-5), RUN, accounting.epsilon) == 1
    # the ledger's delta is the family's, not the certificate's
    (cost, *_) = charge(RUN, family(few(1, 1e-5)), epsilon_bound=accounting.epsilon)
    assert cost.delta_units == 9 * 10**12
    at_ledger = accounting.epsilon(RUN, filters._delta_below(9 * 10**12)).upper
    assert cost.epsilon_units == math.ceil(Fraction(at_ledger) * EPSILON_UNITS)


def test_declared_releases_fit_a_few_large_budget() -> None:
    b = few(2, 1e-5, 3)
    states = opened(family(b))
    for text in ("1.0", "0.1", "0.9"):
        costs = charge(declared(text), family(b), epsilon_bound=never)
        assert 0 in admitting(states, costs)
        states = added(states, costs)
    assert states[0].epsilon_units == states[0].filter.cap_units
    # full to the last unit: one more of the smallest size is too many for order inf
    assert 0 not in admitting(states, charge(declared("1e-9"), family(b), epsilon_bound=never))


# -- costs -----------------------------------------------------------------------------------------

TWO = family(budget(8, 1e-5))


def test_declared_decimals_are_charged_as_written() -> None:
    (cost, *_) = charge(declared(0.1, 1e-9, 3), TWO, epsilon_bound=never)
    assert cost == Cost(300_000_000, 3 * 10**9)  # binary 0.1 * 3 would round up to one unit more
    parts = [
        {"mechanism": declared(0.1).to_json(), "count": 2},
        {"mechanism": declared(0.3, 1e-9).to_json()},
    ]
    both = mechanism_from_json({"kind": "composition", "parts": parts})
    assert charge(both, TWO, epsilon_bound=never)[0] == Cost(500_000_000, 10**9)
    (tiny, *_) = charge(declared("1e-30", "1e-30"), TWO, epsilon_bound=never)
    assert tiny == Cost(1, 1)  # rounded up


def test_a_mixed_composition_is_charged_what_the_bound_says() -> None:
    parts = [{"mechanism": declared(0.1).to_json()}, {"mechanism": subsampled(0.1, 2, 5).to_json()}]
    both = mechanism_from_json({"kind": "composition", "parts": parts})
    cost = charge(both, TWO, epsilon_bound=answered(0.25))[0]
    assert cost == Cost(250_000_000, TWO[0].delta_per_release_units)


def test_computed_costs_are_rounded_up() -> None:
    m = subsampled(0.01, 1.0, 7)
    infinite, *finite = charge(m, TWO, epsilon_bound=answered(0.1))
    assert infinite.epsilon_units == 100_000_001  # binary 0.1 lies above one tenth
    for cost, f in zip(finite, TWO[1:], strict=True):
        exact = Fraction(cumulants.renyi_cost(m, float(f.order))) * EPSILON_UNITS
        assert 0 <= cost.epsilon_units - exact < 1
        assert cost.delta_units == 0


def test_the_bound_is_asked_at_the_delta_that_is_charged() -> None:
    asked: list[float] = []

    def bound(m: Mechanism, delta: float) -> Bracket:
        asked.append(delta)
        return Bracket(0.0, 0.5, delta, "both", "renyi")

    charge(subsampled(0.01, 1.0, 7), family(few(1, 1e-5, 7)), epsilon_bound=bound)
    (delta,) = asked
    exact = Fraction(family(few(1, 1e-5, 7))[0].delta_per_release_units, DELTA_UNITS)
    assert Fraction(delta) <= exact
    assert delta == pytest.approx(float(exact), rel=1e-15)


@pytest.mark.parametrize("upper", [math.inf, 1e300, 10_000.000001])
def test_overflowing_costs_are_infinite(upper: float) -> None:
    cost = charge(subsampled(0.01, 1.0, 7), TWO, epsilon_bound=answered(upper))[0]
    assert cost.epsilon_units == INFINITE
    assert charge(subsampled(1.0, 1e-3, 7), TWO, epsilon_bound=answered(1.0))[1] == Cost(
        INFINITE, 0
    )


def test_an_undefined_bound_is_never_admitted() -> None:
    costs = charge(subsampled(1.0, 1e-3, 7), TWO, epsilon_bound=answered(math.nan))
    assert admitting(opened(TWO), costs) == ()


def test_integers_fit_64_bits() -> None:
    assert INFINITE < 2**63
    assert filters._MOST_UNITS < INFINITE
    huge = charge(declared(1e6, 0.9, 10**9), TWO, epsilon_bound=never)
    assert all(0 <= c.epsilon_units <= INFINITE for c in huge)
    assert all(0 <= c.delta_units <= INFINITE for c in huge)


# -- admission -------------------------------------------------------------------------------------


def test_reaching_the_cap_is_admitted_and_one_unit_more_is_not() -> None:
    f = Filter("2", 10, 100, 0)
    state = FilterState(f, 60, 0)
    assert admitting([state], [Cost(40, 0)]) == (0,)
    assert admitting([state], [Cost(41, 0)]) == ()
    infinite = FilterState(Filter("inf", 10, 100, 1), 60, 7)
    assert admitting([infinite], [Cost(40, 3)]) == (0,)
    assert admitting([infinite], [Cost(40, 4)]) == ()
    assert admitting([infinite], [Cost(41, 3)]) == ()


def test_an_infinite_cost_crosses_its_filter_only() -> None:
    costs = charge(declared(0.5, 1e-9), TWO, epsilon_bound=never)
    assert [c.epsilon_units == INFINITE for c in costs] == [False, True, True]
    assert admitting(opened(TWO), costs) == (0,)
    after = added(opened(TWO), costs)
    assert [s.crossed for s in after] == [False, True, True]
    # a crossed filter admits nothing any more, the other still does
    small = charge(subsampled(5e-4, 10.0, 1), TWO, epsilon_bound=answered(0.001))
    assert admitting(opened(TWO), small) == (0, 1, 2)
    assert admitting(after, small) == (0,)


def test_a_delta_beyond_the_share_crosses_order_inf() -> None:
    costs = charge(declared(0.5, 1e-5), TWO, epsilon_bound=never)
    assert costs[0] == Cost(INFINITE, INFINITE)
    assert admitting(opened(TWO), costs) == ()


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 5)), max_size=12),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_what_is_started_in_the_end_stays_within_some_cap(
    requests: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Admit by the union, cancel some that never started: the rest is within one filter's cap."""
    pair = (Filter("inf", 20, 100, 2), Filter("3", 10, 90, 0))
    held: list[tuple[tuple[Cost, Cost], bool]] = []

    def states(entries: list[tuple[Cost, Cost]]) -> tuple[FilterState, ...]:
        now = opened(pair)
        for costs in entries:
            now = added(now, costs)
        return now

    for epsilon, rho, delta in requests:
        costs = (Cost(epsilon, delta), Cost(INFINITE if rho == 60 else rho, 0))
        if admitting(states([c for c, _ in held]), costs):
            held.append((costs, data.draw(st.booleans())))
        if data.draw(st.booleans()):
            held = [(c, starts) for c, starts in held if starts or data.draw(st.booleans())]
    started = states([c for c, starts in held if starts])
    nothing = (Cost(0, 0), Cost(0, 0))
    assert admitting(started, nothing)


def test_states_and_costs_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        admitting(opened(TWO), (Cost(1, 0),))
