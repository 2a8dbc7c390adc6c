"""The inverse questions: which parameter of a mechanism meets a target, and how stages share one.

An answer is a parameter at which the certified *upper* end meets the target, and at which no
noticeably better parameter would: a real one is within :data:`PRECISION` of where the upper end
crosses the target, and the integer next to an integer one does not meet it. That epsilon grows or
falls with the parameter only guides the search. What is returned was priced itself, so a wrong
guess could make an answer worse but never false.

**Shares.** A stage's share is its part of the Renyi cost rho(alpha) of the whole, in the direction
that dominates, at the order alpha whose bound on epsilon is the smallest at the target's delta.
Renyi costs add up, so shares add up to 1. At the paper's orders this gives the shares printed by
the second paper (its table of FETA-Pro stages) within the rounding of its printed noise levels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast

from scipy.optimize import brentq

from accounting import bounds, cumulants
from accounting.bounds import Bracket, DeltaBracket, Limits
from accounting.callable import make_callable
from accounting.clock import Clock
from accounting.errors import InvalidMechanism, InvalidRequest, UndecidableBound
from accounting.mechanisms import (
    LARGEST,
    MAX_COUNT,
    MAX_EPSILON,
    SMALLEST,
    ApproximateDPTerm,
    ClassShare,
    Composition,
    DenoisingBlock,
    FetaPro,
    GaussianTerm,
    Mechanism,
    Part,
    Term,
    check_positive,
    dominating_terms,
    mechanism_from_json,
)

Method = Literal["certified", "rdp"]
METHODS: Final[tuple[Method, ...]] = ("certified", "rdp")
PRECISION: Final = 1e-6  # of a real parameter, relative
RDP_ORDERS: Final = (*(1 + x / 10 for x in range(1, 100)), *range(12, 64))  # the paper's
_STRIDE: Final = 8
SHARE_ORDERS: Final = tuple(1.0 + 2.0 ** (k / 4) for k in range(-16, 57))

# The width of the brackets that are asked for: far off as a part of the target's epsilon, and near
# in units of the precision as well. What they turn out to be is narrower as a rule.
_COARSE: Final = 2e-2
_FINE: Final = 10.0
_ROUGH: Final = 1e-2  # the precision of an allocation whose order is still to be found
_MOST_BOUNDS: Final = 60
_PATIENCE: Final = 3  # failures in a row before it is asked whether any value meets the target
_CUT_SHORT: Final = "the search was cut short, so a better value may meet the target too"
_CAP: Final = 40.0  # of log(epsilon / target): what is beyond says only "far"

EpsilonBound = Callable[[Mechanism, float, float | None, Limits], Bracket]
"""(mechanism, delta, wanted width of the bracket or None, limits) -> bracket."""


@dataclass(frozen=True)
class Share:
    """A stage's part of the Renyi cost of the whole, in [0, 1]."""

    stage: str
    share: float

    def to_json(self) -> dict[str, object]:
        return {"stage": self.stage, "share": self.share}


@dataclass(frozen=True)
class Calibration:
    """The parameter that meets a target.

    Attributes:
        free: the parameter's path in the mechanism's JSON; or "delta".
        parameter: its value; of the outputs of a class-conditional block, their sum.
        mechanism: the mechanism with that value in place.
        bracket: epsilon at the target's delta, ``upper`` at most the target's epsilon; for "delta"
            the bracket of delta at the target's epsilon.
        evaluations: how many brackets were computed.
        shares: each stage's share of the cost, for a mechanism with stages; empty where time was
            over.
        reason: why a better parameter may exist; empty if none does.
    """

    free: str
    parameter: float
    mechanism: Mechanism
    bracket: Bracket | DeltaBracket
    target: dict[str, float]
    method: Method
    evaluations: int
    shares: tuple[Share, ...] = ()
    reason: str = ""

    def to_json(self) -> dict[str, object]:
        out: dict[str, object] = {
            "free": self.free,
            "parameter": self.parameter,
            "mechanism": self.mechanism.to_json(),
            "bracket": self.bracket.to_json(),
            "target": dict(self.target),
            "method": self.method,
            "evaluations": self.evaluations,
            "shares": [s.to_json() for s in self.shares],
        }
        return out | ({"reason": self.reason} if self.reason else {})


