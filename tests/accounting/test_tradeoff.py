"""Trade-off curves against exact ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm

from accounting import gaussian_dp, tradeoff
from accounting.bounds import DeltaBracket
from accounting.errors import InvalidRequest
from accounting.mechanisms import (
    Gaussian,
    SubsampledGaussian,
    mechanism_from_json,
)
from accounting.tradeoff import DEFAULT_ALPHAS, of_profile


def bracket(epsilon: float, lower: float, upper: float) -> DeltaBracket:
    return DeltaBracket(lower, upper, epsilon, "both", "test")


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 3.0, 8.0])
def test_a_gaussians_curve(mu: float) -> None:
    """f(alpha) = Phi(Phi^-1(1 - alpha) - mu) (Dong, Roth and Su 2022)."""
    curve = tradeoff.tradeoff(Gaussian(1.0 / mu))
    assert [p.alpha for p in curve.points] == list(DEFAULT_ALPHAS)
    for p in curve.points:
        exact = float(norm.cdf(norm.isf(p.alpha) - mu))
        assert p.lower <= exact + 1e-13
        assert p.upper >= exact - 1e-13
        assert p.upper - p.lower < 1e-3
    ends = {p.alpha: p for p in curve.points}
    assert ends[1.0].lower == 0.0
    assert ends[1.0].upper < 1e-12
    assert ends[0.0].upper == 1.0


@given(
    mu=st.floats(0.05, 6.0),
    cuts=st.lists(st.floats(0.0, 12.0), min_size=1, max_size=30, unique=True),
    widths=st.lists(st.floats(-12, -1).map(lambda x: 10.0**x), min_size=60, max_size=60),
    alpha=st.floats(0.0, 1.0),
)
@settings(max_examples=300, deadline=None)
def test_any_true_brackets_at_any_points_give_true_bounds(
    mu: float, cuts: list[float], widths: list[float], alpha: float
) -> None:
    curve = []
    for i, epsilon in enumerate(sorted(cuts)):
        low, up = gaussian_dp.delta_bounds((mu, mu), epsilon)
        curve.append(
            bracket(epsilon, max(0.0, low - widths[2 * i]), min(1.0, up + widths[2 * i + 1]))
        )
    (point,) = of_profile(curve, [alpha])
    exact = float(norm.cdf(norm.isf(alpha) - mu))
    assert point.lower <= exact + 1e-12
    assert point.upper >= exact - 1e-12


def hull(alphas: NDArray[np.float64], betas: NDArray[np.float64]) -> NDArray[np.float64]:
    """The largest convex curve below the points."""
    kept: list[int] = []
    for i in range(len(alphas)):
        while len(kept) >= 2:
            a, b = kept[-2], kept[-1]
            if (betas[b] - betas[a]) * (alphas[i] - alphas[a]) < (betas[i] - betas[a]) * (
                alphas[b] - alphas[a]
            ):
                break
            kept.pop()
        kept.append(i)
    return np.interp(alphas, alphas[kept], betas[kept])


@pytest.mark.parametrize(("q", "mu"), [(0.3, 2.0), (0.05, 1.0), (0.9, 4.0)])
def test_a_sampled_gaussians_curve_is_that_of_both_directions(q: float, mu: float) -> None:
    """T of the pair is a threshold on z; f is the largest convex curve below T and its inverse."""
    z = np.linspace(-9.0, 9.0 + mu, 200_001)
    alpha, beta = norm.sf(z), (1 - q) * norm.cdf(z) + q * norm.cdf(z - mu)
    grid = np.linspace(0.0, 1.0, 20_001)
    one = np.interp(grid, alpha[::-1], beta[::-1])
    other = np.interp(grid, beta, alpha)
    exact = hull(grid, np.minimum(one, other))
    curve = tradeoff.tradeoff(SubsampledGaussian(q, 1.0 / mu), [0.001, 0.01, 0.1, 0.3, 0.5, 0.9])
    for p in curve.points:
        at = float(np.interp(p.alpha, grid, exact))
        assert p.lower <= at + 1e-6
        assert p.upper >= at - 1e-6
        assert p.upper - p.lower < 5e-3


def declared(epsilon: float, delta: float) -> Callable[[float], float]:
    """The curve of all (epsilon, delta)-DP mechanisms (Dong, Roth and Su 2022, equation 5)."""
    e = math.exp(epsilon)
    return lambda alpha: max(0.0, 1.0 - delta - e * alpha, (1.0 - delta - alpha) / e)


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 0.0), (0.3, 0.05), (5.0, 1e-9)])
def test_one_point_of_the_profile_is_an_epsilon_delta_guarantee(
    epsilon: float, delta: float
) -> None:
    exact = declared(epsilon, delta)
    points = of_profile([bracket(epsilon, 0.0, delta)], DEFAULT_ALPHAS)
    for p in points:
        assert p.lower == pytest.approx(exact(p.alpha), abs=1e-12)
        assert p.lower <= exact(p.alpha)


def test_nothing_known_is_the_whole_square() -> None:
    (point,) = of_profile([bracket(0.0, 0.0, 1.0)], [0.25])
    assert point.lower == 0.0
    assert point.upper == pytest.approx(0.75, abs=1e-12)


def test_epsilons_beyond_a_double_are_left_out() -> None:
    assert of_profile([bracket(0.0, 0.1, 0.2), bracket(1e5, 0.0, 1.0)], [0.5]) == of_profile(
        [bracket(0.0, 0.1, 0.2)], [0.5]
    )


@pytest.mark.parametrize(
    "obj",
    [
        {"kind": "approximate_dp", "epsilon": 1.0, "delta": 0.1},
        {"kind": "gaussian", "noise_multiplier": 1e-100},
        {"kind": "gaussian", "noise_multiplier": 1e100},
        {"kind": "laplace", "noise_multiplier": 1.0},
    ],
)
def test_extreme_mechanisms_have_curves(obj: dict[str, object]) -> None:
    curve = tradeoff.tradeoff(mechanism_from_json(obj))
    for p in curve.points:
        assert 0.0 <= p.lower <= p.upper <= 1.0
        assert p.upper <= 1.0 - p.alpha + 1e-12


def test_the_whole_profile_runs_from_0_to_where_nothing_is_left() -> None:
    for bend in (0.0, 4.0):
        curve = tradeoff.whole_profile(Gaussian(1.0), points=50, bend=bend)
        epsilons = [b.epsilon for b in curve]
        assert len(curve) == 50
        assert epsilons[0] == 0.0
        assert all(a < b for a, b in itertools.pairwise(epsilons))
        assert curve[-1].upper == pytest.approx(1e-12, rel=1e-6)


@pytest.mark.parametrize(
    ("alphas", "field"),
    [
        ([], "alphas"),
        ([0.5] * 1001, "alphas"),
        ([0.5, 1.5], "alphas[1]"),
        ([-0.1], "alphas[0]"),
        ([math.nan], "alphas[0]"),
        ([True], "alphas[0]"),
    ],
)
def test_a_wrong_alpha_is_named(alphas: list[float], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tradeoff.tradeoff(Gaussian(1.0), alphas)
    assert caught.value.field == field
