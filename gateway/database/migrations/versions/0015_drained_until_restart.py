"""trainers that are drained until they restart"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("drained_trainers") as batch:
        batch.add_column(sa.Column("boot_id", sa.String(), nullable=True))
