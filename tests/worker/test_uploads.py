"""Uploads: each format is read exactly, and everything else is refused by name."""

from __future__ import annotations

import gzip
import io
import os
import struct
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from accounting.errors import InvalidRequest
from worker import uploads
from worker.settings import Settings
from worker.snapshots import Records
from worker.uploads import Limits, Part, parse_upload

FACTS: dict[str, Any] = {
    "name": "digits",
    "shape": [6, 5, 1],
    "value_range": [0, 255],
    "classes": ["0", "1", "2"],
    "public_size": 4,
    "unit": None,
    "max_records_per_unit": 1,
}
UNITS = FACTS | {"unit": "person", "max_records_per_unit": 2}
NO_CLASSES = FACTS | {"classes": []}
COLOUR = FACTS | {"shape": [6, 5, 3]}
LIMITS = Limits.of(Settings())
COUNT = 7
IMAGES = np.random.default_rng(5).integers(0, 256, (COUNT, 6, 5), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2, 0])
# What must never come back in a message.
PRIVATE = "Zebra31337"

Refused = Callable[..., InvalidRequest]


@pytest.fixture
def parse(tmp_path: Path) -> Callable[..., Records]:
    """parse(bytes or {part: bytes}, facts, limits, name) as the API calls it."""

    def call(
        content: bytes | Mapping[str, bytes],
        facts: Mapping[str, Any] = FACTS,
        limits: Limits = LIMITS,
        name: str = "",
    ) -> Records:
        named = {"file": content} if isinstance(content, bytes) else content
        parts = {}
        for part, data in named.items():
            (tmp_path / part).write_bytes(data)
            parts[part] = Part(tmp_path / part, name)
        return parse_upload(parts, facts, limits)

    return call


@pytest.fixture
def refused(parse: Callable[..., Records]) -> Refused:
    """refused(field, ...): the refusal, which names the field and quotes nothing."""

    def call(field: str, *arguments: Any, **named: Any) -> InvalidRequest:
        with pytest.raises(InvalidRequest) as raised:
            parse(*arguments, **named)
        error = raised.value
        assert error.field == field, error
        assert PRIVATE not in str(error)
        assert error.__suppress_context__ or error.__context__ is None
        return error

    return call


def npz(**arrays: Any) -> bytes:
    sink = io.BytesIO()
    np.savez_compressed(sink, **arrays)
    return sink.getvalue()


def npy(array: Any) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array)
    return sink.getvalue()


def idx(array: np.ndarray[Any, Any], kind: int = 0x08) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return header + array.tobytes()


def picture(pixels: Any, form: str = "PNG", mode: str | None = None) -> bytes:
    sink = io.BytesIO()
    image = Image.fromarray(np.asarray(pixels))
    (image.convert(mode) if mode else image).save(sink, form)
    return sink.getvalue()


def archive(entries: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", compression) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return sink.getvalue()


def in_folders(root: str = "") -> dict[str, bytes]:
    return {
        f"{root}{label}/{PRIVATE}{index}.png": picture(image)
        for index, (image, label) in enumerate(zip(IMAGES, LABELS, strict=True))
    }


def with_table(table: str, root: str = "") -> bytes:
    flat = {f"{root}{index}.png": picture(image) for index, image in enumerate(IMAGES)}
    return archive(flat | {f"{root}labels.csv": table.encode()})


def table(units: bool = False) -> str:
    head = "file,label" + (",unit" if units else "")
    rows = [
        f"{index}.png,{label}" + (f",u{label}" if units else "")
        for index, label in enumerate(LABELS)
    ]
    return "\n".join([head, *rows])


def check(records: Records) -> None:
    assert records.images.dtype == np.uint8
    assert np.array_equal(records.images, IMAGES[..., None])
    assert records.labels is not None
    assert records.labels.dtype == np.int64
    assert np.array_equal(records.labels, LABELS)


# --------------------------------------------------------------------------------------------------
# What is taken
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "images",
    [
        IMAGES,
        IMAGES[..., None],
        IMAGES.astype(np.int64),
        IMAGES.astype(">i2"),
        IMAGES.astype(np.float32),
        IMAGES.astype(">f8"),
        np.asfortranarray(IMAGES),
    ],
)
def test_npz(parse: Callable[..., Records], images: Any) -> None:
    check(parse(npz(images=images, labels=LABELS), name="digits.npz"))


