"""The budget rule: a union of privacy filters, and what a mechanism costs in each.

Requests are chosen after earlier outputs were seen, so the rule has to hold for fully adaptive
composition. A dataset with budget (epsilon, delta) fixes, when the budget is set, a small family of
filters j with shares sum_j delta_j <= delta:

- order alpha: sum_i rho_i(alpha) <= cap = epsilon - conversion(alpha, delta_alpha);
- order inf:   sum_i epsilon_i <= epsilon and sum_i delta_i <= delta_inf.

A request is admitted if for **at least one** j the charges so far (waiting for approval, reserved,
started, released or failed) with this one added stay within cap_j.

Why the whole is (epsilon, delta)-DP
------------------------------------
docs/ledger.md states the theorem with its assumptions and proves it at length; in short: order the
releases by their start, let D, D' be neighbours, P and Q the laws of the transcript on them.

1. *Each filter alone.* M_j, the same process except that it refuses any start that would take the
   started charges beyond cap_j, is (epsilon, delta_j)-DP: at order alpha by the Renyi filter
   (Feldman and Zrnic 2021, theorem 3.1) and the conversion, at order inf by basic composition under
   adaptively chosen parameters (Rogers, Roth, Ullman and Vadhan 2016, theorem 3.6).
2. *Cover.* Let E_j be the set of transcripts whose started charges sum within cap_j. On E_j the
   true process and M_j never differ, since charges are non-negative and so no earlier start was
   beyond cap_j either: P[S & E_j] = P_j[S & E_j] for every event S, and likewise for Q. Every
   transcript lies in some E_j: at its last admission some j had reserved and started charges, that
   request included, within cap_j; what is started in the end is a subset of those, because only
   entries that never started are taken back and later starts were admitted earlier.
3. *Sum.* Assign each transcript to one j with E_j containing it, which partitions S into S_j:

       P[S] = sum_j P_j[S_j] <= sum_j (e^epsilon Q_j[S_j] + delta_j)
            = e^epsilon Q[S] + sum_j delta_j.

   QED. The shares must sum to delta: with all of delta in each filter the rule is wrong, and so is
   admitting by the composed privacy-loss distribution of the releases so far. Both are broken by
   adversaries in tests/accounting/test_adversary.py.

Numbers are integers: EPSILON_UNITS a nat, DELTA_UNITS for probability 1. Costs are rounded up, caps
down, equality is admitted; an epsilon or delta that a client wrote is the decimal as written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Final, TypeVar

from accounting import cumulants
from accounting.errors import InvalidMechanism, InvalidRequest
from accounting.mechanisms import MAX_EPSILON as MOST_EPSILON
from accounting.mechanisms import (
    ApproximateDP,
    Composition,
    Mechanism,
    SubsampledGaussian,
    check_count,
    check_decimal,
)

if TYPE_CHECKING:
    from accounting.bounds import Bracket

EPSILON_UNITS: Final = 10**9
DELTA_UNITS: Final = 10**18
# An infinite or overflowing cost crosses its filter and no other. It fits a 64-bit integer and is
# never added to anything.
INFINITE: Final = 2**63 - 1
_MOST_UNITS: Final = 10**13

MAX_EPSILON: Final = 1_000  # of a budget; a mechanism may have far more
MAX_RELEASES: Final = 1_000_000
INFINITE_ORDER: Final = "inf"

# The orders a family may pick from, least first, as decimal texts.
ORDERS: Final = (
    "1.03125", "1.0625", "1.125", "1.25", "1.5", "1.75", "2", "2.5", "3", "3.5", "4", "5", "6",
    "8", "10", "12", "16", "20", "24", "32", "48", "64", "96", "128", "192", "256", "384", "512",
    "768", "1024", "1536", "2048", "3072", "4096",
)  # fmt: skip

T = TypeVar("T")

# Shares of delta, in percent: (order inf, the order for Gaussian-like costs, the order for strongly
# subsampled ones). bench/ledger.py measures them beside others.
_FEW_LARGE_SHARES: Final = (90, 2, 8)
_MANY_SMALL_SHARES: Final = (25, 10, 65)

# What the second finite order is chosen for: 300 outputs of a denoising block.
_SUBSAMPLED: Final = SubsampledGaussian(5e-4, 1 / 1.769, 300)


# --------------------------------------------------------------------------------------------------
# The budget
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewLarge:
    """The owner expects ``releases`` releases, each a large part of the budget."""

    releases: int

    def __post_init__(self) -> None:
        _rename("use.releases", lambda: check_count("", self.releases, at_most=MAX_RELEASES))

    def to_json(self) -> dict[str, object]:
        return {"kind": "few_large", "releases": self.releases}


@dataclass(frozen=True)
class ManySmall:
    """The owner expects many releases, each a small part of the budget."""

    def to_json(self) -> dict[str, object]:
        return {"kind": "many_small"}


Use = FewLarge | ManySmall


@dataclass(frozen=True)
class Budget:
    """A dataset's budget, as the owner wrote it, and the use that its filters are chosen for.

    Attributes:
        organisation_caps: the most epsilon that each named organisation may use. It may then fill
            ``cap / epsilon`` of every filter: a way to share the budget out, and no guarantee.
        approval_above: a charge of more epsilon by basic composition waits for the owner.

    Raises:
        InvalidRequest: epsilon is not in (0, 1000], delta is not in (0, 1), delta is so small that
            a filter's share rounds down to nothing, or a cap or threshold is not in (0, epsilon].
    """

    epsilon: Decimal
    delta: Decimal
    use: Use
    organisation_caps: Mapping[str, Decimal] = field(default_factory=dict)
    approval_above: Decimal | None = None

    def __post_init__(self) -> None:
        number = self.epsilon
        _rename(
            "epsilon",
            lambda: check_decimal("", number, zero_allowed=False, at_most=MAX_EPSILON),
        )
        if int(Fraction(number) * EPSILON_UNITS) < 1:
            raise InvalidRequest("epsilon", f"must be at least {1 / EPSILON_UNITS:g}")
        small = self.delta
        _rename("delta", lambda: check_decimal("", small, zero_allowed=False, at_most=1))
        if small >= 1:
            raise InvalidRequest("delta", "must lie strictly between 0 and 1")
        infinite = int(Fraction(small) * DELTA_UNITS * _shares(self)[0] / 100)
        if infinite // _releases(self) < 1:
            raise InvalidRequest("delta", "is too small to be shared among the declared releases")
        for name, cap in self.organisation_caps.items():
            self._check_within(f"organisation_caps.{name}.epsilon", cap)
        if self.approval_above is not None:
            self._check_within("approval_above.epsilon", self.approval_above)

    def _check_within(self, name: str, value: Decimal) -> None:
        _rename(name, lambda: check_decimal("", value, zero_allowed=False, at_most=MAX_EPSILON))
        if value > self.epsilon:
            raise InvalidRequest(name, "must be at most the budget's epsilon")

    def to_json(self) -> dict[str, object]:
        found: dict[str, object] = {
            "epsilon": _number_or_text(self.epsilon),
            "delta": _number_or_text(self.delta),
            "use": self.use.to_json(),
        }
        if self.organisation_caps:
            found["organisation_caps"] = {
                name: {"epsilon": _number_or_text(cap)}
                for name, cap in sorted(self.organisation_caps.items())
            }
        if self.approval_above is not None:
            found["approval_above"] = {"epsilon": _number_or_text(self.approval_above)}
        return found

    @classmethod
    def from_json(cls, obj: object) -> Budget:
        """Reads what :meth:`to_json` writes::

            {"epsilon", "delta",
             "use": {"kind": "few_large", "releases": k} | {"kind": "many_small"},
             "organisation_caps": {ORGANISATION: {"epsilon"}}, "approval_above": {"epsilon"}}

        The last two may be missing or null.

        Raises:
            InvalidRequest: names the field that is missing, unknown or out of range.
        """
        fields = _object(
            "", obj, ("epsilon", "delta", "use"), optional=("organisation_caps", "approval_above")
        )
        caps = fields.get("organisation_caps", {})
        if not isinstance(caps, Mapping):
            raise InvalidRequest("organisation_caps", "must be a JSON object")
        threshold = fields.get("approval_above")
        return cls(
            _decimal("epsilon", fields["epsilon"]),
            _decimal("delta", fields["delta"]),
            _use(fields["use"]),
            {
                str(name): _only_epsilon(f"organisation_caps.{name}", cap)
                for name, cap in caps.items()
            },
            None if threshold is None else _only_epsilon("approval_above", threshold),
        )

    def needs_approval(self, filters: Sequence[Filter], costs: Sequence[Cost]) -> bool:
        """Whether a charge lies above the owner's threshold, by basic composition."""
        if self.approval_above is None:
            return False
        most = int(Fraction(self.approval_above) * EPSILON_UNITS)
        return any(
            cost.epsilon_units > most
            for f, cost in zip(filters, costs, strict=True)
            if f.order == INFINITE_ORDER
        )

    def share_of(self, organisation_id: str) -> Fraction | None:
        """The part of each filter that an organisation may fill; None where it has no cap."""
        cap = self.organisation_caps.get(organisation_id)
        return None if cap is None else Fraction(cap) / Fraction(self.epsilon)


