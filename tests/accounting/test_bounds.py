"""Brackets: published values, exact answers, consistency, refused questions and limits."""

from __future__ import annotations

import csv
import itertools
import json
import math
import subprocess
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_ndtr

import accounting
from accounting import (
    bounds,
    closed_forms,
    contour,
    cumulants,
    gaussian_dp,
    mechanism_from_json,
    reference,
    rigorous,
)
from accounting.bounds import Bracket, DeltaBracket, Limits
from accounting.clock import Clock
from accounting.errors import InvalidRequest
from accounting.mechanisms import (
    ApproximateDPTerm,
    ClassShare,
    DenoisingBlock,
    EdmSchedule,
    GaussianTerm,
    LaplaceTerm,
    Term,
    dominating_terms,
)

GOLDEN = Path(__file__).parent.parent / "golden"
ROOT = Path(accounting.__file__).parent.parent
EDM = {"kind": "edm", "sigma_min": 0.002, "sigma_max": 80, "rho": 7, "steps": 39}


def rows(name: str) -> list[dict[str, str]]:
    with (GOLDEN / name).open(newline="") as source:
        return list(csv.DictReader(source))


BLOCKS = {r["case"]: r for r in rows("accounting.csv")}
REPORTS = {r["case"]: r for r in rows("public_reports.csv")}


def subsampled(q: float, noise_multiplier: float, count: int, sampling: str = "poisson") -> Any:
    return mechanism_from_json(
        {
            "kind": "subsampled_gaussian",
            "sampling_probability": q,
            "noise_multiplier": noise_multiplier,
            "count": count,
            "sampling": sampling,
        }
    )


def simple(kind: str, **values: float) -> Any:
    return mechanism_from_json({"kind": kind} | values)


def gaussian(noise_multiplier: float, count: int = 1) -> Any:
    return simple("gaussian", noise_multiplier=noise_multiplier, count=count)


def laplace(noise_multiplier: float, count: int = 1) -> Any:
    return simple("laplace", noise_multiplier=noise_multiplier, count=count)


def response(epsilon: float, count: int = 1) -> Any:
    return simple("randomized_response", epsilon=epsilon, count=count)


def declared(epsilon: float, delta: float = 0.0, count: int = 1) -> Any:
    return simple("approximate_dp", epsilon=epsilon, delta=delta, count=count)


def composition(*parts: Any) -> Any:
    return mechanism_from_json(
        {"kind": "composition", "parts": [{"mechanism": p.to_json()} for p in parts]}
    )


def published(case: str) -> Any:
    row = BLOCKS[case]
    return subsampled(
        int(row["B"]) / int(row["n"]),
        1.0 / float(row["mu_bar"]),
        int(row["outputs"]),
        "fixed_size",
    )


def reported(case: str) -> tuple[Any, float]:
    row = REPORTS[case]
    return (
        subsampled(float(row["q"]), float(row["noise_multiplier"]), int(row["count"])),
        float(row["delta"]),
    )


def between(text: str) -> tuple[float, float]:
    """The two numbers of "[a;b]..." or "a:b"."""
    a, b = text.partition("]")[0].lstrip("[").replace(";", ":").split(":")
    return float(a), float(b)


def is_tight(b: Bracket) -> bool:
    return b.upper - b.lower <= min(1e-3, 1e-3 * b.lower)


def overlap(a: Bracket | DeltaBracket, b: Bracket | DeltaBracket) -> bool:
    return a.lower <= b.upper and b.lower <= a.upper


@pytest.fixture(autouse=True)
def _no_kept_answers() -> None:
    bounds._CACHE.clear()


# -- the closed form of the Gaussian ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise_multiplier", "count", "delta", "expected"),
    [
        (1.0, 1, 1e-20, 9.51094),
        (243.785, 1, 1e-5, 0.01),  # public report "calibrate-memory"
        (4.22468, 1, 1e-6, 1.0),  # public report "calibrate-overshoot"
        (2.0, 4, 1e-20, 9.51094),  # four at half the parameter are one at the whole
    ],
)
def test_unsampled_gaussians(
    noise_multiplier: float, count: int, delta: float, expected: float
) -> None:
    found = accounting.epsilon(gaussian(noise_multiplier, count), delta)
    assert found.method == "gaussian_dp_closed_form"
    assert found.direction == "both"
    assert found.lower <= found.upper <= found.lower * (1 + 1e-10)
    assert found.upper == pytest.approx(expected, rel=3e-6)


@given(st.floats(-8, 2.5).map(lambda x: 10.0**x), st.floats(-300, -1e-3).map(lambda x: 10.0**x))
@settings(max_examples=150, deadline=None)
def test_closed_form_meets_its_delta_from_both_sides(mu: float, delta: float) -> None:
    lower, upper = gaussian_dp.epsilon_bounds((mu, mu), delta)
    assert 0.0 <= lower <= upper <= max(lower * (1 + 1e-5), 1e-12 * mu)
    # the delta at the upper end is not above delta, at the lower end not below
    assert gaussian_dp.delta_bounds((mu, mu), upper)[0] <= delta
    if lower > 0.0:
        assert gaussian_dp.delta_bounds((mu, mu), lower)[1] >= delta
    # the textbook form, where it neither cancels nor underflows
    if mu > 0.05 and 1e-250 < delta < 0.05 and upper > 0.0:
        a = float(log_ndtr(-upper / mu + mu / 2))
        b = upper + float(log_ndtr(-upper / mu - mu / 2))
        assert a + math.log1p(-math.exp(b - a)) == pytest.approx(math.log(delta), rel=1e-6)


@pytest.mark.parametrize("noise_multiplier", [1e-100, 1e-50, 1e50, 1e100])
@pytest.mark.parametrize("delta", [1e-300, 1e-5, 1 - 2.0**-53])
def test_closed_form_at_the_ends_of_double_precision(noise_multiplier: float, delta: float) -> None:
    found = accounting.epsilon(gaussian(noise_multiplier), delta)
    assert 0.0 <= found.lower <= found.upper < math.inf
    at = accounting.delta(gaussian(noise_multiplier), 1.0)
    assert 0.0 <= at.lower <= at.upper <= 1.0


def test_delta_of_unsampled_gaussians() -> None:
    found = accounting.delta(gaussian(1.0), 0.0)
    exact = math.erf(1.0 / (2.0 * math.sqrt(2.0)))
    assert found.lower <= exact <= found.upper <= found.lower * (1 + 1e-12)


# -- published and measured values -----------------------------------------------------------------


@pytest.mark.parametrize("case", BLOCKS)
def test_published_uppers(case: str) -> None:
    """Within one unit of the third decimal, the paper's last one; ours are narrower than that."""
    delta = float(BLOCKS[case]["delta"])
    found = accounting.epsilon(published(case), delta, tolerance=1e-4)
    assert found.upper - found.lower <= 1e-4
    assert found.upper == pytest.approx(float(BLOCKS[case]["paper_pld_upper"]), abs=1e-3)
    assert found.method == "contour"
    assert found.direction == "remove"