@pytest.mark.parametrize(
    "labels",
    [
        LABELS.astype(np.uint8),
        LABELS.astype(">u8"),
        LABELS.astype(str),
        LABELS.astype("S3"),
        LABELS.astype(str).astype(">U9"),
    ],
)
def test_labels_are_numbers_or_names(parse: Callable[..., Records], labels: Any) -> None:
    check(parse(npz(images=IMAGES, labels=labels)))


def test_whole_numbers_are_names_where_all_names_are_whole_numbers(
    parse: Callable[..., Records],
) -> None:
    shifted = parse(npz(images=IMAGES, labels=LABELS + 7), FACTS | {"classes": ["7", "8", "9"]})
    assert np.array_equal(np.asarray(shifted.labels), LABELS)
    words = FACTS | {"classes": ["cat", "dog", "7"]}
    check(parse(npz(images=IMAGES, labels=LABELS), words))
    names = np.array(["cat", "dog", "7"])[LABELS]
    check(parse(npz(images=IMAGES, labels=names), words))


def test_idx_pair_plain_and_gzipped(parse: Callable[..., Records]) -> None:
    images, labels = idx(IMAGES), idx(LABELS.astype(np.uint8))
    check(parse({"images": images, "labels": labels}, name="train-images-idx3-ubyte"))
    check(parse({"images": gzip.compress(images), "labels": labels}))
    check(parse({"images": images, "labels": gzip.compress(labels)}, name="t10k-labels.idx.gz"))
    check(parse({"images": idx(IMAGES.astype(">f4"), 0x0D), "labels": labels}))


def test_npy_alone_and_in_parts(parse: Callable[..., Records]) -> None:
    alone = parse(npy(IMAGES), NO_CLASSES, name="images.npy")
    assert np.array_equal(alone.images, IMAGES[..., None])
    assert alone.labels is None
    assert alone.units is None
    check(parse({"images": npy(IMAGES), "labels": npy(LABELS)}))
    check(parse({"images": gzip.compress(npy(IMAGES)), "labels": idx(LABELS.astype(np.uint8))}))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("root", ["", "all/of/them/"])
def test_zip_in_class_folders(parse: Callable[..., Records], compression: int, root: str) -> None:
    extra = {
        f"{root}0/": b"",
        "__MACOSX/0/._1.png": b"resource fork",
        f"{root}.DS_Store": b"view settings",
    }
    check(parse(archive(in_folders(root) | extra, compression), name="digits.zip"))


@pytest.mark.parametrize("root", ["", "digits/"])
def test_zip_with_a_table(parse: Callable[..., Records], root: str) -> None:
    check(parse(with_table(table(), root)))
    check(parse(with_table("\ufeff" + table().replace("\n", "\r\n") + "\r\n\r\n", root)))
    records = parse(with_table(table(units=True)), UNITS | {"max_records_per_unit": 9})
    check(records)
    assert np.asarray(records.units).tolist() == [f"u{label}" for label in LABELS]


