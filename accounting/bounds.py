"""Brackets [lower, upper] of epsilon at delta, and of delta at epsilon.

The upper end is what a certificate states; the lower end shows how tight it is. Both are proven
(docs/accounting.md), whatever the method:

- ``gaussian_dp_closed_form``: nothing is sampled, so the exact curve is inverted.
- ``closed_form``: one output of a sampled Gaussian or of a Laplace mechanism.
- ``randomized_response``: equal pure-DP parts, by the exact binomial sum.
- ``as_declared``: (epsilon, delta) parts only, added up as written.
- ``contour``: everything else, by :mod:`accounting.contour`.
- ``renyi``: :mod:`accounting.cumulants`, an upper end where the contour gives none.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, Literal, TypeVar

import numpy as np

from accounting import closed_forms, contour, cumulants
from accounting.clock import Clock
from accounting.errors import InvalidRequest
from accounting.mechanisms import (
    MAX_EPSILON,
    NEIGHBORING_RELATION,
    ApproximateDPTerm,
    GaussianTerm,
    Mechanism,
    Term,
    dominating_terms,
    mechanism_digest,
    realised_terms,
)
from accounting.rounding import U, float_above

VERSION: Final = "2"  # of the numbers: it changes when an answer may
CACHE_SIZE: Final = 4096
MAX_POINTS: Final = 1000
RELATIVE_TOLERANCE: Final = 1e-3
ABSOLUTE_TOLERANCE: Final = 1e-3
LEAST_DELTA: Final = 1e-300  # near where doubles end
LEAST_TOLERANCE: Final = 1e-9
NEGLIGIBLE: Final = 1e-7  # a width of epsilon that is narrow enough, however small epsilon is

_MANY_TERMS: Final = 100
_NO_LESS: Final = "double precision, or the limit on work, allowed no less"
# Parts that count by their total variation distance: where the others have a closed form, and
# where the contour finds none with all of them, as a share of delta.
_MOST_ABSORBED: Final = 0.1
_TINY: Final = 1e-4
_STANDS_FOR_MANY: Final = "one pair stands for many classes, so the upper end is not tight"

Direction = Literal["remove", "add", "both"]
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What one question may use: wall-clock seconds, and MiB for a method that runs apart."""

    seconds: float = 60.0
    megabytes: int = 4096

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InvalidRequest("limits.seconds", "must be positive and finite")
        if self.megabytes < 1:
            raise InvalidRequest("limits.megabytes", "must be at least 1")


DEFAULT: Final = Limits()


@dataclass(frozen=True)
class Bracket:
    """The mechanism's epsilon at ``delta`` lies in [lower, upper].

    ``direction`` is the neighbouring direction that dominates (the one whose upper is larger);
    ``error_terms`` holds the sizes of what the method allowed for; ``reason`` says why an end is
    infinite, or why the bracket is wider than was asked for.
    """

    lower: float
    upper: float
    delta: float
    direction: Direction
    method: str
    error_terms: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    neighboring_relation: str = NEIGHBORING_RELATION
    version: str = VERSION

    def to_json(self) -> dict[str, object]:
        return _to_json(self, ("lower", "upper", "delta"))


@dataclass(frozen=True)
class DeltaBracket:
    """The mechanism's delta at ``epsilon`` lies in [lower, upper]; fields as in Bracket.

    What is aimed at is a width of contour.ACCURACY of the upper end.
    """

    lower: float
    upper: float
    epsilon: float
    direction: Direction
    method: str
    error_terms: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    neighboring_relation: str = NEIGHBORING_RELATION
    version: str = VERSION

    def to_json(self) -> dict[str, object]:
        return _to_json(self, ("lower", "upper", "epsilon"))


def _to_json(b: Bracket | DeltaBracket, numbers: Sequence[str]) -> dict[str, object]:
    out: dict[str, object] = {}
    for name in numbers:
        value = getattr(b, name)
        out[name] = "inf" if value == math.inf else value
    out |= {
        "direction": b.direction,
        "method": b.method,
        "error_terms": dict(b.error_terms),
        "neighboring_relation": b.neighboring_relation,
        "version": b.version,
    }
    return out | ({"reason": b.reason} if b.reason else {})


# --------------------------------------------------------------------------------------------------
# The face
# --------------------------------------------------------------------------------------------------


