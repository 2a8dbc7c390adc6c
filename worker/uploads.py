"""Uploads: files from outside, turned into records or refused.

Formats, told by content and never by name alone:

========  ==========================================================================================
npz       arrays ``images`` (N,H,W[,C]), ``labels`` (N,), ``units`` (N,)
npy       the images alone; or separate parts ``images``, ``labels`` and ``units``
idx       the MNIST form, as parts ``images`` and ``labels``
zip       PNG or JPEG files in one folder a class, or with a ``labels.csv`` of the columns
          ``file``, ``label`` and ``unit``
========  ==========================================================================================

npy and idx parts may be gzipped.

Everything here is hostile until checked. Limits are applied to what a file *declares* before
anything is expanded, and to what it really holds while it is read; objects are never unpickled; no
name inside an archive becomes a path. Every refusal is an
:class:`~accounting.errors.InvalidRequest` that names the part or array, in a fixed text that holds
no pixel, label, count or name from the file.
"""

from __future__ import annotations

import ast
import csv
import gzip
import io
import math
import re
import secrets
import shutil
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Self, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accounting.errors import InvalidRequest
from worker.custody import make_private_folder
from worker.settings import Settings
from worker.snapshots import Records

MAX_UNIT_CHARACTERS: Final = 128
# Below this a large ratio is harmless: a few blank images compress a thousandfold.
RATIO_FLOOR_BYTES: Final = 2**20
MAX_NPY_HEADER_BYTES: Final = 4_096
MAX_LABEL_FILE_BYTES: Final = 64 * 2**20
MAX_IMAGE_FILE_OVERHEAD: Final = 2**20
STALE_UPLOAD_SECONDS: Final = 86_400

_PARTS: Final = ("images", "labels", "units")
_CONVERSION_BYTES: Final = 16 * 2**20
_DTYPE: Final = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|[US]\d{1,4})")
_IDX_TYPES: Final = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
# What a suffix claims. The last ones are formats that no part can be.
_SUFFIXES: Final = {
    ".npz": "npz",
    ".npy": "npy",
    ".idx": "idx",
    ".zip": "zip",
    ".png": "png",
    ".jpg": "jpeg",
    ".jpeg": "jpeg",
    ".parquet": "parquet",
}
# Python 2 wrote shapes with long integers, as in (10L, 28L, 28L).
_LONG: Final = re.compile(r"(?<=\d)L\b")

_PNG_END: Final = b"IEND\xaeB`\x82"
_JPEG_SCAN: Final = b"\xff\xda"
_JPEG_END: Final = b"\xff\xd9"

# What the standard library's and Pillow's readers raise on damaged files. OSError is Pillow's
# word for a damaged image and is caught only where the bytes are already in memory.
_DAMAGE: Final = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    Warning,
    gzip.BadGzipFile,
    struct.error,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
)
_IMAGE_DAMAGE: Final = (*_DAMAGE, OSError, MemoryError, Image.DecompressionBombError)


@dataclass(frozen=True)
class Part:
    """One received file.

    Attributes:
        path: where it lies.
        filename: what the client called it; "" when it said nothing. A known suffix must agree
            with the content.
    """

    path: Path
    filename: str = ""


@dataclass(frozen=True)
class Limits:
    """What an upload may hold.

    Attributes:
        max_upload_bytes: of all parts together, as received.
        max_records: images.
        max_pixels_per_image: height times width.
        max_expanded_bytes: of everything together once decompressed and decoded.
        max_ratio: expanded over received bytes, beyond the first :data:`RATIO_FLOOR_BYTES`.
    """

    max_upload_bytes: int
    max_records: int
    max_pixels_per_image: int
    max_expanded_bytes: int
    max_ratio: float

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            settings.max_upload_bytes,
            settings.max_records,
            settings.max_pixels_per_image,
            settings.max_expanded_bytes,
            settings.max_ratio,
        )