def test_a_zip_of_many_entries_has_another_directory(
    parse: Callable[..., Records], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
    content = archive(in_folders())
    assert b"PK\x06\x06" in content
    check(parse(content))


def test_jpeg_colour_and_bilevel(parse: Callable[..., Records]) -> None:
    colours = np.random.default_rng(1).integers(0, 256, (2, 6, 5, 3), dtype=np.uint8)
    entries = {f"1/{n}.png": picture(image) for n, image in enumerate(colours)}
    assert np.array_equal(parse(archive(entries), COLOUR).images, colours)
    grey = np.full((6, 5), 100, dtype=np.uint8)
    (image,) = parse(archive({"0/a.JPG": picture(grey, "JPEG")})).images
    assert np.abs(image.astype(int) - 100).max() <= 2
    two_level = np.eye(6, 5, dtype=bool)
    (image,) = parse(archive({"0/a.png": picture(two_level)})).images
    assert np.array_equal(image[..., 0], two_level * 255)


@pytest.mark.parametrize("units", [LABELS + 40, (LABELS + 40).astype(str), LABELS.astype("S2")])
def test_units(parse: Callable[..., Records], units: Any) -> None:
    records = parse(npz(images=IMAGES, labels=LABELS, units=units), UNITS)
    expected = [u.decode() if isinstance(u, bytes) else str(u) for u in units.tolist()]
    assert np.asarray(records.units).tolist() == expected
    # The bound on records of one unit is the snapshot's: here all are kept.
    check(records)


def test_truth_values_are_pixels_of_a_range_that_has_them(parse: Callable[..., Records]) -> None:
    images = IMAGES > 100
    records = parse(npz(images=images, labels=LABELS), FACTS | {"value_range": [0, 1]})
    assert np.array_equal(records.images[..., 0], images)


# --------------------------------------------------------------------------------------------------
# Not what it claims
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        b"hello " + PRIVATE.encode(),
        picture(IMAGES[0]),
        b"%PDF-1.7",
        b"\x1f\x8b",
        gzip.compress(b"hello"),
        gzip.compress(archive(in_folders())),
        b"PK\x03\x04",
        b"PK\x05\x06",
        b"\x1f\x8b\x08" + bytes(100),
        b"\0\0\x07\x03" + bytes(100),
        b"\x80\x04\x95 pickle",
    ],
)
def test_what_is_no_format_is_refused(refused: Refused, content: bytes) -> None:
    refused("file", content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("digits.zip", npz(images=IMAGES, labels=LABELS)),
        ("digits.npz", archive(in_folders())),
        ("digits.npz", npy(IMAGES)),
        ("digits.npy", idx(IMAGES)),
        ("digits.idx.gz", gzip.compress(npy(IMAGES))),
        ("digits.parquet", npy(IMAGES)),
        ("digit.PNG", npy(IMAGES)),
    ],
)
def test_a_name_that_claims_another_format_is_refused(
    refused: Refused, name: str, content: bytes
) -> None:
    refused("file", content, NO_CLASSES, name=name)


def test_the_parts_must_be_the_named_ones(refused: Refused) -> None:
    images = npy(IMAGES)
    for parts in ({}, {"labels": images}, {"file": images, "images": images}, {"x": images}):
        refused("file", parts)
    refused("images", {"images": npz(images=IMAGES), "labels": npy(LABELS)})
    refused("labels", {"images": images, "labels": picture(IMAGES[0])})


# --------------------------------------------------------------------------------------------------
# Damaged and cut short
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        npz(images=IMAGES, labels=LABELS),
        npy(IMAGES),
        gzip.compress(npy(IMAGES)),
        idx(IMAGES),
        gzip.compress(idx(IMAGES)),
        archive(in_folders()),
    ],
    ids=["npz", "npy", "npy.gz", "idx", "idx.gz", "zip"],
)
def test_every_truncation_is_refused(parse: Callable[..., Records], content: bytes) -> None:
    facts = FACTS if content[:2] == b"PK" else NO_CLASSES
    parse(content, facts)
    step = max(1, len(content) // 150)
    for length in [*range(0, len(content), step), len(content) - 1]:
        with pytest.raises(InvalidRequest):
            parse(content[:length], facts)


def test_bytes_after_the_end_are_refused(refused: Refused) -> None:
    refused("images", npy(IMAGES) + b"x", NO_CLASSES)
    refused("images", idx(IMAGES) + b"x", NO_CLASSES)
    refused("images", gzip.compress(idx(IMAGES) + b"x"), NO_CLASSES)
    refused("file", npz(images=IMAGES, labels=LABELS) + b"x")


def test_a_wrong_checksum_is_refused(refused: Refused) -> None:
    body = gzip.compress(idx(IMAGES))
    refused("images", body[:-8] + bytes(4) + body[-4:], NO_CLASSES)
    content = bytearray(archive({"images.npy": npy(IMAGES)}, zipfile.ZIP_STORED))
    content[200] ^= 1
    refused("images", bytes(content), NO_CLASSES)
    image = bytearray(archive({"0/a.png": picture(IMAGES[0])}, zipfile.ZIP_STORED))
    image[80] ^= 1
    refused("images", bytes(image))


def test_a_truncated_image_is_refused(refused: Refused) -> None:
    noise = np.random.default_rng(3).integers(0, 256, (6, 5), dtype=np.uint8)
    for form in ("PNG", "JPEG"):
        whole = picture(noise, form)
        for length in [*range(0, len(whole) - 1, 7), len(whole) - 1]:
            refused("images", archive({"0/a.png": whole[:length]}))


# --------------------------------------------------------------------------------------------------
# Arrays
# --------------------------------------------------------------------------------------------------


def test_an_npz_that_needs_pickle_is_refused(refused: Refused, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "was-run"),))

    objects = np.array([Payload()] * COUNT, dtype=object)
    assert "pickle" in str(refused("images", npz(images=objects, labels=LABELS)))
    refused("labels", npz(images=IMAGES, labels=objects))
    refused("images", npy(objects), NO_CLASSES)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    "images",
    [
        IMAGES[0],
        IMAGES[..., None, None],
        np.zeros((COUNT, 5, 6), np.uint8),
        np.zeros((COUNT, 6, 5, 3), np.uint8),
        np.zeros((COUNT, 30), np.uint8),
        np.zeros((0, 6, 5), np.uint8),
        np.zeros((), np.uint8),
    ],
)
def test_images_of_another_shape_are_refused(refused: Refused, images: Any) -> None:
    refused("images", npz(images=images, labels=LABELS))


