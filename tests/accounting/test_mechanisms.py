"""Mechanism types: published JSON, named errors, and the paper's block figures."""

from __future__ import annotations

import contextlib
import csv
import json
import math
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import mechanism_from_json, mechanism_to_json
from accounting.errors import InvalidMechanism
from accounting.mechanisms import (
    ApproximateDP,
    ApproximateDPTerm,
    DenoisingBlock,
    EdmSchedule,
    GaussianTerm,
    LaplaceTerm,
    dominating_terms,
    mechanism_digest,
    realised_terms,
    require_chargeable,
)

GOLDEN = Path(__file__).parent.parent / "golden"
EDM: dict[str, Any] = {"kind": "edm", "sigma_min": 0.002, "sigma_max": 80, "rho": 7, "steps": 39}
BLOCK: dict[str, Any] = {
    "kind": "denoising_block",
    "schedule": EDM,
    "block_steps": 20,
    "subsampling": "output_wise",
    "sampling": "poisson",
    "subsample_size": 3,
    "public_size": 5000,
    "clip_norm": 12.5,
    "beta": 1.0,
    "outputs": 500,
}
SUBSAMPLED: dict[str, Any] = {
    "kind": "subsampled_gaussian",
    "sampling_probability": 0.01,
    "noise_multiplier": 2.0,
    "count": 10,
}
DP_SGD: dict[str, Any] = {
    "kind": "dp_sgd",
    "sampling_probability": 0.1,
    "noise_multiplier": 2.0,
    "steps": 10,
}
GAUSSIAN: dict[str, Any] = {"kind": "gaussian", "noise_multiplier": 2.0, "count": 2}
DECLARED: dict[str, Any] = {"kind": "approximate_dp", "epsilon": 0.5, "delta": 1e-7, "count": 3}
LAPLACE: dict[str, Any] = {"kind": "laplace", "noise_multiplier": 2.0, "count": 3}
RESPONSE: dict[str, Any] = {"kind": "randomized_response", "epsilon": 0.5, "count": 2}
NOISY_COUNTS: dict[str, Any] = {"kind": "noisy_counts", "noise_multiplier": 30.0, "count": 1}
NOISY_MAX: dict[str, Any] = {"kind": "noisy_max", "epsilon": 0.1, "count": 4}
FETA: dict[str, Any] = {
    "kind": "feta_pro",
    "public_size": 55000,
    "spatial": {"rounds": 5, "sampling_probability": 0.1091, "noise_multiplier": 20.0},
    "frequency": {"noise_multiplier": 26.6},
    "dp_sgd": {"sampling_probability": 1 / 14, "noise_multiplier": 14.78, "steps": 2100},
}
CHARGED_FETA: dict[str, Any] = FETA | {
    "spatial": FETA["spatial"] | {"clip_norm": 14.0, "divisor": 600.0},
    "frequency": FETA["frequency"] | {"feature_dimension": 10000},
    "dp_sgd": FETA["dp_sgd"] | {"clip_norm": 1e-3, "divisor": 3928.0},
}
CLASSES = [
    {"label": 0, "outputs": 50, "sampling_probability": 0.006},
    {"label": 1, "outputs": 40, "sampling_probability": 0.008},
    {"label": 2, "outputs": 30, "sampling_probability": 0.001},
]


