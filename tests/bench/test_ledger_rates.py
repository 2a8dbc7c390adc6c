"""The bench of the ledger's rates, in small, on a real PostgreSQL."""

from __future__ import annotations

import pytest

from accounting import chain
from accounting.tables import Database
from bench import ledger_rates
from tests.services import NoService, Postgres


@pytest.fixture
def database(postgres_service: Postgres | NoService) -> Database:
    if isinstance(postgres_service, NoService):
        pytest.skip(f"no PostgreSQL: {postgres_service}")
    return Database(postgres_service.create())


def test_books_that_are_filled_in_bulk_are_those_that_reservations_make(database: Database) -> None:
    books = ledger_rates.make_books(database, 1)
    ledger_rates.fill(database, books, 50)
    ledger_rates.reserve(database, books)
    with database.read() as session:
        found = chain.verify(session, books.dataset_id)
    assert found.ok, found.problem
    assert found.rows == 1 + 50 + 1
    database.dispose()


def test_each_kind_of_transaction_runs_in_processes_of_its_own(database: Database) -> None:
    books = [ledger_rates.make_books(database, number) for number in (1, 2)]
    database.dispose()
    found = ledger_rates.rates(books, processes=2, seconds=0.5, rounds=1)
    assert len(found) == 3
    assert min(found) > 0
