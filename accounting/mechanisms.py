"""Mechanisms: what ran on private data, apart from what it costs.

A mechanism is a frozen value with a published JSON form, tagged by ``kind``. Its meaning never
changes; a change of meaning is a new kind. The accountants read a mechanism through
:func:`dominating_terms`, and the samplers and trainers take their noise scale, clip norm, rates and
counts from the same object, so there is no second place where such a number is written.

Every mechanism here is private between datasets that differ by **adding or removing one unit**,
:data:`NEIGHBORING_RELATION`. Its privacy is that of the Gaussian pair

    P = N(0, 1),   Q = (1 - q) N(0, 1) + q N(mu, 1),

composed, in the worse of the two directions, or of a Laplace or an (epsilon, delta) pair.

Only the standard library is used, so that every part of the product may import this module.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar, Final, Literal, Self, TypeVar, cast

from accounting.canonical import digest
from accounting.errors import InvalidMechanism

NEIGHBORING_RELATION: Final = "add_remove_one_unit"
MAX_COUNT: Final = 10**9
MAX_EPSILON: Final = 1_000_000
MAX_STEPS: Final = 10_000
MAX_PARTS: Final = 1_000
MAX_CLASSES: Final = 10_000
MAX_ALTERNATIVES: Final = 100
MAX_TERMS: Final = 1_000  # each is priced at several orders while a request waits
# Outside this range a parameter's square or reciprocal leaves double precision.
SMALLEST: Final = 1e-100
LARGEST: Final = 1e100
_SMALLEST_DECIMAL: Final = Decimal(repr(SMALLEST))

# Python's Decimal also reads "1_0", " 1 " and digits of other scripts.
_DECIMAL: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?")

# mu is the square root of a sum of at most MAX_STEPS products of doubles. math.fsum makes the sum
# exact up to one rounding; each product carries at most 8 roundings (relative 8 * 2^-53), and so
# does the grid behind it up to the powers' few ulps. 1e-13 covers all of it with room to spare.
_MU_ROUND_UP: Final = 1.0 + 1e-13

SamplingKind = Literal["poisson", "fixed_size"]
SubsamplingKind = Literal["full_batch", "output_wise", "per_step"]
WeightKind = Literal["density", "uniform", "centred"]

T = TypeVar("T")


# --------------------------------------------------------------------------------------------------
# Terms: what an accountant sees
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GaussianTerm:
    """``count`` compositions of the pair N(0,1) against (1-q) N(0,1) + q N(mu,1)."""

    sampling_probability: float
    mu: float
    count: int


@dataclass(frozen=True)
class ApproximateDPTerm:
    """``count`` compositions of an arbitrary (epsilon, delta)-DP mechanism."""

    epsilon: Decimal
    delta: Decimal
    count: int


@dataclass(frozen=True)
class LaplaceTerm:
    """``count`` compositions of Lap(0, 1/inverse_scale) against the same moved by 1."""

    inverse_scale: float
    count: int


Term = GaussianTerm | ApproximateDPTerm | LaplaceTerm


# --------------------------------------------------------------------------------------------------
# Reading JSON: every error names its field
# --------------------------------------------------------------------------------------------------


class _Reader:
    """Takes the fields of one JSON object, checks them, and refuses what is left over."""

    def __init__(self, obj: object, *, tagged: bool = True) -> None:
        if not isinstance(obj, Mapping):
            raise InvalidMechanism("", "must be a JSON object")
        self._obj: dict[str, object] = {str(k): v for k, v in obj.items()}
        self._taken: set[str] = {"kind"} if tagged else set()

    def has(self, name: str) -> bool:
        return self._obj.get(name) is not None

    def raw(self, name: str) -> object:
        self._taken.add(name)
        value = self._obj.get(name)
        if value is None:
            raise InvalidMechanism(name, "is required")
        return value

    def optional(self, name: str) -> object | None:
        self._taken.add(name)
        return self._obj.get(name)

    def number(self, name: str, *, at_most: float = LARGEST) -> float:
        return check_positive(name, self.raw(name), at_most=at_most)

    def optional_number(self, name: str) -> float | None:
        value = self.optional(name)
        return None if value is None else check_positive(name, value)

    def integer(self, name: str, *, at_most: int = MAX_COUNT, default: int | None = None) -> int:
        value = self.optional(name)
        if value is None:
            if default is None:
                raise InvalidMechanism(name, "is required")
            return default
        return check_count(name, value, at_most=at_most)

    def optional_integer(self, name: str) -> int | None:
        value = self.optional(name)
        return None if value is None else check_count(name, value)

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self.optional(name)
        if value is None:
            if default is None:
                raise InvalidMechanism(name, "is required")
            return default
        if not isinstance(value, str) or value not in choices:
            raise InvalidMechanism(name, f"must be one of {', '.join(choices)}")
        return value

    def done(self) -> None:
        for name in self._obj:
            if name not in self._taken:
                raise InvalidMechanism(name, "is not a field here")


def check_positive(name: str, value: object, *, at_most: float = LARGEST) -> float:
    """A finite double in [SMALLEST, at_most], or InvalidMechanism naming the field."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidMechanism(name, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        raise InvalidMechanism(name, "is too large") from None
    if not math.isfinite(number):
        raise InvalidMechanism(name, "must be finite")
    if number < SMALLEST:
        raise InvalidMechanism(name, f"must be positive and at least {SMALLEST:g}")
    if number > at_most:
        raise InvalidMechanism(name, f"must be at most {at_most:g}")
    return number


def check_count(name: str, value: object, *, at_most: int = MAX_COUNT) -> int:
    """An integer in [1, at_most], or InvalidMechanism naming the field."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidMechanism(name, "must be an integer")
    if value < 1:
        raise InvalidMechanism(name, "must be at least 1")
    if value > at_most:
        raise InvalidMechanism(name, f"must be at most {at_most}")
    return value


def check_decimal(name: str, value: object, *, zero_allowed: bool, at_most: int) -> Decimal:
    """The decimal a client wrote, from a JSON number or string, or InvalidMechanism.

    A float stands for its shortest decimal form, so ``0.1`` is exactly one tenth.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        raise InvalidMechanism(name, "must be a number")
    if isinstance(value, str) and len(value) > 64:
        raise InvalidMechanism(name, "has too many digits")
    if isinstance(value, str) and not _DECIMAL.fullmatch(value):
        raise InvalidMechanism(name, "must be a decimal number")
    try:
        number = Decimal(repr(value) if isinstance(value, float) else value)
    except ArithmeticError:
        raise InvalidMechanism(name, "must be a decimal number") from None
    if not number.is_finite():
        raise InvalidMechanism(name, "must be finite")
    if number < 0 or (number == 0 and not zero_allowed):
        raise InvalidMechanism(name, "must be positive" if not zero_allowed else "is negative")
    if number > Decimal(at_most):
        raise InvalidMechanism(name, f"must be at most {at_most}")
    if number != 0 and number < _SMALLEST_DECIMAL:
        raise InvalidMechanism(name, f"must be at least {SMALLEST:g}")
    return number


def _json_decimal(value: Decimal) -> float | str:
    """A float where it stands for the same decimal, else the decimal's text."""
    as_float = float(value)
    return as_float if Decimal(repr(as_float)) == value else str(value)