def without(obj: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    return {k: v for k, v in obj.items() if k not in names} | more


def conditional(**more: Any) -> dict[str, Any]:
    return without(BLOCK, "outputs", "public_size") | {"classes": CLASSES} | more


# -- the published JSON ----------------------------------------------------------------------------

positive = st.floats(1e-100, 1e100)
rates = st.floats(1e-100, 1.0)
counts = st.integers(1, 1000)
epsilons = st.one_of(
    st.floats(1e-100, 1e6), st.integers(1, 1000), st.just("0.1000000000000000000001")
)
simple = st.one_of(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["gaussian", "laplace", "noisy_counts"]),
            "noise_multiplier": positive,
        },
        optional={"count": counts},
    ),
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["randomized_response", "noisy_max"]), "epsilon": epsilons},
        optional={"count": counts},
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("subsampled_gaussian"),
            "sampling_probability": rates,
            "noise_multiplier": positive,
        },
        optional={"count": counts, "sampling": st.sampled_from(["poisson", "fixed_size"])},
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("dp_sgd"),
            "sampling_probability": rates,
            "noise_multiplier": positive,
            "steps": counts,
        },
        optional={"clip_norm": positive, "divisor": positive},
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("approximate_dp"),
            "epsilon": epsilons,
        },
        optional={"delta": st.one_of(st.just(0), st.floats(1e-100, 1.0)), "count": counts},
    ),
)


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, Any]:
    steps = draw(st.integers(2, 60))
    mode = draw(st.sampled_from(["full_batch", "output_wise", "per_step"]))
    block_steps = draw(st.integers(1, steps - 1))
    public_size = draw(st.integers(1, 10**6))
    obj: dict[str, Any] = {
        "kind": "denoising_block",
        "schedule": EDM | {"steps": steps},
        "block_steps": block_steps,
        "subsampling": mode,
        "clip_norm": draw(st.floats(1e-3, 1e3)),
        "beta": draw(
            st.one_of(
                st.floats(0.1, 10.0),
                st.lists(st.floats(0.1, 10.0), min_size=block_steps, max_size=block_steps),
            )
        ),
    }
    if mode != "full_batch":
        obj["subsample_size"] = draw(st.integers(1, public_size))
    if draw(st.booleans()):
        labels = draw(st.lists(st.integers(0, 99), min_size=1, max_size=5, unique=True))
        rate = st.just(1.0) if mode == "full_batch" else st.floats(1e-6, 1.0)
        obj["classes"] = [
            {"label": label, "outputs": draw(counts), "sampling_probability": draw(rate)}
            for label in labels
        ]
        if mode == "full_batch":
            obj["public_size"] = public_size
    else:
        obj |= {"outputs": draw(counts), "public_size": public_size}
        obj["sampling"] = draw(st.sampled_from(["poisson", "fixed_size"]))
    weight = draw(st.sampled_from([None, "density", "uniform", "centred"]))
    if weight is not None:
        obj |= {"weight": weight, "feature_dimension": draw(counts)}
    if weight == "centred" and draw(st.booleans()):
        obj["centre"] = "public_class_mean"
    return obj


stages = st.fixed_dictionaries(
    {"kind": st.just("feta_pro"), "public_size": counts},
    optional={
        "spatial": st.fixed_dictionaries(
            {"rounds": counts, "sampling_probability": rates, "noise_multiplier": positive},
            optional={"clip_norm": positive, "divisor": positive},
        ),
        "frequency": st.fixed_dictionaries(
            {"noise_multiplier": positive},
            optional={"feature_dimension": counts.map(lambda k: 2 * k)},
        ),
        "dp_sgd": st.fixed_dictionaries(
            {"sampling_probability": rates, "noise_multiplier": positive, "steps": counts},
            optional={"clip_norm": positive, "divisor": positive},
        ),
    },
).filter(lambda obj: len(obj) > 2)
one = st.one_of(simple, blocks(), stages)
mechanisms = st.one_of(
    one,
    st.lists(
        st.fixed_dictionaries({"mechanism": one}, optional={"count": st.integers(1, 9)}),
        min_size=1,
        max_size=4,
    ).map(lambda parts: {"kind": "composition", "parts": parts}),
)


@given(mechanisms)
@settings(max_examples=300, deadline=None)
def test_json_round_trip(obj: dict[str, Any]) -> None:
    m = mechanism_from_json(json.loads(json.dumps(obj)))
    written = mechanism_to_json(m)
    again = mechanism_from_json(json.loads(json.dumps(written)))
    assert again == m
    assert mechanism_to_json(again) == written
    assert mechanism_digest(again) == mechanism_digest(m)
    for terms in dominating_terms(m):
        for term in terms:
            assert term.count >= 1
            if isinstance(term, GaussianTerm):
                assert 0.0 < term.sampling_probability <= 1.0
                assert 0.0 < term.mu < math.inf
            elif isinstance(term, LaplaceTerm):
                assert 0.0 < term.inverse_scale < math.inf


SIMPLE = [GAUSSIAN, LAPLACE, RESPONSE, NOISY_COUNTS, NOISY_MAX, SUBSAMPLED, DP_SGD, DECLARED]


@pytest.mark.parametrize("obj", [*SIMPLE, BLOCK, conditional(), FETA, CHARGED_FETA])
def test_what_was_written_stands_in_the_json(obj: dict[str, Any]) -> None:
    written = mechanism_to_json(mechanism_from_json(obj))
    assert {k: written[k] for k in obj} == obj


def test_a_change_of_any_number_changes_the_digest() -> None:
    digests = {mechanism_digest(mechanism_from_json(BLOCK))}
    for name in ("block_steps", "subsample_size", "public_size", "clip_norm", "beta", "outputs"):
        digests.add(mechanism_digest(mechanism_from_json(BLOCK | {name: BLOCK[name] + 1})))
    assert len(digests) == 7


