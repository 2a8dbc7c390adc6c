"""Alembic's environment and revisions; :meth:`accounting.tables.Database.upgrade` runs them."""