def parse_upload(parts: Mapping[str, Part], facts: Mapping[str, Any], limits: Limits) -> Records:
    """The records of an upload, checked against the dataset's public facts.

    Args:
        parts: ``{"file": ...}`` for a file that holds everything, or ``{"images": ...}`` with
            ``labels`` and ``units`` beside it as separate npy or idx files.
        facts: the dataset as registered; ``shape``, ``value_range``, ``classes`` and ``unit`` are
            read.
        limits: what an upload may hold.

    Whole numbers within the value range become uint8. Integer labels are class names where every
    class name is a whole number, and indexes into the class list otherwise; text labels are class
    names. A dataset with classes needs labels, one with a unit needs units, and neither takes what
    it did not declare.

    Raises:
        InvalidRequest: the upload is refused; ``field`` names the part or array.
    """
    expected = _Expected.of(facts, limits)
    if set(parts) != {"file"} and not {"images"} <= set(parts) <= set(_PARTS):
        raise InvalidRequest(
            "file", "send one part named file, or parts named images, labels and units"
        )
    received = sum(part.path.stat().st_size for part in parts.values())
    if received > limits.max_upload_bytes:
        raise InvalidRequest("file", "larger than this service takes")
    room = _Room(limits, received)
    if "file" in parts:
        part = parts["file"]
        kind = _identify("file", part, expected.max_entries)
        if kind == "npz":
            arrays = _read_npz(part.path, expected, room)
        elif kind == "zip":
            return _finish(_read_image_zip(part.path, expected, room))
        else:
            arrays = _read_parts({"images": part}, expected, room)
    else:
        arrays = _read_parts(parts, expected, room)
    return _finish(_from_arrays(arrays, expected))


# --------------------------------------------------------------------------------------------------
# Where received bytes lie meanwhile
# --------------------------------------------------------------------------------------------------


@contextmanager
def upload_folder(settings: Settings) -> Iterator[Path]:
    """A private folder for one request's body, gone when the block ends, however it ends."""
    folder = make_private_folder(settings.uploads_folder) / f"upload_{secrets.token_hex(16)}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def clear_stale_uploads(settings: Settings) -> int:
    """Remove what processes that were killed left behind more than a day ago; how many."""
    stale = [
        folder
        for folder in make_private_folder(settings.uploads_folder).glob("upload_*")
        if time.time() - folder.stat().st_mtime > STALE_UPLOAD_SECONDS
    ]
    for folder in stale:
        shutil.rmtree(folder)
    return len(stale)


# --------------------------------------------------------------------------------------------------
# What is expected, and how much room is left
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Expected:
    """The facts and limits as the readers need them."""

    shape: tuple[int, int, int]
    low: float
    high: float
    classes: tuple[str, ...]
    has_units: bool
    max_records: int

    @classmethod
    def of(cls, facts: Mapping[str, Any], limits: Limits) -> Self:
        height, width, channels = (int(size) for size in facts["shape"])
        if height * width > limits.max_pixels_per_image:
            raise InvalidRequest("images", "the dataset's images have too many pixels")
        low, high = (float(bound) for bound in facts["value_range"])
        return cls(
            (height, width, channels),
            # Pixels are kept in one byte.
            max(low, 0.0),
            min(high, 255.0),
            tuple(str(name) for name in facts.get("classes") or ()),
            facts.get("unit") is not None,
            limits.max_records,
        )

    @property
    def max_entries(self) -> int:
        """Of an archive: an image each, and folders and a label file beside them."""
        return 2 * self.max_records + 1_000

    @property
    def image_bytes(self) -> int:
        return math.prod(self.shape)

    def check_count(self, count: int) -> None:
        if count < 1:
            raise InvalidRequest("images", "at least one record is needed")
        if count > self.max_records:
            raise InvalidRequest("images", "more records than this service takes")

    def check_presence(self, present: set[str]) -> None:
        """Labels and units must be there exactly where the dataset declares them."""
        for name, declared, what in (
            ("labels", bool(self.classes), "classes"),
            ("units", self.has_units, "a unit"),
        ):
            if declared and name not in present:
                raise InvalidRequest(name, f"needed, because the dataset declares {what}")
            if not declared and name in present:
                raise InvalidRequest(name, f"refused, because the dataset does not declare {what}")


