"""Other methods' views of a mechanism's epsilon at delta, beside the product's own bracket.

============================= ========= ============================================================
method                        gives     what it proves
============================= ========= ============================================================
``epsilond``                  bracket   certified (:func:`accounting.bounds.epsilon`)
``renyi_best_order``          upper     certified: one Renyi order, found by search
``renyi_default_orders``      upper     certified: dp_accounting's default orders, our Renyi costs
``renyi_integer_orders``      upper     certified: orders 2..64, as in the first paper's Table 7
``gaussian_exact``            bracket   certified, where nothing is sampled
``edgeworth``                 estimate  nothing (first paper, equations 22-32); see its flags
``clt``                       estimate  nothing (Bu, Dong, Long and Su 2020)
``dp_accounting_pld``         bracket   its discretisation is proven, its floating point is not
``dp_accounting_rdp``         upper     true as a bound; too large at fractional orders
``opacus_prv``                upper     in exact arithmetic a bound, for ``remove`` (Gopi et al.)
``microsoft_prv``             bracket   the same
============================= ========= ============================================================

The last four are other people's code, each question asked in a subprocess under a time and a memory
limit; where one did not finish, its row says why. None of them is used by a certificate. A bracket
is of the dominating pair: the lower ends say nothing about a mechanism whose own loss is smaller.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from accounting import bounds, cumulants, gaussian_dp
from accounting.bounds import DEFAULT, Limits
from accounting.errors import InvalidRequest
from accounting.mechanisms import (
    ApproximateDPTerm,
    GaussianTerm,
    LaplaceTerm,
    Mechanism,
    Term,
    dominating_terms,
)
from accounting.pld_pool import POOL, OutOfLimits

Array = NDArray[np.float64]

# first paper, Appendix G and K
INTEGER_ORDERS: Final = tuple(float(a) for a in range(2, 65))
# dp_accounting 0.6.0, rdp_privacy_accountant.DEFAULT_RDP_ORDERS
DEFAULT_ORDERS: Final = (
    *(1.0 + x / 10.0 for x in range(1, 100)),
    *(float(a) for a in range(11, 64)),
    *(128.0, 256.0, 512.0, 1024.0),
)


class Unsupported(Exception):
    """The method has no answer for this mechanism; the text says why."""


# --------------------------------------------------------------------------------------------------
# Closed and cheap forms
# --------------------------------------------------------------------------------------------------


def attack_success_bound(epsilon: float, delta: float, prior: float = 0.5) -> float:
    """The largest probability of a right membership guess against an (epsilon, delta)-DP release.

    ``prior`` is the adversary's probability that the unit is in. A guess with error rates a (says
    "in" of one that is out) and b has e^eps a + b >= 1 - delta and a + e^eps b >= 1 - delta. Its
    error (1 - prior) a + prior b is least at a vertex of that region,

        (0, 1 - delta),  (1 - delta, 0)  or  a = b = (1 - delta)/(1 + e^eps),

    so success <= 1 - (1 - delta) min(prior, 1 - prior, 1/(1 + e^eps)), which at equal priors is the
    first paper's (e^eps + delta)/(1 + e^eps) (Appendix L). Rounded up.

    Raises:
        InvalidRequest: epsilon is negative or no number, delta not in [0, 1], prior not in (0, 1).
    """
    if not epsilon >= 0.0:
        raise InvalidRequest("epsilon", "must be at least 0")
    if not 0.0 <= delta <= 1.0:
        raise InvalidRequest("delta", "must lie between 0 and 1")
    if not 0.0 < prior < 1.0:
        raise InvalidRequest("prior", "must lie strictly between 0 and 1")
    inverse = math.exp(-epsilon)
    missed = (1.0 - delta) * min(prior, 1.0 - prior, inverse / (1.0 + inverse))
    return min(1.0, (1.0 - missed) * (1.0 + 4 * 2.0**-53))


def renyi_over(
    terms: tuple[Term, ...], delta: float, orders: Sequence[float]
) -> tuple[float, float]:
    """(epsilon, order) of the best of the given Renyi orders; a certified upper bound.

    Costs and conversion are those of :mod:`accounting.cumulants` (Canonne, Kamath and Steinke
    2020), which is the conversion of the first paper's Tables 7 and 12: with INTEGER_ORDERS their
    "RDP" columns are met to the last printed digit. With DEFAULT_ORDERS the bound is below what
    dp_accounting itself says, whose fractional costs are too large: 65 % block, B = 25: 7.546
    (7.551 there); 67 %: 29.327 (29.691).
    """
    left = delta - cumulants.mass_at_infinity(terms)
    if left <= 0.0:
        return math.inf, math.inf
    log_delta = math.log(left)
    best = (math.inf, math.inf)
    for order in orders:
        cost = max(cumulants.directed_costs(terms, order))
        epsilon = max(0.0, cost + cumulants.conversion(order, log_delta)) * (1.0 + 1e-14)
        best = min(best, (epsilon, order))
    return best


def gaussian_exact(terms: tuple[Term, ...], delta: float) -> tuple[float, float]:
    """(lower, upper) of epsilon where nothing is sampled.

    Raises:
        Unsupported: a term is sampled, or not a Gaussian.
    """
    parts = [(t.mu, t.count) for t in terms if _is_whole(t) and isinstance(t, GaussianTerm)]
    if len(parts) < len(terms):
        raise Unsupported("only for compositions of Gaussians without sampling")
    return gaussian_dp.epsilon_bounds(gaussian_dp.total_mu(parts), delta)


@dataclass(frozen=True)
class Flag:
    """One diagnostic of an estimate: what was measured, its limit, and whether it passes."""

    name: str
    value: float
    threshold: float
    passed: bool

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": _json_number(self.value),
            "threshold": self.threshold,
            "passed": self.passed,
        }


def _failed(flags: Sequence[Flag]) -> str:
    return "; ".join(
        f"{f.name} is {f.value:.3g} (limit {f.threshold:g})" for f in flags if not f.passed
    )


@dataclass(frozen=True)
class Clt:
    """The central-limit estimate: epsilon of the mu-GDP curve, and how far the limit is.

    ``flags`` are ours, the paper has none: ``variance_error_p`` and ``_q``, how far the loss's
    variance under P and Q is from mu^2, as a share of mu^2 (at most 0.1; it goes to 0 in the
    limit), and the largest shares of Edgeworth's. The 55 % and 62 % rows of Table 11 pass.
    """

    epsilon: float
    mu: float
    flags: tuple[Flag, ...]

    @property
    def valid(self) -> bool:
        return all(f.passed for f in self.flags)

    @property
    def reason(self) -> str:
        return _failed(self.flags)


def clt(terms: tuple[Term, ...], delta: float) -> Clt:
    """Gaussian DP with mu^2 = sum_j N_j q_j^2 (e^{mu_j^2} - 1) (Bu et al. 2020, theorem 5).

    The chi-square divergence of Q from P, which to first order in q is the loss's variance and
    twice its mean; an unsampled Gaussian adds mu_j^2, which is exact. This is the form of the first
    paper's Table 11. Not a bound in either direction.

    Raises:
        Unsupported: a term is not a Gaussian.
    """
    square = 0.0
    for term in terms:
        if not isinstance(term, GaussianTerm):
            raise Unsupported("the form is that of (subsampled) Gaussians")
        q, mu = term.sampling_probability, term.mu
        square += term.count * (mu * mu if q == 1.0 else q * q * _expm1(mu * mu))
    total = math.sqrt(square)
    if total == math.inf:
        raise Unsupported("e^{mu^2} is beyond double precision")
    if total == 0.0:
        return Clt(0.0, 0.0, ())
    sides = composed_cumulants(terms)
    errors = [abs(c.variance / square - 1.0) for c in sides]
    flags = [
        Flag(f"variance_error_{d}", x, MAX_VARIANCE_ERROR, x <= MAX_VARIANCE_ERROR)
        for d, x in zip("pq", errors, strict=True)
    ]
    flags += _share_flags(terms, *sides)
    return Clt(gaussian_dp.epsilon_bounds((total, total), delta)[1], total, tuple(flags))


def _expm1(x: float) -> float:
    return math.expm1(x) if x < 700.0 else math.inf


# --------------------------------------------------------------------------------------------------
# Edgeworth
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cumulants:
    """The first four cumulants of a privacy loss under one hypothesis (first paper, eq. 27-30)."""

    mean: float
    variance: float
    third: float
    fourth: float

    def __add__(self, other: Cumulants) -> Cumulants:
        return Cumulants(
            self.mean + other.mean,
            self.variance + other.variance,
            self.third + other.third,
            self.fourth + other.fourth,
        )

    def times(self, count: int) -> Cumulants:
        return Cumulants(
            count * self.mean, count * self.variance, count * self.third, count * self.fourth
        )

    def negated(self) -> Cumulants:
        return Cumulants(-self.mean, self.variance, -self.third, self.fourth)

    @property
    def skewness(self) -> float:
        return self.third / (self.variance * math.sqrt(self.variance))

    @property
    def excess_kurtosis(self) -> float:
        return self.fourth / self.variance / self.variance


@dataclass(frozen=True)
class Edgeworth:
    """The estimate, the direction that gave it, and every diagnostic."""

    epsilon: float
    direction: str
    flags: tuple[Flag, ...]

    @property
    def valid(self) -> bool:
        return all(f.passed for f in self.flags)

    @property
    def reason(self) -> str:
        return _failed(self.flags)


MAX_SHARE: Final = 0.1
MAX_VARIANCE_ERROR: Final = 0.1
MAX_STANDARDISED: Final = 1.0
SUBSTANTIAL: Final = 5e-3

_MAX_NODES: Final = 200_000
_REACH: Final = 11.0  # Phi(-11) = 2e-28
_FARTHEST: Final = 40.0  # standard deviations; Phi(-40) underflows
_CDF_GRID: Final = np.linspace(-8.0, 8.0, 801)


def edgeworth(terms: tuple[Term, ...], delta: float) -> Edgeworth:
    """The degree-two Edgeworth estimate of epsilon at delta (first paper, Appendix D and G).

    With S the composed loss, M, V, K3, K4 its cumulants under P and under Q, z = (e - M)/sqrt(V):

        F(z) = Phi(z) - phi(z) [rho3 (z^2 - 1)/6 + rho4 (z^3 - 3z)/24
                                + rho3^2 (z^5 - 10 z^3 + 15 z)/72]                        (25)
        remove: delta(e) = Pr_Q(S > e) - e^e Pr_P(S > e),   add: Pr_P(-S > e) - e^e Pr_Q(-S > e)

    and the larger direction is solved for the largest e with delta(e) = delta. Never a bound: the
    error of the series has no known sign, and above epsilon 5 the paper finds it up to 15 % low.

    Flags, in the order of Appendix D; the paper gives no numbers but those of its tables:

    - ``variance_p``, ``variance_q`` > 0.
    - ``largest_share_p``, ``_q`` <= 0.1: one output's part of the variance (eq. 31, "<< 1").
      Unsampled Gaussians are left out, as their loss is normal at any share.
    - ``skewness_p``, ``_q``, ``excess_kurtosis_p``, ``_q`` below 1 in size (eq. 32). These decide:
      they alone mark exactly the rows that the paper's Table 9 calls invalid, with the values it
      prints (3.32, 1.48, 3.46, 1.28, 2.26, 1.15), and Table 3's "unstable" (14.3). The nearest
      rows are 1.15 and 1.19 (invalid) and 0.985 (valid).
    - ``decrease_p``, ``_q``, ``clipping_p``, ``_q`` <= 0.005: how far F falls, and how far it
      leaves [0, 1]. "Substantial" has to lie above 0.0027, where the paper prints estimates.
    - ``least_delta`` >= 0: the least delta(e) up to four standard deviations beyond the estimate.
      (100 Laplace releases at scale 2 pass all else, and the curve dives through 0 at 21.7 where
      epsilon is 28.5: e^e magnifies what the series misses in the other tail.)

    The paper's Edgeworth and CLT columns were computed at q = 1 - (1 - 1/n)^B, the inclusion
    probability of a draw *with* replacement (its PLD and RDP columns at B/n). At that q every row
    is met to one unit of the last digit; at B/n epsilon is up to 0.25 % larger (B = 200).

    Raises:
        Unsupported: an (epsilon, delta) part, whose loss has two values and no density, or a mu
            beyond the quadrature.
    """
    p, q = composed_cumulants(terms)
    flags = [Flag(f"variance_{d}", c.variance, 0.0, c.variance > 0.0) for d, c in _named(p, q)]
    if not all(f.passed for f in flags):
        return Edgeworth(max(0.0, q.mean, -p.mean), "both", tuple(flags))
    flags += _share_flags(terms, p, q)
    for name, sizes in (
        ("skewness", (p.skewness, q.skewness)),
        ("excess_kurtosis", (p.excess_kurtosis, q.excess_kurtosis)),
    ):
        flags += [
            Flag(f"{name}_{d}", abs(x), MAX_STANDARDISED, abs(x) < MAX_STANDARDISED)
            for d, x in zip("pq", sizes, strict=True)
        ]
    for d, c in _named(p, q):
        f = 1.0 - _survival(_CDF_GRID, c)
        fall = float(np.max(np.maximum.accumulate(f) - f))
        outside = max(0.0, float(-f.min()), float(f.max()) - 1.0)
        flags.append(Flag(f"decrease_{d}", fall, SUBSTANTIAL, fall <= SUBSTANTIAL))
        flags.append(Flag(f"clipping_{d}", outside, SUBSTANTIAL, outside <= SUBSTANTIAL))

    pairs = {"remove": (q, p), "add": (p.negated(), q.negated())}
    found = {name: _largest_epsilon(*pair, delta) for name, pair in pairs.items()}
    epsilon = max(found.values())
    beyond = 4.0 * math.sqrt(max(p.variance, q.variance))
    grid = np.linspace(0.0, epsilon + beyond, 1025)
    curve = np.max([_delta_curve(grid, *pair) for pair in pairs.values()], axis=0)
    least = float(curve.min())
    flags.append(Flag("least_delta", least, 0.0, least >= -1e-15))
    larger = [name for name, e in found.items() if e == epsilon]
    return Edgeworth(epsilon, larger[0] if len(larger) == 1 else "both", tuple(flags))


def _named(p: Cumulants, q: Cumulants) -> tuple[tuple[str, Cumulants], tuple[str, Cumulants]]:
    return ("p", p), ("q", q)


def composed_cumulants(terms: Sequence[Term]) -> tuple[Cumulants, Cumulants]:
    """The cumulants of S under P and under Q (eq. 24): they add over independent outputs."""
    p = q = Cumulants(0.0, 0.0, 0.0, 0.0)
    for term in terms:
        one = loss_cumulants(term)
        p, q = p + one[0].times(term.count), q + one[1].times(term.count)
    return p, q


@functools.lru_cache(maxsize=4096)
def loss_cumulants(term: Term) -> tuple[Cumulants, Cumulants]:
    """The cumulants of one output's loss log dQ/dP under P and under Q, to about 1e-12 of each.

    The trapezoid rule over the line: the integrand is analytic up to |Im z| = pi/mu, so the step
    0.45/max(mu, 2) leaves about e^{-2 pi^2/(mu h)} = e^{-43} and what is cut off is Phi(-11).

    Raises:
        Unsupported: as :func:`edgeworth`.
    """
    if isinstance(term, ApproximateDPTerm):
        raise Unsupported("the loss of an (epsilon, delta) part has two values and no density")
    if isinstance(term, LaplaceTerm):
        return _laplace_cumulants(term.inverse_scale)
    q, mu = term.sampling_probability, term.mu
    if q == 1.0:
        half = 0.5 * mu * mu
        return Cumulants(-half, mu * mu, 0.0, 0.0), Cumulants(half, mu * mu, 0.0, 0.0)
    h = 0.45 / max(mu, 2.0)
    if not (2.0 * _REACH + mu) / h < _MAX_NODES:
        raise Unsupported(f"mu = {mu:.3g} is beyond the quadrature")
    z = np.arange(-_REACH, mu + _REACH + h, h)
    x = mu * (z - 0.5 * mu)
    # log(1 - q + q e^x), without cancellation where x is small
    loss = np.where(
        x < 30.0,
        np.log1p(q * np.expm1(np.minimum(x, 30.0))),
        x + np.log(q + (1.0 - q) * np.exp(-np.maximum(x, 30.0))),
    )
    log_p = -0.5 * z * z + math.log(h / math.sqrt(2.0 * math.pi))
    return _cumulants(loss, np.exp(log_p)), _cumulants(loss, np.exp(log_p + loss))


def _cumulants(loss: Array, weight: Array) -> Cumulants:
    mean = float(weight @ loss)
    centred = loss - mean
    square = centred * centred
    variance, third = float(weight @ square), float(weight @ (square * centred))
    return Cumulants(mean, variance, third, float(weight @ (square * square)) - 3.0 * variance**2)


def _laplace_cumulants(lam: float) -> tuple[Cumulants, Cumulants]:
    """Under P = Lap(0, 1/lam) the loss is -lam with probability 1/2, lam with e^-lam/2, and
    lam (2x - 1) at x in (0, 1) with density lam e^{-lam x}/2. Under Q it is minus that."""
    nodes, weights = np.polynomial.legendre.leggauss(64)
    if lam > 50.0:
        raise Unsupported(f"an inverse scale of {lam:.3g} is beyond the quadrature")
    x = 0.5 * (nodes + 1.0)
    loss = np.concatenate(([-lam, lam], lam * (2.0 * x - 1.0)))
    inside = 0.5 * weights * 0.5 * lam * np.exp(-lam * x)
    p = _cumulants(loss, np.concatenate(([0.5, 0.5 * math.exp(-lam)], inside)))
    return p, p.negated()


def _share_flags(terms: Sequence[Term], p: Cumulants, q: Cumulants) -> list[Flag]:
    """Equation 31. An unsampled Gaussian's loss is normal, so its share does not count."""
    ones = [loss_cumulants(t) for t in terms if not _is_whole(t)]
    shares = (
        max((one[0].variance / p.variance for one in ones), default=0.0),
        max((one[1].variance / q.variance for one in ones), default=0.0),
    )
    return [
        Flag(f"largest_share_{d}", x, MAX_SHARE, x <= MAX_SHARE)
        for d, x in zip("pq", shares, strict=True)
    ]


