"""Plans: what a job spec and a dataset's public facts come to."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest

from accounting import bounds, filters
from accounting.errors import InvalidRequest
from accounting.filters import Budget, Filter
from accounting.mechanisms import DenoisingBlock, EdmSchedule, mechanism_from_json
from accounting.quotes import JobPlan, drift_ceiling, plan_denoise

CLASSES = [str(digit) for digit in range(10)]
FACTS: dict[str, Any] = {
    "shape": [28, 28, 1],
    "value_range": [0, 255],
    "classes": CLASSES,
    "public_size": 4000,
    "public_class_sizes": None,
}
PRESET: dict[str, Any] = {
    "weight": "centred",
    "block_steps": 18,
    "subsample_size": 3,
    "clip_norm": 12.5,
}
SPEC: dict[str, Any] = {
    "kind": "denoise",
    "outputs": dict.fromkeys(CLASSES, 50),
    "preset": PRESET,
}
BUDGET = Budget.from_json(
    {"epsilon": 6.0, "delta": 1e-5, "use": {"kind": "few_large", "releases": 1}}
)


@dataclass(frozen=True)
class Model:
    name: str = "glyphs"
    sha256: str = "0" * 64
    shape: tuple[int, int, int] = (28, 28, 1)
    classes: tuple[str, ...] | None = tuple(CLASSES)


def plan(
    spec: dict[str, Any],
    facts: dict[str, Any] = FACTS,
    budget: Budget | None = BUDGET,
    models: tuple[Model, ...] = (Model(),),
) -> JobPlan:
    family: tuple[Filter, ...] = () if budget is None else filters.family(budget)
    return plan_denoise(spec, facts, budget, family, models, bounds.renyi)


def test_the_plan_of_an_explicit_preset() -> None:
    made = plan(SPEC)
    block = made.mechanism
    assert block.classes is not None
    assert [share.label for share in block.classes] == list(range(10))
    # q_c = B * classes / public_size, from declared numbers only.
    assert {share.sampling_probability for share in block.classes} == {3 / 400}
    assert block.divisor == 3
    assert block.feature_dimension == 784
    assert block.centre == "public_class_mean"
    assert made.progress_total == 500
    assert made.certificate_epsilon.delta == 1e-5
    assert len(made.costs) == len(filters.family(BUDGET))
    assert made.post_processing["public_model"] == {"name": "glyphs", "sha256": "0" * 64}
    stored = json.loads(json.dumps(block.to_json()))
    assert mechanism_from_json(stored) == block


def test_declared_class_sizes_set_each_rate() -> None:
    sizes = {c: 100 + 10 * i for i, c in enumerate(CLASSES)}
    made = plan(SPEC, FACTS | {"public_class_sizes": sizes})
    assert made.mechanism.classes is not None
    assert [s.sampling_probability for s in made.mechanism.classes] == [
        3 / sizes[c] for c in CLASSES
    ]


def test_auto_is_the_longest_block_that_meets_the_target() -> None:
    target = {"epsilon": 2.0, "delta": 1e-5}
    made = plan(SPEC | {"preset": "auto", "target": target})
    assert made.certificate_epsilon.upper <= 2.0
    longer = PRESET | {"block_steps": made.mechanism.block_steps + 1}
    with pytest.raises(InvalidRequest) as refused:
        plan(SPEC | {"preset": longer, "target": target})
    assert refused.value.field == "target.epsilon"


def test_auto_without_a_target_fills_one_declared_release() -> None:
    made = plan_denoise(
        SPEC | {"preset": "auto"}, FACTS, BUDGET, filters.family(BUDGET), [Model()], bounds.epsilon
    )
    family = filters.family(BUDGET)
    empty = [filters.FilterState(f, 0, 0) for f in family]
    assert filters.admitting(empty, made.costs)
    spent = [
        filters.FilterState(f, c.epsilon_units, c.delta_units)
        for f, c in zip(family, made.costs, strict=True)
    ]
    # One release was declared: a second one like it is refused by every filter.
    assert not filters.admitting(spent, made.costs)


def test_auto_takes_the_tight_bound_where_it_allows_more() -> None:
    tight = plan_denoise(
        SPEC | {"preset": "auto"}, FACTS, BUDGET, filters.family(BUDGET), [Model()], bounds.epsilon
    )
    loose = plan(SPEC | {"preset": "auto"})
    assert tight.mechanism.block_steps >= loose.mechanism.block_steps


def test_auto_says_when_no_block_is_private_enough() -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan(SPEC | {"preset": "auto", "target": {"epsilon": 1e-4, "delta": 1e-9}})
    assert refused.value.field == "target"


def test_a_quote_without_a_budget_needs_a_target() -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan(SPEC, budget=None)
    assert refused.value.field == "target"
    made = plan(SPEC | {"target": {"epsilon": 5.0, "delta": 1e-5}}, budget=None)
    assert made.costs == ()


BAD_SPECS: list[tuple[str, dict[str, Any]]] = [
    ("outputs", {"outputs": {}}),
    ("outputs", {"outputs": 500}),
    ("outputs.0", {"outputs": {"0": 0}}),
    ("outputs.0", {"outputs": {"0": -3}}),
    ("outputs.0", {"outputs": {"0": True}}),
    ("outputs.0", {"outputs": {"0": 1.5}}),
    ("outputs.0", {"outputs": {"0": 10**7}}),
    ("outputs.x", {"outputs": {"x": 5}}),
    ("outputs", {"outputs": {"0": 600_000, "1": 600_000}}),
    ("form", {"form": "noised"}),
    ("preset", {"preset": "best"}),
    ("seed", {"seed": 3}),
    ("target.epsilon", {"target": {"epsilon": 0, "delta": 1e-5}}),
    ("target.epsilon", {"target": {"epsilon": math.nan, "delta": 1e-5}}),
    ("target.delta", {"target": {"epsilon": 1.0, "delta": 0}}),
    ("target.delta", {"target": {"epsilon": 1.0, "delta": 1}}),
    ("target.delta", {"target": {"epsilon": 1.0}}),
    ("target.rho", {"target": {"epsilon": 1.0, "delta": 1e-5, "rho": 1}}),
]
BAD_PRESETS: list[tuple[str, dict[str, Any]]] = [
    ("preset.weight", {"weight": "best"}),
    ("preset.centre", {"centre": "private_mean"}),
    ("preset.centre", {"weight": "uniform", "centre": "public_class_mean"}),
    ("preset.schedule.sigma_min", {"schedule": EdmSchedule().to_json() | {"sigma_min": 0}}),
    ("preset.schedule.steps", {"schedule": EdmSchedule().to_json() | {"steps": 10**9}}),
    ("preset.block_steps", {"block_steps": 0}),
    ("preset.block_steps", {"block_steps": 39}),
    ("preset.block_steps", {"block_steps": None}),
    ("preset.block_steps", {"block_steps": 38}),
    ("preset.block_steps", {"block_steps": None, "block_fraction": 1}),
    ("preset.block_fraction", {"block_steps": None, "block_fraction": 0}),
    ("preset.block_fraction", {"block_steps": None, "block_fraction": 1.01}),
    ("preset.block_fraction", {"block_fraction": 0.5}),
    ("preset.subsample_size", {"subsample_size": 0}),
    ("preset.subsample_size", {"subsample_size": 401}),
    ("preset.clip_norm", {"clip_norm": -1}),
    ("preset.clip_norm", {"clip_norm": math.inf}),
    ("preset.beta", {"beta": 0}),
    ("preset.sampling", {"sampling": "shuffle"}),
    ("preset.sampling", {"sampling": "fixed_size"}),
    ("preset.renoise_steps", {"renoise_steps": -1}),
    ("preset.renoise_steps", {"renoise_steps": 19}),
    ("preset.renoise_steps", {"renoise_steps": False}),
    ("preset.refine_steps", {"refine_steps": 0}),
    ("preset.public_model", {"public_model": "nobody's"}),
    ("preset.colour", {"colour": 1}),
]


@pytest.mark.parametrize(("field", "change"), BAD_SPECS)
def test_a_bad_spec_is_refused_by_name(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan(SPEC | change)
    assert refused.value.field == field


@pytest.mark.parametrize(("field", "change"), BAD_PRESETS)
def test_a_bad_preset_is_refused_by_name(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan(SPEC | {"preset": PRESET | change})
    assert refused.value.field == field


def test_only_a_model_of_the_same_shape_and_classes_will_do() -> None:
    for model in (Model(shape=(32, 32, 1)), Model(classes=("0",)), Model(classes=None)):
        with pytest.raises(InvalidRequest) as refused:
            plan(SPEC, models=(model,))
        assert refused.value.field == "preset.public_model"
    other = Model(name="other", sha256="1" * 64)
    made = plan(SPEC | {"preset": PRESET | {"public_model": "other"}}, models=(Model(), other))
    assert made.post_processing["public_model"] == {"name": "other", "sha256": "1" * 64}


# --------------------------------------------------------------------------------------------------
# The drift ceiling
# --------------------------------------------------------------------------------------------------


def block(weight: str, **changes: Any) -> DenoisingBlock:
    values: dict[str, Any] = {
        "schedule": EdmSchedule(),
        "block_steps": 26,
        "clip_norm": 12.5,
        "subsample_size": 25,
        "public_size": 60_000,
        "outputs": 300,
        "weight": weight,
        "centre": "public_class_mean" if weight == "centred" else None,
        "feature_dimension": 784,
    }
    return DenoisingBlock(**(values | changes))


def test_the_drift_ceiling_of_weights_that_do_not_depend_on_distance_is_one() -> None:
    for weight in ("uniform", "centred"):
        assert drift_ceiling(block(weight)) == (1.0,) * 26
    small = drift_ceiling(block("uniform", clip_norm=56.0))
    assert small == pytest.approx([0.5] * 26)  # sqrt(784) / 56


def test_the_density_weight_is_vacuous_until_the_noise_is_small() -> None:
    levels = EdmSchedule().levels()
    ceiling = drift_ceiling(block("density", block_steps=38))
    switch = 1 / math.sqrt(2 * math.pi * math.e)
    for level, share in zip(levels, ceiling, strict=False):
        if level > 1.1 * switch:
            assert share < 1e-20
        if level < 0.9 * switch:
            assert share == 1.0


def test_a_vacuous_block_is_refused_unless_the_caller_insists() -> None:
    vacuous = SPEC | {"preset": PRESET | {"weight": "density"}}
    with pytest.raises(InvalidRequest) as refused:
        plan(vacuous)
    assert refused.value.field == "preset.weight"
    made = plan(vacuous | {"allow_vacuous": True})
    assert made.warnings
    assert max(made.drift_ceiling) < 0.01


def test_a_whole_block_can_be_handed_over_after_re_noising() -> None:
    made = plan(SPEC | {"preset": PRESET | {"block_steps": 38, "renoise_steps": 5}})
    assert made.mechanism.block_steps == 38