# --------------------------------------------------------------------------------------------------
# Simple mechanisms
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Noise:
    """``count`` releases, each with noise of the same scale over sensitivity."""

    noise_multiplier: float
    count: int = 1
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        check_positive("noise_multiplier", self.noise_multiplier)
        check_count("count", self.count)

    def to_json(self) -> dict[str, object]:
        return {"kind": self.kind, "noise_multiplier": self.noise_multiplier, "count": self.count}

    @classmethod
    def from_json(cls, obj: object) -> Self:
        r = _Reader(obj)
        made = cls(r.number("noise_multiplier"), r.integer("count", default=1))
        r.done()
        return made

    def missing_for_charge(self) -> str | None:
        return None


@dataclass(frozen=True)
class Gaussian(_Noise):
    """``count`` Gaussian releases; ``noise_multiplier`` is noise std over L2 sensitivity."""

    kind: ClassVar[str] = "gaussian"

    def alternatives(self) -> tuple[tuple[Term, ...], ...]:
        return ((GaussianTerm(1.0, _mu(self.noise_multiplier), self.count),),)


@dataclass(frozen=True)
class Laplace(_Noise):
    """``count`` Laplace releases; ``noise_multiplier`` is noise scale over L1 sensitivity.

    The scale b is that of the density exp(-|x|/b) / (2b).
    """

    kind: ClassVar[str] = "laplace"

    def alternatives(self) -> tuple[tuple[Term, ...], ...]:
        return ((LaplaceTerm(_mu(self.noise_multiplier), self.count),),)


@dataclass(frozen=True)
class NoisyCounts(_Noise):
    """``count`` Gaussian releases of a vector of counts, clipped to L2 norm 1 a unit.

    ``noise_multiplier`` is the noise's std. The counts (correct, incorrect) are one such vector; a
    private test size is never divided by (it is not public).
    """

    kind: ClassVar[str] = "noisy_counts"

    def alternatives(self) -> tuple[tuple[Term, ...], ...]:
        return ((GaussianTerm(1.0, _mu(self.noise_multiplier), self.count),),)


@dataclass(frozen=True)
class _PureDP:
    """``count`` releases, each (epsilon, 0)-DP; epsilon is the decimal as written."""

    epsilon: Decimal
    count: int = 1
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        check_decimal("epsilon", self.epsilon, zero_allowed=False, at_most=MAX_EPSILON)
        check_count("count", self.count)

    def to_json(self) -> dict[str, object]:
        return {"kind": self.kind, "epsilon": _json_decimal(self.epsilon), "count": self.count}

    @classmethod
    def from_json(cls, obj: object) -> Self:
        r = _Reader(obj)
        made = cls(
            check_decimal("epsilon", r.raw("epsilon"), zero_allowed=False, at_most=MAX_EPSILON),
            r.integer("count", default=1),
        )
        r.done()
        return made

    def alternatives(self) -> tuple[tuple[Term, ...], ...]:
        return ((ApproximateDPTerm(self.epsilon, Decimal(0), self.count),),)

    def missing_for_charge(self) -> str | None:
        return None


@dataclass(frozen=True)
class RandomizedResponse(_PureDP):
    """``count`` releases whose privacy loss is +-epsilon and nothing else.

    This pair dominates every (epsilon, 0)-DP mechanism (Kairouz, Oh and Viswanath 2015).
    """

    kind: ClassVar[str] = "randomized_response"


@dataclass(frozen=True)
class NoisyMax(_PureDP):
    """``count`` reports of the index of the largest of some counts, each with noise Lap(1/epsilon).

    One unit moves each count by at most 1, all in the same direction (adding or removing it), so an
    index is (epsilon, 0)-DP (Dwork and Roth 2014, claim 3.9). The noisy value of the maximum is a
    further release and no part of this.
    """

    kind: ClassVar[str] = "noisy_max"


@dataclass(frozen=True)
class SubsampledGaussian:
    """``count`` Gaussian releases, each on a fresh random subsample.

    ``sampling`` "poisson" keeps each unit independently with ``sampling_probability`` q.
    "fixed_size" draws B units without replacement, q = B/n, where an included unit *replaces*
    another; its ``noise_multiplier`` is the noise's std over the replacement sensitivity 2C
    (first paper, Proposition 4.1).
    """

    sampling_probability: float
    noise_multiplier: float
    count: int = 1
    sampling: SamplingKind = "poisson"
    kind: ClassVar[str] = "subsampled_gaussian"

    def __post_init__(self) -> None:
        check_positive("sampling_probability", self.sampling_probability, at_most=1.0)
        check_positive("noise_multiplier", self.noise_multiplier)
        check_count("count", self.count)

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "sampling_probability": self.sampling_probability,
            "noise_multiplier": self.noise_multiplier,
            "count": self.count,
            "sampling": self.sampling,
        }

    @classmethod
    def from_json(cls, obj: object) -> SubsampledGaussian:
        r = _Reader(obj)
        made = cls(
            r.number("sampling_probability", at_most=1.0),
            r.number("noise_multiplier"),
            r.integer("count", default=1),
            cast(SamplingKind, r.choice("sampling", ("poisson", "fixed_size"), "poisson")),
        )
        r.done()
        return made

    def alternatives(self) -> tuple[tuple[Term, ...], ...]:
        return ((GaussianTerm(self.sampling_probability, _mu(self.noise_multiplier), self.count),),)

    def missing_for_charge(self) -> str | None:
        return None


@dataclass(frozen=True)
class DPSGD:
    """DP-SGD with real Poisson batches: ``steps`` Poisson-subsampled Gaussians.

    ``clip_norm`` and ``divisor`` do not move epsilon; a question may leave them out, a mechanism
    that is charged carries them, because the trainer reads them from here.
    """

    sampling_probability: float
    noise_multiplier: float
    steps: int
    clip_norm: float | None = None
    divisor: float | None = None
    kind: ClassVar[str] = "dp_sgd"

    def __post_init__(self) -> None:
        check_positive("sampling_probability", self.sampling_probability, at_most=1.0)
        check_positive("noise_multiplier", self.noise_multiplier)
        check_count("steps", self.steps)
        _check_optional(clip_norm=self.clip_norm, divisor=self.divisor)

    def to_json(self) -> dict[str, object]:
        out: dict[str, object] = {
            "kind": self.kind,
            "sampling_probability": self.sampling_probability,
            "noise_multiplier": self.noise_multiplier,
            "steps": self.steps,
        }
        return out | _present(clip_norm=self.clip_norm, divisor=self.divisor)

    @classmethod
    def from_json(cls, obj: object) -> DPSGD:
        r = _Reader(obj)
        if r.has("public_size") or r.has("expected_batch_size"):
            if r.has("sampling_probability"):
                raise InvalidMechanism(
                    "sampling_probability", "stands beside public_size or expected_batch_size"
                )
            size = r.integer("public_size")
            batch = r.number("expected_batch_size")
            if batch > size:
                raise InvalidMechanism("expected_batch_size", "is larger than public_size")
            rate = batch / size
        else:
            rate = r.number("sampling_probability", at_most=1.0)
        made = cls(
            rate,
            r.number("noise_multiplier"),
            r.integer("steps"),
            r.optional_number("clip_norm"),
            r.optional_number("divisor"),
        )
        r.done()
        return made

    def alternatives(self) -> tuple[tuple[Term, ...], ...]:
        return ((GaussianTerm(self.sampling_probability, _mu(self.noise_multiplier), self.steps),),)

    def missing_for_charge(self) -> str | None:
        return _first_missing(clip_norm=self.clip_norm, divisor=self.divisor)


