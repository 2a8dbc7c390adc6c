"""Closed forms against the same formulas in ball arithmetic, and against sums done by hand."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from flint import arb, fmpq
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from accounting import gaussian_dp
from accounting.closed_forms import (
    MAX_SUMS,
    delta_bounds,
    epsilon_bounds,
    least_delta,
    least_epsilon,
    top_bounds,
)
from accounting.mechanisms import ApproximateDPTerm, GaussianTerm, LaplaceTerm, Term
from accounting.rigorous import _bits

Ball = Any
BITS = 400


def response(epsilon: str, count: int = 1) -> ApproximateDPTerm:
    return ApproximateDPTerm(Decimal(epsilon), Decimal(0), count)


def tail(x: Ball) -> Ball:
    """P(Z > x)."""
    return (x / arb(2).sqrt()).erfc() / 2


def one_sampled(q: float, mu: float, epsilon: Ball) -> Ball:
    """P(Q > e^eps P) from the threshold on z, remove direction, with no gaussian curve in it."""
    q_, mu_ = arb(q), arb(mu)
    z = ((epsilon.exp() - 1 + q_) / q_).log() / mu_ + mu_ / 2
    return (1 - q_) * tail(z) + q_ * tail(z - mu_) - epsilon.exp() * tail(z)


def responses(epsilon: Decimal, count: int, at: Ball) -> Ball:
    """Over the number of lies, in ball arithmetic."""
    ratio = Fraction(epsilon)
    one = arb(fmpq(ratio.numerator, ratio.denominator))
    lie = 1 / (1 + one.exp())
    total = arb(0)
    for k in range(count + 1):
        gain = -(at - (count - 2 * k) * one).expm1()
        if gain > 0:
            total += math.comb(count, k) * lie**k * (1 - lie) ** (count - k) * gain
    return total


def holds(low: float, high: float, exact: Ball, width: float) -> bool:
    """The bounds hold the ball, and are no further apart than that."""
    return bool(arb(low) <= exact <= arb(high)) and high - low <= width * high


# -- one sampled Gaussian --------------------------------------------------------------------------

RATES = (1e-9, 1e-4, 0.01, 0.3, 0.9, 1 - 1e-9)


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 7.0, 40.0])
@pytest.mark.parametrize("q", RATES)
def test_one_sampled_gaussian(q: float, mu: float) -> None:
    term = (GaussianTerm(q, mu, 1),)
    with _bits(BITS):
        for delta in (1.01e-2, 1e-5, 1e-12, 1e-30, 1e-100):
            found = epsilon_bounds(term, delta)
            assert found is not None
            assert (found.direction, found.method) == ("remove", "closed_form")
            assert one_sampled(q, mu, arb(found.upper)) <= delta
            if found.lower > 0.0:
                assert one_sampled(q, mu, arb(found.lower)) >= delta
                assert found.upper - found.lower <= 1e-9 * found.upper
            else:
                assert found.upper <= 1e-12


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 7.0, 40.0])
@pytest.mark.parametrize("q", RATES)
def test_delta_of_one_sampled_gaussian(q: float, mu: float) -> None:
    term = (GaussianTerm(q, mu, 1),)
    at = epsilon_bounds(term, 1e-20)
    assert at is not None
    with _bits(BITS):
        for share in (0.0, 0.01, 0.3, 1.0):
            epsilon = share * at.upper
            found = delta_bounds(term, epsilon)
            assert found is not None
            assert holds(found.lower, found.upper, one_sampled(q, mu, arb(epsilon)), 1e-7)


@pytest.mark.parametrize("q", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("mu", [0.2, 1.0, 5.0])
def test_the_remove_direction_is_the_worse_one(q: float, mu: float) -> None:
    """P(Z < z) - e^eps Q(Z < z), where the likelihood ratio falls below e^-eps."""
    with _bits(BITS):
        q_, mu_ = arb(q), arb(mu)
        for epsilon in (0.0, 0.01, 0.1, 1.0, 4.0):
            inner = ((-arb(epsilon)).exp() - 1 + q_) / q_
            other = arb(0)
            if inner > 0:
                z = inner.log() / mu_ + mu_ / 2
                below = tail(-z)
                other = below - arb(epsilon).exp() * ((1 - q_) * below + q_ * tail(mu_ - z))
            if epsilon == 0.0:  # both are the total variation distance
                assert other.overlaps(one_sampled(q, mu, arb(epsilon)))
            else:
                assert other <= one_sampled(q, mu, arb(epsilon))


@given(
    st.floats(-12, -1e-6).map(lambda x: 10.0**x),
    st.floats(-3, 1.5).map(lambda x: 10.0**x),
    st.floats(-60, -0.1).map(lambda x: 10.0**x),
)
@settings(max_examples=150, deadline=None)
def test_any_sampled_gaussian(q: float, mu: float, delta: float) -> None:
    # At delta = q, to rounding, and a large mu epsilon is 0 or large.
    assume(abs(delta / q - 1.0) > 1e-12)
    found = epsilon_bounds((GaussianTerm(q, mu, 1),), delta)
    assert found is not None
    assert 0.0 <= found.lower <= found.upper < math.inf
    with _bits(BITS):
        assert one_sampled(q, mu, arb(found.upper)) <= delta
        if found.lower > 0.0:
            assert one_sampled(q, mu, arb(found.lower)) >= delta
    assert found.upper - found.lower <= max(1e-8 * found.upper, 1e-11)


# -- Laplace ---------------------------------------------------------------------------------------


@given(
    st.floats(-5, 2).map(lambda x: 10.0**x),
    st.floats(-15, -1e-3).map(lambda x: 10.0**x),
    st.floats(0, 1.2),
)
@settings(max_examples=150, deadline=None)
def test_one_laplace(rate: float, delta: float, share: float) -> None:
    term = (LaplaceTerm(rate, 1),)
    found, at = epsilon_bounds(term, delta), delta_bounds(term, share * rate)
    assert found is not None
    assert at is not None
    with _bits(BITS):
        exact = arb(rate) + 2 * (1 - arb(delta)).log()
        exact = exact if exact > 0 else arb(0)
        assert arb(found.lower) <= exact <= arb(found.upper)
        curve = -((arb(share * rate) - arb(rate)) / 2).expm1()
        curve = curve if curve > 0 else arb(0)
        assert arb(at.lower) <= curve <= arb(at.upper)
    assert found.upper - found.lower <= 1e-13 * (rate + 2.0 * abs(math.log1p(-delta)))
    assert at.upper - at.lower <= 1e-13 * (1.0 + rate)


# -- responses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0.01", "0.3", "1", "2.5", "40"])
@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_responses_by_every_sequence_of_answers(text: str, count: int) -> None:
    """2^count sequences, each with its probability under both: no binomials."""
    epsilon = float(text)
    truth, lie = (1.0 / (1.0 + math.exp(s * epsilon)) for s in (-1, 1))
    for at in (0.0, 0.4 * epsilon, epsilon, 1.7 * epsilon):
        total = 0.0
        for answers in itertools.product((False, True), repeat=count):
            under_p = math.prod(lie if a else truth for a in answers)
            under_q = math.prod(truth if a else lie for a in answers)
            total += max(0.0, under_p - math.exp(at) * under_q)
        found = delta_bounds((response(text, count),), at)
        assert found is not None
        assert found.lower <= total * (1 + 1e-9) + 1e-15
        assert total * (1 - 1e-9) - 1e-15 <= found.upper


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0.1", 1),
        ("0.1", 50),
        ("0.0123456789", 700),
        ("1.5", 30),
        ("9", 4),
        ("0.02", MAX_SUMS - 1),
    ],
)
def test_responses_in_ball_arithmetic(text: str, count: int) -> None:
    term = response(text, count)
    with _bits(BITS):
        for delta in (1e-2, 1e-6, 1e-12, 1e-40):
            found = epsilon_bounds((term,), delta)
            assert found is not None
            assert (found.direction, found.method) == ("both", "randomized_response")
            assert responses(term.epsilon, count, arb(found.upper)) <= delta
            if found.lower > 0.0:
                assert responses(term.epsilon, count, arb(found.lower)) >= delta
            assert found.upper - found.lower <= 1e-7 * found.upper
        for share in (0.0, 0.1, 0.5, 0.999):
            epsilon = share * count * float(text)
            at = delta_bounds((term,), epsilon)
            assert at is not None
            exact = responses(term.epsilon, count, arb(epsilon))
            assert arb(at.lower) <= exact <= arb(at.upper)
            assert at.upper - at.lower <= 1e-7 * at.upper + 1e-300


def test_responses_end_where_their_losses_do() -> None:
    found = delta_bounds((response("0.25", 8),), 2.0000001)
    assert found is not None
    assert (found.lower, found.upper) == (0.0, 0.0)
    # with the least delta the answer is all losses at once
    most = epsilon_bounds((response("0.25", 8),), 1e-300)
    assert most is not None
    assert most.lower <= 2.0 <= most.upper <= 2.0 * (1 + 1e-12)


# -- which questions have one ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "terms",
    [
        (GaussianTerm(0.1, 1.0, 2),),
        (LaplaceTerm(1.0, 2),),
        (response("0.1", MAX_SUMS),),
        (GaussianTerm(0.1, 1.0, 1), LaplaceTerm(1.0, 1)),
    ],
    ids=repr,
)
def test_others_have_no_closed_form(terms: tuple[Term, ...]) -> None:
    assert epsilon_bounds(terms, 1e-5) is None
    assert delta_bounds(terms, 1.0) is None


def test_the_worst_sub_composition_bounds_from_below() -> None:
    terms: tuple[Term, ...] = (
        GaussianTerm(0.01, 1.0, 50),
        GaussianTerm(1.0, 0.01, 4),
        LaplaceTerm(0.7, 2),
    )
    found = least_epsilon(terms, 1e-5)
    (top, _) = top_bounds([LaplaceTerm(0.7, 2)], 1e-5) or (0.0, 0.0)
    assert found == top == pytest.approx(1.4, abs=1e-3)
    assert 0.0 < least_epsilon(terms[:1], 1e-5) < found
    alone = epsilon_bounds((GaussianTerm(0.01, 1.0, 1),), 1e-5)
    assert alone is not None
    assert least_epsilon(terms[:1], 1e-5) == alone.lower
    mu = gaussian_dp.epsilon_bounds((3.0, 3.0), 1e-5)
    assert least_epsilon((GaussianTerm(1.0, 1.0, 9),), 1e-5) == pytest.approx(mu[0], rel=1e-12)


@pytest.mark.parametrize(
    ("terms", "some"),
    [
        ((GaussianTerm(1.0, 0.3, 4), GaussianTerm(0.2, 0.5, 2)), (GaussianTerm(1.0, 0.3, 4),)),
        ((response("0.5", 3), LaplaceTerm(0.1, 2)), (response("0.5", 3),)),
        ((GaussianTerm(0.2, 0.5, 2), GaussianTerm(0.1, 3.0, 7)), (GaussianTerm(0.1, 3.0, 1),)),
        ((LaplaceTerm(100.0, 1000),), (LaplaceTerm(100.0, 1),)),
    ],
    ids=repr,
)
def test_sub_compositions_bound_delta_from_below(
    terms: tuple[Term, ...], some: tuple[Term, ...]
) -> None:
    for epsilon in (0.0, 0.3, 1.0):
        exact = delta_bounds(some, epsilon)
        assert exact is not None
        assert least_delta(terms, epsilon) == exact.lower
