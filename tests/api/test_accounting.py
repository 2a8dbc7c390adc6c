"""Questions to the accountant through HTTP."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import pytest

from accounting import bounds
from accounting.bounds import Limits
from accounting.mechanisms import Gaussian
from api.deps import Accountant
from api.kinds import ProblemError
from tests.api.world import JSON, World, assert_problem, running
from worker.settings import Settings

GAUSSIAN: JSON = {"kind": "gaussian", "noise_multiplier": 1.0, "count": 1}
ONE = "/v1/accounting"


def test_a_gaussian_has_its_closed_form(calm: World) -> None:
    """delta(eps) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2) at mu = 1."""

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    answer = calm.stranger.post(f"{ONE}/delta", json={"mechanism": GAUSSIAN, "epsilon": 1.0})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    exact = phi(-0.5) - math.e * phi(-1.5)
    assert body["lower"] <= exact * (1 + 1e-12)
    assert body["upper"] >= exact * (1 - 1e-12)
    assert body["upper"] == pytest.approx(exact, rel=1e-9)

    answer = calm.stranger.post(f"{ONE}/epsilon", json={"mechanism": GAUSSIAN, "delta": exact})
    assert answer.json()["upper"] == pytest.approx(1.0, rel=1e-9)
    assert answer.json()["neighboring_relation"] == "add_remove_one_unit"

    answer = calm.stranger.post(
        f"{ONE}/profile", json={"mechanism": GAUSSIAN, "epsilons": [0.0, 1.0, 4.0]}
    )
    points = answer.json()["points"]
    assert [point["epsilon"] for point in points] == [0.0, 1.0, 4.0]
    assert points[1]["upper"] == body["upper"]
    assert points[0]["upper"] > points[1]["upper"] > points[2]["upper"]


def test_an_infinite_answer_is_text(calm: World) -> None:
    mechanism = {"kind": "approximate_dp", "epsilon": 1.0, "delta": 0.1}
    answer = calm.stranger.post(f"{ONE}/epsilon", json={"mechanism": mechanism, "delta": 1e-5})
    assert answer.status_code == 200, answer.text
    assert answer.json()["upper"] == "inf"


def test_the_curve_of_a_mechanism_needs_no_points(calm: World) -> None:
    answer = calm.stranger.post(f"{ONE}/profile", json={"mechanism": GAUSSIAN})
    points = answer.json()["points"]
    assert len(points) == 101
    assert points[0]["epsilon"] == 0.0
    assert points[-1]["upper"] == pytest.approx(1e-12, rel=1e-3)


def test_a_gaussian_has_its_trade_off_curve(calm: World) -> None:
    normal = NormalDist()
    answer = calm.stranger.post(
        f"{ONE}/tradeoff", json={"mechanism": GAUSSIAN, "alphas": [0.01, 0.1, 0.5]}
    )
    assert answer.status_code == 200, answer.text
    for point in answer.json()["points"]:
        exact = normal.cdf(normal.inv_cdf(1 - point["alpha"]) - 1.0)
        assert point["lower"] <= exact <= point["upper"]
        assert point["upper"] - point["lower"] < 1e-3
    assert answer.json()["neighboring_relation"] == "add_remove_one_unit"


def test_the_inverse_of_a_gaussian(calm: World) -> None:
    body = {
        "mechanism": {"kind": "gaussian"},
        "free": "noise_multiplier",
        "target": {"epsilon": 1.0, "delta": 1e-6},
    }
    answer = calm.stranger.post(f"{ONE}/calibrate", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["parameter"] == pytest.approx(4.22468, rel=1e-5)
    assert found["mechanism"] == {**GAUSSIAN, "noise_multiplier": found["parameter"]}
    # What it says of that mechanism is what the direct question says.
    direct = calm.stranger.post(
        f"{ONE}/epsilon", json={"mechanism": found["mechanism"], "delta": 1e-6}
    ).json()
    assert direct["upper"] == pytest.approx(found["bracket"]["upper"], rel=1e-6)
    assert found["bracket"]["upper"] <= 1.0

    body |= {"mechanism": {**GAUSSIAN, "noise_multiplier": 20.0}, "free": "count"}
    found = calm.stranger.post(f"{ONE}/calibrate", json=body).json()
    assert (found["parameter"], type(found["parameter"])) == (22, int)
    body |= {"free": "delta", "target": {"epsilon": 1.0}}
    found = calm.stranger.post(f"{ONE}/calibrate", json=body).json()
    assert found["bracket"]["epsilon"] == 1.0
    assert found["parameter"] == found["bracket"]["upper"]


def test_stages_share_a_target(calm: World) -> None:
    stages = [{"mechanism": {"kind": "gaussian", "count": n}, "weight": n} for n in (1, 3)]
    answer = calm.stranger.post(
        f"{ONE}/allocate", json={"stages": stages, "target": {"epsilon": 1.0, "delta": 1e-6}}
    )
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [row["share"] for row in found["shares"]] == pytest.approx([0.25, 0.75])
    noise = [stage["mechanism"]["noise_multiplier"] for stage in found["stages"]]
    # Shares by count are the same noise for all.
    assert noise == pytest.approx([2 * 4.22468] * 2, rel=1e-5)
    assert [part["mechanism"] for part in found["mechanism"]["parts"]] == [
        stage["mechanism"] for stage in found["stages"]
    ]


def test_methods_are_compared(calm: World) -> None:
    answer = calm.stranger.post(f"{ONE}/compare", json={"mechanism": GAUSSIAN, "delta": 1e-5})
    assert answer.status_code == 200, answer.text
    rows = {row["method"]: row for row in answer.json()["methods"]}
    exact = rows["gaussian_exact"]
    assert rows["epsilond"]["upper"] == pytest.approx(exact["upper"], rel=1e-3)
    for row in rows.values():
        assert row["valid"] or row["reason"]
        if row["valid"] and row["upper"] is not None:
            assert row["upper"] >= exact["lower"] * (1 - 1e-9)


# --------------------------------------------------------------------------------------------------
# Wrong questions: every call with every kind of bad value
# --------------------------------------------------------------------------------------------------

TARGET: JSON = {"epsilon": 1.0, "delta": 1e-5}
# Each call's body around a mechanism, and where the mechanism stands in it.
CALLS: dict[str, tuple[Callable[[object], JSON], str]] = {
    "epsilon": (lambda m: {"mechanism": m, "delta": 1e-5}, "mechanism"),
    "delta": (lambda m: {"mechanism": m, "epsilon": 1.0}, "mechanism"),
    "profile": (lambda m: {"mechanism": m}, "mechanism"),
    "tradeoff": (lambda m: {"mechanism": m}, "mechanism"),
    "compare": (lambda m: {"mechanism": m, "delta": 1e-5}, "mechanism"),
    "calibrate": (lambda m: {"mechanism": m, "free": "count", "target": TARGET}, "mechanism"),
    "allocate": (
        lambda m: {"stages": [{"mechanism": m, "weight": 1.0}], "target": TARGET},
        "stages[0].mechanism",
    ),
}
SAMPLED: JSON = {
    "kind": "subsampled_gaussian",
    "sampling_probability": 0.5,
    "noise_multiplier": 1.0,
}


def parts(count: int) -> JSON:
    many = [{"mechanism": {**GAUSSIAN, "noise_multiplier": 50.0 + i}} for i in range(count)]
    return {"kind": "composition", "parts": many}


BAD_MECHANISMS: list[tuple[object, str, str]] = [
    (None, "invalid_request", ""),
    ([], "invalid_request", ""),
    ({}, "invalid_mechanism", "kind"),
    ({"kind": "magic"}, "invalid_mechanism", "kind"),
    ({"kind": ["gaussian"]}, "invalid_mechanism", "kind"),
    ({**GAUSSIAN, "noise_multiplier": 0}, "invalid_mechanism", "noise_multiplier"),
    ({**GAUSSIAN, "noise_multiplier": -1.0}, "invalid_mechanism", "noise_multiplier"),
    ({**GAUSSIAN, "noise_multiplier": 5e-324}, "invalid_mechanism", "noise_multiplier"),
    ({**GAUSSIAN, "noise_multiplier": 1e-300}, "invalid_mechanism", "noise_multiplier"),
    ({**GAUSSIAN, "noise_multiplier": 1e300}, "invalid_mechanism", "noise_multiplier"),
    ({**GAUSSIAN, "noise_multiplier": "1"}, "invalid_mechanism", "noise_multiplier"),
    ({**GAUSSIAN, "noise_multiplier": True}, "invalid_mechanism", "noise_multiplier"),
    ({**GAUSSIAN, "count": 0}, "invalid_mechanism", "count"),
    ({**GAUSSIAN, "count": 1.5}, "invalid_mechanism", "count"),
    ({**GAUSSIAN, "count": 10**9 + 1}, "invalid_mechanism", "count"),
    ({**GAUSSIAN, "count": 2**64}, "invalid_request", "count"),
    ({**GAUSSIAN, "sigma": 1.0}, "invalid_mechanism", "sigma"),
    ({**SAMPLED, "sampling_probability": 1.5}, "invalid_mechanism", "sampling_probability"),
    ({**SAMPLED, "sampling_probability": 0}, "invalid_mechanism", "sampling_probability"),
    ({**SAMPLED, "sampling_probability": 1e-320}, "invalid_mechanism", "sampling_probability"),
    ({**SAMPLED, "sampling": "none"}, "invalid_mechanism", "sampling"),
    ({"kind": "approximate_dp", "epsilon": -1}, "invalid_mechanism", "epsilon"),
    ({"kind": "approximate_dp", "epsilon": 1, "delta": 1}, "invalid_mechanism", "delta"),
    ({"kind": "composition", "parts": []}, "invalid_mechanism", "parts"),
    (parts(1001), "invalid_mechanism", "parts"),
    (
        {"kind": "composition", "parts": [{"mechanism": {"kind": "gaussian", "count": -1}}]},
        "invalid_mechanism",
        "parts[0].mechanism.noise_multiplier",
    ),
    (
        {"kind": "composition", "parts": [{"mechanism": GAUSSIAN, "count": 10**10}]},
        "invalid_mechanism",
        "parts[0].count",
    ),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("mechanism", "code", "field"), BAD_MECHANISMS, ids=lambda x: str(x)[:60])
def test_a_wrong_mechanism_is_refused_by_name(
    calm: World, call: str, mechanism: object, code: str, field: str
) -> None:
    body, where = CALLS[call]
    answer = calm.stranger.post(f"{ONE}/{call}", json=body(mechanism))
    assert_problem(answer, 422, code, f"{where}.{field}" if field else where)


BAD_DELTAS: list[object] = [0, 0.0, 1, 1.5, -1e-5, "1e-5", None, True, []]
BAD_TARGETS: list[tuple[str, object]] = [
    *(("epsilon", value) for value in (0, -1.0, 5e-324, 1e9, "1", None)),
    *(("delta", value) for value in (0, 1, -1e-5, 5e-324, "1e-5", None)),
]
FAULTS: list[tuple[str, JSON, str]] = [
    *((call, {"delta": bad}, "delta") for call in ("epsilon", "compare") for bad in BAD_DELTAS),
    *(("epsilon", {"tolerance": value}, "tolerance") for value in (0, -1.0, 5e-324, 1e9, "1")),
    *(("delta", {"epsilon": value}, "epsilon") for value in (-1.0, -5e-324, 1e9, "1", None)),
    ("profile", {"epsilons": []}, "epsilons"),
    ("profile", {"epsilons": [1.0, -1.0]}, "epsilons[1]"),
    ("profile", {"epsilons": [1.0] * 201}, "epsilons"),
    ("tradeoff", {"alphas": []}, "alphas"),
    ("tradeoff", {"alphas": [0.5, 1.0000001]}, "alphas[1]"),
    ("tradeoff", {"alphas": [-1e-300]}, "alphas[0]"),
    ("tradeoff", {"alphas": [0.5] * 1001}, "alphas"),
    *(
        (call, {"target": {**TARGET, name: bad}}, f"target.{name}")
        for call in ("calibrate", "allocate")
        for name, bad in BAD_TARGETS
    ),
    *((call, {"target": None}, "target") for call in ("calibrate", "allocate")),
    *((call, {"method": "guess"}, "method") for call in ("calibrate", "allocate")),
    *((call, {"what": 1}, "what") for call in CALLS),
    *(("calibrate", {"free": value}, "free") for value in ("", "kind", "x" * 201, "a[9].b", 1)),
    ("calibrate", {"free": "delta"}, "target.delta"),
    ("calibrate", {"target": {"epsilon": 1e-3, "delta": 1e-5}}, "free"),
    ("calibrate", {"mechanism": {**GAUSSIAN, "noise_multiplier": 1e9}}, "target"),
    ("allocate", {"stages": []}, "stages"),
    ("allocate", {"stages": [{"mechanism": GAUSSIAN, "weight": 1.0}] * 33}, "stages"),
    *(
        ("allocate", {"stages": [{"mechanism": GAUSSIAN, "weight": value}]}, "stages[0].weight")
        for value in (0, -1.0, 5e-324, 1e300, None)
    ),
    (
        "allocate",
        {"stages": [{"mechanism": parts(2), "weight": 1.0}]},
        "stages[0].mechanism",
    ),
]


@pytest.mark.parametrize(("call", "change", "field"), FAULTS, ids=lambda x: str(x)[:60])
def test_a_wrong_question_is_refused_by_name(
    calm: World, call: str, change: JSON, field: str
) -> None:
    body, _ = CALLS[call]
    answer = calm.stranger.post(f"{ONE}/{call}", json={**body(GAUSSIAN), **change})
    assert_problem(answer, 422, "invalid_request", field)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_a_question_that_is_not_finite_is_refused_by_name(
    calm: World, call: str, text: str
) -> None:
    body, where = CALLS[call]
    raw = json.dumps(body({**GAUSSIAN, "noise_multiplier": "HERE"})).replace('"HERE"', text)
    answer = calm.stranger.post(
        f"{ONE}/{call}", content=raw.encode(), headers={"Content-Type": "application/json"}
    )
    assert_problem(answer, 422, "invalid_request", f"{where}.noise_multiplier")
    for name in ("delta", "epsilon", "tolerance", "epsilons", "alphas", "target"):
        raw = json.dumps({**body(GAUSSIAN), name: "HERE"}).replace('"HERE"', text)
        answer = calm.stranger.post(
            f"{ONE}/{call}", content=raw.encode(), headers={"Content-Type": "application/json"}
        )
        assert_problem(answer, 422, "invalid_request", name)


EXTREMES: list[JSON] = [
    {**GAUSSIAN, "noise_multiplier": 1e-100},
    {**GAUSSIAN, "noise_multiplier": 1e100},
    {**GAUSSIAN, "noise_multiplier": 1e-100, "count": 10**9},
    {**GAUSSIAN, "count": 10**9},
    {**SAMPLED, "sampling_probability": 1.0},
    {**SAMPLED, "sampling_probability": 1 + 1e-16},  # which is 1 as a double
    {**SAMPLED, "sampling_probability": 1 - 2**-53},
    {**SAMPLED, "sampling_probability": 1e-100},
    {**SAMPLED, "noise_multiplier": 1e-100},
    {**SAMPLED, "noise_multiplier": 1e100},
    {**SAMPLED, "noise_multiplier": 1e-3, "count": 10**9},
    {**SAMPLED, "sampling_probability": 1e-9, "count": 10**9},
    {"kind": "approximate_dp", "epsilon": 1e6, "delta": 0.99},
    {"kind": "approximate_dp", "epsilon": 1e-100, "count": 10**9},
    {"kind": "laplace", "noise_multiplier": 1e-100, "count": 10**9},
    {"kind": "laplace", "noise_multiplier": 1e100},
    {"kind": "randomized_response", "epsilon": 1e6, "count": 10**9},
    parts(1000),
]


@pytest.mark.parametrize("call", [call for call in CALLS if call != "compare"])
@pytest.mark.parametrize("mechanism", EXTREMES, ids=lambda x: str(x)[:90])
def test_an_extreme_mechanism_is_answered_in_time(calm: World, call: str, mechanism: JSON) -> None:
    body, _ = CALLS[call]
    begin = time.monotonic()
    answer = calm.stranger.post(f"{ONE}/{call}", json=body(mechanism))
    took = time.monotonic() - begin
    assert answer.status_code in (200, 422), answer.text
    assert "NaN" not in answer.text
    if answer.status_code == 422:
        # An inverse may have no answer; a direct question always has a bracket.
        assert call in ("calibrate", "allocate"), answer.text
        assert answer.json()["code"] in ("invalid_request", "bound_not_available")
    elif call in ("epsilon", "delta"):
        lower, upper = (float(answer.json()[end]) for end in ("lower", "upper"))
        assert 0.0 <= lower <= upper
    # The service's own limit, and room for a busy machine.
    assert took < calm.settings.question_seconds + 4.0


@pytest.mark.parametrize(
    "change",
    [
        {"delta": 1e-299},
        {"delta": 1e-300},
        {"delta": 1 - 2**-53},
        {"delta": 1e-5, "tolerance": 1e-9},
    ],
)
@pytest.mark.parametrize("mechanism", [GAUSSIAN, SAMPLED], ids=["gaussian", "sampled"])
def test_an_extreme_delta_is_answered(calm: World, mechanism: JSON, change: JSON) -> None:
    answer = calm.stranger.post(f"{ONE}/epsilon", json={"mechanism": mechanism, **change})
    assert answer.status_code == 200, answer.text
    lower, upper = (float(answer.json()[end]) for end in ("lower", "upper"))
    assert 0.0 <= lower <= upper


def test_a_question_that_takes_too_long_says_so(settings: Settings) -> None:
    brief = settings.model_copy(update={"question_seconds": 0.01})
    many = [{"mechanism": {**SAMPLED, "noise_multiplier": 1.0 + i / 1000}} for i in range(300)]
    body = {
        "mechanism": {"kind": "composition", "parts": many},
        "free": "parts[0].mechanism.noise_multiplier",
        "target": TARGET,
        "method": "rdp",
    }
    with running(brief) as world:
        answer = world.stranger.post(f"{ONE}/calibrate", json=body)
    assert_problem(answer, 422, "bound_not_available")
    assert "0.01 s" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "body", "field", "said"),
    [
        ("calibrate", {"target": {"epsilon": 1.0, "delta": 1e-101}}, "target.delta", "1e-100"),
        ("calibrate", {"target": {"epsilon": 1e-200, "delta": 0.1}}, "target.epsilon", "1e-100"),
        ("epsilon", {"delta": 1.0}, "delta", "less than 1"),
        ("epsilon", {"delta": 1e-5, "tolerance": 1e-10}, "tolerance", "1e-09"),
        ("delta", {"epsilon": 1e7}, "epsilon", "1000000"),
    ],
)
def test_a_limit_is_written_as_people_write_it(
    calm: World, path: str, body: dict[str, Any], field: str, said: str
) -> None:
    mechanism = {"kind": "gaussian", "noise_multiplier": 1.0}
    free = {"free": "noise_multiplier"} if path == "calibrate" else {}
    answer = calm.stranger.post(f"{ONE}/{path}", json={"mechanism": mechanism, **free, **body})
    assert_problem(answer, 422, "invalid_request")
    assert answer.json()["field"] == field
    assert answer.json()["detail"].endswith(said)


@pytest.mark.parametrize("body", ["[]", "null", "1"])
def test_a_body_that_is_no_object_has_no_field(calm: World, body: str) -> None:
    answer = calm.stranger.post(
        f"{ONE}/epsilon", content=body, headers={"Content-Type": "application/json"}
    )
    assert_problem(answer, 422, "invalid_request")
    assert answer.json()["field"] == ""


def test_a_question_has_its_own_time() -> None:
    asked: list[Limits] = []
    limits, question = Limits(seconds=60), Limits(seconds=2)
    Accountant(1, limits, question_limits=question).ask(asked.append)
    Accountant(1, limits).ask(asked.append)
    assert asked == [question, limits]


def test_a_full_accountant_says_come_back() -> None:
    accountant = Accountant(1, bounds.DEFAULT, wait_seconds=0.01)
    with accountant._place(), pytest.raises(ProblemError) as caught:
        accountant.epsilon(Gaussian(1.0), 1e-5)
    assert caught.value.code == "accountant_busy"
    crowded = Accountant(1, bounds.DEFAULT, queue=0)  # which waits for nobody
    with crowded._place(), pytest.raises(ProblemError) as caught:
        crowded.epsilon(Gaussian(1.0), 1e-5)
    assert caught.value.code == "accountant_busy"
    assert accountant.epsilon(Gaussian(1.0), 1e-5).upper > 0


def test_the_catalogue_shows_public_facts_and_no_paths(calm: World) -> None:
    (model,) = calm.stranger.get("/v1/models").json()["models"]
    assert (model["name"], model["sha256"], model["licence"]) == (
        "public-8",
        "a" * 64,
        "Apache-2.0",
    )
    assert str(calm.settings.public_models) not in str(model)