def calibrate(
    m: Mechanism,
    free: str,
    *,
    epsilon: float,
    delta: float | None = None,
    limits: Limits = bounds.DEFAULT,
    method: Method = "certified",
    bound: EpsilonBound | None = None,
) -> Calibration:
    """The parameter ``free`` of ``m`` that meets (epsilon, delta) best.

    Args:
        free: a path in the mechanism's JSON that ends in one of

            - ``noise_multiplier``, ``beta``: the smallest;
            - ``count``, ``steps``, ``rounds``, ``outputs``, ``block_steps`` (also ``handoff``),
              ``sampling_probability``, ``clip_norm`` of a block, ``epsilon``: the largest. With
              ``classes``, ``outputs`` scales all of them together;
            - ``subsample_size``: the smallest, because it is the divisor as well;

            for example ``dp_sgd.noise_multiplier`` or ``parts[1].mechanism.count``. Or ``delta``:
            no parameter, but the delta at the target's epsilon.
        delta: the target's; left out for ``delta``, needed otherwise.
        limits: seconds and memory of the whole question.
        method: "certified" prices by :func:`accounting.bounds.epsilon`; "rdp" by Renyi costs at
            :data:`RDP_ORDERS`, as the papers do, which needs more noise.
        bound: prices instead of what ``method`` names.

    Raises:
        InvalidRequest: ``free`` is no parameter of this mechanism or no value of it meets the
            target; or the target itself is out of range or met by every value. The ends of a
            parameter's meaning (a rate of 1, the whole grid, a subsample of 1) are answers.
        UndecidableBound: the time was over before any value was found.
    """
    target = check_epsilon(epsilon)
    if free == "delta":
        if delta is not None:
            raise InvalidRequest("target.delta", "is the answer: leave it out")
        found = bounds.delta(m, target, limits=limits)
        return Calibration(
            free, found.upper, m, found, {"epsilon": target}, "certified", evaluations=1
        )
    if delta is None:
        raise InvalidRequest("target.delta", "is required")
    delta = check_delta(delta)
    knob = _knob(m, free)
    search = _Search(knob, target, delta, limits, _bound_of(method, bound))
    value, mechanism, bracket, reason = search.run()
    return Calibration(
        free,
        knob.shown(value, mechanism),
        mechanism,
        bracket,
        {"epsilon": target, "delta": delta},
        method,
        search.evaluations,
        shares(mechanism, delta, method=method, clock=search.clock),
        reason,
    )


def check_epsilon(value: object, name: str = "target.epsilon") -> float:
    """A target's epsilon: a number in [SMALLEST, MAX_EPSILON], or InvalidRequest."""
    try:
        return check_positive(name, value, at_most=MAX_EPSILON)
    except InvalidMechanism as error:
        raise InvalidRequest(name, error.reason) from None


def check_delta(value: object, name: str = "target.delta") -> float:
    """A target's delta: a number in [SMALLEST, 1), or InvalidRequest."""
    try:
        number = check_positive(name, value)
    except InvalidMechanism as error:
        raise InvalidRequest(name, error.reason) from None
    if number >= 1.0:
        raise InvalidRequest(name, "must be below 1")
    return number


def certified(m: Mechanism, delta: float, tolerance: float | None, limits: Limits) -> Bracket:
    """The bound behind the method "certified"."""
    return bounds.epsilon(m, delta, tolerance=tolerance, limits=limits)


def rdp(m: Mechanism, delta: float, tolerance: float | None, limits: Limits) -> Bracket:  # noqa: ARG001
    """The bound behind the method "rdp": the best of RDP_ORDERS; it has no lower end.

    Raises:
        UndecidableBound: the time was over.
    """
    clock = Clock(limits.seconds)
    worst = max(
        (_best_order(terms, delta, RDP_ORDERS, clock) for terms in dominating_terms(m)),
        key=lambda found: found.epsilon,
    )
    return Bracket(0.0, worst.epsilon, delta, worst.direction, "rdp", {"order": worst.order})


def _bound_of(method: str, bound: EpsilonBound | None) -> EpsilonBound:
    if method not in METHODS:
        raise InvalidRequest("method", f"must be one of {', '.join(METHODS)}")
    if bound is not None:
        return bound
    return rdp if method == "rdp" else certified


# --------------------------------------------------------------------------------------------------
# Shares
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _AtOrder:
    epsilon: float
    order: float
    direction: Literal["remove", "add"]


