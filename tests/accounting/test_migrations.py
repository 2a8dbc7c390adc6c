"""The migrated tables are those of the code, on both databases, up and down, data in place."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from accounting import tables
from accounting.errors import LedgerUnavailable
from accounting.tables import (
    Base,
    ChainRow,
    Database,
    DatasetRow,
    EntryRow,
    JobRow,
    OrganisationRow,
    ReleaseRow,
    SnapshotRow,
)
from tests.books import Books

LEDGER_TABLES = {
    "budgets", "chain", "charges", "entries", "filters", "jobs", "leases", "organisation_totals",
    "releases",
}  # fmt: skip


@pytest.fixture
def empty(empty_database_url: str) -> Iterator[Database]:
    made = Database(empty_database_url)
    yield made
    made.dispose()


def described(database: Database) -> dict[str, Any]:
    """Everything the database says of its tables, but for the order of things and Alembic's own."""
    with database.write() as session:
        inspector = sa.inspect(session.connection())
        return {
            table: {
                "columns": {
                    c["name"]: (str(c["type"]), c["nullable"]) for c in inspector.get_columns(table)
                },
                "primary": inspector.get_pk_constraint(table)["constrained_columns"],
                "foreign": sorted(
                    (f["constrained_columns"], f["referred_table"], f["referred_columns"])
                    for f in inspector.get_foreign_keys(table)
                ),
                "unique": sorted(
                    (str(u["name"]), u["column_names"])
                    for u in inspector.get_unique_constraints(table)
                ),
                "checks": sorted(
                    (str(c["name"]), c["sqltext"]) for c in inspector.get_check_constraints(table)
                ),
                "indexes": sorted(
                    (str(i["name"]), i["column_names"], bool(i["unique"]))
                    for i in inspector.get_indexes(table)
                ),
            }
            for table in inspector.get_table_names()
            if table != "alembic_version"
        }


def names(database: Database) -> set[str]:
    with database.read() as session:
        return set(sa.inspect(session.connection()).get_table_names())


def test_the_migrated_tables_are_those_of_the_code(empty: Database) -> None:
    empty.upgrade()
    with empty.write() as session:
        context = MigrationContext.configure(session.connection())
        assert compare_metadata(context, Base.metadata) == []
    migrated = described(empty)
    assert set(migrated) == set(Base.metadata.tables)
    assert any(t["checks"] for t in migrated.values())
    assert migrated["jobs"]["unique"]

    # Alembic does not compare CHECKs: so the tables as the code would make them, beside these.
    empty.downgrade("base")
    with empty.write() as session:
        Base.metadata.create_all(session.connection())
    assert described(empty) == migrated


def test_revision_ok_tells_the_newest_tables_from_all_others(empty: Database) -> None:
    assert not empty.revision_ok()
    empty.upgrade("0001")
    assert not empty.revision_ok()
    empty.upgrade()
    assert empty.revision_ok()
    empty.upgrade()
    assert empty.revision_ok()


def contents(database: Database, *tables: type[Base]) -> list[Any]:
    """What stands in the tables, in the columns that the database has at its revision."""
    with database.read() as session:
        inspector = sa.inspect(session.connection())
        found = []
        for table in tables:
            names = [c["name"] for c in inspector.get_columns(table.__tablename__)]
            known = [c for c in table.__table__.c if c.name in names]
            found.append(sorted(repr(tuple(row)) for row in session.execute(sa.select(*known))))
        return found


def test_up_and_down_with_data_in_place(empty: Database) -> None:
    empty.upgrade()
    books = Books(empty).register()
    empty.downgrade("0001")
    assert not LEDGER_TABLES & names(empty)
    registry = (OrganisationRow, DatasetRow, SnapshotRow)
    before = contents(empty, *registry)
    assert all(before)
    for _ in range(2):
        empty.upgrade()
        assert names(empty) >= LEDGER_TABLES
        empty.downgrade("0001")
        assert contents(empty, *registry) == before
    empty.upgrade()
    books.set_budget()
    books.release(books.must_start(books.reserve("1").job_id))
    assert books.verify().ok


