"""sample requests that may have killed samplers"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "suspects",
        sa.Column("content", sa.String(), primary_key=True),
        sa.Column("deaths", sa.Integer(), nullable=False),
        sa.Column("is_condemned", sa.Boolean(), nullable=False),
        sa.Column("died_at", sa.Float(), nullable=False),
    )
    op.create_index("ix_suspects_died_at", "suspects", ["died_at"])
