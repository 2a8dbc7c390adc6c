"""Exported chains, checked without a database."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from accounting import bounds, chain, ledger
from accounting.chain import ExportCheck, verify_export
from accounting.mechanisms import SubsampledGaussian
from accounting.tables import Database, ReleaseRow
from tests.books import Books

Lines = list[str]
Row = dict[str, Any]


@pytest.fixture
def sqlite(sqlite_url: str) -> Iterator[Database]:
    made = Database(sqlite_url)
    yield made
    made.dispose()


@pytest.fixture
def books(sqlite: Database) -> Books:
    """Seven rows: a budget; a released job (2 to 4); a job that is cancelled; one that waits."""
    made = Books(sqlite).register().set_budget()
    made.release(made.must_start(made.reserve("1").job_id))
    made.cancel(made.reserve("2").job_id)
    made.reserve("0.5")
    return made


ROWS = 7


def export(books: Books) -> Lines:
    with books.database.read() as session:
        return [
            json.dumps(
                {
                    "dataset": row.dataset_id,
                    "sequence": row.sequence,
                    "previous_hash": row.previous_hash,
                    "hash": row.hash,
                    "body": row.body,
                }
            )
            for row in ledger.chain(session, books.dataset_id)
        ]


def certificate(books: Books) -> Row:
    with books.database.read() as session:
        first = sa.select(ReleaseRow).order_by(ReleaseRow.created_at).limit(1)
        return dict(session.scalars(first).one().certificate)


def changed(lines: Lines, index: int, change: Callable[[Row], object]) -> Lines:
    row = json.loads(lines[index])
    change(row)
    return [*lines[:index], json.dumps(row), *lines[index + 1 :]]


def bad(check: ExportCheck) -> int | None:
    assert not check.ok
    assert check.verification.problem
    return check.verification.first_bad


def test_a_whole_export_holds(books: Books) -> None:
    found = verify_export(export(books), certificates=[certificate(books)])
    assert found.ok, found.verification.problem
    assert (found.dataset, found.verification.rows, found.certificates) == ("ds_1", ROWS, 1)
    with books.database.read() as session:
        assert found.verification == chain.verify(session, books.dataset_id)


@pytest.mark.parametrize("index", range(ROWS))
def test_a_changed_row_is_named(books: Books, index: int) -> None:
    lines = changed(export(books), index, lambda row: row.update(body=row["body"] + " "))
    assert bad(verify_export(lines)) == index + 1


@pytest.mark.parametrize("index", range(ROWS - 1))
def test_a_removed_row_is_named(books: Books, index: int) -> None:
    lines = export(books)
    assert bad(verify_export([*lines[:index], *lines[index + 1 :]])) == index + 1


@pytest.mark.parametrize("index", range(ROWS - 1))
def test_swapped_rows_are_named(books: Books, index: int) -> None:
    lines = export(books)
    lines[index], lines[index + 1] = lines[index + 1], lines[index]
    assert bad(verify_export(lines)) == index + 1


def test_rows_missing_at_the_end_show_against_a_certificate_or_a_head(books: Books) -> None:
    lines = export(books)
    head = json.loads(lines[-1])["hash"]
    assert verify_export(lines, head=head).ok
    assert verify_export(lines[:-1]).ok, "by itself a beginning of a chain is a chain"
    assert bad(verify_export(lines[:-1], head=head)) == ROWS
    own = certificate(books)
    assert bad(verify_export(lines[:2], certificates=[own])) == 3
    assert bad(verify_export(lines[:3], certificates=[own])) == 4
    assert verify_export(lines[:4], certificates=[own]).ok


def test_another_certificate_of_the_job_does_not_stand_in_the_books(books: Books) -> None:
    other = {**certificate(books), "epsilon": 0}
    assert bad(verify_export(export(books), certificates=[other])) == 3
    other["ledger"] = {"sequence": 3, "hash": "0" * 64}
    assert bad(verify_export(export(books), certificates=[other])) == 3
    other["ledger"] = {"sequence": 2, "hash": json.loads(export(books)[1])["hash"]}
    assert bad(verify_export(export(books), certificates=[other])) == 2
    for nonsense in ({}, {"ledger": None}, {"ledger": {"sequence": "3"}}):
        assert bad(verify_export(export(books), certificates=[nonsense])) == ROWS + 1


def test_a_certificate_of_another_mechanism_than_was_charged_is_named(books: Books) -> None:
    """Whoever rewrites the whole chain can't make a dearer charge out of a cheaper one."""
    started = books.must_start(books.reserve("0.25").job_id)
    cheaper = {**(started.mechanism or {}), "epsilon": 0.125}
    books.release(replace(started, mechanism=cheaper))
    with books.database.read() as session:
        own = dict(
            session.scalars(sa.select(ReleaseRow).where(ReleaseRow.job_id == started.job_id))
            .one()
            .certificate
        )
    assert bad(verify_export(export(books), certificates=[own])) == started.sequence
    assert verify_export(export(books), certificates=[certificate(books)]).ok


