"""Runs migrations on the connection that `Database.migrate` passes."""

from __future__ import annotations

from alembic import context

from gateway.database.tables import (  # all of them, so that the metadata is complete
    checkpoints,  # noqa: F401
    gateways,  # noqa: F401
    history,  # noqa: F401
    moves,  # noqa: F401
    operations,  # noqa: F401
    samples,  # noqa: F401
    sessions,  # noqa: F401
    tenants,  # noqa: F401
)
from gateway.database.tables.base import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite cannot alter columns in place
)
with context.begin_transaction():
    context.run_migrations()
