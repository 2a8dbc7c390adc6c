"""Plans, approvals, budget groups, and sums that an admission need not add up anew.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from alembic.operations import BatchOperations

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_OLD_STATES = ("reserved", "started", "released", "failed_charged", "cancelled", "expired")
_NEW_STATES = ("awaiting_approval", *_OLD_STATES, "denied")
_CHARGED = ("awaiting_approval", "reserved", "started", "released", "failed_charged")
_INFINITE = 2**63 - 1


def _states(states: Sequence[str]) -> str:
    return f"state IN ({', '.join(repr(s) for s in states)})"


def upgrade() -> None:
    op.create_table(
        "organisation_totals",
        sa.Column("dataset_id", sa.String(length=64), nullable=False),
        sa.Column("organisation_id", sa.String(length=64), nullable=False),
        sa.Column("totals", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_id"], ["datasets.id"], name=op.f("fk_organisation_totals_dataset_id")
        ),
        sa.ForeignKeyConstraint(
            ["organisation_id"],
            ["organisations.id"],
            name=op.f("fk_organisation_totals_organisation_id"),
        ),
        sa.PrimaryKeyConstraint(
            "dataset_id", "organisation_id", name=op.f("pk_organisation_totals")
        ),
    )
    op.add_column("datasets", sa.Column("books_id", sa.String(64)))
    op.add_column("datasets", sa.Column("totals", sa.JSON()))
    op.add_column("entries", sa.Column("books_id", sa.String(64)))
    op.execute("UPDATE datasets SET books_id = id")
    op.execute("UPDATE entries SET books_id = dataset_id")
    _add_up()

    with op.batch_alter_table("datasets") as batch:
        batch.alter_column("books_id", existing_type=sa.String(64), nullable=False)
        batch.alter_column(
            "totals",
            existing_type=sa.JSON(),
            type_=sa.JSON(none_as_null=True),
            nullable=False,
        )
        batch.create_foreign_key(op.f("fk_datasets_books_id"), "datasets", ["books_id"], ["id"])
        batch.create_index(op.f("ix_datasets_books_id"), ["books_id"])
    with op.batch_alter_table("entries") as batch:
        batch.alter_column("books_id", existing_type=sa.String(64), nullable=False)
        batch.create_foreign_key(op.f("fk_entries_books_id"), "datasets", ["books_id"], ["id"])
        batch.drop_constraint(op.f("uq_entries_dataset_id_sequence"), type_="unique")
        batch.create_unique_constraint(
            op.f("uq_entries_books_id_sequence"), ["books_id", "sequence"]
        )
        batch.drop_index(op.f("ix_entries_dataset_id_state"))
        batch.create_index(op.f("ix_entries_books_id_state"), ["books_id", "state"])
        _change_states(batch, "entries", _NEW_STATES)
    with op.batch_alter_table("jobs") as batch:
        batch.add_column(sa.Column("plan_position", sa.BigInteger(), nullable=True))
        batch.drop_constraint(op.f("uq_jobs_entry_id"), type_="unique")
        batch.create_unique_constraint(
            op.f("uq_jobs_entry_id_plan_position"), ["entry_id", "plan_position"]
        )
        batch.create_check_constraint(
            op.f("ck_jobs_plan_position"), "plan_position IS NULL OR plan_position >= 0"
        )
        _change_states(batch, "jobs", _NEW_STATES)
    op.create_index(
        op.f("uq_jobs_entry_id"),
        "jobs",
        ["entry_id"],
        unique=True,
        postgresql_where=sa.text("plan_position IS NULL"),
        sqlite_where=sa.text("plan_position IS NULL"),
    )
    with op.batch_alter_table("releases") as batch:
        batch.drop_constraint(op.f("uq_releases_entry_id"), type_="unique")
        batch.create_index(op.f("ix_releases_entry_id"), ["entry_id"])


def _change_states(batch: BatchOperations, table: str, states: Sequence[str]) -> None:
    name = op.f(f"ck_{table}_state")
    batch.drop_constraint(name, type_="check")
    batch.create_check_constraint(name, _states(states))


def _add_up() -> None:
    """Sums of the charges that count, by dataset and by organisation."""
    connection = op.get_bind()
    filters: dict[str, int] = {
        dataset_id: int(count)
        for dataset_id, count in connection.execute(
            sa.text("SELECT dataset_id, count(*) FROM filters GROUP BY dataset_id")
        )
    }
    datasets = {
        row.id: [[0, 0, 0] for _ in range(filters.get(row.id, 0))]
        for row in connection.execute(sa.text("SELECT id FROM datasets"))
    }
    organisations: dict[tuple[str, str], list[list[int]]] = {}
    rows = connection.execute(
        sa.text(
            "SELECT e.dataset_id, e.organisation_id, c.position, c.epsilon_units, c.delta_units, "
            "e.state FROM charges c JOIN entries e ON e.id = c.entry_id"
        )
    )
    for dataset_id, organisation_id, position, epsilon, delta, state in rows:
        whole = datasets[dataset_id]
        own = organisations.setdefault((dataset_id, organisation_id), [[0, 0, 0] for _ in whole])
        if state in _CHARGED:
            for sums in (whole[position], own[position]):
                if _INFINITE in (epsilon, delta):
                    sums[2] += 1
                else:
                    sums[0] += epsilon
                    sums[1] += delta
    for dataset_id, totals in datasets.items():
        connection.execute(
            sa.text("UPDATE datasets SET totals = :totals WHERE id = :id"),
            {"id": dataset_id, "totals": json.dumps(totals)},
        )
    for (dataset_id, organisation_id), totals in organisations.items():
        connection.execute(
            sa.text(
                "INSERT INTO organisation_totals (dataset_id, organisation_id, totals) "
                "VALUES (:dataset, :organisation, :totals)"
            ),
            {
                "dataset": dataset_id,
                "organisation": organisation_id,
                "totals": json.dumps(totals),
            },
        )


def downgrade() -> None:
    # What the older tables have no place for would be forgotten, and spent budget given back.
    lost = (
        op.get_bind()
        .execute(
            sa.text(
                "SELECT (SELECT count(*) FROM jobs WHERE plan_position IS NOT NULL) + "
                "(SELECT count(*) FROM entries WHERE state IN ('awaiting_approval', 'denied')) + "
                "(SELECT count(*) FROM datasets WHERE books_id <> id)"
            )
        )
        .scalar_one()
    )
    if lost:
        raise RuntimeError(f"{lost} plans, approvals or budget groups have no place there")
    with op.batch_alter_table("releases") as batch:
        batch.drop_index(op.f("ix_releases_entry_id"))
        batch.create_unique_constraint(op.f("uq_releases_entry_id"), ["entry_id"])
    op.drop_index(op.f("uq_jobs_entry_id"), table_name="jobs")
    with op.batch_alter_table("jobs") as batch:
        batch.drop_constraint(op.f("uq_jobs_entry_id_plan_position"), type_="unique")
        batch.drop_constraint(op.f("ck_jobs_plan_position"), type_="check")
        batch.drop_column("plan_position")
        batch.create_unique_constraint(op.f("uq_jobs_entry_id"), ["entry_id"])
        _change_states(batch, "jobs", _OLD_STATES)
    with op.batch_alter_table("entries") as batch:
        batch.drop_index(op.f("ix_entries_books_id_state"))
        batch.drop_constraint(op.f("uq_entries_books_id_sequence"), type_="unique")
        batch.drop_constraint(op.f("fk_entries_books_id"), type_="foreignkey")
        batch.drop_column("books_id")
        batch.create_unique_constraint(
            op.f("uq_entries_dataset_id_sequence"), ["dataset_id", "sequence"]
        )
        batch.create_index(op.f("ix_entries_dataset_id_state"), ["dataset_id", "state"])
        _change_states(batch, "entries", _OLD_STATES)
    with op.batch_alter_table("datasets") as batch:
        batch.drop_index(op.f("ix_datasets_books_id"))
        batch.drop_constraint(op.f("fk_datasets_books_id"), type_="foreignkey")
        batch.drop_column("books_id")
        batch.drop_column("totals")
    op.drop_table("organisation_totals")
