"""The exact (epsilon, delta) curve of the Gaussian mechanism, rounded outward.

For one Gaussian with parameter mu (sensitivity over standard deviation), and so for any composition
of unsampled Gaussians with mu^2 = sum mu_i^2,

    delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)

(Balle and Wang 2018, theorem 8; Dong, Roth and Su 2022). In x = eps/mu - mu/2 and Mills' ratio
R(t) = Phi(-t)/phi(t) it reads, because e^eps phi(x + mu) = phi(x),

    delta = phi(x) [R(x) - R(x + mu)],   eps = mu (x + mu/2),

which neither overflows nor, for mu not small, cancels, down to delta = 1e-300. For small mu the
difference does cancel; then -R'(t) = 1 - t R(t), positive and decreasing (Mills' ratio is convex),
gives mu (1 - t R(t)) at t = x as an upper and at t = x + mu as a lower bound. The better of the two
forms is taken on each side, each with the relative error of SciPy's erfcx and ndtr (taken to be
at most 1e-14; they are good to a few units in the last place) on the side that is safe.
"""

from __future__ import annotations

import math
from typing import Final

from scipy.special import erfcx, ndtr

_E: Final = 1e-14
_SQRT_HALF: Final = math.sqrt(0.5)
_SQRT_HALF_PI: Final = math.sqrt(0.5 * math.pi)
_SQRT_2PI: Final = math.sqrt(2.0 * math.pi)
# phi underflows gently below delta = 1e-300, which lies at x < 38.
_X_MAX: Final = 40.0
_X_DIRECT: Final = -5.0  # left of it delta is near 1 and Mills' ratio would be large


def total_mu(parts: list[tuple[float, int]]) -> tuple[float, float]:
    """(lower, upper) bounds on sqrt(sum count * mu^2) for parts (mu, count)."""
    # mu^2 leaves double precision below 1e-154 and above 1e154, so the largest is taken out.
    largest = max(mu for mu, _ in parts)
    if largest == 0.0:  # what underflowed to 0 is below the smallest normal double
        return 0.0, 1e-300
    value = largest * math.sqrt(math.fsum(n * (mu / largest) ** 2 for mu, n in parts))
    return value * (1.0 - _E), value * (1.0 + _E)


def epsilon_bounds(mu: tuple[float, float], delta: float) -> tuple[float, float]:
    """(lower, upper) epsilon at delta in (0, 1), for mu known within (lower, upper)."""
    return _epsilon(mu[0], delta, upper=False), _epsilon(mu[1], delta, upper=True)


def delta_bounds(mu: tuple[float, float], epsilon: float) -> tuple[float, float]:
    """(lower, upper) delta at epsilon >= 0, for mu known within (lower, upper)."""
    return _delta_at(mu[0], epsilon, upper=False), _delta_at(mu[1], epsilon, upper=True)


def _mills(t: float) -> float:
    return _SQRT_HALF_PI * float(erfcx(t * _SQRT_HALF))


def _log_delta(x: float, mu: float, *, upper: bool) -> float:
    """log delta at x, rounded up or down; -inf where a lower bound is not positive."""
    sign = 1.0 if upper else -1.0
    e = sign * _E
    density = math.exp(-0.5 * x * x) / _SQRT_2PI
    if x < _X_DIRECT:
        value = float(ndtr(-x)) * (1.0 + e) - density * _mills(x + mu) * (1.0 - 4.0 * e)
        return math.log(value) if value > 0.0 else -math.inf
    near, far = _mills(x), _mills(x + mu)
    difference = near * (1.0 + e) - far * (1.0 - e)
    t, ratio = (x, near) if upper else (x + mu, far)
    slope = mu * (1.0 - t * ratio + e * (1.0 + abs(t) * ratio)) * (1.0 + e)
    value = min(difference, slope) if upper else max(difference, slope)
    if value <= 0.0:
        return -math.inf
    size = 0.5 * x * x + abs(math.log(value)) + 2.0
    return -0.5 * x * x - math.log(_SQRT_2PI) + math.log(value) + e * size


def _epsilon(mu: float, delta: float, *, upper: bool) -> float:
    log_delta = math.log(delta)
    # epsilon = 0 is x = -mu/2; left of -9 delta is 1 in double precision.
    start = max(-0.5 * mu, -9.0)
    first = _log_delta(start, mu, upper=upper)
    if first <= log_delta and start == -0.5 * mu:
        return 0.0
    # Invariant: delta(lo) > target >= delta(hi), as far as the rounded values show.
    lo, hi = start, _X_MAX
    while True:
        mid = 0.5 * (lo + hi)
        if not lo < mid < hi:
            break
        if _log_delta(mid, mu, upper=upper) <= log_delta:
            hi = mid
        else:
            lo = mid
    x = hi if upper else lo
    # x + mu/2 may cancel when epsilon is near 0, so its rounding is bounded absolutely.
    slack = _E * (abs(x) + 0.5 * mu)
    value = mu * (x + 0.5 * mu + (slack if upper else -slack))
    return max(0.0, value)


def _delta_at(mu: float, epsilon: float, *, upper: bool) -> float:
    x = epsilon / mu - 0.5 * mu
    slack = _E * (abs(epsilon / mu) + 0.5 * mu)
    x += -slack if upper else slack
    if not x <= _X_MAX:  # NaN (inf - inf) is a tiny mu, hence far to the right as well
        return 1e-300 if upper else 0.0
    if x < -_X_MAX:
        return 1.0 if upper else 1.0 - 1e-15
    value = math.exp(_log_delta(x, mu, upper=upper))
    return min(1.0, value * (1.0 + _E)) if upper else value * (1.0 - _E)
