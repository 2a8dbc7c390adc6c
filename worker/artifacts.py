"""Released batches: staged by an attempt, put in place only if absent, read by name.

A store is a local folder, or any place that fsspec reaches (``s3://bucket/prefix`` with s3fs
installed). A **location** is a name relative to the store, so the ledger never holds a machine's
path and a store can be moved.

An attempt stages its bytes under a name of its own, which no download serves. ``publish`` moves
them to the job's one place if nothing lies there. An equal artefact there is the same release
(a crash between publishing and the ledger's commit, then a retry with the same draws); another
one is refused, because only one artefact of a job may ever be released.

Locally, file and folder are synchronised before ``publish`` returns, so the ledger never names
bytes that a power cut can take back.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, cast

import fsspec

from accounting.errors import EpsilondError, NotFound
from worker.custody import StorageUnavailable, make_private_folder, sync_folder, write_once

_LOCATION: Final = re.compile(r"(staging|releases)/[A-Za-z0-9_-]{1,128}(\.[a-z0-9]{1,8})?")
_JOB_ID: Final = re.compile(r"job_[0-9a-f]{32}")


class ArtifactError(EpsilondError):
    """An artefact could not be stored, or is not the one that was stored."""

    status = 500
    code = "artifact_error"
    title = "Artefact error"


@dataclass(frozen=True)
class Staged:
    """An attempt's bytes, stored but not released.

    Attributes:
        location: where they lie, relative to the store.
        job_id: the job they belong to.
        sha256: their digest in hexadecimal.
        size: their length in bytes.
    """

    location: str
    job_id: str
    sha256: str
    size: int


class ArtifactStore:
    """One place for artefacts.

    Args:
        url: a folder's path, or a URL that fsspec understands.

    Raises:
        ArtifactError: no file system answers to the URL here.
    """

    def __init__(self, url: str) -> None:
        try:
            filesystem, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ArtifactError("no file system answers to the artefact store's URL") from error
        self._place: _Place
        if "file" in _protocols(filesystem):
            self._place = _LocalPlace(Path(root))
        else:
            self._place = _RemotePlace(filesystem, root)

    def stage(self, job_id: str, attempt: int, data: bytes) -> Staged:
        """Store an attempt's bytes under a new name of its own.

        Raises:
            ArtifactError: the store did not take them.
        """
        _check_job_id(job_id)
        location = f"staging/{job_id}-{attempt}-{secrets.token_hex(8)}"
        if not self._place.create(location, data):
            raise ArtifactError("a staged artefact has this name already")
        return Staged(location, job_id, hashlib.sha256(data).hexdigest(), len(data))

    def publish(self, staged: Staged, sha256: str) -> str:
        """Put a staged artefact in its job's place, if nothing else lies there.

        The staged bytes are read back and must still have the digest ``sha256``. The staged copy
        goes away. Calling it again, or from another attempt with equal bytes, changes nothing.

        Returns:
            The location to write into the ledger.

        Raises:
            ArtifactError: the staged bytes changed or are gone, or another artefact is in place.
        """
        _check_job_id(staged.job_id)
        _checked(staged.location, "staging")
        location = f"releases/{staged.job_id}.npz"
        if staged.sha256 != sha256:
            raise ArtifactError("the digest is not the staged artefact's")
        if self._place.exists(staged.location):
            data = self._place.read(staged.location)
            if hashlib.sha256(data).hexdigest() != sha256:
                raise ArtifactError("the staged artefact was changed")
            self._place.create(location, data)
        elif not self._place.exists(location):
            raise ArtifactError("the staged artefact is gone")
        if hashlib.sha256(self._place.read(location)).hexdigest() != sha256:
            raise ArtifactError("another artefact of this job is in place")
        self.delete_staged(staged)
        return location

    def delete_staged(self, staged: Staged) -> None:
        """Remove a staged artefact; nothing happens when it is gone already."""
        self._place.remove(_checked(staged.location, "staging"))

    def sweep_staged(self, job_id: str) -> int:
        """Remove everything that attempts of a finished job left staged; how many there were."""
        _check_job_id(job_id)
        names = [name for name in self._place.names("staging") if name.startswith(f"{job_id}-")]
        for name in names:
            self._place.remove(f"staging/{name}")
        return len(names)

    def open(self, location: str) -> BinaryIO:
        """A released artefact as a binary file, which the caller closes.

        Raises:
            NotFound: nothing lies there, or the location is not a release's.
        """
        return self._place.open(_checked(location, "releases"))

    def read(self, location: str) -> bytes:
        """All bytes of a released artefact.

        Raises:
            NotFound: nothing lies there, or the location is not a release's.
        """
        with self.open(location) as file:
            return file.read()


class _Place(Protocol):
    """What a store needs of a file system. ``create`` is atomic and False where the name exists."""

    def create(self, location: str, data: bytes) -> bool: ...
    def exists(self, location: str) -> bool: ...
    def read(self, location: str) -> bytes: ...
    def open(self, location: str) -> BinaryIO: ...
    def remove(self, location: str) -> None: ...
    def names(self, folder: str) -> list[str]: ...


class _LocalPlace:
    """A folder. Files are owner-only; a link is what makes a creation exclusive and whole."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, location: str, data: bytes) -> bool:
        try:
            return write_once(self._root / location, data)
        except OSError as error:
            # A full disk, say. The text names no path of this machine.
            raise StorageUnavailable(
                f"the artefact store refused a file: {_reason(error)}"
            ) from error

    def exists(self, location: str) -> bool:
        return (self._root / location).is_file()

    def read(self, location: str) -> bytes:
        with self.open(location) as file:
            return file.read()

    def open(self, location: str) -> BinaryIO:
        try:
            return (self._root / location).open("rb")
        except FileNotFoundError:
            raise NotFound("no such artefact") from None

    def remove(self, location: str) -> None:
        path = self._root / location
        with suppress(FileNotFoundError):
            path.unlink()
            sync_folder(path.parent)

    def names(self, folder: str) -> list[str]:
        return os.listdir(make_private_folder(self._root / folder))