@pytest.mark.parametrize("case", BLOCKS)
def test_published_rows_are_tight_without_being_asked(case: str) -> None:
    found = accounting.epsilon(published(case), float(BLOCKS[case]["delta"]))
    assert is_tight(found)
    assert not found.reason


@pytest.mark.parametrize("case", [c for c, r in BLOCKS.items() if r["paper_pld_lower"]])
def test_published_lowers_are_below_ours(case: str) -> None:
    printed = float(BLOCKS[case]["paper_pld_lower"])
    assert printed - 5e-4 <= accounting.epsilon(published(case), float(BLOCKS[case]["delta"])).lower


@pytest.mark.parametrize(
    "row",
    [r for r in rows("other_methods.csv") if r["quantity"] in ("bracket", "epsilon")],
    ids=lambda r: f"{r['case']}-{r['delta']}",
)
def test_measured_brackets(row: dict[str, str]) -> None:
    """The other quantities of this table are tested with the methods that they belong to."""
    if row["quantity"] == "bracket":
        found = accounting.epsilon(published(row["case"]), float(row["delta"]))
        low, high = between(row["value"])
        assert low <= found.lower <= found.upper <= high
    else:
        found = accounting.epsilon(gaussian(1.0), float(row["delta"]))
        assert found.upper == pytest.approx(float(row["value"]), abs=5e-6)
        assert found.upper - found.lower <= 1e-9


@pytest.mark.parametrize("case", ["tiny-delta", "wide-range", "overflow", "rdp-vs-tight"])
def test_reported_brackets(case: str) -> None:
    m, delta = reported(case)
    found = accounting.epsilon(m, delta)
    low, high = between(REPORTS[case]["expected"])
    assert low <= found.lower <= found.upper <= high
    assert is_tight(found)
    if case == "rdp-vs-tight":
        assert cumulants.renyi_epsilon(m, delta) > found.upper + 0.1


def test_report_of_a_large_epsilon() -> None:
    """Six digits of noise multiplier are 0.004 of epsilon: 108.443 belongs to unrounded ones."""
    m, delta = reported("eps-above-10")
    found = accounting.epsilon(m, delta)
    assert rigorous.confirm_upper(m, 108.4473, delta) is True
    assert rigorous.confirm_upper(m, 108.4471, delta) is False
    assert 108.4471 < found.lower <= found.upper < 108.4473
    assert found.upper == pytest.approx(float(REPORTS["eps-above-10"]["expected"]), abs=5e-3)


def test_report_of_a_zero() -> None:
    m, delta = reported("zero-is-right")
    found = accounting.epsilon(m, delta)
    assert (found.lower, found.upper) == (0.0, 0.0)
    at_zero = accounting.delta(m, 0.0)
    assert at_zero.lower <= at_zero.upper <= at_zero.lower * (1 + 1e-9)
    assert at_zero.upper == pytest.approx(4.02e-4, abs=5e-7)


def test_report_of_a_hang() -> None:
    m, delta = reported("hang-large-eps")
    found = accounting.epsilon(m, delta)
    assert 900.0 < found.lower <= found.upper < 1010.0
    assert is_tight(found)


@pytest.mark.parametrize("case", ["calibrate-memory", "calibrate-overshoot"])
def test_reported_calibrations(case: str) -> None:
    from accounting.calibrate import calibrate

    delta, epsilon = (float(x) for x in REPORTS[case]["delta"].split(" at epsilon "))
    found = calibrate(gaussian(1.0), "noise_multiplier", epsilon=epsilon, delta=delta)
    printed = REPORTS[case]["expected"].removeprefix("sigma ").partition(",")[0]
    assert found.parameter == pytest.approx(float(printed), rel=3e-6)
    assert found.bracket.upper <= epsilon
    assert accounting.epsilon(found.mechanism, delta).upper <= epsilon


def test_every_report_has_a_test() -> None:
    """ "exact-fit" is a ledger's: test_declared_releases_fit_a_few_large_budget."""
    assert set(REPORTS) == {
        "tiny-delta", "wide-range", "overflow", "rdp-vs-tight", "eps-above-10", "zero-is-right",
        "hang-large-eps", "calibrate-memory", "calibrate-overshoot", "exact-fit",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("percent", "sampling", "expected"),
    [
        (55, "poisson", "0.126"),
        (62, "poisson", "0.353"),
        (65, "poisson", "0.569"),
        (67, "poisson", "1.17"),
        (70, "poisson", "4.61"),
        (55, "fixed_size", "0.299"),
        (62, "fixed_size", "1.69"),
        (65, "fixed_size", "6.29"),
        (67, "fixed_size", "25.7"),
        (70, "fixed_size", "108.4"),
    ],
)
def test_blocks_by_the_way_they_are_drawn(percent: int, sampling: str, expected: str) -> None:
    m = mechanism_from_json(
        {
            "kind": "denoising_block",
            "schedule": EDM,
            "block_fraction": percent / 100,
            "sampling": sampling,
            "subsample_size": 25,
            "public_size": 50000,
            "clip_norm": 12.5,
            "outputs": 50000,
        }
    )
    found = accounting.epsilon(m, 1e-5)
    # printed to three digits, certified with coarser steps
    half = 0.5 * 10.0 ** -len(expected.partition(".")[2])
    assert abs(found.upper - float(expected)) <= max(half, 2e-3 * float(expected))
    assert is_tight(found)


def test_a_class_conditional_block_is_its_worst_class() -> None:
    def block(classes: list[dict[str, float]]) -> Any:
        return mechanism_from_json(
            {
                "kind": "denoising_block",
                "schedule": EDM,
                "block_steps": 22,
                "subsample_size": 3,
                "clip_norm": 4.0,
                "classes": classes,
            }
        )

    many = {"label": 0, "outputs": 30, "sampling_probability": 0.002}
    dense = {"label": 1, "outputs": 10, "sampling_probability": 0.02}
    assert len(dominating_terms(block([many, dense]))) == 2
    both = accounting.epsilon(block([many, dense]), 1e-5)
    alone = [accounting.epsilon(block([c]), 1e-5) for c in (many, dense)]
    assert both.upper == max(a.upper for a in alone)
    assert both.lower == max(a.lower for a in alone)
    assert alone[0].upper != alone[1].upper


# -- answers known exactly -------------------------------------------------------------------------


def contour_alone(*terms: Term, delta: float) -> contour.Found:
    """The contour's bounds even where a closed form exists."""
    found, _ = contour.epsilon_of(terms, delta, lambda e: 1e-3 * e, Clock(60.0))
    return found


