"""Brackets [lower, upper] of epsilon at delta, and of delta at epsilon.

The upper end is what a certificate states; the lower end shows how tight it is. Where each comes
from (docs/accounting.md has what is proven and what is taken from a library):

- ``gaussian_dp_closed_form``: nothing is sampled, so the exact curve is inverted.
- ``as_declared``: (epsilon, delta) parts only, added up as written.
- ``dp_accounting_pld``: dp_accounting's privacy-loss distributions, in a subprocess under limits.
- ``renyi``: our own certified Renyi bound; always computed, and the upper end is never above it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, Literal, TypeVar

from accounting import cumulants, gaussian_dp
from accounting.errors import InvalidRequest
from accounting.mechanisms import (
    NEIGHBORING_RELATION,
    ApproximateDPTerm,
    GaussianTerm,
    Mechanism,
    Term,
    dominating_terms,
    mechanism_digest,
)
from accounting.pld_pool import POOL, OutOfLimits

VERSION: Final = "1"  # of the numbers: it changes when an answer may
CACHE_SIZE: Final = 4096
MAX_EPSILON: Final = 1e6
MAX_POINTS: Final = 1000
_LEAST_SECONDS: Final = 1e-3

Direction = Literal["remove", "add", "both"]
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What one question to the subprocess may use: wall-clock seconds and MiB of address space."""

    seconds: float = 60.0
    megabytes: int = 4096

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InvalidRequest("limits.seconds", "must be positive and finite")
        if self.megabytes < 1:
            raise InvalidRequest("limits.megabytes", "must be at least 1")


DEFAULT: Final = Limits()


class _Deadline:
    """The limits that a question with several parts has left: its seconds are for the whole."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._end = time.monotonic() + limits.seconds

    @property
    def over(self) -> bool:
        return time.monotonic() > self._end

    def limits(self) -> Limits:
        left = max(self._end - time.monotonic(), _LEAST_SECONDS)
        return replace(self._limits, seconds=min(left, self._limits.seconds))


@dataclass(frozen=True)
class Bracket:
    """The mechanism's epsilon at ``delta`` lies in [lower, upper].

    ``direction`` is the neighbouring direction that dominates (the one whose upper is larger);
    ``error_terms`` holds the sizes of what the method allowed for; ``reason`` says why an end is
    infinite, or why a better method did not answer.
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
    """The mechanism's delta at ``epsilon`` lies in [lower, upper]; fields as in Bracket."""

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


def epsilon(m: Mechanism, delta: float, *, limits: Limits = DEFAULT) -> Bracket:
    """The bracket of epsilon at delta.

    Raises:
        InvalidRequest: delta is not a number in (0, 1).
    """
    delta = _check_delta(delta)

    def compute() -> tuple[Bracket, bool]:
        left = _Deadline(limits)
        answers = [_epsilon(terms, delta, left) for terms in dominating_terms(m)]
        worst = max((a for a, _ in answers), key=lambda b: b.upper)
        lower = max(a.lower for a, _ in answers)
        return replace(worst, lower=lower), all(final for _, final in answers)

    return _CACHE.get(("epsilon", mechanism_digest(m), delta, limits), compute)


def delta(m: Mechanism, epsilon: float, *, limits: Limits = DEFAULT) -> DeltaBracket:
    """The bracket of delta at epsilon.

    Raises:
        InvalidRequest: epsilon is not a number in [0, MAX_EPSILON].
    """
    return profile(m, (epsilon,), limits=limits)[0]


def profile(
    m: Mechanism, epsilons: Sequence[float], *, limits: Limits = DEFAULT
) -> list[DeltaBracket]:
    """The brackets of delta at each of the epsilons, from one distribution.

    Raises:
        InvalidRequest: an epsilon is not a number in [0, MAX_EPSILON], or there are none, or more
            than MAX_POINTS.
    """
    if not 0 < len(epsilons) <= MAX_POINTS:
        raise InvalidRequest("epsilons", f"must hold between 1 and {MAX_POINTS} numbers")
    points = tuple(_check_epsilon(e) for e in epsilons)

    def compute() -> tuple[list[DeltaBracket], bool]:
        left = _Deadline(limits)
        answers = [_profile(terms, points, left) for terms in dominating_terms(m)]
        out = []
        for column in zip(*(brackets for brackets, _ in answers), strict=True):
            worst = max(column, key=lambda b: b.upper)
            out.append(replace(worst, lower=max(b.lower for b in column)))
        return out, all(final for _, final in answers)

    return list(_CACHE.get(("profile", mechanism_digest(m), points, limits), compute))


