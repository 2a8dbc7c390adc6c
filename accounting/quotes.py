"""From a job request and a dataset's public facts to a mechanism and its cost.

One function makes the plan that is quoted, charged and run: the quote shows it, the reservation
stores its mechanism and costs, and the worker reads the stored mechanism. Everything here is a
function of public values: the request, the facts the owner declared, the public model's card and
the budget. None of it depends on a record.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final, Protocol, cast

from accounting import cumulants, filters
from accounting.bounds import Bracket
from accounting.errors import InvalidMechanism, InvalidRequest
from accounting.filters import Budget, Cost, Filter
from accounting.mechanisms import (
    ClassShare,
    DenoisingBlock,
    EdmSchedule,
    Mechanism,
    SamplingKind,
    WeightKind,
    block_steps_of,
    check_count,
    check_decimal,
    check_positive,
    require_chargeable,
)

EpsilonBound = Callable[[Mechanism, float], Bracket]

MAX_OUTPUTS: Final = 1_000_000
MAX_REFINE_STEPS: Final = 1_000
# A block whose every step can show less than this share of C releases only noise.
VACUOUS_BELOW: Final = 0.01
# Measured with the 28 x 28 digits model on two CPU cores; a GPU is far faster. A guide, no promise.
_SECONDS_PER_IMAGE_EVALUATION: Final = 1.5e-3
_SECONDS_TO_START: Final = 10.0


class PublicModelFacts(Protocol):
    """What a plan needs to know of a public denoiser: its card, never its weights."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def classes(self) -> tuple[str, ...] | None: ...


@dataclass(frozen=True)
class JobPlan:
    """A job as it will be charged and run.

    Attributes:
        mechanism: what touches private data; the worker takes every number from it.
        post_processing: the public rest of the job (model, hand-off, sampler steps, form).
        costs: one cost for each of the dataset's filters; empty where no budget is set.
        certificate_epsilon: the bracket of epsilon at the certificate's delta.
        drift_ceiling: at each step, the largest share of C that a typical record can contribute.
        progress_total: outputs to draw, the public total of the job's progress.
        expected_seconds: a guide to the run time on two CPU cores.
        warnings: plain sentences for the requester.
    """

    mechanism: DenoisingBlock
    post_processing: dict[str, object]
    costs: tuple[Cost, ...]
    certificate_epsilon: Bracket
    drift_ceiling: tuple[float, ...]
    progress_total: int
    expected_seconds: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Preset:
    """The block and hand-off of a denoise job, before its outputs and rates are known."""

    weight: WeightKind
    centre: str | None
    schedule: EdmSchedule
    block_steps: int
    sampling: SamplingKind
    subsample_size: int
    clip_norm: float
    beta: float
    renoise_steps: int
    refine_steps: int


# The default preset, centred on the public model's class means: a small B and an early hand-off
# keep the variety of the records, where a large B releases little but the class mean. Only the
# number of block steps follows the target.
_AUTO: Final = _Preset(
    weight="centred",
    centre="public_class_mean",
    schedule=EdmSchedule(),
    block_steps=1,
    sampling="poisson",
    subsample_size=3,
    clip_norm=12.5,
    beta=1.0,
    renoise_steps=0,
    refine_steps=10,
)