# -- bad input names its field ---------------------------------------------------------------------

OUT_OF_RANGE = (10**400, 1e200, 1e-200, 1e-300, 5e-324)
BAD: list[tuple[Any, str]] = [
    (None, ""),
    ([], ""),
    ({}, "kind"),
    ({"kind": "laplacian"}, "kind"),
    ({"kind": ["gaussian"]}, "kind"),
    *(
        (base | {"noise_multiplier": v}, "noise_multiplier")
        for base in (GAUSSIAN, LAPLACE, NOISY_COUNTS)
        for v in (0, -1.0, math.nan, math.inf, -math.inf, "2", True, None, *OUT_OF_RANGE)
    ),
    *(
        (without(base, "noise_multiplier"), "noise_multiplier")
        for base in (GAUSSIAN, LAPLACE, NOISY_COUNTS)
    ),
    *(
        (base | {"count": v}, "count")
        for base in SIMPLE
        if "count" in base
        for v in (0, -1, 1.5, True, "3", 10**9 + 1)
    ),
    *((base | {"sigma": 1.0}, "sigma") for base in [*SIMPLE, BLOCK, FETA]),
    *(
        (base | {"epsilon": v}, "epsilon")
        for base in (RESPONSE, NOISY_MAX)
        for v in (0, -1, "x", math.nan, -math.inf, 1e7, True, "9" * 70, None, 1e-300)
    ),
    *((base | {"delta": 1e-7}, "delta") for base in (RESPONSE, NOISY_MAX)),
    ({"kind": "feta_pro", "public_size": 5}, ""),
    (FETA | {"public_size": 0}, "public_size"),
    (without(FETA, "public_size"), "public_size"),
    *((FETA | {name: 5}, name) for name in ("spatial", "frequency", "dp_sgd")),
    *(
        (FETA | {stage: FETA[stage] | {name: v}}, f"{stage}.{name}")
        for stage in ("spatial", "frequency", "dp_sgd")
        for name in FETA[stage]
        for v in (0, -1, math.nan, math.inf, True, "1", 10**400, 5e-324)
    ),
    *(
        (FETA | {stage: without(FETA[stage], name)}, f"{stage}.{name}")
        for stage in ("spatial", "frequency", "dp_sgd")
        for name in FETA[stage]
    ),
    *(
        (FETA | {stage: FETA[stage] | {"kind": "x"}}, f"{stage}.kind")
        for stage in ("spatial", "frequency", "dp_sgd")
    ),
    *(
        (FETA | {stage: FETA[stage] | {name: 0.0}}, f"{stage}.{name}")
        for stage in ("spatial", "dp_sgd")
        for name in ("clip_norm", "divisor")
    ),
    *(
        (FETA | {"frequency": FETA["frequency"] | {"feature_dimension": v}}, path)
        for v in (0, 3, 2.0)
        for path in ["frequency.feature_dimension"]
    ),
    *(
        (SUBSAMPLED | {"sampling_probability": v}, "sampling_probability")
        for v in (0, -0.1, 1.0000001, math.nan, "0.1")
    ),
    (SUBSAMPLED | {"sampling": "shuffled"}, "sampling"),
    (without(DP_SGD, "steps"), "steps"),
    (DP_SGD | {"steps": 0}, "steps"),
    (DP_SGD | {"clip_norm": 0.0}, "clip_norm"),
    (DP_SGD | {"divisor": -3}, "divisor"),
    (DP_SGD | {"public_size": 100, "expected_batch_size": 10}, "sampling_probability"),
    (
        without(DP_SGD, "sampling_probability", public_size=100, expected_batch_size=101),
        "expected_batch_size",
    ),
    (without(DP_SGD, "sampling_probability", expected_batch_size=10), "public_size"),
    *((DECLARED | {"epsilon": v}, "epsilon") for v in (0, -1, "x", math.nan, 1e7, True, "9" * 70)),
    *((DECLARED | {"delta": v}, "delta") for v in (-1e-9, 1.1, math.inf, 1e-200, "x")),
    (BLOCK | {"schedule": []}, "schedule"),
    (BLOCK | {"schedule": EDM | {"kind": "cosine"}}, "schedule.kind"),
    (BLOCK | {"schedule": EDM | {"sigma_min": 0}}, "schedule.sigma_min"),
    (BLOCK | {"schedule": EDM | {"sigma_min": 81}}, "schedule.sigma_min"),
    (BLOCK | {"schedule": EDM | {"rho": math.nan}}, "schedule.rho"),
    (BLOCK | {"schedule": EDM | {"steps": 1}}, "schedule.steps"),
    (BLOCK | {"schedule": EDM | {"steps": 10**7}}, "schedule.steps"),
    (BLOCK | {"schedule": EDM | {"mode": 1}}, "schedule.mode"),
    (BLOCK | {"block_steps": 0}, "block_steps"),
    (BLOCK | {"block_steps": 39}, "block_steps"),
    *(
        (without(BLOCK, "block_steps", block_fraction=v), "block_fraction")
        for v in (0, -0.5, 1.01, math.nan, "half", True)
    ),
    (BLOCK | {"block_fraction": 0.5}, "block_fraction"),
    (BLOCK | {"subsampling": "sometimes"}, "subsampling"),
    (BLOCK | {"sampling": "with_replacement"}, "sampling"),
    (BLOCK | {"subsample_size": 0}, "subsample_size"),
    (BLOCK | {"subsample_size": 5001}, "subsample_size"),
    (without(BLOCK, "subsample_size"), "subsample_size"),
    (BLOCK | {"subsampling": "full_batch"}, "subsample_size"),
    (without(BLOCK, "public_size"), "public_size"),
    (BLOCK | {"clip_norm": 0}, "clip_norm"),
    (BLOCK | {"beta": 0.0}, "beta"),
    (BLOCK | {"beta": [1.0, 2.0]}, "beta"),
    (BLOCK | {"beta": [1.0, -2.0]}, "beta[1]"),
    (BLOCK | {"beta": [1.0] * 10001}, "beta"),
    (BLOCK | {"outputs": 0}, "outputs"),
    (without(BLOCK, "outputs"), "outputs"),
    (BLOCK | {"weight": "best"}, "weight"),
    (BLOCK | {"weight": "uniform", "centre": "x"}, "centre"),
    (BLOCK | {"weight": "centred", "centre": ""}, "centre"),
    (BLOCK | {"feature_dimension": 0}, "feature_dimension"),
    (BLOCK | {"n": 5}, "n"),
    (conditional(classes=[]), "classes"),
    (conditional(classes={}), "classes"),
    (conditional(classes=[*CLASSES, CLASSES[0]]), "classes"),
    (conditional(classes=[CLASSES[0] | {"label": -1}]), "classes[0].label"),
    (conditional(classes=[CLASSES[0], CLASSES[1] | {"outputs": 0}]), "classes[1].outputs"),
    (
        conditional(classes=[CLASSES[0] | {"sampling_probability": 2}]),
        "classes[0].sampling_probability",
    ),
    (conditional(classes=[CLASSES[0] | {"rate": 2}]), "classes[0].rate"),
    (conditional(classes=[CLASSES[0] | {"kind": "x"}]), "classes[0].kind"),
    (conditional(outputs=3), "outputs"),
    (conditional(sampling="fixed_size"), "sampling"),
    ({"kind": "composition"}, "parts"),
    ({"kind": "composition", "parts": []}, "parts"),
    ({"kind": "composition", "parts": {}}, "parts"),
    ({"kind": "composition", "parts": [{"mechanism": GAUSSIAN}] * 1001}, "parts"),
    ({"kind": "composition", "parts": [3]}, "parts[0]"),
    (
        {"kind": "composition", "parts": [{"mechanism": GAUSSIAN | {"count": 0}}]},
        "parts[0].mechanism.count",
    ),
    ({"kind": "composition", "parts": [{"mechanism": GAUSSIAN, "count": 0}]}, "parts[0].count"),
    ({"kind": "composition", "parts": [{"mechanism": GAUSSIAN, "times": 2}]}, "parts[0].times"),
    ({"kind": "composition", "parts": [{"mechanism": GAUSSIAN, "kind": "x"}]}, "parts[0].kind"),
    (
        {"kind": "composition", "parts": [{"mechanism": FETA | {"frequency": {}}}]},
        "parts[0].mechanism.frequency.noise_multiplier",
    ),
    (
        {"kind": "composition", "parts": [{"mechanism": GAUSSIAN | {"count": 10**9}, "count": 2}]},
        "parts[0].count",
    ),
    (
        {"kind": "composition", "parts": [{"mechanism": {"kind": "composition", "parts": []}}]},
        "parts[0].mechanism.kind",
    ),
]


