"""The ledger's tables, and the two databases they live in.

Two databases, one set of tables: SQLite for the embedded default and PostgreSQL for production.
Both give :meth:`Database.write` the same promise, that whoever has read the locked dataset row sees
every charge committed before and no other charge until it commits itself.

* **PostgreSQL** runs READ COMMITTED; the ledger takes the dataset row FOR UPDATE, and each later
  statement of that transaction sees what earlier holders of the row committed.
* **SQLite** has one writer. ``BEGIN IMMEDIATE`` takes the writer's lock before the first read; a
  plain BEGIN would read first and lock later, which lets two clients admit on the same sums. The
  driver's own transaction handling is off (``isolation_level=None``), because it begins late.

:meth:`Database.read` is one consistent snapshot on either, so a reader that compares entries with
the chain never sees half of a commit.

Times are integers, microseconds since 1970 in UTC. Costs are integers in the units of
:mod:`accounting.filters`. Only :mod:`accounting.ledger` writes entries, charges, jobs, releases and
chain rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import CheckConstraint, ForeignKey, Index, MetaData, String, UniqueConstraint
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from accounting.canonical import canonical_json
from accounting.errors import LedgerUnavailable

JsonObject = dict[str, Any]

GENESIS_HASH: Final = "0" * 64
"""The previous hash of a dataset's first chain row, and the head of a chain without rows."""

STATES: Final = (
    "awaiting_approval",
    "reserved",
    "started",
    "released",
    "failed_charged",
    "cancelled",
    "expired",
    "denied",
)
HELD_STATES: Final = ("awaiting_approval", "reserved")
"""The states of what never started: its charge counts, and may be taken back."""
CHARGED_STATES: Final = (*HELD_STATES, "started", "released", "failed_charged")
"""The states whose costs count: only an entry that never started is ever taken back."""


class Base(DeclarativeBase):
    """Columns are NOT NULL unless their type says ``| None``."""

    # Constraints need names, or a migration cannot speak of them.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        int: sa.BigInteger(),
        str: sa.Text(),
        bytes: sa.LargeBinary(),
        JsonObject: sa.JSON(none_as_null=True),
        list[str]: sa.JSON(none_as_null=True),
        list[list[int]]: sa.JSON(none_as_null=True),
    }


def _id() -> String:
    return String(64)


def _in(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(v) for v in values)})"


# --------------------------------------------------------------------------------------------------
# Who, and what data
# --------------------------------------------------------------------------------------------------


