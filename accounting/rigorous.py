"""delta(epsilon) and epsilon(delta) enclosed in ball arithmetic: slow, on no word but Arb's.

Every number that enters an answer is a ball (python-flint); double precision only chooses
parameters, any choice of which is valid. ``epsilond verify --rigorous`` and the tests of the fast
accountant stand on this module, so it shares no code with it.

With l_j the privacy loss of term j under its numerator, in one direction, S the sum of N_j of each,
Psi(s) = prod E[e^{s l_j}]^{N_j} and Re s = c > 0,

    delta(x) = E (1 - e^{x-S})_+ ,   int e^{sx} delta(x) dx = Psi(s) / (s (s+1)).

The integral back is a trapezoid sum with step dt, which by Poisson's formula is exact up to copies
at distance T = 2 pi / dt. With s_k = c + i k dt,

    e^{-c x} (dt/pi) [F(s_0)/2 + Re sum_{k>=1} F(s_k) e^{-i k dt x}] = sum_m e^{c m T} f(x + m T).

**Upper.** One more Gaussian, of mu = tau, can only raise delta, and makes the sum short:
F = Psi e^{tau^2 (s^2+s)/2} / (s (s+1)). Every copy is non-negative, so the sum bounds delta(x).

**Lower.** Any test bounds delta from below. The test Phi((S-x)/tau) has the transform
F = Psi [e^{tau^2 s^2/2}/s - e^{tau^2 (s+1)^2/2}/(s+1)]; its copies, each at most delta, are taken
off, those at m < 0 by delta <= 1, those at m > 0 by delta(y) <= Psi(c2) e^{kappa(c2) - c2 y} with
kappa(c2) = c2 log c2 - (1+c2) log(1+c2), or not at all where S cannot reach them.

**Truncation.** Nodes beyond a = (M-1) dt: |Psi(c+it)| <= Psi(c) e^{-v t^2/2}, v the variance of the
unsampled Gaussians. With V = v + tau^2 the tail is at most e^{-c x}/pi e^{-V a^2/2} times
Psi(c) e^{tau^2 (c^2+c)/2} min(1/a, 1/(V a^3)), or
Psi(c) (e^{tau^2 c^2/2} + e^{tau^2 (c+1)^2/2})/(V a^2).

**One sampled Gaussian.** With u(z) = 1 - q + q exp(mu z - mu^2/2), E e^{sl} is the integral of the
normal density times u^p, p = 1+s (remove) or -s (add), again a trapezoid sum, on the line
Im z = y (remove) or -y (add). For s = c + it, t >= 0, and 0 < y < pi/(2 mu) the integrand is
analytic in the strip between the real line and twice that height, where at z = x + iv

    |u|^(it) <= 1 (that is what the side is for: arg u has the sign of v),
    u(x) cos(mu v/2) <= |u| <= u(x),   |density| = e^{v^2/2} density(x),

so the sum's error is at most 2 E[e^{cl}] e^{2 y^2} X(2y)/(e^{2 pi y/h} - 1), X(v) = 1 or
cos(mu v/2)^-c, for every t (Trefethen and Weideman 2014, theorem 5.1). Points left out, each at
most e^{y^2/2} X(y) times its value on the real line, are bounded there block by block by the
monotonicity of u, and beyond the last block by normal tails.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import numpy as np
from flint import acb, acb_mat, arb, ctx, fmpq

from accounting import cumulants
from accounting.errors import InvalidRequest, UndecidableBound
from accounting.mechanisms import (
    ApproximateDPTerm,
    GaussianTerm,
    LaplaceTerm,
    Mechanism,
    Term,
    dominating_terms,
    realised_terms,
)

Ball = Any  # arb: flint ships no types
Terms = tuple[Term, ...]

DEFAULT_SECONDS: Final = 60.0

_ACCURACY: Final = 24  # bits to which quadrature and tails are cut, beyond the width asked for
_MOST_LATTICE: Final = 4_000_000  # points that double precision scans
_MOST_NODES: Final = 2_000_000
_MOST_BITS: Final = 2048
_MOST_ROUNDS: Final = 12
# Seconds on one slow core, from which a round's time is told before it starts.
_SECONDS_PER_WEIGHT: Final = 1.5e-5
_SECONDS_PER_POWER: Final = 1.0e-6
_SECONDS_PER_PRODUCT: Final = 1.0e-7
_SECONDS_PER_NODE: Final = 3.0e-5
_MOST_LOST: Final = 300.0  # nats by which Psi(c) e^{-c x} may exceed delta
_MOST_LOST_RIGHT: Final = 25.0
_ROUGH: Final = 0.05
_MOST_RESPONSES: Final = 100_000
# Candidates for c2 over the saddle.
_RIGHT: Final = (0.5, 0.7, 0.85, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
_LEAST_C: Final = 1e-5
_MOST_C: Final = 1e12


@contextmanager
def _bits(precision: int) -> Iterator[None]:
    before = ctx.prec
    ctx.prec = precision
    try:
        yield
    finally:
        ctx.prec = before


def _up(x: Ball) -> float:
    """A double at or above the ball."""
    value = float(x.upper())
    return math.inf if math.isnan(value) else math.nextafter(value, math.inf)


def _down(x: Ball) -> float:
    """A double at or below the ball."""
    value = float(x.lower())
    return -math.inf if math.isnan(value) else math.nextafter(value, -math.inf)


def _exact(value: Decimal) -> Ball:
    """The decimal as a ball of the current precision."""
    return _fraction(Fraction(value))


def _fraction(value: Fraction) -> Ball:
    return arb(fmpq(value.numerator, value.denominator))


def _normal_tail(x: Ball) -> Ball:
    """P(Z > x)."""
    return (x / arb(2).sqrt()).erfc() / 2


# --------------------------------------------------------------------------------------------------
# One sampled Gaussian: E e^{sl} at the nodes s = c + i k dt
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lattice:
    """Which points i h + j height carry the sum; ``runs`` are inclusive ranges of i."""

    h: float
    height: float
    first: int
    last: int
    runs: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(b - a + 1 for a, b in self.runs)

    def seconds(self, count: int) -> float:
        side = math.sqrt(count)
        each = _SECONDS_PER_WEIGHT + 2.0 * side * _SECONDS_PER_POWER + count * _SECONDS_PER_PRODUCT
        return self.size * each


@functools.lru_cache(maxsize=4096)
def _choose_lattice(q: float, mu: float, remove: bool, c: float, bits: int) -> _Lattice:
    """In double precision; what it leaves out is bounded later, so nothing here needs a proof."""
    wanted = bits * math.log(2.0)
    h, height = 0.0, 0.0
    for i in range(1, 60):
        # Above a height of 3 the cancellation, e^{y^2/2}, costs more than the points saved.
        for y in (math.pi / (2.0 * mu) * (i / 60.0), min(i / 20.0, 1.5 / mu)):
            size = wanted + 2.0 * y * y
            if not remove:
                size -= c * math.log(math.cos(mu * y))
            if y <= 3.0 and 2.0 * math.pi * y / size > h:
                h, height = 2.0 * math.pi * y / size, y
    margin = wanted + 0.5 * height * height + 4.0
    if not remove:
        margin -= c * math.log(math.cos(0.5 * mu * height))
    reach = math.sqrt(2.0 * (margin + 4.0))
    p = 1.0 + c if remove else -c
    if remove:
        lo, hi = -reach, p * mu + reach
    else:
        lo, hi = -min(c * mu, math.sqrt(-2.0 * c * math.log1p(-q))) - reach, reach
    if not hi - lo < _MOST_LATTICE * h:
        raise UndecidableBound(f"a sampled Gaussian of mu {mu:g} needs too many points at c {c:g}")
    first, last = math.floor(lo / h), math.ceil(hi / h)
    z = h * np.arange(first, last + 1, dtype=np.float64)
    log_u = np.logaddexp(math.log1p(-q), math.log(q) + mu * (z - 0.5 * mu))
    exponent = -0.5 * z * z + p * log_u
    kept = np.flatnonzero(exponent > exponent.max() - margin) + first
    breaks = np.flatnonzero(np.diff(kept) > 1)
    starts = [int(kept[0]), *(int(kept[i + 1]) for i in breaks)]
    ends = [*(int(kept[i]) for i in breaks), int(kept[-1])]
    return _Lattice(h, height, first, last, tuple(zip(starts, ends, strict=True)))


class _Sampled:
    """u and its powers for one (q, mu) and direction, at the current precision."""

    def __init__(self, q: float, mu: float, remove: bool, c: float) -> None:
        self.q, self.mu, self.remove = arb(q), arb(mu), remove
        self.c = arb(c)
        self.p = 1 + self.c if remove else -self.c
        self.half = self.mu * self.mu / 2
        self.scale = 1 / (2 * arb.pi()).sqrt()

    def log_u(self, z: Any) -> Any:
        """log u at a real or complex z within pi/mu of the real line."""
        x = self.mu * z - self.half
        if x.real < 1:
            # Near 1 the logarithm's relative accuracy counts: its phase is multiplied by t.
            return (self.q * x.expm1()).log1p()
        return (1 - self.q + self.q * x.exp()).log()

    def log_ratio(self, z: Ball) -> Ball:
        """log u/w with w = exp(mu z - mu^2/2)."""
        return (self.q + (1 - self.q) * (self.half - self.mu * z).exp()).log()

    def log_x(self, v: Ball) -> Ball:
        """log of what |u|^p gains at most between the real line and the height v < pi/mu."""
        return arb(0) if self.remove else -self.c * (self.mu * v / 2).cos().log()

    def block(self, h: Ball, a: int, b: int) -> Ball:
        """A bound on h sum of density times u^p over the points a..b."""
        nearest = 0 if a <= 0 <= b else min(abs(a), abs(b))
        edge = h * (b if self.remove else a)
        z = h * nearest
        return h * (b - a + 1) * self.scale * (self.p * self.log_u(edge) - z * z / 2).exp()

    def left_tail(self, z: Ball) -> Ball:
        """A bound on h sum over the points left of z."""
        if self.remove:
            return (self.p * self.log_u(z)).exp() * _normal_tail(-z)
        bound = (self.p * (1 - self.q).log()).exp() * _normal_tail(-z)
        if z <= self.p * self.mu:
            other = (
                self.p * self.log_ratio(z) + self.c * (self.c + 1) * self.half
            ).exp() * _normal_tail(self.p * self.mu - z)
            if other < bound:
                return other
        return bound

    def right_tail(self, z: Ball) -> Ball:
        """A bound on h sum over the points right of z."""
        if not self.remove:
            return (self.p * self.log_u(z)).exp() * _normal_tail(z)
        return (self.p * self.log_ratio(z) + self.p * self.c * self.half).exp() * _normal_tail(
            z - self.p * self.mu
        )


def _left_out(pair: _Sampled, lattice: _Lattice) -> Ball:
    """A bound on what the points outside the lattice's runs would add."""
    h = arb(lattice.h)
    lo = min(lattice.first, 0)
    hi = max(lattice.last, 0)
    if pair.remove:
        hi = max(hi, math.ceil((1.0 + float(pair.c)) * float(pair.mu) / lattice.h) + 1)
    total = pair.left_tail(h * lo) + pair.right_tail(h * hi)
    edges = [lo - 1, *(i for run in lattice.runs for i in run), hi + 1]
    largest = max((pair.block(h, a, a) for a, _ in lattice.runs), key=float)
    enough = largest / 16
    gaps = [(a + 1, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    while gaps:
        a, b = gaps.pop()
        if a > b:
            continue
        bound = pair.block(h, a, b)
        if a == b or bound < enough:
            total += bound
        else:
            middle = (a + b) // 2
            gaps += [(a, middle), (middle + 1, b)]
    return total


def _nodes_of_sampled(
    q: float, mu: float, remove: bool, c: float, dt: float, count: int, bits: int
) -> list[Any]:
    """Enclosures of E e^{sl} at s = c + i k dt, k = 0..count-1."""
    lattice = _choose_lattice(q, mu, remove, c, bits)
    pair = _Sampled(q, mu, remove, c)
    h, y = arb(lattice.h), arb(lattice.height)
    losses, weights = [], []
    for a, b in lattice.runs:
        for i in range(a, b + 1):
            z = acb(h * i, y if remove else -y)
            log_u = pair.log_u(z)
            weights.append((pair.p * log_u - z * z / 2).exp())
            losses.append(log_u if remove else -log_u)
    scale = h * pair.scale
    cut = _left_out(pair, lattice) * (y * y / 2 + pair.log_x(y)).exp()
    share = 2 * (2 * y * y + pair.log_x(2 * y)).exp() / (2 * arb.pi() * y / h).expm1()
    if not share < 0.5:
        raise UndecidableBound("the quadrature's strip is too narrow")
    # E e^{cl} is within share of itself of its own sum.
    error = (sum(weights, acb(0)).real * scale + cut) / (1 - share) * share + cut
    ball = arb(0, error.upper())
    noise = acb(ball, ball)
    if count == 1:
        return [sum(weights, acb(0)) * scale + noise]
    return [v * scale + noise for v in _split_exponentials(losses, weights, dt, count)]


def _split_exponentials(
    losses: Sequence[Any], weights: Sequence[Any], dt: float, count: int
) -> list[Any]:
    """sum_i w_i e^{i k dt l_i} for k = 0..count-1, as one matrix product.

    k = a B + b, so e^{i k dt l} = e^{i a B dt l} e^{i b dt l}. Powers are made by halving the
    exponent: a chain of products of boxes would widen by up to sqrt 2 a step.
    """
    columns = math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    step = arb(dt)
    base = [(acb(0, step) * x).exp() for x in losses]
    right = _powers(base, columns + 1)
    left = _powers(right.pop(), rows)
    left = [[w * v for w, v in zip(weights, row, strict=True)] for row in left]
    product = acb_mat(left) * acb_mat(right).transpose()
    return list(product.entries()[:count])


def _powers(base: list[Any], count: int) -> list[list[Any]]:
    out = [[acb(1)] * len(base), base]
    for n in range(2, count):
        a, b = out[n // 2], out[n - n // 2]
        out.append([x * y for x, y in zip(a, b, strict=True)])
    return out[:count]


# --------------------------------------------------------------------------------------------------
# All terms of one direction
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Direction:
    """The terms apart from their mass at infinity, seen in one neighbouring direction."""

    terms: Terms
    remove: bool

    def sampled(self) -> list[GaussianTerm]:
        return [
            t for t in self.terms if isinstance(t, GaussianTerm) and t.sampling_probability != 1.0
        ]

    def variance(self) -> Ball:
        """The sum of N mu^2 over the unsampled Gaussians."""
        total = arb(0)
        for t in self.terms:
            if isinstance(t, GaussianTerm) and t.sampling_probability == 1.0:
                total += t.count * arb(t.mu) ** 2
        return total

    def most(self) -> Ball | None:
        """A bound that S never exceeds, or None."""
        total = arb(0)
        for t in self.terms:
            if isinstance(t, GaussianTerm):
                if self.remove or t.sampling_probability == 1.0:
                    return None
                total -= t.count * (1 - arb(t.sampling_probability)).log()
            elif isinstance(t, LaplaceTerm):
                total += t.count * arb(t.inverse_scale)
            else:
                total += t.count * _exact(t.epsilon)
        return total

    def psi(self, c: float, dt: float, count: int, bits: int) -> list[Any]:
        """Enclosures of Psi at s = c + i k dt, k = 0..count-1, without the unsampled Gaussians."""
        out: list[Any] = [acb(1)] * count
        step = arb(dt)
        for t in self.terms:
            if isinstance(t, GaussianTerm):
                if t.sampling_probability == 1.0:
                    continue
                values = _nodes_of_sampled(
                    t.sampling_probability,
                    t.mu,
                    self.remove,
                    c,
                    dt,
                    count,
                    bits + t.count.bit_length(),
                )
            elif isinstance(t, LaplaceTerm):
                values = [_laplace(t, acb(c, step * k)) for k in range(count)]
            else:
                values = [_response(t, acb(c, step * k)) for k in range(count)]
            out = [x * _power(v, t.count) for x, v in zip(out, values, strict=True)]
        return out


def _power(x: Any, n: int) -> Any:
    if n < 64:
        return x**n
    # A power by squaring of boxes loses a bit more in each square than the logarithm does.
    y = (n * x.log()).exp()
    return y if y.is_finite() and x.real > 0 else x**n


def _response(t: ApproximateDPTerm, s: Any) -> Any:
    """E e^{sl} of randomised response, l = +-eps with probability 1/(1 + e^-+eps)."""
    e = _exact(t.epsilon)
    return (s * e).exp() / (1 + (-e).exp()) + (-s * e).exp() / (1 + e.exp())


def _laplace(t: LaplaceTerm, s: Any) -> Any:
    """E e^{sl} for Lap(0, 1/x) against the same moved by 1, x the inverse scale.

    l = x left of 0, -x right of 1, x (1 - 2z) between.
    """
    x = arb(t.inverse_scale)
    y = x * (1 + 2 * s)
    between = (-y).expm1() / -y
    return ((s * x).exp() * (1 + x * between) + (-x * (s + 1)).exp()) / 2


def _log_psi(direction: _Direction, c: float) -> float:
    """log Psi(c), roughly: it steers the choice of parameters only."""
    total = 0.0
    for t in direction.terms:
        if isinstance(t, GaussianTerm):
            costs = cumulants.gaussian_cost(t.sampling_probability, t.mu, 1.0 + c)
            one = c * costs[0 if direction.remove else 1]
        elif isinstance(t, LaplaceTerm):
            x = t.inverse_scale
            y = x * (1.0 + 2.0 * c)
            one = c * x + math.log(
                0.5 * (1.0 + math.exp(-y) + x * (-math.expm1(-y) / y if y > 0.0 else 1.0))
            )
        else:
            one = c * cumulants.pure_dp_cost(float(t.epsilon), 1.0 + c)
        total += t.count * one
    return total


def _kappa(c: float) -> float:
    return c * math.log(c) - (1.0 + c) * math.log1p(c)


@dataclass(frozen=True)
class _Plan:
    c: float
    c2: float
    dt: float
    count: int
    tau: float
    bits: int  # below Psi(c) at which quadrature and tails are cut


class _Curve:
    """delta(x) of the terms in one direction, without the mass at infinity."""

    def __init__(self, direction: _Direction) -> None:
        self.direction = direction
        self._log_psi: dict[float, float] = {}
        self._psi: dict[tuple[float, float, int, int], list[Any]] = {}

    # -- parameters, in double precision -----------------------------------------------------------

    def log_psi(self, c: float) -> float:
        if c not in self._log_psi:
            value = _log_psi(self.direction, c)
            self._log_psi[c] = math.inf if math.isnan(value) else value
        return self._log_psi[c]

    def chernoff(self, x: float) -> tuple[float, float]:
        """(c, log of Psi(c) e^{kappa(c) - c x}) at about the least, which is convex in c."""

        def at(k: float) -> float:
            c = math.exp(k)
            return self.log_psi(c) + _kappa(c) - c * x

        lo, hi = math.log(_LEAST_C), math.log(_MOST_C)
        grid = np.linspace(lo, hi, 48)
        best = min(range(48), key=lambda i: at(float(grid[i])))
        lo, hi = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, 47)])
        ratio = 0.5 * (math.sqrt(5.0) - 1.0)
        for _ in range(14):
            left, right = hi - ratio * (hi - lo), lo + ratio * (hi - lo)
            if at(left) <= at(right):
                hi = right
            else:
                lo = left
        k = 0.5 * (lo + hi)
        return math.exp(k), at(k)

    def plan(self, x: float, log_delta: float, width: float) -> _Plan:
        """Parameters for a relative width of delta at x, where it is about e^log_delta."""
        saddle, _ = self.chernoff(x)
        down = -log_delta - math.log(width) + 3.0
        most = self.direction.most()
        ends = math.inf if most is None else float(most)
        best = (math.inf, 0.0, 0.0, 0.0)  # the period, what is lost, c, c2
        # Left of the saddle copies on the right fade sooner; right of it those on the left do,
        # which matters where delta is near 1 and the saddle near 0.
        far = [saddle * 1.6**i for i in range(1, 30)]
        ahead = [saddle * f for f in _RIGHT]
        pairs = [(saddle * i / 20.0, ahead) for i in range(1, 21)]
        pairs += [(c, far[i + 1 : i + 4]) for i, c in enumerate(far[:-1])]
        for c, candidates in pairs:
            lost = self.log_psi(c) - c * x - log_delta
            if c > saddle and not lost < _MOST_LOST_RIGHT:
                break
            if not lost < _MOST_LOST:
                continue
            if ends < math.inf:
                # S ends: far enough out no copy on the right is left to be taken off.
                best = min(best, (max(down / c, 1.0001 * (ends - x)), lost, c, 0.0))
            # Often a wall rises just right of the saddle: a single inclusion's own tail.
            for c2 in candidates:
                if c2 > c:
                    right = self.log_psi(c2) + _kappa(c2) - c2 * x + down
                    best = min(best, (max(down / c, right / (c2 - c)), lost, c, c2))
        period, lost, c, c2 = best
        if not 0.0 < period < math.inf:
            raise UndecidableBound("no contour was found")
        dt = 2.0 * math.pi / period
        tau = min(math.sqrt(0.5 * width / (saddle * (saddle + 1.0))), 1.0 / c)
        decay = tau * tau + float(self.direction.variance())
        lost = max(lost, 0.0)
        t_max = math.sqrt(2.0 * (lost - math.log(width) + 4.5) / decay)
        if not t_max / dt < _MOST_NODES:
            raise UndecidableBound(f"{t_max / dt:.3g} nodes are too many")
        bits = _ACCURACY + math.ceil((lost - math.log(width)) / math.log(2.0))
        return _Plan(c, c2, dt, max(8, math.ceil(t_max / dt) + 2), tau, bits)

    def seconds(self, plan: _Plan) -> float:
        """About how long :meth:`bounds` takes."""
        total = (1 + len(self.direction.terms)) * plan.count * _SECONDS_PER_NODE
        for t in self.direction.sampled():
            at = (t.sampling_probability, t.mu, self.direction.remove)
            bits = plan.bits + t.count.bit_length()
            total += _choose_lattice(*at, plan.c, bits).seconds(plan.count)
            if plan.c2 > 0.0:
                bits = _ACCURACY + t.count.bit_length()
                total += _choose_lattice(*at, plan.c2, bits).seconds(1)
        return total

    # -- balls -------------------------------------------------------------------------------------

    def at_nodes(self, c: float, dt: float, count: int, bits: int) -> list[Any]:
        key = (c, dt, count, bits)
        if key not in self._psi:
            self._psi[key] = self.direction.psi(c, dt, count, bits)
        return self._psi[key]

    def psi_at(self, c: float) -> Ball:
        """An enclosure of Psi(c), unsampled Gaussians included."""
        value = self.at_nodes(c, 1.0, 1, _ACCURACY)[0].real
        c_ = arb(c)
        return value * (self.direction.variance() * (c_ * c_ + c_) / 2).exp()

    def chernoff_bound(self, x: Ball, c: float) -> Ball:
        """Psi(c) e^{kappa(c) - c x}, at least delta(x)."""
        c_ = arb(c)
        kappa = c_ * c_.log() - (1 + c_) * (1 + c_).log()
        return self.psi_at(c) * (kappa - c_ * x).exp()

    def bounds(self, x_value: float, plan: _Plan) -> tuple[Ball, Ball, Ball]:
        """A ball whose lower end, and one whose upper end, bounds delta(x); and the copies."""
        x, c, tau, dt = arb(x_value), arb(plan.c), arb(plan.tau), arb(plan.dt)
        square = tau * tau
        inner = self.direction.variance()
        psi = self.at_nodes(plan.c, plan.dt, plan.count, plan.bits)
        upper = lower = arb(0)
        half, last = square / 2, (square / 2).exp()
        for k, value in enumerate(psi):
            s = acb(c, dt * k)
            whole = value * (inner * (s * s + s) / 2 + half * s * s - s * x).exp()
            grow = (half * s).exp()
            over = 1 / (s * (s + 1))
            up = (whole * grow * over).real
            low = (whole * (1 / s - grow * grow * last / (s + 1))).real
            upper += up / 2 if k == 0 else up
            lower += low / 2 if k == 0 else low
        scale = dt / arb.pi()
        # Truncation.
        a = dt * (plan.count - 1)
        decay = inner + square
        size = psi[0].real * (inner * (c * c + c) / 2 - c * x - decay * a * a / 2).exp() / arb.pi()
        size_up = size * (half * (c * c + c)).exp()
        cut_up = size_up * min(1 / a, 1 / (decay * a**3), key=float)
        cut_low = size * ((half * c * c).exp() + (half * (c + 1) ** 2).exp()) / (decay * a * a)
        # Copies.
        period = 2 * arb.pi() / dt
        near = (-c * period).exp()
        copies = near / (1 - near)
        most = self.direction.most()
        if not (most is not None and x + period >= most):
            if plan.c2 <= plan.c:
                return arb(0), arb(1), arb(1)
            gap = ((c - arb(plan.c2)) * period).exp()
            copies += self.chernoff_bound(x, plan.c2) * gap / (1 - gap)
        return lower * scale - cut_low - copies, upper * scale + cut_up, copies


