"""Custody of secrets: the service's keys, sealing at rest, and keyed hashes.

* The **sealing key** (AES-256-GCM) wraps each snapshot's own key and each job's seed.
* The **signing key** (Ed25519) signs certificates. Public halves of earlier signing keys are kept,
  so that old certificates stay checkable.
* **Derived keys** come from HKDF-SHA256 with the purpose as its info, so that one secret never
  serves two uses.

Key files are made once, by :func:`ensure_keys`; only :func:`rotate_signing_key` replaces one. A key
file that others can read is refused. Nothing here logs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import secrets
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from accounting.certificates import key_id
from accounting.errors import EpsilondError
from worker.settings import Settings

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
SEALING_FILE: Final = "sealing.key"
SIGNING_FILE: Final = "signing.pem"
PUBLIC_FOLDER: Final = "public"
CHUNK_BYTES: Final = 4 * 2**20
_STREAM_MAGIC: Final = b"EPSD\x01"


class StorageUnavailable(EpsilondError):
    """A file could not be read or written just now: a full disk, a store or mount that is away.

    Another attempt may succeed, so a job that meets it goes on later.
    """

    status = 503
    code = "storage_unavailable"
    title = "Storage unavailable"


class CustodyError(EpsilondError):
    """A key is missing or unusable, or sealed bytes were changed. The text holds no secret."""

    status = 500
    code = "custody_error"
    title = "Custody error"


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


def make_private_folder(folder: Path) -> Path:
    """Make a folder, and what is missing above it, that only this user can enter.

    A folder that exists keeps its mode: it may be a mounted volume, or shared on purpose.
    """
    for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        # Another process may make it in between, with this very mode.
        missing.mkdir(mode=0o700, exist_ok=True)
    return folder


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_once(path: Path, data: bytes) -> bool:
    """Write an owner-only file under a name that must not exist yet; durable when it returns.

    The name appears with the whole content or not at all.

    Returns:
        False when the name existed already; its content is then left as it was.
    """
    make_private_folder(path.parent)
    staged = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            # A link fails where the name exists; a rename would replace it.
            os.link(staged, path)
        except FileExistsError:
            return False
        sync_folder(path.parent)
        return True
    finally:
        with suppress(FileNotFoundError):
            staged.unlink()


def _read_private(path: Path) -> bytes:
    """The bytes of a key file.

    Raises:
        CustodyError: the file is missing, or readable by others.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise CustodyError(f"key file {path.name} is readable by others: its mode must be 0600")
        return path.read_bytes()
    except FileNotFoundError:
        raise CustodyError(f"key file {path.name} is missing: run `epsilond init`") from None


# --------------------------------------------------------------------------------------------------
# Keys
# --------------------------------------------------------------------------------------------------


def ensure_keys(settings: Settings) -> None:
    """Make the home folder and whichever keys are absent. Safe to call from several processes.

    Keys given in the settings get no file, except that the public half of the signing key in use
    is always recorded under ``home/keys/public``.

    Raises:
        CustodyError: a key that exists can't be used.
    """
    make_private_folder(settings.home)
    make_private_folder(settings.keys_folder)
    if not settings.sealing_key.get_secret_value():
        write_once(settings.keys_folder / SEALING_FILE, secrets.token_bytes(KEY_BYTES))
    if not settings.signing_key.get_secret_value():
        write_once(settings.keys_folder / SIGNING_FILE, _new_signing_key())
    load_sealer(settings)
    _publish(settings, load_signing_key(settings).public_key())


def rotate_signing_key(settings: Settings) -> str:
    """Replaces the key that signs certificates, and returns the new one's ``key_id``.

    Its public half is published before anything is signed with it, and those of earlier keys stay:
    old certificates still verify. A worker reads the key anew for each certificate.

    Raises:
        CustodyError: the signing key comes from the settings, which is where it is then changed.
    """
    if settings.signing_key.get_secret_value():
        raise CustodyError("the signing key comes from the settings: change it there")
    ensure_keys(settings)
    pem = _new_signing_key()
    public_key = cast(Ed25519PrivateKey, load_pem_private_key(pem, password=None)).public_key()
    _publish(settings, public_key)
    place = settings.keys_folder / SIGNING_FILE
    fresh = place.with_name(f".{SIGNING_FILE}.{secrets.token_hex(8)}")
    write_once(fresh, pem)
    os.replace(fresh, place)
    sync_folder(place.parent)
    return key_id(public_key)