@dataclass(frozen=True)
class ApproximateDP:
    """``count`` releases of a mechanism known only to be (epsilon, delta)-DP, as written."""

    epsilon: Decimal
    delta: Decimal = Decimal(0)
    count: int = 1
    kind: ClassVar[str] = "approximate_dp"

    def __post_init__(self) -> None:
        check_decimal("epsilon", self.epsilon, zero_allowed=False, at_most=MAX_EPSILON)
        check_decimal("delta", self.delta, zero_allowed=True, at_most=1)
        if float(self.delta) >= 1.0:
            raise InvalidMechanism("delta", "must be below 1")
        check_count("count", self.count)

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "epsilon": _json_decimal(self.epsilon),
            "delta": _json_decimal(self.delta),
            "count": self.count,
        }

    @classmethod
    def from_json(cls, obj: object) -> ApproximateDP:
        r = _Reader(obj)
        delta = r.optional("delta")
        made = cls(
            check_decimal("epsilon", r.raw("epsilon"), zero_allowed=False, at_most=MAX_EPSILON),
            Decimal(0)
            if delta is None
            else check_decimal("delta", delta, zero_allowed=True, at_most=1),
            r.integer("count", default=1),
        )
        r.done()
        return made

    def alternatives(self) -> tuple[tuple[Term, ...], ...]:
        return ((ApproximateDPTerm(self.epsilon, self.delta, self.count),),)

    def missing_for_charge(self) -> str | None:
        return None


# --------------------------------------------------------------------------------------------------
# The denoising block
# --------------------------------------------------------------------------------------------------


def karras_levels(first: float, last: float, rho: float, steps: int) -> tuple[float, ...]:
    """``steps`` noise levels from ``first`` to ``last``, evenly spaced in the power 1/rho.

    Source: Karras et al. 2022, equation 5; first paper, section 3.
    """
    if steps == 1:
        return (first,)
    a, b = first ** (1.0 / rho), last ** (1.0 / rho)
    inner = tuple((a + i / (steps - 1) * (b - a)) ** rho for i in range(1, steps - 1))
    return (first, *inner, last)


@dataclass(frozen=True)
class EdmSchedule:
    """The EDM grid t_0 = sigma_max > ... > t_{N-1} = sigma_min, N = ``steps`` levels."""

    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    steps: int = 39
    kind: ClassVar[str] = "edm"

    def __post_init__(self) -> None:
        check_positive("sigma_min", self.sigma_min)
        check_positive("sigma_max", self.sigma_max)
        check_positive("rho", self.rho, at_most=1000.0)
        if check_count("steps", self.steps, at_most=MAX_STEPS) < 2:
            raise InvalidMechanism("steps", "must be at least 2")
        if self.sigma_min >= self.sigma_max:
            raise InvalidMechanism("sigma_min", "must be below sigma_max")
        try:
            levels = self.levels()
        except OverflowError:
            raise InvalidMechanism("rho", "the grid leaves double precision") from None
        if any(not a > b for a, b in itertools.pairwise(levels)):
            raise InvalidMechanism("steps", "the grid's levels coincide in double precision")

    def levels(self) -> tuple[float, ...]:
        """The N noise levels, largest first (standard deviations, on the data's scale)."""
        return karras_levels(self.sigma_max, self.sigma_min, self.rho, self.steps)

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "sigma_min": self.sigma_min,
            "sigma_max": self.sigma_max,
            "rho": self.rho,
            "steps": self.steps,
        }

    @classmethod
    def from_json(cls, obj: object) -> EdmSchedule:
        r = _Reader(obj, tagged=False)
        r.choice("kind", (cls.kind,))
        made = cls(
            r.number("sigma_min"),
            r.number("sigma_max"),
            r.number("rho"),
            r.integer("steps", at_most=MAX_STEPS),
        )
        r.done()
        return made


@dataclass(frozen=True)
class ClassShare:
    """How many outputs one class gets, and the public rate at which its units are drawn."""

    label: int
    outputs: int
    sampling_probability: float

    def __post_init__(self) -> None:
        if isinstance(self.label, bool) or not isinstance(self.label, int) or self.label < 0:
            raise InvalidMechanism("label", "must be an integer, at least 0")
        check_count("outputs", self.outputs)
        check_positive("sampling_probability", self.sampling_probability, at_most=1.0)

    def to_json(self) -> dict[str, object]:
        return {
            "label": self.label,
            "outputs": self.outputs,
            "sampling_probability": self.sampling_probability,
        }

    @classmethod
    def from_json(cls, obj: object) -> ClassShare:
        r = _Reader(obj, tagged=False)
        label = r.raw("label")
        made = cls(
            cast(int, label),
            r.integer("outputs"),
            r.number("sampling_probability", at_most=1.0),
        )
        r.done()
        return made


