"""Ball arithmetic against everything that reaches the same number by another way."""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from flint import acb, arb

from accounting import gaussian_dp, rigorous
from accounting.errors import InvalidRequest, UndecidableBound
from accounting.mechanisms import (
    ApproximateDP,
    ApproximateDPTerm,
    Composition,
    Gaussian,
    GaussianTerm,
    LaplaceTerm,
    Part,
    SubsampledGaussian,
    Term,
)

Ball = Any
CIFAR_65 = (GaussianTerm(25 / 50_000, 2.0904, 50_000),)


def response(epsilon: str, count: int, delta: str = "0") -> ApproximateDPTerm:
    return ApproximateDPTerm(Decimal(epsilon), Decimal(delta), count)


def to_width(width: float) -> Any:
    return lambda low, up: None if up - low <= width * up else width


def by_contour(
    terms: tuple[Term, ...], epsilon: float, *, remove: bool = True, width: float = 1e-4
) -> tuple[float, float]:
    """The contour's answer even where a closed form exists."""
    found = rigorous._Enclosure()
    rigorous._refine_contour(
        rigorous._Curve(rigorous._Direction(terms, remove)),
        epsilon,
        to_width(width),
        None,
        time.monotonic() + 60.0,
        found,
    )
    return found.lower, found.upper


@contextmanager
def bits(precision: int) -> Iterator[None]:
    with rigorous._bits(precision):
        yield


# -- parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("remove", [True, False], ids=["remove", "add"])
@pytest.mark.parametrize(
    ("q", "mu", "c"),
    [
        (0.01, 1.0, 5.0),
        (0.5, 0.05, 40.0),
        (0.999, 1.0, 8.0),
        (1e-4, 5.0, 0.3),
        (0.3, 10.0, 1.5),
        (1e-6, 0.3, 100.0),
    ],
)
def test_one_sampled_gaussian_is_arbs_own_integral(
    q: float, mu: float, c: float, remove: bool
) -> None:
    """At nodes far up too: the lattice's step does not depend on them."""
    dt, count = c / 3.0, 40
    with bits(128):
        found = rigorous._nodes_of_sampled(q, mu, remove, c, dt, count, 64)
        for k in (0, 1, 7, 39):
            s = acb(arb(c), arb(dt) * k)
            power = 1 + s if remove else -s

            def integrand(z: Any, _: bool, power: Any = power) -> Any:
                u = 1 - arb(q) + arb(q) * (arb(mu) * z - arb(mu) ** 2 / 2).exp()
                # A box across the logarithm's cut has no log that could be bounded.
                if u.real > 0 or not u.imag.contains(0):
                    return (power * u.log() - z * z / 2).exp()
                return acb(math.nan)

            ends = (-16.0 - (0.0 if remove else c * mu), 16.0 + (1.0 + c) * mu)
            whole = acb.integral(integrand, ends[0], ends[1], rel_tol=arb(2) ** -70)
            whole /= (2 * arb.pi()).sqrt()
            whole += acb(arb(0, 1e-20), arb(0, 1e-20))  # beyond the ends
            assert whole.overlaps(found[k])
            assert found[k].real.rad() < 1e-15 * found[0].real.abs_lower()


@pytest.mark.parametrize("remove", [True, False], ids=["remove", "add"])
def test_points_left_out_are_bounded_by_what_they_hold(remove: bool) -> None:
    """Two far modes: the gap and the tails of a coarse choice against a finer one's sum."""
    q, mu, c = 0.02, 8.0, 1.0
    with bits(128):
        coarse = rigorous._choose_lattice(q, mu, remove, c, 12)
        pair = rigorous._Sampled(q, mu, remove, c)
        bound = rigorous._left_out(pair, coarse)
        kept = {i for a, b in coarse.runs for i in range(a, b + 1)}
        h = arb(coarse.h)
        held = sum(
            (
                (pair.p * pair.log_u(h * i) - (h * i) ** 2 / 2).exp() * h * pair.scale
                for i in range(-2000, 4000)
                if i not in kept
            ),
            arb(0),
        )
        assert held < bound
        whole = rigorous._nodes_of_sampled(q, mu, remove, c, 1.0, 1, 60)[0].real
        assert bound < whole / 16