@pytest.mark.parametrize(
    "images",
    [
        IMAGES.astype(complex),
        IMAGES.astype(str),
        IMAGES.astype("datetime64[s]"),
        np.zeros(IMAGES.shape, dtype=[("a", "u1")]),
        IMAGES.astype(np.longdouble),
    ],
)
def test_images_of_another_type_are_refused(refused: Refused, images: Any) -> None:
    refused("images", npz(images=images, labels=LABELS))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.5, -1.0, 256.0])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_pixels_that_are_no_pixels_are_refused(refused: Refused, value: float, kind: Any) -> None:
    images = IMAGES.astype(kind)
    images[COUNT - 1, 5, 4] = value
    refused("images", npz(images=images, labels=LABELS))
    refused("images", npy(images), NO_CLASSES)


def test_a_bad_pixel_in_a_later_block_is_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_CONVERSION_BYTES", 1)
    images = IMAGES.astype(np.float64)
    images[COUNT - 1, 5, 4] = np.nan
    assert "finite" in str(refused("images", npz(images=images, labels=LABELS)))


@pytest.mark.parametrize("value", [-1, 256, 2**40, -(2**40)])
def test_whole_numbers_out_of_range_are_refused(refused: Refused, value: int) -> None:
    images = IMAGES.astype(np.int64)
    images[2, 2, 2] = value
    refused("images", npz(images=images, labels=LABELS))


def test_the_declared_value_range_binds_in_every_format(refused: Refused) -> None:
    narrow = FACTS | {"value_range": [0, 100]}
    refused("images", npz(images=IMAGES, labels=LABELS), narrow)
    refused("images", archive(in_folders()), narrow)
    refused("images", idx(IMAGES), narrow | {"classes": []})
    # A wider one than a byte holds does not let a pixel wrap round.
    images = IMAGES.astype(np.int64) + 256
    refused("images", npz(images=images, labels=LABELS), FACTS | {"value_range": [-1000, 1000]})


@pytest.mark.parametrize(
    "labels",
    [
        LABELS[:-1],
        np.append(LABELS, 0),
        LABELS[:, None],
        LABELS.astype(float),
        LABELS.astype(bool),
        LABELS + 1,
        LABELS - 1,
        np.where(LABELS == 0, 2**62, LABELS),
        np.full(COUNT, np.iinfo(np.uint64).max),
        np.array([PRIVATE] * COUNT),
        np.array([b"\xff"] * COUNT),
        np.array(["00"] * COUNT),
        np.array(["0" * 200] * COUNT),
    ],
)
def test_labels_that_are_none_are_refused(refused: Refused, labels: Any) -> None:
    refused("labels", npz(images=IMAGES, labels=labels))


