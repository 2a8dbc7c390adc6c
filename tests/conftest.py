"""Fixtures that every part's tests share, and the list of what did not run.

``database``        an :class:`accounting.tables.Database` with the newest tables, once on each of
                    SQLite and PostgreSQL
``database_url``    its URL, for tests that start processes
``sqlite_url``, ``postgres_url``
                    the same on one of the two
``empty_database_url``
                    once on each, without tables
``redis_url``       an empty Redis database of the test's own

Nothing is skipped silently: a test that did not run stands at the end under NOT RUN, with the
command that runs it.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from accounting.tables import Database
from tests.services import NoService, Postgres, Redis, postgres, redis_server

DATABASES = ("sqlite", "postgresql")


@pytest.fixture(autouse=True)
def _same_umask() -> Iterator[None]:
    """The command line narrows the umask of its process; called in this one, only for one test."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def _services() -> Iterator[ExitStack]:
    """What is stopped when the last test is over."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def postgres_service(_services: ExitStack) -> Postgres | NoService:
    """The session's PostgreSQL server, or why there is none."""
    try:
        return _services.enter_context(postgres())
    except NoService as reason:
        return reason


@pytest.fixture(scope="session")
def redis_service(_services: ExitStack) -> Redis | NoService:
    """The session's Redis server, or why there is none."""
    try:
        return _services.enter_context(redis_server())
    except NoService as reason:
        return reason


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    database = Database(f"sqlite:///{path}")
    database.upgrade()
    database.dispose()  # the last connection folds the write-ahead log into the file
    return path


@pytest.fixture
def sqlite_url(tmp_path: Path, _sqlite_template: Path) -> str:
    path = tmp_path / "ledger.db"
    shutil.copyfile(_sqlite_template, path)
    return f"sqlite:///{path}"


def _fresh_postgres(service: Postgres | NoService, *, migrated: bool) -> Iterator[str]:
    if isinstance(service, NoService):
        pytest.skip(f"no PostgreSQL: {service}")
    url = service.create(migrated=migrated)
    yield url
    if migrated:
        service.give_back(url)
    else:
        service.drop(url)


@pytest.fixture
def postgres_url(postgres_service: Postgres | NoService) -> Iterator[str]:
    yield from _fresh_postgres(postgres_service, migrated=True)


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest) -> str:
    return str(
        request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    )


@pytest.fixture(params=DATABASES)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/empty.db"
    else:
        service = request.getfixturevalue("postgres_service")
        yield from _fresh_postgres(service, migrated=False)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    made = Database(database_url)
    yield made
    made.dispose()


@pytest.fixture
def redis_url(redis_service: Redis | NoService) -> Iterator[str]:
    if isinstance(redis_service, NoService):
        pytest.skip(f"no Redis: {redis_service}")
    try:
        with redis_service.claim() as url:
            yield url
    except NoService as reason:
        pytest.skip(f"no Redis: {reason}")


# --------------------------------------------------------------------------------------------------
# NOT RUN
# --------------------------------------------------------------------------------------------------

# What the command for a test that lacked a server begins with.
_NEEDS = {
    "no PostgreSQL": "TEST_DATABASE_URL=postgresql://USER@HOST/postgres ",
    "no Redis": "TEST_REDIS_URL=redis://HOST:6379 ",
}
_deselected_long = pytest.StashKey[int]()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") is not None:
            stash = item.config.stash
            stash[_deselected_long] = stash.get(_deselected_long, 0) + 1


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines: list[str] = []
    for report in terminalreporter.getreports("skipped"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "skipped"
        reason = reason.removeprefix("Skipped: ")
        lines.append(f"{report.nodeid}: {reason}")
        needs = next((value for start, value in _NEEDS.items() if reason.startswith(start)), "")
        lines.append(f"    {needs}python -m pytest {shlex.quote(report.nodeid)}")
    long = config.stash.get(_deselected_long, 0)
    if long:
        lines.append(f"tests of sizes that take long: {long}")
        lines.append("    make test-long")
    if lines:
        terminalreporter.section("NOT RUN")
        for line in lines:
            terminalreporter.write_line(line)