def test_powers_of_boxes() -> None:
    with bits(80):
        x = acb(arb("0.99", 1e-20), arb("0.02", 1e-20))
        for n in (1, 63, 64, 1000, 10**6):
            assert rigorous._power(x, n).overlaps(x**n)
        below = acb(arb(-0.5), arb(0, 1e-20))
        assert rigorous._power(below, 1001).overlaps(below**1001)


@pytest.mark.parametrize("x", [0.01, 1.0, 9.0])
def test_laplace_is_arbs_own_integral(x: float) -> None:
    with bits(100):
        s = acb(1.5, 4.0)
        between = acb.integral(lambda z, _: (s * arb(x) * (1 - 2 * z) - arb(x) * z).exp(), 0, 1)
        whole = (s * arb(x)).exp() / 2 + (-arb(x) * (s + 1)).exp() / 2 + arb(x) / 2 * between
        assert rigorous._laplace(LaplaceTerm(x, 1), s).overlaps(whole)


# -- closed forms ----------------------------------------------------------------------------------

SINGLE = [
    *((GaussianTerm(1.0, mu, 1), e) for mu, e in ((0.01, 0.01), (1.0, 0.0), (1.0, 3.0))),
    *((GaussianTerm(1.0, mu, n), e) for mu, n, e in ((30.0, 1, 500.0), (1e-3, 10**6, 8.0))),
    *((GaussianTerm(0.01, mu, 1), e) for mu, e in ((0.05, 5e-4), (1.0, 1.0), (5.0, 1.0))),
    *((GaussianTerm(0.5, mu, 1), e) for mu, e in ((0.05, 1e-3), (1.0, 0.01), (1.0, 1.0))),
    *((GaussianTerm(0.9999, mu, 1), e) for mu, e in ((1.0, 1.0), (1.0, 8.0), (5.0, 1.0))),
    (GaussianTerm(1e-4, 1.0, 1), 1.0),
    (LaplaceTerm(1.0, 1), 0.5),
    (LaplaceTerm(3.0, 1), 2.9),
    (response("0.5", 1), 0.2),
    (response("0.5", 10), 1.2),
]


@pytest.mark.parametrize("remove", [True, False], ids=["remove", "add"])
@pytest.mark.parametrize(("term", "epsilon"), SINGLE)
def test_the_contour_meets_the_closed_form(term: Term, epsilon: float, remove: bool) -> None:
    direction = rigorous._Direction((term,), remove)
    with bits(512):
        exact = rigorous._closed_form(direction, epsilon)
        most = direction.most()
    assert exact is not None
    if most is not None and arb(epsilon) >= most:
        assert exact == 0
        return
    low, up = by_contour((term,), epsilon, remove=remove, width=1e-3)
    assert arb(low) <= exact <= arb(up)
    assert up - low <= 1e-3 * up


def test_the_gaussian_curve_of_the_fast_accountant() -> None:
    for mu in (1e-3, 0.3, 2.0, 20.0):
        for epsilon in (0.0, 0.5 * mu, mu * mu, 5.0 * mu):
            low, up = rigorous.delta_enclosure([GaussianTerm(1.0, mu, 1)], epsilon, width=1e-14)
            fast_low, fast_up = gaussian_dp.delta_bounds((mu, mu), epsilon)
            assert fast_low <= up
            assert low <= fast_up
            assert up - low <= 1e-14 * up


def test_near_one_the_add_direction_is_small_but_counted() -> None:
    """q .9999, mu 1, one step, delta 1e-16: a lattice cut at -8 loses a quarter of it."""
    terms = (GaussianTerm(0.9999, 1.0, 1),)
    for epsilon in (8.0, 8.5, 9.0):
        with bits(512):
            exact = [
                rigorous._closed_form(rigorous._Direction(terms, side), epsilon)
                for side in (True, False)
            ]
        assert exact[1] is not None
        assert float(exact[1]) > 0.0
        low, up = by_contour(terms, epsilon, remove=False, width=1e-2)
        assert arb(low) <= exact[1] <= arb(up)
    lower, upper = rigorous.epsilon_enclosure(terms, 1e-16, tolerance=1e-6)
    assert rigorous.confirm_upper(terms, upper, 1e-16) is True
    assert rigorous.confirm_upper(terms, lower - 1e-9, 1e-16) is False


