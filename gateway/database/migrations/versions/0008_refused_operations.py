"""refused operations by time"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    is_refused = sa.text("error IS NOT NULL")
    op.create_index(
        "ix_operations_refused_at", "operations", ["created_at"], sqlite_where=is_refused, postgresql_where=is_refused
    )