def _only_epsilon(where: str, obj: object) -> Decimal:
    return _decimal(f"{where}.epsilon", _object(where, obj, ("epsilon",))["epsilon"])


def _use(obj: object) -> Use:
    if not isinstance(obj, Mapping):
        raise InvalidRequest("use", "must be a JSON object")
    kind = obj.get("kind")
    if kind == "few_large":
        releases = _object("use", obj, ("kind", "releases"))["releases"]
        if isinstance(releases, bool) or not isinstance(releases, int):
            raise InvalidRequest("use.releases", "must be an integer")
        return FewLarge(releases)
    if kind == "many_small":
        _object("use", obj, ("kind",))
        return ManySmall()
    raise InvalidRequest("use.kind", "must be few_large or many_small")


def _object(
    where: str, obj: object, names: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, object]:
    """The fields of an object; an optional one that is missing or null is left out."""
    prefix = f"{where}." if where else ""
    if not isinstance(obj, Mapping):
        raise InvalidRequest(where, "must be a JSON object")
    for name in names:
        if obj.get(name) is None:
            raise InvalidRequest(prefix + name, "is required")
    for name in obj:
        if name not in names and name not in optional:
            raise InvalidRequest(f"{prefix}{name}", "is not a field of a budget")
    return {name: obj[name] for name in (*names, *optional) if obj.get(name) is not None}


