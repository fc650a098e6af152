"""Tables of operations and custom losses, which a restart of the gateway must not lose."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, LargeBinary, false, text
from sqlalchemy.orm import Mapped, mapped_column, validates

from gateway.database.tables.base import Base
from gateway.database.tables.sessions import Session


class Operation(Base):
    """A submission that the gateway must be able to finish after a restart, or that it has refused."""

    __tablename__ = "operations"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[str]
    kind: Mapped[str]
    """The endpoint: create_model, load_weights or a kind of save; any endpoint of a refused request, or of a batch that
    the gateway has completed; copy_weights or import_weights, whose request_id is the path of the new checkpoint."""
    path: Mapped[str | None]
    """Tinker path that the operation loads, saves or copies."""
    sampling_session_id: Mapped[str | None]
    """The sampling session that an ephemeral save makes; absent for other operations."""
    inflight: Mapped[bool] = mapped_column(server_default=false())
    """True for a save with kind "inflight"."""
    error: Mapped[str | None]
    """The reason for which the gateway has refused the request, of which the trainer knows at most the seq_id. Absent
    for an accepted operation."""
    fingerprint: Mapped[str]
    """Hash of the request, by which a repeat is told from a conflict."""
    created_at: Mapped[float]
    gateway_id: Mapped[str | None]
    """The gateway that stores the results of the operation."""
    settled_at: Mapped[float | None]
    """Time at which the results were stored. A checkpoint among them may have been deleted since."""

    __table_args__ = (
        Index("ix_operations_model_id", "model_id"),
        Index("ix_operations_settled_at", "settled_at"),
        Index(
            "ix_operations_refused_at",
            "created_at",
            sqlite_where=text("error IS NOT NULL"),
            postgresql_where=text("error IS NOT NULL"),
        ),
    )

    @validates("error")
    def _storable(self, _: str, error: str | None) -> str | None:
        """Escapes NUL, which PostgreSQL does not store. The error may quote text of the client."""
        return None if error is None else error.replace("\0", "\\0")


class CustomLoss(Base):
    """A loss that a client has traced."""

    __tablename__ = "custom_losses"

    loss_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey(Session.session_id), index=True)
    message: Mapped[bytes] = mapped_column(LargeBinary)
    """A serialized tinsmith.v1.CustomLoss."""
    created_at: Mapped[float]
