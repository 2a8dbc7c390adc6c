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
summand is an upper bound; the sum is taken by halves, so that a summand meets at most
log2(MAX_NODES) < 16 roundings. numpy's exp, log, log1p and logaddexp and SciPy's log_ndtr are taken
to be right within 4 units in the last place, which the constants cover many times over.

**Many pairs.** The lattices of many pairs are the rows of one array, as long as the longest of
them: a lattice that goes on beyond its range is as good a bound, its tails begin further out.

**Laplace.** Closed, and symmetric: :func:`laplace_cost`.

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
from accounting.rounding import SLACK, float_above

MAX_NODES: Final = 50_000
_CHUNK: Final = 1 << 15  # nodes in one array: it and its kin stay in the processor's cache
_FEW: Final = 16  # up to so many terms, each cost is remembered by itself
MIN_ORDER: Final = 1.0 + 2.0**-20
MAX_ORDER: Final = 1e6

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
    gaussians = tuple(t for t in terms if isinstance(t, GaussianTerm))
    if len(gaussians) <= _FEW:
        costs = [(t.count, gaussian_cost(t.sampling_probability, t.mu, order)) for t in gaussians]
        remove, add = ([n * cost[i] for n, cost in costs] for i in (0, 1))
    else:
        remove, add = ([cost] for cost in _many_costs(gaussians, order))
    for term in terms:
        if isinstance(term, LaplaceTerm):
            one = laplace_cost(term.inverse_scale, order)
        elif isinstance(term, ApproximateDPTerm):
            one = pure_dp_cost(float_above(term.epsilon), order)
        else:
            continue
        remove.append(term.count * one)
        add.append(term.count * one)
    # fsum and each product round once.
    return math.fsum(remove) * (1.0 + SLACK), math.fsum(add) * (1.0 + SLACK)


@functools.lru_cache(maxsize=512)
def _many_costs(terms: tuple[GaussianTerm, ...], order: float) -> tuple[float, float]:
    counts = np.array([t.count for t in terms], dtype=np.float64)
    q = np.array([t.sampling_probability for t in terms])
    mu = np.array([t.mu for t in terms])
    remove, add = (math.fsum(counts * cost) for cost in _gaussian_costs(q, mu, order))
    return remove * (1.0 + SLACK), add * (1.0 + SLACK)


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
    response = (log_i + SLACK * (1.0 + s * epsilon)) / s
    return max(0.0, min(response, epsilon, 0.5 * order * epsilon * epsilon) * (1.0 + SLACK))


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
    return min(log_i / s * (1.0 + SLACK), pure_dp_cost(x, order))


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
    remove, add = _gaussian_costs(np.array([q]), np.array([mu]), order)
    return float(remove[0]), float(add[0])


def _gaussian_costs(q: Array, mu: Array, order: float) -> tuple[Array, Array]:
    """:func:`gaussian_cost` of each pair, [n] in each direction."""
    remove, add = np.full(q.shape, np.inf), np.full(q.shape, np.inf)
    s = order - 1.0
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        mu = np.maximum(mu, _MU_LEAST)
        whole = (q == 1.0) & (mu < _MU_MOST)
        remove[whole] = add[whole] = 0.5 * order * mu[whole] ** 2 * (1.0 + SLACK)
        sampled = (q < 1.0) & (mu < _MU_MOST)
        if sampled.any():
            q, mu = q[sampled], mu[sampled]
            least = _least(_closed_remove(q, mu, order), _lattices(q, mu, order, remove=True))
            remove[sampled] = least / s * (1.0 + SLACK)
            least = _least(_closed_add(q, mu, order), _lattices(q, mu, order, remove=False))
            add[sampled] = least / s * (1.0 + SLACK)
    return remove, add


def _least(closed: Array, lattice: Array) -> Array:
    # A lattice that left double precision (inf - inf) says nothing; the closed bound always stands.
    return np.maximum(0.0, np.fmin(closed, lattice))


def _log_mix(q: Array, t: Array) -> Array:
    """log(1 - q + q e^t) for t >= 0, rounded up."""
    near = np.log1p(q * np.expm1(t)) * (1.0 + SLACK)
    far = t + np.log(q + (1.0 - q) * np.exp(-t)) + SLACK * (t + np.abs(np.log(q)) + 1.0)
    return np.where(t < 1.0, near, far)


def _closed_remove(q: Array, mu: Array, order: float) -> Array:
    return order * _log_mix(q, 0.5 * (order - 1.0) * mu * mu) * (1.0 + SLACK)


def _closed_add(q: Array, mu: Array, order: float) -> Array:
    s = order - 1.0
    none = -s * np.log1p(-q) * (1.0 + SLACK)
    return np.minimum(none, _log_mix(q, 0.5 * s * order * mu * mu))