@pytest.mark.parametrize(("obj", "field"), BAD)
def test_bad_input_names_its_field(obj: Any, field: str) -> None:
    with pytest.raises(InvalidMechanism) as caught:
        mechanism_from_json(obj)
    assert caught.value.field == field
    assert caught.value.status == 422


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*BLOCK, *SUBSAMPLED, *DECLARED, *FETA, *FETA["dp_sgd"], "parts"]),
                inner,
            )
        ),
        max_leaves=12,
    ),
    st.sampled_from([*SIMPLE, BLOCK, FETA]),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_anything_in_a_field_is_read_or_refused(
    junk: Any, base: dict[str, Any], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(base)))
    with contextlib.suppress(InvalidMechanism):  # anything else fails the test
        m = mechanism_from_json(base | {name: junk})
        assert mechanism_from_json(mechanism_to_json(m)) == m


# -- what the accountants and samplers read --------------------------------------------------------


def golden_rows(name: str) -> list[dict[str, str]]:
    with (GOLDEN / name).open(newline="") as source:
        return list(csv.DictReader(source))


def paper_block(row: dict[str, str]) -> DenoisingBlock:
    """The paper's block: fixed-size draws and C = B/2, so that s = 2C/B = 1 at beta = 1."""
    m = mechanism_from_json(
        {
            "kind": "denoising_block",
            "schedule": EDM,
            "block_fraction": int(row["block_percent"]) / 100,
            "sampling": "fixed_size",
            "subsample_size": int(row["B"]),
            "public_size": int(row["n"]),
            "clip_norm": int(row["B"]) / 2,
            "beta": float(row["beta"]),
            "outputs": int(row["outputs"]),
        }
    )
    assert isinstance(m, DenoisingBlock)
    return m


