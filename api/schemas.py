"""Wire types: the shape, types and sizes of every body, in and out.

A request is checked here for its shape alone (unknown fields are refused, so that a restriction a
client believes it has set is never ignored). What a value *means* is checked where it is used:
mechanisms in :mod:`accounting.mechanisms`, budgets in :mod:`accounting.filters`, job specs in
:mod:`accounting.quotes`. Numbers that can be infinite travel as the string ``"inf"``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
)

from accounting.bounds import LEAST_TOLERANCE
from accounting.mechanisms import LARGEST, MAX_EPSILON, SMALLEST
from accounting.tradeoff import MAX_ALPHAS
from api.auth import Scope

JsonObject = dict[str, Any]
Identifier = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[a-z0-9_]+$")]
_PRINTABLE = r"^[^\x00-\x1f\x7f]*[^\x00-\x20\x7f][^\x00-\x1f\x7f]*$"
# Printable: a name goes into pages, logs and file names.
Name = Annotated[
    str,
    StringConstraints(min_length=1, max_length=200, pattern=_PRINTABLE),
]
ClassName = Annotated[
    str, StringConstraints(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f/\\]+$")
]
# The decimal as written: a JSON number, or its text where a double would not hold it.
DecimalNumber = float | str
Infinite = float | Literal["inf"]
Time = Annotated[str, Field(examples=["2026-01-01T12:00:00.000000Z"])]

MAX_OUTPUTS = 1_000_000
# Of one call; the library itself takes more (accounting.bounds.MAX_POINTS).
MAX_EPSILONS = 200
MAX_CLASSES = 10_000


class Body(BaseModel):
    """A request's body: exact types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Answer(BaseModel):
    """A response's body."""

    model_config = ConfigDict(extra="forbid")


# --------------------------------------------------------------------------------------------------
# Problems
# --------------------------------------------------------------------------------------------------