def renyi(m: Mechanism, delta: float) -> Bracket:
    """The cheap bracket: a proven upper end in a millisecond, and no lower end."""
    return Bracket(0.0, cumulants.renyi_epsilon(m, delta), delta, "both", "renyi")


def warm_up() -> None:
    """Starts the subprocess and has it answer once, so that the first request need not wait."""
    epsilon_of = GaussianTerm(sampling_probability=0.5, mu=1.0, count=1)
    _ask((epsilon_of,), True, 0.1, deltas=(1e-5,), limits=DEFAULT)


def _check_delta(value: object) -> float:
    number = _check_number("delta", value)
    if not 0.0 < number < 1.0:
        raise InvalidRequest("delta", "must lie strictly between 0 and 1")
    return number


def _check_epsilon(value: object) -> float:
    number = _check_number("epsilon", value)
    if not 0.0 <= number <= MAX_EPSILON:
        raise InvalidRequest("epsilon", f"must lie between 0 and {MAX_EPSILON:g}")
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
# One composition of terms. Each function returns a bracket and whether it is final: an answer that
# was cut short by the time limit would be another one on an idle machine, so it is not kept.
# --------------------------------------------------------------------------------------------------


def _epsilon(terms: tuple[Term, ...], delta: float, left: _Deadline) -> tuple[Bracket, bool]:
    gaussians = _all_unsampled(terms)
    if gaussians is not None:
        lower, upper = gaussian_dp.epsilon_bounds(gaussian_dp.total_mu(gaussians), delta)
        return Bracket(lower, upper, delta, "both", "gaussian_dp_closed_form"), True

    impossible = _beyond_mass(terms, delta)
    if impossible is not None:
        reason = f"delta is below {impossible:.6g}, the probability that a declared part gives up"
        return Bracket(math.inf, math.inf, delta, "both", "as_declared", reason=reason), True

    declared = _as_declared(terms, delta)
    if declared is not None and len(terms) == 1 and terms[0].count == 1:
        lower = _worst_declared_epsilon(terms[0], delta)
        return Bracket(lower, declared, delta, "both", "as_declared"), True

    upper, order, direction = cumulants.best_epsilon(terms, delta)
    best = Bracket(0.0, upper, delta, _direction(direction), "renyi", {"order": order})
    if declared is not None and declared <= upper:
        best = Bracket(0.0, declared, delta, "both", "as_declared")
    if upper == 0.0:
        return best, True

    slack = _numerical_slack(terms)
    notes, final = [], True
    if delta > 4.0 * slack:
        found = _distribution(terms, True, left.limits(), deltas=(delta - slack,))
        final &= found.final
        if found.answer is None:
            notes.append(found.reason)
        else:
            remove, add = (found.answer[d]["epsilon"][0] for d in ("remove", "add"))
            pld = max(_or_inf(remove), _or_inf(add))
            if pld <= best.upper:
                errors = found.error_terms | {"numerical_slack": slack}
                best = Bracket(0.0, pld, delta, _larger(remove, add), "dp_accounting_pld", errors)
    if delta + slack < 1.0:
        found = _distribution(terms, False, left.limits(), deltas=(delta + slack,))
        final &= found.final
        if found.answer is None:
            notes.append(found.reason)
        else:
            lower = max(
                x for d in ("remove", "add") if (x := found.answer[d]["epsilon"][0] or 0.0) >= 0.0
            )
            if lower <= best.upper:
                best = replace(best, lower=lower)
            else:
                notes.append("the lower end contradicted a proven upper end and was dropped")
    return replace(best, reason="; ".join(dict.fromkeys(n for n in notes if n))), final