@pytest.mark.parametrize("row", golden_rows("accounting.csv"), ids=lambda r: r["case"])
def test_published_blocks(row: dict[str, str]) -> None:
    m = paper_block(row)
    assert m.block_steps == int(row["block_steps"])
    # the figures are printed with six decimals
    assert m.mu_bar() == pytest.approx(float(row["mu_bar"]), abs=6e-7)
    ((term,),) = dominating_terms(m)
    assert isinstance(term, GaussianTerm)
    assert (term.mu, term.count) == (m.mu_bar(), int(row["outputs"]))
    # Exactly B are drawn, so the double that is charged is the next one up, never one below B/n.
    exact = Fraction(int(row["B"]), int(row["n"]))
    assert exact <= Fraction(term.sampling_probability) <= exact * (1 + Fraction(1, 2**51))


def test_a_fraction_is_taken_as_the_decimal_written() -> None:
    schedule = EDM | {"steps": 100}
    m = mechanism_from_json(without(BLOCK, "block_steps", schedule=schedule, block_fraction=0.55))
    assert isinstance(m, DenoisingBlock)
    assert m.block_steps == 55  # binary floating point says 0.55 * 100 > 55, hence 56
    whole = mechanism_from_json(without(BLOCK, "block_steps", block_fraction=1))
    assert isinstance(whole, DenoisingBlock)
    assert whole.block_steps == 38


def test_replacing_a_record_costs_twice_the_parameter_of_adding_one() -> None:
    poisson, fixed = (
        mechanism_from_json(BLOCK | {"sampling": s}) for s in ("poisson", "fixed_size")
    )
    assert isinstance(poisson, DenoisingBlock)
    assert isinstance(fixed, DenoisingBlock)
    assert fixed.mu_bar() == pytest.approx(2.0 * poisson.mu_bar(), rel=1e-12)
    assert fixed.step_mu() == pytest.approx([2.0 * m for m in poisson.step_mu()], rel=1e-12)


def test_step_parameters_follow_the_formula() -> None:
    m = mechanism_from_json(BLOCK | {"beta": [1.0 + i / 10 for i in range(20)]})
    assert isinstance(m, DenoisingBlock)
    levels = m.levels()
    assert levels[0] == 80.0
    assert len(levels) == 21
    assert m.handoff_level == levels[-1]
    for i, mu in enumerate(m.step_mu()):
        t, dt = levels[i], levels[i] - levels[i + 1]
        s = 12.5 / ((1.0 + i / 10) * 3)
        assert mu == pytest.approx(s * math.sqrt(2 * dt / t**3), rel=1e-12)
    # rounded up, never down
    assert Decimal(m.mu_bar()) ** 2 >= sum(Decimal(x) ** 2 for x in m.step_mu())


def test_drawing_afresh_each_step_is_charged_step_by_step() -> None:
    m = mechanism_from_json(BLOCK | {"subsampling": "per_step"})
    assert isinstance(m, DenoisingBlock)
    (terms,) = dominating_terms(m)
    assert len(terms) == 20
    for term, mu in zip(terms, m.step_mu(), strict=True):
        assert isinstance(term, GaussianTerm)
        assert term.sampling_probability == 3 / 5000
        assert term.count == 500
        assert mu <= term.mu <= mu * (1 + 1e-12)