def _new_signing_key() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )


def _publish(settings: Settings, public_key: Ed25519PublicKey) -> None:
    record = {
        "key_id": key_id(public_key),
        "public_key": _base64url(public_key.public_bytes_raw()),
        "created_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    write_once(
        settings.keys_folder / PUBLIC_FOLDER / f"{record['key_id']}.json",
        json.dumps(record).encode(),
    )


def load_sealer(settings: Settings) -> Sealer:
    """The sealer under the service's sealing key.

    Raises:
        CustodyError: the key is missing, readable by others, or not 32 bytes.
    """
    text = settings.sealing_key.get_secret_value()
    key = bytes.fromhex(text) if text else _read_private(settings.keys_folder / SEALING_FILE)
    if len(key) != KEY_BYTES:
        raise CustodyError(f"the sealing key must be {KEY_BYTES} bytes")
    return Sealer(key)


def load_signing_key(settings: Settings) -> Ed25519PrivateKey:
    """The key that signs certificates.

    Raises:
        CustodyError: the key is missing, readable by others, or not an Ed25519 key in PEM.
    """
    text = settings.signing_key.get_secret_value()
    pem = text.encode() if text else _read_private(settings.keys_folder / SIGNING_FILE)
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        # The cause may quote the key's text, so it is not chained.
        raise CustodyError("the signing key is not an unencrypted PEM private key") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise CustodyError("the signing key is not an Ed25519 key")
    return key


def public_keys(settings: Settings) -> dict[str, list[dict[str, str]]]:
    """The JSON of ``/.well-known/epsilond-keys.json``: every signing key ever used, oldest first.

    Each has ``key_id``, ``public_key`` (the raw 32 bytes in base64url without padding) and
    ``created_at`` (when this installation first used it).

    Raises:
        CustodyError: a record is not what its name says.
    """
    records = []
    for path in (settings.keys_folder / PUBLIC_FOLDER).glob("[0-9a-f]*.json"):
        try:
            record = json.loads(path.read_bytes())
            parsed = {name: str(record[name]) for name in ("key_id", "public_key", "created_at")}
            identity = key_id(_public_key(parsed["public_key"]))
        except (ValueError, KeyError, TypeError):
            raise CustodyError(f"public key record {path.name} is damaged") from None
        if identity != parsed["key_id"] or path.stem != identity:
            raise CustodyError(f"public key record {path.name} does not match its key")
        records.append(parsed)
    return {"keys": sorted(records, key=lambda record: (record["created_at"], record["key_id"]))}


def load_public_keys(settings: Settings) -> dict[str, Ed25519PublicKey]:
    """The same keys by ``key_id``, as a certificate's check takes them."""
    return parse_public_keys(public_keys(settings))


def parse_public_keys(document: object) -> dict[str, Ed25519PublicKey]:
    """Keys by ``key_id`` from the published JSON, wherever it was read.

    The identity is computed from the key itself; a document that says otherwise is refused.

    Raises:
        CustodyError: the document is not of the published form.
    """
    try:
        keys = {}
        for record in document["keys"]:  # type: ignore[index]  # a wrong type is caught below
            key = _public_key(record["public_key"])
            if record["key_id"] != key_id(key):
                raise CustodyError("a published key does not match its key_id")
            keys[key_id(key)] = key
    except (ValueError, KeyError, TypeError):
        raise CustodyError("not a document of public keys") from None
    return keys


def _public_key(text: str) -> Ed25519PublicKey:
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error as error:
        raise ValueError("not base64url") from error
    return Ed25519PublicKey.from_public_bytes(raw)


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


# --------------------------------------------------------------------------------------------------
# Sealing
# --------------------------------------------------------------------------------------------------