class Problem(BaseModel):
    """RFC 9457. Some codes add members; see the page behind ``type``."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "type": "/problems/invalid-request",
                    "title": "Invalid request",
                    "status": 422,
                    "code": "invalid_request",
                    "detail": "outputs: Field required",
                    "field": "outputs",
                }
            ]
        },
    )

    type: str
    title: str
    status: int
    code: str
    detail: str


class BudgetProblem(Problem):
    """``budget_exhausted``: by filter, what was asked for, what is left and what stands in the way.

    ``largest_that_fits`` is a number of outputs that would be admitted now, or null where that
    can't be told or nothing fits.
    """

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "type": "/problems/budget-exhausted",
                    "title": "Budget exhausted",
                    "status": 409,
                    "code": "budget_exhausted",
                    "detail": "No filter of the budget admits this charge.",
                    "requested": [{"order": "inf", "epsilon": 2.0, "delta": 9e-6}],
                    "remaining": [{"order": "inf", "epsilon": 1.0, "delta": 0.0}],
                    "blocking": [
                        {
                            "order": "inf",
                            "epsilon": 6.0,
                            "delta": 9e-6,
                            "exceeds": ["epsilon", "delta"],
                        }
                    ],
                    "largest_that_fits": None,
                }
            ]
        },
    )

    requested: list[JsonObject] | None = None
    remaining: list[JsonObject] | None = None
    blocking: list[JsonObject] | None = None
    largest_that_fits: JsonObject | None = None


# --------------------------------------------------------------------------------------------------
# Administration
# --------------------------------------------------------------------------------------------------


class OrganisationRequest(Body):
    name: Name = Field(examples=["hospital"])


class Organisation(Answer):
    id: str
    name: str
    created_at: Time


class Organisations(Answer):
    organisations: list[Organisation]
    next_cursor: str | None


class KeyRequest(Body):
    organisation: Identifier = Field(description="The organisation the key belongs to.")
    scopes: list[Scope] = Field(min_length=1, max_length=4, examples=[["owner"]])


class NewKey(Answer):
    id: str
    organisation: str
    scopes: list[Scope]
    created_at: Time
    key: str = Field(description="Shown this once; the service keeps its SHA-256 alone.")


# --------------------------------------------------------------------------------------------------
# Datasets
# --------------------------------------------------------------------------------------------------


class DatasetRequest(Body):
    """The public facts of a dataset. They are fixed here; private records come as snapshots."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "digits",
                    "shape": [28, 28, 1],
                    "value_range": [0, 255],
                    "classes": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"],
                    "public_size": 5000,
                    "public_class_sizes": None,
                    "unit": None,
                    "max_records_per_unit": 1,
                    "budget_group": None,
                    "attestation": "units not registered in another budget group",
                }
            ]
        }
    )

    name: Name
    shape: Annotated[
        list[Annotated[int, Field(ge=1, le=4096)]],
        Field(min_length=3, max_length=3, description="Height, width, channels (1 or 3)."),
    ]
    value_range: Annotated[
        list[int], Field(min_length=2, max_length=2, description="Of a stored pixel: [0, 255].")
    ] = [0, 255]
    classes: Annotated[list[ClassName], Field(min_length=1, max_length=MAX_CLASSES)] | None = None
    public_size: int = Field(
        ge=1, le=10**9, description="The declared number of units; need not be the true one."
    )
    public_class_sizes: dict[str, Annotated[int, Field(ge=1, le=10**9)]] | None = None
    unit: Name | None = Field(
        default=None, description="What a unit of several records is; null if each record is one."
    )
    max_records_per_unit: int = Field(default=1, ge=1, le=1_000_000)
    budget_group: Identifier | None = Field(
        default=None,
        description="A dataset of the same organisation that has units in common with this one: "
        "both then share that one's budget and ledger.",
    )
    fixed_size_allowed: bool = Field(
        default=False,
        description="Whether fixed-size sampling may be ordered. Its guarantee holds only between "
        "datasets that both have at least `public_size` units.",
    )
    attestation: str = Field(min_length=1, max_length=1000)

    @field_validator("shape")
    @classmethod
    def _grey_or_colour(cls, value: list[int]) -> list[int]:
        if value[2] not in (1, 3):
            raise ValueError("the number of channels must be 1 or 3")
        return value

    @field_validator("value_range")
    @classmethod
    def _bytes(cls, value: list[int]) -> list[int]:
        if value != [0, 255]:
            raise ValueError("must be [0, 255]")
        return value

    @field_validator("classes")
    @classmethod
    def _distinct(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and len(set(value)) != len(value):
            raise ValueError("must be distinct")
        if value is not None and {".", ".."} & set(value):
            # Class names become folders in a zip of pictures.
            raise ValueError("must not be . or ..")
        return value

    @field_validator("max_records_per_unit")
    @classmethod
    def _of_a_unit(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("unit") is None:
            raise ValueError("needs a unit: without one each record is a unit of its own")
        return value

    @field_validator("public_class_sizes")
    @classmethod
    def _every_class(
        cls, value: dict[str, int] | None, info: ValidationInfo
    ) -> dict[str, int] | None:
        # `classes` is absent here if it was itself refused.
        if value is not None and set(value) != set(info.data.get("classes") or ()):
            raise ValueError("must name every class and no other")
        return value


class Dataset(Answer):
    id: str
    name: str
    organisation: str
    created_at: Time
    shape: list[int]
    value_range: list[int]
    classes: list[str] | None
    public_size: int
    public_class_sizes: dict[str, int] | None
    unit: str | None
    max_records_per_unit: int
    budget_group: str | None
    fixed_size_allowed: bool
    attestation: str


class Datasets(Answer):
    datasets: list[Dataset]
    next_cursor: str | None


class Snapshot(Answer):
    id: str
    created_at: Time


class OwnerSnapshot(Answer):
    """A snapshot as its owner sees it. The counts are private: they enter nothing else."""

    id: str
    created_at: Time
    not_private: Literal[True] = Field(
        default=True, description="The figures here are computed from private data, uncharged."
    )
    records: int
    warning: str | None


class OwnerSnapshots(Answer):
    snapshots: list[OwnerSnapshot]


class GrantRequest(Body):
    organisation: Identifier = Field(description="The organisation that is let in.")
    scopes: list[Literal["quote", "request"]] = Field(
        min_length=1, max_length=2, examples=[["quote", "request"]]
    )


class Grant(Answer):
    dataset: str
    organisation: str
    scopes: list[Literal["quote", "request"]]
    created_at: Time


class Grants(Answer):
    grants: list[Grant]


# --------------------------------------------------------------------------------------------------
# Budget
# --------------------------------------------------------------------------------------------------


class Amount(Answer):
    """Epsilon in nats, and delta where the filter spends it."""

    epsilon: Infinite
    delta: Infinite


class UseFewLarge(Body):
    kind: Literal["few_large"]
    releases: int = Field(ge=1, le=1_000_000)


class UseManySmall(Body):
    kind: Literal["many_small"]


class OnlyEpsilon(Body):
    epsilon: DecimalNumber


class BudgetRequest(Body):
    """A budget. Its filters are a published function of epsilon, delta and the declared use."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"epsilon": 6.0, "delta": 1e-5, "use": {"kind": "few_large", "releases": 1}}
            ]
        }
    )

    epsilon: DecimalNumber
    delta: DecimalNumber
    use: Annotated[UseFewLarge | UseManySmall, Field(discriminator="kind")]
    organisation_caps: dict[Identifier, OnlyEpsilon] | None = Field(
        default=None,
        max_length=1000,
        description="The most epsilon for an organisation: that part of every filter is its share.",
    )
    approval_above: OnlyEpsilon | None = Field(
        default=None,
        description="A job charged more epsilon by basic composition waits for the owner.",
    )


class FilterReport(Answer):
    """One filter: shares fixed with the budget, and what the entries sum to.

    Order ``"inf"`` is basic composition, which spends epsilon and delta; a finite order spends
    Rényi divergence at that order (in nats). A charge is admitted if one filter admits it.
    """

    order: str
    cap: Amount = Field(description="Of epsilon, and for order inf of delta.")
    delta_share: float = Field(description="The filter's share of the budget's delta.")
    delta_per_release: float = Field(description="Charged for each release; order inf alone.")
    spent: Amount = Field(description="By jobs that started; never given back.")
    reserved: Amount = Field(description="By jobs that have not started yet.")
    remaining: Amount


class ShareReport(Answer):
    """What remains, in one filter, of the share that the caller's organisation has."""

    order: str
    remaining: Amount


class BudgetReport(Answer):
    epsilon: DecimalNumber
    delta: DecimalNumber
    use: JsonObject
    organisation_caps: JsonObject = Field(description="Other callers than the owner see their own.")
    approval_above: JsonObject | None
    filters: list[FilterReport]
    your_share: list[ShareReport] | None = Field(description="null without a cap.")


# --------------------------------------------------------------------------------------------------
# Quotes and jobs
# --------------------------------------------------------------------------------------------------


class Target(Body):
    """What the certificate is to state at most: epsilon at a delta of the requester's choice."""

    epsilon: float
    delta: DecimalNumber


class EdmSchedule(Body):
    """The grid of noise levels, from ``sigma_max`` down to ``sigma_min`` in ``steps`` levels."""

    kind: Literal["edm"]
    sigma_min: float
    sigma_max: float
    rho: float
    steps: int


class Preset(Body):
    """The block and the public hand-off, chosen by the requester."""

    weight: Literal["density", "uniform", "centred"] | None = None
    centre: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    schedule: EdmSchedule | None = None
    block_steps: int | None = None
    block_fraction: DecimalNumber | None = None
    sampling: Literal["poisson", "fixed_size"] | None = None
    subsample_size: int | None = None
    clip_norm: float | None = None
    beta: float | None = None
    public_model: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    renoise_steps: int | None = None
    refine_steps: int | None = None


def _preset_tag(value: object) -> str:
    return "auto" if isinstance(value, str) else "preset"


PresetChoice = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[Preset, Tag("preset")],
    Discriminator(_preset_tag),
]

_SPEC_EXAMPLE: JsonObject = {
    "kind": "denoise",
    "outputs": {str(digit): 50 for digit in range(10)},
    "preset": "auto",
    "target": {"epsilon": 1.0, "delta": 1e-5},
    "form": "refined",
}


class DenoiseSpec(Body):
    """A synthetic batch: the body of a quote and of a job alike."""

    model_config = ConfigDict(json_schema_extra={"examples": [_SPEC_EXAMPLE]})

    kind: Literal["denoise"]
    outputs: dict[str, int] | int = Field(
        description="How many outputs of each class; one number for a dataset without classes."
    )
    preset: PresetChoice = "auto"
    target: Target | None = None
    form: Literal["refined"] = "refined"
    allow_vacuous: bool = Field(
        default=False, description="Order a block although it can release noise only."
    )
    max_attempts: Literal[1] = Field(
        default=1, description="How many charges a job may take; one is offered so far."
    )
    dry_run: bool = Field(default=False, description="Answer as a quote; reserve nothing.")


class Charge(Answer):
    """Amounts in the family's filters.

    ``epsilon`` and ``delta`` are those of order infinity, at the delta that the family fixes for a
    release (not the certificate's); ``orders`` has the amount at each finite Rényi order. A family
    without order infinity has null there.
    """

    epsilon: Infinite | None
    delta: Infinite | None
    orders: dict[str, Infinite]


class CertificateEpsilon(Answer):
    """What the certificate will state: epsilon's bracket at the reader's delta."""

    model_config = ConfigDict(extra="allow")

    lower: Infinite
    upper: Infinite
    delta: float


class Quote(Answer):
    mechanism: JsonObject
    post_processing: JsonObject
    certificate_epsilon: CertificateEpsilon
    charge: Charge
    admitted: bool
    needs_approval: bool = Field(description="Ordered now, it would wait for the owner.")
    further: int | None = Field(
        description="How many such jobs the budget admits now, one after the other."
    )
    remaining: Charge = Field(description="What each filter admits now.")
    remaining_after: Charge | None = Field(
        description="What each filter would still admit afterwards; null if it is not admitted."
    )
    drift_ceiling: list[Infinite]
    expected_seconds: float
    warnings: list[str]


class Progress(Answer):
    done: int
    total: int


class Job(Answer):
    id: str
    dataset: str
    plan: str | None = Field(description="The plan that the job belongs to; its charge is shared.")
    state: Literal[
        "awaiting_approval",
        "reserved",
        "started",
        "released",
        "failed_charged",
        "cancelled",
        "expired",
        "denied",
    ]
    created_at: Time
    spec: JsonObject
    mechanism: JsonObject
    post_processing: JsonObject
    certificate_epsilon: CertificateEpsilon
    charge: Charge
    progress: Progress
    release: str | None
    problem: Problem | None


class PlanRequest(Body):
    """Jobs that are fixed together before the first of them starts, and charged as one."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"jobs": [_SPEC_EXAMPLE, _SPEC_EXAMPLE]}]}
    )

    jobs: list[DenoiseSpec] = Field(min_length=1, max_length=100)
    dry_run: bool = Field(default=False, description="Answer as a quote; reserve nothing.")


class PlanQuote(Answer):
    mechanism: JsonObject
    charge: Charge
    separately: Charge = Field(description="What the same jobs would be charged one by one.")
    admitted: bool
    needs_approval: bool
    remaining: Charge
    remaining_after: Charge | None
    expected_seconds: float
    warnings: list[str]


class Plan(Answer):
    id: str
    dataset: str
    state: str = Field(description="`started` from the first start until the last job ended.")
    created_at: Time
    charge: Charge
    jobs: list[Job]


class Release(Answer):
    id: str
    dataset: str
    job: str
    created_at: Time
    sha256: str
    bytes: int
    content: dict[str, str] = Field(description="Where the batch lies, by format.")
    certificate: str


# --------------------------------------------------------------------------------------------------
# Ledger
# --------------------------------------------------------------------------------------------------


class LedgerEntry(Answer):
    id: str
    sequence: int
    kind: str
    state: str
    dataset: str
    jobs: list[str]
    organisation: str
    parent_entry: str | None
    releases: list[str]
    mechanism: JsonObject | None
    mechanism_digest: str | None
    charge: Charge
    created_at: Time


class OrganisationStatement(Answer):
    """What one organisation's jobs have spent or hold."""

    organisation: str
    entries: int
    cap: JsonObject | None
    charge: Charge


class BudgetPoint(Answer):
    """The part of each filter's cap that was used after an entry; null where it is crossed."""

    sequence: int
    at: Time
    used: dict[str, float | None]


class Statement(Answer):
    """A dataset's books summed up, for its owner and auditors."""

    dataset: str
    guarantee: BudgetReport = Field(
        description="What the filters hold: all that was computed is private at this budget."
    )
    as_if_fixed_in_advance: CertificateEpsilon | None = Field(
        description="Information only: the bound had all that started been fixed in advance. It "
        "promises nothing for requests that were chosen after earlier outputs."
    )
    organisations: list[OrganisationStatement]
    over_time: list[BudgetPoint]


class LedgerHead(Answer):
    sequence: int
    hash: str


class Ledger(Answer):
    dataset: str
    head: LedgerHead
    entries: list[LedgerEntry]
    next_cursor: str | None


class LedgerCheck(Answer):
    dataset: str
    ok: bool
    rows: int = Field(description="How many rows of the chain hold.")
    first_bad: int | None
    problem: str | None
    head: str
    unconfirmed: int = Field(
        description="Distinct charges whose cost the accountant could not confirm in its limits."
    )


# --------------------------------------------------------------------------------------------------
# Accounting
# --------------------------------------------------------------------------------------------------

_MECHANISM_EXAMPLE: JsonObject = {
    "kind": "subsampled_gaussian",
    "sampling_probability": 0.0005,
    "noise_multiplier": 1.0,
    "count": 100,
}
Question = Annotated[JsonObject, Field(examples=[_MECHANISM_EXAMPLE])]
Epsilon = Annotated[float, Field(ge=0, le=MAX_EPSILON)]
Delta = Annotated[float, Field(gt=0, lt=1)]


class EpsilonRequest(Body):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"mechanism": _MECHANISM_EXAMPLE, "delta": 1e-5}]}
    )

    mechanism: Question
    delta: Delta
    tolerance: float | None = Field(
        default=None,
        ge=LEAST_TOLERANCE,
        le=MAX_EPSILON,
        description="The wanted width of the bracket, in epsilon.",
    )