def _is_whole(term: Term) -> bool:
    return isinstance(term, GaussianTerm) and term.sampling_probability == 1.0


def _correction(z: Array, c: Cumulants) -> Array:
    """The bracket of equation 25."""
    r3, r4, z2 = c.skewness, c.excess_kurtosis, z * z
    return (
        r3 / 6.0 * (z2 - 1.0)
        + r4 / 24.0 * z * (z2 - 3.0)
        + r3 * r3 / 72.0 * z * (z2 * z2 - 10.0 * z2 + 15.0)
    )


def _survival(z: Array, c: Cumulants) -> Array:
    density = np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    out: Array = ndtr(-z) + density * _correction(z, c)
    return out


def _delta_curve(epsilons: Array, above: Cumulants, below: Cumulants) -> Array:
    """Pr_above(S > e) - e^e Pr_below(S > e), each by equation 25."""
    z = (epsilons - above.mean) / math.sqrt(above.variance)
    y = (epsilons - below.mean) / math.sqrt(below.variance)
    # y may be thousands of deviations out, where e^e alone overflows
    with np.errstate(over="ignore", invalid="ignore"):
        tail = np.exp(epsilons + log_ndtr(-y))
        tail += np.exp(epsilons - 0.5 * y * y) / math.sqrt(2.0 * math.pi) * _correction(y, below)
        out: Array = np.nan_to_num(_survival(z, above) - tail, nan=-math.inf, neginf=-math.inf)
    return out


