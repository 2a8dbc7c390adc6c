"""Two-sided proven bounds on delta(epsilon) of a composition, by a tilted contour sum.

For one direction of the neighbouring relation, S is the sum of the privacy losses of all outputs
under the numerator, Psi(s) = E exp(s S), and delta(x) = E (1 - exp(x - S))_+. For every c > 0

    integral of exp(s x) delta(x) dx = Psi(s) / (s (s + 1)),   s = c + i t,

which is summed over a lattice of t. docs/accounting.md derives every step; in short:

- **Window.** The noise z of an output is cut to an interval. What lies outside counts as revealing
  everything in the upper bound and is dropped in the lower one.
- **Quadrature.** Psi's factors are integrals over the window by Gauss-Legendre panels, each with
  the error bound of its Bernstein ellipse.
- **Aliasing.** The lattice sum is the sum of exp(c m T) delta(epsilon + m T) over all integers m.
  All terms are non-negative, so the sum is an upper bound; for the lower one the other terms are
  bounded and taken off.
- **Truncation.** Beyond the last node the sum is bounded through |Psi(c + i t)|, which a shifted
  contour shows to decay (:meth:`_Sampled.decay`), or, where it does not decay, by composing with a
  narrow Gaussian (upper) and by a smooth test (lower), which cost a little width.
- **Rounding.** Every operation's error is bounded, node by node, and enters the bounds.

What is assumed of the arithmetic stands in docs/accounting.md, "What is assumed".
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtri

from accounting import cumulants
from accounting.clock import Clock
from accounting.mechanisms import ApproximateDPTerm, GaussianTerm, LaplaceTerm, Term
from accounting.rounding import U

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]
Direction = Literal["remove", "add"]
Worse = Literal["remove", "add", "both"]

_LIB: Final = 8.0 * U  # relative error of an elementary function: 4 units in the last place
_LOG_SQRT_2PI: Final = 0.5 * math.log(2.0 * math.pi)
_FAR: Final = 700.0  # exp of more would overflow

_NODES: Final = 40
# Of the nodes, absolutely, and of the weights, relatively; a test compares them with ball
# arithmetic.
_NODE_ERROR: Final = 4.0 * U
_WEIGHT_ERROR: Final = 16.0 * U
# Bernstein ellipses that are tried for a panel's error bound: sum of the semi-axes over the
# half-width. The bound is (64/15) F rho^(-2n) / (1 - rho^-2) times the half-width for n nodes, F
# the largest modulus inside the ellipse; docs/accounting.md derives it.
_RHO: Final = np.array([1.25, 1.5, 1.8, 2.2, 2.8, 3.6, 5.0, 8.0])[:, None]
_SEMI_X: Final = 0.5 * (_RHO + 1.0 / _RHO)
_SEMI_Y: Final = 0.5 * (_RHO - 1.0 / _RHO)
_LOG_ELLIPSE: Final = math.log(64.0 / 15.0) - 2.0 * _NODES * np.log(_RHO) - np.log1p(-(_RHO**-2.0))
_QUADRATURE: Final = -42.0  # log of the share of phi(c) that quadrature may miss
_FEW_TURNS: Final = 1_000
_GRID: Final = 2.0**24
_CHUNK: Final = 512  # nodes summed at a time: bounds the rounding of a sum, and memory

_MANY: Final = 24  # parts beyond which parameters are chosen with less care
_LEAST_NORMAL: Final = 2.3e-308
_WIDE: Final = 1e-60  # outside of windows for a first look, when delta may be anything
_LONG: Final = 2.0 * math.pi * 2_000.0  # of a sum that is worth looking for a shorter one
_ENOUGH: Final = 45.0  # nats of decay beyond which a truncated sum's rest is nothing

_FARTHEST: Final = 1e18  # of epsilons that are tried: its products with t are still numbers

_AT_ONCE: Final = 2**19  # terms of a sum over nodes and epsilons that are held at a time

MAX_T_NODES: Final = 100_000
MAX_Z_NODES: Final = 200_000
MAX_WORK: Final = 4e8  # t nodes times z nodes of all parts
ACCURACY: Final = 2e-3  # of delta's brackets, relative
_NO_DELTA: Final = 1e-290  # an upper end as small is narrow enough with any lower one
# Outside these, sums and squares of losses leave double precision.
MOST_MU: Final = 200.0
LEAST_MU: Final = 1e-12
_TILTS: Final = np.exp(np.arange(math.log(1e-5), math.log(1e7), 0.3))


def _gauss_legendre(n: int) -> tuple[Array, Array]:
    """Nodes and weights on [-1, 1]: NumPy's, whose outer weights are off by thousands of units,
    improved by Newton's method in extended precision; w = 2 / ((1 - x^2) P'(x)^2)."""
    x: Any = np.polynomial.legendre.leggauss(n)[0].astype(np.longdouble)
    for _ in range(4):
        before, value = np.ones_like(x), x
        for k in range(2, n + 1):
            before, value = value, ((2 * k - 1) * x * value - (k - 1) * before) / k
        slope = n * (before - x * value) / (1 - x * x)
        x = x - value / slope
    weights = 2 / ((1 - x * x) * slope * slope)
    return np.asarray(x, dtype=np.float64), np.asarray(weights, dtype=np.float64)


class OutOfReach(Exception):
    """The question leaves what double precision, or the limit on work, can answer."""


class OutOfTime(OutOfReach):
    """The time was over."""

    def __init__(self) -> None:
        super().__init__("the time was over")


_X, _W = _gauss_legendre(_NODES)


def _kappa(c: Array) -> Array:
    """log of sup over y of (1 - e^-y) e^-cy."""
    value: Array = c * np.log(c) - (1.0 + c) * np.log1p(c)
    return value


def _exp(x: Array) -> Array:
    """exp, infinite where it overflows."""
    value: Array = np.where(x < _FAR, np.exp(np.minimum(x, _FAR)), math.inf)
    return value


def _on_grid(x: float) -> float:
    """x on a grid so coarse that sums and halves of its points are exact doubles."""
    return math.floor(x * _GRID) / _GRID


def _dyadic(x: float) -> float:
    """x rounded down to 20 significant bits, so that its integer multiples are exact doubles."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(math.floor(math.ldexp(mantissa, 20)), exponent - 20)


# --------------------------------------------------------------------------------------------------
# Parts: the transforms phi(s) = E exp(s loss) of single outputs
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Transform:
    """``rest + excess[k]`` is phi(c + i k dt) exp(-scale), k = 0..M-1, within ``error``.

    Where nearly all outputs lose almost nothing, phi - 1 is small and so is its error: rest is 1
    and scale 0, and the error stays proportional to the excess.
    """

    excess: Complex
    error: Array
    rest: float
    scale: float
    nodes: int

    def log(self) -> tuple[Complex, Array]:
        """(log of the values, the error of that computation)."""
        x, y = self.excess.real, self.excess.imag
        if self.rest == 1.0:
            square = 2.0 * x + (x * x + y * y)
            small = square < -0.75
            square = np.maximum(square, -0.75)
            value = 0.5 * np.log1p(square) + 1j * np.arctan2(y, 1.0 + x)
            size = np.abs(x) + np.abs(y)
            error = 2.0 * _LIB * (size * (1.0 + size) / (1.0 + square) + np.abs(value))
            if small.any():
                # Far from 1 the square's digits cancel, and the sum's own do not.
                plain = np.log(self.values())
                value = np.where(small, plain, value)
                error = np.where(small, _LIB * (6.0 + np.abs(plain.real)), error)
            return value, error
        value = np.log(self.values())
        return value, _LIB * (6.0 + np.abs(value.real))

    def values(self) -> Complex:
        return self.rest + self.excess


@dataclass(frozen=True)
class _Tails:
    """What one output's window leaves out.

    ``small`` bounds the numerator's probability of the side of small losses. On the side of large
    losses, all at least ``level``, the probabilities under numerator and denominator are known:
    (lower, upper) bounds.
    """

    small: float
    large: tuple[float, float]
    large_below: tuple[float, float]
    level: float


_NOTHING: Final = _Tails(0.0, (0.0, 0.0), (0.0, 0.0), math.inf)


class _Part(Protocol):
    count: int

    def cut(self, outside: float, cap: float) -> None:
        """Cuts off noise of probability about ``outside``, and what loses more than ``cap``."""

    def tails(self) -> _Tails:
        """What was cut off."""

    def largest(self) -> float:
        """The largest loss of one output, rounded up; may be infinite."""

    def rough(self, tilts: Array) -> Array:
        """About log phi at the tilts: it steers the choice of parameters, and bounds nothing."""

    def log_mgf(self, tilt: float) -> float:
        """log phi(tilt), rounded up."""

    def log_fall(self, k: float) -> float:
        """log E exp(-k min(loss, level)) under the denominator, rounded up."""

    def decay(self, tilt: float, t: float, scale: float, whole: float) -> float:
        """A lower bound on -log(|phi(tilt + i t')| exp(-scale)) for all t' >= t.

        ``whole`` is phi(tilt) exp(-scale), rounded up.
        """

    def transform(
        self, tilt: float, step: float, count: int, clock: Clock | None = None
    ) -> _Transform:
        """phi at the lattice; raises OutOfTime when the clock is over."""

    def forget(self) -> None:
        """Gives back the memory of what is computed again when it is needed."""


@dataclass(frozen=True)
class _Label:
    """A random mark: noise z is marked with probability Phi((z - at)/width).

    ``sign`` is 1 for the measure of what is marked, -1 for the rest.
    """

    at: float
    width: float
    sign: float

    def log(self, z: Array) -> Array:
        value: Array = log_ndtr(self.sign * (z - self.at) / self.width)
        return value

    def log_slope(self, z: Array) -> Array:
        """d log / dz of what is marked; it falls with z."""
        v = (z - self.at) / self.width
        near = np.maximum(v, -1e3)
        slope = np.exp(-0.5 * near * near - _LOG_SQRT_2PI - log_ndtr(near))
        # Further left it is |v| + 1/|v| but for O(|v|^-3), of a measure that is nothing.
        value: Array = np.where(v < near, -v - 1.0 / np.minimum(v, -1.0), slope) / self.width
        return value


@dataclass(frozen=True)
class _Rule:
    """phi(c + i t) exp(-scale) = rest + excess + sum of weight (exp(i t loss) - 1), within errors.

    The error is ``error + error_per_t |t|``.
    """

    weight: Array
    loss: Array
    excess: float
    rest: float
    scale: float
    error: float
    error_per_t: float