class OrganisationRow(Base):
    """An organisation; keys, datasets and jobs belong to one."""

    __tablename__ = "organisations"

    id: Mapped[str] = mapped_column(_id(), primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[int]


class KeyRow(Base):
    """An access key, kept as its SHA-256 only. ``scopes``: owner, requester, auditor, admin."""

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(_id(), primary_key=True)
    organisation_id: Mapped[str] = mapped_column(_id(), ForeignKey("organisations.id"), index=True)
    sha256: Mapped[str] = mapped_column(_id(), unique=True)
    scopes: Mapped[list[str]]
    created_at: Mapped[int]
    revoked_at: Mapped[int | None]


def _own_id(context: Any) -> Any:
    return context.get_current_parameters()["id"]


class DatasetRow(Base):
    """A dataset's public facts, and the head and sums of its books.

    Datasets of one budget group share one set of books, those of the dataset that ``books_id``
    names: for most datasets their own. The row of that dataset is the one that every writer of the
    books locks first; the head and the sums of the others stay unused.

    ``totals`` has, for each filter by position, what its charged entries sum to: ``[epsilon_units,
    delta_units, entries of infinite cost]``. It changes in the transaction that changes an entry's
    state, so an admission need not read every entry; :func:`accounting.chain.verify` recomputes it.
    """

    __tablename__ = "datasets"
    __table_args__ = (
        UniqueConstraint("organisation_id", "name"),
        CheckConstraint("chain_sequence >= 0", name="chain_sequence"),
    )

    id: Mapped[str] = mapped_column(_id(), primary_key=True)
    organisation_id: Mapped[str] = mapped_column(_id(), ForeignKey("organisations.id"))
    name: Mapped[str]
    facts: Mapped[JsonObject]
    created_at: Mapped[int]
    chain_sequence: Mapped[int] = mapped_column(default=0)
    chain_hash: Mapped[str] = mapped_column(_id(), default=GENESIS_HASH)
    books_id: Mapped[str] = mapped_column(
        _id(), ForeignKey("datasets.id"), index=True, default=_own_id
    )
    totals: Mapped[list[list[int]]] = mapped_column(default=list)


class SnapshotRow(Base):
    """An immutable private copy of records. ``records`` and ``owner_warning`` are owner-only.

    ``hmac`` is keyed by the snapshot's secret key, which lies sealed in ``sealed_key``: a plain
    hash of private content would tell two neighbouring datasets apart.
    """

    __tablename__ = "snapshots"
    __table_args__ = (CheckConstraint("records >= 0", name="records"),)

    id: Mapped[str] = mapped_column(_id(), primary_key=True)
    dataset_id: Mapped[str] = mapped_column(_id(), ForeignKey("datasets.id"), index=True)
    created_at: Mapped[int]
    location: Mapped[str]
    hmac: Mapped[str]
    sealed_key: Mapped[bytes]
    records: Mapped[int]
    owner_warning: Mapped[str | None]


class GrantRow(Base):
    """What an organisation may do with another's dataset. ``scopes``: quote, request."""

    __tablename__ = "grants"

    dataset_id: Mapped[str] = mapped_column(_id(), ForeignKey("datasets.id"), primary_key=True)
    organisation_id: Mapped[str] = mapped_column(
        _id(), ForeignKey("organisations.id"), primary_key=True, index=True
    )
    scopes: Mapped[list[str]]
    created_at: Mapped[int]


# --------------------------------------------------------------------------------------------------
# The books
# --------------------------------------------------------------------------------------------------


class BudgetRow(Base):
    """The budget of a set of books as its owner wrote it: decimals as text, never as floats."""

    __tablename__ = "budgets"

    dataset_id: Mapped[str] = mapped_column(_id(), ForeignKey("datasets.id"), primary_key=True)
    budget: Mapped[JsonObject]
    created_at: Mapped[int]


class FilterRow(Base):
    """One filter of the family that the budget fixed, at its place in the family."""

    __tablename__ = "filters"
    __table_args__ = (
        CheckConstraint("position >= 0", name="position"),
        CheckConstraint("delta_units >= 0", name="delta_units"),
        CheckConstraint("cap_units >= 0", name="cap_units"),
        CheckConstraint("delta_per_release_units >= 0", name="delta_per_release_units"),
        UniqueConstraint("dataset_id", "order"),
    )

    dataset_id: Mapped[str] = mapped_column(_id(), ForeignKey("datasets.id"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    order: Mapped[str]
    delta_units: Mapped[int]
    cap_units: Mapped[int]
    delta_per_release_units: Mapped[int]


class OrganisationTotalsRow(Base):
    """What the charged entries of one organisation sum to; see :attr:`DatasetRow.totals`."""

    __tablename__ = "organisation_totals"

    dataset_id: Mapped[str] = mapped_column(_id(), ForeignKey("datasets.id"), primary_key=True)
    organisation_id: Mapped[str] = mapped_column(
        _id(), ForeignKey("organisations.id"), primary_key=True
    )
    totals: Mapped[list[list[int]]]


class EntryRow(Base):
    """One line of a set of books: what was charged for, and the state it is in.

    ``books_id`` names the dataset whose books these are, and ``dataset_id`` the one whose records
    are used. ``sequence`` is that of its first chain row. An entry without charges is
    post-processing and names the released entry it was made from in ``parent_entry_id``. An entry
    of the kind ``plan`` has several jobs, and is ``started`` from the first start to the last end.
    """

    __tablename__ = "entries"
    __table_args__ = (
        CheckConstraint(_in("state", STATES), name="state"),
        CheckConstraint("sequence >= 1", name="sequence"),
        UniqueConstraint("books_id", "sequence"),
        Index(None, "books_id", "state"),
    )

    id: Mapped[str] = mapped_column(_id(), primary_key=True)
    books_id: Mapped[str] = mapped_column(_id(), ForeignKey("datasets.id"))
    dataset_id: Mapped[str] = mapped_column(_id(), ForeignKey("datasets.id"))
    organisation_id: Mapped[str] = mapped_column(_id(), ForeignKey("organisations.id"))
    sequence: Mapped[int]
    kind: Mapped[str]
    state: Mapped[str] = mapped_column(_id())
    parent_entry_id: Mapped[str | None] = mapped_column(_id(), ForeignKey("entries.id"))
    mechanism: Mapped[JsonObject | None]
    mechanism_digest: Mapped[str | None] = mapped_column(_id())
    created_at: Mapped[int]
    updated_at: Mapped[int]


class ChargeRow(Base):
    """What one entry costs in one filter. NaN cannot be an integer; negatives stop here."""

    __tablename__ = "charges"
    __table_args__ = (
        CheckConstraint("position >= 0", name="position"),
        CheckConstraint("epsilon_units >= 0", name="epsilon_units"),
        CheckConstraint("delta_units >= 0", name="delta_units"),
    )

    entry_id: Mapped[str] = mapped_column(_id(), ForeignKey("entries.id"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epsilon_units: Mapped[int]
    delta_units: Mapped[int]


class JobRow(Base):
    """The work that an entry pays for; the database is its queue of record.

    ``sealed_seed`` and ``lease_token`` exist exactly while the job is started. ``plan_position``
    is the job's place in its plan, from 0; None for a job of its own.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        # The same key answers the same job for ever, whatever two racing clients believed.
        UniqueConstraint("organisation_id", "dataset_id", "idempotency_key"),
        CheckConstraint(_in("state", STATES), name="state"),
        CheckConstraint("attempts >= 0 AND attempts <= max_attempts", name="attempts"),
        CheckConstraint("progress_done >= 0 AND progress_total >= 0", name="progress"),
        CheckConstraint("(state = 'started') = (sealed_seed IS NOT NULL)", name="seed"),
        CheckConstraint("(state = 'started') = (lease_token IS NOT NULL)", name="lease_token"),
        CheckConstraint(
            "(lease_token IS NULL) = (lease_expires_at IS NULL)", name="lease_expires_at"
        ),
        UniqueConstraint("entry_id", "plan_position"),
        # NULLs are distinct in the constraint above: one job for an entry that is no plan.
        Index(
            "uq_jobs_entry_id",
            "entry_id",
            unique=True,
            postgresql_where=sa.text("plan_position IS NULL"),
            sqlite_where=sa.text("plan_position IS NULL"),
        ),
        CheckConstraint("plan_position IS NULL OR plan_position >= 0", name="plan_position"),
        Index(None, "dataset_id"),
        Index(None, "state"),
    )

    id: Mapped[str] = mapped_column(_id(), primary_key=True)
    dataset_id: Mapped[str] = mapped_column(_id(), ForeignKey("datasets.id"))
    organisation_id: Mapped[str] = mapped_column(_id(), ForeignKey("organisations.id"))
    entry_id: Mapped[str] = mapped_column(_id(), ForeignKey("entries.id"))
    plan_position: Mapped[int | None]
    snapshot_id: Mapped[str | None] = mapped_column(_id(), ForeignKey("snapshots.id"))
    idempotency_key: Mapped[str]
    body_hash: Mapped[str] = mapped_column(_id())
    kind: Mapped[str]
    spec: Mapped[JsonObject]
    mechanism: Mapped[JsonObject | None]
    post_processing: Mapped[JsonObject]
    certificate_epsilon: Mapped[JsonObject | None]
    state: Mapped[str] = mapped_column(_id())
    created_at: Mapped[int]
    updated_at: Mapped[int]
    attempts: Mapped[int] = mapped_column(default=0)
    max_attempts: Mapped[int]
    lease_token: Mapped[str | None] = mapped_column(_id())
    lease_expires_at: Mapped[int | None]
    sealed_seed: Mapped[bytes | None]
    job_digest: Mapped[str | None] = mapped_column(_id())
    started_sequence: Mapped[int | None]
    progress_done: Mapped[int] = mapped_column(default=0)
    progress_total: Mapped[int]
    sent_at: Mapped[int | None]
    expires_at: Mapped[int]
    problem_code: Mapped[str | None]


class ReleaseRow(Base):
    """The one artefact of a job, and its certificate. Downloads are served from here only."""

    __tablename__ = "releases"
    __table_args__ = (CheckConstraint("bytes >= 0", name="bytes"),)

    id: Mapped[str] = mapped_column(_id(), primary_key=True)
    dataset_id: Mapped[str] = mapped_column(_id(), ForeignKey("datasets.id"), index=True)
    job_id: Mapped[str] = mapped_column(_id(), ForeignKey("jobs.id"), unique=True)
    entry_id: Mapped[str] = mapped_column(_id(), ForeignKey("entries.id"), index=True)
    location: Mapped[str]
    sha256: Mapped[str] = mapped_column(_id())
    bytes: Mapped[int]
    certificate: Mapped[JsonObject]
    created_at: Mapped[int]


class ChainRow(Base):
    """One row of the hash chain of a set of books: canonical JSON with the hash of the row before.

    ``dataset_id`` is the dataset whose books these are.
    """

    __tablename__ = "chain"
    __table_args__ = (CheckConstraint("sequence >= 1", name="sequence"),)

    dataset_id: Mapped[str] = mapped_column(_id(), ForeignKey("datasets.id"), primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    previous_hash: Mapped[str] = mapped_column(_id())
    hash: Mapped[str] = mapped_column(_id())
    body: Mapped[str]


class LeaseRow(Base):
    """A named lease that one process at a time holds, such as the sweeper's."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(_id(), primary_key=True)
    token: Mapped[str] = mapped_column(_id())
    expires_at: Mapped[int]


# --------------------------------------------------------------------------------------------------
# The database
# --------------------------------------------------------------------------------------------------


def _read_url(url: str) -> URL:
    parsed = make_url(url)
    backend = parsed.get_backend_name()
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise ValueError(f"the ledger runs on SQLite and on PostgreSQL, not on {backend}")
    if not parsed.database or parsed.database == ":memory:":
        raise ValueError("the ledger must outlive the process: give SQLite a file")
    return parsed.set(drivername="sqlite+pysqlite")


def _dumps(value: object) -> str:
    return canonical_json(value).decode()


@contextmanager
def _fails_closed() -> Iterator[None]:
    """Turns "the database did not answer" into one error that grants nothing."""
    try:
        yield
    except (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.TimeoutError) as error:
        raise LedgerUnavailable("the ledger's database did not answer in time") from error
    except sa.exc.DBAPIError as error:
        if not error.connection_invalidated:
            raise
        raise LedgerUnavailable("the connection to the ledger's database was lost") from error


class Database:
    """One database of the ledger.

    Args:
        url: ``sqlite:///path/to/file`` or ``postgresql://user@host/name``.
        lock_timeout_seconds: how long a transaction waits for another one's locks.

    Raises:
        ValueError: the URL names another kind of database, or SQLite without a file.
    """

    def __init__(self, url: str, *, lock_timeout_seconds: float = 10.0) -> None:
        self.url = _read_url(url)
        self._lock_timeout_ms = round(lock_timeout_seconds * 1000)
        if self.url.get_backend_name() == "sqlite":
            self._writer = self._sqlite_engine(begin="BEGIN IMMEDIATE", read_only=False)
            self._reader = self._sqlite_engine(begin="BEGIN", read_only=True)
        else:
            self._writer = self._postgresql_engine()
            # The same pool; a snapshot for the whole transaction, and no way to write in it.
            self._reader = self._writer.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )

    @property
    def is_sqlite(self) -> bool:
        return self.url.get_backend_name() == "sqlite"

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session in one transaction that may write; commits on success, else rolls back.

        Rows that refer to others are added after a ``flush`` of those: the tables declare no ORM
        relationships, so the session does not sort them.

        Raises:
            LedgerUnavailable: the database could not be reached or locked in time. Where the commit
                itself failed it may yet have happened; the caller's idempotency key tells.
            sqlalchemy.exc.IntegrityError: a constraint was violated.
        """
        with (
            _fails_closed(),
            Session(self._writer, expire_on_commit=False) as session,
            session.begin(),
        ):
            session.connection()  # begins now, not at the first statement
            yield session

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session over one consistent snapshot of the database, which it can't write to.

        Raises:
            LedgerUnavailable: the database could not be reached.
        """
        with (
            _fails_closed(),
            Session(self._reader, expire_on_commit=False) as session,
            session.begin(),
        ):
            session.connection()  # begins now, not at the first statement
            yield session

    def find(
        self, statement: sa.Executable, parameters: Mapping[str, object]
    ) -> sa.Row[Any] | None:
        """The one row that a statement finds, or None: for what every request asks first.

        Raises:
            LedgerUnavailable: the database could not be reached.
        """
        with _fails_closed(), self._reader.connect() as connection:
            return connection.execute(statement, dict(parameters)).one_or_none()

    def upgrade(self, revision: str = "head") -> None:
        """Brings the tables to a revision, in one transaction; a second caller waits for it.

        Raises:
            LedgerUnavailable: the database could not be reached or locked in time.
        """
        self._migrate(command.upgrade, revision)

    def downgrade(self, revision: str) -> None:
        """Takes the tables back to a revision, in one transaction.

        Raises:
            RuntimeError: the books hold entries that the revision has no place for; forgetting them
                would give spent budget back.
            LedgerUnavailable: the database could not be reached or locked in time.
        """
        self._migrate(command.downgrade, revision)

    def revision_ok(self) -> bool:
        """Whether the tables are at the revision that this code was written for.

        Raises:
            LedgerUnavailable: the database could not be reached.
        """
        head = ScriptDirectory.from_config(_alembic_config()).get_current_head()
        with self.read() as session:
            context = MigrationContext.configure(session.connection())
            return context.get_current_revision() == head

    def dispose(self) -> None:
        """Closes every pooled connection."""
        self._writer.dispose()
        self._reader.dispose()

    def _migrate(self, run: Any, revision: str) -> None:
        config = _alembic_config()
        # A table rebuilt on SQLite is dropped on the way, which would count as deleting what other
        # rows point at. So the references are not enforced meanwhile, but checked before the end.
        engine = (
            self._sqlite_engine(begin="BEGIN IMMEDIATE", read_only=False, foreign_keys=False)
            if self.is_sqlite
            else self._writer
        )
        try:
            with _fails_closed(), engine.begin() as connection:
                if not self.is_sqlite:
                    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
                config.attributes["connection"] = connection
                run(config, revision)
                if self.is_sqlite:
                    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
                    if broken:
                        raise RuntimeError(f"the migration left {len(broken)} broken references")
        finally:
            if engine is not self._writer:
                engine.dispose()

    def _sqlite_engine(self, *, begin: str, read_only: bool, foreign_keys: bool = True) -> Engine:
        engine = sa.create_engine(
            self.url,
            json_serializer=_dumps,
            hide_parameters=True,  # an error's text goes to logs
            connect_args={
                "isolation_level": None,
                "timeout": self._lock_timeout_ms / 1000,
            },
        )

        @sa.event.listens_for(engine, "connect")
        def connect(connection: Any, _record: object) -> None:
            cursor = connection.cursor()
            # First of all, so that the statements below wait for other processes too.
            cursor.execute(f"PRAGMA busy_timeout={self._lock_timeout_ms}")
            cursor.execute("PRAGMA synchronous=FULL")
            # A destroyed seed must not stay behind in a free page.
            cursor.execute("PRAGMA secure_delete=ON")
            cursor.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")
            if read_only:
                cursor.execute("PRAGMA query_only=ON")
            elif cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                cursor.execute("PRAGMA journal_mode=WAL")
            cursor.close()

        @sa.event.listens_for(engine, "begin")
        def begin_transaction(connection: Connection) -> None:
            connection.exec_driver_sql(begin)

        return engine

    def _postgresql_engine(self) -> Engine:
        engine = sa.create_engine(
            self.url,
            json_serializer=_dumps,
            hide_parameters=True,  # an error's text goes to logs
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            connect_args={"connect_timeout": 10},
        )

        @sa.event.listens_for(engine, "connect")
        def connect(connection: Any, _record: object) -> None:
            cursor = connection.cursor()
            cursor.execute(f"SET SESSION lock_timeout = {self._lock_timeout_ms}")
            # An acknowledged charge must survive a crash of the server; anything stronger than
            # "on" that the operator chose stays.
            cursor.execute("SHOW synchronous_commit")
            if cursor.fetchone()[0] == "off":
                cursor.execute("SET SESSION synchronous_commit = on")
            cursor.close()
            connection.commit()

        return engine


_MIGRATION_LOCK: Final = 0x6570_7369_6C6F_6E64  # "epsilond"


def _alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", "accounting:migrations")
    config.set_main_option("path_separator", "os")
    return config