class Sealer:
    """AES-256-GCM with a random 96-bit nonce, for small secrets such as keys and seeds.

    The context is authenticated and not stored: bytes sealed for one object do not open as
    another's. The form is the nonce, then the ciphertext with its tag.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise CustodyError(f"a sealing key must be {KEY_BYTES} bytes")
        self._cipher = AESGCM(key)

    def seal(self, data: bytes, context: bytes) -> bytes:
        """The sealed form of ``data``, which opens only with the same ``context``."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, context)

    def open(self, sealed: bytes, context: bytes) -> bytes:
        """The bytes that were sealed.

        Raises:
            CustodyError: another key, another context, or changed bytes.
        """
        if len(sealed) < NONCE_BYTES + TAG_BYTES:
            raise CustodyError("sealed bytes are too short")
        try:
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], context)
        except InvalidTag:
            raise CustodyError("sealed bytes do not open with this key and context") from None


class SealedWriter:
    """Seals one long stream into a file, under a key that seals nothing else.

    The form is a magic, then frames: a 4-byte length, then AES-256-GCM of at most
    :data:`CHUNK_BYTES` of plain bytes. The nonce is the frame's number, unique because the key is
    fresh, so frames can't be reordered; the associated data holds the context and whether the
    frame is the last, so the stream can't be cut short (the STREAM construction of Hoang,
    Reyhanitabar, Rogaway and Vizár, 2015).
    """

    def __init__(self, sink: BinaryIO, key: bytes, context: bytes) -> None:
        self._sink = sink
        self._cipher = AESGCM(key)
        self._context = context
        self._frame = 0
        self._pending = bytearray()
        sink.write(_STREAM_MAGIC)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        # A full chunk waits until more follows, because only then is it known not to be the last.
        for start in range(0, len(view), CHUNK_BYTES):
            self._pending += view[start : start + CHUNK_BYTES]
            if len(self._pending) > CHUNK_BYTES:
                self._flush(bytes(self._pending[:CHUNK_BYTES]), last=False)
                del self._pending[:CHUNK_BYTES]
        return len(view)

    def finish(self) -> None:
        """Write the last frame. Without it the stream does not open."""
        self._flush(bytes(self._pending), last=True)
        self._pending.clear()

    def _flush(self, chunk: bytes, *, last: bool) -> None:
        sealed = self._cipher.encrypt(
            self._frame.to_bytes(NONCE_BYTES, "big"), chunk, _frame_context(self._context, last)
        )
        self._sink.write(struct.pack(">I", len(sealed)) + sealed)
        self._frame += 1


def open_stream(source: BinaryIO, key: bytes, context: bytes) -> Iterator[bytes]:
    """The plain chunks of a stream that :class:`SealedWriter` wrote, each checked before it is
    yielded.

    Raises:
        CustodyError: the stream was changed, reordered, cut short or made with another key.
    """
    if source.read(len(_STREAM_MAGIC)) != _STREAM_MAGIC:
        raise CustodyError("not a sealed stream")
    cipher = AESGCM(key)
    frame = 0
    header = source.read(4)
    while True:
        if len(header) != 4:
            raise CustodyError("the sealed stream is cut short")
        (size,) = struct.unpack(">I", header)
        if not TAG_BYTES <= size <= CHUNK_BYTES + TAG_BYTES:
            raise CustodyError("the sealed stream has a frame of a wrong size")
        sealed = source.read(size)
        header = source.read(4)
        last = not header
        try:
            chunk = cipher.decrypt(
                frame.to_bytes(NONCE_BYTES, "big"), sealed, _frame_context(context, last)
            )
        except InvalidTag:
            raise CustodyError("the sealed stream was changed or cut short") from None
        yield chunk
        if last:
            return
        frame += 1


def _frame_context(context: bytes, last: bool) -> bytes:
    return (b"\x01" if last else b"\x00") + context


# --------------------------------------------------------------------------------------------------
# Keyed hashes
# --------------------------------------------------------------------------------------------------


def derive_key(secret: bytes, purpose: str) -> bytes:
    """A 32-byte key for one purpose, by HKDF-SHA256. The secret must already be uniform."""
    kdf = HKDF(
        algorithm=SHA256(), length=KEY_BYTES, salt=None, info=b"epsilond/" + purpose.encode()
    )
    return kdf.derive(secret)


def keyed_hash(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of the parts, each preceded by its length so that no two lists collide."""
    code = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        code.update(struct.pack(">Q", len(part)))
        code.update(part)
    return code.digest()