def test_responses_are_the_binomial_sum_in_rationals() -> None:
    """e^eps = 2, to 30 digits, makes every probability rational."""
    term = response("0.693147180559945309417232121458", 5)
    lie = Fraction(1, 3)
    for x in (Fraction(1), Fraction(3), Fraction(7, 2), Fraction(20)):
        expected = Fraction(0)
        for j in range(6):
            weight = math.comb(5, j) * (1 - lie) ** (5 - j) * lie**j
            expected += weight * max(Fraction(0), 1 - x / Fraction(2) ** (5 - 2 * j))
        with bits(200):
            found = rigorous._responses(term, arb(x.numerator).log() - arb(x.denominator).log())
            assert abs(float(found) - float(expected)) < 1e-15


# -- compositions ----------------------------------------------------------------------------------


@functools.cache
def _grid(q: float, mu: float, step: float, reach: int) -> tuple[list[float], list[float]]:
    """One remove-direction loss on a grid, rounded down and up, as mass at i step, i >= -reach.

    By erfc alone: u is monotone, so {l <= y} is {z <= z(y)}.
    """

    def mass_below(y: float) -> float:
        inner = (math.exp(y) - 1.0 + q) / q
        if inner <= 0.0:
            return 0.0
        z = (math.log(inner) + 0.5 * mu * mu) / mu
        left, right = 0.5 * math.erfc(-z / math.sqrt(2)), 0.5 * math.erfc(-(z - mu) / math.sqrt(2))
        return (1.0 - q) * left + q * right

    edges = [mass_below(i * step) for i in range(-reach, reach + 1)]
    cells = [b - a for a, b in pairwise(edges)]
    return cells, [edges[0], 1.0 - edges[-1]]


@pytest.mark.parametrize(("q", "mu", "epsilon"), [(0.2, 1.0, 0.8), (0.5, 0.7, 1.5), (0.05, 2.0, 1)])
def test_three_compositions_by_convolution_on_a_grid(q: float, mu: float, epsilon: float) -> None:
    """Losses rounded down, and up, convolved by hand: delta grows with the loss."""
    step, reach = 2e-3, 6000
    cells, (below, above) = _grid(q, mu, step, reach)
    assert below == 0.0
    one = np.array(cells)
    size = 1 << 16
    three = np.fft.irfft(np.fft.rfft(one, size) ** 3, size)[: 3 * len(cells) - 2]
    start = -3 * reach
    for shift, side in ((0, "low"), (3, "high")):
        loss = (start + np.arange(len(three)) + shift) * step
        delta = float(np.sum(three * np.maximum(0.0, -np.expm1(np.minimum(0.0, epsilon - loss)))))
        delta += 3.0 * above if side == "high" else 0.0
        low, up = by_contour((GaussianTerm(q, mu, 3),), epsilon)
        assert delta <= up + 1e-12 if side == "low" else delta >= low - 1e-12
        assert abs(delta - low) < 0.02 * up  # and it is a close thing


@pytest.mark.parametrize("remove", [True, False], ids=["remove", "add"])
@pytest.mark.parametrize(
    ("q", "mu", "n", "epsilons"),
    [
        (0.01, 1.0, 200, (0.3, 1.0, 1.5)),
        (0.3, 0.5, 5, (0.2, 1.0)),
        (0.0005, 2.0904, 5000, (0.5, 2.0)),
        (0.9, 1.0, 3, (0.5, 4.0)),
    ],
)
def test_dp_accountings_two_roundings_lie_around(
    q: float, mu: float, n: int, epsilons: tuple[float, ...], remove: bool
) -> None:
    for pessimistic in (True, False):
        whole = pld.from_gaussian_mechanism(
            1.0 / mu,
            sampling_prob=q,
            value_discretization_interval=max(2e-4, 1e-3 / math.sqrt(n)),
            pessimistic_estimate=pessimistic,
        ).self_compose(n)
        side = whole._pmf_remove if remove else whole._pmf_add
        for epsilon in epsilons:
            theirs = side.get_delta_for_epsilon(epsilon)
            low, up = by_contour((GaussianTerm(q, mu, n),), epsilon, remove=remove, width=1e-2)
            if pessimistic:
                assert theirs >= low * (1 - 1e-9) - 1e-12
            else:
                assert theirs <= up * (1 + 1e-9) + 1e-12


