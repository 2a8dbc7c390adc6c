"""Released batches, certificates and the books through HTTP."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile

import numpy as np
import pytest
import sqlalchemy as sa
from PIL import Image

from accounting.canonical import canonical_json
from accounting.tables import ChainRow, ChargeRow
from tests.api.world import JSON, World, assert_problem, release_of


@pytest.fixture
def released(each_world: World) -> tuple[World, str, str, str]:
    """A world with one released job: dataset, job and release."""
    dataset = each_world.dataset()
    job = each_world.order(dataset, "k").json()["id"]
    return each_world, dataset, job, release_of(each_world, job)


def test_a_release_is_downloaded_with_its_certificate(
    released: tuple[World, str, str, str],
) -> None:
    world, dataset, job, release = released
    assert world.requester.get(f"/v1/jobs/{job}").json()["release"] == release
    body = world.requester.get(f"/v1/releases/{release}").json()
    assert (body["dataset"], body["job"]) == (dataset, job)

    content = world.requester.get(body["content"]["npz"])
    assert content.status_code == 200
    assert hashlib.sha256(content.content).hexdigest() == body["sha256"]
    assert len(content.content) == body["bytes"]
    with np.load(io.BytesIO(content.content), allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    etag = content.headers["etag"]
    again = world.requester.get(body["content"]["npz"], headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")

    certificate = world.requester.get(body["certificate"]).json()
    assert certificate["artefact"] == {"sha256": body["sha256"], "bytes": body["bytes"]}

    pictures = world.requester.get(body["content"]["zip"])
    with zipfile.ZipFile(io.BytesIO(pictures.content)) as archive:
        assert archive.testzip() is None
        assert json.loads(archive.read("certificate.json")) == certificate
        rows = archive.read("labels.csv").decode().splitlines()
        assert rows[0] == "file,label"
        for i, row in enumerate(rows[1:]):
            path, label = row.split(",")
            assert label == str(labels[i])
            with Image.open(io.BytesIO(archive.read(path))) as picture:
                assert np.array_equal(np.asarray(picture), images[i, :, :, 0])
        assert len(rows) == len(images) + 1
    assert world.requester.get(body["content"]["zip"]).content == pictures.content
    answer = world.requester.get(f"/v1/releases/{release}/content", params={"format": "exe"})
    assert_problem(answer, 422, "invalid_request", "format")


def test_who_sees_a_release(released: tuple[World, str, str, str]) -> None:
    world, _, _, release = released
    where = f"/v1/releases/{release}"
    auditor = world.join("auditor", "hospital", ["auditor"])
    assert auditor.get(where).status_code == 200
    assert auditor.get(f"{where}/certificate").status_code == 200
    assert auditor.get(f"{where}/content").status_code == 403
    assert world.owner.get(f"{where}/content").status_code == 200
    # Another organisation with a grant of its own orders its own releases.
    world.join("other", "other", ["requester"])
    for path in ("", "/content", "/certificate"):
        assert_problem(world.clients["other"].get(where + path), 404)


def test_a_certificate_is_checked(released: tuple[World, str, str, str]) -> None:
    world, _, _, release = released
    certificate = world.requester.get(f"/v1/releases/{release}/certificate").json()
    check = world.stranger.post("/v1/certificates/verify", json={"certificate": certificate})
    assert check.status_code == 200, check.text
    body = check.json()
    assert body["ok"] is body["signature_ok"] is body["bound_ok"] is body["bracket_same"] is True
    stated = certificate["epsilon"]
    assert body["recomputed"]["upper"] == pytest.approx(stated["upper"], rel=1e-9)

    forged = {**certificate, "epsilon": {**stated, "upper": stated["lower"] / 2, "lower": 0.0}}
    body = world.stranger.post("/v1/certificates/verify", json={"certificate": forged}).json()
    assert (body["ok"], body["signature_ok"], body["bound_ok"]) == (False, False, False)
    quick = {"certificate": forged, "recompute": False}
    body = world.stranger.post("/v1/certificates/verify", json=quick).json()
    assert (body["signature_ok"], body["bound_ok"]) == (False, None)
    unsigned: list[JSON] = [{}, {"signature": 3}, {"mechanism": []}, {"epsilon": {"delta": "inf"}}]
    for nonsense in unsigned:
        body = world.stranger.post("/v1/certificates/verify", json={"certificate": nonsense})
        assert body.json()["ok"] is False
    answer = world.stranger.post("/v1/certificates/verify", json={"certificate": "x"})
    assert_problem(answer, 422, "invalid_request", "certificate")
    keys = world.nobody.get("/.well-known/epsilond-keys.json").json()["keys"]
    assert certificate["service"]["key_id"] in {key["key_id"] for key in keys}


def test_the_books_show_every_entry(released: tuple[World, str, str, str]) -> None:
    world, dataset, job, release = released
    where = f"/v1/datasets/{dataset}/ledger"
    second = world.order(dataset, "k2").json()
    world.requester.post(f"/v1/jobs/{second['id']}/cancel")
    third = world.order(dataset, "k3").json()
    body = world.owner.get(where).json()
    assert [(*e["jobs"], e["state"]) for e in body["entries"]] == [
        (job, "released"),
        (second["id"], "cancelled"),
        (third["id"], "reserved"),
    ]
    assert body["entries"][0]["releases"] == [release]
    assert body["entries"][0]["charge"] == third["charge"]
    seen = []
    cursor = None
    while True:
        params = {"limit": "1"} | ({} if cursor is None else {"cursor": cursor})
        page = world.owner.get(where, params=params).json()
        seen += page["entries"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == body["entries"]
    budget = world.owner.get(f"/v1/datasets/{dataset}/budget").json()["filters"]
    basic = next(f for f in budget if f["order"] == "inf")
    # One released, one reserved; what was cancelled is given back.
    assert basic["spent"] == basic["reserved"]
    assert basic["spent"]["epsilon"] == third["charge"]["epsilon"]


def test_the_export_is_the_chain(released: tuple[World, str, str, str]) -> None:
    world, dataset, _, _ = released
    where = f"/v1/datasets/{dataset}/ledger"
    answer = world.owner.get(f"{where}/export")
    assert answer.headers["content-type"] == "application/jsonl"
    rows = [json.loads(line) for line in answer.text.splitlines()]
    previous = "0" * 64
    for i, row in enumerate(rows, start=1):
        assert (row["sequence"], row["previous_hash"]) == (i, previous)
        previous = hashlib.sha256(row["body"].encode()).hexdigest()
        assert row["hash"] == previous
        assert canonical_json(json.loads(row["body"])) == row["body"].encode()
    assert world.owner.get(where).json()["head"] == {"sequence": len(rows), "hash": previous}
    check = world.owner.get(f"{where}/verify").json()
    assert check == {
        "dataset": dataset,
        "ok": True,
        "rows": len(rows),
        "first_bad": None,
        "problem": None,
        "head": previous,
        "unconfirmed": 0,
    }


def test_a_changed_row_is_found(released: tuple[World, str, str, str]) -> None:
    world, dataset, _, _ = released
    where = f"/v1/datasets/{dataset}/ledger/verify"
    with world.database.write() as session:
        session.execute(sa.update(ChargeRow).values(epsilon_units=1))
    check = world.owner.get(where).json()
    assert check["ok"] is False
    assert check["problem"]
    with world.database.write() as session:
        session.execute(
            sa.update(ChainRow)
            .where(ChainRow.sequence == 2)
            .values(body=sa.func.replace(ChainRow.body, '"sequence":2', '"sequence":9'))
        )
    check = world.owner.get(where, params={"costs": "renyi"}).json()
    assert (check["ok"], check["first_bad"], check["rows"]) == (False, 2, 1)