def _profile(
    terms: tuple[Term, ...], points: tuple[float, ...], left: _Deadline
) -> tuple[list[DeltaBracket], bool]:
    gaussians = _all_unsampled(terms)
    if gaussians is not None:
        mu = gaussian_dp.total_mu(gaussians)
        exact = [(e, gaussian_dp.delta_bounds(mu, e)) for e in points]
        return [
            DeltaBracket(low, up, e, "both", "gaussian_dp_closed_form") for e, (low, up) in exact
        ], True

    slack = _numerical_slack(terms)
    above = _distribution(terms, True, left.limits(), epsilons=points)
    below = _distribution(terms, False, left.limits(), epsilons=points)
    reason = "; ".join(dict.fromkeys(f.reason for f in (above, below) if f.reason))
    out, final = [], above.final and below.final
    for i, e in enumerate(points):
        if left.over:
            # True of every mechanism; a distribution, if there is one, says more.
            best = DeltaBracket(0.0, 1.0, e, "both", "none")
            reason, final = reason or "the time was over before the curve was", False
        else:
            upper, order, direction = cumulants.best_delta(terms, e)
            best = DeltaBracket(0.0, upper, e, _direction(direction), "renyi", {"order": order})
        if above.answer is not None:
            remove, add = (above.answer[d]["delta"][i] for d in ("remove", "add"))
            pld = min(1.0, max(_or_inf(remove), _or_inf(add)) + slack)
            if pld <= best.upper:
                errors = above.error_terms | {"numerical_slack": slack}
                best = DeltaBracket(0.0, pld, e, _larger(remove, add), "dp_accounting_pld", errors)
        if below.answer is not None:
            lower = max(below.answer[d]["delta"][i] or 0.0 for d in ("remove", "add")) - slack
            if lower <= best.upper:
                best = replace(best, lower=max(0.0, lower))
        out.append(replace(best, reason=reason))
    return out, final


def _direction(text: str) -> Direction:
    return "remove" if text == "remove" else "add" if text == "add" else "both"


def _larger(remove: float | None, add: float | None) -> Direction:
    a, b = _or_inf(remove), _or_inf(add)
    return "both" if a == b else "remove" if a > b else "add"


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else max(0.0, value)


def _all_unsampled(terms: Iterable[Term]) -> list[tuple[float, int]] | None:
    out = []
    for term in terms:
        if not isinstance(term, GaussianTerm) or term.sampling_probability != 1.0:
            return None
        out.append((term.mu, term.count))
    return out


# -- (epsilon, delta) parts ------------------------------------------------------------------------


def _beyond_mass(terms: tuple[Term, ...], delta: float) -> float | None:
    """The mass at infinity if delta lies below it, else None."""
    if len(terms) == 1 and terms[0].count == 1 and isinstance(terms[0], ApproximateDPTerm):
        # A single delta is the decimal as written, and so is the question's.
        return float(terms[0].delta) if Decimal(repr(delta)) < terms[0].delta else None
    mass = cumulants.mass_at_infinity(terms)
    return mass if delta < mass * (1.0 - 1e-12) else None


def _as_declared(terms: tuple[Term, ...], delta: float) -> float | None:
    """sum epsilon_i, rounded up, if all parts are (epsilon, delta) and sum delta_i <= delta."""
    total_epsilon, total_delta = Fraction(0), Fraction(0)
    for term in terms:
        if not isinstance(term, ApproximateDPTerm):
            return None
        total_epsilon += Fraction(term.epsilon) * term.count
        total_delta += Fraction(term.delta) * term.count
    return _float_above(total_epsilon) if total_delta <= Fraction(repr(delta)) else None


def _float_above(value: Fraction) -> float:
    near = float(value)
    return near if Fraction(near) >= value else math.nextafter(near, math.inf)


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


# --------------------------------------------------------------------------------------------------
# dp_accounting's distributions
# --------------------------------------------------------------------------------------------------

# Measured on a 2-core machine: seconds a point of one mechanism's grid costs (both directions), and
# a point of the composition's. They only steer the choice of the interval.
_SECONDS_PER_SINGLE_POINT: Final = 9e-6
_SECONDS_PER_COMPOSED_POINT: Final = 1.5e-6
_UPPER_SECONDS: Final = 1.0
_LOWER_SECONDS: Final = 0.6
_INTERVALS: Final = tuple(
    float(f"{digit}e{power}") for power in range(-6, 1) for digit in (1, 2, 5)
)
_MAX_INTERVAL: Final = 1.0
_FINEST_WIDTH: Final = 1e-3


@dataclass(frozen=True)
class _Found:
    answer: dict[str, Any] | None
    error_terms: dict[str, float]
    reason: str
    final: bool


def _numerical_slack(terms: tuple[Term, ...]) -> float:
    """How far double precision may move dp_accounting's delta; a measured figure, not a proof.

    The transforms raise a distribution that is right to some 1e-16 to the power of the count: over
    Gaussians, whose exact curve is known, delta came out up to 7e-17 * count too small, which at
    small delta makes dp_accounting's pessimistic epsilon too small. And composing an optimistic
    distribution adds two tails of 1e-15 a term to it.
    """
    return 1e-12 + 4e-15 * len(terms) + 1e-15 * sum(t.count for t in terms)