@dataclass(frozen=True)
class DenoisingBlock:
    """The clipped private denoising block (first paper, section 4, with public divisors).

    For each output, ``block_steps`` steps from the schedule's first level,

        x <- (1 - 2 dt/t) x + (2 dt/t) E + sqrt(2 t dt) xi,
        E = 1/(beta * divisor) * sum_S clip(v_i, C),

    S drawn once for the output (``output_wise``), afresh at each step (``per_step``), or all units
    (``full_batch``). One unit moves the sum by at most C under Poisson sampling or full batch with
    a public divisor, and by 2C where it replaces another (``fixed_size``).

    Attributes:
        schedule: the noise grid; step i goes from level i to level i+1.
        block_steps: number of private steps, at most ``schedule.steps - 1``.
        subsampling: how often S is drawn.
        sampling: how S is drawn. ``full_batch`` with ``fixed_size`` is the paper's divisor by the
            true n, which needs n public: a question only.
        subsample_size: B, the divisor under subsampling; None for full batch.
        public_size: the declared n; with ``classes`` it may be absent, each class has its rate.
        clip_norm: C, on pixels scaled to [-1, 1].
        beta: the public constant of the weight, one value or one a step.
        outputs: number of outputs, or None with ``classes``.
        classes: per-class outputs and rates; a unit has one label, so it meets only its own class.
        weight: which weight the sampler applies (needed for a charge, does not move epsilon).
        centre: what the weight is centred on (needed for a charge if weight is "centred").
        feature_dimension: d, the number of values in a record (needed for a charge).
    """

    schedule: EdmSchedule
    block_steps: int
    clip_norm: float
    beta: float | tuple[float, ...] = 1.0
    subsampling: SubsamplingKind = "output_wise"
    sampling: SamplingKind = "poisson"
    subsample_size: int | None = None
    public_size: int | None = None
    outputs: int | None = None
    classes: tuple[ClassShare, ...] | None = None
    weight: WeightKind | None = None
    centre: str | None = None
    feature_dimension: int | None = None
    kind: ClassVar[str] = "denoising_block"
    _mu: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("block_steps", self.block_steps, at_most=self.schedule.steps - 1)
        check_positive("clip_norm", self.clip_norm)
        betas = self.beta if isinstance(self.beta, tuple) else (self.beta,)
        for b in betas:
            check_positive("beta", b)
        if isinstance(self.beta, tuple) and len(betas) != self.block_steps:
            raise InvalidMechanism("beta", "a list must hold one value for each block step")
        if self.subsampling == "full_batch":
            if self.subsample_size is not None:
                raise InvalidMechanism("subsample_size", "has no meaning for full_batch")
        elif self.subsample_size is None:
            raise InvalidMechanism("subsample_size", "is required unless full_batch")
        else:
            check_count("subsample_size", self.subsample_size)
        if self.public_size is not None:
            check_count("public_size", self.public_size)
        if self.classes is not None:
            self._check_classes(self.classes)
        else:
            if self.outputs is None:
                raise InvalidMechanism("outputs", "is required without classes")
            check_count("outputs", self.outputs)
            if self.public_size is None:
                raise InvalidMechanism("public_size", "is required without classes")
            if self.subsample_size is not None and self.subsample_size > self.public_size:
                raise InvalidMechanism("subsample_size", "is larger than public_size")
        if self.feature_dimension is not None:
            check_count("feature_dimension", self.feature_dimension)
        if self.centre is not None and self.weight != "centred":
            raise InvalidMechanism("centre", "has a meaning only for the centred weight")
        object.__setattr__(self, "_mu", self._step_mu())
        if not all(SMALLEST <= mu <= LARGEST for mu in self._mu):
            # Its square is summed, and would underflow to "no loss" or overflow.
            raise InvalidMechanism("clip_norm", "over beta and the divisor leaves double precision")

    def _check_classes(self, classes: tuple[ClassShare, ...]) -> None:
        if not classes:
            raise InvalidMechanism("classes", "must not be empty")
        if len(classes) > MAX_CLASSES:
            raise InvalidMechanism("classes", f"at most {MAX_CLASSES} classes")
        if len({c.label for c in classes}) != len(classes):
            raise InvalidMechanism("classes", "a label stands twice")
        if self.outputs is not None:
            raise InvalidMechanism("outputs", "stands in classes already")
        if self.subsampling == "full_batch":
            if self.public_size is None:
                raise InvalidMechanism("public_size", "is the divisor of full_batch")
            if any(c.sampling_probability != 1.0 for c in classes):
                raise InvalidMechanism("classes", "full_batch has sampling_probability 1")
        if self.sampling == "fixed_size":
            # The true rate of a fixed-size draw is B/n_c, and n_c is private.
            raise InvalidMechanism("sampling", "class-conditional blocks are drawn by poisson only")

    # -- what the sampler and the accountant both read --------------------------------------------

    @property
    def divisor(self) -> int:
        """The public number that the clipped sum is divided by."""
        return cast(int, self.public_size if self.subsample_size is None else self.subsample_size)

    @property
    def sampling_probability(self) -> float:
        """q = B / public_size of an unconditional block; 1 for full batch."""
        if self.classes is not None:
            raise InvalidMechanism("classes", "each class has its own sampling_probability")
        if self.subsample_size is None:
            return 1.0
        rate = self.subsample_size / cast(int, self.public_size)
        if self.sampling == "fixed_size":
            # The sampler draws exactly B, so the rate that is charged may not be rounded down.
            return min(1.0, math.nextafter(rate, 1.0))
        return rate

    def levels(self) -> tuple[float, ...]:
        """The block's noise levels t_0..t_m; the last is where the block hands over."""
        return self.schedule.levels()[: self.block_steps + 1]

    @property
    def handoff_level(self) -> float:
        """t_m, the noise level at which the block's output is handed over."""
        return self.levels()[-1]

    def betas(self) -> tuple[float, ...]:
        """beta at each of the block's steps."""
        return self.beta if isinstance(self.beta, tuple) else (self.beta,) * self.block_steps

    def step_mu(self) -> tuple[float, ...]:
        """mu_t = s sqrt(2 dt / t^3) at each step, s the unit's largest share of E times beta's."""
        return self._mu

    def _step_mu(self) -> tuple[float, ...]:
        reach = (2.0 if self.sampling == "fixed_size" else 1.0) * self.clip_norm / self.divisor
        levels = self.levels()
        return tuple(
            reach / b * math.sqrt(2.0 * (t - u) / t) / t
            for t, u, b in zip(levels, levels[1:], self.betas(), strict=False)
        )

    def mu_bar(self) -> float:
        """The block's Gaussian parameter, sqrt(sum mu_t^2), rounded up."""
        return math.sqrt(math.fsum(m * m for m in self._mu)) * _MU_ROUND_UP

    def alternatives(self) -> tuple[tuple[Term, ...], ...]:
        return self._alternatives

    @functools.cached_property
    def _alternatives(self) -> tuple[tuple[Term, ...], ...]:
        # One question asks for them several times, and there may be ten thousand.
        if self.classes is None:
            shares = [(self.sampling_probability, cast(int, self.outputs))]
        else:
            shares = [(c.sampling_probability, c.outputs) for c in self.classes]
        if self.subsampling == "per_step":
            each: tuple[float, ...] = tuple(m * _MU_ROUND_UP for m in self._mu)
        else:
            each = (self.mu_bar(),)
        whole = self.subsampling == "full_batch"
        return tuple(
            tuple(GaussianTerm(1.0 if whole else q, mu, n) for mu in each)
            for q, n in _undominated(shares)
        )

    def missing_for_charge(self) -> str | None:
        missing = _first_missing(weight=self.weight, feature_dimension=self.feature_dimension)
        if missing is None and self.weight == "centred" and self.centre is None:
            return "centre"
        return missing

    def to_json(self) -> dict[str, object]:
        out: dict[str, object] = {
            "kind": self.kind,
            "schedule": self.schedule.to_json(),
            "block_steps": self.block_steps,
            "subsampling": self.subsampling,
            "sampling": self.sampling,
            "clip_norm": self.clip_norm,
            "beta": list(self.beta) if isinstance(self.beta, tuple) else self.beta,
        }
        return out | _present(
            subsample_size=self.subsample_size,
            public_size=self.public_size,
            outputs=self.outputs,
            classes=None if self.classes is None else [c.to_json() for c in self.classes],
            weight=self.weight,
            centre=self.centre,
            feature_dimension=self.feature_dimension,
        )

    @classmethod
    def from_json(cls, obj: object) -> DenoisingBlock:
        r = _Reader(obj)
        schedule = _nested("schedule", r.raw("schedule"), EdmSchedule.from_json)
        if r.has("block_fraction"):
            if r.has("block_steps"):
                raise InvalidMechanism("block_fraction", "stands beside block_steps")
            steps = block_steps_of(schedule, r.raw("block_fraction"))
        else:
            steps = r.integer("block_steps", at_most=schedule.steps - 1)
        beta_value = r.optional("beta")
        beta: float | tuple[float, ...] = 1.0
        if isinstance(beta_value, list | tuple):
            if len(beta_value) > MAX_STEPS:
                raise InvalidMechanism("beta", "is too long")
            beta = tuple(check_positive(f"beta[{i}]", b) for i, b in enumerate(beta_value))
        elif beta_value is not None:
            beta = check_positive("beta", beta_value)
        classes_value = r.optional("classes")
        classes = None
        if classes_value is not None:
            if not isinstance(classes_value, list | tuple) or len(classes_value) > MAX_CLASSES:
                raise InvalidMechanism("classes", f"must be a list of at most {MAX_CLASSES}")
            classes = tuple(
                _nested(f"classes[{i}]", c, ClassShare.from_json)
                for i, c in enumerate(classes_value)
            )
        centre = r.optional("centre")
        if centre is not None and (not isinstance(centre, str) or not 0 < len(centre) <= 200):
            raise InvalidMechanism("centre", "must be a short text")
        subsampling = r.choice(
            "subsampling", ("full_batch", "output_wise", "per_step"), "output_wise"
        )
        weight = r.optional("weight")
        made = cls(
            schedule=schedule,
            block_steps=steps,
            clip_norm=r.number("clip_norm"),
            beta=beta,
            subsampling=cast(SubsamplingKind, subsampling),
            sampling=cast(SamplingKind, r.choice("sampling", ("poisson", "fixed_size"), "poisson")),
            subsample_size=r.optional_integer("subsample_size"),
            public_size=r.optional_integer("public_size"),
            outputs=r.optional_integer("outputs"),
            classes=classes,
            weight=None
            if weight is None
            else cast(WeightKind, r.choice("weight", ("density", "uniform", "centred"))),
            centre=centre,
            feature_dimension=r.optional_integer("feature_dimension"),
        )
        r.done()
        return made


