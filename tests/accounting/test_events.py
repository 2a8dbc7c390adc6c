"""Events of dp_accounting: nothing is lost on the way, and what means another thing is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from decimal import Decimal
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event as library
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import cumulants, mechanism_from_json, mechanism_to_json
from accounting.errors import InvalidMechanism
from accounting.events import event_of_terms, from_dp_accounting, to_dp_accounting
from accounting.mechanisms import (
    MAX_EVENT_DEPTH,
    MAX_EVENTS,
    ApproximateDPTerm,
    DpEvent,
    Event,
    GaussianTerm,
    LaplaceTerm,
    dominating_terms,
    require_chargeable,
)

GAUSSIAN = library.GaussianDpEvent(2.0)
SAMPLED = library.PoissonSampledDpEvent(0.01, GAUSSIAN)


def tree(name: str, **fields: Any) -> dict[str, Any]:
    return {"module_name": "dp_accounting.dp_event", "class_name": name, **fields}


def question(event: Any) -> dict[str, Any]:
    return {"kind": "dp_event", "event": event}


def gaussian(noise: Any = 2.0) -> dict[str, Any]:
    return tree("GaussianDpEvent", noise_multiplier=noise)


# -- round trips -----------------------------------------------------------------------------------

positive = st.floats(1e-6, 1e6)
counts = st.integers(1, 20)
gaussians = positive.map(library.GaussianDpEvent)
on_one_sample = st.recursive(
    gaussians | st.just(library.NoOpDpEvent()),
    lambda inner: (
        st.builds(library.SelfComposedDpEvent, inner, counts)
        | st.lists(inner, max_size=3).map(library.ComposedDpEvent)
        | st.builds(library.PoissonSampledDpEvent, st.just(1.0), inner)
    ),
    max_leaves=4,
)
leaves = st.one_of(
    on_one_sample,
    positive.map(library.LaplaceDpEvent),
    positive.map(lambda a: library.DiscreteLaplaceDpEvent(a, 1)),
    st.builds(library.PoissonSampledDpEvent, st.floats(1e-9, 1.0), on_one_sample),
)
events = st.recursive(
    leaves,
    lambda inner: (
        st.builds(library.SelfComposedDpEvent, inner, counts)
        | st.lists(inner, max_size=4).map(library.ComposedDpEvent)
    ),
    max_leaves=6,
)


@given(events)
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost_on_the_way(event: Any) -> None:
    mechanism = from_dp_accounting(event)
    written = json.loads(json.dumps(mechanism_to_json(mechanism)))
    again = mechanism_from_json(written)
    assert again == mechanism
    assert mechanism_to_json(again) == written
    assert to_dp_accounting(again) == event


def test_the_json_is_the_librarys_own_named_tuple() -> None:
    event = library.ComposedDpEvent([library.SelfComposedDpEvent(SAMPLED, 7), GAUSSIAN])

    def plain(value: Any) -> Any:
        if isinstance(value, library.DpEventNamedTuple):
            return {name: plain(getattr(value, name)) for name in value._fields}
        return [plain(v) for v in value] if isinstance(value, list) else value

    assert from_dp_accounting(event).to_json()["event"] == plain(event.to_named_tuple())


def test_the_module_may_be_left_out_and_numbers_may_be_numpys() -> None:
    short = {"class_name": "GaussianDpEvent", "noise_multiplier": 2}
    assert mechanism_from_json(question(short)) == from_dp_accounting(GAUSSIAN)
    arrays = library.SelfComposedDpEvent(
        library.PoissonSampledDpEvent(np.float32(0.5), library.GaussianDpEvent(np.float64(2.0))),
        np.int64(3),
    )
    read = from_dp_accounting(arrays)
    assert dominating_terms(read) == ((GaussianTerm(0.5, 0.5, 3),),)
    json.dumps(read.to_json())


# -- what an event costs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "terms"),
    [
        (library.NoOpDpEvent(), (ApproximateDPTerm(Decimal(0), Decimal(0), 1),)),
        (library.ComposedDpEvent([]), (ApproximateDPTerm(Decimal(0), Decimal(0), 1),)),
        (GAUSSIAN, (GaussianTerm(1.0, 0.5, 1),)),
        (library.LaplaceDpEvent(4.0), (LaplaceTerm(0.25, 1),)),
        (
            library.DiscreteLaplaceDpEvent(0.5, 1),
            (ApproximateDPTerm(Decimal("0.5"), Decimal(0), 1),),
        ),
        (SAMPLED, (GaussianTerm(0.01, 0.5, 1),)),
        (library.PoissonSampledDpEvent(1.0, library.LaplaceDpEvent(4.0)), (LaplaceTerm(0.25, 1),)),
        (
            library.SelfComposedDpEvent(library.SelfComposedDpEvent(SAMPLED, 100), 7),
            (GaussianTerm(0.01, 0.5, 700),),
        ),
        (
            library.ComposedDpEvent(
                [
                    SAMPLED,
                    library.SelfComposedDpEvent(library.ComposedDpEvent([SAMPLED, GAUSSIAN]), 2),
                ]
            ),
            (GaussianTerm(0.01, 0.5, 3), GaussianTerm(1.0, 0.5, 2)),
        ),
    ],
)
def test_terms(event: Any, terms: Any) -> None:
    assert dominating_terms(from_dp_accounting(event)) == (terms,)


def test_gaussians_on_one_sample_are_one_gaussian() -> None:
    """Amplified once: the sample is not drawn afresh for each of them."""
    inner = library.ComposedDpEvent(
        [
            library.SelfComposedDpEvent(library.GaussianDpEvent(5.0), 9),
            library.GaussianDpEvent(1.25),
        ]
    )
    ((term,),) = dominating_terms(from_dp_accounting(library.PoissonSampledDpEvent(0.01, inner)))
    assert isinstance(term, GaussianTerm)
    assert (term.sampling_probability, term.count) == (0.01, 1)
    assert 1.0 <= term.mu <= 1.0 + 1e-12  # 9/25 + 16/25


def test_an_event_is_a_part_like_any_other() -> None:
    parts = [{"mechanism": question(gaussian()), "count": 3}, {"mechanism": question(gaussian(4))}]
    m = mechanism_from_json({"kind": "composition", "parts": parts})
    assert dominating_terms(m) == ((GaussianTerm(1.0, 0.5, 3), GaussianTerm(1.0, 0.25, 1)),)


# -- what is refused -------------------------------------------------------------------------------

BAD_NUMBERS: list[Any] = [0, -1.0, math.nan, math.inf, "2", True, None, [], 10**400, 1e200, 5e-324]
SELF = tree("SelfComposedDpEvent", event=gaussian(), count=10**9)
REFUSED: list[tuple[Any, str]] = [
    (None, "event"),
    (3, "event"),
    ([], "event"),
    ({}, "event.class_name"),
    (tree("GaussianEvent"), "event.class_name"),
    (tree("DpEvent"), "event.class_name"),
    ({"class_name": 3}, "event.class_name"),
    (gaussian() | {"module_name": "os"}, "event.module_name"),
    (gaussian() | {"kind": "x"}, "event.kind"),
    (gaussian() | {"l2_norm": 1}, "event.l2_norm"),
    (tree("GaussianDpEvent"), "event.noise_multiplier"),
    *((gaussian(v), "event.noise_multiplier") for v in BAD_NUMBERS),
    (tree("NonPrivateDpEvent"), "event.class_name"),
    (tree("UnsupportedDpEvent"), "event.class_name"),
    (
        tree("SampledWithoutReplacementDpEvent", source_dataset_size=9, sample_size=3),
        "event.class_name",
    ),
    *(
        (tree("PoissonSampledDpEvent", sampling_probability=v, event=gaussian()), path)
        for v in (0, -0.5, 1.0000001, math.nan, "0.5")
        for path in ["event.sampling_probability"]
    ),
    (
        tree("PoissonSampledDpEvent", sampling_probability=0.5, event=gaussian(0)),
        "event.event.noise_multiplier",
    ),
    *(
        (tree("PoissonSampledDpEvent", sampling_probability=0.5, event=inner), "event.event")
        for inner in (
            tree("LaplaceDpEvent", noise_multiplier=1.0),
            tree("PoissonSampledDpEvent", sampling_probability=0.5, event=gaussian()),
            tree(
                "ComposedDpEvent", events=[gaussian(), tree("LaplaceDpEvent", noise_multiplier=1)]
            ),
        )
    ),
    (
        tree("DiscreteLaplaceDpEvent", noise_parameter=0.5, sensitivity=2),
        "event.sensitivity",
    ),
    (
        tree("DiscreteLaplaceDpEvent", noise_parameter=1e100, sensitivity=1),
        "event.noise_parameter",
    ),
    *((SELF | {"count": v}, "event.count") for v in (0, -1, 1.5, True, 10**9 + 1, None)),
    (tree("SelfComposedDpEvent", event=SELF, count=2), "event.event.count"),
    (tree("ComposedDpEvent", events={}), "event.events"),
    (
        tree(
            "ComposedDpEvent", events=[gaussian(), tree("ComposedDpEvent", events=[gaussian(-1)])]
        ),
        "event.events[1].events[0].noise_multiplier",
    ),
    (
        tree(
            "ComposedDpEvent",
            events=[
                gaussian(),
                tree("DiscreteLaplaceDpEvent", noise_parameter=0.5, sensitivity=3),
            ],
        ),
        "event.events[1].sensitivity",
    ),
]


@pytest.mark.parametrize(("event", "field"), REFUSED)
def test_a_bad_tree_names_its_place(event: Any, field: str) -> None:
    with pytest.raises(InvalidMechanism) as refused:
        mechanism_from_json(question(event))
    assert refused.value.field == field
    part = {"kind": "composition", "parts": [{"mechanism": question(event)}]}
    with pytest.raises(InvalidMechanism) as refused:
        mechanism_from_json(part)
    assert refused.value.field == f"parts[0].mechanism.{field}"


@pytest.mark.parametrize(
    "event",
    [
        library.SampledWithoutReplacementDpEvent(1000, 10, GAUSSIAN),
        library.SampledWithReplacementDpEvent(1000, 10, GAUSSIAN),
        library.RandomizedResponseDpEvent(0.5, 2),
        library.SingleEpochTreeAggregationDpEvent(1.0, 8),
        library.NonPrivateDpEvent(),
        library.UnsupportedDpEvent(),
        library.RepeatAndSelectDpEvent(GAUSSIAN, 3.0, 1.0),
        library.MixtureOfGaussiansDpEvent(1.0, [0.0, 1.0], [0.5, 0.5]),
        library.ZCDpEvent(0.5),
        library.TruncatedSubsampledGaussianDpEvent(1000, 0.1, 50, 1.0),
    ],
)
def test_events_that_mean_something_else_are_refused_wherever_they_stand(event: Any) -> None:
    for outer, place in (
        (event, "event.class_name"),
        (library.SelfComposedDpEvent(event, 3), "event.event.class_name"),
        (library.ComposedDpEvent([GAUSSIAN, event]), "event.events[1].class_name"),
        (library.PoissonSampledDpEvent(0.5, event), "event.event.class_name"),
    ):
        with pytest.raises(InvalidMechanism) as refused:
            from_dp_accounting(outer)
        assert refused.value.field == place
        assert type(event).__name__ in refused.value.reason


def test_every_event_of_the_library_is_read_or_refused_by_name() -> None:
    """A version with a new event must not pass unnoticed."""
    from accounting.mechanisms import _EVENT_FIELDS, _REFUSED_EVENTS

    names = {
        name
        for name, value in vars(library).items()
        if isinstance(value, type) and issubclass(value, library.DpEvent)
    }
    assert names - {"DpEvent"} == set(_EVENT_FIELDS) | set(_REFUSED_EVENTS)
    for name, fields in _EVENT_FIELDS.items():
        assert [a.name for a in getattr(library, name).__attrs_attrs__] == list(fields)


@pytest.mark.parametrize("value", [3, "GaussianDpEvent", {"class_name": "NoOpDpEvent"}, None])
def test_what_is_no_event_is_refused(value: Any) -> None:
    with pytest.raises(InvalidMechanism) as refused:
        from_dp_accounting(value)
    assert refused.value.field == "event"


def test_trees_are_bounded_in_depth_and_size() -> None:
    deep = gaussian()
    for _ in range(MAX_EVENT_DEPTH - 1):
        deep = tree("SelfComposedDpEvent", event=deep, count=1)
    mechanism_from_json(question(deep))
    with pytest.raises(InvalidMechanism, match="nested deeper"):
        mechanism_from_json(question(tree("SelfComposedDpEvent", event=deep, count=1)))
    for _ in range(10_000):
        deep = tree("ComposedDpEvent", events=[deep])
    with pytest.raises(InvalidMechanism, match="nested deeper"):
        mechanism_from_json(question(deep))

    wide = tree("ComposedDpEvent", events=[gaussian()] * (MAX_EVENTS - 1))
    assert dominating_terms(mechanism_from_json(question(wide))) == (
        (GaussianTerm(1.0, 0.5, MAX_EVENTS - 1),),
    )
    wide["events"] = [gaussian()] * MAX_EVENTS
    with pytest.raises(InvalidMechanism, match="makes more than"):
        mechanism_from_json(question(wide))
    # one object that stands 2^30 times in its tree
    doubled: Any = GAUSSIAN
    for _ in range(30):
        doubled = library.ComposedDpEvent([doubled, doubled])
    with pytest.raises(InvalidMechanism, match="makes more than"):
        from_dp_accounting(doubled)


def test_an_event_made_in_code_is_checked_too() -> None:
    for class_name, fields, field in (
        ("NonPrivateDpEvent", (), "class_name"),
        ("GaussianDpEvent", (), ""),
        ("GaussianDpEvent", (("noise_multiplier", -1.0),), "noise_multiplier"),
        ("NoOpDpEvent", (("count", 1),), ""),
    ):
        with pytest.raises(InvalidMechanism) as refused:
            Event(class_name, fields)
        assert refused.value.field == field


def test_an_event_is_a_question_and_never_a_charge() -> None:
    m = mechanism_from_json(question(gaussian()))
    with pytest.raises(InvalidMechanism) as refused:
        require_chargeable(m)
    assert refused.value.field == "kind"
    with pytest.raises(InvalidMechanism) as refused:
        require_chargeable(
            mechanism_from_json({"kind": "composition", "parts": [{"mechanism": m.to_json()}]})
        )
    assert refused.value.field == "parts[0].mechanism.kind"


# -- from mechanisms to events ---------------------------------------------------------------------

FETA = {
    "kind": "feta_pro",
    "public_size": 55000,
    "spatial": {"rounds": 5, "sampling_probability": 0.1091, "noise_multiplier": 20},
    "frequency": {"noise_multiplier": 26.6},
    "dp_sgd": {"sampling_probability": 0.0714, "noise_multiplier": 14.78, "steps": 2100},
}


@pytest.mark.parametrize(
    "obj",
    [
        {"kind": "gaussian", "noise_multiplier": 3.7, "count": 4},
        {"kind": "laplace", "noise_multiplier": 0.3},
        {"kind": "randomized_response", "epsilon": "0.1000000000000000000001", "count": 3},
        {"kind": "approximate_dp", "epsilon": 0.5},
        FETA,
        {
            "kind": "composition",
            "parts": [{"mechanism": FETA, "count": 2}, {"mechanism": FETA | {"public_size": 9}}],
        },
    ],
)
def test_an_event_costs_what_the_mechanism_costs(obj: Any) -> None:
    """Or a little more: what is rounded on the way is rounded up."""
    m = mechanism_from_json(obj)
    back = from_dp_accounting(to_dp_accounting(m))
    for order in (1.5, 4.0, 32.0):
        ours, theirs = cumulants.renyi_cost(m, order), cumulants.renyi_cost(back, order)
        assert ours * (1 - 1e-13) <= theirs <= ours * (1 + 1e-12)


def test_the_librarys_accountant_agrees_on_a_whole_pipeline() -> None:
    m = mechanism_from_json(FETA)
    orders = [2.0, 4.0, 8.0, 32.0]
    accountant = rdp_privacy_accountant.RdpAccountant(orders)
    accountant.compose(to_dp_accounting(m))
    for order, theirs in zip(orders, accountant._rdp, strict=True):
        assert cumulants.renyi_cost(m, order) == pytest.approx(theirs, rel=1e-6)
    # without its warm-up the same model would look cheaper
    alone = mechanism_from_json(
        {k: v for k, v in FETA.items() if k not in ("spatial", "frequency")}
    )
    assert cumulants.renyi_epsilon(alone, 1e-5) < cumulants.renyi_epsilon(m, 1e-5)


def test_a_pure_dp_part_is_the_randomised_response_pair() -> None:
    m = mechanism_from_json({"kind": "noisy_max", "epsilon": 0.5})
    event = to_dp_accounting(m)
    assert event == library.DiscreteLaplaceDpEvent(0.5, 1)
    accountant = pld_privacy_accountant.PLDAccountant(value_discretization_interval=0.1)
    accountant.compose(event)
    assert accountant.get_delta(0.0) == pytest.approx(math.tanh(0.25), rel=1e-9)


def test_a_mechanism_without_an_event_is_refused() -> None:
    declared = {"kind": "approximate_dp", "epsilon": 0.5, "delta": 1e-6}
    with pytest.raises(InvalidMechanism) as refused:
        to_dp_accounting(mechanism_from_json(declared))
    assert refused.value.field == "delta"
    classes = [
        {"label": 0, "outputs": 50, "sampling_probability": 0.006},
        {"label": 1, "outputs": 40, "sampling_probability": 0.008},
    ]
    block = {
        "kind": "denoising_block",
        "schedule": {"kind": "edm", "sigma_min": 0.002, "sigma_max": 80, "rho": 7, "steps": 39},
        "block_steps": 22,
        "subsample_size": 3,
        "clip_norm": 6.0,
        "classes": classes,
    }
    with pytest.raises(InvalidMechanism) as refused:
        to_dp_accounting(mechanism_from_json(block))
    assert refused.value.field == "classes"
    assert event_of_terms(()) == Event("NoOpDpEvent")
    nothing = mechanism_from_json(question(tree("ComposedDpEvent", events=[])))
    assert event_of_terms(dominating_terms(nothing)[0]) == Event("NoOpDpEvent")
    assert isinstance(nothing, DpEvent)
    assert to_dp_accounting(nothing) == dp_accounting.ComposedDpEvent([])


def test_json_is_read_without_the_library() -> None:
    code = (
        "import sys, accounting, accounting.events;"
        f"m = accounting.mechanism_from_json({question(gaussian())!r});"
        "accounting.mechanism_to_json(m);"
        "bad = {'dp_accounting', 'numpy', 'scipy'} & set(sys.modules);"
        "sys.exit(f'imported: {sorted(bad)}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