def plan_denoise(
    spec: Mapping[str, object],
    facts: Mapping[str, object],
    budget: Budget | None,
    family: Sequence[Filter],
    models: Sequence[PublicModelFacts],
    epsilon_bound: EpsilonBound,
) -> JobPlan:
    """The plan of a ``denoise`` job.

    Args:
        spec: the job spec of the service contract, ``{"kind": "denoise", "outputs": ..., ...}``.
        facts: the dataset's declared public facts.
        budget: the dataset's budget, or None before one is set (the plan then has no costs).
        family: the filters of that budget.
        models: the cards of the public denoisers at hand.
        epsilon_bound: the certified bracket of epsilon of a mechanism at a delta.

    Raises:
        InvalidRequest: names the field of the spec that is missing, unknown or out of range.
    """
    known = {"kind", "outputs", "preset", "target", "form", "allow_vacuous", "max_attempts"}
    for name in spec:
        if name not in known | {"dry_run"}:
            raise InvalidRequest(name, "is not a field of a denoise job")
    form = spec.get("form", "refined")
    if form != "refined":
        raise InvalidRequest("form", "must be refined")
    target = _target(spec.get("target"))
    classes = _class_names(facts)
    outputs = _outputs(spec.get("outputs"), classes)
    preset = spec.get("preset", "auto")
    chosen_model = preset.get("public_model") if isinstance(preset, Mapping) else None
    model = _compatible_model(chosen_model, facts, classes, models)
    if preset == "auto":
        made = _auto(outputs, facts, classes, target, budget, family, epsilon_bound)
    elif isinstance(preset, Mapping):
        made = _preset(preset)
    else:
        raise InvalidRequest("preset", 'must be "auto" or an object')
    if made.renoise_steps == 0 and made.block_steps == made.schedule.steps - 1:
        raise InvalidRequest(
            "preset.block_steps",
            "ends at sigma_min, which leaves nothing to refine: use fewer, or set renoise_steps",
        )
    mechanism = _block(made, outputs, facts, classes)
    ceiling = drift_ceiling(mechanism)
    warnings = []
    if max(ceiling) < VACUOUS_BELOW:
        message = (
            "at every step a typical record contributes less than "
            f"{VACUOUS_BELOW:.0%} of the clip norm, so the block releases only noise; "
            "use the centred or uniform weight"
        )
        if spec.get("allow_vacuous") is not True:
            raise InvalidRequest("preset.weight", f"{message}, or set allow_vacuous")
        warnings.append(message)
    delta = target[1] if target is not None else _default_delta(budget)
    bracket = epsilon_bound(mechanism, float(delta))
    if target is not None and not bracket.upper <= target[0]:
        raise InvalidRequest(
            "target.epsilon",
            f"the block's epsilon at this delta is up to {bracket.upper:.6g}, above the target",
        )
    costs = filters.charge(mechanism, family, epsilon_bound=epsilon_bound) if family else ()
    total = sum(outputs.values())
    evaluations = 2 * made.refine_steps - 1
    return JobPlan(
        mechanism=mechanism,
        post_processing={
            "kind": "handoff",
            "form": form,
            "public_model": {"name": model.name, "sha256": model.sha256},
            "renoise_steps": made.renoise_steps,
            "refine_steps": made.refine_steps,
        },
        costs=costs,
        certificate_epsilon=bracket,
        drift_ceiling=ceiling,
        progress_total=total,
        expected_seconds=_SECONDS_TO_START + total * evaluations * _SECONDS_PER_IMAGE_EVALUATION,
        warnings=tuple(warnings),
    )


def drift_ceiling(block: DenoisingBlock) -> tuple[float, ...]:
    """At each step, the largest share of the clip norm C that a typical record can contribute.

    Pixels lie in [-1, 1], so a record's norm is at most sqrt(d), and its distance to a public
    centre in the same range at most 2 sqrt(d). Under the density weight a record at the typical
    squared distance d t^2 has log w = -(d/2) log(2 pi e t^2): for large d far below zero while
    t > 1 / sqrt(2 pi e). beta scales C and the contribution alike and so drops out.
    """
    if block.feature_dimension is None or block.weight is None:
        raise InvalidMechanism("weight", "a drift ceiling needs weight and feature_dimension")
    d = block.feature_dimension
    reach = math.sqrt(d) * (2.0 if block.weight == "centred" else 1.0)
    room = math.log(reach / block.clip_norm)
    ceilings = []
    for t in block.levels()[:-1]:
        log_weight = 0.0
        if block.weight == "density":
            log_weight = -d / 2 * math.log(2 * math.pi * math.e * t * t)
        ceilings.append(math.exp(min(0.0, log_weight + room)))
    return tuple(ceilings)


# --------------------------------------------------------------------------------------------------
# Reading the spec
# --------------------------------------------------------------------------------------------------


def _target(value: object) -> tuple[float, Decimal] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequest("target", "must be an object with epsilon and delta")
    for name in value:
        if name not in ("epsilon", "delta"):
            raise InvalidRequest(f"target.{name}", "is not a field of a target")
    epsilon = _field("target.epsilon", check_positive, value.get("epsilon"))
    delta = _decimal("target.delta", value.get("delta"))
    if delta >= 1:
        raise InvalidRequest("target.delta", "must be below 1")
    return epsilon, delta


def _default_delta(budget: Budget | None) -> Decimal:
    if budget is None:
        raise InvalidRequest("target", "is required while the dataset has no budget")
    return budget.delta


def _class_names(facts: Mapping[str, object]) -> tuple[str, ...] | None:
    classes = facts.get("classes")
    return None if classes is None else tuple(str(c) for c in cast(Sequence[object], classes))


