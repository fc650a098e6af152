"""the whole surface"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit_events",
        sa.Column("event_id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("category", sa.String(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("event_id"),
    )
    with op.batch_alter_table("audit_events") as batch_op:
        batch_op.create_index(batch_op.f("ix_audit_events_at"), ["at"], unique=False)

    op.create_table(
        "retired_checkpoints",
        sa.Column("location", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("version_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("retired_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("location"),
    )
    op.create_table(
        "sample_marks",
        sa.Column("sampling_session_id", sa.String(), nullable=False),
        sa.Column("clone_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("low", sa.BigInteger(), nullable=False),
        sa.Column("high", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("sampling_session_id", "clone_id"),
    )
    op.create_table(
        "sequence_records",
        sa.Column("sequence_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("version_id", sa.String(), nullable=False),
        sa.Column("prompt", sa.LargeBinary(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("sequence_id"),
    )
    with op.batch_alter_table("sequence_records") as batch_op:
        batch_op.create_index(batch_op.f("ix_sequence_records_expires_at"), ["expires_at"], unique=False)
        batch_op.create_index(batch_op.f("ix_sequence_records_session_id"), ["session_id"], unique=False)

    op.create_table(
        "spans",
        sa.Column("span_id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("track", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("submitted_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("computed_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("span_id"),
    )
    with op.batch_alter_table("spans") as batch_op:
        batch_op.create_index(batch_op.f("ix_spans_ended_at"), ["ended_at"], unique=False)
        batch_op.create_index("ix_spans_session_id", ["session_id"], unique=False)

    op.create_table(
        "usage",
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("hour", "owner", "session_id", "base_model", "kind"),
    )
    op.create_table(
        "custom_losses",
        sa.Column("loss_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("message", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"]),
        sa.PrimaryKeyConstraint("loss_id"),
    )
    with op.batch_alter_table("custom_losses") as batch_op:
        batch_op.create_index(batch_op.f("ix_custom_losses_session_id"), ["session_id"], unique=False)

    op.create_table(
        "settings",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )

    with op.batch_alter_table("checkpoints") as batch_op:
        batch_op.add_column(sa.Column("optimizer", sa.String(), server_default=sa.text("'adamw'"), nullable=False))
        batch_op.add_column(sa.Column("public", sa.Boolean(), server_default=sa.false(), nullable=False))
        batch_op.add_column(sa.Column("inflight", sa.Boolean(), server_default=sa.false(), nullable=False))

    with op.batch_alter_table("models") as batch_op:
        batch_op.add_column(sa.Column("last_request_at", sa.Double(), nullable=True))
        batch_op.add_column(sa.Column("inflight_version_id", sa.String(), nullable=True))
        batch_op.add_column(sa.Column("inflight_location", sa.String(), nullable=True))

    with op.batch_alter_table("operations") as batch_op:
        batch_op.add_column(sa.Column("inflight", sa.Boolean(), server_default=sa.false(), nullable=False))

    with op.batch_alter_table("sampling_sessions") as batch_op:
        batch_op.add_column(sa.Column("inflight_run_id", sa.String(), nullable=True))
        batch_op.add_column(sa.Column("num_joined", sa.Integer(), server_default=sa.text("0"), nullable=False))


def downgrade() -> None:
    for table, columns in {
        "sampling_sessions": ("num_joined", "inflight_run_id"),
        "operations": ("inflight",),
        "models": ("inflight_location", "inflight_version_id", "last_request_at"),
        "checkpoints": ("inflight", "public", "optimizer"),
    }.items():
        with op.batch_alter_table(table) as batch_op:
            for column in columns:
                batch_op.drop_column(column)
    for table in (
        "settings",
        "custom_losses",
        "usage",
        "spans",
        "sequence_records",
        "sample_marks",
        "retired_checkpoints",
        "audit_events",
    ):
        op.drop_table(table)