# --------------------------------------------------------------------------------------------------
# Closed forms
# --------------------------------------------------------------------------------------------------


def _closed_form(direction: _Direction, epsilon: float) -> Ball | None:
    """delta(epsilon) without the mass at infinity where a formula has it, else None."""
    terms, e = direction.terms, arb(epsilon)
    most = direction.most()
    if most is not None and e >= most:
        return arb(0)
    whole = [t for t in terms if isinstance(t, GaussianTerm) and t.sampling_probability == 1.0]
    if len(whole) == len(terms):
        mu = direction.variance().sqrt()
        return _normal_tail(e / mu - mu / 2) - e.exp() * _normal_tail(e / mu + mu / 2)
    if len(terms) > 1:
        return None
    term = terms[0]
    if isinstance(term, GaussianTerm) and term.count == 1:
        return _one_sampled(term, e, direction.remove)
    if isinstance(term, LaplaceTerm) and term.count == 1:
        return -((e - arb(term.inverse_scale)) / 2).expm1()
    if isinstance(term, ApproximateDPTerm) and term.count <= _MOST_RESPONSES:
        return _responses(term, e)
    return None


def _one_sampled(term: GaussianTerm, e: Ball, remove: bool) -> Ball:
    """The likelihood ratio u crosses e^epsilon (remove) or e^-epsilon (add) at one z.

    remove: Q(Z > z) - e^epsilon P(Z > z); add: P(Z < z) - e^epsilon Q(Z < z).
    """
    q, mu = arb(term.sampling_probability), arb(term.mu)
    z = ((e if remove else -e).expm1() / q).log1p() / mu + mu / 2
    if not remove:
        z, mu = -z, -mu
    none, one = _normal_tail(z), _normal_tail(z - mu)
    mixed = (1 - q) * none + q * one
    return mixed - e.exp() * none if remove else none - e.exp() * mixed