def epsilon(
    m: Mechanism, delta: float, *, tolerance: float | None = None, limits: Limits = DEFAULT
) -> Bracket:
    """The bracket of epsilon at delta.

    Args:
        tolerance: the wanted width; by default the smaller of 1e-3 and 1e-3 of epsilon (1e-7 where
            epsilon is below 1e-4). Where
            double precision or the limits do not allow it, the bracket is wider and says why.

    Raises:
        InvalidRequest: delta is not a number in (0, 1), or the tolerance not one in
            [LEAST_TOLERANCE, inf).
    """
    delta = _check_delta(delta)
    if tolerance is not None:
        tolerance = _check_tolerance(tolerance)

    def wanted(value: float) -> float:
        return _default_tolerance(value) if tolerance is None else tolerance

    return _ask(m, delta, wanted, limits, tolerance)


def confirming_epsilon(m: Mechanism, delta: float, *, limits: Limits = DEFAULT) -> Bracket:
    """As :func:`epsilon`, but a tenth as wide: for checking what it answered elsewhere.

    Another build or processor rounds otherwise, and may choose other parameters. An upper end a
    tenth as far from the truth lies below the one that was stated all the same.
    """

    def wanted(value: float) -> float:
        return max(0.1 * _default_tolerance(value), LEAST_TOLERANCE)

    return _ask(m, _check_delta(delta), wanted, limits, "confirming")


def _default_tolerance(epsilon: float) -> float:
    return max(NEGLIGIBLE, min(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * epsilon))


def _ask(
    m: Mechanism,
    delta: float,
    wanted: Callable[[float], float],
    limits: Limits,
    name: float | str | None,
) -> Bracket:
    def compute() -> tuple[Bracket, bool]:
        clock = Clock(limits.seconds)
        answers = [_epsilon(terms, delta, wanted, clock) for terms in dominating_terms(m)]
        worst = max(answers, key=lambda b: b.upper)
        lower = max(a.lower for a in answers)
        below = realised_terms(m)
        if below is not None:
            asked = (_epsilon(terms, delta, wanted, clock).lower for terms in below)
            lower = min(worst.upper, max(asked))
            worst = replace(worst, reason=_STANDS_FOR_MANY)
        # What the time cut short would be another answer on an idle machine.
        return replace(worst, lower=lower), not clock.ran_out

    return _CACHE.get(("epsilon", mechanism_digest(m), delta, name), compute)


def delta(m: Mechanism, epsilon: float, *, limits: Limits = DEFAULT) -> DeltaBracket:
    """The bracket of delta at epsilon.

    Raises:
        InvalidRequest: epsilon is not a number in [0, MAX_EPSILON].
    """
    return profile(m, (epsilon,), limits=limits)[0]


def profile(
    m: Mechanism, epsilons: Sequence[float], *, limits: Limits = DEFAULT
) -> list[DeltaBracket]:
    """The brackets of delta at each of the epsilons.

    Raises:
        InvalidRequest: an epsilon is not a number in [0, MAX_EPSILON], or there are none, or more
            than MAX_POINTS.
    """
    if not 0 < len(epsilons) <= MAX_POINTS:
        raise InvalidRequest("epsilons", f"must hold between 1 and {MAX_POINTS} numbers")
    points = tuple(_check_epsilon(e) for e in epsilons)

    def compute() -> tuple[list[DeltaBracket], bool]:
        clock = Clock(limits.seconds)
        answers = [_profile(terms, points, clock) for terms in dominating_terms(m)]
        out = []
        for column in zip(*answers, strict=True):
            worst = max(column, key=lambda b: b.upper)
            out.append(replace(worst, lower=max(b.lower for b in column)))
        below = realised_terms(m)
        if below is not None:
            columns = zip(*(_profile(terms, points, clock) for terms in below), strict=True)
            lowers = [max(b.lower for b in column) for column in columns]
            out = [
                replace(b, lower=min(b.upper, lower), reason=_STANDS_FOR_MANY)
                for b, lower in zip(out, lowers, strict=True)
            ]
        return out, not clock.ran_out

    return list(_CACHE.get(("profile", mechanism_digest(m), points), compute))


