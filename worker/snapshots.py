"""Snapshots: immutable, sealed copies of a dataset's records.

A snapshot is one file under ``home/snapshots``, sealed with a fresh key of its own, which in turn
is sealed with the service's key and kept in the database. Whatever stands for its content in the
open (ledger, certificate) is an HMAC under a key derived from the snapshot's, because a plain hash
of private records would itself tell two neighbouring datasets apart.

Where a dataset names a unit, each unit keeps at most ``max_records_per_unit`` records: those with
the smallest keyed hash of unit and record. The choice depends on that unit's records and the key
alone, so adding or removing another unit never changes it.
"""

from __future__ import annotations

import hmac as _hmac
import io
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import numpy as np
from numpy.typing import NDArray

from worker.custody import (
    KEY_BYTES,
    CustodyError,
    SealedWriter,
    Sealer,
    StorageUnavailable,
    derive_key,
    keyed_hash,
    make_private_folder,
    open_stream,
    sync_folder,
)
from worker.settings import Settings

_LOCATION: Final = re.compile(r"snap_[0-9a-f]{32}\.sealed")
_PARTS: Final = ("images", "labels", "units")


@dataclass(frozen=True)
class Records:
    """Private records as a snapshot holds them.

    Attributes:
        images: uint8, shape (N, H, W, C), as uploaded.
        labels: int64, shape (N,), indexes into the dataset's class list; None without classes.
        units: text, shape (N,); None when the unit is one record.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    units: NDArray[np.str_] | None

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class SnapshotWritten:
    """What the database keeps of a new snapshot.

    Attributes:
        id: its random id, ``snap_`` and 128 random bits.
        location: its file's name inside the snapshots folder.
        hmac: HMAC-SHA256 of its content under its own key, in hexadecimal.
        sealed_key: its key, sealed.
        records: how many records it holds. Private: for the owner only.
        owner_warning: a text for the owner only, or None.
    """

    id: str
    location: str
    hmac: str
    sealed_key: bytes
    records: int
    owner_warning: str | None


def write_snapshot(
    settings: Settings, sealer: Sealer, *, facts: Mapping[str, Any], records: Records
) -> SnapshotWritten:
    """Seal records into a new snapshot's file, durable when this returns.

    Args:
        facts: the dataset's public facts as registered.
        records: what :func:`worker.uploads.parse_upload` returned for the same facts.

    Raises:
        OSError: the file could not be written; nothing is left behind.
    """
    snapshot_id = f"snap_{secrets.token_hex(16)}"
    location = f"{snapshot_id}.sealed"
    key = secrets.token_bytes(KEY_BYTES)
    kept = keep_per_unit(records, int(facts.get("max_records_per_unit") or 1), key)
    folder = make_private_folder(settings.snapshots_folder)
    target = folder / location
    staged = folder / f".{location}.part"
    try:
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            _write_records(file, key, snapshot_id, kept)
            file.flush()
            os.fsync(file.fileno())
        # The name is random, so nothing is replaced.
        staged.rename(target)
        sync_folder(folder)
    except BaseException:
        for path in (staged, target):
            with suppress(FileNotFoundError):
                path.unlink()
        raise
    return SnapshotWritten(
        id=snapshot_id,
        location=location,
        hmac=snapshot_hmac(key, kept),
        sealed_key=sealer.seal(key, _key_context(snapshot_id)),
        records=len(kept),
        owner_warning=owner_warning(kept, facts),
    )


def read_snapshot(
    settings: Settings,
    sealer: Sealer,
    *,
    snapshot_id: str,
    location: str,
    sealed_key: bytes,
    hmac: str,
) -> Records:
    """The records of a snapshot, checked against its HMAC.

    Raises:
        CustodyError: the file was changed, or the arguments belong to another snapshot.
        StorageUnavailable: the file is not there, or can't be read now.
    """
    key = sealer.open(sealed_key, _key_context(snapshot_id))
    try:
        with _path(settings, location).open("rb") as file:
            records = _read_records(file, key, snapshot_id)
    except OSError as error:
        raise StorageUnavailable("the snapshot's file can't be read") from error
    if not _hmac.compare_digest(snapshot_hmac(key, records), hmac):
        raise CustodyError("the snapshot is not the one that was registered")
    return records


def delete_snapshot(settings: Settings, location: str) -> None:
    """Remove a snapshot's file; nothing happens when it is gone already."""
    path = _path(settings, location)
    with suppress(FileNotFoundError):
        path.unlink()
        sync_folder(path.parent)