def _responses(term: ApproximateDPTerm, e: Ball) -> Ball:
    """N randomised responses: S = (N - 2j) eps with j the binomial number of lies."""
    n, one = term.count, _exact(term.epsilon)
    lie = 1 / (1 + one.exp())
    weight, ratio, total = (1 - lie) ** n, (-one).exp(), arb(0)
    for j in range(n + 1):
        gain = -(e - (n - 2 * j) * one).expm1()
        if gain <= 0:
            break
        # At an atom gain is 0 to within its ball, and the term is then its positive part.
        total += weight * (gain if gain > 0 else gain.max(arb(0)))
        weight = weight * ratio * (n - j) / (j + 1)
    return total


# --------------------------------------------------------------------------------------------------
# One direction, refined until it answers
# --------------------------------------------------------------------------------------------------

# What is still wanted, as a relative width, of (lower, upper); None when they do.
_Wanted = Callable[[float, float], float | None]


@dataclass
class _Enclosure:
    lower: float = 0.0
    upper: float = 1.0
    reason: str = ""

    def meet(self, lower: float, upper: float) -> None:
        self.lower, self.upper = max(self.lower, lower), min(self.upper, upper)


def _refine(
    direction: _Direction, epsilon: float, wanted: _Wanted, log_delta: float | None, deadline: float
) -> _Enclosure:
    """delta at epsilon in one direction, apart from the mass at infinity.

    Args:
        wanted: see _Wanted; the refinement ends when it returns None.
        log_delta: about where delta lies, if that is known.
        deadline: no round starts that would outlast it; the reason then says so.
    """
    found = _Enclosure()
    for bits in (128, 256, 512, 1024, _MOST_BITS):
        with _bits(bits):
            exact = _closed_form(direction, epsilon)
        if exact is None:
            break
        found.meet(_down(exact), _up(exact))
        if wanted(found.lower, found.upper) is None:
            return found
    else:
        found.reason = f"{_MOST_BITS} bits do not decide"
        return found
    try:
        _refine_contour(_Curve(direction), epsilon, wanted, log_delta, deadline, found)
    except UndecidableBound as stop:
        found.reason = stop.detail
    return found