SINGLE: list[Term] = [
    *(GaussianTerm(q, mu, 1) for q in (1e-3, 0.2, 0.9, 1 - 1e-6) for mu in (0.1, 1.0, 6.0)),
    LaplaceTerm(0.5, 1),
    LaplaceTerm(3.0, 1),
    ApproximateDPTerm(Decimal("0.5"), Decimal(0), 1),
    ApproximateDPTerm(Decimal("0.3"), Decimal(0), 40),
    ApproximateDPTerm(Decimal("1.7"), Decimal(0), 7),
]


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-11])
@pytest.mark.parametrize("term", SINGLE, ids=repr)
def test_the_contour_meets_the_closed_forms(term: Term, delta: float) -> None:
    exact = closed_forms.epsilon_bounds((term,), delta)
    assert exact is not None
    found = contour_alone(term, delta=delta)
    assert found.lower <= exact.upper
    assert exact.lower <= found.upper


@pytest.mark.parametrize("term", SINGLE, ids=repr)
def test_the_contours_curve_meets_the_closed_forms(term: Term) -> None:
    most = closed_forms.epsilon_bounds((term,), 1e-12)
    assert most is not None
    points = np.linspace(0.0, most.upper, 4)
    low, high, _, _ = contour.delta_of((term,), points, Clock(60.0))
    for i, x in enumerate(points):
        exact = closed_forms.delta_bounds((term,), float(x))
        assert exact is not None
        assert low[i] <= exact.upper
        assert exact.lower <= high[i]


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_a_rate_towards_one_is_the_whole_gaussian(count: int) -> None:
    exact = accounting.epsilon(gaussian(2.0, count), 1e-6)
    last = math.inf
    for q in (0.9, 0.999, 1 - 1e-6, 1 - 1e-9, math.nextafter(1.0, 0.0)):
        found = accounting.epsilon(subsampled(q, 2.0, count), 1e-6)
        assert found.lower <= exact.upper
        gap = exact.upper - found.lower
        assert gap <= last
        last = gap + 1e-3
    assert found.upper >= exact.lower * (1 - 1e-9)
    assert found.upper - found.lower <= 1e-3
    same = accounting.epsilon(subsampled(1.0, 2.0, count), 1e-6)
    assert (same.lower, same.upper) == (exact.lower, exact.upper)


@pytest.mark.parametrize(
    "m",
    [
        subsampled(0.01, 1.0, 100),
        subsampled(0.3, 5.0, 3),
        laplace(20.0, 5),
        response(0.01, 9),
        composition(subsampled(0.01, 2.0, 10), gaussian(80.0), laplace(50.0)),
    ],
    ids=repr,
)
def test_a_delta_of_at_least_delta_at_zero_has_epsilon_zero(m: Any) -> None:
    at_zero = accounting.delta(m, 0.0)
    assert at_zero.upper <= 1.01 * at_zero.lower or at_zero.reason
    found = accounting.epsilon(m, 1.02 * at_zero.upper)
    assert (found.lower, found.upper) == (0.0, 0.0)
    assert accounting.epsilon(m, 0.9).upper == 0.0
    assert accounting.epsilon(m, 0.9 * at_zero.lower).upper > 0.0


@pytest.mark.parametrize(("q", "count"), [(0.3, 2), (0.01, 20), (1e-3, 500)])
def test_adding_never_reveals_more_than_every_absence(q: float, count: int) -> None:
    """epsilon beyond -N log(1 - q) has delta 0 in the add direction, and remove alone counts."""
    terms = (GaussianTerm(q, 1.0, count),)
    most = -count * math.log1p(-q)
    assert most <= contour.Composition(terms, "add").largest <= most * (1 + 1e-12)
    points = np.array([0.5 * most, 0.999 * most, 1.001 * most, 3.0 * most])
    low, high, names, _ = contour.delta_of(terms, points, Clock(60.0))
    assert names[2:] == ["remove", "remove"]
    for i, x in enumerate(points.tolist()):
        exact = rigorous.delta_enclosure(list(terms), x)
        assert exact[0] <= high[i]
        assert low[i] <= exact[1]


def test_near_one_the_add_direction_is_counted() -> None:
    """The left tail of the noise carries it: a window cut at -8.2 loses a quarter at 1e-16."""
    terms = (GaussianTerm(0.9999, 1.0, 1), GaussianTerm(0.9999, 1e-3, 1))
    for delta in (1e-9, 1e-16):
        found, _ = contour.epsilon_of(terms, delta, lambda e: 1e-3 * e, Clock(60.0))
        upper = rigorous.delta_enclosure(list(terms), found.upper, width=1e-2)
        assert upper[0] <= delta
        lower = rigorous.delta_enclosure(list(terms), found.lower, width=1e-2)
        assert delta <= lower[1]
        assert upper[1] < 2.0 * upper[0]


# -- declared parts --------------------------------------------------------------------------------


def test_a_declared_mechanism_is_what_it_was_declared() -> None:
    found = accounting.epsilon(declared(0.9, 1e-6), 1e-6)
    # binary 0.9 lies above nine tenths, so the lower end is the double below it
    assert (found.lower, found.upper) == (math.nextafter(0.9, 0.0), 0.9)
    assert found.method == "as_declared"
    later = accounting.epsilon(declared(0.9, 1e-6), 1e-2)
    assert later.method == "randomized_response"
    assert later.upper - later.lower < 1e-9
    # the worst (0.9, 1e-6)-DP mechanism at 1e-2
    e = later.lower
    worst = 1e-6 + (1 - 1e-6) * (math.exp(0.9) - math.exp(e)) / (1 + math.exp(0.9))
    assert worst == pytest.approx(1e-2, rel=1e-6)


def test_epsilon_as_declared_is_rounded_up() -> None:
    for text in ("0.1", "0.3", "0.7", "1.1"):
        upper = accounting.epsilon(declared(float(text), 1e-5), 1e-5).upper
        assert Fraction(upper) >= Fraction(text)
        assert upper <= math.nextafter(float(text), 2.0)


def test_a_delta_below_what_was_declared_has_no_epsilon() -> None:
    for m in (
        declared(0.5, 1e-6),
        declared(0.5, 1e-7, 10),
        composition(declared(0.5, 1e-6), subsampled(0.01, 2.0, 5)),
    ):
        found = accounting.epsilon(m, 9e-7)
        assert found.lower == found.upper == math.inf
        assert "below" in found.reason
        written = json.loads(json.dumps(found.to_json(), allow_nan=False))
        assert written["upper"] == written["lower"] == "inf"
        assert accounting.delta(m, 100.0).lower >= 9e-7


