"""Trade-off curves: what an attacker's two kinds of error can be, both bounds.

Between neighbours D, D' every test has a type I error alpha (D is taken for D') and a type II error
beta (D' is taken for D). A mechanism with the exact curve delta(eps) = max over both directions of
H_{e^eps} satisfies beta >= f(alpha), where f is the largest convex curve that is symmetric in the
two errors (Dong, Roth and Su 2022, propositions 2.5 and 2.12). With x = e^eps

    f(alpha) = sup over x >= 0 of  1 - delta(x) - x alpha.                                  (1)

Here delta is continued to x < 1: from E_Q[phi] - x E_P[phi] <= delta(x) for every test phi follows
E_P[1 - phi] - E_Q[1 - phi]/x <= (delta(x) - 1 + x)/x, so that

    delta(x) = 1 - x + x delta(1/x),   delta(0) = 1,                                        (2)

and on x < 1 formula (1) reads sup over eps >= 0 of e^-eps (1 - delta(eps) - alpha). For one
direction H_x is a supremum of functions linear and falling in x, so the largest of two such, and
with it delta, is **convex and not increasing** on [0, inf).

**Lower curve.** Every x gives a valid bound, so upper ends U_i of delta at finitely many x_i do:
f(alpha) >= max_i (1 - U_i - x_i alpha). No test, whatever its direction, does better: this is the
certificate. Points between the x_i would add nothing, because a chord is highest at an end.

**Upper curve.** No guarantee in terms of both errors can lie above it. Between neighbours of the
grid delta is bounded below by what convexity and the brackets [L_i, U_i] leave: for
x_i <= x <= x_{i+1}

    delta(x) >= L_{i+1},
    delta(x) >= L_i     + (L_i - U_{i-1})     (x - x_i)     / (x_i - x_{i-1})    (from the left),
    delta(x) >= L_{i+1} + (L_{i+1} - U_{i+2}) (x_{i+1} - x) / (x_{i+2} - x_{i+1})  (from the right),

each a chord carried on, beyond which a convex function lies. The largest of the three is convex
and piecewise linear in x, so 1 - (it) - x alpha is largest at an end of the interval or where two
of the lines cross, whatever alpha is. Right of the grid delta >= 0 takes L_{i+1}'s place. f(alpha)
is at most the largest of these values, and at most 1 - alpha. A single test need not reach f:
where the two directions differ, f is what mixing them would give.

**Rounding.** Every value is moved outward by more than the few roundings behind it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from accounting import bounds, cumulants
from accounting.bounds import DeltaBracket, Limits
from accounting.callable import make_callable
from accounting.errors import InvalidRequest
from accounting.mechanisms import NEIGHBORING_RELATION, Mechanism, dominating_terms

MAX_ALPHAS: Final = 1000
POINTS: Final = 200
# Where the curve of delta is followed to.
_CURVE_END: Final = 1e-12
_MOST_EPSILON: Final = 700.0  # e^eps stays a double
_BEND: Final = 4.0
_ROUNDING: Final = 1e-14

DEFAULT_ALPHAS: Final[tuple[float, ...]] = (
    0.0,
    *(10.0 ** (k / 10) for k in range(-60, -10)),
    *(k / 100 for k in range(10, 101)),
)


@dataclass(frozen=True)
class TradeoffPoint:
    """At type I error ``alpha`` the best certifiable type II error lies in [lower, upper].

    ``lower`` is the certificate: no test on neighbouring datasets has a smaller one.
    """

    alpha: float
    lower: float
    upper: float

    def to_json(self) -> dict[str, object]:
        return {"alpha": self.alpha, "lower": self.lower, "upper": self.upper}


@dataclass(frozen=True)
class Tradeoff:
    """A trade-off curve; ``reason`` says why it is wider than it might be."""

    points: tuple[TradeoffPoint, ...]
    method: str
    reason: str = ""
    neighboring_relation: str = NEIGHBORING_RELATION
    version: str = bounds.VERSION

    def to_json(self) -> dict[str, object]:
        out: dict[str, object] = {
            "points": [p.to_json() for p in self.points],
            "method": self.method,
            "neighboring_relation": self.neighboring_relation,
            "version": self.version,
        }
        return out | ({"reason": self.reason} if self.reason else {})


def tradeoff(
    m: Mechanism, alphas: Sequence[float] = DEFAULT_ALPHAS, *, limits: Limits = bounds.DEFAULT
) -> Tradeoff:
    """The trade-off curve at the type I errors ``alphas``.

    Raises:
        InvalidRequest: an alpha is not a number in [0, 1], or there are none, or more than
            MAX_ALPHAS.
    """
    checked = _check_alphas(alphas)
    curve = whole_profile(m, points=POINTS, bend=_BEND, limits=limits)
    reasons = dict.fromkeys(b.reason for b in curve if b.reason)
    methods = dict.fromkeys(b.method for b in curve)
    return Tradeoff(of_profile(curve, checked), ", ".join(methods), "; ".join(reasons))


def whole_profile(
    m: Mechanism, *, points: int, bend: float = 0.0, limits: Limits = bounds.DEFAULT
) -> list[DeltaBracket]:
    """The brackets of delta from epsilon 0 to where delta is about 1e-12.

    Args:
        bend: how much denser the points are near 0, about sinh(bend) / bend times; 0 spaces them
            evenly.
    """
    begin = time.monotonic()
    half = replace(limits, seconds=0.5 * limits.seconds)
    # What declared parts give up is no part of the curve that falls.
    mass = max(cumulants.mass_at_infinity(terms) for terms in dominating_terms(m))
    least = min(mass + _CURVE_END * (1.0 - mass), 0.5 * (1.0 + mass))
    wide = bounds.epsilon(m, least, limits=half)
    end = wide.upper if wide.upper < math.inf else wide.lower
    end = min(end, _MOST_EPSILON) if 0.0 < end < math.inf else 1.0
    shares = [k / (points - 1) for k in range(points)]
    if bend > 0.0:
        shares = [math.sinh(bend * share) / math.sinh(bend) for share in shares]
    left = replace(limits, seconds=max(limits.seconds - (time.monotonic() - begin), 1e-3))
    return bounds.profile(m, [end * share for share in shares], limits=left)


def of_profile(curve: Sequence[DeltaBracket], alphas: Sequence[float]) -> tuple[TradeoffPoint, ...]:
    """The trade-off curve from brackets of delta at increasing epsilons; see the module's text."""
    brackets = [b for b in curve if b.epsilon <= _MOST_EPSILON]
    xs, lows, ups = _both_sides(brackets)
    x, up = np.array(xs), np.array(ups)
    corner_x, corner_low = np.array(_corners(xs, lows, ups)).T
    points = []
    for alpha in alphas:
        lower = float((1.0 - up - x * alpha * (1.0 + _ROUNDING)).max())
        upper = float((1.0 - corner_low - corner_x * alpha * (1.0 - _ROUNDING)).max())
        lower = max(0.0, lower - _ROUNDING)
        upper = max(0.0, min(1.0 - alpha, upper) + _ROUNDING)
        points.append(TradeoffPoint(alpha, lower, min(1.0, max(lower, upper))))
    return tuple(points)