class _RemotePlace:
    """Any other fsspec file system. ``mode="create"`` is exclusive where the store supports it
    (Amazon S3 does, by a conditional write); ``publish`` reads back what lies there either way.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self._files = filesystem
        self._root = root.rstrip("/")

    def _path(self, location: str) -> str:
        return f"{self._root}/{location}"

    def create(self, location: str, data: bytes) -> bool:
        try:
            self._files.makedirs(self._path(location).rsplit("/", 1)[0], exist_ok=True)
            self._files.pipe_file(self._path(location), data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            raise StorageUnavailable(
                f"the artefact store refused a file: {_reason(error)}"
            ) from error
        return True

    def exists(self, location: str) -> bool:
        self._files.invalidate_cache()
        return bool(self._files.exists(self._path(location)))

    def read(self, location: str) -> bytes:
        try:
            return bytes(self._files.cat_file(self._path(location)))
        except FileNotFoundError:
            raise NotFound("no such artefact") from None

    def open(self, location: str) -> BinaryIO:
        try:
            return cast(BinaryIO, self._files.open(self._path(location), "rb"))
        except FileNotFoundError:
            raise NotFound("no such artefact") from None

    def remove(self, location: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(location))

    def names(self, folder: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rsplit("/", 1)[-1] for path in found]


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _check_job_id(job_id: str) -> None:
    if not _JOB_ID.fullmatch(job_id):
        raise ArtifactError("not a job's id")


def _checked(location: str, folder: str) -> str:
    """The location, if it is one that this module makes; anything else could leave the store."""
    if not _LOCATION.fullmatch(location) or not location.startswith(f"{folder}/"):
        raise NotFound("no such artefact")
    return location


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else type(error).__name__