def _decimal(name: str, value: object) -> Decimal:
    return _rename(name, lambda: check_decimal("", value, zero_allowed=True, at_most=MOST_EPSILON))


def _rename(name: str, check: Callable[[], T]) -> T:
    """A mechanism field's check, as a check of a request's field."""
    try:
        return check()
    except InvalidMechanism as error:
        raise InvalidRequest(name, error.reason) from None


def _number_or_text(value: Decimal) -> float | str:
    near = float(value)
    return near if Decimal(repr(near)) == value else str(value)


# --------------------------------------------------------------------------------------------------
# The family
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filter:
    """One filter of a family.

    Attributes:
        order: "inf", or the Renyi order as decimal text.
        delta_units: the filter's share of delta; at order inf also the cap on sum delta_i.
        cap_units: the cap on the sum of epsilon or rho.
        delta_per_release_units: at order inf the delta_i that a computed charge is made at, else 0.
    """

    order: str
    delta_units: int
    cap_units: int
    delta_per_release_units: int

    def to_json(self) -> dict[str, object]:
        return {
            "order": self.order,
            "delta_units": self.delta_units,
            "cap_units": self.cap_units,
            "delta_per_release_units": self.delta_per_release_units,
        }


def _shares(budget: Budget) -> tuple[int, int, int]:
    return _FEW_LARGE_SHARES if isinstance(budget.use, FewLarge) else _MANY_SMALL_SHARES


def _releases(budget: Budget) -> int:
    """How many computed charges order inf has a delta for."""
    if isinstance(budget.use, FewLarge):
        return budget.use.releases
    # A release that order inf is any good for costs about a nat.
    return max(1, math.floor(budget.epsilon))


def cap_of(budget: Budget, order: str, delta_units: int) -> int:
    """epsilon - conversion(order, share) in units, rounded down; at most 0 if there is no room."""
    if delta_units < 1:
        return 0
    price = cumulants.conversion(float(order), math.log(delta_units / DELTA_UNITS))
    return math.floor((Fraction(budget.epsilon) - Fraction(price)) * EPSILON_UNITS)