class _Room:
    """The bytes that may still be expanded. Asked before they are."""

    def __init__(self, limits: Limits, received: int) -> None:
        self._limit = limits.max_expanded_bytes
        self._ratio_limit = max(RATIO_FLOOR_BYTES, limits.max_ratio * received)
        self._expanded = 0
        self._held = 0

    def take(self, size: int, field: str) -> None:
        """Count bytes that decompression makes."""
        self._expanded += size
        if self._expanded > self._ratio_limit:
            raise InvalidRequest(field, "expands too far for the bytes received")
        self._check(field)

    def hold(self, size: int, field: str = "images") -> None:
        """Count bytes of decoded images. Their ratio is bounded by the declared shape already."""
        self._held += size
        self._check(field)

    def _check(self, field: str) -> None:
        if self._expanded + self._held > self._limit:
            raise InvalidRequest(field, "expands to more bytes than this service takes")


@contextmanager
def _refusing(
    field: str, detail: str, damage: tuple[type[BaseException], ...] = _DAMAGE
) -> Iterator[None]:
    """Turn a reader's errors into a refusal. Their text may quote the file, so it is cut off."""
    try:
        yield
    except damage:
        raise InvalidRequest(field, detail) from None


# --------------------------------------------------------------------------------------------------
# Telling formats apart
# --------------------------------------------------------------------------------------------------


def _identify(field: str, part: Part, max_entries: int) -> str:
    """``npz``, ``zip``, ``npy`` or ``idx``, by content; a known suffix must agree."""
    with part.path.open("rb") as file:
        head = file.read(4)
    if head in (b"PK\x03\x04", b"PK\x05\x06"):
        with _open_zip(part.path, field, max_entries) as archive:
            names = [info.filename for info in archive.infolist()]
        kind = "npz" if names and all(name.endswith(".npy") for name in names) else "zip"
    else:
        with _open_plain(part.path) as file, _refusing(field, "a damaged gzip stream"):
            kind = _identify_plain(field, file.read(8))
    suffix = Path(part.filename.lower().removesuffix(".gz")).suffix
    if _SUFFIXES.get(suffix, kind) != kind:
        raise InvalidRequest(field, "the content is not what the file's name says")
    return kind


def _identify_plain(field: str, head: bytes) -> str:
    if head[:6] == b"\x93NUMPY":
        return "npy"
    if len(head) >= 4 and head[:2] == b"\0\0" and head[2] in _IDX_TYPES and 1 <= head[3] <= 4:
        return "idx"
    raise InvalidRequest(field, "not an npz, npy, idx or zip file")


@contextmanager
def _open_plain(path: Path) -> Iterator[BinaryIO]:
    """The file, or what it holds if it is gzipped."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not zipped:
            yield file
            return
        with gzip.GzipFile(fileobj=file) as plain:
            yield cast(BinaryIO, plain)


# --------------------------------------------------------------------------------------------------
# Arrays: npy and idx
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Header:
    """What an array's file says of itself. ``size`` is the bytes of its body."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _read_parts(
    parts: Mapping[str, Part], expected: _Expected, room: _Room
) -> dict[str, NDArray[Any]]:
    """Separate files. All headers are checked before the first body is read."""
    expected.check_presence(set(parts))
    with ExitStack() as stack:
        streams = []
        for name in _PARTS:
            if name not in parts:
                continue
            kind = _identify(name, parts[name], expected.max_entries)
            if kind not in ("npy", "idx"):
                raise InvalidRequest(name, "an npy or idx file is needed here")
            file = stack.enter_context(_open_plain(parts[name].path))
            with _refusing(name, "damaged or cut short"):
                header = _npy_header(file, name) if kind == "npy" else _idx_header(file, name)
            streams.append((name, header, file))
        return _read_bodies(streams, expected, room)


def _read_npz(path: Path, expected: _Expected, room: _Room) -> dict[str, NDArray[Any]]:
    with ExitStack() as stack:
        archive = stack.enter_context(_open_zip(path, "file", expected.max_entries))
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if not set(members) <= set(_PARTS) or len(members) != len(archive.infolist()):
            raise InvalidRequest("file", "the arrays must be images, labels and units, once each")
        if "images" not in members:
            raise InvalidRequest("images", "the archive has no such array")
        expected.check_presence(set(members))
        streams = []
        for name in _PARTS:
            if name not in members:
                continue
            with _refusing(name, "damaged or cut short"):
                file = cast(BinaryIO, stack.enter_context(archive.open(members[name])))
                streams.append((name, _npy_header(file, name), file))
        return _read_bodies(streams, expected, room)


