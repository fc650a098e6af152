"""Runs migrations on the connection that gateway.store gives."""

from __future__ import annotations

from alembic import context

from gateway.database.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite cannot alter columns in place
)
with context.begin_transaction():
    context.run_migrations()