def _outputs(value: object, classes: tuple[str, ...] | None) -> dict[int, int]:
    """Outputs by class position; position 0 alone where the dataset has no classes."""
    if classes is None:
        return {0: _field("outputs", check_count, value, at_most=MAX_OUTPUTS)}
    if not isinstance(value, Mapping) or not value:
        raise InvalidRequest("outputs", "must be an object of class names and counts")
    positions = {name: i for i, name in enumerate(classes)}
    made: dict[int, int] = {}
    for name, count in value.items():
        if name not in positions:
            raise InvalidRequest(f"outputs.{name}"[:120], "is not a class of this dataset")
        made[positions[name]] = _field(f"outputs.{name}", check_count, count, at_most=MAX_OUTPUTS)
    if sum(made.values()) > MAX_OUTPUTS:
        raise InvalidRequest("outputs", f"at most {MAX_OUTPUTS} in one job")
    return dict(sorted(made.items()))


_PRESET_FIELDS: Final = frozenset(
    {
        "weight", "centre", "schedule", "block_steps", "block_fraction", "sampling",
        "subsample_size", "clip_norm", "beta", "public_model", "renoise_steps", "refine_steps",
    }
)  # fmt: skip


def _preset(value: Mapping[str, object]) -> _Preset:
    for name in value:
        if name not in _PRESET_FIELDS:
            raise InvalidRequest(f"preset.{name}", "is not a field of a preset")
    weight = _choice(
        "preset.weight", value.get("weight", "centred"), ("density", "uniform", "centred")
    )
    centre = value.get("centre")
    if weight == "centred":
        centre = _choice("preset.centre", centre or "public_class_mean", ("public_class_mean",))
    elif centre is not None:
        raise InvalidRequest("preset.centre", "has a meaning only for the centred weight")
    schedule = _AUTO.schedule
    if value.get("schedule") is not None:
        try:
            schedule = EdmSchedule.from_json(value["schedule"])
        except InvalidMechanism as error:
            raise InvalidRequest(f"preset.schedule.{error.field}", error.reason) from None
    if value.get("block_fraction") is not None:
        if value.get("block_steps") is not None:
            raise InvalidRequest("preset.block_fraction", "stands beside block_steps")
        try:
            steps = block_steps_of(schedule, value["block_fraction"])
        except InvalidMechanism as error:
            raise InvalidRequest("preset.block_fraction", error.reason) from None
    else:
        steps = _field(
            "preset.block_steps", check_count, value.get("block_steps"), at_most=schedule.steps - 1
        )
    renoise = value.get("renoise_steps", _AUTO.renoise_steps)
    if renoise != 0 or isinstance(renoise, bool):
        renoise = _field("preset.renoise_steps", check_count, renoise, at_most=steps)
    return _Preset(
        weight=cast(WeightKind, weight),
        centre=centre,
        schedule=schedule,
        block_steps=steps,
        sampling=cast(
            SamplingKind,
            _choice("preset.sampling", value.get("sampling", "poisson"), ("poisson", "fixed_size")),
        ),
        subsample_size=_field("preset.subsample_size", check_count, value.get("subsample_size")),
        clip_norm=_field("preset.clip_norm", check_positive, value.get("clip_norm")),
        beta=_field("preset.beta", check_positive, value.get("beta", 1.0)),
        renoise_steps=cast(int, renoise),
        refine_steps=_field(
            "preset.refine_steps",
            check_count,
            value.get("refine_steps", _AUTO.refine_steps),
            at_most=MAX_REFINE_STEPS,
        ),
    )


def _compatible_model(
    name: object,
    facts: Mapping[str, object],
    classes: tuple[str, ...] | None,
    models: Sequence[PublicModelFacts],
) -> PublicModelFacts:
    shape = tuple(cast(Sequence[int], facts["shape"]))

    def fits(model: PublicModelFacts) -> bool:
        if tuple(model.shape) != shape:
            return False
        # The sampler refines by class, so both must have classes.
        return classes is not None and set(classes) <= set(model.classes or ())

    if name is not None:
        for model in models:
            if model.name == name:
                if not fits(model):
                    raise InvalidRequest(
                        "preset.public_model", "has other classes or another shape than the dataset"
                    )
                return model
        raise InvalidRequest("preset.public_model", "is not in the catalogue")
    for model in models:
        if fits(model):
            return model
    raise InvalidRequest(
        "preset.public_model", "the catalogue has no model of this dataset's shape and classes"
    )


# --------------------------------------------------------------------------------------------------
# Making the block
# --------------------------------------------------------------------------------------------------


