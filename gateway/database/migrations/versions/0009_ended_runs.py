"""runs that are ended before their session"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("ended_at", sa.Float(), nullable=True))
