"""A certificate says what ran, who signed it, and a bound that anyone can compute again."""

from __future__ import annotations

import copy
import json
import math
from decimal import Decimal
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from accounting import bounds, certificates
from accounting.bounds import Limits
from accounting.errors import UndecidableBound
from accounting.mechanisms import (
    ApproximateDP,
    Composition,
    Gaussian,
    Mechanism,
    Part,
    SubsampledGaussian,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEY_ID = certificates.key_id(KEY.public_key())
KEYS = {KEY_ID: KEY.public_key()}
MECHANISM = Gaussian(4.0, 2)
DELTA = 1e-5


def certificate(mechanism: Mechanism = MECHANISM, **other: Any) -> dict[str, Any]:
    made = certificates.build(
        service_version="0.1.0",
        signing_key_id=KEY_ID,
        dataset_id="ds_1",
        snapshot_id="snap_1",
        snapshot_hmac="ab" * 32,
        mechanism=mechanism,
        post_processing={"public_model": "glyphs-28", "refine_steps": 20},
        epsilon=bounds.epsilon(mechanism, DELTA).to_json(),
        artefact_sha256="cd" * 32,
        artefact_bytes=12345,
        ledger_sequence=3,
        ledger_hash="ef" * 32,
        issued_at=1_800_000_000_250_000,
    )
    made["epsilon"].update(other)
    return certificates.sign(made, KEY)


def test_the_form_is_the_published_one() -> None:
    made = certificate()
    assert list(made) == [
        "version",
        "service",
        "dataset",
        "snapshot",
        "neighboring_relation",
        "mechanism",
        "post_processing",
        "epsilon",
        "artefact",
        "ledger",
        "assumptions",
        "issued_at",
        "signature",
    ]
    assert made["version"] == 1
    assert made["service"] == {"name": "epsilond", "version": "0.1.0", "key_id": KEY_ID}
    assert made["snapshot"] == {"id": "snap_1", "hmac": "ab" * 32}
    assert made["neighboring_relation"] == "add_remove_one_unit"
    assert made["mechanism"] == MECHANISM.to_json()
    assert {"lower", "upper", "delta", "direction", "method"} <= set(made["epsilon"])
    assert made["artefact"] == {"sha256": "cd" * 32, "bytes": 12345}
    assert made["ledger"] == {"sequence": 3, "hash": "ef" * 32}
    assert made["issued_at"] == "2027-01-15T08:00:00.250000Z"
    assert "=" not in made["signature"]


def test_a_certificate_holds_after_a_journey_through_json() -> None:
    text = json.dumps(certificate(), indent=2, sort_keys=True)
    check = certificates.verify(json.loads(text), KEYS, recompute=True)
    assert check.ok
    assert check.signature_ok
    assert check.mechanism_ok
    assert check.bound_ok
    assert check.bracket_same
    assert check.problems == ()
    assert json.loads(json.dumps(check.to_json()))["ok"] is True


def test_without_recomputing_the_bound_is_left_open() -> None:
    check = certificates.verify(certificate(), KEYS, recompute=False)
    assert check.ok
    assert check.bound_ok is None
    assert check.recomputed is None


@pytest.mark.parametrize(
    "path",
    [
        ("dataset",),
        ("snapshot", "hmac"),
        ("mechanism", "count"),
        ("post_processing", "refine_steps"),
        ("epsilon", "upper"),
        ("artefact", "sha256"),
        ("ledger", "sequence"),
        ("assumptions", 0),
        ("issued_at",),
        ("service", "version"),
    ],
)
def test_any_change_breaks_the_signature(path: tuple[Any, ...]) -> None:
    changed = copy.deepcopy(certificate())
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    old = inner[path[-1]]
    inner[path[-1]] = old + 1 if isinstance(old, int | float) else old + "0"
    check = certificates.verify(changed, KEYS, recompute=False)
    assert not check.signature_ok
    assert not check.ok


def test_an_added_field_breaks_the_signature() -> None:
    changed = {**certificate(), "note": "and this"}
    assert not certificates.verify(changed, KEYS, recompute=False).signature_ok


def test_another_key_is_not_ours() -> None:
    assert not certificates.verify(certificate(), {}, recompute=False).signature_ok
    other = Ed25519PrivateKey.generate().public_key()
    assert not certificates.verify(certificate(), {KEY_ID: other}, recompute=False).signature_ok


def test_an_old_key_still_verifies_beside_a_new_one() -> None:
    new = Ed25519PrivateKey.generate().public_key()
    keys = {certificates.key_id(new): new, **KEYS}
    assert certificates.verify(certificate(), keys, recompute=False).ok


def test_signing_with_a_key_that_the_certificate_does_not_name_is_refused() -> None:
    unsigned = certificate()
    del unsigned["signature"]
    with pytest.raises(ValueError, match="another key"):
        certificates.sign(unsigned, Ed25519PrivateKey.generate())
    with pytest.raises(ValueError, match="signed already"):
        certificates.sign(certificate(), KEY)


def test_a_bound_that_is_too_small_is_false_even_if_well_signed() -> None:
    true = bounds.epsilon(MECHANISM, DELTA)
    check = certificates.verify(
        certificate(lower=true.lower / 2, upper=true.lower * 0.999), KEYS, recompute=True
    )
    assert check.signature_ok
    assert check.bound_ok is False
    assert not check.ok
    assert check.recomputed == true


def test_a_lower_end_above_the_truth_is_false_too() -> None:
    true = bounds.epsilon(MECHANISM, DELTA)
    check = certificates.verify(
        certificate(lower=true.upper * 1.01, upper=true.upper * 2), KEYS, recompute=True
    )
    assert check.bound_ok is False


def test_a_wider_bracket_is_true_but_not_the_same() -> None:
    true = bounds.epsilon(MECHANISM, DELTA)
    check = certificates.verify(
        certificate(lower=true.lower / 2, upper=true.upper * 2), KEYS, recompute=True
    )
    assert check.ok
    assert check.bound_ok
    assert check.bracket_same is False


def test_an_infinite_bracket_is_written_as_text() -> None:
    made = certificate(ApproximateDP(Decimal("0.5"), Decimal("1e-3")))
    assert made["epsilon"]["upper"] == "inf"
    check = certificates.verify(made, KEYS, recompute=True)
    assert check.ok
    assert check.recomputed is not None
    assert check.recomputed.upper == math.inf


SAMPLED = SubsampledGaussian(0.01, 1.0, 500)


@pytest.mark.parametrize("mechanism", [MECHANISM, SAMPLED], ids=["closed form", "contour"])
def test_a_rigorous_check_proves_the_upper_end(mechanism: Mechanism) -> None:
    made = certificate(mechanism)
    check = certificates.verify(made, KEYS, recompute=False, rigorous=True)
    assert check.ok
    assert check.rigorous == certificates.RigorousCheck("confirmed")
    assert check.to_json()["rigorous"] == {"result": "confirmed", "reason": ""}
    assert "rigorous" not in certificates.verify(made, KEYS, recompute=False).to_json()


def test_a_rigorous_check_refutes_an_upper_end_that_is_too_small() -> None:
    true = bounds.epsilon(SAMPLED, DELTA)
    made = certificate(SAMPLED, lower=0.0, upper=0.9 * true.lower)
    check = certificates.verify(made, KEYS, recompute=False, rigorous=True)
    assert check.rigorous is not None
    assert check.rigorous.result == "refuted"
    assert check.problems == (
        f"The stated upper end {0.9 * true.lower:g} is proven to be too small.",
    )


def test_a_rigorous_check_that_has_no_time_says_so() -> None:
    made = certificate(SAMPLED)
    limits = Limits(seconds=1e-6)
    check = certificates.verify(made, KEYS, recompute=False, rigorous=True, limits=limits)
    assert check.rigorous is not None
    assert check.rigorous.result == "undecided"
    assert "would take about" in check.rigorous.reason
    assert not check.ok


def test_a_rigorous_check_of_an_infinite_or_absent_end() -> None:
    made = certificate(ApproximateDP(Decimal("0.5"), Decimal("1e-3")))
    check = certificates.verify(made, KEYS, recompute=False, rigorous=True)
    assert check.rigorous == certificates.RigorousCheck("confirmed")
    check = certificates.verify({}, KEYS, recompute=False, rigorous=True)
    assert check.rigorous is None
    assert not check.ok


@pytest.mark.parametrize(
    "epsilon",
    [
        None,
        {},
        [],
        {"lower": 0.1, "upper": 0.2},
        {"lower": 0.3, "upper": 0.2, "delta": 1e-5},
        {"lower": -1, "upper": 0.2, "delta": 1e-5},
        {"lower": 0.1, "upper": 0.2, "delta": 0},
        {"lower": 0.1, "upper": 0.2, "delta": 10**400},
        {"lower": True, "upper": "large", "delta": 1e-5},
        {"lower": 0.1, "upper": float("nan"), "delta": 1e-5},
    ],
)
def test_nonsense_in_place_of_a_bracket_is_reported(epsilon: object) -> None:
    check = certificates.verify({**certificate(), "epsilon": epsilon}, KEYS, recompute=True)
    assert check.bound_ok is False
    assert not check.ok


@pytest.mark.parametrize(
    "change",
    [
        {"mechanism": None},
        {"mechanism": {"kind": "magic"}},
        {"mechanism": {"kind": "gaussian", "noise_multiplier": -1}},
        {"mechanism": {"kind": "dp_sgd", "sampling_probability": 0.1, "noise_multiplier": 1,
                       "steps": 5}},
        {"neighboring_relation": "replace_one_unit"},
        {"version": 2},
    ],
)  # fmt: skip
def test_a_mechanism_that_nothing_ran_is_reported(change: dict[str, object]) -> None:
    check = certificates.verify({**certificate(), **change}, KEYS, recompute=True)
    assert not check.mechanism_ok
    assert not check.ok
    assert check.recomputed is None


@pytest.mark.parametrize(
    "change",
    [
        {"signature": None},
        {"signature": "!!"},
        {"signature": "é"},
        {"signature": ""},
        {"service": None},
        {"service": {"key_id": []}},
        {"dataset": float("inf")},
        {"dataset": "\ud800"},
    ],
)
def test_a_malformed_signature_is_reported(change: dict[str, object]) -> None:
    check = certificates.verify({**certificate(), **change}, KEYS, recompute=False)
    assert not check.signature_ok
    assert check.mechanism_ok
    assert not check.ok


def test_an_accountant_that_gives_up_leaves_the_bound_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = certificate()

    def give_up(*_args: object, **_kwargs: object) -> bounds.Bracket:
        raise UndecidableBound("out of time")

    monkeypatch.setattr(bounds, "epsilon", give_up)
    check = certificates.verify(made, KEYS, recompute=True)
    assert check.signature_ok
    assert check.bound_ok is None
    assert not check.ok


def test_assumptions_name_the_sizes_where_sampling_is_fixed_size() -> None:
    poisson = SubsampledGaussian(0.01, 4.0, 3)
    fixed = SubsampledGaussian(0.01, 4.0, 3, sampling="fixed_size")
    whole = Composition((Part(poisson), Part(fixed)))

    def assumptions(mechanism: Mechanism) -> str:
        made = certificates.build(
            service_version="0",
            signing_key_id=KEY_ID,
            dataset_id="d",
            snapshot_id="s",
            snapshot_hmac="h",
            mechanism=mechanism,
            post_processing={},
            epsilon={},
            artefact_sha256="",
            artefact_bytes=0,
            ledger_sequence=1,
            ledger_hash="",
            issued_at=0,
        )
        return " ".join(made["assumptions"])

    for mechanism in (poisson, fixed, whole):
        text = assumptions(mechanism)
        for named in ("disjoint", "owner", "keystream", "floating-point"):
            assert named in text
        assert ("fixed size" in text) == (mechanism is not poisson)


def test_an_upper_end_inside_the_recomputed_bracket_is_not_confirmed() -> None:
    """Nothing refutes it where the lower end is loose, but nothing proves it either."""
    many = SubsampledGaussian(0.0005, 1.44, 50_000)
    true = bounds.confirming_epsilon(many, DELTA)
    middle = (true.lower + true.upper) / 2
    assert true.lower < middle < true.upper
    check = certificates.verify(
        certificate(mechanism=many, lower=0.0, upper=middle), KEYS, recompute=True
    )
    assert check.signature_ok
    assert check.bound_ok is None
    assert not check.ok
    assert "not confirmed" in check.problems[0]