def family(budget: Budget) -> tuple[Filter, ...]:
    """The filters of a budget: a published function of (epsilon, delta) and the declared use.

    ==============  =========  ========  ==========  ====================
    use             order inf  Gaussian  subsampled  releases at order inf
    ==============  =========  ========  ==========  ====================
    ``few_large``   90 %       2 %       8 %         as declared
    ``many_small``  25 %       10 %      65 %        max(1, floor(epsilon))
    ==============  =========  ========  ==========  ====================

    - *Order inf* makes computed charges at delta_i = delta_inf / releases.
    - *Gaussian*: the order of ORDERS with the largest cap(alpha)/alpha, the best one for costs
      proportional to alpha (plain Gaussians, noisy counts, DP-SGD at large rates).
    - *Subsampled*: the order with the largest cap(alpha)/rho(alpha) for a batch of 300 outputs of a
      denoising block (q 5e-4, mu 1.769), whose cost leaps where alpha passes 2 log(1/q)/mu^2. If
      even that order has no room for more of them than order inf has releases, as at every epsilon
      below 2.5 or so, the Gaussian order has both shares; and so it has if it is the same order.
    - If no order has a positive cap, order inf has all of delta.

    The shares were chosen by measurement (docs/accounting.md, bench/ledger.py).
    """
    return family_of(budget, _shares(budget))