def test_plans_have_a_certificate_each(books: Books) -> None:
    plan = books.reserve_plan(["0.25", "0.125"])
    for job_id in reversed(plan.job_ids):
        books.release(books.must_start(job_id), sha256=job_id[-32:] * 2)
    with books.database.read() as session:
        rows = session.scalars(sa.select(ReleaseRow)).all()
        every = [dict(row.certificate) for row in rows]
    assert len(every) == 3
    assert verify_export(export(books), certificates=every).ok


JUNK: list[object] = [None, -1, 0.5, "x", [], [1], {}, {"a": 1}, True, "\ud800"]


def test_a_row_of_any_content_is_named_and_never_raises(books: Books) -> None:
    """Bodies with good hashes and wrong content, as whoever writes the chain could make them."""
    lines = export(books)
    for index in range(ROWS):
        body = json.loads(json.loads(lines[index])["body"])
        for path in ((n,) for n in body):
            for junk in JUNK:
                check_junk(lines, index, body, path, junk)
        for name in body["data"]:
            for junk in JUNK:
                check_junk(lines, index, body, ("data", name), junk)


def check_junk(lines: Lines, index: int, body: Row, path: tuple[str, ...], junk: object) -> None:
    changed_body = json.loads(json.dumps(body))
    place = changed_body
    for name in path[:-1]:
        place = place[name]
    if place[path[-1]] == junk:
        return
    place[path[-1]] = junk
    text = json.dumps(changed_body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def put(row: Row) -> None:
        row["body"] = text
        row["hash"] = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    found = verify_export(changed(lines, index, put))
    # Whatever the row now says, what follows does not follow it; the last row may say anything
    # that the rule allows.
    if index < ROWS - 1:
        assert bad(found) in (index + 1, index + 2)


@pytest.mark.parametrize(
    "text", ['{"a":NaN}', "[" * 100_000, '"\\ud800"', "1e999", "9" * 5000, "null"]
)
def test_a_body_that_is_no_row_is_named(books: Books, text: str) -> None:
    def put(row: Row) -> None:
        row["body"] = text
        row["hash"] = hashlib.sha256(text.encode()).hexdigest()

    assert bad(verify_export(changed(export(books), 2, put))) == 3


@pytest.mark.parametrize("line", ["{", "[]", "null", "{}", '{"dataset": 1}', "[" * 100_000])
def test_a_line_that_is_no_row_is_named(books: Books, line: str) -> None:
    lines = export(books)
    assert bad(verify_export([line, *lines])) == 1
    assert bad(verify_export([*lines[:2], line, *lines[2:]])) == 3


def test_a_row_of_another_dataset_is_named(books: Books) -> None:
    lines = changed(export(books), 3, lambda row: row.update(dataset="ds_2"))
    assert bad(verify_export(lines)) == 4


def test_an_export_without_rows(books: Books) -> None:
    assert bad(verify_export([])) == 1
    assert bad(verify_export(["\n"])) == 1


def test_blank_lines_do_not_count(books: Books) -> None:
    assert verify_export([line + "\n\n" for line in export(books)]).ok


def test_charges_are_proven_in_ball_arithmetic_on_request(sqlite: Database) -> None:
    books = Books(sqlite, bound=bounds.epsilon).register().set_budget()
    books.reserve(SubsampledGaussian(0.1, 4.0, 10))
    lines = export(books)
    found = verify_export(lines, epsilon_bound=bounds.epsilon, rigorous_seconds=20.0)
    assert found.ok, found.verification.problem
    assert found.verification.unconfirmed == 0
    # No time proves nothing, and says so.
    hurried = verify_export(lines, rigorous_seconds=0.0)
    assert (hurried.ok, hurried.verification.unconfirmed) == (True, 1)
