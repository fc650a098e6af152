"""ended sessions by time"""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_sessions_ended_at", "sessions", ["ended_at"])
