"""several gateways behind one database"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gateways",
        sa.Column("gateway_id", sa.String(), nullable=False),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.Column("busy_models", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("gateway_id"),
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "deletions",
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "idempotency_key", "path"),
    )
    with op.batch_alter_table("deletions") as batch_op:
        batch_op.create_index(batch_op.f("ix_deletions_at"), ["at"], unique=False)
    op.create_table(
        "counted_operations",
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("model_id", "seq_id"),
    )
    with op.batch_alter_table("sample_marks") as batch_op:
        batch_op.add_column(sa.Column("home", sa.String(), nullable=True))
    with op.batch_alter_table("operations") as batch_op:
        batch_op.add_column(sa.Column("gateway_id", sa.String(), nullable=True))
        batch_op.add_column(sa.Column("settled_at", sa.Double(), nullable=True))
        batch_op.create_index("ix_operations_settled_at", ["settled_at"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("operations") as batch_op:
        batch_op.drop_index("ix_operations_settled_at")
        batch_op.drop_column("settled_at")
        batch_op.drop_column("gateway_id")
    with op.batch_alter_table("sample_marks") as batch_op:
        batch_op.drop_column("home")
    for table in ("counted_operations", "deletions", "leases", "gateways"):
        op.drop_table(table)
