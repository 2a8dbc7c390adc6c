"""What each allowance of the contour is for: an adversary uses it up, and the bounds still hold.

A part of the computation is put off by exactly what it may be off by, in the direction that hurts
most. That the same without the allowance is wrong shows that the test would tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from flint import acb, arb

from accounting import bounds, contour, rigorous
from accounting.clock import Clock
from accounting.contour import Complex, Composition, Contour, OutOfTime, _Plan, _Transform
from accounting.mechanisms import ApproximateDPTerm, GaussianTerm, LaplaceTerm, Term
from accounting.rigorous import _bits
from accounting.rounding import U
from tests.accounting.test_contour import DIRECTIONS, IDS, OUTPUTS, integral, output

X = 1.0  # the epsilon that is asked about
TERMS: tuple[Term, ...] = (GaussianTerm(0.05, 0.7, 200), GaussianTerm(1.0, 0.5, 2))
PLAN = _Plan(tilt=3.0, second_tilt=9.0, period=16.0, smoothing=0.0, reach=14.0, lost=0.0)
OFF = 1e-6  # by so much a factor's transform, or its logarithm, is off


def composed(terms: tuple[Term, ...] = TERMS) -> Composition:
    whole = Composition(terms, "remove")
    whole.cut(1e-25)
    return whole


def ends(made: Contour, at: float = X) -> tuple[float, float]:
    """(lower, upper) bounds on delta."""
    here = np.array([at])
    return float(made.lower(here)[0]), float(made.upper(here)[0])


def worst_phases(made: Contour, sign: float, per: Complex | float = 1.0) -> Complex:
    """Directions at the nodes in which a change of what is divided by ``per`` moves the sum most.

    Args:
        sign: -1 lowers the sum, 1 raises it.
    """
    turned = made._up * np.exp(-1j * made.t * X) / per
    found: Complex = sign * np.conj(turned) / np.abs(turned)
    return found


def check(spoil: Callable[[Composition, float, float], Contour], least: float = 1e-5) -> None:
    """Holds what is spoilt with its allowance against the truth, and what has none as well.

    Args:
        spoil: (composition, sign of the harm, 1 with the allowance or 0 without it) -> contour.
        least: by how much, relatively, the harm has to move the bounds to be telling.
    """
    low, high = ends(Contour(composed(), PLAN))
    assert 0.0 < high - low < 1e-6 * high
    assert ends(spoil(composed(), -1.0, 1.0))[1] >= low
    assert ends(spoil(composed(), 1.0, 1.0))[0] <= high
    # The allowance is no larger than it has to be.
    assert ends(spoil(composed(), -1.0, 1.0))[1] <= high + 10.0 * (
        high - ends(spoil(composed(), -1.0, 0.0))[1]
    )
    assert ends(spoil(composed(), -1.0, 0.0))[1] < low * (1.0 - least)
    assert ends(spoil(composed(), 1.0, 0.0))[0] > high * (1.0 + least)


# -- complex arithmetic ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-8, 0.3, 20.0])
def test_complex_functions_are_right_by_their_moduli(size: float) -> None:
    draw = np.random.default_rng(3)
    z = size * (draw.uniform(-1.0, 1.0, 400) + 1j * draw.uniform(-1.0, 1.0, 400))
    w = draw.uniform(-2.0, 2.0, 400) + 1j * draw.uniform(-2.0, 2.0, 400)
    ours = (np.exp(z), np.expm1(z), np.log(1.0 + z), z / w, z * w)
    with _bits(200):
        for i in range(len(z)):
            at, by = (acb(complex(x[i]).real, complex(x[i]).imag) for x in (z, w))
            one = complex(1.0 + z[i])
            exact = (at.exp(), at.exp() - 1, acb(one.real, one.imag).log(), at / by, at * by)
            for found, true in zip(ours, exact, strict=True):
                value = acb(complex(found[i]).real, complex(found[i]).imag)
                assert abs(value - true) <= contour._LIB * abs(true), z[i]


# -- each allowance of the sum ---------------------------------------------------------------------


def test_errors_of_transforms_reach_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum's error: error times kernel. Product's: prod(|phi| + e) - prod |phi|."""
    plain = Contour(composed(), PLAN)

    def spoil(whole: Composition, sign: float, allowed: float) -> Contour:
        (part,) = whole.parts
        right = part.transform

        def wrong(*args: Any) -> _Transform:
            found = right(*args)
            harm = OFF * worst_phases(plain, sign, found.values())
            error = found.error + allowed * OFF
            return replace(found, excess=found.excess + harm, error=error)

        monkeypatch.setattr(part, "transform", wrong)
        return Contour(whole, PLAN)

    check(spoil)