def test_full_batch_is_not_amplified() -> None:
    m = mechanism_from_json(without(BLOCK, "subsample_size", subsampling="full_batch"))
    assert isinstance(m, DenoisingBlock)
    assert m.divisor == 5000
    assert dominating_terms(m) == ((GaussianTerm(1.0, m.mu_bar(), 500),),)


def test_a_class_conditional_block_has_one_alternative_for_each_class_not_dominated() -> None:
    m = mechanism_from_json(conditional())
    assert isinstance(m, DenoisingBlock)
    mu = m.mu_bar()
    # the third class has both a smaller rate and fewer outputs than the others
    assert set(dominating_terms(m)) == {
        (GaussianTerm(0.006, mu, 50),),
        (GaussianTerm(0.008, mu, 40),),
    }


def test_inside_a_composition_one_part_keeps_its_classes() -> None:
    parts = [{"mechanism": conditional(), "count": 2}, {"mechanism": GAUSSIAN}]
    m = mechanism_from_json({"kind": "composition", "parts": parts})
    block = mechanism_from_json(conditional())
    assert isinstance(block, DenoisingBlock)
    gaussian = GaussianTerm(1.0, 0.5, 2)
    assert set(dominating_terms(m)) == {
        (GaussianTerm(0.008, block.mu_bar(), 80), gaussian),
        (GaussianTerm(0.006, block.mu_bar(), 100), gaussian),
    }
    assert realised_terms(m) is None


def test_of_two_parts_with_classes_one_pair_stands_for_all() -> None:
    parts = [{"mechanism": conditional(), "count": 2}, {"mechanism": conditional()}]
    m = mechanism_from_json({"kind": "composition", "parts": parts})
    block = mechanism_from_json(conditional())
    assert isinstance(block, DenoisingBlock)
    assert dominating_terms(m) == ((GaussianTerm(0.008, block.mu_bar(), 150),),)
    below = realised_terms(m)
    assert below is not None
    assert all(len(terms) == 1 for terms in below)


def test_equal_parts_are_counted_together() -> None:
    m = mechanism_from_json(
        {"kind": "composition", "parts": [{"mechanism": DECLARED, "count": 2}] * 3}
    )
    assert dominating_terms(m) == ((ApproximateDPTerm(Decimal("0.5"), Decimal("1e-7"), 18),),)


def test_declared_decimals_are_kept_as_written() -> None:
    m = mechanism_from_json({"kind": "approximate_dp", "epsilon": "0.30000000000000000001"})
    assert isinstance(m, ApproximateDP)
    assert m.epsilon == Decimal("0.30000000000000000001")
    assert mechanism_to_json(m)["epsilon"] == "0.30000000000000000001"
    third = mechanism_from_json({"kind": "approximate_dp", "epsilon": 0.1})
    assert isinstance(third, ApproximateDP)
    assert third.epsilon == Decimal("0.1")


@pytest.mark.parametrize(
    ("obj", "field"),
    [
        (BLOCK, "weight"),
        (BLOCK | {"weight": "uniform"}, "feature_dimension"),
        (BLOCK | {"weight": "centred", "feature_dimension": 784}, "centre"),
        (DP_SGD, "clip_norm"),
        (DP_SGD | {"clip_norm": 1.0}, "divisor"),
        (
            without(
                BLOCK,
                "subsample_size",
                subsampling="full_batch",
                sampling="fixed_size",
                weight="uniform",
                feature_dimension=784,
            ),
            "sampling",
        ),
        (
            {"kind": "composition", "parts": [{"mechanism": DP_SGD}]},
            "parts[0].mechanism.clip_norm",
        ),
        (
            {
                "kind": "composition",
                "parts": [
                    {"mechanism": GAUSSIAN},
                    {
                        "mechanism": without(
                            BLOCK,
                            "subsample_size",
                            subsampling="full_batch",
                            sampling="fixed_size",
                            weight="uniform",
                            feature_dimension=784,
                        )
                    },
                ],
            },
            "parts[1].mechanism.sampling",
        ),
        *(
            (CHARGED_FETA | {stage: without(CHARGED_FETA[stage], name)}, f"{stage}.{name}")
            for stage, name in (
                ("spatial", "clip_norm"),
                ("spatial", "divisor"),
                ("frequency", "feature_dimension"),
                ("dp_sgd", "clip_norm"),
                ("dp_sgd", "divisor"),
            )
        ),
        (
            {"kind": "composition", "parts": [{"mechanism": FETA}]},
            "parts[0].mechanism.spatial.clip_norm",
        ),
    ],
)
def test_what_is_charged_carries_what_the_code_reads(obj: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidMechanism) as caught:
        require_chargeable(mechanism_from_json(obj))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "obj",
    [
        GAUSSIAN,
        LAPLACE,
        RESPONSE,
        NOISY_COUNTS,
        NOISY_MAX,
        DECLARED,
        DP_SGD | {"clip_norm": 1.0, "divisor": 100},
        CHARGED_FETA,
        without(CHARGED_FETA, "spatial", "frequency"),
        {"kind": "composition", "parts": [{"mechanism": CHARGED_FETA, "count": 2}]},
        BLOCK | {"weight": "uniform", "feature_dimension": 784},
        BLOCK | {"weight": "centred", "centre": "public_class_mean", "feature_dimension": 784},
    ],
)
def test_complete_mechanisms_may_be_charged(obj: dict[str, Any]) -> None:
    require_chargeable(mechanism_from_json(obj))


