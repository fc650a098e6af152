"""moves of runs between trainers, and trainers that are being drained"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "moves",
        sa.Column("model_id", sa.String(), primary_key=True),
        sa.Column("move_id", sa.String(), nullable=False),
        sa.Column("source_id", sa.String(), nullable=False),
        sa.Column("target_id", sa.String(), nullable=False),
        sa.Column("begun_at", sa.Float(), nullable=False),
        sa.Column("is_released", sa.Boolean(), nullable=False),
        sa.Column("is_done", sa.Boolean(), nullable=False),
    )
    op.create_table(
        "drained_trainers",
        sa.Column("trainer_id", sa.String(), primary_key=True),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("problems", sa.JSON(), nullable=False),
    )