def test_errors_of_logarithms_reach_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, right = Contour(composed(), PLAN), _Transform.log

    def spoil(whole: Composition, sign: float, allowed: float) -> Contour:
        def wrong(self: _Transform) -> tuple[Complex, Any]:
            value, error = right(self)
            return value + OFF * worst_phases(plain, sign), error + allowed * OFF

        with monkeypatch.context() as patch:
            patch.setattr(_Transform, "log", wrong)
            return Contour(whole, PLAN)

    check(spoil)


def test_errors_of_losses_reach_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """They turn the transform the more, the larger t is: the allowance is beta t."""

    def spoil(whole: Composition, sign: float, allowed: float) -> Contour:
        (part,) = whole.parts
        assert isinstance(part, contour._Sampled)
        right = part._weights

        def wrong(*args: Any) -> contour._Rule:
            rule = right(*args)
            per_t = float((rule.weight * np.abs(rule.loss)).sum()) * 1e-4
            loss = rule.loss * (1.0 + 1e-4 * sign)
            return replace(rule, loss=loss, error_per_t=rule.error_per_t + allowed * per_t)

        monkeypatch.setattr(part, "_weights", wrong)
        return Contour(whole, PLAN)

    low, high = ends(Contour(composed(), PLAN))
    for sign in (-1.0, 1.0):
        lower, upper = ends(spoil(composed(), sign, 1.0))
        assert upper >= low
        assert lower <= high
    wrong = [ends(spoil(composed(), sign, 0.0)) for sign in (-1.0, 1.0)]
    assert min(upper for _, upper in wrong) < low
    assert max(lower for lower, _ in wrong) > high


def test_the_error_of_the_factor_in_front_reaches_the_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spoil(whole: Composition, sign: float, allowed: float) -> Contour:
        made = Contour(whole, PLAN)
        right = made._front

        def wrong(epsilon: Any) -> tuple[Any, Any]:
            front, error = right(epsilon)
            return front * (1.0 + 1e-4 * sign), error + allowed * 1.001e-4

        monkeypatch.setattr(made, "_front", wrong)
        return made

    check(spoil)


def test_the_error_of_the_factor_in_front_is_bounded() -> None:
    telling = 0
    for terms, tilt in (
        (TERMS, 3.0),
        ((GaussianTerm(1.0, 3.0, 4), GaussianTerm(0.2, 2.0, 9)), 5.3),
    ):
        made = Contour(composed(terms), replace(PLAN, tilt=tilt, second_tilt=3.0 * tilt))
        x = np.linspace(0.0, 90.0, 40)
        front, error = made._front(x)
        with _bits(200):
            for i, at in enumerate(x.tolist()):
                if front[i] == math.inf:
                    continue
                exact = (arb(made._base) - arb(made._c) * arb(at)).exp()
                gap = abs(arb(float(front[i])) / exact - 1)
                assert gap <= float(error[i])
                telling += float(gap) > 2e-16
                # The base itself is a sum of rounded numbers.
                assert float(error[i]) >= 8.0 * U * (1.0 + made._size)
    assert telling > 10


@pytest.mark.parametrize("count", [1, 7])
def test_the_kernels_and_the_sums_own_rounding_are_allowed_for(count: int) -> None:
    """With nothing else to be off by: unsampled Gaussians, whose transform is one exponential."""
    made = Contour(composed((GaussianTerm(1.0, 0.5, count),)), PLAN)
    fixed, per_epsilon = made._errors[0]
    moduli = float(np.abs(made._up).sum())
    assert fixed >= U * (2 * len(made.t)) * moduli
    assert per_epsilon >= 2.0 * U * float((np.abs(made._up) * made.t).sum())
    assert fixed <= 1e-10 * moduli


