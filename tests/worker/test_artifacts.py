"""The artefact store, locally and on another fsspec file system."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from accounting.errors import NotFound
from worker.artifacts import ArtifactError, ArtifactStore, Staged
from worker.custody import StorageUnavailable

JOB = "job_" + "a1" * 16
OTHER = "job_" + "b2" * 16


@pytest.fixture(params=["local", "file-url", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "memory":
        # fsspec keeps one memory file system a process, so each test has its own root.
        root = f"/{secrets.token_hex(8)}"
        yield f"memory:/{root}"
        if fsspec.filesystem("memory").exists(root):
            fsspec.filesystem("memory").rm(root, recursive=True)
    else:
        yield f"{'file://' if request.param == 'file-url' else ''}{tmp_path}/store"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_published_artefact_is_read_back(url: str) -> None:
    store = ArtifactStore(url)
    staged = store.stage(JOB, 1, b"batch")
    assert (staged.sha256, staged.size) == (_digest(b"batch"), 5)
    location = store.publish(staged, _digest(b"batch"))
    assert not location.startswith("/")
    # Another store on the same place, as another process has.
    again = ArtifactStore(url)
    assert again.read(location) == b"batch"
    with again.open(location) as file:
        assert file.read(2) == b"ba"
    with pytest.raises(NotFound):
        store.read(staged.location)


def test_a_staged_artefact_is_not_served(url: str) -> None:
    store = ArtifactStore(url)
    staged = store.stage(JOB, 1, b"not yet released")
    with pytest.raises(NotFound):
        store.read(staged.location)


def test_an_equal_artefact_is_the_same_release(url: str) -> None:
    store = ArtifactStore(url)
    first = store.stage(JOB, 1, b"batch")
    location = store.publish(first, first.sha256)
    assert store.publish(first, first.sha256) == location
    second = store.stage(JOB, 2, b"batch")
    assert store.publish(second, second.sha256) == location
    assert store.read(location) == b"batch"


def test_a_second_artefact_of_a_job_is_refused(url: str) -> None:
    store = ArtifactStore(url)
    first = store.stage(JOB, 1, b"batch")
    location = store.publish(first, first.sha256)
    second = store.stage(JOB, 2, b"another")
    with pytest.raises(ArtifactError, match="another artefact"):
        store.publish(second, second.sha256)
    assert store.read(location) == b"batch"
    # Another job's place is another one.
    other = store.stage(OTHER, 1, b"another")
    assert store.publish(other, other.sha256) != location


def test_a_wrong_digest_publishes_nothing(url: str) -> None:
    store = ArtifactStore(url)
    staged = store.stage(JOB, 1, b"batch")
    with pytest.raises(ArtifactError, match="digest"):
        store.publish(staged, _digest(b"another"))
    with pytest.raises(NotFound):
        store.read(f"releases/{JOB}.npz")


def test_a_staged_artefact_that_is_gone_is_not_published(url: str) -> None:
    store = ArtifactStore(url)
    staged = store.stage(JOB, 1, b"batch")
    store.delete_staged(staged)
    store.delete_staged(staged)
    with pytest.raises(ArtifactError, match="gone"):
        store.publish(staged, staged.sha256)


def test_what_attempts_left_is_swept(url: str) -> None:
    store = ArtifactStore(url)
    assert store.sweep_staged(JOB) == 0
    for attempt in (1, 2):
        store.stage(JOB, attempt, b"batch")
    other = store.stage(OTHER, 1, b"batch")
    assert store.sweep_staged(JOB) == 2
    assert store.sweep_staged(JOB) == 0
    store.publish(other, other.sha256)


@pytest.mark.parametrize(
    "location",
    [
        "releases/../staging/x",
        "../secret",
        "/etc/passwd",
        "releases/",
        "releases/a/b",
        "releases/.hidden",
        "",
        "staging/x",
    ],
)
def test_no_location_leads_out_of_the_store(url: str, location: str) -> None:
    with pytest.raises(NotFound):
        ArtifactStore(url).read(location)


@pytest.mark.parametrize("job_id", ["../x", "job_1", "JOB_" + "a" * 32, "job_" + "g" * 32])
def test_only_a_jobs_id_names_an_artefact(url: str, job_id: str) -> None:
    with pytest.raises(ArtifactError):
        ArtifactStore(url).stage(job_id, 1, b"batch")


def test_a_changed_staged_file_is_not_published(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    staged = store.stage(JOB, 1, b"batch")
    (tmp_path / staged.location).write_bytes(b"botch")
    with pytest.raises(ArtifactError, match="changed"):
        store.publish(staged, staged.sha256)
    assert not (tmp_path / "releases").exists()


def test_local_files_are_the_owners_alone(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "new"))
    staged = store.stage(JOB, 1, b"batch")
    store.publish(staged, staged.sha256)
    store.stage(JOB, 2, b"batch")
    modes = {
        (path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in (tmp_path / "new").rglob("*")
    }
    assert modes == {(True, 0o700), (False, 0o600)}


def test_a_full_disk_leaves_nothing_and_names_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = ArtifactStore(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageUnavailable) as raised:
            store.stage(JOB, 1, b"batch")
    assert str(tmp_path) not in str(raised.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ArtifactError):
        ArtifactStore("nosuchscheme://bucket/prefix")


def test_a_forged_staging_location_is_refused(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    (tmp_path / "secret").write_bytes(b"secret")
    forged = Staged("../secret", JOB, _digest(b"secret"), 6)
    with pytest.raises(NotFound):
        store.publish(forged, forged.sha256)
    with pytest.raises(NotFound):
        store.delete_staged(forged)
    assert (tmp_path / "secret").read_bytes() == b"secret"
