"""Every error is a problem: RFC 9457, a known code, a page behind it, and nothing leaked."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import httpx
import pytest

from accounting import errors
from accounting.errors import EpsilondError, LedgerUnavailable
from accounting.tables import Database
from api import kinds, problems
from tests.api.world import BUDGET, FACTS, World, assert_problem

ROOT = Path(__file__).parent.parent.parent


def test_an_unknown_address_is_404(calm: World) -> None:
    for path in ("/v1", "/v1/datasets/", "/v2/datasets", "/v1/%00", "/static/x"):
        assert_problem(calm.owner.get(path), 404, "not_found")


def test_a_wrong_method_is_405(calm: World) -> None:
    answer = calm.owner.delete("/v1/datasets")
    assert_problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"]


def test_a_body_of_another_type_is_415(calm: World) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = calm.owner.post("/v1/datasets", content=b"{}", headers={"Content-Type": kind})
        assert_problem(answer, 415, "unsupported_media_type")


def test_a_body_too_large_is_413(calm: World) -> None:
    big = b'{"name": "' + b"x" * 3_000_000 + b'"}'
    answer = calm.owner.post(
        "/v1/datasets", content=big, headers={"Content-Type": "application/json"}
    )
    body = assert_problem(answer, 413, "too_large")
    assert body["limit_bytes"] == 2 * 1024 * 1024

    def chunks() -> object:
        for _ in range(48):
            yield b"x" * 65536

    answer = calm.owner.post(
        "/v1/datasets",
        content=chunks(),  # type: ignore[arg-type]  # a generator of bytes, sent in chunks
        headers={"Content-Type": "application/json"},
    )
    assert_problem(answer, 413, "too_large")


def test_a_validation_error_names_the_field_and_repeats_no_value(calm: World) -> None:
    canary = "canary-4711"
    bad = {**FACTS, "public_size": canary, "shape": [canary, 8, 1], canary: canary}
    body = assert_problem(calm.owner.post("/v1/datasets", json=bad), 422, "invalid_request")
    assert {error["field"] for error in body["errors"]} == {"public_size", "shape[0]", canary}
    # Only a field's name may come back, never what stood in it.
    assert canary not in str([error["detail"] for error in body["errors"]])


def test_an_unforeseen_error_is_500_without_its_text(
    calm: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> object:
        raise ZeroDivisionError("canary-4711")

    monkeypatch.setattr("api.routes.datasets.owned_dataset", broken)
    with caplog.at_level(logging.INFO):
        answer = calm.owner.put(f"/v1/datasets/ds_{'0' * 32}/budget", json=BUDGET)
    assert_problem(answer, 500, "internal_error")
    assert "canary" not in answer.text
    assert "ZeroDivisionError" in caplog.text
    assert "canary" not in caplog.text


def test_an_internal_error_of_ours_is_500_without_its_text(
    calm: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Custody(EpsilondError):
        code = "custody_error"

    def broken(*_: object, **__: object) -> object:
        raise Custody("canary-4711")

    monkeypatch.setattr("api.routes.datasets.owned_dataset", broken)
    answer = calm.owner.put(f"/v1/datasets/ds_{'0' * 32}/budget", json=BUDGET)
    assert_problem(answer, 500, "internal_error")
    assert "canary" not in answer.text


def test_a_database_that_does_not_answer_is_503_and_grants_nothing(
    calm: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Database) -> object:
        raise LedgerUnavailable("the ledger's database did not answer in time")

    monkeypatch.setattr(Database, "read", broken)
    answer = calm.owner.get("/v1/datasets")
    assert_problem(answer, 503, "ledger_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    answer = calm.nobody.get("/readyz")
    body = assert_problem(answer, 503, "not_ready")
    assert body["checks"] == {"database": False, "migration": False, "broker": True, "keys": True}
    assert calm.nobody.get("/livez").status_code == 200


def test_every_type_resolves(calm: World) -> None:
    for kind in kinds.KINDS:
        answer = calm.nobody.get(kinds.problem_type(kind.code))
        assert answer.status_code == 200
        assert kind.title in answer.text
        assert kind.slug in calm.nobody.get("/problems").text
    assert_problem(calm.nobody.get("/problems/nothing"), 404)


def test_the_page_of_problems_is_the_table() -> None:
    assert (ROOT / "docs" / "problems.md").read_text() == problems.page()


def test_every_code_that_a_client_can_see_has_a_page() -> None:
    """The codes in the sources: those of error classes below 500, and those of conflicts."""
    codes = {
        value.code
        for value in vars(errors).values()
        if isinstance(value, type)
        and issubclass(value, EpsilondError)
        and value is not errors.Conflict
    }
    for source in [*ROOT.glob("accounting/*.py"), *ROOT.glob("api/**/*.py")]:
        codes |= set(re.findall(r'(?:Conflict|ProblemError)\(\s*"(\w+)"', source.read_text()))
    assert "budget_not_raised" in codes
    assert codes <= set(kinds.BY_CODE)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"\xff\xfe{}", 400, None),
        (b'{"public_size": 1' + b"0" * 5000 + b"}", 400, None),
        (b"[" * 100_000, 400, None),
        (b'{"a":' * 100 + b"1" + b"}" * 100, 400, None),
        (b'{"public_size": NaN}', 422, "public_size"),
        (b'{"shape": [1, Infinity, 1]}', 422, "shape[1]"),
        (b'{"shape": [1, -Infinity, 1]}', 422, "shape[1]"),
        (b'{"public_size": 1e999}', 422, "public_size"),
        (b'{"public_size": 9223372036854775808}', 422, "public_size"),
        (b'{"name": "a\\u0000b"}', 422, "name"),
        (b'{"name": "\\ud800"}', 422, "name"),
        (b"null", 422, ""),
        (b"[]", 422, ""),
        (b'"text"', 422, ""),
    ],
)
def test_json_is_parsed_strictly(calm: World, body: bytes, status: int, field: str | None) -> None:
    answer: httpx.Response = calm.owner.post(
        "/v1/datasets", content=body, headers={"Content-Type": "application/json"}
    )
    found = assert_problem(answer, status)
    if field is not None:
        assert found["field"] == field