def _lattices(q: Array, mu: Array, order: float, *, remove: bool) -> Array:
    """Upper bounds on log E_P[u^order] (remove) or log E_P[u^-(order - 1)], [n].

    Infinity where the lattice would be too large.
    """
    s = order - 1.0
    h, log_eta = _spacing(mu, 0.0 if remove else s)
    if remove:
        z_lo, z_hi = np.full(q.shape, -_REACH), order * mu + _REACH
    else:
        z_lo = -np.minimum(s * mu, np.sqrt(-2.0 * s * np.log1p(-q))) - _REACH
        z_hi = np.full(q.shape, _REACH)
    spans = (z_hi - z_lo) / h
    rows = np.argsort(spans)
    rows = rows[spans[rows] < MAX_NODES]
    out = np.full(q.shape, np.inf)
    rule = _remove_rows if remove else _add_rows
    while rows.size:
        # As many rows as fill a chunk, and at least one.
        nodes = np.ceil(spans[rows]) + 1.0
        fit = max(1, int(np.searchsorted(nodes * np.arange(1, rows.size + 1), _CHUNK, "right")))
        now, rows = rows[:fit], rows[fit:]
        z = z_lo[now, None] + h[now, None] * np.arange(nodes[fit - 1])
        exponents, tails = rule(z, q[now], mu[now], order)
        out[now] = _log_total(exponents, h[now], log_eta[now], tails)
    return out


def _remove_rows(z: Array, q: Array, mu: Array, order: float) -> tuple[Array, tuple[Array, Array]]:
    """Exponents at the nodes [n, k], and log bounds of what is left and right of them [n]."""
    s = order - 1.0
    z_lo, z_hi = z[:, 0], z[:, -1]
    log_u, noise = _log_ratio(z, q, mu)
    half = 0.5 * z * z
    exponents = order * log_u - half + SLACK * (1.0 + half + order * noise)
    x_hi = mu * (z_hi - 0.5 * mu)
    left = order * log_u[:, 0] + _log_ndtr(z_lo)
    right = 0.5 * order * s * mu * mu + order * (log_u[:, -1] - x_hi) + _log_ndtr(order * mu - z_hi)
    # The tails' exponents are far larger than their value; their rounding is raised likewise.
    slack = SLACK * (1.0 + order * (mu * (z_hi + mu) + np.abs(np.log(q)) + order * mu * mu))
    return exponents, (left + slack, right + slack)


def _add_rows(z: Array, q: Array, mu: Array, order: float) -> tuple[Array, tuple[Array, Array]]:
    """Exponents at the nodes [n, k], and log bounds of what is left and right of them [n]."""
    s = order - 1.0
    z_lo, z_hi = z[:, 0], z[:, -1]
    log_u, noise = _log_ratio(z, q, mu)
    half = 0.5 * z * z
    exponents = -half - s * log_u + SLACK * (1.0 + half + s * noise)
    log_none = -np.log1p(-q)
    left = s * log_none + _log_ndtr(z_lo)
    x_lo = mu * (z_lo - 0.5 * mu)
    other = 0.5 * s * order * mu * mu - s * (log_u[:, 0] - x_lo) + _log_ndtr(z_lo + s * mu)
    other += SLACK * s * (mu * (np.abs(z_lo) + mu) + np.abs(np.log(q)) + order * mu * mu)
    left = np.where(z_lo <= -s * mu, np.fmin(left, other), left)
    right = -s * log_u[:, -1] + _log_ndtr(-z_hi)
    slack = SLACK * (1.0 + z_lo * z_lo + s * (log_none + noise[:, -1]))
    return exponents, (left + slack, right + slack)


def _spacing(mu: Array, s: float) -> tuple[Array, Array]:
    """The widest step h whose relative quadrature error eta is about 1e-17, and log eta, [n] each.

    The strip's half-width a < pi/mu is chosen to make h large; any choice is valid.
    """
    i = np.arange(1, 40)
    a = np.minimum(np.pi / mu[:, None] * (i / 40.0), 0.3 * i)
    log_m = 0.5 * a * a
    if s > 0.0:
        log_m -= s * np.log(np.cos(0.5 * mu[:, None] * a))
    h = 2.0 * np.pi * a / (_LOG_2_OVER_ETA + log_m)
    best = np.arange(len(mu)), np.argmax(h, axis=1)
    decay = 2.0 * np.pi * a[best] / h[best]
    log_eta = math.log(2.0) + log_m[best] - decay - np.log1p(-np.exp(-decay)) + SLACK * decay
    return h[best], log_eta


def _log_ratio(z: Array, q: Array, mu: Array) -> tuple[Array, Array]:
    """log u at the nodes [n, k], and the size of what is rounded on the way.

    d log u / d log(q w) = q w / u, so what is rounded in log(q w) counts only by that share.
    """
    q, mu = q[:, None], mu[:, None]
    log_none = np.log1p(-q)
    log_in = np.log(q) + mu * (z - 0.5 * mu)
    log_u = np.logaddexp(log_none, log_in)
    share = np.minimum(1.0, 2.0 * np.exp(np.minimum(0.0, log_in - log_u)))
    size = np.abs(np.log(q)) + mu * (np.abs(z) + mu)
    return log_u, np.abs(log_u) - log_none + share * size