def block_steps_of(schedule: EdmSchedule, fraction: object) -> int:
    """ceil(p * N) in exact arithmetic, at most N - 1 (the whole grid).

    Floats would give 56 for 0.55 * 100.
    """
    p = check_decimal("block_fraction", fraction, zero_allowed=False, at_most=1)
    return min(math.ceil(Fraction(p) * schedule.steps), schedule.steps - 1)


# --------------------------------------------------------------------------------------------------
# FETA-Pro and its family
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpatialStage:
    """``rounds`` central images: each a noisy clipped sum over a Poisson sample, a class.

    One unit has one label and adds at most ``clip_norm`` to its class's sum, so all classes of a
    round are one Poisson-subsampled Gaussian. The noise's std is noise_multiplier * clip_norm, and
    the sums are divided by ``divisor``, a public number for each class, whatever was drawn.
    """

    rounds: int
    sampling_probability: float
    noise_multiplier: float
    clip_norm: float | None = None
    divisor: float | None = None

    def __post_init__(self) -> None:
        check_count("rounds", self.rounds)
        check_positive("sampling_probability", self.sampling_probability, at_most=1.0)
        check_positive("noise_multiplier", self.noise_multiplier)
        _check_optional(clip_norm=self.clip_norm, divisor=self.divisor)

    def to_json(self) -> dict[str, object]:
        return {
            "rounds": self.rounds,
            "sampling_probability": self.sampling_probability,
            "noise_multiplier": self.noise_multiplier,
        } | _present(clip_norm=self.clip_norm, divisor=self.divisor)

    @classmethod
    def from_json(cls, obj: object) -> SpatialStage:
        r = _Reader(obj, tagged=False)
        made = cls(
            r.integer("rounds"),
            r.number("sampling_probability", at_most=1.0),
            r.number("noise_multiplier"),
            r.optional_number("clip_norm"),
            r.optional_number("divisor"),
        )
        r.done()
        return made

    def terms(self) -> tuple[Term, ...]:
        return (GaussianTerm(self.sampling_probability, _mu(self.noise_multiplier), self.rounds),)

    def missing_for_charge(self) -> str | None:
        return _first_missing(clip_norm=self.clip_norm, divisor=self.divisor)


@dataclass(frozen=True)
class FrequencyStage:
    """One noisy mean of random Fourier features, outer product with the one-hot label.

    A unit's sum of features is clipped to norm 1; the noise's std is noise_multiplier, and sum and
    noise are divided by the declared size. ``feature_dimension`` K counts cosines and sines.
    """

    noise_multiplier: float
    feature_dimension: int | None = None

    def __post_init__(self) -> None:
        check_positive("noise_multiplier", self.noise_multiplier)
        if self.feature_dimension is not None and (
            check_count("feature_dimension", self.feature_dimension) % 2
        ):
            raise InvalidMechanism("feature_dimension", "must be even: cosines and sines")

    def to_json(self) -> dict[str, object]:
        return {"noise_multiplier": self.noise_multiplier} | _present(
            feature_dimension=self.feature_dimension
        )

    @classmethod
    def from_json(cls, obj: object) -> FrequencyStage:
        r = _Reader(obj, tagged=False)
        made = cls(
            r.number("noise_multiplier"),
            r.optional_integer("feature_dimension"),
        )
        r.done()
        return made

    def terms(self) -> tuple[Term, ...]:
        return (GaussianTerm(1.0, _mu(self.noise_multiplier), 1),)

    def missing_for_charge(self) -> str | None:
        return _first_missing(feature_dimension=self.feature_dimension)


@dataclass(frozen=True)
class SgdStage:
    """The synthesiser's DP-SGD; fields as in :class:`DPSGD`."""

    sampling_probability: float
    noise_multiplier: float
    steps: int
    clip_norm: float | None = None
    divisor: float | None = None

    def __post_init__(self) -> None:
        check_positive("sampling_probability", self.sampling_probability, at_most=1.0)
        check_positive("noise_multiplier", self.noise_multiplier)
        check_count("steps", self.steps)
        _check_optional(clip_norm=self.clip_norm, divisor=self.divisor)

    def to_json(self) -> dict[str, object]:
        return {
            "sampling_probability": self.sampling_probability,
            "noise_multiplier": self.noise_multiplier,
            "steps": self.steps,
        } | _present(clip_norm=self.clip_norm, divisor=self.divisor)

    @classmethod
    def from_json(cls, obj: object) -> SgdStage:
        r = _Reader(obj, tagged=False)
        made = cls(
            r.number("sampling_probability", at_most=1.0),
            r.number("noise_multiplier"),
            r.integer("steps"),
            r.optional_number("clip_norm"),
            r.optional_number("divisor"),
        )
        r.done()
        return made

    def terms(self) -> tuple[Term, ...]:
        return (GaussianTerm(self.sampling_probability, _mu(self.noise_multiplier), self.steps),)

    def missing_for_charge(self) -> str | None:
        return _first_missing(clip_norm=self.clip_norm, divisor=self.divisor)


@dataclass(frozen=True)
class FetaPro:
    """Warm-up on noisy aggregates, then DP-SGD (second paper); a stage that is None is not run.

    Its epsilon is that of all its stages composed: a model that was warmed up on private aggregates
    has spent them. What is trained on released aggregates only (the auxiliary generator, the
    warm-up) is post-processing and not part of the mechanism.
    """

    public_size: int
    spatial: SpatialStage | None = None
    frequency: FrequencyStage | None = None
    dp_sgd: SgdStage | None = None
    kind: ClassVar[str] = "feta_pro"

    def __post_init__(self) -> None:
        check_count("public_size", self.public_size)
        if not self._stages():
            raise InvalidMechanism("", "needs one of spatial, frequency, dp_sgd")

    def _stages(self) -> dict[str, SpatialStage | FrequencyStage | SgdStage]:
        stages = {"spatial": self.spatial, "frequency": self.frequency, "dp_sgd": self.dp_sgd}
        return {name: stage for name, stage in stages.items() if stage is not None}

    def to_json(self) -> dict[str, object]:
        out: dict[str, object] = {"kind": self.kind, "public_size": self.public_size}
        return out | {name: stage.to_json() for name, stage in self._stages().items()}

    @classmethod
    def from_json(cls, obj: object) -> FetaPro:
        r = _Reader(obj)
        spatial, frequency, dp_sgd = (r.optional(n) for n in ("spatial", "frequency", "dp_sgd"))
        made = cls(
            r.integer("public_size"),
            None if spatial is None else _nested("spatial", spatial, SpatialStage.from_json),
            None
            if frequency is None
            else _nested("frequency", frequency, FrequencyStage.from_json),
            None if dp_sgd is None else _nested("dp_sgd", dp_sgd, SgdStage.from_json),
        )
        r.done()
        return made

    def alternatives(self) -> tuple[tuple[Term, ...], ...]:
        return (tuple(t for stage in self._stages().values() for t in stage.terms()),)

    def missing_for_charge(self) -> str | None:
        for name, stage in self._stages().items():
            missing = stage.missing_for_charge()
            if missing is not None:
                return f"{name}.{missing}"
        return None