def _refine_contour(
    curve: _Curve,
    epsilon: float,
    wanted: _Wanted,
    log_delta: float | None,
    deadline: float,
    found: _Enclosure,
) -> None:
    counts = max(t.count.bit_length() for t in curve.direction.terms)
    saddle, chernoff = curve.chernoff(epsilon)
    with _bits(64 + counts):
        found.meet(0.0, _up(curve.chernoff_bound(arb(epsilon), saddle)))
    width = wanted(found.lower, found.upper)
    if log_delta is None or log_delta > chernoff:
        log_delta = chernoff - 1.5
    log_delta = min(log_delta, -1e-9)
    rough = _ROUGH  # what the parameters are asked for; the width they give is seen afterwards
    extra, down = 40, 4.0
    for _ in range(_MOST_ROUNDS):
        if width is None:
            return
        plan = curve.plan(epsilon, log_delta, rough)
        cost = curve.seconds(plan)
        if time.monotonic() + cost > deadline:
            raise UndecidableBound(f"the next round would take about {cost:.2g} s")
        with _bits(plan.bits + counts + extra):
            low, up, copies = curve.bounds(epsilon, plan)
        found.meet(_down(low), _up(up))
        width = wanted(found.lower, found.upper)
        if width is None:
            return
        if float(low.rad() + up.rad()) > 0.1 * width * found.upper:
            extra += 64
        if found.lower > 0.0:
            log_delta = math.log(found.lower)
            seen = (found.upper - found.lower) / found.upper
            rough *= min(0.5, max(1e-6, 0.8 * width / seen))
            continue
        log_delta = min(log_delta - 0.5, math.log(found.upper) - 1.0)
        if float(copies) > 0.1 * found.upper:
            log_delta -= down
            down *= 2.0
        else:
            # The smoothing is what is too coarse: delta falls faster here than its bound.
            rough /= 64.0
    raise UndecidableBound(f"{_MOST_ROUNDS} rounds do not decide")