def _log_ndtr(x: Array) -> Array:
    value = np.asarray(_scipy_log_ndtr(x), dtype=np.float64)
    return value + SLACK * (1.0 + np.abs(value))


def _log_total(exponents: Array, h: Array, log_eta: Array, tails: tuple[Array, Array]) -> Array:
    """log of (h / sqrt(2 pi) sum exp(exponents) + sum exp(tails)) / (1 - eta), rounded up, [n]."""
    peak: Array = exponents.max(axis=1)
    total = _row_sums(np.exp(exponents - peak[:, None])) * h
    for tail in tails:
        total = total + np.exp(np.minimum(700.0, tail + _LOG_SQRT_2PI - peak))
    log_i: Array = peak + np.log(total) - _LOG_SQRT_2PI - np.log1p(-np.exp(log_eta))
    return log_i + SLACK * (1.0 + np.abs(peak))


def _row_sums(values: Array) -> Array:
    """Sums over the rows of [n, k], by halves."""
    while (k := values.shape[1]) > 1:
        half = k // 2
        added = values[:, :half] + values[:, half : 2 * half]
        values = added if k % 2 == 0 else np.concatenate([added, values[:, -1:]], axis=1)
    return values[:, 0]


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
    return gain - price + SLACK * (1.0 + size)


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

    def at(order: float) -> _Found:
        remove, add = directed_costs(terms, order)
        epsilon = max(remove, add) + conversion(order, log_delta)
        epsilon += SLACK * abs(epsilon)
        return _or_inf(epsilon), order, _dominating(remove, add)

    epsilon, order, direction = _least_over_orders(at, thorough=len(terms) <= _FEW)
    return max(0.0, epsilon), order, direction


def best_delta(terms: tuple[Term, ...], epsilon: float) -> tuple[float, float, str]:
    """(delta, order, direction) of the best Renyi bound at epsilon for a composition of terms.

    log delta = s (rho - epsilon + log(1 - 1/alpha)) - log alpha, the conversion read backwards.
    """
    mass = mass_at_infinity(terms)

    def at(order: float) -> _Found:
        s = order - 1.0
        remove, add = directed_costs(terms, order)
        cost = max(remove, add)
        inside = cost - epsilon + math.log1p(-1.0 / order)
        inside += SLACK * (cost + epsilon + 1.0 + abs(math.log1p(-1.0 / order)))
        log_delta = s * inside - math.log(order)
        log_delta += SLACK * (1.0 + abs(s * inside) + math.log(order))
        return _or_inf(log_delta), order, _dominating(remove, add)

    log_delta, order, direction = _least_over_orders(at, thorough=len(terms) <= _FEW)
    if log_delta >= 0.0:
        return 1.0, order, direction
    # exp is right to some units in the last place down to the smallest normal double.
    inside = max(1e-300, math.exp(log_delta))
    return min(1.0, (mass + inside) * (1.0 + SLACK)), order, direction


def mass_at_infinity(terms: tuple[Term, ...]) -> float:
    """1 - prod(1 - delta_i), rounded up: the probability that (epsilon, delta) terms give up."""
    logs = []
    for term in terms:
        if isinstance(term, ApproximateDPTerm) and term.delta > 0:
            if term.delta >= 1:
                return 1.0
            logs.append(term.count * math.log1p(-float(term.delta)))
    return -math.expm1(math.fsum(logs)) * (1.0 + SLACK) if logs else 0.0


_Found = tuple[float, float, str]  # the bound, its order, the direction that dominates


def _or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _dominating(remove: float, add: float) -> str:
    return "both" if remove == add else "remove" if remove > add else "add"


def _least_over_orders(at: Callable[[float], _Found], *, thorough: bool) -> _Found:
    """The least of at(order) by golden section over log(order - 1).

    Any order gives a valid bound, so the search need not find the minimum. The cumulant function
    is convex, so log delta is convex in the order and epsilon quasi-convex. Closed bounds that
    stand in for a lattice may bend that: a thorough search meets a coarse grid first.
    """
    seen: dict[float, _Found] = {}

    def ask(log_s: float) -> float:
        if log_s not in seen:
            seen[log_s] = at(1.0 + math.exp(log_s))
        return seen[log_s][0]

    grid = [k * math.log(2.0) for k in range(-10, 17)]
    lo, hi = grid[0], grid[-1]
    if thorough:
        i = min(range(len(grid)), key=lambda i: ask(grid[i]))
        lo, hi = grid[max(0, i - 1)], grid[min(len(grid) - 1, i + 1)]
    ratio = 0.5 * (math.sqrt(5.0) - 1.0)
    left, right = hi - ratio * (hi - lo), lo + ratio * (hi - lo)
    for _ in range(16):
        # The probe that is kept lies where the next one would be put.
        if ask(left) <= ask(right):
            hi, right = right, left
            left = hi - ratio * (hi - lo)
        else:
            lo, left = left, right
            right = lo + ratio * (hi - lo)
    return min(seen.values(), key=lambda found: found[0])