def test_indexes_must_lie_in_the_class_list(refused: Refused) -> None:
    words = FACTS | {"classes": ["cat", "dog", "cow"]}
    refused("labels", npz(images=IMAGES, labels=LABELS - 1), words)
    refused("labels", npz(images=IMAGES, labels=LABELS + 1), words)


def test_text_that_is_no_text_is_refused(refused: Refused) -> None:
    for code in (0x110000, 0xD800):
        text = np.full(COUNT, code, dtype="<u4").view("<U1")
        body = npy(np.array(["x"] * COUNT)).replace("x".encode("utf-32-le"), text[:1].tobytes())
        refused("units", {"images": npy(IMAGES), "labels": npy(LABELS), "units": body}, UNITS)
        refused("labels", {"images": npy(IMAGES), "labels": body})


def test_what_is_declared_is_needed_and_nothing_else(refused: Refused) -> None:
    refused("labels", npz(images=IMAGES))
    refused("labels", npy(IMAGES))
    refused("labels", {"images": idx(IMAGES)})
    refused("labels", npz(images=IMAGES, labels=LABELS), NO_CLASSES)
    refused("units", npz(images=IMAGES, labels=LABELS), UNITS)
    refused("units", npz(images=IMAGES, labels=LABELS, units=LABELS))
    refused("images", npz(labels=LABELS))
    refused("file", npz(images=IMAGES, labels=LABELS, **{PRIVATE: LABELS}))
    refused("units", archive(in_folders()), UNITS)
    without_labels = "file,unit\n" + "\n".join(f"{index}.png,x" for index in range(COUNT))
    refused("labels", with_table(without_labels), UNITS)
    refused("units", with_table(without_labels), NO_CLASSES)


def test_units_must_be_short_texts_of_one_label(refused: Refused) -> None:
    for units in (
        LABELS[:-1],
        LABELS.astype(float),
        np.array([""] * COUNT),
        np.array(["x" * 129] * COUNT),
        np.array([b"\xff"] * COUNT),
    ):
        refused("units", npz(images=IMAGES, labels=LABELS, units=units), UNITS)
    # One unit with two labels would count in two classes.
    units = np.array([PRIVATE] * COUNT)
    refused("units", npz(images=IMAGES, labels=LABELS, units=units), UNITS)
    one = with_table(table(units=True).replace(",u2", f",{PRIVATE}").replace(",u1", f",{PRIVATE}"))
    refused("units", one, UNITS)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "{",
        "[]",
        "{'descr': '|u1', 'fortran_order': False}",
        "{'descr': '|u1', 'fortran_order': 0, 'shape': (7, 6, 5)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': [7, 6, 5]}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-7, 6, 5)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (True, 6, 5)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (7.0, 6, 5)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (7, 6, 5), 'x': 1}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (7, 6, 5)}",
        "{'descr': '|V9', 'fortran_order': False, 'shape': (7, 6, 5)}",
        "{'descr': ('|u1', (2,)), 'fortran_order': False, 'shape': (7, 6, 5)}",
        "{'descr': 7, 'fortran_order': False, 'shape': (7, 6, 5)}",
        "__import__('os').abort()",
        "(" * 2_000,
        "-" * 4_000 + "1",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (" + "9" * 4_000 + ",)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1099511627775, 6, 5)}",
        " " * 5_000,
    ],
)
def test_a_hostile_array_header_is_refused(refused: Refused, header: str) -> None:
    text = header.encode()
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + IMAGES.tobytes()
    refused("images", content, NO_CLASSES)
    huge = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + text
    refused("images", huge, NO_CLASSES)


# --------------------------------------------------------------------------------------------------
# Limits and bombs
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        npz(images=IMAGES, labels=LABELS),
        {"images": idx(IMAGES), "labels": idx(LABELS.astype(np.uint8))},
        archive(in_folders()),
    ],
    ids=["npz", "idx", "zip"],
)
def test_limits_bind_at_their_edge(
    parse: Callable[..., Records], refused: Refused, content: Any
) -> None:
    check(parse(content, limits=replace(LIMITS, max_records=COUNT)))
    refused("images", content, limits=replace(LIMITS, max_records=COUNT - 1))
    check(parse(content, limits=replace(LIMITS, max_pixels_per_image=30)))
    refused("images", content, limits=replace(LIMITS, max_pixels_per_image=29))
    sizes = [len(data) for data in (content.values() if isinstance(content, dict) else [content])]
    check(parse(content, limits=replace(LIMITS, max_upload_bytes=sum(sizes))))
    refused("file", content, limits=replace(LIMITS, max_upload_bytes=sum(sizes) - 1))
    with pytest.raises(InvalidRequest, match="expands"):
        parse(content, limits=replace(LIMITS, max_expanded_bytes=IMAGES.nbytes))