def renyi(m: Mechanism, delta: float) -> Bracket:
    """The cheap bracket: a proven upper end in a millisecond, and no lower end."""
    return Bracket(0.0, cumulants.renyi_epsilon(m, delta), delta, "both", "renyi")


def warm_up() -> None:
    """Answers one question, so that the first request need not wait for libraries to load."""
    terms = (GaussianTerm(sampling_probability=0.01, mu=1.0, count=100),)
    _epsilon(terms, 1e-5, lambda value: 1e-3 * value, Clock(DEFAULT.seconds))


def _check_delta(value: object) -> float:
    number = _check_number("delta", value)
    if not 0.0 < number < 1.0:
        raise InvalidRequest("delta", "must lie strictly between 0 and 1")
    if number < LEAST_DELTA:
        raise InvalidRequest("delta", f"must be at least {LEAST_DELTA:g}")
    return number


def _check_epsilon(value: object) -> float:
    number = _check_number("epsilon", value)
    if not 0.0 <= number <= MAX_EPSILON:
        raise InvalidRequest("epsilon", f"must lie between 0 and {MAX_EPSILON:g}")
    return number + 0.0  # and not -0.0


def _check_tolerance(value: object) -> float:
    number = _check_number("tolerance", value)
    if not number >= LEAST_TOLERANCE:
        raise InvalidRequest("tolerance", f"must be at least {LEAST_TOLERANCE:g}")
    return number