def _best_order(
    terms: tuple[Term, ...], delta: float, orders: Sequence[float], clock: Clock
) -> _AtOrder:
    """The smallest of the Renyi bounds on epsilon at these increasing orders.

    The bound falls and then rises with the order, so every eighth is looked at, and then those
    around the best of them. Were it to do otherwise, the answer would be a larger bound.

    Raises:
        UndecidableBound: the time was over.
    """
    left = delta - cumulants.mass_at_infinity(terms)
    if left <= 0.0:
        return _AtOrder(math.inf, orders[0], "remove")
    log_delta = math.log(left)

    def at(i: int) -> _AtOrder:
        if clock.is_over():
            raise UndecidableBound("the time was over before the Rényi bound was")
        remove, add = cumulants.directed_costs(terms, orders[i])
        value = max(remove, add) + cumulants.conversion(orders[i], log_delta)
        # A few roundings, on the safe side.
        value = max(0.0, value) * (1.0 + 1e-14)
        return _AtOrder(value, orders[i], "remove" if remove >= add else "add")

    coarse = {i: at(i) for i in range(0, len(orders), _STRIDE)}
    middle = min(coarse, key=lambda i: coarse[i].epsilon)
    around = range(max(0, middle - _STRIDE + 1), min(len(orders), middle + _STRIDE))
    fine = [at(i) for i in around if i != middle]
    return min(coarse[middle], *fine, key=lambda found: found.epsilon)


def stages(m: Mechanism) -> tuple[tuple[str, tuple[Term, ...]], ...]:
    """The stages of a composition, or of a mechanism made of named ones, with their terms."""
    if isinstance(m, Composition):
        return tuple(
            (f"parts[{i}]", Composition((part,)).alternatives()[0])
            for i, part in enumerate(m.parts)
        )
    if isinstance(m, FetaPro):
        named = (("spatial", m.spatial), ("frequency", m.frequency), ("dp_sgd", m.dp_sgd))
        return tuple((name, stage.terms()) for name, stage in named if stage is not None)
    return ()


def shares(
    m: Mechanism,
    delta: float,
    *,
    method: Method = "certified",
    clock: Clock | None = None,
) -> tuple[Share, ...]:
    """Each stage's share of the cost; empty for a mechanism without stages.

    Also empty where no order has a finite cost, or the time is over.

    Args:
        method: "rdp" looks for the best order among RDP_ORDERS, else among SHARE_ORDERS.
    """
    parts = stages(m)
    if not parts:
        return ()
    terms = tuple(term for _, own in parts for term in own)
    try:
        orders = RDP_ORDERS if method == "rdp" else SHARE_ORDERS
        best = _best_order(terms, delta, orders, Clock() if clock is None else clock)
    except UndecidableBound:
        return ()
    costs = [_cost(own, best.order, best.direction) for _, own in parts]
    total = math.fsum(costs)
    if not (0.0 < total < math.inf and best.epsilon < math.inf):
        return ()
    return tuple(Share(name, cost / total) for (name, _), cost in zip(parts, costs, strict=True))


def _cost(terms: tuple[Term, ...], order: float, direction: str) -> float:
    remove, add = cumulants.directed_costs(terms, order)
    return remove if direction == "remove" else add


# --------------------------------------------------------------------------------------------------
# Allocation
# --------------------------------------------------------------------------------------------------

MAX_STAGES: Final = 32
_ROUNDS: Final = 4


@dataclass(frozen=True)
class Stage:
    """A mechanism whose noise is to be found, and the share of the cost it may have.

    Weights need not add up to 1: stage i gets weight_i / (sum of weights).
    """

    mechanism: Mechanism
    weight: float = 1.0


@dataclass(frozen=True)
class Allocation:
    """The stages with the noise that shares a target as they were weighted.

    ``shares`` are those of the composition as it is; they differ from the weights by less than
    a thousandth, unless ``reason`` says that the search was cut short.
    """

    stages: tuple[Stage, ...]
    mechanism: Composition
    bracket: Bracket
    target: dict[str, float]
    method: Method
    evaluations: int
    shares: tuple[Share, ...]
    reason: str = ""

    def to_json(self) -> dict[str, object]:
        out: dict[str, object] = {
            "stages": [
                {"mechanism": s.mechanism.to_json(), "weight": s.weight} for s in self.stages
            ],
            "mechanism": self.mechanism.to_json(),
            "bracket": self.bracket.to_json(),
            "target": dict(self.target),
            "method": self.method,
            "evaluations": self.evaluations,
            "shares": [s.to_json() for s in self.shares],
        }
        return out | ({"reason": self.reason} if self.reason else {})