def _bomb(header: bytes, size: int) -> bytes:
    """A gzip stream of ``size`` zeros after a header, made a piece at a time."""
    packer = zlib.compressobj(9, wbits=31)
    pieces = [packer.compress(header)]
    pieces += [packer.compress(bytes(2**20)) for _ in range(size // 2**20)]
    return b"".join([*pieces, packer.flush()])


def test_bombs_are_refused_before_they_expand(refused: Refused) -> None:
    count = 2**26 // 30
    header = struct.pack(">BBBB3I", 0, 0, 8, 3, count, 6, 5)
    deep = _bomb(header, 2**26)
    wide = replace(LIMITS, max_records=2**31 - 1)
    member = io.BytesIO()
    with (
        zipfile.ZipFile(member, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("images.npy", "w") as sink,
    ):
        np.lib.format.write_array_header_1_0(
            sink, {"descr": "|u1", "fortran_order": False, "shape": (count, 6, 5)}
        )
        for _ in range(64):
            sink.write(bytes(2**20))
    pictures = io.BytesIO()
    with zipfile.ZipFile(pictures, "w", zipfile.ZIP_DEFLATED) as file:
        for index in range(64):
            file.writestr(f"0/{index}.png", bytes(2**20))
    labels = archive({"0/a.png": picture(IMAGES[0]), "labels.csv": bytes(2**25)})
    tracemalloc.start()
    try:
        refused("images", deep, NO_CLASSES, wide)
        refused("images", member.getvalue(), NO_CLASSES, wide)
        refused("images", pictures.getvalue(), FACTS, wide)
        refused("labels.csv", labels, FACTS, wide)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20


def test_a_small_bomb_that_hides_its_size_is_cut_off(refused: Refused) -> None:
    # The entry says 100 bytes in both of its headers and unpacks to 32 MB.
    content = archive({"0/a.png": bytes(2**25)}).replace(
        struct.pack("<I", 2**25), struct.pack("<I", 100)
    )
    tracemalloc.start()
    try:
        refused("images", content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20


def test_nested_archives_are_refused(refused: Refused) -> None:
    inner = archive(in_folders())
    refused("file", archive({"0/inner.zip": inner}))
    refused("images", archive({"0/inner.png": inner}))


def test_too_many_entries_are_refused_before_they_are_loaded(refused: Refused) -> None:
    entries = {f"__MACOSX/{index}": b"" for index in range(1_100)}
    error = refused("file", archive(entries), limits=replace(LIMITS, max_records=1))
    assert "entries" in str(error)


def test_hostile_archives_are_refused(refused: Refused) -> None:
    good = archive(in_folders())
    for compression in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        refused("file", archive(in_folders(), compression))
    # Bit 0 of the flags in the central directory: encrypted.
    at = good.index(b"PK\x01\x02")
    refused("file", good[: at + 8] + b"\x01" + good[at + 9 :])
    # A directory size that reaches before the file's start, and one that is not a directory.
    for size in (2**32 - 1, len(good), 5):
        refused("file", good[:-10] + struct.pack("<I", size) + good[-6:])
    # An entry that says it starts before the archive does.
    refused("file", good[:-6] + struct.pack("<I", 2**31) + good[-2:])
    refused("file", archive({f"0/{PRIVATE}.exe": b"MZ"}))
    refused("images", archive({}))
    refused("images", archive({"0/": b""}))
    doubled = archive({"0/a.png": picture(IMAGES[0]), "0/b.png": picture(IMAGES[0])})
    refused("file", doubled.replace(b"0/b.png", b"0/a.png"))
    twice = archive({"images.npy": npy(IMAGES), "labels.npy": npy(LABELS)})
    refused("file", twice.replace(b"labels.npy", b"images.npy"))


# --------------------------------------------------------------------------------------------------
# Images in archives
# --------------------------------------------------------------------------------------------------


def test_mixed_image_sizes_are_refused(refused: Refused) -> None:
    other = picture(np.zeros((5, 6), np.uint8))
    refused("images", archive(in_folders() | {"0/other.png": other}))


def test_other_colour_modes_are_refused(refused: Refused, parse: Callable[..., Records]) -> None:
    grey, colour = IMAGES[0], np.zeros((6, 5, 3), np.uint8)
    for mode in ("P", "RGB", "RGBA", "LA", "I;16"):
        pixels = picture(grey.astype(np.uint16)) if mode == "I;16" else picture(grey, mode=mode)
        refused("images", archive({"0/a.png": pixels}))
    for mode in ("P", "L", "RGBA"):
        refused("images", archive({"0/a.png": picture(colour, mode=mode)}), COLOUR)
    refused("images", archive({"0/a.jpg": picture(colour, "JPEG", "CMYK")}), COLOUR)
    rgba = FACTS | {"shape": [6, 5, 4]}
    assert len(parse(archive({"0/a.png": picture(colour, mode="RGBA")}), rgba)) == 1
    refused("images", archive({"0/a.png": picture(grey)}), FACTS | {"shape": [6, 5, 2]})


@pytest.mark.parametrize("size", [(60_000, 60_000), (2**31 - 1, 2**31 - 1), (0, 0), (5, 7)])
def test_a_png_of_huge_dimensions_is_refused_unread(
    refused: Refused, size: tuple[int, int]
) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    image = b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 0, 0, 0, 0)),
            chunk(b"IDAT", zlib.compress(bytes(2**20))),
            chunk(b"IEND", b""),
        ]
    )
    tracemalloc.start()
    try:
        refused("images", archive({"0/a.png": image}, zipfile.ZIP_STORED))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20