def _block(
    preset: _Preset,
    outputs: Mapping[int, int],
    facts: Mapping[str, object],
    classes: tuple[str, ...] | None,
) -> DenoisingBlock:
    public_size = cast(int, facts["public_size"])
    if preset.sampling == "fixed_size" and facts.get("fixed_size_allowed") is not True:
        raise InvalidRequest(
            "preset.sampling", "the owner has not allowed fixed_size for this dataset"
        )
    shape = cast(Sequence[int], facts["shape"])
    shares: tuple[ClassShare, ...] | None = None
    if classes is not None:
        sizes = cast(Mapping[str, int] | None, facts.get("public_class_sizes"))
        shares = tuple(
            ClassShare(
                label,
                count,
                _rate(
                    preset.subsample_size,
                    public_size / len(classes) if sizes is None else sizes[classes[label]],
                ),
            )
            for label, count in outputs.items()
        )
    elif preset.subsample_size > public_size:
        raise InvalidRequest("preset.subsample_size", "is larger than public_size")
    try:
        block = DenoisingBlock(
            schedule=preset.schedule,
            block_steps=preset.block_steps,
            clip_norm=preset.clip_norm,
            beta=preset.beta,
            subsampling="output_wise",
            sampling=preset.sampling,
            subsample_size=preset.subsample_size,
            public_size=public_size if shares is None else None,
            outputs=outputs[0] if shares is None else None,
            classes=shares,
            weight=preset.weight,
            centre=preset.centre,
            feature_dimension=math.prod(shape),
        )
        require_chargeable(block)
    except InvalidMechanism as error:
        raise InvalidRequest(f"preset.{error.field}", error.reason) from None
    return block


def _rate(subsample_size: int, expected_units: float) -> float:
    if subsample_size > expected_units:
        raise InvalidRequest(
            "preset.subsample_size", "is larger than the declared number of units of a class"
        )
    return subsample_size / expected_units


def _auto(
    outputs: Mapping[int, int],
    facts: Mapping[str, object],
    classes: tuple[str, ...] | None,
    target: tuple[float, Decimal] | None,
    budget: Budget | None,
    family: Sequence[Filter],
    epsilon_bound: EpsilonBound,
) -> _Preset:
    """The default preset with the longest block that meets the target.

    Without a target it is what one release may cost: the order-infinity filter's share of the
    budget at the delta the family fixes for a release.
    """
    if target is not None:
        epsilon, delta = target[0], float(target[1])
    else:
        per_release = next((f for f in family if f.order == "inf"), None)
        if budget is None or per_release is None or not isinstance(budget.use, filters.FewLarge):
            raise InvalidRequest("target", "is required with the auto preset for this budget")
        # A unit less than the share, so that rounding up each release still admits the last one.
        share = per_release.cap_units // budget.use.releases
        epsilon = (share - 1) / filters.EPSILON_UNITS
        delta = per_release.delta_per_release_units / filters.DELTA_UNITS

    shortest = _block(_AUTO, outputs, facts, classes)
    steps = _longest(shortest, epsilon, delta, epsilon_bound)
    if steps == 0:
        raise InvalidRequest(
            "target" if target is not None else "outputs",
            "no block of the auto preset is this private; ask for fewer outputs or a larger target",
        )
    return replace(_AUTO, block_steps=steps)


@functools.lru_cache(maxsize=1024)  # a batch is quoted before it is ordered, and often again
def _longest(
    shortest: DenoisingBlock, epsilon: float, delta: float, epsilon_bound: EpsilonBound
) -> int:
    """How many steps the block may have at this epsilon; 0 if not even one."""

    def at(steps: int) -> DenoisingBlock:
        return replace(shortest, block_steps=steps)

    # The Rényi bound is cheap and never below the true epsilon, so it finds a length that surely
    # fits; the tight bound then says whether a longer one fits too.
    low, longest = 0, shortest.schedule.steps - 2  # one level is left to refine from
    high = longest
    while low < high:
        middle = (low + high + 1) // 2
        if cumulants.renyi_epsilon(at(middle), delta) <= epsilon:
            low = middle
        else:
            high = middle - 1
    while low < longest and epsilon_bound(at(low + 1), delta).upper <= epsilon:
        low += 1
    return low


# --------------------------------------------------------------------------------------------------
# Helpers: the mechanism's checks, with the spec's field names
# --------------------------------------------------------------------------------------------------


def _field(name: str, check: Callable[..., Any], value: object, **limits: Any) -> Any:
    if value is None:
        raise InvalidRequest(name, "is required")
    try:
        return check(name, value, **limits)
    except InvalidMechanism as error:
        raise InvalidRequest(name, error.reason) from None


def _decimal(name: str, value: object) -> Decimal:
    return cast(Decimal, _field(name, check_decimal, value, zero_allowed=False, at_most=1))


def _choice(name: str, value: object, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequest(name, f"must be one of {', '.join(choices)}")
    return value