def test_unsampled_gaussians_beside_sampled_ones() -> None:
    """q so near 1 that it hardly matters, split off: the same delta as the unsampled curve."""
    mixed = (GaussianTerm(1.0, 0.6, 1), GaussianTerm(1.0 - 1e-12, 0.8, 1))
    low, up = rigorous.delta_enclosure(mixed, 1.0, width=1e-4)
    exact = gaussian_dp.delta_bounds((1.0, 1.0), 1.0)
    assert low <= exact[1] * (1 + 1e-9)
    assert exact[0] * (1 - 1e-9) <= up
    assert up - low <= 1e-4 * up


def test_different_terms_together_are_the_same_term_twice() -> None:
    twice = rigorous.delta_enclosure([GaussianTerm(0.1, 1.0, 6)], 1.0, width=1e-4)
    near = math.nextafter(0.1, 1.0)
    apart = rigorous.delta_enclosure(
        [GaussianTerm(0.1, 1.0, 4), GaussianTerm(near, 1.0, 2)], 1.0, width=1e-4
    )
    assert max(twice[0], apart[0]) <= min(twice[1], apart[1]) * (1 + 1e-12)


def test_parts_that_give_up_add_their_mass() -> None:
    gaussian = GaussianTerm(1.0, 1.0, 1)
    low, up = rigorous.delta_enclosure([gaussian, response("0.1", 3, "1e-4")], 1.0)
    bare = rigorous.delta_enclosure([gaussian, response("0.1", 3)], 1.0)
    mass = 1.0 - (1.0 - 1e-4) ** 3
    assert low <= mass + (1 - mass) * bare[1]
    assert mass + (1 - mass) * bare[0] <= up
    assert rigorous.confirm_upper([response("0.1", 3, "1e-4")], 5.0, 1e-5) is False


def test_declared_parts_are_added_up_exactly() -> None:
    """delta is the decimal as written, so what is declared is met without a hair to spare."""
    for count in (1, 7):
        terms = (response("0.3", count, "1e-7"),)
        target = float(Decimal("1e-7") * count)
        upper = math.nextafter(0.3 * count, math.inf)
        assert rigorous.confirm_upper(terms, upper, target) is True
    assert rigorous.confirm_upper((response("0.3", 1, "1e-7"),), 0.2, 1e-7) is False


# -- golden values and hard questions --------------------------------------------------------------


@pytest.mark.parametrize(
    ("delta", "lower", "upper"),
    [(1e-5, 6.28830, 6.29060), (1e-12, 14.4354, 14.4386), (1e-20, 23.1730, 23.1780)],
)
def test_the_blocks_golden_brackets(delta: float, lower: float, upper: float) -> None:
    assert rigorous.confirm_upper(CIFAR_65, upper, delta) is True
    assert rigorous.confirm_upper(CIFAR_65, lower, delta) is False
    found = rigorous.epsilon_enclosure(CIFAR_65, delta, tolerance=1e-4)
    assert lower <= found[0] <= found[1] <= upper
    assert found[1] - found[0] <= 1.1e-4 * found[1]


