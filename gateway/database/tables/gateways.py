"""Tables of the gateways behind one database, and of what they share."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger
from sqlalchemy.orm import Mapped, mapped_column

from gateway.database.tables.base import Base


class GatewayRow(Base):
    """One of several gateways behind the database. A gateway is alive as long as its row exists."""

    __tablename__ = "gateways"

    gateway_id: Mapped[str] = mapped_column(primary_key=True)
    """A new id at every start."""
    url: Mapped[str]
    """URL under which the other gateways reach this one."""
    beat: Mapped[int] = mapped_column(BigInteger)
    """Counter that the gateway increments every second. When it stops growing, another gateway deletes the row."""
    busy_models: Mapped[list[str]] = mapped_column(JSON)
    """Models with operations in work at this gateway."""


class Lease(Base):
    """Work that only one of the gateways, the holder, does: a kind of background work, or the numbering of a model's
    operations."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str]


class Setting(Base):
    """A named value that all gateways behind one database share."""

    __tablename__ = "settings"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]