def test_a_delta_at_what_was_declared_is_answered_or_refused_with_a_reason() -> None:
    m = composition(declared(0.5, 1e-6), subsampled(0.01, 2.0, 5))
    at = accounting.epsilon(m, 1e-6)
    assert at.upper == math.inf
    assert at.lower > 0.5
    assert "too close" in at.reason
    last = math.inf
    for share in (1e-9, 1e-6, 1e-3, 1.0, 100.0):
        found = accounting.epsilon(m, 1e-6 * (1.0 + share))
        assert found.lower <= found.upper <= last
        last = found.upper
        rest = accounting.epsilon(
            composition(declared(0.5), subsampled(0.01, 2.0, 5)), 1e-6 * share / (1.0 - 1e-6)
        )
        assert found.lower <= rest.upper * (1 + 1e-9)
        assert rest.lower * (1 - 1e-9) <= found.upper


def test_declared_parts_compose() -> None:
    ten = accounting.epsilon(declared(0.1, 1e-7, 10), 1e-5)
    assert ten.lower <= ten.upper < 1.0  # better than the sum
    many = accounting.epsilon(declared(0.1, 0.0, 100), 1e-5)
    assert 4.0 < many.lower <= many.upper < 4.5
    assert is_tight(many)
    two = accounting.epsilon(declared(2.0, 1e-6, 2), 2e-6)
    assert two.upper <= 4.0
    assert two.lower <= two.upper
    # a declared part without delta is a randomised response
    same = accounting.epsilon(response(0.1, 100), 1e-5)
    assert (same.lower, same.upper) == (many.lower, many.upper)


def test_more_responses_than_a_sum_holds_go_on_smoothly() -> None:
    most = closed_forms.MAX_SUMS - 1
    by_sum, by_contour = (accounting.epsilon(response(0.02, n), 1e-7) for n in (most, most + 1))
    assert by_sum.method == "randomized_response"
    assert by_contour.method == "contour"
    assert by_sum.lower <= by_contour.upper
    assert by_contour.upper - by_sum.lower < 5e-3


# -- compositions ----------------------------------------------------------------------------------

MIXED = [
    (subsampled(0.01, 1.0, 100), laplace(10.0, 5)),
    (subsampled(0.01, 1.0, 100), gaussian(5.0), response(0.1, 3)),
    (subsampled(0.2, 2.0, 10), subsampled(0.001, 0.6, 1000), declared(0.05, 1e-9, 4)),
    (laplace(3.0, 4), response(0.2, 6)),
    (gaussian(3.0), laplace(4.0, 10)),
    (gaussian(3.0, 2), declared(0.3, 1e-8)),
    (subsampled(1 / 14, 14.78, 2100), gaussian(26.6), subsampled(0.1091, 20.0, 5)),
]


@pytest.mark.parametrize("parts", MIXED, ids=repr)
def test_mixed_compositions(parts: tuple[Any, ...]) -> None:
    """Ball arithmetic can't refute either end; order and grouping don't matter; more costs more."""
    m, delta = composition(*parts), 1e-6
    found = accounting.epsilon(m, delta)
    assert is_tight(found)
    low, high = rigorous.epsilon_enclosure(m, delta)
    assert low <= found.upper
    assert found.lower <= high
    assert overlap(found, accounting.epsilon(composition(*parts[::-1]), delta))
    assert found.upper <= cumulants.renyi_epsilon(m, delta) + 1e-3 * found.upper
    for i in range(len(parts)):
        fewer = composition(*parts[:i], *parts[i + 1 :])
        assert accounting.epsilon(fewer, delta).lower <= found.upper


@given(
    st.floats(-4, -0.3).map(lambda x: 10.0**x),
    st.floats(0.5, 5.0),
    st.lists(st.integers(1, 300), min_size=2, max_size=4),
    st.floats(-9, -3).map(lambda x: 10.0**x),
)
@settings(max_examples=10, deadline=None)
def test_splitting_a_composition_changes_nothing(
    q: float, noise_multiplier: float, counts: list[int], delta: float
) -> None:
    """Parts a hair apart aren't merged: they lie between the least and the greatest, repeated."""
    rates = [q * (1.0 + 1e-13 * i) for i in range(len(counts))]
    split = composition(
        *(subsampled(r, noise_multiplier, n) for r, n in zip(rates, counts, strict=True))
    )
    assert len(dominating_terms(split)[0]) == len(counts)
    found = accounting.epsilon(split, delta)
    least, most = (
        accounting.epsilon(subsampled(r, noise_multiplier, sum(counts)), delta)
        for r in (rates[0], rates[-1])
    )
    assert least.lower <= found.upper
    assert found.lower <= most.upper
    assert found.upper - found.lower <= max(1e-3 * found.upper, 1e-5)


# Chernoff's bound says little of these: a few rare inclusions decide, or bounded losses' largest
# sum, or delta is nearly flat, or large; or a transform decays far below 1.
AWKWARD = [
    (subsampled(3.9616e-06, 0.101155, 51), 0.000201953),
    (
        composition(
            laplace(0.416475),
            subsampled(1.24207e-05, 0.314897, 4),
            subsampled(4.11525e-05, 7.88116, 113),
        ),
        0.000100759,
    ),
    (
        composition(
            subsampled(0.000137099, 19.545, 260),
            subsampled(0.0273998, 10.86, 2),
            subsampled(1.18652e-06, 0.201672, 3),
        ),
        1.21804e-05,
    ),
    (subsampled(1.90298e-06, 0.365021, 28979), 0.000612095),
    (composition(subsampled(2.13875e-06, 0.76403, 43), response(0.135762, 8)), 2.80765e-10),
    (subsampled(0.786707, 0.223697, 4), 0.9),
    (
        composition(
            subsampled(4.4625e-07, 1.77505, 7741),
            subsampled(9.11688e-05, 0.430642, 16581),
            subsampled(0.000103261, 0.21384, 10600),
        ),
        0.392734,
    ),
]
# And these ball arithmetic confirms within seconds.
CONFIRMED = [
    (
        composition(subsampled(0.000408435, 0.346981, 100), subsampled(0.99999124096, 10.3176, 1)),
        1.3852e-06,
    ),
    (
        composition(
            subsampled(3.55297e-06, 9.60351, 118),
            laplace(0.258045, 4),
            subsampled(0.00022095, 0.859476, 1),
        ),
        9.41764e-11,
    ),
    (
        composition(declared(0.0502593, 1e-13, 5), subsampled(9.06759e-05, 0.393183, 17)),
        3.35231e-05,
    ),
    (composition(response(0.819651, 3), subsampled(0.0414004, 16.2762, 1)), 3.16975e-12),
    (composition(laplace(1.39408), subsampled(0.00975995, 5.08812, 1)), 2.07165e-12),
]