@pytest.mark.parametrize(
    ("term", "delta"),
    [
        (GaussianTerm(25 / 162_770, 0.694642, 50_000), 1e-6),  # between bulk and one inclusion
        (GaussianTerm(25 / 50_000, 0.694642, 50_000), 1e-15),
        (GaussianTerm(25 / 50_000, 0.694642, 50_000), 1e-20),
        (GaussianTerm(25 / 50_000, 3.898772, 50_000), 1e-30),
        (GaussianTerm(1e-4, 0.5, 10**6), 1e-10),
        (GaussianTerm(0.5, 5.0, 4), 1e-6),
        (GaussianTerm(0.01, 30.0, 2), 1e-6),
        (GaussianTerm(0.999, 0.05, 5), 1e-12),
    ],
)
def test_hard_questions_have_tight_answers(term: GaussianTerm, delta: float) -> None:
    lower, upper = rigorous.epsilon_enclosure([term], delta)
    assert 0.0 < lower <= upper
    assert upper - lower <= 1.1e-3 * max(1.0, upper)


def test_random_mechanisms_have_tight_answers() -> None:
    """Each confirmation both ways, a third of a per cent to either side of the enclosure."""
    draw = random.Random(20)  # noqa: S311 - an example, not a secret
    for _ in range(12):
        term = GaussianTerm(
            10 ** draw.uniform(-4, -0.01),
            10 ** draw.uniform(-1, 0.7),
            int(10 ** draw.uniform(0, 5)),
        )
        delta = 10 ** draw.uniform(-12, -3)
        lower, upper = rigorous.epsilon_enclosure([term], delta, tolerance=1e-3)
        assert upper - lower <= 1.1e-3 * max(1.0, upper), term
        if lower > 0.0:
            assert rigorous.confirm_upper([term], lower * (1 - 3e-3), delta) is False, term
        assert rigorous.confirm_upper([term], upper * (1 + 3e-3) + 1e-3, delta) is True, term


# -- faces -----------------------------------------------------------------------------------------


def test_a_mechanism_is_its_worst_alternative_and_its_parts() -> None:
    sampled = SubsampledGaussian(0.01, 1.0, 100)
    whole = Composition((Part(sampled, 2), Part(Gaussian(10.0), 1)))
    low, up = rigorous.delta_enclosure(whole, 0.5)
    terms = (GaussianTerm(0.01, 1.0, 200), GaussianTerm(1.0, 0.1, 1))
    assert (low, up) == rigorous.delta_enclosure(terms, 0.5)
    declared = ApproximateDP(Decimal("0.5"), Decimal("1e-6"))
    assert rigorous.confirm(declared, 0.5, 1e-6) == rigorous.Confirmation(True)


def test_epsilon_may_be_zero_or_infinite() -> None:
    assert rigorous.epsilon_enclosure([GaussianTerm(0.01, 1.0, 100)], 0.9) == (0.0, 0.0)
    assert rigorous.epsilon_enclosure([response("1", 1, "1e-3")], 1e-4) == (math.inf, math.inf)


def test_too_much_work_is_refused_at_once() -> None:
    term = GaussianTerm(1e-3, 1.0, 1000)
    started = time.monotonic()
    answer = rigorous.confirm([term], 0.3, 1e-5, seconds=1e-6)
    assert answer.confirmed is None
    assert "would take about" in answer.reason
    low, up = rigorous.delta_enclosure([term], 0.3, seconds=1e-6)
    assert low == 0.0 < up < 1.0
    answer = rigorous.confirm([GaussianTerm(0.5, 1e60, 3)], 1.0, 1e-5, seconds=1.0)
    assert answer.confirmed is None
    assert answer.reason
    assert time.monotonic() - started < 10.0
    with pytest.raises(UndecidableBound, match="no finite epsilon"):
        rigorous.epsilon_enclosure([GaussianTerm(0.5, 1e60, 3)], 1e-5, seconds=1.0)


def test_questions_out_of_range_are_refused() -> None:
    term = GaussianTerm(0.1, 1.0, 1)
    with pytest.raises(InvalidRequest, match="epsilon"):
        rigorous.delta_enclosure([term], -1.0)
    with pytest.raises(InvalidRequest, match="epsilon"):
        rigorous.confirm([term], math.inf, 0.1)
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(InvalidRequest, match="delta"):
            rigorous.confirm([term], 1.0, delta)
        with pytest.raises(InvalidRequest, match="delta"):
            rigorous.epsilon_enclosure([term], delta)