def _check_alphas(alphas: Sequence[float]) -> tuple[float, ...]:
    if not 0 < len(alphas) <= MAX_ALPHAS:
        raise InvalidRequest("alphas", f"must hold between 1 and {MAX_ALPHAS} numbers")
    for i, alpha in enumerate(alphas):
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise InvalidRequest(f"alphas[{i}]", "must be a number")
        if not 0.0 <= alpha <= 1.0:
            raise InvalidRequest(f"alphas[{i}]", "must lie between 0 and 1")
    return tuple(float(alpha) for alpha in alphas)


def _both_sides(curve: Sequence[DeltaBracket]) -> tuple[list[float], list[float], list[float]]:
    """x = 0, the reciprocals of the curve's x, and the curve's x; lower and upper ends there.

    A lower end further right holds here as well, and an upper end further left, because delta does
    not increase.
    """
    # |delta'(x)| <= 1/x, so an x that is off by a relative 2^-52 moves delta by 2^-52 at most.
    right = [(math.exp(b.epsilon), b.lower - _ROUNDING, b.upper + _ROUNDING) for b in curve]
    left = [
        (1.0 / x, 1.0 - (1.0 - low) / x - _ROUNDING, 1.0 - (1.0 - up) / x + _ROUNDING)
        for x, low, up in reversed(right)
        if x > 1.0
    ]
    points = [(0.0, 1.0, 1.0), *left, *right]
    xs: list[float] = []
    lows: list[float] = []
    ups: list[float] = []
    for x, low, up in points:
        if xs and x <= xs[-1]:
            continue
        xs.append(x)
        lows.append(max(0.0, low))
        ups.append(min(1.0, up, *ups[-1:]))
    for i in range(len(lows) - 2, -1, -1):
        lows[i] = max(lows[i], lows[i + 1])
    return xs, lows, ups


def _corners(xs: list[float], lows: list[float], ups: list[float]) -> list[tuple[float, float]]:
    """(x, lower bound of delta there) wherever 1 - delta(x) - x alpha may be largest."""
    last = len(xs) - 1
    corners = []
    for i in range(len(xs)):
        end = xs[i + 1] if i < last else math.inf
        floor = lows[i + 1] if i < last else 0.0
        lines = [(0.0, floor)]  # (slope, value at xs[i])
        if i > 0:
            lines.append(((lows[i] - ups[i - 1]) / (xs[i] - xs[i - 1]), lows[i]))
        if i + 2 <= last:
            slope = (ups[i + 2] - lows[i + 1]) / (xs[i + 2] - xs[i + 1])
            lines.append((slope, lows[i + 1] - slope * (end - xs[i])))
        where = {0.0} | ({end - xs[i]} if end < math.inf else set())
        for j, (slope, value) in enumerate(lines):
            for other_slope, other_value in lines[:j]:
                if slope != other_slope:
                    run = (other_value - value) / (slope - other_slope)
                    if 0.0 < run < end - xs[i]:
                        where.add(run)
        for run in where:
            low = max(value + slope * run for slope, value in lines)
            corners.append((xs[i] + run, min(1.0, max(0.0, low - _ROUNDING))))
    return corners


make_callable(__name__, tradeoff)