@pytest.mark.parametrize(("m", "delta"), AWKWARD + CONFIRMED, ids=repr)
def test_awkward_brackets_are_tight(m: Any, delta: float) -> None:
    found = accounting.epsilon(m, delta)
    assert is_tight(found)
    assert found.method == "contour"
    at_upper, at_lower = (
        rigorous.delta_enclosure(m, end, width=1e-2, seconds=1.0)
        for end in (found.upper, found.lower)
    )
    assert at_upper[0] <= delta <= at_lower[1]


@pytest.mark.parametrize(("m", "delta"), CONFIRMED, ids=repr)
def test_awkward_brackets_are_confirmed(m: Any, delta: float) -> None:
    found = accounting.epsilon(m, delta)
    assert rigorous.confirm_upper(m, found.upper, delta)
    # No smaller epsilon than the lower end will do.
    below = 0.999 * found.lower
    assert rigorous.confirm_upper(m, below, delta) is False


def test_a_thousand_different_parts() -> None:
    parts = [subsampled(0.005 + 1e-5 * i, 1.0 + i / 500, 5) for i in range(1000)]
    found = accounting.epsilon(composition(*parts), 1e-6)
    assert is_tight(found)
    assert found.method == "contour"
    alike = [accounting.epsilon(subsampled(q, s, 5000), 1e-6) for q, s in ((0.005, 3), (0.015, 1))]
    assert alike[0].lower < found.lower
    assert found.upper < alike[1].upper


# -- consistency -----------------------------------------------------------------------------------

rates = st.floats(-4, -0.1).map(lambda x: 10.0**x)
multipliers = st.floats(0.4, 8.0)
counts = st.floats(0, 3.5).map(lambda x: int(10.0**x))
deltas = st.floats(-10, -3).map(lambda x: 10.0**x)


@given(rates, multipliers, counts, deltas, st.floats(1.001, 3.0), st.integers(0, 3))
@settings(max_examples=120, deadline=None)
def test_epsilon_grows_with_everything_it_should(
    q: float, sigma: float, count: int, delta: float, factor: float, which: int
) -> None:
    more = [
        (q, sigma, count, delta / factor),
        (q, sigma, count * math.ceil(factor), delta),
        (min(1.0, q * factor), sigma, count, delta),
        (q, sigma / factor, count, delta),
    ][which]
    narrow = 1e-5
    less = accounting.epsilon(subsampled(q, sigma, count), delta, tolerance=narrow)
    bigger = accounting.epsilon(subsampled(*more[:3]), more[3], tolerance=narrow)
    assert less.lower <= bigger.upper
    # Each end lies within the width that was asked for of the truth, which grows.
    if not less.reason:
        assert less.upper <= bigger.upper + narrow
    if not bigger.reason:
        assert less.lower <= bigger.lower + narrow


cheap = st.one_of(
    st.builds(laplace, st.floats(0.5, 50.0), st.just(1)),
    st.builds(gaussian, st.floats(0.3, 50.0), st.integers(1, 1000)),
    st.builds(response, st.floats(0.01, 3.0).map(lambda x: round(x, 3)), st.integers(1, 50)),
    st.builds(subsampled, rates, multipliers, st.just(1)),
)


@given(cheap, deltas, st.floats(1.0001, 10.0))
@settings(max_examples=300, deadline=None)
def test_the_upper_end_falls_with_delta(m: Any, delta: float, factor: float) -> None:
    """Closed forms have no width to hide behind."""
    less, more = accounting.epsilon(m, delta * factor), accounting.epsilon(m, delta)
    assert less.upper <= more.upper * (1.0 + 1e-12)
    assert less.lower <= more.lower * (1.0 + 1e-12)
    here, there = accounting.profile(m, [more.upper, more.upper * factor])
    assert there.upper <= here.upper * (1.0 + 1e-12)
    assert there.lower <= here.lower * (1.0 + 1e-12)
    assert here.lower <= delta


@given(rates, multipliers, counts, deltas)
@settings(max_examples=15, deadline=None)
def test_epsilon_and_delta_invert_each_other(
    q: float, sigma: float, count: int, delta: float
) -> None:
    m = subsampled(q, sigma, count)
    found = accounting.epsilon(m, delta)
    assert accounting.delta(m, found.upper).lower <= delta
    if found.lower > 0.0:
        assert accounting.delta(m, found.lower).upper >= delta


@given(rates, multipliers, counts, deltas, st.floats(-5, 0).map(lambda x: 10.0**x))
@settings(max_examples=15, deadline=None)
def test_the_tolerance_is_kept_or_the_reason_given(
    q: float, sigma: float, count: int, delta: float, tolerance: float
) -> None:
    m = subsampled(q, sigma, count)
    found = accounting.epsilon(m, delta, tolerance=tolerance)
    assert found.upper - found.lower <= tolerance or found.reason
    assert overlap(found, accounting.epsilon(m, delta))


@pytest.mark.parametrize(
    "m",
    [
        subsampled(0.01, 1.0, 100),
        subsampled(5e-4, 0.4784, 50_000),
        subsampled(0.5, 3.0, 4),
        laplace(2.0, 6),
        gaussian(1.5, 3),
        response(0.25, 30),
        composition(subsampled(0.01, 1.0, 100), declared(0.1, 1e-7, 3), laplace(8.0)),
    ],
    ids=repr,
)
def test_a_profile_is_the_same_curve(m: Any) -> None:
    delta = 1e-6
    at = accounting.epsilon(m, delta)
    points = [0.0, 0.3 * at.lower, at.lower, at.upper, 1.4 * at.upper, 2.0 * at.upper]
    shuffled = [points[i] for i in (3, 0, 5, 2, 2, 4, 1)]
    found = {b.epsilon: b for b in accounting.profile(m, points)}
    assert [b.epsilon for b in accounting.profile(m, shuffled)] == shuffled
    uppers = [found[x].upper for x in points]
    assert uppers == sorted(uppers, reverse=True)
    for x in points:
        assert 0.0 <= found[x].lower <= found[x].upper <= 1.0
        alone = accounting.delta(m, x)
        assert overlap(alone, found[x])
        assert alone.upper - alone.lower <= 1e-2 * alone.upper or alone.reason
    assert found[at.upper].lower <= delta <= found[at.lower].upper


def test_a_profile_of_many_points_is_tight_all_along() -> None:
    m = published("cifar10-65-B25")
    found = accounting.profile(m, [0.1 * i for i in range(200)])
    for b in found:
        assert b.upper - b.lower <= 1e-2 * b.upper, b
    assert found[0].upper > 0.1
    assert found[-1].upper < 1e-15


AGREE: list[tuple[tuple[Term, ...], float]] = [
    ((GaussianTerm(0.01, 1.0, 100),), 1e-5),
    ((GaussianTerm(0.3, 0.5, 20),), 1e-6),
    ((GaussianTerm(5e-4, 1.560963, 5000),), 1e-5),
    ((GaussianTerm(0.02, 0.8, 50), GaussianTerm(1.0, 0.2, 1), LaplaceTerm(0.1, 4)), 1e-5),
    ((LaplaceTerm(0.5, 8),), 1e-4),
]