class DeltaRequest(Body):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"mechanism": _MECHANISM_EXAMPLE, "epsilon": 1.0}]}
    )

    mechanism: Question
    epsilon: Epsilon


class ProfileRequest(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"mechanism": _MECHANISM_EXAMPLE, "epsilons": [0.1, 0.5, 1.0]}]
        }
    )

    mechanism: Question
    epsilons: list[Epsilon] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_EPSILONS,
        description="By default 101 from 0 to where delta is about 1e-12.",
    )


class TradeoffRequest(Body):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"mechanism": _MECHANISM_EXAMPLE, "alphas": [0.01, 0.1]}]}
    )

    mechanism: Question
    alphas: list[Annotated[float, Field(ge=0, le=1)]] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_ALPHAS,
        description="Type I errors; by default from 1e-6 to 1.",
    )


class CompareRequest(Body):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"mechanism": _MECHANISM_EXAMPLE, "delta": 1e-5}]}
    )

    mechanism: Question
    delta: Delta


Method = Annotated[
    Literal["certified", "rdp"],
    Field(description="What prices: the service's bounds, or Rényi costs at the papers' orders."),
]
PositiveEpsilon = Annotated[float, Field(ge=SMALLEST, le=MAX_EPSILON)]
PositiveDelta = Annotated[float, Field(ge=SMALLEST, lt=1)]


