"""Runs revisions on the connection, and in the transaction, that the caller opened.

There is no alembic.ini: the database is the caller's to choose, and a migration that opened its own
connection could not share the caller's lock.
"""

from __future__ import annotations

from alembic import context

from accounting.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite changes a table by rebuilding it
)
with context.begin_transaction():
    context.run_migrations()