def _npy_header(file: BinaryIO, field: str) -> _Header:
    """The header of an npy file, read without numpy's reader so that nothing is trusted.

    Object arrays, which only pickle could read, and structured ones are refused.
    """
    head = file.read(8)
    if head[:6] != b"\x93NUMPY" or head[6:] not in (b"\x01\x00", b"\x02\x00"):
        raise InvalidRequest(field, "not an npy array of version 1 or 2")
    size_form = "<H" if head[6] == 1 else "<I"
    (size,) = struct.unpack(size_form, file.read(struct.calcsize(size_form)))
    if size > MAX_NPY_HEADER_BYTES:
        raise InvalidRequest(field, "the array's header is too long")
    text = file.read(size)
    if len(text) != size:
        raise InvalidRequest(field, "cut short")
    with _refusing(field, "the array's header can't be read", (*_DAMAGE, MemoryError)):
        fields = ast.literal_eval(_LONG.sub("", text.decode("latin-1")).strip())
        descr, fortran, shape = fields["descr"], fields["fortran_order"], fields["shape"]
        well_formed = (
            len(fields) == 3
            and isinstance(fortran, bool)
            and isinstance(shape, tuple)
            and all(type(length) is int and 0 <= length < 2**40 for length in shape)
            and len(shape) <= 4
        )
    if isinstance(descr, str) and "O" in descr:
        raise InvalidRequest(field, "an array of objects, which only pickle could read, is refused")
    if not well_formed or not isinstance(descr, str) or not _DTYPE.fullmatch(descr):
        raise InvalidRequest(field, "the array's type is refused")
    return _Header(np.dtype(descr), shape, fortran)


def _idx_header(file: BinaryIO, field: str) -> _Header:
    head = file.read(4)
    if len(head) != 4 or head[2] not in _IDX_TYPES:
        raise InvalidRequest(field, "not an idx array")
    sizes = file.read(4 * head[3])
    if len(sizes) != 4 * head[3]:
        raise InvalidRequest(field, "cut short")
    shape = struct.unpack(f">{head[3]}I", sizes)
    return _Header(np.dtype(_IDX_TYPES[head[2]]), shape, fortran_order=False)


def _read_bodies(
    streams: Sequence[tuple[str, _Header, BinaryIO]], expected: _Expected, room: _Room
) -> dict[str, NDArray[Any]]:
    """Check every header and the room for all bodies together, then read them."""
    headers = {name: header for name, header, _ in streams}
    _check_headers(headers, expected)
    for name, header in headers.items():
        room.take(header.size, name)
    room.hold(headers["images"].shape[0] * expected.image_bytes)
    return {name: _read_body(file, header, name) for name, header, file in streams}


def _check_headers(headers: Mapping[str, _Header], expected: _Expected) -> None:
    images = headers["images"]
    height, width, channels = expected.shape
    shapes = [(height, width, channels)] + ([(height, width)] if channels == 1 else [])
    if images.dtype.kind not in "buif":
        raise InvalidRequest("images", "pixels must be numbers")
    if not images.shape or images.shape[1:] not in shapes:
        raise InvalidRequest(
            "images", f"the array's shape must be (N, {height}, {width}, {channels})"
        )
    expected.check_count(images.shape[0])
    for name, kinds in (("labels", "iuUS"), ("units", "iuUS")):
        if name not in headers:
            continue
        header = headers[name]
        if header.dtype.kind not in kinds:
            raise InvalidRequest(name, "must be whole numbers or text")
        if header.dtype.itemsize > 4 * MAX_UNIT_CHARACTERS:
            raise InvalidRequest(name, f"text of at most {MAX_UNIT_CHARACTERS} characters")
        if header.shape != images.shape[:1]:
            raise InvalidRequest(name, "one for each image is needed")


def _read_body(file: BinaryIO, header: _Header, field: str) -> NDArray[Any]:
    """Exactly the declared bytes, and nothing after them (which also makes gzip and zip compare
    their checksums)."""
    body = np.empty(header.size, dtype=np.uint8)
    view = body.data
    with _refusing(field, "damaged or cut short"):
        filled = 0
        while filled < header.size:
            count = file.readinto(view[filled : filled + 2**20])  # type: ignore[attr-defined]  # all have it
            if not count:
                raise InvalidRequest(field, "cut short")
            filled += count
        if file.read(1):
            raise InvalidRequest(field, "bytes follow the end of the array")
        # Truth values are read as the bytes they are, and checked like other pixels.
        dtype = np.dtype("u1") if header.dtype.kind == "b" else header.dtype
        return body.view(dtype).reshape(header.shape, order="F" if header.fortran_order else "C")


