"""keys, owners, budgets"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("key_hash", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("note", sa.String(), nullable=False),
        sa.Column("email", sa.String(), nullable=False),
        sa.Column("admin", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("key_hash"),
    )
    op.create_table(
        "budgets",
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=True),
        sa.Column("tokens_from", sa.BigInteger(), nullable=False),
        sa.Column("storage_bytes", sa.BigInteger(), nullable=True),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner"),
    )
    op.create_table(
        "token_counts",
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "key_id"),
    )
    op.execute(
        "INSERT INTO token_counts (owner, key_id, amount) SELECT owner, '', SUM(amount) FROM usage "
        "WHERE kind IN ('training', 'sampling_prefill', 'sampling_prefill_cached', 'sampling_sample') GROUP BY owner"
    )
    with op.batch_alter_table("sessions") as batch_op:
        batch_op.add_column(sa.Column("key_id", sa.String(), server_default=sa.text("''"), nullable=False))
    op.create_index(op.f("ix_checkpoints_owner"), "checkpoints", ["owner"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_checkpoints_owner"), table_name="checkpoints")
    with op.batch_alter_table("sessions") as batch_op:
        batch_op.drop_column("key_id")
    op.drop_table("token_counts")
    op.drop_table("budgets")
    op.drop_table("api_keys")
