"""Questions to the accountant through HTTP."""

from __future__ import annotations

import math
from typing import Any

import pytest

from accounting import bounds
from accounting.mechanisms import Gaussian
from api.deps import Accountant
from api.problems import ProblemError
from tests.api.world import JSON, World, assert_problem

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


FAULTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("epsilon", {"delta": 0}, "invalid_request", "delta"),
    ("epsilon", {"delta": 1}, "invalid_request", "delta"),
    ("epsilon", {"delta": -1e-5}, "invalid_request", "delta"),
    ("epsilon", {"delta": "1e-5"}, "invalid_request", "delta"),
    ("epsilon", {"delta": None}, "invalid_request", "delta"),
    ("epsilon", {"mechanism": None}, "invalid_request", "mechanism"),
    ("epsilon", {"mechanism": {}}, "invalid_mechanism", "mechanism.kind"),
    ("epsilon", {"mechanism": {"kind": "magic"}}, "invalid_mechanism", "mechanism.kind"),
    (
        "epsilon",
        {"mechanism": {"kind": "gaussian", "noise_multiplier": 0}},
        "invalid_mechanism",
        "mechanism.noise_multiplier",
    ),
    (
        "epsilon",
        {"mechanism": {"kind": "gaussian", "noise_multiplier": -1.0}},
        "invalid_mechanism",
        "mechanism.noise_multiplier",
    ),
    (
        "epsilon",
        {"mechanism": {"kind": "gaussian", "noise_multiplier": 5e-324}},
        "invalid_mechanism",
        "mechanism.noise_multiplier",
    ),
    (
        "epsilon",
        {"mechanism": {**GAUSSIAN, "count": 0}},
        "invalid_mechanism",
        "mechanism.count",
    ),
    (
        "epsilon",
        {
            "mechanism": {
                "kind": "subsampled_gaussian",
                "sampling_probability": 1.5,
                "noise_multiplier": 1.0,
            }
        },
        "invalid_mechanism",
        "mechanism.sampling_probability",
    ),
    (
        "epsilon",
        {"mechanism": {"kind": "composition", "parts": [{"mechanism": {"kind": "gaussian"}}]}},
        "invalid_mechanism",
        "mechanism.parts[0].mechanism.noise_multiplier",
    ),
    ("delta", {"epsilon": -1.0}, "invalid_request", "epsilon"),
    ("delta", {"epsilon": 1e9}, "invalid_request", "epsilon"),
    ("delta", {}, "invalid_request", "epsilon"),
    ("profile", {"epsilons": []}, "invalid_request", "epsilons"),
    ("profile", {"epsilons": [1.0, -1.0]}, "invalid_request", "epsilons[1]"),
    ("profile", {"epsilons": [1.0] * 201}, "invalid_request", "epsilons"),
    ("epsilon", {"delta": 1e-5, "method": "guess"}, "invalid_request", "method"),
]


@pytest.mark.parametrize(("call", "change", "code", "field"), FAULTS, ids=str)
def test_a_wrong_question_is_refused_by_name(
    calm: World, call: str, change: dict[str, Any], code: str, field: str
) -> None:
    body: JSON = {"mechanism": GAUSSIAN} | ({"delta": 1e-5} if call == "epsilon" else {})
    answer = calm.stranger.post(f"{ONE}/{call}", json={**body, **change})
    assert_problem(answer, 422, code, field)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e400"])
def test_a_question_that_is_not_finite_is_refused_by_name(calm: World, text: str) -> None:
    for body, field in (
        (
            f'{{"mechanism": {{"kind": "gaussian", "noise_multiplier": {text}}}, "delta": 1e-5}}',
            "mechanism.noise_multiplier",
        ),
        (
            f'{{"mechanism": {{"kind": "gaussian", "noise_multiplier": 1}}, "delta": {text}}}',
            "delta",
        ),
    ):
        answer = calm.stranger.post(
            f"{ONE}/epsilon", content=body.encode(), headers={"Content-Type": "application/json"}
        )
        assert_problem(answer, 422, "invalid_request", field)


def test_a_full_accountant_says_come_back() -> None:
    accountant = Accountant(1, bounds.DEFAULT, wait_seconds=0.01)
    with accountant._place(), pytest.raises(ProblemError) as caught:
        accountant.epsilon(Gaussian(1.0), 1e-5)
    assert caught.value.code == "accountant_busy"
    crowded = Accountant(1, bounds.DEFAULT, queue=0)
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
