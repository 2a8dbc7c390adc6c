"""Snapshots: sealed, checked, and bounded per unit whatever the other units hold."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker import snapshots
from worker.custody import CustodyError, Sealer, StorageUnavailable, ensure_keys, load_sealer
from worker.settings import Settings
from worker.snapshots import Records, SnapshotWritten, read_snapshot, write_snapshot

FACTS: dict[str, Any] = {"public_size": 4, "unit": None, "max_records_per_unit": 1}
KEY = b"k" * 32


@pytest.fixture
def service(tmp_path: Path) -> Settings:
    made = Settings(home=tmp_path / "home")
    ensure_keys(made)
    return made


def _records(count: int = 6, *, units: bool = False, seed: int = 0) -> Records:
    random = np.random.default_rng(seed)
    return Records(
        random.integers(0, 256, (count, 3, 4, 2), dtype=np.uint8),
        random.integers(0, 10, count),
        np.array([f"unit {index // 3} é" for index in range(count)]) if units else None,
    )


def _read(service: Settings, sealer: Sealer, written: SnapshotWritten, **other: Any) -> Records:
    arguments = {
        "snapshot_id": written.id,
        "location": written.location,
        "sealed_key": written.sealed_key,
        "hmac": written.hmac,
    }
    return read_snapshot(service, sealer, **(arguments | other))


def _same(left: Records, right: Records) -> bool:
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a, b))
        for a, b in (
            (left.images, right.images),
            (left.labels, right.labels),
            (left.units, right.units),
        )
    )


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("labelled", [False, True])
def test_a_snapshot_is_read_as_written(service: Settings, units: bool, labelled: bool) -> None:
    records = _records(units=units)
    if not labelled:
        records = Records(records.images, None, records.units)
    sealer = load_sealer(service)
    facts = FACTS | ({"unit": "person", "max_records_per_unit": 3} if units else {})
    written = write_snapshot(service, sealer, facts=facts, records=records)
    assert _same(_read(service, sealer, written), records)
    assert written.records == 6
    assert "/" not in written.location


def test_a_snapshot_larger_than_a_frame_is_read_as_written(service: Settings) -> None:
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (5, 1024, 1024, 1), dtype=np.uint8)
    sealer = load_sealer(service)
    written = write_snapshot(
        service, sealer, facts=FACTS, records=Records(images, np.arange(5), None)
    )
    assert np.array_equal(_read(service, sealer, written).images, images)


def test_a_snapshots_file_is_sealed_and_the_owners_alone(service: Settings) -> None:
    images = np.zeros((64, 16, 16, 1), dtype=np.uint8)
    sealer = load_sealer(service)
    written = write_snapshot(
        service, sealer, facts=FACTS, records=Records(images, np.zeros(64, np.int64), None)
    )
    (path,) = service.snapshots_folder.iterdir()
    assert path.name == written.location
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    content = path.read_bytes()
    assert bytes(16) not in content
    assert b"NUMPY" not in content


def test_equal_records_have_unlinkable_snapshots(service: Settings) -> None:
    sealer = load_sealer(service)
    one, two = (write_snapshot(service, sealer, facts=FACTS, records=_records()) for _ in range(2))
    assert one.hmac != two.hmac
    assert one.id != two.id


def test_another_snapshots_key_hmac_or_file_is_refused(service: Settings) -> None:
    sealer = load_sealer(service)
    one = write_snapshot(service, sealer, facts=FACTS, records=_records(seed=1))
    two = write_snapshot(service, sealer, facts=FACTS, records=_records(seed=2))
    for other in (
        {"snapshot_id": two.id},
        {"location": two.location},
        {"sealed_key": two.sealed_key},
        {"hmac": two.hmac},
        {"location": f"../snapshots/{one.location}"},
    ):
        with pytest.raises(CustodyError):
            _read(service, sealer, one, **other)
    with pytest.raises(CustodyError):
        _read(service, Sealer(b"x" * 32), one)


def test_a_changed_file_is_refused(service: Settings) -> None:
    sealer = load_sealer(service)
    written = write_snapshot(service, sealer, facts=FACTS, records=_records())
    path = service.snapshots_folder / written.location
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(CustodyError):
            _read(service, sealer, written)
    path.write_bytes(content[:-1])
    with pytest.raises(CustodyError):
        _read(service, sealer, written)


def test_a_deleted_snapshot_is_gone(service: Settings) -> None:
    sealer = load_sealer(service)
    written = write_snapshot(service, sealer, facts=FACTS, records=_records())
    snapshots.delete_snapshot(service, written.location)
    snapshots.delete_snapshot(service, written.location)
    assert list(service.snapshots_folder.iterdir()) == []
    with pytest.raises(StorageUnavailable):
        _read(service, sealer, written)
    with pytest.raises(CustodyError):
        snapshots.delete_snapshot(service, "../keys/sealing.key")
    assert (service.keys_folder / "sealing.key").exists()


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_failed_write_leaves_nothing(
    service: Settings, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space")

    owner: object = os if step == "fsync" else Path
    monkeypatch.setattr(owner, step, fail)
    with pytest.raises(OSError, match="no space"):
        write_snapshot(service, load_sealer(service), facts=FACTS, records=_records())
    assert list(service.snapshots_folder.iterdir()) == []


def test_the_hmac_depends_on_every_part() -> None:
    records = _records(units=True)
    assert records.labels is not None
    assert records.units is not None
    images, labels, units = records.images.copy(), records.labels.copy(), records.units.copy()
    images[5, 2, 3, 1] ^= 1
    labels[5] += 1
    units[5] = "another"
    variants = [
        records,
        Records(images, records.labels, records.units),
        Records(records.images, labels, records.units),
        Records(records.images, records.labels, units),
        Records(records.images, None, records.units),
        Records(records.images, records.labels, None),
        Records(records.images.reshape(6, 4, 3, 2), records.labels, records.units),
        Records(records.images[:5], records.labels[:5], records.units[:5]),
    ]
    codes = {snapshots.snapshot_hmac(KEY, variant) for variant in variants}
    assert len(codes) == len(variants)
    assert snapshots.snapshot_hmac(b"l" * 32, records) not in codes
    # Layout in memory and width of the text type are no content.
    same = Records(np.asfortranarray(records.images), records.labels, records.units.astype("U99"))
    assert snapshots.snapshot_hmac(KEY, same) == snapshots.snapshot_hmac(KEY, records)


_unit_lists = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 255), st.integers(0, 2)), min_size=1, max_size=30
)


def _from_rows(rows: list[tuple[int, int, int]]) -> Records:
    return Records(
        np.array([pixel for _, pixel, _ in rows], dtype=np.uint8).reshape(-1, 1, 1, 1),
        np.array([label for _, _, label in rows], dtype=np.int64),
        np.array([f"u{unit}" for unit, _, _ in rows]),
    )


def _by_unit(records: Records) -> dict[str, list[tuple[int, int]]]:
    assert records.units is not None
    assert records.labels is not None
    found: dict[str, list[tuple[int, int]]] = {}
    for unit, image, label in zip(
        records.units.tolist(), records.images, records.labels.tolist(), strict=True
    ):
        found.setdefault(unit, []).append((int(image[0, 0, 0]), label))
    return {unit: sorted(kept) for unit, kept in found.items()}


@given(_unit_lists, st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_each_unit_keeps_its_choice_whatever_the_others_hold(
    rows: list[tuple[int, int, int]], limit: int, random: Any
) -> None:
    kept = _by_unit(snapshots.keep_per_unit(_from_rows(rows), limit, KEY))
    counts: dict[int, int] = {}
    for unit, _, _ in rows:
        counts[unit] = counts.get(unit, 0) + 1
    assert {unit: len(chosen) for unit, chosen in kept.items()} == {
        f"u{unit}": min(count, limit) for unit, count in counts.items()
    }
    # A neighbour: one unit less, and the records in another order.
    for unit in counts:
        others = [row for row in rows if row[0] != unit]
        if not others:
            continue
        random.shuffle(others)
        neighbour = _by_unit(snapshots.keep_per_unit(_from_rows(others), limit, KEY))
        assert neighbour == {name: chosen for name, chosen in kept.items() if name != f"u{unit}"}


def test_the_choice_is_by_a_secret_key() -> None:
    records = _from_rows([(0, pixel, 0) for pixel in range(256)])
    chosen = {
        _by_unit(snapshots.keep_per_unit(records, 1, bytes([key]) * 32))["u0"][0][0]
        for key in range(64)
    }
    assert len(chosen) > 40


def test_kept_records_stay_in_order(service: Settings) -> None:
    records = _records(9, units=True)
    kept = snapshots.keep_per_unit(records, 2, KEY)
    assert kept.units is not None
    assert len(kept) == 6
    positions = [
        next(i for i in range(9) if np.array_equal(records.images[i], image))
        for image in kept.images
    ]
    assert positions == sorted(positions)


def test_a_written_snapshot_is_bounded_per_unit(service: Settings) -> None:
    sealer = load_sealer(service)
    facts = FACTS | {"unit": "person", "max_records_per_unit": 2}
    written = write_snapshot(service, sealer, facts=facts, records=_records(9, units=True))
    read = _read(service, sealer, written)
    assert written.records == len(read) == 6
    assert written.owner_warning is not None  # three units, four declared


def test_the_owner_is_warned_of_fewer_units_than_declared() -> None:
    assert snapshots.owner_warning(_records(4), FACTS) is None
    assert snapshots.owner_warning(_records(5), FACTS) is None
    warning = snapshots.owner_warning(_records(3), FACTS)
    assert warning is not None
    assert warning.startswith("not private")
    # Units count, not records.
    assert snapshots.owner_warning(_records(9, units=True), FACTS) is not None
    assert snapshots.owner_warning(_records(12, units=True), FACTS) is None
