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

import math
import time
from collections.abc import Iterator, Sequence
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
)

Ball = Any  # arb: flint ships no types
Terms = tuple[Term, ...]

DEFAULT_SECONDS: Final = 60.0

_ACCURACY: Final = 50  # bits below the size of the sum at which quadrature and tails are cut
_MOST_LATTICE: Final = 4_000_000  # points that double precision scans
_LEAST_C: Final = 1e-2
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
    part = Fraction(value)
    return arb(fmpq(part.numerator, part.denominator))


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
    first, last = math.floor(lo / h), math.ceil(hi / h)
    if not last - first < _MOST_LATTICE:
        raise UndecidableBound(f"a sampled Gaussian of mu {mu:g} needs too many points at c {c:g}")
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
        if b - a < 2 or bound < enough:
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


class _Curve:
    """delta(x) of the terms in one direction, without the mass at infinity."""

    def __init__(self, direction: _Direction, deadline: float) -> None:
        self.direction = direction
        self._deadline = deadline
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
        best: tuple[float, float, float, float] | None = None
        for i in range(1, 21):
            c = saddle * i / 20.0
            lost = self.log_psi(c) - c * x - log_delta
            if not lost < 25.0:
                continue
            if ends < math.inf:
                # S ends: far enough out no copy on the right is left to be taken off.
                best = min(best or (math.inf,) * 4, (max(down / c, ends - x), lost, c, 0.0))
            for f in (1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0):
                c2 = saddle * f
                right = self.log_psi(c2) + _kappa(c2) - c2 * x + down
                t = max(down / c, right / (c2 - c))
                best = min(best or (math.inf,) * 4, (t, lost, c, c2))
        if best is None or not 0.0 < best[0] < math.inf:
            raise UndecidableBound("no contour was found")
        period, _, c, c2 = best
        dt = 2.0 * math.pi / period
        tau = math.sqrt(0.5 * width / (saddle * (saddle + 1.0)))
        decay = tau * tau + float(self.direction.variance())
        lost = max(self.log_psi(c) - c * x - log_delta, 0.0)
        t_max = math.sqrt(2.0 * (lost - math.log(width) + 4.0) / decay)
        return _Plan(c, c2, dt, max(8, math.ceil(t_max / dt) + 2), tau)

    # -- balls -------------------------------------------------------------------------------------

    def at_nodes(self, c: float, dt: float, count: int, bits: int) -> list[Any]:
        key = (c, dt, count, ctx.prec)
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

    def bounds(self, x_value: float, plan: _Plan) -> tuple[Ball, Ball]:
        """Balls whose lower end, and whose upper end, bound delta(x) from below and above."""
        x, c, tau, dt = arb(x_value), arb(plan.c), arb(plan.tau), arb(plan.dt)
        square = tau * tau
        inner = self.direction.variance()
        psi = self.at_nodes(plan.c, plan.dt, plan.count, _ACCURACY)
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
                return arb(0), arb(1)
            gap = ((c - arb(plan.c2)) * period).exp()
            copies += self.chernoff_bound(x, plan.c2) * gap / (1 - gap)
        return lower * scale - cut_low - copies, upper * scale + cut_up


# --------------------------------------------------------------------------------------------------
# Answers
# --------------------------------------------------------------------------------------------------


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
        width: (upper - lower)/upper to aim for; a wider enclosure is as true.
        seconds: at most about this long.

    Raises:
        UndecidableBound: the work would not end in ``seconds``.
    """
    if not 0.0 <= epsilon < math.inf:
        raise InvalidRequest("epsilon", "must be finite and not negative")
    deadline = time.monotonic() + seconds
    lower, upper = 0.0, 0.0
    for terms in _alternatives(m):
        low, up = _delta_of_terms(terms, epsilon, width, deadline)
        lower, upper = max(lower, low), max(upper, up)
    return lower, upper


def _alternatives(m: Mechanism | Sequence[Term]) -> tuple[Terms, ...]:
    if isinstance(m, list | tuple):
        return (tuple(m),)
    return dominating_terms(m)  # type: ignore[arg-type]


def _delta_of_terms(
    terms: Terms, epsilon: float, width: float, deadline: float
) -> tuple[float, float]:
    lower, upper = 0.0, 0.0
    for remove in (True, False):
        direction = _Direction(terms, remove)
        if not remove and not direction.sampled():
            break  # everything else is the same in both directions
        low, up = _delta_in_direction(_Curve(direction, deadline), epsilon, width)
        lower, upper = max(lower, low), max(upper, up)
    with _bits(128):
        mass = _mass_at_infinity(terms)
        return (
            max(0.0, _down(mass + (1 - mass) * arb(lower))),
            min(1.0, _up(mass + (1 - mass) * arb(upper))),
        )


def _mass_at_infinity(terms: Terms) -> Ball:
    """1 - prod (1 - delta)^N."""
    total = arb(0)
    for t in terms:
        if isinstance(t, ApproximateDPTerm) and t.delta > 0:
            total += t.count * (-_exact(t.delta)).log1p()
    return -total.expm1()


def _delta_in_direction(curve: _Curve, epsilon: float, width: float) -> tuple[float, float]:
    direction = curve.direction
    with _bits(128):
        most = direction.most()
        if most is not None and arb(epsilon) >= most:
            return 0.0, 0.0
    precision = 80 + max((t.count.bit_length() for t in direction.terms), default=0)
    lower, upper = 0.0, 1.0
    _, log_delta = curve.chernoff(epsilon)
    log_delta = min(log_delta - 1.5, -1e-9)
    aim = width
    for _ in range(5):
        plan = curve.plan(epsilon, log_delta, aim)
        with _bits(precision):
            low, up = curve.bounds(epsilon, plan)
            lower, upper = max(lower, _down(low)), min(upper, _up(up))
            noise = float((up.rad() + low.rad()) / max(upper, 1e-300))
        if upper - lower <= width * upper:
            break
        if lower > 0.0:
            log_delta = math.log(lower)
            aim *= max(0.05, min(0.7, 0.7 * width * upper / (upper - lower)))
        else:
            log_delta = min(log_delta - 3.0, math.log(upper))
            aim *= 0.5
        if noise > 0.2 * width:
            precision += 64
    return lower, upper