@pytest.mark.parametrize(("terms", "delta"), AGREE, ids=repr)
def test_dp_accountings_two_roundings_lie_around(terms: tuple[Term, ...], delta: float) -> None:
    found = bounds._epsilon(terms, delta, lambda e: 1e-3 * e, Clock(60.0))
    below, above = (
        reference.dp_accounting_pld(terms, delta, pessimistic=p, interval=5e-4)
        for p in (False, True)
    )
    assert below.allowing_for_rounding <= found.upper
    assert found.lower <= above.allowing_for_rounding
    assert above.epsilon - found.upper < 5e-3


# -- questions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "delta", [0, 1, -1e-5, 1.5, math.nan, math.inf, -math.inf, "1e-5", None, True, 10**400]
)
def test_a_bad_delta_is_refused(delta: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        accounting.epsilon(gaussian(1.0), delta)
    assert caught.value.field == "delta"


@pytest.mark.parametrize("epsilon", [-1e-9, math.nan, math.inf, "1", None, False, 1e7])
def test_a_bad_epsilon_is_refused(epsilon: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        accounting.delta(gaussian(1.0), epsilon)
    assert caught.value.field == "epsilon"


@pytest.mark.parametrize("tolerance", [0.0, -1.0, 1e-10, math.nan, math.inf, "1", True])
def test_a_bad_tolerance_is_refused(tolerance: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        accounting.epsilon(gaussian(1.0), 1e-5, tolerance=tolerance)
    assert caught.value.field == "tolerance"


def test_bad_profiles_and_limits_are_refused() -> None:
    for points in ([], [1.0] * 1001):
        with pytest.raises(InvalidRequest) as caught:
            accounting.profile(gaussian(1.0), points)
        assert caught.value.field == "epsilons"
    for bad, field in (
        ((0.0, 10), "limits.seconds"),
        ((math.nan, 10), "limits.seconds"),
        ((1.0, 0), "limits.megabytes"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            Limits(*bad)
        assert caught.value.field == field


def test_the_json_of_a_bracket() -> None:
    written = accounting.epsilon(subsampled(0.01, 1.0, 100), 1e-5).to_json()
    assert set(written) == {
        "lower", "upper", "delta", "direction", "method", "error_terms",
        "neighboring_relation", "version",
    }  # fmt: skip
    assert written["neighboring_relation"] == "add_remove_one_unit"
    json.dumps(written, allow_nan=False)


# -- kept answers ----------------------------------------------------------------------------------


def test_the_same_question_has_the_same_answer() -> None:
    m = subsampled(0.02, 1.5, 7)
    first = accounting.epsilon(m, 1e-6)
    assert accounting.epsilon(subsampled(0.02, 1.5, 7), 1e-6) is first
    bounds._CACHE.clear()
    assert accounting.epsilon(m, 1e-6) == first


def test_another_question_has_its_own_answer() -> None:
    m = subsampled(0.02, 1.5, 7)
    first = accounting.epsilon(m, 1e-6)
    for other in (
        accounting.epsilon(m, 1.1e-6),
        accounting.epsilon(m, 1e-6, tolerance=1e-5),
        accounting.epsilon(subsampled(0.02, 1.5, 8), 1e-6),
        accounting.epsilon(subsampled(0.02, 1.4, 7), 1e-6),
        accounting.epsilon(subsampled(0.021, 1.5, 7), 1e-6),
    ):
        assert other is not first
        assert other != first
    # a longer limit would give no other answer
    assert accounting.epsilon(m, 1e-6, limits=Limits(seconds=9.0)) is first
    points = accounting.profile(m, [0.1, 0.2])
    assert [b.epsilon for b in accounting.profile(m, [0.2, 0.1])] == [0.2, 0.1]
    points.clear()  # the caller's own list
    assert len(accounting.profile(m, [0.1, 0.2])) == 2


def test_kept_answers_are_bounded_in_number() -> None:
    small = bounds._Cache(2)
    for key in ("a", "b", "c"):
        small.get(key, lambda: (0, True))
    assert small.get("a", lambda: (1, True)) == 1
    assert small.get("c", lambda: (2, True)) == 0
    assert small.get("d", lambda: (3, False)) == 3
    assert small.get("d", lambda: (4, True)) == 4


def test_questions_from_several_threads() -> None:
    answers: dict[int, Bracket] = {}

    def ask(i: int) -> None:
        answers[i] = accounting.epsilon(subsampled(0.01, 2.0, 3 + i // 2), 1e-5)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    bounds._CACHE.clear()
    for i in range(8):
        assert answers[i] == accounting.epsilon(subsampled(0.01, 2.0, 3 + i // 2), 1e-5)


# -- limits ----------------------------------------------------------------------------------------

HARD = [
    subsampled(3e-6, 0.5, 200),
    subsampled(1e-6, 0.03, 100_000),
    subsampled(0.5, 1e-3, 10),
    composition(*(subsampled(0.01 + i / 1e5, 1.0 + i / 100, 10) for i in range(300))),
    composition(*(laplace(0.01 + i, 100) for i in range(30)), subsampled(1e-4, 0.2, 1000)),
]


@pytest.mark.parametrize("m", HARD, ids=lambda m: m.kind + str(m.alternatives()[0][0]))
def test_out_of_time_means_a_wide_bracket_with_its_reason(m: Any) -> None:
    started = time.monotonic()
    found = accounting.epsilon(m, 1e-5, limits=Limits(seconds=0.01))
    curve = accounting.profile(m, [0.1 * i for i in range(100)], limits=Limits(seconds=0.01))
    assert time.monotonic() - started < 20.0  # 2 s each, on a machine with other work
    assert 0.0 <= found.lower <= found.upper < math.inf
    assert is_tight(found) or found.upper <= 1e-3 or found.reason
    for b in curve:
        assert 0.0 <= b.lower <= b.upper <= 1.0
        assert b.upper - b.lower <= contour.ACCURACY * b.upper or b.reason


def test_what_time_cut_short_is_not_kept() -> None:
    m = composition(*(subsampled(0.01 + i / 1e5, 1.0 + i / 100, 10) for i in range(40)))
    short = accounting.epsilon(m, 1e-5, limits=Limits(seconds=1e-4))
    found = accounting.epsilon(m, 1e-5)
    assert is_tight(found)
    assert short.lower <= found.upper
    assert found.lower <= short.upper
    assert accounting.epsilon(m, 1e-5) is found


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Time in which every look at the clock takes a millisecond, and nothing else any."""
    ticks = itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: 1e-3 * next(ticks))
        yield patch


def test_what_a_share_of_the_time_cut_short_is_not_kept(ticking: pytest.MonkeyPatch) -> None:
    """The contour's time is over, but not the question's: its answer comes before its end."""
    m = composition(*(subsampled(0.01 + i / 1e5, 1.0 + i / 100, 10) for i in range(160)))
    points = [0.5, 2.0]
    short = accounting.epsilon(m, 1e-5, limits=Limits(seconds=0.05))
    curve = accounting.profile(m, points, limits=Limits(seconds=0.05))
    assert time.monotonic() < 0.15
    assert not is_tight(short)
    assert "time was over" in short.reason
    assert all("time was over" in b.reason for b in curve)
    ticking.undo()
    found = accounting.epsilon(m, 1e-5)
    assert is_tight(found)
    assert accounting.epsilon(m, 1e-5, limits=Limits(seconds=0.01)) is found
    whole = accounting.profile(m, points)
    assert all(b.upper - b.lower <= contour.ACCURACY * b.upper for b in whole)
    assert accounting.profile(m, points, limits=Limits(seconds=0.01)) == whole


def test_a_clock_remembers_that_it_ran_out(ticking: pytest.MonkeyPatch) -> None:
    whole = Clock(0.1)
    part = whole.share(0.5)
    assert not whole.is_over()
    assert [whole.ran_out, part.ran_out] == [False, False]
    while not part.is_over():
        pass
    assert whole.left() > 0.0
    assert [whole.ran_out, part.ran_out] == [True, True]
    assert Clock().left() == math.inf


def test_a_points_error_terms_are_those_of_its_worse_direction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deltas(whole: contour.Composition, points: Any, *_: Any) -> Any:
        high = np.array([0.1, 0.3]) if whole.heavy else np.array([0.2, 0.2])
        return 0.9 * high, high, {"tilt": 1.0 if whole.heavy else 2.0}

    monkeypatch.setattr(contour, "_deltas", deltas)
    found = contour.delta_of((GaussianTerm(0.5, 1.0, 9),), np.array([0.1, 0.2]), Clock(9.0))
    assert found[2:] == (["add", "remove"], [{"tilt": 2.0}, {"tilt": 1.0}])


# -- what little else proves -----------------------------------------------------------------------


def response_term(epsilon: str, count: int = 1) -> ApproximateDPTerm:
    return ApproximateDPTerm(Decimal(epsilon), Decimal(0), count)


BESIDE: list[tuple[tuple[Term, ...], float]] = [
    ((GaussianTerm(1.64e-15, 0.115, 1), response_term("0.53909")), 5.97e-10),
    ((GaussianTerm(2.964e-6, 0.5533, 1), response_term("0.480168", 2)), 1.194e-12),
    ((GaussianTerm(5.55e-17, 1.796, 1), LaplaceTerm(0.511365, 1)), 3.75e-10),
    ((GaussianTerm(1e-20, 1.0, 3), LaplaceTerm(1.4, 2), response_term("0.48", 2)), 1e-9),
    ((GaussianTerm(1e-20, 1.0, 3), GaussianTerm(1.0, 0.4, 3), GaussianTerm(1.0, 1.4, 1)), 1e-9),
]


@pytest.mark.parametrize(("terms", "delta"), BESIDE, ids=repr)
def test_parts_that_hardly_count_widen_nothing(terms: tuple[Term, ...], delta: float) -> None:
    found = bounds._epsilon(terms, delta, bounds._default_tolerance, Clock(10.0))
    assert found.upper - found.lower <= 1e-3 * found.upper
    assert not found.reason
    at_upper = rigorous.delta_enclosure(list(terms), found.upper, width=1e-3, seconds=2.0)
    at_lower = rigorous.delta_enclosure(list(terms), found.lower, width=1e-3, seconds=2.0)
    assert at_upper[0] <= delta <= at_lower[1]
    (curve,) = bounds._profile(terms, (0.5 * found.lower,), Clock(10.0))
    exact = rigorous.delta_enclosure(list(terms), curve.epsilon, width=1e-3, seconds=2.0)
    assert curve.lower <= exact[1]
    assert exact[0] <= curve.upper
    assert curve.upper - curve.lower <= contour.ACCURACY * curve.upper


@pytest.mark.parametrize("share", [1e-5, 1e-3, 0.09])
def test_what_total_variation_moves_is_allowed_for(share: float) -> None:
    """A part that moves delta by all its total variation: where it loses, it loses everything."""
    q, rate = 1e-6, 0.5
    delta = q / share
    found = bounds._beside_formula((GaussianTerm(q, 40.0, 1), LaplaceTerm(rate, 1)), delta)
    assert found is not None
    assert found.error_terms["absorbed"] == pytest.approx(q)
    # With probability q everything is lost, else log(1 - q) is won.
    exact = rate + 2.0 * math.log1p(-(delta - q) / (1.0 - q)) + math.log1p(-q)
    assert exact <= found.upper <= exact + 2.0 * q
    assert found.lower <= exact


def test_fewer_parts_are_asked_where_all_of_them_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The contour fails with the tiny part and not without it."""
    tiny, terms = GaussianTerm(1e-20, 1.0, 1), (GaussianTerm(0.01, 1.0, 20), LaplaceTerm(0.1, 2))
    epsilon_of, delta_of = contour.epsilon_of, contour.delta_of

    def picky(terms: tuple[Term, ...], *args: Any) -> Any:
        if tiny in terms:
            raise contour.OutOfReach("no contour was found")
        return epsilon_of(terms, *args)

    def wide(terms: tuple[Term, ...], points: Any, *args: Any) -> Any:
        low, high, names, _ = delta_of(terms, points, *args)
        return (
            (0.0 * low, 1.0 + 0.0 * high, names, [{}])
            if tiny in terms
            else (low, high, names, [{}])
        )

    monkeypatch.setattr(contour, "epsilon_of", picky)
    monkeypatch.setattr(contour, "delta_of", wide)
    found = bounds._epsilon((tiny, *terms), 1e-6, bounds._default_tolerance, Clock(10.0))
    alone = bounds._epsilon(terms, 1e-6, bounds._default_tolerance, Clock(10.0))
    assert not found.reason
    assert found.lower == alone.lower
    assert alone.upper <= found.upper <= alone.upper + 1e-9
    (curve,) = bounds._profile((tiny, *terms), (1.0,), Clock(10.0))
    (same,) = bounds._profile(terms, (1.0,), Clock(10.0))
    assert curve.lower == same.lower
    assert same.upper < curve.upper <= same.upper + 1.001e-20 + 1e-14 * same.upper


def test_a_wide_bracket_of_delta_has_the_best_lower_end_at_hand_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = accounting.delta(laplace(0.01), 1.0)
    many = accounting.delta(laplace(0.01, 1000), 1.0)
    assert one.lower <= many.lower

    def nothing(_: Any, points: Any, *args: Any) -> Any:
        none = np.zeros(len(points))
        return none, none + 0.03, ["both"] * len(points), [{}] * len(points)

    monkeypatch.setattr(contour, "delta_of", nothing)
    few = accounting.delta(subsampled(0.01, 0.00503, 3), 1.0)
    assert few.lower >= 0.0099999
    assert few.reason


def test_a_bracket_of_delta_wider_than_the_aim_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    m = subsampled(0.01, 1.0, 100)
    assert not accounting.delta(m, 1.0).reason
    monkeypatch.setattr(contour, "MAX_WORK", 1.0)
    bounds._CACHE.clear()
    found = accounting.delta(m, 1.0)
    assert found.upper - found.lower > contour.ACCURACY * found.upper
    assert found.reason
    delta_of = contour.delta_of

    def a_little_wide(*args: Any) -> Any:
        _, high, names, errors = delta_of(*args)
        return 0.995 * high, high, names, errors

    monkeypatch.undo()
    monkeypatch.setattr(contour, "delta_of", a_little_wide)
    bounds._CACHE.clear()
    assert accounting.delta(m, 1.0).reason


def test_what_the_contour_can_not_reach_has_a_renyi_bound() -> None:
    found = accounting.epsilon(subsampled(0.5, 1e-3, 10), 1e-5)
    exact = accounting.epsilon(gaussian(1e-3, 10), 1e-5)
    assert found.upper < 1.1 * exact.upper
    assert 0.09 * exact.upper < found.lower
    assert found.reason or is_tight(found)


def in_another_process(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout


def test_hard_questions_take_little_memory() -> None:
    """Thirty of them, each a new one: at most 300 MB above what the imports take."""
    grown = in_another_process(
        "import resource\n"
        "import accounting\n"
        "from accounting import bounds, mechanism_from_json\n"
        "bounds.warm_up()\n"
        "def peak():\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before = peak()\n"
        "def ask(q, sigma, count, delta):\n"
        "    m = mechanism_from_json({'kind': 'subsampled_gaussian', 'sampling_probability': q,\n"
        "        'noise_multiplier': sigma, 'count': count})\n"
        "    accounting.epsilon(m, delta)\n"
        "for i in range(15):\n"
        "    ask(5e-4 * (1 + i), 0.256489, 50_000, 1e-5)\n"
        "    ask(10.0 ** (-6 + 0.4 * i), 0.9, 10 ** (6 - i // 3), 10.0 ** (-4 - i))\n"
        "accounting.profile(mechanism_from_json({'kind': 'subsampled_gaussian',\n"
        "    'sampling_probability': 5e-4, 'noise_multiplier': 0.4784, 'count': 50_000}),\n"
        "    [0.02 * i for i in range(1000)])\n"
        "print(peak() - before)\n"
    )
    assert float(grown) < 300.0


def test_importing_the_package_is_light() -> None:
    in_another_process(
        "import sys, accounting\n"
        "accounting.mechanism_from_json({'kind': 'gaussian', 'noise_multiplier': 1.0})\n"
        "assert not {'numpy', 'scipy', 'dp_accounting', 'torch'} & set(sys.modules)\n"
    )


# -- classes ---------------------------------------------------------------------------------------


def class_block(classes: int) -> DenoisingBlock:
    """A block of which no class exceeds another: rates fall as outputs rise."""
    shares = tuple(ClassShare(i - 1, 100 * i, 0.1 / i) for i in range(1, classes + 1))
    return DenoisingBlock(
        EdmSchedule(0.002, 80.0, 7.0, 100),
        block_steps=65,
        clip_norm=50.0,
        subsample_size=25,
        public_size=50_000,
        classes=shares,
    )


def test_the_worst_class_of_many() -> None:
    """More classes change nothing while the first is the worst."""
    few, more = (accounting.epsilon(class_block(k), 1e-5) for k in (2, 20))
    assert (few.lower, few.upper) == (more.lower, more.upper)
    alone = accounting.epsilon(composition(class_block(20)), 1e-5)
    assert (alone.lower, alone.upper) == (few.lower, few.upper)


def test_one_pair_that_stands_for_many_classes_proves_no_lower_end() -> None:
    for m in (class_block(120), composition(class_block(3), class_block(2))):
        found = accounting.epsilon(m, 1e-5)
        assert "stands for many classes" in found.reason
        assert found.lower < found.upper
        worst = accounting.epsilon(class_block(3), 1e-5)
        assert found.lower >= worst.lower - 1e-9
        assert accounting.delta(m, worst.upper + 1.0).lower <= 1e-5


# -- corners that were wrong once ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "epsilon"),
    [
        (
            (
                GaussianTerm(0.9999999937948963, 38.89734947748931, 1),
                LaplaceTerm(0.1, 1),
            ),
            287.83476701268006,
        ),
        (
            (
                GaussianTerm(0.99999961670178, 24.832489655274024, 1),
                ApproximateDPTerm(Decimal("0.1"), Decimal(0), 1),
            ),
            60.71034731424411,
        ),
        (
            (GaussianTerm(0.9999999899724361, 41.43951134032272, 1), GaussianTerm(1e-4, 1.0, 2)),
            304.0549569339043,
        ),
    ],
    ids=["laplace", "response", "sampled"],
)
def test_a_large_loss_that_is_all_but_certain(parts: tuple[Term, ...], epsilon: float) -> None:
    (found,) = bounds._profile(parts, (epsilon,), Clock(10.0))
    lower, _ = rigorous.delta_enclosure(list(parts), epsilon)
    assert found.upper >= lower


def test_a_delta_near_the_end_of_doubles() -> None:
    m = subsampled(0.5, 1.0, 1)
    found = accounting.epsilon(m, 1e-299)
    assert rigorous.confirm(m, found.upper, 1e-299).confirmed is not False
    with pytest.raises(InvalidRequest, match="delta"):
        accounting.epsilon(m, 1e-310)


@pytest.mark.parametrize("sigma", [1e-100, 1e-20, 1e-8, 1e-3])
@pytest.mark.parametrize("q", [1e-100, 1e-6, 0.01])
@pytest.mark.parametrize("count", [2, 1000])
def test_extreme_noise_is_answered(q: float, sigma: float, count: int) -> None:
    m = subsampled(q, sigma, count)
    at = accounting.epsilon(m, 1e-5)
    assert 0.0 <= at.lower <= at.upper
    assert math.isfinite(at.upper) or at.reason
    below = accounting.delta(m, 1.0)
    assert 0.0 <= below.lower <= below.upper <= min(1.0, count * q * (1.0 + 1e-9))


def test_a_wide_bracket_says_why() -> None:
    for m in (subsampled(0.01, 1e-3, 1000), laplace(1.0, 10**9)):
        found = accounting.epsilon(m, 1e-5)
        assert found.upper - found.lower <= 1e-3 or found.reason