def snapshot_hmac(key: bytes, records: Records) -> str:
    """HMAC-SHA256 of types, shapes and values under a key derived from the snapshot's."""
    parts: list[bytes] = []
    for name, array in _arrays(records):
        if name == "units":
            texts = [text.encode() for text in array.tolist()]
            lengths = np.array([len(text) for text in texts], dtype="<u8")
            parts += [name.encode(), repr(array.shape).encode(), lengths.tobytes()]
            parts.append(b"".join(texts))
        else:
            fixed = array.astype(array.dtype.newbyteorder("<"), copy=False)
            header = f"{fixed.dtype.str} {array.shape!r}"
            parts += [name.encode(), header.encode(), fixed.tobytes()]
    return keyed_hash(derive_key(key, "snapshot-content"), *parts).hex()


def keep_per_unit(records: Records, limit: int, key: bytes) -> Records:
    """At most ``limit`` records of each unit: those with the smallest keyed hash, in their order.

    Equal records of one unit have equal hashes; which of them stays makes no difference.
    """
    if records.units is None:
        return records
    key = derive_key(key, "unit-records")
    by_unit: dict[str, list[tuple[bytes, int]]] = {}
    for index, unit in enumerate(records.units.tolist()):
        label = b"" if records.labels is None else int(records.labels[index]).to_bytes(8, "big")
        rank = keyed_hash(key, unit.encode(), label, records.images[index].tobytes())
        by_unit.setdefault(unit, []).append((rank, index))
    kept = sorted(index for ranked in by_unit.values() for _, index in sorted(ranked)[:limit])
    if len(kept) == len(records):
        return records
    return Records(
        records.images[kept],
        None if records.labels is None else records.labels[kept],
        records.units[kept],
    )


def owner_warning(records: Records, facts: Mapping[str, Any]) -> str | None:
    """A text for the owner alone when there are fewer units than the declared ``public_size``.

    It tells of the true size, which is private: it must reach nobody else and change nothing.
    """
    units = len(records) if records.units is None else len(set(records.units.tolist()))
    declared = int(facts["public_size"])
    if units >= declared:
        return None
    return (
        f"not private: this snapshot holds {units} units, fewer than the declared public_size of "
        f"{declared}; jobs run all the same, with the rates that follow from the declaration"
    )


# --------------------------------------------------------------------------------------------------
# The file's form: one byte that says which arrays follow, then each in npy form, all sealed
# --------------------------------------------------------------------------------------------------


def _arrays(records: Records) -> Iterator[tuple[str, NDArray[Any]]]:
    for name in _PARTS:
        array = getattr(records, name)
        if array is not None:
            yield name, array


def _write_records(file: BinaryIO, key: bytes, snapshot_id: str, records: Records) -> None:
    sink = SealedWriter(file, derive_key(key, "snapshot-file"), snapshot_id.encode())
    present = {name for name, _ in _arrays(records)}
    sink.write(bytes([sum(1 << bit for bit, name in enumerate(_PARTS) if name in present)]))
    for _, array in _arrays(records):
        np.lib.format.write_array(cast(BinaryIO, sink), array, allow_pickle=False)
    sink.finish()


def _read_records(file: BinaryIO, key: bytes, snapshot_id: str) -> Records:
    chunks = open_stream(file, derive_key(key, "snapshot-file"), snapshot_id.encode())
    source = io.BufferedReader(_ChunkReader(chunks))
    flags = source.read(1)[0]
    arrays: dict[str, Any] = dict.fromkeys(_PARTS)
    for bit, name in enumerate(_PARTS):
        if flags >> bit & 1:
            arrays[name] = np.lib.format.read_array(cast(BinaryIO, source), allow_pickle=False)
    if source.read(1):
        raise CustodyError("the snapshot's file holds more than its records")
    return Records(**arrays)


class _ChunkReader(io.RawIOBase):
    """A readable file over an iterator of chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def _key_context(snapshot_id: str) -> bytes:
    return b"snapshot-key:" + snapshot_id.encode()


def _path(settings: Settings, location: str) -> Path:
    if not _LOCATION.fullmatch(location):
        raise CustodyError("not a snapshot's location")
    return settings.snapshots_folder / location