def _from_arrays(arrays: Mapping[str, NDArray[Any]], expected: _Expected) -> Records:
    images = arrays["images"].reshape(len(arrays["images"]), *expected.shape)
    labels = arrays.get("labels")
    units = arrays.get("units")
    return Records(
        _as_pixels(images, expected),
        None if labels is None else _as_labels(labels, expected),
        None if units is None else _as_units(_as_texts(units, "units")),
    )


# --------------------------------------------------------------------------------------------------
# Archives
# --------------------------------------------------------------------------------------------------


@contextmanager
def _open_zip(path: Path, field: str, max_entries: int) -> Iterator[zipfile.ZipFile]:
    """A zip archive whose directory was counted before it is loaded, and whose entries are plain:
    stored or deflated, and not encrypted."""
    with path.open("rb") as file, _refusing(field, "not a readable zip archive"):
        _check_directory(file, path.stat().st_size, field, max_entries)
        archive = zipfile.ZipFile(path)
    with archive:
        for info in archive.infolist():
            if info.flag_bits & 0x1:
                raise InvalidRequest(field, "encrypted archives are refused")
            if info.header_offset < 0:
                raise InvalidRequest(field, "the archive's directory is damaged")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise InvalidRequest(field, "only stored and deflated archive entries are taken")
        yield archive


def _check_directory(file: BinaryIO, size: int, field: str, max_entries: int) -> None:
    """Walk the archive's central directory and count it.

    The standard library's reader makes an object for each entry before it can be asked how many
    there are. It looks for the directory just before the end record, and so does this. Archives
    with a comment are refused, so that the end record has one possible place.
    """
    end_size, locator_size, end64_size = 22, 20, 56
    if size < end_size:
        raise InvalidRequest(field, "cut short")
    file.seek(size - end_size)
    end = file.read(end_size)
    if end[:4] != b"PK\x05\x06" or end[-2:] != b"\0\0":
        raise InvalidRequest(field, "cut short, or an archive with a comment, which is refused")
    (directory_size,) = struct.unpack("<I", end[12:16])
    end_position = size - end_size
    if size >= end_size + locator_size + end64_size:
        file.seek(size - end_size - locator_size - end64_size)
        tail = file.read(end64_size + locator_size)
        if tail[:4] == b"PK\x06\x06" and tail[end64_size:][:4] == b"PK\x06\x07":
            (directory_size,) = struct.unpack("<Q", tail[40:48])
            end_position -= end64_size + locator_size
    if directory_size > end_position or directory_size > 1_024 * max_entries:
        raise InvalidRequest(field, "the archive's directory is damaged or too large")
    file.seek(end_position - directory_size)
    walked = entries = 0
    while walked < directory_size:
        entry = file.read(46)
        if len(entry) != 46 or entry[:4] != b"PK\x01\x02":
            raise InvalidRequest(field, "the archive's directory is damaged")
        rest = sum(struct.unpack("<HHH", entry[28:34]))
        file.seek(rest, io.SEEK_CUR)
        walked += 46 + rest
        entries += 1
        if entries > max_entries:
            raise InvalidRequest(field, "more archive entries than this service takes")


def _read_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo, field: str) -> bytes:
    """All bytes of an entry, whose declared size was taken from the room before."""
    with _refusing(field, "a damaged archive entry"), archive.open(info) as file:
        data = file.read(info.file_size + 1)
        if len(data) != info.file_size:
            raise InvalidRequest(field, "an archive entry is not as long as it says")
        return data