class CalibrationTarget(Body):
    """What the upper end is to meet; ``delta`` is left out where it is asked for."""

    epsilon: PositiveEpsilon
    delta: PositiveDelta | None = None


class CalibrateRequest(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "mechanism": _MECHANISM_EXAMPLE,
                    "free": "noise_multiplier",
                    "target": {"epsilon": 1.0, "delta": 1e-5},
                }
            ]
        }
    )

    mechanism: Question
    free: str = Field(
        min_length=1,
        max_length=200,
        description="The parameter's path in the mechanism, such as `parts[0].mechanism.count`.",
    )
    target: CalibrationTarget
    method: Method = "certified"


class AllocationStage(Body):
    mechanism: Question
    weight: float = Field(
        ge=SMALLEST, le=LARGEST, description="Its share of the cost, unnormalised."
    )


class AllocationTarget(Body):
    epsilon: PositiveEpsilon
    delta: PositiveDelta


class AllocateRequest(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "stages": [
                        {"mechanism": {"kind": "gaussian", "noise_multiplier": 1.0}, "weight": 1.0},
                        {"mechanism": _MECHANISM_EXAMPLE, "weight": 3.0},
                    ],
                    "target": {"epsilon": 1.0, "delta": 1e-5},
                }
            ]
        }
    )

    stages: list[AllocationStage] = Field(min_length=1, max_length=32)
    target: AllocationTarget
    method: Method = "certified"