def _largest_epsilon(above: Cumulants, below: Cumulants, delta: float) -> float:
    """The largest epsilon >= 0 at which the curve crosses delta, or 0.

    Seen on a grid of a hundredth of a standard deviation, refined around the last crossing.
    """
    reach = _FARTHEST * math.sqrt(above.variance)
    lo, hi, points = max(0.0, above.mean - reach), max(0.0, above.mean) + reach, 8001
    for _ in range(5):
        grid = np.linspace(lo, hi, points)
        over = np.flatnonzero(_delta_curve(grid, above, below) > delta)
        if len(over) == 0:
            return lo
        last = int(over[-1])
        lo, hi, points = float(grid[last]), float(grid[min(last + 1, points - 1)]), 257
    return hi


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
class PldEpsilon:
    """dp_accounting's epsilon at a delta from one distribution, with the interval that it used.

    ``allowing_for_rounding`` is the answer at delta moved by ``numerical_slack`` to the safe side.
    """

    epsilon: float
    direction: str
    interval: float
    allowing_for_rounding: float


def numerical_slack(terms: tuple[Term, ...]) -> float:
    """How far double precision may move dp_accounting's delta; a measured figure, not a proof.

    The transforms raise a distribution that is right to some 1e-16 to the power of the count: over
    Gaussians, whose exact curve is known, delta came out up to 7e-17 * count too small, which at
    small delta makes dp_accounting's pessimistic epsilon too small. And composing an optimistic
    distribution adds two tails of 1e-15 a term to it.
    """
    return 1e-12 + 4e-15 * len(terms) + 1e-15 * sum(t.count for t in terms)


