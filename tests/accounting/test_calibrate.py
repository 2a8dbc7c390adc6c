"""Inverse questions: the answer meets the target, and nothing noticeably better does."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import bounds, calibrate, gaussian_dp
from accounting.bounds import Bracket, Limits
from accounting.calibrate import PRECISION, EpsilonBound, Stage, allocate
from accounting.errors import InvalidMechanism, InvalidRequest, UndecidableBound
from accounting.mechanisms import (
    DPSGD,
    ApproximateDP,
    ClassShare,
    Composition,
    DenoisingBlock,
    EdmSchedule,
    FetaPro,
    Gaussian,
    Laplace,
    Mechanism,
    Part,
    SubsampledGaussian,
    dominating_terms,
    mechanism_from_json,
)
from accounting.mechanisms import (
    FrequencyStage as Frequency,
)
from accounting.mechanisms import (
    SgdStage as Sgd,
)
from accounting.mechanisms import (
    SpatialStage as Spatial,
)

BLOCK = DenoisingBlock(
    EdmSchedule(), 26, 12.5, subsample_size=25, public_size=50_000, outputs=50_000
)
BY_CLASS = replace(
    BLOCK,
    public_size=None,
    outputs=None,
    classes=tuple(ClassShare(i, 100 * (i + 1), 0.005) for i in range(3)),
)
PAIR = Composition((Part(Gaussian(5.0)), Part(Gaussian(1.0), 3)))


def renyi(m: Mechanism, delta: float, tolerance: float | None, limits: Limits) -> Bracket:
    """Cheap, and as good as any other upper bound for what is tested here."""
    return bounds.renyi(m, delta)


def at(m: Mechanism, path: str, value: float) -> Mechanism:
    obj: Any = m.to_json()
    *inner, last = calibrate._steps(path)
    return mechanism_from_json(calibrate._with(obj, (*inner, last), value))


# --------------------------------------------------------------------------------------------------
# Answers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "delta", "sigma"), [(0.01, 1e-5, 243.785), (1.0, 1e-6, 4.22468)]
)
def test_the_noise_of_a_gaussian(epsilon: float, delta: float, sigma: float) -> None:
    found = calibrate.calibrate(Gaussian(1.0), "noise_multiplier", epsilon=epsilon, delta=delta)
    assert found.parameter == pytest.approx(sigma, rel=5e-6)
    assert found.bracket.upper <= epsilon
    assert found.mechanism == Gaussian(found.parameter)
    assert found.evaluations <= 12


@given(
    epsilon=st.floats(-4, 2).map(lambda x: 10.0**x),
    delta=st.floats(-15, -1).map(lambda x: 10.0**x),
    start=st.floats(-8, 8).map(math.exp),
)
@settings(max_examples=100, deadline=None)
def test_a_gaussians_answer_is_tight_from_anywhere(
    epsilon: float, delta: float, start: float
) -> None:
    found = calibrate.calibrate(Gaussian(start), "noise_multiplier", epsilon=epsilon, delta=delta)
    assert found.bracket.upper <= epsilon
    better = 1.0 / (found.parameter * (1.0 - 2.0 * PRECISION))
    assert gaussian_dp.epsilon_bounds((better, better), delta)[1] > epsilon


REAL: list[tuple[Mechanism, str, float, int]] = [
    (SubsampledGaussian(0.01, 1.0, 1000), "noise_multiplier", 1.0, -1),
    (SubsampledGaussian(0.01, 5.0, 1000), "sampling_probability", 1.0, 1),
    (DPSGD(0.01, 1.0, 1000), "noise_multiplier", 1.0, -1),
    (BLOCK, "beta", 0.5, -1),
    (BLOCK, "clip_norm", 0.5, 1),
    (PAIR, "parts[1].mechanism.noise_multiplier", 1.1, -1),
    (Laplace(1.0, 10), "noise_multiplier", 0.7, -1),
    (
        FetaPro(1000, Spatial(5, 0.1, 5.0), Frequency(8.0), Sgd(0.1, 1.0, 100)),
        "frequency.noise_multiplier",
        9.0,
        -1,
    ),
]


@pytest.mark.parametrize(("m", "free", "epsilon", "worse"), REAL, ids=lambda x: str(x)[:40])
def test_a_real_answer_meets_the_target_and_a_millionth_less_does_not(
    m: Mechanism, free: str, epsilon: float, worse: int
) -> None:
    found = calibrate.calibrate(m, free, epsilon=epsilon, delta=1e-5, bound=renyi)
    assert found.mechanism == at(m, free, found.parameter)
    assert found.reason == ""
    assert found.evaluations <= 16
    assert isinstance(found.bracket, Bracket)
    assert bounds.renyi(found.mechanism, 1e-5).upper == found.bracket.upper <= epsilon
    missed = at(m, free, found.parameter * (1.0 + 3e-6 * worse))
    assert bounds.renyi(missed, 1e-5).upper > epsilon


INTEGER: list[tuple[Mechanism, str, float, int]] = [
    (Gaussian(20.0), "count", 1.0, 1),
    (Gaussian(20_000.0), "count", 1.0, 1),
    (SubsampledGaussian(0.01, 2.0), "count", 1.0, 1),
    (DPSGD(0.01, 1.0, 1), "steps", 1.5, 1),
    (BLOCK, "outputs", 1.0, 1),
    (BLOCK, "block_steps", 1.0, 1),
    (BLOCK, "subsample_size", 1.0, -1),
    (Composition((Part(Gaussian(5.0)), Part(Gaussian(9.0), 3))), "parts[1].count", 1.5, 1),
    (FetaPro(1000, Spatial(1, 0.1, 5.0), Frequency(8.0)), "spatial.rounds", 1.0, 1),
]


@pytest.mark.parametrize(("m", "free", "epsilon", "worse"), INTEGER, ids=lambda x: str(x)[:40])
def test_the_integer_next_to_the_answer_misses_the_target(
    m: Mechanism, free: str, epsilon: float, worse: int
) -> None:
    found = calibrate.calibrate(m, free, epsilon=epsilon, delta=1e-5, bound=renyi)
    assert isinstance(found.parameter, int)
    assert found.mechanism == at(m, free, found.parameter)
    assert bounds.renyi(found.mechanism, 1e-5).upper <= epsilon
    assert bounds.renyi(at(m, free, found.parameter + worse), 1e-5).upper > epsilon
    assert found.evaluations <= 20


def test_the_handoff_is_the_number_of_block_steps() -> None:
    by_name, by_alias = (
        calibrate.calibrate(BLOCK, free, epsilon=1.0, delta=1e-5, bound=renyi)
        for free in ("block_steps", "handoff")
    )
    assert (by_alias.parameter, by_alias.mechanism) == (by_name.parameter, by_name.mechanism)


def test_outputs_of_all_classes_are_scaled_together() -> None:
    found = calibrate.calibrate(BY_CLASS, "outputs", epsilon=2.0, delta=1e-5, bound=renyi)
    made = found.mechanism
    assert isinstance(made, DenoisingBlock)
    assert made.classes is not None
    counts = [c.outputs for c in made.classes]
    assert found.parameter == sum(counts)
    largest = counts[-1]
    assert counts == [largest // 3, 2 * largest // 3, largest]
    more = replace(made, classes=(*made.classes[:2], replace(made.classes[2], outputs=largest + 1)))
    assert bounds.renyi(made, 1e-5).upper <= 2.0 < bounds.renyi(more, 1e-5).upper


def test_delta_is_the_curve_itself() -> None:
    found = calibrate.calibrate(Gaussian(2.0), "delta", epsilon=1.0)
    assert found.bracket == bounds.delta(Gaussian(2.0), 1.0)
    assert found.parameter == found.bracket.upper
    with pytest.raises(InvalidRequest, match=r"^target\.delta: "):
        calibrate.calibrate(Gaussian(2.0), "delta", epsilon=1.0, delta=1e-5)


def test_the_ends_of_a_parameters_meaning_are_answers() -> None:
    def ask(m: Mechanism, free: str) -> calibrate.Calibration:
        return calibrate.calibrate(m, free, epsilon=5.0, delta=1e-5, bound=renyi)

    assert ask(SubsampledGaussian(0.1, 10.0), "sampling_probability").parameter == 1.0
    weak = replace(BLOCK, outputs=1, clip_norm=1e-3)
    assert ask(weak, "block_steps").parameter == 38
    assert ask(weak, "subsample_size").parameter == 1


def test_a_target_of_no_loss_is_met_by_enough_noise() -> None:
    """Total variation at most delta: mu/2 of about delta * sqrt(pi/2)."""
    found = calibrate.calibrate(Gaussian(1.0), "noise_multiplier", epsilon=1e-60, delta=1e-6)
    assert found.bracket.upper == 0.0
    assert found.parameter == pytest.approx(1e6 / math.sqrt(2 * math.pi), rel=1e-5)


def test_a_declared_epsilon_may_be_free() -> None:
    m = ApproximateDP.from_json({"epsilon": "1.0000000000000000000001"})
    found = calibrate.calibrate(m, "epsilon", epsilon=2.0, delta=1e-30)
    assert found.parameter == pytest.approx(2.0, rel=2e-6)
    assert isinstance(found.mechanism, ApproximateDP)
    assert found.mechanism.epsilon == Decimal(repr(found.parameter))


def test_what_is_found_may_be_left_out() -> None:
    obj = {"kind": "feta_pro", "public_size": 9, "dp_sgd": {"sampling_probability": 1, "steps": 1}}
    made = calibrate.read(obj, "dp_sgd.noise_multiplier")
    assert isinstance(made, FetaPro)
    assert calibrate.read({"kind": "gaussian"}, "noise_multiplier") == Gaussian(1.0)
    block = {k: v for k, v in BLOCK.to_json().items() if k != "block_steps"}
    assert calibrate.read(block, "handoff") == replace(BLOCK, block_steps=1)
    for free in ("count", "delta", "", "parts[0].count"):
        with pytest.raises(InvalidMechanism, match=r"^noise_multiplier: is required"):
            calibrate.read({"kind": "gaussian"}, free)


# --------------------------------------------------------------------------------------------------
# FETA-Pro (second paper): printed sigma_d and shares
# --------------------------------------------------------------------------------------------------

# n, epsilon, rounds, batch, sigma_t, sigma_f, steps, 1/q_d, sigma_d, shares in % (t, f, d)
ROWS: dict[str, tuple[Any, ...]] = {
    "MNIST-1": (55_000, 1, 5, 6000, 20, 26.6, 2100, 14, "14.78", ".29", "2.8", "96.9"),
    "MNIST-10": (55_000, 10, 5, 6000, 5, 7.4, 2100, 14, "2.00", ".08", ".6", "99.3"),
    "CIFAR-10-1": (45_000, 1, 5, 6000, 15, 32.6, 1650, 11, "16.46", ".8", "1.8", "97.4"),
    "CIFAR-10-10": (45_000, 10, 5, 6000, 5, 8.2, 1650, 11, "2.21", ".1", ".5", "99.4"),
    "CelebA": (145_064, 1, 250, 12_000, 15, 25.0, 5400, 36, "10.64", "16.5", "3.5", "80"),
    "Camelyon": (269_538, 1, 250, 12_000, 10, 49.6, 3300, 66, "4.53", "11.4", ".9", "87.6"),
}


def half_unit(printed: str) -> float:
    return 0.5 * 10.0 ** -len(printed.partition(".")[2])


@pytest.mark.parametrize("name", ROWS)
def test_feta_pro_needs_the_printed_noise(name: str) -> None:
    n, epsilon, rounds, batch, sigma_t, sigma_f, steps, inverse_rate, sigma_d, *parts = ROWS[name]
    delta = 1.0 / (n * math.log(n))
    m = FetaPro(
        n,
        Spatial(rounds, batch / n, sigma_t),
        Frequency(sigma_f),
        Sgd(1.0 / inverse_rate, 1.0, steps),
    )

    def ask(method: calibrate.Method) -> calibrate.Calibration:
        return calibrate.calibrate(
            m, "dp_sgd.noise_multiplier", epsilon=epsilon, delta=delta, method=method
        )

    by_rdp = ask("rdp")
    assert abs(by_rdp.parameter - float(sigma_d)) <= half_unit(sigma_d)
    assert [s.stage for s in by_rdp.shares] == ["spatial", "frequency", "dp_sgd"]
    assert math.fsum(s.share for s in by_rdp.shares) == pytest.approx(1.0)
    for share, printed in zip(by_rdp.shares, parts, strict=True):
        # sigma_f is printed to a decimal, and a cost falls with the square of its noise.
        rounding = 2.0 * 100.0 * share.share * 0.05 / sigma_f
        assert abs(100.0 * share.share - float(printed)) <= half_unit(printed) + rounding

    tight = ask("certified")
    assert 0.8 * by_rdp.parameter < tight.parameter < by_rdp.parameter
    assert tight.bracket.upper <= epsilon
    assert tight.bracket.lower >= epsilon * (1.0 - 2e-3)


# --------------------------------------------------------------------------------------------------
# What can't be answered
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "free", "epsilon", "field"),
    [
        (Gaussian(1.0), "sigma", 1.0, "free"),
        (Gaussian(1.0), "", 1.0, "free"),
        (Gaussian(1.0), "kind", 1.0, "free"),
        (Gaussian(1.0), "count.count", 1.0, "free"),
        (Gaussian(1.0), "parts[0].count", 1.0, "free"),
        (PAIR, "parts[2].count", 1.0, "free"),
        (PAIR, "count", 1.0, "free"),
        (DPSGD(0.1, 1.0, 10, clip_norm=1.0), "clip_norm", 1.0, "free"),
        (BLOCK, "schedule.steps", 1.0, "free"),
        (replace(BLOCK, beta=(1.0,) * 26), "beta", 1.0, "free"),
        (replace(BLOCK, beta=(1.0,) * 26), "block_steps", 1.0, "free"),
        # Even the most private value costs more.
        (Gaussian(1.0), "count", 1.0, "free"),
        (PAIR, "parts[1].mechanism.noise_multiplier", 0.5, "free"),
        (replace(BLOCK, outputs=10**9), "block_steps", 1e-9, "free"),
        # Every value up to the limit is good enough.
        (Gaussian(1e7), "count", 1.0, "target"),
        (Gaussian(1.0), "noise_multiplier", 0.0, "target.epsilon"),
        (Gaussian(1.0), "noise_multiplier", -1.0, "target.epsilon"),
        (Gaussian(1.0), "noise_multiplier", math.nan, "target.epsilon"),
        (Gaussian(1.0), "noise_multiplier", math.inf, "target.epsilon"),
        (Gaussian(1.0), "noise_multiplier", 5e-324, "target.epsilon"),
    ],
)
def test_an_unanswerable_question_names_what_is_wrong(
    m: Mechanism, free: str, epsilon: float, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        calibrate.calibrate(m, free, epsilon=epsilon, delta=1e-5, bound=renyi)
    assert caught.value.field == field


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan, 5e-324, None])
def test_a_targets_delta_lies_between_0_and_1(delta: float | None) -> None:
    with pytest.raises(InvalidRequest, match=r"^target\.delta: "):
        calibrate.calibrate(Gaussian(1.0), "count", epsilon=1.0, delta=delta)


def test_a_method_is_known() -> None:
    with pytest.raises(InvalidRequest, match=r"^method: must be one of certified, rdp"):
        calibrate.calibrate(
            Gaussian(1.0),
            "count",
            epsilon=1.0,
            delta=1e-5,
            method="guess",  # type: ignore[arg-type]
        )


def slow(bound: EpsilonBound, seconds: float) -> EpsilonBound:
    def slowed(m: Mechanism, delta: float, tolerance: float | None, limits: Limits) -> Bracket:
        time.sleep(seconds)
        return bound(m, delta, tolerance, limits)

    return slowed


def test_a_search_ends_with_its_time() -> None:
    def ask(seconds: float) -> calibrate.Calibration:
        return calibrate.calibrate(
            Gaussian(100.0, 5),
            "noise_multiplier",
            epsilon=1.0,
            delta=1e-5,
            limits=Limits(seconds=seconds),
            bound=slow(calibrate.certified, 0.2),
        )

    begin = time.monotonic()
    found = ask(0.3)
    assert time.monotonic() - begin < 1.0
    # 100 was good enough, though not the best.
    assert found.bracket.upper <= 1.0
    assert "cut short" in found.reason
    with pytest.raises(UndecidableBound, match="no noise_multiplier"):
        calibrate.calibrate(
            Gaussian(1e-3),
            "noise_multiplier",
            epsilon=1.0,
            delta=1e-5,
            limits=Limits(seconds=0.1),
            bound=slow(calibrate.certified, 0.2),
        )


def test_an_allocation_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are priced again and again on the way to a noise: none after the time is over."""
    priced, made, ticks = itertools.count(), itertools.count(), itertools.count()
    cost, terms_of = calibrate._cost, calibrate._terms_of

    def counted_cost(*args: Any) -> float:
        next(priced)
        return cost(*args)

    def counted_terms(m: Composition) -> Any:
        next(made)
        return terms_of(m)

    monkeypatch.setattr(calibrate, "_cost", counted_cost)
    monkeypatch.setattr(calibrate, "_terms_of", counted_terms)
    stages = [Stage(replace(BY_CLASS, clip_norm=1.0 + i)) for i in range(20)]
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: 1e-3 * next(ticks))
        with pytest.raises(UndecidableBound):
            allocate(stages, epsilon=1.0, delta=1e-5, limits=Limits(seconds=0.03))
    assert 10 <= next(priced) <= 31
    assert next(made) == len(stages)
    found = allocate(stages, epsilon=1.0, delta=1e-5, bound=renyi)
    assert not found.reason
    assert found.bracket.upper <= 1.0
    # The terms are made once more for all stages together in each round.
    assert next(made) <= 2 * len(stages) + 1 + calibrate._ROUNDS