# --------------------------------------------------------------------------------------------------
# Events of dp_accounting
# --------------------------------------------------------------------------------------------------

EVENT_MODULE: Final = "dp_accounting.dp_event"
MAX_EVENTS: Final = 4_000  # a thousand subsampled Gaussians, each with its count, and their list
MAX_EVENT_DEPTH: Final = 32

# The fields of each event that has a meaning here, and what each holds.
_EVENT_FIELDS: Final[dict[str, dict[str, str]]] = {
    "NoOpDpEvent": {},
    "GaussianDpEvent": {"noise_multiplier": "positive"},
    "LaplaceDpEvent": {"noise_multiplier": "positive"},
    "DiscreteLaplaceDpEvent": {"noise_parameter": "epsilon", "sensitivity": "count"},
    "PoissonSampledDpEvent": {"sampling_probability": "rate", "event": "event"},
    "SelfComposedDpEvent": {"event": "event", "count": "count"},
    "ComposedDpEvent": {"events": "events"},
}

_EVENT_NUMBERS: Final[dict[str, Callable[[str, object], float | int]]] = {
    "positive": check_positive,
    "rate": lambda name, value: check_positive(name, value, at_most=1.0),
    "epsilon": lambda name, value: check_positive(name, value, at_most=MAX_EPSILON),
    "count": check_count,
}

# Events that the library has and that are refused, each with its reason.
_REFUSED_EVENTS: Final = {
    "NonPrivateDpEvent": "has no privacy",
    "UnsupportedDpEvent": "says nothing about privacy",
    "RandomizedResponseDpEvent": "means replacing a record, not adding or removing one",
    "SampledWithReplacementDpEvent": "means replacing a record, not adding or removing one",
    "SampledWithoutReplacementDpEvent": "means replacing a record, not adding or removing one",
    "SingleEpochTreeAggregationDpEvent": "means zeroing a record, not adding or removing one",
    "RepeatAndSelectDpEvent": "has only Renyi bounds, and no pair of distributions",
    "ZCDpEvent": "has only Renyi bounds, and no pair of distributions",
    "MixtureOfGaussiansDpEvent": "is not known to this accountant",
    "TruncatedSubsampledGaussianDpEvent": "is not known to this accountant",
}


@dataclass(frozen=True)
class Event:
    """A node of a dp_accounting event tree: the class's name and its fields in their order.

    Only events whose privacy between datasets that differ by one added or removed record is known
    exactly are read. The library leaves that relation to its accountant; here it is fixed.
    """

    class_name: str
    fields: tuple[tuple[str, EventValue], ...] = ()

    def __post_init__(self) -> None:
        expected = _event_fields(self.class_name)
        if tuple(name for name, _ in self.fields) != tuple(expected):
            raise InvalidMechanism("", f"has the fields {', '.join(expected) or 'none'}, in order")
        for name, value in self.fields:
            if expected[name] in _EVENT_NUMBERS:
                _EVENT_NUMBERS[expected[name]](name, value)

    def __getitem__(self, name: str) -> EventValue:
        return dict(self.fields)[name]

    def to_json(self) -> dict[str, object]:
        """The fields of the library's own ``to_named_tuple``, in its order."""
        out: dict[str, object] = {"module_name": EVENT_MODULE, "class_name": self.class_name}
        for name, value in self.fields:
            if isinstance(value, Event):
                out[name] = value.to_json()
            elif isinstance(value, tuple):
                out[name] = [event.to_json() for event in value]
            else:
                out[name] = value
        return out

    @classmethod
    def read(cls, value: object, fields_of: Callable[[object], object] | None = None) -> Event:
        """Reads a tree of JSON objects, or of what ``fields_of`` makes into one, node by node.

        Raises:
            InvalidMechanism: an event is unknown or means something else, a field is missing,
                unknown or out of range, or the tree is larger than MAX_EVENTS or MAX_EVENT_DEPTH.
        """
        return _EventReader(fields_of or (lambda node: node)).node(value, 1)


EventValue = float | int | Event | tuple[Event, ...]


def _event_fields(class_name: object) -> dict[str, str]:
    if isinstance(class_name, str) and class_name in _REFUSED_EVENTS:
        raise InvalidMechanism("class_name", f"{class_name} {_REFUSED_EVENTS[class_name]}")
    if not isinstance(class_name, str) or class_name not in _EVENT_FIELDS:
        raise InvalidMechanism("class_name", f"must be one of {', '.join(_EVENT_FIELDS)}")
    return _EVENT_FIELDS[class_name]


class _EventReader:
    """Reads one tree, and counts its nodes: a tree made in Python may hold one node many times."""

    def __init__(self, fields_of: Callable[[object], object]) -> None:
        self._fields_of = fields_of
        self._nodes = 0

    def node(self, value: object, depth: int) -> Event:
        self._nodes += 1
        if self._nodes > MAX_EVENTS:
            raise InvalidMechanism("", f"makes more than {MAX_EVENTS} events")
        if depth > MAX_EVENT_DEPTH:
            raise InvalidMechanism("", f"is nested deeper than {MAX_EVENT_DEPTH} events")
        r = _Reader(self._fields_of(value), tagged=False)
        r.choice("module_name", (EVENT_MODULE,), EVENT_MODULE)
        class_name = r.raw("class_name")
        made = tuple(
            (name, self._field(name, r.raw(name), holds, depth))
            for name, holds in _event_fields(class_name).items()
        )
        r.done()
        return Event(cast(str, class_name), made)

    def _field(self, name: str, value: object, holds: str, depth: int) -> EventValue:
        if holds in _EVENT_NUMBERS:
            return _EVENT_NUMBERS[holds](name, value)
        if holds == "event":
            return _nested(name, value, lambda node: self.node(node, depth + 1))
        if not isinstance(value, list | tuple):
            raise InvalidMechanism(name, "must be a list")
        return tuple(
            _nested(f"{name}[{i}]", node, lambda node: self.node(node, depth + 1))
            for i, node in enumerate(value)
        )


def _event_terms(event: Event, times: int) -> tuple[Term, ...]:
    """The terms of ``times`` repetitions of an event; none for one that releases nothing."""
    if event.class_name == "NoOpDpEvent":
        return ()
    if event.class_name == "GaussianDpEvent":
        return (GaussianTerm(1.0, _mu(cast(float, event["noise_multiplier"])), times),)
    if event.class_name == "LaplaceDpEvent":
        return (LaplaceTerm(_mu(cast(float, event["noise_multiplier"])), times),)
    if event.class_name == "DiscreteLaplaceDpEvent":
        # Moved by 1, the ratio of the densities is e^{+-a} and nothing else: the randomised
        # response pair. Moved by more it takes values between, for which there is no term.
        if event["sensitivity"] != 1:
            raise InvalidMechanism("sensitivity", "must be 1 to be accounted exactly")
        return (
            ApproximateDPTerm(Decimal(cast(float, event["noise_parameter"])), Decimal(0), times),
        )
    if event.class_name == "SelfComposedDpEvent":
        times *= cast(int, event["count"])
        if times > MAX_COUNT:
            raise InvalidMechanism("count", f"makes more than {MAX_COUNT}")
        return _nested("event", event["event"], lambda e: _event_terms(cast(Event, e), times))
    if event.class_name == "ComposedDpEvent":
        terms: list[Term] = []
        for i, inner in enumerate(cast(tuple[Event, ...], event["events"])):
            terms += _nested(f"events[{i}]", inner, lambda e: _event_terms(cast(Event, e), times))
        return tuple(terms)
    q = cast(float, event["sampling_probability"])
    if q == 1.0:
        return _nested("event", event["event"], lambda e: _event_terms(cast(Event, e), times))
    return _sampled_terms(
        q, _nested("event", event["event"], lambda e: _event_terms(cast(Event, e), 1)), times
    )


