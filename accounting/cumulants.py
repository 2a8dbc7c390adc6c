"""Renyi costs of a mechanism, each a certified upper bound.

For the pair P = N(0,1), Q = (1-q) N(0,1) + q N(mu,1) write phi for P's density and

    w(z) = exp(mu z - mu^2/2),   u(z) = dQ/dP (z) = 1 - q + q w(z).

Per composition, with s = alpha - 1,

    remove:  rho(alpha) = log I / s,  I = E_P[u^alpha]      (Renyi divergence of Q from P)
    add:     rho(alpha) = log I / s,  I = E_P[u^-s]         (Renyi divergence of P from Q)

I is computed by the trapezoid rule on the lattice z_k = z_0 + k h, and four things are bounded.

**Quadrature.** If f is analytic in |Im z| < a, decays there and has integral of |f(x + iy)| over x
at most M for each |y| < a, then |trapezoid - integral| <= 2 M / (exp(2 pi a / h) - 1)
(Trefethen and Weideman 2014, theorem 5.1). Take a < pi/mu. Then mu y stays inside (-pi, pi), so
q w(x + iy) never meets the negative axis, u has no zero in the strip and its real powers are
analytic there. |phi(x + iy)| = exp(y^2/2) phi(x), and with p = 1 - q, r = q w(x), theta = mu y,

    |u(x + iy)|^2 = (p + r)^2 - 4 p r sin(theta/2)^2,
    so   u(x) cos(theta/2) <= |u(x + iy)| <= u(x).

Hence M <= exp(a^2/2) I for remove, and M <= exp(a^2/2) cos(mu a/2)^-s I for add: the error is a
fraction eta of I itself, and I <= trapezoid / (1 - eta).

**Range.** The lattice is cut to [z_lo, z_hi]; what is dropped is bounded as a sum over lattice
points, which is below the integral of the same bound wherever that bound is monotone.

- remove, right of z_hi >= alpha mu: u <= w u(z_hi)/w(z_hi) there, and phi w^alpha =
  exp(alpha s mu^2/2) phi(z - alpha mu); left of z_lo <= 0: u <= u(z_lo).
- add, right of z_hi >= 0: u >= u(z_hi); left of z_lo: u >= 1 - q (if z_lo <= 0), and
  u >= w u(z_lo)/w(z_lo) (if z_lo <= -s mu), phi w^-s = exp(s alpha mu^2/2) phi(z + s mu). The first
  is useless for q near 1 and the second for small q, so the smaller of the two is taken.

**Rounding.** Each node's exponent is raised by a bound on its own rounding error, so that each
summand is an upper bound; the sum is exactly rounded (math.fsum). numpy's exp, log1p and logaddexp
and SciPy's log_ndtr are taken to be right within 4 units in the last place, which the constants
cover many times over.

**Size.** Where a lattice would need more than MAX_NODES nodes (a huge mu or order), a closed bound
takes its place. remove, by Minkowski's inequality in L^alpha(P):

    I^(1/alpha) <= 1 - q + q exp(s mu^2/2),

which is never above the unamplified alpha mu^2/2 and is tight once q exp(s mu^2/2) >> 1. add, as
u >= 1 - q and as u -> u^-s is convex:  I <= min((1-q)^-s, 1 - q + q exp(s alpha mu^2/2)). Both hold
everywhere, so the smaller of the lattice's value and the closed bound is returned.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr as _scipy_log_ndtr

from accounting.errors import InvalidRequest
from accounting.mechanisms import (
    ApproximateDPTerm,
    GaussianTerm,
    LaplaceTerm,
    Mechanism,
    Term,
    dominating_terms,
)

MAX_NODES: Final = 50_000
MIN_ORDER: Final = 1.0 + 2.0**-20
MAX_ORDER: Final = 1e6

_U: Final = 2.0**-53
_SLACK: Final = 64 * _U  # relative; no chain of operations here has as many as 64 roundings
_REACH: Final = 9.5  # Phi(-9.5) = 1e-21: the tails stay below the rounding of a value near 1
_LOG_2_OVER_ETA: Final = math.log(2e17)
_LOG_SQRT_2PI: Final = 0.5 * math.log(2.0 * math.pi)

# Outside this range mu^2 leaves double precision.
_MU_LEAST: Final = 1e-150
_MU_MOST: Final = 1e150

Array = NDArray[np.float64]


def renyi_cost(m: Mechanism, order: float) -> float:
    """A certified upper bound on rho(order) of the whole mechanism, in nats.

    The larger of the two directions, and the worst class of a class-conditional mechanism.
    Infinite where a part has a delta of its own, or beyond double precision.

    Raises:
        InvalidRequest: the order is not in [MIN_ORDER, MAX_ORDER].
    """
    check_order(order)
    worst = 0.0
    for terms in dominating_terms(m):
        if any(isinstance(t, ApproximateDPTerm) and t.delta > 0 for t in terms):
            return math.inf
        worst = max(worst, *directed_costs(terms, order))
    return worst


def check_order(order: float) -> None:
    """Raises InvalidRequest unless the order is a number in [MIN_ORDER, MAX_ORDER]."""
    if not MIN_ORDER <= order <= MAX_ORDER:
        raise InvalidRequest("order", f"must lie in [{MIN_ORDER}, {MAX_ORDER:g}]")


def directed_costs(terms: tuple[Term, ...], order: float) -> tuple[float, float]:
    """Upper bounds (remove, add) on rho(order) of a composition of terms, in nats.

    The delta of an (epsilon, delta) term is left out: what is bounded is the mechanism apart from
    an event of probability at most 1 - prod(1 - delta_i); the caller accounts for that event.
    """
    remove, add = [], []
    for term in terms:
        if isinstance(term, GaussianTerm):
            one = gaussian_cost(term.sampling_probability, term.mu, order)
        elif isinstance(term, LaplaceTerm):
            one = (laplace_cost(term.inverse_scale, order),) * 2
        else:
            one = (pure_dp_cost(_float_above(term), order),) * 2
        remove.append(term.count * one[0])
        add.append(term.count * one[1])
    # fsum and each product round once.
    return math.fsum(remove) * (1.0 + _SLACK), math.fsum(add) * (1.0 + _SLACK)


def _float_above(term: ApproximateDPTerm) -> float:
    near = float(term.epsilon)
    return near if near >= term.epsilon else math.nextafter(near, math.inf)


# --------------------------------------------------------------------------------------------------
# One term
# --------------------------------------------------------------------------------------------------


def pure_dp_cost(epsilon: float, order: float) -> float:
    """Upper bound on rho(order) of any epsilon-DP mechanism.

    Randomised response dominates every epsilon-DP mechanism (Kairouz, Oh and Viswanath 2015):

        rho = [log(e^{alpha eps} + e^{(1 - alpha) eps}) - log(1 + e^eps)] / (alpha - 1),

    which lies below eps and below alpha eps^2/2 (Bun and Steinke 2016, proposition 3.3).
    """
    if epsilon == 0.0:
        return 0.0
    s = order - 1.0
    # log(1 + e^{(1 - 2 alpha) eps}) + alpha eps - eps - log(1 + e^-eps)
    log_i = (
        s * epsilon
        + math.log1p(math.exp(-(2.0 * order - 1.0) * epsilon))
        - math.log1p(math.exp(-epsilon))
    )
    response = (log_i + _SLACK * (1.0 + s * epsilon)) / s
    return max(0.0, min(response, epsilon, 0.5 * order * epsilon * epsilon) * (1.0 + _SLACK))


def laplace_cost(inverse_scale: float, order: float) -> float:
    """Upper bound on rho(order) of one Laplace release; the pair is symmetric.

    With x the inverse scale and s = alpha - 1 (Mironov 2017, proposition 6),

        I = a e^{s x} + b e^{-alpha x},   a = alpha/(2 alpha - 1), b = s/(2 alpha - 1).

    a + b = 1 and a s = b alpha, so with h(y) = e^y - 1 - y >= 0

        I = 1 + a h(s x) + b h(-alpha x),

    which cancels nowhere. The release is x-DP, so what pure DP costs bounds it too.
    """
    s, x = order - 1.0, inverse_scale
    a, b = order / (2.0 * order - 1.0), s / (2.0 * order - 1.0)
    if s * x <= 1.0:
        log_i = math.log1p(a * _exp_rest(s * x) + b * _exp_rest(-order * x))
    else:
        # log I >= 0.3 here, of the size of s x, and so is what is rounded.
        log_i = s * x + math.log(a + b * math.exp(-(2.0 * order - 1.0) * x))
    return min(log_i / s * (1.0 + _SLACK), pure_dp_cost(x, order))


def _exp_rest(y: float) -> float:
    """e^y - 1 - y for y <= 1, within 32 roundings."""
    if y < -1.0:
        return math.expm1(y) - y
    # 20 terms of the Taylor series; what is left is below 1e-19 of the first.
    total = 0.0
    for k in range(21, 2, -1):
        total = (total + 1.0) * y / k
    return 0.5 * y * y * (1.0 + total)


@functools.lru_cache(maxsize=16384)
def gaussian_cost(q: float, mu: float, order: float) -> tuple[float, float]:
    """Upper bounds (remove, add) on rho(order) of one subsampled Gaussian.

    The cost grows with mu, so a mu whose square underflows is raised, and one whose square
    overflows costs infinity.
    """
    if not mu < _MU_MOST:
        return math.inf, math.inf
    mu = max(mu, _MU_LEAST)
    if q == 1.0:
        cost = 0.5 * order * mu * mu * (1.0 + _SLACK)
        return cost, cost
    s = order - 1.0
    remove = _least(_closed_remove(q, mu, order), _lattice(_remove_lattice, q, mu, order))
    add = _least(_closed_add(q, mu, order), _lattice(_add_lattice, q, mu, order))
    return remove / s * (1.0 + _SLACK), add / s * (1.0 + _SLACK)


def _least(closed: float, lattice: float) -> float:
    # A lattice that left double precision (inf - inf) says nothing; the closed bound always stands.
    return max(0.0, closed if math.isnan(lattice) else min(closed, lattice))


def _log_mix(q: float, t: float) -> float:
    """log(1 - q + q e^t) for t >= 0, rounded up."""
    if t == math.inf:
        return math.inf
    if t < 1.0:
        return math.log1p(q * math.expm1(t)) * (1.0 + _SLACK)
    value = t + math.log(q + (1.0 - q) * math.exp(-t))
    return value + _SLACK * (t + abs(math.log(q)) + 1.0)


def _closed_remove(q: float, mu: float, order: float) -> float:
    return order * _log_mix(q, 0.5 * (order - 1.0) * mu * mu) * (1.0 + _SLACK)


def _closed_add(q: float, mu: float, order: float) -> float:
    s = order - 1.0
    return min(-s * math.log1p(-q) * (1.0 + _SLACK), _log_mix(q, 0.5 * s * order * mu * mu))


def _lattice(rule: Callable[[float, float, float], float], q: float, mu: float, a: float) -> float:
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        return rule(q, mu, a)


def _remove_lattice(q: float, mu: float, order: float) -> float:
    """Upper bound on log E_P[u^order], or infinity where the lattice would be too large."""
    s = order - 1.0
    h, log_eta = _spacing(mu, 0.0)
    z_lo, z_hi = -_REACH, order * mu + _REACH
    if not (z_hi - z_lo) / h < MAX_NODES:
        return math.inf
    z = _nodes(z_lo, z_hi, h)
    z_lo, z_hi = float(z[0]), float(z[-1])
    log_u, noise = _log_ratio(z, q, mu)
    exponent = -0.5 * z * z + order * log_u
    rounding = _SLACK * (1.0 + 0.5 * z * z + order * noise)
    x_hi = mu * (z_hi - 0.5 * mu)
    tails = (
        order * float(log_u[0]) + _log_ndtr(z_lo),
        0.5 * order * s * mu * mu
        + order * (float(log_u[-1]) - x_hi)
        + _log_ndtr(order * mu - z_hi),
    )
    # The tails' exponents are far larger than their value; their rounding is raised likewise.
    slack = _SLACK * (1.0 + order * (mu * (z_hi + mu) + abs(math.log(q)) + order * mu * mu))
    return _log_total(exponent + rounding, h, log_eta, tuple(t + slack for t in tails))


def _add_lattice(q: float, mu: float, order: float) -> float:
    """Upper bound on log E_P[u^-(order - 1)], or infinity where the lattice would be too large."""
    s = order - 1.0
    log_none = -math.log1p(-q)
    h, log_eta = _spacing(mu, s)
    z_lo = -min(s * mu, math.sqrt(2.0 * s * log_none)) - _REACH
    z_hi = _REACH
    if not (z_hi - z_lo) / h < MAX_NODES:
        return math.inf
    z = _nodes(z_lo, z_hi, h)
    z_lo, z_hi = float(z[0]), float(z[-1])
    log_u, noise = _log_ratio(z, q, mu)
    exponent = -0.5 * z * z - s * log_u
    rounding = _SLACK * (1.0 + 0.5 * z * z + s * noise)
    left = s * log_none + _log_ndtr(z_lo)
    if z_lo <= -s * mu:
        x_lo = mu * (z_lo - 0.5 * mu)
        other = 0.5 * s * order * mu * mu - s * (float(log_u[0]) - x_lo) + _log_ndtr(z_lo + s * mu)
        other += _SLACK * s * (mu * (abs(z_lo) + mu) + abs(math.log(q)) + order * mu * mu)
        left = min(left, other)
    right = -s * float(log_u[-1]) + _log_ndtr(-z_hi)
    slack = _SLACK * (1.0 + z_lo * z_lo + s * (log_none + float(noise[-1])))
    return _log_total(exponent + rounding, h, log_eta, (left + slack, right + slack))


def _spacing(mu: float, s: float) -> tuple[float, float]:
    """The widest step h whose relative quadrature error eta is about 1e-17, and log eta.

    The strip's half-width a < pi/mu is chosen to make h large; any choice is valid.
    """
    widest = math.pi / mu
    best_h, best_a, best_m = 0.0, 0.0, 0.0
    for i in range(1, 40):
        a = min(widest * (i / 40.0), 0.3 * i)
        log_m = 0.5 * a * a
        if s > 0.0:
            log_m -= s * math.log(math.cos(0.5 * mu * a))
        h = 2.0 * math.pi * a / (_LOG_2_OVER_ETA + log_m)
        if h > best_h:
            best_h, best_a, best_m = h, a, log_m
    decay = 2.0 * math.pi * best_a / best_h
    return best_h, math.log(2.0) + best_m - decay - math.log1p(-math.exp(-decay)) + _SLACK * decay


def _nodes(z_lo: float, z_hi: float, h: float) -> Array:
    """Lattice points that cover [z_lo, z_hi]."""
    count = math.ceil((z_hi - z_lo) / h) + 1
    return z_lo + h * np.arange(count, dtype=np.float64)


def _log_ratio(z: Array, q: float, mu: float) -> tuple[Array, Array]:
    """log u at the nodes, and the size of what is rounded on the way.

    d log u / d log(q w) = q w / u, so what is rounded in log(q w) counts only by that share.
    """
    log_none = math.log1p(-q)
    log_in = math.log(q) + mu * (z - 0.5 * mu)
    log_u = np.logaddexp(log_none, log_in)
    share = np.minimum(1.0, 2.0 * np.exp(np.minimum(0.0, log_in - log_u)))
    size = abs(math.log(q)) + mu * (np.abs(z) + mu)
    return log_u, np.abs(log_u) - log_none + share * size


def _log_ndtr(x: float) -> float:
    value = float(_scipy_log_ndtr(x))
    return value + _SLACK * (1.0 + abs(value))


def _log_total(exponents: Array, h: float, log_eta: float, tails: tuple[float, ...]) -> float:
    """log of (h / sqrt(2 pi) sum exp(exponents) + sum exp(tails)) / (1 - eta), rounded up."""
    peak = float(exponents.max())
    lattice = math.fsum(np.exp(exponents - peak)) * h
    total = lattice + math.fsum(math.exp(min(700.0, t + _LOG_SQRT_2PI - peak)) for t in tails)
    log_i = peak + math.log(total) - _LOG_SQRT_2PI - math.log1p(-math.exp(log_eta))
    return log_i + _SLACK * (1.0 + abs(peak))


# --------------------------------------------------------------------------------------------------
# From Renyi to (epsilon, delta)
# --------------------------------------------------------------------------------------------------


def conversion(order: float, log_delta: float) -> float:
    """What Renyi privacy of this order costs to become (epsilon, delta), in nats, rounded up.

    epsilon = rho(alpha) + log(1 - 1/alpha) - (log delta + log alpha)/(alpha - 1)
    (Canonne, Kamath and Steinke 2020, proposition 12; Balle et al. 2020, theorem 21).
    """
    s = order - 1.0
    gain, price = math.log1p(-1.0 / order), (log_delta + math.log(order)) / s
    size = abs(gain) + (abs(log_delta) + math.log(order)) / s
    return gain - price + _SLACK * (1.0 + size)


def renyi_epsilon(m: Mechanism, delta: float) -> float:
    """A certified upper bound on epsilon at delta, by the best order that a fixed search meets."""
    return max(best_epsilon(terms, delta)[0] for terms in dominating_terms(m))


def best_epsilon(terms: tuple[Term, ...], delta: float) -> tuple[float, float, str]:
    """(epsilon, order, direction) of the best Renyi bound at delta for a composition of terms.

    A term's own delta is an event of probability at most m = 1 - prod(1 - delta_i), outside which
    the term is epsilon_i-DP (Kairouz, Oh and Viswanath 2015): delta(eps) <= m + (1 - m) delta'(eps)
    with delta' of the rest, so the rest has to meet delta - m.
    """
    left = delta - mass_at_infinity(terms)
    if left <= 0.0:
        return math.inf, math.inf, "both"
    log_delta = math.log(left)

    def at(order: float) -> tuple[float, float, str]:
        remove, add = directed_costs(terms, order)
        cost = max(remove, add)
        epsilon = max(0.0, cost + conversion(order, log_delta))
        epsilon *= 1.0 + _SLACK
        direction = "both" if remove == add else "remove" if remove > add else "add"
        return (math.inf if math.isnan(epsilon) else epsilon), order, direction

    return _least_over_orders(at)


def best_delta(terms: tuple[Term, ...], epsilon: float) -> tuple[float, float, str]:
    """(delta, order, direction) of the best Renyi bound at epsilon for a composition of terms.

    log delta = s (rho - epsilon + log(1 - 1/alpha)) - log alpha, the conversion read backwards.
    """
    mass = mass_at_infinity(terms)

    def at(order: float) -> tuple[float, float, str]:
        s = order - 1.0
        remove, add = directed_costs(terms, order)
        cost = max(remove, add)
        inside = cost - epsilon + math.log1p(-1.0 / order)
        inside += _SLACK * (cost + epsilon + 1.0 + abs(math.log1p(-1.0 / order)))
        log_delta = s * inside - math.log(order)
        log_delta += _SLACK * (1.0 + abs(s * inside) + math.log(order))
        direction = "both" if remove == add else "remove" if remove > add else "add"
        if math.isnan(log_delta) or log_delta >= 0.0:
            return 1.0, order, direction
        return min(1.0, (mass + math.exp(log_delta)) * (1.0 + _SLACK)), order, direction

    return _least_over_orders(at)


def mass_at_infinity(terms: tuple[Term, ...]) -> float:
    """1 - prod(1 - delta_i), rounded up: the probability that (epsilon, delta) terms give up."""
    logs = []
    for term in terms:
        if isinstance(term, ApproximateDPTerm) and term.delta > 0:
            if term.delta >= 1:
                return 1.0
            logs.append(term.count * math.log1p(-float(term.delta)))
    return -math.expm1(math.fsum(logs)) * (1.0 + _SLACK) if logs else 0.0


def _least_over_orders(
    at: Callable[[float], tuple[float, float, str]],
) -> tuple[float, float, str]:
    """The least of at(order) over a coarse geometric grid and a golden section around its best.

    Any order gives a valid bound, so the search need not find the minimum.
    """
    seen: dict[float, tuple[float, float, str]] = {}

    def ask(x: float) -> float:
        if x not in seen:
            seen[x] = at(1.0 + x)
        return seen[x][0]

    grid = [2.0**k for k in range(-10, 17)]
    values = [ask(x) for x in grid]
    i = min(range(len(grid)), key=values.__getitem__)
    lo, hi = math.log(grid[max(0, i - 1)]), math.log(grid[min(len(grid) - 1, i + 1)])
    ratio = 0.5 * (math.sqrt(5.0) - 1.0)
    for _ in range(16):
        left, right = hi - ratio * (hi - lo), lo + ratio * (hi - lo)
        if ask(math.exp(left)) <= ask(math.exp(right)):
            hi = right
        else:
            lo = left
    return min(seen.values(), key=lambda found: found[0])