def test_an_allocation_cut_short_after_an_answer_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_time(*_: Any) -> Any:
        raise UndecidableBound("the time was over")

    monkeypatch.setattr(calibrate, "_best_order", no_time)
    found = allocate([Stage(Gaussian(1.0))], epsilon=1.0, delta=1e-5)
    assert found.bracket.upper <= 1.0
    assert "cut short" in found.reason
    assert found.shares == ()


def test_a_stages_terms_move_with_its_noise() -> None:
    kinds: list[Mechanism] = [
        Gaussian(1.0, 3),
        Laplace(1.0),
        SubsampledGaussian(0.1, 1.0, 5),
        DPSGD(0.05, 1.0, 500),
        BLOCK,
        BY_CLASS,
    ]
    best = calibrate._AtOrder(math.inf, 4.0, "remove")
    for m in kinds:
        source = calibrate._noise_source(0, Stage(m))
        for noise in (0.7, 3.0):
            (terms, *_) = dominating_terms(source.at(noise))
            assert source.cost(noise, best) == pytest.approx(
                calibrate._cost(terms, 4.0, "remove"), rel=1e-12
            )


def test_a_stage_with_several_noises_is_named() -> None:
    block = replace(BLOCK, beta=tuple(1.0 + 0.01 * i for i in range(BLOCK.block_steps)))
    with pytest.raises(InvalidRequest, match="one beta for all steps") as caught:
        allocate([Stage(Gaussian(1.0)), Stage(block)], epsilon=1.0, delta=1e-5)
    assert caught.value.field == "stages[1].mechanism"