def allocate(
    stages: Sequence[Stage],
    *,
    epsilon: float,
    delta: float,
    limits: Limits = bounds.DEFAULT,
    method: Method = "certified",
    bound: EpsilonBound | None = None,
) -> Allocation:
    """The noise of each stage, so that their composition meets (epsilon, delta) by their weights.

    A stage's noise is its ``noise_multiplier``, or of a denoising block its ``beta``; the value it
    comes with does not matter. Its share is as defined above; because the order that defines it
    depends on the noise, order and noise are found in turn.

    Raises:
        InvalidRequest: there are no stages or more than MAX_STAGES, a weight is not positive, a
            stage has no noise to choose, or no noise meets the target.
        UndecidableBound: the time was over before an answer was found.
    """
    target, delta = check_epsilon(epsilon), check_delta(delta)
    if not 0 < len(stages) <= MAX_STAGES:
        raise InvalidRequest("stages", f"must hold between 1 and {MAX_STAGES} stages")
    clock = Clock(limits.seconds)
    sources = [_noise_source(i, stage) for i, stage in enumerate(stages)]
    whole = math.fsum(stage.weight for stage in stages)
    weights = [stage.weight / whole for stage in stages]
    price = _bound_of(method, bound)
    orders = RDP_ORDERS if method == "rdp" else SHARE_ORDERS
    # Of a Gaussian mechanism: the order that is best at (epsilon, delta), and its cost there.
    best = _AtOrder(math.inf, 1.0 - 2.0 * math.log(delta) / target, "remove")
    best = replace(best, order=min(max(best.order, orders[0]), orders[-1]))
    total, evaluations, settled = 0.5 * target, 0, False
    for turn in range(_ROUNDS):
        settled = settled or turn == _ROUNDS - 1
        at = _composition_at(sources, weights, best, clock)
        knob = _Knob("noise of the stages", "target", _COST, total, at, lambda value, _: value)
        precision = PRECISION if settled else _ROUGH
        search = _Search(knob, target, delta, limits, price, precision, clock)
        total, mechanism, bracket, reason = search.run()
        made = cast(Composition, mechanism)
        evaluations += search.evaluations
        if settled or reason:
            break
        try:
            found = _best_order(_terms_of(made), delta, orders, clock)
        except UndecidableBound:
            reason = _CUT_SHORT
            break
        settled = (found.order, found.direction) == (best.order, best.direction)
        best = found
    return Allocation(
        tuple(
            Stage(part.mechanism, stage.weight)
            for part, stage in zip(made.parts, stages, strict=True)
        ),
        made,
        bracket,
        {"epsilon": target, "delta": delta},
        method,
        evaluations,
        shares(made, delta, method=method, clock=clock),
        reason,
    )


@dataclass(frozen=True)
class _Noise:
    """A stage by its noise: the mechanism at any, and its terms where the noise is 1.

    Losses' scales are inversely proportional to the noise and nothing else moves with it, so the
    terms, of which a block may have thousands to choose from, are made once.
    """

    at: Callable[[float], Mechanism]
    terms: tuple[Term, ...]

    def cost(self, noise: float, best: _AtOrder) -> float:
        """About the stage's cost: it steers the search, and what is found is priced itself."""
        terms: list[Term] = []
        for term in self.terms:
            if isinstance(term, GaussianTerm):
                terms.append(replace(term, mu=term.mu / noise))
            elif not isinstance(term, ApproximateDPTerm):
                terms.append(replace(term, inverse_scale=term.inverse_scale / noise))
        return _cost(tuple(terms), best.order, best.direction)


def _noise_source(i: int, stage: Stage) -> _Noise:
    """The stage by its noise."""
    weight = stage.weight
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise InvalidRequest(f"stages[{i}].weight", "must be a number")
    try:
        check_positive("weight", weight)
    except InvalidMechanism as error:
        raise InvalidRequest(f"stages[{i}].weight", error.reason) from None
    m = stage.mechanism
    for name in ("noise_multiplier", "beta"):
        value = getattr(m, name, None)
        if isinstance(value, tuple):
            raise InvalidRequest(f"stages[{i}].mechanism", f"needs one {name} for all steps")
        if value is not None:

            def at(noise: float, name: str = name) -> Mechanism:
                return cast(Mechanism, replace(cast(Any, m), **{name: noise}))

            return _Noise(at, _terms_of(Composition((Part(at(1.0)),))))
    raise InvalidRequest(f"stages[{i}].mechanism", "has no noise_multiplier or beta of its own")