@pytest.mark.parametrize(("clip_norm", "beta"), [(1e-100, 1e100), (1e100, 1e-100)])
def test_a_block_whose_parameter_leaves_double_precision_is_refused(
    clip_norm: float, beta: float
) -> None:
    """Its square would underflow to no loss at all, or overflow."""
    with pytest.raises(InvalidMechanism) as refused:
        DenoisingBlock(
            EdmSchedule(), 20, clip_norm, beta, subsample_size=3, public_size=100, outputs=1
        )
    assert refused.value.field == "clip_norm"


def test_a_question_has_a_bounded_number_of_parts() -> None:
    """Many classes are bounded by one pair that dominates them; too many steps are refused."""
    classes = [
        {"label": i, "outputs": 1 + i, "sampling_probability": 0.5 / (1 + i)} for i in range(140)
    ]
    m = mechanism_from_json(without(BLOCK, "outputs", "public_size", "sampling", classes=classes))
    assert isinstance(m, DenoisingBlock)
    assert dominating_terms(m) == ((GaussianTerm(0.5, m.mu_bar(), 140),),)
    few = mechanism_from_json(
        without(BLOCK, "outputs", "public_size", "sampling", classes=classes[:3])
    )
    assert len(dominating_terms(few)) == 3
    long = mechanism_from_json(
        BLOCK | {"schedule": EDM | {"steps": 1200}, "block_steps": 1100, "subsampling": "per_step"}
    )
    with pytest.raises(InvalidMechanism) as refused:
        dominating_terms(long)
    assert refused.value.field == "mechanism"


@pytest.mark.parametrize("delta", ["1", "0.99999999999999999999"])
def test_a_declared_delta_of_one_is_refused(delta: str) -> None:
    with pytest.raises(InvalidMechanism) as refused:
        mechanism_from_json({"kind": "approximate_dp", "epsilon": 1, "delta": delta, "count": 2})
    assert refused.value.field == "delta"


@pytest.mark.parametrize("rho", [1e-99, 1e-3])
def test_a_grid_that_leaves_double_precision_is_refused(rho: float) -> None:
    with pytest.raises(InvalidMechanism) as refused:
        EdmSchedule(rho=rho)
    assert refused.value.field == "rho"


@pytest.mark.parametrize("text", ["1_0", " 1 ", "+1", "\u0663", "0x1", "1e99999", "", "."])
def test_a_decimal_is_ascii_digits_as_written(text: str) -> None:
    with pytest.raises(InvalidMechanism) as refused:
        mechanism_from_json({"kind": "approximate_dp", "epsilon": text, "count": 1})
    assert refused.value.field == "epsilon"


# -- the other kinds -------------------------------------------------------------------------------


def above(x: float) -> float:
    return math.nextafter(x, math.inf)


@pytest.mark.parametrize(
    ("obj", "term"),
    [
        (LAPLACE, LaplaceTerm(0.5, 3)),
        (RESPONSE, ApproximateDPTerm(Decimal("0.5"), Decimal(0), 2)),
        (NOISY_COUNTS, GaussianTerm(1.0, above(1 / 30), 1)),
        (NOISY_MAX, ApproximateDPTerm(Decimal("0.1"), Decimal(0), 4)),
    ],
)
def test_what_each_kind_costs(obj: dict[str, Any], term: Any) -> None:
    assert dominating_terms(mechanism_from_json(obj)) == ((term,),)
    once = dominating_terms(mechanism_from_json(without(obj, "count")))
    assert once == ((replace(term, count=1),),)