def _check_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(name, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        raise InvalidRequest(name, "is too large") from None
    if not math.isfinite(number):
        raise InvalidRequest(name, "must be finite")
    return number


class _Cache:
    """A bounded, thread-safe memory of final answers, the least recently used one dropped."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._kept: OrderedDict[object, Any] = OrderedDict()

    def get(self, key: object, compute: Callable[[], tuple[T, bool]]) -> T:
        """The kept value, or what compute gives; kept only if compute calls it final."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                kept: T = self._kept[key]
                return kept
        value, final = compute()
        if final:
            with self._lock:
                self._kept[key] = value
                while len(self._kept) > self._size:
                    self._kept.popitem(last=False)
        return value

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


_CACHE: Final = _Cache(CACHE_SIZE)


# --------------------------------------------------------------------------------------------------
# One composition of terms
# --------------------------------------------------------------------------------------------------


def _epsilon(
    terms: tuple[Term, ...], delta: float, tolerance: Callable[[float], float], clock: Clock
) -> Bracket:
    impossible = _beyond_mass(terms, delta)
    if impossible is not None:
        reason = f"delta is below {impossible:.6g}, the probability that a declared part gives up"
        return Bracket(math.inf, math.inf, delta, "both", "as_declared", reason=reason)

    declared = _as_declared(terms, delta)
    if declared is not None and _is_stated(terms, delta):
        lower = _worst_declared_epsilon(terms[0], delta)
        return Bracket(lower, declared, delta, "both", "as_declared")

    best = _beside_mass(terms, delta, tolerance, clock)
    if declared is not None and declared < best.upper:
        best = replace(best, upper=declared, lower=min(best.lower, declared), method="as_declared")
    return best


def _beside_mass(
    terms: tuple[Term, ...], delta: float, tolerance: Callable[[float], float], clock: Clock
) -> Bracket:
    """The bracket by way of the rest's delta: delta = m + (1 - m) rest, m within its two bounds."""
    least, most = _mass(terms)
    strict, lenient = _rest(delta, most, up=False), _rest(delta, least, up=True)
    if strict <= 0.0:
        # delta is the mass itself as far as double precision tells.
        reason = "delta is too close to the probability that a declared part gives up"
        below = _rest_epsilon(terms, lenient, tolerance, clock)
        return replace(below, upper=math.inf, delta=delta, reason=reason)
    found = _rest_epsilon(terms, strict, tolerance, clock)
    if strict == lenient:
        return replace(found, delta=delta)
    below = _rest_epsilon(terms, lenient, tolerance, clock)
    return replace(found, lower=min(below.lower, found.upper), delta=delta)


def _rest_epsilon(
    terms: tuple[Term, ...], delta: float, tolerance: Callable[[float], float], clock: Clock
) -> Bracket:
    if delta >= 1.0:
        return Bracket(0.0, 0.0, delta, "both", "as_declared")
    exact = closed_forms.epsilon_bounds(terms, delta)
    if exact is not None:
        return Bracket(exact.lower, exact.upper, delta, exact.direction, exact.method)
    top = closed_forms.top_bounds(terms, delta)
    if top is not None and top[1] - top[0] <= tolerance(top[0]):
        return Bracket(*top, delta, "both", "closed_form")

    def is_narrow(bracket: Bracket) -> bool:
        return bracket.upper - bracket.lower <= tolerance(bracket.lower)

    beside = _beside_formula(terms, delta)
    if beside is not None and is_narrow(beside):
        return beside
    found = _by_contour(terms, delta, tolerance, clock)
    if is_narrow(found):
        return found
    lower = max(found.lower, closed_forms.least_epsilon(terms, delta))
    found = replace(found, lower=min(lower, found.upper))
    if beside is not None:
        found = _meet(found, beside)
    few = _without_tiny(terms, delta)
    if few is not None and not is_narrow(found) and not clock.is_over():
        rest, tiny = few
        low = _rest_epsilon(rest, delta, tolerance, clock)
        high = _rest_epsilon(rest, _less(delta, tiny), tolerance, clock)
        found = _meet(found, replace(high, lower=min(low.lower, high.upper), delta=delta))
    return replace(found, reason="") if is_narrow(found) else found


def _by_contour(
    terms: tuple[Term, ...], delta: float, tolerance: Callable[[float], float], clock: Clock
) -> Bracket:
    """The contour's bracket, or the Renyi bound where that one is smaller or all there is."""
    try:
        found, direction = contour.epsilon_of(terms, delta, tolerance, _for_contour(terms, clock))
    except contour.OutOfReach as stop:
        upper, order, by = cumulants.best_epsilon(_without_deltas(terms), delta)
        errors = {"order": order}
        reason = f"the contour gave no bound: {stop}"
        return Bracket(0.0, upper, delta, _direction(by), "renyi", errors, reason)
    best = Bracket(
        found.lower, found.upper, delta, direction, "contour", found.error_terms, found.reason
    )
    width = best.upper - best.lower
    if width > 4.0 * max(tolerance(best.upper), 1e-6) and width > 0.02 * best.upper:
        # The contour had to stop short, and the Renyi bound may be the better one.
        upper, order, by = cumulants.best_epsilon(_without_deltas(terms), delta)
        if upper < best.upper:
            lower = min(best.lower, upper)
            best = replace(
                best,
                lower=lower,
                upper=upper,
                direction=_direction(by),
                method="renyi",
                error_terms={"order": order},
            )
    return best


def _for_contour(terms: tuple[Term, ...], clock: Clock) -> Clock:
    """The contour's time: of many parts the Renyi bound may need the rest."""
    return clock.share(1.0 if len(terms) <= _MANY_TERMS else 0.7)


# -- parts that hardly count -----------------------------------------------------------------------
#
# Parts whose total variation distances add up to v move delta by at most v, at every epsilon, so
# that delta_A <= delta <= delta_A + v for the others A, and epsilon_A(delta) <= epsilon <=
# epsilon_A(delta - v) (docs/accounting.md).


def _less(delta: float, tiny: float) -> float:
    """delta - tiny, rounded down."""
    return (delta - tiny) * (1.0 - 4.0 * U)


def _meet(best: Bracket, other: Bracket) -> Bracket:
    """What two proven brackets leave."""
    if other.upper < best.upper:
        best, other = replace(other, reason=best.reason), best
    return replace(best, lower=min(max(best.lower, other.lower), best.upper))


def _beside_formula(terms: tuple[Term, ...], delta: float) -> Bracket | None:
    """The best bracket from some parts' closed form, the others counting by total variation."""
    best: Bracket | None = None
    for some, tiny in _formulas(terms):
        if not tiny <= _MOST_ABSORBED * delta:
            continue
        low = closed_forms.epsilon_bounds(some, delta)
        high = closed_forms.epsilon_bounds(some, _less(delta, tiny))
        errors = {"absorbed": tiny}
        if low is not None and high is not None:
            lower, upper = min(low.lower, high.upper), high.upper
            found = Bracket(lower, upper, delta, high.direction, high.method, errors)
        else:
            top = closed_forms.top_bounds(some, delta)
            if top is None:
                continue
            found = Bracket(*top, delta, "both", "closed_form", errors)
        best = found if best is None else _meet(best, found)
    return best


def _formulas(terms: tuple[Term, ...]) -> list[tuple[tuple[Term, ...], float]]:
    """Sub-compositions with a closed form, and the total variation of what each leaves out."""
    if not 1 < len(terms) <= _MANY_TERMS:
        return []
    each = [contour.total_variation((term,)) for term in terms]
    found = []
    for chosen in closed_forms.whole_parts(terms):
        left = [v for i, v in enumerate(each) if i not in chosen]
        if left:
            some = tuple(terms[i] for i in sorted(chosen))
            found.append((some, math.fsum(left) * (1.0 + 4.0 * U)))
    return found


def _without_tiny(terms: tuple[Term, ...], delta: float) -> tuple[tuple[Term, ...], float] | None:
    """(the terms but those that hardly count at delta, the total variation of these)."""
    ranked = sorted(terms, key=lambda term: contour.total_variation((term,)))
    dropped = 0
    while dropped < len(ranked) - 1:
        if contour.total_variation(ranked[: dropped + 1]) > _TINY * delta:
            break
        dropped += 1
    if dropped == 0:
        return None
    return tuple(ranked[dropped:]), contour.total_variation(ranked[:dropped])


# -- delta -----------------------------------------------------------------------------------------


def _profile(
    terms: tuple[Term, ...], points: tuple[float, ...], clock: Clock
) -> list[DeltaBracket]:
    least, most = _mass(terms)
    ordered = sorted(set(points))
    out = {e: found for e in ordered if (found := _by_formula(terms, e)) is not None}
    others = [e for e in ordered if e not in out]
    if others:
        out |= _curve(terms, others, clock)
    if most == 0.0:
        return [out[e] for e in points]
    return [
        _with_reason(
            replace(
                out[e],
                lower=(least + (1.0 - most) * out[e].lower) * (1.0 - 1e-15),
                upper=min(1.0, (most + (1.0 - least) * out[e].upper) * (1.0 + 1e-15)),
            ),
            out[e].reason,
        )
        for e in points
    ]


def _by_formula(terms: tuple[Term, ...], epsilon: float) -> DeltaBracket | None:
    """The bracket of delta where a closed form makes it as narrow as the aim."""
    exact = closed_forms.delta_bounds(terms, epsilon)
    if exact is not None:
        return DeltaBracket(exact.lower, exact.upper, epsilon, exact.direction, exact.method)
    for some, tiny in _formulas(terms):
        exact = closed_forms.delta_bounds(some, epsilon)
        if exact is None:
            continue
        found = DeltaBracket(exact.lower, exact.upper, epsilon, exact.direction, exact.method)
        found = _beside(replace(found, upper=1.0), found, tiny)
        if not _is_wide(found):
            return found
    return None


def _curve(terms: tuple[Term, ...], points: list[float], clock: Clock) -> dict[float, DeltaBracket]:
    """The brackets of delta at increasing epsilons by the contour, or what helps where it fails."""
    own = _for_contour(terms, clock)
    lower, upper, directions, errors = contour.delta_of(terms, np.array(points), own)
    reason = "the time was over" if own.ran_out else _NO_LESS
    out = {
        e: DeltaBracket(float(lower[i]), float(upper[i]), e, directions[i], "contour", errors[i])
        for i, e in enumerate(points)
    }
    for e in (e for e in points if _is_wide(out[e])):
        low = max(out[e].lower, closed_forms.least_delta(terms, e))
        out[e] = replace(out[e], lower=min(low, out[e].upper))
    wide = [e for e in points if _is_wide(out[e])]
    few = _without_tiny(terms, min((out[e].upper for e in wide), default=0.0))
    if few is not None and not clock.is_over():
        rest, tiny = few
        for found in _profile(rest, tuple(wide), clock):
            out[found.epsilon] = _beside(out[found.epsilon], found, tiny)
    for e in wide:
        if out[e].upper - out[e].lower > 0.1 * out[e].upper and not clock.is_over():
            value, order, by = cumulants.best_delta(_without_deltas(terms), e)
            if value < out[e].upper:
                low = min(out[e].lower, value)
                renyi = DeltaBracket(low, value, e, _direction(by), "renyi", {"order": order})
                out[e] = renyi
    return {e: _with_reason(b, reason) for e, b in out.items()}


def _beside(best: DeltaBracket, rest: DeltaBracket, tiny: float) -> DeltaBracket:
    """The bracket of delta, given that of all parts but those with a total variation of tiny."""
    upper = min(1.0, (rest.upper + tiny) * (1.0 + 4.0 * U))
    lower = max(best.lower, rest.lower)
    if upper < best.upper:
        errors = rest.error_terms | {"absorbed": tiny}
        best = replace(rest, upper=upper, error_terms=errors)
    return replace(best, lower=min(lower, best.upper))


def _is_wide(b: DeltaBracket) -> bool:
    return b.upper - b.lower > contour.ACCURACY * b.upper


def _with_reason(b: DeltaBracket, reason: str) -> DeltaBracket:
    """The bracket with the reason, if it is wider than was aimed at."""
    return replace(b, reason=reason if _is_wide(b) else "")


def _direction(text: str) -> Direction:
    return "remove" if text == "remove" else "add" if text == "add" else "both"


def _is_stated(terms: tuple[Term, ...], delta: float) -> bool:
    """Whether the terms are one declared part and delta is just its own."""
    term = terms[0]
    if len(terms) > 1 or term.count > 1 or not isinstance(term, ApproximateDPTerm):
        return False
    return term.delta > 0 and Decimal(repr(delta)) == term.delta


# -- (epsilon, delta) parts ------------------------------------------------------------------------


def _mass(terms: tuple[Term, ...]) -> tuple[float, float]:
    """Bounds on 1 - prod(1 - delta_i), the probability that (epsilon, delta) terms give up."""
    most = cumulants.mass_at_infinity(terms)
    return most * (1.0 - 1e-12), most


def _rest(delta: float, mass: float, *, up: bool) -> float:
    """(delta - mass)/(1 - mass), rounded up or down."""
    if mass == 0.0:
        return delta
    value = (delta - mass) / (1.0 - mass)
    return value + 4e-16 * delta if up else value - 4e-16 * delta


def _without_deltas(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    return tuple(
        replace(t, delta=Decimal(0)) if isinstance(t, ApproximateDPTerm) else t for t in terms
    )


def _beyond_mass(terms: tuple[Term, ...], delta: float) -> float | None:
    """The mass at infinity if delta lies below it, else None."""
    if len(terms) == 1 and terms[0].count == 1 and isinstance(terms[0], ApproximateDPTerm):
        # A single delta is the decimal as written, and so is the question's.
        return float(terms[0].delta) if Decimal(repr(delta)) < terms[0].delta else None
    least, most = _mass(terms)
    return most if delta < least else None


def _as_declared(terms: tuple[Term, ...], delta: float) -> float | None:
    """sum epsilon_i, rounded up, if all parts are (epsilon, delta) and sum delta_i <= delta."""
    total_epsilon, total_delta = Fraction(0), Fraction(0)
    for term in terms:
        if not isinstance(term, ApproximateDPTerm):
            return None
        total_epsilon += Fraction(term.epsilon) * term.count
        total_delta += Fraction(term.delta) * term.count
    return float_above(total_epsilon) if total_delta <= Fraction(repr(delta)) else None


def _worst_declared_epsilon(term: Term, delta: float) -> float:
    """epsilon at delta of the worst (epsilon_0, delta_0)-DP mechanism, rounded down.

    delta(eps) = delta_0 + (1 - delta_0)(e^{eps_0} - e^{eps})/(1 + e^{eps_0}).
    """
    if not isinstance(term, ApproximateDPTerm):
        raise TypeError("a declared part is an ApproximateDPTerm")
    e0, d0 = float(term.epsilon), float(term.delta)
    if Decimal(repr(delta)) == term.delta:
        return e0 if Fraction(e0) <= Fraction(term.epsilon) else math.nextafter(e0, 0.0)
    # e^{eps - eps_0} = 1 - share (1 + e^{-eps_0})
    share = (delta - d0) / (1.0 - d0) * (1.0 + 1e-12) + 1e-16
    inner = 1.0 - share * (1.0 + math.exp(-e0))
    return max(0.0, (e0 + math.log(inner)) * (1.0 - 1e-12)) if inner > 0.0 else 0.0
