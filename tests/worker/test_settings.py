"""Settings: their checks, what follows from them, and their documentation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from sqlalchemy import make_url

from worker.settings import Settings, get_settings

ROOT = Path(__file__).resolve().parents[2]


def test_every_setting_is_documented_with_its_default() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `EPSILOND_([A-Z_]+)` \| ([^|]+?) \|", page, re.MULTILINE))
    assert set(rows) == {name.upper() for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        if isinstance(field.default, int | float):
            assert float(rows[name.upper()].strip("`")) == float(field.default), name


def test_only_the_settings_module_reads_the_environment() -> None:
    # Writing a variable for a library of one's own process is no reading.
    reading = re.compile(r"\bgetenv\b|\benviron\b(?!\[[^\]]+\] = )")
    readers = {
        str(path.relative_to(ROOT))
        for part in ("accounting", "api", "models", "worker")
        for path in (ROOT / part).rglob("*.py")
        if reading.search(path.read_text())
    }
    assert readers == {"worker/settings.py"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 0),
        ("port", 65_536),
        ("lease_seconds", 0),
        ("lease_seconds", -1),
        ("lease_seconds", float("nan")),
        ("lease_seconds", float("inf")),
        ("sweep_seconds", 0),
        ("job_seconds", 604_801),
        ("max_attempts", 0),
        ("max_records", 0),
        ("max_upload_bytes", -1),
        ("max_ratio", 0.5),
        ("max_ratio", float("inf")),
        ("worker_concurrency", 0),
        ("torch_threads", -1),
        ("accountant_megabytes", 1),
        ("sealing_key", "00" * 31),
        ("sealing_key", "zz" * 32),
        ("log_level", "LOUD"),
        ("host", ""),
        ("no_such_setting", 1),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValidationError) as raised:
        Settings.model_validate({name: value})
    assert [error["loc"] for error in raised.value.errors()] == [(name,)]


def test_a_lease_must_outlive_two_heartbeats() -> None:
    assert Settings(lease_seconds=10, heartbeat_seconds=5).lease_seconds == 10
    with pytest.raises(ValidationError, match="heartbeat_seconds"):
        Settings(lease_seconds=10, heartbeat_seconds=5.1)


def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings.model_validate({"sealing_key": "ab" * 32, "signing_key": "PEM TEXT"})
    shown = f"{settings!r} {settings} {settings.model_dump()}"
    assert "abab" not in shown
    assert "PEM TEXT" not in shown
    with pytest.raises(ValidationError) as raised:
        Settings.model_validate({"sealing_key": "ab" * 30})
    assert "abab" not in str(raised.value.errors()[0]["msg"])


def test_a_relative_home_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(home=Path("here"))
    monkeypatch.chdir("/")
    assert settings.home == tmp_path / "here"
    assert settings.snapshots_folder == tmp_path / "here" / "snapshots"
    assert not settings.home.exists()


@pytest.mark.parametrize("name", ["plain", "with space", "odd?name#1", "50%25 é"])
def test_the_default_database_url_names_a_file_in_home(tmp_path: Path, name: str) -> None:
    settings = Settings(home=tmp_path / name)
    assert make_url(settings.effective_database_url).database == str(
        tmp_path / name / "epsilond.db"
    )
    assert settings.effective_artifacts_url == str(tmp_path / name / "artifacts")


def test_given_urls_win_over_home() -> None:
    settings = Settings(database_url="postgresql+psycopg://host/name", artifacts_url="memory://x")
    assert settings.effective_database_url == "postgresql+psycopg://host/name"
    assert settings.effective_artifacts_url == "memory://x"


def test_a_child_process_sees_the_very_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A stray variable of this process must not reach the child.
    monkeypatch.setenv("EPSILOND_MAX_RECORDS", "7")
    monkeypatch.setenv("EPSILOND_PORT", "1234")
    settings = Settings.model_validate(
        {
            "home": tmp_path / "a b",
            "port": 4321,
            "max_records": 1_000,
            "heartbeat_seconds": 0.1,
            "sealing_key": "0f" * 32,
            "signing_key": "-----BEGIN\nline\n",
        }
    )
    script = (
        "from worker.settings import get_settings as g\n"
        "s = g()\n"
        "assert s is g()\n"
        "print(repr([getattr(s, n) for n in type(s).model_fields]))\n"
        "print(s.sealing_key.get_secret_value(), repr(s.signing_key.get_secret_value()))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script],
        env=settings.environment(),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    values = repr([getattr(settings, name) for name in Settings.model_fields])
    signing_key = settings.signing_key.get_secret_value()
    assert printed == f"{values}\n{'0f' * 32} {signing_key!r}\n"


def test_the_environment_keeps_what_is_not_ours() -> None:
    assert Settings().environment()["PATH"] == os.environ["PATH"]


def test_settings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    get_settings.cache_clear()
    try:
        monkeypatch.setenv("EPSILOND_PORT", "8111")
        assert get_settings().port == 8111
        monkeypatch.setenv("EPSILOND_PORT", "8222")
        assert get_settings().port == 8111
    finally:
        get_settings.cache_clear()


def test_settings_load_neither_torch_nor_the_web() -> None:
    script = (
        "import sys, worker.settings, worker.custody, worker.artifacts, worker.snapshots\n"
        "import worker.uploads, worker.catalogue, worker.app, worker.serve\n"
        "print(sorted({'torch', 'fastapi', 'starlette', 'diffusers'} & set(sys.modules)))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert printed == "[]\n"
