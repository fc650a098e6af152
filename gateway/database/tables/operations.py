"""What clients have sent that must outlive a restart of the gateway."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, LargeBinary, false, text
from sqlalchemy.orm import Mapped, mapped_column, validates

from gateway.database.tables.base import Base
from gateway.database.tables.sessions import Session


class Operation(Base):
    """What the gateway must remember of a submission to finish it after a restart."""

    __tablename__ = "operations"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[str]
    kind: Mapped[str]
    """Endpoint: create_model, load_weights, save_weights, save_weights_for_sampler, or another that was refused;
    copy_weights, import_weights, whose request_id is the path of what they make."""
    path: Mapped[str | None]
    """Path that was loaded or copied, or is being saved."""
    sampling_session_id: Mapped[str | None]
    """Set for an ephemeral save."""
    inflight: Mapped[bool] = mapped_column(server_default=false())
    """A save with kind "inflight"."""
    error: Mapped[str | None]
    """Why the gateway refused it; the trainer then has only its number."""
    fingerprint: Mapped[str]
    """Hash of the request, to tell a repeat from a conflict."""
    created_at: Mapped[float]
    gateway_id: Mapped[str | None]
    """Who sees to it that what the trainer answers is written down."""
    settled_at: Mapped[float | None]
    """When that was done; what it has made may have gone since."""

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
        """It may name a key that the client chose, and PostgreSQL takes no NUL character."""
        return None if error is None else error.replace("\0", "\\0")


class CustomLoss(Base):
    """One loss that a client has traced."""

    __tablename__ = "custom_losses"

    loss_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey(Session.session_id), index=True)
    message: Mapped[bytes] = mapped_column(LargeBinary)
    """A serialized tinsmith.v1.CustomLoss."""
    created_at: Mapped[float]