def _distribution(
    terms: tuple[Term, ...],
    pessimistic: bool,
    limits: Limits,
    *,
    deltas: tuple[float, ...] = (),
    epsilons: tuple[float, ...] = (),
) -> _Found:
    """Asks the subprocess at the finest interval that looks cheap, then once at a coarser one."""
    terms = _merged(terms, upper=pessimistic)
    seconds = _UPPER_SECONDS if pessimistic else _LOWER_SECONDS
    interval = _interval(terms, seconds, len(deltas) + len(epsilons))
    if interval is None:
        return _Found(None, {}, "the privacy loss spans too wide a range to discretise", True)
    reason = ""
    for step, share in ((interval, 0.75), (min(_MAX_INTERVAL, 10.0 * interval), 0.25)):
        part = replace(limits, seconds=limits.seconds * share)
        try:
            answer = _ask(terms, pessimistic, step, deltas=deltas, epsilons=epsilons, limits=part)
        except OutOfLimits as stop:
            reason = f"dp_accounting did not answer: {stop}"
            continue
        errors = {"discretization_interval": step, "tail_mass_truncation": 1e-15}
        return _Found(answer, errors, "", reason == "")
    return _Found(None, {}, reason, False)


def _ask(
    terms: tuple[Term, ...],
    pessimistic: bool,
    interval: float,
    *,
    deltas: tuple[float, ...] = (),
    epsilons: tuple[float, ...] = (),
    limits: Limits,
) -> dict[str, Any]:
    question = {
        "terms": [_term_json(t) for t in terms],
        "pessimistic": pessimistic,
        "interval": interval,
        "deltas": list(deltas),
        "epsilons": list(epsilons),
    }
    return POOL.ask(question, seconds=limits.seconds, megabytes=limits.megabytes)


def _term_json(term: Term) -> dict[str, object]:
    if isinstance(term, GaussianTerm):
        return {"q": term.sampling_probability, "mu": term.mu, "count": term.count}
    return {"epsilon": float(term.epsilon), "delta": float(term.delta), "count": term.count}


def _merged(terms: tuple[Term, ...], *, upper: bool) -> tuple[Term, ...]:
    """The unsampled Gaussians as one, whose mu is rounded up or down."""
    whole = [t for t in terms if isinstance(t, GaussianTerm) and t.sampling_probability == 1.0]
    if len(whole) < 2 and all(t.count == 1 for t in whole):
        return terms
    mu = gaussian_dp.total_mu([(t.mu, t.count) for t in whole])[1 if upper else 0]
    return (*(t for t in terms if t not in whole), GaussianTerm(1.0, mu, 1))


def _interval(terms: tuple[Term, ...], seconds: float, questions: int) -> float | None:
    """The finest interval at which the terms should be made, composed and read in ``seconds``."""
    cost = _SECONDS_PER_SINGLE_POINT * sum(_loss_range(t) for t in terms)
    cost += _SECONDS_PER_COMPOSED_POINT * _composed_range(terms) * (1.0 + (questions - 1) / 100.0)
    # The lower end is off by count * h / 2, the upper by far less: finer than this is of no use.
    floor = _FINEST_WIDTH / max(1, sum(t.count for t in terms))
    return next((h for h in _INTERVALS if h >= floor and cost / h <= seconds), None)


def _loss_range(term: Term) -> float:
    """About how wide one output's privacy loss is, at dp_accounting's truncation of e^-50."""
    if isinstance(term, ApproximateDPTerm):
        return 2.0 * float(term.epsilon)
    q, mu = term.sampling_probability, term.mu
    top = 0.5 * mu * mu + 10.0 * mu
    if q == 1.0:
        return 2.0 * top
    reach = top + math.log(q + (1.0 - q) * math.exp(-top))
    return max(0.0, reach) - math.log1p(-q)


def _composed_range(terms: tuple[Term, ...]) -> float:
    """About how wide the composition is: its Chernoff bound at the tilts dp_accounting tries."""
    widest = max(_loss_range(t) for t in terms)
    whole = sum(t.count * _loss_range(t) for t in terms)
    best = whole
    for k in (1, 2, 4, 8, 14, 20):
        tilt = k / max(widest, 1e-9)
        if cumulants.MIN_ORDER <= 1.0 + tilt <= cumulants.MAX_ORDER:
            cost = max(cumulants.directed_costs(terms, 1.0 + tilt))
            best = min(best, 2.0 * (cost + 36.0 / tilt))
    return best
