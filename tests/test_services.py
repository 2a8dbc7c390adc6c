"""The servers that the tests start themselves, and the list of what did not run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import redis

from tests.services import own_postgres, own_redis

ROOT = Path(__file__).parent.parent


def test_own_postgres_starts_and_leaves_nothing() -> None:
    above = [Path("/"), Path("/tmp"), *Path(sys.prefix).parents]  # noqa: S108 - only looked at
    modes = [folder.stat().st_mode for folder in above if folder.exists()]
    with own_postgres() as url:
        with psycopg.connect(url) as connection:
            row = connection.execute("SHOW data_directory").fetchone()
        assert row is not None
        folder = Path(row[0]).parent
        assert folder.exists()
    assert not folder.exists()
    assert [folder.stat().st_mode for folder in above if folder.exists()] == modes


def test_own_redis_starts_and_stops() -> None:
    with own_redis() as url, redis.Redis.from_url(url) as client:
        assert client.ping()
        process_id = int(client.info("server")["process_id"])
    assert not Path(f"/proc/{process_id}").exists()


def test_what_did_not_run_is_listed_with_its_command(tmp_path: Path) -> None:
    test = tmp_path / "test_three.py"
    test.write_text(
        "import pytest\n"
        "def test_needs_a_server():\n    pytest.skip('no PostgreSQL: none here')\n"
        "@pytest.mark.long\ndef test_long():\n    pass\n"
        "def test_fine():\n    pass\n"
    )
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", ROOT / "pyproject.toml",
         "--rootdir", tmp_path, "-m", "not long", test],
        cwd=ROOT, env=os.environ | {"COLUMNS": "100"}, capture_output=True, text=True,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    _, heading, listed = told.stdout.partition("NOT RUN")
    assert heading
    assert "test_needs_a_server: no PostgreSQL: none here" in listed
    assert "TEST_DATABASE_URL=postgresql://USER@HOST/postgres python -m pytest" in listed
    assert "tests of sizes that take long: 1" in listed
    assert "make test-long" in listed
    assert "test_fine" not in listed