# --------------------------------------------------------------------------------------------------
# Answers
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Confirmation:
    """Whether delta(epsilon) <= delta is proven (True), refuted (False) or neither (None)."""

    confirmed: bool | None
    reason: str = ""


def delta_enclosure(
    m: Mechanism | Sequence[Term],
    epsilon: float,
    *,
    width: float = 1e-3,
    seconds: float = DEFAULT_SECONDS,
) -> tuple[float, float]:
    """(lower, upper) of delta at epsilon: proven, the larger of the two directions.

    Args:
        m: a mechanism, the worst of whose alternatives counts, or one composition of terms.
        epsilon: at least 0, taken as exactly this double.
        width: (upper - lower)/upper to aim for. Where the time is not enough the enclosure is
            wider, and as true.
        seconds: at most about this long.

    Raises:
        InvalidRequest: epsilon is negative or not finite.
    """
    _check_epsilon(epsilon)
    deadline = time.monotonic() + seconds

    def wanted(low: float, up: float) -> float | None:
        return None if up - low <= width * up else width

    return _delta_of_all(m, epsilon, wanted, deadline)


def confirm_upper(
    m: Mechanism | Sequence[Term],
    epsilon: float,
    delta: float,
    *,
    seconds: float = DEFAULT_SECONDS,
) -> bool | None:
    """:func:`confirm` without the reason."""
    return confirm(m, epsilon, delta, seconds=seconds).confirmed