# -- one output ------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("term", [OUTPUTS[0], OUTPUTS[4]], ids=[IDS[0], IDS[4]])
def test_what_quadrature_misses_is_in_the_error(
    term: GaussianTerm, direction: contour.Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels so wide that nothing else of the error counts."""
    part = output(term, direction)
    telling = 0
    for pieces, tilt, t in ((2, 1.0, 30.0), (3, 0.5, 100.0), (5, 4.0, 300.0)):
        edges = np.linspace(part._lo, part._hi, pieces + 1)
        edges[1:-1] = np.round(edges[1:-1])

        def wide(tilt: float, t: float, _: float, edges: Any = edges) -> tuple[Any, float]:
            cells = edges[:-1], edges[1:]
            missed = np.logaddexp(
                part._panel_errors(*cells, part._k(tilt), t),
                part._panel_errors(*cells, part._k(0.0), 0.0),
            )
            return edges, float(np.logaddexp.reduce(missed))

        monkeypatch.setattr(part, "_panels", wide)
        found = part.transform(tilt, t, 2)
        k, spin = (-tilt, -t) if direction == "add" else (1.0 + tilt, t)
        ours = complex(found.values()[1])
        with _bits(160):
            true = integral(part, k, spin, part._lo, part._hi) * (-arb(found.scale)).exp()
            gap = float(abs(acb(ours.real, ours.imag) - true))
        assert gap <= found.error[1]
        telling += gap > 1e-10
    assert telling > 0


def test_a_long_transform_ends_with_its_time() -> None:
    part = output(GaussianTerm(0.01, 1.0, 1), "remove")
    clock = Clock(-1.0)
    with pytest.raises(OutOfTime):
        part.transform(3.0, 0.1, 30, clock)
    assert clock.ran_out


# -- marks and splits ------------------------------------------------------------------------------

FEW: list[tuple[Term, ...]] = [
    (GaussianTerm(1e-3, 2.0, 30),),
    (GaussianTerm(0.02, 1.5, 4), LaplaceTerm(0.1, 2)),
]


def proven(terms: tuple[Term, ...], at: float) -> tuple[float, float]:
    """delta in the remove direction: a narrow bracket."""
    low, high, _ = contour._deltas(
        Composition(terms, "remove"), np.array([at]), np.zeros(1), np.ones(1), np.zeros(1)
    )
    assert high[0] - low[0] <= 3e-3 * high[0]
    return float(low[0]), float(high[0])


@pytest.mark.parametrize("terms", FEW, ids=repr)
def test_what_is_not_marked_counts_in_the_upper_bound(terms: tuple[Term, ...]) -> None:
    """Marks set so far out that a good part of delta comes without one."""
    at = 0.5
    low, high = proven(terms, at)
    telling = 0
    for further in (1.5, 3.0, 6.0):
        whole = Composition(terms, "remove")
        whole.cut(1e-30)
        assert whole.mark(further, 0.0, 1.4)
        plan = _Plan(1.0, 2.5, 30.0, 0.02, 400.0, 0.0, marked=True)
        made = Contour(whole, plan)
        lower, upper = ends(made, at)
        assert lower <= high
        assert upper >= low
        made._unmarked = (0.0, -math.inf)
        telling += ends(made, at)[1] < 0.9 * low
    assert telling > 0


@pytest.mark.parametrize("terms", FEW, ids=repr)
def test_marked_sums_of_any_length_are_valid(terms: tuple[Term, ...]) -> None:
    at = 0.5
    low, high = proven(terms, at)
    short = 0
    for sharpness in (0.7, 1.4, 2.8):
        whole = Composition(terms, "remove")
        whole.cut(1e-30)
        if not whole.mark(at, math.log(0.1 * high), sharpness):
            continue
        for reach in np.geomspace(0.5, 60.0, 30).tolist():
            plan = _Plan(1.0, 2.5, 30.0, 1e-4, reach, 0.0, marked=True)
            lower, upper = ends(Contour(whole, plan), at)
            assert lower <= high, reach
            assert upper >= low, reach
            short += upper > 1.01 * high
    assert short > 5


def test_errors_of_marked_transforms_reach_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    (terms, *_) = FEW
    at, off = 0.5, 1e-5
    low, high = proven(terms, at)

    def made(shift: Complex | float, allowed: float) -> Contour:
        whole = Composition(terms, "remove")
        whole.cut(1e-30)
        assert whole.mark(at, math.log(0.1 * high), 2.8)
        (mark,) = whole.marks
        assert mark is not None
        right = mark.transform

        def wrong(*args: Any) -> _Transform:
            found = right(*args)
            return replace(found, excess=found.excess + shift, error=found.error + allowed)

        monkeypatch.setattr(mark, "transform", wrong)
        return Contour(whole, _Plan(1.0, 2.5, 30.0, 0.0, 200.0, 0.0, marked=True))

    plain = made(0.0, 0.0)
    slope = (made(off, 0.0)._up - plain._up) * np.exp(-1j * plain.t * at)
    harm = off * np.conj(slope) / np.abs(slope)
    assert ends(made(-harm, off), at)[1] >= low
    assert ends(made(harm, off), at)[0] <= high
    assert ends(made(-harm, 0.0), at)[1] < 0.99 * low
    assert ends(made(harm, 0.0), at)[0] > 1.01 * high


def test_what_is_marked_decays_as_claimed() -> None:
    """|Psi - Psi_unmarked| beyond the last node, against the same at the nodes of a longer sum."""
    (terms, *_) = FEW
    whole = Composition(terms, "remove")
    whole.cut(1e-30)
    assert whole.mark(0.5, math.log(1e-8), 1.4)
    long = Contour(whole, _Plan(1.0, 2.5, 30.0, 0.0, 80.0, 0.0, marked=True))
    step = float(long.t[1])
    terms_of = np.abs(long._up)
    for reach in (5.0, 15.0, 30.0, 50.0):
        short = Contour(whole, _Plan(1.0, 2.5, 30.0, 0.0, reach, 0.0, marked=True))
        assert float(short.t[1]) == step
        rest = float(terms_of[len(short.t) :].sum())
        assert rest <= short._truncation[0] * (1.0 + 1e-6)


@pytest.mark.parametrize("terms", FEW, ids=repr)
def test_falling_below_after_a_large_loss_counts(terms: tuple[Term, ...]) -> None:
    """Losses set apart that are so small that the others often undo them."""
    at = 0.5
    low, high = proven(terms, at)
    telling = 0
    for cap in (0.2, 0.35, 0.5, 0.6, 0.8):
        whole = Composition(terms, "remove")
        whole.fall_tilt = 1.0
        whole.cut(1e-30, cap)
        if not whole.capped:
            continue
        made = Contour(whole, _Plan(1.0, 2.5, 30.0, 0.005, 900.0, 0.0))
        lower, upper = ends(made, at)
        assert lower <= high
        assert upper >= low, cap
        made._large_below_sum = 0.0
        telling += ends(made, at)[1] < 0.95 * low
    assert telling > 0


# -- where rounding decides ------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [1e-12, 1e-25])
def test_rounding_that_decides_is_allowed_for(delta: float) -> None:
    """A width that rounding does not let it reach, where the answer is a sum of few numbers."""
    count, rate = 3_000, "0.01"
    terms = (ApproximateDPTerm(Decimal(rate), Decimal(0), count),)
    found, _ = contour.epsilon_of(terms, delta, lambda _: 1e-9, Clock(20.0))
    with _bits(300):
        e0 = arb(rate)
        lie = 1 / (1 + e0.exp())
        pmf = [(1 - lie) ** count]
        for k in range(count):
            pmf.append(pmf[-1] * (count - k) / (k + 1) * lie / (1 - lie))
        for x, sign in ((found.upper, 1), (found.lower, -1)):
            exact = arb(0)
            for k in range(count + 1):
                gain = -(arb(x) - (count - 2 * k) * e0).expm1()
                if not gain > 0:
                    break
                exact += pmf[k] * gain
            assert sign * (exact - delta) <= 0
    assert found.upper - found.lower <= 1e-3 * found.upper


# -- at the ends of double precision ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "delta"),
    [
        (
            (
                GaussianTerm(5.351457849093232e-06, 0.0015884543670604027, 1),
                GaussianTerm(3.4264199648823276e-16, 2.2257877366411023, 1),
            ),
            8.071086874439357e-30,
        ),
        (
            (
                GaussianTerm(0.9999999999999999, 22.301671341524003, 1),
                GaussianTerm(0.9999999999998795, 0.061143089429996494, 1),
            ),
            3.247810159967498e-24,
        ),
    ],
    ids=["far", "near-one"],
)
def test_what_leaves_double_precision_warns_nobody(terms: tuple[Term, ...], delta: float) -> None:
    found = bounds._epsilon(terms, delta, bounds._default_tolerance, Clock(20.0))
    assert 0.0 <= found.lower <= found.upper < math.inf
    exact = rigorous.delta_enclosure(list(terms), found.upper, width=1e-2, seconds=1.0)
    assert exact[0] <= delta


def test_a_root_is_looked_for_within_double_precision() -> None:
    asked = []

    def never(x: float) -> float:
        asked.append(x)
        return 1.0

    assert contour._root(never, 1e-9, 1.0, 1e-300) <= contour._FARTHEST
    assert max(asked) <= contour._FARTHEST


def test_a_lower_bound_that_is_not_a_number_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Contour(composed(), PLAN)
    monkeypatch.setattr(made, "_alias", lambda epsilon: np.full_like(epsilon, math.nan))
    assert made.lower(np.array([X]))[0] == -math.inf


def test_a_transform_that_its_error_hides_has_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is divided by is a lower bound on phi(c): there may be none above 0."""
    (terms, *_) = FEW
    whole = Composition(terms, "remove")
    whole.cut(1e-30)
    assert whole.mark(0.5, math.log(1e-5), 2.8)
    (part,) = whole.parts
    right = part.transform

    def hidden(*args: Any) -> _Transform:
        found = right(*args)
        return replace(found, error=found.error + 1.1 * abs(complex(found.values()[0])))

    monkeypatch.setattr(part, "transform", hidden)
    with pytest.raises(contour.OutOfReach):
        Contour(whole, _Plan(1.0, 2.5, 30.0, 0.0, 200.0, 0.0, marked=True))
