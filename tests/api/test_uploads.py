"""Uploads through HTTP: what is taken, and that a refused or broken one leaves nothing."""

from __future__ import annotations

import gzip
import io
import socket
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import sqlalchemy as sa
from PIL import Image

from accounting.errors import LedgerUnavailable
from accounting.tables import SnapshotRow
from tests.api.world import FACTS, World, assert_problem, counts, files, npz


def png(size: tuple[int, int] = (8, 8), value: int = 7) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", size, value).save(buffer, format="PNG")
    return buffer.getvalue()


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as target:
        for name, data in members.items():
            target.writestr(name, data)
    return buffer.getvalue()


def idx(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", n) for n in array.shape)
    return head + array.tobytes()


def npy(array: object, *, pickled: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(array), allow_pickle=pickled)
    return buffer.getvalue()


IMAGES = np.random.default_rng(3).integers(0, 256, (4, 8, 8), dtype=np.uint8)
LABELS = np.array([0, 1, 0, 1], dtype=np.uint8)
Sender = Callable[[httpx.Client, str], httpx.Response]


def raw(data: bytes, kind: str = "application/octet-stream") -> Sender:
    return lambda client, url: client.post(url, content=data, headers={"Content-Type": kind})


def form(**parts: bytes | tuple[str, bytes]) -> Sender:
    return lambda client, url: client.post(url, files=parts)


TAKEN: dict[str, Sender] = {
    "npz": raw(npz(4)),
    "npz as zip": raw(npz(4), "application/zip"),
    "npz as a part": form(file=("records.npz", npz(4))),
    "idx pair": form(images=idx(IMAGES), labels=idx(LABELS)),
    "idx pair, gzipped": form(
        images=("images-idx3-ubyte.gz", gzip.compress(idx(IMAGES))),
        labels=("labels-idx1-ubyte.gz", gzip.compress(idx(LABELS))),
    ),
    "npy parts": form(images=npy(IMAGES), labels=npy(LABELS.astype(np.int64))),
    "class folders": raw(archive({"0/a.png": png(), "1/b.png": png(), "1/c.png": png()})),
    "labels.csv": raw(
        archive({"a.png": png(), "b.png": png(), "labels.csv": b"file,label\na.png,0\nb.png,1\n"})
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_an_upload_is_taken(peopled: World, dataset: str, name: str) -> None:
    before = files(peopled.settings)
    answer = TAKEN[name](peopled.owner, f"/v1/datasets/{dataset}/snapshots")
    assert answer.status_code == 201, answer.text
    # Counts are private: the answer is an id and a time.
    assert set(answer.json()) == {"id", "created_at"}
    assert files(peopled.settings) - before == {f"snapshots/{answer.json()['id']}.sealed"}


def bomb() -> bytes:
    buffer = io.BytesIO()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (1_000_000, 8, 8)}
    )
    with (
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target,
        target.open("images.npy", "w", force_zip64=True) as member,
    ):
        member.write(header.getvalue())
        for _ in range(64):
            member.write(bytes(1_000_000))
    return buffer.getvalue()


REFUSED: dict[str, tuple[Sender, int, str | None]] = {
    "nothing": (raw(b""), 422, "file"),
    "an empty part": (form(images=b"", labels=idx(LABELS)), 422, "images"),
    "text": (raw(b"hello"), 422, "file"),
    "a picture that says it is npz": (form(file=("a.npz", png())), 422, "file"),
    "an npz that says it is a picture": (form(file=("a.png", npz(4))), 422, "file"),
    "a truncated npz": (raw(npz(4)[:-60]), 422, "file"),
    "a truncated idx": (form(images=idx(IMAGES)[:-1], labels=idx(LABELS)), 422, "images"),
    "a truncated picture": (raw(archive({"0/a.png": png()[:-20], "1/b.png": png()})), 422, None),
    "mixed sizes": (raw(archive({"0/a.png": png(), "1/b.png": png((9, 8))})), 422, None),
    "another size": (raw(npz(4, images=np.zeros((4, 9, 8), np.uint8))), 422, "images"),
    "NaN pixels": (raw(npz(4, images=np.full((4, 8, 8), np.nan))), 422, "images"),
    "infinite pixels": (raw(npz(4, images=np.full((4, 8, 8), np.inf))), 422, "images"),
    "pixels out of range": (raw(npz(4, images=np.full((4, 8, 8), 256))), 422, "images"),
    "negative pixels": (raw(npz(4, images=np.full((4, 8, 8), -1))), 422, "images"),
    "a label of no class": (raw(npz(4, labels=np.array([0, 1, 2, 0]))), 422, "labels"),
    "too few labels": (raw(npz(4, labels=np.array([0, 1]))), 422, "labels"),
    "no labels": (raw(npz(4, labels=None)), 422, "labels"),
    "units that were not declared": (raw(npz(4, units=np.arange(4))), 422, "units"),
    "no records": (raw(npz(0)), 422, "images"),
    "a zip bomb": (raw(bomb()), 422, None),
    "a picture of huge dimensions": (raw(archive({"0/a.png": png((5000, 5000))})), 422, None),
    "pickles": (raw(archive({"images.npy": npy([{"a": 1}], pickled=True)})), 422, None),
    "an unknown part": (form(pictures=npz(4)), 422, "file"),
    "images and file": (form(file=npz(4), images=idx(IMAGES)), 422, "file"),
    "no part": (lambda c, u: c.post(u, files={}, data={}), 422, "file"),
    "a part twice": (
        lambda c, u: c.post(u, files=[("file", ("a", npz(4))), ("file", ("b", npz(4)))]),
        422,
        "file",
    ),
    "too many bytes": (raw(npz(4) + bytes(1_000_000)), 413, None),
    "no boundary": (raw(npz(4), "multipart/form-data"), 400, None),
    "no multipart": (raw(npz(4), "multipart/form-data; boundary=x"), 400, None),
    "multipart without an end": (
        raw(
            b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + npz(4),
            "multipart/form-data; boundary=x",
        ),
        400,
        None,
    ),
}


@pytest.fixture(scope="module")
def peopled(start_world: Callable[[str], World]) -> World:
    return start_world("uploads")


@pytest.fixture(scope="module")
def dataset(peopled: World) -> str:
    return peopled.dataset(snapshot=False)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_upload_leaves_nothing(peopled: World, dataset: str, name: str) -> None:
    send, status, field = REFUSED[name]
    rows, kept = counts(peopled.database), files(peopled.settings)
    body = assert_problem(send(peopled.owner, f"/v1/datasets/{dataset}/snapshots"), status)
    if status == 422:
        assert body["field"]
    if field is not None:
        assert body["field"] == field
    assert counts(peopled.database) == rows
    assert files(peopled.settings) == kept
    assert list(peopled.settings.uploads_folder.iterdir()) == []


def test_a_body_in_chunks_is_counted(peopled: World, dataset: str) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(65536)

    rows, kept = counts(peopled.database), files(peopled.settings)
    url = f"/v1/datasets/{dataset}/snapshots"
    try:
        answer = peopled.owner.post(url, content=endless())
    except httpx.TransportError:
        pass  # the server answered and closed while the client still sent
    else:
        assert_problem(answer, 413, "too_large")
    assert counts(peopled.database) == rows
    assert files(peopled.settings) == kept


@pytest.mark.parametrize("framing", ["content-length", "chunked", "multipart"])
def test_an_upload_that_breaks_off_leaves_nothing(
    peopled: World, dataset: str, framing: str
) -> None:
    """A client that goes away in the middle of its body."""
    rows, kept = counts(peopled.database), files(peopled.settings)
    data = npz(40)
    head = (
        f"POST /v1/datasets/{dataset}/snapshots HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: {peopled.owner.headers['Authorization']}\r\n"
    )
    if framing == "chunked":
        start = f"{head}Transfer-Encoding: chunked\r\n\r\n{len(data):x}\r\n".encode()
    elif framing == "multipart":
        data = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + data
        start = (
            f"{head}Content-Type: multipart/form-data; boundary=x\r\n"
            f"Content-Length: {len(data) + 7}\r\n\r\n"
        ).encode()
    else:
        start = f"{head}Content-Length: {len(data)}\r\n\r\n".encode()
    where = urlsplit(peopled.address)
    assert where.hostname is not None
    with socket.create_connection((where.hostname, where.port or 80)) as connection:
        connection.sendall(start + data[: len(data) // 2])
        # The upload has begun: its folder is there.
        wait_until(lambda: list(peopled.settings.uploads_folder.iterdir()) != [])
    wait_until(lambda: list(peopled.settings.uploads_folder.iterdir()) == [])
    assert counts(peopled.database) == rows
    assert files(peopled.settings) == kept
    assert peopled.nobody.get("/livez").status_code == 200


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_row_that_can_t_be_written_leaves_no_file(
    peopled: World, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = files(peopled.settings)

    def broken() -> object:
        raise LedgerUnavailable("the ledger's database did not answer in time")

    monkeypatch.setattr(peopled.database, "write", broken)
    answer = peopled.owner.post(f"/v1/datasets/{dataset}/snapshots", content=npz())
    assert_problem(answer, 503, "ledger_unavailable")
    assert files(peopled.settings) == kept


def test_counts_and_warnings_are_the_owners_alone(peopled: World) -> None:
    dataset = peopled.dataset(name="small", public_size=50, snapshot=False)
    where = f"/v1/datasets/{dataset}"
    seen = [peopled.requester.get(where + path).json() for path in ("", "/budget")]
    small = peopled.owner.post(f"{where}/snapshots", content=npz(39))
    assert small.status_code == 201
    assert set(small.json()) == {"id", "created_at"}
    large = peopled.owner.post(f"{where}/snapshots", content=npz(50))
    first, second = peopled.owner.get(f"{where}/snapshots").json()["snapshots"]
    assert (first["id"], first["records"], first["not_private"]) == (small.json()["id"], 39, True)
    assert "39" in first["warning"]
    assert (second["id"], second["records"], second["warning"]) == (large.json()["id"], 50, None)
    # A requester sees no difference.
    assert [peopled.requester.get(where + path).json() for path in ("", "/budget")] == seen


def test_pixels_are_sealed_at_rest(peopled: World, dataset: str) -> None:
    pattern = bytes(range(64)) * 4
    images = np.frombuffer(pattern, np.uint8).reshape(4, 8, 8)
    sent = peopled.owner.post(f"/v1/datasets/{dataset}/snapshots", content=npz(4, images=images))
    assert sent.status_code == 201
    for path in peopled.settings.home.rglob("*"):
        if path.is_file():
            assert pattern[:64] not in path.read_bytes()
    with peopled.database.read() as session:
        row = session.scalars(
            sa.select(SnapshotRow).where(SnapshotRow.id == sent.json()["id"])
        ).one()
    file = peopled.settings.snapshots_folder / row.location
    assert file.stat().st_mode & 0o077 == 0


def test_a_dataset_without_classes_takes_images_alone(peopled: World) -> None:
    dataset = peopled.dataset(name="plain", snapshot=False, classes=None)
    url = f"/v1/datasets/{dataset}/snapshots"
    assert peopled.owner.post(url, content=npy(IMAGES)).status_code == 201
    answer = peopled.owner.post(url, content=npz(4))
    assert_problem(answer, 422, "invalid_request", "labels")
    assert FACTS["classes"] is not None