def _sampled_terms(q: float, inner: tuple[Term, ...], times: int) -> tuple[Term, ...]:
    """One Poisson sample for all of ``inner``, which must be Gaussian and itself unsampled.

    Gaussians on one sample are a single Gaussian with mu^2 = sum mu_i^2; an (epsilon, delta) pair
    or a Laplace one would be amplified too, but into a pair that is no term.
    """
    if not inner:
        return ()
    gaussians = [t for t in inner if isinstance(t, GaussianTerm) and t.sampling_probability == 1.0]
    if len(gaussians) != len(inner):
        raise InvalidMechanism(
            "event", "must be a Gaussian, or Gaussians composed, to be accounted under sampling"
        )
    mu = gaussians[0].mu
    if len(gaussians) > 1 or gaussians[0].count > 1:
        largest = max(t.mu for t in gaussians)
        total = math.fsum(t.count * (t.mu / largest) ** 2 for t in gaussians)
        mu = largest * math.sqrt(total) * _MU_ROUND_UP
    return (GaussianTerm(q, mu, times),)


@dataclass(frozen=True)
class DpEvent:
    """An event tree of dp_accounting, read as private between an added or removed record.

    A question only: an event names no relation and none of the numbers that running code would
    read, so that a ledger could not say what it charged for.
    """

    event: Event
    kind: ClassVar[str] = "dp_event"

    def __post_init__(self) -> None:
        self.alternatives()  # counts multiply here, and some events have no term

    def to_json(self) -> dict[str, object]:
        return {"kind": self.kind, "event": self.event.to_json()}

    @classmethod
    def from_json(cls, obj: object) -> DpEvent:
        r = _Reader(obj)
        event = _nested("event", r.raw("event"), Event.read)
        r.done()
        return cls(event)

    def alternatives(self) -> tuple[tuple[Term, ...], ...]:
        terms = _nested("event", self.event, lambda e: _event_terms(cast(Event, e), 1))
        # Nothing at all is written as what it costs, for accountants that need a term.
        return (terms or (ApproximateDPTerm(Decimal(0), Decimal(0), 1),),)

    def missing_for_charge(self) -> str | None:
        return None


# --------------------------------------------------------------------------------------------------
# Composition
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A mechanism and how often it is repeated."""

    mechanism: Mechanism
    count: int = 1

    def __post_init__(self) -> None:
        check_count("count", self.count)


@dataclass(frozen=True)
class Composition:
    """Mechanisms all fixed in advance, run on the same dataset."""

    parts: tuple[Part, ...]
    kind: ClassVar[str] = "composition"

    def __post_init__(self) -> None:
        if not self.parts:
            raise InvalidMechanism("parts", "must not be empty")
        if len(self.parts) > MAX_PARTS:
            raise InvalidMechanism("parts", f"at most {MAX_PARTS} parts")
        for i, part in enumerate(self.parts):
            if isinstance(part.mechanism, Composition):
                # One level keeps the size of a question bounded by the size of its text.
                raise InvalidMechanism(f"parts[{i}].mechanism.kind", "is a composition already")
        self._part_alternatives()  # counts multiply here, and may overflow their limit

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "parts": [{"mechanism": p.mechanism.to_json(), "count": p.count} for p in self.parts],
        }

    @classmethod
    def from_json(cls, obj: object) -> Composition:
        r = _Reader(obj)
        parts = r.raw("parts")
        if not isinstance(parts, list | tuple):
            raise InvalidMechanism("parts", "must be a list")
        if len(parts) > MAX_PARTS:
            raise InvalidMechanism("parts", f"at most {MAX_PARTS} parts")
        r.done()
        made = []
        for i, value in enumerate(parts):
            part = _nested(f"parts[{i}]", value, _untagged)
            try:
                if _kind_of(part.raw("mechanism")) == cls.kind:
                    raise InvalidMechanism("mechanism.kind", "is a composition already")
                mechanism = _nested("mechanism", part.raw("mechanism"), mechanism_from_json)
                made.append(Part(mechanism, part.integer("count", default=1)))
                part.done()
            except InvalidMechanism as error:
                raise error.within(f"parts[{i}]") from None
        return cls(tuple(made))

    def alternatives(self) -> tuple[tuple[Term, ...], ...]:
        """One list of terms for each class, if only one part has classes; else one for all."""
        each = self._part_alternatives()
        several = [i for i, one in enumerate(each) if len(one) > 1]
        if len(several) != 1:
            return (tuple(term for one in each for term in _single(one)),)
        return self._with_classes_of(several[0], each)

    def realised(self) -> tuple[tuple[Term, ...], ...]:
        """Compositions that some unit really meets, or more than it does not meet less than."""
        each = self._part_alternatives()
        several = [i for i, one in enumerate(each) if len(one) > 1]
        plain = [one if len(one) == 1 else ((),) for one in each]
        out: list[tuple[Term, ...]] = []
        for i in several:
            out += self._with_classes_of(i, [*plain[:i], each[i], *plain[i + 1 :]])
        return tuple(out) or self.alternatives()

    def _with_classes_of(
        self, part: int, each: Sequence[tuple[tuple[Term, ...], ...]]
    ) -> tuple[tuple[Term, ...], ...]:
        before = tuple(term for one in each[:part] for term in one[0])
        after = tuple(term for one in each[part + 1 :] for term in one[0])
        return tuple((*before, *terms, *after) for terms in each[part])

    def _part_alternatives(self) -> list[tuple[tuple[Term, ...], ...]]:
        out = []
        for i, part in enumerate(self.parts):
            if part.count == 1:
                out.append(part.mechanism.alternatives())
                continue
            alternatives = []
            for terms in part.mechanism.alternatives():
                if any(term.count * part.count > MAX_COUNT for term in terms):
                    raise InvalidMechanism(f"parts[{i}].count", f"makes more than {MAX_COUNT}")
                repeated = (replace(term, count=term.count * part.count) for term in terms)
                alternatives.append(tuple(repeated))
            out.append(tuple(alternatives))
        return out

    def missing_for_charge(self) -> str | None:
        for i, part in enumerate(self.parts):
            missing = part.mechanism.missing_for_charge()
            if missing is not None:
                return f"parts[{i}].mechanism.{missing}"
        return None


Mechanism = (
    Gaussian
    | Laplace
    | RandomizedResponse
    | NoisyCounts
    | NoisyMax
    | SubsampledGaussian
    | DPSGD
    | ApproximateDP
    | DenoisingBlock
    | FetaPro
    | DpEvent
    | Composition
)

_KINDS: Final[dict[str, Callable[[object], Mechanism]]] = {
    Gaussian.kind: Gaussian.from_json,
    Laplace.kind: Laplace.from_json,
    RandomizedResponse.kind: RandomizedResponse.from_json,
    NoisyCounts.kind: NoisyCounts.from_json,
    NoisyMax.kind: NoisyMax.from_json,
    SubsampledGaussian.kind: SubsampledGaussian.from_json,
    DPSGD.kind: DPSGD.from_json,
    ApproximateDP.kind: ApproximateDP.from_json,
    DenoisingBlock.kind: DenoisingBlock.from_json,
    FetaPro.kind: FetaPro.from_json,
    DpEvent.kind: DpEvent.from_json,
    Composition.kind: Composition.from_json,
}


# --------------------------------------------------------------------------------------------------
# The module's face
# --------------------------------------------------------------------------------------------------


def mechanism_from_json(obj: object) -> Mechanism:
    """Reads a mechanism from its published JSON form.

    Raises:
        InvalidMechanism: names the field that is missing, unknown or out of range.
    """
    return _KINDS[_kind_of(obj)](obj)


def mechanism_to_json(mechanism: Mechanism) -> dict[str, object]:
    """The published JSON form; reading it back gives an equal mechanism."""
    return mechanism.to_json()


def mechanism_digest(mechanism: Mechanism) -> str:
    """SHA-256 of the mechanism's canonical JSON, for caches and the ledger."""
    return digest(mechanism.to_json())