def confirm(
    m: Mechanism | Sequence[Term],
    epsilon: float,
    delta: float,
    *,
    seconds: float = DEFAULT_SECONDS,
) -> Confirmation:
    """Whether the mechanism is (epsilon, delta)-DP, proven either way or undecided with a reason.

    Args:
        epsilon: taken as exactly this double.
        delta: in (0, 1), taken as its shortest decimal: 0.1 is one tenth, as in an (epsilon,
            delta) part.

    Raises:
        InvalidRequest: epsilon or delta is out of range.
    """
    _check_epsilon(epsilon)
    _check_delta(delta)
    deadline = time.monotonic() + seconds
    reasons = []
    for terms in _alternatives(m):
        answer = _confirm_terms(terms, epsilon, delta, deadline)
        if answer.confirmed is False:
            if not isinstance(m, list | tuple) and realised_terms(m) is not None:  # type: ignore[arg-type]
                return Confirmation(None, "one pair stands for many classes, and refutes nothing")
            return answer
        if answer.confirmed is None:
            reasons.append(answer.reason)
    return Confirmation(None, "; ".join(reasons)) if reasons else Confirmation(True)


def epsilon_enclosure(
    m: Mechanism | Sequence[Term],
    delta: float,
    *,
    tolerance: float = 1e-3,
    seconds: float = DEFAULT_SECONDS,
) -> tuple[float, float]:
    """(lower, upper) of epsilon at delta, proven.

    Args:
        delta: as in :func:`confirm`.
        tolerance: upper - lower to aim for, relative to the larger of 1 and epsilon.

    Raises:
        InvalidRequest: delta is out of range.
        UndecidableBound: no finite upper end was proven in about ``seconds``.
    """
    _check_delta(delta)
    deadline = time.monotonic() + seconds

    def left() -> float:
        return deadline - time.monotonic()

    def confirmed(x: float) -> bool | None:
        return confirm_upper(m, x, delta, seconds=left())

    with _bits(1024):
        target = _fraction(Fraction(repr(delta)))
        if any(_mass_at_infinity(terms) > target for terms in _alternatives(m)):
            return math.inf, math.inf

    width = 0.1

    def rough(low: float, up: float) -> float | None:
        far = up < 1e-20 * delta or low > 1e6 * delta
        return None if far or up - low <= width * up else width

    # Newton's rule on log delta, from the right, its slope a secant's; near the root both ends are
    # proven at half the tolerance to either side, and each refusal moves the bracket.
    lower, upper, x = 0.0, math.inf, _first_guess(m, delta)
    log_delta = math.log(delta)
    seen: list[tuple[float, float]] = []
    for _ in range(60):
        size = tolerance * max(1.0, x)
        if upper - lower <= size or left() <= 0.0:
            break
        low, up = _delta_of_all(m, x, rough, deadline)
        if 0.0 < up < 2.0 * low:
            seen.append((x, 0.5 * (math.log(low) + math.log(up)) - log_delta))
        if up <= delta:
            upper = min(upper, x)
        elif low > delta:
            lower = max(lower, x)
        middle = 2.0 * x if upper == math.inf else 0.5 * (lower + upper)
        guess, slope = None, _slope(seen, size)
        if slope is not None:
            x, f = min(seen, key=lambda at: abs(at[1]))
            guess = x - f / slope
            width = min(0.1, max(1e-9, 0.1 * -slope * size))
        elif seen:
            guess = x + math.copysign(5.0 * size, seen[0][1])
        if slope is not None and guess is not None and abs(guess - x) < 0.5 * size:
            for side in (0.45, -0.45):
                end = max(0.0, guess + side * size)
                if lower < end < upper or (end == 0.0 and lower == 0.0):
                    answer = confirmed(end)
                    if answer is True:
                        upper = end
                    elif answer is False:
                        lower = end
            # Once more from there, should an end be open: closer now, and to the new width.
            guess = guess if guess != x else None
        x = guess if guess is not None and lower < guess < upper else middle
    if upper == math.inf:
        raise UndecidableBound("no finite epsilon was proven within the limits")
    if lower == 0.0 and confirmed(0.0):
        upper = 0.0
    return lower, upper