class _Sampled:
    """One output of the sampled Gaussian pair, in one direction.

    With u(z) = 1 - q + q exp(mu z - mu^2/2) and k = 1 + s (remove) or -s (add),
    phi(s) = integral over the window of gauss(z) u(z)^k dz.
    """

    def __init__(self, term: GaussianTerm, direction: Direction) -> None:
        self.q, self.mu, self.count = term.sampling_probability, term.mu, term.count
        self._add = direction == "add"
        self._log_none, self._log_q = math.log1p(-self.q), math.log(self.q)
        self._lo = self._hi = 0.0
        self._edges: Array | None = None
        self._decay_tilt = math.nan
        self._cells: tuple[Array, ...] = ()
        self._tails, self.capped = _NOTHING, False
        self._label: _Label | None = None

    def _k(self, tilt: float) -> float:
        return 0.0 - tilt if self._add else 1.0 + tilt

    def _log_u(self, z: Array) -> tuple[Array, Array]:
        """(log u, log(q w)) at z."""
        x = self.mu * (z - 0.5 * self.mu)
        log_in = self._log_q + x
        log_u = np.maximum(self._log_none, log_in) + np.log1p(
            np.exp(-np.abs(log_in - self._log_none))
        )
        if self.q <= 0.5:
            # q enters here without its logarithm's rounding.
            log_u = np.where(x < 30.0, np.log1p(self.q * np.expm1(np.minimum(x, 30.0))), log_u)
        return log_u, log_in

    def _loss_errors(self, z: Array, log_u: Array, share: Array) -> Array:
        """Bounds on the rounding error of log u.

        d log u / d x = share, and x = mu (z - mu/2) has three roundings. For q <= 1/2 and x < 30
        the argument of log1p is y = q expm1(x) with |y|/u <= 2q + share; else log u is the sum of
        log q or log(1 - q) and a term whose derivatives by both are at most share.
        """
        size = self.mu * (np.abs(z) + self.mu)
        if self.q <= 0.5:
            fine = (
                _LIB * np.abs(log_u) + (2.0 * self.q + share) * 1.5 * _LIB + 4.0 * U * share * size
            )
            far = self.mu * (z - 0.5 * self.mu) >= 30.0
        else:
            fine, far = np.zeros_like(z), np.ones_like(z, dtype=bool)
        coarse = (
            2.0 * _LIB * (np.abs(log_u) - self._log_none + share * (1.0 + abs(self._log_q) + size))
        )
        error: Array = np.where(far, coarse, fine)
        return error

    def cut(self, outside: float, cap: float) -> None:
        left = _upper_quantile(0.5 * outside)
        right = left
        if not self._add:
            included = 0.25 * outside / self.q
            right = _upper_quantile(0.25 * outside)
            right = max(right, self.mu + _upper_quantile(included))
        self._lo, self._hi = _on_grid(-left - 0.01), _on_grid(right + 0.01)
        if not self._add:
            at = self.noise_of(cap)
            self.capped = at < self._hi - 0.5
            self._hi = max(_on_grid(at), self._lo + 1.0) if self.capped else self._hi
        self._edges = None  # of the panels last used: they serve a real tilt as well
        self._decay_tilt = math.nan
        self._tails = self._measure_tails()
        # Nodes for the rough values.
        panels = max(4, min(40, math.ceil((self._hi - self._lo) * (0.25 + 0.1 * self.mu))))
        edges = np.linspace(self._lo, self._hi, panels + 1)
        z = (0.5 * (edges[1:] + edges[:-1])[:, None] + 0.5 * (edges[1] - edges[0]) * _X).ravel()
        log_w = np.tile(np.log(_W * 0.5 * (edges[1] - edges[0])), panels)
        log_u, _ = self._log_u(z)
        self._rough_loss = -log_u if self._add else log_u
        self._rough_base = -0.5 * z * z - _LOG_SQRT_2PI + log_w + (0.0 if self._add else log_u)
        keep = self._rough_base > self._rough_base.max() - 200.0
        self._rough_base, self._rough_loss = self._rough_base[keep], self._rough_loss[keep]
        self._rough_z = z[keep]

    def labelled(self, label: _Label) -> _Sampled:
        """The same output, but only what is marked, or what is not."""
        other = copy.copy(self)
        other._label, other._decay_tilt = label, math.nan
        other._rough_base = self._rough_base + label.log(self._rough_z)
        return other

    def noise_of(self, loss: float) -> float:
        """About the z at which an output loses ``loss`` > 0; beyond it, it loses more (remove)."""
        far = loss > _FAR / 2.0
        x = loss - self._log_q if far else math.log1p(math.expm1(loss) / self.q)
        return x / self.mu + 0.5 * self.mu

    def beyond(self, loss: float) -> tuple[float, float]:
        """About the probabilities of a larger loss, under numerator and denominator (remove)."""
        z = self.noise_of(loss)
        plain = math.exp(float(log_ndtr(-z)))
        return (1.0 - self.q) * plain + self.q * math.exp(float(log_ndtr(self.mu - z))), plain

    def _measure_tails(self) -> _Tails:
        lo, hi, mu, q = self._lo, self._hi, self.mu, self.q
        error = 64.0 * U * (1.0 + max(lo * lo, hi * hi) + mu * mu)

        def left(mean: float) -> float:
            return math.exp(float(log_ndtr(lo - mean)))

        def right(mean: float) -> float:
            return math.exp(float(log_ndtr(mean - hi)))

        def both(value: float) -> tuple[float, float]:
            if value < _LEAST_NORMAL:
                return 0.0, _LEAST_NORMAL * (1.0 + error)
            return value * (1.0 - error), value * (1.0 + error)

        if self._add:
            return replace(_NOTHING, small=(left(0.0) + right(0.0)) * (1.0 + error))
        small = (1.0 - q) * left(0.0) + q * left(mu)
        mixed = (1.0 - q) * right(0.0) + q * right(mu)
        edge = np.array([hi])
        log_u, log_in = self._log_u(edge)
        slack = self._loss_errors(edge, log_u, np.exp(np.minimum(0.0, log_in - log_u)) + 1e-6)
        level = float(log_u[0] - 2.0 * slack[0])
        return _Tails(small * (1.0 + error), both(mixed), both(right(0.0)), level)

    def tails(self) -> _Tails:
        return self._tails

    def largest(self) -> float:
        return -self._log_none * (1.0 + 4.0 * _LIB) if self._add else math.inf

    def rough(self, tilts: Array) -> Array:
        exponent = self._rough_base + np.multiply.outer(tilts, self._rough_loss)
        peak = exponent.max(axis=-1)
        value: Array = peak + np.log(np.exp(exponent - peak[..., None]).sum(axis=-1))
        return value

    # -- quadrature --------------------------------------------------------------------------------

    def _panels(self, tilt: float, t: float, log_phi: float) -> tuple[Array, float]:
        """Edges of panels, and log of the bound on what they miss in all, for |Im s| <= t."""
        k, mu = self._k(tilt), self.mu
        edges = self._edges
        if edges is None or t > 0.0:
            grid = np.linspace(self._lo, self._hi, 65)
            middle = 0.5 * (grid[1:] + grid[:-1])
            log_u, log_in = self._log_u(middle)
            share = np.exp(np.minimum(0.0, log_in + 0.3 * mu - log_u))
            weight = -0.5 * middle * middle + k * log_u - _LOG_SQRT_2PI - log_phi
            # A first guess at the density of panels, from the local rate of the integrand's phase.
            # Far below what may be missed, that phase may turn many times within a panel.
            ease = np.clip(1.0 - weight / 60.0, 1.0, 3.0)
            ease = np.maximum(ease, -0.3 * (weight + 45.0))
            rate = 0.035 * (t + abs(k)) * mu * share / ease + 0.16
            total = np.concatenate([[0.0], np.cumsum(rate * (grid[1] - grid[0]))])
            if not total[-1] * _NODES < MAX_Z_NODES:
                raise OutOfReach("the transform needs too many nodes")
            even = np.linspace(0.0, total[-1], max(2, math.ceil(total[-1])) + 1)
            edges = np.round(np.interp(even, total, grid) * _GRID) / _GRID
            edges[0], edges[-1] = self._lo, self._hi
        while True:
            # Of the integrand, and of the density alone: their difference is what is summed.
            log_error = np.logaddexp(
                self._panel_errors(edges[:-1], edges[1:], k, t),
                self._panel_errors(edges[:-1], edges[1:], self._k(0.0), 0.0),
            )
            bad = log_error > max(log_phi, 0.0) + _QUADRATURE - math.log(len(log_error))
            if not bad.any():
                self._edges = edges
                most = float(log_error.max())
                return edges, most + math.log(float(np.exp(log_error - most).sum())) + 1e-6
            if len(edges) * _NODES > MAX_Z_NODES:
                raise OutOfReach("the transform needs too many nodes")
            middle = np.round(0.5 * (edges[:-1] + edges[1:])[bad] * _GRID) / _GRID
            finer = np.unique(np.concatenate([edges, middle]))
            if len(finer) == len(edges):
                raise OutOfReach("the transform's panels cannot be halved any more")
            edges = finer

    def _panel_errors(self, left: Array, right: Array, k: float, t: float) -> Array:
        """log of the error bound of each panel, the best of the ellipses tried.

        Inside the box around an ellipse, x within [x0, x1] and |y| <= b, with theta = mu b and
        ratio the largest of r/p there, r = q w and p = 1 - q: |u| <= u(x1); |u| >= p (1 - ratio),
        and >= u(x0) cos(theta/2) if theta < pi; |arg u| <= arcsin ratio if ratio < 1, and, as it
        grows with r, and with the angle up to pi/2 or if r >= p, |arg u| <= arg(1 + ratio
        exp(i theta)). u has no zero there if ratio < 1 or theta < pi.
        """
        radius, middle = 0.5 * (right - left), 0.5 * (right + left)
        reach, b = _SEMI_X * radius, _SEMI_Y * radius
        x0, x1 = middle - reach, middle + reach
        nearest = np.maximum(0.0, np.maximum(x0, -x1))
        theta = self.mu * b
        log_top, log_in = self._log_u(x1)
        ratio = np.exp(np.minimum(log_in - self._log_none, 300.0))
        small, narrow = ratio < 0.98, theta < 0.999 * math.pi
        clipped = np.minimum(ratio, 0.98)
        angle = np.minimum(theta, 0.999 * math.pi)
        arg = np.arctan2(ratio * np.sin(angle), 1.0 + ratio * np.cos(angle))
        arg = np.where(small & (theta > 0.5 * math.pi), np.arcsin(clipped), arg)
        arg = np.where((ratio >= 0.98) & (ratio < 1.0), angle, arg)
        if k >= 0.0:
            log_power = k * log_top
        else:
            log_cos = np.log(np.cos(0.5 * angle))
            by_angle = np.where(narrow, self._log_u(x0)[0] + log_cos, -math.inf)
            by_size = np.where(small, self._log_none + np.log1p(-clipped), -math.inf)
            log_power = k * np.maximum(by_angle, by_size)
        value = 0.5 * (b * b - nearest * nearest) - _LOG_SQRT_2PI + log_power + t * arg
        if self._label is not None:
            # |Phi(v + i w)| <= exp(w^2/2) Phi(v), from Phi(-z) = integral of gauss(z + s), s > 0.
            edge = x1 if self._label.sign > 0.0 else x0
            value = value + 0.5 * (b / self._label.width) ** 2 + self._label.log(edge)
        value = value + np.log(radius) + _LOG_ELLIPSE
        best: Array = np.where(small | narrow, value, math.inf).min(axis=0)
        # The exponents' own rounding, far below this wherever the bound is of use.
        return best + 1e-6 + 64.0 * U * abs(k) * float(np.abs(log_top).max())

    def _weights(self, tilt: float, t: float) -> _Rule:
        """The quadrature rule for phi(tilt + i t'), |t'| <= t."""
        mu = self.mu
        log_phi = float(self.rough(np.array([tilt]))[0])
        scale = 0.0 if log_phi < 0.7 else log_phi
        edges, log_missed = self._panels(tilt, t, log_phi)
        middle, radius = 0.5 * (edges[1:] + edges[:-1]), 0.5 * np.diff(edges)
        z = (middle[:, None] + radius[:, None] * _X).ravel()
        log_weight = (np.log(radius)[:, None] + np.log(_W)).ravel()
        log_u, log_in = self._log_u(z)
        plain = (
            (-0.5 * z * z + (log_weight - _LOG_SQRT_2PI)) + (0.0 if self._add else log_u) - scale
        )
        loss = -log_u if self._add else log_u
        if self._label is not None:
            log_label = self._label.log(z)
            plain = plain + log_label
        untilted, weight = np.exp(plain), np.exp(plain + tilt * loss)
        # Rounding. d log u / d log(q w) = share; and a node is off by its own rounding.
        share = np.exp(np.minimum(0.0, log_in - log_u)) * (1.0 + 1e-6)
        loss_error = self._loss_errors(z, log_u, share)
        moved = (4.0 * U + _NODE_ERROR) * (np.abs(z) + np.repeat(radius, _NODES))
        loss_error += moved * mu * share
        weight_error = (
            2.0 * _LIB * (4.0 + 0.5 * z * z + np.abs(log_u) + abs(scale) + np.abs(log_weight))
            + _WEIGHT_ERROR
            + loss_error
            + moved * np.abs(z)
        )
        if self._label is not None:
            steep = self._label.width**-2 * (np.abs(z - self._label.at) + self._label.width)
            weight_error = weight_error + 8.0 * _LIB * (1.0 + np.abs(log_label)) + moved * steep
            weight_error = weight_error + 4.0 * U * steep * np.abs(z)
        loss_error += 2.0 * U * np.abs(log_u)  # of the products with t and the tilt
        keep = (weight > 1e-26) | (untilted > 1e-26)
        dropped = 1.01 * float(weight[~keep].sum() + untilted[~keep].sum())
        weight, untilted, loss = weight[keep], untilted[keep], loss[keep]
        weight_error, loss_error = weight_error[keep], loss_error[keep]
        gain = tilt * loss
        weight_error = weight_error + 4.0 * U * np.abs(gain)
        tilted = np.where(gain < 1.0, untilted * np.expm1(np.minimum(gain, 1.0)), weight - untilted)
        swing = np.minimum(2.0, t * np.abs(loss))  # bounds |exp(i t loss) - 1|
        whirl = np.where(gain < 1.0, np.abs(tilted), weight + untilted) + weight * swing
        at_zero = 1.01 * float((whirl * (weight_error + 24.0 * _LIB)).sum()) + dropped
        at_zero += 1.01 * float((weight * abs(tilt) * loss_error).sum())
        at_zero += 1.01 * math.exp(log_missed - scale)
        # The error of the products' sums, see transform.
        chunks = -(-len(loss) // _CHUNK)
        at_zero += 1.01 * 6.0 * (2 * _CHUNK + chunks + 8) * U * float((weight * swing).sum())
        tails = self._tails
        missing = 0.5 * tails.small + 0.5 * (tails.large[0] + tails.large[1])
        at_zero += 0.5 * tails.small + (tails.large[1] - tails.large[0])
        if self._label is not None:
            at_zero += 1.01 * float((weight * (weight_error + 2.0 * _LIB)).sum())
            total = math.fsum(weight)
            spin = 1.01 * float((weight * loss_error).sum())
            return _Rule(weight, loss, total, 0.0, scale, at_zero, spin)
        rest = math.exp(-scale) * (1.0 - missing)
        at_zero += 2.0 * _LIB * rest if scale else 0.0
        return _Rule(
            weight,
            loss,
            math.fsum(tilted) - (0.0 if scale else missing),
            rest if scale else 1.0,
            scale,
            at_zero,
            1.01 * float((weight * loss_error).sum()),
        )

    def log_mgf(self, tilt: float) -> float:
        rule = self._weights(tilt, 0.0)
        value = (rule.rest - 1.0) + rule.excess + rule.error
        if self._label is not None:
            log_value = math.log(rule.excess + rule.error)
            return rule.scale + log_value + 4.0 * _LIB * (2.0 + rule.scale + abs(log_value))
        return rule.scale + math.log1p(value) + 2.0 * _LIB * (abs(value) + rule.scale)

    def log_fall(self, k: float) -> float:
        # Beyond the window: on the right exp(-k level) < 1, on the left u > 1 - q.
        tails = self._tails
        left = float(log_ndtr(self._lo)) - k * self._log_none
        right = math.log(max(tails.large_below[1], 1e-300))
        value = self.log_mgf(-1.0 - k)
        total = float(np.logaddexp(value, np.logaddexp(left, right)))
        size = 1.0 + self._lo * self._lo + k * abs(self._log_none) + abs(right)
        return total + 32.0 * _LIB * size

    def forget(self) -> None:
        self._decay_tilt, self._cells, self._edges = math.nan, (), None

    def transform(
        self, tilt: float, step: float, count: int, clock: Clock | None = None
    ) -> _Transform:
        rule = self._weights(tilt, step * count)
        # With a B + b = k:  e^(i k x) - 1 = v_a v_b + v_a + v_b,  v_a = e^(i a B x) - 1 and
        # v_b = e^(i b x) - 1, so that 2 sqrt(count) columns and one matrix product do.
        inner = math.ceil(math.sqrt(2.0 * count))
        outer = -(-count // inner)
        total = np.zeros((2 * outer, inner))
        for i in range(0, len(rule.loss), _CHUNK):
            if clock is not None and clock.is_over():
                raise OutOfTime
            w, x = rule.weight[i : i + _CHUNK], rule.loss[i : i + _CHUNK]
            cos, sin = _turns(step * inner * x, outer, count)
            cos, sin = cos * w, sin * w
            left = np.block([[cos, -sin], [sin, cos]])
            fast_cos, fast_sin = _turns(step * x, inner, count)
            total += left @ np.concatenate([fast_cos, fast_sin], axis=1).T
            total[:outer] += cos.sum(axis=1)[:, None] + (fast_cos @ w)[None, :]
            total[outer:] += sin.sum(axis=1)[:, None] + (fast_sin @ w)[None, :]
        sums = total[:outer] + 1j * total[outer:]
        excess: Complex = np.asarray(sums.reshape(-1)[:count] + rule.excess, dtype=np.complex128)
        error = np.asarray(rule.error + rule.error_per_t * step * np.arange(count))
        if count > _FEW_TURNS:
            error += 128.0 * _LIB * 2.02 * float(rule.weight.sum())
        return _Transform(excess, error, rule.rest, rule.scale, len(rule.loss))

    # -- decay -------------------------------------------------------------------------------------

    def _prepare_decay(self, tilt: float) -> None:
        if self._decay_tilt == tilt:
            return
        self._decay_tilt = tilt
        k, mu = self._k(tilt), self.mu
        n = int(min(400, max(100, (self._hi - self._lo) * max(8.0, 4.0 * mu))))
        edges = np.linspace(self._lo, self._hi, n + 1)
        h = float(edges[1] - edges[0])
        x = 0.5 * (edges[1:] + edges[:-1])
        log_u, log_in = self._log_u(x)
        ratio = np.exp(np.clip(log_in - self._log_none, -_FAR, _FAR / 2.5))  # r/p
        most = min(0.98 * math.pi / mu, 4.0)
        y = (most * np.array([0.03, 0.06, 0.12, 0.2, 0.3, 0.45, 0.65, 0.85, 1.0]))[:, None]
        theta = mu * y
        cos, sin = np.cos(theta), np.sin(theta)
        mod2 = (1.0 + ratio * cos) ** 2 + (ratio * sin) ** 2  # |u/p|^2
        bulge = 4.0 * ratio / (1.0 + ratio) ** 2
        log_modulus = log_u + 0.5 * np.log1p(-bulge * np.sin(0.5 * theta) ** 2)
        widen = math.exp(0.5 * mu * h) if mu * h < _FAR else math.inf
        v = np.minimum(1.0, bulge * widen)
        curve = 0.25 * v / (1.0 - v * np.sin(0.5 * theta) ** 2)  # sup of |s (1 - s)| in the cell
        plain = -0.5 * x * x + k * log_u - _LOG_SQRT_2PI
        self._cells = (
            plain,
            # log |f| at t = 0, arg u, the two parts of d log|f|/dx, and the curvature's bound
            0.5 * (y * y - x * x) + k * log_modulus - _LOG_SQRT_2PI,
            np.arctan2(ratio * sin, 1.0 + ratio * cos),
            -x + mu * k * (ratio * cos + ratio * ratio) / mod2,
            mu * ratio * sin / mod2,
            mu * mu * curve,
        )
        if self._label is not None:
            # Phi is log-concave, so the tangent bounds it in the cell.
            base, _, _, tilt_x, *_ = self._cells
            shifted = self._cells[1] + 0.5 * (y / self._label.width) ** 2 + self._label.log(x)
            steeper = tilt_x + self._label.log_slope(x)
            self._cells = (base, shifted, self._cells[2], steeper, *self._cells[4:])
        below = h * np.exp(-(1.0 + max(0.0, -k) * mu * mu * 0.25 * v) * h * h / 24.0)
        self._cell_h, self._cell_low = h, below
        self._cell_slack = 1e-12 * abs(k) + (
            64.0 * U * (1.0 + float(np.abs(plain).max()) + abs(k) * float(np.abs(log_u).max()))
        )
        self._prepare_uprights(edges, k, y)

    def _prepare_uprights(self, edges: Array, k: float, y: Array) -> None:
        """Verticals from the real line to height y, at every fourth edge and at the right end.

        arg u(x + i v) rises and then falls in v, so in each of four pieces it is at least the
        smaller of its ends; |u| <= u(x) for k > 0, and >= u(x) cos(mu y/2) for k < 0.
        """
        self._splits = np.arange(0, len(edges) - 1, 4)
        x = np.concatenate([edges[self._splits], edges[-1:]])
        log_u, log_in = self._log_u(x)
        ratio = np.exp(np.clip(log_in - self._log_none, -_FAR, _FAR / 2.5))
        heights = y * np.arange(5)[:, None, None] / 4.0
        theta = self.mu * heights
        arg = np.arctan2(ratio * np.sin(theta), 1.0 + ratio * np.cos(theta))
        log_f = -0.5 * x * x + k * log_u - _LOG_SQRT_2PI
        if k < 0.0:
            log_f = log_f + k * np.log(np.cos(0.5 * self.mu * y))
        self._upright_log = log_f + 0.5 * heights[1:] ** 2 + np.log(0.25 * y)
        if self._label is not None:
            lift = 0.5 * (heights[1:] / self._label.width) ** 2 + self._label.log(x)
            self._upright_log = self._upright_log + lift
        self._upright_arg = np.minimum(arg[1:], arg[:-1])

    def decay(self, tilt: float, t: float, scale: float, whole: float) -> float:
        """See _Part. |phi(tilt + i t')| is bounded by moving the path of integration.

        Right of x0 the path runs at height y (remove; -y for add), where |u^(i t)| falls as
        exp(-t arg u), 0 <= arg u < pi, for every larger t as well; left of x0 it stays on the real
        line. In a cell of width h around x, log |f| lies below its tangent at x plus a bound on
        its curvature. Every choice of y and x0 is valid; the best of a few is taken.
        """
        self._prepare_decay(tilt)
        k = self._k(tilt)
        plain, log_f, arg, slope, slope_t, curve = self._cells
        h = self._cell_h
        bend = np.maximum(0.0, math.hypot(k, t) * curve - 1.0)
        tangent = 0.5 * h * np.abs(slope - t * slope_t)
        # log of sinh(g)/g, from above
        log_sinhc = np.minimum(tangent, tangent * tangent / 6.0)
        exponent = log_f - t * arg + log_sinhc + 0.125 * h * h * bend - scale
        moved = h * _exp(exponent)
        stays = self._cell_low * np.exp(np.minimum(plain - scale, 300.0))
        # Sums from each cell to the right end.
        moved_right = np.cumsum(moved[:, ::-1], axis=1)[:, ::-1]
        stays_right = np.cumsum(stays[::-1])[::-1]
        exponent = self._upright_log - t * self._upright_arg - scale
        upright = _exp(exponent).sum(axis=0)
        by_split = whole + (moved_right - stays_right)[:, self._splits]
        by_split = by_split + upright[:, :-1] + upright[:, -1:]
        by_shift = moved_right[:, 0] + upright[:, 0] + upright[:, -1]
        least = float(by_shift.min())
        if self._label is None:
            least = min(float(by_split.min()), least)
        # The rounding of the exponents, and of the sums and of what they were taken from.
        slack = self._cell_slack + 64.0 * U * math.pi * t + 256.0 * U
        if self._label is not None:
            slack += 1e-10  # of its slope
        taken = whole if self._label is None else 0.0
        least = min(least + slack * (2.0 * taken + least), whole)
        return -math.log(least) if least > 0.0 else -math.log(whole)


def _turns(x: Array, count: int, nodes: int) -> tuple[Array, Array]:
    """Real and imaginary part of exp(i k x) - 1, k = 0..count-1, one row a k.

    Where there are many ``nodes``, most are made as products (within 16 units of _LIB of what
    directly is 3), which the caller allows for.
    """

    def direct(multiples: Array) -> tuple[Array, Array]:
        phase = np.multiply.outer(multiples, x)
        return -2.0 * np.sin(0.5 * phase) ** 2, np.sin(phase)

    if nodes <= _FEW_TURNS:
        return direct(np.arange(float(count)))
    inner = math.ceil(math.sqrt(count))
    outer = -(-count // inner)
    a, b = (part[:, None, :] for part in direct(inner * np.arange(float(outer))))
    c, d = (part[None, :, :] for part in direct(np.arange(float(inner))))
    real, imaginary = a * c - b * d + a + c, a * d + b * c + b + d
    return real.reshape(-1, len(x))[:count], imaginary.reshape(-1, len(x))[:count]


def _upper_quantile(probability: float) -> float:
    """About the z with P(N(0,1) > z) = probability."""
    if probability >= 0.5:
        return 0.0
    return -float(ndtri(max(probability, 1e-300)))


class _Symmetric(_Part):
    """Bounded losses in closed form: nothing is cut off, and both directions are alike."""

    def cut(self, outside: float, cap: float) -> None:
        del outside, cap

    def tails(self) -> _Tails:
        return _NOTHING

    def forget(self) -> None:
        pass

    def log_top(self) -> float:
        """About the log-probability of the largest loss."""
        raise NotImplementedError

    def log_fall(self, k: float) -> float:
        # Numerator and denominator are each other's mirror images.
        return self.log_mgf(k)

    def decay(self, tilt: float, t: float, scale: float, whole: float) -> float:
        del tilt, t, scale
        return -math.log(whole)


class _TwoPoint(_Symmetric):
    """Randomised response: losses +eps0 and -eps0; it dominates every (eps0, 0)-DP mechanism."""

    def __init__(self, term: ApproximateDPTerm) -> None:
        self.epsilon, self.count = float(term.epsilon), term.count

    def largest(self) -> float:
        return self.epsilon * (1.0 + 4.0 * U)

    def log_top(self) -> float:
        return -math.log1p(math.exp(-self.epsilon))

    def rough(self, tilts: Array) -> Array:
        e = self.epsilon
        value: Array = (
            tilts * e + np.log1p(np.exp(-(2.0 * tilts + 1.0) * e)) - math.log1p(math.exp(-e))
        )
        return value

    def log_mgf(self, tilt: float) -> float:
        value = float(self.rough(np.array([tilt]))[0])
        return value + 8.0 * _LIB * (1.0 + tilt * self.epsilon)

    def transform(
        self, tilt: float, step: float, count: int, clock: Clock | None = None
    ) -> _Transform:
        del clock
        e = self.epsilon
        t = step * np.arange(count)
        up = 1.0 / (1.0 + math.exp(-e))
        down = math.exp(-(1.0 + 2.0 * tilt) * e) * up
        values = np.exp(1j * t * e) * up + np.exp(-1j * t * e) * down
        error = 4.0 * _LIB * (2.0 + (tilt + t) * e)
        return _Transform(values, np.asarray(error), 0.0, tilt * e, 2)


class _Laplace(_Symmetric):
    """Lap(0, 1/rate) against the same moved by 1; both directions are alike.

    The loss is rate with probability 1/2, -rate with probability exp(-rate)/2, and in between
    rate (1 - 2z) with density (rate/2) exp(-rate z), z in (0, 1).
    """

    def __init__(self, term: LaplaceTerm) -> None:
        self.rate, self.count = term.inverse_scale, term.count

    def largest(self) -> float:
        return self.rate

    def log_top(self) -> float:
        return -math.log(2.0)

    def rough(self, tilts: Array) -> Array:
        x = self.rate * (1.0 + 2.0 * tilts)
        inside = 0.5 + 0.5 * np.exp(-x) - 0.5 * self.rate * np.expm1(-x) / x
        value: Array = tilts * self.rate + np.log(inside)
        return value

    def log_mgf(self, tilt: float) -> float:
        value = float(self.rough(np.array([tilt]))[0])
        return value + 16.0 * _LIB * (1.0 + tilt * self.rate)

    def transform(
        self, tilt: float, step: float, count: int, clock: Clock | None = None
    ) -> _Transform:
        del clock
        t = step * np.arange(count)
        x = self.rate * (1.0 + 2.0 * tilt) + 2j * self.rate * t
        inside = 0.5 + 0.5 * np.exp(-x) - 0.5 * self.rate * np.expm1(-x) / x
        error = 16.0 * _LIB * (2.0 + (1.0 + tilt + t) * self.rate)
        values = np.exp(1j * t * self.rate) * inside
        return _Transform(values, np.asarray(error), 0.0, tilt * self.rate, 2)


# --------------------------------------------------------------------------------------------------
# One direction of a composition
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """Parameters of a contour. Any values are valid; these decide how tight and how fast it is."""

    tilt: float
    second_tilt: float
    period: float
    smoothing: float
    reach: float
    lost: float
    marked: bool = False


_Marks = tuple[float, list[_Label | None], list[_Sampled | None]]


class Composition:
    """One direction of a composition of terms, without the terms' own deltas."""

    def __init__(
        self, terms: Sequence[Term], direction: Direction, clock: Clock | None = None
    ) -> None:
        self.parts: list[_Part] = []
        variances = []
        for term in terms:
            if isinstance(term, GaussianTerm):
                if term.sampling_probability == 1.0:
                    variances.append(term.count * term.mu * term.mu)
                else:
                    self.parts.append(_Sampled(term, direction))
            elif isinstance(term, LaplaceTerm):
                self.parts.append(_Laplace(term))
            else:
                self.parts.append(_TwoPoint(term))
        # The unsampled Gaussians are one, of variance sum mu_i^2; each use counts its rounding.
        self.variance = math.fsum(variances)
        self.heavy = direction == "remove"  # whether single outputs may lose much
        self.largest = math.inf
        if not variances:
            self.largest = math.fsum(p.count * p.largest() for p in self.parts) * (1.0 + 4.0 * U)
        self._terms = tuple(terms)
        self.clock = Clock() if clock is None else clock
        self.fall_tilt = 0.0
        self.marks: list[_Sampled | None] = []
        self._window = (0.0, math.inf)
        self._tilts = _TILTS if len(self.parts) <= _MANY else _TILTS[::2]

    def cut(self, outside: float, cap: float = math.inf) -> None:
        """Sets all windows: at most about ``outside`` is cut off, and what loses more than cap."""
        if len(self.parts) > _MANY:
            # A cut serves for long, being a good deal finer than it was asked to be.
            if cap == self._window[1] and 1e-9 * outside < self._window[0] < outside:
                return
            outside = max(outside * 1e-5, 1e-305)
        same = cap == self._window[1] or abs(cap / self._window[1] - 1.0) < 1e-3
        if same and 0.5 < self._window[0] / max(outside, 1e-300) < 2.0:
            return
        self._window = (0.0, math.nan)  # of no cut, until this one is done
        for part in self.parts:
            self.check_time()
            part.cut(outside / (part.count * len(self.parts)), cap)
        self._window = (outside, cap)
        self._rough = [part.rough(self._tilts) for part in self.parts]
        self._log_mgf = 0.5 * self.variance * (self._tilts * self._tilts + self._tilts)
        for part, rough in zip(self.parts, self._rough, strict=True):
            self._log_mgf = self._log_mgf + part.count * rough
        # Large losses are set apart of capped parts; of the others they are so rare that they count
        # with the rest of what is outside.
        tails = []
        for part in self.parts:
            t = part.tails()
            if not (isinstance(part, _Sampled) and part.capped):
                t = replace(_NOTHING, small=t.small + t.large[1])
            tails.append((part.count, t))
        self.outside = math.fsum(n * t.small for n, t in tails) * (1.0 + 8.0 * U)
        self.capped = any(isinstance(part, _Sampled) and part.capped for part in self.parts)
        self.level = min((t.level for _, t in tails), default=math.inf)
        self.large = self._any_large([(n, t.large) for n, t in tails])
        self.large_below = self._any_large([(n, t.large_below) for n, t in tails])
        self.large_below_sum = math.fsum(n * t.large_below[1] for n, t in tails) * (1.0 + 8.0 * U)

    @staticmethod
    def _any_large(tails: list[tuple[int, tuple[float, float]]]) -> tuple[float, float]:
        """Bounds on 1 - prod (1 - tail)^count."""
        least = math.fsum(n * math.log1p(-min(t[0], 0.999)) for n, t in tails)
        low = max(0.0, -math.expm1(least) * (1.0 - 4.0 * _LIB))
        if any(t[1] > 0.999 for _, t in tails):
            return low, 1.0
        most = math.fsum(n * math.log1p(-t[1]) for n, t in tails)
        return low, min(1.0, -math.expm1(most) * (1.0 + 4.0 * _LIB))

    def check_time(self) -> None:
        """Raises OutOfTime if the time is over."""
        if self.clock.is_over():
            raise OutOfTime

    def large_at(self, epsilon: float) -> float:
        """About the share of delta that outputs with a loss beyond the windows bring."""
        if not self.large[1] > 0.0:
            return 0.0
        return max(0.0, self.large[0] - math.exp(min(epsilon, _FAR)) * self.large_below[1])

    def single(self, delta: float) -> tuple[float, float]:
        """About the epsilon at which single outputs alone make up delta, and the slope there.

        Single outputs on top of the bounded losses' largest sum, if these alone make up delta.
        """
        low, high, top = 1e-12, 100.0, 0.0
        if self.single_delta(low)[0] <= delta:
            return 0.0, 1.0
        bounded = [p for p in self.parts if isinstance(p, _Symmetric)]
        share = delta * math.exp(min(-math.fsum(p.count * p.log_top() for p in bounded), _FAR))
        if bounded and self.single_delta(low)[0] > share:
            top, delta = math.fsum(p.count * p.largest() for p in bounded), share
        for _ in range(40):
            middle = math.sqrt(low * high)
            if self.single_delta(middle)[0] > delta:
                low = middle
            else:
                high = middle
        return top + low, self.single_delta(low)[1]

    def single_delta(self, epsilon: float) -> tuple[float, float]:
        """About the delta at epsilon that single outputs alone make up, and -d log delta there."""
        above, below = 0.0, 0.0
        for part in self.parts:
            if isinstance(part, _Sampled):
                a, b = part.beyond(epsilon)
                above, below = above + part.count * a, below + part.count * b
        below *= math.exp(min(epsilon, _FAR))
        value = above - below
        return value, below / value if value > 0.0 and below > 0.0 else 1.0

    def mark(self, epsilon: float, log_share: float, sharpness: float) -> bool:
        """Marks large losses so that without one epsilon is hardly reached; False if it can't.

        Args:
            log_share: log of what they may bring to delta.
            sharpness: how fast the probability of a mark rises, in units of mu.
        """
        levels = epsilon * 0.7 ** np.arange(1.0, 16.0)
        # Where the bounded losses together stop short of epsilon, the others make up the gap.
        gap = epsilon - math.fsum(
            p.count * p.largest() for p in self.parts if not isinstance(p, _Sampled)
        )
        if 0.0 < gap < levels[-1]:
            levels = np.append(levels, gap * 0.7 ** np.arange(0.0, 8.0))
        for level in levels:
            self.check_time()
            labels: list[_Label | None] = []
            log_mgf = 0.5 * self.variance * (self._tilts * self._tilts + self._tilts)
            for part in self.parts:
                if isinstance(part, _Sampled):
                    width = min(1.0, 1.0 / (sharpness * part.mu))
                    label = _Label(part.noise_of(float(level)), width, -1.0)
                    labels.append(label)
                    log_mgf = log_mgf + part.count * part.labelled(label).rough(self._tilts)
                else:
                    labels.append(None)
                    log_mgf = log_mgf + part.count * part.rough(self._tilts)
            bound = log_mgf + _kappa(self._tilts) - self._tilts * epsilon
            bound = np.where(np.isfinite(bound), bound, np.inf)
            i = int(np.argmin(bound))
            if bound[i] <= log_share:
                self._unmarked_tilt, self._labels = float(self._tilts[i]), labels
                self.marks = [
                    part.labelled(replace(label, sign=1.0))
                    if label is not None and isinstance(part, _Sampled)
                    else None
                    for part, label in zip(self.parts, labels, strict=True)
                ]
                return True
        return False

    def marks_kept(self) -> _Marks:
        """The marks now set, for :meth:`use_marks`."""
        return self._unmarked_tilt, self._labels, self.marks

    def use_marks(self, kept: _Marks) -> None:
        """Sets marks of before; the windows must be the same."""
        self._unmarked_tilt, self._labels, self.marks = kept

    def log_unmarked(self) -> tuple[float, float]:
        """(k, log E exp(k S) over outcomes without a mark, rounded up), k a tilt good for it."""
        k = self._unmarked_tilt
        parts = [0.5 * self.variance * (k * k + k) * (1.0 + 16.0 * U)]
        for part, label in zip(self.parts, self._labels, strict=True):
            if label is not None and isinstance(part, _Sampled):
                parts.append(part.count * part.labelled(label).log_mgf(k))
            else:
                parts.append(part.count * part.log_mgf(k))
        return k, math.fsum(parts) + 4.0 * U * math.fsum(map(abs, parts))

    def marked_reach(self, tilt: float, nats: float, start: float) -> float:
        """The t beyond which the transform of what is marked has lost ``nats``; inf if none is."""
        i = int(np.argmin(np.abs(self._tilts - tilt)))

        def lost(t: float) -> float:
            total = 0.0
            for part, mark, rough in zip(self.parts, self.marks, self._rough, strict=True):
                if mark is not None:
                    scale = float(rough[i])
                    total += part.count * math.exp(-mark.decay(tilt, t, scale, 1.0))
            return 0.5 * self.variance * t * t - math.log(max(total, 1e-300))

        low, high = start / 4096.0, start
        if lost(high) < nats:
            return math.inf
        for _ in range(10):
            self.check_time()
            t = math.sqrt(low * high)
            if lost(t) >= nats:
                high = t
            else:
                low = t
            if high < 1.12 * low:
                break
        return high

    def split_cap(self, epsilon: float, log_share: float) -> float:
        """A loss that, once met, carries the sum beyond epsilon but with a small probability.

        Args:
            log_share: log of the probability that is spared for the rest falling below.
        """
        with np.errstate(all="ignore"):
            # Under the denominator, E exp(-k loss) = phi(-1 - k).
            log_mgf = 0.5 * self.variance * (self._tilts * self._tilts + self._tilts)
            for part in self.parts:
                log_mgf = log_mgf + part.count * part.rough(-1.0 - self._tilts)
            gap = (log_mgf - log_share) / self._tilts
        gap = np.where(np.isfinite(gap), gap, np.inf)
        i = int(np.argmin(gap))
        self.fall_tilt = float(self._tilts[i])
        return epsilon + max(float(gap[i]), 1e-300)

    def log_fall(self) -> float:
        """log E exp(-k S) under the denominator at k = ``fall_tilt``, rounded up."""
        k = self.fall_tilt
        parts = [p.count * p.log_fall(k) for p in self.parts]
        parts.append(0.5 * self.variance * (k * k + k) * (1.0 + 16.0 * U))
        return math.fsum(parts) + 4.0 * U * math.fsum(map(abs, parts))

    def chernoff_epsilon(self, log_delta: float) -> tuple[float, float]:
        """(about the Chernoff bound on epsilon, the tilt that gives it)."""
        with np.errstate(all="ignore"):
            bound = (self._log_mgf + _kappa(self._tilts) - log_delta) / self._tilts
        i = int(np.nanargmin(np.where(np.isfinite(bound), bound, np.inf)))
        return float(bound[i]), float(self._tilts[i])

    def log_mgf_above(self, tilt: float) -> float:
        """An upper bound on log Psi(tilt); of many parts the quicker one, without the windows."""
        if len(self.parts) > _MANY and tilt <= cumulants.MAX_ORDER - 1.0:
            remove, add = cumulants.directed_costs(self._terms, 1.0 + tilt)
            value = (remove if self.heavy else add) * tilt * (1.0 + 4.0 * U)
            # Without the windows a few huge losses may make it useless.
            if value <= float(self._log_mgf[int(np.argmin(np.abs(self._tilts - tilt)))]) + 0.5:
                return value
        return self.log_mgf(tilt)

    def log_mgf(self, tilt: float) -> float:
        """log Psi(tilt) over the windows, rounded up."""
        parts = [p.count * p.log_mgf(tilt) for p in self.parts]
        parts.append(0.5 * self.variance * (tilt * tilt + tilt) * (1.0 + 16.0 * U))
        return math.fsum(parts) + 4.0 * U * math.fsum(map(abs, parts))

    def chernoff_log_delta(self, epsilon: float) -> tuple[float, float]:
        """(about the Chernoff bound on log delta, about -d log delta / d epsilon)."""
        with np.errstate(all="ignore"):
            bound = self._log_mgf + _kappa(self._tilts) - self._tilts * epsilon
        i = int(np.nanargmin(np.where(np.isfinite(bound), bound, np.inf)))
        # Near epsilon = 0 the bound's tilt says nothing; the loss's own scale does.
        scale = int(np.argmax(self._log_mgf > 0.5))
        return float(bound[i]), max(float(self._tilts[i]), 0.5 * float(self._tilts[scale]))

    def plan(
        self,
        epsilon: float,
        log_delta: float,
        accuracy: float,
        smoothing: float,
        most_lost: float,
        spare: float = 0.0,
    ) -> _Plan:
        """Parameters for a bound near (epsilon, delta) with relative accuracy in delta.

        Args:
            accuracy: the wanted relative width of delta's bracket.
            smoothing: the smoothing Gaussian's width, where the transform does not decay.
            most_lost: how many nats of Psi(c) exp(-c epsilon) may cancel.
            spare: nats to spare in what is cut off, for the sake of other epsilons.
        """
        nats = max(4.0, -math.log(0.02 * accuracy)) + spare
        tight = nats + 6.0
        tilts, second = self._tilts[:, None], self._tilts[None, :]
        with np.errstate(all="ignore"):
            lost = np.maximum(self._log_mgf - self._tilts * epsilon - log_delta, 0.0)
            left = (nats - log_delta) / tilts
            # The smoothing Gaussian's loss is part of the upper sum.
            spread = 0.5 * smoothing * smoothing * (second * second + second)
            right = _kappa(second) + self._log_mgf[None, :] + spread
            right = right - second * epsilon - log_delta + nats
            right = right / (second - tilts)
            if epsilon < self.largest < math.inf:
                # Nothing of S lies beyond, and little of S and the smoothing Gaussian.
                beyond = (self.largest - epsilon) * (1.0 + 1e-9)
                right = np.minimum(right, beyond + smoothing * (8.0 + smoothing * tilts))
            period = np.where(second > tilts, np.maximum(left, right), np.inf)
            cost = period * (np.sqrt(nats + lost) * (1.0 + 0.02 * lost))[:, None]
            over = np.maximum(lost - max(most_lost, float(np.nanmin(lost))), 0.0)
            cost = cost * np.exp(np.minimum(0.7 * over, 300.0))[:, None]
            cost = np.where(np.isfinite(cost), cost, np.inf)
        i, j = divmod(int(np.argmin(cost)), len(self._tilts))
        if not math.isfinite(cost[i, j]):
            raise OutOfReach("no contour was found")
        tilt = float(self._tilts[i])
        scales = tuple(float(rough[i]) for rough in self._rough)
        stretch = 1.0
        reach, plain = self._reach(
            tilt, scales, nats + float(lost[i]) + 1.0, tight - nats, smoothing
        )
        if plain:
            smoothing, stretch = 0.0, 1.0 + (tight - nats) / (nats - log_delta)
        return _Plan(
            tilt,
            float(self._tilts[j]),
            float(period[i, j]) * stretch,
            smoothing,
            reach,
            float(lost[i]),
        )

    def _reach(
        self, tilt: float, scales: tuple[float, ...], nats: float, more: float, smoothing: float
    ) -> tuple[float, bool]:
        """(the last t, whether the transform decays by itself): where Psi has lost ``nats``."""
        smooth = math.sqrt(2.0 * nats / (self.variance + smoothing * smoothing))
        if not self.parts:
            return smooth, self.variance > smoothing * smoothing
        # Of many parts a few stand for all; what they all do enters the bounds in any case.
        every = max(1, len(self.parts) // _MANY)
        chosen = sorted(zip(self.parts, scales, strict=True), key=lambda pair: pair[0].count)[
            ::every
        ]
        times = len(self.parts) / len(chosen)

        def decayed(t: float) -> float:
            total = 0.5 * self.variance * t * t
            self.check_time()
            for part, scale in chosen:
                total += times * part.count * part.decay(tilt, t, scale, 1.0)
            return total

        plain = decayed(smooth) >= nats + more
        need = nats + more if plain else nats
        narrow = 0.0 if plain else 0.5 * smoothing * smoothing
        low, high = smooth / 4096.0, smooth
        for _ in range(9):
            t = math.sqrt(low * high)
            if decayed(t) + narrow * t * t >= need:
                high = t
            else:
                low = t
            if high < 1.12 * low:
                break
        return high, plain


class Contour:
    """The sums of one plan: bounds on delta at any epsilon, best near the plan's own."""

    def __init__(self, whole: Composition, plan: _Plan) -> None:
        c = self._c = plan.tilt
        variance, tau2 = whole.variance, plan.smoothing**2
        step = _dyadic(2.0 * math.pi / plan.period)
        if not plan.reach < MAX_T_NODES * step:
            raise OutOfReach("the sum needs too many nodes")
        count = max(24, math.ceil(plan.reach / step) + 1)
        self.period = 2.0 * math.pi / step * (1.0 - 8.0 * U)
        self.t = t = step * np.arange(count)
        self.s = s = c + 1j * t
        log_psi = np.zeros(count, dtype=np.complex128)
        above, below, rounded = np.zeros(count), np.zeros(count), np.zeros(count)
        log_size = np.zeros(count)
        base, size, work, log_decay = [], 0.0, 0, 0.0
        marks = whole.marks if plan.marked else [None] * len(whole.parts)
        gained = 0.0  # what the parts' decay has brought, apart from their value at t = 0
        log_rest, marked_decay = np.zeros(count, dtype=np.complex128), 0.0
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            for part, mark in zip(whole.parts, marks, strict=True):
                whole.check_time()
                found = part.transform(c, step, count, whole.clock)
                work += count * found.nodes
                if work > MAX_WORK:
                    raise OutOfReach("the transform needs too much work")
                base.append(part.count * found.scale)
                size += abs(part.count * found.scale)
                if mark is not None:
                    some = mark.transform(c, step, count, whole.clock)
                    part_of = math.exp(some.scale - found.scale)
                    values = some.values() * part_of
                    work += count * some.nodes
                    slip = some.error * part_of + 8.0 * _LIB * np.abs(values)
                    found = replace(found, error=found.error + 2.0 * slip)
                    log_rest += part.count * _log1p(-values / found.values())
                    bulk = float(found.values()[0].real)
                    above_bulk = (bulk + float(found.error[0])) * (1.0 + 4.0 * U)
                    at_end = mark.decay(c, float(t[-1]), found.scale, above_bulk)
                    below_bulk = (bulk - float(found.error[0])) * (1.0 - 4.0 * U)
                    if not below_bulk > 0.0:
                        raise OutOfReach("rounding hides the transform")
                    marked_decay += part.count * math.exp(-at_end) / below_bulk
                    modulus = np.abs(values) + np.abs(found.values() - values)
                else:
                    modulus = np.abs(found.values())
                modulus = modulus * (1.0 + 8.0 * U)
                log_value, log_error = found.log()
                log_psi += part.count * log_value
                most_log = np.log(modulus + found.error)
                above += part.count * (most_log + _LIB * np.abs(most_log) + 4.0 * U)
                below += part.count * np.log1p(found.error / modulus) * (1.0 + 4.0 * _LIB)
                rounded += part.count * log_error
                log_size += part.count * np.abs(log_value)
                whole_value = float(found.values()[0].real + found.error[0]) * (1.0 + 4.0 * U)
                if gained < _ENOUGH and mark is None and not plan.marked:
                    at_end = part.decay(c, float(t[-1]), found.scale, whole_value)
                else:
                    at_end = -math.log(whole_value)
                log_decay += part.count * at_end
                gained += part.count * (at_end + math.log(whole_value))
                if len(whole.parts) > _MANY:
                    part.forget()
        gauss = 0.5 * variance * (s * s + s)
        gauss_error = (8.0 * U + 4.0 * _LIB) * np.abs(0.5 * variance * (s * s + s))
        base.append(float(gauss[0].real))
        size += float(gauss[0].real)
        gauss = gauss - gauss[0].real
        rounded += (len(whole.parts) + 8) * U * log_size
        start = float(log_psi[0].real)
        base.append(start)
        size += abs(start)
        if not math.isfinite(start):
            raise OutOfReach("rounding hides the transform")
        with np.errstate(all="ignore"):
            log_psi, above = log_psi - start, above - start
            psi = np.exp(log_psi + gauss)
            # |product of rounded factors - product| <= product(|.| + e) - product |.|
            most = np.exp(np.minimum(above + gauss.real, _FAR / 2.0) + 1e-9)
            error = most * -np.expm1(-below) + np.abs(psi) * (
                np.expm1(np.minimum(rounded, 50.0)) + gauss_error + 8.0 * _LIB + 8.0 * U * len(base)
            )
            if plan.marked:
                # Of all outcomes, those with a mark: Psi - Psi_unmarked. As a polynomial in what is
                # and is not marked it has coefficients >= 0, so the error above holds with the
                # moduli of both; and so does the rounding of either product.
                relative = np.expm1(np.minimum(2.0 * rounded, 50.0)) + 2.0 * gauss_error
                relative += (len(base) + 8) * 8.0 * _LIB * (2.0 + np.abs(log_rest))
                # 1 - phi_marked/phi is off by a few units of U, in each factor of the product.
                relative += 2.0 * _LIB * math.fsum(p.count for p in whole.parts)
                error += most * relative
                psi = psi * -np.expm1(log_rest)
            # Where the sum knows less of a value than its modulus, that is all it says.
            lost = ~(np.isfinite(psi) & (error <= most) & (np.abs(psi) <= 2.0 * most))
        psi[lost] = 0.0
        error[lost] = most[lost]
        if not np.isfinite(error).all():
            raise OutOfReach("rounding hides the transform")
        self._base, self._size = math.fsum(base), size
        weight = np.full(count, step / math.pi)
        weight[0] *= 0.5
        plain = 1.0 / (s * (s + 1.0))
        with np.errstate(all="ignore"):
            up = np.exp(0.5 * tau2 * (s * s + s)) * plain
            # exp(tau^2 s^2/2)/s - exp(tau^2 (s+1)^2/2)/(s+1), without its cancellation
            bent = s * np.expm1(tau2 * (s + 0.5))
            low = np.exp(0.5 * tau2 * s * s) * plain
            low, low_size = low * (1.0 - bent), np.abs(low) * (1.0 + np.abs(bent))
        if not (np.isfinite(up).all() and np.isfinite(low).all()):
            raise OutOfReach("the smoothing leaves double precision")
        kernel_error = 4.0 * _LIB * (1.0 + tau2 * np.abs(s + 1.0) ** 2)
        with np.errstate(all="ignore"):
            self._up, self._low = psi * up * weight, psi * low * weight
        # What each sum may be off by: a constant, and a part proportional to |epsilon|.
        self._errors = []
        with np.errstate(all="ignore"):
            for terms, kernel in ((self._up, np.abs(up)), (self._low, low_size)):
                modulus = np.abs(terms)
                fixed = float((error * kernel * weight).sum())
                fixed += float((np.abs(psi) * kernel_error * kernel * weight).sum())
                fixed += float(modulus.sum()) * U * (2 * count + 64)
                self._errors.append([fixed * (1.0 + 1e-6), float((modulus * t).sum()) * 4.0 * U])
        if not np.isfinite(self._errors).all():
            raise OutOfReach("rounding hides the sum")
        # Beyond the last node.
        a, w2 = float(t[-1]), variance * (1.0 - 8.0 * U) + tau2
        if plan.marked:
            # |Psi - Psi_unmarked| <= prod phi(c)^N expm1(sum N |phi_marked| / phi(c)).
            marked_decay = min(max(marked_decay * (1.0 + 1e-9), 1e-300), _FAR)
            log_decay -= math.log(math.expm1(marked_decay))
        tail = -0.5 * w2 * a * a - log_decay - start
        inverse = 1.0 / (w2 * a * a) if w2 > 0.0 else math.inf
        bend = 0.5 * tau2 * (c + 1.0) ** 2
        if not bend + max(tail, 0.0) < _FAR:
            raise OutOfReach("the smoothing leaves double precision")
        first = math.exp(0.5 * tau2 * (c * c + c) + tail) / math.pi * min(1.0, inverse) / a
        second = first
        if tau2 > 0.0:
            both = math.exp(0.5 * tau2 * c * c) + math.exp(bend)
            second = both * math.exp(tail) / math.pi * inverse
        self._truncation = first * (1.0 + 1e-6), second * (1.0 + 1e-6)
        self._unmarked = whole.log_unmarked() if plan.marked else (0.0, -math.inf)
        self._second = plan.second_tilt
        self._log_mgf_second: float | None = None
        self._whole = whole
        if self.period < whole.largest:
            self._log_mgf()  # of these windows, before others are set
        self.outside, self._level = whole.outside, whole.level
        self._large, self._large_below = whole.large, whole.large_below
        self._large_below_sum = whole.large_below_sum
        self._fall_tilt = whole.fall_tilt if whole.capped else 0.0
        try:
            self._log_fall = whole.log_fall() if whole.capped else 0.0
        except OutOfReach:
            self._log_fall = math.inf
        self._smoothing = plan.smoothing

    def _log_mgf(self) -> float:
        """log Psi at the second tilt, rounded up."""
        if self._log_mgf_second is None:
            try:
                self._log_mgf_second = self._whole.log_mgf_above(self._second)
            except OutOfReach:
                self._log_mgf_second = math.inf
        return self._log_mgf_second

    def _front(self, epsilon: Array) -> tuple[Array, Array]:
        """exp(base - c epsilon) and its relative error."""
        exponent = self._base - self._c * epsilon
        front = np.where(exponent < _FAR, np.exp(np.minimum(exponent, _FAR)), math.inf)
        return front, 4.0 * _LIB * (1.0 + self._size + np.abs(self._c * epsilon))

    def _sum(self, terms: Complex, epsilon: Array) -> Array:
        value = np.empty(len(epsilon))
        rows = max(1, _AT_ONCE // len(self.t))
        for i in range(0, len(epsilon), rows):
            turns = np.exp(np.multiply.outer(-1j * epsilon[i : i + rows], self.t))
            value[i : i + rows] = (turns @ terms).real
        return value

    def upper(self, epsilon: Array) -> Array:
        """Upper bounds on delta at each epsilon."""
        front, error = self._front(epsilon)
        fixed, per_epsilon = self._errors[0]
        value = np.maximum(self._sum(self._up, epsilon), 0.0) + self._truncation[0]
        value = value + fixed + per_epsilon * np.abs(epsilon)
        value = front * value * (1.0 + error + 1e-13) + self.outside
        k, log_mgf = self._unmarked
        if k > 0.0:
            exponent = log_mgf + float(_kappa(np.array([k]))[0]) - k * epsilon
            exponent = exponent + 16.0 * _LIB * (
                4.0 + abs(log_mgf) + k * (np.abs(epsilon) + 1.0 + math.log1p(k))
            )
            value = value + np.exp(np.minimum(exponent, _FAR))
        # Where an output loses more than the level, the sum falls below epsilon only if the rest
        # of it does by the gap.
        fall = np.ones_like(epsilon)
        if self._fall_tilt > 0.0 and self._log_fall < math.inf:
            gap = self._fall_tilt * (self._level - epsilon)
            exponent = self._log_fall - gap
            exponent = exponent + 8.0 * _LIB * (abs(self._log_fall) + np.abs(gap))
            fall = np.exp(np.minimum(exponent, 0.0)) * (1.0 + 2.0 * _LIB)
        scale = np.exp(np.minimum(epsilon, _FAR)) * (1.0 + 2.0 * _LIB)
        large = self._large[1] - scale * (1.0 - 4.0 * _LIB) * self._large_below[0]
        large = large + scale * np.minimum(fall, 1.0) * self._large_below_sum
        # Nor can large losses bring more than their probability.
        large = np.where(epsilon < _FAR, np.minimum(large, self._large[1]), self._large[1])
        # Whatever is below the least double is not 0, unless no loss reaches epsilon.
        bound = np.maximum(value + large, np.where(epsilon < self._whole.largest, 1e-300, 0.0))
        return np.where(np.isnan(bound), math.inf, bound)

    def lower(self, epsilon: Array) -> Array:
        """Lower bounds on delta at each epsilon; may be negative."""
        front, error = self._front(epsilon)
        fixed, per_epsilon = self._errors[1]
        value = self._sum(self._low, epsilon) - self._truncation[1]
        value = value - fixed - per_epsilon * np.abs(epsilon)
        value = front * value * (1.0 - np.sign(value) * (error + 1e-13))
        scale = np.exp(np.minimum(epsilon, _FAR)) * (1.0 + 2.0 * _LIB)
        large = np.maximum(self._large[0] - scale * self._large_below[1], 0.0)
        large = np.where(epsilon < _FAR, large, 0.0)
        bound = value - self._alias(epsilon) + large
        return np.where((front < math.inf) & ~np.isnan(bound), bound, -math.inf)

    def _alias(self, epsilon: Array) -> Array:
        """Upper bounds on the other terms of the lower sum."""
        c, period = self._c, self.period
        left = math.exp(-c * period) / -math.expm1(-c * period) * (1.0 + 1e-9)
        right = np.zeros_like(epsilon)
        reached = epsilon + period < self._whole.largest
        if reached.any():
            c2 = self._second
            kappa = float(_kappa(np.array([c2]))[0])
            log_mgf = self._log_mgf()
            exponent = log_mgf + kappa - c2 * epsilon - (c2 - c) * period
            size = abs(log_mgf) + c2 * (np.abs(epsilon) + period + 4.0 + math.log1p(c2))
            exponent = exponent + 16.0 * _LIB * (1.0 + size)
            right = np.exp(np.minimum(exponent, _FAR)) / -math.expm1(-(c2 - c) * period)
            right = np.where(reached, right * (1.0 + 1e-9), 0.0)
        return left + right

    def error_terms(self, epsilon: float) -> dict[str, float]:
        """What the bounds at epsilon allow for, as probabilities, and the parameters used."""
        at = np.array([epsilon])
        front = float(self._front(at)[0][0])
        fixed, per_epsilon = self._errors[0]
        return {
            "outside_window": self.outside,
            "rounding_and_quadrature": front * (fixed + per_epsilon * abs(epsilon)),
            "truncation": front * max(self._truncation),
            "aliasing": float(self._alias(at)[0]),
            "smoothing": self._smoothing,
            "tilt": self._c,
            "nodes": float(len(self.t)),
        }

    def slope(self, epsilon: float) -> float:
        """About -d log delta / d epsilon."""
        at = np.array([epsilon])
        front = float(self._front(at)[0][0])
        large = math.exp(min(epsilon, _FAR)) * self._large_below[0]
        value = front * float(self._sum(self._up, at)[0]) + max(self._large[0] - large, 0.0)
        change = front * float(self._sum(self.s * self._up, at)[0])
        change += large if self._large[0] > large else 0.0
        return change / value if value > 0.0 and change > 0.0 else self._c


# --------------------------------------------------------------------------------------------------
# Questions
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Bounds in one direction, and what they were made of."""

    lower: float
    upper: float
    error_terms: dict[str, float]
    reason: str = ""


def epsilon(whole: Composition, delta: float, tolerance: Callable[[float], float]) -> Found:
    """Bounds on epsilon at delta, in one direction of a composition.

    Args:
        tolerance: the wanted width, given epsilon.

    Raises:
        OutOfReach: no bound was found.
    """
    log_delta = math.log(delta)
    low, high = 0.0, math.inf
    terms: dict[str, float] = {}
    reason = ""
    whole.cut(delta * 1e-4)
    bound, slope = whole.chernoff_epsilon(log_delta)
    # Never at 0 itself, where no digit would be enough.
    at = max(bound - 1.5 / slope, 0.1 * bound) if bound > 0.0 else 0.01 / slope
    most_lost, loosen, tighten, outside, single = 20.0, 1.0, 1.0, 0.03, whole.heavy
    otherwise: tuple[float, float] | None = None  # a guess, should the one being tried fail
    for turn in range(8):
        width = max(tolerance(at), 1e-6 * min(1.0, 1.0 / slope)) * loosen
        accuracy = min(width * slope * tighten, 0.3)
        share = min(2e-3, max(1e-9, outside * accuracy))
        try:
            plan = _planned(whole, at, delta, slope, accuracy, most_lost, share)
            contour = Contour(whole, plan)
        except OutOfTime as stop:
            reason = str(stop)
            break
        except OutOfReach as stop:
            if otherwise is not None:
                (at, slope), otherwise = otherwise, None
                continue
            reason = str(stop)
            if loosen > 1e5:
                break
            loosen *= 10.0
            continue
        new_low, new_high = _solve(contour, delta, at, slope)
        low, high = max(low, new_low), min(high, new_high)
        terms = contour.error_terms(high if high < math.inf else at)
        if high == 0.0:
            return Found(0.0, 0.0, terms)
        if high - low <= tolerance(low):
            reason = ""
            break
        if high == math.inf:
            if low > at:
                at = math.sqrt(low * max(bound, 4.0 * low))
                slope = whole.chernoff_log_delta(at)[1]
            else:
                loosen *= 10.0
            continue
        if low > 0.5 * high:
            new_at, new_slope = 0.5 * (low + high), contour.slope(0.5 * (low + high))
        else:
            # Far off. Perhaps single outputs decide; else somewhere in between.
            alone, its_slope = whole.single(delta) if single else (0.0, 1.0)
            single = False
            new_at = math.sqrt(max(low, 0.01 * high) * high)
            new_slope = contour.slope(new_at)
            if not new_slope > 0.0:
                # The sum is lost in rounding there: epsilon lies near the upper end, and what the
                # sum says of it is mostly the values at other epsilons.
                new_at, new_slope = high, whole.chernoff_log_delta(high)[1]
            if low < alone < high:
                otherwise = new_at, new_slope
                new_at, new_slope = alone, its_slope
        excess = terms["rounding_and_quadrature"] / (0.2 * accuracy * delta)
        moved = abs(at - new_at) * slope > 0.05 or abs(math.log(new_slope / slope)) > 0.02
        if excess > 1.0:
            most_lost, outside = plan.lost - math.log(excess) - 1.0, 0.15
        elif loosen > 1.0 or tighten < 0.01:
            break
        elif not moved or turn > 2:
            # The guess at what smoothing does was too small: delta may bend sharply here.
            tighten *= max(0.1, min(0.5, 0.6 * tolerance(low) / (high - low)))
        at, slope = new_at, new_slope
    if high == math.inf:
        raise OutOfReach(reason or "no upper bound was found")
    if low > high:
        raise OutOfReach("the bounds contradict each other")
    if not reason and high - low > tolerance(low):
        reason = "double precision, or the limit on work, allowed no less"
    return Found(low, high, terms, reason)


def _planned(
    whole: Composition,
    epsilon: float,
    delta: float,
    slope: float,
    accuracy: float,
    most_lost: float,
    share: float,
    spare: float = 0.0,
) -> _Plan:
    """The plan for bounds near (epsilon, delta), with windows set for it.

    Where the transform does not decay by itself, a few single outputs decide, and large losses
    are better split off: then the tilt can follow the curve, and the windows are short.
    """
    outside = max(delta * share * math.exp(-spare), 1e-305)
    whole.cut(outside)
    # Smoothing moves delta by about tau^2 delta''/2.
    smoothing = math.sqrt(0.8 * accuracy / ((slope + 1.0) * max(slope, 1e-12)))
    log_delta = math.log(delta)
    plan: _Plan | None
    try:
        plan = whole.plan(epsilon, log_delta, accuracy, smoothing, most_lost, spare)
    except OutOfReach:
        plan = None
    if plan is not None:
        decays = plan.smoothing == 0.0 and plan.lost <= most_lost
        short = plan.reach * plan.period < _LONG
        if (decays and short) or spare > 0.0 or not whole.heavy:
            return plan
        marked = _marked(whole, plan, epsilon, log_delta, outside, accuracy)
        if marked is not None:
            return marked
    log_share = math.log(outside) - epsilon
    for _ in range(2):
        below = math.log(max(whole.large_below_sum, 1e-300))
        # With room for a guess at epsilon that is too low.
        room = min(1.0 / slope, max(epsilon, 0.1))
        whole.cut(outside, whole.split_cap(epsilon, log_share - below) + room)
        if not whole.capped:
            break
    if whole.capped:
        rest = max(delta - whole.large_at(epsilon), min(0.02, 0.1 * room * slope) * delta)
        finer = min(accuracy * delta / rest, 0.3)
        split = whole.plan(epsilon, math.log(rest), finer, smoothing, most_lost, spare)
        shorter = plan is None or split.reach * split.period < 0.7 * plan.reach * plan.period
        if shorter or (plan is not None and plan.lost > max(most_lost, split.lost + 0.5)):
            return split
    whole.cut(outside)
    if plan is None:
        raise OutOfReach("no contour was found")
    return plan


def _marked(
    whole: Composition,
    plan: _Plan,
    epsilon: float,
    log_delta: float,
    outside: float,
    accuracy: float,
) -> _Plan | None:
    """A plan that sums only outcomes with a large loss among them, if that is much shorter.

    What does not decay is the atom of outcomes without an inclusion, and they do not reach epsilon.
    """
    if plan.smoothing == 0.0 or len(whole.parts) > _MANY or not epsilon > 0.0:
        return None
    # The window's edge must lie where the integrand is nothing, or it would not decay.
    whole.cut(max(outside * 1e-9, 1e-305))
    found = _best_marks(whole, plan, epsilon, log_delta, outside, accuracy)
    if found is None:
        whole.cut(outside)
    return found


def _best_marks(
    whole: Composition,
    plan: _Plan,
    epsilon: float,
    log_delta: float,
    outside: float,
    accuracy: float,
) -> _Plan | None:
    try:
        wide = whole.plan(epsilon, log_delta, accuracy, plan.smoothing, plan.lost + 0.5)
    except OutOfReach:
        return None
    nats = max(4.0, -math.log(0.02 * accuracy)) + wide.lost + 1.0
    most = 0.4 * plan.reach * plan.period / wide.period
    best, marks, spare = most, None, 0.0
    for sharpness in (1.4, 0.7, 2.8):
        if not whole.mark(epsilon, math.log(outside), sharpness):
            break
        # Some nats to spare make a tighter bound, where they are cheap.
        for more in (6.0, 0.0):
            reach = whole.marked_reach(wide.tilt, nats + more, plan.reach)
            if reach < 0.8 * best:
                best, marks, spare = reach, whole.marks_kept(), more
                break
        if best < 0.25 * most:
            break
    if marks is None:
        return None
    whole.use_marks(marks)
    period = wide.period * (1.0 + 0.02 * spare)
    return replace(wide, smoothing=0.0, reach=best, period=period, marked=True)


def _log1p(z: Complex) -> Complex:
    """log(1 + z): relative to |z| where that is small, and with 1 + z off by a few units of U."""
    x, y = z.real, z.imag
    real = 0.5 * np.log1p(np.maximum(2.0 * x + (x * x + y * y), -1.0))
    value: Complex = real + 1j * np.arctan2(y, 1.0 + x)
    return np.where(np.abs(1.0 + z) < 0.5, np.log(1.0 + z), value)


def _solve(contour: Contour, delta: float, start: float, slope: float) -> tuple[float, float]:
    """(lower, upper) bounds on epsilon at delta from one contour; (0, inf) where it gives none."""

    def at(bound: Callable[[Array], Array], x: float) -> float:
        return float(bound(np.array([x]))[0])

    if at(contour.upper, 0.0) <= delta:
        return 0.0, 0.0
    high = _root(lambda x: at(contour.upper, x), delta, start, slope)
    # The bound need not be monotone, so what is returned was itself evaluated.
    step = 1e-9 * max(high, 1e-9)
    while high < _FARTHEST and not at(contour.upper, high) <= delta:
        high, step = high + step, 4.0 * step
    if not (high < _FARTHEST and at(contour.upper, high) <= delta):
        high = math.inf
    low = _root(lambda x: at(contour.lower, x), delta, high if high < math.inf else start, slope)
    step = 1e-9 * max(low, 1e-9)
    while low > 0.0 and not at(contour.lower, low) >= delta:
        low, step = low - step, 4.0 * step
    return max(low, 0.0), high


def _root(bound: Callable[[float], float], delta: float, start: float, slope: float) -> float:
    """About the x >= 0 where bound(x) = delta, by safeguarded secants on log bound."""
    x, low, high = start, 0.0, math.inf
    last: tuple[float, float] | None = None
    for _ in range(40):
        value = bound(x)
        if value <= 0.0:
            high, gap = min(high, x), None
        else:
            gap = math.log(value / delta) if value / delta < 1e300 else 690.0
            if gap > 0.0:
                low = max(low, x)
            else:
                high = min(high, x)
        if gap is None:
            new = 0.5 * (low + high)
        else:
            rate = slope
            if last is not None and last[0] != x and (last[1] - gap) / (x - last[0]) > 0.0:
                rate = (last[1] - gap) / (x - last[0])
            new, last = x + gap / rate, (x, gap)
            if not low < new < high:
                new = 0.5 * (low + high) if high < math.inf else 2.0 * max(x, 1.0 / slope)
        new = min(new, _FARTHEST)
        if abs(new - x) <= 1e-8 * max(new, 1e-9):
            return new
        x = new
    return x


def epsilon_of(
    terms: Sequence[Term], delta: float, tolerance: Callable[[float], float], clock: Clock
) -> tuple[Found, Worse]:
    """Bounds on epsilon at delta of a composition of terms in the worse direction, and which it is.

    The terms' own deltas are left out; see the module's text for the rest.

    Raises:
        OutOfReach: no bound was found.
    """
    if total_variation(terms) <= delta:
        return Found(0.0, 0.0, {}), "both"
    _check_range(terms)
    remove = epsilon(Composition(terms, "remove", clock), delta, tolerance)
    if not _directed(terms):
        return remove, "both"
    whole = Composition(terms, "add", clock)
    # Often a loss that can't exceed the other direction's lower end, or a Chernoff bound, shows
    # at once that this direction is not the worse one.
    cap = whole.largest
    if cap > remove.lower:
        cap = min(cap, _renyi_cap(terms, delta, remove.error_terms.get("tilt", 1.0)))
    if cap <= remove.lower:
        return remove, "remove"
    try:
        add = epsilon(whole, delta, tolerance)
    except OutOfReach as stop:
        add = Found(0.0, math.inf, {}, str(stop))
    if add.upper > cap:
        add = replace(add, upper=cap, lower=min(add.lower, cap))
    name: Worse = "add" if add.upper > remove.upper else "remove"
    worse = add if name == "add" else remove
    return replace(worse, lower=max(add.lower, remove.lower)), name


def _check_range(terms: Sequence[Term]) -> None:
    """Raises OutOfReach for parts whose losses leave double precision when they are added up."""
    for term in terms:
        if isinstance(term, GaussianTerm):
            mu, sampled = term.mu, term.sampling_probability < 1.0
            if mu > MOST_MU or (sampled and mu < LEAST_MU):
                raise OutOfReach("a noise multiplier is beyond what double precision adds up")
        elif isinstance(term, LaplaceTerm) and not LEAST_MU < term.inverse_scale < MOST_MU:
            raise OutOfReach("a noise multiplier is beyond what double precision adds up")


def total_variation(terms: Sequence[Term]) -> float:
    """An upper bound on delta(0), the total variation distance: the sum over all outputs."""
    total = []
    for term in terms:
        if isinstance(term, GaussianTerm):
            one = term.sampling_probability * math.erf(term.mu * math.sqrt(0.125))
        elif isinstance(term, LaplaceTerm):
            one = -math.expm1(-0.5 * term.inverse_scale)
        else:
            one = math.tanh(0.5 * float(term.epsilon))
        total.append(term.count * one)
    return math.fsum(total) * (1.0 + 8.0 * _LIB)


def _renyi_cap(terms: Sequence[Term], delta: float, tilt: float) -> float:
    """A proven upper bound on epsilon at delta in the add direction, by a few Renyi orders."""
    cap = math.inf
    for factor in (1.5, 3.0, 6.0, 12.0):
        order = 1.0 + factor * tilt
        if cumulants.MIN_ORDER <= order <= cumulants.MAX_ORDER:
            _, add = cumulants.directed_costs(tuple(terms), order)
            cap = min(cap, max(0.0, add + cumulants.conversion(order, math.log(delta))))
    return cap * (1.0 + 8.0 * U)


def _directed(terms: Sequence[Term]) -> bool:
    return any(isinstance(t, GaussianTerm) and t.sampling_probability < 1.0 for t in terms)


def delta_of(
    terms: Sequence[Term], epsilons: Array, clock: Clock
) -> tuple[Array, Array, list[Worse], list[dict[str, float]]]:
    """(lower, upper, worse direction, its error terms) of delta at each of the sorted epsilons.

    One contour serves many epsilons: the error terms are those of the last one made for the
    direction. The terms' own deltas are left out. An epsilon that no contour reached has the
    bounds 0 and 1.
    """
    # delta(0) bounds the whole curve.
    top = min(1.0, total_variation(terms))
    start = np.zeros(len(epsilons)), np.full(len(epsilons), top)
    try:
        _check_range(terms)
    except OutOfReach:
        return *start, ["both"] * len(epsilons), [{}] * len(epsilons)
    whole = Composition(terms, "remove", clock)
    low, high, errors = _deltas(whole, epsilons, *start, start[0])
    names: list[Worse] = ["remove"] * len(epsilons)
    if not _directed(terms):
        return low, high, ["both"] * len(epsilons), [errors] * len(epsilons)
    # Where a Renyi bound lies below the other direction already, no more needs to be known.
    caps = np.minimum(_renyi_caps(terms, epsilons, clock), start[1])
    whole = Composition(terms, "add", clock)
    other = _deltas(whole, epsilons, start[0], caps, low)
    names = ["add" if b > a else "remove" for a, b in zip(high, other[1], strict=True)]
    of_each = [other[2] if name == "add" else errors for name in names]
    return np.maximum(low, other[0]), np.maximum(high, other[1]), names, of_each


def _renyi_caps(terms: Sequence[Term], epsilons: Array, clock: Clock) -> Array:
    """Proven upper bounds on delta at the epsilons in the add direction, by a few Renyi orders."""
    log_delta = np.zeros(len(epsilons))
    step = 1.0 if len(terms) <= _MANY else 4.0
    for tilt in 2.0 ** np.arange(-1.0, 11.0, step):
        if clock.is_over():
            break
        _, add = cumulants.directed_costs(tuple(terms), 1.0 + tilt)
        order = 1.0 + tilt
        gain = add + math.log1p(-1.0 / order)
        size = add + epsilons + 2.0 + math.log(order) / tilt
        bound = tilt * (gain - epsilons + 16.0 * _LIB * size) - math.log(order)
        log_delta = np.minimum(log_delta, bound)
    value = np.exp(log_delta) * (1.0 + 2.0 * _LIB)
    return np.clip(value, 1e-300, 1.0)


def _deltas(
    whole: Composition,
    epsilons: Array,
    low: Array,
    high: Array,
    enough: Array,
) -> tuple[Array, Array, dict[str, float]]:
    """(lower, upper, error terms) of delta at sorted epsilons, in one direction.

    One contour serves all epsilons at which it keeps enough digits; as many are made as it takes.

    Args:
        low: lower bounds to start from.
        high: upper bounds to start from.
        enough: an upper bound as small as this needs no contour.
    """
    low, high = low.copy(), high.copy()
    errors: dict[str, float] = {}
    # No output loses more than the largest loss.
    beyond = epsilons >= whole.largest
    high[beyond] = 0.0
    given_up = beyond | (high <= enough)
    while True:
        wanted = ~given_up & (high - low > ACCURACY * high) & (high > _NO_DELTA)
        places = np.flatnonzero(wanted)
        if not len(places) or whole.clock.is_over():
            break
        i = int(places[len(places) // 2])
        found = _one_delta(whole, float(epsilons[i]), low, high, epsilons, wanted)
        errors = found or errors
        missed = high[i] - low[i]
        if missed > ACCURACY * high[i]:
            # What is out of reach here is so nearby, and far around where little was reached.
            nearby = len(epsilons) // (8 if missed > 0.5 * high[i] else 20)
            given_up[places[np.abs(places - i) <= nearby]] = True
        # delta falls with epsilon.
        high = np.minimum.accumulate(high)
        low = np.maximum.accumulate(low[::-1])[::-1]
        given_up[i] = True
    return low, high, errors


def _one_delta(
    whole: Composition,
    at: float,
    low: Array,
    high: Array,
    epsilons: Array,
    wanted: NDArray[np.bool_],
) -> dict[str, float]:
    """Improves the bounds by contours made for epsilon = ``at``; returns the error terms there."""
    try:
        whole.cut(_WIDE)
    except OutOfTime:
        return {}
    log_delta, slope = whole.chernoff_log_delta(at)
    log_delta = min(log_delta - 1.0, -1e-3)
    others: list[tuple[float, float]] = []  # guesses at log delta and the slope, the last first
    if whole.heavy and at > 0.0 and len(epsilons) == 1:
        # Where single outputs decide, Chernoff's bound is far off.
        alone, its_slope = whole.single_delta(at)
        if 1e-300 < alone < math.exp(log_delta):
            gap = log_delta - math.log(alone)
            others = [(log_delta - share * gap, slope) for share in (0.0, 0.25, 0.5)]
            log_delta, slope = math.log(alone), its_slope
    most_lost, outside = 20.0, 0.03
    terms: dict[str, float] = {}
    spare = 8.0 if len(epsilons) > 1 else 0.0
    last = math.inf  # the last width, if rounding made it
    for _ in range(6):
        guess = max(math.exp(max(log_delta, -_FAR)), 1e-300)
        try:
            plan = _planned(
                whole, at, guess, slope, 0.7 * ACCURACY, most_lost, outside * ACCURACY, spare
            )
            contour = Contour(whole, plan)
        except OutOfTime:
            break
        except OutOfReach:
            if not others:
                break
            log_delta, slope = others.pop()
            continue
        points = epsilons[wanted]
        high[wanted] = np.minimum(high[wanted], contour.upper(points))
        low[wanted] = np.maximum(low[wanted], contour.lower(points))
        here = np.array([at])
        upper, lower = float(contour.upper(here)[0]), float(contour.lower(here)[0])
        terms = contour.error_terms(at)
        if upper - lower <= ACCURACY * upper or upper < _NO_DELTA:
            break
        spare = 0.0
        excess = terms["rounding_and_quadrature"] / (0.2 * ACCURACY * upper)
        if excess > 1.0:
            if upper - lower > 0.9 * last:
                break  # another try loses as many digits
            last = upper - lower
            most_lost, outside = plan.lost - math.log(excess) - 1.0, 0.15
        log_delta, slope = min(math.log(upper), -1e-9), contour.slope(at)
    return terms
