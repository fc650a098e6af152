"""what the dashboard shows"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "metric_points",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("first_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("num_steps", sa.Integer(), nullable=False),
        sa.Column("num_operations", sa.Integer(), nullable=False),
        sa.Column("sums", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "seq_id"),
    )
    with op.batch_alter_table("metric_points") as batch_op:
        batch_op.create_index(batch_op.f("ix_metric_points_at"), ["at"], unique=False)

    op.create_table(
        "recent_samples",
        sa.Column("sample_id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("version_id", sa.String(), nullable=False),
        sa.Column("num_prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("prompt", sa.LargeBinary(), nullable=False),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("ranks", sa.LargeBinary(), nullable=False),
        sa.Column("is_finished", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("sample_id"),
    )
    with op.batch_alter_table("recent_samples") as batch_op:
        batch_op.create_index(batch_op.f("ix_recent_samples_at"), ["at"], unique=False)
        batch_op.create_index("ix_recent_samples_run_id_owner", ["run_id", "owner"], unique=False)