def dominating_terms(mechanism: Mechanism) -> tuple[tuple[Term, ...], ...]:
    """Compositions of terms, the worst of which dominates the mechanism.

    There is more than one where a unit's privacy depends on its class: a class-conditional block
    draws only from the unit's own class, so the charge is that of the worst class. Beyond
    MAX_ALTERNATIVES one that dominates them all stands for them, so that the work of a question
    stays bounded.

    Raises:
        InvalidMechanism: there are more than MAX_TERMS distinct terms.
    """
    alternatives = mechanism.alternatives()
    if _too_many(alternatives):
        alternatives = (_single(alternatives),)
    merged = tuple(_merge(terms) for terms in alternatives)
    if sum(len(terms) for terms in merged) > MAX_TERMS:
        raise InvalidMechanism("mechanism", f"has more than {MAX_TERMS} distinct parts")
    return merged


def _too_many(alternatives: tuple[tuple[Term, ...], ...]) -> bool:
    """Whether one pair that dominates all alternatives is to stand for them."""
    if len(alternatives) == 1:
        return False
    terms = sum(len(terms) for terms in alternatives)
    return len(alternatives) > MAX_ALTERNATIVES or terms > MAX_TERMS


def realised_terms(mechanism: Mechanism) -> tuple[tuple[Term, ...], ...] | None:
    """Compositions from below, the worst of which the mechanism is at least as bad as.

    None where :func:`dominating_terms` is exact, and not one pair that stands for many classes.
    """
    if isinstance(mechanism, Composition):
        exact = sum(len(p.mechanism.alternatives()) > 1 for p in mechanism.parts) < 2
        alternatives = mechanism.realised()
    else:
        exact, alternatives = True, mechanism.alternatives()
    if exact and not _too_many(alternatives):
        return None

    def size(terms: tuple[Term, ...]) -> float:
        """About how much privacy the terms cost: it only chooses which are asked."""
        gaussians = (t for t in terms if isinstance(t, GaussianTerm))
        return sum(
            t.count * t.sampling_probability**2 * math.expm1(min(t.mu * t.mu, 50.0))
            for t in gaussians
        )

    worst = sorted(alternatives, key=size, reverse=True)[:4]
    return tuple(_merge(terms) for terms in worst)


def require_chargeable(mechanism: Mechanism) -> None:
    """Checks that a ledger may charge for this mechanism.

    Raises:
        InvalidMechanism: a field that the running code would read is missing, the mechanism is one
            whose guarantee needs a number that is private (the paper's divisor by the true n), or
            it does not itself state the neighbouring relation (an event of dp_accounting).
    """
    missing = mechanism.missing_for_charge()
    if missing is not None:
        raise InvalidMechanism(missing, "is required of a mechanism that is charged")
    if isinstance(mechanism, Composition):
        for i, part in enumerate(mechanism.parts):
            try:
                _require_stated(part.mechanism)
            except InvalidMechanism as error:
                raise error.within(f"parts[{i}].mechanism") from None
    else:
        _require_stated(mechanism)


def _require_stated(m: Mechanism) -> None:
    # What a client declares (approximate_dp, noisy_max, ...) states its cost between neighbours of
    # this relation, and may be charged. An event leaves the relation to whoever accounts for it.
    if isinstance(m, DpEvent):
        raise InvalidMechanism(
            "kind", "dp_event names no neighbouring relation; charge what ran as other kinds"
        )
    if (
        isinstance(m, DenoisingBlock)
        and m.subsampling == "full_batch"
        and m.sampling == "fixed_size"
    ):
        raise InvalidMechanism(
            "sampling", "full_batch with fixed_size divides by the true n, which is private"
        )


# --------------------------------------------------------------------------------------------------
# Helpers
# --------------------------------------------------------------------------------------------------


def _mu(noise_multiplier: float) -> float:
    """1/noise_multiplier, rounded up: exact where it is a double."""
    near = 1.0 / noise_multiplier
    exact = Fraction(near) * Fraction(noise_multiplier) >= 1
    return near if exact else math.nextafter(near, math.inf)


def _kind_of(obj: object) -> str:
    if not isinstance(obj, Mapping):
        raise InvalidMechanism("", "a mechanism must be a JSON object")
    kind = obj.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidMechanism("kind", f"must be one of {', '.join(_KINDS)}")
    return kind


def _untagged(obj: object) -> _Reader:
    return _Reader(obj, tagged=False)


def _nested(where: str, value: object, read: Callable[[object], T]) -> T:
    try:
        return read(value)
    except InvalidMechanism as error:
        raise error.within(where) from None


def _check_optional(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None:
            check_positive(name, value)


def _present(**values: object) -> dict[str, object]:
    return {k: v for k, v in values.items() if v is not None}


def _first_missing(**values: object) -> str | None:
    return next((k for k, v in values.items() if v is None), None)


def _undominated(shares: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """The (q, N) pairs that no other pair exceeds in both; privacy loss grows in each."""
    kept: list[tuple[float, int]] = []
    for q, n in sorted(set(shares), reverse=True):
        if not kept or n > kept[-1][1]:
            kept.append((q, n))
    return kept


def _single(alternatives: tuple[tuple[Term, ...], ...]) -> tuple[Term, ...]:
    """One list of terms that dominates every alternative: at each place the larger q and count.

    Inside a composition the worst class of one part need not be that of another, so each part is
    bounded by (max q, max N) over its classes.
    """
    if len(alternatives) == 1:
        return alternatives[0]
    out: list[Term] = []
    for column in zip(*alternatives, strict=True):
        gaussians = [t for t in column if isinstance(t, GaussianTerm)]
        if len(set(column)) == 1:
            out.append(column[0])  # of a part without classes
            continue
        if len(gaussians) != len(column):
            raise TypeError("only a block's classes, which are Gaussian, are alternatives")
        out.append(
            GaussianTerm(
                max(t.sampling_probability for t in gaussians),
                max(t.mu for t in gaussians),
                max(t.count for t in gaussians),
            )
        )
    return tuple(out)


def _merge(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """Equal terms counted together, so that composing is a matter of distinct terms only."""
    merged: dict[Term, int] = {}
    for term in terms:
        key = replace(term, count=1)
        merged[key] = merged.get(key, 0) + term.count
    return tuple(replace(term, count=count) for term, count in merged.items())