@pytest.mark.parametrize("form", ["GIF", "BMP", "TIFF", "WEBP"])
def test_other_image_formats_are_refused(refused: Refused, form: str) -> None:
    refused("images", archive({"0/a.png": picture(IMAGES[0], form)}))


def test_an_image_file_far_larger_than_its_pixels_is_refused(refused: Refused) -> None:
    noise = np.random.default_rng(0).bytes(2**21)
    refused("images", archive({"0/a.png": picture(IMAGES[0]) + noise}))


def test_an_image_needs_a_class(refused: Refused) -> None:
    refused("labels", archive({f"{PRIVATE}.png": picture(IMAGES[0])}))
    refused("labels", archive({f"{PRIVATE}/a.png": picture(IMAGES[0])}))
    refused("labels", archive({"../a.png": picture(IMAGES[0])}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "file\n",
        "label\n0",
        "file,label,label\n",
        f"file,label,{PRIVATE}\n",
        table() + "\n0.png,0",  # twice
        table().replace("6.png", f"{PRIVATE}.png"),  # absent
        table().replace("6.png", "../6.png"),
        "\n".join(table().split("\n")[:-1]),  # one without a row
        table() + ",extra",
        table().replace("3.png,0", "3.png"),
        table().replace("3.png,0", '3.png,"0'),
        table() + "\nx,y" * 100,
        'file,label\n"' + "x" * 200_000 + '",0',
    ],
)
def test_a_bad_table_is_refused(refused: Refused, text: str) -> None:
    refused("labels.csv", with_table(text))


def test_a_table_in_another_encoding_or_twice_is_refused(refused: Refused) -> None:
    flat = {"0.png": picture(IMAGES[0])}
    refused("labels.csv", archive(flat | {"labels.csv": b"file,label\n0.png,\xff"}))
    refused("labels.csv", archive(flat | {"labels.csv": b"file,label", "a/labels.csv": b""}))
    refused("labels", with_table(table().replace("6.png,0", f"6.png,{PRIVATE}")))


# --------------------------------------------------------------------------------------------------
# Anything at all
# --------------------------------------------------------------------------------------------------

