"""sessions of an owner by time"""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_sessions_owner_created_at", "sessions", ["owner", "created_at", "session_id"])