def dp_accounting_pld(
    terms: tuple[Term, ...],
    delta: float,
    *,
    pessimistic: bool,
    interval: float | None = None,
    limits: Limits = DEFAULT,
) -> PldEpsilon:
    """dp_accounting's epsilon from its pessimistic or its optimistic distribution.

    Without an interval the finest one is taken at which the work looks like a second, and once a
    ten times coarser one where the limits stopped that.

    Raises:
        OutOfLimits: no answer within the limits, or the library raised.
        Unsupported: no interval is coarse enough for the loss's range.
    """
    slack = numerical_slack(terms)
    safe = delta - slack if pessimistic else min(delta + slack, 1.0)
    deltas = [delta, *([safe] if safe > 0.0 else [])]
    terms = _merged(terms, upper=pessimistic)
    if interval is not None:
        steps = [(interval, 1.0)]
    else:
        chosen = _interval(terms, _UPPER_SECONDS if pessimistic else _LOWER_SECONDS)
        if chosen is None:
            raise Unsupported("the privacy loss spans too wide a range to discretise")
        steps = [(chosen, 0.75), (min(_MAX_INTERVAL, 10.0 * chosen), 0.25)]
    for i, (step, share) in enumerate(steps):
        question = {"pessimistic": pessimistic, "interval": step, "deltas": deltas, "epsilons": []}
        try:
            answer = _ask("dp_accounting_pld", terms, question, _part(limits, share))
        except OutOfLimits:
            if i + 1 == len(steps):
                raise
            continue
        sides = {d: [_or_inf(e) for e in answer[d]["epsilon"]] for d in ("remove", "add")}
        epsilon = max(s[0] for s in sides.values())
        larger = [d for d, s in sides.items() if s[0] == epsilon]
        allowed = max(s[1] for s in sides.values()) if safe > 0.0 else math.inf
        return PldEpsilon(epsilon, larger[0] if len(larger) == 1 else "both", step, allowed)
    raise AssertionError("a loop over at least one step returned nothing")