def _composition_at(
    sources: Sequence[_Noise], weights: Sequence[float], best: _AtOrder, clock: Clock
) -> Callable[[float], Composition]:
    """The composition by its whole cost, of which each stage has its weight at this order."""
    starts = [0.0] * len(sources)  # log noise, where the next search begins

    def at(total: float) -> Composition:
        parts = []
        for i, (source, weight) in enumerate(zip(sources, weights, strict=True)):
            starts[i] = _log_noise(source, weight * total, best, starts[i], clock)
            parts.append(Part(source.at(math.exp(starts[i]))))
        return Composition(tuple(parts))

    return at


def _log_noise(source: _Noise, goal: float, best: _AtOrder, start: float, clock: Clock) -> float:
    """log of the noise at which a stage's cost is the goal; the cost falls as the noise grows.

    Raises:
        _OutOfTime: the time was over.
    """

    def height(x: float) -> float:
        if clock.is_over():
            raise _OutOfTime
        return _height(source.cost(math.exp(x), best), goal)

    x, step = start, 0.0
    first = here = height(x)
    ends = [x, x]
    while here * first > 0.0:
        # A Gaussian's cost falls with the square of its noise.
        step = math.copysign(max(1.2 * abs(here) / 2.0, 2.0 * abs(step), 1e-6), here)
        ends = [x, x + step]
        x += step
        here = height(x)
    if here == 0.0:
        return x
    return float(brentq(height, min(ends), max(ends), xtol=1e-11, rtol=1e-11))


def _terms_of(m: Composition) -> tuple[Term, ...]:
    return dominating_terms(m)[0]


# --------------------------------------------------------------------------------------------------
# What may be free
# --------------------------------------------------------------------------------------------------

_PATH: Final = re.compile(r"[a-z_]+(\[[0-9]{1,5}\])?(\.[a-z_]+(\[[0-9]{1,5}\])?)*")
_STEP: Final = re.compile(r"[a-z_]+|\[[0-9]+\]")
_ALIASES: Final = {"handoff": "block_steps"}


@dataclass(frozen=True)
class _Range:
    """The values a kind of parameter may take.

    ``upwards``: whether more of it is more private. ``ends``: whether its least private value is
    the end of what it means, and so an answer, rather than the end of what is computed here.
    """

    integer: bool
    upwards: bool
    least: float
    most: float
    ends: bool = False


_RANGES: Final[Mapping[str, _Range]] = {
    "noise_multiplier": _Range(False, True, SMALLEST, LARGEST),
    "beta": _Range(False, True, SMALLEST, LARGEST),
    "clip_norm": _Range(False, False, SMALLEST, LARGEST),
    "epsilon": _Range(False, False, SMALLEST, MAX_EPSILON),
    "sampling_probability": _Range(False, False, SMALLEST, 1.0, ends=True),
    "count": _Range(True, False, 1, MAX_COUNT),
    "steps": _Range(True, False, 1, MAX_COUNT),
    "rounds": _Range(True, False, 1, MAX_COUNT),
    "outputs": _Range(True, False, 1, MAX_COUNT),
    "block_steps": _Range(True, False, 1, MAX_COUNT, ends=True),
    "subsample_size": _Range(True, True, 1, MAX_COUNT, ends=True),
}


# In nats: the whole Renyi cost of an allocation.
_COST: Final = _Range(False, False, SMALLEST, LARGEST)


@dataclass(frozen=True)
class _Knob:
    """A free parameter: its path, range, present value, and the mechanism at any other value.

    ``field`` is what a question without an answer is blamed on.
    """

    name: str
    field: str
    range: _Range
    start: float
    at: Callable[[float], Mechanism]
    shown: Callable[[float, Mechanism], float]


def _knob(m: Mechanism, free: str) -> _Knob:
    obj = m.to_json()
    names = list(_free_names(obj))
    path = _ALIASES.get(free, free)
    if not isinstance(free, str) or not _PATH.fullmatch(path) or path not in names:
        some = ", ".join([*names[:12], *(["..."] if len(names) > 12 else []), "delta"])
        raise InvalidRequest("free", f"must be one of {some}")
    *inner, last = _steps(path)
    holder: Any = obj
    for step in inner:
        holder = holder[step]
    kind = _RANGES[cast(str, last)]
    if last == "outputs" and holder.get("classes") is not None:
        return _scaled_outputs(cast(DenoisingBlock, m))
    if isinstance(holder.get("beta"), list) and last in ("beta", "block_steps"):
        raise InvalidRequest("free", f"{last} needs one beta for all steps")
    if last == "block_steps":
        kind = replace(kind, most=holder["schedule"]["steps"] - 1)
    elif last == "subsample_size" and holder.get("public_size") is not None:
        kind = replace(kind, most=holder["public_size"])

    def at(value: float) -> Mechanism:
        return mechanism_from_json(_with(obj, (*inner, last), value))

    return _Knob(path, "free", kind, float(holder[last]), at, lambda value, _: value)