def _read_image_zip(path: Path, expected: _Expected, room: _Room) -> Records:
    """A zip of images, labelled by their folders or by ``labels.csv``."""
    with _open_zip(path, "file", expected.max_entries) as archive:
        images, tables = _sort_entries(archive)
        expected.check_count(len(images))
        largest = 4 * expected.image_bytes + MAX_IMAGE_FILE_OVERHEAD
        for info in images.values():
            if info.file_size > largest:
                raise InvalidRequest("images", "an image file is far larger than its pixels")
            room.take(info.file_size, "images")
        room.hold(len(images) * expected.image_bytes)
        labels, units = None, None
        if tables:
            if tables[0].file_size > MAX_LABEL_FILE_BYTES:
                raise InvalidRequest("labels.csv", "larger than this service takes")
            room.take(tables[0].file_size, "labels.csv")
            root = tables[0].filename[: -len("labels.csv")]
            table = _read_table(_read_entry(archive, tables[0], "labels.csv"), root, set(images))
            expected.check_presence(set(table))
            labels = [table["labels"][name] for name in images] if "labels" in table else None
            units = [table["units"][name] for name in images] if "units" in table else None
        else:
            expected.check_presence({"labels"} if expected.classes else set())
            if expected.classes:
                labels = [_folder_of(name) for name in images]
        pixels = np.empty((len(images), *expected.shape), dtype=np.uint8)
        label_indexes = None if labels is None else _labels_of_texts(labels, expected)
        unit_names = None if units is None else _as_units(units)
        for index, info in enumerate(images.values()):
            pixels[index] = _decode(_read_entry(archive, info, "images"), expected)
    return Records(_as_pixels(pixels, expected), label_indexes, unit_names)


def _sort_entries(
    archive: zipfile.ZipFile,
) -> tuple[dict[str, zipfile.ZipInfo], list[zipfile.ZipInfo]]:
    """The images by name, and the label file if there is one. Anything else is refused, except
    folders and what file managers add."""
    images: dict[str, zipfile.ZipInfo] = {}
    tables = []
    for info in archive.infolist():
        name = info.filename
        base = name.rsplit("/", 1)[-1]
        if info.is_dir() or name.startswith("__MACOSX/") or base.startswith("."):
            continue
        if base == "labels.csv":
            tables.append(info)
        elif base.lower().endswith((".png", ".jpg", ".jpeg")):
            if name in images:
                raise InvalidRequest("file", "two archive entries have one name")
            images[name] = info
        else:
            raise InvalidRequest("file", "the archive may hold PNG, JPEG and labels.csv only")
    if len(tables) > 1:
        raise InvalidRequest("labels.csv", "the archive holds more than one")
    return images, tables


def _folder_of(name: str) -> str:
    folders = name.split("/")[:-1]
    if not folders:
        raise InvalidRequest("labels", "each image must lie in a folder named after its class")
    return folders[-1]


def _read_table(data: bytes, root: str, names: set[str]) -> dict[str, dict[str, str]]:
    """``labels.csv`` as columns by image name; each image exactly once."""
    field = "labels.csv"
    with _refusing(field, "not a CSV file in UTF-8", (*_DAMAGE, csv.Error)):
        rows = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        header = next(rows, [])
        body: list[list[str]] = []
        for row in rows:
            if len(body) > len(names):
                raise InvalidRequest(field, "more rows than images")
            if row:
                body.append(row)
    columns = {"label": "labels", "unit": "units"}
    if len(set(header)) != len(header) or not {"file"} < set(header) <= {"file", *columns}:
        raise InvalidRequest(field, "the columns must be file, label and unit")
    place = header.index("file")
    table: dict[str, dict[str, str]] = {columns[name]: {} for name in header if name != "file"}
    seen = set()
    for row in body:
        if len(row) != len(header):
            raise InvalidRequest(field, "a row has more or fewer fields than the first")
        image = root + row[place]
        if image not in names or image in seen:
            raise InvalidRequest(field, "a row names an absent image, or one named before")
        seen.add(image)
        for name, text in zip(header, row, strict=True):
            if name != "file":
                table[columns[name]][image] = text
    if seen != names:
        raise InvalidRequest(field, "an image of the archive has no row")
    return table