def _ask(
    method: str, terms: tuple[Term, ...], question: Mapping[str, object], limits: Limits
) -> dict[str, Any]:
    whole = {"method": method, "terms": [_term_json(t) for t in terms], **question}
    return POOL.ask(whole, seconds=limits.seconds, megabytes=limits.megabytes)


def _part(limits: Limits, share: float) -> Limits:
    return replace(limits, seconds=limits.seconds * share)


def _term_json(term: Term) -> dict[str, object]:
    if isinstance(term, GaussianTerm):
        return {"q": term.sampling_probability, "mu": term.mu, "count": term.count}
    if isinstance(term, LaplaceTerm):
        return {"inverse_scale": term.inverse_scale, "count": term.count}
    return {"epsilon": float(term.epsilon), "delta": float(term.delta), "count": term.count}


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else max(0.0, value)


def _merged(terms: tuple[Term, ...], *, upper: bool) -> tuple[Term, ...]:
    """The unsampled Gaussians as one, whose mu is rounded up or down."""
    whole = [t for t in terms if isinstance(t, GaussianTerm) and t.sampling_probability == 1.0]
    if len(whole) < 2 and all(t.count == 1 for t in whole):
        return terms
    mu = gaussian_dp.total_mu([(t.mu, t.count) for t in whole])[1 if upper else 0]
    return (*(t for t in terms if t not in whole), GaussianTerm(1.0, mu, 1))