def family_of(budget: Budget, percents: tuple[int, int, int]) -> tuple[Filter, ...]:
    """:func:`family` with other shares (order inf, Gaussian, subsampled), in percent of delta.

    Raises:
        ValueError: the shares are negative or sum to more than 100.
    """
    if min(percents) < 0 or sum(percents) > 100:
        raise ValueError("shares must be non-negative and sum to at most 100 percent")
    whole = Fraction(budget.delta) * DELTA_UNITS
    infinite, gaussian_share, subsampled_share = (int(whole * p / 100) for p in percents)
    releases = _releases(budget)
    caps = {order: cap_of(budget, order, subsampled_share) for order in ORDERS}
    batch = {order: _units(cumulants.renyi_cost(_SUBSAMPLED, float(order))) for order in ORDERS}
    subsampled = max(ORDERS, key=lambda order: Fraction(caps[order], batch[order]))
    finite = {}
    if caps[subsampled] > releases * batch[subsampled]:
        finite[subsampled] = subsampled_share
    else:
        gaussian_share += subsampled_share
    caps = {order: cap_of(budget, order, gaussian_share) for order in ORDERS}
    gaussian = max(ORDERS, key=lambda order: Fraction(caps[order]) / Fraction(order))
    if caps[gaussian] > 0:
        finite = {gaussian: gaussian_share + finite.get(gaussian, 0)} | {
            order: share for order, share in finite.items() if order != gaussian
        }
    if not finite:
        infinite = int(whole)
    epsilon_units = math.floor(Fraction(budget.epsilon) * EPSILON_UNITS)
    return (
        Filter(INFINITE_ORDER, infinite, epsilon_units, infinite // releases),
        *(Filter(order, share, cap_of(budget, order, share), 0) for order, share in finite.items()),
    )


def tightened(filters: Sequence[Filter], old: Budget, new: Budget) -> tuple[Filter, ...]:
    """The filters of a budget that was tightened: the same orders, with caps that only fall.

    Costs were computed for these orders, and at order inf for its delta of each release, so both
    stay. Each share of delta shrinks with delta, and each cap to what the new epsilon leaves. What
    was spent stays within the caps that it was admitted by: the guarantee remains that of ``old``.

    Raises:
        InvalidRequest: epsilon or delta is larger than before, or the use is another.
    """
    if new.epsilon > old.epsilon:
        raise InvalidRequest("epsilon", "can only be lowered")
    if new.delta > old.delta:
        raise InvalidRequest("delta", "can only be lowered")
    if new.use != old.use:
        raise InvalidRequest("use", "can't change")
    part = Fraction(new.delta) / Fraction(old.delta)
    found = []
    for f in filters:
        share = int(f.delta_units * part)
        if f.order == INFINITE_ORDER:
            cap = math.floor(Fraction(new.epsilon) * EPSILON_UNITS)
        else:
            cap = cap_of(new, f.order, share)
        found.append(replace(f, delta_units=share, cap_units=max(0, min(f.cap_units, cap))))
    return tuple(found)


def shared_out(f: Filter, share: Fraction) -> Filter:
    """The filter with the part of its caps that one organisation may fill."""
    return replace(f, cap_units=int(f.cap_units * share), delta_units=int(f.delta_units * share))


# --------------------------------------------------------------------------------------------------
# Charges
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What one entry costs in one filter; INFINITE crosses it. ``delta_units`` is 0 but at inf."""

    epsilon_units: int
    delta_units: int


@dataclass(frozen=True)
class FilterState:
    """A filter and what its entries sum to.

    ``crossed`` says that an entry with an INFINITE cost is among them; such a cost is not part of
    the sums.
    """

    filter: Filter
    epsilon_units: int
    delta_units: int
    crossed: bool = False


def charge(
    m: Mechanism,
    filters: Iterable[Filter],
    *,
    epsilon_bound: Callable[[Mechanism, float], Bracket],
) -> tuple[Cost, ...]:
    """What the mechanism costs in each of the filters, in their order, rounded up.

    At order inf an ``approximate_dp`` (or a composition of nothing else) is charged exactly as
    written; anything else is charged ``epsilon_bound(m, delta_i).upper`` at the filter's delta_i.
    """
    return tuple(_cost(m, f, epsilon_bound) for f in filters)


def _cost(m: Mechanism, f: Filter, epsilon_bound: Callable[[Mechanism, float], Bracket]) -> Cost:
    if f.order != INFINITE_ORDER:
        return Cost(_units(cumulants.renyi_cost(m, float(f.order))), 0)
    declared = _declared(m)
    if declared is None:
        upper = epsilon_bound(m, _delta_below(f.delta_per_release_units)).upper
        epsilon_units, delta_units = _units(upper), f.delta_per_release_units
    else:
        epsilon_units = _saturated(math.ceil(declared[0] * EPSILON_UNITS))
        delta_units = math.ceil(declared[1] * DELTA_UNITS)
    # A delta that no state could hold is kept out of the sums, which so stay within 64 bits.
    if epsilon_units == INFINITE or delta_units > f.delta_units:
        return Cost(INFINITE, INFINITE)
    return Cost(epsilon_units, delta_units)


def _declared(m: Mechanism) -> tuple[Fraction, Fraction] | None:
    """(sum epsilon_i, sum delta_i) as written, if the mechanism has no other parts."""
    parts = [(p.mechanism, p.count) for p in m.parts] if isinstance(m, Composition) else [(m, 1)]
    epsilon, delta = Fraction(0), Fraction(0)
    for part, count in parts:
        if not isinstance(part, ApproximateDP):
            return None
        epsilon += Fraction(part.epsilon) * part.count * count
        delta += Fraction(part.delta) * part.count * count
    return epsilon, delta


def _units(nats: float) -> int:
    """Units of a computed cost, rounded up; what is not a finite number crosses the filter."""
    if not math.isfinite(nats):
        return INFINITE
    return _saturated(math.ceil(Fraction(nats) * EPSILON_UNITS))


def _saturated(units: int) -> int:
    if units < 0:
        raise ValueError("a cost is negative")
    return INFINITE if units > _MOST_UNITS else units


def _delta_below(units: int) -> float:
    """The largest double at most units / DELTA_UNITS."""
    exact = Fraction(units, DELTA_UNITS)
    near = float(exact)
    return near if Fraction(near) <= exact else math.nextafter(near, 0.0)


def nats(units: int) -> float | str:
    """Epsilon in nats from its integer units; an infinite one is ``"inf"``."""
    return "inf" if units == INFINITE else units / EPSILON_UNITS


def probability(units: int) -> float | str:
    """Delta from its integer units; an infinite one is ``"inf"``."""
    return "inf" if units == INFINITE else units / DELTA_UNITS


def further_releases(states: Sequence[FilterState], costs: Sequence[Cost]) -> int | None:
    """How many more releases of this cost the rule admits, one after the other; None if no limit.

    Each counts in every filter, and the last of them needs one filter that holds them all.
    """
    most = 0
    for j in admitting(states, costs):
        state, cost = states[j], costs[j]
        room = [(state.filter.cap_units - state.epsilon_units, cost.epsilon_units)]
        if state.filter.order == INFINITE_ORDER:
            room.append((state.filter.delta_units - state.delta_units, cost.delta_units))
        counts = [left // each for left, each in room if each]
        if not counts:
            return None
        most = max(most, min(counts))
    return most


def admitting(states: Sequence[FilterState], costs: Sequence[Cost]) -> tuple[int, ...]:
    """The indexes j of the filters that stay within their cap with the cost added.

    The request is admitted if there is one. Reaching a cap exactly stays within it.
    """
    return tuple(
        j
        for j, (state, cost) in enumerate(zip(states, costs, strict=True))
        if not state.crossed
        and INFINITE not in (cost.epsilon_units, cost.delta_units)
        and state.epsilon_units + cost.epsilon_units <= state.filter.cap_units
        and (
            state.filter.order != INFINITE_ORDER
            or state.delta_units + cost.delta_units <= state.filter.delta_units
        )
    )