def test_books_go_up_and_down_whole(empty: Database) -> None:
    """Entries in every state, charges finite and infinite, and their sums."""
    empty.upgrade()
    books = Books(empty).register().set_budget("40")
    books.release(books.must_start(books.reserve("1").job_id))
    books.fail(books.must_start(books.reserve("2").job_id))
    books.must_start(books.reserve("4").job_id)
    books.cancel(books.reserve("8").job_id)
    books.reserve("16")
    everything = [m.class_ for m in Base.registry.mappers]
    before = contents(empty, *everything)
    empty.downgrade("0002")
    older = contents(empty, EntryRow, JobRow, ReleaseRow, ChainRow)
    assert all(older)
    assert not empty.revision_ok()
    empty.upgrade()
    assert contents(empty, *everything) == before
    assert books.verify().ok
    assert books.spent() == 1 + 2 + 4 + 16
    books.reserve("8")
    empty.downgrade("0002")
    empty.upgrade()
    assert books.verify().ok


def test_what_older_tables_have_no_place_for_is_not_forgotten(empty: Database) -> None:
    empty.upgrade()
    books = Books(empty).register().set_budget("40", approval_above="2")
    books.deny(books.reserve("3").job_id)
    with pytest.raises(RuntimeError, match="approvals"):
        empty.downgrade("0002")
    assert empty.revision_ok()


def test_books_are_never_dropped(empty: Database) -> None:
    """Without its books, a dataset's spent budget would be given back."""
    empty.upgrade()
    books = Books(empty).register().set_budget()
    books.reserve("1")
    with pytest.raises(RuntimeError, match="entries"):
        empty.downgrade("0001")
    with pytest.raises(RuntimeError, match="entries"):
        empty.downgrade("base")
    assert empty.revision_ok()
    assert books.verify().ok
    assert books.spent() == 1.0


def test_down_to_nothing_and_up_again(empty: Database) -> None:
    empty.upgrade()
    empty.downgrade("base")
    assert names(empty) <= {"alembic_version"}
    empty.upgrade()
    assert empty.revision_ok()


def test_processes_that_start_together_migrate_once(empty: Database) -> None:
    def upgrade(_: int) -> bool:
        own = Database(empty.url.render_as_string(hide_password=False))
        try:
            own.upgrade()
            return own.revision_ok()
        finally:
            own.dispose()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(upgrade, range(4))) == [True] * 4


def test_a_migration_that_cannot_have_the_lock_changes_nothing(empty: Database) -> None:
    impatient = Database(empty.url.render_as_string(hide_password=False), lock_timeout_seconds=0.2)
    with empty.write() as session:
        if not empty.is_sqlite:
            session.execute(sa.text(f"SELECT pg_advisory_xact_lock({tables._MIGRATION_LOCK})"))
        with pytest.raises(LedgerUnavailable):
            impatient.upgrade()
    assert not impatient.revision_ok()
    impatient.dispose()


def test_the_embedded_database_is_set_to_survive_a_power_cut(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    with database.write() as session:
        found = {
            name: session.execute(sa.text(f"PRAGMA {name}")).scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    database.dispose()


def test_the_server_is_asked_for_durable_commits(postgres_url: str) -> None:
    quick = postgres_url + ("&" if "?" in postgres_url else "?")
    database = Database(quick + "options=-csynchronous_commit%3Doff")
    with database.write() as session:
        assert session.execute(sa.text("SHOW synchronous_commit")).scalar_one() == "on"
        assert session.execute(sa.text("SHOW lock_timeout")).scalar_one() == "10s"
        assert session.execute(sa.text("SHOW transaction_isolation")).scalar_one() == (
            "read committed"
        )
    with database.read() as session:
        assert session.execute(sa.text("SHOW transaction_isolation")).scalar_one() == (
            "repeatable read"
        )
    database.dispose()


def test_they_run_from_an_installed_package(tmp_path: Path) -> None:
    """From the modules that an installation has, which are those in packages, and no others."""
    installed = tmp_path / "installed"
    source = Path(tables.__file__).parent
    for module in source.rglob("*.py"):
        inside = [p for p in module.parents if p.is_relative_to(source)]
        if all((folder / "__init__.py").exists() for folder in inside):
            there = installed / module.relative_to(source.parent)
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(module.read_bytes())
    program = (
        "import accounting\n"
        "from accounting.tables import Database\n"
        "database = Database('sqlite:///ledger.db')\n"
        "database.upgrade()\n"
        "assert database.revision_ok()\n"
        "print(accounting.__file__)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert told.stdout.startswith(str(installed))