_SEEDS = {
    "npz": npz(images=IMAGES, labels=LABELS, units=LABELS),
    "npz-stored": archive(
        {
            "images.npy": npy(IMAGES),
            "labels.npy": npy(LABELS.astype(str)),
            "units.npy": npy(LABELS),
        },
        zipfile.ZIP_STORED,
    ),
    "zip": with_table(table(units=True)),
    "jpeg": archive(
        {
            "a.jpg": picture(IMAGES[0], "JPEG"),
            "b.png": picture(IMAGES[1]),
            "labels.csv": b"file,label,unit\na.jpg,1,x\nb.png,2,y",
        },
        zipfile.ZIP_STORED,
    ),
    "npy": npy(IMAGES),
    "npy.gz": gzip.compress(npy(IMAGES)),
    "idx": idx(IMAGES),
    "idx.gz": gzip.compress(idx(IMAGES)),
}


@pytest.fixture(scope="module")
def fuzz_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@st.composite
def _damaged(draw: st.DrawFn, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, max(0, len(data) - 1)))
        act = draw(st.sampled_from(["change", "cut", "remove", "insert", "repeat"]))
        if act == "change":
            patch = draw(st.binary(min_size=1, max_size=4))
            data[position : position + len(patch)] = patch
        elif act == "cut":
            del data[position:]
        elif act == "remove":
            del data[position : position + draw(st.integers(1, 16))]
        elif act == "insert":
            data[position:position] = draw(st.binary(min_size=1, max_size=16))
        else:
            data += data[position : position + 64]
    return bytes(data)


@pytest.mark.parametrize("kind", sorted(_SEEDS))
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_file_is_refused_or_holds_records(
    fuzz_folder: Path, kind: str, data: st.DataObject
) -> None:
    content = data.draw(_damaged(_SEEDS[kind]))
    path = fuzz_folder / "upload"
    path.write_bytes(content)
    facts = NO_CLASSES if kind.startswith(("npy", "idx")) else UNITS
    try:
        records = parse_upload({"file": Part(path)}, facts, LIMITS)
    except InvalidRequest as error:
        field = error.field
    else:
        _check_anything(records)
        return
    assert field in {"file", "images", "labels", "units", "labels.csv"}


def _check_anything(records: Records) -> None:
    assert records.images.dtype == np.uint8
    assert records.images.shape[1:] == (6, 5, 1)
    assert len(records) >= 1
    if records.labels is not None:
        assert len(records.labels) == len(records)
        assert set(records.labels.tolist()) <= {0, 1, 2}


@given(
    start=st.sampled_from(
        [b"", b"\x93NUMPY\x01\0", b"PK\x03\x04", b"\x1f\x8b\x08", b"\0\0\x08\x03"]
    ),
    rest=st.binary(max_size=400),
)
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused(fuzz_folder: Path, start: bytes, rest: bytes) -> None:
    path = fuzz_folder / "bytes"
    path.write_bytes(start + rest)
    with pytest.raises(InvalidRequest):
        parse_upload({"file": Part(path)}, FACTS, LIMITS)


# --------------------------------------------------------------------------------------------------
# Where received bytes lie
# --------------------------------------------------------------------------------------------------


def test_an_upload_folder_is_gone_afterwards(tmp_path: Path) -> None:
    service = Settings(home=tmp_path / "home")
    with uploads.upload_folder(service) as folder:
        (folder / "file").write_bytes(b"partial")
        assert folder.stat().st_mode & 0o777 == 0o700

    def break_off() -> None:
        with uploads.upload_folder(service) as folder:
            (folder / "file").write_bytes(b"partial")
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        break_off()
    assert list(service.uploads_folder.iterdir()) == []


def test_what_killed_processes_left_is_cleared(tmp_path: Path) -> None:
    service = Settings(home=tmp_path / "home")
    assert uploads.clear_stale_uploads(service) == 0
    for name, age in (("upload_old", 90_000), ("upload_new", 60)):
        folder = service.uploads_folder / name
        folder.mkdir()
        (folder / "file").write_bytes(b"partial")
        then = time.time() - age
        os.utime(folder, (then, then))
    assert uploads.clear_stale_uploads(service) == 1
    assert [path.name for path in service.uploads_folder.iterdir()] == ["upload_new"]