def _steps(path: str) -> list[str | int]:
    return [int(step[1:-1]) if step[0] == "[" else step for step in _STEP.findall(path)]


def _with(obj: Any, path: tuple[str | int, ...], value: object) -> Any:
    """A copy of the JSON with one value replaced; what is not on the path is shared."""
    copy: Any = list(obj) if isinstance(obj, list) else dict(obj)
    copy[path[0]] = _with(obj[path[0]], path[1:], value) if path[1:] else value
    return copy


def _free_names(obj: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every path in a mechanism's JSON that may be free."""
    if obj.get("kind") == "denoising_block" and obj.get("classes") is not None:
        yield f"{prefix}outputs"
    for name, value in obj.items():
        if name == "schedule":
            continue
        if isinstance(value, Mapping):
            yield from _free_names(value, f"{prefix}{name}.")
        elif name == "beta" or (name in _RANGES and isinstance(value, int | float | str)):
            # Elsewhere the clip norm does not move epsilon.
            if name != "clip_norm" or "schedule" in obj:
                yield f"{prefix}{name}"
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from _free_names(item, f"{prefix}{name}[{i}].")


_PLACEHOLDERS: Final[Mapping[str, float]] = {
    "noise_multiplier": 1.0,
    "clip_norm": 1.0,
    "epsilon": 1.0,
    "sampling_probability": 0.01,
    "steps": 1,
    "rounds": 1,
    "outputs": 1,
    "block_steps": 1,
    "subsample_size": 1,
}


def read(obj: object, free: str) -> Mechanism:
    """A mechanism from its JSON, in which the free parameter may be left out.

    Raises:
        InvalidMechanism: as :func:`accounting.mechanisms.mechanism_from_json`.
    """
    try:
        return mechanism_from_json(obj)
    except InvalidMechanism as error:
        path = _ALIASES.get(free, free)
        if error.field != path or not error.reason.startswith("is required"):
            raise
    *inner, last = _steps(path)
    if last not in _PLACEHOLDERS:
        return mechanism_from_json(obj)
    return mechanism_from_json(_with(obj, (*inner, last), _PLACEHOLDERS[str(last)]))


def stages_of(obj: object) -> list[Stage]:
    """Stages from the JSON list ``[{"mechanism", "weight"}, ...]``; noise may be left out.

    Raises:
        InvalidRequest: names the field that does not fit.
    """
    if not isinstance(obj, list):
        raise InvalidRequest("stages", "must be a list")
    stages = []
    for i, item in enumerate(obj):
        where = f"stages[{i}]"
        if not isinstance(item, dict) or set(item) != {"mechanism", "weight"}:
            raise InvalidRequest(where, "must hold a mechanism and a weight")
        try:
            weight = check_positive("weight", item["weight"])
            stages.append(Stage(read(item["mechanism"], "noise_multiplier"), weight))
        except InvalidMechanism as error:
            raise error.within(where) from None
    return stages


def _scaled_outputs(block: DenoisingBlock) -> _Knob:
    """The outputs of all classes, in the proportions they have now; the largest is counted."""
    classes = cast(tuple[ClassShare, ...], block.classes)
    largest = max(c.outputs for c in classes)

    def at(value: float) -> Mechanism:
        scaled = (
            replace(c, outputs=max(1, int(value) * c.outputs // largest)) for c in classes
        )  # fmt: skip
        return replace(block, classes=tuple(scaled))

    def shown(_: float, m: Mechanism) -> float:
        return sum(c.outputs for c in cast(DenoisingBlock, m).classes or ())

    return _Knob("outputs", "free", _RANGES["outputs"], float(largest), at, shown)


# --------------------------------------------------------------------------------------------------
# The search
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Probe:
    """What one value costs: ``height`` is log(epsilon / target) of the upper end, within caps."""

    value: float
    mechanism: Mechanism
    bracket: Bracket
    height: float
    meets: bool


class _Search:
    """Looks for the least private value that meets the target.

    In u = log(value), turned so that more is more private, log epsilon is close to a line, so a
    secant closes in within a few steps. Far from the target coarse brackets show the way. A value
    that makes no mechanism counts as one that fails.

    Args:
        precision: of a real value, relative.
        clock: the time of the question that the search is part of; by default that of ``limits``.
    """

    def __init__(
        self,
        knob: _Knob,
        target: float,
        delta: float,
        limits: Limits,
        bound: EpsilonBound,
        precision: float = PRECISION,
        clock: Clock | None = None,
    ) -> None:
        self._knob, self._range = knob, knob.range
        self._precision, self._fine = precision, min(_COARSE, _FINE * precision)
        self._target, self._delta = target, delta
        self._limits, self._bound = limits, bound
        self._sign = 1.0 if self._range.upwards else -1.0
        ends = (self._u(self._range.least), self._u(self._range.most))
        self._worst, self._best = min(ends), max(ends)
        self.clock = Clock(limits.seconds) if clock is None else clock
        self.evaluations = 0
        self._slope = -1.0
        self._answer: _Probe | None = None

    def run(self) -> tuple[float, Mechanism, Bracket, str]:
        """(value, mechanism, bracket, reason) of the answer."""
        try:
            self._find()
            reason = ""
        except _OutOfTime:
            reason = _CUT_SHORT
        if self._answer is None:
            raise UndecidableBound(
                f"no {self._knob.name} that meets the target was found in "
                f"{self._limits.seconds:g} s"
            )
        found = self._answer
        value = int(found.value) if self._range.integer else found.value
        return value, found.mechanism, found.bracket, reason

    # -- u and values ------------------------------------------------------------------------------

    def _u(self, value: float) -> float:
        return self._sign * math.log(value)

    def _value(self, u: float) -> float:
        """The value at u; an integer is the nearest one."""
        value = math.exp(self._sign * u)
        value = min(max(value, self._range.least), self._range.most)
        return float(round(value)) if self._range.integer else value

    def _next_worse(self, value: float) -> float:
        return value - self._sign

    # -- pricing -----------------------------------------------------------------------------------

    def _ask(self, value: float, width: float) -> _Probe | None:
        """The cost at a value; None where it makes no mechanism."""
        if self.clock.is_over() or self.evaluations >= _MOST_BOUNDS:
            raise _OutOfTime
        self.evaluations += 1
        try:
            mechanism = self._knob.at(int(value) if self._range.integer else value)
        except InvalidMechanism:
            return None
        # Making it may have taken what was left.
        if self.clock.is_over():
            raise _OutOfTime
        limits = replace(self._limits, seconds=max(self.clock.left(), 1e-9))
        try:
            wanted = max(width * self._target, bounds.LEAST_TOLERANCE)
            bracket = self._bound(mechanism, self._delta, wanted, limits)
        except UndecidableBound:
            raise _OutOfTime from None
        height = _height(bracket.upper, self._target)
        probe = _Probe(value, mechanism, bracket, height, bracket.upper <= self._target)
        if probe.meets and self._is_better(probe):
            self._answer = probe
        return probe

    def _is_better(self, probe: _Probe) -> bool:
        return self._answer is None or self._u(probe.value) <= self._u(self._answer.value)

    # -- closing in --------------------------------------------------------------------------------

    def _find(self) -> None:
        """Ends where the answer is the least private value that meets the target."""
        fails: tuple[float, float] | None = None  # (u, height)
        meets: tuple[float, float] | None = None
        before: tuple[float, float] | None = None
        u, width = min(max(self._u(self._knob.start), self._worst), self._best), _COARSE
        stride, stuck, alone = 3.0, 0, 0
        while True:
            value = self._value(u)
            at = self._u(value)
            probe = self._ask(value, width)
            height = _CAP if probe is None else probe.height
            if width > self._fine and abs(height) < 3.0 * width and not self._is_fine(probe):
                width = self._fine  # too near to be told apart by a coarse bracket
                continue
            if probe is not None and probe.meets:
                meets = (at, height)
                if self._is_least_private(value, height):
                    return
            else:
                fails = (at, height)
                if at >= self._best:
                    self._unattainable(probe)
            if fails is not None and meets is not None:
                if self._is_closed(fails[0], meets[0]):
                    return
                self._learn(fails, meets)
                u, stuck = self._between(fails, meets, stuck)
                # A secant over a long run is off by far more than such a bracket.
                run = meets[0] - fails[0]
                width = min(_COARSE, max(self._fine, 0.1 * run * run))
                if max(abs(fails[1]), abs(meets[1])) >= _CAP:
                    width = _COARSE
            else:
                # One side is not known yet: a secant's step, a little beyond, and ever longer.
                alone += 1
                if alone == _PATIENCE and fails is not None:
                    self._check_attainable()
                if before is not None:
                    self._learn(*sorted((before, (at, height))))
                before = (at, height)
                step = -height / self._slope
                step += math.copysign(0.1 * abs(step) + 0.1 * self._precision, step)
                width = self._fine if abs(step) < stride else _COARSE
                u = at + min(max(step, -stride), stride)
                if self._range.integer and self._value(u) == value:
                    u = self._u(value + math.copysign(1.0, step) * self._sign)
                u = min(max(u, self._worst), self._best)
                stride *= 3.0

    def _is_fine(self, probe: _Probe | None) -> bool:
        """Whether a bracket is fine although no fine one was asked for."""
        if probe is None or probe.bracket.method in ("renyi", "rdp"):
            return True  # there is but one upper end, whatever width is asked for
        return probe.bracket.upper - probe.bracket.lower <= self._fine * self._target

    def _is_least_private(self, value: float, height: float) -> bool:
        """Whether no less private value need be looked at after one that meets the target."""
        if self._u(value) <= self._worst:
            if not self._range.ends:
                way = "down" if self._range.upwards else "up"
                raise InvalidRequest(
                    "target", f"every {self._knob.name} {way} to the limit of {value:g} meets it"
                )
            return True
        return not self._range.integer and -height <= 0.5 * self._precision * abs(self._slope)

    def _is_closed(self, fails: float, meets: float) -> bool:
        if self._range.integer:
            return self._next_worse(self._value(meets)) == self._value(fails)
        return meets - fails <= self._precision

    def _learn(self, fails: tuple[float, float], meets: tuple[float, float]) -> None:
        """The slope between two points, unless they are so close that it is rounding."""
        run = meets[0] - fails[0]
        if run > 1e-4 and max(abs(fails[1]), abs(meets[1])) < _CAP:
            slope = (meets[1] - fails[1]) / run
            if slope < -1e-6:
                self._slope = slope

    def _between(
        self, fails: tuple[float, float], meets: tuple[float, float], stuck: int
    ) -> tuple[float, int]:
        """The next u strictly between the two: by the secant's root, or the middle if it stalls."""
        run = meets[0] - fails[0]
        root = fails[0] + run * fails[1] / (fails[1] - meets[1])
        if max(abs(fails[1]), abs(meets[1])) >= _CAP or stuck >= 3:
            root, stuck = fails[0] + 0.5 * run, 0
        else:
            end, away = (fails[0], 1.0) if root - fails[0] < 0.5 * run else (meets[0], -1.0)
            # What a curve, of about unit curvature in u, makes of the secant's root.
            error = abs(root - end) * min(1.0, run)
            if abs(root - end) < 0.1 * run and (
                self._range.integer or error > 0.1 * self._precision
            ):
                # A step of twice the length (eight times, where that was not enough) should land
                # on the root's other side, and so bring the far end near.
                stuck += 1
                root = end + 0.5 * 4.0**stuck * (root - end) + away * 0.5 * self._precision
        if self._range.integer:
            low, high = sorted((self._value(fails[0]), self._value(meets[0])))
            value = min(max(self._value(root), low + 1), high - 1)
            return self._u(value), stuck
        margin = min(0.25 * self._precision, 0.25 * run)
        return min(max(root, fails[0] + margin), meets[0] - margin), stuck

    def _check_attainable(self) -> None:
        """Raises InvalidRequest if even the most private value fails, before a walk towards it."""
        probe = self._ask(self._value(self._best), _COARSE)
        if probe is None or not probe.meets:
            self._unattainable(probe)

    def _unattainable(self, probe: _Probe | None) -> None:
        """Raises: even the most private value fails."""
        value = self._value(self._best)
        if probe is None:
            raise InvalidRequest(
                self._knob.field, f"no {self._knob.name} of this mechanism meets the target"
            )
        shown = f"{value:.0f}" if self._range.integer else f"{value:g}"
        raise InvalidRequest(
            self._knob.field,
            f"no {self._knob.name} meets the target: even at {shown} epsilon is up to "
            f"{probe.bracket.upper:.6g}",
        )


class _OutOfTime(Exception):
    """The question's time, or its number of bounds, is over."""


def _height(epsilon: float, target: float) -> float:
    if epsilon <= 0.0:
        return -_CAP
    if not epsilon < math.inf:
        return _CAP
    return min(max(math.log(epsilon) - math.log(target), -_CAP), _CAP)


make_callable(__name__, calibrate)