def _decode(data: bytes, expected: _Expected) -> NDArray[np.uint8]:
    """One PNG or JPEG. Its size and colour mode are read from its header and checked first."""
    height, width, channels = expected.shape
    modes = {1: ("L", "1"), 3: ("RGB",), 4: ("RGBA",)}.get(channels, ())
    with (
        _refusing("images", "a damaged image, or not a PNG or JPEG", _IMAGE_DAMAGE),
        Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image,
    ):
        if image.size != (width, height):
            raise InvalidRequest("images", f"every image must be {width} by {height} pixels")
        if image.mode not in modes:
            raise InvalidRequest(
                "images", "8 bits a channel are taken, in grey, RGB or RGBA as the dataset declares"
            )
        # Pillow takes an image that ends early, if all its pixels happen to be there.
        if image.format == "PNG":
            whole = _PNG_END in data
        else:
            whole = data.rfind(_JPEG_END) > data.rfind(_JPEG_SCAN)
        if not whole:
            raise InvalidRequest("images", "an image is cut short")
        plain = image.convert("L") if image.mode == "1" else image
        return np.asarray(plain, dtype=np.uint8).reshape(expected.shape)


# --------------------------------------------------------------------------------------------------
# Values
# --------------------------------------------------------------------------------------------------


def _as_pixels(images: NDArray[Any], expected: _Expected) -> NDArray[np.uint8]:
    """Pixels (N,H,W,C) as uint8, if all are whole numbers within the value range.

    In blocks, so that the check's own memory stays small.
    """
    pixels = np.empty(images.shape, dtype=np.uint8)
    step = max(1, _CONVERSION_BYTES // (expected.image_bytes * images.dtype.itemsize))
    for start in range(0, len(images), step):
        block = images[start : start + step]
        if block.dtype.kind == "f":
            if not np.isfinite(block).all():
                raise InvalidRequest("images", "pixels must be finite numbers")
            if not (np.rint(block) == block).all():
                raise InvalidRequest("images", "pixels must be whole numbers")
        if block.min() < expected.low or block.max() > expected.high:
            raise InvalidRequest("images", "pixels must lie within the dataset's value range")
        pixels[start : start + step] = block
    return pixels


def _as_labels(labels: NDArray[Any], expected: _Expected) -> NDArray[np.int64]:
    """Class indexes (N,) of labels (N,) that are whole numbers or class names."""
    if labels.dtype.kind in "US":
        return _labels_of_texts(_as_texts(labels, "labels"), expected)
    values, inverse = np.unique(labels, return_inverse=True)
    named = all(re.fullmatch(r"0|-?[1-9]\d*", name) for name in expected.classes)
    if named:
        return _labels_of_texts([str(value) for value in values.tolist()], expected)[inverse]
    if values[0] < 0 or values[-1] >= len(expected.classes):
        raise InvalidRequest("labels", "a label is not one of the dataset's classes")
    return values.astype(np.int64)[inverse]


def _labels_of_texts(labels: Sequence[str], expected: _Expected) -> NDArray[np.int64]:
    index = {name: position for position, name in enumerate(expected.classes)}
    if not index.keys() >= set(labels):
        raise InvalidRequest("labels", "a label is not one of the dataset's classes")
    return np.array([index[label] for label in labels], dtype=np.int64)


def _as_texts(array: NDArray[Any], field: str) -> list[str]:
    with _refusing(field, "the text can't be read"):
        if array.dtype.kind == "S":
            return [value.decode() for value in array.tolist()]
        if array.dtype.kind == "U":
            # numpy fails with an internal error on what is no code point.
            codes = np.ascontiguousarray(array).view(f"{array.dtype.str[0]}u4")
            if codes.max() > sys.maxunicode:
                raise InvalidRequest(field, "the text can't be read")
        texts = [str(value) for value in array.tolist()]
        # A lone surrogate has no bytes, so it could not be hashed.
        "".join(texts).encode()
        return texts


def _as_units(units: Sequence[str]) -> NDArray[np.str_]:
    if not all(0 < len(unit) <= MAX_UNIT_CHARACTERS and "\0" not in unit for unit in units):
        raise InvalidRequest("units", f"must be of 1 to {MAX_UNIT_CHARACTERS} characters")
    return np.array(units, dtype=np.str_)


def _finish(records: Records) -> Records:
    """The records, if each unit has one label."""
    if records.units is not None and records.labels is not None:
        label_of: dict[str, int] = {}
        for unit, label in zip(records.units.tolist(), records.labels.tolist(), strict=True):
            if label_of.setdefault(unit, label) != label:
                raise InvalidRequest("units", "all records of one unit must have one label")
    return records