@given(positive)
@settings(max_examples=100, deadline=None)
def test_the_reciprocal_of_a_noise_multiplier_is_rounded_up(noise: float) -> None:
    for kind in ("gaussian", "laplace"):
        m = mechanism_from_json({"kind": kind, "noise_multiplier": noise})
        ((term,),) = dominating_terms(m)
        value = term.mu if isinstance(term, GaussianTerm) else cast(LaplaceTerm, term).inverse_scale
        assert 1 <= Fraction(value) * Fraction(noise) <= 1 + Fraction(1, 2**51)


def test_a_rate_that_rounds_to_one_is_not_amplified() -> None:
    m = mechanism_from_json(SUBSAMPLED | {"sampling_probability": 1 + 1e-16})
    assert dominating_terms(m) == ((GaussianTerm(1.0, 0.5, 10),),)


def test_every_stage_of_a_pipeline_is_charged() -> None:
    m = mechanism_from_json(FETA)
    sgd = GaussianTerm(1 / 14, above(1 / 14.78), 2100)
    assert dominating_terms(m) == (
        (GaussianTerm(0.1091, 0.05, 5), GaussianTerm(1.0, above(1 / 26.6), 1), sgd),
    )
    alone = mechanism_from_json(without(FETA, "spatial", "frequency"))
    assert dominating_terms(alone) == ((sgd,),)
    # DP-SGD is charged as the stage of the same name is, neither a step more nor a step less
    stage = mechanism_from_json({"kind": "dp_sgd"} | FETA["dp_sgd"])
    assert dominating_terms(stage) == dominating_terms(alone)


@pytest.mark.parametrize("steps", [1, 2, 13, 2100])
def test_steps_are_counted_as_they_are_run(steps: int) -> None:
    sgd = mechanism_from_json(DP_SGD | {"steps": steps})
    spatial = mechanism_from_json(
        without(FETA, "frequency", "dp_sgd", spatial=FETA["spatial"] | {"rounds": steps})
    )
    for m in (sgd, spatial):
        ((term,),) = dominating_terms(m)
        assert term.count == steps


@pytest.mark.parametrize("block_steps", [1, 2, 38])
def test_a_block_has_one_parameter_for_each_of_its_steps(block_steps: int) -> None:
    m = mechanism_from_json(BLOCK | {"block_steps": block_steps, "subsampling": "per_step"})
    assert isinstance(m, DenoisingBlock)
    assert len(m.step_mu()) == len(m.levels()) - 1 == block_steps
    (terms,) = dominating_terms(m)
    assert sum(t.count for t in terms) == block_steps * 500


def test_what_touches_every_gradient_of_a_batch_is_counted_so() -> None:
    """One record that meets each of 64 sanitised gradients of 100 steps is charged 6400 times."""
    step = {"kind": "gaussian", "noise_multiplier": 2.0, "count": 64}
    m = mechanism_from_json({"kind": "composition", "parts": [{"mechanism": step, "count": 100}]})
    assert dominating_terms(m) == ((GaussianTerm(1.0, 0.5, 6400),),)


def test_three_noisy_maxima_are_three_charges() -> None:
    m = mechanism_from_json({"kind": "composition", "parts": [{"mechanism": NOISY_MAX}] * 3})
    assert dominating_terms(m) == ((ApproximateDPTerm(Decimal("0.1"), Decimal(0), 12),),)


def test_a_rate_comes_from_the_declared_size() -> None:
    obj = without(DP_SGD, "sampling_probability", expected_batch_size=4096, public_size=55000)
    m = mechanism_from_json(obj)
    ((term,),) = dominating_terms(m)
    assert isinstance(term, GaussianTerm)
    assert term.sampling_probability == 4096 / 55000
    with pytest.raises(InvalidMechanism) as refused:
        mechanism_from_json(without(obj, "public_size", n=54321))
    assert refused.value.field == "public_size"


def test_a_composition_may_have_a_thousand_distinct_parts() -> None:
    parts = [{"mechanism": SUBSAMPLED | {"noise_multiplier": 1 + i / 100}} for i in range(1000)]
    (terms,) = dominating_terms(mechanism_from_json({"kind": "composition", "parts": parts}))
    assert len(terms) == 1000
    feta = [{"mechanism": FETA | {"frequency": {"noise_multiplier": 1 + i}}} for i in range(999)]
    with pytest.raises(InvalidMechanism) as refused:
        dominating_terms(mechanism_from_json({"kind": "composition", "parts": [*parts[:1], *feta]}))
    assert refused.value.field == "mechanism"