def _first_guess(m: Mechanism | Sequence[Term], delta: float) -> float:
    """Above epsilon, roughly: the least x at which Psi(c) e^{kappa(c) - c x} <= delta."""
    worst = 0.0
    for terms in _alternatives(m):
        for direction in _directions(terms):
            costs = [
                (_log_psi(direction, c) + _kappa(c) - math.log(delta)) / c
                for c in np.geomspace(1e-4, 1e7, 90).tolist()
            ]
            worst = max(worst, min((x for x in costs if not math.isnan(x)), default=1.0))
    return worst if 0.0 < worst < math.inf else 1.0


def _slope(seen: list[tuple[float, float]], size: float) -> float | None:
    """That of log delta between the two points nearest to its target and not to each other."""
    near = sorted(seen, key=lambda at: abs(at[1]))
    for x, f in near[1:]:
        if abs(x - near[0][0]) > size and (f - near[0][1]) * (x - near[0][0]) < 0.0:
            return (f - near[0][1]) / (x - near[0][0])
    return None


def _check_epsilon(epsilon: float) -> None:
    if not 0.0 <= epsilon < math.inf:
        raise InvalidRequest("epsilon", "must be finite and not negative")


def _check_delta(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise InvalidRequest("delta", "must lie strictly between 0 and 1")


def _alternatives(m: Mechanism | Sequence[Term]) -> tuple[Terms, ...]:
    if isinstance(m, list | tuple):
        return (tuple(m),)
    return dominating_terms(m)  # type: ignore[arg-type]


def _directions(terms: Terms) -> list[_Direction]:
    """Both, unless the losses are the same in both."""
    remove = _Direction(terms, True)
    return [remove, _Direction(terms, False)] if remove.sampled() else [remove]


def _mass_at_infinity(terms: Terms) -> Ball:
    """1 - prod (1 - delta)^N."""
    total = arb(0)
    for t in terms:
        if isinstance(t, ApproximateDPTerm) and t.delta > 0:
            total += t.count * (-_exact(t.delta)).log1p()
    return -total.expm1()


def _delta_of_all(
    m: Mechanism | Sequence[Term], epsilon: float, wanted: _Wanted, deadline: float
) -> tuple[float, float]:
    lower, upper = 0.0, 0.0
    for terms in _alternatives(m):
        low, up = _delta_of_terms(terms, epsilon, wanted, deadline)
        lower, upper = max(lower, low), max(upper, up)
    return lower, upper


def _delta_of_terms(
    terms: Terms, epsilon: float, wanted: _Wanted, deadline: float
) -> tuple[float, float]:
    with _bits(256):
        mass = _mass_at_infinity(terms)

        def whole(low: float, up: float) -> tuple[float, float]:
            return (
                max(0.0, _down(mass + (1 - mass) * arb(low))),
                min(1.0, _up(mass + (1 - mass) * arb(up))),
            )

        lower, upper = 0.0, 0.0
        for direction in _directions(terms):

            def still(low: float, up: float, other: float = lower) -> float | None:
                # A direction that stays below the other's lower end does not count.
                return None if up <= other else wanted(*whole(low, up))

            found = _refine(direction, epsilon, still, None, deadline)
            lower, upper = max(lower, found.lower), max(upper, found.upper)
        return whole(lower, upper)


def _confirm_terms(terms: Terms, epsilon: float, delta: float, deadline: float) -> Confirmation:
    if _as_declared(terms, epsilon, delta):
        return Confirmation(True)
    with _bits(1024):
        mass = _mass_at_infinity(terms)
        rest = (_fraction(Fraction(repr(delta))) - mass) / (1 - mass)
        if rest < 0:
            return Confirmation(False, "delta is below the probability that a part gives up")
        least, most = _down(rest), _up(rest)

    def wanted(low: float, up: float) -> float | None:
        if up <= least or low > most:
            return None
        seen = (up - low) / up
        return max(1e-12, min(0.25 * seen, 0.5 * abs(0.5 * (low + up) - least) / up))

    reasons = []
    for direction in _directions(terms):
        guess = math.log(least) if least > 0.0 else None
        found = _refine(direction, epsilon, wanted, guess, deadline)
        if found.lower > most:
            return Confirmation(False)
        if found.upper > least:
            reasons.append(
                f"delta lies in [{found.lower:g}, {found.upper:g}]"
                + (f": {found.reason}" if found.reason else "")
            )
    return Confirmation(None, "; ".join(reasons)) if reasons else Confirmation(True)


def _as_declared(terms: Terms, epsilon: float, delta: float) -> bool:
    """Whether the parts are declared (epsilon, delta) and add up to no more, exactly."""
    total_epsilon, total_delta = Fraction(0), Fraction(0)
    for t in terms:
        if not isinstance(t, ApproximateDPTerm):
            return False
        total_epsilon += t.count * Fraction(t.epsilon)
        total_delta += t.count * Fraction(t.delta)
    return total_epsilon <= Fraction(epsilon) and total_delta <= Fraction(repr(delta))