def _interval(terms: tuple[Term, ...], seconds: float) -> float | None:
    """The finest interval at which the terms should be made, composed and read in ``seconds``."""
    cost = _SECONDS_PER_SINGLE_POINT * sum(_loss_range(t) for t in terms)
    cost += _SECONDS_PER_COMPOSED_POINT * _composed_range(terms)
    # The lower end is off by count * h / 2, the upper by far less: finer than this is of no use.
    floor = _FINEST_WIDTH / max(1, sum(t.count for t in terms))
    return next((h for h in _INTERVALS if h >= floor and cost / h <= seconds), None)


def _loss_range(term: Term) -> float:
    """About how wide one output's privacy loss is, at dp_accounting's truncation of e^-50."""
    if isinstance(term, ApproximateDPTerm):
        return 2.0 * float(term.epsilon)
    if isinstance(term, LaplaceTerm):
        return 2.0 * term.inverse_scale
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


# --------------------------------------------------------------------------------------------------
# Side by side
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One method's view of epsilon at delta.

    ``lower`` and ``upper`` are ends that the method calls bounds, ``estimate`` its best guess; each
    is None where it gives none. ``certified`` says that the ends it gives are proven, rounding
    included. ``valid`` says that there is an answer and the method's own conditions hold, and
    ``reason`` why not. ``milliseconds`` is the wall-clock time of this answer.
    """

    method: str
    lower: float | None = None
    upper: float | None = None
    estimate: float | None = None
    certified: bool = False
    valid: bool = True
    reason: str = ""
    milliseconds: float = 0.0
    details: dict[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {
            "method": self.method,
            "lower": _json_number(self.lower),
            "upper": _json_number(self.upper),
            "estimate": _json_number(self.estimate),
            "certified": self.certified,
            "valid": self.valid,
            "reason": self.reason,
            "milliseconds": self.milliseconds,
            "details": _json_value(self.details),
        }


def _json_number(value: float | None) -> float | str | None:
    if value is None or math.isnan(value):
        return None
    return value if math.isfinite(value) else "inf" if value > 0 else "-inf"


def _json_value(value: object) -> object:
    if isinstance(value, dict):
        return {k: _json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(v) for v in value]
    return _json_number(value) if isinstance(value, float) else value


@dataclass(frozen=True)
class _Question:
    terms: tuple[Term, ...]
    delta: float
    limits: Limits
    interval: float | None


def compare(
    m: Mechanism,
    delta: float,
    *,
    limits: Limits = DEFAULT,
    interval: float | None = None,
    methods: Sequence[str] | None = None,
) -> list[Comparison]:
    """One row a method (see the module's table), in the table's order; the product's own first.

    ``limits`` bound each question to another library, not their sum. ``interval`` is the
    discretisation interval of dp_accounting; without one it is chosen for about a second of work.
    ``methods`` asks for some of METHODS only. A class-conditional mechanism's row is that of its
    worst class.

    Raises:
        InvalidRequest: delta is not a number in (0, 1), the interval is not positive and finite, or
            a method is unknown.
    """
    chosen = METHODS if methods is None else tuple(methods)
    for name in chosen:
        if name not in METHODS:
            raise InvalidRequest("methods", f"must be of {', '.join(METHODS)}")
    if interval is not None and not 0.0 < interval < math.inf:
        raise InvalidRequest("interval", "must be positive and finite")
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0.0 < delta < 1.0:
        raise InvalidRequest("delta", "must be a number strictly between 0 and 1")
    question = _Question((), float(delta), limits, interval)
    alternatives = dominating_terms(m)
    rows = []
    for name in (known for known in METHODS if known in chosen):
        begin = time.perf_counter()
        row = _own(m, delta, limits) if name == OWN else _row(name, alternatives, question)
        rows.append(replace(row, milliseconds=1e3 * (time.perf_counter() - begin)))
    return rows


def _own(m: Mechanism, delta: float, limits: Limits) -> Comparison:
    b = bounds.epsilon(m, delta, limits=limits)
    details: dict[str, object] = {
        "method": b.method,
        "direction": b.direction,
        "error_terms": dict(b.error_terms),
        "attack_success_bound": attack_success_bound(b.upper, b.delta),
    }
    return Comparison(OWN, b.lower, b.upper, certified=True, reason=b.reason, details=details)


def _row(name: str, alternatives: Sequence[tuple[Term, ...]], question: _Question) -> Comparison:
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        return Comparison(name, valid=False, reason=f"{package} is not installed")
    try:
        parts = [
            _ROWS[name](replace(question, terms=terms)) if terms else _nothing(name)
            for terms in alternatives
        ]
    except Unsupported as error:
        return Comparison(name, valid=False, reason=str(error))
    except OutOfLimits as stop:
        return Comparison(name, valid=False, reason=_did_not_finish(str(stop)))
    worst = max(parts, key=_size)
    return replace(
        worst,
        lower=_largest(p.lower for p in parts),
        upper=_largest(p.upper for p in parts),
        estimate=_largest(p.estimate for p in parts),
        valid=all(p.valid for p in parts),
        reason="; ".join(dict.fromkeys(p.reason for p in parts if p.reason)),
    )


def _nothing(name: str) -> Comparison:
    return Comparison(name, 0.0, 0.0, 0.0, certified=True, reason="nothing private is released")


def _did_not_finish(why: str) -> str:
    text = {"time": "out of time", "memory": "out of memory"}.get(why, f"failed: {why}")
    return f"did not finish: {text}"


def _size(row: Comparison) -> float:
    return max(x for x in (row.upper, row.estimate, row.lower, 0.0) if x is not None)


def _largest(values: Any) -> float | None:
    given = [v for v in values if v is not None]
    return max(given) if given else None


def _renyi_best(x: _Question) -> Comparison:
    upper, order, direction = cumulants.best_epsilon(x.terms, x.delta)
    details: dict[str, object] = {"order": order, "direction": direction}
    return Comparison("renyi_best_order", upper=upper, certified=True, details=details)


def _renyi_default(x: _Question) -> Comparison:
    upper, order = renyi_over(x.terms, x.delta, DEFAULT_ORDERS)
    return Comparison("renyi_default_orders", upper=upper, certified=True, details={"order": order})


def _renyi_integer(x: _Question) -> Comparison:
    upper, order = renyi_over(x.terms, x.delta, INTEGER_ORDERS)
    return Comparison("renyi_integer_orders", upper=upper, certified=True, details={"order": order})


def _gaussian(x: _Question) -> Comparison:
    lower, upper = gaussian_exact(x.terms, x.delta)
    return Comparison("gaussian_exact", lower, upper, certified=True)


def _edgeworth(x: _Question) -> Comparison:
    e = edgeworth(x.terms, x.delta)
    return Comparison(
        "edgeworth",
        estimate=e.epsilon,
        valid=e.valid,
        reason=e.reason,
        details={"direction": e.direction, "flags": [f.to_json() for f in e.flags]},
    )


def _clt(x: _Question) -> Comparison:
    c = clt(x.terms, x.delta)
    return Comparison(
        "clt",
        estimate=c.epsilon,
        valid=c.valid,
        reason=c.reason,
        details={"mu": c.mu, "flags": [f.to_json() for f in c.flags]},
    )


def _pld(x: _Question) -> Comparison:
    """Both ends; one that did not finish leaves the other standing."""
    ends: dict[bool, PldEpsilon] = {}
    notes = []
    for pessimistic in (True, False):
        try:
            ends[pessimistic] = dp_accounting_pld(
                x.terms,
                x.delta,
                pessimistic=pessimistic,
                interval=x.interval,
                limits=_part(x.limits, 0.6 if pessimistic else 0.4),
            )
        except OutOfLimits as stop:
            if not pessimistic and not ends:
                raise
            notes.append(
                f"the {'upper' if pessimistic else 'lower'} end {_did_not_finish(str(stop))}"
            )
    details: dict[str, object] = {"numerical_slack": numerical_slack(x.terms)}
    for pessimistic, end in ends.items():
        name = "upper" if pessimistic else "lower"
        details[f"{name}_interval"] = end.interval
        details[f"{name}_allowing_for_rounding"] = end.allowing_for_rounding
        details.setdefault("direction", end.direction)
    above, below = ends.get(True), ends.get(False)
    return Comparison(
        "dp_accounting_pld",
        None if below is None else below.epsilon,
        None if above is None else above.epsilon,
        valid=not notes,
        reason="; ".join(notes),
        details=details,
    )


def _supported(name: str, terms: Sequence[Term]) -> None:
    for term in terms:
        if not isinstance(term, _HANDLED.get(name, Term)):
            kind = "an (epsilon, delta)" if isinstance(term, ApproximateDPTerm) else "a Laplace"
            raise Unsupported(f"has nothing for {kind} part")


def _peer(name: str, **settings: float) -> Callable[[_Question], Comparison]:
    def ask(x: _Question) -> Comparison:
        given = {k: v * x.delta if k == "delta_error" else v for k, v in settings.items()}
        _supported(name, x.terms)
        answer = _ask(name, x.terms, {"delta": x.delta, **given}, x.limits)
        ends = {k: v for k in ("lower", "upper", "estimate") if (v := answer.get(k)) is not None}
        if not ends:
            return Comparison(name, valid=False, reason="failed: no finite answer")
        details: dict[str, object] = {**given}
        if "order" in answer:
            details["order"] = answer["order"]
        return Comparison(name, **ends, details=details)

    return ask


# The errors are those that Opacus takes by default; delta_error is a share of delta.
_PRV_SETTINGS: Final = {"eps_error": 0.01, "delta_error": 1e-3}

_HANDLED: Final[dict[str, Any]] = {
    "dp_accounting_rdp": GaussianTerm | LaplaceTerm,
    "opacus_prv": GaussianTerm,
}
_PACKAGES: Final = {"opacus_prv": "opacus", "microsoft_prv": "prv_accountant"}
_ROWS: Final[dict[str, Callable[[_Question], Comparison]]] = {
    "renyi_best_order": _renyi_best,
    "renyi_default_orders": _renyi_default,
    "renyi_integer_orders": _renyi_integer,
    "gaussian_exact": _gaussian,
    "edgeworth": _edgeworth,
    "clt": _clt,
    "dp_accounting_pld": _pld,
    "dp_accounting_rdp": _peer("dp_accounting_rdp"),
    "opacus_prv": _peer("opacus_prv", **_PRV_SETTINGS),
    "microsoft_prv": _peer("microsoft_prv", **_PRV_SETTINGS),
}
OWN: Final = "epsilond"
METHODS: Final = (OWN, *_ROWS)
