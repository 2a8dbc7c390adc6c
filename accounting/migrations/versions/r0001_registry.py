"""The registry: organisations, keys, datasets, snapshots, grants.

Revision ID: 0001
Revises: nothing
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "organisations",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_organisations")),
        sa.UniqueConstraint("name", name=op.f("uq_organisations_name")),
    )
    op.create_table(
        "datasets",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("organisation_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("facts", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("chain_sequence", sa.BigInteger(), nullable=False),
        sa.Column("chain_hash", sa.String(length=64), nullable=False),
        sa.CheckConstraint("chain_sequence >= 0", name=op.f("ck_datasets_chain_sequence")),
        sa.ForeignKeyConstraint(
            ["organisation_id"], ["organisations.id"], name=op.f("fk_datasets_organisation_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_datasets")),
        sa.UniqueConstraint(
            "organisation_id", "name", name=op.f("uq_datasets_organisation_id_name")
        ),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("organisation_id", sa.String(length=64), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["organisation_id"], ["organisations.id"], name=op.f("fk_keys_organisation_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
        sa.UniqueConstraint("sha256", name=op.f("uq_keys_sha256")),
    )
    op.create_index(op.f("ix_keys_organisation_id"), "keys", ["organisation_id"], unique=False)
    op.create_table(
        "grants",
        sa.Column("dataset_id", sa.String(length=64), nullable=False),
        sa.Column("organisation_id", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_grants_dataset_id")),
        sa.ForeignKeyConstraint(
            ["organisation_id"], ["organisations.id"], name=op.f("fk_grants_organisation_id")
        ),
        sa.PrimaryKeyConstraint("dataset_id", "organisation_id", name=op.f("pk_grants")),
    )
    op.create_index(op.f("ix_grants_organisation_id"), "grants", ["organisation_id"], unique=False)
    op.create_table(
        "snapshots",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("dataset_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("location", sa.Text(), nullable=False),
        sa.Column("hmac", sa.Text(), nullable=False),
        sa.Column("sealed_key", sa.LargeBinary(), nullable=False),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("owner_warning", sa.Text(), nullable=True),
        sa.CheckConstraint("records >= 0", name=op.f("ck_snapshots_records")),
        sa.ForeignKeyConstraint(
            ["dataset_id"], ["datasets.id"], name=op.f("fk_snapshots_dataset_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_snapshots")),
    )
    op.create_index(op.f("ix_snapshots_dataset_id"), "snapshots", ["dataset_id"], unique=False)


def downgrade() -> None:
    op.drop_table("snapshots")
    op.drop_table("grants")
    op.drop_table("keys")
    op.drop_table("datasets")
    op.drop_table("organisations")