class Bracket(BaseModel):
    """epsilon lies in [lower, upper]; upper is the certificate."""

    model_config = ConfigDict(extra="allow")

    lower: Infinite
    upper: Infinite
    delta: float


class DeltaBracket(BaseModel):
    """delta lies in [lower, upper]; upper is the certificate."""

    model_config = ConfigDict(extra="allow")

    lower: float
    upper: float
    epsilon: float


class Profile(Answer):
    points: list[DeltaBracket]


class TradeoffPoint(Answer):
    """The best certifiable type II error lies in [lower, upper]; lower is the certificate."""

    alpha: float
    lower: float
    upper: float


class Tradeoff(Answer):
    model_config = ConfigDict(extra="allow")

    points: list[TradeoffPoint]


class Comparison(Answer):
    """One method's view of epsilon; null where it gives no such number."""

    method: str
    lower: Infinite | None
    upper: Infinite | None
    estimate: Infinite | None
    certified: bool = Field(description="The ends are proven, rounding included.")
    valid: bool = Field(description="There is an answer, and the method's own conditions hold.")
    reason: str
    milliseconds: float
    details: JsonObject


class Comparisons(Answer):
    delta: float
    methods: list[Comparison]


class StageShare(Answer):
    stage: str
    share: float


class Calibration(Answer):
    model_config = ConfigDict(extra="allow")

    free: str
    parameter: int | float
    mechanism: JsonObject = Field(description="The mechanism with the parameter in place.")
    bracket: Bracket | DeltaBracket = Field(description="What was asked of the target, there.")
    target: JsonObject
    method: Method
    evaluations: int = Field(description="How many brackets were computed.")
    shares: list[StageShare] = Field(
        description="Of each stage of the mechanism: its part of the Rényi cost at the best order."
    )


