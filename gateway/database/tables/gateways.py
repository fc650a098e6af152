"""The gateways behind one database, and what they share."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger
from sqlalchemy.orm import Mapped, mapped_column

from gateway.database.tables.base import Base


class GatewayRow(Base):
    """One of several gateways behind the database: it lives as long as its row is here."""

    __tablename__ = "gateways"

    gateway_id: Mapped[str] = mapped_column(primary_key=True)
    """New at every start."""
    url: Mapped[str]
    """Where the others reach it."""
    beat: Mapped[int] = mapped_column(BigInteger)
    """Goes up as long as it lives; who sees that it no longer does takes the row away."""
    busy_models: Mapped[list[str]] = mapped_column(JSON)
    """Models for which it waits for the trainer."""


class Lease(Base):
    """Work that one of the gateways does for all."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str]


class Setting(Base):
    """A fact that all gateways behind one database share."""

    __tablename__ = "settings"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]