def test_rdp_ends_with_its_time() -> None:
    parts = tuple(Part(SubsampledGaussian(0.01, 1.0 + i / 1000, 9)) for i in range(1000))
    begin = time.monotonic()
    with pytest.raises(UndecidableBound):
        calibrate.calibrate(
            Composition(parts),
            "parts[0].count",
            epsilon=1.0,
            delta=1e-5,
            method="rdp",
            limits=Limits(seconds=0.01),
        )
    assert time.monotonic() - begin < 3.0


# --------------------------------------------------------------------------------------------------
# Allocation
# --------------------------------------------------------------------------------------------------


def test_two_gaussians_share_by_their_inverse_variances() -> None:
    found = allocate([Stage(Gaussian(1.0), 1), Stage(Gaussian(7.0, 5), 3)], epsilon=1.0, delta=1e-6)
    first, second = (s.mechanism for s in found.stages)
    assert isinstance(first, Gaussian)
    assert isinstance(second, Gaussian)
    assert second.count == 5
    # mu^2 of the two as 1 to 3, and in all that of the Gaussian that meets the target alone.
    mu = [first.noise_multiplier**-2, 5 * second.noise_multiplier**-2]
    assert mu[1] / mu[0] == pytest.approx(3.0, rel=1e-6)
    assert sum(mu) == pytest.approx(4.22468**-2, rel=1e-5)
    assert [s.share for s in found.shares] == pytest.approx([0.25, 0.75], rel=1e-6)
    assert found.bracket.upper <= 1.0
    assert found.mechanism == Composition((Part(first), Part(second)))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 20.0])
