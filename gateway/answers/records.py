"""Answers about the audit log, usage and storage."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class TraceExport(TypedDict):
    status: Literal["ready"]
    url: str


class AuditEntry(TypedDict):
    timestamp: str
    event: str
    event_details: dict[str, Any]
    model_id: NotRequired[str | None]
    tinker_path: NotRequired[str | None]
    purpose: NotRequired[str | None]


class AuditLog(TypedDict):
    entries: list[AuditEntry]


class UsageEvents(TypedDict):
    data: list[dict[str, Any]]
    sessions: dict[str, dict[str, Any]]
    cost_data_through: str | None


class StorageRow(TypedDict):
    project_id: str
    org_user_urn: str
    user_email: str | None
    user_name: str | None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float


class StorageFacts(TypedDict):
    effective_rate_usd_per_gigabyte_month: float
    data: list[StorageRow]
