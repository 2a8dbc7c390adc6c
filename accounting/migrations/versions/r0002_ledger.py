"""The books: budgets, filters, entries, charges, jobs, releases, the chain, leases.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("token", sa.String(length=64), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )
    op.create_table(
        "budgets",
        sa.Column("dataset_id", sa.String(length=64), nullable=False),
        sa.Column("budget", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_id"], ["datasets.id"], name=op.f("fk_budgets_dataset_id")
        ),
        sa.PrimaryKeyConstraint("dataset_id", name=op.f("pk_budgets")),
    )
    op.create_table(
        "chain",
        sa.Column("dataset_id", sa.String(length=64), nullable=False),
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("previous_hash", sa.String(length=64), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.CheckConstraint("sequence >= 1", name=op.f("ck_chain_sequence")),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_chain_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", "sequence", name=op.f("pk_chain")),
    )
    op.create_table(
        "entries",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("dataset_id", sa.String(length=64), nullable=False),
        sa.Column("organisation_id", sa.String(length=64), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("parent_entry_id", sa.String(length=64), nullable=True),
        sa.Column("mechanism", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("mechanism_digest", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "state IN ('reserved', 'started', 'released', 'failed_charged', "
            "'cancelled', 'expired')",
            name=op.f("ck_entries_state"),
        ),
        sa.CheckConstraint("sequence >= 1", name=op.f("ck_entries_sequence")),
        sa.ForeignKeyConstraint(
            ["dataset_id"], ["datasets.id"], name=op.f("fk_entries_dataset_id")
        ),
        sa.ForeignKeyConstraint(
            ["organisation_id"], ["organisations.id"], name=op.f("fk_entries_organisation_id")
        ),
        sa.ForeignKeyConstraint(
            ["parent_entry_id"], ["entries.id"], name=op.f("fk_entries_parent_entry_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_entries")),
        sa.UniqueConstraint("dataset_id", "sequence", name=op.f("uq_entries_dataset_id_sequence")),
    )
    op.create_index(
        op.f("ix_entries_dataset_id_state"), "entries", ["dataset_id", "state"], unique=False
    )
    op.create_table(
        "filters",
        sa.Column("dataset_id", sa.String(length=64), nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("order", sa.Text(), nullable=False),
        sa.Column("delta_units", sa.BigInteger(), nullable=False),
        sa.Column("cap_units", sa.BigInteger(), nullable=False),
        sa.Column("delta_per_release_units", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("cap_units >= 0", name=op.f("ck_filters_cap_units")),
        sa.CheckConstraint(
            "delta_per_release_units >= 0", name=op.f("ck_filters_delta_per_release_units")
        ),
        sa.CheckConstraint("delta_units >= 0", name=op.f("ck_filters_delta_units")),
        sa.CheckConstraint("position >= 0", name=op.f("ck_filters_position")),
        sa.ForeignKeyConstraint(
            ["dataset_id"], ["datasets.id"], name=op.f("fk_filters_dataset_id")
        ),
        sa.PrimaryKeyConstraint("dataset_id", "position", name=op.f("pk_filters")),
        sa.UniqueConstraint("dataset_id", "order", name=op.f("uq_filters_dataset_id_order")),
    )
    op.create_table(
        "charges",
        sa.Column("entry_id", sa.String(length=64), nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("epsilon_units", sa.BigInteger(), nullable=False),
        sa.Column("delta_units", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("delta_units >= 0", name=op.f("ck_charges_delta_units")),
        sa.CheckConstraint("epsilon_units >= 0", name=op.f("ck_charges_epsilon_units")),
        sa.CheckConstraint("position >= 0", name=op.f("ck_charges_position")),
        sa.ForeignKeyConstraint(["entry_id"], ["entries.id"], name=op.f("fk_charges_entry_id")),
        sa.PrimaryKeyConstraint("entry_id", "position", name=op.f("pk_charges")),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("dataset_id", sa.String(length=64), nullable=False),
        sa.Column("organisation_id", sa.String(length=64), nullable=False),
        sa.Column("entry_id", sa.String(length=64), nullable=False),
        sa.Column("snapshot_id", sa.String(length=64), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("body_hash", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("mechanism", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("post_processing", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("certificate_epsilon", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("max_attempts", sa.BigInteger(), nullable=False),
        sa.Column("lease_token", sa.String(length=64), nullable=True),
        sa.Column("lease_expires_at", sa.BigInteger(), nullable=True),
        sa.Column("sealed_seed", sa.LargeBinary(), nullable=True),
        sa.Column("job_digest", sa.String(length=64), nullable=True),
        sa.Column("started_sequence", sa.BigInteger(), nullable=True),
        sa.Column("progress_done", sa.BigInteger(), nullable=False),
        sa.Column("progress_total", sa.BigInteger(), nullable=False),
        sa.Column("sent_at", sa.BigInteger(), nullable=True),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("problem_code", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "(state = 'started') = (lease_token IS NOT NULL)", name=op.f("ck_jobs_lease_token")
        ),
        sa.CheckConstraint(
            "(state = 'started') = (sealed_seed IS NOT NULL)", name=op.f("ck_jobs_seed")
        ),
        sa.CheckConstraint(
            "state IN ('reserved', 'started', 'released', 'failed_charged', "
            "'cancelled', 'expired')",
            name=op.f("ck_jobs_state"),
        ),
        sa.CheckConstraint(
            "(lease_token IS NULL) = (lease_expires_at IS NULL)",
            name=op.f("ck_jobs_lease_expires_at"),
        ),
        sa.CheckConstraint(
            "attempts >= 0 AND attempts <= max_attempts", name=op.f("ck_jobs_attempts")
        ),
        sa.CheckConstraint(
            "progress_done >= 0 AND progress_total >= 0", name=op.f("ck_jobs_progress")
        ),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_jobs_dataset_id")),
        sa.ForeignKeyConstraint(["entry_id"], ["entries.id"], name=op.f("fk_jobs_entry_id")),
        sa.ForeignKeyConstraint(
            ["organisation_id"], ["organisations.id"], name=op.f("fk_jobs_organisation_id")
        ),
        sa.ForeignKeyConstraint(
            ["snapshot_id"], ["snapshots.id"], name=op.f("fk_jobs_snapshot_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("entry_id", name=op.f("uq_jobs_entry_id")),
        sa.UniqueConstraint(
            "organisation_id",
            "dataset_id",
            "idempotency_key",
            name=op.f("uq_jobs_organisation_id_dataset_id_idempotency_key"),
        ),
    )
    op.create_index(op.f("ix_jobs_dataset_id"), "jobs", ["dataset_id"], unique=False)
    op.create_index(op.f("ix_jobs_state"), "jobs", ["state"], unique=False)
    op.create_table(
        "releases",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("dataset_id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("entry_id", sa.String(length=64), nullable=False),
        sa.Column("location", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("certificate", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("bytes >= 0", name=op.f("ck_releases_bytes")),
        sa.ForeignKeyConstraint(
            ["dataset_id"], ["datasets.id"], name=op.f("fk_releases_dataset_id")
        ),
        sa.ForeignKeyConstraint(["entry_id"], ["entries.id"], name=op.f("fk_releases_entry_id")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_releases_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_releases")),
        sa.UniqueConstraint("entry_id", name=op.f("uq_releases_entry_id")),
        sa.UniqueConstraint("job_id", name=op.f("uq_releases_job_id")),
    )
    op.create_index(op.f("ix_releases_dataset_id"), "releases", ["dataset_id"], unique=False)


def downgrade() -> None:
    # Without its books a dataset's spent budget would be given back.
    entries = op.get_bind().execute(sa.text("SELECT count(*) FROM entries")).scalar_one()
    if entries:
        raise RuntimeError(f"the ledger holds {entries} entries; its tables are not dropped")
    op.drop_table("releases")
    op.drop_table("jobs")
    op.drop_table("charges")
    op.drop_table("filters")
    op.drop_table("entries")
    op.drop_table("chain")
    op.drop_table("budgets")
    op.drop_table("leases")