def test_different_stages_share_as_they_are_weighted(epsilon: float) -> None:
    kinds: list[Mechanism] = [
        SubsampledGaussian(0.1, 1.0, 5),
        Laplace(1.0),
        DPSGD(0.05, 1.0, 500),
        BLOCK,
    ]
    weights = [0.1, 0.2, 0.3, 0.4]
    found = allocate(
        [Stage(m, 7 * w) for m, w in zip(kinds, weights, strict=True)],
        epsilon=epsilon,
        delta=1e-6,
        bound=renyi,
    )
    assert [s.share for s in found.shares] == pytest.approx(weights, rel=1e-3)
    assert epsilon * (1 - 1e-5) < found.bracket.upper <= epsilon
    assert found.evaluations <= 30
    assert [type(s.mechanism) for s in found.stages] == [type(m) for m in kinds]


@pytest.mark.parametrize(
    ("stages", "field"),
    [
        ([], "stages"),
        ([Stage(Gaussian(1.0))] * 33, "stages"),
        ([Stage(Gaussian(1.0), 0.0)], "stages[0].weight"),
        ([Stage(Gaussian(1.0)), Stage(Gaussian(1.0), math.nan)], "stages[1].weight"),
        ([Stage(Gaussian(1.0), True)], "stages[0].weight"),
        ([Stage(PAIR)], "stages[0].mechanism"),
        ([Stage(ApproximateDP.from_json({"epsilon": 1.0}))], "stages[0].mechanism"),
    ],
)
def test_a_wrong_stage_is_named(stages: list[Stage], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        allocate(stages, epsilon=1.0, delta=1e-5)
    assert caught.value.field == field


def test_shares_are_of_mechanisms_with_stages_only() -> None:
    assert calibrate.shares(Gaussian(1.0), 1e-5) == ()
    (only,) = calibrate.shares(FetaPro(9, dp_sgd=Sgd(0.5, 1.0, 3)), 1e-5)
    assert (only.stage, only.share) == ("dp_sgd", 1.0)
    # Nothing has a finite cost where a part gives up with more than delta.
    lost = Composition((Part(ApproximateDP.from_json({"epsilon": 1.0, "delta": 0.1})),))
    assert calibrate.shares(lost, 1e-5) == ()
