"""Keys and sealing: what is made once, what opens, and what never does."""

from __future__ import annotations

import io
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from accounting.certificates import key_id
from worker import custody
from worker.custody import CustodyError, Sealer
from worker.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "deep" / "home")


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _pem(key: Ed25519PrivateKey | X25519PrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def test_keys_are_made_for_the_owner_alone(settings: Settings) -> None:
    custody.ensure_keys(settings)
    folders = [settings.home.parent, settings.home, settings.keys_folder]
    assert [_mode(folder) for folder in folders] == [0o700] * 3
    files = [path for path in settings.home.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {_mode(path) for path in files} == {0o600}
    assert len((settings.keys_folder / "sealing.key").read_bytes()) == 32


def test_an_existing_home_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    custody.ensure_keys(Settings(home=tmp_path))
    assert _mode(tmp_path) == 0o755
    assert _mode(tmp_path / "keys") == 0o700


def test_keys_are_never_overwritten(settings: Settings) -> None:
    custody.ensure_keys(settings)
    before = {path: path.read_bytes() for path in settings.home.rglob("*") if path.is_file()}
    custody.ensure_keys(settings)
    after = {path: path.read_bytes() for path in settings.home.rglob("*") if path.is_file()}
    assert after == before


def test_processes_that_race_agree_on_one_key(settings: Settings) -> None:
    script = (
        "from worker import custody; from worker.settings import get_settings\n"
        "s = get_settings(); custody.ensure_keys(s)\n"
        "print(custody.key_id(custody.load_signing_key(s).public_key()))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=settings.environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    printed = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert len(printed) == 1


@pytest.mark.parametrize("name", ["sealing.key", "signing.pem"])
def test_a_key_others_can_read_is_refused(settings: Settings, name: str) -> None:
    custody.ensure_keys(settings)
    (settings.keys_folder / name).chmod(0o640)
    with pytest.raises(CustodyError, match=name):
        custody.ensure_keys(settings)


def test_missing_keys_are_named(settings: Settings) -> None:
    with pytest.raises(CustodyError, match=r"sealing\.key"):
        custody.load_sealer(settings)
    with pytest.raises(CustodyError, match=r"signing\.pem"):
        custody.load_signing_key(settings)


def test_keys_from_the_settings_need_no_file(settings: Settings) -> None:
    key = Ed25519PrivateKey.generate()
    given_keys = Settings.model_validate(
        {"home": settings.home, "sealing_key": "5a" * 32, "signing_key": _pem(key)}
    )
    custody.ensure_keys(given_keys)
    assert not (given_keys.keys_folder / "sealing.key").exists()
    assert not (given_keys.keys_folder / "signing.pem").exists()
    sealed = Sealer(b"\x5a" * 32).seal(b"data", b"here")
    assert custody.load_sealer(given_keys).open(sealed, b"here") == b"data"
    assert list(custody.load_public_keys(given_keys)) == [key_id(key.public_key())]


@pytest.mark.parametrize("text", ["not a key", _pem(X25519PrivateKey.generate())])
def test_another_kind_of_signing_key_is_refused(settings: Settings, text: str) -> None:
    bad = Settings.model_validate({"home": settings.home, "signing_key": text})
    with pytest.raises(CustodyError) as raised:
        custody.ensure_keys(bad)
    assert text not in str(raised.value)


def test_a_signing_key_is_rotated(settings: Settings) -> None:
    custody.ensure_keys(settings)
    before = key_id(custody.load_signing_key(settings).public_key())
    made = custody.rotate_signing_key(settings)
    assert made != before
    assert key_id(custody.load_signing_key(settings).public_key()) == made
    assert set(custody.load_public_keys(settings)) == {before, made}
    assert _mode(settings.keys_folder / custody.SIGNING_FILE) & 0o077 == 0
    assert [p.name for p in settings.keys_folder.iterdir() if p.name.startswith(".")] == []


def test_a_signing_key_of_the_settings_is_rotated_there(settings: Settings) -> None:
    held = Settings(home=settings.home, signing_key=SecretStr(_pem(Ed25519PrivateKey.generate())))
    with pytest.raises(CustodyError, match="settings"):
        custody.rotate_signing_key(held)


def test_earlier_signing_keys_stay_published(settings: Settings) -> None:
    custody.ensure_keys(settings)
    first = custody.load_signing_key(settings)
    second = Ed25519PrivateKey.generate()
    changed = Settings.model_validate({"home": settings.home, "signing_key": _pem(second)})
    custody.ensure_keys(changed)
    document = custody.public_keys(changed)
    assert {record["key_id"] for record in document["keys"]} == {
        key_id(first.public_key()),
        key_id(second.public_key()),
    }
    keys = custody.parse_public_keys(json.loads(json.dumps(document)))
    message = b"certificate"
    keys[key_id(first.public_key())].verify(first.sign(message), message)


def test_a_changed_public_record_is_refused(settings: Settings) -> None:
    custody.ensure_keys(settings)
    (path,) = (settings.keys_folder / "public").iterdir()
    record = json.loads(path.read_text())
    other = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    record["public_key"] = custody._base64url(other)
    path.write_text(json.dumps(record))
    with pytest.raises(CustodyError, match="does not match"):
        custody.public_keys(settings)
    with pytest.raises(CustodyError, match="does not match"):
        custody.parse_public_keys({"keys": [record]})


@pytest.mark.parametrize(
    "document", [None, {}, {"keys": 3}, {"keys": [{}]}, {"keys": [{"public_key": "*"}]}, []]
)
def test_a_document_that_is_none_is_refused(document: object) -> None:
    with pytest.raises(CustodyError):
        custody.parse_public_keys(document)


@given(st.binary(max_size=200), st.binary(max_size=20))
def test_sealed_bytes_open_with_key_and_context_alone(data: bytes, context: bytes) -> None:
    sealer = Sealer(b"k" * 32)
    sealed = sealer.seal(data, context)
    assert sealer.open(sealed, context) == data
    assert sealer.seal(data, context) != sealed
    with pytest.raises(CustodyError):
        sealer.open(sealed, context + b"x")
    with pytest.raises(CustodyError):
        Sealer(b"l" * 32).open(sealed, context)


@given(st.data())
def test_changed_sealed_bytes_do_not_open(data: st.DataObject) -> None:
    sealer = Sealer(b"k" * 32)
    sealed = bytearray(sealer.seal(b"some secret", b"context"))
    position = data.draw(st.integers(0, len(sealed) - 1))
    sealed[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CustodyError):
        sealer.open(bytes(sealed), b"context")
    with pytest.raises(CustodyError):
        sealer.open(bytes(sealed[:position]), b"context")


def _seal_stream(data: bytes, pieces: int = 1) -> bytes:
    sink = io.BytesIO()
    writer = custody.SealedWriter(sink, b"k" * 32, b"name")
    size = max(1, -(-len(data) // pieces))
    for start in range(0, len(data), size):
        writer.write(data[start : start + size])
    writer.finish()
    return sink.getvalue()


def _open_stream(sealed: bytes, key: bytes = b"k" * 32, context: bytes = b"name") -> bytes:
    return b"".join(custody.open_stream(io.BytesIO(sealed), key, context))


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 1_000])
@pytest.mark.parametrize("pieces", [1, 3, 50])
def test_a_stream_opens_whole(monkeypatch: pytest.MonkeyPatch, size: int, pieces: int) -> None:
    monkeypatch.setattr(custody, "CHUNK_BYTES", 100)
    data = bytes(index % 251 for index in range(size))
    sealed = _seal_stream(data, pieces)
    assert _open_stream(sealed) == data
    frames = max(1, -(-size // 100))
    assert len(sealed) == 5 + size + frames * 20


def test_a_stream_can_not_be_cut_reordered_or_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custody, "CHUNK_BYTES", 100)
    sealed = _seal_stream(bytes(250))
    frame = 4 + 100 + 16
    first, second, last = sealed[5 : 5 + frame], sealed[5 + frame : 5 + 2 * frame], sealed[245:]
    magic = sealed[:5]
    assert magic + first + second + last == sealed
    for changed in (
        magic + first + second,  # cut at a frame's end
        magic + first,
        magic,
        sealed[:-1],
        b"",
        magic + second + first + last,  # reordered
        magic + first + first + second + last,  # repeated
        sealed + b"\0",
        sealed + last,
        bytes([*sealed[:50], sealed[50] ^ 1, *sealed[51:]]),
    ):
        with pytest.raises(CustodyError):
            _open_stream(changed)
    with pytest.raises(CustodyError):
        _open_stream(sealed, key=b"l" * 32)
    with pytest.raises(CustodyError):
        _open_stream(sealed, context=b"other")


def test_keyed_hashes_tell_lists_apart() -> None:
    assert custody.keyed_hash(b"k", b"ab", b"c") != custody.keyed_hash(b"k", b"a", b"bc")
    assert custody.keyed_hash(b"k", b"a") != custody.keyed_hash(b"l", b"a")
    assert custody.derive_key(b"s" * 32, "one") != custody.derive_key(b"s" * 32, "two")


def test_writing_once_leaves_the_first_content_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "name"
    assert custody.write_once(path, b"first")
    assert not custody.write_once(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(path.parent.iterdir()) == [path]
    assert _mode(path) == 0o600
