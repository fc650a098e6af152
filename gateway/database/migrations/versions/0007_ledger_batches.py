"""which batches of usage were written"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "ledger_batches",
        sa.Column("ledger_id", sa.String(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("written_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("ledger_id"),
    )
