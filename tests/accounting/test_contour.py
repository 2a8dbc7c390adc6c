"""What the contour assumes, and each of its bounds against ball arithmetic."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from flint import acb, arb, ctx
from scipy.special import log_ndtr

from accounting import contour, gaussian_dp, rigorous
from accounting.clock import Clock
from accounting.contour import _LIB, Composition, Contour, Direction, _Plan, _Sampled, _Transform
from accounting.mechanisms import ApproximateDPTerm, GaussianTerm, LaplaceTerm, Term
from accounting.rigorous import _bits
from accounting.rounding import U

Ball = Any
DIRECTIONS: tuple[Direction, ...] = ("remove", "add")
OUTPUTS = [
    GaussianTerm(0.01, 1.0, 100),
    GaussianTerm(5e-4, 2.0904, 1000),
    GaussianTerm(0.5, 0.3, 10),
    GaussianTerm(0.2, 5.0, 5),
    GaussianTerm(0.999, 1.0, 3),
    GaussianTerm(1e-6, 4.0, 1000),
]
IDS = [f"{t.sampling_probability}-{t.mu}" for t in OUTPUTS]


# -- arithmetic ------------------------------------------------------------------------------------


def spread(low: float, high: float, *, logs: bool = False) -> np.ndarray:
    draw = np.random.default_rng(7)
    x = draw.uniform(math.log(low) if logs else low, math.log(high) if logs else high, 1500)
    return np.exp(x) if logs else x


@pytest.mark.parametrize(
    ("ours", "exact", "x"),
    [
        (np.exp, lambda x: x.exp(), spread(-700.0, 700.0)),
        (np.exp, lambda x: x.exp(), spread(-1.0, 1.0)),
        (np.log, lambda x: x.log(), spread(1e-290, 1e290, logs=True)),
        (np.log, lambda x: x.log(), spread(0.9, 1.1)),
        (np.log1p, lambda x: x.log1p(), spread(1e-290, 1e290, logs=True)),
        (np.log1p, lambda x: x.log1p(), -spread(1e-20, 0.999999, logs=True)),
        (np.expm1, lambda x: x.expm1(), spread(-40.0, 40.0)),
        (np.expm1, lambda x: x.expm1(), spread(1e-20, 1.0, logs=True)),
    ],
)
def test_elementary_functions(ours: Any, exact: Callable[[Ball], Ball], x: Any) -> None:
    with _bits(200):
        for at, value in zip(x.tolist(), ours(x).tolist(), strict=True):
            true = exact(arb(at))
            assert abs(arb(value) - true) <= _LIB * abs(true), at


@pytest.mark.parametrize("size", [1e-10, 1.0, 1e3, 1e7])
def test_sines_are_right_absolutely(size: float) -> None:
    x = spread(-size, size)
    with _bits(200):
        for at, sine, cosine in zip(x.tolist(), np.sin(x), np.cos(x), strict=True):
            assert abs(arb(float(sine)) - arb(at).sin()) <= _LIB, at
            assert abs(arb(float(cosine)) - arb(at).cos()) <= _LIB, at


def test_arctangents() -> None:
    y, x = spread(-1.0, 1.0) ** 7, spread(-1.0, 1.0)[::-1] ** 5
    with _bits(200):
        for a, b, value in zip(y.tolist(), x.tolist(), np.arctan2(y, x).tolist(), strict=True):
            true = arb.atan2(arb(a), arb(b))
            assert abs(arb(value) - true) <= _LIB * abs(true), (a, b)


def test_complex_exponentials() -> None:
    x = 1j * spread(-1e4, 1e4)
    with _bits(200):
        for at, value in zip(x.tolist(), np.exp(x).tolist(), strict=True):
            assert abs(arb(value.real) - arb(at.imag).cos()) <= _LIB, at
            assert abs(arb(value.imag) - arb(at.imag).sin()) <= _LIB, at


def test_logarithms_of_normal_tails() -> None:
    x = spread(-37.0, 37.0)
    with _bits(200):
        for at, value in zip(x.tolist(), log_ndtr(x).tolist(), strict=True):
            true = ((-arb(at) / arb(2).sqrt()).erfc() / 2).log()
            assert abs(arb(value) - true) <= 8 * _LIB * (1 + abs(true)), at
            # a window's tail, as a probability
            assert abs(arb(value).exp() / true.exp() - 1) <= 64 * U * (1 + at * at), at


def test_the_nodes_and_weights_of_the_quadrature() -> None:
    with _bits(200):
        for k in range(contour._NODES):
            node, weight = arb.legendre_p_root(contour._NODES, contour._NODES - 1 - k, weight=True)
            assert abs(arb(float(contour._X[k])) - node) <= contour._NODE_ERROR
            assert abs(arb(float(contour._W[k])) - weight) <= contour._WEIGHT_ERROR * weight


@pytest.mark.parametrize("nodes", [10, 5000])
def test_turns(nodes: int) -> None:
    x = spread(-3.0, 3.0)[:40]
    real, imaginary = contour._turns(x, 70, nodes)
    allowed = (3 if nodes == 10 else 16) * _LIB
    with _bits(200):
        for k in (0, 1, 8, 9, 37, 69):
            for i, at in enumerate(x.tolist()):
                # the phase itself is rounded; what that does grows with it and is counted elsewhere
                phase = arb(at) * k
                slack = allowed + 2 * U * abs(float(phase)) * (1 if nodes == 10 else 3)
                assert abs(arb(float(real[k, i])) - (phase.cos() - 1)) <= slack
                assert abs(arb(float(imaginary[k, i])) - phase.sin()) <= slack


# -- one output ------------------------------------------------------------------------------------


def output(term: GaussianTerm, direction: Direction, outside: float = 1e-14) -> _Sampled:
    part = _Sampled(term, direction)
    part.cut(outside, math.inf)
    return part


def integrand(part: _Sampled, k: float, t: float) -> Callable[..., Any]:
    """gauss(z) u(z)^(k + i t)."""
    q, mu, power = arb(part.q), arb(part.mu), acb(k, t)

    def at(z: Any, _: bool = False) -> Any:
        z = acb(z)
        u = 1 - q + q * (mu * z - mu * mu / 2).exp()
        # A box across the logarithm's cut has no log that could be bounded.
        if not (u.real > 0 or not u.imag.contains(0)):
            return acb(math.nan)
        return (power * u.log() - z * z / 2).exp() / (2 * arb.pi()).sqrt()

    return at


def integral(part: _Sampled, k: float, t: float, low: Any, high: Any) -> Any:
    """In pieces short enough that the boxes over them are narrow."""
    low, high = arb(low), arb(high)
    f = integrand(part, k, t)
    pieces = math.ceil(float(high - low) * max(1.0, part.mu))
    ends = [low + (high - low) * i / pieces for i in range(pieces + 1)]
    return sum(
        (
            acb.integral(f, a, b, rel_tol=arb(2) ** -70, abs_tol=arb(2) ** -110)
            for a, b in pairwise(ends)
        ),
        acb(0),
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("term", OUTPUTS, ids=IDS)
def test_panel_errors_are_bounded(term: GaussianTerm, direction: Direction) -> None:
    """Panels much too wide, by the rule in ball arithmetic: the error left is the rule's own."""
    part = output(term, direction)
    with _bits(160):
        rule = [arb.legendre_p_root(contour._NODES, k, weight=True) for k in range(contour._NODES)]
        telling = 0
        for pieces, k, t in ((2, 2.0, 30.0), (3, 0.5, 100.0), (4, 8.0, 300.0)):
            k = -k if direction == "add" else 1.0 + k
            edges = np.linspace(part._lo, part._hi, pieces + 1)
            bounds = part._panel_errors(edges[:-1], edges[1:], k, t)
            for i in range(pieces):
                low, high = arb(float(edges[i])), arb(float(edges[i + 1]))
                middle, radius = (low + high) / 2, (high - low) / 2
                for share in (1.0, -0.6):
                    f = integrand(part, k, share * t)
                    ours = sum((w * f(middle + radius * x) for x, w in rule), acb(0)) * radius
                    true = integral(part, k, share * t, low, high)
                    gap = abs(ours - true)
                    assert not gap > arb(float(bounds[i])).exp()
                    telling += float(gap) > 1e-12
        assert telling > 0 or term.mu < 0.5


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("term", OUTPUTS, ids=IDS)
def test_transforms_are_right_within_their_error(term: GaussianTerm, direction: Direction) -> None:
    part = output(term, direction)
    for tilt, step, count in ((0.7, 0.5, 60), (5.0, 1.0, 300), (30.0, 40.0, 60)):
        if math.exp(min(700.0, tilt * tilt * term.mu**2)) > 1e250:
            continue
        try:
            found = part.transform(tilt, step, count)
        except contour.OutOfReach:
            assert term.mu >= 4.0
            continue
        values = found.values()
        with _bits(160):
            for i in (0, 1, count // 3, count - 1):
                t = step * i
                k, spin = (-tilt, -t) if direction == "add" else (1.0 + tilt, t)
                true = integral(part, k, spin, part._lo, part._hi) * (-arb(found.scale)).exp()
                ours = found.rest + acb(float(found.excess[i].real), float(found.excess[i].imag))
                assert abs(ours - true) <= found.error[i], (tilt, t)
        # and the errors are small, not just right
        assert found.error[0] <= 1e-9 * abs(values[0])


@pytest.mark.parametrize("size", [1e-12, 1e-4, 0.3, 0.7])
def test_logarithms_of_transforms_far_from_one(size: float) -> None:
    """A sampled output's transform, kept as its difference from 1, may decay to nothing."""
    turns = np.exp(1j * np.random.default_rng(3).uniform(-math.pi, math.pi, 200))
    part = _Transform(size * turns - 1.0, np.zeros(200), 1.0, 0.0, 1)
    values, errors = part.log()
    assert errors.max() < 1e-12
    with _bits(200):
        for x, value, error in zip(part.excess, values, errors, strict=True):
            assert abs((acb(x) + 1).log() - acb(value)).upper() <= error


def test_where_a_transform_is_lost_it_counts_as_its_bound() -> None:
    """Nodes far beyond its decay add their modulus to the error, and no more."""
    terms = (GaussianTerm(1 - 1e-5, 0.1, 1), GaussianTerm(4e-4, 2.88, 100))
    whole = Composition(terms, "remove")
    whole.cut(1e-12)
    contour_ = Contour(whole, _Plan(1.0, 3.0, 40.0, 0.0, 200.0, 0.0))
    assert contour_.error_terms(7.0)["rounding_and_quadrature"] < 1e-10


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("term", OUTPUTS, ids=IDS)
def test_transforms_decay_as_claimed(term: GaussianTerm, direction: Direction) -> None:
    part = output(term, direction)
    claimed = 0.0
    for tilt in (0.5, 3.0, 12.0):
        k = -tilt if direction == "add" else 1.0 + tilt
        with _bits(120):
            whole = integral(part, k, 0.0, part._lo, part._hi).real
            scale = float(whole.log())
            above = float((whole * (-arb(scale)).exp()).upper()) * (1 + 1e-12)
            for t in (1.0, 6.0, 40.0):
                decay = part.decay(tilt, t, scale, above)
                claimed = max(claimed, decay)
                assert decay >= -1e-9
                for further in (1.0, 1.07, 1.9, 6.3):
                    spin = (-1 if direction == "add" else 1) * t * further
                    value = abs(integral(part, k, spin, part._lo, part._hi))
                    assert not value.log() - scale > -decay + 1e-9, (tilt, t, further)
    # where q is small, and where the loss hardly moves, it does not decay
    assert claimed > 0.1 or term.sampling_probability < 0.1 or term.mu < 0.5 or direction == "add"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("outside", [1e-6, 1e-30, 1e-200])
@pytest.mark.parametrize("term", OUTPUTS, ids=IDS)
def test_what_a_window_leaves_out(term: GaussianTerm, outside: float, direction: Direction) -> None:
    part = output(term, direction, outside)
    tails = part.tails()
    with _bits(200):
        q, mu, root = arb(part.q), arb(part.mu), arb(2).sqrt()

        def tail(x: Ball) -> Ball:
            return (x / root).erfc() / 2

        low, high = arb(part._lo), arb(part._hi)
        if direction == "add":
            assert tail(-low) + tail(high) <= tails.small <= 2.0 * outside
            return
        assert (1 - q) * tail(-low) + q * tail(mu - low) <= tails.small
        assert tails.small + tails.large[1] <= 2.0 * outside
        mixed = (1 - q) * tail(high) + q * tail(high - mu)
        assert tails.large[0] <= mixed <= tails.large[1]
        assert tails.large_below[0] <= tail(high) <= tails.large_below[1]
        assert tails.level <= (1 - q + q * (mu * high - mu * mu / 2).exp()).log()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("term", OUTPUTS, ids=IDS)
def test_real_transforms_are_rounded_up(term: GaussianTerm, direction: Direction) -> None:
    part = output(term, direction)
    for tilt in (1e-3, 0.5, 3.0, 12.0):
        k = -tilt if direction == "add" else 1.0 + tilt
        with _bits(160):
            true = integral(part, k, 0.0, part._lo, part._hi).real.log()
            assert true <= part.log_mgf(tilt)
            assert part.log_mgf(tilt) - true <= 1e-10 * (1 + abs(true))


@pytest.mark.parametrize(
    ("term", "exact"),
    [
        (LaplaceTerm(0.05, 1), rigorous._laplace),
        (LaplaceTerm(2.0, 1), rigorous._laplace),
        (ApproximateDPTerm(Decimal("0.5"), Decimal(0), 1), rigorous._response),
        (ApproximateDPTerm(Decimal(3), Decimal(0), 1), rigorous._response),
    ],
    ids=repr,
)
def test_transforms_of_other_outputs(term: Any, exact: Callable[[Any, Any], Any]) -> None:
    (part,) = Composition([term], "remove").parts
    for tilt, step in ((0.01, 0.3), (2.0, 5.0), (40.0, 90.0)):
        found = part.transform(tilt, step, 30)
        with _bits(160):
            for i in (0, 1, 13, 29):
                true = exact(term, acb(tilt, step * i)) * (-arb(found.scale)).exp()
                ours = found.rest + acb(float(found.excess[i].real), float(found.excess[i].imag))
                assert abs(ours - true) <= found.error[i]
            assert exact(term, acb(tilt)).real.log() <= part.log_mgf(tilt)


# -- sums ------------------------------------------------------------------------------------------

COMPOSITIONS: list[tuple[Term, ...]] = [
    (GaussianTerm(0.01, 1.0, 100),),
    (GaussianTerm(0.5, 0.3, 10),),
    (GaussianTerm(0.999, 1.0, 3),),
    (GaussianTerm(5e-4, 2.0904, 1000),),
    (GaussianTerm(0.05, 0.7, 20), GaussianTerm(1.0, 0.5, 2)),
    (GaussianTerm(0.05, 0.7, 20), LaplaceTerm(0.2, 3)),
    (ApproximateDPTerm(Decimal("0.2"), Decimal(0), 9), LaplaceTerm(0.3, 4)),
]


def enclosed(terms: tuple[Term, ...], direction: Direction, epsilon: float) -> tuple[float, float]:
    """delta in one direction, by ball arithmetic."""
    found = rigorous._refine(
        rigorous._Direction(terms, direction == "remove"),
        epsilon,
        lambda low, up: None if up - low <= 0.02 * up else 0.02,
        None,
        time.monotonic() + 3.0,  # then it is wide, and true all the same
    )
    return found.lower, found.upper


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("terms", COMPOSITIONS, ids=repr)
def test_any_plan_is_valid(terms: tuple[Term, ...], direction: Direction) -> None:
    """Parameters at random, sensible or not: the bounds may be wide, but hold."""
    draw = random.Random(repr(terms) + direction)  # noqa: S311 - an example, not a secret
    whole = Composition(terms, direction)
    whole.cut(1e-9)
    points = [0.05, 0.3, 1.0]
    exact = [enclosed(terms, direction, x) for x in points]
    tight = 0
    for _ in range(40):
        x = draw.choice(points)
        _, saddle = whole.chernoff_log_delta(x)
        tilt = saddle * draw.choice([0.1, 0.5, 0.8, 1.0, 1.3])
        plan = _Plan(
            tilt=tilt,
            second_tilt=tilt * draw.uniform(1.05, 4.0),
            period=draw.choice([0.5, 3.0, 12.0, 40.0]) / min(1.0, tilt),
            smoothing=draw.choice([0.0, 1e-3, 0.03, 0.3]),
            reach=saddle * draw.choice([0.3, 3.0, 30.0]),
            lost=0.0,
        )
        whole.cut(10.0 ** draw.uniform(-16, -4))
        try:
            made = Contour(whole, plan)
        except contour.OutOfReach:
            continue
        upper, lower = made.upper(np.array(points)), made.lower(np.array(points))
        for i in range(len(points)):
            assert upper[i] >= exact[i][0], (plan, points[i])
            assert lower[i] <= exact[i][1], (plan, points[i])
            tight += upper[i] - lower[i] < 0.5 * upper[i]
    assert tight > 0


@pytest.mark.parametrize("terms", COMPOSITIONS, ids=repr)
def test_chosen_plans_on_a_grid(terms: tuple[Term, ...]) -> None:
    """What a question about many epsilons is answered with."""
    points = np.array([0.0, 0.02, 0.1, 0.4, 1.0, 1.9])
    low, high, _, _ = contour.delta_of(terms, points, Clock(60.0))
    for i, x in enumerate(points.tolist()):
        exact = rigorous.delta_enclosure(list(terms), x, width=0.01, seconds=3.0)
        assert exact[0] <= high[i], x
        assert low[i] <= exact[1], x


@pytest.mark.parametrize("tilt", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("period", [1.0, 2.5, 6.0])
def test_the_other_terms_of_the_lattice_sum(tilt: float, period: float) -> None:
    """sum over m != 0 of e^(c m T) delta(x + m T), where delta is a formula for every x."""
    whole = Composition((GaussianTerm(1.0, 0.8, 1),), "remove")
    whole.cut(1e-12)
    plan = _Plan(tilt, 3.0 * tilt, period, 0.0, 40.0, 0.0)
    made = Contour(whole, plan)
    for x in (0.0, 0.5, 2.0):
        with _bits(200):
            mu, c = arb(0.8), arb(tilt)
            total = arb(0)
            for m in (m for m in range(-60, 61) if m != 0):
                y = x + m * arb(made.period)
                near, far = (rigorous._normal_tail(y / mu + s * mu / 2) for s in (-1, 1))
                total += (c * m * arb(made.period)).exp() * (near - y.exp() * far)
            assert total <= float(made._alias(np.array([x]))[0])


def test_nothing_aliases_beyond_the_largest_loss() -> None:
    terms = (ApproximateDPTerm(Decimal("0.1"), Decimal(0), 4),)
    whole = Composition(terms, "remove")
    whole.cut(1e-12)
    made = Contour(whole, _Plan(3.0, 9.0, 1.0, 0.01, 300.0, 0.0))
    left = math.exp(-3.0 * made.period) / -math.expm1(-3.0 * made.period)
    assert made._alias(np.array([0.2]))[0] == pytest.approx(left, rel=1e-6)


@pytest.mark.parametrize("mu", [0.05, 0.5, 3.0])
def test_unsampled_gaussians_by_the_contour(mu: float) -> None:
    terms = (GaussianTerm(1.0, mu, 4),)
    for delta in (1e-2, 1e-6, 1e-14):
        exact = gaussian_dp.epsilon_bounds((2.0 * mu, 2.0 * mu), delta)
        found, _ = contour.epsilon_of(terms, delta, lambda e: 1e-3 * e, Clock(60.0))
        assert found.lower <= exact[1]
        assert exact[0] <= found.upper
        assert found.upper - found.lower <= 1e-3 * exact[1]


def test_precision_is_left_as_it_was() -> None:
    before = ctx.prec
    enclosed((GaussianTerm(0.01, 1.0, 2),), "remove", 0.1)
    assert ctx.prec == before