class AllocatedStage(Answer):
    mechanism: JsonObject
    weight: float


class Allocation(Answer):
    model_config = ConfigDict(extra="allow")

    stages: list[AllocatedStage]
    mechanism: JsonObject = Field(description="The composition of the stages.")
    bracket: Bracket
    target: JsonObject
    method: Method
    evaluations: int = Field(description="How many brackets were computed.")
    shares: list[StageShare]


# --------------------------------------------------------------------------------------------------
# Certificates, models, the service itself
# --------------------------------------------------------------------------------------------------


class VerifyRequest(Body):
    certificate: JsonObject = Field(description="The certificate as it was downloaded.")
    recompute: bool = Field(
        default=True, description="Also compute epsilon again from the mechanism alone."
    )


class CertificateCheck(Answer):
    """Whether a certificate holds; null where something was not computed."""

    ok: bool
    signature_ok: bool
    mechanism_ok: bool
    bound_ok: bool | None
    bracket_same: bool | None
    recomputed: Bracket | None
    problems: list[str]


class PublicModel(Answer):
    name: str
    shape: list[int]
    classes: list[str] | None
    sha256: str
    licence: str
    training_data: JsonObject


class PublicModels(Answer):
    models: list[PublicModel]


class SigningKey(Answer):
    """An Ed25519 key that signs certificates now, or did once."""

    key_id: str
    public_key: str = Field(description="The 32 raw bytes in base64url without padding.")
    created_at: str


class SigningKeys(Answer):
    keys: list[SigningKey]


class Live(Answer):
    status: Literal["alive"] = "alive"


class Ready(Answer):
    status: Literal["ready"] = "ready"
    checks: dict[str, bool]
